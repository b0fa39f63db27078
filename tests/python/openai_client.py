"""The official `openai` client, through Foretell and direct: both must see the same.

    openai_client.py DIRECT THROUGH TOOLS_DIRECT TOOLS_THROUGH

DIRECT and THROUGH serve the model `toy`, TOOLS_* a server that answers every chat with a tool call.
Every scenario runs against both; the values that the client returned or raised are compared,
without ids, times and Foretell's own fields in `usage`. Prints one line per scenario, exits 1 on
the first difference.
"""

import json
import sys

import openai

CHAT = [{"role": "user", "content": "t1 t2 t3 t4 t1 t2"}]
PROMPT = "t1 t2 t3 t4 t5 t1 t2 t3"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
VOLATILE = {"id", "created", "system_fingerprint", "foretell", "prompt_tokens_details"}


def client(url, **more):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, **more)


def stable(value):
    if isinstance(value, dict):
        # a fresh seed differs from call to call; only its presence is compared
        return {k: v is not None if k == "seed" else stable(v) for k, v in value.items() if k not in VOLATILE}
    return [stable(v) for v in value] if isinstance(value, list) else value


def plain(answer):
    return stable(answer.model_dump())


def streamed(chunks):
    """A stream as a program reads it, independent of its division into chunks."""
    text, calls, finish, usage, roles = "", {}, None, None, []
    for chunk in chunks:
        usage = plain(chunk.usage) if chunk.usage else usage
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text += (choice.text if delta is None else delta.content) or ""
            if delta is not None and delta.role:
                roles.append(delta.role)
            for call in getattr(delta, "tool_calls", None) or []:
                known = calls.setdefault(call.index, {"name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return {"text": text, "calls": calls, "finish": finish, "usage": usage, "roles": roles[:1]}


def raised(call):
    try:
        return {"answer": call()}
    except openai.APIStatusError as error:
        return {"raised": type(error).__name__, "status": error.status_code, "body": stable(error.body)}
    except openai.APITimeoutError as error:
        return {"raised": type(error).__name__}


def greedy(api, **more):
    fields = {"model": "toy", "temperature": 0, "max_tokens": 40, **more}
    return fields, api


def completion(api, **more):
    fields, api = greedy(api, **more)
    return api.completions.create(prompt=PROMPT, **fields)


def chat(api, **more):
    fields, api = greedy(api, **more)
    return api.chat.completions.create(messages=CHAT, **fields)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ON_TOY = {
    "models": lambda url: [model.id for model in client(url).models.list()],
    "completion": lambda url: plain(completion(client(url))),
    "completion, streamed": lambda url: streamed(completion(client(url), **USAGE)),
    "completion of ids": lambda url: plain(client(url).completions.create(
        model="toy", prompt=[1, 2, 3, 1, 2], max_tokens=20, temperature=0)),
    "completion, seeded": lambda url: plain(completion(client(url), temperature=0.8, seed=7)),
    "completion with a stop": lambda url: plain(completion(client(url), stop=["t7", "t9"])),
    "completion, two choices": lambda url: len(completion(client(url), n=2, temperature=1.0).choices),
    "chat": lambda url: plain(chat(client(url))),
    "chat, streamed": lambda url: streamed(chat(client(url), **USAGE)),
    "chat, streamed without usage": lambda url: streamed(chat(client(url), stream=True)),
    "chat, two choices": lambda url: len(chat(client(url), n=2, temperature=1.0).choices),
    "chat with logprobs": lambda url: plain(chat(client(url), logprobs=True, top_logprobs=2)),
    "chat, raw": lambda url: client(url).chat.completions.with_raw_response.create(
        model="toy", messages=CHAT, max_tokens=4, temperature=0).status_code,
    "unknown model": lambda url: raised(lambda: plain(completion(client(url), model="nobody"))),
    "wrong value": lambda url: raised(lambda: plain(completion(client(url), temperature=9))),
    "wrong type": lambda url: raised(lambda: plain(completion(client(url), extra_body={"max_tokens": "x"}))),
    "too long": lambda url: raised(lambda: plain(client(url).completions.create(
        model="toy", prompt=[1] * 5000, max_tokens=1))),
    "wrong value, streamed": lambda url: raised(lambda: streamed(completion(client(url), top_p=7, **USAGE))),
    "unknown route": lambda url: raised(lambda: plain(client(url).embeddings.create(model="toy", input="x"))),
    "timeout": lambda url: raised(lambda: plain(completion(
        client(url, timeout=0.001), max_tokens=3000, extra_body={"ignore_eos": True}))),
}
ON_TOOLS = {
    "tool call": lambda url: plain(client(url).chat.completions.create(model="tools", messages=CHAT, tools=TOOLS)),
    "tool call, streamed": lambda url: streamed(client(url).chat.completions.create(
        model="tools", messages=CHAT, tools=TOOLS, stream=True)),
}


def left_early(url):
    """A client that drops a stream in the middle, and sends another request."""
    api = client(url)
    with completion(api, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as stream:
        for seen, _ in enumerate(stream):
            if seen == 3:
                break
    return plain(completion(api))


def main():
    direct, through, tools_direct, tools_through = sys.argv[1:]
    scenarios = [(name, run, direct, through) for name, run in {**ON_TOY, "left early": left_early}.items()]
    scenarios += [(name, run, tools_direct, tools_through) for name, run in ON_TOOLS.items()]
    for name, run, plainly, proxied in scenarios:
        expected, got = run(plainly), run(proxied)
        if json.dumps(expected, sort_keys=True) != json.dumps(got, sort_keys=True):
            print(f"{name}: DIFFERS\n  direct  {expected}\n  through {got}")
            return 1
        print(f"{name}: the same")
    foretell = completion(client(through)).usage.model_dump()["foretell"]
    if foretell["path"] != "speculated" or foretell["accepted"] == 0:
        print(f"nothing was speculated: {foretell}")
        return 1
    print(f"{len(scenarios)} scenarios, speculated: {foretell['rounds']} rounds, {foretell['accepted']} accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
