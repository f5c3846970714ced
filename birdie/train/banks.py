"""Parameter banks: the matrices of one shape as one 3-D parameter, so that an optimizer treats them as one tensor.

    blocks.0.attn.c_q.weight ──┐
    blocks.0.attn.proj.weight ─┤ one storage, one gradient: bank (22, 512, 512), matrix i is bank[i]
    …                         ─┘

A layer's parameter becomes a view of its bank, and its gradient a view of the bank's gradient, into which autograd
adds. So the model, its names and its checkpoints are those of a model without banks, and forward and backward do the
same arithmetic; what is saved is everything between backward and update: no stacking, no copies, a handful of launches
instead of some for each matrix, and buffers that a collective can send as they are.

Source: the banks of openai/parameter-golf #399, which are 3-D parameters that the forward pass cuts into slices.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Bank:
    """Matrices of one shape, dtype and device in one storage.

    Whoever moves a member elsewhere (`module.to(...)`) takes it out of its bank without a word: bank them last.

    Attributes:
        names: of the members, in their order along the first dimension.
        parameter: (members, rows, columns), what an optimizer is given; its gradient is always there.
    """

    def __init__(self, members: Mapping[str, nn.Parameter]) -> None:
        self.names = tuple(members)
        self._members = tuple(members.values())
        storage = torch.stack([p.detach() for p in self._members])
        self.parameter = nn.Parameter(storage)
        self.parameter.grad = torch.zeros_like(storage)
        for p, slot in zip(self._members, storage, strict=True):
            p.data = slot
        self._gradients = tuple(self.parameter.grad)
        self._lend()

    @property
    def shape(self) -> torch.Size:
        """(members, rows, columns)."""
        return self.parameter.shape

    @property
    def gradient(self) -> Tensor:
        """The gradient of all members, (members, rows, columns); zeros for members that got none."""
        for p, own in zip(self._members, self._gradients, strict=True):
            if p.grad is not own:  # a caller dropped it, and autograd has put another in its place
                own.zero_() if p.grad is None else own.copy_(p.grad)
                p.grad = own
        assert self.parameter.grad is not None
        return self.parameter.grad

    def zero_grad(self) -> None:
        """Set the gradient to zero, in place."""
        assert self.parameter.grad is not None
        self.parameter.grad.zero_()
        self._lend()

    def split(self, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, part) of a tensor whose first dimension counts the members."""
        return zip(self.names, stacked, strict=True)

    def _lend(self) -> None:
        for p, own in zip(self._members, self._gradients, strict=True):
            p.grad = own


def banked(members: Mapping[str, nn.Parameter]) -> list[Bank]:
    """`members`, 2-D, as banks, the largest first: the order in which their communication hides best.

    For the blocks of a GPT these are queries and outputs, keys and values, and the two layers of the MLPs.
    """
    by_kind: defaultdict[tuple[torch.Size, torch.dtype, torch.device], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in members.items():
        by_kind[p.shape, p.dtype, p.device][name] = p
    return sorted((Bank(each) for each in by_kind.values()), key=lambda bank: -bank.parameter.numel())
