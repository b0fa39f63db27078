//! Every reason why a request never leaps.

use foretell::words::BypassReason;
use futures_util::FutureExt;
use serde_json::json;

use super::engines;
use super::scene::{CHAT, COMPLETIONS, PLAIN, Scene, chat, completion, play};
use super::told::{Ask, Body};
use crate::fakes::{Fault, When};

/// What brings it about. A new reason needs a scene before this compiles.
fn scene(reason: BypassReason) -> Scene {
    let plain = Scene::default();
    let ask = |ask| Scene { ask, ..Scene::default() };
    match reason {
        BypassReason::Off => Scene { process: "mode: off\n", ..plain },
        BypassReason::Client => ask(Ask { fields: "x-foretell: off\r\n", ..plain.ask }),
        BypassReason::Policy => Scene { policy: format!("{PLAIN}mode: off\n"), ..plain },
        BypassReason::NoPolicy => Scene { policy: format!("{PLAIN}match: {{ models: [other] }}\n"), ..plain },
        BypassReason::Route => {
            ask(Ask { path: "/tokenize", fields: "", body: Body::Raw(r#"{"prompt": "a"}"#) })
        }
        BypassReason::Body => {
            ask(Ask { path: COMPLETIONS, fields: "", body: Body::Raw(r#"{"model": "toy"}"#) })
        }
        BypassReason::Encoded => ask(Ask { fields: "content-encoding: gzip\r\n", ..plain.ask }),
        BypassReason::Parameter => ask(completion(&json!({"logprobs": 2}))),
        BypassReason::UnknownParameter => ask(completion(&json!({"temprature": 1}))),
        // How long an answer may become is the server's to say, which does not say it.
        BypassReason::DefaultsUnknown => {
            Scene { engines: engines::silent, ask: chat(&json!("Hello"), &json!({})), ..plain }
        }
        BypassReason::Structured => ask(completion(&json!({"response_format": {"type": "json_object"}}))),
        BypassReason::Tools => {
            let tool =
                json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
            ask(chat(&json!("Hello"), &json!({"max_tokens": 3, "tools": [tool]})))
        }
        BypassReason::Reasoning => {
            ask(chat(&json!("Hello"), &json!({"max_tokens": 3, "reasoning_effort": "low"})))
        }
        BypassReason::Multimodal => {
            let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
            ask(chat(&json!([image]), &json!({"max_tokens": 3})))
        }
        BypassReason::Choices => ask(completion(&json!({"n": 2}))),
        BypassReason::Seed => ask(completion(&json!({"temperature": 0.8, "seed": 7}))),
        // It does not hand out its own either.
        BypassReason::Tokenizer => Scene { tokenizer: false, ..plain },
        BypassReason::NoPlan => Scene { engines: engines::planless, ..plain },
        // The only replica hangs up before it answers.
        BypassReason::Unreachable => Scene {
            before: |stage| {
                let faults = &stage.engines.houses[0].faults;
                faults.always(When::path(COMPLETIONS), Fault::Reset);
                std::future::ready(()).boxed()
            },
            ..plain
        },
        BypassReason::Balanced => Scene { engines: engines::balanced, ..plain },
        BypassReason::Billed => Scene { backend: "    billed: true\n", ..plain },
        BypassReason::Sessions => Scene { process: "limits: { sessions: 0 }\n", ..plain },
        // Less than the body takes once it is understood.
        BypassReason::Memory => Scene { process: "limits: { memory: 1KiB }\n", ..plain },
        // A replica hangs up before it answers, and the other one answers instead. Which is asked first is chance.
        BypassReason::Fault => Scene {
            engines: engines::two,
            before: |stage| {
                let faults = &stage.engines.houses[0].faults;
                faults.clear();
                faults.always(When::path(COMPLETIONS), Fault::Reset);
                std::future::ready(()).boxed()
            },
            tries: 60,
            ..plain
        },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_bypass_tells_its_reason_in_answer_metrics_and_log() {
    let mut wrong = String::new();
    for reason in BypassReason::ALL {
        let path = if reason == BypassReason::Route { "relayed" } else { "bypassed" };
        wrong += &play(scene(reason), &format!("{path}/{}", reason.name())).await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn the_routes_of_the_scenes_are_the_speculated_ones() {
    let paths = [foretell::openai::Route::Completions, foretell::openai::Route::Chat]
        .map(foretell::openai::Route::path);
    assert_eq!(paths, [COMPLETIONS, CHAT]);
}
