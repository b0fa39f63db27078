//! Models that run in this process: as a backend without a server of its own, or served to others.

use std::sync::Arc;

use foretell_onnx::open::Options;
use foretell_onnx::pace::Pace;
use foretell_onnx::target::open::{Opened, StartError};
use foretell_onnx::target::server::App;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tower::ServiceBuilder;

use crate::config::process::{Backend, Replicas, ServedModel};
use crate::fleet::{Local, ReplicaSettings};
use crate::gateway::translate;
use crate::http::body::Body;
use crate::http::connections::{Connections, max_clients};
use crate::http::listen::{self, Bounds, Listening, Stop};
use crate::http::memory::Memory;
use crate::http::request::RequestBody;
use crate::serving::failure::{Failure, shielded};
use foretell_engines::translation::{Thinking, Untranslated};

/// Longest body that is translated for a model in this process, bytes.
const BODY_MAX: usize = 32 << 20;
/// Memory for such bodies, bytes.
const BODIES: u64 = 256 << 20;

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
    let fault =
        |error: StartError| ServedError { path: model.path.display().to_string(), detail: error.to_string() };
    let opened = load(model, None).map_err(fault)?;
    tracing::info!(name = opened.name, device = opened.device, "model runs in this process");
    let app = Arc::new(opened.app);
    // A panic must fail one request only, as it would in a server of its own.
    let (service, memory) = (ServiceBuilder::new().map_future(shielded), Memory::new(BODIES));
    Ok(Local::new(service.service_fn(move |request: Request<Body>| {
        answer(Arc::clone(&app), request.map(RequestBody::resumed), Arc::clone(&memory)).map(Ok)
    })))
}

/// Opens a model as a backend of the process file describes it, with emulated run times if a pace
/// is given.
///
/// # Errors
/// The model or its tokenizer cannot be used.
pub fn load(model: &ServedModel, pace: Option<Pace>) -> Result<Opened, StartError> {
    let options = Options {
        device: model.device,
        lanes: model.lanes as usize,
        context: model.context.map(|context| context as usize),
        threads: model.threads as usize,
        ..Options::default()
    };
    foretell_onnx::target::open::open(&model.path, model.name.clone(), &options, pace)
}

/// Answers with a model in this process: by the Messages and the Responses API too, as
/// translations of chats. No server behind takes what cannot be translated.
async fn answer(app: Arc<App>, request: Request<RequestBody>, memory: Arc<Memory>) -> Response<Body> {
    let told = |_: &[u8]| {
        Some(translate::Backend { thinking: Thinking::Template, has_api: false, continuous_usage: true })
    };
    let (mut request, back) = match translate::asked(&request) {
        Some(api) => translate::enter(request, api, told, BODY_MAX, &memory).await,
        None => (request, None),
    };
    let response = match request.extensions_mut().remove::<Untranslated>() {
        Some(untranslated) => Failure::Untranslated(untranslated).response(),
        None => app.answer(request.map(BodyExt::boxed_unsync)).await,
    };
    translate::leave(response, back, &memory).await
}

/// Serves a model's API until stopped; returns the number of connections that were cut.
pub async fn serve(app: App, listener: TcpListener, stop: Stop) -> usize {
    let (app, memory) = (Arc::new(app), Memory::new(BODIES));
    let service = ServiceBuilder::new()
        .service_fn(move |request| answer(Arc::clone(&app), request, Arc::clone(&memory)).map(Ok));
    let connections = Connections::new(max_clients());
    listen::serve(listener, service, Listening::new(Bounds::default(), connections, stop)).await
}
