"""Stand-ins for variable-length attention kernels, with the arguments of the real ones, computed segment by segment."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from birdie.gpt.model import attention_kernels


def segments_one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, window: int) -> Tensor:
    """Attend within each segment of flattened (tokens, heads, d) separately."""
    out, k, v = torch.zeros_like(q), *(x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if begin == end:
            continue
        assert end - begin <= longest
        qs, ks, vs = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(1 - (window or end))
        scores = (qs @ ks.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        out[begin:end] = (scores.softmax(-1) @ vs).transpose(0, 1)
    return out


def flash3() -> attention_kernels.Kernels:
    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Any:
        assert cu_q is cu_k
        assert max_q == max_k
        assert options.pop("causal")
        left, right = options.pop("window_size")
        assert right == (-1 if left == -1 else 0)
        return segments_one_by_one(q, k, v, cu_q, max_q, left + 1), None

    def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert causal
        batch, length = q.shape[:2]
        offsets = torch.arange(0, (batch + 1) * length, length)
        flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return segments_one_by_one(flat_q, flat_k, flat_v, offsets, length, window_size[0] + 1).view_as(q)

    return attention_kernels.flash3(SimpleNamespace(flash_attn_func=plain, flash_attn_varlen_func=varlen))


def torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert cu_q is cu_k
    assert max_q == max_k
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return segments_one_by_one(query, key, value, cu_q, max_q, window_size[0] + 1)


def older_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    assert cu_q is cu_k
    assert max_q == max_k
    assert is_causal
    assert query.shape == key.shape
    return segments_one_by_one(query, key, value, cu_q, max_q, 0)


KERNELS: dict[str, Callable[[], attention_kernels.Kernels]] = {
    "SDPA": attention_kernels.Kernels,
    "FlashAttention-3": flash3,
    "torch varlen": lambda: attention_kernels.torch_varlen(torch_varlen),
    "torch varlen, older": lambda: attention_kernels.torch_varlen(older_torch_varlen),
}
