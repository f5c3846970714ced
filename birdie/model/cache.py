"""Keys and values kept between calls: each token passes the model once, and later ones attend to what was kept.

    ids of the next places ─► GPT.forward(past=Cache) ─► rotary tables of those places
                                                      └► attention: k, v stored; q against those stored and seen

A place sees what it sees in the sliding window of length `context` and stride `chunk` that scores it: the first
`context` places all before them, later ones, by chunks, from chunk end − context on. The two differ in one thing: a
window computes the keys and values of its places anew from what is inside it, here they were made when their token was
new and may carry what has since left the context. So both are equal, up to rounding, where nothing has left it: in the
first `context` places, in documents that are kept apart and are no longer, and with a single layer.

Attention sinks (Xiao et al. 2023, arXiv 2309.17453): the first places of the stream stay, at positions right before
those seen.

With `kv_bits` keys and values are kept in few bits (`cache_quantizer`), but for sinks and for what is newest, which is
looked at most: a place sees those of its own block of RECENT places as they were. Blocks lie at fixed positions and no
call crosses into the next, so what is predicted does not depend on how a stream is cut into calls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.attention import Attending, Attention, rotate
from birdie.model.cache_quantizer import Packed, Quantizer
from birdie.model.embedding import BEFORE
from birdie.model.gpt import GPT

RECENT = 64
"""Places of a block that is not quantized while it is the newest."""


class Cache:
    """`model` on `rows` streams side by side, some places a call.

    Attributes:
        position: tokens of each stream that were seen.
        context, chunk, sinks: as given.
    """

    def __init__(
        self, model: GPT, rows: int, context: int, *, chunk: int = 1, sinks: int = 0, kv_bits: int = 0
    ) -> None:
        """Make room.

        Args:
            model: in evaluation mode; its weights must not change meanwhile.
            rows: streams.
            context: places that are seen at most, a place itself included, sinks not.
            chunk: places after which the context moves on, by as many.
            sinks: first places of the stream that are always seen.
            kv_bits: of each coordinate that is kept, one of `cache_quantizer.BITS`; 0: as the model computes.

        Raises:
            ConfigError: sizes do not fit, nothing quantizes to so many bits, or the model attends in a way of its own,
                which is not known to go on from keys and values.
        """
        config = model.config
        if config.attention != "softmax":
            raise ConfigError(
                f"attention {config.attention!r} is not known to go token by token; score windows instead"
            )
        if not 1 <= chunk <= context:
            raise ConfigError(f"chunks of {chunk} tokens do not fit a context of {context}; give 1 to {context}")
        if not 0 <= sinks <= context - chunk:
            raise ConfigError(f"{sinks} sinks do not fit; give 0 to {context - chunk}, context less chunk")
        if sinks and config.isolate_documents:
            raise ConfigError("sinks are of another document where documents are kept apart; leave them out")
        self.model, self.context, self.chunk, self.sinks = model, context, chunk, sinks
        self.position = 0
        windowed = [part.windowed for part in model.modules() if isinstance(part, Attention)]
        # a looped layer has keys and values of each time
        self._windowed = [windowed[layer] for part in config.layers(model.looping) for layer in part]
        device = model.tok_emb.weight.device
        self._dtype = model.compute_dtype
        shape = (len(self._windowed), 2, rows, config.num_kv_heads, context, config.head_dim)
        self._sunk = torch.zeros((*shape[:-2], sinks, shape[-1]), dtype=self._dtype, device=device)
        # keys and values of each layer, row, head and place: as one tensor, or as codes and scales
        self._quantizer = Quantizer(config.head_dim, kv_bits, device=device) if kv_bits else None
        if self._quantizer is None:
            self._stored: tuple[Tensor, ...] = (torch.zeros(shape, dtype=self._dtype, device=device),)
        else:
            self._stored = self._quantizer.zeros(shape[:-1])
            self._newest = torch.zeros((*shape[:-2], RECENT, shape[-1]), dtype=self._dtype, device=device)
        self._ids = torch.zeros((rows, context), dtype=torch.int64, device=device)
        self._end = 0  # of what is stored
        self._begin = 0  # of what is seen
        self._layer = 0

    @property
    def ahead(self) -> int:
        """Places until the context moves on, or a block ends: the most a call may have."""
        over = self.position - self.context
        ahead = -over if over < 0 else self.chunk - over % self.chunk
        return ahead if self._quantizer is None else min(ahead, RECENT - self.position % RECENT)

    @property
    def token_bytes(self) -> int:
        """What keys and values of one more token of one row take."""
        return sum(part[:, :, :1, :, :1].nbytes for part in self._stored)

    @property
    def nbytes(self) -> int:
        """What keys and values take now: the stored ones, sinks, and the newest block where others are in few bits."""
        newest = 0 if self._quantizer is None else self._newest.nbytes
        return sum(part.nbytes for part in self._stored) + self._sunk.nbytes + newest

    @property
    def _reach(self) -> int:
        """How far back the next place sees, itself not included."""
        moved = max(0, -(-(self.position + 1 - self.context) // self.chunk)) * self.chunk
        return self.position - moved

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits of the tokens after ids (rows, n) int64: (rows, n, vocab_size) float32.

        Raises:
            ConfigError: the context moves on before the last of them.
        """
        n = ids.shape[1]
        if n > self.ahead:
            raise ConfigError(f"{n} places at once are more than the {self.ahead} until the context moves on")
        self._make_room(n)
        self._layer = 0
        before = self._ids[:, max(0, self._end - BEFORE) : self._end].clone()
        self._ids[:, self._end : self._end + n] = ids
        self._begin = self._end - self._reach
        logits: Tensor = self.model(ids, before, past=self)
        self.position += n
        self._end += n
        return logits

    def assume(self, tokens: int) -> None:
        """Go on as if so many of the first `context` tokens had been seen, and were nothing: for timing."""
        self.position = self._end = tokens

    def surround(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Attending, Attending]]:
        """What `GPT.forward` asks for: tables of the next places, and ways to attend from them."""
        n, window = ids.shape[1], self.model.config.attn_window
        cos, sin = self._tables(self.position, self.position + n, dtype)
        whole = self._attending(n, self._begin)
        if not window:
            return cos, sin, (whole, whole)
        return cos, sin, (whole, self._attending(n, max(self._begin, self._end + 1 - window), window))

    def _attending(self, n: int, begin: int, window: int = 0) -> Attending:
        """Attention of the next n places to what is stored from `begin` on, and to sinks."""
        sinks = self._sinks_away(begin) if not window else 0
        mask = self._mask(n, begin, window, sinks)
        turn = None if not sinks else self._tables_of(torch.tensor([self._shift(begin)]), self._dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._kept(k, v, begin)
            sunk = self._sunk[self._layer]
            self._layer += 1
            fresh = max(0, min(self.sinks - self.position, n))
            if fresh:
                place = slice(self.position, self.position + fresh)
                sunk[0, :, :, place], sunk[1, :, :, place] = k[:, :, :fresh], v[:, :, :fresh]
            if turn is not None:
                moved = rotate(sunk[0, :, :, :sinks].transpose(1, 2), *turn).transpose(1, 2)
                keys, values = torch.cat((moved, keys), dim=2), torch.cat((sunk[1, :, :, :sinks], values), dim=2)
            # heads that share keys, as so many queries: no copy of the keys for each
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
            causal = mask is None and keys.shape[2] == n > 1
            if causal:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            seen = None if mask is None else mask.repeat(1, 1, grouped.shape[2] // n, 1)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen).reshape(q.shape)

        return Attending(attend)

    def _kept(self, k: Tensor, v: Tensor, begin: int) -> Tensor:
        """Keep the next places' k and v of this layer; returns keys and values from `begin` on, those included."""
        stored, end = [part[self._layer] for part in self._stored], self._end + k.shape[2]
        if self._quantizer is None:
            stored[0][0, :, :, self._end : end], stored[0][1, :, :, self._end : end] = k, v
            return stored[0][..., begin:end, :]
        place = self.position % RECENT
        newest, new = self._newest[self._layer, ..., : place + k.shape[2], :], torch.stack((k, v))
        newest[..., place:, :] = new
        for part, packed in zip(stored, self._quantizer.quantize(new), strict=True):
            part[..., self._end : end, :] = packed
        block = self._end - place
        if begin >= block:
            return newest[..., begin - block :, :]
        older = Packed(*(part[..., begin:block, :] for part in stored))
        return torch.cat((self._quantizer.dequantize(older, self._dtype), newest), dim=-2)

    def _mask(self, n: int, begin: int, window: int, sinks: int) -> Tensor | None:
        """What the next n places see from `begin` on, (rows or 1, 1, n, sinks + places); None: all not later."""
        device, past = self._ids.device, self._end - begin
        config = self.model.config
        if not config.isolate_documents and (n == 1 or not past + sinks) and not (window and window < past + n):
            return None
        seen = torch.ones(n, past + n, dtype=torch.bool, device=device).tril(past)
        if window:
            seen = seen.triu(past + 1 - window)
        if config.isolate_documents:
            document = (self._ids[:, begin : self._end + n] == config.bos_id).cumsum(1)
            return (seen & (document[:, -n:, None] == document[:, None]))[:, None]
        return F.pad(seen, (sinks, 0), value=True)[None, None]

    def _sinks_away(self, begin: int) -> int:
        """How many sinks are no longer among the places seen."""
        return min(self.sinks, self.position - (self._end - begin))

    def _shift(self, begin: int) -> int:
        """How far sinks move: to the places right before those seen."""
        return self.position - (self._end - begin) - self._sinks_away(begin)

    def _make_room(self, n: int) -> None:
        """Move what can still be seen to the beginning, if n places do not fit; take more room the first time."""
        if self._end + n <= self._ids.shape[1]:
            return
        kept = min(self._end, max(self._reach, BEFORE))
        seen = slice(self._end - kept, self._end)
        room = self.context + max(self.chunk, self.context // 2, BEFORE)
        if self._ids.shape[1] < room:  # a stream longer than the context: from now on one move serves many calls
            stored, ids = self._stored, self._ids
            self._stored = tuple(part.new_zeros((*part.shape[:-2], room, part.shape[-1])) for part in stored)
            self._ids = ids.new_zeros((len(ids), room))
            for part, old in zip(self._stored, stored, strict=True):
                part[..., :kept, :] = old[..., seen, :]
            self._ids[:, :kept] = ids[:, seen]
        else:
            for part in self._stored:
                for layer in part:  # one after the other: no second copy of all
                    layer[..., :kept, :] = layer[..., seen, :].clone()
            self._ids[:, :kept] = self._ids[:, seen].clone()
        self._end = kept

    def _tables(self, first: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary tables of positions first … stop − 1: in the first context those of windows, to the bit."""
        if stop <= self.context:
            cos, sin = self.model.rotary(self.context, self._ids.device, dtype)
            return cos[first:stop], sin[first:stop]
        return self._tables_of(torch.arange(first, stop), dtype)

    def _tables_of(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables of any positions, their angles in float64: a stream has millions of tokens."""
        return self.model.rotary.tables_of(positions, self.context, self._ids.device, dtype)
