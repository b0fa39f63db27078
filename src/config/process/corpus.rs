//! Drafter models, and the texts that drafters keep.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::forms::FilePath;
use foretell_onnx::open::DeviceChoice;
use foretell_policy::form::{As, Maybe, Period, Size};

/// A model that drafts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct DrafterModel {
    /// Its folder.
    #[serde(with = "As::<FilePath>")]
    pub path: PathBuf,
    /// A tokenizer.json, or a folder with one; null: that of its folder.
    #[serde(default, with = "Maybe::<FilePath>")]
    pub tokenizer: Option<PathBuf>,
    /// Device that it runs on.
    #[serde(default)]
    pub device: DeviceChoice,
    /// Maximum concurrent sessions.
    #[serde(default = "drafter_slots")]
    #[schemars(range(min = 1, max = 4096))]
    pub slots: u32,
    /// Maximum tokens of a sequence.
    #[serde(default = "drafter_context")]
    #[schemars(range(min = 16, max = 1_048_576))]
    pub context: u32,
}

const fn drafter_slots() -> u32 {
    64
}

const fn drafter_context() -> u32 {
    2048
}

/// Limits of the corpus, the texts that drafters keep across requests.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Corpus {
    /// Maximum size; at most half of limits.memory.
    #[serde(with = "As::<Size<u64>>")]
    pub bytes: u64,
    /// Time that an unused text is kept.
    #[serde(with = "As::<Period>")]
    pub ttl: Duration,
    /// File that preserves it over restarts.
    // It has learnt costs and acceptance; `FILE.texts` in the same folder has the corpus.
    #[serde(with = "Maybe::<FilePath>")]
    pub snapshot: Option<PathBuf>,
    /// Where requests of policies with `corpus.record` are written, for `foretell train`.
    pub record: Option<Record>,
}

impl Default for Corpus {
    fn default() -> Self {
        Self { bytes: 256 << 20, ttl: Duration::from_hours(1), snapshot: None, record: None }
    }
}

/// Where requests are recorded for `foretell train`.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
pub struct Record {
    /// Folder; it is made if it does not exist.
    #[serde(with = "As::<FilePath>")]
    pub dir: PathBuf,
    /// Maximum size; the oldest texts are deleted for room.
    #[serde(default = "record_bytes", with = "As::<Size<u64>>")]
    pub max_bytes: u64,
    /// Share of the requests that are recorded.
    #[serde(default = "all")]
    #[schemars(range(min = 0, max = 1))]
    pub sample: f64,
    /// File with 64 hexadecimal digits, by which it is encrypted (AES-256-GCM).
    #[serde(default, with = "Maybe::<FilePath>")]
    pub key_file: Option<PathBuf>,
}

const fn record_bytes() -> u64 {
    1 << 30
}

const fn all() -> f64 {
    1.0
}
