//! Opens the listeners of proxy, admin API and metrics, serves them, and stops them in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::service_fn;

use crate::admin::{Admin, Configured, Guard, ReloadSource, status};
use crate::app::manager::Manager;
use crate::app::signals::{SAME_WISH, Signals, Wish};
use foretell_config::problem::Problem;
use foretell_net::http::allocator_purge;
use foretell_net::http::connections::Connections;
use foretell_net::http::drain::DrainTimes;
use foretell_net::http::listen::{self, Bounds, Listening, Stop};
use foretell_net::http::workers::Workers;
use foretell_proxy::gateway::proxy::Proxy;
use foretell_proxy::gateway::tunnel::Tunnels;
use foretell_proxy::gateway::{Settings, Shared, StartError};
use foretell_proxy::serving::exchange::Serve;

/// Maximum wait of a start for the DNS names of backends to be resolved.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of concurrent connections to the admin listener, and to the metrics listener.
const OPERATORS: usize = 64;
/// Timeout for the head of a request from an operator's client.
const OPERATORS_HEAD: Duration = Duration::from_secs(2);

/// How the gateway stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every request was answered, or its connection was cut after the grace period.
    Drained {
        /// Number of connections that were cut.
        cut: usize,
    },
    /// A second signal stopped it without waiting.
    AtOnce,
}

pub struct Gateway {
    /// Addresses on which clients are served.
    pub addresses: Vec<SocketAddr>,
    /// Address of the admin API; `None` without one.
    pub admin: Option<SocketAddr>,
    /// Address of the metrics-only listener; `None` without one.
    pub metrics: Option<SocketAddr>,
    pub shared: Shared,
    /// Reloads the configuration; `None` without one.
    configured: Option<Arc<Configured>>,
    times: DrainTimes,
    tunnels: Tunnels,
    proxies: Vec<JoinHandle<usize>>,
    admins: Vec<JoinHandle<usize>>,
    admin_stop: Stop,
    /// Stops the watching of the fleet when it is dropped.
    _watching: DropGuard,
}

impl Gateway {
    /// Opens the listeners and starts serving.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(
        settings: Settings,
        serving: Option<Arc<dyn Serve>>,
        configured: Option<Arc<Configured>>,
    ) -> Result<Self, StartError> {
        let shared = Shared::new(&settings)?;
        Self::start_with(settings, serving, configured, shared).await
    }

    /// As [`Self::start`], with shared state that was made before.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start_with(
        settings: Settings,
        serving: Option<Arc<dyn Serve>>,
        configured: Option<Arc<Configured>>,
        shared: Shared,
    ) -> Result<Self, StartError> {
        let open = settings.admin.filter(|admin| !admin.ip().is_loopback());
        let token = settings.admin_token.as_ref();
        if let (Some(admin), None) = (open, token.filter(|token| !token.is_empty())) {
            return Err(StartError::AdminOpen(admin));
        }
        let workers = Arc::new(Workers::start(settings.workers).map_err(StartError::Threads)?);
        shared.observer.metrics().runtimes(workers.runtimes())?;
        let watching = CancellationToken::new();
        let life = Arc::clone(&shared.life);
        shared.fleet.watch(&settings.resolver, &watching, async move { life.draining().await });
        let connections = Arc::clone(&shared.connections);
        tokio::spawn(allocator_purge::follow(Arc::clone(&shared.memory), connections, watching.clone()));
        tokio::spawn(status::sample_until_stopped(shared.clone(), configured.clone(), watching.clone()));
        let discovered = shared.fleet.discover(settings.resolver.as_ref());
        // A name that does not resolve yet does not prevent the start.
        let _ = tokio::time::timeout(DISCOVERY_TIMEOUT, discovered).await;
        let tunnels = Tunnels::new(shared.life.stop.cut.clone());
        let proxy = Arc::new(Proxy::new(&settings, serving, shared.clone(), tunnels.clone()));
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
            configured: configured.clone(),
            _watching: watching.drop_guard(),
        };
        gateway.open_admin(&settings, configured).await?;
        for endpoint in settings.listen {
            let (listener, address) = bind(endpoint.address, "--listen, or `listen`,").await?;
            gateway.addresses.push(address);
            let (proxy, workers) = (Arc::clone(&proxy), Arc::clone(&workers));
            let listening = Listening {
                bounds: settings.limits.head,
                connections: Arc::clone(&gateway.shared.connections),
                tls: endpoint.tls,
                stop: gateway.shared.life.stop.clone(),
            };
            gateway.proxies.push(tokio::spawn(async move {
                listen::serve_on(&workers, listener, proxy.layered(), listening).await
            }));
        }
        gateway.shared.life.listening();
        Ok(gateway)
    }

    async fn open_admin(
        &mut self,
        settings: &Settings,
        configured: Option<Arc<Configured>>,
    ) -> Result<(), StartError> {
        let guard = Guard { token: settings.admin_token.clone(), hosts: settings.admin_hosts.clone() };
        let admin = Arc::new(Admin::new(self.shared.clone(), configured, guard));
        if let Some(address) = settings.admin {
            let (listener, address) = bind(address, "--admin, or `admin.address`,").await?;
            self.admin = Some(address);
            let admin = Arc::clone(&admin);
            let app = Arc::clone(&admin).layered();
            self.admins.push(tokio::spawn(listen::serve(listener, app, self.for_operators())));
        }
        if let Some(address) = settings.metrics {
            let (listener, address) = bind(address, "`metrics.address`").await?;
            self.metrics = Some(address);
            let app = service_fn(move |request| std::future::ready(Ok(admin.answer_metrics(&request))));
            self.admins.push(tokio::spawn(listen::serve(listener, app, self.for_operators())));
        }
        Ok(())
    }

    fn for_operators(&self) -> Listening {
        let bounds = Bounds { header_timeout: OPERATORS_HEAD, ..Bounds::default() };
        Listening::new(bounds, Connections::new(OPERATORS), self.admin_stop.clone())
    }

    /// Serves until [`foretell_net::http::drain::Lifecycle::drain`] is called, then stops step by step.
    pub async fn ended(self) -> Ended {
        let life = Arc::clone(&self.shared.life);
        let connections = Arc::clone(&self.shared.connections);
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
        let (cut, ()) = tokio::join!(all, life.steps(self.times, connections.none(), done.cancelled()));
        life.set_empty();
        // The admin listener stops after the proxy, so that `drain?wait=1` is still answered.
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

    /// Serves until a signal arrives. The first starts draining; one that comes at least
    /// [`SAME_WISH`] later stops at once. `SIGINT` skips the delay in which load balancers would
    /// notice. The service manager is notified of reloads by `SIGHUP` and of draining.
    pub async fn until(self, mut signals: Signals, manager: Arc<Manager>) -> Ended {
        let life = Arc::clone(&self.shared.life);
        let (configured, shared) = (self.configured.clone(), self.shared.clone());
        let draining = async {
            life.draining().await;
            manager.stopping();
        };
        let ended = async { tokio::join!(self.ended(), draining).0 };
        tokio::pin!(ended);
        let mut first = None;
        loop {
            let wish = tokio::select! {
                ended = &mut ended => return ended,
                wish = signals.wish() => wish,
            };
            if wish == Wish::Reload {
                tracing::info!("SIGHUP: policies and config file are reloaded");
                manager.reloading();
                let (configured, shared) = (configured.clone(), shared.clone());
                let manager = Arc::clone(&manager);
                tokio::task::spawn_blocking(move || {
                    // The outcome is logged and counted by `reload`.
                    let outcome =
                        configured.and_then(|configured| configured.reload(ReloadSource::Operator, &shared));
                    if !shared.life.is_draining() {
                        manager.reloaded(&status(outcome));
                    }
                });
                continue;
            }
            let begun = *first.get_or_insert_with(Instant::now);
            if begun.elapsed() >= SAME_WISH {
                return Ended::AtOnce;
            }
            if wish == Wish::Interrupt {
                life.hurry();
            }
            if !life.is_draining() {
                tracing::info!(signal = ?wish, "draining, after a signal; a second signal after {SAME_WISH:?} ends at once");
                life.drain();
            }
        }
    }
}

/// The outcome of a reload, in one line.
fn status(outcome: Option<Result<Value, Vec<Problem>>>) -> String {
    match outcome {
        None => "nothing to reload".to_owned(),
        Some(Ok(_)) => "reloaded".to_owned(),
        Some(Err(problems)) => {
            let others = problems.len().saturating_sub(1);
            let more = if others > 0 { format!(" (and {others} more)") } else { String::new() };
            let first = problems.first().map(ToString::to_string).unwrap_or_default();
            format!("reload refused, what was in force stays: {first}{more}")
        }
    }
}

/// Listens on the address that a setting names; returns the local address as well, for port 0.
async fn bind(address: SocketAddr, setting: &'static str) -> Result<(TcpListener, SocketAddr), StartError> {
    let refused = |error| StartError::Listen { address, setting, error };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    Ok((listener, address))
}
