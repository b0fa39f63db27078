//! A language model exported by another tool: by optimum, as the models of onnx-community are, or
//! by the model builder of onnxruntime-genai.
//!
//! Such a graph takes all keys and values of a sequence and returns longer ones. Each lane
//! therefore has separate tensors and runs by itself: sequences of different lengths do not fit
//! into one run, and `GroupQueryAttention` refuses several sequences with several new tokens each.
//! The output of one run is the input of the next, without a copy; only a rewound lane is cut to
//! its length before its next run. A graph with such a cache reads chains and no trees; a drafter
//! feeds chains only.

mod cut;
mod files;
mod names;

use std::path::Path;

use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, Session};
use ort::value::{DynValue, Tensor};

use self::cut::{Cutter, Widener, empty};
use self::files::Facts;
pub use self::names::Names;
use self::names::Signature;
use super::cache::failed;
use super::device::Device;
use super::load::{self, Loaded};
use crate::forward::{Feed, Forward, Lane, Logits, ModelConfig, ModelError, validate};
use crate::open_error::OpenError;
use crate::options::{DeviceChoice, Options};

/// Maximum number of tokens in one run; longer feeds are split.
const CHUNK: usize = 128;

/// The sequence of a lane.
#[derive(Default)]
struct Sequence {
    /// Tokens of the sequence.
    len: usize,
    /// Tokens in the tensors: more than `len` after a rewind.
    rows: usize,
    /// Keys and values of layer 0, of layer 1, …; none before the first run.
    tensors: Vec<DynValue>,
}

/// A loaded model that another tool exported.
pub struct ForeignModel {
    config: ModelConfig,
    signature: Signature,
    /// Declared before the sessions, whose memory they use, and which must be dropped later.
    lanes: Vec<Option<Sequence>>,
    cutter: Cutter,
    widener: Option<Widener>,
    session: Session,
    /// Memory of keys and values.
    memory: MemoryInfo<'static>,
    host: MemoryInfo<'static>,
}

fn memory(device: Device) -> ort::Result<MemoryInfo<'static>> {
    let device = match device {
        Device::Cpu => AllocationDevice::CPU,
        Device::Cuda => AllocationDevice::CUDA,
    };
    MemoryInfo::new(device, 0, AllocatorType::Device, MemoryType::Default)
}

impl ForeignModel {
    /// The model of a loaded graph.
    pub(crate) fn of(
        folder: &Path,
        loaded: Loaded,
        names: Names,
        options: &Options,
    ) -> Result<Self, OpenError> {
        let facts = Facts::read(folder)?;
        let refused = |error: ort::Error| loaded.refused(error);
        let signature =
            Signature::read(&loaded.session, names, &facts).map_err(|reason| loaded.refused(reason))?;
        let vocabulary = signature.vocabulary.or(facts.vocabulary);
        let vocabulary = vocabulary.ok_or_else(|| {
            loaded.refused("neither the graph nor its files declare the number of token ids")
        })?;
        let context = [options.context, facts.context].into_iter().flatten().min();
        let context = context.ok_or_else(|| {
            loaded.refused("neither the options nor the files declare the maximum context length")
        })?;
        // The graphs that cut and widen run on the device of their inputs.
        let on = |device: Device| match device {
            Device::Cpu => load::builder(DeviceChoice::Cpu, options),
            Device::Cuda => load::builder(DeviceChoice::Cuda, options),
        };
        let device_memory = memory(loaded.device).map_err(refused)?;
        let cutter = Cutter::new(&on(loaded.device)?.builder, &signature.slots, device_memory.clone());
        let widener = match signature.logits {
            ort::value::TensorElementType::Float32 => None,
            narrow => Some(Widener::new(&on(Device::Cpu)?.builder, narrow).map_err(refused)?),
        };
        let layers = signature.slots.len() / 2;
        let device = loaded.note.as_str();
        tracing::info!(model = %folder.display(), device, context, layers, "model of another tool loaded");
        Ok(Self {
            config: ModelConfig { vocabulary, context, lanes: options.lanes, eos: facts.eos, proposes: 0 },
            lanes: (0..options.lanes).map(|_| None).collect(),
            cutter: cutter.map_err(refused)?,
            widener,
            memory: device_memory,
            host: memory(Device::Cpu).map_err(refused)?,
            signature,
            session: loaded.session,
        })
    }

    fn sequence(&mut self, lane: Lane) -> Result<&mut Sequence, ModelError> {
        let sequence = self.lanes.get_mut(lane.0).and_then(Option::as_mut);
        sequence.ok_or_else(|| ModelError::Invalid(format!("lane {} is not reserved", lane.0)))
    }

    /// Checks a feed against its lane's length and the abilities of such a graph.
    fn check(&mut self, feed: &Feed<'_>) -> Result<(), ModelError> {
        if feed.parents.is_some() {
            return Err(ModelError::Invalid(
                "a model of another tool reads chains of tokens and no trees".to_owned(),
            ));
        }
        let (wanted, context) = (self.sequence(feed.lane)?.len + feed.tokens.len(), self.config.context);
        if wanted > context { Err(ModelError::Full { wanted, context }) } else { Ok(()) }
    }

    /// Cuts the tensors of a lane to its length.
    fn settle(&mut self, lane: Lane) -> Result<(), ModelError> {
        let sequence = self.lanes.get_mut(lane.0).and_then(Option::as_mut);
        let Some(sequence) = sequence else {
            return Err(ModelError::Invalid(format!("lane {} is gone", lane.0)));
        };
        if sequence.len == 0 {
            let empty = self.signature.slots.iter().map(empty).collect::<ort::Result<_>>();
            sequence.tensors = empty.map_err(|error| failed(&error))?;
        } else if sequence.rows > sequence.len {
            sequence.tensors =
                self.cutter.cut(&sequence.tensors, sequence.len).map_err(|error| failed(&error))?;
        }
        sequence.rows = sequence.len;
        Ok(())
    }

    /// Runs one feed. The lane's length stays unchanged, so that a failure changes nothing; the
    /// tokens that were run are in its tensors.
    fn run_feed(&mut self, index: usize, feed: &Feed<'_>, logits: &mut Logits) -> Result<(), ModelError> {
        self.settle(feed.lane)?;
        let sequence = self.sequence(feed.lane)?;
        let mut tensors = std::mem::take(&mut sequence.tensors);
        let mut rows = sequence.rows;
        let outcome = self.run_chunks(index, feed, &mut tensors, &mut rows, logits);
        let sequence = self.sequence(feed.lane)?;
        sequence.tensors = tensors;
        sequence.rows = rows;
        outcome
    }

    /// Runs a feed chunk by chunk, after a cache of `cached` rows.
    fn run_chunks(
        &mut self,
        index: usize,
        feed: &Feed<'_>,
        tensors: &mut Vec<DynValue>,
        cached: &mut usize,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let first = feed.tokens.len() - feed.wanted();
        let mut done = 0;
        while let Some(remaining) = feed.tokens.get(done..).filter(|remaining| !remaining.is_empty()) {
            let taking = self.taking(*cached, remaining.len(), first.saturating_sub(done));
            let tokens = remaining.get(..taking).unwrap_or(remaining);
            let from = first.max(done);
            let rows = (done + tokens.len()).saturating_sub(from);
            let (present, values) =
                self.step(tensors, *cached, tokens, rows).map_err(|error| failed(&error))?;
            *tensors = present;
            *cached += tokens.len();
            done += tokens.len();
            if let Some(values) = values {
                self.write(index, from - first, rows, &values, logits)?;
            }
        }
        Ok(())
    }

    /// Number of `remaining` tokens that one run takes, if rows are wanted only after the first
    /// `unwanted` of them.
    fn taking(&self, past: usize, remaining: usize, unwanted: usize) -> usize {
        // The branch of a merged decoder that continues a text was exported for one token.
        let most = if self.signature.branch.is_some() && past > 0 { 1 } else { CHUNK };
        let most = if self.signature.last_only { most.min(unwanted + 1) } else { most };
        remaining.min(most)
    }

    /// One run of the graph: keys and values with the tokens, and the logits if rows are wanted.
    fn step(
        &mut self,
        past: &[DynValue],
        len: usize,
        tokens: &[u32],
        rows: usize,
    ) -> ort::Result<(Vec<DynValue>, Option<DynValue>)> {
        let mut binding = self.session.create_binding()?;
        self.bind_tokens(&mut binding, len, tokens)?;
        for (slot, tensor) in self.signature.slots.iter().zip(past) {
            binding.bind_input(slot.past.as_str(), tensor)?;
            binding.bind_output_to_device(slot.present.as_str(), &self.memory)?;
        }
        let name = self.signature.names.outputs.logits.as_str();
        if rows > 0 {
            binding.bind_output_to_device(name, &self.host)?;
        }
        binding.synchronize_inputs()?;
        let mut outputs = self.session.run_binding(&binding)?;
        binding.synchronize_outputs()?;
        let present: Option<_> =
            self.signature.slots.iter().map(|slot| outputs.remove(&slot.present)).collect();
        let present = present.ok_or_else(|| ort::Error::new("a run gave no keys and values"))?;
        let logits = outputs.remove(name);
        let logits = match &mut self.widener {
            Some(widener) => logits.map(|narrow| widener.widen(&narrow)).transpose()?,
            None => logits,
        };
        Ok((present, logits))
    }

    fn bind_tokens(&self, binding: &mut IoBinding, len: usize, tokens: &[u32]) -> ort::Result<()> {
        let names = &self.signature.names.inputs;
        let row = |values: Vec<i64>| Tensor::from_array(([1, values.len()], values));
        let end = len + tokens.len();
        binding.bind_input(
            names.input_ids.as_str(),
            &row(tokens.iter().map(|&token| token.into()).collect())?,
        )?;
        binding.bind_input(names.attention_mask.as_str(), &row(vec![1; end])?)?;
        if self.signature.positions {
            binding.bind_input(names.position_ids.as_str(), &row((len as i64..end as i64).collect())?)?;
        }
        if let Some(branch) = self.signature.branch {
            binding.bind_input(branch, &Tensor::from_array(([1_usize], vec![len > 0]))?)?;
        }
        Ok(())
    }

    /// Writes the last `rows` rows of a run to a feed, from its row `to` on.
    fn write(
        &self,
        feed: usize,
        to: usize,
        rows: usize,
        values: &DynValue,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let (_, values) = values.try_extract_tensor::<f32>().map_err(|error| failed(&error))?;
        let wanted = rows * self.config.vocabulary;
        let Some(values) = values.len().checked_sub(wanted).and_then(|start| values.get(start..)) else {
            let found = values.len();
            return Err(ModelError::Runtime(format!("{found} logits where {wanted} were expected")));
        };
        logits.write(feed, to, values);
        Ok(())
    }
}

impl Forward for ForeignModel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reserve(&mut self) -> Option<Lane> {
        let free = self.lanes.iter().position(Option::is_none)?;
        *self.lanes.get_mut(free)? = Some(Sequence::default());
        Some(Lane(free))
    }

    fn release(&mut self, lane: Lane) {
        if let Some(entry) = self.lanes.get_mut(lane.0) {
            *entry = None;
        }
    }

    fn len(&self, lane: Lane) -> usize {
        self.lanes.get(lane.0).and_then(Option::as_ref).map_or(0, |sequence| sequence.len)
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        if let Ok(sequence) = self.sequence(lane) {
            sequence.len = sequence.len.min(len);
        }
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        validate(feeds, self.config.vocabulary)?;
        for feed in feeds {
            self.check(feed)?;
        }
        let mut logits = Logits::zeroed(self.config.vocabulary, feeds.iter().map(Feed::wanted));
        for (index, feed) in feeds.iter().enumerate() {
            self.run_feed(index, feed, &mut logits)?;
        }
        for feed in feeds {
            self.sequence(feed.lane)?.len += feed.tokens.len();
        }
        Ok(logits)
    }
}
