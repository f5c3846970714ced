"""A model's weights as a state dict of bytes: every tensor a small .birdie file of its own, under its own name.

    compress_weights(model) ─► {"0.weight": uint8 bytes, …} ─► torch.save, safetensors ─► load_weights(…, into=model)

For one file of a whole model, `birdie.save` is smaller by the header each of these repeats.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact import files as artifact
from birdie.artifact import metadata as about_file
from birdie.artifact.writer import Meter, Packer
from birdie.compress.rate.assignment import assign, encode_all
from birdie.compress.schemes.grid import Grid
from birdie.compress.spectral.export import trained
from birdie.compress.state import fill, named_tensors, without_ties
from birdie.entropy.hints import Effort
from birdie.errors import ArtifactError

_NAME = "tensor"


def compress_weights(model: nn.Module, *, coder: Effort = "max", workers: int | None = None) -> dict[str, Tensor]:
    """Every tensor of `model`'s state dict, by its plain name, as bytes (uint8, 1-D).

    What `birdie.spectral` wrapped is stored as trained; other matrices become per-row int8, small tensors 16 bits.

    Args:
        model: a module, wrapped or not; never changed. Tied names share one tensor of bytes.
        coder: "max" for the fewest bytes, "fast" for the quickest.
        workers: threads; None takes every core.

    Raises:
        WeightsError: a tensor cannot be stored.
    """
    everything = named_tensors(model)
    state, ties = without_ties(everything)
    schemes = assign(state, {ties.get(name, name): scheme for name, scheme in trained(model).items()}, Grid())
    encoded = encode_all(state, schemes, workers=workers)
    about = about_file.to_bytes(None, None, None)
    with ThreadPoolExecutor(workers) as pool:
        packer = Packer(pool, coder, [], about, Meter(None, len(encoded)))
        packed = {name: np.frombuffer(packer({_NAME: one}), np.uint8) for name, one in encoded.items()}
    bytes_of = {name: torch.from_numpy(data.copy()) for name, data in packed.items()}
    return {name: bytes_of[ties.get(name, name)] for name in everything}


@overload
def load_weights(compressed: Mapping[str, Tensor], *, into: None = None) -> dict[str, Tensor]: ...
@overload
def load_weights(compressed: Mapping[str, Tensor], *, into: nn.Module) -> nn.Module: ...
def load_weights(compressed: Mapping[str, Tensor], *, into: nn.Module | None = None) -> dict[str, Tensor] | nn.Module:
    """Undo `compress_weights`.

    Args:
        compressed: name → bytes.
        into: a module that takes the tensors, wrapped or not; names and shapes must match.

    Returns:
        name → tensor; or `into`.

    Raises:
        ArtifactError: an item is no such bytes, or they are corrupt.
        WeightsError: names or shapes do not match `into`.
    """
    state: dict[str, Tensor] = {}
    known: dict[tuple[int, int], Tensor] = {}
    for name, data in compressed.items():
        if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.ndim != 1:
            raise ArtifactError(f"item {name!r} is not the bytes of a tensor; give what compress_weights returned")
        key = (data.data_ptr(), data.numel())
        if key not in known:
            try:
                known[key] = artifact.load(data.cpu().numpy().tobytes())[_NAME]  # type: ignore[call-overload]
            except (ArtifactError, KeyError) as error:
                raise ArtifactError(f"the bytes of {name!r} are corrupt ({error})") from error
        state[name] = known[key]
    return state if into is None else fill(into, state, "the compressed weights")
