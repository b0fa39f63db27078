#!/usr/bin/env python3
"""Records what vLLM's Responses API makes of requests, and of a model's answers.

    responses.py [--out FILE]        run by the Python of vLLM's installation

For each request: a chat request that asks vLLM for the same, shown by vLLM's own classes, which make
the same sampling parameters and variables of the chat template of both. For each answer, whole or
streamed: the answer of a chat, and the response or the events that vLLM makes of it. Ids are random;
they are written as ID. `foretell_engines::responses` is compared with the file
(tests/goldens/responses.jsonl).
"""

import argparse
import asyncio
import json
import pathlib
import re

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.chat_utils import _parse_chat_message_content_mm_part
from vllm.tool_parsers.utils import CUSTOM_TOOL_INPUT_KEY

OUT = pathlib.Path(__file__).resolve().parent.parent / "goldens/responses.jsonl"
ID = re.compile(r'"(resp|msg|rs|fc|ctc)_[0-9a-f]{16,32}"')
CREATED = 1

ASK = "Find the weather in Paris."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
BARE = {"type": "function", "name": "now", "parameters": None, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits a file."}
FREE = {**CUSTOM, "format": {"type": "text"}}
TURN = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "A moment.", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris", "ü": 1.50}', "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
]
USER = {"role": "user", "content": ASK}
PARTS = {"type": "message", "role": "user", "content": [
    {"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"}]}
EDIT = [{"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "a\n\"ü\"\u0001"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"}]
PARTIAL = {"type": "message", "role": "assistant", "id": "msg_2", "status": "incomplete",
           "content": [{"type": "output_text", "text": "It is", "annotations": []}]}
REQUESTS = [
    {},
    {"instructions": "Be brief."},
    {"input": [USER]},
    {"input": [{"role": "developer", "content": "Be exact."}, {"type": "message", "role": "system", "content": [
        {"type": "input_text", "text": "Be kind."}]}, PARTS], "instructions": "Be brief."},
    {"input": [USER, *TURN, USER], "tools": [TOOL, BARE]},
    {"input": [USER, {"role": "assistant", "content": "Yes."}, {"type": "reasoning", "summary": [
        {"type": "summary_text", "text": "Hm."}]}, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]}, USER]},
    {"input": [USER, *TURN[:1], *TURN[2:3], *TURN[4:5], *TURN[:1], PARTIAL], "tools": [TOOL]},
    {"input": [USER, *EDIT, USER], "tools": [CUSTOM, FREE | {"name": "free"}, TOOL]},
    *({"tools": [TOOL, CUSTOM], "tool_choice": choice} for choice in (
        "auto", "none", "required", {"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"})),
    {"tools": [TOOL], "parallel_tool_calls": False, "max_tool_calls": 3},
    {"tools": [], "tool_choice": "auto"},
    {"stream": True, "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 64, "metadata": {"a": "b"}, "user": "u", "store": False,
     "prompt_cache_key": "k", "service_tier": "priority", "truncation": "disabled", "background": False},
    {"truncation": "auto", "top_k": 7, "seed": 3, "stop": ["END"], "presence_penalty": 0.5, "frequency_penalty": 0.25,
     "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "min_p": 0.1},
    {"top_logprobs": 2},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
    {"reasoning": {"effort": "high", "summary": "auto"}},
    {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"a": 1}},
    {"reasoning": {"summary": "auto"}},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}},
    # as Codex asks
    {"instructions": "You are a coding agent.", "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None}, *TURN[2:3], *TURN[4:5]],
     "tools": [TOOL, CUSTOM], "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
     "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
     "client_metadata": {"x-codex-installation-id": "i"}, "text": {"verbosity": "low"}},
]
SAME = ("temperature", "top_p", "stream", "parallel_tool_calls", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
        "repetition_penalty", "seed", "stop", "chat_template_kwargs")


def part_of(part):
    """A part of a message as vLLM's chat reads it."""
    kind, content = _parse_chat_message_content_mm_part(part)
    return {"type": "image_url", "image_url": {"url": content}} if "image" in kind else {"type": "text", "text": content}


def message_of(message):
    content = message.get("content")
    if isinstance(content, list):
        parts = [part_of(part) for part in content]
        content = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
    kept = {key: value for key, value in message.items() if key in ("role", "reasoning", "tool_calls", "tool_call_id")}
    return {**kept, **({} if content is None else {"content": content})}


def chat_of(body, request):
    """The chat request, of the texts and tools that vLLM makes, and other names for the other members."""
    chat = {key: body[key] for key in SAME if key in body}
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    chat |= {"model": "m", "messages": [message_of(message) for message in messages]}
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    if tools:
        chat |= {"tools": tools, "tool_choice": body.get("tool_choice", "auto")}
        if isinstance(chat["tool_choice"], dict):
            chat["tool_choice"] = {"type": "function", "function": {"name": chat["tool_choice"]["name"]}}
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("truncation") == "auto":
        chat["truncate_prompt_tokens"] = -1
    if request.is_include_output_logprobs():
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.reasoning and request.reasoning.effort:
        chat["reasoning_effort"] = request.reasoning.effort
    form = body.get("text", {}).get("format", {})
    if form.get("type") == "json_object":
        chat["response_format"] = form
    elif form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    last = body["input"][-1] if isinstance(body["input"], list) else {}
    if last.get("status") == "incomplete":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def request_of(change):
    body = {"model": "m", "input": ASK, **change}
    request = ResponsesRequest.model_validate(json.loads(json.dumps(body)))
    chat = json.loads(json.dumps(chat_of(body, request)))
    asked = ChatCompletionRequest.model_validate(json.loads(json.dumps(chat)))
    most = min(99, asked.max_tokens or 99)  # as vLLM's chat route passes it
    params = [repr(one.to_sampling_params(most, {})).replace("extra_args={}", "extra_args=None") for one in (request, asked)]
    assert params[0] == params[1], params
    variables = [one.build_chat_params(None, "auto").chat_template_kwargs for one in (request, asked)]
    assert variables[0] == {key: value for key, value in variables[1].items() if key != "documents"}, variables
    return {"request": body, "chat": chat}


class Parser:
    """Gives what a chat's answer said, instead of parsing text."""
    reasoning_parser = None

    def __init__(self, deltas=(), whole=None):
        self.deltas, self.whole = list(deltas), whole

    def parse_delta(self, **_):
        return self.deltas.pop(0)

    def parse(self, *_, **__):
        return self.whole

    def count_reasoning_tokens(self, _):
        return 2


ROWS = [{"tok": [{"token": "Hel", "logprob": -0.5}, {"token": "He", "logprob": -1.5}]}, {"tok": [{"token": "lo\"ü\"", "logprob": -0.25}, {"token": "l", "logprob": -2.0}]}]
USAGE = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 2}}


def sampled(row):
    """(rows of vLLM's engine, those of a chat) for one token."""
    listed = [{**one, "bytes": list(one["token"].encode())} for one in row["tok"]]
    return ({at: Logprob(logprob=one["logprob"], rank=at + 1, decoded_token=one["token"]) for at, one in enumerate(row["tok"])},
            {"content": [{**listed[0], "top_logprobs": listed}]})


def output(text, ids, finish, logprobs=None):
    done = CompletionOutput(index=0, text=text, token_ids=ids, cumulative_logprob=None, logprobs=logprobs, finish_reason=finish)
    return RequestOutput(request_id="r", prompt="p", prompt_token_ids=[1, 2, 3], prompt_logprobs=None, outputs=[done],
                         finished=finish is not None, num_cached_tokens=2)


def server():
    made = object.__new__(OpenAIServingResponses)
    made.use_harmony = made.enable_per_request_metrics = made.enable_log_outputs = made.return_tokens_as_token_ids = False
    made.enable_auto_tools, made.request_logger, made.tool_server = True, None, None
    made.response_store, made.response_store_lock = {}, asyncio.Lock()
    return made


async def stream_of(change, deltas, finish="stop", rows=()):
    body = {"model": "m", "input": ASK, "stream": True, "store": False, "temperature": 0.5, "top_p": 1.0, "max_output_tokens": 64,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, **change}
    request = ResponsesRequest.model_validate(json.loads(json.dumps(body)))
    context = SimpleContext(response_parser=Parser(deltas))
    rows = [sampled(row) for row in rows]
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": CREATED, "model": "m"}
    chunks = [{**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    for at, delta in enumerate(deltas):
        over = finish if at == len(deltas) - 1 else None
        said = delta.model_dump(exclude_unset=True, exclude_none=True)
        chunks.append({**base, "choices": [{"index": 0, "delta": said, "logprobs": rows[at][1] if rows else None, "finish_reason": over}]})
    total = len(deltas)
    usage = {**USAGE, "completion_tokens": total, "total_tokens": 3 + total}

    async def run():
        for at in range(total):
            context.append_output(output("x", [0], finish if at == total - 1 else None, [rows[at][0]] if rows else None))
            yield context

    params = request.to_sampling_params(64, {})
    events = server().responses_stream_generator(request, params, run(), context, "m", None, RequestResponseMetadata(request_id="r"), CREATED)
    return {"asked": body, "stream": [json.dumps(chunk) for chunk in [*chunks, {**base, "choices": [], "usage": usage}]] + ["[DONE]"],
            "events": [ID.sub(r'"\1_ID"', event) async for event in _convert_stream_to_sse_events(events)]}


def call(index, call_id=None, name=None, arguments=None):
    """A piece of a call, as vLLM streams it."""
    function = DeltaFunctionCall(**{key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None})
    return DeltaToolCall(**{"index": index, "function": function, **({"id": call_id, "type": "function"} if call_id else {})})


def calls(*pieces):
    return DeltaMessage(tool_calls=list(pieces))


def text(content):
    return DeltaMessage(content=content)


def thought(reasoning):
    return DeltaMessage(reasoning=reasoning)


# No spaces and backslashes: vLLM's reader of unfinished JSON holds them back until more comes.
EDITED = json.dumps({CUSTOM_TOOL_INPUT_KEY: "a\n\"ü\"😀/"})
STREAMS = [
    ({}, [text("Hel"), text("lo \"ü\"\n")]),
    ({"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "tools": [TOOL], "reasoning": {"effort": "low"},
      "text": {"format": {"type": "text"}}, "service_tier": "flex", "max_tool_calls": 2, "parallel_tool_calls": False}, [text("x")]),
    ({}, [text("x")], "length"),
    ({}, [thought("Hm"), thought(" so"), text("Yes")]),
    ({}, [DeltaMessage(reasoning="Hm", content="Yes"), text("!")]),
    ({"tools": [TOOL]}, [calls(call(0, "c1", "weather", "")), calls(call(0, arguments='{"city":')), calls(call(0, arguments=' "Paris"}'))]),
    ({"tools": [TOOL, BARE]}, [text("A moment."), calls(call(0, "c1", "weather", '{"city": "Paris"}'), call(1, "c2", "now", "{}"))]),
    ({"tools": [TOOL]}, [thought("Hm"), calls(call(0, "c1", "weather", "{}")), text("Done"), text(" now.")]),
    ({"tools": [TOOL]}, [calls(call(0, "c1", "weather", '{"city": "Pa'))], "length"),
    ({"tools": [CUSTOM]}, [calls(call(0, "c1", "patch", ""))] + [calls(call(0, arguments=piece)) for piece in
                                                                  (*EDITED[:9], EDITED[9:23], *EDITED[23:])]),
    ({"tools": [CUSTOM]}, [calls(call(0, "c1", "patch", "no JSON"))]),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, [text("Hel"), text("lo\"ü\"")], "stop", ROWS),
    ({}, [text("")]),
]


async def whole_of(change, reasoning=None, content=None, called=(), finish="stop", rows=()):
    body = {"model": "m", "input": ASK, "store": False, "temperature": 0.5, "top_p": 1.0, "max_output_tokens": 64,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, **change}
    request = ResponsesRequest.model_validate(json.loads(json.dumps(body)))
    context = SimpleContext(response_parser=Parser(whole=(reasoning, content, [FunctionCall(**one) for one in called])))
    rows = [sampled(row) for row in rows]
    tokens = len(rows) or 4
    message = {"role": "assistant", "content": content, **({"reasoning": reasoning} if reasoning else {}), **({"tool_calls": [
        {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}} for one in called]} if called else {})}
    listed = {"content": [row[1]["content"][0] for row in rows]} if rows else None
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": CREATED, "model": "m",
              "choices": [{"index": 0, "message": message, "logprobs": listed, "finish_reason": finish}],
              "usage": {**USAGE, "completion_tokens": tokens, "total_tokens": 3 + tokens}}

    async def run():
        context.append_output(output("x", [0] * tokens, finish, [row[0] for row in rows] or None))
        yield context

    made = await server().responses_full_generator(request, request.to_sampling_params(64, {}), run(), context, "m", None,
                                                   RequestResponseMetadata(request_id="r"), CREATED)
    written = ID.sub(r'"\1_ID"', json.dumps(made.model_dump(mode="json", by_alias=True), separators=(",", ":"), ensure_ascii=False))
    return {"asked": body, "whole": answer, "response": written}


MADE = {"id": "c1", "name": "weather", "arguments": '{"city": "Paris", "n": 1.50}'}
WHOLES = [
    dict(change={}, content="Hello \"ü\""), dict(change={}, content="x", finish="length"),
    dict(change={"instructions": "Be brief."}, reasoning="Hm", content="Yes"), dict(change={}, content=""),
    dict(change={"tools": [TOOL], "tool_choice": "required"}, content="A moment.", called=[MADE, {**MADE, "id": "c2"}]),
    dict(change={"tools": [TOOL]}, called=[{**MADE, "arguments": '{"city": "Pa'}], finish="length"),
    dict(change={"tools": [CUSTOM]}, called=[{"id": "c1", "name": "patch", "arguments": EDITED}]),
    dict(change={"tools": [CUSTOM]}, called=[{"id": "c1", "name": "patch", "arguments": "no JSON"}]),
    dict(change={"include": ["message.output_text.logprobs"], "top_logprobs": 2}, content="Hello", rows=ROWS),
]


async def record():
    records = [request_of(change) for change in REQUESTS]
    records += [await stream_of(*given) for given in STREAMS]
    return records + [await whole_of(**given) for given in WHOLES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE")
    args = parser.parse_args()
    records = asyncio.run(record())
    with open(args.out, "w") as file:
        file.writelines(json.dumps(made, ensure_ascii=False) + "\n" for made in records)
    print(f"{len(records)} records in {args.out}")


if __name__ == "__main__":
    main()
