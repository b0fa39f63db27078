#!/usr/bin/env python3
"""Answers under grammars from real vLLM, direct and through Foretell: they must agree.

    schemas.py [--kind schema|forced|named|strict|one] [--model smollm2|qwen|fixture] [--count N]
               [--clients N] [--most N] [--form both|streamed|whole] [--reasoning] [--precise]
               [--draws N] [--library xgrammar|guidance] [--fixed] [--foretell BIN]

vLLM, whose grammars are xgrammar's, or llguidance's with `--library guidance`, with `--fixed` under
`disable_any_whitespace`, serves a model of `make
real-models`, or that of `make real-fixture`, which calls tools; in 32 bits with `--precise`. The schemas are those of BFCL's functions,
each with its own question, at T=0 with answers of at most `--most` tokens. Every question is asked once
directly and three times through Foretell, which speculates at every token, in drafts of 4: the first
answer stays plain and proves the grammar, the others may be speculated on.

schema    the schema of the function's arguments as `response_format`
forced    the function as a tool, with `tool_choice: required`; vLLM parses the calls by `hermes`
named     the same, with the call forced by the function's name
strict    the same with `strict: true`, not forced
one       not forced, with `parallel_tool_calls: false`
The last four are asked four times: the server says what binds them while the first answer runs.

--reasoning: the chat template opens a block of reasoning, which `--reasoning-parser qwen3` parses (fixture only);
the grammar begins behind it. All questions are then asked once more: the parser has to prove itself first.

--draws N: in place of that, N whole answers at T=0.8 of each of three schemas on each side, compared as
`calls.py --draws` does: here too the same test has to tell T=0.8 from T=1.2.

Exits 2 if an answer differs, if a test fails, or if fewer than nine tenths of the schemas that bind a part of an answer
earn trust.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import sys
import tempfile
import time

import bfcl
import calls
import figures
import real_prompts
import real_servers as servers
import sides

TRUSTED = 0.9  # least share of schemas
TIMES = {"schema": 3, "forced": 4, "named": 4, "strict": 4, "one": 4}  # answers of a question through Foretell
DRAWN = 3  # schemas
PAUSE = 1.5  # seconds for a proof: a request of its own, after the answer
Asked = collections.namedtuple("Asked", "schema form want got")


def bound(kind, tools):
    """Fields of a request of a kind."""
    if kind == "schema":
        return bfcl.bound(kind, tools)
    function = {**tools[0]["function"], "strict": kind == "strict"}
    more = {"forced": {"tool_choice": "required"}, "one": {"parallel_tool_calls": False},
            "named": {"tool_choice": {"type": "function", "function": {"name": function["name"]}}}}
    return {"tools": [{**tools[0], "function": function}], **more.get(kind, {})}


def questions(kind, count):
    """A question for each of `count` schemas."""
    found = {}
    for case in real_prompts.spread(bfcl.cases(servers.BFCL, "schema"), 4 * count):
        schema = json.dumps(case.tools[0]["function"]["parameters"])
        found.setdefault(schema, (bound(kind, case.tools), case.turns[0][0]))
    return dict(itertools.islice(found.items(), count))


def ask(direct, through, times, schema, fields, messages, form, most):
    body = {**calls.request(fields, messages, form, temperature=0), "max_tokens": most}
    ([want], _) = calls.ask(direct, body)
    got = []
    for _ in range(times):
        ([answer], ours) = calls.ask(through, body)
        got.append((answer, ours))
        time.sleep(PAUSE)
    return Asked(schema, form, want, got)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(TIMES), default="schema")
    parser.add_argument("--model", choices=("smollm2", "qwen", "fixture"), default="smollm2")
    parser.add_argument("--count", type=int, default=200, metavar="N")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--most", type=int, default=64, metavar="N")
    parser.add_argument("--form", choices=tuple(calls.FORMS), default="both")
    parser.add_argument("--reasoning", action="store_true")
    parser.add_argument("--library", dest="made_by", choices=("xgrammar", "guidance"), default="xgrammar")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--precise", action="store_true")
    parser.add_argument("--draws", type=int, metavar="N")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    args = parser.parse_args()
    if args.reasoning and args.model != "fixture":
        parser.error("only the fixture has a template that opens a block of reasoning")
    if reason := servers.absent("vllm", args.model) or servers.lacks_bfcl():
        sys.exit(f"schemas.py: {reason}")
    return args


def library(args):
    """The arguments of vLLM: xgrammar is what it takes by itself."""
    if args.made_by == "xgrammar" and not args.fixed:
        return ()
    return "--structured-outputs-config", json.dumps({"backend": args.made_by, "disable_any_whitespace": args.fixed})


def distribution(direct, proxy, kind, count):
    """Prints a line per schema; the failed tests in words."""
    tests, apart = [], []
    for schema, (fields, messages) in questions(kind, DRAWN).items():
        body = calls.request(fields, messages, "whole", temperature=0.8, max_tokens=calls.DRAWN_MOST)
        for _ in range(TIMES[kind] - 2):
            calls.ask(proxy.address, body)
            time.sleep(PAUSE)
        want, _ = calls.drawn(direct, body, count, calls.CHOICES)
        got, drafted = calls.drawn(proxy.address, body, count)
        hotter, _ = calls.drawn(direct, {**body, "temperature": 1.2}, count, calls.CHOICES)
        p, other = calls.homogeneity(want, got), calls.homogeneity(want, hotter)
        tests, apart = tests + list(p.values()), apart + list(other.values())
        print(f"{len(want)} and {len(got)} draws, {drafted} drafted; p {min(p.values()):.2g} at least of {len(p)} "
              f"(T=1.2: {min(other.values()):.1g}); {schema}", flush=True)
        if not drafted:
            yield "nothing was drafted"
    corrected = min(1.0, len(tests) * min(tests))
    print(f"p {corrected:.2g}, corrected for {len(tests)} tests; ended: {calls.ended(proxy)}", flush=True)
    if corrected < calls.LEAST_P:
        yield f"the distributions differ: p {corrected:.2g}"
    if min(apart) > calls.TOLD_APART:
        yield "the test does not tell T=0.8 and T=1.2 apart: more draws are needed"


def agreement(direct, proxy, args):
    """Prints the table; the differences in words."""
    asked = measured(direct, proxy, args)
    sums, wrong, trusted, shown = collections.Counter(), [], 0, 0
    for one in asked:
        # An answer that is all reasoning shows nothing of its grammar.
        shown += bool(one.want["content"] or one.want["calls"])
        paths = [ours.get("path") for _, ours in one.got]
        trusted += "speculated" in paths
        for answer, ours in one.got:
            sums.update({key: ours.get(key, 0) for key in ("drafted", "accepted")})
            if answer != one.want:
                wrong.append(f"{one.form}, {ours.get('path')}: {one.want} {answer} {one.schema}")
        if "speculated" not in paths:
            print(f"not trusted: {paths} {one.want} {one.schema}")
    answers = sum(len(one.got) for one in asked)
    figures.table([["", "schemas", "earned trust", "answers", "drafted", "accepted", "differ"],
                   [args.kind, *map(str, (len(asked), trusted, answers, sums["drafted"], sums["accepted"], len(wrong)))]])
    print(f"ended: {calls.ended(proxy)}")
    if trusted < TRUSTED * shown:
        wrong.append("too few schemas earned trust")
    return wrong


def measured(direct, proxy, args):
    forms = itertools.cycle(calls.FORMS[args.form])
    every = [(TIMES[args.kind] + args.reasoning, schema, fields, messages, form, args.most)
             for (schema, (fields, messages)), form in zip(questions(args.kind, args.count).items(), forms)]
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        return list(pool.map(lambda one: ask(direct, proxy.address, *one), every))


def main():
    args = arguments()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tools = {} if args.kind == "schema" else {"tools": "hermes"}
        extra = (*(servers.HERMES if tools else ()), *(servers.THINKING if args.reasoning else ()),
                 *library(args))
        server = stack.enter_context(servers.start("vllm", args.model, args.foretell, folder, args.precise, extra))
        named = ", ".join(f"{kind}: {name}" for kind, name in {**tools, **({"reasoning": "qwen3"} if args.reasoning else {})}.items())
        parsers = f", parsers: {{ {named} }}" if named else ""
        backend = (f"    probe: {{ when: never }}\n    models: [{{ id: {servers.engines.NAME}, tokenizer: "
                   f"{servers.TOKENIZERS[args.model]}{parsers} }}]\n    verify: {{ allow: [fan_out, score] }}\n")
        direct = servers.address_of(server)
        proxy = sides.start_proxy(stack, args.foretell, direct, backend, {"forced": servers.FORCED}, "forced")
        wrong = list(distribution(direct, proxy, args.kind, args.draws) if args.draws else agreement(direct, proxy, args))
    for line in wrong:
        print(line)
    sys.exit(2 if wrong else 0)


if __name__ == "__main__":
    main()
