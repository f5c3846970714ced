"""KV cache: each token passes through the model once, and later tokens attend to its stored keys and values.

    ids of the next positions ─► GPT.forward(past=Cache) ─► rotary tables of those positions
                                                         └► attention: store k and v; q against the stored ones in reach

A position attends to what it would attend to in the sliding window of length `context` and stride `chunk` that scores
it: the first `context` positions to all before them, later ones, chunk by chunk, from chunk end − context on. One
difference remains: a window recomputes keys and values from the tokens inside it, while the cache holds those computed
when their token was new, which may depend on tokens that have left the context since. So both agree up to rounding
wherever nothing has left it: in the first `context` positions, in isolated documents that are no longer, and with a
single layer.

Attention sinks (Xiao et al. 2023, arXiv 2309.17453): the first positions of the stream stay in reach, at the rotary
positions right before the oldest one in reach.

With `kv_bits` keys and values are quantized (`cache_quantizer`), except sinks and the newest block of RECENT positions,
which gets most of the attention: a position attends to its own block in full precision. Blocks lie at fixed positions
and no call crosses into the next, so predictions do not depend on how a stream is cut into calls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.attention import Attention
from birdie.gpt.model.attention_context import BoundAttention
from birdie.gpt.model.attention_functions import grouped_attention
from birdie.gpt.model.cache_quantizer import PackedCache, Quantizer
from birdie.gpt.model.gpt import GPT, PREFIX_TOKENS
from birdie.gpt.model.rotary import rotate
from birdie.gpt.model.techniques.depth_recurrence import layer_order

RECENT = 64
"""Positions of a block that is not quantized while it is the newest."""


class Cache:
    """KV cache of `rows` parallel streams through `model`.

    Attributes:
        model, context, chunk, sinks: the arguments.
        position: number of tokens of each stream so far.
    """

    def __init__(
        self, model: GPT, rows: int, context: int, *, chunk: int = 1, sinks: int = 0, kv_bits: int = 0
    ) -> None:
        """Allocate the cache.

        Args:
            model: in evaluation mode; its weights must not change while the cache is in use.
            rows: number of streams.
            context: positions in reach at most, the current one included, sinks not.
            chunk: the context moves on by so many positions at a time.
            sinks: first positions of the stream that always stay in reach.
            kv_bits: of each stored coordinate, one of `cache_quantizer.BITS`; 0: the model's dtype.
        """
        config = model.config
        if config.attention != "softmax":
            raise ConfigError(
                f"a KV cache needs softmax attention, but the model has {config.attention!r}; score windows instead"
            )
        if not 1 <= chunk <= context:
            raise ConfigError(f"chunks of {chunk} tokens do not fit a context of {context}; choose 1 to {context}")
        if not 0 <= sinks <= context - chunk:
            raise ConfigError(f"{sinks} sinks do not fit; choose 0 to {context - chunk}, the context less the chunk")
        if sinks and config.isolate_documents:
            raise ConfigError("sinks belong to another document where documents are isolated; set sinks to 0")
        self.model, self.context, self.chunk, self.sinks = model, context, chunk, sinks
        self.position = 0
        windowed = [module.windowed for module in model.modules() if isinstance(module, Attention)]
        # a repeated layer has keys and values for each time it runs
        runs = [windowed[layer] for half in layer_order(config, model.depth_recurrence) for layer in half]
        device = model.tok_emb.weight.device
        self._dtype = model.compute_dtype
        shape = (len(runs), 2, rows, config.num_kv_heads, context, config.head_dim)
        self._sinks = torch.zeros((*shape[:-2], sinks, shape[-1]), dtype=self._dtype, device=device)
        # keys and values of each layer, row, head and position: as one tensor, or as codes and scales
        self._quantizer = Quantizer(config.head_dim, kv_bits, device=device) if kv_bits else None
        if self._quantizer is None:
            self._stored: tuple[Tensor, ...] = (torch.zeros(shape, dtype=self._dtype, device=device),)
        else:
            self._stored = self._quantizer.zeros(shape[:-1])
            self._newest = torch.zeros((*shape[:-2], RECENT, shape[-1]), dtype=self._dtype, device=device)
        self._ids = torch.zeros((rows, context), dtype=torch.int64, device=device)
        self._end = 0  # slot after the last stored position
        self._begin = 0  # slot of the first position in reach
        self._run = 0  # index of the layer that runs next, in the order of running

    @property
    def ahead(self) -> int:
        """Positions until the context moves on or a block ends: the most that one call may have."""
        over = self.position - self.context
        ahead = -over if over < 0 else self.chunk - over % self.chunk
        return ahead if self._quantizer is None else min(ahead, RECENT - self.position % RECENT)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one more token of one row."""
        return sum(part[:, :, :1, :, :1].nbytes for part in self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values now: the stored ones, sinks, and the newest block where others are quantized."""
        newest = 0 if self._quantizer is None else self._newest.nbytes
        return sum(part.nbytes for part in self._stored) + self._sinks.nbytes + newest

    @property
    def _reach(self) -> int:
        """Number of positions before the next one that it attends to."""
        moved = max(0, -(-(self.position + 1 - self.context) // self.chunk)) * self.chunk
        return self.position - moved

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits after each of ids (rows, n) int64: (rows, n, vocab_size) float32."""
        n = ids.shape[1]
        if n > self.ahead:
            raise ConfigError(f"a call has {n} positions, but the context moves on after {self.ahead}; pass fewer")
        self._make_room(n)
        self._run = 0
        prefix = self._ids[:, max(0, self._end - PREFIX_TOKENS) : self._end].clone()
        self._ids[:, self._end : self._end + n] = ids
        self._begin = self._end - self._reach
        logits: Tensor = self.model(ids, prefix, past=self)
        self.position += n
        self._end += n
        return logits

    def attend(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[BoundAttention, BoundAttention]]:
        """Return cos, sin and attention of the next positions, as `PastKeyValues` describes."""
        n, window = ids.shape[1], self.model.config.attn_window
        cos, sin = self._tables(self.position, self.position + n, dtype)
        full = self._attention(n, self._begin)
        if not window:
            return cos, sin, (full, full)
        return cos, sin, (full, self._attention(n, max(self._begin, self._end + 1 - window), window))

    def _attention(self, n: int, begin: int, window: int = 0) -> BoundAttention:
        """Return attention of the next n positions to the stored ones from slot `begin` on, and to sinks."""
        sinks = self._sinks_out_of_reach(begin) if not window else 0
        mask = self._mask(n, begin, window, sinks)
        shift = None if not sinks else self._tables_at(torch.tensor([self._sink_shift(begin)]), self._dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._store(k, v, begin)
            stored_sinks = self._sinks[self._run]
            self._run += 1
            new_sinks = max(0, min(self.sinks - self.position, n))
            if new_sinks:
                slots = slice(self.position, self.position + new_sinks)
                stored_sinks[0, :, :, slots] = k[:, :, :new_sinks]
                stored_sinks[1, :, :, slots] = v[:, :, :new_sinks]
            if shift is not None:
                moved = rotate(stored_sinks[0, :, :, :sinks].transpose(1, 2), *shift).transpose(1, 2)
                keys = torch.cat((moved, keys), dim=2)
                values = torch.cat((stored_sinks[1, :, :, :sinks], values), dim=2)
            # query heads that share keys become queries of one head: no copy of the keys for each
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
            causal = mask is None and keys.shape[2] == n > 1
            if causal:
                return grouped_attention(q, k, v, None, is_causal=True)
            repeated = None if mask is None else mask.repeat(1, 1, grouped.shape[2] // n, 1)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=repeated).reshape(q.shape)

        return BoundAttention(attend)

    def _store(self, k: Tensor, v: Tensor, begin: int) -> Tensor:
        """Store k and v of the next positions of this layer; return keys and values from slot `begin` on to those."""
        stored, end = [part[self._run] for part in self._stored], self._end + k.shape[2]
        if self._quantizer is None:
            stored[0][0, :, :, self._end : end], stored[0][1, :, :, self._end : end] = k, v
            return stored[0][..., begin:end, :]
        offset = self.position % RECENT  # within the newest block
        newest, new = self._newest[self._run, ..., : offset + k.shape[2], :], torch.stack((k, v))
        newest[..., offset:, :] = new
        for part, packed in zip(stored, self._quantizer.quantize(new), strict=True):
            part[..., self._end : end, :] = packed
        block = self._end - offset
        if begin >= block:
            return newest[..., begin - block :, :]
        older = PackedCache(*(part[..., begin:block, :] for part in stored))
        return torch.cat((self._quantizer.dequantize(older, self._dtype), newest), dim=-2)

    def _mask(self, n: int, begin: int, window: int, sinks: int) -> Tensor | None:
        """Return the mask of the next n positions over slots from `begin` on, (rows or 1, 1, n, sinks + slots).

        None: each attends to all slots up to its own.
        """
        device, past = self._ids.device, self._end - begin
        config = self.model.config
        if not config.isolate_documents and (n == 1 or not past + sinks) and not (window and window < past + n):
            return None
        mask = torch.ones(n, past + n, dtype=torch.bool, device=device).tril(past)
        if window:
            mask = mask.triu(past + 1 - window)
        if config.isolate_documents:
            document = (self._ids[:, begin : self._end + n] == config.bos_id).cumsum(1)
            return (mask & (document[:, -n:, None] == document[:, None]))[:, None]
        return F.pad(mask, (sinks, 0), value=True)[None, None]

    def _sinks_out_of_reach(self, begin: int) -> int:
        """Return the number of sinks that are no longer among the positions in reach."""
        return min(self.sinks, self.position - (self._end - begin))

    def _sink_shift(self, begin: int) -> int:
        """Return by how many positions sinks are shifted, to right before those in reach."""
        return self.position - (self._end - begin) - self._sinks_out_of_reach(begin)

    def _make_room(self, n: int) -> None:
        """Move what is still in reach to the first slots, if n positions do not fit; allocate more the first time."""
        if self._end + n <= self._ids.shape[1]:
            return
        count = min(self._end, max(self._reach, PREFIX_TOKENS))
        reachable = slice(self._end - count, self._end)
        slots = self.context + max(self.chunk, self.context // 2, PREFIX_TOKENS)
        if self._ids.shape[1] < slots:  # a stream longer than the context: from now on one move serves many calls
            stored, ids = self._stored, self._ids
            self._stored = tuple(part.new_zeros((*part.shape[:-2], slots, part.shape[-1])) for part in stored)
            self._ids = ids.new_zeros((len(ids), slots))
            for part, old in zip(self._stored, stored, strict=True):
                part[..., :count, :] = old[..., reachable, :]
            self._ids[:, :count] = ids[:, reachable]
        else:
            for part in self._stored:
                for layer in part:  # one layer at a time, so that no second copy of all layers is needed
                    layer[..., :count, :] = layer[..., reachable, :].clone()
            self._ids[:, :count] = self._ids[:, reachable].clone()
        self._end = count

    def _tables(self, first: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rotary tables of positions first … stop − 1; in the first context, bit for bit those of windows."""
        if stop <= self.context:
            cos, sin = self.model.rotary(self.context, self._ids.device, dtype)
            return cos[first:stop], sin[first:stop]
        return self._tables_at(torch.arange(first, stop), dtype)

    def _tables_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.model.rotary.tables_at(positions, self.context, self._ids.device, dtype)
