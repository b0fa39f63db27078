"""Questions of BFCL with their tools and right calls, in the form of OpenAI's API.

The Berkeley Function Calling Leaderboard as `bfcl_eval/data` has it:

single      one call, of one function or of several to choose from
parallel    several calls in one answer
multi-turn  questions one after the other, about files, tickets, orders, cars, …
forced      as single; the request forces a call
schema      as single; the answer has to be of the schema of the first function's arguments
"""

import ast
import collections
import json

SINGLE = ("simple_python", "multiple")
SETS = {"single": SINGLE, "forced": SINGLE, "schema": SINGLE, "parallel": ("parallel", "parallel_multiple"), "multi-turn": ("multi_turn_base",)}
DOCS = {"GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api", "TwitterAPI": "posting_api",
        "TicketAPI": "ticket_api", "TradingBot": "trading_bot", "TravelAPI": "travel_booking",
        "VehicleControlAPI": "vehicle_control"}
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
# tools of a multi-turn question, unless its right calls need more: a class has about 20
MOST_TOOLS = 6
RESULT = json.dumps({"status": "done"})

# tools of a request; for each turn the user's messages and the right calls, as (name, arguments)
Case = collections.namedtuple("Case", "tools turns")


def standard(schema):
    """The schema with the type names of JSON Schema."""
    if isinstance(schema, list):
        return [standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: standard(value) for key, value in schema.items()}
    kind = renamed.get("type")
    if isinstance(kind, str) and kind in TYPES:
        renamed["type"] = TYPES[kind]
    return {key: value for key, value in renamed.items() if not (key == "type" and value is None)}


def value(allowed):
    """The first right value; an object's members are lists of right values."""
    first = next((one for one in allowed if one != ""), None)
    if isinstance(first, dict):
        return {key: value(inner) for key, inner in first.items() if "" not in inner}
    if isinstance(first, list) and first and isinstance(first[0], dict):
        return [{key: value(inner) for key, inner in one.items() if "" not in inner} for one in first]
    return first


def right(truth):
    """The right calls, optional arguments left out."""
    return [(tool, {key: value(allowed) for key, allowed in arguments.items() if "" not in allowed})
            for call in truth for tool, arguments in call.items()]


def plain_name(name):
    """A function's name as the API allows it: without dots."""
    return name.replace(".", "_")


def offered(functions):
    """The functions as tools of a request."""
    return [{"type": "function", "function": {"name": plain_name(function["name"]), "description": function["description"],
                                              "parameters": standard(function["parameters"])}}
            for function in functions]


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def pairs(folder, name):
    """The questions of a set, each with its right answer."""
    for asked, answered in zip(lines(folder / f"BFCL_v4_{name}.json"), lines(folder / f"possible_answer/BFCL_v4_{name}.json")):
        yield asked, answered["ground_truth"]


def single_turn(folder, name):
    for asked, truth in pairs(folder, name):
        calls = [(plain_name(tool), arguments) for tool, arguments in right(truth)]
        yield Case(offered(asked["function"]), [(asked["question"][0], calls)])


def written(text, functions):
    """Name and arguments of a call that is written in Python."""
    call = ast.parse(text, mode="eval").body
    names = functions[call.func.id]["parameters"]["properties"]
    given = {**dict(zip(names, call.args)), **{one.arg: one.value for one in call.keywords}}
    return call.func.id, {name: ast.literal_eval(node) for name, node in given.items()}


def few(functions, needed):
    """The needed functions, and the first others up to MOST_TOOLS, in the order of the classes."""
    others = [name for name in functions if name not in needed]
    kept = needed | set(others[:max(0, MOST_TOOLS - len(needed))])
    return [function for name, function in functions.items() if name in kept]


def multi_turn(folder, name):
    docs = {kind: lines(folder / f"multi_turn_func_doc/{file}.json") for kind, file in DOCS.items()}
    for asked, truth in pairs(folder, name):
        functions = {one["name"]: one for kind in asked["involved_classes"] for one in docs[kind]}
        turns = [[written(text, functions) for text in calls] for calls in truth]
        needed = {tool for calls in turns for tool, _ in calls}
        yield Case(offered(few(functions, needed)), list(zip(asked["question"], turns)))


def bound(kind, tools):
    """Fields of a request with these tools: what binds its answer, if something does."""
    if kind == "schema":
        schema = {"name": "answer", "schema": tools[0]["function"]["parameters"]}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"tools": tools, **({"tool_choice": "required"} if kind == "forced" else {})}


def cases(folder, kind):
    """Every question of a kind."""
    read = multi_turn if kind == "multi-turn" else single_turn
    return [case for name in SETS[kind] for case in read(folder, name)]


def call(name, arguments):
    """A call in the form of Hermes."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def history(content, calls):
    """The assistant's message with calls (name, arguments as text), and a result of each."""
    ids = [f"call_{number}" for number, _ in enumerate(calls)]
    yield {"role": "assistant", "content": content,
           "tool_calls": [{"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                          for one, (name, arguments) in zip(ids, calls)]}
    for one in ids:
        yield {"role": "tool", "tool_call_id": one, "content": RESULT}
