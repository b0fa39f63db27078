//! `min_tokens` in calls that send output as prompt.
//!
//! The engine counts tokens from the end of each prompt, and until there are `min_tokens` of them
//! it samples no token that ends the text (0.32, `v1/sample/logits_processor/builtin.py` and
//! `v1/worker/gpu/sample/logit_bias.py`; `SamplingParams` refuses more than `max_tokens`). So a
//! call states how many of its tokens are before the client's minimum, and all prompts of one call
//! have to agree on that.

use crate::Round;
use foretell_wire::openai::Sampling;

/// The sampling of a call for at most `max_tokens` tokens that follow `output` tokens of output.
pub(super) fn behind(sampling: &Sampling, output: usize, max_tokens: u32) -> Sampling {
    let done = u32::try_from(output).unwrap_or(u32::MAX);
    let min_tokens = sampling.min_tokens.saturating_sub(done).min(max_tokens);
    Sampling { min_tokens, ..sampling.clone() }
}

/// Number of the draft's first nodes that one call for a token after each can verify: all, or those
/// up to the client's minimum.
pub(super) fn nodes(round: &Round<'_>) -> usize {
    let (all, output) = (round.draft.len(), round.context.output.len());
    let before = |depth: usize| output + depth < round.sampling.min_tokens as usize;
    if before(0) { (0..all).take_while(|&node| before(round.draft.path(node).len())).count() } else { all }
}
