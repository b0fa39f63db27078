#!/usr/bin/env python3
"""Log-probabilities from real vLLM or our own target, direct and through Foretell: they must agree.

    logprobs.py [--server vllm|onnx] [--count N] [--clients N] [--foretell BIN]

SmolLM2 in 32 bits answers prompts of HumanEval (as chats and as completions) and MT-bench at T=0, half of them streamed,
with the log-probabilities of 0, 2 or 20 tokens. Through Foretell every token may be speculated on, in drafts of 4. The
texts of all tokens and the tokens that are listed have to be the same, and their numbers within 0.001: in another batch an
engine rounds otherwise, also without Foretell. Tokens that are listed in another order differ by less than that.

Exits 2 if an answer differs, or if fewer than half of the answers are speculated on.
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

import calls
import figures
import real_prompts
import real_servers as servers
import sides

NEAR = 1e-3  # of two log-probabilities
MOST = (0, 2, 20)  # tokens that are listed
KINDS = ("completion", "chat", "talk")
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PAUSE = 1.5  # seconds for the question how the server writes tokens
Place = collections.namedtuple("Place", "token bytes logprob top")


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def places(route, lists):
    """What is listed for each token, in one form for both routes."""
    if route == "chat":
        return [Place(one["token"], one["bytes"], one["logprob"], [(top["token"], top["logprob"]) for top in one["top_logprobs"]])
                for one in lists.get("content") or []]
    return [Place(token, offset, logprob, list(top.items())) for token, offset, logprob, top in
            zip(lists["tokens"], lists["text_offset"], lists["token_logprobs"], lists["top_logprobs"])]


def ask(address, route, body):
    """(text, places, usage.foretell)"""
    answer = calls.post(address, ROUTES[route], body)
    parts = events(answer) if body.get("stream") else [json.loads(answer)]
    text, found, ours = "", [], {}
    for part in parts:
        ours = (part.get("usage") or {}).get("foretell") or ours
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {}
            text += choice.get("text") or said.get("content") or ""
            if choice["logprobs"]:
                found += places(route, choice["logprobs"])
    return text, found, ours


def apart(want, got):
    """(the greatest difference of two numbers, what else differs in words)"""
    if (want[0], len(want[1])) != (got[0], len(got[1])):
        return 0.0, f"text {want[0]!r} {got[0]!r}, {len(want[1])} and {len(got[1])} places"
    far = 0.0
    for one, other in zip(want[1], got[1]):
        far = max(far, abs(one.logprob - other.logprob))
        tops = dict(one.top), dict(other.top)
        far = max([far, *(abs(logprob - tops[1][token]) for token, logprob in tops[0].items() if token in tops[1])])
        # a token at the end of one list that the other has not, is as likely as the last one there
        missing = set(tops[0]) ^ set(tops[1])
        last = min([logprob for _, logprob in one.top], default=0.0)
        level = all(abs((tops[0] | tops[1])[token] - last) < NEAR for token in missing)
        if one[:2] != other[:2] or not level or len(one.top) != len(other.top):
            return far, f"{one} {other}"
    return far, "" if far < NEAR else f"numbers differ by {far}"


def requests(count):
    for number, (kind, most) in enumerate(itertools.product(KINDS, MOST)):
        for place, entry in enumerate(real_prompts.load(servers.PROMPTS, kind, count, 64)):
            asked = {"logprobs": most} if entry["route"] == "completions" else {"logprobs": True, "top_logprobs": most}
            streamed = {"stream": True, "stream_options": {"include_usage": True}} if (number + place) % 2 else {}
            yield entry["route"], {"model": servers.engines.NAME, **entry["body"], **asked, **streamed}


def compared(direct, through, route, body):
    want, got = ask(direct, route, body), ask(through, route, body)
    return want, got, *apart(want, got)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("vllm", "onnx"), default="vllm")
    parser.add_argument("--count", type=int, default=8, metavar="N", help="prompts of a kind")
    parser.add_argument("--clients", type=int, default=2, metavar="N")
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    args = parser.parse_args()
    if reason := servers.absent(args.server, "smollm2"):
        sys.exit(f"logprobs.py: {reason}")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(servers.start(args.server, "smollm2", args.foretell, folder, precise=True))
        backend = "    probe: { when: never }\n"
        if args.server == "vllm":
            backend += (f"    models: [{{ id: {servers.engines.NAME}, tokenizer: {servers.TOKENIZERS['smollm2']} }}]\n"
                        "    verify: { allow: [score, fan_out] }\n")
        direct = servers.address_of(server)
        proxy = sides.start_proxy(stack, args.foretell, direct, backend, {"forced": servers.FORCED}, "forced")
        every = list(requests(args.count))
        ask(proxy.address, *every[0])
        time.sleep(PAUSE)
        with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
            found = list(pool.map(lambda one: compared(direct, proxy.address, *one), every))
        ended = calls.ended(proxy)
    wrong = [words for *_, words in found if words]
    ours = [got[2] for _, got, *_ in found]
    speculated = sum(one.get("path") == "speculated" for one in ours)
    sums = {name: sum(one.get(name, 0) for one in ours) for name in ("drafted", "accepted")}
    figures.table([["", "answers", "speculated", "tokens", "drafted", "accepted", "differ", "numbers apart"],
                   [args.server, *map(str, (len(found), speculated, sum(len(want[1]) for want, *_ in found), *sums.values(), len(wrong))),
                    f"{max(far for *_, far, _ in found):.1e}"]])
    print(f"ended: {ended}")
    for words in wrong:
        print(words)
    sys.exit(2 if wrong or speculated < len(found) / 2 else 0)


if __name__ == "__main__":
    main()
