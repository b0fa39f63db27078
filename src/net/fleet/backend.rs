//! The replicas of one backend, and the selection of one for a new request.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use http::Uri;
use http::uri::Scheme;
use parking_lot::Mutex;
use prometheus::HistogramVec;

use super::models::Fit;
use super::replica::{InvalidUrl, Replica, ReplicaKey, ReplicaSettings};
use crate::random::SharedSplitMix64;

#[derive(Debug)]
pub(super) struct Backend {
    /// Each address of the configuration; one with `discover` stands for the addresses that it
    /// resolves to.
    settings: Vec<ReplicaSettings>,
    replicas: ArcSwap<Vec<Arc<Replica>>>,
    /// Locked while `replicas` is changed.
    changing: Mutex<()>,
}

impl Backend {
    pub(super) fn new(settings: ReplicaSettings) -> Self {
        Self { settings: vec![settings], replicas: ArcSwap::default(), changing: Mutex::new(()) }
    }

    pub(super) fn add(&mut self, settings: ReplicaSettings) {
        self.settings.push(settings);
    }

    /// Creates the replicas of the addresses without `discover`.
    pub(super) fn open(&self, connects: &HistogramVec) -> Result<(), InvalidUrl> {
        let mut replicas: Vec<Arc<Replica>> = Vec::new();
        for settings in &self.settings {
            // Those with `discover` are built too, so that a bad address is an error at startup.
            for rank in ranks(settings) {
                let key = ReplicaKey { number: replicas.len(), address: None, rank };
                let replica = replica(settings, key, connects)?;
                if settings.discover.is_none() {
                    replicas.push(replica);
                }
            }
        }
        self.replicas.store(Arc::new(replicas));
        Ok(())
    }

    pub(super) fn name(&self) -> &str {
        self.settings.first().map_or("", |settings| &settings.name)
    }

    pub(super) fn is_default(&self) -> bool {
        self.settings.iter().any(|settings| settings.default)
    }

    /// How well its models match `model`; `None` if it does not serve it.
    pub(super) fn answers_for(&self, model: &str) -> Option<Fit> {
        let names = self.settings.iter().flat_map(|settings| &settings.models);
        names.filter_map(|name| name.fit(model)).min()
    }

    pub(super) fn replicas(&self) -> Guard<Arc<Vec<Arc<Replica>>>> {
        self.replicas.load()
    }

    pub(super) fn discoveries(&self) -> Vec<(String, Duration)> {
        let settings = self.settings.iter();
        settings.filter_map(|settings| Some((host_and_port(settings)?, settings.discover?))).collect()
    }

    /// The less busy of two replicas chosen at random from those in the best health state, except
    /// `not`.
    pub(super) fn pick(&self, rng: &SharedSplitMix64, not: Option<&Arc<Replica>>) -> Option<Arc<Replica>> {
        let replicas = self.replicas.load();
        if let ([only], None) = (replicas.as_slice(), not) {
            return Some(Arc::clone(only));
        }
        let others = || replicas.iter().filter(|replica| not.is_none_or(|not| !Arc::ptr_eq(not, replica)));
        let least = others().map(|replica| replica.health_state()).min()?;
        // States may change between counting and choosing, at the cost of a worse choice.
        let equal = || others().filter(|replica| replica.health_state() <= least);
        let count = equal().count();
        if count < 2 {
            return equal().next().or_else(|| others().next()).map(Arc::clone);
        }
        let (first, second) = rng.two(count);
        let (first, second) = (equal().nth(first)?, equal().nth(second).or_else(|| equal().next())?);
        Some(Arc::clone(less_busy(first, second)))
    }

    /// Updates to the addresses that `name` has now. Returns true if a replica was added or
    /// removed.
    pub(super) fn found(
        &self,
        name: &str,
        addresses: &BTreeSet<SocketAddr>,
        connects: &HistogramVec,
    ) -> bool {
        let _changing = self.changing.lock();
        let before = self.replicas.load();
        let mut now: Vec<Arc<Replica>> = Vec::new();
        for settings in &self.settings {
            let resolves = settings.discover.is_some() && host_and_port(settings).as_deref() == Some(name);
            let stays = |replica: &&Arc<Replica>| {
                replica.is_of(settings) && (!resolves || is_among(replica, addresses))
            };
            now.extend(before.iter().filter(stays).cloned());
        }
        let new = self.settings.iter().filter(|settings| {
            settings.discover.is_some() && host_and_port(settings).as_deref() == Some(name)
        });
        for settings in new {
            for address in addresses {
                for rank in ranks(settings) {
                    let there = |replica: &Arc<Replica>| {
                        let key = replica.key();
                        replica.is_of(settings) && key.address == Some(*address) && key.rank == rank
                    };
                    if now.iter().any(there) {
                        continue;
                    }
                    let key = ReplicaKey { number: free_number(&now), address: Some(*address), rank };
                    match replica(settings, key, connects) {
                        Ok(replica) => now.push(replica),
                        Err(error) => tracing::warn!(%error, %address, "address ignored"),
                    }
                }
            }
        }
        now.sort_by_key(|replica| replica.key().number);
        self.change(&before, now, connects)
    }

    fn change(&self, before: &[Arc<Replica>], now: Vec<Arc<Replica>>, connects: &HistogramVec) -> bool {
        let is_in =
            |all: &[Arc<Replica>], one: &Arc<Replica>| all.iter().any(|other| Arc::ptr_eq(other, one));
        let gone = before.iter().filter(|replica| !is_in(&now, replica));
        let mut changed = false;
        for replica in gone {
            tracing::info!(replica = replica.label(), url = replica.url(), "replica removed");
            if !now.iter().any(|other| other.label() == replica.label()) {
                let _ = connects.remove_label_values(&[replica.label()]);
            }
            changed = true;
        }
        for replica in now.iter().filter(|replica| !is_in(before, replica)) {
            tracing::info!(replica = replica.label(), url = replica.url(), "replica added");
            changed = true;
        }
        if changed {
            self.replicas.store(Arc::new(now));
        }
        changed
    }
}

fn replica(
    settings: &ReplicaSettings,
    key: ReplicaKey,
    connects: &HistogramVec,
) -> Result<Arc<Replica>, InvalidUrl> {
    let label = format!("{}/{}", settings.name, key.number);
    Replica::at(settings.clone(), key, connects.with_label_values(&[label])).map(Arc::new)
}

fn ranks(settings: &ReplicaSettings) -> Vec<Option<u32>> {
    match settings.ranks {
        0 => vec![None],
        ranks => (0..ranks).map(Some).collect(),
    }
}

fn is_among(replica: &Replica, addresses: &BTreeSet<SocketAddr>) -> bool {
    replica.key().address.is_some_and(|address| addresses.contains(&address))
}

/// The smallest unused number, so that labels stay few although addresses come and go.
fn free_number(replicas: &[Arc<Replica>]) -> usize {
    let taken: BTreeSet<usize> = replicas.iter().map(|replica| replica.key().number).collect();
    (0..taken.len()).find(|number| !taken.contains(number)).unwrap_or(taken.len())
}

fn host_and_port(settings: &ReplicaSettings) -> Option<String> {
    let uri: Uri = settings.url.parse().ok()?;
    let usual = if uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    Some(format!("{}:{}", uri.host()?, uri.port_u16().unwrap_or(usual)))
}

/// Compares the engines' figures where both are fresh, else Foretell's calls in flight: figures of
/// two kinds cannot be compared.
fn less_busy<'a>(first: &'a Arc<Replica>, second: &'a Arc<Replica>) -> &'a Arc<Replica> {
    let busy = match (first.engine_requests(), second.engine_requests()) {
        (Some(first), Some(second)) => (first, second),
        _ => (first.in_flight(), second.in_flight()),
    };
    if busy.1 < busy.0 { second } else { first }
}

#[cfg(test)]
mod tests;
