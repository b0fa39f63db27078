//! A decision in words: what would happen to a request, and why, step by step.
//!
//! This file decides nothing. The steps and their results come from [`decide_and_say_why`], which walks the same
//! functions as the proxy does.

use serde::{Deserialize, Serialize};

use super::decide::{Bypass, Decision, Finding, Outcome, Step, Verdict, decide_and_say_why};
use super::facts::{Body, Facts};
use super::part::{Part, parts};
use super::{Accept, Drafter, Policy, Rule, Ruling};
use crate::openai;
use crate::words::{BypassReason, Plan, RideReason};

/// What would happen to a request, and why, as `foretell explain` and the admin API show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// `eligible`, `bypassed`, `failed` (no backend or no server) or `undecided`.
    pub path: String,
    /// Name of the reason why it is bypassed or would only ride.
    pub reason: Option<String>,
    /// The result in one sentence.
    pub words: String,
    /// Further remarks, one sentence each.
    pub notes: Vec<String>,
    /// Where the facts about the server come from: `proxy`, `server` or `nobody` (not known).
    pub asked: String,
    /// Name of the API route.
    pub route: String,
    /// Model id as sent by the client.
    pub model: Option<String>,
    /// Tenant of the request.
    pub tenant: Option<String>,
    /// Name of the chosen backend.
    pub backend: Option<String>,
    /// URL of the replica that would be chosen now.
    pub replica: Option<String>,
    /// Effective temperature, if it is known.
    pub temperature: Option<f64>,
    /// Length of the prompt, tokens.
    pub prompt_tokens: Option<usize>,
    /// Whether that length was counted; otherwise it is estimated as a quarter of the bytes.
    pub prompt_tokens_exact: bool,
    /// Every step, in order.
    pub steps: Vec<StepLine>,
    /// Every parameter of the body.
    pub parameters: Vec<ParameterLine>,
    /// The policy that applies, as `name@revision`.
    pub policy: Option<String>,
    /// Every policy, in match order.
    pub policies: Vec<PolicyLine>,
    /// Names of the plans that would verify drafts, preferred first.
    pub plans: Vec<String>,
    /// Most draft tokens of a round.
    pub gamma_max: Option<usize>,
    /// The drafters of the policy that applies.
    pub drafters: Vec<DrafterLine>,
    /// How drafts would be judged; `null` where the request would not be driven.
    pub accept: Option<AcceptLine>,
    /// What the running proxy knows at this moment; `null` without one, or where the request would not be driven.
    pub now: Option<Now>,
}

/// How drafts would be judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptLine {
    /// The rule of the policy.
    pub rule: String,
    /// Its tolerance at this temperature and the present load.
    pub tolerance: Option<f64>,
    /// The least and the most that its tolerance is at this temperature, whatever the load.
    pub between: (f64, f64),
    /// Why nothing is relaxed; `null` if the rule is.
    pub exact: Option<String>,
}

/// What a running proxy knows at the moment of the question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Now {
    /// How busy the engine is, 0 to 1, as curves over load take it.
    pub load: f64,
    /// Ridden tokens that leaping may still lose on the replica.
    pub credit: f64,
    /// Seconds of a ridden token.
    pub token_seconds: Option<f64>,
    /// How many times as fast as riding leaping is expected to be.
    pub gain: Option<GainLine>,
    /// The gates by the engine's load report, with what they read.
    pub gates: Vec<GateLine>,
    /// Every reason not to leap from the first token on.
    pub not_leaping: Vec<WhyLine>,
    /// Where the policy has several models that can draft, how likely each is drawn for this request.
    pub models: Vec<ModelLine>,
}

/// How likely a model is drawn to draft for a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelLine {
    /// Its name in the process file.
    pub model: String,
    /// The probability.
    pub chance: f64,
}

/// An expected gain and its spread of 95 %.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GainLine {
    /// Lower bound.
    pub low: f64,
    /// The mean.
    pub middle: f64,
    /// Upper bound.
    pub high: f64,
    /// Rounds of this kind of request that it rests on, real and virtual, decayed.
    pub rounds: f64,
    /// What the costs rest on: `guess`, `probe` or `measured`.
    pub costs: String,
}

/// A gate, what it reads, and from where on it is closed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateLine {
    /// Its name under `gates` of the policy.
    pub gate: String,
    /// What it reads; `null` if the engine does not report that.
    pub reads: Option<f64>,
    /// Above this it is closed.
    pub limit: f64,
    /// Whether it is closed.
    pub closed: bool,
}

/// A reason not to leap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyLine {
    /// Its name.
    pub reason: String,
    /// It in words.
    pub words: String,
}

/// Result of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLine {
    /// Name of the step.
    pub step: String,
    /// `passed`, `rides`, `bypass`, `failed` or `unknown`.
    pub verdict: String,
    /// Name of the reason, for a ride, a bypass or a failure.
    pub reason: Option<String>,
    /// The result in words.
    pub words: String,
}

/// How one parameter is treated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterLine {
    /// Name of the parameter.
    pub name: String,
    /// API or engine that defines it; `null` if it is unknown.
    pub owner: Option<String>,
    /// Its treatment: carried, emulated, inert, neutral, bypass, unknown, or omitted (not in the body).
    pub treatment: String,
    /// Name of the reason why it prevents leaping; `null` if it does not.
    pub refused: Option<String>,
}

/// Whether one policy applies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyLine {
    /// `name@revision`.
    pub policy: String,
    /// Mode of the policy.
    pub mode: String,
    /// Whether it applies; `null` if that is not known.
    pub matches: Option<bool>,
    /// Every condition that does not hold or is not known to hold, in words.
    pub mismatches: Vec<String>,
}

/// Whether one drafter takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterLine {
    /// Kind of the drafter, with the name of its model.
    pub drafter: String,
    /// Whether it drafts; `null` if that is not known.
    pub drafts: Option<bool>,
    /// How a model with another vocabulary drafts; why it does not draft, or why that is not known.
    pub why: Option<String>,
}

/// Data for an explanation that the decision itself does not need.
#[derive(Clone, Debug, Default)]
pub struct Besides {
    /// Where the facts about the server come from: `proxy`, `server` or `nobody` (not known).
    pub asked: &'static str,
    /// URL of the replica that would be chosen now.
    pub replica: Option<String>,
    /// Further remarks, one sentence each.
    pub notes: Vec<String>,
}

/// What is asked about a session with this ruling, at this effective temperature, with a prompt of so many tokens.
pub type AskNow<'a> = &'a dyn Fn(&Ruling, f64, usize) -> Option<Now>;

/// Explains a request. `parameters`: how each parameter of its body was judged. `closed`: the gate that is closed now
/// for a session with this ruling. `now`: what a running proxy knows of it.
pub fn explain(
    facts: &Facts<'_>,
    parameters: &[openai::Finding],
    besides: Besides,
    closed: impl Fn(&Ruling) -> Option<RideReason>,
    now: AskNow<'_>,
) -> Explanation {
    let decision = decide_and_say_why(facts);
    let request = facts.body.known().and_then(Body::request);
    let backend = facts.backend.known().flatten().map(|backend| backend.name);
    let ruling = match &decision.outcome {
        Outcome::Drive(ruling) => Some(&**ruling),
        Outcome::Bypass(_) | Outcome::Nobody | Outcome::Undecided(..) => None,
    };
    let gate = ruling.and_then(closed);
    let temperature = decision.temperature.known();
    let size = request.map(openai::Request::prompt_size);
    let tokens = size.map_or(0, |size| size.tokens);
    let now = ruling.zip(temperature).and_then(|(ruling, temperature)| now(ruling, temperature, tokens));
    let accept = ruling.map(|ruling| accept(ruling, temperature.unwrap_or(0.0), now.as_ref()));
    let subject =
        request.map(|request| facts.subject(request, backend.unwrap_or_default(), decision.temperature));
    let policies = facts.policies.known().map_or(&[][..], super::PolicySet::policies);
    let lines = policies.iter().map(|policy| policy_line(policy, subject.as_ref())).collect::<Vec<_>>();
    let matching =
        || subject.as_ref().and_then(|subject| facts.policies.known()?.first_match(subject).known()?);
    let policy = ruling.map(|ruling| &ruling.policy).or_else(matching);
    let (path, reason, words) = verdict(&decision, ruling, gate);
    Explanation {
        path: path.to_owned(),
        reason: reason.map(ToOwned::to_owned),
        words,
        notes: besides.notes,
        asked: besides.asked.to_owned(),
        route: facts.route.name().to_owned(),
        model: request.map(|request| request.model.clone()).filter(|model| !model.is_empty()),
        tenant: facts.tenant.map(ToOwned::to_owned),
        backend: backend.map(ToOwned::to_owned),
        replica: besides.replica,
        temperature: decision.temperature.known(),
        prompt_tokens: size.map(|size| size.tokens),
        prompt_tokens_exact: size.is_some_and(|size| size.exact),
        steps: decision.findings.iter().map(StepLine::from).collect(),
        parameters: parameter_lines(parameters, &decision.outcome, facts.route),
        policy: policy.map(|policy| policy.label()),
        policies: lines,
        plans: ruling.map_or_else(Vec::new, plans),
        gamma_max: ruling.map(|ruling| ruling.rules.gamma_fixed.unwrap_or(ruling.rules.gamma_max)),
        drafters: policy.map_or_else(Vec::new, |policy| drafters(policy, facts)),
        accept,
        now,
    }
}

fn accept(ruling: &Ruling, temperature: f64, now: Option<&Now>) -> AcceptLine {
    let Accept { rule, tolerance, .. } = &ruling.policy.accept;
    // The curve over load is linear between its points: its extremes are among them.
    let loads = tolerance.load.iter().map(|point| point.0).chain([0.0, 1.0]);
    let all: Vec<f64> = loads.map(|load| tolerance.at(temperature, load)).collect();
    let between = (all.iter().copied().fold(1.0, f64::min), all.iter().copied().fold(0.0, f64::max));
    let told = [Plan::Tree, Plan::Score];
    let exact = match rule {
        Rule::Exact => Some("it is the exact rule"),
        _ if ruling.sampling.seed.is_some() => Some("the request has a seed: it asks for its own text again"),
        _ if temperature <= 0.0 => Some("at temperature 0 there is nothing to relax"),
        _ if between.1 <= 0.0 => Some("its tolerance is 0 at this temperature"),
        Rule::Fly if !ruling.rules.plans.contains(&Plan::Tree) => {
            Some("no plan of this server tells probabilities beside samples")
        }
        _ if !ruling.rules.plans.iter().any(|plan| told.contains(plan)) => {
            Some("no plan of this server tells probabilities")
        }
        _ => None,
    };
    AcceptLine {
        rule: rule.name().to_owned(),
        tolerance: now.map(|now| if exact.is_some() { 0.0 } else { tolerance.at(temperature, now.load) }),
        between: if exact.is_some() { (0.0, 0.0) } else { between },
        exact: exact.map(ToOwned::to_owned),
    }
}

fn verdict(
    decision: &Decision,
    ruling: Option<&Ruling>,
    gate: Option<RideReason>,
) -> (&'static str, Option<&'static str>, String) {
    let findings = &decision.findings;
    if let Some(failed) = nobody(findings) {
        return failed;
    }
    let bypassed = match &decision.outcome {
        Outcome::Bypass(bypass) => Some(bypass.reason),
        _ => findings.iter().find_map(|finding| match finding.verdict {
            Verdict::Bypass(reason) => Some(reason),
            _ => None,
        }),
    };
    if let Some(reason) = bypassed {
        return ("bypassed", Some(reason.name()), relayed(reason, findings));
    }
    let rides = rides(findings);
    match (&decision.outcome, ruling) {
        (Outcome::Undecided(step, why), _) => undecided(*step, why, rides),
        (_, Some(ruling)) => eligible(ruling, rides, gate),
        // Every other outcome has been answered above.
        (_, None) => ("undecided", None, "it cannot be told".to_owned()),
    }
}

/// Without a backend or a server the request fails, whatever the steps decided.
fn nobody(findings: &[Finding]) -> Option<(&'static str, Option<&'static str>, String)> {
    findings.iter().find_map(|finding| {
        let (path, reason) = match finding.verdict {
            Verdict::NoBackend => ("failed", "no_backend"),
            Verdict::Down => ("bypassed", "unreachable"),
            _ => return None,
        };
        let words = format!("the client would get an error of Foretell's own: {}", finding.words);
        Some((path, Some(reason), words))
    })
}

/// The bypass in words: those of the last step that reports this reason, else the reason's own.
fn relayed(reason: BypassReason, findings: &[Finding]) -> String {
    let told = findings.iter().rev().find(|finding| finding.verdict == Verdict::Bypass(reason));
    let words = told.map_or(reason.words(), |finding| finding.words.as_str());
    if words.starts_with("because") {
        format!("it is relayed {words}")
    } else {
        format!("it is relayed: {words}")
    }
}

/// Why the session would never leap. The client's step is skipped: the permission step includes it.
fn rides(findings: &[Finding]) -> Option<(RideReason, &str)> {
    findings.iter().filter(|finding| finding.step != Step::Client).find_map(|finding| match finding.verdict {
        Verdict::Rides(reason) => Some((reason, finding.words.as_str())),
        _ => None,
    })
}

fn undecided(
    step: Step,
    why: &str,
    rides: Option<(RideReason, &str)>,
) -> (&'static str, Option<&'static str>, String) {
    let open = format!("not decided at step {}: {why}", step.name());
    match rides {
        Some((reason, words)) => {
            let words = format!("it would not leap ({words}); whether it is ridden or relayed is {open}");
            ("undecided", Some(reason.name()), words)
        }
        None => ("undecided", None, format!("whether it may leap is {open}")),
    }
}

fn eligible(
    ruling: &Ruling,
    rides: Option<(RideReason, &str)>,
    gate: Option<RideReason>,
) -> (&'static str, Option<&'static str>, String) {
    match (rides, gate) {
        (Some((reason, words)), _) => ("eligible", Some(reason.name()), words.to_owned()),
        (None, Some(gate)) => {
            let words = format!("it rides first, and would not leap now: {}", gate.words());
            ("eligible", Some(gate.name()), words)
        }
        (None, None) => {
            let leaps = match ruling.rules.gamma_fixed {
                Some(_) => "leaps at every token, whatever it costs (gamma.fixed)",
                None => "leaps when that is expected to pay",
            };
            ("eligible", None, format!("it rides first, and {leaps}"))
        }
    }
}

/// How each parameter of the body is treated. The one that the server cannot carry is refused too, also if it is not in
/// the body and its default is at fault.
fn parameter_lines(
    parameters: &[openai::Finding],
    outcome: &Outcome,
    route: openai::Route,
) -> Vec<ParameterLine> {
    let mut lines: Vec<ParameterLine> = parameters.iter().map(ParameterLine::from).collect();
    let Outcome::Bypass(Bypass { reason, parameter: Some(name), .. }) = outcome else { return lines };
    if let Some(line) = lines.iter_mut().find(|line| line.name == *name) {
        line.refused.get_or_insert(reason.name().to_owned());
    } else if let Some(row) = openai::parameters::find(route, name) {
        lines.push(ParameterLine {
            name: name.clone(),
            owner: Some(row.owner.name().to_owned()),
            treatment: "omitted".to_owned(),
            refused: Some(reason.name().to_owned()),
        });
    }
    lines
}

fn plans(ruling: &Ruling) -> Vec<String> {
    ruling.rules.plans.iter().map(|plan| plan.name().to_owned()).collect()
}

fn policy_line(policy: &Policy, subject: Option<&super::Subject<'_>>) -> PolicyLine {
    let mismatches = subject.map_or_else(Vec::new, |subject| policy.matcher.mismatches(subject));
    PolicyLine {
        policy: policy.label(),
        mode: policy.mode.name().to_owned(),
        matches: subject.and_then(|subject| policy.matches(subject).known()),
        mismatches: mismatches.iter().map(ToString::to_string).collect(),
    }
}

/// What is said of each of several models.
const SEVERAL: &str =
    "one of the models drafts for a request, drawn by what each would have saved on earlier texts";

fn drafters(policy: &Policy, facts: &Facts<'_>) -> Vec<DrafterLine> {
    let parts = parts(&policy.drafters, facts.models);
    let several = parts.iter().filter(|part| matches!(part, Part::Asked(..))).count() > 1;
    let line = |(drafter, part): (&Drafter, Part<'_>)| {
        let (drafts, why) = match part {
            Part::Inline(_) => (Some(true), None),
            Part::Asked(_, speech) => {
                let words = speech.words().into_iter().chain(several.then_some(SEVERAL));
                let words = words.collect::<Vec<_>>().join("; ");
                (Some(true), Some(words).filter(|words| !words.is_empty()))
            }
            Part::Absent(why) => (Some(false), Some(why.into_owned())),
            Part::Unknown(why) => (None, Some(why.to_owned())),
        };
        let drafter = match drafter {
            Drafter::Model { model, .. } => format!("{} {model}", drafter.kind()),
            other => other.kind().to_owned(),
        };
        DrafterLine { drafter, drafts, why }
    };
    policy.drafters.iter().zip(parts).map(line).collect()
}

impl From<&Finding> for StepLine {
    fn from(finding: &Finding) -> Self {
        let (verdict, reason) = match finding.verdict {
            Verdict::Passed => ("passed", None),
            Verdict::Rides(reason) => ("rides", Some(reason.name())),
            Verdict::Bypass(reason) => ("bypass", Some(reason.name())),
            Verdict::NoBackend => ("failed", Some("no_backend")),
            Verdict::Down => ("failed", Some("unreachable")),
            Verdict::Unknown => ("unknown", None),
        };
        Self {
            step: finding.step.name().to_owned(),
            verdict: verdict.to_owned(),
            reason: reason.map(ToOwned::to_owned),
            words: finding.words.clone(),
        }
    }
}

impl From<&openai::Finding> for ParameterLine {
    fn from(finding: &openai::Finding) -> Self {
        Self {
            name: finding.parameter.clone(),
            owner: finding.row.map(|row| row.owner.name().to_owned()),
            treatment: finding.row.map_or("unknown", |row| row.treatment.name()).to_owned(),
            refused: finding.refused.map(|reason| reason.name().to_owned()),
        }
    }
}
