"""Permutations of a GPT's units that do not change its function, for `compress.calibration.symmetry`.

In each block: hidden units of the MLP (`mlp.hidden_symmetry`), value channels within a head, query heads that share a
key–value head, and key–value heads together with their query heads. What a technique changes about this, it declares
(`technique`): rows per query head, layers whose values are added to one another and so share one order of channels.

A symmetry is a tuple of members (name, axis, block, start, stop), documented in
`birdie.compress.calibration.symmetry`.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.technique import Technique

Member = tuple[str | int, ...]
Symmetry = tuple[Member, ...]


class HeadSymmetries:
    """Symmetries of the attention heads of a GPT, given the declarations of its techniques.

    Args:
        techniques: that its modules list.
        names: of its parameters; declared rows that are not among them belong to techniques that are off.
    """

    def __init__(self, config: "GPTConfig", techniques: Sequence["Technique"], names: Iterable[str]) -> None:
        self._config, self._techniques, self._names = config, techniques, frozenset(names)
        self._groups = self._value_groups()

    def of_layer(self, layer: int) -> list[Symmetry]:
        """Return the symmetries whose first layer is `layer`; nothing is known of attention other than softmax."""
        if self._config.attention != "softmax":
            return []
        return [symmetry for group in self._groups if group[0] == layer for symmetry in self._of_group(group)]

    def _value_groups(self) -> list[list[int]]:
        """Return the layers, grouped by shared order of value channels; most layers are alone in their group."""
        groups = [{layer} for layer in range(self._config.num_layers)]
        for technique in self._techniques:
            joined = set(technique.joined_layers(self._config))
            touched = [group for group in groups if group & joined]
            if len(touched) > 1:
                groups = [group for group in groups if not group & joined] + [set().union(*touched)]
        return [sorted(group) for group in groups]

    def _of_group(self, layers: list[int]) -> list[Symmetry]:
        """Return the symmetries of layers that share one order of value channels."""
        config = self._config
        kv_heads, d = config.num_kv_heads, config.head_dim
        queries = config.num_heads // kv_heads
        shared_rows = [
            name
            for technique in self._techniques
            for name in technique.value_rows
            if name in self._names and set(technique.joined_layers(config)) & set(layers)
        ]
        symmetries: list[Symmetry] = []
        for kv_head in range(kv_heads):
            first, last = queries * kv_head, queries * (kv_head + 1)
            rows, columns = (d * kv_head, d * (kv_head + 1)), [(d * h, d * (h + 1)) for h in range(first, last)]
            producers: list[Member] = [(f"blocks.{i}.attn.c_v.weight", 0, 1, *rows) for i in layers]
            producers += [(name, 0, 1, *rows) for name in shared_rows]
            consumers: list[Member] = [
                (f"blocks.{i}.attn.proj.weight", 1, 1, *span) for i in layers for span in columns
            ]
            symmetries.append((*producers, *consumers))
            if queries > 1:
                symmetries += [self._query_heads(i, first, last) for i in layers]
        if kv_heads > 1:
            symmetries.append(self._kv_heads(layers, shared_rows))
        return symmetries

    def _query_heads(self, layer: int, first: int, last: int) -> Symmetry:
        """Return the symmetry of the query heads first … last − 1, which share one key–value head."""
        d = self._config.head_dim
        span = (d, d * first, d * last)
        q, out = (f"blocks.{layer}.attn.{name}.weight" for name in ("c_q", "proj"))
        return (q, 0, *span), (out, 1, *span), *((name, 0, 1, first, last) for name in self._query_head_rows(layer))

    def _kv_heads(self, layers: list[int], shared_rows: list[str]) -> Symmetry:
        """Return the symmetry of the key–value heads with their query heads, of layers that share value channels."""
        d = self._config.head_dim
        queries = self._config.num_heads // self._config.num_kv_heads
        members: list[Member] = [(name, 0, d) for name in shared_rows]
        for i in layers:
            q, k, v, out = (f"blocks.{i}.attn.{name}.weight" for name in ("c_q", "c_k", "c_v", "proj"))
            members += [(q, 0, d * queries), (k, 0, d), (v, 0, d), (out, 1, d * queries)]
            members += [(name, 0, queries) for name in self._query_head_rows(i)]
        return tuple(members)

    def _query_head_rows(self, layer: int) -> list[str]:
        """Return the parameters of a layer that have one row per query head."""
        rows = (f"blocks.{layer}.attn.{name}" for t in self._techniques for name in t.query_head_rows)
        return [name for name in rows if name in self._names]
