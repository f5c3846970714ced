"""The shapes in a file against the GPT that its settings describe, before that takes memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from birdie.errors import ArtifactError
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT

MAX_PASSES = 4096
"""Most passes through layers in a model, with depth recurrence: a hundred times what any has."""


def require_shape(config: GPTConfig, shapes: Mapping[str, tuple[int, ...]], path: Path | str) -> None:
    """Compare the model that `config` describes with the shapes of a file's tensors, before it takes memory."""
    layers = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    passes = config.num_layers + config.num_loops * (config.loop_end - config.loop_start + 1)
    if config.num_layers != layers or passes > MAX_PASSES:
        raise ArtifactError(
            f"{path} has tensors of {layers:,} layers, but its recipe says {config.num_layers:,} (num_layers), run as "
            f"{passes:,}; export the model again"
        )
    try:
        with torch.device("meta"):
            model = GPT(replace(config, orthogonal_init=False, overtone_init=False))
    except (RuntimeError, TypeError, OverflowError) as error:  # torch has a number of elements in 64 bits
        raise ArtifactError(f"{path} describes a model that is too large to build; export it again") from error
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ArtifactError(
                f"{path} has {name[:80]!r} of shape {shapes.get(name)}, but its recipe describes {expected.get(name)}; "
                "export the model again"
            )
