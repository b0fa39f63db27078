use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::Dialect;

fn engine() -> Engine {
    let mut engine = Engine::new(Dialect::Onnx, "m", "1");
    engine.methods = vec![VerifyMethod::Tree];
    engine
}

fn bounds(calls: u32) -> Bounds {
    Bounds {
        calls,
        until: Tick(1_000),
        bytes_max: 1 << 20,
        context_max: 8192,
        allow: VerifyMethod::ALL.to_vec(),
    }
}

fn text() -> Vec<TokenId> {
    (0..TEXT as u32).map(|at| at * 7 % 301).collect()
}

/// A verify answer of a target that has cached `cached(context)` tokens.
fn answer(call: &Call, cached: impl FnOnce(usize) -> usize) -> ProbeAnswer {
    let body: Value = serde_json::from_slice(&call.body).unwrap();
    let (context, nodes) =
        (body["context"].as_array().unwrap().len(), body["tokens"].as_array().unwrap().len());
    let rows = vec![json!({"sample": 1, "logprob": -1.0, "top": [], "draft_logprob": null}); nodes + 1];
    let usage = json!({"prompt_tokens": context + nodes, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached(context)}});
    let answer = json!({"model": "m", "seed": 1, "usage": usage, "rows": rows, "accepted": []});
    ProbeAnswer::Round { bodies: vec![serde_json::to_vec(&answer).unwrap()], seconds: 0.01 }
}

/// Probes for a single engine where `engines` answer in turn.
fn of_turns(engines: usize) -> Findings {
    let mut prober = Prober::of_one(engine(), text(), bounds(40), false);
    let mut warm = HashSet::new();
    let mut turn = 0;
    while let Some(step) = prober.next(Tick(0)) {
        let ProbeStep::Round { calls, .. } = step else { panic!("a plain request") };
        let seen = !warm.insert(turn % engines);
        prober.take(answer(&calls[0], |context| if seen { context - 1 } else { 0 }));
        turn += 1;
    }
    prober.findings()
}

#[test]
fn one_engine_has_cached_what_it_was_sent_and_one_of_several_has_not() {
    assert!(!of_turns(1).several_engines);
    for engines in 2..=6 {
        let findings = of_turns(engines);
        assert!(findings.several_engines && findings.calls == 4, "{engines}");
    }
}

#[test]
fn the_checks_are_made_on_connections_of_their_own() {
    let mut prober = Prober::of_one(engine(), text(), bounds(40), false);
    let mut fresh = Vec::new();
    while let Some(ProbeStep::Round { calls, fresh: own }) = prober.next(Tick(0)) {
        fresh.push(own);
        prober.take(answer(&calls[0], |_| 8));
    }
    assert_eq!(fresh, [false, true, true, true]);
}

#[test]
fn no_two_rounds_are_the_same_and_bounds_hold() {
    for most in [1, 5, 40] {
        let mut prober = Prober::new(engine(), text(), bounds(most));
        let (mut seen, mut calls) = (HashSet::new(), 0);
        while let Some(step) = prober.next(Tick(0)) {
            calls += 1;
            match step {
                ProbeStep::Round { calls, .. } => {
                    assert!(seen.insert(calls[0].body.clone()));
                    prober.take(answer(&calls[0], |context| context - 1));
                }
                ProbeStep::Plain { .. } => prober.take(ProbeAnswer::Plain(Vec::new())),
            }
        }
        assert!(calls <= most);
        assert_eq!(prober.findings().calls, calls);
    }
}

#[test]
fn after_its_time_nothing_is_asked() {
    let mut prober = Prober::new(engine(), text(), bounds(40));
    assert_eq!(prober.next(Tick(0).after(Duration::from_millis(2))), None);
    assert!(prober.findings().notes.iter().any(|note| note.contains("time")));
}

#[test]
fn a_method_refused_twice_is_given_up_and_a_busy_server_stops_the_probe() {
    let mut prober = Prober::new(engine(), text(), bounds(40));
    while prober.next(Tick(0)).is_some() {
        prober.take(ProbeAnswer::Refused(400, Vec::new()));
    }
    let findings = prober.findings();
    assert!(findings.engine.methods.is_empty() && findings.removed[0].1.contains("400"));
    let mut prober = Prober::new(engine(), text(), bounds(40));
    prober.next(Tick(0));
    prober.take(ProbeAnswer::Refused(429, Vec::new()));
    assert_eq!(prober.next(Tick(0)), None);
}

/// Probes a vLLM whose scoring calls succeed if `which` is true of their number; the others answer
/// that a row holds a number that JSON cannot express.
fn by_chance(which: impl Fn(usize) -> bool) -> (Findings, usize) {
    let mut engine = Engine::new(Dialect::Vllm, "m", "0.32.0");
    engine.methods = vec![VerifyMethod::Score, VerifyMethod::FanOut];
    let mut prober = Prober::new(engine, text(), bounds(40));
    let mut scored = 0;
    while let Some(step) = prober.next(Tick(0)) {
        let ProbeStep::Round { calls, .. } = step else {
            prober.take(ProbeAnswer::Plain(Vec::new()));
            continue;
        };
        let score = calls[0].path.ends_with("/generate");
        scored += usize::from(score);
        prober.take(if !score || which(scored) {
            let error =
                json!({"error": {"message": "Out of range float values are not JSON compliant: nan"}});
            ProbeAnswer::Refused(400, error.to_string().into_bytes())
        } else {
            let body: Value = serde_json::from_slice(&calls[0].body).unwrap();
            let rows =
                vec![json!({"1": {"logprob": -1.0, "rank": 1}}); body["token_ids"].as_array().unwrap().len()];
            let choice = json!({"index": 0, "token_ids": [1], "finish_reason": "length"});
            let answer = json!({"request_id": "a", "choices": [choice], "prompt_logprobs": rows});
            ProbeAnswer::Round { bodies: vec![answer.to_string().into_bytes()], seconds: 0.01 }
        });
    }
    (prober.findings(), scored)
}

#[test]
fn an_undecided_answer_is_retried_before_its_method_is_given_up() {
    let (findings, _) = by_chance(|_| false);
    assert!(
        !findings.engine.methods.contains(&VerifyMethod::FanOut),
        "for another method the same error is a refusal"
    );
    for one in 1..=6 {
        let (findings, _) = by_chance(|call| call == one);
        assert!(findings.engine.methods.contains(&VerifyMethod::Score), "{one}: {:?}", findings.removed);
    }
    let (findings, scored) = by_chance(|_| true);
    assert!(!findings.engine.methods.contains(&VerifyMethod::Score), "{:?}", findings.removed);
    assert!(scored <= 5, "{scored}");
}
