"""The Llama architecture in PyTorch, small and with Hugging Face's weight names.

Written out rather than taken from `transformers` because training on a CPU needs two properties
that the library does not have: a loss that never holds all logits at once, and plain modules only,
so that a checkpoint is a dict of named matrices that the exporters read without PyTorch.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZES = {
    "target": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704, "vocab_size": 8192},
    "draft-same": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704, "vocab_size": 8192},
    "draft-other": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704, "vocab_size": 6144},
}


def config(size):
    """The config.json that every export carries."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **size,
        "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "torch_dtype": "float16", "use_cache": True,
    }


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.heads // self.kv
        k = k[:, :, None].expand(b, self.kv, group, t, self.dim).reshape(b, self.heads, t, self.dim)
        v = v[:, :, None].expand(b, self.kv, group, t, self.dim).reshape(b, self.heads, t, self.dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"])
        self.mlp = MLP(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"])


class Llama(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.model = Trunk(size)
        half = size["head_dim"] // 2
        inverse = 10000.0 ** (-torch.arange(half).float() / half)
        angles = torch.arange(2048).float()[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)

    def forward(self, ids):
        """The normed hidden state; logits are its product with the embedding."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = self.cos[:ids.shape[1]].to(x.dtype), self.sin[:ids.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, ids):
        h = self(ids)
        return F.linear(h, self.model.embed_tokens.weight.to(h.dtype))


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy with a tied head, a chunk of tokens at a time.

    The gradient is taken in the forward pass, so the logits of a chunk are computed once and
    discarded: on a CPU their memory traffic costs more than their computation.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, chunk):
        hidden, w = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
        dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
        losses = torch.empty(len(hidden), device=hidden.device)
        total = weights.sum().clamp_min(1.0)
        for s in range(0, len(hidden), chunk):
            h, t = hidden[s:s + chunk], targets[s:s + chunk]
            # the logits of these models stay far below 80, so exp needs no shift
            logits = (h @ w.T).float().clamp_(max=80.0)
            chosen = logits.gather(1, t[:, None])
            grad = logits.exp_()
            z = grad.sum(-1, keepdim=True)
            losses[s:s + chunk] = (z.log() - chosen)[:, 0]
            scale = weights[s:s + chunk, None] / total
            grad.mul_(scale / z).scatter_add_(1, t[:, None], -scale)
            grad = grad.to(torch.bfloat16)
            dh[s:s + chunk] = grad @ w
            dw += (grad.T @ h).float()
        ctx.save_for_backward(dh, dw)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum() / total, losses

    @staticmethod
    def backward(ctx, gradient, _):
        dh, dw = ctx.saved_tensors
        return dh * gradient, dw * gradient, None, None, None


def chunked_loss(model, hidden, targets, weights, chunk=256):
    return ChunkedLoss.apply(hidden.reshape(-1, hidden.shape[-1]), model.model.embed_tokens.weight,
                             targets.reshape(-1), weights.reshape(-1), chunk)
