use http::HeaderMap;

use super::*;
use crate::dialect::{Dialect, Engine, Noise};
use crate::openai::{Control, Defaults, Judgement, Route, judge};
use crate::policy::part::{ModelState, Part, Speech, parts};
use crate::policy::{
    Accept, Backend, Body, Bounds, Drafter, Gamma, Gates, Holdback, Match, Policy, PolicyMode, PolicySet,
    Revision, Server, ServerState, Terms, Vocabulary, Wish,
};
use crate::words::{Mode, Plan};

const OPEN: &str = "nobody knows";

fn engine() -> Engine {
    Engine {
        plans: vec![Plan::Tree, Plan::FanOut],
        defaults: Some(Defaults { temperature: 0.6, ..Defaults::OPENAI }),
        context: Some(4096),
        noise: Noise::Place,
        ..Engine::new(Dialect::Onnx, "m", "1")
    }
}

fn policy(mode: PolicyMode) -> Policy {
    Policy {
        name: "p".to_owned(),
        revision: Revision::default(),
        mode,
        matcher: Match::default(),
        drafters: vec![Drafter::PromptLookup { ngram_min: 2, ngram_max: 8 }],
        gamma: Gamma::default(),
        accept: Accept::default(),
        gates: Gates::default(),
        holdback: Holdback::default(),
    }
}

/// Owns everything that facts borrow.
struct World {
    headers: HeaderMap,
    judged: Judgement,
    refused: Judgement,
    engine: Engine,
    terms: Terms,
    policies: [PolicySet; 3],
}

impl World {
    fn new() -> Self {
        let judge = |body: &str| judge(Route::Completions, body.as_bytes());
        let other = Match { backends: Some(vec![]), ..Match::default() };
        Self {
            headers: HeaderMap::new(),
            judged: judge(r#"{"model":"m","prompt":"a b","max_tokens":3}"#),
            refused: judge(r#"{"model":"m","prompt":"a b","n":2}"#),
            engine: engine(),
            terms: Terms { allow: vec![Plan::FanOut], context_max: 1000, bytes_max: 1 << 20 },
            policies: [
                PolicySet::new(vec![policy(PolicyMode::Auto)]),
                PolicySet::new(vec![policy(PolicyMode::Off)]),
                PolicySet::new(vec![Policy { matcher: other, ..policy(PolicyMode::Auto) }]),
            ],
        }
    }

    fn server(&self, single: Fact<bool>) -> Fact<ServerState<'_>> {
        let server = Server { engine: &self.engine, single, nothing_pays: None, terms: &self.terms };
        Fact::Known(ServerState::Known(server))
    }

    /// Facts that lead to a session.
    fn facts(&self) -> Facts<'_> {
        let backend =
            Backend { name: "b", mode: Mode::Auto, predicts: false, billed: false, speculates: true };
        Facts {
            route: Route::Completions,
            headers: &self.headers,
            tenant: None,
            wish: Wish::Said(None),
            mode: Mode::Auto,
            leaps: true,
            encoded: false,
            body: Fact::Known(Body::from(&self.judged)),
            backend: Fact::Known(Some(backend)),
            session: Fact::Known(true),
            server: self.server(Fact::Known(true)),
            policies: Fact::Known(&self.policies[0]),
            models: &|_| ModelState::NotLoaded,
        }
    }

    /// Calls `each` with every combination of known, unknown and obstructive facts.
    fn all(&self, mut each: impl FnMut(&Facts<'_>)) {
        let usual = self.facts();
        let open = Fact::Unknown(OPEN);
        let Fact::Known(Some(backend)) = usual.backend else { panic!("it is known") };
        let wishes = [Wish::Said(None), Wish::Said(Some(Control::Ride)), Wish::Unreadable];
        let bodies =
            [open_of(), usual.body, Fact::Known(Body::TooLarge), Fact::Known(Body::from(&self.refused))];
        let backends = [
            Fact::Unknown(OPEN),
            Fact::Known(None),
            usual.backend,
            Fact::Known(Some(Backend { mode: Mode::Off, ..backend })),
            Fact::Known(Some(Backend { predicts: true, ..backend })),
            Fact::Known(Some(Backend { speculates: false, ..backend })),
        ];
        let servers = [
            Fact::Unknown(OPEN),
            usual.server,
            self.server(open),
            self.server(Fact::Known(false)),
            Fact::Known(ServerState::Down("gone")),
            Fact::Known(ServerState::Relayed(BypassReason::Tokenizer, "no tokenizer")),
        ];
        let sets = [Fact::Unknown(OPEN)].into_iter().chain(self.policies.iter().map(Fact::Known));
        let sets: Vec<_> = sets.collect();
        for wish in wishes {
            for (leaps, encoded) in [(true, false), (false, false), (true, true)] {
                for body in bodies {
                    for backend in backends {
                        for session in [open, Fact::Known(true), Fact::Known(false)] {
                            for server in servers {
                                for &policies in &sets {
                                    let mut facts =
                                        Facts { wish, leaps, encoded, body, backend, ..usual.clone() };
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

fn ends(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Drive(ruling) => format!("drive {:?}", ruling.rules.permission),
        other => format!("{other:?}"),
    }
}

#[test]
fn saying_why_ends_as_deciding_does_and_at_the_first_step_that_does_not_pass() {
    let world = World::new();
    let mut kinds = std::collections::BTreeSet::new();
    world.all(|facts| {
        let (outcome, told) = (decide(facts), decide_and_say_why(facts));
        assert_eq!(ends(&outcome), ends(&told.outcome));
        assert_eq!(told.findings.len(), 13, "every step is walked");
        let stops = |finding: &&Finding| !matches!(finding.verdict, Verdict::Passed | Verdict::Rides(_));
        let first = told.findings.iter().find(stops).map(|finding| (finding.step, finding.verdict));
        match (&outcome, first) {
            (Outcome::Bypass(bypass), Some((_, Verdict::Bypass(reason)))) => {
                assert_eq!(bypass.reason, reason);
            }
            (Outcome::Undecided(step, _), Some((open, Verdict::Unknown))) => assert_eq!(*step, open),
            (Outcome::Drive(_), None) | (Outcome::Nobody, Some((_, Verdict::NoBackend | Verdict::Down))) => {}
            unlike => panic!("{unlike:?}"),
        }
        kinds.insert(ends(&outcome));
    });
    assert!(kinds.len() > 15, "{kinds:?}");
}

#[test]
fn asking_again_with_more_facts_never_changes_what_was_decided() {
    let world = World::new();
    let usual = world.facts();
    let known = |fact: Fact<bool>, then| if fact.known().is_some() { fact } else { then };
    world.all(|facts| {
        let before = decide(facts);
        let Outcome::Undecided(step, why) = before else { return };
        assert_eq!(why, OPEN);
        let mut more = facts.clone();
        match step {
            Step::Body => more.body = usual.body,
            Step::Backend => more.backend = usual.backend,
            Step::Session => more.session = known(facts.session, Fact::Known(true)),
            Step::Server => more.server = usual.server,
            Step::Policy => more.policies = usual.policies,
            other => panic!("{other:?} needs no fact of its own"),
        }
        // It goes on after that step and never returns to an earlier one.
        if let Outcome::Undecided(next, _) = decide(&more) {
            assert!(next as u8 > step as u8, "{step:?} {next:?}");
        }
    });
}

#[test]
fn a_ruling_is_what_policy_client_operator_and_server_allow_together() {
    let world = World::new();
    let facts = Facts { wish: Wish::Said(Some(Control::Gamma(3))), ..world.facts() };
    let Outcome::Drive(ruling) = decide(&facts) else { panic!("nothing stands in the way") };
    assert_eq!(
        (ruling.name.as_str(), ruling.rules.permission),
        ("p@00000000", crate::session::Permission::Leap)
    );
    assert_eq!((ruling.rules.gamma_max, ruling.rules.plans.as_slice()), (3, &[Plan::FanOut][..]));
    assert_eq!((ruling.rules.context_max, ruling.bytes_max), (1000, 1 << 20));
    assert!((ruling.sampling.temperature - 0.6).abs() < 1e-12, "the server's default");
    assert_eq!((ruling.rules.lookups.len(), ruling.models.len()), (1, 0));
}

fn drive(facts: &Facts<'_>) -> crate::session::Permission {
    match decide(facts) {
        Outcome::Drive(ruling) => ruling.rules.permission,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_strictest_of_all_wishes_holds() {
    use crate::session::Permission::{Leap, Ride, Shadow};
    let world = World::new();
    let sets = |mode| PolicySet::new(vec![policy(mode)]);
    let (auto, shadow, ride) = (sets(PolicyMode::Auto), sets(PolicyMode::Shadow), sets(PolicyMode::Ride));
    let rides = Wish::Said(Some(Control::Ride));
    let none = Wish::Said(None);
    for (mode, policies, wish, wanted) in [
        (Mode::Auto, &auto, none, Leap),
        (Mode::Auto, &auto, rides, Ride(RideReason::Client)),
        (Mode::Auto, &shadow, none, Shadow(RideReason::Shadow)),
        (Mode::Auto, &ride, rides, Ride(RideReason::Policy)),
        (Mode::Observe, &auto, none, Shadow(RideReason::Observe)),
        (Mode::Observe, &shadow, rides, Ride(RideReason::Client)),
        (Mode::Observe, &ride, none, Ride(RideReason::Policy)),
    ] {
        let usual = world.facts();
        let backend = usual.backend.known().flatten().map(|backend| Backend { mode, ..backend });
        let facts = Facts { backend: Fact::Known(backend), policies: Fact::Known(policies), wish, ..usual };
        assert_eq!(drive(&facts), wanted);
    }
}

#[test]
fn a_server_that_speculates_or_where_nothing_pays_is_never_leapt_on() {
    use crate::session::Permission::{Leap, Ride};
    let world = World::new();
    let itself = Engine { speculates: true, ..engine() };
    let forced = Gamma { fixed: Some(2), ..Gamma::default() };
    let forced = PolicySet::new(vec![Policy { gamma: forced, ..policy(PolicyMode::Auto) }]);
    let of = |engine, nothing_pays, policies| {
        let server = Server { engine, single: Fact::Known(true), nothing_pays, terms: &world.terms };
        drive(&Facts {
            server: Fact::Known(ServerState::Known(server)),
            policies: Fact::Known(policies),
            ..world.facts()
        })
    };
    let auto = &world.policies[0];
    assert_eq!(of(&itself, None, auto), Ride(RideReason::BackendSpeculates));
    assert_eq!(of(&world.engine, Some(true), auto), Ride(RideReason::NoGain));
    assert_eq!(of(&world.engine, Some(true), &forced), Leap, "gamma.fixed leaps whatever it costs");
    assert_eq!(of(&world.engine, Some(false), auto), Leap);
}

#[test]
fn a_policy_whose_match_hangs_on_a_default_is_open_until_the_server_is_asked() {
    let world = World::new();
    let matcher = Match { temperature: Bounds { min: None, max: Some(0.5) }, ..Match::default() };
    let cold = PolicySet::new(vec![Policy { matcher, ..policy(PolicyMode::Auto) }]);
    let facts = Facts { policies: Fact::Known(&cold), ..world.facts() };
    assert!(matches!(decide(&facts), Outcome::Bypass(bypass) if bypass.reason == BypassReason::NoPolicy));
    let open = Facts { server: Fact::Unknown(OPEN), ..facts };
    let told = decide_and_say_why(&open);
    assert!(matches!(told.outcome, Outcome::Undecided(Step::Server, OPEN)));
    let of = |step| told.findings.iter().find(|finding| finding.step == step).map(|finding| finding.verdict);
    assert_eq!(of(Step::Policy), Some(Verdict::Unknown));
    assert_eq!(told.temperature.known(), None);
}

#[test]
fn every_model_that_can_speak_to_the_target_may_be_asked() {
    let world = World::new();
    let model = |name: &str, vocabulary| Drafter::Model { model: name.to_owned(), vocabulary };
    let drafters = vec![
        model("said to be the same", Vocabulary::Same),
        model("foreign", Vocabulary::Tli),
        model("ready", Vocabulary::Same),
    ];
    let set = PolicySet::new(vec![Policy { drafters, ..policy(PolicyMode::Auto) }]);
    let states = |name: &str| match name {
        "ready" => ModelState::Ready,
        _ => ModelState::OtherVocabulary("one is not the other".to_owned()),
    };
    let facts = Facts { policies: Fact::Known(&set), models: &states, ..world.facts() };
    let Outcome::Drive(ruling) = decide(&facts) else { panic!("nothing stands in the way") };
    let both = [("foreign".to_owned(), Speech::Tli), ("ready".to_owned(), Speech::Same)];
    assert_eq!((ruling.models.as_slice(), ruling.rules.lookups.len()), (&both[..], 0));
    let refused = set.policies()[0].drafters[0].part(states);
    assert!(
        matches!(refused, Part::Absent(why) if why.ends_with("`vocabulary: same`, and one is not the other"))
    );
    let all = parts(&set.policies()[0].drafters, states);
    assert!(matches!(&all[1..], [Part::Asked("foreign", _), Part::Asked("ready", _)]));
    let none = Facts { models: &|_| ModelState::NotLoaded, ..facts };
    let told = decide_and_say_why(&none);
    assert_eq!(told.findings.last().map(|last| last.verdict), Some(Verdict::Rides(RideReason::NoDraft)));
}
