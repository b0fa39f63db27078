//! DeepSeek R1: reasoning between two marker tokens, whoever opened it.
//!
//! The server looks only at token ids. A stream is reasoning up to the end token; unstreamed
//! answers are split by the markers' text.

use super::Vocabulary;

use foretell_core::session::parse::Parsed;
use foretell_core::units::TokenId;

const START: &str = "<think>";
const END: &str = "</think>";

/// The two tokens. Without them the server does not start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Think {
    start: TokenId,
    end: TokenId,
}

impl Think {
    pub fn new(vocabulary: &Vocabulary<'_>) -> Option<Self> {
        Some(Self { start: (vocabulary.id)(START)?, end: (vocabulary.id)(END)? })
    }

    /// True if the prompt closed its last block.
    pub fn has_ended(self, prompt: &[TokenId]) -> bool {
        prompt.iter().rev().find(|&&id| id == self.start || id == self.end) == Some(&self.end)
    }

    /// Reasoning of one token; `None` as the second if reasoning goes on.
    pub fn push(self, token: TokenId, text: &str) -> (Parsed, bool) {
        let is_marker = token == self.start || token == self.end;
        let reasoning = if is_marker { String::new() } else { text.to_owned() };
        (Parsed { reasoning, ..Parsed::default() }, token == self.end)
    }

    /// Tokens between markers of the output; those before the first start marker do not count.
    pub fn count(self, depth: &mut u32, token: TokenId) -> u64 {
        if token == self.start {
            *depth += 1;
        } else if token == self.end {
            *depth = depth.saturating_sub(1);
        } else if *depth > 0 {
            return 1;
        }
        0
    }
}

/// Reasoning and content of a complete output.
pub(super) fn unstreamed(output: &str) -> (Option<String>, Option<String>) {
    let output = output.split_once(START).map_or(output, |(_, after)| after);
    match output.split_once(END) {
        None => (Some(output.to_owned()), None),
        Some((reasoning, content)) => {
            (Some(reasoning.to_owned()), Some(content).filter(|text| !text.is_empty()).map(str::to_owned))
        }
    }
}
