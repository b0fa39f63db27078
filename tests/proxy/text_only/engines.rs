//! Engines that are recognised and passed through: the client gets the engine's own answer, and the
//! load is read where the engine reports it.

use std::time::Duration;

use rstest::rstest;
use serde_json::json;

use super::house::{ask, before, completion, front, metric};
use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::{Fake, Setup};

#[rstest]
#[case::trtllm(Kind::Trtllm, "trtllm", Some("/prometheus/metrics"))]
#[case::triton(Kind::Triton, "triton", None)]
#[case::lmdeploy(Kind::Lmdeploy, "lmdeploy", Some("/metrics"))]
#[tokio::test]
async fn a_known_engine_is_passed_through_and_its_load_is_read(
    #[case] kind: Kind,
    #[case] name: &str,
    #[case] page: Option<&str>,
    #[values("", "    engine: ")] said: &str,
) {
    let fake = Fake::start(Passthrough::new(kind, Setup::default())).await;
    let said = if said.is_empty() { String::new() } else { format!("{said}{name}\n") };
    let proxy = before(fake.address, &said).await;
    for stream in [false, true] {
        let body = completion(&json!({"prompt": "one two one two one", "stream": stream, "seed": 3}));
        let direct = ask(fake.address, "/v1/completions", "", &body).await;
        let through = ask(front(&proxy), "/v1/completions", "", &body).await;
        assert_eq!(through.plain, direct.plain);
        assert_eq!(
            (through.field("x-foretell-path"), through.field("x-foretell-reason")),
            ("passthrough", "no_verify_method")
        );
    }
    let Some(page) = page else { return };
    let read = async {
        while metric(&proxy, "foretell_replica_load_age_seconds").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(crate::wire::PATIENCE, read).await.is_ok(), "{page} is read");
    assert!(fake.house.tally().calls_of(page) > 0);
}
