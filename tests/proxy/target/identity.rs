//! The same seed gives the same tokens, however they are computed.

use serde_json::{Value, json};

use super::client::{Server, choices, ids, ids_of, serve, text_of};
use super::fake::Fake;

/// Sampling settings that must all be carried through every way of computing.
pub fn settings() -> Vec<Value> {
    vec![
        json!({"temperature": 0}),
        json!({"temperature": 0.8, "top_p": 0.9, "seed": 42}),
        json!({"temperature": 1.3, "seed": 7, "top_k": 20, "min_p": 0.02}),
        json!({"temperature": 1.0, "seed": 3, "presence_penalty": 0.7, "frequency_penalty": 0.3, "min_tokens": 20}),
        json!({"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"97": 2.5, "101": -3}}),
    ]
}

fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub fn prompt() -> Vec<u32> {
    "def main():".bytes().map(u32::from).collect()
}

pub async fn plain(server: &Server, setting: &Value, tokens: usize) -> Vec<u32> {
    let body = json!({"model": "toy", "prompt": prompt(), "max_tokens": tokens, "return_token_ids": true, "ignore_eos": true});
    ids(&server.ask("/v1/completions", &with(setting, body)).await["choices"][0]["token_ids"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_continued_by_ids_equals_the_plain_run() {
    let server = serve(Fake::new(4, 512)).await;
    for setting in settings() {
        let want = plain(&server, &setting, 40).await;
        for cut in [1, 7, 39] {
            let context = [prompt(), want[..cut].to_vec()].concat();
            let body = json!({"prompt": context, "generated": cut, "max_tokens": 40 - cut, "return_token_ids": true, "ignore_eos": true});
            let answer = server.ask("/v1/completions", &with(&setting, body)).await;
            assert_eq!(ids(&answer["choices"][0]["token_ids"]), want[cut..], "{setting} cut at {cut}");
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert!(cut < 39 || cached >= 49, "the lane of the plain run is found again: {cached}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fan_out_samples_the_tokens_of_the_plain_run() {
    let server = serve(Fake::new(4, 512)).await;
    for setting in settings() {
        let want = plain(&server, &setting, 24).await;
        let starts = 0..24_usize;
        let prompts: Vec<Vec<u32>> =
            starts.clone().map(|cut| [prompt(), want[..cut].to_vec()].concat()).collect();
        let body = json!({"prompt": prompts, "generated": starts.collect::<Vec<_>>(), "max_tokens": 1, "return_token_ids": true, "ignore_eos": true});
        let answer = server.ask("/v1/completions", &with(&setting, body)).await;
        let got: Vec<u32> = (0..24).map(|i| ids(&answer["choices"][i]["token_ids"])[0]).collect();
        assert_eq!(got, want, "{setting}");
    }
}

/// Runs a whole output through `/v1/verify`, with drafts that are right for some tokens and wrong
/// for others.
pub async fn by_verify(server: &Server, setting: &Value, want: &[u32], tree: bool) -> (Vec<u32>, u64) {
    let (mut out, mut round, mut uncached) = (Vec::new(), 0_usize, 0);
    while out.len() < want.len() {
        round += 1;
        let right = &want[out.len()..(out.len() + round % 5).min(want.len())];
        let (mut tokens, mut parents) = (Vec::new(), Vec::new());
        let mut parent = -1_i64;
        for (depth, &token) in right.iter().enumerate() {
            if tree {
                // A wrong sibling first, with a child of its own: the accepted branch is not
                // contiguous.
                parents.extend([parent, tokens.len() as i64]);
                tokens.extend([(token + 1) % 256, token]);
            }
            let wrong = !tree && depth == 3 && round % 2 == 0;
            parents.push(parent);
            tokens.push(if wrong { (token + 1) % 256 } else { token });
            parent = tokens.len() as i64 - 1;
        }
        let context = [prompt(), out.clone()].concat();
        let length = context.len() as u64;
        let body = json!({"model": "toy", "context": context, "generated": out.len(), "tokens": tokens, "parents": parents, "logprobs": round % 2 == 0});
        let answer = server.ask("/v1/verify", &with(setting, body)).await;
        let rows = answer["rows"].as_array().unwrap();
        assert_eq!(rows.len(), tokens.len() + 1);
        let accepted = ids(&answer["accepted"]);
        let mut last = 0;
        for node in accepted {
            out.push(tokens[node as usize]);
            last = node as usize + 1;
        }
        out.push(rows[last]["sample"].as_u64().unwrap() as u32);
        if round > 1 {
            uncached = uncached
                .max(length - answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        }
    }
    out.truncate(want.len());
    (out, uncached)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verified_chains_and_trees_give_the_plain_run() {
    let server = serve(Fake::new(4, 512)).await;
    for setting in settings() {
        let want = plain(&server, &setting, 48).await;
        for tree in [false, true] {
            let (got, uncached) = by_verify(&server, &setting, &want, tree).await;
            assert_eq!(got, want, "{setting}, tree {tree}");
            assert_eq!(uncached, 1, "in steady state only the last token is computed anew");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verification_result_has_the_logprobs_of_the_plain_run() {
    let server = serve(Fake::new(2, 512)).await;
    let setting = json!({"temperature": 0.9, "seed": 11, "top_p": 0.95});
    let body = json!({"prompt": prompt(), "max_tokens": 6, "return_token_ids": true, "logprobs": 2, "return_tokens_as_token_ids": true, "ignore_eos": true});
    let plain = server.ask("/v1/completions", &with(&setting, body)).await;
    let tokens = ids(&plain["choices"][0]["token_ids"]);
    let body = json!({"context": prompt(), "tokens": tokens[..5], "top_logprobs": 2});
    let result = server.ask("/v1/verify", &with(&setting, body)).await;
    assert_eq!(ids(&result["accepted"]), [0, 1, 2, 3, 4]);
    assert_eq!(result["seed"], 11);
    for position in 0..6 {
        let (row, logprobs) = (&result["rows"][position], &plain["choices"][0]["logprobs"]);
        assert_eq!(row["sample"], tokens[position]);
        assert_eq!(row["logprob"], logprobs["token_logprobs"][position]);
        for pair in row["top"].as_array().unwrap() {
            assert_eq!(pair[1], logprobs["top_logprobs"][position][format!("token_id:{}", pair[0])]);
        }
        if position > 0 {
            assert_eq!(row["draft_logprob"], result["rows"][position - 1]["logprob"]);
        } else {
            assert_eq!(row["draft_logprob"], Value::Null);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_logprobs_only_the_rows_that_samples_reach_are_judged() {
    let server = serve(Fake::new(2, 512)).await;
    let setting = json!({"temperature": 0.9, "seed": 11, "presence_penalty": 0.4});
    let want = plain(&server, &setting, 3).await;
    let wrong = (want[0] + 1) % 256;
    // A wrong token with a child, before the right one, which is followed by a wrong child.
    let draft = json!({"context": prompt(), "tokens": [wrong, want[1], want[0], (want[1] + 1) % 256], "parents": [-1, 0, -1, 2]});
    let all = server.ask("/v1/verify", &with(&setting, draft.clone())).await;
    let fewer = server.ask("/v1/verify", &with(&setting, with(&draft, json!({"logprobs": false})))).await;
    assert_eq!((&all["accepted"], &fewer["accepted"]), (&json!([2]), &json!([2])));
    for (row, reached) in [true, false, false, true, false].into_iter().enumerate() {
        let (all, fewer) = (&all["rows"][row], &fewer["rows"][row]);
        assert!(all["sample"].is_u64() && all["logprob"].is_f64(), "{all}");
        assert_eq!(fewer["sample"], if reached { all["sample"].clone() } else { Value::Null }, "{row}");
        assert_eq!((&fewer["logprob"], &fewer["draft_logprob"]), (&Value::Null, &Value::Null));
    }
    let both = with(&draft, json!({"logprobs": false, "top_logprobs": 2}));
    assert!(server.post("/v1/verify", &both).await.1.to_string().contains("needs logprobs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_seed_is_reported_and_reproduces_the_output() {
    let server = serve(Fake::new(4, 512)).await;
    let body = json!({"prompt": "abc", "max_tokens": 30, "temperature": 1.5, "n": 2, "return_token_ids": true, "ignore_eos": true});
    let answer = server.ask("/v1/completions", &body).await;
    let seeds: Vec<u64> = (0..2).map(|i| answer["choices"][i]["seed"].as_u64().unwrap()).collect();
    assert!(seeds[0] != seeds[1] && seeds.iter().all(|&seed| seed < 1 << 53));
    let again = server.ask("/v1/completions", &with(&body, json!({"seed": seeds[0]}))).await;
    assert_eq!(again["choices"][0]["token_ids"], answer["choices"][0]["token_ids"]);
    assert_ne!(
        again["choices"][1]["token_ids"], answer["choices"][0]["token_ids"],
        "a choice has its own noise"
    );
    let again = server.ask("/v1/completions", &with(&body, json!({"seed": seeds[1]}))).await;
    assert_eq!(again["choices"][1]["token_ids"], answer["choices"][1]["token_ids"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thirty_two_streams_at_once_equal_the_same_requests_one_by_one() {
    let server = std::sync::Arc::new(serve(Fake::new(8, 512)).await);
    let body = |i: usize| {
        let prompt = format!("{}{i}", "common beginning ".repeat(i % 3 * 4));
        json!({"prompt": prompt, "max_tokens": 20 + i, "temperature": (i % 3) as f64 * 0.6, "seed": i, "stream": true, "return_token_ids": true})
    };
    let together: Vec<_> = (0..32)
        .map(|i| {
            let (server, body) = (server.clone(), body(i));
            tokio::spawn(async move { server.stream("/v1/completions", &body).await })
        })
        .collect();
    for (i, stream) in together.into_iter().enumerate() {
        let got = stream.await.unwrap();
        let alone = server.stream("/v1/completions", &body(i)).await;
        assert_eq!(
            (text_of(&got, 0), ids_of(&got, 0)),
            (text_of(&alone, 0), ids_of(&alone, 0)),
            "request {i}"
        );
        let reason = |events: &[Value]| choices(events, 0).last().unwrap()["finish_reason"].clone();
        assert_eq!(reason(&got), reason(&alone));
    }
    assert!(server.watch.widest.load(std::sync::atomic::Ordering::SeqCst) > 1, "they were batched");
}
