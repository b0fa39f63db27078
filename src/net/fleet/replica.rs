//! One replica of a backend and its connections.
//!
//! Every network thread has a pool: a connection lives on the thread that opened it, so a request
//! that finds one there is answered without waking another thread.

mod address;
mod call;
mod settings;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Uri};
use tokio::sync::watch;

pub use settings::{Auth, InvalidUrl, ReplicaSettings};

use self::address::{Connector, address, connector, host_of};
pub(super) use self::call::Unanswered;
use super::breaker::BreakerState;
use super::error::SendErrorKind;
use super::first_calls::FirstCalls;
use super::health::{Failing, Health, HealthState, LastError};
use super::link::Pool;
use super::liveness::Look;
use super::load::{Load, ReportedLoad};
use super::models::{Fit, ModelName};
use crate::http::is_callable;
use foretell_engines::Dialect;
use foretell_wire::openai::Api;

/// The data-parallel rank of an engine that is to compute a request. vLLM and SGLang both support
/// it.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Extension of a request that must go out on a new connection.
#[derive(Clone, Copy, Debug)]
pub struct Fresh;

/// Extension of a request that its caller resends if it loses the race with a backend that closes
/// an idle connection: it may take any idle connection. Others take one only if the backend is
/// unlikely to close it.
#[derive(Clone, Copy, Debug)]
pub struct Repeatable;

/// Identifies one of a backend's replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplicaKey {
    /// The number in its label.
    pub(super) number: usize,
    /// The address, if the configured name has several.
    pub(super) address: Option<SocketAddr>,
    /// The data-parallel rank at its address.
    pub(super) rank: Option<u32>,
}

/// One replica: its address, its connections, and the knowledge about it.
pub struct Replica {
    settings: ReplicaSettings,
    key: ReplicaKey,
    label: String,
    url: String,
    address: Uri,
    connector: Connector,
    host: HeaderValue,
    /// The value of [`RANK`]; `None` where the engine has no ranks.
    rank: Option<HeaderValue>,
    /// The base path, without `/v1`.
    prefix: String,
    /// One for each network thread, and one for all other threads.
    pools: Vec<Arc<Pool>>,
    dialect: ArcSwap<String>,
    /// The engine's last known dialect, also while its requests are passed through.
    engine: ArcSwap<String>,
    speculates: AtomicBool,
    health: Arc<Health>,
    reported_load: ArcSwapOption<ReportedLoad>,
    /// Retries that the budget refused, and retries that were sent.
    retries: [AtomicU64; 2],
    /// Measurements of its verify requests, by index of the result in [`Probed::ALL`].
    probes: [AtomicU64; 3],
    connects: prometheus::Histogram,
    first_calls: Arc<FirstCalls>,
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica").field("label", &self.label).field("url", &self.url).finish_non_exhaustive()
    }
}

impl Replica {
    /// The only replica, at `settings.url`. Opens no connection.
    ///
    /// # Errors
    /// The address has no host, or a scheme other than http and https.
    pub fn new(settings: ReplicaSettings) -> Result<Self, InvalidUrl> {
        let buckets = prometheus::HistogramOpts::new("connects", "connects");
        let connects = prometheus::Histogram::with_opts(buckets);
        let connects =
            connects.map_err(|error| InvalidUrl { url: settings.url.clone(), detail: error.to_string() })?;
        Self::at(settings, ReplicaKey::default(), connects)
    }

    /// The replica `key`; `connects` records the time of each connect, seconds.
    pub(super) fn at(
        settings: ReplicaSettings,
        key: ReplicaKey,
        connects: prometheus::Histogram,
    ) -> Result<Self, InvalidUrl> {
        let invalid = |detail: &str| InvalidUrl { url: settings.url.clone(), detail: detail.to_owned() };
        let uri: Uri = settings.url.parse().map_err(|error| invalid(&format!("{error}")))?;
        let parts = uri.into_parts();
        let scheme = parts.scheme.ok_or_else(|| invalid("no scheme"))?;
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(invalid("not http or https"));
        }
        let authority = parts.authority.ok_or_else(|| invalid("no host"))?;
        if !is_callable(&authority) {
            return Err(invalid("not a port from 1 to 65535"));
        }
        if parts.path_and_query.as_ref().is_some_and(|path| path.query().is_some()) {
            return Err(invalid("has a query"));
        }
        let host = host_of(&scheme, &authority).ok_or_else(|| invalid("host cannot be a header"))?;
        let path = parts.path_and_query.as_ref().map_or("", PathAndQuery::path).trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        let connector = connector(&settings, &scheme, &authority, key)?;
        let (url, authority) = match key.address {
            None => (settings.url.clone(), authority),
            Some(address) => {
                let authority = address.to_string().parse();
                (format!("{scheme}://{address}{path}"), authority.map_err(|_| invalid("no such address"))?)
            }
        };
        let label = format!("{}/{}", settings.name, key.number);
        let health = Arc::new(Health::new(&label, &url));
        let first_calls = Arc::new(FirstCalls::new(&label));
        let pool = || Arc::new(Pool::new(settings.pool_idle, settings.idle, Arc::clone(&health)));
        Ok(Self {
            label,
            url,
            address: address(scheme, authority).map_err(|error| invalid(&error.to_string()))?,
            connector,
            host,
            rank: key.rank.map(HeaderValue::from),
            prefix,
            pools: (0..=settings.lanes).map(|_| pool()).collect(),
            dialect: ArcSwap::from_pointee(settings.dialect.clone()),
            engine: ArcSwap::from_pointee(settings.dialect.clone()),
            speculates: AtomicBool::new(settings.speculates),
            health,
            reported_load: ArcSwapOption::empty(),
            retries: Default::default(),
            probes: Default::default(),
            connects,
            key,
            first_calls,
            settings,
        })
    }

    /// The name of the backend that it is a replica of.
    pub fn backend(&self) -> &str {
        &self.settings.name
    }

    /// Its name in metrics, logs and the admin API: `backend/0`, `backend/1`, …
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Its address: as configured, or one of those behind the configured name.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its data-parallel rank, where its engine has several.
    pub fn rank(&self) -> Option<u32> {
        self.key.rank
    }

    /// True if it was made from these settings.
    pub(super) fn is_of(&self, settings: &ReplicaSettings) -> bool {
        self.settings.name == settings.name && self.settings.url == settings.url
    }

    pub(super) fn key(&self) -> ReplicaKey {
        self.key
    }

    /// The dialect's name; `auto` until it is known.
    pub fn dialect(&self) -> Arc<String> {
        self.dialect.load_full()
    }

    /// The name of the dialect that was configured or last recognised, also while its requests are
    /// passed through; `auto` until it is known.
    pub fn engine(&self) -> Arc<String> {
        self.engine.load_full()
    }

    /// Sets the recognised dialect, and whether it can verify drafts.
    pub fn set_dialect(&self, dialect: impl Into<String>, speculates: bool) {
        let dialect = Arc::new(dialect.into());
        if Dialect::named(&dialect).is_some() {
            self.engine.store(Arc::clone(&dialect));
        }
        self.dialect.store(dialect);
        self.speculates.store(speculates, Ordering::Release);
    }

    /// Counts a call that a session abandoned after a silence.
    pub fn fell_silent(&self) {
        self.health.note("a session abandoned a call: nothing was received in the middle of an answer");
        self.health.count(Failing::Call(SendErrorKind::Timeout));
    }

    /// Longest wait for a byte in the middle of an answer; `None` is unlimited.
    pub fn idle(&self) -> Option<Duration> {
        self.settings.idle
    }

    /// True if its dialect can verify drafts.
    pub fn speculates(&self) -> bool {
        self.speculates.load(Ordering::Acquire)
    }

    /// True if requests of this API are translated to chats for it.
    pub fn translates(&self, api: Api) -> bool {
        self.settings.translates.contains(&api)
    }

    /// The altered first calls to it, and whether their answers can be read.
    pub fn first_calls(&self) -> &Arc<FirstCalls> {
        &self.first_calls
    }

    /// True if it bills per token.
    pub fn is_billed(&self) -> bool {
        self.settings.billed
    }

    /// True if the last call, or health check, reached it, or there was none yet, and it is not
    /// silent.
    pub fn is_up(&self) -> bool {
        self.health.is_up()
    }

    /// True if it has answered, and no later failure indicates that it would not answer now.
    pub fn is_reachable(&self) -> bool {
        self.health.is_reachable()
    }

    pub fn last_error(&self) -> Option<LastError> {
        self.health.last_error()
    }

    pub(super) fn note_error(&self, text: &str) {
        self.health.note(text);
    }

    /// A counter that increases whenever it becomes reachable.
    pub(super) fn returns(&self) -> watch::Receiver<u64> {
        self.health.returns()
    }

    /// The current restriction on new requests.
    pub fn health_state(&self) -> HealthState {
        self.health.health_state()
    }

    /// The state of its circuit breaker.
    pub fn breaker(&self) -> BreakerState {
        self.health.state()
    }

    /// Disables or enables it. Disabled: no new requests as long as there is another replica.
    pub fn disable(&self, disabled: bool) {
        self.health.disable(disabled);
    }

    /// Number of Foretell's calls to it that are under way.
    pub fn in_flight(&self) -> usize {
        self.pools.iter().map(|pool| pool.in_flight()).sum()
    }

    /// The load that its engine reported last, however long ago; `None` before the first report.
    pub fn load(&self) -> Option<Load> {
        self.reported_load.load().as_ref().map(|reported| reported.load)
    }

    /// Stores the load that its engine reported.
    pub fn set_load(&self, load: Load) {
        self.reported_load.store(Some(Arc::new(ReportedLoad { load, ours: self.in_flight() })));
    }

    /// Drops the load: another engine may be there now.
    pub(super) fn forget_load(&self) {
        self.reported_load.store(None);
    }

    /// Requests there now by the engine's figures; `None` if those are stale.
    pub(super) fn engine_requests(&self) -> Option<usize> {
        let load = self.reported_load.load();
        load.as_ref().filter(|load| load.is_fresh()).map(|load| load.requests(self.in_flight()))
    }

    /// Records that a request is assigned to it.
    pub(super) fn chosen(&self) {
        self.health.chosen();
    }

    #[cfg(test)]
    pub(super) fn ended(&self, outcome: super::health::Outcome) {
        self.health.ended(outcome);
    }

    /// True if it refuses no connection and answers nothing.
    pub fn is_silent(&self) -> bool {
        self.health.is_silent()
    }

    /// Looks for signs of life. One that bills per token gets no questions.
    pub(super) fn look(&self) -> Look {
        if self.is_billed() { Look::Nothing } else { self.health.look() }
    }

    pub(super) fn byte_received(&self) {
        self.health.byte_received();
    }

    pub(super) fn questioned(&self, unanswered: bool) {
        self.health.questioned(unanswered);
    }

    pub(super) fn wants_check(&self) -> bool {
        self.health.wants_check()
    }

    pub(super) fn checked(&self, healthy: bool) {
        self.health.checked(healthy);
    }

    pub(super) fn retried(&self, sent: bool) {
        let [refused, resent] = &self.retries;
        (if sent { resent } else { refused }).fetch_add(1, Ordering::Relaxed);
    }

    /// Its counters, for the metrics.
    pub fn counters(&self) -> Counters {
        let [refused, resent] = &self.retries;
        Counters {
            calls: self.pools.iter().map(|pool| pool.calls()).sum(),
            retries: resent.load(Ordering::Relaxed),
            retries_refused: refused.load(Ordering::Relaxed),
            errors: self.health.errors().collect(),
            breaker_transitions: self.health.transitions().collect(),
            probes: Probed::ALL.map(|probed| {
                (probed, self.probes.get(probed as usize).map_or(0, |count| count.load(Ordering::Relaxed)))
            }),
        }
    }

    /// Counts a measurement of its verify requests.
    pub fn probed(&self, probed: Probed) {
        if let Some(count) = self.probes.get(probed as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// True if it takes requests for models that no backend lists.
    pub fn is_default(&self) -> bool {
        self.settings.default
    }

    /// How well its models match `model`; `None` if it does not serve it.
    pub fn answers_for(&self, model: &str) -> Option<Fit> {
        self.settings.models.iter().filter_map(|name| name.fit(model)).min()
    }

    /// The entry of its models that matches `model` best; `None` if none does.
    pub fn model(&self, model: &str) -> Option<&ModelName> {
        let fits = self.settings.models.iter().filter_map(|name| Some((name.fit(model)?, name)));
        fits.min_by_key(|(fit, _)| *fit).map(|(_, name)| name)
    }
}

/// Event counts of a replica.
#[derive(Clone, Debug)]
pub struct Counters {
    /// Calls, health checks included.
    pub calls: u64,
    /// Requests that got no byte from it and were resent.
    pub retries: u64,
    /// Requests that were not resent because the budget was spent.
    pub retries_refused: u64,
    /// Failures by kind.
    pub errors: Vec<(&'static str, u64)>,
    /// Changes of the breaker, by new state.
    pub breaker_transitions: Vec<(BreakerState, u64)>,
    /// Completed measurements of its verify requests, by result.
    pub probes: [(Probed, u64); 3],
}

/// Result of a measurement of a replica's verify requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    /// Speculation pays there with a good enough draft.
    Pays,
    /// Nothing pays there.
    PaysNot,
    /// Several engines answer at its address.
    SeveralEngines,
}

impl Probed {
    const ALL: [Self; 3] = [Self::Pays, Self::PaysNot, Self::SeveralEngines];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pays => "pays",
            Self::PaysNot => "pays_not",
            Self::SeveralEngines => "several_engines",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, path: &str) -> String {
        let backend = Replica::new(ReplicaSettings::new("b", url)).unwrap();
        backend.target(&path.parse().unwrap()).unwrap().to_string()
    }

    #[rstest::rstest]
    #[case("http://h:8000", "/v1/models?a=%20b", "/v1/models?a=%20b")]
    #[case("http://h:8000/", "/x", "/x")]
    #[case("http://h/v1", "/v1/models", "/v1/models")]
    #[case("https://h/base/", "/v1/models", "/base/v1/models")]
    #[case("https://h/base/v1/", "/v1/models", "/base/v1/models")]
    #[case("http://h", "http://other/p?q", "/p?q")]
    fn the_path_goes_below_the_base(#[case] url: &str, #[case] path: &str, #[case] wanted: &str) {
        assert_eq!(target(url, path), wanted);
    }

    #[rstest::rstest]
    #[case("h:8000")]
    #[case("ftp://h")]
    #[case("/path")]
    #[case("http://h/?q")]
    fn an_address_that_cannot_be_called_is_refused(#[case] url: &str) {
        assert!(Replica::new(ReplicaSettings::new("b", url)).is_err());
    }
}
