//! `foretell target`: a model in this process, served to others.

use std::sync::Arc;

use foretell_onnx::target::server::App;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tower::ServiceBuilder;

use foretell_net::http::body::Body;
use foretell_net::http::connections::{Connections, max_clients};
use foretell_net::http::listen::{self, Bounds, Listening, Stop};
use foretell_net::http::memory::Memory;
use foretell_net::http::request::RequestBody;
use foretell_proxy::gateway::translate;
use foretell_proxy::serving::failure::Failure;
use foretell_wire::translation::{Thinking, Untranslated};

/// Longest body that is translated, bytes.
const BODY_MAX: usize = 32 << 20;
/// Memory for such bodies, bytes.
const BODIES: u64 = 256 << 20;

/// Answers by the Messages and the Responses API too, as translations of chats. A request that
/// cannot be translated is refused: no other server could take it.
async fn answer(app: Arc<App>, request: Request<RequestBody>, memory: Arc<Memory>) -> Response<Body> {
    let backend = |_: &[u8]| {
        Some(translate::Backend { thinking: Thinking::Template, has_api: false, continuous_usage: true })
    };
    let (mut request, back) = match translate::api_of(&request) {
        Some(api) => translate::translate_request(request, api, backend, BODY_MAX, &memory).await,
        None => (request, None),
    };
    let response = match request.extensions_mut().remove::<Untranslated>() {
        Some(untranslated) => Failure::Untranslated(untranslated).response(),
        None => app.answer(request.map(BodyExt::boxed_unsync)).await,
    };
    translate::translate_answer(response, back, &memory).await
}

/// Serves a model's API until stopped; returns the number of connections that were cut.
pub async fn serve(app: App, listener: TcpListener, stop: Stop) -> usize {
    let (app, memory) = (Arc::new(app), Memory::new(BODIES));
    let service = ServiceBuilder::new()
        .service_fn(move |request| answer(Arc::clone(&app), request, Arc::clone(&memory)).map(Ok));
    let connections = Connections::new(max_clients());
    listen::serve(listener, service, Listening::new(Bounds::default(), connections, stop)).await
}
