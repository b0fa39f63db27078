//! An answer that contradicts itself is not used: the client still gets the engine's own text.

use std::time::Duration;

use foretell_wire::openai::Route;
use serde_json::json;

use super::contract::{PROMPTS, greedy, talkative};
use super::house::{House, setup};
use super::table::{Row, TABLE};
use crate::client::Ask;
use crate::fakes::{Fault, When};

/// The row of this engine: its calls return both ids and text, or both ids and counts.
fn row(name: &str) -> &'static Row {
    TABLE.iter().find(|row| row.name == name).unwrap()
}

async fn house(name: &str) -> (House, Ask) {
    let house = House::build(row(name), setup(None)).await;
    let prompt = talkative(&house, Route::Completions, PROMPTS[0]).await;
    // Long enough to request the ids of the prompt during the first call.
    house.engine.house().pace.lock().per_token = Duration::from_millis(5);
    let ask = Ask::new(Route::Completions, true, greedy(&prompt, &json!({"ignore_eos": true})));
    let (plain, through) = (house.direct(&ask).await, house.through(&ask).await);
    assert_eq!(
        (&through.plain, through.foretell()["path"].as_str()),
        (&plain.plain, Some("speculated")),
        "{name}"
    );
    (house, ask)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_that_are_not_those_of_the_text_are_a_fault_of_the_call() {
    // A later plain call to llama.cpp is of the same kind, with more tokens.
    for (name, call) in [("vllm", ""), ("sglang", ""), ("llamacpp", "\"n_predict\":1,")] {
        let (house, ask) = house(name).await;
        let plain = house.direct(&ask).await;
        let verify = When::path(house.row.verifies[0]).streamed(false).holding(call);
        house.engine.house().faults.always(verify, Fault::ShiftedIds);
        for stream in [true, false] {
            let ask = Ask { stream, ..ask.clone() };
            let got = house.through(&ask).await;
            assert_eq!(got.plain.text, plain.plain.text, "{name}: {}", got.foretell());
            assert_eq!(got.foretell()["accepted"], 0, "{name}: {}", got.foretell());
        }
        assert!(house.engine.house().faults.struck() > 0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_counts_another_prompt_is_a_fault_of_the_call() {
    for name in ["vllm", "vllm-scale-out", "sglang", "llamacpp"] {
        let (house, ask) = house(name).await;
        let plain = house.direct(&ask).await;
        let verify = When::path(house.row.verifies[0]).streamed(false);
        house.engine.house().faults.always(verify, Fault::OtherCount);
        let got = house.through(&ask).await;
        assert_eq!(got.plain.text, plain.plain.text, "{name}: {}", got.foretell());
        assert_eq!(got.foretell()["accepted"], 0, "{name}: {}", got.foretell());
        assert!(house.engine.house().faults.struck() > 0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_of_a_prompt_with_another_token_count_are_not_used() {
    let lies = [
        ("vllm", Fault::OtherPrompt),
        // The proxy asks for the count in every event: without it the ids are not used.
        ("vllm", Fault::OtherPromptCountedLast),
        ("vllm-scale-out", Fault::OtherPrompt),
        ("sglang", Fault::OtherPrompt),
    ];
    for (name, lie) in lies {
        let (house, ask) = house(name).await;
        let plain = house.direct(&ask).await;
        let first = When::path(Route::Completions.path()).streamed(true);
        house.engine.house().faults.always(first, lie);
        let got = house.through(&ask).await;
        assert_eq!(got.plain.text, plain.plain.text, "{name}: {}", got.foretell());
        assert_eq!(
            (&got.foretell()["path"], &got.foretell()["rounds"]),
            (&json!("plain"), &json!(0)),
            "{name}"
        );
        assert!(house.engine.house().faults.struck() > 0, "{name}");
    }
}
