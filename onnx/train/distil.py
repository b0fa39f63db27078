"""Distils draft-same from the target: the same vocabulary, two of its six layers.

The drafter starts as the target's embedding, its first and last layers and its final norm, because
the teacher's forward pass is the cost of each step and a drafter from random weights would need far
more of them. It then learns the teacher's whole distribution (Kullback-Leibler), on the corpus and
on text that the teacher wrote itself: drafts continue the target's text, not the corpus.

    distil.py TARGET_CHECKPOINT IDS_DIR OUT_DIR MINUTES [--own OWN_TEXT.npz]
"""

import pathlib
import sys
import time

import numpy as np
import torch
import torch._dynamo

from data import Data
from model import SIZES, Llama
from train import Muon, rate_at, save

SEED = 21
KEPT_LAYERS = (0, 5)
MUON_RATE, ADAM_RATE = 0.01, 0.001
OWN_SHARE = 0.25
MIX = {"code": 0.6, "prose": 0.15, "chat": 0.12, "rewrite": 0.13}
torch._dynamo.config.recompile_limit = 32


class ChunkedKL(torch.autograd.Function):
    """KL(teacher || student) over the vocabulary, a chunk of tokens at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, weights, chunk=256):
        hidden, w = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
        dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
        total, loss, same = weights.sum().clamp_min(1.0), 0.0, 0.0
        for s in range(0, len(hidden), chunk):
            h = hidden[s:s + chunk]
            share = weights[s:s + chunk, None] / total
            wanted = (teacher_hidden[s:s + chunk] @ teacher_weight.T).float().clamp_(max=80.0)
            best = wanted.argmax(-1)
            wanted = wanted.exp_()
            wanted.div_(wanted.sum(-1, keepdim=True))
            logits = (h @ w.T).float().clamp_(max=80.0)
            same += ((logits.argmax(-1) == best).float() * share[:, 0]).sum()
            grad = logits.exp_()
            z = grad.sum(-1, keepdim=True)
            chosen = grad.gather(1, best[:, None]) / z
            loss += (-chosen.log() * share).sum()
            grad.div_(z).sub_(wanted).mul_(share)
            grad = grad.to(torch.bfloat16)
            dh[s:s + chunk] = grad @ w
            dw += (grad.T @ h).float()
        ctx.save_for_backward(dh, dw)
        ctx.mark_non_differentiable(same)
        return loss, same

    @staticmethod
    def backward(ctx, gradient, _):
        dh, dw = ctx.saved_tensors
        return dh * gradient, dw * gradient, None, None, None, None


def student_of(teacher, layers=KEPT_LAYERS):
    student = Llama({**SIZES["draft-same"], "num_hidden_layers": len(layers)})
    state = teacher.state_dict()
    start = {n: p for n, p in state.items() if not n.startswith("model.layers.")}
    for new, old in enumerate(layers):
        for name, p in state.items():
            if name.startswith(f"model.layers.{old}."):
                start[name.replace(f"layers.{old}.", f"layers.{new}.")] = p
    student.load_state_dict(start)
    return student


def kl(teacher, student, x, weights):
    with torch.no_grad():
        wanted = teacher(x).reshape(-1, teacher.size["hidden_size"]).to(torch.bfloat16)
    hidden = student(x)
    return ChunkedKL.apply(hidden.reshape(-1, hidden.shape[-1]), student.model.embed_tokens.weight, wanted,
                           teacher.model.embed_tokens.weight.detach().to(torch.bfloat16), weights.reshape(-1))


@torch.no_grad()
def agreement(teacher, student, folder):
    """Share of held-out positions where both choose the same next token."""
    out = {}
    for kind in ("code", "prose", "chat", "rewrite"):
        x, _, w = Data(folder, student.size["vocab_size"], 1, "held").batch(12, 512, {kind: 1.0})
        with torch.autocast("cpu", torch.bfloat16):
            out[kind] = round(float(kl(teacher, student, x, w)[1]), 3)
    return out


def main():
    checkpoint, folder, out, minutes = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    state = torch.load(checkpoint, weights_only=False)
    teacher = Llama(state["size"]).requires_grad_(False)
    # the committed teacher has 16-bit values
    teacher.load_state_dict({n: p.half().float() for n, p in state["model"].items()})
    student = student_of(teacher)
    for layer in [*teacher.model.layers, *student.model.layers]:
        layer.compile(dynamic=False)
    own = np.load(sys.argv[sys.argv.index("--own") + 1]) if "--own" in sys.argv else None
    data, rng = Data(folder, student.size["vocab_size"], SEED), np.random.default_rng(SEED)
    for kind in data.at:  # text that the target was trained on late or never
        data.at[kind] = len(data.ids[kind]) // 2 if kind != "rewrite" else len(data.offsets[kind]) // 2
    muon = Muon([p for n, p in student.named_parameters() if p.ndim == 2 and "embed" not in n])
    adam = torch.optim.AdamW([p for n, p in student.named_parameters() if p.ndim != 2 or "embed" in n],
                             lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    start, step, recent, shown = time.time(), 0, [], time.time()
    while (progress := (time.time() - start) / (minutes * 60)) < 1:
        if own is not None and rng.random() < OWN_SHARE:
            pick = rng.integers(0, len(own["ids"]), 12)
            x = torch.from_numpy(own["ids"][pick].astype(np.int64))
            w = torch.from_numpy(own["weights"][pick].astype(np.float32))
        else:
            x, _, w = data.batch(12, 512, MIX)
        with torch.autocast("cpu", torch.bfloat16):
            loss, same = kl(teacher, student, x, w)
        loss.backward()
        scale = rate_at(progress, step, 0.4)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        adam.step()
        muon.step(MUON_RATE * scale, 0.95)
        student.zero_grad(set_to_none=True)
        step += 1
        recent.append(float(same))
        if step % 25 == 0:
            now = time.time()
            print(f"{step} {progress:.3f} agreement {np.mean(recent):.3f} "
                  f"{x.numel() * 25 / (now - shown):.0f} tok/s", flush=True)
            shown, recent = now, []
        if step % 300 == 0:
            save(out / "last.pt", student)
            print(step, "held-out agreement", agreement(teacher, student, folder), flush=True)
    report = agreement(teacher, student, folder)
    save(out / "final.pt", student, report=report, steps=step, minutes=minutes)
    print("final", step, report, flush=True)


if __name__ == "__main__":
    main()
