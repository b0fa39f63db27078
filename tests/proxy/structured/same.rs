//! Answers are the server's own, for many grammars, limits and stop texts.

use rstest::rstest;

use super::*;

/// Grammars of every kind.
fn structures() -> Vec<Value> {
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
    let pair = json!({"type": "array", "prefixItems": [text, {"type": "boolean"}], "items": false, "minItems": 2});
    let outputs = |name: &str, value: Value| json!({"structured_outputs": {name: value}});
    let mut all: Vec<Value> = [&person, &levels, &nested, &numbers, &bounded, &either, &tree, &pattern, &short]
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
async fn scene(version: &'static str) -> Scene {
    let mut options = options(version);
    options.other_ends = vec![toy::Toy::new(Temper::default()).encode("<|end|>")[0]];
    Scene::of(options).await
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_under_a_grammar_are_the_servers_own(#[values("0.32.0", "0.33.0")] version: &'static str) {
    let scene = scene(version).await;
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
    assert!(speculated > sent / 2, "{speculated} of {sent}");
    scene.leave().await;
}

/// The first request is plain, a later one is not: the server's answer has proved the grammar.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grammar_is_plain_until_an_answer_has_proved_it() {
    let scene = scene("0.33.0").await;
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
