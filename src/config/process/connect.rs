//! How connections to a backend are made.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::forms::FilePath;
use foretell_policy::form::Maybe;

/// How connections to a backend are made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Connect {
    /// Its version of HTTP; http1 is the only one.
    pub http: HttpVersion,
    /// Source of the Host field.
    pub host: HostHeader,
    /// Certificates for https.
    pub tls: ClientTls,
    /// API keys.
    pub auth: Auth,
}

/// Version of HTTP of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HttpVersion {
    #[default]
    Http1,
}

/// Certificates for connections to a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("dependentRequired" = { "cert": ["key"], "key": ["cert"] }))]
pub struct ClientTls {
    /// Authorities of the server's certificate, PEM.
    #[serde(with = "Maybe::<FilePath>")]
    pub ca: Option<PathBuf>,
    /// Foretell's own certificate, PEM.
    #[serde(with = "Maybe::<FilePath>")]
    pub cert: Option<PathBuf>,
    /// Its key, PEM.
    #[serde(with = "Maybe::<FilePath>")]
    pub key: Option<PathBuf>,
}

/// API keys of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Auth {
    /// Pass on the client's own.
    pub pass: bool,
    /// File with a key that replaces the client's.
    #[serde(with = "Maybe::<FilePath>")]
    pub token_file: Option<PathBuf>,
    /// File with the key of Foretell's own calls, never used for a client's.
    // Without it these calls are signed as `token_file` says.
    #[serde(with = "Maybe::<FilePath>")]
    pub own_token_file: Option<PathBuf>,
}

impl Default for Auth {
    fn default() -> Self {
        Self { pass: true, token_file: None, own_token_file: None }
    }
}

/// Value of the `Host` header that a backend receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostHeader {
    /// The authority of the backend's own URL.
    #[default]
    Backend,
    /// The one that the client sent.
    Client,
}
