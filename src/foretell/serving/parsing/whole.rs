//! The parts of an answer that is not streamed, from its complete output.
//!
//! Servers parse such answers by other code than streams. Until it has proved itself, and wherever
//! it is not sure, the parser here gives way to the server's own, to which the output is sent.

use std::sync::Arc;

use super::{Asked, Proof, decodes_special, step};
use crate::fleet::identity::Identity;
use crate::learning::answer_traits::AnswerTraits;
use crate::random::fresh_seed;
use crate::serving::calls::Calls;
use foretell_core::session::{Decode, Difference, PartsSeen};
use foretell_core::units::TokenId;
use foretell_engines::openai::Request;
use foretell_engines::parse::{self, ParsedMessage};
use foretell_engines::text::Stepwise;

/// One in so many answers is compared with the server's own even where the parser here has proved
/// itself: a call of a few milliseconds.
const JUDGED: u64 = 16;

/// Parses the complete output of one request.
pub struct WholeParser {
    identity: Arc<Identity>,
    request: Arc<Request>,
    traits: Arc<AnswerTraits>,
}

#[derive(Debug, Default)]
pub struct Parts {
    /// `None` if they cannot be told.
    pub whole: Option<ParsedMessage>,
    /// Tokens of the output that the server counts as reasoning; `None` if they cannot be told.
    pub reasoning_tokens: Option<u64>,
    /// The first difference between the server's parts and those by the parser here; `None` if
    /// there is none, or they were not compared.
    pub difference: Option<Difference>,
}

impl WholeParser {
    pub fn new(identity: &Arc<Identity>, request: &Arc<Request>, traits: &Arc<AnswerTraits>) -> Self {
        Self { identity: Arc::clone(identity), request: Arc::clone(request), traits: Arc::clone(traits) }
    }

    /// The parts of an output, given without the token that ended it.
    pub async fn parts(&self, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Parts {
        let own = self.own(prompt, output);
        let counted = own.as_ref().map(|own| own.reasoning_tokens);
        let proof =
            Proof { alike: self.traits.buffered_parsed_alike(), parsers: self.identity.engine.parsers };
        let proven = proof.is_enough_for(&self.request) && !self.traits.misparsed();
        if own.is_some() && proven && !fresh_seed().is_multiple_of(JUDGED) {
            return Parts { whole: own, reasoning_tokens: counted, difference: None };
        }
        let servers = self.servers(calls, prompt, output).await;
        let (Some(own), Some(servers)) = (&own, &servers) else {
            // Where the server does not answer, the parser here stands in only if it has proved
            // itself.
            let own = own.filter(|_| proven);
            let reasoning_tokens = counted.filter(|_| own.is_some());
            return Parts { whole: own.or(servers), reasoning_tokens, difference: None };
        };
        let difference = difference(own, servers);
        if difference.is_none() {
            let seen = PartsSeen { reasoning: own.reasoning.is_some(), calls: !own.calls.is_empty() };
            self.traits.has_parsed_buffered_alike(seen);
        }
        // Where both are the same, the own parts have the ids that the model wrote.
        let whole = if difference.is_some() { servers } else { own };
        let reasoning_tokens = counted.filter(|_| difference.is_none());
        Parts { whole: Some(whole.clone()), reasoning_tokens, difference }
    }

    /// The parts by the parser here; `None` if it is not sure.
    fn own(&self, prompt: &[TokenId], output: &[TokenId]) -> Option<ParsedMessage> {
        let Identity { tokenizer, engine, .. } = &*self.identity;
        let decoder = tokenizer.detokenizer(prompt, !decodes_special(&self.identity, &self.request));
        // Where the server parses tokens, the text of a cut character is its own matter.
        if engine.parsers.read_tokens() {
            let mut all = decoder.clone();
            for &token in output {
                all.push(token);
            }
            if all.is_inside_character() {
                return None;
            }
        }
        let mut decoder: Box<dyn Decode> = if engine.broken_end.is_omitted(false) {
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
        let asked = Asked::of(&self.request);
        parse::with_vocabulary(tokenizer, |vocabulary| {
            engine.parsers.unstreamed(&asked.as_request(prompt), vocabulary, &pieces).ok()
        })
    }

    /// The parts by the server's own parser; `None` if it gives none.
    async fn servers(&self, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Option<ParsedMessage> {
        // On this page the server decodes all special tokens as text.
        let decodes = decodes_special(&self.identity, &self.request);
        let is_text = |token: &TokenId| decodes || !self.identity.tokenizer.is_special(*token);
        let output: Vec<TokenId> = output.iter().copied().filter(is_text).collect();
        calls.parts(&self.request, prompt, &output).await
    }
}

/// The first difference between the parts that two parsers gave. The server's page has ids of its
/// own, and no count of reasoning tokens.
fn difference(own: &ParsedMessage, servers: &ParsedMessage) -> Option<Difference> {
    let text = |part, own: &Option<String>, servers: &Option<String>| {
        let [told, theirs] = [own, servers].map(|text| text.as_deref().unwrap_or_default());
        let null = Difference { part, local: told.len(), backend: theirs.len(), at: 0 };
        let null = (own.is_some() != servers.is_some()).then_some(null);
        Difference::between(part, told, theirs).or(null)
    };
    let texts = [
        text("reasoning", &own.reasoning, &servers.reasoning),
        text("content", &own.content, &servers.content),
    ];
    let calls = (0..own.calls.len().max(servers.calls.len())).flat_map(|at| {
        let name =
            |whole: &ParsedMessage| whole.calls.get(at).map(|call| call.name.clone()).unwrap_or_default();
        let arguments = |whole: &ParsedMessage| {
            whole.calls.get(at).map(|call| call.arguments.clone()).unwrap_or_default()
        };
        [
            Difference::between("name", &name(own), &name(servers)),
            Difference::between("arguments", &arguments(own), &arguments(servers)),
        ]
    });
    Difference::first(texts.into_iter().chain(calls).flatten())
}
