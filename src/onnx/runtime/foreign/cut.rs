//! Tensors derived from others on the same device: the first tokens of a cache, and 16-bit numbers
//! as 32-bit ones.
//!
//! Both are ONNX graphs built here. They need no copy through the host, and work for every element
//! type.

use ort::editor::{Graph, Model, Node, ONNX_DOMAIN, Opset};
use ort::memory::{Allocator, MemoryInfo};
use ort::operator::Attribute;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::{
    DynTensor, DynValue, Outlet, Shape, SymbolicDimensions, Tensor, TensorElementType, ValueType,
};

use super::names::Slot;

/// Opset version: one in which `Slice` and `Cast` accept the forms used here.
const OPSET: u32 = 18;
/// The axis of a key or value tensor that counts tokens.
const TOKENS: i64 = 2;
/// `FLOAT` in ONNX's list of types.
const FLOAT: i64 = 1;

/// Cuts the cache of a lane.
pub struct Cutter {
    session: Session,
    memory: MemoryInfo<'static>,
    count: usize,
}

impl Cutter {
    /// A cutter for the tensors of one lane, whose results are allocated in `memory`.
    pub fn new(builder: &SessionBuilder, slots: &[Slot], memory: MemoryInfo<'static>) -> ort::Result<Self> {
        let mut graph = Graph::new()?;
        let (mut inputs, mut outputs) =
            (vec![outlet("end".to_owned(), TensorElementType::Int64, &[1])], Vec::new());
        for (index, slot) in slots.iter().enumerate() {
            let shape = [1, slot.heads as i64, -1, slot.width as i64];
            inputs.push(outlet(input(index), slot.element, &shape));
            outputs.push(outlet(part(index), slot.element, &shape));
        }
        graph.set_inputs(inputs)?;
        graph.set_outputs(outputs)?;
        graph.add_initializer("begin", one(0)?, false)?;
        graph.add_initializer("axis", one(TOKENS)?, false)?;
        for index in 0..slots.len() {
            let inputs = [input(index), "begin".to_owned(), "end".to_owned(), "axis".to_owned()];
            graph.add_node(Node::new(
                "Slice",
                ONNX_DOMAIN,
                format!("cut.{index}"),
                inputs,
                [part(index)],
                [],
            )?)?;
        }
        Ok(Self { session: session(graph, builder)?, memory, count: slots.len() })
    }

    /// The first `len` tokens of every tensor, in new tensors.
    pub fn cut(&mut self, tensors: &[DynValue], len: usize) -> ort::Result<Vec<DynValue>> {
        let mut binding = self.session.create_binding()?;
        binding.bind_input("end", &one(len as i64)?)?;
        for (index, tensor) in tensors.iter().enumerate() {
            binding.bind_input(input(index), tensor)?;
            binding.bind_output_to_device(part(index), &self.memory)?;
        }
        let mut outputs = self.session.run_binding(&binding)?;
        binding.synchronize_outputs()?;
        Ok((0..self.count).filter_map(|index| outputs.remove(part(index))).collect())
    }
}

/// Converts logits to 32-bit numbers.
pub struct Widener(Session);

impl Widener {
    /// A widener of tensors `[1, rows, vocabulary]` of this type. Runs on the CPU, where logits are
    /// read.
    pub fn new(builder: &SessionBuilder, element: TensorElementType) -> ort::Result<Self> {
        let mut graph = Graph::new()?;
        graph.set_inputs([outlet("narrow".to_owned(), element, &[1, -1, -1])])?;
        graph.set_outputs([outlet("wide".to_owned(), TensorElementType::Float32, &[1, -1, -1])])?;
        let to = Attribute::new("to", FLOAT)?;
        graph.add_node(Node::new("Cast", ONNX_DOMAIN, "widen", ["narrow"], ["wide"], [to])?)?;
        Ok(Self(session(graph, builder)?))
    }

    /// The same numbers with 32 bits.
    pub fn widen(&mut self, logits: &DynValue) -> ort::Result<DynValue> {
        let mut outputs = self.0.run(ort::inputs!["narrow" => logits])?;
        outputs.remove("wide").ok_or_else(|| ort::Error::new("a cast gave nothing"))
    }
}

/// A tensor without tokens, as before the first run.
pub fn empty(slot: &Slot) -> ort::Result<DynValue> {
    Ok(DynTensor::new(&Allocator::default(), slot.element, [1, slot.heads, 0, slot.width])?.into_dyn())
}

fn input(index: usize) -> String {
    format!("input.{index}")
}

fn part(index: usize) -> String {
    format!("part.{index}")
}

/// One number in memory owned by the runtime, as initializers require.
fn one(value: i64) -> ort::Result<Tensor<i64>> {
    let mut tensor = Tensor::<i64>::new(&Allocator::default(), [1_usize])?;
    tensor.try_extract_tensor_mut::<i64>()?.1.fill(value);
    Ok(tensor)
}

fn outlet(name: String, ty: TensorElementType, shape: &[i64]) -> Outlet {
    let dimension_symbols = SymbolicDimensions::empty(shape.len());
    Outlet::new(name, ValueType::Tensor { ty, shape: Shape::new(shape.iter().copied()), dimension_symbols })
}

fn session(graph: Graph, builder: &SessionBuilder) -> ort::Result<Session> {
    let mut model = Model::new([Opset::new(ONNX_DOMAIN, OPSET)?])?;
    model.set_graph(graph)?;
    model.into_session(builder)
}
