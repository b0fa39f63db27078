//! One run shape of a tensor set, with every input and output run to preallocated memory (ONNX
//! Runtime's `IoBinding`).
//!
//! The cache's past and present are the same tensors, so `TensorScatter` copies nothing; the small
//! inputs are refilled for each run, and the logits are written to a tensor that is read before the
//! next run. A step of one token makes almost no allocations.

use ort::memory::Allocator;
use ort::session::{IoBinding, Session};
use ort::value::{PrimitiveTensorElementType, Tensor};

use super::description::CacheShape;
use super::device::Device;
use crate::layout::SetShape;
use foretell_core::units::TokenId;

/// Added to the attention score of a position that a token must not see. Finite, so that a padding
/// row that sees nothing yields a number and not NaN.
const UNSEEN: f32 = -1e9;

/// The number of new tokens per lane, and of rows of logits per lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    /// New tokens per lane, padding included.
    pub tokens: usize,
    /// Rows of logits per lane, padding included.
    pub rows: usize,
}

impl RunShape {
    /// Rounds a count up to its size class; each class has separate tensors.
    pub fn class(count: usize) -> usize {
        match count {
            0 => 1,
            1..=17 => count,
            18..=33 => count.next_multiple_of(8).min(33),
            34..=64 => count.next_multiple_of(16),
            _ => count.next_multiple_of(32),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct SlotFeed<'a> {
    /// Tokens of the lane before the feed.
    pub base: usize,
    /// Tokens of the feed that are in the cache already.
    pub done: usize,
    pub tokens: &'a [TokenId],
    /// Parents within the feed, if it is a tree.
    pub parents: Option<&'a [Option<usize>]>,
    /// Number of tokens that this run takes.
    pub taking: usize,
    /// First token of the feed whose logits are wanted.
    pub wanted: usize,
}

impl SlotFeed<'_> {
    /// The tokens of this run whose logits are wanted, counted from the first token of this run.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.wanted.saturating_sub(self.done).min(self.taking)..self.taking
    }

    fn parent(&self, index: usize) -> Option<usize> {
        match self.parents {
            Some(parents) => parents.get(index).copied().flatten(),
            None => index.checked_sub(1),
        }
    }

    fn depth(&self, index: usize) -> usize {
        if self.parents.is_none() {
            return index;
        }
        std::iter::successors(self.parent(index), |&above| self.parent(above)).count()
    }

    /// Marks the cache rows that the token sees.
    fn see(&self, index: usize, mask: &mut [f32]) {
        if self.parents.is_none() {
            let (seen, unseen) = mask.split_at_mut((self.base + index + 1).min(mask.len()));
            seen.fill(0.0);
            unseen.fill(UNSEEN);
            return;
        }
        let (seen, unseen) = mask.split_at_mut(self.base.min(mask.len()));
        seen.fill(0.0);
        unseen.fill(UNSEEN);
        for above in std::iter::successors(Some(index), |&node| self.parent(node)) {
            if let Some(cell) = unseen.get_mut(above) {
                *cell = 0.0;
            }
        }
    }
}

/// The tensors of one run shape, assigned to the inputs and outputs of the graph.
pub struct RunBinding {
    pub shape: RunShape,
    /// Number of the model's run that used it last.
    pub used: u64,
    size: usize,
    binding: IoBinding,
    ids: Tensor<i64>,
    positions: Tensor<i64>,
    write_index: Tensor<i64>,
    kv_len: Tensor<i64>,
    mask: Tensor<f32>,
    rows: Tensor<i64>,
    logits: Tensor<f32>,
    /// Hidden states of the same rows; `None` if no head reads them.
    taps: Option<Tensor<f32>>,
}

/// Maximum size of all run bindings of a model, bytes. Enough for the shapes in use of a model of
/// 49,152 tokens with 16 lanes (25 MB for verifying 8 rows of each); a run of a larger model costs
/// far more than to bind it anew.
pub const BINDINGS_MAX: usize = 512 << 20;

/// Numbers of one row of the outputs.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    pub vocabulary: usize,
    /// Hidden states that a head reads; 0 without one.
    pub taps: usize,
}

fn host<T: PrimitiveTensorElementType + std::fmt::Debug, const N: usize>(
    sizes: [usize; N],
) -> ort::Result<Tensor<T>> {
    Tensor::new(&Allocator::default(), sizes)
}

/// Bytes of the largest tensors of a run of this shape: mask, logits and hidden states.
pub fn size(set: SetShape, widths: Widths, shape: RunShape) -> usize {
    let mask = shape.tokens * set.rows;
    let outputs = shape.rows * (widths.vocabulary + widths.taps);
    set.lanes * (mask + outputs) * size_of::<f32>()
}

impl RunBinding {
    /// Bytes of its tensors.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Binds a run of this shape to a set.
    pub fn new(
        session: &Session,
        set: SetShape,
        tensors: &mut [Tensor<f32>],
        cache: CacheShape,
        widths: Widths,
        shape: RunShape,
    ) -> ort::Result<Self> {
        let (lanes, tokens) = (set.lanes, shape.tokens);
        let mut run = Self {
            shape,
            used: 0,
            size: size(set, widths, shape),
            binding: session.create_binding()?,
            ids: host([lanes, tokens])?,
            positions: host([lanes, tokens])?,
            write_index: host([lanes])?,
            kv_len: host([lanes])?,
            mask: host([lanes, 1, tokens, set.rows])?,
            rows: host([lanes, shape.rows])?,
            logits: host([lanes, shape.rows, widths.vocabulary])?,
            taps: (widths.taps > 0).then(|| host([lanes, shape.rows, widths.taps])).transpose()?,
        };
        for layer in 0..cache.layers {
            for (kind, offset) in [("k", 0), ("v", 1)] {
                let Some(tensor) = tensors.get_mut(layer * 2 + offset) else { continue };
                run.binding.bind_input(format!("past_{kind}.{layer}"), tensor)?;
                run.binding.bind_output(format!("present_{kind}.{layer}"), tensor)?;
            }
        }
        run.binding.bind_output("logits", &mut run.logits)?;
        if let Some(taps) = &mut run.taps {
            run.binding.bind_output("taps", taps)?;
        }
        run.bind_inputs()?;
        Ok(run)
    }

    /// Binds the small inputs. The CPU shares their memory, so once is enough; a device gets a copy
    /// per run.
    fn bind_inputs(&mut self) -> ort::Result<()> {
        self.binding.bind_input("input_ids", &self.ids)?;
        self.binding.bind_input("positions", &self.positions)?;
        self.binding.bind_input("write_index", &self.write_index)?;
        self.binding.bind_input("kv_len", &self.kv_len)?;
        self.binding.bind_input("mask", &self.mask)?;
        self.binding.bind_input("rows", &self.rows)
    }

    /// Runs the set. `feeds` has one entry per slot: its number of tokens, and its feed.
    pub fn run(
        &mut self,
        session: &mut Session,
        device: Device,
        context: usize,
        feeds: &[(usize, Option<SlotFeed<'_>>)],
    ) -> ort::Result<()> {
        self.fill_positions(context, feeds)?;
        self.fill_mask(feeds)?;
        if device == Device::Cuda {
            self.bind_inputs()?;
            self.binding.synchronize_inputs()?;
        }
        session.run_binding(&self.binding)?;
        if device == Device::Cuda {
            self.binding.synchronize_outputs()?;
        }
        Ok(())
    }

    fn fill_positions(&mut self, context: usize, feeds: &[(usize, Option<SlotFeed<'_>>)]) -> ort::Result<()> {
        let tokens = self.shape.tokens;
        let last = context.saturating_sub(1);
        let ids = self.ids.try_extract_tensor_mut::<i64>()?.1.chunks_exact_mut(tokens);
        let positions = self.positions.try_extract_tensor_mut::<i64>()?.1.chunks_exact_mut(tokens);
        for ((ids, positions), &(len, feed)) in ids.zip(positions).zip(feeds) {
            ids.fill(0);
            positions.fill(len.min(last) as i64);
            let Some(feed) = feed else { continue };
            let taken = feed.tokens.iter().skip(feed.done).take(feed.taking);
            for (index, (&token, (id, position))) in taken.zip(ids.iter_mut().zip(positions)).enumerate() {
                *id = i64::from(token);
                *position = (feed.base + feed.depth(feed.done + index)).min(last) as i64;
            }
        }
        let writes = self.write_index.try_extract_tensor_mut::<i64>()?.1.iter_mut();
        let lens = self.kv_len.try_extract_tensor_mut::<i64>()?.1.iter_mut();
        let rows = self.rows.try_extract_tensor_mut::<i64>()?.1.chunks_exact_mut(self.shape.rows);
        for (((write, kv_len), rows), &(len, feed)) in writes.zip(lens).zip(rows).zip(feeds) {
            *write = len as i64;
            // A slot that sees no row at all would divide by zero.
            *kv_len = (len + feed.map_or(0, |feed| feed.taking)).max(1) as i64;
            rows.fill(0);
            let wanted = feed.map_or(0..0, |feed| feed.rows());
            for (row, token) in rows.iter_mut().zip(wanted) {
                *row = token as i64;
            }
        }
        Ok(())
    }

    fn fill_mask(&mut self, feeds: &[(usize, Option<SlotFeed<'_>>)]) -> ort::Result<()> {
        let (shape, mask) = self.mask.try_extract_tensor_mut::<f32>()?;
        let rows = shape.last().map_or(1, |&rows| rows.max(1) as usize);
        let slots = mask.chunks_exact_mut(rows * self.shape.tokens);
        for (mask, &(_, feed)) in slots.zip(feeds) {
            for (index, mask) in mask.chunks_exact_mut(rows).enumerate() {
                match feed {
                    Some(feed) if index < feed.taking => feed.see(feed.done + index, mask),
                    _ => {
                        mask.fill(UNSEEN);
                        if let Some(first) = mask.first_mut() {
                            *first = 0.0;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The first `count` rows of logits of a slot.
    pub fn logits(&self, slot: usize, count: usize) -> ort::Result<&[f32]> {
        self.rows(&self.logits, slot, count)
    }

    /// The hidden states of the first `count` rows of a slot; empty if no head reads them.
    pub fn taps(&self, slot: usize, count: usize) -> ort::Result<&[f32]> {
        self.taps.as_ref().map_or(Ok(&[]), |taps| self.rows(taps, slot, count))
    }

    fn rows<'a>(&self, output: &'a Tensor<f32>, slot: usize, count: usize) -> ort::Result<&'a [f32]> {
        let (shape, data) = output.try_extract_tensor::<f32>()?;
        let width = shape.last().map_or(0, |&size| size.max(0) as usize);
        let start = slot * self.shape.rows * width;
        Ok(data.get(start..start + count * width).unwrap_or(&[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_run_is_that_of_its_mask_and_outputs() {
        let (set, widths) = (SetShape { rows: 512, lanes: 16 }, Widths { vocabulary: 49_152, taps: 64 });
        let mask = 4 * 16 * 8 * 512;
        let logits = 4 * 16 * 8 * 49_152;
        assert_eq!(size(set, widths, RunShape { tokens: 8, rows: 8 }), mask + logits + 4 * 16 * 8 * 64);
    }
}
