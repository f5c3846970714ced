"""Symbol sets: the steps, the clipping and the dtypes are those that each set's name promises."""

from pathlib import Path
from zlib import compress

import numpy as np
import pytest
import torch

from benchmarks import symbols
from birdie.errors import WeightsError
from tests.benchmarks.small_checkpoint import MIXED, state


def test_uniform_has_one_step_per_tensor_and_an_error_of_half_a_step_at_most() -> None:
    weights = state()
    quantized = symbols.uniform(weights)
    assert set(quantized.tensors) == {"tok_emb.weight", "fc.weight", "conv.weight"}
    for name, tensor in quantized.tensors.items():
        step = quantized.steps[name]
        assert step.ndim == 0
        assert step.item() == pytest.approx(0.41 * weights[name].double().std(correction=0).item(), rel=1e-5)
        assert ((tensor.double() * step.double() - weights[name].double()).abs() <= 0.5001 * step.double()).all()


def test_row_maximum_has_31_as_the_largest_magnitude_of_every_row() -> None:
    quantized = symbols.rowmax6(state())
    largest = quantized.tensors["fc.weight"].abs().amax(1)
    assert largest[3] == 0
    assert (torch.cat([largest[:3], largest[4:]]) == 31).all()
    assert quantized.tensors["conv.weight"].shape == (8, 4, 3, 3)


def test_sdclip_clips_by_standard_deviation_and_embeddings_have_more_levels() -> None:
    weights = state()
    weights["fc.weight"][5, 7] = 1e3
    quantized = symbols.sdclip6(weights)
    rows = weights["fc.weight"]
    expected = (12.85 * rows.std(1, correction=0) / 31).half()
    assert torch.equal(quantized.steps["fc.weight"][4], expected[4])
    assert quantized.tensors["fc.weight"].abs().max() <= 31
    rounded = quantized.tensors["tok_emb.weight"].float().std(1, correction=0)
    assert torch.allclose(rounded, torch.full((64,), 127 / 20), rtol=0.05)


def test_resnet_grid_is_nncodecs() -> None:
    assert symbols.nnc_step(-32, 2) == 2.0**-8
    assert symbols.nnc_step(-31, 2) == 5 * 2.0**-10
    assert symbols.nnc_step(0, 2) == 1.0
    weights = state()
    quantized = symbols.resnet(weights)
    assert quantized.tensors["conv.weight"].dtype == torch.int16
    assert quantized.tensors["fc.weight"].abs().max() == torch.round(weights["fc.weight"].double() * 256).abs().max()


def test_floats_are_unchanged_or_cast() -> None:
    weights = state()
    assert all(torch.equal(symbols.fp32(weights).tensors[name], weight) for name, weight in weights.items())
    cast = symbols.bf16(weights)
    assert {tensor.dtype for tensor in cast.tensors.values()} == {torch.bfloat16}
    assert not cast.is_integer
    assert cast.bytes == 2 * cast.symbols


def test_stored_integers_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    torch.save({**MIXED, "scale": torch.ones(3)}, tmp_path / "plain.pt")
    torch.save({"quantized": MIXED, "scales": {"a": torch.ones(2)}}, tmp_path / "challenge")
    (tmp_path / "challenge.ptz").write_bytes(compress((tmp_path / "challenge").read_bytes()))
    for name in ("plain.pt", "challenge.ptz"):
        stored = symbols.make("auto", tmp_path / name)
        assert stored.name == "stored"
        assert {key: value.tolist() for key, value in stored.tensors.items()} == {
            key: value.tolist() for key, value in MIXED.items()
        }
    torch.save(state(), tmp_path / "floats.pt")
    assert symbols.make("auto", tmp_path / "floats.pt").name == "bf16"
    with pytest.raises(WeightsError, match="no tensor"):
        symbols.make("stored", tmp_path / "floats.pt")


def test_llama2c_files_are_divided_into_layers(tmp_path: Path) -> None:
    dim, hidden, layers, heads, kv_heads, vocabulary, length = 8, 16, 2, 4, 2, 10, 6
    sizes = vocabulary * dim + 2 * layers * dim + 2 * layers * dim * dim + 2 * layers * dim * dim // 2
    sizes += 3 * layers * dim * hidden + dim + 2 * length * (dim // heads // 2)
    header = np.array([dim, hidden, layers, heads, kv_heads, vocabulary, length], "<i4").tobytes()
    values = np.arange(sizes, dtype="<f4")
    (tmp_path / "model.bin").write_bytes(header + values.tobytes())
    floats = symbols.floats(tmp_path / "model.bin")
    assert torch.cat([tensor.reshape(-1) for tensor in floats.values()]).sort().values.tolist() == values.tolist()
    assert floats["layers.1.wk.weight"].shape == (dim // heads * kv_heads, dim)
    (tmp_path / "truncated.bin").write_bytes(header + values[:-1].tobytes())
    assert symbols.read_llama2c(tmp_path / "truncated.bin") is None
