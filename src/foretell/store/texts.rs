//! Texts of tenants, for the corpora of all sidecars whose policies share them.
//!
//! A tenant has a stream of the new parts of its texts, sealed by the operator's key
//! (`fleet.tenant_key_file`). Its name is a keyed hash, so that the store knows neither tenants nor
//! texts. A sidecar reads the streams of the tenants that its own requests have, each from where it
//! read last. A set lists the streams, and one more stream has the purges, which every sidecar
//! carries out. An entry says which purge its sidecar had read last: a text that was written before
//! its tenant was purged is known by that, whatever clocks say.
//!
//! Anyone who can write to the store can give a stream an id in the future, behind which nothing
//! more is read, or written; all of ours come from the store's clock. Such a stream is deleted, and
//! the purges that are known here are written again.
//!
//! Keys, behind the name of the fleet and the version: `texts:ID:NAME`, `purges:ID`, `tenants:ID`,
//! `clock:ID`, where ID is a hash of the key.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::link::{Entry, Link};
use super::{Fault, FaultKind, WITHIN, millis};
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
/// Maximum time by which the store's clock may have been set back: ids that lie further in its
/// future are not its own.
const SET_BACK: u64 = 1_000;
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
    /// Streams that were found damaged, and removed, since [`Self::take_damaged`].
    damaged: Vec<String>,
}

/// Names of keys in the store.
struct Places {
    texts: String,
    purges: String,
    tenants: String,
    clock: String,
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
        let places = Places {
            texts: place("texts"),
            purges: place("purges"),
            tenants: place("tenants"),
            clock: place("clock"),
        };
        let (read, purged, own) = (HashMap::new(), HashMap::new(), own.to_owned());
        let damaged = Vec::new();
        Ok(Self { corpus, cipher, names, places, own, read, last_purge: None, purged, turn: 0, damaged })
    }

    /// The texts and purges that wait for the store, and the state of the fleet.
    pub fn exchange(&self) -> Option<&Exchange> {
        self.corpus.exchange()
    }

    /// The streams that were damaged, and were removed, since the last call.
    pub fn take_damaged(&mut self) -> Vec<String> {
        std::mem::take(&mut self.damaged)
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
        let (mut purges, mut unreadable, mut is_damaged) = (BTreeMap::new(), 0, false);
        while !is_damaged {
            link.begin();
            let (entries, damaged) = self.read_purges(link, last).await?;
            is_damaged = damaged;
            let number = entries.len();
            for (id, sealed) in entries {
                last = id;
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
        if is_damaged {
            self.renew_purges(link, &[]).await?;
        }
        if !all.is_empty() {
            self.clear(all.clone()).await?;
            if !is_first {
                self.remove(link, &all).await?;
            }
        }
        Ok(unreadable)
    }

    /// The purges of the stream behind an id, up to those in the future, and true if the stream is
    /// damaged.
    async fn read_purges(&self, link: &mut Link, last: Id) -> Result<(Vec<(Id, Vec<u8>)>, bool), Fault> {
        let stream = self.places.purges.as_str();
        let read = match link.entries(&[(stream, written(last))], PURGES).await {
            Ok(read) => read,
            // The key holds other data.
            Err(Fault { kind: FaultKind::Refused, .. }) => return Ok((Vec::new(), true)),
            Err(fault) => return Err(fault),
        };
        let entries = read.into_iter().next().map(|(_, entries)| entries).unwrap_or_default();
        self.until_future(link, entries).await
    }

    /// These entries with their ids, up to the first one in the store's future, and true if there
    /// is one.
    async fn until_future(
        &self,
        link: &mut Link,
        entries: Vec<Entry>,
    ) -> Result<(Vec<(Id, Vec<u8>)>, bool), Fault> {
        let entry = |(id, value): Entry| Ok((id_of(&id)?, value));
        let mut entries = entries.into_iter().map(entry).collect::<Result<Vec<_>, Fault>>()?;
        // The store is asked for its clock only where this one may tell that an id is none of it.
        let now = millis(unix_now());
        if entries.iter().all(|((at, _), _)| *at <= now) {
            return Ok((entries, false));
        }
        let limit = link.clock(&self.places.clock).await?.saturating_add(SET_BACK);
        let good = entries.iter().position(|((at, _), _)| *at > limit);
        entries.truncate(good.unwrap_or(entries.len()));
        Ok((entries, good.is_some()))
    }

    /// Writes the stream of purges anew: those known here, and `more`.
    async fn renew_purges(&mut self, link: &mut Link, more: &[Purge]) -> Result<(), Fault> {
        let stream = self.places.purges.clone();
        link.remove(&[&stream]).await?;
        let mut known: Vec<(Id, Purge)> =
            self.purged.iter().map(|(purge, id)| (*id, purge.clone())).collect();
        known.sort_unstable();
        let known: Vec<Purge> = known.into_iter().map(|(_, purge)| purge).collect();
        if let Some(last) = self.add_purges(link, &known).await? {
            // They have been carried out here.
            self.last_purge = Some(last);
        }
        self.add_purges(link, more).await?;
        self.damaged.push(stream);
        Ok(())
    }

    /// Adds purges to the stream; returns the id of the last one.
    async fn add_purges(&self, link: &mut Link, purges: &[Purge]) -> Result<Option<Id>, Fault> {
        let (mut last, stream) = (None, &self.places.purges);
        for purge in purges {
            let entry = sealed(&self.cipher, purge, stream)?;
            last = Some(id_of(&link.add(stream, "p", entry).await?)?);
        }
        let (mut pipe, kept) = (redis::pipe(), self.purge_kept());
        pipe.cmd("XTRIM").arg(stream).arg("MINID").arg(millis(unix_now().saturating_sub(kept)));
        pipe.cmd("PEXPIRE").arg(stream).arg(millis(kept));
        link.run(&pipe).await?;
        Ok(last)
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
    async fn push_purges(&mut self, link: &mut Link) -> Result<(), Fault> {
        let purges = self.corpus.exchange().map(Exchange::purges).unwrap_or_default();
        if purges.is_empty() {
            return Ok(());
        }
        self.remove(link, &purges).await?;
        let is_damaged = match self.add_purges(link, &purges).await {
            Ok(None) => false,
            Ok(Some((at, _))) => at > link.clock(&self.places.clock).await?.saturating_add(SET_BACK),
            // There is no id behind the last one, or the key holds other data.
            Err(Fault { kind: FaultKind::Refused, .. }) => true,
            Err(fault) => return Err(fault),
        };
        if is_damaged {
            self.renew_purges(link, &purges).await?;
        }
        if let Some(exchange) = self.corpus.exchange() {
            exchange.purged(&purges);
        }
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
            let read = match link.entries(&asked, count).await {
                // One of these keys holds other data.
                Err(Fault { kind: FaultKind::Refused, .. }) => {
                    let asked: Vec<String> = asked.into_iter().map(|(stream, _)| stream.to_owned()).collect();
                    self.remove_damaged(link, asked).await?;
                    continue;
                }
                read => read?,
            };
            for (stream, entries) in read {
                let Some((stream, keys)) = wanted.get_key_value(&stream) else { continue };
                let is_full = entries.len() == count;
                let (entries, is_damaged) = self.until_future(link, entries).await?;
                if is_damaged {
                    self.remove_damaged(link, vec![stream.clone()]).await?;
                }
                // There may be more of it.
                streams.extend((is_full && !is_damaged).then_some(stream));
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

    /// Removes streams that something else has written to.
    async fn remove_damaged(&mut self, link: &mut Link, streams: Vec<String>) -> Result<(), Fault> {
        link.remove(&streams.iter().map(String::as_str).collect::<Vec<_>>()).await?;
        self.damaged.extend(streams);
        Ok(())
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
        entries: Vec<(Id, Vec<u8>)>,
        generation: u64,
    ) -> Result<Option<usize>, Fault> {
        let (cipher, name) = (Arc::clone(&self.cipher), stream.to_owned());
        let opening = tokio::task::spawn_blocking(move || {
            let open = |(id, sealed): (Id, Vec<u8>)| (id, opened::<Text>(&cipher, &sealed, &name));
            entries.into_iter().map(open).collect::<Vec<_>>()
        });
        let entries = opening.await.map_err(|error| Fault::answer(error.to_string()))?;
        // Purges that still wait for the store count too.
        let waiting = self.corpus.exchange().map(Exchange::purges).unwrap_or_default();
        let waits = |tenant: &Purge| waiting.contains(&None) || waiting.contains(tenant);
        let (now, mut last, mut unreadable) = (millis(unix_now()), None, 0);
        let mut texts = Vec::new();
        for (id, text) in entries {
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
    async fn push_texts(&mut self, link: &mut Link) -> Result<(), Fault> {
        let Some(exchange) = self.corpus.exchange() else { return Ok(()) };
        let texts = exchange.texts();
        let Some(last) = texts.last().map(|(number, _)| *number) else { return Ok(()) };
        let number = texts.len();
        let texts: Vec<SharedText> = texts.into_iter().map(|(_, text)| text).collect();
        let name = |text: &SharedText| self.name(text.key.tenant.as_deref().unwrap_or_default());
        let streams: BTreeSet<String> = texts.iter().map(|text| self.stream(&name(text))).collect();
        let pipe = self.writing(texts).await?;
        match link.run(&pipe).await {
            // There is no id behind the last one of a stream, or a key holds other data.
            Err(Fault { kind: FaultKind::Refused, .. }) => {
                self.remove_damaged(link, streams.into_iter().collect()).await?;
                link.run(&pipe).await?;
            }
            run => run?,
        }
        if let Some(exchange) = self.corpus.exchange() {
            exchange.written(last);
        }
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
