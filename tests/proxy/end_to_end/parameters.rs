//! Every parameter that verify requests carry: the same text as the target alone, with each
//! verification method.

use rstest::rstest;
use serde_json::{Value, json};

use super::house::{Ask, House, Setup};

const PROMPT: &str = "take the fox, take the dog: let mut taken = String::new(); ";

fn settings(house: &House) -> Vec<Value> {
    let id = |text: &str| house.tokenizer.encode(text, false).unwrap()[0];
    let biased = id("e").to_string();
    vec![
        json!({"temperature": 0}),
        json!({"temperature": 1.0}),
        json!({"temperature": 0.5, "top_p": 0.7}),
        json!({"temperature": 1.5, "top_k": 5}),
        json!({"temperature": 1.2, "min_p": 0.1}),
        json!({"temperature": 0, "presence_penalty": 1.5}),
        json!({"temperature": 0.7, "frequency_penalty": 0.8}),
        json!({"temperature": 0.3, "repetition_penalty": 1.4}),
        json!({"temperature": 0.8, "logit_bias": {biased: 6.0}}),
        json!({"temperature": 0.8, "ignore_eos": true}),
        json!({"temperature": 0.8, "min_tokens": 20, "logit_bias": {"0": 4.0}}),
        json!({"temperature": 0.8, "stop": ["tak", "ll", "e t", "ü"]}),
        json!({"temperature": 0.8, "stop": ["a", "i"], "min_tokens": 12}),
        json!({"temperature": 0.8, "stop": ["ta", "s"], "include_stop_str_in_output": true}),
        json!({"temperature": 0.8, "stop_token_ids": [id("t"), id("s")]}),
        json!({"temperature": 0.8, "stop_token_ids": [id("t"), id("s"), id("i")], "min_tokens": 15}),
        json!({"temperature": 0.8, "max_tokens": 1}),
        json!({"temperature": 0, "response_format": {"type": "json_object"}}),
        json!({"temperature": 0.8, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
            "type": "object", "properties": {"taken": {"type": "string"}, "fox": {"type": "integer"}},
            "required": ["fox", "taken"], "additionalProperties": false}}}}),
        json!({"temperature": 1.0, "structured_outputs": {"regex": "(take the (fox|dog), ){1,9}end"}}),
        // Drafts from the prompt break it.
        json!({"temperature": 0, "structured_outputs": {"regex": "(take the (fox|cat), )*end"}}),
        json!({"temperature": 0.8, "min_tokens": 20, "structured_outputs": {"choice": ["take the fox", "take"]}}),
        json!({"temperature": 0.8, "presence_penalty": 0.5, "structured_outputs":
            {"json": {"enum": [{"take": "fox"}, {"take": "dog"}]}, "disable_any_whitespace": true}}),
        json!({"temperature": 1.2, "top_k": 9, "structured_outputs": {"grammar": "start: \"take \" /[a-z]{2,40}/"}}),
        json!({"temperature": 0.8, "max_tokens": 2}),
    ]
}

#[rstest]
#[case::tree("[tree]")]
#[case::fan_out("[fan_out]")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_carried_parameter_keeps_the_text(#[case] methods: &str) {
    let house = House::build(Setup { methods, ..Setup::default() }).await;
    let mut wrong = Vec::new();
    let (mut speculated, mut accepted) = (0, 0);
    for setting in settings(&house) {
        for seed in 0..3 {
            let mut fields =
                json!({"prompt": PROMPT, "max_tokens": 32, "seed": seed, "return_token_ids": true});
            fields.as_object_mut().unwrap().extend(setting.as_object().unwrap().clone());
            for ask in Ask::all(&fields) {
                let plain = house.direct(&ask).await;
                let answer = house.through(&ask, "p").await;
                assert_eq!(plain.plain.status, 200, "{setting} {}", plain.message.text());
                if (&answer.plain, &answer.ids) != (&plain.plain, &plain.ids) {
                    let foretell = answer.foretell();
                    wrong.push(format!("{setting} {ask:?}\n  {foretell}\n  {answer:?}\n  {plain:?}"));
                }
                assert_ne!(answer.foretell()["reason"], "verify_fault", "{setting}");
                speculated += usize::from(answer.foretell()["path"] == "speculated");
                accepted += answer.foretell()["accepted"].as_u64().unwrap_or(0);
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong, the first:\n{}", wrong.len(), wrong[0]);
    assert!(speculated > 100 && accepted > 100, "{speculated} speculated on, {accepted} accepted");
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_seed_the_answer_is_the_one_that_its_own_seed_gives() {
    let house = House::build(Setup::default()).await;
    let mut texts = Vec::new();
    for (at, mut ask) in
        Ask::all(&json!({"prompt": PROMPT, "max_tokens": 32, "temperature": 0.9, "ignore_eos": true}))
            .into_iter()
            .enumerate()
    {
        let id = format!("unseeded-{at}");
        let answer = house.through(&ask, &id).await;
        let calls = house.middlebox.seen(&id);
        let seed = calls[0].seed.expect("the first call carries a seed");
        assert!(calls.len() > 2 && calls.iter().all(|call| call.seed == Some(seed)), "{calls:?}");
        assert!(answer.message.text().contains(&seed.to_string()), "our target reports its seed");
        ask.fields["seed"] = json!(seed);
        assert_eq!(answer.plain, house.direct(&ask).await.plain, "{id}");
        texts.push(answer.plain.text);
    }
    assert!(texts.windows(2).any(|pair| pair[0] != pair[1]), "each request has its own seed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_that_a_grammar_binds_keeps_to_it_and_is_speculated_on() {
    let house = House::build(Setup::default()).await;
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["animal", "taken"],
        "properties": {"animal": {"enum": ["the fox", "the dog"]}, "taken": {"type": "boolean"}},
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
    let cases = [
        (json!({"response_format": format}), "chat"),
        (json!({"structured_outputs": {"choice": ["take the fox, take the dog", "let mut taken"]}}), "texts"),
    ];
    let (mut accepted, mut speculated) = (0, 0);
    for (bound, kind) in cases {
        for temperature in [0.0, 0.9] {
            let mut fields = json!({"prompt": PROMPT, "max_tokens": 200, "temperature": temperature});
            fields.as_object_mut().unwrap().extend(bound.as_object().unwrap().clone());
            for ask in Ask::all(&fields) {
                let answer = house.through(&ask, "g").await;
                let text = &answer.plain.text;
                match kind {
                    "chat" => {
                        let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text:?}"));
                        assert!(
                            ["the fox", "the dog"].contains(&value["animal"].as_str().unwrap()),
                            "{value}"
                        );
                        assert!(value["taken"].is_boolean(), "{value}");
                    }
                    _ => assert!(
                        ["take the fox, take the dog", "let mut taken"].contains(&text.as_str()),
                        "{text}"
                    ),
                }
                speculated += usize::from(answer.foretell()["path"] == "speculated");
                accepted += answer.foretell()["accepted"].as_u64().unwrap_or(0);
            }
        }
    }
    assert!(speculated >= 12 && accepted > 10, "{speculated} speculated on, {accepted} accepted");
    House::assert_calm();
}
