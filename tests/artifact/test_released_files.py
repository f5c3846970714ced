"""Every file that a released version wrote is read, and its tensors are the same, bit for bit.

    tests/golden/VERSION/NAME.birdie     files that this version wrote
    tests/golden/VERSION/digests.json    name → SHA-256 of the file, hash of its decoded tensors

A new version gets a folder of its own: raise the version, and run this test once with GENERATE_EXPECTED=1. A folder
that exists is never written again.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact import container
from birdie.artifact import save as saving
from birdie.artifact.codes import scheme_codes
from birdie.artifact.options import SaveOptions
from birdie.compress.row_blocks import row_blocks
from birdie.entropy import coder
from tests.artifact.states import fingerprint, small_model

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CURRENT = GOLDEN / birdie.__version__
BY_FORMAT = ("artifact", "spectral", "tucker")  # pinned by test_golden.py as well, whatever the version


def write_model(path: Path) -> None:
    saving.write_model(
        small_model(), path, SaveOptions(bits=4, metadata={"title": "a budget"}), files={"config.json": b"{}"}
    )


def write_fast(path: Path) -> None:
    signs = torch.randint(-1, 2, (256, 512), generator=torch.Generator().manual_seed(0))
    state = {"signs": signs.to(torch.int8), "numbers": torch.arange(4096) * 2654435761 % 65521}
    birdie.save(state, path, lossless=True, coder="fast")


def write_object(path: Path) -> None:
    weight = small_model()["blocks.0.w"]
    birdie.save_object({"model": {"w": weight.half()}, "step": 7, "order": ["a", (0.5, None)]}, path)


def write_blocks(path: Path) -> None:
    large = torch.zeros((1 << 13) + 1, 1 << 12, dtype=torch.int8)
    assert len(row_blocks(large)) > 1
    birdie.save({"large": large}, path, lossless=True)


def write_stack(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randint(-3, 4, (2, 256, 128), generator=generator) / 8 for name in ("experts", "lossless")}
    birdie.save(state, path, scheme=[("experts", "int4"), ("*", "lossless")], coder="fast")


def write_tiles(path: Path) -> None:
    signs = torch.randint(-1, 2, (1024, 64), generator=torch.Generator().manual_seed(0))
    birdie.save({"signs": signs.bfloat16()}, path, scheme=[("*", "ternary")], coder="fast")


WRITERS: dict[str, Callable[[Path], None]] = {
    "model": write_model,
    "fast": write_fast,
    "object": write_object,
    "blocks": write_blocks,
    "stack": write_stack,
    "tiles": write_tiles,
}


def generate(folder: Path) -> None:
    """Write the files of this version and their digests."""
    folder.mkdir()
    for name in BY_FORMAT:
        (folder / f"{name}.birdie").write_bytes(bytes.fromhex((GOLDEN / f"{name}.hex").read_text().split()[1]))
    for name, write in WRITERS.items():
        write(folder / f"{name}.birdie")
    rows = {path.name: digests(path) for path in sorted(folder.glob("*.birdie"))}
    (folder / "digests.json").write_text(json.dumps(rows, indent=1) + "\n")


def digests(path: Path) -> dict[str, str]:
    return {"file": hashlib.sha256(path.read_bytes()).hexdigest(), "tensors": fingerprint(birdie.load(path))}


if os.environ.get("GENERATE_EXPECTED") and not CURRENT.exists():
    generate(CURRENT)
FILES = sorted(GOLDEN.glob("*/*.birdie"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_a_released_version_decodes_to_the_tensors_that_it_had(path: Path) -> None:
    pinned: dict[str, Any] = json.loads((path.parent / "digests.json").read_text())
    assert digests(path) == pinned[path.name]
    assert [tensor.name for tensor in birdie.inspect(path).tensors] == sorted(birdie.load(path))


def test_every_released_version_and_this_one_have_files() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = set(re.findall(r"^## (\d+\.\d+\.\d+) – \d", changelog, re.MULTILINE))
    folders = {path.parent.name for path in FILES}
    assert released | {birdie.__version__} <= folders, "run this test once with GENERATE_EXPECTED=1"


def test_no_file_is_missing_and_none_is_without_digests() -> None:
    for folder in {path.parent for path in FILES}:
        assert set(json.loads((folder / "digests.json").read_text())) == {path.name for path in folder.glob("*.birdie")}


def test_the_files_of_this_version_have_every_scheme_and_every_coder() -> None:
    schemes, coders = set(), set()
    for path in CURRENT.glob("*.birdie"):
        reader = container.Reader(path.read_bytes())
        entries = [reader.read(name) for name in reader.names]
        schemes |= {entry.scheme for entry in entries}
        coders |= {stream.coder for entry in entries for stream in entry.streams}
        assert len(path.read_bytes()) < 1 << 16, "a golden file is small"
    assert schemes == {container.ALIAS, container.BLOCKS, *scheme_codes(())[0].values()}
    assert coders >= set(coder.NAMES) - {coder.LANES}, "nothing writes lanes any more"
