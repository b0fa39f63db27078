//! Reasons that a model cannot be opened.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::folder::NoGraph;

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
    /// An export of another tool where only an export of Foretell can be run.
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
