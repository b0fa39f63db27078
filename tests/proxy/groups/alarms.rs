//! Alarms: acceptance of drafts collapses, and outputs repeat themselves.

use std::time::Duration;

use foretell_engines::openai::Route;
use serde_json::{Value, json};

use super::house::{DRAFTERS, before, engine, forced, policy, send};
use crate::client::{Ask, metric};
use crate::fakes::Pace;
use crate::reasons::proxy::Proxy;
use crate::reasons::scene::misleading;
use crate::wire::PATIENCE;

async fn alarms(proxy: &Proxy) -> (u32, u32) {
    let count = async |kind: &str| {
        metric(proxy.admin, &format!("foretell_acceptance_anomaly_total{{kind=\"{kind}\"}}")).await
    };
    (count("collapse").await as u32, count("plateau").await as u32)
}

async fn complete(proxy: &Proxy, fields: Value) -> Value {
    let before = metric(proxy.admin, "foretell_requests_total").await;
    let answer = Ask::new(Route::Completions, false, fields).send(proxy.front, "").await;
    assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
    // Answers that pass unchanged are read once the client has them.
    let recorded = async {
        while metric(proxy.admin, "foretell_requests_total").await < before + 1.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, recorded).await.expect("it is recorded");
    answer.foretell().clone()
}

/// Drafts one token in every round, so that there are many first tokens of drafts.
fn single() -> String {
    policy("single", "gamma: { max: 8, fixed: 1 }")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collapse_of_acceptance_raises_one_alarm_and_ordinary_text_none() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &single()).await;
    send(&engine, &proxy, 0..32).await;
    let mut accepted = 0;
    while accepted < 520 {
        let guessable =
            json!({"prompt": [100, 101], "max_tokens": 120, "temperature": 0, "logit_bias": {"150": 100}});
        accepted += complete(&proxy, guessable).await["accepted"].as_u64().unwrap();
    }
    assert_eq!(alarms(&proxy).await, (0, 0), "ordinary text, and text that is easily guessed");
    let refused = json!({"prompt": misleading(), "max_tokens": 8, "temperature": 0});
    let mut asked = 0;
    while alarms(&proxy).await.0 == 0 {
        let foretell = complete(&proxy, refused.clone()).await;
        asked += 1;
        assert!(asked < 100, "{foretell}");
    }
    for _ in 0..4 {
        complete(&proxy, refused.clone()).await;
    }
    assert_eq!(alarms(&proxy).await, (1, 0), "one alarm");
    assert_eq!(engine.house.fatal(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outputs_that_repeat_themselves_raise_an_alarm_speculated_or_plain() {
    let engine = engine(Pace::default()).await;
    let again = |tokens: u32| json!({"prompt": [100, 101, 102], "max_tokens": tokens, "temperature": 0, "logit_bias": {"1000": 100}});
    for (plain, path) in [(forced("own"), "speculated"), (policy("own", "mode: shadow"), "plain")] {
        let proxy = before(&engine, "", "", &plain).await;
        assert_eq!(complete(&proxy, again(200)).await["path"], path);
        assert_eq!(alarms(&proxy).await, (0, 1), "{path}");
        complete(&proxy, again(64)).await;
        assert_eq!(alarms(&proxy).await, (0, 1), "too short for an alarm, {path}");
        let copied = json!({"prompt": vec![1000; 64], "max_tokens": 200, "temperature": 0, "logit_bias": {"1000": 100}});
        complete(&proxy, copied).await;
        assert_eq!(alarms(&proxy).await, (0, 1), "copied from the prompt, {path}");
        complete(&proxy, again(200)).await;
        assert_eq!(alarms(&proxy).await, (0, 2), "{path}");
    }
    let relayed = before(&engine, "mode: off\n", "", &format!("version: 1\nname: own\n{DRAFTERS}\n")).await;
    assert_eq!(complete(&relayed, again(200)).await, Value::Null);
    assert_eq!(alarms(&relayed).await, (0, 0), "relayed answers are not read");
}
