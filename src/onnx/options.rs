//! Settings for opening a model.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The device that the operator has configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// CUDA where it works, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA, or an error that names the missing part.
    Cuda,
}

impl DeviceChoice {
    /// Every choice with its name in files and flags.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("cpu", Self::Cpu), ("cuda", Self::Cuda)];
}

/// Settings for opening a model.
#[derive(Clone, Debug)]
pub struct Options {
    pub device: DeviceChoice,
    /// Maximum number of concurrent sequences in the cache.
    pub lanes: usize,
    /// Maximum number of tokens per sequence; `None`: the limit of the model.
    pub context: Option<usize>,
    /// Threads within one operator; 0: the number of cores.
    pub threads: usize,
    /// True if idle threads spin. A few percent faster alone, several times slower where others
    /// need the cores.
    pub spinning: bool,
    /// Prefix of a file that gets the duration and the device of every node that runs; `None`: none
    /// is written.
    pub profile: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            lanes: 16,
            context: None,
            threads: 0,
            spinning: false,
            profile: None,
        }
    }
}
