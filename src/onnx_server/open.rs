//! From a model folder to a served model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::process::ServedModel;
use crate::onnx_server::hugging::FolderWords;
use crate::onnx_server::metrics::Metrics;
use crate::onnx_server::scheduler::Engine;
use crate::onnx_server::server::App;
use crate::runtime::model::{Model, OpenError, Options};
use crate::text::TextError;

/// Why a model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model does not open.
    #[error(transparent)]
    Model(#[from] OpenError),
    /// Its tokenizer does not.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Two metrics have one name.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The system gives no thread.
    #[error("no thread for the model: {0}")]
    Thread(std::io::Error),
    /// The folder's path ends in no name.
    #[error("{0} has no name that could be the model's: give one")]
    Name(PathBuf),
}

/// A model that is ready to be served.
pub struct Opened {
    /// The application that answers requests.
    pub app: App,
    /// The model id.
    pub name: String,
    /// What it runs on, and why.
    pub device: String,
}

/// Opens a model as it is to be served.
///
/// # Errors
/// Opens a model as a backend of the process file names it; see [`open`].
pub fn open_as(model: &ServedModel) -> Result<Opened, StartError> {
    let options = Options {
        device: model.device.into(),
        lanes: model.lanes as usize,
        context: model.context.map(|context| context as usize),
        threads: model.threads as usize,
        ..Options::default()
    };
    open(&model.path, model.name.clone(), &options)
}

/// Opens a model folder: `model.onnx`, `config.json`, `tokenizer.json` and the chat template. Without a name
/// the model is called like its folder.
///
/// # Errors
/// If the model or its tokenizer cannot be used.
pub fn open(folder: &Path, name: Option<String>, options: &Options) -> Result<Opened, StartError> {
    let words = FolderWords::read(folder)?;
    let own = || folder.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.or_else(own).ok_or_else(|| StartError::Name(folder.to_owned()))?;
    let model = Model::open(folder, options)?;
    let device = model.device().to_owned();
    let metrics = Arc::new(Metrics::new()?);
    let engine = Engine::start(Box::new(model), Arc::clone(&metrics)).map_err(StartError::Thread)?;
    Ok(Opened { app: App::new(name.clone(), engine, Arc::new(words), metrics), name, device })
}
