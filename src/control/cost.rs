//! Cost of an engine's step: a line in its rows and draft tokens, for each power of two of rows.
//!
//! Only clean steps count, which read no prompt. Steps without drafts say what plain decoding
//! costs; steps with drafts, what the first draft token of a step adds (another kernel, another
//! graph) and what each further one does.

use super::line::Line;

/// Buckets of rows: 1, 2 to 3, 4 to 7, and so on.
const BUCKETS: usize = 12;
// Assumed before any measurement, as a share of a plain step: each row, the first draft token,
// each draft token. Drafts are assumed to be cheap, so that large batches try them.
const ROW: f64 = 0.02;
const ANY: f64 = 0.02;
const TOKEN: f64 = 0.01;
/// How far off the cost of drafts may be.
const DRAFTS: f64 = 0.05;
/// Error of a measurement, as a share of a plain step.
const NOISE: f64 = 0.15;
/// Steps after which a measurement weighs half.
const HALF_LIFE: f64 = 128.0;
/// A draft token costs at least this share of a plain step.
const LEAST: f64 = 0.002;

/// Costs of the steps of one engine.
#[derive(Clone, Debug, Default)]
pub struct StepCosts {
    lines: [Option<Line>; BUCKETS],
}

/// Costs of steps with so many rows, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// A step without drafts.
    pub plain: f64,
    /// Added by the first draft token of a step.
    pub any: f64,
    /// Added by each draft token.
    pub token: f64,
}

impl StepCost {
    /// Seconds of a step with so many draft tokens.
    pub fn at(&self, drafted: usize) -> f64 {
        if drafted == 0 { self.plain } else { self.plain + self.any + self.token * drafted as f64 }
    }
}

impl StepCosts {
    /// Notes a clean step.
    pub fn note(&mut self, rows: usize, drafted: usize, seconds: f64) {
        if rows == 0 || !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        let bucket = bucket(rows);
        let prior = self.nearest(bucket).map(Line::coefficients::<4>);
        let Some(line) = self.lines.get_mut(bucket) else { return };
        let line = line.get_or_insert_with(|| match prior {
            Some(mean) => begun(mean, mean[0].max(seconds)),
            None => begun([seconds * (1.0 - ROW), ROW * seconds, ANY * seconds, TOKEN * seconds], seconds),
        });
        line.note(features(rows, drafted), seconds, 1.0);
    }

    /// Costs of a step with so many rows; `None` before any step was measured.
    pub fn of(&self, rows: usize) -> Option<StepCost> {
        let line = self.nearest(bucket(rows))?;
        let plain = line.at(features(rows, 0));
        let [.., any, token] = line.coefficients::<4>();
        (plain > 0.0).then(|| StepCost { plain, any: any.max(0.0), token: token.max(LEAST * plain) })
    }

    /// The line of this bucket, else the nearest one that was measured.
    fn nearest(&self, bucket: usize) -> Option<&Line> {
        let lines = self.lines.iter().enumerate().filter_map(|(at, line)| Some((at, line.as_ref()?)));
        lines.min_by_key(|(at, _)| at.abs_diff(bucket)).map(|(_, line)| line)
    }
}

fn bucket(rows: usize) -> usize {
    (rows.max(1).ilog2() as usize).min(BUCKETS - 1)
}

fn features(rows: usize, drafted: usize) -> [f64; 4] {
    [1.0, rows as f64, f64::from(u8::from(drafted > 0)), drafted as f64]
}

/// A line of about these coefficients, where a plain step takes about `step` seconds.
fn begun(mean: [f64; 4], step: f64) -> Line {
    Line::new(mean, [2.0 * step, ROW * step, DRAFTS * step, DRAFTS * step], NOISE * step, HALF_LIFE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_drafted_steps_are_told_apart() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.of(1), None);
        for n in 0..300 {
            let drafted = [0, 4, 16][n % 3];
            let seconds = 0.02 + if drafted > 0 { 0.004 } else { 0.0 } + 0.0005 * drafted as f64;
            costs.note(1, drafted, seconds);
        }
        let cost = costs.of(1).unwrap();
        assert!((cost.plain - 0.02).abs() < 5e-4, "{cost:?}");
        assert!((cost.at(16) - 0.032).abs() < 1e-3, "{cost:?}");
        assert!((cost.at(4) - 0.026).abs() < 1e-3, "{cost:?}");
    }

    #[test]
    fn a_step_of_more_rows_begins_with_what_fewer_cost() {
        let mut costs = StepCosts::default();
        (0..50).for_each(|_| costs.note(2, 0, 0.01));
        let two = costs.of(2).unwrap();
        assert!((costs.of(9).unwrap().token - two.token).abs() < 1e-12);
        costs.note(9, 0, f64::NAN);
        costs.note(0, 0, 1.0);
        assert_eq!(costs.of(2), Some(two));
    }
}
