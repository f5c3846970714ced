"""Files in memory: a module's weights as those of its file, and a state dict whose tensors are small files.

    quantize_(model): module ──save──► bytes in memory ──load──► the same module
    compress_weights(model) ─► {"0.weight": uint8 bytes, …} ─► torch.save, safetensors ─► load_weights(…, into=model)

One file of the complete model, as `birdie.save` writes it, is smaller than those of its tensors: it has one header.
"""

import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import ParamSpec, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact import container
from birdie.artifact.loading import load
from birdie.artifact.options import QuantizeOptions, SaveOptions
from birdie.artifact.saving import write_model
from birdie.artifact.summary import Summary
from birdie.artifact.write import Beside
from birdie.compress.filling import fill
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.fit import fit
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState, ModelState, keys_of
from birdie.entropy.hints import EffortOption, effort_for
from birdie.errors import ArtifactError, ConfigError
from birdie.system.keywords import keywords

P = ParamSpec("P")

_NAME = "tensor"


def compress_weights(
    model: nn.Module, *, effort: EffortOption = "auto", workers: int | None = None
) -> dict[str, Tensor]:
    """Compress every tensor of `model`'s state dict to bytes (uint8, 1-D), by its plain name.

    Weights that `birdie.spectral` wrapped are stored as trained; other matrices become int8; small tensors are
    kept in 16 bits.

    Args:
        model: a module, wrapped or not; never changed. Tied names share one tensor of bytes.
        effort: as for `birdie.save`.
        workers: threads; None takes every core.

    Raises:
        WeightsError: a tensor cannot be stored.
    """
    state, target = ModelState.of(model), Target()
    assignment = assign(state, None, target)
    coding = Encoder(effort_for(effort, assignment.weights), workers=workers)
    encoded = fit(assignment, target, coding).encoded
    contents = {name: Beside().content(EncodedState({_NAME: one}, {})) for name, one in encoded.tensors.items()}
    files = {name: container.to_bytes(*content) for name, content in contents.items()}
    packed = {name: np.frombuffer(file, np.uint8) for name, file in files.items()}
    bytes_of = {name: torch.from_numpy(data.copy()) for name, data in packed.items()}
    return {name: bytes_of[state.ties.get(name, name)] for name in keys_of(model) if name in state.by_name}


@overload
def load_weights(compressed: Mapping[str, Tensor], *, into: None = None) -> dict[str, Tensor]: ...
@overload
def load_weights(compressed: Mapping[str, Tensor], *, into: nn.Module) -> nn.Module: ...
def load_weights(compressed: Mapping[str, Tensor], *, into: nn.Module | None = None) -> dict[str, Tensor] | nn.Module:
    """Decode the tensors that `compress_weights` compressed.

    Args:
        compressed: name → bytes.
        into: a module to copy the tensors into, wrapped or not; names and shapes must match.

    Returns:
        name → tensor; or `into`.

    Raises:
        ArtifactError: an item is not a 1-D uint8 tensor, or its bytes are corrupt.
        WeightsError: names or shapes do not match `into`.
    """
    if not isinstance(compressed, Mapping):
        raise ConfigError(f"compressed is a {type(compressed).__name__}; give what compress_weights returned")
    state: dict[str, Tensor] = {}
    decoded: dict[tuple[int, int], Tensor] = {}
    for name, data in compressed.items():
        if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.ndim != 1:
            raise ArtifactError(f"item {name!r} is not the bytes of a tensor; give what compress_weights returned")
        key = (data.data_ptr(), data.numel())
        if key not in decoded:
            try:
                decoded[key] = load(data.cpu().numpy().tobytes())[_NAME]
            except (ArtifactError, KeyError) as error:
                raise ArtifactError(f"the bytes of {name!r} are corrupt ({error}); compress the model again") from error
        state[name] = decoded[key]
    return state if into is None else fill(into, state, "the compressed weights")


class Quantize(Protocol[P]):
    """Type of `quantize_`: options are the fields of a dataclass."""

    def __call__(self, model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> Summary: ...


def _takes(
    kind: Callable[P, QuantizeOptions],
) -> Callable[[Callable[[nn.Module, QuantizeOptions], Summary]], Quantize[P]]:
    return keywords(kind)


@_takes(QuantizeOptions)
def quantize_(model: nn.Module, options: QuantizeOptions) -> Summary:
    """Quantize the weights of `model` in place: to the values that a file with these settings decodes to.

    The result is that of `birdie.save` and `birdie.load` into the module, bit for bit, without a file: to try settings,
    to evaluate, or to fine-tune what is left. Weights keep their dtypes and devices; memory holds the coded file once.
    A calibration describes the float weights, so use its result for this module once, or quantize a copy. Units whose
    order is arbitrary are sorted in the module as well, as they are in a file: the function is unchanged, but an
    optimizer's averages then belong to other units; `birdie.calibrate(…, symmetries=False)` keeps the order.

    Args:
        model: a module, wrapped or not; its parameters and buffers are overwritten.

    Returns:
        Bytes and tensors of the file that `birdie.save` would write.

    Raises:
        ConfigError: `model` is not a module, or options contradict one another; the module is unchanged.
        WeightsError: a tensor holds NaN or infinite values, or cannot be stored at all; the module is unchanged.
        BudgetError: nothing fits the budget; the module is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}, not a module; give a module, or use birdie.save")
    file = BytesIO()
    summary = write_model(model, file, SaveOptions(**vars(options)))
    limit = sys.maxsize  # limits are for files from elsewhere
    load(file.getbuffer(), into=model, max_bytes=limit, max_operations=limit, workers=options.workers)
    return summary
