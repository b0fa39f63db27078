//! Mutation test of the proof: planted bugs, each of which the enumeration must catch.
//!
//! Each runs through the session and the walk as shipped: the bug is in the walk's input, in the
//! use of its result, or in the world around the session.

use super::backend::Manner;
use super::distribution::{Drafter, Way, case, plain_distribution, session_distribution};
use super::toy::{ScoringToy, Target, Toy, distance};
use super::world::{Case, Wrong};
use foretell_core::draft::Tree;
use foretell_core::session::accept::Accepted;
use foretell_core::words::{Row, VerifyMethod, VerifyResult};
use rstest::rstest;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bug {
    None,
    /// Every drafted token is accepted.
    AcceptAll,
    /// At the first mismatch the drafted token is emitted.
    DraftForSample,
    /// At the first mismatch below an accepted token the sample is dropped, and drawn again by the
    /// next round.
    MismatchRedrawn,
    /// The token after the accepted run is emitted twice.
    BonusDoubled,
    /// The token after the accepted run does not reach the client.
    BonusLost,
    /// Below a node the row of its sibling is read.
    WrongSibling,
    /// A token that ends the text is taken for text.
    EndIgnored,
    /// Draws are keyed by the position within the call.
    DrawnPerCall,
    /// A drawn end of text is discarded and drawn again.
    EndDiscarded,
    /// The backend draws again if a sample does not match the draft.
    Redraw,
    /// A plain request is raced against a verify request.
    Race,
    /// Leaving a plain request depends on a token that is not in the context yet.
    SwitchOnUnread,
    /// A verification result is refused because of its samples.
    RefusedBySample,
    /// The limit of the output is one too high.
    LimitIgnored,
    /// The session runner does not report that the last token of a plain request ends the text.
    TailIgnored,
}

impl Bug {
    /// The bug in the world.
    pub fn wrong(self) -> Wrong {
        match self {
            Self::Redraw => Wrong { redraw: 1, ..Wrong::default() },
            Self::Race => Wrong { race: true, ..Wrong::default() },
            Self::RefusedBySample => Wrong { refuse: Some(1), ..Wrong::default() },
            Self::LimitIgnored => Wrong { slack: 1, ..Wrong::default() },
            Self::BonusLost => Wrong { lossy: true, ..Wrong::default() },
            Self::TailIgnored => Wrong { tailless: true, ..Wrong::default() },
            _ => Wrong::default(),
        }
    }

    /// The verification result that the walk reads.
    pub fn result(self, draft: &Tree, mut result: VerifyResult) -> VerifyResult {
        let siblings = |parent: Option<usize>| {
            (0..draft.len()).filter(move |&node| draft.nodes()[node].parent == parent)
        };
        let rows = &mut result.rows;
        match self {
            Self::AcceptAll => {
                for position in std::iter::once(None).chain((0..draft.len()).map(Some)) {
                    if let Some(child) = siblings(position).next() {
                        rows[position.map_or(0, |node| node + 1)] = Row::of(draft.nodes()[child].token);
                    }
                }
            }
            Self::WrongSibling => {
                for position in std::iter::once(None).chain((0..draft.len()).map(Some)) {
                    if let [one, other] = siblings(position).take(2).collect::<Vec<_>>()[..] {
                        rows.swap(one + 1, other + 1);
                    }
                }
            }
            Self::EndIgnored => rows.iter_mut().for_each(|row| row.ends = false),
            _ => {}
        }
        result
    }

    /// The part of the walk's result that the session gets.
    pub fn accepted(self, draft: &Tree, result: &VerifyResult, mut accepted: Accepted) -> Accepted {
        let position = accepted.nodes.last().copied();
        let last = accepted.tokens.last().copied();
        match self {
            Self::DraftForSample => {
                if let Some(child) = draft.nodes().iter().find(|node| node.parent == position) {
                    accepted.tokens.pop();
                    accepted.tokens.push(child.token);
                }
            }
            Self::MismatchRedrawn
                if accepted.tokens.len() > 1 && draft.nodes().iter().any(|node| node.parent == position) =>
            {
                accepted.tokens.pop();
            }
            Self::BonusDoubled => accepted.tokens.extend(last),
            Self::EndDiscarded => {
                let row = &result.rows[position.map_or(0, |node| node + 1).min(result.rows.len() - 1)];
                if last == Some(ScoringToy::END) && row.sample.is_none() {
                    accepted.tokens.pop();
                }
            }
            _ => {}
        }
        accepted
    }
}

/// Caught, and the world is sound without the bug.
pub fn is_caught(target: impl Target, case: &Case, way: Way) {
    let plain = plain_distribution(target, case);
    let sound = distance(&plain, &session_distribution(target, case, Way { bug: Bug::None, ..way }));
    assert!(sound < 1e-12, "without the bug: {sound}");
    let tv = distance(&plain, &session_distribution(target, case, way));
    assert!(tv > 1e-3, "not caught: {tv}");
}

#[rstest]
#[case::every_draft_accepted(Bug::AcceptAll, Drafter::Chain)]
#[case::every_draft_of_a_bush_accepted(Bug::AcceptAll, Drafter::Bush)]
#[case::draft_for_sample(Bug::DraftForSample, Drafter::Bush)]
#[case::mismatch_redrawn(Bug::MismatchRedrawn, Drafter::Chain)]
#[case::bonus_doubled(Bug::BonusDoubled, Drafter::Bush)]
#[case::bonus_lost(Bug::BonusLost, Drafter::Bush)]
#[case::wrong_sibling(Bug::WrongSibling, Drafter::Bush)]
fn a_walk_with_a_bug_is_caught(#[case] bug: Bug, #[case] drafter: Drafter) {
    let toy = Toy { vocabulary: 3, salt: 21 };
    let case = Case { max: 4, ..case(3, drafter, 2, &[VerifyMethod::Tree]) };
    is_caught(toy, &case, Way { drafter, switches: 7, bug });
}

#[rstest]
#[case::redraw_until_match(Bug::Redraw)]
#[case::plain_request_raced_against_verify(Bug::Race)]
#[case::switch_on_an_unread_sample(Bug::SwitchOnUnread)]
#[case::refused_for_what_was_sampled(Bug::RefusedBySample)]
#[case::limit_ignored(Bug::LimitIgnored)]
fn a_world_that_selects_samples_is_caught(
    #[case] bug: Bug,
    #[values(VerifyMethod::FanOut, VerifyMethod::Tree)] method: VerifyMethod,
) {
    let toy = Toy { vocabulary: 3, salt: 5 };
    let drafter = Drafter::Chain;
    let case = Case { max: 3, ..case(3, drafter, 2, &[method]) };
    is_caught(toy, &case, Way { drafter, switches: 7, bug });
}

/// Bugs of deciding from distributions.
#[rstest]
#[case::draws_keyed_by_call(Bug::DrawnPerCall)]
#[case::end_discarded_for_what_it_is(Bug::EndDiscarded)]
fn a_draw_with_a_bug_is_caught(#[case] bug: Bug) {
    let target = ScoringToy { salt: 29, special: false };
    let drafter = Drafter::Chain;
    let case = Case { max: 4, ..case(4, drafter, 2, &[VerifyMethod::Score, VerifyMethod::FanOut]) };
    is_caught(target, &case, Way { drafter, switches: 7, bug });
}

/// Bugs of the end of text if only the backend knows the ending tokens. Bit 0 alone speculates once
/// and continues plainly by ids.
#[rstest]
#[case::inside_a_run(Bug::EndIgnored, 7)]
#[case::with_a_plain_request(Bug::TailIgnored, 1)]
fn an_ignored_end_is_caught(#[case] bug: Bug, #[case] switches: u32) {
    let toy = Toy { vocabulary: 3, salt: 21 };
    let drafter = Drafter::Bush;
    let mut case = Case { max: 4, ..case(3, drafter, 2, &[VerifyMethod::Tree]) };
    case.manner = Manner { ends: true, ..Manner::default() };
    is_caught(toy, &case, Way { drafter, switches, bug });
}
