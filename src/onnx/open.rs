//! Opens a model folder: settings, errors, and the one place that knows if this build can.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::folder::NoGraph;
use crate::forward::Forward;

/// The device that the operator has configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where it works, else the CPU.
    #[default]
    Auto,
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
    /// Maximum number of tokens per sequence; `None`: the model's own limit.
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

/// A model that is ready to run.
pub struct Opened {
    pub model: Box<dyn Forward>,
    /// The device that it runs on and the reason, in one line.
    pub device: String,
}

/// Opens a model folder: our own export (`onnx/train/export.py`), or one by optimum or by the model
/// builder of onnxruntime-genai.
///
/// # Errors
/// The folder holds no graph, its files are damaged or do not fit each other, its inputs are those
/// of none of these exporters, or this build has no ONNX Runtime.
#[cfg(feature = "onnx")]
pub fn open(folder: &Path, options: &Options) -> Result<Opened, OpenError> {
    crate::runtime::load::open(folder, options)
}

/// Opens a folder of our own export, whose cache takes many sequences and the branches of a tree.
///
/// # Errors
/// As [`open`], and [`OpenError::Foreign`] for an export of another tool.
#[cfg(feature = "onnx")]
pub fn open_own(folder: &Path, options: &Options) -> Result<Opened, OpenError> {
    let model = crate::runtime::model::Model::open(folder, options)?;
    Ok(Opened { device: model.device().to_owned(), model: Box::new(model) })
}

/// Always [`OpenError::NotBuilt`].
///
/// # Errors
/// This build has no ONNX Runtime.
#[cfg(not(feature = "onnx"))]
pub fn open(_: &Path, _: &Options) -> Result<Opened, OpenError> {
    Err(OpenError::NotBuilt)
}

/// Always [`OpenError::NotBuilt`].
///
/// # Errors
/// This build has no ONNX Runtime.
#[cfg(not(feature = "onnx"))]
pub fn open_own(_: &Path, _: &Options) -> Result<Opened, OpenError> {
    Err(OpenError::NotBuilt)
}

/// Reason that a model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This build cannot run models.
    #[error("this build has no ONNX Runtime (feature `onnx`)")]
    NotBuilt,
    /// There is no ONNX Runtime.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The requested device is not available.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model folder cannot be used.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// The folder has no graph, or several and none is identifiable as the one to use.
    #[error("{folder}: {reason}")]
    NoGraph {
        folder: String,
        /// The names that were expected and the graphs that were found.
        reason: NoGraph,
    },
    /// An export of another tool where only our own can be run.
    #[error(
        "{path} was exported by another tool: it can be a drafter; what is served as a target has to be an \
         export of onnx/train/export.py, whose cache takes many sequences and the branches of a tree"
    )]
    Foreign { path: String },
    /// The graph cannot be used: ONNX Runtime rejects it, or its inputs and outputs are not the
    /// expected ones.
    #[error("{path}: {reason}")]
    Graph {
        path: String,
        /// The runtime's error, or the missing input or output.
        reason: String,
    },
}

/// Reason that ONNX Runtime is not available.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// `ORT_DYLIB_PATH` names a file that does not exist.
    #[error("ORT_DYLIB_PATH names {0}, which does not exist")]
    Named(PathBuf),
    #[error(
        "ONNX Runtime was not found; `make` fetches it, or set ORT_DYLIB_PATH; searched:{}",
        list(searched)
    )]
    Missing { searched: Vec<PathBuf> },
    /// A file was found that is not ONNX Runtime of a compatible version.
    #[error("{path} cannot be used as ONNX Runtime: {reason}")]
    Unfit {
        path: PathBuf,
        /// The loader's error.
        reason: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().fold(String::new(), |mut text, path| {
        let _ = write!(text, "\n  {}", path.display());
        text
    })
}

/// CUDA was configured and is not available.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This ONNX Runtime was built without CUDA.
    #[error("{0} is built without CUDA: point ORT_DYLIB_PATH at the library of onnxruntime-gpu")]
    NotBuiltIn(String),
    /// ONNX Runtime was built with CUDA, but CUDA cannot be started.
    #[error("CUDA does not start: {0}")]
    NotStarted(String),
}

/// A model folder that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// A file is missing or cannot be read.
    #[error("{path}: {error}")]
    Unreadable {
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A file is not JSON, or a member is missing or wrong.
    #[error("{path}: {error}")]
    Invalid {
        path: PathBuf,
        /// The parser's error.
        error: serde_json::Error,
    },
}
