"""Real prompts as requests: made from the files of `make real-models`, the same ones each time.

edit        HumanEval's solved functions: rename one variable and print the code again (chat)
chat        HumanEval's tasks as questions to an assistant (chat)
completion  HumanEval's tasks unchanged: the model continues the text, up to the first four of
            HumanEval's stops
talk        the first turns of MT-bench (chat)
tools       BFCL, several functions to choose from: declared as text, the call to be answered as
            JSON (chat)
calls       BFCL, single, parallel and the first turn of multi-turn questions, with `tools` in the
            request (chat), for a model that calls them
"""

import ast
import gzip
import json
import re

import bfcl

NAMES = ("edit", "chat", "completion", "talk", "tools")
CALLS = "calls"
# kinds of BFCL in CALLS
MIXED = ("single", "parallel", "multi-turn")
# what binds an answer: with `foretell target` only
BOUND = ("forced", "schema")
MOST = {"edit": 192, "chat": 128, "completion": 128, "talk": 128, "tools": 96, CALLS: 128, "forced": 128, "schema": 128}
STOPS = ["\nclass", "\ndef", "\n#", "\nif"]
NEW_NAME = "renamed_value"
TOOLS = ("You have these functions, given as JSON:\n{functions}\n\nAnswer with the calls that the question needs and nothing "
         "else, as a JSON list: [{{\"name\": …, \"arguments\": {{…}}}}]\n\nQuestion: {question}")


def spread(items, count):
    """`count` of the items, evenly spread over all of them; all if there are no more."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def lines(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


def variable(problem):
    """The most frequent argument or local variable of the solution; None if there is none."""
    code = problem["prompt"] + problem["canonical_solution"]
    function = next(node for node in ast.walk(ast.parse(code))
                    if isinstance(node, ast.FunctionDef) and node.name == problem["entry_point"])
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    count = {name: len(re.findall(rf"\b{name}\b", problem["canonical_solution"])) for name in sorted(names)}
    return max(count, key=count.get) if any(count.values()) else None


def asked(text):
    return {"route": "chat", "body": {"messages": [{"role": "user", "content": text}]}}


def edit(problem):
    code = problem["prompt"] + problem["canonical_solution"]
    return asked(f"Rename the variable `{variable(problem)}` to `{NEW_NAME}` and print the whole code again, with nothing "
                 f"else changed.\n\n```python\n{code}```")


def chat(problem):
    return asked(f"Complete this Python function. Answer with the code only.\n\n```python\n{problem['prompt']}```")


def completion(problem):
    return {"route": "completions", "body": {"prompt": problem["prompt"], "stop": STOPS}}


def talk(question):
    return asked(question["turns"][0])


def tools(case):
    functions = "\n".join(json.dumps(function) for function in case["function"])
    return asked(TOOLS.format(functions=functions, question=case["question"][0][0]["content"]))


def calls(case, kind=None):
    return {"route": "chat", "body": {"messages": case.turns[0][0], **bfcl.bound(kind, case.tools)}}


def load(folder, name, count, most=None, **fields):
    """`count` requests of a workload, in the form of sides.py; `fields` go into every body."""
    if name == "talk":
        found = [talk(question) for question in spread(lines(folder / "mt-bench.jsonl"), count)]
    elif name == "tools":
        found = [tools(case) for case in spread(lines(folder / "bfcl.jsonl"), count)]
    elif name == CALLS:
        every = [case for kind in MIXED for case in bfcl.cases(folder.parent / "bfcl", kind)]
        found = [calls(case) for case in spread(every, count)]
    elif name in BOUND:
        found = [calls(case, name) for case in spread(bfcl.cases(folder.parent / "bfcl", name), count)]
    else:
        problems = lines(folder / "human-eval.jsonl.gz")
        if name == "edit":
            problems = [problem for problem in problems if variable(problem)]
        found = [{"edit": edit, "chat": chat, "completion": completion}[name](p) for p in spread(problems, count)]
    tokens = min(MOST[name], most or MOST[name])
    return [limited(entry, tokens, **fields) for entry in found]


def limited(entry, tokens, **fields):
    """The request at temperature 0 for so many tokens, with the `fields` in its body."""
    return {**entry, "body": {**entry["body"], "max_tokens": tokens, "temperature": 0, **fields}}


def mixed(folder, most=None, **fields):
    """Every prompt, one of each workload in turn."""
    every = [load(folder, name, 10_000, most, **fields) for name in NAMES]
    longest = max(map(len, every))
    return [one[index] for index in range(longest) for one in every if index < len(one)]
