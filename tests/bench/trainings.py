#!/usr/bin/env python3
"""Ways to train a drafter on recorded traffic, in the same time on the same requests.

    trainings.py REQUESTS.jsonl [--ways LIST] [--minutes M] [--most N] [--target DIR]

REQUESTS.jsonl is the output of `foretell corpus export`. The ways:

hard      each recorded token is the label of its place; the model begins with random weights
soft      the target's TOP likeliest tokens and their probabilities are (what an engine tells with a
          recording if it is asked for log-probabilities); the target computes them here
warm      as hard, from the layers of the bundled `draft-same`, as `foretell train` does
copy      as hard, and among the batches are random tokens that are repeated
parallel  as hard, and mask tokens learn to stand for the tokens that are drafted before them, so that
          FOUR tokens are drafted in one pass (PARD, arXiv 2504.18583)

For each: the mean acceptance length of four drafted tokens on the held-out requests at temperature 0,
and the time that ONNX Runtime takes for a draft on one core. Needs the packages of
onnx/train/requirements.txt.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "onnx/train"), str(ROOT / "onnx/export")]

import bundle  # noqa: E402
import head  # noqa: E402
import traffic  # noqa: E402
from model import Llama, chunked_loss, config, rotate  # noqa: E402
from traffic_data import CONTEXT, SEED, WINDOW, Batches, Kept, read, split  # noqa: E402
from train import Muon, rate_at  # noqa: E402

TOP = 8
FOUR = 4
ANCHORS = 0.25  # of a row's places, masks follow so many
COPY_FROM, COPY_EVERY = 0.1, 20
TIMED, CACHE = 200, 256  # drafts that are timed, and tokens that the model has read before them


# -------------------------------------------------------------------------------------- parallel

def anchored(rows, places, mask):
    """(tokens [b, s], places [s], allowed [s, s]): a mask for each further token behind each place.

    A mask sees the tokens up to its place and the masks before it there.
    """
    width, count = rows.shape[1], len(places) * (FOUR - 1)
    anchor = torch.cat([torch.arange(width), places.repeat_interleave(FOUR - 1)])
    step = torch.cat([torch.zeros(width, dtype=torch.int64), torch.arange(1, FOUR).repeat(len(places))])
    plain = step == 0
    sees_text = plain[None, :] & (anchor[None, :] <= anchor[:, None])
    sees_masks = ~plain[None, :] & (anchor[None, :] == anchor[:, None]) & (step[None, :] <= step[:, None])
    tokens = torch.cat([rows, torch.full((len(rows), count), mask)], 1)
    return tokens, anchor + step, sees_text | sees_masks


def forward(model, tokens, places, allowed):
    """As `Llama.forward`, with places and attention of its own."""
    x = model.model.embed_tokens(tokens)
    x = x.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else x
    cos, sin = model.cos[places].to(x.dtype), model.sin[places].to(x.dtype)
    for layer in model.model.layers:
        a, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, a.dim)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        x = x + a.o_proj(mixed.transpose(1, 2).flatten(-2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.model.norm(x)


def parallel_loss(model, x, y, weights, rng):
    width = x.shape[1]
    places = torch.from_numpy(np.sort(rng.choice(max(width - FOUR, 1), max(1, int(width * ANCHORS)), replace=False)))
    tokens, at, allowed = anchored(x, places, model.size["vocab_size"] - 1)
    label = at.clamp(max=width - 1)
    return chunked_loss(model, forward(model, tokens, at, allowed), y[:, label], weights[:, label])[0]


def parallel_rounds(model, kept, request):
    """The rounds of an output that is drafted so."""
    text = torch.from_numpy(kept.rows[np.concatenate([request.prompt, request.output])].astype(np.int64))
    begin, count = len(request.prompt) - 1, len(request.output)
    places = torch.arange(begin, begin + count)
    with torch.no_grad():
        hidden = forward(model, *anchored(text[None, :-1], places, len(kept) + 1))[0]
    width = len(text) - 1
    chosen = torch.cat([hidden[places][:, None], hidden[width:].unflatten(0, (count, FOUR - 1))], 1)
    chosen = traffic.choices(model, chosen.flatten(0, 1), len(kept)).reshape(count, FOUR)
    output, at, rounds = text[begin + 1:].numpy(), 0, 0
    while at < count:
        right = chosen[at][:count - at] == output[at:at + FOUR]
        at, rounds = at + (len(right) if right.all() else int(right.argmin())) + 1, rounds + 1
    return rounds


# ------------------------------------------------------------------------------------------ soft

def target_rows(folder, requests, kept):
    """For each request the TOP likeliest tokens behind each of its tokens, as rows, and their probabilities."""
    head.LENGTH = CONTEXT  # of its texts
    target, found = head.Target(folder, "cpu"), []
    for request in requests:
        ids = torch.from_numpy(np.concatenate([request.prompt, request.output]).astype(np.int64))
        with torch.no_grad():
            last = target.hidden(ids[None, -CONTEXT:], (0,))[1][0]
            share, token = (last[-len(request.output) - 1:-1] @ target.output.T).softmax(-1).topk(TOP)
        found.append((kept.rows[token.numpy()].astype(np.int64), share.numpy()))
    return found


def soft_loss(model, hidden, batch, batches, told, y, weights):
    """Cross entropy with the told distribution where there is one, with the token elsewhere."""
    logits = (hidden.float() @ model.model.embed_tokens.weight.T).log_softmax(-1)
    loss = -logits.gather(-1, y[..., None])[..., 0]
    for row, (index, start, stop, _) in enumerate(batch):
        rows, share = (torch.from_numpy(a) for a in told[index])
        begin = len(batches.rows[index]) - len(rows)  # place of the first output token
        first, last = max(begin, start + 1), stop
        if first < last:
            own = slice(first - begin, last - begin)
            found = logits[row, first - start - 1:last - start - 1].gather(-1, rows[own])
            loss[row, first - start - 1:last - start - 1] = -(found * share[own]).sum(-1) / share[own].sum(-1)
    return (loss * weights).sum() / weights.sum().clamp_min(1.0)


# -------------------------------------------------------------------------------------- repeated

def repeated(rng, count, rows, width, spread):
    """(inputs, targets, weights): random tokens and the same once more, at a distance of at most `spread` less than half."""
    text, weights = rng.integers(0, count, (rows, width + 1)), np.zeros((rows, width), np.float32)
    for row in range(rows):
        size = width // 2 - int(rng.integers(0, min(spread, width // 2 - 8)))
        text[row, size:2 * size] = text[row, :size]
        weights[row, size:2 * size - 1] = 1
    return (torch.from_numpy(array) for array in (text[:, :-1].copy(), text[:, 1:].copy(), weights))


# -------------------------------------------------------------------------------------- training

def trained(way, parts, kept, told, minutes, target):
    torch.manual_seed(SEED)
    rng, batches = np.random.default_rng(SEED), Batches(parts[0], kept)
    model = Llama({**traffic.sizes(256, 2), "vocab_size": len(kept) + (2 if way == "parallel" else 1)})
    if way == "warm":
        weights = traffic.Layers(ROOT / "onnx/models/draft-same").start(kept, target)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    named = list(model.named_parameters())
    muon_rate, adam_rate, hold = traffic.RATES[False]
    muon = Muon([p for n, p in named if p.ndim == 2 and "embed" not in n])
    adam = torch.optim.AdamW([p for n, p in named if p.ndim != 2 or "embed" in n], lr=adam_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    began, step, spread, copied, copies = time.monotonic(), 0, 1, 2.0, 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        copying = way == "copy" and (share > COPY_FROM and spread < 64 or step % COPY_EVERY == 0)
        epoch, index = batches.at[WINDOW]
        batch = batches.epoch(WINDOW, epoch)[index]
        if copying:
            x, y, weights = repeated(rng, len(kept), 48, 128, spread)
        else:
            x, y, weights = (torch.from_numpy(array) for array in batches.next(WINDOW))
        with torch.autocast("cpu", torch.bfloat16):
            if way == "parallel":
                loss = parallel_loss(model, x, y, weights, rng)
            elif way == "soft":
                loss = soft_loss(model, model(x), batch, batches, told, y, weights)
            else:
                loss = chunked_loss(model, model(x), y, weights)[0]
        loss.backward()
        scale = rate_at(share, step, hold)
        for group in adam.param_groups:
            group["lr"] = adam_rate * scale
        adam.step()
        muon.step(muon_rate * scale, 0.85 + 0.1 * min(1.0, step / 300))
        model.zero_grad(set_to_none=True)
        step += 1
        if copying:
            copied, copies = 0.7 * copied + 0.3 * float(loss.detach()), copies + 1
            if copied < 1.0 and spread < 64:
                spread, copied = spread * 2, 2.0
    if way == "copy":
        print("copies", copies, "spread", spread, "loss", round(copied, 3), flush=True)
    return model, step


def drafting(model, kept, way, target):
    """Milliseconds of a draft of FOUR tokens by ONNX Runtime on one core, the mean round's tokens read with it."""
    import onnxruntime

    size = {k: v for k, v in model.size.items() if k != "vocab_size"}
    weights = {n: p.detach().half().numpy() for n, p in model.state_dict().items()}
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:len(kept) + 1]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = traffic.vocabulary_of(traffic.token_names(target), target)
        bundle.write_onnx(pathlib.Path(folder), weights, config({**size, "vocab_size": vocabulary}), kept=kept.ids)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])
    layers, shape = size["num_hidden_layers"], (1, size["num_key_value_heads"], CACHE + 8, size["head_dim"])
    past = {f"past_{kind}.{layer}": np.zeros(shape, np.float32) for layer in range(layers) for kind in "kv"}

    def run(count):
        places = np.arange(CACHE, CACHE + count)[None]
        session.run(["logits"], {"input_ids": np.ones((1, count), np.int64), "positions": places, "rows": places - CACHE, "write_index": np.array([CACHE]),
                                 "kv_len": np.array([CACHE + count]), "mask": np.where(np.arange(CACHE + 8) < CACHE + count, 0, -1e9)[None, None, None].repeat(count, 2).astype(np.float32), **past})

    # a round reads what it emitted, two tokens and a half in the mean: with the masks in one pass, or before the steps
    passes = [2 + FOUR] if way == "parallel" else [3] + [1] * (FOUR - 1)
    times = []
    for _ in range(TIMED):
        began = time.perf_counter()
        for count in passes:
            run(count)
        times.append(time.perf_counter() - began)
    return 1000 * float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=pathlib.Path)
    parser.add_argument("--ways", default="hard,soft,parallel", type=lambda text: text.split(","))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--most", type=int, default=400, help="requests")
    parser.add_argument("--target", type=pathlib.Path, default=ROOT / ".cache/real-models/smollm2/onnx")
    args = parser.parse_args()
    names = traffic.token_names(args.target)
    with args.requests.open() as lines:
        requests = read(lines, traffic.vocabulary_of(names, args.target))[:args.most]
    parts = split(requests)
    kept = Kept.most_frequent(parts[0], traffic.vocabulary_of(names, args.target))
    told = target_rows(args.target, parts[0], kept) if "soft" in args.ways else None
    print(f"{len(parts[0])} requests, {len(parts[1])} held out, {len(kept)} tokens; {args.minutes} minutes each", flush=True)
    for way in args.ways:
        model, steps = trained(way, parts, kept, told, args.minutes, args.target)
        if way == "parallel":
            length = sum(len(r.output) for r in parts[1]) / sum(parallel_rounds(model, kept, r) for r in parts[1])
        else:
            length = traffic.acceptance(traffic.hits(model, kept, parts[1], "cpu"), FOUR)[1]
        print(json.dumps({"way": way, "steps": steps, "length": round(length, 3)}), flush=True)
        print(f"{way}: {drafting(model, kept, way, args.target):.2f} ms a draft", flush=True)


if __name__ == "__main__":
    main()
