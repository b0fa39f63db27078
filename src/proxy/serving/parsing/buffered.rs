//! The parts of an answer that is not streamed, from its complete output.
//!
//! Servers parse such answers by other code than streams. Until the parser here has proved itself,
//! and wherever it is not sure, the output is sent to the server's parser instead.

use std::sync::Arc;

use super::{ParserInput, Proof, decodes_special, step};
use crate::learning::answer_traits::AnswerTraits;
use crate::serving::calls::Calls;
use foretell_core::session::{Decode, Difference, PartsSeen};
use foretell_core::units::TokenId;
use foretell_net::fleet::identity::Identity;
use foretell_net::random::fresh_seed;
use foretell_parsers::parse::{self, ParsedMessage};
use foretell_parsers::text::Stepwise;
use foretell_wire::openai::Request;

/// One in so many answers is compared with the server's parser even where the parser here has
/// proved itself: a call of a few milliseconds.
const JUDGED: u64 = 16;

/// Parses the complete output of one request.
pub struct BufferedParser {
    identity: Arc<Identity>,
    request: Arc<Request>,
    traits: Arc<AnswerTraits>,
}

#[derive(Debug, Default)]
pub struct Parts {
    /// Reasoning, content and calls; `None` if they are not known.
    pub message: Option<ParsedMessage>,
    /// Tokens of the output that the server counts as reasoning; `None` if that is not known.
    pub reasoning_tokens: Option<u64>,
    /// The first difference between the server's parts and those by the parser here; `None` if
    /// there is none, or they were not compared.
    pub difference: Option<Difference>,
}

impl BufferedParser {
    pub fn new(identity: &Arc<Identity>, request: &Arc<Request>, traits: &Arc<AnswerTraits>) -> Self {
        Self { identity: Arc::clone(identity), request: Arc::clone(request), traits: Arc::clone(traits) }
    }

    /// The parts of an output, given without the token that ended it.
    pub async fn parts(&self, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Parts {
        let local = self.local(prompt, output);
        let counted = local.as_ref().map(|local| local.reasoning_tokens);
        let proof = Proof {
            alike: self.traits.buffered_parsed_alike(),
            parsers: self.identity.engine.parsing.parsers,
        };
        let proven = proof.is_enough_for(&self.request) && !self.traits.misparsed();
        if local.is_some() && proven && !fresh_seed().is_multiple_of(JUDGED) {
            return Parts { message: local, reasoning_tokens: counted, difference: None };
        }
        match (local, self.servers(calls, prompt, output).await) {
            (Some(local), Some(servers)) => match difference(&local, &servers) {
                None => {
                    let seen =
                        PartsSeen { reasoning: local.reasoning.is_some(), calls: !local.calls.is_empty() };
                    self.traits.has_parsed_buffered_alike(seen);
                    // The local parts have the ids that the model wrote.
                    Parts { message: Some(local), reasoning_tokens: counted, difference: None }
                }
                difference => Parts { message: Some(servers), reasoning_tokens: None, difference },
            },
            // Where the server does not answer, the local parts are used if that parser has proved
            // itself.
            (Some(local), None) if proven => {
                Parts { message: Some(local), reasoning_tokens: counted, difference: None }
            }
            (_, servers) => Parts { message: servers, reasoning_tokens: None, difference: None },
        }
    }

    /// The parts by the parser here; `None` if it is not sure.
    fn local(&self, prompt: &[TokenId], output: &[TokenId]) -> Option<ParsedMessage> {
        let Identity { tokenizer, engine, .. } = &*self.identity;
        let decoder = tokenizer.detokenizer(prompt, !decodes_special(&self.identity, &self.request));
        // A server that parses tokens may handle an incomplete character in another way.
        if engine.parsing.parsers.read_tokens() {
            let mut all = decoder.clone();
            for &token in output {
                all.push(token);
            }
            if all.is_inside_character() {
                return None;
            }
        }
        let mut decoder: Box<dyn Decode> = if engine.quirks().answers.broken_end.is_omitted(false) {
            Box::new(Stepwise::new(decoder, step(&self.identity, true)))
        } else {
            Box::new(decoder)
        };
        let mut pieces: Vec<(TokenId, String)> =
            output.iter().map(|&token| (token, decoder.push(token))).collect();
        if let Some((_, text)) = pieces.last_mut() {
            text.push_str(&decoder.flush());
        }
        let pieces: Vec<(TokenId, &str)> =
            pieces.iter().map(|(token, text)| (*token, text.as_str())).collect();
        let input = ParserInput::of(&self.request);
        parse::with_vocabulary(tokenizer, |vocabulary| {
            engine.parsing.parsers.unstreamed(&input.as_request(prompt), vocabulary, &pieces).ok()
        })
    }

    /// The parts by the server's parser; `None` if it gives none.
    async fn servers(&self, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Option<ParsedMessage> {
        // On this page the server decodes all special tokens as text.
        let decodes = decodes_special(&self.identity, &self.request);
        let is_text = |token: &TokenId| decodes || !self.identity.tokenizer.is_special(*token);
        let output: Vec<TokenId> = output.iter().copied().filter(is_text).collect();
        calls.parts(&self.request, prompt, &output).await
    }
}

/// The first difference between the parts that two parsers gave. Ids are not compared, since the
/// server's page makes new ones, nor reasoning tokens, which it does not count.
fn difference(local: &ParsedMessage, servers: &ParsedMessage) -> Option<Difference> {
    let text = |part, local: &Option<String>, servers: &Option<String>| {
        let [ours, theirs] = [local, servers].map(|text| text.as_deref().unwrap_or_default());
        let null = Difference { part, local: ours.len(), backend: theirs.len(), at: 0 };
        let null = (local.is_some() != servers.is_some()).then_some(null);
        Difference::between(part, ours, theirs).or(null)
    };
    let texts = [
        text("reasoning", &local.reasoning, &servers.reasoning),
        text("content", &local.content, &servers.content),
    ];
    let calls = (0..local.calls.len().max(servers.calls.len())).flat_map(|at| {
        let name =
            |parts: &ParsedMessage| parts.calls.get(at).map(|call| call.name.clone()).unwrap_or_default();
        let arguments = |parts: &ParsedMessage| {
            parts.calls.get(at).map(|call| call.arguments.clone()).unwrap_or_default()
        };
        [
            Difference::between("name", &name(local), &name(servers)),
            Difference::between("arguments", &arguments(local), &arguments(servers)),
        ]
    });
    Difference::first(texts.into_iter().chain(calls).flatten())
}
