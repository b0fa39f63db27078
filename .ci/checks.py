#!/usr/bin/env python3
"""Runs the checks whose subject changes rarely, where they are due.

    .ci/checks.py          run the due ones
    .ci/checks.py --list   say which are due and why
    .ci/checks.py NAME...  run these

Those that pass are recorded in .ci/checked.json: commit it.

CHECKS_UNTIL (seconds from now): a due check is not begun after that, and stays due.

A check is due if a file that it depends on has changed since it passed, or WEEK days after that. Files
are compared by their content, so a record stays valid when commits are rebased. They have to be
committed: what is checked is what git has.
"""

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci/checked.json"
WEEK = 7
MANIFESTS = ["Cargo.lock", "*Cargo.toml"]


@dataclass(frozen=True)
class Check:
    """Shell `command` shows `subject`, which `files` (git's patterns) can break."""

    subject: str
    files: list[str]
    command: str


CHECKS = {
    "deny": Check("licences, sources, bans of dependencies", [*MANIFESTS, "deny.toml", ".ci/deny"], ".ci/tools deny && .ci/deny"),
    "machete": Check("unused dependencies", [*MANIFESTS], ".ci/tools machete && cargo machete"),
    "bare": Check("the product without ONNX Runtime", [*MANIFESTS, "src/onnx/*"],
                  "cargo clippy --package foretell --package foretell-onnx --no-default-features -- -D warnings"),
    "extend": Check("what it takes to add a drafter, an engine, a rule, a metric, a setting",
                    ["tests/extend/*", "ARCHITECTURE.md", "src/core/draft.rs", "src/engines/engine.rs", "src/engines/lib.rs"],
                    "tests/extend/extend.py"),
    "page": Check("the status page in a headless Chromium", ["src/foretell/admin/*", "tests/page/*"], "make test-page"),
    "clients": Check("agent frameworks, direct and through Foretell", ["tests/clients/*", "src/proxy/gateway/translate*", "src/wire/anthropic*", "src/wire/responses*",
                      "src/wire/translation*"], "make test-clients"),
    "deploy": Check("chart, manifests, image, compose, unit, nginx, Envoy",
                    ["deploy/*", "tests/deploy/*", "src/foretell/cli/serve.rs"], "make test-deploy"),
    "packages": Check("wheel, .deb, OCI image, each installed in an empty place and queried",
                      ["deploy/packages/*", "tests/deploy/*", "Cargo.toml", "src/foretell/Cargo.toml"],
                      ".ci/tools packages && make test-packages PROFILE=release"),
    "grafana": Check("dashboards and alerts in a real Prometheus that scrapes a live Foretell",
                     ["grafana/*", "tests/grafana/*", "src/metrics/*"], "make test-grafana"),
    "fuzz": Check("20 seconds of coverage-guided fuzzing for each target",
                  ["tests/fuzz/*", "src/wire/openai*", "src/core/session/parse*", "src/net/http*", "src/drafts/*"], "make fuzz SECONDS=20"),
    "llama": Check("a real engine: llama-server, built from its package, short form",
                   ["tests/engines/*", "src/engines/llamacpp*"],
                   "make engines ENGINES=llama && make test-engines ENGINES=llama SHORT=1 BIN=target/release/foretell"),
}


def digest(check):
    listed = subprocess.run(["git", "ls-files", "--stage", "--", *check.files], cwd=ROOT, capture_output=True, check=True).stdout
    if not listed:
        sys.exit(f"{check.subject}: no file matches {check.files}: correct .ci/checks.py")
    return hashlib.sha256(listed).hexdigest()[:16]


def record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def cause(name, recorded):
    """Why the check is due, or None."""
    if name not in recorded:
        return "never recorded"
    if recorded[name]["files"] != digest(CHECKS[name]):
        return "its files have changed"
    age = (datetime.date.today() - datetime.date.fromisoformat(recorded[name]["date"])).days
    return f"last run {age} days ago" if age >= WEEK else None


def run(name):
    print(f"\n-- {name}: {CHECKS[name].subject}", flush=True)
    started = time.monotonic()
    status = subprocess.run(["bash", "-euo", "pipefail", "-c", CHECKS[name].command], cwd=ROOT, check=False,
                            env={"BIN": f"{ROOT}/target/debug/foretell"} | os.environ
                            | {"PATH": f"{ROOT}/.cache/tools/bin:{os.environ['PATH']}"}).returncode
    print(f"-- {name}: {'passed' if status == 0 else f'FAILED, exit {status}'} after {time.monotonic() - started:.0f} s", flush=True)
    return status == 0


def main():
    names = [name for name in sys.argv[1:] if name != "--list"]
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sys.exit(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    recorded = record()
    due = {name: why for name in names or CHECKS if (why := "requested" if names else cause(name, recorded))}
    for name in CHECKS:
        if name not in due and not names:
            print(f"{name}: passed on {recorded[name]['date']}, its files are the same")
    for name, why in due.items():
        print(f"{name}: due, {why}")
    if "--list" in sys.argv:
        return
    failed, until = [], time.monotonic() + float(os.environ.get("CHECKS_UNTIL", "inf"))
    for name in due:
        if time.monotonic() > until:
            print(f"\n-- {name}: left out on this slow machine, stays due")
            continue
        before = digest(CHECKS[name])
        if not run(name):
            failed.append(name)
        else:
            RECORD.write_text(json.dumps(record() | {name: {"files": before, "date": datetime.date.today().isoformat()}},
                                         indent=1, sort_keys=True) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
