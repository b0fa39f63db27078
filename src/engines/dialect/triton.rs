//! Triton with a TensorRT engine, its OpenAI frontend and its KServe v2 interface behind one
//! address.
//!
//! **Supported**: `Native` for streamed completions at temperature 0, set by the client. The engine
//! takes a chain (`draft_input_ids`) and continues with its own tokens where it disagrees, so
//! whatever it returns is its greedy text. That needs an engine built with
//! `--speculative_decoding_mode draft_tokens_external`; no endpoint reports the mode, so the method
//! has to be allowed (`verify.allow: [native]`). An engine of another kind refuses the call, and
//! the request decodes plainly.
//! * The frontend returns text, so the ids of the first call's tokens are recovered by the target
//!   ([`super::Quirks::first_request_ids`]). The ids of the prompt come from the very model that
//!   makes them for the frontend (`preprocessing`). A chat is rendered inside the frontend in an
//!   undocumented way: no verification method.
//! * Above temperature 0 the engine draws with a fixed default seed that restarts with every call:
//!   such a server is treated as seeded.
//! * Stop words, penalties and biases reach the engine through models that an operator can change:
//!   refused.
//! * Without streaming the client expects usage, which the frontend's stream need not contain: no
//!   verification method.
//! * Its metrics are on another port: its load is not read.
//!
//! Names and shapes are those of the published model repository (`preprocessing`, `tensorrt_llm`;
//! `ensemble` or `tensorrt_llm_bls` before them); a repository with other names is relayed. An
//! abandoned call runs until its tokens are generated: at most the length of a draft for a verify
//! request; a plain request stops with its stream.

use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Body;
use super::recognise::{KSERVE, MODELS};
use super::shared::{self, bytes};
use super::{
    Answers, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, MaxTokens, Noise, PromptAnswer, Question,
    Quirks, Refusal, RequestKind, Round, Unreadable, Usual, VerifyRequest,
};
use crate::openai::{Additive, Prompt, Request, Route, Sampling};
use foretell_core::units::TokenId;
use foretell_core::words::{Refused, RelayReason};
use foretell_core::words::{Row, VerifyMethod, VerifyResult};

const PREPROCESSING: &str = "/v2/models/preprocessing/infer";
const MODEL: &str = "/v2/models/tensorrt_llm";
const INFER: &str = "/v2/models/tensorrt_llm/infer";
const STREAM: &str = "/v2/models/tensorrt_llm/generate_stream";
/// The models that take text and return text, by way of `tensorrt_llm`.
const WHOLE: [&str; 2] = ["ensemble", "tensorrt_llm_bls"];
/// The longest draft. An engine is built for a number (`--max_draft_len`) that it does not report;
/// its documentation builds for ten.
const MAX_DRAFT: usize = 10;

/// The codec of Triton.
pub struct Triton;

const QUIRKS: Quirks = Quirks {
    experimental: true,
    usual: Some(Usual { methods: &[VerifyMethod::Native], seeded: true, ..Usual::COMMON }),
    first_request_ids: false,
    no_usage_event: &[Route::Completions, Route::Chat],
    ..Quirks::COMMON
};

impl Codec for Triton {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        let mut questions = answers.unasked(&[MODEL]);
        if !answers.has(PREPROCESSING) {
            // Runs a tokenizer and computes nothing.
            questions.push(Question::post(PREPROCESSING, preprocessing("a")));
        }
        questions
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let version = answers.word(KSERVE, "/version").ok_or_else(|| Foreign::silent("version"))?;
        let listed = answers.at(MODELS, "/data").unwrap_or_default();
        let listed = listed.as_array().into_iter().flatten();
        let ids: Vec<&str> = listed.filter_map(|model| model.get("id")?.as_str()).collect();
        let model = WHOLE.into_iter().find(|whole| ids.contains(whole)).unwrap_or_default();
        let eos = answers.text(PREPROCESSING).and_then(|body| output(body.as_bytes(), "OUT_END_ID"));
        let native = takes_drafts(answers) && eos.is_some() && !model.is_empty();
        Ok(Engine {
            methods: if native { vec![VerifyMethod::Native] } else { Vec::new() },
            noise: Noise::Call,
            eos: eos.unwrap_or_default(),
            ..Engine::new(Dialect::Triton, model, version)
        })
    }

    fn refuses(&self, engine: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused> {
        if request.route == Route::Chat {
            return Some(RelayReason::NoVerifyMethod.into());
        }
        let text = matches!(request.prompt, Prompt::Text(_));
        let shape =
            [(!text, "prompt"), (!request.stream, "stream"), (request.model != engine.model, "model")];
        let parameters = [
            (!request.stop.is_empty(), "stop"),
            (!request.stop_token_ids.is_empty(), "stop_token_ids"),
            (sampling.ignore_eos, "ignore_eos"),
            (sampling.penalizes_repetition(), "repetition_penalty"),
            (!sampling.logit_bias.is_empty(), "logit_bias"),
        ];
        Refused::by_first(RelayReason::NoVerifyMethod, &shape)
            .or_else(|| Refused::by_first(RelayReason::Parameter, &parameters))
            .or_else(|| Refused::by_first(RelayReason::Parameter, &sampling.counting()))
            .or_else(|| shared::refuses_all_but_greedy(sampling))
    }

    fn max_tokens(&self, _: &Engine, _: &Request) -> MaxTokens {
        MaxTokens::Unknown
    }

    /// The client's own request without additions: not every frontend takes `stream_options`.
    fn first_request(&self, _: &Engine, request: &Request, _: u64) -> Call {
        let mut body = request.body.clone();
        body.shift_remove("prediction");
        Call { path: request.route.path(), body: bytes(&body) }
    }

    fn additive(&self, _: &Engine, _: &Request) -> Additive {
        Additive { token_ids: true, ..Additive::default() }
    }

    fn prompt_ids_call(&self, _: &Engine, request: &Request) -> Option<Call> {
        let Prompt::Text(text) = &request.prompt else { return None };
        Some(Call { path: PREPROCESSING, body: bytes(&preprocessing(text)) })
    }

    fn read_prompt_answer(&self, _: &Engine, _: &Request, body: &[u8]) -> Result<PromptAnswer, Unreadable> {
        output(body, "INPUT_ID").map(PromptAnswer::Prompt).ok_or(Unreadable("no token ids"))
    }

    fn plain_request(&self, engine: &Engine, context: &Context<'_>, _: &Sampling, max_tokens: u32) -> Call {
        let ids = context.ids();
        let mut body = Body::around(&ids, 1)
            .put("input_lengths", context.len())
            .ids("input_ids", &ids, &[])
            .put("request_output_len", max_tokens)
            .put("runtime_top_k", 1)
            .put("streaming", true);
        if let Some(end) = engine.eos.first() {
            body = body.put("end_id", end).put("pad_id", end);
        }
        Call { path: STREAM, body: body.end() }
    }

    fn chunk(&self, engine: &Engine, kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
        if kind == RequestKind::First {
            return shared::chunk_without_ids(event);
        }
        let told = event.get("output_ids").ok_or(Unreadable("no output ids"))?;
        let mut tokens = match told {
            Value::Number(_) => shared::ids(&json!([told])),
            told => shared::ids(told),
        }
        .ok_or(Unreadable("not token ids"))?;
        // Tokens after the end are padding.
        let end = tokens.iter().position(|token| engine.eos.contains(token));
        if let Some(end) = end {
            tokens.truncate(end + 1);
        }
        Ok(Chunk { tokens, ends: end.is_some(), finish: end.map(|_| "stop".to_owned()), ..Chunk::default() })
    }

    /// Its streams have no final event with a finish reason.
    fn closed(&self, brought: u32, asked: u32) -> Option<&'static str> {
        Some(if brought >= asked { "length" } else { "stop" })
    }

    fn verify(&self, _: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        if round.method != VerifyMethod::Native {
            return Err(Refusal::NoVerifyMethod(round.method.name()));
        }
        // A draft shorter than the context distinguishes an answer with the context in front from
        // one without.
        let nodes = round.draft.stem().min(MAX_DRAFT).min(round.context.len().saturating_sub(1));
        Ok(VerifyRequest { calls: vec![infer(round, nodes)], nodes })
    }

    fn result(
        &self,
        engine: &Engine,
        round: &Round<'_>,
        asked: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        let body = shared::only(bodies)?;
        let mut tokens = output(body, "output_ids").ok_or(Unreadable("no output ids"))?;
        if let Some([length]) = output(body, "sequence_length").as_deref() {
            tokens.truncate(*length as usize);
        }
        if tokens.len() > asked.nodes + 1 {
            let output = tokens.strip_prefix(round.context.prompt);
            let own = output.and_then(|output| output.strip_prefix(round.context.output));
            tokens = own.ok_or(Unreadable("another context"))?.to_vec();
        }
        if tokens.len() > asked.nodes + 1 {
            return Err(Unreadable("more tokens than were asked for"));
        }
        let row = |token: TokenId| Row { ends: engine.eos.contains(&token), ..Row::of(token) };
        Ok(VerifyResult { rows: tokens.into_iter().map(row).collect(), ..VerifyResult::default() })
    }
}

/// Body of a tensor of one row.
fn tensor(name: &str, datatype: &str, data: &[impl serde::Serialize]) -> Body {
    frame(name, datatype, data.len()).put("data", data)
}

/// Body of a tensor of one row of `length` entries, without its `data`.
fn frame(name: &str, datatype: &str, length: usize) -> Body {
    Body::with_room(128).put("name", name).put("shape", [1, length]).put("datatype", datatype)
}

fn preprocessing(text: &str) -> Value {
    let tensor = |name: &str, datatype: &str, data: Value| json!({ "name": name, "shape": [1, 1], "datatype": datatype, "data": [data] });
    json!({
        "inputs": [tensor("QUERY", "BYTES", text.into()), tensor("REQUEST_OUTPUT_LEN", "INT32", 1.into())],
        "outputs": [{ "name": "INPUT_ID" }, { "name": "OUT_END_ID" }],
    })
}

/// Verifies the first nodes of the draft. Without `end_id` the end of the text is a token like any
/// other, and the session ends the output there.
fn infer(round: &Round<'_>, nodes: usize) -> Call {
    let (ids, length) = (round.context.ids(), round.context.len());
    let mut inputs = vec![
        frame("input_ids", "INT32", length).ids("data", &ids, &[]),
        tensor("input_lengths", "INT32", &[length]),
        tensor("request_output_len", "INT32", &[nodes + 1]),
        tensor("runtime_top_k", "INT32", &[1]),
    ];
    if let Some(last) = nodes.checked_sub(1) {
        inputs.push(tensor("draft_input_ids", "INT32", &round.draft.path(last)));
    }
    let outputs = ["output_ids", "sequence_length"].map(|name| Body::with_room(32).put("name", name));
    let body = Body::around(&ids, 1).objects("inputs", inputs).objects("outputs", outputs);
    Call { path: INFER, body: body.end() }
}

fn takes_drafts(answers: &Answers) -> bool {
    let inputs = answers.at(MODEL, "/inputs").unwrap_or_default();
    let mut inputs = inputs.as_array().into_iter().flatten();
    inputs.any(|input| input.get("name").and_then(Value::as_str) == Some("draft_input_ids"))
}

#[derive(Deserialize)]
struct Inferred {
    outputs: Vec<Output>,
}

#[derive(Deserialize)]
struct Output {
    name: String,
    data: Value,
}

/// The numbers of the output `name`; `None` if there is none.
fn output(body: &[u8], name: &str) -> Option<Vec<TokenId>> {
    let answer: Inferred = serde_json::from_slice(body).ok()?;
    shared::ids(&answer.outputs.into_iter().find(|output| output.name == name)?.data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::recognise::Reply;
    use crate::openai::{Judgement, judge};
    use foretell_core::draft::{Features, Source, Tree};

    fn engine() -> Engine {
        Engine {
            methods: vec![VerifyMethod::Native],
            eos: vec![2],
            ..Engine::new(Dialect::Triton, "ensemble", "2.59.0")
        }
    }

    fn request(more: &Value) -> Request {
        let mut body =
            json!({"model": "ensemble", "prompt": "Once", "max_tokens": 9, "stream": true, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        match judge(Route::Completions, body.to_string().as_bytes()) {
            Judgement::Eligible(request) => *request,
            Judgement::Relay { reason, .. } => panic!("{}", reason.name()),
        }
    }

    fn with_round<T>(prompt: &[TokenId], draft: &Tree, look: impl Fn(&Round<'_>, &VerifyRequest) -> T) -> T {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let context = Context::new("ensemble", prompt, &[3]);
        let round =
            Round { context, draft, sampling: &sampling, method: VerifyMethod::Native, weighs: false };
        look(&round, &Triton.verify(&engine(), &round).unwrap())
    }

    fn chain(tokens: &[TokenId]) -> Tree {
        Tree::chain(tokens, Source::Model, Features::default())
    }

    fn text(call: &Call) -> &str {
        std::str::from_utf8(&call.body).unwrap()
    }

    fn answered(ids: &[TokenId], length: usize) -> Vec<u8> {
        let outputs = json!([
            {"name": "sequence_length", "datatype": "INT32", "shape": [1, 1], "data": [length]},
            {"name": "output_ids", "datatype": "INT32", "shape": [1, 1, ids.len()], "data": ids}]);
        json!({"model_name": "tensorrt_llm", "model_version": "1", "outputs": outputs})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn a_chain_is_handed_over_with_the_context() {
        with_round(&[1, 2], &chain(&[4, 5]), |_, asked| {
            assert_eq!((asked.calls[0].path, asked.nodes), ("/v2/models/tensorrt_llm/infer", 2));
            assert_eq!(
                text(&asked.calls[0]),
                concat!(
                    r#"{"inputs":[{"name":"input_ids","shape":[1,3],"datatype":"INT32","data":[1,2,3]},"#,
                    r#"{"name":"input_lengths","shape":[1,1],"datatype":"INT32","data":[3]},"#,
                    r#"{"name":"request_output_len","shape":[1,1],"datatype":"INT32","data":[3]},"#,
                    r#"{"name":"runtime_top_k","shape":[1,1],"datatype":"INT32","data":[1]},"#,
                    r#"{"name":"draft_input_ids","shape":[1,2],"datatype":"INT32","data":[4,5]}],"#,
                    r#""outputs":[{"name":"output_ids"},{"name":"sequence_length"}]}"#
                )
            );
        });
        with_round(&[1, 2], &Tree::default(), |_, asked| {
            assert!(!text(&asked.calls[0]).contains("draft_input_ids") && asked.nodes == 0);
        });
    }

    #[test]
    fn a_draft_is_no_longer_than_the_engine_and_the_answer_s_reading_allow() {
        let nodes = |prompt: &[TokenId]| with_round(prompt, &chain(&[9; 20]), |_, asked| asked.nodes);
        assert_eq!((nodes(&[1; 40]), nodes(&[1; 4]), nodes(&[])), (MAX_DRAFT, 4, 0));
        let mut tree = chain(&[4]);
        for (token, parent) in [(7, None), (8, Some(0))] {
            let vote = foretell_core::draft::Vote::new(Source::Model, Features::default());
            tree.push(foretell_core::draft::Node::new(token, parent, vote));
        }
        assert_eq!(with_round(&[1, 2, 3], &tree, |_, asked| asked.nodes), 1, "a chain, no tree");
    }

    #[test]
    fn returned_tokens_are_the_rows_with_or_without_context_and_padding() {
        let rows = |ids: &[TokenId], length: usize| {
            with_round(&[1, 2], &chain(&[4, 5]), |round, asked| {
                let result = Triton.result(&engine(), round, asked, &[answered(ids, length)])?;
                Ok::<_, Unreadable>(
                    result.rows.iter().map(|row| (row.sample.unwrap(), row.ends)).collect::<Vec<_>>(),
                )
            })
        };
        assert_eq!(rows(&[4, 5, 6], 3).unwrap(), [(4, false), (5, false), (6, false)]);
        assert_eq!(rows(&[1, 2, 3, 4, 7], 5).unwrap(), [(4, false), (7, false)]);
        assert_eq!(rows(&[4, 7, 0, 0], 2).unwrap(), [(4, false), (7, false)]);
        assert_eq!(rows(&[4, 2, 2], 3).unwrap()[1], (2, true));
        assert_eq!(rows(&[], 0).unwrap(), []);
        assert!(rows(&[9, 9, 9, 4, 7], 5).is_err(), "another context");
        assert!(rows(&[1, 2, 3, 4, 5, 6, 7], 7).is_err(), "more than was asked for");
        let error = with_round(&[1], &chain(&[4]), |round, asked| {
            Triton.result(
                &engine(),
                round,
                asked,
                &[br#"{"error":"draft tokens are not supported"}"#.to_vec()],
            )
        });
        assert!(error.is_err());
    }

    #[test]
    fn a_later_plain_request_streams_ids_and_has_no_final_event() {
        let context = Context::new("ensemble", &[1], &[3]);
        let call = Triton.plain_request(&engine(), &context, &Sampling::default(), 7);
        assert_eq!(call.path, "/v2/models/tensorrt_llm/generate_stream");
        assert_eq!(
            text(&call),
            r#"{"input_lengths":2,"input_ids":[1,3],"request_output_len":7,"runtime_top_k":1,"streaming":true,"end_id":2,"pad_id":2}"#
        );
        let read = |ids: &Value| {
            Triton.chunk(
                &engine(),
                RequestKind::Later,
                &json!({"model_name": "tensorrt_llm", "output_ids": ids}),
            )
        };
        assert_eq!(read(&json!([5])).unwrap(), Chunk { tokens: vec![5], ..Chunk::default() });
        assert_eq!(read(&json!(5)).unwrap().tokens, [5]);
        let last = read(&json!([5, 2, 2])).unwrap();
        assert_eq!((last.tokens, last.ends, last.finish.as_deref()), (vec![5, 2], true, Some("stop")));
        assert!(Triton.chunk(&engine(), RequestKind::Later, &json!({"error": "x"})).is_err());
        assert_eq!((Triton.closed(7, 7), Triton.closed(3, 7)), (Some("length"), Some("stop")));
    }

    #[test]
    fn the_prompt_s_ids_come_from_the_model_that_makes_them() {
        let request = request(&json!({}));
        let call = Triton.prompt_ids_call(&engine(), &request).unwrap();
        assert_eq!(call.path, "/v2/models/preprocessing/infer");
        assert_eq!(
            text(&call),
            concat!(
                r#"{"inputs":[{"name":"QUERY","shape":[1,1],"datatype":"BYTES","data":["Once"]},"#,
                r#"{"name":"REQUEST_OUTPUT_LEN","shape":[1,1],"datatype":"INT32","data":[1]}],"#,
                r#""outputs":[{"name":"INPUT_ID"},{"name":"OUT_END_ID"}]}"#
            )
        );
        let body = br#"{"outputs":[{"name":"INPUT_ID","datatype":"INT32","shape":[1,2],"data":[1,7]}]}"#;
        assert_eq!(
            Triton.read_prompt_answer(&engine(), &request, body),
            Ok(PromptAnswer::Prompt(vec![1, 7]))
        );
        assert!(Triton.read_prompt_answer(&engine(), &request, b"{}").is_err());
        let plain_request = Triton.first_request(&engine(), &request, 1);
        assert_eq!(
            text(&plain_request),
            r#"{"model":"ensemble","prompt":"Once","max_tokens":9,"stream":true,"temperature":0}"#
        );
    }

    #[test]
    fn only_what_is_exact_is_offered() {
        let refused = |more: &Value| {
            let request = request(more);
            engine().refuses(&request, &engine().sampling(&request).0).map(|refused| refused.reason)
        };
        assert_eq!(refused(&json!({})), None);
        assert_eq!(refused(&json!({"temperature": 0.7})), Some(RelayReason::Seed));
        assert_eq!(refused(&json!({"temperature": null})), Some(RelayReason::DefaultsUnknown));
        assert_eq!(refused(&json!({"max_tokens": null})), Some(RelayReason::DefaultsUnknown));
        for more in [json!({"stream": false}), json!({"prompt": [1, 2]}), json!({"model": "other"})] {
            assert_eq!(refused(&more), Some(RelayReason::NoVerifyMethod), "{more}");
        }
        for more in [
            json!({"stop": "x"}),
            json!({"stop_token_ids": [4]}),
            json!({"presence_penalty": 1}),
            json!({"repetition_penalty": 1.1}),
            json!({"logit_bias": {"5": 1}}),
            json!({"ignore_eos": true}),
            json!({"min_tokens": 2}),
        ] {
            assert_eq!(refused(&more), Some(RelayReason::Parameter), "{more}");
        }
    }

    #[test]
    fn a_repository_with_other_names_has_no_verification_method() {
        let mut answers = Answers::default();
        let tell = |answers: &mut Answers, path: &str, body: &Value| {
            answers.add(path, Reply { status: 200, server: None, body: body.to_string().into_bytes() });
        };
        tell(&mut answers, KSERVE, &json!({"name": "triton", "version": "2.59.0"}));
        tell(&mut answers, MODELS, &json!({"data": [{"id": "preprocessing"}, {"id": "ensemble"}]}));
        let asked: Vec<_> = Triton.questions(&answers).into_iter().map(|question| question.path).collect();
        assert_eq!(asked, [MODEL, PREPROCESSING]);
        assert!(Triton.engine(&answers).unwrap().methods.is_empty());
        tell(&mut answers, MODEL, &json!({"name": "tensorrt_llm", "inputs": [{"name": "draft_input_ids"}]}));
        tell(&mut answers, PREPROCESSING, &json!({"outputs": [{"name": "OUT_END_ID", "data": [2]}]}));
        let engine = Triton.engine(&answers).unwrap();
        assert_eq!(
            (engine.model.as_str(), &engine.methods[..], &engine.eos[..]),
            ("ensemble", &[VerifyMethod::Native][..], &[2][..])
        );
        assert!(Triton.questions(&answers).is_empty());
        tell(&mut answers, MODELS, &json!({"data": [{"id": "mine"}]}));
        assert!(Triton.engine(&answers).unwrap().methods.is_empty());
    }
}
