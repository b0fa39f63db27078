#!/usr/bin/env python3
"""Drafts inside the steps of a real vLLM, from Foretell, by its plug-in.

    inject.py exact [--foretell BIN] [--json FILE]      are the answers those of the same server without the plug-in?
    inject.py speed [--foretell BIN] [--json FILE] [--sides NAMES] [--count N] [--clients N]

SmolLM2 (`make real-models MODELS=smollm2`). One server at a time: several side by side distort the times. `exact`
computes in 32 bits with every draft forced, `speed` in the usual form of this processor with the default policy.
Sides: plain, ngram 5, ngram 16, suffix (Arctic Inference), inject (through Foretell), alone (the plug-in without a
service), never (vLLM's own ngram, which finds nothing: what any speculation costs). Times are milliseconds a token: 16-bit
texts differ in length from side to side. Exits 2 if an answer differs, 0 with the reason where engine or model is missing.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import engine as engines

sys.path.insert(0, str(engines.ROOT / "tests/bench"))
import real_prompts
import real_servers

MODEL = real_servers.REAL / "smollm2/hf"
PLUGIN = engines.ROOT / "deploy/plugins/vllm"
MOST = 16
KINDS = ("edit", "chat", "talk", "completion", "tools")
FORCED = """version: 1
name: forced
drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }, { kind: suffix, scope: global, i_accept_sharing: true }]
gamma: { fixed: 8 }
holdback: { start: 0, floor: 0 }
"""
# the built-in policy without a control group, which the other sides do not have either
USUAL = (engines.ROOT / "policies/default.yaml").read_text().replace("start: 0.2, floor: 0.01", "start: 0, floor: 0")
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
OWN = {"ngram 5": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
       "ngram 16": {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
       "suffix": {"method": "suffix", "num_speculative_tokens": MOST},
       "never": {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1000, "prompt_lookup_max": 1000}}
PLUGGED = {"model": "foretell_vllm.Proposer", "num_speculative_tokens": MOST}


def server(out, side, dtype, socket, extra=()):
    """A vLLM of this side, ready."""
    environment = engines.vllm_environment("1", 1)
    paths = [str(PLUGIN)]
    argv = engines.vllm_argv(MODEL, port := engines.free_port(), dtype)
    argv += ["--max-model-len", "2048", *real_servers.HERMES, *extra]
    if side == "suffix":
        script = engines.ROOT / "tests/bench/arctic.sh"
        paths.append(subprocess.run([script], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    if side != "plain":
        argv += ["--speculative-config", json.dumps(OWN.get(side, PLUGGED))]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "FORETELL_DRAFTS": f"unix:{socket}"}
    return engines.ready("vllm", argv, environment, port, out / f"vllm-{side.replace(' ', '-')}.log", 600)


@contextlib.contextmanager
def sidecar(foretell, url, out, socket, policy):
    """Foretell in front of the server, with its drafts service: address of clients and of the admin interface."""
    front, admin = engines.free_port(), engines.free_port()
    policies = out / "policies"
    policies.mkdir(exist_ok=True)
    for old in policies.iterdir():
        old.unlink()
    if policy:
        (policies / "policy.yaml").write_text(policy)
    argv = [foretell, "serve", "--backend", url, "--tokenizer", MODEL, "--listen", f"127.0.0.1:{front}", "--admin",
            f"127.0.0.1:{admin}", "--drafts", f"unix:{socket}", "--policies", policies if policy else engines.ROOT / "policies"]
    pages = f"http://127.0.0.1:{admin}"
    with engines.Server(argv, None, pages, out / "foretell.log", "/healthz", 60) as process:
        time.sleep(3)
        yield f"http://127.0.0.1:{front}", pages, process


def page(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def post(url, entry, timeout=600):
    """(seconds, what matters of the answer)."""
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[entry["route"]]
    body = json.dumps({"model": engines.NAME, **entry["body"]}).encode()
    begun = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url + path, body, {"content-type": "application/json"}), timeout=timeout) as got:
        answer = json.load(got)
    return time.monotonic() - begun, [matters(choice) for choice in answer["choices"]] + [answer["usage"]["completion_tokens"]]


def matters(choice):
    message = choice.get("message") or {}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("tokens") or [token["token"] for token in logprobs.get("content") or []]
    return [choice.get("text") or message.get("content"), calls, choice["finish_reason"], choice.get("stop_reason"), tokens]


def together(url, entries, clients):
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda entry: post(url, entry), entries))


def entries(kind, count, most=None, **fields):
    return real_prompts.load(real_servers.PROMPTS, kind, count, most, **fields)


def various():
    """200 requests with everything that the engine does to a text."""
    found = []
    for kind in KINDS:
        found += entries(kind, 16, 32)
        found += entries(kind, 4, 24, **({"logprobs": 3} if kind == "completion" else {"logprobs": True, "top_logprobs": 3}))
        # vLLM refuses several greedy answers: with so small a top_p these are greedy too
        several = entries(kind, 4, 24, n=3, top_p=0.001)
        found += [{**entry, "body": {**entry["body"], "temperature": 0.5}} for entry in several]
        found += entries(kind, 4, 24, frequency_penalty=0.5, repetition_penalty=1.1)
        found += entries(kind, 4, 24, stop=["the", "\n\n"])
        seeded = entries(kind, 4, 24, seed=7)
        found += [{**entry, "body": {**entry["body"], "temperature": 0.8, "top_p": 0.95}} for entry in seeded]
    asked = "What is the weather in Paris? Then Rome, Paris, Rome, Paris."
    chat = {"messages": [{"role": "user", "content": asked}], "max_tokens": 48, "temperature": 0}
    bound = [{"tools": [FUNCTION]}, {"tools": [FUNCTION], "tool_choice": "required"},
             {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
             {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
             {"structured_outputs": {"regex": "(Paris|Rome)( (Paris|Rome)){5,9}"}}]
    found += [{"route": "chat", "body": {**chat, **more, "max_tokens": 40 + at}} for at in range(4) for more in bound]
    return found


def near_the_end(url):
    """One row that fills the context beside seven others."""
    text = " ".join(f"number {at % 7} and" for at in range(505))
    long = {"route": "completions", "body": {"prompt": text, "temperature": 0, "max_tokens": None}}
    return [answer for _, answer in together(url, [long, *entries("edit", 7, 96)], 8)]


def cancelled(url, count=40):
    """Requests whose clients leave in the middle."""
    for entry in entries("edit", count, 64):
        body = json.dumps({"model": engines.NAME, **entry["body"], "stream": True}).encode()
        request = urllib.request.Request(url + "/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read(600)


def draws(url, count):
    """First three tokens of many unseeded answers at temperature 0.8."""
    prompt = {"prompt": "A B C D A B C D A B C D A B", "max_tokens": 3, "temperature": 0.8, "n": 20}
    entry = {"route": "completions", "body": prompt}
    texts = [answer for _, answer in together(url, [entry] * (count // 20), 4)]
    return [choice[0] for answer in texts for choice in answer[:-1]]


def unlikely(one, other):
    """p of the chi-square test that both samples have one distribution; classes below 10 are one."""
    counts = {}
    for index, sample in enumerate((one, other)):
        for value in sample:
            counts.setdefault(value, [0, 0])[index] += 1
    classes = [pair for pair in counts.values() if sum(pair) >= 10]
    rest = [sum(pair[index] for pair in counts.values() if sum(pair) < 10) for index in (0, 1)]
    classes += [rest] if sum(rest) else []
    sizes = (len(one), len(other))
    expected = lambda pair, index: sum(pair) * sizes[index] / sum(sizes)
    chi = sum((pair[i] - expected(pair, i)) ** 2 / expected(pair, i) for pair in classes for i in (0, 1))
    degrees = max(1, len(classes) - 1)
    # Wilson and Hilferty's approximation
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2)), chi, degrees


def answers(url):
    """Everything that is compared, by name."""
    bodies = various()
    found = {"one client": [answer for _, answer in together(url, bodies, 1)]}
    leaving = threading.Thread(target=cancelled, args=(url,))
    leaving.start()
    found["eight clients, others cancel"] = [answer for _, answer in together(url, bodies, 8)]
    leaving.join()
    found["near the end of the context"] = near_the_end(url)
    return found


def exact(args, out):
    socket, little = out / "drafts.sock", ("--num-gpu-blocks-override", "80")
    report, lines = {}, []
    with server(out, "plain", "float32", socket) as plain:
        known, again = answers(plain.url), [answer for _, answer in together(plain.url, various()[:60], 8)]
        sampled, eighty = draws(plain.url, args.draws), various()[:80]
    with server(out, "inject", "float32", socket) as plugged:
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, pages, process):
            got, drawn = answers(url), draws(url, args.draws)
            seen = page(pages + "/api/replicas")["replicas"][0]["inject"]
            killer = threading.Timer(5, process.stop, [signal.SIGKILL])
            killer.start()
            got["service killed"] = [answer for _, answer in together(plugged.url, eighty, 4)]
            killer.join()
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, pages, process):
            got["service restarted"] = [answer for _, answer in together(url, eighty, 4)]
            back = page(pages + "/api/replicas")["replicas"][0]["inject"]
            process.process.send_signal(signal.SIGSTOP)
            stopped = threading.Timer(20, process.process.send_signal, [signal.SIGCONT])
            stopped.start()
            got["service stopped"] = [answer for _, answer in together(plugged.url, eighty, 4)]
            stopped.join()
    known |= dict.fromkeys(("service killed", "service restarted", "service stopped"), known["one client"][:80])
    with server(out, "inject", "float32", socket, little) as plugged:
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, _, _):
            got["little cache"] = [answer for _, answer in together(url, eighty, 8)]
    known["little cache"] = known["one client"][:80]
    failed = False
    for name, texts in got.items():
        differ = [at for at, (one, other) in enumerate(zip(known[name], texts)) if one != other]
        failed |= bool(differ)
        report[name] = {"requests": len(texts), "differ": differ, "texts": [(known[name][at], texts[at]) for at in differ]}
        lines.append(f"{name:32} {len(differ)} of {len(texts)} differ")
    noise = sum(one != other for one, other in zip(known["one client"], again))
    lines.append(f"{'plain, eight clients and one':32} {noise} of {len(again)} differ")
    p, chi, degrees = unlikely(sampled, drawn)
    failed |= p < 0.001
    lines += [f"unseeded, temperature 0.8          chi-square {chi:.1f} of {degrees} degrees, p {p:.3f}, {len(drawn)} draws",
              f"drafts                             {seen}", f"after the restart                  {back}"]
    return {"exact": report, "p": p, "inject": seen, "back": back}, lines, failed


def speed(args, out):
    socket, times, lines = out / "drafts.sock", {}, []
    for side in args.sides.split(","):
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(server(out, side, real_servers.SHORT, socket))
            url, pages = found.url, None
            if side == "inject":
                url, pages, _ = stack.enter_context(sidecar(args.foretell, url, out, socket, USUAL))
            together(url, entries("talk", 2, 16), 1)
            for turn in range(args.passes):
                for kind in KINDS:
                    begun = time.monotonic()
                    answered = together(url, entries(kind, args.count), args.clients)
                    tokens = sum(answer[-1] for _, answer in answered)
                    times.setdefault(kind, {}).setdefault(side, []).append(1000 * (time.monotonic() - begun) / tokens)
            if pages:
                lines.append(f"drafts: {page(pages + '/api/replicas')['replicas'][0]['inject']}")
    sides = args.sides.split(",")
    lines.append(f"{'ms a token, ÷ plain':12}" + "".join(f"{side:>24}" for side in sides))
    for kind, by_side in times.items():
        cells = []
        for side in sides:
            taken = by_side[side]
            ratio = sum(taken) / sum(by_side[sides[0]])
            cells.append(f"{' '.join(f'{each:.1f}' for each in taken)}: {ratio:.3f}")
        lines.append(f"{kind:12}" + "".join(f"{cell:>24}" for cell in cells))
    return {"speed": times}, lines, False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("exact", "speed"))
    parser.add_argument("--foretell", type=pathlib.Path, default=engines.ROOT / "target/dist/foretell")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--sides", default="plain,ngram 5,ngram 16,suffix,inject")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1000)
    args = parser.parse_args()
    if why := engines.absent("vllm") or ("" if MODEL.exists() else "no model: make real-models MODELS=smollm2"):
        print(f"not run: {why}")
        return 0
    with tempfile.TemporaryDirectory() as out:
        report, lines, failed = {"exact": exact, "speed": speed}[args.part](args, pathlib.Path(out))
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=list) + "\n")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
