//! An output with an output parser: what its tokens parse to, compared with what the backend has
//! sent during the first plain request.

use crate::session::PartsSeen;
use crate::session::parse::{CallDelta, Difference, Parse, Parsed};
use crate::units::TokenId;

/// Number of bytes of each part of an output.
#[derive(Debug, Default, PartialEq, Eq)]
struct Extent {
    reasoning: usize,
    text: usize,
    /// Bytes of the arguments of each call whose name is included.
    calls: Vec<usize>,
}

impl Extent {
    fn of(parsed: &Parsed) -> Self {
        Self {
            reasoning: parsed.reasoning.len(),
            text: parsed.text.len(),
            calls: parsed.calls.iter().map(|call| call.arguments.len()).collect(),
        }
    }

    /// The parts of `all` beyond this extent.
    fn rest(&self, all: &Parsed) -> Parsed {
        let from = |text: &str, at: usize| text.get(at..).unwrap_or_default().to_owned();
        let calls = all.calls.iter().enumerate().filter_map(|(index, call)| {
            let sent = self.calls.get(index).copied();
            let arguments = from(&call.arguments, sent.unwrap_or(0));
            let (name, id) = if sent.is_none() { (call.name.clone(), call.id.clone()) } else { (None, None) };
            let is_new = name.is_some() || !arguments.is_empty();
            is_new.then_some(CallDelta { index: call.index, id, name, arguments })
        });
        Parsed {
            reasoning: from(&all.reasoning, self.reasoning),
            text: from(&all.text, self.text),
            calls: calls.collect(),
        }
    }
}

/// The parser of one output, and the parts of it so far.
pub(super) struct Parsing {
    parser: Box<dyn Parse>,
    local: Parsed,
    /// The parts that the backend sent during the first plain request; empty after it.
    backend: Parsed,
    /// The parts of `backend` that were compared with `local`.
    compared: Extent,
    /// The parts of `local` that the client has received.
    sent: Extent,
}

impl Parsing {
    pub(super) fn new(parser: Box<dyn Parse>) -> Self {
        Self {
            parser,
            local: Parsed::default(),
            backend: Parsed::default(),
            compared: Extent::default(),
            sent: Extent::default(),
        }
    }

    /// Adds a token and the text that became certain with it.
    pub(super) fn push(&mut self, token: TokenId, text: &str) {
        let parsed = self.parser.push(token, text);
        self.local.append(parsed);
    }

    /// Ends the output.
    pub(super) fn finish(&mut self) {
        let rest = self.parser.finish();
        self.local.append(rest);
    }

    /// Tokens so far that the backend counts as reasoning.
    pub(super) fn reasoning_tokens(&self) -> u64 {
        self.parser.reasoning_tokens()
    }

    /// The kinds of parts so far.
    pub(super) fn parts(&self) -> PartsSeen {
        PartsSeen { reasoning: !self.local.reasoning.is_empty(), calls: self.has_called() }
    }

    /// True if there is a tool call in the output.
    pub(super) fn has_called(&self) -> bool {
        !self.local.calls.is_empty()
    }

    /// Adds what the backend has sent. Returns true if each part of it is the beginning of the
    /// local one, or the other way round.
    pub(super) fn agrees(&mut self, sent: Parsed) -> bool {
        self.backend.append(sent);
        let (local, backend, compared) = (&self.local, &self.backend, &mut self.compared);
        compared.calls.resize(local.calls.len().min(backend.calls.len()), 0);
        let calls = local.calls.iter().zip(&backend.calls).zip(&mut compared.calls);
        let mut same = same_part(&local.reasoning, &backend.reasoning, &mut compared.reasoning)
            && same_part(&local.text, &backend.text, &mut compared.text);
        for ((local, theirs), compared) in calls {
            // Where the model writes no id, the server generates one.
            same &= local.id.is_none() || local.id == theirs.id;
            same &= local.name == theirs.name && local.index == theirs.index;
            same &= same_part(&local.arguments, &theirs.arguments, compared);
        }
        same
    }

    /// The first difference between the parts that the backend has sent and those here.
    pub(super) fn difference(&self) -> Option<Difference> {
        let (local, backend) = (&self.local, &self.backend);
        let texts = [
            Difference::between("reasoning", &local.reasoning, &backend.reasoning),
            Difference::between("content", &local.text, &backend.text),
        ];
        let none = CallDelta::default();
        let calls = (0..local.calls.len().max(backend.calls.len())).flat_map(|at| {
            let [local, backend] = [local, backend].map(|parts| parts.calls.get(at).unwrap_or(&none));
            let [local_name, name] = [local, backend].map(|call| call.name.as_deref().unwrap_or_default());
            [
                Difference::between("name", local_name, name),
                Difference::between("arguments", &local.arguments, &backend.arguments),
            ]
        });
        Difference::first(texts.into_iter().chain(calls).flatten())
    }

    /// True if the backend has sent exactly what the tokens so far parse to.
    pub(super) fn level(&self) -> bool {
        self.is_sure() && Extent::of(&self.local) == Extent::of(&self.backend)
    }

    /// False if the backend's parts cannot be derived from the tokens: then others are no
    /// difference.
    pub(super) fn is_sure(&self) -> bool {
        self.parser.is_sure()
    }

    /// Leaves the first plain request, whose parts the client has received.
    pub(super) fn take_over(&mut self) {
        self.sent = Extent::of(&self.backend);
        self.backend = Parsed::default();
    }

    /// The parts that may go out now.
    pub(super) fn release(&mut self) -> Parsed {
        let rest = self.sent.rest(&self.local);
        self.sent = Extent::of(&self.local);
        rest
    }

    /// True if the output extended by these tokens, each with its text, would end outside a tool
    /// call.
    pub(super) fn is_outside_calls_behind(&self, tokens: &[(TokenId, String)]) -> bool {
        if tokens.is_empty() {
            return self.parser.is_outside_calls();
        }
        let mut parser = self.parser.fork();
        for (token, text) in tokens {
            parser.push(*token, text);
        }
        parser.is_outside_calls()
    }
}

/// Compares two texts, one of which may be the beginning of the other, from byte `compared` on.
pub(super) fn same_part(local: &str, theirs: &str, compared: &mut usize) -> bool {
    let end = local.len().min(theirs.len());
    let from = *compared;
    *compared = from.max(end);
    match (local.as_bytes().get(from..end), theirs.as_bytes().get(from..end)) {
        (Some(local), Some(theirs)) => local == theirs,
        _ => true,
    }
}
