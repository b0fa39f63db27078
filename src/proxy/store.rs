//! The store of a fleet: a Redis or Valkey server over which sidecars share their measurements.
//!
//! Every few seconds a task reads the measurements of all other sidecars, lends their sums to the
//! engines known here ([`crate::learning::shared`]), and writes all measurements of this sidecar.
//! So an emptied store is refilled, nothing is counted twice, and requests never wait for it: if it
//! is down, slow, full or of another version, the sidecar uses its local measurements alone.
//!
//! Keys, behind the name of the fleet: `KEY:sidecars`, a sorted set of `VERSION/NAME` by the time
//! of the last write; `KEY:VERSION:sidecar:NAME`, the measurements of one sidecar;
//! `KEY:VERSION:window:PROCESS`, the start of the next plain window of an engine's process.

mod entry;
mod fault;
mod link;
mod status;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tokio::sync::oneshot;

use crate::learning::shared::Statistics;
use crate::learning::{ENGINE_START_TTL, Learnt};
use foretell_config::process::StoreUrl;
use foretell_net::clock::unix_now;
use foretell_net::http::drain::Lifecycle;

pub use fault::{Fault, FaultKind};
use link::Link;
pub use status::{Status, collector};

/// Version of the measurements' form: sidecars of another one share nothing with these.
const SCHEMA: u32 = 2;
/// Maximum duration of an exchange, enough for a slow store that takes a second for each of its six
/// answers.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of sidecars whose measurements are read, the latest ones.
const SIDECARS: usize = 256;

/// Address of the store, and access to it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its address, and the login if it is in the URL.
    pub url: StoreUrl,
    /// Name of the fleet, the prefix of all keys.
    pub key: String,
    /// Pause between two exchanges.
    pub every: Duration,
    /// File with the password.
    pub password_file: Option<PathBuf>,
    /// Requirements on its certificate; `None` without TLS.
    pub tls: Option<Arc<ClientConfig>>,
}

/// The task that exchanges measurements with the store.
pub struct Store {
    settings: Settings,
    learnt: Arc<Learnt>,
    status: Arc<Status>,
    /// The connection; `None` before the first and after a fault.
    link: Option<Link>,
}

impl Store {
    /// The task for a sidecar with these measurements. It connects when it runs.
    pub fn new(settings: Settings, learnt: Arc<Learnt>) -> Self {
        let status = Arc::new(Status::new(settings.url.to_string()));
        Self { settings, learnt, status, link: None }
    }

    /// Its state, for metrics.
    pub fn status(&self) -> Arc<Status> {
        Arc::clone(&self.status)
    }

    /// Exchanges measurements in intervals until the process drains, once more then, and when its
    /// last request has ended. `first` is dropped after the first exchange, also a failed one.
    pub async fn exchange_until_drained(mut self, life: Arc<Lifecycle>, first: oneshot::Sender<()>) {
        let (mut first, mut draining, mut last) = (Some(first), false, false);
        loop {
            let outcome = tokio::time::timeout(TIMEOUT, self.exchange()).await;
            let outcome = outcome.unwrap_or_else(|_| Err(Fault::timeout(TIMEOUT)));
            if outcome.is_err() {
                self.link = None;
            }
            self.status.exchanged(&outcome);
            drop(first.take());
            if last {
                return;
            }
            if draining {
                life.emptied().await;
                last = true;
            } else {
                draining = self.pause(&life).await;
            }
        }
    }

    /// Waits for the next exchange. True if the process drains.
    async fn pause(&self, life: &Lifecycle) -> bool {
        tokio::select! {
            () = life.draining() => true,
            () = tokio::time::sleep(self.settings.every) => false,
        }
    }

    /// Reads all that is new, then writes: a store that is full can still be read.
    async fn exchange(&mut self) -> Result<(), Fault> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => Link::open(&self.settings).await?,
        };
        link.begin();
        self.pull(&mut link).await?;
        self.push(&mut link).await?;
        self.link = Some(link);
        Ok(())
    }

    async fn pull(&self, link: &mut Link) -> Result<(), Fault> {
        let since = unix_now().saturating_sub(ENGINE_START_TTL).as_secs();
        let members = link.latest(&self.index(), since, SIDECARS).await?;
        let (version, local) = (format!("{SCHEMA}/"), member(self.learnt.name()));
        let former = self.learnt.former().map(|name| member(&name));
        let others = members.iter().filter(|&member| *member != local && Some(member) != former.as_ref());
        let (same, strangers): (Vec<&str>, Vec<&str>) =
            others.map(String::as_str).partition(|member| member.starts_with(version.as_str()));
        let sidecars = same.iter().filter_map(|member| member.strip_prefix(version.as_str()));
        let keys: Vec<String> = sidecars.map(|id| self.key_of("sidecar", id)).collect();
        let values = link.values(&keys).await?;
        let (learnt, now) = (Arc::clone(&self.learnt), unix_now().as_secs());
        let lent = tokio::task::spawn_blocking(move || lend(&learnt, values, now)).await;
        let Lent { sidecars, unreadable } = lent.map_err(|error| Fault::answer(error.to_string()))?;
        self.status.pulled(sidecars, strangers.len(), unreadable);
        Ok(())
    }

    async fn push(&self, link: &mut Link) -> Result<(), Fault> {
        let learnt = Arc::clone(&self.learnt);
        let local =
            tokio::task::spawn_blocking(move || entry::encode(learnt.local(), unix_now().as_secs())).await;
        let local = local.map_err(|error| Fault::answer(error.to_string()))?;
        let Some(local) = local.map_err(|error| Fault::answer(error.to_string()))? else { return Ok(()) };
        let name = self.learnt.name();
        link.put(&self.key_of("sidecar", name), local, ENGINE_START_TTL).await?;
        link.note(&self.index(), &member(name), unix_now().as_secs(), ENGINE_START_TTL).await?;
        if let Some(former) = self.learnt.former() {
            link.forget(&self.key_of("sidecar", &former), &self.index(), &member(&former)).await?;
            self.learnt.forget_former();
        }
        Ok(())
    }

    fn index(&self) -> String {
        format!("{}:sidecars", self.settings.key)
    }

    fn key_of(&self, kind: &str, name: &str) -> String {
        format!("{}:{SCHEMA}:{kind}:{name}", self.settings.key)
    }
}

/// A sidecar in the index.
fn member(name: &str) -> String {
    format!("{SCHEMA}/{name}")
}

/// Result of reading entries.
struct Lent {
    /// Sidecars whose measurements were lent.
    sidecars: usize,
    /// Entries that could not be read.
    unreadable: usize,
}

/// Lends the sum of these entries to all engines.
fn lend(learnt: &Learnt, entries: Vec<Option<Vec<u8>>>, now: u64) -> Lent {
    let (mut sum, mut lent) = (Statistics::default(), Lent { sidecars: 0, unreadable: 0 });
    for entry in entries.into_iter().flatten() {
        match entry::decode(&entry, now) {
            Some(statistics) => {
                sum.add(&statistics);
                lent.sidecars += 1;
            }
            None => lent.unreadable += 1,
        }
    }
    learnt.lend(sum);
    lent
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
