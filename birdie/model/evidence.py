"""Whether the techniques a model was given are at work: what training has made of them, in a line each.

A technique that is configured may still do nothing, and records were trained with some that did. What has parameters
shows how far these are from where they began; what has none shows where it applies.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from birdie.model.attention import Attention
from birdie.model.embedding import GatedSmear
from birdie.model.gpt import GPT


class Looping:
    """Turns loops on when it is time: before that the plain list of layers runs."""

    def __init__(self, model: GPT, notify: Callable[[str], None] = lambda _: None) -> None:
        self.model, self._notify, self._told = model, notify, False

    def before_step(self, step: int, share: float, multiplier: float) -> None:  # noqa: ARG002  the trainer's
        """Told before each step of the share of the run that is done; a pure function of it, so resuming is easy."""
        config = self.model.config
        self.model.looping = share >= config.enable_looping_at
        if self.model.looping and not self._told and step >= 0:
            self._told = True
            order = ",".join(str(layer) for part in config.layers(True) for layer in part)
            self._notify(f"looping from step {step + 1} on: layers {order}")

    def penalty(self) -> Tensor | None:
        """Nothing is added to the loss."""
        return None


@torch.no_grad()
def evidence(model: GPT) -> list[str]:
    """A line for each technique of `model` that the challenge's baseline does not have."""
    return [*_embedding(model), *_attention(model), *_stream(model)]


def _embedding(model: GPT) -> Iterator[str]:
    if model.bigram is not None:
        rows = model.bigram.embed.weight
        used = int(rows.any(1).sum())
        what = "bigram and trigram" if model.bigram.trigram else "bigram"
        yield f"{what}: {used:,} of {len(rows):,} rows learned, scale 0.05 → {float(model.bigram.scale):.3g}"
    if isinstance(model.smear, GatedSmear):
        yield f"gated smear: amount 0 → {float(model.smear.amount):.3g}, gate 0 → {_size(model.smear.gate):.3g}"
    elif model.smear is not None:
        shares = torch.sigmoid(model.smear.gate)
        yield f"fixed smear: shares 0.5 → {float(shares.min()):.3g} to {float(shares.max()):.3g}"
    if model.embed_proj is not None:
        yield f"factored embedding: {model.config.embed_dim} of {model.config.model_dim} dimensions"
    if model.value_embed is not None:
        scales = ", ".join(f"{float(scale):.3g}" for scale in model.value_embed.layer_scales)
        yield (
            f"value embeddings: layers {', '.join(map(str, model.value_embed.layers))}, projection 0 → "
            f"{_size(model.value_embed.proj.weight):.3g}, scales 1 → {scales}"
        )


def _attention(model: GPT) -> Iterator[str]:
    config, layers = model.config, [part for part in model.modules() if isinstance(part, Attention)]
    if config.attention != "softmax":
        yield f"attention: {config.attention} in {len(layers)} layers"
    if config.rotary_dims < config.head_dim:
        yield f"partial rotation: {config.rotary_dims} of {config.head_dim} dimensions of a head"
    exclusive = [index for index, layer in enumerate(layers) if layer.exclusive]
    if exclusive:
        yield f"exclusive attention: layers {exclusive[0]} to {exclusive[-1]}"
    mixes = [layer.value_mix for layer in layers if layer.value_mix is not None]
    if mixes:
        shares = torch.stack(tuple(mixes[1:] or mixes)).mean(0)
        yield f"value residual: first and own 0.5, 0.5 → {float(shares[0]):.3g}, {float(shares[1]):.3g} on average"
    gates = [layer.head_gate for layer in layers if layer.head_gate is not None]
    if gates:
        start = "0.01" if config.attn_gate == "dense" else "0"
        now = _size(torch.cat(tuple(gates)))
        yield f"{config.attn_gate} gate: {sum(map(len, gates))} heads, weights {start} → {now:.3g}"
    if config.isolate_documents:
        yield f"isolated documents: attention begins anew at each BOS, kernel {model.kernels.name}"
    if config.attn_window:
        windowed = [index for index, layer in enumerate(layers) if layer.windowed]
        yield f"window: layers {', '.join(map(str, windowed))} see {config.attn_window:,} places back"


def _stream(model: GPT) -> Iterator[str]:
    config = model.config
    if config.activation != "relu2":
        yield f"activation: {config.activation}"
    if config.ln_scale:
        yield f"LN scale: inputs of the last layer times {config.num_layers**-0.5:.3g}"
    if model.skip_gates is not None:
        shares = torch.sigmoid(model.skip_gates)
        yield f"gated skips: shares 0.5 → {float(shares.min()):.3g} to {float(shares.max()):.3g}"
    if config.num_loops:
        runs = sum(map(len, config.layers(model.looping)))
        yield f"loops: {runs} layers run of {config.num_layers} there are"
    if model.lane_writes is not None and model.lane_keeps is not None:
        used = slice(config.parallel_start_layer, None)
        moved, kept = _size(model.lane_writes[used] - 1), model.lane_keeps[used]
        yield f"lanes: writes moved by {moved:.3g}, keeps 1.1 → {float(kept.min()):.3g} to {float(kept.max()):.3g}"
    elif config.parallel_start_layer is not None:
        yield f"parallel: layers {config.parallel_start_layer} to {config.num_layers - 1}"
    if model.softcaps is not None:
        above, below = (float(cap) for cap in model.softcaps)
        yield f"asymmetric softcap: {config.logit_softcap:g} → {above:.3g} above zero, {below:.3g} below"
    elif config.softcap != "tanh":
        yield f"softcap: {config.softcap}"
    if model.way != "eager":
        how = "a Triton kernel" if model.way == "triton" else "chunks of rows"
        yield f"fused loss: softcap and cross-entropy by {how}"
    fused = [index for index, block in enumerate(model.blocks) if block.mlp.fused]  # type: ignore[union-attr]
    if fused:
        yield f"fused MLPs: product and activation by a Triton kernel in {len(fused)} layers"


def _size(weight: Tensor) -> float:
    """Root mean square."""
    return float(weight.float().square().mean().sqrt())
