//! The proxy itself: accept, judge, relay or hand a session to its driver, answer.

pub mod facts;
pub mod proxy;
pub mod relay;
pub mod route;
pub mod tenant;
pub mod tunnel;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::config::process::Tenant;
pub use crate::drive::exchange::Shared;
use crate::drive::mode::ModeSwitch;
use crate::fleet::{Fleet, InvalidUrl, ModelName, ReplicaSettings, Resolve, SystemResolver};
use crate::http::connections::Connections;
use crate::http::drain::{DrainTimes, Lifecycle};
use crate::http::listen::{Bounds, Endpoint};
use crate::http::memory::Memory;
use crate::observe::Observer;
use crate::observe::edge::EdgeMetrics;
use crate::observe::replicas::ReplicaMetrics;
use crate::observe::trace;
use crate::words::Mode;

/// Bounds on requests, `limits` of the process file.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bounds of the request head.
    pub head: Bounds,
    /// Largest body that is read to see whether it may be speculated, bytes.
    pub speculate_body: usize,
    /// Largest body at all, bytes; `None` is unlimited.
    pub relay_body: Option<u64>,
    /// Most driven sessions at once; beyond it, requests are relayed.
    pub sessions: usize,
    /// Most memory for bodies and sessions, bytes; beyond it, completions are relayed unread.
    pub memory: u64,
    /// Most clients connected at once.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: Bounds::default(),
            speculate_body: 8 << 20,
            relay_body: None,
            sessions: 1024,
            memory: 512 << 20,
            connections: 1 << 20,
        }
    }
}

/// The settings of the gateway.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where clients connect; port 0 takes a free one.
    pub listen: Vec<Endpoint>,
    /// The address of the admin listener; `None` opens none.
    pub admin: Option<SocketAddr>,
    /// The bearer token of the admin listener; required if it is not on loopback.
    pub admin_token: Option<String>,
    /// Host names by which the admin listener is asked, besides `localhost` and addresses.
    pub admin_hosts: Vec<String>,
    /// `/readyz` waits until a replica of every backend can be reached.
    pub require_backend: bool,
    /// A listener for `/metrics` alone; `None` opens none.
    pub metrics: Option<SocketAddr>,
    /// The mode of the process.
    pub mode: Mode,
    /// Whether clients may lower the mode by `x-foretell`.
    pub client_control: bool,
    /// How the tenant of a request is found.
    pub tenant: Tenant,
    /// Bounds on requests.
    pub limits: Limits,
    /// Time limits of draining.
    pub drain: DrainTimes,
    /// The configured backends.
    pub backends: Vec<ReplicaSettings>,
    /// Resolves the names of backends.
    pub resolver: Arc<dyn Resolve>,
    /// Which requests are told of in full, and where their spans go.
    pub telling: Telling,
    /// Network threads; 0 serves on the calling runtime.
    pub workers: usize,
}

/// Which requests have a line in the log and spans, and whether outputs may be kept to be looked at.
#[derive(Clone, Debug)]
pub struct Telling {
    /// Share of the requests, 0 to 1.
    pub share: f64,
    /// Where spans go; `None`: nowhere.
    pub collector: Option<trace::Collector>,
    /// Outputs of requests that ask for it are kept with the latest completions.
    pub texts: bool,
}

impl Default for Telling {
    fn default() -> Self {
        Self { share: 1.0, collector: None, texts: false }
    }
}

impl Settings {
    /// One backend, the default addresses, relay only until a driver is given.
    #[must_use]
    pub fn new(backend: ReplicaSettings) -> Self {
        Self {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 8080)).into()],
            admin: Some(SocketAddr::from(([127, 0, 0, 1], 9464))),
            admin_token: None,
            admin_hosts: Vec::new(),
            require_backend: false,
            metrics: None,
            mode: Mode::Auto,
            client_control: true,
            tenant: Tenant::default(),
            limits: Limits::default(),
            telling: Telling::default(),
            drain: DrainTimes::default(),
            backends: vec![backend],
            resolver: Arc::new(SystemResolver),
            workers: default_workers(),
        }
    }
}

/// One thread per core, at most 8: with more threads, fewer chunks wait behind another one.
pub fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8))
}

/// Why the gateway could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {error}; {setting} gives another address")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The setting, and the flag if there is one, that names it.
        setting: &'static str,
        /// The cause that the system reports.
        error: io::Error,
    },
    /// The admin API would be open to others.
    #[error("admin.address {0} is not on loopback: set admin.token_file, or use 127.0.0.1")]
    AdminOpen(SocketAddr),
    /// A backend cannot be called.
    #[error(transparent)]
    Replica(#[from] InvalidUrl),
    /// The network threads cannot be started.
    #[error("cannot start network threads: {0}")]
    Threads(io::Error),
    /// The metrics registry refused a metric.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl Shared {
    /// Builds the shared parts without opening a listener, for drivers that need them before the start.
    ///
    /// # Errors
    /// A backend address is invalid, or the metrics registry is at fault.
    pub fn new(settings: &Settings) -> Result<Self, StartError> {
        let lanes = settings.workers.max(1);
        let backends = settings.backends.iter();
        let fleet = Fleet::new(backends.map(|backend| ReplicaSettings { lanes, ..backend.clone() }))?;
        let fleet = Arc::new(fleet);
        let memory = Memory::new(settings.limits.memory);
        let connections = Connections::new(settings.limits.connections);
        Ok(Self {
            modes: Arc::new(ModeSwitch::new(settings.mode)),
            observer: {
                let Telling { share, collector, texts } = settings.telling.clone();
                let observer = Observer::new()?.telling(share, collector)?.with_texts(texts);
                observer.metrics().register(ReplicaMetrics::new(Arc::clone(&fleet))?)?;
                let named = settings.backends.iter().flat_map(|backend| &backend.models);
                observer.metrics().configured_models(named.flat_map(ModelName::exact));
                let edge = EdgeMetrics::new(Arc::clone(&memory), Arc::clone(&connections))?;
                observer.metrics().register(edge)?;
                Arc::new(observer)
            },
            fleet,
            life: Arc::new(Lifecycle::default()),
            require_backend: settings.require_backend,
            sessions: Arc::new(Semaphore::new(settings.limits.sessions.min(Semaphore::MAX_PERMITS))),
            memory,
            connections,
        })
    }

    /// Why `/readyz` refuses, in words for the operator; `None` if the process is ready.
    pub fn unready(&self) -> Option<String> {
        if self.life.is_draining() {
            return Some("draining".to_owned());
        }
        if !self.life.is_ready() {
            return Some("starting".to_owned());
        }
        let missing = self.fleet.unreachable().filter(|_| self.require_backend)?;
        Some(format!("waiting for backend {missing}"))
    }
}
