//! Clients must not notice Foretell: answers of every engine, direct and through, in every mode.
//!
//! A request that is not speculated on leaves and returns byte for byte. A speculated answer has
//! the same joined text, fields and kinds of events. Ids, times and `usage.foretell` may differ.

mod aborted;
mod cases;
mod compare;
pub mod engines;
mod modes;
mod onnx;
mod parameters;
mod run;

use rstest::rstest;

use self::engines::ENGINES;

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
    let result = run::all(engine).await;
    let list: Vec<String> = result.different.iter().map(|(cell, what)| format!("{cell}: {what}")).collect();
    assert!(list.is_empty(), "{} of {} cells differ\n{}", list.len(), result.cells, list.join("\n"));
    let (count, reasons) = (result.speculated, &result.reasons);
    assert_eq!(
        count > 0,
        engine.speculates,
        "{count} answers were speculated on, others not for {reasons:?}"
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
