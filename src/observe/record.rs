//! The one record of a request, from its acceptance to the last byte of its answer.
//!
//! Whoever answers the request owns it: the relay, a tunnel or the driver of a session. A client leaves by having
//! futures and bodies dropped, so the record is written by its drop at the latest, and cannot be forgotten.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use tracing::Span;

use super::log::request_span;
use super::{Finished, Held, Observer, Round};
use crate::http::headers::REQUEST_ID;
use crate::http::memory::Reservation;
use crate::openai::{Path, Route};
use crate::session::Summary;
use crate::words::{BypassReason, RideReason};

/// Longest text of a client's that is kept, bytes: the names of a model and of a parameter have no bound of their
/// own.
const KEPT: usize = 200;

/// A verify call under way.
#[derive(Debug)]
struct Open {
    drafter: &'static str,
    since: Instant,
    draft: Duration,
}

/// Writes one [`Finished`] into every view when the request ends or is dropped, and counts it as in flight until then.
#[derive(Debug)]
pub struct Record {
    observer: Arc<Observer>,
    span: Span,
    started: Instant,
    finished: Finished,
    written: bool,
    held: Option<Held>,
    stream: Option<Held>,
    /// The verify call under way.
    open: Option<Open>,
    /// Time spent drafting for the next round.
    drafting: Duration,
    /// What is reserved for the request and its session, and how much of it is the request's own, bytes.
    memory: Option<(Reservation, u64)>,
}

impl Record {
    /// A request that has just been accepted and is none of the speculated kind, until told otherwise.
    pub fn begin(observer: &Arc<Observer>, id: String) -> Self {
        let held = Some(observer.metrics().hold_request());
        let span = request_span(&id);
        let mut finished = Finished::new(Path::Relayed, "");
        finished.id = id;
        finished.reason = Some(BypassReason::Route.name());
        Self {
            observer: Arc::clone(observer),
            span,
            started: Instant::now(),
            finished,
            written: false,
            held,
            stream: None,
            open: None,
            drafting: Duration::ZERO,
            memory: None,
        }
    }

    /// What is known so far.
    pub fn so_far(&self) -> &Finished {
        &self.finished
    }

    /// The span in which everything belongs that is done for the request.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// When the request was accepted.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Where metrics go that are not tied to the end of the request.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// It is a completion that is not speculated.
    pub fn bypassed(&mut self, route: Route, reason: BypassReason, parameter: Option<String>) {
        self.finished.path = Path::Bypassed;
        self.finished.route = Some(route);
        self.finished.reason = Some(reason.name());
        self.finished.parameter = parameter.map(kept);
        self.finished.policy = None;
    }

    /// Its session is given up before anything was answered: what is left of it is a bypass.
    pub fn declined(&mut self, reason: BypassReason) {
        if let Some(route) = self.finished.route {
            self.bypassed(route, reason, None);
        }
        self.finished.rounds.clear();
        self.finished.output_tokens = 0;
        self.finished.first_byte = None;
    }

    /// It is a completion that may be speculated, under this policy (`name@revision`).
    pub fn eligible(&mut self, route: Route, policy: &str) {
        self.finished.path = Path::Ridden;
        self.finished.route = Some(route);
        self.finished.reason = None;
        self.finished.policy = Some(policy.to_owned());
    }

    /// The model that it names.
    pub fn model(&mut self, model: String) {
        self.finished.model = Some(kept(model));
    }

    /// No replica has answered: the request never began to ride.
    pub fn unreachable(&mut self, cause: String) {
        if self.finished.path != Path::Relayed {
            self.finished.path = Path::Bypassed;
            self.finished.reason = Some(BypassReason::Unreachable.name());
            self.finished.parameter = None;
        }
        self.finished.error = Some(cause);
    }

    /// Why it rides, where no session is there to say it.
    pub fn rides(&mut self, reason: RideReason) {
        self.finished.reason = Some(reason.name());
    }

    /// Why the answer has no end, or is an error of Foretell's own.
    pub fn failed(&mut self, cause: String) {
        self.finished.error = Some(cause);
    }

    /// Keeps memory reserved until the end of the answer.
    pub fn keep(&mut self, reservation: Reservation) {
        let request = reservation.bytes();
        self.memory = Some((reservation, request));
    }

    /// The session holds so many bytes now: the reservation follows.
    pub fn session_holds(&mut self, bytes: u64) {
        if let Some((memory, request)) = &mut self.memory {
            memory.follow(*request + bytes);
        }
    }

    /// The backend that it goes to.
    pub fn to(&mut self, backend: &str) {
        backend.clone_into(&mut self.finished.backend);
    }

    /// The status that the client gets.
    pub fn status(&mut self, status: StatusCode) {
        self.finished.status = status.as_u16();
    }

    /// The head of the answer that the client gets; an event stream counts as open until the end.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap) {
        self.status(status);
        let kind = headers.get(CONTENT_TYPE).map_or(&[][..], |kind| kind.as_bytes());
        if kind.starts_with(b"text/event-stream") {
            self.stream.get_or_insert_with(|| self.observer.metrics().hold_stream());
        }
        let theirs = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
        self.finished.backend_id = theirs.filter(|id| *id != self.finished.id).map(|id| kept(id.to_owned()));
    }

    /// A part of the answer's body goes to the client.
    pub fn emitted(&mut self) {
        let started = self.started;
        self.finished.first_byte.get_or_insert_with(|| started.elapsed());
    }

    /// Time was spent drafting. It belongs to the next round.
    pub fn drafted(&mut self, took: Duration) {
        self.drafting += took;
    }

    /// A verify call goes out with a draft of `drafter`.
    pub fn verifying(&mut self, drafter: &'static str) {
        let draft = std::mem::take(&mut self.drafting);
        self.open = Some(Open { drafter, since: Instant::now(), draft });
    }

    /// Takes over the session's account. A round is one that the session has counted.
    pub fn account(&mut self, summary: &Summary) {
        let finished = &mut self.finished;
        finished.path = if summary.speculated { Path::Speculated } else { Path::Ridden };
        finished.reason = summary.reason.map(RideReason::name);
        finished.output_tokens = summary.output_tokens;
        finished.drift = summary.drift;
        if summary.rounds as usize <= finished.rounds.len() {
            return;
        }
        let Some(Open { drafter, since, draft }) = self.open.take() else { return };
        finished.rounds.push(Round {
            drafted: summary.drafted.saturating_sub(finished.drafted()),
            accepted: summary.accepted.saturating_sub(finished.accepted()),
            drafter,
            draft,
            verify: since.elapsed(),
        });
    }

    /// The request is over: writes the record. `client_gone`: the client has left before the end.
    pub fn end(&mut self, client_gone: bool) {
        if !std::mem::replace(&mut self.written, true) {
            let nothing = Finished::new(self.finished.path, "");
            let mut finished = std::mem::replace(&mut self.finished, nothing);
            finished.duration = self.started.elapsed();
            finished.client_gone = client_gone;
            self.span.in_scope(|| self.observer.finish(finished));
        }
        self.stream = None;
        self.held = None;
        self.memory = None;
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let panicked = std::thread::panicking() && !self.written;
        if panicked {
            self.finished.status = StatusCode::INTERNAL_SERVER_ERROR.as_u16();
        }
        self.end(!panicked);
    }
}

/// A client's text, cut to what is kept.
fn kept(mut text: String) -> String {
    if text.len() > KEPT {
        text.truncate(text.floor_char_boundary(KEPT));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observer() -> Arc<Observer> {
        Arc::new(Observer::new().unwrap())
    }

    fn sessions(observer: &Observer) -> serde_json::Value {
        observer.recent().to_json()
    }

    #[test]
    fn a_record_that_is_dropped_says_that_the_client_has_left() {
        let observer = observer();
        let mut record = Record::begin(&observer, "r".to_owned());
        record.bypassed(Route::Chat, BypassReason::Tools, None);
        drop(record);
        let session = &sessions(&observer)[0];
        assert_eq!((&session["id"], &session["client_gone"]), (&"r".into(), &true.into()));
        assert!(observer.metrics().text().contains("foretell_requests_in_flight 0"));
    }

    #[test]
    fn it_is_written_once_and_its_rounds_are_the_sessions() {
        let observer = observer();
        let mut record = Record::begin(&observer, "r".to_owned());
        record.eligible(Route::Chat, "p@12345678");
        let mut summary = Summary {
            speculated: true,
            rounds: 1,
            drafted: 4,
            accepted: 3,
            output_tokens: 5,
            ..Summary::default()
        };
        record.drafted(Duration::from_millis(2));
        record.verifying("prompt_lookup");
        record.account(&summary);
        // A verify call that brings nothing is no round.
        record.verifying("prompt_lookup");
        record.account(&summary);
        summary = Summary { rounds: 2, drafted: 6, accepted: 3, ..summary };
        record.verifying("model");
        record.account(&summary);
        record.status(StatusCode::OK);
        record.end(false);
        record.end(true);
        drop(record);
        let all = sessions(&observer);
        assert_eq!(all.as_array().unwrap().len(), 1);
        let rounds: Vec<_> = all[0]["rounds"].as_array().unwrap().iter().collect();
        let told = |round: &serde_json::Value| {
            (round["drafted"].as_u64().unwrap(), round["accepted"].as_u64().unwrap())
        };
        assert_eq!(rounds.iter().map(|round| told(round)).collect::<Vec<_>>(), [(4, 3), (2, 0)]);
        assert_eq!(all[0]["client_gone"], false);
    }

    #[test]
    fn a_clients_text_is_kept_within_bounds() {
        assert_eq!(kept("short".to_owned()), "short");
        let long = kept("é".repeat(500));
        assert!(long.len() <= KEPT + '…'.len_utf8() && long.ends_with("é…"));
    }
}
