//! A paced model behind the server: the same tokens, in exactly the time of its pace, on a clock of
//! the test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foretell_core::units::Tick;
use foretell_onnx::pace::{Clock, Paced};
use rstest::rstest;
use serde_json::{Value, json};

use super::client::{Server, serve, serve_as};
use super::fake::Fake;
use super::identity::{by_verify, plain, prompt, settings};

/// A clock that moves only while it is waited on.
#[derive(Clone, Default)]
struct Hand(Arc<AtomicU64>);

impl Hand {
    fn micros(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Clock for Hand {
    fn now(&self) -> Tick {
        Tick(self.micros())
    }

    fn wait_until(&mut self, moment: Tick) {
        self.0.fetch_max(moment.0, Ordering::SeqCst);
    }
}

async fn paced(pace: &str) -> (Server, Hand) {
    let (fake, hand) = (Fake::new(4, 512), Hand::default());
    let watch = fake.watch.clone();
    let model = Paced::by(Box::new(fake), pace.parse().unwrap(), Box::new(hand.clone()));
    (serve_as(Box::new(model), watch).await, hand)
}

/// Microseconds of the test's clock that a request takes.
async fn took(server: &Server, hand: &Hand, path: &str, body: &Value) -> u64 {
    let before = hand.micros();
    server.ask(path, body).await;
    hand.micros() - before
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paced_target_gives_the_same_text_as_without_a_pace() {
    let direct = serve(Fake::new(4, 512)).await;
    let (server, hand) = paced("step=60ms,base=1.35,node=0.025,growth=0.02,prompt=1ms").await;
    for setting in settings() {
        let want = plain(&direct, &setting, 40).await;
        assert_eq!(plain(&server, &setting, 40).await, want, "{setting}");
        for tree in [false, true] {
            assert_eq!(by_verify(&server, &setting, &want, tree).await.0, want, "{setting}, tree {tree}");
        }
    }
    assert!(hand.micros() > 5 * 40 * 60_000, "it was paced");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_verify_requests_and_prompts_take_the_time_of_the_pace() {
    let (server, hand) = paced("step=100ms,base=1.5,node=0.1,growth=0.2,prompt=1ms").await;
    let read = prompt().len() as u64 - 1;
    let body =
        |n: usize| json!({"prompt": prompt(), "max_tokens": 8, "n": n, "temperature": 0, "ignore_eos": true});
    let completions = "/v1/completions";
    assert_eq!(took(&server, &hand, completions, &body(1)).await, (8 * 100 + read) * 1_000);
    assert_eq!(took(&server, &hand, completions, &body(1)).await, 8 * 100_000, "the prompt is in the cache");
    let context = prompt();
    let verify =
        |tokens: Value| json!({"context": context, "tokens": tokens, "temperature": 0, "generated": 0});
    assert_eq!(took(&server, &hand, "/v1/verify", &verify(json!([4, 5, 6]))).await, 180_000);
    assert_eq!(
        took(&server, &hand, "/v1/verify", &verify(json!([]))).await,
        150_000,
        "a round without a draft"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_run_together_share_steps_that_are_longer() {
    let (server, hand) = paced("step=100ms,growth=0.2").await;
    let body = json!({"prompt": prompt(), "max_tokens": 8, "n": 3, "temperature": 0, "ignore_eos": true});
    assert_eq!(took(&server, &hand, "/v1/completions", &body).await, 8 * 140_000);
}

/// A separate server for each case: a busy model's run begins when the previous one was due, and is
/// shorter by its delay.
#[rstest]
#[case("decode", "/v1/completions", json!({"prompt": [1], "max_tokens": 1}), 0.02)]
#[case("verify", "/v1/verify", json!({"context": [1], "tokens": [4]}), 0.06)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metrics_time_the_paced_steps(
    #[case] kind: &str,
    #[case] path: &str,
    #[case] body: Value,
    #[case] min: f64,
) {
    let fake = Fake::new(1, 64);
    let watch = fake.watch.clone();
    let model = Paced::new(Box::new(fake), "step=20ms,base=3".parse().unwrap());
    let server = serve_as(Box::new(model), watch).await;
    server.ask(path, &body).await;
    let seconds = server.metric(&format!("foretell_target_step_seconds_sum{{kind=\"{kind}\"}}")).await;
    assert!(seconds >= min, "{seconds}");
}
