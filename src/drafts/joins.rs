//! The requests that the proxy has sent to engines, so that their rows can be joined to them.
//!
//! A row is joined by the request id that Foretell forwards, a part of the engine's id of the row,
//! never by its prompt: whoever sends the same prompt past the proxy must not get drafts from that
//! tenant's texts, whose timing would reveal them. An id that is in flight twice joins nothing; its
//! rows get no drafts at all if one of these requests gets none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use foretell_core::draft::{LookupSpec, Ngram, Scope, Shared, Source};
use foretell_core::units::TokenId;
use foretell_core::words::{Conditions, PlainReason, Reason};
use parking_lot::{Mutex, RwLock};

/// Takes the prompt and the output of a row that has ended.
pub type Learn = Box<dyn Fn(&[TokenId], &[TokenId]) + Send + Sync>;
/// The reason for which a gate is closed now; `None` if all are open.
pub type Closed = Box<dyn Fn() -> Option<PlainReason> + Send + Sync>;
/// Data of a request that is made where nobody waits for it.
pub type LazyShared = LazyLock<Shared, Box<dyn FnOnce() -> Shared + Send>>;
/// Takes the pace of an answer that has ended, seconds per token.
pub type Ended = Box<dyn Fn(f64) + Send + Sync>;

/// Terms on which the rows of a request get drafts.
pub struct Terms {
    /// The replica that the request was sent to, by its label.
    pub replica: String,
    /// The reason for which its rows get no drafts; `None` if they get some.
    pub plain: Option<Reason>,
    /// The lookups of its policy.
    pub lookups: Vec<LookupSpec>,
    /// Data that they read besides the row, made when its first row is indexed.
    pub shared: LazyShared,
    /// Maximum draft tokens of a row.
    pub max_draft: usize,
    /// Draft tokens that are always sent (`gamma.fixed`).
    pub forced: Option<usize>,
    /// Gates of the replica's load.
    pub closed: Closed,
    /// Takes the text of each row that has ended.
    pub learn: Learn,
    /// Takes the seconds per token after the first, once the answer has ended.
    pub ended: Ended,
}

impl Terms {
    /// Terms of a row that belongs to no request of the proxy: lookups of its text alone.
    pub fn unknown() -> Self {
        Self {
            replica: String::new(),
            plain: None,
            lookups: vec![LookupSpec::PromptLookup(Ngram::default()), LookupSpec::Suffix(Scope::Request)],
            shared: LazyShared::new(Box::new(Shared::default)),
            max_draft: usize::MAX,
            forced: None,
            closed: Box::new(|| None),
            learn: Box::new(|_, _| {}),
            ended: Box::new(|_| {}),
        }
    }

    /// Terms of the rows of a request that gets no drafts, for this reason.
    pub fn plain(replica: &str, why: impl Into<Reason>) -> Self {
        Self { replica: replica.to_owned(), plain: Some(why.into()), lookups: Vec::new(), ..Self::unknown() }
    }

    /// True if its rows may get drafts.
    pub fn drafts(&self) -> bool {
        self.plain.is_none() && !self.lookups.is_empty()
    }
}

/// One step in which draft tokens of a request were verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    pub drafter: Source,
    /// Draft tokens that the engine verified.
    pub drafted: u32,
    /// Those that it accepted.
    pub accepted: u32,
    pub conditions: Conditions,
}

/// A request of the proxy: its terms, and what its rows have done.
pub struct Joined {
    pub terms: Terms,
    rounds: Mutex<Vec<Round>>,
    rows: AtomicU32,
    emitted: AtomicU64,
}

impl fmt::Debug for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").field("replica", &self.terms.replica).finish_non_exhaustive()
    }
}

impl Joined {
    pub fn new(terms: Terms) -> Arc<Self> {
        Arc::new(Self {
            terms,
            rounds: Mutex::default(),
            rows: AtomicU32::new(0),
            emitted: AtomicU64::new(0),
        })
    }

    /// Notes that a row of it has begun.
    pub fn begun(&self) {
        self.rows.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes tokens that a row of it has emitted.
    pub fn emitted(&self, tokens: u64) {
        self.emitted.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Tokens of its output so far; `None` unless it is one row.
    pub fn tokens(&self) -> Option<u64> {
        (self.rows.load(Ordering::Relaxed) == 1).then(|| self.emitted.load(Ordering::Relaxed))
    }

    /// Notes a step in which draft tokens of it were verified.
    pub fn note(&self, round: Round) {
        self.rounds.lock().push(round);
    }

    /// Takes the rounds so far.
    pub fn take_rounds(&self) -> Vec<Round> {
        std::mem::take(&mut *self.rounds.lock())
    }
}

/// All requests in flight, by the id that was forwarded.
#[derive(Debug, Default)]
pub struct Joins {
    requests: Mutex<HashMap<String, Request>>,
    /// The connection whose rows have joined requests of a replica, by the replica's label.
    engines: RwLock<HashMap<String, u64>>,
    /// True once engines may connect.
    expected: AtomicBool,
}

/// Why a row is not joined to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unjoined {
    /// No request in flight has its id, or it may be one of several that get drafts.
    Unknown,
    /// It may be one of several requests with its id, and one of them gets no drafts.
    MayBePlain,
}

#[derive(Debug)]
struct Request {
    joined: Arc<Joined>,
    /// Requests in flight with this id.
    times: u32,
    /// One of them gets no drafts.
    any_plain: bool,
    /// The end of the engine's id that was seen first, by the number of the prompt.
    seen: HashMap<String, String>,
}

/// A request in flight; it leaves the list when this is dropped.
#[derive(Debug)]
pub struct Registered {
    joins: Arc<Joins>,
    id: String,
    pub joined: Arc<Joined>,
}

impl Registered {
    /// Forgets which engine serves its replica: it went to another one, whose engine may have taken
    /// it for one of this replica.
    pub fn moved(&self) {
        self.joins.engines.write().remove(&self.joined.terms.replica);
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut requests = self.joins.requests.lock();
        if let Entry::Occupied(mut entry) = requests.entry(std::mem::take(&mut self.id)) {
            entry.get_mut().times -= 1;
            if entry.get().times == 0 {
                entry.remove();
            }
        }
    }
}

impl Joins {
    /// Adds a request that is about to be sent with this id.
    pub fn register(self: &Arc<Self>, id: &str, terms: Terms) -> Registered {
        let joined = Joined::new(terms);
        let any_plain = !joined.terms.drafts();
        let first = || Request { joined: Arc::clone(&joined), times: 0, any_plain, seen: HashMap::new() };
        let mut requests = self.requests.lock();
        let request = requests.entry(id.to_owned()).or_insert_with(first);
        request.times += 1;
        request.any_plain |= any_plain;
        drop(requests);
        Registered { joins: Arc::clone(self), id: id.to_owned(), joined }
    }

    /// The request that a row with this engine id belongs to, and notes that this connection's
    /// engine serves its replica.
    ///
    /// # Errors
    /// The request is not known, or not certain.
    pub fn join(&self, engine_id: &str, connection: u64) -> Result<Arc<Joined>, Unjoined> {
        let joined = self.find(engine_id)?;
        let mut engines = self.engines.write();
        if engines.get(&joined.terms.replica) != Some(&connection) {
            engines.insert(joined.terms.replica.clone(), connection);
        }
        Ok(joined)
    }

    fn find(&self, engine_id: &str) -> Result<Arc<Joined>, Unjoined> {
        let mut requests = self.requests.lock();
        let Parts { id, numbered, suffix } = parts(engine_id).ok_or(Unjoined::Unknown)?;
        // A prompt of several in one request has its number after the id.
        let (id, number) = match numbered {
            Some((shorter, number)) if !requests.contains_key(id) => (shorter, number),
            _ => (id, ""),
        };
        let request = requests.get_mut(id).ok_or(Unjoined::Unknown)?;
        let first = request.seen.entry(number.to_owned()).or_insert_with(|| suffix.to_owned());
        match request.times == 1 && first == suffix {
            true => Ok(Arc::clone(&request.joined)),
            false if request.any_plain => Err(Unjoined::MayBePlain),
            false => Err(Unjoined::Unknown),
        }
    }

    /// True if an engine that asks for drafts serves this replica.
    pub fn is_injected(&self, replica: &str) -> bool {
        self.engines.read().contains_key(replica)
    }

    /// The replica that this connection's engine serves; `None` if no request has been joined yet.
    pub fn replica_of(&self, connection: u64) -> Option<String> {
        self.engines.read().iter().find(|(_, of)| **of == connection).map(|(replica, _)| replica.clone())
    }

    /// Notes that engines may connect from now on.
    pub fn expect(&self) {
        self.expected.store(true, Ordering::Relaxed);
    }

    /// True if rows may join requests, now or later: an engine may connect while a request runs.
    pub fn are_expected(&self) -> bool {
        self.expected.load(Ordering::Relaxed)
    }

    /// Forgets an engine that has disconnected.
    pub fn ended(&self, connection: u64) {
        self.engines.write().retain(|_, of| *of != connection);
    }
}

/// The parts of an engine's id of a row.
struct Parts<'a> {
    /// The id that was forwarded, or that with the number of a prompt.
    id: &'a str,
    /// The same without that number, and the number; `None` if it does not end in one.
    numbered: Option<(&'a str, &'a str)>,
    /// The end, by which the engine tells requests with the same id apart.
    suffix: &'a str,
}

/// Splits an engine's id of a row.
///
/// vLLM's are `chatcmpl-ID-SUFFIX` and `cmpl-ID-PROMPT-SUFFIX`, after `N_` where the request asks
/// for several answers (v1/engine/input_processor.py, v1/engine/parallel_sampling.py).
fn parts(engine_id: &str) -> Option<Parts<'_>> {
    let answer =
        engine_id.split_once('_').filter(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let of_request = answer.map_or(engine_id, |(_, rest)| rest);
    let (_route, rest) = of_request.split_once('-')?;
    let (id, suffix) = rest.rsplit_once('-')?;
    let numbered = id.rsplit_once('-').filter(|(_, number)| number.bytes().all(|b| b.is_ascii_digit()));
    Some(Parts { id, numbered, suffix })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        Terms { replica: "r".to_owned(), ..Terms::unknown() }
    }

    #[test]
    fn rows_are_joined_by_the_id_that_was_forwarded() {
        let joins = Arc::new(Joins::default());
        let request = joins.register("ft-1a", terms());
        assert!(!joins.is_injected("r"));
        for id in ["chatcmpl-ft-1a-0badcafe", "1_chatcmpl-ft-1a-0badcafe"] {
            let joined = joins.join(id, 7).expect(id);
            assert!(Arc::ptr_eq(&joined, &request.joined));
        }
        assert!(joins.is_injected("r"));
        assert_eq!(joins.replica_of(7).as_deref(), Some("r"));
        request.moved();
        assert!(!joins.is_injected("r"));
        for id in ["chatcmpl-ft-1b-0badcafe", "ft-1a", "", "chatcmpl-", "chatcmpl-x"] {
            assert_eq!(joins.join(id, 7).err(), Some(Unjoined::Unknown), "{id}");
        }
        joins.ended(7);
        assert!(!joins.is_injected("r"));
        drop(request);
        assert!(joins.join("chatcmpl-ft-1a-0badcafe", 7).is_err());
    }

    #[test]
    fn the_prompts_of_one_request_are_rows_of_it() {
        let joins = Arc::new(Joins::default());
        let request = joins.register("ft-2-x", terms());
        for id in ["cmpl-ft-2-x-0-11111111", "cmpl-ft-2-x-1-22222222"] {
            assert!(joins.join(id, 1).is_ok_and(|joined| Arc::ptr_eq(&joined, &request.joined)), "{id}");
        }
    }

    #[test]
    fn an_id_that_is_in_flight_twice_joins_nothing() {
        let joins = Arc::new(Joins::default());
        let first = joins.register("same", terms());
        let second = joins.register("same", terms());
        assert!(joins.join("cmpl-same-0-11111111", 1).is_err());
        drop(second);
        assert!(joins.join("cmpl-same-0-22222222", 1).is_err(), "another row has been seen");
        drop(first);
        let _third = joins.register("same", terms());
        assert!(joins.join("cmpl-same-0-33333333", 1).is_ok());
    }

    #[test]
    fn a_second_request_past_the_proxy_with_the_same_id_is_not_joined() {
        let joins = Arc::new(Joins::default());
        let _plain = joins.register("other", Terms::plain("r", PlainReason::ControlGroup));
        assert!(joins.join("chatcmpl-other-11111111", 1).is_ok());
        assert_eq!(joins.join("chatcmpl-other-22222222", 1).err(), Some(Unjoined::MayBePlain));
        let _request = joins.register("mine", terms());
        assert!(joins.join("chatcmpl-mine-11111111", 1).is_ok());
        assert!(joins.join("chatcmpl-mine-22222222", 1).is_err());
    }
}
