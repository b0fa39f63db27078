//! The number of reasoning tokens, as the server counts it in `usage`.

use std::sync::Arc;

use foretell_core::units::TokenId;

use super::{Machine, Setup};
use crate::parse::grammar::State;

/// Counts the reasoning tokens of an output as the server does for whole answers: in one pass over
/// all ids, in which half a character counts where its run of text begins.
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
            self.machine.reasoning_tokens += if self.machine.state == State::Reasoning { count } else { 0 };
            return;
        }
        self.machine.starts.append(&mut self.starts);
        self.machine.text(&mut Vec::new(), &run);
        self.is_half = false;
    }

    /// Reasoning tokens so far.
    pub(in crate::parse) fn count(&self) -> u64 {
        let mut whole = self.clone();
        whole.end_run();
        whole.machine.end(&mut Vec::new());
        whole.machine.reasoning_tokens
    }
}
