#!/usr/bin/env python3
"""A drafter trained on recorded traffic: recorded, trained, and measured on requests that it has not seen.

    traffic.py [--foretell BIN] [--requests N] [--agents N] [--clients N] [--budget T] [--python F] [--count N] [--sides LIST] [--out DIR] [--engine onnx|vllm]

The traffic is that of one made-up product: fixed kinds of requests with names, numbers and faults that
vary, and questions of agents (BFCL, as text), answered by SmolLM2. It is recorded by a proxy whose policy
says so (`corpus.record`), then `foretell train` makes a drafter of it. On `--count` further requests of
each kind: the mean acceptance length of that drafter and of `draft-other` (by slem) alone in drafts of
four, and tokens/s of direct, lookups and head, and both with the trained drafter. What was recorded stays
in --out; a second run goes on from there. Exits 2 if a text differs from the server's own or a request
failed.
"""

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import random
import subprocess
import sys
import time

import bfcl
import real
import real_prompts
import real_servers as servers
import sides

SYSTEM = ("You are the desk assistant of Veltrix Irrigation. Devices: Kestrel hub, Marlow valve, Tern flow sensor, Osprey drive. "
          "Fault codes: VX-11 low line pressure, VX-23 radio lost, VX-37 valve stuck, VX-42 sensor drift, VX-58 dry run. "
          "Answer in the house style: a greeting, the cause, numbered steps, a closing line with the case number.")
DEVICES = ("Kestrel hub", "Marlow valve", "Tern flow sensor", "Osprey drive")
FAULTS = ("VX-11", "VX-23", "VX-37", "VX-42", "VX-58")
PLACES = ("the north greenhouse", "field 7", "the vineyard at Alder Creek", "the nursery roof", "orchard block C", "the rose beds")
PEOPLE = ("Ms Okafor", "Mr Lindqvist", "Dr Haddad", "Ms Petrova", "Mr Tanaka", "Ms Moreau", "Mr Adeyemi", "Ms Silva")
KINDS = (
    "{who} reports fault {fault} on a {device} at {place}. Case {case}. Write the reply.",
    "Case {case}: the {device} at {place} shows {fault} since the update to firmware {fw}. Write a reply to {who}.",
    "Write the service order for case {case}: {device} at {place}, fault {fault}, visit on day {day}.",
    "{who} asks how to reset a {device} with firmware {fw} at {place}. Case {case}. Write the reply.",
    "Summarise case {case} for the field team: {who}, {device}, {place}, {fault}, firmware {fw}.",
    "Write release notes for {device} firmware {fw}: it fixes {fault}.",
    "{who} wants to return a {device} after fault {fault}. Case {case}. Write the reply.",
    "Write the shift handover: open case {case}, {device} at {place}, {fault}, next step on day {day}.",
)
SETS = ("simple_python", "multiple", "parallel", "parallel_multiple")
MOST = 96
# the seed of what is measured; recorded requests have seed 1
FRESH = 2


def product(count, seed):
    """`count` requests of the product, which differ in at least one name or number."""
    drawn, found = random.Random(seed), []
    for number in range(count):
        parts = {"who": drawn.choice(PEOPLE), "device": drawn.choice(DEVICES), "place": drawn.choice(PLACES),
                 "fault": drawn.choice(FAULTS), "fw": f"{drawn.randint(2, 9)}.{drawn.randint(0, 9)}.{drawn.randint(0, 40)}",
                 "case": f"{drawn.randint(10000, 99999)}", "day": drawn.randint(1, 28)}
        text = KINDS[number % len(KINDS)].format(**parts)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        found.append({"route": "chat", "body": {"messages": messages, "max_tokens": MOST, "temperature": 0, **real.fields()}})
    return found


def agents(count):
    """All questions of agents, the measured ones last."""
    cases = [case for name in SETS for case in bfcl.lines(servers.BFCL / f"BFCL_v4_{name}.json")]
    every = [real_prompts.limited(real_prompts.tools(case), MOST, **real.fields()) for case in cases]
    random.Random(3).shuffle(every)
    return every[:count], every[count:]


def record(args, server, entries):
    """Sends the requests of several clients through a proxy that records them."""
    with contextlib.ExitStack() as stack:
        backend = f"corpus: {{ record: {{ dir: {args.out / 'recorded'} }} }}\n"
        drafters = servers.HEADS["lookups, head"] if args.engine == "onnx" else servers.LOOKUPS
        text = sides.policy("product", drafters, "auto", match="corpus: { record: true }\n")
        if args.engine != "onnx":
            backend = f"    models: [{{ id: {servers.engines.NAME}, tokenizer: {servers.TOKENIZERS['smollm2']} }}]\n" + backend
        proxy = sides.start_proxy(stack, args.foretell, servers.address_of(server), backend, {"product": text}, "auto", models={})
        begun, clients = time.monotonic(), [sides.Side(str(number), proxy.address) for number in range(args.clients)]
        with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
            own = [entries[number::len(clients)] for number in range(len(clients))]
            answers = list(pool.map(lambda pair: [pair[0].ask(entry) for entry in pair[1]], zip(clients, own)))
        failed = sides.failures({client.name: given for client, given in zip(clients, answers)})
        tokens = sum(answer["tokens"] for given in answers for answer in given if "failed" not in answer)
        page = sides.page(f"127.0.0.1:{proxy.admin}", "/metrics")
        print(f"{len(entries)} requests, {tokens} tokens of output in {time.monotonic() - begun:.0f} s, {len(failed)} failed",
              *[line for line in page.splitlines() if line.startswith("foretell_recorded")], sep="\n", flush=True)
    if failed:
        sys.exit(f"failed: {failed[0]}")


def train(args):
    """Trains the drafter; its folder."""
    target, drafter = servers.REAL / "smollm2/hf", args.out / "drafter"
    argv = [args.foretell, "train", "--corpus", args.out / "recorded", "--target", target, "--out", drafter, "--budget", args.budget]
    subprocess.run([*argv, *(("--python", args.python) if args.python else ())], check=True)
    return drafter


def measure(args, server, drafter, workloads):
    """A table for each workload; the failures."""
    failed = []
    with contextlib.ExitStack() as stack:
        servers.OTHERS["trained"] = drafter
        trained, slem = "{ kind: model, model: trained, vocabulary: same }", "{ kind: model, model: draft-other, vocabulary: slem }"
        kept = {"lookups": servers.LOOKUPS, **({"lookups, head": servers.HEADS["lookups, head"]} if args.engine == "onnx" else {})}
        settings = [(name, "auto", kinds, ()) for name, kinds in kept.items()]
        settings += [(f"{name}, trained", "auto", f"{kinds}, {trained}", ("trained",)) for name, kinds in kept.items()]
        settings += [("trained, fixed 4", "4", trained, ("trained",)), ("draft-other, fixed 4", "4", slem, ("draft-other",))]
        group = [sides.Side("direct", servers.address_of(server))]
        for shown, setting, kinds, others in settings:
            if args.sides and shown not in args.sides:
                continue
            proxy = servers.start_proxy(stack, args.engine, "smollm2", server, args.foretell, setting, others, kinds)
            group.append(real.Proxied(shown, proxy))
        primed = [sides.Side("unmeasured", servers.address_of(server))]
        for title, entries in workloads.items():
            part = real.workload(group, primed, None, entries, 1)
            print("\n".join(real.table(f"{args.engine}-smollm2, {title}", part)), flush=True)
            failed += part["failed"]
            failed += [f"{title}: {side} differs from direct" for side, given in part["sides"].items()
                       if given.get("identical", 0) < given.get("compared", 0)] if args.engine == "onnx" else []
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", default=servers.sides.ROOT / "target/dist/foretell", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=1012)
    parser.add_argument("--agents", type=int, default=988)
    parser.add_argument("--clients", type=int, default=12, help="concurrent ones while requests are recorded")
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--python")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--engine", choices=("onnx", "vllm"), default="onnx")
    parser.add_argument("--sides", type=lambda text: text.split(";"), help="some of them, with ; between")
    parser.add_argument("--out", type=pathlib.Path, default=servers.REAL / "traffic")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    asked, fresh = agents(args.agents)
    entries = product(args.requests, 1) + asked
    random.Random(5).shuffle(entries)
    with contextlib.ExitStack() as stack:
        lanes = ("--lanes", str(args.clients)) if args.engine == "onnx" else ()
        server = stack.enter_context(servers.start(args.engine, "smollm2", args.foretell, args.out, extra=lanes))
        if not (args.out / "recorded.json").exists():
            record(args, server, entries)
            (args.out / "recorded.json").write_text(json.dumps({"requests": len(entries)}))
    drafter = args.out / "drafter"
    if not drafter.exists():
        train(args)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.start(args.engine, "smollm2", args.foretell, args.out))
        workloads = {"product": product(args.count, FRESH), "agents": fresh[:args.count]}
        failed = measure(args, server, drafter, workloads)
    print(*failed, sep="\n", end="")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
