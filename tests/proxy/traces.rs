//! Spans of requests and rounds as a collector gets them, and the ids that engines get; neither
//! holds any text.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Told;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message as _;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::client::{Ask, metric};
use crate::fakes::http::Reader;
use crate::fakes::{Fake, Pace, vllm::Vllm};
use crate::groups::house::{VERIFIES, engine, forced, policy};
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const SECRET: &str = "opensesame";

/// A collector that keeps all spans.
struct Collector {
    address: SocketAddr,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let bodies: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let kept = Arc::clone(&bodies);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let kept = Arc::clone(&kept);
                tokio::spawn(async move {
                    let (read, mut write) = stream.into_split();
                    let mut reader = Reader::new(read);
                    while let Some(request) = reader.request(&mut write).await {
                        assert_eq!((&*request.method, &*request.path), ("POST", "/v1/traces"));
                        kept.lock().push(request.body);
                        let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
                        write.write_all(answer.as_bytes()).await.unwrap();
                    }
                });
            }
        });
        Self { address, bodies }
    }

    /// All spans so far.
    fn spans(&self) -> Vec<Span> {
        let decoded = |body: &Vec<u8>| ExportTraceServiceRequest::decode(&body[..]).unwrap().resource_spans;
        let resources: Vec<_> = self.bodies.lock().iter().flat_map(decoded).collect();
        resources
            .into_iter()
            .flat_map(|resource| resource.scope_spans)
            .flat_map(|scope| scope.spans)
            .collect()
    }

    /// The span of the request with this id, once it is there, and those of its rounds.
    async fn of(&self, id: &str) -> (Span, Vec<Span>) {
        let found = async {
            loop {
                let spans = self.spans();
                let is_it = |span: &&Span| told(span).get("foretell.request_id").is_some_and(|own| own == id);
                if let Some(own) = spans.iter().find(is_it) {
                    let rounds = spans.iter().filter(|span| span.parent_span_id == own.span_id);
                    return (own.clone(), rounds.cloned().collect());
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, found).await.expect("its spans")
    }
}

/// The attributes of a span, as text.
fn told(span: &Span) -> HashMap<String, String> {
    let text = |value: Told| match value {
        Told::StringValue(text) => text,
        Told::IntValue(number) => number.to_string(),
        Told::DoubleValue(number) => number.to_string(),
        Told::BoolValue(yes) => yes.to_string(),
        other => panic!("{other:?}"),
    };
    let attributes = span.attributes.iter().cloned();
    attributes.map(|pair| (pair.key, text(pair.value.unwrap().value.unwrap()))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

async fn before(engine: &Fake<Vllm>, observe: &str, policy: &str) -> Proxy {
    let process = format!(
        "version: 1\nobserve: {{ log: json, {observe} }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
         models: [{{ id: toy, tokenizer: {:?} }}]\n    probe: {{ when: never }}\n",
        engine.address,
        crate::fakes::toy::folder().display().to_string(),
    );
    Proxy::start(&process, policy).await
}

fn ask(prompt: &str) -> Ask {
    Ask::new(
        foretell_wire::openai::Route::Completions,
        false,
        json!({"prompt": prompt, "max_tokens": 48, "temperature": 0}),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_and_rounds_are_spans_of_the_client_s_trace_and_parents_of_the_engine_s() {
    let (engine, collector) = (engine(Pace::default()).await, Collector::start().await);
    let otlp = format!("otlp: \"http://{}\"", collector.address);
    let proxy = before(&engine, &otlp, &forced("own")).await;
    let fields = format!("traceparent: {PARENT}\r\ntracestate: vendor=1\r\nx-request-id: traced\r\n");
    let answer = ask(&"one two three four five six ".repeat(6)).send(proxy.front, &fields).await;
    assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
    let (own, rounds) = collector.of("traced").await;
    assert_eq!(hex(&own.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(
        (hex(&own.parent_span_id), &*own.name),
        ("b7ad6b7169203331".to_owned(), "text_completion toy")
    );
    assert_eq!(own.trace_state, "vendor=1");
    let shown = told(&own);
    let says = answer.foretell();
    for (attribute, member) in [
        ("foretell.path", "path"),
        ("foretell.rounds", "rounds"),
        ("foretell.drafted", "drafted"),
        ("foretell.accepted", "accepted"),
        ("foretell.policy", "policy"),
    ] {
        assert_eq!(shown[attribute], says[member].to_string().trim_matches('"'), "{attribute}");
    }
    assert_eq!(shown["gen_ai.usage.output_tokens"], "48");
    assert_eq!(json!(rounds.len()), says["rounds"], "a span for each round");
    let sum = |name: &str| rounds.iter().map(|span| told(span)[name].parse::<u64>().unwrap()).sum::<u64>();
    assert_eq!(
        (json!(sum("foretell.drafted")), json!(sum("foretell.accepted"))),
        (says["drafted"].clone(), says["accepted"].clone())
    );
    for span in &rounds {
        assert!(own.start_time_unix_nano <= span.start_time_unix_nano, "{span:?}");
        assert!(span.end_time_unix_nano <= own.end_time_unix_nano, "{span:?}");
    }
    let traced = engine.house.tally().traced;
    let parent = |span: &Span| format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
    assert!(traced.iter().any(|(_, of)| *of == parent(&own)), "the first call is the request's own");
    for span in &rounds {
        assert!(
            traced.iter().any(|(path, of)| path == VERIFIES && *of == parent(span)),
            "{span:?}\n{traced:?}"
        );
    }
    let line = proxy.line_of("traced").await;
    assert_eq!(line["trace_id"], "0af7651916cd43dd8448eb211c80319c");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_in_a_prompt_is_in_no_span_log_metric_or_answer_of_the_admin() {
    let (engine, collector) = (engine(Pace::default()).await, Collector::start().await);
    let otlp = format!("level: trace, otlp: \"http://{}\"", collector.address);
    let proxy = before(&engine, &otlp, &forced("own")).await;
    let fields = format!("authorization: Bearer {SECRET}\r\nx-request-id: told\r\n");
    let answer = ask(&format!("the word is {SECRET}, {SECRET}, {SECRET} ")).send(proxy.front, &fields).await;
    assert_eq!(answer.plain.status, 200);
    let broken = format!("{{\"model\":\"toy\",\"prompt\":[\"{SECRET}\"");
    crate::client::send(proxy.front, "/v1/completions", "", &json!(broken)).await;
    collector.of("told").await;
    proxy.line_of("told").await;
    for body in collector.bodies.lock().iter() {
        assert!(!String::from_utf8_lossy(body).contains(SECRET));
    }
    for path in
        ["/metrics", "/api/sessions", "/api/coverage", "/api/replicas", "/api/policies", "/api/corpus", "/"]
    {
        assert!(!proxy.get(path).await.text().contains(SECRET), "{path}");
    }
    assert!(!proxy.log().contains(SECRET), "{}", proxy.log());
    // Libraries would spell it.
    let spelt = |line: &&str| line.contains("\"level\":\"TRACE\"") && !line.contains("\"target\":\"foretell");
    assert_eq!(proxy.log().lines().find(spelt), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsampled_request_has_no_spans_and_no_line_and_keeps_the_client_s_trace_context() {
    let (engine, collector) = (engine(Pace::default()).await, Collector::start().await);
    let observe = format!("share: 0, otlp: \"http://{}\"", collector.address);
    let proxy = before(&engine, &observe, &policy("own", "mode: plain")).await;
    let unsampled = format!("{}0", PARENT.trim_end_matches('1'));
    ask("by lot").send(proxy.front, "x-request-id: lot\r\n").await;
    ask("by the client")
        .send(proxy.front, &format!("traceparent: {unsampled}\r\nx-request-id: no\r\n"))
        .await;
    ask("all the same").send(proxy.front, &format!("traceparent: {PARENT}\r\nx-request-id: yes\r\n")).await;
    collector.of("yes").await;
    proxy.line_of("yes").await;
    assert!(!proxy.log().contains("\"lot\"") && !proxy.log().contains("\"no\""), "{}", proxy.log());
    assert_eq!(collector.spans().len(), 1);
    assert!(engine.house.tally().traced.iter().any(|(_, parent)| *parent == unsampled));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_sample_its_trace_takes_no_line_out_of_the_log() {
    let (engine, collector) = (engine(Pace::default()).await, Collector::start().await);
    let proxy =
        before(&engine, &format!("otlp: \"http://{}\"", collector.address), &policy("own", "mode: plain"))
            .await;
    let unsampled = format!("{}0", PARENT.trim_end_matches('1'));
    let fields = format!("traceparent: {unsampled}\r\nx-request-id: quiet\r\n");
    ask("no spans, a line").send(proxy.front, &fields).await;
    let line = proxy.line_of("quiet").await;
    assert_eq!((&line["path"], &line["trace_id"]), (&json!("plain"), &serde_json::Value::Null));
    ask("both").send(proxy.front, "x-request-id: told\r\n").await;
    collector.of("told").await;
    assert_eq!(collector.spans().len(), 1, "the other one has none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_collector_drops_spans_with_a_count_and_fails_no_request() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "otlp: \"http://127.0.0.1:9\"", &forced("own")).await;
    let answer = ask("one two three one two three one two").send(proxy.front, "").await;
    assert_eq!(answer.plain.status, 200);
    let dropped = async {
        while metric(proxy.admin, "foretell_spans_dropped_total").await < 1.0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, dropped).await.expect("they are counted");
}
