"""Causal self-attention with rotary positions, normalised queries and keys, and grouped key–value heads.

    x ─► q, k: norm, rotate, gain ─┐
    x ─► v: + value embedding, mixed with the first layer's ─► attend ─► − own value's direction ─► gate ─► proj

Descends from RoPE (Su et al. 2021), grouped-query attention (Ainslie et al. 2023) and query–key normalisation (Henry et
al. 2020); the learned gain on each query head takes the place of a temperature. What the records added, each off unless
asked for, with the pull request of openai/parameter-golf it is from:

- partial rotation, and a base that grows with the sequence (#315; the base: NTK-aware scaling, bloc97 2023);
- exclusive attention (XSA, #287): heads lose what they say of their own value; no parameters, two passes over y;
- value embeddings (#374) and value residual (Zhou et al. 2024, arXiv 2410.17897): 2 parameters a layer;
- gates on heads: output (#1667) and sparse (#1787), heads · window; dense (#1736), heads · dim.

- windows (#1212): the layers of `attn_window_layers` see the last `attn_window` places;
- documents apart (#1530): by a kernel of variable length where one is installed (`kernels`), else by masks
  (`documents`).

Other ways to attend are functions that `register` gives a name, which a recipe then uses:

    def windowed(q, k, v, mask):        # q (B, H, T, D), k and v (B, K, T, D), mask as `Attend` says
        ...
    register("windowed", windowed)      # model.attention = "windowed"
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.model.config import GPTConfig
from birdie.model.documents import Bounds, Sight, banded, numbered, sight
from birdie.model.kernels import Kernels, Plain, Varlen

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""q (batch, heads, length, d), k and v (batch, kv heads, length, d), mask → (batch, heads, length, d).

The mask, (batch, 1, length, length) bool, says what each place may see; None: itself and all before it.
"""


@dataclass(frozen=True, slots=True)
class Attending:
    """How to attend, with what is seen settled.

    Attributes:
        run: (q, k, v) → y.
        shortens: whether there may be fewer queries than keys: those of the last places.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    shortens: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (batch, heads, length, d), k and v (batch, kv heads, length, d) → (batch, heads, length, d)."""
        return self.run(q, k, v)


def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q · kᵀ / √d) · v, by the fastest kernel there is."""
    if mask is None and q.shape[2] < k.shape[2]:
        mask = last_places(q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def last_places(queries: int, keys: int, device: torch.device) -> Tensor:
    """What the last places see of a row of `keys`: themselves and all before, (queries, keys) bool."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


_ATTENDS: dict[str, Attend] = {"softmax": softmax}


def register(name: str, attend: Attend) -> None:
    """Let recipes name `attend`; it must be causal, which `birdie.model` cannot check.

    Raises:
        ConfigError: the name is taken.
    """
    if _ATTENDS.get(name, attend) is not attend:
        raise ConfigError(f"there is an attention {name!r} already; choose another name")
    _ATTENDS[name] = attend


def attend_named(name: str) -> Attend:
    """What was registered as `name`.

    Raises:
        ConfigError: nothing was.
    """
    if name not in _ATTENDS:
        raise ConfigError(
            f"attention {name!r} is unknown; choose {', '.join(sorted(_ATTENDS))}, or register it first "
            "(birdie.model.attention.register)"
        )
    return _ATTENDS[name]


class Linear(nn.Linear):
    """A linear layer without bias whose fp32 master weight is cast to the dtype of its input at each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Rotary(nn.Module):
    """Tables of cosines and sines by position, made when first needed and kept for each device and dtype.

    Sequences longer than `train_seq_len` (0: any) get a base larger by (length / train_seq_len)^(d / (d − 2)). In
    scoring that is the length of whole windows (`windows_of`): by a base of its own, a window that is short because its
    document is would tell where it ends.
    """

    def __init__(self, dims: int, base: float, train_seq_len: int = 0) -> None:
        super().__init__()
        self.dims, self.base, self.train_seq_len = dims, base, train_seq_len
        self._windows = 0  # the length of whole windows; 0: every sequence is whole
        self._tables: dict[tuple[torch.device, torch.dtype, float], tuple[Tensor, Tensor]] = {}

    def forward(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, ±sin) as `rotate` takes them, each (length, 1, dims) to broadcast over heads."""
        base = self._base_for(length)
        tables = self._tables.get((device, dtype, base))
        if tables is None or len(tables[0]) < length:
            # sampling asks for one position more at each token: the power of two above keeps the tables
            tables = self._build(1 << (length - 1).bit_length(), base, device, dtype)
            if base != self.base:  # one for each length would be kept for ever
                self._tables = {key: value for key, value in self._tables.items() if key[2] == self.base}
            self._tables[device, dtype, base] = tables
        return tables[0][:length], tables[1][:length]

    @contextmanager
    def windows_of(self, length: int) -> Iterator[None]:
        """Inside, sequences of any length have the base of those of `length`."""
        before = self._windows
        if 0 < self.train_seq_len < length:  # else compiled graphs need not know
            self._windows = length
        try:
            yield
        finally:
            self._windows = before

    def tables_of(
        self, positions: Tensor, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The tables of any positions (n,), with the base of sequences of `length` and angles exact however far."""
        exponents = torch.arange(0, self.dims, 2, dtype=torch.float32) / self.dims
        frequencies = (self._base_for(length) ** -exponents).double()
        angles = torch.outer(positions.cpu().double(), frequencies)
        cos, sin = (each.to(device, dtype) for each in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), dim=1)[:, None], torch.cat((sin, -sin), dim=1)[:, None]

    def _base_for(self, length: int) -> float:
        length = self._windows or length
        if self.train_seq_len and length > self.train_seq_len:
            grown: float = self.base * (length / self.train_seq_len) ** (self.dims / (self.dims - 2))
            return grown
        return self.base

    def _build(self, length: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # tensors made in inference mode could never be used in training again
        with torch.inference_mode(False), torch.no_grad():
            exponents = torch.arange(0, self.dims, 2, dtype=torch.float32, device=device) / self.dims
            angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), base**-exponents)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            return torch.cat((cos, cos), dim=1)[:, None], torch.cat((sin, -sin), dim=1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + d/2]) by its position's angle into (a cos + b sin, b cos − a sin).

    Args:
        x: (batch, length, heads, head_dim); what is beyond the first d stays as it is.
        cos: (length, 1, d), both halves alike.
        sin: (length, 1, d), the second half negated.
    """
    d = cos.shape[-1]
    if d < x.shape[-1]:
        return torch.cat((rotate(x[..., :d], cos, sin), x[..., d:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(d // 2, dims=-1), sin)  # a roll by half swaps a and b


def exclusive(y: Tensor, v: Tensor) -> Tensor:
    """y less its component along the value of its own token: y − ⟨y, v̂⟩ v̂.

    Args:
        y: (batch, heads, length, d).
        v: (batch, kv heads, length, d).
    """
    batch, heads, length, d = y.shape
    kv_heads = v.shape[1]
    grouped = y.view(batch, kv_heads, heads // kv_heads, length, d)  # no copy of v for each query head
    direction = F.normalize(v, dim=-1, eps=1e-6)[:, :, None]
    along = (grouped * direction).sum(-1, keepdim=True)
    return (grouped - along * direction).view(batch, heads, length, d)


def attending(
    attend: Attend, kernels: Kernels, ids: Tensor, bounds: Bounds | None, bos_id: int | None, window: int
) -> Attending:
    """How to attend in this batch: `attend` within masks, or, for softmax, the kernel that fits.

    Args:
        attend: as registered.
        kernels: what is installed.
        ids: (batch, length).
        bounds: of the documents; None: they are looked for in the rows.
        bos_id: what documents begin with; None: they are not kept apart.
        window: how far back places see, themselves included; 0: to the beginning.
    """
    fused = attend is softmax and ids.shape[1] > 1  # of single places, others know what is before them
    if fused and bounds is not None and kernels.varlen is not None and (kernels.windows or not window):
        return Attending(partial(_varlen, kernels.varlen, bounds, window))
    if fused and bos_id is None and bounds is None and kernels.plain is not None:
        return Attending(partial(_plain, kernels.plain, window), shortens=True)
    if bounds is not None:
        documents: Tensor | None = numbered(bounds, ids.shape)
    else:
        documents = None if bos_id is None else (ids == bos_id).cumsum(1)
    reach = min(window or ids.shape[1], ids.shape[1] if bounds is None else bounds.longest)
    seen = sight(documents, ids.shape, ids.device, reach=reach, bands=fused)
    if seen.band:
        return Attending(partial(_banded, seen))
    return Attending(partial(_masked, attend, seen.mask), shortens=fused)


def _varlen(varlen: Varlen, bounds: Bounds, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return varlen(q, k, v, bounds, window)


def _plain(plain: Plain, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v, window)


def _banded(seen: Sight, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return banded(q, k, v, seen)


def _masked(attend: Attend, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if mask is not None and q.shape[2] < k.shape[2]:
        mask = mask[:, :, -q.shape[2] :]
    return attend(q, k, v, mask)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all layers of one forward pass share.

    Attributes:
        cos, sin: rotary tables.
        attends: (q, k, v) → y of whole layers, and of those with a window.
        values: by layer, what is added to its values, (batch, length, kv_dim).
    """

    cos: Tensor
    sin: Tensor
    attends: tuple[Attending, Attending]
    values: dict[int, Tensor]


class Past(Protocol):
    """What was before the places of a forward pass, kept from earlier ones (`birdie.model.cache`)."""

    def surround(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Attending, Attending]]:
        """cos, sin and ways to attend for ids (batch, length), which come next."""
        ...


class Attention(nn.Module):
    """attend(gain · RoPE(norm(q)), RoPE(norm(k)), v), causal, with several query heads to a key–value head."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        dim = config.model_dim
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.c_q = Linear(dim, dim)
        self.c_k = Linear(dim, config.kv_dim)
        self.c_v = Linear(dim, config.kv_dim)
        self.proj = Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        self.exclusive = layer >= config.num_layers - config.xsa_last_n
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if config.value_residual else None
        self.gate = config.attn_gate
        self.gate_scale = config.sparse_gate_scale if self.gate == "sparse" else 1.0
        self.head_gate: nn.Parameter | None = None
        if self.gate != "none":
            window = dim if self.gate == "dense" else config.gate_window
            self.head_gate = nn.Parameter(torch.zeros(config.num_heads, window))
            if self.gate == "dense":
                nn.init.normal_(self.head_gate, std=0.01)
        layers = config.attn_window_layers
        self.windowed = config.attn_window > 0 and (not layers or layer in layers)

    def forward(
        self, x: Tensor, around: Surroundings, first_values: Tensor | None, tail: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: (batch, length, dim) → the same shape, and the values (batch, length, kv heads, d) before any mixing.

        Args:
            x: the block's input, normed.
            around: of this pass.
            first_values: of the first layer that was run; None in that one.
            tail: answer for the last so many places alone; None: for all.
        """
        batch, length, dim = x.shape
        asking, cos, sin = (x, around.cos, around.sin) if tail is None else _last(x, around, tail)
        q = self.c_q(asking).view(batch, -1, self.num_heads, self.head_dim)
        k = self.c_k(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.c_v(x)
        if self.layer in around.values:
            v = v + around.values[self.layer]
        v = own = v.view(batch, length, self.num_kv_heads, self.head_dim)
        if self.value_mix is not None and first_values is not None:
            mix = self.value_mix.to(x.dtype)
            v = mix[0] * first_values + mix[1] * v
        q = rotate(F.rms_norm(q, (self.head_dim,)), cos, sin) * self.q_gain.to(x.dtype)[:, None]
        k = rotate(F.rms_norm(k, (self.head_dim,)), around.cos, around.sin)
        v = v.transpose(1, 2)
        y = around.attends[self.windowed](q.transpose(1, 2), k.transpose(1, 2), v)
        if self.exclusive:
            y = exclusive(y, v if tail is None else v[:, :, -tail:])
        y = y.transpose(1, 2)
        if self.head_gate is not None:
            y = y * self._shares(asking, self.head_gate)[..., None]
        out: Tensor = self.proj(y.reshape(batch, -1, dim))
        return out, own

    def _shares(self, x: Tensor, gate: Tensor) -> Tensor:
        """What is left of each head, from the first inputs of x: (batch, length, heads), 0 to 1, or 0 to 2."""
        share = torch.sigmoid(self.gate_scale * F.linear(x[..., : gate.shape[1]], gate.to(x.dtype)))
        return 2 * share if self.gate == "output" else share


def _last(x: Tensor, around: Surroundings, tail: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last places of x, and of the tables."""
    return x[:, -tail:], around.cos[-tail:], around.sin[-tail:]
