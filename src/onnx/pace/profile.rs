//! Step times of engines: named profiles, from published hardware figures or from measurements.
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
//! | B200 | 8 TB/s, 180 GB, 2.25 PFLOP/s bf16 dense | NVIDIA DGX B200 data sheet (64 TB/s, 1,440 GB, 36 with sparsity for eight) |
//! | 7B | 6.74 G weights, 2 bytes each; 32 layers, 32 KV heads of 128: 512 KiB of KV a token | Llama 2 model card and configuration |
//! | 8B | 8.03 G weights; 32 layers, 8 KV heads of 128: 128 KiB a token | Llama 3.1 model card and configuration |
//! | 70B | 70.6 G weights; 80 layers, 8 KV heads of 128: 320 KiB a token | Llama 3.1 model card and configuration |
//!
//! Batches are padded to the sizes that CUDA graphs were captured for (1, 2, 4, then multiples of 8
//! up to 512); a larger batch is launched kernel by kernel. Matrix products come in tiles of 64
//! tokens.

use super::curve::{Curve, Roofline, Table};

/// A named engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Llama 2 7B on an L4.
    L4With7b,
    /// Llama 3.1 8B on an L4.
    L4With8b,
    /// Llama 3.1 8B on an H100.
    H100With8b,
    /// Llama 3.1 70B on four H100.
    H100With70b,
    /// Llama 3.1 70B on two B200.
    B200With70b,
    /// vLLM on two CPU cores, as measured here.
    VllmCpu,
    /// llama-server on two CPU cores, as measured here.
    LlamaCpu,
    /// `foretell target` with the bundled model.
    Onnx,
    /// `foretell target` with the bundled model at eight times its depth.
    OnnxInflated,
}

impl Profile {
    pub const ALL: [Self; 9] = [
        Self::L4With7b,
        Self::L4With8b,
        Self::H100With8b,
        Self::H100With70b,
        Self::B200With70b,
        Self::VllmCpu,
        Self::LlamaCpu,
        Self::Onnx,
        Self::OnnxInflated,
    ];

    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::L4With7b => "l4-7b",
            Self::L4With8b => "l4-8b",
            Self::H100With8b => "h100-8b",
            Self::H100With70b => "h100-70b",
            Self::B200With70b => "b200-70b",
            Self::VllmCpu => "cpu",
            Self::LlamaCpu => "llama-server",
            Self::Onnx => "onnx",
            Self::OnnxInflated => "onnx-inflated",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|profile| profile.name() == name)
    }

    /// The names, with commas between.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// True if all work of its scheduler's turn is one step.
    pub const fn is_gpu(self) -> bool {
        matches!(self.curve(), Curve::Roofline(_))
    }

    /// Maximum number of tokens in a step: vLLM's default for a GPU, and as measured for the
    /// others.
    pub const fn step_tokens(self) -> usize {
        if self.is_gpu() { 2048 } else { 128 }
    }

    /// Its step times.
    pub const fn curve(self) -> Curve {
        match self {
            // 13.48 GB at 240 GB/s: 56 ms.
            Self::L4With7b => l4(13.48e9, 524_288.0),
            // 16.06 GB: 67 ms.
            Self::L4With8b => l4(16.06e9, 131_072.0),
            // 16.06 GB at 2.68 TB/s: 6 ms.
            Self::H100With8b => Curve::Roofline(Roofline {
                weights: 16.06e9,
                kv: 131_072.0,
                bandwidth: 2.68e12,
                flops: 544e12,
                fixed: 0.8e-3,
                eager: 4e-3,
            }),
            // 141 GB at 10.7 TB/s: 13 ms, and 160 exchanges between the devices of about 15 µs
            // each.
            Self::H100With70b => Curve::Roofline(Roofline {
                weights: 141.2e9,
                kv: 327_680.0,
                bandwidth: 10.7e12,
                flops: 2.17e15,
                fixed: 3.2e-3,
                eager: 9e-3,
            }),
            // 141 GB at 12.8 TB/s: 11 ms, and 160 exchanges of about 10 µs each.
            Self::B200With70b => Curve::Roofline(Roofline {
                weights: 141.2e9,
                kv: 327_680.0,
                bandwidth: 12.8e12,
                flops: 2.47e15,
                fixed: 2.4e-3,
                eager: 9e-3,
            }),
            // Decode 95 ms; `score` of 0, 4, 8 drafted tokens 138, 152, 164 ms, with half a block
            // of 32 recomputed; a fan-out of five prompts 421 ms (tests/engines/cost.py).
            Self::VllmCpu => table(&[(1, 95.0), (17, 138.0), (21, 152.0), (25, 164.0), (90, 421.0)], 0.0),
            // Decode 75 ms; llama-server's verification of five drafted tokens 1.9 steps, a fan-out
            // of five prompts, about 15 tokens, 4.4 steps.
            Self::LlamaCpu => table(&[(1, 75.0), (6, 142.0), (15, 330.0), (128, 1_800.0)], 0.0),
            // 1, 5, 9, 17 new tokens: 1.82, 2.57, 3.05, 4.17 ms; four sequences of one token 3.58
            // ms.
            Self::Onnx => table(&[(1, 1.82), (5, 2.57), (9, 3.05), (17, 4.17), (128, 20.0)], 0.4e-3),
            // 15.5, 21.8, 23.9, 30.1 ms.
            Self::OnnxInflated => table(&[(1, 15.5), (5, 21.8), (9, 23.9), (17, 30.1), (128, 150.0)], 3e-3),
        }
    }
}

/// A model on an L4: bytes of its weights, and of the KV of a token.
const fn l4(weights: f64, kv: f64) -> Curve {
    Curve::Roofline(Roofline { weights, kv, bandwidth: 240e9, flops: 66e12, fixed: 1.5e-3, eager: 4e-3 })
}

/// Measured milliseconds by tokens, and the seconds of each sequence beyond the first.
const fn table(points: &'static [(usize, f64)], sequence: f64) -> Curve {
    Curve::Table(Table { points, stairs: false, sequence, context: 0.0 })
}

#[cfg(test)]
mod tests {
    use super::super::curve::Batch;
    use super::*;

    fn step(profile: Profile, sequences: usize, tokens: usize, context: usize) -> f64 {
        profile.curve().seconds(Batch { sequences, tokens, context, ..Batch::default() })
    }

    #[test]
    fn gpus_are_bound_by_memory_for_few_tokens_and_by_arithmetic_for_many() {
        for large in [Profile::H100With70b, Profile::B200With70b] {
            let one = step(large, 1, 1, 500);
            assert!((0.013..0.020).contains(&one), "{one}");
            assert!(step(large, 1, 32, 500) < 1.01 * one, "a draft of 31 is nearly free");
            assert!(step(large, 256, 256, 256 * 500) > 1.2 * one);
        }
        for small in [Profile::L4With7b, Profile::L4With8b] {
            assert!(step(small, 1, 2048, 500) > 5.0 * step(small, 1, 1, 500));
        }
        assert!((0.006..0.008).contains(&step(Profile::H100With8b, 1, 1, 500)));
    }

    #[test]
    fn measured_profiles_hit_their_points_and_extrapolate() {
        let ms = |tokens| step(Profile::OnnxInflated, 1, tokens, 0) * 1e3;
        assert!((ms(5) - 21.8).abs() < 1e-9 && (ms(3) - 18.65).abs() < 1e-9);
        assert!(ms(256) > 250.0);
    }

    #[test]
    fn names_are_read_as_written() {
        assert!(Profile::ALL.into_iter().all(|profile| Profile::from_name(profile.name()) == Some(profile)));
        assert_eq!(Profile::from_name("h200-8b"), None);
    }
}
