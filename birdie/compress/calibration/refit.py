"""Refit after quantization: tune the few float tensors left, so that the decoded model predicts as the float one does.

    batch ──► float module ───► logits ─┐
       │                                ├─► KL(float ‖ decoded) ──► Adam on norms, gains, scales, biases
       └────► decoded module ─► logits ─┘

Quantization moves means and variances of activations; norms, gains and biases can take much of that back and cost no
byte more. Logits are seen where the loss hands them to `F.cross_entropy`, labels are not looked at. What is judged, on
batches held back, is the value that the file will hold: rounded, then decoded.

Source: distillation to the float model after quantization as in ZeroQuant (Yao et al. 2022, arXiv 2206.01861), here of
the tensors that are not quantized alone, as LoftQ-like corrections would cost bytes.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from birdie.compress.calibration.kl import HeldOutKL, predictions, summed_kl
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.registry import decode
from birdie.compress.schemes.cast import Cast
from birdie.compress.small_tensors import small_scheme
from birdie.errors import ConfigError, DataError

HELD_BACK = 0.2  # of the batches
_JUDGED = 8  # times along the way
_LEAST = 1e-3  # root mean square that a tensor's rate is measured in at least: biases may start at zero


def as_stored(name: str, weight: Tensor) -> Tensor:
    """`weight` as a file returns it where it is kept by `small_scheme`: rounded to 16 bits if these suffice."""
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
    seed: int = 0,
    stored: Callable[[str, Tensor], Tensor] = as_stored,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Tensor]:
    """The tensors `names` of the decoded state, tuned; as given unless others are better on batches held back.

    Args:
        module: the float model. Neither it nor any other argument is changed.
        decoded_state: what the file decodes to, with every tensor of the module's state.
        names: of float tensors that are not quantized; those without a gradient (running means) stay as they are.
        batches: what `loss` takes, two at least; a fifth of them, drawn by `seed`, is held back.
        loss: (module, batch) → anything, by way of `F.cross_entropy`.
        steps: of Adam, one batch each, with a cosine to zero; 0 only rounds.
        lr: first rate, in root mean squares of each tensor.
        stored: (name, tensor) → the tensor as the file will hold it.
        progress: called with (steps done, mean KL on the held-back batches in nats) now and then, first with 0.

    Returns:
        name → tensor of the same shape and dtype, on the CPU; a candidate is always one that `stored` has rounded.

    Raises:
        ConfigError: a name is unknown or not a float tensor, the loss uses no `F.cross_entropy`, or settings are out of
            range.
        DataError: there are fewer than two batches, or logits are not finite.
    """
    wanted = sorted(set(names))
    _check(module, decoded_state, wanted, steps, lr)
    tuned, judged = _split(list(batches), seed)
    teacher, student = _frozen(module), _frozen(module)
    student.load_state_dict(dict(decoded_state), strict=True)
    own = dict(student.named_parameters(remove_duplicate=False))
    free = {name: own[name] for name in wanted if name in own}
    best = {name: decoded_state[name].detach().cpu().clone() for name in wanted}
    held_out = HeldOutKL(teacher, judged, loss)
    lowest = held_out(decoded_state)
    if not math.isfinite(lowest):
        raise DataError("refit met a KL that is not finite; check the weights and the batches")
    if progress is not None:
        progress(0, lowest)
    for done in _tuning(teacher, student, list(free.values()), tuned, loss, steps, lr, seed):
        candidate = {
            name: stored(name, _no_wider(weight.detach(), best[name])).to(best[name].dtype)
            for name, weight in free.items()
        }
        mean = held_out(candidate)
        if progress is not None:
            progress(done, mean)
        if mean < lowest:
            best, lowest = best | {name: weight.cpu() for name, weight in candidate.items()}, mean
    return best


def _check(module: nn.Module, state: Mapping[str, Tensor], names: Sequence[str], steps: int, lr: float) -> None:
    if steps < 0 or not 0 < lr < math.inf:
        raise ConfigError(f"refit with {steps} steps at a rate of {lr} is out of range; give 0 or more, and above 0")
    if odd := sorted(module.state_dict().keys() ^ state.keys()):
        raise ConfigError(f"module and decoded state differ in tensor {odd[0]!r}; decode the file of this very module")
    for name in names:
        if name not in state:
            raise ConfigError(f"refit knows no tensor {name!r}; name tensors of the decoded state")
        if not state[name].is_floating_point():
            raise ConfigError(f"refit cannot tune {name!r} of {state[name].dtype}; name float tensors")


def _split(batches: Sequence[Batch], seed: int) -> tuple[list[Batch], list[Batch]]:
    """(to tune on, to held_out by), drawn at random."""
    if len(batches) < 2:
        raise DataError(f"refit needs two batches, one to tune on and one to held_out by, and got {len(batches)}")
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(HELD_BACK * len(batches)))
    return [batches[i] for i in order[held:]], [batches[i] for i in order[:held]]


def _frozen(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without gradients."""
    return copy.deepcopy(module).eval().requires_grad_(False)


def _tuning(
    teacher: nn.Module,
    student: nn.Module,
    free: Sequence[Tensor],
    batches: Sequence[Batch],
    loss: Loss,
    steps: int,
    lr: float,
    seed: int,
) -> Iterator[int]:
    """Take Adam's steps on `free`, tensors of the student; yields how many are done where it is worth judging."""
    distinct = list({id(weight): weight for weight in free}.values())
    if not distinct or not steps:
        return
    groups = [{"params": [weight.requires_grad_(True)], "lr": lr * _scale(weight)} for weight in distinct]
    rates = [float(group["lr"]) for group in groups]  # type: ignore[arg-type]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for done in range(1, steps + 1):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        batch = batches[order.pop()]
        with torch.no_grad():
            wanted = predictions(teacher, batch, loss)
        with torch.enable_grad():
            nats, count = summed_kl(wanted, predictions(student, batch, loss))
            if not nats.requires_grad:
                return  # none of them matters to the loss
            gradients = torch.autograd.grad(nats / max(count, 1), distinct, allow_unused=True)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            return  # gone astray; what was judged so far stands
        for weight, gradient in zip(distinct, gradients, strict=True):
            weight.grad = gradient
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * (done - 1) / steps))
        adam.step()
        if done * _JUDGED // steps > (done - 1) * _JUDGED // steps:
            yield done


def _no_wider(weight: Tensor, before: Tensor) -> Tensor:
    """`weight` with zeros where 16 bits do not reach, if they sufficed `before`: a bias may pass through zero."""
    if small_scheme(before) != Cast() or before.dtype not in (torch.float32, torch.float64):
        return weight
    return torch.where(weight.to(torch.float16).abs() < torch.finfo(torch.float16).tiny, 0, weight)


def _scale(weight: Tensor) -> float:
    """What a rate is measured in: the root mean square."""
    return max(_LEAST, float(weight.detach().double().square().mean().sqrt()))
