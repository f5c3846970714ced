"""Every technique of a GPT: settings that switch it on, and its formula in plain float64.

The formulas compute one sequence, one head and one position at a time. A new technique is one entry of TECHNIQUES and
its formula in the functions below; `test_conformance` applies every law to every entry.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.block import Block
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT

Weights = dict[str, Tensor]

V, BOS = 50, 1
SMALL = GPTConfig(vocab_size=V, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, tied_embed_init_std=0.5)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "bigram": {"bigram_vocab_size": 17, "bigram_dim": 8},
    "trigram": {"bigram_vocab_size": 17, "bigram_dim": 8, "trigram": True},
    "gated smear": {"smear": "gated", "gate_window": 6},
    "fixed smear": {"smear": "fixed"},
    "factored embedding": {"embed_dim": 12, "tie_embeddings": True},
    "factored embedding, untied": {"embed_dim": 12, "tie_embeddings": False},
    "partial RoPE": {"rope_dims": 4},
    "longer than trained": {"rope_dims": 6, "rope_train_seq_len": 5},
    "exclusive attention": {"xsa_last_n": 4},
    "value embeddings": {"value_embed_layers": (1, 4), "value_embed_dim": 8},
    "value residual": {"value_residual": True},
    "sparse gate": {"attn_gate": "sparse", "gate_window": 6, "sparse_gate_scale": 0.5},
    "output gate": {"attn_gate": "output", "gate_window": 6},
    "dense gate": {"attn_gate": "dense"},
    "isolated documents": {"isolate_documents": True},
    "attention window": {"attn_window": 4, "attn_window_layers": (0, 2), "isolate_documents": False},
    "leaky ReLU²": {"activation": "leaky_relu2"},
    "SwiGLU": {"activation": "swiglu", "mlp_mult": 1.5},
    "LN scale": {"ln_scale": True},
    "gated skips": {"skip_gates": True},
    "depth recurrence": {"num_loops": 2, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.5},
    "parallel residual streams": {"parallel": "lanes", "parallel_start_layer": 3},
    "parallel attention and MLP": {"parallel": "joint", "parallel_start_layer": 3},
    "asymmetric softcap": {"softcap": "asymmetric", "logit_softcap": 5.0},
    "polynomial softcap": {"softcap": "poly", "logit_softcap": 2.0},
}


def with_settings(change: dict[str, Any]) -> GPTConfig:
    return dataclasses.replace(SMALL, **change)


def combinations() -> list[dict[str, Any]]:
    """Return combined settings that together have every technique, each combination as many as go together."""
    combined: list[dict[str, Any]] = []
    for change in TECHNIQUES.values():
        for settings in combined:
            if all(settings.get(name, value) == value for name, value in change.items()) and _valid(settings | change):
                settings |= change
                break
        else:
            combined.append(dict(change))
    return combined


def _valid(settings: dict[str, Any]) -> bool:
    try:
        with_settings(settings)
    except ConfigError:
        return False
    return True


COMBINATIONS = combinations()
EVERYTHING = COMBINATIONS[0]
"""As many techniques as go together; for five layers and heads of at least 4 dimensions."""
ALL = {**TECHNIQUES, **{f"combination {n}": settings for n, settings in enumerate(COMBINATIONS)}, "baseline": {}}


def randomized(config: GPTConfig, seed: int = 0) -> GPT:
    """Return a model with no parameter at zero or one, so that each has an effect."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 2 else 0.5))
            if name == "softcaps":
                p.copy_(torch.tensor([2.0, 3.0]))
    return model


def blocks_of(model: GPT) -> list[Block]:
    """Return the layers of a model; to a type checker `model.blocks` are modules of any class."""
    return [block for block in model.blocks if isinstance(block, Block)]


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Return ids with documents that begin at the third position and then every four."""
    ids = torch.randint(2, V, shape, generator=torch.Generator().manual_seed(seed))
    ids[..., 2::4] = BOS
    return ids


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def embedding(c: GPTConfig, w: Weights, ids: list[int]) -> Tensor:
    rows = []
    for t, token in enumerate(ids):
        x = w["tok_emb.weight"][token]
        if c.embed_dim:
            x = w["embed_proj.weight"] @ x
        if c.bigram_vocab_size:
            last = c.bigram_vocab_size - 1
            pair = t >= 1 and token != c.bos_id
            triple = pair and t >= 2 and ids[t - 1] != c.bos_id
            row = w["bigram.embed.weight"][((36313 * token) ^ (27191 * ids[t - 1])) % last if pair else last]
            if c.trigram:
                mixed = (36313 * token) ^ (27191 * ids[t - 1]) ^ (51497 * ids[t - 2])
                row = row + w["bigram.embed.weight"][mixed % last if triple else last]
            x = x + w["bigram.scale"] * (w["bigram.proj.weight"] @ row)
        rows.append(x)
    x = torch.stack(rows)
    has_predecessor = [t > 0 and token != c.bos_id for t, token in enumerate(ids)]
    if c.smear == "gated":
        share = torch.sigmoid(x[:, : c.gate_window] @ w["smear.gate"][0])
        extra = [w["smear.amount"] * share[t] * x[t - 1] * has_predecessor[t] for t in range(len(ids))]
        x = x + torch.stack(extra)
    x = rms(x)
    if c.smear == "fixed":
        g = torch.sigmoid(w["smear.gate"])
        x = torch.stack([(1 - g) * x[t] + g * x[t - 1] if has_predecessor[t] else x[t] for t in range(len(ids))])
    return x


def attention(
    c: GPTConfig, w: Weights, i: int, x: Tensor, ids: list[int], first_values: Tensor | None
) -> tuple[Tensor, Tensor]:
    length, d, p = len(ids), c.head_dim, f"blocks.{i}.attn."
    q, k, values = (x @ w[f"{p}c_{n}.weight"].T for n in "qkv")
    if i in c.value_embed_layers:
        scale = w["value_embed.scale"] * w["value_embed.layer_scales"][c.value_embed_layers.index(i)]
        values = values + scale * (w["value_embed.embed.weight"][ids] @ w["value_embed.proj.weight"].T)
    v = values
    if c.value_residual and first_values is not None:
        v = w[p + "value_mix"][0] * first_values + w[p + "value_mix"][1] * v
    n, base = c.rope_dims or d, c.rope_base
    if c.rope_train_seq_len and length > c.rope_train_seq_len:
        base = base * (length / c.rope_train_seq_len) ** (n / (n - 2))
    window = c.attn_window if c.attn_window and i in (c.attn_window_layers or range(c.num_layers)) else length

    def rotated(z: Tensor, t: int) -> Tensor:
        angles = torch.tensor([t / base ** (2 * j / n) for j in range(n // 2)], dtype=z.dtype)
        a, b, rest = z.split([n // 2, n // 2, d - n])
        return torch.cat([a * angles.cos() + b * angles.sin(), -a * angles.sin() + b * angles.cos(), rest])

    document = [ids[: t + 1].count(c.bos_id) for t in range(length)]
    heads = []
    for h in range(c.num_heads):
        kv = h // (c.num_heads // c.num_kv_heads)
        qh, kh = rms(q[:, h * d : (h + 1) * d]), rms(k[:, kv * d : (kv + 1) * d])
        vh = v[:, kv * d : (kv + 1) * d]
        keys, rows = [rotated(key, t) for t, key in enumerate(kh)], []
        for t in range(length):
            visible = [
                s for s in range(max(0, t - window + 1), t + 1) if document[s] == document[t] or not c.isolate_documents
            ]
            query = rotated(qh[t], t) * w[p + "q_gain"][h]
            shares = torch.stack([query @ keys[s] for s in visible]).div(math.sqrt(d)).softmax(0)
            y = shares @ vh[visible]
            if i >= c.num_layers - c.xsa_last_n:
                unit = vh[t] / vh[t].norm()
                y = y - (y @ unit) * unit
            if c.attn_gate != "none":
                inputs = c.model_dim if c.attn_gate == "dense" else c.gate_window
                factor = c.sparse_gate_scale if c.attn_gate == "sparse" else 1.0
                gate = torch.sigmoid(factor * (w[p + "head_gate"][h] @ x[t, :inputs]))
                y = y * gate * (2 if c.attn_gate == "output" else 1)
            rows.append(y)
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ w[p + "proj.weight"].T, values


def mlp(c: GPTConfig, w: Weights, i: int, x: Tensor) -> Tensor:
    p = f"blocks.{i}.mlp."
    u = x @ w[p + "fc.weight"].T
    if c.activation == "swiglu":
        gate = x @ w[p + "gate.weight"].T
        return (gate * torch.sigmoid(gate) * u) @ w[p + "proj.weight"].T
    slope = c.leaky_slope if c.activation == "leaky_relu2" else 0.0
    return torch.where(u > 0, u, slope * u) ** 2 @ w[p + "proj.weight"].T


def softcap(c: GPTConfig, w: Weights, logits: Tensor) -> Tensor:
    cap = c.logit_softcap
    if c.softcap == "poly":
        z = (logits / cap).clamp(-2, 2)
        return cap * (z - z**3 / 3 + z**5 / 15).clamp(-1, 1)
    if c.softcap == "asymmetric":
        above, below = w["softcaps"]
        return torch.where(logits > 0, above * torch.tanh(logits / above), below * torch.tanh(logits / below))
    return cap * torch.tanh(logits / cap)


def reference_logits(model: GPT, ids: list[int]) -> Tensor:
    """Return the logits of one sequence, (length, vocab_size) float64."""
    c, w = model.config, {name: p.detach().double() for name, p in model.named_parameters()}
    x0 = x = embedding(c, w, ids)
    segment = list(range(c.loop_start, c.loop_end + 1))
    order = [*range(c.loop_end + 1), *segment * c.num_loops, *range(c.loop_end + 1, c.num_layers)]
    pushed: list[Tensor] = []
    streams: list[Tensor] | None = None
    first_values = None
    for step, i in enumerate(order):
        b, half = f"blocks.{i}.", len(order) // 2
        ln = 1 / math.sqrt(i + 1) if c.ln_scale else 1.0
        if step >= half and pushed:
            skip = w["skip_weights"][step - half] * pushed.pop()
            stream = x if streams is None else streams[0]
            if c.skip_gates:
                g = torch.sigmoid(w["skip_gates"][step - half])
                stream = g * stream + (1 - g) * skip
            else:
                stream = stream + skip
            x = stream
            if streams is not None:
                streams[0] = stream
        if c.parallel == "lanes" and i == c.parallel_start_layer:
            streams = [x, x]
        mix = w[b + "resid_mix"]
        stream = mix[0] * (x if streams is None else streams[0]) + mix[1] * x0
        attended, values = attention(c, w, i, rms(stream) * ln, ids, first_values)
        attended = w[b + "attn_scale"] * attended
        first_values = values if first_values is None else first_values
        if streams is not None:
            m = w[b + "mlp_scale"] * mlp(c, w, i, rms(streams[1]) * ln)
            keep, write = w["lane_keeps"][i], w["lane_writes"][i]
            streams = [keep[n] * streams[n] + write[0, n] * attended + write[1, n] * m for n in (0, 1)]
        else:
            joint = c.parallel_start_layer is not None and i >= c.parallel_start_layer
            x = stream + attended
            x = x + w[b + "mlp_scale"] * mlp(c, w, i, rms(stream if joint else x) * ln)
        if step < half:
            pushed.append(x)
    x = rms(x if streams is None else (streams[0] + streams[1]) / 2)
    if not c.tie_embeddings:
        logits = x @ w["lm_head.weight"].T
    else:
        logits = (x @ w["embed_proj.weight"] if c.embed_dim else x) @ w["tok_emb.weight"].T
    return softcap(c, w, logits)
