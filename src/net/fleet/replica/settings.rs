//! Settings that a backend's replicas share.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use rustls::ClientConfig;

use crate::fleet::key::KeyFile;
use crate::fleet::models::ModelName;
use foretell_wire::openai::Api;

/// The key that a backend receives.
#[derive(Clone, Debug, Default)]
pub enum Auth {
    /// The client's `Authorization`, as it came.
    #[default]
    Pass,
    /// No `Authorization`.
    Strip,
    /// This key instead of the client's.
    Replace(Arc<KeyFile>),
}

/// Settings of a backend at one address. Settings with the same name are replicas of one backend.
#[derive(Clone, Debug)]
pub struct ReplicaSettings {
    /// The name in policies, logs and errors.
    pub name: String,
    /// `http(s)://host[:port][/base]`. A base that ends in `/v1` means the server above it, since
    /// OpenAI base URLs are written that way.
    pub url: String,
    /// The dialect as configured; `auto` until it is known.
    pub dialect: String,
    /// True if that dialect can verify drafts.
    pub speculates: bool,
    /// True if it bills per token: only clients' requests are sent to it, and one for its list of
    /// models.
    pub billed: bool,
    /// The APIs whose requests are translated to chats for it.
    pub translates: Vec<Api>,
    /// The models that it answers for.
    pub models: Vec<ModelName>,
    /// True if it takes requests for models that no backend lists.
    pub default: bool,
    /// True if the client's `Host` is passed on; otherwise (`host: backend`) the backend's
    /// authority is sent.
    pub pass_client_host: bool,
    /// The `Authorization` that it receives.
    pub auth: Auth,
    /// The key of Foretell's internal calls: recognition, health, load, probe. No call on behalf of
    /// a client carries it.
    pub internal_key: Option<Arc<KeyFile>>,
    /// Header fields of Foretell's internal calls.
    pub internal_fields: HeaderMap,
    /// TLS configuration for https addresses; `None`: the usual public authorities.
    pub tls: Option<Arc<ClientConfig>>,
    /// Interval of resolving the host, whose addresses are then replicas; `None`: the host is one
    /// replica.
    pub discover: Option<Duration>,
    /// Data-parallel ranks at each address; each has a separate KV cache, so each is a replica. 0:
    /// no ranks.
    pub ranks: u32,
    /// Maximum time to connect.
    pub connect_timeout: Duration,
    /// Maximum time that a connection is idle; shorter than the keep-alive of common servers (5 s).
    pub pool_idle: Duration,
    /// Maximum wait for an answer's first byte; `None` (the default): unlimited, as prompts can be
    /// long.
    pub first_byte: Option<Duration>,
    /// Maximum wait for a byte in the middle of an answer; `None` (the default): unlimited.
    pub idle: Option<Duration>,
    /// Number of network threads; each has a connection pool.
    pub lanes: usize,
}

impl ReplicaSettings {
    /// Defaults for all settings but name and address: passthrough only.
    #[must_use]
    pub fn new(name: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            url: url.into(),
            dialect: "auto".to_owned(),
            speculates: false,
            billed: false,
            translates: Vec::new(),
            models: Vec::new(),
            default: false,
            pass_client_host: false,
            auth: Auth::Pass,
            internal_key: None,
            internal_fields: HeaderMap::new(),
            tls: None,
            discover: None,
            ranks: 0,
            connect_timeout: Duration::from_secs(2),
            pool_idle: Duration::from_secs(3),
            first_byte: None,
            idle: None,
            lanes: 1,
        }
    }
}

/// An address that no request can be sent to.
#[derive(Debug, thiserror::Error)]
#[error("backend url `{url}`: {detail}, allowed http(s)://host[:port][/path]")]
pub struct InvalidUrl {
    /// The address as given.
    pub url: String,
    /// The fault of the address.
    pub detail: String,
}
