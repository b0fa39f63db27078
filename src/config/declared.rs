//! The JSON Schema of a file, made by the code that reads it.
//!
//! Reading notes every setting that it looks up, with its meaning, kind and default, in a [`Slot`].
//! To describe a file, an empty document is read with slots: lists and free maps then have one
//! element, and a setting of several shapes has each of them. So a setting is declared once, where
//! it is read.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::{Map, Value, json};

/// The place of one value in a schema.
#[derive(Clone, Debug, Default)]
pub struct Slot(Rc<RefCell<Entry>>);

#[derive(Debug, Default)]
struct Entry {
    says: String,
    shape: Shape,
    default: Value,
    /// `null` is allowed besides.
    or_null: bool,
    /// Further keywords.
    more: Map<String, Value>,
}

#[derive(Debug, Default)]
enum Shape {
    #[default]
    Any,
    Leaf(Value),
    Object {
        members: Vec<(String, Slot)>,
        required: Vec<&'static str>,
    },
    List(Slot),
    Map(Slot),
    OneOf(Vec<Slot>),
}

impl Slot {
    /// Sets its meaning.
    pub fn says(&self, says: &str) {
        says.clone_into(&mut self.0.borrow_mut().says);
    }

    /// It is a value of this schema; `default` is `Null` without one.
    pub fn leaf(&self, schema: Value, default: Value) {
        let mut entry = self.0.borrow_mut();
        (entry.shape, entry.default) = (Shape::Leaf(schema), default);
    }

    /// It may also be `null`.
    pub fn or_null(&self) {
        self.0.borrow_mut().or_null = true;
    }

    /// Adds a keyword to its schema.
    pub fn with(&self, keyword: &str, value: Value) {
        self.0.borrow_mut().more.insert(keyword.to_owned(), value);
    }

    /// It is a map with known keys.
    pub fn object(&self) {
        let mut entry = self.0.borrow_mut();
        if !matches!(entry.shape, Shape::Object { .. }) {
            entry.shape = Shape::Object { members: Vec::new(), required: Vec::new() };
        }
    }

    /// The value under a key of the map.
    #[must_use]
    pub fn member(&self, key: &str) -> Self {
        self.object();
        let mut entry = self.0.borrow_mut();
        let Shape::Object { members, .. } = &mut entry.shape else { return Self::default() };
        if let Some((_, known)) = members.iter().find(|(name, _)| name == key) {
            return known.clone();
        }
        let slot = Self::default();
        members.push((key.to_owned(), slot.clone()));
        slot
    }

    /// The map must have this key.
    pub fn require(&self, key: &'static str) {
        self.object();
        if let Shape::Object { required, .. } = &mut self.0.borrow_mut().shape {
            required.push(key);
        }
    }

    /// The map need not have this key after all.
    pub fn optional(&self, key: &str) {
        if let Shape::Object { required, .. } = &mut self.0.borrow_mut().shape {
            required.retain(|known| *known != key);
        }
    }

    /// It is a list; the slot of its elements.
    #[must_use]
    pub fn element(&self) -> Self {
        let slot = Self::default();
        self.0.borrow_mut().shape = Shape::List(slot.clone());
        slot
    }

    /// It is a map with free keys; the slot of its values.
    #[must_use]
    pub fn values(&self) -> Self {
        let slot = Self::default();
        self.0.borrow_mut().shape = Shape::Map(slot.clone());
        slot
    }

    /// It has several shapes; the slot of the next one.
    #[must_use]
    pub fn alternative(&self) -> Self {
        let slot = Self::default();
        let mut entry = self.0.borrow_mut();
        match &mut entry.shape {
            Shape::OneOf(all) => all.push(slot.clone()),
            shape => *shape = Shape::OneOf(vec![slot.clone()]),
        }
        slot
    }

    pub fn schema(&self) -> Value {
        let entry = self.0.borrow();
        let mut schema = match &entry.shape {
            Shape::Any => Map::new(),
            Shape::Leaf(schema) => schema.as_object().cloned().unwrap_or_default(),
            Shape::Object { members, required } => {
                let members = members.iter().map(|(key, slot)| (key.clone(), slot.schema()));
                let mut schema = keywords(json!({
                    "type": ["object", "null"], "additionalProperties": false, "properties": members.collect::<Map<_, _>>(),
                }));
                if !required.is_empty() {
                    schema.insert("required".to_owned(), json!(required));
                }
                schema
            }
            Shape::List(element) => keywords(json!({ "type": "array", "items": element.schema() })),
            Shape::Map(values) => {
                keywords(json!({ "type": ["object", "null"], "additionalProperties": values.schema() }))
            }
            Shape::OneOf(all) => {
                keywords(json!({ "oneOf": all.iter().map(Slot::alone).collect::<Vec<_>>() }))
            }
        };
        if !entry.default.is_null() {
            schema.insert("default".to_owned(), entry.default.clone());
        }
        if !entry.says.is_empty() {
            schema.insert("description".to_owned(), entry.says.clone().into());
        }
        schema.extend(entry.more.clone());
        let schema = Value::Object(schema);
        if entry.or_null { json!({ "anyOf": [schema, { "type": "null" }] }) } else { schema }
    }

    /// The schema of one of several shapes: a map of it is never `null`.
    fn alone(&self) -> Value {
        let mut schema = self.schema();
        let given = self.0.borrow().more.contains_key("type");
        if let Some(kind) = schema.get_mut("type").filter(|kind| kind.is_array() && !given) {
            *kind = "object".into();
        }
        schema
    }
}

pub fn text(schema: &Value) -> String {
    format!("{schema:#}\n")
}

fn keywords(schema: Value) -> Map<String, Value> {
    match schema {
        Value::Object(keywords) => keywords,
        _ => Map::new(),
    }
}
