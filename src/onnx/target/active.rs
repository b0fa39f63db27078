//! A job that has a lane: the tokens to compute next, and the use of the logits.

use crate::forward::{Draws, Feed, HeadDraft, Lane, Logits, Rows};
use crate::grammar::{Constraint, TOO_LARGE};
use crate::sampler::History;
use crate::target::job::{Ending, Event, Failure, Generate, Job, PromptRow, Scores, Token, Verified, Verify};
use crate::target::judge::{Draft, judge, prompt_row};
use crate::target::metrics::Metrics;
use crate::target::prefix::SlotId;
use foretell_core::units::TokenId;

/// The head drafts behind one in so many tokens of a plain output, beginning with the first: enough
/// to learn how often it is right, and to leave plain decoding soon, at little cost.
const PROPOSED: usize = 8;
/// The same among the first tokens of an output.
const PROPOSED_FIRST: usize = 3;
/// Number of those first tokens.
const FIRST: usize = 24;

/// A job with a lane.
pub(super) struct Active {
    pub(super) slot: SlotId,
    /// The complete sequence: tokens in the lane and tokens still to be computed.
    pub(super) tokens: Vec<TokenId>,
    /// Number of `tokens` that are in the lane.
    pub(super) fed: usize,
    cached: usize,
    token_context: History,
    /// The grammar of an output that grows; `None` if there is none.
    constraint: Option<Constraint>,
    produced: usize,
    /// Index of the row of the last run that the last token was sampled from.
    last_row: usize,
    scored: Vec<PromptRow>,
    verified: Option<Verified>,
    /// The last token, until it is sent.
    unsent: Option<Token>,
    pub(super) job: Job,
}

/// The tokens that one job adds to a run.
pub(super) struct Piece {
    pub(super) tokens: Vec<TokenId>,
    pub(super) parents: Option<Vec<Option<usize>>>,
    pub(super) rows: Rows,
    /// Number of `tokens` that belong to the sequence; the rest is a draft.
    sequence: usize,
    /// True if its rows verify the tokens after the sequence, even if there are none.
    judged: bool,
    /// True if the sequence is complete with this piece.
    completes: bool,
}

impl Piece {
    /// True if a draft follows the sequence.
    pub(super) fn has_draft(&self) -> bool {
        self.tokens.len() > self.sequence
    }

    pub(super) fn feed(&self, lane: Lane) -> Feed<'_> {
        let draft = self.judged.then(|| self.tokens.len() - self.sequence);
        Feed { lane, tokens: &self.tokens, parents: self.parents.as_deref(), rows: self.rows, draft }
    }
}

/// Outcome of a run for a job.
pub(super) enum Next {
    /// It needs another run.
    Continue,
    /// It is finished; all its tokens stay in the lane.
    Done,
    /// It is finished; `base` tokens and these nodes of the draft stay in the lane.
    Commit { base: usize, path: Vec<usize> },
}

impl Active {
    pub(super) fn new(slot: SlotId, cached: usize, mut job: Job) -> Self {
        let (sampler, sequence, generated, constraint) = match &mut job {
            Job::Generate(job) => (&job.sampler, &job.prompt, job.generated, job.constraint.take()),
            Job::Verify(job) => (&job.sampler, &job.context, job.generated, None),
        };
        let (prompt, output) = sequence.split_at(sequence.len().saturating_sub(generated));
        let token_context = sampler.history(prompt, output);
        let tokens = sequence.clone();
        Self {
            slot,
            tokens,
            fed: cached,
            cached,
            token_context,
            constraint,
            produced: 0,
            last_row: 0,
            scored: Vec::new(),
            verified: None,
            unsent: None,
            job,
        }
    }

    /// True if its grammar has said what may follow its last token, or has failed. Until then it
    /// takes no part in runs.
    pub(super) fn is_ready(&mut self) -> bool {
        self.constraint.as_mut().is_none_or(Constraint::is_known)
    }

    /// Number of tokens to compute before the next sample or verification result.
    pub(super) fn pending(&self) -> usize {
        let draft = match &self.job {
            Job::Generate(_) => 0,
            Job::Verify(job) => job.tokens.len(),
        };
        self.tokens.len().saturating_sub(self.fed) + draft
    }

    /// The next piece, with at most `most` tokens of the sequence.
    pub(super) fn piece(&self, most: usize) -> Piece {
        let rest = self.tokens.get(self.fed..).unwrap_or_default();
        let sequence = rest.len().min(most);
        let completes = sequence == rest.len();
        let mut tokens = rest.iter().take(sequence).copied().collect::<Vec<_>>();
        let (rows, parents) = match &self.job {
            Job::Generate(job) => (self.rows_wanted(job, completes), None),
            Job::Verify(job) if completes => {
                tokens.extend_from_slice(&job.tokens);
                (Rows::From(sequence.saturating_sub(1)), job.parents_after(sequence))
            }
            Job::Verify(_) => (Rows::None, None),
        };
        let judged = completes && matches!(self.job, Job::Verify(_));
        Piece { tokens, parents, rows, sequence, judged, completes }
    }

    fn rows_wanted(&self, job: &Generate, completes: bool) -> Rows {
        if job.prompt_logprobs.is_some() && self.produced == 0 {
            Rows::From(0)
        } else if completes {
            Rows::Last
        } else {
            Rows::None
        }
    }

    /// Uses the logits of a run in which `piece` was the feed number `feed`.
    pub(super) fn take(&mut self, piece: &Piece, logits: &Logits, feed: usize) -> Result<Next, Failure> {
        let before = self.fed;
        self.fed += piece.sequence;
        if let Job::Verify(_) = self.job {
            return if piece.completes { self.judge(logits, feed) } else { Ok(Next::Continue) };
        }
        let mut last = 0;
        if let Rows::From(skipped) = piece.rows {
            last = piece.sequence.saturating_sub(skipped + 1);
            self.score_prompt(logits, feed, before + skipped, last + usize::from(!piece.completes))?;
        }
        self.last_row = last;
        if piece.completes { self.grow(logits.row(feed, last)) } else { Ok(Next::Continue) }
    }

    /// Scores `count` prompt tokens, starting with the one after index `at`.
    fn score_prompt(&mut self, logits: &Logits, feed: usize, at: usize, count: usize) -> Result<(), Failure> {
        let Job::Generate(job) = &self.job else { return Ok(()) };
        let Some(top) = job.prompt_logprobs else { return Ok(()) };
        for index in 0..count {
            let (Some(&id), Some(row)) = (self.tokens.get(at + index + 1), logits.row(feed, index)) else {
                return Err("the model gave fewer rows than requested".into());
            };
            self.scored.push(prompt_row(row, id, top));
        }
        Ok(())
    }

    /// Samples the next token, and returns whether the output continues.
    fn grow(&mut self, row: Option<&[f32]>) -> Result<Next, Failure> {
        let Job::Generate(job) = &self.job else { return Ok(Next::Done) };
        let row = row.ok_or("the model gave no row to sample from")?;
        if self.produced == 0 {
            let rows = std::mem::take(&mut self.scored);
            let _ = job.events.send(Event::Prompt { cached: self.cached, rows });
        }
        if job.limits.max_tokens == 0 {
            return Ok(Next::Done);
        }
        if let Some(constraint) = &mut self.constraint {
            self.token_context.bind(&constraint.take().map_err(Failure::Grammar)?);
        }
        let processed = job.sampler.process(row, &self.token_context);
        let id = processed.draw();
        let scores =
            job.logprobs.map(|top| Scores { logprob: processed.logprob(id), top: processed.top(top) });
        if !self.token_context.allows(id) {
            return Err(Failure::Grammar(TOO_LARGE.to_owned()));
        }
        self.produced += 1;
        let ending = ending(job, id, self.produced);
        self.token_context.push(id);
        if let Some(constraint) = &mut self.constraint
            && ending.is_none()
        {
            constraint.push(id);
        }
        self.tokens.push(id);
        self.unsent = Some(Token { id, scores, ending, proposal: None });
        Ok(if ending.is_none() { Next::Continue } else { Next::Done })
    }

    /// The row and the token that the head is to draft behind after a run, and how the tokens there
    /// will be drawn; `None` if no draft is requested.
    pub(super) fn opening(&self) -> Option<(usize, TokenId, Option<Draws>)> {
        match &self.job {
            Job::Generate(job) => {
                let token = self.unsent.as_ref().filter(|token| token.ending.is_none())?;
                let every = if self.produced <= FIRST { PROPOSED_FIRST } else { PROPOSED };
                let due = job.propose > 0 && self.produced % every == 1;
                let draws = job.sampler.draws(self.token_context.position());
                due.then_some((self.last_row, token.id, draws))
            }
            Job::Verify(job) => {
                let verified = self.verified.as_ref()?;
                if job.propose == 0 {
                    return None;
                }
                let row = verified.accepted.last().map_or(0, |node| node + 1);
                let behind = self.token_context.position() + verified.accepted.len() as u64 + 1;
                Some((row, verified.rows.get(row)?.sample?, job.sampler.draws(behind)))
            }
        }
    }

    /// Takes the head's draft behind [`Active::opening`].
    pub(super) fn propose(&mut self, mut draft: HeadDraft) {
        draft.truncate(match &self.job {
            Job::Generate(job) => job.propose,
            Job::Verify(job) => job.propose,
        });
        if let Some(token) = &mut self.unsent {
            token.proposal = Some(draft);
        } else if let Some(verified) = &mut self.verified {
            verified.proposal = Some(draft);
        }
    }

    /// Reports the last token.
    pub(super) fn report(&mut self) {
        if let (Job::Generate(job), Some(token)) = (&self.job, self.unsent.take()) {
            // If the receiver is gone, the scheduler drops this job at its next turn.
            let _ = job.events.send(Event::Token(token));
        }
    }

    /// Samples at every position of a draft; the answer is sent once the job is finished.
    fn judge(&mut self, logits: &Logits, feed: usize) -> Result<Next, Failure> {
        let Job::Verify(job) = &self.job else { return Ok(Next::Done) };
        let row = |position| logits.row(feed, position);
        let allowed = job.allowed.as_deref();
        let draft = Draft { tokens: &job.tokens, parents: &job.parents };
        let (rows, accepted) = judge(&job.sampler, &self.token_context, &draft, allowed, job.listed, row)?;
        self.verified =
            Some(Verified { rows, accepted: accepted.clone(), cached: self.cached, proposal: None });
        Ok(Next::Commit { base: self.tokens.len(), path: accepted })
    }

    /// Counts its output, however it ended.
    pub(super) fn count(&self, metrics: &Metrics) {
        metrics.generated_tokens.inc_by(self.produced as u64);
    }

    /// Updates the metrics and sends the answer of a verify job.
    pub(super) fn finish(self, metrics: &Metrics) {
        self.count(metrics);
        if let (Job::Verify(job), Some(verified)) = (self.job, self.verified) {
            metrics.verify_drafted.inc_by(job.tokens.len() as u64);
            metrics.verify_accepted.inc_by(verified.accepted.len() as u64);
            let _ = job.reply.send(Ok(verified));
        }
    }
}

impl Verify {
    /// Parents as the model expects them, with `sequence` tokens before the draft; `None` if the
    /// draft is a chain.
    fn parents_after(&self, sequence: usize) -> Option<Vec<Option<usize>>> {
        let chain = self.parents.iter().enumerate().all(|(node, parent)| *parent == node.checked_sub(1));
        if chain {
            return None;
        }
        let before = (0..sequence).map(|index: usize| index.checked_sub(1));
        let draft = self.parents.iter().map(|parent| match parent {
            Some(parent) => Some(sequence + parent),
            None => sequence.checked_sub(1),
        });
        Some(before.chain(draft).collect())
    }
}

fn ending(job: &Generate, id: TokenId, produced: usize) -> Option<Ending> {
    if job.limits.eos.contains(&id) {
        Some(Ending::Eos)
    } else if job.limits.stop_token_ids.contains(&id) {
        Some(Ending::StopToken(id))
    } else {
        (produced >= job.limits.max_tokens).then_some(Ending::Length)
    }
}
