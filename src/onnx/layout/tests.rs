//! Applies the layout's steps to rows of numbers.

use super::*;

/// Applies steps to rows of numbers, and checks that nothing is read or written out of bounds.
#[derive(Default)]
struct Rows(Vec<Option<(SetShape, Vec<Vec<u64>>)>>);

impl Rows {
    fn apply(&mut self, layout: &mut Layout) {
        let mut steps = Vec::new();
        layout.take_steps(&mut steps);
        for step in steps {
            match step {
                LayoutStep::Create(set, shape) => {
                    self.0.resize(self.0.len().max(set + 1), None);
                    assert!(self.0[set].is_none(), "set {set} is made twice");
                    self.0[set] = Some((shape, vec![vec![0; shape.rows]; shape.lanes]));
                }
                LayoutStep::Drop(set) => assert!(self.0[set].take().is_some(), "set {set} is dropped twice"),
                LayoutStep::Copy { from, to, rows } => {
                    let copied = self.slot(from)[..rows].to_vec();
                    self.slot(to)[..rows].copy_from_slice(&copied);
                }
            }
        }
    }

    fn slot(&mut self, address: SlotAddress) -> &mut Vec<u64> {
        &mut self.0[address.set].as_mut().expect("the set is there").1[address.slot]
    }
}

fn feed(layout: &mut Layout, rows: &mut Rows, feeds: &[(Lane, usize)]) {
    layout.prepare(feeds).unwrap();
    rows.apply(layout);
    for &(lane, adding) in feeds {
        let (address, len) = (layout.address(lane).unwrap(), layout.len(lane));
        assert!(len + adding + SPARE <= layout.shape(address.set).unwrap().rows, "no room for padding");
        for row in len..len + adding {
            rows.slot(address)[row] = lane.0 as u64 * 100_000 + row as u64;
        }
        layout.set_len(lane, len + adding);
    }
}

fn check(layout: &Layout, rows: &mut Rows, lane: Lane) {
    for row in 0..layout.len(lane) {
        assert_eq!(rows.slot(layout.address(lane).unwrap())[row], lane.0 as u64 * 100_000 + row as u64);
    }
}

#[test]
fn one_sequence_never_moves_but_to_grow() {
    let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
    let lane = layout.reserve().unwrap();
    feed(&mut layout, &mut rows, &[(lane, 100)]);
    let mut moves = 0;
    for _ in 0..1_900 {
        let before = layout.address(lane);
        feed(&mut layout, &mut rows, &[(lane, 1)]);
        moves += usize::from(layout.address(lane) != before);
    }
    assert_eq!(moves, 6, "256 rows, 384, 512, 768, 1024, 1536, 2048");
    check(&layout, &mut rows, lane);
}

#[test]
fn sequences_that_run_together_end_in_one_set_and_those_that_run_alone_leave_it() {
    let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
    let lanes: Vec<Lane> = (0..4).map(|_| layout.reserve().unwrap()).collect();
    let together: Vec<(Lane, usize)> = lanes.iter().map(|&lane| (lane, 1)).collect();
    for _ in 0..20 {
        feed(&mut layout, &mut rows, &together);
    }
    let sets: Vec<usize> = lanes.iter().map(|&lane| layout.address(lane).unwrap().set).collect();
    assert!(sets.iter().all(|&set| set == sets[0]), "{sets:?}");
    for _ in 0..20 {
        feed(&mut layout, &mut rows, &[(lanes[0], 1), (lanes[1], 1)]);
    }
    let address = layout.address(lanes[0]).unwrap();
    assert_eq!(layout.shape(address.set).unwrap().lanes, 2);
    for lane in lanes {
        check(&layout, &mut rows, lane);
    }
}

#[test]
fn a_long_draft_leaves_the_set_of_plain_steps_and_a_short_one_comes_back() {
    let together = |sets: &[usize]| sets.iter().all(|set| *set == sets[0]);
    let cpu = drafting(Layout::new(4, 2048, 16), &[1, 17, 3]);
    assert!(together(&cpu[0]) && together(&cpu[2]), "{cpu:?}");
    assert!(together(&cpu[1][..3]) && cpu[1][3] != cpu[1][0], "three steps of 17 tokens more: {cpu:?}");
    let gpu = drafting(Layout::new(4, 2048, 16).with_free_tokens(), &[1, 17]);
    assert!(together(&gpu[1]), "there they take no longer: {gpu:?}");
}

/// The sets of three plain steps and a draft after 20 runs with each of these draft lengths, all
/// behind 20 tokens.
fn drafting(mut layout: Layout, lengths: &[usize]) -> Vec<Vec<usize>> {
    let mut rows = Rows::default();
    let lanes: Vec<Lane> = (0..4).map(|_| layout.reserve().unwrap()).collect();
    let mut sets = |last: usize| {
        for _ in 0..20 {
            let feeds: Vec<_> = lanes.iter().copied().zip([1, 1, 1, last]).collect();
            feed(&mut layout, &mut rows, &feeds);
            for &lane in &lanes {
                check(&layout, &mut rows, lane);
                layout.set_len(lane, layout.len(lane).min(20));
            }
        }
        lanes.iter().map(|&lane| layout.address(lane).unwrap().set).collect::<Vec<_>>()
    };
    lengths.iter().map(|&last| sets(last)).collect()
}

#[test]
fn prefill_runs_in_a_set_of_its_own() {
    let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
    let (a, b) = (layout.reserve().unwrap(), layout.reserve().unwrap());
    for _ in 0..20 {
        feed(&mut layout, &mut rows, &[(a, 1), (b, 1)]);
    }
    assert_eq!(layout.address(a).unwrap().set, layout.address(b).unwrap().set);
    feed(&mut layout, &mut rows, &[(a, 1), (b, 100)]);
    assert_ne!(layout.address(a).unwrap().set, layout.address(b).unwrap().set);
    check(&layout, &mut rows, b);
}

#[test]
fn a_feed_beyond_the_context_is_refused_and_changes_nothing() {
    let mut layout = Layout::new(1, 64, 16);
    let lane = layout.reserve().unwrap();
    assert!(layout.reserve().is_none());
    assert!(matches!(layout.prepare(&[(lane, 65)]), Err(ModelError::Full { wanted: 65, context: 64 })));
    assert!(layout.address(lane).is_none());
    assert!(layout.prepare(&[(Lane(7), 1)]).is_err());
}

#[test]
fn any_order_of_work_keeps_every_row() {
    let (mut layout, mut rows) = (Layout::new(12, 1024, 8), Rows::default());
    let mut live: Vec<(Lane, Vec<u64>)> = Vec::new();
    let mut state = 7_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for round in 0..3_000 {
        let one = next(live.len().max(1));
        match next(13) {
            0 => live.extend(layout.reserve().map(|lane| (lane, Vec::new()))),
            1 if !live.is_empty() => layout.release(live.swap_remove(one).0),
            2 if !live.is_empty() => {
                let (lane, want) = &mut live[one];
                want.truncate(next(want.len() + 1));
                layout.set_len(*lane, want.len());
            }
            3 if live.len() > 1 => {
                let other = (one + 1) % live.len();
                let len = next(live[one].1.len() + 1);
                layout.fork(live[one].0, live[other].0, len).unwrap();
                rows.apply(&mut layout);
                live[other].1 = live[one].1[..len].to_vec();
            }
            _ => {
                let mut feeds: Vec<(Lane, usize)> = Vec::new();
                for (lane, want) in &live {
                    let adding = [0, 1, 1, 1, 3, 9, 60][next(7)];
                    if adding > 0 && want.len() + adding <= 1024 {
                        feeds.push((*lane, adding));
                    }
                }
                feed(&mut layout, &mut rows, &feeds);
                for (lane, want) in &mut live {
                    for row in want.len()..layout.len(*lane) {
                        let value = round * 1_000 + row as u64;
                        rows.slot(layout.address(*lane).unwrap())[row] = value;
                        want.push(value);
                    }
                }
            }
        }
        for (lane, want) in &live {
            assert_eq!(layout.len(*lane), want.len());
            if let Some(address) = layout.address(*lane) {
                assert_eq!(rows.slot(address)[..want.len()], want[..]);
            } else {
                assert!(want.is_empty());
            }
        }
    }
    assert!(rows.0.iter().flatten().count() <= 12 + EMPTY_SETS_MAX);
}

#[test]
fn sequences_of_unlike_length_share_a_set_where_that_is_cheaper() {
    let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
    let lanes: Vec<Lane> = (0..4).map(|_| layout.reserve().unwrap()).collect();
    for (&lane, len) in lanes.iter().zip([100, 250, 300, 1_800]) {
        feed(&mut layout, &mut rows, &[(lane, len)]);
    }
    for _ in 0..30 {
        feed(&mut layout, &mut rows, &lanes.iter().map(|&lane| (lane, 1)).collect::<Vec<_>>());
    }
    let set = |lane: Lane| layout.address(lane).unwrap().set;
    assert_eq!(set(lanes[0]), set(lanes[1]));
    assert_eq!(set(lanes[1]), set(lanes[2]));
    assert_ne!(set(lanes[2]), set(lanes[3]), "a run of four times 2048 rows costs more than two runs");
    for lane in lanes {
        check(&layout, &mut rows, lane);
    }
}

#[test]
fn a_sequence_that_was_cut_short_moves_to_a_shorter_set() {
    let (mut layout, mut rows) = (Layout::new(1, 2048, 16), Rows::default());
    let lane = layout.reserve().unwrap();
    feed(&mut layout, &mut rows, &[(lane, 1_500)]);
    layout.set_len(lane, 50);
    for _ in 0..10 {
        feed(&mut layout, &mut rows, &[(lane, 1)]);
    }
    assert_eq!(layout.shape(layout.address(lane).unwrap().set).unwrap().rows, SHORTEST);
    check(&layout, &mut rows, lane);
}

#[test]
fn a_set_that_could_not_be_made_is_forgotten_with_what_was_moved_there() {
    let (mut layout, mut rows) = (Layout::new(2, 2048, 16), Rows::default());
    let (lane, other) = (layout.reserve().unwrap(), layout.reserve().unwrap());
    feed(&mut layout, &mut rows, &[(lane, 100)]);
    feed(&mut layout, &mut rows, &[(other, 100)]);
    layout.prepare(&[(lane, 900)]).unwrap();
    let (mut steps, mut failed) = (Vec::new(), 0);
    layout.take_steps(&mut steps);
    for step in steps {
        // Without the set there is nothing to copy to, either.
        layout.forget(step);
        failed += 1;
    }
    assert_eq!((failed, layout.len(lane), layout.address(lane)), (2, 0, None));
    check(&layout, &mut rows, other);
    assert_eq!(layout.len(other), 100);
    // Once there is memory again, a set of this shape is made anew.
    feed(&mut layout, &mut rows, &[(lane, 900), (other, 1)]);
    check(&layout, &mut rows, lane);
    check(&layout, &mut rows, other);
}

#[test]
fn a_sequence_whose_rows_were_not_copied_is_empty_and_its_slot_is_free() {
    let (mut layout, mut rows) = (Layout::new(2, 2048, 16), Rows::default());
    let (lane, to) = (layout.reserve().unwrap(), layout.reserve().unwrap());
    feed(&mut layout, &mut rows, &[(lane, 100)]);
    layout.fork(lane, to, 50).unwrap();
    let mut steps = Vec::new();
    layout.take_steps(&mut steps);
    let Some(copy) = steps.pop() else { panic!("nothing is copied") };
    layout.forget(copy);
    assert_eq!((layout.len(to), layout.address(to)), (0, None));
    assert_eq!(layout.len(lane), 100);
    check(&layout, &mut rows, lane);
}
