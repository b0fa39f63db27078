"""Foretell's plug-in for vLLM: at every step it asks the Foretell beside the engine for drafts.

    vllm serve MODEL --speculative-config '{"model": "foretell_vllm.Proposer", "num_speculative_tokens": 16}'

vLLM verifies them in its own step, so its texts stay its own. This module sends what is new in the rows over a Unix
socket (deploy/plugins/protocol.md) and checks what comes back. Foretell can neither stop nor break nor slow the engine:
the socket never blocks, an answer is awaited once and until its deadline, whatever goes wrong means no drafts, and
nothing piles up in front of a Foretell that does not read.

Which request a row belongs to, how it samples, and how much of its draft was verified, only the model runner knows. Its
inside is no interface, so only known versions are served, and its shape is checked before the first use.
"""

import os
import re
import select
import socket
import struct
import sys
import time

import vllm
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.platforms import current_platform

KNOWN = re.compile(r"0\.(32|33)\.")
ADDRESS, DEADLINE = "FORETELL_DRAFTS", "FORETELL_DRAFTS_DEADLINE_US"

VERSION = 1
HELLO, ROW, TEXT, STEP, GONE = 1, 2, 3, 4, 5
WELCOME, REFUSED, DRAFTS = 128, 129, 130
CHAIN, TREE = 0, 1
STEP_ROW = struct.Struct("<IHHHIH")
DRAFTS_HEAD, DRAFTS_ROW = struct.Struct("<QHH"), struct.Struct("<IBB")

FRAME_BYTES, NAME_BYTES, READ_BYTES = 8 << 20, 4096, 65536
ROW_TOKENS = 4096  # of one row in a step; more go ahead as text
STEP_TOKENS = 32768  # of all rows in a step, so that it fits a socket's buffer
TEXT_TOKENS = 65536  # of new rows after a step
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds before the next connection
ANSWER_TIMEOUT = 5.0  # seconds for an answer that is due, or for bytes to be taken
MAX_PAUSE_STEPS = 64  # steps from one request to the next while answers come too late

logger = init_logger("vllm.foretell")
clock = time.monotonic


class ConnectionLost(Exception):
    """Why the connection is of no use any more, in words."""


class Proposer:
    """What vLLM constructs."""

    def __init__(self, vllm_config):
        refuse_unknown(vllm_config)
        fix_cpu()
        self.config, (self.path, self.deadline) = vllm_config, settings(os.environ)
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.max_draft = vllm_config.speculative_config.num_speculative_tokens
        first = parallel_state.get_tensor_model_parallel_rank() == 0  # vLLM takes the drafts of no other rank
        self.runner = find_runner(vllm_config) or self._give_up("it was not found") if first else None
        self.checked, self.present = False, set()
        self.connection = self.returned = self.reported = None
        self.retry_at, self.pause = 0.0, FIRST_PAUSE

    def load_model(self, *_, **__):
        """vLLM calls this when its runner is complete. There is no model to load."""
        if self.runner is not None:
            self._lift_limit()

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        """The draft of each row; [] for none."""
        started = clock()
        drafts = [[] for _ in sampled_token_ids]
        if self.runner is None or not self._check(token_ids_cpu):
            return drafts
        try:
            self._lift_limit()
            if self._connected():
                self._step(Step(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, started), drafts)
        except Exception as problem:  # whatever it is, the engine goes on
            self._lose(problem)
            drafts = [[] for _ in sampled_token_ids]
        self.returned = clock()
        return drafts

    def _check(self, tokens):
        """Whether all that is read of a runner with a row is there. Looks once."""
        runner = self.runner
        try:
            if not self.checked:
                Row(0, runner.requests[runner.input_batch.req_ids[0]])
                len(runner.input_batch.spec_token_ids[0]), runner.max_model_len, runner.effective_drafter_max_model_len
                if tokens.dtype != "<i4":
                    raise TypeError(f"token ids of type {tokens.dtype}")
            self.checked = True
        except (AttributeError, LookupError, TypeError) as problem:
            self.runner = self._give_up(problem)
        return self.checked

    def _lift_limit(self):
        """vLLM would not ask while a row nears the end of the context. Here each draft ends at the room of its row."""
        self.runner.effective_drafter_max_model_len = self.runner.max_model_len + self.max_draft + 1

    def _step(self, step, drafts):
        connection = self.connection
        connection.take_late_answer()
        rows = connection.rows.follow(step, self.runner.requests)
        rooms = connection.request_drafts(step, rows)
        if rooms is None:
            connection.skipped += 1
        elif any(room for _, room in rooms.values()):
            for number, tokens in connection.wait(self.deadline).items():
                if number in rooms:
                    index, room = rooms[number]
                    drafts[index] = within(tokens[:room], self.vocabulary)
        connection.send_rows(step, rows)

    def _connected(self):
        """Whether Foretell has welcomed this engine; connects when it is time to."""
        if self.connection is None:
            if clock() < self.retry_at:
                return False
            self.connection = Connection(self.max_draft)
            self.connection.socket.connect(self.path)
            self.connection.send(self._hello())
        if not self.connection.welcomed and self.connection.open():
            self.reported = None
            logger.info("vLLM asks for drafts at %s", self.path)
        return self.connection.welcomed

    def _hello(self):
        model, scheduler = self.config.model_config, self.config.scheduler_config
        head = struct.pack("<8sHHIIH", b"foretell", VERSION, min(self.max_draft, 0xFFFF), self.vocabulary,
                           self.runner.max_model_len, min(scheduler.max_num_seqs, 0xFFFF))
        return frame(HELLO, head, text("vllm"), text(vllm.__version__), text(model.served_model_name))

    def _lose(self, problem):
        if self.connection is not None:
            if self.connection.answered and clock() - self.connection.since > LONGEST_PAUSE:
                self.pause = FIRST_PAUSE
            self.connection.socket.close()
            self.connection = None
        self.retry_at = clock() + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        why = str(problem) if isinstance(problem, (ConnectionLost, OSError)) else f"{type(problem).__name__}: {problem}"
        if why != self.reported and not (self.reported and isinstance(problem, OSError)):  # one line for each change
            self.reported = why
            logger.warning("no drafts from %s: %s; vLLM goes on without, the plug-in tries again", self.path, why)

    def _give_up(self, why):
        logger.error("foretell-vllm cannot read the model runner of vLLM %s: %s. It will draft NOTHING, as it could not"
                     " tell requests with seeds. Install a vLLM and a foretell-vllm that fit.", vllm.__version__, why)


class Step:
    """One step of the engine, as vLLM reports it."""

    def __init__(self, proposer, sampled, lengths, tokens, started):
        batch = proposer.runner.input_batch
        self.ids = list(batch.req_ids)
        if len(self.ids) != len(sampled):
            raise ConnectionLost(f"vLLM names {len(self.ids)} requests for {len(sampled)} rows")
        self.sampled = [len(new) for new in sampled]
        self.verified = [len(draft) for draft in batch.spec_token_ids[:len(sampled)]]
        self.lengths = lengths[:len(sampled)].tolist()
        self.tokens, self.context = tokens, proposer.runner.max_model_len
        self.elapsed = min(int(1e6 * (started - (proposer.returned or started))), 0xFFFFFFFF)
        self.prompts = 0 in self.sampled or not proposer.present.issuperset(self.ids)
        proposer.present = set(self.ids)


class Row:
    """A request of the engine, as Foretell knows it."""

    __slots__ = ("number", "state", "prompt", "end", "hidden", "ready", "sent")

    def __init__(self, number, state):
        self.number, self.state = number, state
        self.prompt, parameters = state.num_prompt_tokens, state.sampling_params
        self.hidden = (parameters is None or state.prompt_token_ids is None  # no token ids to look up
                       or state.prompt_embeds is not None or state.prompt_is_token_ids is not None)
        self.end = 0  # its maximum length; 0 where drafts would change the random numbers of its seed
        if not self.hidden and (parameters.seed is None or parameters.temperature == 0):
            self.end = sys.maxsize if parameters.max_tokens is None else self.prompt + parameters.max_tokens
        self.ready = False  # its text was sent as a whole, and the steps carry on from there
        self.sent = 0  # tokens


class Rows:
    """The rows of one connection, by request."""

    def __init__(self):
        self.by_id, self.gone, self.last = {}, [], 0

    def follow(self, step, requests):
        """The rows in the engine's order. A request that the engine has only set aside keeps its row."""
        rows = []
        for name, length in zip(step.ids, step.lengths):
            state, row = requests[name], self.by_id.get(name)
            if row is None or row.state is not state or row.prompt != state.num_prompt_tokens or row.sent > length:
                self._end(name)
                self.last += 1
                row = self.by_id[name] = Row(self.last, state)
            rows.append(row)
        if len(self.by_id) > len(rows):
            for name in [name for name, row in self.by_id.items() if requests.get(name) is not row.state]:
                self._end(name)
        return rows

    def _end(self, name):
        row = self.by_id.pop(name, None)
        if row is not None and row.sent:
            self.gone.append(row.number)

    def listed(self, step, rows, max_draft):
        """The rows of a `step`, and the index and room of each by its number."""
        parts, rooms, remaining = [], {}, STEP_TOKENS
        for index, row in enumerate(rows):
            if not row.ready:
                continue
            length, sampled = step.lengths[index], step.sampled[index]
            count = length - row.sent
            if count > min(remaining, ROW_TOKENS):
                row.ready = False
                continue
            remaining -= count
            # the step itself makes one token more
            room = max(0, min(max_draft, min(row.end, step.context) - length - 1)) if sampled else 0
            parts.append(STEP_ROW.pack(row.number, step.verified[index], sampled, room, length, count))
            parts.append(step.tokens[index, row.sent:length].tobytes())
            row.sent = length
            rooms[row.number] = index, room
        return parts, rooms

    def news(self, step, rows):
        """Frames of rows that ended or are not known in full, and whether one is so now."""
        gone, self.gone = self.gone[:0xFFFF], self.gone[0xFFFF:]
        frames = [frame(GONE, struct.pack(f"<H{len(gone)}I", len(gone), *gone))] if gone else []
        remaining, complete = TEXT_TOKENS, False
        for index, row in enumerate(rows):
            if row.ready or row.hidden or not remaining:
                continue
            if not row.sent:
                head = struct.pack("<IIf", row.number, row.prompt, min(row.state.sampling_params.temperature, 1e9))
                frames.append(frame(ROW, head, text(step.ids[index])))
            end = min(step.lengths[index], row.sent + remaining)
            head = struct.pack("<III", row.number, row.sent, end - row.sent)
            frames.append(frame(TEXT, head, step.tokens[index, row.sent:end].tobytes()))
            remaining -= end - row.sent
            row.sent = end
            row.ready = end == step.lengths[index]
            complete = complete or row.ready
        return b"".join(frames), complete


class Connection:
    """One connection, and what both sides know since it began. Raises when it is of no use any more."""

    def __init__(self, max_draft):
        self.max_draft, self.rows = max_draft, Rows()
        self.since, self.due_since = clock(), None  # due: an answer, or bytes that are not taken
        self.sequence = self.pending = 0  # pending: sequence of the step without an answer
        self.welcomed = self.answered = self.awaited = False  # awaited: a step has waited for that answer
        self.out, self.incoming = bytearray(), bytearray()
        self.waited = self.late = self.consecutive_late = self.skipped = 0
        self.pause_steps = 0  # steps that request nothing
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def open(self):
        """Whether Foretell has welcomed this engine by now."""
        for kind, body in self._frames():
            if kind == REFUSED:
                raise ConnectionLost(f"Foretell refuses: {body[2:].decode(errors='replace')}")
            if kind != WELCOME or len(body) != 2:
                raise ConnectionLost("what answers there does not speak the drafts protocol")
            if (version := int.from_bytes(body, "little")) != VERSION:
                raise ConnectionLost(f"Foretell speaks version {version} of the drafts protocol, this plug-in version"
                                     f" {VERSION}; install both from one release")
            self.welcomed = True
            break
        self._flush()
        return self.welcomed

    def take_late_answer(self):
        """Reads on. An answer that comes only now is of no use, and makes the next requests rarer."""
        if self._answer() is not None and self.awaited:
            self.late += 1
            self.consecutive_late += 1
            self.pause_steps = min(2 ** self.consecutive_late, MAX_PAUSE_STEPS) - 1
        self._flush()

    def request_drafts(self, step, rows):
        """Sends a `step` if it is time to: the index and room of each row by its number, else None."""
        if self.pending or self.out or self.pause_steps:
            self.pause_steps = max(0, self.pause_steps - 1)
            return None
        parts, rooms = self.rows.listed(step, rows, self.max_draft)
        if not rooms:
            return None
        self.sequence += 1
        head = struct.pack("<QIIIHBH", self.sequence, step.elapsed, self.waited, self.late, min(self.skipped, 0xFFFF),
                           step.prompts, len(rooms))
        self.pending, self.awaited = self.sequence, False
        self.waited = self.skipped = 0
        self.send(frame(STEP, head, *parts))
        return rooms

    def wait(self, deadline):
        """The drafts by row, none if they do not come in time."""
        begun, answer = clock(), None
        self.awaited = True
        while not self.out and (answer := self._answer()) is None:  # what is not taken is not answered
            remaining = begun + deadline - clock()
            if remaining <= 0 or not readable(self.socket, remaining):
                break
        self.waited = int(1e6 * (clock() - begun))
        if answer is None:
            return {}
        pause, found = answer
        self.consecutive_late = 0
        self.pause_steps = 0 if any(found.values()) else pause
        return found

    def send_rows(self, step, rows):
        """Sends what is new besides the step, unless Foretell has yet to read what it got."""
        if not self.out:
            frames, complete = self.rows.news(step, rows)
            self.send(frames)
            self.pause_steps = 0 if complete else self.pause_steps

    def send(self, frames):
        self.out += frames
        self._flush()

    def _flush(self):
        try:
            while self.out:
                del self.out[:self.socket.send(self.out, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        due = self.out or self.pending or not self.welcomed
        self.due_since = (self.due_since or clock()) if due else None
        if due and clock() - self.due_since > ANSWER_TIMEOUT:
            raise ConnectionLost(f"no answer for {ANSWER_TIMEOUT:.0f} seconds")

    def _answer(self):
        """(pause, drafts by row) for the pending step; None until they have come."""
        for kind, body in self._frames():
            if kind != DRAFTS:
                raise ConnectionLost(f"a frame of kind {kind}")
            sequence, pause, found = read_drafts(body)
            if not self.pending or sequence != self.pending:
                raise ConnectionLost(f"drafts for step {sequence}, which were not requested")
            self.pending, self.due_since, self.answered = 0, None, True
            return pause, found

    def _frames(self):
        """The frames that have come, each as kind and body."""
        while True:
            length = int.from_bytes(self.incoming[:4], "little")
            if len(self.incoming) >= 4 and not 1 <= length <= FRAME_BYTES:
                raise ConnectionLost(f"a frame of {length} bytes")
            if 4 <= len(self.incoming) - length:
                got, self.incoming = self.incoming[4:4 + length], self.incoming[4 + length:]
                yield got[0], got[1:]
                continue
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionLost("the connection was closed")
            self.incoming += data


def read_drafts(body):
    """(sequence, pause, tokens by row) of a `drafts` frame."""
    try:
        sequence, pause, count = DRAFTS_HEAD.unpack_from(body)
        at, rows = DRAFTS_HEAD.size, {}
        for _ in range(count):
            row, shape, size = DRAFTS_ROW.unpack_from(body, at)
            at += DRAFTS_ROW.size
            tokens = struct.unpack_from(f"<{size}i", body, at)
            if shape not in (CHAIN, TREE) or size and min(tokens) < 0:
                raise ConnectionLost("drafts of an unknown shape or with a token id below 0")
            at += 4 * size if shape == CHAIN else 5 * size
            rows[row] = tokens if shape == CHAIN else ()  # vLLM verifies no trees
    except struct.error:
        raise ConnectionLost("drafts that end too early") from None
    if at != len(body):
        raise ConnectionLost(f"drafts of {len(body)} bytes that count {at}")
    return sequence, pause, rows


def within(tokens, vocabulary):
    """The tokens before the first one that the model does not have."""
    return next((list(tokens[:i]) for i, token in enumerate(tokens) if token >= vocabulary), list(tokens))


def frame(kind, *parts):
    return struct.pack("<IB", 1 + sum(map(len, parts)), kind) + b"".join(parts)


def text(words):
    data = words.encode(errors="replace")[:NAME_BYTES].decode(errors="ignore").encode()
    return struct.pack("<H", len(data)) + data


def readable(sock, seconds):
    """Whether there is something to read by then. select() knows fractions of a millisecond, but not every file."""
    if sock.fileno() < 1024:
        return bool(select.select([sock], [], [], seconds)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def settings(environment):
    """(path of the socket, deadline in seconds)."""
    address, deadline = environment.get(ADDRESS, "/run/foretell/drafts.sock"), environment.get(DEADLINE, "1000")
    path = address.removeprefix("unix:")
    if not path.startswith("/") or len(os.fsencode(path)) > 107:
        raise RuntimeError(f"{ADDRESS}={address!r} is no socket: write unix:/run/foretell/drafts.sock, or another"
                           " absolute path of at most 107 bytes")
    if not re.fullmatch("[0-9]{1,8}", deadline) or not 1 <= int(deadline) <= 10_000_000:
        raise RuntimeError(f"{DEADLINE}={deadline!r} is no deadline: write microseconds, 1 to 10000000, such as 1000")
    return path, int(deadline) / 1e6


def refuse_unknown(config):
    if not KNOWN.match(vllm.__version__):
        raise RuntimeError(f"foretell-vllm knows vLLM 0.32 and 0.33, this is {vllm.__version__}: install one of them,"
                           " or a foretell-vllm for this version, or start vLLM without --speculative-config")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise RuntimeError("foretell-vllm does not support pipeline parallelism: start vLLM with"
                           " --pipeline-parallel-size 1, or without --speculative-config")


def fix_cpu():
    """Fixes two faults of vLLM's CPU build (0.32, 0.33) that any speculation brings out, vLLM's own `ngram` too.

    `_expand_kernel_impl` writes the temperature, top_k and top_p of each draft token to a copy, and other memory is read
    in their place: sampled texts are wrong, and greedy ones beside them. And a step without drafts ends the engine where
    a request has top_k: it takes the maximum of nothing (apply_top_k_only)."""
    if not current_platform.is_cpu():
        return
    import torch
    from vllm.v1.sample import rejection_sampler as sampler

    def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
        return values.repeat_interleave(counts, output_size=num_tokens)

    def constrained(logits, cu_num_draft_tokens, sampling_metadata, original=sampler.apply_sampling_constraints):
        return original(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    sampler.expand_batch_to_tokens, sampler.apply_sampling_constraints = expanded, constrained


def find_runner(config):
    """The model runner that is constructing its proposer, up the stack; None if there is none."""
    caller = sys._getframe()
    while caller := caller.f_back:
        owner = caller.f_locals.get("self")
        if hasattr(owner, "propose_draft_token_ids") and getattr(owner, "vllm_config", None) is config:
            return owner
