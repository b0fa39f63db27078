//! Opens a model folder of any exporter: finds the graph, loads it, and selects the model that runs
//! it by the names of its inputs.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::thread;

use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use super::description::DescriptionError;
use super::device::{self, Chosen, Device, DeviceChoice, DeviceError};
use super::folder::{self, NoGraph};
use super::foreign::{ForeignModel, Names};
use super::forward::Forward;
use super::library::{self, LibraryError};
use super::model::Model;

/// Settings for opening a model.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device that runs it.
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
}

impl Default for Options {
    fn default() -> Self {
        Self { device: DeviceChoice::Auto, lanes: 16, context: None, threads: 0, spinning: false }
    }
}

/// Reason that a model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
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
        /// Path of the folder.
        folder: String,
        /// The names that were expected and the graphs that were found.
        reason: NoGraph,
    },
    /// An export of another tool where only our own can be run.
    #[error(
        "{path} was exported by another tool: it can be a drafter; what is served as a target has to be an \
         export of onnx/train/export.py, whose cache takes many sequences and the branches of a tree"
    )]
    Foreign {
        /// Path of the file.
        path: String,
    },
    /// The graph cannot be used: ONNX Runtime rejects it, or its inputs and outputs are not the
    /// expected ones.
    #[error("{path}: {reason}")]
    Graph {
        /// Path of the file.
        path: String,
        /// The runtime's error, or the missing input or output.
        reason: String,
    },
}

/// A loaded graph and its device.
pub(super) struct Loaded {
    /// Path of the graph.
    pub path: PathBuf,
    /// The graph, ready to run.
    pub session: Session,
    /// Device that it runs on.
    pub device: Device,
    /// The device and the reason for it, in one line.
    pub note: String,
}

impl Loaded {
    /// An error: this graph cannot be used.
    pub fn refused(&self, reason: impl Display) -> OpenError {
        refused(&self.path, reason)
    }
}

fn refused(path: &Path, reason: impl Display) -> OpenError {
    OpenError::Graph { path: path.display().to_string(), reason: reason.to_string() }
}

/// Opens a model folder: our own export (`onnx/train/export.py`), or one by optimum or by the model
/// builder of onnxruntime-genai.
///
/// # Errors
/// The folder holds no graph, its files are damaged or do not fit each other, or its inputs are
/// those of none of these exporters.
pub fn open(folder: &Path, options: &Options) -> Result<Box<dyn Forward>, OpenError> {
    let loaded = load(folder, options)?;
    Ok(match Names::find(folder, &loaded.session)? {
        Some(names) => Box::new(ForeignModel::of(folder, loaded, names, options)?),
        None => Box::new(Model::of(folder, loaded, options)?),
    })
}

/// Loads the graph of a folder.
pub(super) fn load(folder: &Path, options: &Options) -> Result<Loaded, OpenError> {
    let path = folder::graph(folder)
        .map_err(|reason| OpenError::NoGraph { folder: folder.display().to_string(), reason })?;
    let chosen = builder(options.device, options)?;
    let mut builder = chosen.builder;
    let session = builder.commit_from_file(&path).map_err(|error| refused(&path, error))?;
    Ok(Loaded { path, session, device: chosen.device, note: chosen.note })
}

/// A session builder with our settings, for the requested device. One operator runs at a time:
/// these graphs have no parallel branches.
pub(super) fn builder(choice: DeviceChoice, options: &Options) -> Result<Chosen, OpenError> {
    let library = library::load()?;
    let fault = |error: &dyn Display| refused(&library.path, error);
    let builder = Session::builder(&library.environment).map_err(|error| fault(&error))?;
    let chosen = device::choose(builder, choice, &library.path)?;
    let builder = tuned(chosen.builder, options).map_err(|error| fault(&error))?;
    Ok(Chosen { builder, ..chosen })
}

fn tuned(builder: SessionBuilder, options: &Options) -> ort::Result<SessionBuilder> {
    let threads = match options.threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    Ok(builder
        .with_intra_threads(threads)?
        .with_inter_threads(1)?
        .with_intra_op_spinning(options.spinning)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_log_level(LogLevel::Error)?)
}
