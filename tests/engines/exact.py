#!/usr/bin/env python3
"""Exactness on real engines: the output through Foretell is the output of the engine alone.

    exact.py llama|vllm|onnx [--short] [--only greedy,sampled,...] [--vocabulary same|slem] [--foretell BIN]
             [--through URL --direct URL]

Starts the engine (variant plain) and, in front of it, Foretell with forced speculation, unless both
URLs are given, and runs

    greedy    T=0: divergences per 1,000 tokens against the engine's own text cut at random and re-sent
    sampled   T=0.8, top-p 0.9, no seed: chi-square of token counts at three positions; a mutant must
              be caught
    cancel    5 s after 200 cancels the engine runs nothing and holds no memory
    first     added time to the first token, in pairs
    killed    the engine dies in the middle of a stream and comes back

Prints a table and, with --json, writes the figures. Exits 2 if a check failed.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import random
import signal
import sys
import time

import engine as engines
import mutant
import stats
import wire

WORKLOADS = ("rewrite", "completion", "prose", "chat", "hostile")
PARTS = ("greedy", "sampled", "cancel", "first", "killed")
POSITIONS = 3
SAMPLING = {"temperature": 0.8, "top_p": 0.9}


def prompts(seed=1):
    """Endless client bodies: the workloads' prompts, then again with their text cut at random
    positions."""
    rng = random.Random(seed)
    lines = []
    for name in WORKLOADS:
        with open(engines.ROOT / f"tests/workloads/{name}.jsonl") as file:
            lines += [json.loads(line)["body"] for line in file]
    rng.shuffle(lines)
    first = True
    while True:
        for body in lines:
            if first:
                yield dict(body)
                continue
            text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
            text = text[rng.randrange(max(1, len(text) // 2)):][:rng.randrange(len(text) // 3, len(text)) + 1]
            if "prompt" in body:
                yield {**body, "prompt": text}
            else:
                yield {**body, "messages": [*body["messages"][:-1], {"role": "user", "content": text}]}
        first = False


def agreed(engine, ids, one, other):
    """Number of the tokens `ids` of text `one` before its first difference from text `other`."""
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(engine.text(ids[:middle])) <= same:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(a, b):
    shared = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return None if shared == len(a) == len(b) else shared


class Greedy:
    """Counts of one comparison: compared tokens, and the first mismatches."""

    def __init__(self):
        self.tokens, self.mismatches = 0, []

    def rate(self):
        return 1000 * len(self.mismatches) / max(1, self.tokens)


def greedy(direct, through, tokens, note):
    """Through against direct, and the baseline; both over at least `tokens` tokens."""
    rng = random.Random(2)
    real, baseline, drafted, accepted, failures = Greedy(), Greedy(), 0, 0, []
    for number, body in enumerate(prompts()):
        if min(real.tokens, baseline.tokens) >= tokens or len(failures) > 20:
            break
        body = {**body, "temperature": 0, "model": direct.model}
        count = body["max_tokens"]
        prompt = direct.tokenize(body)
        try:
            ids, ended = direct.generate(prompt, count, temperature=0)
            plain = wire.ask(direct.url, direct.kind, body, stream=False)
            got = wire.ask(through, direct.kind, body, stream=number % 2 == 0)
        except wire.Refused as error:
            failures.append(str(error))
            continue
        drafted += got.foretell().get("drafted", 0)
        accepted += got.foretell().get("accepted", 0)
        shown = ids[:-1] if ended else ids
        if got.text == plain.text and got.finish == plain.finish:
            real.tokens += len(ids)
        else:
            at = agreed(direct, shown, plain.text, got.text)
            real.tokens += at + 1
            real.mismatches.append({"prompt": number, "at": at, "gap": direct.gap(prompt + shown[:at]),
                                    "plain": plain.text[-40:], "through": got.text[-40:],
                                    "finish": [plain.finish, got.finish]})
        while len(ids) > 1 and baseline.tokens < real.tokens:
            cut = rng.randrange(1, len(ids))
            again, _ = direct.generate(prompt + ids[:cut], count - cut, temperature=0)
            at = first_difference(ids[cut:], again)
            baseline.tokens += len(ids) - cut if at is None else at + 1
            if at is not None:
                baseline.mismatches.append({"prompt": number, "at": cut + at, "gap": direct.gap(prompt + ids[:cut + at])})
        if number % 25 == 24:
            note(f"{real.tokens} tokens, {len(real.mismatches)} mismatches; baseline {baseline.tokens}, "
                 f"{len(baseline.mismatches)}")
    p = stats.more_often(len(real.mismatches), real.tokens, len(baseline.mismatches), baseline.tokens)
    return {"tokens": real.tokens, "per_1000": real.rate(), "mismatches": real.mismatches, "p": p,
            "baseline": {"tokens": baseline.tokens, "per_1000": baseline.rate(), "mismatches": baseline.mismatches},
            "drafted": drafted, "accepted": accepted, "failures": failures,
            "ok": p > 0.001 and drafted > 0 and not failures and real.tokens >= tokens}


def draw(url, direct, body, count, clients=8):
    """(token ids, drafted) of `count` independent answers."""
    def one(_):
        got = wire.ask(url, direct.kind, body, stream=False)
        ids = got.ids if got.ids is not None else direct.words(got.text)
        return ids, got.foretell().get("drafted", 0)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        got = list(pool.map(one, range(count)))
    return [ids for ids, _ in got], sum(d for _, d in got)


def at(draws, position):
    return collections.Counter(ids[position] if position < len(ids) else None for ids in draws)


def telling_prompt(direct, draws=40, length=12):
    """The prompt and positions where accepting every draft would show most: drafted and
    uncertain."""
    best = (0.0, None, None)
    for body, _ in zip(prompts(3), range(30)):
        if "prompt" not in body:
            continue
        body = {"model": direct.model, "prompt": body["prompt"], "max_tokens": length, **SAMPLING}
        prompt = direct.tokenize(body)
        sample, _ = draw(direct.url, direct, body, draws)
        shown = []
        for position in range(1, length):
            counts = at(sample, position)
            draft = collections.Counter()
            for ids in sample:
                guess = mutant.lookup(prompt + ids[:position]) if position <= len(ids) else []
                draft[guess[0] if guess else None] += 1
            drafted = sum(n for token, n in draft.items() if token is not None)
            agrees = sum(min(n, counts.get(token, 0)) for token, n in draft.items() if token is not None)
            shown.append(((drafted - agrees) / draws, position))
        shown = sorted(shown, reverse=True)[:POSITIONS]
        score = sum(s for s, _ in shown)
        if score > best[0]:
            best = (score, body, sorted(p for _, p in shown))
    if best[1] is None:
        raise wire.Refused("no prompt on which drafts are made and uncertain")
    return best[1], best[2]


def distribution(direct, url, body, positions, count, known=None):
    """p per position; the caller applies Bonferroni's correction."""
    ours, drafted = draw(url, direct, body, count)
    theirs = draw(direct.url, direct, body, count)[0]
    if known:
        ours, theirs = ours + known[0], theirs + known[1]
    tests = [stats.homogeneity(at(theirs, p), at(ours, p)) for p in positions]
    return {"p": min(1.0, POSITIONS * min(p for p, _ in tests)), "per_position": [p for p, _ in tests],
            "freedom": [f for _, f in tests], "drafted": drafted, "draws": len(ours)}, (ours, theirs)


def sampled(direct, through, count, note):
    body, positions = telling_prompt(direct)
    note(f"positions {positions}")
    result, draws = distribution(direct, through, body, positions, count)
    if 1e-4 < result["p"] <= 1e-3:
        note(f"p {result['p']:.2g}: once more with four times the draws, pooled")
        result, _ = distribution(direct, through, body, positions, 4 * count, draws)
    server, url = mutant.serve(direct, "accept-all")
    caught, _ = distribution(direct, url, body, positions, count)
    server.shutdown()
    return {**result, "positions": positions, "mutant_p": caught["p"],
            "ok": result["p"] > 1e-3 and caught["p"] < 1e-6 and result["drafted"] > 0}


def cancel(direct, through, note, count=200, clients=8):
    rng = random.Random(4)
    idle = direct.load()
    bodies = [{**body, "model": direct.model, "max_tokens": 256, "temperature": 0}
              for body, _ in zip(prompts(5), range(count))]
    waits = [rng.uniform(0, 0.4) for _ in bodies]

    def one(body, wait):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        stream = wire.Stream(through, path, body)
        try:
            for seconds, _ in stream:
                if seconds > wait:
                    return True
            return False
        finally:
            stream.close()

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        cut = sum(pool.map(one, bodies, waits))
    time.sleep(5)  # the bound is for the state after five seconds
    after = direct.load()
    kept = 0.0 if after[1] is None else after[1] - (idle[1] or 0.0)
    note(f"{cut} of {count} cut in the middle")
    return {"cut": cut, "running": after[0], "kv_idle": idle[1], "kv_after": after[1],
            "ok": after[0] == 0 and kept <= 0.001 and cut > count // 2}


def first(direct, through, pairs, note):
    """Medians over pairs; above the bound, once more with three times the pairs, pooled."""
    asked, plain, added = prompts(6), [], []

    def clocked(count):
        for number in range(count):
            body = {**next(asked), "model": direct.model, "max_tokens": 2, "temperature": 0}
            wire.ask(direct.url, direct.kind, body, stream=True)  # read once before either side is timed
            sides = [direct.url, through] if number % 2 else [through, direct.url]
            seconds = {url: wire.ask(url, direct.kind, body, stream=True).first for url in sides}
            plain.append(seconds[direct.url])
            added.append(seconds[through] - seconds[direct.url])

    def judged():
        base, more = stats.median(plain), stats.median(added)
        return {"pairs": len(plain), "direct_ms": 1000 * base, "added_ms": 1000 * more,
                "ok": more <= max(0.05 * base, 0.002)}

    clocked(3)
    plain.clear(), added.clear()
    clocked(pairs)
    if not judged()["ok"]:
        note(f"{judged()['added_ms']:+.2f} ms: once more with three times the pairs, pooled")
        clocked(3 * pairs)
    note(f"{len(plain)} pairs")
    return judged()


def killed(run, direct, through, note):
    """Ends the engine after some events of a stream, restarts it, and records the client's view."""
    body = {**next(prompts(7)), "model": direct.model, "max_tokens": 400, "temperature": 0}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    before = wire.ask(direct.url, direct.kind, {**body, "max_tokens": 32}, stream=False).text
    stream, events, last, outcome = wire.Stream(through, path, body), 0, {}, "closed in the middle"
    dead = None
    try:
        for _, last in stream:
            events += 1
            if events == 5:
                run.server.stop(signal.SIGKILL)
                dead = time.perf_counter()
        outcome = "[DONE]" if stream.done else "ended without [DONE]"
    except OSError as error:
        outcome = f"connection broken ({type(error).__name__})"
    except Exception as error:  # http.client's incomplete reads are not OSErrors
        outcome = f"broken off ({type(error).__name__})"
    ended = time.perf_counter() - dead if dead else None
    summary = last.get("error", {}).get("message") or [c.get("finish_reason") for c in last.get("choices", [])]
    try:
        refused = wire.ask(through, direct.kind, {**body, "max_tokens": 4}, stream=False).finish
    except (wire.Refused, OSError) as error:
        refused = str(error)[:160]
    run.restart()
    since, back = time.perf_counter(), None
    while back is None and time.perf_counter() - since < 60:
        try:
            back = wire.ask(through, direct.kind, {**body, "max_tokens": 32}, stream=False).text
        except (wire.Refused, OSError):
            time.sleep(0.2)
    note(f"{outcome} after {events} events")
    return {"outcome": outcome, "last_event": summary, "ended_after_s": ended, "while_down": refused,
            "back_after_s": time.perf_counter() - since, "same_text": back == before,
            "ok": dead is not None and ended < 10 and back == before}


CONFIG = """version: 1
listen: [{{ address: "127.0.0.1:{port}", tls: null }}]
admin: {{ address: "127.0.0.1:{admin}" }}
backends:
  - name: engine
    engine: {engine}
    replicas: ["{url}"]
{verify}{models}drafters:
  draft-same: {{ path: {root}/onnx/models/draft-same, device: auto, slots: 16, context: 2048 }}
  draft-other: {{ path: {root}/onnx/models/draft-other, device: auto, slots: 16, context: 2048 }}
policies: {{ dir: {policies} }}
observe: {{ log: text, level: warn }}
"""
# `score` by name: engines.start has made the first call with log-probabilities, which may end a CPU
# vLLM
VERIFY = {"vllm": "    verify: { allow: [score, fan_out] }\n"}
MODELS = """    models: [{{ id: foretell-target, tokenizer: {root}/onnx/models/target/tokenizer.json }}]
"""
POLICY = """version: 1
name: forced
mode: auto
drafters: [{drafters}]
gamma: {{ fixed: 4 }}
accept: {{ rule: exact }}
holdback: {{ start: 0, floor: 0 }}
"""
# per vocabulary of the model; a foreign one drafts alone, so that every verified draft went through
# it
DRAFTERS = {
    "same": "{ kind: prompt_lookup, ngram: { min: 2, max: 8 } }, { kind: model, model: draft-same, vocabulary: same }",
    "slem": "{ kind: model, model: draft-other, vocabulary: slem }",
}
FORCED = POLICY.format(drafters=DRAFTERS["same"])


class Run:
    """The engine and Foretell in front of it, on separate ports."""

    def __init__(self, kind, foretell, out, variant="plain", policy=FORCED, sidecar=True):
        self.kind, self.foretell, self.out, self.variant = kind, foretell, out, variant
        self.policy, self.wanted = policy, sidecar
        self.port, self.front, self.admin = (engines.free_port() for _ in range(3))
        self.url, self.through = (f"http://127.0.0.1:{port}" for port in (self.port, self.front))
        self.server = self.sidecar = None

    def restart(self):
        log = self.out / f"{self.kind}.log"
        if self.kind == "onnx":
            argv = [self.foretell, "target", "--model", engines.ROOT / "onnx/models/target", "--name", engines.NAME,
                    "--listen", f"127.0.0.1:{self.port}"]
            self.server = engines.Server(argv, None, self.url, log)
        else:
            self.server = engines.start(self.kind, self.variant, self.port, log)

    def __enter__(self):
        policies = self.out.resolve() / "policies"
        policies.mkdir(parents=True, exist_ok=True)
        (policies / "forced.yaml").write_text(self.policy)
        models = "" if self.kind == "onnx" else MODELS.format(root=engines.ROOT)
        engine = {"llama": "llamacpp"}.get(self.kind, self.kind)
        config = self.out / f"{self.kind}.yaml"
        config.write_text(CONFIG.format(port=self.front, admin=self.admin, engine=engine, url=self.url,
                                        root=engines.ROOT, policies=policies, models=models,
                                        verify=VERIFY.get(self.kind, "")))
        try:
            self.restart()
            if not self.wanted:
                return self
            self.sidecar = engines.Server([self.foretell, "serve", "--config", config], None,
                                          f"http://127.0.0.1:{self.admin}", self.out / "foretell.log", "/readyz", 30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in (self.sidecar, self.server):
            if process:
                process.stop()


def one(name, run, direct, through, short, note):
    if name == "greedy":
        return greedy(direct, through, 10_000 if short else 100_000, note)
    if name == "sampled":
        return sampled(direct, through, 300 if short else 1500, note)
    if name == "cancel":
        return cancel(direct, through, note)
    if name == "first":
        return first(direct, through, 40 if short else 100, note)
    return killed(run, direct, through, note) if run else {"skipped": "the engine was not started here"}


def summary(name, result):
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    if "error" in result:
        return result["error"]
    if name == "greedy":
        gaps = sorted(m["gap"] for m in result["mismatches"])
        return (f"{result['tokens']} tokens, {result['per_1000']:.3f} per 1,000 (baseline "
                f"{result['baseline']['per_1000']:.3f}), p {result['p']:.2g}; gaps {[round(g, 5) for g in gaps[:8]]}; "
                f"{result['accepted']} of {result['drafted']} drafts; {len(result['failures'])} failures")
    if name == "sampled":
        return (f"{result['draws']} draws x {POSITIONS} at {result['positions']}, p {result['p']:.3g} (corrected); mutant "
                f"{result['mutant_p']:.1g}; {result['drafted']} drafted")
    if name == "cancel":
        return f"{result['cut']} cut; running {result['running']:g}, KV {result['kv_idle']} -> {result['kv_after']}"
    if name == "first":
        return f"{result['direct_ms']:.2f} ms direct, {result['added_ms']:+.2f} ms through"
    if result["ended_after_s"] is None:
        return f"{result['outcome']} before the engine was ended: {result['last_event']}"
    return (f"{result['outcome']}, last {result['last_event']}, ended {result['ended_after_s']:.2f} s after; down: "
            f"{result['while_down']}; back {result['back_after_s']:.1f} s, same text {result['same_text']}")


def parts(kind, names, run, direct, through, short):
    results = {}
    for name in names:
        began = time.monotonic()

        def note(text):
            print(f"  {kind} {name}: {text}", file=sys.stderr, flush=True)

        try:
            results[name] = one(name, run, direct, through, short, note)
        except (wire.Refused, OSError, RuntimeError, KeyError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300], "ok": False}
        result = results[name]
        word = "skipped" if "skipped" in result else "ok" if result["ok"] else "FAILED"
        print(f"{kind:6} {name:8} {word:8} {time.monotonic() - began:6.0f} s  {summary(name, result)}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("llama", "vllm", "onnx"))
    parser.add_argument("--short", action="store_true", help="10,000 tokens and 300 draws")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/release/foretell"))
    parser.add_argument("--direct", help="a running engine")
    parser.add_argument("--through", help="Foretell in front of it")
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    parser.add_argument("--vocabulary", choices=DRAFTERS, default="same", help="of the model drafter")
    parser.add_argument("--json")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if args.direct:
        direct = wire.Engine(args.kind, args.direct)
        results = parts(args.kind, names, None, direct, args.through or args.direct, args.short)
    else:
        policy = POLICY.format(drafters=DRAFTERS[args.vocabulary])
        with Run(args.kind, args.foretell, pathlib.Path(args.out), policy=policy) as run:
            results = parts(args.kind, names, run, wire.Engine(args.kind, run.url), run.through, args.short)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(r.get("ok", True) for r in results.values()) else 2)


if __name__ == "__main__":
    main()
