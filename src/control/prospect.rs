//! What leaping would bring on a server, from a handful of measured times.
//!
//! A round of `g` drafted tokens that are each accepted with probability `a` brings (1 − a^(g+1)) / (1 − a)
//! tokens and takes V(g) and the time of the draft; riding takes t_AR for each token. Nothing else is assumed, so the
//! same figures tell an operator what to expect and a chooser where to begin.

use crate::words::Plan;

/// Acceptances of a single token for which a gain is predicted.
pub const ACCEPTANCES: [f64; 3] = [0.5, 0.7, 0.9];
/// Longest draft of a round that is considered, in nodes.
pub const GAMMA_MOST: usize = 8;
/// A predicted gain below this is not worth a trial: it is the margin that leaping must have to begin.
pub const GAIN_LEAST: f64 = 1.10;

/// One timed verify call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// How the draft was verified.
    pub plan: Plan,
    /// Tokens of the context.
    pub context: usize,
    /// Draft nodes in it.
    pub nodes: usize,
    /// Seconds that it took.
    pub seconds: f64,
    /// Tokens that the engine really computed; `None` if it does not report that.
    pub computed: Option<u32>,
}

/// What has been measured at one server. Times in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Verify calls, in the order in which they were made.
    pub verify: Vec<Timed>,
    /// Seconds per ridden token, by tokens of the context.
    pub token: Vec<(usize, f64)>,
    /// What the first token of a ride takes beyond a step.
    pub t_in: Option<f64>,
    /// What the first round after a ride takes beyond another round.
    pub t_out: Option<f64>,
    /// From leaving a ride to the engine being free again.
    pub cancel: Option<f64>,
}

/// What one plan is expected to bring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prospect {
    /// How drafts are verified.
    pub plan: Plan,
    /// Tokens of the context.
    pub context: usize,
    /// Probability that a drafted token is accepted.
    pub acceptance: f64,
    /// The best length of a draft.
    pub gamma: usize,
    /// Predicted speed as a multiple of riding.
    pub gain: f64,
}

/// Tokens that a round of `gamma` drafted tokens brings on average.
pub fn tokens(acceptance: f64, gamma: usize) -> f64 {
    (0..=gamma).map(|depth| acceptance.powi(depth as i32)).sum()
}

impl Measured {
    /// Seconds per ridden token at about this context; `None` if nothing was measured.
    pub fn token(&self, context: usize) -> Option<f64> {
        let (nearest, _) = self.token.iter().min_by_key(|(at, _)| at.abs_diff(context))?;
        let same = self.token.iter().filter(|(at, _)| at == nearest || near(*at, *nearest));
        same.map(|&(_, seconds)| seconds.max(1e-7)).min_by(f64::total_cmp)
    }

    /// The plans and contexts that were measured, in that order.
    pub fn places(&self) -> Vec<(Plan, usize)> {
        let mut places: Vec<(Plan, usize)> = Vec::new();
        for timed in &self.verify {
            let near = |&(plan, context): &(Plan, usize)| plan == timed.plan && near(context, timed.context);
            if !places.iter().any(near) {
                places.push((timed.plan, timed.context));
            }
        }
        places
    }

    /// Expected seconds of a round; `None` beyond what was measured.
    pub fn round(&self, plan: Plan, context: usize, nodes: usize) -> Option<f64> {
        let points = self.points(|timed| timed.plan == plan && near(context, timed.context));
        let below = points.iter().rev().find(|point| point.0 <= nodes)?;
        let above = points.iter().find(|point| point.0 >= nodes)?;
        if above.0 == below.0 {
            return Some(below.1);
        }
        let share = (nodes - below.0) as f64 / (above.0 - below.0) as f64;
        Some(below.1 + share * (above.1 - below.1))
    }

    /// The shortest time by number of nodes, never more than that of more nodes: whatever disturbs a call makes
    /// it longer.
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

    /// What each plan is expected to bring at each measured context and each of [`ACCEPTANCES`]. `t_draft`:
    /// seconds per drafted token.
    pub fn prospects(&self, t_draft: f64) -> Vec<Prospect> {
        let at = |(plan, context): (Plan, usize)| {
            ACCEPTANCES
                .into_iter()
                .filter_map(move |acceptance| self.best(plan, context, acceptance, t_draft))
        };
        self.places().into_iter().flat_map(at).collect()
    }

    fn best(&self, plan: Plan, context: usize, acceptance: f64, t_draft: f64) -> Option<Prospect> {
        // A round without a draft brings a token too: where riding was measured slower, the figure is of another context
        // or of a moment that was disturbed.
        let token = self.token(context)?.min(self.round(plan, context, 0).unwrap_or(f64::MAX));
        let of = |gamma: usize| {
            let round = self.round(plan, context, gamma)? + gamma as f64 * t_draft;
            let gain = tokens(acceptance, gamma) * token / round.max(1e-7);
            Some(Prospect { plan, context, acceptance, gamma, gain })
        };
        (1..=GAMMA_MOST).filter_map(of).max_by(|a, b| a.gain.total_cmp(&b.gain))
    }

    /// The same figures as prior of a chooser.
    pub fn prior(&self) -> Prior {
        let curves = |plan: Plan| {
            let places = self.places().into_iter().filter(|place| place.0 == plan);
            let points = |context| self.points(|timed| timed.plan == plan && near(context, timed.context));
            places.map(|(_, context)| Curve { context, points: points(context) }).collect()
        };
        let tokens = self.token.len() as f64;
        let token = self.token.iter().map(|&(_, seconds)| seconds).sum::<f64>() / tokens;
        Prior {
            verify: Plan::ALL.map(curves),
            token: (tokens > 0.0).then_some(token),
            switch_in: self.t_out,
            switch_out: self.t_in,
            cancel: self.cancel,
        }
    }
}

/// Whether two contexts are the same one, grown by a few tokens.
fn near(one: usize, other: usize) -> bool {
    one.abs_diff(other) < 64 && one.max(other) < 2 * one.min(other)
}

/// Times of verify calls with contexts of about the same length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Tokens of the context.
    pub context: usize,
    /// Draft nodes and seconds, both rising.
    pub points: Vec<(usize, f64)>,
}

/// What a chooser believes of an epoch until it has measured it itself. Times in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prior {
    /// Times of verify calls by [`Plan::index`], one curve for each length of context that was measured.
    pub verify: [Vec<Curve>; Plan::ALL.len()],
    /// Seconds per ridden token.
    pub token: Option<f64>,
    /// Extra cost of going from ride to leap.
    pub switch_in: Option<f64>,
    /// Extra cost of going from leap to ride.
    pub switch_out: Option<f64>,
    /// How long a cancelled call takes to be gone.
    pub cancel: Option<f64>,
}

/// The conclusion from what was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// Whether some plan pays, at least where nearly everything is accepted; `None` if too little is known. Where it is
    /// `Some(false)`, nothing leaps.
    pub pays: Option<bool>,
    /// The same in a sentence for the operator.
    pub words: String,
    /// The recommended policy, as text of a policy file.
    pub policy: String,
}

/// Judges what was measured. `known`: the plans that the server has.
pub fn judge(measured: &Measured, known: &[Plan]) -> Judgement {
    let prospects = measured.prospects(0.0);
    let most = ACCEPTANCES.into_iter().fold(0.0, f64::max);
    let high = prospects.iter().filter(|prospect| prospect.acceptance >= most);
    let Some(best) = high.max_by(|a, b| a.gain.total_cmp(&b.gain)) else {
        let words = if known.is_empty() {
            "No plan: this server cannot be asked to verify; it is relayed.".to_owned()
        } else {
            "Unknown: too little could be measured to predict a gain.".to_owned()
        };
        return Judgement { pays: None, words, policy: policy(None, known.is_empty()) };
    };
    if best.gain >= GAIN_LEAST {
        let words = some(&prospects, best);
        return Judgement { pays: Some(true), words, policy: policy(Some(best.gamma), false) };
    }
    Judgement { pays: Some(false), words: nothing(measured, best, most), policy: policy(None, true) }
}

/// What the best plan gains, in words for the operator. A gain only where nearly every draft is accepted is no promise:
/// texts that are accepted so often are the exception.
fn some(prospects: &[Prospect], best: &Prospect) -> String {
    let usual = prospects.iter().any(|other| other.acceptance < best.acceptance && other.gain >= GAIN_LEAST);
    let gains = format!(
        "{:.1}x at acceptance {} with `{}`, gamma {}; {}",
        best.gain,
        best.acceptance,
        best.plan.name(),
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

/// The predicted gains of the best plan at lower acceptance, in words.
fn least(prospects: &[Prospect], best: &Prospect) -> String {
    let same = prospects.iter().filter(|other| other.plan == best.plan && other.context == best.context);
    let told: Vec<String> = same
        .filter(|other| other.acceptance < best.acceptance)
        .map(|other| format!("{:.1}x at {}", other.gain, other.acceptance))
        .collect();
    if told.is_empty() { "less at lower acceptance".to_owned() } else { told.join(", ") }
}

/// Why no plan pays, in words for the operator.
fn nothing(measured: &Measured, best: &Prospect, acceptance: f64) -> String {
    let gamma = 4;
    let round = measured.round(best.plan, best.context, gamma);
    let steps = round.zip(measured.token(best.context)).map(|(round, token)| round / token);
    let gain = short_of_least(best.gain);
    let Some(steps) = steps else {
        return format!(
            "Speculation will probably not pay here: {gain} even at acceptance {acceptance}; ridden."
        );
    };
    format!(
        "Speculation will probably not pay here: one round of {gamma} costs {steps:.1} steps with `{}`, the best of them, and brings {:.1} \
         tokens even at acceptance {acceptance}; ridden, because leaping would be {gain}.",
        best.plan.name(),
        tokens(acceptance, gamma),
    )
}

/// A gain below the least that is worth a trial; that one too, where this is a gain at all. Rounded down, so that the
/// two are never the same in print.
fn short_of_least(gain: f64) -> String {
    if gain < 1.0 {
        return format!("{gain:.1}x");
    }
    format!("{:.2}x (it has to be {GAIN_LEAST:.2}x)", (gain * 100.0).floor() / 100.0)
}

/// The text of a policy file for a server on which rounds of up to `gamma` pay.
fn policy(gamma: Option<usize>, ride: bool) -> String {
    let mode = if ride { "ride" } else { "auto" };
    let gamma = gamma.unwrap_or(GAMMA_MOST).max(2);
    format!(
        "version: 1\nname: probed\nmode: {mode}\ndrafters:\n  - {{ kind: prompt_lookup, ngram: {{ min: 2, max: 8 }} }}\n\
         gamma: {{ max: {gamma}, margin: 0.10, stay: 0.05 }}\naccept: {{ rule: exact }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(step: f64, round: impl Fn(usize) -> f64) -> Measured {
        let timed = |context: usize, nodes: usize| Timed {
            plan: Plan::Score,
            context: context + nodes,
            nodes,
            seconds: round(nodes),
            computed: None,
        };
        let places =
            [40, 1000].into_iter().flat_map(|context| [0, 2, 4, 8].map(|nodes| timed(context, nodes)));
        Measured { verify: places.collect(), token: vec![(40, step)], ..Measured::default() }
    }

    #[test]
    fn a_round_of_four_at_nine_tenths_brings_four_tokens() {
        assert!((tokens(0.9, 4) - (1.0 - 0.9_f64.powi(5)) / 0.1).abs() < 1e-12);
        assert!((tokens(0.5, 0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn growing_contexts_are_one_place_and_short_and_long_are_two() {
        assert_eq!(measured(0.02, |_| 0.03).places(), [(Plan::Score, 40), (Plan::Score, 1000)]);
    }

    #[test]
    fn a_cheap_round_pays_and_says_how_much() {
        let judgement = judge(&measured(0.020, |nodes| 0.022 + 0.001 * nodes as f64), &[Plan::Score]);
        assert_eq!(judgement.pays, Some(true));
        let gain = tokens(0.9, 8) * 0.020 / 0.030;
        assert!(
            judgement.words.contains(&format!("up to {gain:.1}x at acceptance 0.9 with `score`, gamma 8"))
        );
        assert!(judgement.policy.contains("mode: auto"));
    }

    #[test]
    fn leaping_is_never_said_to_bring_more_than_the_tokens_of_a_round() {
        // The only ridden tokens that were timed had a context of 1000, where they take twice as long.
        let round = |nodes: usize| 0.1 + 0.001 * nodes as f64;
        let measured = Measured { token: vec![(1000, 0.2)], ..measured(0.2, round) };
        for prospect in measured.prospects(0.0) {
            assert!(prospect.gain < tokens(prospect.acceptance, prospect.gamma), "{prospect:?}");
        }
    }

    #[test]
    fn one_call_that_was_disturbed_does_not_lengthen_the_others() {
        let mut measured = measured(0.02, |nodes| 0.020 + 0.001 * nodes as f64);
        measured.verify[0].seconds = 0.5;
        assert!((measured.round(Plan::Score, 40, 0).unwrap() - 0.022).abs() < 1e-12);
        assert!((measured.round(Plan::Score, 40, 8).unwrap() - 0.028).abs() < 1e-12);
    }

    #[test]
    fn a_dear_round_does_not_and_says_why() {
        let judgement = judge(&measured(0.010, |nodes| 0.05 + 0.003 * nodes as f64), &[Plan::Score]);
        assert_eq!(judgement.pays, Some(false));
        assert!(judgement.words.starts_with(
            "Speculation will probably not pay here: one round of 4 costs 6.2 steps with `score`"
        ));
        assert!(judgement.policy.contains("mode: ride"));
    }

    /// Rounds of so many plain steps, whatever is drafted, at acceptances 0.5, 0.7 and 0.9.
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
         brings 4.1 tokens even at acceptance 0.9; ridden, because leaping would be 0.8x."
    )]
    fn the_verdict_promises_what_is_gained_at_usual_acceptance(#[case] steps: f64, #[case] words: &str) {
        let judgement = judge(&measured(0.020, |_| 0.020 * steps), &[Plan::Score]);
        assert_eq!(judgement.words, words);
    }

    #[test]
    fn a_gain_that_is_too_small_is_told_with_the_least_that_is_not() {
        let judgement = judge(&measured(0.020, |nodes| 0.0745 + 0.005 * nodes as f64), &[Plan::Score]);
        assert_eq!(judgement.pays, Some(false));
        assert!(
            judgement.words.ends_with("ridden, because leaping would be 1.07x (it has to be 1.10x)."),
            "{}",
            judgement.words
        );
        assert_eq!(short_of_least(1.0999), "1.09x (it has to be 1.10x)");
        assert_eq!(short_of_least(0.44), "0.4x");
    }

    #[test]
    fn without_figures_nothing_is_claimed() {
        assert_eq!(judge(&Measured::default(), &[Plan::FanOut]).pays, None);
        assert!(judge(&Measured::default(), &[]).words.starts_with("No plan"));
    }

    #[test]
    fn the_policy_is_one() {
        for text in [policy(Some(5), false), policy(None, true)] {
            let process = crate::config::process::parse("process", "version: 1\n").unwrap();
            let sources = [("probed.yaml".to_owned(), text.clone())];
            assert!(crate::config::load::parse_policies(&sources, &process).is_ok(), "{text}");
        }
    }

    #[test]
    fn times_between_measured_ones_are_on_the_line() {
        let measured = measured(0.02, |nodes| 0.01 * nodes as f64);
        assert!((measured.round(Plan::Score, 40, 3).unwrap() - 0.03).abs() < 1e-12);
        assert_eq!(measured.round(Plan::Score, 40, 9), None);
        assert_eq!(measured.round(Plan::FanOut, 40, 2), None);
    }
}
