use foretell_onnx::pace::curve::Table;

use super::*;

/// One second per step and 0.01 s for each further token, so that times are easy to read.
fn engine(sequences: usize, kv: usize, prefix_cache: bool) -> Engine {
    let points = &[(1, 1_000.0), (101, 2_000.0)];
    let table = Table { points, stairs: false, sequence: 0.0, context: 0.0 };
    let shape = Shape { pace: Curve::Table(table), sequences, kv, chunk: 100, block: 16 };
    Engine::new(EngineSpec { shape, prefix_cache, ..EngineSpec::paced(Steps::default()) }, 1)
}

fn plain(id: JobId, context: usize, tokens: usize) -> Job {
    Job { id, text: id, context, work: Work::Stream(tokens) }
}

fn verify(id: JobId, text: u64, context: usize, nodes: usize) -> Job {
    let verify = Verify { nodes, sequences: 1, computed: nodes, followed: nodes, rows: 0 };
    Job { id, text, context, work: Work::Verify(verify) }
}

/// Runs the engine until it has nothing to do: milliseconds and job of every output.
fn played(engine: &mut Engine, now: Tick) -> Vec<(u64, JobId)> {
    let next = engine.start(now);
    finished(engine, next)
}

/// As [`played`], from the end of the running step.
fn finished(engine: &mut Engine, mut next: Option<Tick>) -> Vec<(u64, JobId)> {
    let (mut out, mut seen) = (Vec::new(), Vec::new());
    while let Some(now) = next {
        engine.step_ended(now, &mut out);
        seen.extend(out.drain(..).map(|produced| (now.0 / 1000, produced.job)));
        next = engine.start(now);
    }
    seen
}

#[test]
fn a_prompt_is_computed_in_chunks_and_then_one_token_a_step() {
    let mut engine = engine(4, 10_000, true);
    engine.submit(plain(1, 150, 3));
    // 100 tokens take 1.99 s, the other 50 take 1.49 s and produce the first token.
    assert_eq!(played(&mut engine, Tick(0)), [(3480, 1), (4480, 1), (5480, 1)]);
    assert_eq!(engine.computed(), Computed { all: 152, wasted: 0, steps: 4 });
    assert_eq!((engine.running(), engine.waiting(), engine.kv_usage()), (0, 0, 0.0));
}

#[test]
fn a_cached_text_costs_only_the_tokens_after_its_last_whole_block() {
    for (cache, step) in [(true, 1090), (false, 1990 + 1530)] {
        let mut engine = engine(4, 10_000, cache);
        engine.submit(plain(1, 145, 6));
        let ends = played(&mut engine, Tick(0)).last().expect("an end").0;
        // 150 tokens are in memory, 144 of them in whole blocks.
        engine.submit(verify(2, 1, 150, 4));
        let took = played(&mut engine, Tick(ends * 1000))[0].0 - ends;
        assert_eq!(took, step, "cache {cache}");
    }
}

#[test]
fn running_jobs_share_steps_and_others_wait() {
    let mut engine = engine(2, 10_000, true);
    for id in 1..=3 {
        engine.submit(plain(id, 1, 2));
    }
    let order = played(&mut engine, Tick(0));
    let at = |job: JobId| order.iter().filter(|seen| seen.1 == job).map(|seen| seen.0).collect::<Vec<_>>();
    assert_eq!((at(1), at(2), at(3)), (vec![1010, 2020], vec![1010, 2020], vec![3020, 4020]));
}

#[test]
fn kv_memory_limits_jobs_and_evicts_the_least_recently_used() {
    let mut engine = engine(9, 100, true);
    engine.submit(plain(1, 50, 10));
    engine.submit(plain(2, 50, 10));
    let next = engine.start(Tick(0));
    assert_eq!((engine.running(), engine.waiting()), (1, 1), "60 of 100 tokens are reserved");
    assert!((engine.kv_usage() - 0.6).abs() < 1e-9);
    engine.cancel(1, Tick(0));
    finished(&mut engine, next);
    let again = |engine: &mut Engine, text: u64| {
        engine.submit(verify(text + 10, text, 50, 0));
        let before = engine.computed().all;
        let _ = played(engine, Tick(1 << 40));
        engine.computed().all - before
    };
    assert_eq!(again(&mut engine, 2), 2, "the last text is in memory, and 48 of its tokens in whole blocks");
}

#[test]
fn a_cancelled_sequence_ends_with_its_step_without_output() {
    let mut engine = engine(4, 10_000, true);
    engine.submit(plain(1, 1, 9));
    let next = engine.start(Tick(0));
    engine.cancel(1, Tick(5));
    assert_eq!(engine.running(), 1);
    assert_eq!(finished(&mut engine, next), []);
    assert_eq!((engine.running(), engine.computed().wasted), (0, 1));
    engine.submit(plain(2, 1, 9));
    engine.cancel(2, Tick(9));
    assert_eq!(engine.start(Tick(9)), None, "what waits is gone at once");
}

#[test]
fn a_job_submitted_during_a_step_waits_for_the_next() {
    let mut engine = engine(4, 10_000, true);
    engine.submit(plain(1, 1, 2));
    let next = engine.start(Tick(0));
    engine.submit(verify(2, 9, 1, 3));
    assert_eq!(engine.start(Tick(500_000)), None, "the step goes on as it is");
    assert_eq!(engine.waiting(), 0, "what the next step takes does not wait");
    assert_eq!(finished(&mut engine, next), [(1000, 1), (2040, 1), (2040, 2)]);
}

#[test]
fn a_paced_server_takes_as_long_as_its_costliest_sequence() {
    let steps = Steps { step: 1.0, base: 1.5, node: 0.1, growth: 0.5, prompt: 0.01 };
    let mut engine = Engine::new(EngineSpec::paced(steps), 1);
    engine.submit(plain(1, 101, 2));
    assert_eq!(played(&mut engine, Tick(0)), [(2000, 1), (3000, 1)], "a hundred tokens are read before");
    engine.submit(verify(2, 1, 102, 5));
    assert_eq!(played(&mut engine, Tick(0)), [(2000, 2)]);
    engine.submit(verify(3, 1, 103, 5));
    engine.submit(plain(4, 1, 2));
    assert_eq!(played(&mut engine, Tick(0)), [(3000, 3), (3000, 4), (4000, 4)], "half as long again for two");
}
