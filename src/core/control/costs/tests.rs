use super::*;
use crate::control::prospect::Curve;

const TREE: Way = Way::by(VerifyMethod::Tree, 40);
const SCORE: Way = Way::by(VerifyMethod::Score, 40);

fn plain_at(token: f64) -> Costs {
    let mut costs = Costs::default();
    (0..20).for_each(|_| costs.note_plain(token, 1, 1, Tick(0)));
    costs
}

#[test]
fn tokens_in_bursts_are_timed_as_last_minus_first_over_n_minus_one() {
    let mut costs = Costs::default();
    for _ in 0..40 {
        costs.note_plain(0.040, 1, 1, Tick(0));
        costs.note_plain(0.0, 3, 1, Tick(0));
    }
    let token = costs.plain_token().expect("timed");
    assert!((token - 0.010).abs() < 0.001, "{token}");
}

#[test]
fn the_table_is_monotone_and_interpolates() {
    let mut costs = plain_at(0.010);
    for _ in 0..10 {
        costs.verified(TREE, 1, 0.011, Tick(0));
        costs.verified(TREE, 5, 0.015, Tick(0));
        costs.verified(TREE, 3, 0.010, Tick(0));
    }
    assert!((costs.verify(TREE, 5) - 0.015).abs() < 1e-9);
    assert!((costs.verify(TREE, 4) - 0.01275).abs() < 1e-9, "{}", costs.verify(TREE, 4));
    assert!((0..NODES_MAX).all(|n| costs.verify(TREE, n) <= costs.verify(TREE, n + 1) + 1e-12));
}

#[test]
fn a_changed_cost_is_learnt_within_a_handful_of_rounds() {
    let mut costs = plain_at(0.010);
    (0..20).for_each(|_| costs.verified(TREE, 4, 0.012, Tick(0)));
    (0..10).for_each(|_| costs.verified(TREE, 4, 0.030, Tick(0)));
    assert!(costs.verify(TREE, 4) > 0.024, "{}", costs.verify(TREE, 4));
}

#[test]
fn idle_time_forgets_nothing_and_makes_everything_less_certain() {
    let after = |seconds: u64| Tick(seconds * 1_000_000);
    let mut costs = plain_at(0.010);
    (0..8).for_each(|_| costs.verified(TREE, 4, 0.9, after(0)));
    assert!((costs.verify(TREE, 4) - 0.9).abs() < 1e-9 && costs.verify_measured(TREE));
    (0..2).for_each(|_| costs.verified(TREE, 4, 0.012, after(3_600)));
    assert!(costs.verify(TREE, 4) < 0.4, "{}", costs.verify(TREE, 4));
}

#[test]
fn the_seconds_of_a_node_are_a_least_squares_slope_of_all_lengths() {
    let mut costs = plain_at(0.010);
    costs.verified(TREE, 0, 0.020, Tick(0));
    costs.verified(TREE, 3, 0.023, Tick(0));
    assert!(costs.per_node(TREE) == 0.0, "too alike");
    for nodes in [0, 2, 4, 6, 8] {
        let noise = if nodes % 4 == 0 { 0.001 } else { -0.001 };
        (0..8).for_each(|_| costs.verified(TREE, nodes, 0.020 + 0.001 * nodes as f64 + noise, Tick(0)));
    }
    assert!((costs.per_node(TREE) - 0.001).abs() < 0.0002, "{}", costs.per_node(TREE));
    let mut falling = plain_at(0.010);
    (0..8).for_each(|nodes| falling.verified(TREE, nodes, 0.020 - 0.001 * nodes as f64, Tick(0)));
    assert!(falling.per_node(TREE) == 0.0);
}

#[test]
fn a_draft_is_at_most_twice_as_long_as_the_longest_measured_one() {
    let mut costs = plain_at(0.010);
    assert_eq!(costs.reach(TREE), 4);
    costs.verified(TREE, 2, 0.012, Tick(0));
    assert_eq!(costs.reach(TREE), 4);
    costs.verified(TREE, 4, 0.012, Tick(0));
    assert_eq!((costs.reach(TREE), costs.reach(SCORE)), (8, 4));
}

#[test]
fn a_concurrency_has_its_own_costs_and_begins_with_its_neighbour_s_at_its_own_pace() {
    let mut costs = plain_at(0.010);
    (0..8).for_each(|_| costs.verified(TREE, 4, 0.015, Tick(0)));
    costs.set_concurrency(16, false, false);
    assert!((costs.verify(TREE, 4) - 0.015).abs() < 1e-9, "nothing else is known");
    (0..20).for_each(|_| costs.note_plain(0.030, 1, 1, Tick(0)));
    assert!((costs.verify(TREE, 4) - 0.045).abs() < 1e-9, "{}", costs.verify(TREE, 4));
    (0..8).for_each(|_| costs.verified(TREE, 4, 0.090, Tick(0)));
    assert!((costs.verify(TREE, 4) - 0.090).abs() < 1e-9);
    costs.set_concurrency(1, false, false);
    assert!((costs.verify(TREE, 4) - 0.015).abs() < 1e-9);
}

fn probed() -> Arc<Prior> {
    let mut prior = Prior { switch_in: Some(0.03), token: Some(0.01), ..Prior::default() };
    let points = vec![(0, 0.010), (4, 0.014), (8, 0.018)];
    prior.verify[VerifyMethod::Score.index()] = vec![Curve { context: 40, points }];
    Arc::new(prior)
}

#[test]
fn a_probe_s_result_holds_until_something_is_measured() {
    let mut costs = plain_at(0.010);
    costs.take_prior(&probed());
    assert!(costs.verify_measured(SCORE) && !costs.verify_measured(Way::by(VerifyMethod::FanOut, 40)));
    assert!((costs.verify(SCORE, 6) - 0.016).abs() < 1e-9);
    assert!((costs.switch_in() - 0.03).abs() < 1e-9);
    (0..8).for_each(|_| costs.verified(SCORE, 4, 0.028, Tick(0)));
    assert!((costs.verify(SCORE, 4) - 0.028).abs() < 1e-9);
    // Twice the prior there, so twice the prior elsewhere.
    assert!((costs.verify(SCORE, 8) - 0.036).abs() < 1e-9, "{}", costs.verify(SCORE, 8));
}

#[test]
fn contexts_of_another_size_have_costs_of_their_own_and_begin_with_the_nearest() {
    let (short, long) = (Way::by(VerifyMethod::Score, 40), Way::by(VerifyMethod::Score, 1_000));
    let mut costs = plain_at(0.010);
    (0..8).for_each(|_| costs.verified(short, 4, 0.012, Tick(0)));
    assert!((costs.verify(long, 4) - 0.012).abs() < 1e-9, "nothing else is known");
    assert!(costs.verify_measured(short) && !costs.verify_measured(long));
    (0..8).for_each(|_| costs.verified(long, 4, 0.036, Tick(0)));
    assert!((costs.verify(short, 4) - 0.012).abs() < 1e-9);
    assert!((costs.verify(long, 4) - 0.036).abs() < 1e-9);
    let (one, three) = (costs.verify(short, 8), costs.verify(long, 8));
    assert!(
        (three / one - 3.0).abs() < 0.1,
        "three times the cost there, so three times elsewhere: {one} {three}"
    );
}

#[test]
fn a_probe_of_two_contexts_applies_at_each() {
    let curve = |context, seconds| Curve { context, points: vec![(0, seconds), (8, seconds * 2.0)] };
    let mut prior = Prior { token: Some(0.01), ..Prior::default() };
    prior.verify[VerifyMethod::Score.index()] = vec![curve(40, 0.010), curve(1_000, 0.030)];
    let mut costs = Costs::default();
    costs.take_prior(&Arc::new(prior));
    let at = |context| costs.verify(Way::by(VerifyMethod::Score, context), 8);
    assert!(
        (at(40) - 0.020).abs() < 1e-9 && (at(1_000) - 0.060).abs() < 1e-9 && (at(9_000) - 0.060).abs() < 1e-9
    );
}

#[test]
fn a_method_that_leaves_half_undecided_costs_half_a_fallback_request_more() {
    let way = Way { fallback: Some(VerifyMethod::FanOut), ..SCORE };
    let mut costs = plain_at(0.010);
    costs.verified(SCORE, 4, 0.012, Tick(0));
    costs.verified(Way::by(VerifyMethod::FanOut, 40), 4, 0.050, Tick(0));
    assert!((costs.verify(way, 4) - 0.012).abs() < 1e-9, "no request was seen to decide nothing");
    (0..100).for_each(|round| costs.decided(VerifyMethod::Score, round % 2 == 0, Tick(0)));
    assert!((costs.verify(way, 4) - 0.037).abs() < 0.005, "{}", costs.verify(way, 4));
    assert!((costs.verify(SCORE, 4) - 0.012).abs() < 1e-9, "without a fallback the round is over");
}

#[test]
fn a_drafter_that_reads_fast_is_not_taken_for_slow() {
    let mut costs = plain_at(0.1);
    assert!((costs.draft_token(0) - 0.015).abs() < 1e-9, "a guess");
    costs.shadowed(0, 0.2, false, Tick(0));
    assert!((costs.draft_token(0) - 0.015).abs() < 1e-9, "that pass read the prompt");
    costs.shadowed(0, 0.002, true, Tick(0));
    assert!((costs.draft_token(0) - 0.002).abs() < 1e-9);
    costs.drafted(0, 4, 0.012, Tick(0));
    assert!((costs.draft_token(0) - 0.003).abs() < 1e-9, "measured");
}

#[test]
fn after_long_speculation_a_few_tokens_are_decoded_plainly() {
    let mut costs = plain_at(0.010);
    costs.speculated(11.9);
    assert!(!costs.pace_is_old());
    costs.speculated(0.2);
    assert!(costs.pace_is_old() && !costs.pace_is_overdue());
    (0..3).for_each(|_| costs.note_plain(0.010, 1, 1, Tick(0)));
    assert!(costs.pace_is_old());
    costs.note_plain(0.010, 1, 1, Tick(0));
    assert!(!costs.pace_is_old());
    costs.speculated(48.1);
    assert!(costs.pace_is_overdue());
}

#[test]
fn one_step_of_several_requests_is_no_pace_yet() {
    let mut costs = plain_at(0.03);
    costs.set_concurrency(4, false, false);
    let steps = (0..20).take_while(|_| {
        (0..4).for_each(|_| costs.note_plain(0.05, 1, 4, Tick(0)));
        costs.pace_is_old()
    });
    assert_eq!(steps.count(), 7, "the eighth ends the measurement");
}

#[test]
fn a_pace_that_met_the_reading_of_prompts_is_corrected_soon() {
    let mut costs = Costs::default();
    costs.set_concurrency(4, false, false);
    // Eight steps of four requests, each of a quarter of a second.
    (0..32).for_each(|_| costs.note_plain(0.25, 1, 4, Tick(0)));
    assert!((costs.plain_token().expect("known") - 0.25).abs() < 1e-9);
    costs.speculated(149.0 * 0.25);
    assert!(!costs.pace_is_old());
    costs.speculated(0.25);
    assert!(costs.pace_is_old());
    (0..64).for_each(|_| costs.note_plain(0.045, 1, 4, Tick(0)));
    assert!((costs.plain_token().expect("known") - 0.045).abs() < 1e-9);
    assert!(!costs.pace_is_old());
}

#[test]
fn a_pace_that_is_too_long_ages_by_the_shortest_one() {
    let mut costs = plain_at(0.03);
    costs.set_concurrency(4, false, false);
    (0..32).for_each(|_| costs.note_plain(0.25, 1, 4, Tick(0)));
    costs.speculated(149.0 * 0.03);
    assert!(!costs.pace_is_old());
    costs.speculated(0.04);
    assert!(costs.pace_is_old());
}

#[test]
fn drafting_while_the_engine_computes_for_others_is_counted_once() {
    let saved = |requests: usize| {
        let mut costs = plain_at(0.010);
        costs.set_concurrency(requests, false, false);
        costs.drafted(0, 8, 0.008, Tick(0));
        // A step of the other request ends 20 ms after the result, and a verify request takes a
        // step of its own.
        for call in 0..200 {
            let modelled = call % 16;
            let seconds = 0.030 - 0.001 * modelled as f64;
            costs.verified(SCORE, modelled, seconds, Tick(0));
            costs.shared(SCORE, modelled, seconds, modelled);
        }
        costs.saved_by_drafting(0)
    };
    let (each, all) = saved(2);
    assert!((0.0007..=0.001).contains(&each), "{each}");
    assert!((all / each - 7.5).abs() < 1.0, "{all}");
    assert_eq!(saved(1), (0.0, 0.0));
}

#[test]
fn one_hiccup_is_damped_and_repeated_ones_are_taken_over() {
    let mut costs = plain_at(0.010);
    (0..4).for_each(|_| costs.verified(TREE, 4, 0.012, Tick(0)));
    costs.verified(TREE, 8, 0.400, Tick(0));
    assert!(costs.verify(TREE, 8) < 0.025, "{}", costs.verify(TREE, 8));
    (0..10).for_each(|_| costs.verified(TREE, 8, 0.400, Tick(0)));
    assert!(costs.verify(TREE, 8) > 0.2, "{}", costs.verify(TREE, 8));
    // The very first request of all can only be compared with later ones.
    let mut costs = plain_at(0.010);
    costs.verified(TREE, 4, 0.400, Tick(0));
    costs.verified(TREE, 3, 0.012, Tick(0));
    assert!(costs.verify(TREE, 4) < 0.05, "{}", costs.verify(TREE, 4));
}
