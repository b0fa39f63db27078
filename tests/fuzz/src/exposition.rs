//! Answers of a server about itself: lists of models, versions, metrics in Prometheus' text format.
//!
//! Input: dialect and statuses, then an answer to each question in the order of the questions;
//! after the last one, that one again. The questions must end, and the result of the answers must
//! be sound.

use foretell_core::words::VerifyMethod;
use foretell_engines::recognise::{Answers, Question, Reply, dialect_of, introduction_to};
use foretell_engines::{Dialect, shared};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;
/// Maximum number of rounds of questions.
const ROUNDS: usize = 16;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let hint = Some(input.one(&Dialect::ALL)).filter(|_| input.byte() & 1 > 0);
    let statuses = u16::from(input.byte());
    let bodies = input.bodies();
    for body in &bodies {
        text(&String::from_utf8_lossy(body));
    }
    let mut world = World { statuses, bodies: &bodies, asked: 0 };
    let mut answers = Answers::default();
    world.ask(introduction_to(hint), &mut answers);
    let found = dialect_of(&answers);
    assert_eq!(found, dialect_of(&answers));
    for dialect in found.into_iter().chain(hint) {
        engine(dialect, &mut world, answers.clone());
    }
}

struct World<'a> {
    statuses: u16,
    bodies: &'a [&'a [u8]],
    asked: usize,
}

impl World<'_> {
    fn ask(&mut self, questions: Vec<Question>, answers: &mut Answers) {
        for question in questions {
            let at = self.asked.min(self.bodies.len() - 1);
            let bad = self.statuses >> (self.asked % 8) & 1 > 0;
            self.asked += 1;
            let status = if bad { 404 } else { 200 };
            answers.add(&question.path, Reply { status, server: None, body: self.bodies[at].to_vec() });
        }
    }
}

fn engine(dialect: Dialect, world: &mut World<'_>, mut answers: Answers) {
    let codec = dialect.codec();
    for round in 0.. {
        let questions = codec.questions(&answers);
        if questions.is_empty() {
            break;
        }
        assert!(round < ROUNDS, "{} goes on asking {questions:?}", dialect.name());
        world.ask(questions, &mut answers);
    }
    for method in VerifyMethod::ALL {
        let _ = codec.missing(&answers, method);
    }
    let Ok(engine) = codec.engine(&answers) else { return };
    assert_eq!(engine.dialect, dialect);
    assert!(engine.context.is_none_or(|context| context > 0), "a context of no tokens");
    assert!(engine.cache.block > 0, "a block of no tokens");
    if let Some(defaults) = engine.defaults.sampling {
        let values = [defaults.temperature, defaults.top_p, defaults.min_p, defaults.repetition_penalty];
        assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
    }
    let _ = engine.quirks().tokenize.map(|form| form.question(&engine.model, "text"));
}

/// A page of metrics.
fn text(page: &str) {
    for dialect in Dialect::ALL {
        let Some(load) = dialect.codec().load(page) else { continue };
        assert!(load.kv_usage.is_none_or(|usage| usage.is_finite() && usage >= 0.0), "{load:?}");
    }
    let _ = (shared::started(page), shared::label(page, "a:b", "c"), shared::version::<2>(page));
    if let Some(value) = shared::metric(page, &["a:b"]) {
        assert!(value.is_finite(), "{value}");
    }
}
