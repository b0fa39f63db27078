//! Evaluates rows of logits: samples for a draft, scores for a prompt. Pure.

use crate::grammar::Next;
use crate::sampler::{History, Processed, Sampler};
use crate::target::job::{Failure, PromptRow, VerifiedRow};
use foretell_core::units::TokenId;
use foretell_wire::openai::Sampling;

const FEWER: &str = "the model gave fewer rows than requested";

/// A draft to verify; parents come before their children.
pub(super) struct Draft<'a> {
    pub(super) tokens: &'a [TokenId],
    pub(super) parents: &'a [Option<usize>],
}

impl Draft<'_> {
    /// The nodes that follow `parent`, with their tokens.
    fn children(&self, parent: Option<usize>) -> impl Iterator<Item = (usize, TokenId)> {
        let nodes = self.tokens.iter().copied().zip(self.parents).enumerate();
        nodes.filter(move |(_, (_, of))| **of == parent).map(|(node, (token, _))| (node, token))
    }
}

/// Samples after the context and after the nodes that the samples before them accept, each with the
/// noise of its position; with `listed`, after every node, with log-probabilities and so many of
/// the likeliest tokens. Returns a row for each position and the accepted nodes. `allowed`: what a
/// grammar allows at each position. It constrains the rows that the samples reach, and no others.
///
/// # Errors
/// A row or a parent is missing, or the grammar exceeds its limits.
pub(super) fn judge<'a>(
    sampler: &Sampler,
    context: &History,
    draft: &Draft<'_>,
    allowed: Option<&[Result<Next, String>]>,
    listed: Option<usize>,
    row: impl Fn(usize) -> Option<&'a [f32]>,
) -> Result<(Vec<VerifiedRow>, Vec<usize>), Failure> {
    let positions = draft.tokens.len() + 1;
    let mut rows = vec![VerifiedRow::default(); positions];
    let mut pasts: Vec<Option<History>> = Vec::with_capacity(positions);
    let mut reached = vec![false; positions];
    for position in 0..positions {
        let node = position.checked_sub(1);
        let (context, is_reached) = match node {
            // A context that assumes a draft may be behind what the grammar allows: its rows are
            // never used.
            None => (Some(context.clone()), !is_lost(allowed)),
            Some(node) => {
                let parent = draft.parents.get(node).copied().ok_or(FEWER)?;
                let before = parent.map_or(0, |parent| parent + 1);
                let token = draft.tokens.get(node).copied();
                let is_sampled = rows.get(before).is_some_and(|row| row.sample == token);
                let is_reached = is_sampled && reached.get(before).copied().unwrap_or(false);
                let past = pasts.get_mut(before).ok_or(FEWER)?;
                // A copy costs something under a grammar; the last child needs none.
                let is_last = !draft.parents.iter().skip(node + 1).any(|other| *other == parent);
                let past = if is_last { past.take() } else { past.clone() };
                let mut context = if is_reached || listed.is_some() { past } else { None };
                if let (Some(context), Some(token)) = (&mut context, token) {
                    context.push(token);
                }
                (context, is_reached)
            }
        };
        if let Some(reached) = reached.get_mut(position) {
            *reached = is_reached;
        }
        let Some(mut context) = context else {
            pasts.push(None);
            continue;
        };
        if is_reached {
            bind(&mut context, allowed, position)?;
        }
        let processed = sampler.process(row(position).ok_or(FEWER)?, &context);
        let sample = processed.draw();
        if let Some(top) = listed {
            list(&mut rows, position, sample, top, &processed, draft)?;
        }
        rows.get_mut(position).ok_or(FEWER)?.sample = Some(sample);
        pasts.push(Some(context));
    }
    let accepted = walk(draft, &rows);
    Ok((rows, accepted))
}

/// True if the grammar does not allow what comes before the draft.
fn is_lost(allowed: Option<&[Result<Next, String>]>) -> bool {
    matches!(allowed.and_then(<[_]>::first), Some(Ok(Next::Nothing)))
}

/// Constrains the next token by what a grammar allows at this position.
fn bind(
    context: &mut History,
    allowed: Option<&[Result<Next, String>]>,
    position: usize,
) -> Result<(), Failure> {
    if let Some(allowed) = allowed {
        let next = allowed.get(position).ok_or(FEWER)?;
        context.bind(next.as_ref().map_err(|why| Failure::Grammar(why.clone()))?);
    }
    Ok(())
}

/// Adds the figures of a row's distribution, and the log-probabilities of its node's children.
fn list(
    rows: &mut [VerifiedRow],
    position: usize,
    sample: TokenId,
    top: usize,
    processed: &Processed<'_>,
    draft: &Draft<'_>,
) -> Result<(), Failure> {
    let node = position.checked_sub(1);
    let mut tokens = vec![sample];
    tokens.extend(draft.children(node).map(|(_, token)| token));
    let mut logprobs = processed.logprobs(&tokens).into_iter();
    let row = rows.get_mut(position).ok_or(FEWER)?;
    row.logprob = logprobs.next();
    row.entropy = (top > 0).then(|| processed.entropy());
    row.top = processed.top(top);
    for ((child, _), logprob) in draft.children(node).zip(logprobs) {
        rows.get_mut(child + 1).ok_or(FEWER)?.draft_logprob = Some(logprob);
    }
    Ok(())
}

fn walk(draft: &Draft<'_>, rows: &[VerifiedRow]) -> Vec<usize> {
    let mut accepted = Vec::new();
    let mut at = None;
    while let Some(row) = rows.get(at.map_or(0, |node: usize| node + 1)) {
        let Some((node, _)) = draft.children(at).find(|&(_, token)| Some(token) == row.sample) else { break };
        accepted.push(node);
        at = Some(node);
    }
    accepted
}

/// Scores a prompt token by the row before it, without temperature or other processing, as vLLM
/// does.
pub(super) fn prompt_row(row: &[f32], id: TokenId, top: usize) -> PromptRow {
    let plain = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }, 0, 0);
    let processed = plain.process(row, &History::default());
    let logit = row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let rank = row.iter().filter(|&&other| other >= logit).count().max(1);
    PromptRow { id, logprob: processed.logprob(id), rank, top: processed.top(top) }
}
