#!/usr/bin/env python3
"""All checks with real engines, and a table that lists the ones that were not run.

    all.py [--engines all|llama|vllm] [--short] [--foretell BIN]

Per engine: the self-test with planted proxies (a run that cannot fail proves nothing), then
exact.py's checks with forced speculation, and transparent.py's comparison of every byte; for vLLM
also stock.py: the server as `vllm serve MODEL` starts it. An engine that is not installed, or cannot run on this machine, is skipped: `make engines` installs.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import engine as engines
import exact
import stock

NOT_HERE = (("vLLM's V2 runner", "needs Triton, which the CPU build lacks: V1 runner only"),
            ("SGLang, TGI, TensorRT-LLM, Triton, LMDeploy, hosted", "no CPU build in the registries: fakes in the Rust tests"))


def run(argv, limit):
    """(exit code, printed lines); the lines go to standard output as they come."""
    lines = []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        return process.wait(limit), lines
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def checks(kind, args, out):
    """Table lines (kind, part, word, figures) of one engine."""
    common = ["--foretell", args.foretell, "--out", str(out)]
    code, lines = run([sys.executable, engines.HERE / "self_test.py", kind, *common], 3600)
    yield kind, "planted", "ok" if code == 0 else "FAILED", f"{len(lines)} proxies in front of the engine"
    figures = out / f"{kind}.json"
    figures.unlink(missing_ok=True)
    short = ["--short"] if args.short else []
    run([sys.executable, engines.HERE / "exact.py", kind, "--json", str(figures), *short, *common], 6 * 3600)
    if not figures.exists():
        yield kind, "exact", "FAILED", "did not start"
        return
    yield from modes(kind, args, out, common)
    if kind == "vllm":
        yield from stock_form(out, common)
    results = json.loads(figures.read_text())
    for part in exact.PARTS:
        result = results.get(part, {"skipped": "not requested"})
        word = "skipped" if "skipped" in result else "ok" if result["ok"] else "FAILED"
        yield kind, part, word, exact.summary(part, result)


def modes(kind, args, out, common):
    """Table lines of transparent.py, one per mode."""
    figures = out / f"transparent-{kind}.json"
    figures.unlink(missing_ok=True)
    short = ["--modes", "observe,forced"] if args.short else []
    run([sys.executable, engines.HERE / "transparent.py", kind, "--json", str(figures), *short, *common], 6 * 3600)
    results = json.loads(figures.read_text()) if figures.exists() else {"all": None}
    for mode, result in results.items():
        summary = f"{len(result['different'])} of {result['cells']} differ" if result else "did not end"
        yield kind, f"bytes {mode}"[:10], "ok" if result and result["ok"] else "FAILED", summary


def stock_form(out, common):
    """Table lines of stock.py, one per check."""
    if why := stock.absent():
        yield "vllm", "stock", "skipped", why
        return
    figures = out / "stock.json"
    figures.unlink(missing_ok=True)
    run([sys.executable, engines.HERE / "stock.py", "--json", str(figures), *common], 3600)
    results = json.loads(figures.read_text()) if figures.exists() else {"stock": {"ok": False, "summary": "did not end"}}
    for part, result in results.items():
        yield "vllm", f"stock {part}"[:18], "ok" if result["ok"] else "FAILED", result["summary"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", default="all", choices=("all", *engines.ENGINES))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/release/foretell"))
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    args = parser.parse_args()
    out, table, began = pathlib.Path(args.out), [], time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for kind in engines.ENGINES:
        if args.engines not in ("all", kind):
            table.append((kind, "all", "skipped", f"ENGINES={args.engines}"))
        elif why := engines.absent(kind):
            table.append((kind, "all", "skipped", why))
        else:
            table += checks(kind, args, out)
    table += [("", what, "skipped", why) for what, why in NOT_HERE]
    form = "short form" if args.short else "full form"
    lines = [f"Real engines, {form}, {time.strftime('%Y-%m-%d')}, {(time.monotonic() - began) / 60:.0f} min"]
    lines += [f"{kind:6} {part:10} {word:8} {figures}" for kind, part, word, figures in table]
    (out / "report.txt").write_text("\n".join(lines) + "\n")
    print("\n" + "\n".join(lines))
    sys.exit(2 if any(word == "FAILED" for _, _, word, _ in table) else 0)


if __name__ == "__main__":
    main()
