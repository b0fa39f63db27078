//! The model ids that a backend answers for.

use foretell_policy::Glob;

/// One entry of a backend's `models`.
///
/// An entry decides a request's destination, never its content: the name reaches the backend as the
/// client wrote it, be it an id, an alias or an adapter's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelName {
    /// The id, or a glob in which `*` matches any characters and `?` matches one.
    pub id: String,
    /// Other names under which the backend serves it.
    pub aliases: Vec<String>,
}

/// How well an entry matches, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The id itself.
    Exact,
    Alias,
    Glob,
}

impl ModelName {
    /// The names without wildcards: the id unless it is a glob, and the aliases.
    pub fn exact(&self) -> impl Iterator<Item = &str> {
        let id = Some(self.id.as_str()).filter(|id| Glob::new(id).is_exact());
        id.into_iter().chain(self.aliases.iter().map(String::as_str))
    }

    /// How well this entry matches `model`; `None` if it does not.
    pub fn fit(&self, model: &str) -> Option<Fit> {
        if self.id == model {
            Some(Fit::Exact)
        } else if self.aliases.iter().any(|alias| alias == model) {
            Some(Fit::Alias)
        } else if is_pattern(&self.id, model) {
            Some(Fit::Glob)
        } else {
            None
        }
    }
}

/// True if `id` is a pattern that matches `model`: the same patterns as in policies.
fn is_pattern(id: &str, model: &str) -> bool {
    let pattern = Glob::new(id);
    !pattern.is_exact() && pattern.matches(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_goes_before_an_alias_and_an_alias_before_a_pattern() {
        let name = ModelName { id: "lora-?".into(), aliases: vec!["small".into()] };
        assert_eq!(name.fit("lora-?"), Some(Fit::Exact));
        assert_eq!(name.fit("small"), Some(Fit::Alias));
        assert_eq!(name.fit("lora-7"), Some(Fit::Glob));
        assert_eq!(name.fit("lora-77"), None);
    }
}
