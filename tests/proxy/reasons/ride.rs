//! Every reason why a request that may leap does not.

use std::time::Duration;

use foretell::words::RideReason;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::json;

use super::engines;
use super::scene::{COMPLETIONS, FORCED, PLAIN, Scene, Stage, completion, misleading, play, prompt};
use super::told::Ask;
use crate::fakes::toy::{Context, Toy};
use crate::fakes::{Fault, Load, Temper, When};

/// Where drafts are scored.
const GENERATE: &str = "/inference/v1/generate";

/// What brings it about. A new reason needs a row before this compiles.
fn scene(reason: RideReason) -> Scene {
    let plain = Scene::default();
    let policy = |more: &str| Scene { policy: format!("{PLAIN}{more}"), ..Scene::default() };
    match reason {
        RideReason::Holdback => {
            Scene { policy: PLAIN.replace("{ start: 0, floor: 0 }", "{ start: 1, floor: 1 }"), ..plain }
        }
        RideReason::Observe => Scene { process: "mode: observe\n", ..plain },
        // Before the last token no leap can pay any more.
        RideReason::NoGain => plain,
        RideReason::ContextTooLong => Scene { backend: "    plans: { context_max: 16 }\n", ..plain },
        RideReason::GateLoad => Scene { before: |stage| crowd(stage).boxed(), ..plain },
        RideReason::GateStale => Scene {
            load: "every: 50ms, url: /metrics?load",
            before: |stage| hush(stage).boxed(),
            ..policy("gates: { stale: 200ms }\n")
        },
        // The request fits; what is held for its answer does not.
        RideReason::GateMemory => Scene { process: "limits: { memory: 8KiB }\n", ..plain },
        RideReason::GateHealth => Scene { before: |stage| sicken(stage).boxed(), ..plain },
        RideReason::BackendSpeculates => Scene { engines: engines::speculating, ..plain },
        RideReason::Client => {
            let ask = Ask { fields: "x-foretell: ride\r\n", ..plain.ask };
            Scene { ask, ..Scene::default() }
        }
        RideReason::Policy => policy("mode: ride\n"),
        RideReason::Shadow => policy("mode: shadow\n"),
        // Half of the time is a window.
        RideReason::Switchback => Scene {
            backend: "    budget: { switchback: 1s/2s }\n",
            before: |_| tokio::time::sleep(Duration::from_millis(50)).boxed(),
            tries: 400,
            ask: ending(),
            ..plain
        },
        // Without a prediction its drafter proposes nothing.
        RideReason::NoDraft => Scene {
            policy: PLAIN.replace("prompt_lookup, ngram: { min: 1, max: 8 }", "prediction"),
            ask: ending(),
            ..plain
        },
        RideReason::Draining => {
            Scene { process: "drain: { delay: 1m }\n", before: |stage| drain(stage).boxed(), ..plain }
        }
        RideReason::VerifyFault => failing(|stage| verdicts(stage, &Fault::Status(500))),
        RideReason::RetryAfter => failing(|stage| verdicts(stage, &Fault::Later(503, 7))),
        // Others compute, and what may be refused has been.
        RideReason::Budget => Scene {
            backend: "    budget: { extra_tokens: 0, switchback: null }\n",
            before: |stage| spend(stage).boxed(),
            tries: 20,
            ask: completion(&json!({"max_tokens": 64})),
            ..plain
        },
        // Drafts go wrong from their first token, some hundred times.
        RideReason::GateAcceptance => {
            Scene { tries: 200, ask: completion(&json!({"prompt": misleading(), "max_tokens": 8})), ..plain }
        }
        // What looks as if it paid is measured to be far slower.
        RideReason::GateLatency => Scene {
            before: |stage| verdicts(stage, &Fault::Slow(Duration::from_millis(300))),
            tries: 40,
            ask: completion(&json!({"max_tokens": 48})),
            ..plain
        },
    }
}

/// A completion that ends by itself, at a token that it is the first to have: what is told last is not that the
/// limit is near.
fn ending() -> Ask {
    let toy = Toy::new(Temper { eos_every: None, ..Temper::default() });
    let mut context = Context::new(&prompt());
    loop {
        let next = toy.row(&context, context.len()).best();
        let output = &context.tokens()[prompt().len()..];
        if output.len() >= 3 && !output.contains(&next) {
            return completion(&json!({"max_tokens": 64, "stop_token_ids": [next]}));
        }
        assert!(output.len() < 7, "the text must end while the pace is old");
        context.push(next);
    }
}

/// Requests of others wait.
async fn crowd(stage: &Stage) {
    *stage.engines.houses[0].pretend.lock() = Load { running: 4, waiting: 2, kv: 0.3 };
    stage.until(|| async { stage.proxy.replica().await["load"]["waiting"] == json!(2) }).await;
}

/// Requests of others are computed, and drafts were refused beside them until nothing is left of the budget.
async fn spend(stage: &Stage) {
    let house = &stage.engines.houses[0];
    if house.pretend.lock().running > 0 {
        return;
    }
    *house.pretend.lock() = Load { running: 4, waiting: 0, kv: 0.3 };
    stage.until(|| async { stage.proxy.replica().await["load"]["running"] == json!(4) }).await;
    stage.proxy.adopt(FORCED).await;
    let wrong = completion(&json!({"prompt": misleading(), "max_tokens": 24}));
    for number in 0..4 {
        wrong.told(&stage.proxy, false, &format!("wrong-{number}")).await.assert_agreed();
    }
    stage.proxy.adopt(PLAIN).await;
}

/// The load page falls silent; the same page without a query, which shows the process, does not. Pages are read one after the
/// other: once one hangs no figures come any more.
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

/// The replica fails until it is not trusted, and then does not.
async fn sicken(stage: &Stage) {
    let faults = &stage.engines.houses[0].faults;
    faults.always(When::path("/health"), Fault::Status(503));
    faults.always(When::path(COMPLETIONS), Fault::Status(500));
    let relayed = Ask { fields: "x-foretell: off\r\n", ..completion(&json!({})) };
    let mut failures = 0;
    while stage.proxy.replica().await["breaker"] != "open" {
        assert!(failures < 20, "{}", stage.proxy.replica().await);
        relayed.told(&stage.proxy, false, &format!("failure-{failures}")).await.assert_agreed();
        failures += 1;
    }
    faults.clear();
    faults.always(When::path("/health"), Fault::Status(503));
}

/// The process is told to stop, and goes on accepting for a while.
async fn drain(stage: &Stage) {
    assert_eq!(stage.proxy.post("/api/drain").await.head.status(), 200);
    assert_eq!(stage.proxy.get("/readyz").await.head.status(), 503);
}

/// A scene in which every token is leapt at, and every verdict fails.
fn failing(before: fn(&Stage) -> BoxFuture<'_, ()>) -> Scene {
    Scene {
        policy: FORCED.to_owned(),
        ask: completion(&json!({"max_tokens": 12})),
        before,
        ..Scene::default()
    }
}

fn verdicts<'a>(stage: &'a Stage, fault: &Fault) -> BoxFuture<'a, ()> {
    stage.engines.houses[0].faults.clear();
    for path in [GENERATE, COMPLETIONS] {
        stage.engines.houses[0].faults.always(When::path(path).streamed(false), fault.clone());
    }
    std::future::ready(()).boxed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ride_tells_its_reason_in_answer_metrics_and_log() {
    let mut wrong = String::new();
    for reason in RideReason::ALL {
        wrong += &play(scene(reason), &format!("ridden/{}", reason.name())).await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}
