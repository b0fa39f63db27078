//! Any fault of a drafter or a verify request, in any state of the session: 200 and the plain text.

use crate::client::{CONTROL_GROUP, FORCED};
use std::time::{Duration, Instant};

use foretell_core::session::Decode;
use foretell_onnx::noise;
use foretell_wire::openai::Route;
use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use rstest::rstest;
use serde_json::{Value, json};

use super::house::{Answer, Ask, House, Setup};
use super::middlebox::{Fate, Fault, Kind};
use crate::wire::PATIENCE;

const TOKENS: usize = 24;
const PROMPT: &str = "for piece in text.split(',') { taken.push_str(piece) } — take the fox, take the dog: ";
/// Cases in flight at once.
const WIDE: usize = 16;

const WRONG_RESULTS: [Fault; 15] = [
    Fault::Status(500),
    Fault::Status(400),
    Fault::Status(404),
    Fault::Later(429, 7),
    Fault::Later(503, 7),
    Fault::Status(503),
    Fault::Garbage,
    Fault::Empty,
    Fault::RowLess,
    Fault::RowMore,
    Fault::Alien,
    Fault::Half,
    Fault::Reset,
    Fault::Hang,
    Fault::Stall,
];

/// A request, and the length of its output when the fault occurs.
#[derive(Clone, Debug)]
struct State {
    name: &'static str,
    fields: Value,
    /// Index of the verify request that is sent in this state.
    verify: usize,
    /// Output tokens at that time.
    tokens: usize,
}

fn fields(seed: u64) -> Value {
    json!({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.25, "seed": seed, "return_token_ids": true})
}

/// The plain answer, and the number of output tokens before each verify request of an undisturbed
/// run.
async fn undisturbed(house: &House, ask: &Ask) -> (Answer, Vec<usize>) {
    let plain = house.direct(ask).await;
    let id = format!("clean.{}.{}", ask.route.name(), ask.fields);
    let id: String = id.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '.').take(120).collect();
    let through = house.through(ask, &id).await;
    assert_eq!(through.plain, plain.plain, "{ask:?}");
    let calls = house.middlebox.seen(&id);
    let verified = calls.iter().filter(|seen| seen.kind == Kind::Verify);
    let done = verified.map(|seen| seen.context - plain.prompt_ids.len()).collect();
    (plain, done)
}

/// The text after each number of tokens, and true if half a character is withheld there.
fn growth(house: &House, ids: &[u32]) -> Vec<(String, bool)> {
    let whole = |ids: &[u32]| {
        let mut decoder = house.tokenizer.detokenizer(&[], true);
        let text: String = ids.iter().map(|&id| decoder.push(id)).collect();
        (text, !decoder.flush().is_empty())
    };
    (0..=ids.len()).map(|end| whole(&ids[..end])).collect()
}

/// A request for each state that a session can be in.
async fn states(house: &House, route: Route) -> Vec<State> {
    let mut found: Vec<State> = Vec::new();
    for seed in 0..200 {
        let ask = Ask::new(route, false, fields(seed));
        let (plain, done) = undisturbed(house, &ask).await;
        // Long enough, and with accepted drafts.
        if plain.ids.len() < TOKENS || done.len() < 5 || done.len() > TOKENS - 3 {
            continue;
        }
        let mut add = |name, fields: &Value, tokens: usize, done: &[usize]| {
            let known = found.iter().any(|state| state.name == name);
            if let Some(verify) = done.iter().position(|&at| at == tokens).filter(|_| !known) {
                found.push(State { name, fields: fields.clone(), verify, tokens });
            }
        };
        add("first", &ask.fields, done[0], &done);
        add("middle", &ask.fields, done[done.len() / 2], &done);
        add("last", &ask.fields, done[done.len() - 1], &done);
        let growth = growth(house, &plain.ids);
        if let Some(half) = (2..TOKENS - 1).find(|at| growth[*at].1 && done.contains(at)) {
            add("half a character", &ask.fields, half, &done);
        }
        for at in 8..TOKENS - 4 {
            let Some(end) = growth[at].0.chars().next_back().filter(|_| !growth[at].1) else { continue };
            let Some(next) = growth[at + 1].0[growth[at].0.len()..].chars().next() else { continue };
            let mut fields = ask.fields.clone();
            fields["stop"] = json!([format!("{end}{next}")]);
            let stopped = Ask { fields, ..ask.clone() };
            if house.direct(&stopped).await.ids.len() == at + 1 {
                let (_, done) = undisturbed(house, &stopped).await;
                add("a stop text", &stopped.fields, at, &done);
                break;
            }
        }
        if found.len() == 5 {
            return found;
        }
    }
    panic!("only {:?}", found.iter().map(|state| state.name).collect::<Vec<_>>());
}

/// One request with its faults and its expected answer.
struct Case {
    id: String,
    ask: Ask,
    header: &'static str,
    plain: Answer,
    fate: Fate,
    /// Number of faults that must have occurred; `None` for at least one.
    strikes: Option<usize>,
}

/// Sends every case; each must end in the plain text. Returns `path/reason` of each.
async fn all_as_plain(house: &House, cases: Vec<Case>) -> Vec<(String, String)> {
    let wrong = &Mutex::new(Vec::new());
    let mut outcomes = stream::iter(cases.into_iter().map(|case| async move {
        house.middlebox.fate(&case.id, case.fate.clone());
        let fields = format!("te: trailers\r\nx-request-id: {}\r\n{}", case.id, case.header);
        let answer = case.ask.send(house.front(), &fields).await;
        let calls = house.middlebox.seen(&case.id);
        let struck = house.middlebox.struck(&case.id);
        let fated = case.strikes.map_or(struck > 0, |strikes| strikes == struck);
        if !fated || (&answer.plain, &answer.ids) != (&case.plain.plain, &case.plain.ids) {
            let (got, wanted) = (&answer.plain, &case.plain.plain);
            let (ids, wanted_ids) = (&answer.ids, &case.plain.ids);
            let calls: Vec<String> =
                calls.iter().map(|seen| format!("{:?} {}", seen.kind, seen.context)).collect();
            let calls = calls.join(", ");
            let id = &case.id;
            wrong.lock().push(format!(
                "{id}: struck {struck} of {:?}, {calls}, {}\n  {got:?} {ids:?}\n  {wanted:?} {wanted_ids:?}",
                case.strikes,
                answer.foretell()["reason"],
            ));
        }
        let foretell = answer.foretell();
        let reason = foretell["reason"].as_str().unwrap_or("none");
        (case.id, format!("{}/{reason}", foretell["path"].as_str().unwrap_or("none")))
    }))
    .buffer_unordered(WIDE);
    let mut all = Vec::new();
    while let Some(one) = outcomes.next().await {
        all.push(one);
    }
    let wrong = std::mem::take(&mut *wrong.lock());
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        all.len(),
        wrong[..wrong.len().min(4)].join("\n")
    );
    House::assert_calm();
    all
}

/// The metrics count every reason for plain decoding as often as clients received it.
async fn counted(house: &House, outcomes: &[(String, String)], reason: &str) {
    let reported = outcomes.iter().filter(|(_, how)| how.ends_with(&format!("/{reason}"))).count() as f64;
    let line = format!("foretell_requests_total{{reason=\"{reason}\"}}");
    // The record is written after the last byte is sent.
    let begun = Instant::now();
    loop {
        let seen = house.metric(&line).await;
        if (seen - reported).abs() < 0.5 {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{reason}: {reported} reported, {seen} counted");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[rstest]
#[case::tree("[tree]")]
#[case::fan_out("[fan_out]")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_verification_result_in_every_state_ends_in_the_plain_text(#[case] methods: &str) {
    let house = House::build(Setup { methods, ..Setup::default() }).await;
    let mut cases = Vec::new();
    for route in [Route::Completions, Route::Chat] {
        for state in states(&house, route).await {
            for stream in [false, true] {
                let ask = Ask::new(route, stream, state.fields.clone());
                let plain = house.direct(&ask).await;
                for fault in WRONG_RESULTS {
                    let id = format!("{}.{stream}.{}.{fault:?}", route.name(), state.name).replace(' ', "_");
                    let fate = Fate::at(Kind::Verify, state.verify, fault);
                    let (ask, plain) = (ask.clone(), plain.clone());
                    cases.push(Case { id, ask, header: "x-team: held\r\n", plain, fate, strikes: Some(1) });
                }
            }
        }
    }
    assert_eq!(cases.len(), 2 * 5 * 2 * WRONG_RESULTS.len());
    let before = house.metric("foretell_requests_total{reason=\"verify_fault\"}").await;
    assert!(before.abs() < 0.5, "nothing went wrong yet");
    let outcomes = all_as_plain(&house, cases).await;
    for (id, how) in &outcomes {
        let path = if id.contains(".first.") { "plain" } else { "speculated" };
        let reason = if id.contains("Later") || id.contains("(503") { "retry_after" } else { "verify_fault" };
        assert_eq!(*how, format!("{path}/{reason}"), "{id}");
    }
    counted(&house, &outcomes, "verify_fault").await;
    counted(&house, &outcomes, "retry_after").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_plain_call_that_is_refused_or_breaks_off_once_is_continued() {
    let troubles = [
        Fault::Status(500),
        Fault::Status(404),
        Fault::Later(503, 1),
        Fault::Garbage,
        Fault::Empty,
        Fault::Half,
        Fault::Reset,
        Fault::CutAfter(0),
        Fault::CutAfter(2),
        Fault::GarbageAfter(0),
        Fault::GarbageAfter(2),
        Fault::ErrorAfter(1),
    ];
    let house = House::build(Setup::default()).await;
    let mut cases = Vec::new();
    for route in [Route::Completions, Route::Chat] {
        for state in states(&house, route).await.into_iter().filter(|state| state.name != "last") {
            for stream in [false, true] {
                let ask = Ask::new(route, stream, state.fields.clone());
                let plain = house.direct(&ask).await;
                for fault in troubles {
                    // A stop text may come so early that the plain call ends before its fault.
                    let late =
                        matches!(fault, Fault::CutAfter(2) | Fault::GarbageAfter(2) | Fault::ErrorAfter(1));
                    if late && plain.ids.len() < state.tokens + 4 {
                        continue;
                    }
                    let id = format!("{}.{stream}.{}.{fault:?}", route.name(), state.name).replace(' ', "_");
                    let fate =
                        Fate::at(Kind::Verify, state.verify, Fault::Status(500)).and(Kind::Plain, 0, fault);
                    let (ask, plain) = (ask.clone(), plain.clone());
                    cases.push(Case { id, ask, header: "", plain, fate, strikes: Some(2) });
                }
            }
        }
    }
    all_as_plain(&house, cases).await;
}

/// Faults at random calls, often several in a request; no plain call is refused twice in a row.
fn misfortune(seed: u64) -> Fate {
    const OF_RESULTS: [Fault; 12] = [
        Fault::Status(500),
        Fault::Status(404),
        Fault::Later(429, 0),
        Fault::Garbage,
        Fault::Empty,
        Fault::RowLess,
        Fault::RowMore,
        Fault::Alien,
        Fault::Half,
        Fault::Reset,
        Fault::Cuts(0),
        Fault::Cuts(1),
    ];
    let draw =
        |kind: Kind, index: usize, of: usize| noise::hash(seed, kind as u32, index as u64, 0) as usize % of;
    let mut fate = Fate::default();
    for index in (0..120).filter(|&index| draw(Kind::Verify, index, 4) == 0) {
        fate = fate.and(Kind::Verify, index, OF_RESULTS[draw(Kind::Verify, index + 500, OF_RESULTS.len())]);
    }
    for index in (0..60).step_by(2).filter(|&index| draw(Kind::Plain, index, 2) == 0) {
        let after = draw(Kind::Plain, index + 500, 12);
        let faults = [
            Fault::CutAfter(after),
            Fault::GarbageAfter(after),
            Fault::ErrorAfter(after),
            Fault::Status(500),
        ];
        fate = fate.and(Kind::Plain, index, faults[draw(Kind::Plain, index + 900, faults.len())]);
    }
    fate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_faults_in_one_request_end_in_the_plain_text() {
    let house = House::build(Setup::default()).await;
    let mut cases = Vec::new();
    for seed in 0..60 {
        let mut fields = fields(seed);
        fields["max_tokens"] = json!(180);
        fields["ignore_eos"] = json!(true);
        let ask = Ask::all(&fields)[seed as usize % 4].clone();
        let plain = house.direct(&ask).await;
        let fate = misfortune(seed).and(Kind::Verify, 0, Fault::Half);
        cases.push(Case { id: format!("unlucky.{seed}"), ask, header: "", plain, fate, strikes: None });
    }
    let outcomes = all_as_plain(&house, cases).await;
    let struck: usize = outcomes.iter().map(|(id, _)| house.middlebox.struck(id)).sum();
    assert!(struck > 3 * outcomes.len(), "{struck} faults in {} requests", outcomes.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_call_that_breaks_off_is_continued_by_ids() {
    let held = CONTROL_GROUP.replace("name: held\n", "name: held\nmatch: { headers: { x-team: [held] } }\n");
    let house = House::build(Setup { policies: &[&held, FORCED], ..Setup::default() }).await;
    let (mut cases, mut unreadable) = (Vec::new(), Vec::new());
    for route in [Route::Completions, Route::Chat] {
        for state in states(&house, route).await {
            for stream in [false, true] {
                let ask = Ask::new(route, stream, state.fields.clone());
                let plain = house.direct(&ask).await;
                for fault in [Fault::CutAfter, Fault::GarbageAfter, Fault::ErrorAfter] {
                    let fault = fault(state.tokens);
                    let id = format!("{}.{stream}.{}.{fault:?}", route.name(), state.name).replace(' ', "_");
                    let fate = Fate::at(Kind::First, 0, fault);
                    let (ask, plain) = (ask.clone(), plain.clone());
                    let case = Case { id, ask, header: "x-team: held\r\n", plain, fate, strikes: Some(1) };
                    let cut = matches!(fault, Fault::CutAfter(_));
                    if cut { &mut cases } else { &mut unreadable }.push(case);
                }
            }
        }
    }
    let mut ways = all_as_plain(&house, cases).await;
    for case in unreadable {
        // What happens once is not taken for what happens at every request.
        for replica in house.proxy.gateway.shared.fleet.replicas() {
            replica.first_calls().forget();
        }
        ways.extend(all_as_plain(&house, vec![case]).await);
    }
    for (id, how) in ways {
        assert!(how.starts_with("plain/"), "{id}: {how}");
    }
}

#[cfg(feature = "onnx")]
mod drafter {
    use foretell_onnx::drafter::DrafterService;
    use foretell_proxy::serving::drafters::{Drafters, LoadedDrafter};

    use std::sync::Arc;

    use super::super::model::{Babble, Handle, Trouble, other_words};
    use super::*;

    /// Runs of the drafter before the fault begins: with the prompt, within a draft, between
    /// drafts, late.
    const AFTER: [usize; 7] = [0, 1, 3, 6, 11, 17, 26];

    /// A separate drafter for each request, so that each one can fail.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_drafter_that_fails_crashes_or_hangs_at_any_run_ends_in_the_plain_text() {
        let mut fields = fields(3);
        fields["ignore_eos"] = json!(true);
        fields["max_tokens"] = json!(40);
        let ways = Ask::all(&fields);
        let mut troubles: Vec<(String, Option<(usize, Trouble)>)> = Vec::new();
        for way in 0..ways.len() {
            for trouble in [Trouble::Fail, Trouble::Crash, Trouble::Hang] {
                let named = |after| (format!("d-{way}-{trouble:?}-{after}"), Some((after, trouble)));
                troubles.extend(AFTER.map(named));
            }
            troubles.push((format!("d-{way}-sound"), None));
            troubles.push((format!("d-{way}-foreign"), None));
        }
        let policies: Vec<String> = troubles
            .iter()
            .map(|(name, _)| {
                format!(
                    "version: 1\nname: {name}\nmatch: {{ headers: {{ x-drafter: [{name}] }} }}\n\
                     drafters: [{{ kind: model, model: {name}, vocabulary: same }}]\ngamma: {{ fixed: 4 }}\n"
                )
            })
            .collect();
        let policies: Vec<&str> = policies.iter().map(String::as_str).collect();
        let names = troubles.iter().map(|(name, _)| format!("  {name}: {{ path: nowhere }}\n"));
        let more = format!("drafters:\n{}", names.collect::<String>());
        let foreign = other_words();
        let mut handles: Vec<Handle> = Vec::new();
        let house = House::build(Setup {
            policies: &policies,
            more,
            drafters: Box::new(|tokenizer| {
                let mut drafters = Drafters::default();
                for (name, trouble) in &troubles {
                    let model = Babble::new(tokenizer, 512, 4).with_seed(1);
                    if let Some((after, trouble)) = trouble {
                        model.handle.trouble(*after, *trouble);
                    }
                    handles.push(model.handle.clone());
                    let vocabulary = if name.ends_with("foreign") { &foreign } else { tokenizer };
                    let service = DrafterService::start_with(Box::new(model));
                    drafters =
                        drafters.with(name.as_str(), LoadedDrafter::new(service, Arc::clone(vocabulary)));
                }
                drafters
            }),
            ..Setup::default()
        })
        .await;
        let mut plains = Vec::new();
        for ask in &ways {
            plains.push(house.direct(ask).await);
        }
        let house = &house;
        let (ways, plains) = (&ways, &plains);
        let answers: Vec<(String, Answer)> = stream::iter(troubles.iter().map(|(name, _)| async move {
            let way: usize = name.split('-').nth(1).unwrap().parse().unwrap();
            let fields = format!("x-drafter: {name}\r\nx-request-id: {name}\r\n");
            let answer = ways[way].send(house.front(), &fields).await;
            assert_eq!(answer.plain, plains[way].plain, "{name}");
            assert_eq!(answer.ids, plains[way].ids, "{name}");
            (name.clone(), answer)
        }))
        .buffered(WIDE)
        .collect()
        .await;
        House::assert_calm();
        for ((name, answer), handle) in answers.iter().zip(&handles) {
            let foretell = answer.foretell();
            assert_eq!(foretell["path"], "speculated", "{name} {foretell}");
            let after =
                troubles.iter().find(|(of, _)| of == name).and_then(|(_, trouble)| trouble.map(|t| t.0));
            match after {
                Some(after) => {
                    assert!(handle.runs() > after, "{name}: the fault has begun");
                    let reason = foretell["reason"].as_str();
                    assert!(matches!(reason, None | Some("draft_fault")), "{name}: {foretell}");
                }
                None if name.ends_with("foreign") => {
                    assert_eq!((handle.runs(), &foretell["drafted"]), (0, &json!(0)), "{name}: never asked");
                }
                None => assert!(foretell["accepted"].as_u64().unwrap() > 0, "{name}: {foretell}"),
            }
            handle.release();
        }
    }
}
