"""A GPT under the contract of `scorer`: what the batched ways of scoring are held against, and what an audit probes.

`WindowScorer` passes the whole window for each target, so it is slow; `StreamScorer` keeps keys and values. Both say,
for each target, what `forward.score_windows` and `stream.score_stream` charge it by.
"""

from functools import partial

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.cache import Cache
from birdie.model.gpt import GPT


class WindowScorer:
    """Sliding windows; with stride = length windows end to end.

    Args:
        model: in evaluation mode.
        length, stride: as `windows.sliding` has them.
        bos_id: what windows begin anew with; None: nothing does.
        temperature: divides the logits.

    Raises:
        ConfigError: the stride is not from 1 to the length.
    """

    def __init__(
        self, model: GPT, length: int, stride: int, *, bos_id: int | None = None, temperature: float = 1.0
    ) -> None:
        if not 1 <= stride <= length:
            raise ConfigError(f"stride {stride} does not fit windows of {length} tokens; give 1 to {length}")
        self._model, self._length, self._stride = model, length, stride
        self._bos_id, self._temperature = bos_id, temperature
        self._seen: list[int] = []

    def predict(self) -> Tensor:
        """Log-probabilities of the next token, (V,) float32."""
        window = self._seen[self._begin() :]
        ids = torch.tensor([window], device=self._model.tok_emb.weight.device)
        with torch.inference_mode(), self._model.rotary.base_for_length(self._length):
            logits: Tensor = self._model(ids, last_n=1)[0, -1] / self._temperature
            return logits.log_softmax(0).cpu()

    def reveal(self, token: int) -> None:
        """The next token is this."""
        if token == self._bos_id:
            self._seen.clear()
        self._seen.append(token)

    def _begin(self) -> int:
        """Where the window that scores the next target begins."""
        over = len(self._seen) - self._length
        return max(0, -(-over // self._stride)) * self._stride


class StreamScorer:
    """A rolling cache whose context moves on by `chunk` tokens.

    Args:
        model: in evaluation mode.
        context, chunk, sinks, kv_bits: as `birdie.model.cache.Cache` has them.
        bos_id: what the stream begins anew with; None: nothing does.
        temperature: divides the logits.
    """

    def __init__(
        self,
        model: GPT,
        context: int,
        chunk: int,
        *,
        sinks: int = 0,
        kv_bits: int = 0,
        bos_id: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self._new = partial(Cache, model, 1, context, chunk=chunk, sinks=sinks, kv_bits=kv_bits)
        self._cache, self._bos_id = self._new(), bos_id
        self._device, self._temperature = model.tok_emb.weight.device, temperature
        self._said: Tensor | None = None

    def predict(self) -> Tensor:
        """Log-probabilities of the next token, (V,) float32."""
        assert self._said is not None  # a stream's first token is revealed, not predicted
        return self._said

    def reveal(self, token: int) -> None:
        """The next token is this."""
        if token == self._bos_id and self._cache.position:
            self._cache = self._new()
        logits = self._cache(torch.tensor([[token]], device=self._device))[0, -1]
        self._said = (logits / self._temperature).log_softmax(0).cpu()
