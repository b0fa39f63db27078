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
    let tool = r#"{"name": "weather", "parameters": {"properties": {"city": {"enum": ["Oslo", "Rome"]}}}}"#;
    tool.bytes().for_each(|byte| finder.step(byte));
    let held: usize = finder.shapes.all.iter().map(Shape::allocated).sum::<usize>() + size_of::<String>() + 7;
    assert_eq!(finder.shapes.allocated, held);
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

/// Parts that are long, and referred to often.
#[test]
fn a_schema_is_read_in_bounded_steps_and_memory() {
    let words = |count: usize| (0..count).map(|at| format!("w{at}")).collect::<Vec<_>>();
    let refer = |count: usize, to: &str| -> Map<String, Value> {
        (0..count).map(|at| (format!("p{at}"), serde_json::json!({ "$ref": to }))).collect()
    };
    let of = |properties: Map<String, Value>, more: Value| serde_json::json!({"type": "object", "properties": properties, "required": ["a"], "$defs": more});
    let long = serde_json::json!({"e": {"enum": words(9_000)}});
    let wide =
        serde_json::json!({"e": {"type": "object", "properties": refer(2, "#"), "required": words(9_000)}});
    let mut twice = of(refer(2, "#"), Value::Null);
    twice["required"] = words(100_000).into();
    let letters = vec!["x".repeat(WORD_MAX - 2); 60_000];
    let large = serde_json::json!({"e": {"enum": letters}});
    for schema in [
        of(refer(3_000, "#/$defs/e"), long),
        of(refer(3_000, "#/$defs/e"), wide),
        twice,
        of(refer(10, "#/$defs/e"), large),
        of(refer(200_000, "#/$defs/e"), Value::Null),
    ] {
        for finder in [Finder::constrained(&schema), found(&schema.to_string())] {
            let shapes = &finder.shapes;
            assert!(shapes.read < READ_MAX + 200_000, "{}", shapes.read);
            let built: usize = shapes.all.iter().map(Shape::allocated).sum();
            assert!(built <= ALLOCATED_MAX && finder.bytes() < 2 * ALLOCATED_MAX, "{}", finder.bytes());
        }
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
