//! The JSON that a prompt asks for: schemas, tools and examples in its text, as shapes of the
//! objects that a model may write.
//!
//! The prompt is read once, byte by byte. One object of it is held at a time; the number of shapes
//! is bounded, and the first ones are kept.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::json::{Event, Position, Scanner, Style, WORD_MAX};

/// Maximum bytes of an object of the prompt; a longer one is skipped.
const OBJECT_MAX: usize = 64 << 10;
/// Maximum number of shapes.
const SHAPES_MAX: usize = 4096;
/// Maximum number of shapes of whole objects.
const ROOTS_MAX: usize = 256;
/// Maximum depth of references and nested parts that are followed in a schema.
const FOLLOWED_MAX: usize = 24;
/// Maximum bytes of a line that may be the template of a call.
const TEMPLATE_MAX: usize = 256;

/// A shape, by its index in [`Shapes`].
pub type ShapeId = usize;

/// The possible values at a position.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// An object with these members.
    Object(Vec<Field>),
    /// An array of this.
    Array(ShapeId),
    /// One of these values, as they are written.
    Choices(Vec<String>),
    /// Any string.
    Text,
    /// Any value.
    Free,
}

impl Shape {
    /// Bytes that it has allocated.
    fn held(&self) -> usize {
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
    /// The shape of its value.
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

/// The shapes that a prompt asks for.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    all: Vec<Shape>,
    roots: Vec<(Form, ShapeId)>,
    tools: HashSet<String>,
    /// Bytes of fields, choices and the names of tools.
    held: usize,
    /// A schema binds the output: no other object is written.
    bound: bool,
}

/// Context of a schema: the whole one, for its references, and the depth in it.
#[derive(Clone, Copy)]
struct Within<'a> {
    whole: &'a Value,
    depth: usize,
}

impl Shapes {
    /// Bytes that are allocated for them. Called at every step of a session, so the bytes are
    /// counted when a shape is added.
    const fn bytes(&self) -> usize {
        self.all.capacity() * size_of::<Shape>()
            + self.roots.capacity() * size_of::<(Form, ShapeId)>()
            + self.held
    }

    /// The shape of this id; `None` beyond the last.
    pub fn get(&self, id: ShapeId) -> Option<&Shape> {
        self.all.get(id)
    }

    /// The objects that the model may write, in the order of the prompt.
    pub fn roots(&self) -> &[(Form, ShapeId)] {
        &self.roots
    }

    /// Learns the shapes that an object of the prompt asks for. Returns the form of a call if it is
    /// a call of a known tool.
    fn learn(&mut self, whole: &Value) -> Option<Form> {
        if self.bound {
            return None;
        }
        let form = self.called(whole);
        if !self.collect(Within { whole, depth: 0 }, whole) {
            let shape = self.example(whole, 0);
            self.root(Form::Example, shape);
        }
        form
    }

    /// The form of a call.
    fn called(&self, value: &Value) -> Option<Form> {
        let name = value.get("name")?.as_str()?;
        let form = |key: &str, form| value.get(key).map(|_| form);
        let form = form("arguments", Form::Arguments).or_else(|| form("parameters", Form::Parameters));
        form.filter(|_| self.tools.contains(name))
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
        self.all.len() >= SHAPES_MAX || self.roots.len() >= ROOTS_MAX
    }

    fn root(&mut self, form: Form, shape: Option<ShapeId>) {
        let Some(shape) = shape.filter(|_| self.roots.len() < ROOTS_MAX) else { return };
        if matches!(self.get(shape), Some(Shape::Object(fields)) if !fields.is_empty()) {
            self.roots.push((form, shape));
        }
    }

    fn push(&mut self, shape: Shape) -> Option<ShapeId> {
        (self.all.len() < SHAPES_MAX).then(|| {
            self.held += shape.held();
            self.all.push(shape);
            self.all.len() - 1
        })
    }

    fn tool(&mut self, name: &str, within: Within<'_>, schema: &Value) {
        // References of a tool's schema are to its own definitions.
        let Some(arguments) = self.schema(Within { whole: schema, ..within }, schema) else { return };
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
            self.held += size_of::<String>() + name.len();
        }
        self.root(Form::Plain, Some(arguments));
    }

    /// The shape that a schema describes.
    fn schema(&mut self, within: Within<'_>, schema: &Value) -> Option<ShapeId> {
        let Within { whole, depth } = within;
        let inner = Within { whole, depth: depth + 1 };
        if depth > FOLLOWED_MAX {
            return self.push(Shape::Free);
        }
        if let Some(path) = schema.get("$ref").and_then(Value::as_str) {
            let path = path.strip_prefix('#').filter(|path| path.len() <= WORD_MAX);
            return match path.and_then(|path| whole.pointer(path)) {
                Some(target) => self.schema(inner, target),
                None => self.push(Shape::Free),
            };
        }
        if let Some([only]) = schema.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
            return self.schema(inner, only);
        }
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
        let required: Option<HashSet<&str>> = schema
            .get("required")
            .and_then(Value::as_array)
            .map(|names| names.iter().filter_map(Value::as_str).collect());
        let mut fields = Vec::new();
        for (name, schema) in properties {
            let required = required.as_ref().is_none_or(|required| required.contains(name.as_str()));
            let shape = self.schema(inner, schema)?;
            fields.extend(key(name).map(|key| Field { key, required, shape }));
        }
        Some(Shape::Object(fields))
    }

    /// The shape of an object with other values.
    fn example(&mut self, value: &Value, depth: usize) -> Option<ShapeId> {
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
    /// A reader of the prompt of an output that a schema of an object binds: it reads the layout
    /// alone.
    pub fn bound(schema: &Value) -> Self {
        let mut finder = Self::default();
        let shape = finder.shapes.schema(Within { whole: schema, depth: 0 }, schema);
        finder.shapes.root(Form::Plain, shape);
        finder.shapes.bound = !finder.shapes.roots.is_empty();
        finder
    }

    /// Bytes that are allocated for the shapes.
    pub fn bytes(&self) -> usize {
        self.object.capacity() + self.template.as_ref().map_or(0, Vec::capacity) + self.shapes.bytes()
    }

    /// Reads a byte.
    pub fn step(&mut self, byte: u8) {
        self.follow_template(byte);
        let (mut whole, mut broken) = (false, false);
        let began = self.scanner.position() == Position::Outside;
        let call = self.scanner.levels().len() == 1 && self.object.starts_with(b"{\"name\"");
        self.scanner.step(byte, |event| match event {
            Event::Closed => whole = true,
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
            Position::Outside if !whole => {}
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(text: &str) -> Finder {
        let mut finder = Finder::default();
        text.bytes().for_each(|byte| finder.step(byte));
        finder
    }

    /// The roots, each as its form and the skeleton of its members.
    fn roots(text: &str) -> Vec<(Form, String)> {
        let finder = found(text);
        let shapes = finder.shapes();
        shapes.roots().iter().map(|&(form, id)| (form, shown(shapes, id))).collect()
    }

    fn shown(shapes: &Shapes, id: ShapeId) -> String {
        match shapes.get(id).unwrap() {
            Shape::Object(fields) => {
                let field = |field: &Field| {
                    let sign = if field.required { "" } else { "?" };
                    format!("{}{sign}={}", field.key, shown(shapes, field.shape))
                };
                format!("({})", fields.iter().map(field).collect::<Vec<_>>().join(" "))
            }
            Shape::Array(item) => format!("[{}]", shown(shapes, *item)),
            Shape::Choices(choices) => choices.join("|"),
            Shape::Text => "text".to_owned(),
            Shape::Free => "any".to_owned(),
        }
    }

    const SCHEMA: &str = r#"{"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["city"]}"#;
    const SHOWN: &str = "(city=text unit?=\"C\"|\"F\" days?=[any])";

    #[test]
    fn the_bytes_of_shapes_are_counted_when_they_are_added() {
        let mut finder = Finder::default();
        let fresh = finder.bytes();
        let tool =
            r#"{"name": "weather", "parameters": {"properties": {"city": {"enum": ["Oslo", "Rome"]}}}}"#;
        tool.bytes().for_each(|byte| finder.step(byte));
        let held: usize = finder.shapes.all.iter().map(Shape::held).sum::<usize>() + size_of::<String>() + 7;
        assert_eq!(finder.shapes.held, held);
        assert!(finder.bytes() > fresh + held, "{} {held}", finder.bytes());
        let once = finder.bytes();
        tool.bytes().for_each(|byte| finder.step(byte));
        assert!(finder.bytes() >= once);
    }

    #[test]
    fn a_schema_is_found_wherever_it_is_written() {
        let plain = vec![(Form::Plain, SHOWN.to_owned())];
        assert_eq!(roots(&format!("Answer in JSON {{ like this }}: {SCHEMA}.")), plain);
        let wrapped = format!(r#"{{"type":"json_schema","json_schema":{{"name":"x","schema":{SCHEMA}}}}}"#);
        assert_eq!(roots(&wrapped), plain);
    }

    #[test]
    fn a_tool_may_be_called_by_name_or_given_its_arguments() {
        let call = |form, key: &str| (form, format!("(name=\"rain\" {key}={SHOWN})"));
        let expected = [
            call(Form::Arguments, "arguments"),
            call(Form::Parameters, "parameters"),
            (Form::Plain, SHOWN.to_owned()),
        ];
        for tool in [
            format!(r#"[{{"type":"function","function":{{"name":"rain","parameters":{SCHEMA}}}}}]"#),
            format!(r#"{{"name":"rain","description":"x","input_schema":{SCHEMA}}}"#),
            format!(r#"{{"tools":[{{"name":"rain","inputSchema":{SCHEMA}}}]}}"#),
        ] {
            assert_eq!(roots(&tool), expected, "{tool}");
        }
    }

    #[test]
    fn references_and_examples_are_shapes_too() {
        let referring = r##"{"$defs":{"P":{"properties":{"x":{"const":1}}}},"type":"object",
            "properties":{"p":{"$ref":"#/$defs/P"},"q":{"allOf":[{"$ref":"#/$defs/P"}]},"r":{"$ref":"#/no"}}}"##;
        assert_eq!(roots(referring), [(Form::Plain, "(p=(x=1) q=(x=1) r=any)".to_owned())]);
        let endless = r##"{"properties":{"p":{"$ref":"#"}}}"##;
        assert!(roots(endless)[0].1.starts_with("(p=(p=(p="));
        let example = r#"{"a":"b","c":[{"d":1}],"e":{}}"#;
        assert_eq!(roots(example), [(Form::Example, "(a=text c=[(d=any)] e=())".to_owned())]);
        assert_eq!(roots("{} {\"a\":}"), []);
    }

    #[test]
    fn calls_and_templates_of_calls_show_their_form() {
        let tool = format!(r#"{{"name":"rain","parameters":{SCHEMA}}}"#);
        let form = |text: &str| found(&format!("{tool}\n{text}\n")).form();
        assert_eq!(form(""), None);
        assert_eq!(form(r#"{"name": function name, "parameters": dictionary}"#), Some(Form::Parameters));
        assert_eq!(form(r#"{"name": <function-name>, "arguments": <args>}"#), Some(Form::Arguments));
        assert_eq!(form(r#"{"name":"rain","parameters":{"city":"Rom"}}"#), Some(Form::Parameters));
        assert_eq!(form(r#"{"name":"rainfall","parameters":{"city":"Rom"}}"#), None, "no such tool");
        let compact = Style { colon: String::new(), comma: String::new() };
        assert_eq!(*found(r#"{"name":"rain","parameters":{"city":"Rom"}}"#).style(), compact);
    }

    #[test]
    fn the_number_of_shapes_is_bounded() {
        let fields = (0..SHAPES_MAX).map(|at| format!("\"{at}\":1")).collect::<Vec<_>>().join(",");
        for text in [
            format!("{{{fields}}}").repeat(3),
            "{\"a\":1}".repeat(2 * ROOTS_MAX),
            format!("{{\"a\":\"{}\"}}", "x".repeat(OBJECT_MAX)),
            r##"{"properties":{"a":{"$ref":"#"},"b":{"$ref":"#"}}}"##.to_owned(),
        ] {
            let finder = found(&text);
            assert!(finder.shapes.all.len() <= SHAPES_MAX && finder.shapes.roots.len() <= ROOTS_MAX);
            assert!(finder.object.is_empty());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut finder = Finder::default();
            for &byte in &bytes {
                finder.step(byte);
            }
            prop_assert!(finder.object.len() <= bytes.len());
        }

        #[test]
        fn any_pieces_of_schemas_are_read(pieces in proptest::collection::vec(0_usize..12, 0..60)) {
            const PIECES: [&str; 12] = ["{", "}", "[", "]", ",", ":", "\"", "\"properties\":{", "\"$ref\":\"#\"",
                "\"name\":\"f\",", "\"parameters\":", "\"enum\":[1]"];
            let text: String = pieces.iter().map(|&at| PIECES[at]).collect();
            prop_assert!(found(&text).shapes().roots().len() <= ROOTS_MAX);
        }
    }
}
