#!/usr/bin/env python3
"""Tool calls of a real model, direct and through Foretell: the parts of the answers must agree.

    calls.py [--model smollm2|qwen] [--count N] [--foretell BIN] [--precise] [--whole]

vLLM with `--tool-call-parser hermes` serves a model of `make real-models`, in 32 bits with
`--precise`; Foretell knows its parsers and speculates at every token, in drafts of 4. Half of the N
requests are questions of BFCL with their tools, as agents send them. The others ask to repeat a
call of these tools, after two examples, since such small models seldom make one in this form by
themselves. T=0, one client; the first three streams stay plain: the parser proves itself on them.
--whole: answers are not streamed.

Compared are joined content, names and arguments of calls, finish reason and usage. Exits 2 if one
differs, or if no answer with a call was speculated on.
"""

import argparse
import contextlib
import http.client
import json
import pathlib
import sys
import tempfile

import real_prompts
import real_servers as servers
import sides
import tools

MOST = 120  # tokens of an answer
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FORCED = "version: 1\nname: forced\ndrafters: [{ kind: prompt_lookup }]\ngamma: { fixed: 4 }\nholdback: { start: 0, floor: 0 }\n"
VARY = ("id", "created")  # members of a whole answer that differ by nature
VALUES = {"string": "Bern", "integer": 3, "number": 2.5, "boolean": True, "array": ["a", "b"], "object": {}}


def call_of(tool):
    """A call with a value for each required argument."""
    schema = tool["function"]["parameters"]
    names = schema.get("required") or list(schema["properties"])
    arguments = {name: VALUES.get(schema["properties"][name].get("type"), "x") for name in names}
    return f"<tool_call>\n{json.dumps({'name': tool['function']['name'], 'arguments': arguments})}\n</tool_call>"


def repeated(offered, calls):
    """Messages that ask to repeat lines, answered twice already, the last time with calls of the first tool."""
    lines = ["Good morning.", *("\n".join([call_of(tool)] * calls) for tool in (offered[-1], offered[0]))]
    for place, text in enumerate(lines):
        yield {"role": "user", "content": f"Repeat exactly these lines, and nothing else:\n\n{text}"}
        if place + 1 < len(lines):
            yield {"role": "assistant", "content": text}


def bodies(count, whole):
    """`count` requests: a question, a call to repeat, a question, …"""
    form = {} if whole else {"stream": True, "stream_options": {"include_usage": True}}
    for number, case in enumerate(real_prompts.spread(real_prompts.lines(servers.PROMPTS / "bfcl.jsonl"), count)):
        offered = [{"type": "function", "function": {**tools.standard(tool), "name": tool["name"].replace(".", "_")}}
                   for tool in case["function"]]
        messages = case["question"][0]
        if number % 2 == 0:
            messages = list(repeated(offered, 1 + number % 4 // 2))
        yield {"model": servers.engines.NAME, "messages": messages, "tools": offered, "temperature": 0, "max_tokens": MOST,
               **form}


def ask(address, body):
    """(parts, usage.foretell) of an answer."""
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise sides.Wrong(f"{answer.status}: {answer.read().decode()[:200]}")
    if not body.get("stream"):
        whole = json.loads(answer.read())
        usage, [choice] = whole["usage"], whole["choices"]
        for name in VARY:
            whole.pop(name)
        for call in choice["message"].get("tool_calls") or []:
            call["id"] = call["id"].rsplit("-", 1)[0]
        ours = usage.pop("foretell", {})
        usage.pop("prompt_tokens_details", None)
        return {**whole, "calls": choice["message"].get("tool_calls")}, ours
    parts, usage = {"content": "", "reasoning": "", "calls": []}, {}
    for line in answer.read().decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                parts[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    parts["calls"].append([call["function"]["name"], ""])
                parts["calls"][call["index"]][1] += call["function"].get("arguments") or ""
            parts["finish"] = choice.get("finish_reason") or parts.get("finish")
    connection.close()
    ours = usage.pop("foretell", {})
    usage.pop("prompt_tokens_details", None)
    return {**parts, "usage": usage}, ours


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("smollm2", "qwen"), default="smollm2")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--foretell", default="target/dist/foretell")
    parser.add_argument("--precise", action="store_true")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    if reason := servers.absent("vllm", args.model):
        sys.exit(f"calls.py: {reason}")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(servers.start("vllm", args.model, args.foretell, folder, args.precise, FLAGS))
        address = servers.address_of(server)
        tokenizer = servers.TOKENIZERS[args.model]
        backend = (f"    models: [{{ id: {servers.engines.NAME}, tokenizer: {tokenizer}, parsers: {{ tools: hermes }} }}]\n"
                   "    verify: { allow: [fan_out, score] }\n    probe: { when: never }\n")
        proxy = sides.start_proxy(stack, args.foretell, address, backend, {"forced": FORCED}, "forced")
        counts = {"requests": 0, "with a call": 0, "speculated": 0, "speculated with a call": 0, "drafted": 0, "accepted": 0}
        different = []
        for body in bodies(args.count, args.whole):
            (want, _), (got, ours) = ask(address, body), ask(proxy.address, body)
            spoken = ours.get("path") == "speculated"
            counts["requests"] += 1
            counts["with a call"] += bool(want["calls"])
            counts["speculated"] += spoken
            counts["speculated with a call"] += spoken and bool(want["calls"])
            counts["drafted"] += ours.get("drafted", 0)
            counts["accepted"] += ours.get("accepted", 0)
            if want != got:
                different.append({name: [want[name], got.get(name)] for name in want if want[name] != got.get(name)})
        print(f"vllm, {args.model}{', whole' if args.whole else ''}: " + ", ".join(f"{count} {name}" for name, count in counts.items())
              + f"; {len(different)} differ")
        for one in different[:5]:
            print(json.dumps(one, ensure_ascii=False))
        sys.exit(2 if different or not counts["speculated with a call"] else 0)


if __name__ == "__main__":
    main()
