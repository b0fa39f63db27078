#!/usr/bin/env python3
"""Lists dead code: items that neither the binary nor a test uses.

The crate is a library with a thin binary, so the compiler considers every `pub` item used. Here the
same sources are compiled as the binary alone, where `pub` protects nothing. An item that is unused
then must at least be named by a test or an example; otherwise it is listed, and the exit code is 1.
`--all` also lists items that only tests use.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "target" / "dead-code"


def lay_out():
    """Copies the sources as one binary crate: the library's layers become private modules of
    `main.rs`."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "src", WORK / "src")
    for name in ("policies", "onnx"):
        os.symlink(ROOT / name, WORK / name)
    shutil.copy(ROOT / "Cargo.lock", WORK)
    manifest = (ROOT / "Cargo.toml").read_text()
    # Same lock file and features as the other steps, so that nothing is compiled twice.
    manifest = re.sub(r'(?m)^(default-)?members = .*$', r'\1members = ["."]', manifest)
    manifest = re.sub(r'(?m)^foretell-fakes = .*\n', '', manifest)
    (WORK / "Cargo.toml").write_text(manifest + "\n[lib]\npath = \"none.rs\"\n")
    lib, main = (WORK / "src/lib.rs").read_text(), (WORK / "src/main.rs").read_text()
    (WORK / "none.rs").write_text("//! Nothing.\n")
    (WORK / "src/lib.rs").unlink()
    main = re.sub(r"(?m)^//!.*\n", "", main).replace("foretell::", "crate::")
    (WORK / "src/main.rs").write_text(re.sub(r"(?m)^pub (mod|use) ", r"\1 ", lib) + main)


def unused():
    """(location, message, name) of every unused item."""
    argv = ["cargo", "check", "--quiet", "--message-format=json", "--bin", "foretell", "--offline"]
    env = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")}
    process = subprocess.run(argv, cwd=WORK, env=env, stdout=subprocess.PIPE, text=True)
    found = []
    for line in process.stdout.splitlines():
        message = json.loads(line).get("message") or {}
        if message.get("level") == "error":
            sys.exit(message["rendered"])
        if (message.get("code") or {}).get("code") != "dead_code":
            continue
        for span in (span for span in message["spans"] if span["is_primary"]):
            text = span["text"][0]
            name = text["text"][text["highlight_start"] - 1:text["highlight_end"] - 1]
            found.append((f"{span['file_name']}:{span['line_start']}", message["message"], name))
    if process.returncode:
        sys.exit(f"cargo check failed: {process.returncode}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="also list items that only tests use")
    args = parser.parse_args()
    lay_out()
    tests = [*ROOT.glob("tests/**/*.rs"), *ROOT.glob("examples/*.rs")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in tests)))
    # Unit tests follow the code of their file, or have a file of their own.
    for path in (ROOT / "src").glob("**/*.rs"):
        text = path.read_text()
        own = text if path.name == "tests.rs" else text.partition("#[cfg(test)]")[2]
        words.update(re.findall(r"\w+", own))
    found = unused()
    dead = [entry for entry in found if entry[2] not in words]
    for place, message, name in found if args.all else dead:
        print(f"{place}: {message}{'' if name not in words else ' but by tests'}")
    print(f"{len(dead)} never used, {len(found) - len(dead)} used by tests alone", file=sys.stderr)
    sys.exit(1 if dead else 0)


if __name__ == "__main__":
    main()
