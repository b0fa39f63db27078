//! `foretell corpus` and `foretell train` as an operator runs them, with a trainer that only says
//! what a trainer says.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use foretell_config::process;
use foretell_observe::Observer;
use foretell_parsers::text::tokenizer::Tokenizer;
use foretell_proxy::learning::recording::{Record, Recorder, segment};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/onnx/models/target");

/// A trainer that makes a drafter of an empty file, and keeps what it was given.
const TRAINER: &str = r#"#!/bin/sh
while [ $# -gt 1 ]; do case $1 in --out) out=$2;; --work) work=$2;; --budget) budget=$2;; esac; shift; done
mkdir -p "$out" && cat >"$work/../given" && touch "$out/model.onnx" && printf 'a line of a library \377\n'
echo '{"event":"read","requests":2,"tokens":9,"validation":1,"vocabulary":8192,"occurring":5}'
echo '{"event":"progress","share":0.5,"step":3,"loss":1.5,"tokens_per_second":100.0}'
echo '{"event":"validation","share":0.5,"groups":{},"mean":{"before":null,"after":1.5}}'
echo '{"event":"done","groups":{"p":{"before":1.2,"after":1.8}},"mean":{"before":1.2,"after":1.8},"parameters":7,"seconds":'$budget'}'
"#;
const FAILING: &str =
    "#!/bin/sh\necho '{\"event\":\"error\",\"message\":\"only 2 requests; at least 50\"}'; exit 1\n";

struct Folder(tempfile::TempDir);

fn record(at: u64, tenant: Option<&str>) -> Record {
    let tokenizer = Tokenizer::from_file(&Path::new(TARGET).join("tokenizer.json")).unwrap();
    Record {
        at,
        model: "b/m".to_owned(),
        vocabulary: tokenizer.fingerprint().to_string(),
        tenant: tenant.map(ToOwned::to_owned),
        policy: "p".to_owned(),
        prompt: vec![1, 2],
        output: vec![3, 4, 5],
    }
}

impl Folder {
    /// A folder with a recording of one request of each tenant, and one of another vocabulary.
    fn new(tenants: &[Option<&str>]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let recorder = folder.recorder();
        for (at, tenant) in (1_000..).step_by(3_600).zip(tenants) {
            recorder.record(record(at, *tenant));
        }
        recorder.record(Record { vocabulary: "another".to_owned(), ..record(9, None) });
        folder.wait_for(tenants.len() + 1);
        folder
    }

    fn recorder(&self) -> Recorder {
        let (dir, max_bytes) = (self.path("recorded"), 1 << 30);
        let settings = process::Record { dir, max_bytes, sample: 1.0, key_file: None };
        Recorder::start(&settings, Arc::new(Observer::new().unwrap())).unwrap()
    }

    /// Records another request.
    fn recorded(&self, at: u64, tenant: Option<&str>) {
        let records = self.records();
        self.recorder().record(record(at, tenant));
        self.wait_for(records + 1);
    }

    fn wait_for(&self, records: usize) {
        while self.records() < records {
            std::thread::yield_now();
        }
    }

    fn records(&self) -> usize {
        let segments = segment::list(&self.path("recorded")).unwrap();
        segments.iter().map(|path| segment::read(path, None).unwrap().records.len()).sum()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn trainer(&self, text: &str) -> PathBuf {
        let path = self.path("trainer");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretell"));
        command.current_dir(self.0.path()).env("FORETELL_CACHE", self.path("cache")).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        self.told(self.command(arguments).output().unwrap())
    }

    /// Exit status and what was printed, without the path of this folder.
    fn told(&self, output: Output) -> (Option<i32>, String) {
        let Output { status, stdout, stderr } = output;
        let told = String::from_utf8([stdout, stderr].concat()).unwrap();
        (status.code(), told.replace(&self.0.path().display().to_string(), ""))
    }

    fn train(&self, trainer: &str, more: &[&str]) -> (Option<i32>, String) {
        let python = self.trainer(trainer).display().to_string();
        let known = ["train", "--corpus", "recorded", "--target", TARGET, "--budget", "90s"];
        let out: &[&str] = if more.contains(&"--out") { &[] } else { &["--out", "ours"] };
        self.run(&[&known, &["--python", python.as_str()][..], out, more].concat())
    }

    fn given(&self) -> Vec<Value> {
        let given = fs::read_to_string(self.path("given")).unwrap();
        given.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

#[test]
fn a_recording_is_counted_printed_and_purged() {
    let folder = Folder::new(&[None, Some("a"), Some("a")]);
    let (code, told) = folder.run(&["corpus", "stats", "recorded"]);
    assert_eq!(code, Some(0), "{told}");
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 3, "{told}");
    assert!(lines.iter().any(|line| line.starts_with("model b/m, policy p, tenant a, vocabulary ")
        && line.ends_with(": 2 requests in 1.0 h, 4 tokens of prompts, 6 of outputs")));
    let (_, told) = folder.run(&["corpus", "export", "recorded"]);
    let first: Value = serde_json::from_str(told.lines().next().unwrap()).unwrap();
    assert_eq!((&first["prompt"], &first["output"]), (&json!([1, 2]), &json!([3, 4, 5])));
    assert_eq!(folder.train(TRAINER, &[]).0, Some(0));
    let (code, told) = folder.run(&["corpus", "purge", "recorded", "--tenant", "a"]);
    assert_eq!(
        (code, told.as_str()),
        (
            Some(0),
            "2 requests removed, 2 remain\ntrained on such requests, and still in use if a policy names it: /ours\n"
        )
    );
    assert_eq!(
        folder.run(&["corpus", "purge", "recorded", "--tenant", "b"]).1,
        "0 requests removed, 2 remain\n"
    );
    assert_eq!(folder.run(&["corpus", "purge", "recorded"]).0, Some(64), "what is purged must be said");
    assert_eq!(folder.run(&["corpus", "stats", "recorded", "--key-file", "nowhere"]).0, Some(1));
    assert!(
        folder
            .run(&["corpus", "purge", "recorded", "--older-than", "1h"])
            .1
            .starts_with("2 requests removed")
    );
    assert_eq!(folder.run(&["corpus", "stats", "recorded"]).1, "no recorded requests in recorded\n");
    let (code, told) = folder.run(&["corpus", "stats", "nowhere"]);
    assert_eq!(code, Some(1));
    assert!(told.starts_with("foretell corpus: nowhere: No such file"), "{told}");
}

#[test]
fn a_damaged_recording_is_refused_by_file_and_offset() {
    let folder = Folder::new(&[None]);
    let path = segment::list(&folder.path("recorded")).unwrap().remove(0);
    let mut bytes = fs::read(&path).unwrap();
    bytes[60] ^= 1;
    fs::write(&path, bytes).unwrap();
    let purge = ["corpus", "purge", "recorded", "--older-than", "1h"];
    let commands =
        [folder.run(&["corpus", "export", "recorded"]), folder.train(TRAINER, &[]), folder.run(&purge)];
    for (code, told) in commands {
        assert_eq!(code, Some(1));
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(told.contains(&format!("recorded/{name}: damaged at byte 25: its checksum")), "{told}");
    }
    assert_eq!(folder.run(&["corpus", "purge", "recorded", "--all"]).1, "everything is removed: 1 files\n");
    assert_eq!(folder.run(&["corpus", "stats", "recorded"]).1, "no recorded requests in recorded\n");
}

#[test]
fn a_drafter_is_trained_on_the_requests_of_its_vocabulary() {
    let folder = Folder::new(&[Some("a"), Some("b")]);
    let (code, told) = folder.train(TRAINER, &["--tenant", "a", "--policy", "p"]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(
        told,
        "2 requests, 9 tokens; 1 for validation; 5 of 8192 tokens occur\n \
         50 %: mean acceptance length on validation requests 1.50\n7 parameters, trained for 90 s\n\
         policy p: mean acceptance length 1.20 -> 1.80\nall: mean acceptance length 1.20 -> 1.80\n"
    );
    assert_eq!(folder.given(), [json!({"prompt": [1, 2], "output": [3, 4, 5], "group": "p"})]);
    let origin: Value = serde_json::from_slice(&fs::read(folder.path("ours/trained.json")).unwrap()).unwrap();
    assert_eq!((&origin["tenants"], &origin["requests"]), (&json!(["a"]), &json!(2)));
    assert!(!folder.path("ours.training").exists());
    let (code, told) = folder.train(FAILING, &[]);
    assert_eq!((code, told.as_str()), (Some(1), "foretell train: only 2 requests; at least 50\n"));
    assert!(folder.path("ours/trained.json").exists(), "the former drafter stays");
    assert_eq!(folder.train(TRAINER, &["--policy", "p"]).0, Some(0));
    assert_eq!(folder.given().len(), 2);
    let (code, told) = folder.train(TRAINER, &["--tenant", "nobody"]);
    assert_eq!(code, Some(1));
    assert!(told.contains("none of the 2 recorded requests of this vocabulary is chosen"), "{told}");
    let (code, told) = Folder::new(&[]).train(TRAINER, &[]);
    assert_eq!(code, Some(1));
    assert!(
        told.contains("no recorded request has the vocabulary of") && told.contains("there are 1 of another"),
        "{told}"
    );
    fs::create_dir(folder.path("mine")).unwrap();
    fs::write(folder.path("mine/text"), "").unwrap();
    let (code, told) = folder.train(TRAINER, &["--out", "mine"]);
    assert_eq!((code, told.contains("mine: it holds something else")), (Some(1), true), "{told}");
    for (out, said) in [(".", "current folder"), ("/", "no parent folder"), ("..", "something else")] {
        let (code, told) = folder.train(TRAINER, &["--out", out]);
        assert_eq!((code, told.contains(said)), (Some(1), true), "{told}");
    }
    let (code, told) = folder.train("#!/bin/sh\nkill -9 $$\n", &[]);
    assert_eq!(code, Some(1));
    assert!(told.contains("the trainer ended with signal: 9"), "{told}");
}

#[test]
fn the_drafter_of_a_tenant_is_for_that_tenant() {
    let folder = Folder::new(&[Some("a")]);
    assert_eq!(folder.train(TRAINER, &[]).0, Some(0));
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.onnx"] {
        fs::copy(Path::new(TARGET).join(name), folder.path("ours").join(name)).unwrap();
    }
    let process = "version: 1\nbackends: [{ name: b, replicas: [\"http://127.0.0.1:1\"] }]\n\
                   tenant: { header: x-tenant, trusted_peers: [127.0.0.1/32] }\ndrafters: { ours: { path: ours } }\n";
    fs::write(folder.path("foretell.yaml"), process).unwrap();
    fs::create_dir(folder.path("policies")).unwrap();
    let check = |matched: &str, more: &str| {
        let policy = format!(
            "version: 1\nname: p\n{matched}drafters: [{{ kind: model, model: ours{more} }}]\ncorpus: {{ record: true }}\n"
        );
        fs::write(folder.path("policies/p.yaml"), policy).unwrap();
        folder.run(&["check"])
    };
    for matched in ["", "match: { tenants: [b] }\n", "match: { tenants: [a, b] }\n"] {
        let (code, told) = check(matched, "");
        assert_eq!(code, Some(64), "{told}");
        assert!(told.contains("drafters[0].model: trained on texts of other tenants"), "{told}");
        assert_eq!(check(matched, ", i_accept_sharing: true").0, Some(0));
    }
    let (code, told) = check("match: { tenants: [a] }\n", "");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("policy p: corpus.record has no effect"), "{told}");
}

#[test]
fn the_texts_of_a_base_are_those_of_its_drafter_too() {
    let folder = Folder::new(&[Some("a"), Some("b")]);
    let tenants = |name: &str| {
        let origin: Value = serde_json::from_slice(&fs::read(folder.path(name)).unwrap()).unwrap();
        origin["tenants"].clone()
    };
    assert_eq!(folder.train(TRAINER, &["--out", "first/", "--tenant", "a"]).0, Some(0));
    assert_eq!(tenants("first/trained.json"), json!(["a"]));
    assert_eq!(folder.train(TRAINER, &["--out", "second", "--base", "first", "--tenant", "b"]).0, Some(0));
    assert_eq!(tenants("second/trained.json"), json!(["a", "b"]));
    let again = ["--out", "third", "--base", "third", "--tenant", "b"];
    for _ in 0..2 {
        assert_eq!(folder.train(TRAINER, &again).0, Some(0), "the first has no base yet");
    }
    assert_eq!(tenants("third/trained.json"), json!(["b"]));
    let told = folder.run(&["corpus", "purge", "recorded", "--tenant", "a"]).1;
    assert!(told.contains("/first\n") && told.contains("/second\n") && !told.contains("/third"), "{told}");
}

#[test]
fn a_training_that_came_to_no_checkpoint_leaves_the_next_one_its_choice() {
    let folder = Folder::new(&[None]);
    assert_eq!(folder.train(FAILING, &[]).0, Some(1));
    let until = folder.path("ours.training/until");
    let begun: u64 = fs::read_to_string(&until).unwrap().parse().unwrap();
    fs::write(until, (begun - 60).to_string()).unwrap();
    folder.recorded(begun - 30, None);
    assert_eq!(folder.train(TRAINER, &[]).0, Some(0));
    assert_eq!(folder.given().len(), 2, "what was recorded meanwhile is among them");
}

#[test]
fn a_purge_names_the_checkpoint_of_a_training_that_did_not_end() {
    let folder = Folder::new(&[Some("a"), Some("b"), Some("c")]);
    let purged = |tenant: &str| folder.run(&["corpus", "purge", "recorded", "--tenant", tenant]).1;
    let checkpoint = "the checkpoint of a training on such requests that did not end: /ours.training\n";
    assert_eq!(folder.train("#!/bin/sh\nkill -9 $$\n", &["--tenant", "a"]).0, Some(1));
    assert_eq!(folder.train(FAILING, &["--tenant", "b"]).0, Some(1));
    assert_eq!(purged("a"), format!("1 requests removed, 3 remain\n{checkpoint}"), "of either training");
    assert_eq!(purged("b"), format!("1 requests removed, 2 remain\n{checkpoint}"));
    assert_eq!(folder.train(TRAINER, &["--tenant", "c"]).0, Some(0));
    assert_eq!(purged("a"), "0 requests removed, 2 remain\n", "it is gone with the end of a training");
    assert!(purged("c").ends_with("still in use if a policy names it: /ours\n"));
}

#[test]
fn a_purge_waits_until_the_list_names_a_training_that_reads() {
    let folder = Folder::new(&[Some("a")]);
    let list = fs::File::create(folder.path("recorded/drafters.lock")).unwrap();
    list.lock().unwrap();
    let purge = folder.command(&["corpus", "purge", "recorded", "--all"]).stdout(Stdio::piped()).spawn();
    let purge = purge.unwrap();
    let waits = format!(" {} ", purge.id());
    let waiting = |line: &str| line.contains("-> FLOCK") && line.contains(&waits);
    while !fs::read_to_string("/proc/locks").unwrap().lines().any(waiting) {
        std::thread::yield_now();
    }
    assert_eq!(folder.records(), 2);
    list.unlock().unwrap();
    let told = folder.told(purge.wait_with_output().unwrap());
    assert_eq!((told, folder.records()), ((Some(0), "everything is removed: 1 files\n".to_owned()), 0));
}

#[test]
fn a_training_passes_the_signal_that_ends_it_on_to_its_trainer() {
    let folder = Folder::new(&[None]);
    let patient = "#!/bin/sh\ntrap 'echo \"{\\\"event\\\":\\\"error\\\",\\\"message\\\":\\\"saved\\\"}\"; exit 1' TERM\n\
                   cat >/dev/null; touch begun; while kill -0 $PPID; do sleep 0.05; done\n";
    let python = folder.trainer(patient).display().to_string();
    let arguments =
        ["train", "--corpus", "recorded", "--target", TARGET, "--out", "ours", "--python", python.as_str()];
    let (out, err) = (Stdio::piped(), Stdio::piped());
    let training = folder.command(&arguments).stdout(out).stderr(err).spawn().unwrap();
    while !folder.path("begun").exists() {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&training), Signal::TERM).unwrap();
    let (code, told) = folder.told(training.wait_with_output().unwrap());
    assert!(code == Some(1) && told.contains("saved"), "{code:?}: {told}");
}

#[test]
fn a_training_that_was_ended_goes_on_with_the_same_requests_and_leaves_no_half_drafter() {
    let folder = Folder::new(&[None]);
    assert_eq!(folder.train(TRAINER, &[]).0, Some(0));
    assert_eq!(folder.train(FAILING, &[]).0, Some(1));
    // The process was ended between the two renames of the last step.
    fs::rename(folder.path("ours"), folder.path("ours.training/former")).unwrap();
    fs::write(folder.path("ours.training/last.pt"), "").unwrap();
    let begun: u64 = fs::read_to_string(folder.path("ours.training/until")).unwrap().parse().unwrap();
    fs::write(folder.path("ours.training/until"), (begun - 60).to_string()).unwrap();
    folder.recorded(begun - 30, None);
    let keeping = "#!/bin/sh\nwhile [ $# -gt 1 ]; do case $1 in --work) work=$2;; esac; shift; done\n\
                   cat >given; ls $work >listed; exit 1\n";
    assert_eq!(folder.train(keeping, &[]).0, Some(1));
    assert!(folder.path("ours/trained.json").exists(), "the former drafter is back");
    assert_eq!(folder.given().len(), 1, "what was recorded meanwhile is for the next training");
    assert_eq!(fs::read_to_string(folder.path("listed")).unwrap(), "last.pt\nuntil\n");
    fs::write(folder.path("ours.training/until"), (begun - 90_000).to_string()).unwrap();
    assert_eq!(folder.train(keeping, &[]).0, Some(1));
    assert_eq!(folder.given().len(), 2, "after a day it begins anew");
    assert_eq!(fs::read_to_string(folder.path("listed")).unwrap(), "until\n");
}
