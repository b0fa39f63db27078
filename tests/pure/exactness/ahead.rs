//! Verify ahead: verify requests that are sent before the result of the request that they depend
//! on.

use super::bugs::{Bug, is_caught};
use super::distribution::{Drafter, Way, case, plain_distribution, session_distribution, session_rounds};
use super::toy::{ScoringToy, Target, Toy, distance};
use super::world::Case;
use foretell_core::words::VerifyMethod;
use rstest::rstest;

/// Speculation is allowed at the first two events, at all but the first, and at all but the second;
/// the answers arrive in order or in reverse.
const SWITCHES: [u32; 4] = [3, 16 + 3, 6, 16 + 5];

fn ahead(
    drafter: Drafter,
    gamma: usize,
    most: usize,
    max: usize,
    methods: &[VerifyMethod],
    vocabulary: usize,
) -> Case {
    let mut case = Case { max, ..case(vocabulary, drafter, gamma, methods) };
    case.rules.ahead = Some(most);
    // Without the token that ends a text, so that assumptions continue.
    case.prompt = vec![0, 1, 0, 1, 0];
    case
}

fn keeps_the_distribution(target: impl Target, case: &Case, drafter: Drafter, switches: &[u32]) {
    let plain = plain_distribution(target, case);
    for &switches in switches {
        let way = Way { drafter, switches, bug: Bug::None };
        let tv = distance(&plain, &session_distribution(target, case, way));
        assert!(tv < 1e-12, "switches {switches:b}: {tv} in {case:?}");
    }
}

#[rstest]
fn verify_ahead_keeps_the_distribution(
    #[values(Drafter::Lookup, Drafter::Lookups, Drafter::Merged)] drafter: Drafter,
    #[values(VerifyMethod::FanOut, VerifyMethod::Tree)] method: VerifyMethod,
) {
    let toy = Toy { vocabulary: 3, salt: 11 };
    keeps_the_distribution(toy, &ahead(drafter, 1, 1, 5, &[method], 3), drafter, &SWITCHES);
}

#[rstest]
#[case::two_short_ones(1, 2, 11)]
#[case::a_long_one(2, 1, 42)]
fn several_requests_ahead_keep_the_distribution(
    #[case] gamma: usize,
    #[case] most: usize,
    #[case] salt: u64,
) {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 2, salt });
    // Two rounds, then plain decoding to the end.
    keeps_the_distribution(
        toy,
        &ahead(drafter, gamma, most, 7, &[VerifyMethod::Tree], 3),
        drafter,
        &[3, 16 + 3],
    );
}

/// Verify requests that leave positions open, or that decide from distributions.
#[rstest]
#[case::score(&[VerifyMethod::Score])]
#[case::score_then_fan_out(&[VerifyMethod::Score, VerifyMethod::FanOut])]
fn requests_ahead_with_open_positions_keep_the_distribution(
    #[case] methods: &[VerifyMethod],
    #[values(false, true)] special: bool,
) {
    let (drafter, target) = (Drafter::Lookup, ScoringToy { salt: 24, special });
    let mut case = ahead(drafter, 1, 1, 5, methods, 4);
    case.manner.tails = special;
    keeps_the_distribution(target, &case, drafter, &SWITCHES);
}

/// Draft ahead: the model drafter drafts for the next round while this one is verified, possibly in
/// vain.
#[rstest]
fn draft_ahead_keeps_the_distribution(
    #[values(Drafter::Chain, Drafter::Bush, Drafter::Merged)] drafter: Drafter,
    #[values(VerifyMethod::Tree, VerifyMethod::Native)] method: VerifyMethod,
) {
    let toy = Toy { vocabulary: 3, salt: 11 };
    let mut case = ahead(drafter, 1, 1, 4, &[method], 3);
    case.rules.drafts_ahead = true;
    keeps_the_distribution(toy, &case, drafter, &[7, 16 + 6]);
}

#[test]
fn requests_ahead_are_sent_used_and_dropped() {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 3, salt: 11 });
    let case = ahead(drafter, 1, 1, 5, &[VerifyMethod::Tree], 3);
    let (sent, used) = session_rounds(toy, &case, Way { drafter, switches: 3, bug: Bug::None });
    assert!(used > 20 && sent > 2 * used, "{sent} sent, {used} used");
    let native = ahead(drafter, 1, 1, 5, &[VerifyMethod::Native], 3);
    let way = Way { drafter, switches: 3, bug: Bug::None };
    assert_eq!(
        session_rounds(toy, &native, way),
        (0, 0),
        "an engine that verifies drafts itself gets one at a time"
    );
}

#[rstest]
#[case::bonus_decided_by_the_later_call(Bug::BonusDecidedAhead)]
#[case::retry_for_what_the_later_call_says(Bug::RetriedByAhead)]
#[case::prefix_did_not_come_true(Bug::PrefixAstray)]
fn a_request_ahead_that_decides_too_much_is_caught(
    #[case] bug: Bug,
    #[values(VerifyMethod::FanOut, VerifyMethod::Tree)] method: VerifyMethod,
) {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 3, salt: 11 });
    is_caught(toy, &ahead(drafter, 1, 1, 5, &[method], 3), Way { drafter, switches: 3, bug });
}
