//! Step times of engines: named profiles, from published hardware figures or from our own
//! measurements.
//!
//! Rooflines: a step reads all weights once and the KV rows of every running sequence, and computes
//! about two floating point operations per weight and token; its time is the longer of the two plus
//! the launch overhead. Attainable shares: 80 % of the memory bandwidth and 55 % of the dense
//! arithmetic, as is usual for tuned kernels.
//!
//! | figure | value | source |
//! |---|---|---|
//! | L4 | 300 GB/s, 24 GB, 121 TFLOP/s bf16 dense | NVIDIA L4 data sheet (242 with sparsity) |
//! | H100 SXM | 3.35 TB/s, 80 GB, 989 TFLOP/s bf16 dense | NVIDIA H100 data sheet |
//! | 7B | 6.74 G weights, 2 bytes each; 32 layers, 32 KV heads of 128: 512 KiB of KV a token | Llama 2 model card and configuration |
//! | 8B | 8.03 G weights; 32 layers, 8 KV heads of 128: 128 KiB a token | Llama 3.1 model card and configuration |
//! | 70B | 70.6 G weights; 80 layers, 8 KV heads of 128: 320 KiB a token | Llama 3.1 model card and configuration |
//!
//! Batches are padded to the sizes that CUDA graphs were captured for (1, 2, 4, then multiples of 8
//! up to 512); a larger batch is launched kernel by kernel. Matrix products come in tiles of 64
//! tokens.

use serde::Deserialize;

use super::values::{number, seconds};
use foretell_core::units::{SplitMix64, Tick};

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Sequences in it.
    pub sequences: usize,
    /// Tokens in it.
    pub tokens: usize,
    /// Tokens of context that are read, over all sequences.
    pub context: usize,
    /// Sequences that get an output in it.
    pub outputs: usize,
    /// Drafted tokens of the longest verify request that is answered in it; `None` without one.
    pub drafted: Option<usize>,
}

/// Seconds of a step as a function of its batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Curve {
    /// From figures of hardware and model.
    Roofline(Roofline),
    /// From measured times.
    Table(Table),
    /// As our own target paces itself (`foretell target --pace`).
    Paced(Paced),
}

/// Figures of hardware and model.
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

/// Measured seconds of steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Tokens of a step and its seconds, both rising; extrapolated linearly beyond the last point.
    pub points: Vec<(usize, f64)>,
    /// Between two points a step takes as long as at the next: a staircase instead of a line.
    pub stairs: bool,
    /// Seconds for every sequence beyond the first.
    pub sequence: f64,
    /// Seconds per token of context.
    pub context: f64,
}

/// A step takes `step`; one that answers a verify request of n drafted tokens takes
/// `step · (base + node · n)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paced {
    /// Seconds of a plain step.
    #[serde(deserialize_with = "seconds::<_, 1, 60>")]
    pub step: f64,
    /// Plain steps that a verify request takes without a draft.
    #[serde(default = "one")]
    pub base: f64,
    /// Plain steps for every drafted token.
    #[serde(default)]
    pub node: f64,
    /// Relative increase for each further sequence that gets an output.
    #[serde(default)]
    pub growth: f64,
    /// Seconds for each token that is only read.
    #[serde(default, deserialize_with = "seconds::<_, 0, 60>")]
    pub prompt: f64,
}

const fn one() -> f64 {
    1.0
}

/// Random variation of step times.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Jitter {
    /// Every step is within this share of its time.
    #[serde(deserialize_with = "number::<_, 0, 1>")]
    pub spread: f64,
    /// Probability that a step is disturbed.
    #[serde(deserialize_with = "number::<_, 0, 1>")]
    pub rare: f64,
    /// Minimum factor of a disturbed step; the factor has a Pareto tail of index 2, cut at 20.
    #[serde(deserialize_with = "number::<_, 1, 20>")]
    pub tail: f64,
}

impl Default for Jitter {
    fn default() -> Self {
        Self::NONE
    }
}

impl Jitter {
    /// Every step takes exactly its time.
    pub const NONE: Self = Self { spread: 0.0, rare: 0.0, tail: 1.0 };
    /// Plus or minus 5 %, and 1 step in 100 disturbed.
    pub const USUAL: Self = Self { spread: 0.05, rare: 0.01, tail: 2.0 };

    /// Seconds for which one draw is used.
    const HOLDS: f64 = 0.01;

    /// The factor of a step that begins at `now`. It depends only on the seed and the moment, as
    /// disturbances from outside do: two runs with the same seed are disturbed at the same times,
    /// so that they can be compared.
    pub fn factor(&self, seed: u64, now: Tick) -> f64 {
        if self.spread == 0.0 && self.rare == 0.0 {
            return 1.0;
        }
        let mut rng = SplitMix64::new(SplitMix64::mix(
            seed ^ SplitMix64::mix((now.seconds_since(Tick(0)) / Self::HOLDS) as u64),
        ));
        let even = 1.0 + self.spread * (2.0 * rng.unit() - 1.0);
        if rng.unit() >= self.rare {
            return even;
        }
        even * (self.tail / (1.0 - rng.unit()).sqrt()).min(20.0)
    }
}

impl Curve {
    /// Seconds of a step.
    pub fn seconds(&self, batch: Batch) -> f64 {
        match self {
            Self::Roofline(roofline) => roofline.seconds(batch),
            Self::Table(table) => table.seconds(batch),
            Self::Paced(paced) => paced.seconds(batch),
        }
    }
}

/// Largest batch with a CUDA graph.
const MAX_GRAPH: usize = 512;
/// Tokens of a tile of a matrix product.
const TILE: usize = 64;

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

impl Table {
    fn seconds(&self, batch: Batch) -> f64 {
        let more = self.sequence * batch.sequences.saturating_sub(1) as f64;
        self.by_tokens(batch.tokens) + more + self.context * batch.context as f64
    }

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

impl Paced {
    fn seconds(&self, batch: Batch) -> f64 {
        // The most expensive of its sequences counts: a verify request if there is one.
        let plain = if batch.outputs > 0 { 1.0 } else { 0.0 };
        let steps = batch.drafted.map_or(plain, |nodes| self.base + self.node * nodes as f64);
        let concurrency = 1.0 + self.growth * batch.outputs.saturating_sub(1) as f64;
        let read = batch.tokens.saturating_sub(batch.outputs + batch.drafted.unwrap_or(0));
        self.step * steps * concurrency + self.prompt * read as f64
    }
}

/// A named engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Llama 2 7B on an L4.
    #[serde(rename = "7b-l4")]
    Small,
    /// Llama 3.1 8B on an H100.
    #[serde(rename = "8b-h100")]
    Fast,
    /// Llama 3.1 70B on four H100.
    #[serde(rename = "70b-4xh100")]
    Large,
    /// vLLM on two CPU cores, as measured here.
    VllmCpu,
    /// llama-server on two CPU cores, as measured here.
    #[serde(rename = "llama-server")]
    LlamaCpu,
    /// Our own target as it is.
    Onnx,
    /// Our own target at eight times its depth.
    #[serde(rename = "onnx-inflated")]
    Inflated,
}

/// Pace and limits of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Its pace.
    pub pace: Curve,
    /// Maximum number of sequences in a step.
    pub sequences: usize,
    /// Capacity of its KV memory, tokens.
    pub kv: usize,
    /// Maximum number of tokens in a step.
    pub chunk: usize,
    /// Tokens of a block of the prefix cache; tokens after the last whole block are computed again.
    pub block: usize,
}

impl Profile {
    /// Its figures.
    pub fn shape(self) -> Shape {
        match self {
            // 13.48 GB at 240 GB/s: 56 ms. 24 GB minus weights and a tenth: 8 GB of KV.
            Self::Small => gpu(
                Roofline {
                    weights: 13.48e9,
                    kv: 524_288.0,
                    bandwidth: 240e9,
                    flops: 66e12,
                    fixed: 1.5e-3,
                    eager: 4e-3,
                },
                15_000,
            ),
            // 16.06 GB at 2.68 TB/s: 6 ms.
            Self::Fast => gpu(
                Roofline {
                    weights: 16.06e9,
                    kv: 131_072.0,
                    bandwidth: 2.68e12,
                    flops: 544e12,
                    fixed: 0.8e-3,
                    eager: 4e-3,
                },
                420_000,
            ),
            // 141 GB at 10.7 TB/s: 13 ms, and 160 exchanges between the devices of about 15 µs
            // each.
            Self::Large => gpu(
                Roofline {
                    weights: 141.2e9,
                    kv: 327_680.0,
                    bandwidth: 10.7e12,
                    flops: 2.17e15,
                    fixed: 3.2e-3,
                    eager: 9e-3,
                },
                430_000,
            ),
            // Decode 95 ms; `score` of 0, 4, 8 drafted tokens 138, 152, 164 ms, with half a block
            // of 32 computed again; a fan-out of five prompts 421 ms (docs/engines.md).
            Self::VllmCpu => cpu(&[(1, 95.0), (17, 138.0), (21, 152.0), (25, 164.0), (90, 421.0)], 32, 0.0),
            // Decode 75 ms; its own verification of five drafted tokens 1.9 steps, a fan-out of
            // five prompts, about 15 tokens, 4.4 steps (docs/history/2026-11.md).
            Self::LlamaCpu => cpu(&[(1, 75.0), (6, 142.0), (15, 330.0), (128, 1_800.0)], 1, 0.0),
            // 1, 5, 9, 17 new tokens: 1.82, 2.57, 3.05, 4.17 ms; four sequences of one token 3.58
            // ms.
            Self::Onnx => cpu(&[(1, 1.82), (5, 2.57), (9, 3.05), (17, 4.17), (128, 20.0)], 1, 0.4),
            // 15.5, 21.8, 23.9, 30.1 ms.
            Self::Inflated => cpu(&[(1, 15.5), (5, 21.8), (9, 23.9), (17, 30.1), (128, 150.0)], 1, 3.0),
        }
    }
}

fn gpu(roofline: Roofline, kv: usize) -> Shape {
    let pace = Curve::Roofline(roofline);
    Shape { pace, sequences: 256, kv, chunk: 2048, block: 16 }
}

/// Times in milliseconds; `sequence` for every sequence beyond the first.
fn cpu(points: &[(usize, f64)], block: usize, sequence: f64) -> Shape {
    let points = points.iter().map(|&(tokens, ms)| (tokens, ms * 1e-3)).collect();
    let table = Table { points, stairs: false, sequence: sequence * 1e-3, context: 0.0 };
    Shape { pace: Curve::Table(table), sequences: 9, kv: 16_384, chunk: 128, block }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(profile: Profile, sequences: usize, tokens: usize, context: usize) -> f64 {
        profile.shape().pace.seconds(Batch { sequences, tokens, context, ..Batch::default() })
    }

    #[test]
    fn gpus_are_bound_by_memory_for_few_tokens_and_by_arithmetic_for_many() {
        let one = step(Profile::Large, 1, 1, 500);
        assert!((0.014..0.020).contains(&one), "{one}");
        assert!(step(Profile::Large, 1, 32, 500) < 1.01 * one, "a draft of 31 is nearly free");
        assert!(step(Profile::Large, 256, 256, 256 * 500) > 1.2 * one);
        assert!(step(Profile::Small, 1, 2048, 500) > 5.0 * step(Profile::Small, 1, 1, 500));
        assert!((0.006..0.008).contains(&step(Profile::Fast, 1, 1, 500)));
    }

    #[test]
    fn tables_hit_their_points_and_extrapolate() {
        let line = |tokens| step(Profile::Inflated, 1, tokens, 0) * 1e3;
        assert!((line(5) - 21.8).abs() < 1e-9 && (line(3) - 18.65).abs() < 1e-9);
        assert!(line(256) > 250.0);
        let points = vec![(1, 1.0), (4, 2.0), (16, 8.0)];
        let stairs = Table { points, stairs: true, sequence: 0.5, context: 0.0 };
        let ms = |tokens| {
            (stairs.seconds(Batch { sequences: 3, tokens, context: 9, ..Batch::default() }) * 1e3).round()
                as u64
        };
        assert_eq!([ms(1), ms(2), ms(4), ms(5)], [2000, 3000, 3000, 9000]);
    }

    #[test]
    fn jitter_has_a_tail_and_no_jitter_has_none() {
        let at = |jitter: Jitter, number: u64| jitter.factor(7, Tick(number * 10_000));
        assert!((0..100).all(|number| (at(Jitter::NONE, number) - 1.0).abs() < 1e-12));
        let drawn: Vec<f64> = (0..10_000).map(|number| at(Jitter::USUAL, number)).collect();
        let late = drawn.iter().filter(|factor| **factor > 1.5).count();
        assert!((60..150).contains(&late), "{late}");
        assert!(drawn.iter().all(|factor| (0.95..=21.0).contains(factor)));
    }
}
