//! Opens a model folder, if this build can.

use std::path::Path;

use crate::forward::Forward;
pub use crate::open_error::{DescriptionError, DeviceError, LibraryError, OpenError};
pub use crate::options::{DeviceChoice, Options};
#[cfg(feature = "onnx")]
use crate::runtime::{
    foreign::{ForeignModel, Names},
    load,
    model::Model,
};

/// A model that is ready to run.
pub struct Opened {
    pub model: Box<dyn Forward>,
    /// The device that it runs on and the reason, in one line.
    pub device: String,
}

/// Opens a model folder: an export of Foretell (`onnx/train/export.py`), of optimum, or of the
/// model builder of onnxruntime-genai.
///
/// # Errors
/// The folder has no graph, its files are damaged or do not fit each other, its inputs are those of
/// none of these exporters, or this build has no ONNX Runtime.
#[cfg(feature = "onnx")]
pub fn open(folder: &Path, options: &Options) -> Result<Opened, OpenError> {
    let loaded = load::load(folder, options)?;
    let device = loaded.note.clone();
    let model: Box<dyn Forward> = match Names::find(folder, &loaded.session)? {
        Some(names) => Box::new(ForeignModel::of(folder, loaded, names, options)?),
        None => Box::new(Model::of(folder, loaded, options, false)?),
    };
    Ok(Opened { model, device })
}

/// Opens an export of Foretell, whose cache takes many sequences and the branches of a tree.
///
/// # Errors
/// As [`open`], and [`OpenError::Foreign`] for an export of another tool.
#[cfg(feature = "onnx")]
pub fn open_target(folder: &Path, options: &Options) -> Result<Opened, OpenError> {
    let model = Model::open(folder, options)?;
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
pub fn open_target(_: &Path, _: &Options) -> Result<Opened, OpenError> {
    Err(OpenError::NotBuilt)
}
