//! Between proxy and target: passes calls on, and injects faults of networks and servers into some.
//!
//! Faults are set per request, by its `x-request-id`, which every call of a session carries; so
//! several requests can be in flight, each with its own faults.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use crate::wire::{Head, Message, Server, Wire, chunk};

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The client's own request.
    First,
    /// A plain call that continues the whole context by ids.
    Plain,
    /// A verify request, as a tree or as a fan-out of prompts.
    Verify,
}

/// A fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This status and an error body.
    Status(u16),
    /// This status, and seconds in `Retry-After`.
    Later(u16, u8),
    /// 200, and a body that is not JSON.
    Garbage,
    /// 200, and an empty body.
    Empty,
    /// One row less than asked for.
    RowLess,
    /// One row more.
    RowMore,
    /// Ids outside of the vocabulary.
    Alien,
    /// Half of the answer, then the connection ends.
    Half,
    /// The connection is reset before an answer.
    Reset,
    /// No answer.
    Hang,
    /// The answer begins and does not go on.
    Stall,
    /// A stream that is cut after this number of events.
    CutAfter(usize),
    /// A stream with garbage after this number of events.
    GarbageAfter(usize),
    /// A stream with an error event after this number of events.
    ErrorAfter(usize),
    /// The answer in pieces of random sizes, from this seed.
    Cuts(u64),
}

/// A call that was passed on.
#[derive(Clone, Debug)]
pub struct Seen {
    pub kind: Kind,
    /// Tokens of prompt and output that it carries, where it carries ids.
    pub context: usize,
    pub seed: Option<u64>,
}

/// The faults of one request, by kind and number of the call.
#[derive(Clone, Debug, Default)]
pub struct Fate(pub Vec<(Option<Kind>, Option<usize>, Fault)>);

impl Fate {
    /// This fault on call `index` of this kind, from 0.
    pub fn at(kind: Kind, index: usize, fault: Fault) -> Self {
        Self(vec![(Some(kind), Some(index), fault)])
    }

    /// This fault on every call.
    pub fn always(fault: Fault) -> Self {
        Self(vec![(None, None, fault)])
    }

    #[must_use]
    pub fn and(mut self, kind: Kind, index: usize, fault: Fault) -> Self {
        self.0.push((Some(kind), Some(index), fault));
        self
    }
}

#[derive(Default)]
struct Ledger {
    fates: HashMap<String, Fate>,
    seen: HashMap<String, Vec<Seen>>,
    struck: HashMap<String, usize>,
}

pub struct Middlebox {
    pub address: SocketAddr,
    ledger: Arc<Mutex<Ledger>>,
    _server: Server,
}

impl Middlebox {
    pub async fn before(target: SocketAddr) -> Self {
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let shared = Arc::clone(&ledger);
        let server = Server::start(move |wire| serve(wire, target, Arc::clone(&shared))).await;
        Self { address: server.address, ledger, _server: server }
    }

    pub fn fate(&self, id: &str, fate: Fate) {
        self.ledger.lock().fates.insert(id.to_owned(), fate);
    }

    /// The calls of one request.
    pub fn seen(&self, id: &str) -> Vec<Seen> {
        self.ledger.lock().seen.get(id).cloned().unwrap_or_default()
    }

    /// Faults that occurred in a request.
    pub fn struck(&self, id: &str) -> usize {
        self.ledger.lock().struck.get(id).copied().unwrap_or(0)
    }
}

async fn serve(mut client: Wire, target: SocketAddr, ledger: Arc<Mutex<Ledger>>) {
    let Some(request) = client.message().await else { return };
    let fault = note(&request, &ledger);
    match fault {
        None => pass(&mut client, &request, target, Piecemeal::whole()).await,
        Some(Fault::Cuts(seed)) => pass(&mut client, &request, target, Piecemeal::random(seed)).await,
        Some(Fault::CutAfter(events)) => {
            let end = Piecemeal { after: Some((events, Vec::new())), ..Piecemeal::whole() };
            pass(&mut client, &request, target, end).await;
        }
        Some(Fault::GarbageAfter(events)) => {
            let end =
                Piecemeal { after: Some((events, b"data: {\"id\":!\n\n".to_vec())), ..Piecemeal::whole() };
            pass(&mut client, &request, target, end).await;
        }
        Some(Fault::ErrorAfter(events)) => {
            let error = b"data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n".to_vec();
            let end = Piecemeal { after: Some((events, error)), ..Piecemeal::whole() };
            pass(&mut client, &request, target, end).await;
        }
        Some(fault) => strike(&mut client, &request, target, fault).await,
    }
}

/// Notes a call and returns its fault.
fn note(request: &Message, ledger: &Mutex<Ledger>) -> Option<Fault> {
    let (path, body) = (request.head.target().1, request.body.as_slice());
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let of_ids = body["prompt"][0].is_array();
    let kind = match path {
        "/v1/verify" => Kind::Verify,
        "/v1/completions" if of_ids && body["stream"] == false => Kind::Verify,
        "/v1/completions" if of_ids => Kind::Plain,
        "/v1/completions" | "/v1/chat/completions" => Kind::First,
        _ => return None,
    };
    let id = request.head.get("x-request-id").unwrap_or_default();
    // Later calls carry a suffix with the round.
    let id = if kind == Kind::First { id } else { id.rsplit_once('-').map_or(id, |(id, _)| id) };
    let mut ledger = ledger.lock();
    let seen = ledger.seen.entry(id.to_owned()).or_default();
    let index = seen.iter().filter(|seen| seen.kind == kind).count();
    let context = body["context"].as_array().or_else(|| body["prompt"][0].as_array()).map_or(0, Vec::len);
    seen.push(Seen { kind, context, seed: body["seed"].as_u64() });
    let fits = |&&(of, at, _): &&(Option<Kind>, Option<usize>, Fault)| {
        of.is_none_or(|of| of == kind) && at.is_none_or(|at| at == index)
    };
    let fault = ledger.fates.get(id).and_then(|fate| fate.0.iter().find(fits)).map(|&(.., fault)| fault);
    if fault.is_some() {
        *ledger.struck.entry(id.to_owned()).or_default() += 1;
    }
    fault
}

/// The way in which the body of an answer is passed on.
struct Piecemeal {
    random: Option<u64>,
    /// After this number of events these bytes, and then the end of the connection.
    after: Option<(usize, Vec<u8>)>,
}

impl Piecemeal {
    fn whole() -> Self {
        Self { random: None, after: None }
    }

    fn random(seed: u64) -> Self {
        Self { random: Some(seed), after: None }
    }

    /// Cuts bytes into pieces; every other seed cuts single bytes only.
    fn cut<'a>(&mut self, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
        let Some(state) = &mut self.random else { return vec![bytes] };
        let single = *state & 1 == 0;
        let mut pieces = Vec::new();
        while !bytes.is_empty() {
            *state = state.wrapping_add(2);
            let size =
                if single { 1 } else { 1 + (foretell_onnx::noise::hash(*state, 0, 0, 0) % 97) as usize };
            let (piece, rest) = bytes.split_at(size.min(bytes.len()));
            pieces.push(piece);
            bytes = rest;
        }
        pieces
    }
}

fn head_for_target(request: &Message) -> Vec<u8> {
    let mut head = format!("{}\r\n", request.head.line);
    for (name, value) in &request.head.fields {
        if !["connection", "transfer-encoding", "content-length"].contains(&name.as_str()) {
            head.extend([name, ": ", value, "\r\n"]);
        }
    }
    head.extend(["content-length: ", &request.body.len().to_string(), "\r\nconnection: close\r\n\r\n"]);
    [head.as_bytes(), &request.body].concat()
}

/// The head of an answer; without a length if the body is cut in pieces.
fn head_for_client(head: &Head, cut: bool) -> String {
    let mut lines = format!("{}\r\n", head.line);
    for (name, value) in &head.fields {
        if name != "connection" && !(cut && name == "content-length") {
            lines.extend([name, ": ", value, "\r\n"]);
        }
    }
    if cut && head.get("transfer-encoding").is_none() {
        lines.push_str("transfer-encoding: chunked\r\n");
    }
    lines + "connection: close\r\n\r\n"
}

async fn pass(client: &mut Wire, request: &Message, target: SocketAddr, mut piecemeal: Piecemeal) {
    let mut upstream = Wire::connect(target).await;
    upstream.send(head_for_target(request)).await;
    let head = tokio::select! {
        head = upstream.head() => head,
        () = client.closed() => return,
    };
    let Some(head) = head else { return };
    let cut = piecemeal.random.is_some();
    if !client.try_send(head_for_client(&head, cut)).await {
        return;
    }
    if head.get("transfer-encoding").is_some() {
        return pass_events(client, &mut upstream, piecemeal).await;
    }
    let Some(message) = upstream.body(head).await else { return };
    if !cut {
        client.try_send(message.body).await;
        return;
    }
    for piece in piecemeal.cut(&message.body) {
        client.try_send(chunk(piece)).await;
    }
    client.try_send("0\r\n\r\n").await;
}

/// Passes events on; the target sends each one in its own chunk.
async fn pass_events(client: &mut Wire, upstream: &mut Wire, mut piecemeal: Piecemeal) {
    let mut events = 0;
    loop {
        let bytes = tokio::select! {
            bytes = upstream.chunk() => bytes,
            () = client.closed() => return,
        };
        let Some(bytes) = bytes else { return };
        if bytes.is_empty() {
            client.try_send("0\r\n\r\n").await;
            return;
        }
        if let Some((_, end)) = piecemeal.after.as_ref().filter(|(after, _)| *after == events) {
            if !end.is_empty() {
                client.try_send(chunk(end)).await;
            }
            return;
        }
        events += 1;
        let framed: Vec<u8> = piecemeal.cut(&bytes).into_iter().flat_map(chunk).collect();
        if !client.try_send(framed).await {
            return;
        }
    }
}

async fn strike(client: &mut Wire, request: &Message, target: SocketAddr, fault: Fault) {
    const OK: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let error = r#"{"error":{"message":"not now","type":"server_error","param":null,"code":null}}"#;
    let whole = |line: &str, fields: &str, body: &str| {
        format!("{line}{fields}content-length: {}\r\n\r\n{body}", body.len())
    };
    let line = |status: u16| format!("HTTP/1.1 {status} Trouble\r\nconnection: close\r\n");
    let answer = match fault {
        Fault::Status(status) => whole(&line(status), "content-type: application/json\r\n", error),
        Fault::Later(status, seconds) => whole(&line(status), &format!("retry-after: {seconds}\r\n"), error),
        Fault::Garbage => whole(OK, "", "<html>It works!</html>"),
        Fault::Empty => whole(OK, "", ""),
        Fault::Hang => return client.closed().await,
        Fault::Reset => return client.reset(),
        Fault::Stall => {
            client.try_send(format!("{OK}content-length: 500\r\n\r\n{{")).await;
            return client.closed().await;
        }
        Fault::Half | Fault::RowLess | Fault::RowMore | Fault::Alien => {
            let mut upstream = Wire::connect(target).await;
            upstream.send(head_for_target(request)).await;
            let Some(answer) = upstream.message().await else { return };
            if fault == Fault::Half {
                let half = &answer.body[..answer.body.len() / 2];
                let text = String::from_utf8_lossy(half);
                client.try_send(format!("{OK}content-length: {}\r\n\r\n{text}", answer.body.len())).await;
                return;
            }
            whole(OK, "", &doctored(answer.json(), fault).to_string())
        }
        Fault::CutAfter(_) | Fault::GarbageAfter(_) | Fault::ErrorAfter(_) | Fault::Cuts(_) => return,
    };
    client.try_send(answer).await;
}

/// A correct verification result with a fault in it, for both verification methods.
fn doctored(mut answer: Value, fault: Fault) -> Value {
    let rows = if answer["rows"].is_array() { "rows" } else { "choices" };
    let rows = answer[rows].as_array_mut().expect("a verification result");
    match fault {
        Fault::RowLess => drop(rows.pop()),
        Fault::RowMore => rows.push(rows[rows.len() - 1].clone()),
        _ => {
            for row in rows.iter_mut() {
                let alien = Value::from(4_000_000);
                if row.get("sample").is_some() {
                    row["sample"] = alien;
                } else {
                    row["token_ids"] = Value::from(vec![alien]);
                }
            }
        }
    }
    answer
}
