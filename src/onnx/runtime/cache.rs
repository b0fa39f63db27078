//! The tensors of the slot cache, and the copies between them.
//!
//! Each set has, per layer, one key and one value tensor `[lanes, kv_heads, rows, head_dim]`,
//! zeroed on creation: the masked product of a row that was never written must be a number. On CUDA
//! the rows are in device memory, which this process cannot address; a copy then takes complete
//! tensors through host memory. That is slow but correct, and happens only when a sequence moves.

use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::value::Tensor;

use super::description::CacheShape;
use super::device::Device;
use super::run_binding::RunBinding;
use crate::forward::ModelError;
use crate::layout::{SetShape, SlotAddress};

/// One set: its tensors (keys and values of layer 0, of layer 1, …) and its run bindings.
pub struct TensorSet {
    /// Lanes and length of the set.
    pub shape: SetShape,
    /// Keys and values, layer by layer.
    pub tensors: Vec<Tensor<f32>>,
    /// Run bindings, by shape.
    pub bindings: Vec<RunBinding>,
}

/// Every set of key and value tensors.
pub struct Cache {
    shape: CacheShape,
    device: Device,
    sets: Vec<Option<TensorSet>>,
}

pub(super) fn failed(error: &ort::Error) -> ModelError {
    ModelError::Runtime(error.to_string())
}

impl Cache {
    /// A cache without sets.
    pub fn new(shape: CacheShape, device: Device) -> Self {
        Self { shape, device, sets: Vec::new() }
    }

    /// The set with this index; an error if it was not created.
    pub fn set(&mut self, index: usize) -> Result<&mut TensorSet, ModelError> {
        let entry = self.sets.get_mut(index).and_then(Option::as_mut);
        entry.ok_or_else(|| ModelError::Runtime(format!("no cache set {index}")))
    }

    pub fn create(&mut self, session: &Session, index: usize, shape: SetShape) -> Result<(), ModelError> {
        let sizes = [shape.lanes, self.shape.heads, shape.rows, self.shape.width];
        let tensors = (0..self.shape.layers * 2)
            .map(|_| self.zeros(session, sizes))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| failed(&error))?;
        if self.sets.len() <= index {
            self.sets.resize_with(index + 1, || None);
        }
        if let Some(entry) = self.sets.get_mut(index) {
            *entry = Some(TensorSet { shape, tensors, bindings: Vec::new() });
        }
        Ok(())
    }

    fn zeros(&self, session: &Session, sizes: [usize; 4]) -> ort::Result<Tensor<f32>> {
        // `Tensor::new` zeroes memory that the host can address.
        match self.device {
            Device::Cpu => Tensor::new(session.allocator(), sizes),
            Device::Cuda => {
                let info =
                    MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Device, MemoryType::Default)?;
                let mut tensor = Tensor::new(&Allocator::new(session, info)?, sizes)?;
                Tensor::<f32>::new(&Allocator::default(), sizes)?.copy_into(&mut tensor)?;
                Ok(tensor)
            }
        }
    }

    /// Frees the tensors of a set.
    pub fn drop_set(&mut self, index: usize) {
        if let Some(entry) = self.sets.get_mut(index) {
            *entry = None;
        }
    }

    /// Drops the run bindings that were used longest ago, of any set, until one of this many bytes
    /// fits into the limit with the others.
    pub fn make_room(&mut self, bytes: usize, limit: usize) {
        let runs = self.sets.iter().flatten().flat_map(|set| &set.bindings);
        let runs: Vec<(u64, usize)> = runs.map(|binding| (binding.used, binding.size())).collect();
        let from = first_retained(runs, limit.saturating_sub(bytes));
        for set in self.sets.iter_mut().flatten() {
            set.bindings.retain(|binding| binding.used >= from);
        }
    }

    /// Copies the first rows of a slot to another slot.
    pub fn copy(&mut self, from: SlotAddress, to: SlotAddress, rows: usize) -> Result<(), ModelError> {
        let (heads, width) = (self.shape.heads, self.shape.width);
        if from.set == to.set {
            return self.edit(from.set, |shape, data| {
                for head in 0..heads {
                    let start = |slot: usize| (slot * heads + head) * shape.rows * width;
                    let source = start(from.slot)..start(from.slot) + rows * width;
                    data.copy_within(source, start(to.slot));
                }
            });
        }
        let device = self.device;
        let Ok([Some(source), Some(target)]) = self.sets.get_disjoint_mut([from.set, to.set]) else {
            return Err(ModelError::Runtime("a copy between sets that are not there".to_owned()));
        };
        let (have, want) = (source.shape.rows, target.shape.rows);
        for (source, target) in source.tensors.iter_mut().zip(&mut target.tensors) {
            with_host(device, source, false, |old| {
                with_host(device, target, true, |new| {
                    for head in 0..heads {
                        let source = (from.slot * heads + head) * have * width;
                        let target = (to.slot * heads + head) * want * width;
                        let old = old.get(source..source + rows * width);
                        if let (Some(old), Some(new)) = (old, new.get_mut(target..target + rows * width)) {
                            new.copy_from_slice(old);
                        }
                    }
                })
            })
            .and_then(|inner| inner)
            .map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// Moves rows `base + path[i]` of a slot to `base + i`. `path` ascends, so no row is read after
    /// it was written.
    pub fn compact(&mut self, address: SlotAddress, base: usize, path: &[usize]) -> Result<(), ModelError> {
        let (heads, width) = (self.shape.heads, self.shape.width);
        self.edit(address.set, |shape, data| {
            for head in 0..heads {
                let start = ((address.slot * heads + head) * shape.rows + base) * width;
                for (to, &from) in path.iter().enumerate().filter(|&(to, &from)| to != from) {
                    data.copy_within(start + from * width..start + (from + 1) * width, start + to * width);
                }
            }
        })
    }

    fn edit(&mut self, set: usize, mut change: impl FnMut(SetShape, &mut [f32])) -> Result<(), ModelError> {
        let device = self.device;
        let set = self.set(set)?;
        let shape = set.shape;
        for tensor in &mut set.tensors {
            with_host(device, tensor, true, |data| change(shape, data)).map_err(|error| failed(&error))?;
        }
        Ok(())
    }
}

/// Of runs, each with the number of its last use and its bytes, the number from which on the last
/// used ones fit into `limit`; 0 if all do.
fn first_retained(mut runs: Vec<(u64, usize)>, limit: usize) -> u64 {
    runs.sort_unstable_by_key(|&(used, _)| std::cmp::Reverse(used));
    let mut sum = 0;
    let first_over = runs.iter().find(|&&(_, bytes)| {
        sum += bytes;
        sum > limit
    });
    first_over.map_or(0, |&(used, _)| used + 1)
}

/// Runs `work` on a tensor's values, in host or device memory; `write`: copy changes back.
fn with_host<T>(
    device: Device,
    tensor: &mut Tensor<f32>,
    write: bool,
    work: impl FnOnce(&mut [f32]) -> T,
) -> ort::Result<T> {
    match device {
        Device::Cpu => Ok(work(tensor.try_extract_tensor_mut::<f32>()?.1)),
        Device::Cuda => {
            let mut host = tensor.to(AllocationDevice::CPU, 0)?;
            let result = work(host.try_extract_tensor_mut::<f32>()?.1);
            if write {
                host.copy_into(tensor)?;
            }
            Ok(result)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_that_were_used_last_are_kept_while_they_fit() {
        let runs = || vec![(7, 30), (3, 10), (9, 50), (1, 5)];
        assert_eq!(first_retained(runs(), 95), 0);
        assert_eq!(first_retained(runs(), 94), 2);
        assert_eq!(first_retained(runs(), 80), 4);
        assert_eq!(first_retained(runs(), 79), 8);
        assert_eq!(first_retained(runs(), 0), 10);
        assert_eq!(first_retained(Vec::new(), 0), 0);
    }
}
