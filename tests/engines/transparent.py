#!/usr/bin/env python3
"""Compares answers of a real engine direct and through Foretell, in every mode.

    transparent.py llama|vllm [--modes off,observe,shadow,plain,auto,forced] [--foretell BIN] [--json FILE]

vLLM runs with its parsers of reasoning (qwen3) and of tool calls (hermes). An answer that is not
speculated on has the same bytes but for ids and times; a speculated answer has the same joined
texts, calls, usage, members and kinds of events. The official client reads every chat too and must
see the same. Exits 2 if something differs.

vLLM joins the tokens of several steps into one event when it is late, so that two direct answers
may be cut differently. Each side is therefore asked until both have given the same answer once,
TURNS times at most.
"""

import argparse
import http.client
import itertools
import json
import pathlib
import re
import sys
import urllib.parse

import engine as engines
import exact
import record

TURNS = 40
OFF, OBSERVE = "mode: off\n", "mode: observe\n"
PLAIN = exact.FORCED.replace("gamma: { fixed: 4 }", "gamma: { max: 4 }")
# name: lines of the config file, policy, header fields
MODES = {
    "off": (OFF, exact.FORCED, {}),
    "observe": (OBSERVE, exact.FORCED, {}),
    "shadow": ("", exact.FORCED.replace("mode: auto", "mode: shadow"), {}),
    "plain": ("", exact.FORCED.replace("mode: auto", "mode: plain"), {}),
    "header": ("", exact.FORCED, {"x-foretell": "plain"}),
    # the control group: plain, but sent as an eligible request
    "auto": ("", PLAIN.replace("{ start: 0, floor: 0 }", "{ start: 1, floor: 1 }"), {}),
    "forced": ("", exact.FORCED, {}),
}
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
OWN = {"id", "created", "foretell", "timings"}
RUN = re.compile(r'"(?:id|created|\w+_ms|\w+_per_second)": ?("[^"]*"|[\d.e+-]+)')
JOINED = {"text", "content", "reasoning", "reasoning_content", "arguments"}


def cases(kind):
    """(name, route, body), by the engine's abilities."""
    text = {**record.GREEDY, "prompt": record.CODE, "max_tokens": 32}
    chat = {**record.GREEDY, "messages": record.CHAT, "max_tokens": 32}
    tools = {"tools": [{"type": "function", "function": record.TOOL}]}
    both = {"plain": {}, "stop": {"stop": ["\n"]}, "end": {"logit_bias": {"0": 100}}, "error": {"temperature": "hot"}}
    chats = {"logprobs": {"logprobs": True, "top_logprobs": 2}, "tools": tools}
    if kind == "vllm":
        thought = {"structured_outputs": {"regex": record.THOUGHT}, "max_tokens": 90}
        call = {"structured_outputs": {"regex": f"I look[.]\\n</think>\\n\\n{record.CALL}"}, "max_tokens": 90}
        chats |= {"ids": {"return_token_ids": True}, "thought": thought, "call": {**tools, **call},
                  "answers": {"chat_template_kwargs": {"enable_thinking": False}}}
        both["priority"] = {"priority": 0}
    for name, more in both.items():
        yield name, "completions", {**text, **more}
    for name, more in (both | chats | {"json": {"response_format": {"type": "json_object"}}}).items():
        yield name, "chat/completions", {**chat, **more}


def ways(body):
    """The same request whole, streamed, and streamed with usage in both of its forms."""
    yield "whole", body
    yield "streamed", {**body, "stream": True}
    for name, more in (("usage", {}), ("continuous", {"continuous_usage_stats": True})):
        yield name, {**body, "stream": True, "stream_options": {"include_usage": True, **more}}


class Answer:
    """Status, end-to-end fields and bytes of one answer, and its path."""

    def __init__(self, url, route, body, fields):
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=300)
        connection.request("POST", f"/v1/{route}", json.dumps(body, indent=1).encode(),
                           {"content-type": "application/json", "accept-encoding": "gzip", **fields})
        answer = connection.getresponse()
        self.status, self.bytes, self.stream = answer.status, answer.read().decode(), bool(body.get("stream"))
        connection.close()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        ours = {name for name in headers if name.startswith("x-foretell")} | {"date", "content-length", "x-request-id"}
        self.fields = {name: value for name, value in headers.items() if name not in HOP_BY_HOP | ours}
        self.path = headers.get("x-foretell-path", "")
        if '"foretell"' in self.bytes:
            self.path = re.search(r'"foretell":\s*{"path":\s*"(\w+)"', self.bytes)[1]

    def masked(self):
        return RUN.sub("", self.bytes)

    def events(self):
        if self.status != 200 or not self.stream:
            return [cut(json.loads(self.bytes))]
        parts = [part.removeprefix("data: ") for part in self.bytes.split("\n\n") if part]
        return [part if part == "[DONE]" else cut(json.loads(part)) for part in parts]

    def sum(self):
        """The sum of a stream's events, and their kinds in order."""
        events = self.events()
        total = {}
        for event in events:
            if isinstance(event, dict):
                add(total, event)
        kinds = [kind for kind, _ in itertools.groupby(map(kind_of, events))]
        shapes = sorted({f"{kind_of(event)} {shape(event)}" for event in events})
        return json.dumps([total, kinds, shapes], sort_keys=True)


def cut(value):
    if isinstance(value, dict):
        return {name: cut(inner) for name, inner in value.items() if name not in OWN}
    return [cut(inner) for inner in value] if isinstance(value, list) else value


def kind_of(event):
    if not isinstance(event, dict) or "choices" not in event:
        return str(event)[:9]
    if not event["choices"]:
        return "usage"
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    if choice.get("finish_reason"):
        return "finish"
    kinds = [name for name in ("tool_calls", "reasoning", "reasoning_content", "role") if delta.get(name) is not None]
    return kinds[0] if kinds else "content" if delta or "text" in choice else "nothing"


def shape(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{shape(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + (shape(value[0]) if value else "") + "]"
    return type(value).__name__.replace("float", "int")


def add(total, value):
    for name, inner in value.items():
        known = total.get(name)
        if isinstance(inner, dict) and isinstance(known, dict):
            add(known, inner)
        elif name in ("choices", "tool_calls") and known:
            for one in inner or ():
                at = next((i for i, other in enumerate(known) if other["index"] == one["index"]), None)
                known.append(one) if at is None else add(known[at], one)
        elif isinstance(inner, list) and isinstance(known, list):
            total[name] = known + inner
        elif name in JOINED and isinstance(known, str) and isinstance(inner, str):
            total[name] = known + inner
        elif inner is not None or name not in total:
            total[name] = json.loads(json.dumps(inner))


def first_difference(one, other):
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return f"at {at}: want …{one[max(0, at - 60):at + 120]!r}, got …{other[max(0, at - 60):at + 120]!r}"


def compared(direct, through, route, body, fields, forced):
    """(difference or "", path) of one request; both sides are asked until they have agreed once.

    The head of a stream without usage does not say if it was speculated on; with `forced` it may
    have been."""
    wanted, seen, difference, path = {}, set(), "", ""
    for _ in range(TURNS):
        want, got = Answer(direct, route, body, {}), Answer(through, route, body, fields)
        path = got.path
        if (want.status, want.fields) != (got.status, got.fields):
            return f"status or fields: want {want.status} {want.fields}, got {got.status} {got.fields}", path
        summed = path == "speculated" or forced and path == "eligible"
        one, other = (want.sum(), got.sum()) if summed else (want.masked(), got.masked())
        wanted[one], _ = want, seen.add(other)
        if seen & wanted.keys():
            return "", path
        difference = first_difference(one, other)
    return difference, path


def by_client(url, body, fields):
    """A streamed chat as the official client reads it: chunks, reasoning, content, calls, usage."""
    import openai
    known = {"model", "messages", "temperature", "max_tokens", "stop", "tools", "logit_bias", "logprobs", "top_logprobs",
             "response_format"}
    more = {name: value for name, value in body.items() if name not in known}
    own = {name: value for name, value in body.items() if name in known}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, default_headers=fields) as client:
        chunks = list(client.chat.completions.create(**own, stream=True, stream_options={"include_usage": True},
                                                     extra_body=more))
    total = {}
    for chunk in chunks:
        add(total, cut(chunk.model_dump(exclude_unset=True)))
    return len(chunks), json.dumps(total, sort_keys=True)


def client_compared(direct, through, body, fields, same_count):
    """As `compared`, by the official client; without speculation the number of chunks is equal
    too."""
    wanted, seen, difference = set(), set(), ""
    for _ in range(TURNS):
        want, got = by_client(direct, body, {}), by_client(through, body, fields)
        wanted.add(want if same_count else want[1])
        seen.add(got if same_count else got[1])
        if wanted & seen:
            return ""
        difference = f"{want[0]} chunks direct, {got[0]} through; {first_difference(want[1], got[1])}"
    return difference


class Sidecar:
    """Foretell in front of a running engine, in one mode."""

    def __init__(self, kind, url, mode, foretell, out):
        process, policy, self.fields = MODES[mode]
        folder = out.resolve() / f"transparent-{mode}"
        (folder / "policies").mkdir(parents=True, exist_ok=True)
        (folder / "policies/forced.yaml").write_text(policy)
        front, admin = engines.free_port(), engines.free_port()
        self.through = f"http://127.0.0.1:{front}"
        text = exact.CONFIG.format(port=front, admin=admin, engine={"llama": "llamacpp"}.get(kind, kind), url=url,
                                   root=engines.ROOT, policies=folder / "policies", models=exact.MODELS.format(root=engines.ROOT),
                                   verify=exact.VERIFY.get(kind, ""))
        config = folder / "foretell.yaml"
        config.write_text(text + process)
        self.server = engines.Server([foretell, "serve", "--config", config], None, f"http://127.0.0.1:{admin}",
                                     folder / "foretell.log", "/readyz", 60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()


def mode_compared(kind, direct, mode, foretell, out):
    """{cells, speculated, different: {cell: what}} of one mode."""
    result = {"cells": 0, "speculated": 0, "different": {}}

    def note(cell, difference):
        result["cells"] += 1
        if difference:
            result["different"][cell] = difference
            print(f"  {kind} {mode} {cell}: {difference}", file=sys.stderr, flush=True)

    with Sidecar(kind, direct, mode, foretell, out) as sidecar:
        for name, route, body in cases(kind):
            for way, asked in ways(body):
                difference, path = compared(direct, sidecar.through, route, asked, sidecar.fields, mode == "forced")
                result["speculated"] += path == "speculated"
                note(f"{name}/{route}/{way}", difference)
            if route == "chat/completions" and name not in ("error", "continuous"):
                difference = client_compared(direct, sidecar.through, body, sidecar.fields, mode != "forced")
                note(f"{name}/openai client", difference)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=engines.ENGINES)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/release/foretell"))
    parser.add_argument("--direct", help="an engine that runs already")
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    parser.add_argument("--json")
    args = parser.parse_args()
    sys.path.append(str(engines.CACHE / "python"))
    out = pathlib.Path(args.out)
    server = None
    if not args.direct:
        variant = "parsers" if args.kind == "vllm" else "plain"
        server = engines.start(args.kind, variant, engines.free_port(), out / f"transparent-{args.kind}.log")
    results = {}
    try:
        for mode in args.modes.split(","):
            result = mode_compared(args.kind, args.direct or server.url, mode, args.foretell, out)
            result["ok"] = not result["different"] and (mode != "forced" or result["speculated"] > 0)
            results[mode] = result
            print(f"{args.kind:6} {mode:8} {'ok' if result['ok'] else 'FAILED':8} {result['cells']} cells, "
                  f"{result['speculated']} speculated on, {len(result['different'])} differ", flush=True)
    finally:
        if server:
            server.stop()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 2)


if __name__ == "__main__":
    main()
