//! Models that run in this process, as a backend without a server of its own.

use crate::config::process::{Backend, Replicas, ServedModel};
use crate::fleet::{Local, ReplicaSettings};

/// A model that a backend names cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("model `{path}`: {detail}")]
pub struct ServedError {
    /// Folder of the model.
    pub path: String,
    /// The cause, as text for the operator.
    pub detail: String,
}

/// The text that stands for the address of a model in this process, `onnx:FOLDER`.
pub fn url(model: &ServedModel) -> String {
    format!("onnx:{}", model.path.display())
}

/// Opens the models of these backends and starts their threads. `settings` of their replicas
/// receive the models.
///
/// # Errors
/// The first model that cannot be run.
pub fn open(backends: &[Backend], settings: &mut [ReplicaSettings]) -> Result<(), ServedError> {
    for backend in backends {
        let Replicas::Here(model) = &backend.replicas else { continue };
        if let Some(settings) = settings.iter_mut().find(|settings| settings.name == backend.name) {
            settings.local = Some(local(model)?);
        }
    }
    Ok(())
}

fn local(model: &ServedModel) -> Result<Local, ServedError> {
    runtime::local(model).map_err(|detail| ServedError { path: model.path.display().to_string(), detail })
}

#[cfg(feature = "onnx")]
mod runtime {
    use std::panic::AssertUnwindSafe;
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::{Local, ServedModel};
    use crate::onnx_server::open::open_as;
    use crate::serving::failure::Failure;

    pub(super) fn local(model: &ServedModel) -> Result<Local, String> {
        let opened = open_as(model, None).map_err(|error| error.to_string())?;
        tracing::info!(name = opened.name, device = opened.device, "model runs in this process");
        let app = Arc::new(opened.app);
        Ok(Local::new(move |request| {
            // A panic must fail one request only, as it would in a server of its own.
            let answer = AssertUnwindSafe(Arc::clone(&app).answer(request)).catch_unwind();
            answer.map(|answer| answer.unwrap_or_else(|_| Failure::Internal.response())).boxed()
        }))
    }
}

#[cfg(not(feature = "onnx"))]
mod runtime {
    use super::{Local, ServedModel};

    pub(super) fn local(_: &ServedModel) -> Result<Local, String> {
        Err("this build has no ONNX runtime (feature `onnx`)".to_owned())
    }
}
