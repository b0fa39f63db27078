//! Log-probabilities of an output that is written here.
//!
//! Every answer of the engine lists its tokens by ids at the places that it decides. They belong to
//! the place and not to the call: what is listed behind an output does not depend on who asked, so
//! the lists are kept by the output that they follow until the session emits a token there.
//!
//! Their texts are made here, of the tokenizer. One setting of a server's tokenizer is not in its
//! file: whether single tokens are tidied (`clean_up_tokenization_spaces`: " ." becomes "."). One
//! question shows it, once per process of the server.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use super::calls::Calls;
use super::exchange::Exchange;
use super::plan::SessionPlan;
use super::run::Run;
use crate::fleet::identity::Identity;
use crate::learning::answer_traits::{AnswerTraits, Tidies};
use foretell_core::session::Permission;
use foretell_core::units::TokenId;
use foretell_core::words::{PlainReason, VerifyResult};
use foretell_engines::dialect::{Chunk, Round};
use foretell_engines::openai::logprobs::join;
use foretell_engines::openai::{Listed, Logprobs, Request};
use foretell_engines::text::Tokenizer;

/// Texts of which single tokens are made, and which tidying changes.
const TIDIED: [&str; 8] = [" .", " ,", " ?", " !", " n't", " 's", " 've", " 're"];

/// Memory of one token in the list of a place, bytes: its text, number and bytes as JSON.
const ENTRY: u64 = 512;

/// The permission to which a request for log-probabilities is narrowed before this server; `None`
/// if it is not.
pub(super) fn permission(
    identity: &Identity,
    request: &Request,
    traits: &AnswerTraits,
) -> Option<Permission> {
    if request.sampling.logprobs.is_none() || !is_asked(identity) {
        return None;
    }
    match traits.tidies() {
        _ if !identity.tokenizer.is_byte_level() => Some(Permission::Plain(PlainReason::UntrustedIds)),
        Tidies::Never => None,
        Tidies::Unknown | Tidies::Asked => Some(Permission::Shadow(PlainReason::UntrustedIds)),
        Tidies::Always => Some(Permission::Plain(PlainReason::UntrustedIds)),
    }
}

/// The state of that in words for the operator; `None` if it does not matter.
pub(super) fn note(identity: &Identity, request: &Request, traits: &AnswerTraits) -> Option<String> {
    permission(identity, request, traits)?;
    let why = match traits.tidies() {
        _ if !identity.tokenizer.is_byte_level() => "its tokens are not made of bytes",
        Tidies::Always => "the server tidies the spaces of single tokens",
        Tidies::Never | Tidies::Unknown | Tidies::Asked => {
            "the server has not been asked how it writes tokens"
        }
    };
    Some(format!("Requests for log-probabilities stay plain: {why}."))
}

/// True if the server can be asked how it writes tokens; another one goes by its tokenizer's file.
fn is_asked(identity: &Identity) -> bool {
    let engine = &identity.engine;
    engine.dialect.codec().text_call(engine, 0).is_some()
}

/// Asks the server how it writes single tokens, if no other request has asked. `reason`: that for
/// which this one stays plain.
pub(super) fn learn(run: &Run, exchange: &Exchange, reason: PlainReason) {
    let (identity, traits) = (&run.plan.identity, Arc::clone(&run.answer_traits));
    let asks = exchange.request.sampling.logprobs.is_some() && reason == PlainReason::UntrustedIds;
    let asks = asks && identity.tokenizer.is_byte_level() && is_asked(identity);
    if !asks || !traits.begins_to_ask() {
        return;
    }
    let (calls, tokenizer) = (Calls::new(run, exchange), Arc::clone(&identity.tokenizer));
    tokio::spawn(async move {
        let spelled = |id: &TokenId| tokenizer.spelling(*id).and_then(|bytes| String::from_utf8(bytes).ok());
        let tidied = |id: &TokenId| spelled(id).is_some_and(|text| TIDIED.contains(&text.as_str()));
        let Some(token) = (0..tokenizer.end()).find(tidied) else { return traits.note_tidies(Tidies::Never) };
        traits.note_tidies(match calls.token_text(token).await {
            Some(text) if Some(text.as_str()) == spelled(&token).as_deref() => Tidies::Never,
            Some(_) => Tidies::Always,
            None => Tidies::Unknown,
        });
    });
}

/// Lists of the engine behind outputs, one for each place that may still come.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// The output that has been written.
    output: Vec<TokenId>,
    /// Lists with the tokens between that output and their place.
    ahead: Vec<(Vec<TokenId>, Listed)>,
}

impl Places {
    /// Keeps the lists of a round's answers, one for each row. A place without a list is not
    /// decided.
    pub fn learn_round(&self, put: &Round<'_>, listed: Vec<Listed>, result: &mut VerifyResult) {
        result.rows.truncate(listed.len());
        for (position, listed) in listed.into_iter().enumerate().take(result.rows.len()) {
            let path = position.checked_sub(1).map(|node| put.draft.path(node)).unwrap_or_default();
            self.learn(put.context.output, &path, listed);
        }
    }

    /// Keeps the list behind an output and the tokens of `path`.
    fn learn(&self, output: &[TokenId], path: &[TokenId], listed: Listed) {
        let mut known = self.0.lock();
        let both = output.iter().chain(path).copied();
        if both.clone().take(known.output.len()).eq(known.output.iter().copied()) {
            let rest = both.skip(known.output.len()).collect();
            known.ahead.push((rest, listed));
        }
    }

    /// The list where this token follows and was taken; `None` if none is known. Another call may
    /// have taken another token at the same place, or its answer may not have been used.
    fn take(&self, token: TokenId) -> Option<Listed> {
        let mut known = self.0.lock();
        let takes = |(path, listed): &(Vec<TokenId>, Listed)| {
            path.is_empty() && listed.first().is_some_and(|first| first.0 == token)
        };
        let here = known.ahead.iter().rposition(takes);
        let listed = here.map(|at| known.ahead.swap_remove(at).1);
        known.ahead.retain_mut(|(path, _)| {
            let follows = path.first() == Some(&token);
            if follows {
                path.remove(0);
            }
            follows
        });
        known.output.push(token);
        listed
    }
}

/// Writes the log-probabilities of one output.
pub(super) struct OutputLogprobs {
    writer: Logprobs,
    places: Arc<Places>,
    tokenizer: Arc<Tokenizer>,
    /// Log-probabilities that the server itself has sent since the last piece.
    sent: Value,
    /// Number of the likeliest tokens at each place.
    most: usize,
    /// Places so far of an answer that is not streamed; `None` of a stream.
    whole: Option<usize>,
}

impl OutputLogprobs {
    /// Those of a request; `None` if it asks for none.
    pub fn of(plan: &SessionPlan, request: &Request, places: &Arc<Places>) -> Option<Self> {
        let most = plan.sampling.logprobs? as usize;
        let whole = (!request.stream).then_some(0);
        let writer = Logprobs::new(request.route, most, false);
        let (tokenizer, places) = (Arc::clone(&plan.identity.tokenizer), Arc::clone(places));
        Some(Self { writer, places, tokenizer, sent: Value::Null, most, whole })
    }

    /// Takes the tokens of an event of the server's own stream; false if it writes them otherwise
    /// than they are written here.
    pub fn pass(&mut self, tokens: &[TokenId], event: &Value) -> bool {
        let tokenizer = &self.tokenizer;
        let sent = event.pointer("/choices/0/logprobs").filter(|sent| !sent.is_null());
        let alike = self.writer.pass(tokens, sent, &|ids| tokenizer.decode(ids, false).unwrap_or_default());
        for &token in tokens {
            self.places.take(token);
        }
        if let Some(places) = &mut self.whole {
            *places += tokens.len();
            join(&mut self.sent, sent.cloned().unwrap_or_default());
        }
        alike
    }

    /// Estimate of the bytes that an answer holds until its end.
    pub fn bytes(&self) -> u64 {
        (self.whole.unwrap_or(0) * (self.most + 1)) as u64 * ENTRY
    }

    /// Keeps the lists of an event of a later plain request behind this output; false if it lists
    /// less than was asked for.
    pub fn learn(&self, output: &[TokenId], chunk: &mut Chunk) -> bool {
        let listed = std::mem::take(&mut chunk.listed);
        let whole = listed.len() == chunk.tokens.len();
        for (position, listed) in listed.into_iter().enumerate() {
            self.places.learn(output, chunk.tokens.get(..position).unwrap_or_default(), listed);
        }
        whole
    }

    /// Log-probabilities that the server itself has sent since the last call.
    pub fn sent(&mut self) -> Value {
        self.sent.take()
    }

    /// Those of tokens that are written here; null if there are none.
    pub fn write(&mut self, tokens: &[TokenId]) -> Value {
        if tokens.is_empty() {
            return Value::Null;
        }
        if let Some(places) = &mut self.whole {
            *places += tokens.len();
        }
        let listed: Vec<_> = tokens.iter().map(|&token| (token, self.places.take(token))).collect();
        let tokenizer = &self.tokenizer;
        self.writer.write(&listed, &|ids| tokenizer.decode(ids, false).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_belongs_to_the_output_that_it_follows() {
        let places = Places::default();
        let listed = |token| vec![(token, -1.0)];
        places.learn(&[], &[], listed(1));
        places.learn(&[], &[1], listed(2));
        places.learn(&[], &[7], listed(8));
        places.learn(&[1], &[2], listed(3));
        places.learn(&[], &[], listed(5));
        assert_eq!(places.take(1), Some(listed(1)), "not that of another token");
        places.learn(&[], &[], listed(9));
        places.learn(&[7], &[], listed(9));
        assert_eq!(places.take(2), Some(listed(2)), "lists of other outputs do not matter");
        assert_eq!(places.take(3), Some(listed(3)), "asked for ahead");
        places.learn(&[1, 2, 3], &[], listed(5));
        assert_eq!(places.take(4), None, "the number of another token is none");
        assert!(places.0.lock().ahead.is_empty());
    }
}
