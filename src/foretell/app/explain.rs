//! Explains a request without a running proxy: the server is identified by the same calls that a
//! proxy uses, without any verify request. Facts that those calls cannot determine are reported as
//! unknown.

use std::sync::Arc;

use super::{AssembleError, recognition_settings, renderer, settings};
use crate::admin::explain::{self, Question, ServerFacts};
use foretell_config::process::{Backend, DrafterModel, Process};
use foretell_core::words::PassthroughReason;
use foretell_engines::passthrough;
use foretell_net::fleet::identity::{self, Identity, RecognitionSettings, Renderer, Unknown};
use foretell_net::fleet::rounds_seen::RoundsSeen;
use foretell_net::fleet::{Replica, SystemResolver};
use foretell_parsers::text::Tokenizer;
use foretell_policy::part::ModelState;
use foretell_policy::{self as policy, Explanation, Fact, PolicySet, Terms};
use foretell_proxy::gateway::Shared;
use foretell_proxy::serving::{drafters, ruling};

/// Result of identifying a server.
enum Answered {
    Known(Arc<Identity>),
    Passthrough(PassthroughReason, String),
    Down(String),
    NotCalled(&'static str),
}

const OFFLINE: &str = "the server was not queried";
const NOT_ONE: &str =
    "whether one engine answers at this address was not tried, since that takes verify requests";

/// Explains how a proxy with these settings would serve a request. `may_call`: the server may be
/// called.
///
/// # Errors
/// A proxy could not start with these settings.
pub async fn explain(
    process: &Process,
    policies: &PolicySet,
    question: &Question,
    may_call: bool,
) -> Result<Explanation, AssembleError> {
    let settings = settings(process)?;
    let shared = Shared::new(&settings)?;
    if may_call {
        shared.fleet.discover(&SystemResolver).await;
    }
    let replica = shared.fleet.would_pick(question.model());
    let named = |replica: &Replica| process.backends.iter().find(|backend| backend.name == replica.backend());
    let backend = replica.as_deref().and_then(named);
    let answered = match (replica.as_deref(), backend) {
        (Some(replica), Some(backend)) => {
            let renderer = renderer(process, backend)?;
            answered(replica, renderer, backend, may_call).await
        }
        _ => Answered::NotCalled("there is no server to ask"),
    };
    if let Some(replica) = replica.as_deref() {
        note(replica, &answered);
    }
    let terms = backend.map(|backend| ruling::terms(&backend.methods)).unwrap_or_default();
    let mut notes = Vec::new();
    if let (Answered::Known(_), Some(replica)) = (&answered, &replica) {
        notes.push(format!(
            "{} was identified, but not measured: `foretell probe` says whether speculation pays",
            replica.url()
        ));
    }
    let known = ServerFacts {
        source: if matches!(answered, Answered::NotCalled(_)) { "nobody" } else { "server" },
        replica: replica.as_ref(),
        server: fact(&answered, &terms),
        models: &|name| state(name, process.drafters.get(name), &answered),
        group: &|_| policy::Group::default(),
        closed: &|_| None,
        notes,
        now: &|_, _, _| None,
    };
    Ok(explain::explain(question, process, policies, &shared, known))
}

/// Identifies the engine of a replica.
async fn answered(replica: &Replica, renderer: Renderer, backend: &Backend, may_call: bool) -> Answered {
    let dialect = backend.dialect.spoken();
    if backend.billed {
        let why = "it bills per token, so it gets no verify requests";
        return Answered::Passthrough(PassthroughReason::Billed, why.to_owned());
    }
    if let Some(dialect) = dialect.filter(|dialect| passthrough::PASSTHROUGH.contains(dialect)) {
        return Answered::Passthrough(
            PassthroughReason::NoVerifyMethod,
            format!("requests to {} are only passed through", dialect.name()),
        );
    }
    if !may_call {
        return Answered::NotCalled(OFFLINE);
    }
    let rounds_seen = Arc::new(RoundsSeen::default());
    let settings = RecognitionSettings { renderer, ..recognition_settings(backend) };
    match identity::identify(replica, &settings, None, identity::Away::default(), &rounds_seen).await {
        Ok(identity) => Answered::Known(identity),
        Err(Unknown::Foreign(reason, why)) => Answered::Passthrough(reason, why),
        Err(unknown @ Unknown::PassedThrough(..)) => {
            Answered::Passthrough(PassthroughReason::NoVerifyMethod, unknown.to_string())
        }
        Err(Unknown::Stranger(why) | Unknown::Unchecked(why)) => {
            Answered::Passthrough(PassthroughReason::NoVerifyMethod, why)
        }
        Err(Unknown::Unreachable(why) | Unknown::Late(why)) => Answered::Down(why),
        Err(Unknown::Locked(status)) => Answered::Passthrough(
            PassthroughReason::NoVerifyMethod,
            format!("it answers {status} without a key: name one in connect.auth.own_token_file"),
        ),
    }
}

/// Records the result at the replica, as a running proxy would.
fn note(replica: &Replica, answered: &Answered) {
    match answered {
        Answered::Known(identity) => replica.set_dialect(identity.engine.dialect.name(), true),
        Answered::Passthrough(reason, _) => {
            replica.set_dialect("passthrough", *reason != PassthroughReason::NoVerifyMethod);
        }
        // Leaves the decision open until the server's step.
        Answered::Down(_) | Answered::NotCalled(_) => replica.set_dialect("auto", true),
    }
}

fn fact<'a>(answered: &'a Answered, terms: &'a Terms) -> Fact<policy::ServerState<'a>> {
    match answered {
        Answered::NotCalled(why) => Fact::Unknown(why),
        Answered::Down(why) => Fact::Known(policy::ServerState::Down(why)),
        Answered::Passthrough(reason, why) => Fact::Known(policy::ServerState::Passthrough(*reason, why)),
        Answered::Known(identity) => {
            let one = identity::shows_one(&identity.engine);
            let single = if one { Fact::Known(true) } else { Fact::Unknown(NOT_ONE) };
            Fact::Known(policy::ServerState::Known(policy::Server {
                single,
                ..ruling::server(identity, terms)
            }))
        }
    }
}

/// State of a drafter model for this server, by the tokenizer in its folder.
fn state(name: &str, model: Option<&DrafterModel>, answered: &Answered) -> ModelState {
    let Answered::Known(identity) = answered else {
        return ModelState::Unknown("the server's vocabulary is not known");
    };
    let Some(DrafterModel { path, tokenizer, .. }) = model else { return ModelState::NotLoaded };
    match Tokenizer::from_file(tokenizer.as_ref().unwrap_or(path)) {
        Ok(tokenizer) => drafters::compared(name, &tokenizer, identity),
        Err(_) => ModelState::Unknown("its tokenizer cannot be read"),
    }
}
