"""Packed files: Python that defines what its source defines, and whose tracebacks print no packed line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birdie.golf.standalone import pack


@pytest.mark.parametrize("seed", range(4))
def test_packing_keeps_every_byte_of_a_source(seed: int, tmp_path: Path) -> None:
    noise = np.random.default_rng(seed).integers(0, 10**9, 400 << seed).tolist()
    source = f"X={noise}\ndef fail():\n raise ValueError('{seed}')\n"
    forms = pack.forms(source, "noise")
    assert pack.pack(source, "noise") == min(forms.values(), key=len)
    path = tmp_path / "packed.py"
    for data in forms.values():
        path.write_bytes(data)
        space: dict[str, Any] = {"__file__": str(path)}
        exec(compile(path.read_bytes(), str(path), "exec"), space)
        assert space["X"] == noise
        assert path.read_bytes().count(b"\n") == 2
        with pytest.raises(ValueError, match=str(seed)) as error:
            space["fail"]()
        assert error.traceback[-1].lineno > 2  # beyond the packed file's lines: no traceback prints one of them
