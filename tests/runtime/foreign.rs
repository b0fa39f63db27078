//! Models exported by other tools, compared with PyTorch on the same weights.
//!
//! They are in `tests/exports/`; its README has the export commands.

use std::fs;
use std::path::{Path, PathBuf};

use foretell_core::words::TokenContext;
use foretell_onnx::drafter::{DraftFault, DrafterService, DrafterSlot, Noise};
use foretell_onnx::forward::{Feed, Forward, Lane, ModelError, Rows};
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::open;
use foretell_onnx::open::{OpenError, Options};
use foretell_onnx::runtime::model::Model;
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::Sampling;
use rstest::rstest;
use serde::Deserialize;

/// Reference from PyTorch: a text, the logits after each of its tokens, and its greedy
/// continuation.
#[derive(Deserialize)]
struct Reference {
    text: String,
    tokens: Vec<u32>,
    continuation: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn exports() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/exports")
}

fn reference() -> Reference {
    serde_json::from_str(&fs::read_to_string(exports().join("reference.json")).unwrap()).unwrap()
}

fn options(lanes: usize) -> Options {
    Options { device: DeviceChoice::Cpu, lanes, threads: 1, ..Options::default() }
}

fn load(name: &str, lanes: usize) -> Box<dyn Forward> {
    open(&exports().join(name), &options(lanes)).expect("the export opens (make fetches ONNX Runtime)").model
}

fn chain(lane: Lane, tokens: &[u32], rows: Rows) -> Feed<'_> {
    Feed { lane, tokens, parents: None, rows, draft: None }
}

/// The rows of one feed.
fn rows(model: &mut dyn Forward, lane: Lane, tokens: &[u32], rows: Rows) -> Vec<Vec<f32>> {
    let logits = model.run(&[chain(lane, tokens, rows)]).unwrap();
    (0..).map_while(|row| logits.row(0, row)).map(<[f32]>::to_vec).collect()
}

fn assert_close(got: &[Vec<f32>], want: &[Vec<f32>], within: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (position, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}");
        let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0_f32, f32::max);
        assert!(got.iter().all(|value| value.is_finite()), "{what}");
        assert!(worst <= within, "{what}: off by {worst} at {position}");
    }
}

fn best(row: &[f32]) -> u32 {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

#[rstest]
#[case("optimum/fp32", 1e-4)]
#[case("optimum/hub", 1e-4)]
#[case("optimum/merged", 1e-4)]
#[case("optimum/fp16", 5e-2)]
#[case("genai/fp32", 1e-4)]
#[case("genai/last", 1e-4)]
#[case("genai/fp16", 5e-2)]
fn logits_are_those_of_pytorch_for_every_way_into_the_cache(#[case] name: &str, #[case] within: f32) {
    let Reference { tokens, logits: want, .. } = reference();
    let mut model = load(name, 2);
    let model = model.as_mut();
    let lane = model.reserve().unwrap();
    assert_close(&rows(model, lane, &tokens, Rows::From(0)), &want, within, "prefill");
    assert_eq!(model.len(lane), tokens.len());

    model.rewind(lane, 0);
    for (position, token) in tokens.iter().enumerate() {
        let row = rows(model, lane, std::slice::from_ref(token), Rows::Last);
        assert_close(&row, &want[position..=position], within, "step by step");
    }

    model.rewind(lane, 9);
    assert!(rows(model, lane, &[3, 4, 5, 6], Rows::None).is_empty());
    assert_eq!(model.len(lane), 13);
    model.rewind(lane, 11);
    model.rewind(lane, 8);
    assert_close(&rows(model, lane, &tokens[8..], Rows::From(2)), &want[10..], within, "after a rewind");

    let other = model.reserve().unwrap();
    model.rewind(lane, 5);
    let mut done = 0;
    while done < 20 {
        let feeds = [
            chain(other, &tokens[done..done + 4], Rows::From(1)),
            chain(lane, &tokens[5 + done / 2..7 + done / 2], Rows::From(0)),
        ];
        let logits = model.run(&feeds).unwrap();
        for row in 0..3 {
            let got = [logits.row(0, row).unwrap().to_vec()];
            assert_close(&got, &want[done + 1 + row..][..1], within, "the first of two lanes");
        }
        for row in 0..2 {
            let got = [logits.row(1, row).unwrap().to_vec()];
            assert_close(&got, &want[5 + done / 2 + row..][..1], within, "the second of two lanes");
        }
        assert!(logits.row(0, 3).is_none() && logits.row(1, 2).is_none());
        done += 4;
    }

    assert_eq!((model.len(other), model.len(lane)), (20, 15));
}

#[test]
fn numbers_of_four_bits_give_the_same_in_every_way_and_choose_mostly_as_pytorch_does() {
    let Reference { tokens, logits: full, .. } = reference();
    let mut model = load("genai/int4", 1);
    let model = model.as_mut();
    let lane = model.reserve().unwrap();
    let want = rows(model, lane, &tokens, Rows::From(0));
    let alike = want.iter().zip(&full).filter(|(a, b)| best(a) == best(b)).count();
    assert!(alike * 3 > tokens.len(), "{alike} of {}", tokens.len());
    model.rewind(lane, 6);
    for (position, token) in tokens.iter().enumerate().skip(6) {
        let row = rows(model, lane, std::slice::from_ref(token), Rows::Last);
        assert_close(&row, &want[position..=position], 1e-3, "step by step");
    }
}

#[rstest]
#[case("optimum/fp32")]
#[case("optimum/merged")]
#[case("genai/fp32")]
#[case("genai/last")]
fn long_feeds_are_split_and_end_at_the_context(#[case] name: &str) {
    let mut model = load(name, 2);
    let model = model.as_mut();
    let context = model.config().context;
    assert_eq!((context, model.config().vocabulary), (256, 300));
    assert_eq!(model.config().eos, [1]);
    let text: Vec<u32> = (0..context as u32).map(|index| (index * 37 + 11) % 300).collect();
    let (whole, parts) = (model.reserve().unwrap(), model.reserve().unwrap());
    assert!(model.reserve().is_none());
    let want = rows(model, whole, &text, Rows::From(250));
    let mut got = Vec::new();
    for part in text.chunks(50) {
        got = rows(model, parts, part, Rows::Last);
    }
    assert_close(&got, &want[5..], 1e-4, "the last of a full context");
    let refused = model.run(&[chain(parts, &[2], Rows::Last)]);
    assert!(matches!(refused, Err(ModelError::Full { wanted: 257, context: 256 })));
    assert_eq!(model.len(parts), 256);
    model.release(parts);
    let anew = model.reserve().unwrap();
    assert_eq!(model.len(anew), 0);
}

#[rstest]
#[case("optimum/fp32")]
#[case("genai/fp32")]
fn unsupported_operations_of_such_a_model_are_refused(#[case] name: &str) {
    let tokens = reference().tokens;
    let mut model = load(name, 1);
    let lane = model.reserve().unwrap();
    let tree = Feed { lane, tokens: &[2, 3], parents: Some(&[None, None]), rows: Rows::Last, draft: None };
    let message = model.run(&[tree]).unwrap_err().to_string();
    assert!(message.contains("chains") && message.contains("trees"), "{message}");
    for feed in
        [chain(lane, &[], Rows::Last), chain(lane, &[300], Rows::Last), chain(Lane(7), &[2], Rows::Last)]
    {
        assert!(matches!(model.run(&[feed]), Err(ModelError::Invalid(_))));
    }
    assert_eq!(model.len(lane), 0);
    model.run(&[chain(lane, &tokens, Rows::None)]).unwrap();
    assert!(matches!(model.commit(lane, 2, &[0, 1]), Err(ModelError::Invalid(_))));
    assert!(matches!(model.fork(lane, lane, 2), Err(ModelError::Invalid(_))));
}

async fn slot(service: &DrafterService) -> DrafterSlot {
    let noise = Noise { seed: None, choice: 0, sampling: Sampling::default() };
    service.slot(noise).await.expect("a slot is free")
}

#[rstest]
#[case("optimum/fp32")]
#[case("optimum/hub")]
#[case("optimum/merged")]
#[case("optimum/fp16")]
#[case("genai/fp32")]
#[case("genai/last")]
#[case("genai/fp16")]
#[tokio::test]
async fn the_drafter_drafts_what_pytorch_would_write(#[case] name: &str) {
    let folder = exports().join(name);
    let Reference { text, tokens, continuation, .. } = reference();
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.encode(&text, false).unwrap(), tokens);
    let service = DrafterService::start(&folder, &options(2)).expect("the drafter opens");
    service.try_out().unwrap();
    let (slot, other) = (slot(&service).await, slot(&service).await);
    let ids = |drafted: Vec<(u32, f32)>| drafted.into_iter().map(|(token, _)| token).collect::<Vec<_>>();
    let mut output: Vec<u32> = Vec::new();
    while output.len() + 6 <= continuation.len() {
        let token_context = TokenContext::new(&tokens, &output);
        let elsewhere = TokenContext::new(&tokens[..12], &output[..output.len() / 2]);
        let (drafted, _) = tokio::join!(slot.draft(token_context, 6), other.draft(elsewhere, 3));
        let drafted = ids(drafted.unwrap());
        assert_eq!(drafted, continuation[output.len()..output.len() + 6]);
        // Half of a draft is refused: the next one begins in the middle of the cached tokens.
        output.extend(drafted.into_iter().take(3));
    }
    let token_context = TokenContext::new(&tokens, &continuation);
    let shadow = slot.shadow(token_context, 1).await.unwrap();
    assert_eq!(shadow[..continuation.len() - 1], continuation[1..]);
    let long = vec![2; 257];
    assert!(matches!(slot.draft(TokenContext::new(&long, &[]), 1).await, Err(DraftFault::TooLong { .. })));
}

/// A copy of an export that a test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_into(&exports().join(name), folder.path());
    folder
}

fn copy_into(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_into(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Replaces a name inside a file by another one of the same length.
fn rename(path: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(path).unwrap();
    let positions: Vec<usize> = bytes
        .windows(from.len())
        .enumerate()
        .filter(|(_, part)| *part == from.as_bytes())
        .map(|it| it.0)
        .collect();
    assert!(!positions.is_empty(), "{from} is not in {}", path.display());
    for position in positions {
        bytes[position..position + to.len()].copy_from_slice(to.as_bytes());
    }
    fs::write(path, bytes).unwrap();
}

fn refusal(folder: &Path) -> String {
    match open(folder, &options(1)) {
        Ok(_) => panic!("a damaged folder opens"),
        Err(error) => error.to_string(),
    }
}

#[rstest]
#[case("optimum/fp32")]
#[case("genai/fp32")]
fn a_graph_without_what_a_drafter_needs_is_named_with_what_is_missing(#[case] name: &str) {
    for (from, to, expected) in [
        (
            "past_key_values.1.value",
            "past_key_values.1.volue",
            "the graph does not take past_key_values.1.value",
        ),
        ("present.0.key", "present.0.kay", "the graph does not give present.0.key"),
        ("attention_mask", "attention_musk", "the graph has no attention_mask; it takes "),
        ("logits", "lagits", "the graph has no logits; it takes "),
        ("past_key_values.", "last_key_values.", "optimum (--task text-generation-with-past)"),
    ] {
        let folder = copy(name);
        rename(&folder.path().join("model.onnx"), from, to);
        if from.starts_with("past_key_values.") && from.ends_with('.') {
            rename(&folder.path().join("model.onnx"), "present.", "prezent.");
        }
        let message = refusal(folder.path());
        assert!(message.contains("model.onnx: ") && message.contains(expected), "{message}");
    }
}

#[test]
fn an_input_of_which_nothing_is_known_is_named() {
    let folder = copy("optimum/fp32");
    rename(&folder.path().join("model.onnx"), "position_ids", "position_idz");
    let message = refusal(folder.path());
    assert!(message.contains("the graph takes the unknown input position_idz"), "{message}");
}

#[rstest]
#[case("optimum/fp32", "config.json")]
#[case("genai/fp32", "genai_config.json")]
fn a_description_of_another_model_is_refused(#[case] name: &str, #[case] file: &str) {
    let folder = copy(name);
    rename(&folder.path().join(file), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    let message = refusal(folder.path());
    assert!(message.contains("a cache of 2 layers, its description 3"), "{message}");
    fs::write(folder.path().join(file), "{").unwrap();
    assert!(refusal(folder.path()).contains(file), "a description that is no JSON");
}

#[test]
fn names_and_file_are_taken_from_the_genai_config() {
    let folder = copy("genai/fp32");
    let graph = folder.path().join("model.onnx");
    rename(&graph, "past_key_values.", "cache.of_layers.");
    rename(&graph, "input_ids", "tokens_in");
    fs::rename(&graph, folder.path().join("small.onnx")).unwrap();
    fs::copy(exports().join("optimum/fp16/model.onnx"), folder.path().join("other.onnx")).unwrap();
    let path = folder.path().join("genai_config.json");
    let text = fs::read_to_string(&path).unwrap();
    let text =
        text.replace("past_key_values.", "cache.of_layers.").replace(": \"input_ids\"", ": \"tokens_in\"");
    fs::write(&path, text.replace("\"model.onnx\"", "\"small.onnx\"")).unwrap();
    let Reference { tokens, logits: want, .. } = reference();
    let mut model = open(folder.path(), &options(1)).unwrap().model;
    let lane = model.reserve().unwrap();
    assert_close(&rows(model.as_mut(), lane, &tokens, Rows::From(0)), &want, 1e-4, "other names");
}

#[test]
fn a_folder_without_a_graph_or_with_several_lists_its_files() {
    let folder = copy("optimum/fp32");
    let graph = folder.path().join("model.onnx");
    let alone = folder.path().join("model_q4.onnx");
    fs::rename(&graph, &alone).unwrap();
    assert!(open(folder.path(), &options(1)).is_ok(), "the only graph is the one that is meant");
    fs::create_dir(folder.path().join("onnx")).unwrap();
    fs::copy(&alone, folder.path().join("onnx/model_int8.onnx")).unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("found model_q4.onnx, onnx/model_int8.onnx"), "{message}");
    fs::remove_file(&alone).unwrap();
    fs::remove_dir_all(folder.path().join("onnx")).unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("model.onnx, onnx/model.onnx") && message.contains("found none"), "{message}");
}

#[test]
fn files_that_are_damaged_are_named() {
    let folder = copy("optimum/fp32");
    fs::write(folder.path().join("model.onnx"), "this is no graph").unwrap();
    let message = refusal(folder.path());
    assert!(message.contains("model.onnx: ") && message.to_lowercase().contains("protobuf"), "{message}");
    let folder = copy("optimum/hub");
    fs::remove_file(folder.path().join("onnx/model.onnx_data")).unwrap();
    assert!(refusal(folder.path()).contains("model.onnx_data"));
    let folder = copy("optimum/fp32");
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(refusal(folder.path()).contains("config.json"));
}

#[test]
fn a_target_needs_one_of_our_exports() {
    for name in ["optimum/fp32", "optimum/hub", "genai/fp32"] {
        let refused = Model::open(&exports().join(name), &options(1));
        let Err(error @ OpenError::Foreign { .. }) = refused else { panic!("{name} is not refused") };
        let message = error.to_string();
        assert!(message.contains("drafter") && message.contains("onnx/train/export.py"), "{message}");
    }
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("onnx/models/draft-same");
    let mut model = open(&own, &options(1)).unwrap().model;
    let lane = model.reserve().unwrap();
    let tree = Feed { lane, tokens: &[2, 3], parents: Some(&[None, None]), rows: Rows::Last, draft: None };
    assert!(model.run(&[tree]).is_ok(), "our own exports read trees as before");
}
