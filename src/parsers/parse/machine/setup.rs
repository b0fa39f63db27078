//! A grammar made ready for one vocabulary and one request.

use std::collections::BTreeMap;
use std::sync::Arc;

use foretell_core::units::TokenId;
use serde_json::Value as Json;

use crate::parse::grammar::{Emit, Grammar, GrammarState, Mark, Rest, Thinks, Transition};
use crate::parse::{Template, Vocabulary};

/// A family's grammar with the tokens of one vocabulary and the functions of one request.
#[derive(Debug)]
pub(in crate::parse) struct Setup {
    pub(super) grammar: &'static Grammar,
    pub(super) thinks: bool,
    /// Texts of markers and of dropped tokens.
    pub(super) spellings: Vec<(Mark, String)>,
    /// First characters of `spellings`.
    pub(super) begins: Vec<char>,
    pub(super) tokens: BTreeMap<TokenId, (Mark, String)>,
    /// Tokens that end reasoning; empty if the grammar leaves it in a way that has no token.
    pub(super) ends: Vec<TokenId>,
    pub(super) boundaries: Vec<TokenId>,
    pub(super) tools: Vec<Json>,
}

impl Setup {
    pub(in crate::parse) fn new(
        grammar: &'static Grammar,
        vocabulary: &Vocabulary<'_>,
        template: Template<'_>,
        tools: &[Json],
    ) -> Arc<Self> {
        let marker = || grammar.spellings.iter().find(|(mark, _)| *mark == Mark::ThinkStart);
        let thinks = match grammar.thinks {
            Thinks::IfMarked => marker().is_some_and(|(_, text)| (vocabulary.id)(text).is_some()),
            _ => template.thinks(grammar),
        };
        let is_used =
            |mark| thinks || !grammar.forgets_reasoning || !matches!(mark, Mark::ThinkStart | Mark::ThinkEnd);
        let known = grammar.spellings.iter().filter(|(mark, _)| is_used(*mark));
        let mut setup = Self {
            grammar,
            thinks,
            spellings: known.map(|(mark, text)| (*mark, (*text).to_owned())).collect(),
            begins: Vec::new(),
            tokens: BTreeMap::new(),
            ends: Vec::new(),
            boundaries: grammar.boundaries.iter().filter_map(|text| (vocabulary.id)(text)).collect(),
            tools: tools.to_vec(),
        };
        setup.find_tokens(vocabulary);
        setup.begins = setup.spellings.iter().filter_map(|(_, text)| text.chars().next()).collect();
        setup.begins.sort_unstable();
        setup.begins.dedup();
        setup.ends = setup.reasoning_ends();
        Arc::new(setup)
    }

    pub(super) fn find_tokens(&mut self, vocabulary: &Vocabulary<'_>) {
        for &mark in self.grammar.by_token {
            let text = self.text_of(mark).map(str::to_owned);
            if let Some(text) = text
                && let Some(id) = (vocabulary.id)(&text)
            {
                self.tokens.insert(id, (mark, text));
            }
        }
        for (id, text) in vocabulary.special {
            if !self.spellings.iter().any(|(mark, known)| *mark != Mark::Drop && known == text) {
                self.tokens.insert(*id, (Mark::Drop, (*text).to_owned()));
                self.spellings.push((Mark::Drop, (*text).to_owned()));
            }
        }
    }

    pub(super) fn text_of(&self, mark: Mark) -> Option<&str> {
        self.spellings.iter().find(|(known, _)| *known == mark).map(|(_, text)| text.as_str())
    }

    pub(super) fn token_of(&self, mark: Mark) -> Option<TokenId> {
        self.tokens.iter().find(|(_, (known, _))| *known == mark).map(|(id, _)| *id)
    }

    pub(super) fn is_by_token(&self, mark: Mark) -> bool {
        self.token_of(mark).is_some()
    }

    pub(super) fn steps(&self) -> impl Iterator<Item = &'static Transition> {
        self.grammar.steps.iter().filter(|step| self.text_of(step.1).is_some())
    }

    pub(super) fn step(&self, state: GrammarState, mark: Mark) -> Option<&'static Transition> {
        self.grammar.steps.iter().find(|step| step.0 == state && step.1 == mark)
    }

    pub(super) fn reasoning_ends(&self) -> Vec<TokenId> {
        let mut ends = Vec::new();
        for (_, mark, to, emits) in self.steps().filter(|step| step.0 == GrammarState::Reasoning) {
            if !emits.contains(&Emit::ReasoningEnd) {
                if *to != GrammarState::Reasoning {
                    return Vec::new();
                }
                continue;
            }
            match self.token_of(*mark) {
                Some(id) => ends.push(id),
                None if *to == GrammarState::Content => return Vec::new(),
                None => {}
            }
        }
        ends
    }

    pub(super) fn start(&self) -> GrammarState {
        let begins = self.thinks && self.grammar.thinks != Thinks::IfMarked;
        if begins { GrammarState::Reasoning } else { GrammarState::Content }
    }

    pub(in crate::parse) const fn thinks(&self) -> bool {
        self.thinks
    }

    /// True if an output after this prompt begins with content, as the server decides it.
    pub(in crate::parse) fn has_ended(&self, prompt: &[TokenId]) -> bool {
        let opens =
            self.step(self.start(), Mark::ThinkStart).is_some_and(|step| step.2 == GrammarState::Reasoning);
        let start = self.token_of(Mark::ThinkStart);
        for id in prompt.iter().rev() {
            if self.ends.contains(id) {
                return true;
            }
            if start == Some(*id) {
                if opens {
                    return false;
                }
                break;
            }
            if self.boundaries.contains(id) {
                break;
            }
        }
        !self.thinks
    }

    pub(super) fn rest(&self, token: TokenId) -> Option<TokenId> {
        if self.grammar.rest == Rest::Nothing {
            return None;
        }
        if !self.thinks {
            return Some(token);
        }
        let mark = self.tokens.get(&token).map(|(mark, _)| *mark);
        match self.grammar.rest {
            Rest::CallToo => (mark != Some(Mark::ThinkEnd)).then_some(token),
            _ => (mark == Some(Mark::SectionStart)).then_some(token),
        }
    }
}
