//! A stream whose first ride brought nothing is asked for once more, without a session.
//!
//! The client has the head of its answer and not one event, so the backend's answer to its own request can follow as
//! it comes, byte by byte. It is a bypass, with reason `fault`.

use http::{Request, Response};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;

use super::exchange::{Shared, Unsent, fit};
use super::failure::Failure;
use super::head;
use super::pump::Nothing;
use super::sink::{Gone, Sink};
use crate::fleet::{Answer, SendError};
use crate::http::body::full;
use crate::observe::Record;
use crate::words::BypassReason;

/// Longest error body of a backend that is passed on within a stream, bytes.
const ERROR_BYTES: usize = 1 << 20;

/// Sends the request once more and streams the backend's answer to the client unchanged.
pub(super) async fn stream(nothing: Nothing) {
    let Nothing { unsent, shared, mut slot, mut sink } = nothing;
    slot.record.declined(BypassReason::Fault, None);
    slot.record.to(unsent.replica.name());
    let gone = sink.hung_up();
    let answered = async {
        let sent = send(unsent, &shared).await;
        pass_on(sent, &mut sink, &mut slot.record).await?;
        sink.trailers(slot.record.so_far()).await
    };
    let answered = tokio::select! {
        answered = answered => answered,
        () = gone => Err(Gone),
    };
    slot.record.end(answered.is_err());
}

async fn send(unsent: Unsent, shared: &Shared) -> Result<Response<Answer>, SendError> {
    let Unsent { mut head, body, mut replica } = unsent;
    let body = fit(&replica, &mut head, body, &shared.memory);
    let request = Request::from_parts(head, full(body));
    shared.fleet.send(&mut replica, request, None).await
}

async fn pass_on(
    sent: Result<Response<Answer>, SendError>,
    sink: &mut Sink,
    record: &mut Record,
) -> Result<(), Gone> {
    let response = match sent {
        Ok(response) => response,
        Err(error) => return sink.error(&Failure::from(error).body()).await,
    };
    let stream = head::is_stream(&response);
    let mut body = response.into_body();
    if !stream {
        // The head (200) is sent already, so the backend's error goes out as an event.
        let whole = Limited::new(body, ERROR_BYTES).collect().await;
        let said = whole.ok().and_then(|whole| serde_json::from_slice::<Value>(&whole.to_bytes()).ok());
        let said = said.filter(|said| said.get("error").is_some());
        return sink.error(&said.unwrap_or_else(|| Failure::BrokeOff.body())).await;
    }
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                let Ok(data) = frame.into_data() else { continue };
                record.emitted();
                sink.raw(data).await?;
            }
            Err(error) => return sink.cut(error.into()).await,
        }
    }
    Ok(())
}
