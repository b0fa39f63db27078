#!/usr/bin/env python3
"""Strange JSON to the completion routes: passed on or refused, soon, with little memory.

    bodies.py [--foretell BIN]

Deep nesting, a million keys, repeated keys, numbers beyond a double, lone surrogates, NaN, cut
bodies, in sizes up to the 8 MiB that are read. The backend answers with the SHA-256 of the body
that it got. Bounds: an answer of 4xx or the same bytes; at most 50 ms more than direct for bodies
below 1 MiB (medians of several); a peak of memory of at most three times the body and 8 MiB.
"""

import asyncio
import contextlib
import hashlib
import pathlib
import statistics
import time

import kit

TIMES = 5


def bodies():
    """Names and bodies; in most the strange part is in a field that the proxy has to skip."""
    def completion(strange):
        return b'{"model": "toy", "prompt": "a", "max_tokens": 4, ' + strange + b"}"

    yield "nested lists, 10,000 deep", completion(b'"user": ' + b"[" * 10_000 + b"]" * 10_000)
    yield "nested objects, 10,000 deep", completion(b'"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000)
    yield "nested lists, 100,000 deep", completion(b'"user": ' + b"[" * 100_000 + b"]" * 100_000)
    yield "lists that never end, 500,000 deep", b"[" * 500_000
    yield "10,000 keys", completion(b", ".join(b'"k%d": 1' % n for n in range(10_000)))
    yield "1,000,000 keys below metadata", completion(b'"metadata": {' + b",".join(b'"%x":0' % n for n in range(1_000_000)) + b"}")
    yield "a key 10,000 times", completion(b", ".join(b'"max_tokens": %d' % n for n in range(10_000)))
    yield "model twice", completion(b'"model": "n"')
    yield "64-bit numbers", completion(b'"seed": 18446744073709551615, "user": 9223372036854775808')
    yield "a number of 100,000 digits", completion(b'"seed": ' + b"9" * 100_000)
    yield "1e400", completion(b'"temperature": 1e400')
    yield "a number with 100,000 places", completion(b'"temperature": 0.' + b"3" * 100_000)
    yield "-0", completion(b'"temperature": -0, "seed": -0')
    yield "lone surrogates", completion(b'"user": "\\ud800 \\udc00\\ud800"')
    yield "NaN", completion(b'"temperature": NaN')
    yield "Infinity", completion(b'"temperature": -Infinity')
    yield "no UTF-8", completion(b'"user": "\xff\xfe\xc3\x28"')
    yield "a NUL in a text", completion(b'"user": "a\\u0000b"')
    yield "a NUL as it is", completion(b'"user": "a\x00b"')
    yield "a byte order mark", b"\xef\xbb\xbf" + completion(b'"user": "a"')
    yield "a comma too many", completion(b'"user": "a",')
    yield "something behind it", completion(b'"user": "a"') + b" {}"
    yield "cut in a text", completion(b'"user": "a"')[:-6]
    yield "nothing", b""
    yield "a text of 900 KB of escapes", completion(b'"user": "' + b"\\u0041" * 150_000 + b'"')
    yield "a prompt of 900 KB", completion(b'"suffix": "' + b"x" * 900_000 + b'"')
    yield "100,000 prompts", b'{"model": "nobody", "prompt": [' + b",".join([b'"a"'] * 100_000) + b"]}"
    yield "150,000 ids", b'{"model": "toy", "prompt": [' + b",".join([b"12345"] * 150_000) + b"]}"
    yield "10,000 messages", b'{"model": "toy", "messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 10_000) + b"]}"
    yield "7.9 MiB of spaces", completion(b'"user": "a"') + b" " * (79 * kit.MIB // 10)
    yield "7.5 MiB of numbers below metadata", completion(b'"metadata": [' + b",".join([b"0"] * (75 * kit.MIB // 20)) + b"]")


async def serve(reader, writer):
    while (lines := await kit.read_head(reader)) is not None:
        body, _ = await kit.read_body(reader, kit.fields_of(lines))
        digest = hashlib.sha256(body).hexdigest().encode()
        status = b"200 OK" if b"POST" in lines[0] else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 64\r\n\r\n%s" % (status, digest))
        await writer.drain()


async def asked(address, path, body):
    """Status, body, and milliseconds, over a connection that was used before."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        await kit.ask(reader, writer, kit.post("/v1/files", b"{}"))
        begun = time.perf_counter()
        status, _, answer, whole = await kit.ask(reader, writer, kit.post(path, body))
        return (status, answer, (time.perf_counter() - begun) * 1e3) if whole else (0, b"", 0.0)
    except (OSError, EOFError):
        return 0, b"", 0.0
    finally:
        writer.close()


def times(address, path, body):
    """Statuses, bodies and the median time of several requests."""
    found = [asyncio.run(asked(address, path, body)) for _ in range(TIMES if len(body) < kit.MIB else 1)]
    return {status for status, _, _ in found}, {answer for _, answer, _ in found}, statistics.median(ms for *_, ms in found)


def address_of(text):
    host, _, port = text.partition(":")
    return host, int(port)


def strange(args, numbers):
    with contextlib.ExitStack() as stack:
        # In front of a server that speculation does not support, bytes pass through; with an engine that is
        # speculated with a body is judged, and may be rewritten.
        backend, engine = stack.enter_context(kit.backend(serve)), kit.fake_engine(stack, "vllm")
        passthrough = kit.Proxy(stack, args.foretell, kit.before(backend))
        judge = kit.Proxy(stack, args.foretell, kit.toy(engine), "limits: { speculate_body: 16MiB }")
        judge.recognised("vllm")
        for _ in range(3):
            asyncio.run(asked(judge.address, "/v1/completions", b"{}" + b" " * 8_000_000))
        changed, failed, slowest, most = [], [], (0.0, ""), (0.0, "")
        for name, body in bodies():
            path = "/v1/chat/completions" if b"messages" in body[:40] else "/v1/completions"
            _, answer, _ = times(passthrough.address, path, body)
            if answer != {hashlib.sha256(body).hexdigest().encode()}:
                changed.append(name)
            alone, _, direct = times(address_of(engine), path, body)
            pathlib.Path(f"/proc/{judge.pid}/clear_refs").write_text("5")
            before = judge.resident()
            status, _, through = times(judge.address, path, body)
            rose = kit.status(judge.pid, "VmHWM") - before
            over = max(rose - 8 * kit.MIB, 0) / max(len(body), 1)
            most = max(most, (over, name))
            if len(body) < kit.MIB:
                slowest = max(slowest, (through - direct, name))
            print(f"  {name}: {len(body):,} bytes, engine alone {sorted(alone)} in {direct:.1f} ms, through {sorted(status)} in {through:.1f} ms, {rose / kit.MIB:.1f} MiB")
            # An engine may refuse; anything but 4xx has to be its own status.
            if not all(one == 200 or 400 <= one < 500 or one in alone for one in status):
                failed.append(f"{name}: HTTP {sorted(status)}")
        judge.page("/healthz")
    for line in changed + failed:
        print("  wrong: " + line)
    numbers.at_most(20, "bodies that were changed on their way to a server that only gets passthrough requests", len(changed), 0)
    numbers.at_most(20, "answers that were neither 200, 4xx nor the engine's own", len(failed), 0)
    numbers.at_most(20, f"the longest time that Foretell adds, bodies below 1 MiB ({slowest[1]})", slowest[0], 50.0, "ms")
    numbers.at_most(20, f"maximum memory above 8 MiB, in sizes of the body ({most[1]})", most[0], 3.0)


if __name__ == "__main__":
    kit.main(strange, __doc__)
