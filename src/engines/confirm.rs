//! Confirms by behaviour that a server takes its defaults from a model's `generation_config.json`,
//! where it does not report them (vLLM without `--enable-scale-out`).
//!
//! A field is confirmed by answers to one seed, alike in all other fields: with the file's value
//! spelled out, with wrong ones, and with the field unset. The wrong ones have to differ from the
//! first, else the seed decides nothing and the next one is tried; then the last has to equal the
//! first. Wrong values are one nearby, and the engine's default where the file has another: the
//! value of a server that does not read the file. The other fields are spelled out such that this
//! one decides much: truncation is tried on a flat distribution, penalties among a few tokens that
//! repeat. Each call asks for several choices of a few tokens.
//!
//! An end of the text is confirmed in the same way: as a stop token of the request, ignored, and
//! unset. The limit of an output is read from the refusal of a request for more tokens than fit: it
//! costs nothing.
//!
//! One disagreement is repeated on an idle server before it counts. Nothing is assumed: a field
//! that no seed decides is not confirmed.

use std::collections::{BTreeSet, HashMap};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::confirmation::{Confirmation, END_TOKENS, MAX_TOKENS};
use super::shared::bytes;
use super::{Call, Engine, MaxTokens, ModelDefaults};
use foretell_core::units::TokenId;
use foretell_wire::openai::{Defaults, GenerationConfig, Route, SamplingField as F};

/// Choices of a call, by attempt with another seed.
const CHOICES: [u32; 4] = [8, 16, 32, 64];
const TOKENS: u32 = 8;
/// Tokens of the prompt: fewer than a block, so that all answers are computed alike.
const PROMPT: usize = 12;
/// Tokens among which penalties are tried, half of them in the prompt.
const AMONG: usize = 16;
/// The bias that leaves no other token: the largest that the API allows.
const BIAS: i32 = 100;
/// The bias of the tokens among which penalties are tried: a repetition penalty scales logits, and
/// is felt by this much, but not so much that every value bars what it penalizes.
const RAISED: i32 = 10;
/// The temperature of a flat distribution: the highest that vLLM accepts.
const FLAT: f64 = 2.0;
/// Maximum number of ends that are tried.
const ENDS: usize = 4;
/// Maximum number of calls; about 30 are usual.
const CALLS: u32 = 60;

/// An answer to a call: its status and body; `None`: there was none.
pub type CallAnswer = Option<(u16, Vec<u8>)>;

/// The next thing to do.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfirmCall {
    pub call: Call,
    /// It decides a disagreement: wait until the server is idle. Where it does not become idle, the
    /// answer is taken as none.
    pub idle: bool,
}

/// One thing to be confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topic {
    Field(F),
    End(TokenId),
}

/// A form of the call about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// The file's value is spelled out.
    Spelled,
    /// Another value is spelled out: the one of this number.
    Wrong(usize),
    /// It is unset.
    Open,
}

#[derive(Clone, Debug, PartialEq)]
enum Content {
    /// The tokens of each choice, and whether it ended by itself.
    Sampled(Vec<(Vec<TokenId>, bool)>),
    Refused,
    None,
}

/// The consequence of the answers of one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Send(Form, bool),
    /// This seed decides nothing.
    Retry,
    Confirmed,
    Contradicted,
    Unconfirmed,
}

/// The questions about the limit of an output.
const LIMITS: usize = 3;

/// The confirmation under way.
#[derive(Debug)]
pub struct Confirmer {
    model: String,
    context: usize,
    config: GenerationConfig,
    seed: u32,
    prompt: Vec<TokenId>,
    among: Vec<TokenId>,
    topics: Vec<Topic>,
    topic: usize,
    attempt: usize,
    /// The answers of this attempt, in the order of [`follows`].
    answers: Vec<Content>,
    /// Answers to first calls by their bodies: several topics share some.
    known: HashMap<Vec<u8>, Content>,
    pending: Option<Vec<u8>>,
    limits: Vec<Option<u32>>,
    /// A chat was refused without naming a limit.
    refuses_chats: bool,
    found: Confirmation,
}

impl Confirmer {
    /// The test of this file's defaults; `None` where the engine never follows it, or reports the
    /// defaults itself. `text`: token ids of real text.
    pub fn of(engine: &Engine, config: &GenerationConfig, text: &[TokenId], seed: u64) -> Option<Self> {
        let model_defaults = engine.quirks().model_defaults;
        let follows = matches!(model_defaults, ModelDefaults::Confirmed { .. });
        let reports = engine.defaults.sampling.is_some() && engine.limits.chat != MaxTokens::Unknown;
        if reports || !follows {
            return None;
        }
        let config = config.clone();
        let config = if model_defaults.has_penalties(&engine.version) {
            config
        } else {
            config.without_output_penalties()
        };
        Some(Self::new(engine, config, text, seed))
    }

    /// `text`: token ids of real text.
    pub fn new(engine: &Engine, config: GenerationConfig, text: &[TokenId], seed: u64) -> Self {
        let ends: Vec<TokenId> = config.ends.iter().copied().take(ENDS).collect();
        let fit =
            |token: &TokenId| engine.tokens.special.binary_search(token).is_err() && !ends.contains(token);
        let text: Vec<TokenId> = text.iter().copied().filter(fit).collect();
        let prompt: Vec<TokenId> = text.iter().copied().take(PROMPT).collect();
        let of_prompt: BTreeSet<TokenId> = prompt.iter().copied().take(AMONG / 2).collect();
        let others: BTreeSet<TokenId> = text.iter().copied().filter(|id| !prompt.contains(id)).collect();
        let others = others.into_iter().take(AMONG - of_prompt.len());
        let fields = F::ALL.into_iter().map(Topic::Field);
        Self {
            model: engine.model.clone(),
            context: engine.context.unwrap_or_default(),
            config,
            // Clients' seeds are signed in some languages.
            seed: (seed >> 33) as u32,
            among: of_prompt.iter().copied().chain(others).collect(),
            prompt,
            topics: fields.chain(ends.into_iter().map(Topic::End)).collect(),
            topic: 0,
            attempt: 0,
            answers: Vec::new(),
            known: HashMap::new(),
            pending: None,
            limits: Vec::new(),
            refuses_chats: false,
            found: Confirmation::default(),
        }
    }

    /// The next call; `None`: all is decided, or the calls are used up.
    pub fn next_call(&mut self) -> Option<ConfirmCall> {
        if self.found.calls >= CALLS {
            return None;
        }
        if self.limits.len() < LIMITS {
            self.found.calls += 1;
            return Some(ConfirmCall { call: self.limit_call(self.limits.len()), idle: false });
        }
        while let Some(&topic) = self.topics.get(self.topic) {
            match follows(&self.answers, self.wrongs(topic)) {
                Next::Send(form, idle) => {
                    let call = self.call(topic, form);
                    let first = form == Form::Spelled && self.answers.is_empty();
                    if let Some(content) = self.known.get(&call.body)
                        && first
                    {
                        self.answers.push(content.clone());
                        continue;
                    }
                    self.pending = first.then(|| call.body.clone());
                    self.found.calls += 1;
                    return Some(ConfirmCall { call, idle });
                }
                Next::Retry => self.repeat(topic),
                Next::Confirmed => self.decide(|_| None, topic),
                Next::Contradicted => self.decide(|found| Some(&mut found.contradicted), topic),
                Next::Unconfirmed => self.decide(|found| Some(&mut found.unconfirmed), topic),
            }
        }
        None
    }

    /// Takes the answer to the last call.
    pub fn take(&mut self, answers: CallAnswer) {
        if self.limits.len() < LIMITS {
            let limit = answers.as_ref().and_then(|(_, body)| limit_in(body));
            let refused = matches!(answers, Some((400..=499, _))) && limit.is_none();
            self.refuses_chats |= refused && self.limits.is_empty();
            self.limits.push(limit);
            if self.limits.len() == LIMITS {
                self.decide_limit();
            }
            return;
        }
        let content = Content::of(answers);
        if let Some(body) = self.pending.take() {
            self.known.insert(body, content.clone());
        }
        self.answers.push(content);
    }

    pub fn end(mut self, engine: &mut Engine) {
        // The remaining topics are not decided.
        while let Some(&topic) = self.topics.get(self.topic) {
            self.decide(|found| Some(&mut found.unconfirmed), topic);
        }
        if self.limits.len() < LIMITS {
            self.found.unconfirmed.push(MAX_TOKENS);
        }
        engine.defaults.sampling = Some(self.config.defaults);
        let mut doubted = self.found.contradicted.iter().chain(&self.found.unconfirmed);
        let is_known = !self.refuses_chats && doubted.all(|name| *name != MAX_TOKENS);
        engine.limits.chat = match self.default_tokens() {
            _ if !is_known => MaxTokens::Unknown,
            tokens => tokens.map_or(MaxTokens::Context, MaxTokens::Tokens),
        };
        engine.limits.most =
            self.limits.get(2).copied().flatten().filter(|&most| (most as usize) < self.room());
        engine.defaults.confirmation = Some(self.found);
    }

    /// Number of wrong values that are tried.
    fn wrongs(&self, topic: Topic) -> usize {
        match topic {
            Topic::Field(field) => wrong(field, self.config.defaults.of(field)).into_iter().flatten().count(),
            Topic::End(_) => 1,
        }
    }

    fn repeat(&mut self, topic: Topic) {
        self.answers.clear();
        self.attempt += 1;
        // An end does not depend on the seed: another attempt gives the same.
        if self.attempt >= CHOICES.len() || matches!(topic, Topic::End(_)) {
            self.decide(|found| Some(&mut found.unconfirmed), topic);
        }
    }

    fn decide(&mut self, list: fn(&mut Confirmation) -> Option<&mut Vec<&'static str>>, topic: Topic) {
        let name = match topic {
            Topic::Field(field) => field.name(),
            Topic::End(_) => END_TOKENS,
        };
        if let Some(names) = list(&mut self.found)
            && !names.contains(&name)
        {
            names.push(name);
        }
        self.topic += 1;
        self.attempt = 0;
        self.answers.clear();
    }

    /// Tokens that fit behind a prompt of one.
    const fn room(&self) -> usize {
        self.context.saturating_sub(1)
    }

    /// A request for more tokens than fit, which is refused with its limit: a chat without one, a
    /// longer chat without one, and a completion up to the end of the context.
    fn limit_call(&self, number: usize) -> Call {
        let least = self.context.saturating_add(1);
        let (route, body) = match number {
            0 | 1 => {
                let text = ". ".repeat(1 + 32 * number);
                let chat = json!([{ "role": "user", "content": text }]);
                (Route::Chat, json!({ "model": self.model, "messages": chat, "min_tokens": least }))
            }
            _ => {
                let prompt = self.prompt.first().copied().unwrap_or_default();
                let body = json!({ "model": self.model, "prompt": [prompt], "max_tokens": self.room(),
                    "min_tokens": least });
                (Route::Completions, body)
            }
        };
        Call { path: route.path(), body: bytes(&body) }
    }

    /// The limit of chats without one; `None` if it is the end of the context, which a longer
    /// prompt shows.
    fn default_tokens(&self) -> Option<u32> {
        match self.limits.as_slice() {
            [Some(short), Some(long), ..] if short == long => Some(*short),
            _ => None,
        }
    }

    fn decide_limit(&mut self) {
        let [Some(short), Some(_), Some(_)] = self.limits[..] else {
            // A model without a chat template refuses chats for another reason.
            if !self.refuses_chats {
                self.found.unconfirmed.push(MAX_TOKENS);
            }
            return;
        };
        // A limit of the file that is not below the room of the context does not show.
        let agrees = match (self.default_tokens(), self.config.max_tokens) {
            (Some(value_of_file), Some(of_file)) => value_of_file == of_file,
            (None, Some(of_file)) => of_file >= short,
            (value_of_file, None) => value_of_file.is_none(),
        };
        if !agrees {
            self.found.contradicted.push(MAX_TOKENS);
        }
    }

    fn call(&self, topic: Topic, form: Form) -> Call {
        let mut body = Map::new();
        body.insert("model".into(), self.model.clone().into());
        body.insert("prompt".into(), self.prompt.clone().into());
        body.insert("return_token_ids".into(), true.into());
        body.insert("stream".into(), false.into());
        match topic {
            Topic::Field(field) => self.about_field(field, form, &mut body),
            Topic::End(end) => about_end(end, form, &mut body),
        }
        Call { path: Route::Completions.path(), body: bytes(&body) }
    }

    fn about_field(&self, field: F, form: Form, body: &mut Map<String, Value>) {
        let value_of_file = self.config.defaults.of(field);
        let among = matches!(field, F::PresencePenalty | F::FrequencyPenalty | F::RepetitionPenalty);
        let flat = matches!(field, F::TopP | F::TopK | F::MinP);
        for other in F::ALL.into_iter().filter(|other| *other != field) {
            let neutral = Defaults::OPENAI.of(other);
            let value = if other == F::Temperature && flat { FLAT } else { neutral };
            body.insert(other.name().into(), number(other, value));
        }
        let value = match form {
            Form::Spelled => Some(value_of_file),
            Form::Wrong(number) => wrong(field, value_of_file).into_iter().flatten().nth(number),
            Form::Open => None,
        };
        if let Some(value) = value {
            body.insert(field.name().into(), number(field, value));
        }
        // A greedy request has one choice.
        let greedy = field == F::Temperature && value_of_file == 0.0;
        let choices = CHOICES.get(self.attempt).copied().unwrap_or(1);
        body.insert("n".into(), if greedy { 1 } else { choices }.into());
        body.insert("max_tokens".into(), TOKENS.into());
        body.insert("ignore_eos".into(), true.into());
        body.insert("seed".into(), (u64::from(self.seed) + 1000 * self.attempt as u64).into());
        if among {
            let bias = self.among.iter().map(|id| (id.to_string(), json!(RAISED)));
            body.insert("logit_bias".into(), Value::Object(bias.collect()));
            body.insert("allowed_token_ids".into(), json!(self.among));
        }
    }
}

/// Values that the field does not have by the file: one nearby, and the engine's default.
fn wrong(field: F, value_of_file: f64) -> [Option<f64>; 2] {
    let neutral = Defaults::OPENAI.of(field);
    let near = match field {
        F::Temperature if value_of_file == 0.0 => 0.5,
        F::Temperature => value_of_file * 0.85,
        F::TopP if value_of_file > 0.5 => value_of_file - 0.1,
        F::TopP => value_of_file + 0.1,
        F::TopK if value_of_file == 0.0 => 20.0,
        F::TopK if value_of_file < 4.0 => value_of_file + 1.0,
        F::TopK => (value_of_file * 0.75).floor(),
        F::MinP if value_of_file < 0.5 => value_of_file * 1.5 + 0.02,
        F::MinP => value_of_file * 0.75,
        F::PresencePenalty if value_of_file < 1.0 => value_of_file + 0.5,
        F::PresencePenalty => value_of_file - 0.5,
        F::FrequencyPenalty if value_of_file < 1.0 => value_of_file + 0.3,
        F::FrequencyPenalty => value_of_file - 0.3,
        F::RepetitionPenalty => value_of_file * 1.04,
    };
    [Some(near), Some(neutral).filter(|neutral| (neutral - value_of_file).abs() > 0.0)]
}

fn number(field: F, value: f64) -> Value {
    match field {
        // vLLM's word for all tokens.
        F::TopK if value <= 0.0 => json!(-1),
        F::TopK => json!(value as u32),
        _ => json!(value),
    }
}

/// The token that may end the text is the only one, twice at most.
fn about_end(end: TokenId, form: Form, body: &mut Map<String, Value>) {
    body.insert("temperature".into(), 0.into());
    body.insert("repetition_penalty".into(), 1.into());
    body.insert("max_tokens".into(), 2.into());
    body.insert("logit_bias".into(), json!({ end.to_string(): BIAS }));
    match form {
        Form::Spelled => drop(body.insert("stop_token_ids".into(), json!([end]))),
        Form::Wrong(_) => drop(body.insert("ignore_eos".into(), true.into())),
        Form::Open => {}
    }
}

/// The consequence of the answers so far: spelled, this number of wrong ones, open, and where these
/// disagree spelled and open once more.
fn follows(answers: &[Content], wrongs: usize) -> Next {
    use Content as C;
    let Some((spelled, others)) = answers.split_first() else { return Next::Send(Form::Spelled, false) };
    let (controls, rest) = others.split_at(others.len().min(wrongs));
    let sampled = |content: &C| matches!(content, C::Sampled(_));
    if !sampled(spelled) || !controls.iter().all(sampled) {
        return Next::Unconfirmed;
    }
    if controls.contains(spelled) {
        return Next::Retry;
    }
    match rest {
        [] if controls.len() < wrongs => Next::Send(Form::Wrong(controls.len()), false),
        [] => Next::Send(Form::Open, false),
        [open] if open == spelled => Next::Confirmed,
        [C::None] => Next::Unconfirmed,
        [_] => Next::Send(Form::Spelled, true),
        // Its answers to one seed differ by themselves.
        [_, repeated] if repeated != spelled => Next::Unconfirmed,
        [_, _] => Next::Send(Form::Open, true),
        [_, _, open] if open == spelled => Next::Confirmed,
        [_, _, C::Sampled(_) | C::Refused] => Next::Contradicted,
        _ => Next::Unconfirmed,
    }
}

#[derive(Deserialize)]
struct Answered {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    token_ids: Vec<TokenId>,
    finish_reason: Option<String>,
}

impl Content {
    fn of(answers: CallAnswer) -> Self {
        match answers {
            Some((200, body)) => {
                serde_json::from_slice::<Answered>(&body).map_or(Self::None, |mut answered| {
                    answered.choices.sort_by_key(|choice| choice.index);
                    let choice =
                        |choice: Choice| (choice.token_ids, choice.finish_reason.as_deref() == Some("stop"));
                    Self::Sampled(answered.choices.into_iter().map(choice).collect())
                })
            }
            Some((400..=499, _)) => Self::Refused,
            _ => Self::None,
        }
    }
}

/// The limit that a refusal of too many `min_tokens` names (vLLM, `sampling_params.py`: "min_tokens
/// must be less than or equal to max_tokens=16, got 17.").
fn limit_in(body: &[u8]) -> Option<u32> {
    let body = std::str::from_utf8(body).ok().filter(|body| body.contains("min_tokens"))?;
    let (_, rest) = body.split_once("max_tokens=")?;
    rest.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests;
