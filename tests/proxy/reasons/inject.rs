//! An engine that takes drafts into its steps, played by the strict client of the protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::json;

use super::scene::{COMPLETIONS, FORCED, Scene, Stage, completion};
use super::told::{Ask, Body};
use crate::drafts_client::{Client, Row};
use crate::fakes::{Fault, When};
use crate::wire::Wire;

/// Where the service listens; `FOLDER` is that of the proxy's files. A body of 2,000 tokens is not
/// read.
pub const LISTENS: &str =
    "drafts: { listen: \"unix:FOLDER/drafts.sock\" }\nlimits: { speculate_body: 4KiB }\n";

/// The id of the requests whose rows join.
const ID: &str = "joins";

/// Connects a plug-in whose rows join requests, until the replica is known to be its engine's.
pub fn joined(stage: &Stage) -> BoxFuture<'_, ()> {
    async {
        let done = Arc::new(AtomicBool::new(false));
        let (path, until) = (stage.proxy.folder().join("drafts.sock"), Arc::clone(&done));
        let rows = tokio::task::spawn_blocking(move || {
            let mut client = Client::connect(&path, 8, 50_000);
            for row in 1.. {
                if until.load(Ordering::Relaxed) {
                    break;
                }
                client.begin(row, 4, 0.0, &format!("cmpl-{ID}-0-0badcafe"));
                client.step(20_000, false, &[]);
            }
            // It stays connected until the process ends.
            std::mem::forget(client);
        });
        while stage.proxy.replicas().await[0]["inject"].is_null() {
            completion(&json!({})).told(&stage.proxy, false, ID).await;
        }
        done.store(true, Ordering::Relaxed);
        rows.await.unwrap();
    }
    .boxed()
}

/// A route of vLLM that Foretell passes through unread.
const OTHER_ROUTE: &str = "/generate";
/// An engine that takes drafts, played by the strict client.
struct Engine {
    client: Client,
    rows: u32,
}

impl Engine {
    fn connect(stage: &Stage) -> Self {
        Self { client: Client::connect(&stage.proxy.folder().join("drafts.sock"), 8, 50_000), rows: 0 }
    }

    /// Begins a row whose text repeats itself.
    fn begin(&mut self, id: &str) -> u32 {
        self.rows += 1;
        let text: Vec<u32> = (0..200).map(|at| at % 50 + 7).collect();
        self.client.begin(self.rows, 200, 0.0, id);
        self.client.text(self.rows, 0, &text);
        self.rows
    }

    /// True if a row is drafted for; false if Foretell says that nothing will be. Then it ends.
    fn drafts(&mut self, row: u32) -> bool {
        tokio::task::block_in_place(|| {
            loop {
                let listed = Row { row, scheduled: 0, sampled: 1, room: 4, length: 200, tokens: &[] };
                let (pause, drafts) = self.client.step(20_000, false, &[listed]);
                if pause > 0 || !drafts.is_empty() {
                    self.client.gone(&[row]);
                    return !drafts.is_empty();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    }

    /// True if a new row with this id is drafted for.
    fn drafts_for(&mut self, id: &str) -> bool {
        let row = self.begin(id);
        self.drafts(row)
    }
}

/// A proxy whose engine takes drafts and answers no more requests.
async fn silent() -> (Stage, Engine) {
    let stage = Stage::set(&Scene { process: LISTENS, policy: FORCED.to_owned(), ..Scene::default() }).await;
    joined(&stage).await;
    for path in [COMPLETIONS, OTHER_ROUTE] {
        stage.engines.houses[0].faults.always(When::path(path), Fault::Hang);
    }
    let engine = Engine::connect(&stage);
    (stage, engine)
}

/// Sends a request that stays in flight until the connection is dropped.
async fn sent(stage: &Stage, ask: &Ask, id: &str) -> Wire {
    let faults = &stage.engines.houses[0].faults;
    let before = faults.struck();
    let mut wire = Wire::connect(stage.proxy.front).await;
    wire.send(ask.bytes(false, id)).await;
    stage.until(|| std::future::ready(faults.struck() > before)).await;
    wire
}

fn with(fields: &'static str) -> Ask {
    Ask { fields, ..completion(&json!({})) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_gets_drafts_only_if_its_request_does() {
    let (stage, mut engine) = silent().await;
    let large = completion(&json!({"prompt": vec![1_000; 2_000]}));
    let other = Ask { path: OTHER_ROUTE, fields: "", body: Body::Raw("{}") };
    let cases = [
        ("read", completion(&json!({})), true),
        ("parameter", completion(&json!({"echo": true})), true),
        ("off", with("x-foretell: off\r\n"), false),
        ("plain", with("x-foretell: plain\r\n"), false),
        ("unreadable", with("x-foretell: perhaps\r\n"), false),
        // Without its body no policy is known.
        ("encoded", with("content-encoding: gzip\r\n"), false),
        ("large", large, false),
        ("no-json", Ask { body: Body::Raw("{"), ..completion(&json!({})) }, false),
        ("other-route", other, false),
    ];
    for (id, ask, drafts) in cases {
        let _wire = sent(&stage, &ask, id).await;
        // Several answers are several rows.
        for answer in ["", "1_"] {
            assert_eq!(engine.drafts_for(&format!("{answer}cmpl-{id}-0-0badcafe")), drafts, "{answer}{id}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_of_one_of_several_requests_gets_drafts_only_if_all_of_them_do() {
    let (stage, mut engine) = silent().await;
    let _one = sent(&stage, &with(""), "twice").await;
    let _same = sent(&stage, &with(""), "twice").await;
    assert!(engine.drafts_for("cmpl-twice-0-11111111"), "from its own text");
    let off = sent(&stage, &with("x-foretell: off\r\n"), "twice").await;
    assert!(!engine.drafts_for("cmpl-twice-0-22222222"));
    drop(off);
    assert!(!engine.drafts_for("cmpl-twice-0-22222222"), "it may still run");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_stays_plain_if_its_engine_connects_late_and_its_client_leaves() {
    let stage = Stage::set(&Scene { process: LISTENS, policy: FORCED.to_owned(), ..Scene::default() }).await;
    stage.engines.houses[0].faults.always(When::path(COMPLETIONS), Fault::Hang);
    let wire = sent(&stage, &with("x-foretell: off\r\n"), "off").await;
    let mut engine = Engine::connect(&stage);
    let row = engine.begin("cmpl-off-0-0badcafe");
    // Once a step is answered, the row has been read.
    engine.client.step(0, false, &[]);
    drop(wire);
    stage.proxy.line_of("off").await;
    assert!(!engine.drafts(row));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_past_the_proxy_get_drafts_in_the_mode_auto_only() {
    let (stage, mut engine) = silent().await;
    assert!(engine.drafts_for("cmpl-unknown-0-0badcafe"));
    for mode in ["observe", "off"] {
        let body = json!({ "mode": mode }).to_string();
        let head = format!("POST /api/mode HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}", body.len());
        let answer = Wire::connect(stage.proxy.admin).await.ask(format!("{head}\r\n\r\n{body}")).await;
        assert_eq!(answer.head.status(), 200);
        assert!(!engine.drafts_for("cmpl-unknown-0-0badcafe"), "{mode}");
    }
}
