//! The rows of one engine, and the drafts for each of its steps.
//!
//! PURE: time comes with each step. A step is read in three parts: what the last one cost and
//! emitted is noted, every row that may be drafted for makes a draft, and one allocation over all
//! of them decides how much of each is sent.

use std::collections::HashMap;
use std::sync::Arc;

use foretell_control::choose::{Candidate, allocate};
use foretell_control::cost::StepCosts;
use foretell_core::control::{RegretBudget, Survival};
use foretell_core::draft::Merged;
use foretell_core::units::TokenId;
use foretell_net::http::memory::{Memory, Reservation};

use crate::frame::{Drafts, Hello, Step, StepRow};
use crate::joins::Joined;
pub use crate::row::Lookups;
use crate::row::Row;
use crate::totals::Totals;

/// Maximum rows of a connection.
const MAX_ROWS: usize = 4_096;
/// Maximum tokens of a row, and of all rows.
const MAX_ROW_TOKENS: usize = 4 << 20;
const MAX_TOKENS: usize = 64 << 20;
/// Rows that are tidied after a step: each may take a millisecond, and the next step may come soon.
const TIDIED_ROWS: usize = 2;
/// Memory of a row, bytes: in all, and for each token of its prompt (text and index).
const ROW_BYTES: u64 = 8 << 10;
const TOKEN_BYTES: u64 = 24;
/// Expected gain without which nothing is drafted.
const MIN_GAIN: f64 = 1.03;
/// Steps without a draft after which a draft is tried although its cost is expected to exceed its
/// gain: costs change, and without drafts nothing would show it.
const TRIAL_INTERVAL: u32 = 256;
/// Tokens of such a trial, and the survival that its first token needs.
const TRIAL: usize = 4;
const TRIAL_SURVIVAL: f64 = 0.3;
/// Steps of a pause: while no row may be drafted for; while the budget is spent.
const PAUSE_WITHOUT_ROWS: u16 = 64;
const PAUSE_WITHOUT_BUDGET: u16 = 16;

/// The rows of one engine.
pub struct Batch {
    max_draft: usize,
    context: usize,
    vocabulary: TokenId,
    /// Maximum rows of a step.
    sequences: usize,
    rows: HashMap<u32, Row>,
    tokens: usize,
    costs: StepCosts,
    survival: Survival,
    budget: RegretBudget,
    /// The budget is used up, and not half refilled yet.
    is_spent: bool,
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
struct Eligible {
    row: u32,
    room: usize,
    forced: Option<usize>,
    draft: Merged,
}

impl Batch {
    /// No rows yet, of the engine that said hello.
    pub fn new(hello: &Hello) -> Self {
        Self {
            max_draft: usize::from(hello.max_draft),
            context: (hello.context as usize).min(MAX_ROW_TOKENS),
            vocabulary: hello.vocabulary,
            sequences: usize::from(hello.rows).max(1),
            rows: HashMap::new(),
            tokens: 0,
            costs: StepCosts::default(),
            survival: Survival::default(),
            budget: RegretBudget::default(),
            is_spent: false,
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
        let fits = self.rows.len() < MAX_ROWS && prompt <= self.context && self.tokens + prompt <= MAX_TOKENS;
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
        let eligible = self.eligible(step);
        let lengths = self.chosen(step, &eligible);
        let mut drafts =
            Drafts { sequence: step.sequence, pause: self.pause(step, &eligible), rows: Vec::new() };
        for (row, length) in eligible.iter().zip(lengths).filter(|(_, length)| *length > 0) {
            let nodes = row.draft.tree.nodes().iter().take(length);
            let tokens: Vec<TokenId> = nodes.map(|node| node.token).collect();
            if let Some(known) = self.rows.get_mut(&row.row) {
                known.sends(&row.draft);
            }
            drafts.rows.push((row.row, tokens));
        }
        if drafts.rows.is_empty() {
            self.quiet = self.quiet.saturating_add(1 + u32::from(step.skipped));
            self.totals.steps.plain += 1;
        } else {
            self.quiet = 0;
            self.totals.steps.drafted += 1;
        }
        drafts
    }

    /// Does what a few rows have put off; call it while the engine computes.
    pub fn tidy(&mut self) {
        self.rows.values_mut().filter_map(|row| row.tidy().then_some(())).take(TIDIED_ROWS).for_each(drop);
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
        self.totals.steps.skipped += u64::from(step.skipped);
        self.totals.late = u64::from(step.late);
        self.totals.waited += u64::from(step.waited);
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
        let capacity = RegretBudget::capacity(cost.plain, 0.0);
        // One step counts as the budget at most: a hiccup is not the draft's fault.
        self.budget.book((won - waited).max(-capacity), capacity);
        if drafted == 0 {
            self.budget.passed(cost.plain * (f64::from(step.skipped) + 1.0), capacity);
        }
        self.is_spent =
            if self.is_spent { !self.budget.may_begin(capacity) } else { !self.budget.may_go_on(capacity) };
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
        if let Some(round) = row.stepped(of_row, load, &mut self.survival) {
            self.totals.drafted.count(round.drafted);
            self.totals.accepted.count(round.accepted);
            row.joined.note(round);
        }
    }

    /// The rows that may be drafted for, with their drafts.
    fn eligible(&mut self, step: &Step) -> Vec<Eligible> {
        let (max_draft, vocabulary) = (self.max_draft, self.vocabulary);
        let mut eligible = Vec::new();
        for of_row in &step.rows {
            let Some(row) = self.rows.get_mut(&of_row.row) else { continue };
            let terms = &row.joined.terms;
            let forced = terms.forced;
            let room = usize::from(of_row.room).min(max_draft).min(terms.max_draft);
            if room == 0 || !terms.drafts() || (terms.closed)().is_some() {
                continue;
            }
            let mut draft = row.draft(room, &self.survival);
            let foreign = draft.tree.nodes().iter().position(|node| node.token >= vocabulary);
            draft.survival.truncate(foreign.unwrap_or(usize::MAX));
            eligible.push(Eligible { row: of_row.row, room, forced, draft });
        }
        eligible
    }

    /// The length of each draft.
    fn chosen(&self, step: &Step, eligible: &[Eligible]) -> Vec<usize> {
        let rows = step.rows.len();
        let candidates: Vec<Candidate<'_>> = eligible
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
        if self.is_spent && !is_forced {
            return vec![0; eligible.len()];
        }
        let choice = allocate(rows, &candidates, &cost, MIN_GAIN);
        if choice.lengths.iter().any(|length| *length > 0) || self.quiet < TRIAL_INTERVAL {
            return choice.lengths;
        }
        trial(&candidates)
    }

    /// Steps for which the plug-in need not ask.
    fn pause(&self, step: &Step, eligible: &[Eligible]) -> u16 {
        let may_draft = |row: &StepRow| self.rows.get(&row.row).is_some_and(|row| row.joined.terms.drafts());
        if eligible.is_empty() && !step.rows.iter().any(may_draft) {
            return PAUSE_WITHOUT_ROWS;
        }
        let forced = eligible.iter().any(|row| row.forced.is_some());
        if self.is_spent && !forced { PAUSE_WITHOUT_BUDGET } else { 0 }
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
