//! The dialect of `foretell target`: vLLM's shapes for completions, chat and token ids, and
//! `POST /v1/verify` for trees.
//!
//! The target's noise is a function of (seed, choice, position, token), so the same sampling fields
//! with the same seed give the same tokens on every route. The position has to be preserved, which
//! a prompt of token ids does, and the split between prompt and output, which the field `generated`
//! does.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::body::Body;
use super::recognise::{MODELS, VERSION};
use super::shared::{self, PromptUsage, non_default_fields};
use super::{
    Additions, AnswerQuirks, Answers, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, Noise,
    OutputLimits, OutputParsing, Pages, PrefixCache, ProcessMarks, Question, Quirks, Refusal, RequestKind,
    Round, ServerDefaults, SpecialTokens, StopQuirks, Unreadable, UsageQuirks, Usual, VerifyRequest,
};
use foretell_core::session::StopOrder;
use foretell_core::units::TokenId;
use foretell_core::words::Refused;
use foretell_core::words::{Dist, Proposal, Row, VerifyMethod, VerifyResult};
use foretell_parsers::parse::{Parsers, ReasoningFormat, ToolFormat};
use foretell_wire::openai::{Additive, CALL_GRAMMAR_VERSION, Defaults, Event, Request, Route, Sampling};

const VERIFY: &str = "/v1/verify";
const TOKENIZER_INFO: &str = "/tokenizer_info";
/// Number of most probable tokens that a lossy accept rule asks for: the first is the peak, and a
/// drafted token among the others has its probability there.
const TOP: usize = 3;
/// The field that asks for a head's proposal of so many tokens, and the member that has it.
const PROPOSE: &str = "propose";
const PROPOSAL: &str = "proposal";

/// The codec of `foretell target`.
pub struct Onnx;

/// The start time of a target that is too old to report it in microseconds.
fn start_seconds(answers: &Answers) -> Option<u64> {
    answers.number(MODELS, "/data/0/created")?.checked_mul(1_000_000)
}

const QUIRKS: Quirks = Quirks {
    usual: Some(Usual {
        methods: &[VerifyMethod::Tree, VerifyMethod::FanOut],
        noise: Noise::Position,
        continues_grammar: true,
    }),
    shares_noise: true,
    start_page: Some(MODELS),
    limits: OutputLimits::OPENAI,
    answers: AnswerQuirks { hollow_deltas: true, ..AnswerQuirks::COMMON },
    render_setting: Some("--tool-parser"),
    stops: StopQuirks { order: StopOrder::FirstComplete, ..StopQuirks::COMMON },
    usage: UsageQuirks { has_continuous: true, ..UsageQuirks::COMMON },
    ..Quirks::COMMON
};

impl Codec for Onnx {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unanswered(&[TOKENIZER_INFO])
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let version = answers.word(VERSION, "/version").ok_or_else(|| Foreign::silent("version"))?;
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let eos = answers.at(TOKENIZER_INFO, "/eos_token_ids").and_then(|eos| shared::ids(&eos));
        let context = answers
            .number(MODELS, "/data/0/max_model_len")
            .ok_or_else(|| Foreign::silent("context length"))?;
        let format = |name: &str| answers.word(MODELS, name);
        let parsers = Parsers {
            tools: format("/data/0/tool_parser").and_then(|name| ToolFormat::from_name(&name)),
            reasoning: format("/data/0/reasoning_parser").and_then(|name| ReasoningFormat::from_name(&name)),
        };
        let is_set = |name: &str| answers.at(MODELS, name).is_some_and(|value| !value.is_null());
        let parses = parsers != Parsers::default();
        let process = ProcessMarks {
            started: answers.number(MODELS, "/data/0/started").or_else(|| start_seconds(answers)),
            fingerprint: answers.word(MODELS, "/data/0/system_fingerprint"),
            ..ProcessMarks::default()
        };
        let unparsed = !is_set("/data/0/tool_parser") && !is_set("/data/0/reasoning_parser");
        let eos = eos.ok_or_else(|| Foreign::silent("end-of-text tokens"))?;
        Ok(Engine {
            process,
            context: usize::try_from(context).ok(),
            methods: vec![VerifyMethod::Tree, VerifyMethod::FanOut],
            defaults: ServerDefaults { sampling: Some(Defaults::OPENAI), ..ServerDefaults::default() },
            noise: Noise::Position,
            cache: PrefixCache { reports_hits: true, ..PrefixCache::default() },
            pages: Pages { renders: parses, derenders: parses, aborts: false, load: Some("/metrics") },
            parsing: OutputParsing { parsers, unparsed, counts_reasoning: false },
            proposes: answers.number(MODELS, "/data/0/proposes").unwrap_or(0) as usize,
            continues_grammar: answers.number(MODELS, "/data/0/grammars") == Some(CALL_GRAMMAR_VERSION),
            tokens: SpecialTokens { eos, ..SpecialTokens::default() },
            ..Engine::new(Dialect::Onnx, model, version)
        })
    }

    fn methods(
        &self,
        engine: &Engine,
        _: &Request,
        _: &Sampling,
        _: bool,
    ) -> Result<Vec<VerifyMethod>, Refused> {
        Ok(engine.methods.clone())
    }

    /// Above temperature 0, if the client sent no `seed`, it gets one.
    fn additions(&self, engine: &Engine, request: &Request, seed: u64) -> Additions {
        let mut members = vec![("return_token_ids", Value::Bool(true))];
        if engine.proposes > 0 {
            members.push((PROPOSE, engine.proposes.into()));
        }
        if request.sampling.temperature > 0.0 && request.sampling.seed.is_none() {
            members.push(("seed", seed.into()));
        }
        Additions { members, traces: Additive { usage: true, choice: &[PROPOSAL], ..Additive::of(request) } }
    }

    /// The seed stands last in a choice, behind the ids.
    fn complete(&self, _: &Engine, _: Route, answer: &mut Value) {
        let Some(choice) = answer.pointer_mut("/choices/0").and_then(Value::as_object_mut) else { return };
        if let Some((name, seed)) = choice.shift_remove_entry("seed") {
            choice.insert(name, seed);
        }
    }

    fn plain_request(
        &self,
        engine: &Engine,
        context: &Context<'_>,
        sampling: &Sampling,
        max_tokens: u32,
    ) -> Call {
        let mut fields = fields(sampling);
        if engine.proposes > 0 {
            fields.insert(PROPOSE.into(), engine.proposes.into());
        }
        fields.insert("generated".into(), vec![context.output.len()].into());
        shared::plain_request(context, max_tokens, &fields)
    }

    fn chunk(&self, _: RequestKind, event: &Event) -> Result<Chunk, Unreadable> {
        let mut chunk = shared::chunk(event)?;
        let proposal = event.choice().and_then(|choice| choice.read::<Proposed>(PROPOSAL));
        chunk.proposal = proposal.map(|proposal| proposal.behind(chunk.tokens.clone()));
        Ok(chunk)
    }

    /// Sends the tree itself, or one prompt per node.
    fn verify(&self, engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        match round.method {
            VerifyMethod::Tree => Ok(VerifyRequest::one(tree(engine, round), round.draft.len())),
            VerifyMethod::FanOut => Ok(fan_out(round)),
            VerifyMethod::Score => Err(Refusal::NoVerifyMethod(round.method.name())),
        }
    }

    /// Requires one row per node and one for the context.
    fn result(
        &self,
        _: &Engine,
        round: &Round<'_>,
        request: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        let body = shared::only(bodies)?;
        let result = match round.method {
            VerifyMethod::Tree => tree_result(round, body)?,
            _ => shared::fan_out_result(round, request.nodes, body)?,
        };
        if result.rows.len() != request.nodes + 1 {
            return Err(Unreadable("not one row for each node and one for the context"));
        }
        Ok(result)
    }

    fn load(&self, body: &str) -> Option<Load> {
        let [running, waiting] = ["foretell_target_requests_running", "foretell_target_requests_waiting"];
        let load = shared::load(body, running, waiting, &["foretell_target_kv_usage_ratio"])?;
        let limit = shared::metric(body, &["foretell_target_requests_limit"]);
        Some(Load { limit: limit.map(|most| most as u32), ..load })
    }
}

fn fields(sampling: &Sampling) -> Map<String, Value> {
    let mut fields = non_default_fields(sampling);
    shared::request_token_ids(&mut fields);
    fields
}

fn tree(engine: &Engine, round: &Round<'_>) -> Call {
    let (draft, ids) = (round.draft.nodes(), round.context.ids());
    let tokens: Vec<TokenId> = draft.iter().map(|node| node.token).collect();
    let parents: Vec<i64> = draft.iter().map(|node| node.parent.map_or(-1, |parent| parent as i64)).collect();
    let body = Body::around(&ids, 1)
        .put("model", round.context.model)
        .ids("context", &ids, &[])
        .put("generated", round.context.output.len())
        .put("tokens", tokens)
        .put("parents", parents)
        .all(&non_default_fields(round.sampling));
    let body = if engine.proposes > 0 { body.put(PROPOSE, engine.proposes) } else { body };
    // Without lists only the rows that the samples reach are judged.
    let body = if round.weighs { body.put("top_logprobs", TOP) } else { body.put("logprobs", false) };
    Call { path: VERIFY, body: body.end() }
}

/// Sends how many tokens of each prompt are output only if a parameter counts output.
fn fan_out(round: &Round<'_>) -> VerifyRequest {
    let mut fields = fields(round.sampling);
    if round.sampling.counts_output() {
        let before = round.context.output.len();
        let depths = (0..round.draft.len()).map(|node| round.draft.path(node).len());
        let output = std::iter::once(0).chain(depths).map(|depth| before + depth);
        fields.insert("generated".into(), output.collect::<Vec<_>>().into());
    }
    shared::fan_out(round, usize::MAX, &fields)
}

#[derive(Deserialize)]
struct VerifyAnswer {
    rows: Vec<VerifyRow>,
    usage: Option<PromptUsage>,
    /// These two are read apart: what cannot be read is no proposal, and the rows are still right.
    accepted: Option<Value>,
    proposal: Option<Value>,
}

/// A proposal as it is sent: for each position the likeliest tokens and their probabilities.
#[derive(Deserialize)]
struct Proposed {
    tokens: Vec<Vec<TokenId>>,
    shares: Vec<Vec<f32>>,
}

impl Proposed {
    fn behind(self, behind: Vec<TokenId>) -> Proposal {
        let paired = |(tokens, shares): (Vec<_>, Vec<_>)| tokens.into_iter().zip(shares).collect();
        Proposal { behind, steps: self.tokens.into_iter().zip(self.shares).map(paired).collect() }
    }
}

impl VerifyAnswer {
    /// The target's proposal, behind the accepted nodes and the token after them.
    fn proposal(&mut self, round: &Round<'_>) -> Option<Proposal> {
        let proposed: Proposed = serde_json::from_value(self.proposal.take()?).ok()?;
        let accepted: Vec<usize> = serde_json::from_value(self.accepted.take()?).ok()?;
        let nodes = accepted.iter().map(|&node| Some(round.draft.nodes().get(node)?.token));
        let mut behind: Vec<TokenId> = nodes.collect::<Option<_>>()?;
        let row = accepted.last().map_or(Some(0), |node| node.checked_add(1))?;
        behind.push(self.rows.get(row)?.sample?);
        Some(proposed.behind(behind))
    }
}

#[derive(Deserialize)]
struct VerifyRow {
    /// `None` after nodes that the samples before them do not accept.
    sample: Option<TokenId>,
    draft_logprob: Option<f64>,
    #[serde(default)]
    top: Vec<(TokenId, f64)>,
    entropy: Option<f64>,
}

impl VerifyRow {
    /// Nothing of it but the sample depends on the sample. `weighs`: a lossy rule requested [`TOP`]
    /// tokens.
    fn row(self, weighs: bool) -> Row {
        let top: Vec<(TokenId, f64)> =
            self.top.iter().map(|&(token, logprob)| (token, logprob.exp())).collect();
        // Where fewer are listed than were requested, there are no others.
        let complete = !top.is_empty() && top.len() < TOP;
        let dist = (!top.is_empty() && weighs).then_some(Dist { top, complete, slack: 0.0 });
        let draft_p = self.draft_logprob.map(f64::exp);
        Row { sample: self.sample, dist, draft_p, entropy: self.entropy, ..Row::default() }
    }
}

fn tree_result(round: &Round<'_>, body: &[u8]) -> Result<VerifyResult, Unreadable> {
    let mut answer: VerifyAnswer =
        serde_json::from_slice(body).map_err(|_| Unreadable("not a verify answer"))?;
    shared::check_prompt(answer.usage.as_ref(), round.context.len())?;
    let proposal = answer.proposal(round);
    // Its usage counts the context; the nodes of the draft, one for each row but the first, were
    // computed as well.
    let nodes = u32::try_from(answer.rows.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let computed = answer.usage.as_ref().and_then(PromptUsage::computed);
    let computed = computed.map(|context| context.saturating_add(nodes));
    Ok(VerifyResult {
        rows: answer.rows.into_iter().map(|row| row.row(round.weighs)).collect(),
        computed,
        proposal,
        ..VerifyResult::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recognise::Reply;
    use foretell_core::draft::{Features, Source, Tree};

    const CONTEXT: Context<'_> = Context::new("m", &[1, 2], &[3]);

    fn engine() -> Engine {
        Engine::new(Dialect::Onnx, "m", "1")
    }

    fn request(draft: &Tree, sampling: &Sampling, method: VerifyMethod) -> (VerifyRequest, String) {
        let round = Round { context: CONTEXT, draft, sampling, method, weighs: false };
        let request = Onnx.verify(&engine(), &round).unwrap();
        let text = String::from_utf8(request.calls[0].body.clone()).unwrap();
        (request, text)
    }

    #[test]
    fn one_that_names_no_parser_parses_nothing_and_one_that_names_an_unknown_one_may() {
        let unparsed = |parser: &str| {
            let model =
                format!(r#"{{"data": [{{"id": "m", "max_model_len": 64, "tool_parser": {parser}}}]}}"#);
            let mut answers = Answers::default();
            for (path, body) in [
                (MODELS, model.as_str()),
                (VERSION, r#"{"version": "1"}"#),
                (TOKENIZER_INFO, r#"{"eos_token_ids": [0]}"#),
            ] {
                let body = body.as_bytes().to_vec();
                answers.add(path, Reply { status: 200, body, ..Reply::default() });
            }
            let engine = Onnx.engine(&answers).unwrap();
            (engine.parsing.unparsed, engine.parsing.parsers.tools.is_some())
        };
        assert_eq!(unparsed("null"), (true, false));
        assert_eq!(unparsed(r#""hermes""#), (false, true));
        assert_eq!(unparsed(r#""one of tomorrow""#), (false, false), "its effect is not known");
    }

    #[test]
    fn a_tree_goes_out_whole() {
        let mut draft = Tree::chain(&[4, 5], Source::Model, Features::default());
        let vote = foretell_core::draft::Vote::new(Source::PromptLookup, Features::default());
        draft.push(foretell_core::draft::Node::new(6, Some(0), vote));
        let sampling = Sampling { temperature: 0.5, seed: Some(9), ..Sampling::default() };
        let (request, text) = request(&draft, &sampling, VerifyMethod::Tree);
        assert_eq!(request.calls[0].path, "/v1/verify");
        assert_eq!(
            text,
            r#"{"model":"m","context":[1,2,3],"generated":1,"tokens":[4,5,6],"parents":[-1,0,0],"temperature":0.5,"seed":9,"logprobs":false}"#
        );
    }

    #[test]
    fn a_fan_out_is_one_prompt_per_node() {
        let draft = Tree::chain(&[4, 5], Source::Model, Features::default());
        let (request, text) = request(&draft, &Sampling::default(), VerifyMethod::FanOut);
        assert_eq!(request.calls[0].path, "/v1/completions");
        assert_eq!(
            text,
            r#"{"model":"m","prompt":[[1,2,3],[1,2,3,4],[1,2,3,4,5]],"max_tokens":1,"stream":false,"temperature":1.0,"return_token_ids":true}"#
        );
    }

    #[test]
    fn a_fan_out_with_penalties_has_the_number_of_output_tokens() {
        let sampling = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        let draft = Tree::chain(&[4], Source::Model, Features::default());
        let (_, text) = request(&draft, &sampling, VerifyMethod::FanOut);
        assert!(text.contains(r#""generated":[1,2]"#), "{text}");
    }

    #[test]
    fn a_plain_request_by_ids_has_the_number_of_output_tokens() {
        let call =
            Onnx.plain_request(&engine(), &CONTEXT, &Sampling { temperature: 0.0, ..Sampling::default() }, 7);
        assert_eq!(
            std::str::from_utf8(&call.body).unwrap(),
            r#"{"model":"m","prompt":[[1,2,3]],"max_tokens":7,"stream":true,"temperature":0.0,"return_token_ids":true,"generated":[1]}"#
        );
    }

    #[test]
    fn an_unreadable_proposal_leaves_the_rows() {
        let (sampling, draft) = (Sampling::default(), Tree::chain(&[4], Source::Model, Features::default()));
        let round = Round {
            context: CONTEXT,
            draft: &draft,
            sampling: &sampling,
            method: VerifyMethod::Tree,
            weighs: false,
        };
        let request = Onnx.verify(&engine(), &round).unwrap();
        let good = r#"{"tokens":[[9,2]],"shares":[[0.5,0.25]]}"#;
        for (accepted, proposal, behind) in [
            ("[0]", good, Some(vec![4, 6])),
            ("[]", good, Some(vec![4])),
            ("[18446744073709551615]", good, None),
            ("[7]", good, None),
            ("null", good, None),
            ("[-1]", good, None),
            ("[0]", "null", None),
            ("[0]", r#"{"tokens":[[9]],"shares":[[null]]}"#, None),
            ("[0]", "7", None),
        ] {
            let body = format!(
                r#"{{"rows":[{{"sample":4}},{{"sample":6}}],"accepted":{accepted},"proposal":{proposal}}}"#
            );
            let result = Onnx.result(&engine(), &round, &request, &[body.into_bytes()]).unwrap();
            assert_eq!(result.rows.len(), 2);
            let found = result.proposal.map(|proposal| {
                assert_eq!(proposal.steps, [vec![(9, 0.5), (2, 0.25)]]);
                proposal.behind
            });
            assert_eq!(found, behind, "{accepted} {proposal}");
        }
    }

    #[test]
    fn a_result_with_a_row_missing_is_unreadable() {
        let body = br#"{"rows":[{"sample":4,"logprob":-0.1,"top":[],"draft_logprob":null}]}"#.to_vec();
        let sampling = Sampling::default();
        let read = |draft: &Tree| {
            let round = Round {
                context: CONTEXT,
                draft,
                sampling: &sampling,
                method: VerifyMethod::Tree,
                weighs: false,
            };
            let request = Onnx.verify(&engine(), &round).unwrap();
            Onnx.result(&engine(), &round, &request, std::slice::from_ref(&body))
        };
        assert!(read(&Tree::default()).is_ok());
        assert!(read(&Tree::chain(&[4], Source::Model, Features::default())).is_err());
    }
}
