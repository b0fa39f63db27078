//! Requests under a grammar that are relayed as before, and servers that fail at the calls for a
//! token that the grammar allows.

use rstest::rstest;

use super::same::structures;
use super::*;
use crate::fakes::{Fault, When};

#[rstest]
#[case::truncated(json!({"temperature": 0.8, "top_p": 0.9}))]
#[case::few(json!({"temperature": 0.8, "top_k": 5}))]
#[case::seeded(json!({"temperature": 0.8, "seed": 7}))]
#[case::past_the_end(json!({"ignore_eos": true}))]
#[case::least(json!({"min_tokens": 4}))]
#[case::stop_token(json!({"stop_token_ids": [300]}))]
#[case::bias(json!({"logit_bias": {"300": 5}}))]
#[case::penalty(json!({"frequency_penalty": 0.5}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampling_that_is_not_followed_is_relayed(#[case] more: Value) {
    let scene = Scene::of(options("0.33.0")).await;
    let seeded = more["temperature"].is_null() || more["seed"].is_u64();
    for (route, stream) in ways() {
        let ask = asked(route, stream, &structures()[0], &more);
        let told = if seeded { scene.alike(&ask).await } else { told(&scene.through(&ask).await) };
        assert_eq!(told, relayed("structured"), "{ask:?}");
    }
    scene.leave().await;
}

#[rstest]
#[case::rules(json!({"structured_outputs": {"grammar": "root ::= \"yes\" | \"no\" root"}}))]
#[case::lark(json!({"structured_outputs": {"grammar": "start: \"yes\" | \"no\" start"}}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_of_the_clients_own_are_relayed(#[case] structure: Value) {
    let scene = Scene::of(options("0.33.0")).await;
    for (route, stream) in ways() {
        let ask = asked(route, stream, &structure, &json!({}));
        assert_eq!(scene.alike(&ask).await, relayed("structured"), "{ask:?}");
    }
    scene.leave().await;
}

/// Where the tools themselves could be speculated on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_format_besides_tools_is_relayed() {
    let mut options = options("0.33.0");
    options.setup.hermes = Some(crate::fakes::house::Hermes::AsRead);
    let scene =
        Scene::with(options, &[&format!("{FORCED}{EVERY}")], ", parsers: { tools: hermes }", "").await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let ask = asked(Route::Chat, true, &structures()[0], &json!({"tools": tools}));
    assert_eq!(scene.alike(&ask).await, relayed("structured"));
    scene.leave().await;
}

#[rstest]
#[case::older("0.24.0", true)]
#[case::without_scores("0.33.0", false)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_other_servers_they_are_relayed(#[case] version: &'static str, #[case] scale_out: bool) {
    let scene = Scene::of(Options { scale_out, ..options(version) }).await;
    let zero = json!({"presence_penalty": 0, "frequency_penalty": 0});
    for structure in [0, 9, 13].map(|at| structures()[at].clone()) {
        let ask = asked(Route::Chat, true, &structure, &zero);
        assert_eq!(scene.alike(&ask).await, relayed("structured"), "{ask:?}");
    }
    scene.leave().await;
}

/// How an answer ends after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// As without it.
    Whole,
    /// With an error, behind a part of the right text; or as without it.
    Either,
    /// With an error.
    Error,
}

/// The call for a token of a list.
fn listed() -> When {
    When::path(COMPLETIONS).holding("allowed_token_ids")
}

#[rstest]
#[case::status(Fault::Status(500), Outcome::Whole)]
#[case::refused(Fault::Status(400), Outcome::Whole)]
#[case::busy(Fault::Status(429), Outcome::Whole)]
#[case::busy_for_a_second(Fault::Later(429, 1), Outcome::Whole)]
#[case::away_for_a_second(Fault::Later(503, 1), Outcome::Whole)]
#[case::away_for_long(Fault::Later(503, 300), Outcome::Error)]
#[case::garbage(Fault::Garbage, Outcome::Whole)]
#[case::empty(Fault::Empty, Outcome::Whole)]
#[case::half(Fault::Half, Outcome::Whole)]
#[case::reset(Fault::Reset, Outcome::Whole)]
#[case::silence(Fault::Hang, Outcome::Either)]
#[case::stall(Fault::Stall, Outcome::Either)]
#[case::killed(Fault::Kill, Outcome::Error)]
#[case::shifted(Fault::ShiftedIds, Outcome::Either)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_at_the_call_for_an_allowed_token_gives_no_wrong_text(
    #[case] fault: Fault,
    #[case] outcome: Outcome,
    #[values((false, 0), (true, 0), (true, 2))] (stream, nth): (bool, usize),
) {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, stream, &structures()[0], &json!({}));
    scene.proves(&ask).await;
    let want = scene.direct(&ask).await;
    scene.one_token_calls();
    scene.through(&ask).await;
    let calls = scene.one_token_calls().iter().filter(|call| call["allowed_token_ids"].is_array()).count();
    assert!(calls > 2, "{calls}");
    scene.engine.house.faults.at(listed(), nth, fault.clone());
    judge(&scene, &ask, &want, outcome).await;
    assert_eq!(scene.engine.house.faults.struck(), 1, "{fault:?}");
}

/// A later request is not under the grammar, and the grammar has not proved itself.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_breaks_off_before_its_grammar_is_proved_is_not_continued(
    #[values(false, true)] stream: bool,
    #[values(Fault::CutAfter(6), Fault::ResetAfter(6), Fault::HangAfter(6))] fault: Fault,
) {
    let scene = Scene::of(options("0.32.0")).await;
    let ask = asked(Route::Chat, stream, &structures()[0], &json!({}));
    let want = scene.direct(&ask).await;
    scene.engine.house.faults.at(When::path("/v1/chat/completions"), 0, fault);
    judge(&scene, &ask, &want, Outcome::Error).await;
}

/// The answer after a fault has the text of the server, or a part of it and an error.
async fn judge(scene: &Scene, ask: &Ask, want: &Answer, outcome: Outcome) {
    let got = scene.through(ask).await;
    let text = got.message.text();
    let failed = text.contains("\"error\":{");
    if failed {
        assert!(want.plain.text.starts_with(&got.plain.text), "{:?} {:?}", got.plain, want.plain);
        assert_eq!(got.plain.status == 200, ask.stream, "{text}");
    } else {
        assert_eq!((&got.plain, &got.ids), (&want.plain, &want.ids), "{:?}", told(&got));
    }
    assert!(outcome == Outcome::Either || failed == (outcome == Outcome::Error), "{outcome:?}: {text}");
}

/// Every call for an allowed token fails: the answer goes on nowhere.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_for_an_allowed_token_that_always_fail_end_in_an_error(
    #[values(Fault::Status(500), Fault::Status(404), Fault::Garbage, Fault::Later(429, 60))] fault: Fault,
    #[values(false, true)] stream: bool,
) {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Completions, stream, &structures()[0], &json!({}));
    scene.proves(&ask).await;
    let want = scene.direct(&ask).await;
    scene.engine.house.faults.always(listed(), fault);
    judge(&scene, &ask, &want, Outcome::Error).await;
}

/// Questions to a server that fail prove nothing, and disturb nothing.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proof_whose_calls_fail_is_tried_again(
    #[values(Fault::Status(500), Fault::Garbage, Fault::Reset, Fault::Later(429, 60))] fault: Fault,
) {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, true, &structures()[0], &json!({}));
    let faults = &scene.engine.house.faults;
    for path in [COMPLETIONS, SCORE] {
        faults.always(When::path(path).streamed(false), fault.clone());
    }
    for _ in 0..3 {
        let want = ask.send(scene.engine.address, "").await;
        let got = scene.through(&ask).await;
        assert_eq!((got.plain.clone(), told(&got)), (want.plain, plain("grammar")));
        scene.is_quiet().await;
    }
    scene.engine.house.faults.clear();
    scene.proves(&ask).await;
    scene.leave().await;
}

/// Every proof costs the server a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grammar_that_is_never_proved_is_given_up() {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, true, &structures()[0], &json!({}));
    let faults = &scene.engine.house.faults;
    faults.always(When::path(SCORE), Fault::Status(500));
    for _ in 0..5 {
        scene.alike(&ask).await;
        scene.is_quiet().await;
    }
    scene.engine.house.faults.clear();
    scene.stays_plain(&ask).await;
    scene.leave().await;
}

/// A page of something else in place of the answer to a question about the library.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_answer_is_no_sign_of_another_library() {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, true, &schema(&json!({"type": "object"})), &json!({}));
    let faults = &scene.engine.house.faults;
    faults.at(listed(), 0, Fault::Garbage);
    assert_eq!(scene.alike(&ask).await, plain("grammar"));
    scene.is_quiet().await;
    assert_eq!(faults.struck(), 1);
    scene.proves(&ask).await;
    scene.leave().await;
}
