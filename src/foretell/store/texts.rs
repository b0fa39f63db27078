//! Texts of tenants, for the corpora of all sidecars whose policies share them.
//!
//! A tenant has a stream, `KEY:VERSION:texts:NAME`, of the new texts of its requests, sealed by the
//! operator's key (`fleet.tenant_key_file`); NAME is a keyed hash, so that the store knows neither
//! tenants nor texts. A sidecar reads the streams of the tenants that its own requests have, from
//! where it read last. `KEY:VERSION:tenants` lists the streams; `KEY:VERSION:purges` is a stream of
//! purges, which every sidecar carries out.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::link::Link;
use super::{Fault, millis};
use crate::clock::unix_now;
use crate::learning::cipher::{Cipher, KeyError, SecretKey};
use crate::learning::corpus::CorpusHandle;
use crate::learning::corpus::exchange::{LONGEST, Purge, SharedText};
use foretell_core::draft::corpus::Key;
use foretell_core::units::TokenId;

/// Maximum number of texts of a tenant in the store, about.
const TEXTS: usize = 256;
/// Maximum number of purges in the store, about.
const PURGES: usize = 1_024;
/// Maximum number of tenants in the store whose streams are removed at once.
const TENANTS: usize = 65_536;
/// Time that a purge is kept for sidecars that do not run.
const PURGE_KEPT: Duration = Duration::from_hours(24);
/// Maximum number of streams that are read at once, and of entries together: half of what an
/// answer may be.
const STREAMS: usize = 32;
const ENTRIES: usize = 64;
/// Maximum size of an entry, bytes: its ids have up to 11 characters each.
const MAX_ENTRY: usize = LONGEST * 11 + 4_096;
/// Time after which an exchange reads no more texts; the next one goes on.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// An entry of a tenant's stream.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// Name of the sidecar that has written it.
    by: String,
    /// When it was written, Unix milliseconds.
    at: u64,
    /// Model id, and fingerprint of the vocabulary.
    model: String,
    vocabulary: String,
    ids: Vec<TokenId>,
}

/// The exchange of texts.
pub struct Texts {
    corpus: CorpusHandle,
    /// Hashes tenants to names of streams.
    names: SecretKey,
    cipher: Cipher,
    /// Id of the last entry that was read of each stream.
    read: HashMap<String, String>,
    /// When each tenant, or all, were last purged, Unix milliseconds of the store.
    purged: HashMap<Purge, u64>,
    /// The stream of purges was read once: those that come now are new.
    has_begun: bool,
}

/// Names in the store, of one fleet and version.
pub struct Place<'a> {
    /// The prefix of all keys.
    pub prefix: String,
    /// Name of this sidecar.
    pub own: &'a str,
}

impl Place<'_> {
    fn purges(&self) -> String {
        format!("{}:purges", self.prefix)
    }

    fn tenants(&self) -> String {
        format!("{}:tenants", self.prefix)
    }

    fn texts(&self, name: &str) -> String {
        format!("{}:texts:{name}", self.prefix)
    }
}

impl Texts {
    /// The exchange of the texts of this corpus, sealed by a key that all sidecars have.
    ///
    /// # Errors
    /// See [`Cipher::new`].
    pub fn new(corpus: CorpusHandle, key: &SecretKey) -> Result<Self, KeyError> {
        let cipher = Cipher::new(&key.derived("foretell texts"))?;
        let names = key.derived("foretell tenants");
        let (read, purged) = (HashMap::new(), HashMap::new());
        Ok(Self { corpus, names, cipher, read, purged, has_begun: false })
    }

    /// Writes purges, reads those of others and new texts, and writes own ones. Returns the number
    /// of entries that could not be read.
    pub async fn exchange(&mut self, link: &mut Link, place: &Place<'_>) -> Result<usize, Fault> {
        self.push_purges(link, place).await?;
        let unreadable = self.pull(link, place).await?;
        self.push(link, place).await?;
        Ok(unreadable)
    }

    /// Removes the streams of purged tenants, and tells the other sidecars.
    async fn push_purges(&self, link: &mut Link, place: &Place<'_>) -> Result<(), Fault> {
        let Some(exchange) = self.corpus.exchange() else { return Ok(()) };
        let purges = exchange.purges();
        if purges.is_empty() {
            return Ok(());
        }
        self.remove(link, place, &purges).await?;
        let mut pipe = redis::pipe();
        let stream = place.purges();
        for tenant in &purges {
            let sealed = self.sealed(tenant, &stream)?;
            pipe.cmd("XADD").arg(&stream).arg("MAXLEN").arg("~").arg(PURGES).arg("*").arg("p").arg(sealed);
        }
        pipe.cmd("PEXPIRE").arg(&stream).arg(millis(PURGE_KEPT));
        link.run(&pipe).await?;
        exchange.purged(&purges);
        Ok(())
    }

    /// Removes the streams of these tenants.
    async fn remove(&self, link: &mut Link, place: &Place<'_>, purges: &[Purge]) -> Result<(), Fault> {
        let every = purges.contains(&None);
        let names = if every {
            link.latest(&place.tenants(), 0, TENANTS).await?
        } else {
            purges.iter().flatten().map(|tenant| self.name(tenant)).collect()
        };
        let mut pipe = redis::pipe();
        for name in names {
            pipe.cmd("DEL").arg(place.texts(&name));
            pipe.cmd("ZREM").arg(place.tenants()).arg(&name);
        }
        if pipe.is_empty() { Ok(()) } else { link.run(&pipe).await }
    }

    /// Reads purges and texts that are new.
    async fn pull(&mut self, link: &mut Link, place: &Place<'_>) -> Result<usize, Fault> {
        let begun = Instant::now();
        let wanted = self.wanted(place);
        let mut streams: Vec<String> = wanted.keys().cloned().collect();
        self.read.retain(|stream, _| wanted.contains_key(stream) || *stream == place.purges());
        let mut unreadable = 0;
        loop {
            let some = streams.split_off(streams.len().saturating_sub(STREAMS - 1));
            let count = (ENTRIES / (some.len() + 1)).max(1);
            let asked: Vec<(String, String)> = std::iter::once(place.purges())
                .chain(some)
                .map(|stream| self.position(stream, place))
                .collect();
            link.begin();
            let read = link.entries(&asked, count).await?;
            let (purges, texts): (Vec<_>, Vec<_>) =
                read.into_iter().partition(|(stream, _)| *stream == place.purges());
            for (stream, entries) in purges {
                unreadable += self.carry_out(link, place, &stream, entries).await?;
            }
            self.has_begun = true;
            for (stream, entries) in texts {
                // There may be more of it.
                streams.extend((entries.len() == count).then(|| stream.clone()));
                let Some(keys) = wanted.get(&stream) else { continue };
                unreadable += self.receive(place, &stream, keys, entries);
            }
            if streams.is_empty() || begun.elapsed() > READ_WITHIN {
                return Ok(unreadable);
            }
        }
    }

    /// The streams that are wanted, with the keys of their texts.
    fn wanted(&self, place: &Place<'_>) -> BTreeMap<String, Vec<Key>> {
        let mut wanted: BTreeMap<String, Vec<Key>> = BTreeMap::new();
        for key in self.corpus.wanted() {
            let Some(tenant) = &key.tenant else { continue };
            wanted.entry(place.texts(&self.name(tenant))).or_default().push(key);
        }
        wanted
    }

    /// A stream, and the id behind which it is read.
    fn position(&self, stream: String, place: &Place<'_>) -> (String, String) {
        let kept = if stream == place.purges() { PURGE_KEPT } else { self.corpus.ttl() };
        let first = || format!("{}-0", millis(unix_now().saturating_sub(kept)));
        let after = self.read.get(&stream).cloned().unwrap_or_else(first);
        (stream, after)
    }

    /// Carries out purges, this sidecar's own ones too: it may have received a text meanwhile.
    /// Returns the number of unreadable ones. The streams are removed a second time, as a sidecar
    /// may have written to them before it has read the purge.
    async fn carry_out(
        &mut self,
        link: &mut Link,
        place: &Place<'_>,
        stream: &str,
        entries: Vec<(String, Vec<u8>)>,
    ) -> Result<usize, Fault> {
        let (mut unreadable, mut purges) = (0, Vec::new());
        for (id, sealed) in entries {
            let purge: Option<Purge> = self.opened(&sealed, stream);
            let at = moment(&id);
            self.read.insert(stream.to_owned(), id);
            let Some(tenant) = purge else {
                unreadable += 1;
                continue;
            };
            self.purged.insert(tenant.clone(), at);
            let (corpus, of) = (self.corpus.clone(), tenant.clone());
            let cleared = tokio::task::spawn_blocking(move || corpus.clear(of.as_deref())).await;
            let cleared = cleared.map_err(|error| Fault::answer(error.to_string()))?;
            match cleared {
                Ok(texts) => tracing::info!(tenant, texts, "texts cleared in the whole fleet"),
                Err(error) => {
                    tracing::error!(tenant, %error, "texts cleared in the whole fleet may remain here")
                }
            }
            purges.push(tenant);
        }
        self.purged.retain(|_, at| millis(unix_now()).saturating_sub(*at) < millis(PURGE_KEPT));
        if self.has_begun && !purges.is_empty() {
            self.remove(link, place, &purges).await?;
        }
        Ok(unreadable)
    }

    /// Gives new texts of a stream to the corpus; returns the number of unreadable ones.
    fn receive(
        &mut self,
        place: &Place<'_>,
        stream: &str,
        keys: &[Key],
        entries: Vec<(String, Vec<u8>)>,
    ) -> usize {
        let (now, generation, mut unreadable) = (millis(unix_now()), self.corpus.generation(), 0);
        for (id, sealed) in entries {
            let entry: Option<Entry> = self.opened(&sealed, stream);
            self.read.insert(stream.to_owned(), id);
            let Some(Entry { by, at, model, vocabulary, ids }) = entry else {
                unreadable += 1;
                continue;
            };
            let age = Duration::from_millis(now.saturating_sub(at));
            if by == place.own || age > self.corpus.ttl() {
                continue;
            }
            for key in keys.iter().filter(|key| model_of(key) == model && key.vocabulary == vocabulary) {
                if self.is_purged(key, at) {
                    continue;
                }
                self.corpus.receive(key.clone(), ids.clone(), age, generation);
            }
        }
        unreadable
    }

    /// True if a text was written before its tenant was last purged.
    fn is_purged(&self, key: &Key, at: u64) -> bool {
        [&None, &key.tenant].iter().any(|of| self.purged.get(of).is_some_and(|&purged| at <= purged))
    }

    /// Writes the texts that wait.
    async fn push(&self, link: &mut Link, place: &Place<'_>) -> Result<(), Fault> {
        let texts = self.corpus.exchange().map(|exchange| exchange.take()).unwrap_or_default();
        if texts.is_empty() {
            return Ok(());
        }
        let (now, number, kept) = (unix_now(), texts.len(), self.corpus.ttl());
        let mut pipe = redis::pipe();
        let mut written: BTreeMap<String, String> = BTreeMap::new();
        for SharedText { key, ids } in texts {
            let Some(tenant) = &key.tenant else { continue };
            let name = self.name(tenant);
            let stream = place.texts(&name);
            let (by, model) = (place.own.to_owned(), model_of(&key).to_owned());
            let entry = Entry { by, at: millis(now), model, vocabulary: key.vocabulary, ids };
            let sealed = self.sealed(&entry, &stream)?;
            pipe.cmd("XADD").arg(&stream).arg("MAXLEN").arg("~").arg(TEXTS).arg("*").arg("t").arg(sealed);
            written.insert(stream, name);
        }
        let oldest = now.saturating_sub(kept);
        for (stream, name) in &written {
            pipe.cmd("XTRIM").arg(stream).arg("MINID").arg(millis(oldest));
            pipe.cmd("PEXPIRE").arg(stream).arg(millis(kept));
            pipe.cmd("ZADD").arg(place.tenants()).arg(now.as_secs()).arg(name);
        }
        pipe.cmd("ZREMRANGEBYSCORE").arg(place.tenants()).arg("-inf").arg(oldest.as_secs());
        link.run(&pipe).await?;
        self.corpus.sent(number);
        Ok(())
    }

    /// The name of a tenant's stream.
    fn name(&self, tenant: &str) -> String {
        let hash = self.names.hash(tenant.as_bytes());
        hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// An entry as its stream holds it: it opens in no other one.
    fn sealed(&self, entry: &impl Serialize, stream: &str) -> Result<Vec<u8>, Fault> {
        let payload = serde_json::to_vec(entry).map_err(|error| Fault::answer(error.to_string()))?;
        self.cipher.seal(&payload, stream.as_bytes()).map_err(|error| Fault::answer(error.to_string()))
    }

    fn opened<T: for<'a> Deserialize<'a>>(&self, sealed: &[u8], stream: &str) -> Option<T> {
        let sealed = Some(sealed).filter(|sealed| sealed.len() <= MAX_ENTRY)?;
        serde_json::from_slice(&self.cipher.open(sealed, stream.as_bytes())?).ok()
    }
}

/// The model id of a key: sidecars may have other names for a backend.
fn model_of(key: &Key) -> &str {
    key.model.split_once('/').map_or(key.model.as_str(), |(_, model)| model)
}

/// The moment of a stream's id, Unix milliseconds.
fn moment(id: &str) -> u64 {
    id.split_once('-').and_then(|(at, _)| at.parse().ok()).unwrap_or_default()
}
