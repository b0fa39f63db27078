//! The result of a probe: for `foretell probe`, the admin API, and the controller as a prior.

use std::sync::Arc;

use serde_json::{Value, json};

use foretell_core::control::Prior;
use foretell_core::words::VerifyMethod;
use foretell_engines::Confirmation;
use foretell_engines::probe::Findings;
use foretell_engines::probe::prospect::{Judgement, Prospect, judge};
use foretell_engines::{Engine, Noise, RowShape};
use foretell_wire::openai::Defaults;

/// Facts known before the first timed call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Verification methods that the engine lacks, with the reason.
    pub missing: Vec<(VerifyMethod, String)>,
    /// Number of connections that reported the same start time; 0 if it reports none.
    pub starts: u32,
    /// True if it was not idle when it was measured.
    pub busy: bool,
    /// Number of calls that were made before.
    pub calls: u32,
}

/// A probe and its conclusion.
#[derive(Clone, Debug)]
pub struct ProbeReport {
    pub findings: Findings,
    /// The conclusion: if a verification method pays, and the policy to use.
    pub judgement: Judgement,
    /// The measured times as a prior for the choice of rounds.
    pub prior: Arc<Prior>,
    /// Facts known before the first timed call.
    pub seen: Seen,
    /// Duration of the probe, seconds.
    pub seconds: f64,
}

impl ProbeReport {
    /// Judges the findings.
    pub fn new(findings: Findings, seen: Seen, seconds: f64) -> Self {
        let judgement = judge(&findings.measured, &findings.engine.methods);
        let prior = Arc::new(findings.measured.prior());
        Self { findings, judgement, prior, seen, seconds }
    }

    /// True if the measurement shows that nothing pays here.
    pub fn nothing_pays(&self) -> bool {
        self.judgement.pays == Some(false)
    }

    /// True if there is a method to measure, and too little was measured to predict its gain.
    pub fn measured_too_little(&self) -> bool {
        self.judgement.pays.is_none() && !self.findings.engine.methods.is_empty()
    }

    /// The expected gain of each verification method, if drafting costs nothing.
    pub fn prospects(&self) -> Vec<Prospect> {
        self.findings.measured.prospects()
    }

    /// Verification methods that the engine lacks or that do not work there, with the reason.
    pub fn missing(&self) -> impl Iterator<Item = &(VerifyMethod, String)> {
        self.seen.missing.iter().chain(&self.findings.removed)
    }

    /// Number of all calls to the server.
    pub fn calls(&self) -> u32 {
        self.seen.calls + self.findings.calls
    }

    /// As JSON; the names are a contract.
    pub fn to_json(&self) -> Value {
        let Findings { engine, measured, cache, several_engines, notes, .. } = &self.findings;
        let methods: Vec<_> = engine.methods.iter().map(|method| method.name()).collect();
        let missing: Vec<_> =
            self.missing().map(|(method, why)| json!({ "method": method.name(), "why": why })).collect();
        let verify: Vec<_> = measured
            .verify
            .iter()
            .map(|timed| {
                json!({ "method": timed.method.name(), "context": timed.context, "gamma": timed.nodes,
                    "ms": millis(timed.seconds), "computed": timed.computed })
            })
            .collect();
        let token: Vec<_> = measured
            .token
            .iter()
            .map(|&(context, seconds)| json!({ "context": context, "ms": millis(seconds) }))
            .collect();
        let predictions: Vec<_> = self.prospects().iter().map(prediction).collect();
        json!({
            "engine": engine.dialect.name(),
            "version": engine.version,
            "model": engine.model,
            "context": engine.context,
            "started": engine.process.started,
            "speculates": engine.speculates,
            "several_engines": several_engines,
            "connections": self.seen.starts,
            "defaults": engine.defaults.sampling.as_ref().map(defaults),
            "problem": engine.defaults.confirmation.as_ref().and_then(Confirmation::problem),
            "max_tokens": engine.limits.most,
            "methods": methods,
            "missing": missing,
            "noise": noise(engine),
            "cache": {
                "works": cache.works,
                "reported": cache.reported,
                "block": engine.cache.block,
                "rows": match engine.cache.rows { RowShape::Full => "full", RowShape::Tail => "tail" },
                "cold_ms": cache.cold.map(millis),
                "warm_ms": cache.warm.map(millis),
            },
            "verify": verify,
            "times": {
                "token": token,
                "t_in_ms": measured.switch_out.map(millis),
                "t_out_ms": measured.switch_in.map(millis),
                "cancel_ms": measured.cancel.map(millis),
            },
            "predictions": predictions,
            "pays": self.judgement.pays,
            "conclusion": self.judgement.words,
            "policy": self.judgement.policy,
            "busy": self.seen.busy,
            "calls": self.calls(),
            "seconds": (self.seconds * 1e3).round() / 1e3,
            "notes": notes,
        })
    }
}

/// The dependency of a seeded request's noise, in a word.
pub fn noise(engine: &Engine) -> &'static str {
    match engine.noise {
        Noise::Position => "position",
        Noise::Call => "call",
        Noise::Ignored => "ignored",
    }
}

fn prediction(prospect: &Prospect) -> Value {
    json!({
        "method": prospect.method.name(),
        "context": prospect.context,
        "acceptance": prospect.acceptance,
        "gamma": prospect.gamma,
        "gain": (prospect.gain * 1e3).round() / 1e3,
    })
}

fn defaults(defaults: &Defaults) -> Value {
    json!({
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "presence_penalty": defaults.presence_penalty,
        "frequency_penalty": defaults.frequency_penalty,
        "repetition_penalty": defaults.repetition_penalty,
    })
}

/// Seconds as milliseconds, rounded to the microsecond.
fn millis(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}
