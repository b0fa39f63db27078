//! Seconds of an engine's step as a function of its batch.

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    pub sequences: usize,
    pub tokens: usize,
    /// Those that are only read: a prompt without its last token.
    pub read: usize,
    /// Tokens of context that are read from the cache, over all sequences.
    pub context: usize,
    /// Sequences that get an output in it.
    pub outputs: usize,
    /// Drafted tokens of the longest verify request that is answered in it; `None` without one.
    pub drafted: Option<usize>,
}

/// Seconds of a step as a function of its batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Curve {
    /// From figures of hardware and model.
    Roofline(Roofline),
    /// From measured times.
    Table(Table),
    /// From the cost of verify requests in plain steps.
    Steps(Steps),
}

impl Curve {
    pub fn seconds(&self, batch: Batch) -> f64 {
        match self {
            Self::Roofline(roofline) => roofline.seconds(batch),
            Self::Table(table) => table.seconds(batch),
            Self::Steps(steps) => steps.seconds(batch),
        }
    }
}

/// Largest batch with a CUDA graph.
const MAX_GRAPH: usize = 512;
/// Tokens of a tile of a matrix product.
const TILE: usize = 64;

/// Figures of hardware and model: a step takes as long as reading the weights and the KV rows, or
/// as the arithmetic, whichever is longer, and a fixed time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes of weights read in a step, by all devices together.
    pub weights: f64,
    /// Bytes of KV read per token of context.
    pub kv: f64,
    /// Attainable bytes per second of all devices together.
    pub bandwidth: f64,
    /// Attainable floating point operations per second of all devices together.
    pub flops: f64,
    /// Seconds of a step that do not depend on the batch size: launches, scheduling, exchange
    /// between devices.
    pub fixed: f64,
    /// Additional seconds if no CUDA graph was captured for the batch.
    pub eager: f64,
}

impl Roofline {
    fn seconds(&self, batch: Batch) -> f64 {
        let graph = batch.tokens <= MAX_GRAPH;
        let tokens = match batch.tokens {
            small @ 0..=2 => small,
            3..=4 => 4,
            _ if graph => batch.tokens.next_multiple_of(8),
            large => large,
        };
        let memory = (self.weights + self.kv * batch.context as f64) / self.bandwidth;
        // One multiplication and one addition for each weight of two bytes.
        let compute = self.weights * tokens.next_multiple_of(TILE) as f64 / self.flops;
        memory.max(compute) + self.fixed + if graph { 0.0 } else { self.eager }
    }
}

/// Measured times of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Table {
    /// Tokens of a step and its milliseconds, both rising; extrapolated linearly beyond the last
    /// point.
    pub points: &'static [(usize, f64)],
    /// Between two points a step takes as long as at the next: a staircase instead of a line.
    pub stairs: bool,
    /// Seconds for every sequence beyond the first.
    pub sequence: f64,
    /// Seconds per token of context.
    pub context: f64,
}

impl Table {
    fn seconds(&self, batch: Batch) -> f64 {
        let more = self.sequence * batch.sequences.saturating_sub(1) as f64;
        self.by_tokens(batch.tokens) * 1e-3 + more + self.context * batch.context as f64
    }

    /// Milliseconds.
    fn by_tokens(&self, tokens: usize) -> f64 {
        let line = |a: (usize, f64), b: (usize, f64)| {
            let share = (tokens as f64 - a.0 as f64) / (b.0 as f64 - a.0 as f64).max(1.0);
            a.1 + share * (b.1 - a.1)
        };
        let next = self.points.iter().position(|point| point.0 >= tokens);
        let pair = |to: usize| self.points.get(to.checked_sub(1)?).copied().zip(self.points.get(to).copied());
        match next {
            Some(to) if self.stairs || to == 0 => self.points.get(to).map_or(0.0, |point| point.1),
            Some(to) => pair(to).map_or(0.0, |(a, b)| line(a, b)),
            None => pair(self.points.len().saturating_sub(1))
                .map_or_else(|| self.points.last().map_or(0.0, |point| point.1), |(a, b)| line(a, b)),
        }
    }
}

/// A step takes `step`; one that answers a verify request of n drafted tokens
/// `step · (base + node · n)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steps {
    /// Seconds of a plain step.
    pub step: f64,
    /// Cost of a verify request without its drafted tokens, plain steps, at least 1.
    pub base: f64,
    /// Cost that each drafted token adds to a verify request, plain steps.
    pub node: f64,
    /// Share by which a step is longer for each further sequence that gets an output.
    pub growth: f64,
    /// Seconds for each token that is only read.
    pub prompt: f64,
}

impl Steps {
    fn seconds(&self, batch: Batch) -> f64 {
        // The costliest of its sequences counts: a verify request if there is one.
        let plain = if batch.outputs > 0 { 1.0 } else { 0.0 };
        let steps = batch.drafted.map_or(plain, |nodes| self.base + self.node * nodes as f64);
        let concurrency = 1.0 + self.growth * batch.outputs.saturating_sub(1) as f64;
        self.step * steps * concurrency + self.prompt * batch.read as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hit_their_points_are_lines_or_stairs_and_go_on_beyond() {
        let table = |stairs| Table {
            points: &[(1, 1_000.0), (4, 2_000.0), (16, 8_000.0)],
            stairs,
            sequence: 0.5,
            context: 0.0,
        };
        let ms = |stairs, tokens| {
            let batch = Batch { sequences: 3, tokens, context: 9, ..Batch::default() };
            (table(stairs).seconds(batch) * 1e3).round() as u64
        };
        assert_eq!([1, 2, 4, 5].map(|tokens| ms(true, tokens)), [2_000, 3_000, 3_000, 9_000]);
        assert_eq!([1, 4, 10, 28].map(|tokens| ms(false, tokens)), [2_000, 3_000, 6_000, 15_000]);
    }

    #[test]
    fn drafts_are_not_counted_as_prompt_and_one_costliest_request_counts() {
        let steps = Steps { step: 1.0, base: 1.5, node: 0.1, growth: 0.5, prompt: 0.01 };
        let batch = Batch { sequences: 2, tokens: 12, outputs: 2, drafted: Some(5), ..Batch::default() };
        assert!((steps.seconds(batch) - 3.0).abs() < 1e-12);
        let reading = Batch { tokens: 112, read: 100, ..batch };
        assert!((steps.seconds(reading) - 4.0).abs() < 1e-12);
        assert!(steps.seconds(Batch::default()).abs() < 1e-12);
    }
}
