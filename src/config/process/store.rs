//! The store over which the sidecars of a fleet share what they measure.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::forms::{FilePath, KeyPrefix, Store};
use crate::store_url::StoreUrl;
use foretell_policy::form::{As, Maybe, Period};

/// The store of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Fleet {
    /// URL of a Redis or Valkey server; null: nothing is shared.
    #[serde(with = "Maybe::<Store>")]
    pub store: Option<StoreUrl>,
    /// Name of the fleet, the prefix of its keys.
    #[serde(with = "As::<KeyPrefix>")]
    pub key: String,
    /// Pause between two exchanges with it.
    #[serde(with = "As::<Period>")]
    pub sync: Duration,
    /// File with its password.
    // It is read at every connection.
    #[serde(with = "Maybe::<FilePath>")]
    pub password_file: Option<PathBuf>,
    /// Authorities of its certificate, PEM; null: public ones.
    #[serde(with = "Maybe::<FilePath>")]
    pub ca: Option<PathBuf>,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            store: None,
            key: "foretell".to_owned(),
            sync: Duration::from_secs(5),
            password_file: None,
            ca: None,
        }
    }
}
