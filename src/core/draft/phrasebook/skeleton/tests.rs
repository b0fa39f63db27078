//! Exact proposals, and proposals after arbitrary output.

use super::*;
use crate::draft::phrasebook::shapes::Finder;
use proptest::prelude::*;

const TOOLS: &str = r#"Tools:
[{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {"type": "object",
  "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius"]}, "days": {"type": "integer"}},
  "required": ["city", "unit"]}}},
 {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object",
  "properties": {"zones": {"type": "array", "items": {"type": "string"}},
    "format": {"type": "object", "properties": {"style": {"enum": ["long", "lonely"]}, "utc": {"type": "boolean"}}}}}}}]
"#;

fn after(prompt: &str, output: &str) -> String {
    let mut finder = Finder::default();
    prompt.bytes().for_each(|byte| finder.step(byte));
    let mut skeleton = Skeleton::new(finder.style().clone(), finder.form());
    output.bytes().for_each(|byte| skeleton.step(byte, finder.shapes()));
    skeleton.proposal(finder.shapes()).map(|proposal| proposal.rest).unwrap_or_default()
}

#[test]
fn a_call_is_written_up_to_where_the_model_is_free() {
    let says = |output: &str| after(TOOLS, output);
    assert_eq!(says("I call {"), "", "a brace alone may be anything");
    assert_eq!(says("I call {\""), "name\": \"get_");
    assert_eq!(says("{\"na"), "me\": \"get_");
    assert_eq!(says("{\"name\": \"get_w"), "eather\", \"arguments\": {\"city\": \"");
    assert_eq!(says("{\"name\": \"get_weather\""), ", \"arguments\": {\"city\": \"");
    let call = "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"";
    assert_eq!(says(&call[..call.len() - 1]), "", "in a free text");
    assert_eq!(says(call), ", \"unit\": \"celsius\"}}", "to the end");
    assert_eq!(says(&format!("{call},")), " \"unit\": \"celsius\"}}");
    assert_eq!(says(&format!("{call}, \"d")), "ays\":", "an optional member that has begun");
    assert_eq!(says(&format!("{call}, \"days\": 3,")), " \"unit\": \"celsius\"}}");
    assert_eq!(says(&format!("{call}, \"days\": 3")), "", "a number may go on");
    assert_eq!(says(&format!("{call}, \"x\": 3,")), "", "no member of it");
    assert_eq!(says("{\"name\": \"get_rain\""), "", "no tool");
    assert_eq!(says("{\"name\": \"get_time\""), ", \"arguments\": {\"zones\": [\"");
    let zones = "{\"name\": \"get_time\", \"arguments\": {\"zones\": [\"UTC\"";
    assert_eq!(says(zones), "", "one more, or the end");
    assert_eq!(says(&format!("{zones},")), " \"");
    assert_eq!(says(&format!("{zones}]")), ", \"format\": {\"style\": \"lon");
    assert_eq!(says(&format!("{zones}], \"format\": {{\"style\": \"long\"")), ", \"utc\":");
    assert_eq!(says(&format!("{zones}], \"format\": {{\"style\": \"long\", \"utc\": true}}")), "}}");
    assert_eq!(says(&format!("{call}, \"unit\": \"celsius\"}}}}")), "");
}

#[test]
fn the_layout_of_the_output_is_followed() {
    let says = |output: &str| after(TOOLS, output);
    let compact = "{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Rome\"";
    assert_eq!(says("{\"name\":\"get_weather\","), "\"arguments\":{\"city\":\"");
    assert_eq!(says(compact), ",\"unit\":\"celsius\"}}");
    let tall = "{\n  \"name\": \"get_weather\",\n  \"arguments\": {";
    assert_eq!(says("{\n  \""), "name\": \"get_");
    assert_eq!(says(tall), "\n    \"city\": \"");
    assert_eq!(says(&format!("{tall}\n    \"city\": \"Rome\"")), ",\n    \"unit\": \"celsius\"\n  }\n}");
    assert_eq!(says(&format!("{tall}\n    \"city\": \"Rome\",\n")), "    \"unit\": \"celsius\"\n  }\n}");
    let wide = "{ \"name\": \"get_weather\", \"arguments\": { \"city\": \"Rome\"";
    assert_eq!(says(wide), ", \"unit\": \"celsius\" } }");
    let shown = format!("{TOOLS}{{\"name\":\"get_weather\",\"parameters\":{{\"city\":\"Rome\"}}}}\n");
    assert_eq!(after(&shown, "{\""), "name\":\"get_", "as the prompt's own call");
}

#[test]
fn the_form_is_that_of_the_prompt_or_of_the_last_call() {
    let called = "{\"name\": \"get_weather\"";
    let template = format!("{TOOLS}Answer {{\"name\": function name, \"parameters\": its arguments}}.\n");
    assert_eq!(after(&template, called), ", \"parameters\": {\"city\": \"");
    let first = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Rome\", \"unit\": \"celsius\"}}\n";
    assert_eq!(after(TOOLS, &format!("{first}{called}")), ", \"parameters\": {\"city\": \"");
    assert_eq!(after(TOOLS, "{\"ci"), "ty\": \"", "the arguments by themselves");
    let plain = "{\"city\": \"Rome\", \"unit\": \"celsius\"} and {\"";
    assert!(after(TOOLS, plain).is_empty(), "arguments of two tools begin with nothing in common");
    assert_eq!(after("As in {\"a\": 1, \"b\": \"x\"}.", "{\"a\": 2,"), " \"b\": \"");
    assert_eq!(after("{\"properties\": {\"é\": {\"const\": \"ü\"}}}", "{\""), "é\": \"ü\"}");
    assert_eq!(after("none", "{\""), "");
}

proptest! {
    /// After any part of an object of the schema, the proposal is valid UTF-8, and together with
    /// the output before it is the beginning of JSON.
    #[test]
    fn a_proposal_is_json_after_any_output(pieces in proptest::collection::vec(0_usize..16, 0..40)) {
        const PIECES: [&str; 16] = ["{\"", "{", "}", "[", "]", ",", ":", " ", "\n  ", "\"", "name\": \"get_",
            "weather\"", "\"arguments\": {", "city", "\"unit\"", "7"];
        let mut finder = Finder::default();
        TOOLS.bytes().for_each(|byte| finder.step(byte));
        let mut skeleton = Skeleton::new(Style::default(), None);
        for byte in pieces.iter().flat_map(|&at| PIECES[at].bytes()) {
            skeleton.step(byte, finder.shapes());
        }
        let mut broken = false;
        if let Some(proposal) = skeleton.proposal(finder.shapes()) {
            let mut scanner = skeleton.scanner.clone();
            proposal.rest.bytes().for_each(|byte| scanner.step(byte, |event| broken |= event == Event::Broken));
            prop_assert!(!proposal.rest.is_empty() && proposal.shapes > 0);
        }
        prop_assert!(!broken);
    }
}
