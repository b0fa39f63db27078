//! Gateways that bend every answer: whatever the form, clients get what they would get without
//! Foretell, and requests cost next to no second generation.

mod forms;
mod gateway;

use std::fmt::Write as _;
use std::io::Read as _;
use std::net::SocketAddr;

use flate2::read::GzDecoder;
use foretell::app::Running;
use foretell_wire::openai::Route;
use foretell_wire::openai::event::{self, Data};
use futures_util::stream::{self, StreamExt};
use rstest::rstest;
use serde_json::{Value, json};

use self::forms::{FORMS, Form};
use self::gateway::Gateway;
use crate::fakes::Setup;
use crate::transparent::cases;
use crate::transparent::engines::{ENGINES, Engine};
use crate::transparent::modes::MODES;
use crate::wire::{Message, PATIENCE, Wire, post};

/// The content of an answer, as a client reads it.
#[derive(Debug, Default, PartialEq)]
struct Read {
    status: u16,
    text: String,
    finish: String,
    done: bool,
    /// The cause for which a client would take the answer for broken, or for another than it asked
    /// for.
    wrong: String,
}

fn decoded(message: &Message) -> Vec<u8> {
    if message.head.get("content-encoding") != Some("gzip") {
        return message.body.clone();
    }
    let mut bytes = Vec::new();
    match GzDecoder::new(message.body.as_slice()).read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) => format!("undecodable: {error}").into_bytes(),
    }
}

/// Reads an answer as a lenient client does: it skips what it does not know.
fn read(message: &Message, stream: bool) -> Read {
    let mut read = Read { status: message.head.status(), ..Read::default() };
    let bytes = decoded(message);
    let text = String::from_utf8_lossy(&bytes);
    let events: Vec<Value> = if stream {
        let text = text.replace("\r\n", "\n");
        let data = |event: &str| -> String {
            event.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start).collect()
        };
        let all: Vec<String> = text.split("\n\n").map(data).filter(|data| !data.is_empty()).collect();
        read.done = all.iter().any(|data| data == "[DONE]");
        let json = |data: String| match Data::of(data) {
            Data::Answer(event) => Some(event.value()),
            Data::Foreign(_) | Data::Damaged => None,
        };
        all.into_iter().filter_map(json).collect()
    } else {
        vec![serde_json::from_slice(&bytes).unwrap_or_else(|_| json!({"error": text}))]
    };
    for event in &events {
        if let Some(error) = event::error(event) {
            write!(read.wrong, "error {error} ").unwrap();
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            let texts = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
            read.text.extend(texts.iter().filter_map(|text| text.as_str()));
            if let Some(reason) = event::finish_reason(choice) {
                reason.clone_into(&mut read.finish);
            }
        }
    }
    for member in ["\"token_ids\":[", "prompt_token_ids\":[", "__verbose"] {
        if text.contains(member) {
            write!(read.wrong, "has {member} ").unwrap();
        }
    }
    read
}

/// One way to ask.
#[derive(Clone, Copy)]
struct Way {
    route: Route,
    stream: bool,
}

const WAYS: [Way; 4] = [
    Way { route: Route::Completions, stream: false },
    Way { route: Route::Completions, stream: true },
    Way { route: Route::Chat, stream: false },
    Way { route: Route::Chat, stream: true },
];

/// A proxy behind a gateway that bends every answer of an engine.
struct Bent {
    engine: &'static Engine,
    form: Form,
    forced: bool,
    gateway: Gateway,
    proxy: Running,
}

impl Bent {
    async fn start(engine: &'static Engine, address: SocketAddr, form: Form, forced: bool) -> Self {
        let gateway = Gateway::before(address, form.bend).await;
        let mode = MODES.iter().find(|mode| mode.name == if forced { "forced" } else { "auto" }).unwrap();
        let proxy = mode.before(gateway.address, engine).await;
        Self { engine, form, forced, gateway, proxy }
    }

    /// The faults of so many requests, a line each.
    async fn faults(&self, way: Way, requests: usize) -> String {
        let direct = read(&self.ask(self.gateway.address, way).await, way.stream);
        let before = self.gateway.generations();
        let mut faults = String::new();
        for number in 0..requests {
            let answer = self.ask(self.proxy.gateway.addresses[0], way).await;
            let through = read(&answer, way.stream);
            if !agrees(&direct, &through) {
                let path = answer.head.get("x-foretell-path");
                writeln!(faults, "{}: {number} ({path:?}): {through:?} for {direct:?}", self.name(way))
                    .unwrap();
                break;
            }
        }
        let generations = self.gateway.generations() - before;
        // Two of the first requests may cost a second generation, and one in a hundred.
        if generations > requests + 2 + requests / 100 {
            writeln!(faults, "{}: {generations} generations", self.name(way)).unwrap();
        }
        faults
    }

    fn name(&self, way: Way) -> String {
        let Self { engine, form, forced, .. } = self;
        let (form, from) = (form.name, form.from);
        let stream = if way.stream { "stream" } else { "whole" };
        format!("{}, {form} ({from}), {}, {stream}, forced {forced}", engine.name, way.route.name())
    }

    async fn ask(&self, to: SocketAddr, way: Way) -> Message {
        let body = cases::body(self.engine, way.route, way.stream, &json!({}));
        let request = post(way.route.path(), "content-type: application/json\r\n", &body);
        let answer = async { Wire::connect(to).await.ask(request).await };
        tokio::time::timeout(PATIENCE, answer).await.expect("no hang")
    }
}

/// The same answer; one that is made whole here may have an end that the gateway has taken away.
fn agrees(direct: &Read, through: &Read) -> bool {
    // A client that asked for a stream and is answered by a document may get the stream here.
    if direct.text.is_empty() && through.done {
        return through.wrong.is_empty();
    }
    let Read { status, text, finish, done, wrong } = through;
    let ends = *finish == direct.finish || direct.finish.is_empty();
    let complete = *done || !direct.done;
    (status, text) == (&direct.status, &direct.text) && ends && complete && *wrong == direct.wrong
}

/// Every form in front of an engine, in the ways that `ways` picks for it by number.
async fn check(engine: &str, requests: usize, ways: impl Fn(usize) -> Vec<(bool, Way)>) {
    let engine = ENGINES.iter().find(|known| known.name == engine).unwrap();
    let server = (engine.start)(Setup::default()).await;
    let address = server.address();
    let faults: Vec<String> = stream::iter(FORMS.iter().enumerate())
        .map(|(number, form)| {
            let ways = ways(number);
            async move {
                let mut faults = String::new();
                for forced in [false, true] {
                    let picked: Vec<Way> =
                        ways.iter().filter(|(mode, _)| *mode == forced).map(|(_, way)| *way).collect();
                    if picked.is_empty() {
                        continue;
                    }
                    let bent = Bent::start(engine, address, *form, forced).await;
                    for way in picked {
                        faults += &bent.faults(way, requests).await;
                    }
                }
                faults
            }
        })
        .buffer_unordered(4)
        .collect()
        .await;
    let faults = faults.concat();
    assert!(faults.is_empty(), "{} faults:\n{faults}", faults.lines().count());
}

const NAMES: [&str; 4] = ["onnx", "vllm", "sglang", "llamacpp"];

/// True for the long form (`make test-long`): every form in every way in front of every engine. The
/// short one takes each form in a part of them, always the same one.
fn is_long() -> bool {
    std::env::var_os("FORETELL_LONG").is_some()
}

/// Without a policy and with forced drafts.
fn in_modes(ways: &[Way]) -> impl Iterator<Item = (bool, Way)> {
    [false, true].into_iter().flat_map(move |forced| ways.iter().map(move |&way| (forced, way)))
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bent_answer_is_the_gateways_own(#[values(0, 1, 2, 3)] engine: usize) {
    let ways = |number: usize| {
        let own = |at: usize| is_long() || (number + engine + at).is_multiple_of(4);
        in_modes(&WAYS).enumerate().filter(|(at, _)| own(*at)).map(|(_, way)| way).collect()
    };
    check(NAMES[engine], 1, ways).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_always_bent_costs_next_to_no_second_generation(
    #[values(0, 1, 2, 3)] engine: usize,
) {
    let ways = |number: usize| {
        let own = |at: usize| is_long() || (number % 16 == 4 * at + engine && number.is_multiple_of(3));
        in_modes(&WAYS[..2]).enumerate().filter(|(at, _)| own(*at)).map(|(_, way)| way).collect()
    };
    check(NAMES[engine], 150, ways).await;
}
