"""Entry module of the pair, a one-file exporter and loader for training scripts without birdie.

    state dict ──export──► model.birdie ──load──► name → tensor          code + artifact ≤ budget

The file is this module and the modules that it imports (golf/packed_script.py). Tensors are encoded and decoded by the
functions that `birdie.save` and `birdie.load` call, so files and values are the same.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from birdie.artifact import container
from birdie.artifact.write import Beside
from birdie.checkpoints.stored_order import order_field
from birdie.compress.calibration.result import calibrated_state, require_triple
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.fit import fit
from birdie.compress.rate.target import Target
from birdie.compress.state import ModelState, keys_of
from birdie.compress.tensors import has_nonfinite
from birdie.errors import ArtifactError, BirdieError, BudgetError, ConfigError, DataError, OutputError, WeightsError
from birdie.standalone.decoder import load
from birdie.system.outputs import require_path
from birdie.system.parsing import whole_number
from birdie.system.provenance import __version__

__all__ = [
    "ArtifactError", "BirdieError", "BudgetError", "ConfigError", "DataError", "OutputError", "WeightsError",
    "__version__", "export", "load",
]  # fmt: skip

Source = str | os.PathLike[str]

CODE: list[Source] = []
"""Files that count as code besides the running script: the packed file adds itself."""


def export(
    state: Mapping[str, Tensor],
    budget: int,
    path: Source = "model.birdie",
    *,
    code: Iterable[Source] | None = None,
    calibration: tuple[Any, Any, Any] | None = None,
) -> int:
    """Compress a state dict into a file, so that code and file together have at most `budget` bytes.

    Args:
        state: name → tensor; never changed.
        budget: bytes that code and file may have together.
        path: the file to write; it appears complete or not at all.
        code: the files that count as code; None: the running script and this file.
        calibration: (module, batches, loss): the module whose weights these are, tens of thousands of tokens in
            batches, and loss(module, batch) → a number that can be differentiated; precision then follows the
            sensitivity of the loss.

    Returns:
        Bytes of the file.
    """
    if calibration is not None:
        require_triple(calibration)
    require_path(path)
    used = _code_bytes(budget, code)
    model = ModelState.of(state)
    target, fields = Target(budget - used), {"budget": int(budget - used), "order": order_field(keys_of(state))}
    for name, weight in model.tensors.items():
        if has_nonfinite(weight) and name not in model.exact:
            raise WeightsError(f"tensor {name!r} holds NaN or infinite values; export weights that are finite")
    model, calibrated = calibrated_state(model, calibration, symmetries=False)
    beside = Beside(fields)
    try:
        encoder = Encoder("max", beside.size, keeps_integers=calibrated is not None)
        encoded = fit(assign(model, None, target), target, encoder, calibrated).encoded
    except BudgetError as error:
        raise BudgetError(f"{error} (of a budget of {budget:,} bytes the code takes {used:,})") from None
    data = container.to_bytes(*beside.content(encoded))
    _write(Path(path), data)
    return len(data)


def _code_bytes(budget: Any, code: Iterable[Source] | None) -> int:
    """Return the bytes of the code, which are fewer than the budget."""
    if whole_number("budget", budget) is None:
        raise ConfigError("the budget is None; give the bytes that code and model may have together")
    if code is None:
        code = [*filter(None, [getattr(sys.modules["__main__"], "__file__", None)]), *CODE]
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
