//! A backend as the config file describes it.

use std::time::Duration;

use http::Uri;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Connect, Model, Render};
use crate::forms::{Base, HostPort, PagePath, Renderer, Text};
use foretell_core::words::VerifyMethod;
use foretell_engines::Dialect as Spoken;
use foretell_policy::form::{As, Each, Maybe, Period, Size};
use foretell_wire::openai::Api;

/// API of a backend's engine (`engine` in the file).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Dialect {
    /// Detected by requests to the server.
    #[default]
    Auto,
    /// That of this engine.
    Of(Spoken),
}

/// Every dialect with its name in files.
#[allow(clippy::indexing_slicing, reason = "evaluated by the compiler")]
const NAMES: [(&str, Dialect); Spoken::ALL.len() + 1] = {
    let mut names = [("auto", Dialect::Auto); Spoken::ALL.len() + 1];
    let mut at = 0;
    while at < Spoken::ALL.len() {
        names[at + 1] = (Spoken::ALL[at].name(), Dialect::Of(Spoken::ALL[at]));
        at += 1;
    }
    names
};

impl Dialect {
    /// The configured dialect; `None` for `auto`, where it is detected.
    pub const fn spoken(self) -> Option<Spoken> {
        match self {
            Self::Auto => None,
            Self::Of(dialect) => Some(dialect),
        }
    }

    /// Every value with its name in files.
    pub const NAMES: &'static [(&'static str, Self)] = &NAMES;

    /// Name in files, metrics and logs.
    pub fn name(self) -> &'static str {
        super::name_of(Self::NAMES, self)
    }

    /// True if the engine is this one, or not configured.
    pub fn may_be(self, dialect: Spoken) -> bool {
        self.spoken().is_none_or(|spoken| spoken == dialect)
    }
}

impl TryFrom<String> for Dialect {
    type Error = &'static str;

    fn try_from(name: String) -> Result<Self, &'static str> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, dialect)| *dialect).ok_or("unknown dialect")
    }
}

impl From<Dialect> for String {
    fn from(dialect: Dialect) -> Self {
        dialect.name().to_owned()
    }
}

impl JsonSchema for Dialect {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Dialect".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": NAMES.map(|(name, _)| name) })
    }
}

/// A service.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name", "replicas"]))]
pub struct Backend {
    /// Its name in metrics, log and policies.
    #[serde(with = "As::<Text>")]
    pub name: String,
    /// It gets requests for models that no backend lists.
    pub default: bool,
    /// API of its engine.
    #[serde(rename = "engine")]
    pub dialect: Dialect,
    /// One KV cache each.
    #[schemars(extend("allowed" = "a list of URLs or { dns, every }"))]
    pub replicas: Replicas,
    /// Data-parallel ranks at each address, each a replica; 0: none.
    #[schemars(range(min = 0, max = 1024))]
    pub ranks: u32,
    /// backend: its own pages render chats; else the URL of a `vllm launch render` for its model;
    /// null: nothing does.
    #[serde(deserialize_with = "render")]
    #[schemars(with = "Maybe<Renderer>", extend("default" = "backend"))]
    pub render: Render,
    /// APIs other than chats and completions.
    pub routes: Routes,
    /// Its models.
    pub models: Vec<Model>,
    /// Connections to it.
    pub connect: Connect,
    /// The engine's load report.
    pub load: Load,
    /// Verification methods and their limits.
    #[serde(rename = "verify")]
    pub methods: VerifyLimits,
    /// Measurement of verification costs.
    pub probe: Probe,
    /// Cost that speculation may impose on other requests.
    pub budget: Budget,
    /// It bills per token: no verify request is sent to it.
    pub billed: bool,
}

impl Default for Backend {
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            default: false,
            dialect: Dialect::default(),
            replicas: Replicas::Urls(Vec::new()),
            ranks: 0,
            render: Render::default(),
            routes: Routes::default(),
            models: Vec::new(),
            connect: Connect::default(),
            load: Load::default(),
            methods: VerifyLimits::default(),
            probe: Probe::default(),
            budget: Budget::default(),
            billed: false,
        }
    }
}

fn render<'de, D: Deserializer<'de>>(from: D) -> Result<Render, D::Error> {
    Ok(Maybe::<Renderer>::deserialize(from)?.unwrap_or(Render::Never))
}

/// The replicas of a backend; each is one KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Replicas {
    Urls(
        #[serde(with = "Each::<Base>")]
        #[schemars(length(min = 1))]
        Vec<Uri>,
    ),
    /// Addresses that a name resolves to.
    Dns {
        /// HOST:PORT.
        #[serde(rename = "dns", with = "As::<HostPort>")]
        name: String,
        /// Interval of resolving it.
        #[serde(default = "resolving", with = "As::<Period>")]
        every: Duration,
        /// Scheme of their URLs.
        // The certificate must be valid for the host name.
        #[serde(default)]
        scheme: Scheme,
    },
}

const fn resolving() -> Duration {
    Duration::from_secs(5)
}

/// Scheme of a URL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    #[default]
    Http,
    Https,
}

impl Scheme {
    /// Name in files and URLs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// Treatment of the requests of APIs other than chats and completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Routes {
    /// pass: passed through; translate: sent as chats, which are eligible.
    pub messages: Route,
    /// pass: passed through; translate: sent as chats, which are eligible.
    pub responses: Route,
}

impl Routes {
    /// The APIs whose requests are translated.
    pub fn translated(self) -> Vec<Api> {
        let all = [(Api::Messages, self.messages), (Api::Responses, self.responses)];
        all.into_iter().filter(|(_, route)| *route == Route::Translate).map(|(api, _)| api).collect()
    }
}

/// Treatment of the requests of an API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    #[default]
    Pass,
    Translate,
}

/// Path and interval of a backend's load report.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Load {
    /// A path of the backend.
    // The default `/metrics` means the usual page of its engine.
    #[serde(with = "As::<PagePath>")]
    pub url: String,
    /// Interval of reading it.
    #[serde(with = "As::<Period>")]
    pub every: Duration,
}

impl Default for Load {
    fn default() -> Self {
        Self { url: "/metrics".to_owned(), every: Duration::from_millis(500) }
    }
}

/// Methods for verifying drafts and their limits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VerifyLimits {
    /// Allowed methods; their order has no effect.
    pub allow: Vec<VerifyMethod>,
    /// True if `allow` is set in the file. A method that the operator lists is used even where its
    /// first call may crash the engine.
    #[serde(skip)]
    pub explicit: bool,
    /// Maximum context of a verify request, tokens.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub context_max: u32,
    /// Maximum size of a round's requests.
    #[serde(with = "As::<Size<u64>>")]
    pub bytes_max: u64,
}

impl Default for VerifyLimits {
    fn default() -> Self {
        let allow = vec![VerifyMethod::Score, VerifyMethod::FanOut, VerifyMethod::Tree];
        Self { allow, explicit: false, context_max: 8192, bytes_max: 2 << 20 }
    }
}

/// When a backend is probed, and the probe's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Probe {
    /// When it runs; ready: as soon as a replica is ready.
    pub when: ProbeWhen,
    /// Maximum calls.
    #[schemars(range(min = 1, max = 10_000))]
    pub calls: u32,
    /// Maximum time.
    #[serde(with = "As::<Period>")]
    pub within: Duration,
}

impl Default for Probe {
    fn default() -> Self {
        Self { when: ProbeWhen::default(), calls: 40, within: Duration::from_secs(10) }
    }
}

/// When a backend is probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProbeWhen {
    /// As soon as a replica is ready.
    #[default]
    Ready,
    /// Never automatically; the operator can start it.
    Never,
}

/// Cost that speculation may impose on other requests of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Budget {
    /// Sequences that verify requests by fan-out take while others' requests run ÷ free ones.
    #[schemars(range(min = 0, max = 1))]
    pub slots: f64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { slots: 0.10 }
    }
}
