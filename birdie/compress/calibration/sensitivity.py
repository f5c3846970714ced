"""Sensitivity of the loss to every matrix: input Hessians and output-gradient covariances, from a few batches.

    module, batches, loss ──► forward, recorded ──► x of each use ─┐
                                  │                                ├──► Sensitivity of each weight
                              curvature of the loss ──► g of each ─┘

The Fisher information of a matrix W, with y = W x and g the gradient of the loss at y, is approximated by the Kronecker
product of G = Σ g gᵀ and H = mean x xᵀ (K-FAC: Martens & Grosse 2015, arXiv 1503.05671; convolutions after Grosse &
Martens 2016, arXiv 1602.01407), so that a small change E of W costs about ½ tr(G E H Eᵀ) nats of KL.

Weights are identified by their memory (storage, offset, shape, strides) at `F.linear`, products of two matrices,
convolutions and `F.embedding`: banks of several matrices, tied heads and functional calls are covered. Where a weight
is stored (inputs, outputs), as in `x @ W`, in GPT-2 and in transposed convolutions, x and g change roles. Of weights
that are used in any other way, or in both of these, their gradients are taken
(`birdie.compress.calibration.other_uses`). At `F.cross_entropy` labels are not used. A random vector is propagated back
whose covariance is the curvature of the KL at these logits (each class with the root of its probability and a random
sign). This is the true Fisher information, not the empirical one, which vanishes for labels that a network has
memorized. Other losses are differentiated as they are.

Inputs of convolutions are unfolded in slices. A Hessian of more than `MAX_COLUMNS` columns is kept in blocks on its
diagonal, of neighboring channels, so that memory and time are bounded.
"""

import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from birdie.compress.calibration.checks import checked_loss, finite, naming_bad_weights, require_finite
from birdie.compress.calibration.model_runs import Runs
from birdie.compress.calibration.modes import differentiable_batch, evaluation_mode, measuring_mode
from birdie.compress.calibration.other_uses import earliest, node_of, reached_weights
from birdie.compress.calibration.sums import Sums, over_ranks, sensitivity_of
from birdie.compress.calibration.tensor_pieces import Fused, Portion, Portions, Use, portions
from birdie.compress.calibration.transformed import is_transformed
from birdie.compress.row_blocks import used_as_matrix
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import LEAST_SIDE, is_gate
from birdie.errors import ConfigError, DataError
from birdie.system.distributed import World, owners

if TYPE_CHECKING:
    from birdie.compress.calibration.offload import Offload

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Calibration = tuple[nn.Module, Iterable[Batch], Loss]
Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Most columns of a Hessian; beyond, blocks of neighboring channels: memory grows with the square of a block's columns,
# time with the third power.
MAX_COLUMNS = 3072
MAX_OUTPUTS = 4096  # most rows of a matrix whose full output covariance is kept; beyond, its diagonal
_CONVOLUTIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_TRANSPOSED: dict[Callable[..., Tensor], int] = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}
# A convolution's n images of m positions each count as n · m^_SPREAD independent inputs: neighboring patches overlap.
_SPREAD = 2 / 3
_SLICE = 1 << 22  # elements of unfolded inputs at a time
# Signs of the targets of a batch are drawn so many times, for gradients of weights: each draw is one more sample, and
# one more backward pass, which few weights are not worth.
_DRAWS, _WORTH_DRAWS = 8, 1 / 16
_PRODUCTS = {
    torch.matmul: 1,
    Tensor.matmul: 1,
    torch.mm: 1,
    Tensor.mm: 1,
    torch.addmm: 2,
    Tensor.addmm: 2,
}  # of weights
_CASTS = (Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.double, Tensor.type)


def measure(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    gradients: bool = True,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Sensitivity]:
    """Return the sensitivity of every matrix that the loss used, by name.

    Args:
        module: neither trained nor changed; its `named_matrices()`, if it has any, name views of banks, and its
            `portions()` the parameters that are several tensors of its state dict, or a part of one.
        batches: arguments of `loss`, one at a time; tens of thousands of tokens, or thousands of images.
        loss: (module, batch) → summed nats by `F.cross_entropy` (any reduction), or any differentiable scalar, whose
            gradients are squared as they are.
        gradients: False for forward passes only: input Hessians, and how often rows are looked up.
        progress: called with the number of batches done.
    """
    recorder = measure_batches(module, batches, loss, gradients=gradients, progress=progress)
    recorder.share(World())
    sensitivities = dict(recorder.finish())
    require_examples(sensitivities)
    return sensitivities


def measure_batches(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    gradients: bool = True,
    offload: "Offload | None" = None,
    progress: Callable[[int], None] | None = None,
) -> "Recorder":
    """Return a recorder with the sums of all batches; arguments as of `measure`.

    Args:
        offload: files for what would be in memory otherwise.
    """
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    runs = Runs(module, loss)
    with evaluation_mode(module) if gradients else measuring_mode(module), runs.session():
        recorder = Recorder(
            names_by_memory(module),
            torch.Generator().manual_seed(0),
            device,
            gradients,
            portions(module),
            offload,
        )
        for done, batch in enumerate(batches, start=1):
            batch = differentiable_batch(batch)
            with naming_bad_weights(module), runs.run(done - 1, batch):
                with nullcontext() if offload is None else offload.saving(), recorder:
                    nats = loss(module, batch)
                if gradients:
                    recorder.differentiate(checked_loss(nats))
            del nats  # its graph
            recorder.forget()
            if progress is not None:
                progress(done)
    return recorder


def names_by_memory(module: nn.Module) -> dict[Key, str]:
    """Return memory → name of every weight of two or more dimensions; of tied names the first in the alphabet."""
    named = {name: weight for name, weight in module.state_dict(keep_vars=True).items() if isinstance(weight, Tensor)}
    views = getattr(module, "named_matrices", None)
    if callable(views):
        named |= dict(views())
    matrices: dict[Key, str] = {}
    for name in sorted(named, reverse=True):
        if named[name].ndim >= 2 and (key := _key(named[name])) is not None:
            matrices[key] = name
    for one in portions(module):
        for number, piece in enumerate(one.pieces if isinstance(one, Fused) else (), start=1):
            weight = named[piece.name]
            if weight.ndim >= 2 and not weight.is_contiguous():  # a key has no strides: another matrix may have it
                if (key := _key(weight)) is None:
                    continue
                memory, _, shape, strides = key
                if matrices.get(key) == piece.name:
                    del matrices[key]
                matrices[memory, -number, shape, strides] = piece.name
    if not matrices:
        raise ConfigError("the module to calibrate has no matrices; give the model itself, with its weights")
    return matrices


def _key(weight: Tensor) -> Key | None:
    """Return the memory of a tensor; None if it has none of its own: within vmap, sparse, or a wrapper of others."""
    try:
        strides = tuple(0 if size == 1 else step for size, step in zip(weight.shape, weight.stride(), strict=True))
        return weight.untyped_storage().data_ptr(), int(weight.storage_offset()), tuple(weight.shape), strides
    except (RuntimeError, NotImplementedError):
        return None


class Recorder(TorchFunctionMode):
    """Records every product with a known weight, and replaces cross-entropies by their curvature."""

    def __init__(
        self,
        names: Mapping[Key, str],
        generator: torch.Generator,
        device: torch.device,
        gradients: bool,
        listed: Sequence[Portion] = (),
        offload: "Offload | None" = None,
    ) -> None:
        super().__init__()
        self.names, self.generator, self.device = names, generator, device
        self._device_generator: torch.Generator | None = None
        self.gradients = gradients
        self.offload = offload
        self.portions = Portions(listed)
        self.weights = sum(math.prod(shape) for _, _, shape, _ in names)
        self.casts: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.turned: dict[str, bool] = {}  # name → whether its rows are inputs, by its first product
        self.sums: MutableMapping[str, Sums] = {} if offload is None else offload.sums
        self.roots: list[GradientEdge] = []
        self.products: dict[Node, Node | None] = {}
        self.others: dict[str, Tensor] = {}
        self.by_gradient: set[str] = set()  # names of `others`, or of the tensors that they have portions of
        self.losses: list[Tensor] = []  # of every target
        self._again: torch.Generator | None = None
        self.is_collecting = False  # whether gradients are those of the loss: a loss may take others on its way
        self.redrawn = False  # whether gradients are those of signs that are drawn again, for `others` alone
        self.targets = 0
        self.batches = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and self.gradients and not is_transformed(args, kwargs):
            return self._curvature(args, kwargs)
        out = func(*args, **kwargs)
        if func in _CASTS and args and (name := self.name_of(args[0])) is not None and isinstance(out, Tensor):
            self.casts[id(out)] = (weakref.ref(out), name)
        elif func is F.linear:
            self._linear(argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight"), out)
        elif func is F.embedding:
            self._look_up(argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight"), out)
        elif func in _CONVOLUTIONS:
            self._convolution(_CONVOLUTIONS[func], args, kwargs, out)
        elif func in _TRANSPOSED:
            self._transposed_convolution(_TRANSPOSED[func], args, kwargs, out)
        elif (position := _PRODUCTS.get(func)) is not None:
            self._matrix_product(position, args, kwargs, out)
        return out

    def _signs(self, p: Tensor) -> Tensor:
        """Return random signs like `p`, drawn on its device: on a GPU the host would take longer than the passes.

        Signs that are drawn again come from a generator of their own: those of recorded products stay as they are.
        """
        if self.redrawn:
            if self._again is None or self._again.device != p.device:
                self._again = torch.Generator(p.device).manual_seed(self.generator.initial_seed() + 1)
            return torch.randint(0, 2, p.shape, generator=self._again, device=p.device).to(p) * 2 - 1
        if p.device.type == "cpu":
            return torch.randint(0, 2, p.shape, generator=self.generator, device="cpu").to(p) * 2 - 1
        if self._device_generator is None:
            self._device_generator = torch.Generator(p.device).manual_seed(self.generator.initial_seed())
        signs = torch.randint(0, 2, p.shape, generator=self._device_generator, device=p.device, dtype=torch.int8)
        return signs.to(p) * 2 - 1

    def name_of(self, weight: Any) -> str | None:
        """Return the name of the matrix that a tensor is, or is a cast of."""
        if not isinstance(weight, Tensor) or weight.ndim < 2 or weight.is_complex():
            return None  # of complex weights nothing is measured
        cast = self.casts.get(id(weight))
        if cast is not None and cast[0]() is weight:
            return cast[1]
        key = _key(weight)
        return None if key is None else self.names.get(key)

    def _name_of_matrix(self, weight: Tensor) -> str | None:
        """Return the name of a weight; None of one with few rows or columns, which mixes or gates streams."""
        return None if weight.ndim < 2 or is_gate(weight) else self.name_of(weight) or self.portions.name(weight)

    def _name_if_turned(self, weight: Any) -> str | None:
        """Return the name of the matrix whose transpose a tensor is."""
        if not isinstance(weight, Tensor) or weight.ndim != 2 or (key := _key(weight)) is None:
            return None
        memory, offset, shape, strides = key
        return self.names.get((memory, offset, shape[::-1], strides[::-1]))

    def _is_first_way(self, name: str, *, turned: bool) -> bool:
        """Return whether a weight is used as before: a second way has other inputs, so that both are left to gradients.

        Args:
            turned: whether its rows are inputs.
        """
        return self.turned.setdefault(name, turned) == turned

    def _linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Record x Wᵀ of a weight (outputs, inputs), or of the transpose of a stored one."""
        if (name := self._name_if_turned(weight)) is not None:
            self._turned_product(name, x, out)
            return
        name = self.name_of(weight)
        self._product(x, out, [None] if name is not None else [*self.portions.uses(weight)], name)

    def _matrix_product(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Record x W of a weight (inputs, outputs), or of the transpose of a stored one."""
        x = argument(args, kwargs, position - 1, ("input", "mat1")[position - 1])
        weight = argument(args, kwargs, position, "mat2", kwargs.get("other"))
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            return
        if (name := self.name_of(weight)) is not None:
            self._turned_product(name, x, out)
        elif (name := self._name_if_turned(weight)) is not None:
            self._product(x, out, [None], name)

    def _product(self, x: Tensor, out: Tensor, uses: "list[Use | None]", name: str | None) -> None:
        """Record the product of a weight, or of its pieces that are named by their uses, as x Wᵀ."""
        if not uses or not self._is_recorded(out) or (name is not None and not self._is_first_way(name, turned=False)):
            return
        held, columns = self._hold(x.detach()), x.shape[-1]

        def add(g: Tensor | None) -> None:
            inputs = held().reshape(-1, columns).float()
            outputs = None if g is None else g.reshape(-1, g.shape[-1])
            for use in uses:
                if use is None:
                    self._add(str(name), [inputs], columns, len(inputs), outputs)
                    continue
                g = None if outputs is None else use.of(outputs.T).T
                self._add(use.name, [inputs], columns, len(inputs), g, share=use.share)

        self._on_gradient(x, out, add)

    def _turned_product(self, name: str, x: Tensor, out: Tensor) -> None:
        """Record x W with W (inputs, outputs): its rows are the inputs, so inputs and gradients change roles."""
        if not self._is_recorded(out) or not self._is_first_way(name, turned=True):
            return
        held = self._hold(x.detach())

        def add(g: Tensor | None) -> None:
            if g is not None:
                g = g.reshape(-1, g.shape[-1]).float()
                self._add(name, [g], g.shape[1], len(g), held().reshape(len(g), -1))

        self._on_gradient(x, out, add)

    def _look_up(self, ids: Tensor, weight: Tensor, out: Tensor) -> None:
        name = self.name_of(weight)
        if name is None or not self._is_recorded(out):
            return

        # `out` holds `add` by its hook: were `out` held by `add`, nothing of this would ever be freed
        shape, device, table = out.shape, out.device, tuple(weight.shape)

        def add(g: Tensor | None) -> None:
            if name in self.by_gradient:
                return
            g = torch.ones(shape, device=device) if g is None else g
            sums = self.sums.get(name) or Sums()
            if sums.looked_up is None:
                sums.looked_up = torch.zeros(table, dtype=torch.float32, device=device)
            if sums.draws is None:
                sums.draws = torch.zeros(table[:1], dtype=torch.float32, device=device)
            rows = ids.reshape(-1)
            squares = sums.divided("looked_up", finite(name, g).reshape(-1, g.shape[-1]).float()) ** 2
            sums.looked_up.index_add_(0, rows, squares)
            sums.draws.index_add_(0, rows, squares.new_ones(len(rows)))
            self.sums[name] = sums

        self._on_gradient(ids, out, add)

    def _convolution(self, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
        name = self.name_of(weight)
        if name is None or not self._is_recorded(out) or not self._is_first_way(name, turned=False):
            return
        stride, padding, dilation = (
            argument(args, kwargs, position, word, default)
            for position, word, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        groups = int(argument(args, kwargs, 6, "groups", 1))
        held = self._hold(x.detach())

        def add(g: Tensor | None) -> None:
            patches = _patches(held().float(), tuple(weight.shape), dims, stride, padding, dilation, groups)
            positions = math.prod(patches.shape[: 2 + dims])
            rows = None
            if g is not None:
                g = g if g.ndim == dims + 2 else g[None]  # one example without a batch
                rows = g.reshape(*g.shape[:2], -1).movedim(1, -1).reshape(-1, g.shape[1])
            self._add(name, _slices(patches), weight[0].numel(), positions, rows, examples=len(patches))

        self._on_gradient(x, out, add)

    def _transposed_convolution(self, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Record a transposed convolution, whose rows are inputs: its gradients go through the convolution itself.

        One in groups is left to gradients of the weight: inputs of two groups do not make up for each other's errors.
        """
        x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
        name, groups = self.name_of(weight), int(argument(args, kwargs, 6, "groups", 1))
        if name is None or groups > 1 or not self._is_recorded(out) or not self._is_first_way(name, turned=True):
            return
        stride, padding, dilation = (
            argument(args, kwargs, position, word, default)
            for position, word, default in ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))
        )
        held = self._hold(x.detach())

        def add(g: Tensor | None) -> None:
            if g is None:
                return
            patches = _patches(g.float(), tuple(weight.shape), dims, stride, padding, dilation, groups)
            positions = math.prod(patches.shape[: 2 + dims])
            inputs = held()
            inputs = inputs if inputs.ndim == dims + 2 else inputs[None]
            rows = inputs.reshape(*inputs.shape[:2], -1).movedim(1, -1).reshape(-1, inputs.shape[1])
            self._add(name, _slices(patches), weight[0].numel(), positions, rows, examples=len(patches))

        self._on_gradient(x, out, add)

    def _is_recorded(self, out: Tensor) -> bool:
        return out.requires_grad or not self.gradients

    def _hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what returns a tensor when the backward pass needs it."""
        return (lambda: tensor) if self.offload is None else self.offload.hold(tensor)

    def _on_gradient(self, x: Tensor, out: Tensor, add: Callable[[Tensor | None], None]) -> None:
        if not self.gradients:
            with torch._C.DisableTorchFunction():
                add(None)
            return

        def hook(gradient: Tensor) -> None:
            if not self.is_collecting:
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                add(gradient.detach())

        out.register_hook(hook)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunction():
            edge = get_gradient_edge(out)
            self.products[edge.node] = node_of(x)
        self.roots.append(edge)  # not `out`, which an activation may change in place

    def differentiate(self, loss: Tensor) -> None:
        """Take the gradients of a loss at the outputs of all products, and of weights that are used in other ways."""
        weights = self.portions.with_siblings(reached_weights(loss, self.products, self._name_of_matrix))
        for name in {tensor for other in weights.keys() - self.others.keys() for tensor in self.portions.names(other)}:
            self.sums[name] = Sums()  # what single products had is in the gradient of the weight as well
            self.by_gradient.add(name)
        self.others |= weights
        others = list(self.others.values())
        if not self.roots and not others:
            return
        share = sum(weight.numel() for weight in others) / self.weights
        signed = self.losses if share >= _WORTH_DRAWS else []
        first_products = earliest(self.products)  # a pass to them comes by all others, and returns fewer gradients
        ends = [edge for edge in self.roots if edge.node in first_products]
        self.is_collecting = True
        gradients = torch.autograd.grad(
            loss.reshape(()),
            [*ends, *others, *signed],  # type: ignore[arg-type]  # it may mix tensors and edges
            allow_unused=True,
            retain_graph=bool(signed),
        )
        self.is_collecting = False
        first, scales = gradients[len(ends) :][: len(others)], gradients[len(ends) + len(others) :]
        self._add_gradients(first, first=True)
        scaled = [(losses, scale) for losses, scale in zip(signed, scales, strict=True) if scale is not None]
        self.redrawn = True
        for _ in range(1, _DRAWS if scaled else 0):
            vectors = [scale * self._signs(scale) for _, scale in scaled]
            again = torch.autograd.grad(
                [losses for losses, _ in scaled], others, vectors, allow_unused=True, retain_graph=True
            )
            self._add_gradients(again)
        self.redrawn = False

    def _add_gradients(self, gradients: Sequence[Tensor | None], *, first: bool = False) -> None:
        for name, gradient in zip(self.others, gradients, strict=True):
            if gradient is None:
                continue
            portion = self.portions.by_name.get(name)
            for tensor, part, share in () if portion is None else portion.gradients(gradient.detach()):
                if part.ndim > 1 and min(part.shape[:2]) >= LEAST_SIDE:
                    self._add_gradient(tensor, used_as_matrix(part), first=first, share=share)
            if portion is None:
                self._add_gradient(name, used_as_matrix(gradient.detach()), first=first)

    def _add_gradient(self, name: str, gradient: Tensor, *, first: bool, share: float = 1.0) -> None:
        """Add Σ Dᵀ D and Σ D Dᵀ of a gradient D of the weight, (rows, …)."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient  # of a bag of rows
        sums = self.sums[name]
        rows = sums.divided("outputs", gradient.flatten(1).float())
        sums.rescale({"inputs": sums.exponents.get("outputs", 0)})
        columns = rows.shape[1]
        size = columns // _block_count(columns, gradient.shape[1])
        blocks = rows.view(len(rows), -1, size).transpose(0, 1)
        inputs = finite(name, blocks.mT @ blocks)
        outputs = finite(name, rows @ rows.T if len(rows) <= MAX_OUTPUTS else (rows * rows).sum(1))
        sums.inputs = inputs if sums.inputs is None else sums.inputs.add_(inputs)
        sums.outputs = outputs if sums.outputs is None else sums.outputs.add_(outputs)
        sums.samples += share
        sums.examples += first * share
        self.sums[name] = sums

    def _add(
        self,
        name: str,
        inputs: Iterable[Tensor],
        columns: int,
        uses: int,
        g: Tensor | None,
        examples: int | None = None,
        share: float = 1.0,
    ) -> None:
        """Add Σ x xᵀ of slices of the inputs (…, taps …, channels), and gradients g (uses, rows).

        Grouped convolutions have fewer gradients than uses.
        """
        if name in self.by_gradient:
            return
        sums = self.sums.get(name) or Sums(turned=self.turned.get(name, False))
        for some in inputs:
            part = sums.divided("inputs", some)
            count = _block_count(columns, part.shape[-1])
            size = columns // count
            if sums.inputs is None:
                sums.inputs = torch.zeros((count, size, size), dtype=torch.float32, device=part.device)
            for total, block in zip(sums.inputs, part.chunk(count, -1), strict=True):
                matrix = block.reshape(-1, size)
                total.addmm_(matrix.T, matrix)
        if sums.inputs is not None:
            finite(name, sums.inputs)
        sums.uses += uses
        examples = uses if examples is None else examples
        sums.samples += share * examples ** (1 - _SPREAD) * uses**_SPREAD
        sums.examples += share * examples
        if g is not None:
            g = sums.divided("outputs", g.float())
            outputs = finite(name, g.T @ g if g.shape[1] <= MAX_OUTPUTS else (g * g).sum(0))
            sums.outputs = outputs if sums.outputs is None else sums.outputs.add_(outputs)
        self.sums[name] = sums

    def _curvature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return a sum whose gradient at the logits has the covariance Diag(p) − p pᵀ, the curvature of the KL.

        With random signs s the gradient is v = r − p Σ r, r = √p · s. As E[r rᵀ] = Diag(p) and p sums to one, E[v vᵀ] =
        Diag(p) − p pᵀ. One backward pass gives an unbiased sample of the Fisher information of all layers.
        """
        source, target = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "target")
        ignore_index = argument(args, kwargs, 4, "ignore_index", -100)
        reduction = argument(args, kwargs, 6, "reduction", "mean")
        logits = source.movedim(1, -1) if source.ndim > 1 else source
        with torch.no_grad():
            p = torch.softmax(logits.detach().float(), -1)
            signs = self._signs(p)
            roots = p.sqrt() * signs
            vector = roots - p * roots.sum(-1, keepdim=True)
            if target.shape == logits.shape[:-1]:
                vector = vector * (target != ignore_index)[..., None]
                self.targets += int((target != ignore_index).sum())
            else:
                self.targets += p[..., 0].numel()
        losses: Tensor = (logits.float() * vector).sum(-1)
        self.losses.append(losses)
        if reduction == "none":
            return losses
        return losses.sum() / max(losses.numel(), 1) if reduction == "mean" else losses.sum()

    def forget(self) -> None:
        """Drop the references to the graph of a batch."""
        self.roots.clear()
        self.products.clear()
        self.losses.clear()
        self.casts.clear()
        self.batches += 1
        if self.offload is not None:
            self.offload.forget()

    def share(self, world: World) -> list[str]:
        """Add the sums up over all ranks, keep those of the matrices that this rank owns, and return all names."""
        counts = torch.tensor([self.targets, self.batches], dtype=torch.float64, device="cpu")
        self.targets, self.batches = map(int, world.sum_(counts.to(self.device)).tolist())
        if not self.batches:
            raise DataError("there are no calibration batches; give tens of thousands of tokens or images")
        names = sorted(
            {name for text in world.all_gather_strings(json.dumps([*self.sums])) for name in json.loads(text)}
        )
        if not names:
            raise ConfigError(
                "the calibration loss uses none of the module's matrices; check that it calls the module with its own "
                "weights: torch.func.stack_module_state detaches copies, torch.stack does not"
            )
        ranks = owners(world.size, dict.fromkeys(names, 1))
        for name in names if world.size > 1 else ():
            sums = over_ranks(self.sums.pop(name, Sums()), ranks[name], self.device, world)
            if ranks[name] == world.rank:
                self.sums[name] = sums
        return names

    def finish(self) -> Iterator[tuple[str, Sensitivity]]:
        """Yield (name, sensitivity), means per target (per batch if the loss calls no cross-entropy), after `share`."""
        taps = {name: math.prod(shape[2:]) for (_, _, shape, _), name in self.names.items()}
        for one in self.portions.by_name.values():
            taps |= dict.fromkeys(one.names, 1)  # used as a matrix, with columns in their order
        for name in sorted(self.sums):
            if (sums := self.sums[name]).is_empty:
                continue
            sensitivity = sensitivity_of(sums, taps[name], self.targets or self.batches, signed=self.targets > 0)
            require_finite(name, sensitivity)
            yield name, sensitivity


def require_examples(sensitivities: Mapping[str, Sensitivity]) -> None:
    """Raise DataError if nothing was measured: experts without tokens, batches without images."""
    if not sensitivities:
        raise DataError("the calibration batches hold no examples; give tens of thousands of tokens or images")


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by its position or name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def _patches(
    x: Tensor, shape: tuple[int, ...], dims: int, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return the input patch of each output of a convolution, (examples, groups, positions …, taps …, channels)."""
    if x.ndim == dims + 1:
        x = x[None]
    kernel = shape[2:]
    stride, dilation = _per_dimension(stride, dims), _per_dimension(dilation, dims)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in reach]
    else:
        sides = [(side, side) for side in _per_dimension(0 if padding == "valid" else padding, dims)]
    padded = F.pad(x, [side for pair in reversed(sides) for side in pair])
    # Channels last, so that a patch is copied in contiguous runs of channels.
    last = padded.view(len(x), groups, -1, *padded.shape[2:]).movedim(2, -1).contiguous()
    positions = [
        (side - d * (k - 1) - 1) // s + 1
        for side, k, s, d in zip(last.shape[2:-1], kernel, stride, dilation, strict=True)
    ]
    strides = last.stride()[2:-1]
    return last.as_strided(
        (*last.shape[:2], *positions, *kernel, last.shape[-1]),
        (
            *last.stride()[:2],
            *(step * s for step, s in zip(strides, stride, strict=True)),
            *(step * d for step, d in zip(strides, dilation, strict=True)),
            1,
        ),
    )


def _slices(patches: Tensor) -> Iterator[Tensor]:
    """Yield parts of `patches`, a view that would be many times as large as its memory, of `_SLICE` elements at most.

    Parts are examples if several fit, else positions of one example along the first dimension.
    """
    per_example = patches[:1].numel()
    count = _SLICE // max(per_example, 1)
    if count:
        yield from torch.split(patches, count)
        return
    height = max(1, _SLICE * patches.shape[2] // per_example)
    for example in torch.split(patches, 1):
        yield from torch.split(example, height, 2)


def _block_count(columns: int, channels: int) -> int:
    """Return into how many blocks of as many channels the Hessian of so many columns is divided."""
    return next(
        count
        for count in range(1, channels + 1)
        if not channels % count and (columns <= count * MAX_COLUMNS or count == channels)
    )


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    return (int(value),) * dims if isinstance(value, int) else tuple(int(v) for v in value)
