//! Opens a model folder for serving.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::forward::Forward;
use crate::open::{self, OpenError, Options};
use crate::pace::{Pace, Paced};
use crate::target::hugging::FolderWords;
use crate::target::metrics::Metrics;
use crate::target::scheduler::Engine;
use crate::target::server::App;
use foretell_parsers::text::TextError;

/// Reason that a model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Model(#[from] OpenError),
    /// The tokenizer cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Two metrics have the same name.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The system cannot create a thread.
    #[error("no thread for the model: {0}")]
    Thread(std::io::Error),
    /// The folder's path does not end in a name.
    #[error("{0} has no name that could be the model's: give one")]
    Name(PathBuf),
}

/// A model that is ready to be served.
pub struct Opened {
    /// Answers requests for the model.
    pub app: App,
    /// The model id.
    pub name: String,
    /// The device that it runs on and the reason.
    pub device: String,
}

/// Opens a model folder: `model.onnx`, `config.json`, `tokenizer.json` and the chat template.
///
/// Without `name` the model id is the folder's name; with `pace` the model takes the run times of
/// another machine.
///
/// # Errors
/// The model or its tokenizer cannot be used.
pub fn open(
    folder: &Path,
    name: Option<String>,
    options: &Options,
    pace: Option<Pace>,
) -> Result<Opened, StartError> {
    let words = FolderWords::read(folder)?;
    let folder_name =
        || folder.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.or_else(folder_name).ok_or_else(|| StartError::Name(folder.to_owned()))?;
    let open::Opened { model, device } = open::open_target(folder, options)?;
    let metrics = Arc::new(Metrics::new()?);
    let model: Box<dyn Forward> = match pace {
        Some(pace) => Box::new(Paced::new(model, pace)),
        None => model,
    };
    let engine = Engine::start(model, Arc::clone(&metrics)).map_err(StartError::Thread)?;
    Ok(Opened { app: App::new(name.clone(), engine, Arc::new(words), metrics), name, device })
}
