use std::time::Duration;

use super::*;
use crate::control::{Round, Shared, Way};
use crate::draft::{Agreement, Features, Vote};
use crate::units::{SplitMix64, Tick};
use crate::words::VerifyMethod;

const WAY: Way = Way::by(VerifyMethod::Tree, 300);
const GREEDY: TemperatureBucket = TemperatureBucket::Greedy;

fn vote() -> Vote {
    Vote::new(Source::PromptLookup, Features::matched(8))
}

fn class(control: &Control) -> Class {
    Class::new(DrafterId::model(control.model("small")), GREEDY, u64::MAX)
}

/// A sidecar that has measured something of everything. `share`: accepted draft tokens.
fn experienced(share: f64, token: f64, seed: u64) -> Control {
    let (control, mut rng) = (Control::new(), SplitMix64::new(seed));
    let class = class(&control);
    control.with(|learnt| {
        for _ in 0..400 {
            let accepted = rng.unit() < share;
            learnt.survival.observe(GREEDY, vote(), Agreement::Alone, 0, accepted);
            learnt.classes.push(class, Round::new(4, 4, 1 + 4 * usize::from(accepted)));
        }
        (0..50).for_each(|_| learnt.note_plain(token, 1, Tick(0)));
        (0..8).for_each(|_| learnt.costs.verified(WAY, 4, Shared::default(), 1.5 * token));
        (0..8).for_each(|_| learnt.costs.decided(VerifyMethod::Tree, true));
        learnt.output_ended(1_000);
    });
    control
}

/// The figures that decisions depend on.
fn figures(control: &Control) -> Vec<f64> {
    let class = class(control);
    control.with(|learnt| {
        let rounds = learnt.classes.of(class).map_or(0.0, |rounds| rounds.count());
        vec![
            learnt.survival.conditional(GREEDY, vote(), Agreement::Alone, 0),
            learnt.survival.evidence(GREEDY, Source::PromptLookup.into()),
            rounds,
            learnt.costs.plain_token().unwrap_or(0.0),
            learnt.costs.verify(WAY, 4, Shared::default()),
            learnt.expected_remainder(0),
        ]
    })
}

/// Lends the measurements of others, as a sidecar gets them over the store.
fn lend(to: &Control, others: &[&Control]) {
    let (mut model, mut costs) = (SharedModel::default(), SharedCosts::default());
    for other in others {
        let sent = serde_json::to_vec(&other.shared()).unwrap();
        let (shared_model, shared_costs): (SharedModel, SharedCosts) = serde_json::from_slice(&sent).unwrap();
        model.add(&shared_model);
        costs.add(&shared_costs);
    }
    to.lend(&model, &costs);
}

fn assert_near(one: &[f64], other: &[f64]) {
    for (one, other) in one.iter().zip(other) {
        assert!((one - other).abs() <= 1e-3 * one.abs().max(1e-3), "{one} {other}");
    }
}

#[test]
fn a_new_sidecar_begins_with_the_figures_of_another() {
    let (old, new) = (experienced(0.9, 0.02, 1), Control::new());
    // Its models have other numbers.
    new.model("another");
    assert_ne!(figures(&new), figures(&old));
    lend(&new, &[&old]);
    assert_near(&figures(&new), &figures(&old));
    assert_eq!(new.model("small"), 1);
    let basis = |control: &Control| control.with(|learnt| learnt.costs.basis(WAY));
    assert_eq!(basis(&new), crate::control::Basis::Measured);
}

#[test]
fn sums_do_not_depend_on_the_order_of_sidecars() {
    let all: Vec<(SharedModel, SharedCosts)> = [(0.9, 0.02), (0.2, 0.05), (0.5, 0.01)]
        .map(|(share, token)| experienced(share, token, 3).shared())
        .into();
    let sum = |order: [usize; 3]| {
        let (mut model, mut costs) = (SharedModel::default(), SharedCosts::default());
        for at in order {
            model.add(&all[at].0);
            costs.add(&all[at].1);
        }
        serde_json::to_string(&(model, costs)).unwrap()
    };
    let first = sum([0, 1, 2]);
    assert!([[2, 1, 0], [1, 0, 2], [2, 0, 1]].into_iter().all(|order| sum(order) == first));
    let (mut left, mut right) = (all[1].0.clone(), all[0].0.clone());
    left.add(&all[2].0);
    right.add(&left);
    assert_eq!(serde_json::to_string(&right).unwrap(), {
        let mut model = all[0].0.clone();
        model.add(&all[1].0);
        model.add(&all[2].0);
        serde_json::to_string(&model).unwrap()
    });
}

#[test]
fn lent_measurements_are_not_shared_again_and_lending_twice_changes_nothing() {
    let (old, new) = (experienced(0.9, 0.02, 1), experienced(0.5, 0.03, 2));
    let own = new.shared();
    lend(&new, &[&old]);
    assert_eq!(new.shared(), own);
    let once = figures(&new);
    lend(&new, &[&old]);
    assert_eq!(figures(&new), once);
    // They are not part of a snapshot either.
    let saved = new.save().unwrap();
    let restored = Control::restored(saved, Duration::ZERO).unwrap();
    assert_eq!(restored.shared().0, own.0);
    lend(&new, &[]);
    assert_near(&figures(&new), &figures(&experienced(0.5, 0.03, 2)));
}

#[test]
fn own_measurements_replace_those_of_others() {
    let others = [experienced(0.9, 0.02, 1), experienced(0.9, 0.02, 2), experienced(0.9, 0.02, 3)];
    let [one, two, three] = &others;
    let (alone, fleet) = (Control::new(), Control::new());
    lend(&fleet, &[one, two, three]);
    for control in [&alone, &fleet] {
        control.with(|learnt| {
            (0..5_000).for_each(|_| learnt.survival.observe(GREEDY, vote(), Agreement::Alone, 0, false));
            (0..2_000).for_each(|_| {
                learnt.classes.push(Class::new(DrafterId::model(0), GREEDY, u64::MAX), Round::new(4, 4, 1));
            });
            (0..500).for_each(|_| learnt.note_plain(0.04, 1, Tick(0)));
            (0..900).for_each(|_| learnt.costs.verified(WAY, 4, Shared::default(), 0.08));
            (0..500).for_each(|_| learnt.output_ended(100));
        });
    }
    let (alone, fleet) = (figures(&alone), figures(&fleet));
    for (alone, fleet) in alone.iter().zip(&fleet) {
        assert!((alone - fleet).abs() < 0.02 * alone.abs().max(0.5), "{alone} {fleet}");
    }
}

#[test]
fn old_costs_of_others_weigh_less_than_new_ones() {
    let (old, new) = (experienced(0.9, 0.02, 1), experienced(0.9, 0.04, 1));
    let (mut model, mut costs) = (SharedModel::default(), SharedCosts::default());
    for (control, idle) in [(&old, 3_600.0), (&new, 0.0)] {
        let mut shared = control.shared();
        shared.1.age(idle);
        model.add(&shared.0);
        costs.add(&shared.1);
    }
    let control = Control::new();
    control.lend(&model, &costs);
    let verify = control.with(|learnt| learnt.costs.verify(WAY, 4, Shared::default()));
    assert!((0.055..=0.06).contains(&verify), "between 0.03 an hour ago and 0.06 now: {verify}");
}

#[test]
fn costs_of_siblings_weigh_as_a_probe_and_their_pace_is_not_taken() {
    let (old, new) = (experienced(0.9, 0.02, 1), Control::new());
    let (_, siblings) = old.shared();
    new.lend(&SharedModel::default(), &SharedCosts::default().or_probed(&siblings));
    let figures = |control: &Control| {
        control.with(|learnt| (learnt.costs.plain_token(), learnt.costs.verify(WAY, 4, Shared::default())))
    };
    assert_eq!(figures(&new).0, None);
    assert!((figures(&new).1 - 0.03).abs() < 3e-3, "{:?}", figures(&new));
    new.with(|learnt| (0..3).for_each(|_| learnt.costs.verified(WAY, 4, Shared::default(), 0.06)));
    assert!(figures(&new).1 > 0.05, "{:?}", figures(&new));
}

#[test]
fn what_is_not_a_measurement_is_left_out() {
    let hostile = |text: &str| serde_json::from_str::<SharedModel>(text).unwrap();
    let control = experienced(0.5, 0.02, 1);
    let before = figures(&control);
    let (mut model, mut costs) = (SharedModel::default(), SharedCosts::default());
    for text in [
        r#"{"acceptance":{"prompt_lookup":{"0":[-5.0,9.0],"8":[9.0,1.0],"18446744073709551615":[1.0,2.0]}},"classes":[],"length":[1e300,1.0]}"#,
        r#"{"acceptance":{"nobody":{"0":[1.0,2.0]},"model:x":{"3":[1e200,1e200]}},"classes":[[["suffix",99,1],[1.0,4.0,0.0,3.0,1e300,0.0,-1.0]]],"length":[0.0,0.0]}"#,
    ] {
        model.add(&hostile(text));
    }
    let key = r#"{"method":7,"size":18446744073709551615,"concurrency":9}"#;
    let valid = r#"{"method":1,"size":1,"concurrency":0}"#;
    let text = format!(
        r#"{{"pace":{{"77":[1.0,50.0],"0":[-5.0,1e300]}},"verify":[[{key},[1.0,1.0]],[{valid},[5.0,1e200,0.0,0.0,0.0,0.0,0.0,0.0,1.0,9.0,1.0]]],
            "undecided":{{"9":[1.0,1.0]}}}}"#
    );
    costs.add(&serde_json::from_str(&text).unwrap());
    control.lend(&model, &costs);
    assert_eq!(figures(&control), before);
}

#[test]
fn the_form_is_compact() {
    let control = experienced(0.9, 0.021_234_567_8, 1);
    let text = serde_json::to_string(&control.shared()).unwrap();
    assert!(text.len() < 2_000, "{text}");
    assert!(!control.shared().0.is_empty() && Control::new().shared().0.is_empty());
}
