//! Engines that are recognised and passed through: the client gets the engine's own answer, and the
//! load is read where the engine reports it.

use std::time::Duration;

use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::json;

use super::house::{before, front, way};
use crate::client::{Ask, metric};
use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::{Fake, Setup};

/// Pages that may be requested of an engine until it is known.
const QUESTIONS: [&str; 7] =
    ["/v1/models", "/version", "/props", "/server_info", "/info", "/api/version", "/v2"];

#[rstest]
#[case::trtllm(Kind::Trtllm, "trtllm", Some("/prometheus/metrics"), None)]
#[case::triton(Kind::Triton, "triton", None, None)]
#[case::lmdeploy(Kind::Lmdeploy, "lmdeploy", Some("/metrics"), None)]
#[case::tgi(Kind::Tgi, "tgi", None, Some(&["/v1/models", "/info"][..]))]
#[case::ollama(Kind::Ollama, "ollama", None, Some(&["/v1/models", "/api/version"][..]))]
#[case::mlx(Kind::Mlx, "mlx", None, Some(&["/v1/models"][..]))]
#[tokio::test]
async fn a_known_engine_is_passed_through_and_its_load_is_read(
    #[case] kind: Kind,
    #[case] name: &str,
    #[case] page: Option<&str>,
    #[case] questions: Option<&[&str]>,
    #[values("", "    engine: ")] said: &str,
) {
    let fake = Fake::start(Passthrough::new(kind, Setup::default())).await;
    let questions = if said.is_empty() { questions.map(|_| &QUESTIONS[..]) } else { questions };
    let said = if said.is_empty() { String::new() } else { format!("{said}{name}\n") };
    let proxy = before(fake.address, &said).await;
    for stream in [false, true] {
        let fields = json!({"prompt": "one two one two one", "max_tokens": 60, "temperature": 0, "seed": 3});
        let ask = Ask::new(Route::Completions, stream, fields);
        let (direct, through) = (ask.send(fake.address, "").await, ask.send(front(&proxy), "").await);
        assert_eq!((direct.plain.status, &through.plain), (200, &direct.plain));
        assert_eq!(way(&through), (Some("passthrough"), Some("no_verify_method")));
    }
    let calls = fake.house.tally().calls;
    assert_eq!(calls["/v1/completions"], 4);
    for path in calls.keys().filter(|path| *path != "/v1/completions") {
        assert!(questions.is_none_or(|known| known.contains(&path.as_str())), "{path}");
    }
    let Some(page) = page else { return };
    let read = async {
        while metric(proxy.gateway.admin.unwrap(), "foretell_replica_load_age_seconds").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(crate::wire::PATIENCE, read).await.is_ok(), "{page} is read");
    assert!(fake.house.tally().calls_of(page) > 0);
}
