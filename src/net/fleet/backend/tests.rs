use std::collections::HashMap;

use tokio::time::Instant;

use crate::fleet::backend::*;
use crate::fleet::health::{Failing, HealthState, Outcome};
use crate::fleet::{Fleet, Load, ModelName, SendErrorKind};

fn backend(name: &str, url: &str, models: &[&str], default: bool) -> ReplicaSettings {
    let models = models.iter().map(|id| ModelName { id: (*id).to_owned(), ..ModelName::default() }).collect();
    ReplicaSettings { models, default, ..ReplicaSettings::new(name, url) }
}

fn chosen(fleet: &Fleet, model: Option<&str>) -> String {
    fleet.pick(model).unwrap().backend().to_owned()
}

fn three() -> Fleet {
    let urls = ["http://one", "http://two", "http://three"];
    Fleet::new(urls.map(|url| backend("a", url, &[], false))).unwrap()
}

/// How often each replica is picked.
fn picked(fleet: &Fleet, times: usize) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for _ in 0..times {
        *counts.entry(fleet.pick(None).unwrap().label().to_owned()).or_default() += 1;
    }
    counts
}

fn load(running: u32, waiting: u32) -> Load {
    Load { running, waiting, kv_usage: Some(0.5), limit: None, verifying: 0, calls: 0, at: Instant::now() }
}

fn addresses(texts: &[&str]) -> BTreeSet<SocketAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn labels(fleet: &Fleet) -> Vec<String> {
    fleet.replicas().iter().map(|replica| format!("{} {}", replica.label(), replica.url())).collect()
}

#[test]
fn an_exact_id_wins_over_an_earlier_glob() {
    let fleet = Fleet::new([
        backend("loras", "http://a", &["lora-*"], false),
        backend("one", "http://b", &["lora-one"], false),
    ])
    .unwrap();
    assert_eq!(chosen(&fleet, Some("lora-one")), "one");
    assert_eq!(chosen(&fleet, Some("lora-two")), "loras");
}

#[test]
fn an_unknown_model_goes_to_the_default_and_else_to_the_first() {
    let a = || backend("a", "http://a", &["m"], false);
    let fleet = Fleet::new([a(), backend("b", "http://b", &[], true)]).unwrap();
    assert_eq!(chosen(&fleet, Some("who")), "b");
    assert_eq!(chosen(&fleet, None), "b");
    let fleet = Fleet::new([a(), backend("b", "http://b", &[], false)]).unwrap();
    assert_eq!(chosen(&fleet, Some("who")), "a");
    assert!(Fleet::new([]).unwrap().pick(None).is_none());
}

#[test]
fn each_address_is_a_replica_of_its_own_name_and_each_rank_is_too() {
    let two_ranks = ReplicaSettings { ranks: 2, ..backend("a", "http://two", &[], false) };
    let fleet = Fleet::new([backend("a", "http://one", &[], false), two_ranks]).unwrap();
    assert_eq!(labels(&fleet), ["a/0 http://one", "a/1 http://two", "a/2 http://two"]);
    let ranks: Vec<_> = fleet.replicas().iter().map(|replica| replica.rank()).collect();
    assert_eq!(ranks, [None, Some(0), Some(1)]);
}

#[test]
fn idle_replicas_are_picked_equally_often() {
    let counts = picked(&three(), 3000);
    assert_eq!(counts.len(), 3);
    assert!(counts.values().all(|count| (800..1200).contains(count)), "{counts:?}");
}

#[tokio::test(start_paused = true)]
async fn the_busiest_by_engine_load_is_never_picked_and_the_idlest_most_often() {
    let fleet = three();
    for (replica, running) in fleet.replicas().iter().zip([9, 3, 0]) {
        replica.set_load(load(running, running / 3));
    }
    let counts = picked(&fleet, 3000);
    assert_eq!(counts.get("a/0"), None, "it loses against any other");
    // The idlest is one of the two with probability 2/3.
    assert!((1850..2150).contains(&counts["a/2"]), "{counts:?}");
}

#[tokio::test(start_paused = true)]
async fn stale_engine_load_is_ignored() {
    let fleet = three();
    fleet.replicas()[0].set_load(load(50, 50));
    fleet.replicas()[1].set_load(load(0, 0));
    fleet.replicas()[2].set_load(load(0, 0));
    assert_eq!(picked(&fleet, 100).get("a/0"), None);
    tokio::time::advance(super::super::load::STALE).await;
    assert!(picked(&fleet, 100).contains_key("a/0"));
}

#[test]
fn a_down_broken_or_disabled_replica_is_skipped() {
    let fleet = three();
    let all = fleet.replicas();
    all[0].ended(Outcome::Failed(Failing::Call(SendErrorKind::Connect), "refused".to_owned()));
    assert_eq!(all[0].health_state(), HealthState::Down);
    assert_eq!(picked(&fleet, 50).get("a/0"), None);
    (0..5).for_each(|_| all[1].ended(Outcome::Failed(Failing::Status, "status 500".to_owned())));
    assert_eq!(all[1].health_state(), HealthState::Broken);
    assert_eq!(picked(&fleet, 50).len(), 1);
    // All are restricted now: the least bad is tried.
    all[2].disable(true);
    assert_eq!(picked(&fleet, 50), HashMap::from([("a/0".to_owned(), 50)]));
    all[2].disable(false);
    assert_eq!(picked(&fleet, 50), HashMap::from([("a/2".to_owned(), 50)]));
}

#[test]
fn refusals_never_open_the_breaker() {
    let fleet = three();
    (0..10_000).for_each(|_| fleet.replicas()[0].ended(Outcome::Undecided));
    assert_eq!(fleet.replicas()[0].health_state(), HealthState::Ready);
}

#[test]
fn half_open_sends_only_one_trial_request() {
    let fleet = three();
    let all = fleet.replicas();
    (0..5).for_each(|_| all[0].ended(Outcome::Failed(Failing::Status, "status 500".to_owned())));
    all[0].checked(true);
    let counts = picked(&fleet, 200);
    assert_eq!(counts["a/0"], 1, "{counts:?}");
    all[0].ended(Outcome::Good);
    assert!(picked(&fleet, 200)["a/0"] > 1);
}

#[test]
fn replicas_behind_a_name_come_and_go_and_those_that_stay_are_the_same() {
    let settings = ReplicaSettings {
        discover: Some(Duration::from_secs(5)),
        ..backend("a", "http://pods:8000/base", &[], false)
    };
    let fleet = Fleet::new([settings]).unwrap();
    let mut changes = fleet.changes();
    assert!(fleet.pick(None).is_none());
    fleet.found("pods:8000", &addresses(&["10.0.0.1:8000", "10.0.0.2:8000"]));
    assert_eq!(labels(&fleet), ["a/0 http://10.0.0.1:8000/base", "a/1 http://10.0.0.2:8000/base"]);
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    let stays = Arc::clone(&fleet.replicas()[1]);
    fleet.found("other:8000", &addresses(&["10.0.0.9:8000"]));
    fleet.found("pods:8000", &addresses(&["10.0.0.2:8000", "10.0.0.1:8000"]));
    assert!(!changes.has_changed().unwrap());
    fleet.found("pods:8000", &addresses(&["10.0.0.2:8000", "[fd00::3]:8000"]));
    assert_eq!(labels(&fleet), ["a/0 http://[fd00::3]:8000/base", "a/1 http://10.0.0.2:8000/base"]);
    assert!(Arc::ptr_eq(&stays, &fleet.replicas()[1]));
}
