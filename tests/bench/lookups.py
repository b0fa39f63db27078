#!/usr/bin/env python3
"""Baselines for drafters without a model: other engines' lookups on recorded texts.

    lookups.py [--sets real,smollm2,long,memory] [--drafters D,...] [--gamma G,...] [--memory TOKENS,...] [--repeats N] [--arctic DIR]
               [--json F]
    lookups.py --dump-streams DIR

Recorded streams (tests/control/traces, temperature 0) are replayed. In every round the drafter
proposes up to G tokens; the accepted run and one token more are emitted and fed to it. So E[N] =
tokens of output ÷ rounds, in brackets the 95 % interval of resampled streams. The first round
drafts after the prompt alone. Drafted tokens past the recorded end are not counted as drafted.

ngram-2-5, ngram-5-5      vLLM's n-gram proposer (vllm.v1.spec_decode.ngram_proposer,
                          prompt_lookup_min and _max; 5 and 5 are its defaults), called as vLLM calls
                          it, with one request in the batch
ngram-2-5-kernel          its compiled function alone, without the Python around it
suffix                    Arctic Inference's suffix cache by vLLM's defaults (depth 24, factor 1,
                          minimum probability 0.1), a new one for each stream: the request's own
                          prompt and output. By factor 1 no draft is longer than its match
suffix-shared             one for all streams of a set, in their order, as in vLLM: earlier outputs
                          of the set as well
suffix-eager[-shared]     depth 64 (the class's own default), factor 4, minimum probability 0:
                          drafts of the maximum length
suffix-tree-shared        vLLM's defaults, but the draft is a tree of G tokens (use_tree_spec, which
                          vLLM does not use)

Costs are those of proposing and of feeding the emitted tokens, in µs. "a token" is a round's cost ÷
its tokens, once for each token; "a round" is once for each round; "start" is per token of the
prompt, once. Each replay is done --repeats times, and a round counts with its minimum: the
drafter's work is the same each time, the load of the machine is not. "all" are the five workloads
together. Only a suffix cache that has seen and forgotten a stream may draft differently than
before, by the order of children of equal counts, which forgetting does not restore; the JSON has
the number of such streams (`unsteady`), and their first replay counts.

Sets:
real    the streams of the five workloads unchanged
smollm2 what SmolLM2 says to real prompts (real-WORKLOAD.jsonl)
long    the first four streams of each workload after long contexts: all streams (rewrite,
        completion, prose, chat, hostile; each its prompt, then its output) make a ring, and the
        prompt is preceded by tokens before it in the ring up to a length of 32,768 tokens
memory  the suffix cache after TOKENS of earlier outputs. Those are made of the outputs of every
        other line (0, 2, ...) of the five workloads, in the order above. "seen" are the same lines
        replayed, "unseen" the others; each is forgotten after its replay.
        Draws are those of an LCG: state = state · 6364136223846793005 + 1442695040888963407 mod
        2^64 from state 1; a draw is state >> 33. A text is perturbed token by token: draw; if it is
        a multiple of 50, the token is the next draw mod 8192.
          copies   the outputs, one after the other and again from the first, each perturbed
          splices  texts of 128 tokens: until there are 128, draw an output (mod their number), a
                   start in it (mod its length) and a length (16 + draw mod 32), and append these
                   tokens (fewer at its end); cut to 128; then perturbed
        A memory is the first texts that have TOKENS together, the last one whole; each is one
        earlier request with an empty prompt.
        The check is over all its tokens: check = ((check ^ token) · 1099511628211) mod 2^64 from
        14695981039346656037. Bytes per token are the growth of resident memory in a separate
        process; `estimated` is the cache's own estimate. The time to remember is processor time, of
        one pass.

--dump-streams writes the replayed streams, one {"prompt":[ids],"output":[ids]} per line:
WORKLOAD.jsonl, long.jsonl, and memory-copies.jsonl and memory-splices.jsonl with as many tokens as
the largest of --memory.

Needs vLLM (tests/engines/vllm.sh) for ngram-* and Arctic Inference (arctic.sh in this folder) for
suffix*:

    "$FORETELL_CACHE"/engines/vllm-0.32.0/bin/python tests/bench/lookups.py --arctic "$(tests/bench/arctic.sh)" --json lookups.json
"""

import argparse
import collections
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import sys
import time
import types

from figures import resampled
from sides import ROOT, counts, some_of

WORKLOADS = ("rewrite", "completion", "prose", "chat", "hostile")
SMOLLM2 = ("real-edit", "real-chat", "real-completion", "real-talk", "real-tools")
SETS = ("real", "smollm2", "long", "memory")
MEMORIES = ("copies", "splices")
TRACES = ROOT / "tests/control/traces"
CACHE = pathlib.Path(os.environ.get("FORETELL_CACHE", ROOT / ".cache"))
LONG, LONG_EACH, VOCABULARY, PIECE = 32768, 4, 8192, 128
BITS = (1 << 64) - 1
Stream = collections.namedtuple("Stream", "prompt output")
Replay = collections.namedtuple("Replay", "start rounds unsteady", defaults=[False])
Round = collections.namedtuple("Round", "emitted drafted accepted seconds")
Suffix = collections.namedtuple("Suffix", "depth factor probability tree shared")
SUFFIXES = {"suffix": Suffix(24, 1.0, 0.1, False, False), "suffix-shared": Suffix(24, 1.0, 0.1, False, True),
            "suffix-eager": Suffix(64, 4.0, 0.0, False, False), "suffix-eager-shared": Suffix(64, 4.0, 0.0, False, True),
            "suffix-tree-shared": Suffix(24, 1.0, 0.1, True, True)}
REMEMBERING = ("suffix-shared", "suffix-eager-shared", "suffix-tree-shared")
NGRAMS = {"ngram-2-5": (2, 5, False), "ngram-5-5": (5, 5, False), "ngram-2-5-kernel": (2, 5, True)}


# ----------------------------------------------------------------------------------------- streams

def recorded(workload):
    lines = (TRACES / f"{workload}.jsonl").read_text().splitlines()
    return [Stream(line["prompt"], line["output"]) for line in map(json.loads, lines)]


def behind_long_contexts(streams):
    """The first streams of each workload, preceded by the tokens before them in the ring of all."""
    ring = [token for name in WORKLOADS for one in streams[name] for token in one.prompt + one.output]
    begin, found = 0, []
    for name in WORKLOADS:
        for number, one in enumerate(streams[name]):
            if number < LONG_EACH:
                first = begin - (LONG - len(one.prompt))
                before = [ring[at % len(ring)] for at in range(first, begin)]
                found.append(Stream(before + one.prompt, one.output))
            begin += len(one.prompt) + len(one.output)
    return found


def draws(state=1):
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & BITS
        yield state >> 33


def perturbed(text, draw):
    return [next(draw) % VOCABULARY if next(draw) % 50 == 0 else token for token in text]


def copies(outputs):
    draw = draws()
    for text in itertools.cycle(outputs):
        yield perturbed(text, draw)


def splices(outputs):
    draw = draws()
    while True:
        text = []
        while len(text) < PIECE:
            output = outputs[next(draw) % len(outputs)]
            start = next(draw) % len(output)
            text += output[start:start + 16 + next(draw) % 32]
        yield perturbed(text[:PIECE], draw)


def earlier(kind, streams, tokens):
    """The earlier outputs of a memory: whole texts, until they have `tokens` tokens."""
    outputs = [one.output for name in WORKLOADS for one in streams[name][::2]]
    for text in {"copies": copies, "splices": splices}[kind](outputs):
        yield text
        tokens -= len(text)
        if tokens <= 0:
            return


def checked(check, text):
    for token in text:
        check = (check ^ token) * 1099511628211 & BITS
    return check


def dump(folder, tokens):
    streams = {name: recorded(name) for name in WORKLOADS}
    written = {**streams, "long": behind_long_contexts(streams)}
    written |= {f"memory-{kind}": (Stream([], text) for text in earlier(kind, streams, tokens)) for kind in MEMORIES}
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in written.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps(one._asdict(), separators=(",", ":")) + "\n" for one in some)


# ---------------------------------------------------------------------------------------- drafters

class NgramDrafter:
    """vLLM's proposer with one request."""

    def __init__(self, least, most, kernel, gamma, room):
        import numpy
        from vllm.v1.spec_decode import ngram_proposer

        namespace = types.SimpleNamespace
        config = namespace(speculative_config=namespace(prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=gamma),
                      model_config=namespace(max_model_len=room), scheduler_config=namespace(max_num_seqs=1),
                      parallel_config=namespace(tensor_parallel_size=1))
        self.proposer, self.gamma = ngram_proposer.NgramProposer(config), gamma
        self.kernel = ngram_proposer._find_longest_matched_ngram_and_propose_tokens if kernel else None
        self.tokens, self.length = numpy.zeros((1, room), numpy.int32), numpy.zeros(1, numpy.int32)
        # vLLM's own warm-up uses no request, so that nothing is compiled before the first one.
        self.start([1, 2, 3])
        self.propose()

    def start(self, prompt):
        self.length[0] = 0
        self.push(prompt)

    def propose(self):
        if self.kernel is None:
            return self.proposer.propose(self.gamma, [[1]], self.length, self.tokens)[0], None
        proposer = self.proposer
        found = self.kernel(self.tokens[0, :self.length[0]], proposer.min_n, proposer.max_n, proposer.max_model_len, self.gamma)
        return found.tolist(), None

    def push(self, tokens):
        end = self.length[0] + len(tokens)
        self.tokens[0, self.length[0]:end] = tokens
        self.length[0] = end

    def stop(self):
        pass


class SuffixDrafter:
    """Arctic Inference's cache, called as by vLLM. With `forget`, a stream is removed
    afterwards."""

    def __init__(self, settings, gamma, room, cache=None, forget=False):
        import numpy

        self.settings, self.gamma, self.forget = settings, gamma, forget
        self.cache, self.request = cache or suffix_cache(settings), 0
        self.tokens, self.length = numpy.zeros(room, numpy.int32), 0

    def start(self, prompt):
        if not self.settings.shared:
            self.cache = suffix_cache(self.settings)
        self.tokens[:len(prompt)] = prompt
        self.length = len(prompt)
        self.request += 1
        self.cache.start_request(-self.request, self.tokens[:len(prompt)])

    def propose(self):
        start = max(0, self.length - self.settings.depth)
        found = self.cache.speculate(-self.request, self.tokens[start:self.length], max_spec_tokens=self.gamma,
                                     max_spec_factor=self.settings.factor, min_token_prob=self.settings.probability,
                                     use_tree_spec=self.settings.tree)
        return found.token_ids, found.parents

    def push(self, tokens):
        self.tokens[self.length:self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.cache.add_active_response(-self.request, tokens)

    def stop(self):
        self.cache.stop_request(-self.request)
        if self.forget:
            self.cache.evict_cached_response(-self.request)


def suffix_cache(settings, most=10000):
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    return SuffixDecodingCache(max_tree_depth=settings.depth, max_cached_requests=most)


def drafter(name, gamma, room):
    return NgramDrafter(*NGRAMS[name], gamma, room) if name in NGRAMS else SuffixDrafter(SUFFIXES[name], gamma, room)


# ------------------------------------------------------------------------------------------ replay

def walked(tokens, parents, output, at):
    """(number of drafted tokens that agree with the output, number of them within it)."""
    depths, node, run = [], -1, 0
    for index, token in enumerate(tokens):
        parent = index - 1 if parents is None else parents[index]
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if parent == node and at + run < len(output) and token == output[at + run]:
            node, run = index, run + 1
    return run, sum(depth <= len(output) - at for depth in depths)


def replay(drafting, stream):
    """One stream's rounds."""
    clock, rounds, at = time.perf_counter, [], 0
    begun = clock()
    drafting.start(stream.prompt)
    start = clock() - begun
    while at < len(stream.output):
        begun = clock()
        tokens, parents = drafting.propose()
        proposed = clock() - begun
        run, within = walked(tokens, parents, stream.output, at)
        new = stream.output[at:at + run + 1]
        begun = clock()
        drafting.push(new)
        rounds.append(Round(len(new), within, run, proposed + clock() - begun))
        at += len(new)
    drafting.stop()
    return Replay(start, rounds)


def least(replays):
    """Replays of one stream merged: the first one's rounds with their minimum times.

    The minimum is over the replays with the same drafts."""
    drafts = [[r[:3] for r in one.rounds] for one in replays]
    same = [one for one, of_it in zip(replays, drafts) if of_it == drafts[0]]
    rounds = [min(times, key=lambda r: r.seconds) for times in zip(*(one.rounds for one in same))]
    return Replay(min(one.start for one in same), rounds, len(same) < len(replays))


def replayed(make, streams, repeats):
    """All streams, each with its minimum times; `make` makes a drafter for one pass over them."""
    passes = []
    for _ in range(repeats):
        drafting = make()
        passes.append([replay(drafting, stream) for stream in streams])
    return [least(same) for same in zip(*passes)]


# ----------------------------------------------------------------------------------------- figures

def quantile(ordered, share):
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def spread(values):
    """Mean, median and 99th percentile in µs."""
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered) * 1e6, "p50": quantile(ordered, 0.5) * 1e6, "p99": quantile(ordered, 0.99) * 1e6}


def emitted(pairs):
    return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)


def row(name, drafting, gamma, streams, replays):
    rounds = [r for one in replays for r in one.rounds]
    pairs = [(len(stream.output), len(one.rounds)) for stream, one in zip(streams, replays)]
    return {"set": name, "drafter": drafting, "gamma": gamma, "streams": len(pairs), "tokens": sum(t for t, _ in pairs),
            "rounds": len(rounds), "emitted": resampled(pairs, emitted), "drafted": sum(r.drafted for r in rounds),
            "accepted": sum(r.accepted for r in rounds), "empty": sum(not r.drafted for r in rounds),
            "token_us": spread([r.seconds / r.emitted for r in rounds for _ in range(r.emitted)]),
            "round_us": spread([r.seconds for r in rounds]),
            "unsteady": sum(one.unsteady for one in replays),
            "start_us": sum(one.start for one in replays) / sum(len(one.prompt) for one in streams) * 1e6, "pairs": pairs}


HEAD = ("set               drafter             gamma  tokens rounds  E[N] (95 % interval)  accepted  empty"
        "   µs a token: mean   p50   p99   a round: mean   p99   start")


def words(row):
    e, token, round_ = row["emitted"], row["token_us"], row["round_us"]
    return (f"{row['set']:<17} {row['drafter']:<19} {row['gamma']:>5} {row['tokens']:>7} {row['rounds']:>6} {e['ratio']:>5.2f} "
            f"({e['low']:.2f} to {e['high']:.2f}) {row['accepted'] / max(row['drafted'], 1):>11.1%} "
            f"{row['empty'] / row['rounds']:>6.1%} {token['mean']:>19.2f} {token['p50']:>5.1f} {token['p99']:>5.1f} "
            f"{round_['mean']:>15.1f} {round_['p99']:>5.1f} {row['start_us']:>7.2f}")


class Rows:
    """Rows, printed as they are added."""

    def __init__(self):
        self.rows = []

    def add(self, *about):
        self.rows.append(row(*about))
        print(words(self.rows[-1]), flush=True)


# -------------------------------------------------------------------------------------------- sets

def unchanged(table, streams, args):
    room = 2048
    for name, gamma in itertools.product(args.drafters, args.gamma):
        together = [], []
        for workload in streams:
            found = replayed(lambda: drafter(name, gamma, room), streams[workload], args.repeats)
            table.add(workload, name, gamma, streams[workload], found)
            together = together[0] + streams[workload], together[1] + found
        table.add("all", name, gamma, *together)


def long(table, streams, args):
    some = behind_long_contexts(streams)
    for name, gamma in itertools.product(args.drafters, args.gamma):
        if not SUFFIXES.get(name, Suffix(*[None] * 5)).shared:
            table.add("long", name, gamma, some, replayed(lambda: drafter(name, gamma, LONG + 1024), some, args.repeats))


def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def remember(cache, number, text):
    cache.start_request(number, [])
    cache.add_active_response(number, text)
    cache.stop_request(number)


def replay_memory(table, kind, name, wanted, cache, streams, args):
    """The rows of a memory of `wanted` tokens."""
    for gamma, (lines, first) in itertools.product(args.gamma, (("seen", 0), ("unseen", 1))):
        some = [one for workload in WORKLOADS for one in streams[workload][first::2]]
        found = replayed(lambda: SuffixDrafter(SUFFIXES[name], gamma, 2048, cache, True), some, args.repeats)
        table.add(f"{kind} {wanted // 1000}k {lines}", name, gamma, some, found)


def memory_of(kind, name, args):
    """Rows of a memory and its sizes, measured in a separate process."""
    sys.path.insert(0, str(args.arctic))
    streams, table, sizes = {w: recorded(w) for w in WORKLOADS}, Rows(), []
    cache = suffix_cache(SUFFIXES[name], -1)
    for number, text in enumerate(earlier(kind, streams, 100_000)):  # temporary memory is allocated before the measurement
        checked(0, text)
    before, check, tokens, seconds, wanted = resident(), 14695981039346656037, 0, 0.0, sorted(set(args.memory))
    for number, text in enumerate(earlier(kind, streams, wanted[-1])):
        begun = time.thread_time()
        remember(cache, number, text)
        seconds += time.thread_time() - begun
        tokens, check = tokens + len(text), checked(check, text)
        if tokens < wanted[0]:
            continue
        sizes.append({"memory": kind, "drafter": name, "wanted": wanted.pop(0), "tokens": tokens, "check": f"{check:016x}",
                      "bytes_per_token": (resident() - before) / tokens,
                      "estimated_per_token": cache._global_tree.estimate_memory() / tokens,
                      "remember_us": seconds / tokens * 1e6})
        replay_memory(table, kind, name, sizes[-1]["wanted"], cache, streams, args)
    return table.rows, sizes


def memory(table, args):
    """Measures all memories; the processes print the rows."""
    sizes = []
    for kind, name in itertools.product(MEMORIES, [name for name in args.drafters if name in REMEMBERING]):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows, found = pool.apply(memory_of, (kind, name, args))
        table.rows += rows
        sizes += found
    return sizes


def size_words(size):
    return (f"{size['memory']:<8} {size['drafter']:<19} {size['tokens']:>9} tokens, check {size['check']}: "
            f"{size['bytes_per_token']:.0f} bytes a token "
            f"({size['estimated_per_token']:.0f} estimated), {size['remember_us']:.2f} µs a token to remember")


# --------------------------------------------------------------------------------------- arguments

def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    drafters = (*NGRAMS, *SUFFIXES)
    parser.add_argument("--sets", type=some_of(SETS), default=list(SETS), metavar="S,...", help="all of real,smollm2,long,memory by default")
    parser.add_argument("--drafters", type=some_of(drafters), default=list(drafters), metavar="D,...", help="all by default")
    parser.add_argument("--gamma", type=counts, default=[4, 8, 32], metavar="G,...", help="4,8,32 by default")
    parser.add_argument("--memory", type=counts, default=[1_000_000, 10_000_000], metavar="TOKENS,...")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--arctic", type=pathlib.Path, default=CACHE / "engines/arctic-0.3.0/site", metavar="DIR",
                        help="output of arctic.sh")
    parser.add_argument("--dump-streams", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    if args.dump_streams:
        return dump(args.dump_streams, max(args.memory))
    sys.path.insert(0, str(args.arctic))
    streams, table, sizes = {name: recorded(name) for name in WORKLOADS}, Rows(), []
    print(HEAD)
    if "real" in args.sets:
        unchanged(table, streams, args)
    if "smollm2" in args.sets:
        unchanged(table, {name: recorded(name) for name in SMOLLM2}, args)
    if "long" in args.sets:
        long(table, streams, args)
    if "memory" in args.sets:
        sizes = memory(table, args)
        print("\n".join(map(size_words, sizes)))
    if args.json:
        versions = {"python": sys.version.split()[0], "arctic": args.arctic.parent.name,
                    **{name: version(name) for name in ("vllm", "numba", "numpy")}}
        args.json.write_text(json.dumps({"versions": versions, "rows": table.rows, "memories": sizes}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
