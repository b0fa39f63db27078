//! The corpus: a tenant's second request drafts from the text of its first, no other tenant's
//! requests do, and cleared texts are gone.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{Answer, Ask, House, Setup, get, send};
use crate::wire::PATIENCE;

const PROMPT: &str = "take the dog, take the fox, über naïve 東京: ";
const SCOPES: [&str; 3] = ["request", "tenant", "global"];

/// The tenant header with its trusted peers, and the limits of the corpus.
const TENANTS: &str =
    "tenant: { header: x-tenant, trusted_peers: [127.0.0.1/32] }\ncorpus: { bytes: 4MiB, ttl: 1h }\n";

async fn house(more: &str) -> House {
    let policies = SCOPES.map(|scope| {
        let sharing = if scope == "global" { ", i_accept_sharing: true" } else { "" };
        format!(
            "version: 1\nname: {scope}\nmatch: {{ headers: {{ x-scope: [{scope}] }} }}\n\
             drafters: [{{ kind: suffix, scope: {scope}{sharing} }}]\ngamma: {{ fixed: 8 }}\n"
        )
    });
    let policies: Vec<&str> = policies.iter().map(String::as_str).collect();
    House::build(Setup { policies: &policies, more: format!("{TENANTS}{more}"), ..Setup::default() }).await
}

fn ask(seed: u64) -> Ask {
    Ask::new(
        Route::Completions,
        false,
        json!({"prompt": PROMPT, "max_tokens": 60, "temperature": 0.9, "seed": seed, "ignore_eos": true}),
    )
}

/// Sends a request as a tenant; returns the answer and its mean acceptance length.
async fn pass(house: &House, ask: &Ask, fields: &str) -> (Answer, f64) {
    let answer = ask.send(house.front(), fields).await;
    let foretell = answer.foretell().clone();
    let count = |name: &str| foretell[name].as_f64().unwrap();
    let rounds = count("rounds").max(1.0);
    (answer, (count("accepted") + rounds) / rounds)
}

/// As [`pass`] for a policy that shares texts: the answer has no counts, so the admin API is asked
/// for them.
async fn shared_pass(house: &House, tenant: &str) -> f64 {
    ask(7).send(house.front(), &who(tenant, "global")).await;
    let sessions = get(house.admin(), "/api/sessions").await.json();
    let count = |name: &str| sessions["sessions"][0][name].as_f64().unwrap();
    let rounds = count("rounds_played").max(1.0);
    (count("accepted") + rounds) / rounds
}

/// Waits until all texts handed over have been learnt; returns the corpus as the admin API shows
/// it.
async fn learnt(admin: SocketAddr) -> Value {
    send(admin, "/api/corpus/clear?tenant=nobody", "", &json!({})).await;
    get(admin, "/api/corpus").await.json()
}

fn who(tenant: &str, scope: &str) -> String {
    format!("x-tenant: {tenant}\r\nx-scope: {scope}\r\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_pass_drafts_from_the_first_of_its_own_tenant_alone() {
    let house = house("").await;
    let (ask, plain) = (ask(5), house.direct(&ask(5)).await);
    let (first, before) = pass(&house, &ask, &who("a", "tenant")).await;
    let held = learnt(house.admin()).await;
    assert_eq!((&held["texts"], &held["entries"][0]["tenant"]), (&json!(1), &json!("a")), "{held}");
    let (second, after) = pass(&house, &ask, &who("a", "tenant")).await;
    assert!(after >= 2.0 * before && after > 5.0, "{before} {after}");
    let (_, other) = pass(&house, &ask, &who("b", "tenant")).await;
    assert!((other - before).abs() < 1e-9, "another tenant drafts as from an empty corpus: {before} {other}");
    let (_, nobody) = pass(&house, &ask, "x-scope: tenant\r\n").await;
    assert!((nobody - before).abs() < 1e-9, "no tenant, no corpus: {before} {nobody}");
    let (_, request) = pass(&house, &ask, &who("a", "request")).await;
    assert!((request - before).abs() < 1e-9);
    for answer in [&first, &second] {
        assert_eq!(answer.plain, plain.plain);
    }
    let held = learnt(house.admin()).await;
    let tenants: Vec<&Value> =
        held["entries"].as_array().unwrap().iter().map(|entry| &entry["tenant"]).collect();
    assert_eq!(tenants, [&json!("a"), &json!("b")], "texts without a tenant are not kept");
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_declines_the_corpus_adds_nothing_and_finds_nothing() {
    let house = house("").await;
    let off = |tenant: &str| format!("{}x-foretell-corpus: off\r\n", who(tenant, "tenant"));
    let (_, before) = pass(&house, &ask(6), &off("a")).await;
    assert_eq!(learnt(house.admin()).await["texts"], json!(0));
    pass(&house, &ask(6), &who("a", "tenant")).await;
    assert_eq!(learnt(house.admin()).await["texts"], json!(1));
    let (_, after) = pass(&house, &ask(6), &off("a")).await;
    assert!((after - before).abs() < 1e-9, "{before} {after}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_texts_are_shared_and_cleared_texts_are_gone() {
    let house = house("").await;
    let before = shared_pass(&house, "a").await;
    learnt(house.admin()).await;
    let other = shared_pass(&house, "b").await;
    assert!(other >= 2.0 * before, "{before} {other}");
    let before = pass(&house, &ask(7), "x-scope: tenant\r\n").await.1;
    let (_, alone) = pass(&house, &ask(7), &who("b", "tenant")).await;
    assert!(
        (alone - before).abs() < 1e-9,
        "a policy that does not share sees nothing of it: {before} {alone}"
    );
    learnt(house.admin()).await;
    let cleared = send(house.admin(), "/api/corpus/clear?tenant=b", "", &json!({})).await.json();
    assert_eq!(cleared, json!({"tenant": "b", "texts": 1}));
    let cleared = send(house.admin(), "/api/corpus/clear", "", &json!({})).await.json();
    assert_eq!(cleared, json!({"tenant": null, "texts": 1}));
    let again = shared_pass(&house, "b").await;
    assert!((again - before).abs() < 1e-9, "{before} {again}");
    let wrong = send(house.admin(), "/api/corpus/clear?tenants=b", "", &json!({})).await;
    assert_eq!(wrong.head.status(), 400, "a misspelt name clears nothing");
    let wrong = send(house.admin(), "/api/corpus/clear", "", &json!({"tenant": "b"})).await;
    assert_eq!(wrong.head.status(), 400, "nor does one that is not read");
}

/// Counts would show how far a guess agrees with the text of another client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_texts_are_shared_no_answer_counts_rounds() {
    let house = house("").await;
    // The second time there is a text to draft from.
    for scope in ["tenant", "global"] {
        ask(8).send(house.front(), &who("a", scope)).await;
    }
    learnt(house.admin()).await;
    for stream in [false, true] {
        let asked = Ask { stream, ..ask(8) };
        let fields = |scope: &str| format!("{}te: trailers\r\n", who("a", scope));
        let own = asked.send(house.front(), &fields("tenant")).await;
        assert!(own.foretell()["rounds"].as_u64() > Some(0), "{:?}", own.usage);
        let answer = asked.send(house.front(), &fields("global")).await;
        let names: Vec<&String> = answer.foretell().as_object().unwrap().keys().collect();
        assert_eq!(names, ["path", "reason", "policy"]);
        assert_eq!(answer.foretell()["path"], "speculated");
        let counted = ["x-foretell-accepted:", "x-foretell-drift:"];
        let trailers = |answer: &Answer| answer.message.trailers.join("\n");
        assert_eq!(counted.map(|name| trailers(&own).contains(name)), [stream; 2]);
        assert_eq!(counted.map(|name| trailers(&answer).contains(name)), [false; 2]);
        assert!(counted.iter().all(|name| answer.message.head.get(name.trim_end_matches(':')).is_none()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_of_an_answer_that_failed_are_not_learnt() {
    let house = house("").await;
    let mut broken = ask(8);
    broken.fields["max_tokens"] = json!(-3);
    let answer = broken.send(house.front(), &who("a", "tenant")).await;
    assert_eq!(answer.message.head.status(), 400);
    assert_eq!(learnt(house.admin()).await["texts"], json!(0));
}

/// Drains the proxy and waits for the snapshot that it writes then.
async fn ended(house: House, texts: &Path) {
    let _ = std::fs::remove_file(texts);
    send(house.admin(), "/api/drain", "", &json!({})).await;
    let begun = Instant::now();
    while !texts.exists() {
        assert!(begun.elapsed() < PATIENCE, "no snapshot");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_carries_texts_over_a_restart_and_a_damaged_one_is_a_clean_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("learnt");
    let more = format!("corpus: {{ bytes: 4MiB, ttl: 1h, snapshot: {} }}\n", file.display());
    let tenants = TENANTS.lines().next().unwrap();
    let build = || async {
        let policy =
            "version: 1\nname: t\ndrafters: [{ kind: suffix, scope: tenant }]\ngamma: { fixed: 8 }\n";
        House::build(Setup { policies: &[policy], more: format!("{tenants}\n{more}"), ..Setup::default() })
            .await
    };
    let house = build().await;
    let (_, before) = pass(&house, &ask(9), &who("a", "")).await;
    learnt(house.admin()).await;
    let texts = folder.path().join("learnt.texts");
    ended(house, &texts).await;
    let house = build().await;
    assert_eq!(get(house.admin(), "/api/corpus").await.json()["texts"], json!(1));
    let (_, after) = pass(&house, &ask(9), &who("a", "")).await;
    assert!(after >= 2.0 * before, "{before} {after}");
    ended(house, &texts).await;
    std::fs::write(&texts, &std::fs::read(&texts).unwrap()[..80]).unwrap();
    let house = build().await;
    assert_eq!(get(house.admin(), "/api/corpus").await.json()["texts"], json!(0));
}
