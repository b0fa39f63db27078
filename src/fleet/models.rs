//! Which model ids a backend answers for.

/// One entry of a backend's `models`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The id, or a glob in which `*` stands for any run of characters.
    pub id: String,
    /// Other names for it.
    pub aliases: Vec<String>,
}

/// How well an entry fits, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The id itself.
    Exact,
    /// An alias.
    Alias,
    /// A glob.
    Glob,
}

impl ModelName {
    /// How well this entry fits `model`, if at all.
    pub fn fit(&self, model: &str) -> Option<Fit> {
        if self.id == model {
            Some(Fit::Exact)
        } else if self.aliases.iter().any(|alias| alias == model) {
            Some(Fit::Alias)
        } else if self.id.contains('*') && glob(&self.id, model) {
            Some(Fit::Glob)
        } else {
            None
        }
    }
}

/// Whether `text` fits `pattern`, in which `*` stands for any run of characters.
pub fn glob(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(head) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let tail = pieces.pop().unwrap_or_default();
    for piece in pieces {
        match text.find(piece) {
            Some(at) => text = text.get(at + piece.len()..).unwrap_or_default(),
            None => return false,
        }
    }
    text.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("*", "", true)]
    #[case("lora-*", "lora-7", true)]
    #[case("lora-*", "alora-7", false)]
    #[case("*coder*", "deepcoder-7b", true)]
    #[case("a*b*c", "a-b-b-c", true)]
    #[case("a*b*c", "a-c-b", false)]
    #[case("a*a", "a", false)]
    #[case("plain", "plain", true)]
    fn a_star_stands_for_any_run(#[case] pattern: &str, #[case] text: &str, #[case] fits: bool) {
        assert_eq!(glob(pattern, text), fits);
    }
}
