#!/usr/bin/env python3
"""Answers of a JSON schema from real vLLM, direct and through Foretell: they must agree.

    schemas.py [--model smollm2|qwen] [--count N] [--clients N] [--most N] [--form both|streamed|whole]
               [--precise] [--draws N] [--foretell BIN]

vLLM, whose grammars are xgrammar's, serves a model of `make real-models`; in 32 bits with `--precise`.
The schemas are those of BFCL's functions, each with its own question, at T=0 with answers of at most
`--most` tokens. Every question is asked once directly and three times through Foretell, which speculates
at every token, in drafts of 4: the first answer stays plain and proves the grammar, the others may be
speculated on.

--draws N: in place of that, N whole answers at T=0.8 of each of three schemas on each side, compared as
`calls.py --draws` does: here too the same test has to tell T=0.8 from T=1.2.

Exits 2 if an answer differs, if a test fails, or if fewer than nine tenths of the schemas earn trust.
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
TIMES = 3  # answers of a question through Foretell
DRAWN = 3  # schemas
PAUSE = 1.5  # seconds for a proof: a request of its own, after the answer
Asked = collections.namedtuple("Asked", "schema form want got")


def questions(count):
    """A question for each of `count` schemas."""
    found = {}
    for case in real_prompts.spread(bfcl.cases(servers.BFCL, "schema"), 4 * count):
        fields = bfcl.bound("schema", case.tools)
        found.setdefault(json.dumps(fields["response_format"]["json_schema"]["schema"]), (fields, case.turns[0][0]))
    return dict(itertools.islice(found.items(), count))


def ask(direct, through, schema, fields, messages, form, most):
    body = {**calls.request(fields, messages, form, temperature=0), "max_tokens": most}
    ([want], _) = calls.ask(direct, body)
    got = []
    for _ in range(TIMES):
        ([answer], ours) = calls.ask(through, body)
        got.append((answer, ours))
        time.sleep(PAUSE)
    return Asked(schema, form, want, got)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "qwen"), default="smollm2")
    parser.add_argument("--count", type=int, default=200, metavar="N")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--most", type=int, default=64, metavar="N")
    parser.add_argument("--form", choices=tuple(calls.FORMS), default="both")
    parser.add_argument("--precise", action="store_true")
    parser.add_argument("--draws", type=int, metavar="N")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    args = parser.parse_args()
    if reason := servers.absent("vllm", args.model) or servers.lacks_bfcl():
        sys.exit(f"schemas.py: {reason}")
    return args


def distribution(direct, proxy, count):
    """Prints a line per schema; the failed tests in words."""
    tests, apart = [], []
    for schema, (fields, messages) in questions(DRAWN).items():
        body = calls.request(fields, messages, "whole", temperature=0.8, max_tokens=calls.DRAWN_MOST)
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
    sums, wrong, trusted = collections.Counter(), [], 0
    for one in asked:
        paths = [ours.get("path") for _, ours in one.got]
        trusted += "speculated" in paths
        for answer, ours in one.got:
            sums.update({key: ours.get(key, 0) for key in ("drafted", "accepted")})
            if answer != one.want:
                wrong.append(f"{one.form}, {ours.get('path')}: {one.want['content']!r} {answer['content']!r} {one.schema}")
        if "speculated" not in paths:
            print(f"not trusted: {paths} {one.want['content']!r} {one.schema}")
    figures.table([["", "schemas", "earned trust", "answers", "drafted", "accepted", "differ"],
                   ["vllm", *map(str, (len(asked), trusted, len(asked) * TIMES, sums["drafted"], sums["accepted"], len(wrong)))]])
    print(f"ended: {calls.ended(proxy)}")
    if trusted < TRUSTED * len(asked):
        wrong.append("too few schemas earned trust")
    return wrong


def measured(direct, proxy, args):
    forms = itertools.cycle(calls.FORMS[args.form])
    every = [(schema, fields, messages, form, args.most)
             for (schema, (fields, messages)), form in zip(questions(args.count).items(), forms)]
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        return list(pool.map(lambda one: ask(direct, proxy.address, *one), every))


def main():
    args = arguments()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(servers.start("vllm", args.model, args.foretell, folder, args.precise))
        backend = (f"    probe: {{ when: never }}\n    models: [{{ id: {servers.engines.NAME}, tokenizer: "
                   f"{servers.TOKENIZERS[args.model]} }}]\n    verify: {{ allow: [fan_out, score] }}\n")
        direct = servers.address_of(server)
        proxy = sides.start_proxy(stack, args.foretell, direct, backend, {"forced": servers.FORCED}, "forced")
        wrong = list(distribution(direct, proxy, args.draws) if args.draws else agreement(direct, proxy, args))
    for line in wrong:
        print(line)
    sys.exit(2 if wrong else 0)


if __name__ == "__main__":
    main()
