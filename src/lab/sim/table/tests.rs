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
  - { whose: others, rate: 2.5, text: { agreement: { turning: { at: 9 } } } }
budget: { switchback: { window: 5s, every: 1m } }
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
    assert_eq!((table.name.as_str(), table.held_out, table.seeds), ("t", false, 1));
    assert_eq!((table.seconds, table.overload), (90.0, Some((30.0, 60.0))));
    assert!((table.setup.engine.cancel - 1.5).abs() < 1e-12 && table.setup.drafter.is_none());
    assert_eq!(table.setup.permit.rules.methods, [VerifyMethod::Score, VerifyMethod::FanOut]);
    let imposed = table.setup.permit.imposed;
    assert_eq!(
        (imposed.extra_tokens, imposed.windows.map(|windows| windows.every.as_secs())),
        (0.25, Some(60))
    );
    let [ours, others] = &table.setup.streams[..] else { panic!("two streams") };
    let ramp = Ramp(vec![(0.0, 1.0), (30.0, 64.0)]);
    assert_eq!((ours.whose, &ours.arrivals), (Owner::Ours, &Arrivals::Closed { clients: ramp, think: 0.0 }));
    assert_eq!((others.whose, &others.arrivals), (Owner::Others, &Arrivals::Poisson(Ramp::flat(2.5))));
    assert!(!ours.scripts[0].has_model() && others.scripts[0].has_model());
    let [ratio, p95] = table.expected[..] else { panic!("two expectations") };
    assert_eq!((ratio.figure, ratio.min, ratio.max), (Figure::Ratio, Some(0.99), None));
    assert!(p95.holds(Some(1.02)) && !p95.holds(Some(1.03)) && !p95.holds(Some(0.4)) && !p95.holds(None));
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
        found("{ clients: [0] }"),
        "t.yaml:17: sweep.clients[0]: out of range, allowed 1..=4096, got 0\n\
         t.yaml:17: sweep.clients: nothing to play, allowed at least one, got none\n\
         t.yaml:17: sweep.texts: nothing to play, allowed at least one, got none"
    );
    assert!(found("{ clients: [1], texts: [b] }").contains("sweep.texts[0]: not a recording"));
    assert!(parse("{ clients: [1], texts: [a-t0.7], more: 1 }").is_err());
}

#[test]
fn every_error_is_found_at_once_with_its_line_and_what_is_allowed() {
    let text = GOOD
        .replace("for: 90s", "for: 90")
        .replace("step: 20ms", "stepp: 20ms")
        .replace("rate: 2.5,", "")
        .replace("rewrite: 0.1", "rewrite: 7")
        .replace("until: 1m", "until: 1s")
        .replace("p95: { min: 0.5, max: 1.02 }", "p59: { max: 1 }\n  speculated: {}")
        + "seedz: 3\n";
    let found = parse(&text).expect_err("wrong");
    let expected = [
        r"t.yaml:4: for: not a duration, allowed \d+(.\d+)?(us|ms|s|m|h), got 90",
        "t.yaml:5: engine.paced.step: missing, allowed a duration, got nothing",
        "t.yaml:5: engine.paced.stepp: unknown key, allowed step|base|node|growth|prompt, got stepp; did you mean step?",
        "t.yaml:5: engine.profile: not one of two, allowed either profile or paced, got both or none",
        "t.yaml:10: traffic[0].text.copied.rewrite: out of range, allowed 0..=1, got 7",
        "t.yaml:10: traffic[0].text.copied: not one of these, allowed fresh|{ rewrite: EDITS }|{ until: TOKENS }|{ plateau: { after, period } }, got a map",
        "t.yaml:11: traffic[1].rate: not one of two, allowed either clients or rate, got both or none",
        "t.yaml:13: overload.until: not after from, allowed a later moment, got 1",
        "t.yaml:16: expect.p59: unknown figure, allowed",
        "t.yaml:17: expect.speculated: no bound, allowed min, max or both, got a map",
        "t.yaml:18: seedz: unknown key",
    ];
    for line in expected {
        assert!(found.iter().any(|found| found.starts_with(line)), "{line}\n{found:#?}");
    }
    assert_eq!(found.len(), expected.len(), "{found:#?}");
}

#[test]
fn a_policy_is_a_real_one_and_its_errors_are_named() {
    let with = |policy: &str| format!("{GOOD}policy: |\n  version: 1\n  name: p\n  {policy}\n");
    let table = parse(&with("gamma: { max: 5, margin: 0.2 }")).expect("good");
    assert_eq!((table.setup.permit.rules.gamma_max, table.setup.permit.rules.margin), (5, 0.2));
    let found = parse(&with("gamma: { max: 50 }")).expect_err("wrong");
    assert_eq!(found, ["t.yaml policy:3: gamma.max: out of range, allowed 1..=32, got 50"]);
}

#[test]
fn a_missing_recording_is_an_error() {
    let found = parse(&GOOD.replace("{ copied: { rewrite: 0.1 } }", "poems")).expect_err("wrong");
    assert!(
        found[0].starts_with("t.yaml:10: traffic[0].text: not a recording, allowed one of traces/"),
        "{found:?}"
    );
}
