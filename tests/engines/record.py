#!/usr/bin/env python3
"""Records answers of the real engines as golden files: tests/goldens/{vllm,llamacpp}/NAME.json.

    record.py [llama|vllm]...        starts each engine (variant house where a name says so) and asks

A file is {"request": {method, path, body}, "status", "content_type", "body"} or "sse", the stream
as text. Recorded once per engine version; docs/engines.md explains the answers.
"""

import json
import re
import sys
import urllib.error
import urllib.request

import engine

GOLDENS = engine.ROOT / "tests/goldens"
M = engine.NAME
CODE = "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return "
LONG = CODE * 4
CHAT = [{"role": "user", "content": "What is a socket?"}]
GREEDY = {"model": M, "temperature": 0}


def ask(url, method, path, body):
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers.get("content-type", ""), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("content-type", ""), error.read().decode()


def compact(text):
    """Lists of numbers on one line."""
    return re.sub(r"\[[\s\d,.eE+-]+\]", lambda found: re.sub(r"\s+", "", found[0]), text)


def record(folder, url, name, method, path, body=None, keep=None):
    """`keep` is a pattern: of a text page only the lines that it matches are kept."""
    status, kind, text = ask(url, method, path, body)
    text = text.replace(str(engine.MODELS), "models").replace(str(engine.MODELS).replace("/", "\\/"), "models")
    shown = body.decode() if isinstance(body, bytes) else body
    out = {"request": {"method": method, "path": path, "body": shown}, "status": status, "content_type": kind}
    if kind.startswith("text/event-stream"):
        out["sse"] = text
    elif kind.startswith("application/json") and text:
        out["body"] = json.loads(text)
    else:
        out["body"] = "\n".join(x for x in text.splitlines() if not keep or re.search(keep, x))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(compact(json.dumps(out, indent=1, ensure_ascii=False)) + "\n")
    print(f"{status} {path.stat().st_size:7} {name}", file=sys.stderr)
    return out


def vllm(url, folder):
    def r(name, path, body=None, method=None, keep=None):
        return record(folder, url, name, method or ("POST" if body is not None else "GET"), path, body, keep)

    prompt = r("tokenize", "/tokenize", {"model": M, "prompt": CODE, "return_token_strs": True})["body"]["tokens"]
    long = json.loads(ask(url, "POST", "/tokenize", {"model": M, "prompt": LONG})[2])["tokens"]
    r("version", "/version")
    r("models", "/v1/models")
    r("health", "/health")
    r("tokenize_plain", "/tokenize", {"prompt": "a <|user|> b"})
    r("tokenize_no_special", "/tokenize", {"prompt": "a <|user|> b", "add_special_tokens": False})
    r("tokenize_chat", "/tokenize", {"model": M, "messages": CHAT, "add_generation_prompt": True})
    r("detokenize", "/detokenize", {"model": M, "tokens": prompt})
    ids = {**GREEDY, "prompt": prompt, "max_tokens": 8}
    r("completion_ids", "/v1/completions", {**ids, "return_token_ids": True})
    r("completion_text", "/v1/completions", {**ids, "prompt": CODE})
    r("completion_fan_out", "/v1/completions", {**ids, "prompt": [prompt, prompt + long[:1], prompt + long[:2]],
                                                "max_tokens": 1, "return_token_ids": True})
    r("completion_fan_out_logprobs", "/v1/completions",
      {**ids, "prompt": [prompt, prompt + long[:1]], "max_tokens": 1, "logprobs": 0, "return_token_ids": True})
    r("completion_stream", "/v1/completions", {**ids, "stream": True, "return_token_ids": True})
    r("completion_stream_plain", "/v1/completions", {**ids, "stream": True})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    r("completion_stream_usage", "/v1/completions",
      {**ids, "stream": True, "return_token_ids": True, "stream_options": usage})
    r("completion_stream_final_usage", "/v1/completions",
      {**ids, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}})
    r("completion_stream_fan_out", "/v1/completions",
      {**ids, "prompt": [prompt, prompt + long[:2]], "max_tokens": 2, "stream": True, "return_token_ids": True})
    r("completion_stop", "/v1/completions", {**ids, "max_tokens": 40, "stop": ["\n"], "return_token_ids": True})
    r("completion_stop_included", "/v1/completions",
      {**ids, "max_tokens": 40, "stop": ["\n"], "include_stop_str_in_output": True, "return_token_ids": True})
    r("completion_stop_stream", "/v1/completions",
      {**ids, "max_tokens": 40, "stop": ["\n"], "return_token_ids": True, "stream": True})
    r("completion_stop_token", "/v1/completions",
      {**ids, "max_tokens": 40, "stop_token_ids": [long[9]], "return_token_ids": True})
    r("completion_eos", "/v1/completions", {**ids, "logit_bias": {"0": 100}, "return_token_ids": True})
    r("completion_eos_stream", "/v1/completions",
      {**ids, "logit_bias": {"0": 100}, "return_token_ids": True, "stream": True})
    r("completion_ignore_eos", "/v1/completions",
      {**ids, "max_tokens": 2, "logit_bias": {"0": 100}, "ignore_eos": True, "return_token_ids": True})
    r("completion_logprobs", "/v1/completions", {**ids, "max_tokens": 3, "logprobs": 2, "return_token_ids": True})
    r("completion_logprobs_stream", "/v1/completions",
      {**ids, "max_tokens": 3, "logprobs": 2, "return_token_ids": True, "stream": True})
    r("completion_echo", "/v1/completions", {**ids, "max_tokens": 2, "echo": True, "return_token_ids": True})
    r("completion_prompt_logprobs", "/v1/completions",
      {**ids, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True})
    seeded = {**ids, "temperature": 0.8, "top_p": 0.9, "seed": 7, "return_token_ids": True}
    first = r("completion_seed", "/v1/completions", seeded)["body"]["choices"][0]["token_ids"]
    r("completion_seed_resent", "/v1/completions", {**seeded, "prompt": prompt + first[:4], "max_tokens": 4})
    r("completion_seed_fan_out", "/v1/completions",
      {**seeded, "prompt": [prompt, prompt, prompt], "max_tokens": 2})
    r("completion_n", "/v1/completions", {**ids, "temperature": 0.8, "n": 2, "max_tokens": 2, "return_token_ids": True})
    chat = {**GREEDY, "messages": CHAT, "max_tokens": 8}
    r("chat", "/v1/chat/completions", {**chat, "return_token_ids": True})
    r("chat_stream", "/v1/chat/completions", {**chat, "stream": True, "return_token_ids": True})
    r("chat_stream_usage", "/v1/chat/completions",
      {**chat, "stream": True, "return_token_ids": True, "stream_options": usage})
    r("chat_stream_plain", "/v1/chat/completions", {**chat, "stream": True})
    r("chat_logprobs", "/v1/chat/completions",
      {**chat, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True})
    r("chat_eos", "/v1/chat/completions", {**chat, "logit_bias": {"0": 100}, "return_token_ids": True})
    r("chat_eos_stream", "/v1/chat/completions",
      {**chat, "logit_bias": {"0": 100}, "return_token_ids": True, "stream": True})
    r("chat_render", "/v1/chat/completions/render", chat)
    r("chat_render_defaults", "/v1/chat/completions/render", {"model": M, "messages": CHAT})
    r("completion_render", "/v1/completions/render", {**ids, "prompt": CODE})
    r("completion_render_defaults", "/v1/completions/render", {"model": M, "prompt": prompt})
    # always with detokenize:false: without it a warm prefix ends the engine
    score = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1, "skip_reading_prefix_cache": False,
             "detokenize": False}
    generate = {"model": M, "token_ids": long + prompt[:7], "stream": False, "sampling_params": score}
    r("generate_cold", "/inference/v1/generate", {**generate, "cache_salt": "cold"})
    r("generate_warm", "/inference/v1/generate", {**generate, "cache_salt": "cold"})
    r("generate_warm_other_tail", "/inference/v1/generate",
      {**generate, "cache_salt": "cold", "token_ids": long + prompt[2:9]})
    r("generate_prompt_logprobs_0", "/inference/v1/generate",
      {**generate, "token_ids": prompt, "sampling_params": {**score, "prompt_logprobs": 0}})
    plain = {"max_tokens": 4, "temperature": 0, "detokenize": False}
    r("generate_plain", "/inference/v1/generate", {**generate, "token_ids": prompt, "sampling_params": plain})
    r("generate_logprobs", "/inference/v1/generate",
      {**generate, "token_ids": prompt, "sampling_params": {**plain, "max_tokens": 2, "logprobs": 2}})
    r("generate_stream", "/inference/v1/generate",
      {**generate, "token_ids": prompt, "stream": True, "sampling_params": plain})
    r("generate_bad_params", "/inference/v1/generate",
      {**generate, "token_ids": prompt, "sampling_params": {**plain, "temperature": -1}})
    r("generate_unknown_params", "/inference/v1/generate",
      {**generate, "token_ids": prompt, "sampling_params": {**plain, "no_such_field": 1}})
    errors(r, ids, chat)
    r("completion_token_out_of_range", "/v1/completions", {**ids, "prompt": [999999]})
    r("load", "/load")
    r("server_info", "/server_info")
    r("metrics", "/metrics", keep=r"^vllm:(num_requests|kv_cache_usage|cache_config|prefix_cache|num_preempt|spec_dec)")


def errors(r, ids, chat):
    r("error_too_long_text", "/v1/completions", {**ids, "prompt": "word " * 2100})
    r("error_too_long_ids", "/v1/completions", {**ids, "prompt": [9] * 2100})
    r("error_too_long_with_max_tokens", "/v1/completions", {**ids, "max_tokens": 5000})
    r("error_too_long_chat", "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": "w " * 2100}]})
    r("error_too_long_stream", "/v1/completions", {**ids, "prompt": [9] * 2100, "stream": True})
    r("error_not_json", "/v1/completions", b"{not json")
    r("error_unknown_model", "/v1/completions", {**ids, "model": "no-such-model"})
    r("error_wrong_type", "/v1/completions", {**ids, "max_tokens": "many"})
    r("error_out_of_range", "/v1/completions", {**ids, "temperature": -1})
    r("error_missing_prompt", "/v1/completions", {"model": M})
    r("error_empty_prompt", "/v1/completions", {**ids, "prompt": ""})
    r("error_no_such_path", "/v1/no-such-path", {})
    r("error_wrong_method", "/v1/completions")


def llama(url, folder):
    def r(name, path, body=None, method=None, keep=None):
        return record(folder, url, name, method or ("POST" if body is not None else "GET"), path, body, keep)

    prompt = r("tokenize", "/tokenize", {"content": CODE})["body"]["tokens"]
    long = json.loads(ask(url, "POST", "/tokenize", {"content": LONG})[2])["tokens"]
    r("tokenize_special", "/tokenize", {"content": "a <|user|> b", "parse_special": True, "with_pieces": True})
    r("tokenize_no_special", "/tokenize", {"content": "a <|user|> b", "parse_special": False})
    r("tokenize_add_special", "/tokenize", {"content": "a <|user|> b", "add_special": True})
    r("detokenize", "/detokenize", {"tokens": prompt})
    r("props", "/props")
    r("slots", "/slots")
    r("health", "/health")
    r("models", "/v1/models")
    r("version", "/version")
    r("apply_template", "/apply-template", {"messages": CHAT})
    ids = {"prompt": prompt, "n_predict": 8, "temperature": 0, "return_tokens": True}
    r("native", "/completion", ids)
    r("native_again", "/completion", ids)
    r("native_text", "/completion", {**ids, "prompt": CODE})
    short = ["index", "tokens", "stop_type", "tokens_evaluated", "tokens_cached", "timings"]
    fan = {**ids, "prompt": [prompt, prompt + long[:1], prompt + long[:2]], "n_predict": 1}
    r("native_fan_out", "/completion", {**fan, "response_fields": short})
    r("native_fan_out_again", "/completion", {**fan, "response_fields": short})
    r("native_fan_out_full", "/completion", {**fan, "prompt": fan["prompt"][:2]})
    r("native_fan_out_more_than_slots", "/completion",
      {**ids, "prompt": [prompt + long[:i] for i in range(11)], "n_predict": 1, "response_fields": short})
    r("native_fork", "/completion", {**ids, "n_cmpl": 3, "n_predict": 1, "response_fields": short})
    r("native_fork_full", "/completion", {**ids, "n_cmpl": 2, "n_predict": 1})
    r("native_stream", "/completion", {**ids, "stream": True})
    r("native_stream_fan_out", "/completion", {**fan, "prompt": fan["prompt"][:2], "stream": True})
    r("native_probs", "/completion", {**ids, "n_predict": 2, "n_probs": 2})
    r("native_post_sampling_probs", "/completion",
      {**ids, "n_predict": 1, "temperature": 0.8, "n_probs": 3, "post_sampling_probs": True})
    r("native_stop", "/completion", {**ids, "n_predict": 40, "stop": ["\n"]})
    r("native_stop_stream", "/completion", {**ids, "n_predict": 40, "stop": ["\n"], "stream": True})
    r("native_eos", "/completion", {**ids, "logit_bias": [[0, 100]]})
    r("native_eos_stream", "/completion", {**ids, "logit_bias": [[0, 100]], "stream": True})
    r("native_ignore_eos", "/completion", {**ids, "n_predict": 2, "logit_bias": [[0, 100]], "ignore_eos": True})
    seeded = {**ids, "temperature": 0.8, "top_p": 0.9, "seed": 7, "response_fields": short}
    first = r("native_seed", "/completion", seeded)["body"]["tokens"]
    r("native_seed_resent", "/completion", {**seeded, "prompt": prompt + first[:4], "n_predict": 4})
    r("native_seed_fan_out", "/completion", {**seeded, "prompt": [prompt] * 3, "n_predict": 2})
    oai = {**GREEDY, "prompt": CODE, "max_tokens": 8}
    r("completion_text", "/v1/completions", oai)
    r("completion_ids", "/v1/completions", {**oai, "prompt": prompt, "return_tokens": True})
    r("completion_ids_verbose", "/v1/completions", {**oai, "prompt": prompt, "verbose": True})
    r("completion_fan_out", "/v1/completions", {**oai, "prompt": [prompt, prompt + long[:1]], "max_tokens": 1})
    r("completion_stream", "/v1/completions", {**oai, "stream": True})
    r("completion_stream_tokens", "/v1/completions", {**oai, "stream": True, "return_tokens": True})
    r("completion_stream_usage", "/v1/completions", {**oai, "stream": True, "stream_options": {"include_usage": True}})
    r("completion_logprobs", "/v1/completions", {**oai, "max_tokens": 2, "logprobs": 2})
    r("completion_logprobs_stream", "/v1/completions", {**oai, "max_tokens": 2, "logprobs": 2, "stream": True})
    r("completion_stop", "/v1/completions", {**oai, "max_tokens": 40, "stop": ["\n"]})
    r("completion_eos", "/v1/completions", {**oai, "logit_bias": {"0": 100}})
    chat = {**GREEDY, "messages": CHAT, "max_tokens": 8}
    r("chat", "/v1/chat/completions", chat)
    r("chat_stream", "/v1/chat/completions", {**chat, "stream": True})
    r("chat_stream_tokens", "/v1/chat/completions", {**chat, "stream": True, "return_tokens": True})
    r("chat_stream_usage", "/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}})
    r("chat_stream_logprobs", "/v1/chat/completions",
      {**chat, "max_tokens": 3, "stream": True, "logprobs": True, "top_logprobs": 1})
    r("chat_eos", "/v1/chat/completions", {**chat, "logit_bias": {"0": 100}})
    r("chat_end_token_is_eos_too", "/v1/chat/completions", {**chat, "logit_bias": {"4": 100}, "verbose": True})
    r("completion_verbose_tokens", "/v1/completions", {**oai, "max_tokens": 2, "verbose": True, "return_tokens": True})
    r("completion_stream_verbose", "/v1/completions", {**oai, "max_tokens": 2, "verbose": True, "stream": True})
    r("chat_verbose_tokens", "/v1/chat/completions",
      {**chat, "max_tokens": 2, "verbose": True, "return_tokens": True})
    r("chat_stream_verbose", "/v1/chat/completions", {**chat, "max_tokens": 2, "verbose": True, "stream": True})
    r("native_stream_fields", "/completion", {**ids, "n_predict": 2, "stream": True, "response_fields": short})
    errors(r, oai, chat)
    r("error_native_too_long", "/completion", {**ids, "prompt": [9] * 2100})
    r("error_native_wrong_type", "/completion", {**ids, "n_predict": "many"})
    r("error_native_token_out_of_range", "/completion", {**ids, "prompt": [999999]})
    r("error_echo", "/v1/completions", {**oai, "echo": True})
    r("slots_full", "/slots?fail_on_no_slot=1")
    r("metrics", "/metrics", keep=r"^llamacpp:")


def house(name, url, folder):
    """Each engine's report of an operator's defaults: the source of the effective sampling."""
    def r(case, path, body=None):
        return record(folder, url, case, "POST" if body is not None else "GET", path, body)

    if name == "llama":
        r("house_props", "/props")
        r("house_completion", "/v1/completions", {"prompt": CODE, "max_tokens": 4, "seed": 1})
        return
    prompt = json.loads(ask(url, "POST", "/tokenize", {"model": M, "prompt": CODE})[2])["tokens"]
    r("house_completion_render", "/v1/completions/render", {"model": M, "prompt": CODE, "max_tokens": 4})
    r("house_chat_render", "/v1/chat/completions/render", {"model": M, "messages": CHAT})
    r("house_chat_render_explicit", "/v1/chat/completions/render",
      {"model": M, "messages": CHAT, "temperature": 0, "repetition_penalty": 1.0, "seed": 3, "stop": ["x"]})
    r("house_completion", "/v1/completions",
      {"model": M, "prompt": CODE, "max_tokens": 8, "seed": 1, "return_token_ids": True})
    r("house_generate", "/inference/v1/generate",
      {"model": M, "token_ids": prompt, "sampling_params": {"max_tokens": 8, "seed": 1, "detokenize": False}})
    explicit = {"max_tokens": 8, "seed": 1, "detokenize": False, **engine.HOUSE}
    r("house_generate_explicit", "/inference/v1/generate",
      {"model": M, "token_ids": prompt, "sampling_params": explicit})
    chat = {"model": M, "messages": CHAT, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    r("house_chat", "/v1/chat/completions", chat)
    r("house_chat_stream", "/v1/chat/completions", {**chat, "stream": True})


# texts that a request's grammar forces on any model
THOUGHT = "Let me see[.]\\n</think>\\n\\nIt is an end of a line[.]"
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'
TOOL = {"name": "weather", "description": "Weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def parsers(url, folder):
    """A text through vLLM's parsers of reasoning and of tool calls: whole, streamed, with ids."""
    chat = {**GREEDY, "messages": CHAT, "max_tokens": 90}
    tools = {"tools": [{"type": "function", "function": TOOL}]}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    cases = {"cut": {"max_tokens": 8},
             "thought": {"structured_outputs": {"regex": THOUGHT}},
             "tools_unused": {**tools, "structured_outputs": {"regex": THOUGHT}},
             "call": {**tools, "structured_outputs": {"regex": "I look[.]\\n</think>\\n\\nLook:\\n" + CALL}},
             "calls": {**tools, "structured_outputs": {"regex": "I look[.]\\n</think>\\n\\n" + CALL + "\\n" + CALL}},
             "named": {**tools, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
             "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": {
                 "type": "object", "properties": {"is": {"enum": [True]}}, "required": ["is"],
                 "additionalProperties": False}}}}}
    ways = {"": {}, "_ids": {"return_token_ids": True}, "_stream": {"stream": True},
            "_stream_ids": {"stream": True, "return_token_ids": True}, "_stream_usage": {"stream": True, **usage}}
    for case, fields in cases.items():
        for way, more in ways.items():
            record(folder, url, f"parsers_{case}{way}", "POST", "/v1/chat/completions", {**chat, **fields, **more})


def main():
    for name in sys.argv[1:] or engine.ENGINES:
        folder = GOLDENS / {"llama": "llamacpp", "vllm": "vllm"}[name]
        log = engine.CACHE / "engines" / f"record-{name}.log"
        with engine.start(name, "plain", engine.free_port(), log) as server:
            {"llama": llama, "vllm": vllm}[name](server.url, folder)
        with engine.start(name, "house", engine.free_port(), log) as server:
            house(name, server.url, folder)
        if name == "vllm":
            with engine.start(name, "parsers", engine.free_port(), log) as server:
                parsers(server.url, folder)


if __name__ == "__main__":
    main()
