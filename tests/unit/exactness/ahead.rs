//! Rounds in flight: calls that are sent before the one is answered that they rest on.

use super::bugs::{Bug, is_caught};
use super::law::{Drafter, Way, case, plain_law, session_law, session_rounds};
use super::toy::{Target, Told, Toy, distance};
use super::world::Case;
use foretell::words::Plan;
use rstest::rstest;

/// Leaping is allowed at the first two events, at all but the first, and at all but the second; the answers come in order
/// or in the wrong one.
const SWITCHES: [u32; 4] = [3, 16 + 3, 6, 16 + 5];

fn ahead(drafter: Drafter, gamma: usize, most: usize, max: usize, plans: &[Plan], vocabulary: usize) -> Case {
    let mut case = Case { max, ..case(vocabulary, drafter, gamma, plans) };
    case.rules.ahead = Some(most);
    // Without the token that ends a text, so that guesses go on.
    case.prompt = vec![0, 1, 0, 1, 0];
    case
}

fn keeps_the_law(target: impl Target, case: &Case, drafter: Drafter, switches: &[u32]) {
    let plain = plain_law(target, case);
    for &switches in switches {
        let way = Way { drafter, switches, bug: Bug::None };
        let tv = distance(&plain, &session_law(target, case, way));
        assert!(tv < 1e-12, "switches {switches:b}: {tv} in {case:?}");
    }
}

#[rstest]
fn calls_sent_ahead_keep_the_law(
    #[values(Drafter::Lookup, Drafter::Lookups, Drafter::Merged)] drafter: Drafter,
    #[values(Plan::FanOut, Plan::Tree)] plan: Plan,
) {
    let toy = Toy { vocabulary: 3, salt: 11 };
    keeps_the_law(toy, &ahead(drafter, 1, 1, 5, &[plan], 3), drafter, &SWITCHES);
}

#[rstest]
#[case::two_short_ones(1, 2, 11)]
#[case::a_long_one(2, 1, 42)]
fn several_calls_ahead_keep_the_law(#[case] gamma: usize, #[case] most: usize, #[case] salt: u64) {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 2, salt });
    // Leaping twice, then riding to the end.
    keeps_the_law(toy, &ahead(drafter, gamma, most, 7, &[Plan::Tree], 3), drafter, &[3, 16 + 3]);
}

/// Calls whose places stay open, or that decide from distributions.
#[rstest]
#[case::score(&[Plan::Score])]
#[case::score_then_fan_out(&[Plan::Score, Plan::FanOut])]
fn calls_ahead_that_leave_places_open_keep_the_law(
    #[case] plans: &[Plan],
    #[values(false, true)] special: bool,
) {
    let (drafter, target) = (Drafter::Lookup, Told { salt: 24, special });
    let mut case = ahead(drafter, 1, 1, 5, plans, 4);
    case.manner.tails = special;
    keeps_the_law(target, &case, drafter, &SWITCHES);
}

/// The model drafter drafts for the next round while this one is under way, and perhaps in vain.
#[rstest]
fn sketches_keep_the_law(
    #[values(Drafter::Chain, Drafter::Bush, Drafter::Merged)] drafter: Drafter,
    #[values(Plan::Tree, Plan::Native)] plan: Plan,
) {
    let toy = Toy { vocabulary: 3, salt: 11 };
    let mut case = ahead(drafter, 1, 1, 4, &[plan], 3);
    case.rules.drafts_ahead = true;
    keeps_the_law(toy, &case, drafter, &[7, 16 + 6]);
}

#[test]
fn they_are_sent_and_used_and_dropped() {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 3, salt: 11 });
    let case = ahead(drafter, 1, 1, 5, &[Plan::Tree], 3);
    let (sent, used) = session_rounds(toy, &case, Way { drafter, switches: 3, bug: Bug::None });
    assert!(used > 20 && sent > 2 * used, "{sent} sent, {used} used");
    let native = ahead(drafter, 1, 1, 5, &[Plan::Native], 3);
    let way = Way { drafter, switches: 3, bug: Bug::None };
    assert_eq!(session_rounds(toy, &native, way), (0, 0), "an engine that judges drafts gets one at a time");
}

#[rstest]
#[case::bonus_decided_by_the_later_call(Bug::BonusDecidedAhead)]
#[case::retry_for_what_the_later_call_says(Bug::RetriedByAhead)]
#[case::prefix_did_not_come_true(Bug::PrefixAstray)]
fn a_call_ahead_that_decides_too_much_is_caught(
    #[case] bug: Bug,
    #[values(Plan::FanOut, Plan::Tree)] plan: Plan,
) {
    let (drafter, toy) = (Drafter::Lookup, Toy { vocabulary: 3, salt: 11 });
    is_caught(toy, &ahead(drafter, 1, 1, 5, &[plan], 3), Way { drafter, switches: 3, bug });
}
