"""Refit: tune the tensors that are not quantized, or not yet, to minimize the KL of the decoded model.

    batch ──► float module ───► logits ─┐
       │                                ├─► KL(float ‖ decoded) ──► Adam on all that is still in float
       └────► decoded module ─► logits ─┘

Quantization shifts means and variances of activations; norms, gains and biases can compensate much of that without any
additional byte, and matrices that are quantized later even more (`birdie.compress.rate.parts`). Logits are recorded
where the loss passes them to `F.cross_entropy`; labels are not used. For losses that compare no probabilities the
difference is that of `birdie.compress.calibration.kl`. The KL on held-out batches is measured with the values that the
file will hold: rounded, then decoded.

Source: distillation to the float model after quantization as in ZeroQuant (Yao et al. 2022, arXiv 2206.01861).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.kl import difference, predictions
from birdie.compress.calibration.modes import fresh_casts, in_mode, set_differentiable_evaluation
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.registry import decode
from birdie.compress.schemes.cast import Cast
from birdie.compress.small_tensors import small_scheme
from birdie.errors import ConfigError, DataError

HELD_BACK = 0.2  # share of the batches that the KL is measured on
MEASUREMENTS = 8  # of the KL during the tuning
_LEAST = 1e-3  # smallest root mean square by which a tensor's learning rate is scaled: biases may start at zero


def as_stored(name: str, weight: Tensor) -> Tensor:
    """Return `weight` as a file stores it by `small_scheme`: rounded to 16 bits if these suffice."""
    return decode(small_scheme(weight).encode(name, weight))


def refit(
    module: nn.Module,
    decoded_state: Mapping[str, Tensor],
    names: Iterable[str],
    batches: Iterable[Batch],
    loss: Loss,
    *,
    steps: int = 100,
    lr: float = 0.003,
    measurements: int = MEASUREMENTS,
) -> dict[str, Tensor]:
    """Return the tensors `names` of the decoded state, tuned; unchanged if tuning does not lower the held-out KL.

    Args:
        module: the float model. Neither it nor any other argument is changed.
        decoded_state: state that the file decodes to, with every tensor of the module's state.
        names: of float tensors that are not quantized; those without a gradient (running means) stay as they are.
        batches: arguments of `loss`, two at least; a fifth of them, drawn at random, is held out.
        loss: (module, batch) → anything, computed with a function that `birdie.compress.calibration.kl` knows, or a
            single number.
        steps: number of Adam steps, one batch each, with a cosine schedule to zero; 0 only rounds.
        lr: initial learning rate, in root mean squares of each tensor.
        measurements: how often the held-out KL is measured.

    Returns:
        name → tensor of the same shape and dtype, on the CPU, rounded by `as_stored` if it was tuned.

    Raises:
        ConfigError: a name is unknown or not a float tensor, the loss has nothing to compare, or settings are out of
            range.
        DataError: there are fewer than two batches, or logits are not finite.
    """
    wanted = sorted(set(names))
    _check(module, decoded_state, wanted, steps, lr)
    tuned, held = _split(list(batches))
    divergence = HeldOut(module, held, loss)
    student = divergence.candidate.requires_grad_(False)
    set_differentiable_evaluation(student)
    lowest = divergence(decoded_state)
    parameters = dict(student.named_parameters(remove_duplicate=False))
    free = {name: parameters[name] for name in wanted if name in parameters}
    best = {name: decoded_state[name].detach().cpu().clone() for name in wanted}
    if not math.isfinite(lowest):
        raise DataError("the KL of the decoded model is not finite before refit; check the weights and the batches")
    for _ in _tuning(module, student, list(free.values()), tuned, loss, steps, lr, measurements):
        exact = {name: weight.detach().clone() for name, weight in free.items()}
        candidate = {
            name: as_stored(name, _flush_subnormals(weight.detach(), best[name])).to(best[name].dtype)
            for name, weight in free.items()
        }
        mean = divergence(candidate)
        with torch.no_grad():
            for name, weight in exact.items():
                free[name].copy_(weight)
        if mean < lowest:
            best, lowest = best | {name: weight.cpu() for name, weight in candidate.items()}, mean
    return best


def _check(module: nn.Module, state: Mapping[str, Tensor], names: Sequence[str], steps: int, lr: float) -> None:
    if steps < 0 or not 0 < lr < math.inf:
        raise ConfigError(f"refit steps={steps}, lr={lr} are out of range; give 0 or more steps and a rate above 0")
    if different := sorted(module.state_dict().keys() ^ state.keys()):
        raise ConfigError(
            f"module and decoded state differ in tensor {different[0]!r}; decode the file of this very module"
        )
    for name in names:
        if name not in state:
            raise ConfigError(f"refit knows no tensor {name!r}; name tensors of the decoded state")
        if not state[name].is_floating_point():
            raise ConfigError(f"refit cannot tune {name!r} of {state[name].dtype}; name float tensors")


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return (batches to tune on, held-out batches), drawn at random."""
    if len(batches) < 2:
        raise DataError(f"refit needs two batches, one to tune on and one to hold out, not {len(batches)}; give more")
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    held = max(1, round(HELD_BACK * len(batches)))
    return [batches[i] for i in order[held:]], [batches[i] for i in order[:held]]


def _tuning(
    module: nn.Module,
    student: nn.Module,
    free: Sequence[Tensor],
    batches: Sequence[Batch],
    loss: Loss,
    steps: int,
    lr: float,
    measurements: int,
) -> Iterator[None]:
    """Tune `free`, tensors of the student, by Adam; yield whenever to measure the KL."""
    distinct = list({id(weight): weight for weight in free}.values())
    if not distinct or not steps:
        return
    groups = [{"params": [weight.requires_grad_(True)], "lr": lr * _scale(weight)} for weight in distinct]
    rates = [float(group["lr"]) for group in groups]  # type: ignore[arg-type]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []
    for done in range(1, steps + 1):
        order = order or torch.randperm(len(batches), generator=generator, device="cpu").tolist()
        batch = batches[order.pop()]
        with torch.no_grad(), in_mode(module.modules(), training=False):
            expected = predictions(module, batch, loss)
        with torch.enable_grad(), fresh_casts():
            mean = difference(expected, predictions(student, batch, loss)).mean()
            if mean is None:
                continue  # all targets of this batch are ignored
            if not mean.requires_grad:
                return  # the loss does not depend on any of these tensors
            gradients = torch.autograd.grad(mean, distinct, allow_unused=True)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            return  # the tuning diverged; the best tensors so far remain
        for weight, gradient in zip(distinct, gradients, strict=True):
            weight.grad = gradient
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * (done - 1) / steps))
        adam.step()
        if done * measurements // steps > (done - 1) * measurements // steps:
            yield


def _flush_subnormals(weight: Tensor, original: Tensor) -> Tensor:
    """Return `weight` with zeros below the range of float16, if `original` fit in it.

    A bias that passes through zero would otherwise be stored losslessly in 32 bits.
    """
    if small_scheme(original) != Cast() or original.dtype not in (torch.float32, torch.float64):
        return weight
    return torch.where(weight.to(torch.float16).abs() < torch.finfo(torch.float16).tiny, 0, weight)


def _scale(weight: Tensor) -> float:
    """Return the root mean square of a tensor, the unit of its learning rate."""
    return max(_LEAST, float(weight.detach().double().square().mean().sqrt()))
