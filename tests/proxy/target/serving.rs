//! How the server shares the model: cancelling, reuse, waiting, metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use foretell_onnx::forward::Forward;
use foretell_onnx::grammar::{Constraint, Grammars, run_on_thread};
use foretell_onnx::pace::Paced;
use foretell_onnx::sampler::Sampler;
use foretell_onnx::target::job::{Event, Failure, Generate, Job, Limits};
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler::Engine;
use foretell_wire::openai::{Grammar, Sampling};
use http::Method;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::sync::mpsc;

use super::client::serve;
use super::fake::{EOS, Fake, VOCABULARY};
use crate::end_to_end::model;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_its_lane() {
    let server = serve(Fake::new(1, 1 << 20)).await;
    for stream in [true, false] {
        let body = json!({"prompt": "endless", "max_tokens": 1 << 19, "temperature": 0, "ignore_eos": true, "stream": stream});
        let path = "/v1/completions";
        let tokens = server.watch.tokens.load(SeqCst);
        if stream {
            let (_, mut answer) = server.send(Method::POST, path, body.to_string()).await;
            for _ in 0..3 {
                answer.frame().await.unwrap().unwrap();
            }
            drop(answer);
        } else {
            let asked = server.send(Method::POST, path, body.to_string());
            let started = async {
                while server.watch.tokens.load(SeqCst) < tokens + 20 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! { _ = asked => panic!("it ended"), () = started => {} }
        }
        // The only lane: this is answered only if the other request has released it.
        server.ask(path, &json!({"prompt": "next", "max_tokens": 3})).await;
    }
    assert!(server.metric("foretell_target_requests_dropped_total").await >= 2.0);
    // Three tokens of each that was not dropped, and at least those that were streamed.
    let generated = server.metric("foretell_target_generated_tokens_total").await;
    assert!(generated >= 3.0 + 3.0 + 3.0 + 10.0, "{generated} with those of the clients that left");
}

fn job(prompt: &[u32]) -> (Job, mpsc::UnboundedReceiver<Event>) {
    let (events, receiver) = mpsc::unbounded_channel();
    let sampler = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }, 0, 0);
    let limits = Limits { max_tokens: 100, ..Limits::default() };
    let generate = Generate {
        prompt: prompt.to_vec(),
        generated: 0,
        sampler,
        limits,
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        propose: 0,
        events,
    };
    (Job::Generate(Box::new(generate)), receiver)
}

/// A job for one token behind a prompt of this many.
fn one_token(first: u32, tokens: u32) -> (Job, mpsc::UnboundedReceiver<Event>) {
    let (mut asked, receiver) = job(&(0..tokens).map(|at| (first + at) % 250).collect::<Vec<u32>>());
    if let Job::Generate(generate) = &mut asked {
        generate.limits.max_tokens = 1;
    }
    (asked, receiver)
}

/// Each of them takes the budget of two turns.
#[test]
fn long_prompts_are_computed_in_order_of_arrival() {
    let (model, permits) = Fake::new(6, 2048).gated();
    let watch = model.watch.clone();
    let engine = Engine::start(Box::new(model), Arc::new(Metrics::new().unwrap())).unwrap();
    let (mut jobs, mut receivers) = (Vec::new(), Vec::new());
    for first in 0..6 {
        let (asked, receiver) = one_token(first * 31, 1024);
        jobs.push(asked);
        receivers.push(receiver);
    }
    engine.submit(jobs);
    let mut order = Vec::new();
    for run in 1..=12 {
        permits.send(()).unwrap();
        while watch.runs.load(SeqCst) < run {
            std::thread::yield_now();
        }
        // What the run before has brought was sent before this one began.
        order.extend((0..6).filter(|&at| receivers[at].try_recv().is_ok()));
    }
    order.dedup();
    assert!(order.starts_with(&[0, 1, 2, 3, 4]), "{order:?}");
}

/// Runs for a short prompt and a long one, a token of each.
fn runs_of_two(paced: Option<&str>) -> usize {
    let model = Fake::new(2, 2048);
    let watch = model.watch.clone();
    let model: Box<dyn Forward> = match paced {
        Some(pace) => Box::new(Paced::new(Box::new(model), pace.parse().unwrap())),
        None => Box::new(model),
    };
    let engine = Engine::start(model, Arc::new(Metrics::new().unwrap())).unwrap();
    let (jobs, receivers): (Vec<_>, Vec<_>) = [one_token(0, 3), one_token(0, 1024)].into_iter().unzip();
    engine.submit(jobs);
    for mut receiver in receivers {
        while receiver.blocking_recv().is_some() {}
    }
    watch.runs.load(SeqCst)
}

#[test]
fn a_long_prompt_is_read_in_short_pieces_with_others_and_at_once_in_a_step_of_a_gpu() {
    // 128 tokens in the turn of the short one, 128 in the next, 512, and the rest.
    assert_eq!(runs_of_two(None), 5);
    assert_eq!(runs_of_two(Some("profile=h100-8b")), 2);
}

/// The steps of this expression take longer and longer, until one meets the limits.
#[test]
fn a_slow_grammar_delays_no_other_output() {
    let words = tempfile::tempdir().unwrap();
    let grammars = Grammars::new(&model::words(words.path()), VOCABULARY, &[EOS]).unwrap();
    let grammar = Grammar::of_structured_outputs(&json!({"regex": "(.{0,200}){0,200}"})).unwrap();
    let begun = run_on_thread(move |stop| {
        let mut place = grammars.position_after(&grammar, &[], false, stop)?;
        Ok((place.next(stop)?, place))
    });
    let (next, place) = begun.unwrap();
    let engine = Engine::start(Box::new(Fake::new(2, 2048)), Arc::new(Metrics::new().unwrap())).unwrap();
    let ((mut slow, mut late), (other, mut events)) = (job(&[1, 2, 3]), job(&[9, 8, 7]));
    if let Job::Generate(generate) = &mut slow {
        let wakes = engine.clone();
        let wake = move || {
            wakes.submit(Vec::new());
        };
        generate.constraint = Some(Constraint::new(next, place, wake).unwrap());
        generate.limits.max_tokens = 1000;
    }
    engine.submit(vec![slow, other]);
    let tokens =
        std::iter::from_fn(|| events.blocking_recv()).filter(|event| matches!(event, Event::Token(_)));
    assert_eq!(tokens.count(), 100);
    let failed = |event: &Event| matches!(event, Event::Failed(Failure::Grammar(_)));
    assert!(
        !std::iter::from_fn(|| late.try_recv().ok()).any(|event| failed(&event)),
        "in step with the other"
    );
    assert!(std::iter::from_fn(|| late.blocking_recv()).any(|event| failed(&event)));
}

#[test]
fn a_dropped_receiver_costs_at_most_the_step_in_progress() {
    let (model, permits) = Fake::new(2, 512).gated();
    let watch = model.watch.clone();
    let engine = Engine::start(Box::new(model), Arc::new(Metrics::new().unwrap())).unwrap();
    let ((first, mut gone), (second, mut stays)) = (job(&[1, 2, 3]), job(&[9, 8, 7]));
    engine.submit(vec![first, second]);
    permits.send(()).unwrap();
    assert!(matches!(gone.blocking_recv(), Some(Event::Prompt { .. })));
    for _ in 0..2 {
        stays.blocking_recv().unwrap();
    }
    assert_eq!(watch.tokens.load(SeqCst), 6);
    // The thread is in its second run, or before it: at most one token of the dropped job is
    // computed.
    drop(gone);
    for _ in 0..5 {
        permits.send(()).unwrap();
        stays.blocking_recv().unwrap();
    }
    let tokens = watch.tokens.load(SeqCst);
    assert!((11..=12).contains(&tokens), "{tokens}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_of_one_call_share_their_common_prefix() {
    let server = serve(Fake::new(8, 2048)).await;
    let body = json!({"prompt": "long prompt ".repeat(60), "n": 6, "max_tokens": 2, "temperature": 1});
    server.ask("/v1/completions", &body).await;
    let (tokens, forks) = (server.watch.tokens.load(SeqCst), server.watch.forks.load(SeqCst));
    assert!((720..900).contains(&tokens), "the prompt is computed once, not six times: {tokens}");
    assert_eq!(forks, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_does_not_stop_its_neighbours() {
    let (model, permits) = Fake::new(2, 8192).gated();
    let server = Arc::new(serve(model).await);
    let body = json!({"prompt": "a", "max_tokens": 200, "ignore_eos": true, "stream": true});
    permits.send(()).unwrap();
    let (_, mut short) = server.send(Method::POST, "/v1/completions", body.to_string()).await;
    short.frame().await.unwrap().unwrap();
    let neighbour = server.clone();
    let long = tokio::spawn(async move {
        let body = json!({"prompt": "b".repeat(4000), "max_tokens": 1});
        neighbour.ask("/v1/completions", &body).await
    });
    let mut steps = 0;
    while !long.is_finished() {
        // Two runs: one of decode steps and one of a piece of the prompt, or two of decode steps.
        permits.send(()).unwrap();
        permits.send(()).unwrap();
        short.frame().await.expect("a token in every turn").unwrap();
        steps += 1;
    }
    long.await.unwrap();
    assert!(steps > 20, "the long prompt came in pieces: {steps}");
    drop(short);
    for _ in 0..400 {
        let _ = permits.send(());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_for_a_lane_are_counted_and_served() {
    // Long enough that the first still runs when the last has arrived, however slow its connection
    // is.
    const TOKENS: u64 = 400;
    let (model, permits) = Fake::new(1, 512).gated();
    let server = Arc::new(serve(model).await);
    let asked: Vec<_> = (0..3)
        .map(|i| {
            let server = server.clone();
            tokio::spawn(async move {
                server
                    .ask(
                        "/v1/completions",
                        &json!({"prompt": [i, 1, 2], "max_tokens": TOKENS, "ignore_eos": true}),
                    )
                    .await
            })
        })
        .collect();
    let mut state = (0.0, 0.0);
    for _ in 0..100_000 {
        state = (
            server.metric("foretell_target_requests_running").await,
            server.metric("foretell_target_requests_waiting").await,
        );
        if state == (1.0, 2.0) {
            break;
        }
        // The scheduler looks at its queue between two runs.
        let _ = permits.send(());
    }
    for _ in 0..3 * (TOKENS + 8) {
        let _ = permits.send(());
    }
    for answer in asked {
        assert_eq!(answer.await.unwrap()["usage"]["completion_tokens"], TOKENS);
    }
    assert_eq!(state, (1.0, 2.0), "one runs and two wait");
    // The last answer leaves a moment before its lane is free.
    let mut kv_usage = 1.0;
    for _ in 0..1000 {
        kv_usage = server.metric("foretell_target_kv_usage_ratio").await;
        if kv_usage < 1e-12 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(kv_usage < 1e-12, "{kv_usage}");
}

#[tokio::test]
async fn the_small_routes_answer() {
    let server = serve(Fake::new(1, 64)).await;
    assert_eq!(server.get("/health").await.0, 200);
    let models: serde_json::Value = serde_json::from_str(&server.get("/v1/models").await.1).unwrap();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("toy"), &json!(64)));
    assert!(models["data"][0]["created"].as_u64().unwrap() > 1_600_000_000);
    let version: serde_json::Value = serde_json::from_str(&server.get("/version").await.1).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    server.ask("/v1/verify", &json!({"context": [1, 2, 3], "tokens": [4, 5]})).await;
    let metrics = server.get("/metrics").await.1;
    for name in [
        "verify_drafted_tokens_total 2",
        "step_seconds_count{kind=\"verify\"} 1",
        "computed_tokens_total 5",
        "requests_waiting 0",
    ] {
        assert!(metrics.contains(&format!("foretell_target_{name}\n")), "{name} in {metrics}");
    }
}
