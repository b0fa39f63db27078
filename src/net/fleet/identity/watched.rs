//! The state and the tasks of one replica: recognition, load, probe.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::fleet::identity::pace::{LastProbe, Pace, REPROBE, Settled};
use crate::fleet::identity::recognition::{self, Away};
use crate::fleet::identity::unknown::Unknown;
use crate::fleet::identity::{EngineStart, Identity, RecognitionSettings, ServerKnowledge, UNRECOGNISED};
use crate::fleet::load::STALE;
use crate::fleet::probe::{self, ProbeReport, Seen};
use crate::fleet::rounds_seen::RoundsSeen;
use crate::fleet::{Probed, Replica};
use crate::random::{SharedSplitMix64, fresh_seed};
use foretell_core::words::PassthroughReason;
use foretell_engines::Dialect;
use foretell_engines::passthrough::PASSTHROUGH;
use foretell_engines::{Engine, PrefixCache};

/// The dialect that is shown for a recognised server to which requests are only passed through.
const SHOWN_PASSTHROUGH: &str = "passthrough";
/// The dialect that is shown for a server that is not recognised.
const STRANGER: &str = "unknown";
/// Interval at which a replica is checked for being idle.
const LOOK: Duration = Duration::from_millis(250);
/// Age from which on a load report is ignored: its page has disappeared.
const OUTDATED: Duration = Duration::from_mins(1);
/// Maximum random delay before a probe, so that the replicas of a fleet are not all probed at once,
/// nor one of them by all sidecars that start with it.
const JITTER: Duration = Duration::from_millis(1_500);
/// Retry interval of the single-engine check, where it takes calls that compute.
const ONE_RETRY: Duration = Duration::from_mins(1);

/// The last result of the single-engine check.
struct SingleCheck {
    engine_start: EngineStart,
    at: Instant,
    /// True if a single engine answers.
    shown: bool,
}

/// True if it is known without a trial that a single engine answers.
pub fn shows_one(engine: &Engine) -> bool {
    engine.process.started.is_some() || engine.methods.is_empty()
}

/// A change of the model at an address.
#[derive(Clone, Debug)]
pub(super) struct ModelChange {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) at: SystemTime,
}

/// One replica and what is known about it.
pub(super) struct Watched {
    pub(super) replica: Arc<Replica>,
    settings: RecognitionSettings,
    pub(super) knowledge: ArcSwap<ServerKnowledge>,
    /// The model that answered last, and the last change of it.
    model: Mutex<(Option<String>, Option<ModelChange>)>,
    /// Number of times that it has become unreachable, and that number when it was recognised.
    away: AtomicU64,
    away_before: AtomicU64,
    /// Number of times that it had returned when it was recognised.
    returns_before: AtomicU64,
    rounds_seen: Arc<RoundsSeen>,
    /// The load page of a server that is passed through; `None` if it is another one, or has none.
    load_page: Mutex<Option<(Dialect, &'static str)>>,
    /// `None` before the check.
    single: Mutex<Option<SingleCheck>>,
    /// The last test of defaults that could not be decided, and the pause before the next; `None`
    /// if there are none.
    confirms: Mutex<Option<(Instant, Duration)>>,
    /// Wakes the prober: a probe is requested, regardless of the configuration.
    wanted: Notify,
    /// Wakes the recognition, so that it runs at once.
    reidentify: Arc<Notify>,
    /// True after the first recognition attempt.
    attempted: AtomicBool,
    /// The last logged reason for passing it through or for its silence.
    logged: Mutex<Option<String>>,
    /// Cancelled once it is removed from the fleet.
    removed: CancellationToken,
    random: SharedSplitMix64,
}

impl Watched {
    pub(super) fn new(replica: Arc<Replica>, settings: RecognitionSettings) -> Self {
        let unknown =
            ServerKnowledge::Passthrough(PassthroughReason::NoVerifyMethod, UNRECOGNISED.to_owned());
        Self {
            replica,
            settings,
            knowledge: ArcSwap::from_pointee(unknown),
            model: Mutex::default(),
            away: AtomicU64::new(0),
            away_before: AtomicU64::new(0),
            returns_before: AtomicU64::new(0),
            rounds_seen: Arc::default(),
            load_page: Mutex::default(),
            single: Mutex::default(),
            confirms: Mutex::default(),
            wanted: Notify::new(),
            reidentify: Arc::default(),
            attempted: AtomicBool::new(false),
            logged: Mutex::default(),
            removed: CancellationToken::new(),
            random: SharedSplitMix64::default(),
        }
    }

    pub(super) fn identity(&self) -> Option<Arc<Identity>> {
        match &**self.knowledge.load() {
            ServerKnowledge::Known(identity) => Some(Arc::clone(identity)),
            ServerKnowledge::Passthrough(..) => None,
        }
    }

    pub(super) fn reprobe(&self) -> Result<(), String> {
        if self.settings.billed {
            return Err("it bills per token, so it is not probed".to_owned());
        }
        *self.single.lock() = None;
        self.rounds_seen.reset_uncached();
        self.wanted.notify_one();
        if self.identity().is_none() {
            self.reidentify.notify_one();
        }
        Ok(())
    }

    pub(super) fn is_attempted(&self) -> bool {
        self.attempted.load(Ordering::Acquire)
    }

    /// Ends all tasks of a replica that is removed from the fleet.
    pub(super) fn remove(&self) {
        self.removed.cancel();
    }

    pub(super) async fn removed(&self) {
        self.removed.cancelled().await;
    }

    /// Recognises it repeatedly, at once when it becomes reachable. `attempted` is called after
    /// every attempt.
    pub(super) async fn recognition_loop(self: Arc<Self>, attempted: impl Fn()) {
        let mut pace = Pace::default();
        let mut returns = self.replica.returns();
        let mut noticed = false;
        loop {
            let settled = self.refresh(noticed).await;
            self.attempted.store(true, Ordering::Release);
            attempted();
            // The answer just received does not count as a return.
            returns.borrow_and_update();
            noticed = false;
            tokio::select! {
                () = tokio::time::sleep(pace.after(settled)) => {}
                Ok(()) = returns.changed() => pace.restart(),
                () = self.reidentify.notified() => {
                    pace.restart();
                    noticed = true;
                }
            }
        }
    }

    /// Recognises it once, and stores the result. `noticed`: a request has met another process
    /// there, so that if the known one still answers, there may be both.
    async fn refresh(&self, noticed: bool) -> Settled {
        if self.settings.billed {
            return self.refresh_billed().await;
        }
        let before = self.identity();
        let times = self.away.load(Ordering::Relaxed);
        let returns = *self.replica.returns().borrow();
        // A process that identifies itself is re-identified whenever another might have replaced
        // it.
        let shows = before.as_ref().is_some_and(|before| before.engine.process.drawn.is_some());
        let since = times != self.away_before.load(Ordering::Relaxed)
            || (shows && returns != self.returns_before.load(Ordering::Relaxed));
        let away = Away { times, since };
        let identified =
            recognition::identify(&self.replica, &self.settings, before.as_ref(), away, &self.rounds_seen)
                .await;
        let identified = match identified {
            Ok(identity) if before.as_ref().is_none_or(|before| before.is_news(&identity)) => {
                self.shows_one(identity).await
            }
            Ok(identity) if noticed => {
                recognition::one_start(&self.replica, &identity.recognised).await.map(|_| identity)
            }
            identified => identified,
        };
        match identified {
            Ok(identity) => {
                self.away_before.store(times, Ordering::Relaxed);
                self.returns_before.store(returns, Ordering::Relaxed);
                if before.as_ref().is_none_or(|before| before.is_news(&identity)) {
                    self.note_model(&identity.engine_start.model);
                    tracing::info!(
                        replica = self.replica.label(),
                        engine = identity.engine.dialect.name(),
                        version = identity.engine.version,
                        model = identity.engine_start.model,
                        "backend known"
                    );
                    self.log_defaults(&identity);
                    self.replica.set_dialect(identity.engine.dialect.name(), true);
                    self.rounds_seen.reset_uncached();
                    self.replica.forget_load();
                    if let Some(before) = before.filter(|before| before.is_other(&identity)) {
                        before.replaced.store(true, Ordering::Relaxed);
                        self.replica.first_calls().forget();
                    }
                    let reidentify = Arc::clone(&self.reidentify);
                    let identity = Identity { reidentify, ..(*identity).clone() };
                    self.knowledge.store(Arc::new(ServerKnowledge::Known(Arc::new(identity))));
                } else {
                    self.reconfirm(&identity).await;
                }
                *self.logged.lock() = None;
                Settled::Known
            }
            Err(unknown) => self.unknown(unknown, before.is_some()),
        }
    }

    /// Stores the model that answers, and warns if another one did before.
    fn note_model(&self, model: &str) {
        let mut noted = self.model.lock();
        let before = noted.0.replace(model.to_owned());
        if let Some(before) = before.filter(|before| before != model) {
            tracing::warn!(
                replica = self.replica.label(),
                url = self.replica.url(),
                from = before,
                to = model,
                "the model at this address changed"
            );
            noted.1 = Some(ModelChange { from: before, to: model.to_owned(), at: SystemTime::now() });
        }
    }

    pub(super) fn model_change(&self) -> Option<ModelChange> {
        self.model.lock().1.clone()
    }

    /// Logs the confirmation of the server's defaults, and schedules another of those in doubt.
    fn log_defaults(&self, identity: &Identity) {
        let Some(confirmation) = &identity.engine.defaults.confirmation else { return };
        let mut next = self.confirms.lock();
        *next = match *next {
            _ if confirmation.unconfirmed.is_empty() => None,
            None => Some((Instant::now(), ONE_RETRY)),
            Some((_, pause)) => Some((Instant::now(), (pause * 2).min(REPROBE.1))),
        };
        let replica = self.replica.label();
        if let Some(problem) = confirmation.problem() {
            tracing::warn!(replica, calls = confirmation.calls, problem, "sampling defaults are in doubt");
        } else {
            tracing::info!(replica, calls = confirmation.calls, "sampling defaults confirmed");
        }
    }

    /// Repeats the test of defaults that could not be decided, after a growing pause.
    async fn reconfirm(&self, identity: &Arc<Identity>) {
        let due = self.confirms.lock().is_some_and(|(at, pause)| at.elapsed() >= pause);
        if !due {
            return;
        }
        let Ok(confirmed) = recognition::reconfirmed(&self.replica, &self.settings, identity).await else {
            return;
        };
        // A probe may have stored more meanwhile.
        let Some(now) = self.identity().filter(|now| now.engine_start == confirmed.engine_start) else {
            return;
        };
        self.log_defaults(&confirmed);
        let confirmed = Identity { probe: now.probe.clone(), ..(*confirmed).clone() };
        self.knowledge.store(Arc::new(ServerKnowledge::Known(Arc::new(confirmed))));
    }

    /// Stores that it was not recognised; `before`: it was known until now.
    fn unknown(&self, unknown: Unknown, before: bool) -> Settled {
        let replica = self.replica.label();
        *self.load_page.lock() = match unknown {
            Unknown::PassedThrough(dialect, page) => page.map(|page| (dialect, page)),
            _ => None,
        };
        match unknown {
            Unknown::PassedThrough(..) => {
                let why = unknown.to_string();
                if self.is_news(&why) {
                    tracing::info!(replica, why, "requests to the backend are passed through");
                }
                self.passthrough(PassthroughReason::NoVerifyMethod, why, SHOWN_PASSTHROUGH);
                Settled::Foreign
            }
            Unknown::Foreign(reason, why) => {
                if self.is_news(&why) {
                    // A wrong tokenizer is a mistake in the settings, and stays until it is fixed.
                    if reason == PassthroughReason::Tokenizer {
                        tracing::warn!(replica, why, "requests to the backend are passed through");
                    } else {
                        tracing::info!(replica, why, "requests to the backend are passed through");
                    }
                }
                self.passthrough(reason, why, SHOWN_PASSTHROUGH);
                if reason == PassthroughReason::NoVerifyMethod { Settled::Foreign } else { Settled::Doubted }
            }
            Unknown::Stranger(why) => {
                if self.is_news(&why) {
                    tracing::info!(replica, why, "requests to the backend are passed through");
                }
                self.passthrough(PassthroughReason::NoVerifyMethod, why, STRANGER);
                Settled::Foreign
            }
            // With a key its requests would still only be passed through.
            Unknown::Locked(status) if self.is_passthrough_by_name() => {
                let why =
                    format!("requests to it are only passed through, and it answers {status} to Foretell");
                self.passthrough(PassthroughReason::NoVerifyMethod, why, SHOWN_PASSTHROUGH);
                Settled::Foreign
            }
            Unknown::Locked(status) => {
                let why = format!("{status}: an API key is required: set connect.auth.own_token_file");
                if self.is_news(&why) {
                    tracing::warn!(
                        replica = replica,
                        why,
                        "replica cannot be recognised, so its requests are only passed through"
                    );
                }
                self.replica.note_error(&why);
                self.passthrough(PassthroughReason::NoVerifyMethod, why, STRANGER);
                Settled::Foreign
            }
            Unknown::Unchecked(why) => {
                if self.is_news(&why) {
                    tracing::info!(replica, why, "requests to the backend are passed through");
                }
                self.passthrough(PassthroughReason::NoVerifyMethod, why, SHOWN_PASSTHROUGH);
                Settled::Doubted
            }
            Unknown::Late(why) if before => {
                tracing::debug!(replica, why, "a known engine answers late");
                Settled::Away
            }
            Unknown::Unreachable(why) | Unknown::Late(why) => {
                self.silent(&why);
                if before {
                    self.away.fetch_add(1, Ordering::Relaxed);
                }
                Settled::Away
            }
        }
    }

    /// True if its configured dialect is one whose requests are only passed through.
    fn is_passthrough_by_name(&self) -> bool {
        self.settings.dialect.is_some_and(|dialect| PASSTHROUGH.contains(&dialect))
    }

    /// Logs that it did not answer, unless it is down, which is logged elsewhere.
    fn silent(&self, cause: &str) {
        if !self.replica.is_up() {
            return;
        }
        self.replica.note_error(cause);
        if self.is_news("") {
            tracing::warn!(replica = self.replica.label(), cause, "replica cannot be recognised");
        }
    }

    /// True if `why` differs from the last logged reason; stores it.
    fn is_news(&self, why: &str) -> bool {
        let mut logged = self.logged.lock();
        let news = logged.as_deref() != Some(why);
        if news {
            *logged = Some(why.to_owned());
        }
        news
    }

    fn passthrough(&self, reason: PassthroughReason, why: String, dialect: &str) {
        // Without a verification method the gateway passes it through; for other reasons the
        // session runner does, and names them.
        self.replica.set_dialect(dialect, reason != PassthroughReason::NoVerifyMethod);
        self.knowledge.store(Arc::new(ServerKnowledge::Passthrough(reason, why)));
    }

    /// For a server that bills per token: reads its list of models, and only once.
    async fn refresh_billed(&self) -> Settled {
        if matches!(&**self.knowledge.load(), ServerKnowledge::Passthrough(PassthroughReason::Billed, _)) {
            return Settled::Foreign;
        }
        let models = match recognition::models(&self.replica).await {
            Ok(models) => models.len().to_string(),
            Err(Unknown::Locked(status)) => status.to_string(),
            Err(unknown) => return self.unknown(unknown, false),
        };
        let why = format!("it bills per token, so only its list of models was requested ({models})");
        self.passthrough(PassthroughReason::Billed, why, SHOWN_PASSTHROUGH);
        Settled::Foreign
    }

    /// Checks that a single engine answers: by its prefix cache where no start time shows it.
    async fn shows_one(&self, identity: Arc<Identity>) -> Result<Arc<Identity>, Unknown> {
        let known = {
            let last = self.single.lock();
            match &*last {
                Some(last)
                    if last.engine_start == identity.engine_start
                        && (last.shown || last.at.elapsed() < ONE_RETRY) =>
                {
                    Some(last.shown)
                }
                _ => None,
            }
        };
        let one = match known {
            Some(one) => one,
            None if shows_one(&identity.engine) => return Ok(identity),
            None => {
                let Identity { engine, tokenizer, .. } = &*identity;
                let limits = &self.settings.limits;
                let shown = probe::is_one(&self.replica, engine, tokenizer, limits, fresh_seed()).await;
                if let Some((method, why)) = probe::failed_method(&shown) {
                    return Err(Unknown::Foreign(
                        PassthroughReason::NoVerifyMethod,
                        format!("{}: {why}", method.name()),
                    ));
                }
                if let Some(why) = probe::unchecked(&shown) {
                    return Err(Unknown::Unchecked(why));
                }
                let (one, calls) = (!shown.several_engines, shown.calls);
                tracing::info!(replica = self.replica.label(), one, calls, "checked for a single engine");
                *self.single.lock() = Some(SingleCheck {
                    engine_start: identity.engine_start.clone(),
                    at: Instant::now(),
                    shown: one,
                });
                one
            }
        };
        if one {
            // Every prompt was found cached, so its prefix cache works.
            return Ok(Arc::new(identity.seen_caching()));
        }
        Err(Unknown::Foreign(PassthroughReason::SeveralEngines, probe::MANY.to_owned()))
    }

    /// Reads the load repeatedly, one request at a time.
    pub(super) async fn load_loop(self: Arc<Self>) {
        let every = self.settings.every;
        loop {
            tokio::time::sleep(every.mul_f64(0.9 + 0.2 * self.random.fraction())).await;
            let (dialect, page) = match (self.identity(), *self.load_page.lock()) {
                (Some(identity), _) => (identity.engine.dialect, identity.engine.pages.load),
                (None, Some((dialect, page))) => (dialect, Some(page)),
                (None, None) => continue,
            };
            if let Some(page) = self.settings.load.as_deref().or(page) {
                self.rounds_seen.take(&self.replica, dialect, page).await;
            }
        }
    }

    /// Probes every engine start once, as soon as it is idle, and repeats that on request or when
    /// due.
    pub(super) async fn probe_loop(self: Arc<Self>) {
        let mut last = LastProbe::default();
        loop {
            let requested = tokio::select! {
                () = self.wanted.notified() => true,
                () = tokio::time::sleep(LOOK) => false,
            };
            let Some(identity) = self.identity() else { continue };
            let doubted = identity.may_be_many() && last.is_older(ONE_RETRY);
            if doubted && !self.settings.ready {
                self.rounds_seen.reset_uncached();
            }
            let by_itself = self.settings.ready && (doubted || last.is_due(&identity.engine_start));
            if identity.recognised.engine.methods.is_empty() || !(requested || by_itself) {
                continue;
            }
            if !requested {
                tokio::time::sleep(JITTER.mul_f64(self.random.fraction())).await;
            }
            if !self.is_idle().await {
                if requested {
                    tokio::time::sleep(LOOK).await;
                    self.wanted.notify_one();
                }
            } else if let Some(report) = self.probe(&identity).await {
                last.done(&identity.engine_start, report.nothing_pays());
            }
        }
    }

    /// True if nothing runs or waits there, at two checks: by its figures if it reports any, and by
    /// Foretell's calls.
    async fn is_idle(&self) -> bool {
        for look in 0..2 {
            if look > 0 {
                tokio::time::sleep(LOOK).await;
            }
            // An idle engine reports fresh figures: old ones are those of a busy one.
            let load = self.replica.load().filter(|load| load.at.elapsed() < OUTDATED);
            let fresh = STALE + self.settings.every;
            let busy = load.is_some_and(|load| load.at.elapsed() >= fresh || !load.signal().is_idle());
            if busy || self.replica.in_flight() > 0 {
                return false;
            }
        }
        true
    }

    async fn probe(&self, identity: &Arc<Identity>) -> Option<Arc<ProbeReport>> {
        let begun = Instant::now();
        let recognised = &identity.recognised.engine;
        let cache = PrefixCache { works: identity.engine.cache.works, ..recognised.cache };
        let engine = Engine { cache, ..recognised.clone() };
        let limits = &self.settings.limits;
        let findings =
            probe::measure(&self.replica, &engine, &identity.tokenizer, limits, fresh_seed()).await;
        let seen = Seen {
            missing: identity.recognised.missing.clone(),
            starts: identity.recognised.starts,
            busy: false,
            calls: 0,
        };
        let report = Arc::new(ProbeReport::new(findings, seen, begun.elapsed().as_secs_f64()));
        let now = self.identity()?;
        if now.engine_start != identity.engine_start {
            return None;
        }
        tracing::info!(
            replica = self.replica.label(),
            calls = report.calls(),
            seconds = report.seconds,
            result = report.judgement.words,
            "probed"
        );
        self.replica.probed(match (report.findings.several_engines, report.nothing_pays()) {
            (true, _) => Probed::SeveralEngines,
            (false, true) => Probed::PaysNot,
            (false, false) => Probed::Pays,
        });
        if report.findings.several_engines {
            *self.single.lock() = Some(SingleCheck {
                engine_start: now.engine_start.clone(),
                at: Instant::now(),
                shown: false,
            });
            self.passthrough(PassthroughReason::SeveralEngines, probe::MANY.to_owned(), SHOWN_PASSTHROUGH);
            return Some(report);
        }
        self.rounds_seen.reset_uncached();
        let known = Identity {
            engine: Arc::new(report.findings.engine.clone()),
            probe: Some(Arc::clone(&report)),
            ..(*now).clone()
        };
        self.knowledge.store(Arc::new(ServerKnowledge::Known(Arc::new(known))));
        Some(report)
    }
}
