//! The session step by step: what it asks for after each event, and how every fault ends.

use std::sync::Arc;
use std::time::Duration;

use foretell::control::costs::NODES_MAX;
use foretell::control::{Control, Heat, Way};
use foretell::draft::{Company, Features, LookupSpec, Ngram, Shared, Source, Spelling, Tree, Vote};
use foretell::session::{
    Action, ActionId, Decode, Ending, Event, Fault, Finish, Hold, Limit, Permission, RidePlan, Rules,
    Session, Start, Summary, Tail,
};
use foretell::units::{Tick, TokenId};
use foretell::words::{Plan, Put, RideReason, Row, Verdict};
use rstest::rstest;

/// Token n is the n-th letter.
struct Letters;

impl Decode for Letters {
    fn push(&mut self, token: TokenId) -> String {
        char::from(b'a' + token as u8).to_string()
    }

    fn flush(&mut self) -> String {
        String::new()
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(Self)
    }
}

/// A session, its clock, and what it has asked for.
struct Desk {
    session: Session,
    control: Arc<Control>,
    now: Tick,
    text: String,
    tokens: Vec<TokenId>,
}

impl Desk {
    fn new(rules: Rules, ending: Ending) -> Self {
        Self::marked(rules, ending, &[])
    }

    /// A chat in which these tokens may be parsed by the backend.
    fn marked(rules: Rules, ending: Ending, marks: &[TokenId]) -> Self {
        let control = Arc::new(Control::new());
        let start = Start {
            prompt: None,
            limit: Limit { max_tokens: Some(12), context: None },
            ending,
            temperature: 0.0,
            decode: Box::new(Letters),
            marks: marks.into(),
            rules,
            seed: 3,
            noise: 2,
        };
        let now = Tick(1_000_000);
        let session = Session::new(start, Arc::clone(&control), now);
        Self { session, control, now, text: String::new(), tokens: Vec::new() }
    }

    /// What the session asks for; pieces of output are collected.
    fn asks(&mut self) -> Vec<(ActionId, Action)> {
        let mut asked = Vec::new();
        while let Some((id, action)) = self.session.poll() {
            match action {
                Action::Emit(delta) | Action::Passed(delta) => {
                    self.text.push_str(&delta.text);
                    self.tokens.extend(delta.tokens);
                }
                action => asked.push((id, action)),
            }
        }
        asked
    }

    fn tell(&mut self, id: ActionId, event: Event) -> Vec<(ActionId, Action)> {
        self.now = self.now.after(Duration::from_millis(10));
        self.session.handle(id, event, self.now);
        self.asks()
    }

    fn token(&mut self, id: ActionId, token: TokenId) -> Vec<(ActionId, Action)> {
        let text = Letters.push(token);
        self.tell(id, Event::Token { tokens: vec![token], text, tail: Tail::Open })
    }

    /// The first ride, its prompt "abcabc" told.
    fn ride(&mut self) -> ActionId {
        let asked = self.asks();
        let [(id, Action::Ride(RidePlan::First))] = asked[..] else { panic!("{asked:?}") };
        assert_eq!(self.tell(id, Event::Prompt(vec![0, 1, 2, 0, 1, 2])), []);
        id
    }

    /// Rides one token and leaps; the verify call and its draft.
    fn leap(&mut self) -> (ActionId, Tree) {
        let ride = self.ride();
        let asked = self.token(ride, 0);
        let [(_, Action::Cancel(gone)), (id, Action::Verify(draft, Plan::Tree, _))] = &asked[..] else {
            panic!("{asked:?}")
        };
        assert_eq!(*gone, ride);
        (*id, Tree::clone(draft))
    }
}

fn rules() -> Rules {
    Rules {
        plans: vec![Plan::Tree],
        gamma_fixed: Some(2),
        lookups: vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 })],
        ..Rules::default()
    }
}

fn desk() -> Desk {
    Desk::new(rules(), Ending::default())
}

fn rows(samples: &[TokenId]) -> Event {
    let rows = samples.iter().copied().map(Row::of).collect();
    Event::Verdict(Verdict { rows, ..Verdict::default() })
}

/// The one action asked for is a ride on; its id.
fn rides_on(asked: &[(ActionId, Action)]) -> ActionId {
    let Some((id, Action::Ride(RidePlan::Continue { .. }))) = asked.last() else { panic!("{asked:?}") };
    *id
}

fn summary(asked: &[(ActionId, Action)]) -> Summary {
    let Some((_, Action::Finish(summary))) = asked.last() else { panic!("{asked:?}") };
    summary.clone()
}

#[test]
fn a_round_emits_the_accepted_run_and_one_token_more() {
    let mut desk = desk();
    let (verify, draft) = desk.leap();
    assert_eq!(draft.path(1), [1, 2]);
    let asked = desk.tell(verify, rows(&[1, 2, 7]));
    assert_eq!(desk.text, "abch");
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    let seen = desk.session.summary();
    assert_eq!((seen.rounds, seen.drafted, seen.accepted, seen.output_tokens), (1, 2, 2, 4));
}

#[test]
fn a_session_accounts_for_its_lookups_as_they_grow() {
    let grown = |lookups: Vec<LookupSpec>| {
        let mut desk = Desk::new(Rules { lookups, ..rules() }, Ending::default());
        let fresh = desk.session.bytes();
        let (verify, _) = desk.leap();
        desk.tell(verify, rows(&[1, 2, 7]));
        (fresh, desk.session.bytes())
    };
    let one = LookupSpec::PromptLookup(Ngram { min: 1, max: 4 });
    let (fresh, once) = grown(vec![one.clone()]);
    let (_, twice) = grown(vec![one.clone(), one]);
    let lookup = twice - once;
    // Ten tokens: their ids, and at least a state of 24 bytes for each.
    assert!(lookup >= 10 * (4 + 24), "{lookup}");
    assert!(once - fresh >= 10 * 28, "{fresh} to {once}");
}

/// Every token is a byte.
#[derive(Debug)]
struct Bytes;

impl Spelling for Bytes {
    fn bytes(&self, token: TokenId) -> Vec<u8> {
        vec![token as u8]
    }

    fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
        text.bytes().enumerate().map(|(at, byte)| (TokenId::from(byte), at + 1)).collect()
    }
}

#[test]
fn an_object_is_drafted_by_the_schema_in_the_prompt_from_its_first_quote_on() {
    let shared = Shared { spelling: Some(Arc::new(Bytes)), ..Shared::default() };
    let lookups = vec![LookupSpec::Phrasebook { phrases: Arc::default(), schemas: true }];
    let mut desk = Desk::new(Rules { lookups, shared, gamma_fixed: Some(4), ..rules() }, Ending::default());
    let asked = desk.asks();
    let [(ride, Action::Ride(RidePlan::First))] = asked[..] else { panic!("{asked:?}") };
    let tokens = |text: &str| text.bytes().map(TokenId::from).collect::<Vec<_>>();
    // Longer than what is read at one token event.
    let prompt = format!("{}{{\"properties\": {{\"on\": {{\"const\": true}}}}}}", " ".repeat(1_100));
    desk.tell(ride, Event::Prompt(tokens(&prompt)));
    let asked = desk.token(ride, b'{'.into());
    let [_, (verify, Action::Verify(draft, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert!(draft.is_empty(), "a brace alone may be anything: {draft:?}");
    let asked = desk.tell(*verify, rows(&tokens("\"")));
    let [(verify, Action::Verify(draft, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(draft.path(draft.len() - 1), tokens("on\":"));
    let asked = desk.tell(*verify, rows(&tokens("on\": ")));
    let [(verify, Action::Verify(draft, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(draft.path(draft.len() - 1), tokens("true"));
    desk.tell(*verify, rows(&tokens("true}")));
    assert_eq!(desk.tokens, tokens("{\"on\": true}"));
    assert_eq!((desk.session.summary().drafted, desk.session.summary().accepted), (8, 8));
}

/// What was learnt of verify calls by a plan: seconds by number of nodes, for contexts like the tests'.
fn cost(desk: &Desk, plan: Plan) -> Option<Vec<f64>> {
    let way = Way::by(plan, 0);
    desk.control.with(|learnt| {
        let measured = learnt.costs.verify_measured(way);
        measured.then(|| (0..=NODES_MAX).map(|nodes| learnt.costs.verify(way, nodes)).collect())
    })
}

#[test]
fn a_call_is_booked_to_the_plan_that_was_used_and_to_the_nodes_that_were_put() {
    let rules = Rules { plans: vec![Plan::Score, Plan::FanOut], gamma_fixed: Some(4), ..rules() };
    let mut desk = Desk::new(rules, Ending::default());
    let ride = desk.ride();
    let asked = desk.token(ride, 0);
    let Some((score, Action::Verify(_, Plan::Score, _))) = asked.last() else { panic!("{asked:?}") };
    // The score decides nothing after 10 ms; the fan-out that follows takes 10 ms more.
    let asked = desk.tell(*score, rows(&[]));
    let Some((fan_out, Action::Verify(_, Plan::FanOut, _))) = asked.last() else { panic!("{asked:?}") };
    assert_eq!(cost(&desk, Plan::FanOut), None, "not called yet");
    let put = Some(Put { plan: Plan::FanOut, nodes: 1 });
    let asked =
        desk.tell(*fan_out, Event::Verdict(Verdict { rows: vec![Row::of(9)], put, ..Verdict::default() }));
    let fan_out = cost(&desk, Plan::FanOut).expect("measured");
    assert!((fan_out[1] - 0.010).abs() < 1e-9, "10 ms with one node: {fan_out:?}");
    assert_eq!(cost(&desk, Plan::Score), None, "the first call after a ride shows what the switch costs");
    let Some((_, Action::Verify(_, Plan::Score, _))) = asked.last() else { panic!("{asked:?}") };
}

#[rstest]
#[case::refused(Event::Fault(Fault::Verify), RideReason::VerifyFault)]
#[case::drafter(Event::Fault(Fault::Draft), RideReason::VerifyFault)]
#[case::a_row_more(rows(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), RideReason::VerifyFault)]
#[case::too_long(Event::Fault(Fault::TooLong), RideReason::ContextTooLong)]
#[case::busy(Event::Fault(Fault::RetryAfter(Duration::from_secs(9))), RideReason::RetryAfter)]
fn a_verify_call_that_fails_ends_in_a_ride(#[case] event: Event, #[case] reason: RideReason) {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let asked = desk.tell(verify, event);
    let ride = rides_on(&asked);
    // Nothing leaps while the fault is fresh, and the ride brings the rest.
    for token in 1..11 {
        assert_eq!(desk.token(ride, token), [], "token {token}");
    }
    let end = summary(&desk.token(ride, 11));
    assert_eq!((end.finish, end.reason, end.output_tokens), (Some(Finish::Length), Some(reason), 12));
    assert_eq!(desk.text, "abcdefghijkl");
}

#[test]
fn a_verify_call_that_is_too_late_is_cancelled_and_its_answer_ignored() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let deadline = desk.session.deadline().expect("a verify call has a deadline");
    desk.now = Tick(deadline.0 - 20_000);
    assert_eq!(desk.tell(ActionId::WORLD, Event::Timeout), []);
    desk.now = deadline;
    let asked = desk.tell(ActionId::WORLD, Event::Timeout);
    assert!(matches!(asked[0], (_, Action::Cancel(id)) if id == verify));
    rides_on(&asked);
    assert_eq!(desk.tell(verify, rows(&[1, 2, 7])), []);
    assert_eq!(desk.text, "a");
}

#[test]
fn a_ride_that_breaks_before_any_token_is_the_backend_s_own_error() {
    let mut desk = desk();
    let ride = desk.ride();
    let end = summary(&desk.tell(ride, Event::Fault(Fault::Ride)));
    assert_eq!((end.finish, end.output_tokens), (None, 0));
}

#[test]
fn a_ride_that_breaks_later_goes_on_once_from_what_is_the_past() {
    let mut desk = Desk::new(
        Rules { permission: Permission::Shadow(RideReason::Observe), ..rules() },
        Ending::default(),
    );
    let ride = desk.ride();
    assert_eq!(desk.token(ride, 0), []);
    let on = rides_on(&desk.tell(ride, Event::Fault(Fault::Ride)));
    assert_eq!(desk.token(on, 1), []);
    let again = rides_on(&desk.tell(on, Event::Fault(Fault::Ride)));
    let end = summary(&desk.tell(again, Event::Fault(Fault::Ride)));
    assert_eq!((end.finish, desk.text.as_str()), (None, "ab"));
}

/// What came next might be another model's.
#[rstest]
#[case::another_process(Fault::Changed)]
#[case::a_lost_connection(Fault::Lost)]
fn an_answer_that_may_be_another_model_s_ends_the_output(#[case] fault: Fault) {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    assert_eq!(desk.tell(ActionId::WORLD, Event::Fault(fault)), [], "it answers nothing that was asked");
    let end = summary(&desk.tell(verify, Event::Fault(fault)));
    assert_eq!((end.finish, end.output_tokens, desk.text.as_str()), (None, 1, "a"));
    let mut desk = self::desk();
    let (verify, _) = desk.leap();
    let on = rides_on(&desk.tell(verify, Event::Fault(Fault::Verify)));
    assert_eq!(desk.token(on, 1), []);
    let end = summary(&desk.tell(on, Event::Fault(fault)));
    assert_eq!((end.finish, desk.text.as_str()), (None, "ab"));
}

#[test]
fn a_pause_without_a_ride_is_sat_out() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let on = rides_on(&desk.tell(verify, Event::Fault(Fault::Verify)));
    let pause = Duration::from_secs(3);
    assert_eq!(desk.tell(on, Event::Fault(Fault::RetryAfter(pause))), []);
    assert_eq!(desk.session.deadline(), Some(desk.now.after(pause)));
    desk.now = desk.now.after(pause);
    rides_on(&desk.tell(ActionId::WORLD, Event::Timeout));
}

#[test]
fn doubt_means_the_backend_s_own_text_to_the_end() {
    let mut desk = desk();
    let ride = desk.ride();
    desk.tell(ride, Event::Doubt);
    assert_eq!(
        desk.tell(ride, Event::Token { tokens: vec![0, 1], text: "anything".into(), tail: Tail::Open }),
        []
    );
    let end = summary(&desk.tell(ride, Event::RideEnded(Finish::Stop)));
    assert_eq!((end.finish, end.speculated), (Some(Finish::Stop), false));
    assert_eq!(desk.text, "anything");
}

#[test]
fn text_that_a_parser_keeps_back_never_leaps() {
    let mut desk = desk();
    let ride = desk.ride();
    for token in 0..4 {
        assert_eq!(
            desk.tell(ride, Event::Token { tokens: vec![token], text: String::new(), tail: Tail::Open }),
            []
        );
    }
    let asked = desk.tell(ride, Event::Token { tokens: vec![4], text: "e".into(), tail: Tail::Open });
    assert_eq!((asked, desk.session.summary().reason), (vec![], Some(RideReason::NoDraft)));
}

#[test]
fn text_that_a_parser_swallows_is_not_taken_for_what_a_long_stop_text_holds_back() {
    for hold in [Hold::Beginning, Hold::Longest] {
        let stop = vec!["a stop text longer than what is swallowed".to_owned()];
        let mut desk = Desk::new(rules(), Ending { stop, hold, ..Ending::default() });
        let ride = desk.ride();
        for token in [0, 1, 2] {
            let swallowed = Event::Token { tokens: vec![token], text: String::new(), tail: Tail::Open };
            assert_eq!(desk.tell(ride, swallowed), [], "{hold:?}: token {token}");
        }
        assert_eq!((desk.session.summary().reason, desk.text.as_str()), (Some(RideReason::NoDraft), ""));
    }
}

#[test]
fn what_a_backend_holds_back_for_a_stop_text_is_said_when_its_ride_is_left() {
    let ending = |hold| Ending { stop: vec!["bcx".to_owned()], hold, ..Ending::default() };
    for (hold, token) in [(Hold::Beginning, 1), (Hold::Longest, 4)] {
        let mut desk = Desk::new(rules(), ending(hold));
        let ride = desk.ride();
        let asked =
            desk.tell(ride, Event::Token { tokens: vec![0, token], text: "a".into(), tail: Tail::Open });
        assert!(
            matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]),
            "{hold:?}: {asked:?}"
        );
        assert_eq!(
            desk.text,
            if hold == Hold::Longest { "ae" } else { "a" },
            "\"b\" may begin the stop text"
        );
    }
}

#[test]
fn a_mark_in_the_first_ride_is_doubt() {
    let mut desk =
        Desk::marked(rules(), Ending { eos: vec![9], ignore_eos: true, ..Ending::default() }, &[5, 9]);
    let ride = desk.ride();
    // The end of a text is a mark too, but what the backend makes of it is known.
    assert_eq!(desk.token(ride, 9).len(), 2, "cancels and verifies");
    let mut desk = Desk::marked(rules(), Ending::default(), &[5, 9]);
    let ride = desk.ride();
    assert_eq!(desk.token(ride, 5), []);
    assert_eq!(desk.token(ride, 0), []);
    assert_eq!(desk.session.summary().reason, Some(RideReason::NoDraft));
}

#[test]
fn an_id_that_no_token_has_counts_on_the_accepted_path_alone() {
    let mut desk = Desk::new(Rules { vocabulary: 20, ..rules() }, Ending::default());
    let (verify, _) = desk.leap();
    let asked = desk.tell(verify, rows(&[1, 7, 4_000_000]));
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    assert_eq!(desk.text, "abh");
    let mut desk = Desk::new(Rules { vocabulary: 20, ..rules() }, Ending::default());
    let (verify, _) = desk.leap();
    rides_on(&desk.tell(verify, rows(&[1, 4_000_000, 7])));
    assert_eq!(desk.text, "a");
}

#[test]
fn a_client_that_left_cancels_what_is_under_way() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let asked = desk.tell(ActionId::WORLD, Event::ClientGone);
    assert!(matches!(asked[0], (_, Action::Cancel(id)) if id == verify));
    assert_eq!(summary(&asked).finish, None);
    assert_eq!(desk.tell(verify, rows(&[1, 2, 7])), []);
    assert_eq!(desk.tell(ActionId::WORLD, Event::ClientGone), []);
}

#[test]
fn the_operator_s_mode_holds_from_the_next_token() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    assert_eq!(desk.tell(ActionId::WORLD, Event::Mode(Some(RideReason::Observe))), []);
    let on = rides_on(&desk.tell(verify, rows(&[1, 7, 7])));
    assert_eq!(desk.session.summary().reason, Some(RideReason::Observe));
    assert_eq!(desk.token(on, 0), []);
    desk.tell(ActionId::WORLD, Event::Mode(None));
    assert!(matches!(desk.token(on, 1)[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]));
}

#[test]
fn a_gate_is_kept_but_for_those_that_fixed_gamma_ignores() {
    let mut desk = desk();
    let ride = desk.ride();
    desk.tell(ActionId::WORLD, Event::Mode(Some(RideReason::GateHealth)));
    assert_eq!(desk.token(ride, 0), []);
    assert_eq!(desk.session.summary().reason, Some(RideReason::GateHealth));
    desk.tell(ActionId::WORLD, Event::Mode(Some(RideReason::GateLoad)));
    assert_eq!(desk.token(ride, 1).len(), 2);
}

#[test]
fn the_draft_asks_for_no_more_tokens_than_the_limit_and_the_context_leave() {
    let mut desk = Desk::new(Rules { context_max: 9, ..rules() }, Ending::default());
    let (verify, draft) = desk.leap();
    assert_eq!(draft.len(), 1, "7 tokens of context, one draft, one sample");
    rides_on(&desk.tell(verify, rows(&[1, 2])));
    assert_eq!(desk.session.summary().reason, Some(RideReason::ContextTooLong));

    // "abcabc…" goes on by three tokens a round, until the limit of 12 leaves room for one and its sample.
    let mut desk = self::desk();
    let (mut verify, mut draft) = desk.leap();
    for _ in 0..3 {
        assert_eq!(draft.len(), 2);
        let mut asked = desk.tell(verify, rows(&[1, 2, 0]));
        let Some((id, Action::Verify(next, ..))) = asked.pop() else { panic!("{asked:?}") };
        (verify, draft) = (id, Tree::clone(&next));
    }
    assert_eq!((draft.len(), desk.tokens.len()), (1, 10));
    let end = summary(&desk.tell(verify, rows(&[1, 2])));
    assert_eq!((end.finish, end.output_tokens), (Some(Finish::Length), 12));
}

#[test]
fn the_end_of_text_inside_a_run_ends_it() {
    let mut desk = Desk::new(rules(), Ending { eos: vec![1], ..Ending::default() });
    let (verify, _) = desk.leap();
    let end = summary(&desk.tell(verify, rows(&[1, 2, 7])));
    assert_eq!((end.finish, end.output_tokens, end.accepted), (Some(Finish::Stop), 2, 1));
    assert_eq!(desk.text, "a");
}

/// A forced session with a model drafter, and its first draft asked for.
fn asking(more: Rules) -> (Desk, ActionId) {
    let mut desk = Desk::new(Rules { model: Some(0), ..more }, Ending::default());
    let ride = desk.ride();
    let asked = desk.token(ride, 0);
    let [(_, Action::Cancel(_)), (draft, Action::Draft { gamma: 2, .. })] = asked[..] else {
        panic!("{asked:?}")
    };
    (desk, draft)
}

fn chain(tokens: &[TokenId]) -> Tree {
    Tree::chain(tokens, Source::Model, Features::default())
}

/// Lets time pass up to the session's deadline.
fn expire(desk: &mut Desk) -> Vec<(ActionId, Action)> {
    desk.now = desk.session.deadline().expect("a deadline").max(desk.now);
    desk.tell(ActionId::WORLD, Event::Timeout)
}

#[test]
fn the_first_draft_reads_the_prompt_and_is_waited_for_as_long_as_a_call_may_take() {
    let (mut desk, draft) = asking(rules());
    let bound = rules().verify_timeout;
    assert_eq!(desk.session.deadline(), Some(desk.now.after(bound)), "a drafter that hangs holds no client");
    desk.now = desk.now.after(bound / 2);
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 5]).into()));
    let [(verify, Action::Verify(sent, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(sent.path(1), [1, 5]);
    let asked = desk.tell(*verify, rows(&[1, 2, 3]));
    assert!(matches!(asked[..], [(_, Action::Draft { gamma: 2, .. })]), "{asked:?}");
}

#[rstest]
#[case::lookups_go_on(rules().lookups, &[1, 2])]
#[case::an_empty_round(Vec::new(), &[])]
fn a_late_draft_costs_its_round_and_nothing_else(#[case] lookups: Vec<LookupSpec>, #[case] sent: &[TokenId]) {
    let timeout = Some(Duration::from_millis(30));
    let (mut desk, draft) = asking(Rules { draft_timeout: timeout, lookups, ..rules() });
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 2]).into()));
    let [(verify, Action::Verify(..))] = asked[..] else { panic!("{asked:?}") };
    let asked = desk.tell(verify, rows(&[1, 2, 0]));
    let [(late, Action::Draft { .. })] = asked[..] else { panic!("{asked:?}") };
    let asked = expire(&mut desk);
    let [(_, Action::Cancel(gone)), (verify, Action::Verify(draft, ..))] = &asked[..] else {
        panic!("{asked:?}")
    };
    let tokens: Vec<TokenId> = draft.nodes().iter().map(|node| node.token).collect();
    assert_eq!((*gone, tokens.as_slice()), (late, sent));
    assert_eq!(desk.tell(late, Event::Draft(chain(&[9, 9]).into())), [], "too late");
    // The next round asks the drafter again.
    let asked = desk.tell(*verify, rows(&[7, 7, 7][..=sent.len()]));
    assert!(matches!(asked[..], [(_, Action::Draft { .. })]), "{asked:?}");
    assert_eq!((desk.text.as_str(), desk.session.summary().reason), ("abcah", None));
}

#[test]
fn everybody_who_proposed_a_token_is_credited() {
    let (mut desk, draft) = asking(rules());
    // The lookup says the same two tokens.
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 2]).into()));
    let [(verify, Action::Verify(sent, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((sent.path(1), sent.len()), (vec![1, 2], 2));
    desk.tell(*verify, rows(&[1, 7, 7]));
    for source in [Source::PromptLookup, Source::Model] {
        let seen = desk.control.with(|learnt| learnt.survival.first_tokens(Heat::Greedy, source.into()));
        assert_eq!(seen, (1.0, 1.0), "{source:?}");
    }
}

#[test]
fn a_drafter_that_fails_is_left_alone_for_a_while() {
    let (mut desk, draft) = asking(rules());
    let ride = rides_on(&desk.tell(draft, Event::Fault(Fault::Draft)));
    assert_eq!(desk.session.summary().reason, Some(RideReason::VerifyFault));
    let asked = desk.token(ride, 1);
    assert!(matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]), "{asked:?}");
}

/// Riding takes 10 ms a token, and the model drafter is right and quick.
fn teach(control: &Control) {
    control.with(|learnt| {
        (0..20).for_each(|_| learnt.costs.rode(0.010, 1, Tick(0)));
        for nodes in 0..9 {
            learnt.costs.verified(Way::by(Plan::Tree, 0), nodes, 0.010, Tick(1_000_000));
        }
        learnt.costs.drafted(0, 4, 0.001, Tick(0));
        let vote = Vote::new(Source::Model, Features::default());
        (0..40).for_each(|_| learnt.survival.observe(Heat::Greedy, vote, Company::Alone, 0, true));
    });
}

#[test]
fn without_a_limit_a_draft_is_waited_for_as_long_as_two_ridden_tokens_take() {
    let free = Rules { gamma_fixed: None, model: Some(0), lookups: Vec::new(), ..rules() };
    let mut desk = Desk::new(free, Ending::default());
    teach(&desk.control);
    let ride = desk.ride();
    let asked = desk.token(ride, 0);
    let [(shadow, Action::Shadow { from: 0 })] = asked[..] else { panic!("{asked:?}") };
    assert_eq!(desk.session.deadline(), None, "a pass beside the ride delays nobody");
    assert_eq!(desk.tell(shadow, Event::Shadow(vec![Some(0), Some(1)])), []);
    let asked = desk.token(ride, 1);
    let [(_, Action::Cancel(_)), (_, Action::Draft { .. })] = asked[..] else { panic!("{asked:?}") };
    let patience = desk.session.deadline().expect("a deadline") - desk.now;
    let pace = desk.control.with(|learnt| learnt.costs.ride_token()).expect("measured");
    assert!((patience.as_secs_f64() - 2.0 * pace).abs() < 1e-5, "{patience:?} at {pace} s a token");
    // It costs the round, at the price of what was waited.
    let before = desk.control.with(|learnt| learnt.costs.draft_token(0));
    let asked = expire(&mut desk);
    assert!(matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]), "{asked:?}");
    assert!(desk.control.with(|learnt| learnt.costs.draft_token(0)) >= before);
}

#[test]
fn a_ride_to_the_limit_tells_the_reason_that_bound_it() {
    let free = Rules { gamma_fixed: None, ..rules() };
    let mut desk = Desk::new(free, Ending::default());
    let ride = desk.ride();
    // Nothing of this text was there before, so there is never a draft.
    for token in 10..21 {
        assert_eq!(desk.token(ride, token), [], "token {token}");
    }
    assert_eq!(desk.session.summary().reason, Some(RideReason::NoDraft));
    let held = desk.token(ride, 21);
    assert_eq!(held, []);
    let end = summary(&desk.tell(ride, Event::RideEnded(Finish::Length)));
    assert_eq!((end.reason, end.output_tokens), (Some(RideReason::NoDraft), 12));
}

#[test]
fn a_ride_in_pieces_goes_on_and_a_short_piece_is_the_end() {
    let shadow = Permission::Shadow(RideReason::Observe);
    let mut desk = Desk::new(Rules { segment: Some(2), permission: shadow, ..rules() }, Ending::default());
    let ride = desk.ride();
    desk.token(ride, 0);
    let on = rides_on(&desk.tell(ride, Event::Fault(Fault::Ride)));
    desk.token(on, 1);
    desk.token(on, 2);
    let on = rides_on(&desk.tell(on, Event::RideEnded(Finish::Length)));
    desk.token(on, 3);
    let end = summary(&desk.tell(on, Event::RideEnded(Finish::Length)));
    assert_eq!((end.finish, desk.text.as_str()), (Some(Finish::Length), "abcd"));
}

#[test]
fn a_place_that_one_plan_cannot_decide_is_taken_by_the_next_and_then_by_a_ride() {
    let mut desk = Desk::new(Rules { plans: vec![Plan::Score, Plan::FanOut], ..rules() }, Ending::default());
    let ride = desk.ride();
    let asked = desk.token(ride, 0);
    let [_, (score, Action::Verify(draft, Plan::Score, _))] = &asked[..] else { panic!("{asked:?}") };
    let asked = desk.tell(*score, rows(&[]));
    let [(fan_out, Action::Verify(again, Plan::FanOut, _))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((again, desk.text.as_str()), (draft, "a"));
    let asked = desk.tell(*fan_out, rows(&[]));
    rides_on(&asked);
    assert_eq!((desk.text.as_str(), desk.session.summary().rounds), ("a", 0));
}

#[test]
fn a_place_left_open_inside_a_run_ends_the_round_before_it() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let asked = desk.tell(verify, rows(&[1, 2]));
    assert_eq!(desk.text, "abc");
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    assert_eq!((desk.session.summary().accepted, desk.session.summary().output_tokens), (2, 3));
}

#[test]
fn a_token_that_the_backend_says_ends_the_text_ends_it_without_being_text() {
    let mut desk = desk();
    let (verify, _) = desk.leap();
    let ends = Row { ends: true, ..Row::of(1) };
    let asked = desk.tell(
        verify,
        Event::Verdict(Verdict { rows: vec![ends, Row::of(2), Row::of(3)], ..Verdict::default() }),
    );
    let end = summary(&asked);
    assert_eq!((end.finish, end.output_tokens, desk.text.as_str()), (Some(Finish::Stop), 2, "a"));
}
