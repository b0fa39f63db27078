//! The output parsers of servers, rebuilt: from the text of an output to reasoning, content, calls.
//!
//! A server that was started with `--reasoning-parser` or `--tool-call-parser` sends its chats in
//! parts. Whoever continues such a chat must cut it at the same places, so each family here follows
//! vLLM's parser, quirks included; `tests/goldens/parsers` has its results. Equality is of the
//! joined parts, for a stream that is parsed token by token. Streamed and unstreamed answers are
//! parsed by different code there, and by different functions here.
//!
//! | module | purpose |
//! |---|---|
//! | `formats` | the formats by their names, and how each is parsed |
//! | `grammar` | the formats of most families, as tables |
//! | `machine` | runs a table over tokens and text |
//! | `arguments` | marked-up arguments to JSON, with the types of the function's schema |
//! | `hermes`, `llama`, `deepseek`, `mistral`, `think` | what the server parses without a table |
//! | `harmony` | gpt-oss, whose one parser gives all parts |
//! | `stream` | reasoning, then content and calls |
//! | `pieces` | JSON that comes in pieces |
//! | `growing` | searches in a text that grows |
//! | `python` | JSON, numbers and spaces as Python has them |
//! | `steps` | counts the bytes that are read, for tests |

mod arguments;
mod deepseek;
mod formats;
mod grammar;
mod growing;
mod harmony;
mod hermes;
mod llama;
mod machine;
mod mistral;
mod pieces;
mod python;
mod steps;
mod stream;
mod think;

#[cfg(test)]
mod tests;

pub use foretell_core::session::parse::{ParsedMessage, ToolCall};
pub use formats::{ReasoningFormat, ToolFormat};

use deepseek::Deepseek;
use formats::{Thoughts, Tools};
use grammar::{Grammar, Thinks};
use harmony::Harmony;
use hermes::Hermes;
use llama::Llama;
use machine::{Counter, Machine, Setup};
use mistral::Mistral;
use stream::{Calls, Count, FirstCall, Reasoning, Stream};
use think::Think;

use crate::text::Tokenizer;
use foretell_core::session::parse::Parse;
use foretell_core::units::TokenId;
use serde_json::{Map, Value};

use std::fmt;
use std::sync::Arc;

/// The target's tokens, as far as parsers need to know them.
#[derive(Clone, Copy)]
pub struct Vocabulary<'a> {
    /// The id of a text that is one token of the vocabulary, special or not.
    pub id: &'a dyn Fn(&str) -> Option<TokenId>,
    /// The tokens that the tokenizer's configuration calls special (`all_special_tokens`), with
    /// their text. Those unknown to a family are dropped from the answer.
    pub special: &'a [(TokenId, &'a str)],
}

/// Calls `act` with a tokenizer's tokens.
pub fn with_vocabulary<T>(tokenizer: &Tokenizer, act: impl FnOnce(&Vocabulary<'_>) -> T) -> T {
    let special = tokenizer.added().iter().copied().filter(|&id| tokenizer.is_special(id));
    let named: Vec<_> = special.filter_map(|id| Some((id, tokenizer.token(id)?))).collect();
    let special: Vec<_> = named.iter().map(|(id, text)| (*id, text.as_str())).collect();
    act(&Vocabulary { id: &|text| tokenizer.id(text), special: &special })
}

/// A request, as far as parsers need to know it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// The field `tools`; empty if it is absent.
    pub tools: &'a [Value],
    /// There are tools, and the choice is not `none`.
    pub may_call: bool,
    /// All calls but the first are dropped (`parallel_tool_calls: false`).
    pub single_call: bool,
    /// Variables of the chat template: `chat_template_kwargs`, the server's defaults included.
    pub template: Option<&'a Map<String, Value>>,
    /// Ids of the rendered prompt.
    pub prompt: &'a [TokenId],
}

/// The parsers that a server was started with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parsers {
    /// `--tool-call-parser`, with `--enable-auto-tool-choice`.
    pub tools: Option<ToolFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

impl fmt::Display for Parsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tools, reasoning) =
            (self.tools.map(ToolFormat::name), self.reasoning.map(ReasoningFormat::name));
        write!(f, "tools {}, reasoning {}", tools.unwrap_or("none"), reasoning.unwrap_or("none"))
    }
}

/// The server's answer cannot be determined from the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's answer cannot be determined from the output")]
pub struct Unsure;

/// Variables of the chat template.
#[derive(Clone, Copy, Debug)]
struct Template<'a>(Option<&'a Map<String, Value>>);

impl<'a> Template<'a> {
    fn get(self, key: &str) -> Option<&'a Value> {
        self.0.and_then(|variables| variables.get(key))
    }

    /// Python's `bool` of a variable.
    fn is_true(self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Null) => false,
            Some(Value::Bool(value)) => *value,
            Some(Value::Number(number)) => number.as_f64() != Some(0.0),
            Some(Value::String(text)) => !text.is_empty(),
            Some(Value::Array(items)) => !items.is_empty(),
            Some(Value::Object(fields)) => !fields.is_empty(),
        }
    }

    fn thinks(self, grammar: &Grammar) -> bool {
        const KEYS: [&str; 2] = ["thinking", "enable_thinking"];
        let is_either = KEYS.iter().any(|key| self.is_true(key));
        match grammar.thinks {
            Thinks::Never | Thinks::IfMarked => false,
            Thinks::Always => true,
            Thinks::UnlessDisabled => {
                self.get("enable_thinking").is_none() || self.is_true("enable_thinking")
            }
            Thinks::IfEither => is_either || KEYS.iter().all(|key| self.get(key).is_none_or(Value::is_null)),
            Thinks::IfEitherAndEffort => {
                let is_requested = is_either || KEYS.iter().all(|key| self.get(key).is_none());
                is_requested && self.get("reasoning_effort").and_then(Value::as_str) != Some("none")
            }
        }
    }
}

impl Parsers {
    /// True if the server decodes the output with its special tokens
    /// (`skip_special_tokens: false`), whatever the request says. Parsers are to be fed the text
    /// that the server decodes.
    pub fn decode_special(self, request: &Request<'_>) -> bool {
        let is_by_reasoning = self.reasoning.is_some_and(|format| format.parser().grammar().is_some());
        let is_by_tools = self.tools.is_some_and(|format| {
            let is_adjusted = request.may_call || self.reasoning.is_some();
            is_adjusted && format.decodes(request.may_call)
        });
        is_by_reasoning || is_by_tools
    }

    /// True if the answer to a request that may call tools, or may not, can have other parts than
    /// its text.
    pub fn apply(self, may_call: bool) -> bool {
        let pair = Pair::from(self);
        let calls = self.tools.is_some() && (may_call || pair.are_machines() || pair.is_harmony());
        calls || self.reasoning.is_some()
    }

    /// True if the server parses tokens, not the text of its detokenizer.
    pub fn read_tokens(self) -> bool {
        Pair::from(self).is_harmony()
    }

    /// The id of a new call for which the model wrote none, in the server's form, from a random
    /// number.
    pub fn call_id(self, random: u64) -> String {
        self.tools.map_or_else(|| formats::plain_call_id(random), |format| format.call_id(random))
    }

    /// The parser of one streamed answer, from its first token.
    ///
    /// # Errors
    /// The vocabulary lacks a token without which the server would not have started.
    pub fn stream(
        self,
        request: &Request<'_>,
        vocabulary: &Vocabulary<'_>,
    ) -> Result<Box<dyn Parse>, Unsure> {
        let pair = Pair::from(self);
        let parser: Box<dyn Parse> = if pair.is_harmony() {
            Box::new(pair.harmony(vocabulary)?)
        } else {
            Box::new(pair.stream(request, vocabulary)?)
        };
        Ok(if request.single_call { Box::new(FirstCall(parser)) } else { parser })
    }

    /// The parts of one answer that is not streamed, from its tokens, each with the text that
    /// became certain with it.
    ///
    /// # Errors
    /// The server's answer depends on more than the output, or is an error.
    pub fn unstreamed(
        self,
        request: &Request<'_>,
        vocabulary: &Vocabulary<'_>,
        tokens: &[(TokenId, &str)],
    ) -> Result<ParsedMessage, Unsure> {
        let pair = Pair::from(self);
        let mut message = if pair.is_harmony() {
            pair.harmony(vocabulary)?.unstreamed(request, tokens)?
        } else {
            pair.unstreamed(request, vocabulary, tokens)?
        };
        if request.single_call {
            message.calls.truncate(1);
        }
        Ok(message)
    }
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    tools: Option<Tools>,
    reasoning: Option<Thoughts>,
}

impl From<Parsers> for Pair {
    fn from(parsers: Parsers) -> Self {
        Self {
            tools: parsers.tools.map(ToolFormat::parser),
            reasoning: parsers.reasoning.map(ReasoningFormat::parser),
        }
    }
}

impl Pair {
    /// True if each parser there is runs a grammar: then one looks for calls even where none may
    /// come, to hide them.
    fn are_machines(self) -> bool {
        self.tools.is_none_or(|tools| tools.grammar().is_some())
            && self.reasoning.is_none_or(|reasoning| reasoning.grammar().is_some())
    }

    /// True if one parser gives both. With any other in addition the server does not start.
    fn is_harmony(self) -> bool {
        let tools = self.tools.is_none_or(|tools| matches!(tools, Tools::Harmony));
        let reasoning = self.reasoning.is_none_or(|reasoning| matches!(reasoning, Thoughts::Harmony));
        tools && reasoning && (self.tools.is_some() || self.reasoning.is_some())
    }

    fn harmony(self, vocabulary: &Vocabulary<'_>) -> Result<Harmony, Unsure> {
        Harmony::new(vocabulary, self.reasoning.is_some(), self.tools.is_some())
    }

    fn setup(request: &Request<'_>, vocabulary: &Vocabulary<'_>, grammar: &'static Grammar) -> Arc<Setup> {
        Setup::new(grammar, vocabulary, Template(request.template), request.tools)
    }

    /// The tool parser, if it is in use for the request.
    fn calls(self, request: &Request<'_>, vocabulary: &Vocabulary<'_>) -> Result<Option<Calls>, Unsure> {
        let Some(tools) = self.tools else { return Ok(None) };
        if matches!(tools, Tools::Harmony) {
            return Err(Unsure);
        }
        if !request.may_call && !self.are_machines() {
            return Ok(None);
        }
        Ok(Some(match tools {
            Tools::Harmony => return Err(Unsure),
            Tools::Hermes => Calls::Hermes(Hermes::new()),
            // The server does not start without the token of Python.
            Tools::Llama => {
                (vocabulary.id)("<|python_tag|>").ok_or(Unsure)?;
                Calls::Llama(Llama::new())
            }
            Tools::Deepseek(layout) => Calls::Deepseek(Deepseek::new(layout, vocabulary).ok_or(Unsure)?),
            Tools::Grammar(grammar) if mistral::is_older(grammar, vocabulary) => {
                Calls::Mistral(Mistral::new(vocabulary).ok_or(Unsure)?)
            }
            Tools::Grammar(grammar) => {
                let drops_calls = !request.may_call && !request.tools.is_empty();
                let setup = Self::setup(request, vocabulary, grammar);
                Calls::Machine(Box::new(Machine::calls(setup, self.reasoning.is_none(), drops_calls)))
            }
        }))
    }

    /// The markers of reasoning, if it is parsed by them; `None` within if there is none to parse.
    fn think(
        kind: Thoughts,
        request: &Request<'_>,
        vocabulary: &Vocabulary<'_>,
    ) -> Result<Option<Think>, Unsure> {
        if matches!(kind, Thoughts::Harmony) {
            return Err(Unsure);
        }
        let template = Template(request.template);
        let is_requested = template.is_true("thinking") || template.is_true("enable_thinking");
        if matches!(kind, Thoughts::ThinkIfRequested) && !is_requested {
            return Ok(None);
        }
        Think::new(vocabulary).ok_or(Unsure).map(Some)
    }

    /// # Errors
    /// The server does not start with such a vocabulary.
    fn check(self, vocabulary: &Vocabulary<'_>) -> Result<(), Unsure> {
        let (tools, thoughts) =
            (self.tools.and_then(Tools::grammar), self.reasoning.and_then(Thoughts::grammar));
        let starts =
            [tools, thoughts].into_iter().flatten().all(|grammar| mistral::starts(grammar, vocabulary));
        starts.then_some(()).ok_or(Unsure)
    }

    fn stream(self, request: &Request<'_>, vocabulary: &Vocabulary<'_>) -> Result<Stream, Unsure> {
        self.check(vocabulary)?;
        let (reasoning, is_reasoning, count) = match self.reasoning {
            None => (None, false, Count::None),
            Some(Thoughts::Grammar(grammar)) => {
                let setup = Self::setup(request, vocabulary, grammar);
                let is_reasoning = !setup.has_ended(request.prompt);
                let count = if is_reasoning {
                    Count::Machine
                } else {
                    Count::Ids(Box::new(Counter::new(Arc::clone(&setup))))
                };
                (Some(Reasoning::Machine(Box::new(Machine::reasoning(setup)))), is_reasoning, count)
            }
            Some(kind) => match Self::think(kind, request, vocabulary)? {
                None => (None, false, Count::None),
                Some(think) => {
                    let is_reasoning = !think.has_ended(request.prompt);
                    (Some(Reasoning::Think(think)), is_reasoning, Count::Think(think, 0, 0))
                }
            },
        };
        let calls = self.calls(request, vocabulary)?;
        Ok(Stream { reasoning, calls, is_reasoning, hides_calls: !request.may_call, count })
    }

    fn unstreamed(
        self,
        request: &Request<'_>,
        vocabulary: &Vocabulary<'_>,
        tokens: &[(TokenId, &str)],
    ) -> Result<ParsedMessage, Unsure> {
        self.check(vocabulary)?;
        let text: String = tokens.iter().map(|(_, text)| *text).collect();
        let (reasoning, content, reasoning_tokens) = match self.reasoning {
            None => (None, Some(text), 0),
            Some(Thoughts::Grammar(grammar)) => {
                let setup = Self::setup(request, vocabulary, grammar);
                let mut counter = Counter::new(Arc::clone(&setup));
                for (token, text) in tokens {
                    counter.push(*token, text);
                }
                // Most parsers are not called if the model does not reason.
                let is_requested = setup.thinks() || grammar.thinks == Thinks::IfEitherAndEffort;
                let parts = || Machine::reasoning(setup).unstreamed_reasoning(&text);
                let (reasoning, content) = if is_requested { parts() } else { (None, Some(text)) };
                (reasoning, content, counter.count())
            }
            Some(kind) => match Self::think(kind, request, vocabulary)? {
                None => (None, Some(text), 0),
                Some(think) => {
                    let mut depth = 0;
                    let count = tokens.iter().map(|(token, _)| think.count(&mut depth, *token)).sum();
                    let (reasoning, content) = think::unstreamed(&text);
                    (reasoning, content, count)
                }
            },
        };
        let (content, mut calls) = self.unstreamed_calls(request, vocabulary, content)?;
        if !request.may_call {
            calls.clear();
        }
        Ok(ParsedMessage { reasoning, content, calls, reasoning_tokens })
    }

    fn unstreamed_calls(
        self,
        request: &Request<'_>,
        vocabulary: &Vocabulary<'_>,
        content: Option<String>,
    ) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
        let text = content.as_deref().unwrap_or("");
        match self.calls(request, vocabulary)? {
            None => Ok((content, Vec::new())),
            Some(Calls::Deepseek(deepseek)) => {
                Ok(deepseek::unstreamed(deepseek.layout(), text).unwrap_or((content, Vec::new())))
            }
            Some(calls @ (Calls::Hermes(_) | Calls::Llama(_))) => {
                let is_hermes = matches!(calls, Calls::Hermes(_));
                let (rest, calls) =
                    if is_hermes { hermes::unstreamed(text)? } else { llama::unstreamed(text)? };
                Ok((if calls.is_empty() { content } else { rest }, calls))
            }
            // The server does not look for calls, and has an empty text for none.
            Some(Calls::Mistral(_)) if !request.may_call && !request.tools.is_empty() => {
                Ok((Some(text.to_owned()), Vec::new()))
            }
            Some(Calls::Mistral(_)) => {
                let (rest, calls) = mistral::unstreamed(text)?;
                let is_rest = self.are_machines() || !calls.is_empty();
                let is_null = request.may_call && rest.as_deref() == Some("");
                let rest = if is_null { None } else { rest };
                Ok((if is_rest { rest } else { content }, calls))
            }
            Some(Calls::Machine(machine)) => {
                let (rest, calls) = machine.unstreamed_calls(text)?;
                if calls.is_empty() {
                    return Ok((if self.are_machines() { rest } else { content }, calls));
                }
                Ok((rest.filter(|text| !python::strip(text).is_empty()), calls))
            }
        }
    }
}
