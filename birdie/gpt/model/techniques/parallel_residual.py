"""Parallel residuals: from a layer on, attention and MLP read the same input.

    joint    x ← x + attention(x) + mlp(x)                     #1412
    lanes    two residual streams: attention reads stream 0, the MLP stream 1                  #1529
             stream_n ← keep_n · stream_n + write_{0,n} · attention + write_{1,n} · mlp
             the output is the mean of both; keeps start at 1.1, writes at 1

Cost: joint, no parameters; lanes, 6 per layer and four passes over x.

Source: openai/parameter-golf, the pull requests above. Measured: joint +0.000 and 3 % less time, lanes −0.038.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.gpt.model.layers import rms
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT

Streams = tuple[Tensor, Tensor]
"""The two residual streams, each (batch, length, dim)."""


def is_joint(config: "GPTConfig", layer: int) -> bool:
    """Return whether attention and MLP of `layer` read one input and write one stream."""
    start = config.parallel_start_layer
    return config.parallel == "joint" and start is not None and layer >= start


def first_of_two_streams(config: "GPTConfig") -> int | None:
    """Return the layer at which the stream divides into two; None: nowhere."""
    return config.parallel_start_layer if config.parallel == "lanes" else None


def stream_weights(config: "GPTConfig") -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return keeps, (layers, 2), and writes, (layers, branch, stream); None and None with one stream."""
    if first_of_two_streams(config) is None:
        return None, None
    keeps = nn.Parameter(torch.full((config.num_layers, 2), 1.1))
    return keeps, nn.Parameter(torch.ones(config.num_layers, 2, 2))


def update_streams(streams: Streams, attended: Tensor, transformed: Tensor, keeps: Tensor, writes: Tensor) -> Streams:
    """Return both streams after a layer.

    Args:
        streams: as the layer has read them.
        attended: output of attention, (batch, length, dim).
        transformed: output of the MLP, of the same shape.
        keeps: of this layer, (2,).
        writes: of this layer, (branch, stream), (2, 2).
    """
    keeps, writes = keeps.to(attended.dtype), writes.to(attended.dtype)
    first, second = (keeps[n] * streams[n] + writes[0, n] * attended + writes[1, n] * transformed for n in (0, 1))
    return first, second


def _diagnostics(model: "GPT") -> Iterator[str]:
    config = model.config
    if model.lane_writes is not None and model.lane_keeps is not None:
        layers = slice(config.parallel_start_layer, None)
        moved, keeps = rms(model.lane_writes[layers] - 1), model.lane_keeps[layers]
        yield (
            f"parallel residual streams: writes 1 moved by {moved:.3g}, keeps 1.1 → {float(keeps.min()):.3g} to "
            f"{float(keeps.max()):.3g}"
        )
    elif config.parallel_start_layer is not None:
        yield f"parallel attention and MLP: layers {config.parallel_start_layer} to {config.num_layers - 1}"


PARALLEL_RESIDUAL = Technique(groups={"lane_keeps": "scalars", "lane_writes": "scalars"}, diagnostics=_diagnostics)
