#!/usr/bin/env python3
"""Records what vLLM's own output parsers say: tests/goldens/parsers/PAIR.json.

    VLLM/bin/python tests/engines/parsers.py [PAIR]...        offline, on the processor, without weights

Runs inside a virtual environment of vLLM. A pair is a tool parser and a reasoning parser. Each case is an
output as tokens of a small tokenizer (TOKENIZER: a folder of Hugging Face files) that the markers of the
family are added to, run through the server's class `Parser` twice: token by token (`parse_delta`) and whole
(`parse`). A file is

    {"vllm", "tools_parser", "reasoning_parser", "markers": {TEXT: ID}, "special": {TEXT: ID}, "tools": [...],
     "cases": [{"name", "tools": may it call, "has_tools", "template", "prompt": [ID], "tokens": [[ID, TEXT]],
                "decode_special", "stream": {"reasoning", "content", "calls": [[NAME, ARGUMENTS, ID]], "reasoning_tokens"},
                "chunked": true where the server itself joins to something else when fed three tokens at a time,
                "whole": the same with null where the server says null; null if it fails}]}

gpt-oss has a parser that knows one vocabulary: its pairs need TIKTOKEN_ENCODINGS_BASE, a folder with the file
o200k_base.tiktoken (as the package openai_harmony reads it), and no TOKENIZER.
"""

import json
import logging
import os
import pathlib
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOKENIZER = os.environ.get("TOKENIZER", str(ROOT / ".cache/real-models/smollm2/hf"))
GOLDENS = ROOT / "tests/goldens/parsers"

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}}}
    for name, properties in [
        ("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}}),
        ("search", {"query": {"type": "string"}, "limit": {"type": ["integer", "null"]}, "exact": {"type": "boolean"},
                    "weights": {"type": "array", "items": {"type": "number"}}, "filter": {"type": "object"},
                    "score": {"type": "number"}, "any": {}}),
        ("now", {}),
    ]
]
EOS = object()
CUT = object()  # Takes the last token away.


class Raw(str):
    """Text in tokens that are no markers, even if it spells one."""


class Family:
    """Markers of a family and its calls as text."""

    def __init__(self, tools, reasoning, calls, plain=(), special=(), extra=(), cases=None, eos="<|im_end|>", opened="<|im_start|>assistant\n", think=("<think>", "</think>")):
        self.tools, self.reasoning, self.calls, self.extra = tools, reasoning, calls, extra
        self.cases, self.eos, self.opened, self.think = cases, eos, opened, think
        self.plain, self.special = list(plain), list(special)


THINK = ["<think>", "</think>"]
TOOL = ["<tool_call>", "</tool_call>"]


def hermes(name, arguments):
    return '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>' % (name, json.dumps(arguments, ensure_ascii=False))


def text(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(name, arguments):
    body = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name, arguments):
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text(value)}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{body}</tool_call>"


def kimi(name, arguments, index=0):
    return (f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
            f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>")


def minimax(name, arguments):
    body = "".join(f'<parameter name="{key}">{text(value)}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{body}</invoke>\n'


def dsml(name, arguments):
    body = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{text(value)}</｜DSML｜parameter>\n'
        for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n'


def v3(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"


def v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"


def around(start, end, one):
    def calls(*each):
        return start + "".join(one(name, arguments, i) if one is kimi else one(name, arguments)
                               for i, (name, arguments) in enumerate(each)) + end
    return calls


def lines(one):
    return lambda *each: "\n".join(one(name, arguments) for name, arguments in each)


SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = [*SECTION, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
V32 = around("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", dsml)
V4 = around("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", dsml)
H, Q, G = lines(hermes), lines(qwen3_coder), lines(glm)
K = around(*SECTION, kimi)
M = around("<minimax:tool_call>\n", "</minimax:tool_call>", minimax)
DEEPSEEK = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]
V3, V31 = around(*DEEPSEEK[:2], v3), around(*DEEPSEEK[:2], v31)
MINIMAX = ["<minimax:tool_call>", "</minimax:tool_call>"]

W = ("get_weather", {"city": "Paris", "days": 3})

HERMES_EXTRA = [
    ("name_last", ['<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', EOS]),
    ("two_on_a_line", ['<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b","arguments":{"k":[{}]}}</tool_call>', EOS]),
    ("string_arguments", ['<tool_call>{"name": "f", "arguments": "plain \\"text\\""}</tool_call>', EOS]),
    ("null_arguments", ['<tool_call>{"name": "f", "arguments": null}</tool_call>', EOS]),
    ("no_arguments", ['<tool_call>{"name": "f"}</tool_call>', EOS]),
    ("no_name", ['<tool_call>{"arguments": {}}</tool_call><tool_call>{"name":"b","arguments":{}}</tool_call>', EOS]),
    ("spaces", ['<tool_call>  {  "name"  :  "f" ,\n "arguments"  :  { "x" : [ 1 , 2 ] }  }  </tool_call>  ', EOS]),
    ("numbers", ['<tool_call>{"name": "f", "arguments": {"a": 1.0, "b": 1e5, "c": 1E+22, "d": 0.00001, "e": -0, "f": -0.0, '
                 '"g": 123456789012345678901234567890, "h": 1e999, "i": NaN, "j": 3.14e-7, "k": 1e16, "l": 123456789.125}}</tool_call>', EOS]),
    ("duplicate_keys", ['<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2, "a": 3}, "name": "g"}</tool_call>', EOS]),
    ("escapes", ['<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\n\\t\\u0001\\/\\ud83d\\ude00", "b\\"": "\\\\"}}</tool_call>', EOS]),
    ("unsure_surrogate", ['<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', EOS]),
    ("broken_json", ['<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', EOS]),
    ("closed_too_often", ['<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', EOS]),
    ("not_closed", ['<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', EOS]),
    ("no_end_marker", ['<tool_call>{"name": "f", "arguments": {"a": {"b": 1}}}', EOS]),
    ("cut_after_name", ['<tool_call>{"name": "f"']),
    ("cut_in_end_marker", ['<tool_call>{"name": "f", "arguments": {"a": 1}}', Raw("</tool")]),
    ("cut_in_name", ['<tool_call>{"name": "get_wea']),
    ("marker_in_plain_tokens", ["a ", Raw('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'), EOS]),
    ("marker_in_a_string", ['<tool_call>{"name": "f", "arguments": {"a": "', Raw("</tool_call"), ' and <x>"}}</tool_call>', EOS]),
    ("braces_in_a_string", ['<tool_call>{"name": "f", "arguments": {"a": "}}{{", "b": "\\"}"}}</tool_call>', EOS]),
    ("name_in_the_arguments", ['<tool_call>{"arguments": {"name": "inner"}, "name": "outer"}</tool_call>', EOS]),
    ("array", ['<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', EOS]),
    ("deep", ['<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}</tool_call>", EOS]),
    ("empty_call", ["a<tool_call></tool_call>b", EOS]),
    ("number_name", ['<tool_call>{"name": 1, "arguments": {}}</tool_call>', EOS]),
]
QWEN3_EXTRA = [
    ("no_newlines", ["<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>", EOS]),
    ("no_wrapper", ["a <function=search><parameter=query>x</parameter></function> b", EOS]),
    ("parameter_not_closed", ["<tool_call>\n<function=search>\n<parameter=query>\nx\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>", EOS]),
    ("types", [Q(("search", {"query": "12", "limit": "null", "exact": "True", "weights": "[1, 2.5, 1e3]", "filter": '{"a": {"b": [1]}}',
                             "score": "4.0", "any": "7"})), EOS]),
    ("types_that_fail", [Q(("search", {"limit": "many", "exact": "maybe", "weights": "[1, ", "filter": "{x}", "score": "inf"})), EOS]),
    ("underscores", [Q(("search", {"limit": " 1_000 ", "score": "1_0.5"})), EOS]),
    ("enumeration", [Q(("get_weather", {"unit": "c", "days": "03"})), EOS]),
    ("json_inside", ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', EOS]),
    ("name_not_closed", ["<tool_call><function=search</function></tool_call>", EOS]),
    ("comparison_in_value", ["<tool_call>\n<function=search>\n<parameter=query>\nif a < b and b > c: </x>\n</parameter>\n</function>\n</tool_call>", EOS]),
    ("cut_in_value", ["<tool_call>\n<function=search>\n<parameter=query>\nlong text that"]),
    ("cut_in_name", ["<tool_call>\n<function=get_we"]),
    ("cut_after_parameter", ["<tool_call>\n<function=search>\n<parameter=query>\nx\n</parameter>\n"]),
    ("marker_in_plain_tokens", ["a ", Raw("<tool_call>\n<function=search>\n</function></tool_call>"), EOS]),
    ("end_in_plain_tokens", ["<tool_call>\n<function=search>\n</function>", Raw("</tool_call>"), " b", EOS]),
    ("two_functions_in_one", ["<tool_call>\n<function=now>\n</function>\n<function=search>\n<parameter=query>x</parameter></function></tool_call>", EOS]),
    ("no_name", ["<tool_call><function=></function></tool_call>", EOS]),
    ("empty_call", ["<tool_call></tool_call> text", Q(W), EOS]),
    ("call_not_ended", ["<tool_call><function=now></function><tool_call><function=now></function></tool_call>", EOS]),
    ("call_not_ended_without_function", ["<tool_call><function=now></function><tool_call></tool_call><function=now></function>", EOS]),
    ("special_inside", ["a<|im_start|>b", Q(W), EOS]),
]
GLM_EXTRA = [
    ("no_newlines", ["<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", EOS]),
    ("types", [G(("search", {"query": "12", "limit": "5", "exact": "true", "weights": "[1,2]", "score": "1.50"})), EOS]),
    ("key_without_value", ["<tool_call>search<arg_key>query</arg_key></tool_call>", EOS]),
    ("cut_in_value", ["<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>long te"]),
    ("cut_in_key", ["<tool_call>search\n<arg_key>que"]),
    ("value_not_closed", ["<tool_call>search\n<arg_key>query</arg_key><arg_value>x</tool_call>", EOS]),
    ("think_again", ["a<think>b</think>c", EOS]),
    ("special_inside", ["a<|im_start|>b", G(W), EOS]),
]
KIMI_EXTRA = [
    ("no_index", [SECTION[0], '<|tool_call_begin|>get_weather<|tool_call_argument_begin|>{"city": "x"}<|tool_call_end|>', SECTION[1], EOS]),
    ("plain_name", [SECTION[0], '<|tool_call_begin|> get_weather:3 <|tool_call_argument_begin|> {"city": "x"} <|tool_call_end|>', SECTION[1], EOS]),
    ("section_ends_call", [SECTION[0], '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}', SECTION[1], " x", EOS]),
    ("cut_in_arguments", [SECTION[0], '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "a}']),
    ("cut_in_name", [SECTION[0], "<|tool_call_begin|>functions.sea"]),
    ("broken_json", [SECTION[0], "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{]x}}<|tool_call_end|>", SECTION[1], EOS]),
    ("no_arguments", [SECTION[0], "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>", SECTION[1], EOS]),
    ("outside_a_section", ['a<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>b', EOS]),
]
MINIMAX_EXTRA = [
    ("single_quotes", ["<minimax:tool_call><invoke name='search'><parameter name='query'>x</parameter></invoke></minimax:tool_call>", EOS]),
    ("no_quotes", ["<minimax:tool_call><invoke name=search><parameter name=query>x</parameter></invoke></minimax:tool_call>", EOS]),
    ("no_wrapper", ['a <invoke name="search"><parameter name="query">x</parameter></invoke> b', EOS]),
    ("types", [M(("search", {"query": "12", "limit": "5", "exact": "false", "weights": "[1]"})), EOS]),
    ("cut_in_value", ['<minimax:tool_call><invoke name="search"><parameter name="query">a > b']),
    ("two_sections", [M(W), "\n", M(("now", {})), EOS]),
    ("empty_call", ["<minimax:tool_call></minimax:tool_call> text", EOS]),
    ("stray_end", ["a </minimax:tool_call> b", EOS]),
]


def dsml_extra(calls):
    start, end = calls().split("\n")
    return [
        ("types", [calls(("search", {"query": "12", "limit": 5, "exact": True, "weights": [1, 2.0], "filter": {"a": None}})), EOS]),
        ("no_attribute", [start, '<｜DSML｜invoke name="search"><｜DSML｜parameter name="query">x y</｜DSML｜parameter></｜DSML｜invoke>', end, EOS]),
        ("wrapped", [calls(("search", {"arguments": {"query": "x", "limit": 2}})), EOS]),
        ("wrapped_text", [calls(("search", {"input": '{"query": "x"}'})), EOS]),
        ("no_section", ['a <｜DSML｜invoke name="now"></｜DSML｜invoke> b', EOS]),
        ("cut_in_value", [start, '<｜DSML｜invoke name="search"><｜DSML｜parameter name="query" string="true">a > b and more']),
        ("cut_in_number", [start, '<｜DSML｜invoke name="search"><｜DSML｜parameter name="limit" string="false">12']),
        ("section_ends_call", [start, '<｜DSML｜invoke name="search"><｜DSML｜parameter name="query" string="true">x</｜DSML｜parameter>', end, " y", EOS]),
        ("section_ends_call_and_more", [start, '<｜DSML｜invoke name="search">', end, '<｜DSML｜invoke name="now"></｜DSML｜invoke>', EOS]),
        ("text_between_calls", [start, '<｜DSML｜invoke name="now"></｜DSML｜invoke> x <｜DSML｜invoke name="now"></｜DSML｜invoke> y', end, EOS]),
        ("toolcalls", ["a ", calls(W).replace("tool_calls>", "toolcalls>", 1), EOS]),
        ("tool", ["a ", calls(W).replace("tool_calls>", "tool>", 1), EOS]),
    ]


def deepseek_extra(calls):
    section, section_end, start, end, sep = DEEPSEEK
    body = calls(W).removeprefix(section + start).removesuffix(end + section_end)
    return [
        ("three_calls", [calls(("now", {}), W, ("search", {"query": "a\nb"})), EOS]),
        ("newline_in_arguments", [calls(W).replace(", ", ",\n"), EOS]),
        ("text_between_calls", [section, start, body, end, " x ", start, body, end, " y", section_end, " z", EOS]),
        ("no_call", ["a ", section, " b ", section_end, " c", EOS]),
        ("no_section", ["a ", start, body, end, EOS]),
        ("not_ended", ["a ", section, start, body, EOS]),
        ("section_ends_call", [section, start, body, section_end, EOS]),
        ("empty_arguments_then_call", [section, start, body.split("{")[0], end, start, body, end, section_end, EOS]),
        ("two_separators", [section, start, body.replace(sep, sep + "x" + sep, 1), end, section_end, EOS]),
        ("ends_twice", [section, start, body, end, end, " x ", start, body, end, section_end, EOS]),
        ("starts_twice", [section, start, start, body, end, section_end, EOS]),
        ("backticks", [calls(("search", {"query": "```x``"})), EOS]),
        ("plain_section", [Raw(section), start, body, end, EOS]),
        ("other_type", [calls(W).replace("function", "tool"), EOS]),
        ("cut_in_name", [section, start, "funct"]),
        ("cut_in_arguments", [section, start, body[:-8]]),
    ]


def llama(name, arguments):
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


L = lambda *each: "; ".join(llama(*one) for one in each)  # noqa: E731
LLAMA_EXTRA = [
    ("python_tag", ["<|python_tag|>", L(W), EOS]),
    ("arguments", ['{"name": "f", "arguments": {"a": "b"}}', EOS]),
    ("type_first", ['{"type": "function", "name": "f", "parameters": {"a": "b"}}', EOS]),
    ("name_last", ['{"parameters": {"a": "b"}, "name": "f"}', EOS]),
    ("three_calls", [L(W, ("now", {}), ("search", {"query": "}; {"})), EOS]),
    ("spaces", ['{ "name" : "f" ,\n "parameters" : { "x" : [ 1 , 2 ] } }\n', EOS]),
    ("escapes", ['{"name": "f", "parameters": {"a": "\\u00e9\\n\\ud83d\\ude00 \\"", "b": ["", "\\\\"]}}', EOS]),
    ("literals", ['{"name": "f", "parameters": {"a": true, "b": [null, false], "c": -12.5, "d": {"e": {}}}}', EOS]),
    ("space_first", [' {"name": "f", "parameters": {"a": 1}}', EOS]),
    ("adjacent", ['{"name": "f", "parameters": {"a": 1}}{"name": "g", "parameters": {"a": 1}}', EOS]),
    ("unsure_exponent", ['{"name": "f", "parameters": {"a": 120e-2}}', EOS]),
    ("unsure_duplicate", ['{"name": "f", "parameters": {"a": 1, "b": 2, "a": 3}}', EOS]),
    ("unsure_text_after", ['{"name": "f", "parameters": {"a": 1}} and more {}', EOS]),
    ("unsure_both", ['{"name": "f", "parameters": {"a": 1}, "arguments": {}}', EOS]),
    ("unsure_no_name", ['{"parameters": {"a": 1}}', EOS]),
    ("unsure_broken", ['{"name": "f", "parameters": {"a": 1,}}', EOS]),
    ("unsure_cut", ['{"name": "f", "parameters": {"a": "long te']),
    ("unsure_cut_in_name", ['{"name": "fo']),
]


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


MISTRAL = lambda *each: "".join(mistral(*one) for one in each)  # noqa: E731
MISTRAL_TOOL, MISTRAL_THINK = ["[TOOL_CALLS]", "[ARGS]"], ("[THINK]", "[/THINK]")
MISTRAL_EXTRA = [
    ("no_separator", ['[TOOL_CALLS]get_weather{"city": "Paris", "filter": {"a": {}}}', EOS]),
    ("no_separator_twice", ['a[TOOL_CALLS]now{}[TOOL_CALLS]search{"query": "x"}', EOS]),
    ("spaces", ['[TOOL_CALLS] get_weather [ARGS] { "city" : "x" } \n', EOS]),
    ("spaces_without_separator", ['[TOOL_CALLS] get_weather \n{ "city" : "x" } \n', EOS]),
    ("no_name", ['[TOOL_CALLS][ARGS]{"a": 1}', EOS]),
    ("no_name_nor_separator", ['[TOOL_CALLS]{"name": "f", "arguments": {}}', EOS]),
    ("blank_name", ['[TOOL_CALLS] [ARGS]{"a": 1}', EOS]),
    ("nothing", ["a[TOOL_CALLS]", EOS]),
    ("nothing_but_separator", ["a[TOOL_CALLS][ARGS]", EOS]),
    ("nothing_twice", ["[TOOL_CALLS][TOOL_CALLS]now[ARGS]{}", EOS]),
    ("nothing_in_arguments", ["[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS] [TOOL_CALLS]now[ARGS]{}", EOS]),
    ("name_alone", ["[TOOL_CALLS]now", EOS]),
    ("list", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', EOS]),
    ("list_of_two", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', EOS]),
    ("name_in_the_arguments", ['[TOOL_CALLS]search[ARGS]{"name": "inner"}', EOS]),
    ("other_arguments", ['[TOOL_CALLS]search[ARGS][1, 2] x[TOOL_CALLS]search[ARGS]12 x[TOOL_CALLS]search[ARGS]"a" "b"', EOS]),
    ("broken_json", ['[TOOL_CALLS]search[ARGS]{"query": "x",} y', EOS]),
    ("separator_twice", ['[TOOL_CALLS]search[ARGS][ARGS]{"query": "x"}', EOS]),
    ("separator_in_text", ['a [ARGS] {b} ', MISTRAL(W), EOS]),
    ("separator_in_a_string", ['[TOOL_CALLS]search[ARGS]{"query": "a [ARGS] b"}', EOS]),
    ("marker_in_a_string", ['[TOOL_CALLS]search[ARGS]{"query": "', Raw("[TOOL_CALLS]x[ARGS]"), ' {[}]"}', EOS]),
    ("marker_in_plain_tokens", ["a ", Raw('[TOOL_CALLS]now[ARGS]{}'), EOS]),
    ("separator_in_plain_tokens", ["[TOOL_CALLS]now", Raw("[ARGS]"), "{}", EOS]),
    ("half_a_marker", ["text ", Raw("[TOOL_C")]),
    ("bracket_at_the_end", ["a [", EOS]),
    ("types", [MISTRAL(("search", {"query": "12", "limit": "5", "exact": "true", "weights": ["1"], "score": 2})), EOS]),
    ("numbers", ['[TOOL_CALLS]frob[ARGS]{"a": 1E5, "b": -0, "c": 1.50}', EOS]),
    ("cut_in_name", ["[TOOL_CALLS]get_wea"]),
    ("cut_in_value", ['[TOOL_CALLS]search[ARGS]{"query": "long te']),
    ("cut_at_the_separator", ["[TOOL_CALLS]search[ARGS]"]),
    ("special_inside", ["a<|im_start|>b", MISTRAL(W), "<|im_start|>", EOS]),
    ("brace_in_text", ["a { b } c {", EOS]),
    ("unsure_deep", ["[TOOL_CALLS]search[ARGS]" + "[" * 300 + "]" * 300, EOS]),
    ("unsure_surrogate", ['[TOOL_CALLS]search[ARGS]{"query": "\\ud800"}', EOS]),
]


MISTRAL_W = json.dumps([{"name": W[0], "arguments": W[1]}])


def mistral_list(*each):
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in each], ensure_ascii=False)


MISTRAL_LIST_EXTRA = [
    ("compact", ['[TOOL_CALLS][{"name":"f","arguments":{"a":{"b":[]},"c":"}]{["}},{"name":"g","arguments":{}}]', EOS]),
    ("spaces", ['[TOOL_CALLS] [ { "name" : "f" , "arguments" : { "a" : [ 1 , 2 ] } } , {"name" : "g" ,\n"arguments" : {} } ] \n', EOS]),
    ("colon_apart", ['[TOOL_CALLS][{"name', Raw('"'), Raw(": "), '"f", "arguments', Raw('"'), Raw(": "), "{}}]", EOS]),
    ("bare", ['a[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}} b {c}', EOS]),
    ("no_arguments_field", ['[TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": {}}]', EOS]),
    ("string_arguments", ['[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9}\\"}"}]', EOS]),
    ("empty_name", ['[TOOL_CALLS][{"name": "", "arguments": {}}]', EOS]),
    ("escapes", ['[TOOL_CALLS][{"name": "f\\u00e9,]}", "arguments": {"a": "\\u00e9\\n\\ud83d\\ude00 \\"", "b\\\\": ""}}]', EOS]),
    ("numbers", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1E5, "b": -0, "c": [1.50, true, null, false, -1e-2]}}]', EOS]),
    ("duplicate_keys", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "a": 2}}]', EOS]),
    ("marker_twice", ["[TOOL_CALLS][TOOL_CALLS]", MISTRAL_W, EOS]),
    ("marker_again", ["a[TOOL_CALLS]", MISTRAL_W, " b [TOOL_CALLS]", MISTRAL_W, " c", EOS]),
    ("marker_between", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, [TOOL_CALLS]{"name": "g", "arguments": {"a": 1}}]', EOS]),
    ("marker_in_plain_tokens", ["a ", Raw("[TOOL_CALLS]"), MISTRAL_W, EOS]),
    ("marker_in_a_string", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "', Raw("[TOOL_CALLS]"), '"}}]', EOS]),
    ("nothing", ["a[TOOL_CALLS]", EOS]),
    ("nothing_but_text", ["a[TOOL_CALLS] ", EOS]),
    ("half_a_marker", ["text ", Raw("[TOOL_C")]),
    ("special_inside", ["a<|im_start|>b[TOOL_CALLS]", MISTRAL_W, EOS]),
    ("cut_in_name", ['[TOOL_CALLS][{"name": "get_wea']),
    ("cut_in_arguments", ['[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Par']),
    ("cut_after_arguments", ['[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}']),
    ("cut_between", ['[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, ']),
    ("unsure_new_form", ['[TOOL_CALLS]search{"query": "x"}', EOS]),
    ("unsure_text", ["[TOOL_CALLS] text", EOS]),
    ("unsure_text_before", ['[TOOL_CALLS] text [{"name": "f", "arguments": {"a": 1}}] more', EOS]),
    ("unsure_empty_list", ["a[TOOL_CALLS][]", EOS]),
    ("unsure_other_list", ['a[TOOL_CALLS][1, {"x": 1}, {"name": "f", "arguments": [1]}]', EOS]),
    ("unsure_broken_json", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 1,}}] x', EOS]),
    ("unsure_broken_word", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": nun}}] x', EOS]),
    ("unsure_broken_number", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": 01}}] x', EOS]),
    ("unsure_newline_in_a_string", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "x\ny"}}] x', EOS]),
    ("unsure_name_last", ['[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', EOS]),
    ("unsure_no_name", ['[TOOL_CALLS][{"arguments": {"a": 1}}]', EOS]),
    ("unsure_other_name", ['[TOOL_CALLS][{"name": 1, "arguments": {"a": 1}}]', EOS]),
    ("unsure_null_arguments", ['[TOOL_CALLS][{"name": "f", "arguments": null}]', EOS]),
    ("unsure_other_field", ['[TOOL_CALLS][{"id": "a", "name": "f", "arguments": {}}]', EOS]),
    ("unsure_surrogate", ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "\\ud800"}}]', EOS]),
]


def harmony(channel, text, end="<|end|>", start="<|start|>assistant"):
    """A message; the first of an output has its start in the prompt."""
    return f"{start}<|channel|>{channel}<|message|>{text}{end}"


def harmony_call(name, arguments, end="<|call|>", start="<|start|>assistant"):
    return harmony(f"commentary to=functions.{name} <|constrain|>json", json.dumps(arguments, ensure_ascii=False), end, start)


def harmony_cases(_family):
    first, message, call = {"start": ""}, harmony, harmony_call
    think = message("analysis", "hm, let me see\n", **first)
    final = lambda text, **how: message("final", text, "", **how)  # noqa: E731
    body = json.dumps(W[1])
    for name, parts in [
        ("content", [final("Hello there, how are you?", **first), EOS]),
        ("reasoning_content", [think, final("The answer."), EOS]),
        ("reasoning_call", [think, call(*W)]),
        ("one_call", [call(*W, **first)]),
        ("two_calls", [think, call(*W, end="<|end|>"), call("search", {"query": "rust", "limit": 2})]),
        ("two_calls_ended_by_call", [call(*W, **first), call("search", {"query": "rust"})]),
        ("same_function_twice", [call(*W, end="<|end|>", **first), call(*W)]),
        ("content_then_call", [think, message("commentary", "I will look.\n\n"), call(*W)]),
        ("call_then_text", [call(*W, **first), final("Done."), EOS]),
        ("text_after_the_end", [call(*W, **first), " and more", EOS]),
        ("two_reasonings", [think, message("analysis", "more"), final("a"), EOS]),
        ("two_contents", [final("a", **first), "<|end|>", final("b"), EOS]),
        ("empty_messages", [message("analysis", "", **first), message("commentary", ""), final(""), EOS]),
        ("nested", [call("search", {"query": "a", "filter": {"x": [1, {"y": None}], "z": "w"}, "weights": [0.5, 1]}, **first)]),
        ("unicode", [message("analysis", "Ça va 👩‍👩‍👧? ", **first), call("search", {"query": "Zürich 🎉 — 日本\n\t\"x\" \\ {}[]\x7f"})]),
        ("markers_in_strings", [message("commentary to=functions.search <|constrain|>json", "", "", **first),
                                Raw('{"query": "a <|end|> b <|call|> <|channel|>final<|message|>"}'), "<|call|>"]),
        ("markers_in_plain_tokens", [Raw("<|channel|>final<|message|>a<|end|>"), final("b", **first), EOS]),
        ("half_a_marker", [think, final("text "), Raw("<|en")]),
        ("special_inside", [final("a<|channel|>b<|start|>c<|message|>d<|constrain|>", **first), "e<|startoftext|><|reserved_200010|>", EOS]),
        ("end_of_text", [final("a", **first), "<|endoftext|>"]),
        ("no_arguments", [call("now", {}, **first)]),
        ("empty_arguments", [message("commentary to=functions.now", "", "<|call|>", **first)]),
        ("unknown_function", [call("frobnicate", {"x": 1}, **first)]),
        ("cut_in_call", [think, call(*W)[:-30]]),
        ("cut_in_reasoning", [think.removesuffix("<|end|>")]),
        ("cut_in_content", [think, final("The ans")]),
        ("cut_after_reasoning", [think]),
        ("cut_in_a_header", [think, "<|start|>assistant<|channel|>fin"]),
        ("cut_in_a_call_header", [think, "<|start|>assistant<|channel|>commentary to=functions.get_w"]),
        ("cut_in_the_first_header", ["<|channel|>anal"]),
        ("cut_at_a_message", [think, "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>"]),
        ("plain_text", ["just text", EOS]),
        ("plain_text_cut", ["just Zürich 🎉 text"]),
        ("half_a_character", [final("so 🎉🎊", **first), EOS]),
        ("unsure_half_at_the_end", [final("so 🎉", **first), CUT]),
        ("unsure_half_in_a_message", [message("analysis", "so 🎉", "", **first), CUT, "<|end|>", final("a"), EOS]),
        ("unsure_half_before_text", [final("so 🎉", **first), CUT, "text", EOS]),
        ("unsure_half_in_a_header", ["<|channel|>🎉", CUT, "<|message|>a", EOS]),
        ("empty", [EOS]),
        ("spaces_only", [final("\n\n", **first), EOS]),
        ("no_channel", ["<|message|>a<|end|>", final("b"), EOS]),
        ("other_channel", [message("thoughts", "a", **first), final("b"), EOS]),
        ("channel_without_a_name", ["<|channel|><|message|>a<|end|>", final("b"), EOS]),
        ("two_channels", ["<|channel|>analysis<|channel|>final<|message|>a<|end|>", final("b"), EOS]),
        ("three_channels", ["<|channel|>commentary x<|channel|>final to=functions.now<|channel|><|message|>{}<|end|>", final("b"), EOS]),
        ("long_header", ["<|channel|>a b c d<|message|>x<|end|>", final("b"), EOS]),
        ("long_header_then_cut", ["<|channel|>a b c d<|message|>x<|end|>", "<|start|>assistant<|channel|>fi"]),
        ("recipient_last", ["<|channel|>commentary x to=functions.now<|message|>{}<|end|>", final("b"), EOS]),
        ("recipient_first", [f" to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{body}<|call|>"]),
        ("recipient_in_analysis", [message("analysis to=functions.get_weather code", body, "<|call|>", **first)]),
        ("recipient_in_final", [message("final to=functions.get_weather", body, "<|call|>", **first)]),
        ("recipient_without_to", [message("commentary functions.get_weather <|constrain|>json", body, "<|call|>", **first)]),
        ("recipient_without_namespace", [message("commentary to=get_weather<|constrain|>json", body, "<|call|>", **first)]),
        ("recipient_of_no_function", [message("commentary to=functions.", "a", **first), message("commentary to=", "b"), final("c"), EOS]),
        ("recipient_of_assistant", [message("commentary to=assistant", "a", **first), message("analysis to=assistant", "b"), final("c"), EOS]),
        ("recipient_built_in", [message("analysis to=python code", "1 + 1", **first), message("commentary to=browser.search", "{}"),
                                message("commentary to=container", "a"), message("final to=python", "c"), message("commentary to=pythonic", "{}")]),
        ("recipient_all", [message("commentary to=all", "a", **first), final("b"), EOS]),
        ("constrained_content", [message("final <|constrain|>json", '{"a": 1}', "", **first), EOS]),
        ("constrained_commentary", [message("commentary <|constrain|>json", '{"a": 1}', **first), message("commentary<|constrain|> json", "b"), EOS]),
        ("constrained_twice", [message("commentary to=functions.now<|constrain|>a <|constrain|>json", "{}", **first), final("b"), EOS]),
        ("start_twice", ["<|start|>assistant", final("a", **first), EOS]),
        ("role_twice", [final("a", **first), "<|end|>", final("b", start="<|start|>assistant assistant"), EOS]),
        ("other_roles", [final("a", **first), "<|end|>", message("final", "b", start="<|start|>user"), message("final", "c", start="<|start|>tool"),
                         message("commentary to=functions.now", "{}", start="<|start|>system"), message("analysis", "d", start="<|start|>developer")]),
        ("role_of_a_tool", [final("a", **first), "<|end|>", message("commentary", "b", start="<|start|>functions.now to=assistant"),
                            message("final", "c", start="<|start|>to=x"), message("final", "d", start="<|start|>x"), final("e"), EOS]),
        ("no_role", [final("a", **first), "<|end|>", message("final", "b", start="<|start|>"), final("c"), EOS]),
        ("role_after_an_error", ["<|channel|><|message|>a<|end|>", final("b"), "<|end|>", final("c", start="<|start|>"), EOS]),
        ("start_inside_a_header", ["<|channel|>final<|start|>assistant<|message|>a", EOS]),
        ("end_inside_a_header", ["<|channel|>final<|end|>", final("b"), EOS]),
        ("json_spaces", [message("commentary to=functions.search json", '{ "query" : "é" ,\n "limit" : [ 1E5 , -0 ] }\n', "<|call|>", **first)]),
        ("json_escapes", [message("commentary to=functions.search json", '{"a": "\\u00e9\\ud83d\\ude00\\/", "a": 1}', "<|call|>", **first)]),
        ("json_broken", [message("commentary to=functions.search <|constrain|>json", '{"query": "é",}', "<|call|>", **first)]),
        ("no_json", [message("commentary to=functions.search <|constrain|>text", '{ "query": 1 }', "<|call|>", **first)]),
        ("unsure_surrogate", [message("commentary to=functions.search json", '{"a": "\\ud800"}', "<|call|>", **first)]),
        ("unsure_deep", [message("commentary to=functions.search json", "[" * 300 + "]" * 300, "<|call|>", **first)]),
    ]:
        yield name, parts, {}
    for tools in ("none", "absent"):
        for name, parts in [("call", [think, call(*W)]), ("content", [think, final("a"), EOS]), ("all", [call(*W, **first), think, final("b"), EOS])]:
            yield f"{name}_{tools}", parts, {"tools": tools}


PAIRS = {
    "mistral": Family("mistral", None, MISTRAL, special=MISTRAL_TOOL, extra=MISTRAL_EXTRA, think=MISTRAL_THINK),
    "mistral_list": Family("mistral", None, mistral_list, special=MISTRAL_TOOL[:1], extra=MISTRAL_LIST_EXTRA, think=MISTRAL_THINK),
    "mistral_list_mistral": Family("mistral", "mistral", mistral_list, special=MISTRAL_TOOL[:1] + [*MISTRAL_THINK], think=MISTRAL_THINK),
    "mistral_list_deepseek_r1": Family("mistral", "deepseek_r1", mistral_list, plain=THINK, special=MISTRAL_TOOL[:1], extra=MISTRAL_LIST_EXTRA),
    "mistral_think": Family("mistral", None, MISTRAL, special=MISTRAL_TOOL + [*MISTRAL_THINK],
                            extra=[("think", ["[THINK]a[/THINK]b", MISTRAL(W), EOS])], think=MISTRAL_THINK),
    "mistral_mistral": Family("mistral", "mistral", MISTRAL, special=MISTRAL_TOOL + [*MISTRAL_THINK], extra=MISTRAL_EXTRA, think=MISTRAL_THINK),
    "mistral_mistral_without_think": Family("mistral", "mistral", MISTRAL, special=MISTRAL_TOOL, think=MISTRAL_THINK),
    "mistral_deepseek_r1": Family("mistral", "deepseek_r1", MISTRAL, plain=THINK, special=MISTRAL_TOOL),
    "mistral_reasoning": Family(None, "mistral", MISTRAL, special=MISTRAL_TOOL + [*MISTRAL_THINK], think=MISTRAL_THINK),
    "openai": Family("openai", None, None, cases=harmony_cases, eos="<|return|>", opened="<|start|>assistant"),
    "openai_gptoss": Family(None, "openai_gptoss", None, cases=harmony_cases, eos="<|return|>", opened="<|start|>assistant"),
    "openai_openai_gptoss": Family("openai", "openai_gptoss", None, cases=harmony_cases, eos="<|return|>", opened="<|start|>assistant"),
    "hermes": Family("hermes", None, H, plain=TOOL, extra=HERMES_EXTRA),
    "hermes_special": Family("hermes", None, H, special=TOOL),
    "hermes_qwen3": Family("hermes", "qwen3", H, plain=THINK + TOOL),
    "hermes_deepseek_r1": Family("hermes", "deepseek_r1", H, plain=THINK + TOOL),
    "qwen3": Family(None, "qwen3", H, plain=THINK + TOOL),
    "deepseek_r1": Family(None, "deepseek_r1", H, plain=THINK),
    "qwen3_coder": Family("qwen3_coder", None, Q, plain=TOOL, extra=QWEN3_EXTRA),
    "qwen3_coder_qwen3": Family("qwen3_coder", "qwen3", Q, plain=THINK + TOOL, extra=QWEN3_EXTRA[:4]),
    "qwen3_coder_deepseek_r1": Family("qwen3_coder", "deepseek_r1", Q, plain=THINK + TOOL),
    "glm45": Family("glm45", None, G, plain=THINK + TOOL, extra=GLM_EXTRA),
    "glm45_glm45": Family("glm45", "glm45", G, plain=THINK + TOOL, extra=GLM_EXTRA),
    "kimi_k2": Family("kimi_k2", None, K, special=KIMI, extra=KIMI_EXTRA),
    "kimi_k2_kimi_k2": Family("kimi_k2", "kimi_k2", K, plain=THINK, special=KIMI, extra=KIMI_EXTRA),
    "minimax_m2": Family("minimax_m2", None, M, plain=THINK + MINIMAX, extra=MINIMAX_EXTRA),
    "minimax_m2_minimax_m2": Family("minimax_m2", "minimax_m2", M, plain=THINK + MINIMAX, extra=MINIMAX_EXTRA),
    "llama3_json": Family("llama3_json", None, L, special=["<|python_tag|>"], extra=LLAMA_EXTRA),
    "llama3_json_deepseek_r1": Family("llama3_json", "deepseek_r1", L, plain=THINK, special=["<|python_tag|>"]),
    "deepseek_v3": Family("deepseek_v3", None, V3, plain=DEEPSEEK, extra=deepseek_extra(V3)),
    "deepseek_v3_deepseek_r1": Family("deepseek_v3", "deepseek_r1", V3, plain=THINK + DEEPSEEK),
    "deepseek_v31": Family("deepseek_v31", None, V31, plain=DEEPSEEK, extra=deepseek_extra(V31)),
    "deepseek_v31_deepseek_v3": Family("deepseek_v31", "deepseek_v3", V31, plain=THINK + DEEPSEEK),
    "hermes_deepseek_v3": Family("hermes", "deepseek_v3", H, plain=THINK + TOOL),
    "deepseek_v31_qwen3": Family("deepseek_v31", "qwen3", V31, plain=THINK + DEEPSEEK),
    "deepseek_v32": Family("deepseek_v32", None, V32, plain=THINK + ["｜DSML｜"], extra=dsml_extra(V32)),
    "deepseek_v32_deepseek_r1": Family("deepseek_v32", "deepseek_r1", V32, plain=THINK + ["｜DSML｜"]),
    "deepseek_v4": Family("deepseek_v4", None, V4, plain=THINK + ["｜DSML｜"], extra=dsml_extra(V4)),
    "deepseek_v4_deepseek_v4": Family("deepseek_v4", "deepseek_v4", V4, plain=THINK + ["｜DSML｜"], extra=dsml_extra(V4)),
}


def cases_of_markers(family):
    """(name, parts, options): options are prompt, template, and tools: auto, none or absent."""
    calls = family.calls
    if family.tools:
        for name, parts in [
            ("content", ["Hello there, how are you?", EOS]),
            ("one_call", [calls(W), EOS]),
            ("two_calls", [calls(W, ("search", {"query": "rust", "limit": 2})), EOS]),
            ("content_then_call", ["I will look.\n\n", calls(W), EOS]),
            ("spaces_then_call", ["\n \n", calls(W), EOS]),
            ("call_then_text", [calls(W), "\n\nDone.", EOS]),
            ("nested", [calls(("search", {"query": "a", "filter": {"x": [1, {"y": None}], "z": "w"}, "weights": [0.5, 1]})), EOS]),
            ("unicode", ["Ça va 👩‍👩‍👧? ", calls(("search", {"query": "Zürich 🎉 — 日本\n\t\"x\" \\ {}[]"})), EOS]),
            ("markers_in_strings", [calls(("search", {"query": Raw("a < b </x> } ] [ {")})), EOS]),
            ("no_arguments", [calls(("now", {})), EOS]),
            ("unknown_function", [calls(("frobnicate", {"x": 1}), W), EOS]),
            ("cut_in_call", [calls(W)[: len(calls(W)) * 2 // 3]]),
            ("half_a_marker", ["text ", Raw("<tool_c")]),
            ("angle_at_the_end", ["a <", EOS]),
            ("like_a_marker", ["a <tool> b </tool_calls> c <function name> d", EOS]),
            ("half_a_character", ["so ", "🎉🎊"]),
            ("empty", [EOS]),
            ("spaces_only", ["\n\n", EOS]),
        ]:
            yield name, parts, {}
        yield "forbidden", ["a ", calls(W), " b", EOS], {"tools": "none"}
        yield "without_tools", ["a ", calls(W), " b", EOS], {"tools": "absent"}
        for name, parts in family.extra:
            yield "x_" + name if not name.startswith("unsure") else name, parts, {}
    if family.reasoning:
        after = [calls(W)] if family.tools else ["<x> y"]
        for name, parts in [
            ("reasoning_content", ["<think>\nhm, let me see </thin k>\n</think>\n\nThe answer.", EOS]),
            ("reasoning_opened", ["hm, so \n\n</think>\n\nThe answer.", EOS]),
            ("reasoning_call", ["<think>\nlook it up\n</think>\n\n", *after, EOS]),
            ("reasoning_content_call", ["<think>a</think>I will look.\n", *after, EOS]),
            ("reasoning_never_ends", ["<think>\nand so on and "]),
            ("reasoning_never_opened", ["just text", EOS]),
            ("reasoning_emoji", ["<think>🎉 Zürich 👩‍👧</think>🎊", EOS]),
            ("reasoning_empty", ["<think>\n\n</think>\n\nHi.", EOS]),
            ("reasoning_end_twice", ["<think>a</think>b</think>c", EOS]),
            ("reasoning_start_twice", ["<think>a<think>b</think>c", EOS]),
            ("reasoning_start_later", ["<think>a</think>b<think>c</think>d", EOS]),
            ("reasoning_ends_by_call", ["<think>a \n", *after, " b", EOS]),
            ("reasoning_marker_in_plain_tokens", ["<think>a", Raw("</think>"), "b</think>c", EOS]),
            ("reasoning_special_inside", ["<think>a<|im_start|>b</think>c<|im_start|>d", EOS]),
            ("reasoning_half_a_marker", ["<think>a \n", Raw("</thi")]),
            ("reasoning_ends_at_once", ["<think>a \n</think>", EOS]),
        ]:
            yield name, parts, {}
        for name, prompt in [("prompt_opened", "<think>\n"), ("prompt_closed", "<think>\n\n</think>\n\n"), ("prompt_of_turns", "<think>a</think>b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")]:
            yield name, ["a\n</think>\n\nb", *after, EOS], {"prompt": "<|im_start|>assistant\n" + prompt}
            yield name + "_plain", ["a b", EOS], {"prompt": "<|im_start|>assistant\n" + prompt}
        yield "not_thinking", ["a </think> b ", *after, EOS], {"prompt": "<think>\n\n</think>\n\n", "template": {"enable_thinking": False}}
        yield "not_thinking_by_the_other_name", ["a b", EOS], {"prompt": "<think>\n\n</think>\n\n", "template": {"thinking": False}}
        yield "thinking", ["<think>a</think>b ", *after, EOS], {"template": {"thinking": True}}
        yield "thinking_by_the_other_name", ["a</think>b ", *after, EOS], {"template": {"enable_thinking": True}, "prompt": "<think>"}
        yield "not_thinking_unclosed", ["<think>a</think>b", EOS], {"template": {"enable_thinking": False}}
        if family.tools:
            yield "reasoning_forbidden", ["<think>a</think>b ", *after, " c", EOS], {"tools": "none"}
            yield "reasoning_without_tools", ["<think>a</think>b ", *after, EOS], {"tools": "absent"}


def o200k(has_special):
    """The tokenizer of gpt-oss."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    pattern = "|".join([
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
    special = [encoding.decode([token]) for token in range(199_998, 200_018)] if has_special else []
    converter = TikTokenConverter(os.path.join(os.environ["TIKTOKEN_ENCODINGS_BASE"], "o200k_base.tiktoken"), pattern, extra_special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), clean_up_tokenization_spaces=False, eos_token=special[4] if special else None)


def model_s(call_id):
    """The id of a call, if the model wrote it: vLLM's own are random, Mistral's of nine characters."""
    is_random = not call_id or call_id.startswith("chatcmpl-tool-") or (len(call_id) == 9 and call_id.isalnum())
    return None if is_random else call_id


class Recorder:
    def __init__(self, name, family):
        from transformers import AddedToken, AutoTokenizer

        self.name, self.family = name, family
        self.is_harmony = "gptoss" in (family.reasoning or "") or family.tools == "openai"
        if self.is_harmony:
            self.base, self.tokenizer = o200k(False), o200k(True)
            return
        self.base = AutoTokenizer.from_pretrained(TOKENIZER)
        self.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        self.tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
        if family.special:
            self.tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in family.special]})

    def parser(self, request, template):
        from vllm.parser import ParserManager

        cls = ParserManager.get_parser(tool_parser_name=self.family.tools, reasoning_parser_name=self.family.reasoning,
                                       enable_auto_tools=self.family.tools is not None, model_name="m", is_harmony=self.is_harmony)
        return cls(self.tokenizer, request.tools, chat_template_kwargs=template)

    def ids(self, parts):
        out = []
        for part in parts:
            if part is EOS:
                out.append(self.tokenizer.convert_tokens_to_ids(self.family.eos))
            elif part is CUT:
                out.pop()
            else:
                tokenizer = self.base if isinstance(part, Raw) else self.tokenizer
                for marker, own in zip(("<think>", "</think>"), self.family.think):
                    part = part.replace(marker, own)
                out += tokenizer.encode(part, add_special_tokens=False)
        return out

    def request(self, tools, template):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": template}
        if tools != "absent":
            body |= {"tools": TOOLS, "tool_choice": tools}
        return ChatCompletionRequest.model_validate(body)

    def texts(self, ids, skip):
        from tokenizers.decoders import DecodeStream

        stream, backend = DecodeStream(skip_special_tokens=skip), self.tokenizer.backend_tokenizer
        return [stream.step(backend, token) or "" for token in ids]

    def stream(self, request, template, prompt, tokens, step=1):
        parser = self.parser(request, template)
        joined = {"reasoning": "", "content": "", "calls": []}
        calls = {}
        for at in range(0, len(tokens), step):
            chunk = tokens[at : at + step]
            delta = parser.parse_delta("".join(text for _, text in chunk), [token for token, _ in chunk], request,
                                       prompt_token_ids=prompt, finished=at + step >= len(tokens))
            if delta is None:
                continue
            joined["reasoning"] += delta.reasoning or ""
            joined["content"] += delta.content or ""
            for call in delta.tool_calls or []:
                known = calls.setdefault(call.index, ["", "", None])
                known[2] = model_s(call.id) or known[2]
                known[0] += (call.function and call.function.name) or ""
                known[1] += (call.function and call.function.arguments) or ""
        joined["calls"] = [[index, *calls[index]] for index in sorted(calls)]
        # The server asks for the number only with a reasoning parser.
        count = parser.count_reasoning_tokens(tuple(token for token, _ in tokens))
        joined["reasoning_tokens"] = count if self.family.reasoning else 0
        return joined

    def whole(self, request, template, tokens):
        parser = self.parser(request, template)
        ids = tuple(token for token, _ in tokens)
        try:
            reasoning, content, calls = parser.parse("".join(text for _, text in tokens), request,
                                                     enable_auto_tools=self.family.tools is not None, model_output_token_ids=ids)
        except Exception:  # noqa: BLE001, the server answers 500 whatever it is
            return None
        # The server shows no others (entrypoints/openai/chat_completion/serving.py).
        calls = calls if request.tools and request.tool_choice == "auto" else []
        calls = [[i, call.name, call.arguments, call.id] for i, call in enumerate(calls or [])]
        calls = [call[:3] + [model_s(call[3])] for call in calls]
        whole = {"reasoning": reasoning, "content": content, "calls": calls, "reasoning_tokens": parser.count_reasoning_tokens(ids) if self.family.reasoning else 0}
        try:
            json.dumps(whole, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return None
        return whole

    def case(self, name, parts, options):
        tools, template = options.get("tools", "auto" if self.family.tools else "absent"), options.get("template")
        request = self.request(tools, template)
        # As the server decides it (renderers/online_renderer.py).
        if self.family.reasoning or request.tool_choice != "none":
            self.parser(request, template).adjust_request(request)
        prompt = self.ids([options.get("prompt", self.family.opened)])
        ids = self.ids(parts)
        ends = bool(parts) and parts[-1] is EOS
        texts = self.texts(ids[:-1] if ends else ids, request.skip_special_tokens) + [""] * ends
        tokens = [[token, text] for token, text in zip(ids, texts, strict=True)]
        stream = self.stream(request, template, prompt, tokens)
        chunked = self.stream(request, template, prompt, tokens, 3)
        whole = self.whole(request, template, tokens)
        case = {"name": name, "tools": tools == "auto", "has_tools": tools != "absent", "template": template, "prompt": prompt,
                "decode_special": not request.skip_special_tokens, "tokens": tokens, "stream": stream, "whole": whole}
        parts = ("reasoning", "content", "calls")
        if any(chunked[part] != stream[part] for part in parts):
            case["chunked"] = True
        return case

    def record(self):
        import vllm

        vocabulary = self.tokenizer.get_vocab()
        special = {token: self.tokenizer.convert_tokens_to_ids(token) for token in self.tokenizer.all_special_tokens}
        if self.is_harmony:
            special = {str(token): id for id, token in self.tokenizer.added_tokens_decoder.items()}
        markers = {token: vocabulary[token] for token in [*self.family.plain, *self.family.special]}
        head = {"vllm": vllm.__version__, "tools_parser": self.family.tools, "reasoning_parser": self.family.reasoning,
                "markers": markers | special, "special": special, "tools": TOOLS}
        done = [self.case(*case) for case in (self.family.cases or cases_of_markers)(self.family)]
        lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
        body = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in done)
        GOLDENS.mkdir(parents=True, exist_ok=True)
        (GOLDENS / f"{self.name}.json").write_text("{" + ",\n".join(lines) + ',\n"cases": [\n' + body + "\n]}\n", encoding="utf-8")
        print(self.name, len(done), "cases")


def main():
    logging.disable(logging.CRITICAL)
    for name in sys.argv[1:] or PAIRS:
        Recorder(name, PAIRS[name]).record()


if __name__ == "__main__":
    main()
