//! Answers to verify requests, to requests concurrent with plain decoding, and events of plain
//! requests, read by every dialect.
//!
//! Input: dialect, verification method, draft, sampling, one byte each; then bodies. The parsed
//! result must fit the request and be the same twice, and a judge that gets it emits only tokens of
//! the answer.

use foretell_core::draft::{Features, Node, Source, Tree, Vote};
use foretell_core::session::accept::{Accept, Judge, Judged, Walk};
use foretell_core::units::TokenId;
use foretell_core::words::{Row, VerifyMethod, VerifyResult};
use foretell_engines::{
    Context, Dialect, Engine, PrefixCache, PromptStep, RequestKind, Round, RowShape, SpecialTokens, shared,
};
use foretell_wire::openai::{Event, Judgement, Request, Route, Sampling, judge};
use serde_json::Value;

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;
const PROMPT: [TokenId; 5] = [1, 2, 3, 4, 5];

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let dialect = input.one(&Dialect::ALL);
    let method = input.one(&VerifyMethod::ALL);
    let engine = Engine {
        methods: vec![method],
        cache: PrefixCache { block: 16, reports_hits: input.one(&[false, true]), ..PrefixCache::default() },
        slots: Some(8),
        context: Some(2048),
        tokens: SpecialTokens { special: vec![0], ..SpecialTokens::default() },
        ..Engine::new(dialect, "m", "1.0")
    };
    let draft = draft(input.below(8));
    let sampling = sampling(input.below(4));
    let bodies: Vec<Vec<u8>> = input.bodies().into_iter().map(<[u8]>::to_vec).collect();
    let context = Context::new("m", &PROMPT, &[6]);
    let round =
        Round { context, draft: &draft, sampling: &sampling, method, weighs: sampling.temperature > 0.0 };
    answers(&engine, &round, &bodies);
    for body in &bodies {
        check_concurrent(&engine, &round, body);
        events(&engine, body);
    }
}

fn draft(shape: usize) -> Tree {
    let mut tree = Tree::default();
    let parents: &[Option<usize>] = match shape {
        0 => &[],
        1 => &[None],
        2 => &[None, Some(0)],
        3 => &[None, Some(0), Some(1), Some(2)],
        4 => &[None, None],
        5 => &[None, None, Some(0), Some(1), Some(0)],
        6 => &[None, Some(0), None, Some(2), Some(3), Some(3)],
        _ => &[None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(5), Some(6)],
    };
    for (at, &parent) in parents.iter().enumerate() {
        tree.push(Node::new(7 + at as TokenId, parent, Vote::new(Source::Model, Features::default())));
    }
    tree
}

fn sampling(kind: usize) -> Sampling {
    let plain = Sampling::default();
    match kind {
        0 => Sampling { temperature: 0.0, ..plain },
        1 => Sampling { temperature: 0.7, top_k: Some(3), top_p: 0.9, ..plain },
        2 => Sampling { temperature: 1e-3, top_k: Some(4), min_p: 0.05, ..plain },
        _ => plain,
    }
}

/// Reads the answers to the calls of a round.
fn answers(engine: &Engine, round: &Round<'_>, bodies: &[Vec<u8>]) {
    let Ok(asked) = engine.verify(round, 8 << 20) else { return };
    for call in &asked.calls {
        assert!(serde_json::from_slice::<Value>(&call.body).is_ok(), "a call is JSON");
    }
    let bodies: Vec<Vec<u8>> = bodies.iter().cycle().take(asked.calls.len()).cloned().collect();
    let Ok(result) = engine.result(round, &asked, &bodies) else { return };
    assert_eq!(engine.result(round, &asked, &bodies).as_ref(), Ok(&result), "read twice, it is the same");
    assert!(result.rows.len() <= asked.nodes + 1, "{} rows for {} nodes", result.rows.len(), asked.nodes);
    result.rows.iter().for_each(sound);
    judged(round, &result);
    if let Some(again) = engine.retry(round, &asked) {
        assert!(again.nodes <= asked.nodes);
        let _ = engine.result(round, &again, &bodies);
    }
}

/// Probabilities are probabilities.
fn sound(row: &Row) {
    let share = |p: f64| (0.0..=1.0 + 1e-6).contains(&p);
    assert!(row.draft_p.is_none_or(share), "{row:?}");
    assert!(row.entropy.is_none_or(|entropy| entropy.is_finite() && entropy >= 0.0), "{row:?}");
    let Some(dist) = &row.dist else { return };
    assert!(dist.top.iter().all(|entry| share(entry.1)), "{row:?}");
    let sum: f64 = dist.top.iter().map(|entry| entry.1).sum();
    assert!(sum <= 1.0 + 1e-6 && (!dist.complete || sum >= 1.0 - 1e-6), "{sum}: {row:?}");
    assert!(dist.slack >= 0.0 && dist.slack.is_finite(), "{row:?}");
}

/// Emits only tokens of the answer, along a path of the draft.
fn judged(round: &Round<'_>, result: &VerifyResult) {
    let free = |_: &[TokenId]| true;
    let put = Judged {
        draft: round.draft,
        result,
        context: round.context.len(),
        output: 1,
        tolerance: 0.0,
        coupled: false,
        expected: 1.0,
        price: 0.0,
        worth: &[],
        free: &free,
    };
    let accepted =
        Judge::new(Accept::default(), 7).walk(&put).expect("the verification result fits the draft");
    assert!(accepted.tokens.len() <= accepted.nodes.len() + 1);
    let mut position = None;
    for (at, &token) in accepted.tokens.iter().enumerate() {
        let row = &result.rows[position.map_or(0, |node: usize| node + 1)];
        let drawn = row.dist.as_ref().is_some_and(|dist| dist.top.iter().any(|entry| entry.0 == token));
        assert!(row.sample == Some(token) || (row.sample.is_none() && drawn), "{token} is not in {row:?}");
        position = accepted.nodes.get(at).copied();
        assert!(position.is_none_or(|node| round.draft.nodes()[node].token == token));
    }
}

/// Reads an answer to every other call.
fn check_concurrent(engine: &Engine, round: &Round<'_>, body: &[u8]) {
    for route in [Route::Completions, Route::Chat] {
        if let Ok(PromptStep::Call(call)) = engine.prompt_step(&request(route), Some(body)) {
            assert!(serde_json::from_slice::<Value>(&call.body).is_ok(), "a call is JSON");
        }
    }
    let _ = (RowShape::of(round.context.len(), body), shared::tokens(body));
    for status in [200, 400, 500] {
        let _ = engine.is_undecided(round.method, status, body);
    }
}

/// Reads an event of a plain request.
fn events(engine: &Engine, body: &[u8]) {
    let Some(event) = String::from_utf8(body.to_vec()).ok().and_then(Event::of) else { return };
    for kind in [RequestKind::First, RequestKind::Later] {
        let Ok(chunk) = engine.chunk(kind, &event) else { continue };
        assert!(!chunk.ends || kind == RequestKind::First || chunk.finish.is_some(), "{chunk:?}");
        assert_eq!(engine.chunk(kind, &event), Ok(chunk));
    }
}

fn request(route: Route) -> Request {
    let body: &[u8] = match route {
        Route::Completions => br#"{"model":"m","prompt":"x"}"#,
        Route::Chat => br#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#,
    };
    match judge(route, body) {
        Judgement::Eligible(request) => *request,
        Judgement::Passthrough { reason, .. } => panic!("{}", reason.name()),
    }
}
