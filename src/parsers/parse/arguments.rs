//! Arguments: from a family's marked-up text to the JSON that the server writes.
//!
//! The server converts all of a call with every piece, and sends what is new and certain of the
//! result, so the partial conversions matter as much as the last one. Values are text; the schema
//! of the function decides which of them become numbers, booleans, lists and objects.

use super::python::{self, Fields, Unread, Value, is_space};
use super::steps;

use serde_json::{Map, Value as Json};

/// How a family writes arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arguments {
    Json,
    Qwen3,
    Glm,
    Minimax,
    Dsml,
}

/// The names of the tags that begin or end an argument, but those of DSML.
const TAGS: [&str; 3] = ["parameter", "arg_key", "arg_value"];

/// Parameters found in a text, each with the end of its match.
struct Found<'a> {
    name: &'a str,
    value: &'a str,
    /// `Some(flag)` for DSML's attribute `string`.
    is_string: Option<&'a str>,
    start: usize,
    end: usize,
}

/// Arguments as JSON.
pub(super) struct Converted {
    pub json: String,
    /// Length of the last argument's text at the end of what was converted, if it is a text that
    /// goes on: more of it is only added to the end of that text.
    pub open: Option<usize>,
}

impl Arguments {
    /// The JSON of `raw`; with `is_partial`, of a text that goes on.
    pub fn convert(self, raw: &str, is_partial: bool) -> Result<Converted, Unread> {
        steps::read(raw.len());
        let mut fields = Fields::default();
        let mut rest = String::new();
        let mut at = 0;
        let last = raw.rfind('>');
        while let Some(found) = self.find(raw, at, last, false) {
            rest.push_str(raw.get(at..found.start).unwrap_or(""));
            at = found.end;
            self.put(&mut fields, &found, false)?;
        }
        let mut open = None;
        if is_partial {
            let tail = raw.get(at..).unwrap_or("");
            // Only DSML looks no further back than its last parameter.
            if self == Self::Dsml {
                rest.clear();
            }
            rest.push_str(tail);
            if let Some(found) = self.find(&rest, 0, rest.rfind('>'), true) {
                self.put(&mut fields, &found, true)?;
                open = self.goes_on(&fields, &found);
            }
        }
        Ok(Converted { json: python::dump(&fields.into()), open })
    }

    /// See [`Converted::open`]. Not for DSML, whose texts may be other values in the end; a newline
    /// at the start of Qwen3's is no part of it.
    fn goes_on(self, fields: &Fields, found: &Found<'_>) -> Option<usize> {
        let (_, value) = fields.last().filter(|(name, _)| !name.is_empty() && name == self.name(found))?;
        let is_text = matches!(value, Value::Text(text) if !text.is_empty());
        (is_text && self != Self::Dsml).then_some(found.value.len())
    }

    /// The text that a piece adds to the JSON of an open text, which was `before`.
    pub fn added(self, before: &str, piece: &str) -> String {
        let text = match self {
            // A newline at the end may be markup.
            Self::Qwen3 => {
                let text = if before.ends_with('\n') { format!("\n{piece}") } else { piece.to_owned() };
                text.strip_suffix('\n').map(str::to_owned).unwrap_or(text)
            }
            _ => piece.to_owned(),
        };
        let json = python::dump(&Value::Text(text));
        json.get(1..json.len() - 1).unwrap_or_default().to_owned()
    }

    /// The first parameter from `at`; with `is_open`, one whose value goes to the end. `last`: the
    /// last position of the character in which every start tag ends.
    fn find(self, raw: &str, at: usize, last: Option<usize>, is_open: bool) -> Option<Found<'_>> {
        match self {
            Self::Json => None,
            Self::Glm => glm(raw, at, is_open),
            Self::Qwen3 | Self::Minimax | Self::Dsml => self.tagged(raw, at, last, is_open),
        }
    }

    fn name<'a>(self, found: &Found<'a>) -> &'a str {
        match self {
            Self::Glm | Self::Minimax => python::strip(found.name),
            _ => found.name,
        }
    }

    fn put(self, fields: &mut Fields, found: &Found<'_>, is_open: bool) -> Result<(), Unread> {
        let name = self.name(found);
        if name.is_empty() && (is_open || self == Self::Minimax) {
            return Ok(());
        }
        let value = match self {
            Self::Qwen3 => Value::Text(unwrap_newlines(found.value).to_owned()),
            Self::Dsml if found.is_string != Some("true") => match python::load(found.value) {
                Ok(value) => value,
                Err(Unread::Invalid) if is_open => return Ok(()),
                Err(Unread::Invalid) => Value::Text(found.value.to_owned()),
                Err(unsure) => return Err(unsure),
            },
            _ => Value::Text(found.value.to_owned()),
        };
        fields.set(name.to_owned(), value);
        Ok(())
    }

    /// `<parameter …>VALUE</parameter>`; the start of the next parameter ends a value as well.
    fn tagged(self, raw: &str, at: usize, last: Option<usize>, is_open: bool) -> Option<Found<'_>> {
        let mut from = at;
        loop {
            let start = from + raw.get(from..)?.find('<')?;
            from = start + 1;
            if Some(start) > last {
                return None;
            }
            let Some(head) = self.head(raw.get(start..)?, is_open) else { continue };
            let value = start + head.length;
            let text = raw.get(value..)?;
            let found = |length: usize, end: usize| Found {
                name: head.name,
                value: text.get(..length).unwrap_or(""),
                is_string: head.is_string,
                start,
                end: value + end,
            };
            if is_open {
                return Some(found(text.len(), text.len()));
            }
            if let Some((length, end)) = self.value_end(text) {
                return Some(found(length, end));
            }
        }
    }

    /// Where a value ends in `text`, and where its end marker does.
    fn value_end(self, text: &str) -> Option<(usize, usize)> {
        text.match_indices('<').find_map(|(at, _)| {
            let tag = text.get(at..)?;
            match self.closer(tag) {
                Some(length) => Some((at, at + length)),
                None => self.opener(tag).map(|_| (at, at)),
            }
        })
    }

    /// Length of `</parameter>` at the start of `tag`.
    fn closer(self, tag: &str) -> Option<usize> {
        if self == Self::Dsml {
            let close = "</｜DSML｜parameter>";
            return tag.starts_with(close).then_some(close.len());
        }
        let rest = skip(tag.strip_prefix('<')?).strip_prefix('/')?;
        let rest = skip(skip(rest).strip_prefix("parameter")?).strip_prefix('>')?;
        Some(tag.len() - rest.len())
    }

    /// The rest after the part of a start tag that makes it one.
    fn opener(self, tag: &str) -> Option<&str> {
        match self {
            Self::Dsml => some_space(tag.strip_prefix("<｜DSML｜parameter")?)?.strip_prefix("name="),
            Self::Minimax => {
                let rest = skip(tag.strip_prefix('<')?).strip_prefix("parameter")?;
                skip(some_space(rest)?.strip_prefix("name")?).strip_prefix('=')
            }
            _ => {
                let rest = skip(tag.strip_prefix('<')?).strip_prefix("parameter")?;
                skip(rest).strip_prefix('=')
            }
        }
    }

    /// A complete start tag.
    fn head(self, tag: &str, is_open: bool) -> Option<Head<'_>> {
        let rest = self.opener(tag)?;
        let (name, is_string, rest) = match self {
            Self::Dsml => dsml_name(rest)?,
            Self::Minimax => quoted_name(skip(rest))?,
            _ => {
                let (name, after) = rest.split_once('>')?;
                let stripped = skip(name);
                // A name of spaces only is taken as one where there must be a name.
                let last = name.char_indices().next_back().map_or(0, |(at, _)| at);
                let is_blank = is_open && stripped.is_empty() && !name.is_empty();
                (if is_blank { name.get(last..)? } else { stripped }, None, after)
            }
        };
        if is_open && self == Self::Qwen3 && name.is_empty() {
            return None;
        }
        Some(Head { name, is_string, length: tag.len() - rest.len() })
    }
}

struct Head<'a> {
    name: &'a str,
    is_string: Option<&'a str>,
    length: usize,
}

fn skip(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

fn some_space(text: &str) -> Option<&str> {
    text.starts_with(is_space).then(|| skip(text))
}

/// `"NAME"( string="FLAG")? >`: name, flag, what follows.
fn dsml_name(rest: &str) -> Option<(&str, Option<&str>, &str)> {
    let (name, rest) = rest.strip_prefix('"')?.split_once('"')?;
    if name.is_empty() {
        return None;
    }
    let flag = some_space(rest).and_then(|rest| rest.strip_prefix("string=\"")?.split_once('"'));
    let (flag, rest) = flag.map_or((None, rest), |(flag, rest)| (Some(flag), rest));
    Some((name, flag, skip(rest).strip_prefix('>')?))
}

/// A name in either quotes or none, and what follows its tag.
fn quoted_name(rest: &str) -> Option<(&str, Option<&str>, &str)> {
    for quote in ['"', '\''] {
        let found = rest.strip_prefix(quote).and_then(|rest| rest.split_once(quote));
        if let Some((name, rest)) = found
            && let Some(rest) = skip(rest).strip_prefix('>')
        {
            return Some((name, None, rest));
        }
    }
    let length = rest.find(|c| c == '>' || is_space(c))?;
    let (name, rest) = rest.split_at(length);
    (length > 0).then_some(())?;
    Some((name, None, skip(rest).strip_prefix('>')?))
}

/// `<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>`.
fn glm(raw: &str, at: usize, is_open: bool) -> Option<Found<'_>> {
    let start = at + raw.get(at..)?.find("<arg_key>")?;
    let text = raw.get(start + "<arg_key>".len()..)?;
    let (name, value) = text.match_indices("</arg_key>").find_map(|(end, close)| {
        let value = skip(text.get(end + close.len()..)?).strip_prefix("<arg_value>")?;
        Some((text.get(..end)?, value))
    })?;
    let (value, rest) = if is_open { (value, "") } else { value.split_once("</arg_value>")? };
    Some(Found { name, value, is_string: None, start, end: raw.len() - rest.len() })
}

/// True if a tag of arguments may begin in this text.
pub(super) fn may_contain_tag(text: &str) -> bool {
    text.match_indices('<').filter_map(|(at, _)| text.get(at + 1..)).any(|tag| {
        let tag = skip(tag);
        let name = skip(tag.strip_prefix('/').unwrap_or(tag));
        TAGS.iter().any(|known| known.starts_with(name) || name.starts_with(known))
    })
}

/// Without one newline at each side, which are markup.
fn unwrap_newlines(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// The properties of a function's schema; `None` without such a function, or without properties.
pub(super) fn properties<'a>(tools: &'a [Json], function: &str) -> Option<&'a Map<String, Json>> {
    let named = |tool: &&Json| tool.pointer("/function/name").and_then(Json::as_str) == Some(function);
    let tool = tools.iter().find(named)?;
    tool.pointer("/function/parameters/properties")?.as_object().filter(|fields| !fields.is_empty())
}

/// True if the request has the function.
pub(super) fn has_function(tools: &[Json], function: &str) -> bool {
    tools.iter().any(|tool| tool.pointer("/function/name").and_then(Json::as_str) == Some(function))
}

fn types(schema: &Json) -> Vec<&str> {
    let mut found = Vec::new();
    add_types(&mut found, schema);
    if found.is_empty() { vec!["string"] } else { found }
}

fn add_types<'a>(found: &mut Vec<&'a str>, schema: &'a Json) {
    match schema.get("type") {
        Some(Json::String(name)) => found.push(name),
        Some(Json::Array(names)) => found.extend(names.iter().filter_map(Json::as_str)),
        _ => {}
    }
    if let Some(Json::Array(values)) = schema.get("enum") {
        found.extend(values.iter().map(|value| type_of(value)));
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        for choice in schema.get(key).and_then(Json::as_array).into_iter().flatten() {
            found.extend(types(choice));
        }
    }
}

fn type_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(number) if number.is_f64() => "number",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

/// Keys whose text may be sent before its end; `None` if all may.
pub(super) fn text_keys(properties: Option<&Map<String, Json>>) -> Option<Vec<String>> {
    let is_text = |schema: &Json| types(schema).iter().all(|&name| name == "string");
    let keys = properties?.iter().filter(|(_, schema)| is_text(schema)).map(|(key, _)| key.clone());
    Some(keys.collect())
}

/// The arguments with values of the types that the schema asks for.
pub(super) fn fix_types(json: String, properties: Option<&Map<String, Json>>) -> Result<String, Unread> {
    let Some(properties) = properties else { return Ok(json) };
    let mut value = match python::load(&json) {
        Ok(value @ Value::Object(_)) => value,
        Ok(_) | Err(Unread::Invalid) => return Ok(json),
        Err(unsure) => return Err(unsure),
    };
    let is_changed = match &mut value {
        Value::Object(fields) => fix_fields(fields, properties)?,
        _ => false,
    };
    Ok(if is_changed { python::dump(&value) } else { json })
}

fn fix_fields(fields: &mut [(String, Value)], properties: &Map<String, Json>) -> Result<bool, Unread> {
    let mut is_changed = false;
    for (key, value) in fields {
        if let Some(schema @ Json::Object(_)) = properties.get(key) {
            is_changed |= fix_value(value, schema)?;
        }
    }
    Ok(is_changed)
}

fn fix_value(value: &mut Value, schema: &Json) -> Result<bool, Unread> {
    let text = match &mut *value {
        Value::Object(fields) => {
            let properties = schema.get("properties").and_then(Json::as_object);
            return properties.map_or(Ok(false), |properties| fix_fields(fields, properties));
        }
        Value::List(items) => {
            let Some(schema @ Json::Object(_)) = schema.get("items") else { return Ok(false) };
            let mut is_changed = false;
            for item in items {
                is_changed |= fix_value(item, schema)?;
            }
            return Ok(is_changed);
        }
        Value::Text(text) => text.clone(),
        other => python::dump(other),
    };
    let is_text = matches!(value, Value::Text(_));
    let fixed = match coerce(&text, &types(schema))? {
        Some(fixed) => fixed,
        None if is_text => return Ok(false),
        None => Value::Text(text),
    };
    let is_changed = is_text || fixed != *value;
    *value = fixed;
    Ok(is_changed)
}

/// The first type, in the server's order, that the text can be read as; `None` to leave it a text.
fn coerce(text: &str, types: &[&str]) -> Result<Option<Value>, Unread> {
    let types: Vec<String> = types.iter().map(|name| canonical(name)).collect();
    let order = ["null", "integer", "number", "boolean", "object", "array", "string"];
    for name in order.iter().filter(|&&name| types.iter().any(|known| known == name)) {
        let value = read_as(text, name)?;
        if *name == "string" || value.is_some() {
            return Ok(value);
        }
    }
    Ok(None)
}

fn canonical(name: &str) -> String {
    let name = python::strip(name).to_lowercase();
    match name.as_str() {
        "str" | "text" | "varchar" | "char" | "enum" => "string",
        "int" | "int32" | "int64" | "uint" | "uint32" | "uint64" | "long" | "short" | "unsigned" => "integer",
        "float" | "float32" | "float64" | "double" => "number",
        "bool" => "boolean",
        "dict" => "object",
        "arr" | "list" | "sequence" => "array",
        other => other,
    }
    .to_owned()
}

fn read_as(text: &str, name: &str) -> Result<Option<Value>, Unread> {
    let lower = text.to_lowercase();
    Ok(match name {
        "null" => (lower == "null").then_some(Value::Null),
        "integer" => known(python::int(text))?,
        "number" => known(python::float(text))?.filter(|number| number.is_finite()).map(number),
        "boolean" => match python::strip(&lower) {
            "true" | "1" => Some(Value::Bool(true)),
            "false" | "0" => Some(Value::Bool(false)),
            _ => None,
        },
        "string" => None,
        _ => known(python::load(text))?.filter(python::is_finite),
    })
}

/// `None` for what Python refuses.
fn known<T>(value: Result<T, Unread>) -> Result<Option<T>, Unread> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(Unread::Invalid) => Ok(None),
        Err(unsure) => Err(unsure),
    }
}

/// A float; an integer if it has no fraction.
fn number(value: f64) -> Value {
    if value.fract().abs() < f64::MIN_POSITIVE {
        // No sign for zero.
        Value::Int(format!("{:.0}", value + 0.0))
    } else {
        Value::Float(value)
    }
}

/// The part of an object's JSON that stays as it is while the arguments go on: up to the last
/// value, and into it if it is text under one of `keys`.
pub(super) fn safe_prefix<'a>(json: &'a str, keys: Option<&[String]>) -> &'a str {
    let Some((colon, key)) = last_colon(json) else { return "" };
    let rest = json.get(colon + 1..).unwrap_or("");
    let value = json.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    let until = |end: usize| json.get(..end).unwrap_or("");
    let text = json.get(value..).and_then(|text| text.strip_prefix('"'));
    let is_text = keys.is_none_or(|keys| keys.iter().any(|known| known == key));
    let (Some(text), true) = (text, is_text) else {
        return until(value);
    };
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return until(value + 1 + at),
            _ => {}
        }
    }
    json
}

/// Position of the last colon of the outermost object, and the key before it.
fn last_colon(json: &str) -> Option<(usize, &str)> {
    let (mut last, mut key, mut depth) = (None, "", 0_i32);
    let (mut start, mut is_text, mut is_escaped) = (0, false, false);
    for (at, c) in json.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_text => is_escaped = true,
            '"' if is_text => {
                is_text = false;
                if depth == 1 {
                    key = json.get(start + 1..at).unwrap_or("");
                }
            }
            _ if is_text => {}
            '"' => (is_text, start) = (true, at),
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ':' if depth == 1 => last = Some((at, key)),
            _ => {}
        }
    }
    last
}

/// DSML: a single argument `arguments` or `input` that the function does not have is a wrapper
/// around all arguments.
pub(super) fn unwrap(json: String, properties: Option<&Map<String, Json>>) -> Result<String, Unread> {
    let Some(properties) = properties else { return Ok(json) };
    let Ok(Value::Object(fields)) = python::load(&json) else { return Ok(json) };
    let [(name, inner)] = fields.as_slice() else { return Ok(json) };
    if !["arguments", "input"].contains(&name.as_str()) || properties.contains_key(name) {
        return Ok(json);
    }
    let inner = match inner {
        Value::Text(text) => match python::load(text) {
            Ok(value) => value,
            Err(Unread::Invalid) => return Ok(json),
            Err(unsure) => return Err(unsure),
        },
        other => other.clone(),
    };
    match &inner {
        Value::Object(fields) if fields.iter().all(|(key, _)| properties.contains_key(key)) => {
            Ok(python::dump(&inner))
        }
        _ => Ok(json),
    }
}
