//! Opens a model folder for serving.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::process::ServedModel;
use crate::onnx_server::hugging::FolderWords;
use crate::onnx_server::metrics::Metrics;
use crate::onnx_server::scheduler::Engine;
use crate::onnx_server::server::App;
use crate::runtime::forward::Forward;
use crate::runtime::model::{Model, OpenError, Options};
use crate::runtime::pace::{Pace, Paced};
use crate::text::TextError;

/// Reason that a model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model cannot be opened.
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

/// Opens a model as a backend of the process file describes it, with emulated run times if a pace
/// is given.
///
/// # Errors
/// See [`open`].
pub fn open_as(model: &ServedModel, pace: Option<Pace>) -> Result<Opened, StartError> {
    let options = Options {
        device: model.device.into(),
        lanes: model.lanes as usize,
        context: model.context.map(|context| context as usize),
        threads: model.threads as usize,
        ..Options::default()
    };
    open_at(&model.path, model.name.clone(), &options, pace)
}

/// Opens a model folder: `model.onnx`, `config.json`, `tokenizer.json` and the chat template.
/// Without `name` the model id is the folder's name.
///
/// # Errors
/// The model or its tokenizer cannot be used.
pub fn open(folder: &Path, name: Option<String>, options: &Options) -> Result<Opened, StartError> {
    open_at(folder, name, options, None)
}

fn open_at(
    folder: &Path,
    name: Option<String>,
    options: &Options,
    pace: Option<Pace>,
) -> Result<Opened, StartError> {
    let words = FolderWords::read(folder)?;
    let own = || folder.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.or_else(own).ok_or_else(|| StartError::Name(folder.to_owned()))?;
    let model = Model::open(folder, options)?;
    let device = model.device().to_owned();
    let metrics = Arc::new(Metrics::new()?);
    let model: Box<dyn Forward> = match pace {
        Some(pace) => Box::new(Paced::new(Box::new(model), pace)),
        None => Box::new(model),
    };
    let engine = Engine::start(model, Arc::clone(&metrics)).map_err(StartError::Thread)?;
    Ok(Opened { app: App::new(name.clone(), engine, Arc::new(words), metrics), name, device })
}
