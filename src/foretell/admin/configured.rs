//! The part of the admin API that needs the configuration: policies, drafters, and the state of the
//! servers.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::explain::{self, Question, ServerFacts};
use crate::admin::FileError;
use foretell_config::difference;
use foretell_config::load::{self, parse_with_warnings, policy_sources};
use foretell_config::problem::{Problem, Refusal};
use foretell_config::process::Process;
use foretell_config::store::PolicyStore;
use foretell_config::values::Revision;
use foretell_config::variables::Environment;
use foretell_core::control::Forecast;
use foretell_core::control::gates::Signal;
use foretell_core::words::{Gate, Mode, PlainReason};
use foretell_drafts::service::{Engine, Service};
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{Identities, ServerKnowledge};
use foretell_net::http::memory::Level;
use foretell_observe::Observer;
use foretell_observe::coverage::Projected;
use foretell_observe::history::Reading;
use foretell_policy::explain::{GainLine, GateLine, Now, WhyLine};
use foretell_policy::part::ModelState;
use foretell_policy::{self as policy, Explanation, Fact, PolicySet, Ruling};
use foretell_proxy::gateway::Shared;
use foretell_proxy::learning::Learnt;
use foretell_proxy::learning::comparison::Comparisons;
use foretell_proxy::learning::corpus::CorpusHandle;
use foretell_proxy::serving::SessionRunner;
use foretell_proxy::serving::drafters::Drafters;
use foretell_proxy::serving::gates::{GateWatch, GatesAt};
use foretell_proxy::serving::ruling;

/// Parts of a running proxy whose state the admin API shows.
#[derive(Clone)]
pub struct Known {
    pub policies: Arc<PolicyStore>,
    pub drafters: Arc<Drafters>,
    /// Identification of the servers at the replicas' addresses.
    pub identities: Arc<Identities>,
    /// The control groups of the policies.
    pub comparisons: Arc<Comparisons>,
    /// Costs, acceptance and traits of each engine.
    pub learnt: Arc<Learnt>,
    pub runner: Arc<SessionRunner>,
    /// The gates of the policies at the replicas.
    pub gates: Arc<GateWatch>,
    /// Texts of earlier requests that drafters read.
    pub corpus: CorpusHandle,
    /// The drafts service; `None` without `drafts.listen`.
    pub drafts: Option<Arc<Service>>,
}

/// The configuration of a running proxy and the state that depends on it.
pub struct Configured {
    process: Process,
    known: Known,
    /// The last reload; locked during a reload, so that there is one at a time.
    last: Mutex<Last>,
    /// The problems for which the last reload was refused, or some of its settings.
    refused: Mutex<Vec<FileError>>,
}

/// Result of the last reload.
struct Last {
    /// The files that it read.
    files: Option<Files>,
    /// The mode in the config file; `None` before it was read, where a flag or variable sets it.
    mode: Option<Mode>,
    /// It was refused, and changed nothing.
    refused: bool,
    /// Warnings about the policies that it has put in force.
    warnings: Vec<String>,
}

/// The files of the configuration, as they were read at one time.
#[derive(PartialEq)]
struct Files {
    process: Option<String>,
    policies: Vec<(String, String)>,
}

/// Maximum number of readings of files that change while they are read.
const READINGS: usize = 4;

/// Trigger of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadSource {
    /// The operator: the files are loaded in any case.
    Operator,
    /// A change of the files: nothing is done if they are those in force, or were refused already.
    FileChange,
    /// A retry of a reload that was refused: its files may be complete by now.
    Retry,
}

impl Configured {
    /// Also sets the metrics about the policies in force.
    pub fn new(process: Process, known: Known, observer: &Observer) -> Self {
        // They have been logged at the start.
        let warnings = process.policies_read.and_then(|_| Files::read(&process).ok());
        let warnings = warnings.and_then(|files| parse_with_warnings(&files.policies, &process).ok());
        let warnings = warnings.map(|(_, warnings)| warnings).unwrap_or_default();
        let mode = process.mode_source.is_none().then_some(process.mode);
        let last = Mutex::new(Last { files: None, mode, refused: false, warnings });
        let configured = Self { process, known, last, refused: Mutex::default() };
        configured.show(observer, true, true);
        configured
    }

    /// Sets the metrics about the policies in force. `taken`: a reload was not refused;
    /// `synchronized`: the files are in force.
    fn show(&self, observer: &Observer, taken: bool, synchronized: bool) {
        let version = Revision::of(self.labels().as_bytes()).to_string();
        observer.metrics().configured(&version, taken, synchronized);
    }

    /// The labels of the policies in force, in match order.
    fn labels(&self) -> String {
        let policies = self.known.policies.current();
        let labels: Vec<String> = policies.policies().iter().map(|policy| policy.label()).collect();
        labels.join(",")
    }

    /// The answer of `/api/policies`: the policies in match order, their folder, `synchronized`
    /// (the files are in force), and the problems for which the last reload was refused, or some of
    /// its settings.
    pub fn shown(&self) -> Value {
        let dir = self.process.policies.display().to_string();
        let refused = self.refused();
        let synchronized = refused.as_array().is_some_and(Vec::is_empty);
        json!({ "policies": self.policies(), "dir": dir, "synchronized": synchronized, "refused": refused })
    }

    /// Projected speedups of the policies in force.
    pub(super) fn projected(&self) -> Vec<Projected> {
        let policies = self.known.policies.current();
        policies.policies().iter().flat_map(|policy| self.known.comparisons.projected(&policy.name)).collect()
    }

    /// The policies' part of `/api/status`: the comparison of their groups, their gates, and the
    /// policies with a lossy rule.
    pub(super) fn status(&self) -> Value {
        let policies = self.known.policies.current();
        let compared = policies.policies().iter().map(
            |policy| json!({ "policy": policy.name, "backends": self.known.comparisons.shown(&policy.name) }),
        );
        let relaxed = policies.policies().iter().filter(|policy| policy.accept.is_lossy());
        json!({
            "compared": compared.collect::<Vec<_>>(),
            "gates": self.known.gates.look().iter().map(gates_json).collect::<Vec<_>>(),
            "relaxed_by": relaxed.map(|policy| &policy.name).collect::<Vec<_>>(),
            "synchronized": self.is_synchronized(),
        })
    }

    /// True if the files are in force.
    pub fn is_synchronized(&self) -> bool {
        self.refused.lock().is_empty() && self.known.policies.synchronized()
    }

    /// The load of the busiest engine now, and the highest tolerance of all policies at temperature
    /// 1 and that load.
    pub(super) fn reading(&self, shared: &Shared) -> Reading {
        let replicas = shared.fleet.replicas();
        let load = replicas.iter().filter_map(|replica| self.known.runner.load(replica)).reduce(f64::max);
        let policies = self.known.policies.current();
        let relaxed = policies.policies().iter().filter(|policy| policy.accept.is_lossy());
        let tolerance = relaxed.map(|policy| policy.accept.tolerance.at(1.0, load.unwrap_or(0.0)));
        Reading { load, tolerance: tolerance.reduce(f64::max) }
    }

    fn policies(&self) -> Value {
        let synchronized = self.known.policies.synchronized();
        let policies = self.known.policies.current();
        let entries = policies.policies().iter().map(|policy| {
            json!({
                "name": policy.name,
                "revision": policy.revision.to_string(),
                "mode": policy.mode.name(),
                "synchronized": synchronized,
                "compared": self.known.comparisons.shown(&policy.name),
            })
        });
        entries.collect()
    }

    /// Rereads the files, loads and tries the drafters that the policies name, and replaces all
    /// policies or none. A setting of the config file that only a restart can change stays as it is
    /// and is named. Blocks while a model is loaded. `None`: there was nothing to do.
    ///
    /// # Errors
    /// Every problem found; nothing is changed then.
    pub fn reload(&self, source: ReloadSource, shared: &Shared) -> Option<Result<Value, Vec<Problem>>> {
        let mut last = self.last.lock();
        let (before, warned) = (self.names(), last.warnings.clone());
        let read = self.read_files();
        let known = last.files.as_ref();
        match (&read, source) {
            (Ok(files), ReloadSource::FileChange) if known == Some(files) => return None,
            // The first look: nothing was edited since the start.
            (Ok(files), ReloadSource::FileChange)
                if known.is_none() && !last.refused && self.is_in_force(files) =>
            {
                last.files = read.ok();
                return None;
            }
            (_, ReloadSource::Retry) if !last.refused => return None,
            _ => {}
        }
        let outcome = match read {
            Ok(files) => {
                let outcome = self.take(&files, source, &mut last, shared);
                last.files = Some(files);
                outcome
            }
            Err(problems) => {
                last.files = None;
                self.known.policies.reload(|| Err(problems), |_| Ok(())).map(|_| Vec::new())
            }
        };
        last.refused = outcome.is_err();
        let refused = outcome.as_ref().map_or_else(Vec::clone, Vec::clone);
        let errors: Vec<FileError> = refused.iter().map(FileError::from).collect();
        let is_reported = std::mem::replace(&mut *self.refused.lock(), errors.clone()) == errors;
        if source == ReloadSource::Operator || !last.refused || !is_reported {
            for problem in &refused {
                tracing::error!("reload: {problem}");
            }
            self.show(&shared.observer, outcome.is_ok(), refused.is_empty());
        }
        Some(outcome.map(|_| {
            let now = self.names();
            let removed: Vec<&str> =
                before.iter().filter(|name| !now.contains(name)).map(String::as_str).collect();
            let removed = (!removed.is_empty()).then(|| removed.join(","));
            tracing::info!(policies = self.labels(), removed, "reloaded");
            for warning in last.warnings.iter().filter(|warning| !warned.contains(warning)) {
                tracing::warn!("{warning}");
            }
            self.shown()
        }))
    }

    /// The names of the policies in force.
    fn names(&self) -> Vec<String> {
        let policies = self.known.policies.current();
        policies.policies().iter().map(|policy| policy.name.clone()).collect()
    }

    /// True if these files are those of the start.
    fn is_in_force(&self, files: &Files) -> bool {
        let config_file = self.process.file.as_ref().map(|file| file.text.as_str());
        self.process.policies_read == Some(load::fingerprint(&files.policies))
            && files.process.as_deref() == config_file
    }

    /// True if the built-in policy is in force.
    fn was_built_in(&self) -> bool {
        let revision = Revision::of(foretell_config::policy::DEFAULT.as_bytes());
        let policies = self.known.policies.current();
        matches!(policies.policies(), [only] if only.revision == revision)
    }

    fn refused(&self) -> Value {
        json!(*self.refused.lock())
    }

    /// The files as they were at one moment: read until two readings agree, at most [`READINGS`]
    /// times.
    fn read_files(&self) -> Result<Files, Vec<Problem>> {
        let mut files = Files::read(&self.process)?;
        for _ in 1..READINGS {
            let reread = Files::read(&self.process)?;
            if reread == files {
                break;
            }
            files = reread;
        }
        Ok(files)
    }

    /// Puts the files in force: everything or nothing. Returns the settings that stay as they are
    /// until a restart.
    fn take(
        &self,
        files: &Files,
        source: ReloadSource,
        last: &mut Last,
        shared: &Shared,
    ) -> Result<Vec<Problem>, Vec<Problem>> {
        let mut checked = None;
        let read = || {
            if source != ReloadSource::Operator && files.policies.is_empty() && !self.was_built_in() {
                return Err(vec![self.emptied()]);
            }
            // Every problem at once, those of the config file first.
            let settings = self.check_process(files.process.as_deref());
            match (settings, parse_with_warnings(&files.policies, &self.process)) {
                (Ok(settings), Ok((policies, warnings))) => {
                    checked = Some((settings, warnings));
                    Ok(policies)
                }
                (settings, policies) => {
                    Err([settings.err(), policies.err()].into_iter().flatten().flatten().collect())
                }
            }
        };
        self.known.policies.reload(read, |policies| self.build(policies)).inspect_err(|_| {
            // Drops drafters that were loaded for the refused policies.
            self.known.drafters.retain(&self.known.policies.current());
        })?;
        let ((mode, pending), warnings) = checked.unwrap_or_default();
        last.warnings = warnings;
        self.known.drafters.retain(&self.known.policies.current());
        self.take_mode(mode, last, shared);
        Ok(pending)
    }

    /// Puts a changed mode of the config file in force, unless a flag or variable sets the mode.
    fn take_mode(&self, mode: Option<Mode>, last: &mut Last, shared: &Shared) {
        let Some(mode) = mode else { return };
        let Some(before) = last.mode.replace(mode) else { return };
        if before == mode {
            return;
        }
        if let Some(source) = &self.process.mode_source {
            tracing::info!(
                mode = mode.name(),
                "{source} sets the mode: that of the config file has no effect"
            );
        } else {
            shared.modes.set_base(mode);
            tracing::info!(mode = mode.name(), "the config file sets another mode");
        }
    }

    /// The problem that all policy files are gone, which usually means that new ones are about to
    /// appear.
    fn emptied(&self) -> Problem {
        let refusal = Refusal::new(
            "no policy files any more: those in force stay, and POST /api/reload takes the built-in one",
            "at least one",
        );
        let folder = self.process.policies.display().to_string();
        Problem::new(folder, None, "policies.dir", refusal, "none")
    }

    /// The mode in the config file (`None` without one), and its edited settings that only a
    /// restart can change.
    fn check_process(&self, edited: Option<&str>) -> Result<(Option<Mode>, Vec<Problem>), Vec<Problem>> {
        let (Some(file), Some(edited)) = (&self.process.file, edited) else {
            return Ok((None, Vec::new()));
        };
        let name = file.path.display().to_string();
        let parsed = foretell_config::process::parse_all(&name, edited, &Environment);
        if !parsed.problems.is_empty() {
            return Err(parsed.problems);
        }
        Ok((Some(parsed.process.mode), difference::refused(&name, &file.text, edited)?))
    }

    fn build(&self, policies: &PolicySet) -> Result<(), Vec<Problem>> {
        self.known.drafters.extend(&self.process, policies).map_err(|error| {
            let refusal = Refusal::new("cannot be loaded", "a drafter that loads");
            let folder = self.process.policies.display().to_string();
            vec![Problem::new(folder, None, format!("drafters.{}", error.name), refusal, error.detail)]
        })
    }

    /// Maximum body that is read for speculation, bytes.
    pub fn speculate_body(&self) -> usize {
        self.process.limits.speculate_body
    }

    /// Texts of earlier requests that drafters read.
    pub fn corpus(&self) -> &CorpusHandle {
        &self.known.corpus
    }

    /// Explains how a request would be served now.
    pub fn explain(&self, question: &Question, shared: &Shared) -> Explanation {
        let replica = shared.fleet.would_pick(question.model());
        let knowledge = replica.as_ref().and_then(|replica| self.known.identities.knowledge(replica));
        let backend = replica.as_ref().and_then(|replica| {
            self.process.backends.iter().find(|backend| backend.name == replica.backend())
        });
        let terms = backend.map(|backend| ruling::terms(&backend.methods)).unwrap_or_default();
        let identity = match knowledge.as_deref() {
            Some(ServerKnowledge::Known(identity)) => Some(identity),
            Some(ServerKnowledge::Passthrough(..)) | None => None,
        };
        let by_format = identity
            .zip(question.request())
            .and_then(|(identity, request)| self.known.runner.answer_format(identity, request).permission);
        let server = match (replica.as_deref().and_then(explain::down), knowledge.as_deref()) {
            (Some(why), _) => Fact::Known(policy::ServerState::Down(why)),
            (None, Some(knowledge)) => Fact::Known(ruling::knowledge(knowledge, &terms, by_format)),
            (None, None) => Fact::Unknown("no replica is known"),
        };
        let group = |policy: &Arc<policy::Policy>| {
            let closed =
                |replica: &Arc<Replica>| self.known.comparisons.is_closed(&policy.name, replica.backend());
            policy::Group { in_control: false, is_slower: replica.as_ref().is_some_and(closed) }
        };
        let models = |name: &str| {
            let unknown = ModelState::Unknown("the server's vocabulary is not known");
            identity.map_or(unknown, |identity| self.known.drafters.state(name, identity))
        };
        let closed = |ruling: &Ruling| {
            let gate = || {
                let replica = replica.as_deref()?;
                let signal = replica.load().map(|load| load.signal());
                ruling::closed(&ruling.gates, replica, signal.as_ref())
            };
            if shared.life.is_draining() {
                Some(PlainReason::Draining)
            } else if shared.memory.level() != Level::Enough {
                Some(PlainReason::GateMemory)
            } else {
                gate()
            }
        };
        let now = |ruling: &Ruling, temperature: f64, prompt: usize| {
            let replica = replica.as_ref()?;
            let signal = replica.load().map(|load| load.signal());
            let forecast = self.known.runner.forecast(replica, ruling, temperature, prompt)?;
            Some(shown(&forecast, ruling, signal.as_ref()))
        };
        let notes = identity
            .zip(question.request())
            .and_then(|(identity, request)| self.known.runner.proof_note(identity, request));
        let known = ServerFacts {
            source: "proxy",
            replica: replica.as_ref(),
            server,
            models: &models,
            group: &group,
            closed: &closed,
            now: &now,
            notes: notes.into_iter().collect(),
        };
        explain::explain(question, &self.process, &self.known.policies.current(), shared, known)
    }

    /// The engine that asks for drafts and serves this replica; `None` if none does.
    pub fn engine_that_asks(&self, replica: &str) -> Option<Engine> {
        let engines = self.known.drafts.as_ref()?.engines();
        engines.into_iter().find(|engine| engine.replica.as_deref() == Some(replica))
    }

    /// State of a replica: engine start, verification methods, probe, learnt costs; `None` if it is
    /// not recognised.
    pub fn replica(&self, replica: &Arc<Replica>) -> Option<Value> {
        let mut shown = self.known.identities.shown(replica)?;
        if let Some(shown) = shown.as_object_mut() {
            let (learnt, identities) = (&self.known.learnt, &self.known.identities);
            let costs = learnt.at(identities, replica).map(|at| at.with(|at| at.learnt_costs()));
            shown.insert("costs".to_owned(), json!(costs));
        }
        Some(shown)
    }

    /// Starts a new probe of a replica; returns once it has started, without waiting for its end.
    ///
    /// # Errors
    /// The reason for which no probe was started.
    pub fn reprobe(&self, replica: &Arc<Replica>) -> Result<Value, String> {
        self.known
            .identities
            .reprobe(replica)
            .map(|()| json!({ "replica": replica.label(), "reprobe": true }))
    }
}

/// The current figures, as an explanation shows them.
fn shown(forecast: &Forecast, ruling: &Ruling, signal: Option<&Signal>) -> Now {
    let gain = forecast.gain.map(|gain| GainLine {
        low: gain.low,
        middle: gain.middle,
        high: gain.high,
        rounds: gain.rounds,
        costs: gain.basis.name().to_owned(),
    });
    let why = |(reason, words): &(PlainReason, &str)| WhyLine {
        reason: reason.name().to_owned(),
        words: (*words).to_owned(),
    };
    Now {
        load: forecast.load,
        regret_budget: forecast.regret_budget,
        token_seconds: forecast.token,
        gain,
        length: forecast.length.clone(),
        // With `gamma.fixed` the gates on load do not apply.
        gates: if ruling.rules.gamma_fixed.is_some() { Vec::new() } else { gates(ruling, signal) },
        not_speculating: forecast.reasons.iter().map(why).collect(),
    }
}

/// The gates of one policy at one replica, each with the words of its reason.
fn gates_json(at: &GatesAt) -> Value {
    let gate = |(gate, open): (Gate, bool)| {
        let words = gate.reason().words();
        json!({ "gate": gate.name(), "open": open, "words": words })
    };
    let gates: Vec<Value> = Gate::ALL.into_iter().zip(at.open).map(gate).collect();
    json!({ "policy": at.policy, "backend": at.backend, "replica": at.replica, "gates": gates })
}

/// The gates of the policy by the engine's load report. Verify requests of this proxy are
/// subtracted, as the gates do.
fn gates(ruling: &Ruling, signal: Option<&Signal>) -> Vec<GateLine> {
    let policy = ruling.policy.gates;
    let line = |gate: &str, reads: Option<f64>, limit: f64| GateLine {
        gate: gate.to_owned(),
        reads,
        limit,
        closed: reads.is_some_and(|reads| reads > limit),
    };
    vec![
        line(
            "waiting",
            signal.map(|signal| f64::from(signal.waiting.saturating_sub(signal.verifying))),
            f64::from(policy.waiting),
        ),
        line("kv", signal.and_then(|signal| signal.kv_usage), policy.kv),
        line("stale", signal.map(|signal| signal.age.as_secs_f64()), policy.stale.as_secs_f64()),
    ]
}

impl Files {
    fn read(process: &Process) -> Result<Self, Vec<Problem>> {
        let config_file = process.file.as_ref().map(|file| load::read(&file.path)).transpose()?;
        Ok(Self { process: config_file, policies: policy_sources(process)? })
    }
}
