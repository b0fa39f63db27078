//! Permissions of the sessions of a simulated fleet, from a real policy file and the real decision.

use http::HeaderMap;

use foretell_config::problem::Problem;
use foretell_config::{load, process};
use foretell_core::control::groups::ControlGate;
use foretell_core::session::Rules;
use foretell_core::words::{Mode, VerifyMethod};
use foretell_engines::{Dialect, Engine, Noise, PrefixCache, ServerDefaults, SpecialTokens};
use foretell_policy::part::ModelState;
use foretell_policy::{
    Admitted, Fact, Group, Holdback, LiveGates, Ruling, Server, ServerState, Subjects, Terms, plan,
};
use foretell_wire::openai::{Defaults, Judgement, Route, judge};

/// Permissions of a request, from the policy and the server.
#[derive(Clone, Debug)]
pub struct Permit {
    /// The rules of its session.
    pub rules: Rules,
    /// One of its drafters is a model.
    pub has_model: bool,
    /// The gates that may close while it runs.
    pub gates: LiveGates,
    /// The control group of its policy.
    pub holdback: Holdback,
    /// The `control` gate: the comparison with the control group that closes the policy.
    pub control_gate: ControlGate,
    /// Share of the free sequences, 0 to 1, that verify requests by fan-out may take.
    pub slots: f64,
}

/// A policy that cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The policy file has errors.
    #[error("{}", lines(.0))]
    Policy(Vec<Problem>),
    /// Its requests are passed through.
    #[error(
        "policy: allowed one under which requests get a session, got one under which they are passed through ({0})"
    )]
    Passthrough(String),
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// The drafter model that policies of simulations may name.
pub const MODEL: &str = "draft";

/// The budget of a backend.
const SLOTS: f64 = 0.1;

/// `prompt_lookup`, in the words of a policy.
pub const PROMPT_LOOKUP: &str = "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }";
pub const SUFFIX: &str = "{ kind: suffix }";
/// A model drafter with the target's vocabulary.
pub const MODEL_DRAFTER: &str = "{ kind: model, model: draft, vocabulary: same }";

/// A policy with these drafters and without a control group, whose cost is not part of the
/// comparison.
pub fn policy(drafters: &[&str]) -> String {
    let drafters = drafters.join(", ");
    format!("version: 1\nname: sim\nholdback: {{ start: 0, floor: 0 }}\ndrafters: [{drafters}]\n")
}

/// The permit that the policy file `text` gives a greedy request on a server with these
/// verification methods and this context limit in tokens. Problems are reported as of `file`.
///
/// # Errors
/// Every problem of the policy, or the reason for which it passes requests through.
pub fn of(file: &str, text: &str, methods: &[VerifyMethod], context: usize) -> Result<Permit, Refused> {
    let process = format!("version: 1\ndrafters:\n  {MODEL}: {{ path: draft }}\n");
    let process = process::parse("process", &process).map_err(Refused::Policy)?;
    let sources = [(file.to_owned(), text.to_owned())];
    let policies = load::parse_policies(&sources, &process).map_err(Refused::Policy)?;
    let judged = judge(Route::Completions, br#"{"model":"m","prompt":"a","temperature":0,"max_tokens":64}"#);
    let engine = engine(methods, context);
    let terms = Terms { allow: methods.to_vec(), context_max: context, bytes_max: usize::MAX };
    let server = Server {
        engine: &engine,
        single: Fact::Known(true),
        nothing_pays: None,
        by_format: None,
        terms: &terms,
    };
    let headers = HeaderMap::new();
    let Judgement::Eligible(request) = &judged else {
        return Err(Refused::Passthrough(format!("{judged:?}")));
    };
    let admitted = Admitted {
        head: Subjects { api: Route::Completions.into(), headers: &headers, tenant: None },
        request,
        control: None,
        backend: "sim",
        mode: Mode::Auto,
    };
    match plan(&admitted, ServerState::Known(server), &policies, &|_| ModelState::Ready, &|_| {
        Group::default()
    }) {
        Ok(ruling) => Ok(permit(ruling)),
        Err(passthrough) => Err(Refused::Passthrough(format!("{passthrough:?}"))),
    }
}

/// The engine of the first dialect that serves these verification methods.
fn engine(methods: &[VerifyMethod], context: usize) -> Engine {
    let dialect = if methods.contains(&VerifyMethod::Tree) { Dialect::Onnx } else { Dialect::Vllm };
    Engine {
        methods: methods.to_vec(),
        defaults: ServerDefaults { sampling: Some(Defaults::OPENAI), ..ServerDefaults::default() },
        context: Some(context),
        noise: Noise::Position,
        cache: PrefixCache { reports_hits: true, ..PrefixCache::default() },
        // The special tokens are known; vLLM's scores are read only then.
        tokens: SpecialTokens { eos: Vec::new(), special: vec![0], may_end: vec![0] },
        ..Engine::new(dialect, "m", "1")
    }
}

fn permit(ruling: Ruling) -> Permit {
    let Ruling { policy, rules, model, gates, .. } = ruling;
    let control_gate = ControlGate { limit: policy.gates.control, reprobe: policy.gates.reprobe };
    Permit { rules, has_model: model.is_some(), gates, holdback: policy.holdback, control_gate, slots: SLOTS }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_core::session::Permission;

    #[test]
    fn every_verify_method_of_a_simulated_engine_is_allowed() {
        for methods in [
            &[VerifyMethod::Tree][..],
            &[VerifyMethod::Score, VerifyMethod::FanOut],
            &[VerifyMethod::FanOut],
            &[VerifyMethod::Tree, VerifyMethod::FanOut],
        ] {
            let permit = of("p", &policy(&[PROMPT_LOOKUP, MODEL_DRAFTER]), methods, 4096).expect("a permit");
            assert_eq!(permit.rules.methods, methods);
            assert_eq!((permit.rules.permission, permit.rules.gamma_max), (Permission::Speculate, 32));
            assert!(permit.has_model && permit.rules.lookups.len() == 1);
        }
        let without = of("p", &policy(&[PROMPT_LOOKUP]), &[VerifyMethod::Tree], 9).expect("a permit");
        assert!(!without.has_model);
    }

    #[test]
    fn a_policy_with_an_error_is_refused_by_its_line() {
        let text = policy(&[PROMPT_LOOKUP]).replace("min: 2", "min: 0");
        let refused = of("t.yaml policy", &text, &[VerifyMethod::Tree], 9).expect_err("an error").to_string();
        assert!(refused.starts_with("t.yaml policy:4: drafters[0].ngram.min: "), "{refused}");
        let off = format!("mode: off\n{}", policy(&[PROMPT_LOOKUP]));
        assert!(
            of("p", &off, &[VerifyMethod::Tree], 9)
                .expect_err("passthrough")
                .to_string()
                .contains("passed through")
        );
    }
}
