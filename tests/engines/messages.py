#!/usr/bin/env python3
"""Records what vLLM's Messages API makes of requests, and of a chat's answers.

    messages.py [--out FILE]        run by the Python of vLLM's installation

For each request: the chat request that `AnthropicServingMessages` makes of it, as far as both have
the same members. For each answer of a chat, whole or streamed: the message or the events. Only the
signatures of reasoning are random; they are written as SIGNATURE. `foretell_engines::anthropic` is
compared with the file (tests/goldens/messages.jsonl).
"""

import argparse
import asyncio
import json
import pathlib
import re

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

OUT = pathlib.Path(__file__).resolve().parent.parent / "goldens/messages.jsonl"
# members of a chat request that both sides make
KEPT = ("model", "messages", "max_tokens", "stop", "temperature", "top_p", "top_k", "tools", "tool_choice",
        "parallel_tool_calls", "response_format", "reasoning_effort", "thinking_token_budget", "stream", "stream_options",
        "chat_template_kwargs")
SIGNATURE = re.compile(r'"signature":"[0-9a-f]{32}"')

USER = {"role": "user", "content": "Find the weather in Paris."}
TOOL = {"name": "weather", "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
BARE = {"name": "now", "input_schema": {"properties": {}}}
CALLED = [
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I look it up.", "signature": "s"},
        {"type": "text", "text": "A moment."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris", "days": [1, 2.5], "ü": None}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain"},
                                                                      {"type": "text", "text": "12 °C"}]},
        {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}}]},
]
REQUESTS = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=00001;"}, {"type": "text", "text": "Be brief. "},
                {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [USER, {"role": "system", "content": "<reminder>"}, {"role": "assistant", "content": "Yes."}, USER],
     "system": "Be brief."},
    {"messages": [USER, *CALLED], "tools": [TOOL, BARE]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "now", "input": {}}]},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "noon"}]}], "tools": [BARE]},
    {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}]}]},
    {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
        {"type": "text", "text": "see"}, {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]}]},
    *({"tools": [TOOL], "tool_choice": choice} for choice in (
        {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "weather"},
        {"type": "auto", "disable_parallel_tool_use": True})),
    {"stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["END", "\n\n"], "metadata": {"user_id": "u"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}}},
    {"chat_template_kwargs": {"enable_thinking": False}},
]

USAGE = {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25}
CACHED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 16}}


def call(index, call_id=None, name=None, arguments=None):
    """A piece of a call, as vLLM streams it."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, **({"id": call_id, "type": "function"} if call_id else {}), "function": function}


def stream(*deltas, finish="stop", stop_reason=None, usage=USAGE, continuous=False):
    """The data of a chat's events."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks, last = [], len(deltas) - 1
    for at, delta in enumerate([{"role": "assistant", "content": ""}, *deltas]):
        over = at == last + 1
        choice = {"index": 0, "delta": delta, "finish_reason": finish if over else None, "stop_reason": stop_reason if over else None}
        used = {"prompt_tokens": 21, "completion_tokens": at, "total_tokens": 21 + at} if continuous else None
        chunks.append({**base, "choices": [choice], **({"usage": used} if used else {})})
    return [json.dumps(chunk) for chunk in [*chunks, {**base, "choices": [], "usage": usage}]] + ["[DONE]"]


STREAMS = [
    stream({"content": "Hel"}, {"content": "lo"}),
    stream({"content": "Hel"}, {"content": "lo \"ü\"\n"}, continuous=True, usage=CACHED),
    stream({"content": "x"}, finish="length"),
    stream({"content": "x"}, stop_reason="END"),
    stream({"content": "x"}, stop_reason=7),
    stream({"reasoning": "Hm"}, {"reasoning": " so"}, {"content": "Yes"}),
    stream({"tool_calls": [call(0, "c1", "weather", "")]}, {"tool_calls": [call(0, arguments='{"city":')]},
           {"tool_calls": [call(0, arguments=' "Paris"}')]}, finish="tool_calls"),
    stream({"content": "A moment."}, {"tool_calls": [call(0, "c1", "weather", '{"city": "Paris"}')]},
           {"tool_calls": [call(1, "c2", "now", "{}")]}, finish="tool_calls"),
    stream({"reasoning": "Hm"}, {"tool_calls": [call(0, "c1", "weather", "")]}, {"content": "late"},
           {"tool_calls": [call(0, arguments="{}")]}, {"content": " text"}, finish="tool_calls"),
    stream({"tool_calls": [call(0, "c1", "weather", '{"city": "Pa')]}, finish="stop", stop_reason="ris"),
    stream({"tool_calls": [call(0, "c1", "weather", '{"city": "Pa')]}, finish="length"),
    stream({"tool_calls": [call(0, "c1", "weather", "{}")]}, finish="stop"),
    stream({}),
]


def whole(message, finish="stop", stop_reason=None, usage=USAGE):
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish, "stop_reason": stop_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


MADE = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "n": 1.50}'}}
WHOLES = [
    whole({"content": "Hello \"ü\""}), whole({"content": "x"}, finish="length"), whole({"content": "x"}, stop_reason="END"),
    whole({"content": "x"}, stop_reason=7, usage=CACHED), whole({"reasoning": "Hm", "content": "Yes"}),
    whole({"content": "A moment.", "tool_calls": [MADE, {**MADE, "id": "c2"}]}, finish="tool_calls"),
    whole({"tool_calls": [MADE]}, finish="stop"), whole({"content": ""}),
]


def request_of(change):
    body = {"model": "m", "max_tokens": 64, "messages": [USER], **change}
    for merged in (True, False):
        made = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(body), merge_inline_system=merged).model_dump(mode="json", by_alias=True, exclude_none=True)
        yield {"request": body, "merged": merged, "chat": {key: made[key] for key in KEPT if key in made}}


async def events_of(server, chunks):
    async def generate():
        for chunk in chunks:
            yield f"data: {chunk}\n\n"
    return [SIGNATURE.sub('"signature":"SIGNATURE"', event) async for event in server.message_stream_converter(generate())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE")
    args = parser.parse_args()
    server = object.__new__(AnthropicServingMessages)
    records = [record for change in REQUESTS for record in request_of(change)]
    records += [{"stream": chunks, "events": asyncio.run(events_of(server, chunks))} for chunks in STREAMS]
    for answer in WHOLES:
        message = server.messages_full_converter(ChatCompletionResponse.model_validate(answer)).model_dump(exclude_none=True)
        text = SIGNATURE.sub('"signature":"SIGNATURE"', json.dumps(message, separators=(",", ":"), ensure_ascii=False))
        records.append({"whole": answer, "message": json.loads(text)})
    with open(args.out, "w") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    print(f"{len(records)} records in {args.out}")


if __name__ == "__main__":
    main()
