use super::*;
use crate::sim::traffic::{Arrivals, Owner, Ramp};
use foretell_core::words::VerifyMethod;

const GOOD: &str = "\
version: 1
name: t
about: a test
for: 90s
engine: { paced: { step: 20ms, base: 1.1, node: 0.005 }, cancel: 1.5s }
signal: { every: 250ms, age: 100ms }
verify: [score, fan_out]
drafter: none
traffic:
  - { whose: ours, clients: { 30s: 64, 0s: 1 }, text: { copied: { rewrite: 0.1 } } }
  - { whose: others, rate: 2.5, text: { agreement: { turning: { first: 0.9, then: 0.1, at: 9 } } } }
budget: { slots: 0.3 }
overload: { from: 30s, until: 1m }
expect:
  ratio: { min: 0.99 }
  p95: { min: 0.5, max: 1.02 }
";

fn parse(text: &str) -> Result<Table, Vec<String>> {
    let folder = tempfile::tempdir().expect("a folder");
    let parsed = Table::parse("t.yaml", text, folder.path());
    parsed.map_err(|error| error.to_string().lines().map(str::to_owned).collect())
}

#[test]
fn a_table_defines_the_setting() {
    let table = parse(GOOD).expect("good");
    assert_eq!((table.name.as_str(), table.untuned, table.seeds), ("t", false, 1));
    assert_eq!((table.seconds, table.overload), (90.0, Some((30.0, 60.0))));
    assert!((table.setup.engine.cancel - 1.5).abs() < 1e-12 && table.setup.drafter.is_none());
    assert_eq!(table.setup.permit.rules.methods, [VerifyMethod::Score, VerifyMethod::FanOut]);
    assert_eq!(table.setup.permit.slots.to_string(), "0.3");
    let [ours, others] = &table.setup.streams[..] else { panic!("two streams") };
    let ramp = Ramp(vec![(0.0, 1.0), (30.0, 64.0)]);
    assert_eq!((ours.whose, &ours.arrivals), (Owner::Ours, &Arrivals::Closed { clients: ramp, think: 0.0 }));
    assert_eq!((others.whose, &others.arrivals), (Owner::Others, &Arrivals::Poisson(Ramp::flat(2.5))));
    assert!(!ours.scripts[0].has_model() && others.scripts[0].has_model());
    let [ratio, p95] = table.expected[..] else { panic!("two expectations") };
    assert_eq!((ratio.figure, ratio.min, ratio.max), (Figure::Ratio, Some(0.99), None));
    assert!(p95.is_met(Some(1.02)) && !p95.is_met(Some(1.03)) && !p95.is_met(Some(0.4)) && !p95.is_met(None));
}

#[test]
fn a_sweep_names_clients_and_recordings_with_their_temperatures() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = r#"{"prompt":[1],"output":[2,3],"choices":[2,9],"margins":[0.5,0.1],"temperature":0.7}"#;
    std::fs::write(folder.path().join("a-t0.7.jsonl"), line).expect("written");
    let parse = |sweep: &str| Table::parse("t.yaml", &format!("{GOOD}sweep: {sweep}\n"), folder.path());
    let table = parse("{ clients: [1, 16], texts: [a-t0.7, { output: 9 }] }").expect("good");
    let bucket: Vec<f64> = table.sweep.texts.iter().map(|text| text[0].temperature).collect();
    assert_eq!((&table.sweep.clients[..], &bucket[..]), (&[1, 16][..], &[0.7, 0.0][..]));
    let found = |sweep: &str| parse(sweep).expect_err("wrong").to_string();
    assert_eq!(
        found("{ clients: [0], texts: [] }"),
        "t.yaml:17: invalid value: integer `0`, expected a nonzero usize"
    );
    let none = "t.yaml:17: sweep: allowed at least one of clients and of texts, got none";
    assert_eq!(found("{ clients: [1], texts: [] }"), none);
    assert!(found("{ clients: [1], texts: [b] }").starts_with("t.yaml:17: text: allowed one of traces/"));
    assert!(parse("{ clients: [1], texts: [a-t0.7], more: 1 }").is_err());
}

#[test]
fn an_error_has_its_line_and_what_is_allowed() {
    for (good, bad, expected) in [
        ("for: 90s", "for: 90", r"4: allowed a duration, \d+(.\d+)?(us|ms|s|m|h), got 90"),
        ("for: 90s", "for: 25h", "4: allowed 1000000us..=86400s, got 25h"),
        ("step: 20ms", "stepp: 20ms", "5: unknown field `stepp`, expected one of step, base, node"),
        (
            "paced: {",
            "profile: onnx, paced: {",
            "5: engine: allowed either profile or paced, got both or none",
        ),
        ("paced: {", "profile: h200, paced: {", "5: allowed l4-7b, l4-8b, h100-8b"),
        ("signal: {", "signal: no\nnetwork: {", "6: unknown variant `no`, expected one of none"),
        ("rewrite: 0.1", "rewrite: 7", "10: allowed 0..=1, got 7"),
        ("rewrite: 0.1", "rewrite: 0.1, until: 3", "10: "),
        ("fan_out]", "fanout]", "7: verify: allowed fan_out|tree|score"),
        ("30s: 64", "30: 64", "10: allowed a number, or a map from durations to numbers"),
        ("30s: 64", "30d: 64", "10: allowed a duration"),
        ("0s: 1 }", "0s: -1 }", "10: allowed 0..=100000, got -1"),
        ("rate: 2.5,", "", "11: traffic: allowed either clients or rate, got both or none"),
        ("until: 1m", "until: 1s", "13: overload: until is not after from"),
        ("p95: {", "p59: {", "15: expect: allowed ratio|least_ratio|"),
        ("{ min: 0.99 }", "{}", "15: expect.ratio: allowed min, max or both, got none"),
        ("version: 1", "version: 1\nseedz: 3", "2: unknown field `seedz`"),
        ("version: 1", "version: 2", "1: version: allowed 1"),
    ] {
        let found = parse(&GOOD.replace(good, bad)).expect_err(bad);
        assert!(found[0].starts_with(&format!("t.yaml:{expected}")), "{bad}: {found:?}");
    }
}

#[test]
fn a_policy_is_a_real_one_and_its_errors_are_named() {
    let with = |policy: &str| format!("{GOOD}policy: |\n  version: 1\n  name: p\n  {policy}\n");
    let table = parse(&with("gamma: { max: 5, margin: 0.2 }")).expect("good");
    assert_eq!((table.setup.permit.rules.gamma_max, table.setup.permit.rules.margin), (5, 0.2));
    let found = parse(&with("gamma: { max: 50 }")).expect_err("wrong");
    assert_eq!(found, ["t.yaml policy:3: gamma.max: out of range, allowed 1 to 32, got 50"]);
}

#[test]
fn a_missing_recording_is_an_error() {
    let found = parse(&GOOD.replace("{ copied: { rewrite: 0.1 } }", "poems")).expect_err("wrong");
    assert!(found[0].starts_with("t.yaml:10: text: allowed one of traces/"), "{found:?}");
}
