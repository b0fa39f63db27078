//! Every reason why an eligible request is plain.

use std::time::Duration;

use foretell_core::words::PlainReason;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::json;

use super::engines;
use super::scene::{COMPLETIONS, FORCED, PLAIN, Scene, Stage, chat, completion, misleading, play, prompt};
use super::told::Ask;
use crate::fakes::toy::{Context, Toy};
use crate::fakes::{Fault, Load, Temper, When};

/// The route on which drafts are scored.
const GENERATE: &str = "/inference/v1/generate";

/// The scene that causes a reason; `None` if another test shows it. A new reason needs a row here
/// to compile.
fn scene(reason: PlainReason) -> Option<Scene> {
    let plain = Scene::default();
    let policy = |more: &str| Scene { policy: format!("{PLAIN}{more}"), ..Scene::default() };
    let scene = match reason {
        PlainReason::ControlGroup => {
            Scene { policy: PLAIN.replace("{ start: 0, floor: 0 }", "{ start: 1, floor: 1 }"), ..plain }
        }
        PlainReason::Observe => Scene { process: "mode: observe\n", ..plain },
        // Before the last token no round can pay any more.
        PlainReason::NoGain => Scene { tries: 8, ..plain },
        PlainReason::ContextTooLong => Scene { backend: "    verify: { context_max: 16 }\n", ..plain },
        PlainReason::GateLoad => Scene { before: |stage| concurrency(stage).boxed(), ..plain },
        PlainReason::GateStale => Scene {
            load: "every: 50ms, url: /metrics?load",
            before: |stage| hush(stage).boxed(),
            ..policy("gates: { stale: 200ms }\n")
        },
        // The request fits; the buffer for its answer does not.
        PlainReason::GateMemory => Scene { process: "limits: { memory: 8KiB }\n", ..plain },
        PlainReason::GateHealth => Scene { before: |stage| sicken(stage).boxed(), ..plain },
        PlainReason::BackendSpeculates => Scene { engines: engines::speculating, ..plain },
        PlainReason::Client => {
            let ask = Ask { fields: "x-foretell: plain\r\n", ..plain.ask };
            Scene { ask, ..Scene::default() }
        }
        PlainReason::Policy => policy("mode: plain\n"),
        PlainReason::Shadow => policy("mode: shadow\n"),
        // The first chat shows that there is a parser; the next one is plain.
        PlainReason::Parser => Scene {
            engines: engines::parsing,
            ask: chat(&json!("Go on."), &json!({"max_tokens": 8})),
            tries: 3,
            ..plain
        },
        // Without a prediction its drafter proposes nothing.
        PlainReason::NoDraft => Scene {
            policy: PLAIN.replace("prompt_lookup, ngram: { min: 1, max: 8 }", "prediction"),
            ask: ending(),
            ..plain
        },
        PlainReason::Draining => {
            Scene { process: "drain: { delay: 1m }\n", before: |stage| drain(stage).boxed(), ..plain }
        }
        PlainReason::VerifyFault => failing(|stage| results(stage, &Fault::Status(500))),
        PlainReason::RetryAfter => failing(|stage| results(stage, &Fault::Later(503, 7))),
        // Drafts are refused from their first token, some hundred times.
        PlainReason::GateAcceptance => {
            Scene { tries: 200, ask: completion(&json!({"prompt": misleading(), "max_tokens": 8})), ..plain }
        }
        // The first token is the first one of this engine.
        PlainReason::NotMeasured => plain,
        PlainReason::NoVerifyMethod => Scene { backend: "    verify: { allow: [tree] }\n", ..plain },
        PlainReason::UpstreamError => Scene { before: refuse, ..plain },
        // Speculation is projected to pay and measured to be far slower.
        PlainReason::GateRegret => Scene {
            before: |stage| results(stage, &Fault::Slow(Duration::from_millis(300))),
            tries: 40,
            ask: completion(&json!({"max_tokens": 48})),
            ..plain
        },
        // These take an engine that misbehaves or parses, a drafter that fails, hundreds of
        // requests, or rounds that are slow and pay: tests/pure/session.rs, tests/proxy/parsers.rs,
        // tests/proxy/end_to_end/faults.rs, tests/proxy/groups, src/core/control/forecast.rs and
        // gates.rs.
        PlainReason::UntrustedIds
        | PlainReason::Grammar
        | PlainReason::WithheldText
        | PlainReason::Budget
        | PlainReason::GateControl
        | PlainReason::GateFirstToken
        | PlainReason::Undecided
        | PlainReason::DraftFault
        | PlainReason::MaxGap => return None,
    };
    Some(scene)
}

/// A completion that ends by itself, at a token that is new in it, so that its last reason is not
/// that the limit is near.
fn ending() -> Ask {
    let toy = Toy::new(Temper { eos_every: None, ..Temper::default() });
    let mut context = Context::new(&prompt());
    loop {
        let next = toy.row(&context, context.len()).best();
        let output = &context.tokens()[prompt().len()..];
        if output.len() >= 3 && !output.contains(&next) {
            return completion(&json!({"max_tokens": 64, "stop_token_ids": [next]}));
        }
        assert!(output.len() < 7, "the text must end while the measured pace is old");
        context.push(next);
    }
}

/// Other requests wait.
async fn concurrency(stage: &Stage) {
    *stage.engines.houses[0].pretend.lock() = Load { running: 4, waiting: 2, kv: 0.3 };
    stage.until(|| async { stage.proxy.replica().await["load"]["waiting"] == json!(2) }).await;
}

/// The load page falls silent; the same page without a query, which shows the process, does not.
/// Pages are read one after the other: once one hangs, no new figures arrive.
async fn hush(stage: &Stage) {
    let faults = &stage.engines.houses[0].faults;
    if faults.struck() == 0 {
        stage.until(|| async { stage.proxy.replica().await["load"]["running"].is_number() }).await;
        faults.always(When::path("/metrics").query("load"), Fault::Hang);
        stage.until(|| async { faults.struck() > 0 }).await;
    }
    stage
        .until(|| async {
            let metrics = stage.proxy.get("/metrics").await.text();
            metrics.lines().any(|line| {
                line.starts_with("foretell_gate_open{")
                    && line.contains("gate=\"stale\"")
                    && line.ends_with(" 0")
            })
        })
        .await;
}

/// The engine refuses every completion.
fn refuse(stage: &Stage) -> BoxFuture<'_, ()> {
    stage.engines.houses[0].faults.always(When::path(COMPLETIONS), Fault::Status(400));
    std::future::ready(()).boxed()
}

/// The replica fails until its breaker opens, and then recovers.
async fn sicken(stage: &Stage) {
    let faults = &stage.engines.houses[0].faults;
    faults.always(When::path("/health"), Fault::Status(503));
    faults.always(When::path(COMPLETIONS), Fault::Status(500));
    let passthrough = Ask { fields: "x-foretell: off\r\n", ..completion(&json!({})) };
    let mut failures = 0;
    while stage.proxy.replica().await["breaker"] != "open" {
        assert!(failures < 20, "{}", stage.proxy.replica().await);
        passthrough.told(&stage.proxy, false, &format!("failure-{failures}")).await.assert_agreed();
        failures += 1;
    }
    faults.clear();
    faults.always(When::path("/health"), Fault::Status(503));
}

/// The process drains, and accepts requests for a while.
async fn drain(stage: &Stage) {
    assert_eq!(stage.proxy.post("/api/drain").await.head.status(), 200);
    assert_eq!(stage.proxy.get("/readyz").await.head.status(), 503);
}

/// A scene that speculates at every token, and in which every verify request fails.
fn failing(before: fn(&Stage) -> BoxFuture<'_, ()>) -> Scene {
    Scene {
        policy: FORCED.to_owned(),
        ask: completion(&json!({"max_tokens": 12})),
        before,
        ..Scene::default()
    }
}

fn results<'a>(stage: &'a Stage, fault: &Fault) -> BoxFuture<'a, ()> {
    stage.engines.houses[0].faults.clear();
    for path in [GENERATE, COMPLETIONS] {
        stage.engines.houses[0].faults.always(When::path(path).streamed(false), fault.clone());
    }
    std::future::ready(()).boxed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_plain_request_has_its_reason_in_answer_metrics_and_log() {
    let mut wrong = String::new();
    for reason in PlainReason::ALL {
        if let Some(scene) = scene(reason) {
            wrong += &play(scene, &format!("plain/{}", reason.name())).await;
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
