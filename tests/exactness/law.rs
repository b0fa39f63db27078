//! Full enumeration: the law of what the client gets, computed exactly, against the law of the plain run.
//!
//! Every random choice of the world is enumerated with its exact weight, over small vocabularies, short
//! drafts, both plans and all patterns of switches. And a proof that can fail: planted bugs, each of which
//! the same enumeration must catch.

use std::sync::Arc;

use crate::toy::{Law, Toy, distance, law};
use crate::world::{Ask, Case, Hooks, plain, play, play_knowing};
use foretell::control::{Control, Heat};
use foretell::draft::{Features, LookupSpec, Ngram, Node, Source, Tree};
use foretell::session::accept::{Accepted, Judge, Rule, Walk as _};
use foretell::session::{Ending, Rules};
use foretell::units::TokenId;
use foretell::words::{Plan, Row, Verdict};
use rstest::rstest;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Drafter {
    /// The lookup drafter in the session itself.
    Lookup,
    /// A chain of the target's favourites, now and then a wrong one.
    Chain,
    /// A bush: two children at every node.
    Bush,
}

fn node(token: TokenId, parent: Option<usize>) -> Node {
    Node { token, parent, source: Source::Model, features: Features::default() }
}

fn bush(toy: Toy, context: &[TokenId], gamma: usize, siblings: usize) -> Tree {
    let mut tree = Tree::default();
    let mut places: Vec<Option<usize>> = vec![None];
    while let Some(place) = places.first().copied() {
        places.remove(0);
        let path = place.map(|node| tree.path(node)).unwrap_or_default();
        let full: Vec<TokenId> = context.iter().chain(&path).copied().collect();
        for rank in 0..siblings {
            if tree.len() == gamma {
                return tree;
            }
            places.push(Some(tree.push(node(toy.favourite(&full, rank), place))));
        }
    }
    tree
}

fn case(toy: Toy, drafter: Drafter, gamma: usize, plan: Plan) -> Case {
    let letters = (0..toy.vocabulary).map(|token| vec![b'a' + token as u8]).collect();
    let lookups = match drafter {
        Drafter::Lookup => vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 })],
        Drafter::Chain | Drafter::Bush => Vec::new(),
    };
    let rules = Rules {
        plans: vec![plan],
        gamma_fixed: Some(gamma),
        lookups,
        model: drafter != Drafter::Lookup,
        ..Rules::default()
    };
    Case {
        prompt: vec![0, 1, 0, 1, 2],
        vocabulary: Arc::new(letters),
        ending: Ending { eos: vec![toy.vocabulary as TokenId - 1], ..Ending::default() },
        max: 4,
        rules,
    }
}

fn draft(drafter: Drafter, toy: Toy, context: &[TokenId], gamma: usize) -> Tree {
    match drafter {
        Drafter::Lookup => Tree::default(),
        Drafter::Chain => bush(toy, context, gamma, 1),
        Drafter::Bush => bush(toy, context, gamma, 2),
    }
}

fn key(text: &str, tokens: &[TokenId], finish: &str) -> String {
    format!("{text}|{tokens:?}|{finish}")
}

fn plain_law(toy: Toy, case: &Case) -> Law {
    law(|oracle| {
        let mut sample = |ask: &Ask<'_>| oracle.pick(&toy.weights(ask.context)) as TokenId;
        let (text, tokens, finish) = plain(case, &mut sample);
        key(&text, &tokens, finish.name())
    })
}

// ---- one-hot drafts, fresh randomness ----------------------------------------------------------------------

#[derive(Clone, Copy, Default)]
struct Bugs {
    redraw: usize,
    race: bool,
    unread: bool,
}

/// The law through the session; bit n < 3 of `switches` says whether leaping is allowed at the n-th token
/// event, bit 3 whether a ride brings two tokens at once.
fn session_law(toy: Toy, drafter: Drafter, case: &Case, switches: u32, bugs: Bugs) -> Law {
    law(|oracle| {
        let outcome = play(
            case,
            &mut Hooks {
                sample: &mut |ask| oracle.pick(&toy.weights(ask.context)) as TokenId,
                draft: &mut |context, gamma| draft(drafter, toy, context, gamma),
                allow: &mut |event, unread| {
                    if bugs.unread { unread != Some(0) } else { switches >> event.min(2) & 1 == 1 }
                },
                chunk: &mut || 1 + (switches as usize >> 3),
                chaos: &mut || None,
                redraw: bugs.redraw,
                race: bugs.race,
            },
        );
        let finish = outcome.summary.finish.expect("ended");
        assert_eq!(outcome.summary.output_tokens as usize, outcome.tokens.len());
        key(&outcome.text, &outcome.tokens, finish.name())
    })
}

#[rstest]
fn one_hot_drafts_keep_the_law(
    #[values(Drafter::Lookup, Drafter::Chain, Drafter::Bush)] drafter: Drafter,
    #[values(Plan::FanOut, Plan::Tree)] plan: Plan,
    #[values(3, 4)] vocabulary: usize,
    #[values(11, 42)] salt: u64,
) {
    for gamma in 1..=3 {
        let toy = Toy { vocabulary, salt: salt + gamma as u64 };
        let case = Case { max: if vocabulary == 3 { 4 } else { 3 }, ..case(toy, drafter, gamma, plan) };
        let plain = plain_law(toy, &case);
        for switches in 0..16 {
            let law = session_law(toy, drafter, &case, switches, Bugs::default());
            let tv = distance(&plain, &law);
            assert!(tv < 1e-12, "gamma {gamma}, switches {switches:b}: {tv}");
        }
    }
}

/// A store that has seen so much acceptance and such cheap calls that sessions leap by their own judgement.
fn confident(plan: Plan) -> Control {
    let control = Control::new();
    control.with(|learnt| {
        (0..20).for_each(|_| learnt.costs.rode(0.010, 1));
        for nodes in 0..4 {
            learnt.costs.verified(plan, nodes, 0.004, foretell::units::Tick(1));
        }
        learnt.costs.entered(plan, 1, 0.004, foretell::units::Tick(1));
        learnt.costs.left(0.010);
        let lookup = Tree::chain(&[0], Source::PromptLookup, Features { match_len: 2, margin: 0.0 });
        for node in [lookup.nodes()[0], node(0, None)] {
            (0..20).for_each(|_| learnt.survival.observe(Heat::Greedy, &node, 0, true));
        }
        learnt.costs.drafted(4, 0.001);
    });
    control
}

#[rstest]
fn the_session_s_own_judgement_keeps_the_law(
    #[values(Drafter::Lookup, Drafter::Chain, Drafter::Bush)] drafter: Drafter,
    #[values(Plan::FanOut, Plan::Tree)] plan: Plan,
) {
    let toy = Toy { vocabulary: 3, salt: 17 };
    let mut case = Case { max: 5, ..case(toy, drafter, 2, plan) };
    case.rules.gamma_fixed = None;
    case.rules.gamma_max = 2;
    let (mut leapt, mut rode) = (0, 0);
    let law = law(|oracle| {
        let outcome = play_knowing(
            &case,
            confident(plan),
            &mut Hooks {
                sample: &mut |ask| oracle.pick(&toy.weights(ask.context)) as TokenId,
                draft: &mut |context, gamma| draft(drafter, toy, context, gamma),
                allow: &mut |_, _| true,
                chunk: &mut || 1,
                chaos: &mut || None,
                redraw: 0,
                race: false,
            },
        );
        leapt += u32::from(outcome.summary.speculated);
        rode += u32::from(!outcome.summary.speculated);
        key(&outcome.text, &outcome.tokens, outcome.summary.finish.expect("ended").name())
    });
    let tv = distance(&plain_law(toy, &case), &law);
    assert!(tv < 1e-12, "{tv}");
    assert!(leapt > 100 && rode > 0, "too tame: {leapt} leapt, {rode} rode");
}

#[rstest]
#[case::redraw_until_match(Bugs { redraw: 1, ..Bugs::default() })]
#[case::ride_raced_against_leap(Bugs { race: true, ..Bugs::default() })]
#[case::switch_on_an_unread_sample(Bugs { unread: true, ..Bugs::default() })]
fn a_world_that_selects_samples_is_caught(#[case] bugs: Bugs) {
    let toy = Toy { vocabulary: 3, salt: 5 };
    let case = case(toy, Drafter::Chain, 2, Plan::FanOut);
    let case = Case { max: 3, ..case };
    let plain = plain_law(toy, &case);
    assert!(distance(&plain, &session_law(toy, Drafter::Chain, &case, 7, Bugs::default())) < 1e-12);
    let tv = distance(&plain, &session_law(toy, Drafter::Chain, &case, 7, bugs));
    assert!(tv > 1e-3, "not caught: {tv}");
}

// ---- noise-coupled drafts ------------------------------------------------------------------------------------

/// Kinds of noise at a place, with their weights, and the noise of each kind for each token.
const NOISE_WEIGHTS: [f64; 3] = [0.5, 0.3, 0.2];
const NOISE: [[f64; 4]; 3] = [[0.0, 0.9, -0.4, 0.2], [1.4, -0.3, 0.1, 0.5], [-0.6, 0.2, 1.7, 0.9]];

#[derive(Clone, Copy, Debug, PartialEq)]
enum NoiseBug {
    None,
    KeyedByRound,
    WithoutToken,
    RestartedPerCall,
}

/// argmax of logit and noise: the target's, or the drafter's with its own logits and the same noise.
fn coupled(weights: &[f64], kind: usize, without_token: bool) -> TokenId {
    let score = |token: usize| weights[token].ln() + NOISE[kind][if without_token { 0 } else { token }];
    (0..weights.len()).max_by(|&a, &b| score(a).total_cmp(&score(b)).then(b.cmp(&a))).unwrap_or(0) as TokenId
}

/// Joint law of the noise and the text: with a seed the text is a function of it, plain or not.
fn noisy_law(toy: Toy, case: &Case, switches: Option<u32>, bug: NoiseBug) -> Law {
    law(|oracle| {
        // Places beyond the limit are sampled by eager backends but never read.
        let mut kinds: Vec<usize> = (0..case.max).map(|_| oracle.pick(&NOISE_WEIGHTS)).collect();
        kinds.extend([0; 4]);
        let mut sample = |ask: &Ask<'_>| {
            let place = match bug {
                NoiseBug::None | NoiseBug::WithoutToken => ask.position,
                NoiseBug::KeyedByRound => (ask.position + ask.call) % case.max,
                NoiseBug::RestartedPerCall => ask.offset,
            };
            coupled(&toy.weights(ask.context), kinds[place], bug == NoiseBug::WithoutToken)
        };
        let (text, tokens, finish) = match switches {
            None => plain(case, &mut sample),
            Some(switches) => {
                let drafter = Toy { salt: toy.salt + 1, ..toy };
                let outcome = play(
                    case,
                    &mut Hooks {
                        sample: &mut sample,
                        draft: &mut |context, gamma| {
                            let mut full = context.to_vec();
                            for position in (context.len() - case.prompt.len()..).take(gamma) {
                                full.push(coupled(&drafter.weights(&full), kinds[position], false));
                            }
                            Tree::chain(&full[context.len()..], Source::Model, Features::default())
                        },
                        allow: &mut |event, _| switches >> event & 1 == 1,
                        chunk: &mut || 1,
                        chaos: &mut || None,
                        redraw: 0,
                        race: false,
                    },
                );
                (outcome.text, outcome.tokens, outcome.summary.finish.expect("ended"))
            }
        };
        format!("{kinds:?} {}", key(&text, &tokens, finish.name()))
    })
}

#[rstest]
fn noise_coupled_drafts_keep_every_seeded_text(
    #[values(Plan::FanOut, Plan::Tree)] plan: Plan,
    #[values(3, 4)] vocabulary: usize,
) {
    for gamma in 1..=3 {
        let toy = Toy { vocabulary, salt: 31 };
        let case = case(toy, Drafter::Chain, gamma, plan);
        let plain = noisy_law(toy, &case, None, NoiseBug::None);
        for switches in 0..16 {
            let tv = distance(&plain, &noisy_law(toy, &case, Some(switches), NoiseBug::None));
            assert!(tv < 1e-12, "gamma {gamma}, switches {switches:b}: {tv}");
        }
    }
}

#[rstest]
#[case(NoiseBug::KeyedByRound)]
#[case(NoiseBug::WithoutToken)]
#[case(NoiseBug::RestartedPerCall)]
fn wrong_noise_is_caught(#[case] bug: NoiseBug) {
    let toy = Toy { vocabulary: 3, salt: 31 };
    let case = case(toy, Drafter::Chain, 2, Plan::Tree);
    let plain = noisy_law(toy, &case, None, NoiseBug::None);
    let tv = distance(&plain, &noisy_law(toy, &case, Some(15), bug));
    assert!(tv > 1e-3, "not caught: {tv}");
}

// ---- mutated walks -------------------------------------------------------------------------------------------

/// What a round emits, given the draft and the samples.
type Walk = fn(&Tree, &Verdict) -> Vec<TokenId>;

fn shipped(draft: &Tree, verdict: &Verdict) -> Accepted {
    Judge::new(Rule::Exact, 0).walk(draft, verdict, 0).expect("fits")
}

fn right(draft: &Tree, verdict: &Verdict) -> Vec<TokenId> {
    shipped(draft, verdict).tokens
}

/// The walk with one thing wrong: which row follows a node, and what is emitted where.
fn accept_all(draft: &Tree, verdict: &Verdict) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut place = None;
    while let Some(node) = draft.nodes().iter().position(|node| node.parent == place) {
        tokens.push(draft.nodes()[node].token);
        place = Some(node);
    }
    tokens.push(verdict.rows[place.map_or(0, |node| node + 1)].sample.expect("sampled"));
    tokens
}

fn emit_the_draft_for_y(draft: &Tree, verdict: &Verdict) -> Vec<TokenId> {
    let mut run = shipped(draft, verdict);
    let place = run.nodes.last().copied();
    if let Some(child) = draft.nodes().iter().find(|node| node.parent == place) {
        run.tokens.pop();
        run.tokens.push(child.token);
    }
    run.tokens
}

fn wrong_sibling(draft: &Tree, verdict: &Verdict) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut place: Option<usize> = None;
    loop {
        let sample = verdict.rows[place.map_or(0, |node| node + 1)].sample.expect("sampled");
        tokens.push(sample);
        if draft.child(place, sample).is_none() {
            return tokens;
        }
        place = draft.nodes().iter().position(|node| node.parent == place);
    }
}

#[derive(Clone, Copy)]
struct Mutant {
    walk: Walk,
    /// What the client gets of a round's tokens.
    client: fn(&[TokenId]) -> Vec<TokenId>,
    ignore_end: bool,
    ignore_limit: bool,
}

const SOUND: Mutant =
    Mutant { walk: right, client: <[TokenId]>::to_vec, ignore_end: false, ignore_limit: false };

/// A bare loop of leaps, for walks that are not the session's.
fn mutant_law(toy: Toy, case: &Case, gamma: usize, siblings: usize, mutant: Mutant) -> Law {
    law(|oracle| {
        let mut context = case.prompt.clone();
        let mut client: Vec<TokenId> = Vec::new();
        let mut output = 0;
        let finish = 'rounds: loop {
            let tree = bush(toy, &context, gamma, siblings);
            let rows = std::iter::once(None)
                .chain((0..tree.len()).map(Some))
                .map(|place| {
                    let path = place.map(|node| tree.path(node)).unwrap_or_default();
                    let full: Vec<TokenId> = context.iter().chain(&path).copied().collect();
                    Row::of(oracle.pick(&toy.weights(&full)) as TokenId)
                })
                .collect();
            let run = (mutant.walk)(&tree, &Verdict { rows, ..Verdict::default() });
            let mut taken = Vec::new();
            let mut finish = None;
            for (index, &token) in run.iter().enumerate() {
                let inside = index + 1 < run.len();
                taken.push(token);
                output += 1;
                let end = case.ending.eos.contains(&token) && !(mutant.ignore_end && inside);
                let limit = output >= case.max && !(mutant.ignore_limit && inside);
                if end || limit {
                    finish = Some(if end { "stop" } else { "length" });
                    break;
                }
            }
            context.extend(&taken);
            client.extend((mutant.client)(&taken));
            if let Some(finish) = finish {
                break 'rounds finish;
            }
        };
        let eos = case.ending.eos[0];
        let text: String = client
            .iter()
            .filter(|&&token| token != eos)
            .map(|&token| case.vocabulary[token as usize][0] as char)
            .collect();
        key(&text, &client, finish)
    })
}

#[rstest]
#[case::nothing_wrong(SOUND, 2, false)]
#[case::nothing_wrong_with_every_child(SOUND, 3, false)]
#[case::accept_all(Mutant { walk: accept_all, ..SOUND }, 2, true)]
#[case::emit_the_draft_for_y(Mutant { walk: emit_the_draft_for_y, ..SOUND }, 2, true)]
#[case::bonus_lost(Mutant { client: |run| run[..run.len() - 1].to_vec(), ..SOUND }, 2, true)]
#[case::bonus_doubled(Mutant { client: |run| [run, &run[run.len() - 1..]].concat(), ..SOUND }, 2, true)]
#[case::wrong_sibling(Mutant { walk: wrong_sibling, ..SOUND }, 2, true)]
#[case::end_of_text_ignored_inside_a_run(Mutant { ignore_end: true, ..SOUND }, 3, true)]
#[case::limit_ignored_inside_a_run(Mutant { ignore_limit: true, ..SOUND }, 2, true)]
fn a_walk_with_a_bug_is_caught(#[case] mutant: Mutant, #[case] siblings: usize, #[case] wrong: bool) {
    let toy = Toy { vocabulary: 3, salt: 21 };
    let case = Case { max: 3, ..case(toy, Drafter::Bush, 3, Plan::Tree) };
    let tv = distance(&plain_law(toy, &case), &mutant_law(toy, &case, 3, siblings, mutant));
    if wrong {
        assert!(tv > 1e-3, "not caught: {tv}");
    } else {
        assert!(tv < 1e-12, "{tv}");
    }
}

#[test]
fn the_enumeration_itself_is_complete() {
    let toy = Toy { vocabulary: 4, salt: 3 };
    let law = plain_law(toy, &case(toy, Drafter::Chain, 1, Plan::Tree));
    assert!((law.values().sum::<f64>() - 1.0).abs() < 1e-12);
    assert_eq!(law.len(), 3_usize.pow(4) + (0..4).map(|n| 3_usize.pow(n)).sum::<usize>());
}
