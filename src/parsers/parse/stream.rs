//! The parser of one streamed answer: first reasoning, then content and calls.
//!
//! The server hands the output from its reasoning parser to its tool parser at the token that ends
//! reasoning. With neither, or after the last, text is content as it stands.

use super::deepseek::Deepseek;
use super::hermes::Hermes;
use super::llama::Llama;
use super::machine::{Counter, Machine};
use super::mistral::Mistral;
use super::think::Think;

use foretell_core::session::parse::{Parse, Parsed};
use foretell_core::units::TokenId;

#[derive(Clone, Debug)]
pub(super) enum Reasoning {
    Machine(Box<Machine>),
    Think(Think),
}

/// The tool parser.
#[derive(Clone, Debug)]
pub(super) enum Calls {
    Machine(Box<Machine>),
    Hermes(Hermes),
    Deepseek(Deepseek),
    Llama(Llama),
    Mistral(Mistral),
}

impl Calls {
    fn push(&mut self, token: Option<TokenId>, text: &str) -> Parsed {
        match self {
            Self::Machine(machine) => machine.push(token, text),
            Self::Hermes(hermes) => hermes.push(text),
            Self::Deepseek(deepseek) => deepseek.push(token, text),
            Self::Llama(llama) => llama.push(text),
            Self::Mistral(mistral) => mistral.push(token, text),
        }
    }

    fn finish(&mut self) -> Parsed {
        match self {
            Self::Machine(machine) => machine.finish(),
            Self::Hermes(hermes) => hermes.finish(),
            Self::Deepseek(_) | Self::Mistral(_) => Parsed::default(),
            Self::Llama(llama) => llama.finish(),
        }
    }

    fn is_outside(&self) -> bool {
        match self {
            Self::Machine(machine) => machine.is_outside_calls(),
            Self::Hermes(hermes) => hermes.is_outside_calls(),
            Self::Deepseek(deepseek) => deepseek.is_outside_calls(),
            Self::Llama(llama) => llama.is_outside_calls(),
            Self::Mistral(mistral) => mistral.is_outside_calls(),
        }
    }

    fn is_sure(&self) -> bool {
        match self {
            Self::Machine(machine) => machine.is_sure(),
            Self::Hermes(hermes) => hermes.is_sure(),
            Self::Deepseek(deepseek) => deepseek.is_sure(),
            Self::Llama(llama) => llama.is_sure(),
            Self::Mistral(mistral) => mistral.is_sure(),
        }
    }
}

/// How reasoning tokens are counted.
#[derive(Clone, Debug)]
pub(super) enum Count {
    /// Not at all: no reasoning parser.
    None,
    Machine,
    /// By ids: the machine of reasoning is never fed.
    Ids(Box<Counter>),
    /// By ids, between markers: how deep, and how many.
    Think(Think, u32, u64),
}

#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub reasoning: Option<Reasoning>,
    pub calls: Option<Calls>,
    /// The output is still reasoning.
    pub is_reasoning: bool,
    /// The request forbids calls: those that are found are not reported, except at the end.
    pub hides_calls: bool,
    pub count: Count,
}

impl Stream {
    /// A token of reasoning. Gives what follows reasoning, if that ends with it.
    fn reason(&mut self, token: TokenId, text: &str) -> (Parsed, Option<(Option<TokenId>, String)>) {
        match &mut self.reasoning {
            Some(Reasoning::Think(think)) => {
                let (parsed, has_ended) = think.push(token, text);
                (parsed, has_ended.then(|| (None, String::new())))
            }
            Some(Reasoning::Machine(machine)) => {
                let mut parsed = machine.push(Some(token), text);
                if !machine.has_ended() {
                    return (parsed, None);
                }
                let rest = std::mem::take(&mut parsed.text) + &machine.finish().text;
                (parsed, Some((machine.rest(token), rest)))
            }
            None => (Parsed::default(), Some((Some(token), text.to_owned()))),
        }
    }

    fn answer(&mut self, token: Option<TokenId>, text: &str) -> Parsed {
        let Some(calls) = &mut self.calls else { return Parsed::content(text.to_owned()) };
        let mut parsed = calls.push(token, text);
        if self.hides_calls {
            parsed.calls.clear();
        }
        parsed
    }
}

impl Parse for Stream {
    fn push(&mut self, token: TokenId, text: &str) -> Parsed {
        match &mut self.count {
            Count::Ids(counter) => counter.push(token, text),
            Count::Think(think, depth, count) => *count += think.count(depth, token),
            Count::None | Count::Machine => {}
        }
        if !self.is_reasoning {
            return self.answer(Some(token), text);
        }
        let (mut parsed, rest) = self.reason(token, text);
        if let Some((token, text)) = rest {
            self.is_reasoning = false;
            let answer = self.answer(token, &text);
            if parsed.reasoning.is_empty() {
                parsed.reasoning = answer.reasoning;
            }
            parsed.text = answer.text;
            parsed.calls = answer.calls;
        }
        parsed
    }

    fn finish(&mut self) -> Parsed {
        let mut parsed = Parsed::default();
        if self.is_reasoning
            && let Some(Reasoning::Machine(machine)) = &mut self.reasoning
        {
            parsed = machine.finish();
        }
        if let Some(calls) = &mut self.calls {
            parsed.append(calls.finish());
        }
        parsed
    }

    fn is_outside_calls(&self) -> bool {
        match &self.reasoning {
            Some(Reasoning::Machine(machine)) if self.is_reasoning => machine.is_outside_calls(),
            _ => self.is_reasoning || self.calls.as_ref().is_none_or(Calls::is_outside),
        }
    }

    fn reasoning_tokens(&self) -> u64 {
        match (&self.count, &self.reasoning) {
            (Count::Machine, Some(Reasoning::Machine(machine))) => machine.reasoning_tokens(),
            (Count::Ids(counter), _) => counter.count(),
            (Count::Think(_, _, count), _) => *count,
            _ => 0,
        }
    }

    fn is_sure(&self) -> bool {
        self.calls.as_ref().is_none_or(Calls::is_sure)
    }

    fn fork(&self) -> Box<dyn Parse> {
        Box::new(self.clone())
    }
}

/// The parser of a stream in which all calls but the first are dropped.
pub(super) struct FirstCall(pub Box<dyn Parse>);

impl FirstCall {
    fn filter(mut parsed: Parsed) -> Parsed {
        parsed.calls.retain(|call| call.index == 0);
        parsed
    }
}

impl Parse for FirstCall {
    fn push(&mut self, token: TokenId, text: &str) -> Parsed {
        Self::filter(self.0.push(token, text))
    }

    fn finish(&mut self) -> Parsed {
        Self::filter(self.0.finish())
    }

    fn is_outside_calls(&self) -> bool {
        self.0.is_outside_calls()
    }

    fn reasoning_tokens(&self) -> u64 {
        self.0.reasoning_tokens()
    }

    fn is_sure(&self) -> bool {
        self.0.is_sure()
    }

    fn fork(&self) -> Box<dyn Parse> {
        Box::new(Self(self.0.fork()))
    }
}
