"""Trains the target, or the drafter with its own vocabulary, on a CPU in one sitting.

Muon for the matrices of the layers and AdamW for the embedding and norms: at a few
thousand steps it is worth about a third of the training time. The schedule goes by
the wall clock, not by steps, so that the run ends on time whatever else the machine
does; the order of the data is fixed by the seed.

    train.py SIZE IDS_DIR OUT_DIR MINUTES [--resume]
"""

import pathlib
import sys
import time

import torch
import torch._dynamo

from data import Data
from model import SIZES, Llama, chunked_loss

SEED = 20
torch._dynamo.config.recompile_limit = 32
MUON_RATE, ADAM_RATE = 0.02, 0.003
# Copying does not come from text in so short a run: once the text is half learnt, random tokens and
# their repetition are all there is until the loss on the copies is low.
COPY_FROM, MOST_COPYING = 0.3, 300


class Muon:
    """Momentum, orthogonalised by Newton-Schulz; matrices of one shape go as one batch."""

    def __init__(self, parameters):
        self.groups = {}
        for p in parameters:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.momenta = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}

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
    """Warm-up by steps, then flat, then straight down to nothing at the end."""
    warm = min(1.0, (step + 1) / 60)
    return warm * (1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold)))


@torch.no_grad()
def evaluate(model, folder, rows=12, length=512):
    """Held-out loss of each pool, and how often the copy after a separator is right."""
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


def main():
    name, folder, out, minutes = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    model = Llama(SIZES[name])
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    data = Data(folder, model.size["vocab_size"], SEED)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    budget, spent, step, tokens, copying, copy_loss = minutes * 60, 0.0, 0, 0, 0, 99.0
    if "--resume" in sys.argv:
        state = torch.load(out / "last.pt", weights_only=False)
        model.load_state_dict(state["model"])
        muon.momenta = state["muon"]
        adam.load_state_dict(state["adam"])
        spent, step, tokens, copying = state["spent"], state["step"], state["tokens"], state["copying"]
        data.at, data.rng, copy_loss = state["at"], state["rng"], state["copy_loss"]
    start, saved, shown, recent = time.time() - spent, time.time(), time.time(), []
    while (spent := time.time() - start) < budget:
        progress = spent / budget
        if progress >= COPY_FROM and copying < MOST_COPYING and copy_loss > 0.3:
            x, y, w = data.batch(48, 128, {"repeat": 1.0})
            copying += 1
        elif progress > 0.8 and step % 2:
            x, y, w = data.batch(6, 1024)
        else:
            x, y, w = data.batch(12, 512)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = chunked_loss(model, model(x), y, w)
        loss.backward()
        scale = rate_at(progress, step)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        adam.step()
        muon.step(MUON_RATE * scale, 0.85 + 0.1 * min(1.0, step / 300))
        model.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + x.numel()
        if copying and x.shape[1] == 128:
            copy_loss = float(loss.detach())
        recent.append(float(loss.detach()))
        if step % 25 == 0:
            now = time.time()
            print(f"{step} {progress:.3f} loss {sum(recent) / len(recent):.3f} "
                  f"{x.numel() * 25 / (now - shown):.0f} tok/s", flush=True)
            shown, recent = now, []
        if time.time() - saved > 240:
            saved = time.time()
            save(out / "last.pt", model, muon=muon.momenta, adam=adam.state_dict(), spent=spent,
                 step=step, tokens=tokens, copying=copying, copy_loss=copy_loss,
                 at=data.at, rng=data.rng)
            print(step, "held-out", evaluate(model, folder), flush=True)
    report = evaluate(model, folder, rows=48)
    save(out / "final.pt", model, report=report, tokens=tokens, steps=step, minutes=minutes)
    print("final", step, tokens, report, flush=True)


if __name__ == "__main__":
    main()
