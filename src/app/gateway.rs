//! Opens the listeners of proxy, admin API and metrics, serves, and stops them in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::admin::{Admin, Configured};
use crate::gateway::proxy::Proxy;
use crate::gateway::tunnel::Tunnels;
use crate::gateway::{Brains, Settings, Shared, StartError};
use crate::http::drain::DrainTimes;
use crate::http::listen::{self, Bounds, Stop};
use crate::http::workers::Workers;

/// How long a start waits for the addresses behind names.
const DISCOVERED_WITHIN: Duration = Duration::from_secs(2);

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
    pub async fn start(
        settings: Settings,
        brains: Brains,
        configured: Option<Configured>,
    ) -> Result<Self, StartError> {
        let shared = Shared::new(&settings)?;
        Self::start_with(settings, brains, configured, shared).await
    }

    /// As [`Self::start`], with parts that the driver knows already.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start_with(
        settings: Settings,
        brains: Brains,
        configured: Option<Configured>,
        shared: Shared,
    ) -> Result<Self, StartError> {
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
        gateway.open_admin(&settings, configured).await?;
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
        configured: Option<Configured>,
    ) -> Result<(), StartError> {
        let token = settings.admin_token.clone();
        let admin = Arc::new(Admin::new(self.shared.clone(), configured, token));
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
        life.set_empty();
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
