//! Heads on ONNX Runtime: a model of random weights with a head (`tests/exports/head`).

use std::fs;
use std::path::{Path, PathBuf};

use foretell_onnx::forward::{Behind, Draws, Feed, Forward, Lane, Rows};
use foretell_onnx::noise::gumbel;
use foretell_onnx::open::{DeviceChoice, OpenError, Options};
use foretell_onnx::runtime::model::Model;

const TEXT: [u32; 6] = [3, 14, 15, 92, 65, 35];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/head")
}

fn open(folder: &Path) -> Result<Model, OpenError> {
    let options = Options { device: DeviceChoice::Cpu, lanes: 2, threads: 1, ..Options::default() };
    Model::open(folder, &options)
}

fn feed(lane: Lane, tokens: &[u32]) -> Feed<'_> {
    Feed { lane, tokens, parents: None, rows: Rows::From(0), draft: None }
}

#[test]
fn a_draft_depends_on_its_own_position_alone() {
    let mut model = open(&folder()).expect("the model opens (make fetches ONNX Runtime)");
    assert_eq!(model.config().proposes, 5);
    let (one, other) = (model.reserve().unwrap(), model.reserve().unwrap());
    let whole = model.run(&[feed(one, &TEXT)]).unwrap();
    // The same positions in two feeds, in one run with another lane.
    let (begin, end) = TEXT.split_at(4);
    model.run(&[feed(other, begin)]).unwrap();
    let pieces = model.run(&[feed(one, &[7, 8]), feed(other, end)]).unwrap();
    let taps = |logits: &foretell_onnx::forward::Logits, feed, row| logits.taps(feed, row).unwrap().to_vec();
    let (apart, together) = (taps(&whole, 0, 5), taps(&pieces, 1, 1));
    assert_eq!(apart.len(), 64, "two layers of 32");
    assert!(apart.iter().zip(&together).all(|(a, b)| (a - b).abs() < 1e-4), "{apart:?} {together:?}");
    let first = taps(&whole, 0, 0);
    let alone = model.propose(&[Behind { taps: &apart, token: 9, draws: None }]);
    let both = model.propose(&[
        Behind { taps: &first, token: 4, draws: None },
        Behind { taps: &apart, token: 9, draws: None },
    ]);
    assert_eq!((alone.len(), both.len(), &alone[0]), (1, 2, &both[1]));
    assert_ne!(both[0], both[1]);
    for step in &alone[0] {
        let [(best, share), (second, less)] = step[..] else { panic!("two tokens: {step:?}") };
        assert!(best != second && share >= less && share <= 1.0 && best < 96 && second < 96, "{step:?}");
    }
    assert_eq!(alone[0].len(), 5);
}

/// A token is drawn by the noise of its position, as the target draws it.
#[test]
fn a_draft_is_drawn_by_the_noise_of_the_target() {
    let mut model = open(&folder()).unwrap();
    let taps = [0.25; 64];
    let draws = |seed, choice, position, temperature| Some(Draws { seed, choice, position, temperature });
    let mut drawn = |draws| -> Vec<Vec<u32>> {
        let draft = model.propose(&[Behind { taps: &taps, token: 9, draws }]).remove(0);
        draft.iter().map(|step| step.iter().map(|candidate| candidate.0).collect()).collect()
    };
    let likeliest = drawn(None);
    assert_eq!(drawn(draws(1, 0, 5, 1e-6)), likeliest, "without heat the likeliest");
    let one = drawn(draws(1, 0, 5, 3.0));
    assert_eq!(drawn(draws(1, 0, 5, 3.0)), one);
    for other in [draws(2, 0, 5, 3.0), draws(1, 1, 5, 3.0), draws(1, 0, 6, 3.0)] {
        assert_ne!(drawn(other), one);
    }
    // Heat without end leaves the noise alone, over the tokens that the head can draft.
    let best =
        (0..64).map(|at| at * 3 / 2).max_by(|&a, &b| gumbel(7, 2, 11, a).total_cmp(&gumbel(7, 2, 11, b)));
    assert_eq!(Some(drawn(draws(7, 2, 11, 1e6))[0][0]), best);
}

#[test]
fn a_head_of_another_model_is_refused_and_one_that_fails_is_silent() {
    let copy = tempfile::tempdir().unwrap();
    fs::create_dir(copy.path().join("heads")).unwrap();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/target");
    for file in ["model.onnx", "config.json"] {
        fs::copy(bundled.join(file), copy.path().join(file)).unwrap();
    }
    fs::copy(folder().join("heads/model.onnx"), copy.path().join("heads/model.onnx")).unwrap();
    let refused = open(copy.path()).err().expect("other hidden states").to_string();
    assert!(refused.contains("reads 64 numbers of hidden state, the model gives none"), "{refused}");
    fs::copy(bundled.join("model.onnx"), copy.path().join("heads/model.onnx")).unwrap();
    let refused = open(copy.path()).err().expect("no head").to_string();
    assert!(refused.contains("not a head"), "{refused}");
    fs::remove_dir_all(copy.path().join("heads")).unwrap();
    assert_eq!(open(copy.path()).unwrap().config().proposes, 0);
    let mut model = open(&folder()).unwrap();
    assert!(model.propose(&[Behind { taps: &[0.5; 3], token: 9, draws: None }]).is_empty(), "too few states");
    assert!(
        model.propose(&[Behind { taps: &[0.5; 64], token: 9, draws: None }]).is_empty(),
        "it is not run again"
    );
}
