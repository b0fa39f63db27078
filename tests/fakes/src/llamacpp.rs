//! llama-server of llama.cpp (`0c1e570`): slots instead of a cache, tokens in chunks, two families
//! of routes; forks, idle slots put away, events without a token in the middle of a character,
//! penalties within the last tokens of prompt and output.

mod info;
mod native;
mod openai;
mod params;
mod slots;

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::fields::Wrong;
use super::house::{House, Setup};
use super::http::{Out, Request, Sent};
use super::server::Engine;
pub use slots::Slots;

/// Start options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// `-np`
    pub slots: usize,
    /// `--cache-idle-slots`, on by default.
    pub cache_idle_slots: bool,
    /// `--metrics`
    pub metrics: bool,
    /// `--reverse-prompt`: stop texts of a request that names none.
    pub stop: Vec<String>,
    pub setup: Setup,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            slots: 4,
            cache_idle_slots: true,
            metrics: false,
            stop: Vec::new(),
            setup: Setup { max_len: 4096, ..Setup::default() },
        }
    }
}

pub struct Llama {
    pub house: Arc<House>,
    pub options: Options,
    pub slots: Arc<Slots>,
}

/// A refusal, of one of the server's kinds.
#[derive(Clone, Debug)]
pub struct Refusal(u16, Value);

impl Refusal {
    fn of(status: u16, kind: &str, message: &str) -> Self {
        Self(status, json!({"code": status, "message": message, "type": kind}))
    }

    fn bad(message: &str) -> Self {
        Self::of(400, "invalid_request_error", message)
    }
}

impl From<Wrong> for Refusal {
    fn from(wrong: Wrong) -> Self {
        if wrong.field == "body" {
            return Self::of(
                500,
                "server_error",
                &format!("[json.exception.parse_error.101] parse error: {}", wrong.got),
            );
        }
        Self::bad(&format!(
            "Field '{}': [json.exception.type_error.302] must be {}, but is {}",
            wrong.field, wrong.want, wrong.got
        ))
    }
}

impl Llama {
    pub fn new(mut options: Options) -> Self {
        options.setup.max_running = options.slots;
        let house = House::new(options.setup.clone());
        let slots = Arc::new(Slots::new(options.slots, options.cache_idle_slots));
        Self { house, options, slots }
    }

    async fn route(&self, request: Request, out: &mut Out) -> Sent {
        let done = match request.route() {
            ("GET", "/health" | "/v1/health") => Ok(json!({"status": "ok"})),
            ("GET", "/metrics") => return self.metrics(out).await,
            ("GET", "/props") => Ok(self.props()),
            ("GET", "/slots") => self.slot_list(&request),
            ("GET", "/v1/models" | "/models") => Ok(self.models()),
            ("POST", "/tokenize") => self.tokenize(&request),
            ("POST", "/detokenize") => self.detokenize(&request),
            ("POST", "/apply-template") => self.apply_template(&request),
            ("POST", "/completion" | "/completions") => return self.native(&request, out).await,
            ("POST", "/v1/completions" | "/v1/chat/completions" | "/chat/completions") => {
                return self.openai(&request, out).await;
            }
            _ => {
                let body = json!({"message": "File Not Found", "type": "not_found_error", "code": 404});
                Err(Refusal(404, body))
            }
        };
        match done {
            Ok(body) => out.json_utf8(200, &body).await,
            Err(refusal) => refuse(&refusal, out).await,
        }
    }
}

async fn refuse(Refusal(status, error): &Refusal, out: &mut Out) -> Sent {
    out.json_utf8(*status, &json!({"error": error})).await
}

impl Engine for Llama {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        self.route(request, out).boxed()
    }

    fn renewed(&self) {
        self.slots.clear();
    }
}
