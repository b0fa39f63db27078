#!/usr/bin/env python3
"""Mean acceptance length by drafter and workload, on the real target with the bundled models.

    drafters.py [--foretell BIN] [--drafters LIST] [--gamma LIST] [--workloads LIST] [--prompts N] [--tokens N]
                [--temperature T] [--pace PACE] [--warm N] [--pages DIR] [--json F]

One `foretell target`, and in front of it one `foretell serve` for every drafter (or several of them
merged, with the names of sides.DRAFTERS) and every length of drafts; each speculates at every token
event (with `auto` for a length, when the controller decides). All sides get the same prompts in
turn, the first N of all unmeasured. PACE is the duration of a step, as in `foretell target --pace`
(`step=20ms,base=1.35,node=0.025`); without it the bundled target computes as fast as it can. With
--pages the metrics of each proxy are written to DIR/SIDE.txt at the end.

e_n       mean acceptance length, E[N]: accepted tokens per round, plus one
accepted  share of the drafted tokens that were accepted
tok/s     tokens per second of one client, and its ratio to the target's own
texts     answers that differ, byte for byte, from the target's own to the same prompt. Above
          temperature 0 every prompt has a seed, and the target's noise is a function of it, so
          texts are compared there, too

Exits 2 if a request failed. Needs the exports of `make -s print-env`.
"""

import argparse
import contextlib
import json
import pathlib
import sys

import paced
import sides


def side_name(drafters, gamma):
    return f"{drafters}-{gamma}"


def measured(name, workload, answers, own):
    rounds, drafted, accepted = (sum(a[key] for a in answers) for key in ("rounds", "drafted", "accepted"))
    speed = [sum(a["tokens"] for a in given) / sum(a["seconds"] for a in given) for given in (answers, own)]
    other = sum(a["text"] != b["text"] for a, b in zip(answers, own))
    return {"side": name, "workload": workload, "prompts": len(answers), "rounds": rounds, "drafted": drafted,
            "accepted": accepted, "e_n": (accepted + rounds) / rounds if rounds else None,
            "tokens_per_second": speed[0], "ratio": speed[0] / speed[1], "other_texts": other}


def table(rows):
    print(f"{'workload':<12} {'drafter':<14} {'rounds':>7} {'E[N]':>6} {'accepted':>9} {'tok/s':>7} {'ratio':>6} {'texts':>6}")
    for row in rows:
        e_n = f"{row['e_n']:.3f}" if row["e_n"] else "-"
        share = f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-"
        print(f"{row['workload']:<12} {row['side']:<14} {row['rounds']:>7} {e_n:>6} {share:>9} "
              f"{row['tokens_per_second']:>7.0f} {row['ratio']:>6.2f} {row['other_texts']:>6}")


def prompts_of(workload, options):
    entries = sides.read_workload(workload)[:options.prompts]
    fields = {"max_tokens": options.tokens, "temperature": options.temperature}
    seeds = [{"seed": 7 + at} if options.temperature > 0 else {} for at in range(len(entries))]
    return [sides.changed(entry, **fields, **seed) for entry, seed in zip(entries, seeds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/release/foretell"))
    parser.add_argument("--drafters", default="lookup,model,slem")
    parser.add_argument("--gamma", default="4")
    parser.add_argument("--workloads", default="completion,rewrite,prose,chat,hostile")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pace", default="", help="duration of a step of the target")
    parser.add_argument("--warm", type=int, default=0, help="unmeasured prompts before the first workload")
    parser.add_argument("--pages", type=pathlib.Path, help="a folder for the metrics of each side")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    names = [(drafters, gamma) for drafters in options.drafters.split(",") for gamma in options.gamma.split(",")]
    rows, failed, admins = [], [], {}
    with contextlib.ExitStack() as stack:
        target = paced.start_target(stack, options.foretell, dict(part.split("=") for part in options.pace.split(",") if part))
        group = [sides.Side("direct", target)]
        for drafters, gamma in names:
            policy = sides.policy("bench", sides.DRAFTERS[drafters], gamma)
            backend = paced.BACKEND if options.pace else ""
            proxy = sides.start_proxy(stack, options.foretell, target, backend, {"bench": policy}, gamma)
            group.append(sides.Side(side_name(drafters, gamma), proxy.address))
            admins[group[-1].name] = proxy.admin
        workloads = options.workloads.split(",")
        for entry in prompts_of(workloads[0], options)[:options.warm]:
            for side in group:
                side.ask(entry)
        for workload in workloads:
            entries = prompts_of(workload, options)
            for side in group:
                side.answers = []
            sides.measure([(sides.Side("target", target), group)], entries, len(entries), size=min(5, len(entries)))
            failed += sides.failures({side.name: side.answers for side in group})
            if failed:
                break
            own = group[0].answers
            rows += [measured(side.name, workload, side.answers, own) for side in group[1:]]
        for name, admin in admins.items() if options.pages else ():
            options.pages.mkdir(parents=True, exist_ok=True)
            (options.pages / f"{name}.txt").write_text(sides.page(f"127.0.0.1:{admin}", "/metrics"))
    table(rows)
    for line in failed:
        print(line, file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
