//! Running streams, and `/inference/v1/abort_requests`: an aborted stream ends like a complete one,
//! with its usage.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::super::http::Request;
use super::super::openai::id;
use super::{Refusal, Vllm};

pub(super) const ABORT: &str = "/inference/v1/abort_requests";

type Flags = HashMap<String, Vec<Arc<AtomicBool>>>;

/// Streams by the engine's id. Clients may use one id several times: all its streams are aborted
/// together.
#[derive(Clone, Default)]
pub(super) struct Streams(Arc<Mutex<Flags>>);

/// A running stream.
pub(super) struct Stream {
    aborted: Arc<AtomicBool>,
    id: String,
    all: Streams,
}

impl Vllm {
    /// The id of an answer, with the request's `x-request-id` if it has one.
    pub(super) fn id_of(&self, request: &Request, prefix: &str) -> String {
        let given = request.get("x-request-id").filter(|_| !self.options.renamed);
        given.map_or_else(|| id(prefix), |given| format!("{prefix}-{given}"))
    }
}

impl Streams {
    pub fn begin(&self, id: &str) -> Stream {
        let aborted = Arc::new(AtomicBool::new(false));
        self.flags().entry(id.to_owned()).or_default().push(Arc::clone(&aborted));
        Stream { aborted, id: id.to_owned(), all: self.clone() }
    }

    pub fn abort(&self, request: &Request) -> Result<(), Refusal> {
        let body = request.json().ok_or_else(|| Refusal::bad("JSON decode error"))?;
        let ids = body.get("request_ids").and_then(Value::as_array);
        let ids = ids.ok_or_else(|| Refusal::bad("Missing 'request_ids' in request body"))?;
        let flags = self.flags();
        for flag in ids.iter().filter_map(|id| flags.get(id.as_str()?)).flatten() {
            flag.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    fn flags(&self) -> std::sync::MutexGuard<'_, Flags> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Stream {
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut flags = self.all.flags();
        if let Some(own) = flags.get_mut(&self.id) {
            own.retain(|flag| !Arc::ptr_eq(flag, &self.aborted));
            if own.is_empty() {
                flags.remove(&self.id);
            }
        }
    }
}
