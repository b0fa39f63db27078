//! The drafts service over its socket, by a strict client.
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::needless_for_each,
    clippy::struct_field_names,
    reason = "tests"
)]

mod client;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use client::{Answer, Client, Row, framed, hello};
use foretell_core::words::PlainReason;
use foretell_drafts::joins::{Joins, Round, Terms};
use foretell_drafts::service::{ListenError, Service, Unknown};
use foretell_net::http::memory::Memory;
use parking_lot::Mutex;

struct Under {
    service: Arc<Service>,
    joins: Arc<Joins>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn started(unknown: Unknown, memory: u64) -> Under {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drafts.sock");
    let joins = Arc::new(Joins::default());
    let service =
        Service::listen(&path, 0o660, move || unknown, Arc::clone(&joins), Memory::new(memory)).unwrap();
    Under { service, joins, path, _folder: folder }
}

fn usual() -> Under {
    started(Unknown::Lookups, 1 << 30)
}

/// A text that repeats itself.
fn text(tokens: usize) -> Vec<u32> {
    (0..tokens).map(|n| (n % 50) as u32 + 7).collect()
}

/// A row of a step that has emitted one token and nothing new to send.
fn idle(row: u32, room: u16, length: u32) -> Row<'static> {
    Row { row, scheduled: 0, sampled: 1, room, length, tokens: &[] }
}

/// Sends steps until the row is drafted for; the last answer.
fn drafted(client: &mut Client, row: u32, length: u32) -> Vec<(u32, Vec<u32>)> {
    for _ in 0..1_000 {
        let (pause, drafts) = client.step(20_000, false, &[idle(row, 16, length)]);
        assert_eq!(pause, 0);
        if !drafts.is_empty() {
            return drafts;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("never drafted for");
}

#[test]
fn a_row_that_repeats_itself_is_drafted_for() {
    let under = usual();
    let mut client = Client::connect(&under.path, 16, 1_000);
    client.begin(1, 200, 0.0, "chatcmpl-x-0badcafe");
    client.text(1, 0, &text(200));
    let [(1, tokens)] = &drafted(&mut client, 1, 200)[..] else { panic!() };
    // How many of the 16 pay is decided by the cost of a step.
    assert!(tokens.len() >= 4 && text(216)[200..].starts_with(tokens), "{tokens:?}");
}

#[test]
fn drafts_follow_what_is_emitted_and_end_with_the_row() {
    let under = usual();
    let mut client = Client::connect(&under.path, 8, 1_000);
    client.begin(1, 100, 0.0, "a-b-c");
    client.text(1, 0, &text(100));
    let first = drafted(&mut client, 1, 100);
    assert_eq!(first[0].1, text(108)[100..]);
    let emitted = &text(109)[100..];
    let row = Row { row: 1, scheduled: 8, sampled: 9, room: 8, length: 109, tokens: emitted };
    let (_, drafts) = client.step(25_000, false, &[row]);
    assert_eq!(drafts, [(1, text(117)[109..].to_vec())]);
    client.gone(&[1]);
    let (_, drafts) = client.step(
        20_000,
        false,
        &[Row { row: 1, scheduled: 0, sampled: 1, room: 8, length: 110, tokens: &[7] }],
    );
    assert!(drafts.is_empty());
    let engine = under.service.engines().pop().unwrap();
    assert_eq!((engine.totals.drafted.sum(), engine.totals.accepted.sum()), (8, 8));
}

#[test]
fn a_draft_is_cut_at_the_room_and_at_the_vocabulary() {
    let under = usual();
    let mut client = Client::connect(&under.path, 16, 20);
    client.begin(1, 203, 0.0, "a-b-c");
    client.text(1, 0, &text(203));
    // The text goes on with 10, 11, ... 19, 20: the vocabulary ends at 19.
    assert_eq!(drafted(&mut client, 1, 203)[0].1, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
    let (_, drafts) = client.step(20_000, false, &[idle(1, 2, 203)]);
    assert_eq!(drafts[0].1, [10, 11]);
    let (_, drafts) = client.step(20_000, false, &[idle(1, 0, 203)]);
    assert!(drafts.is_empty());
}

#[test]
fn rows_are_joined_to_requests_and_their_rounds_and_texts_are_noted() {
    let under = usual();
    let texts = Arc::new(Mutex::new(Vec::new()));
    let learnt = Arc::clone(&texts);
    let terms = Terms {
        replica: "vllm/1".to_owned(),
        learn: Box::new(move |prompt, output| learnt.lock().push((prompt.to_vec(), output.to_vec()))),
        ..Terms::unknown()
    };
    let request = under.joins.register("ft-1", terms);
    let mut client = Client::connect(&under.path, 4, 1_000);
    assert_eq!(under.service.engines()[0].replica, None);
    client.begin(1, 60, 0.7, "chatcmpl-ft-1-0badcafe");
    client.text(1, 0, &text(60));
    drafted(&mut client, 1, 60);
    let emitted = &text(62)[60..];
    client.step(
        20_000,
        false,
        &[Row { row: 1, scheduled: 4, sampled: 2, room: 4, length: 62, tokens: emitted }],
    );
    client.gone(&[1]);
    client.step(0, false, &[]);
    let [Round { drafted: 4, accepted: 1, .. }] = request.joined.take_rounds()[..] else { panic!() };
    assert_eq!(*texts.lock(), [(text(60), emitted.to_vec())]);
    assert!(under.joins.is_injected("vllm/1"));
    assert_eq!(under.service.engines()[0].replica.as_deref(), Some("vllm/1"));
    drop(client);
    while !under.service.engines().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!under.joins.is_injected("vllm/1"));
}

#[test]
fn rows_that_may_not_be_drafted_for_pause_the_plug_in() {
    let under = started(Unknown::None, 1 << 30);
    let plain = Terms { plain: Some(PlainReason::ControlGroup.into()), ..Terms::unknown() };
    let _request = under.joins.register("ft-1", plain);
    let mut client = Client::connect(&under.path, 4, 1_000);
    client.begin(1, 60, 0.0, "chatcmpl-ft-1-0badcafe");
    client.begin(2, 60, 0.0, "chatcmpl-other-0badcafe");
    client.text(1, 0, &text(60));
    client.text(2, 0, &text(60));
    let (pause, drafts) = client.step(20_000, false, &[idle(1, 4, 60), idle(2, 4, 60)]);
    assert_eq!((pause > 0, drafts.len()), (true, 0));
}

#[test]
fn a_closed_gate_stops_the_drafts_of_its_requests() {
    let under = usual();
    let closed = Arc::new(Mutex::new(None));
    let gate = Arc::clone(&closed);
    let terms = Terms { closed: Box::new(move || *gate.lock()), ..Terms::unknown() };
    let _request = under.joins.register("ft-1", terms);
    let mut client = Client::connect(&under.path, 4, 1_000);
    client.begin(1, 60, 0.0, "chatcmpl-ft-1-0badcafe");
    client.text(1, 0, &text(60));
    drafted(&mut client, 1, 60);
    *closed.lock() = Some(PlainReason::GateLoad);
    assert!(client.step(20_000, false, &[idle(1, 4, 60)]).1.is_empty());
    *closed.lock() = None;
    assert_eq!(client.step(20_000, false, &[idle(1, 4, 60)]).1.len(), 1);
}

#[test]
fn another_version_is_refused_with_the_reason() {
    let under = usual();
    let mut client = Client::connect(&under.path, 4, 1_000);
    let mut other = Client::silent(&under.path);
    other.send(&hello(2, 4, 1_000));
    let Answer::Refused(why) = other.answer() else { panic!() };
    assert!(why.contains("install the plug-in that comes with this Foretell"), "{why}");
    assert_eq!(other.stream.read(&mut [0; 8]).unwrap(), 0, "it is closed");
    client.step(0, false, &[]);
}

#[test]
fn what_is_no_frame_closes_its_connection_and_no_other() {
    let under = usual();
    let mut good = Client::connect(&under.path, 4, 1_000);
    let endless = [&u32::MAX.to_le_bytes()[..], &[4; 100]].concat();
    let bad: [Vec<u8>; 6] = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0, 0, 0, 0],
        framed(99, &[]),
        framed(4, &[1, 2, 3]),
        hello(1, 4, 10),
        endless,
    ];
    for bytes in bad {
        let mut client = Client::connect(&under.path, 4, 1_000);
        client.send(&bytes);
        assert_eq!(client.stream.read(&mut [0; 8]).unwrap_or(0), 0, "{bytes:?}");
    }
    let mut before_hello = Client::silent(&under.path);
    before_hello.send(&framed(5, &[0, 0]));
    assert_eq!(before_hello.stream.read(&mut [0; 8]).unwrap_or(0), 0);
    good.step(0, false, &[]);
}

#[test]
fn text_that_does_not_continue_ends_the_row_and_nothing_else() {
    let under = usual();
    let mut client = Client::connect(&under.path, 4, 1_000);
    for row in [1, 2, 3] {
        client.begin(row, 60, 0.0, "a-b-c");
    }
    client.text(1, 10, &text(60));
    client.text(3, 0, &text(60));
    client.text(2, 0, &text(60));
    // Row 3 claims another length than its text has.
    client.step(
        20_000,
        false,
        &[Row { row: 3, scheduled: 0, sampled: 1, room: 4, length: 99, tokens: &[1] }],
    );
    drafted(&mut client, 2, 60);
    assert_eq!(client.step(20_000, false, &[1, 2, 3].map(|row| idle(row, 4, 60))).1.len(), 1);
}

#[test]
fn a_thousand_rows_and_a_row_of_a_million_tokens() {
    let under = usual();
    let mut client = Client::connect(&under.path, 4, 1_000);
    for row in 1..=1_000 {
        client.begin(row, 40, 0.0, "a-b-c");
        client.text(row, 0, &text(40));
    }
    client.begin(2_000, 1_000_000, 0.0, "a-b-c");
    client.text(2_000, 0, &text(1_000_000));
    let rows: Vec<Row<'_>> = (1..=1_000).map(|row| idle(row, 4, 40)).collect();
    client.step(20_000, false, &rows);
    client.gone(&(1..=1_000).collect::<Vec<u32>>());
    let [(2_000, tokens)] = &drafted(&mut client, 2_000, 1_000_000)[..] else { panic!() };
    assert_eq!(**tokens, text(1_000_004)[1_000_000..]);
}

#[test]
fn a_row_without_memory_gets_no_drafts() {
    let under = started(Unknown::Lookups, 64 << 10);
    let mut client = Client::connect(&under.path, 4, 1_000);
    client.begin(1, 50_000, 0.0, "a-b-c");
    client.text(1, 0, &text(50_000));
    let (pause, drafts) = client.step(20_000, false, &[idle(1, 4, 50_000)]);
    assert_eq!((pause > 0, drafts.len()), (true, 0));
}

#[test]
fn the_socket_has_its_permissions_and_replaces_one_that_was_left_behind() {
    let under = usual();
    let mode = std::fs::metadata(&under.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let again = Service::listen(&under.path, 0o660, || Unknown::None, Arc::default(), Memory::new(1 << 20));
    assert!(matches!(again, Err(ListenError::InUse(_))));
    let left = under.path.with_file_name("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    let service =
        Service::listen(&left, 0o600, || Unknown::None, Arc::default(), Memory::new(1 << 20)).unwrap();
    Client::connect(&left, 4, 1_000);
    service.stop();
    assert!(!left.exists());
}
