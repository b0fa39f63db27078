//! The plain windows of a replica.

use std::collections::BTreeSet;
use std::time::Duration;

use foretell_engines::openai::Route;
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::house::{assert_agreed, before, engine, policy, send, series};
use crate::client::Ask;
use crate::fakes::Pace;
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

const RATIO: &str = "foretell_switchback_ratio";

pub async fn switchback(proxy: &Proxy) -> Value {
    proxy.replica().await["switchback"].clone()
}

/// Streams long outputs, several at a time, for as long as it is polled.
pub async fn streams(proxy: &Proxy) {
    let one = async |number: u32| loop {
        let prompt: Vec<u32> = (0..24).map(|at| 100 + number + at % 8).collect();
        let fields = json!({"prompt": prompt, "max_tokens": 200, "temperature": 0});
        let answer = Ask::new(Route::Completions, true, fields).send(proxy.front, "").await;
        assert_eq!(answer.plain.status, 200);
    };
    join_all((0..4).map(one)).await;
}

/// Waits until a ratio is shown, or until speculation was measured slower and is closed: at least
/// ten windows have begun by then.
async fn compared(proxy: &Proxy) {
    let (mut seen, mut windows, mut over) = (BTreeSet::new(), 0, false);
    while !over || seen.len() < 2 {
        let shown = switchback(proxy).await;
        if let Some(inside) = shown["in_window"].as_bool() {
            seen.insert(inside);
            let now = shown["windows"].as_u64().unwrap();
            assert!(now >= windows, "{shown}");
            over |= !shown["time_per_token_ratio"].is_null() || shown["closed"] == true;
            assert!(now >= 10 || !over, "{shown}");
            windows = now;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until no request is in flight.
async fn idle(proxy: &Proxy) {
    while proxy.replica().await["in_flight"] != 0 || switchback(proxy).await["in_window"] == true {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_result_of_a_replicas_windows_is_shown() {
    let engine = engine(Pace::default()).await;
    let plain = policy("plain", "holdback: { start: 0, floor: 0 }");
    let proxy = before(&engine, "", "    budget: { windows: 150ms/301ms }\n", &plain).await;
    assert!(switchback(&proxy).await.is_null(), "no request was sent yet");
    tokio::select! {
        () = streams(&proxy) => {}
        () = compared(&proxy) => {}
        () = tokio::time::sleep(PATIENCE) => panic!("{}", switchback(&proxy).await),
    }
    tokio::time::timeout(PATIENCE, idle(&proxy)).await.expect("in time");
    let ratio = switchback(&proxy).await["time_per_token_ratio"].clone();
    let lines = series(&proxy, RATIO).await.len();
    if ratio.is_null() {
        return assert_eq!(lines, 0);
    }
    assert_agreed(&proxy, &ratio, RATIO, "BOUND,replica=\"toy/0\"").await;
    assert_eq!(lines, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_windows_nothing_is_shown_of_any() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "    budget: { windows: off }\n", &policy("plain", "")).await;
    send(&engine, &proxy, 0..8).await;
    assert!(switchback(&proxy).await.is_null());
    assert_eq!(series(&proxy, RATIO).await, Vec::<String>::new());
}
