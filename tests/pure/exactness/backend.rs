//! The backend: its decoding, ending and cutting of an output, its plain decoding, and its
//! verification by each method. Written independently of the session's own rules.

use std::collections::VecDeque;
use std::sync::Arc;

use super::world::{Case, Hooks};
use foretell_core::draft::Tree;
use foretell_core::session::{ActionId, Decode, Ending, Event, Fault, Finish, Parsed, StopBuffer, Tail};
use foretell_core::units::TokenId;
use foretell_core::words::{Dist, Proposal, Row, VerifyMethod, VerifyResult};

/// Bytes of every token.
pub type Vocabulary = Arc<Vec<Vec<u8>>>;

/// Incremental decoding by bytes.
#[derive(Clone)]
pub struct Bytes {
    pub vocabulary: Vocabulary,
    pub held: Vec<u8>,
}

impl Decode for Bytes {
    fn push(&mut self, token: TokenId) -> String {
        self.held.extend(&self.vocabulary[token as usize]);
        let certain = certain_len(&self.held);
        let rest = self.held.split_off(certain);

        String::from_utf8_lossy(&std::mem::replace(&mut self.held, rest)).into_owned()
    }

    fn flush(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() { String::new() } else { "\u{FFFD}".into() }
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(self.clone())
    }
}

/// Bytes before an unfinished character at the end.
fn certain_len(bytes: &[u8]) -> usize {
    for back in 1..=3.min(bytes.len()) {
        let at = bytes.len() - back;
        let need = match bytes[at] {
            0xC0..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xFF => 4,
            0x80..=0xBF => continue,
            _ => 1,
        };
        return if need > back { at } else { bytes.len() };
    }
    bytes.len()
}

/// The backend's own rules to end and to cut an output, applied to all tokens at once.
#[derive(Clone)]
pub struct Plain {
    pub vocabulary: Vocabulary,
    pub ending: Ending,
    pub max: usize,
    pub tokens: Vec<TokenId>,
    pub sent: usize,
    pub finish: Option<Finish>,
}

impl Plain {
    pub fn new(case: &Case) -> Self {
        Self {
            vocabulary: case.vocabulary.clone(),
            ending: case.ending.clone(),
            max: case.max,
            tokens: Vec::new(),
            sent: 0,
            finish: None,
        }
    }

    /// Takes a token; returns the text that is sent with it.
    pub fn push(&mut self, token: TokenId) -> String {
        assert!(self.finish.is_none(), "a backend does not go on after the end");
        self.tokens.push(token);
        let ended = self.ending.eos.contains(&token) && !self.ending.ignore_eos;
        let shown = self.tokens.len() - usize::from(ended);
        let bytes: Vec<u8> =
            self.tokens[..shown].iter().flat_map(|&token| self.vocabulary[token as usize].clone()).collect();
        let certain = certain_len(&bytes);
        let mut text = String::from_utf8_lossy(&bytes[..certain]).into_owned();
        let stop = self.ending.stop.iter().find_map(|stop| text.find(stop.as_str()));
        if let Some(at) = stop {
            text.truncate(at);
            self.finish = Some(Finish::Stop);
        } else if ended {
            self.finish = Some(Finish::Stop);
        } else if self.tokens.len() >= self.max {
            self.finish = Some(Finish::Length);
        }
        if self.finish.is_some() && stop.is_none() && certain < bytes.len() {
            text.push('\u{FFFD}');
        }
        let out = if self.finish.is_some() { text.len() } else { text.len() - self.held(&text) };
        let piece = text.get(self.sent..out).unwrap_or_default().to_owned();
        self.sent = self.sent.max(out);
        piece
    }

    /// Bytes at the end of a text that are kept back, because a stop text may be in it.
    fn held(&self, text: &str) -> usize {
        let stops = &self.ending.stop;
        match self.ending.stop_buffer {
            StopBuffer::Longest => {
                let longest = stops.iter().map(|stop| stop.chars().count()).max().unwrap_or(1);
                text.chars().rev().take(longest - 1).map(char::len_utf8).sum()
            }
            StopBuffer::Beginning => {
                let ends = text.char_indices().map(|(at, _)| &text[at..]);
                let begins = |end: &&str| stops.iter().any(|stop| stop.starts_with(end));
                ends.filter(begins).map(str::len).max().unwrap_or(0)
            }
        }
    }
}

/// Behaviour of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// Only the backend knows which tokens end a text: it reports the end with the token, and the
    /// session does not know the ids.
    pub ends: bool,
    /// It reports with the last token of a plain request that it is the last.
    pub tails: bool,
    /// Its answer to the client's own request is the first token alone.
    pub first_token_alone: bool,
    /// Maximum number of draft nodes of one fan-out.
    pub lanes: usize,
}

impl Default for Manner {
    fn default() -> Self {
        Self { ends: false, tails: true, first_token_alone: false, lanes: usize::MAX }
    }
}

/// Position for which a sample is requested.
pub struct Ask<'a> {
    /// Prompt and output before the position.
    pub context: &'a [TokenId],
    /// Output index of the position.
    pub position: usize,
    /// Backend calls before this one.
    pub call: usize,
    /// Positions between the call's own context and this one.
    pub offset: usize,
}

/// The plain run of a case.
pub fn plain(case: &Case, sample: &mut dyn FnMut(&Ask<'_>) -> TokenId) -> (String, Vec<TokenId>, Finish) {
    let mut run = Plain::new(case);
    let mut text = String::new();
    let mut context = case.prompt.clone();
    loop {
        let position = run.tokens.len();
        let token = sample(&Ask { context: &context, position, call: 0, offset: position });
        context.push(token);
        text.push_str(&run.push(token));
        if let Some(finish) = run.finish {
            return (text, run.tokens, finish);
        }
    }
}

/// An active plain request.
pub struct PlainDecoding {
    pub id: ActionId,
    pub plain: Option<Plain>,
    /// It is over with its first token, which does not say so.
    pub alone: bool,
    context: Vec<TokenId>,
    start: usize,
    asked: usize,
    brought: usize,
    /// Sampled and not sent yet.
    pub ahead: VecDeque<TokenId>,
    ended: Option<Finish>,
    call: usize,
}

impl PlainDecoding {
    /// A plain request after `context` for the output from position `start` on, at most `asked`
    /// tokens.
    pub fn new(id: ActionId, context: Vec<TokenId>, start: usize, asked: usize, call: usize) -> Self {
        let ahead = VecDeque::new();
        let (plain, alone) = (None, false);
        Self { id, plain, alone, context, start, asked, brought: 0, ahead, ended: None, call }
    }

    /// The next event.
    pub fn next(&mut self, case: &Case, hooks: &mut Hooks<'_>) -> Event {
        if let Some(finish) = self.ended {
            return Event::PlainEnded(finish);
        }
        let mut tokens = Vec::new();
        let mut text = String::new();
        let count = if self.alone { 1 } else { (hooks.chunk)().max(1) };
        while tokens.len() < count && self.ended.is_none() {
            let token = match self.ahead.pop_front() {
                Some(token) => token,
                None => self.sample(hooks),
            };
            tokens.push(token);
            self.brought += 1;
            match &mut self.plain {
                Some(plain) => {
                    text.push_str(&plain.push(token));
                    self.ended = plain.finish;
                }
                None if case.is_end(token) => self.ended = Some(Finish::Stop),
                None if self.brought >= self.asked && !self.alone => self.ended = Some(Finish::Length),
                None => {}
            }
        }
        // The backend has sampled one token more than it has sent.
        if self.ended.is_none() && !self.alone {
            let ahead = self.sample(hooks);
            self.ahead.push_back(ahead);
        }
        let tail = if hooks.wrong.tailless { Tail::Open } else { self.tail(case, tokens.last().copied()) };
        Event::Token { tokens, parsed: Parsed::content(text), tail }
    }

    /// Only a later plain call reports that a token ended the text.
    fn tail(&self, case: &Case, last: Option<TokenId>) -> Tail {
        match self.ended {
            Some(_) if !case.manner.tails => Tail::Open,
            Some(_) if self.plain.is_none() && last.is_some_and(|last| case.is_end(last)) => Tail::Stop,
            Some(_) => Tail::Last,
            None => Tail::Open,
        }
    }

    pub fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    fn sample(&mut self, hooks: &mut Hooks<'_>) -> TokenId {
        let offset = self.brought + self.ahead.len();
        let (position, call) = (self.start + offset, self.call);
        let ask = Ask { context: &self.context, position, call, offset };
        let token = (hooks.sample)(&ask);
        self.context.push(token);
        token
    }
}

/// The likeliest tokens of a distribution, at most `most`.
pub fn ranked(distribution: &[f64], most: usize) -> Dist {
    let mut top: Vec<(TokenId, f64)> =
        (0..).zip(distribution.iter().copied()).filter(|entry| entry.1 > 0.0).collect();
    top.sort_by(|a, b| b.1.total_cmp(&a.1));
    let complete = top.len() <= most;
    top.truncate(most);
    Dist { top, complete, slack: 0.0 }
}

/// The draft of a head of this target behind a context and these tokens: some right tokens, some
/// wrong ones, at times nothing, and at times behind other tokens.
pub fn proposed(context: &[TokenId], behind: Vec<TokenId>, vocabulary: usize) -> Option<Proposal> {
    let read = context.iter().chain(&behind);
    let hash = read.fold(17_usize, |hash, &token| hash.wrapping_mul(31).wrapping_add(token as usize + 1));
    let token = |at: usize| (at % vocabulary) as TokenId;
    let steps = (0..3).map(|depth| vec![(token(hash >> depth), 0.6), (token((hash >> depth) + 1), 0.3)]);
    let mut behind = behind;
    if hash % 7 == 0 {
        behind.push(token(hash));
    }
    (hash % 5 > 0).then(|| Proposal { behind, steps: steps.collect() })
}

/// A draft that is sent to the backend.
pub struct Put<'a> {
    pub case: &'a Case,
    pub draft: &'a Tree,
    pub method: VerifyMethod,
    /// Prompt and output.
    pub context: Vec<TokenId>,
    pub position: usize,
    pub call: usize,
}

impl Put<'_> {
    /// The backend's answer, by the verification method.
    pub fn answer(&self, hooks: &mut Hooks<'_>) -> Event {
        let lanes = if self.method == VerifyMethod::FanOut { self.case.manner.lanes } else { usize::MAX };
        let nodes = self.draft.len().min(lanes);
        let rows = match self.method {
            VerifyMethod::FanOut | VerifyMethod::Tree => self.sampled(nodes, hooks),
            VerifyMethod::Score => self.scored(hooks),
        };
        if hooks.wrong.refuse.is_some_and(|token| rows.iter().any(|row| row.sample == Some(token))) {
            return Event::Fault(Fault::Verify);
        }
        let proposal = self.proposal(&rows).filter(|_| self.case.resources.shared.proposes);
        Event::VerifyResult(VerifyResult { rows, proposal, ..VerifyResult::default() })
    }

    /// The proposal behind the nodes that the samples accept, and the token after them.
    fn proposal(&self, rows: &[Row]) -> Option<Proposal> {
        let (mut behind, mut row) = (Vec::new(), 0);
        loop {
            let sample = rows.get(row)?.sample?;
            behind.push(sample);
            match self.draft.child(row.checked_sub(1), sample) {
                Some(node) => row = node + 1,
                None => return proposed(&self.context, behind, self.case.vocabulary.len()),
            }
        }
    }

    /// A sample after the context and one after each of the first nodes.
    fn sampled(&self, nodes: usize, hooks: &mut Hooks<'_>) -> Vec<Row> {
        std::iter::once(None)
            .chain((0..nodes).map(Some))
            .map(|parent_node| self.sample(parent_node, hooks))
            .collect()
    }

    /// Rows of the positions of the chain, up to the first that is left open; a sample after all of
    /// them.
    fn scored(&self, hooks: &mut Hooks<'_>) -> Vec<Row> {
        assert_eq!(self.draft.stem(), self.draft.len(), "a scored prompt is a chain");
        let mut rows = Vec::new();
        for node in 0..self.draft.len() {
            match (hooks.told)(&self.full(node.checked_sub(1))) {
                Some(row) => rows.push(row),
                None => return rows,
            }
        }
        rows.push(self.sample(self.draft.len().checked_sub(1), hooks));
        rows
    }

    fn full(&self, parent_node: Option<usize>) -> Vec<TokenId> {
        let path = parent_node.map(|node| self.draft.path(node)).unwrap_or_default();
        [self.context.as_slice(), &path].concat()
    }

    fn sample(&self, parent_node: Option<usize>, hooks: &mut Hooks<'_>) -> Row {
        let full = self.full(parent_node);
        let offset = full.len() - self.context.len();
        let (position, call) = (self.position + offset, self.call);
        let ask = Ask { context: &full, position, call, offset };
        let mut sample = (hooks.sample)(&ask);
        for _ in 0..hooks.wrong.redraw {
            if self.draft.child(parent_node, sample).is_none() {
                sample = (hooks.sample)(&ask);
            }
        }
        if hooks.wrong.race && parent_node.is_none() && self.draft.child(parent_node, sample).is_none() {
            sample = (hooks.sample)(&ask);
        }
        let mut row = Row { ends: self.case.manner.ends && self.case.is_end(sample), ..Row::of(sample) };
        if self.method == VerifyMethod::Tree
            && let Some(distribution) = (hooks.distribution)(&full)
        {
            let node_p = |node: usize| {
                let parent = self.draft.nodes()[node].parent;
                (hooks.distribution)(&self.full(parent))
                    .map(|distribution| distribution[self.draft.nodes()[node].token as usize])
            };
            row.draft_p = parent_node.and_then(node_p);
            row.entropy = Some(distribution.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum());
            row.dist = Some(ranked(&distribution, 3));
        }
        row
    }
}
