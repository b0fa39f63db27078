"""A drafts service in Python, the reference of deploy/plugins/protocol.md: drafts_service.py SOCKET

It ends on the first frame that the page does not allow, and drafts what followed the longest match of a row's last
tokens in the row's own text. At the end of a connection it prints what it has counted.
"""

import array
import json
import os
import socket
import struct
import sys

VERSION = 1
HELLO, ROW, TEXT, STEP, GONE = 1, 2, 3, 4, 5
WELCOME, REFUSED, DRAFTS = 128, 129, 130
FRAME_BYTES, NAME_BYTES, STEP_TOKENS, TEXT_TOKENS, ROWS = 8 << 20, 4096, 4096, 65536, 4096


class Broken(Exception):
    """What the plug-in did against the protocol."""


def demand(holds, words):
    if not holds:
        raise Broken(words)


class Body:
    """The bytes of one frame after its kind."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        demand(self.at + struct.calcsize("<" + form) <= len(self.data), "a frame is too short")
        self.at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, self.data, self.at - struct.calcsize("<" + form))

    def text(self):
        size, = self.take("H")
        demand(size <= NAME_BYTES, "a text is too long")
        return self.take(f"{size}s")[0].decode()

    def tokens(self, count):
        tokens = self.take(f"{count}i")
        demand(not count or min(tokens) >= 0, "a token id is below 0")
        return tokens


class Engine:
    """One connection: what it has sent, and the answers to it."""

    def __init__(self, draft):
        self.draft = draft
        self.hello, self.rows = None, {}
        self.last_row = self.sequence = 0
        self.counts = dict.fromkeys("steps rows tokens drafted verified accepted skipped late waited".split(), 0)

    def frame(self, kind, data):
        """Takes one frame, and returns the bytes of the answer."""
        demand((kind == HELLO) == (self.hello is None), "hello comes first, and once")
        takes = {HELLO: self.on_hello, ROW: self.on_row, TEXT: self.on_text, STEP: self.on_step, GONE: self.on_gone}
        demand(kind in takes, f"a frame of kind {kind}")
        body = Body(data)
        answer = takes[kind](body)
        demand(body.at == len(data), "a frame is too long")
        return answer or b""

    def on_hello(self, body):
        magic, version, *numbers = body.take("8sHHIIH")
        demand(magic == b"foretell" and version == VERSION, "another protocol")
        self.hello = dict(zip(("most", "vocabulary", "context", "rows"), numbers))
        self.hello.update({name: body.text() for name in ("engine", "engine_version", "model")})
        return frame(WELCOME, struct.pack("<H", VERSION))

    def on_row(self, body):
        number, prompt, temperature = body.take("IIf")
        demand(number == self.last_row + 1, f"row {number} follows row {self.last_row}")
        self.last_row = self.counts["rows"] = number
        self.rows[number] = {"id": body.text(), "prompt": prompt, "temperature": temperature, "text": [], "draft": []}
        demand(len(self.rows) <= ROWS, "too many rows")

    def on_text(self, body):
        number, start, count = body.take("III")
        demand(0 < count <= TEXT_TOKENS, f"text of {count} tokens")
        self.extend(number, start + count, body.tokens(count))

    def on_gone(self, body):
        for number in body.take(f"{body.take('H')[0]}I"):
            demand(self.rows.pop(number, None), f"row {number} ends, and does not exist")

    def on_step(self, body):
        sequence, elapsed, waited, late, skipped, flags, count = body.take("QIIIHBH")
        demand(sequence == self.sequence + 1, f"step {sequence} follows step {self.sequence}")
        demand(late >= self.counts["late"] and flags in (0, 1) and 0 < count <= self.hello["rows"], "the head of a step")
        self.sequence = sequence
        self.step = {"elapsed": elapsed, "waited": waited, "skipped": skipped, "flags": flags, "rows": {}}
        drafts = [self.on_step_row(body, skipped) for _ in range(count)]
        demand(len(self.step["rows"]) == count, "a row is listed twice")
        counts = self.counts
        counts.update(steps=sequence, late=late, skipped=counts["skipped"] + skipped, waited=counts["waited"] + waited)
        return answer(sequence, 0, [(number, tokens) for number, tokens in drafts if tokens])

    def on_step_row(self, body, skipped):
        number, scheduled, sampled, room, length, count = body.take("IHHHIH")
        demand(count <= STEP_TOKENS and room <= self.hello["most"], f"count or room of row {number}")
        demand(room == 0 or sampled, f"row {number} reads its prompt and has room")
        self.extend(number, length, body.tokens(count))
        self.step["rows"][number] = {"scheduled": scheduled, "sampled": sampled, "room": room, "length": length}
        row, accepted = self.rows[number], max(0, sampled - 1)
        if not skipped:
            demand(accepted <= scheduled <= len(row["draft"]), f"row {number} was not drafted so much")
            demand(row["text"][length - sampled:][:accepted] == row["draft"][:accepted], f"row {number}: other tokens")
        row["draft"] = list(self.draft(row, room))
        for name, more in (("verified", scheduled), ("accepted", accepted), ("drafted", len(row["draft"]))):
            self.counts[name] += more
        return number, row["draft"]

    def extend(self, number, length, tokens):
        demand(number in self.rows, f"row {number} does not exist")
        text = self.rows[number]["text"]
        demand(len(text) + len(tokens) == length <= self.hello["context"], f"row {number} has a gap, or is too long")
        text.extend(tokens)
        self.counts["tokens"] += len(tokens)


def continuation(row, room):
    """What followed the latest occurrence of the row's longest suffix."""
    data = array.array("i", row["text"]).tobytes()
    for length in (16, 8, 4, 2):
        suffix, at = data[-4 * length:], len(data) - 4 * length
        while (at := data.rfind(suffix, 0, max(0, at + len(suffix) - 1))) > 0 and at % 4:
            pass
        if at >= 0:
            return row["text"][at // 4 + length:][:min(room, 2 * length)]
    return []


def frame(kind, body):
    return struct.pack("<IB", 1 + len(body), kind) + body


def answer(sequence, pause, drafts):
    rows = [struct.pack(f"<IBB{len(tokens)}i", number, 0, len(tokens), *tokens) for number, tokens in drafts]
    return frame(DRAFTS, struct.pack("<QHH", sequence, pause, len(rows)) + b"".join(rows))


def serve(connection, engine):
    """Answers one connection until it ends."""
    with connection, connection.makefile("rb") as stream:
        while len(head := stream.read(4)) == 4:
            length = int.from_bytes(head, "little")
            demand(1 <= length <= FRAME_BYTES, f"a frame of {length} bytes")
            data = stream.read(length)
            if len(data) == length:
                connection.sendall(engine.frame(data[0], data[1:]))


if __name__ == "__main__":
    path = sys.argv[1]
    if os.path.exists(path):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            engine = Engine(continuation)
            serve(listener.accept()[0], engine)
            print(json.dumps({"hello": engine.hello, **engine.counts}), flush=True)
