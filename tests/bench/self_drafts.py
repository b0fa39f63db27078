#!/usr/bin/env python3
"""Drafts that a model makes of itself without training: is `early_exit` or `lookahead` worth building?

    self_drafts.py [--count N] [--tokens N] [--threads N] [--json F]

Greedy texts of SmolLM2-135M (`make real-models`), N prompts of each workload of real_prompts.py, in
32 bits, batch 1. For each method the mean acceptance length E[N] (accepted + 1) over all rounds,
the seconds of its round as multiples of a plain step, timed here, and their ratio: the speed
relative to plain decoding. The last column is the same ratio where reading the weights is the only
cost, which is the most that any machine makes of it.

early exit   the first k layers, the final norm and the output matrix draft g tokens, one after the
             other; the other layers verify them on the kept states (LayerSkip, arXiv 2404.16710), for
             which the last drafted token has to pass the first ones as well. A drafted prefix is the greedy text for as long as it is accepted, so one pass over that
             text has every round in it.
lookahead    a window of W columns and N - 1 levels and G verified n-grams in one pass with a mask
             (arXiv 2402.02057): 1 + (W + G) (N - 1) tokens a step, none of them drafted by a model.

Needs torch and transformers:

    "$FORETELL_CACHE"/engines/vllm-0.32.0/bin/python tests/bench/self_drafts.py
"""

import argparse
import collections
import functools
import json
import pathlib
import statistics
import time

import real_prompts
import torch
import transformers
from real_servers import PROMPTS, REAL

MODEL = REAL / "smollm2/hf"
# of its 30 layers
EXITS = (6, 12, 18, 24, 27)
GAMMAS = (1, 2, 4)
# (window, n-gram, verified n-grams): the smallest, and the paper's for a model of 7 B
WINDOWS = ((5, 3, 5), (7, 5, 7), (15, 5, 15))
# context of the timed steps, tokens
CONTEXT = 200
REPEATS = 15


def prompt_ids(tokenizer, entry):
    body = entry["body"]
    text = body.get("prompt") or tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def cut(cache, length):
    cache.crop(length)
    return cache


@torch.inference_mode()
def greedy(model, ids, most, ends):
    """The greedy continuation of `ids`, `most` tokens at most."""
    out, cache, fed = [], None, torch.tensor([ids])
    while len(out) < most:
        given = model(fed, past_key_values=cache, use_cache=True)
        cache, token = given.past_key_values, int(given.logits[0, -1].argmax())
        out.append(token)
        if token in ends:
            break
        fed = torch.tensor([[token]])
    return out


# ---------------------------------------------------------------------------------------- early exit

@torch.inference_mode()
def agreements(model, ids, out):
    """For each exit, the positions of `out` whose token its first layers choose as well."""
    states = model(torch.tensor([ids + out]), output_hidden_states=True).hidden_states
    wanted = torch.tensor(out)
    for layers in EXITS:
        logits = model.lm_head(model.model.norm(states[layers][0, len(ids) - 1:-1]))
        yield layers, (logits.argmax(-1) == wanted).tolist()


def played(agree, gamma):
    """(rounds, tokens) of a text whose drafted token is accepted where `agree` says so."""
    at = rounds = 0
    while at < len(agree):
        run = 0
        while run < gamma and at + run < len(agree) and agree[at + run]:
            run += 1
        at, rounds = at + run + 1, rounds + 1
    return rounds, len(agree)


# ----------------------------------------------------------------------------------------- lookahead

class Lookahead:
    """The window and the pool of n-grams of one text."""

    def __init__(self, model, window, size, most):
        self.model, self.window, self.size, self.most = model, window, size, most
        self.pool = collections.defaultdict(lambda: collections.OrderedDict())

    def started(self, ids):
        # As in the paper's code: random tokens of the prompt.
        draw = torch.Generator().manual_seed(4)
        pick = torch.randint(len(ids), (self.size - 1, self.window), generator=draw).tolist()
        self.levels = [[ids[at] for at in row] for row in pick]

    def candidates(self, token):
        return list(self.pool[token])[-self.most:][::-1]

    def laid_out(self, token, context):
        """Tokens, positions and mask (True: may be read) of a step."""
        tokens, positions, sees = [token], [context], [[0]]
        for level, row in enumerate(self.levels):
            for column, guess in enumerate(row):
                at = len(tokens)
                first = [0] + [1 + earlier for earlier in range(column + 1)]
                diagonal = [1 + above * self.window + column for above in range(1, level)]
                sees.append(sorted({*first, *diagonal, at}))
                tokens.append(guess)
                positions.append(context + 1 + column + level)
        for gram in self.candidates(token):
            begin = len(tokens)
            for depth, guess in enumerate(gram):
                sees.append([0, *range(begin, begin + depth + 1)])
                tokens.append(guess)
                positions.append(context + 1 + depth)
        mask = torch.zeros(len(tokens), context + len(tokens), dtype=torch.bool)
        mask[:, :context] = True
        for row, read in enumerate(sees):
            mask[row, [context + at for at in read]] = True
        return tokens, positions, mask

    def note(self, grown):
        """Puts the n-grams of every column into the pool, and moves the window on by a level."""
        for column in range(self.window):
            gram = [row[column] for row in self.levels] + [grown[column]]
            known = self.pool[gram[0]]
            known.pop(tuple(gram[1:]), None)
            known[tuple(gram[1:])] = None
        self.levels = [*self.levels[1:], grown]

    @torch.inference_mode()
    def play(self, ids, wanted):
        """(rounds, tokens): the greedy text of `ids`, which is checked against `wanted`."""
        self.started(ids)
        cache = self.model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        text, out, rounds = list(ids), [], 0
        while len(out) < len(wanted):
            context = len(text) - 1
            tokens, positions, mask = self.laid_out(text[-1], context)
            bias = torch.zeros(1, 1, *mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            given = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, attention_mask=bias,
                               position_ids=torch.tensor([positions]))
            chosen = given.logits[0].argmax(-1).tolist()
            grams, best = self.candidates(text[-1]), []
            begin = 1 + (self.size - 1) * self.window
            for index, gram in enumerate(grams):
                run, said = [], chosen[0]
                for depth, guess in enumerate(gram):
                    if guess != said:
                        break
                    run.append(guess)
                    said = chosen[begin + index * (self.size - 1) + depth]
                if len(run) + 1 > len(best):
                    best = [*run, said]
            best = best or [chosen[0]]
            last = 1 + (self.size - 2) * self.window
            self.note(chosen[last:last + self.window])
            # The accepted tokens are computed again: rounds are counted here, not timed.
            cache = cut(given.past_key_values, context)
            cache = self.model(torch.tensor([[text[-1], *best[:-1]]]), past_key_values=cache, use_cache=True).past_key_values
            text, out, rounds = text + best, out + best, rounds + 1
        same = next((at for at, (a, b) in enumerate(zip(out, wanted)) if a != b), len(wanted))
        return rounds, len(wanted), same == len(wanted)


# --------------------------------------------------------------------------------------------- times

@functools.lru_cache
def shaped(layers):
    """A model of this shape with `layers` layers, for times only: its weights are random."""
    config = transformers.AutoConfig.from_pretrained(MODEL, num_hidden_layers=layers)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def seconds(tokens, layers):
    """Median seconds of a step with `tokens` tokens through `layers` layers, after CONTEXT
    others."""
    model, taken = shaped(layers), []
    cache = model(torch.ones(1, CONTEXT, dtype=torch.long), use_cache=True).past_key_values
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        cache = model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True).past_key_values
        taken.append(time.perf_counter() - began)
        cache = cut(cache, CONTEXT)
    return statistics.median(taken[2:])


def bytes_of(module):
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4, metavar="N", help="prompts of a workload")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of a text, at most")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    found, count = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, 0])), len(model.model.layers)
    same = texts = 0
    for name in real_prompts.NAMES:
        for entry in real_prompts.load(PROMPTS, name, args.count, args.tokens):
            ids = prompt_ids(tokenizer, entry)
            out = greedy(model, ids, args.tokens, ends)
            results = [((layers, gamma), played(agree, gamma)) for layers, agree in agreements(model, ids, out) for gamma in GAMMAS]
            for window in WINDOWS:
                rounds, tokens, agrees = Lookahead(model, *window).play(ids, out)
                same, texts = same + agrees, texts + 1
                results.append((window, (rounds, tokens)))
            for key, (rounds, tokens) in results:
                for column in (name, "all"):
                    sums = found[key][column]
                    sums[0], sums[1] = sums[0] + rounds, sums[1] + tokens
        print(f"{name}: done", flush=True)
    step = seconds(1, count)
    layer, matrix = bytes_of(model.model.layers[0]), bytes_of(model.lm_head)
    whole = count * layer + matrix
    columns = (*real_prompts.NAMES, "all")
    print(f"\n{args.count} prompts of a workload, {texts} lookahead texts, {same} of them the greedy ones; a plain step {step * 1e3:.1f} ms\n")
    print("| method | " + " | ".join(columns) + " | a round, steps | speed | by weights alone |")
    print("|---" * (len(columns) + 4) + "|")
    report = {}
    for key, sums in found.items():
        length = {column: tokens / rounds for column, (rounds, tokens) in sums.items()}
        if len(key) == 2:
            layers, gamma = key
            title = f"early exit after {layers} of {count} layers, {gamma} drafted"
            # The last drafted token passes the first layers too, but not the output matrix.
            took = (gamma + 1) * seconds(1, layers) - step * matrix / whole
            took += seconds(gamma + 1, count - layers)
            read = (gamma + 1) * layers * layer + gamma * matrix + (count - layers) * layer + matrix
        else:
            window, size, most = key
            title = f"lookahead W={window} N={size} G={most}"
            took, read = seconds(1 + (window + most) * (size - 1), count), whole
        cost, least = took / step, read / whole
        report[title] = {"e_n": length, "steps": cost, "speed": length["all"] / cost, "by_weights": length["all"] / least}
        cells = [title, *(f"{length[column]:.2f}" for column in columns), f"{cost:.2f}", f"{length['all'] / cost:.2f}",
                 f"{length['all'] / least:.2f}"]
        print("| " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
