"""Zero the cheapest symbols of magnitude one: a few bytes less, for a file that is a little over its cap.

Zeros are the commonest symbol, so each costs the coder least. Which ones go is decided for all tensors together, by
what the change costs: step², times the sensitivity's factors where they are known. Harmless for fewer than a tenth of
them, as the challenge's records found (selective pruning, parameter-golf's 2026-03-25 record and after).
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
    """`encoded` with the `count` cheapest symbols ±1 of its grids set to 0 (all of them if there are fewer).

    Ties go to the first in the order of names and then of rows. Other schemes stay as they are; nothing is changed in
    place.

    Raises:
        ConfigError: the count is negative, or a sensitivity is of another matrix.
    """
    if count < 0:
        raise ConfigError(f"{count} symbols cannot be pruned; give 0 or more")
    names = sorted(name for name, item in encoded.items() if item.scheme in PRUNED)
    costs = [_costs(name, encoded[name], (sensitivities or {}).get(name)) for name in names]
    sizes = [len(each[1]) for each in costs]
    everything = np.concatenate([each[1] for each in costs]) if costs else np.zeros(0)
    chosen = np.zeros(len(everything), np.bool_)
    chosen[np.argsort(everything, kind="stable")[:count]] = True
    out, start = dict(encoded), 0
    for name, (places, _), size in zip(names, costs, sizes, strict=True):
        symbols = encoded[name].streams[0].copy()
        symbols.reshape(-1)[places[chosen[start : start + size]]] = 0
        out[name] = replace(encoded[name], streams=(symbols, *encoded[name].streams[1:]))
        start += size
    return out


def _costs(name: str, item: Encoded, sensitivity: Sensitivity | None) -> tuple[np.ndarray, np.ndarray]:
    """(places of the symbols ±1 in row-major order, what each costs to zero)."""
    symbols, scales = item.streams
    places = np.flatnonzero(np.abs(symbols.reshape(-1)) == 1)
    row, column = np.divmod(places, symbols.shape[1])
    group = item.params[0] if item.params else symbols.shape[1]
    told = importance(name, sensitivity, *symbols.shape)
    step = scales_of(scales).astype(np.float64)[row, column // group]
    return places, step**2 * told.rows[row] * told.columns[column]
