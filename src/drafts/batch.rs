//! The rows of one engine, and the drafts for each of its steps.
//!
//! PURE: time comes with each step. A step is read in three parts: what the last one cost and
//! emitted is noted, every row that may be drafted for makes a draft, and one allocation over all
//! of them decides how much of each is sent.

use std::collections::HashMap;
use std::sync::Arc;

use foretell_control::acceptance::Acceptance;
use foretell_control::budget::Budget;
use foretell_control::choose::{Candidate, allocate};
use foretell_control::cost::{StepCost, StepCosts};
use foretell_core::draft::Merged;
use foretell_core::units::TokenId;
use foretell_net::http::memory::{Memory, Reservation};

use crate::frame::{Drafts, Hello, Step, StepRow};
use crate::joins::Joined;
pub use crate::row::Lookups;
use crate::row::Row;

/// Maximum rows of a connection.
const ROWS: usize = 4_096;
/// Maximum tokens of a row, and of all rows.
const ROW_TOKENS: usize = 4 << 20;
const ALL_TOKENS: usize = 64 << 20;
/// Rows that are tidied after a step: each may take a millisecond, and the next step may come soon.
const TIDIED: usize = 2;
/// Memory of a row, bytes: in all, and for each token of its prompt (text and two indexes).
const ROW_BYTES: u64 = 8 << 10;
const TOKEN_BYTES: u64 = 32;
/// Expected gain without which nothing is drafted.
const LEAST: f64 = 1.01;
/// Steps without a draft after which a draft is tried although its cost is expected to exceed its
/// gain: costs change, and without drafts nothing would show it.
const RETRY: u32 = 256;
/// Tokens of such a trial, and the survival that its first token needs.
const TRIAL: usize = 4;
const TRIAL_SURVIVAL: f64 = 0.3;
/// Steps of a pause: while no row may be drafted for; while the budget is spent.
const SILENT: u16 = 64;
const SPENT: u16 = 16;

/// Sums over the steps of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Steps that were answered.
    pub steps: u64,
    /// Draft tokens that the engine verified, and those that it accepted.
    pub drafted: u64,
    pub accepted: u64,
    /// Seconds of engine steps that drafts saved against plain steps, and that they lost.
    pub saved: f64,
    pub wasted: f64,
    /// Rows at the last step.
    pub rows: usize,
    /// Cost of a step with so many rows.
    pub cost: Option<StepCost>,
}

/// The rows of one engine.
pub struct Batch {
    most: usize,
    context: usize,
    vocabulary: TokenId,
    /// Maximum rows of a step.
    sequences: usize,
    rows: HashMap<u32, Row>,
    tokens: usize,
    costs: StepCosts,
    acceptance: Acceptance,
    budget: Budget,
    /// Steps since a draft was sent.
    quiet: u32,
    totals: Totals,
}

/// A row whose prompt is complete and can be indexed.
pub struct Unindexed {
    joined: Arc<Joined>,
    text: Vec<TokenId>,
    prompt: usize,
}

impl Unindexed {
    /// Its lookups, which have read its text; takes milliseconds.
    pub fn built(self) -> Lookups {
        Lookups::built(&self.joined, &self.text, self.prompt)
    }
}

/// A row that may be drafted for in this step.
struct Asking {
    row: u32,
    room: usize,
    forced: Option<usize>,
    draft: Merged,
}

impl Batch {
    /// No rows yet, of the engine that said hello.
    pub fn new(hello: &Hello) -> Self {
        Self {
            most: usize::from(hello.most),
            context: (hello.context as usize).min(ROW_TOKENS),
            vocabulary: hello.vocabulary,
            sequences: usize::from(hello.rows).max(1),
            rows: HashMap::new(),
            tokens: 0,
            costs: StepCosts::default(),
            acceptance: Acceptance::default(),
            budget: Budget::default(),
            quiet: 0,
            totals: Totals::default(),
        }
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Begins a row. Beyond a limit it gets no drafts.
    pub fn begin(
        &mut self,
        row: u32,
        prompt: usize,
        temperature: f32,
        joined: Arc<Joined>,
        memory: &Arc<Memory>,
    ) {
        let fits = self.rows.len() < ROWS && prompt <= self.context && self.tokens + prompt <= ALL_TOKENS;
        let Some(memory) = fits.then(|| taken(memory, prompt)).flatten() else { return };
        self.end(&[row]);
        joined.begun();
        self.rows.insert(row, Row::new(joined, prompt, temperature, memory));
    }

    /// Adds text to a row; what can be indexed now, if this completes its prompt.
    pub fn text(&mut self, number: u32, from: usize, tokens: &[TokenId]) -> Option<Unindexed> {
        let row = self.rows.get_mut(&number)?;
        let before = row.text().len();
        if before + tokens.len() > self.context || !row.extend(from, tokens) {
            self.end(&[number]);
            return None;
        }
        self.tokens += tokens.len();
        let completes =
            row.joined.terms.drafts() && before < row.prompt() && row.text().len() >= row.prompt();
        completes.then(|| Unindexed {
            joined: Arc::clone(&row.joined),
            text: row.text().to_vec(),
            prompt: row.prompt(),
        })
    }

    /// Takes the lookups of a row, if it has not ended.
    pub fn indexed(&mut self, row: u32, lookups: Lookups) {
        if let Some(row) = self.rows.get_mut(&row) {
            row.indexed(lookups);
        }
    }

    /// Ends rows.
    pub fn end(&mut self, rows: &[u32]) {
        for row in rows.iter().filter_map(|row| self.rows.remove(row)) {
            self.tokens -= row.text().len();
            row.ended();
        }
    }

    /// Takes a step; the drafts for the next one.
    pub fn step(&mut self, step: &Step) -> Drafts {
        self.note(step);
        let asking = self.asking(step);
        let lengths = self.chosen(step, &asking);
        let mut drafts =
            Drafts { sequence: step.sequence, pause: self.pause(step, &asking), rows: Vec::new() };
        for (row, length) in asking.iter().zip(lengths).filter(|(_, length)| *length > 0) {
            let nodes = row.draft.tree.nodes().iter().take(length);
            let tokens: Vec<TokenId> = nodes.map(|node| node.token).collect();
            if let Some(known) = self.rows.get_mut(&row.row) {
                known.sends(&row.draft);
            }
            drafts.rows.push((row.row, tokens));
        }
        self.quiet =
            if drafts.rows.is_empty() { self.quiet.saturating_add(1 + u32::from(step.skipped)) } else { 0 };
        self.totals.steps += 1;
        drafts
    }

    /// Does what a few rows have put off; call it while the engine computes.
    pub fn tidy(&mut self) {
        self.rows.values_mut().filter_map(|row| row.tidy().then_some(())).take(TIDIED).for_each(drop);
    }

    /// Notes what the last step cost, emitted and accepted.
    fn note(&mut self, step: &Step) {
        let mut drafted = 0;
        let load = step.rows.len() as f64 / self.sequences as f64;
        for of_row in &step.rows {
            drafted += usize::from(of_row.scheduled);
            self.note_row(of_row, load);
        }
        let rows = step.rows.iter().filter(|row| row.sampled > 0).count();
        self.totals.rows = rows;
        // A step that read prompts says nothing about the cost of its rows.
        if step.reads || step.elapsed == 0 || rows == 0 {
            return;
        }
        let seconds = f64::from(step.elapsed) * 1e-6;
        self.costs.note(rows, drafted, seconds);
        self.totals.cost = self.costs.of(rows);
        let Some(cost) = self.totals.cost else { return };
        let waited = f64::from(step.waited) * 1e-6;
        let emitted: usize = step.rows.iter().map(|row| usize::from(row.sampled)).sum();
        let won = if drafted > 0 { cost.plain * emitted as f64 / rows as f64 - seconds } else { 0.0 };
        self.budget.book(won - waited, cost.plain);
        if drafted == 0 {
            self.budget.passed(cost.plain * (f64::from(step.skipped) + 1.0));
        }
        self.totals.saved += won.max(0.0);
        self.totals.wasted += (-won).max(0.0) + waited;
    }

    fn note_row(&mut self, of_row: &StepRow, load: f64) {
        let Some(row) = self.rows.get_mut(&of_row.row) else { return };
        if row.text().len() + of_row.tokens.len() != of_row.length as usize
            || of_row.length as usize > self.context
        {
            self.end(&[of_row.row]);
            return;
        }
        self.tokens += of_row.tokens.len();
        row.joined.emitted(of_row.tokens.len() as u64);
        if let Some(round) = row.stepped(of_row, load, &mut self.acceptance) {
            self.totals.drafted += u64::from(round.drafted);
            self.totals.accepted += u64::from(round.accepted);
            row.joined.note(round);
        }
    }

    /// The rows that may be drafted for, with their drafts.
    fn asking(&mut self, step: &Step) -> Vec<Asking> {
        let (most, vocabulary) = (self.most, self.vocabulary);
        let mut asking = Vec::new();
        for of_row in &step.rows {
            let Some(row) = self.rows.get_mut(&of_row.row) else { continue };
            let terms = &row.joined.terms;
            let forced = terms.forced;
            let room = usize::from(of_row.room).min(most).min(terms.most);
            if room == 0 || !terms.drafts() || (terms.closed)().is_some() {
                continue;
            }
            let mut draft = row.draft(room, &self.acceptance);
            let foreign = draft.tree.nodes().iter().position(|node| node.token >= vocabulary);
            draft.survival.truncate(foreign.unwrap_or(usize::MAX));
            asking.push(Asking { row: of_row.row, room, forced, draft });
        }
        asking
    }

    /// The length of each draft.
    fn chosen(&self, step: &Step, asking: &[Asking]) -> Vec<usize> {
        let rows = step.rows.len();
        let candidates: Vec<Candidate<'_>> = asking
            .iter()
            .map(|row| Candidate {
                survival: &row.draft.survival,
                forced: row.forced.map(|forced| forced.min(row.room)),
            })
            .collect();
        let is_forced = candidates.iter().any(|candidate| candidate.forced.is_some());
        let Some(cost) = self.costs.of(rows) else {
            let forced =
                |candidate: &Candidate<'_>| candidate.forced.unwrap_or(0).min(candidate.survival.len());
            return candidates.iter().map(forced).collect();
        };
        if !self.budget.is_open() && !is_forced {
            return vec![0; asking.len()];
        }
        let choice = allocate(rows, &candidates, &cost, LEAST);
        if choice.lengths.iter().any(|length| *length > 0) || self.quiet < RETRY {
            return choice.lengths;
        }
        trial(&candidates)
    }

    /// Steps for which the plug-in need not ask.
    fn pause(&self, step: &Step, asking: &[Asking]) -> u16 {
        let may_ask = |row: &StepRow| self.rows.get(&row.row).is_some_and(|row| row.joined.terms.drafts());
        if asking.is_empty() && !step.rows.iter().any(may_ask) {
            return SILENT;
        }
        let forced = asking.iter().any(|row| row.forced.is_some());
        if self.budget.is_open() || forced { 0 } else { SPENT }
    }
}

/// A trial of the likeliest draft.
fn trial(candidates: &[Candidate<'_>]) -> Vec<usize> {
    let mut lengths = vec![0; candidates.len()];
    let first = |candidate: &Candidate<'_>| candidate.survival.first().copied().unwrap_or(0.0);
    let best =
        candidates.iter().enumerate().max_by(|(_, one), (_, other)| first(one).total_cmp(&first(other)));
    if let Some((index, candidate)) = best
        && first(candidate) >= TRIAL_SURVIVAL
        && let Some(length) = lengths.get_mut(index)
    {
        *length = TRIAL.min(candidate.survival.len());
    }
    lengths
}

/// Memory for a row with such a prompt; `None` if there is too little.
fn taken(memory: &Arc<Memory>, prompt: usize) -> Option<Reservation> {
    memory.try_take(ROW_BYTES + TOKEN_BYTES * prompt as u64)
}
