//! One row of an engine's batch: its text, its lookups, and the drafts that they make.

use std::sync::Arc;

use foretell_core::control::{Survival, TemperatureBucket, Tuning};
use foretell_core::draft::merge::merge;
use foretell_core::draft::{Budget, Context, DrafterId, Lookup, LookupSpec, Merged, Origin, Source, Tree};
use foretell_core::units::TokenId;
use foretell_core::words::{Conditions, Shape};
use foretell_net::http::memory::Reservation;

use crate::chain::{Chain, drafter};
use crate::frame::StepRow;
use crate::joins::{Joined, Round};

/// The lookups of a row, and the tokens that they have read.
pub struct Lookups {
    context: Context,
    drafters: Vec<Box<dyn Lookup>>,
    read: usize,
}

impl Lookups {
    /// Builds the lookups of a request, which have read `text`. `prompt`: its tokens before the
    /// output.
    pub(crate) fn built(joined: &Joined, text: &[TokenId], prompt: usize) -> Self {
        let terms = &joined.terms;
        let build = |spec: &LookupSpec| spec.build(DrafterId::from(spec.source()), &terms.shared);
        let drafters = terms.lookups.iter().filter_map(build).collect();
        let mut this = Self { context: Context::new(&*terms.lookups, &terms.shared), drafters, read: 0 };
        this.read(text, prompt);
        this.tidy();
        this
    }

    fn read(&mut self, text: &[TokenId], prompt: usize) {
        let (known, new) = text.split_at_checked(self.read).unwrap_or((text, &[]));
        let (before, after) = new.split_at(prompt.saturating_sub(known.len()).min(new.len()));
        for (tokens, origin) in [(before, Origin::Prompt), (after, Origin::Output)] {
            if !tokens.is_empty() {
                let drafters = &mut self.drafters;
                self.context.read(tokens, origin, |seen| {
                    for drafter in drafters {
                        drafter.observe(seen);
                    }
                });
            }
        }
        self.read = text.len();
    }

    /// Does what reading has put off; true if that was something.
    fn tidy(&mut self) -> bool {
        self.context.tidy()
    }

    fn drafts(&self, budget: Budget) -> Vec<Tree> {
        self.drafters.iter().map(|drafter| drafter.draft(self.context.text(), budget)).collect()
    }

    fn bytes(&self) -> usize {
        self.context.bytes() + self.drafters.iter().map(|drafter| drafter.bytes()).sum::<usize>()
    }
}

/// One row.
pub(crate) struct Row {
    pub(crate) joined: Arc<Joined>,
    temperature: f64,
    text: Vec<TokenId>,
    prompt: usize,
    /// `None` until its text has been indexed.
    lookups: Option<Lookups>,
    tuning: Tuning,
    /// A draft that is being compared with what is emitted.
    chain: Option<Chain>,
    /// Drafter of the draft that was sent for the present step.
    sent: Option<Source>,
    memory: Reservation,
}

impl Row {
    pub(crate) fn new(joined: Arc<Joined>, prompt: usize, temperature: f32, memory: Reservation) -> Self {
        Self {
            joined,
            temperature: f64::from(temperature),
            text: Vec::new(),
            prompt,
            lookups: None,
            tuning: Tuning::default(),
            chain: None,
            sent: None,
            memory,
        }
    }

    /// Tokens of its text so far.
    pub(crate) fn text(&self) -> &[TokenId] {
        &self.text
    }

    pub(crate) fn prompt(&self) -> usize {
        self.prompt
    }

    /// Adds text from this position on; false if it does not continue the text.
    pub(crate) fn extend(&mut self, from: usize, tokens: &[TokenId]) -> bool {
        let continues = from == self.text.len();
        // What became of the last draft is not known.
        (self.chain, self.sent) = (None, None);
        if continues {
            self.text.extend_from_slice(tokens);
        }
        continues
    }

    /// Takes the lookups that have been built from its text.
    pub(crate) fn indexed(&mut self, lookups: Lookups) {
        self.memory.follow(lookups.bytes() as u64);
        self.lookups = Some(lookups);
    }

    /// Takes what a step emitted at this load, and learns from it; the round, if draft tokens were
    /// verified.
    pub(crate) fn stepped(&mut self, step: &StepRow, load: f64, all: &mut Survival) -> Option<Round> {
        self.text.extend_from_slice(&step.tokens);
        let tuning = &mut self.tuning;
        self.chain.take_if(|chain| !chain.follow(&step.tokens, all, tuning));
        let drafter = self.sent.take()?;
        let drafted = u32::from(step.scheduled);
        let accepted = u32::from(step.sampled.saturating_sub(1)).min(drafted);
        let conditions = Conditions { temperature: self.temperature, load, tolerance: 0.0 };
        (drafted > 0).then_some(Round { drafter, drafted, accepted, conditions })
    }

    /// The likeliest chain of at most `room` tokens after its text, with survival probabilities;
    /// empty without a lookup that knows one.
    pub(crate) fn draft(&mut self, room: usize, all: &Survival) -> Merged {
        let Some(lookups) = &mut self.lookups else { return Merged::default() };
        lookups.read(&self.text, self.prompt);
        let budget = Budget { nodes: room, depth: room };
        let drafts = lookups.drafts(budget);
        let (tuning, temperature) = (&self.tuning, TemperatureBucket::of(self.temperature));
        let merged = merge(&drafts, budget, Shape::Chain, |vote, company, position| {
            tuning.adjust(vote.drafter, all.conditional(temperature, vote, company, position))
        });
        if self.chain.is_none() {
            self.chain = Chain::of(&merged, temperature);
        }
        merged
    }

    /// Sorts its text, if that is due; true if it was.
    pub(crate) fn tidy(&mut self) -> bool {
        self.lookups.as_mut().is_some_and(Lookups::tidy)
    }

    /// Notes that this draft is sent.
    pub(crate) fn sends(&mut self, draft: &Merged) {
        self.sent = drafter(draft);
    }

    /// Hands its text over to whoever learns from it.
    pub(crate) fn ended(self) {
        let (prompt, output) = self.text.split_at(self.prompt.min(self.text.len()));
        if !output.is_empty() {
            (self.joined.terms.learn)(prompt, output);
        }
    }
}
