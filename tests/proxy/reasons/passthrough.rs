//! Every reason why a request is passed through.

use foretell_core::words::PassthroughReason;
use futures_util::FutureExt;
use serde_json::json;

use super::scene::{CHAT, COMPLETIONS, PLAIN, Scene, chat, completion, play};
use super::told::{Ask, Body};
use super::{engines, inject};
use crate::fakes::{Fault, When};

/// The scene that causes a reason. A new reason needs a scene here to compile.
fn scene(reason: PassthroughReason) -> Scene {
    let plain = Scene::default();
    let ask = |ask| Scene { ask, ..Scene::default() };
    match reason {
        PassthroughReason::Off => Scene { process: "mode: off\n", ..plain },
        PassthroughReason::Client => ask(Ask { fields: "x-foretell: off\r\n", ..plain.ask }),
        PassthroughReason::Policy => Scene { policy: format!("{PLAIN}mode: off\n"), ..plain },
        PassthroughReason::NoPolicy => {
            Scene { policy: format!("{PLAIN}match: {{ models: [other] }}\n"), ..plain }
        }
        PassthroughReason::Route => {
            ask(Ask { path: "/tokenize", fields: "", body: Body::Raw(r#"{"prompt": "a"}"#) })
        }
        PassthroughReason::Body => {
            ask(Ask { path: COMPLETIONS, fields: "", body: Body::Raw(r#"{"model": "toy"}"#) })
        }
        PassthroughReason::Encoded => ask(Ask { fields: "content-encoding: gzip\r\n", ..plain.ask }),
        PassthroughReason::Parameter => ask(completion(&json!({"echo": true}))),
        PassthroughReason::UnknownParameter => ask(completion(&json!({"temprature": 1}))),
        // The maximum length of an answer is a default, and not that of the model's files.
        PassthroughReason::DefaultsUnknown => {
            Scene { engines: engines::silent, ask: chat(&json!("Hello"), &json!({})), ..plain }
        }
        PassthroughReason::Structured => {
            ask(completion(&json!({"structured_outputs": {"grammar": "root ::= \"yes\" | \"no\""}})))
        }
        PassthroughReason::Tools => {
            let tool =
                json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
            ask(chat(&json!("Hello"), &json!({"max_tokens": 3, "tools": [tool]})))
        }
        PassthroughReason::Reasoning => {
            ask(chat(&json!("Hello"), &json!({"max_tokens": 3, "include_reasoning": false})))
        }
        PassthroughReason::Multimodal => {
            let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
            ask(chat(&json!([image]), &json!({"max_tokens": 3})))
        }
        PassthroughReason::Choices => ask(completion(&json!({"n": 2}))),
        PassthroughReason::Seed => ask(completion(&json!({"temperature": 0.8, "seed": 7}))),
        // The engine does not provide its own either.
        PassthroughReason::Tokenizer => Scene { tokenizer: false, ..plain },
        PassthroughReason::NoVerifyMethod => Scene { engines: engines::planless, ..plain },
        // The only replica closes the connection before it answers.
        PassthroughReason::Unreachable => Scene {
            before: |stage| {
                let faults = &stage.engines.houses[0].faults;
                faults.always(When::path(COMPLETIONS), Fault::Reset);
                std::future::ready(()).boxed()
            },
            ..plain
        },
        PassthroughReason::SeveralEngines => Scene { engines: engines::several_engines, ..plain },
        // A request with additional fields is answered by a page.
        PassthroughReason::UnreadableAnswers => Scene {
            before: |stage| {
                let faults = &stage.engines.houses[0].faults;
                faults.clear();
                faults.always(When::path(COMPLETIONS).holding("return_token_ids"), Fault::Garbage);
                std::future::ready(()).boxed()
            },
            ..plain
        },
        PassthroughReason::Billed => Scene { backend: "    billed: true\n", ..plain },
        PassthroughReason::Inject => Scene { process: inject::LISTENS, before: inject::joined, ..plain },
        PassthroughReason::Sessions => Scene { process: "limits: { sessions: 0 }\n", ..plain },
        // Less than the parsed body takes.
        PassthroughReason::Memory => Scene { process: "limits: { memory: 1KiB }\n", ..plain },
        // A replica closes the connection before it answers, and the other one answers instead. The
        // first one is random.
        PassthroughReason::Fault => Scene {
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
async fn every_passthrough_request_has_its_reason_in_answer_metrics_and_log() {
    let mut wrong = String::new();
    for reason in PassthroughReason::ALL {
        wrong += &play(scene(reason), &format!("passthrough/{}", reason.name())).await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn the_routes_of_the_scenes_are_the_speculated_ones() {
    let paths = [foretell_wire::openai::Route::Completions, foretell_wire::openai::Route::Chat]
        .map(foretell_wire::openai::Route::path);
    assert_eq!(paths, [COMPLETIONS, CHAT]);
}
