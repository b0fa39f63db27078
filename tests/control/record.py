#!/usr/bin/env python3
"""Records what the bundled pair says to the workloads, for simulations that need real text and real acceptance.

    record.py [--foretell BIN] [--out DIR] [--check N] [WORKLOAD ...]

For each workload (tests/workloads/WORKLOAD.jsonl, all of them by default) one file `WORKLOAD.jsonl`, one line per prompt:

    {"prompt": [ids], "output": [ids], "choices": [ids], "margins": [floats]}

prompt    the prompt's token ids as the target sees them (a chat after its template)
output    the target's greedy output, at least 128 tokens if it does not end before; an end-of-text id is part of it
choices   choices[i] is the greedy choice of the drafter draft-same after prompt + output[:i]
margins   margins[i] is its best log-probability there less the second best (nats, two decimals)

An output shorter than 24 tokens is left out. The recording is deterministic: one request at a time, two fresh servers.
--check N records the first N prompts of each workload again and compares them with what is there. Where the margin is
below 0.02, another choice is allowed: the last bits of a logit depend on the processor. Exits 2 if anything else differs.

Needs the exports of `make -s print-env`.
"""

import argparse
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORKLOADS = ("rewrite", "completion", "prose", "chat", "hostile")
LEAST_MAX_TOKENS = 128
SHORTEST = 24
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
READY = re.compile(r"target (\S+) ready on (http://\S+)")
# Below this margin (nats) the last bits decide.
CLOSE = 0.02


@contextlib.contextmanager
def served(foretell, model):
    """The address of a server of this model, while the block runs."""
    argv = [foretell, "target", "--model", str(ROOT / "onnx/models" / model), "--name", "foretell-target",
            "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log-level", "error"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        ready = READY.match(process.stdout.readline())
        if not ready:
            sys.exit(f"foretell target --model {model} did not start")
        yield ready.group(2)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def ask(address, path, body):
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def output(target, entry):
    """(prompt, greedy output) in token ids."""
    body = dict(entry["body"])
    body.update(temperature=0, stream=False, return_token_ids=True,
                max_tokens=max(LEAST_MAX_TOKENS, body.get("max_tokens", 0)))
    answer = ask(target, PATHS[entry["route"]], body)
    choice = answer["choices"][0]
    prompt = answer["prompt_token_ids"] if entry["route"] == "chat" else choice["prompt_token_ids"]
    return prompt, choice["token_ids"]


def best_two(row):
    """The best token of a `prompt_logprobs` entry, and by how much it is better than the next."""
    (first, choice), (second, _) = sorted((-told["logprob"], int(token)) for token, told in row.items())[:2]
    return choice, round(second - first, 2)


def judged(drafter, prompt, written):
    """The drafter's greedy choice and margin at each place of the output."""
    body = {"model": "foretell-target", "prompt": prompt + written, "max_tokens": 1, "temperature": 0,
            "prompt_logprobs": 2}
    rows = ask(drafter, PATHS["completions"], body)["choices"][0]["prompt_logprobs"]
    found = [best_two(row) for row in rows[len(prompt):]]
    return [choice for choice, _ in found], [margin for _, margin in found]


def traces(target, drafter, workload, most=None):
    """The lines of a workload, those of its first `most` prompts."""
    lines = (ROOT / "tests/workloads" / f"{workload}.jsonl").read_text().splitlines()
    for line in lines[:most]:
        prompt, written = output(target, json.loads(line))
        if len(written) < SHORTEST:
            continue
        choices, margins = judged(drafter, prompt, written)
        if len(choices) != len(written):
            sys.exit(f"{workload}: {len(choices)} rows for {len(written)} tokens")
        yield {"prompt": prompt, "output": written, "choices": choices, "margins": margins}


def differences(kept, again):
    """What of a line is not as it was, in words."""
    for field in ("prompt", "output"):
        if kept[field] != again[field]:
            yield f"another {field}"
            return
    for place, (margin, new) in enumerate(zip(kept["margins"], again["margins"], strict=True)):
        if abs(margin - new) > CLOSE:
            yield f"place {place}: margin {new} instead of {margin}"
        elif kept["choices"][place] != again["choices"][place] and margin >= CLOSE:
            yield f"place {place}: choice {again['choices'][place]} instead of {kept['choices'][place]}"


def compare(path, again):
    """Whether the first lines of a file are what was recorded now."""
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = [f"{path.name}:{number}: {what}" for number, (old, new) in enumerate(zip(kept, again), 1)
             for what in differences(old, new)]
    if len(again) > len(kept):
        wrong.append(f"{path.name}: {len(kept)} lines, {len(again)} recorded")
    print("\n".join(wrong) if wrong else f"{path.name}: {len(again)} lines as recorded")
    return not wrong


def write(path, lines):
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    tokens = sum(len(line["output"]) for line in lines)
    same = sum(a == b for line in lines for a, b in zip(line["output"], line["choices"]))
    print(f"{path.name}: {len(lines)} lines, {tokens} tokens of output, the drafter's choice {same / tokens:.1%} of them")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"), metavar="BIN")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/control/traces", metavar="DIR")
    parser.add_argument("--check", type=int, metavar="N", help="record the first N prompts again and compare")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {unknown[0]}, allowed {', '.join(WORKLOADS)}")
    if args.check is not None and args.check < 1:
        parser.error(f"--check: at least 1, got {args.check}")
    args.out.mkdir(parents=True, exist_ok=True)
    well = True
    for workload in args.workloads or WORKLOADS:
        path = args.out / f"{workload}.jsonl"
        # Fresh servers for each workload: what an earlier prompt left in a cache is the same in every recording.
        with served(args.foretell, "target") as target, served(args.foretell, "draft-same") as drafter:
            lines = list(traces(target, drafter, workload, args.check))
        if args.check is None:
            write(path, lines)
        else:
            well &= compare(path, lines)
    return 0 if well else 2


if __name__ == "__main__":
    sys.exit(main())
