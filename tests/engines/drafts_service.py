"""A drafts service in Python, the reference of deploy/plugins/protocol.md: drafts_service.py SOCKET

It ends on the first frame that the page does not allow, and drafts what followed the longest match of a row's last
tokens in the row's own text. At the end of a connection it prints what it has counted.
"""

import array
import collections
import os
import socket
import struct
import sys

HELLO, ROW, TEXT, STEP, GONE = 1, 2, 3, 4, 5
WELCOME, REFUSED, DRAFTS = 128, 129, 130
VERSION, FRAME_BYTES, NAME_BYTES, STEP_TOKENS, TEXT_TOKENS, ROWS = 1, 8 << 20, 4096, 4096, 65536, 4096


class Broken(Exception):
    """What the plug-in did against the protocol."""


def demand(holds, words):
    if not holds:
        raise Broken(words)


class Body:
    """What is left of a frame's bytes."""

    def __init__(self, data):
        self.data = data

    def take(self, form):
        size = struct.calcsize("<" + form)
        demand(size <= len(self.data), "a frame is too short")
        taken, self.data = struct.unpack("<" + form, self.data[:size]), self.data[size:]
        return taken

    def text(self):
        size, = self.take("H")
        demand(size <= NAME_BYTES, "a text is too long")
        return self.take(f"{size}s")[0].decode()


class Engine:
    """One connection: what it has sent, and the answers to it."""

    def __init__(self, draft):
        self.draft = draft
        self.hello, self.rows = None, {}
        self.last_row = self.sequence = 0
        self.counts = collections.Counter()

    def frame(self, kind, data):
        """Takes one frame, and returns the bytes of the answer."""
        demand((kind == HELLO) == (self.hello is None), "hello comes first, and once")
        demand(HELLO <= kind <= GONE, f"a frame of kind {kind}")
        take = (self.on_hello, self.on_row, self.on_text, self.on_step, self.on_gone)[kind - HELLO]
        answer = take(body := Body(memoryview(data)))
        demand(not body.data, "a frame is too long")
        return answer or b""

    def on_hello(self, body):
        magic, version, most, vocabulary, context, rows = body.take("8sHHIIH")
        demand(magic == b"foretell" and version == VERSION, "another protocol")
        self.hello = {"most": most, "vocabulary": vocabulary, "context": context, "rows": rows,
                      **{name: body.text() for name in ("engine", "engine_version", "model")}}
        return frame(WELCOME, struct.pack("<H", VERSION))

    def on_row(self, body):
        number, prompt, temperature = body.take("IIf")
        demand(number == self.last_row + 1, f"row {number} follows row {self.last_row}")
        row = {"id": body.text(), "prompt": prompt, "temperature": temperature, "text": [], "draft": []}
        self.last_row, self.rows[number] = number, row
        demand(len(self.rows) <= ROWS, "too many rows")

    def on_text(self, body):
        number, start, count = body.take("III")
        demand(0 < count <= TEXT_TOKENS, f"text of {count} tokens")
        self.extend(number, start + count, body.take(f"{count}i"))

    def on_gone(self, body):
        for number in body.take(f"{body.take('H')[0]}I"):
            demand(self.rows.pop(number, None), f"row {number} ends, and does not exist")

    def on_step(self, body):
        sequence, elapsed, waited, late, skipped, flags, count = body.take("QIIIHBH")
        demand(sequence == self.sequence + 1, f"step {sequence} follows step {self.sequence}")
        demand(late >= self.counts["late"] and flags in (0, 1) and 0 < count <= self.hello["rows"], "a step's head")
        self.sequence = sequence
        self.step = {"elapsed": elapsed, "waited": waited, "skipped": skipped, "flags": flags, "rows": {}}
        drafts = [self.on_step_row(body, skipped) for _ in range(count)]
        demand(len(self.step["rows"]) == count, "a row is listed twice")
        self.counts.update(steps=1, late=late - self.counts["late"], skipped=skipped, waited=waited)
        return answer(sequence, 0, [(number, tokens) for number, tokens in drafts if tokens])

    def on_step_row(self, body, skipped):
        number, scheduled, sampled, room, length, count = body.take("IHHHIH")
        demand(count <= STEP_TOKENS and room <= self.hello["most"], f"count or room of row {number}")
        demand(room == 0 or sampled, f"row {number} reads its prompt and has room")
        self.extend(number, length, body.take(f"{count}i"))
        self.step["rows"][number] = {"scheduled": scheduled, "sampled": sampled, "room": room, "length": length}
        row, accepted = self.rows[number], max(0, sampled - 1)
        if not skipped:
            demand(accepted <= scheduled <= len(row["draft"]), f"row {number} was not drafted so much")
            demand(row["text"][length - sampled:][:accepted] == row["draft"][:accepted], f"row {number}: other tokens")
        row["draft"] = list(self.draft(row, room))
        self.counts.update(verified=scheduled, accepted=accepted, drafted=len(row["draft"]))
        return number, row["draft"]

    def extend(self, number, length, tokens):
        demand(number in self.rows and min(tokens, default=0) >= 0, f"row {number} is unknown, or has a token below 0")
        text = self.rows[number]["text"]
        demand(len(text) + len(tokens) == length <= self.hello["context"], f"row {number} has a gap, or is too long")
        text.extend(tokens)
        self.counts.update(tokens=len(tokens))


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
    if os.path.exists(sys.argv[1]):
        os.unlink(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while engine := Engine(continuation):
            serve(listener.accept()[0], engine)
            print(engine.hello, dict(engine.counts), flush=True)
