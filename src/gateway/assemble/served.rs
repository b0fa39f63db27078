//! Models that are served in this process: a backend without a server of its own.

use crate::config::process::ServedModel;
use crate::fleet::Local;

/// A model that a backend names cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("model `{path}`: {detail}")]
pub struct ServedError {
    /// Its folder.
    pub path: String,
    /// What is wrong.
    pub detail: String,
}

/// How a model in this process is called where others have an address.
pub fn url(model: &ServedModel) -> String {
    format!("onnx:{}", model.path.display())
}

/// Opens the model and starts its thread.
///
/// # Errors
/// It cannot be run.
pub fn local(model: &ServedModel) -> Result<Local, ServedError> {
    runtime::local(model).map_err(|detail| ServedError { path: model.path.display().to_string(), detail })
}

#[cfg(feature = "onnx")]
mod runtime {
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::{Local, ServedModel};
    use crate::target::open::open_as;

    pub(super) fn local(model: &ServedModel) -> Result<Local, String> {
        let opened = open_as(model).map_err(|error| error.to_string())?;
        tracing::info!(name = opened.name, device = opened.device, "model runs in this process");
        let app = Arc::new(opened.app);
        Ok(Local::new(move |request| Arc::clone(&app).answer(request).boxed()))
    }
}

#[cfg(not(feature = "onnx"))]
mod runtime {
    use super::{Local, ServedModel};

    pub(super) fn local(_: &ServedModel) -> Result<Local, String> {
        Err("this build has no ONNX runtime (feature `onnx`)".to_owned())
    }
}
