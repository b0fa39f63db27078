"""Agents' chats direct and through, without a model: questions, answers, conversations, tests of draws."""

import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests/bench"), str(ROOT / "tests/engines")]

import bfcl  # noqa: E402
import calls  # noqa: E402

MOVE = {"name": "mv", "description": "Moves.", "parameters": {"type": "dict", "required": ["source"], "properties": {
    "source": {"type": "string"}, "size": {"type": "float"}}}}
OTHERS = [{**MOVE, "name": f"other{number}"} for number in range(9)]
TALK = [{"role": "user", "content": "move it"}]


def written(path, *objects):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


class Questions(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_a_call_has_the_first_right_values_and_no_optional_argument(self):
        truth = [{"a.b": {"x": [1, 2], "unit": ["m", ""], "at": [{"lat": [3], "note": [""]}]}}]
        for name in bfcl.SETS["single"]:
            written(self.folder / f"BFCL_v4_{name}.json", {"question": [TALK], "function": [{**MOVE, "name": "a.b"}]})
            written(self.folder / f"possible_answer/BFCL_v4_{name}.json", {"ground_truth": truth})
        case, _ = bfcl.cases(self.folder, "single")
        self.assertEqual(case.turns, [(TALK, [("a_b", {"x": 1, "at": {"lat": 3}})])])
        self.assertEqual(case.tools[0]["function"]["parameters"]["properties"]["size"], {"type": "number"})

    def test_calls_in_python_are_read_and_few_tools_are_offered(self):
        written(self.folder / "BFCL_v4_multi_turn_base.json",
                {"question": [TALK, TALK], "involved_classes": ["GorillaFileSystem"]})
        written(self.folder / "possible_answer/BFCL_v4_multi_turn_base.json", {"ground_truth": [["mv('a', size=2)"], []]})
        for file in bfcl.DOCS.values():
            written(self.folder / f"multi_turn_func_doc/{file}.json", *OTHERS, MOVE)
        case, = bfcl.cases(self.folder, "multi-turn")
        self.assertEqual(case.turns, [(TALK, [("mv", {"source": "a", "size": 2})]), (TALK, [])])
        names = [tool["function"]["name"] for tool in case.tools]
        self.assertEqual(names, ["other0", "other1", "other2", "other3", "other4", "mv"])


def events(*deltas, usage):
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def called(name, arguments, index=0, **more):
    return {"tool_calls": [{"index": index, **more, "function": {"name": name, "arguments": arguments}}]}


class Answers(unittest.TestCase):
    usage = {"completion_tokens": 9, "foretell": {"path": "speculated", "drafted": 4}, "prompt_tokens_details": None}

    def test_a_stream_is_joined(self):
        text = events({"reasoning": "I "}, {"reasoning": "mv"}, {"content": "x"}, called("mv", "", id="1"), called(None, '{"a"'),
                      called(None, ": 1}"), called("cd", "{}", 1, id="2"), usage=self.usage)
        [parts], ours = calls.streamed_parts(text)
        self.assertEqual(parts, {"content": "x", "reasoning": "I mv", "calls": [["mv", '{"a": 1}'], ["cd", "{}"]],
                                 "finish": "tool_calls", "usage": {"completion_tokens": 9}})
        self.assertEqual(ours["path"], "speculated")

    def test_whole_answers_differ_in_any_member_but_ids_and_times(self):
        def whole(number, finish="stop"):
            call = {"id": f"chatcmpl-tool-{number}", "type": "function", "function": {"name": "mv", "arguments": "{}"}}
            choice = {"index": 0, "message": {"content": None, "tool_calls": [call]}, "finish_reason": finish}
            return calls.whole_parts({"id": number, "created": number, "model": "m", "choices": [choice], "usage": self.usage})[0]
        self.assertEqual(whole("1"), whole("2"))
        self.assertNotEqual(whole("1"), whole("1", "length"))


class Conversations(unittest.TestCase):
    def conversed(self, arguments):
        asked = []

        def ask(address, body):
            asked.append((address, [message["role"] for message in body["messages"]]))
            calling = body["messages"][-1]["role"] == "user"
            return [{"content": "" if calling else "Done.", "calls": [["mv", arguments]] if calling else []}], {}

        with mock.patch.object(calls, "ask", ask):
            pairs = list(calls.converse("direct", "through", "multi-turn", "whole", {}, [TALK, TALK]))
        return pairs, [roles for address, roles in asked if address == "through"]

    def test_the_direct_answers_and_results_are_the_history(self):
        pairs, roles = self.conversed("{}")
        first = ["user", "assistant", "tool"]
        self.assertEqual(roles, [["user"], first, [*first, "assistant", "user"], [*first, "assistant", *first]])
        self.assertTrue(all(pair.want == pair.got for pair in pairs))

    def test_arguments_that_a_server_refuses_end_a_conversation(self):
        self.assertEqual(len(self.conversed("{")[0]), 1)


class Draws(unittest.TestCase):
    def test_other_distributions_are_told_apart(self):
        def side(share):
            return [{"names": ("mv",) if number % 10 < share else ()} for number in range(1000)]
        self.assertGreater(calls.homogeneity(side(5), side(5))["names"], 0.9)
        self.assertLess(calls.homogeneity(side(5), side(7))["names"], calls.TOLD_APART)


if __name__ == "__main__":
    unittest.main()
