"""Calibration without data: made-up inputs of a module, and a loss of its outputs.

    module ──► tokens, images, or example inputs ──► outputs ──► KL of logits, or squared error of outputs

Language models take uniformly random tokens: on a GPT of 3.8 million weights they leave a sixth to an eighth of the KL
that no calibration leaves. Image networks take noise with the spectrum of photographs; if they have batch norms, Adam
changes the noise until the statistics in front of every batch norm are the running ones, which hold what the training
data were like (ZeroQ, arXiv 2001.00281; DeepInversion, arXiv 1912.08795). Without this step noise is worse than no
calibration at all. Networks of sound take noise whose loudness changes. Any other module needs example inputs; real
ones, if only a few, are used as they are.

Hessians of made-up inputs are nearly singular in directions that real inputs have, so they shrink towards the assumed
covariance (`birdie.compress.prior`). They may hardly reach a matrix that real inputs need, so none takes more than
`LEAST_BITS` less than what is assumed of it. Outputs that are no logits are often saturated by made-up inputs, as the
probability of speech is by noise. Their gradients then tell nothing, so rows weigh what is assumed.
"""

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.model_runs import Runs
from birdie.compress.calibration.modes import differentiable_batch, measuring_mode
from birdie.compress.calibration.probe import probe
from birdie.compress.calibration.result import CalibrationResult, held_out_batches, settled, unreached
from birdie.compress.calibration.sensitivity import Loss
from birdie.compress.prior import mean_cost, prior, scale_sensitivity
from birdie.compress.row_blocks import with_rows
from birdie.compress.scheme import Sensitivity
from birdie.compress.state import embeddings_of
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.system.settings import kept_settings

TOKENS, LENGTH = 32_768, 256  # random tokens, in sequences
IMAGES, EDGE = 160, 32  # noise images
_EDGE_STEP, _EDGES = 4, 64  # of images: multiples of how many pixels are tried, and how many of them
SOUNDS, SAMPLES = 64, (16_384, 4096, 1024)  # noise sounds, and their lengths: the first that the module accepts
LOUDNESS, STEADY = (0.005, 0.2), 8  # range of the amplitude of a sound, and in how many parts it is steady
BATCHES = 10  # of which one in five is held out
STEPS, RATE = 16, 0.1  # of Adam on images
_MOST_LOADED = 64  # batches of a loader: thousands of samples tell as much as all
LEAST_BITS = 2  # that a matrix takes less than the median if made-up inputs hardly reach it
SHRINKAGE = 0.3  # share of the assumed covariance in a Hessian of made-up inputs
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length")
"""Names under which configurations have the greatest length of a sequence."""
_INNER = {"past_key_values", "hidden_states", "attentions", "cache_params", "mems", "loss"}  # of outputs
_LEAST_VARIANCE = 1e-10  # of the inputs of a batch norm
_COLORS = 0.8  # correlation of the colors of a pixel


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one forward pass."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def synthetic_calibration(
    module: nn.Module, example_inputs: Any = None, *, symmetries: bool = True
) -> CalibrationResult:
    """Calibrate a module on example inputs, or on made-up ones.

    Args:
        module: whose weights are to be compressed.
        example_inputs: a tensor, a tuple of arguments, a dict, or a list or loader of these, one a batch; None makes
            inputs up, for language models and image networks.
        symmetries: whether units may be permuted.
    """
    made_up = example_inputs is None
    batches = _made_up(module) if made_up else batches_of(module, example_inputs)
    return calibrate_on_inputs(module, batches, made_up=made_up, symmetries=symmetries)


def calibrate_on_inputs(
    module: nn.Module,
    batches: Sequence[Inputs],
    *,
    made_up: bool,
    symmetries: bool = True,
    progress: Callable[[int], None] | None = None,
) -> CalibrationResult:
    """Calibrate a module on inputs, by its outputs alone.

    Args:
        module: whose weights are to be compressed.
        batches: one batch is split.
        made_up: whether the inputs are made up: what they tell is then moderated by what is assumed.
        symmetries: whether units may be permuted.
        progress: called with the number of batches done.
    """
    _require_finite_buffers(module)
    if len(batches) == 1:
        parts = _split(batches[0])
        batches = parts if _accepts(module, parts[0]) and _accepts(module, parts[-1]) else batches
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    calibration = _output_calibration(module, batches)
    try:
        result = CalibrationResult.of(state, calibration, symmetries=symmetries, progress=progress)
    except Exception as error:  # whatever the code of the module raises
        if not made_up or isinstance(error, MemoryError | WeightsError):
            raise
        reason = str(error).strip().partition("\n")[0]
        logging.getLogger("birdie").info("no gradients (%s); calibrating by forward passes alone", reason)
        return replace(_by_forward_passes(state, calibration, progress), synthetic=True)
    if calibration[2] is not _logit_loss and isinstance(result.held_out, HeldOut):
        result = replace(result, held_out=HeldOutError(module, result.held_out.batches, calibration[2]))
    if made_up:
        known = calibration[2] is _logit_loss
        result = replace(result, sensitivities=_moderated(result.sensitivities, state, gradients=known))
    return replace(result, synthetic=True)


def _by_forward_passes(
    state: Mapping[str, Tensor],
    calibration: tuple[nn.Module, Sequence[Inputs], Loss],
    progress: Callable[[int], None] | None,
) -> CalibrationResult:
    """Calibrate a module that cannot be differentiated."""
    module, batches, loss = calibration
    count = held_out_batches(len(batches))
    used, kept = (batches[:-count], batches[-count:]) if count else (batches, batches)
    held_out = (HeldOut if loss is _logit_loss else HeldOutError)(module, kept, loss)
    probed = probe(held_out, used, loss, progress=progress)
    sensitivities = _finite(settled(probed, state, embeddings_of(module)), state)
    missing = unreached(module, state, sensitivities)
    return CalibrationResult(dict(state), sensitivities, held_out, used, unreached=missing)


def _output_calibration(module: nn.Module, batches: Sequence[Inputs]) -> tuple[nn.Module, Sequence[Inputs], Loss]:
    """Return (module, batches, loss), the loss being about the outputs alone.

    The outputs are logits if there is one for every token of a vocabulary, or one row of classes for every image: the
    loss is then their KL divergence. Of other outputs it is the squared error of each in units of its mean square, by a
    random projection of the outputs, whose gradient has the covariance of that error.
    """
    first = Runs(module).measured(0, batches[0], lambda: [one.detach() for one in _outputs(module, batches[0])])
    if _are_logits(module, batches[0], first[0]):
        return module, batches, _logit_loss
    scales = [_scale(output) for output in first]
    signs = torch.Generator().manual_seed(0)

    def projection(module: nn.Module, inputs: Inputs) -> Tensor:
        total = torch.zeros((), device="cpu")
        for outputs, scale in zip(_outputs(module, inputs), scales, strict=True):
            random = torch.randint(0, 2, outputs.shape, generator=signs, device="cpu").to(outputs) * 2 - 1
            if scale:
                total = total.to(outputs) + (outputs * random).sum() * scale
        return total

    return module, batches, projection


def _scale(output: Tensor) -> float:
    """Return 1 over the root of the mean square; 0 for an output that is not finite everywhere, which tells nothing."""
    power = float(output.float().square().mean()) if output.numel() else 0.0
    return (power**-0.5 if power else 1.0) if math.isfinite(power) else 0.0


def _logit_loss(module: nn.Module, inputs: Inputs) -> Tensor:
    logits = _outputs(module, inputs)[0]
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=flat.device), reduction="sum")


class HeldOutError(HeldOut):
    """Squared error of a module's outputs with other weights, as a share of their variance, on held-out batches.

    Of several outputs it is the mean of their shares. Outputs that the other weights give another shape, or none, count
    as wrong altogether.
    """

    def mean(self) -> float:
        """Return the error of the copy, as it is now."""
        sums: dict[int, tuple[float, float]] = {}
        for number, inputs in enumerate(self.batches):
            for index, (error, total) in enumerate(self._differences(number, inputs)):
                errors, totals = sums.get(index, (0.0, 0.0))
                sums[index] = errors + error, totals + total
        shares = [error / total if total else error for error, total in sums.values()]
        return sum(shares) / len(shares)

    def _differences(self, number: int, inputs: Inputs) -> Iterator[tuple[float, float]]:
        """Yield the squared error and the variance of each output; zeros of one that is not finite."""

        def outputs(runs: Runs) -> list[Tensor]:
            return runs.measured(
                number, inputs, lambda: [one.detach().double() for one in _outputs(runs.module, inputs)]
            )

        expected = outputs(self.original)
        try:
            decoded = outputs(self.copied)
        except ConfigError:
            decoded = []
        for index, output in enumerate(expected):
            total = float((output - output.mean()).square().sum())
            same = len(decoded) == len(expected) and decoded[index].shape == output.shape
            error = float((decoded[index] - output).square().sum()) if same else total
            yield (error if math.isfinite(error) else total, total) if math.isfinite(total) else (0.0, 0.0)


def forward(module: nn.Module, inputs: Inputs) -> Any:
    """Return what a module returns, with the same random numbers in every call."""
    devices = sorted({tensor.device.index or 0 for tensor in module.parameters() if tensor.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(0)
            return module(*inputs.arguments, **inputs.keywords)
    except MemoryError:
        raise
    except Exception as error:  # whatever the code of the module raises
        shapes = [tuple(value.shape) for value in _tensors((inputs.arguments, dict(inputs.keywords)))]
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not isinstance(error, RuntimeError | TypeError | ValueError | IndexError):
            reason = f"{type(error).__name__}: {reason}"
        raise ConfigError(
            f"the module does not accept inputs of shape {shapes} ({reason}); give inputs (example_inputs, --data) "
            "that it accepts"
        ) from error


def _outputs(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the floating tensors that a module returns, logits before others, without caches and hidden states."""
    outputs = forward(module, inputs)
    parts: list[Any] = [outputs]
    if isinstance(outputs, Mapping):
        names = sorted((name for name in outputs if name not in _INNER), key=lambda name: name != "logits")
        parts = [outputs[name] for name in names]
    elif (logits := getattr(outputs, "logits", None)) is not None:
        parts = [logits]
    # what parts return is in what the module makes of it, if it makes anything of it
    near = [one for part in parts for one in _tensors(part if isinstance(part, Tensor | tuple | list) else None)]
    tensors = [one for one in near or _tensors(parts) if one.is_floating_point() and one.numel()]
    if not tensors:
        raise ConfigError("the module returns no floating tensor to compare; calibrate with a loss of your own instead")
    return tensors


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclass-like objects."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping) or hasattr(leaf, "__dict__"):
            yield from _tensors(dict(leaf if isinstance(leaf, Mapping) else vars(leaf)))


def _are_logits(module: nn.Module, inputs: Inputs, outputs: Tensor) -> bool:
    tensors = list(_tensors((inputs.arguments, dict(inputs.keywords))))
    if not tensors or outputs.ndim < 2 or outputs.shape[-1] < 2:
        return False
    if not all(tensor.is_floating_point() for tensor in tensors):
        tables = _embeddings(module)
        return bool(tables) and outputs.shape[-1] == _vocabulary(module, tables)
    return tensors[0].ndim == 4 and outputs.ndim == 2


def batches_of(module: nn.Module, example_inputs: Any) -> list[Inputs]:
    """Return example inputs as batches on the device of the module, in the form that its forward function takes."""
    if isinstance(example_inputs, Tensor | Mapping | tuple) or not isinstance(example_inputs, Iterable):
        batches, loaded = [example_inputs], False
    else:
        loaded = not isinstance(example_inputs, list)
        with kept_settings():  # a loader that shuffles
            batches = list(itertools.islice(example_inputs, _MOST_LOADED) if loaded else example_inputs)
    if not batches or not all(any(True for _ in _tensors(batch)) for batch in batches):
        raise ConfigError(
            "example_inputs holds no tensor; give a tensor, a tuple of arguments, a dict, or a list or loader of these"
        )
    samples = list(_tensors(batches))
    if not any(tensor.numel() for tensor in samples):
        raise ConfigError("the tensors of example_inputs are empty; give some samples")
    if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in samples):
        raise DataError("example_inputs holds NaN; leave out the samples that do")
    device = _example_weight(module).device
    batches = [
        differentiable_batch(tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)) for batch in batches
    ]
    forms = _forms(module, batches[0])
    way, inputs = next((form for form in forms if len(forms) > 1 and _accepts(module, form[1](batches[0]))), forms[0])
    if len(forms) > 1:
        logging.getLogger("birdie").info("example inputs are given as %s", way)
    if loaded and len(batches) == _MOST_LOADED:
        logging.getLogger("birdie").info("of the loader the first %d batches are taken", _MOST_LOADED)
    return [inputs(batch) for batch in batches]


def _forms(module: nn.Module, batch: Any) -> list[tuple[str, Callable[[Any], Inputs]]]:
    """Return the ways in which a module may take a batch, the likeliest first, each as text and function."""
    entire = ("forward(batch)", lambda batch: Inputs((batch,)))
    if isinstance(batch, Mapping):
        return [("forward(**batch)", lambda batch: Inputs(keywords=batch)), entire]
    if not isinstance(batch, tuple | list):
        return [entire]
    spread = ("forward(*batch)", lambda batch: Inputs(tuple(batch)))
    first = ("forward(batch[0])", lambda batch: Inputs((batch[0],)))
    # a loader's batches are lists, of which labels are no arguments
    if isinstance(batch, tuple):
        return [spread, entire]
    return [first, spread, entire] if 0 < _required(module) < len(batch) else [spread, first, entire]


def _required(module: nn.Module) -> int:
    """Return the number of arguments that the forward function has to be given by position; 0: not known."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)


def _split(inputs: Inputs) -> list[Inputs]:
    """Return one batch as up to `BATCHES` smaller ones, if every tensor has the same first dimension."""
    parts = inputs.arguments, dict(inputs.keywords)
    tensors = list(_tensors(parts))
    sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or sizes.pop() < 2:
        return [inputs]
    count = min(BATCHES, len(tensors[0]))

    def part(index: int) -> Inputs:
        return Inputs(*tree_map_only(Tensor, lambda tensor: tensor.tensor_split(count)[index], parts))

    return [part(index) for index in range(count)]


def _made_up(module: nn.Module) -> list[Inputs]:
    generator = torch.Generator().manual_seed(0)
    example = _example_weight(module)
    device = example.device
    if tables := _embeddings(module):
        length = min(
            LENGTH, *(getattr(getattr(module, "config", None), name, LENGTH) for name in (*LENGTHS, "block_size"))
        )
        shape = BATCHES, max(1, TOKENS // length // BATCHES), length
        tokens = torch.randint(0, _vocabulary(module, tables), shape, generator=generator, device="cpu")
        return [Inputs((batch.to(device),)) for batch in tokens]
    first = _first_convolution(module)
    if isinstance(first, nn.Conv2d):
        edge = image_edge(module, first.in_channels)
        if edge is None:
            raise ConfigError(
                f"images of {type(module).__name__} cannot be made up, as it takes none of {EDGE}×{EDGE} nor of other "
                "usual sizes; give example_inputs"
            )
        images = noise_images(first.in_channels, IMAGES, generator, (edge, edge)).to(example)
        return [Inputs((with_statistics(module, batch),)) for batch in images.tensor_split(BATCHES)]
    if isinstance(first, nn.Conv1d):
        for length in SAMPLES:
            sounds = noise_sounds(first.in_channels, length, SOUNDS, generator).to(example)
            for shaped in (sounds, sounds[:, 0]):
                if _accepts(module, Inputs((shaped[:2],))):
                    return [Inputs((batch,)) for batch in shaped.tensor_split(BATCHES)]
    raise ConfigError(
        f"inputs of {type(module).__name__} cannot be made up; give example_inputs, a tensor or tuple of arguments"
    )


def _first_convolution(module: nn.Module) -> nn.Module | None:
    return next((part for part in module.modules() if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)


def image_channels(module: nn.Module) -> int | None:
    """Return the channels of the images that a module takes, by its first convolution; None if that is of none."""
    first = _first_convolution(module)
    return first.in_channels if isinstance(first, nn.Conv2d) else None


def image_edge(module: nn.Module, channels: int) -> int | None:
    """Return the edge of square images that a module accepts: `EDGE`, or else the smallest; None if it accepts none.

    A network whose last layers are made for one size accepts that alone, and fails at its first layer of them, so that
    a trial is cheap. Multiples of 4 are tried, or of its first stride, which may be that of patches: two at least, as
    the positions of one are those of any by broadcasting.
    """
    first = _first_convolution(module)
    step = max(_EDGE_STEP, first.stride[0]) if isinstance(first, nn.Conv2d) else _EDGE_STEP
    edges = (EDGE, *range(2 * step, step * _EDGES + 1, step))
    return next((edge for edge in edges if accepts_images(module, channels, (edge, edge))), None)


def accepts_images(module: nn.Module, channels: int, size: tuple[int, int]) -> bool:
    """Return whether a module accepts images of a height and width."""
    return _accepts(module, Inputs((torch.zeros(2, channels, *size, device="cpu").to(_example_weight(module)),)))


def _example_weight(module: nn.Module) -> Tensor:
    """Return a tensor with the device and dtype of the module's first floating parameter."""
    floating = (weight for weight in module.parameters() if weight.is_floating_point())
    return next(floating, torch.empty(0, device="cpu")).detach()


def _accepts(module: nn.Module, inputs: Inputs) -> bool:
    try:
        Runs(module).measured(0, inputs, lambda: _outputs(module, inputs))
    except ConfigError:
        return False
    return True


def _embeddings(module: nn.Module) -> list[nn.Embedding]:
    return [part for part in module.modules() if isinstance(part, nn.Embedding)]


def _vocabulary(module: nn.Module, tables: Sequence[nn.Embedding]) -> int:
    """Return the number of tokens: as the configuration has it, else of the table as large as the output."""
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    heads = [part.out_features for part in module.modules() if isinstance(part, nn.Linear)]
    sizes = [table.num_embeddings for table in tables]
    return heads[-1] if heads and heads[-1] in sizes else max(sizes)


def noise_images(channels: int, count: int, generator: torch.Generator, size: tuple[int, int] = (EDGE, EDGE)) -> Tensor:
    """Return noise of variance 1 whose amplitude falls with frequency, as in photographs; colors correlate.

    Args:
        size: height and width.
    """
    spectrum = torch.fft.rfft2(torch.randn(count, channels, *size, generator=generator, device="cpu"))
    rows, columns = torch.fft.fftfreq(size[0], device="cpu"), torch.fft.rfftfreq(size[1], device="cpu")
    frequency = (rows[:, None] ** 2 + columns**2).sqrt().clamp_min(1 / max(size))
    noise = torch.fft.irfft2(spectrum / frequency, s=size)
    noise = noise / noise.std((2, 3), keepdim=True)
    mixed = torch.linalg.cholesky(_COLORS + (1 - _COLORS) * torch.eye(channels, device="cpu"))
    return torch.einsum("dc,nchw->ndhw", mixed, noise)


def noise_sounds(channels: int, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Return noise (sounds, channels, length) whose power falls with frequency; samples in ±1, loud and quiet parts.

    More channels than two are features, whose variance is 1.

    Args:
        length: in samples, or in frames of features.
    """
    spectrum = torch.fft.rfft(torch.randn(count, channels, length, generator=generator, device="cpu"))
    frequency = torch.fft.rfftfreq(length, device="cpu").clamp_min(1 / 256)
    noise: Tensor = torch.fft.irfft(spectrum / frequency.sqrt(), n=length)
    noise = noise / noise.std(2, keepdim=True)
    if channels > 2:
        return noise
    low, high = (math.log(loudness) for loudness in LOUDNESS)
    loudness = torch.exp(low + (high - low) * torch.rand(count, 1, STEADY, generator=generator, device="cpu"))
    return noise * loudness.repeat_interleave(length // STEADY, 2)


def norms_with_statistics(module: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the batch norms of images that have running statistics."""
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm2d) and part.track_running_stats]


def with_statistics(
    module: nn.Module, images: Tensor, call: Callable[[Tensor], Inputs] = lambda images: Inputs((images,))
) -> Tensor:
    """Return images changed until each batch norm sees its running mean and variance, or almost.

    Args:
        module: an image network; without such norms the images stay as they are.
        images: in a batch.
        call: images → arguments of the module.
    """
    norms = norms_with_statistics(module)
    if not norms:
        return images
    differences: list[Tensor] = []

    def compare(norm: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean = inputs[0].mean((0, 2, 3))
        # in a half to a tenth of the time of torch.var_mean, which does not vectorize over these dimensions
        variance = (inputs[0] - mean[:, None, None]).square().mean((0, 2, 3))
        variance = variance.clamp_min(_LEAST_VARIANCE)  # the root has no finite gradient at zero
        expected, spread = norm.running_mean, norm.running_var.clamp_min(norm.eps)
        share = ((mean - expected) ** 2 + (variance.sqrt() - spread.sqrt()) ** 2) / spread
        differences.append(share.mean())

    hooks = [norm.register_forward_hook(compare) for norm in norms]
    pixels = images.float().clone().requires_grad_(True)  # Adam in half precision would stand still
    runs = Runs(module)
    try:
        with measuring_mode(module), runs.session():
            optimizer = torch.optim.Adam([pixels], RATE)  # whose import adds a filter of warnings
            for _ in range(STEPS):
                differences.clear()
                with runs.run(0):
                    forward(module, call(pixels.to(images.dtype)))
                    difference = torch.stack(differences).mean()
                    if not difference.requires_grad:  # the module computes without gradients
                        return images
                    (pixels.grad,) = torch.autograd.grad(difference, [pixels])
                optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    return pixels.detach().to(images.dtype)


def _moderated(
    sensitivities: Mapping[str, Sensitivity], state: Mapping[str, Tensor], *, gradients: bool
) -> dict[str, Sensitivity]:
    """Return sensitivities by made-up inputs, closer to the assumed ones; without `gradients` rows weigh as assumed."""
    assumed = prior({name: with_rows(state[name], item) for name, item in sensitivities.items() if name in state})
    moderated = {
        name: _shrunk(item, assumed[name], gradients=gradients) if name in assumed else item
        for name, item in _finite(sensitivities, state).items()
    }
    ratios = {
        name: mean_cost(moderated[name]) / mean_cost(item)
        for name, item in assumed.items()
        if moderated[name].row_fisher is not None and mean_cost(item) > 0
    }
    usual = float(np.median([ratio for ratio in ratios.values() if ratio > 0] or [1.0]))
    least = usual * 4.0**-LEAST_BITS  # a bit is a quarter of the squared error
    for name, ratio in ratios.items():
        if ratio < least:  # made-up inputs hardly reach it; real ones may
            raised = scale_sensitivity(moderated[name], least / ratio) if ratio > 0 else None
            # inputs of 1e-20 have gradients that float32 cannot hold when raised
            moderated[name] = (
                scale_sensitivity(assumed[name], least) if raised is None or not _is_finite(raised) else raised
            )
    return moderated


def _finite(sensitivities: Mapping[str, Sensitivity], state: Mapping[str, Tensor]) -> dict[str, Sensitivity]:
    """Return sensitivities, the assumed ones for those that are not finite."""
    strange = {name: item for name, item in sensitivities.items() if not _is_finite(item)}
    if strange:
        message = "sensitivities of %d tensors are not finite, of %s first; they weigh what is assumed"
        logging.getLogger("birdie").info(message, len(strange), next(iter(strange)))
    known = {name: with_rows(state[name], item) for name, item in sensitivities.items() if name in state}
    assumed = prior(known) if strange else {}
    return {name: assumed.get(name, item) if name in strange else item for name, item in sensitivities.items()}


def _is_finite(sensitivity: Sensitivity) -> bool:
    measured = (sensitivity.hessian, sensitivity.row_fisher, sensitivity.output)
    return all(bool(torch.isfinite(values).all()) for values in measured if values is not None)


def _shrunk(measured: Sensitivity, assumed: Sensitivity, *, gradients: bool) -> Sensitivity:
    if measured.hessian is not None:
        size = len(measured.hessian)
        taps = assumed.taps
        dense = np.eye(size)
        if taps is not None and size % len(taps.taps) == 0:
            dense = replace(taps, power=None).dense(size)  # powers of columns are measured, not assumed
        covariance = torch.from_numpy(dense).to(measured.hessian)
        ratio = measured.hessian.diagonal().mean() / covariance.diagonal().mean()
        measured = replace(measured, hessian=torch.lerp(measured.hessian, covariance * ratio, SHRINKAGE))
    if gradients or measured.row_fisher is None or assumed.row_fisher is None:
        return measured
    measured = replace(measured, row_fisher=assumed.row_fisher.to(measured.row_fisher), output=None)
    known = mean_cost(measured)
    if known > 0 and _is_finite(raised := scale_sensitivity(measured, mean_cost(assumed) / known)):
        return raised
    return assumed  # made-up inputs arrive as zeros, or nearly


def _require_finite_buffers(module: nn.Module) -> None:
    for name, buffer in itertools.chain(module.named_buffers(), module.named_parameters()):
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise WeightsError(f"tensor {name!r} holds NaN, so nothing can be calibrated; repair the checkpoint")
