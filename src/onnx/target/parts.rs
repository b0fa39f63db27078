//! Output parsers of the ONNX server: tool calls and reasoning, parsed as vLLM parses them.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::target::words::Words;
use foretell_core::session::parse::{Parse, Parsed};
use foretell_core::units::TokenId;
use foretell_parsers::parse::{self, ParsedMessage, Parsers, ToolCall, Unsure};
use foretell_wire::openai::ForcedCalls;

/// Fields of a chat request that decide how its answer is parsed.
#[derive(Clone, Debug, Default)]
pub(super) struct ParseOptions {
    /// The functions that are offered.
    pub(super) tools: Vec<Value>,
    pub(super) may_call: bool,
    /// All calls but the first are omitted.
    pub(super) single_call: bool,
    /// Calls that must be made.
    pub(super) forced: Option<ForcedCalls>,
    /// Variables of the chat template.
    pub(super) template: Option<Map<String, Value>>,
}

impl ParseOptions {
    fn request<'a>(&'a self, prompt: &'a [TokenId]) -> parse::Request<'a> {
        parse::Request {
            tools: &self.tools,
            may_call: self.may_call,
            single_call: self.single_call,
            template: self.template.as_ref(),
            prompt,
        }
    }
}

/// The parsers of a server.
#[derive(Clone)]
pub(super) struct Parsing {
    pub(super) parsers: Parsers,
    pub(super) words: Arc<dyn Words>,
}

impl Parsing {
    /// Checks that the vocabulary has the markers of the parsers.
    ///
    /// # Errors
    /// One of them is missing.
    pub(super) fn check(&self) -> Result<(), Unsure> {
        let options = ParseOptions { may_call: true, ..ParseOptions::default() };
        if self.parsers == Parsers::default() { Ok(()) } else { self.stream(&options, &[]).map(drop) }
    }

    /// The id of a new call, in the form of the server of this format.
    pub(super) fn call_id(&self) -> String {
        self.parsers.call_id(RandomState::new().hash_one("call"))
    }

    /// True if the answer to a chat can have other parts than its text.
    pub(super) fn applies(&self, options: &ParseOptions) -> bool {
        self.parsers.apply(options.may_call)
    }

    /// True if the answer to a chat is decoded with its special tokens.
    pub(super) fn decodes_special(&self, options: &ParseOptions) -> bool {
        self.parsers.decode_special(&options.request(&[]))
    }

    /// The parser of one streamed answer.
    ///
    /// # Errors
    /// The vocabulary lacks a marker.
    pub(super) fn stream(
        &self,
        options: &ParseOptions,
        prompt: &[TokenId],
    ) -> Result<Box<dyn Parse>, Unsure> {
        let tokenizer = self.words.tokenizer().ok_or(Unsure)?;
        parse::with_vocabulary(tokenizer, |vocabulary| {
            self.parsers.stream(&options.request(prompt), vocabulary)
        })
    }

    /// The parts of one answer that is not streamed, from its tokens, each with the text that
    /// became certain with it. Where vLLM's answer would be an error, it is that of a stream.
    pub(super) fn buffered(
        &self,
        options: &ParseOptions,
        prompt: &[TokenId],
        pieces: &[(TokenId, String)],
    ) -> ParsedMessage {
        let texts: Vec<(TokenId, &str)> = pieces.iter().map(|(id, text)| (*id, text.as_str())).collect();
        let tokenizer = self.words.tokenizer().ok_or(Unsure);
        let answer = tokenizer.and_then(|tokenizer| {
            parse::with_vocabulary(tokenizer, |vocabulary| {
                self.parsers.unstreamed(&options.request(prompt), vocabulary, &texts)
            })
        });
        answer.or_else(|_| self.joined(options, prompt, &texts)).unwrap_or_default()
    }

    fn joined(
        &self,
        options: &ParseOptions,
        prompt: &[TokenId],
        pieces: &[(TokenId, &str)],
    ) -> Result<ParsedMessage, Unsure> {
        let mut parser = self.stream(options, prompt)?;
        let mut parsed = Parsed::default();
        for (token, text) in pieces {
            parsed.append(parser.push(*token, text));
        }
        parsed.append(parser.finish());
        let text = |text: String| Some(text).filter(|text| !text.is_empty());
        let calls = parsed.calls.into_iter().map(|call| ToolCall {
            id: call.id,
            name: call.name.unwrap_or_default(),
            arguments: call.arguments,
        });
        Ok(ParsedMessage {
            reasoning: text(parsed.reasoning),
            content: text(parsed.text),
            calls: calls.collect(),
            reasoning_tokens: parser.reasoning_tokens(),
        })
    }
}

/// A complete output to be parsed, in the form of vLLM's page for that.
#[derive(Deserialize)]
pub(super) struct Derender<'a> {
    pub(super) generate_response: Generated,
    /// The chat request, which is read like any other.
    #[serde(borrow)]
    pub(super) chat_request: &'a RawValue,
}

/// An output by its ids.
#[derive(Deserialize)]
pub(super) struct Generated {
    #[serde(default)]
    pub(super) prompt_token_ids: Vec<TokenId>,
    pub(super) choices: Vec<GeneratedChoice>,
}

#[derive(Deserialize)]
pub(super) struct GeneratedChoice {
    pub(super) token_ids: Vec<TokenId>,
}
