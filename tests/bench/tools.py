#!/usr/bin/env python3
"""Streams of tool calls for `foretell-lab drafters`, from published questions and answers.

    tools.py --data DIR --tokenizer FILE [--form arguments|parameters] [--compact] [--count N] > tools.jsonl

DIR is the folder `bfcl_eval/data` of the package bfcl-eval 2026.3.23 (Berkeley Function Calling
Leaderboard, Apache-2.0), unpacked: `pip download --no-deps bfcl-eval==2026.3.23 && unzip
bfcl_eval-*.whl 'bfcl_eval/data/*'`.

Of each of its single-turn sets, the first N questions with several tools or several right calls.
The prompt has the form in which chat templates write tools into it (`arguments`: one line a tool
between <tools> and </tools>, as Hermes and Qwen; `parameters`: indented, as Llama 3.1). The output
is the set's own right answer, every argument with its first right value, optional arguments left
out. No model wrote it: it measures a drafter's gain for a model that answers correctly, in the
keys' order of the set and with JSON formatted as by Python (`--compact`: without spaces).

    tools.py --asked FILE --server URL [--count N] > tools.jsonl

The same from a model: N questions of FILE (`prompts/bfcl.jsonl` of `make real-models`), spread over
the whole set, with their tools in the prompt by the chat template of the llama-server at URL, and
the tokens that its model writes at temperature 0, right or wrong.
"""

import argparse
import json
import pathlib
import sys
import urllib.request

import bfcl
import real_prompts
import tokenizers

MOST = 160  # tokens that a model may write
SETS = ("live_multiple", "multiple", "parallel_multiple", "parallel", "live_parallel_multiple")
TEMPLATES = {
    "arguments": (
        "<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
        "You may call one or more functions. Their signatures are within <tools></tools> XML tags:\n<tools>\n{tools}\n"
        "</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n{form}\n\n{question}\n",
    ),
    "parameters": (
        "{{\"name\": function name, \"parameters\": dictionary of argument name and its value}}.",
        "Given the following functions, please respond with a JSON for a function call with its proper arguments.\n\n"
        "Respond in the format {form}Do not use variables.\n\n{tools}\n\n{question}\n",
    ),
}


def streams(data, sets, count):
    """Tools, question and calls."""
    for name in sets:
        taken = 0
        for asked, truth in bfcl.pairs(data, name):
            if taken == count or (len(asked["function"]) < 2 and len(truth) < 2):
                continue
            taken += 1
            question = "\n".join(message["content"] for message in asked["question"][0])
            yield [bfcl.standard(tool) for tool in asked["function"]], question, bfcl.right(truth)


def answer(url, path, body):
    """The JSON that a server answers to a call."""
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as answered:
        return json.load(answered)


def written(url, asked, count):
    """Prompts with tools, and what the model of a llama-server writes; token ids of both."""
    for case in real_prompts.spread(real_prompts.lines(asked), count):
        tools = bfcl.offered(case["function"])
        shown = answer(url, "/apply-template", {"messages": case["question"][0], "tools": tools})["prompt"]
        prompt = answer(url, "/tokenize", {"content": shown, "add_special": True, "parse_special": True})["tokens"]
        body = {"prompt": prompt, "n_predict": MOST, "temperature": 0, "return_tokens": True}
        yield {"prompt": prompt, "output": answer(url, "/completion", body)["tokens"]}


def right(args):
    """Prompts with tools, and the right calls; token ids of both."""
    tokenizer = tokenizers.Tokenizer.from_file(args.tokenizer)
    form, template = TEMPLATES[args.form]
    indent = 4 if args.form == "parameters" else None
    for tools, question, calls in streams(args.data, SETS, args.count):
        shown = "\n".join(json.dumps({"type": "function", "function": tool}, indent=indent) for tool in tools)
        prompt = template.format(tools=shown, form=form.format(), question=question)
        separators = (",", ":") if args.compact else None
        output = [json.dumps({"name": name, args.form: given}, separators=separators, ensure_ascii=False)
                  for name, given in calls]
        if args.form == "arguments":
            output = [f"<tool_call>\n{call}\n</tool_call>" for call in output]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, "\n".join(output))]
        yield {"prompt": ids[0], "output": ids[1]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--asked", type=pathlib.Path)
    parser.add_argument("--server", metavar="URL")
    parser.add_argument("--form", choices=TEMPLATES, default="arguments")
    parser.add_argument("--compact", action="store_true")
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    for stream in written(args.server, args.asked, args.count) if args.server else right(args):
        json.dump(stream, sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
