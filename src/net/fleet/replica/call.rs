//! Calls to a replica: for a client's request, or internal ones.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, HOST};
use http::uri::PathAndQuery;
use http::{Extensions, Method, Request, Response, Uri, Version};
use tower::ServiceExt;

use super::{Auth, Fresh, RANK, Repeatable, Replica};
use crate::fleet::error::{SendError, SendErrorKind, is_out_of_descriptors};
use crate::fleet::health::{Failing, Outcome};
use crate::fleet::link::{Answer, Link, Pool, Proof, Stream, frame};
use crate::fleet::tie::{Tie, Tied};
use crate::http::body::{Body, BoxError, full};
use crate::http::workers::lane;

/// Pause between attempts to connect while no file descriptor is free.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(20);

/// The party on whose behalf a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnBehalfOf {
    /// A client: the call never carries the key of internal calls.
    Client,
    /// Foretell: an internal call.
    Foretell,
}

/// A request that got no answer.
pub(in crate::fleet) struct Unanswered {
    pub(in crate::fleet) error: SendError,
    /// The request, if not a byte of it was sent.
    pub(in crate::fleet) unsent: Option<Box<Request<Body>>>,
}

impl Replica {
    /// Sends `request`, whose target is a path of this server (scheme and host of the target are
    /// ignored), and returns once the answer's head is received. Dropping the future or the answer
    /// abandons the call. A pooled connection that turns out dead before a byte was written is
    /// replaced by a fresh one.
    ///
    /// # Errors
    /// See [`SendError`]; none of them means that the backend answered.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Answer>, SendError> {
        self.try_send(request).await.map_err(|unanswered| unanswered.error)
    }

    /// As [`Self::send`]; an unsent request comes back unchanged.
    pub(in crate::fleet) async fn try_send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Answer>, Unanswered> {
        let proof = if is_work(&request) { Proof::Work } else { Proof::Life };
        let sent = self.exchange(request, proof, OnBehalfOf::Client).await;
        if let Err(unanswered) = &sent {
            let kind = unanswered.kind();
            self.health.ended(match kind {
                SendErrorKind::Request | SendErrorKind::Changed => Outcome::Undecided,
                kind => Outcome::Failed(Failing::Call(kind), unanswered.error.to_string()),
            });
        }
        sent
    }

    /// As [`Self::send`], for an additional call by Foretell on behalf of a client's request, with
    /// that client's key. Its result does not count in the replica's health, which depends on
    /// clients' requests alone.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn send_additional(&self, request: Request<Body>) -> Result<Response<Answer>, SendError> {
        let sent = self.exchange(request, Proof::Nothing, OnBehalfOf::Client).await;
        sent.map_err(|unanswered| unanswered.error)
    }

    /// As [`Self::send_additional`], for an internal call, on behalf of no client: it carries the
    /// key of internal calls.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn send_internal(&self, request: Request<Body>) -> Result<Response<Answer>, SendError> {
        let sent = self.exchange(request, Proof::Nothing, OnBehalfOf::Foretell).await;
        sent.map_err(|unanswered| unanswered.error)
    }

    /// As [`Self::send_internal`], but records whether the replica can be reached.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn inquire(&self, request: Request<Body>) -> Result<Response<Answer>, SendError> {
        let sent = self.exchange(request, Proof::Nothing, OnBehalfOf::Foretell).await;
        match &sent {
            Ok(response) if !response.status().is_server_error() => self.health.reached(),
            Ok(_) => {}
            Err(unanswered) if unanswered.kind() == SendErrorKind::Connect => {
                self.health.unreached(&unanswered.error.to_string());
            }
            Err(unanswered) => self.health.note(&unanswered.error.to_string()),
        }
        sent.map_err(|unanswered| unanswered.error)
    }

    async fn exchange(
        &self,
        mut request: Request<Body>,
        proof: Proof,
        caller: OnBehalfOf,
    ) -> Result<Response<Answer>, Unanswered> {
        let target = request.uri().clone();
        *request.uri_mut() = self.target(&target).map_err(Unanswered::lost)?;
        *request.version_mut() = Version::HTTP_11;
        self.sign(&mut request, caller);
        let answer = self.call(request, proof);
        let answer = match self.settings.first_byte {
            None => answer.await,
            Some(after) => tokio::time::timeout(after, answer).await.unwrap_or_else(|_| {
                let backend = self.settings.name.clone();
                Err(Unanswered::lost(SendError::FirstByteTimeout { backend, after }))
            }),
        };
        answer.map_err(|mut unanswered| {
            if let Some(unsent) = &mut unanswered.unsent {
                *unsent.uri_mut() = target;
            }
            unanswered
        })
    }

    /// Sets host, authorization, fields of internal calls, and the data-parallel rank.
    fn sign(&self, request: &mut Request<Body>, caller: OnBehalfOf) {
        let fields = request.headers_mut();
        if !self.settings.pass_client_host || !fields.contains_key(HOST) {
            fields.insert(HOST, self.host.clone());
        }
        match &self.settings.auth {
            Auth::Pass => {}
            Auth::Strip => drop(fields.remove(AUTHORIZATION)),
            Auth::Replace(key) => drop(fields.insert(AUTHORIZATION, key.value())),
        }
        if caller == OnBehalfOf::Foretell {
            if let Some(key) = &self.settings.internal_key {
                fields.insert(AUTHORIZATION, key.value());
            }
            fields.extend(self.settings.internal_fields.clone());
        }
        if let Some(rank) = &self.rank {
            fields.insert(RANK, rank.clone());
        }
    }

    async fn call(&self, mut request: Request<Body>, proof: Proof) -> Result<Response<Answer>, Unanswered> {
        let lane = lane().unwrap_or(self.settings.lanes).min(self.settings.lanes);
        let Some(pool) = self.pools.get(lane) else {
            return Err(Unanswered::lost(self.unsendable("no connection pool")));
        };
        let busy = pool.begin();
        let tied = request.extensions_mut().remove::<Tied>();
        let mut unshown = false;
        loop {
            let idle = if unshown { None } else { idle(pool, request.extensions()).await };
            let reused = idle.is_some();
            let mut link = match idle {
                Some(link) => link,
                // Rare and large, so it is not a part of every call's future.
                None => match Box::pin(self.connect()).await {
                    Ok(link) => link,
                    Err(error) => {
                        let unsent = Some(Box::new(request));
                        return Err(Unanswered { error, unsent });
                    }
                },
            };
            let unverified = tied.as_ref().filter(|tied| !link.is_tied_to(&tied.to));
            let answered = reused || unverified.is_some();
            if let Some(Tied { to, patient }) = unverified {
                let within = (reused || !patient).then_some(self.settings.connect_timeout);
                link = match Box::pin(self.tied(link, to, within)).await {
                    Ok(link) => link,
                    // An idle connection may lead to a process that is gone; a new one does not.
                    Err(_) if reused => {
                        unshown = true;
                        continue;
                    }
                    Err(error) => {
                        if matches!(error, SendError::Changed { .. }) {
                            self.health.count(Failing::Call(SendErrorKind::Changed));
                        }
                        let unsent = Some(Box::new(request));
                        return Err(Unanswered { error, unsent });
                    }
                };
            }
            let mut error = match link.call(request).await {
                Ok(mut response) => {
                    return match frame(&mut response, &mut link) {
                        Ok(()) => Ok(Answer::response(response, link, busy, proof)),
                        Err(detail) => {
                            let backend = self.settings.name.clone();
                            Err(Unanswered::lost(SendError::Protocol { backend, detail }))
                        }
                    };
                }
                Err(error) => error,
            };
            request = match error.take_message() {
                Some(unsent) if reused => unsent,
                _ => {
                    let error = SendError::of_call(&self.settings.name, error.error(), answered);
                    return Err(Unanswered::lost(error));
                }
            };
        }
    }

    /// The connection, after it has shown within `within` that it leads to the process of `tie`.
    async fn tied(
        &self,
        mut link: Link,
        tie: &Arc<Tie>,
        within: Option<Duration>,
    ) -> Result<Link, SendError> {
        let untied = |detail: String| SendError::Untied { backend: self.settings.name.clone(), detail };
        let mut question = Request::new(full(""));
        *question.uri_mut() = self.target(tie.page())?;
        self.sign(&mut question, OnBehalfOf::Foretell);
        let page = match within {
            Some(within) => tokio::time::timeout(within, link.page(question)).await,
            None => Ok(link.page(question).await),
        };
        let body = page.map_err(|_| untied("no answer in time".to_owned()))?.map_err(untied)?;
        self.health.byte_received();
        if !tie.names(body) {
            return Err(SendError::Changed { backend: self.settings.name.clone() });
        }
        link.tie(tie).ok_or_else(|| untied("it is closed after an answer".to_owned()))
    }

    /// Connects, TLS included, within `connect_timeout`.
    async fn connect(&self) -> Result<Link, SendError> {
        let name = &self.settings.name;
        let begun = tokio::time::Instant::now();
        let mut without_descriptor = false;
        let reached = self.reach(&mut without_descriptor);
        let stream = tokio::time::timeout(self.settings.connect_timeout, reached).await;
        let (backend, url) = (name.clone(), self.url());
        let stream = stream
            .map_err(|_| {
                if without_descriptor {
                    SendError::NoDescriptor { backend }
                } else {
                    SendError::ConnectTimeout { backend, url: url.to_owned() }
                }
            })?
            .map_err(|error| SendError::of_connecting(name, url, error.as_ref()))?;
        self.connects.observe(begun.elapsed().as_secs_f64());
        Link::new(stream).await.map_err(|error| SendError::of_call(name, &error, false))
    }

    /// Connects. If the process has no free file descriptor, closes the idle connections and
    /// retries until one is free.
    async fn reach(&self, without_descriptor: &mut bool) -> Result<Stream, BoxError> {
        loop {
            match self.connector.clone().oneshot(self.address.clone()).await {
                Err(error) if is_out_of_descriptors(&*error) => {
                    *without_descriptor = true;
                    self.pools.iter().for_each(|pool| pool.clear());
                    tokio::time::sleep(DESCRIPTOR_PAUSE).await;
                }
                reached => return reached,
            }
        }
    }

    pub(super) fn target(&self, uri: &Uri) -> Result<Uri, SendError> {
        let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        Ok(Uri::from(match self.prefix.as_str() {
            "" => path,
            prefix => format!("{prefix}{path}").parse().map_err(|error| self.unsendable(error))?,
        }))
    }

    fn unsendable(&self, detail: impl fmt::Display) -> SendError {
        SendError::Unsendable { backend: self.settings.name.clone(), detail: detail.to_string() }
    }
}

/// An idle connection that may carry the request.
async fn idle(pool: &Pool, marks: &Extensions) -> Option<Link> {
    if marks.get::<Fresh>().is_some() {
        None
    } else if marks.get::<Repeatable>().is_some() {
        pool.take()
    } else {
        pool.take_lasting().await
    }
}

/// True if a good answer needs the model. Engines answer many other paths by a frontend that
/// outlives it.
fn is_work(request: &Request<Body>) -> bool {
    const SIDE_CALLS: [&str; 4] = ["/tokenize", "/detokenize", "/apply-template", "/render"];
    *request.method() == Method::POST && !SIDE_CALLS.iter().any(|page| request.uri().path().ends_with(page))
}

impl Unanswered {
    fn lost(error: SendError) -> Self {
        Self { error, unsent: None }
    }
}
