"""Trains the target, or the drafter with its own vocabulary, on a CPU in one sitting.

Muon for the matrices of the layers and AdamW for the embedding and norms: at a few thousand steps
it saves about a third of the training time. The schedule goes by the wall clock, not by steps, so
that the run ends on time whatever the load of the machine; the order of the data is fixed by the
seed.

The drafter with its own vocabulary starts from draft-same: the layers are independent of token
numbers, and each of its tokens begins as the mean of the pieces that the other tokenizer cuts it
into (most tokens are in both vocabularies).

    train.py SIZE IDS_DIR OUT_DIR MINUTES [--resume] [--start CHECKPOINT TOKENIZER OWN_TOKENIZER]
"""

import pathlib
import sys
import time

import torch
import torch._dynamo
from tokenizers import Tokenizer

from data import Data
from model import SIZES, Llama, chunked_loss

SEED = 20
torch._dynamo.config.recompile_limit = 32
MUON_RATE, ADAM_RATE = 0.02, 0.003
# Copying does not come from text in so short a run: once the text is half learnt, random tokens and
# their repetition are all there is, first at one distance, then at ever more, until the copies are
# right.
COPY_FROM, MOST_COPYING = 0.29, 400


class Muon:
    """Momentum, orthogonalised by Newton-Schulz; matrices of one shape go as one batch."""

    def __init__(self, parameters):
        self.groups = {}
        for p in parameters:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.momenta = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, rate, momentum, decay=0.02):
        for shape, ps in self.groups.items():
            grads = torch.stack([p.grad for p in ps])
            m = self.momenta[shape]
            m.lerp_(grads, 1 - momentum)
            update = orthogonal(grads.lerp(m, momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(ps, update):
                p.mul_(1 - rate * decay).add_(u, alpha=-rate * scale)


def orthogonal(g):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).float()


def rate_at(progress, step, hold=0.55):
    """Warm-up by steps, then flat, then linear to zero at the end."""
    warm = min(1.0, (step + 1) / 60)
    return warm * (1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold)))


@torch.no_grad()
def evaluate(model, folder, rows=12, length=512):
    """Held-out loss of each pool, and the share of correct copies after a separator."""
    out = {}
    for kind in ("code", "prose", "chat", "rewrite", "repeat"):
        data = Data(folder, model.size["vocab_size"], 1, "held")
        x, y, w = data.batch(rows, length, {kind: 1.0})
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = chunked_loss(model, model(x), y, w)
            out[kind] = round(float(loss), 3)
            if kind == "repeat":
                hit = (model.logits(x).argmax(-1) == y).float()
                out["copy"] = round(float((hit * w).sum() / w.sum()), 3)
    return out


def save(path, model, **more):
    torch.save({"model": model.state_dict(), "size": model.size, **more}, f"{path}.new")
    pathlib.Path(f"{path}.new").rename(path)


def start_from(model, checkpoint, tokenizer, own_tokenizer):
    """Starts from the weights of a model with another vocabulary, where they mean the same."""
    state = torch.load(checkpoint, weights_only=False)["model"]
    table = state["model.embed_tokens.weight"]
    theirs, own = Tokenizer.from_file(tokenizer), Tokenizer.from_file(own_tokenizer)
    new = torch.empty_like(model.model.embed_tokens.weight)
    for i in range(len(new)):
        same = theirs.token_to_id(own.id_to_token(i))
        if same is not None:
            new[i] = table[same]
        elif pieces := theirs.encode(own.decode([i])).ids:
            new[i] = table[pieces].mean(0)
        else:
            new[i] = table.mean(0)
    model.load_state_dict({**state, "model.embed_tokens.weight": new})


def main():
    name, folder, out, minutes = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    model = Llama(SIZES[name])
    if "--start" in sys.argv:
        start_from(model, *sys.argv[sys.argv.index("--start") + 1:][:3])
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    data = Data(folder, model.size["vocab_size"], SEED)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    hold = 0.3 if "--start" in sys.argv else 0.55
    budget, spent, step, tokens, copying, copy_loss, spread = minutes * 60, 0.0, 0, 0, 0, 9.0, 1
    if "--resume" in sys.argv:
        state = torch.load(out / "last.pt", weights_only=False)
        model.load_state_dict(state["model"])
        muon.momenta = state["muon"]
        adam.load_state_dict(state["adam"])
        spent, step, tokens, copying = state["spent"], state["step"], state["tokens"], state["copying"]
        data.at, data.rng, copy_loss, spread = (state[k] for k in ("at", "rng", "copy_loss", "spread"))
    start, saved, shown, recent = time.time() - spent, time.time(), time.time(), []
    while (spent := time.time() - start) < budget:
        progress = spent / budget
        if name == "target" and progress >= COPY_FROM and copying < MOST_COPYING and spread < 100:
            x, y, w = data.batch(48, 128, {"repeat": 1.0}, spread)
            copying += 1
        elif progress > 0.8 and step % 2:
            x, y, w = data.batch(6, 1024)
        else:
            x, y, w = data.batch(12, 512)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = chunked_loss(model, model(x), y, w)
        loss.backward()
        scale = rate_at(progress, step, hold) * (0.5 if x.shape[1] == 128 else 1.0)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        adam.step()
        muon.step(MUON_RATE * scale, 0.85 + 0.1 * min(1.0, step / 300))
        model.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + x.numel()
        if x.shape[1] == 128:
            copy_loss = 0.7 * copy_loss + 0.3 * float(loss.detach())
            if copy_loss < 1.0:
                spread, copy_loss = spread * 2, 2.0
            if copying % 10 == 0:
                print("copying", copying, spread, round(float(loss.detach()), 3), flush=True)
        recent.append(float(loss.detach()))
        if step % 25 == 0:
            now = time.time()
            print(f"{step} {progress:.3f} loss {sum(recent) / len(recent):.3f} "
                  f"{x.numel() * 25 / (now - shown):.0f} tok/s", flush=True)
            shown, recent = now, []
        if time.time() - saved > 240:
            saved = time.time()
            save(out / "last.pt", model, muon=muon.momenta, adam=adam.state_dict(), spent=spent,
                 step=step, tokens=tokens, copying=copying, copy_loss=copy_loss, spread=spread,
                 at=data.at, rng=data.rng)
            print(step, "held-out", evaluate(model, folder), flush=True)
    report = evaluate(model, folder, rows=48)
    save(out / "final.pt", model, report=report, tokens=tokens, steps=step, minutes=minutes)
    print("final", step, tokens, report, flush=True)


if __name__ == "__main__":
    main()
