//! A proof that can fail: planted bugs, each of which the enumeration must catch.
//!
//! Each runs through the session and the walk as they are shipped: what is wrong is what the walk is handed, what is
//! made of its result, or the world around the session.

use super::backend::Manner;
use super::law::{Drafter, Way, case, plain_law, session_law};
use super::toy::{Target, Told, Toy, distance};
use super::world::{Case, Wrong};
use foretell::draft::Tree;
use foretell::session::accept::Accepted;
use foretell::words::{Plan, Row, Verdict};
use rstest::rstest;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bug {
    None,
    /// Every drafted token is accepted.
    AcceptAll,
    /// At the first mismatch the drafted token is emitted.
    DraftForSample,
    /// At the first mismatch below an accepted token the sample is dropped, and drawn anew by the next round.
    MismatchRedrawn,
    /// The token behind the accepted run is emitted twice.
    BonusDoubled,
    /// The token behind the accepted run does not reach the client.
    BonusLost,
    /// Below a node the row of its sibling is read.
    WrongSibling,
    /// A token that ends the text is taken for text.
    EndIgnored,
    /// Draws are keyed by the place within the call.
    DrawnPerCall,
    /// A drawn end of text is discarded and drawn anew.
    EndDiscarded,
    /// The backend draws anew what does not match the draft.
    Redraw,
    /// A ride is raced against a leap.
    Race,
    /// Leaving a ride depends on a token that is not the past.
    SwitchOnUnread,
    /// A verdict is refused for what it samples.
    RefusedBySample,
    /// The limit of the output is one too high.
    LimitIgnored,
    /// The driver does not say that a ride's last token ends the text.
    TailIgnored,
    /// A call that is sent ahead decides the token that the call before it ends with.
    BonusDecidedAhead,
    /// What a call that is sent ahead says makes the call before it fail.
    RetriedByAhead,
    /// A call that is sent ahead counts although its prefix did not come true.
    PrefixAstray,
}

impl Bug {
    /// What is wrong with the world.
    pub fn wrong(self) -> Wrong {
        match self {
            Self::Redraw => Wrong { redraw: 1, ..Wrong::default() },
            Self::Race => Wrong { race: true, ..Wrong::default() },
            Self::RefusedBySample => Wrong { refuse: Some(1), ..Wrong::default() },
            Self::LimitIgnored => Wrong { slack: 1, ..Wrong::default() },
            Self::BonusLost => Wrong { lossy: true, ..Wrong::default() },
            Self::TailIgnored => Wrong { tailless: true, ..Wrong::default() },
            Self::BonusDecidedAhead => Wrong { granted: true, ..Wrong::default() },
            Self::RetriedByAhead => Wrong { retried: true, ..Wrong::default() },
            Self::PrefixAstray => Wrong { astray: true, ..Wrong::default() },
            _ => Wrong::default(),
        }
    }

    /// What the walk gets to see.
    pub fn verdict(self, draft: &Tree, mut verdict: Verdict) -> Verdict {
        let siblings = |parent: Option<usize>| {
            (0..draft.len()).filter(move |&node| draft.nodes()[node].parent == parent)
        };
        let rows = &mut verdict.rows;
        match self {
            Self::AcceptAll => {
                for place in std::iter::once(None).chain((0..draft.len()).map(Some)) {
                    if let Some(child) = siblings(place).next() {
                        rows[place.map_or(0, |node| node + 1)] = Row::of(draft.nodes()[child].token);
                    }
                }
            }
            Self::WrongSibling => {
                for place in std::iter::once(None).chain((0..draft.len()).map(Some)) {
                    if let [one, other] = siblings(place).take(2).collect::<Vec<_>>()[..] {
                        rows.swap(one + 1, other + 1);
                    }
                }
            }
            Self::EndIgnored => rows.iter_mut().for_each(|row| row.ends = false),
            _ => {}
        }
        verdict
    }

    /// What the session gets of what the walk has found.
    pub fn accepted(self, draft: &Tree, verdict: &Verdict, mut accepted: Accepted) -> Accepted {
        let place = accepted.nodes.last().copied();
        let last = accepted.tokens.last().copied();
        match self {
            Self::DraftForSample => {
                if let Some(child) = draft.nodes().iter().find(|node| node.parent == place) {
                    accepted.tokens.pop();
                    accepted.tokens.push(child.token);
                }
            }
            Self::MismatchRedrawn
                if accepted.tokens.len() > 1 && draft.nodes().iter().any(|node| node.parent == place) =>
            {
                accepted.tokens.pop();
            }
            Self::BonusDoubled => accepted.tokens.extend(last),
            Self::EndDiscarded => {
                let row = &verdict.rows[place.map_or(0, |node| node + 1).min(verdict.rows.len() - 1)];
                if last == Some(Told::END) && row.sample.is_none() {
                    accepted.tokens.pop();
                }
            }
            _ => {}
        }
        accepted
    }
}

/// Caught where the world is sound without the bug.
pub fn is_caught(target: impl Target, case: &Case, way: Way) {
    let plain = plain_law(target, case);
    let sound = distance(&plain, &session_law(target, case, Way { bug: Bug::None, ..way }));
    assert!(sound < 1e-12, "without the bug: {sound}");
    let tv = distance(&plain, &session_law(target, case, way));
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
    let case = Case { max: 4, ..case(3, drafter, 2, &[Plan::Tree]) };
    is_caught(toy, &case, Way { drafter, switches: 7, bug });
}

#[rstest]
#[case::redraw_until_match(Bug::Redraw)]
#[case::ride_raced_against_leap(Bug::Race)]
#[case::switch_on_an_unread_sample(Bug::SwitchOnUnread)]
#[case::refused_for_what_was_sampled(Bug::RefusedBySample)]
#[case::limit_ignored(Bug::LimitIgnored)]
fn a_world_that_selects_samples_is_caught(
    #[case] bug: Bug,
    #[values(Plan::FanOut, Plan::Native)] plan: Plan,
) {
    let toy = Toy { vocabulary: 3, salt: 5 };
    let drafter = Drafter::Chain;
    let case = Case { max: 3, ..case(3, drafter, 2, &[plan]) };
    is_caught(toy, &case, Way { drafter, switches: 7, bug });
}

/// Bugs of deciding from distributions.
#[rstest]
#[case::draws_keyed_by_call(Bug::DrawnPerCall)]
#[case::end_discarded_for_what_it_is(Bug::EndDiscarded)]
fn a_draw_with_a_bug_is_caught(#[case] bug: Bug) {
    let target = Told { salt: 29, special: false };
    let drafter = Drafter::Chain;
    let case = Case { max: 4, ..case(4, drafter, 2, &[Plan::Score, Plan::FanOut]) };
    is_caught(target, &case, Way { drafter, switches: 7, bug });
}

/// Bugs of ending where only the backend knows which tokens do. Bit 0 alone leaps once and rides on by ids.
#[rstest]
#[case::inside_a_run(Bug::EndIgnored, 7)]
#[case::with_a_ride(Bug::TailIgnored, 1)]
fn an_end_that_is_not_heard_is_caught(#[case] bug: Bug, #[case] switches: u32) {
    let toy = Toy { vocabulary: 3, salt: 21 };
    let drafter = Drafter::Bush;
    let mut case = Case { max: 4, ..case(3, drafter, 2, &[Plan::Tree]) };
    case.manner = Manner { ends: true, ..Manner::default() };
    is_caught(toy, &case, Way { drafter, switches, bug });
}
