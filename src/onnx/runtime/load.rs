//! Loads the graph of a model folder of any exporter.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::thread;

use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use super::device::{self, Chosen, Device};
use super::library;
use crate::folder;
use crate::open_error::OpenError;
use crate::options::{DeviceChoice, Options};

/// A loaded graph and its device.
pub(crate) struct Loaded {
    pub path: PathBuf,
    /// The graph, ready to run.
    pub session: Session,
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

pub(crate) fn load(folder: &Path, options: &Options) -> Result<Loaded, OpenError> {
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
    let builder = match &options.profile {
        Some(prefix) => builder.with_profiling(prefix)?,
        None => builder,
    };
    Ok(builder
        .with_intra_threads(threads)?
        .with_inter_threads(1)?
        .with_intra_op_spinning(options.spinning)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_log_level(LogLevel::Error)?)
}
