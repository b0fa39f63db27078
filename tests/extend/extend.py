#!/usr/bin/env python3
"""Adds a drafter, a dialect, an accept rule, a metric and a setting to a copy of the repository.

    tests/extend/extend.py [--keep]

Each addition is the least that a newcomer would write, as ARCHITECTURE.md says. The copy has to
compile, `foretell check` has to take and list what was added, and each addition may touch only as
many files as MOST says; the pages and schemas that `foretell check` writes are not counted. Exits 1
otherwise. An anchor that is not found any more was changed: change it here and in ARCHITECTURE.md.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGET = ROOT / "target"  # of dependencies nothing is compiled again
PROGRAM = "foretell-extended"
MOST = {"drafter": 3, "dialect": 4, "accept rule": 3, "metric": 2, "setting": 1}

ECHO = '''//! `echo`: proposes the last token again.

use super::{Budget, DrafterId, Features, Feedback, Growing, Lookup, Tree};
use crate::units::TokenId;

/// The drafter.
#[derive(Debug)]
pub struct Echo {
    id: DrafterId,
    last: Option<TokenId>,
}

impl Echo {
    /// A drafter that has seen nothing and votes as `id`.
    pub const fn new(id: DrafterId) -> Self {
        Self { id, last: None }
    }
}

impl Lookup for Echo {
    fn observe(&mut self, seen: &Feedback<'_>) {
        self.last = seen.tokens.last().copied().or(self.last);
    }

    fn draft(&self, _: &Growing, budget: Budget) -> Tree {
        let last = self.last.filter(|_| budget.nodes > 0 && budget.depth > 0);
        Tree::chain(last.as_slice(), self.id, Features::default())
    }

    fn bytes(&self) -> usize {
        0
    }
}
'''

# by addition: (file, text before which, text that is put there); without an anchor a new file
ADDITIONS = {
    "drafter": [
        ("src/core/draft/echo.rs", None, ECHO),
        ("src/core/draft.rs", "pub mod merge;", "pub mod echo;\n"),
        ("src/core/draft.rs", "    /// A local language model.\n    Model,", "    /// The last token again.\n    Echo,\n"),
        ("src/core/draft.rs", "pub const ALL: [Self; 6]", None, "pub const ALL: [Self; 7]"),
        ("src/core/draft.rs", "Self::Head, Self::Model];", "Self::Echo, "),
        ("src/core/draft.rs", '            Self::Model => "model",', '            Self::Echo => "echo",\n'),
        ("src/core/draft.rs", "            Self::Model => match features.margin {", "            Self::Echo => 0,\n"),
        ("src/core/draft.rs", "            Self::Model => [0.5; BUCKETS],", "            Self::Echo => [0.05; BUCKETS],\n"),
        ("src/core/draft.rs", "    /// The target's head.\n    Head,\n}\n\nimpl LookupSpec", "    /// The last token again.\n    Echo,\n"),
        ("src/core/draft.rs", "            Self::Head => Source::Head,", "            Self::Echo => Source::Echo,\n"),
        ("src/core/draft.rs", "            Self::PromptLookup(_) | Self::Prediction | Self::Phrasebook",
         "            Self::Echo => None,\n"),
        ("src/core/draft.rs", "            Self::Prediction => !shared.prediction.is_empty(),", "            Self::Echo => true,\n"),
        ("src/core/draft.rs", "            Self::Prediction => Box::new(Prediction::new",
         "            Self::Echo => Box::new(echo::Echo::new(id)),\n"),
        ("src/core/draft.rs", "            Source::Phrasebook | Source::Head | Source::Model => 0,", "            Source::Echo => 0,\n"),
        ("src/config/policy/file.rs", "    /// A language model in this process.\n    Model {",
         "    /// The last token again.\n    Echo,\n"),
        ("src/config/policy/file.rs", "            Self::Head => LookupSpec::Head,", "            Self::Echo => LookupSpec::Echo,\n"),
    ],
    "dialect": [
        ("src/engines/tabby.rs", None, "src/engines/onnx.rs"),
        ("src/engines/lib.rs", "pub mod vllm;", "pub mod tabby;\n"),
        ("src/engines/lib.rs", "    /// OpenAI's API, other hosted ones", "    /// Tabby.\n    Tabby,\n"),
        ("src/engines/lib.rs", "pub const ALL: [Self; 11]", None, "pub const ALL: [Self; 12]"),
        ("src/engines/lib.rs", "        Self::OpenAi,\n        Self::Ollama,", "        Self::Tabby,\n"),
        ("src/engines/lib.rs", '            Self::OpenAi => "openai",', '            Self::Tabby => "tabby",\n'),
        ("src/engines/lib.rs", "            Self::OpenAi => &passthrough", "            Self::Tabby => &tabby::Tabby,\n"),
    ],
    "accept rule": [
        ("src/core/session/accept/rule.rs", "    /// Typical acceptance (Medusa", "    /// Half of what EARS adds.\n    Half,\n"),
        ("src/core/session/accept/rule.rs", '            Self::Typical { .. } => "typical",', '            Self::Half => "half",\n'),
        ("src/core/session/accept/rule.rs", "            Self::Typical { epsilon, delta } => {", "            Self::Half => low + slack / 2.0,\n"),
        ("src/config/policy/file.rs", "    /// A lossy rule: outputs may drift from the model's own, and each answer reports its drift.\n    Typical {",
         "    /// A lossy rule of half the strength.\n    Half {\n        #[serde(flatten)]\n        drift: Lossy,\n    },\n"),
        ("src/config/policy/file.rs", "            Self::Typical { epsilon, delta, drift } =>",
         "            Self::Half { drift } => (Rule::Half, drift),\n"),
    ],
    "metric": [
        ("src/metrics/catalogue.rs", '        gauge STREAMS = "foretell_streams_in_flight"',
         '        counter LONG = "foretell_long_answers_total" [] "Answers of more than 1,000 tokens.";\n'),
        ("src/observe/metrics/requests.rs", "    control_group: IntCounterVec,\n}", "    long: IntCounter,\n"),
        ("src/observe/metrics/requests.rs", "            control_group: new.register(",
         "            long: new.register(make::counter(metric::LONG))?,\n"),
        ("src/observe/metrics/requests.rs", "        if finished.client_gone {\n            self.disconnects.inc();",
         "        if finished.usage.output_tokens > 1_000 {\n            self.long.inc();\n        }\n"),
    ],
    "setting": [
        ("src/policy/settings.rs", "    pub reprobe: Duration,\n}", "",
         "    pub reprobe: Duration,\n    /// Minimum prompt, tokens.\n    #[schemars(range(min = 0, max = 1_000_000))]\n    pub prompt: u32,\n}"),
        ("src/policy/settings.rs", "            control: 1.02,", "            prompt: 0,\n"),
    ],
}

POLICY = """version: 1
name: extended
drafters: [{ kind: echo }]
accept: { rule: half, tolerance: { max: 0.1 } }
gates: { prompt: 100 }
"""
PROCESS = """version: 1
backends: [{ name: a, engine: tabby, replicas: ["http://127.0.0.1:1"], models: [{ id: m, tokenizer: backend }] }]
policies: { dir: policies }
"""


def copied(to):
    """Copies the tracked files and those that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def add(copy, edits):
    """Makes the edits; returns the files that they touch."""
    for name, anchor, text, *other in edits:
        path = copy / name
        if anchor is None:  # a new file, or another one under a new name
            source = copy / text if "\n" not in text else None
            path.write_text(source.read_text().replace("Onnx", "Tabby").replace("onnx", "tabby") if source else text)
            continue
        before = path.read_text()
        if before.count(anchor) != 1:
            sys.exit(f"extend.py: {name}: {before.count(anchor)} times {anchor!r}")
        path.write_text(before.replace(anchor, other[0] if other else text + anchor))
    return sorted({name for name, *_ in edits})


def cargo(copy, *argv):
    environment = {**os.environ, "CARGO_TARGET_DIR": str(TARGET), "FORETELL_COMMIT": "extended"}
    done = subprocess.run(["cargo", *argv], cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"extend.py: cargo {' '.join(argv)}\n{done.stderr}")


def asked(copy, *argv):
    done = subprocess.run([TARGET / "debug" / PROGRAM, "check", *argv], cwd=copy, capture_output=True, text=True)
    return done.stdout + done.stderr, done.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the copy")
    args = parser.parse_args()
    copy, wrong = pathlib.Path(tempfile.mkdtemp(prefix="extend-")), []
    try:
        copied(copy)
        for what, edits in ADDITIONS.items():
            files = add(copy, edits)
            print(f"{what}: {len(files)} files (at most {MOST[what]}): {', '.join(files)}")
            wrong += [f"{what} touches {len(files)} files"] if len(files) > MOST[what] else []
        # A name of its own: tests that run beside this take `target/debug/foretell`.
        manifest = (copy / "Cargo.toml").read_text()
        (copy / "Cargo.toml").write_text(manifest.replace('name = "foretell"\npath', f'name = "{PROGRAM}"\npath')
                                         .replace('default-run = "foretell"', f'default-run = "{PROGRAM}"'))
        cargo(copy, "build", "--quiet", "--package", "foretell", "--bin", PROGRAM)
        (copy / "try/policies").mkdir(parents=True)
        (copy / "try/policies/extended.yaml").write_text(POLICY)
        (copy / "try/foretell.yaml").write_text(PROCESS)
        told, code = asked(copy, "--config", "try/foretell.yaml")
        wrong += [f"the files are not taken:\n{told}"] if code else []
        listed = "".join(asked(copy, flag)[0] for flag in ("--metrics", "--policy-reference", "--guarantees"))
        for name in ("foretell_long_answers_total", "gates.prompt", "rule: half", "kind: echo", "tabby"):
            wrong += [f"{name} is not listed"] if name not in listed else []
    finally:
        if args.keep:
            print(copy)
        else:
            shutil.rmtree(copy)
    print("\n".join(wrong) or "all five were added, are taken and are listed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
