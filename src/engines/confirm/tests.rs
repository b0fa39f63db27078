use super::*;
use crate::{Dialect, SpecialTokens};
use foretell_wire::openai::{Sampling, SetFields};

const CONTEXT: usize = 4096;
const FILE: &str = r#"{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
    "presence_penalty": 1.5, "frequency_penalty": 0.2, "max_new_tokens": 512, "eos_token_id": [3, 4]}"#;

/// A server whose tokens are a function of all fields of a request.
struct Server {
    defaults: Defaults,
    max_tokens: Option<u32>,
    /// A limit that requests cannot raise.
    cap: Option<u32>,
    ends: Vec<TokenId>,
    chats: bool,
    /// Fields that change nothing.
    deaf: Vec<F>,
    /// Numbers of calls whose answers are another server's, or fail.
    odd: Vec<usize>,
    silent: Vec<usize>,
    calls: usize,
}

impl Server {
    fn of(file: &str) -> Self {
        let GenerationConfig { defaults, max_tokens, ends } = config(file);
        Self {
            defaults,
            max_tokens,
            ends,
            cap: None,
            chats: true,
            deaf: Vec::new(),
            odd: Vec::new(),
            silent: Vec::new(),
            calls: 0,
        }
    }

    fn answer(&mut self, call: &Call) -> CallAnswer {
        self.calls += 1;
        if self.silent.contains(&self.calls) {
            return None;
        }
        let body: Value = serde_json::from_slice(&call.body).unwrap();
        if let Some(least) = body["min_tokens"].as_u64() {
            let refused = !self.chats && body["messages"].is_array();
            let message = if refused { "no chat template".to_owned() } else { self.refusal(&body, least) };
            return Some((400, message.into_bytes()));
        }
        let of = |field: &F| {
            let value = body[field.name()].as_f64().unwrap_or_else(|| self.defaults.of(*field));
            if self.deaf.contains(field) { 0.0 } else { value.max(0.0) }
        };
        let fields: Vec<f64> = F::ALL.iter().map(of).collect();
        let temperature = fields[0];
        let n = body["n"].as_u64().unwrap_or(1);
        if n > 1 && temperature == 0.0 {
            return Some((400, b"n must be 1 when using greedy sampling".to_vec()));
        }
        let bias = body["logit_bias"].as_object().filter(|bias| bias.len() == 1);
        let choice = |index: u64| {
            if let Some(bias) = bias {
                return self.ended(bias.keys().next().unwrap().parse().unwrap(), &body);
            }
            let text = format!("{fields:?} {} {index} {}", body["seed"], self.odd.contains(&self.calls));
            let tokens =
                text.bytes().fold(7_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
            json!({ "index": index, "token_ids": [tokens], "finish_reason": "length" })
        };
        // In another order than that of their numbers.
        let choices: Vec<Value> = (0..n).rev().map(choice).collect();
        Some((200, json!({ "choices": choices }).to_string().into_bytes()))
    }

    fn ended(&self, token: TokenId, body: &Value) -> Value {
        let named = body["stop_token_ids"].as_array().is_some_and(|ids| ids.contains(&json!(token)));
        let own = self.ends.contains(&token) && body["ignore_eos"] != true;
        let (times, reason) = if named || own { (1, "stop") } else { (2, "length") };
        json!({ "index": 0, "token_ids": vec![token; times], "finish_reason": reason })
    }

    fn refusal(&self, body: &Value, least: u64) -> String {
        let asked = body["max_tokens"].as_u64().map(|asked| asked as u32);
        let chat = body["messages"][0]["content"].as_str().map_or(1, |text| 4 + text.len());
        let room = (CONTEXT - chat) as u32;
        let most = asked.or(self.max_tokens).unwrap_or(room).min(room).min(self.cap.unwrap_or(room));
        json!({"error": {"message": format!("min_tokens must be less than or equal to max_tokens={most}, got {least}.")}}).to_string()
    }
}

fn config(file: &str) -> GenerationConfig {
    GenerationConfig::read(file.as_bytes()).unwrap()
}

fn engine() -> Engine {
    Engine {
        context: Some(CONTEXT),
        tokens: SpecialTokens { special: vec![0, 1], ..SpecialTokens::default() },
        ..Engine::new(Dialect::Vllm, "m", "0.32.0")
    }
}

fn confirmed_idle(file: &str, server: &mut Server, idle: bool) -> Engine {
    let text: Vec<TokenId> = (0..200).map(|at| at * 7 % 101).collect();
    let mut engine = engine();
    let mut confirmer = Confirmer::new(&engine, config(file), &text, u64::MAX / 3);
    while let Some(asked) = confirmer.next_call() {
        let heard = if asked.idle && !idle { None } else { server.answer(&asked.call) };
        confirmer.take(heard);
    }
    confirmer.end(&mut engine);
    engine
}

fn confirmed(file: &str, server: &mut Server) -> Engine {
    confirmed_idle(file, server, true)
}

fn doubts(engine: &Engine) -> (Vec<&'static str>, Vec<&'static str>) {
    let found = engine.defaults.confirmation.clone().unwrap();
    (found.contradicted, found.unconfirmed)
}

#[test]
fn a_server_that_follows_the_file_is_confirmed_in_few_calls() {
    for file in [FILE, "{}", r#"{"temperature": 0}"#] {
        let mut server = Server::of(file);
        let engine = confirmed(file, &mut server);
        assert_eq!(doubts(&engine), (vec![], vec![]), "{file}");
        assert_eq!(engine.defaults.sampling, Some(config(file).defaults));
        assert_eq!(engine.limits.chat, config(file).max_tokens.map_or(MaxTokens::Context, MaxTokens::Tokens));
        assert_eq!(engine.limits.most, None);
        let calls = engine.defaults.confirmation.as_ref().unwrap().calls as usize;
        assert!(calls == server.calls && calls <= LIMITS + 4 * F::ALL.len() + 3 * 2, "{calls} calls");
        assert_eq!(engine.defaults.confirmation.as_ref().unwrap().problem(), None);
    }
}

/// Each field of the file by itself, and those of a server without a file.
#[test]
fn every_field_that_the_server_does_not_follow_is_named() {
    let names: Vec<&str> = F::ALL.into_iter().map(F::name).collect();
    for (at, field) in F::ALL.into_iter().enumerate() {
        let mut server = Server::of(FILE);
        let plain = Defaults::OPENAI;
        let own = &mut server.defaults;
        match field {
            F::Temperature => own.temperature = plain.temperature,
            F::TopP => own.top_p = plain.top_p,
            F::TopK => own.top_k = plain.top_k,
            F::MinP => own.min_p = plain.min_p,
            F::PresencePenalty => own.presence_penalty = plain.presence_penalty,
            F::FrequencyPenalty => own.frequency_penalty = plain.frequency_penalty,
            F::RepetitionPenalty => own.repetition_penalty = plain.repetition_penalty,
        }
        let engine = confirmed(FILE, &mut server);
        assert_eq!(doubts(&engine), (vec![names[at]], vec![]));
        let problem = engine.defaults.confirmation.unwrap().problem().unwrap();
        assert!(problem.contains(names[at]) && problem.contains("--enable-scale-out"), "{problem}");
        let mut server = Server::of(FILE);
        server.defaults.temperature = 0.0;
        assert_eq!(doubts(&confirmed(FILE, &mut server)).0, ["temperature"], "a refusal is another answer");
    }
    let (file, none) = (confirmed("{}", &mut Server::of(FILE)), confirmed(FILE, &mut Server::of("{}")));
    let all: Vec<&str> = std::iter::once(MAX_TOKENS).chain(names.iter().copied()).collect();
    assert_eq!(doubts(&file).0, all);
    assert_eq!(doubts(&none).0, [&all[..], &[END_TOKENS]].concat());
}

#[test]
fn the_limit_is_read_from_refusals() {
    let with = |file: &str, max_tokens, cap| {
        let mut server = Server { max_tokens, cap, ..Server::of("{}") };
        let engine = confirmed(file, &mut server);
        (engine.limits.chat, engine.limits.most)
    };
    assert_eq!(with(r#"{"max_new_tokens": 9000}"#, Some(9000), None), (MaxTokens::Context, None));
    assert_eq!(with(r#"{"max_new_tokens": 20}"#, Some(20), None), (MaxTokens::Tokens(20), None));
    assert_eq!(with(r#"{"max_new_tokens": 20}"#, Some(20), Some(20)), (MaxTokens::Tokens(20), Some(20)));
    assert_eq!(with(r#"{"max_new_tokens": 20}"#, Some(30), None), (MaxTokens::Unknown, None));
    assert_eq!(with(r#"{"max_new_tokens": 20}"#, None, None), (MaxTokens::Unknown, None));
    assert_eq!(with("{}", Some(30), None), (MaxTokens::Unknown, None));
    let mut server = Server { silent: vec![2], ..Server::of("{}") };
    let engine = confirmed("{}", &mut server);
    assert_eq!((engine.limits.chat, doubts(&engine)), (MaxTokens::Unknown, (vec![], vec![MAX_TOKENS])));
    let mut server = Server { chats: false, ..Server::of("{}") };
    let engine = confirmed("{}", &mut server);
    assert_eq!(
        (engine.limits.chat, doubts(&engine)),
        (MaxTokens::Unknown, (vec![], vec![])),
        "a model without chats"
    );
}

#[test]
fn one_disagreement_is_repeated_on_an_idle_server() {
    // The fourth call after those for the limit leaves the temperature open.
    let open = LIMITS + 4;
    let mut server = Server { odd: vec![open], ..Server::of(FILE) };
    assert_eq!(doubts(&confirmed(FILE, &mut server)), (vec![], vec![]));
    let mut server = Server { odd: vec![open], ..Server::of(FILE) };
    assert_eq!(doubts(&confirmed_idle(FILE, &mut server, false)), (vec![], vec!["temperature"]));
    let mut server = Server { odd: vec![open, open + 1], ..Server::of(FILE) };
    assert_eq!(doubts(&confirmed(FILE, &mut server)), (vec![], vec!["temperature"]), "one seed, two answers");
    let mut server = Server { odd: vec![open, open + 2], ..Server::of(FILE) };
    assert_eq!(doubts(&confirmed(FILE, &mut server)), (vec!["temperature"], vec![]));
}

#[test]
fn a_field_that_no_seed_decides_is_not_confirmed() {
    let mut server = Server { deaf: vec![F::TopP, F::PresencePenalty], ..Server::of(FILE) };
    let mut none = Server { deaf: F::ALL[1..].to_vec(), ..Server::of(FILE) };
    assert_eq!(doubts(&confirmed(FILE, &mut none)).1.len(), F::ALL.len(), "the second end is not reached");
    assert_eq!(none.calls, CALLS as usize);
    let engine = confirmed(FILE, &mut server);
    assert_eq!(doubts(&engine), (vec![], vec!["top_p", "presence_penalty"]));
    let doubted = |set: &[F], temperature| {
        let set_by_client = set.iter().fold(SetFields::default(), |set, field| set.with(*field));
        let sampling = Sampling { temperature, set_by_client, ..Sampling::default() };
        engine.defaults.confirmation.as_ref().unwrap().doubted(&sampling)
    };
    assert_eq!(doubted(&[], 1.0), Some("top_p"));
    assert_eq!(doubted(&[F::TopP], 1.0), Some("presence_penalty"));
    assert_eq!(doubted(&[F::TopP, F::PresencePenalty], 1.0), None);
    assert_eq!(doubted(&[F::Temperature, F::PresencePenalty], 0.0), None, "a greedy choice is not truncated");
}

#[test]
fn what_was_not_asked_is_not_confirmed() {
    let mut engine = engine();
    let mut confirmer = Confirmer::new(&engine, config(FILE), &[5, 6, 7], 1);
    assert!(confirmer.next_call().is_some());
    confirmer.end(&mut engine);
    let found = engine.defaults.confirmation.clone().unwrap();
    assert_eq!((found.contradicted.len(), found.unconfirmed.len()), (0, F::ALL.len() + 2));
    assert!(engine.limits.chat == MaxTokens::Unknown && found.problem().is_some());
}
