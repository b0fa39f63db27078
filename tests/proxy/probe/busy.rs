//! Servers that answer late, or not yet: what a probe and the check of the identity make of them.

use std::time::Duration;

use serde_json::json;

use super::house::{INEXPENSIVE, complete, proxy, replica, until};
use crate::client::FORCED;
use crate::dialects::table::{Server, Started, start};
use crate::fakes::llamacpp::{self, Llama};
use crate::fakes::sglang::{self, Sglang};
use crate::fakes::{Fake, Fault, Pace, Setup, When};

const LONG: Duration = Duration::from_mins(1);
const NEVER: &str = "    probe: { when: never }\n";

fn sglang(change: impl FnOnce(&mut sglang::Options)) -> Sglang {
    let mut options = sglang::Options::default();
    options.setup.pace = INEXPENSIVE;
    options.setup.temper.eos_every = None;
    change(&mut options);
    Sglang::new(options)
}

fn calls(server: &dyn Server, path: &str) -> usize {
    server.house().tally().calls_of(path)
}

#[tokio::test]
async fn a_busy_scheduler_is_neither_an_outage_nor_a_reason_to_probe_again() {
    let fake = Fake::start(sglang(|_| {})).await;
    let proxy = proxy(fake.address, FORCED, "").await;
    until(LONG, || async { replica(&proxy).await["probe"]["calls"].is_u64() }).await;
    let before = replica(&proxy).await;
    let sequences = fake.house.tally().sequences;
    let asked = calls(&fake, "/model_info");
    let scheduler = fake.house.scheduler().await;
    // Three checks of the identity pass, 5 s apart, while the scheduler answers nothing.
    until(LONG, || async { calls(&fake, "/model_info") >= asked + 3 }).await;
    let shown = replica(&proxy).await;
    assert_eq!((&shown["state"], &shown["engine_start"]), (&json!("ready"), &before["engine_start"]));
    drop(scheduler);
    let asked = calls(&fake, "/model_info");
    until(LONG, || async { calls(&fake, "/model_info") > asked }).await;
    let shown = replica(&proxy).await;
    assert_eq!((&shown["engine_start"], &shown["probe"]), (&before["engine_start"], &before["probe"]));
    assert_eq!(fake.house.tally().sequences, sequences, "nothing was probed");
}

#[tokio::test]
async fn after_an_outage_the_same_process_is_known_again_and_another_is_not() {
    let fake = Fake::start(sglang(|_| {})).await;
    let proxy = proxy(fake.address, FORCED, NEVER).await;
    until(LONG, || async { replica(&proxy).await["engine_start"].is_string() }).await;
    let engine_start = replica(&proxy).await["engine_start"].clone();
    let recognised = calls(&fake, "/server_info");
    fake.house.faults.always(When::path("/v1/models"), Fault::Status(503));
    until(LONG, || async { fake.house.faults.struck() > 2 }).await;
    fake.house.faults.clear();
    // It is recognised anew, since another process might answer.
    until(LONG, || async { calls(&fake, "/server_info") > recognised }).await;
    assert_eq!(replica(&proxy).await["engine_start"], engine_start);
    let again = calls(&fake, "/model_info");
    until(LONG, || async { calls(&fake, "/model_info") > again + 1 }).await;
    assert_eq!(calls(&fake, "/server_info"), recognised + 1, "once");
    fake.kill();
    until(LONG, || async { complete(&proxy, 1).await.head.status() == 502 }).await;
    fake.revive();
    until(LONG, || async {
        let shown = replica(&proxy).await;
        shown["engine_start"].is_string() && shown["engine_start"] != engine_start
    })
    .await;
}

#[tokio::test]
async fn an_old_load_report_is_old() {
    let fake = Fake::start(sglang(|options| {
        options.publish_interval = usize::MAX;
        options.setup.pace = Pace { step: Duration::from_millis(20), ..Pace::default() };
    }))
    .await;
    let proxy = proxy(fake.address, FORCED, NEVER).await;
    let age = || async { replica(&proxy).await["load"]["age_seconds"].as_f64() };
    until(LONG, || async { age().await.is_some() }).await;
    let body = json!({"prompt": [100, 101, 102], "max_tokens": 20_000, "stream": true, "ignore_eos": true});
    let mut direct = crate::wire::Wire::connect(fake.address).await;
    direct.send(crate::wire::post("/v1/completions", "", body.to_string().as_bytes())).await;
    // The page is read all the time, and still says what the prefill left.
    until(LONG, || async { age().await.is_some_and(|age| age > 3.0) }).await;
    drop(direct);
    until(LONG, || async { age().await.is_some_and(|age| age < 1.0) }).await;
}

/// An engine that reports no start time, and the path of its verify requests.
fn starts(name: &str) -> (Started, &'static str) {
    if name == "sglang" {
        return (start(|| sglang(|_| {})), "/generate");
    }
    let setup = Setup { pace: INEXPENSIVE, ..llamacpp::Options::default().setup };
    let options =
        llamacpp::Options { slots: 9, cache_idle_slots: false, setup, ..llamacpp::Options::default() };
    (start(move || Llama::new(options)), "/completion")
}

/// The check for a single engine has not ended when its time is up, or the server says that it is
/// loading: that shows nothing about the number of engines.
#[rstest::rstest]
#[tokio::test]
async fn a_check_that_could_not_end_never_says_several_engines(
    #[values("sglang", "llamacpp")] name: &str,
    #[values(
        (0, Fault::Hang), (3, Fault::Hang), (2, Fault::Status(503)), (1, Fault::Status(500)), (1, Fault::Reset)
    )]
    fault: (usize, Fault),
) {
    let (server, path) = starts(name);
    let (server, (nth, fault)) = (server.await, fault);
    server.house().faults.at(When::path(path), nth, fault);
    let proxy = proxy(server.address(), FORCED, "    probe: { when: never, within: 2s }\n").await;
    let mut seen = Vec::new();
    let known = async {
        loop {
            let shown = replica(&proxy).await;
            if shown["engine_start"].is_string() {
                return;
            }
            seen.push(shown["probe"]["conclusion"].to_string());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(LONG, known).await.is_ok(), "{seen:?}");
    assert!(!seen.iter().any(|text| text.contains("several engines")), "{seen:?}");
    assert!(seen.iter().any(|text| text.contains("not known yet if a single engine")), "{seen:?}");
}
