//! Who is behind a backend's address: which engine, which model, which vocabulary, since when.
//!
//! Everything learnt is keyed by this [`Epoch`]; a restarted engine or another tokenizer is a new one and
//! starts clean. Until the identity is known, requests are relayed.

mod ask;
mod pace;
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

use crate::dialect::{Dialect, Engine};
use crate::fleet::probe::{Limits, Report};
use crate::fleet::rounds_seen::RoundsSeen;
use crate::fleet::tie::Tie;
use crate::fleet::{Fleet, Replica};
use crate::text::Tokenizer;
use crate::words::{BypassReason, Plan};

pub use ask::{Recognised, Unknown, ask, models, one_start, recognise, tokenizer};

use watched::Watched;
pub use watched::shows_one;

/// What everything learnt is keyed by.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// The replica's label, such as `backend/0`.
    pub replica: String,
    /// The model id that it serves.
    pub model: String,
    /// The engine's own version.
    pub version: String,
    /// When its process began, in microseconds of Unix time, as it reports it; if it does not, how often it has been
    /// unreachable.
    pub started: u64,
    /// The version of its weights, where it reports one.
    pub weights: Option<String>,
    /// Fingerprint of the vocabulary, hexadecimal.
    pub vocabulary: String,
}

/// A backend that is known well enough to leap with.
#[derive(Clone)]
pub struct Identity {
    /// The key of everything learnt.
    pub epoch: Epoch,
    /// The engine that was recognised: dialect, plans, limits.
    pub engine: Arc<Engine>,
    /// The tokenizer of its model.
    pub tokenizer: Arc<Tokenizer>,
    /// Verify calls under way, and what verify rounds found in its cache.
    pub rounds_seen: Arc<RoundsSeen>,
    /// The last probe; `None` before the first.
    pub probe: Option<Arc<Report>>,
    /// How a new connection shows that it leads to the same process; `None` where the engine does not show its start, or
    /// names its process in each answer.
    pub tie: Option<Arc<Tie>>,
    /// Wakes the asking: an answer has come from another process.
    pub again: Arc<Notify>,
    /// Set once another engine has been recognised at its address: requests that began on it must not be gone on with there.
    pub replaced: Arc<AtomicBool>,
    /// What recognising it showed besides: the plans that it lacks, and the connections that were tried.
    pub(crate) recognised: Arc<Recognised>,
}

impl Identity {
    /// Whether round after round found nothing cached, as if another engine answered each. One that reports when
    /// it was started is known to be one: its cache may just be too small for what is asked at once.
    pub fn may_be_many(&self) -> bool {
        self.engine.started.is_none() && self.rounds_seen.finds_nothing_cached()
    }

    /// Whether the other is certainly not the same engine. One that was only out of reach, and reports no start, may be.
    fn is_other(&self, other: &Self) -> bool {
        let of = |identity: &Self| {
            let Epoch { model, version, weights, vocabulary, .. } = identity.epoch.clone();
            (model, version, weights, vocabulary)
        };
        of(self) != of(other)
    }

    /// A copy whose engine is known to have a working prefix cache.
    fn seen_caching(&self) -> Self {
        let engine = Engine { caches: Some(true), ..(*self.engine).clone() };
        Self { engine: Arc::new(engine), ..self.clone() }
    }
}

/// What is known about the server at a replica's address.
#[derive(Clone)]
pub enum Standing {
    /// It is recognised and can verify drafts.
    Known(Arc<Identity>),
    /// It is relayed: the reason, and the cause in words for the operator.
    Relayed(BypassReason, String),
}

/// How a replica is recognised and watched, as configured.
#[derive(Clone, Debug)]
pub struct Asking {
    /// Its dialect; `None` recognises it.
    pub dialect: Option<Dialect>,
    /// The tokenizer file of its model; `None` fetches it from the backend.
    pub tokenizer: Option<PathBuf>,
    /// The path at which its load is read; `None` takes the dialect's.
    pub load: Option<String>,
    /// Interval of reading its load.
    pub every: Duration,
    /// Whether it is probed without a request for it, as soon as it is idle.
    pub ready: bool,
    /// Bounds of a probe.
    pub limits: Limits,
    /// Plans that the operator has named; they are used even where their first call may crash the engine.
    pub named: Vec<Plan>,
    /// It bills per token: its list of models is read and nothing else.
    pub billed: bool,
}

/// The settings of each replica; `None` leaves it alone.
type AskingOf = Box<dyn Fn(&Replica) -> Option<Asking> + Send + Sync>;

/// Finds out which engine is behind each replica, again and again.
pub struct Identities {
    fleet: Arc<Fleet>,
    asking: AskingOf,
    known: RwLock<Vec<Arc<Watched>>>,
    /// Counts up whenever a replica has been asked.
    asked: watch::Sender<u64>,
}

impl Identities {
    /// Nothing is known yet about the replicas of `fleet`. `asking` gives the settings of each; `None` leaves it
    /// alone.
    pub fn new(
        fleet: Arc<Fleet>,
        asking: impl Fn(&Replica) -> Option<Asking> + Send + Sync + 'static,
    ) -> Self {
        let identities =
            Self { fleet, asking: Box::new(asking), known: RwLock::default(), asked: watch::Sender::new(0) };
        identities.follow();
        identities
    }

    /// Adds replicas that have come, and drops those that have left. Returns the new ones.
    fn follow(&self) -> Vec<Arc<Watched>> {
        let replicas = self.fleet.replicas();
        let mut known = self.known.write();
        known.retain(|known| {
            let stays = replicas.iter().any(|replica| Arc::ptr_eq(replica, &known.replica));
            if !stays {
                known.leave();
            }
            stays
        });
        let mut come = Vec::new();
        for replica in replicas {
            if known.iter().any(|known| Arc::ptr_eq(&known.replica, &replica)) {
                continue;
            }
            if let Some(asking) = (self.asking)(&replica) {
                let new = Arc::new(Watched::new(replica, asking));
                known.push(Arc::clone(&new));
                come.push(new);
            }
        }
        come
    }

    fn find(&self, replica: &Arc<Replica>) -> Option<Arc<Watched>> {
        self.known.read().iter().find(|known| Arc::ptr_eq(&known.replica, replica)).cloned()
    }

    /// What is known about a replica; `None` if it is not asked.
    pub fn standing(&self, replica: &Arc<Replica>) -> Option<Arc<Standing>> {
        self.find(replica).map(|known| known.standing.load_full())
    }

    /// What the admin API shows of a replica: epoch, plans and probe; `None` if it is not asked.
    pub fn shown(&self, replica: &Arc<Replica>) -> Option<Value> {
        let known = self.find(replica)?;
        let standing = known.standing.load();
        Some(match &**standing {
            Standing::Relayed(reason, why) => {
                json!({ "probe": { "verdict": format!("Relayed ({}): {why}.", reason.name()), "pays": null } })
            }
            Standing::Known(identity) => {
                let Epoch { model, version, started, vocabulary, .. } = &identity.epoch;
                let replica = known.replica.name();
                let vocabulary = vocabulary.get(..8).unwrap_or(vocabulary);
                let plans: Vec<_> = identity.engine.plans.iter().map(|plan| plan.name()).collect();
                json!({
                    "dialect": identity.engine.dialect.name(),
                    "epoch": format!("{replica}/{model}/{version}/{started}/{vocabulary}"),
                    "plans": plans,
                    "probe": identity.probe.as_ref().map(|probe| probe.to_json()),
                })
            }
        })
    }

    /// Measures a replica again, as soon as it is idle.
    ///
    /// # Errors
    /// The reason why it is not measured.
    pub fn reprobe(&self, replica: &Arc<Replica>) -> Result<(), String> {
        let known = self.find(replica).ok_or("it is not asked to verify")?;
        known.reprobe()
    }

    /// All replicas that are asked, each with its identity if that is known.
    pub fn all(&self) -> Vec<(Arc<Replica>, Option<Arc<Identity>>)> {
        self.known.read().iter().map(|known| (Arc::clone(&known.replica), known.identity())).collect()
    }

    /// Resolves once every replica has been asked at least once.
    pub async fn asked(&self) {
        let all = |_: &u64| self.known.read().iter().all(|known| known.is_asked());
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.asked.subscribe().wait_for(all).await;
    }

    /// Asks every replica until `stop`: often while it cannot be reached, seldom once it is known, ever more seldom
    /// where it cannot verify; also reads the load of each, and probes it. A replica that stops answering keeps its
    /// identity (its requests fail by themselves); one that answers as another engine gets a new one.
    pub async fn keep_asking(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = self.fleet.changes();
        self.follow();
        let mut come: Vec<Arc<Watched>> = self.known.read().clone();
        loop {
            for known in come {
                self.look_after(&known, &stop);
            }
            tokio::select! {
                () = stop.cancelled() => return,
                _ = changes.changed() => come = self.follow(),
            }
        }
    }

    /// Starts the tasks of one replica, which end when it leaves the fleet or with `stop`.
    fn look_after(self: &Arc<Self>, known: &Arc<Watched>, stop: &CancellationToken) {
        let identities = Arc::clone(self);
        let asked = move || identities.asked.send_modify(|asked| *asked += 1);
        let work = {
            let known = Arc::clone(known);
            async move {
                tokio::join!(
                    Arc::clone(&known).keep_asking(asked),
                    Arc::clone(&known).keep_reading(),
                    Arc::clone(&known).keep_probing(),
                )
            }
        };
        let (known, stop) = (Arc::clone(known), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = known.left() => {}
                _ = work => {}
            }
        });
    }
}
