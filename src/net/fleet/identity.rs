//! Identity of the server at a backend's address: engine, model, vocabulary, start time.
//!
//! All learnt data is keyed by this [`EngineStart`]; a restarted engine or another tokenizer is a
//! new one and starts clean. Until the identity is known, requests are passed through.

mod confirm;
mod pace;
mod recognition;
mod unknown;
mod watched;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::RwLock;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use serde::{Deserialize, Serialize};

use crate::clock::unix_time;
use crate::fleet::probe::{Limits, ProbeReport};
use crate::fleet::rounds_seen::RoundsSeen;
use crate::fleet::tie::Tie;
use crate::fleet::{Fleet, Replica};
use foretell_core::words::{PassthroughReason, VerifyMethod};
use foretell_engines::Confirmation;
use foretell_engines::{Dialect, Engine, PrefixCache};
use foretell_parsers::parse::Parsers;
use foretell_parsers::text::Tokenizer;

pub use confirm::{ModelConfig, confirm};
pub use recognition::{Away, Recognised, identify, models, one_start, recognise, tokenizer};
pub use unknown::Unknown;
pub use watched::shows_one;
use watched::{ModelChange, Watched};

/// An engine start: the same process, model and version. The key of all learnt data.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EngineStart {
    /// The replica's label, such as `backend/0`.
    pub replica: String,
    /// The model id that it serves.
    pub model: String,
    pub version: String,
    /// Start time that its process reports, microseconds of Unix time; if it reports none, the
    /// random id of its process, or else the number of times that it became unreachable.
    pub started: u64,
    /// The version of its weights, where it reports one.
    pub weights: Option<String>,
    /// Fingerprint of the vocabulary, hexadecimal.
    pub vocabulary: String,
}

/// A backend that is known well enough to speculate on.
#[derive(Clone)]
pub struct Identity {
    /// The engine start, the key of all learnt data.
    pub engine_start: EngineStart,
    /// The recognised engine: dialect, verification methods, limits.
    pub engine: Arc<Engine>,
    pub tokenizer: Arc<Tokenizer>,
    /// Verify requests under way, and cache hits of verify rounds.
    pub rounds_seen: Arc<RoundsSeen>,
    /// The last probe; `None` before the first.
    pub probe: Option<Arc<ProbeReport>>,
    /// The test that a new connection leads to the same process; `None` if the engine does not
    /// report its start time, or identifies its process in each answer.
    pub tie: Option<Arc<Tie>>,
    /// The server that renders its chat requests; `None`: it does so itself.
    pub renderer: Option<Arc<Replica>>,
    /// Triggers recognition: an answer has come from another process.
    pub reidentify: Arc<Notify>,
    /// Set once another engine has been recognised at its address: requests that began on it must
    /// not be continued there.
    pub replaced: Arc<AtomicBool>,
    /// Further results of recognition: the verification methods that it lacks, and the tested
    /// connections.
    pub recognised: Arc<Recognised>,
}

impl Identity {
    /// True if consecutive rounds found nothing cached, as if another engine answered each. An
    /// engine that reports its start time is known to be a single one: its cache may just be too
    /// small for the concurrent requests.
    pub fn may_be_many(&self) -> bool {
        self.engine.process.started.is_none() && self.rounds_seen.finds_nothing_cached()
    }

    /// True if the other has another key, or knows of a renderer that was away before.
    fn is_news(&self, other: &Self) -> bool {
        self.engine_start != other.engine_start || self.engine.pages.renders != other.engine.pages.renders
    }

    /// True if the other is certainly not the same engine. One that was only unreachable, and
    /// reports no start time, may be.
    fn is_other(&self, other: &Self) -> bool {
        let of = |identity: &Self| {
            let EngineStart { model, version, weights, vocabulary, .. } = identity.engine_start.clone();
            (model, version, weights, vocabulary)
        };
        of(self) != of(other)
    }

    /// A copy whose engine is known to have a working prefix cache.
    fn seen_caching(&self) -> Self {
        let cache = PrefixCache { works: Some(true), ..self.engine.cache };
        let engine = Engine { cache, ..(*self.engine).clone() };
        Self { engine: Arc::new(engine), ..self.clone() }
    }
}

/// Knowledge about the server at a replica's address.
#[derive(Clone)]
pub enum ServerKnowledge {
    /// It is recognised and can verify drafts.
    Known(Arc<Identity>),
    /// Its requests are passed through, with the reason and the cause for the operator.
    Passthrough(PassthroughReason, String),
}

/// Reason that for passing through the requests to a replica before its first answer.
const UNRECOGNISED: &str = "it has not been recognised yet";

#[derive(Clone, Debug)]
pub struct RecognitionSettings {
    /// Its dialect; `None` recognises it.
    pub dialect: Option<Dialect>,
    /// The tokenizer file of its model; `None` fetches it from the backend.
    pub tokenizer: Option<PathBuf>,
    /// The output parsers that its server was started with.
    pub parsers: Parsers,
    /// The `generation_config.json` of its model; `None` if its folder is not known.
    pub generation_config: Option<ModelConfig>,
    /// The server that renders its chat requests.
    pub renderer: Renderer,
    /// The path at which its load is read; `None` takes the dialect's.
    pub load: Option<String>,
    /// Interval of reading its load.
    pub every: Duration,
    /// True if it is probed without a request for it, as soon as it is idle.
    pub ready: bool,
    pub limits: Limits,
    /// Verification methods that the operator has named; they are used even where their first call
    /// may crash the engine.
    pub named: Vec<VerifyMethod>,
    /// True if it bills per token: only its list of models is read.
    pub billed: bool,
}

/// The server that renders a replica's chat requests and parses outputs.
#[derive(Clone, Debug, Default)]
pub enum Renderer {
    /// The replica itself, if it can.
    #[default]
    Itself,
    Never,
    /// Another server.
    Other(Arc<Replica>),
}

impl Renderer {
    pub fn other(&self) -> Option<&Arc<Replica>> {
        match self {
            Self::Other(server) => Some(server),
            Self::Itself | Self::Never => None,
        }
    }
}

/// The settings of each replica; `None` excludes it.
type SettingsOf = Box<dyn Fn(&Replica) -> Option<RecognitionSettings> + Send + Sync>;

/// Recognises the engine of each replica, repeatedly.
pub struct Identities {
    fleet: Arc<Fleet>,
    settings_of: SettingsOf,
    known: RwLock<Vec<Arc<Watched>>>,
    /// Increases after each recognition attempt.
    attempts: watch::Sender<u64>,
}

impl Identities {
    /// Starts without knowledge about the replicas of `fleet`. `settings_of` gives the settings of
    /// each; `None` excludes it.
    pub fn new(
        fleet: Arc<Fleet>,
        settings_of: impl Fn(&Replica) -> Option<RecognitionSettings> + Send + Sync + 'static,
    ) -> Self {
        let (settings_of, attempts) = (Box::new(settings_of), watch::Sender::new(0));
        let identities = Self { fleet, settings_of, known: RwLock::default(), attempts };
        identities.follow();
        identities
    }

    /// Adds new replicas, and drops removed ones. Returns the new ones.
    fn follow(&self) -> Vec<Arc<Watched>> {
        let replicas = self.fleet.replicas();
        let mut known = self.known.write();
        known.retain(|known| {
            let stays = replicas.iter().any(|replica| Arc::ptr_eq(replica, &known.replica));
            if !stays {
                known.remove();
            }
            stays
        });
        let mut added = Vec::new();
        for replica in replicas {
            if known.iter().any(|known| Arc::ptr_eq(&known.replica, &replica)) {
                continue;
            }
            if let Some(settings) = (self.settings_of)(&replica) {
                let new = Arc::new(Watched::new(replica, settings));
                known.push(Arc::clone(&new));
                added.push(new);
            }
        }
        added
    }

    fn find(&self, replica: &Arc<Replica>) -> Option<Arc<Watched>> {
        self.known.read().iter().find(|known| Arc::ptr_eq(&known.replica, replica)).cloned()
    }

    /// The knowledge about a replica; `None` if it is excluded.
    pub fn knowledge(&self, replica: &Arc<Replica>) -> Option<Arc<ServerKnowledge>> {
        self.find(replica).map(|known| known.knowledge.load_full())
    }

    /// A replica in the admin API: engine start, verification methods and probe; `None` if it is
    /// excluded.
    pub fn shown(&self, replica: &Arc<Replica>) -> Option<Value> {
        let known = self.find(replica)?;
        let knowledge = known.knowledge.load();
        let changed = known.model_change().map(|ModelChange { from, to, at }| {
            json!({ "from": from, "to": to, "at": unix_time(at).as_secs_f64() })
        });
        let mut shown = match &**knowledge {
            ServerKnowledge::Passthrough(reason, why) => {
                let wrong = (why != UNRECOGNISED && *reason != PassthroughReason::Billed)
                    .then(|| format!("no request is eligible ({}): {why}", reason.name()));
                json!({
                    "problem": wrong,
                    "probe": { "conclusion": format!("Passed through ({}): {why}.", reason.name()), "pays": null },
                })
            }
            ServerKnowledge::Known(identity) => {
                let EngineStart { model, version, started, vocabulary, .. } = &identity.engine_start;
                let replica = known.replica.backend();
                let vocabulary = vocabulary.get(..8).unwrap_or(vocabulary);
                let methods: Vec<_> = identity.engine.methods.iter().map(|method| method.name()).collect();
                json!({
                    "engine": identity.engine.dialect.name(),
                    "engine_start": format!("{replica}/{model}/{version}/{started}/{vocabulary}"),
                    "verify": methods,
                    "problem": identity.engine.defaults.confirmation.as_ref().and_then(Confirmation::problem),
                    "probe": identity.probe.as_ref().map(|probe| probe.to_json()),
                })
            }
        };
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("model_changed".to_owned(), json!(changed));
        }
        Some(shown)
    }

    /// Repeats the probe of a replica, as soon as it is idle.
    ///
    /// # Errors
    /// The reason that it is not measured.
    pub fn reprobe(&self, replica: &Arc<Replica>) -> Result<(), String> {
        let known = self.find(replica).ok_or("it is not used for verification")?;
        known.reprobe()
    }

    /// All monitored replicas, each with its identity if that is known.
    pub fn all(&self) -> Vec<(Arc<Replica>, Option<Arc<Identity>>)> {
        self.known.read().iter().map(|known| (Arc::clone(&known.replica), known.identity())).collect()
    }

    /// The replicas that have not been recognised yet.
    pub fn silent(&self) -> Vec<Arc<Replica>> {
        let is_silent = |known: &&Arc<Watched>| {
            let knowledge = known.knowledge.load();
            matches!(&**knowledge, ServerKnowledge::Passthrough(_, why) if why == UNRECOGNISED)
        };
        self.known.read().iter().filter(is_silent).map(|known| Arc::clone(&known.replica)).collect()
    }

    /// Resolves after the first recognition attempt for every replica.
    pub async fn attempted(&self) {
        let all = |_: &u64| self.known.read().iter().all(|known| known.is_attempted());
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.attempts.subscribe().wait_for(all).await;
    }

    /// Recognises every replica repeatedly until `stop`: at short intervals while it is
    /// unreachable, at longer ones once it is known, at growing ones if it cannot verify; also
    /// reads the load of each, and probes it. The identity of a replica that stops answering stays
    /// (its requests fail by themselves); one that answers as another engine gets a new one.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = self.fleet.changes();
        self.follow();
        let mut added: Vec<Arc<Watched>> = self.known.read().clone();
        loop {
            for known in added {
                self.look_after(&known, &stop);
            }
            tokio::select! {
                () = stop.cancelled() => return,
                _ = changes.changed() => added = self.follow(),
            }
        }
    }

    /// Starts the tasks of one replica, which end when it leaves the fleet or with `stop`.
    fn look_after(self: &Arc<Self>, known: &Arc<Watched>, stop: &CancellationToken) {
        let identities = Arc::clone(self);
        let attempted = move || identities.attempts.send_modify(|attempts| *attempts += 1);
        let work = {
            let known = Arc::clone(known);
            async move {
                tokio::join!(
                    Arc::clone(&known).recognition_loop(attempted),
                    Arc::clone(&known).load_loop(),
                    Arc::clone(&known).probe_loop(),
                )
            }
        };
        let (known, stop) = (Arc::clone(known), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = known.removed() => {}
                _ = work => {}
            }
        });
    }
}
