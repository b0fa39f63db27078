//! The config file (`foretell.yaml`), validated. A setting is a field of a struct here or below:
//! its type, form, limits and meaning; its default beside it. Errors, schema and reference page
//! come from there. Rules between settings are in `rules`.

mod backend;
mod client;
mod connect;
mod corpus;
mod drafts;
pub(super) mod file;
mod model;
mod observe;
mod rules;
mod store;

use std::path::PathBuf;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::forms::{FilePath, HeaderName, Peers};
use super::values::Network;
use foretell_core::words::Mode;
use foretell_net::http::drain::DrainTimes;
use foretell_policy::form::{Each, Maybe};

pub use backend::{
    Backend, Budget, Dialect, Load, Probe, ProbeWhen, Replicas, Route, Routes, Scheme, VerifyLimits,
};
pub use client::{Admin, Limits, Listen, Metrics, ServerTls, Timeouts};
pub use connect::{Auth, ClientTls, Connect, HostHeader};
pub use corpus::{Corpus, DrafterModel, Record};
pub use drafts::{Drafts, UnknownRows};
pub use file::{Parsed, parse, parse_all, schema};
pub use model::Model;
pub use observe::{LogFormat, LogLevel, Observe};
pub use store::Fleet;

pub use super::store_url::StoreUrl;
pub use super::values::{Render, TokenizerSource};

/// The name listed for `value`; empty if it is not in the list.
pub(super) fn name_of<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, named)| *named == value).map_or("", |(name, _)| name)
}

/// The validated config file, with flags and environment variables applied.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Process {
    /// off: pass requests through. observe: pass them through, and draft in the shadow. auto:
    /// speculate where it pays.
    #[schemars(extend("hints" = {
        "shadow": "observe (shadow is a mode of policies)",
        "plain": "observe (plain is a mode of policies)",
    }))]
    pub mode: Mode,
    /// Listeners for clients, http/1.1 and h2c.
    #[schemars(length(min = 1))]
    pub listen: Vec<Listen>,
    /// The operator's listener: status page, API, metrics.
    pub admin: Admin,
    /// A listener with only /metrics, /healthz and /readyz.
    pub metrics: Metrics,
    /// Limits of requests and of their memory.
    pub limits: Limits,
    /// Maximum waits.
    pub timeouts: Timeouts,
    /// Durations of a shutdown.
    pub drain: DrainTimes,
    /// The tenant of a request.
    pub tenant: Tenant,
    /// Control by clients.
    pub client: Client,
    /// The services that requests are sent to.
    pub backends: Vec<Backend>,
    /// Models that draft, by name.
    pub drafters: IndexMap<String, DrafterModel>,
    /// Texts that drafters keep across requests.
    pub corpus: Corpus,
    /// The drafts service for engines with Foretell's plug-in.
    pub drafts: Drafts,
    /// The store over which sidecars share what they learn.
    pub fleet: Fleet,
    /// Conditions of /readyz.
    pub ready: Ready,
    /// The policy files.
    #[serde(rename = "policies")]
    pub policy_files: PolicyFiles,
    /// Log and traces.
    pub observe: Observe,
    /// Folder of the policy files.
    #[serde(skip)]
    pub policies: PathBuf,
    /// If true, a missing policy folder is an error: it was named explicitly, or it existed at the
    /// first reading.
    #[serde(skip)]
    pub policies_must_exist: bool,
    /// The [`fingerprint`](super::load::fingerprint) of the policy files as they were read with
    /// these settings; `None` if the policies do not come from files, so that there is nothing to
    /// watch.
    #[serde(skip)]
    pub policies_read: Option<u64>,
    /// The flag or variable that sets the mode, which an edit of the file then does not change;
    /// `None`: the file or the default does.
    #[serde(skip)]
    pub mode_source: Option<String>,
    /// The config file as it was read; `None` without one.
    #[serde(skip)]
    pub file: Option<ProcessFile>,
}

impl Default for Process {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            listen: vec![Listen::usual()],
            admin: Admin::default(),
            metrics: Metrics::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            drain: DrainTimes::default(),
            tenant: Tenant::default(),
            client: Client::default(),
            backends: Vec::new(),
            drafters: IndexMap::new(),
            corpus: Corpus::default(),
            drafts: Drafts::default(),
            fleet: Fleet::default(),
            ready: Ready::default(),
            policy_files: PolicyFiles::default(),
            observe: Observe::default(),
            policies: PathBuf::from("policies"),
            policies_must_exist: false,
            policies_read: None,
            mode_source: None,
            file: None,
        }
    }
}

/// A config file and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFile {
    /// Its path.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Conditions of `/readyz`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Ready {
    /// Wait until a replica of every backend can be reached.
    pub require_backend: bool,
}

/// Where the policy files are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PolicyFiles {
    /// Their folder, relative to that of this file; default: `policies` beside it.
    #[serde(with = "Maybe::<FilePath>")]
    pub dir: Option<PathBuf>,
}

/// How the tenant of a request is determined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tenant {
    /// Header that names it.
    #[serde(with = "Maybe::<HeaderName>")]
    pub header: Option<String>,
    /// Peers whose header is trusted, IP or IP/BITS.
    #[serde(with = "Each::<Peers>")]
    pub trusted_peers: Vec<Network>,
    /// Tenant without a trusted header.
    pub fallback: TenantFallback,
}

/// Tenant of a request that no trusted header names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TenantFallback {
    /// No tenant: the request shares nothing with any other.
    #[default]
    None,
    /// A hash of the `Authorization` header.
    AuthorizationHash,
}

/// Control by clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Client {
    /// Permission of the header x-foretell.
    pub control: ClientControl,
}

/// Permissions of the client header `x-foretell`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientControl {
    /// Nothing: the header is ignored.
    Off,
    /// It may reduce the limits of policy and gates, never extend them.
    #[default]
    Bounded,
}

impl Process {
    /// The config file, as problems without a line name it.
    pub fn shown_file(&self) -> String {
        let file = self.file.as_ref().map(|file| file.path.display().to_string());
        file.unwrap_or_else(|| "(no config file)".to_owned())
    }
}
