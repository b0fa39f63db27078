//! The JSON that a prompt requests: schemas, tools and examples in its text, as shapes of the
//! objects that a model may write.
//!
//! The prompt is read once, byte by byte, one object at a time. Clients write it, and the schema
//! that constrains an output: the number of shapes, their size and the values that are read for
//! them are limited, and the first ones are stored. Nothing is compiled.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::json::{Event, Position, Scanner, Style, WORD_MAX};

/// Maximum bytes of an object of the prompt; a longer one is skipped.
const OBJECT_MAX: usize = 64 << 10;
/// Maximum number of shapes.
const SHAPES_MAX: usize = 4096;
/// Maximum size of the keys, choices and fields of all shapes, bytes.
const ALLOCATED_MAX: usize = 1 << 20;
/// Maximum values that are read for shapes: a schema may refer to one of its parts many times, and
/// each time its members, the names of the required ones and the choices are read.
const READ_MAX: usize = 64 << 10;
/// Maximum number of shapes of complete objects.
const ROOTS_MAX: usize = 256;
/// Maximum depth of references and nested parts that are followed in a schema.
const FOLLOWED_MAX: usize = 24;
/// Maximum bytes of a line that may be the template of a call.
const TEMPLATE_MAX: usize = 256;

pub type ShapeId = usize;

/// The possible values at a position.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    Object(Vec<Field>),
    Array(ShapeId),
    /// One of these values, as they are written.
    Choices(Vec<String>),
    Text,
    Free,
}

impl Shape {
    /// Bytes that it has allocated.
    fn allocated(&self) -> usize {
        match self {
            Self::Object(fields) => {
                let keys = fields.iter().map(|field| field.key.capacity()).sum::<usize>();
                fields.capacity() * size_of::<Field>() + keys
            }
            Self::Choices(choices) => {
                let texts = choices.iter().map(String::capacity).sum::<usize>();
                choices.capacity() * size_of::<String>() + texts
            }
            Self::Array(_) | Self::Text | Self::Free => 0,
        }
    }
}

/// A member of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Its name as it is written, without quotes.
    pub key: String,
    /// False only if its schema lists the required members without it.
    pub required: bool,
    pub shape: ShapeId,
}

/// The form in which a model answers by a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A call of a tool: `{"name": …, "arguments": {…}}`.
    Arguments,
    /// A call of a tool: `{"name": …, "parameters": {…}}`.
    Parameters,
    /// An object of the schema, or the arguments of a tool by themselves.
    Plain,
    /// An object with the keys of another one in the prompt.
    Example,
}

impl Form {
    /// Every form; the most likely first, where nothing else is known.
    const ALL: [Self; 4] = [Self::Arguments, Self::Parameters, Self::Plain, Self::Example];

    /// Every form, this one first.
    pub fn beginning(with: Option<Self>) -> impl Iterator<Item = Self> {
        with.into_iter().chain(Self::ALL.into_iter().filter(move |form| Some(*form) != with))
    }
}

/// The shapes that a prompt requests.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    all: Vec<Shape>,
    roots: Vec<(Form, ShapeId)>,
    tools: HashSet<String>,
    /// Bytes of fields, choices and the names of tools.
    allocated: usize,
    /// Number of values that were read.
    read: usize,
    /// A schema constrains the output: no other object is written.
    constrained: bool,
}

/// The document that contains a schema, for its references, and the depth in it.
#[derive(Clone, Copy)]
struct Within<'a> {
    document: &'a Value,
    depth: usize,
}

impl Shapes {
    /// Bytes that are allocated for them. Called at every step of a session, so the bytes are
    /// counted when a shape is added.
    const fn bytes(&self) -> usize {
        self.all.capacity() * size_of::<Shape>()
            + self.roots.capacity() * size_of::<(Form, ShapeId)>()
            + self.allocated
    }

    /// The shape of this id; `None` beyond the last.
    pub fn get(&self, id: ShapeId) -> Option<&Shape> {
        self.all.get(id)
    }

    /// The objects that the model may write, in the order of the prompt.
    pub fn roots(&self) -> &[(Form, ShapeId)] {
        &self.roots
    }

    /// Learns the shapes that an object of the prompt requests. Returns the form of a call if it is
    /// a call of a known tool.
    fn learn(&mut self, document: &Value) -> Option<Form> {
        if self.constrained {
            return None;
        }
        let form = self.called(document);
        if !self.collect(Within { document, depth: 0 }, document) {
            let shape = self.example(document, 0);
            self.root(Form::Example, shape);
        }
        form
    }

    fn called(&self, value: &Value) -> Option<Form> {
        let name = value.get("name")?.as_str()?;
        let form = |key: &str, form| value.get(key).map(|_| form);
        let form = form("arguments", Form::Arguments).or_else(|| form("parameters", Form::Parameters));
        if self.tools.contains(name) { form } else { None }
    }

    /// Looks for tools and schemas; true if there is one.
    fn collect(&mut self, within: Within<'_>, value: &Value) -> bool {
        if within.depth > FOLLOWED_MAX || self.is_full() {
            return false;
        }
        let inner = Within { depth: within.depth + 1, ..within };
        match value {
            Value::Object(members) => {
                if let Some((name, schema)) = tool(members) {
                    self.tool(name, within, schema);
                    true
                } else if is_schema(members) {
                    let shape = self.schema(within, value);
                    self.root(Form::Plain, shape);
                    true
                } else {
                    self.collect_all(inner, members.values())
                }
            }
            Value::Array(items) => self.collect_all(inner, items),
            _ => false,
        }
    }

    fn collect_all<'a>(&mut self, within: Within<'_>, values: impl IntoIterator<Item = &'a Value>) -> bool {
        let mut found = false;
        for value in values {
            found |= self.collect(within, value);
        }
        found
    }

    fn is_full(&self) -> bool {
        self.all.len() >= SHAPES_MAX || self.roots.len() >= ROOTS_MAX || self.read >= READ_MAX
    }

    /// Counts values before they are read; `None` if they are too many.
    fn read(&mut self, values: usize) -> Option<()> {
        self.read = self.read.saturating_add(values);
        (self.read < READ_MAX).then_some(())
    }

    fn root(&mut self, form: Form, shape: Option<ShapeId>) {
        let Some(shape) = shape else { return };
        if self.roots.len() < ROOTS_MAX
            && matches!(self.get(shape), Some(Shape::Object(fields)) if !fields.is_empty())
        {
            self.roots.push((form, shape));
        }
    }

    fn push(&mut self, shape: Shape) -> Option<ShapeId> {
        let allocated = self.allocated + shape.allocated();
        (self.all.len() < SHAPES_MAX && allocated <= ALLOCATED_MAX).then(|| {
            self.allocated = allocated;
            self.all.push(shape);
            self.all.len() - 1
        })
    }

    fn tool(&mut self, name: &str, within: Within<'_>, schema: &Value) {
        // References of a tool's schema point to definitions within that schema.
        let Some(arguments) = self.schema(Within { document: schema, ..within }, schema) else { return };
        let Some(called) = written(&Value::from(name)).and_then(|name| self.push(Shape::Choices(vec![name])))
        else {
            return;
        };
        for (form, key) in [(Form::Arguments, "arguments"), (Form::Parameters, "parameters")] {
            let field = |key: &str, shape| Field { key: key.to_owned(), required: true, shape };
            let call = self.push(Shape::Object(vec![field("name", called), field(key, arguments)]));
            self.root(form, call);
        }
        if self.tools.insert(name.to_owned()) {
            self.allocated += size_of::<String>() + name.len();
        }
        self.root(Form::Plain, Some(arguments));
    }

    fn schema(&mut self, within: Within<'_>, schema: &Value) -> Option<ShapeId> {
        let Within { document, depth } = within;
        let inner = Within { document, depth: depth + 1 };
        self.read(1)?;
        if depth > FOLLOWED_MAX {
            return self.push(Shape::Free);
        }
        if let Some(path) = schema.get("$ref").and_then(Value::as_str) {
            let path = path.strip_prefix('#').filter(|path| path.len() <= WORD_MAX);
            return match path.and_then(|path| document.pointer(path)) {
                Some(target) => self.schema(inner, target),
                None => self.push(Shape::Free),
            };
        }
        if let Some([only]) = schema.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
            return self.schema(inner, only);
        }
        self.read(schema.get("enum").and_then(Value::as_array).map_or(0, Vec::len))?;
        if let Some(choices) = choices(schema) {
            return self.push(Shape::Choices(choices));
        }
        let shape = match (schema.get("properties"), schema.get("items"), schema.get("type")) {
            (Some(Value::Object(properties)), ..) => self.object(inner, schema, properties)?,
            (_, Some(items), _) => Shape::Array(self.schema(inner, items)?),
            (_, _, Some(Value::String(kind))) if kind == "string" => Shape::Text,
            (_, _, Some(Value::String(kind))) if kind == "object" => Shape::Object(Vec::new()),
            _ => Shape::Free,
        };
        self.push(shape)
    }

    fn object(
        &mut self,
        inner: Within<'_>,
        schema: &Value,
        properties: &Map<String, Value>,
    ) -> Option<Shape> {
        let required = schema.get("required").and_then(Value::as_array);
        self.read(required.map_or(0, Vec::len))?;
        let required: Option<HashSet<&str>> =
            required.map(|names| names.iter().filter_map(Value::as_str).collect());
        let mut fields = Vec::new();
        for (name, schema) in properties {
            let required = required.as_ref().is_none_or(|required| required.contains(name.as_str()));
            let shape = self.schema(inner, schema)?;
            fields.extend(key(name).map(|key| Field { key, required, shape }));
        }
        Some(Shape::Object(fields))
    }

    fn example(&mut self, value: &Value, depth: usize) -> Option<ShapeId> {
        self.read(1)?;
        if depth > FOLLOWED_MAX {
            return None;
        }
        let shape = match value {
            Value::Object(members) => {
                let mut fields = Vec::new();
                for (name, value) in members {
                    let shape = self.example(value, depth + 1)?;
                    fields.extend(key(name).map(|key| Field { key, required: true, shape }));
                }
                Shape::Object(fields)
            }
            Value::Array(items) => match items.first() {
                Some(first) => Shape::Array(self.example(first, depth + 1)?),
                None => Shape::Free,
            },
            Value::String(_) => Shape::Text,
            _ => Shape::Free,
        };
        self.push(shape)
    }
}

/// Name and schema of a tool.
fn tool(members: &Map<String, Value>) -> Option<(&str, &Value)> {
    let name = members.get("name")?.as_str()?;
    let schemas = ["parameters", "input_schema", "inputSchema"];
    let schema = schemas.iter().find_map(|key| members.get(*key))?;
    schema.as_object().is_some_and(is_schema).then_some((name, schema))
}

/// True if it is the schema of an object.
fn is_schema(members: &Map<String, Value>) -> bool {
    let of_objects = members.get("type").is_none_or(|kind| kind == "object");
    of_objects && members.get("properties").is_some_and(Value::is_object)
}

/// The values that a schema lists, if it does.
fn choices(schema: &Value) -> Option<Vec<String>> {
    let listed = match (schema.get("const"), schema.get("enum")) {
        (Some(only), _) => std::slice::from_ref(only),
        (None, Some(Value::Array(listed))) => listed,
        (None, _) => return None,
    };
    listed.iter().map(written).collect::<Option<Vec<_>>>().filter(|choices| !choices.is_empty())
}

/// A value as it is written, if it is short and no object or array.
fn written(value: &Value) -> Option<String> {
    let scalar = !value.is_object() && !value.is_array();
    scalar.then(|| value.to_string()).filter(|text| text.len() <= WORD_MAX)
}

/// A key as it is written, without its quotes.
fn key(name: &str) -> Option<String> {
    written(&Value::from(name))?.strip_prefix('"')?.strip_suffix('"').map(str::to_owned)
}

/// The reader of one prompt.
#[derive(Clone, Debug, Default)]
pub struct Finder {
    shapes: Shapes,
    scanner: Scanner,
    /// The object that is being read.
    object: Vec<u8>,
    /// The rest of a line that began like a call but is none: it may be the template of one.
    template: Option<Vec<u8>>,
    /// The form of calls in the prompt, or of a template of calls.
    form: Option<Form>,
    style: Style,
}

impl Finder {
    /// A reader of the prompt of an output that a schema of an object constrains: it reads the
    /// layout alone.
    pub fn constrained(schema: &Value) -> Self {
        let mut finder = Self::default();
        let shape = finder.shapes.schema(Within { document: schema, depth: 0 }, schema);
        finder.shapes.root(Form::Plain, shape);
        finder.shapes.constrained = !finder.shapes.roots.is_empty();
        finder
    }

    /// Bytes that are allocated for the shapes.
    pub fn bytes(&self) -> usize {
        self.object.capacity() + self.template.as_ref().map_or(0, Vec::capacity) + self.shapes.bytes()
    }

    pub fn step(&mut self, byte: u8) {
        self.follow_template(byte);
        let (mut closed, mut broken) = (false, false);
        let began = self.scanner.position() == Position::Outside;
        let call = self.scanner.levels().len() == 1 && self.object.starts_with(b"{\"name\"");
        self.scanner.step(byte, |event| match event {
            Event::Closed => closed = true,
            Event::Broken => broken = true,
            Event::Opened(_) | Event::Key(_) | Event::Scalar(_) => {}
        });
        if began || broken {
            self.object.clear();
        }
        if broken && call {
            self.template = Some(vec![byte]);
        }
        match self.scanner.position() {
            Position::Outside if !closed => {}
            Position::Outside => {
                self.object.push(byte);
                self.learn();
            }
            _ if self.object.len() <= OBJECT_MAX => self.object.push(byte),
            _ => {}
        }
    }

    fn learn(&mut self) {
        let object = std::mem::take(&mut self.object);
        if object.len() > OBJECT_MAX || self.shapes.is_full() {
            return;
        }
        let Ok(value) = serde_json::from_slice(&object) else { return };
        if let Some(form) = self.shapes.learn(&value) {
            self.form = Some(form);
        }
        if !object.contains(&b'\n') {
            self.style = self.scanner.style().clone();
        }
    }

    fn follow_template(&mut self, byte: u8) {
        let Some(line) = &mut self.template else { return };
        if byte != b'\n' && line.len() < TEMPLATE_MAX {
            line.push(byte);
            return;
        }
        let has = |key: &[u8]| line.windows(key.len()).any(|window| window == key);
        let form = if has(b"\"arguments\"") {
            Some(Form::Arguments)
        } else {
            has(b"\"parameters\"").then_some(Form::Parameters)
        };
        self.form = self.form.or(form);
        self.template = None;
    }

    /// The shapes found so far.
    pub fn shapes(&self) -> &Shapes {
        &self.shapes
    }

    /// The form of a call that the prompt shows.
    pub fn form(&self) -> Option<Form> {
        self.form
    }

    /// The layout of the prompt's objects that are written on one line.
    pub fn style(&self) -> &Style {
        &self.style
    }
}

#[cfg(test)]
mod tests;
