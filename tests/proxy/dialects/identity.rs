//! A session stays with the process that it began on, for every engine.

use std::net::SocketAddr;
use std::time::Duration;

use foretell::app::Running;
use foretell::app::local;
use foretell_wire::openai::Route;
use serde_json::{Value, json};

use crate::client::{Ask, CONTROL_GROUP, FORCED, events, get};
use crate::fakes::sglang::{self, Sglang};
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Fault, Setup, Switch, Temper, When, toy};
use crate::wire::{Message, PATIENCE, Wire};

const SCORE: &str = "/inference/v1/generate";
const COMPLETIONS: &str = "/v1/completions";
const PROMPT: &str = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n";
/// Bytes of answers after which the address switches to another process: near the start of the
/// answer, and within its rounds.
const EARLY: usize = 1500;
const LATE: usize = 6000;
/// A start time, hundredths of a second.
const SECOND: u64 = 176_392_581_300;

fn setup(seed: u64) -> Setup {
    let temper = Temper { seed, eos_every: None, ..Temper::default() };
    Setup {
        temper,
        pace: crate::fakes::Pace { step: Duration::from_millis(1), ..Default::default() },
        ..Setup::default()
    }
}

async fn vllm(seed: u64, version: &'static str, scale_out: bool) -> Fake<Vllm> {
    Fake::start(Vllm::new(Options { scale_out, setup: setup(seed), ..Options::of(version) })).await
}

async fn proxy(address: SocketAddr) -> Running {
    proxy_with(address, FORCED).await
}

async fn proxy_with(address: SocketAddr, policy: &str) -> Running {
    proxy_connecting(address, policy, "2s").await
}

/// `within`: limit for a new connection and, on a first call, for the page that shows which process
/// it leads to.
async fn proxy_connecting(address: SocketAddr, policy: &str, within: &str) -> Running {
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 10s, pool_idle: 1m, connect: {within} }}\nbackends:\n  - name: toy\n    replicas: [\"http://{address}\"]\n    \
         models: [{{ id: toy, tokenizer: {} }}]\n    probe: {{ when: never }}\n    load: {{ every: 1h }}\n",
        toy::folder().join("tokenizer.json").display(),
    );
    local::proxy(&process, &[policy]).await.unwrap()
}

fn ask(stream: bool, temperature: f64) -> Ask {
    // Every field is set, so that no default of the server is in doubt and tails are scored.
    let fields = json!({"prompt": PROMPT, "max_tokens": 120, "ignore_eos": true, "temperature": temperature,
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0});
    Ask::new(Route::Completions, stream, fields)
}

async fn asked(front: SocketAddr, ask: &Ask) -> Message {
    sent(front, ask.bytes("accept-encoding: gzip\r\n")).await
}

async fn sent(front: SocketAddr, request: Vec<u8>) -> Message {
    let answer = async { Wire::connect(front).await.ask(request).await };
    tokio::time::timeout(PATIENCE, answer).await.expect("no hang")
}

/// The text of a stream, and the code of the error that ends it.
fn read(message: &Message) -> (String, String) {
    let events = events(message);
    let text = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    (text, events.iter().filter_map(|event| event["error"]["code"].as_str()).collect())
}

/// Two engines that were started in the same second, and the address that leads to one after the
/// other; `cuts`: open connections end with the switch.
async fn one_after_the_other(
    version: &'static str,
    scale_out: bool,
    cuts: bool,
) -> ([Fake<Vllm>; 2], Switch) {
    let both = [vllm(1, version, scale_out).await, vllm(2, version, scale_out).await];
    both[0].house.start_at(SECOND + 10);
    both[1].house.start_at(SECOND + 20);
    let switch = Switch::before(both.iter().map(|fake| fake.address).collect(), cuts).await;
    (both, switch)
}

/// Two engines that were started in the same second. Older versions report no fingerprint: their
/// connections identify them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_over_the_address_is_noticed_by_its_start_time() {
    for (version, scale_out) in [("0.29.0", true), ("0.22.0", false)] {
        for (cuts, after) in [(true, EARLY), (true, LATE), (false, EARLY), (false, LATE)] {
            let (both, switch) = one_after_the_other(version, scale_out, cuts).await;
            let proxy = proxy(switch.address).await;
            let front = proxy.gateway.addresses[0];
            let plain = ask(true, 0.0).send(both[0].address, "").await.plain;
            let other = ask(true, 0.0).send(both[1].address, "").await.plain;
            assert_ne!(plain.text, other.text);
            let undisturbed = ask(true, 0.0).send(front, "").await;
            assert_eq!(
                (&undisturbed.plain, undisturbed.foretell()["path"].as_str()),
                (&plain, Some("speculated"))
            );
            switch.after(after);
            let message = asked(front, &ask(true, 0.0)).await;
            let what = format!("vLLM {version}, cut {cuts}, after {after}: {}", message.text());
            assert!(switch.has_switched(), "{what}");
            let (text, code) = read(&message);
            // An open connection may bring the whole answer; before the first token the second
            // engine begins anew.
            if (text == plain.text && !cuts) || (text == other.text && after == EARLY) {
                continue;
            }
            assert!(plain.text.starts_with(&text), "{what}");
            assert_eq!(code, "backend_changed", "{what}");
        }
    }
}

/// The same for a client that waits for the whole answer: nothing has reached it, so the engine
/// that is there now gets its request from the beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_begins_anew_on_the_engine_that_takes_over() {
    for (version, scale_out) in [("0.29.0", true), ("0.22.0", false)] {
        for (cuts, after) in [(true, EARLY), (true, LATE), (false, LATE)] {
            let (both, switch) = one_after_the_other(version, scale_out, cuts).await;
            let proxy = proxy(switch.address).await;
            let front = proxy.gateway.addresses[0];
            let mut texts = Vec::new();
            for fake in &both {
                texts.push(ask(false, 0.0).send(fake.address, "").await.plain.text);
            }
            assert_eq!(ask(true, 0.0).send(front, "").await.foretell()["path"], "speculated");
            both[1].house.keep_requests();
            switch.after(after);
            let message = asked(front, &ask(false, 0.0)).await;
            let what = format!("vLLM {version}, cut {cuts}, after {after}: {}", message.text());
            assert!(switch.has_switched(), "{what}");
            assert_eq!(message.head.status(), 200, "{what}");
            let answer: Value = serde_json::from_str(&message.text()).unwrap();
            let text = answer["choices"][0]["text"].as_str().unwrap();
            assert!(texts.iter().any(|whole| whole == text), "{what}");
            // Its answer is read before the client's head is sent, so it must not be compressed.
            for request in both[1].house.take_requests().iter().filter(|request| request.path == COMPLETIONS)
            {
                assert_eq!(request.get("accept-encoding"), Some("identity"), "{what}");
            }
        }
    }
}

/// A gateway in front of the engine may go by the query, as by a header.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_query_goes_with_every_call() {
    let fake = vllm(1, "0.29.0", true).await;
    let proxy = proxy(fake.address).await;
    fake.house.keep_requests();
    let request = String::from_utf8(ask(true, 0.0).bytes("")).unwrap();
    let request = request.replacen(COMPLETIONS, &format!("{COMPLETIONS}?key=7"), 1);
    let message = sent(proxy.gateway.addresses[0], request.into_bytes()).await;
    assert_eq!(message.head.status(), 200);
    let calls = fake.house.take_requests();
    let posted: Vec<_> = calls.iter().filter(|call| call.method == "POST").collect();
    assert!(posted.iter().any(|call| call.path == SCORE), "{posted:?}");
    assert!(posted.iter().all(|call| call.query == "key=7"), "{posted:?}");
}

/// A rolling update of one replica: the same model, another process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_not_continued_on_a_restarted_engine() {
    let fake = vllm(1, "0.29.0", true).await;
    let proxy = proxy(fake.address).await;
    let front = proxy.gateway.addresses[0];
    assert_eq!(ask(true, 0.0).send(front, "").await.foretell()["path"], "speculated");
    for stream in [true, false] {
        fake.house.faults.at(When::path(SCORE), 2, Fault::Kill);
        let revive = async {
            while !fake.is_down() {
                tokio::task::yield_now().await;
            }
            fake.revive();
        };
        let ask = ask(stream, 0.0);
        let (message, ()) = tokio::join!(asked(front, &ask), revive);
        if stream {
            let code = read(&message).1;
            assert!(["backend_changed", "backend_broke_off"].contains(&code.as_str()), "{code}");
            assert_eq!(message.head.status(), 200);
        } else {
            // The request begins anew if the engine is back by then.
            assert!([200, 502].contains(&message.head.status()), "{}", message.text());
        }
        let known =
            async { while self::ask(true, 0.0).send(front, "").await.foretell()["path"] != "speculated" {} };
        tokio::time::timeout(PATIENCE, known).await.expect("it is recognised again");
    }
}

/// The same process, the same model id, other weights: the answers' own fields show it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_are_replaced_in_the_middle_are_noticed() {
    let by_fingerprint = vllm(1, "0.33.0", false).await;
    let by_version =
        Fake::start(Sglang::new(sglang::Options { setup: setup(1), ..sglang::Options::default() })).await;
    let houses = [&by_fingerprint.house, &by_version.house];
    let addresses = [by_fingerprint.address, by_version.address];
    let verifies = [When::path(COMPLETIONS).streamed(false), When::path("/generate")];
    for ((house, address), verify) in houses.into_iter().zip(addresses).zip(verifies) {
        let proxy = proxy(address).await;
        let front = proxy.gateway.addresses[0];
        let plain = ask(true, 0.0).send(address, "").await.plain;
        let undisturbed = ask(true, 0.0).send(front, "").await;
        assert_eq!(
            (&undisturbed.plain, undisturbed.foretell()["path"].as_str()),
            (&plain, Some("speculated"))
        );
        house.faults.at(verify, 2, Fault::Reload);
        let message = asked(front, &ask(true, 0.0)).await;
        assert_eq!(house.faults.struck(), 1);
        let (text, code) = read(&message);
        assert!(plain.text.starts_with(&text) && text != plain.text, "{text}");
        assert_eq!(code, "backend_changed", "{}", message.text());
    }
}

/// An engine that shows no start time: a lost connection ends a speculated answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_an_engine_without_identity_is_not_continued_after_a_loss() {
    let fake =
        Fake::start(Sglang::new(sglang::Options { setup: setup(1), ..sglang::Options::default() })).await;
    let proxy = proxy(fake.address).await;
    let front = proxy.gateway.addresses[0];
    let plain = ask(true, 0.0).send(fake.address, "").await.plain;
    fake.house.faults.at(When::path("/generate"), 2, Fault::Reset);
    let (text, code) = read(&asked(front, &ask(true, 0.0)).await);
    assert!(plain.text.starts_with(&text) && text != plain.text, "{text}");
    assert_eq!(code, "backend_broke_off");
    // The same for the first call: later calls might reach another model. A client that waits for a
    // whole answer has received nothing yet.
    let proxy = proxy_with(fake.address, CONTROL_GROUP).await;
    let front = proxy.gateway.addresses[0];
    fake.house.faults.at(When::path(COMPLETIONS).streamed(true), 0, Fault::CutAfter(5));
    let (text, code) = read(&asked(front, &ask(true, 0.0)).await);
    assert!(plain.text.starts_with(&text) && text != plain.text, "{text}");
    assert_eq!(code, "backend_broke_off");
    fake.house.faults.at(When::path(COMPLETIONS).streamed(true), 0, Fault::CutAfter(5));
    let whole = ask(false, 0.0).send(front, "").await;
    assert_eq!((whole.plain.text, whole.message.head.get("x-foretell-reason")), (plain.text, Some("fault")));
}

/// The proxy asks once per connection; later calls on it cost nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reused_connection_is_not_identified_again() {
    let fake = vllm(1, "0.29.0", true).await;
    let proxy = proxy(fake.address).await;
    let front = proxy.gateway.addresses[0];
    let mut client = Wire::connect(front).await;
    let ask = ask(true, 0.0);
    let plain = "x-foretell: plain\r\n";
    let _ = client.ask(ask.bytes(plain)).await;
    let before = fake.house.tally();
    let began = tokio::time::Instant::now();
    for _ in 0..20 {
        let message = client.ask(ask.bytes(plain)).await;
        assert_eq!(message.head.status(), 200);
    }
    // Every five seconds the proxy identifies the replica on a new connection.
    let asked = 1 + began.elapsed().as_secs() as usize / 5;
    let after = fake.house.tally();
    let opened = after.connections - before.connections;
    assert!(opened <= asked, "{opened} connections");
    let pages = after.calls_of("/metrics") - before.calls_of("/metrics");
    assert!(pages <= 2 * asked, "{pages} pages for {opened} connections");
    let replicas: Value = get(proxy.gateway.admin.unwrap(), "/api/replicas").await.json();
    assert!(replicas.to_string().contains("vllm"), "{replicas}");
}

/// The page that shows which process answers fails for a while, in the middle of answers: they wait
/// for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_that_fails_for_a_while_ends_no_answer() {
    let fake = vllm(1, "0.29.0", true).await;
    let proxy = proxy(fake.address).await;
    let front = proxy.gateway.addresses[0];
    let plain = ask(true, 0.0).send(fake.address, "").await.plain;
    let mut waited = 0;
    for from in 0..4 {
        // Every round fails, so that each later call needs a connection, and each connection the
        // page.
        fake.house.faults.always(When::path(SCORE), Fault::Half);
        for nth in from..from + 2 {
            fake.house.faults.at(When::path("/metrics"), nth, Fault::Status(503));
        }
        let before = fake.house.tally().calls_of("/metrics");
        let got = ask(true, 0.0).send(front, "").await;
        assert_eq!(got.plain, plain, "{from}: {}", got.message.text());
        // The first page belongs to the first call, which has no answer yet that could wait.
        waited += usize::from(from > 0 && fake.house.tally().calls_of("/metrics") > before + from);
        fake.house.faults.clear();
    }
    assert!(waited > 0, "some answer waited for the failing page");
}

/// A busy server shows its process later than the connect timeout: answers that have begun wait for
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_that_is_late_ends_no_answer() {
    let fake = vllm(1, "0.29.0", true).await;
    let proxy = proxy_connecting(fake.address, FORCED, "1s").await;
    let plain = ask(true, 0.0).send(fake.address, "").await.plain;
    fake.house.faults.always(When::path(SCORE), Fault::Half);
    for nth in 1..100 {
        fake.house.faults.at(When::path("/metrics"), nth, Fault::Slow(Duration::from_millis(1500)));
    }
    let before = fake.house.tally().calls_of("/metrics");
    let got = ask(true, 0.0).send(proxy.gateway.addresses[0], "").await;
    assert_eq!(got.plain, plain, "{}", got.message.text());
    assert!(fake.house.tally().calls_of("/metrics") > before + 1, "a call waited for the late page");
}
