//! The proxy itself: accept, judge, relay or hand a session to its driver, answer.

pub mod assemble;
pub mod clock;
pub mod drain;
pub mod drive;
pub mod errors;
pub mod handover;
pub mod headers;
pub mod listen;
pub mod mode;
pub mod proxy;
pub mod relay;
pub mod route;
pub mod tunnel;
pub mod workers;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::fleet::{BackendSettings, Fleet, InvalidUrl, Resolve, SystemResolver};
use crate::observe::Observer;
use crate::observe::admin::{Admin, Hooks};
use crate::observe::replicas::ReplicaMetrics;
use drain::{DrainTimes, Lifecycle};
use handover::Drive;
use listen::{Bounds, Endpoint, Stop};
use mode::{Mode, ModeSwitch};
use proxy::Proxy;
use tunnel::Tunnels;
use workers::Workers;

/// How long a start waits for the addresses behind names.
const DISCOVERED_WITHIN: Duration = Duration::from_secs(2);

/// Bounds on requests, `limits` of the process file.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of the head.
    pub head: Bounds,
    /// Largest body that is read to see whether it may be speculated.
    pub speculate_body: usize,
    /// Largest body at all; `None` is unlimited.
    pub relay_body: Option<u64>,
    /// Most driven sessions at once; beyond it, requests are relayed.
    pub sessions: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: Bounds::default(), speculate_body: 8 << 20, relay_body: None, sessions: 1024 }
    }
}

/// Everything the gateway is told when it starts.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where clients connect; port 0 takes a free one.
    pub listen: Vec<Endpoint>,
    /// Where the operator connects.
    pub admin: Option<SocketAddr>,
    /// `Authorization: Bearer` that the admin listener wants. Needed if it is not on loopback.
    pub admin_token: Option<String>,
    /// A listener for `/metrics` alone.
    pub metrics: Option<SocketAddr>,
    /// What Foretell may do.
    pub mode: Mode,
    /// Whether clients may lower it by `x-foretell`.
    pub client_control: bool,
    /// Bounds on requests.
    pub limits: Limits,
    /// How to stop.
    pub drain: DrainTimes,
    /// The servers behind.
    pub backends: Vec<BackendSettings>,
    /// Who knows the addresses behind names.
    pub resolver: Arc<dyn Resolve>,
    /// Network threads; 0 serves on the calling runtime.
    pub workers: usize,
}

impl Settings {
    /// One backend, the default addresses, relay only until a driver is given.
    #[must_use]
    pub fn new(backend: BackendSettings) -> Self {
        Self {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 8080)).into()],
            admin: Some(SocketAddr::from(([127, 0, 0, 1], 9464))),
            admin_token: None,
            metrics: None,
            mode: Mode::Auto,
            client_control: true,
            limits: Limits::default(),
            drain: DrainTimes::default(),
            backends: vec![backend],
            resolver: Arc::new(SystemResolver),
            workers: default_workers(),
        }
    }
}

/// One thread per core, as they are idle most of the time; few chunks then wait behind another one.
pub fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8))
}

/// Who drives eligible requests, and what the admin API can do with the configuration.
#[derive(Clone, Default)]
pub struct Brains {
    /// Drives eligible requests; without it everything is relayed.
    pub drive: Option<Arc<dyn Drive>>,
    /// Policies, reload and explain for the admin API.
    pub hooks: Option<Arc<dyn Hooks>>,
}

/// Why the gateway could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
    /// The admin API would be open to others.
    #[error("admin.address {0} is not on loopback: set admin.token_file, or use 127.0.0.1")]
    AdminOpen(SocketAddr),
    /// A backend cannot be called.
    #[error(transparent)]
    Backend(#[from] InvalidUrl),
    /// The network threads cannot be started.
    #[error("cannot start network threads: {0}")]
    Threads(io::Error),
    /// The metrics registry refused a metric.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// How the gateway ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Everything was answered, or cut after the grace; how many connections were cut.
    Drained {
        /// Connections cut.
        cut: usize,
    },
    /// A second signal came.
    AtOnce,
}

/// What the parts of a running gateway share.
#[derive(Clone)]
pub struct Shared {
    /// The servers behind.
    pub fleet: Arc<Fleet>,
    /// The operator's switch.
    pub modes: Arc<ModeSwitch>,
    /// Metrics, recent requests, log.
    pub observer: Arc<Observer>,
    /// Where the process stands between start and stop.
    pub life: Arc<Lifecycle>,
}

impl Shared {
    /// Builds the shared parts without opening a listener, for drivers that need them before the start.
    ///
    /// # Errors
    /// A backend address is invalid, or the metrics registry is at fault.
    pub fn new(settings: &Settings) -> Result<Self, StartError> {
        let lanes = settings.workers.max(1);
        let backends = settings.backends.iter();
        let fleet = Fleet::new(backends.map(|backend| BackendSettings { lanes, ..backend.clone() }))?;
        let fleet = Arc::new(fleet);
        Ok(Self {
            modes: Arc::new(ModeSwitch::new(settings.mode)),
            observer: {
                let observer = Observer::new()?;
                observer.metrics().register(ReplicaMetrics::new(Arc::clone(&fleet))?)?;
                Arc::new(observer)
            },
            fleet,
            life: Arc::new(Lifecycle::default()),
        })
    }
}

/// A running gateway.
pub struct Gateway {
    /// Where clients connect.
    pub addresses: Vec<SocketAddr>,
    /// Where the operator connects.
    pub admin: Option<SocketAddr>,
    /// The metrics-only listener.
    pub metrics: Option<SocketAddr>,
    /// What its parts share.
    pub shared: Shared,
    times: DrainTimes,
    tunnels: Tunnels,
    proxies: Vec<JoinHandle<usize>>,
    admins: Vec<JoinHandle<usize>>,
    admin_stop: Stop,
    /// The fleet is looked after until this is dropped.
    _watching: DropGuard,
}

impl Gateway {
    /// Opens the listeners and serves.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(settings: Settings, brains: Brains) -> Result<Self, StartError> {
        let shared = Shared::new(&settings)?;
        Self::start_with(settings, brains, shared).await
    }

    /// As [`Self::start`], with parts that the driver knows already.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start_with(settings: Settings, brains: Brains, shared: Shared) -> Result<Self, StartError> {
        let open = settings.admin.filter(|admin| !admin.ip().is_loopback());
        if let (Some(admin), None) = (open, &settings.admin_token) {
            return Err(StartError::AdminOpen(admin));
        }
        let workers = Arc::new(Workers::start(settings.workers).map_err(StartError::Threads)?);
        let watching = CancellationToken::new();
        shared.fleet.watch(&settings.resolver, &watching);
        let discovered = shared.fleet.discover(settings.resolver.as_ref());
        // A name that nobody answers for is no reason not to listen.
        let _ = tokio::time::timeout(DISCOVERED_WITHIN, discovered).await;
        let tunnels = Tunnels::new(shared.life.stop.cut.clone());
        let proxy = Arc::new(Proxy::new(&settings, &brains, shared.clone(), tunnels.clone()));
        let mut gateway = Self {
            addresses: Vec::new(),
            admin: None,
            metrics: None,
            times: settings.drain,
            tunnels,
            proxies: Vec::new(),
            admins: Vec::new(),
            admin_stop: Stop::default(),
            shared,
            _watching: watching.drop_guard(),
        };
        gateway.open_admin(&settings, brains.hooks).await?;
        for endpoint in settings.listen {
            let listener = bind(endpoint.address).await?;
            gateway.addresses.push(local(&listener, endpoint.address)?);
            let (proxy, workers) = (Arc::clone(&proxy), Arc::clone(&workers));
            let (head, stop) = (settings.limits.head, gateway.shared.life.stop.clone());
            gateway.proxies.push(tokio::spawn(async move {
                let app = move |request| Arc::clone(&proxy).answer(request);
                listen::serve_on(&workers, listener, endpoint.tls, app, head, stop).await
            }));
        }
        gateway.shared.life.listening();
        Ok(gateway)
    }

    async fn open_admin(
        &mut self,
        settings: &Settings,
        hooks: Option<Arc<dyn Hooks>>,
    ) -> Result<(), StartError> {
        let token = settings.admin_token.clone();
        let admin = Arc::new(Admin::new(self.shared.clone(), hooks, token));
        if let Some(address) = settings.admin {
            let listener = bind(address).await?;
            self.admin = Some(local(&listener, address)?);
            let (admin, stop) = (Arc::clone(&admin), self.admin_stop.clone());
            let app = move |request| Arc::clone(&admin).answer(request);
            self.admins.push(tokio::spawn(listen::serve(listener, app, Bounds::default(), stop)));
        }
        if let Some(address) = settings.metrics {
            let listener = bind(address).await?;
            self.metrics = Some(local(&listener, address)?);
            let stop = self.admin_stop.clone();
            let app = move |request| std::future::ready(admin.answer_metrics(&request));
            self.admins.push(tokio::spawn(listen::serve(listener, app, Bounds::default(), stop)));
        }
        Ok(())
    }

    /// Serves until [`Lifecycle::drain`] is called, then stops step by step.
    pub async fn ended(self) -> Ended {
        let life = Arc::clone(&self.shared.life);
        let tunnels = self.tunnels.clone();
        let done = CancellationToken::new();
        let all = async {
            let mut cut = 0;
            for proxy in self.proxies {
                cut += proxy.await.unwrap_or(0);
            }
            let open = tunnels.open();
            tunnels.ended().await;
            done.cancel();
            if life.stop.cut.is_cancelled() { cut + open } else { cut }
        };
        let (cut, ()) = tokio::join!(all, life.steps(self.times, done.cancelled()));
        life.is_empty();
        // The admin listener outlives the proxy, so that `drain?wait=1` gets its answer.
        self.admin_stop.accept.cancel();
        let closing = async {
            for admin in self.admins {
                let _ = admin.await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(1), closing).await.is_err() {
            self.admin_stop.cut.cancel();
        }
        Ended::Drained { cut }
    }

    /// Serves until a signal: the first drains, the second ends at once.
    pub async fn until_signal(self) -> Ended {
        let life = Arc::clone(&self.shared.life);
        let ended = self.ended();
        tokio::pin!(ended);
        tokio::select! {
            ended = &mut ended => return ended,
            () = signal() => {}
        }
        tracing::info!("draining");
        life.drain();
        tokio::select! {
            ended = &mut ended => ended,
            () = signal() => Ended::AtOnce,
        }
    }
}

/// Opens the listeners and serves until a signal.
///
/// # Errors
/// See [`StartError`].
pub async fn run(settings: Settings, brains: Brains) -> Result<Ended, StartError> {
    let gateway = Gateway::start(settings, brains).await?;
    for address in &gateway.addresses {
        tracing::info!(%address, "listening");
    }
    if let Some(address) = gateway.admin {
        tracing::info!(%address, "admin");
    }
    Ok(gateway.until_signal().await)
}

async fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|error| StartError::Listen { address, error })
}

fn local(listener: &TcpListener, address: SocketAddr) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|error| StartError::Listen { address, error })
}

async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (terminate, interrupt) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let (Ok(mut terminate), Ok(mut interrupt)) = (terminate, interrupt) else {
        tracing::warn!("signals cannot be caught; stop by POST /api/drain");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
