"""Parameter banks: matrices of equal shape in one 3-D parameter, which an optimizer updates as one tensor.

    blocks.0.attn.c_q.weight ──┐
    blocks.0.attn.proj.weight ─┤ one storage, one gradient: bank (22, 512, 512), matrix i is bank[i]
    …                         ─┘

A layer's parameter becomes a view of its bank, and its gradient a view of the bank's gradient, to which autograd adds.
So the model, its names and its checkpoints stay those of a model without banks, and forward and backward do the same
arithmetic. What is saved lies between backward and update: no stacking, no copies, a few kernel launches instead of
some per matrix, and buffers that a collective can send as they are.

Source: the banks of openai/parameter-golf #399, which are 3-D parameters that the forward pass slices.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Bank:
    """Matrices of one shape, dtype and device in one storage.

    Moving a member to another device (`module.to(...)`) silently takes it out of its bank: create banks last.

    Attributes:
        names: of the members, in their order along the first dimension.
        parameter: (members, rows, columns), for the optimizer; it always has a gradient.
    """

    def __init__(self, members: Mapping[str, nn.Parameter]) -> None:
        self.names = tuple(members)
        self._members = tuple(members.values())
        storage = torch.stack([p.detach() for p in self._members])
        self.parameter = nn.Parameter(storage)
        self.parameter.grad = torch.zeros_like(storage)
        for p, matrix in zip(self._members, storage, strict=True):
            p.data = matrix
        self._gradients = tuple(self.parameter.grad)
        self._attach_gradients()

    @property
    def shape(self) -> torch.Size:
        """(members, rows, columns)."""
        return self.parameter.shape

    @property
    def gradient(self) -> Tensor:
        """The gradient of all members, (members, rows, columns); zero for members without one."""
        for p, view in zip(self._members, self._gradients, strict=True):
            if p.grad is not view:  # a caller dropped it, and autograd has created another tensor
                view.zero_() if p.grad is None else view.copy_(p.grad)
                p.grad = view
        assert self.parameter.grad is not None
        return self.parameter.grad

    def zero_grad(self) -> None:
        """Set the gradient to zero, in place."""
        assert self.parameter.grad is not None
        self.parameter.grad.zero_()
        self._attach_gradients()

    def split(self, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return (name, part) pairs of a tensor whose first dimension counts the members."""
        return zip(self.names, stacked, strict=True)

    def _attach_gradients(self) -> None:
        for p, view in zip(self._members, self._gradients, strict=True):
            p.grad = view


def make_banks(members: Mapping[str, nn.Parameter]) -> list[Bank]:
    """Put `members`, 2-D, into banks and return these, the largest first: in this order communication hides best.

    For the blocks of a GPT these are queries and outputs, keys and values, and the two layers of the MLPs.
    """
    by_kind: defaultdict[tuple[torch.Size, torch.dtype, torch.device], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in members.items():
        by_kind[p.shape, p.dtype, p.device][name] = p
    return sorted((Bank(group) for group in by_kind.values()), key=lambda bank: -bank.parameter.numel())
