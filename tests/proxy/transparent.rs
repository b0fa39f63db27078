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

/// Cells that still differ, by the end of their name: each has to be taken out when it is mended.
const KNOWN: &[&str] = &[];

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
    let is_known = |cell: &str| KNOWN.iter().any(|known| cell.contains(known));
    let (known, new): (Vec<_>, Vec<_>) = told.different.iter().partition(|(cell, _)| is_known(cell));
    let list: Vec<String> = new.iter().map(|(cell, what)| format!("{cell}: {what}")).collect();
    assert!(list.is_empty(), "{} of {} cells differ\n{}", list.len(), told.cells, list.join("\n"));
    for cell in KNOWN.iter().filter(|cell| cell.starts_with(name)) {
        assert!(
            known.iter().any(|(differs, _)| differs.contains(cell)),
            "{cell} is mended: take it out of KNOWN"
        );
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
