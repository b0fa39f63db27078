#!/usr/bin/env python3
"""Records outputs of the bundled pair for the workloads, for simulations with real acceptance.

    record.py [--foretell BIN] [--out DIR] [--temperature T] [--check N] [WORKLOAD ...]
    record.py --real [--foretell BIN] [--out DIR] [WORKLOAD ...]

For each workload (tests/workloads/WORKLOAD.jsonl, all of them by default) one file, one line per
prompt: `WORKLOAD.jsonl` at temperature 0, `WORKLOAD-tT.jsonl` above, as in `completion-t0.7.jsonl`:

    {"prompt": [ids], "output": [ids], "choices": [ids], "margins": [floats], "temperature": float}

prompt       the prompt's token ids as the target sees them (a chat after its template)
output       the target's output, at least 128 tokens if it does not end before (with --real as many
             as are asked for); an end-of-text id is part of it
choices      choices[i] is the greedy choice of the drafter draft-same after prompt + output[:i]
margins      margins[i] is its best log-probability there minus the second best (nats, two decimals)
temperature  sampling temperature of the output; left out at temperature 0

Above temperature 0 the output is a sample, with the prompt's position in its workload as seed. The
target takes the token whose log-probability / T + noise is greatest, and the noise is a function of
seed, position and token: so the same text is sampled again, from any position of it on, after
drafts too. The drafter still drafts greedily there, and a drafted token is accepted where it is the
sampled one: choices[i] against output[i] is the real acceptance at this temperature.

An output shorter than 24 tokens is left out. The recording is deterministic: one request at a time,
two fresh servers.

--check N records the first N prompts of each workload again and compares them with the files. The
last bits of a logit depend on the processor, so differences that they decide are allowed, and no
others:

* Where the target writes another token, both tokens are scored after the recorded text
  (log-probability / T + noise, which are those of the target's own sampler): less than 0.02 / T
  apart is close, more is wrong. After that position it continues from the recorded text, with the
  same seed, so that one close draw does not hide later differences. Their number is printed.
* choices and margins are those after the recorded output, so that they can be compared whatever was
  sampled now: margins to 0.02, another choice only where the margin is less.

--check cannot tell that a sample is a likely one; a test of its own checks that the target samples
correctly (src/onnx/sampler). Exits 2 if anything differs that must not.

--real records SmolLM2-135M and prompts by others (`make real-models`, tests/bench/real_prompts.py)
as `real-WORKLOAD.jsonl`: 32 prompts each, with the lengths and stops of `make bench-real`, outputs
of any length kept, and no drafter.

Needs the exports of `make -s print-env`.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import real_prompts  # noqa: E402

REAL_PROMPTS = 32
WORKLOADS = ("rewrite", "completion", "prose", "chat", "hostile", "turns", "agent", "retrieval")
LEAST_MAX_TOKENS = 128
SHORTEST = 24
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
READY = re.compile(r"target (\S+) ready on (http://\S+)")
# Below this margin (nats) the last bits decide.
CLOSE = 0.02
BITS = (1 << 64) - 1


@contextlib.contextmanager
def served(foretell, model, *extra):
    """The address of a server of this model, for the duration of the block."""
    argv = [foretell, "target", "--model", str(ROOT / "onnx/models" / model), "--name", "foretell-target",
            "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log-level", "error", *extra]
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


def completed(target, path, body, temperature, seed):
    """(prompt, output) in token ids."""
    answer = ask(target, path, {**body, "temperature": temperature, "seed": seed, "stream": False, "return_token_ids": True})
    choice = answer["choices"][0]
    return (answer if "prompt_token_ids" in answer else choice)["prompt_token_ids"], choice["token_ids"]


def written(target, entry, temperature, seed):
    """(prompt, output) of a line of a workload."""
    body = {**entry["body"], "max_tokens": max(LEAST_MAX_TOKENS, entry["body"].get("max_tokens", 0))}
    return completed(target, PATHS[entry["route"]], body, temperature, seed)


def scored(model, tokens, top):
    """A row for each token: the log-probabilities of the `top` best at its position, and its
    own."""
    body = {"model": "foretell-target", "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
    return ask(model, PATHS["completions"], body)["choices"][0]["prompt_logprobs"]


def best_two(row):
    """The best token of a `prompt_logprobs` entry, and its lead over the next."""
    (first, choice), (second, _) = sorted((-entry["logprob"], int(token)) for token, entry in row.items())[:2]
    return choice, round(second - first, 2)


def judged(drafter, prompt, output):
    """The drafter's greedy choice and margin at each position of the output."""
    found = [best_two(row) for row in scored(drafter, prompt + output, 2)[len(prompt):]]
    if len(found) != len(output):
        sys.exit(f"{len(found)} rows for {len(output)} tokens")
    return [choice for choice, _ in found], [margin for _, margin in found]


def entries(workload, limit=None):
    """The first `limit` lines of a workload, each with its seed."""
    lines = (ROOT / "tests/workloads" / f"{workload}.jsonl").read_text().splitlines()
    return [(seed, json.loads(line)) for seed, line in enumerate(lines[:limit])]


def traces(target, drafter, workload, temperature):
    """The lines of a recording."""
    for seed, entry in entries(workload):
        prompt, output = written(target, entry, temperature, seed)
        if len(output) < SHORTEST:
            continue
        choices, margins = judged(drafter, prompt, output)
        line = {"prompt": prompt, "output": output, "choices": choices, "margins": margins}
        yield {**line, "temperature": temperature} if temperature else line


def real_traces(target, prompts, workload):
    """The lines of a recording of real prompts, in the folder `prompts`."""
    for entry in real_prompts.load(prompts, workload, REAL_PROMPTS, model="foretell-target"):
        prompt, output = completed(target, PATHS[entry["route"]], entry["body"], 0, 0)
        yield {"prompt": prompt, "output": output}


# --------------------------------------------------------------------------------------- comparing

def mixed(number):
    """One step of SplitMix64, equal to `SplitMix64::mix`."""
    number = (number + 0x9E3779B97F4A7C15) & BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & BITS
    return number ^ number >> 31


def noise(seed, position, token):
    """The target's noise for a token at a position of prompt and output (src/onnx/noise.rs)."""
    number = mixed(mixed(seed ^ mixed((position + 0x9E3779B97F4A7C15) & BITS)) ^ mixed(token))
    return -math.log(-math.log(((number >> 12) + 0.5) / (1 << 52)))


def score(target, before, token, temperature, seed):
    """The value by which the target's sampler compares a token."""
    logprob = scored(target, before + [token], 1)[-1][str(token)]["logprob"]
    return logprob / temperature + noise(seed, len(before), token) if temperature else logprob


def forks(target, kept, now, temperature, seed):
    """Positions where the target differs from the record: position, its token, and its lead.

    `now` is the target's output from the first position on."""
    prompt, output, start = kept["prompt"], kept["output"], 0
    while True:
        rest = output[start:]
        position = next((position for position, (old, new) in enumerate(zip(rest, now)) if old != new), min(len(rest), len(now)))
        if position == len(rest):
            return
        if position == len(now):
            yield start + position, None, math.inf
            return
        before, other = prompt + output[:start + position], now[position]
        preferred = [score(target, before, token, temperature, seed) for token in (other, rest[position])]
        yield start + position, other, preferred[0] - preferred[1]
        start += position + 1
        if start == len(output):
            return
        body = {"model": "foretell-target", "prompt": prompt + output[:start], "max_tokens": len(output) - start}
        now = completed(target, PATHS["completions"], body, temperature, seed)[1]


def differences(kept, choices, margins):
    """Differences of the drafter from the record, in words."""
    for position, (margin, new) in enumerate(zip(kept["margins"], margins, strict=True)):
        if abs(margin - new) > CLOSE:
            yield f"position {position}: margin {new} instead of {margin}"
        elif kept["choices"][position] != choices[position] and margin >= CLOSE:
            yield f"position {position}: choice {choices[position]} instead of {kept['choices'][position]}"


def compare(path, target, drafter, workload, temperature, limit):
    """Compares the first lines of a recording with a new one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = {tuple(line["prompt"]): (number, line) for number, line in enumerate(lines, 1)}
    wrong, close, compared = [], 0, 0
    for seed, entry in entries(workload, limit):
        prompt, now = written(target, entry, temperature, seed)
        number, line = kept.get(tuple(prompt), (0, None))
        if line is None:
            wrong += [f"prompt {seed}: not recorded"] if len(now) >= SHORTEST else []
            continue
        compared += 1
        if line.get("temperature", 0) != temperature:
            wrong.append(f"line {number}: at temperature {line.get('temperature', 0)}")
        for position, token, by in forks(target, line, now, temperature, seed):
            if abs(by) < CLOSE / (temperature or 1):
                close += 1
            else:
                wrong.append(f"line {number}, position {position}: writes {token} instead of {line['output'][position]}, by {by:.3f}")
        wrong += [f"line {number}, {what}" for what in differences(line, *judged(drafter, prompt, line["output"]))]
    print("\n".join(f"{path.name}: {what}" for what in wrong)
          or f"{path.name}: {compared} lines as recorded, {close} tokens of the target too close to tell")
    return not wrong


def write(path, lines):
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    tokens = sum(len(line["output"]) for line in lines)
    print(f"{path.name}: {len(lines)} lines, {tokens} tokens of output", end="")
    same = sum(a == b for line in lines for a, b in zip(line["output"], line.get("choices", ())))
    print(f", the drafter's choice {same / tokens:.1%} of them" if same else "", flush=True)


def record_real(args):
    """Records each workload of real prompts."""
    real = pathlib.Path(os.environ.get("FORETELL_CACHE", ROOT / ".cache")).resolve() / "real-models"
    if not (real / "prompts").exists():
        sys.exit(f"{real / 'prompts'} is not there: make real-models")
    for workload in args.workloads or real_prompts.NAMES:
        with served(args.foretell, real / "smollm2/onnx", "--context", "2048") as target:
            write(args.out / f"real-{workload}.jsonl", list(real_traces(target, real / "prompts", workload)))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD",
                        help=f"of {', '.join(WORKLOADS)}, with --real of {', '.join(real_prompts.NAMES)}; all by default")
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M and prompts by others")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"), metavar="BIN")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/control/traces", metavar="DIR")
    parser.add_argument("--temperature", type=float, default=0, metavar="T", help="sample at T; 0 is greedy, the default")
    parser.add_argument("--check", type=int, metavar="N", help="record the first N prompts again and compare")
    args = parser.parse_args()
    allowed = real_prompts.NAMES if args.real else WORKLOADS
    if unknown := [name for name in args.workloads if name not in allowed]:
        parser.error(f"no workload {unknown[0]}, allowed {', '.join(allowed)}")
    if args.real and (args.check is not None or args.temperature):
        parser.error("--real records at temperature 0, and compares nothing")
    if args.check is not None and args.check < 1:
        parser.error(f"--check: at least 1, got {args.check}")
    if not 0 <= args.temperature <= 2:
        parser.error(f"--temperature: 0 to 2, got {args.temperature}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.real:
        return record_real(args)
    well = True
    for workload in args.workloads or WORKLOADS:
        path = args.out / (f"{workload}-t{args.temperature}.jsonl" if args.temperature else f"{workload}.jsonl")
        # Fresh servers for each workload: the cache contents are the same in every recording.
        with served(args.foretell, "target") as target, served(args.foretell, "draft-same") as drafter:
            if args.check is None:
                write(path, list(traces(target, drafter, workload, args.temperature)))
            else:
                well &= compare(path, target, drafter, workload, args.temperature, args.check)
    return 0 if well else 2


if __name__ == "__main__":
    sys.exit(main())
