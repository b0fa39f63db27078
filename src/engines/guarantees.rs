//! The requests that are speculated on, by engine and parameter: the page that operators read, made
//! by calling the same functions that judge requests.
//!
//! Each cell is one request with that parameter and an engine of which everything is known and
//! nothing is unusual. The answers of a real server may allow less; `foretell explain` shows the
//! result for a server and a request.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{Dialect, Engine, OutputParsing, PrefixCache, ServerDefaults, SpecialTokens, Usual};
use foretell_core::words::{PassthroughReason, VerifyMethod};
use foretell_wire::openai::parameters::{Field, Owner, TABLE, Treatment};
use foretell_wire::openai::{Defaults, Judgement, Route, judge};

/// The engines that can verify, each in its most common configuration.
fn engines() -> Vec<Engine> {
    let usual = |dialect: Dialect| {
        let Usual { methods, noise, continues_grammar } = dialect.quirks().usual?;
        Some(Engine {
            methods: methods.to_vec(),
            noise,
            context: Some(32_768),
            defaults: ServerDefaults { sampling: Some(Defaults::OPENAI), ..ServerDefaults::default() },
            slots: Some(16),
            cache: PrefixCache { reports_hits: true, works: Some(true), ..PrefixCache::default() },
            tokens: SpecialTokens { eos: Vec::new(), special: vec![0], may_end: vec![0] },
            continues_grammar,
            parsing: OutputParsing { unparsed: true, ..OutputParsing::default() },
            ..Engine::new(dialect, MODEL, "1")
        })
    };
    Dialect::ALL.into_iter().filter_map(usual).collect()
}

const MODEL: &str = "m";

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is eligible, by this verification method first.
    Speculates(VerifyMethod),
    Passthrough(PassthroughReason),
    /// It decodes plainly: the engine does not report the ids of its tokens.
    Plain,
}

impl Fate {
    fn of(engine: &Engine, route: Route, body: &Value) -> Self {
        let body = body.to_string().into_bytes();
        let request = match judge(route, &body) {
            Judgement::Eligible(request) => request,
            Judgement::Passthrough { reason, .. } => return Self::Passthrough(reason),
        };
        let (sampling, settled) = engine.sampling(&request);
        let methods = match engine.methods_for(&request, &sampling, settled) {
            Ok(methods) => methods,
            Err(refused) => return Self::Passthrough(refused.reason),
        };
        if !engine.reports_ids(&request) {
            return Self::Plain;
        }
        match methods.first().copied() {
            Some(method) => Self::Speculates(method),
            None if settled => Self::Passthrough(PassthroughReason::NoVerifyMethod),
            None => Self::Passthrough(PassthroughReason::DefaultsUnknown),
        }
    }

    fn label(self) -> String {
        match self {
            Self::Speculates(method) => method.name().to_owned(),
            Self::Passthrough(reason) => format!("– {}", reason.name()),
            Self::Plain => "plain".to_owned(),
        }
    }
}

/// A request that sets every field whose default some engine does not report.
fn plain(route: Route, temperature: f64) -> Map<String, Value> {
    let mut body = json!({
        "model": MODEL,
        "max_tokens": 64,
        "stream": true,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    });
    let (name, value) = match route {
        Route::Completions => ("prompt", json!("Once upon a time")),
        Route::Chat => ("messages", json!([{ "role": "user", "content": "hello" }])),
    };
    if let Some(body) = body.as_object_mut() {
        body.insert(name.to_owned(), value);
    }
    match body {
        Value::Object(body) => body,
        _ => Map::new(),
    }
}

/// A value of a carried parameter that changes something; `None` for those that every request has.
fn sample(field: Field) -> Option<Value> {
    Some(match field {
        Field::Model
        | Field::Prompt
        | Field::Messages
        | Field::MaxTokens
        | Field::Temperature
        | Field::Stream
        | Field::MaxCompletionTokens => return None,
        Field::TopP => json!(0.9),
        Field::TopK => json!(10),
        Field::MinP => json!(0.05),
        Field::PresencePenalty | Field::FrequencyPenalty => json!(0.5),
        Field::RepetitionPenalty => json!(1.1),
        Field::LogitBias => json!({ "100": 2.0 }),
        Field::Seed => json!(7),
        Field::Stop => json!(["END"]),
        Field::StopTokenIds => json!([100]),
        Field::IncludeStop
        | Field::IgnoreEos
        | Field::IncludeUsage
        | Field::ContinuousUsage
        | Field::ReturnTokenIds => json!(true),
        Field::MinTokens => json!(4),
        Field::StreamOptions => json!({ "include_usage": true }),
        Field::Prediction => json!({ "type": "content", "content": "hello there" }),
        Field::Choices => json!(2),
        Field::Tools => json!([{ "type": "function", "function": { "name": "f" } }]),
        Field::ToolChoice => json!("auto"),
        Field::ParallelToolCalls => json!(false),
        Field::ResponseFormat => json!({ "type": "json_object" }),
        Field::StructuredOutputs => json!({ "json_object": true }),
    })
}

fn with(route: Route, temperature: f64, name: &str, value: Value) -> Value {
    let mut body = plain(route, temperature);
    body.insert(name.to_owned(), value);
    Value::Object(body)
}

/// The same at temperature 0 and 0.8, shortened where both are the same.
fn cell(engine: &Engine, body: impl Fn(f64) -> Value, route: Route) -> String {
    let [greedy, drawn] = [0.0, 0.8].map(|temperature| Fate::of(engine, route, &body(temperature)));
    if greedy == drawn { greedy.label() } else { format!("{} / {}", greedy.label(), drawn.label()) }
}

fn line(text: &mut String, head: &str, route: Route, body: impl Fn(f64) -> Value) {
    let _ = write!(text, "| {head} |");
    for engine in engines() {
        let _ = write!(text, " {} |", cell(&engine, &body, route));
    }
    text.push('\n');
}

/// The page, as Markdown.
pub fn reference() -> String {
    let mut text = String::from(HEAD);
    text.push_str("\n## Carried parameters\n\n| request |");
    for engine in engines() {
        let _ = write!(text, " {} |", engine.dialect.name());
    }
    let _ = writeln!(text, "\n|---|{}", "---|".repeat(engines().len()));
    for (route, name) in [(Route::Completions, "completions"), (Route::Chat, "chat")] {
        line(&mut text, &format!("**{name}**, plain"), route, |bucket| Value::Object(plain(route, bucket)));
        for row in TABLE.iter().filter(|row| row.routes.has(route)) {
            let (Treatment::Carried(field) | Treatment::Emulated(field)) = row.treatment else { continue };
            if row.name.contains('.') {
                continue;
            }
            let Some(value) = sample(field) else { continue };
            line(&mut text, &format!("{name}, `{}`", row.name), route, |bucket| {
                with(route, bucket, row.name, value.clone())
            });
        }
    }
    text.push_str(OTHERS);
    for row in TABLE {
        let treatment = match row.treatment {
            Treatment::Carried(_) | Treatment::Emulated(_) => continue,
            Treatment::Inert => "passed on; it does not change the output".to_owned(),
            Treatment::Neutral(values, reason) => {
                let values: Vec<String> =
                    values.iter().map(|value| format!("`{}`", value.to_json_text())).collect();
                format!("speculated on at {}, else – {}", values.join(", "), reason.name())
            }
            Treatment::Rendered(reason) => {
                format!("where the engine renders the request; else – {}", reason.name())
            }
            Treatment::Passthrough(reason) => format!("– {}", reason.name()),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {treatment} |",
            row.name,
            row.routes.names(),
            owner(row.owner)
        );
    }
    text
}

const fn owner(owner: Owner) -> &'static str {
    match owner {
        Owner::OpenAi => "OpenAI",
        Owner::Vllm => "vLLM, SGLang and others",
        Owner::Sglang => "SGLang",
        Owner::LlamaCpp => "llama.cpp",
    }
}

const HEAD: &str = "\
# Guarantees, by engine and parameter

Written by `foretell check --guarantees`: each cell is the result of the functions that judge requests for one request;
a test compares this page with the program. The answers of a real server may allow less; `foretell explain --request F`
shows the result for your server and your request.

**Speculation never changes what a client gets, by the default rule.** At temperature 0 the text is the engine's, up
to the last bits of its kernels at other batch shapes. Above it, without a seed, every token is the engine's sample
at its position, so the distribution is the engine's. With a seed a request is speculated on only where the engine's
noise is a function of the seed and the position (`onnx`; vLLM where the probe has seen it): then the text is identical;
elsewhere it is passed through. A policy may choose a lossy rule: then the distribution of outputs is within the mean
drift of outputs of the engine's in total variation (and within `max_drift`, if it is set), and each answer
reports its drift, for example 0.08 of at most 0.20; that figure of a single answer is no guarantee.

An answer never holds tokens of two models: a request that is speculated on keeps to the process that it began on, and
ends with an error where another one answers at the address ([faults](fleet.md#faults-of-an-engine)).

**A request that is not speculated on passes as it is.** A request that will not be speculated on (`mode: observe` and
`off`, policies `shadow`, `plain` and `off`, `x-foretell: plain`, a passthrough request, a server that speculates
itself) leaves and returns byte for byte. In `auto` a request may be sent as a stream, with usage and token ids; what
that adds is cut out of the bytes of its answer, and a JSON answer is built back with the engine's fields; a chat
with SGLang may be requested in two parts ([how](engines.md#sglang)), whose events are written here. `usage.foretell` is
in speculated answers only. Not known of a speculated answer of a vLLM without its abort call (before 0.32, or without
`--enable-scale-out`), or of an SGLang with `--enable-cache-report`: `prompt_tokens_details`, which they report at the
end of their streams only; it is null there.

In a cell, `score`, `fan_out` or `tree` is the verification method; `–` means that the request is passed through as it
is, with the reason; `plain`: it decodes plainly, because the engine does not report the ids of its tokens there. Two
entries are temperature 0 / 0.8. The engines have their metrics on, prefix caching on, everything known of their
defaults, and, for vLLM, the token endpoint (`--enable-scale-out`, 0.15 to 0.33; without it `fan_out` stands for
`score`). Other servers are passed through: TensorRT-LLM, Triton, LMDeploy, TGI, Ollama, mlx-lm and hosted services.
";

const OTHERS: &str = "
## Other parameters

On every engine. A request with a parameter that is not in this list is passed through (`unknown_parameter`): passed on,
never dropped.

| parameter | routes | API | how the request is served |
|---|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Noise, Pages};
    use foretell_parsers::parse::{Parsers, ToolFormat};

    #[test]
    fn a_plain_greedy_completion_is_speculated_on_by_every_engine() {
        for engine in engines() {
            let fate = Fate::of(&engine, Route::Completions, &Value::Object(plain(Route::Completions, 0.0)));
            assert!(matches!(fate, Fate::Speculates(_)), "{:?}: {fate:?}", engine.dialect);
        }
    }

    #[test]
    fn an_output_that_is_bound_is_left_to_every_engine_that_does_not_continue_grammars() {
        let tool = |strict: bool| json!([{"type": "function", "function": {"name": "f", "strict": strict}}]);
        let named = json!({"type": "function", "function": {"name": "f"}});
        let bound = [
            json!({"response_format": {"type": "json_object"}}),
            json!({"structured_outputs": {"regex": "a"}}),
            json!({"tools": tool(false), "tool_choice": "required"}),
            json!({"tools": tool(false), "tool_choice": named}),
            json!({"tools": tool(true)}),
        ];
        let parsers = Parsers { tools: Some(ToolFormat::Hermes), reasoning: None };
        for engine in engines() {
            let pages = Pages { renders: true, derenders: true, ..engine.pages };
            let engine = Engine { pages, parsing: OutputParsing { parsers, ..engine.parsing }, ..engine };
            for (more, stream) in bound.iter().flat_map(|more| [(more, false), (more, true)]) {
                let mut body = plain(Route::Chat, 0.0);
                body.insert("stream".to_owned(), json!(stream));
                body.extend(more.as_object().unwrap().clone());
                let fate = Fate::of(&engine, Route::Chat, &Value::Object(body));
                let passthrough = fate == Fate::Passthrough(PassthroughReason::Structured);
                assert_eq!(passthrough, !engine.continues_grammar, "{:?} {more}: {fate:?}", engine.dialect);
            }
        }
    }

    #[test]
    fn a_seed_above_temperature_0_needs_noise_that_does_not_restart_with_a_call() {
        for engine in engines() {
            let fate =
                Fate::of(&engine, Route::Completions, &with(Route::Completions, 0.8, "seed", json!(7)));
            assert_eq!(
                matches!(fate, Fate::Speculates(_)),
                engine.noise != Noise::Call,
                "{:?}",
                engine.dialect
            );
        }
    }
}
