#!/usr/bin/env python3
"""Drafts inside the steps of a real vLLM, from Foretell, by its plug-in.

    inject.py exact     are the answers those of the same server without the plug-in?
    inject.py speed     time of single requests, by kind [--kinds NAMES] [--clients N]
    inject.py agent     time of an agent's conversations, by turn

SmolLM2 (`make real-models MODELS=smollm2`). One server at a time: several side by side distort the times. `exact`
computes in 32 bits with every draft forced, the others in the usual form of this processor with the default policy.

Sides: plain; ngram 5, ngram 16 and suffix (Arctic Inference), vLLM's own methods; inject (through Foretell); corpus
(the same with `suffix`, `scope: tenant`); alone (the plug-in without a service); never (vLLM's own ngram, which finds
nothing: what any speculation costs). Kinds: those of tests/bench/real_prompts.py, `calls` are BFCL's with `tools`.

Times are milliseconds a token, those of all answers together: 16-bit texts differ in length from side to side. In
brackets: ÷ plain, and ÷ the fastest of vLLM's own methods. Exits 2 if an answer differs, 0 with the reason where engine
or model is missing.
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
import bfcl
import real_prompts
import real_servers

MODEL = real_servers.REAL / "smollm2/hf"
PLUGIN = engines.ROOT / "deploy/plugins/vllm"
MOST = 16
TEMPLATE = pathlib.Path(__file__).with_name("hermes.jinja")
# tokens of prompt and answer: those of `exact`, where one answer reaches the end, and those of BFCL with tools
CONTEXT, TOOLS_CONTEXT = 2048, 4096
KINDS = ("edit", "chat", "talk", "completion", "tools")
TURNS = 4
FORCED = """version: 1
name: forced
drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }, { kind: suffix, scope: global, i_accept_sharing: true }]
gamma: { fixed: 8 }
holdback: { start: 0, floor: 0 }
"""
# the built-in policy without a control group, which the other sides do not have either
USUAL = (engines.ROOT / "policies/default.yaml").read_text().replace("start: 0.2, floor: 0.002", "start: 0, floor: 0")
CORPUS = USUAL.replace("kind: suffix", "kind: suffix, scope: tenant")
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
OWN = {"ngram 5": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
       "ngram 16": {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
       "suffix": {"method": "suffix", "num_speculative_tokens": MOST},
       "never": {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1000, "prompt_lookup_max": 1000}}
# vLLM's own methods that find something
METHODS = ("ngram 5", "ngram 16", "suffix")
# the policies of the sides with Foretell
POLICIES = {"inject": USUAL, "corpus": CORPUS}
# one tenant, whatever a client says
TENANT = "version: 1\ntenant: { fallback: authorization_hash }\n"
PLUGGED = {"model": "foretell_vllm.Proposer", "num_speculative_tokens": MOST}


def server(out, side, dtype, socket, context=CONTEXT, extra=()):
    """A vLLM of this side, ready."""
    environment = engines.vllm_environment("1", 1)
    paths = [str(PLUGIN)]
    argv = engines.vllm_argv(MODEL, port := engines.free_port(), dtype)
    argv += ["--max-model-len", str(context), "--chat-template", TEMPLATE, *real_servers.HERMES, *extra]
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
    policies, config = out / "policies", out / "foretell.yaml"
    policies.mkdir(exist_ok=True)
    (policies / "policy.yaml").write_text(policy)
    config.write_text(TENANT)
    argv = [foretell, "serve", "--config", config, "--backend", url, "--tokenizer", MODEL, "--listen", f"127.0.0.1:{front}",
            "--admin", f"127.0.0.1:{admin}", "--drafts", f"unix:{socket}", "--policies", policies]
    pages = f"http://127.0.0.1:{admin}"
    with engines.Server(argv, None, pages, out / "foretell.log", "/healthz", 60) as process:
        time.sleep(3)
        yield f"http://127.0.0.1:{front}", pages, process


def page(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def answered(url, entry, timeout=600):
    """The answer to a request."""
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[entry["route"]]
    body = json.dumps({"model": engines.NAME, **entry["body"]}).encode()
    head = {"content-type": "application/json", "authorization": "Bearer agent"}
    with urllib.request.urlopen(urllib.request.Request(url + path, body, head), timeout=timeout) as got:
        return json.load(got)


def post(url, entry):
    """What matters of the answer to a request."""
    answer = answered(url, entry)
    return [matters(choice) for choice in answer["choices"]] + [answer["usage"]["completion_tokens"]]


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
    return together(url, [long, *entries("edit", 7, 96)], 8)


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
    texts = together(url, [entry] * (count // 20), 4)
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
    found = {"one client": together(url, bodies, 1)}
    leaving = threading.Thread(target=cancelled, args=(url,))
    leaving.start()
    found["eight clients, others cancel"] = together(url, bodies, 8)
    leaving.join()
    found["near the end of the context"] = near_the_end(url)
    return found


def exact(args, out):
    socket, little = out / "drafts.sock", ("--num-gpu-blocks-override", "80")
    report, lines = {}, []
    with server(out, "plain", "float32", socket) as plain:
        known, again = answers(plain.url), together(plain.url, various()[:60], 8)
        sampled, eighty = draws(plain.url, args.draws), various()[:80]
    with server(out, "inject", "float32", socket) as plugged:
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, pages, process):
            got, drawn = answers(url), draws(url, args.draws)
            seen = page(pages + "/api/replicas")["replicas"][0]["inject"]
            killer = threading.Timer(5, process.stop, [signal.SIGKILL])
            killer.start()
            got["service killed"] = together(plugged.url, eighty, 4)
            killer.join()
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, pages, process):
            got["service restarted"] = together(url, eighty, 4)
            back = page(pages + "/api/replicas")["replicas"][0]["inject"]
            process.process.send_signal(signal.SIGSTOP)
            stopped = threading.Timer(20, process.process.send_signal, [signal.SIGCONT])
            stopped.start()
            got["service stopped"] = together(plugged.url, eighty, 4)
            stopped.join()
    known |= dict.fromkeys(("service killed", "service restarted", "service stopped"), known["one client"][:80])
    with server(out, "inject", "float32", socket, extra=little) as plugged:
        with sidecar(args.foretell, plugged.url, out, socket, FORCED) as (url, _, _):
            got["little cache"] = together(url, eighty, 8)
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


def compared(args, out, measure):
    """The times of a measurement on each side; `measure` yields name and milliseconds a token at an address."""
    socket, times, lines = out / "drafts.sock", {}, []
    for side in args.sides.split(","):
        with contextlib.ExitStack() as stack:
            url, pages = stack.enter_context(server(out, side, real_servers.SHORT, socket, TOOLS_CONTEXT)).url, None
            if side in POLICIES:
                url, pages, _ = stack.enter_context(sidecar(args.foretell, url, out, socket, POLICIES[side]))
            together(url, entries("talk", 2, 16), 1)
            for name, taken in measure(args, url):
                times.setdefault(name, {}).setdefault(side, []).append(taken)
            if pages:
                lines.append(f"{side}: {page(pages + '/api/replicas')['replicas'][0]['inject']}")
    return {args.part: times}, lines + table(times), False


def table(times):
    lines = []
    for name, by_side in times.items():
        totals = {side: sum(taken) for side, taken in by_side.items()}
        bases = [totals.get("plain"), min((totals[side] for side in METHODS if side in totals), default=None)]
        for side, taken in by_side.items():
            ratios = ", ".join(f"{totals[side] / base:.3f}" if base else "–" for base in bases)
            lines.append(f"{name:20}{side:12}{' '.join(f'{each:.1f}' for each in taken)} ({ratios})")
    return lines


def speed(args, url):
    for _ in range(args.passes):
        for kind in args.kinds.split(","):
            begun = time.monotonic()
            tokens = sum(answer[-1] for answer in together(url, entries(kind, args.count), args.clients))
            yield kind, 1000 * (time.monotonic() - begun) / tokens


def agent(args, url):
    """Conversations of an agent, one after the other, no two alike: a request brings all that was said so far."""
    cases = real_prompts.spread(list(bfcl.cases(real_servers.BFCL, "multi-turn")), args.count * args.passes)
    for conversations in (cases[start::args.passes] for start in range(args.passes)):
        totals = {"first turns": [0.0, 0], "later turns": [0.0, 0]}
        for tools, turns in conversations:
            for at, (seconds, tokens) in enumerate(conversation(url, tools, turns[:TURNS])):
                total = totals["later turns" if at else "first turns"]
                total[0], total[1] = total[0] + seconds, total[1] + tokens
        yield from ((name, 1000 * seconds / tokens) for name, (seconds, tokens) in totals.items() if tokens)


def conversation(url, tools, turns):
    """Seconds and tokens of each answer."""
    said = []
    for asked, _ in turns:
        said += asked
        begun = time.monotonic()
        answer = answered(url, real_prompts.limited({"route": "chat", "body": {"messages": said, "tools": tools}}, 128))
        yield time.monotonic() - begun, answer["usage"]["completion_tokens"]
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        said.append({"role": "assistant", "content": message["content"] or "", **({"tool_calls": calls} if calls else {})})
        said += [{"role": "tool", "tool_call_id": call["id"], "content": bfcl.RESULT} for call in calls]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("exact", "speed", "agent"))
    parser.add_argument("--foretell", type=pathlib.Path, default=engines.ROOT / "target/dist/foretell")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--sides", help="default: plain, vLLM's own methods, and inject (speed) or corpus (agent)")
    parser.add_argument("--kinds", default=",".join((*KINDS, real_prompts.CALLS)))
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1000)
    args = parser.parse_args()
    args.sides = args.sides or ",".join(("plain", *METHODS, "corpus" if args.part == "agent" else "inject"))
    if why := engines.absent("vllm") or ("" if MODEL.exists() else "no model: make real-models MODELS=smollm2"):
        print(f"not run: {why}")
        return 0
    with tempfile.TemporaryDirectory() as out:
        out = pathlib.Path(out)
        report, lines, failed = exact(args, out) if args.part == "exact" else compared(args, out, {"speed": speed, "agent": agent}[args.part])
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=list) + "\n")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
