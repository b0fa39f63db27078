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

    /// The parts of `whole` beyond this extent.
    fn rest(&self, whole: &Parsed) -> Parsed {
        let from = |text: &str, at: usize| text.get(at..).unwrap_or_default().to_owned();
        let calls = whole.calls.iter().enumerate().filter_map(|(place, call)| {
            let sent = self.calls.get(place).copied();
            let arguments = from(&call.arguments, sent.unwrap_or(0));
            let (name, id) = if sent.is_none() { (call.name.clone(), call.id.clone()) } else { (None, None) };
            let is_new = name.is_some() || !arguments.is_empty();
            is_new.then_some(CallDelta { index: call.index, id, name, arguments })
        });
        Parsed {
            reasoning: from(&whole.reasoning, self.reasoning),
            text: from(&whole.text, self.text),
            calls: calls.collect(),
        }
    }
}

/// The parser of one output, and the parts of it so far.
pub(super) struct Parsing {
    parser: Box<dyn Parse>,
    own: Parsed,
    /// The parts that the backend sent during the first plain request; empty after it.
    backend: Parsed,
    /// The parts of `backend` that were compared with `own`.
    compared: Extent,
    /// The parts of `own` that the client has received.
    sent: Extent,
}

impl Parsing {
    pub(super) fn new(parser: Box<dyn Parse>) -> Self {
        Self {
            parser,
            own: Parsed::default(),
            backend: Parsed::default(),
            compared: Extent::default(),
            sent: Extent::default(),
        }
    }

    /// Adds a token and the text that became certain with it.
    pub(super) fn push(&mut self, token: TokenId, text: &str) {
        let parsed = self.parser.push(token, text);
        self.own.append(parsed);
    }

    /// Ends the output.
    pub(super) fn finish(&mut self) {
        let held = self.parser.finish();
        self.own.append(held);
    }

    /// Tokens so far that the backend counts as reasoning.
    pub(super) fn reasoning_tokens(&self) -> u64 {
        self.parser.reasoning_tokens()
    }

    /// The kinds of parts so far.
    pub(super) fn parts(&self) -> PartsSeen {
        PartsSeen { reasoning: !self.own.reasoning.is_empty(), calls: self.has_called() }
    }

    /// True if there is a tool call in the output.
    pub(super) fn has_called(&self) -> bool {
        !self.own.calls.is_empty()
    }

    /// Adds what the backend has sent. Returns true if each part of it is the beginning of our own,
    /// or the other way round.
    pub(super) fn agrees(&mut self, sent: Parsed) -> bool {
        self.backend.append(sent);
        let (own, backend, compared) = (&self.own, &self.backend, &mut self.compared);
        compared.calls.resize(own.calls.len().min(backend.calls.len()), 0);
        let calls = own.calls.iter().zip(&backend.calls).zip(&mut compared.calls);
        let mut same = same_part(&own.reasoning, &backend.reasoning, &mut compared.reasoning)
            && same_part(&own.text, &backend.text, &mut compared.text);
        for ((own, theirs), compared) in calls {
            // Where the model writes no id, the server makes one of its own.
            same &= own.id.is_none() || own.id == theirs.id;
            same &= own.name == theirs.name && own.index == theirs.index;
            same &= same_part(&own.arguments, &theirs.arguments, compared);
        }
        same
    }

    /// The first difference between the parts that the backend has sent and those here.
    pub(super) fn difference(&self) -> Option<Difference> {
        let (own, backend) = (&self.own, &self.backend);
        let texts = [
            Difference::between("reasoning", &own.reasoning, &backend.reasoning),
            Difference::between("content", &own.text, &backend.text),
        ];
        let none = CallDelta::default();
        let calls = (0..own.calls.len().max(backend.calls.len())).flat_map(|at| {
            let [own, backend] = [own, backend].map(|parts| parts.calls.get(at).unwrap_or(&none));
            let [own_name, name] = [own, backend].map(|call| call.name.as_deref().unwrap_or_default());
            [
                Difference::between("name", own_name, name),
                Difference::between("arguments", &own.arguments, &backend.arguments),
            ]
        });
        Difference::first(texts.into_iter().chain(calls).flatten())
    }

    /// True if the backend has sent exactly what the tokens so far parse to.
    pub(super) fn level(&self) -> bool {
        self.is_sure() && Extent::of(&self.own) == Extent::of(&self.backend)
    }

    /// False if the backend's parts cannot be told from the tokens: then others are no difference.
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
        let rest = self.sent.rest(&self.own);
        self.sent = Extent::of(&self.own);
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
pub(super) fn same_part(own: &str, theirs: &str, compared: &mut usize) -> bool {
    let end = own.len().min(theirs.len());
    let from = *compared;
    *compared = from.max(end);
    match (own.as_bytes().get(from..end), theirs.as_bytes().get(from..end)) {
        (Some(own), Some(theirs)) => own == theirs,
        _ => true,
    }
}
