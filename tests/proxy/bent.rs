//! Gateways that bend every answer: whatever the form, clients get what they would get without
//! Foretell, and requests cost next to no second generation.

mod forms;
mod gateway;

use std::fmt::Write as _;
use std::io::Read as _;
use std::net::SocketAddr;

use flate2::read::GzDecoder;
use foretell_engines::openai::Route;
use foretell_engines::openai::event::{self, Data};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use self::forms::{FORMS, Form};
use self::gateway::Gateway;
use crate::fakes::Setup;
use crate::transparent::cases;
use crate::transparent::engines::{ENGINES, Engine};
use crate::transparent::modes::MODES;
use crate::wire::{Message, PATIENCE, Wire, post};

/// What a client reads in an answer.
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
        let json = |data: &String| match Data::of(data) {
            Data::Answer(event) => Some(event),
            Data::Foreign(_) | Data::Damaged => None,
        };
        all.iter().filter_map(json).collect()
    } else {
        vec![serde_json::from_slice(&bytes).unwrap_or_else(|_| json!({"error": text}))]
    };
    for event in &events {
        if let Some(error) = event::error(event) {
            write!(read.wrong, "error {error} ").unwrap();
        }
        for choice in event::choices(event) {
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

/// One cell of the matrix.
struct Cell {
    engine: &'static Engine,
    form: Form,
    route: Route,
    stream: bool,
    forced: bool,
    requests: usize,
}

impl Cell {
    fn name(&self) -> String {
        let Self { engine, form, route, stream, forced, requests } = self;
        format!(
            "{} · {} ({}) · {} · {} · {} · {requests}",
            engine.name,
            form.name,
            form.from,
            route.name(),
            if *stream { "stream" } else { "whole" },
            if *forced { "forced" } else { "default" },
        )
    }

    /// The faults of this cell, a line each.
    async fn faults(&self) -> String {
        let server = (self.engine.start)(Setup::default()).await;
        let gateway = Gateway::before(server.address(), self.form.bend).await;
        let mode = MODES.iter().find(|mode| mode.name == if self.forced { "forced" } else { "auto" }).unwrap();
        let proxy = mode.before(gateway.address, self.engine).await;
        let direct = read(&self.ask(gateway.address).await, self.stream);
        let before = gateway.generations();
        let mut faults = String::new();
        for number in 0..self.requests {
            let answer = self.ask(proxy.gateway.addresses[0]).await;
            let through = read(&answer, self.stream);
            if !agrees(&direct, &through) {
                let path = answer.head.get("x-foretell-path");
                writeln!(faults, "{}: request {number} ({path:?}): {through:?} for {direct:?}", self.name())
                    .unwrap();
                break;
            }
        }
        let generations = gateway.generations() - before;
        // Two of the first requests may cost a second generation.
        let most = self.requests + (self.requests / 50).max(2);
        if generations > most {
            writeln!(faults, "{}: {generations} generations", self.name()).unwrap();
        }
        faults
    }

    async fn ask(&self, to: SocketAddr) -> Message {
        let body = cases::body(self.engine, self.route, self.stream, &json!({}));
        let request = post(self.route.path(), "content-type: application/json\r\n", &body);
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

async fn check(cells: Vec<Cell>) {
    let faults: Vec<String> =
        stream::iter(cells.iter().map(Cell::faults)).buffer_unordered(4).collect().await;
    let faults = faults.concat();
    assert!(faults.is_empty(), "{} faults:\n{faults}", faults.lines().count());
}

/// The engines that requests are speculated on at.
fn engines() -> impl Iterator<Item = &'static Engine> {
    ENGINES.iter().filter(|engine| ["vllm", "sglang", "llamacpp", "onnx"].contains(&engine.name))
}

fn cells(requests: usize, taken: impl Fn(&Cell) -> bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for engine in engines() {
        for form in FORMS {
            for route in [Route::Completions, Route::Chat] {
                for (stream, forced) in [(false, false), (true, false), (false, true), (true, true)] {
                    cells.push(Cell { engine, form: *form, route, stream, forced, requests });
                }
            }
        }
    }
    cells.retain(taken);
    cells
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bent_answer_is_the_gateways_own() {
    check(cells(1, |_| true)).await;
}

/// Each form in front of one engine and in one way; with FORETELL_LONG, in front of all and in all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_always_bent_costs_next_to_no_second_generation() {
    let all = std::env::var_os("FORETELL_LONG").is_some();
    let names = ["onnx", "vllm", "sglang", "llamacpp"];
    let ways = [(false, false), (true, false), (false, true), (true, true)];
    let own = |cell: &Cell| {
        let number = FORMS.iter().position(|form| form.name == cell.form.name).unwrap();
        cell.route == Route::Completions
            && cell.engine.name == names[number % 4]
            && (cell.stream, cell.forced) == ways[number / 4 % 4]
    };
    check(cells(150, |cell| all || own(cell))).await;
}
