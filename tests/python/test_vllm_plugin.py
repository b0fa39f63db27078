"""The plug-in of vLLM (deploy/plugins/vllm) in front of a strict service, without vLLM.

The service is the reference of tests/engines/drafts_service.py behind a real Unix socket: it ends on the first frame
that deploy/plugins/protocol.md does not allow, and its complaint fails the test. The engine has those parts of vLLM's
model runner that the plug-in reads. Time is a clock that the tests turn, but for the waits for an answer.

Run: python tests/python/test_vllm_plugin.py; FUZZ_SECONDS=600 with Wrong.test_random_bytes fuzzes the reader.
"""

import importlib
import os
import pathlib
import random
import socket
import struct
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/engines"), str(ROOT / "deploy/plugins/vllm")]

import drafts_service as service  # noqa: E402


def stand_ins():
    """Modules with what the plug-in imports of vLLM."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.parallel_state", "vllm.logger", "vllm.platforms")
    modules = {name: types.ModuleType(name) for name in names}
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm.distributed"].parallel_state = modules["vllm.distributed.parallel_state"]
    modules["vllm.distributed.parallel_state"].get_tensor_model_parallel_rank = lambda: 0
    modules["vllm.logger"].init_logger = lambda _: mock.Mock()
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: False)
    return modules


with mock.patch.dict(sys.modules, stand_ins()):
    plugin = importlib.import_module("foretell_vllm")

MOST, VOCABULARY = 8, 1000
LONG = 60  # seconds that nothing here takes
SHORT = 1000  # microseconds, where no answer comes


def config(**changes):
    given = {"context": 4096, "rows": 16, "stages": 1, **changes}
    model = types.SimpleNamespace(get_vocab_size=lambda: VOCABULARY, served_model_name="model")
    return types.SimpleNamespace(
        model_config=model, speculative_config=types.SimpleNamespace(num_speculative_tokens=MOST),
        scheduler_config=types.SimpleNamespace(max_num_seqs=given["rows"]), context=given["context"],
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=given["stages"]))


class Runner:
    """vLLM's model runner as far as the plug-in reads it. A step verifies the drafts of the one before."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.drafter = plugin.Proposer(vllm_config)
        self.max_model_len = self.effective_drafter_max_model_len = vllm_config.context
        rows = vllm_config.scheduler_config.max_num_seqs
        self.requests, self.drafts = {}, {}
        self.input_batch = types.SimpleNamespace(req_ids=[], spec_token_ids=[])
        self.tokens = numpy.zeros((rows, vllm_config.context), dtype=numpy.int32)
        self.lengths = numpy.zeros(rows, dtype=numpy.int32)
        self.drafter.load_model(None)

    def propose_draft_token_ids(self):
        raise NotImplementedError  # its name tells the runner

    def begin(self, name, prompt, **more):
        parameters = {"temperature": 0.0, "seed": None, "max_tokens": None, **more.pop("parameters", {})}
        state = {"prompt_token_ids": list(prompt), "num_prompt_tokens": len(prompt), "output_token_ids": [],
                 "prompt_embeds": None, "prompt_is_token_ids": None,
                 "sampling_params": types.SimpleNamespace(**parameters), **more}
        self.requests[name] = types.SimpleNamespace(**state)

    def text(self, name):
        return self.requests[name].prompt_token_ids + self.requests[name].output_token_ids

    def finish(self, name):
        del self.requests[name]
        self.drafts.pop(name, None)

    def step(self, emitted, verified=None):
        """One step with these rows in this order, each with the tokens that it emits; the drafts by row.

        None for a row that still reads its prompt. `verified` limits the drafts that the step could take."""
        self.input_batch.req_ids = list(emitted)
        limit = MOST if verified is None else verified
        self.input_batch.spec_token_ids = [self.drafts.get(name, [])[:limit] for name in emitted]
        for index, (name, new) in enumerate(emitted.items()):
            self.requests[name].output_token_ids.extend(new or [])
            text = self.text(name)
            self.lengths[index] = len(text)
            self.tokens[index, :len(text)] = text
        sampled = [new or [] for new in emitted.values()]
        drafts = self.drafter.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        if len(drafts) != len(emitted) or any(len(draft) > MOST for draft in drafts):
            raise AssertionError(f"vLLM would end on {drafts}")
        self.drafts = dict(zip(emitted, drafts))
        return self.drafts


class Strict(service.Engine):
    """The reference service, with the rows that each step has listed, and what it has seen end."""

    def __init__(self, draft):
        super().__init__(draft)
        self.steps, self.ended, self.texts = [], [], []

    def on_step(self, body):
        answer = super().on_step(body)
        self.steps.append(self.step)
        return answer

    def on_text(self, body):
        self.texts.append(struct.unpack_from("<III", body.data)[2])
        super().on_text(body)

    def on_gone(self, body):
        self.ended += struct.unpack_from(f"<{struct.unpack_from('<H', body.data)[0]}I", body.data, 2)
        super().on_gone(body)

    def row(self, name):
        return next(row for row in self.rows.values() if row["id"] == name)


def counting(row, room):
    """Drafts that count on from the row's last token."""
    return [(row["text"][-1] + 1 + i) % VOCABULARY for i in range(room)]


class Service:
    """A thread that answers one connection after the other. `answer` may change the bytes of any answer."""

    def __init__(self, path, draft=counting):
        self.path, self.draft = path, draft
        self.engines, self.broken = [], []
        self.answer = lambda kind, data: data
        self.reads = threading.Event()
        self.reads.set()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.connection = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @property
    def engine(self):
        return self.engines[-1]

    def run(self):
        while True:
            try:
                self.connection = self.listener.accept()[0]
                self.engines.append(Strict(self.draft))
                self.serve(self.connection, self.engines[-1])
            except service.Broken as broken:
                self.broken.append(broken)
                self.connection.close()
            except OSError:
                if self.listener.fileno() < 0:
                    return

    def serve(self, connection, engine):
        with connection, connection.makefile("rb") as stream:
            while self.reads.wait(LONG) and len(head := stream.read(4)) == 4:
                data = stream.read(int.from_bytes(head, "little"))
                if answer := self.answer(data[0], engine.frame(data[0], data[1:])):
                    connection.sendall(answer)

    def stop(self):
        """As if it was killed."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.connection is not None:
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.reads.set()
        self.thread.join(LONG)
        os.unlink(self.path)


def until(holds):
    """Waits for what another thread does."""
    end = time.monotonic() + LONG
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("nothing came of it")
        time.sleep(0.001)


class Plugin(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="drafts")
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "s")
        self.time = 1000.0
        self.waits = []  # seconds of each wait for an answer
        self.log = mock.Mock()
        readable = plugin.readable

        def wait(sock, seconds):
            self.waits.append(round(seconds, 6))
            return readable(sock, seconds)

        for name, value in {"clock": lambda: self.time, "logger": self.log, "readable": wait}.items():
            patch = mock.patch.object(plugin, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.services = []
        self.addCleanup(lambda: [one.stop() for one in self.services])

    def start(self, draft=counting):
        self.services.append(Service(self.path, draft))
        return self.services[-1]

    def stop(self):
        one = self.services.pop()
        one.stop()
        self.assertEqual(one.broken, [])

    def runner(self, deadline=10_000_000, **changes):
        environment = {plugin.ADDRESS: f"unix:{self.path}", plugin.DEADLINE: str(deadline)}
        with mock.patch.dict(os.environ, environment):
            runner = Runner(config(**changes))
        self.addCleanup(lambda: runner.drafter.connection and runner.drafter.connection.socket.close())
        return runner

    def welcomed(self, runner, **rows):
        """Steps until Foretell has welcomed the engine; the rows read their prompts meanwhile."""
        def holds():
            runner.step(dict.fromkeys(rows) or dict.fromkeys(runner.requests))
            connection = runner.drafter.connection
            return connection is not None and connection.welcomed
        until(holds)

    def running(self, draft=counting, prompt=(1, 2, 3), deadline=10_000_000, parameters=None, **changes):
        """A service, and a runner with a row "a" that both know."""
        one = self.start(draft)
        runner = self.runner(deadline, **changes)
        runner.begin("a", prompt, parameters=parameters or {})
        self.welcomed(runner)
        return one, runner

    def lines(self):
        return [call[0] for call in self.log.method_calls]

    def tearDown(self):
        for one in self.services:
            self.assertEqual(one.broken, [])


class Steady(Plugin):
    def test_a_step_brings_what_is_new_and_takes_a_draft(self):
        one, runner = self.running()
        self.assertEqual(runner.step({"a": [4]})["a"], [5, 6, 7, 8, 9, 10, 11, 12])
        self.time += 0.02
        self.assertEqual(runner.step({"a": [5, 6, 7]}, verified=3)["a"], [8, 9, 10, 11, 12, 13, 14, 15])
        runner.step({"a": [8]}, verified=0)
        first, second, third = one.engine.steps
        self.assertEqual(first["rows"][1], {"scheduled": 0, "sampled": 1, "room": 8, "length": 4})
        self.assertEqual(second["rows"][1], {"scheduled": 3, "sampled": 3, "room": 8, "length": 7})
        self.assertEqual(third["rows"][1], {"scheduled": 0, "sampled": 1, "room": 8, "length": 8})
        self.assertAlmostEqual(second["elapsed"], 20_000, delta=1)
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))
        hello = {"most": 8, "vocabulary": 1000, "context": 4096, "rows": 16}
        self.assertEqual(one.engine.hello, {**hello, "engine": "vllm", "engine_version": "0.32.0", "model": "model"})

    def test_the_prompt_is_sent_while_the_engine_reads_it(self):
        one, runner = self.running(prompt=range(500))
        until(lambda: runner.step({"a": None}) and one.engine.steps)
        self.assertEqual(one.engine.steps[0]["rows"][1], {"scheduled": 0, "sampled": 0, "room": 0, "length": 500})
        self.assertEqual(one.engine.steps[0]["flags"], 1)
        self.assertEqual(one.engine.texts, [500])
        until(lambda: runner.step({"a": [7]})["a"])
        self.assertEqual(one.engine.steps[-1]["flags"], 0)

    def test_a_step_without_room_is_sent_and_not_waited_for(self):
        one, runner = self.running()
        one.answer = lambda kind, data: b"" if kind == service.STEP else data
        self.waits.clear()
        runner.step({"a": None})
        until(lambda: one.engine.steps)
        self.assertEqual(self.waits, [])

    def test_rows_move(self):
        one, runner = self.running()
        runner.begin("b", [20, 21])
        runner.begin("c", [30])
        runner.step({"a": [4], "b": None, "c": None})
        runner.step({"a": [5], "b": [22], "c": [31]})
        drafts = runner.step({"c": [32], "a": [6], "b": [23]})
        self.assertEqual([draft[0] for draft in drafts.values()], [33, 7, 24])
        for name in "abc":
            self.assertEqual(one.engine.row(name)["text"], runner.text(name))

    def test_rows_end(self):
        one, runner = self.running()
        runner.begin("b", [20])
        runner.step({"a": [4], "b": None})
        runner.finish("a")
        runner.step({"b": [21]})
        runner.step({"b": [22]})
        self.assertEqual(one.engine.ended, [1])
        self.assertEqual(list(one.engine.rows), [2])

    def test_a_request_that_is_set_aside_keeps_its_row(self):
        one, runner = self.running()
        runner.begin("b", [20])
        runner.step({"a": [4], "b": None})
        runner.step({"b": [21]})
        runner.step({"b": [22]})
        self.assertEqual(runner.step({"b": [23], "a": None})["a"], [])
        self.assertEqual(one.engine.steps[-1]["flags"], 1)
        self.assertEqual(runner.step({"b": [24], "a": [5]})["a"][:2], [6, 7])
        self.assertEqual(one.engine.ended, [])

    def test_another_request_of_the_same_name_is_a_new_row(self):
        one, runner = self.running()
        runner.step({"a": [4]})
        runner.finish("a")
        runner.begin("a", [50, 51, 52, 53, 54])
        runner.step({"a": [55]})
        self.assertEqual(runner.step({"a": [56]})["a"][0], 57)
        self.assertEqual(one.engine.ended, [1])
        self.assertEqual(one.engine.rows[2]["text"], runner.text("a"))

    def test_a_row_that_shrinks_is_a_new_row(self):
        one, runner = self.running()
        runner.step({"a": [4, 5, 6]})
        del runner.requests["a"].output_token_ids[1:]
        runner.step({"a": None})
        self.assertEqual(runner.step({"a": [9]})["a"][0], 10)
        self.assertEqual(one.engine.ended, [1])
        self.assertEqual(one.engine.row("a")["text"], [1, 2, 3, 4, 9])

    def test_a_request_that_goes_on_with_another_prompt_is_a_new_row(self):
        one, runner = self.running()
        runner.step({"a": [4]})
        state = runner.requests["a"]
        state.prompt_token_ids, state.output_token_ids, state.num_prompt_tokens = [1, 2, 3, 9, 9], [], 5
        runner.step({"a": [10]})
        runner.step({"a": [11]})
        self.assertEqual(one.engine.row("a")["text"], [1, 2, 3, 9, 9, 10, 11])

    def test_a_thousand_rows(self):
        one = self.start()
        runner = self.runner(rows=1000, context=1000)
        for i in range(1000):
            runner.begin(f"r{i}", [i % 900, 1, 2])
        self.welcomed(runner)
        names = list(runner.requests)
        until(lambda: runner.step(dict.fromkeys(names)) and one.engine.steps and len(one.engine.step["rows"]) == 1000)
        expected = dict.fromkeys(names, [6, 7, 8, 9, 10, 11, 12, 13])
        until(lambda: runner.step(dict.fromkeys(names, [5])) == expected)
        drafts = runner.step({name: [6, 7, 8] for name in reversed(names)})
        self.assertEqual({draft[0] for draft in drafts.values()}, {9})

    def test_a_row_of_a_million_tokens(self):
        one, runner = self.running(context=1_100_000, rows=2)
        runner.begin("long", [i % VOCABULARY for i in range(1_000_000)])
        until(lambda: runner.step({"a": [4], "long": None}) and 2 in getattr(one.engine, "step", {"rows": ()})["rows"])
        self.assertEqual(runner.step({"a": [5], "long": [1]})["long"][0], 2)
        self.assertLessEqual(max(one.engine.texts), 65536)
        self.assertEqual(sum(one.engine.texts), 1_000_003)
        self.assertEqual(one.engine.row("long")["text"], runner.text("long"))


class Room(Plugin):
    def drafted(self, **parameters):
        _, runner = self.running(parameters=parameters)
        return [len(runner.step({"a": [4]})["a"]), len(runner.step({"a": [5]}, verified=0)["a"])]

    def test_requests_without_a_limit_of_tokens(self):
        self.assertEqual(self.drafted(), [8, 8])

    def test_what_is_left_of_max_tokens_less_one(self):
        self.assertEqual(self.drafted(max_tokens=6), [4, 3])
        self.stop()
        self.assertEqual(self.drafted(max_tokens=3), [1, 0])

    def test_the_end_of_the_context(self):
        one, runner = self.running(prompt=range(58), context=64)
        self.assertEqual([len(runner.step({"a": [4]})["a"]) for _ in range(6)], [4, 3, 2, 1, 0, 0])
        self.assertEqual(one.engine.row("a")["text"][:62], runner.text("a")[:62])

    def test_vllm_asks_to_the_end_of_the_context(self):
        _, runner = self.running()
        self.assertEqual(runner.effective_drafter_max_model_len, 4096 + MOST + 1)
        runner.max_model_len = runner.effective_drafter_max_model_len = 512
        runner.step({"a": [4]})
        self.assertEqual(runner.effective_drafter_max_model_len, 512 + MOST + 1)

    def test_seeds(self):
        self.assertEqual(self.drafted(seed=1, temperature=0.5), [0, 0])
        self.stop()
        self.assertEqual(self.drafted(seed=1), [8, 8])
        self.stop()
        self.assertEqual(self.drafted(temperature=0.5), [8, 8])

    def test_temperatures_without_end(self):
        one, runner = self.running(parameters={"temperature": 1e300})
        runner.step({"a": [4]})
        self.assertEqual(one.engine.row("a")["temperature"], 1e9)

    def test_requests_without_token_ids_are_not_told(self):
        for what in ({"prompt_embeds": object()}, {"prompt_is_token_ids": [False]}, {"prompt_token_ids": None},
                     {"sampling_params": None}):
            with self.subTest(what):
                one, runner = self.running()
                runner.begin("b", [7], **{"num_prompt_tokens": 0, **what} if "prompt_token_ids" in what else what)
                with mock.patch.object(runner, "text", lambda name: [7] if name == "b" else [1, 2, 3]):
                    for _ in range(3):
                        self.assertEqual(runner.step({"b": [8], "a": []}), {"b": [], "a": []})
                until(lambda: one.engine.steps)
                self.assertEqual([row["id"] for row in one.engine.rows.values()], ["a"])
                self.stop()

    def test_names_that_are_too_long_or_no_text(self):
        one, runner = self.running()
        runner.begin("\udc80" + "é" * 4000, [7])
        runner.step({"a": [4], "\udc80" + "é" * 4000: None})
        runner.step({"a": [5]})
        self.assertTrue(one.engine.rows[2]["id"].startswith("?é"))


class Wrong(Plugin):
    """Drafts that vLLM would end on, and answers that are none."""

    def drafts(self, answer):
        """The draft of "a" where the service answers with the rows that `answer` makes."""
        one, runner = self.running(draft=lambda row, room: [])
        one.answer = lambda kind, data: answer(one.engine.sequence) if kind == service.STEP else data
        draft = runner.step({"a": [4]})["a"]
        self.assertIsNotNone(runner.drafter.connection)
        return draft

    def test_more_than_room(self):
        self.assertEqual(self.drafts(lambda n: service.answer(n, 0, [(1, range(200))])), list(range(8)))

    def test_tokens_outside_the_vocabulary(self):
        self.assertEqual(self.drafts(lambda n: service.answer(n, 0, [(1, [5, 999, 1000, 7])])), [5, 999])

    def test_rows_that_were_not_listed(self):
        self.assertEqual(self.drafts(lambda n: service.answer(n, 0, [(9, [5]), (1, [6]), (0, [7])])), [6])

    def test_trees_are_no_drafts(self):
        body = struct.pack("<QHHIBB3i3B", 1, 0, 1, 1, 1, 3, 5, 6, 7, 255, 0, 0)
        self.assertEqual(self.drafts(lambda _: service.frame(service.DRAFTS, body)), [])
        self.stop()
        self.assertEqual(self.drafts(lambda _: service.frame(service.DRAFTS, body[:-3] + b"\x09\x09\x09")), [])

    def lost(self, answer, words):
        one, runner = self.running()
        self.log.reset_mock()
        one.answer = lambda kind, data: answer if kind == service.STEP else data
        self.assertEqual(runner.step({"a": [4]}), {"a": []})
        self.assertIsNone(runner.drafter.connection)
        for _ in range(20):
            runner.step({"a": [4]})
        self.assertEqual(self.lines(), ["warning"])
        self.assertIn(words, self.log.warning.call_args.args[2])
        self.stop()

    def test_answers_that_cannot_be_read(self):
        drafts = struct.pack("<QHHIBB2i", 1, 0, 1, 1, 0, 2, 5, 6)
        for body, words in (
            (drafts[:-1], "end too early"), (drafts + b"x", "count"), (drafts[:-4] + struct.pack("<i", -1), "below 0"),
            (drafts[:16] + b"\x02" + drafts[17:], "unknown shape"), (struct.pack("<QHH", 2, 0, 0), "not requested"),
            (b"", "end too early"),
        ):
            with self.subTest(words):
                self.lost(service.frame(service.DRAFTS, body), words)
        for data, words in ((b"\0\0\0\0", "0 bytes"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes"),
                            (service.frame(77, b""), "kind 77"), (service.frame(service.WELCOME, b"\1\0"), "kind 128")):
            with self.subTest(data):
                self.lost(data, words)

    def test_random_bytes(self):
        """Whatever comes, in pieces of any size: no exception but ConnectionLost, and drafts that can be verified."""
        chance = random.Random(7)
        end = time.process_time() + float(os.environ.get("FUZZ_SECONDS", 3))
        while time.process_time() < end:
            ours, theirs = socket.socketpair(socket.AF_UNIX)
            ours.setblocking(False)
            with ours, theirs, mock.patch.object(socket, "socket", lambda *_: ours):
                connection = plugin.Connection(MOST)
                connection.welcomed, connection.pending = True, 1
                theirs.sendall(noise(chance))
                try:
                    while (answer := connection._answer()) is not None:
                        self.assertTrue(all(token >= 0 for tokens in answer[1].values() for token in tokens))
                        connection.pending = 1
                except plugin.ConnectionLost:
                    pass


def noise(chance):
    """Frames of drafts with bytes that have been changed, or anything."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(200))
    rows = [(chance.randrange(9), [chance.randrange(-1, 2000) for _ in range(chance.randrange(20))]) for _ in range(3)]
    data = bytearray(service.answer(chance.randrange(3), chance.randrange(9), rows) * chance.randrange(1, 4))
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[:chance.randrange(1, len(data) + 1)])


class Away(Plugin):
    def test_nobody_listens(self):
        runner = self.runner()
        runner.begin("a", [1])
        attempts = []
        for _ in range(10_000):
            self.time += 0.01
            before = runner.drafter.retry_at
            self.assertEqual(runner.step({"a": None}), {"a": []})
            if runner.drafter.retry_at != before:
                attempts.append(round(runner.drafter.retry_at - self.time, 3))
        self.assertEqual(attempts[:10], [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])
        self.assertLess(len(attempts), 14)
        self.assertEqual(self.lines(), ["warning"])

    def test_it_is_killed_and_comes_back(self):
        _, runner = self.running()
        runner.step({"a": [4]})
        self.stop()
        for _ in range(50):
            self.time += 0.1
            self.assertEqual(runner.step({"a": [5]}), {"a": []})
        self.assertEqual(self.lines(), ["info", "warning"])
        one = self.start()
        self.time += 31
        self.welcomed(runner)
        runner.step({"a": [6]})
        self.assertEqual(runner.step({"a": [7]})["a"][0], 8)
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))
        self.assertEqual(self.lines(), ["info", "warning", "info"])

    def test_a_long_connection_is_taken_up_again_at_once(self):
        _, runner = self.running()
        runner.drafter.pause = 30.0
        runner.step({"a": [4]})
        self.time += 31
        self.stop()
        runner.step({"a": [5]})
        self.assertAlmostEqual(runner.drafter.retry_at - self.time, 0.1)

    def refused(self, answer, words):
        one = self.start()
        one.answer = lambda kind, data: answer
        runner = self.runner()
        runner.begin("a", [1])
        until(lambda: runner.step({"a": None}) and self.lines())
        self.time += 0.2
        for _ in range(5):
            runner.step({"a": None})
        until(lambda: runner.step({"a": None}) and runner.drafter.connection is None)
        self.assertEqual(self.lines(), ["warning"])
        self.assertIn(words, self.log.warning.call_args.args[2])
        self.log.reset_mock()
        self.stop()

    def test_it_refuses(self):
        self.refused(service.frame(service.REFUSED, b"\x04\x00busy"), "refuses: busy")

    def test_another_version(self):
        self.refused(service.frame(service.WELCOME, b"\2\0"), "version 2")

    def test_something_else_listens(self):
        self.refused(b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes")
        self.refused(service.frame(5, b"hello"), "does not speak")

    def test_it_says_nothing_at_all(self):
        one = self.start()
        one.answer = lambda kind, data: b""
        runner = self.runner()
        runner.begin("a", [1])
        for _ in range(300):
            self.time += 0.1
            runner.step({"a": None})
        self.assertEqual(self.lines(), ["warning"])
        self.assertEqual(self.waits, [])

    def test_an_error_of_our_own(self):
        _, runner = self.running()
        with mock.patch.object(plugin, "within", side_effect=ZeroDivisionError("no")):
            self.assertEqual(runner.step({"a": [4]}), {"a": []})
        self.assertEqual(self.log.warning.call_args.args[2], "ZeroDivisionError: no")


class Late(Plugin):
    def silent(self, deadline=SHORT):
        """A service that reads steps and answers them only when `late` is set."""
        one, runner = self.running(deadline=deadline)
        late = threading.Event()
        self.addCleanup(late.set)

        def answer(kind, data):
            if kind == service.STEP:
                late.wait(LONG)
            return data

        one.answer = answer
        self.waits.clear()
        return one, runner, late

    def reads_no_more(self, one, last):
        """The service answers the next step with this, and reads nothing after it."""
        def answer(kind, data):
            if kind == service.STEP:
                one.reads.clear()
            return last if kind == service.STEP else data

        one.answer = answer

    def test_a_stopped_service_costs_one_deadline(self):
        _, runner, _ = self.silent()
        for i in range(40):
            self.assertEqual(runner.step({"a": [4]}), {"a": []})
            self.time += 0.1
        self.assertEqual(self.waits, [SHORT / 1e6])
        self.assertEqual(runner.drafter.connection.skipped, 39)

    def test_it_is_given_up_after_a_while(self):
        _, runner, _ = self.silent()
        runner.step({"a": [4]})
        self.time += 5.1
        runner.step({"a": [4]})
        self.assertIsNone(runner.drafter.connection)
        self.assertEqual(self.lines(), ["info", "warning"])
        for _ in range(200):  # whoever connects again, waits for no welcome
            self.time += 0.1
            runner.step({"a": [4]})
        self.assertEqual(self.waits, [SHORT / 1e6])

    def test_an_answer_that_comes_late_is_dropped_and_counted(self):
        one, runner, late = self.silent()
        runner.step({"a": [4]})
        runner.step({"a": [5]})
        late.set()
        until(lambda: runner.step({"a": [6]}) == {"a": []} and not runner.drafter.connection.pending)
        self.assertEqual(runner.drafter.connection.late, 1)
        runner.drafter.deadline = LONG
        until(lambda: runner.step({"a": [7]})["a"] == [8, 9, 10, 11, 12, 13, 14, 15])
        self.assertEqual(one.engine.steps[-1]["waited"], 0)
        self.assertGreater(one.engine.steps[-1]["skipped"], 0)
        self.assertEqual(one.engine.counts["late"], 1)
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))

    def test_questions_grow_rare_while_answers_are_late(self):
        _, runner = self.running()
        connection = runner.drafter.connection
        rests = []
        for _ in range(8):
            connection.awaited = True
            with mock.patch.object(connection, "_answer", lambda: (0, {})):
                connection.take_late_answer()
            rests.append(connection.pause_steps)
        self.assertEqual(rests, [1, 3, 7, 15, 31, 63, 63, 63])
        for _ in range(63):
            self.assertEqual(runner.step({"a": [4]}), {"a": []})
        self.assertEqual(len(runner.step({"a": [5]})["a"]), 8)
        self.assertEqual(connection.consecutive_late, 0)

    def test_a_service_that_does_not_read_gets_nothing_more(self):
        one, runner = self.running(context=700_000, rows=4)
        self.reads_no_more(one, service.answer(1, 0, []))
        runner.step({"a": [4]})
        runner.begin("long", [1] * 600_000)
        self.waits.clear()
        sizes = []
        for _ in range(30):
            runner.step({"long": None})
            sizes.append(len(runner.drafter.connection.out))
        self.assertGreater(sizes[0], 0)
        self.assertEqual(len(set(sizes)), 1)
        self.assertLessEqual(sizes[0], 65536 * 4 + 100)
        self.assertEqual(self.waits, [])
        one.answer = lambda kind, data: data
        one.reads.set()
        until(lambda: runner.step({"long": [2]})["long"][:1] == [3])

    def test_a_step_that_does_not_go_out_as_a_whole_is_not_waited_for(self):
        one, runner = self.running(draft=lambda row, room: [])
        self.reads_no_more(one, service.answer(1, 1, []))
        runner.step({"a": [4]})
        runner.step({"a": [4] * 3000})
        one.answer, one.engine.draft = lambda kind, data: data, counting
        runner.drafter.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.waits.clear()
        self.assertEqual(runner.step({"a": [4]}), {"a": []})
        self.assertGreater(len(runner.drafter.connection.out), 0)
        self.assertEqual(self.waits, [])
        one.reads.set()
        until(lambda: runner.step({"a": [4]})["a"][:1] == [5])
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))

    def test_a_service_that_never_reads_is_given_up(self):
        one, runner = self.running(context=700_000, rows=4)
        self.reads_no_more(one, service.answer(1, 0, []))
        runner.step({"a": [4]})
        runner.begin("long", [1] * 600_000)
        runner.step({"long": None})
        self.time += 5.1
        runner.step({"long": None})
        self.assertIsNone(runner.drafter.connection)


class Pauses(Plugin):
    def pausing(self, pause):
        one, runner = self.running(draft=lambda row, room: [], context=20_000)
        one.answer = lambda kind, data: service.answer(one.engine.sequence, pause, []) if kind == service.STEP else data
        return one, runner

    def test_no_question_for_as_many_steps(self):
        one, runner = self.pausing(5)
        for i in range(13):
            runner.step({"a": [4]})
        self.assertEqual(len(one.engine.steps), 3)
        self.assertEqual([step["skipped"] for step in one.engine.steps[1:]], [5, 5])
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))

    def test_a_new_row_ends_it(self):
        one, runner = self.pausing(60_000)
        runner.step({"a": [4]})
        for _ in range(10):
            runner.step({"a": [4]})
        runner.begin("b", [7])
        runner.step({"a": [4], "b": None})
        runner.step({"a": [4], "b": [8]})
        self.assertEqual(list(one.engine.steps[-1]["rows"]), [1, 2])

    def test_what_has_grown_by_much_is_sent_as_text_first(self):
        one, runner = self.pausing(5)
        runner.step({"a": [4]})
        for _ in range(5):
            runner.step({"a": [5] * 999 + [6]})
        runner.step({"a": [7]})
        runner.step({"a": [8]})
        self.assertEqual(one.engine.texts, [3, 5001])
        self.assertEqual(one.engine.row("a")["text"], runner.text("a"))

    def test_a_step_of_many_rows_that_have_grown_fits_the_socket(self):
        one, runner = self.pausing(1)
        names = [f"r{i}" for i in range(15)]
        for name in names:
            runner.begin(name, [1])
        new = dict.fromkeys(names, [2])
        until(lambda: runner.step(new) and one.engine.steps and len(one.engine.step["rows"]) == 15)
        for _ in range(2):
            runner.step(dict.fromkeys(names, [3] * 3000))
            runner.step(dict.fromkeys(names, [4]))
            self.assertEqual(len(one.engine.step["rows"]), 10)
            runner.step(dict.fromkeys(names, [5]))
            self.assertEqual(len(one.engine.step["rows"]), 15)
        self.assertTrue(all(one.engine.row(name)["text"] == runner.text(name) for name in names))


class Start(Plugin):
    def test_other_versions_are_refused(self):
        for version in ("0.31.2", "0.34.0", "1.0.0", "dev", "0.320.1"):
            with mock.patch.object(plugin.vllm, "__version__", version):
                self.assertRaisesRegex(RuntimeError, "install", self.runner)
        for version in ("0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"):
            with mock.patch.object(plugin.vllm, "__version__", version):
                self.runner()

    def test_pipelines_are_refused(self):
        with self.assertRaisesRegex(RuntimeError, "--pipeline-parallel-size 1"):
            self.runner(stages=2)

    def test_settings_are_read_at_the_start(self):
        read = plugin.settings
        self.assertEqual(read({}), ("/run/foretell/drafts.sock", 0.001))
        self.assertEqual(read({plugin.ADDRESS: "/a", plugin.DEADLINE: "250"}), ("/a", 0.00025))
        self.assertEqual(read({plugin.ADDRESS: "unix:/a"})[0], "/a")
        for address in ("", "drafts.sock", "unix:", "unix:a", "http://127.0.0.1:8000", "tcp:/a", "/" + "x" * 107):
            with self.assertRaisesRegex(RuntimeError, "write unix:/"):
                read({plugin.ADDRESS: address})
        for deadline in ("", "0", "-1", "1.5", "1ms", "10000001", "1" * 30, "١"):
            with self.assertRaisesRegex(RuntimeError, "write microseconds"):
                read({plugin.DEADLINE: deadline})

    def test_other_ranks_do_not_ask(self):
        one = self.start()
        with mock.patch.object(plugin.parallel_state, "get_tensor_model_parallel_rank", lambda: 1):
            runner = self.runner()
        runner.begin("a", [1])
        for _ in range(5):
            self.assertEqual(runner.step({"a": [2]}), {"a": []})
        self.assertEqual((one.engines, self.lines()), ([], []))

    def unreadable(self, change):
        self.start()
        runner = self.runner()
        runner.begin("a", [1])
        change(runner)
        for _ in range(5):
            self.assertEqual(runner.step({"a": [2]}), {"a": []})
        self.assertEqual(self.lines(), ["error"])
        self.assertIn("NOTHING", self.log.error.call_args.args[0])
        self.log.reset_mock()
        self.stop()

    def test_a_runner_of_another_shape_gets_no_drafts(self):
        for name in ("num_prompt_tokens", "prompt_embeds", "prompt_is_token_ids", "sampling_params"):
            self.unreadable(lambda runner: delattr(runner.requests["a"], name))
        for name in ("seed", "max_tokens"):  # temperature is read where there is a seed
            self.unreadable(lambda runner: delattr(runner.requests["a"].sampling_params, name))
        self.unreadable(lambda runner: delattr(runner, "effective_drafter_max_model_len"))
        self.unreadable(lambda runner: setattr(runner, "tokens", runner.tokens.astype(numpy.int64)))

    def test_no_runner_at_all(self):
        self.start()
        with mock.patch.dict(os.environ, {plugin.ADDRESS: self.path}):
            proposer = plugin.Proposer(config())
        proposer.load_model()
        self.assertEqual(proposer.propose([[1], []], numpy.array([1, 1]), numpy.zeros((2, 4), numpy.int32)), [[], []])
        self.assertEqual(self.lines(), ["error"])

    def test_drafts_of_several_rows_are_lists_of_their_own(self):
        """vLLM keeps them as they are."""
        runner = self.runner()
        runner.begin("a", [1])
        runner.begin("b", [1])
        drafts = runner.step({"a": [2], "b": [2]})
        self.assertIsNot(drafts["a"], drafts["b"])


if __name__ == "__main__":
    unittest.main()
