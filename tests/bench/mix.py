#!/usr/bin/env python3
"""The share of an estimated mix of traffic that is eligible, by Foretell's own report.

    mix.py [--count N] [--clients N] [--server vllm|onnx] [--foretell BIN]

The mix is an estimate for a fleet of one's own, with the agents of 2026 in mind (PARTS: shares in
percent). Its requests come from HumanEval, MT-bench and BFCL (`make real-models`); the model of `make
real-fixture`, which calls tools, answers them: behind vLLM with the parser `hermes`, and again with a
parser of reasoning for that part of the mix, or behind `foretell target`. Foretell knows the parsers, and
translates the Messages and the Responses API. As on a real server, requests of one application share
their tools: each part has APPS sets of them. Half of the requests set temperature 0, the others leave it
to the server; half are streamed.

Foretell counts as may: speculated on, or decoded plainly for a reason that passes (no gain, gates). Not:
passed through, or plain because a parser has not proved itself yet or a grammar binds the output.

Exits 2 if fewer than NEEDED of the output tokens are eligible: of all with `foretell target`, and with vLLM of
those that no grammar binds.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import sys
import tempfile

import bfcl
import calls
import figures
import real_prompts
import real_servers as servers
import sides

NEEDED = 0.9
APPS = 2
MOST = 48  # tokens of an answer; shares are of requests, and calls are shorter
# the shares that the reference estimates, in percent
PARTS = {"chat": 12, "reasoning": 13, "tools": 42, "messages": 12, "responses": 6, "forced": 3, "named": 3, "schema": 3,
         "logprobs": 1, "choices": 1, "echo": 4}
# asked for by the Messages API
VERSION = {"anthropic-version": "2023-06-01"}
# parts with tools, or with a schema
BOUND = ("tools", "forced", "named", "schema")
ROUTES = {"messages": "/v1/messages", "responses": "/v1/responses", "echo": "/v1/completions"}
POLICY = "version: 1\nname: mix\ndrafters: [{ kind: prompt_lookup }]\ngamma: { fixed: 4 }\nholdback: { start: 0, floor: 0 }\n"


def bound(kind, tools):
    """Fields of a request of a kind."""
    if kind == "schema":
        return bfcl.bound(kind, tools)
    function = {**tools[0]["function"], "strict": kind == "strict"}
    more = {"forced": {"tool_choice": "required"},
            "named": {"tool_choice": {"type": "function", "function": {"name": function["name"]}}}}
    return {"tools": [{**tools[0], "function": function}], **more.get(kind, {})}


def applications(part):
    """(tools, messages) of a part, without end. One application in three of `tools` is strict."""
    cases = real_prompts.spread(bfcl.cases(servers.BFCL, "single"), 400)
    kinds = itertools.cycle(("strict", None, None) if part == "tools" else (part,))
    apps = [bound(kind, case.tools) if kind in ("strict", *BOUND[1:]) else {"tools": case.tools}
            for kind, case in zip(kinds, real_prompts.spread(cases, APPS))]
    return ((apps[number % APPS], case.turns[0][0]) for number, case in enumerate(itertools.cycle(cases)))


def talks():
    """Messages without tools, without end."""
    every = real_prompts.load(servers.PROMPTS, "talk", 80) + real_prompts.load(servers.PROMPTS, "chat", 80)
    return itertools.cycle(entry["body"]["messages"] for entry in every)


def anthropic(tools, messages):
    tools = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
              "input_schema": tool["function"]["parameters"]} for tool in tools]
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [message for message in messages if message["role"] != "system"]
    return {"tools": tools, "messages": rest, "max_tokens": MOST, **({"system": system} if system else {})}


def responses(tools, messages):
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    return {"tools": tools, "input": messages, "max_output_tokens": MOST, "store": False}


def fields(part, app, messages):
    """The body of a request of a part, without its sampling."""
    if part in OTHER_FORMS:
        return OTHER_FORMS[part](app["tools"], messages)
    if part == "echo":
        return {"prompt": messages[-1]["content"], "echo": True, "max_tokens": MOST}
    more = app if part in BOUND else {"logprobs": {"logprobs": True}, "choices": {"n": 2}}.get(part, {})
    return {"messages": messages, "max_tokens": MOST, **more}


OTHER_FORMS = {"messages": anthropic, "responses": responses}


def requests(count):
    """`count` requests as (part, route, body), the parts in turn."""
    cases, plain = {part: applications(part) for part in PARTS}, talks()
    owed = collections.Counter()
    for number in range(count):
        owed.update(PARTS)
        part = owed.most_common(1)[0][0]
        owed[part] -= sum(PARTS.values())
        app, messages = next(cases[part])
        if part not in (*BOUND, *OTHER_FORMS):
            messages = next(plain)
        body = {"model": servers.engines.NAME, **fields(part, app, messages), "stream": number % 2 == 0}
        if number // 2 % 2 == 0 and part != "choices":
            body["temperature"] = 0
        yield part, ROUTES.get(part, "/v1/chat/completions"), body


def replay(args, thinks, asked):
    """The rows of Foretell's report after these requests."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        extra = servers.HERMES if args.server == "vllm" else ("--tool-parser", "hermes")
        if thinks:
            named = servers.THINKING
            extra = (*extra, *named)
        server = stack.enter_context(servers.start(args.server, "fixture", args.foretell, folder, False, extra))
        backend = "    probe: { when: never }\n    routes: { messages: translate, responses: translate }\n"
        if args.server == "vllm":
            parsers = "tools: hermes, reasoning: qwen3" if thinks else "tools: hermes"
            backend += (f"    models: [{{ id: {servers.engines.NAME}, tokenizer: {servers.TOKENIZERS['fixture']}, "
                        f"parsers: {{ {parsers} }} }}]\n    verify: {{ allow: [fan_out, score] }}\n")
        proxy = sides.start_proxy(stack, args.foretell, servers.address_of(server), backend, {"mix": POLICY}, "mix")
        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(lambda one: calls.post(proxy.address, *one[1:], **VERSION), asked))
        report = json.loads(sides.page(f"127.0.0.1:{proxy.admin}", "/api/coverage"))
    print(f"{len(asked)} requests{', reasoning' if thinks else ''}: {report['sentence']}", flush=True)
    return report


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1200, metavar="N")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--server", choices=("vllm", "onnx"), default="vllm")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    args = parser.parse_args()
    if reason := servers.absent(args.server, "fixture") or servers.lacks_bfcl():
        sys.exit(f"mix.py: {reason}")
    return args


def main():
    args = arguments()
    every = list(requests(args.count))
    thinking = [one for one in every if one[0] == "reasoning"]
    others = [one for one in every if one[0] != "reasoning"]
    # `foretell target` has no template that opens a block of reasoning for this model.
    parts = [(False, every)] if args.server == "onnx" else [(False, others), (True, thinking)]
    counts, rest = collections.Counter(), collections.Counter()
    for thinks, asked in parts:
        report = replay(args, thinks, asked)
        counts["all"] += report["tokens"]
        for one in report["rest"]:
            rest[one["reason"]] += one["tokens"]
    # These are the server's alone there.
    passthrough = rest["structured"] if args.server == "vllm" else 0
    may = 1 - (sum(rest.values()) - passthrough) / (counts["all"] - passthrough)
    figures.table([["output tokens", "eligible", *rest], [str(counts["all"]), f"{may:.3f}", *map(str, rest.values())]])
    sys.exit(0 if may >= NEEDED else 2)


if __name__ == "__main__":
    main()
