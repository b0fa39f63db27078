#!/usr/bin/env python3
"""Builds the fuzz targets and runs each for N seconds of processor time, as many at once as there are
processors; exits 1 if an input fails. A stack that is used up ends a target by SIGSEGV, without a word
and without keeping the input.

    tests/fuzz/run.py [--seconds 20] [--target NAME ...] [--minimise] [--build]

Inputs that reach new code are kept in .cache/fuzz/corpus, where the next run begins; an input that
fails is kept in .cache/fuzz/failed.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = pathlib.Path(os.environ.get("FORETELL_CACHE", ROOT / ".cache")) / "fuzz"
TARGETS = ["verify", "stream", "request", "tokenizer", "wire", "session", "snapshot", "shared", "exposition", "config", "admin", "parse", "drafts"]
# Limits of an input, MiB and, for busy machines, seconds; no target needs a tenth of either.
LIMITS = ["-rss_limit_mb=512", "-malloc_limit_mb=256", "-timeout=10"]
# Wall-clock seconds per second of processor time, for a shared machine.
PATIENCE = 20


def build(targets):
    """Builds the targets; the path of each one's program."""
    command = ["cargo", "test", "--no-run", "--quiet", "--message-format=json", "--package", "foretell", "--package", "foretell-fakes",
               "--package", "foretell-fuzz", "--features", "foretell-fuzz/engine"]
    command += [word for target in targets for word in ("--test", target)]
    environment = os.environ | {"RUSTC_WORKSPACE_WRAPPER": str(HERE / "rustc.sh")}
    built = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        for line in built.stdout.splitlines():
            print(json.loads(line).get("message", {}).get("rendered", ""), file=sys.stderr)
        sys.exit("the fuzz targets do not compile")
    artefacts = [json.loads(line) for line in built.stdout.splitlines()]
    found = {it["target"]["name"]: it["executable"] for it in artefacts if it.get("executable")}
    return {target: found[target] for target in targets}


def ran(command):
    """Exit status, standard error and seconds of processor time of a command."""
    environment = os.environ | {"RUST_BACKTRACE": "0"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    log = process.stderr.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, log, used.ru_utime + used.ru_stime


def run(target, program, seconds):
    """Runs a target; its row of the table, and the log of a failure."""
    corpus, failed = CACHE / "corpus" / target, CACHE / "failed" / target
    failed.mkdir(parents=True, exist_ok=True)
    began, used = time.monotonic(), 0.0
    executions, seen, log = 0, (0, 0), ""
    while (left := seconds - used) > 0 and time.monotonic() - began < PATIENCE * seconds:
        command = [program, *LIMITS, f"-max_total_time={min(max(1, round(left)), 300)}", "-print_final_stats=1", "-max_len=8192",
                   f"-artifact_prefix={failed}/", str(corpus)]
        words = HERE / "words" / target
        if words.exists():
            command.insert(1, f"-dict={words}")
        failure, log, more = ran(command)
        used += more
        executions += sum(map(int, re.findall(r"number_of_executed_units: (\d+)", log)))
        seen = max([seen, *((int(cov), int(ft)) for cov, ft in re.findall(r"cov: (\d+) ft: (\d+)", log))])
        if failure:
            log += f"\nended by {signal.Signals(-failure).name if failure < 0 else f'exit status {failure}'}"
            break
    else:
        log = ""
    row = (target, executions, used, *seen, len(list(corpus.iterdir())))
    return row, log


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of processor time for each target")
    parser.add_argument("--target", action="append", choices=TARGETS, help="all unless named")
    parser.add_argument("--minimise", action="store_true", help="first drop inputs of the corpus that reach no code of their own")
    parser.add_argument("--build", action="store_true", help="only build the targets")
    asked = parser.parse_args()
    targets = asked.target or TARGETS
    if asked.build:
        build(targets)
        return
    subprocess.run([HERE / "seeds.py", CACHE / "corpus"], check=True)
    programs = build(targets)
    bad, began = [], time.monotonic()
    print("| target | executions | CPU minutes | edges | features | corpus |\n|---|---:|---:|---:|---:|---:|", flush=True)

    def one(target):
        if asked.minimise:
            minimise(target, programs[target])
        return run(target, programs[target], asked.seconds)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, executions, used, edges, features, inputs), log in pool.map(one, targets):
            print(f"| `{name}` | {executions:,} | {used / 60:.1f} | {edges:,} | {features:,} | {inputs:,} |", flush=True)
            if log:
                bad.append(name)
                print("\n".join(log.splitlines()[-60:]), file=sys.stderr)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes of wall-clock time, without the build", file=sys.stderr)
    if bad:
        sys.exit(f"failed: {', '.join(bad)}; the inputs are in {CACHE / 'failed'}")


def minimise(target, program):
    corpus, fewer = CACHE / "corpus" / target, CACHE / "corpus" / f"{target}.fewer"
    shutil.rmtree(fewer, ignore_errors=True)
    fewer.mkdir()
    subprocess.run([program, *LIMITS, "-merge=1", fewer, corpus], check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(corpus)
    fewer.rename(corpus)


if __name__ == "__main__":
    main()
