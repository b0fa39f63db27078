//! The model on ONNX Runtime: the logits are the same for every way in which tokens get into the
//! cache.
//!
//! Runs on the bundled target, or on the model folder that `FORETELL_TEST_MODEL` names.

use std::path::PathBuf;

use foretell_onnx::forward::{Feed, Forward, Lane, ModelError, Rows};
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::{OpenError, Options};
use foretell_onnx::runtime::model::Model;

fn folder() -> PathBuf {
    std::env::var_os("FORETELL_TEST_MODEL")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("onnx/models/target"), PathBuf::from)
}

fn open(lanes: usize) -> Model {
    let options = Options { device: DeviceChoice::Cpu, lanes, threads: 1, ..Options::default() };
    Model::open(&folder(), &options).expect("the model opens (make fetches ONNX Runtime)")
}

/// Tokens without a pattern, the same for the same seed.
fn tokens(model: &Model, seed: u64, count: usize) -> Vec<u32> {
    let size = model.config().vocabulary as u64;
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % size) as u32
    };
    (0..count).map(|_| next()).collect()
}

fn chain(lane: Lane, tokens: &[u32], rows: Rows) -> Feed<'_> {
    Feed { lane, tokens, parents: None, rows, draft: None }
}

/// Logits after each token, fed one by one into a separate lane.
fn plain(model: &mut Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let lane = model.reserve().expect("a lane is free");
    let rows = tokens
        .iter()
        .map(|token| {
            let logits = model.run(&[chain(lane, std::slice::from_ref(token), Rows::Last)]).unwrap();
            logits.row(0, 0).unwrap().to_vec()
        })
        .collect();
    model.release(lane);
    rows
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let (mut worst, mut differs) = (0.0_f32, false);
    for (got, want) in got.iter().zip(want) {
        assert!(got.is_finite(), "{what}");
        worst = worst.max((got - want).abs());
        differs |= (want - want.trunc()).abs() > 0.0;
    }
    assert!(differs && scale > 0.0, "{what}: logits that are all the same prove nothing");
    assert!(worst <= 1e-3 * scale, "{what}: off by {worst} of {scale}");
}

#[test]
fn prefill_in_chunks_equals_token_by_token() {
    let mut model = open(2);
    let text = tokens(&model, 1, 300);
    let want = plain(&mut model, &text);
    let lane = model.reserve().unwrap();
    let logits = model.run(&[chain(lane, &text, Rows::From(0))]).unwrap();
    assert_eq!(model.len(lane), 300);
    for (index, want) in want.iter().enumerate() {
        assert_close(logits.row(0, index).unwrap(), want, &format!("token {index}"));
    }
    assert!(logits.row(0, 300).is_none() && logits.row(1, 0).is_none());
}

#[test]
fn only_requested_rows_are_returned() {
    let mut model = open(2);
    let text = tokens(&model, 2, 200);
    let want = plain(&mut model, &text);
    for (rows, first) in [(Rows::Last, 199), (Rows::From(120), 120), (Rows::From(150), 150)] {
        let lane = model.reserve().unwrap();
        let logits = model.run(&[chain(lane, &text, rows)]).unwrap();
        for (row, want) in want[first..].iter().enumerate() {
            assert_close(logits.row(0, row).unwrap(), want, &format!("{rows:?} {row}"));
        }
        assert!(logits.row(0, 200 - first).is_none());
        model.release(lane);
    }
    let lane = model.reserve().unwrap();
    assert!(model.run(&[chain(lane, &text, Rows::None)]).unwrap().row(0, 0).is_none());
}

#[test]
fn a_ragged_batch_equals_each_alone_however_sets_are_put_together() {
    let mut model = open(8);
    let texts: Vec<Vec<u32>> =
        [40, 3, 260, 150, 1].iter().map(|&len| tokens(&model, len as u64, len)).collect();
    let want: Vec<Vec<Vec<f32>>> = texts.iter().map(|text| plain(&mut model, text)).collect();
    let lanes: Vec<Lane> = texts.iter().map(|_| model.reserve().unwrap()).collect();
    let mut done = vec![0_usize; texts.len()];
    let mut round = 0_usize;
    while done.iter().zip(&texts).any(|(&done, text)| done < text.len()) {
        let mut taken = Vec::new();
        for (index, text) in texts.iter().enumerate() {
            let left = text.len() - done[index];
            let size = [1, 5, 2, 33, 9][(round + index) % 5].min(left);
            if size > 0 && !(round + index).is_multiple_of(4) {
                taken.push((index, size));
            }
        }
        round += 1;
        let feeds: Vec<Feed<'_>> = taken
            .iter()
            .map(|&(index, size)| chain(lanes[index], &texts[index][done[index]..][..size], Rows::From(0)))
            .collect();
        let logits = model.run(&feeds).unwrap();
        for (feed, &(index, size)) in taken.iter().enumerate() {
            for row in 0..size {
                let position = done[index] + row;
                assert_close(
                    logits.row(feed, row).unwrap(),
                    &want[index][position],
                    &format!("text {index} at {position}"),
                );
            }
            done[index] += size;
        }
    }
}

/// Two branches after `text`: 0 → 1 → 3 and 0 → 2 → 4, and 5 that follows the text itself.
const PARENTS: [Option<usize>; 6] = [None, Some(0), Some(0), Some(1), Some(2), None];
const SIDE: [usize; 3] = [0, 2, 4];

#[test]
fn a_tree_gives_every_branch_the_logits_of_its_own_chain() {
    let mut model = open(3);
    let text = tokens(&model, 5, 70);
    let nodes = tokens(&model, 6, PARENTS.len());
    let lane = model.reserve().unwrap();
    model.run(&[chain(lane, &text, Rows::None)]).unwrap();
    let tree = Feed { lane, tokens: &nodes, parents: Some(&PARENTS), rows: Rows::From(0), draft: None };
    let logits = model.run(&[tree]).unwrap();
    for leaf in [3, 4, 5] {
        let mut path: Vec<usize> = std::iter::successors(Some(leaf), |&node| PARENTS[node]).collect();
        path.reverse();
        let whole: Vec<u32> = text.iter().copied().chain(path.iter().map(|&node| nodes[node])).collect();
        let want = plain(&mut model, &whole);
        for (depth, &node) in path.iter().enumerate() {
            assert_close(
                logits.row(0, node).unwrap(),
                &want[text.len() + depth],
                &format!("leaf {leaf} node {node}"),
            );
        }
    }
}

#[test]
fn after_commit_of_a_side_branch_the_text_goes_on_as_if_only_it_had_been_there() {
    let mut model = open(3);
    let text = tokens(&model, 7, 50);
    let nodes = tokens(&model, 8, PARENTS.len());
    let more = tokens(&model, 9, 12);
    let whole: Vec<u32> = text
        .iter()
        .copied()
        .chain(SIDE.iter().map(|&node| nodes[node]))
        .chain(more.iter().copied())
        .collect();
    let want = plain(&mut model, &whole);
    let lane = model.reserve().unwrap();
    model.run(&[chain(lane, &text, Rows::None)]).unwrap();
    model
        .run(&[Feed { lane, tokens: &nodes, parents: Some(&PARENTS), rows: Rows::None, draft: None }])
        .unwrap();
    model.commit(lane, text.len(), &SIDE).unwrap();
    assert_eq!(model.len(lane), text.len() + SIDE.len());
    let logits = model.run(&[chain(lane, &more, Rows::From(0))]).unwrap();
    for (index, want) in want[text.len() + SIDE.len()..].iter().enumerate() {
        assert_close(logits.row(0, index).unwrap(), want, &format!("token {index} after the branch"));
    }
    assert!(matches!(model.commit(lane, 0, &[2, 1]), Err(ModelError::Invalid(_))));
    assert!(matches!(model.commit(lane, 60, &[50]), Err(ModelError::Invalid(_))));
}

#[test]
fn rewind_and_fork_leave_nothing_behind() {
    let mut model = open(4);
    let text = tokens(&model, 10, 120);
    let other = tokens(&model, 11, 20);
    let spliced: Vec<u32> = text[..60].iter().chain(&other).copied().collect();
    let (long, short) = (plain(&mut model, &text), plain(&mut model, &spliced));
    let lane = model.reserve().unwrap();
    model.run(&[chain(lane, &text[..100], Rows::None)]).unwrap();
    let copy = model.reserve().unwrap();
    model.fork(lane, copy, 60).unwrap();
    assert_eq!((model.len(lane), model.len(copy)), (100, 60));
    let feeds = [chain(copy, &other, Rows::Last), chain(lane, &text[100..], Rows::Last)];
    let logits = model.run(&feeds).unwrap();
    assert_close(logits.row(0, 0).unwrap(), short.last().unwrap(), "the fork");
    assert_close(logits.row(1, 0).unwrap(), long.last().unwrap(), "what was forked");
    model.rewind(lane, 60);
    let logits = model.run(&[chain(lane, &other, Rows::Last)]).unwrap();
    assert_close(logits.row(0, 0).unwrap(), short.last().unwrap(), "after the rewind");
    assert!(model.fork(lane, copy, 1_000).is_err());
}

#[test]
fn a_sequence_grows_through_every_length_up_to_the_context_and_no_further() {
    let mut model = open(2);
    let context = model.config().context;
    let text = tokens(&model, 12, context);
    let (lane, whole) = (model.reserve().unwrap(), model.reserve().unwrap());
    let want = model.run(&[chain(whole, &text, Rows::From(context - 1))]).unwrap();
    let mut last = None;
    for part in text.chunks(61) {
        let logits = model.run(&[chain(lane, part, Rows::Last)]).unwrap();
        last = logits.row(0, 0).map(<[f32]>::to_vec);
    }
    assert_close(&last.unwrap(), want.row(0, 0).unwrap(), "the last token of a full context");
    let refused = model.run(&[chain(lane, &[1], Rows::Last)]);
    assert!(matches!(refused, Err(ModelError::Full { .. })));
    assert_eq!(model.len(lane), context);
}

#[test]
fn invalid_feeds_are_refused_before_any_change() {
    let mut model = open(1);
    let lane = model.reserve().unwrap();
    assert!(model.reserve().is_none());
    let unknown = [model.config().vocabulary as u32];
    assert!(model.run(&[chain(lane, &unknown, Rows::Last)]).is_err());
    assert!(model.run(&[chain(lane, &[], Rows::Last)]).is_err());
    assert!(model.run(&[chain(Lane(9), &[1], Rows::Last)]).is_err());
    assert!(model.run(&[chain(lane, &[1], Rows::Last), chain(lane, &[2], Rows::Last)]).is_err());
    let backwards =
        Feed { lane, tokens: &[1, 2], parents: Some(&[Some(1), None]), rows: Rows::Last, draft: None };
    assert!(model.run(&[backwards]).is_err());
    assert_eq!(model.len(lane), 0);
    assert!(model.run(&[chain(lane, &[1], Rows::Last)]).is_ok());
}

#[test]
fn missing_cuda_is_an_error_that_names_the_library() {
    let options = Options { device: DeviceChoice::Cuda, lanes: 1, ..Options::default() };
    match Model::open(&folder(), &options) {
        Ok(model) => assert!(model.device().starts_with("cuda"), "{}", model.device()),
        Err(OpenError::Device(error)) => assert!(error.to_string().contains("CUDA"), "{error}"),
        Err(other) => panic!("{other}"),
    }
    let auto = Model::open(&folder(), &Options { lanes: 1, ..Options::default() }).unwrap();
    assert!(
        auto.device().starts_with("cpu, since") || auto.device().starts_with("cuda"),
        "{}",
        auto.device()
    );
}
