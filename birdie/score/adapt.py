"""Learning while scoring: SGD with momentum over the whole model, from targets whose losses are final.

    places ─► sequences of T ─► batch_seqs a step ─► ledger.learn ─► this rank's part ─► mean gradient of all ranks
                                                                                              └─► clip ─► momentum

What a step learns from is declared to the ledger before anything is computed, and the ledger refuses what was not
scored. `chunks` scores a stream and learns from it by turns; whoever scores in another order calls `learn` between two
rounds. The order of steps is fixed: places in the order they are given, in each epoch the same.

Weights are float32 masters, products run in the model's `compute_dtype` as in training and scoring. Gradients are sums
over all ranks before they are clipped, so ranks change results by rounding alone, and all ranks hold equal weights.

Sources: openai/parameter-golf #461 and #549; freezing by the names of parameters froze nothing in models whose blocks
were slices of banks, which is why the evidence counts what moved.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.score.ledger import Ledger, Places

_AT_ONCE = {"cpu": 4096}  # tokens of a forward and backward pass: beyond, a CPU gains nothing and needs memory
_AT_ONCE_ELSEWHERE = 32_768
_RATES = ("lr", "grad_clip")
_COUNTS = {"epochs": 1, "chunk_tokens": 1, "batch_seqs": 1, "freeze_blocks": 0}


@dataclass(frozen=True, slots=True)
class SGDSettings:
    """Whole-model SGD while scoring; the defaults are those of #549.

    Raises:
        ConfigError: a value is out of range.
    """

    lr: Annotated[float, Parameter(env_var="TTT_LR", help="Learning rate of the first chunk; falls as a cosine.")] = (
        0.002
    )
    epochs: Annotated[int, Parameter(env_var="TTT_EPOCHS", help="Passes over a chunk once it is scored.")] = 3
    chunk_tokens: Annotated[
        int, Parameter(env_var="TTT_CHUNK_TOKENS", help="Tokens that are scored before they are learned from.")
    ] = 32_768
    momentum: Annotated[
        float, Parameter(env_var="TTT_MOMENTUM", help="Share of the sum of gradients that a step keeps.")
    ] = 0.9
    batch_seqs: Annotated[int, Parameter(env_var="TTT_BATCH_SEQS", help="Sequences of a step over all ranks.")] = 32
    grad_clip: Annotated[
        float, Parameter(env_var="TTT_GRAD_CLIP", help="Largest norm of the whole gradient; 0: no limit.")
    ] = 1.0
    freeze_blocks: Annotated[
        int, Parameter(env_var="TTT_FREEZE_BLOCKS", help="First blocks that do not learn; embedding and head do.")
    ] = 0

    def __post_init__(self) -> None:
        for name in _RATES:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"adaptation {name} is {getattr(self, name)}; it must be a number of at least 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"adaptation momentum is {self.momentum}; it must be in [0, 1)")
        for name, least in _COUNTS.items():
            if getattr(self, name) < least:
                raise ConfigError(f"adaptation {name} is {getattr(self, name)}; it must be at least {least}")


def cosine(number: int, count: int) -> float:
    """The factor on the learning rate for chunk `number` of `count`: 1 for the first, 0 for the last of several."""
    return (1 + math.cos(math.pi * number / (count - 1))) / 2 if count > 1 else 1.0


class Learner:
    """Momentum SGD of one model during one scoring.

    Args:
        model: in evaluation mode, and again so after each call; all ranks hold the same weights.
        settings: of the steps.
        world: ranks that share every step.

    Attributes:
        steps: taken.
        tokens: learned from, each as often as it was.
        device: of the model.

    Raises:
        ConfigError: there are fewer blocks than are to be frozen, or weights are not float32.
    """

    def __init__(self, model: GPT, settings: SGDSettings, world: World | None = None) -> None:
        self.model, self.settings, self.world = model, settings, world or World()
        self.steps = self.tokens = 0
        frozen = frozen_names(model, settings.freeze_blocks)
        self._named = dict(model.named_parameters())
        for name, p in self._named.items():
            if p.dtype != torch.float32:
                raise ConfigError(f"{name} is {p.dtype}, in which small steps are lost; adapt a model in float32")
        self._learning = {name: p for name, p in self._named.items() if name not in frozen}
        self._before = {name: p.detach().clone() for name, p in self._named.items()}
        self._momenta: dict[str, Tensor] = {}
        self.device = next(iter(self._named.values())).device

    def learn(
        self, tokens: NDArray[np.uint16], ranges: Sequence[Places], ledger: Ledger, *, length: int, factor: float = 1.0
    ) -> None:
        """`epochs` passes over the places of `ranges`, one range after the other as one text. Every rank must call it.

        Args:
            tokens: (N + 1,) of the stream; place i has input i and target i + 1.
            ranges: places, all of them scored; where one ends and another begins a sequence goes on, as in training.
            ledger: of the N places; has been told what other ranks scored.
            length: places of a sequence; what is left over at the end is a shorter one.
            factor: on the learning rate.

        Raises:
            RuleError: a place was not scored yet.
            ConfigError: the gradient is not finite.
        """
        places = np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges]) if ranges else np.empty(0, int)
        size = self.settings.batch_seqs * length
        with self._training(), self.model.rotary.base_for_length(length):
            for _ in range(self.settings.epochs):
                for begin in range(0, len(places), size):
                    batch = places[begin : begin + size]
                    ledger.learn(*runs(batch))
                    self._step(tokens, batch, length, self.settings.lr * factor)

    def evidence(self) -> str:
        """What moved and what stayed, as a line for the log."""
        moved = stayed = 0
        square = norm = 0.0
        for name, p in self._named.items():
            changed = int((p.detach() != self._before[name]).sum())
            moved, stayed = moved + changed, stayed + p.numel() - changed
            square += float(torch.linalg.vector_norm(p.detach() - self._before[name])) ** 2
            norm += float(torch.linalg.vector_norm(self._before[name])) ** 2
        frozen = sum(p.numel() for name, p in self._named.items() if name not in self._learning)
        share = math.sqrt(square / norm) if norm else 0.0
        held = f" ({frozen:,} of them frozen in the first {self.settings.freeze_blocks} blocks)" if frozen else ""
        return (
            f"adapted by SGD: {self.steps:,} steps, {self.tokens:,} tokens learned from after they were scored; "
            f"{moved:,} weights moved, by {share:.3%} of the norm, and {stayed:,} stayed{held}"
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the weights it had when the learner was made."""
        for name, p in self._named.items():
            p.copy_(self._before[name])

    def state(self) -> dict[str, Tensor]:
        """Weights and momenta, as "weight/NAME" and "momentum/NAME"; copies."""
        found = {f"weight/{name}": p.detach().clone() for name, p in self._named.items()}
        found.update({f"momentum/{name}": momentum.clone() for name, momentum in self._momenta.items()})
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave for the same model and settings."""
        for name, p in self._named.items():
            p.copy_(state[f"weight/{name}"])
        held = {name: state.get(f"momentum/{name}") for name in self._learning}
        self._momenta = {name: each.to(self.device, copy=True) for name, each in held.items() if each is not None}

    def _step(self, tokens: NDArray[np.uint16], places: NDArray[np.int64], length: int, lr: float) -> None:
        """One step on the mean loss of `places`."""
        self._drop_gradients()
        for part in self._own_parts(places, length):
            ids, targets = (
                torch.from_numpy(np.asarray(tokens)[part + ahead].astype(np.int64)).to(self.device) for ahead in (0, 1)
            )
            loss = self.model.loss(ids, targets) * (part.size / len(places))
            torch.autograd.backward(loss)
        self._reduce()
        if self.settings.grad_clip:
            norm = float(nn.utils.clip_grad_norm_(self._learning.values(), self.settings.grad_clip))
            if not math.isfinite(norm):
                raise ConfigError(
                    f"the gradient of adaptation step {self.steps + 1} has norm {norm}; lower its learning rate"
                )
        self._update(lr)
        self.steps += 1
        self.tokens += len(places)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """v ← momentum · v + g;  w ← w − lr · v, as `torch.optim.SGD` has it."""
        given = {name: p for name, p in self._learning.items() if p.grad is not None}
        for name in given.keys() - self._momenta.keys():
            self._momenta[name] = torch.zeros_like(given[name])
        momenta = [self._momenta[name] for name in given]
        torch._foreach_mul_(momenta, self.settings.momentum)
        torch._foreach_add_(momenta, [p.grad for p in given.values() if p.grad is not None])
        torch._foreach_add_(list(given.values()), momenta, alpha=-lr)

    def _drop_gradients(self) -> None:
        for p in self._named.values():
            p.grad = None

    def _own_parts(self, places: NDArray[np.int64], length: int) -> Iterator[NDArray[np.int64]]:
        """This rank's sequences, (sequences, length) at a time, and the shorter one if it is this rank's."""
        count = -(-len(places) // length)
        rank, size = self.world.rank, self.world.size
        own = places[count * rank // size * length : count * (rank + 1) // size * length]
        whole = own[: len(own) // length * length].reshape(-1, length)
        most = max(1, _AT_ONCE.get(self.device.type, _AT_ONCE_ELSEWHERE) // length)
        for begin in range(0, len(whole), most):
            yield whole[begin : begin + most]
        if whole.size < len(own):
            yield own[None, whole.size :]

    def _reduce(self) -> None:
        """Sum the gradients over all ranks, in one message."""
        if self.world.size == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._learning.values()]
        packed = self.world.sum_(torch.cat([each.reshape(-1) for each in gradients]))
        for p, part in zip(
            self._learning.values(), torch.split(packed, [each.numel() for each in gradients]), strict=True
        ):
            p.grad = part.view_as(p)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Inside, the model trains as in training, its frozen weights have no gradients; after it all is as before."""
        model, backend = self.model, self.model.loss_backend
        wanted = {name: p.requires_grad for name, p in self._named.items()}
        was_training = model.training
        for name, p in self._named.items():
            p.requires_grad_(name in self._learning)
        model.train()
        model.fuse_loss()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._drop_gradients()
            model.loss_backend = backend
            model.train(was_training)
            for name, p in self._named.items():
                p.requires_grad_(wanted[name])


def learn(
    model: GPT,
    tokens: NDArray[np.uint16],
    ranges: Sequence[Places],
    settings: SGDSettings,
    ledger: Ledger,
    *,
    length: int,
    world: World | None = None,
) -> Learner:
    """One round of learning from all places of `ranges`, in chunks, the learning rate falling as a cosine.

    A round begins without momentum. The last of several chunks has rate 0 and is left out. Every rank must call it.

    Args:
        model: in evaluation mode; all ranks hold the same weights.
        tokens, ranges, ledger, length: as `Learner.learn` has them.
        settings: of the steps.
        world: ranks that share every step.

    Returns:
        The learner, which says what it did and can put the weights back.

    Raises:
        RuleError: a place was not scored yet; what comes before its step is learned.
        ConfigError: the settings do not fit the model, or the gradient is not finite.
    """
    learner = Learner(model, settings, world)
    chunks = list(cut(ranges, settings.chunk_tokens))
    for number, chunk in enumerate(chunks):
        factor = cosine(number, len(chunks))
        if number == 0 or number + 1 < len(chunks):
            learner.learn(tokens, chunk, ledger, length=length, factor=factor)
    return learner


def frozen_names(model: nn.Module, blocks: int) -> set[str]:
    """Names of the parameters of the first `blocks` blocks.

    Raises:
        ConfigError: the model has not so many, or their parameters are not named as blocks' are.
    """
    frozen: set[str] = set()
    for block in range(blocks):
        own = {name for name, _ in model.named_parameters() if name.startswith(f"blocks.{block}.")}
        if not own:
            raise ConfigError(
                f"freeze_blocks is {blocks}, but the model has no parameter of block {block}; freeze fewer blocks"
            )
        frozen |= own
    return frozen


def cut(ranges: Sequence[Places], tokens: int) -> Iterator[list[Places]]:
    """`ranges` in chunks of so many places; the last may have fewer."""
    chunk: list[Places] = []
    room = tokens
    for first, stop in ranges:
        while first < stop:
            end = min(stop, first + room)
            chunk.append((first, end))
            room -= end - first
            first = end
            if not room:
                yield chunk
                chunk, room = [], tokens
    if chunk:
        yield chunk


def runs(places: NDArray[np.int64]) -> list[Places]:
    """Places as ranges of neighbours, in their order."""
    if not len(places):
        return []
    edges = np.flatnonzero(np.diff(places) != 1) + 1
    firsts, lasts = places[np.append(0, edges)], places[np.append(edges - 1, len(places) - 1)]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]
