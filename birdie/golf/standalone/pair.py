"""Entry module of the pair, a one-file exporter and loader for training scripts without birdie.

    state dict ──export──► model.birdie ──load──► name → tensor          code + artifact ≤ budget

`birdie.golf.pair` cuts the file out of birdie: this module and what it needs. Tensors are encoded and decoded by the
functions that `birdie.save` and `birdie.load` call, so files and values are the same.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor

from birdie.artifact.container import Entry, Reader
from birdie.artifact.decoding import decode_all, require_limits, stored_name
from birdie.artifact.writer import Meter, Writer
from birdie.compress.calibration.result import calibrated_state, require_triple
from birdie.compress.prior import assumed
from birdie.compress.rate.allocation import Hooks
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.encoding import encode_state
from birdie.compress.rate.target import Target, whole_number
from birdie.compress.scheme import Decoder
from birdie.compress.schemes import cast, grid, lossless, trellis
from birdie.compress.state import ModelState
from birdie.compress.tensors import has_nonfinite
from birdie.errors import ArtifactError, BudgetError, ConfigError, OutputError, WeightsError
from birdie.runtime.outputs import require_path

Source = str | os.PathLike[str]
DEFAULT = None  # no rule names a scheme

# The schemes that a search for a budget chooses from, in the order of their codes in the file, from 1.
DECODERS: dict[str, Decoder] = {
    "lossless": lossless.DECODER,
    "grid": grid.DECODER,
    "cast": cast.DECODER,
    "trellis": trellis.DECODER,
}


def export(
    state: Mapping[str, Tensor], budget: int, path: Source = "model.birdie", *, code: Iterable[Source] | None = None
) -> int:
    """Compress a state dict into a file, so that code and file together have at most `budget` bytes.

    Args:
        state: name → tensor; never changed.
        budget: bytes that code and file may have together.
        path: the file to write; it appears complete or not at all.
        code: the files that count as code; None: the running script and this file.

    Returns:
        Bytes of the file.

    Raises:
        ConfigError: the budget is no positive int.
        WeightsError: `state` is no dict of tensors, or one of them holds NaN or infinite values.
        BudgetError: the code alone, or with the smallest file, has more bytes.
        OutputError: the file cannot be written, or a file of the code cannot be read.
    """
    return _export(state, budget, path, code, None)


def export_calibrated(
    state: Mapping[str, Tensor],
    budget: int,
    path: Source = "model.birdie",
    *,
    code: Iterable[Source] | None = None,
    calibration: tuple[Any, Any, Any] | None = None,
) -> int:
    """Compress as `export`; with calibration, precision follows the sensitivity of the loss.

    Args:
        state, budget, path, code: as in `export`.
        calibration: (module, batches, loss): the module whose weights these are, tens of thousands of tokens in
            batches, and loss(module, batch) → a number that can be differentiated.

    Raises:
        ConfigError, WeightsError, BudgetError, OutputError: as `export`, or the calibration does not fit.
        DataError: there are no batches, or activations are not finite.
    """
    if calibration is not None:
        require_triple(calibration)
    return _export(state, budget, path, code, calibration)


def _export(state: Any, budget: int, path: Source, code: Iterable[Source] | None, calibration: Any) -> int:
    require_path(path)
    used = _code_bytes(budget, code)
    target, fields = Target(budget - used), dict(budget=int(budget - used))  # noqa: C408 (minifiers keep keywords)
    model = ModelState.of(state)
    for name, weight in model.tensors.items():
        if has_nonfinite(weight) and name not in model.exact:
            raise WeightsError(f"tensor {name!r} holds NaN or infinite values; export weights that are finite")
    model, calibrated = calibrated_state(model, calibration, symmetries=False)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        writer = Writer(pool, "max", fields, Meter(None))
        try:
            encoded = encode_state(
                assign(model, None, target),
                target,
                writer.size,
                rough=writer.estimate,
                calibration=calibrated,
                hooks=Hooks(writer.coded, writer.estimated) if calibrated is None else None,
            )
        except BudgetError as error:
            raise BudgetError(f"{error} (of a budget of {budget:,} bytes the code takes {used:,})") from None
        data = writer.to_bytes(encoded)
    _write(Path(path), data)
    return len(data)


def _code_bytes(budget: Any, code: Iterable[Source] | None) -> int:
    """Return the bytes of the code, which are fewer than the budget."""
    if whole_number("budget", budget) is None:
        raise ConfigError("the budget is None; give the bytes that code and model may have together")
    if code is None:
        code = [getattr(sys.modules["__main__"], "__file__", None) or __file__, __file__]
    try:
        used = sum(path.stat().st_size for path in {Path(file).resolve() for file in code})
    except OSError as error:
        raise OutputError(f"cannot count the code: {error}; give its files as code=[…]") from error
    if used >= budget:
        raise BudgetError(f"budget {budget:,} bytes cannot be met: the code alone takes {used:,} bytes; allow more")
    return used


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".birdie-", dir=path.parent) as folder:
            temporary = Path(folder, "new")
            temporary.write_bytes(data)
            temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}; choose another file") from error


def load(path: Source | bytes) -> dict[str, Tensor]:
    """Decode a file.

    Args:
        path: of the file, or its bytes.

    Returns:
        name → tensor on the CPU; tied names share one tensor.

    Raises:
        ArtifactError: the file is missing, damaged, or uses a scheme that `export` does not.
    """
    with Reader(path) as reader:
        require_limits(reader, decoder_of, None, shared=True)
        tensors = decode_all(reader, decoder_of, os.cpu_count() or 1)
        return {name: tensors[stored_name(reader, name)] for name in reader.names}


def decoder_of(entry: Entry) -> Decoder:
    """Return the decoder of an entry.

    Raises:
        ArtifactError: `export` writes no such scheme.
    """
    if not 0 < entry.scheme <= len(DECODERS):
        raise ArtifactError(f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown here; load it with birdie")
    return [*DECODERS.values()][entry.scheme - 1]


def decoder(name: str) -> Decoder:
    """Return the decoder of a scheme, in place of `birdie.compress.registry.decoder`."""
    return DECODERS[name]


def scheme_codes(_: object) -> tuple[dict[str, int], dict[str, str]]:
    """Return name → code, and no foreign schemes, in place of `birdie.artifact.codes.scheme_codes`."""
    return {name: code for code, name in enumerate(DECODERS, 1)}, {}


def no_rules(_: object) -> tuple[None, list[Any]]:
    """Return that there are no rules, in place of `birdie.compress.rate.assignment.parse_rules`."""
    return None, []


def no_matches(*_: object) -> dict[str, Any]:
    """Return that no rule matches, in place of `birdie.compress.rate.assignment.match`."""
    return {}


def no_transform(*_: object, **__: object) -> SimpleNamespace:
    """Return the transform that changes nothing, in place of `birdie.compress.schemes.spectral.best_transform`."""
    return SimpleNamespace(kind="identity")


def not_calibrated(state: ModelState, *_: object, **__: object) -> tuple[ModelState, None]:
    """Return a state without calibration, in place of `calibrated_state`."""
    return state, None


def factors_of(allocation: Any, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Return all factors in memory, in place of `birdie.compress.rate.allocation.factors_of`."""
    names, known = allocation.matrices, allocation.sensitivities
    known = assumed(known, names) | known
    return dict(zip(names, pool.map(lambda name: allocation.compute_factors(name, known[name]), names), strict=True))


def no_gpu(*_: object) -> bool:
    """Return that no kernel quantizes a tensor, in place of `birdie.compress.device.encoding.searches`."""
    return False


def left_out(*_: object, **__: object) -> NoReturn:
    """Raise ConfigError, in place of functions that no export calls."""
    raise ConfigError("this file cannot do that; use birdie")
