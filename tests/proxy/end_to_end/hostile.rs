//! Grammars that end, hang or fill a process that compiles them without limits: each costs its own
//! request at most, through Foretell as without it.

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{Ask, House, Setup};

fn schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
}

fn pattern(pattern: &str) -> Value {
    schema(&json!({"type": "string", "pattern": pattern}))
}

fn integers(count: usize, name: &str) -> Value {
    let all = (0..count).map(|at| (format!("{name}{at}"), json!({"type": "integer"})));
    Value::Object(all.collect())
}

/// Those that are refused, and those that fail on the way or are followed.
fn hostile() -> (Vec<Value>, Vec<Value>) {
    let regex = |text: String| json!({"structured_outputs": {"regex": text}});
    let deep = (0..100).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    let refused = vec![
        pattern(&format!("a{}", "*".repeat(4_000))),
        regex(format!("a{}", "*".repeat(4_000))),
        pattern(&format!("a{}", "{0,1}".repeat(2_000))),
        schema(&json!({"type": "object", "minProperties": 300, "properties": integers(600, "p")})),
        schema(&json!({"type": "integer", "minimum": i64::MIN})),
        schema(&json!({"type": "object", "patternProperties": integers(300, "^p[a-z]{1,9}")})),
        schema(&deep),
        regex("a?".repeat(10_000)),
        pattern(&"a?".repeat(10_000)),
        json!({"structured_outputs": {"grammar": format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))}}),
    ];
    let nested = "((a{0,50}b?){0,50}c?){0,50}";
    let others = vec![
        regex(nested.to_owned()),
        pattern(nested),
        regex("(.{0,200}){0,200}".to_owned()),
        pattern("[^a]{1,5000}"),
    ];
    (refused, others)
}

fn asks(bound: &Value) -> [Ask; 2] {
    let mut fields = json!({"prompt": "take the fox, take the dog: ", "max_tokens": 64, "temperature": 0});
    fields.as_object_mut().unwrap().extend(bound.as_object().unwrap().clone());
    [Ask::new(Route::Chat, true, fields.clone()), Ask::new(Route::Completions, false, fields)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_grammar_costs_its_own_request_at_most() {
    let house = House::build(Setup::default()).await;
    let (refused, others) = hostile();
    let [usual, _] = asks(&json!({}));
    let want = house.direct(&usual).await.plain;
    for bound in &refused {
        for ask in asks(bound) {
            let (direct, through) = tokio::join!(house.direct(&ask), house.through(&ask, "h"));
            assert_eq!((direct.plain.status, through.plain.status), (400, 400), "{}", through.message.text());
            assert!(through.message.text().len() < 2_000, "no stack is shown");
        }
    }
    for bound in &others {
        for ask in asks(bound) {
            let (hostile, other) = tokio::join!(house.through(&ask, "h"), house.through(&usual, "o"));
            // An answer that has begun fails as one of a server that breaks off.
            let text = hostile.message.text();
            assert!(hostile.plain.status == 200 || text.contains("\"error\""), "{text}");
            assert_eq!(other.plain, want, "beside it");
        }
    }
    let [bound, _] = asks(&json!({"structured_outputs": {"regex": "(take the (fox|dog), ){1,9}end"}}));
    assert_eq!(house.through(&bound, "u").await.plain, house.direct(&bound).await.plain);
    House::assert_calm();
}
