#!/usr/bin/env python3
"""Agents' chats with a real model, direct and through Foretell: the parts of the answers must agree.

    calls.py [--server vllm|target] [--model fixture|smollm2|qwen] [--counts KIND=N,…]
             [--form both|streamed|whole] [--reasoning] [--precise] [--clients N] [--draws N] [--foretell BIN]

vLLM with `--tool-call-parser hermes` serves a model of `make real-models`, or that of `make
real-fixture`, which calls tools; in 32 bits with `--precise`. `--server target`: `foretell target` does.
Foretell knows its parsers and speculates at every token, in drafts of 4. T=0. The first three streams
stay plain: the parser proves itself on them.

single, parallel   questions of BFCL with their tools, as agents send them (bfcl.py)
multi-turn         the first TURNS turns of a conversation: question, calls, results, reply; the direct
                   side's answers are the history of both
chat               HumanEval's tasks without tools
forced             as single, with `tool_choice: required`
schema             as single, with the schema of its first tool as `response_format`; both with
                   `foretell target` only: they are passed through elsewhere
repeat             a call of BFCL's tools to be repeated, after two examples, for models that seldom
                   make one in this form by themselves

--reasoning: the chat template opens a block of reasoning, which `--reasoning-parser qwen3` parses
(fixture only). --form both: every other answer is streamed. Compared are joined content, reasoning,
names and arguments of calls, finish reason and usage; of whole answers all members but ids and times.

--draws N: in place of that, N whole answers at T=0.8 of five prompts on each side, every other prompt
with top_k 10 (verified by `score` instead of `fan_out`). Names of calls, and the characters of the
joined answers at some places, are compared by a chi-square test of homogeneity, Bonferroni-corrected;
the same test has to tell direct answers at T=0.8 and T=1.2 apart.

Exits 2 if an answer differs, if none with a call was speculated on, or if a test fails.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import sys
import tempfile

import bfcl
import figures
import real_prompts
import real_servers as servers
import sides
import stats

MOST = 120  # tokens of an answer
TURNS = 2
COUNTS = {"fixture": "single=100,parallel=25,multi-turn=25,chat=20", "smollm2": "single=20,repeat=20",
          "qwen": "single=20,parallel=5,multi-turn=5,chat=5,repeat=4"}
KINDS = ("single", "parallel", "multi-turn", "chat", "repeat", "forced", "schema")
FORMS = {"both": ("streamed", "whole"), "streamed": ("streamed",), "whole": ("whole",)}
VARY = ("id", "created")  # members of a whole answer that differ by nature
VALUES = {"string": "Bern", "integer": 3, "number": 2.5, "boolean": True, "array": ["a", "b"], "object": {}}
# draws: prompts of each kind, tokens of an answer, choices of one direct request, concurrent requests
DRAWN = {"single": 2, "parallel": 1, "multi-turn": 1, "chat": 1}
DRAWN_MOST, CHOICES, CLIENTS = 32, 25, 8
SAMPLING = ({"temperature": 0.8}, {"temperature": 0.8, "top_k": 10})
LEAST_P, TOLD_APART = 1e-3, 1e-6
# characters of an answer that are compared: whole answers seldom come twice
PLACES = (0, 16, 32, 48, 64, 80)

# kind, form, direct parts, parts through Foretell, usage.foretell
Pair = collections.namedtuple("Pair", "kind form want got ours")


# ----------------------------------------------------------------------------------------- prompts

def call_of(tool):
    """A call with a value for each required argument."""
    schema = tool["function"]["parameters"]
    names = schema.get("required") or list(schema["properties"])
    return bfcl.call(tool["function"]["name"], {name: VALUES.get(schema["properties"][name].get("type"), "x") for name in names})


def repeated(offered, calls):
    """Messages that ask to repeat lines, answered twice already, the last time with calls of the first tool."""
    lines = ["Good morning.", *("\n".join([call_of(tool)] * calls) for tool in (offered[-1], offered[0]))]
    for place, text in enumerate(lines):
        yield {"role": "user", "content": f"Repeat exactly these lines, and nothing else:\n\n{text}"}
        if place + 1 < len(lines):
            yield {"role": "assistant", "content": text}


def conversations(kind, count):
    """Fields of the requests and, for each turn, the user's messages."""
    if kind == "chat":
        for problem in real_prompts.spread(real_prompts.lines(servers.PROMPTS / "human-eval.jsonl.gz"), count):
            yield {}, [real_prompts.chat(problem)["body"]["messages"]]
        return
    every = bfcl.cases(servers.BFCL, "single" if kind == "repeat" else kind)
    for number, case in enumerate(real_prompts.spread(every, count)):
        asked = [question for question, _ in case.turns[:TURNS]]
        turns = [list(repeated(case.tools, 1 + number % 2))] if kind == "repeat" else asked
        yield bfcl.bound(kind, case.tools), turns


def request(fields, messages, form, **more):
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if form == "streamed" else {}
    return {"model": servers.engines.NAME, "messages": messages, "max_tokens": MOST, **fields, **streamed, **more}


# ----------------------------------------------------------------------------------------- answers

def post(address, route, body, **headers):
    """The text of an answer."""
    connection = http.client.HTTPConnection(address, timeout=600)
    try:
        connection.request("POST", route, json.dumps(body), {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        raise sides.Wrong(f"{route} {answer.status}: {text[:200]}")
    return text


def ask(address, body):
    """(parts of each choice, usage.foretell) of an answer."""
    text = post(address, "/v1/chat/completions", body)
    return streamed_parts(text) if body.get("stream") else whole_parts(json.loads(text))


def counted(usage):
    """(usage as a server alone has it, usage.foretell)"""
    left = {key: value for key, value in usage.items() if key not in ("foretell", "prompt_tokens_details")}
    return left, usage.get("foretell") or {}


def whole_parts(whole):
    usage, ours = counted(whole["usage"])
    rest = {key: value for key, value in whole.items() if key not in (*VARY, "usage", "choices")}
    found = []
    for choice in whole["choices"]:
        message = choice["message"]
        choice.pop("seed", None)
        for call in message.get("tool_calls") or []:
            call["id"] = call["id"].rsplit("-", 1)[0]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
        found.append({"content": message.get("content") or "", "reasoning": message.get("reasoning") or "", "calls": calls,
                      "finish": choice["finish_reason"], "usage": usage, "choice": choice, "rest": rest})
    return found, ours


def streamed_parts(text):
    parts, usage = {"content": "", "reasoning": "", "calls": [], "finish": None}, {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise sides.Wrong(f"error event: {event}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                parts[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    parts["calls"].append([call["function"]["name"], ""])
                parts["calls"][call["index"]][1] += call["function"].get("arguments") or ""
            parts["finish"] = choice.get("finish_reason") or parts["finish"]
    usage, ours = counted(usage)
    return [{**parts, "usage": usage}], ours


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def converse(direct, through, kind, form, fields, turns):
    """Pairs of answers; a conversation ends where the server would refuse its history."""
    messages = []
    for question in turns:
        messages += question
        for _ in ("calls", "reply"):
            body = request(fields, messages, form, temperature=0)
            ([want], _), ([got], ours) = ask(direct, body), ask(through, body)
            yield Pair(kind, form, want, got, ours)
            if not all(is_object(arguments) for _, arguments in want["calls"]):
                return
            if kind != "multi-turn" or not want["calls"]:
                break
            messages += bfcl.history(want["content"], want["calls"])
        messages.append({"role": "assistant", "content": want["content"]})


def agreement(direct, through, args):
    """Every pair of the counts asked for."""
    forms = itertools.cycle(FORMS[args.form])
    every = [(kind, form, fields, turns) for kind, count in args.counts.items()
             for (fields, turns), form in zip(conversations(kind, count), forms)]
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        found = pool.map(lambda one: list(converse(direct, through, *one)), every)
        return [pair for pairs in found for pair in pairs]


def misfit(pair):
    """The reason why an answer that a grammar binds is not what was asked for; None if it is, or is cut."""
    if pair.kind not in ("forced", "schema") or pair.want["finish"] == "length":
        return None
    texts = [pair.want["content"]] if pair.kind == "schema" else [arguments for _, arguments in pair.want["calls"]]
    return None if texts and all(map(is_object, texts)) else f"not bound: {pair.want}"


def row(name, pairs):
    called = [pair for pair in pairs if pair.want["calls"]]
    speculated = [pair for pair in pairs if pair.ours.get("path") == "speculated"]
    counts = (len(pairs), len(called), len(speculated), sum(bool(pair.want["calls"]) for pair in speculated),
              sum(bool(pair.want["reasoning"]) for pair in pairs), *(sum(pair.ours.get(key, 0) for pair in pairs) for key in
                                                                      ("drafted", "accepted")),
              sum(pair.want != pair.got for pair in pairs))
    return [name, *map(str, counts)]


def agree(direct, proxy, args):
    """Prints the table; the differences in words, and what keeps the run from being a proof."""
    pairs = agreement(direct, proxy.address, args)
    rows = [["", "requests", "with a call", "speculated", "and a call", "reasoning", "drafted", "accepted", "differ"]]
    for kind, form in dict.fromkeys((pair.kind, pair.form) for pair in pairs):
        rows.append(row(f"{kind}, {form}", [pair for pair in pairs if (pair.kind, pair.form) == (kind, form)]))
    figures.table([*rows, row("all", pairs)])
    print(f"ended: {ended(proxy)}", flush=True)
    for pair in pairs:
        if pair.want != pair.got:
            parts = {name: [pair.want[name], pair.got.get(name)] for name in pair.want if pair.want[name] != pair.got.get(name)}
            yield f"{pair.kind}, {pair.form}: {json.dumps(parts, ensure_ascii=False)}"
        if reason := misfit(pair):
            yield f"{pair.kind}, {pair.form}: {reason}"
    if args.counts.keys() - {"schema"} and not any(pair.want["calls"] and pair.ours.get("path") == "speculated" for pair in pairs):
        yield "no answer with a call was speculated on"


def ended(proxy):
    """Numbers of requests by path and reason, in words."""
    counts = collections.Counter()
    for labels, number in re.findall(r"^foretell_requests_total\{(.*?)\} (\S+)$", sides.page(f"127.0.0.1:{proxy.admin}", "/metrics"),
                                     re.MULTILINE):
        label = dict(re.findall(r'(\w+)="(.*?)"', labels))
        counts[f"{label['path']} ({label['reason']})" if label.get("reason") else label["path"]] += int(float(number))
    return ", ".join(f"{how} {count}" for how, count in sorted(counts.items()) if count)


# ------------------------------------------------------------------------------------------- draws

def views(parts):
    """The features of an answer that are compared."""
    said = parts["reasoning"] + parts["content"] + "".join(name + arguments for name, arguments in parts["calls"])
    return {"names": tuple(name for name, _ in parts["calls"]), **{at: said[at:at + 1] for at in PLACES}}


def drawn(address, body, count, choices=1):
    """(answers, drafted tokens) of `count` draws; a request asks for `choices` of them."""
    with concurrent.futures.ThreadPoolExecutor(max(1, CLIENTS // choices)) as pool:
        found = list(pool.map(lambda _: ask(address, {**body, "n": choices}), range(count // choices)))
    return [views(parts) for answers, _ in found for parts in answers], sum(ours.get("drafted", 0) for _, ours in found)


def homogeneity(one, other):
    """p of each feature."""
    return {name: stats.homogeneity(*(collections.Counter(map(lambda view: view[name], side)) for side in (one, other)))[0]
            for name in one[0]}


def distribution(direct, proxy, args):
    """Prints a line per prompt; the failed tests in words."""
    prompts = [(kind, *one) for kind, count in DRAWN.items() for one in conversations(kind, count)]
    tests, apart, drafts = [], [], 0
    for number, (kind, fields, turns) in enumerate(prompts):
        sampling = SAMPLING[number % len(SAMPLING)]
        body = request(fields, turns[0], "whole", **sampling, max_tokens=DRAWN_MOST)
        want, _ = drawn(direct, body, args.draws, CHOICES)
        got, drafted = drawn(proxy.address, body, args.draws)
        hotter, _ = drawn(direct, {**body, "temperature": 1.2}, args.draws, CHOICES)
        p, other = homogeneity(want, got), homogeneity(want, hotter)
        tests, apart, drafts = tests + list(p.values()), apart + list(other.values()), drafts + drafted
        print(f"{kind}, {json.dumps(sampling)}: {len(want)} and {len(got)} draws, {drafted} drafted; p "
              f"{min(p.values()):.2g} at least of {len(p)} (T=1.2: {min(other.values()):.1g})", flush=True)
    corrected = min(1.0, len(tests) * min(tests))
    print(f"p {corrected:.2g}, corrected for {len(tests)} tests; ended: {ended(proxy)}", flush=True)
    if corrected < LEAST_P:
        yield f"the distributions differ: p {corrected:.2g}"
    if min(apart) > TOLD_APART:
        yield "the test does not tell T=0.8 and T=1.2 apart: more draws are needed"
    if not drafts:
        yield "nothing was drafted"


# ----------------------------------------------------------------------------------------- running

def counts(text):
    found = {}
    for part in text.split(","):
        kind, _, number = part.partition("=")
        if kind not in KINDS or not number.isdigit():
            raise argparse.ArgumentTypeError(f"allowed KIND=N, of {', '.join(KINDS)}; got {part!r}")
        found[kind] = int(number)
    return found


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("vllm", "onnx"), default="vllm")
    parser.add_argument("--model", choices=tuple(COUNTS), default="fixture")
    parser.add_argument("--counts", type=counts, metavar="KIND=N,…")
    parser.add_argument("--form", choices=tuple(FORMS), default="both")
    parser.add_argument("--reasoning", action="store_true")
    parser.add_argument("--precise", action="store_true")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="concurrent conversations")
    parser.add_argument("--draws", type=int, metavar="N")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    args = parser.parse_args()
    args.counts = args.counts or counts(COUNTS[args.model])
    if args.reasoning and args.model != "fixture":
        parser.error("only the fixture has a template that opens a block of reasoning")
    if args.server == "onnx" and (args.reasoning or args.precise or args.model == "qwen"):
        parser.error("foretell target is in 32 bits, and has neither that template nor Qwen")
    if reason := servers.absent(args.server, args.model) or servers.lacks_bfcl():
        sys.exit(f"calls.py: {reason}")
    return args


def main():
    args = arguments()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        thinking = servers.THINKING if args.reasoning else ()
        hermes = servers.HERMES if args.server == "vllm" else ("--tool-parser", "hermes")
        server = stack.enter_context(servers.start(args.server, args.model, args.foretell, folder, args.precise,
                                                   (*hermes, *thinking)))
        parsers = "tools: hermes, reasoning: qwen3" if args.reasoning else "tools: hermes"
        backend = "    probe: { when: never }\n"
        if args.server == "vllm":
            backend += (f"    models: [{{ id: {servers.engines.NAME}, tokenizer: {servers.TOKENIZERS[args.model]}, "
                        f"parsers: {{ {parsers} }} }}]\n    verify: {{ allow: [fan_out, score] }}\n")
        direct = servers.address_of(server)
        proxy = sides.start_proxy(stack, args.foretell, direct, backend, {"forced": servers.FORCED}, "forced")
        print(f"{args.server}, {args.model}{', reasoning' if args.reasoning else ''}{', 32 bits' if args.precise else ''}", flush=True)
        wrong = list((distribution if args.draws else agree)(direct, proxy, args))
    for line in wrong:
        print(line)
    sys.exit(2 if wrong else 0)


if __name__ == "__main__":
    main()
