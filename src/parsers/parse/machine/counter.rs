//! The number of reasoning tokens, as the server counts it in `usage`.

use std::sync::Arc;

use foretell_core::units::TokenId;

use super::{Machine, Setup};
use crate::parse::grammar::GrammarState;

/// Counts the reasoning tokens of an output as the server does for unstreamed answers: in one pass
/// over all ids, in which half a character counts where its run of text begins.
#[derive(Clone, Debug)]
pub(in crate::parse) struct Counter {
    machine: Machine,
    /// Text since the last marker, and where its tokens begin.
    run: String,
    starts: Vec<usize>,
    is_half: bool,
}

impl Counter {
    pub(in crate::parse) fn new(setup: Arc<Setup>) -> Self {
        let state = setup.start();
        let machine = Machine { has_tokens: true, ..Machine::new(setup, state) };
        Self { machine, run: String::new(), starts: Vec::new(), is_half: false }
    }

    pub(in crate::parse) fn push(&mut self, token: TokenId, text: &str) {
        let setup = Arc::clone(&self.machine.setup);
        if let Some((mark, marker)) = setup.tokens.get(&token) {
            self.end_run();
            self.machine.marker(&mut Vec::new(), *mark, marker);
            return;
        }
        self.starts.push(if self.is_half || text.is_empty() { 0 } else { self.run.len() });
        self.run.push_str(text);
        self.is_half = text.is_empty();
    }

    pub(super) fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        if run.is_empty() {
            let count = std::mem::take(&mut self.starts).len() as u64;
            self.machine.reasoning_tokens +=
                if self.machine.state == GrammarState::Reasoning { count } else { 0 };
            return;
        }
        // The machine takes them in order. It holds back no text between two runs.
        self.starts.sort_unstable();
        let from = self.machine.lexed.from;
        self.machine.lexed.starts.extend(self.starts.drain(..).map(|start| from + start));
        self.machine.text(&mut Vec::new(), &run);
        self.is_half = false;
    }

    /// Reasoning tokens so far.
    pub(in crate::parse) fn count(&self) -> u64 {
        let mut complete = self.clone();
        complete.end_run();
        complete.machine.end(&mut Vec::new());
        complete.machine.reasoning_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::grammar;
    use crate::parse::{Template, Vocabulary};

    /// As many special tokens as DeepSeek has, and a text that often begins like them: quadratic
    /// time would be minutes.
    #[test]
    fn a_long_output_is_counted_in_the_time_of_reading_it() {
        let spelt: Vec<String> = (0..804).map(|at| format!("<|special_{at}|>")).collect();
        let special: Vec<(TokenId, &str)> = (1_000..).zip(spelt.iter().map(String::as_str)).collect();
        let setup = Setup::new(
            &grammar::QWEN3,
            &Vocabulary { id: &|_| None, special: &special },
            Template(None),
            &[],
        );
        let mut counter = Counter::new(setup);
        for at in 0..100_000 {
            counter.push(1, if at % 4 == 0 { " a < b" } else { " and" });
        }
        assert_eq!(counter.count(), 100_000);
    }
}
