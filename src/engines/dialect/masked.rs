//! Results of later requests under the grammar of an output, which the engine does not apply to
//! them.
//!
//! At temperature 0 the token under a grammar is the likeliest of those that it allows. A sample
//! that is allowed is that token; behind one that is not, the token is not known. Of a list of the
//! likeliest tokens the first allowed one is that token, unless a token that may end the text, or
//! one as likely, comes before it.

use super::score::{TIE, ranked};
use super::{Context, Round};
use crate::masks::{Allows, Mask};
use foretell_core::units::TokenId;
use foretell_core::words::{Row, VerifyResult};

/// Number of the draft's first nodes that the grammar of the output allows.
pub fn allowed_nodes(round: &Round<'_>) -> usize {
    let Some(mask) = round.context.mask else { return usize::MAX };
    let allowed = |node: &usize| {
        let path = round.draft.path(*node);
        let token = path
            .split_last()
            .map(|(last, before)| mask.says(round.context.prompt, round.context.output, before, *last));
        token == Some(Allows::Yes)
    };
    (0..round.draft.len()).take_while(allowed).count()
}

/// Without the samples that the grammar of the output bars.
pub fn without_barred(round: &Round<'_>, mut result: VerifyResult) -> VerifyResult {
    let Some(mask) = round.context.mask else { return result };
    for (position, row) in result.rows.iter_mut().enumerate() {
        let path = position.checked_sub(1).map(|node| round.draft.path(node)).unwrap_or_default();
        let before = [round.context.output, &path].concat();
        if row
            .sample
            .is_some_and(|sample| mask.follow(round.context.prompt, &before, &[sample], row.ends) == 0)
        {
            *row = Row::default();
        }
    }
    result
}

/// The rows of a scored chain at temperature 0 up to the first undecided position, one per draft
/// node, each the likeliest of the tokens that the grammar allows; if all are decided, then
/// `bonus`, which the engine has sampled. `width` tokens were asked for at each position, so that
/// no unlisted one is likelier than the last of them.
pub fn rows(
    round: &Round<'_>,
    mask: &Mask,
    width: usize,
    told: impl Iterator<Item = Vec<(TokenId, f64)>>,
    bonus: Row,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (position, top) in told.enumerate() {
        let path = position.checked_sub(1).map(|node| round.draft.path(node)).unwrap_or_default();
        let says = |token| mask.says(round.context.prompt, round.context.output, &path, token);
        let Some(token) = likeliest(&ranked(&top), width, says) else { return rows };
        rows.push(Row::of(token));
    }
    rows.push(bonus);
    rows
}

/// True if every token of `scored`, which ends an output, is the likeliest that the mask allows,
/// wherever its row (as in [`rows`]) decides that, and if the mask allows all of them. `context`
/// has the output before them.
pub fn agrees(
    context: &Context<'_>,
    scored: &[TokenId],
    mask: &Mask,
    width: usize,
    told: &[Vec<(TokenId, f64)>],
) -> bool {
    let decided = |position: usize, top: &Vec<(TokenId, f64)>| {
        let path = scored.get(..position).unwrap_or_default();
        likeliest(&ranked(top), width, |token| mask.says(context.prompt, context.output, path, token))
    };
    mask.follow(context.prompt, context.output, scored, false) == scored.len()
        && (0..)
            .zip(told)
            .zip(scored)
            .all(|((position, top), &token)| decided(position, top).is_none_or(|decided| decided == token))
}

/// The likeliest allowed token of a list that begins with the likeliest of all; `None` where that
/// is not certain. Where a token may end the text, only the engine knows if it is allowed.
fn likeliest(
    top: &[(TokenId, f64)],
    width: usize,
    mut says: impl FnMut(TokenId) -> Allows,
) -> Option<TokenId> {
    let mut open = top.iter().map(|entry| (entry, says(entry.0))).filter(|(_, allows)| *allows != Allows::No);
    let (first, allows) = open.next()?;
    // An unlisted token is at most as likely as the last of those that were asked for.
    let unlisted = top.get(width.checked_sub(1)?).map_or(f64::NEG_INFINITY, |last| last.1);
    let next = open.next().map_or(unlisted, |(second, _)| second.1.max(unlisted));
    (allows == Allows::Yes && first.1 - next > TIE).then_some(first.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For all orders of five logits, with ties, lists of three and a drafted token, and what a
    /// grammar may say: a token that is decided is the only best one of those that are allowed.
    #[test]
    fn under_a_grammar_a_decided_token_is_the_best_of_those_allowed() {
        let mut decided = 0;
        for code in 0..4_u32.pow(5) {
            let logit = |token: TokenId| -f64::from(code / 4_u32.pow(token) % 4);
            let mut top: Vec<(TokenId, f64)> = (0..5).map(|token| (token, logit(token))).collect();
            top.sort_by(|a, b| b.1.total_cmp(&a.1));
            // The drafted one is listed wherever it is.
            let rest = top.split_off(3);
            for drafted in [None, Some(rest[0]), Some(rest[1])] {
                let list: Vec<(TokenId, f64)> = top.iter().copied().chain(drafted).collect();
                for says in 0..3_u32.pow(5) {
                    let says = |token: TokenId| match says / 3_u32.pow(token) % 3 {
                        0 => Allows::No,
                        1 => Allows::Yes,
                        _ => Allows::Unknown,
                    };
                    let Some(taken) = likeliest(&list, 3, says) else { continue };
                    decided += 1;
                    assert_eq!(says(taken), Allows::Yes);
                    let mut others = (0..5).filter(|&token| token != taken && says(token) != Allows::No);
                    assert!(others.all(|token| logit(token) < logit(taken)), "{list:?} {taken}");
                }
            }
        }
        assert!(decided > 100_000, "{decided}");
        assert_eq!(likeliest(&[(7, -0.5)], 3, |_| Allows::Yes), Some(7), "the whole vocabulary is listed");
    }
}
