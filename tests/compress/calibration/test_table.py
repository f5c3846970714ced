"""The table of sensitivities has the increase of the loss by each matrix, quantized alone at so many bits."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration import table as table_module
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.table import SensitivityTable
from birdie.compress.registry import decode
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.tensors import finite_rows, rows_columns
from birdie.compress.trellis.feedback import feedback
from birdie.entropy import coder
from birdie.errors import ConfigError

AT = (2.0, 4.0)
Batch = tuple[Tensor, Tensor]


class Network(nn.Module):
    """An embedding, a convolution, a residual block and a head: matrices of very different sensitivity."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.convolution = nn.Conv1d(48, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.head = nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.relu(self.convolution(self.embedding(ids).transpose(1, 2))).transpose(1, 2)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def nats(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def mean_nats(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def squares(module: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(module(batch[0]), F.one_hot(batch[1], 32).float())


def draw(count: int, seed: int) -> list[Batch]:
    """Return batches whose labels follow from the mean of random vectors of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    ids = [torch.randint(0, 64, (256, 8), generator=generator) for _ in range(count)]
    return [(part, vectors[part].mean(1).argmax(1)) for part in ids]


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    module = Network()
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for batch in draw(30, seed=1):
        optimizer.zero_grad()
        mean_nats(module, batch).backward()
        optimizer.step()
    return module.requires_grad_(False)


@pytest.fixture(scope="module")
def table(network: Network) -> SensitivityTable:
    return birdie.sensitivity(network, draw(10, seed=2), nats, at=AT)


def test_each_matrix_is_quantized_alone_at_so_many_bits(network: Network, table: SensitivityTable) -> None:
    weights = network.state_dict()
    assert {row.name for row in table.rows} == {name for name in weights if name.endswith("weight")}
    assert [row.loss[2.0] for row in table.rows] == sorted((row.loss[2.0] for row in table.rows), reverse=True)
    result = CalibrationResult.of(weights, (network, draw(10, seed=2), nats), symmetries=False)
    assert result.held_out is not None
    for row in table.rows:
        weight = weights[row.name]
        factors = feedback(result.sensitivities[row.name], *rows_columns(tuple(weight.shape)))
        for bits in AT:
            scale = table_module._scale(finite_rows(row.name, weight), factors, bits)
            encoded = Trellis().encode_with(row.name, weight, factors, scale)
            coded = coder.encode(encoded.streams[0], effort="max").payload
            assert 8 * len(coded) / weight.numel() == pytest.approx(bits, abs=0.3)
            assert row.loss[bits] == result.held_out({**weights, row.name: decode(encoded)})


def test_a_bit_more_is_a_fourth_of_the_increase_whatever_the_reduction(network: Network) -> None:
    """Beyond the bits at which the entropy of a small matrix shows them, too."""
    one, other = (birdie.sensitivity(network, draw(4, seed=2), loss, at=(7, 9)) for loss in (nats, mean_nats))
    assert one.unit == other.unit == "nats of KL per target"
    by_name = {row.name: row.loss for row in other.rows}
    for row in one.rows:
        assert row.loss[7] == pytest.approx(16 * row.loss[9], rel=0.35)
        assert row.loss[7] == pytest.approx(by_name[row.name][7], rel=0.35)


def test_the_module_is_left_as_it_is(network: Network) -> None:
    kept = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    steps: list[tuple[float, float | None]] = []
    birdie.sensitivity(network, draw(5, seed=2), nats, at=AT, progress=lambda *step: steps.append(step))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in network.state_dict().items())
    assert steps == [(done, 5) for done in range(1, 6)]


def test_tied_matrices_are_one_row_and_unused_ones_are_listed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
            self.head.weight = self.embedding.weight
            self.mixed, self.spare = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embedding(ids) @ self.mixed)
            return logits

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(module(ids), ids)

    torch.manual_seed(0)
    table = birdie.sensitivity(Tied(), [torch.arange(96)] * 3, loss, at=(4,))
    assert sorted(row.name for row in table.rows) == ["embedding.weight", "mixed"]
    assert table.unmeasured == ("spare",)
    assert "not measured: spare" in str(table)


def test_the_table_is_text_json_and_an_image(table: SensitivityTable, tmp_path: Path) -> None:
    text = str(table)
    assert all(row.name in text and f"{row.weights:,}" in text for row in table.rows)
    content = json.loads(json.dumps(table.to_json()))
    assert [row["name"] for row in content["rows"]] == [row.name for row in table.rows]
    assert content["rows"][0]["loss"]["4"] == table.rows[0].loss[4.0]
    pytest.importorskip("matplotlib")
    for name, start in (("t.png", b"\x89PNG"), ("t.svg", b"<?xml")):
        table.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(ConfigError, match="birdie"):
        table.plot(tmp_path / "t.birdie")


def test_a_plot_without_matplotlib_is_one_sentence(
    table: SensitivityTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("birdie.system.figures.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        table.plot(tmp_path / "t.png")


@pytest.mark.parametrize("bits", [0, -1.0, 65])
def test_bits_out_of_range_are_refused(network: Network, bits: float) -> None:
    with pytest.raises(ConfigError, match="bits"):
        birdie.sensitivity(network, draw(2, seed=2), nats, at=(bits,))
