"""Trains a drafter on recorded traffic: a small model that writes as one target does for one set of users.

The texts of a service repeat themselves in ways that no public corpus holds: its templates, its names,
its jargon. A model of two layers learns them in minutes on a CPU. Its embedding, which is also its
output matrix, covers only the tokens that occur in the recordings (`kept` in graph.py): with the whole
vocabulary of a large target the matrix would cost more than all layers.

The recordings may be encrypted where they are stored, so they come through standard input and no text
and no token of them is written or printed: the checkpoint holds weights, the state of the optimisers
and a digest of the data. The weights themselves may reproduce what they were trained on.

    traffic.py --tokenizer DIR --out DIR --work DIR --budget SECONDS [--base DIR] [--layers-of DIR] < REQUESTS

A line of standard input is a request, {"prompt": [ids], "output": [ids], "group": "name"}; a line of
standard output is an event in JSON. On SIGTERM it saves a checkpoint to --work and ends; the same
command with the same data goes on from there. The checkpoint stays when the drafter is done, for the
caller to remove when it is in its place.
"""

import argparse
import collections
import contextlib
import datetime
import hashlib
import importlib
import json
import pathlib
import signal
import sys
import time

try:
    import numpy as np
except ImportError as error:
    print(json.dumps({"event": "error", "message": f"{error}: install the packages of onnx/train/requirements.txt"}))
    sys.exit(1)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "export")]

from traffic_data import BATCH, CONTEXT, SEED, WINDOW, Batches, Kept, Refused, read, split  # noqa: E402
from traffic_report import card, report  # noqa: E402

FORM = 3  # of the checkpoint and of the training; another number makes older checkpoints unusable
# Share of the training from which every other batch has rows of CONTEXT tokens. The runtime gives the model the
# whole text, and one that only saw windows of 512 tokens is lost behind them: requests of 1,900 tokens, 90 seconds
# on one core, E[N] 1.96 without long rows, 3.67 with them from 0.8 on, 4.13 from 0.5 on, 4.14 from 0.3 on.
LONG_FROM = 0.5
# Rates of Muon and AdamW, and the share of the time before they fall; True: from a base.
RATES = {False: (0.02, 0.003, 0.55), True: (0.01, 0.001, 0.3)}
EVALUATIONS = 8  # over the run, besides the last
EVALUATING = 0.15  # of the time, at most, apart from the first and the last evaluation
SHOWN, SAVED = 2.0, 60.0  # seconds between two events of progress, and between two checkpoints
COMPARED, EQUAL = 32, 0.99  # places of the self-test at least, and the share that must be equal
HEAD_DIM = 64


class Stopped(BaseException):
    """A signal asked for the end."""


def emit(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


# -------------------------------------------------------------------------------------- evaluation

def rounds(hits, drafted):
    """Rounds that an output takes: a round accepts the right tokens that come next, up to `drafted`, and one more."""
    count = at = 0
    while at < len(hits):
        end = min(at + drafted, len(hits))
        while at < end and hits[at]:
            at += 1
        at, count = at + 1, count + 1
    return count


def acceptance(results, drafted):
    """E[N] of [(group, hits)]: (by group, of all), output tokens per round."""
    tokens, taken = collections.Counter(), collections.Counter()
    for group, hits in results:
        tokens[group] += len(hits)
        taken[group] += rounds(hits, drafted)
    by_group = {group: round(tokens[group] / taken[group], 4) for group in sorted(tokens)}
    return by_group, round(tokens.total() / taken.total(), 4)


def padded(sequences, most):
    """Batches of indices whose rows, padded to the longest, hold at most so many tokens."""
    now = []
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
        if now and len(sequences[now[0]]) * (len(now) + 1) > most:
            yield now
            now = []
        now.append(index)
    if now:
        yield now


def hits(model, kept, requests, device):
    """[(group, whether the model's first choice is each output token)], given the true text before it.

    Behind CONTEXT tokens the runtime does not ask the model for drafts, so there is no hit.
    """
    import torch

    results = [(r.group, np.zeros(len(r.output), bool)) for r in requests]
    texts = [kept.rows[np.concatenate([r.prompt, r.output])] for r in requests]
    inputs = [text[:-1][:CONTEXT] for text in texts]
    for batch in padded(inputs, 2 * BATCH):
        x = np.zeros((len(batch), max(len(inputs[batch[0]]), 1)), np.int64)
        for row, index in enumerate(batch):
            x[row, :len(inputs[index])] = inputs[index]
        with torch.no_grad():
            hidden = model(torch.from_numpy(x).to(device))
            for row, index in enumerate(batch):
                begin = max(len(requests[index].prompt) - 1, 0)
                chosen = choices(model, hidden[row, begin:len(inputs[index])], len(kept))
                target = begin + 1 + np.arange(len(chosen))
                results[index][1][target - len(requests[index].prompt)] = chosen == texts[index][target]
    return results


def choices(model, hidden, count):
    """The rows with the greatest logit, not the last one, which stands for every other token."""
    import torch

    table = model.model.embed_tokens.weight[:count]
    parts = [(part @ table.T).argmax(-1).cpu().numpy() for part in torch.split(hidden, 1024)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# ------------------------------------------------------------------------------------------- models

def json_of(path):
    return json.loads(path.read_text()) if path.is_file() else {}


def token_names(folder):
    """The ids of all tokens by name."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise Refused(f"{path} is missing")
    return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)


def special(folder, names, kind):
    """The id or ids of the token that begins or ends a text ("bos", "eos"); None if the files name none."""
    for file in ("generation_config.json", "config.json"):
        if (found := json_of(folder / file).get(f"{kind}_token_id")) is not None:
            return found
    token = json_of(folder / "tokenizer_config.json").get(f"{kind}_token")
    return names.get(token.get("content") if isinstance(token, dict) else token)


def sizes(hidden, layers):
    """The shape of a model without a base: that of the bundled drafters, by its width."""
    if hidden % HEAD_DIM or hidden < HEAD_DIM or layers < 1:
        raise Refused(f"--hidden must be a multiple of {HEAD_DIM}, and --layers at least 1")
    heads = hidden // HEAD_DIM
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads, "head_dim": HEAD_DIM,
            "intermediate_size": hidden * 11 // 4}


class Layers:
    """The layers of a drafter of another vocabulary, which know how text goes on and copy from it.

    A token begins with the row of the same token there, or with the mean of its pieces' rows. In 220 steps on 960
    requests E[N] 3.00, 2.20 without (tests/bench/trainings.py).
    """

    def __init__(self, folder):
        import bundle

        self.folder = folder
        weights, config = bundle.load(folder)
        self.weights = {name: array.astype(np.float32) for name, array in weights.items()}
        self.table = self.weights.pop("model.embed_tokens.weight")
        self.size = {name: config[name] for name in sizes(HEAD_DIM, 1)}

    def start(self, kept, tokenizer):
        from tokenizers import Tokenizer

        theirs, own = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (self.folder, tokenizer))
        rows = []
        for token in kept.ids.tolist():
            same = theirs.token_to_id(own.id_to_token(token) or "")
            pieces = [same] if same is not None else theirs.encode(own.decode([token])).ids
            rows.append(self.table[pieces].mean(0) if pieces else self.table.mean(0))
        return {**self.weights, "model.embed_tokens.weight": np.stack([*rows, self.table.mean(0)])}


class Base:
    """A model to start from: weights, its shape, and the tokens that its embedding has rows for."""

    FIXED = {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
    ABSENT = ("rope_scaling", "attention_bias", "mlp_bias")

    def __init__(self, folder, names, vocabulary):
        import bundle
        import onnx
        from graph import ROWS
        from onnx import numpy_helper

        self.folder = folder
        if token_names(folder) != names:
            raise Refused(f"{folder} has another tokenizer: a base must have the same one")
        try:
            self.weights, config = bundle.load(folder)
            tensors = {t.name: t for t in onnx.load(folder / "model.onnx").graph.initializer}
        except (OSError, ValueError) as error:
            raise Refused(f"{folder} is not a model folder to start from: {error}") from None
        wrong = [k for k, v in self.FIXED.items() if config.get(k) != v] + [k for k in self.ABSENT if config.get(k)]
        if wrong:
            raise Refused(f"{folder} is not shaped like the drafters that are trained here: {', '.join(wrong)}")
        self.size = {name: config[name] for name in sizes(HEAD_DIM, 1)}
        self.table = self.weights.pop("model.embed_tokens.weight").astype(np.float32)
        rows = numpy_helper.to_array(tensors[ROWS]) if ROWS in tensors else None
        own = np.arange(min(len(self.table), vocabulary)) if rows is None else np.flatnonzero(rows < len(self.table) - 1)
        self.kept, self.partial = Kept(own, vocabulary), rows is not None

    def start(self, kept):
        """The weights of a model with other kept tokens, where they mean the same."""
        other = self.table[-1] if self.partial else self.table.mean(0)
        known = np.concatenate([self.table[:len(self.kept)], other[None]])
        table = np.concatenate([known[self.kept.rows[kept.ids]], other[None]])
        return {**self.weights, "model.embed_tokens.weight": table}

    def model(self, device):
        """The model as it is, for the comparison."""
        return llama(self.size, len(self.kept), self.start(self.kept), device)


def llama(size, kept, weights, device):
    """A model with a row for each kept token and one for the others."""
    import torch
    from model import Llama

    model = Llama({**size, "vocab_size": kept + 1})
    if weights is not None:
        tensors = {name: torch.from_numpy(np.asarray(array, np.float32)) for name, array in weights.items()}
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise Refused(f"the base has other weights than its config says: {error}") from None
    return model.to(device)


def rounded(model):
    """Its weights as they are exported, in 16 bits."""
    return {name: p.detach().half().cpu() for name, p in model.state_dict().items()}


def digest(requests, begin, names, args):
    """Identifies the data and what else changes the model; the time it is given does not."""
    made = hashlib.sha256(json.dumps([FORM, args.hidden, args.layers, args.drafted, type(begin).__name__]).encode())
    made.update(json.dumps(sorted(names.items())).encode())
    if begin:
        made.update((begin.folder / "model.onnx").read_bytes())
    for request in requests:
        made.update(json.dumps([len(request.prompt), len(request.output), request.group]).encode())
        made.update(request.prompt.tobytes() + request.output.tobytes())
    return made.hexdigest()


# ----------------------------------------------------------------------------------------- training

class Signals:
    """SIGTERM and SIGINT end the training between two steps: at once where nothing is changed, else soon."""

    def __init__(self):
        self.asked = self.busy = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, *_):
        self.asked = True
        if not self.busy:
            raise Stopped

    def __enter__(self):
        self.busy = True

    def __exit__(self, *_):
        self.busy = False
        if self.asked:
            raise Stopped


# Weights (None: random ones), shape and name of what a model begins with.
Start = collections.namedtuple("Start", "weights size name")


class Training:
    """The model, its optimisers, and what the events report."""

    def __init__(self, args, parts, kept, base, start, identity, signals):
        import torch
        from train import Muon

        torch.manual_seed(SEED)
        (self.train, self.held), self.kept, self.args, self.signals = parts, kept, args, signals
        self.base, self.began_with = base, start.name
        self.identity, self.path = identity, args.work / "last.pt"
        self.muon_rate, self.adam_rate, self.hold = RATES[base is not None]
        self.model = llama(start.size, len(kept), start.weights, args.device)
        named = list(self.model.named_parameters())
        self.muon = Muon([p for n, p in named if p.ndim == 2 and "embed" not in n])
        self.adam = torch.optim.AdamW([p for n, p in named if p.ndim != 2 or "embed" in n], lr=self.adam_rate,
                                      betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self.batches = Batches(self.train, kept)
        self.step, self.spent, self.evaluating, self.due = 0, 0.0, 0.0, 1
        self.before, self.curve, self.best, self.began = None, [], None, None

    # ---- time

    def clock(self):
        """Seconds of training, those of earlier runs with the same data included."""
        return self.spent if self.began is None else time.monotonic() - self.began

    def share(self):
        return min(1.0, self.clock() / self.args.budget)

    # ---- checkpoints

    def save(self):
        from train import save

        with self.signals:
            save(self.path, self.model, muon=self.muon.momenta, adam=self.adam.state_dict(), digest=self.identity,
                 at=self.batches.at, best=self.best, before=self.before, curve=self.curve, step=self.step,
                 spent=self.clock(), evaluating=self.evaluating, due=self.due)

    def resume(self):
        """Goes on from the checkpoint of the same data, if there is one."""
        import torch

        if not self.path.is_file():
            return False
        try:
            state = torch.load(self.path, map_location=self.args.device, weights_only=True)
        except Exception:  # pickle, zip and torch have errors of their own
            return False
        if state.get("digest") != self.identity:
            emit("discarded")
            return False
        self.model.load_state_dict(state["model"])
        self.muon.momenta = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.batches.at = state["at"]
        for name in ("best", "before", "curve", "step", "spent", "evaluating", "due"):
            setattr(self, name, state[name])
        return True

    # ---- steps

    def take_step(self):
        """One step; returns the loss on the device and the number of tokens that were trained on."""
        import torch
        from model import chunked_loss
        from train import rate_at

        share, device = self.share(), self.args.device
        long = share > LONG_FROM and self.step % 2 and self.batches.cut[CONTEXT]
        x, y, weights = self.batches.next(CONTEXT if long else WINDOW)
        count = int((weights > 0).sum())
        x, y, weights = (torch.from_numpy(array).to(device) for array in (x, y, weights))
        with torch.autocast(device, torch.bfloat16):
            loss, _ = chunked_loss(self.model, self.model(x), y, weights, 4096 if device == "cuda" else 256)
        loss.backward()
        scale = rate_at(share, self.step, self.hold)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.muon.step(self.muon_rate * scale, 0.85 + 0.1 * min(1.0, self.step / 300))
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), count

    def run(self):
        self.began = time.monotonic() - self.spent
        self.compare()
        shown = saved = time.monotonic()
        losses, tokens = [], 0
        while self.clock() < self.args.budget:
            with self.signals:
                loss, count = self.take_step()
            losses.append(loss)
            tokens += count
            now = time.monotonic()
            if now - shown >= SHOWN:
                emit("progress", share=round(self.share(), 4), step=self.step, tokens_per_second=round(tokens / (now - shown)),
                     loss=round(sum(map(float, losses)) / len(losses), 4))
                shown, losses, tokens = now, [], 0
            if self.is_due():
                self.evaluate()
                shown, losses, tokens = time.monotonic(), [], 0
            if now - saved >= SAVED:
                self.save()
                saved = time.monotonic()
        if not self.curve or self.curve[-1][0] < 1.0:
            self.evaluate()
        self.spent, self.began = self.clock(), None
        self.save()

    def is_due(self):
        """Evaluations come at even shares of the time; those that would take too much of it are left out."""
        if self.share() * EVALUATIONS < self.due or self.clock() >= self.args.budget:
            return False
        self.due = int(self.share() * EVALUATIONS) + 1
        return self.evaluating <= EVALUATING * self.clock()

    # ---- evaluations

    def compare(self):
        """The base on the held-out requests, once."""
        if self.base and self.before is None:
            found = hits(self.base.model(self.args.device), self.base.kept, self.held, self.args.device)
            by_group, mean = acceptance(found, self.args.drafted)
            self.before = {"groups": by_group, "mean": mean}
            self.curve.append([0.0, by_group, mean])

    def evaluate(self):
        began, share, weights = time.monotonic(), round(self.share(), 4), rounded(self.model)
        by_group, mean = acceptance(hits(self.exported(weights), self.kept, self.held, self.args.device), self.args.drafted)
        with self.signals:
            self.curve.append([share, by_group, mean])
            if self.best is None or mean > self.best["mean"]:
                self.best = {"weights": weights, "groups": by_group, "mean": mean, "share": share}
            self.evaluating += time.monotonic() - began
        emit("validation", share=share, **self.compared(by_group, mean))

    def exported(self, weights):
        """A model with weights in 16 bits."""
        size = {k: v for k, v in self.model.size.items() if k != "vocab_size"}
        return llama(size, len(self.kept), {n: w.float().cpu().numpy() for n, w in weights.items()}, self.args.device)

    def compared(self, by_group, mean):
        before = self.before or {"groups": {}, "mean": None}
        groups = {name: {"before": before["groups"].get(name), "after": after} for name, after in by_group.items()}
        return {"groups": groups, "mean": {"before": before["mean"], "after": mean}}


# ------------------------------------------------------------------------------------------- export

def self_test(folder, model, kept, held):
    """Compares the first choices of the written graph with PyTorch's on held-out texts."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the cache is copied here, not bound in place
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    size, compared, equal = model.size, 0, 0
    for request in held:
        ids = np.concatenate([request.prompt, request.output])[-WINDOW:].astype(np.int64)
        count = len(ids)
        shape = (1, size["num_key_value_heads"], count, size["head_dim"])
        places = np.arange(count)[None]
        feeds = {"input_ids": ids[None], "positions": places, "rows": places, "write_index": np.array([0]),
                 "kv_len": np.array([count]), "mask": np.where(np.tri(count), 0.0, -1e9).astype(np.float32)[None, None],
                 **{f"past_{kind}.{layer}": np.zeros(shape, np.float32)
                    for layer in range(size["num_hidden_layers"]) for kind in "kv"}}
        logits = session.run(["logits"], feeds)[0]
        if logits.shape != (1, count, kept.vocabulary):
            raise Refused("the self-test of the exported model failed: its logits do not cover the vocabulary")
        with torch.no_grad():
            wanted = kept.ids[choices(model, model(torch.from_numpy(kept.rows[ids].astype(np.int64))[None])[0], len(kept))]
        compared, equal = compared + count, equal + int((logits[0].argmax(-1) == wanted).sum())
        if compared >= 8 * COMPARED:
            break
    if compared < COMPARED or equal < EQUAL * compared:
        raise Refused(f"the self-test of the exported model failed: {equal} of {compared} choices are PyTorch's")
    return compared, equal


def export(training, settings, facts):
    """Writes the best model of the evaluations to --out, and tests it; who asked puts it in its place."""
    import bundle

    args, best, kept = training.args, training.best, training.kept
    out = args.out
    bundle.write_common(args.tokenizer, out, settings)
    bundle.write_onnx(out, {name: w.cpu().numpy() for name, w in best["weights"].items()}, settings, kept=kept.ids)
    model = training.exported(best["weights"]).cpu()
    self_test(out, model, kept, training.held)
    facts = {**facts, "parameters": sum(w.numel() for w in best["weights"].values()),
             "megabytes": round((out / "model.onnx").stat().st_size / 1e6, 1)}
    (out / "README.md").write_text(card(training, settings, facts))
    (out / "report.html").write_text(report(training, facts))
    return facts["parameters"]


# --------------------------------------------------------------------------------------------- main

def parsed():
    parser = argparse.ArgumentParser(description="trains a drafter on recorded traffic, which standard input gives")
    for name in ("tokenizer", "out", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--budget", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--base", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--layers-of", type=pathlib.Path, metavar="DIR", help="a drafter of another vocabulary, without --base")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--drafted", type=int, default=4)
    return parser.parse_args()


def vocabulary_of(names, *folders):
    """The number of ids: a model's may be greater than its tokenizer's."""
    configured = [json_of(folder / "config.json").get("vocab_size") or 0 for folder in folders if folder]
    return max(max(names.values()) + 1, *configured)


def installed():
    """Fails before the requests are read if a package is missing."""
    for name in ("onnx", "onnxruntime", "tokenizers", "torch"):
        importlib.import_module(name)


def train(args, signals):
    installed()
    args.work.mkdir(parents=True, exist_ok=True)
    names = token_names(args.tokenizer)
    vocabulary = vocabulary_of(names, args.tokenizer, args.base)
    base = Base(args.base, names, vocabulary) if args.base else None
    layers = Layers(args.layers_of) if args.layers_of and not base else None
    begin = base or layers
    size = begin.size if begin else sizes(args.hidden, args.layers)
    if args.budget <= 0 or args.drafted < 1:
        raise Refused("--budget and --drafted must be positive")
    requests = read(sys.stdin, vocabulary)
    parts = split(requests)
    kept = Kept.most_frequent(parts[0], vocabulary)
    tokens = sum(len(r.prompt) + len(r.output) for r in requests)
    emit("read", requests=len(requests), tokens=tokens, validation=len(parts[1]), vocabulary=vocabulary, occurring=len(kept))
    start = Start(base.start(kept), size, f"the weights of `{base.folder.name}`") if base else \
        Start(layers.start(kept, args.tokenizer), size, f"the layers of `{layers.folder.name}`") if layers else \
        Start(None, size, "random weights")
    training = Training(args, parts, kept, base, start, digest(requests, begin, names, args), signals)
    if training.resume():
        emit("resumed", share=round(training.share(), 4))
    try:
        training.run()
    except (Stopped, BrokenPipeError):
        signals.asked = False
        training.save()
        raise
    from model import config

    settings = {**config({**size, "vocab_size": vocabulary}),
                **{f"{kind}_token_id": special(args.tokenizer, names, kind) for kind in ("bos", "eos")}}
    facts = {"date": datetime.date.today().isoformat(), "requests": len(requests), "trained": len(parts[0]),
             "held": len(parts[1]), "tokens": tokens, "seconds": training.clock(),
             "groups": sorted({r.group for r in requests})}
    parameters = export(training, settings, facts)
    emit("done", **training.compared(training.best["groups"], training.best["mean"]), parameters=parameters,
         seconds=round(training.clock(), 1))


def place(error):
    """Where in the sources an error arose."""
    at = error.__traceback__
    while at.tb_next:
        at = at.tb_next
    return f"{pathlib.Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"


def main():
    args, signals = parsed(), Signals()
    try:
        train(args, signals)
        return 0
    except Refused as error:
        message = str(error)
    except Stopped:
        message = "stopped; the same command with the same data goes on from the checkpoint"
    except BrokenPipeError:
        return 1
    except ImportError as error:
        message = f"{error}: install the packages of onnx/train/requirements.txt"
    except (OSError, MemoryError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    except Exception as error:  # its text might hold a token
        message = f"{type(error).__name__} in {place(error)}"
    with contextlib.suppress(BrokenPipeError):  # who asked may have ended first
        emit("error", message=message)
    return 1


if __name__ == "__main__":
    sys.exit(main())
