//! Nothing may tell a client that Foretell is there: what every engine answers, direct and through, in every mode.
//!
//! A request that is not speculated on leaves and returns byte for byte. A speculated answer has the same joined
//! text, fields and kinds of events. Ids, times and `usage.foretell` may differ.

mod cases;
mod compare;
mod engines;
mod modes;
mod onnx;
mod run;

use rstest::rstest;

use self::engines::ENGINES;

/// A difference that still stands; it has to be taken out once it is gone.
struct Known {
    /// The beginning of the names of its cells.
    cells: &'static str,
    /// A part of what is told of each.
    what: &'static str,
}

impl Known {
    fn covers(&self, (cell, what): &(String, String)) -> bool {
        cell.starts_with(self.cells) && what.contains(self.what)
    }
}

const KNOWN: &[Known] = &[
    // The first call is left before the server tells what it had cached of the prompt: only its last event does.
    Known { cells: "vllm/forced/", what: "prompt_tokens_details" },
    Known { cells: "trtllm/forced/", what: "prompt_tokens_details" },
    Known { cells: "llamacpp/forced/", what: "prompt_tokens_details" },
    // Reasoning is counted in whole completions only, and the first call is a stream.
    Known { cells: "sglang/", what: "reasoning_tokens" },
];

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_differs_before(
    #[values(
        "vllm", "sglang", "llamacpp", "tgi", "trtllm", "lmdeploy", "triton", "mlx", "ollama", "openai",
        "onnx"
    )]
    name: &str,
) {
    let engine = ENGINES.iter().find(|engine| engine.name == name).expect("an engine of that name");
    let told = run::all(engine).await;
    let (known, new): (Vec<_>, Vec<_>) =
        told.different.iter().partition(|cell| KNOWN.iter().any(|one| one.covers(cell)));
    let list: Vec<String> = new.iter().map(|(cell, what)| format!("{cell}: {what}")).collect();
    assert!(list.is_empty(), "{} of {} cells differ\n{}", list.len(), told.cells, list.join("\n"));
    for one in KNOWN.iter().filter(|one| one.cells.starts_with(&format!("{name}/"))) {
        let still = known.iter().any(|cell| one.covers(cell));
        assert!(still, "{} of {} is mended: take it out of KNOWN", one.what, one.cells);
    }
    assert_eq!(
        told.speculated > 0,
        engine.speculates,
        "{} answers were speculated on: {:?}",
        told.speculated,
        told.paths
    );
}

#[test]
fn every_engine_is_asked() {
    let asked = [
        "vllm", "sglang", "llamacpp", "tgi", "trtllm", "lmdeploy", "triton", "mlx", "ollama", "openai",
        "onnx",
    ];
    assert_eq!(ENGINES.iter().map(|engine| engine.name).collect::<Vec<_>>(), asked);
}
