//! The HTTP routes of the ONNX server.

mod grammars;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::stream;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Map, Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::grammar::{Grammars, Next};
use crate::sampler::Sampler;
use crate::target::errors::Refusal;
use crate::target::fields::invalid;
use crate::target::job::{Failure, Generate, Job, Limits, Verify};
use crate::target::logprobs::Logprobs;
use crate::target::metrics::Metrics;
use crate::target::output::Output;
use crate::target::parts::{Derender, Generated, Parsing};
use crate::target::reply::{self, VerifyReply};
use crate::target::scheduler::Engine;
use crate::target::stops::Stops;
use crate::target::stream::{Answer, ChoiceEvent, Running};
use crate::target::wire::{self, GenerateRequest, Prompt, Served};
use crate::target::words::Words;
use foretell_core::units::TokenId;
use foretell_parsers::parse::{Parsers, ReasoningFormat, ToolFormat, Unsure};
use foretell_wire::openai::{CALL_GRAMMAR_VERSION, Grammar, Route, Sampling};

/// Any error that can end a body early.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Body of requests and answers.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Longest request body, in bytes.
const BODY_MAX: usize = 32 << 20;
/// Bodies up to this length are parsed on the network thread, bytes.
const BODY_SHORT: usize = 16 << 10;
const RENDER: &str = "/v1/chat/completions/render";
const DERENDER: &str = "/v1/chat/completions/derender";
/// The paths of POST requests.
const POSTED: [&str; 7] =
    ["/v1/completions", "/v1/chat/completions", RENDER, DERENDER, "/v1/verify", "/tokenize", "/detokenize"];
/// Output limit of a completion request without `max_tokens`, as in OpenAI's API.
const MAX_TOKENS: usize = 16;

/// A model with everything needed to answer requests for it.
pub struct App {
    engine: Engine,
    words: Arc<dyn Words>,
    parsers: Parsers,
    /// Made for the first request with a grammar.
    grammars: OnceLock<Result<Arc<Grammars>, String>>,
    metrics: Arc<Metrics>,
    name: String,
    created: u64,
    /// Start time, microseconds of Unix time.
    started: u64,
    /// Identifies this process in every answer, so that a client notices when another one answers.
    mark: Arc<str>,
    random: RandomState,
    count: AtomicU64,
}

impl App {
    /// A model served under the id `name`.
    pub fn new(name: String, engine: Engine, words: Arc<dyn Words>, metrics: Arc<Metrics>) -> Self {
        let (random, count) = (RandomState::new(), AtomicU64::new(0));
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mark = format!("fp_{:016x}", random.hash_one((&name, started)));
        let (created, started) = (started.as_secs(), u64::try_from(started.as_micros()).unwrap_or_default());
        let (mark, parsers) = (mark.into(), Parsers::default());
        let grammars = OnceLock::new();
        Self { engine, words, parsers, grammars, metrics, name, created, started, mark, random, count }
    }

    /// With these output parsers for chats.
    ///
    /// # Errors
    /// The vocabulary lacks a marker of theirs.
    pub fn with_parsers(mut self, parsers: Parsers) -> Result<Self, Unsure> {
        self.parsers = parsers;
        self.parsing().check()?;
        Ok(self)
    }

    fn parsing(&self) -> Parsing {
        Parsing { parsers: self.parsers, words: Arc::clone(&self.words) }
    }

    /// Answers one request. Dropping the future or the answer's body cancels it.
    pub async fn answer(self: Arc<Self>, request: Request<Body>) -> Response<Body> {
        let route = request.uri().path().to_owned();
        let head = request.method() == Method::HEAD;
        let answered = self.route(request, &route).await;
        let response = answered.unwrap_or_else(|refusal| refuse(&refusal));
        let known = if response.status() == StatusCode::NOT_FOUND { "other" } else { route.as_str() };
        self.metrics.answered(known, response.status());
        if head { bodiless(response) } else { response }
    }

    async fn route(self: &Arc<Self>, request: Request<Body>, path: &str) -> Result<Response<Body>, Refusal> {
        let get = request.method() == Method::GET;
        match path {
            "/health" | "/version" | "/metrics" | "/v1/models" if get => Ok(self.get(path)),
            _ if POSTED.contains(&path) && request.method() == Method::POST => {
                let body = read(request.into_body()).await?;
                self.post(path, body).await
            }
            "/health" | "/version" | "/metrics" | "/v1/models" => {
                Err(Refusal::Method(format!("{} {path}", request.method())))
            }
            _ if POSTED.contains(&path) => Err(Refusal::Method(format!("{} {path}", request.method()))),
            "/tokenizer.json" | "/tokenizer_info" if get => self.vocabulary(path),
            _ => match path.strip_prefix("/v1/models/") {
                Some(name) if get && name == self.name => Ok(ok_json(&self.card())),
                Some(name) if get => Err(Refusal::NoModel(name.to_owned())),
                _ => Err(Refusal::NoRoute(path.to_owned())),
            },
        }
    }

    fn get(&self, path: &str) -> Response<Body> {
        match path {
            "/health" if self.engine.submit(Vec::new()) => buffered(StatusCode::OK, "text/plain", Vec::new()),
            "/health" => buffered(
                StatusCode::SERVICE_UNAVAILABLE,
                "text/plain",
                b"the model's thread has ended".to_vec(),
            ),
            "/metrics" => buffered(StatusCode::OK, "text/plain; version=0.0.4", self.metrics.text()),
            "/version" => ok_json(&json!({"version": env!("CARGO_PKG_VERSION"), "engine": "foretell"})),
            _ => ok_json(&json!({"object": "list", "data": [self.card()]})),
        }
    }

    /// Serves `/tokenizer.json` and `/tokenizer_info`, which a proxy needs in order to draft in
    /// this vocabulary.
    fn vocabulary(&self, path: &str) -> Result<Response<Body>, Refusal> {
        if path == "/tokenizer_info" {
            return Ok(ok_json(&json!({ "eos_token_ids": self.engine.config().eos })));
        }
        let file = self.words.file().ok_or_else(|| Refusal::NoRoute(path.to_owned()))?;
        Ok(buffered(StatusCode::OK, "application/json", file))
    }

    fn card(&self) -> serde_json::Value {
        json!({
            "id": self.name, "object": "model", "created": self.created, "owned_by": "foretell", "root": self.name,
            "parent": null, "max_model_len": self.engine.config().context, "started": self.started,
            "system_fingerprint": &*self.mark, "grammars": self.served().grammars.then_some(CALL_GRAMMAR_VERSION), "tool_parser": self.parsers.tools.map(ToolFormat::name),
            "proposes": Some(self.engine.config().proposes).filter(|&most| most > 0),
            "reasoning_parser": self.parsers.reasoning.map(ReasoningFormat::name),
        })
    }

    async fn post(self: &Arc<Self>, path: &str, body: Bytes) -> Result<Response<Body>, Refusal> {
        match path {
            "/v1/completions" => answered(self.begun(body, wire::completions).await?).await,
            "/v1/chat/completions" => answered(self.begun(body, wire::chat).await?).await,
            RENDER => self.off_thread(body, |app, body| app.render(wire::chat(body, app.served())?)).await,
            DERENDER => self.off_thread(body, Self::derender).await,
            "/v1/verify" => {
                let request = self.off_thread(body, |app, body| wire::verify(body, app.served())).await?;
                let allowed = |app: &Self, request: wire::VerifyRequest| Ok((app.behind(&request)?, request));
                let (allowed, request) =
                    self.run_blocking(request.sampling.grammar.is_some(), request, allowed).await?;
                self.verify(request, allowed).await
            }
            "/tokenize" => {
                self.off_thread(body, |app, body| app.tokenize(wire::tokenize(body, app.served())?)).await
            }
            _ => self.off_thread(body, Self::detokenize).await,
        }
    }

    /// Parses a request for text and begins with it: on a blocking thread if the body is long or
    /// has a grammar.
    async fn begun(
        self: &Arc<Self>,
        body: Bytes,
        read: fn(&[u8], Served<'_>) -> Result<GenerateRequest, Refusal>,
    ) -> Result<Answer, Refusal> {
        if body.len() > BODY_SHORT {
            let begin = move |app: &Self, body: Bytes| app.begin(read(&body, app.served())?);
            return self.run_blocking(true, body, begin).await;
        }
        let request = read(&body, self.served())?;
        self.run_blocking(request.sampling.grammar.is_some(), request, Self::begin).await
    }

    /// Parses a body: a long one on a blocking thread, since tokenizing it takes long.
    async fn off_thread<T: Send + 'static>(
        self: &Arc<Self>,
        body: Bytes,
        read: fn(&Self, &[u8]) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.run_blocking(body.len() > BODY_SHORT, body, move |app, body| read(app, &body)).await
    }

    /// Calls `act` with what is `given`, on a blocking thread if that may take `long`.
    async fn run_blocking<G: Send + 'static, T: Send + 'static>(
        self: &Arc<Self>,
        long: bool,
        given: G,
        act: impl FnOnce(&Self, G) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        if !long {
            return act(self, given);
        }
        let app = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || act(&app, given)).await;
        done.unwrap_or_else(|error| Err(Refusal::Fault(error.to_string())))
    }

    fn served(&self) -> Served<'_> {
        let vocabulary = self.engine.config().vocabulary;
        let grammars = self.words.tokenizer().is_some() && !self.engine.config().eos.is_empty();
        Served {
            model: &self.name,
            vocabulary,
            parsers: self.parsers,
            grammars,
            proposes: self.engine.config().proposes,
        }
    }

    /// Sends all jobs of a request to the model at once.
    fn begin(&self, mut request: GenerateRequest) -> Result<Answer, Refusal> {
        let field = if request.route == Route::Chat { "messages" } else { "prompt" };
        let mut prompts = Vec::with_capacity(request.prompts.len());
        for prompt in std::mem::take(&mut request.prompts) {
            prompts.push(self.tokens(prompt, &request)?);
        }
        let parsing = self.parsing();
        let parses = request.route == Route::Chat && parsing.applies(&request.parse_options);
        let special = parses && parsing.decodes_special(&request.parse_options);
        let stops = Stops::new(&request.stop, request.include_stop);
        let stops = stops.map_err(|error| invalid("stop", error.to_string()))?;
        let (mut jobs, mut choices) = (Vec::new(), Vec::new());
        let output = |(prompt, &generated): (&Vec<TokenId>, &usize)| {
            prompt.split_at(prompt.len().saturating_sub(generated)).1.to_vec()
        };
        let outputs = prompts.iter().zip(&request.generated).map(output).collect();
        let positions = self.positions(&request.sampling, outputs)?;
        for (index, (prompt, &generated)) in prompts.iter().zip(&request.generated).enumerate() {
            let max_tokens = self.max_tokens(&request, prompt.len(), field)?;
            let position = positions.as_ref().and_then(|positions| positions.get(index));
            // Of a fan-out a draft may not be allowed: the token that follows it is never used.
            if matches!(position, Some((_, Next::Nothing))) && max_tokens > 1 {
                return Err(invalid("generated", "the grammar does not allow this output"));
            }
            for choice in 0..request.choices {
                let seed = request.sampling.seed.unwrap_or_else(|| self.fresh_seed());
                let (events, receiver) = mpsc::unbounded_channel();
                let constraint = position.map(|(position, next)| self.constraint(position, next, max_tokens));
                jobs.push(Job::Generate(Box::new(Generate {
                    prompt: prompt.clone(),
                    generated,
                    sampler: self.sampler(&request.sampling, seed, choice as u32, &request.stop_token_ids),
                    constraint: constraint.transpose()?,
                    limits: self.limits(&request, max_tokens),
                    logprobs: request.show.logprobs,
                    prompt_logprobs: request.show.prompt_logprobs,
                    propose: if request.stream { request.propose } else { 0 },
                    events,
                })));
                // As in vLLM: before `min_tokens` neither an end token nor a stop string ends the
                // output.
                let spared = (request.sampling.min_tokens as usize).saturating_sub(generated);
                let decoder = self.words.decoder(prompt, special);
                let output = Output::new(decoder, stops.clone(), request.include_stop, spared);
                let parser =
                    (parses && request.stream).then(|| parsing.stream(&request.parse_options, prompt));
                let parser = parser.transpose().map_err(|error| Refusal::Fault(error.to_string()))?;
                let most = request.show.logprobs.unwrap_or(0);
                let logprobs = Logprobs::new(request.route, most, request.show.tokens_as_ids);
                choices.push(Running::new(receiver, output, seed, parser, logprobs));
            }
        }
        self.engine.submit(jobs);
        let id = self.id(request.route);
        let served = (self.name.clone(), Arc::clone(&self.mark));
        Ok(Answer::new(id, served, request, prompts, choices, parsing))
    }

    fn limits(&self, request: &GenerateRequest, max_tokens: usize) -> Limits {
        let eos = if request.sampling.ignore_eos { Vec::new() } else { self.engine.config().eos.clone() };
        Limits { max_tokens, eos, stop_token_ids: request.stop_token_ids.clone() }
    }

    fn sampler(&self, sampling: &Sampling, seed: u64, choice: u32, stop_token_ids: &[TokenId]) -> Sampler {
        let mut ends = self.engine.config().eos.clone();
        ends.extend_from_slice(stop_token_ids);
        Sampler::new(sampling.clone(), seed, choice).with_ends(ends)
    }

    fn tokens(&self, prompt: Prompt, request: &GenerateRequest) -> Result<Vec<TokenId>, Refusal> {
        let (special, opening) = (request.add_special_tokens, request.opening);
        let field = prompt.field();
        let tokens = self.tokens_with(prompt, special, opening, &request.variables())?;
        // A tokenizer may have more tokens than the model, and one id that the model does not have
        // would fail every job of its run.
        self.served().check_ids(field, &tokens)?;
        Ok(tokens)
    }

    fn tokens_with(
        &self,
        prompt: Prompt,
        special: bool,
        opening: bool,
        variables: &Map<String, Value>,
    ) -> Result<Vec<TokenId>, Refusal> {
        let field = prompt.field();
        let text = match prompt {
            Prompt::Ids(ids) => return Ok(ids),
            Prompt::Text(text) => text,
            Prompt::Messages(messages) => {
                let text = self.words.chat(messages, opening, variables);
                text.map_err(|error| invalid(field, error))?
            }
        };
        self.could_fit(&text, field)?;
        let tokens = self.words.encode(&text, special).map_err(|error| invalid(field, error))?;
        if tokens.is_empty() {
            return Err(invalid(field, "at least one token is needed"));
        }
        Ok(tokens)
    }

    /// Refuses a text that fits into no context before it is tokenized, which takes seconds and
    /// many times its memory.
    fn could_fit(&self, text: &str, field: &str) -> Result<(), Refusal> {
        let (bytes, most) = (text.len(), self.longest_text());
        if bytes <= most {
            return Ok(());
        }
        let limit = format!("maximum context length of {} tokens", self.engine.config().context);
        Err(invalid(field, format!("{bytes} bytes are more than the {most} of this model's {limit}")))
    }

    /// Length of the longest text that can fit into the context, bytes.
    fn longest_text(&self) -> usize {
        self.engine.config().context.saturating_mul(self.words.longest())
    }

    /// Number of tokens to generate after `prompt` tokens. A limit that does not fit the context is
    /// refused, not reduced.
    fn max_tokens(
        &self,
        request: &GenerateRequest,
        prompt: usize,
        param: &'static str,
    ) -> Result<usize, Refusal> {
        let remaining = self.engine.config().context.saturating_sub(prompt);
        let output = match (request.max_tokens, request.route) {
            (Some(output), _) => output,
            (None, Route::Completions) => MAX_TOKENS.min(remaining.max(1)),
            (None, Route::Chat) => remaining.max(1),
        };
        self.fits(prompt, output, param)?;
        Ok(output)
    }

    fn fits(&self, prompt: usize, output: usize, param: &'static str) -> Result<(), Refusal> {
        let (context, requested) = (self.engine.config().context, prompt.saturating_add(output));
        if requested > context {
            return Err(Refusal::TooLong { context, requested, prompt, output, param });
        }
        Ok(())
    }

    async fn verify(
        &self,
        request: wire::VerifyRequest,
        allowed: Option<Vec<Result<Next, String>>>,
    ) -> Result<Response<Body>, Refusal> {
        let (context, nodes) = (request.context.len(), request.tokens.len());
        self.fits(context, nodes, "context")?;
        let seed = request.sampling.seed.unwrap_or_else(|| self.fresh_seed());
        let (reply, result) = oneshot::channel();
        let job = Verify {
            sampler: self.sampler(&request.sampling, seed, 0, &request.stop_token_ids),
            allowed,
            context: request.context,
            generated: request.generated,
            tokens: request.tokens,
            parents: request.parents,
            listed: request.listed,
            propose: request.propose,
            reply,
        };
        self.engine.submit(vec![Job::Verify(Box::new(job))]);
        let verified = result.await.map_err(|_| Refusal::Fault("the model's thread has ended".to_owned()))?;
        let verified = verified.map_err(|why| failed(why, request.sampling.grammar.as_deref()))?;
        let reply = VerifyReply::new((&self.name, &self.mark), seed, context, &verified);
        let body = serde_json::to_vec(&reply).map_err(|error| Refusal::Fault(error.to_string()))?;
        Ok(buffered(StatusCode::OK, "application/json", body))
    }

    fn tokenize(&self, request: wire::TokenizeRequest) -> Result<Response<Body>, Refusal> {
        let tokens = match &request.prompt {
            Prompt::Text(text) if text.is_empty() => {
                self.words.encode("", request.add_special_tokens).map_err(|error| invalid("prompt", error))?
            }
            _ => {
                self.tokens_with(request.prompt, request.add_special_tokens, request.opening, &Map::new())?
            }
        };
        let spelled = || tokens.iter().map(|&id| self.words.spelling(id)).collect::<Vec<_>>();
        let strings = request.token_strings.then(spelled);
        let context = self.engine.config().context;
        Ok(ok_json(&json!({
            "count": tokens.len(), "max_model_len": context, "tokens": tokens, "token_strs": strings,
        })))
    }

    /// The text of ids: of as many as the longest text that is tokenized may have.
    fn detokenize(&self, body: &[u8]) -> Result<Response<Body>, Refusal> {
        let tokens = wire::detokenize(body, self.served())?;
        let (count, most) = (tokens.len(), self.longest_text());
        if count > most {
            return Err(invalid("tokens", format!("at most {most} tokens, got {count}")));
        }
        Ok(ok_json(&json!({"prompt": self.words.decode(&tokens, true)})))
    }

    /// The ids of a chat's prompt, in the form of vLLM's page; nothing constrains the sampling
    /// here.
    fn render(&self, mut request: GenerateRequest) -> Result<Response<Body>, Refusal> {
        let prompt = request.prompts.pop().ok_or(Refusal::Missing("messages"))?;
        let tokens = self.tokens(prompt, &request)?;
        Ok(ok_json(&json!({"token_ids": tokens, "sampling_params": {}})))
    }

    /// A complete output parsed into the message of an answer, in the form of vLLM's page.
    fn derender(&self, body: &[u8]) -> Result<Response<Body>, Refusal> {
        let read: Derender<'_> =
            serde_json::from_slice(body).map_err(|error| Refusal::NotJson(error.to_string()))?;
        let options = wire::chat(read.chat_request.get().as_bytes(), self.served())?.parse_options;
        let Generated { prompt_token_ids: prompt, choices } = read.generate_response;
        let choice = choices.into_iter().next().ok_or(Refusal::Missing("choices"))?;
        let parsing = self.parsing();
        let mut decoder = self.words.decoder(&prompt, parsing.decodes_special(&options));
        let mut pieces: Vec<(TokenId, String)> =
            choice.token_ids.iter().map(|&token| (token, decoder.push(token))).collect();
        if let Some((_, text)) = pieces.last_mut() {
            text.push_str(&decoder.flush());
        }
        let answer = parsing.buffered(&options, &prompt, &pieces);
        let message = reply::message(&answer, || self.id(Route::Chat));
        Ok(ok_json(&json!({"object": "chat.completion", "choices": [{"index": 0, "message": message}]})))
    }

    /// A random seed of 53 bits, which every JSON parser represents exactly.
    fn fresh_seed(&self) -> u64 {
        self.random.hash_one(("seed", self.count.fetch_add(1, Ordering::Relaxed))) >> 11
    }

    fn id(&self, route: Route) -> String {
        let prefix = match route {
            Route::Completions => "cmpl",
            Route::Chat => "chatcmpl",
        };
        let number = self.random.hash_one(("id", self.count.fetch_add(1, Ordering::Relaxed)));
        format!("{prefix}-{number:016x}")
    }
}

/// The answer as a stream, or buffered, as requested.
async fn answered(answer: Answer) -> Result<Response<Body>, Refusal> {
    if answer.request.stream {
        return Ok(stream_of(answer));
    }
    let grammar = answer.request.sampling.grammar.clone();
    match answer.buffered().await {
        Ok(body) => Ok(buffered(StatusCode::OK, "application/json", body)),
        Err(why) => Err(failed(why, grammar.as_deref())),
    }
}

/// The refusal of a job that failed: a grammar that needs too much is the client's.
fn failed(why: Failure, grammar: Option<&Grammar>) -> Refusal {
    match (why, grammar) {
        (Failure::Grammar(why), Some(grammar)) => invalid(grammar.parameter, why),
        (Failure::Grammar(why) | Failure::Run(why), _) => Refusal::Fault(why),
    }
}

/// The answer to a HEAD request: the same headers without a body. hyper drops the body itself,
/// calls within the process do not.
fn bodiless(mut response: Response<Body>) -> Response<Body> {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
    response.map(|_| Full::default().map_err(|never| match never {}).boxed_unsync())
}

async fn read(mut body: Body) -> Result<Bytes, Refusal> {
    if body.size_hint().lower() > BODY_MAX as u64 {
        return Err(Refusal::BodyTooLong(BODY_MAX));
    }
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Refusal::Unreadable(error.to_string()))?;
        let data = frame.into_data().unwrap_or_default();
        if read.len() + data.len() > BODY_MAX {
            return Err(Refusal::BodyTooLong(BODY_MAX));
        }
        read.extend_from_slice(&data);
    }
    Ok(read.into())
}

/// The answer as server-sent events, one per token. Dropping the body drops the answer and cancels
/// its jobs.
fn stream_of(answer: Answer) -> Response<Body> {
    let frames = stream::unfold(Some(answer), |answer| async move {
        let mut answer = answer?;
        loop {
            match answer.next().await {
                Some((index, ChoiceEvent::Step(step))) => {
                    if let Some(chunk) = answer.chunk(index, step) {
                        return Some((data(chunk), Some(answer)));
                    }
                }
                Some((_, ChoiceEvent::Prompt | ChoiceEvent::Over)) => {}
                Some((_, ChoiceEvent::Failed(why))) => {
                    let refusal = failed(why, answer.request.sampling.grammar.as_deref());
                    let error = String::from_utf8_lossy(&refusal.body()).into_owned();
                    return Some((data(format!("data: {error}\n\ndata: [DONE]\n\n")), None));
                }
                None => return Some((data(answer.last()), None)),
            }
        }
    });
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

#[allow(clippy::unnecessary_wraps)] // the item type of a body stream
fn data(text: String) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(Bytes::from(text)))
}

fn refuse(refusal: &Refusal) -> Response<Body> {
    buffered(refusal.status(), "application/json", refusal.body())
}

fn ok_json(value: &serde_json::Value) -> Response<Body> {
    buffered(StatusCode::OK, "application/json", value.to_string().into_bytes())
}

fn buffered(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Response<Body> {
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
