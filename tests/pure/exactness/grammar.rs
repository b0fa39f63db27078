//! A grammar that binds the client's own request and no later one: as the backend follows it, and
//! as the session runner holds later answers against it.
//!
//! The backend goes by an automaton that is written here by hand. The session runner goes by the
//! shipped mask and by the shipped functions of the dialect, so a difference between the two is a
//! difference of the output. What the runner does around them is imitated.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::backend::{Put, Vocabulary};
use foretell_core::session::{Event, Fault};
use foretell_core::units::TokenId;
use foretell_core::words::{self, Row, VerifyResult};
use foretell_engines::dialect::{Context, Round, masked};
use foretell_engines::masks::{self, Allows, Compiled, Library, Mask, Rules, Whitespace};
use foretell_engines::openai::{Grammar, Language, Sampling};
use foretell_engines::parse::ReasoningEnds;
use foretell_engines::text::Tokenizer;
use serde_json::json;

/// A regular language by bytes. Every state leads to an accepting one, and 0 is the first.
pub struct Automaton {
    pub regex: &'static str,
    /// From a state by a byte to a state.
    pub edges: &'static [(u8, u8, u8)],
    /// States in which a text may end.
    pub accepts: &'static [u8],
}

impl Automaton {
    fn after(&self, state: u8, bytes: &[u8]) -> Option<u8> {
        bytes.iter().try_fold(state, |state, &byte| {
            self.edges.iter().find(|edge| (edge.0, edge.1) == (state, byte)).map(|edge| edge.2)
        })
    }
}

/// A grammar over a vocabulary whose last token ends a text.
#[derive(Clone)]
pub struct Bound {
    automaton: &'static Automaton,
    vocabulary: Vocabulary,
    compiled: Compiled,
    tokenizer: Arc<Tokenizer>,
    /// Maximum number of tokens of a list among which the backend is asked to sample.
    listed: usize,
    /// The tokens that end the reasoning with which each output begins, which is bound by nothing.
    reasoning: Option<ReasoningEnds>,
}

impl fmt::Debug for Bound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.automaton.regex, self.listed)
    }
}

impl Bound {
    /// Of these tokens those in angle brackets are special, but for single bytes.
    pub fn new(automaton: &'static Automaton, words: &[&str], listed: usize) -> Self {
        let byte = |word: &str| {
            let digits = word.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            digits.map(|digits| u8::from_str_radix(digits, 16).expect("a byte"))
        };
        let is_special = |word: &str| word.starts_with('<') && byte(word).is_none();
        let (special, text): (Vec<_>, Vec<_>) =
            words.iter().enumerate().partition(|(_, word)| is_special(word));
        let vocab: serde_json::Map<_, _> =
            text.into_iter().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
        let added = special.into_iter().map(|(id, word)| {
            json!({ "id": id, "content": word, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false })
        });
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": null, "post_processor": null,
            "decoder": null, "model": { "type": "WordLevel", "vocab": vocab, "unk_token": words[0] },
        });
        let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).expect("a tokenizer");
        for (id, word) in (0..).zip(words) {
            assert_eq!(tokenizer.id(word), Some(id));
        }
        let spelled = words.iter().map(|word| byte(word).map_or(word.as_bytes().to_vec(), |byte| vec![byte]));
        let tokenizer = Arc::new(tokenizer);
        let of_words = masks::Vocabulary::new(Arc::clone(&tokenizer));
        let grammar = Grammar {
            parameter: "structured_outputs",
            language: Language::Regex(automaton.regex.to_owned()),
            any_whitespace: true,
        };
        Self {
            automaton,
            vocabulary: Arc::new(spelled.collect()),
            compiled: Compiled::new(
                Library::Xgrammar(Whitespace::Free),
                &Rules::Asked(Arc::new(grammar)),
                &of_words,
            )
            .expect("a grammar"),
            tokenizer,
            listed,
            reasoning: None,
        }
    }

    /// The same behind reasoning that ends with the token `marker`, or before one of `first`.
    #[must_use]
    pub fn behind_reasoning(self, marker: TokenId, first: &[TokenId]) -> Self {
        Self { reasoning: Some(ReasoningEnds { marker, first: first.to_vec() }), ..self }
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The token that ends a text.
    pub fn end(&self) -> TokenId {
        self.vocabulary.len() as TokenId - 1
    }

    /// The part of an output that is under the grammar; `None` while it reasons.
    fn bound<'a>(&self, output: &'a [TokenId]) -> Option<&'a [TokenId]> {
        let Some(ReasoningEnds { marker, first }) = &self.reasoning else { return Some(output) };
        let end = output.iter().position(|token| token == marker || first.contains(token))?;
        Some(&output[end + usize::from(output[end] == *marker)..])
    }

    fn state(&self, bound: &[TokenId]) -> Option<u8> {
        bound
            .iter()
            .try_fold(0, |state, &token| self.automaton.after(state, &self.vocabulary[token as usize]))
    }

    /// True if a text may end behind this output.
    pub fn may_end(&self, output: &[TokenId]) -> bool {
        let Some(bound) = self.bound(output) else { return true };
        self.state(bound).is_some_and(|state| self.automaton.accepts.contains(&state))
    }

    /// The tokens that the backend allows behind this output, in rising order.
    pub fn allowed(&self, output: &[TokenId]) -> Vec<TokenId> {
        let Some(bound) = self.bound(output) else { return (0..=self.end()).collect() };
        let Some(state) = self.state(bound) else { return Vec::new() };
        let end = Some(self.end()).filter(|_| self.may_end(output));
        let goes_on =
            |token: &TokenId| self.automaton.after(state, &self.vocabulary[*token as usize]).is_some();
        (0..self.end()).filter(goes_on).chain(end).collect()
    }

    /// Tokens that may end a text, by their ids.
    pub fn ends(&self) -> Vec<TokenId> {
        self.tokenizer.may_end()
    }

    pub fn mask(&self) -> Mask {
        let mask = Mask::new(&self.compiled, self.ends());
        match self.reasoning.clone() {
            Some(ends) => mask.behind_reasoning(Box::new(move |_| Ok(Some(ends.clone()))), Some(true)),
            None => mask,
        }
    }

    /// The session runner's part of one session.
    pub fn shell(&self) -> Shell {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let late = self.reasoning.clone().map(|ReasoningEnds { marker, .. }| Self {
            reasoning: Some(ReasoningEnds { marker, first: Vec::new() }),
            ..self.clone()
        });
        Shell {
            mask: self.mask(),
            bare: Self { reasoning: None, ..self.clone() }.mask(),
            late: late.unwrap_or_else(|| self.clone()).mask(),
            bound: self.clone(),
            sampling,
        }
    }
}

/// A mistake in the use of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Slip {
    #[default]
    None,
    /// Samples of verify requests are not held against the mask.
    BarredAccepted,
    /// The mask does not know the last token of the output.
    MaskLags,
    /// The token among the allowed ones is sampled among all.
    AllowedRaw,
    /// A token that ends the text is accepted wherever it comes.
    EndUnchecked,
    /// A scored position takes the second of the allowed tokens, if it lists one.
    SecondAllowed,
    /// An event with a barred token is dropped with the tokens before it.
    EventDropped,
    /// A verification result whose accepted run ends with a barred sample is a fault.
    RoundRefused,
    /// An allowed token is banned with the barred one where the tokens cannot be listed.
    OneBannedTooMany,
    /// Reasoning is held against the grammar.
    ReasoningBound,
    /// The first token of an output that ends reasoning without its marker is not held against it.
    FirstUnbound,
}

/// The session runner, as far as it goes by the mask of an output.
pub struct Shell {
    mask: Mask,
    /// The mask of an output without reasoning.
    bare: Mask,
    /// The mask that knows the marker alone.
    late: Mask,
    bound: Bound,
    sampling: Sampling,
}

impl Shell {
    /// Likeliest tokens that a scored position lists.
    pub const WIDTH: usize = 3;
    /// Maximum number of tokens that are banned one after the other.
    const BANS: usize = 64;

    fn mask(&self, slip: Slip) -> &Mask {
        match slip {
            Slip::ReasoningBound => &self.bare,
            Slip::FirstUnbound => &self.late,
            _ => &self.mask,
        }
    }

    /// The output that the mask gets.
    fn seen(output: &[TokenId], slip: Slip) -> &[TokenId] {
        &output[..output.len() - usize::from(slip == Slip::MaskLags && !output.is_empty())]
    }

    /// Number of the first tokens of an event with which the output may go on; `None`: all. `ends`:
    /// the last of them has ended the text.
    pub fn follow(&self, output: &[TokenId], tokens: &[TokenId], ends: bool, slip: Slip) -> Option<usize> {
        let output = Self::seen(output, slip);
        let held = tokens.len() - usize::from(ends && slip == Slip::EndUnchecked);
        let ends = ends && slip != Slip::EndUnchecked;
        let allowed = self.mask(slip).follow(&[], output, &tokens[..held], ends);
        (allowed < held).then_some(if slip == Slip::EventDropped { 0 } else { allowed })
    }

    fn round<'a>(&'a self, put: &'a Put<'a>, slip: Slip) -> Round<'a> {
        let (prompt, output) = put.context.split_at(put.case.prompt.len());
        let context = Context::new("model", prompt, Self::seen(output, slip)).under(Some(self.mask(slip)));
        Round { context, draft: put.draft, sampling: &self.sampling, method: put.method, weighs: false }
    }

    /// Number of the draft's first nodes that are sent.
    pub fn nodes(&self, put: &Put<'_>, slip: Slip) -> usize {
        masked::allowed_nodes(&self.round(put, slip))
    }

    /// The rows of a scored chain by the tokens listed at each of its positions.
    pub fn rows(&self, put: &Put<'_>, told: &[Vec<(TokenId, f64)>], bonus: Row, slip: Slip) -> Vec<Row> {
        let round = self.round(put, slip);
        let rows = masked::rows(&round, self.mask(slip), Self::WIDTH, told.iter().cloned(), bonus);
        if slip != Slip::SecondAllowed {
            return rows;
        }
        let second = |(position, mut row): (usize, Row)| {
            let Some(top) = told.get(position) else { return row };
            let path = position.checked_sub(1).map(|node| put.draft.path(node)).unwrap_or_default();
            let is_allowed = |token: &TokenId| {
                Some(*token) != row.sample
                    && self.mask.says(&[], round.context.output, &path, *token) == Allows::Yes
            };
            row.sample = top.iter().map(|entry| entry.0).find(is_allowed).or(row.sample);
            row
        };
        rows.into_iter().enumerate().map(second).collect()
    }

    /// The answer to a verify request by which `nodes` nodes were sent.
    pub fn result(&self, put: &Put<'_>, nodes: usize, result: VerifyResult, slip: Slip) -> Event {
        let mut held = masked::without_barred(&self.round(put, slip), result.clone());
        if slip == Slip::RoundRefused && ends_barred(put, &held) {
            return Event::Fault(Fault::Verify);
        }
        for (held, told) in held.rows.iter_mut().zip(result.rows) {
            if slip == Slip::BarredAccepted || (slip == Slip::EndUnchecked && told.ends) {
                *held = told;
            }
        }
        held.put = Some(words::Put { method: put.method, nodes });
        Event::VerifyResult(held)
    }

    /// One token behind the output, of those that the mask allows. The backend samples it among a
    /// list of them, or among all but `barred` and those that turn out to be barred as well.
    pub fn ask_allowed(
        &self,
        output: &[TokenId],
        barred: Option<TokenId>,
        slip: Slip,
        sample: &mut dyn FnMut(Option<Vec<TokenId>>) -> TokenId,
    ) -> Event {
        let output = Self::seen(output, slip);
        let all: BTreeSet<TokenId> = (0..=self.bound.end()).collect();
        let mut banned = BTreeSet::from_iter(barred);
        if slip == Slip::OneBannedTooMany {
            banned.extend(self.bound.allowed(output).get(1));
        }
        let mut among: BTreeSet<TokenId> = match self.mask(slip).allowed(&[], output, self.bound.listed) {
            Some(allowed) => allowed.into_iter().collect(),
            None => all.difference(&banned).copied().collect(),
        };
        for _ in 0..Self::BANS {
            if among.is_empty() {
                break;
            }
            let raw = slip == Slip::AllowedRaw;
            let token = sample((!raw).then(|| among.iter().copied().collect()));
            let ends = token == self.bound.end();
            if raw || self.mask(slip).follow(&[], output, &[token], ends) == 1 {
                return Event::Allowed { token, ends };
            }
            among.remove(&token);
        }
        Event::Fault(Fault::Plain)
    }
}

/// True if the run that the samples accept ends with one that is not known.
fn ends_barred(put: &Put<'_>, result: &VerifyResult) -> bool {
    let mut position = None;
    while let Some(row) = result.rows.get(position.map_or(0, |node| node + 1)) {
        let Some(sample) = row.sample else { return true };
        match put.draft.child(position, sample) {
            Some(node) => position = Some(node),
            None => return false,
        }
    }
    false
}
