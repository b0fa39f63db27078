//! A decision in words: what would happen to a request, and why, step by step.
//!
//! This file decides nothing. The steps and their results come from [`decide::explain`], which
//! calls the same functions as the proxy does.

use serde::{Deserialize, Serialize};

use super::decide::{self, Decision, Finding};
use super::facts::{Body, Facts, ServerState};
use super::outcome::{DecisionStep, Outcome, Passthrough, StepResult};
use super::part::{DrafterPart, parts};
use super::{Accept, Drafter, Policy, Rule, Ruling};
use foretell_core::control::forecast::Length;
use foretell_core::words::{PassthroughReason, PlainReason, VerifyMethod};
use foretell_wire::openai;

/// Predicted treatment of a request, with reasons, as `foretell explain` and the admin API show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// `eligible`, `passthrough`, `failed` (no backend) or `undecided`.
    pub path: String,
    /// Name of the reason why it is passed through, fails or would only be decoded plainly; `null`
    /// if nothing known prevents speculation.
    pub reason: Option<String>,
    /// The result in one sentence.
    pub words: String,
    /// Further remarks, one sentence each.
    pub notes: Vec<String>,
    /// Where the facts about the server come from: `proxy`, `server` or `nobody` (not known).
    pub facts_from: String,
    /// The request.
    #[serde(flatten)]
    pub request: RequestLine,
    /// Name of the chosen backend; `null` if there is none or it is not known.
    pub backend: Option<String>,
    /// The replica that would be chosen now, as `LABEL at URL`; `null` if there is none.
    pub replica: Option<String>,
    /// Effective sampling temperature; `null` if it is not known.
    pub temperature: Option<f64>,
    /// Length of the prompt, tokens; `null` if the body was not read or not understood.
    pub prompt_tokens: Option<usize>,
    /// True if that length was counted; otherwise it is estimated as a quarter of the bytes.
    pub prompt_tokens_exact: bool,
    /// Every step, in order.
    pub steps: Vec<StepLine>,
    /// Every parameter of the body, and an omitted one whose default is refused.
    pub parameters: Vec<ParameterLine>,
    /// The policy that applies, as `name@revision`; `null` if none is known to apply.
    pub policy: Option<String>,
    /// Every policy, in match order.
    pub policies: Vec<PolicyLine>,
    /// Names of the methods that would verify drafts, preferred first; empty where no session would
    /// serve the request.
    pub verify: Vec<String>,
    /// Maximum draft tokens of a round; `null` where no session would serve the request.
    pub gamma_max: Option<usize>,
    /// The drafters of the policy that applies, in its order; empty if none is known to apply.
    pub drafters: Vec<DrafterLine>,
    /// How drafts would be judged; `null` where no session would serve the request.
    pub accept: Option<AcceptLine>,
    /// The running proxy's present measurements; `null` without one, or where no session would
    /// serve the request.
    pub now: Option<Now>,
}

/// The request that is explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestLine {
    /// Name of the API route.
    pub route: String,
    /// Model id as sent by the client; `null` if the body has none or was not read.
    pub model: Option<String>,
    /// Name of the request's tenant; `null` if it has none.
    pub tenant: Option<String>,
}

/// How drafts would be judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AcceptLine {
    /// Name of the policy's rule.
    pub rule: String,
    /// Its tolerance at this temperature and the present load, 0 (exact) to 1; `null` if the load
    /// is not known.
    pub tolerance: Option<f64>,
    /// Minimum and maximum of its tolerance at this temperature over all loads, 0 to 1.
    pub between: (f64, f64),
    /// Reason why nothing is relaxed; `null` if the rule is relaxed.
    pub exact: Option<String>,
}

/// A running proxy's measurements at the moment of the request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Now {
    /// Load of the engine, 0 to 1, as curves over load take it.
    pub load: f64,
    /// Regret budget: plain tokens that speculation may still lose on the replica.
    pub regret_budget: f64,
    /// Seconds per plain token; `null` before any was measured.
    pub token_seconds: Option<f64>,
    /// Projected speedup; `null` before enough rounds of this kind of request.
    pub gain: Option<GainLine>,
    /// Why drafts have their length; `null` before a speedup is known.
    pub length: Option<Length>,
    /// The gates by the engine's load report, with their readings; empty with `gamma.fixed`, where
    /// they do not apply.
    pub gates: Vec<GateLine>,
    /// Every reason not to speculate from the first token on, in the order of the checks.
    pub not_speculating: Vec<WhyLine>,
}

/// A projected speedup (plain time ÷ expected time with speculation) and its 95 % interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GainLine {
    /// Lower end.
    pub low: f64,
    /// The mean.
    pub middle: f64,
    /// Upper end.
    pub high: f64,
    /// Rounds of this kind of request that it is based on, real and virtual, decayed.
    pub rounds: f64,
    /// Basis of the costs: `guess`, `probe` or `measured`.
    pub costs: String,
}

/// A gate, its reading, and the limit above which it is closed: requests for `waiting`, a share of
/// 0 to 1 for `kv`, seconds for `stale`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateLine {
    /// Its name under `gates` of the policy.
    pub gate: String,
    /// The reading; `null` if the engine has not reported it.
    pub reads: Option<f64>,
    /// Above this it is closed.
    pub limit: f64,
    /// True if it is closed.
    pub closed: bool,
}

/// A reason not to speculate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WhyLine {
    /// Name of the reason.
    pub reason: String,
    /// The reason in words.
    pub words: String,
}

/// Result of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLine {
    /// Name of the step.
    pub step: String,
    /// `passed`, `plain`, `passthrough`, `failed` or `unknown`.
    pub result: String,
    /// Name of the reason for `plain`, `passthrough` and `failed`; otherwise `null`.
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
    /// Its treatment: carried, emulated, inert, neutral, passed through, unknown, or omitted (not
    /// in the body).
    pub treatment: String,
    /// Name of the reason why it prevents speculation; `null` if it does not.
    pub refused: Option<String>,
}

/// Result of matching one policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyLine {
    /// `name@revision`.
    pub policy: String,
    /// Mode of the policy.
    pub mode: String,
    /// True if it applies; `null` if that is not known.
    pub matches: Option<bool>,
    /// Every condition that does not hold or is not known to hold, in words; empty if the body was
    /// not understood.
    pub mismatches: Vec<String>,
}

/// How one drafter takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterLine {
    /// Kind of the drafter, with the name of its model.
    pub drafter: String,
    /// True if it drafts; `null` if that is not known.
    pub drafts: Option<bool>,
    /// How a model with another vocabulary drafts, why it does not draft, or why that is not known;
    /// `null` if there is nothing to add.
    pub why: Option<String>,
}

/// Data for an explanation that the decision itself does not need.
#[derive(Clone, Debug, Default)]
pub struct Besides {
    /// Where the facts about the server come from: `proxy`, `server` or `nobody` (not known).
    pub facts_from: &'static str,
    /// The replica that would be chosen now, as `LABEL at URL`; `None` if there is none.
    pub replica: Option<String>,
    /// Further remarks, one sentence each.
    pub notes: Vec<String>,
}

/// Looks up the present measurements for a session with this ruling, at this effective temperature,
/// with a prompt of this many tokens; `None` where there are none, as without a running proxy.
pub type Measure<'a> = &'a dyn Fn(&Ruling, f64, usize) -> Option<Now>;

/// Explains a request. `parameters`: how each parameter of its body was judged. `closed`: reason of
/// the gate that is closed now for a session with this ruling, `None` if none is. `now`: a running
/// proxy's measurements for it.
pub fn explain(
    facts: &Facts<'_>,
    parameters: &[openai::Finding],
    besides: Besides,
    closed: impl Fn(&Ruling) -> Option<PlainReason>,
    now: Measure<'_>,
) -> Explanation {
    let decision = decide::explain(facts);
    let request = facts.body.known().and_then(Body::request);
    let backend = facts.backend.known().flatten().map(|backend| backend.name);
    let ruling = match &decision.outcome {
        Outcome::Serve(ruling) => Some(&**ruling),
        Outcome::Passthrough(_) | Outcome::Nobody | Outcome::Undecided(..) => None,
    };
    let gate = ruling.and_then(closed);
    let temperature = decision.temperature.known();
    let size = request.map(openai::Request::prompt_size);
    let tokens = size.map_or(0, |size| size.tokens);
    let now = ruling.zip(temperature).and_then(|(ruling, temperature)| now(ruling, temperature, tokens));
    let accept = ruling.map(|ruling| accept(ruling, temperature.unwrap_or(0.0), now.as_ref()));
    let subjects = facts.head.subjects();
    let subject =
        request.map(|request| subjects.of(request, backend.unwrap_or_default(), decision.temperature));
    let policies = facts.policies.known().map_or(&[][..], super::PolicySet::policies);
    let lines = policies.iter().map(|policy| policy_line(policy, subject.as_ref())).collect::<Vec<_>>();
    let matching =
        || subject.as_ref().and_then(|subject| facts.policies.known()?.first_match(subject).known()?);
    let policy = ruling.map(|ruling| &ruling.policy).or_else(matching);
    let (path, reason, words) = conclusion(&decision, ruling, gate);
    Explanation {
        path: path.to_owned(),
        reason: reason.map(ToOwned::to_owned),
        words,
        notes: besides.notes,
        facts_from: besides.facts_from.to_owned(),
        request: RequestLine {
            route: facts.head.route.name().to_owned(),
            model: request.map(|request| request.model.clone()).filter(|model| !model.is_empty()),
            tenant: facts.head.tenant.map(ToOwned::to_owned),
        },
        backend: backend.map(ToOwned::to_owned),
        replica: besides.replica,
        temperature: decision.temperature.known(),
        prompt_tokens: size.map(|size| size.tokens),
        prompt_tokens_exact: size.is_some_and(|size| size.exact),
        steps: decision.findings.iter().map(StepLine::from).collect(),
        parameters: parameter_lines(parameters, &decision.outcome, facts.head.route),
        policy: policy.map(|policy| policy.label()),
        policies: lines,
        verify: ruling.map_or_else(Vec::new, methods),
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
    let reporting = [VerifyMethod::Tree, VerifyMethod::Score];
    let exact = match rule {
        Rule::Exact => Some("the rule is exact"),
        _ if ruling.sampling.seed.is_some() => {
            Some("the request has a seed: it asks for a reproducible text")
        }
        _ if ruling.sampling.grammar.is_some() => Some("a grammar binds the output"),
        _ if temperature <= 0.0 => Some("at temperature 0 there is nothing to relax"),
        _ if between.1 <= 0.0 => Some("the tolerance is 0 at this temperature"),
        _ if !ruling.rules.methods.iter().any(|method| reporting.contains(method)) => {
            Some("no verification method of this server reports probabilities")
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

fn conclusion(
    decision: &Decision,
    ruling: Option<&Ruling>,
    gate: Option<PlainReason>,
) -> (&'static str, Option<&'static str>, String) {
    let findings = &decision.findings;
    if let Some(failed) = nobody(findings) {
        return failed;
    }
    let why_passthrough = match &decision.outcome {
        Outcome::Passthrough(passthrough) => Some(passthrough.reason),
        _ => findings.iter().find_map(|finding| match finding.result {
            StepResult::Passthrough(reason) => Some(reason),
            _ => None,
        }),
    };
    if let Some(reason) = why_passthrough {
        return ("passthrough", Some(reason.name()), passthrough(reason, findings));
    }
    let plain_reason = plain_reason(findings);
    match (&decision.outcome, ruling) {
        (Outcome::Undecided(step, why), _) => undecided(*step, why, plain_reason),
        (_, Some(ruling)) => eligible(ruling, plain_reason, gate),
        // All other outcomes have returned above.
        (_, None) => ("undecided", None, "the decision cannot be determined".to_owned()),
    }
}

/// Without a backend or a server the request fails, whatever the steps decided.
fn nobody(findings: &[Finding]) -> Option<(&'static str, Option<&'static str>, String)> {
    findings.iter().find_map(|finding| {
        let (path, reason) = match finding.result {
            StepResult::NoBackend => ("failed", "no_backend"),
            StepResult::Down => ("passthrough", "unreachable"),
            _ => return None,
        };
        let words = format!("Foretell would answer with an error: {}", finding.words);
        Some((path, Some(reason), words))
    })
}

/// The passthrough reason in words: those of the last step with this reason, else the reason's.
fn passthrough(reason: PassthroughReason, findings: &[Finding]) -> String {
    let found = findings.iter().rev().find(|finding| finding.result == StepResult::Passthrough(reason));
    let words = found.map_or(reason.words(), |finding| finding.words.as_str());
    if words.starts_with("because") {
        format!("passed through unchanged {words}")
    } else {
        format!("passed through unchanged: {words}")
    }
}

/// Reason why the session would never speculate. The client's step is skipped: the permission step
/// includes it.
fn plain_reason(findings: &[Finding]) -> Option<(PlainReason, &str)> {
    findings.iter().filter(|finding| finding.step != DecisionStep::Client).find_map(|finding| {
        match finding.result {
            StepResult::Plain(reason) => Some((reason, finding.words.as_str())),
            _ => None,
        }
    })
}

fn undecided(
    step: DecisionStep,
    why: &str,
    plain_reason: Option<(PlainReason, &str)>,
) -> (&'static str, Option<&'static str>, String) {
    let open = format!("not decided at step {}: {why}", step.name());
    match plain_reason {
        Some((reason, words)) => {
            let words = format!(
                "the request would not be speculated on ({words}); whether it is decoded plainly or passed through is {open}"
            );
            ("undecided", Some(reason.name()), words)
        }
        None => ("undecided", None, format!("whether the request is eligible is {open}")),
    }
}

fn eligible(
    ruling: &Ruling,
    plain_reason: Option<(PlainReason, &str)>,
    gate: Option<PlainReason>,
) -> (&'static str, Option<&'static str>, String) {
    match (plain_reason, gate) {
        (Some((reason, words)), _) => ("eligible", Some(reason.name()), words.to_owned()),
        (None, Some(gate)) => {
            let words = format!(
                "the request starts with plain decoding, and would not be speculated on now: {}",
                gate.words()
            );
            ("eligible", Some(gate.name()), words)
        }
        (None, None) => {
            let speculates = match ruling.rules.gamma_fixed {
                Some(_) => "is speculated on at every token, whatever it costs (gamma.fixed)",
                None => "is speculated on when that is expected to pay",
            };
            ("eligible", None, format!("the request starts with plain decoding, and {speculates}"))
        }
    }
}

/// How each parameter of the body is treated. The one that the server cannot carry is refused too,
/// also if it is not in the body and its default causes that.
fn parameter_lines(
    parameters: &[openai::Finding],
    outcome: &Outcome,
    route: openai::Route,
) -> Vec<ParameterLine> {
    let mut lines: Vec<ParameterLine> = parameters.iter().map(ParameterLine::from).collect();
    let Outcome::Passthrough(Passthrough { reason, parameter: Some(name), .. }) = outcome else {
        return lines;
    };
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

fn methods(ruling: &Ruling) -> Vec<String> {
    ruling.rules.methods.iter().map(|method| method.name().to_owned()).collect()
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

/// The remark on each of several models.
const SEVERAL: &str = "the first model of the policy that can draft drafts for a request";

fn drafters(policy: &Policy, facts: &Facts<'_>) -> Vec<DrafterLine> {
    let proposes =
        facts.server.known().and_then(ServerState::server).map(|server| server.engine.proposes > 0);
    let parts = parts(&policy.drafters, proposes, facts.models);
    let several = parts.iter().filter(|part| matches!(part, DrafterPart::ModelDrafter(..))).count() > 1;
    let line = |(drafter, part): (&Drafter, DrafterPart<'_>)| {
        let (drafts, why) = match part {
            DrafterPart::Inline(_) => (Some(true), None),
            DrafterPart::ModelDrafter(_, translation_mode) => {
                let words = translation_mode.words().into_iter().chain(several.then_some(SEVERAL));
                let words = words.collect::<Vec<_>>().join("; ");
                (Some(true), Some(words).filter(|words| !words.is_empty()))
            }
            DrafterPart::Absent(why) => (Some(false), Some(why.into_owned())),
            DrafterPart::Unknown(why) => (None, Some(why.to_owned())),
        };
        let drafter = match drafter {
            Drafter::Model { model, .. } => format!("{} {model}", drafter.kind()),
            Drafter::Lookup(_) => drafter.kind().to_owned(),
        };
        DrafterLine { drafter, drafts, why }
    };
    policy.drafters.iter().zip(parts).map(line).collect()
}

impl From<&Finding> for StepLine {
    fn from(finding: &Finding) -> Self {
        let (result, reason) = match finding.result {
            StepResult::Passed => ("passed", None),
            StepResult::Plain(reason) => ("plain", Some(reason.name())),
            StepResult::Passthrough(reason) => ("passthrough", Some(reason.name())),
            StepResult::NoBackend => ("failed", Some("no_backend")),
            StepResult::Down => ("failed", Some("unreachable")),
            StepResult::Unknown => ("unknown", None),
        };
        Self {
            step: finding.step.name().to_owned(),
            result: result.to_owned(),
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
