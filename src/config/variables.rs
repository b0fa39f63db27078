//! Environment variables in the values of a config file: `${NAME}`, and `${NAME:-default}` where
//! the variable need not be set. `$${` gives a literal `${`.
//!
//! A value that consists of one variable is read as if the variable's text were in its place, so
//! that it may be a number or `true`; together with other text it is text. An empty variable counts
//! as unset, as everywhere. Keys are taken literally, and policy files have no variables: their
//! revision identifies their content. A variable's text may be a secret, so problems show the text
//! of the file.

use super::problem::Refusal;
use super::problems::Problems;
use super::yaml::{self, Node, Substituted, Value};

/// A source of named texts, such as the environment; parsing accesses the outside world only
/// through it.
pub trait Strings {
    /// The text of this name, if it exists.
    fn get(&self, name: &str) -> Option<String>;
}

/// The environment of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Environment;

impl Strings for Environment {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

impl Strings for std::collections::BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<String> {
        Self::get(self, name).cloned()
    }
}

/// Allowed forms of a value.
const ALLOWED: &str = "${NAME} of a variable that is set, ${NAME:-DEFAULT}, or $${ for ${ itself";

/// Substitutes the variables in every value. A variable that is not set or malformed is a problem,
/// and the value stays.
pub fn substitute(root: &mut Node, environment: &dyn Strings, problems: &Problems) {
    walk(root, "", environment, problems);
}

fn walk(node: &mut Node, path: &str, environment: &dyn Strings, problems: &Problems) {
    match &mut node.value {
        Value::Map(entries) => {
            for (key, member) in entries {
                let path = if path.is_empty() { key.name.clone() } else { format!("{path}.{}", key.name) };
                walk(member, &path, environment, problems);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                walk(item, &format!("{path}[{index}]"), environment, problems);
            }
        }
        Value::Text(written) if written.contains("${") => match expanded(written, environment) {
            Ok(text) => {
                let written = written.clone();
                node.value =
                    if is_one_variable(&written) { scalar(&text) } else { Value::Text(text.clone()) };
                node.substituted = Some(Substituted { written, text });
            }
            Err(message) => {
                let got = yaml::quote(written);
                problems.add(node.line, path, Refusal::new(&message, ALLOWED), got);
            }
        },
        _ => {}
    }
}

/// The text with its variables replaced.
fn expanded(written: &str, environment: &dyn Strings) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = written;
    while let Some((before, after)) = rest.split_once("${") {
        if let Some(before) = before.strip_suffix('$') {
            text.extend([before, "${"]);
            rest = after;
            continue;
        }
        let (inside, after) = after.split_once('}').ok_or("a variable that does not end")?;
        text.extend([before, &value(inside, environment)?]);
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// The text of `NAME` or `NAME:-default`.
fn value(inside: &str, environment: &dyn Strings) -> Result<String, String> {
    let (name, default) =
        inside.split_once(":-").map_or((inside, None), |(name, default)| (name, Some(default)));
    if !is_name(name) {
        return Err("not the name of a variable".to_owned());
    }
    let set = environment.get(name).filter(|text| !text.is_empty());
    set.or_else(|| default.map(str::to_owned)).ok_or_else(|| format!("the variable {name} is not set"))
}

fn is_name(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    name.bytes().next().is_some_and(letter) && name.bytes().all(|byte| letter(byte) || byte.is_ascii_digit())
}

/// True if the whole text is one variable.
fn is_one_variable(written: &str) -> bool {
    written.starts_with("${") && written.find('}') == Some(written.len() - 1)
}

fn scalar(text: &str) -> Value {
    if text.is_empty() {
        return Value::Null;
    }
    match yaml::parse("", text).map(|node| node.value) {
        Ok(value @ (Value::Bool(_) | Value::Whole(_) | Value::Number(_))) => value,
        _ => Value::Text(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn environment() -> BTreeMap<String, String> {
        let set = [("HOST", "10.0.0.7"), ("PORT", "8000"), ("ON", "true"), ("EMPTY", ""), ("ODD", "a: [b")];
        set.map(|(name, text)| (name.to_owned(), text.to_owned())).into()
    }

    /// Values and problems of a document.
    fn read(text: &str) -> (Vec<Value>, Vec<String>) {
        let mut root = yaml::parse("f", text).unwrap();
        let problems = Problems::new("f");
        substitute(&mut root, &environment(), &problems);
        let Value::Map(entries) = root.value else { panic!("{root:?}") };
        let values = entries.into_iter().map(|(_, node)| node.value).collect();
        (values, problems.into_vec().iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_problem_of_a_document_that_is_one_value_has_the_path_of_the_document() {
        let mut root = yaml::parse("f", "a${").unwrap();
        let problems = Problems::new("f");
        substitute(&mut root, &environment(), &problems);
        let shown = problems.into_vec().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown.len(), 1);
        assert!(shown[0].starts_with("f:1: a variable that does not end"), "{shown:?}");
    }

    #[test]
    fn a_value_of_one_variable_is_read_as_yaml_and_one_among_text_as_text() {
        let text = |text: &str| Value::Text(text.to_owned());
        let (values, problems) = read(
            "a: ${PORT}\nb: \"http://${HOST}:${PORT}\"\nc: ${ON}\nd: ${NONE:-7}\ne: ${EMPTY:-}\nf: ${ODD}\n\
             g: $${HOST} costs $5\nh: ${EMPTY:-x}${PORT}\n",
        );
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(
            values,
            [
                Value::Whole(8000),
                text("http://10.0.0.7:8000"),
                Value::Bool(true),
                Value::Whole(7),
                Value::Null,
                text("a: [b"),
                text("${HOST} costs $5"),
                text("x8000"),
            ]
        );
    }

    #[test]
    fn a_missing_or_malformed_variable_is_a_problem_with_its_line() {
        let (_, problems) =
            read("a: 1\nb: { c: [x, \"${NONE}\"] }\nd: ${EMPTY}\ne: \"${a-b}\"\nf: \"${HOST\"\ng: \"${}\"\n");
        let starts: Vec<&str> = problems.iter().map(|line| line.split(", allowed").next().unwrap()).collect();
        assert_eq!(
            starts,
            [
                "f:2: b.c[1]: the variable NONE is not set",
                "f:3: d: the variable EMPTY is not set",
                "f:4: e: not the name of a variable",
                "f:5: f: a variable that does not end",
                "f:6: g: not the name of a variable",
            ]
        );
    }
}
