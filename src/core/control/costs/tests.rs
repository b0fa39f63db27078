use super::*;
use crate::control::prior::Probed;

const TREE: Way = Way::by(VerifyMethod::Tree, 40);
const SCORE: Way = Way::by(VerifyMethod::Score, 40);
const ALONE: Shared = Shared { concurrent: 0.0, waits: 0.0, modelled: 0, reading: false };

fn plain_at(token: f64) -> Costs {
    let mut costs = Costs::default();
    plain(&mut costs, token);
    costs
}

fn plain(costs: &mut Costs, token: f64) {
    (0..300).for_each(|_| costs.note_plain(token, 1, 1, Disturbance::default()));
}

/// Notes requests of several lengths, of `base` seconds and `node` seconds for each draft token.
fn verified(costs: &mut Costs, way: Way, base: f64, node: f64) {
    for nodes in [0, 2, 4, 8].repeat(150) {
        costs.verified(way, nodes, ALONE, base + node * nodes as f64);
    }
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() < 0.06 * other
}

#[test]
fn what_was_not_measured_is_assumed_from_the_pace() {
    let costs = plain_at(0.010);
    assert!(near(costs.verify(TREE, 0, ALONE), 0.0105) && near(costs.verify(TREE, 10, ALONE), 0.0165));
    assert!(near(costs.verify(TREE, 0, Shared { waits: 1.0, ..ALONE }), 0.0205), "a step in progress");
    assert_eq!(costs.basis(TREE), Basis::Guess);
    assert!(costs.line(TREE).weight == 0.0);
}

#[test]
fn a_request_costs_what_was_measured_at_any_length() {
    let mut costs = plain_at(0.010);
    verified(&mut costs, TREE, 0.012, 0.001);
    assert!(near(costs.verify(TREE, 0, ALONE), 0.012) && near(costs.verify(TREE, 16, ALONE), 0.028));
    assert_eq!((costs.basis(TREE), costs.basis(SCORE)), (Basis::Measured, Basis::Guess));
    verified(&mut costs, TREE, 0.030, 0.001);
    assert!(near(costs.verify(TREE, 4, ALONE), 0.034), "a change is followed: {:?}", costs.line(TREE));
}

#[test]
fn waits_and_drafts_beside_it_are_told_apart() {
    let mut costs = plain_at(0.010);
    for n in 0..900 {
        let waits = f64::from(u8::from(n % 2 == 0));
        let shared =
            Shared { concurrent: (n % 5 * 10) as f64, waits, modelled: n % 11, reading: n % 13 == 0 };
        let seconds = 0.012
            + 0.0002 * (shared.concurrent + (n % 3) as f64)
            + waits * (0.008 - 0.0004 * shared.modelled as f64)
            + if shared.reading { 0.1 } else { 0.0 };
        costs.verified(SCORE, n % 3, shared, seconds);
    }
    let line = costs.line(SCORE);
    assert!((line.base - 0.012).abs() < 0.003 && (line.wait - 0.008).abs() < 0.003, "{line:?}");
    assert!((line.concurrent - 0.0002).abs() < 0.00005 && (line.saved - 0.0004).abs() < 0.0002, "{line:?}");
}

#[test]
fn the_first_request_shows_the_switch_and_one_hiccup_is_damped() {
    let mut costs = plain_at(0.010);
    costs.entered(TREE, 4, ALONE, 0.053);
    assert!(near(costs.switch_in(), 0.040) && costs.line(TREE).weight == 0.0, "{}", costs.switch_in());
    (0..30).for_each(|_| costs.verified(TREE, 4, ALONE, 0.012));
    costs.verified(TREE, 8, ALONE, 4.0);
    assert!(costs.verify(TREE, 8, ALONE) < 0.08, "{:?}", costs.line(TREE));
}

#[test]
fn a_high_cost_is_forgotten_with_time() {
    let mut costs = plain_at(0.010);
    verified(&mut costs, TREE, 0.9, 0.0);
    assert!(near(costs.verify(TREE, 4, ALONE), 0.9));
    (0..3_600).for_each(|_| costs.passed(1.0));
    assert!(costs.verify(TREE, 4, ALONE) < 0.1, "{:?}", costs.line(TREE));
}

#[test]
fn a_concurrency_has_its_own_costs_and_begins_with_its_neighbour_s_at_its_own_pace() {
    let mut costs = plain_at(0.010);
    verified(&mut costs, TREE, 0.015, 0.001);
    costs.set_concurrency(16);
    assert!(near(costs.verify(TREE, 4, ALONE), 0.019), "nothing else is known");
    plain(&mut costs, 0.030);
    assert!(near(costs.verify(TREE, 4, ALONE), 0.057), "{}", costs.verify(TREE, 4, ALONE));
    verified(&mut costs, TREE, 0.090, 0.001);
    assert!((costs.verify(TREE, 4, ALONE) - 0.094).abs() < 0.01);
    costs.set_concurrency(1);
    assert!(near(costs.verify(TREE, 4, ALONE), 0.019));
}

#[test]
fn a_pace_that_is_longer_than_a_verify_request_is_out_of_date() {
    let mut costs = plain_at(0.100);
    assert!(near(costs.plain_token().unwrap(), 0.100));
    verified(&mut costs, SCORE, 0.025, 0.001);
    assert!(costs.plain_token().unwrap() < 0.04, "{:?}", costs.plain_token());
}

#[test]
fn contexts_of_another_size_have_costs_of_their_own_and_begin_with_the_nearest() {
    let (short, long) = (Way::by(VerifyMethod::Score, 40), Way::by(VerifyMethod::Score, 1_000));
    let mut costs = plain_at(0.010);
    verified(&mut costs, short, 0.012, 0.001);
    assert!(near(costs.verify(long, 4, ALONE), 0.016), "nothing else is known");
    verified(&mut costs, long, 0.036, 0.001);
    assert!(near(costs.verify(short, 4, ALONE), 0.016) && near(costs.verify(long, 4, ALONE), 0.040));
}

#[test]
fn a_probe_s_result_holds_until_something_is_measured() {
    let round = |(context, nodes, seconds)| Probed { method: VerifyMethod::Score, context, nodes, seconds };
    let rounds = [(40, 0, 0.010), (40, 4, 0.014), (1_000, 0, 0.030), (1_000, 4, 0.042)].map(round);
    let prior = Prior { verify: rounds.into(), switch_in: Some(0.03), token: Some(0.01), ..Prior::default() };
    let mut costs = plain_at(0.010);
    costs.take_prior(&Arc::new(prior));
    let at = |costs: &Costs, context| costs.verify(Way::by(VerifyMethod::Score, context), 4, ALONE);
    assert_eq!((costs.basis(SCORE), costs.basis(TREE)), (Basis::Probe, Basis::Guess));
    assert!((at(&costs, 40) - 0.014).abs() < 0.002, "{}", at(&costs, 40));
    assert!((at(&costs, 9_000) - 0.042).abs() < 0.006, "{}", at(&costs, 9_000));
    assert!(near(costs.switch_in(), 0.03));
    verified(&mut costs, SCORE, 0.028, 0.0);
    assert!(near(at(&costs, 40), 0.028));
}

#[test]
fn a_method_that_leaves_half_undecided_costs_half_a_fallback_request_more() {
    let way = Way { fallback: Some(VerifyMethod::FanOut), ..SCORE };
    let mut costs = plain_at(0.010);
    verified(&mut costs, SCORE, 0.012, 0.0);
    verified(&mut costs, Way::by(VerifyMethod::FanOut, 40), 0.050, 0.0);
    assert!(near(costs.verify(way, 4, ALONE), 0.012), "no request was seen to decide nothing");
    (0..100).for_each(|round| costs.decided(VerifyMethod::Score, round % 2 == 0));
    assert!((costs.verify(way, 4, ALONE) - 0.037).abs() < 0.005);
    assert!(near(costs.verify(SCORE, 4, ALONE), 0.012), "without a fallback the round is over");
}

#[test]
fn a_drafter_that_reads_fast_is_not_taken_for_slow() {
    let mut costs = plain_at(0.1);
    assert!(near(costs.draft_token(0), 0.015), "a guess");
    costs.shadowed(0, 0.2, false);
    assert!(near(costs.draft_token(0), 0.015), "that pass read the prompt");
    costs.shadowed(0, 0.002, true);
    assert!((costs.draft_token(0) - 0.002).abs() < 1e-9);
    costs.drafted(0, 4, 0.012);
    assert!((costs.draft_token(0) - 0.003).abs() < 1e-9, "measured");
}
