"""Large tensors in blocks of rows: readers of a file see complete tensors, and damaged blocks are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import birdie
from birdie.artifact import container
from birdie.artifact.container import BLOCKS, Entry, Reader, Stream, block_name
from birdie.artifact.safetensors_export import to_safetensors
from birdie.compress import row_blocks
from birdie.entropy import trellis_states as trellis
from birdie.errors import ArtifactError
from birdie.standalone import decoder
from tests.artifact.states import decode_tensor
from tests.nightly import mostly_nightly

COLUMNS = 256


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors of more than 256 rows into blocks of that many: a chunk of the coder, which is smaller, too."""
    monkeypatch.setattr(trellis, "CHUNK", 256 * COLUMNS)
    monkeypatch.setattr(row_blocks, "LARGE", 256 * COLUMNS)
    monkeypatch.setattr(row_blocks, "_BLOCK", 256 * COLUMNS)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(600, COLUMNS, generator=generator)
    return {
        "large": large.bfloat16(),
        "tied": (ints := torch.randint(-3, 4, (520, COLUMNS), generator=generator, dtype=torch.int8)),
        "twin": ints,
        "small": torch.randn(64, 64, generator=generator),
    }


SETTINGS: list[dict[str, Any]] = [
    *({"bits": 4.0}, {"lossless": True}, {"scheme": "int6"}, {"scheme": "bf16"}, {"effort": "max"})
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("settings", mostly_nightly(SETTINGS, [{"lossless": True}, {"scheme": "int6"}]), ids=str)
def test_a_file_of_blocks_reads_like_one_without(
    settings: dict[str, object], state: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "x.birdie"
    summary = birdie.save(state, path, **settings)  # type: ignore[arg-type]
    with Reader(path) as reader:
        assert reader.names == tuple(sorted(state))
        assert reader.entry("large").kind == BLOCKS
        assert [reader.entry(name).shape[0] for name in reader.blocks("large")] == [256, 344]
        assert reader.blocks("small") == ("small",)
        assert sum(reader.table().values()) + reader.header_bytes == reader.size
    rows = {row.name: row for row in summary.tensors}
    assert rows["large"].shape == (600, COLUMNS)
    assert "blocks" not in {row.scheme for row in summary.tensors}
    loaded = birdie.load(path)
    assert loaded["tied"] is loaded["twin"]
    assert torch.equal(loaded["tied"], state["tied"])
    error = (loaded["large"].float() - state["large"].float()).norm() / state["large"].float().norm()
    assert error < 0.12
    assert error == 0 or not settings.get("lossless")
    assert torch.equal(decode_tensor(path, "large"), loaded["large"])
    to_safetensors(path, tmp_path / "x.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in load_file(tmp_path / "x.safetensors").items())


@pytest.mark.usefixtures("small_blocks")
def test_the_bytes_of_tensors_depend_on_neither_threads_nor_the_order(state: dict[str, Tensor], tmp_path: Path) -> None:
    files = []
    for index, names in enumerate((list(state), list(reversed(state)))):
        birdie.save({name: state[name] for name in names}, tmp_path / "x.birdie", scheme="int4", workers=index + 1)
        with Reader(tmp_path / "x.birdie") as reader:
            files.append([reader.read(name) for name in reader.entries])
    assert files[0] == files[1]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("settings", mostly_nightly(SETTINGS[1:4], [{"scheme": "bf16"}]), ids=str)
def test_a_long_vector_is_cut_where_its_numbers_are_kept(settings: dict[str, Any], tmp_path: Path) -> None:
    """As in the state of optimizers and of sharded models."""
    vector = torch.randn(600 * COLUMNS, generator=torch.Generator().manual_seed(0))
    matrix = vector[: 64 * COLUMNS].view(64, COLUMNS)
    birdie.save({"vector": vector, "matrix": matrix.clone()}, tmp_path / "x", **settings)
    with Reader(tmp_path / "x") as reader:
        shapes = [reader.entry(name).shape for name in reader.blocks("vector")]
    assert shapes == [(256 * COLUMNS,), (256 * COLUMNS,), (88 * COLUMNS,)]
    loaded = birdie.load(tmp_path / "x")["vector"]
    assert loaded.shape == vector.shape
    assert torch.equal(loaded, vector) if settings.get("lossless") else torch.allclose(loaded, vector, rtol=0.01)


@pytest.mark.usefixtures("small_blocks")
def test_a_module_loads_lazily(tmp_path: Path) -> None:
    module = nn.Linear(COLUMNS, 600, bias=False)
    birdie.save(module, tmp_path / "x.birdie")
    x = torch.randn(2, COLUMNS)
    lazy = birdie.load(tmp_path / "x.birdie", into=nn.Linear(COLUMNS, 600, bias=False, device="meta"), lazy=True)
    eager = birdie.load(tmp_path / "x.birdie", into=module)
    assert torch.equal(lazy(x), eager(x))


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_the_one_file_decoder_reads_them(state: dict[str, Tensor], tmp_path: Path) -> None:
    birdie.save(state, tmp_path / "x.birdie", bits=4.0)
    decoded = decoder.load(tmp_path / "x.birdie")
    assert all(torch.equal(tensor, decoded[name]) for name, tensor in birdie.load(tmp_path / "x.birdie").items())


def entries(*heights: int, shape: tuple[int, ...] = (5, 3)) -> list[Entry]:
    """Return a tensor of int8 whose blocks have these heights."""
    blocks = [
        Entry(block_name("w", index), 1, 2, (height, 3), (), (Stream(1, bytes(3 * height)),))
        for index, height in enumerate(heights)
    ]
    return [Entry("w", 0, 2, shape, kind=BLOCKS), *blocks]


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 3), (3, 2, 3), (1, 6, 3), (3, 1, 2, 3)])
def test_blocks_are_put_together(shape: tuple[int, ...], tmp_path: Path) -> None:
    container.write(tmp_path / "x.birdie", entries(2, 4, shape=shape))
    assert torch.equal(birdie.load(tmp_path / "x.birdie")["w"], torch.zeros(shape, dtype=torch.int8))
    assert torch.equal(decode_tensor(tmp_path / "x.birdie", "w"), torch.zeros(shape, dtype=torch.int8))


@pytest.mark.parametrize(
    "damaged",
    [
        entries(),
        entries(2, 2),
        entries(2, 3, 1),
        entries(5, 0),
        entries(2, 3)[:2],
        [entries(2, 3)[0], entries(2, 3)[2]],
        entries(2, 3, shape=(5, 4)),
        entries(2, 3, shape=()),
        entries(2, 3, shape=(3, 5)),
        entries(2, 3, shape=(14,)),
        entries(2, 3, shape=(5, 3, 1)),
        entries(2, 3, shape=(5, 2, 3)),
        [*entries(2, 3)[:2], Entry(block_name("w", 1), 1, 2, ())],
        [*entries(2, 3)[:2], Entry(block_name("w", 1), 1, 3, (3, 3), (), (Stream(1, bytes(9)),))],
        [*entries(2, 3)[:2], Entry(block_name("w", 1), 0, 2, (3, 3), kind=BLOCKS)],
    ],
)
def test_blocks_that_do_not_make_up_a_tensor_are_refused(damaged: list[Entry], tmp_path: Path) -> None:
    container.write(tmp_path / "x.birdie", damaged)
    with pytest.raises(ArtifactError):
        birdie.load(tmp_path / "x.birdie")


def test_a_block_without_a_tensor_is_ignored(tmp_path: Path) -> None:
    container.write(tmp_path / "x.birdie", [*entries(2, 3), Entry(block_name("v", 0), 1, 2, (0, 3))])
    assert birdie.load(tmp_path / "x.birdie").keys() == {"w"}


def test_an_alias_is_no_block(tmp_path: Path) -> None:
    damaged = entries(2, 3)
    damaged[1] = Entry(block_name("w", 0), 0, 2, (2, 3), target="v", kind=container.ALIAS)
    container.write(tmp_path / "x.birdie", [*damaged, Entry("v", 1, 2, (2, 3), (), (Stream(1, bytes(6)),))])
    with pytest.raises(ArtifactError):
        birdie.load(tmp_path / "x.birdie")
