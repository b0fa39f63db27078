//! Text output of `foretell check` and `foretell explain`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use foretell::cli::check::{self, CheckArgs};
use foretell::cli::explain::{self, ExplainArgs};
use foretell_config::Flags;
use rstest::rstest;
use serde_json::Value;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn flags(&self) -> Flags {
        let config = Some(self.path("foretell.yaml")).filter(|path| Path::new(path).exists());
        let policies = Some(self.path("policies")).filter(|path| Path::new(path).exists());
        Flags { config, policies, ..Flags::default() }
    }

    fn told(&self, out: Vec<u8>) -> String {
        String::from_utf8(out).unwrap().replace(&self.path(""), "")
    }

    fn check(&self) -> (u8, String) {
        let mut out = Vec::new();
        let code = check::run(
            &CheckArgs { flags: self.flags(), ..CheckArgs::default() },
            &BTreeMap::new(),
            &mut out,
        )
        .unwrap();
        (code, self.told(out))
    }

    fn explain(&self, headers: &[&str], json: bool) -> (u8, String) {
        let mut out = Vec::new();
        let args = ExplainArgs {
            flags: self.flags(),
            request: Some(self.path("request.json")),
            headers: headers.iter().map(|&header| header.to_owned()).collect(),
            json,
            peer: "10.0.0.1".to_owned(),
            offline: true,
            ..ExplainArgs::default()
        };
        let code = explain::run(&args, &BTreeMap::new(), &mut out).unwrap();
        (code, self.told(out))
    }
}

const ONE_BACKEND: &str = "version: 1\nbackends: [{ name: a, engine: onnx, replicas: [\"http://a:1\"] }]\n";

#[test]
fn good_settings_are_listed_with_revisions_and_warnings() {
    let fixed = "version: 1\nname: sweep\ngamma: { fixed: 4 }\n";
    let folder = Folder::new(&[("foretell.yaml", ONE_BACKEND), ("policies/a.yaml", fixed)]);
    let (code, told) = folder.check();
    assert_eq!(code, 0);
    assert_eq!(
        told,
        "foretell.yaml: ok\npolicies/a.yaml: ok\n\
         warning: policies/a.yaml:3: gamma.fixed: 4 speculates at any cost: it is for tests and sweeps\n\
         backends: a\npolicies: sweep@"
            .to_owned()
            + &foretell_config::values::Revision::of(fixed.as_bytes()).to_string()
            + "\n"
    );
}

#[test]
fn a_snapshot_without_a_folder_is_warned_of() {
    let process = format!("{ONE_BACKEND}corpus: {{ snapshot: none/learnt }}\n");
    let folder = Folder::new(&[("foretell.yaml", &process), ("policies/a.yaml", "version: 1\nname: x\n")]);
    let (code, told) = folder.check();
    let warning = "warning: corpus.snapshot: no folder none: nothing is stored over a restart\n";
    assert!(code == 0 && told.contains(warning), "{told}");
}

#[test]
fn bad_settings_are_reported_at_once_with_exit_code_64() {
    let folder = Folder::new(&[
        ("foretell.yaml", "version: 1\nmode: on\nlimts: {}\n"),
        ("policies/a.yaml", "version: 1\nname: x\ngamma: { max: 99 }\n"),
    ]);
    let (code, told) = folder.check();
    assert_eq!(code, 64);
    assert_eq!(
        told,
        "foretell.yaml:2: mode: unknown value, allowed off|observe|auto, got \"on\"\n\
         foretell.yaml:3: limts: unknown key, allowed version|mode|listen|admin|metrics|limits|timeouts|drain|tenant|client|backends|drafters|corpus|drafts|fleet|ready|policies|observe, got limts; did you mean limits?\n\
         policies/a.yaml:3: gamma.max: out of range, allowed 1 to 32, got 99\n\
         3 errors\n"
    );
}

#[test]
fn a_missing_backend_is_not_an_error_of_a_policy() {
    let folder = Folder::new(&[("policies/a.yaml", "version: 1\nname: x\n")]);
    let (code, told) = folder.check();
    assert_eq!(code, 64);
    assert!(told.starts_with("(no config file): backends: no backend configured: add one under `backends`, or pass --backend URL"), "{told}");
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"12345678"}],"temperature":0.7}"#;

#[test]
fn an_explanation_names_parameters_policies_and_the_result() {
    let folder = Folder::new(&[
        ("foretell.yaml", ONE_BACKEND),
        (
            "policies/10.yaml",
            "version: 1\nname: code\nmatch: { models: ['*coder*'], temperature: { max: 0.5 } }\n",
        ),
        ("policies/20.yaml", "version: 1\nname: rest\n"),
        ("request.json", CHAT),
    ]);
    let (code, told) = folder.explain(&[], false);
    assert_eq!(code, 0);
    let revisions: Vec<&str> = told.match_indices('@').map(|(at, _)| &told[at + 1..at + 9]).collect();
    let rest = revisions[revisions.len() - 1];
    assert_eq!(
        told,
        format!(
            "undecided: whether the request is eligible is not decided at step server: the server was not queried\n\
             facts from   nobody: the server's properties are not known\n\
             route        chat\n\
             model        m (backend a, replica a/0 at http://a:1/)\n\
             temperature  0.7\n\
             prompt       2 tokens (estimated: a quarter of the bytes)\n\
             steps (the first that does not pass decides)\n  \
               client       passed   the request has no x-foretell header\n  \
               mode         passed   auto\n  \
               fleet        passed   some server may be able to verify\n  \
               encoding     passed   the body is not compressed\n  \
               body         passed   every parameter can be carried\n  \
               backend      passed   a\n  \
               session      passed   a session slot is free\n  \
               server       unknown  the server was not queried\n  \
               engine       unknown  the answer depends on the server, which is not known\n  \
               policy       passed   rest@{rest} matches\n  \
               permission   unknown  the answer depends on the server, which is not known\n  \
               verify       unknown  the answer depends on the server, which is not known\n  \
               drafters     passed   at least one drafter of the policy is available\n\
             parameters\n  \
               model                        carried (openai)\n  \
               messages                     carried (openai)\n  \
               temperature                  carried (openai)\n\
             policies (the first that matches applies)\n  \
               code@{}                does not match: model is m; this policy applies only to *coder*; temperature is 0.7; this policy applies only up to 0.5\n  \
               rest@{rest}                matches (mode auto)\n\
             drafters\n  \
               prompt_lookup                drafts\n  \
               suffix                       drafts\n  \
               phrasebook                   drafts\n  \
               head                         not known: the answer depends on the server, which is not known\n",
            revisions[1]
        )
    );
}

#[rstest]
#[case::plain("", "", CHAT, &[], "undecided", None)]
#[case::off("mode: off", "", CHAT, &[], "passthrough", Some("off"))]
#[case::observe("mode: observe", "", CHAT, &[], "undecided", Some("observe"))]
#[case::client_off("", "", CHAT, &["X-Foretell: off"], "passthrough", Some("client"))]
#[case::client_unreadable("", "", CHAT, &["X-Foretell: gama=3"], "passthrough", Some("client"))]
#[case::client_plain("", "", CHAT, &["x-foretell: plain"], "undecided", Some("client"))]
#[case::client_may_not("client: { control: off }", "", CHAT, &["x-foretell: off"], "undecided", None)]
#[case::encoded("", "", CHAT, &["content-encoding: gzip"], "passthrough", Some("encoded"))]
#[case::too_large("limits: { speculate_body: 10B }", "", CHAT, &[], "passthrough", Some("body"))]
#[case::no_body("", "", "[1]", &[], "passthrough", Some("body"))]
#[case::no_session_slot("limits: { sessions: 0 }", "", CHAT, &[], "passthrough", Some("sessions"))]
#[case::no_policy("", "match: { models: [other] }", CHAT, &[], "passthrough", Some("no_policy"))]
#[case::policy_off("", "mode: off", CHAT, &[], "passthrough", Some("policy"))]
#[case::policy_plain("", "mode: plain", CHAT, &[], "undecided", Some("policy"))]
#[case::policy_shadows("", "mode: shadow", CHAT, &[], "undecided", Some("shadow"))]
#[case::tools("", "", r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[1],"tool_choice":"sometimes"}"#, &[], "passthrough", Some("tools"))]
#[case::forced("", "", r#"{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[1],"tool_choice":"required"}"#, &[], "undecided", None)]
#[case::unknown("", "", r#"{"model":"m","prompt":"x","temprature":1}"#, &[], "passthrough", Some("unknown_parameter"))]
#[case::billed("backends: [{ name: a, billed: true, replicas: ['http://a:1'] }]", "", CHAT, &[], "passthrough", Some("billed"))]
#[case::passthrough("backends: [{ name: a, engine: ollama, replicas: ['http://a:1'] }]", "", CHAT, &[], "passthrough", Some("no_verify_method"))]
#[case::nobody("backends: []", "", CHAT, &[], "failed", Some("no_backend"))]
#[case::tenant("tenant: { header: x-tenant, trusted_peers: [10.0.0.0/8] }", "match: { tenants: [ide] }\nmode: off", CHAT, &["x-tenant: ide"], "passthrough", Some("policy"))]
#[case::strange_tenant("tenant: { header: x-tenant, trusted_peers: [11.0.0.0/8] }", "match: { tenants: [ide] }\nmode: off", CHAT, &["x-tenant: ide"], "passthrough", Some("no_policy"))]
#[case::bounded_temperature("", "match: { temperature: { max: 0.5 } }\nmode: off", r#"{"model":"m","prompt":"x"}"#, &[], "undecided", None)]
fn an_explanation_gives_the_path_and_the_reason(
    #[case] process: &str,
    #[case] policy: &str,
    #[case] body: &str,
    #[case] headers: &[&str],
    #[case] path: &str,
    #[case] reason: Option<&str>,
) {
    let backends = "backends: [{ name: a, engine: onnx, replicas: ['http://a:1'] }]\n";
    let backends = if process.starts_with("backends") { "" } else { backends };
    let folder = Folder::new(&[
        ("foretell.yaml", &format!("version: 1\n{backends}{process}\n")),
        ("policies/a.yaml", &format!("version: 1\nname: a\n{policy}\n")),
        ("request.json", body),
    ]);
    let (code, told) = folder.explain(headers, true);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((code, told["path"].as_str(), told["reason"].as_str()), (0, Some(path), reason), "{told}");
}

#[test]
fn the_first_refused_parameter_is_blamed_and_all_are_listed() {
    let body = r#"{"model":"m","prompt":[1,2,3],"bogus":1,"tools":[],"grammar":"x","seed":null}"#;
    let folder = Folder::new(&[("foretell.yaml", ONE_BACKEND), ("request.json", body)]);
    let told: Value = serde_json::from_str(&folder.explain(&[], true).1).unwrap();
    assert_eq!(
        told["words"],
        "passed through unchanged because of bogus: the parameter is not known to Foretell"
    );
    assert_eq!((&told["route"], &told["prompt_tokens"]), (&"completions".into(), &3.into()));
    assert_eq!(told["prompt_tokens_exact"], true);
    let lines = told["parameters"].as_array().unwrap();
    let listed: Vec<_> =
        lines.iter().map(|line| (line["name"].as_str().unwrap(), line["refused"].as_str())).collect();
    let unknown = Some("unknown_parameter");
    assert_eq!(
        listed,
        [
            ("model", None),
            ("prompt", None),
            ("bogus", unknown),
            ("tools", unknown),
            ("grammar", Some("structured"))
        ]
    );
}

#[test]
fn an_invalid_explain_call_is_a_usage_error() {
    let folder = Folder::new(&[("request.json", CHAT)]);
    let (code, told) = folder.explain(&["authorization secret"], false);
    assert!(code == 64 && told.contains("--header") && !told.contains("secret"), "{code} {told}");
    let nothing = Folder::new(&[]);
    assert_eq!(nothing.explain(&[], false).0, 64);
    let broken = Folder::new(&[("foretell.yaml", "version: 2"), ("request.json", CHAT)]);
    assert_eq!(
        broken.explain(&[], false),
        (64, "foretell.yaml:1: version: unknown version, allowed 1, got 2\n".to_owned())
    );
}

/// A policy with a drafter that the config file lacks is valid with the stanza that `check`
/// prints.
#[test]
fn check_prints_what_the_config_file_lacks() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = "version: 1\nname: a\ndrafters: [{ kind: model, model: draft-same }]\n";
    let (code, told) = Folder::new(&[("foretell.yaml", ONE_BACKEND), ("policies/a.yaml", text)]).check();
    assert_eq!(code, 64, "{told}");
    let (_, stanza) =
        told.split_once("add to the config file, with the folder of each model:\n").expect(&told);
    let models = root.join("onnx/models").display().to_string();
    let process = format!("{ONE_BACKEND}{}", stanza.replace("onnx/models", &models));
    let (code, told) = Folder::new(&[("foretell.yaml", &process), ("policies/a.yaml", text)]).check();
    assert_eq!(code, 0, "{told}");
}
