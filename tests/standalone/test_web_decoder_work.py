"""The work of the decoder, in C and in JavaScript, grows with a file, not with its square: counted, not timed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from birdie.artifact.container import ALIAS, BLOCKS, MEMBER, Entry, Stream, block_name, to_bytes
from birdie.standalone import DECODER, PROGRAM

HERE = Path(__file__).parent
C = PROGRAM.parents[1] / "c"
UINT8, LOSSLESS = 1, 1
ZEROS = (Stream(0, b""),)
FEW, TIMES = 1000, 4


def tensors(count: int) -> list[Entry]:
    return [Entry(f"layers.{i}.norm", LOSSLESS, UINT8, (1,), (), ZEROS) for i in range(count)]


def members(count: int) -> list[Entry]:
    group = Entry("\0group", LOSSLESS, UINT8, (count,), (), ZEROS)
    return [group, *(Entry(f"m{i:06}", 0, UINT8, (1,), target="\0group", kind=MEMBER) for i in range(count))]


def aliases(count: int) -> list[Entry]:
    stored = Entry("stored", LOSSLESS, UINT8, (1,), (), ZEROS)
    return [stored, *(Entry(f"m{i:06}", 0, UINT8, (1,), target="stored", kind=ALIAS) for i in range(count))]


def blocks(count: int) -> list[Entry]:
    cut = Entry("w", 0, UINT8, (count, 1), kind=BLOCKS)
    return [cut, *(Entry(block_name("w", i), LOSSLESS, UINT8, (1, 1), (), ZEROS) for i in range(count))]


def nothing(_: int) -> list[Entry]:
    return tensors(1)


FILES: dict[str, tuple[Callable[[int], list[Entry]], Callable[[int], object]]] = {
    "tensors": (tensors, lambda _: {}),
    "members": (members, lambda _: {}),
    "aliases": (aliases, lambda count: {"copies": [*range(count)]}),
    "blocks": (blocks, lambda _: {}),
    "order": (tensors, lambda count: {"order": ["", [1] * (count - 1)]}),
    "order of parts": (tensors, lambda count: {"order": [".", [], [1] * (count - 1)]}),
    "metadata": (nothing, lambda count: {"metadata": {f"key {i}": [i, 0.5, "text"] for i in range(count)}}),
    "text": (nothing, lambda count: {"metadata": {"a": "\\" * count}}),
    "extra states": (nothing, lambda count: {"state": {"extra": {f"{i}": 1 for i in range(count)}}}),
    "tree": (nothing, lambda count: {"tree": ["list", *[["tuple"]] * count]}),
}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that counts the work of birdie.c."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("work")
    compiled = [
        "cc",
        "-O1",
        "-ffp-contract=off",
        "-fsanitize-coverage=trace-pc",
        "-c",
        str(C / "birdie.c"),
        "-o",
        "birdie.o",
    ]
    linked = ["cc", f"-I{C}", str(HERE / "count_work.c"), "birdie.o", "-o", "count"]
    for command in compiled, linked:
        subprocess.run(command, cwd=folder, check=True)
    return [str(folder / "count")]


@pytest.fixture(scope="module")
def in_javascript() -> list[str]:
    """The command that counts the work of decoder.js."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    return ["node", str(HERE / "count_work.mjs"), str(DECODER), str(PROGRAM)]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("part", ["in_c", "in_javascript"])
def test_four_times_as_much_takes_about_four_times_the_work(
    kind: str, part: str, request: pytest.FixtureRequest
) -> None:
    command = request.getfixturevalue(part)
    entries, fields = FILES[kind]
    few, many = (
        int(subprocess.run(command, input=data, capture_output=True, check=True).stdout)
        for data in (to_bytes(entries(count), json.dumps(fields(count)).encode()) for count in (FEW, TIMES * FEW))
    )
    assert few > 0
    assert many < 1.3 * TIMES * few
