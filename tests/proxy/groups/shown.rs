//! Requests of the control group, the comparison of the groups, and the projected speedup.

use std::time::Duration;

use super::house::{
    PLAIN_REQUESTS, TOKENS, VERIFIES, assert_agreed, before, compared, engine, forced, policy, reasons,
    requests, send, series,
};
use crate::client::metric;
use crate::fakes::vllm::Vllm;
use crate::fakes::{Fake, Pace};
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

/// Steps that take some time, so that no loss is as large as `gates.control` allows.
const STEPS: Pace =
    Pace { step: Duration::from_millis(1), per_token: Duration::ZERO, cancel: Duration::ZERO };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_in_one_group_or_the_other_and_those_of_the_control_group_say_so() {
    let engine = engine(STEPS).await;
    let lot = policy("lot", "holdback: { start: 0.3, floor: 0.1 }");
    let proxy = before(&engine, "", "", &lot).await;
    let mut answers = Vec::new();
    // The group is random, so requests are sent until there are enough of both.
    while compared(&proxy).await["time_per_token_ratio"].is_null() {
        let sent = answers.len() as u32;
        answers.extend(send(&engine, &proxy, sent..sent + 40).await);
        assert!(answers.len() < 2_000, "{}", compared(&proxy).await);
    }
    let counted = reasons(&answers);
    let (speculating, control_group) = requests(&proxy).await;
    assert_eq!(speculating + control_group, answers.len() as u64, "{counted:?}");
    assert_eq!(Some(&control_group), counted.get("control_group"), "{counted:?}");
    assert!(
        (metric(proxy.admin, "foretell_requests_total{reason=\"control_group\"}").await
            - control_group as f64)
            .abs()
            < 0.5
    );
    for answer in answers.iter().filter(|answer| answer.foretell()["reason"] == "control_group") {
        assert_eq!(
            (answer.foretell()["path"].as_str(), answer.foretell()["rounds"].as_u64()),
            (Some("plain"), Some(0))
        );
    }
    let compared = compared(&proxy).await;
    assert_eq!((&compared["backend"], &compared["closed"]), (&"toy".into(), &false.into()));
    let labels = "backend=\"toy\",BOUND,policy=\"lot\"";
    assert_agreed(&proxy, &compared["time_per_token_ratio"], "foretell_control_group_ratio", labels).await;
    assert_eq!(engine.house.fatal(), Vec::<String>::new());
}

/// Sends requests until their projected speedup is shown; they are plain, and nothing else is sent.
/// Returns their number.
async fn plain(engine: &Fake<Vllm>, proxy: &Proxy, reason: &str, basis: &str) -> u32 {
    let before = engine.house.tally();
    let recorded = async || metric(proxy.admin, "foretell_requests_total").await;
    let (mut sent, mut known) = (0, recorded().await);
    while compared(proxy).await["projected_speedup"]["basis"] != basis {
        assert!(sent < 400, "{}", compared(proxy).await);
        let answers = send(engine, proxy, sent..sent + 16).await;
        assert_eq!(reasons(&answers), [(reason.to_owned(), 16)].into());
        sent += 16;
        // Drafters are scored once the client has its answer.
        known += 16.0;
        let scored = async {
            while recorded().await < known {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, scored).await.expect("all are recorded");
    }
    let after = engine.house.tally();
    // Each request was sent a second time, to compare.
    assert_eq!(after.calls_of(PLAIN_REQUESTS) - before.calls_of(PLAIN_REQUESTS), 2 * sent as usize);
    assert_eq!(after.sequences - before.sequences, 2 * sent as usize);
    assert_eq!(after.generated - before.generated, (2 * sent * TOKENS) as usize);
    assert_eq!(after.calls_of(VERIFIES), before.calls_of(VERIFIES));
    let gained = compared(proxy).await["projected_speedup"].clone();
    let said = gained["requests"].as_u64().unwrap();
    assert!((10..=u64::from(sent)).contains(&said), "{gained} of {sent}");
    let name = proxy.get("/api/policies").await.json()["policies"][0]["name"].as_str().unwrap().to_owned();
    let labels = format!("backend=\"toy\",BOUND,policy=\"{name}\",basis=\"{basis}\"");
    assert_agreed(proxy, &gained["ratio"], "foretell_projected_speedup", &labels).await;
    assert_eq!(engine.house.fatal(), Vec::<String>::new());
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_and_observe_send_plain_requests_only_and_show_the_projected_speedup() {
    let engine = engine(Pace::default()).await;
    let shadow = policy("watched", "mode: shadow");
    for (process, policy, reason) in
        [("", shadow, "shadow"), ("mode: observe\n", policy("watched", ""), "observe")]
    {
        let proxy = before(&engine, process, "", &policy).await;
        plain(&engine, &proxy, reason, "guess").await;
        assert_eq!(requests(&proxy).await, (0, 0), "requests that are not eligible are in neither group");
        assert!(compared(&proxy).await["time_per_token_ratio"].is_null());
        assert_eq!(series(&proxy, "foretell_control_group_ratio").await, Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_projected_speedup_has_a_probe_as_basis_where_there_was_one() {
    let engine = engine(STEPS).await;
    let proxy = before(&engine, "", "    probe: { when: ready }\n", &policy("watched", "mode: shadow")).await;
    let probed = async {
        while proxy.replica().await["probe"]["pays"].is_null() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, probed).await.expect("a probe");
    plain(&engine, &proxy, "shadow", "probe").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_projected_speedup_has_verify_requests_as_basis_once_there_were_any() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &forced("watched")).await;
    let speculated = send(&engine, &proxy, 0..16).await;
    assert_eq!(reasons(&speculated), [("none".to_owned(), 16)].into());
    assert_eq!(requests(&proxy).await, (0, 0), "forced requests are in neither group");
    let costs = proxy.replica().await["costs"].clone();
    let line = &costs["verify"][0];
    assert!(line["base_seconds"].is_number() && line["measurements"].as_f64() > Some(0.5), "{costs}");
    assert!(costs["regret_capacity_seconds"].as_f64() > Some(0.0), "{costs}");
    proxy.adopt(&policy("watched", "mode: shadow")).await;
    plain(&engine, &proxy, "shadow", "measured").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passthrough_requests_are_not_compared() {
    let engine = engine(Pace::default()).await;
    let own = policy("own", "holdback: { start: 0.5, floor: 0.5 }");
    for (process, policy) in [("mode: off\n", own), ("", policy("own", "mode: off"))] {
        let proxy = before(&engine, process, "", &policy).await;
        for answer in send(&engine, &proxy, 0..24).await {
            assert_eq!(answer.message.head.get("x-foretell-path"), Some("passthrough"));
        }
        assert_eq!(proxy.get("/api/policies").await.json()["policies"][0]["compared"], serde_json::json!([]));
        for family in ["foretell_control_group_ratio", "foretell_projected_speedup"] {
            assert_eq!(series(&proxy, family).await, Vec::<String>::new());
        }
    }
}
