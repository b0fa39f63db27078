//! The proxy itself: accepts and judges requests, passes them through or hands them to the session
//! runner, and answers.

pub mod facts;
pub mod proxy;
pub mod route;
pub mod tenant;
pub mod translate;
pub mod tunnel;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::Semaphore;

pub use crate::serving::exchange::Shared;
use crate::serving::mode::ModeSwitch;
use foretell_config::process::{Limits, Tenant};
use foretell_core::words::Mode;
use foretell_net::fleet::{Fleet, InvalidUrl, ModelName, ReplicaSettings, Resolve, SystemResolver};
use foretell_net::http::connections::{Connections, max_clients};
use foretell_net::http::drain::{DrainTimes, Lifecycle};
use foretell_net::http::listen::Endpoint;
use foretell_net::http::memory::Memory;
use foretell_observe::Observer;
use foretell_observe::trace;
use foretell_observe::{edge, replicas};

#[derive(Clone, Debug)]
pub struct Settings {
    /// Addresses for clients; port 0 takes a free one.
    pub listen: Vec<Endpoint>,
    /// The address of the admin listener; `None` opens none.
    pub admin: Option<SocketAddr>,
    /// The bearer token of the admin listener; required if it is not on loopback.
    pub admin_token: Option<String>,
    /// Host names that the admin listener accepts, in addition to `localhost` and addresses.
    pub admin_hosts: Vec<String>,
    /// `/readyz` waits until a replica of every backend can be reached.
    pub require_backend: bool,
    /// A listener for `/metrics` alone; `None` opens none.
    pub metrics: Option<SocketAddr>,
    pub mode: Mode,
    /// True if clients may lower the mode by `x-foretell`.
    pub client_control: bool,
    /// Header and fallback for the tenant of a request.
    pub tenant: Tenant,
    pub limits: Limits,
    /// Time limits of draining.
    pub drain: DrainTimes,
    pub backends: Vec<ReplicaSettings>,
    /// Resolves the names of backends.
    pub resolver: Arc<dyn Resolve>,
    /// Sampling of log lines and spans, and the collector of spans.
    pub trace_settings: TraceSettings,
    /// Network threads; 0 serves on the calling runtime.
    pub workers: usize,
}

/// Sampling of log lines and spans.
#[derive(Clone, Debug)]
pub struct TraceSettings {
    /// Share of the requests, 0 to 1.
    pub share: f64,
    /// The collector of spans; `None`: no spans are sent.
    pub collector: Option<trace::Collector>,
}

impl Default for TraceSettings {
    fn default() -> Self {
        Self { share: 1.0, collector: None }
    }
}

impl Settings {
    /// One backend, the default addresses, passthrough only until a session runner is given.
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
            trace_settings: TraceSettings::default(),
            drain: DrainTimes::default(),
            backends: vec![backend],
            resolver: Arc::new(SystemResolver),
            workers: default_workers(),
        }
    }
}

/// Maximum number of client connections: as set by the operator, if there are enough file
/// descriptors.
fn clients(wanted: Option<usize>) -> usize {
    let fit = max_clients();
    let Some(wanted) = wanted else { return fit };
    if wanted > fit {
        tracing::warn!(wanted, fit, "limits.connections is more than the limit of open files allows");
    }
    wanted.min(fit)
}

/// One thread per core, at most 8: with more threads, fewer chunks wait behind another one.
pub fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8))
}

/// Cause of a failed start of the gateway.
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
    /// Builds the shared parts without opening a listener, for a session runner that needs them
    /// before the start.
    ///
    /// # Errors
    /// A backend address is invalid, or the metrics registry is at fault.
    pub fn new(settings: &Settings) -> Result<Self, StartError> {
        let lanes = settings.workers.max(1);
        let backends = settings.backends.iter();
        let fleet = Fleet::new(backends.map(|backend| ReplicaSettings { lanes, ..backend.clone() }))?;
        let fleet = Arc::new(fleet);
        let memory = Memory::new(settings.limits.memory);
        let connections = Connections::new(clients(settings.limits.connections));
        Ok(Self {
            modes: Arc::new(ModeSwitch::new(settings.mode)),
            observer: {
                let TraceSettings { share, collector } = settings.trace_settings.clone();
                let observer = Observer::new()?.with_tracing(share, collector)?;
                observer.metrics().register(replicas::collector(Arc::clone(&fleet))?)?;
                let named = settings.backends.iter().flat_map(|backend| &backend.models);
                observer.metrics().configured_models(named.flat_map(ModelName::exact));
                let edge = edge::collector(Arc::clone(&memory), Arc::clone(&connections))?;
                observer.metrics().register(edge)?;
                Arc::new(observer)
            },
            fleet,
            life: Arc::new(Lifecycle::default()),
            require_backend: settings.require_backend,
            sessions: Arc::new(Semaphore::new(settings.limits.sessions.min(Semaphore::MAX_PERMITS))),
            memory,
            joins: Arc::default(),
            connections,
        })
    }

    /// Reason for which `/readyz` refuses, as text for the operator; `None` if the process is
    /// ready.
    pub fn unready(&self) -> Option<String> {
        if self.life.is_draining() {
            return Some("draining".to_owned());
        }
        if !self.life.is_ready() {
            return Some("starting".to_owned());
        }
        if !self.require_backend {
            return None;
        }
        self.fleet.unreachable().map(|missing| format!("waiting for backend {missing}"))
    }
}
