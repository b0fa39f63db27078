//! A complete Foretell in this process: a target and the proxy in front of it, over loopback HTTP
//! as in production.
//!
//! Used by the demo and the end-to-end tests.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::app::{self, AssembleError, Running, served};
use foretell_config::load::parse_policies;
use foretell_config::problem::Problem;
use foretell_config::process::{self, Process};
use foretell_net::http::listen::Stop;
use foretell_onnx::target::server::App;
use foretell_policy::PolicySet;
use foretell_proxy::serving::drafters::Drafters;

/// Reason for which it could not start.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The address is not free.
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// The configuration is invalid; one problem per line.
    #[error("{0}")]
    Configuration(String),
    /// The proxy could not start.
    #[error(transparent)]
    Proxy(#[from] AssembleError),
}

impl From<Vec<Problem>> for LocalError {
    fn from(problems: Vec<Problem>) -> Self {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        Self::Configuration(lines.join("\n"))
    }
}

/// A free port of the loopback interface.
pub const FREE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// A target that serves on a free loopback port until it is dropped.
pub struct LocalTarget {
    /// The loopback address that it listens on.
    pub address: SocketAddr,
    stop: Stop,
    _serving: JoinHandle<usize>,
}

impl LocalTarget {
    /// Serves `app` on a free loopback port.
    ///
    /// # Errors
    /// No loopback port is free.
    pub async fn start(app: App) -> Result<Self, LocalError> {
        Self::start_at(app, FREE).await
    }

    /// As [`Self::start`], at this address.
    ///
    /// # Errors
    /// The address is not free.
    pub async fn start_at(app: App, address: SocketAddr) -> Result<Self, LocalError> {
        let taken = |source| LocalError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(taken)?;
        let address = listener.local_addr().map_err(taken)?;
        let stop = Stop::default();
        let serving = tokio::spawn(served::serve(app, listener, stop.clone()));
        Ok(Self { address, stop, _serving: serving })
    }
}

impl Drop for LocalTarget {
    fn drop(&mut self) {
        self.stop.accept.cancel();
        self.stop.cut.cancel();
    }
}

/// Starts a proxy on free loopback ports. `process` and each of `policies` are the texts of files;
/// without policies the built-in one is used.
///
/// # Errors
/// The problems of the configuration, or the reason for which the proxy could not start.
pub async fn proxy(process: &str, policies: &[&str]) -> Result<Running, LocalError> {
    proxy_with(process, policies, Drafters::default()).await
}

/// As [`proxy`], with drafters that are already loaded.
///
/// # Errors
/// The problems of the configuration, or the reason for which the proxy could not start.
pub async fn proxy_with(process: &str, policies: &[&str], drafters: Drafters) -> Result<Running, LocalError> {
    proxy_at(process, policies, drafters, [FREE; 2]).await
}

/// As [`proxy_with`], for clients and operators at these two addresses.
///
/// # Errors
/// The problems of the configuration, or the reason for which the proxy could not start.
pub async fn proxy_at(
    process: &str,
    policies: &[&str],
    drafters: Drafters,
    [clients, admin]: [SocketAddr; 2],
) -> Result<Running, LocalError> {
    let mut process = process::parse("process", process)?;
    let policies = parse(policies, &process)?;
    process.listen.iter_mut().for_each(|listen| listen.address = clients);
    process.admin.address = admin;
    Ok(app::start_with(process, policies, drafters).await?)
}

fn parse(policies: &[&str], process: &Process) -> Result<PolicySet, Vec<Problem>> {
    let named = policies.iter().enumerate();
    let sources: Vec<_> = named.map(|(index, text)| (format!("policy{index}"), (*text).to_owned())).collect();
    parse_policies(&sources, process)
}
