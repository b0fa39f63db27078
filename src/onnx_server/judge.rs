//! Evaluates rows of logits: samples for a draft, scores for a prompt. Pure.

use crate::onnx_server::job::{PromptRow, VerifiedRow};
use crate::openai::Sampling;
use crate::runtime::sampler::{History, Sampler};
use crate::units::TokenId;

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

/// Samples after the context and after every node, each with the noise of its position. Returns the rows and the
/// accepted nodes; `None` if a row or a parent is missing.
pub(super) fn judge<'a>(
    sampler: &Sampler,
    past: &History,
    draft: &Draft<'_>,
    top: usize,
    row: impl Fn(usize) -> Option<&'a [f32]>,
) -> Option<(Vec<VerifiedRow>, Vec<usize>)> {
    let places = draft.tokens.len() + 1;
    let mut rows: Vec<VerifiedRow> = Vec::with_capacity(places);
    let mut pasts: Vec<History> = Vec::with_capacity(places);
    let mut draft_logprobs = vec![None; draft.tokens.len()];
    for place in 0..places {
        let node = place.checked_sub(1);
        let past = match node {
            None => past.clone(),
            Some(node) => {
                let parent = draft.parents.get(node).copied()?;
                let mut past = pasts.get(parent.map_or(0, |parent| parent + 1))?.clone();
                past.push(*draft.tokens.get(node)?);
                past
            }
        };
        let processed = sampler.process(row(place)?, &past);
        let sample = processed.draw();
        let mut asked = vec![sample];
        asked.extend(draft.children(node).map(|(_, token)| token));
        let mut logprobs = processed.logprobs(&asked).into_iter();
        let logprob = logprobs.next()?;
        for ((child, _), logprob) in draft.children(node).zip(logprobs) {
            *draft_logprobs.get_mut(child)? = Some(logprob);
        }
        let draft_logprob = node.and_then(|node| draft_logprobs.get(node).copied().flatten());
        let entropy = (top > 0).then(|| processed.entropy());
        rows.push(VerifiedRow { entropy, sample, logprob, top: processed.top(top), draft_logprob });
        pasts.push(past);
    }
    let accepted = walk(draft, &rows);
    Some((rows, accepted))
}

/// The nodes that the samples accept, from the context on.
fn walk(draft: &Draft<'_>, rows: &[VerifiedRow]) -> Vec<usize> {
    let mut accepted = Vec::new();
    let mut at = None;
    while let Some(row) = rows.get(at.map_or(0, |node: usize| node + 1)) {
        let Some((node, _)) = draft.children(at).find(|&(_, token)| token == row.sample) else { break };
        accepted.push(node);
        at = Some(node);
    }
    accepted
}

/// Scores a prompt token by the row before it, without temperature or other processing, as vLLM does.
pub(super) fn prompt_row(row: &[f32], id: TokenId, top: usize) -> PromptRow {
    let plain = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }, 0, 0);
    let processed = plain.process(row, &History::default());
    let own = row.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let rank = row.iter().filter(|&&logit| logit >= own).count().max(1);
    PromptRow { id, logprob: processed.logprob(id), rank, top: processed.top(top) }
}
