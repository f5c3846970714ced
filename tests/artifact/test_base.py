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
from birdie.artifact.options import Limits
from birdie.artifact.safetensors_export import to_safetensors
from birdie.cli import main
from birdie.compress import row_blocks
from birdie.compress.tensors import FORMATS
from birdie.delta.delta_coding import digest
from birdie.errors import ArtifactError, ConfigError
from tests.nightly import mostly_nightly

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
    assert stored["embedding"] == stored["matrix"] == "delta"


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
    differences = [name for name in state if stored[name] == "delta"]
    assert {"model.matrix", "scale"} <= {*differences}
    assert "alias" in stored.values()


def test_a_base_in_another_float_dtype_is_converted(tmp_path: Path) -> None:
    base = checkpoint()
    later = {"matrix": trained(base)["matrix"].to(torch.bfloat16)}
    summary = birdie.save(later, tmp_path / "x.birdie", lossless=True, base=base)
    assert summary.tensors[0].scheme == "delta"
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
    to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors", Limits(base=base))
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
    with pytest.raises(ArtifactError, match=r"deltas to another checkpoint, base\.safetensors"):
        birdie.load(file)
    with pytest.raises(ArtifactError, match=r"tensor '.*' of .*: is a delta to other values"):
        birdie.load(file, base=checkpoint(1))
    with pytest.raises(ArtifactError, match="has no 'matrix'"):
        birdie.load(file, base={**base, "matrix": torch.zeros(3)}, names=["matrix"])
    with pytest.raises(ConfigError, match="there is no base"):
        birdie.load(file, base=tmp_path / "absent")
    with pytest.raises(ConfigError, match="stored as deltas itself"):
        birdie.load(file, base=file)
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


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(24, 96), nn.ReLU(), nn.BatchNorm1d(96), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def fine_tuned(model: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int = 40) -> nn.Module:
    """Return the module, trained to tell the labels of batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        nats(model, batches[step % len(batches)]).backward()
        optimizer.step()
    return model.eval()


def nats(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.fixture(scope="module")
def pair() -> tuple[State, nn.Module, list[tuple[Tensor, Tensor]]]:
    """A base, its fine-tune, and batches."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, 24, generator=generator) for _ in range(12)]
    batches = [(x, (x[:, :8] + x[:, 8:16]).argmax(1)) for x in inputs]
    model = fine_tuned(network(), batches, 100)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = [(x, (x[:, :8] - x[:, 16:]).argmax(1)) for x in inputs]
    return base, fine_tuned(model.train(), moved, 8), moved


Pair = tuple[State, nn.Module, list[tuple[Tensor, Tensor]]]


@pytest.mark.parametrize(
    ("target", "with_data"),
    mostly_nightly(
        [(target, data) for target in ({"budget": 3500}, {"bits": 6.0}, {"scheme": "int4"}, {}) for data in (0, 1)],
        [({"budget": 3500}, 1), ({"scheme": "int4"}, 1), ({}, 0)],
    ),
    ids=str,
)
def test_a_difference_is_nearer_than_the_tensor_alone_at_the_same_size(
    target: dict[str, Any], with_data: int, pair: Pair, tmp_path: Path
) -> None:
    base, model, batches = pair
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    known = birdie.calibrate(model, batches, nats) if with_data else None
    alone = birdie.save(model, tmp_path / "alone", calibration=known, **target)
    near = birdie.save(model, tmp_path / "near", base=base, calibration=known, **target)
    assert near.base is not None
    assert alone.base is None
    if near.budget is not None:
        assert near.bytes <= near.budget
    back, plain = birdie.load(tmp_path / "near", base=base), birdie.load(tmp_path / "alone")
    assert list(back) == list(plain)
    errors = [
        sum(float((some[name] - state[name]).square().sum()) for name in state if "weight" in name)
        for some in (back, plain)
    ]
    assert errors[0] < errors[1] or with_data
    with torch.no_grad():
        wrong = []
        for some in (back, plain):
            other = network().eval()
            other.load_state_dict(some)
            wrong.append(float(sum((other(x) - model(x)).square().mean() for x, _ in batches)))
    assert wrong[0] < wrong[1]
    with pytest.raises(ArtifactError, match="base"):
        birdie.load(tmp_path / "near")


def test_what_did_not_change_takes_no_bytes_in_a_lossy_file_either(tmp_path: Path) -> None:
    base = {f"layers.{index}.weight": torch.randn(64, 64) for index in range(6)} | {"norm": torch.rand(64) + 1}
    state = {**base, "layers.0.weight": base["layers.0.weight"] + 0.01 * torch.randn(64, 64)}
    summary = birdie.save(state, tmp_path / "x", base=base, bits=0.3)
    same = {tensor.name for tensor in summary.tensors if not tensor.bytes}
    assert same == state.keys() - {"layers.0.weight"}
    back = birdie.load(tmp_path / "x", base=base)
    assert all(torch.equal(back[name], base[name]) for name in same)


def test_a_tensor_that_is_far_from_its_base_is_stored_alone(tmp_path: Path) -> None:
    base = {"a": torch.randn(64, 64), "b": torch.randn(64, 64), "c": torch.full((64, 64), torch.nan)}
    state = {"a": base["a"] + 0.01 * torch.randn(64, 64), "b": torch.randn(64, 64), "c": torch.randn(64, 64)}
    summary = birdie.save(state, tmp_path / "x", base=base, bits=4.0)
    assert [tensor.scheme for tensor in summary.tensors] == ["delta", "trellis", "trellis"]
    plain = birdie.load(tmp_path / "x", base=base)
    assert float((plain["a"] - state["a"]).std()) < 0.0101


@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (6, 64, 64), (200, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_kernels_stacks_and_other_dtypes(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    base = {"w": torch.randn(shape).to(dtype)}
    state = {"w": (base["w"].double() + 0.05 * torch.randn(shape)).to(dtype)}
    for target in ({"bits": 3.0}, {"scheme": "trellis:sigma=0.3"}):
        birdie.save(state, tmp_path / "x", base=base, **target)
        back = birdie.load(tmp_path / "x", base=base)["w"]
        assert back.dtype == dtype
        assert back.shape == shape
        assert float((back.double() - state["w"].double()).std()) < 0.03


def test_the_command_stores_a_near_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {f"layers.{index}.weight": torch.randn(96, 96) for index in range(4)}
    state = {name: tensor + 0.02 * torch.randn(96, 4) @ torch.randn(4, 96) for name, tensor in base.items()}
    old, new, file, back = (
        tmp_path / name for name in ("old.safetensors", "new.safetensors", "x.birdie", "y.safetensors")
    )
    save_file(base, old)
    save_file(state, new)
    run("compress", str(new), "--base", str(old), "-o", str(file), "--bits", "0.8", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["base"] == "old.safetensors"
    assert report["bytes"] <= 0.1 * 4 * 96 * 96
    run("decompress", str(file), "--base", str(old), "-o", str(back))
    error = [
        float((load_file(back)[name] - state[name]).square().mean() / (state[name] - base[name]).square().mean())
        for name in base
    ]
    assert max(error) < 0.1


def test_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    base = {"a": torch.randn(300, 260), "b": torch.randn(128, 500)}
    state = {
        name: tensor + 0.02 * torch.randn(len(tensor), 6) @ torch.randn(6, tensor.shape[1])
        for name, tensor in base.items()
    }
    files, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            birdie.save(state, tmp_path / "x", base=base, bits=0.5, workers=count)
        finally:
            torch.set_num_threads(threads)
        files.append((tmp_path / "x").read_bytes())
    assert files[0] == files[1]


def test_two_numbers_in_a_byte_are_stored_relative_to_a_base(tmp_path: Path) -> None:
    """float4: torch counts pairs, and a base of such weights was once refused."""
    words = torch.randint(0, 256, (2, 32, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words[1, 1:] = words[0, 1:]
    base, state = ({"w": one.view(torch.float4_e2m1fn_x2)} for one in words)
    birdie.save(state, tmp_path / "x.birdie", lossless=True, base=base)
    loaded = birdie.load(tmp_path / "x.birdie", base=base)["w"]
    assert loaded.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(loaded.view(torch.uint8), words[1])
