//! Answers are the server's own, for many grammars, limits and stop texts.

use std::collections::{BTreeMap, BTreeSet};

use rstest::rstest;

use super::*;
use crate::fakes::house::Script;

/// Grammars of every kind.
pub fn structures() -> Vec<Value> {
    let text = json!({"type": "string"});
    let person = json!({"type": "object", "required": ["name", "age"], "additionalProperties": false,
        "properties": {"name": text, "age": {"type": "integer"}, "tags": {"type": "array", "items": text}}});
    let levels = json!({"type": "object", "required": ["level", "on"],
        "properties": {"level": {"enum": ["low", "mid", "high", 3, null]}, "on": {"type": "boolean"}}});
    let nested = json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "object", "required": ["b"],
        "properties": {"b": {"type": "object", "properties": {"c": text, "d": {"type": "null"}}}}}}});
    let numbers = json!({"type": "array", "minItems": 3, "maxItems": 9, "items": {"type": "number"}});
    let bounded = json!({"type": "object", "required": ["x", "y"],
        "properties": {"x": {"type": "integer", "minimum": -40, "maximum": 1200}, "y": {"type": "number"}}});
    let either = json!({"anyOf": [{"type": "object", "required": ["ok"], "properties": {"ok": {"const": true}}},
        {"type": "object", "required": ["error"], "properties": {"error": text}}]});
    let tree = json!({"$defs": {"node": {"type": "object", "required": ["value"],
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"});
    let pattern = json!({"type": "object", "required": ["id", "on"],
        "properties": {"id": {"type": "string", "pattern": "^[a-z]{2,9}-[0-9]{1,6}$"}, "on": {"type": "string", "format": "date"}}});
    let short = json!({"type": "object", "required": ["word"], "properties": {"word": {"type": "string", "minLength": 2, "maxLength": 12}}});
    let open = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let pair =
        json!({"type": "array", "prefixItems": [text, {"type": "boolean"}], "items": false, "minItems": 2});
    let outputs = |name: &str, value: Value| json!({"structured_outputs": {name: value}});
    let mut all: Vec<Value> =
        [&person, &levels, &nested, &numbers, &bounded, &either, &tree, &pattern, &short]
            .into_iter()
            .map(schema)
            .collect();
    all.extend([
        json!({"response_format": {"type": "json_object"}}),
        outputs("json", open),
        outputs("json", json!(pair.to_string())),
        outputs("json_object", json!(true)),
        outputs("regex", json!("[a-z]{3,8}( [a-z]{3,8}){2,9}[.]")),
        outputs("regex", json!("(20[0-9]{2}-[01][0-9]-[0-3][0-9](, )?){1,9}")),
        outputs("regex", json!("(ä|ö|ü|東京|é){4,12}!?")),
        outputs("regex", json!(".*")),
        outputs("choice", json!(["yes", "yes, but only on Sundays", "no", "say \"no\\n\""])),
    ]);
    all
}

/// A server that has this version and this runner, with another end of the text.
async fn scene(version: &'static str, library: Library) -> Scene {
    let mut options = Options { library, ..options(version) };
    options.other_ends = vec![toy::Toy::new(Temper::default()).encode("<|end|>")[0]];
    Scene::of(options).await
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_under_a_grammar_are_the_servers_own(
    #[values("0.32.0", "0.33.0")] version: &'static str,
    #[values(Library::Auto, Library::Guidance, Library::FixedWhitespace, Library::FixedGuidance)]
    library: Library,
) {
    let scene = scene(version, library).await;
    let (mut listed, mut banned, mut sent, mut speculated) = (0, 0, 0, 0);
    for structure in structures() {
        for (route, stream) in ways() {
            let ask = asked(route, stream, &structure, &json!({}));
            sent += 2;
            speculated += usize::from(scene.proves(&ask).await);
            speculated += usize::from(scene.alike(&ask).await.0 == "speculated");
        }
        for call in scene.one_token_calls() {
            listed += usize::from(call.get("allowed_token_ids").is_some());
            banned += usize::from(call.get("logit_bias").is_some());
        }
    }
    assert!(listed > 20 && banned > 0, "{listed} calls with a list, {banned} with bans");
    assert!(speculated > sent / 3, "{speculated} of {sent}");
    scene.leave().await;
}

/// The first request is plain, a later one is not: the server's answer has proved the grammar.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grammar_is_plain_until_an_answer_has_proved_it() {
    let scene = scene("0.33.0", Library::Auto).await;
    let ask = asked(Route::Chat, true, &structures()[0], &json!({}));
    assert_eq!(scene.alike(&ask).await, plain("grammar"));
    scene.is_quiet().await;
    assert_eq!(scene.alike(&ask).await.0, "speculated");
    // The same grammar, asked for in another way.
    let member = ask.fields["response_format"]["json_schema"]["schema"].clone();
    let other = json!({"structured_outputs": {"json": member}});
    let ask = asked(Route::Completions, false, &other, &json!({}));
    assert_eq!(scene.alike(&ask).await.0, "speculated");
    scene.leave().await;
}

/// The model writes a preamble, as such models do, in a text that never has one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_would_write_something_else_is_held_to_the_grammar() {
    let mut options = options("0.33.0");
    options.setup.scripts = vec![Script {
        after: "<|end|>\n<|assistant|>\n".to_owned(),
        text: "Sure, here is the answer: {\"name\": \"Bob\", \"size\": 4, \"age\": 42, \"tags\": [\"a\"], \"name\": 3}"
            .to_owned(),
    }];
    let scene = Scene::of(options).await;
    for stream in [false, true] {
        for structure in [0, 1, 9, 13, 17].map(|at| structures()[at].clone()) {
            let ask = asked(Route::Chat, stream, &structure, &json!({}));
            scene.proves(&ask).await;
            scene.alike(&ask).await;
        }
    }
    assert!(!scene.one_token_calls().is_empty());
    scene.leave().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_cuts_an_answer_where_the_server_does(#[values(0, 3, 13)] number: usize) {
    let scene = scene("0.33.0", Library::Auto).await;
    let structure = &structures()[number];
    scene.proves(&asked(Route::Chat, true, structure, &json!({}))).await;
    for most in 1..24 {
        let (route, stream) = ways()[most % 4];
        scene.proves(&asked(route, stream, structure, &json!({"max_tokens": most}))).await;
    }
    scene.leave().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_text_ends_an_answer_where_it_ends_the_servers(
    #[values("0.32.0", "0.33.0")] version: &'static str,
) {
    let scene = scene(version, Library::Auto).await;
    for number in [0, 5, 9, 13] {
        let structure = &structures()[number];
        for (route, stream) in ways() {
            let ask = asked(route, stream, structure, &json!({}));
            let text = scene.direct(&ask).await.plain.text;
            scene.proves(&ask).await;
            let all = text.chars().count();
            for (from, length) in
                [(0, 1), (all / 4, 3), (all / 2, 2), (all * 3 / 4, 5), (all.saturating_sub(2), 2)]
            {
                let stop: String = text.chars().skip(from).take(length).collect();
                let more =
                    json!({"stop": [stop, "never there"], "include_stop_str_in_output": from % 2 == 0});
                scene.proves(&asked(route, stream, structure, &more)).await;
            }
        }
    }
    scene.leave().await;
}

/// The model repeats its prompt, so drafts pay, which the proxy has to find out. It would go on
/// behind the end.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_the_built_in_policy_they_are_the_servers_own_too(
    #[values("0.32.0", "0.33.0")] version: &'static str,
    #[values(false, true)] stream: bool,
) {
    let people: Vec<String> = (0..8)
        .map(|at| format!("{{\"name\": \"Bob\", \"age\": 4{at}, \"tags\": [\"red\", \"green\"]}}"))
        .collect();
    let list = format!("[{}]", people.join(", "));
    let mut options = options(version);
    options.setup.pace.step = Duration::from_millis(12);
    let after = "<|end|>\n<|assistant|>\n".to_owned();
    options.setup.scripts = vec![Script { after, text: format!("{list} That is all.") }];
    let scene = Scene::under(options, &[]).await;
    let items = structures()[0]["response_format"]["json_schema"]["schema"].clone();
    let structure = schema(&json!({"type": "array", "items": items}));
    let ask = asked(Route::Chat, stream, &structure, &json!({"prompt": list, "max_tokens": 400}));
    let mut why = BTreeMap::<_, usize>::new();
    while !why.keys().any(|(path, _)| path == "speculated") {
        *why.entry(scene.alike(&ask).await).or_default() += 1;
        assert!(why.values().sum::<usize>() < 20, "{why:?}");
    }
    scene.leave().await;
}

/// Neither changes anything at temperature 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_and_a_share_of_the_likeliest_make_no_difference() {
    let scene = scene("0.33.0", Library::Auto).await;
    let structure = &structures()[0];
    for more in [
        json!({"seed": 7}),
        json!({"top_p": 0.3, "top_k": 4, "min_p": 0.2}),
        json!({"return_token_ids": false}),
    ] {
        let ask = asked(Route::Chat, true, structure, &more);
        scene.proves(&ask).await;
        assert_eq!(scene.alike(&ask).await.0, "speculated", "{more}");
    }
    scene.leave().await;
}

/// The texts of so many answers, and how many of these the grammar did not keep plain.
async fn drawn(scene: &Scene, ask: &Ask, to: SocketAddr) -> (BTreeMap<String, f64>, u32) {
    let (mut texts, mut free) = (BTreeMap::new(), 0);
    for _ in 0..DRAWS {
        let answer = ask.send(to, "te: trailers\r\n").await;
        assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
        free += u32::from(told(&answer) != plain("grammar"));
        *texts.entry(answer.plain.text + " " + &answer.plain.finish).or_default() += 1.0 / f64::from(DRAWS);
    }
    scene.is_quiet().await;
    (texts, free)
}

const DRAWS: u32 = 500;

#[rstest]
#[case::choice(json!({"structured_outputs": {"choice": ["yes", "no", "maybe", "yes, now", "yes, no"]}}), 40)]
#[case::regex(json!({"structured_outputs": {"regex": "(a|b|ca|cb){3}"}}), 40)]
#[case::cut(json!({"structured_outputs": {"regex": "((yes|no|yet), ){9}"}}), 3)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn above_temperature_0_texts_are_as_likely_as_the_servers_own(
    #[case] structure: Value,
    #[case] most: u32,
    #[values("0.32.0", "0.33.0")] version: &'static str,
) {
    let scene = scene(version, Library::Auto).await;
    let prompt = "yes, no, yes, no, ab ca cb ab ca cb, yes, ";
    let cut = |most: u32| {
        let more = json!({"temperature": 1.5, "max_tokens": most, "prompt": prompt});
        asked(Route::Completions, false, &structure, &more)
    };
    // A few tokens of an answer prove nothing.
    for _ in 0..3 {
        scene.through(&cut(40)).await;
        scene.is_quiet().await;
    }
    let ask = cut(most);
    let (own, _) = drawn(&scene, &ask, scene.engine.address).await;
    let (got, free) = drawn(&scene, &ask, scene.front()).await;
    let likely = |texts: &BTreeMap<String, f64>, text: &String| texts.get(text).copied().unwrap_or_default();
    let all: BTreeSet<&String> = own.keys().chain(got.keys()).collect();
    let apart = all.iter().map(|text| (likely(&own, text) - likely(&got, text)).abs()).sum::<f64>() / 2.0;
    // Two samples of one distribution of so many texts are about this far apart.
    let usual = (all.len() as f64 / f64::from(DRAWS) / std::f64::consts::PI).sqrt();
    assert!(free > DRAWS - DRAWS / 10, "{free} of {DRAWS} were not plain for their grammar");
    assert!(all.len() > 2 && apart < 2.0 * usual.max(0.04), "{apart} {usual}: {own:?} {got:?}");
    scene.leave().await;
}

/// At the second word more than 1,024 tokens are allowed, and very many that are not are likelier
/// than the likeliest of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_goes_on_where_many_likelier_tokens_are_barred() {
    let mut options = options("0.33.0");
    options.setup.temper.seed = 1;
    let scene = Scene::of(options).await;
    let structure = json!({"structured_outputs": {"regex": "[a-z]{3,8}( [a-z]{3,8}){2,9}[.]"}});
    let mut most = 0;
    for number in 0..6 {
        let prompt = format!("{PROMPT} {number}");
        let ask = asked(Route::Completions, false, &structure, &json!({"prompt": prompt}));
        scene.proves(&ask).await;
        scene.alike(&ask).await;
        let bans = |call: Value| call["logit_bias"].as_object().map_or(0, serde_json::Map::len);
        most = scene.one_token_calls().into_iter().map(bans).max().unwrap_or_default().max(most);
    }
    assert!(most > 64, "{most} tokens were banned at most");
    scene.leave().await;
}
