//! Predicts the speedup on a server from a handful of measured times.
//!
//! A round of `g` drafted tokens that are each accepted with probability `a` yields (1 − a^(g+1)) /
//! (1 − a) tokens and takes V(g) plus the time of the draft; plain decoding takes t_AR per token.
//! Nothing else is assumed, so the same figures show an operator the expected speedup and give a
//! chooser its starting point.

use foretell_core::control::{MARGIN, Prior, Probed};
use foretell_core::words::VerifyMethod;

/// Acceptance probabilities of a draft token for which a speedup is predicted.
pub const ACCEPTANCES: [f64; 3] = [0.5, 0.7, 0.9];
/// Maximum length of a draft that is considered, nodes.
pub const MAX_GAMMA: usize = 8;
/// Minimum predicted speedup that is worth a trial: the margin required to start speculating.
pub const MIN_GAIN: f64 = 1.0 + MARGIN;

/// One timed verify request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// Verification method of the draft.
    pub method: VerifyMethod,
    pub context: usize,
    pub nodes: usize,
    pub seconds: f64,
    /// Tokens that the engine computed for it; `None` if it does not report that.
    pub computed: Option<u32>,
}

/// The measurements at one server. Times in seconds; `None` where nothing was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Verify requests, in the order in which they were sent.
    pub verify: Vec<Timed>,
    /// Tokens of the context, and seconds per plain token there, one pair for each measurement.
    pub token: Vec<(usize, f64)>,
    /// Extra time of a plain request's first token beyond a step: the switch to plain decoding.
    pub switch_out: Option<f64>,
    /// Extra time of the first round after a plain request beyond another round: the switch to
    /// speculation.
    pub switch_in: Option<f64>,
    /// Time from cancelling a plain request until the engine is free.
    pub cancel: Option<f64>,
}

/// Predicted speedup of one verification method.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prospect {
    pub method: VerifyMethod,
    pub context: usize,
    /// Probability that a drafted token is accepted.
    pub acceptance: f64,
    /// Draft length with the largest gain, nodes.
    pub gamma: usize,
    /// Predicted speedup as a multiple of plain decoding.
    pub gain: f64,
}

/// Mean acceptance length of a round of `gamma` drafted tokens that are each accepted with
/// probability α: Σ α^i for i from 0 to `gamma` (Leviathan et al., arXiv 2211.17192).
pub fn tokens(acceptance: f64, gamma: usize) -> f64 {
    (0..=gamma).map(|depth| acceptance.powi(depth as i32)).sum()
}

impl Measured {
    /// Seconds per plain token at the measured context that is nearest to this one, the shortest of
    /// several measurements; `None` if there is none.
    pub fn token(&self, context: usize) -> Option<f64> {
        let (nearest, _) = self.token.iter().min_by_key(|(at, _)| at.abs_diff(context))?;
        let same = self.token.iter().filter(|(at, _)| at == nearest || near(*at, *nearest));
        same.map(|&(_, seconds)| seconds.max(1e-7)).min_by(f64::total_cmp)
    }

    /// The methods and contexts that were measured, in that order.
    pub fn positions(&self) -> Vec<(VerifyMethod, usize)> {
        let mut positions: Vec<(VerifyMethod, usize)> = Vec::new();
        for timed in &self.verify {
            let near = |&(method, context): &(VerifyMethod, usize)| {
                method == timed.method && near(context, timed.context)
            };
            if !positions.iter().any(near) {
                positions.push((timed.method, timed.context));
            }
        }
        positions
    }

    /// Expected seconds of a verify request with `nodes` nodes, interpolated; `None` beyond the
    /// measured range.
    pub fn round(&self, method: VerifyMethod, context: usize, nodes: usize) -> Option<f64> {
        let points = self.points(|timed| timed.method == method && near(context, timed.context));
        let below = points.iter().rev().find(|point| point.0 <= nodes)?;
        let above = points.iter().find(|point| point.0 >= nodes)?;
        if above.0 == below.0 {
            return Some(below.1);
        }
        let share = (nodes - below.0) as f64 / (above.0 - below.0) as f64;
        Some(below.1 + share * (above.1 - below.1))
    }

    /// The shortest time by number of nodes, never more than that of more nodes: any disturbance
    /// makes a request longer.
    fn points(&self, which: impl Fn(&Timed) -> bool) -> Vec<(usize, f64)> {
        let mut points: Vec<(usize, f64)> = self
            .verify
            .iter()
            .filter(|timed| which(timed))
            .map(|timed| (timed.nodes, timed.seconds))
            .collect();
        points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|point| point.0);
        let mut least = f64::MAX;
        for point in points.iter_mut().rev() {
            least = least.min(point.1);
            point.1 = least;
        }
        points
    }

    /// The prediction for each method at each measured context and each of [`ACCEPTANCES`], if
    /// drafting costs nothing.
    pub fn prospects(&self) -> Vec<Prospect> {
        let at = |(method, context): (VerifyMethod, usize)| {
            ACCEPTANCES.into_iter().filter_map(move |acceptance| self.best(method, context, acceptance))
        };
        self.positions().into_iter().flat_map(at).collect()
    }

    fn best(&self, method: VerifyMethod, context: usize, acceptance: f64) -> Option<Prospect> {
        // A round without a draft yields a token too: where plain decoding was measured slower, the
        // figure is of another context or of a disturbed moment.
        let token = self.token(context)?.min(self.round(method, context, 0).unwrap_or(f64::MAX));
        let of = |gamma: usize| {
            let round = self.round(method, context, gamma)?;
            let gain = tokens(acceptance, gamma) * token / round.max(1e-7);
            Some(Prospect { method, context, acceptance, gamma, gain })
        };
        (1..=MAX_GAMMA).filter_map(of).max_by(|a, b| a.gain.total_cmp(&b.gain))
    }

    /// The assumptions that costs begin with.
    pub fn prior(&self) -> Prior {
        let rounds = |(method, context): (VerifyMethod, usize)| {
            let points = self.points(|timed| timed.method == method && near(context, timed.context));
            points.into_iter().map(move |(nodes, seconds)| Probed { method, context, nodes, seconds })
        };
        let tokens = self.token.len() as f64;
        let token = self.token.iter().map(|&(_, seconds)| seconds).sum::<f64>() / tokens;
        Prior {
            verify: self.positions().into_iter().flat_map(rounds).collect(),
            token: (tokens > 0.0).then_some(token),
            switch_in: self.switch_in,
            switch_out: self.switch_out,
            cancel: self.cancel,
        }
    }
}

/// True if two contexts are the same one, grown by a few tokens.
fn near(one: usize, other: usize) -> bool {
    one.abs_diff(other) < 64 && one.max(other) < 2 * one.min(other)
}

/// The conclusion from the measurements.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// True if some method pays, at least where nearly every token is accepted; `None` if too
    /// little is known. Where it is `Some(false)`, no request is speculated on.
    pub pays: Option<bool>,
    /// The same in a sentence for the operator.
    pub words: String,
    /// The recommended policy, as text of a policy file; `None` if too little is known.
    pub policy: Option<String>,
}

/// Judges the measurements. `known`: the verification methods that the server has.
pub fn judge(measured: &Measured, known: &[VerifyMethod]) -> Judgement {
    let prospects = measured.prospects();
    let most = ACCEPTANCES.into_iter().fold(0.0, f64::max);
    let high = prospects.iter().filter(|prospect| prospect.acceptance >= most);
    let Some(best) = high.max_by(|a, b| a.gain.total_cmp(&b.gain)) else {
        let (words, policy) = if known.is_empty() {
            let words = "No verification method: this server cannot verify; requests are passed through.";
            (words, Some(policy(None, true)))
        } else {
            ("Unknown: too little could be measured to predict a gain.", None)
        };
        return Judgement { pays: None, words: words.to_owned(), policy };
    };
    if best.gain >= MIN_GAIN {
        let words = some(&prospects, best);
        return Judgement { pays: Some(true), words, policy: Some(policy(Some(best.gamma), false)) };
    }
    Judgement { pays: Some(false), words: nothing(measured, best, most), policy: Some(policy(None, true)) }
}

/// The speedup of the best method, in words for the operator. A speedup only where nearly every
/// draft is accepted is no promise: texts with that acceptance are the exception.
fn some(prospects: &[Prospect], best: &Prospect) -> String {
    let usual = prospects.iter().any(|other| other.acceptance < best.acceptance && other.gain >= MIN_GAIN);
    let gains = format!(
        "{:.1}x at acceptance {} with `{}`, gamma {}; {}",
        best.gain,
        best.acceptance,
        best.method.name(),
        best.gamma,
        least(prospects, best),
    );
    if usual {
        format!("Speculation pays here: up to {gains}.")
    } else {
        format!(
            "Speculation will probably not pay here: {gains}. It is tried on texts whose drafts are accepted that often."
        )
    }
}

/// The predicted speedups of the best method at lower acceptance, in words.
fn least(prospects: &[Prospect], best: &Prospect) -> String {
    let same = prospects.iter().filter(|other| other.method == best.method && other.context == best.context);
    let lower: Vec<String> = same
        .filter(|other| other.acceptance < best.acceptance)
        .map(|other| format!("{:.1}x at {}", other.gain, other.acceptance))
        .collect();
    if lower.is_empty() { "less at lower acceptance".to_owned() } else { lower.join(", ") }
}

/// Reason why no method pays, in words for the operator.
fn nothing(measured: &Measured, best: &Prospect, acceptance: f64) -> String {
    let gamma = 4;
    let round = measured.round(best.method, best.context, gamma);
    let steps = round.zip(measured.token(best.context)).map(|(round, token)| round / token);
    let gain = short_of_min(best.gain);
    let Some(steps) = steps else {
        return format!(
            "Speculation will probably not pay here: {gain} even at acceptance {acceptance}; decoded plainly."
        );
    };
    format!(
        "Speculation will probably not pay here: one round of {gamma} costs {steps:.1} steps with `{}`, the best of them, and brings {:.1} \
         tokens even at acceptance {acceptance}; decoded plainly, because speculation would be {gain}.",
        best.method.name(),
        tokens(acceptance, gamma),
    )
}

/// A predicted speedup below the minimum that is worth a trial, and that minimum where it is a
/// speedup at all. Rounded down, so that the two are never the same in print.
fn short_of_min(gain: f64) -> String {
    if gain < 1.0 {
        return format!("{gain:.1}x");
    }
    format!("{:.2}x (it has to be {MIN_GAIN:.2}x)", (gain * 100.0).floor() / 100.0)
}

/// The text of a policy file for a server on which rounds of up to `gamma` nodes pay (`None`:
/// [`MAX_GAMMA`]; at least 2); `plain`: none does.
pub fn policy(gamma: Option<usize>, plain: bool) -> String {
    let mode = if plain { "plain" } else { "auto" };
    let gamma = gamma.unwrap_or(MAX_GAMMA).max(2);
    format!(
        "version: 1\nname: probed\nmode: {mode}\ndrafters:\n  - {{ kind: prompt_lookup, ngram: {{ min: 2, max: 8 }} }}\n\
         gamma: {{ max: {gamma}, margin: {MARGIN:.2} }}\naccept: {{ rule: exact }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(step: f64, round: impl Fn(usize) -> f64) -> Measured {
        let timed = |context: usize, nodes: usize| Timed {
            method: VerifyMethod::Score,
            context: context + nodes,
            nodes,
            seconds: round(nodes),
            computed: None,
        };
        let positions =
            [40, 1000].into_iter().flat_map(|context| [0, 2, 4, 8].map(|nodes| timed(context, nodes)));
        Measured { verify: positions.collect(), token: vec![(40, step)], ..Measured::default() }
    }

    #[test]
    fn a_round_of_four_at_nine_tenths_yields_four_tokens() {
        assert!((tokens(0.9, 4) - (1.0 - 0.9_f64.powi(5)) / 0.1).abs() < 1e-12);
        assert!((tokens(0.5, 0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn growing_contexts_are_one_position_and_short_and_long_are_two() {
        assert_eq!(
            measured(0.02, |_| 0.03).positions(),
            [(VerifyMethod::Score, 40), (VerifyMethod::Score, 1000)]
        );
    }

    #[test]
    fn an_inexpensive_round_pays_and_reports_its_speedup() {
        let judgement = judge(&measured(0.020, |nodes| 0.022 + 0.001 * nodes as f64), &[VerifyMethod::Score]);
        assert_eq!(judgement.pays, Some(true));
        let gain = tokens(0.9, 8) * 0.020 / 0.030;
        assert!(
            judgement.words.contains(&format!("up to {gain:.1}x at acceptance 0.9 with `score`, gamma 8"))
        );
        assert!(judgement.policy.unwrap().contains("mode: auto"));
    }

    #[test]
    fn a_speedup_never_exceeds_the_tokens_of_a_round() {
        // The only plain tokens that were timed had a context of 1000, where they take twice as
        // long.
        let round = |nodes: usize| 0.1 + 0.001 * nodes as f64;
        let measured = Measured { token: vec![(1000, 0.2)], ..measured(0.2, round) };
        for prospect in measured.prospects() {
            assert!(prospect.gain < tokens(prospect.acceptance, prospect.gamma), "{prospect:?}");
        }
    }

    #[test]
    fn one_disturbed_request_does_not_lengthen_the_others() {
        let mut measured = measured(0.02, |nodes| 0.020 + 0.001 * nodes as f64);
        measured.verify[0].seconds = 0.5;
        assert!((measured.round(VerifyMethod::Score, 40, 0).unwrap() - 0.022).abs() < 1e-12);
        assert!((measured.round(VerifyMethod::Score, 40, 8).unwrap() - 0.028).abs() < 1e-12);
    }

    #[test]
    fn an_expensive_round_does_not_pay_and_reports_why() {
        let judgement = judge(&measured(0.010, |nodes| 0.05 + 0.003 * nodes as f64), &[VerifyMethod::Score]);
        assert_eq!(judgement.pays, Some(false));
        assert!(judgement.words.starts_with(
            "Speculation will probably not pay here: one round of 4 costs 6.2 steps with `score`"
        ));
        assert!(judgement.policy.unwrap().contains("mode: plain"));
    }

    /// Rounds of `steps` plain steps, whatever is drafted, at acceptances 0.5, 0.7 and 0.9.
    #[rstest::rstest]
    #[case::often(
        1.2,
        "Speculation pays here: up to 5.1x at acceptance 0.9 with `score`, gamma 8; 1.7x at 0.5, 2.7x at 0.7."
    )]
    #[case::at_seven_tenths(
        2.5,
        "Speculation pays here: up to 2.5x at acceptance 0.9 with `score`, gamma 8; 0.8x at 0.5, 1.3x at 0.7."
    )]
    #[case::only_where_nearly_all_is_accepted(
        5.5,
        "Speculation will probably not pay here: 1.1x at acceptance 0.9 with `score`, gamma 8; 0.4x at 0.5, 0.6x at 0.7. \
         It is tried on texts whose drafts are accepted that often."
    )]
    #[case::nowhere(
        8.0,
        "Speculation will probably not pay here: one round of 4 costs 8.0 steps with `score`, the best of them, and \
         brings 4.1 tokens even at acceptance 0.9; decoded plainly, because speculation would be 0.8x."
    )]
    fn the_words_promise_the_speedup_at_usual_acceptance(#[case] steps: f64, #[case] words: &str) {
        let judgement = judge(&measured(0.020, |_| 0.020 * steps), &[VerifyMethod::Score]);
        assert_eq!(judgement.words, words);
    }

    #[test]
    fn a_speedup_that_is_too_small_is_reported_with_the_minimum() {
        let judgement =
            judge(&measured(0.020, |nodes| 0.0745 + 0.005 * nodes as f64), &[VerifyMethod::Score]);
        assert_eq!(judgement.pays, Some(false));
        assert!(
            judgement
                .words
                .ends_with("decoded plainly, because speculation would be 1.07x (it has to be 1.10x)."),
            "{}",
            judgement.words
        );
        assert_eq!(short_of_min(1.0999), "1.09x (it has to be 1.10x)");
        assert_eq!(short_of_min(0.44), "0.4x");
    }

    #[test]
    fn without_measurements_nothing_is_claimed() {
        assert_eq!(judge(&Measured::default(), &[VerifyMethod::FanOut]).pays, None);
        assert!(judge(&Measured::default(), &[]).words.starts_with("No verification method"));
    }

    #[test]
    fn times_between_measured_ones_are_on_the_line() {
        let measured = measured(0.02, |nodes| 0.01 * nodes as f64);
        assert!((measured.round(VerifyMethod::Score, 40, 3).unwrap() - 0.03).abs() < 1e-12);
        assert_eq!(measured.round(VerifyMethod::Score, 40, 9), None);
        assert_eq!(measured.round(VerifyMethod::FanOut, 40, 2), None);
    }
}
