//! Texts of tenants, for the corpora of all sidecars whose policies share them.
//!
//! A tenant has a stream of the new parts of its texts, sealed by the operator's key
//! (`fleet.tenant_key_file`). Its name is a keyed hash, so that the store knows neither tenants nor
//! texts. A sidecar reads the streams of the tenants that its own requests have, each from where it
//! read last. A set lists the streams, and one more stream has the purges, which every sidecar
//! carries out. An entry says which purge its sidecar had read last: a text that was written before
//! its tenant was purged is known by that, whatever clocks say.
//!
//! Keys, behind the name of the fleet and the version: `texts:ID:NAME`, `purges:ID`, `tenants:ID`,
//! where ID is a hash of the key.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::link::{Entry, Link};
use super::{Fault, WITHIN, millis};
use crate::clock::unix_now;
use crate::learning::cipher::{Cipher, KeyError, SecretKey, hexadecimal};
use crate::learning::corpus::exchange::{Exchange, LONGEST, Purge, SharedText, Wanted};
use crate::learning::corpus::{CorpusHandle, Received};
use foretell_core::units::TokenId;

/// Maximum number of texts of a tenant in the store, about.
const TEXTS: usize = 256;
/// Number of purges that is read at once.
const PURGES: usize = 1_024;
/// Minimum time that a purge is kept, for sidecars that do not run.
const PURGE_KEPT: Duration = Duration::from_hours(24);
/// Maximum number of streams that are read at once, and of their entries together: they fit into an
/// answer.
const STREAMS: usize = 32;
const ENTRIES: usize = 64;
/// Maximum size of an entry, bytes: its ids have up to 11 characters each.
const MAX_ENTRY: usize = (LONGEST + 128) * 11 + 4_096;
/// Maximum number of tenants whose streams are removed at once.
const TENANTS: usize = 65_536;
/// Time after which an exchange reads no more texts; the next one goes on.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// Id of an entry of a stream: Unix milliseconds of the store, and a number.
type Id = (u64, u64);

/// A text in a tenant's stream.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Text {
    /// Name of the sidecar that has written it.
    by: String,
    /// The last purge that this sidecar had read.
    purge: Id,
    /// Model id, and fingerprint of the vocabulary.
    model: String,
    vocabulary: String,
    ids: Vec<TokenId>,
    lead: usize,
    chain: u64,
}

/// The exchange of texts.
pub struct Texts {
    corpus: CorpusHandle,
    cipher: Arc<Cipher>,
    /// Hashes tenants to names of streams.
    names: SecretKey,
    places: Places,
    /// Name of this sidecar.
    own: String,
    /// Id of the last entry that was read of each stream.
    read: HashMap<String, Id>,
    /// The last purge that was read; `None` before the first reading.
    last_purge: Option<Id>,
    /// The last purge of each tenant, or of all.
    purged: HashMap<Purge, Id>,
    /// The streams of texts are read in turn, from this one on.
    turn: usize,
}

/// Names of keys in the store.
struct Places {
    texts: String,
    purges: String,
    tenants: String,
}

/// A number from a key that all sidecars have: they recognise known text alike.
pub fn salt(key: &SecretKey) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = key.derived("foretell chunks").hash(b"");
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

impl Texts {
    /// The exchange of the texts of this corpus, sealed by a key that all sidecars have. `prefix`:
    /// of all keys in the store; `own`: the name of this sidecar.
    ///
    /// # Errors
    /// See [`Cipher::new`].
    pub fn new(corpus: CorpusHandle, key: &SecretKey, prefix: &str, own: &str) -> Result<Self, KeyError> {
        let cipher = Arc::new(Cipher::new(&key.derived("foretell texts"))?);
        let names = key.derived("foretell tenants");
        let id = short(&key.derived("foretell key").hash(b""), 4);
        let place = |kind: &str| format!("{prefix}:{kind}:{id}");
        let places = Places { texts: place("texts"), purges: place("purges"), tenants: place("tenants") };
        let (read, purged, own) = (HashMap::new(), HashMap::new(), own.to_owned());
        Ok(Self { corpus, cipher, names, places, own, read, last_purge: None, purged, turn: 0 })
    }

    /// Carries out purges, and reads new texts. Returns the number of entries that could not be
    /// read.
    pub async fn pull(&mut self, link: &mut Link) -> Result<usize, Fault> {
        let unreadable = self.pull_purges(link).await?;
        Ok(unreadable + self.pull_texts(link).await?)
    }

    /// Writes purges, then texts.
    pub async fn push(&mut self, link: &mut Link) -> Result<(), Fault> {
        self.push_purges(link).await?;
        self.push_texts(link).await
    }

    /// Carries out the purges of the stream, this sidecar's own ones too: it may have received a
    /// text meanwhile. But for those of its first reading the streams are removed a second time, as
    /// a sidecar may have written to them before it has read the purge.
    async fn pull_purges(&mut self, link: &mut Link) -> Result<usize, Fault> {
        let kept = self.purge_kept();
        let mut last = self.last_purge.unwrap_or((millis(unix_now().saturating_sub(kept)), 0));
        let (mut purges, mut unreadable) = (BTreeMap::new(), 0);
        loop {
            link.begin();
            let read = link.entries(&[(self.places.purges.as_str(), written(last))], PURGES).await?;
            let entries = read.into_iter().next().map(|(_, entries)| entries).unwrap_or_default();
            let number = entries.len();
            for (id, sealed) in entries {
                last = id_of(&id)?;
                match opened::<Purge>(&self.cipher, &sealed, &self.places.purges) {
                    Some(purge) => drop(purges.insert(purge, last)),
                    None => unreadable += 1,
                }
            }
            if number < PURGES {
                break;
            }
        }
        let all: Vec<Purge> = purges.keys().cloned().collect();
        let is_first = self.last_purge.is_none();
        self.purged.extend(purges);
        let oldest = millis(unix_now().saturating_sub(2 * kept));
        self.purged.retain(|_, (at, _)| *at > oldest);
        self.last_purge = Some(last);
        if !all.is_empty() {
            self.clear(all.clone()).await?;
            if !is_first {
                self.remove(link, &all).await?;
            }
        }
        Ok(unreadable)
    }

    /// Clears texts, also if the exchange ends meanwhile.
    async fn clear(&self, purges: Vec<Purge>) -> Result<(), Fault> {
        let (corpus, number) = (self.corpus.clone(), purges.len());
        let cleared = tokio::task::spawn_blocking(move || corpus.clear_each(&purges)).await;
        match cleared.map_err(|error| Fault::answer(error.to_string()))? {
            Ok(texts) => tracing::info!(purges = number, texts, "texts cleared in the whole fleet"),
            Err(error) => {
                tracing::error!(purges = number, %error, "texts cleared in the whole fleet may remain here");
            }
        }
        Ok(())
    }

    /// Time that a purge is kept: until no text that was written before it is.
    fn purge_kept(&self) -> Duration {
        PURGE_KEPT.max(self.corpus.ttl() + 4 * WITHIN)
    }

    /// Removes the streams of these tenants.
    async fn remove(&self, link: &mut Link, purges: &[Purge]) -> Result<(), Fault> {
        let names = if purges.contains(&None) {
            link.begin();
            link.latest(&self.places.tenants, 0, TENANTS).await?
        } else {
            purges.iter().flatten().map(|tenant| self.name(tenant)).collect()
        };
        let mut pipe = redis::pipe();
        for name in names {
            pipe.cmd("DEL").arg(self.stream(&name));
            pipe.cmd("ZREM").arg(&self.places.tenants).arg(&name);
        }
        link.run(&pipe).await
    }

    /// Removes the streams of purged tenants, and tells all sidecars.
    async fn push_purges(&self, link: &mut Link) -> Result<(), Fault> {
        let Some(exchange) = self.corpus.exchange() else { return Ok(()) };
        let purges = exchange.purges();
        if purges.is_empty() {
            return Ok(());
        }
        self.remove(link, &purges).await?;
        let (mut pipe, stream) = (redis::pipe(), &self.places.purges);
        for purge in &purges {
            let entry = sealed(&self.cipher, purge, stream)?;
            pipe.cmd("XADD").arg(stream).arg("*").arg("p").arg(entry);
        }
        let kept = self.purge_kept();
        pipe.cmd("XTRIM").arg(stream).arg("MINID").arg(millis(unix_now().saturating_sub(kept)));
        pipe.cmd("PEXPIRE").arg(stream).arg(millis(kept));
        link.run(&pipe).await?;
        exchange.purged(&purges);
        Ok(())
    }

    /// Reads new texts of the wanted streams.
    async fn pull_texts(&mut self, link: &mut Link) -> Result<usize, Fault> {
        let begun = Instant::now();
        let wanted = self.wanted();
        self.read.retain(|stream, _| wanted.contains_key(stream));
        let mut streams: Vec<&String> = wanted.keys().collect();
        if streams.is_empty() {
            return Ok(0);
        }
        let turn = self.turn % streams.len();
        streams.rotate_left(turn);
        let (mut at, mut unreadable) = (0, 0);
        while let Some(some) = streams.get(at..).filter(|some| !some.is_empty()) {
            if begun.elapsed() > READ_WITHIN {
                break;
            }
            let some: Vec<&String> = some.iter().copied().take(STREAMS).collect();
            at += some.len();
            let count = (ENTRIES / some.len()).max(1);
            let generation = self.corpus.generation();
            link.begin();
            let asked: Vec<(&str, String)> =
                some.into_iter().map(|stream| (stream.as_str(), written(self.position(stream)))).collect();
            for (stream, entries) in link.entries(&asked, count).await? {
                let Some((stream, keys)) = wanted.get_key_value(&stream) else { continue };
                // There may be more of it.
                streams.extend((entries.len() == count).then_some(stream));
                let Some(missed) = self.receive(stream, keys, entries, generation).await? else {
                    // The corpus has enough to do; the next exchange goes on.
                    return Ok(unreadable);
                };
                unreadable += missed;
            }
        }
        self.turn = turn + at;
        Ok(unreadable)
    }

    /// The streams that are wanted, with the keys of their texts.
    fn wanted(&self) -> BTreeMap<String, Vec<Wanted>> {
        let mut streams: BTreeMap<String, Vec<Wanted>> = BTreeMap::new();
        for wanted in self.corpus.wanted() {
            let Some(tenant) = &wanted.key.tenant else { continue };
            streams.entry(self.stream(&self.name(tenant))).or_default().push(wanted);
        }
        streams
    }

    /// The id behind which a stream is read.
    fn position(&self, stream: &str) -> Id {
        let first = || (millis(unix_now().saturating_sub(self.corpus.ttl())), 0);
        self.read.get(stream).copied().unwrap_or_else(first)
    }

    /// Gives new texts of a stream to the corpus; returns the number of unreadable ones, `None` if
    /// the corpus does not take them now.
    async fn receive(
        &mut self,
        stream: &str,
        keys: &[Wanted],
        entries: Vec<Entry>,
        generation: u64,
    ) -> Result<Option<usize>, Fault> {
        let (cipher, name) = (Arc::clone(&self.cipher), stream.to_owned());
        let opening = tokio::task::spawn_blocking(move || {
            let open = |(id, sealed): Entry| (id, opened::<Text>(&cipher, &sealed, &name));
            entries.into_iter().map(open).collect::<Vec<_>>()
        });
        let entries = opening.await.map_err(|error| Fault::answer(error.to_string()))?;
        // Purges that still wait for the store count too.
        let waiting = self.corpus.exchange().map(Exchange::purges).unwrap_or_default();
        let waits = |tenant: &Purge| waiting.contains(&None) || waiting.contains(tenant);
        let (now, mut last, mut unreadable) = (millis(unix_now()), None, 0);
        let mut texts = Vec::new();
        for (id, text) in entries {
            let id = id_of(&id)?;
            last = Some(id);
            let Some(text) = text else {
                unreadable += 1;
                continue;
            };
            let age = Duration::from_millis(now.saturating_sub(id.0));
            if text.by == self.own || age > self.corpus.ttl() {
                continue;
            }
            let Text { purge, model, vocabulary, ids, lead, chain, .. } = text;
            let fits = |wanted: &&Wanted| *wanted.model == *model && wanted.key.vocabulary == vocabulary;
            for Wanted { key, .. } in keys.iter().filter(fits) {
                if !waits(&key.tenant) && !self.is_purged(&key.tenant, purge) {
                    texts.push(Received { key: key.clone(), ids: ids.clone(), lead, chain, age });
                }
            }
        }
        if !texts.is_empty() && !self.corpus.receive(texts, generation) {
            return Ok(None);
        }
        self.read.extend(last.map(|last| (stream.to_owned(), last)));
        Ok(Some(unreadable))
    }

    /// True if a tenant was purged after the purge that a text's sidecar had read last.
    fn is_purged(&self, tenant: &Purge, read: Id) -> bool {
        [&None, tenant].iter().any(|of| self.purged.get(of).is_some_and(|&purged| purged > read))
    }

    /// Writes the texts that wait.
    async fn push_texts(&self, link: &mut Link) -> Result<(), Fault> {
        let Some(exchange) = self.corpus.exchange() else { return Ok(()) };
        let texts = exchange.texts();
        let Some(last) = texts.last().map(|(number, _)| *number) else { return Ok(()) };
        let number = texts.len();
        let pipe = self.writing(texts.into_iter().map(|(_, text)| text).collect()).await?;
        link.run(&pipe).await?;
        exchange.written(last);
        self.corpus.sent(number);
        Ok(())
    }

    /// The commands that write texts.
    async fn writing(&self, texts: Vec<SharedText>) -> Result<redis::Pipeline, Fault> {
        let (now, kept) = (unix_now(), self.corpus.ttl());
        let named: Vec<(String, SharedText)> = texts
            .into_iter()
            .map(|text| (self.name(text.key.tenant.as_deref().unwrap_or_default()), text))
            .collect();
        let (cipher, by, purge) =
            (Arc::clone(&self.cipher), self.own.clone(), self.last_purge.unwrap_or_default());
        let (prefix, tenants) = (self.places.texts.clone(), self.places.tenants.clone());
        let sealing = tokio::task::spawn_blocking(move || {
            let (mut pipe, mut written) = (redis::pipe(), BTreeMap::new());
            for (name, text) in &named {
                let stream = format!("{prefix}:{name}");
                let SharedText { key, model, ids, lead, chain } = text;
                let (vocabulary, ids, lead, chain) = (key.vocabulary.clone(), ids.clone(), *lead, *chain);
                let text =
                    Text { by: by.clone(), purge, model: model.to_string(), vocabulary, ids, lead, chain };
                let entry = sealed(&cipher, &text, &stream)?;
                pipe.cmd("XADD").arg(&stream).arg("MAXLEN").arg("~").arg(TEXTS).arg("*").arg("t").arg(entry);
                written.insert(stream, name);
            }
            for (stream, name) in written {
                pipe.cmd("XTRIM").arg(&stream).arg("MINID").arg(millis(now.saturating_sub(kept)));
                pipe.cmd("PEXPIRE").arg(&stream).arg(millis(kept));
                pipe.cmd("ZADD").arg(&tenants).arg((now + 2 * kept).as_secs()).arg(name);
            }
            pipe.cmd("ZREMRANGEBYSCORE").arg(&tenants).arg("-inf").arg(now.as_secs());
            Ok(pipe)
        });
        sealing.await.map_err(|error| Fault::answer(error.to_string()))?
    }

    fn stream(&self, name: &str) -> String {
        format!("{}:{name}", self.places.texts)
    }

    /// The name of a tenant's stream.
    fn name(&self, tenant: &str) -> String {
        short(&self.names.hash(tenant.as_bytes()), 16)
    }
}

/// An entry as its stream holds it: it opens in no other one.
fn sealed(cipher: &Cipher, entry: &impl Serialize, stream: &str) -> Result<Vec<u8>, Fault> {
    let payload = serde_json::to_vec(entry).map_err(|error| Fault::answer(error.to_string()))?;
    cipher.seal(&payload, stream.as_bytes()).map_err(|error| Fault::answer(error.to_string()))
}

fn opened<T: for<'a> Deserialize<'a>>(cipher: &Cipher, sealed: &[u8], stream: &str) -> Option<T> {
    let sealed = Some(sealed).filter(|sealed| sealed.len() <= MAX_ENTRY)?;
    serde_json::from_slice(&cipher.open(sealed, stream.as_bytes())?).ok()
}

fn id_of(text: &str) -> Result<Id, Fault> {
    let id = text.split_once('-').and_then(|(at, number)| Some((at.parse().ok()?, number.parse().ok()?)));
    id.ok_or_else(|| Fault::answer("no id of a stream"))
}

fn written((at, number): Id) -> String {
    format!("{at}-{number}")
}

/// The first `length` bytes of a hash, as digits.
fn short(hash: &[u8], length: usize) -> String {
    hexadecimal(hash.get(..length).unwrap_or(hash))
}
