//! The parsers against what vLLM's own say: `tests/goldens/parsers`, see `docs/agents.md`.

mod linear;

use super::*;

use foretell_core::session::parse::Parsed;
use proptest::prelude::*;
use serde_json::Value as Json;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A file of goldens.
struct Golden {
    name: String,
    parsers: Parsers,
    markers: BTreeMap<String, TokenId>,
    special: Vec<(TokenId, String)>,
    tools: Vec<Json>,
    cases: Vec<Json>,
}

fn goldens() -> &'static [Golden] {
    static GOLDENS: OnceLock<Vec<Golden>> = OnceLock::new();
    GOLDENS.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/parsers");
        let mut paths: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(golden).collect()
    })
}

fn golden(path: &PathBuf) -> Golden {
    let file: Json = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let map = |key: &str| -> BTreeMap<String, TokenId> { serde_json::from_value(file[key].clone()).unwrap() };
    let name = |key: &str| file[key].as_str();
    let parsers = Parsers {
        tools: name("tools_parser").map(|name| ToolFormat::from_name(name).unwrap()),
        reasoning: name("reasoning_parser").map(|name| ReasoningFormat::from_name(name).unwrap()),
    };
    Golden {
        name: path.file_stem().unwrap().to_string_lossy().into_owned(),
        parsers,
        markers: map("markers"),
        special: map("special").into_iter().map(|(text, id)| (id, text)).collect(),
        tools: file["tools"].as_array().unwrap().clone(),
        cases: file["cases"].as_array().unwrap().clone(),
    }
}

/// One case.
struct Case {
    name: String,
    may_call: bool,
    tools: Vec<Json>,
    template: Option<Map<String, Json>>,
    prompt: Vec<TokenId>,
    tokens: Vec<(TokenId, String)>,
}

fn case(golden: &Golden, case: &Json) -> Case {
    let read = |key: &str| case[key].clone();
    Case {
        name: format!("{}/{}", golden.name, case["name"].as_str().unwrap()),
        may_call: case["tools"] == true,
        tools: if case["has_tools"] == true { golden.tools.clone() } else { Vec::new() },
        template: serde_json::from_value(read("template")).unwrap(),
        prompt: serde_json::from_value(read("prompt")).unwrap(),
        tokens: serde_json::from_value(read("tokens")).unwrap(),
    }
}

impl Case {
    fn request(&self) -> Request<'_> {
        Request {
            tools: &self.tools,
            may_call: self.may_call,
            single_call: false,
            template: self.template.as_ref(),
            prompt: &self.prompt,
        }
    }

    fn stream(&self, golden: &Golden) -> Box<dyn Parse> {
        golden.with(|vocabulary| golden.parsers.stream(&self.request(), vocabulary)).unwrap()
    }

    fn unstreamed(&self, golden: &Golden) -> Result<ParsedMessage, Unsure> {
        let tokens: Vec<_> = self.tokens.iter().map(|(id, text)| (*id, text.as_str())).collect();
        golden.with(|vocabulary| golden.parsers.unstreamed(&self.request(), vocabulary, &tokens))
    }
}

impl Golden {
    fn with<T>(&self, act: impl FnOnce(&Vocabulary<'_>) -> T) -> T {
        let special: Vec<_> = self.special.iter().map(|(id, text)| (*id, text.as_str())).collect();
        act(&Vocabulary { id: &|text| self.markers.get(text).copied(), special: &special })
    }
}

fn joined(parser: &mut dyn Parse, tokens: &[(TokenId, String)]) -> Parsed {
    let mut joined = Parsed::default();
    for (token, text) in tokens {
        joined.append(parser.push(*token, text));
    }
    joined.append(parser.finish());
    joined
}

/// A joined stream in the goldens' shape.
fn as_json(parsed: &Parsed, reasoning_tokens: u64) -> Json {
    let mut calls: Vec<_> = parsed.calls.iter().collect();
    calls.sort_by_key(|call| call.index);
    let call = |call: &foretell_core::session::parse::CallDelta| {
        serde_json::json!([call.index, call.name.clone().unwrap_or_default(), call.arguments, call.id])
    };
    let calls: Vec<Json> = calls.into_iter().map(call).collect();
    serde_json::json!({"reasoning": parsed.reasoning, "content": parsed.text, "calls": calls,
        "reasoning_tokens": reasoning_tokens})
}

fn whole_as_json(whole: &ParsedMessage) -> Json {
    let call = |(i, call): (usize, &ToolCall)| serde_json::json!([i, call.name, call.arguments, call.id]);
    let calls: Vec<Json> = whole.calls.iter().enumerate().map(call).collect();
    serde_json::json!({"reasoning": whole.reasoning, "content": whole.content, "calls": calls,
        "reasoning_tokens": whole.reasoning_tokens})
}

/// Differences of all goldens, as readable lines.
fn differences(check: impl Fn(&Golden, &Case, &Json) -> Option<String>) -> Vec<String> {
    let each = goldens().iter().flat_map(|golden| golden.cases.iter().map(move |json| (golden, json)));
    each.filter_map(|(golden, json)| check(golden, &case(golden, json), json)).collect()
}

fn assert_none(found: &[String]) {
    assert!(found.is_empty(), "{} differ:\n{}", found.len(), found.join("\n"));
}

fn differ(name: &str, ours: &Json, theirs: &Json) -> Option<String> {
    (ours != theirs).then(|| format!("{name}\n  ours   {ours}\n  theirs {theirs}"))
}

#[test]
fn streams_join_to_what_the_server_sends() {
    assert_none(&differences(|golden, case, json| {
        let mut parser = case.stream(golden);
        let parsed = joined(parser.as_mut(), &case.tokens);
        if !parser.is_sure() {
            return None;
        }
        differ(&case.name, &as_json(&parsed, parser.reasoning_tokens()), &json["stream"])
    }));
}

/// Streams of Llama that stop inside a call, or go on after it with something else; streams of
/// DeepSeek with markers out of order.
const NOT_SURE: [&str; 8] = [
    "x_plain_section",
    "cut_in_call",
    "call_then_text",
    "x_adjacent",
    "x_no_section",
    "x_section_ends_call",
    "x_ends_twice",
    "x_starts_twice",
];

#[test]
fn a_stream_is_unsure_only_where_it_must_be() {
    assert_none(&differences(|golden, case, _| {
        let mut parser = case.stream(golden);
        joined(parser.as_mut(), &case.tokens);
        let name = case.name.rsplit('/').next().unwrap();
        let is_loose = matches!(
            golden.parsers.tools,
            Some(ToolFormat::Llama3Json | ToolFormat::DeepseekV3 | ToolFormat::DeepseekV31)
        );
        let may_be = name.starts_with("unsure") || (is_loose && NOT_SURE.contains(&name));
        (!parser.is_sure() && !may_be).then(|| case.name.clone())
    }));
}

#[test]
fn whole_answers_are_the_server_s() {
    assert_none(&differences(|golden, case, json| match case.unstreamed(golden) {
        Ok(whole) => differ(&case.name, &whole_as_json(&whole), &json["whole"]),
        Err(Unsure) if case.name.contains("/unsure") => None,
        Err(Unsure) => Some(format!("{} is unsure", case.name)),
    }));
}

#[test]
fn special_tokens_are_decoded_where_the_server_does() {
    assert_none(&differences(|golden, case, json| {
        let ours = Json::Bool(golden.parsers.decode_special(&case.request()));
        differ(&case.name, &ours, &json["decode_special"])
    }));
}

#[test]
fn the_first_piece_of_a_call_names_it_and_no_other() {
    assert_none(&differences(|golden, case, _| {
        let mut parser = case.stream(golden);
        let mut named = Vec::new();
        for (token, text) in &case.tokens {
            for piece in parser.push(*token, text).calls {
                if piece.name.is_some() == named.contains(&piece.index) {
                    return Some(format!("{}: call {}", case.name, piece.index));
                }
                named.push(piece.index);
            }
        }
        None
    }));
}

#[test]
fn every_format_has_goldens_and_unique_names() {
    let mut tools: Vec<&str> = Vec::new();
    for format in ToolFormat::ALL {
        assert!(goldens().iter().any(|golden| golden.parsers.tools == Some(format)), "{format:?}");
        assert_eq!(ToolFormat::from_name(format.name()), Some(format));
        tools.extend(format.names());
    }
    let mut reasoning: Vec<&str> = Vec::new();
    for format in ReasoningFormat::ALL {
        assert!(goldens().iter().any(|golden| golden.parsers.reasoning == Some(format)), "{format:?}");
        assert_eq!(ReasoningFormat::from_name(format.name()), Some(format));
        reasoning.extend(format.names());
    }
    for names in [tools, reasoning] {
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }
    assert_eq!(ToolFormat::from_name("none of these"), None);
}

#[test]
fn ids_of_calls_have_the_form_of_the_server() {
    let of = |tools| Parsers { tools, reasoning: None };
    let mistral = of(Some(ToolFormat::Mistral));
    for random in [0, 1, 61, 62, u64::MAX] {
        let id = mistral.call_id(random);
        assert!(id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()), "{id}");
    }
    assert_ne!(mistral.call_id(1), mistral.call_id(62));
    for tools in [None, Some(ToolFormat::Hermes), Some(ToolFormat::GptOss)] {
        assert_eq!(of(tools).call_id(255), "chatcmpl-tool-00000000000000ff");
    }
}

/// True if some golden of the pairs that `grammar` belongs to tells `altered` from it.
fn is_noticed(grammar: &'static Grammar, altered: Grammar) -> bool {
    // A few hundred small tables live as long as the test.
    let altered: &'static Grammar = Box::leak(Box::new(altered));
    goldens().iter().any(|golden| {
        let mut pair = Pair::from(golden.parsers);
        let mut is_in_use = false;
        if let Some(Tools::Grammar(known)) = &mut pair.tools
            && std::ptr::eq(*known, grammar)
        {
            (*known, is_in_use) = (altered, true);
        }
        if let Some(Thoughts::Grammar(known)) = &mut pair.reasoning
            && std::ptr::eq(*known, grammar)
        {
            (*known, is_in_use) = (altered, true);
        }
        is_in_use && golden.cases.iter().any(|json| differs(golden, &case(golden, json), json, pair))
    })
}

fn differs(golden: &Golden, case: &Case, json: &Json, pair: Pair) -> bool {
    golden.with(|vocabulary| {
        let mut stream = pair.stream(&case.request(), vocabulary).unwrap();
        let parsed = joined(&mut stream, &case.tokens);
        let tokens: Vec<_> = case.tokens.iter().map(|(id, text)| (*id, text.as_str())).collect();
        let whole = pair.unstreamed(&case.request(), vocabulary, &tokens);
        as_json(&parsed, stream.reasoning_tokens()) != json["stream"]
            || whole.is_ok_and(|whole| whole_as_json(&whole) != json["whole"])
    })
}

const GRAMMARS: [&Grammar; 7] = [
    &grammar::QWEN3,
    &grammar::GLM,
    &grammar::KIMI_K2,
    &grammar::MINIMAX_M2,
    &grammar::DEEPSEEK_V32,
    &grammar::DEEPSEEK_V4,
    &grammar::MISTRAL,
];

/// Marks inside arguments without which the same arguments come, in other pieces.
const ONLY_OF_PIECES: [&str; 5] =
    ["</arg_key>", "<arg_value>", "<parameter name=", "<｜DSML｜parameter", "</｜DSML｜parameter>"];

#[test]
fn a_marker_that_is_wrong_or_missing_is_noticed() {
    let mut missed = Vec::new();
    for grammar in GRAMMARS {
        for at in 0..grammar.spellings.len() {
            let mut wrong = grammar.spellings.to_vec();
            let (mark, text) = wrong.remove(at);
            let missing = Grammar { spellings: wrong.clone().leak(), ..grammar.clone() };
            let short = &text[..text.char_indices().next_back().unwrap().0];
            wrong.insert(at, (mark, format!("{short}~").leak()));
            let wrong = Grammar { spellings: wrong.leak(), ..grammar.clone() };
            let is_needed = !ONLY_OF_PIECES.contains(&text);
            if is_needed && !is_noticed(grammar, wrong) && !is_noticed(grammar, missing) {
                missed.push(format!("{:?} {text}", grammar.arguments));
            }
        }
    }
    assert_none(&missed);
}

#[test]
fn a_step_that_is_missing_is_noticed() {
    let mut missed = Vec::new();
    for grammar in GRAMMARS {
        let has = |mark: grammar::Mark| grammar.spellings.iter().any(|(known, _)| *known == mark);
        for at in 0..grammar.steps.len() {
            let mut steps = grammar.steps.to_vec();
            let step = steps.remove(at);
            let is_reasoning =
                step.0 == grammar::GrammarState::Reasoning || step.2 == grammar::GrammarState::Reasoning;
            let is_used = has(step.1) && (!is_reasoning || has(grammar::Mark::ThinkStart));
            let altered = Grammar { steps: steps.leak(), ..grammar.clone() };
            if is_used && !is_noticed(grammar, altered) {
                missed.push(format!("{:?} {:?} {:?}", grammar.arguments, step.0, step.1));
            }
        }
    }
    assert_none(&missed);
}

#[test]
fn another_flag_is_noticed() {
    let mut missed = Vec::new();
    for grammar in GRAMMARS {
        let thinks = grammar.thinks != Thinks::Never;
        let altered = [
            (
                "strips_reasoning",
                thinks,
                Grammar { strips_reasoning: !grammar.strips_reasoning, ..grammar.clone() },
            ),
            ("strips_content", true, Grammar { strips_content: !grammar.strips_content, ..grammar.clone() }),
            ("checks_names", true, Grammar { checks_names: !grammar.checks_names, ..grammar.clone() }),
            ("thinks", thinks, Grammar { thinks: Thinks::Never, ..grammar.clone() }),
            ("by_token", thinks, Grammar { by_token: &[], ..grammar.clone() }),
        ];
        for (name, is_used, altered) in altered {
            if is_used && !is_noticed(grammar, altered) {
                missed.push(format!("{:?} {name}", grammar.arguments));
            }
        }
    }
    assert_none(&missed);
}

#[test]
fn a_brace_that_is_lost_is_noticed() {
    assert_none(&differences(|golden, case, json| {
        let last = case.tokens.iter().rposition(|(_, text)| text.contains('}'))?;
        let has_calls = json["whole"]["calls"].as_array().is_some_and(|calls| !calls.is_empty());
        if golden.parsers.tools != Some(ToolFormat::Hermes) || !has_calls {
            return None;
        }
        let mut tokens = case.tokens.clone();
        tokens[last].1 = tokens[last].1.replacen('}', "", 1);
        let parsed = joined(case.stream(golden).as_mut(), &tokens);
        let short = Case { tokens, ..self::case(golden, json) };
        let is_same = as_json(&parsed, 0)["calls"] == json["stream"]["calls"]
            && short
                .unstreamed(golden)
                .is_ok_and(|whole| whole_as_json(&whole)["calls"] == json["whole"]["calls"]);
        is_same.then(|| case.name.clone())
    }));
}

#[test]
fn a_marker_of_harmony_that_is_lost_is_noticed() {
    let is_missed = |text: &&&str| {
        let lost = |golden: &Golden, json: &Json| {
            let marker = golden.markers[**text];
            let mut case = case(golden, json);
            for (token, _) in case.tokens.iter_mut().filter(|(token, _)| *token == marker) {
                *token = golden.markers["<|reserved_200010|>"];
            }
            let mut parser = case.stream(golden);
            let parsed = joined(parser.as_mut(), &case.tokens);
            let is_noticed = as_json(&parsed, parser.reasoning_tokens()) != json["stream"];
            is_noticed && case.unstreamed(golden).is_ok_and(|whole| whole_as_json(&whole) != json["whole"])
        };
        let of_harmony = |golden: &&Golden| golden.markers.contains_key("<|channel|>");
        !goldens().iter().filter(of_harmony).any(|golden| golden.cases.iter().any(|json| lost(golden, json)))
    };
    let markers = ["start", "channel", "constrain", "message", "end", "call", "return"];
    let markers = markers.map(|name| format!("<|{name}|>"));
    let markers: Vec<&str> = markers.iter().map(String::as_str).collect();
    let missed: Vec<String> = markers.iter().filter(is_missed).map(|text| (**text).to_owned()).collect();
    assert_none(&missed);
}

#[test]
fn harmony_goes_with_its_own_vocabulary_and_with_no_other_parser() {
    let golden = goldens().iter().find(|golden| golden.parsers.tools == Some(ToolFormat::GptOss)).unwrap();
    let request = Request { may_call: true, ..Request::default() };
    let mixed = [
        Parsers { tools: Some(ToolFormat::GptOss), reasoning: Some(ReasoningFormat::Qwen3) },
        Parsers { tools: Some(ToolFormat::GptOss), reasoning: Some(ReasoningFormat::DeepseekR1) },
        Parsers { tools: Some(ToolFormat::Hermes), reasoning: Some(ReasoningFormat::GptOss) },
    ];
    for parsers in mixed {
        golden.with(|vocabulary| {
            assert!(parsers.stream(&request, vocabulary).is_err(), "{parsers}");
            assert!(parsers.unstreamed(&request, vocabulary, &[(1, "a")]).is_err(), "{parsers}");
        });
    }
    for marker in ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"] {
        let mut markers = golden.markers.clone();
        markers.insert(marker.to_owned(), 7);
        let other = Vocabulary { id: &|text| markers.get(text).copied(), special: &[] };
        assert!(golden.parsers.stream(&request, &other).is_err(), "{marker}");
    }
}

/// vLLM filters what its parsers give (0.32, `entrypoints/serve/utils/tool_calls_utils.py`).
#[test]
fn with_a_single_call_the_others_are_left_out_and_nothing_else() {
    let mut several = 0;
    for golden in goldens() {
        for case in golden.cases.iter().map(|json| case(golden, json)) {
            let single = Request { single_call: true, ..case.request() };
            let mut streamed = joined(case.stream(golden).as_mut(), &case.tokens);
            several += usize::from(streamed.calls.len() > 1);
            streamed.calls.retain(|call| call.index == 0);
            let tokens: Vec<_> = case.tokens.iter().map(|(id, text)| (*id, text.as_str())).collect();
            golden.with(|vocabulary| {
                let mut parser = golden.parsers.stream(&single, vocabulary).unwrap();
                assert_eq!(joined(parser.as_mut(), &case.tokens), streamed, "{}", case.name);
                let mut whole = case.unstreamed(golden);
                if let Ok(whole) = &mut whole {
                    whole.calls.truncate(1);
                }
                assert_eq!(golden.parsers.unstreamed(&single, vocabulary, &tokens), whole, "{}", case.name);
            });
        }
    }
    assert!(several > 20, "{several} streams have several calls");
}

/// A fork at `cut` goes on as if nothing had been cut, and what is done with the original, or with
/// a fork that is thrown away, does not reach it.
fn check_forks(golden: &Golden, case: &Case, cut: usize) {
    let mut parser = case.stream(golden);
    let mut before = Parsed::default();
    for (token, text) in &case.tokens[..cut] {
        before.append(parser.push(*token, text));
    }
    let mut fork = parser.fork();
    let mut lost = parser.fork();
    lost.push(0, "<tool_call>}{\"</think>");
    lost.finish();
    let after = joined(parser.as_mut(), &case.tokens[cut..]);
    assert_eq!(after, joined(fork.as_mut(), &case.tokens[cut..]), "{} at {cut}", case.name);
    before.append(after);
    let mut straight = case.stream(golden);
    assert_eq!(before, joined(straight.as_mut(), &case.tokens), "{} at {cut}", case.name);
    assert_eq!(parser.reasoning_tokens(), straight.reasoning_tokens(), "{} at {cut}", case.name);
}

#[test]
fn a_fork_at_every_token_goes_on_the_same() {
    for golden in goldens() {
        // Every family, a few cases each: all places of all cases are a long product.
        for json in golden.cases.iter().step_by(3) {
            let case = case(golden, json);
            (0..=case.tokens.len()).for_each(|cut| check_forks(golden, &case, cut));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn forks_of_any_case_go_on_the_same(pick in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
        let all: Vec<_> = goldens().iter().flat_map(|golden| golden.cases.iter().map(move |json| (golden, json))).collect();
        let (golden, json) = all[pick.index(all.len())];
        let case = case(golden, json);
        check_forks(golden, &case, cut.index(case.tokens.len() + 1));
    }

    #[test]
    fn pieces_of_json_are_json_as_long_as_another_reader_says_so(parts in prop::collection::vec(r#"[\[\]{},: 10]|"|"a"|"a":|true|nul|null"#, 0..12)) {
        let text = parts.concat();
        let mut pieces = pieces::Pieces::new();
        let is_json = text.chars().all(|c| pieces.push(c).is_ok());
        // A word is certain with the character behind it.
        let is_json = is_json && !text.ends_with("nul");
        let read = serde_json::from_str::<serde::de::IgnoredAny>(&text);
        let expected = read.as_ref().map_or_else(serde_json::Error::is_eof, |_| true) && !text.ends_with("nul");
        prop_assert_eq!(is_json, expected, "{}", text);
    }

    #[test]
    fn nothing_fails_on_any_text(texts in prop::collection::vec("[ -~\n]{0,4}|<tool_call>|</tool_call>|</?think>|<function=|<parameter=x>|</parameter>|</function>|é🎉|<\\|(start|channel|message|end|call)\\|>|\\[(TOOL_CALLS|ARGS|THINK)\\]|[\\[{]\"name\": \"f\", |\"arguments\": \\{", 0..40)) {
        for golden in goldens() {
            let case = case(golden, &golden.cases[0]);
            let id = |text: &String| golden.markers.get(text).copied().unwrap_or(9_999);
            let case = Case { tokens: texts.iter().map(|text| (id(text), text.clone())).collect(), ..case };
            let mut parser = case.stream(golden);
            joined(parser.as_mut(), &case.tokens);
            let _ = case.unstreamed(golden);
        }
    }
}
