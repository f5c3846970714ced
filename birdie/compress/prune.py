"""Selective pruning: zero the cheapest symbols ±1, to save a few bytes in a file that is a little over its budget.

Zeros are the most frequent symbol and cost the coder the fewest bits. The symbols are ranked over all tensors together
by the squared error of zeroing them, scale², times the factors of the sensitivity where they are known. The challenge's
records found it harmless for fewer than a tenth of the symbols (parameter-golf's 2026-03-25 record and after).

*Experimental.* It has shown no gain over a slightly larger scale, which does the same for a complete budget
(docs/schemes.md); the budget search lands within 0.1 % of the budget without it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from birdie.compress.importance import importance
from birdie.compress.log_scales import scales_of
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.errors import ConfigError

PRUNED = ("grid", "ternary")


def prune(
    encoded: Mapping[str, Encoded], count: int, *, sensitivities: Mapping[str, Sensitivity] | None = None
) -> dict[str, Encoded]:
    """Return `encoded` with the `count` cheapest symbols ±1 of its grids set to 0 (all of them if there are fewer).

    Of equal costs the first in the order of names, then rows, is taken. Tensors of other schemes are returned as they
    are; the arguments are not changed.
    """
    if count < 0:
        raise ConfigError(f"{count} symbols cannot be pruned; give 0 or more")
    names = sorted(name for name, item in encoded.items() if item.scheme in PRUNED)
    costs = [_costs(name, encoded[name], (sensitivities or {}).get(name)) for name in names]
    all_costs = np.concatenate([cost for _, cost in costs]) if costs else np.zeros(0)
    chosen = np.zeros(len(all_costs), np.bool_)
    chosen[np.argsort(all_costs, kind="stable")[:count]] = True
    out, start = dict(encoded), 0
    for name, (positions, _) in zip(names, costs, strict=True):
        symbols = encoded[name].streams[0].copy()
        symbols.reshape(-1)[positions[chosen[start : start + len(positions)]]] = 0
        out[name] = replace(encoded[name], streams=(symbols, *encoded[name].streams[1:]))
        start += len(positions)
    return out


def _costs(name: str, item: Encoded, sensitivity: Sensitivity | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (flat positions of the symbols ±1, weighted squared error of zeroing each)."""
    symbols, scales = item.streams
    positions = np.flatnonzero(np.abs(symbols.reshape(-1)) == 1)
    row, column = np.divmod(positions, symbols.shape[1])
    group_size = item.params[0] if item.params else symbols.shape[1]
    factors = importance(name, sensitivity, *symbols.shape)
    scale = scales_of(scales).astype(np.float64)[row, column // group_size]
    return positions, scale**2 * factors.rows[row] * factors.columns[column]
