//! Output of one choice: turns tokens into text and looks for stop strings.

use crate::forward::HeadDraft;
use crate::target::job::{Ending, Scores, Token};
use crate::target::stops::{Seen, Stops};
use foretell_core::session::Decode;
use foretell_core::units::TokenId;

/// The text and state that one token adds to a choice.
#[derive(Debug, PartialEq)]
pub(super) struct OutputStep {
    pub(super) id: TokenId,
    pub(super) text: String,
    pub(super) scores: Option<Scores>,
    pub(super) finish: Option<Finish>,
    /// The head's draft behind the token; `None` if there is none.
    pub(super) proposal: Option<HeadDraft>,
}

/// Reason that a choice is finished.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Finish {
    /// The model's end-of-text token was sampled.
    Eos,
    /// One of the client's end tokens was sampled.
    StopToken(TokenId),
    /// One of the client's stop strings was found.
    StopText(String),
    /// The token limit was reached.
    Length,
}

impl Finish {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Eos | Self::StopToken(_) | Self::StopText(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// The state of one choice.
pub(super) struct Output {
    decoder: Box<dyn Decode>,
    stops: Stops,
    include_stop: bool,
    /// Stop strings are ignored in the first `spared` tokens (`min_tokens`).
    spared: usize,
    /// Number of output tokens so far.
    pub(super) tokens: usize,
}

impl Output {
    pub(super) fn new(decoder: Box<dyn Decode>, stops: Stops, include_stop: bool, spared: usize) -> Self {
        Self { decoder, stops, include_stop, spared, tokens: 0 }
    }

    /// Adds the next token.
    pub(super) fn take(&mut self, token: Token) -> OutputStep {
        self.tokens += 1;
        let early = self.tokens <= self.spared;
        let Token { id, scores, ending, proposal } = token;
        // An end token is not part of the text, unless the client requested that stop texts are
        // included.
        let shown = match ending {
            Some(Ending::Eos) => false,
            Some(Ending::StopToken(_)) => self.include_stop,
            Some(Ending::Length) | None => true,
        };
        let piece = if shown { self.decoder.push(id) } else { String::new() };
        let Seen { mut text, stop } = self.stops.push(&piece, early);
        if let Some(stop) = stop {
            return OutputStep { id, text, scores, finish: Some(Finish::StopText(stop)), proposal: None };
        }
        let Some(ending) = ending else { return OutputStep { id, text, scores, finish: None, proposal } };
        let last = self.stops.push(&self.decoder.flush(), early);
        text.push_str(&last.text);
        if let Some(stop) = last.stop {
            return OutputStep { id, text, scores, finish: Some(Finish::StopText(stop)), proposal: None };
        }
        text.push_str(&self.stops.flush());
        let finish = match ending {
            Ending::Eos => Finish::Eos,
            Ending::StopToken(id) => Finish::StopToken(id),
            Ending::Length => Finish::Length,
        };
        OutputStep { id, text, scores, finish: Some(finish), proposal: None }
    }
}
