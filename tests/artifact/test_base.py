"""Differences to a base: `birdie.save(…, base=…)` and `birdie.load(…, base=…)`."""

import json
import struct
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import birdie
from birdie.artifact import container
from birdie.artifact.to_safetensors import to_safetensors
from birdie.cli import main
from birdie.compress import row_blocks
from birdie.compress.difference import digest
from birdie.compress.tensors import FORMATS
from birdie.errors import ArtifactError, ConfigError

State = dict[str, Tensor]


def bits(state: State) -> dict[str, tuple[Any, ...]]:
    """Return what must be equal of each tensor."""
    return {
        name: (weight.dtype, tuple(weight.shape), weight.contiguous().view(-1).view(torch.uint8).tolist())
        for name, weight in state.items()
    }


def checkpoint(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(60, 16, generator=generator).to(torch.bfloat16),
        "matrix": torch.randn(48, 40, generator=generator),
        "norm": torch.ones(16),
        "step": torch.tensor(100),
    }


def trained(state: State, rate: float = 1e-4) -> State:
    """Return the checkpoint of a later step."""
    moved = {
        name: (weight.float() + rate * torch.randn(weight.shape)).to(weight.dtype)
        for name, weight in state.items()
        if weight.is_floating_point()
    }
    return {**state, **moved, "step": state["step"] + 10}


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code


def test_a_later_step_takes_a_fraction_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    base = checkpoint()
    later = trained(base)
    alone = birdie.save(later, tmp_path / "alone.birdie", lossless=True).bytes
    summary = birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    assert summary.bytes < 0.7 * alone
    assert bits(birdie.load(tmp_path / "x.birdie", base=base)) == bits(later)
    stored = {tensor.name: tensor.scheme for tensor in summary.tensors}
    assert stored["embedding"] == stored["matrix"] == "difference"


def test_what_did_not_change_costs_no_bytes(tmp_path: Path) -> None:
    base = {f"{index}": torch.randn(200, 200) for index in range(20)}
    birdie.save(base, tmp_path / "x.birdie", lossless=True, base=base)
    assert (tmp_path / "x.birdie").stat().st_size < 600
    loaded = birdie.load(tmp_path / "x.birdie", base=base)
    assert bits(loaded) == bits(base)
    assert loaded["0"].data_ptr() != base["0"].data_ptr()


@given(
    st.integers(0, 999), st.sampled_from(list(FORMATS)), st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4), (0, 3)])
)
@settings(max_examples=60, deadline=None)
def test_every_dtype_and_bit_pattern_comes_back(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some() -> Tensor:
        count = torch.Size(shape).numel()
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)

    base, other = {"a": some(), "b": some(), "c": torch.ones(2)}, {"a": some(), "c": torch.ones(2)}
    state = {**other, "b": base["b"]}
    file = BytesIO()
    birdie.save(state, file, lossless=True, base=base)
    assert bits(birdie.load(file.getvalue(), base=base)) == bits(state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40])
def test_special_values_come_back(value: float, tmp_path: Path) -> None:
    base = checkpoint()
    later = trained(base)
    later["matrix"][3, 5] = value
    base["matrix"][7, 1] = value
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    assert bits(birdie.load(tmp_path / "x.birdie", base=base)) == bits(later)


def test_names_may_have_a_prefix_and_others_may_be_new_missing_tied_or_of_another_shape(tmp_path: Path) -> None:
    base = checkpoint()
    later = trained(base)
    state = {
        "model.embedding": later["embedding"],
        "head": later["embedding"],  # tied
        "model.matrix": later["matrix"].reshape(40, 48),
        "scale": base["norm"],  # the same values under another name
        "new": torch.randn(3, 3),
    }
    summary = birdie.save(state, tmp_path / "x.birdie", lossless=True, base=base)
    assert bits(birdie.load(tmp_path / "x.birdie", base=base)) == bits(state)
    stored = {tensor.name: tensor.scheme for tensor in summary.tensors}
    assert stored["new"] == "lossless"
    differences = [name for name in state if stored[name] == "difference"]
    assert {"model.matrix", "scale"} <= {*differences}
    assert "alias" in stored.values()


def test_a_base_in_another_float_dtype_is_converted(tmp_path: Path) -> None:
    base = checkpoint()
    later = {"matrix": trained(base)["matrix"].to(torch.bfloat16)}
    summary = birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    assert summary.tensors[0].scheme == "difference"
    assert bits(birdie.load(tmp_path / "x.birdie", base=base)) == bits(later)


def test_large_tensors_are_differences_of_their_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_blocks, "LARGE", 1 << 10)
    monkeypatch.setattr(row_blocks, "_BLOCK", 1 << 9)
    base = {"matrix": torch.randn(100, 24), "vector": torch.randn(2000)}
    later = trained(base | {"step": torch.tensor(0)})
    save_file(base, tmp_path / "base.safetensors")
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=tmp_path / "base.safetensors")
    assert len([name for name in container.Reader((tmp_path / "x.birdie").read_bytes()).entries if "\0" in name]) > 4
    assert bits(birdie.load(tmp_path / "x.birdie", base=tmp_path / "base.safetensors")) == bits(later)
    to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors", base=base)
    assert bits(load_file(tmp_path / "x.safetensors")) == bits(later)


def test_a_module_takes_differences_to_itself(tmp_path: Path) -> None:
    model, later = nn.Linear(30, 20), nn.Linear(30, 20)
    with torch.no_grad():
        later.weight.copy_(model.weight + 1e-4)
        later.bias.copy_(model.bias)
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=model)
    birdie.load(tmp_path / "x.birdie", into=model, base=model)
    assert torch.equal(model.weight, later.weight)
    assert torch.equal(model.bias, later.bias)


def test_a_lazy_module_decodes_differences_when_it_reads_them(tmp_path: Path) -> None:
    base, later = nn.Linear(64, 64), nn.Linear(64, 64)
    later.load_state_dict({name: weight + 1e-4 for name, weight in base.state_dict().items()})
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    lazy = birdie.load(tmp_path / "x.birdie", into=nn.Linear(64, 64), lazy=True, base=base)
    x = torch.randn(3, 64)
    assert torch.equal(lazy(x), later(x))


def test_optimizer_states_and_a_lossy_base_are_bases_too(tmp_path: Path) -> None:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    paths = [tmp_path / "1.pt", tmp_path / "2.pt"]
    for step, path in enumerate(paths):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    run("compress", str(paths[1]), "--base", str(paths[0]), "--lossless", "-o", str(tmp_path / "x.birdie"))
    run("decompress", str(tmp_path / "x.birdie"), "--base", str(paths[0]), "-o", str(tmp_path / "back.pt"))
    back, real = (torch.load(path, weights_only=True) for path in (tmp_path / "back.pt", paths[1]))
    assert bits(back["model"]) == bits(real["model"])
    assert back["step"] == 1
    assert torch.equal(back["optimizer"]["state"][0]["exp_avg"], real["optimizer"]["state"][0]["exp_avg"])
    birdie.save(model, tmp_path / "lossy.birdie", scheme="int8")
    small = birdie.save(model, tmp_path / "y.birdie", lossless=True, base=tmp_path / "lossy.birdie").bytes
    assert small < birdie.save(model, tmp_path / "z.birdie", lossless=True).bytes
    assert bits(birdie.load(tmp_path / "y.birdie", base=tmp_path / "lossy.birdie")) == bits(dict(model.state_dict()))


def test_a_wrong_or_missing_base_is_one_sentence(tmp_path: Path) -> None:
    base = checkpoint()
    file = tmp_path / "x.birdie"
    save_file(base, tmp_path / "base.safetensors")
    birdie.save(trained(base), file, lossless=True, base=tmp_path / "base.safetensors")
    with pytest.raises(ArtifactError, match=r"differences to another checkpoint, base\.safetensors"):
        birdie.load(file)
    with pytest.raises(ArtifactError, match=r"tensor '.*' of .*: is a difference to other values"):
        birdie.load(file, base=checkpoint(1))
    with pytest.raises(ArtifactError, match="has no 'matrix'"):
        birdie.load(file, base={**base, "matrix": torch.zeros(3)}, names=["matrix"])
    with pytest.raises(ConfigError, match="there is no base"):
        birdie.load(file, base=tmp_path / "absent")
    with pytest.raises(ConfigError, match="stored as differences itself"):
        birdie.load(file, base=file)
    with pytest.raises(ConfigError, match="base is for lossless files"):
        birdie.save(base, tmp_path / "y.birdie", base=base)
    with pytest.raises(ConfigError, match="no tensor of the base"):
        birdie.save(base, tmp_path / "y.birdie", lossless=True, base={"other": torch.zeros(9)})
    with pytest.raises(ConfigError, match="base is a int"):
        birdie.save(base, tmp_path / "y.birdie", lossless=True, base=3)  # type: ignore[arg-type]
    assert not (tmp_path / "y.birdie").exists()


def test_a_digest_or_name_that_lies_is_refused(tmp_path: Path) -> None:
    base = {"a": torch.randn(30, 30), "b": torch.randn(30, 30)}
    later = {name: weight + 1e-4 for name, weight in base.items()}
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    reader = container.Reader((tmp_path / "x.birdie").read_bytes())
    entries = [reader.read(name) for name in reader.names]
    of_b = replace(entries[0], params=(digest(base["b"]), *entries[0].params[1:]))

    def refused(changed: container.Entry, about: Any = None) -> None:
        metadata = reader.metadata if about is None else json.dumps(about).encode()
        (tmp_path / "y.birdie").write_bytes(container.to_bytes([changed, entries[1]], metadata))
        with pytest.raises(ArtifactError):
            birdie.load(tmp_path / "y.birdie", base=base)

    refused(of_b)
    refused(replace(entries[0], params=entries[0].params[:1]))
    refused(replace(entries[0], params=(entries[0].params[0], 1, 1 << 60)))
    refused(replace(entries[0], params=(entries[0].params[0], 1, entries[0].params[2] - 1)))
    refused(replace(entries[0], shape=(1 << 20, 1 << 20)))
    refused(entries[0], {"base": {"names": {"a": "absent"}}})
    refused(entries[0], {"base": {"names": {"a": "b"}}})
    refused(entries[0], {"base": {"names": [1]}})
    refused(entries[0], {"base": 3})


def test_the_digest_is_pinned() -> None:
    weight = torch.tensor([1.0, -0.0], dtype=torch.float32)
    assert struct.pack("<q", digest(weight)).hex() == "78662451553b54df"
    assert digest(weight) != digest(weight.view(torch.int32))
