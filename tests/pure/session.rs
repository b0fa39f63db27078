//! The session step by step: its actions after each event, and the outcome of every fault.

use std::sync::Arc;
use std::time::Duration;

use foretell_core::control::{self, Basis, Class, Control, TemperatureBucket, VerifyLine, Way};
use foretell_core::draft::{Agreement, Features, LookupSpec, Ngram, Shared, Source, Spelling, Tree, Vote};
use foretell_core::session::{
    Action, ActionId, CallDelta, Decode, Doubted, Ending, Event, Fault, Finish, Limit, MakeParser, Parse,
    Parsed, PartsSeen, Permission, PlainRequest, Resources, Rules, Session, Start, StopBuffer, Summary, Tail,
    Timeouts,
};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::{PlainReason, Proposal, Put, Row, VerifyMethod, VerifyResult};
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

/// A call of `f` begins at x and ends at y; all else is content.
#[derive(Clone, Default)]
struct Calls {
    begun: u32,
    inside: bool,
    /// The backend's parts cannot be told.
    unsure: bool,
}

impl Parse for Calls {
    fn push(&mut self, token: TokenId, text: &str) -> Parsed {
        let call = |name: Option<&str>, arguments: &str| Parsed {
            calls: vec![CallDelta {
                index: self.begun.saturating_sub(1),
                id: None,
                name: name.map(str::to_owned),
                arguments: arguments.to_owned(),
            }],
            ..Parsed::default()
        };
        match token {
            23 => {
                (self.begun, self.inside) = (self.begun + 1, true);
                Parsed {
                    calls: vec![CallDelta {
                        index: self.begun - 1,
                        name: Some("f".to_owned()),
                        ..CallDelta::default()
                    }],
                    ..Parsed::default()
                }
            }
            24 => {
                self.inside = false;
                Parsed::default()
            }
            _ if self.inside => call(None, text),
            _ => Parsed::content(text.to_owned()),
        }
    }

    fn finish(&mut self) -> Parsed {
        Parsed::default()
    }

    fn is_outside_calls(&self) -> bool {
        !self.inside
    }

    fn reasoning_tokens(&self) -> u64 {
        0
    }

    fn is_sure(&self) -> bool {
        !self.unsure
    }

    fn fork(&self) -> Box<dyn Parse> {
        Box::new(self.clone())
    }
}

/// A session, its clock, and its actions.
struct Desk {
    session: Session,
    control: Arc<Control>,
    now: Tick,
    text: String,
    tokens: Vec<TokenId>,
    parsed: Parsed,
}

impl Desk {
    fn new(rules: Rules, ending: Ending) -> Self {
        Self::marked(rules, ending, &[])
    }

    fn with(rules: Rules, resources: Resources, ending: Ending) -> Self {
        Self::begun(rules, ending, |start| start.resources = resources)
    }

    /// A chat in which these tokens may be parsed by the backend.
    fn marked(rules: Rules, ending: Ending, marks: &[TokenId]) -> Self {
        Self::begun(rules, ending, |start| start.marks = marks.into())
    }

    /// A chat whose backend parses calls.
    fn parsed() -> Self {
        let parser = || -> MakeParser { Box::new(|_| Some(Box::<Calls>::default())) };
        Self::begun(rules(), Ending { eos: vec![25], ..Ending::default() }, |start| {
            start.parser = Some(parser());
        })
    }

    fn begun(rules: Rules, ending: Ending, change: impl FnOnce(&mut Start)) -> Self {
        let control = Arc::new(Control::new());
        let mut start = Start {
            prompt: None,
            limit: Limit { max_tokens: Some(12), context: None },
            ending,
            temperature: 0.0,
            decode: Box::new(Letters),
            marks: Arc::default(),
            parser: None,
            unconfirmed: false,
            rules,
            resources: Resources::default(),
            sent: None,
            first_token_alone: false,
            seed: 3,
            noise: 2,
        };
        change(&mut start);
        let now = Tick(1_000_000);
        let session = Session::new(start, Arc::clone(&control), now);
        Self { session, control, now, text: String::new(), tokens: Vec::new(), parsed: Parsed::default() }
    }

    /// The session's actions; pieces of output are collected.
    fn asks(&mut self) -> Vec<(ActionId, Action)> {
        let mut asked = Vec::new();
        while let Some((id, action)) = self.session.poll() {
            match action {
                Action::Emit(delta) | Action::Passed(delta) => {
                    self.text.push_str(&delta.parsed.text);
                    self.tokens.extend(delta.tokens);
                    self.parsed.append(delta.parsed);
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

    fn piece(&mut self, id: ActionId, tokens: &[TokenId], parsed: Parsed) -> Vec<(ActionId, Action)> {
        self.tell(id, Event::Token { tokens: tokens.to_vec(), parsed, tail: Tail::Open })
    }

    fn token(&mut self, id: ActionId, token: TokenId) -> Vec<(ActionId, Action)> {
        self.piece(id, &[token], Parsed::content(Letters.push(token)))
    }

    /// The first call, with its prompt "abcabc" reported.
    fn plain(&mut self) -> ActionId {
        let asked = self.asks();
        let [(id, Action::Plain(PlainRequest::First))] = asked[..] else { panic!("{asked:?}") };
        assert_eq!(self.tell(id, Event::Prompt(vec![0, 1, 2, 0, 1, 2])), []);
        id
    }

    /// Decodes one token plainly and speculates; returns the verify request and its draft.
    fn take_step(&mut self) -> (ActionId, Tree) {
        let plain = self.plain();
        let asked = self.token(plain, 0);
        let [(_, Action::Cancel(gone)), (id, Action::Verify(draft, VerifyMethod::Tree))] = &asked[..] else {
            panic!("{asked:?}")
        };
        assert_eq!(*gone, plain);
        (*id, Tree::clone(draft))
    }
}

fn rules() -> Rules {
    Rules {
        methods: vec![VerifyMethod::Tree],
        gamma_fixed: Some(2),
        lookups: vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 })],
        ..Rules::default()
    }
}

fn of_vocabulary(vocabulary: TokenId) -> Resources {
    Resources { vocabulary, ..Resources::default() }
}

fn with_a_model() -> Resources {
    Resources { model: Some(0), ..Resources::default() }
}

fn desk() -> Desk {
    Desk::new(rules(), Ending::default())
}

fn rows(samples: &[TokenId]) -> Event {
    let rows = samples.iter().copied().map(Row::of).collect();
    Event::VerifyResult(VerifyResult { rows, ..VerifyResult::default() })
}

/// The last action continues plain decoding; returns its id.
fn stays_plain(asked: &[(ActionId, Action)]) -> ActionId {
    let Some((id, Action::Plain(PlainRequest::Continue { .. }))) = asked.last() else { panic!("{asked:?}") };
    *id
}

fn summary(asked: &[(ActionId, Action)]) -> Summary {
    let Some((_, Action::Finish(summary))) = asked.last() else { panic!("{asked:?}") };
    summary.clone()
}

#[test]
fn a_round_emits_the_accepted_run_and_one_more_token() {
    let mut desk = desk();
    let (verify, draft) = desk.take_step();
    assert_eq!(draft.path(1), [1, 2]);
    let asked = desk.tell(verify, rows(&[1, 2, 7]));
    assert_eq!(desk.text, "abch");
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    let seen = desk.session.summary();
    assert_eq!((seen.rounds, seen.drafted, seen.accepted, seen.output_tokens), (1, 2, 2, 4));
}

#[test]
fn the_memory_of_a_session_includes_its_growing_lookups() {
    let grown = |lookups: Vec<LookupSpec>| {
        let mut desk = Desk::new(Rules { lookups, ..rules() }, Ending::default());
        let fresh = desk.session.bytes();
        let (verify, _) = desk.take_step();
        desk.tell(verify, rows(&[1, 2, 7]));
        (fresh, desk.session.bytes())
    };
    let one = LookupSpec::PromptLookup(Ngram { min: 1, max: 4 });
    let (fresh, once) = grown(vec![one.clone()]);
    let (_, twice) = grown(vec![one.clone(), one]);
    // Ten tokens, indexed once for both.
    assert!(twice - once < 200, "{once} to {twice}");
    assert!(once - fresh >= 10 * 4, "{fresh} to {once}");
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
    let mut desk = Desk::with(
        Rules { lookups, gamma_fixed: Some(4), ..rules() },
        Resources { shared, ..Resources::default() },
        Ending::default(),
    );
    let asked = desk.asks();
    let [(plain, Action::Plain(PlainRequest::First))] = asked[..] else { panic!("{asked:?}") };
    let tokens = |text: &str| text.bytes().map(TokenId::from).collect::<Vec<_>>();
    // Longer than the part that is read per token event.
    let prompt = format!("{}{{\"properties\": {{\"on\": {{\"const\": true}}}}}}", " ".repeat(1_100));
    desk.tell(plain, Event::Prompt(tokens(&prompt)));
    let asked = desk.token(plain, b'{'.into());
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

/// The learnt cost of verify requests by a method, for contexts like those of the tests; `None`
/// before any was measured.
fn cost(desk: &Desk, method: VerifyMethod) -> Option<VerifyLine> {
    let way = Way::by(method, 0);
    desk.control.with(|learnt| (learnt.costs.basis(way) == Basis::Measured).then(|| learnt.costs.line(way)))
}

#[test]
fn a_cost_is_recorded_for_the_used_method_and_the_sent_nodes() {
    let rules =
        Rules { methods: vec![VerifyMethod::Score, VerifyMethod::FanOut], gamma_fixed: Some(4), ..rules() };
    let mut desk = Desk::new(rules, Ending::default());
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let Some((score, Action::Verify(_, VerifyMethod::Score))) = asked.last() else { panic!("{asked:?}") };
    // The score decides nothing and takes 10 ms; the fan-out after it takes 10 ms more.
    let asked = desk.tell(*score, rows(&[]));
    let Some((fan_out, Action::Verify(_, VerifyMethod::FanOut))) = asked.last() else { panic!("{asked:?}") };
    assert_eq!(cost(&desk, VerifyMethod::FanOut), None, "not called yet");
    let put = Some(Put { method: VerifyMethod::FanOut, nodes: 1 });
    let asked = desk.tell(
        *fan_out,
        Event::VerifyResult(VerifyResult { rows: vec![Row::of(9)], put, ..VerifyResult::default() }),
    );
    let fan_out = cost(&desk, VerifyMethod::FanOut).expect("measured");
    assert!(fan_out.weight > 0.5 && fan_out.base + fan_out.node < 0.02, "10 ms with one node: {fan_out:?}");
    assert_eq!(
        cost(&desk, VerifyMethod::Score),
        None,
        "the first verify request after plain decoding includes the cost of the switch"
    );
    let Some((_, Action::Verify(_, VerifyMethod::Score))) = asked.last() else { panic!("{asked:?}") };
}

#[rstest]
#[case::refused(Event::Fault(Fault::Verify), PlainReason::VerifyFault)]
#[case::drafter(Event::Fault(Fault::Draft), PlainReason::VerifyFault)]
#[case::a_row_more(rows(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), PlainReason::VerifyFault)]
#[case::too_long(Event::Fault(Fault::TooLong), PlainReason::ContextTooLong)]
#[case::busy(Event::Fault(Fault::RetryAfter(Duration::from_secs(9))), PlainReason::RetryAfter)]
fn a_failed_verify_request_ends_in_plain_decoding(#[case] event: Event, #[case] reason: PlainReason) {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let asked = desk.tell(verify, event);
    let plain = stays_plain(&asked);
    // No speculation while the fault is recent; the rest is decoded plainly.
    for token in 1..11 {
        assert_eq!(desk.token(plain, token), [], "token {token}");
    }
    let end = summary(&desk.token(plain, 11));
    assert_eq!((end.finish, end.reason, end.output_tokens), (Some(Finish::Length), Some(reason), 12));
    assert_eq!(desk.text, "abcdefghijkl");
}

#[test]
fn a_late_verify_request_is_cancelled_and_its_answer_ignored() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let deadline = desk.session.deadline().expect("a verify call has a deadline");
    desk.now = Tick(deadline.0 - 20_000);
    assert_eq!(desk.tell(ActionId::WORLD, Event::Timeout), []);
    desk.now = deadline;
    let asked = desk.tell(ActionId::WORLD, Event::Timeout);
    assert!(matches!(asked[0], (_, Action::Cancel(id)) if id == verify));
    stays_plain(&asked);
    assert_eq!(desk.tell(verify, rows(&[1, 2, 7])), []);
    assert_eq!(desk.text, "a");
}

#[test]
fn a_plain_request_that_fails_before_any_token_is_the_backend_s_error() {
    let mut desk = desk();
    let plain = desk.plain();
    let end = summary(&desk.tell(plain, Event::Fault(Fault::Plain)));
    assert_eq!((end.finish, end.output_tokens), (None, 0));
}

#[test]
fn a_plain_request_that_fails_later_continues_once_from_the_context() {
    let mut desk = Desk::new(
        Rules { permission: Permission::Shadow(PlainReason::Observe), ..rules() },
        Ending::default(),
    );
    let plain = desk.plain();
    assert_eq!(desk.token(plain, 0), []);
    let on = stays_plain(&desk.tell(plain, Event::Fault(Fault::Plain)));
    assert_eq!(desk.token(on, 1), []);
    let again = stays_plain(&desk.tell(on, Event::Fault(Fault::Plain)));
    let end = summary(&desk.tell(again, Event::Fault(Fault::Plain)));
    assert_eq!((end.finish, desk.text.as_str()), (None, "ab"));
}

/// The continuation might come from another model.
#[rstest]
#[case::another_process(Fault::Changed)]
#[case::a_lost_connection(Fault::Lost)]
fn an_answer_that_may_be_another_model_s_ends_the_output(#[case] fault: Fault) {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    assert_eq!(desk.tell(ActionId::WORLD, Event::Fault(fault)), [], "it answers nothing that was asked");
    let end = summary(&desk.tell(verify, Event::Fault(fault)));
    assert_eq!((end.finish, end.output_tokens, desk.text.as_str()), (None, 1, "a"));
    let mut desk = self::desk();
    let (verify, _) = desk.take_step();
    let on = stays_plain(&desk.tell(verify, Event::Fault(Fault::Verify)));
    assert_eq!(desk.token(on, 1), []);
    let end = summary(&desk.tell(on, Event::Fault(fault)));
    assert_eq!((end.finish, desk.text.as_str()), (None, "ab"));
}

#[test]
fn a_pause_without_a_plain_request_is_waited_out() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let on = stays_plain(&desk.tell(verify, Event::Fault(Fault::Verify)));
    let pause = Duration::from_secs(3);
    assert_eq!(desk.tell(on, Event::Fault(Fault::RetryAfter(pause))), []);
    assert_eq!(desk.session.deadline(), Some(desk.now.after(pause)));
    desk.now = desk.now.after(pause);
    stays_plain(&desk.tell(ActionId::WORLD, Event::Timeout));
}

#[test]
fn a_request_that_breaks_off_behind_a_pause_is_continued_once_too() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let on = stays_plain(&desk.tell(verify, Event::Fault(Fault::Verify)));
    let pause = Duration::from_secs(1);
    assert_eq!(desk.tell(on, Event::Fault(Fault::RetryAfter(pause))), []);
    desk.now = desk.now.after(pause);
    let on = stays_plain(&desk.tell(ActionId::WORLD, Event::Timeout));
    let on = stays_plain(&desk.tell(on, Event::Fault(Fault::Plain)));
    let end = summary(&desk.tell(on, Event::Fault(Fault::Plain)));
    assert_eq!((end.finish, desk.text.as_str()), (None, "a"));
}

/// Engines that have no stream of tokens answer a later plain request whole.
#[test]
fn all_tokens_of_a_whole_answer_are_booked_to_its_time() {
    let mut desk = desk();
    desk.control.with(|learnt| {
        (0..20).for_each(|_| learnt.costs.note_plain(0.010, 1, 1, control::Disturbance::default()));
    });
    let (verify, _) = desk.take_step();
    let on = stays_plain(&desk.tell(verify, Event::Fault(Fault::Verify)));
    let lost = |desk: &Desk| desk.control.with(|learnt| learnt.regret_remaining());
    let (before, left) = (lost(&desk), desk.now);
    desk.now = left.after(Duration::from_millis(80 - 10));
    let tokens = vec![0; 8];
    let text = "aaaaaaaa".to_owned();
    desk.tell(on, Event::Token { tokens, parsed: Parsed::content(text), tail: Tail::Open });
    assert!((desk.now.seconds_since(left) - 0.08).abs() < 1e-9);
    assert!((lost(&desk) - before).abs() < 0.2, "8 tokens in 80 ms: {before} and {}", lost(&desk));
    let switch = desk.control.with(|learnt| learnt.costs.switch_out());
    assert!(switch < 0.001, "{switch}");
}

#[test]
fn nodes_that_were_not_sent_count_as_neither_drafted_nor_rejected() {
    let mut desk = Desk::new(Rules { methods: vec![VerifyMethod::FanOut], ..rules() }, Ending::default());
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let [_, (verify, Action::Verify(draft, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(draft.len(), 2);
    let put = Some(Put { method: VerifyMethod::FanOut, nodes: 1 });
    let rows = [1, 2].map(Row::of).to_vec();
    let asked =
        desk.tell(*verify, Event::VerifyResult(VerifyResult { rows, put, ..VerifyResult::default() }));
    let seen = desk.session.summary();
    assert_eq!((seen.drafted, seen.accepted, desk.text.as_str()), (1, 1, "abc"));
    let [(_, Action::Verify(draft, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(draft.len(), 1, "no more than the engine had room for");
}

#[test]
fn an_answer_that_ends_with_its_first_event_is_not_in_doubt() {
    let free = Rules { gamma_fixed: None, ..rules() };
    let mut desk = Desk::new(free.clone(), Ending::default());
    let plain = desk.plain();
    let whole = |tail| Event::Token { tokens: vec![0], parsed: Parsed::content("a".into()), tail };
    desk.tell(plain, whole(Tail::Stop));
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!(end.reason, Some(PlainReason::NoGain));
    let mut desk = Desk::new(free, Ending::default());
    let asked = desk.asks();
    let [(plain, Action::Plain(PlainRequest::First))] = asked[..] else { panic!("{asked:?}") };
    desk.tell(plain, whole(Tail::Stop));
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!(end.reason, Some(PlainReason::UntrustedIds), "no ids of the prompt were told");
}

#[test]
fn doubt_means_the_backend_s_own_text_to_the_end() {
    let mut desk = desk();
    let plain = desk.plain();
    desk.tell(plain, Event::Doubt);
    assert_eq!(desk.piece(plain, &[0, 1], Parsed::content("anything".into())), []);
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!((end.finish, end.speculated), (Some(Finish::Stop), false));
    assert_eq!(desk.text, "anything");
}

#[test]
fn text_withheld_by_a_parser_is_never_speculated_on() {
    let mut desk = desk();
    let plain = desk.plain();
    for token in 0..4 {
        assert_eq!(desk.piece(plain, &[token], Parsed::default()), []);
    }
    let asked = desk.piece(plain, &[4], Parsed::content("e".into()));
    assert_eq!((asked, desk.session.summary().reason), (vec![], Some(PlainReason::UntrustedIds)));
}

/// Part of a call's arguments, with its name at the beginning.
fn call(name: Option<&str>, arguments: &str) -> Parsed {
    let delta =
        CallDelta { index: 0, id: None, name: name.map(str::to_owned), arguments: arguments.to_owned() };
    Parsed { calls: vec![delta], ..Parsed::default() }
}

#[test]
fn a_call_goes_on_where_the_backend_left_off() {
    let mut desk = Desk::parsed();
    let plain = desk.plain();
    // The backend's call lags behind the tokens: nothing else is known to be withheld.
    assert_eq!(desk.piece(plain, &[23], Parsed::default()), []);
    assert_eq!(desk.session.summary().reason, Some(PlainReason::WithheldText));
    let asked = desk.piece(plain, &[0], call(Some("f"), "a"));
    let Some((verify, Action::Verify(draft, ..))) = asked.last() else { panic!("{asked:?}") };
    let first = draft.nodes().first().map(|node| node.token).unwrap_or_default();
    desk.tell(*verify, rows(&[first, 24, 24]));
    let (parsed, output) = (desk.parsed.clone(), desk.session.output().to_vec());
    assert_eq!(output, [23, 0, first, 24]);
    assert_eq!(parsed, call(Some("f"), &format!("a{}", Letters.push(first))));
}

#[test]
fn an_output_that_stops_behind_a_call_ends_for_it() {
    let mut desk = Desk::parsed();
    let plain = desk.plain();
    let asked = desk.piece(plain, &[23], call(Some("f"), ""));
    let Some((verify, Action::Verify(..))) = asked.last() else { panic!("{asked:?}") };
    let end = summary(&desk.tell(*verify, rows(&[25])));
    assert_eq!(end.finish, Some(Finish::ToolCalls));
}

#[test]
fn parts_that_differ_end_speculation() {
    let mut desk = Desk::parsed();
    let plain = desk.plain();
    assert_eq!(desk.piece(plain, &[23], Parsed::content("x".into())), []);
    assert_eq!(desk.piece(plain, &[0], call(Some("g"), "a")), []);
    assert_eq!(desk.session.summary().reason, Some(PlainReason::Parser));
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!((end.doubted, end.parsed), (Some(Doubted::Parser), None));
}

#[test]
fn parts_that_cannot_be_told_are_neither_alike_nor_different() {
    let mut desk = Desk::begun(rules(), Ending::default(), |start| {
        start.parser = Some(Box::new(|_| Some(Box::new(Calls { unsure: true, ..Calls::default() }))));
    });
    let plain = desk.plain();
    assert_eq!(desk.piece(plain, &[23], call(Some("f"), "")), []);
    assert_eq!(desk.piece(plain, &[0], Parsed::default()), []);
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!((end.doubted, end.parsed, end.speculated), (None, None, false));
}

#[test]
fn a_whole_answer_that_was_parsed_alike_says_so() {
    let mut desk = Desk::begun(Rules { methods: Vec::new(), ..rules() }, Ending::default(), |start| {
        start.parser = Some(Box::new(|_| Some(Box::<Calls>::default())));
    });
    let plain = desk.plain();
    desk.piece(plain, &[23], call(Some("f"), ""));
    desk.piece(plain, &[0], call(None, "a"));
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Stop)));
    assert_eq!((end.doubted, end.parsed), (None, Some(PartsSeen { reasoning: false, calls: true })));
}

#[test]
fn nothing_is_speculated_on_before_the_backend_says_that_no_grammar_binds_it() {
    let mut desk = Desk::begun(rules(), Ending::default(), |start| start.unconfirmed = true);
    let plain = desk.plain();
    assert_eq!(desk.token(plain, 0), []);
    assert_eq!(desk.session.summary().reason, Some(PlainReason::Grammar));
    let prompt = vec![0, 1, 2, 0, 1, 2];
    desk.tell(plain, Event::Rendered { prompt: prompt.clone(), constrained: true });
    assert_eq!(desk.token(plain, 1), []);
    desk.tell(plain, Event::Rendered { prompt, constrained: false });
    let asked = desk.token(plain, 2);
    assert!(matches!(asked.last(), Some((_, Action::Verify(..)))), "{asked:?}");
}

#[test]
fn text_removed_by_a_parser_is_not_taken_for_a_withheld_stop_text() {
    for hold in [StopBuffer::Beginning, StopBuffer::Longest] {
        let stop = vec!["a stop text longer than what is swallowed".to_owned()];
        let mut desk = Desk::new(rules(), Ending { stop, stop_buffer: hold, ..Ending::default() });
        let plain = desk.plain();
        for token in [0, 1, 2] {
            let swallowed = Event::Token { tokens: vec![token], parsed: Parsed::default(), tail: Tail::Open };
            assert_eq!(desk.tell(plain, swallowed), [], "{hold:?}: token {token}");
        }
        assert_eq!(
            (desk.session.summary().reason, desk.text.as_str()),
            (Some(PlainReason::WithheldText), "")
        );
    }
}

#[test]
fn text_withheld_for_a_stop_text_is_emitted_when_its_plain_request_is_left() {
    let ending = |hold| Ending { stop: vec!["bcx".to_owned()], stop_buffer: hold, ..Ending::default() };
    for (hold, token) in [(StopBuffer::Beginning, 1), (StopBuffer::Longest, 4)] {
        let mut desk = Desk::new(rules(), ending(hold));
        let plain = desk.plain();
        let asked = desk.piece(plain, &[0, token], Parsed::content("a".into()));
        assert!(
            matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]),
            "{hold:?}: {asked:?}"
        );
        assert_eq!(
            desk.text,
            if hold == StopBuffer::Longest { "ae" } else { "a" },
            "\"b\" may begin the stop text"
        );
    }
}

#[test]
fn a_mark_in_the_first_call_makes_ids_untrusted() {
    let mut desk =
        Desk::marked(rules(), Ending { eos: vec![9], ignore_eos: true, ..Ending::default() }, &[5, 9]);
    let plain = desk.plain();
    // The end of a text is a mark too, but its handling by the backend is known.
    assert_eq!(desk.token(plain, 9).len(), 2, "cancels and verifies");
    let mut desk = Desk::marked(rules(), Ending::default(), &[5, 9]);
    let plain = desk.plain();
    assert_eq!(desk.token(plain, 5), []);
    assert_eq!(desk.token(plain, 0), []);
    assert_eq!(desk.session.summary().reason, Some(PlainReason::UntrustedIds));
}

#[test]
fn an_id_that_no_token_has_counts_on_the_accepted_path_alone() {
    let mut desk = Desk::with(rules(), of_vocabulary(20), Ending::default());
    let (verify, _) = desk.take_step();
    let asked = desk.tell(verify, rows(&[1, 7, 4_000_000]));
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    assert_eq!(desk.text, "abh");
    let mut desk = Desk::with(rules(), of_vocabulary(20), Ending::default());
    let (verify, _) = desk.take_step();
    stays_plain(&desk.tell(verify, rows(&[1, 4_000_000, 7])));
    assert_eq!(desk.text, "a");
}

#[test]
fn no_verify_request_has_an_id_outside_the_vocabulary() {
    // The prompt "abcabc" lets the lookups draft 1 and 2 after 0; an engine may die of an unknown
    // id.
    for (vocabulary, drafted) in [(3, vec![1, 2]), (2, vec![1]), (1, vec![])] {
        let mut desk = Desk::with(rules(), of_vocabulary(vocabulary), Ending::default());
        let plain = desk.plain();
        let asked = desk.token(plain, 0);
        let Some((_, Action::Verify(draft, ..))) = asked.last() else { panic!("{asked:?}") };
        assert_eq!(draft.nodes().iter().map(|node| node.token).collect::<Vec<_>>(), drafted);
    }
    // Neither has one that the model drafter proposes.
    let (mut desk, draft) = asking_with(Rules { lookups: Vec::new(), ..rules() }, of_vocabulary(5));
    let asked = desk.tell(draft, Event::Draft(chain(&[4, 5])));
    let Some((_, Action::Verify(draft, ..))) = asked.last() else { panic!("{asked:?}") };
    assert_eq!(draft.nodes().iter().map(|node| node.token).collect::<Vec<_>>(), [4]);
}

#[test]
fn a_disconnected_client_cancels_pending_actions() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let asked = desk.tell(ActionId::WORLD, Event::ClientGone);
    assert!(matches!(asked[0], (_, Action::Cancel(id)) if id == verify));
    assert_eq!(summary(&asked).finish, None);
    assert_eq!(desk.tell(verify, rows(&[1, 2, 7])), []);
    assert_eq!(desk.tell(ActionId::WORLD, Event::ClientGone), []);
}

#[test]
fn the_operator_s_mode_holds_from_the_next_token() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    assert_eq!(desk.tell(ActionId::WORLD, Event::Mode(Some(PlainReason::Observe))), []);
    let on = stays_plain(&desk.tell(verify, rows(&[1, 7, 7])));
    assert_eq!(desk.session.summary().reason, Some(PlainReason::Observe));
    assert_eq!(desk.token(on, 0), []);
    desk.tell(ActionId::WORLD, Event::Mode(None));
    assert!(matches!(desk.token(on, 1)[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]));
}

#[test]
fn a_gate_is_kept_but_for_those_that_fixed_gamma_ignores() {
    let mut desk = desk();
    let plain = desk.plain();
    desk.tell(ActionId::WORLD, Event::Mode(Some(PlainReason::GateHealth)));
    assert_eq!(desk.token(plain, 0), []);
    assert_eq!(desk.session.summary().reason, Some(PlainReason::GateHealth));
    desk.tell(ActionId::WORLD, Event::Mode(Some(PlainReason::GateLoad)));
    assert_eq!(desk.token(plain, 1).len(), 2);
}

#[test]
fn the_draft_asks_for_no_more_tokens_than_the_limit_and_the_context_leave() {
    let mut desk = Desk::new(Rules { context_max: 9, ..rules() }, Ending::default());
    let (verify, draft) = desk.take_step();
    assert_eq!(draft.len(), 1, "7 tokens of context, one draft, one sample");
    stays_plain(&desk.tell(verify, rows(&[1, 2])));
    assert_eq!(desk.session.summary().reason, Some(PlainReason::ContextTooLong));

    // "abcabc…" continues by three tokens a round, until the limit of 12 leaves room for one and
    // its sample.
    let mut desk = self::desk();
    let (mut verify, mut draft) = desk.take_step();
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
    let (verify, _) = desk.take_step();
    let end = summary(&desk.tell(verify, rows(&[1, 2, 7])));
    assert_eq!((end.finish, end.output_tokens, end.accepted), (Some(Finish::Stop), 2, 1));
    assert_eq!(desk.text, "a");
}

/// A session with fixed gamma and a model drafter, after its first draft request.
fn asking(rules: Rules) -> (Desk, ActionId) {
    asking_with(rules, Resources::default())
}

fn asking_with(rules: Rules, resources: Resources) -> (Desk, ActionId) {
    let mut desk = Desk::with(rules, Resources { model: Some(0), ..resources }, Ending::default());
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let [(_, Action::Cancel(_)), (draft, Action::Draft { gamma: 2, .. })] = asked[..] else {
        panic!("{asked:?}")
    };
    (desk, draft)
}

fn chain(tokens: &[TokenId]) -> Tree {
    Tree::chain(tokens, Source::Model, Features::default())
}

/// Advances the clock to the session's deadline.
fn expire(desk: &mut Desk) -> Vec<(ActionId, Action)> {
    desk.now = desk.session.deadline().expect("a deadline").max(desk.now);
    desk.tell(ActionId::WORLD, Event::Timeout)
}

#[test]
fn the_first_draft_reads_the_prompt_and_is_waited_for_as_long_as_a_call_may_take() {
    let (mut desk, draft) = asking(rules());
    let bound = Timeouts::default().verify;
    assert_eq!(desk.session.deadline(), Some(desk.now.after(bound)), "a drafter that hangs holds no client");
    desk.now = desk.now.after(bound / 2);
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 5])));
    let [(verify, Action::Verify(sent, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(sent.path(1), [1, 5]);
    let asked = desk.tell(*verify, rows(&[1, 2, 3]));
    assert!(matches!(asked[..], [(_, Action::Draft { gamma: 2, .. })]), "{asked:?}");
}

#[rstest]
#[case::lookups_go_on(rules().lookups, &[1, 2])]
#[case::an_empty_round(Vec::new(), &[])]
fn a_late_draft_costs_its_round_and_nothing_else(#[case] lookups: Vec<LookupSpec>, #[case] sent: &[TokenId]) {
    let timeouts = Timeouts { draft: Some(Duration::from_millis(30)), ..Timeouts::default() };
    let (mut desk, draft) =
        asking_with(Rules { lookups, ..rules() }, Resources { timeouts, ..Resources::default() });
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 2])));
    let [(verify, Action::Verify(..))] = asked[..] else { panic!("{asked:?}") };
    let asked = desk.tell(verify, rows(&[1, 2, 0]));
    let [(late, Action::Draft { .. })] = asked[..] else { panic!("{asked:?}") };
    let asked = expire(&mut desk);
    let [(_, Action::Cancel(gone)), (verify, Action::Verify(draft, ..))] = &asked[..] else {
        panic!("{asked:?}")
    };
    let tokens: Vec<TokenId> = draft.nodes().iter().map(|node| node.token).collect();
    assert_eq!((*gone, tokens.as_slice()), (late, sent));
    assert_eq!(desk.tell(late, Event::Draft(chain(&[9, 9]))), [], "too late");
    // The next round uses the drafter again.
    let asked = desk.tell(*verify, rows(&[7, 7, 7][..=sent.len()]));
    assert!(matches!(asked[..], [(_, Action::Draft { .. })]), "{asked:?}");
    assert_eq!((desk.text.as_str(), desk.session.summary().reason), ("abcah", None));
}

#[test]
fn every_drafter_that_proposed_a_token_is_counted() {
    let (mut desk, draft) = asking(rules());
    // The lookup drafts the same two tokens.
    let asked = desk.tell(draft, Event::Draft(chain(&[1, 2])));
    let [(verify, Action::Verify(sent, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((sent.path(1), sent.len()), (vec![1, 2], 2));
    desk.tell(*verify, rows(&[1, 7, 7]));
    for source in [Source::PromptLookup, Source::Model] {
        let seen = desk
            .control
            .with(|learnt| learnt.survival.first_tokens(TemperatureBucket::Greedy, source.into()));
        assert_eq!(seen, (1.0, 1.0), "{source:?}");
    }
}

#[test]
fn a_drafter_that_fails_is_left_alone_for_a_while() {
    let (mut desk, draft) = asking(rules());
    // The round goes on with the draft of the lookup, and so does the next one.
    let asked = desk.tell(draft, Event::Fault(Fault::Draft));
    let [(verify, Action::Verify(sent, ..))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(sent.path(1), [1, 2]);
    let asked = desk.tell(*verify, rows(&[1, 2, 0]));
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    // Without a lookup there is nothing to verify.
    let (mut desk, draft) = asking(Rules { lookups: Vec::new(), ..rules() });
    let plain = stays_plain(&desk.tell(draft, Event::Fault(Fault::Draft)));
    assert_eq!(desk.session.summary().reason, Some(PlainReason::DraftFault));
    let asked = desk.token(plain, 1);
    assert!(matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]), "{asked:?}");
}

/// Plain decoding takes 10 ms a token, and the model drafter is accurate and fast.
fn teach(control: &Control) {
    control.with(|learnt| {
        (0..20).for_each(|_| learnt.costs.note_plain(0.010, 1, 1, control::Disturbance::default()));
        for nodes in (0..9).cycle().take(180) {
            learnt.costs.verified(Way::by(VerifyMethod::Tree, 0), nodes, control::Shared::default(), 0.010);
        }
        learnt.costs.drafted(0, 4, 0.001);
        let vote = Vote::new(Source::Model, Features::default());
        (0..40).for_each(|_| {
            learnt.survival.observe(TemperatureBucket::Greedy, vote, Agreement::Alone, 0, true);
        });
    });
}

#[test]
fn without_a_limit_a_draft_is_waited_for_the_time_of_two_plain_tokens() {
    let free = Rules { gamma_fixed: None, lookups: Vec::new(), ..rules() };
    let mut desk = Desk::with(free, with_a_model(), Ending::default());
    teach(&desk.control);
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let [(shadow, Action::Shadow { from: 0 })] = asked[..] else { panic!("{asked:?}") };
    assert_eq!(desk.session.deadline(), None, "a shadow pass concurrent with plain decoding delays nobody");
    assert_eq!(desk.tell(shadow, Event::Shadow(vec![Some(0), Some(1)])), []);
    let asked = desk.token(plain, 1);
    let [(_, Action::Cancel(_)), (_, Action::Draft { .. })] = asked[..] else { panic!("{asked:?}") };
    let patience = desk.session.deadline().expect("a deadline") - desk.now;
    let pace = desk.control.with(|learnt| learnt.costs.plain_token()).expect("measured");
    assert!((patience.as_secs_f64() - 2.0 * pace).abs() < 1e-5, "{patience:?} at {pace} s a token");
    // The round is lost, and the wait is recorded as the drafter's cost.
    let before = desk.control.with(|learnt| learnt.costs.draft_token(0));
    let asked = expire(&mut desk);
    assert!(matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]), "{asked:?}");
    assert!(desk.control.with(|learnt| learnt.costs.draft_token(0)) >= before);
}

#[test]
fn where_lookups_pay_from_the_first_token_on_the_model_reads_beside_their_rounds() {
    let free = Rules { gamma_fixed: None, ..rules() };
    let mut desk = Desk::with(free, with_a_model(), Ending::default());
    teach(&desk.control);
    desk.control.with(|learnt| {
        let vote = Vote::new(Source::PromptLookup, Features::matched(4));
        (0..60).for_each(|_| {
            (0..4).for_each(|depth| {
                learnt.survival.observe(TemperatureBucket::Greedy, vote, Agreement::Alone, depth, true);
            });
        });
    });
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let [(_, Action::Cancel(_)), (verify, Action::Verify(..)), (shadow, Action::Shadow { from: 0 })] =
        asked[..]
    else {
        panic!("{asked:?}")
    };
    let asked = desk.tell(verify, rows(&[1, 2, 0, 1, 2, 0, 1, 2, 0]));
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "one pass at a time: {asked:?}");
    assert_eq!(desk.tell(shadow, Event::Shadow(vec![Some(0)])), []);
    let [(verify, _)] = asked[..] else { panic!("{asked:?}") };
    let asked = desk.tell(verify, rows(&[1, 7, 7, 7, 7, 7, 7, 7, 7]));
    let shadows = asked.iter().filter(|(_, action)| matches!(action, Action::Shadow { .. })).count();
    assert_eq!(shadows, 0, "it has read: {asked:?}");
}

#[test]
fn a_plain_token_without_a_proposal_says_nothing_about_rounds_that_would_have_one() {
    let heads = vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 }), LookupSpec::Head];
    let shadow = Permission::Shadow(PlainReason::Shadow);
    let shared = Shared { proposes: true, ..Shared::default() };
    let watched = Rules { gamma_fixed: None, permission: shadow, lookups: heads, ..rules() };
    let mut desk = Desk::with(watched, Resources { shared, ..Resources::default() }, Ending::default());
    let plain = desk.plain();
    let counted = |desk: &Desk| {
        let class = Class::new(Source::PromptLookup.into(), TemperatureBucket::Greedy, 0);
        desk.control.with(|learnt| learnt.classes.of(class).map_or(0.0, |rounds| rounds.count()))
    };
    for token in [9, 10, 0] {
        desk.token(plain, token);
    }
    assert_eq!(counted(&desk), 0.0);
    let steps = vec![vec![(12, 0.9)], vec![(13, 0.9)]];
    desk.tell(plain, Event::Proposal(Proposal { behind: vec![11], steps }));
    // The lookup drafts 1, 2 behind 0; the round of both begins behind 11.
    for token in [11, 12, 13, 14] {
        desk.token(plain, token);
    }
    // It yields 3 tokens, and stands for the 3 before it too.
    assert_eq!(counted(&desk), 2.0);
}

#[test]
fn a_token_that_no_method_decides_is_decoded_plainly() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let plain = stays_plain(&desk.tell(verify, rows(&[])));
    assert_eq!(desk.session.summary().reason, Some(PlainReason::Undecided));
    let asked = desk.token(plain, 1);
    assert!(matches!(asked[..], [(_, Action::Cancel(_)), (_, Action::Verify(..))]), "{asked:?}");
}

#[test]
fn plain_decoding_to_the_limit_has_its_reason() {
    let free = Rules { gamma_fixed: None, ..rules() };
    let mut desk = Desk::new(free, Ending::default());
    let plain = desk.plain();
    // Nothing in this text repeats, so there is never a draft.
    for token in 10..21 {
        assert_eq!(desk.token(plain, token), [], "token {token}");
    }
    assert_eq!(desk.session.summary().reason, Some(PlainReason::NoDraft));
    let held = desk.token(plain, 21);
    assert_eq!(held, []);
    let end = summary(&desk.tell(plain, Event::PlainEnded(Finish::Length)));
    assert_eq!((end.reason, end.output_tokens), (Some(PlainReason::NoDraft), 12));
}

#[test]
fn plain_decoding_in_pieces_continues_and_a_short_piece_is_the_end() {
    let shadow = Permission::Shadow(PlainReason::Observe);
    let mut desk = Desk::new(Rules { segment: Some(2), permission: shadow, ..rules() }, Ending::default());
    let plain = desk.plain();
    desk.token(plain, 0);
    let on = stays_plain(&desk.tell(plain, Event::Fault(Fault::Plain)));
    desk.token(on, 1);
    desk.token(on, 2);
    let on = stays_plain(&desk.tell(on, Event::PlainEnded(Finish::Length)));
    desk.token(on, 3);
    let end = summary(&desk.tell(on, Event::PlainEnded(Finish::Length)));
    assert_eq!((end.finish, desk.text.as_str()), (Some(Finish::Length), "abcd"));
}

#[test]
fn an_undecided_position_goes_to_the_next_method_and_then_to_plain_decoding() {
    let mut desk = Desk::new(
        Rules { methods: vec![VerifyMethod::Score, VerifyMethod::FanOut], ..rules() },
        Ending::default(),
    );
    let plain = desk.plain();
    let asked = desk.token(plain, 0);
    let [_, (score, Action::Verify(draft, VerifyMethod::Score))] = &asked[..] else { panic!("{asked:?}") };
    let asked = desk.tell(*score, rows(&[]));
    let [(fan_out, Action::Verify(again, VerifyMethod::FanOut))] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((again, desk.text.as_str()), (draft, "a"));
    let asked = desk.tell(*fan_out, rows(&[]));
    stays_plain(&asked);
    assert_eq!((desk.text.as_str(), desk.session.summary().rounds), ("a", 0));
}

#[test]
fn an_open_position_inside_a_run_ends_the_round_before_it() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let asked = desk.tell(verify, rows(&[1, 2]));
    assert_eq!(desk.text, "abc");
    assert!(matches!(asked[..], [(_, Action::Verify(..))]), "{asked:?}");
    assert_eq!((desk.session.summary().accepted, desk.session.summary().output_tokens), (2, 3));
}

#[test]
fn a_reported_end_token_ends_the_text_without_being_text() {
    let mut desk = desk();
    let (verify, _) = desk.take_step();
    let ends = Row { ends: true, ..Row::of(1) };
    let asked = desk.tell(
        verify,
        Event::VerifyResult(VerifyResult {
            rows: vec![ends, Row::of(2), Row::of(3)],
            ..VerifyResult::default()
        }),
    );
    let end = summary(&asked);
    assert_eq!((end.finish, end.output_tokens, desk.text.as_str()), (Some(Finish::Stop), 2, "a"));
}
