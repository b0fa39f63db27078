use http::HeaderMap;

use super::*;
use crate::part::{DrafterPart, ModelState, TranslationMode, parts};
use crate::{
    Accept, Backend, Body, Bounds, Corpus, Drafter, Gamma, Gates, Group, Holdback, Match, Policy, PolicyMode,
    PolicySet, Revision, Server, ServerState, Terms, Understood, Vocabulary, Wish,
};
use foretell_core::draft::{LookupSpec, Ngram};
use foretell_core::words::{Mode, PlainReason, VerifyMethod};
use foretell_engines::{Dialect, Engine, Noise, ServerDefaults};
use foretell_wire::openai::{Control, Defaults, Route, understand};

const OPEN: &str = "nobody knows";

fn engine() -> Engine {
    Engine {
        methods: vec![VerifyMethod::Tree, VerifyMethod::FanOut],
        defaults: ServerDefaults {
            sampling: Some(Defaults { temperature: 0.6, ..Defaults::OPENAI }),
            ..ServerDefaults::default()
        },
        context: Some(4096),
        noise: Noise::Position,
        ..Engine::new(Dialect::Onnx, "m", "1")
    }
}

fn policy(mode: PolicyMode) -> Policy {
    Policy {
        name: "p".to_owned(),
        revision: Revision::default(),
        mode,
        matcher: Match::default(),
        drafters: vec![Drafter::Lookup(LookupSpec::PromptLookup(Ngram { min: 2, max: 8 }))],
        gamma: Gamma::default(),
        accept: Accept::default(),
        gates: Gates::default(),
        holdback: Holdback::default(),
        corpus: Corpus::default(),
    }
}

/// Owns all data that the facts borrow.
struct World {
    headers: HeaderMap,
    judged: Understood,
    refused: Understood,
    engine: Engine,
    terms: Terms,
    policies: [PolicySet; 3],
}

impl World {
    fn new() -> Self {
        let judge = |body: &str| understand(Route::Completions, body.as_bytes());
        let other = Match { backends: Some(vec![]), ..Match::default() };
        Self {
            headers: HeaderMap::new(),
            judged: judge(r#"{"model":"m","prompt":"a b","max_tokens":3}"#),
            refused: judge(r#"{"model":"m","prompt":"a b","n":2}"#),
            engine: engine(),
            terms: Terms { allow: vec![VerifyMethod::FanOut], context_max: 1000, bytes_max: 1 << 20 },
            policies: [
                PolicySet::new(vec![policy(PolicyMode::Auto)]),
                PolicySet::new(vec![policy(PolicyMode::Off)]),
                PolicySet::new(vec![Policy { matcher: other, ..policy(PolicyMode::Auto) }]),
            ],
        }
    }

    fn server(&self, single: Fact<bool>) -> Fact<ServerState<'_>> {
        Fact::Known(ServerState::Known(Server { single, ..self.known() }))
    }

    fn known(&self) -> Server<'_> {
        Server {
            engine: &self.engine,
            single: Fact::Known(true),
            nothing_pays: None,
            by_format: None,
            terms: &self.terms,
        }
    }

    /// Facts that lead to a session.
    fn facts(&self) -> Facts<'_> {
        let backend = Backend { name: "b", mode: Mode::Auto, speculates: true, injected: false };
        let head = Head {
            route: Route::Completions,
            api: Route::Completions.into(),
            headers: &self.headers,
            tenant: None,
            wish: Wish::Said(None),
            mode: Mode::Auto,
            speculates_anywhere: true,
            encoded: false,
        };
        Facts {
            head,
            body: Fact::Known(Body::from(&self.judged)),
            backend: Fact::Known(Some(backend)),
            session: Fact::Known(true),
            server: self.server(Fact::Known(true)),
            policies: Fact::Known(&self.policies[0]),
            models: &|_| ModelState::NotLoaded,
            group: &|_| Group::default(),
        }
    }

    /// Calls `each` with every combination of known, unknown and obstructive facts.
    fn all(&self, mut each: impl FnMut(&Facts<'_>)) {
        let usual = self.facts();
        let open = Fact::Unknown(OPEN);
        let Fact::Known(Some(backend)) = usual.backend else { panic!("it is known") };
        let wishes = [Wish::Said(None), Wish::Said(Some(Control::Plain)), Wish::Unreadable];
        let bodies =
            [open_of(), usual.body, Fact::Known(Body::TooLarge), Fact::Known(Body::from(&self.refused))];
        let backends = [
            Fact::Unknown(OPEN),
            Fact::Known(None),
            usual.backend,
            Fact::Known(Some(Backend { mode: Mode::Off, ..backend })),
            Fact::Known(Some(Backend { speculates: false, ..backend })),
        ];
        let servers = [
            Fact::Unknown(OPEN),
            usual.server,
            self.server(open),
            self.server(Fact::Known(false)),
            Fact::Known(ServerState::Down("gone")),
            Fact::Known(ServerState::Passthrough(PassthroughReason::Tokenizer, "no tokenizer")),
        ];
        let sets = [Fact::Unknown(OPEN)].into_iter().chain(self.policies.iter().map(Fact::Known));
        let sets: Vec<_> = sets.collect();
        for wish in wishes {
            for (speculates_anywhere, encoded) in [(true, false), (false, false), (true, true)] {
                for body in bodies {
                    for backend in backends {
                        for session in [open, Fact::Known(true), Fact::Known(false)] {
                            for server in servers {
                                for &policies in &sets {
                                    let mut facts = Facts { body, backend, ..usual.clone() };
                                    facts.head =
                                        Head { wish, speculates_anywhere, encoded, ..usual.head.clone() };
                                    (facts.session, facts.server, facts.policies) =
                                        (session, server, policies);
                                    each(&facts);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn open_of<T>() -> Fact<T> {
    Fact::Unknown(OPEN)
}

/// The steps up to the first that does not pass, as the proxy takes them.
fn decide(facts: &Facts<'_>) -> Outcome {
    walk(facts, Walk::default()).outcome
}

/// These facts with another `x-foretell`.
fn wishing(wish: Wish, mut facts: Facts<'_>) -> Facts<'_> {
    facts.head.wish = wish;
    facts
}

fn ends(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Serve(ruling) => format!("serve {:?}", ruling.rules.permission),
        other => format!("{other:?}"),
    }
}

#[test]
fn explaining_ends_as_deciding_does_at_the_first_step_that_does_not_pass() {
    let world = World::new();
    let mut kinds = std::collections::BTreeSet::new();
    world.all(|facts| {
        let (outcome, told) = (decide(facts), explain(facts));
        assert_eq!(ends(&outcome), ends(&told.outcome));
        assert_eq!(told.findings.len(), 13, "every step is walked");
        let stops = |finding: &&Finding| !matches!(finding.result, StepResult::Passed | StepResult::Plain(_));
        let first = told.findings.iter().find(stops).map(|finding| (finding.step, finding.result));
        match (&outcome, first) {
            (Outcome::Passthrough(passthrough), Some((_, StepResult::Passthrough(reason)))) => {
                assert_eq!(passthrough.reason, reason);
            }
            (Outcome::Undecided(step, _), Some((open, StepResult::Unknown))) => assert_eq!(*step, open),
            (Outcome::Serve(_), None)
            | (Outcome::Nobody, Some((_, StepResult::NoBackend | StepResult::Down))) => {}
            unlike => panic!("{unlike:?}"),
        }
        kinds.insert(ends(&outcome));
    });
    assert!(kinds.len() > 15, "{kinds:?}");
}

#[test]
fn more_facts_never_change_a_decision() {
    let world = World::new();
    let usual = world.facts();
    let known = |fact: Fact<bool>, then| if fact.known().is_some() { fact } else { then };
    world.all(|facts| {
        let before = decide(facts);
        let Outcome::Undecided(step, why) = before else { return };
        assert_eq!(why, OPEN);
        let mut more = facts.clone();
        match step {
            DecisionStep::Body => more.body = usual.body,
            DecisionStep::Backend => more.backend = usual.backend,
            DecisionStep::Session => more.session = known(facts.session, Fact::Known(true)),
            DecisionStep::Server => more.server = usual.server,
            DecisionStep::Policy => more.policies = usual.policies,
            other => panic!("{other:?} needs no fact of its own"),
        }
        // The decision continues after that step and never returns to an earlier one.
        if let Outcome::Undecided(next, _) = decide(&more) {
            assert!(next as u8 > step as u8, "{step:?} {next:?}");
        }
    });
}

#[test]
fn a_ruling_combines_the_limits_of_policy_client_operator_and_server() {
    let world = World::new();
    let facts = wishing(Wish::Said(Some(Control::Gamma(3))), world.facts());
    let Outcome::Serve(ruling) = decide(&facts) else { panic!("nothing stands in the way") };
    assert_eq!(
        (ruling.name.as_str(), ruling.rules.permission),
        ("p@00000000", foretell_core::session::Permission::Speculate)
    );
    assert_eq!((ruling.rules.gamma_max, ruling.rules.methods.as_slice()), (3, &[VerifyMethod::FanOut][..]));
    assert_eq!((ruling.rules.context_max, ruling.bytes_max), (1000, 1 << 20));
    assert!((ruling.sampling.temperature - 0.6).abs() < 1e-12, "the server's default");
    assert_eq!((ruling.rules.lookups.len(), ruling.model), (1, None));
}

fn permission(facts: &Facts<'_>) -> foretell_core::session::Permission {
    match decide(facts) {
        Outcome::Serve(ruling) => ruling.rules.permission,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_strictest_permission_holds() {
    use foretell_core::session::Permission::{Plain, Shadow, Speculate};
    let world = World::new();
    let sets = |mode| PolicySet::new(vec![policy(mode)]);
    let (auto, shadow, plain) = (sets(PolicyMode::Auto), sets(PolicyMode::Shadow), sets(PolicyMode::Plain));
    let plain_wish = Wish::Said(Some(Control::Plain));
    let none = Wish::Said(None);
    for (mode, policies, wish, wanted) in [
        (Mode::Auto, &auto, none, Speculate),
        (Mode::Auto, &auto, plain_wish, Plain(PlainReason::Client)),
        (Mode::Auto, &shadow, none, Shadow(PlainReason::Shadow)),
        (Mode::Auto, &plain, plain_wish, Plain(PlainReason::Policy)),
        (Mode::Observe, &auto, none, Shadow(PlainReason::Observe)),
        (Mode::Observe, &shadow, plain_wish, Plain(PlainReason::Client)),
        (Mode::Observe, &plain, none, Plain(PlainReason::Policy)),
    ] {
        let usual = world.facts();
        let backend = usual.backend.known().flatten().map(|backend| Backend { mode, ..backend });
        let facts =
            Facts { backend: Fact::Known(backend), policies: Fact::Known(policies), ..wishing(wish, usual) };
        assert_eq!(permission(&facts), wanted);
    }
}

#[test]
fn no_speculation_on_a_server_that_speculates_itself_or_where_nothing_pays() {
    use foretell_core::session::Permission::{Plain, Speculate};
    let world = World::new();
    let itself = Engine { speculates: true, ..engine() };
    let forced = Gamma { fixed: Some(2), ..Gamma::default() };
    let forced = PolicySet::new(vec![Policy { gamma: forced, ..policy(PolicyMode::Auto) }]);
    let of = |engine, nothing_pays, policies| {
        let server = Server { engine, nothing_pays, ..world.known() };
        permission(&Facts {
            server: Fact::Known(ServerState::Known(server)),
            policies: Fact::Known(policies),
            ..world.facts()
        })
    };
    let auto = &world.policies[0];
    assert_eq!(of(&itself, None, auto), Plain(PlainReason::BackendSpeculates));
    assert_eq!(of(&world.engine, Some(true), auto), Plain(PlainReason::NoGain));
    assert_eq!(of(&world.engine, Some(true), &forced), Speculate, "gamma.fixed speculates whatever it costs");
    assert_eq!(of(&world.engine, Some(false), auto), Speculate);
}

#[test]
fn the_format_of_answers_comes_before_the_comparison_and_the_length_of_the_prompt() {
    use foretell_core::session::Permission::{Plain, Shadow, Speculate};
    let world = World::new();
    let judged = understand(Route::Completions, br#"{"model":"m","prompt":[1,2,3],"max_tokens":5}"#);
    let of = |by_format, is_slower, context_max| {
        let terms = Terms { context_max, ..world.terms.clone() };
        let server = Server { by_format, terms: &terms, ..world.known() };
        permission(&Facts {
            server: Fact::Known(ServerState::Known(server)),
            body: Fact::Known(Body::from(&judged)),
            group: &|_| Group { in_control: false, is_slower },
            ..world.facts()
        })
    };
    for format in [Plain(PlainReason::Parser), Shadow(PlainReason::Parser)] {
        assert_eq!(of(Some(format), true, 1000), format);
        assert_eq!(of(Some(format), false, 2), format);
    }
    assert_eq!(of(None, true, 2), Shadow(PlainReason::GateControl));
    assert_eq!(of(None, false, 2), Plain(PlainReason::ContextTooLong));
    assert_eq!(of(None, false, 3), Speculate);
}

#[test]
fn a_match_on_a_server_default_is_undecided_until_the_server_is_known() {
    let world = World::new();
    let matcher = Match { temperature: Bounds { min: None, max: Some(0.5) }, ..Match::default() };
    let cold = PolicySet::new(vec![Policy { matcher, ..policy(PolicyMode::Auto) }]);
    let facts = Facts { policies: Fact::Known(&cold), ..world.facts() };
    assert!(
        matches!(decide(&facts), Outcome::Passthrough(passthrough) if passthrough.reason == PassthroughReason::NoPolicy)
    );
    let open = Facts { server: Fact::Unknown(OPEN), ..facts };
    let told = explain(&open);
    assert!(matches!(told.outcome, Outcome::Undecided(DecisionStep::Server, OPEN)));
    let of = |step| told.findings.iter().find(|finding| finding.step == step).map(|finding| finding.result);
    assert_eq!(of(DecisionStep::Policy), Some(StepResult::Unknown));
    assert_eq!(told.temperature.known(), None);
}

#[test]
fn the_first_model_that_can_draft_drafts() {
    let world = World::new();
    let model = |name: &str, vocabulary| Drafter::Model { model: name.to_owned(), vocabulary, shares: false };
    let drafters = vec![
        model("said to be the same", Vocabulary::Same),
        model("foreign", Vocabulary::Slem),
        model("ready", Vocabulary::Same),
    ];
    let set = PolicySet::new(vec![Policy { drafters, ..policy(PolicyMode::Auto) }]);
    let states = |name: &str| match name {
        "ready" => ModelState::Ready,
        _ => ModelState::OtherVocabulary("one is not the other".to_owned()),
    };
    let facts = Facts { policies: Fact::Known(&set), models: &states, ..world.facts() };
    let Outcome::Serve(ruling) = decide(&facts) else { panic!("nothing stands in the way") };
    let first = ("foreign".to_owned(), TranslationMode::Slem);
    assert_eq!((ruling.model, ruling.rules.lookups.len()), (Some(first), 0));
    let refused = set.policies()[0].drafters[0].part(None, states);
    assert!(
        matches!(refused, DrafterPart::Absent(why) if why.ends_with("`vocabulary: same`, and one is not the other"))
    );
    let all = parts(&set.policies()[0].drafters, None, states);
    assert!(matches!(
        &all[1..],
        [DrafterPart::ModelDrafter("foreign", _), DrafterPart::ModelDrafter("ready", _)]
    ));
    let none = Facts { models: &|_| ModelState::NotLoaded, ..facts };
    let told = explain(&none);
    assert_eq!(told.findings.last().map(|last| last.result), Some(StepResult::Plain(PlainReason::NoDraft)));
}
