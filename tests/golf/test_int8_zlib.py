"""The challenge's int8+zlib export: its arithmetic, its floor, and its files."""

import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.checkpoints.int8_export import dequantize
from birdie.errors import ConfigError, WeightsError
from birdie.golf.int8_zlib import pack, unpack

LIMIT = 1 << 26


def opened(blob: bytes) -> dict[str, Any]:
    """The dict inside an export, without the code under test."""
    content: dict[str, Any] = torch.load(io.BytesIO(zlib.decompress(blob)), map_location="cpu", weights_only=True)
    return content


def state() -> dict[str, torch.Tensor]:
    """A matrix over 65,536 elements in two blocks, a vector that large, and what is kept as it is."""
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.w": torch.randn(300, 256, generator=generator) * 3,
        "blocks.3.w": torch.randn(300, 256, generator=generator).bfloat16(),
        "long": torch.randn(70_000, generator=generator),
        "small": torch.randn(20, 20, generator=generator),
        "blocks.0.attn_scale": torch.randn(33, generator=generator).bfloat16(),
        "count": torch.tensor(3),
    }


def test_rows_are_within_half_a_step_and_the_rest_is_kept() -> None:
    weights = state()
    decoded = unpack(pack(weights).blob, LIMIT)
    assert decoded.keys() == weights.keys()
    wide = weights["blocks.0.w"]
    step = (wide.abs().amax(1, keepdim=True) / 127).clamp_min(1 / 127)
    assert bool(((decoded["blocks.0.w"] - wide).abs() <= step * 0.56).all())
    assert torch.equal(decoded["small"], weights["small"].half().float())
    assert torch.equal(decoded["blocks.0.attn_scale"], weights["blocks.0.attn_scale"].float())
    assert torch.equal(decoded["count"], weights["count"])
    assert decoded["blocks.3.w"].dtype == torch.bfloat16


def test_the_floor_of_the_scale_is_one_over_127() -> None:
    """Rows far below one are rounded in steps of 1/127: a quirk of the original that scores depend on."""
    weights = {"w": torch.full((300, 256), 0.003)}
    assert not unpack(pack(weights).blob, LIMIT)["w"].any()


def test_int4_step_rounds_only_the_layers_listed() -> None:
    content = opened(pack(state(), int4_layers=[3], int4_step=4).blob)
    touched, other = content["quantized"]["blocks.3.w"].int(), content["quantized"]["blocks.0.w"].int()
    assert bool((((touched % 4) == 0) | (touched.abs() == 127)).all())
    assert bool((other % 4 != 0).any())
    with pytest.raises(ConfigError, match="INT4_STEP=0"):
        pack(state(), int4_step=0)


def test_hostile_exports_are_refused() -> None:
    blob = pack(state()).blob
    with pytest.raises(WeightsError, match="more than 1,000"):
        unpack(blob, 1000)
    for damaged in (b"", b"x" * 100, blob[:100], zlib.compress(b"not torch")):
        with pytest.raises(WeightsError):
            unpack(damaged, LIMIT)
    for content in ({}, {"__quant_format__": "int8_clean_per_row_v1", "quantized": {"a": 1}}, [1]):
        with pytest.raises(WeightsError):
            dequantize(content)
    with pytest.raises(WeightsError, match="'w'"):
        pack({"w": torch.full((300, 256), float("nan"))})


def test_the_challenges_own_file_is_reproduced(shared_data: Path) -> None:
    """Quantizing the float weights of a run gives the symbols and scales that its own export holds."""
    folder = shared_data / "weights/parameter_golf"
    weights = torch.load(folder / "nolanvild_128d_fp32.pt", map_location="cpu", weights_only=True)
    theirs = opened((folder / "nolanvild_128d.int8.ptz").read_bytes())
    ours = opened(pack(weights).blob)
    assert ours.keys() == theirs.keys()
    for group in ("quantized", "scales", "passthrough"):
        assert ours[group].keys() == theirs[group].keys()
        for name in theirs[group]:
            assert torch.equal(ours[group][name], theirs[group][name]), (group, name)
    for group in ("dtypes", "qmeta", "passthrough_orig_dtypes"):
        assert ours[group] == theirs[group]
