//! Code for engines with vLLM's form of OpenAI's completions: prompts of token ids, token ids in
//! the answers, one choice per prompt.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::body::Body;
use super::{Call, Chunk, Context, PromptStep, RequestKind, Round, Unreadable, VerifyRequest};
use foretell_core::draft::Tree;
use foretell_core::units::TokenId;
use foretell_core::words::{Row, VerifyResult};
use foretell_wire::openai::event::{Event, finish};
pub use foretell_wire::openai::fields::ids;
use foretell_wire::openai::{Request, Route, STRUCTURED_OUTPUTS, Sampling, SamplingField as F, UsageText};

/// Maximum output tokens of a completion whose client sets no limit.
pub const COMPLETION_TOKENS: u32 = 16;
/// Maximum tokens of a block that is believed.
const MAX_BLOCK: usize = 1 << 16;
const COMPLETIONS: &str = Route::Completions.path();
const ABORT: &str = "/inference/v1/abort_requests";
/// The page on which engines tokenize a text.
pub const TOKENIZE: &str = "/tokenize";
/// The page on which vLLM renders a completion request.
pub const RENDER: &str = "/v1/completions/render";
/// The page on which vLLM renders a chat request.
pub const CHAT_RENDER: &str = "/v1/chat/completions/render";
/// The page on which vLLM parses a complete output.
pub const CHAT_DERENDER: &str = "/v1/chat/completions/derender";

/// Serialises to JSON. Strings, numbers and maps cannot fail; an empty body would be refused by the
/// backend, and the request would go on plainly.
pub fn bytes(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).unwrap_or_default()
}

/// A completion of token ids: one sequence for each path that may follow the context.
struct Completion<'a> {
    context: &'a Context<'a>,
    paths: &'a [Vec<TokenId>],
    max_tokens: u32,
    stream: bool,
    fields: &'a Map<String, Value>,
}

impl Completion<'_> {
    fn call(&self) -> Call {
        let ids = self.context.ids();
        let body = Body::around(&ids, self.paths.len())
            .put("model", self.context.model)
            .lists("prompt", &ids, self.paths)
            .put("max_tokens", self.max_tokens)
            .put("stream", self.stream)
            .all(self.fields);
        Call { path: COMPLETIONS, body: body.end() }
    }
}

/// A plain request from the complete context; `fields` is everything but prompt and length.
pub fn plain_request(context: &Context<'_>, max_tokens: u32, fields: &Map<String, Value>) -> Call {
    Completion { context, paths: &[Vec::new()], max_tokens, stream: true, fields }.call()
}

/// A round in one call: a token after the context and one after each node, for as many nodes as fit
/// into `most` prompts.
pub fn fan_out(round: &Round<'_>, most: usize, fields: &Map<String, Value>) -> VerifyRequest {
    let nodes = round.draft.len().min(most.saturating_sub(1));
    let paths = paths(round.draft, nodes);
    let call = Completion { context: &round.context, paths: &paths, max_tokens: 1, stream: false, fields };
    VerifyRequest::one(call.call(), nodes)
}

/// The answer to a round of one call.
///
/// # Errors
/// There is not exactly one answer.
pub fn only(bodies: &[Vec<u8>]) -> Result<&[u8], Unreadable> {
    match bodies {
        [body] => Ok(body),
        _ => Err(Unreadable("not one answer")),
    }
}

/// The tokens after the context in the prompts of a fan-out: entry 0 is empty, entry `i + 1` is the
/// path of node `i`.
pub fn paths(draft: &Tree, nodes: usize) -> Vec<Vec<TokenId>> {
    let nodes = (0..nodes.min(draft.len())).map(|node| draft.path(node));
    std::iter::once(Vec::new()).chain(nodes).collect()
}

/// Number of nodes that can be decided from log-probabilities: the chain at the draft's head, up to
/// a token that is no text.
pub fn text_stem(may_end: &[TokenId], draft: &Tree) -> usize {
    let nodes = draft.nodes().iter().take(draft.stem());
    nodes.take_while(|node| !may_end.contains(&node.token)).count()
}

/// The sampling fields that differ from OpenAI's defaults, for an engine that has no others.
/// `temperature` is always sent.
pub fn non_default_fields(sampling: &Sampling) -> Map<String, Value> {
    fields(sampling, |field, is_default| field == F::Temperature || !is_default)
}

/// Exactly the sampling fields that the client has set, so that the server fills in its defaults as
/// it does for the client.
pub fn client_fields(sampling: &Sampling) -> Map<String, Value> {
    fields(sampling, |field, _| sampling.set_by_client.has(field))
}

/// The fields with a default that `sends` selects (with true for OpenAI's default),
/// and all that have none.
fn fields(sampling: &Sampling, sends: impl Fn(F, bool) -> bool) -> Map<String, Value> {
    let plain = Sampling::default();
    #[expect(clippy::float_cmp, reason = "only the very default may be omitted")]
    let number = |field, value: f64, plain: f64| (field, Value::from(value), value == plain);
    let all = [
        number(F::Temperature, sampling.temperature, plain.temperature),
        number(F::TopP, sampling.top_p, plain.top_p),
        (F::TopK, sampling.top_k.map_or(json!(-1), Value::from), sampling.top_k.is_none()),
        number(F::MinP, sampling.min_p, plain.min_p),
        number(F::PresencePenalty, sampling.presence_penalty, plain.presence_penalty),
        number(F::FrequencyPenalty, sampling.frequency_penalty, plain.frequency_penalty),
        number(F::RepetitionPenalty, sampling.repetition_penalty, plain.repetition_penalty),
    ];
    let sent = all.into_iter().filter(|(field, _, is_default)| sends(*field, *is_default));
    let mut fields = sent.map(|(field, value, _)| (field.name().to_owned(), value)).collect();
    put_rest(sampling, &mut fields);
    fields
}

/// As [`client_fields`], and asks for the ids of the sampled tokens.
pub fn client_fields_with_ids(sampling: &Sampling) -> Map<String, Value> {
    let mut fields = client_fields(sampling);
    request_token_ids(&mut fields);
    fields
}

/// Asks for the ids of the sampled tokens.
pub fn request_token_ids(fields: &mut Map<String, Value>) {
    fields.insert("return_token_ids".into(), true.into());
}

/// Fields for which no server has a default. `ignore_eos` is sent too: the session decides where
/// the output ends, but a plain request must end by the same rule.
fn put_rest(sampling: &Sampling, fields: &mut Map<String, Value>) {
    let bias: Map<String, Value> =
        sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), (*bias).into())).collect();
    if !bias.is_empty() {
        fields.insert("logit_bias".into(), bias.into());
    }
    if let Some(seed) = sampling.seed {
        fields.insert("seed".into(), seed.into());
    }
    if sampling.min_tokens > 0 {
        fields.insert("min_tokens".into(), sampling.min_tokens.into());
    }
    if sampling.ignore_eos {
        fields.insert("ignore_eos".into(), true.into());
    }
    if let Some(grammar) = &sampling.grammar {
        fields.insert(STRUCTURED_OUTPUTS.into(), grammar.to_json());
    }
}

/// One event of a streamed completion or chat completion with token ids.
///
/// # Errors
/// It carries an error, or choices of another form.
pub fn chunk(event: &Event) -> Result<Chunk, Unreadable> {
    chunk_named(event, "token_ids")
}

/// As [`chunk`], where the choices of a chat may have another name for their token ids.
///
/// # Errors
/// It carries an error, or choices of another form.
pub fn chunk_named(event: &Event, ids_name: &str) -> Result<Chunk, Unreadable> {
    if event.error().is_some() {
        return Err(Unreadable("the stream carries an error"));
    }
    if event.is_malformed() {
        return Err(Unreadable("its choices are no list of choices"));
    }
    let mut chunk = Chunk { usage: event.usage().map(UsageText::of), ..Chunk::default() };
    let Some(choice) = event.choice() else { return Ok(chunk) };
    chunk.text = event.text();
    let name = [ids_name, "token_ids"].into_iter().find(|name| choice.member(name).is_some());
    chunk.tokens = name.and_then(|name| choice.read(name)).unwrap_or_default();
    chunk.prompt = [choice, event.top()].into_iter().find_map(|object| object.read("prompt_token_ids"));
    chunk.finish = finish(choice);
    let value = |text: &str| serde_json::from_str(text).unwrap_or_default();
    chunk.more = event.others().map(|(name, text)| (name.to_owned(), value(text))).collect();
    chunk.doubtful = !chunk.text.is_empty() && name.is_none() || event.choices().len() > 1;
    Ok(chunk)
}

/// True if `stop` means that a token ended this request: a later plain request does not send the
/// client's stop texts.
pub fn ended(kind: RequestKind, chunk: &Chunk) -> bool {
    kind == RequestKind::Later && chunk.finish.as_deref() == Some("stop")
}

/// The part of a completion's `usage` that counts the tokens of its prompts.
#[derive(Deserialize)]
pub struct PromptUsage {
    prompt_tokens: u32,
    prompt_tokens_details: Option<CachedTokens>,
}

#[derive(Deserialize)]
struct CachedTokens {
    cached_tokens: Option<u32>,
}

impl PromptUsage {
    /// Tokens of the prompts that were computed; `None` if the server does not report how many were
    /// cached.
    pub fn computed(&self) -> Option<u32> {
        Some(self.prompt_tokens.saturating_sub(self.cached()?))
    }

    /// Tokens of the prompts that were cached; `None` if the server does not report that.
    pub fn cached(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.cached_tokens
    }
}

#[derive(Deserialize)]
struct FanOutAnswer {
    choices: Vec<FanOutChoice>,
    usage: Option<PromptUsage>,
}

#[derive(Deserialize)]
struct FanOutChoice {
    index: usize,
    text: Option<String>,
    token_ids: Vec<TokenId>,
    finish_reason: Option<String>,
}

/// Compares the number of prompt tokens that an answer reports with those that were sent; passes an
/// answer without `usage`.
///
/// # Errors
/// They differ, so it is the answer to another prompt.
pub fn check_prompt(usage: Option<&PromptUsage>, sent: usize) -> Result<(), Unreadable> {
    match usage {
        Some(usage) if usage.prompt_tokens as usize != sent => Err(Unreadable("it counts another prompt")),
        _ => Ok(()),
    }
}

/// Reads the answer to a fan-out of the first `nodes` nodes of a round.
///
/// # Errors
/// Not one token for each prompt, or another number of prompt tokens.
pub fn fan_out_result(round: &Round<'_>, nodes: usize, body: &[u8]) -> Result<VerifyResult, Unreadable> {
    let sent = paths(round.draft, nodes).iter().map(|path| round.context.len() + path.len()).sum();
    one_token_each(nodes + 1, sent, body)
}

/// A fan-out in one call: one token per prompt, in the order of the prompts. `sent`: tokens of all
/// prompts.
fn one_token_each(prompts: usize, sent: usize, body: &[u8]) -> Result<VerifyResult, Unreadable> {
    let mut answer: FanOutAnswer =
        serde_json::from_slice(body).map_err(|_| Unreadable("not a completion with token ids"))?;
    if answer.choices.len() != prompts {
        return Err(Unreadable("not one choice for each prompt"));
    }
    check_prompt(answer.usage.as_ref(), sent)?;
    answer.choices.sort_by_key(|choice| choice.index);
    let computed = answer.usage.as_ref().and_then(PromptUsage::computed);
    let rows = answer
        .choices
        .into_iter()
        .enumerate()
        .map(|(position, choice)| match choice.token_ids.as_slice() {
            [sample] if choice.index == position => {
                let ends = choice.finish_reason.as_deref() == Some("stop");
                Ok(Row { ends, text: choice.text, ..Row::of(*sample) })
            }
            _ => Err(Unreadable("not one token per prompt")),
        })
        .collect::<Result<_, _>>()?;
    Ok(VerifyResult { rows, computed, ..VerifyResult::default() })
}

/// The first `COUNT` numbers of a version; `None` if there are fewer, or parts that are no numbers.
pub fn version<const COUNT: usize>(version: &str) -> Option<[u32; COUNT]> {
    let mut parts = version.split('.');
    let mut numbers = [0; COUNT];
    for number in &mut numbers {
        *number = parts.next()?.parse().ok()?;
    }
    Some(numbers)
}

/// The value of a metric in Prometheus' text format, which has one of `names`, summed over its
/// labels; `None` if it is not there or no finite number.
pub fn metric(exposition: &str, names: &[&str]) -> Option<f64> {
    metric_of(exposition, names, None)
}

/// As [`metric`], of the series with this label only, as in `kind="decode"`.
pub fn metric_of(exposition: &str, names: &[&str], label: Option<&str>) -> Option<f64> {
    let sum = series(exposition, names, label).reduce(|sum, value| sum + value);
    sum.filter(|sum| sum.is_finite())
}

/// The largest of the values of data-parallel ranks, such as their shares of the KV cache: the
/// fullest rank is the first that preempts. `None` if none is finite and not negative.
pub fn fullest(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.filter(|value| value.is_finite() && *value >= 0.0).reduce(f64::max)
}

/// The values of a metric's series, those with `label` if one is given.
fn series<'a>(
    exposition: &'a str,
    names: &'a [&str],
    label: Option<&'a str>,
) -> impl Iterator<Item = f64> + 'a {
    let lines = exposition.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(move |line| {
        let (name, rest) = line.split_at(line.find(['{', ' '])?);
        names.contains(&name).then(|| value(rest, label)).flatten()
    })
}

/// As [`metric`], but the largest value over its labels: of numbers such as shares, whose sum over
/// data-parallel ranks says nothing.
pub fn largest(exposition: &str, names: &[&str]) -> Option<f64> {
    fullest(series(exposition, names, None))
}

/// Tokens per block of a prefix cache, from what the server reports.
pub fn block(reported: usize) -> usize {
    reported.clamp(1, MAX_BLOCK)
}

/// The value behind a metric's name: behind its labels, before a timestamp or an exemplar. `None`
/// if `label` is not among the labels.
fn value(rest: &str, label: Option<&str>) -> Option<f64> {
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(labelled) => labelled.split_once("} ")?,
        None => ("", rest),
    };
    let wanted = label.is_none_or(|label| labels.split(',').any(|found| found == label));
    wanted.then(|| rest.split_ascii_whitespace().next()?.parse().ok()).flatten()
}

/// Start time of the process, in microseconds of Unix time; `None` if it is not among the metrics.
/// Two processes that began in the same second differ: the metric counts in hundredths of a second
/// or finer.
pub fn started(exposition: &str) -> Option<u64> {
    metric(exposition, &["process_start_time_seconds"]).map(|seconds| (seconds * 1e6).round() as u64)
}

/// The load that an engine reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Number of requests being computed.
    pub running: u32,
    /// Number of requests that are waiting.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1; `None` if it does not report that.
    pub kv_usage: Option<f64>,
    /// Maximum requests that it computes at once; `None` if it does not report that.
    pub limit: Option<u32>,
    /// Age of these figures when they were reported; zero where they are of that moment.
    pub age: Duration,
}

/// A load in Prometheus' text format, by the names of its metrics (the share of the KV cache has
/// had several); `None` if the running or waiting requests are not among them.
pub fn load(exposition: &str, running: &str, waiting: &str, kv_usage: &[&str]) -> Option<Load> {
    Some(Load {
        running: metric(exposition, &[running])? as u32,
        waiting: metric(exposition, &[waiting])? as u32,
        kv_usage: largest(exposition, kv_usage),
        ..Load::default()
    })
}

/// The value of a label in the first line of a metric; `None` if there is none.
pub fn label(exposition: &str, name: &str, label: &str) -> Option<String> {
    let line =
        exposition.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')))?;
    let (_, rest) = line.split_once(&format!("{label}=\""))?;
    rest.split_once('"').map(|(value, _)| value.to_owned())
}

/// The call in which the engine renders a chat request, by its template and parsers.
pub fn render_call(request: &Request) -> Call {
    Call { path: CHAT_RENDER, body: bytes(&request.body) }
}

/// A chat request as the engine renders it (0.32, `scale_out/token_in_token_out/protocol.py`).
#[derive(Deserialize)]
struct RenderedChat {
    token_ids: Vec<TokenId>,
    sampling_params: Map<String, Value>,
}

/// Reads a rendered chat: its prompt, and if a grammar binds its sampling, after what the engine's
/// parsers have made of the request.
pub fn read_render(body: &[u8]) -> Result<PromptStep, Unreadable> {
    let chat: RenderedChat =
        serde_json::from_slice(body).map_err(|_| Unreadable("no rendered chat request"))?;
    Ok(PromptStep::Rendered { prompt: chat.token_ids, has_grammar: has_grammar(&chat.sampling_params) })
}

fn has_grammar(sampling_params: &Map<String, Value>) -> bool {
    sampling_params.get(STRUCTURED_OUTPUTS).is_some_and(|grammar| !grammar.is_null())
}

/// The call in which the engine parses a complete output (0.32, `renderers/online_derenderer.py`);
/// its answer has the message of an answer that is not streamed.
pub fn parts_call(request: &Request, prompt: &[TokenId], output: &[TokenId]) -> Call {
    let choice = json!({ "index": 0, "token_ids": output });
    let body = json!({
        "generate_response": { "prompt_token_ids": prompt, "choices": [choice] },
        "chat_request": request.body,
    });
    Call { path: CHAT_DERENDER, body: bytes(&body) }
}

/// The call that aborts a request of vLLM. Which tokens of the prompt were cached is in the last
/// event of a stream only; an aborted stream has it too (0.32,
/// `token_in_token_out/api_router.py` and `chat_completion/serving.py`). The engine numbers a
/// completion's prompts.
pub fn abort_call(route: Route, request_id: &str) -> Call {
    let id = match route {
        Route::Chat => format!("chatcmpl-{request_id}"),
        Route::Completions => format!("cmpl-{request_id}-0"),
    };
    Call { path: ABORT, body: bytes(&json!({ "request_ids": [id] })) }
}

/// Reads the answer to [`super::Tokenize::question`]; `None` if it has no ids.
pub fn tokens(body: &[u8]) -> Option<Vec<TokenId>> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    ids(answer.get("tokens")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(event: &Value) -> Result<Chunk, Unreadable> {
        chunk(&Event::of(event.to_string()).unwrap())
    }

    #[test]
    fn a_rendered_chat_is_bound_by_any_structured_output() {
        let read = |sampling: Value| {
            let body = json!({"token_ids": [1, 2], "sampling_params": sampling});
            read_render(body.to_string().as_bytes())
        };
        for (sampling, has_grammar) in [
            (json!({}), false),
            (json!({"structured_outputs": null}), false),
            (json!({"structured_outputs": {"structural_tag": "{}", "json": null}}), true),
            (json!({"structured_outputs": {}}), true),
        ] {
            assert_eq!(read(sampling), Ok(PromptStep::Rendered { prompt: vec![1, 2], has_grammar }));
        }
        assert!(read_render(b"{}").is_err());
    }

    #[test]
    fn completion_and_chat_events_read_alike() {
        let completion = json!({"choices":[{"index":0,"text":"a","token_ids":[7],"prompt_token_ids":[1],"finish_reason":null}]});
        let chat = json!({"prompt_token_ids":[1],"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"token_ids":[7],"finish_reason":null}]});
        let expected = Chunk { prompt: Some(vec![1]), tokens: vec![7], text: "a".into(), ..Chunk::default() };
        assert_eq!(read(&completion).unwrap(), expected);
        assert_eq!(read(&chat).unwrap(), expected);
    }

    #[test]
    fn text_without_ids_is_doubtful_and_tool_calls_are_kept() {
        let no_ids = json!({"choices":[{"text":"a","finish_reason":null}]});
        assert!(read(&no_ids).unwrap().doubtful);
        let call = json!({"index":0,"id":"a","function":{"name":"f"}});
        let event = json!({"choices":[{"delta":{"tool_calls":[call]},"token_ids":[1]}]});
        let chunk_of_call = read(&event).unwrap();
        assert_eq!((chunk_of_call.doubtful, chunk_of_call.parsed().unwrap().calls.len()), (false, 1));
        assert!(read(&json!({"error":{"message":"x"}})).is_err());
    }

    #[test]
    fn a_fan_out_is_read_in_the_order_of_its_prompts_with_the_end_of_the_text() {
        let body = br#"{"choices":[{"index":1,"token_ids":[5],"finish_reason":"stop"},{"index":0,"token_ids":[4],"finish_reason":"length"}]}"#;
        let rows = one_token_each(2, 9, body).unwrap().rows;
        assert_eq!(rows, [Row::of(4), Row { ends: true, ..Row::of(5) }]);
        assert!(one_token_each(1, 9, body).is_err() && one_token_each(3, 9, body).is_err());
    }

    #[test]
    fn an_answer_that_counts_another_prompt_is_refused() {
        let body = br#"{"choices":[{"index":0,"text":"a","token_ids":[4],"finish_reason":"length"}],
            "usage":{"prompt_tokens":9}}"#;
        assert_eq!(one_token_each(1, 9, body).unwrap().rows, [Row { text: Some("a".into()), ..Row::of(4) }]);
        assert!(one_token_each(1, 8, body).is_err());
    }

    #[test]
    fn fields_that_the_client_left_open_stay_open() {
        let set_by_client = foretell_wire::openai::SetFields::default().with(F::TopP);
        let sampling = Sampling { top_p: 1.0, seed: Some(4), set_by_client, ..Sampling::default() };
        assert_eq!(Value::Object(client_fields(&sampling)), json!({"top_p": 1.0, "seed": 4}));
    }

    #[test]
    fn a_start_time_keeps_its_fraction() {
        let of = |text: &str| started(&format!("process_start_time_seconds {text}\n"));
        assert_eq!(of("1.76392581389e+09"), Some(1_763_925_813_890_000));
        assert_eq!(of("1763925813.8"), Some(1_763_925_813_800_000));
        assert_ne!(of("1.76392581389e+09"), of("1.76392581301e+09"));
    }

    #[test]
    fn metrics_are_summed_over_their_labels_under_any_of_their_names() {
        let text =
            "# HELP a:b x\na:b{e=\"0\"} 2\na:b{e=\"1\"} 3.0\na:bc 9\nold_b 1\ninfo{x=\"7\",y=\"z\"} 1\n";
        assert_eq!(metric(text, &["a:b"]), Some(5.0));
        assert_eq!(metric(text, &["new", "old_b"]), Some(1.0));
        assert_eq!(metric(text, &["none"]), None);
        assert_eq!(
            metric("a{b=\"c\"} 2 1700000000\na 1.5 # {d=\"e\"} 9", &["a"]),
            Some(3.5),
            "nothing behind a value"
        );
        assert_eq!(metric("a NaN\na 1\nb 1e308\nb 1e308", &["a"]), None);
        assert_eq!(metric("a 1e308\na 1e308\n+Inf 1", &["a"]), None);
        assert_eq!(label(text, "info", "y").as_deref(), Some("z"));
    }

    #[test]
    fn of_a_kv_cache_the_fullest_rank_counts() {
        assert_eq!(largest("kv{r=\"0\"} 0.6\nkv{r=\"1\"} 0.7\n", &["kv"]), Some(0.7));
        assert_eq!(largest("kv -3\nkv NaN\nkv +Inf\n", &["kv"]), None, "no share");
        assert_eq!(largest("kv -3\nkv 0.1\n", &["new", "kv"]), Some(0.1));
    }
}
