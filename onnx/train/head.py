"""Trains a head: a small network that drafts from the hidden states of the model that verifies.

The head reads the model's hidden states after some of its layers at one position (the taps) and the
token that was chosen there, and predicts the tokens that follow, one after the other, from a state of
its own. It has no attention: the taps already hold what the model made of the text, so it needs no
cache, no prefill, and nothing is lost where a prefix comes out of the target's cache. The weights of
the step are shared by all steps; its output matrix covers only tokens that are frequent in what the
model writes.

With `--kind medusa` each further token has a network of its own instead, of the model's state alone
(Medusa, arXiv 2401.10774): it does not know the tokens that are drafted before.

It learns the model's whole distribution at each position (cross entropy with it as label), several
steps deep, on text that the model writes itself: chats whose questions it also writes, because no
set of questions is needed then and none of a benchmark can be among them, and continuations of the
Python standard library's source.

    head.py write MODEL_DIR OUT.npz --tokens N       text of the model's own
    head.py train MODEL_DIR OUT.npz HEAD_DIR --minutes M [--kind step|medusa] [--resume]
    head.py export MODEL_DIR HEAD_DIR                MODEL_DIR/heads, and the model's graph with taps

MODEL_DIR is an export with `model.onnx` and `tokenizer.json`. CUDA is used where torch finds it.
"""

import argparse
import ast
import json
import pathlib
import random
import sys
import sysconfig
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "export")]

SEED = 28
STEPS = 5  # tokens that are predicted in training, one after the other
WIDTH = 2  # tokens that the graph gives for each step
BLOCK = 32  # weights that share a scale
FREQUENT = 8192  # tokens that the head can draft
PROMPT, LENGTH = 160, 416  # tokens of a prompt, and of a prompt with its output, at most
TURN = 96  # tokens of a question that the model writes itself, at most
HELD = 0.03  # share of the texts that are kept for the evaluation
TEMPERATURES = ((0.0, 0.5), (0.8, 0.35), (1.0, 0.15))  # of the outputs, with their shares
KINDS = (("chat", 0.5), ("code", 0.2), ("continue", 0.2), ("edit", 0.1))
MUON_RATE, ADAM_RATE, DECAY = 0.02, 0.001, 0.85  # the loss of each step counts 0.85 of the one before
ASKS = ("Complete this Python function.", "Implement the function below. Only print code.",
        "Please write the body of this function:", "Finish the following code.",
        "Here is a function without its body. Write it out in full.")
RENAMES = ("Rename `{0}` to `{1}` in this code and print all of it again.",
           "In the code below, replace the name `{0}` by `{1}`. Change nothing else and show the whole code.",
           "Give `{0}` the name `{1}`; print the complete function.")
NAMES = ("value", "result", "item", "total", "entry", "current", "data", "count", "new_name", "renamed")


def taps_of(layers):
    """Layers whose output is tapped: near the beginning, the middle, near the end, the last."""
    return sorted({max(0, layers // 10 - 1), layers // 2 - 1, layers - 1 - max(1, layers // 10), layers - 1})


# ------------------------------------------------------------------------------------------ prompts

def functions():
    """Functions of the standard library with a documentation text, as (head, whole source)."""
    found = []
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.end_lineno - node.lineno < 40:
                indent = node.col_offset
                body = [line[indent:] for line in lines[node.lineno - 1:node.end_lineno]]
                head = body[:node.body[0].end_lineno - node.lineno + 1]
                if len(body) > len(head) and parses("\n".join(body)):
                    found.append(("\n".join(head), "\n".join(body)))
    return found


def parses(text):
    """False for what lost its indentation inside of a string."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class Prompts:
    """Prompts as token ids, of the kinds and in the shares of KINDS."""

    def __init__(self, folder, rng):
        from tokenizers import Tokenizer

        self.tokenizer, self.rng = Tokenizer.from_file(str(folder / "tokenizer.json")), rng
        self.functions = functions()
        self.system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        self.end = self.tokenizer.token_to_id("<|im_end|>")

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def opening(self):
        """What stands before a question that the model writes itself."""
        return self.ids(f"{self.system}<|im_start|>user\n")

    def chat(self, question):
        """A chat's prompt, its question given as ids or as text."""
        ids = question if isinstance(question, list) else self.ids(question)
        return self.opening() + ids + self.ids("<|im_end|>\n<|im_start|>assistant\n")

    def of(self, kind, questions):
        if kind == "chat":
            return self.chat(questions.pop()) if questions else None
        head, whole = self.rng.choice(self.functions)
        if kind == "continue":
            return self.ids(whole)[:self.rng.randrange(8, 64)] if self.rng.random() < 0.5 else self.ids(head + "\n")
        if kind == "code":
            ask = self.rng.choice(ASKS)
            return self.chat(f"{ask}\n\n```python\n{head}\n```")
        names = {node.id for node in ast.walk(ast.parse(whole)) if isinstance(node, ast.Name)}
        ask = self.rng.choice(RENAMES).format(self.rng.choice(sorted(names) or ["x"]), self.rng.choice(NAMES))
        return self.chat(f"{ask}\n\n```python\n{whole}\n```")

    def batch(self, count, questions):
        kinds = self.rng.choices([kind for kind, _ in KINDS], [share for _, share in KINDS], k=count * 2)
        drawn = (self.of(kind, questions) for kind in kinds)
        return [prompt for prompt in drawn if prompt and len(prompt) <= PROMPT][:count]


# ------------------------------------------------------------------------------------------- target

class Target:
    """The model in torch: hidden states of whole texts, and text."""

    def __init__(self, folder, device):
        import bundle
        import torch

        weights, self.config = bundle.load(folder)
        self.device, self.kind = device, torch.bfloat16 if device == "cuda" else torch.float32
        self.w = {name: torch.from_numpy(array.astype(np.float32)).to(device, self.kind) for name, array in weights.items()}
        c = self.config
        self.layers, self.heads, self.kv = c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"]
        self.width, self.eps = c["head_dim"], c["rms_norm_eps"]
        half = self.width // 2
        frequency = c["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequency
        self.cos, self.sin = (f(angle).to(device, torch.float32) for f in (torch.cos, torch.sin))
        self.embedding = self.w["model.embed_tokens.weight"]
        self.output = self.w.get("lm_head.weight", self.embedding)
        self.joined = []
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            self.joined.append((torch.cat([self.w[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"]),
                                torch.cat([self.w[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up")])))

    def norm(self, x, name):
        import torch

        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.w[name], self.eps)

    def rotate(self, x, cos, sin):
        import torch

        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.kind)

    def layer(self, index, x, attend):
        """One layer; `attend(q, k, v)` takes and returns [..., heads, width] of this layer."""
        import torch

        p, (qkv, gate_up) = f"model.layers.{index}.", self.joined[index]
        q, k, v = (self.norm(x, p + "input_layernorm.weight") @ qkv.T).split(
            [n * self.width for n in (self.heads, self.kv, self.kv)], -1)
        q, k, v = (t.unflatten(-1, (-1, self.width)) for t in (q, k, v))
        x = x + attend(q, k, v).flatten(-2) @ self.w[p + "self_attn.o_proj.weight"].T
        gate, up = (self.norm(x, p + "post_attention_layernorm.weight") @ gate_up.T).chunk(2, -1)
        return x + (torch.nn.functional.silu(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T

    def hidden(self, ids, taps):
        """(taps [b,s,len(taps)*hidden], normed last hidden state [b,s,hidden]) of whole texts."""
        import torch

        cos, sin = self.cos[:ids.shape[1], None], self.sin[:ids.shape[1], None]

        def attend(q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (self.rotate(q, cos, sin), self.rotate(k, cos, sin), v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2)

        x, kept = self.embedding[ids], []
        for index in range(self.layers):
            x = self.layer(index, x, attend)
            if index in taps:
                kept.append(x)
        return torch.cat(kept, -1), self.norm(x, "model.norm.weight")

    def write(self, prompts, length, temperatures):
        """Continues prompts to `length` tokens: [len(prompts), length] of ids. All advance together,
        one position at a time, and tokens of the prompt stand in for samples where there are some."""
        import torch

        count, device = len(prompts), self.device
        text = torch.zeros(count, length + 1, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            text[row, :len(prompt)] = torch.tensor(prompt, device=device)
        sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
        heat = torch.tensor(temperatures, device=device)[:, None]
        cache = torch.zeros(self.layers, 2, count, self.kv, length, self.width, dtype=self.kind, device=device)
        at = torch.zeros(1, dtype=torch.int64, device=device)
        places, group = torch.arange(length, device=device), self.heads // self.kv

        def step():
            cos, sin = self.cos[at], self.sin[at]
            unseen = torch.where(places <= at, 0.0, -1e9).to(self.kind)
            x = self.embedding[text.gather(1, at.expand(count, 1))[:, 0]]
            for index in range(self.layers):
                def attend(q, k, v, keys=cache[index, 0], values=cache[index, 1]):
                    keys.index_copy_(2, at, self.rotate(k, cos, sin)[:, :, None])
                    values.index_copy_(2, at, v[:, :, None])
                    q = self.rotate(q, cos, sin).unflatten(1, (self.kv, group)) * self.width ** -0.5
                    share = (q @ keys.transpose(-1, -2) + unseen).float().softmax(-1).to(self.kind)
                    return (share @ values).flatten(1, 2)
                x = self.layer(index, x, attend)
            logits = (self.norm(x, "model.norm.weight") @ self.output.T).float()
            noise = torch.empty_like(logits).exponential_().log_().neg_()
            sample = (logits + heat * noise).argmax(-1)
            at.add_(1)
            given = text.gather(1, at.expand(count, 1))[:, 0]
            text.scatter_(1, at.expand(count, 1), torch.where(at < sizes, given, sample)[:, None])

        with torch.no_grad():
            if device == "cpu":
                for _ in range(length - 1):
                    step()
            else:
                replayed(step, length - 1, at)
        return text[:, :length].cpu().numpy()


def replayed(step, count, at):
    """Runs `step` so often, as a captured graph: the launches of its kernels would take longer than they."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    at.zero_()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------- text

def draw_temperatures(rng, count):
    return [rng.choices([t for t, _ in TEMPERATURES], [s for _, s in TEMPERATURES])[0] for _ in range(count)]


def ended(row, begin, ends):
    """The position behind the first end token from `begin` on; the row's length if there is none."""
    for at in range(begin, len(row)):
        if row[at] in ends:
            return at + 1
    return len(row)


def write(args, device):
    rng = random.Random(SEED + args.part)
    import torch

    torch.manual_seed(SEED + args.part)
    target, prompts = Target(args.model, device), Prompts(args.model, rng)
    ends = {prompts.end, *np.atleast_1d(target.config["eos_token_id"]).tolist()}
    lanes = args.lanes or (2048 if device == "cuda" else 64)
    texts, starts, stops, heats, total, questions = [], [], [], [], 0, []
    began = time.time()
    while total < args.tokens and (not args.minutes or time.time() - began < args.minutes * 60):
        if len(questions) < lanes:
            opening = prompts.opening()
            for row in target.write([opening] * lanes, len(opening) + TURN, [1.0] * lanes):
                stop = ended(row, len(opening), ends)
                if row[stop - 1] == prompts.end and stop - len(opening) > 4:
                    questions.append(row[len(opening):stop - 1].tolist())
        batch = prompts.batch(lanes, questions)
        drawn = draw_temperatures(rng, len(batch))
        rows = target.write(batch, LENGTH, drawn)
        heats += drawn
        for row, prompt in zip(rows, batch):
            stop = ended(row, len(prompt), ends)
            texts.append(row.astype(np.uint32))
            starts.append(len(prompt))
            stops.append(stop)
            total += stop - len(prompt)
        print(f"{total} tokens, {total / (time.time() - began):.0f} tok/s, {len(questions)} questions left", flush=True)
    np.savez_compressed(args.text, ids=np.array(texts), starts=np.array(starts), stops=np.array(stops),
                        heats=np.array(heats))


# --------------------------------------------------------------------------------------------- head

def make_head(kind, hidden, taps, inner, words, device):
    """The head's parameters, by name; `step.*` are shared by all steps, `medusa.K` are of step K alone."""
    import torch

    def matrix(out, width):
        return torch.randn(out, width, device=device) * width ** -0.5

    steps = {f"medusa.{step}": matrix(hidden, hidden) * 0.1 for step in range(STEPS)} if kind == "medusa" else {
        "step.token_norm": torch.ones(hidden, device=device), "step.state_norm": torch.ones(hidden, device=device),
        "step.gate": matrix(inner, 2 * hidden), "step.up": matrix(inner, 2 * hidden),
        "step.down": matrix(hidden, inner) * 0.1,
    }
    return {
        "taps.norm": torch.ones(taps, hidden, device=device), "taps.weight": matrix(hidden, taps * hidden),
        "out.norm": torch.ones(hidden, device=device), "out.weight": words.float().clone(), **steps,
    }


def opened(head, taps, eps):
    """The state before the first step, from the taps [n, taps * hidden]."""
    import torch

    count, hidden = head["taps.norm"].shape
    x = torch.nn.functional.rms_norm(taps.unflatten(-1, (count, hidden)), (hidden,), None, eps) * head["taps.norm"]
    return x.flatten(-2) @ head["taps.weight"].T


def states(head, taps, tokens, eps):
    """The states of all steps, the tokens before each given by their embeddings [n, STEPS, hidden]."""
    import torch

    state = begun = opened(head, taps, eps)
    for step in range(STEPS):
        if "medusa.0" in head:
            state = begun + torch.nn.functional.silu(begun @ head[f"medusa.{step}"].T)
        else:
            state = stepped(head, state, tokens[:, step], eps)
        yield state


def stepped(head, state, token, eps):
    """The next state, after a token given by its embedding."""
    import torch

    norm = torch.nn.functional.rms_norm
    x = torch.cat([norm(token, token.shape[-1:], head["step.token_norm"], eps),
                   norm(state, state.shape[-1:], head["step.state_norm"], eps)], -1)
    return state + (torch.nn.functional.silu(x @ head["step.gate"].T) * (x @ head["step.up"].T)) @ head["step.down"].T


def scored(head, state, eps):
    """Logits of the frequent tokens."""
    import torch

    return torch.nn.functional.rms_norm(state, state.shape[-1:], head["out.norm"], eps) @ head["out.weight"].T


class Soft:
    """Cross entropy with a distribution as label, without a copy of the logits in 32 bits for autograd."""

    @staticmethod
    def function():
        import torch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits, wanted):
                log = logits.float().log_softmax(-1)
                loss = -(wanted.float() * log).sum(-1).mean()
                ctx.save_for_backward(log.exp_().sub_(wanted).div_(len(logits)).to(logits.dtype))
                return loss

            @staticmethod
            def backward(ctx, gradient):
                return ctx.saved_tensors[0] * gradient, None

        return Function


class Batch:
    """Positions of some texts, with the target's hidden states there."""

    def __init__(self, target, taps, frequent, ids, starts, stops):
        import torch

        device = target.device
        x = torch.from_numpy(ids.astype(np.int64)).to(device)
        starts, stops = (torch.from_numpy(a).to(device)[:, None] for a in (starts, stops))
        with torch.no_grad():
            tapped, last = target.hidden(x, taps)
            places = torch.arange(x.shape[1], device=device)[None]
            # the position of a chosen token t is the one that predicted it: taps at t-1, token t
            row, at = torch.where((places >= starts - 1) & (places + STEPS + 1 < stops))
            self.taps = tapped[row, at]
            self.tokens = torch.stack([x[row, at + k] for k in range(1, STEPS + 2)], 1)
            self.labels = [(last[row, at + k] @ target.output[frequent].T).float().softmax(-1).to(torch.bfloat16)
                           for k in range(1, STEPS + 1)]


def losses(head, target, batch, soft):
    import torch

    with torch.autocast(target.device, torch.bfloat16):
        found = states(head, batch.taps, target.embedding[batch.tokens[:, :STEPS]], target.eps)
        return [soft(scored(head, state, target.eps), label) for state, label in zip(found, batch.labels)]


def acceptance(head, target, batches, frequent):
    """Share of right tokens by step, given that all before were right; and tokens per round with four."""
    import torch

    right = torch.zeros(STEPS, device=target.device)
    total = 0
    with torch.no_grad(), torch.autocast(target.device, torch.bfloat16):
        for batch in batches:
            so_far = 1.0
            for k, state in enumerate(states(head, batch.taps, target.embedding[batch.tokens[:, :STEPS]], target.eps)):
                chosen = frequent[scored(head, state, target.eps).argmax(-1)]
                so_far = so_far * (chosen == batch.tokens[:, k + 1]).float()
                right[k] += so_far.sum()
            total += len(batch.tokens)
    shares = (right / max(total, 1)).tolist()
    return {"share": [round(s, 3) for s in shares], "length_at_4": round(1 + sum(shares[:4]), 3)}


def train(args, device):
    import torch

    from train import Muon, rate_at

    torch.manual_seed(SEED)
    target = Target(args.model, device)
    taps = taps_of(target.layers)
    own = [np.load(path) for path in args.text.split(",")]
    data = {key: np.concatenate([part[key] for part in own]) for key in ("ids", "starts", "stops", "heats")}
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(data["ids"]))
    held, order = np.split(order, [int(len(order) * HELD)])
    written = np.concatenate([row[start:stop] for row, start, stop in zip(*(data[k][order] for k in ("ids", "starts", "stops")))])
    counts = np.bincount(written, minlength=target.config["vocab_size"])
    frequent = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:FREQUENT])).to(device)
    head = make_head(args.kind, target.config["hidden_size"], len(taps), args.inner, target.output[frequent] *
                     target.w["model.norm.weight"], device)
    if args.start:
        begun = {name: torch.from_numpy(array).to(device) for name, array in restored(np.load(args.start)).items()}
        frequent = begun.pop("frequent")
        head |= {name: array for name, array in begun.items() if name in head}
    covered = counts[frequent.cpu().numpy()].sum() / counts.sum()
    matrices = [n for n, p in head.items() if p.ndim == 2 and n not in ("out.weight", "taps.norm")]
    for p in head.values():
        p.requires_grad_(True)
    muon = Muon([head[n] for n in matrices])
    adam = torch.optim.AdamW([p for n, p in head.items() if n not in matrices], lr=ADAM_RATE, betas=(0.9, 0.95),
                             eps=1e-10, weight_decay=0.0)
    soft = Soft.function().apply
    size = args.batch or (64 if device == "cuda" else 4)

    def drawn(rows):
        return Batch(target, taps, frequent, *(data[k][rows] for k in ("ids", "starts", "stops")))

    def checked():
        """Acceptance on held-out texts, by the temperature that they were written at."""
        return {str(heat): acceptance(head, target, batches, frequent) for heat, batches in checks.items()}

    checks = {}
    for heat, _ in TEMPERATURES:
        rows = held[data["heats"][held] == heat][:args.checked]
        checks[heat] = [drawn(rows[i:i + size]) for i in range(0, len(rows), size)]
    spent, step, seen, at = 0.0, 0, 0, 0
    out = pathlib.Path(args.head)
    out.mkdir(parents=True, exist_ok=True)
    if args.resume and (out / "last.pt").exists():
        state = torch.load(out / "last.pt", map_location=device, weights_only=True)
        if state["kind"] != args.kind or not torch.equal(state["frequent"], frequent):
            sys.exit(f"{out / 'last.pt'} is of another kind of head, or of other texts: train to another folder")
        for name, p in head.items():
            p.data.copy_(state["head"][name])
        muon.momenta = state["muon"]
        adam.load_state_dict(state["adam"])
        spent, step, seen, at = (state[k] for k in ("spent", "step", "seen", "at"))
    print(f"{len(order)} texts, {len(written)} tokens, {covered:.4f} of them among the frequent ones, taps {taps}", flush=True)
    budget, start, shown, curve = args.minutes * 60, time.time() - spent, time.time(), []
    saved = shown
    while (progress := (time.time() - start) / budget) < 1:
        if at + size > len(order):
            rng.shuffle(order)
            at = 0
        batch = drawn(np.sort(order[at:at + size]))
        at += size
        if len(batch.tokens) == 0:
            continue
        parts = losses(head, target, batch, soft)
        sum(loss * DECAY ** k for k, loss in enumerate(parts)).backward()
        scale = rate_at(progress, step, 0.3)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        adam.step()
        muon.step(MUON_RATE * scale, 0.85 + 0.1 * min(1.0, step / 300))
        for p in head.values():
            p.grad = None
        step, seen = step + 1, seen + len(batch.tokens)
        if time.time() - shown > args.every:
            shown = time.time()
            curve.append({"tokens": seen, **checked()})
            print(step, f"{progress:.2f}", [round(float(p.detach()), 3) for p in parts], curve[-1], flush=True)
        if time.time() - saved > 240:
            saved = time.time()
            torch.save({"kind": args.kind, "frequent": frequent, "head": head, "muon": muon.momenta, "adam": adam.state_dict(),
                        "spent": saved - start, "step": step, "seen": seen, "at": at}, out / "last.pt.new")
            (out / "last.pt.new").rename(out / "last.pt")
    report = checked()
    card = {"kind": args.kind, "taps": taps, "steps": STEPS, "inner": len(head["step.gate"]) if args.kind == "step" else None,
            "covered": round(float(covered), 4), "written": len(written), "seen": seen, "held_out": report, "curve": curve, "minutes": args.minutes, "device": device}
    kept(out / "head.npz", {name: p.detach().float().cpu().numpy() for name, p in head.items()}, frequent.cpu().numpy())
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    print("final", step, seen, report, flush=True)


# -------------------------------------------------------------------------------------------- files

def kept(path, head, frequent):
    """Writes a head: matrices in 8 bits by blocks of their rows, as the operator MatMulNBits takes them."""
    arrays = {"frequent": frequent.astype(np.int32)}
    for name, array in head.items():
        if array.ndim == 1 or name == "taps.norm":
            arrays[name] = array.astype(np.float16)
            continue
        blocks = array.reshape(len(array), -1, BLOCK)
        scales = (np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-5) / 127).astype(np.float16)
        arrays[name] = (np.round(blocks / scales.astype(np.float32)).clip(-127, 127) + 128).astype(np.uint8)
        arrays[name + ".scales"] = scales
    np.savez_compressed(path, **arrays)


def restored(file):
    """The arrays of a head in 32 bits."""
    head = {"frequent": file["frequent"].astype(np.int64)}
    for name in file.files:
        if name + ".scales" in file.files:
            array = (file[name].astype(np.float32) - 128) * file[name + ".scales"].astype(np.float32)
            head[name] = array.reshape(len(array), -1)
        elif name != "frequent" and not name.endswith(".scales"):
            head[name] = file[name].astype(np.float32)
    return head


# ------------------------------------------------------------------------------------------- export

def build(head, embedding, config):
    """The graph of a head: all steps in one run.

        taps   f32 [B, n*hidden]  the target's states where the last token was chosen
        token  i64 [B]            that token
        noise  f32 [B, STEPS, FREQUENT]  added to the logits: the temperature times the target's noise at that place, so
                                  that a token is drawn as the target draws it; 0 takes the likeliest
        -> tokens  i64 [B, STEPS, WIDTH]  the best tokens of each step, behind the first one of the step before
        -> shares  f32 [B, STEPS, WIDTH]  their probabilities, by these logits

    The property `frequent` of the model has the token ids of the noise, separated by commas.
    """
    import graph
    from onnx import TensorProto, helper

    g = graph.Graph()
    hidden, eps = config["hidden_size"], float(config["rms_norm_eps"])
    count = head["taps.norm"].shape[0]

    def stored(name, array=None):
        array = head[name] if array is None else array
        return g.op("Cast", g.constant(name, array.astype(np.float16)), to=TensorProto.FLOAT)

    def multiply(x, *names):
        """A product with weights in 8 bits: a head is right often, not always, and time is what it costs."""
        values = np.concatenate([head[name] for name in names])
        scales = np.concatenate([head[name + ".scales"] for name in names]).astype(np.float32).reshape(-1)
        out, blocks, block = values.shape
        return g.op("MatMulNBits", x, g.constant(names[0], values), g.constant(names[0] + ".scales", scales),
                    K=blocks * block, N=out, bits=8, block_size=block, accuracy_level=4, domain="com.microsoft")

    def norm(x, scale):
        return g.op("RMSNormalization", x, scale, axis=-1, epsilon=eps)

    weights = {name: stored(name) for name in ("step.token_norm", "step.state_norm", "out.norm") if name in head}
    table = None if "medusa.0" in head else g.constant("embedding", embedding.astype(np.float16))
    frequent = g.constant("frequent", head["frequent"].astype(np.int64))
    x = norm(g.op("Reshape", "taps", g.ints(0, count, hidden)), stored("ones", np.ones(hidden)))
    x = g.op("Reshape", g.op("Mul", x, stored("taps.norm")), g.ints(0, count * hidden))

    def silu(x):
        return g.op("Mul", x, g.op("Sigmoid", x))

    def after(state, token, step):
        """The state of a step, from that of the one before and its token."""
        x = g.op("Cast", g.op("Gather", table, token, axis=0), to=TensorProto.FLOAT)
        x = g.op("Concat", norm(x, weights["step.token_norm"]), norm(state, weights["step.state_norm"]), axis=-1)
        inner = len(head["step.gate"])
        gate, up = g.op("Split", multiply(x, "step.gate", "step.up"), g.ints(inner, inner), axis=-1,
                        outputs=[f"gate.{step}", f"up.{step}"])
        return g.op("Add", state, multiply(g.op("Mul", silu(gate), up), "step.down"))

    begun = state = multiply(x, "taps.weight")
    token, tokens, shares = "token", [], []
    for step in range(STEPS):
        if "medusa.0" in head:
            state = g.op("Add", begun, silu(multiply(begun, f"medusa.{step}")))
        else:
            state = after(state, token, step)
        logits = multiply(norm(state, weights["out.norm"]), "out.weight")
        noise = g.op("Squeeze", g.op("Gather", "noise", g.ints(step), axis=1), g.ints(1))
        logits = g.op("Add", logits, noise)
        best, places = g.op("TopK", g.op("Softmax", logits, axis=-1), g.ints(WIDTH), axis=-1,
                            outputs=[f"best.{step}", f"places.{step}"])
        chosen = g.op("Gather", frequent, places, axis=0)
        tokens.append(g.op("Unsqueeze", chosen, g.ints(1)))
        shares.append(g.op("Unsqueeze", best, g.ints(1)))
        token = g.op("Squeeze", g.op("Gather", chosen, g.ints(0), axis=1), g.ints(1))
    g.op("Concat", *tokens, axis=1, outputs=["tokens"])
    g.op("Concat", *shares, axis=1, outputs=["shares"])
    info, i64, f32 = helper.make_tensor_value_info, TensorProto.INT64, TensorProto.FLOAT
    inputs = [info("taps", f32, ["B", count * hidden]), info("token", i64, ["B"]),
              info("noise", f32, ["B", STEPS, len(head["frequent"])])]
    outputs = [info("tokens", i64, ["B", STEPS, WIDTH]), info("shares", f32, ["B", STEPS, WIDTH])]
    made = graph.model(g, inputs, outputs)
    helper.set_model_props(made, {"frequent": ",".join(map(str, head["frequent"].tolist()))})
    return made


def export(args):
    import bundle
    import graph

    weights, config = bundle.load(args.model)
    head, card = np.load(args.head / "head.npz"), json.loads((args.head / "card.json").read_text())
    folder = args.model / "heads"
    folder.mkdir(exist_ok=True)
    graph.save(build(head, weights["model.embed_tokens.weight"], config), folder / "model.onnx")
    bundle.write_onnx(args.model, weights, config, taps=card["taps"])
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writer, trainer, exporter = map(commands.add_parser, ("write", "train", "export"))
    for command in (writer, trainer, exporter):
        command.add_argument("model", type=pathlib.Path)
    for command in (writer, trainer):
        command.add_argument("text")
    exporter.add_argument("head", type=pathlib.Path)
    writer.add_argument("--tokens", type=int, default=1_600_000)
    writer.add_argument("--minutes", type=float, default=0, help="stop earlier, after this time")
    writer.add_argument("--lanes", type=int, default=0)
    writer.add_argument("--part", type=int, default=0, help="another seed")
    trainer.add_argument("head")
    trainer.add_argument("--minutes", type=float, required=True)
    trainer.add_argument("--kind", choices=("step", "medusa"), default="step")
    trainer.add_argument("--inner", type=int, default=1536)
    trainer.add_argument("--batch", type=int, default=0, help="texts")
    trainer.add_argument("--checked", type=int, default=96, help="held-out texts of each temperature")
    trainer.add_argument("--every", type=float, default=60, help="seconds between evaluations")
    trainer.add_argument("--start", type=pathlib.Path, help="head.npz to begin with, which may be of the other kind")
    trainer.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.command == "export":
        return export(args)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    {"write": write, "train": train}[args.command](args, device)


if __name__ == "__main__":
    main()
