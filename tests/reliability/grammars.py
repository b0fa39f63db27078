#!/usr/bin/env python3
"""Other connections next to grammars that end, hang or fill a process that compiles them.

    grammars.py [--foretell BIN] [--rounds N]

Four clients send such grammars, regular expressions and schemas through the proxy to `foretell
target`, which shares the cores; another client asks another backend for a chat every 10 ms. Bounds:
no hostile request ends a process, and 99 % of the other client's answers come within 50 ms.
"""

import asyncio
import contextlib
import json
import subprocess
import time

import kit


def bodies():
    """Requests that bind the output: stacked, nested, wide, deep and beyond what a number holds."""
    def schema(of):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": of}}}

    def regex(text):
        return {"structured_outputs": {"regex": text}}

    integers = {f"p{n}": {"type": "integer"} for n in range(600)}
    deep = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "minProperties": 300, "properties": integers}}}
    for more in (regex("a" + "*" * 4_000), regex("a" + "{0,1}" * 2_000), regex("((a{0,50}b?){0,50}c?){0,50}"), regex("(.{0,200}){0,200}"),
                 regex("a?" * 10_000), regex("(x+x+)+y" * 200), schema({"type": "string", "pattern": "((a{0,50}b?){0,50}c?){0,50}"}),
                 schema({"type": "object", "minProperties": 300, "properties": integers}), schema({"type": "integer", "minimum": -2**63}),
                 schema({"type": "object", "patternProperties": {f"^p{n}[a-z]{{1,9}}": {"type": "integer"} for n in range(300)}}),
                 schema(deep), {"structured_outputs": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}},
                 {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}):
        yield json.dumps({"model": "toy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 16, "temperature": 0, **more}).encode()


async def sink(reader, writer):
    while (lines := await kit.read_head(reader)) is not None:
        await kit.read_body(reader, kit.fields_of(lines))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()


async def hostile(address, rounds):
    statuses = []
    for _ in range(rounds):
        for body in bodies():
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                statuses.append((await kit.ask(reader, writer, kit.post("/v1/chat/completions", body)))[0])
    return statuses


async def canary(address, over):
    """Milliseconds of each answer of another backend."""
    reader, writer = await asyncio.open_connection(*address)
    request, took = kit.post("/v1/chat/completions", b'{"model": "sink", "messages": [{"role": "user", "content": "a"}]}'), []
    while not over.is_set():
        begun = time.perf_counter()
        status, *_ = await kit.ask(reader, writer, request)
        took.append((time.perf_counter() - begun) * 1e3)
        if status != 200:
            raise kit.Wrong(f"the other backend's answer has status {status}")
        await asyncio.sleep(0.01)
    writer.close()
    return took


async def together(address, rounds):
    over = asyncio.Event()
    other = asyncio.create_task(canary(address, over))
    begun = asyncio.get_running_loop().time()
    statuses = [status for part in await asyncio.gather(*(hostile(address, rounds) for _ in range(4))) for status in part]
    lasted = asyncio.get_running_loop().time() - begun
    over.set()
    return await other, statuses, lasted


def run(args, numbers):
    with contextlib.ExitStack() as stack:
        port = kit.free_port()
        target = kit.started(stack, [args.foretell, "target", "--model", kit.ROOT / "onnx/models/target", "--name", "toy",
                                     "--listen", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = stack.enter_context(kit.backend(sink))
        backends = f'backends:\n  - {{ name: t, replicas: ["http://127.0.0.1:{port}"], models: [{{ id: toy }}] }}\n' \
                   f'  - {{ name: s, replicas: ["http://{address}"], models: [{{ id: sink }}], probe: {{ when: never }} }}'
        proxy = kit.Proxy(stack, args.foretell, backends)
        proxy.recognised("onnx")
        took, statuses, lasted = asyncio.run(together(proxy.address, args.rounds))
        numbers.note(36, "hostile requests", len(statuses))
        numbers.note(36, "their time", lasted, "s")
        numbers.at_least(36, "of them, answered or refused", sum(status in (200, 400, 503) for status in statuses), len(statuses))
        numbers.at_most(36, "processes that ended", (target.poll() is not None) + (proxy.process.poll() is not None), 0)
        numbers.note(36, "other answers, p50", kit.quantile(took, 0.5), "ms")
        numbers.at_most(36, "other answers, p99", kit.quantile(took, 0.99), 50.0, "ms")


if __name__ == "__main__":
    kit.main(run, __doc__, ("rounds", 10, "times that each client sends every grammar"))
