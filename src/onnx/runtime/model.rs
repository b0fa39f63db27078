//! A language model on ONNX Runtime: many sequences, one session, one slot cache without copies.
//!
//! The graph's contract is in `onnx/train/graph.py`. One thread owns a model; its owner (the
//! target's scheduler, the drafter service) merges waiting work into the feeds of one
//! [`Forward::run`].

use std::path::Path;

use ort::session::Session;

use super::cache::{Cache, failed};
use super::description::Description;
use super::device::Device;
use super::foreign::Names;
use super::head::Head;
use super::load::{self, Loaded};
use super::run_binding::{self, BINDINGS_MAX, RunBinding, RunShape, SlotFeed, Widths};
use crate::forward::{Behind, Feed, Forward, HeadDraft, Lane, Logits, ModelConfig, ModelError, validate};
use crate::layout::{Layout, LayoutStep};
use crate::open_error::OpenError;
use crate::options::Options;

/// Maximum number of tokens that one lane takes in one run of the graph; longer feeds are split.
const CHUNK: usize = 128;
/// The layout of a device, with the maximum number of lanes in one tensor set. On CUDA a run takes
/// about as long for many lanes as for one.
fn layout(lanes: usize, context: usize, device: Device) -> Layout {
    match device {
        Device::Cpu => Layout::new(lanes, context, 16),
        Device::Cuda => Layout::new(lanes, context, 128).with_free_tokens(),
    }
}
/// Maximum number of run bindings of a set, the most recently used ones.
const BINDINGS_PER_SET: usize = 32;

pub struct Model {
    config: ModelConfig,
    description: Description,
    device: Device,
    note: String,
    session: Session,
    head: Option<Head>,
    /// Numbers of hidden state of each row that the head reads; 0 without one.
    tap_width: usize,
    layout: Layout,
    cache: Cache,
    steps: Vec<LayoutStep>,
    pairs: Vec<(Lane, usize)>,
    runs: u64,
}

impl Model {
    /// Loads `model.onnx` of a folder, described by its `config.json`.
    ///
    /// # Errors
    /// Besides the errors of opening, [`OpenError::Foreign`] for an export of another tool.
    pub fn open(folder: &Path, options: &Options) -> Result<Self, OpenError> {
        let loaded = load::load(folder, options)?;
        if Names::find(folder, &loaded.session)?.is_some() {
            return Err(OpenError::Foreign { path: loaded.path.display().to_string() });
        }
        Self::of(folder, loaded, options, true)
    }

    /// The model of a loaded graph; `heads`: with the head in its folder, if there is one.
    pub(crate) fn of(
        folder: &Path,
        loaded: Loaded,
        options: &Options,
        heads: bool,
    ) -> Result<Self, OpenError> {
        let description = Description::read(folder)?;
        check_graph(&loaded.session, &description).map_err(|missing| loaded.refused(missing))?;
        let context = options.context.unwrap_or(usize::MAX).min(description.context);
        let taps = width_of(&loaded.session, "taps");
        let head = if heads { Head::find(folder, options, taps, description.vocabulary)? } else { None };
        tracing::info!(model = %folder.display(), device = loaded.note, context, "model loaded");
        Ok(Self {
            config: ModelConfig {
                vocabulary: description.vocabulary,
                context,
                lanes: options.lanes,
                eos: description.eos.clone(),
                proposes: head.as_ref().map_or(0, Head::steps),
            },
            tap_width: if head.is_some() { taps.unwrap_or(0) } else { 0 },
            head,
            device: loaded.device,
            note: loaded.note,
            session: loaded.session,
            layout: layout(options.lanes, context, loaded.device),
            cache: Cache::new(description.cache, loaded.device),
            steps: Vec::new(),
            pairs: Vec::new(),
            runs: 0,
            description,
        })
    }

    /// The device that it runs on and the reason, in one line.
    pub fn device(&self) -> &str {
        &self.note
    }

    /// Takes every step that can be taken, and lets the layout forget what the others were for.
    /// Returns the first error.
    fn apply_steps(&mut self) -> Result<(), ModelError> {
        self.layout.take_steps(&mut self.steps);
        let mut outcome = Ok(());
        for step in self.steps.drain(..) {
            let taken = match step {
                LayoutStep::Create(index, shape) => self.cache.create(&self.session, index, shape),
                LayoutStep::Drop(index) => {
                    self.cache.drop_set(index);
                    Ok(())
                }
                LayoutStep::Copy { from, to, rows } => self.cache.copy(from, to, rows),
            };
            if taken.is_err() {
                self.layout.forget(step);
            }
            outcome = outcome.and(taken);
        }
        outcome
    }

    /// Runs one set until all of its feeds are in the cache.
    fn run_set(&mut self, set: usize, feeds: &[Feed<'_>], logits: &mut Logits) -> Result<(), ModelError> {
        let rows = self.layout.shape(set).map_or(0, |shape| shape.rows);
        let mut members: Vec<Option<(usize, SlotFeed<'_>)>> = Vec::new();
        for lane in self.layout.slots(set) {
            let fed = lane.and_then(|lane| feeds.iter().enumerate().find(|(_, feed)| feed.lane == lane));
            members.push(fed.map(|(index, feed)| (index, slot_feed(feed, self.layout.len(feed.lane)))));
        }
        loop {
            let lens: Vec<usize> = self
                .layout
                .slots(set)
                .iter()
                .zip(&members)
                .map(|(lane, member)| match member {
                    Some((_, feed)) => feed.base + feed.done,
                    None => lane.map_or(0, |lane| self.layout.len(lane)),
                })
                .collect();
            let room = lens.iter().map(|&len| rows.saturating_sub(len)).min().unwrap_or(0);
            let remaining = |feed: &SlotFeed<'_>| feed.tokens.len() - feed.done;
            let longest = members.iter().flatten().map(|(_, feed)| remaining(feed)).max().unwrap_or(0);
            if longest == 0 {
                return Ok(());
            }
            let most = longest.min(CHUNK).min(room);
            for (_, feed) in members.iter_mut().flatten() {
                feed.taking = remaining(feed).min(most);
            }
            let wanted = members.iter().flatten().map(|(_, feed)| feed.rows().len()).max().unwrap_or(0);
            let tokens = RunShape::class(most).min(room);
            let shape = RunShape { tokens, rows: RunShape::class(wanted).min(tokens).max(1) };
            self.run_chunk(set, shape, &lens, &members, logits)?;
            for (_, feed) in members.iter_mut().flatten() {
                feed.done += feed.taking;
            }
        }
    }

    /// Index of the set's run binding of this shape, which is made if there is none.
    fn bind(&mut self, set: usize, shape: RunShape) -> Result<usize, ModelError> {
        let tensors = self.cache.set(set)?;
        if let Some(known) = tensors.bindings.iter().position(|binding| binding.shape == shape) {
            return Ok(known);
        }
        let widths = Widths { vocabulary: self.config.vocabulary, taps: self.tap_width };
        let bytes = run_binding::size(tensors.shape, widths, shape);
        self.cache.make_room(bytes, BINDINGS_MAX);
        let set = self.cache.set(set)?;
        let oldest =
            set.bindings.iter().enumerate().min_by_key(|(_, binding)| binding.used).map(|(index, _)| index);
        if let (Some(oldest), true) = (oldest, set.bindings.len() >= BINDINGS_PER_SET) {
            set.bindings.swap_remove(oldest);
        }
        let cache = self.description.cache;
        let binding = RunBinding::new(&self.session, set.shape, &mut set.tensors, cache, widths, shape);
        set.bindings.push(binding.map_err(|error| failed(&error))?);
        Ok(set.bindings.len() - 1)
    }

    fn run_chunk(
        &mut self,
        set: usize,
        shape: RunShape,
        lens: &[usize],
        members: &[Option<(usize, SlotFeed<'_>)>],
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        if shape.tokens == 0 {
            return Err(ModelError::Runtime("a cache set has no room for padding".to_owned()));
        }
        let index = self.bind(set, shape)?;
        let Some(binding) = self.cache.set(set)?.bindings.get_mut(index) else {
            return Err(ModelError::Runtime("a run binding is gone".to_owned()));
        };
        self.runs += 1;
        binding.used = self.runs;
        let feeds: Vec<_> =
            lens.iter().zip(members).map(|(&len, member)| (len, member.map(|(_, feed)| feed))).collect();
        binding
            .run(&mut self.session, self.device, self.description.context, &feeds)
            .map_err(|error| failed(&error))?;
        for (slot, member) in members.iter().enumerate() {
            let Some((feed, taken)) = member else { continue };
            let rows = taken.rows();
            if rows.is_empty() {
                continue;
            }
            let values = binding.logits(slot, rows.len()).map_err(|error| failed(&error))?;
            let first = (taken.done + rows.start).saturating_sub(taken.wanted);
            logits.write(*feed, first, values);
            let states = binding.taps(slot, rows.len()).map_err(|error| failed(&error))?;
            logits.write_taps(*feed, first, states);
        }
        Ok(())
    }
}

fn slot_feed<'a>(feed: &Feed<'a>, base: usize) -> SlotFeed<'a> {
    SlotFeed {
        base,
        done: 0,
        tokens: feed.tokens,
        parents: feed.parents,
        taking: 0,
        wanted: feed.tokens.len() - feed.wanted(),
    }
}

/// The last size of an output; `None` if the graph has no such output, or it is not fixed.
fn width_of(session: &Session, name: &str) -> Option<usize> {
    let outlet = session.outputs().iter().find(|outlet| outlet.name() == name)?;
    usize::try_from(*outlet.dtype().tensor_shape()?.last()?).ok()
}

/// Checks that the graph has the inputs and outputs of the contract, and the layers of its
/// description.
fn check_graph(session: &Session, description: &Description) -> Result<(), String> {
    let has =
        |name: &str| session.inputs().iter().chain(session.outputs()).any(|outlet| outlet.name() == name);
    let fixed = ["input_ids", "positions", "write_index", "kv_len", "mask", "rows", "logits"];
    let mut names: Vec<String> = fixed.iter().map(|&name| name.to_owned()).collect();
    for layer in 0..description.cache.layers {
        names.extend(["past_k", "past_v", "present_k", "present_v"].map(|kind| format!("{kind}.{layer}")));
    }
    match names.iter().find(|name| !has(name)) {
        Some(missing) => Err(format!("the graph has no {missing}: it is not a slot-cache export")),
        None => Ok(()),
    }
}

impl Forward for Model {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reserve(&mut self) -> Option<Lane> {
        self.layout.reserve()
    }

    fn release(&mut self, lane: Lane) {
        self.layout.release(lane);
    }

    fn len(&self, lane: Lane) -> usize {
        self.layout.len(lane)
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        let len = len.min(self.layout.len(lane));
        self.layout.set_len(lane, len);
    }

    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        let len = self.layout.len(lane);
        let ascends = path.windows(2).all(|pair| matches!(pair, [a, b] if a < b));
        if !ascends || base > len || path.last().is_some_and(|&last| base + last >= len) {
            return Err(ModelError::Invalid(format!("cannot commit rows {path:?} after {base} of {len}")));
        }
        let moves = path.iter().enumerate().any(|(to, &from)| to != from);
        if let (true, Some(address)) = (moves, self.layout.address(lane)) {
            self.cache.compact(address, base, path)?;
        }
        self.layout.set_len(lane, base + path.len());
        Ok(())
    }

    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        self.layout.fork(from, to, len)?;
        self.apply_steps()
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        validate(feeds, self.config.vocabulary)?;
        self.pairs.clear();
        self.pairs.extend(feeds.iter().map(|feed| (feed.lane, feed.tokens.len())));
        self.layout.prepare(&self.pairs)?;
        self.apply_steps()?;
        let mut logits =
            Logits::zeroed(self.config.vocabulary, feeds.iter().map(Feed::wanted)).with_taps(self.tap_width);
        let mut sets: Vec<usize> =
            feeds.iter().filter_map(|feed| Some(self.layout.address(feed.lane)?.set)).collect();
        sets.sort_unstable();
        sets.dedup();
        for set in sets {
            self.run_set(set, feeds, &mut logits)?;
        }
        for feed in feeds {
            self.layout.set_len(feed.lane, self.layout.len(feed.lane) + feed.tokens.len());
        }
        Ok(logits)
    }

    fn propose(&mut self, behind: &[Behind<'_>]) -> Vec<HeadDraft> {
        self.head.as_mut().map(|head| head.propose(behind)).unwrap_or_default()
    }
}
