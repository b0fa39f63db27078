//! What the rows of a request get where its engine asks for drafts inside its steps.
//!
//! Such a request is passed through: the engine does everything with its text. Foretell decides by
//! the same policies what is drafted for it, and learns from its tokens.

use std::sync::Arc;

use super::exchange::Joining;
use super::run::MAX_PREDICTED;
use super::{SessionRunner, ruling};
use crate::learning::corpus::CorpusAccess;
use foretell_core::draft::corpus::Key;
use foretell_core::draft::{LookupSpec, Shared, Spelling};
use foretell_core::units::TokenId;
use foretell_drafts::joins::{Closed, LazyShared, Terms};
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{Identity, ServerKnowledge};
use foretell_policy::{Fact, Injection, LiveGates, Policy, inject};
use foretell_wire::openai::{Request, SamplingField};

impl SessionRunner {
    pub(super) fn terms_of(&self, joining: &Joining<'_>) -> (Terms, Option<String>) {
        let Joining { admitted, replica, may_use_corpus } = joining;
        let knowledge = self.setup.identities.knowledge(replica);
        let identity = match knowledge.as_deref() {
            Some(ServerKnowledge::Known(identity)) => Some(identity),
            _ => None,
        };
        let temperature = temperature(admitted.request, identity.map(|identity| &**identity));
        let rulebook = &self.setup.rulebook;
        let draw = |policy: &Arc<Policy>| rulebook.draw(policy, admitted.backend);
        let drawn = std::cell::OnceCell::new();
        let group = |policy: &Arc<Policy>| drawn.get_or_init(|| draw(policy)).group();
        let injection = inject(admitted, temperature, &rulebook.policies(), &group);
        let name = injection.policy.as_ref().map(|policy| policy.label());
        let lookups = if *may_use_corpus { &*injection.lookups } else { &[] };
        let (shared, corpus): (LazyShared, _) = match identity {
            Some(identity) => {
                let model = format!("{}/{}", replica.backend(), identity.engine_start.model);
                let key = Key { model, vocabulary: identity.engine_start.vocabulary.clone(), tenant: None };
                let scopes = lookups.iter().filter_map(LookupSpec::corpus_scope);
                let corpus = CorpusAccess::new(&self.setup.corpus, &key, admitted.head.tenant, scopes);
                let shared = shared(admitted.request, identity, &injection, corpus.shared());
                (LazyShared::new(Box::new(shared)), Some(corpus))
            }
            None => (LazyShared::new(Box::new(Shared::default)), None),
        };
        let learn = move |prompt: &[TokenId], output: &[TokenId]| {
            if let Some(corpus) = &corpus {
                corpus.learn(prompt, output);
            }
        };
        let drawn = drawn.into_inner();
        let ended = move |seconds: f64| {
            if let Some(drawn) = &drawn {
                drawn.ended(seconds);
            }
        };
        let terms = Terms {
            replica: replica.label().to_owned(),
            plain: injection.plain,
            closed: closed(injection.gates, replica),
            lookups: injection.lookups,
            shared,
            max_draft: injection.max_draft,
            forced: injection.forced,
            learn: Box::new(learn),
            ended: Box::new(ended),
        };
        (terms, name)
    }
}

/// The effective temperature: the client's, else the server's default.
fn temperature(request: &Request, identity: Option<&Identity>) -> Fact<f64> {
    match identity {
        Some(identity) => Fact::Known(identity.engine.sampling(request).0.temperature),
        None if request.sampling.set_by_client.has(SamplingField::Temperature) => {
            Fact::Known(request.sampling.temperature)
        }
        None => Fact::Unknown("the request leaves it to the server's default"),
    }
}

/// Makes the data that lookups read besides the row: the corpus, the client's prediction and
/// schema, and the tokens' spelling. Encoding a prediction may take long.
fn shared(
    request: &Request,
    identity: &Identity,
    injection: &Injection,
    corpus: Shared,
) -> impl FnOnce() -> Shared + use<> {
    let reads = |of: fn(&LookupSpec) -> bool| injection.plain.is_none() && injection.lookups.iter().any(of);
    let predicted = if reads(LookupSpec::reads_prediction) { request.prediction.as_deref() } else { None };
    let predicted = predicted.and_then(|text| text.get(..text.floor_char_boundary(MAX_PREDICTED)));
    let predicted = predicted.map(ToOwned::to_owned);
    let schema = if reads(LookupSpec::reads_schema) {
        identity
            .engine
            .sampling(request)
            .0
            .grammar
            .and_then(|grammar| grammar.schema().cloned())
            .map(Arc::new)
    } else {
        None
    };
    let tokenizer = Arc::clone(&identity.tokenizer);
    move || Shared {
        prediction: predicted.and_then(|text| tokenizer.encode(&text, false).ok()).unwrap_or_default().into(),
        spelling: Some(tokenizer as Arc<dyn Spelling>),
        schema,
        ..corpus
    }
}

/// The gates of the policy, read at every step.
fn closed(gates: Option<LiveGates>, replica: &Arc<Replica>) -> Closed {
    let replica = Arc::clone(replica);
    Box::new(move || {
        let signal = replica.load().map(|load| load.signal());
        gates.and_then(|gates| ruling::closed(&gates, &replica, signal.as_ref()))
    })
}
