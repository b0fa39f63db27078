//! From a validated configuration to a running proxy: builds every part and connects them.
//!
//! `serve`, `demo` and the tests all start the proxy through [`start`]. Models are loaded before a
//! listener opens, so a missing model fails the start instead of slowing the first request.

pub mod explain;
pub mod files;
mod gateway;
pub mod local;
pub mod manager;
pub mod served;
pub mod signals;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use gateway::{Ended, Gateway};

use crate::admin::{Configured, Known, ReloadSource};
use crate::app::manager::Manager;
use crate::app::signals::Signals;
use foretell_config::process::{
    self, Backend, ClientControl, ClientTls, HostHeader, Listen, Process, Render, Replicas, TokenizerSource,
};
use foretell_config::store::PolicyStore;
use foretell_config::watch::{self, Watch};
use foretell_core::draft;
use foretell_core::units::SplitMix64;
use foretell_core::words::Mode;
use foretell_drafts::service::{ListenError, Service, Unknown};
use foretell_net::fleet::identity::{Identities, ModelConfig, RecognitionSettings, Renderer};
use foretell_net::fleet::{self, Auth, KeyFile, ModelName, Replica, ReplicaSettings, SystemResolver};
use foretell_net::http::drain::Lifecycle;
use foretell_net::http::listen::Endpoint;
use foretell_net::random;
use foretell_observe::inject;
use foretell_observe::trace::{Collector, CollectorError};
use foretell_parsers::parse::Parsers;
use foretell_policy::PolicySet;
use foretell_proxy::gateway::{self as proxy, Settings, Shared, StartError, TraceSettings};
use foretell_proxy::learning::Learnt;
use foretell_proxy::learning::comparison::{Comparisons, shown};
use foretell_proxy::learning::corpus::{self, CorpusHandle};
use foretell_proxy::learning::recording::{Recorder, RecorderError};
use foretell_proxy::serving::drafters::{DrafterError, Drafters};
use foretell_proxy::serving::gates::GateWatch;
use foretell_proxy::serving::live;
use foretell_proxy::serving::ruling::{self, Rulebook};
use foretell_proxy::serving::{SessionRunner, SessionRunnerSetup};
use foretell_proxy::store::{self, Store};

/// Maximum wait of a start for the backends' engines to be identified and for the measurements of
/// other sidecars; after that, requests are passed through until they are.
const IDENTIFICATION_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum wait at the end for the snapshots to be written, and for the store.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum wait at the end for recorded requests to be written: those of the last second, unless
/// the disk hangs.
const RECORDER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum wait at the end for the last spans to be sent.
const SPAN_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Cause of a failed start of the proxy.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A listener, thread or other basic part could not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A drafter could not be loaded.
    #[error(transparent)]
    Drafter(#[from] DrafterError),
    /// A file that the configuration names cannot be read.
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    /// A certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] fleet::tls::TlsError),
    /// Requests cannot be recorded.
    #[error(transparent)]
    Recorder(#[from] RecorderError),
    /// Traces cannot be sent.
    #[error(transparent)]
    Collector(#[from] CollectorError),
    /// The socket for drafts cannot be opened.
    #[error(transparent)]
    Drafts(#[from] ListenError),
}

/// A running proxy.
pub struct Running {
    /// The listeners and the state that they share.
    pub gateway: Gateway,
    /// Identification of the backends' engines.
    pub identities: Arc<Identities>,
    pub drafters: Arc<Drafters>,
    /// The task that writes the snapshots, for the last time when the process drains; `None`
    /// without `corpus.snapshot`.
    saving: Option<JoinHandle<()>>,
    /// The task that shares measurements with other sidecars, for the last time when the process
    /// drains; `None` without `fleet.store`.
    sharing: Option<JoinHandle<()>>,
    /// Writes requests for training; `None` without `corpus.record`.
    recorder: Option<Recorder>,
    /// The task that sends spans, and the token that stops it; `None` without a collector.
    exporting: Option<(JoinHandle<()>, CancellationToken)>,
    /// Stops the repeated identification of the backends when it is dropped.
    _identifying: DropGuard,
}

impl Running {
    /// Serves until a signal or the admin API has drained the proxy. Notifies the service manager
    /// of its state.
    pub async fn until(self, signals: Signals, manager: Arc<Manager>) -> Ended {
        let ended = self.gateway.until(signals, manager).await;
        // Nothing more is written: the last snapshots would wait for requests that are still open.
        if ended == Ended::AtOnce {
            return ended;
        }
        for last in [self.saving, self.sharing].into_iter().flatten() {
            // A disk or a store that hangs does not delay the end.
            let _ = tokio::time::timeout(SNAPSHOT_TIMEOUT, last).await;
        }
        if let Some(recorder) = self.recorder {
            let written = tokio::task::spawn_blocking(move || recorder.finish());
            let _ = tokio::time::timeout(RECORDER_TIMEOUT, written).await;
        }
        if let Some((exporting, stop)) = self.exporting {
            stop.cancel();
            let _ = tokio::time::timeout(SPAN_FLUSH_TIMEOUT, exporting).await;
        }
        ended
    }
}

/// Loads the drafters, opens the listeners and identifies the backends' engines.
///
/// # Errors
/// [`AssembleError`]; then no listener is open.
pub async fn start(process: Process, policies: PolicySet) -> Result<Running, AssembleError> {
    start_with(process, policies, Drafters::default()).await
}

/// As [`start`], with some drafters already loaded; others that policies name are loaded in
/// addition.
///
/// # Errors
/// [`AssembleError`]; then no listener is open.
pub async fn start_with(
    process: Process,
    policies: PolicySet,
    drafters: Drafters,
) -> Result<Running, AssembleError> {
    let Loaded { process, policies, mut settings, drafters } =
        blocking(move || load(process, policies, drafters)).await?;
    let stop_tracing = CancellationToken::new();
    let mut exporting = None;
    if let Some(url) = &process.observe.otlp {
        let (collector, spans) = Collector::at(url)?;
        settings.trace_settings.collector = Some(collector);
        exporting = Some((tokio::spawn(spans.send(stop_tracing.clone())), stop_tracing));
    }
    let shared = Shared::new(&settings)?;
    let recorder = process.corpus.record.as_ref();
    let recorder =
        recorder.map(|settings| Recorder::start(settings, Arc::clone(&shared.observer))).transpose()?;
    let mut known = known(&process, policies, drafters, recorder.clone(), &shared)?;
    known.drafts = drafts_service(&process, &shared)?;
    expose(&known, &shared).map_err(StartError::from)?;
    let Known { identities, drafters, learnt, runner, gates, corpus, .. } = known.clone();
    let snapshot = process.corpus.snapshot.clone();
    if let Some(file) = snapshot.clone() {
        let (learnt, corpus) = (Arc::clone(&learnt), corpus.clone());
        blocking(move || {
            learnt.restore_logged(&file);
            corpus.restore(&corpus::sibling(&file));
        })
        .await;
    }
    let store = fleet_store(&process, &learnt, &shared)?;
    let files = process.policies_read.is_some().then(|| Watch::new(process.clone()));
    let configured = Arc::new(Configured::new(process, known, &shared.observer));
    let watching = CancellationToken::new();
    let gateway = Gateway::start_with(settings, Some(runner), Some(Arc::clone(&configured)), shared).await?;
    if let Some(files) = files {
        tokio::spawn(follow(files, configured, gateway.shared.clone(), watching.clone()));
    }
    let life = Arc::clone(&gateway.shared.life);
    let saving = snapshot.map(|file| {
        let texts = corpus.save_until_drained(corpus::sibling(&file), Arc::clone(&life));
        tokio::spawn(async move { tokio::join!(learnt.save_until_drained(file, life), texts) }.map(drop))
    });
    tokio::spawn(Arc::clone(&identities).run(watching.clone()));
    tokio::spawn(gates.run(watching.clone()));
    let (first_exchange, exchanged) = oneshot::channel();
    let life = Arc::clone(&gateway.shared.life);
    let sharing = store.map(|store| tokio::spawn(store.exchange_until_drained(life, first_exchange)));
    tokio::spawn(until_draining(Arc::clone(&gateway.shared.life), watching.clone()));
    // A backend that is not reachable yet does not prevent the start: its requests are passed
    // through.
    let begun = async { tokio::join!(identities.attempted(), exchanged) };
    let _ = tokio::time::timeout(IDENTIFICATION_TIMEOUT, begun).await;
    let running = Running {
        gateway,
        identities,
        drafters,
        saving,
        sharing,
        recorder,
        exporting,
        _identifying: watching.drop_guard(),
    };
    Ok(running)
}

/// The drafts service, with its metrics; `None` without `drafts.listen`.
fn drafts_service(process: &Process, shared: &Shared) -> Result<Option<Arc<Service>>, AssembleError> {
    let process::Drafts { listen, mode, unknown } = &process.drafts;
    let Some(path) = listen else { return Ok(None) };
    let (unknown, modes) = (*unknown, Arc::clone(&shared.modes));
    let unknown = move || match (unknown, modes.process()) {
        (process::UnknownRows::Lookups, Mode::Auto) => Unknown::Lookups,
        (process::UnknownRows::None, _) | (_, Mode::Off | Mode::Observe) => Unknown::None,
    };
    let service =
        Service::listen(path, *mode, unknown, Arc::clone(&shared.joins), Arc::clone(&shared.memory))?;
    let metrics =
        inject::collector(Arc::clone(&service)).and_then(|made| shared.observer.metrics().register(made));
    metrics.map_err(StartError::from)?;
    tracing::info!(socket = %path.display(), "engines may ask for drafts");
    Ok(Some(service))
}

/// The store of the fleet, with its metrics; `None` without `fleet.store`.
fn fleet_store(
    process: &Process,
    learnt: &Arc<Learnt>,
    shared: &Shared,
) -> Result<Option<Store>, AssembleError> {
    let process::Fleet { store, key, sync, password_file, ca } = process.fleet.clone();
    let Some(url) = store else { return Ok(None) };
    let tls = url.tls.then(|| fleet::tls::client(ca.as_deref(), None)).transpose()?;
    let settings = store::Settings { url, key, every: sync, password_file, tls };
    let store = Store::new(settings, Arc::clone(learnt));
    let metrics = store::collector(store.status()).and_then(|made| shared.observer.metrics().register(made));
    metrics.map_err(StartError::from)?;
    Ok(Some(store))
}

/// Builds the state that outlives a request: the engines at each address, the policies, all that is
/// learnt, and the runner of sessions over them.
fn known(
    process: &Process,
    policies: PolicySet,
    drafters: Arc<Drafters>,
    recorder: Option<Recorder>,
    shared: &Shared,
) -> Result<Known, AssembleError> {
    let backends = || process.backends.iter();
    let recognition: HashMap<String, RecognitionSettings> = backends()
        .map(|backend| {
            let renderer = renderer(process, backend)?;
            Ok((backend.name.clone(), RecognitionSettings { renderer, ..recognition_settings(backend) }))
        })
        .collect::<Result<_, AssembleError>>()?;
    let recognition = move |replica: &fleet::Replica| recognition.get(replica.backend()).cloned();
    let identities = Arc::new(Identities::new(Arc::clone(&shared.fleet), recognition));
    let terms = backends().map(|backend| (backend.name.clone(), ruling::terms(&backend.methods))).collect();
    let policies = Arc::new(PolicyStore::new(policies));
    let limits = draft::corpus::Limits { bytes: usize_of(process.corpus.bytes), ttl: process.corpus.ttl };
    let snapshot = process.corpus.snapshot.as_deref().map(corpus::sibling);
    let corpus = CorpusHandle::start(limits, &shared.memory, Arc::clone(&shared.observer), snapshot)
        .map_err(StartError::Threads)?;
    let comparisons = Arc::new(Comparisons::new(SplitMix64::new(random::fresh_seed())));
    let slots = backends().map(|backend| (backend.name.clone(), backend.budget.slots)).collect();
    let learnt = Arc::new(Learnt::new(slots));
    let runner = Arc::new(SessionRunner::new(SessionRunnerSetup {
        identities: Arc::clone(&identities),
        rulebook: Rulebook::new(Arc::clone(&policies), terms, Arc::clone(&comparisons)),
        drafters: Arc::clone(&drafters),
        verify_timeout: process.timeouts.verify,
        draft_timeout: process.timeouts.draft,
        corpus: corpus.clone(),
        recorder,
        learnt: Arc::clone(&learnt),
    }));
    let gates =
        GateWatch::new(Arc::clone(&runner), Arc::clone(&policies), Arc::clone(&comparisons), shared.clone());
    let gates = Arc::new(gates);
    Ok(Known { policies, drafters, identities, comparisons, learnt, runner, gates, corpus, drafts: None })
}

/// Registers the metrics of control groups, gates, engines and drafters.
fn expose(known: &Known, shared: &Shared) -> Result<(), prometheus::Error> {
    let metrics = shared.observer.metrics();
    metrics.register(shown::collector(Arc::clone(&known.comparisons), Arc::clone(&known.policies))?)?;
    metrics.register(live::collector(&known.gates, &known.identities, Arc::clone(&known.drafters))?)
}

/// Settings and models that are loaded before a listener opens.
struct Loaded {
    process: Process,
    policies: PolicySet,
    settings: Settings,
    drafters: Arc<Drafters>,
}

/// Reads the files that the configuration names, and loads the models.
fn load(process: Process, policies: PolicySet, drafters: Drafters) -> Result<Loaded, AssembleError> {
    let settings = settings(&process)?;
    drafters.extend(&process, &policies)?;
    Ok(Loaded { process, policies, settings, drafters: Arc::new(drafters) })
}

/// Runs blocking work on another thread, so that signals are handled meanwhile. Dropping the future
/// does not stop the work.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await.map_err(JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // The runtime is shutting down.
        Err(Err(_)) => std::future::pending().await,
    }
}

/// Reloads configuration files that have changed, until `stop`.
async fn follow(mut files: Watch, configured: Arc<Configured>, shared: Shared, stop: CancellationToken) {
    for look in 1_u32.. {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(watch::EVERY) => {}
        }
        let (configured, shared) = (Arc::clone(&configured), shared.clone());
        // A disk that hangs blocks a thread of the blocking pool, and nothing else.
        files = blocking(move || {
            let changed = files.changed();
            // The outcome is logged and counted by `reload`.
            if changed {
                let _ = configured.reload(ReloadSource::FileChange, &shared);
            }
            if look.is_multiple_of(watch::READ_EVERY) {
                let _ = configured.reload(ReloadSource::Retry, &shared);
            }
            files
        })
        .await;
    }
}

/// Stops the identification of the backends once the process drains.
async fn until_draining(life: Arc<Lifecycle>, identifying: CancellationToken) {
    tokio::select! {
        () = life.draining() => identifying.cancel(),
        () = identifying.cancelled() => {}
    }
}

/// Settings by which the replicas of a backend are identified, watched and probed.
fn recognition_settings(backend: &Backend) -> RecognitionSettings {
    let process::VerifyLimits { allow, explicit, context_max, bytes_max, .. } = &backend.methods;
    let configured = process::Load::default();
    RecognitionSettings {
        dialect: backend.dialect.spoken(),
        renderer: Renderer::default(),
        tokenizer: tokenizer(backend),
        parsers: parsers(backend),
        generation_config: generation_config(backend),
        load: (backend.load.url != configured.url).then(|| backend.load.url.clone()),
        every: backend.load.every,
        ready: backend.probe.when == process::ProbeWhen::Ready,
        limits: fleet::probe::Limits {
            calls: backend.probe.calls,
            within: backend.probe.within,
            bytes_max: usize_of(*bytes_max),
            context_max: *context_max as usize,
            allow: allow.clone(),
        },
        named: if *explicit { allow.clone() } else { Vec::new() },
        billed: backend.billed,
    }
}

/// The server that renders this backend's chat requests, called with its keys and certificates.
fn renderer(process: &Process, backend: &Backend) -> Result<Renderer, AssembleError> {
    let url = match &backend.render {
        Render::Backend => return Ok(Renderer::Itself),
        Render::Never => return Ok(Renderer::Never),
        Render::By(url) => url.to_string(),
    };
    let settings = ReplicaSettings { url, ranks: 0, ..backend_settings(process, backend)? };
    Ok(Renderer::Other(Arc::new(Replica::new(settings).map_err(StartError::from)?)))
}

/// The output parsers named for its models: one set.
fn parsers(backend: &Backend) -> Parsers {
    let named = backend.models.iter().map(|model| model.parsers);
    named.into_iter().find(|parsers| *parsers != Parsers::default()).unwrap_or_default()
}

/// The `generation_config.json` of its models: the file that is named, or that in the folder of the
/// named tokenizer, if there is one.
fn generation_config(backend: &Backend) -> Option<ModelConfig> {
    let named = backend.models.iter().find_map(|model| model.generation_config.as_deref());
    match named {
        Some(path) => Some(ModelConfig::Named(files::in_folder(path, files::GENERATION_CONFIG))),
        None => Some(ModelConfig::for_tokenizer(&tokenizer(backend)?)),
    }
}

fn tokenizer(backend: &Backend) -> Option<PathBuf> {
    backend.models.iter().find_map(|model| match &model.tokenizer {
        TokenizerSource::File(path) => Some(files::in_folder(path, "tokenizer.json")),
        TokenizerSource::Backend => None,
    })
}

fn settings(process: &Process) -> Result<Settings, AssembleError> {
    let listen = process.listen.iter().map(endpoint).collect::<Result<_, _>>()?;
    let mut backends = Vec::new();
    for backend in &process.backends {
        let settings = backend_settings(process, backend)?;
        match &backend.replicas {
            Replicas::Urls(urls) => backends
                .extend(urls.iter().map(|url| ReplicaSettings { url: url.to_string(), ..settings.clone() })),
            Replicas::Dns { name, every, scheme } => {
                let url = format!("{}://{name}", scheme.name());
                backends.push(ReplicaSettings { url, discover: Some(*every), ..settings });
            }
        }
    }
    let admin_token = process.admin.token_file.as_ref().map(|path| {
        let read = fleet::key::secret(path);
        read.map_err(|error| AssembleError::File { path: path.clone(), error })
    });
    let admin_token = admin_token.transpose()?;
    Ok(Settings {
        listen,
        admin: Some(process.admin.address),
        admin_token,
        admin_hosts: process.admin.hosts.clone(),
        require_backend: process.ready.require_backend,
        trace_settings: TraceSettings { share: process.observe.share, collector: None },
        metrics: process.metrics.address,
        mode: process.mode,
        tenant: process.tenant.clone(),
        client_control: process.client.control == ClientControl::Bounded,
        limits: process.limits,
        drain: process.drain,
        backends,
        resolver: Arc::new(SystemResolver),
        workers: proxy::default_workers(),
    })
}

fn endpoint(listen: &Listen) -> Result<Endpoint, AssembleError> {
    let tls =
        listen.tls.as_ref().map(|tls| fleet::tls::server(&tls.cert, &tls.key, tls.client_ca.as_deref()));
    Ok(Endpoint { address: listen.address, tls: tls.transpose()? })
}

/// Settings that all replicas of a backend share; the address is filled in by the caller.
fn backend_settings(process: &Process, backend: &Backend) -> Result<ReplicaSettings, AssembleError> {
    let connect = &backend.connect;
    let ClientTls { ca, cert, key: cert_key } = &connect.tls;
    let identity = cert.as_deref().zip(cert_key.as_deref());
    let tls = (ca.is_some() || identity.is_some()).then(|| fleet::tls::client(ca.as_deref(), identity));
    let models = backend
        .models
        .iter()
        .map(|model| ModelName { id: model.id.as_str().to_owned(), aliases: model.aliases.clone() });
    Ok(ReplicaSettings {
        dialect: backend.dialect.name().to_owned(),
        models: models.collect(),
        billed: backend.billed,
        translates: backend.routes.translated(),
        default: backend.default,
        pass_client_host: connect.host != HostHeader::Backend,
        auth: auth(&connect.auth)?,
        internal_key: connect.auth.own_token_file.as_deref().map(key).transpose()?,
        tls: tls.transpose()?,
        ranks: backend.ranks,
        connect_timeout: process.timeouts.connect,
        pool_idle: process.timeouts.pool_idle,
        first_byte: process.timeouts.first_byte,
        idle: process.timeouts.idle,
        ..ReplicaSettings::new(backend.name.clone(), String::new())
    })
}

fn auth(settings: &process::Auth) -> Result<Auth, AssembleError> {
    Ok(match (&settings.token_file, settings.pass) {
        (Some(path), _) => Auth::Replace(key(path)?),
        (None, true) => Auth::Pass,
        (None, false) => Auth::Strip,
    })
}

fn key(path: &Path) -> Result<Arc<KeyFile>, AssembleError> {
    let key = KeyFile::open(path);
    key.map(Arc::new).map_err(|error| AssembleError::File { path: path.to_owned(), error })
}

fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
