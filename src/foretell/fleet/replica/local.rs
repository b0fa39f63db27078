//! A replica in this process, which is called directly and not over a connection.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt};

use crate::fleet::error::SendError;
use crate::http::body::{Body, BoxError, full};

/// A server in this process. Dropping its future, or the body of its answer, cancels the request.
#[derive(Clone)]
pub struct Local(BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>);

impl Local {
    /// A server whose answers are those of `service`.
    pub fn new<S>(service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        Self(BoxCloneSyncService::new(service))
    }

    /// A server that was not started: it answers 503.
    pub fn absent() -> Self {
        Self::new(tower::service_fn(|_| {
            let mut response = Response::new(full(Bytes::new()));
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            std::future::ready(Ok(response))
        }))
    }

    /// Sends it a request. If the request's body failed, that is the error, regardless of the
    /// server's answer.
    pub(super) async fn ask(&self, request: Request<Body>) -> Result<Response<Body>, SendError> {
        let failed: Arc<Mutex<Option<SendError>>> = Arc::default();
        let noted = Arc::clone(&failed);
        let note = move |error: BoxError| {
            *noted.lock() = Some(SendError::of_body(error.as_ref()));
            error
        };
        let Ok(response) = self.call(request.map(|body| body.map_err(note).boxed_unsync())).await;
        let failed = failed.lock().take();
        failed.map_or(Ok(response), Err)
    }

    fn call(&self, request: Request<Body>) -> BoxFuture<'static, Result<Response<Body>, Infallible>> {
        self.0.clone().oneshot(request).boxed()
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Local")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http::StatusCode;
    use http_body_util::{Limited, StreamBody};
    use hyper::body::Frame;
    use tokio::sync::mpsc;
    use tower::service_fn;

    use super::*;
    use crate::fleet::{Answer, BreakerState, BrokenOff, Replica, ReplicaSettings, SendErrorKind};
    use crate::http::body::full;

    type Frames = mpsc::UnboundedSender<Result<Frame<Bytes>, BoxError>>;

    fn backend(local: Local) -> ReplicaSettings {
        ReplicaSettings { local: Some(local), ..ReplicaSettings::new("b", "onnx:m") }
    }

    fn built(settings: ReplicaSettings) -> Arc<Replica> {
        Arc::new(Replica::new(settings).unwrap())
    }

    fn asked(body: Body) -> Request<Body> {
        Request::post("/v1/completions").body(body).unwrap()
    }

    fn question() -> Request<Body> {
        asked(full(b"{}".to_vec()))
    }

    /// A server whose answer's body is sent later by the test.
    fn scripted() -> (Local, Frames) {
        let (frames, said) = mpsc::unbounded_channel();
        let said = Arc::new(Mutex::new(Some(said)));
        let local = Local::new(service_fn(move |_| {
            let said = said.lock().take().expect("one call");
            let frames =
                futures_util::stream::unfold(said, |mut said: mpsc::UnboundedReceiver<_>| async move {
                    said.recv().await.map(|frame| (frame, said))
                });
            std::future::ready(Ok(Response::new(StreamBody::new(frames).boxed_unsync())))
        }));
        (local, frames)
    }

    async fn next(answer: &mut Answer) -> Option<Result<Bytes, BrokenOff>> {
        Some(answer.frame().await?.map(|frame| frame.into_data().unwrap_or_default()))
    }

    #[tokio::test(start_paused = true)]
    async fn later_frames_wake_the_reader_and_the_call_is_counted_until_the_end() {
        let (local, frames) = scripted();
        let backend = built(backend(local));
        let mut answer = backend.send(question()).await.unwrap().into_body();
        let later = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            frames.send(Ok(Frame::data(Bytes::from("a")))).unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        });
        assert_eq!(next(&mut answer).await.unwrap().unwrap(), "a");
        assert_eq!(backend.in_flight(), 1);
        assert!(next(&mut answer).await.is_none(), "it ends as its body does");
        later.await.unwrap();
        drop(answer);
        assert_eq!((backend.in_flight(), backend.breaker()), (0, BreakerState::Closed));
    }

    #[tokio::test]
    async fn leaving_drops_the_body() {
        let (local, frames) = scripted();
        let answer = built(backend(local)).send(question()).await.unwrap();
        assert!(!frames.is_closed());
        drop(answer);
        assert!(frames.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn silence_and_a_late_first_byte_are_reported_as_for_any_server() {
        let (local, _frames) = scripted();
        let idle = Some(Duration::from_secs(3));
        let backend = built(ReplicaSettings { idle, ..self::backend(local) });
        let mut answer = backend.send(question()).await.unwrap().into_body();
        assert!(matches!(next(&mut answer).await, Some(Err(BrokenOff::Silent(_)))));

        let never = Local::new(service_fn(|_| std::future::pending()));
        let first_byte = Some(Duration::from_secs(3));
        let backend = built(ReplicaSettings { first_byte, ..self::backend(never) });
        let error = backend.send(question()).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), SendErrorKind::Timeout);
    }

    #[tokio::test]
    async fn an_answer_that_breaks_off_is_an_error() {
        let (local, frames) = scripted();
        let mut answer = built(backend(local)).send(question()).await.unwrap().into_body();
        frames.send(Err("gone".into())).unwrap();
        let told = next(&mut answer).await.unwrap().unwrap_err();
        assert_eq!((matches!(told, BrokenOff::Gone(_)), told.to_string().as_str()), (true, "gone"));
    }

    #[tokio::test]
    async fn its_faults_open_the_breaker() {
        let faulty = Local::new(service_fn(|_| {
            let mut response = Response::new(full(b"no".to_vec()));
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            std::future::ready(Ok(response))
        }));
        let backend = built(backend(faulty));
        for _ in 0..20 {
            let answer = backend.send(question()).await.unwrap();
            answer.into_body().collect().await.unwrap();
        }
        assert_eq!(backend.breaker(), BreakerState::Open);
    }

    #[tokio::test]
    async fn a_body_that_fails_is_the_clients_fault() {
        let reading = Local::new(service_fn(|request: Request<Body>| {
            let read = request.into_body().collect();
            read.map(|_| Ok(Response::new(full(Vec::new()))))
        }));
        let backend = built(backend(reading));
        let long = Limited::new(full(b"12345".to_vec()), 4).boxed_unsync();
        let error = backend.send(asked(long)).await.map(|_| ()).unwrap_err();
        assert!(error.is_limit(), "{error}");
        let cut: Result<Frame<Bytes>, BoxError> = Err("cut".into());
        let broken = StreamBody::new(futures_util::stream::iter([cut])).boxed_unsync();
        let error = backend.send(asked(broken)).await.map(|_| ()).unwrap_err();
        assert_eq!((error.kind(), error.is_limit()), (SendErrorKind::Request, false), "{error}");
        assert_eq!(backend.breaker(), BreakerState::Closed);
    }
}
