//! The speculation controller of a session: feeds the drafters, scores drafts, chooses the next
//! step.
//!
//! Its inputs are the context and the time, its output is a step. It emits nothing.

mod choose;
mod model;
mod slot;
mod streak;

use std::sync::Arc;
use std::time::Duration;

use self::slot::{ModelDrafter, SessionDrafter, counted_for};
use self::streak::Streak;
use super::Balance;
use super::accept::Accepted;
use super::shadow::VirtualRound;
use super::start::{Permission, Resources, Rules};
use crate::control::{
    Class, Control, Measurements, Quote, Round, RoundCosts, Shared, TemperatureBucket, Tuning, Way,
};
use crate::draft::{Budget, Context, DrafterId, Lookup, Origin, Tree, merge};
use crate::units::{SplitMix64, Tick, TokenId};
use crate::words::{PlainReason, Proposal, Put, VerifyMethod};

#[derive(Clone, Debug, PartialEq)]
pub enum NextStep {
    /// Decode plainly, for this reason.
    Plain(PlainReason),
    /// Verify this draft.
    Verify(Tree),
    /// Request this many tokens from the model drafter first.
    Draft(usize),
}

/// The state of the session when a step is chosen.
#[derive(Clone, Copy, Debug)]
pub struct SessionState {
    /// True if it speculates already.
    pub speculating: bool,
    /// Maximum nodes and depth that limit and context leave.
    pub room: Budget,
    /// Maximum number of tokens still to come; `None` without a limit.
    pub rest: Option<usize>,
    /// Output tokens so far.
    pub done: usize,
}

/// The inputs of a lossy rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drift {
    /// Tokens that are expected to follow if a node is accepted, by node.
    pub worth: Vec<f64>,
    /// Tokens expected of the complete output.
    pub expected: f64,
    /// Tokens that a unit of drift has to bring.
    pub price: f64,
}

/// A verify request that was answered.
#[derive(Clone, Copy, Debug)]
pub struct VerifyTiming {
    /// Method and number of nodes.
    pub put: Put,
    /// Nodes of the draft, of which the dialect may send fewer.
    pub planned: usize,
    /// Seconds since plain decoding ended or since the last verify request was answered.
    pub seconds: f64,
    /// Tokens of our other verify requests in flight.
    pub concurrent: usize,
    /// Tokens that the model drafter computed for it, before it began.
    pub modelled: usize,
    /// True if it decided at least one token.
    pub decided: bool,
}

/// Minimum first tokens of a source that must have been observed (decayed count) before it is
/// trusted.
const EVIDENCE: f64 = 4.0;
/// Prompt tokens fed to the drafters at one token event, so that a long prompt delays no token by
/// much.
const PROMPT_CHUNK_TOKENS: usize = 1024;
/// After `n` consecutive failures, `FAULT_BACKOFF_TOKENS << n` tokens are decoded plainly.
const FAULT_BACKOFF_TOKENS: usize = 16;
/// An engine is busy if a verify request is expected to take this share of its timeout.
const BUSY: f64 = 0.125;
/// Tokens for which drafts are as short as one that the engine had no room for: its slots are
/// divided among its requests, and the limit by `min_tokens` moves with the output.
const CUT_FOR: usize = 64;
/// Decay of the rounds of this session, in rounds.
const MEMORY: f64 = 24.0;
/// Tokens of a class that weigh as much as its rounds do in combination with a session's.
const CLASS_TOKENS: f64 = 16.0;

/// The speculation controller of one session.
pub struct SpeculationController {
    control: Arc<Control>,
    bucket: TemperatureBucket,
    rules: Arc<Rules>,
    /// The drafters, in the policy's order.
    slots: Vec<SessionDrafter>,
    /// The text that the lookups search.
    context: Context,
    /// The merged draft of the lookups that plain tokens are compared with; `None` between two
    /// rounds.
    virtual_round: Option<VirtualRound>,
    /// Plain tokens that no counted virtual round covers yet; `None` before the first virtual
    /// round, and while it speculates.
    uncounted: Option<usize>,
    /// The model that drafts for this session, if one does.
    model: DrafterId,
    /// Number of token ids.
    vocabulary: TokenId,
    prompt: Option<Vec<TokenId>>,
    /// Tokens of prompt and output that the lookups have been fed.
    fed: usize,
    /// Longest round, seconds: the maximum pause of the client's stream.
    max_gap: f64,
    tuning: Tuning,
    rng: SplitMix64,
    /// `None` while it decodes plainly.
    streak: Option<Streak>,
    /// Time won and lost by speculation so far.
    balance: Balance,
    /// Consecutive failed verify requests, at most 5.
    faults: u32,
    /// No speculation before this many output tokens.
    not_before: usize,
    /// Nodes that the engine had room for in a fan-out, and the context size up to which drafts are
    /// no longer than that.
    cut: Option<(usize, usize)>,
}

impl SpeculationController {
    /// A controller with the measurements of `control` and none of this request.
    pub fn new(
        control: Arc<Control>,
        rules: Arc<Rules>,
        resources: &Resources,
        temperature: f64,
        seed: u64,
    ) -> Self {
        let drafts = !matches!(rules.permission, Permission::Plain(_));
        Self {
            control,
            bucket: rules.bucket(temperature),
            slots: if drafts { SessionDrafter::all(&rules, resources) } else { Vec::new() },
            context: Context::new(if drafts { &*rules.lookups } else { &[] }, &resources.shared),
            virtual_round: None,
            uncounted: None,
            model: DrafterId::model(resources.model.unwrap_or_default()),
            vocabulary: resources.vocabulary,
            prompt: None,
            fed: 0,
            max_gap: rules.max_gap.map_or(f64::MAX, |most| most.as_secs_f64()),
            tuning: Tuning::default(),
            rng: SplitMix64::new(seed),
            streak: None,
            balance: Balance::default(),
            faults: 0,
            not_before: 0,
            cut: None,
            rules,
        }
    }

    /// Maximum nodes that the engine has room for, as far as that is known.
    fn room(&self) -> usize {
        self.cut.filter(|&(_, until)| self.fed < until).map_or(usize::MAX, |(nodes, _)| nodes)
    }

    /// The lookups, which answer at once.
    fn lookups(&self) -> impl Iterator<Item = &dyn Lookup> {
        self.slots.iter().filter_map(SessionDrafter::lookup)
    }

    /// The slot of the model drafter, if there is one.
    fn model(&self) -> Option<(&SessionDrafter, &ModelDrafter)> {
        self.slots.iter().find_map(|slot| Some((slot, slot.model_drafter()?)))
    }

    fn model_mut(&mut self) -> Option<&mut SessionDrafter> {
        self.slots.iter_mut().find(|slot| slot.model_drafter().is_some())
    }

    fn model_drafter_mut(&mut self) -> Option<&mut ModelDrafter> {
        self.slots.iter_mut().find_map(SessionDrafter::model_drafter_mut)
    }

    /// The measurements, shared by all sessions of the engine start.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Method, fallback and context size of the next round.
    pub(super) fn way(&self) -> Way {
        Way { fallback: self.rules.methods.get(1).copied(), ..self.way_of(0) }
    }

    /// The method at this index of the list, without a fallback.
    fn way_of(&self, position: usize) -> Way {
        Way::by(self.rules.methods.get(position).copied().unwrap_or(VerifyMethod::FanOut), self.fed)
    }

    /// Sets the prompt. It is fed to the drafters in chunks, at the token events that follow.
    pub fn know_prompt(&mut self, prompt: Vec<TokenId>) {
        self.prompt = Some(prompt);
    }

    /// Ids of the prompt, if known.
    pub fn prompt(&self) -> Option<&[TokenId]> {
        self.prompt.as_deref()
    }

    /// Takes plain tokens: advances virtual rounds and feeds the drafters. `from` is the index of
    /// the first new token.
    pub fn note_plain(&mut self, output: &[TokenId], from: usize) {
        if self.prompt.is_none() || self.rules.gamma_fixed.is_some() {
            return;
        }
        self.feed(output, from, PROMPT_CHUNK_TOKENS);
        for (index, &token) in output.iter().enumerate().skip(from) {
            self.follow(token);
            self.feed(output, index + 1, PROMPT_CHUNK_TOKENS);
            if self.caught_up(index + 1) {
                self.begin_virtual();
            }
        }
    }

    /// Advances the virtual round by a plain token.
    fn follow(&mut self, token: TokenId) {
        if self.virtual_round.as_ref().is_none_or(|round| !round.all_informed) {
            self.uncounted = self.uncounted.map(|tokens| tokens + 1);
        }
        let Some(mut round) = self.virtual_round.take() else { return };
        let (draft, parent, depth) = round.position();
        score(&self.control, &mut self.tuning, self.bucket, draft, parent, depth, token);
        match round.follow(token) {
            None => self.virtual_round = Some(round),
            Some(tokens) if round.all_informed => {
                let before = self.uncounted.replace(0).unwrap_or(0);
                let weight = 1.0 + before as f64 / tokens as f64;
                self.count(Round { weight, ..Round::new(round.planned, 0, tokens) });
            }
            Some(_) => {}
        }
    }

    /// Counts a round, real or virtual, for its drafter and for its class.
    fn count(&mut self, round: Round) {
        let slot = counted_for(&self.slots, round.modelled).and_then(|position| self.slots.get_mut(position));
        let Some(slot) = slot else { return };
        slot.rounds.push(round);
        let class = Class::new(slot.id, self.bucket, self.rules.kind);
        self.control.with(|learnt| learnt.classes.push(class, round));
    }

    /// Starts a virtual round of the lookups, if there is none. A round for which every drafter is
    /// informed replaces one for which some were not (a head proposes at every round, but only at
    /// every eighth plain token), and then also counts the tokens since the last such round.
    fn begin_virtual(&mut self) {
        let all_informed = self.lookups().all(Lookup::is_informed);
        let goes_on = self.virtual_round.as_ref().is_some_and(|round| round.all_informed || !all_informed);
        if goes_on || !self.lookups().any(Lookup::is_informed) {
            return;
        }
        let budget = Budget { nodes: self.rules.gamma_max, depth: self.rules.gamma_max };
        let drafts = self.looked_up(budget);
        let (mut draft, quote) = self.control.with(|learnt| {
            let round_costs = self.round_costs(learnt);
            let counted = counted_for(&self.slots, 0).and_then(|position| self.slots.get(position));
            let rate = self.rate(counted, &round_costs, learnt);
            self.cut(&drafts, budget, rate, &round_costs, learnt)
        });
        draft.truncate(quote.nodes.max(4));
        self.uncounted.get_or_insert(0);
        self.virtual_round = Some(VirtualRound::new(draft, quote.nodes, all_informed));
    }

    /// The drafts merged within `budget`, and their best cut where a second is worth `rate` tokens.
    fn cut(
        &self,
        drafts: &[Tree],
        budget: Budget,
        rate: f64,
        round_costs: &RoundCosts,
        learnt: &Measurements,
    ) -> (Tree, Quote) {
        let merged = self.merged(drafts, budget, learnt);
        let quote = round_costs.cut(&merged.survival, rate, false);
        (merged.tree, quote)
    }

    fn merged(&self, drafts: &[Tree], budget: Budget, learnt: &Measurements) -> merge::Merged {
        merge::merge(drafts, budget, self.way().method.shape(), |vote, company, depth| {
            let expected = learnt.survival.conditional(self.bucket, vote, company, depth);
            self.tuning.adjust(vote.drafter, expected)
        })
    }

    /// Feeds the drafters with the context up to output token `until`, at most `most` tokens.
    fn feed(&mut self, output: &[TokenId], until: usize, most: usize) {
        let Some(prompt) = &self.prompt else { return };
        // Without lookups there is nothing to feed.
        let most = if self.lookups().next().is_some() { most } else { usize::MAX };
        let end = (prompt.len() + until).min(self.fed.saturating_add(most));
        let slices = [
            (Origin::Prompt, prompt.get(self.fed.min(prompt.len())..end.min(prompt.len()))),
            (
                Origin::Output,
                output.get(self.fed.saturating_sub(prompt.len())..end.saturating_sub(prompt.len())),
            ),
        ];
        for (origin, tokens) in slices {
            let Some(tokens) = tokens.filter(|tokens| !tokens.is_empty()) else { continue };
            let slots = &mut self.slots;
            self.context.read(tokens, origin, |seen| {
                slots
                    .iter_mut()
                    .filter_map(SessionDrafter::lookup_mut)
                    .for_each(|lookup| lookup.observe(seen));
            });
            self.context.tidy();
        }
        self.fed = self.fed.max(end);
    }

    /// Passes a proposal of the backend to the lookups: its tokens follow `output` tokens of the
    /// output and [`Proposal::behind`].
    pub fn observe_proposal(&mut self, proposal: &Proposal, output: usize) {
        let Some(prompt) = self.prompt.as_ref().map(Vec::len) else { return };
        // A verify request with a token that does not exist would fail.
        let known = |&(token, _): &(TokenId, f32)| token < self.vocabulary;
        if !proposal.steps.iter().flatten().all(known) {
            return;
        }
        for lookup in self.slots.iter_mut().filter_map(SessionDrafter::lookup_mut) {
            lookup.observe_proposal(proposal, prompt + output);
        }
    }

    /// Bytes allocated by the lookups for this session.
    pub fn lookup_bytes(&self) -> usize {
        self.context.bytes() + self.lookups().map(Lookup::bytes).sum::<usize>()
    }

    fn caught_up(&self, done: usize) -> bool {
        self.prompt.as_ref().is_some_and(|prompt| self.fed == prompt.len() + done)
    }

    /// Takes a real round that ended at `now`: its draft, its accepted tokens, and the number of
    /// tokens that the model drafter computed for it.
    pub fn round(&mut self, draft: &Tree, accepted: &Accepted, modelled: usize, now: Tick) {
        let mut position = None;
        for (depth, &token) in accepted.tokens.iter().enumerate() {
            score(&self.control, &mut self.tuning, self.bucket, draft, position, depth, token);
            position = draft.child(position, token);
        }
        let tokens = accepted.tokens.len();
        self.uncounted = None;
        self.count(Round::new(draft.len(), modelled, tokens));
        self.faults = 0;
        let lost = self.control.with(|learnt| {
            if self.is_chosen() {
                learnt.rejected(self.way(), (draft.len() + 1).saturating_sub(tokens));
            }
            learnt.lost_by_others(self.way()) * draft.len() as f64
        });
        self.booked(tokens, draft.len(), lost, now);
        if let Some(streak) = &mut self.streak {
            streak.ended_round(draft.is_empty());
        }
    }

    /// Books the time since the last round ended, in which `tokens` came by a draft of `nodes`
    /// nodes and requests of others lost `lost` seconds, to the regret budget of the replica. While
    /// the engine read a prompt nothing is lost: plain decoding would have waited, too.
    fn booked(&mut self, tokens: usize, nodes: usize, lost: f64, now: Tick) {
        let (way, chosen) = (self.way(), self.is_chosen());
        let Some(streak) = &mut self.streak else { return };
        let seconds = now.seconds_since(std::mem::replace(&mut streak.since, now));
        let (won, saved) = self.control.with(|learnt| {
            let expected = learnt.costs.verify(way, nodes, learnt.shares());
            let seconds = learnt.without_reading(seconds, expected, now);
            let won = learnt.note_round(tokens, seconds, lost, chosen);
            (won, learnt.plain_seconds(won))
        });
        streak.lost = (streak.lost - won).max(0.0);
        self.balance.book(saved);
    }

    /// Takes the time of the first tokens of a later plain request, seconds: after a round, or
    /// after another one.
    pub fn continued(&mut self, seconds: f64, tokens: usize, after_rounds: bool, now: Tick) {
        self.balance.book(self.control.with(|learnt| {
            let noted = if after_rounds { Measurements::plain_resumed } else { Measurements::continued };
            let won = noted(learnt, seconds, tokens, self.is_chosen(), now);
            learnt.plain_seconds(won)
        }));
    }

    /// True if the controller chooses the drafts of this session, and not the operator's
    /// `gamma.fixed`.
    fn is_chosen(&self) -> bool {
        self.rules.gamma_fixed.is_none()
    }

    /// The inputs of a lossy rule: settled before any sample of the round is read.
    pub fn drift(&self, draft: &Tree, done: usize, rest: Option<usize>) -> Drift {
        self.control.with(|learnt| {
            let mut worth: Vec<f64> = vec![1.0; draft.len()];
            for (index, node) in draft.nodes().iter().enumerate().rev() {
                let depth = draft.path(index).len() - 1;
                let known = node.votes.iter().map(|vote| {
                    let expected = learnt.survival.conditional(self.bucket, vote, node.company, depth);
                    self.tuning.adjust(vote.drafter, expected)
                });
                let more = known.fold(0.0, f64::max) * worth.get(index).copied().unwrap_or(1.0);
                if let Some(above) = node.parent.and_then(|parent| worth.get_mut(parent)) {
                    *above += more;
                }
            }
            let most = rest.map_or(f64::MAX, |rest| rest as f64);
            let expected = done as f64 + learnt.expected_remainder(done).min(most);
            Drift { worth, expected, price: learnt.drift.of(self.rules.kind) }
        })
    }

    /// Notes that `charged` was charged for so many tokens of an output of `expected` tokens.
    pub fn drifted(&self, charged: f64, tokens: usize, expected: f64) {
        let each = self.rules.accept.allowed(expected);
        self.control.with(|learnt| learnt.drift.spent(self.rules.kind, charged, tokens, each));
    }

    /// Time won and lost by speculation so far.
    pub fn balance(&self) -> Balance {
        self.balance
    }

    /// Takes the cost of a verify request: by the method and with the nodes that were sent.
    pub fn called(&mut self, timing: &VerifyTiming, now: Tick) {
        let VerifyTiming { put, planned, seconds, concurrent, modelled, decided } = *timing;
        let (way, nodes) = (Way::by(put.method, self.fed), put.nodes);
        if put.method == VerifyMethod::FanOut && nodes < planned {
            self.cut = Some((nodes.max(1), self.fed + CUT_FOR));
        }
        let streak = self.streak.as_mut();
        let first = streak.is_some_and(|streak| !std::mem::replace(&mut streak.switched, true));
        self.control.with(|learnt| {
            learnt.costs.decided(put.method, decided);
            let busy = &learnt.concurrency;
            let reading = busy.read_within(seconds, now) || busy.continued_within(seconds, now);
            let waits = f64::from(u8::from(learnt.concurrency.has_plain_neighbours()));
            let shared = Shared { concurrent: concurrent as f64, waits, modelled, reading };
            if first {
                learnt.costs.entered(way, nodes, shared, seconds);
            } else {
                learnt.costs.verified(way, nodes, shared, seconds);
            }
        });
    }

    /// Takes the cost of a draft of `tokens` tokens by the model drafter, requested at `since`;
    /// returns the start of the round for its timing. The first draft after plain decoding waits
    /// for the rest of the cancelled request: its time beyond the expected one is the cost of
    /// switching, and so belongs to the round.
    pub fn drafted(&mut self, tokens: usize, since: Tick, now: Tick) -> Tick {
        let first = self.streak.is_some_and(|streak| streak.rounds == 0);
        let seconds = now.seconds_since(since);
        self.control.with(|learnt| {
            if first {
                let expected = learnt.costs.draft_token(self.model.number) * tokens as f64;
                return since.after(Duration::from_secs_f64(expected.min(seconds)));
            }
            learnt.costs.drafted(self.model.number, tokens, seconds);
            now
        })
    }

    /// Takes a draft that did not come in time: it costs at least the time of the wait. Returns the
    /// start of the round for its timing, and the number of the drafter's tokens that the wait was
    /// worth.
    pub fn waited(&mut self, tokens: usize, since: Tick, now: Tick) -> (Tick, usize) {
        let began = self.drafted(tokens, since, now);
        let token = self.control.with(|learnt| learnt.costs.draft_token(self.model.number));
        let worth = (now.seconds_since(since) / token.max(1e-9)).min(1e6) as usize;
        (began, worth.max(1))
    }

    /// True if the engine computes so many concurrent requests that verify requests usually take an
    /// eighth of their timeout.
    pub fn is_busy(&self, timeout: Duration) -> bool {
        let most = BUSY * timeout.as_secs_f64();
        self.control.with(|learnt| {
            let long = learnt.costs.usual_verify().is_some_and(|usual| usual >= most);
            long && learnt.concurrency.requests() > 1
        })
    }

    /// The model drafter has answered, so it has read the prompt.
    pub fn read(&mut self) {
        if let Some(drafter) = self.model_drafter_mut() {
            drafter.warm = true;
        }
    }

    /// True if the model drafter has read the prompt.
    pub fn has_read(&self) -> bool {
        self.model().is_some_and(|(_, drafter)| drafter.warm)
    }

    /// Starts a streak of rounds.
    pub fn enter(&mut self, now: Tick) {
        self.virtual_round = None;
        self.uncounted = None;
        self.streak = Some(Streak::new(now));
    }

    /// Ends speculation. Time waited in vain since the last round is lost.
    pub fn leave(&mut self, done: usize, now: Tick) {
        self.booked(0, 0, 0.0, now);
        if self.streak.is_some_and(Streak::has_lost) {
            self.not_before = self.not_before.max(done + FAULT_BACKOFF_TOKENS);
        }
        self.streak = None;
    }

    /// A verify request failed: no speculation for a while, longer with every consecutive failure.
    pub fn verify_failed(&mut self, done: usize, now: Tick) {
        self.booked(0, 0, 0.0, now);
        self.streak = None;
        self.faults = (self.faults + 1).min(5);
        self.not_before = done + (FAULT_BACKOFF_TOKENS << self.faults);
    }

    /// A verify request was late because the engine is busy: only its time is lost.
    pub fn verify_late(&mut self, now: Tick) {
        self.booked(0, 0, 0.0, now);
        self.streak = None;
    }

    /// The number of output tokens before which the session must not speculate.
    pub fn not_before(&self) -> usize {
        self.not_before
    }

    /// The model drafter failed: it is not queried for a while, longer with every failure.
    pub fn model_failed(&mut self, done: usize) {
        if let Some(slot) = self.model_mut() {
            slot.health.failed(done);
        }
    }
}

/// Notes for every child of `position`, and for every drafter that proposed it, if it is the
/// `token` that came.
fn score(
    control: &Control,
    tuning: &mut Tuning,
    bucket: TemperatureBucket,
    draft: &Tree,
    position: Option<usize>,
    depth: usize,
    token: TokenId,
) {
    control.with(|learnt| {
        for node in draft.nodes().iter().filter(|node| node.parent == position) {
            let (accepted, company) = (node.token == token, node.company);
            for vote in node.votes.by_source() {
                learnt.survival.learn(tuning, bucket, vote, company, depth, accepted);
            }
        }
    });
}
