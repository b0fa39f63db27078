//! The model, the cache and the server that all fakes share.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use std::sync::Arc;

use crate::client::until;
use crate::fakes::batch::{Batch, Reuse};
use crate::fakes::cache::Cache;
use crate::fakes::http::{Out, Request, Sent};
use crate::fakes::sample::{Noise, Pipeline, Sampling};
use crate::fakes::sequence::{Finish, Hold, Sequence};
use crate::fakes::toy::Context;
use crate::fakes::{Engine, Fake, Fault, Front, House, Pace, Setup, Temper, Toy, When};
use crate::wire::{Wire, post};

fn greedy(max_tokens: usize) -> Sampling {
    let mut sampling = Sampling::new(Pipeline::VLLM, Noise::Position(1), max_tokens);
    sampling.temperature = 0.0;
    sampling
}

fn text_of(toy: &Toy, prompt: &[u32], sampling: Sampling) -> Sequence {
    let mut sequence = Sequence::new(0, Context::new(prompt), sampling, Hold::Longest);
    while sequence.step(toy).is_some() {}
    sequence
}

#[test]
fn a_row_depends_on_the_whole_context_and_on_nothing_else() {
    let toy = Toy::new(Temper::default());
    let one = Context::new(&[5, 6, 7, 8]);
    assert_eq!(toy.row(&one, 4).0, toy.row(&Context::new(&[5, 6, 7, 8, 9]), 4).0);
    assert_ne!(toy.row(&one, 4).0, toy.row(&Context::new(&[9, 6, 7, 8]), 4).0);
    assert_eq!(toy.row(&one, 4).0.len(), 8192);
}

#[test]
fn the_text_repeats_its_n_grams_but_does_not_loop() {
    let toy = Toy::new(Temper { eos_every: None, ..Temper::default() });
    let output = text_of(&toy, &toy.encode("Once upon a time"), greedy(1000)).output().to_vec();
    let known = |at: usize| {
        let (from, end) = (at.saturating_sub(300), at);
        let last = (from..end - 2).rev().find(|&n| output[n..n + 2] == output[end - 2..end]);
        last.is_some_and(|n| output[n + 2] == output[at])
    };
    let guessed = (300..1000).filter(|&at| known(at)).count() as f64 / 700.0;
    assert!((0.4..0.9).contains(&guessed), "{guessed}");
}

#[test]
fn stop_strings_end_the_text_and_are_never_sent() {
    let toy = Toy::new(Temper::default());
    let plain = text_of(&toy, &[40, 41], greedy(60)).text;
    let middle: String = plain.chars().skip(plain.chars().count() / 2).take(5).collect();
    for hold in [Hold::Longest, Hold::Prefix] {
        let mut sampling = greedy(60);
        sampling.stop = vec![middle.clone()];
        let mut sequence = Sequence::new(0, Context::new(&[40, 41]), sampling, hold);
        let mut told = String::new();
        while let Some(piece) = sequence.step(&toy) {
            told += &piece.text;
        }
        assert_eq!(told, plain[..plain.find(&middle).unwrap()]);
        assert_eq!(sequence.finish, Some(Finish::StopText(middle.clone())));
    }
}

/// A minimal engine: a number of events for `POST /events`, and its name for anything else.
struct Least(Arc<House>, &'static str);

impl Least {
    fn new(name: &'static str) -> Self {
        Self(House::new(Setup { max_running: 2, ..Setup::default() }), name)
    }
}

impl Engine for Least {
    fn house(&self) -> &Arc<House> {
        &self.0
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        async move {
            if request.path != "/events" {
                return out.json(200, &json!({"name": self.1, "started": self.0.started()})).await;
            }
            let prompt = Context::new(&[40, 41]);
            let sequence = Sequence::new(0, prompt, greedy(20), Hold::Longest);
            let mut batch = Batch::begin(&self.0, vec![sequence], Reuse::AtOnce).await;
            out.events().await?;
            while !batch.step().await.is_empty() {
                out.event("{}").await?;
            }
            out.end().await
        }
        .boxed()
    }
}

async fn name_at(address: std::net::SocketAddr) -> Value {
    Wire::connect(address).await.ask(post("/name", "", b"{}")).await.json()["name"].clone()
}

#[tokio::test]
async fn faults_strike_the_nth_call_of_a_kind_where_they_should() {
    let fake = Fake::start(Least::new("one")).await;
    let faults = &fake.house.faults;
    let mut wire = Wire::connect(fake.address).await;
    faults.at(When::path("/name"), 1, Fault::Later(429, 7));
    assert_eq!(wire.ask(post("/name", "", b"{}")).await.head.status(), 200);
    let late = wire.ask(post("/name", "", b"{}")).await;
    assert_eq!((late.head.status(), late.head.get("retry-after")), (429, Some("7")));
    assert_eq!(wire.ask(post("/name", "", b"{}")).await.head.status(), 200);
    faults.clear();
    for (fault, chunks) in [
        (Fault::CutAfter(3), vec![10, 10, 10]),
        (Fault::HalfEventAfter(2), vec![10, 10, 5]),
        (Fault::GarbageAfter(1), vec![10, 15]),
        (Fault::ResetAfter(0), vec![]),
    ] {
        faults.at(When::path("/events"), 0, fault);
        let mut wire = Wire::connect(fake.address).await;
        wire.send(post("/events", "", b"{}")).await;
        wire.head().await.unwrap();
        let mut sizes = Vec::new();
        while let Some(chunk) = wire.chunk().await {
            sizes.push(chunk.len());
        }
        assert_eq!(sizes, chunks);
    }
    assert_eq!(faults.struck(), 5);
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_generation() {
    let fake = Fake::start(Least::new("one")).await;
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post("/events", "", b"{}")).await;
    until(|| fake.house.running() > 0).await;
    drop(wire);
    until(|| fake.house.running() == 0 && fake.house.tally().cancelled > 0).await;
    assert_eq!(fake.house.tally().finished, 0);
}

#[tokio::test]
async fn a_sequence_without_a_free_slot_waits() {
    let fake = Fake::start(Least::new("one")).await;
    fake.house.pace.lock().step = Duration::from_hours(1);
    let mut wires = Vec::new();
    for _ in 0..3 {
        wires.push(Wire::connect(fake.address).await);
        wires.last_mut().unwrap().send(post("/events", "", b"{}")).await;
    }
    until(|| (fake.house.running(), fake.house.waiting()) == (2, 1)).await;
}

#[tokio::test]
async fn a_restart_closes_what_is_open_and_shows_a_later_start() {
    let fake = Fake::start(Least::new("one")).await;
    let mut wire = Wire::connect(fake.address).await;
    let before = wire.ask(post("/name", "", b"{}")).await.json()["started"].as_u64().unwrap();
    fake.restart();
    wire.closed().await;
    let after = Wire::connect(fake.address).await.ask(post("/name", "", b"{}")).await;
    assert!(after.json()["started"].as_u64().unwrap() > before);
}

#[tokio::test]
async fn a_front_alternates_by_connection() {
    let (one, two) = (Fake::start(Least::new("one")).await, Fake::start(Least::new("two")).await);
    let front = Front::before(vec![one.address, two.address]).await;
    assert_ne!(name_at(front.address).await, name_at(front.address).await);
}

#[tokio::test(start_paused = true)]
async fn a_step_takes_its_time_and_so_does_every_token_in_it() {
    let fake = Fake::start(Least::new("one")).await;
    *fake.house.pace.lock() =
        Pace { step: Duration::from_millis(5), per_token: Duration::from_millis(1), ..Pace::default() };
    let began = tokio::time::Instant::now();
    Wire::connect(fake.address).await.ask(post("/events", "", b"{}")).await;
    // A prompt of 2 tokens, and 19 more steps of one token each.
    assert_eq!(began.elapsed().as_millis(), (5 + 2) + 19 * (5 + 1));
    assert_eq!((fake.house.tally().computed, fake.house.tally().generated), (21, 20));
}

#[tokio::test]
async fn sequences_outlive_their_client_for_the_time_that_cancelling_takes() {
    let fake = Fake::start(Least::new("one")).await;
    *fake.house.pace.lock() =
        Pace { step: Duration::from_hours(1), cancel: Duration::from_millis(30), ..Pace::default() };
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post("/events", "", b"{}")).await;
    until(|| fake.house.running() > 0).await;
    let left = std::time::Instant::now();
    drop(wire);
    until(|| fake.house.running() == 0).await;
    assert!(left.elapsed() >= Duration::from_millis(30) && fake.house.tally().cancelled == 1);
}

#[test]
fn a_runtime_ends_while_sequences_are_still_being_cancelled() {
    let house = House::new(Setup::default());
    house.pace.lock().cancel = Duration::from_hours(1);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let slots = runtime.block_on(house.admit(2));
    runtime.block_on(async { drop(slots) });
    assert_eq!(house.running(), 2, "cancelling takes its time");
    drop(runtime);
    assert_eq!(house.running(), 0);
}

#[tokio::test]
async fn a_killed_server_is_gone_until_it_is_revived() {
    let fake = Fake::start(Least::new("one")).await;
    fake.house.faults.at(When::path("/name"), 0, Fault::Kill);
    let mut wire = Wire::connect(fake.address).await;
    wire.send(post("/name", "", b"{}")).await;
    assert!(wire.message().await.is_none());
    while tokio::net::TcpStream::connect(fake.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    fake.revive();
    while tokio::net::TcpStream::connect(fake.address).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!(name_at(fake.address).await, "one");
}

#[test]
fn the_cache_evicts_the_least_recently_used() {
    let mut cache = Cache::new(4, 4);
    let [one, two] = [Context::new(&[1; 9]), Context::new(&[2; 9])];
    cache.store(&one, 9, 0);
    cache.store(&two, 9, 0);
    assert_eq!((cache.cached(&one, 9, 0), cache.cached(&one, 8, 0), cache.cached(&one, 9, 7)), (8, 4, 0));
    cache.cached(&one, 9, 0);
    cache.store(&Context::new(&[3; 9]), 9, 0);
    assert_eq!((cache.cached(&one, 9, 0), cache.cached(&two, 9, 0)), (8, 0));
}
