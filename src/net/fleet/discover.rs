//! Replicas behind a host name: it is resolved at an interval, and replicas are added and removed.
//!
//! A removed replica gets no new requests; it exists until its requests end.
//! A failed lookup, or one without addresses, changes nothing: a failing name server must not
//! remove working replicas.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::Fleet;

pub type Resolving = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;

pub trait Resolve: fmt::Debug + Send + Sync {
    /// Every address of `name`, in the form `HOST:PORT`.
    fn resolve(&self, name: &str) -> Resolving;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: &str) -> Resolving {
        let name = name.to_owned();
        Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
    }
}

/// Longest interval between two lookups of a name without an address: its requests fail, and a name
/// server that has just started gets no more queries than from any other client.
const UNKNOWN_EVERY: Duration = Duration::from_secs(1);

impl Fleet {
    /// Resolves every name once, all at the same time: one may take as long as the system's
    /// resolver waits for a name server.
    pub async fn discover(&self, resolver: &dyn Resolve) {
        let names = self.names_to_resolve();
        join_all(names.iter().map(|name| self.resolve(resolver, name))).await;
    }

    /// Resolves `name` every `every`, until `stop`; more often as long as it has no address.
    pub(super) async fn discovery_loop(
        self: Arc<Self>,
        resolver: Arc<dyn Resolve>,
        name: String,
        every: Duration,
        stop: CancellationToken,
    ) {
        let mut known = false;
        loop {
            let wait = if known { every } else { every.min(UNKNOWN_EVERY) };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => known |= self.resolve(resolver.as_ref(), &name).await,
            }
        }
    }

    /// Resolves `name` once; true if it has an address.
    async fn resolve(&self, resolver: &dyn Resolve, name: &str) -> bool {
        let trouble = match resolver.resolve(name).await {
            Ok(found) if found.is_empty() => Some("no address".to_owned()),
            Ok(found) => {
                self.found(name, &BTreeSet::from_iter(found));
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let known = trouble.is_none();
        // One log line per change, however often the name is resolved.
        match (trouble, self.is_unresolved(name)) {
            (Some(cause), false) => {
                tracing::warn!(name, cause, "name cannot be resolved, its replicas stay");
                self.set_unresolved(name, true);
            }
            (None, true) => {
                tracing::info!(name, "name resolves");
                self.set_unresolved(name, false);
            }
            (Some(_), true) | (None, false) => {}
        }
        known
    }
}
