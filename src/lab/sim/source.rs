//! The texts of requests: the target's output, and the model drafter's choice at every position of
//! it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use foretell_core::draft::{Features, Node, Source, Tree, Vote};
use foretell_core::units::{SplitMix64, TokenId};

/// Tokens from here on are in no vocabulary: the drafter's continuation of a text that has
/// diverged.
pub const OUTSIDE: TokenId = 4_000_000_000;
/// The simulated target's token at a position that is not on the true path.
pub const ASTRAY: TokenId = 3_999_999_999;

/// One request with its text.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Token ids of the prompt.
    pub prompt: Vec<TokenId>,
    /// Token ids of the complete output.
    pub output: Vec<TokenId>,
    /// The model drafter's choice at each output position, given the true text before it; empty
    /// without a model drafter.
    #[serde(default)]
    pub choices: Vec<TokenId>,
    /// The drafter's top-1 minus top-2 score at each position; empty if not known.
    #[serde(default)]
    pub margins: Vec<f32>,
    /// Sampling temperature of the output. The target writes the output's token at each position
    /// for any draft; a choice is right if it is that token.
    #[serde(default)]
    pub temperature: f64,
    /// Probability by draft position that a choice is right: at depth `d` it is `fades[d]` (the
    /// last one counts for all beyond), given that the choice is right after the true text. Empty:
    /// the position in the draft does not matter.
    #[serde(skip)]
    pub fades: Vec<f64>,
}

/// Requests to be sent in turn.
pub type Scripts = Arc<[Arc<Script>]>;

/// Error in a file of traces.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    File {
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line is not a trace.
    #[error("{path}:{line}: {reason}")]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, counted from 1.
        line: usize,
        /// The error in it.
        reason: String,
    },
    /// Its texts have more than one temperature.
    #[error("{path}: allowed one temperature, got {first} and {other}")]
    Mixed {
        /// Path of the file.
        path: PathBuf,
        /// That of the first line.
        first: f64,
        /// Another.
        other: f64,
    },
    /// It contains no request.
    #[error("{0}: allowed at least one request, got none")]
    Empty(PathBuf),
}

/// Reads recorded requests, one JSON object a line.
///
/// # Errors
/// A file or line that cannot be read, with its number.
pub fn read(path: &Path) -> Result<Scripts, Unreadable> {
    let text =
        std::fs::read_to_string(path).map_err(|source| Unreadable::File { path: path.to_owned(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(index, line)| {
        parse(line).map_err(|reason| Unreadable::Line { path: path.to_owned(), line: index + 1, reason })
    });
    let scripts: Vec<Arc<Script>> = parsed.map(|script| script.map(Arc::new)).collect::<Result<_, _>>()?;
    let first = scripts.first().map_or(0.0, |script| script.temperature);
    if let Some(other) = scripts.iter().find(|script| script.temperature.to_bits() != first.to_bits()) {
        return Err(Unreadable::Mixed { path: path.to_owned(), first, other: other.temperature });
    }
    if scripts.is_empty() { Err(Unreadable::Empty(path.to_owned())) } else { Ok(scripts.into()) }
}

fn parse(line: &str) -> Result<Script, String> {
    let script: Script = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let positions = script.output.len();
    for (name, len) in [("choices", script.choices.len()), ("margins", script.margins.len())] {
        if len != 0 && len != positions {
            return Err(format!(
                "{name}: allowed none or one for each of {positions} output tokens, got {len}"
            ));
        }
    }
    if script.prompt.is_empty() || positions == 0 {
        return Err("prompt and output: allowed at least one token each".to_owned());
    }
    if !(0.0..=2.0).contains(&script.temperature) {
        return Err(format!("temperature: allowed 0 to 2, got {}", script.temperature));
    }
    let outside = script.prompt.iter().chain(&script.output).find(|&&token| token >= ASTRAY);
    outside.map_or(Ok(()), |token| Err(format!("allowed ids below {ASTRAY}, got {token}")))?;
    Ok(script)
}

impl Script {
    /// True if a model drafter was recorded with it.
    pub fn has_model(&self) -> bool {
        !self.choices.is_empty()
    }

    /// The true token at an output position; [`ASTRAY`] beyond the end.
    pub fn truth(&self, position: usize) -> TokenId {
        self.output.get(position).copied().unwrap_or(ASTRAY)
    }

    /// The drafter's choice at an output position after the true text, as token at `depth` of a
    /// draft.
    pub fn choice(&self, position: usize, depth: usize) -> TokenId {
        let choice = self.choices.get(position).copied().unwrap_or(OUTSIDE);
        let Some(&fade) = self.fades.get(depth).or(self.fades.last()) else { return choice };
        let stays_right =
            SplitMix64::at(SplitMix64::mix(position as u64) ^ self.output.len() as u64, depth) < fade;
        if stays_right { choice } else { OUTSIDE + 1 }
    }

    /// A chain of at most `gamma` tokens of the model drafter after `done` output tokens: its
    /// choices while they are right, and tokens of no vocabulary after the first wrong one.
    pub fn draft(&self, done: usize, gamma: usize) -> Tree {
        let (mut tree, mut lost) = (Tree::default(), false);
        for depth in 0..gamma {
            let position = done + depth;
            let token = if lost { OUTSIDE + depth as TokenId } else { self.choice(position, depth) };
            lost |= token != self.truth(position);
            let margin = self.margins.get(position).copied().unwrap_or(0.0);
            let vote = Vote::new(Source::Model, Features { margin, ..Features::default() });
            tree.push(Node::new(token, depth.checked_sub(1), vote));
        }
        tree
    }

    /// Its choices at the output positions `from..=done` after the true text.
    pub fn shadow(&self, from: usize, done: usize) -> Vec<Option<TokenId>> {
        (from..=done.min(self.output.len().saturating_sub(1)))
            .map(|position| Some(self.choice(position, 0)))
            .collect()
    }

    /// Number of nodes along one path of the draft that match the text after `done` output tokens.
    pub fn followed(&self, draft: &Tree, done: usize) -> usize {
        let (mut position, mut depth) = (None, 0);
        while let Some(node) = draft.child(position, self.truth(done + depth)) {
            position = Some(node);
            depth += 1;
        }
        depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script() -> Script {
        Script {
            prompt: vec![1, 2],
            output: vec![10, 11, 12, 13],
            choices: vec![10, 11, 99, 13],
            ..Script::default()
        }
    }

    #[test]
    fn a_draft_follows_the_choices_to_the_first_mismatch() {
        let draft = script().draft(0, 4);
        let tokens: Vec<TokenId> = draft.nodes().iter().map(|node| node.token).collect();
        assert_eq!(tokens[..3], [10, 11, 99]);
        assert!(tokens[3] >= OUTSIDE, "tokens after a wrong token are not the choices after the true one");
        assert_eq!((script().followed(&draft, 0), script().followed(&draft, 1)), (2, 0));
        assert_eq!(script().shadow(1, 9), [11, 99, 13].map(Some));
    }

    #[test]
    fn a_fading_drafter_gets_worse_along_its_draft_only() {
        let text: Vec<TokenId> = (0..2_000).collect();
        let script =
            Script { output: text.clone(), choices: text, fades: vec![1.0, 0.5], ..Script::default() };
        let right = |depth| {
            (0..2_000).filter(|&position| script.choice(position, depth) == script.truth(position)).count()
        };
        assert_eq!(right(0), 2_000);
        assert!((900..1_100).contains(&right(1)) && (900..1_100).contains(&right(7)));
    }

    #[test]
    fn an_invalid_trace_line_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.jsonl");
        let wrong = |text: &str| {
            std::fs::write(&path, text).expect("written");
            read(&path).expect_err("wrong").to_string()
        };
        let good = r#"{"prompt":[1],"output":[2,3],"choices":[2,9],"margins":[0.5,0.1]}"#;
        let name = path.display().to_string();
        assert_eq!(wrong("\n"), format!("{name}: allowed at least one request, got none"));
        let uneven = good.replace("[2,9]", "[2]");
        assert_eq!(
            wrong(&format!("{good}\n\n{uneven}\n")),
            format!("{name}:3: choices: allowed none or one for each of 2 output tokens, got 1")
        );
        assert!(wrong(r#"{"prompt":[1],"output":[2],"more":1}"#).contains("unknown field `more`"));
        let warm = |temperature: &str| good.replace("[0.5,0.1]", &format!("[0.5,0.1],{temperature}"));
        assert!(wrong(&warm(r#""temperature":9"#)).ends_with(":1: temperature: allowed 0 to 2, got 9"));
        let sampled = warm(r#""temperature":0.7"#);
        let mixed = wrong(&format!("{sampled}\n{good}\n"));
        assert_eq!(mixed, format!("{name}: allowed one temperature, got 0.7 and 0"));
        std::fs::write(&path, format!("{sampled}\n{sampled}\n")).expect("written");
        let scripts = read(&path).expect("good");
        assert_eq!((scripts[1].temperature, &scripts[0].choices[..]), (0.7, &[2, 9][..]));
    }
}
