//! A head of a model: `heads/model.onnx` in its folder, made by `onnx/train/head.py`.
//!
//! It drafts several tokens in one run from the hidden state of one position, so it has no cache
//! and needs nothing of the positions before.

use std::path::Path;
use std::sync::LazyLock;

use ort::session::Session;
use ort::value::Tensor;

use super::load;
use crate::forward::{Behind, Draws, HeadDraft};
use crate::noise::PositionNoise;
use crate::open_error::OpenError;
use crate::options::Options;
use foretell_core::units::TokenId;

const FOLDER: &str = "heads";

/// The input for noise, and the property of the graph that names its tokens.
const NOISE: &str = "noise";
const FREQUENT: &str = "frequent";
/// Bits of a hash that select the noise in a table.
const BITS: u32 = 14;
/// Hashes with these first bits have noise that changes fast: it is computed.
const STEEP: usize = (1 << BITS) - (1 << BITS) / 64;

pub struct Head {
    session: Session,
    /// Numbers of hidden state that it reads.
    width: usize,
    /// Number of tokens that it drafts.
    steps: usize,
    vocabulary: usize,
    /// The tokens that it can draft, for each of which it takes noise; empty for one of an older
    /// form, which takes none.
    frequent: Vec<TokenId>,
    /// It has failed, and is not run any more.
    failed: bool,
}

impl Head {
    /// The head in the folder of a model whose graph has the output `taps` of this width; `None` if
    /// there is none.
    ///
    /// # Errors
    /// Its graph cannot be loaded, or was made for another model.
    pub fn find(
        folder: &Path,
        options: &Options,
        taps: Option<usize>,
        vocabulary: usize,
    ) -> Result<Option<Self>, OpenError> {
        let folder = folder.join(FOLDER);
        if !folder.is_dir() {
            return Ok(None);
        }
        let loaded = load::load(&folder, &Options { profile: None, ..options.clone() })?;
        let sizes = |name: &str| {
            let mut outlets = loaded.session.inputs().iter().chain(loaded.session.outputs());
            outlets.find(|outlet| outlet.name() == name)?.dtype().tensor_shape().map(|shape| shape.to_vec())
        };
        let last = |name: &str, from: usize| {
            let sizes = sizes(name)?;
            usize::try_from(*sizes.get(from)?).ok()
        };
        let (Some(width), Some(steps)) = (last("taps", 1), last("tokens", 1)) else {
            return Err(loaded.refused("it is not a head of onnx/train/head.py"));
        };
        if taps != Some(width) {
            let has = taps.map_or("none".to_owned(), |taps| taps.to_string());
            let what = format!("the head reads {width} numbers of hidden state, the model gives {has}");
            return Err(loaded.refused(what));
        }
        let noisy = last(NOISE, 2);
        let named = loaded.session.metadata().ok().and_then(|metadata| metadata.custom(FREQUENT));
        let frequent: Option<Vec<TokenId>> = named
            .unwrap_or_default()
            .split(',')
            .filter(|id| !id.is_empty())
            .map(|id| id.parse().ok())
            .collect();
        let Some(frequent) = frequent.filter(|ids| noisy.unwrap_or(0) == ids.len()) else {
            return Err(loaded.refused("its noise is not for the tokens that it names"));
        };
        tracing::info!(head = %folder.display(), steps, "head loaded");
        Ok(Some(Self { session: loaded.session, width, steps, vocabulary, frequent, failed: false }))
    }

    /// Number of tokens that it drafts.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The drafts behind each of these tokens; none after a failure, which is logged once.
    pub fn propose(&mut self, behind: &[Behind<'_>]) -> Vec<HeadDraft> {
        if self.failed || behind.is_empty() {
            return Vec::new();
        }
        self.run(behind).unwrap_or_else(|error| {
            self.failed = true;
            tracing::error!(%error, "the head failed and drafts no more");
            Vec::new()
        })
    }

    /// The noise of the steps of a draft for each of the frequent tokens, scaled to their logits; 0
    /// where the likeliest are taken.
    fn noise(&self, draws: Option<Draws>) -> Vec<f32> {
        let all = self.steps * self.frequent.len();
        let Some(Draws { seed, choice, position, temperature }) = draws else { return vec![0.0; all] };
        let mut noise = Vec::with_capacity(all);
        for position in (position..).take(self.steps) {
            let of_position = PositionNoise::new(seed, choice, position);
            let of_token = |&token: &TokenId| temperature as f32 * approximate_noise(of_position.hash(token));
            noise.extend(self.frequent.iter().map(of_token));
        }
        noise
    }

    fn run(&mut self, behind: &[Behind<'_>]) -> ort::Result<Vec<HeadDraft>> {
        let count = behind.len();
        let taps: Vec<f32> = behind.iter().flat_map(|behind| behind.taps).copied().collect();
        let tokens: Vec<i64> = behind.iter().map(|behind| i64::from(behind.token)).collect();
        let taps = Tensor::from_array(([count, self.width], taps))?;
        let token = Tensor::from_array(([count], tokens))?;
        let mut inputs = ort::inputs!["taps" => taps, "token" => token];
        if !self.frequent.is_empty() {
            let noise: Vec<f32> = behind.iter().flat_map(|behind| self.noise(behind.draws)).collect();
            let noise = Tensor::from_array(([count, self.steps, self.frequent.len()], noise))?;
            inputs.push((NOISE.into(), noise.into()));
        }
        let outputs = self.session.run(inputs)?;
        let output = |name| outputs.get(name).ok_or_else(|| ort::Error::new(format!("no output {name}")));
        let (shape, tokens) = output("tokens")?.try_extract_tensor::<i64>()?;
        let (_, shares) = output("shares")?.try_extract_tensor::<f32>()?;
        let wide = shape.get(2).map_or(1, |&wide| wide.max(1) as usize);
        let named = |(&token, &share): (&i64, &f32)| {
            let token = TokenId::try_from(token).ok().filter(|&token| (token as usize) < self.vocabulary)?;
            share.is_finite().then_some((token, share))
        };
        let step = |(tokens, shares): (&[i64], &[f32])| tokens.iter().zip(shares).filter_map(named).collect();
        let row = |(tokens, shares): (&[i64], &[f32])| {
            tokens.chunks(wide).zip(shares.chunks(wide)).map(step).collect()
        };
        let each = (self.steps * wide).max(1);
        Ok(tokens.chunks(each).zip(shares.chunks(each)).map(row).collect())
    }
}

/// The noise of a hash to within a hundredth, for drafts: tens of thousands of tokens a draft, of
/// which most could not win with any.
fn approximate_noise(hash: u64) -> f32 {
    static TABLE: LazyLock<Vec<f32>> = LazyLock::new(|| {
        let middle = |at: u64| (at << (64 - BITS)) | (1 << (63 - BITS));
        (0..1 << BITS).map(|at| PositionNoise::noise(middle(at)) as f32).collect()
    });
    let at = (hash >> (64 - BITS)) as usize;
    let entry = if at < STEEP { TABLE.get(at).copied() } else { None };
    entry.unwrap_or_else(|| PositionNoise::noise(hash) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_core::units::SplitMix64;

    #[test]
    fn noise_of_drafts_is_near_that_of_the_target() {
        for at in 0..100_000 {
            let hash = SplitMix64::mix(at);
            let (near, exact) = (f64::from(approximate_noise(hash)), PositionNoise::noise(hash));
            assert!((near - exact).abs() < 0.01 || exact < -1.5, "{near} {exact}");
            assert!((near - exact).abs() < 0.3, "{near} {exact}");
        }
    }
}
