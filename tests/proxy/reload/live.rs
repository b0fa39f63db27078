//! Effect of a reload and of the mode on requests: each keeps the policy that it began with.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;

use super::write;
use crate::client::metric;
use crate::fakes::Pace;
use crate::groups::house::{VERIFIES, ask, before, engine, policy};
use crate::reasons::proxy::Proxy;

const RELOADS: u32 = 1_000;
const CLIENTS: u32 = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_reloads_under_load_fail_no_request_and_each_has_one_revision() {
    let engine = engine(Pace::default()).await;
    let texts = [3, 4, 5].map(|max| policy("p", &format!("gamma: {{ max: {max}, fixed: 3 }}")));
    let labels = texts.clone().map(|text| format!("p@{}", foretell_policy::Revision::of(text.as_bytes())));
    let proxy = before(&engine, "", "", &texts[0]).await;
    let over = Arc::new(AtomicBool::new(false));
    let (front, over_too) = (proxy.front, &over);
    let client = |number: u32| {
        let labels = labels.clone();
        let over = Arc::clone(over_too);
        async move {
            let mut served = std::collections::BTreeMap::new();
            for round in 0.. {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let answer = ask(number * 50 + round % 50).send(front, "").await;
                assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
                let header = answer.message.head.get("x-foretell-policy").unwrap().to_owned();
                assert!(labels.contains(&header), "{header}");
                assert_eq!(answer.foretell()["policy"], json!(header));
                *served.entry(header).or_insert(0_u32) += 1;
            }
            served
        }
    };
    let reloads = async {
        for round in 0..RELOADS {
            write(&proxy.folder().join("policies"), "policy.yaml", &texts[round as usize % texts.len()]);
            let done = proxy.post("/api/reload").await;
            assert_eq!(done.head.status(), 200, "{}", done.text());
        }
        over.store(true, Ordering::Relaxed);
    };
    let (served, ()) = tokio::join!(join_all((0..CLIENTS).map(client)), reloads);
    let kinds: std::collections::BTreeSet<&String> = served.iter().flat_map(|served| served.keys()).collect();
    assert!(kinds.len() > 1, "{served:?}");
    let reloads = metric(proxy.admin, "foretell_config_reloads_total{result=\"success\"} ").await;
    assert!(reloads >= f64::from(RELOADS), "{reloads}");
    let failed = metric(proxy.admin, "foretell_config_reloads_total{result=\"failure\"} ").await;
    assert!(failed < 0.5, "{failed}");
}

/// A session that speculates decodes plainly once the operator changes the mode, in the file or
/// over the admin interface.
#[rstest::rstest]
#[case::by_the_config_file(true)]
#[case::by_the_admin_interface(false)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mode_changes_for_live_sessions(#[case] file: bool) {
    let step = Duration::from_millis(5);
    let engine = engine(Pace { step, per_token: Duration::ZERO, cancel: Duration::ZERO }).await;
    let proxy = before(&engine, "", "", &policy("p", "gamma: { max: 8, fixed: 2 }")).await;
    let prompt: Vec<u32> = (0..64).map(|at| 100 + at % 8).collect();
    let long = crate::client::Ask::new(
        foretell_wire::openai::Route::Completions,
        false,
        json!({"prompt": prompt, "max_tokens": 1500, "temperature": 0}),
    );
    let switch = async {
        // The session speculates by then, however slow the machine is.
        while engine.house.tally().calls_of(VERIFIES) < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if file {
            let path = proxy.folder().join("foretell.yaml");
            let process = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, process.replacen("version: 1", "version: 1\nmode: observe", 1)).unwrap();
        } else {
            let body = json!({"mode": "observe"});
            assert_eq!(crate::client::send(proxy.admin, "/api/mode", "", &body).await.head.status(), 200);
        }
    };
    let (answer, ()) = tokio::join!(long.send(proxy.front, ""), switch);
    let usage = answer.foretell();
    assert_eq!((&usage["path"], &usage["reason"]), (&json!("speculated"), &json!("observe")), "{usage}");
}

/// Flag or variable set the mode at the start, the admin interface at run time, and the file no
/// more; an edit of the file that changes something else reports no problem.
#[tokio::test]
async fn a_mode_of_the_command_line_is_not_changed_by_the_file_but_by_the_admin_interface() {
    let engine = engine(Pace::default()).await;
    let process = format!(
        "version: 1\nmode: auto\nbackends: [{{ name: a, replicas: [\"http://{}\"] }}]\n",
        engine.address
    );
    let proxy = Proxy::start_with(&process, &policy("p", ""), &["--mode", "observe"]).await;
    let mode = async || proxy.get("/api/status").await.json()["mode"]["process"]["mode"].clone();
    assert_eq!(mode().await, "observe");
    for edited in ["off", "auto"] {
        write(proxy.folder(), "foretell.yaml", &process.replace("mode: auto", &format!("mode: {edited}")));
        assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
        assert_eq!(mode().await, "observe");
    }
    let refused = &proxy.get("/api/policies").await.json()["refused"];
    assert_eq!(refused, &json!([]));
    let auto = json!({"mode": "auto"});
    assert_eq!(crate::client::send(proxy.admin, "/api/mode", "", &auto).await.head.status(), 200);
    assert_eq!(mode().await, "auto");
}
