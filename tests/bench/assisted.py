#!/usr/bin/env python3
"""transformers' own speculation on the bundled target: a baseline for drafters, tokens per forward.

    assisted.py [--workloads W,...] [--prompts N] [--gamma G,...] [--methods M,...] [--max-tokens N] [--threads N] [--json F]

`generate` of transformers runs greedily, batch 1, float32, on the bundled weights
(onnx/export/safetensors.py writes them to a temporary folder), for the first N prompts of each
workload:

lookup         prompt_lookup_num_tokens=G with max_matching_ngram_size 2, the default: the tokens
               after the first (leftmost) position of the last two tokens, else of the last one
same           assistant_model=draft-same, num_assistant_tokens=G, schedule constant, confidence
               threshold 0: always G tokens
same-defaults  the same model with transformers' own settings: 20 tokens, constant, threshold 0.4
               (adapted where scikit-learn is installed); it has no G
other          universal assisted generation: draft-other, another vocabulary, with tokenizer= and
               assistant_tokenizer=; G tokens of the assistant's, threshold 0, whatever that is in
               tokens of the target
other-fresh    the same, made to encode the whole text for the assistant anew in each round: its
               drafts if its text is never garbled

E[N] is tokens ÷ forwards of the target. A forward is a round: the first one, which reads the
prompt, verifies a draft as well. The bracket is the 95 % interval of resampled prompts. Forwards
are counted at the model and again as calls of the candidate generator; unequal counts end the run.
A drafted token counts as accepted where the output has it at its position.
`empty` is the share of rounds without a draft, `garbled` that of rounds in which the assistant of
another vocabulary was given another text than the target's (special tokens aside) to continue,
`lost` that of rounds whose draft's text is not the assistant's text. The text is compared with
plain greedy `generate`; where it forks, the prompt, the position and the difference of the plain
run's logits there are printed.

Needs numpy, torch, transformers and onnx. With the vLLM of tests/engines/vllm.sh, which has no
onnx:

    pip install --no-deps --target DIR onnx==1.23.2 ml_dtypes
    PYTHONPATH=DIR "$FORETELL_CACHE"/engines/vllm-0.32.0/bin/python tests/bench/assisted.py --json assisted.json
"""

import argparse
import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from figures import resampled
from sides import ROOT, counts, read_workload, some_of

WORKLOADS = ("rewrite", "completion", "prose", "chat", "hostile")
METHODS = ("lookup", "same", "same-defaults", "other", "other-fresh")
EXPORTER = ROOT / "onnx/export/safetensors.py"
MODELS = ("target", "draft-same", "draft-other")
HEAD = "workload    method         gamma prompts tokens forwards  E[N] (95 % interval)  drafted accepted  empty garbled   lost  forks"
Round = collections.namedtuple("Round", "start draft garbled lost")


class Wrong(Exception):
    """An inconsistent count."""


class Watched:
    """A candidate generator that records its drafts."""

    def __init__(self, inner, rounds, fresh):
        self.inner, self.rounds, self.fresh, self.garbled = inner, rounds, fresh, False
        if hasattr(inner, "_prepare_assistant_input_ids"):
            inner._prepare_assistant_input_ids = functools.partial(self.prepared, inner._prepare_assistant_input_ids)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prepared(self, prepare, ids):
        """The input of the assistant with another vocabulary; garbled if it is not the text."""
        found = prepare(ids)
        self.given = found[0].shape[1]
        given = self.inner.assistant_tokenizer.decode(found[0][0], skip_special_tokens=True)
        self.garbled = given != self.inner.target_tokenizer.decode(ids[0], skip_special_tokens=True)
        return found

    def get_candidates(self, ids, **more):
        if self.fresh:
            self.inner.prev_assistant_ids = None
            self.inner.assistant_kwargs.pop("past_key_values", None)
        found, logits = self.inner.get_candidates(ids, **more)
        draft = found[0, ids.shape[1]:].tolist()
        self.rounds.append(Round(ids.shape[1], draft, self.garbled, self.lost(draft)))
        return found, logits

    def lost(self, draft):
        """True if the draft's text is not the text of the assistant with another vocabulary."""
        if getattr(self.inner, "prev_assistant_ids", None) is None:
            return False
        written = self.inner.assistant_tokenizer.decode(self.inner.prev_assistant_ids[0, self.given:], skip_special_tokens=True)
        return written != self.inner.target_tokenizer.decode(draft, skip_special_tokens=True)


class Bench:
    """The three models, and the count of the target's forwards."""

    def __init__(self, folder):
        self.models, self.tokenizers, self.rounds, self.forwards, self.fresh = {}, {}, [], 0, False
        for name in MODELS:
            # As a process: the exporter has the name of the package with which transformers reads
            # weights.
            subprocess.run([sys.executable, EXPORTER, ROOT / "onnx/models" / name, folder / name], check=True)
            self.models[name] = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
            self.tokenizers[name] = transformers.AutoTokenizer.from_pretrained(folder / name)
        target = self.models["target"]
        self.settings = {name: (model.generation_config.num_assistant_tokens,
                                model.generation_config.num_assistant_tokens_schedule,
                                model.generation_config.assistant_confidence_threshold) for name, model in self.models.items()}
        target.register_forward_pre_hook(self.count)
        target._get_candidate_generator = functools.partial(self.watched, target._get_candidate_generator)

    def count(self, *_):
        self.forwards += 1

    def watched(self, make, **more):
        return Watched(make(**more), self.rounds, self.fresh)

    def prompt(self, entry):
        """The token ids of a line of a workload, as in Foretell's target."""
        tokenizer, body = self.tokenizers["target"], entry["body"]
        text = body["prompt"] if entry["route"] == "completions" else tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True)
        return tokenizer(text)["input_ids"]

    def drafting(self, method, gamma):
        """The arguments of `generate` for a method."""
        self.fresh = method == "other-fresh"
        if method == "lookup":
            return {"prompt_lookup_num_tokens": gamma}
        if method == "same-defaults":
            return {"assistant_model": self.assistant("draft-same", *self.settings["draft-same"])}
        if method == "same":
            return {"assistant_model": self.assistant("draft-same", gamma, "constant", 0)}
        return {"assistant_model": self.assistant("draft-other", gamma, "constant", 0),
                "tokenizer": self.tokenizers["target"], "assistant_tokenizer": self.tokenizers["draft-other"]}

    def assistant(self, name, tokens, schedule, threshold):
        """The model with its draft length: `generate` reads it from the assistant's
        configuration."""
        config = self.models[name].generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, schedule
        config.assistant_confidence_threshold = threshold
        return self.models[name]

    def generate(self, prompt, most, **drafting):
        """(output, rounds, seconds) of one prompt."""
        self.rounds.clear()
        self.forwards = 0
        ids, begun = torch.tensor([prompt]), time.perf_counter()
        out = self.models["target"].generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most,
                                             **drafting)
        seconds, output = time.perf_counter() - begun, out[0, len(prompt):].tolist()
        expected = len(self.rounds) if drafting else len(output)
        if self.forwards != expected:
            raise Wrong(f"{self.forwards} forwards of the target, expected {expected}")
        return output, list(self.rounds), seconds

    def logits(self, tokens):
        with torch.inference_mode():
            return self.models["target"](torch.tensor([tokens])).logits[0, -1]


def accepted(round_, whole):
    """Number of a draft's tokens that are in the output."""
    count = 0
    for position, token in enumerate(round_.draft, round_.start):
        if position >= len(whole) or whole[position] != token:
            break
        count += 1
    return count


def fork(bench, prompt, plain, other):
    """The position where two outputs differ and the plain token's logit lead there; None if
    equal."""
    position = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if position == len(plain) == len(other):
        return None
    if position in (len(plain), len(other)):
        return {"position": position, "by": None}
    logits = bench.logits(prompt + plain[:position])
    return {"position": position, "by": round(float(logits[plain[position]] - logits[other[position]]), 6)}


def asked(bench, prompt, plain, most, drafting):
    """The result of one prompt with one drafting method."""
    output, rounds, seconds = bench.generate(prompt, most, **drafting)
    return {"tokens": len(output), "rounds": len(rounds), "drafted": sum(len(r.draft) for r in rounds),
            "accepted": sum(accepted(r, prompt + output) for r in rounds),
            "empty": sum(not r.draft for r in rounds), "garbled": sum(r.garbled for r in rounds),
            "lost": sum(r.lost for r in rounds), "seconds": round(seconds, 4), "fork": fork(bench, prompt, plain, output)}


def emitted(pairs):
    return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)


def row(workload, method, gamma, answers, plain_seconds):
    total = {key: sum(a[key] for a in answers) for key in ("tokens", "rounds", "drafted", "accepted", "empty", "garbled", "lost")}
    interval = resampled([(a["tokens"], a["rounds"]) for a in answers], emitted)
    return {"workload": workload, "method": method, "gamma": gamma, **total, "emitted": interval,
            "seconds": round(sum(a["seconds"] for a in answers), 3), "plain_seconds": round(plain_seconds, 3),
            "forks": [{"prompt": i, **a["fork"]} for i, a in enumerate(answers) if a["fork"]], "prompts": answers}


def ways(methods, gammas):
    for method in methods:
        for gamma in [None] if method == "same-defaults" else gammas:
            yield method, gamma


def measure(bench, workload, args):
    """The rows of a workload, one by one."""
    prompts = [bench.prompt(entry) for entry in read_workload(workload)[:args.prompts]]
    plain = [bench.generate(prompt, args.max_tokens) for prompt in prompts]
    plain_seconds = sum(seconds for _, _, seconds in plain)
    for method, gamma in ways(args.methods, args.gamma):
        drafting = bench.drafting(method, gamma)
        answers = [asked(bench, prompt, output, args.max_tokens, drafting) for prompt, (output, _, _) in zip(prompts, plain)]
        yield row(workload, method, gamma, answers, plain_seconds)


def words(row):
    e, drafted = row["emitted"], row["drafted"]
    forks = ", ".join(f"{f['prompt']}@{f['position']} by {f['by']}" for f in row["forks"])
    return (f"{row['workload']:<11} {row['method']:<14} {row['gamma'] or '-':>5} {len(row['prompts']):>7} {row['tokens']:>6} "
            f"{row['rounds']:>8} {e['ratio']:>5.2f} ({e['low']:.2f} to {e['high']:.2f}) {drafted:>7} "
            f"{row['accepted'] / drafted if drafted else 0:>8.1%} {row['empty'] / row['rounds']:>6.1%} "
            f"{row['garbled'] / row['rounds']:>7.1%} {row['lost'] / row['rounds']:>6.1%}  {forks or 'none'}")


def versions():
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")} | {
        "python": sys.version.split()[0], "scikit-learn": importlib.util.find_spec("sklearn") is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", type=some_of(WORKLOADS), default=list(WORKLOADS), metavar="W,...")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="of each workload (50)")
    parser.add_argument("--gamma", type=counts, default=[4, 8], metavar="G,...", help="4,8 by default")
    parser.add_argument("--methods", type=some_of(METHODS), default=list(METHODS), metavar="M,...")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's threads (1)")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rows = []
    with contextlib.ExitStack() as stack:
        bench = Bench(pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
        print(HEAD)
        for workload in args.workloads:
            for found in measure(bench, workload, args):
                print(words(found), flush=True)
                rows.append(found)
    if args.json:
        result = {"versions": versions(), "max_tokens": args.max_tokens, "settings": bench.settings, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
