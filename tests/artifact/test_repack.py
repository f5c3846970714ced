"""A checkpoint that goes through a .birdie file is the same checkpoint, whatever it nests; exports get smaller."""

import argparse
import contextlib
import io
import json
import re
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import birdie
from birdie.artifact import container
from birdie.artifact.repack import load_object, save_object
from birdie.checkpoints import int8_export
from birdie.checkpoints.checkpoints import read_object
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, WeightsError
from birdie.golf import int8_zlib as baseline
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.evaluation import load_gpt

COMPRESS = ["compress", "--lossless", "--effort", "fast"]


def same(one: Any, other: Any) -> bool:
    """Deep equality with types, dtypes, bits and the order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return not one.numel() or torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def loaded(content: Any) -> Any:
    """`content` as torch.load gives it after torch.save."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def export() -> dict[str, Any]:
    """An int8 export of a small GPT, as torch.load gives it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=300, num_layers=1, model_dim=256, num_heads=4, num_kv_heads=2, mlp_mult=1))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    content = torch.load(io.BytesIO(zlib.decompress(baseline.pack(model.state_dict()).blob)), weights_only=True)
    assert isinstance(content, dict)
    return content


def mixed() -> dict[str, Any]:
    """One of everything a checkpoint may hold."""
    base = torch.arange(24.0).reshape(4, 6)
    tied = torch.randn(3, 3)
    return {
        "w": {"q": torch.randint(-8, 8, (40, 30), dtype=torch.int8), "s": torch.rand(40).half()},
        "m": {"q": {"type": "int6", "bits": 6}, "s": None},
        "views": [base.T, base[1:3, ::2], base[0]],
        "tied": (tied, {"again": tied}),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3), "exp_avg": torch.zeros(2)}},
            "param_groups": [{"lr": 0.1}],
        },
        "ordered": OrderedDict(b=torch.ones(1), a=torch.tensor(float("nan"))),
        "empty": torch.zeros(0, 3),
        "dtype": torch.bfloat16,
        "text": "naïve\n",
        "big": 1 << 100,
        "flags": [True, None, -0.0, float("inf")],
    }


@pytest.mark.parametrize("content", [export, mixed, lambda: torch.ones(3), lambda: [torch.ones(1), 2]])
def test_what_torch_load_gives_comes_back(content: Any, tmp_path: Path) -> None:
    original = loaded(content())
    summary = save_object(original, tmp_path / "x.birdie")
    after = load_object(tmp_path / "x.birdie")
    assert same(after, original)
    assert same(loaded(after), original)
    assert summary.tree is not None


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text("aß/~1", max_size=4))
TENSORS = st.builds(
    lambda kind, shape, seed: torch.tensor(np.random.default_rng(seed).integers(0, 99, shape)).to(kind),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
NESTED = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text("ab/~1", max_size=3) | st.integers(0, 3), inner, max_size=4),
        st.dictionaries(st.text("ab"), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@settings(max_examples=8)
@given(content=NESTED, tensor=TENSORS)
def test_any_object_comes_back_from_the_command_line(
    tmp_path_factory: pytest.TempPathFactory, content: Any, tensor: Any
) -> None:
    folder = tmp_path_factory.mktemp("object")
    torch.save({"content": content, "model": {"w": tensor}, "tied": [tensor, tensor]}, folder / "x.pt")
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(build_app, [*COMPRESS, str(folder / "x.pt"), "-o", str(folder / "x.birdie")]) == 0
        assert run(build_app, ["decompress", str(folder / "x.birdie"), "-o", str(folder / "back.pt")]) == 0
    back = torch.load(folder / "back.pt", weights_only=True)
    assert same(back, torch.load(folder / "x.pt", weights_only=True))
    if tensor.numel():
        assert back["model"]["w"].data_ptr() == back["tied"][0].data_ptr() == back["tied"][1].data_ptr()


class Training:
    """A small model with AdamW and a scheduler, and names as torch.compile leaves them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)

    def steps(self, count: int) -> list[float]:
        losses = []
        for seed in range(count):
            inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
            loss = (self.model(inputs) - inputs.sin()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def checkpoint(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {
            "model": self.model.state_dict(prefix="_orig_mod."),
            "ema": {f"module.{name}": weight * 0.5 for name, weight in state.items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": 5,
            "args": {"betas": (0.9, 0.95), "out": None, "name": "π"},
        }

    def resume(self, content: dict[str, Any]) -> "Training":
        self.model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in content["model"].items()})
        self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])
        return self


def test_a_training_checkpoint_comes_back_and_trains_on_bit_for_bit(tmp_path: Path) -> None:
    training = Training()
    training.steps(5)
    torch.save(training.checkpoint(), tmp_path / "x.pt")
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(build_app, [*COMPRESS, str(tmp_path / "x.pt"), "-o", str(tmp_path / "x.birdie")]) == 0
        assert run(build_app, ["decompress", str(tmp_path / "x.birdie"), "-o", str(tmp_path / "back.pt")]) == 0
    for back in torch.load(tmp_path / "back.pt", weights_only=True), birdie.load_object(tmp_path / "x.birdie"):
        original = torch.load(tmp_path / "x.pt", weights_only=True)
        assert same(back, original)
        assert vars(back["model"]) == vars(original["model"])
        resumed, expected = Training().resume(back), Training().resume(original)  # steps change the loaded tensors
        assert resumed.steps(4) == expected.steps(4)
        assert same(resumed.checkpoint(), expected.checkpoint())
    original = torch.load(tmp_path / "x.pt", weights_only=True)
    flat = birdie.load(tmp_path / "x.birdie")
    assert torch.equal(flat["optimizer/state/0/exp_avg"], original["optimizer"]["state"][0]["exp_avg"])


def test_a_state_dict_that_is_complete_stays_a_plain_file(tmp_path: Path) -> None:
    birdie.save_object({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "x.birdie")
    birdie.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "y.birdie", lossless=True)
    assert (tmp_path / "x.birdie").read_bytes() == (tmp_path / "y.birdie").read_bytes()
    birdie.save_object({"b": torch.ones(2), "a": torch.ones(3)}, tmp_path / "x.birdie")
    assert list(birdie.load_object(tmp_path / "x.birdie")) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), r"'run/args' of the checkpoint is or holds an argparse\.Namespace"),
        (np.array(["text"]), r"'run/args' of the checkpoint is or holds an Array"),
        ([Path("x")], r"'run/args/0' of the checkpoint is or holds a pathlib"),
    ],
    ids=["namespace", "numpy", "path"],
)
def test_what_cannot_be_stored_is_named_with_the_flag_that_leaves_it_out(
    value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": {"w": torch.ones(40)}, "run": {"args": value}}, tmp_path / "x.pt")
    tokens = [*COMPRESS, str(tmp_path / "x.pt"), "-o", str(tmp_path / "x.birdie")]
    assert run(build_app, [*tokens, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]["message"]
    assert re.search(message, error)
    assert "--weights-only" in error
    assert not (tmp_path / "x.birdie").exists()
    assert run(build_app, [*tokens, "--weights-only"]) == 0
    assert "dropped: run\n" in capsys.readouterr().out
    assert birdie.load(tmp_path / "x.birdie").keys() == {"w"}
    with pytest.raises(WeightsError, match="save_object"):
        birdie.save({"model": {"w": torch.ones(1)}}, tmp_path / "x.birdie")  # type: ignore[dict-item]


def test_a_complete_copy_drops_nothing_and_its_size_before_is_that_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": {"w": torch.zeros(99)}, "ema": {"w": torch.ones(99)}}, tmp_path / "x.pt")
    tokens = [*COMPRESS, tmp_path / "x.pt", "-o", tmp_path / "x.birdie"]
    answer = ask(capsys, *tokens)
    assert answer["input_bytes"] == answer["file_bytes"] == (tmp_path / "x.pt").stat().st_size
    assert answer["dropped"] == {}
    assert run(build_app, list(map(str, tokens))) == 0
    out = capsys.readouterr().out
    assert "dropped" not in out
    assert "input:" not in out
    assert ask(capsys, *tokens, "--weights-only")["dropped"] == {"ema": 4 * 99}


def test_tied_tensors_stay_tied_and_views_keep_their_values(tmp_path: Path) -> None:
    original = loaded(mixed())
    save_object(original, tmp_path / "x.birdie")
    after = load_object(tmp_path / "x.birdie")
    assert after["tied"][0].data_ptr() == after["tied"][1]["again"].data_ptr()
    assert same(after["views"], original["views"])


def test_the_same_object_gives_the_same_bytes(tmp_path: Path) -> None:
    content = loaded(mixed())
    save_object(content, tmp_path / "a.birdie", workers=1)
    save_object(content, tmp_path / "b.birdie", workers=2)
    assert (tmp_path / "a.birdie").read_bytes() == (tmp_path / "b.birdie").read_bytes()


def test_load_gives_tensors_by_path(tmp_path: Path) -> None:
    content = export()
    save_object(content, tmp_path / "x.birdie")
    flat = birdie.load(tmp_path / "x.birdie")
    assert torch.equal(flat["quantized/tok_emb.weight"], content["quantized"]["tok_emb.weight"])
    assert flat["quantized/tok_emb.weight"].dtype is torch.int8
    assert {row.name for row in birdie.inspect(tmp_path / "x.birdie").tensors} == flat.keys()


def test_a_plain_file_gives_its_state_dict(tmp_path: Path) -> None:
    birdie.save({"a": torch.ones(2)}, tmp_path / "x.birdie", lossless=True)
    assert birdie.inspect(tmp_path / "x.birdie").tree is None
    assert same(load_object(tmp_path / "x.birdie"), {"a": torch.ones(2)})


@pytest.mark.parametrize("content", [{"a": 1}, None, []])
def test_nothing_to_compress_is_said(content: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no tensor"):
        save_object(content, tmp_path / "x.birdie")


@pytest.mark.parametrize("tree", [3, ["tensors", [1, 0]], ["dict", ["a"], [["tensor"]]]])
def test_a_foreign_tree_is_refused(tree: Any, tmp_path: Path) -> None:
    save_object({"a": torch.ones(3), "b": [torch.ones(2)]}, tmp_path / "x.birdie")
    with container.Reader(tmp_path / "x.birdie") as reader:
        entries = [reader.read(name) for name in reader.names]
    container.write(tmp_path / "x.birdie", entries, json.dumps({"tree": tree}).encode())
    with pytest.raises(ArtifactError, match="tree of the file"):
        load_object(tmp_path / "x.birdie")
    assert birdie.load(tmp_path / "x.birdie").keys() == {"a", "b/0"}


def test_a_tree_of_no_kind_makes_a_file_damaged(tmp_path: Path) -> None:
    save_object({"a": torch.ones(3)}, tmp_path / "x.birdie")
    with container.Reader(tmp_path / "x.birdie") as reader:
        entries = [reader.read(name) for name in reader.names]
    container.write(tmp_path / "x.birdie", entries, json.dumps({"tree": {"a": 1}}).encode())
    for load in (load_object, birdie.load):
        with pytest.raises(ArtifactError, match="'tree' in the metadata"):
            load(tmp_path / "x.birdie")


def test_metadata_of_many_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    container.write(tmp_path / "x.birdie", [], b'{"tree":[' + b"[]," * (1 << 21) + b"1]}")
    with pytest.raises(ArtifactError, match="more values than birdie writes"):
        birdie.inspect(tmp_path / "x.birdie")


def ask(capsys: pytest.CaptureFixture[str], *tokens: object) -> dict[str, Any]:
    """Return what a command prints with --json."""
    assert run(build_app, [*map(str, tokens), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_an_export_is_scored_as_the_challenge_dequantizes_it(tmp_path: Path) -> None:
    content = export()
    save_object(content, tmp_path / "x.birdie")
    model, recipe, _ = load_gpt(tmp_path / "x.birdie", torch.device("cpu"))
    assert (recipe.model.num_layers, recipe.model.num_kv_heads, recipe.model.mlp_mult) == (1, 2, 1)
    expected = int8_export.dequantize(content)
    held = model.state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    save_object({"tok_emb.weight": torch.ones(2, 2), "step": 1}, tmp_path / "x.birdie")
    with pytest.raises(WeightsError, match="export"):
        load_gpt(tmp_path / "x.birdie", torch.device("cpu"))


def test_real_exports(shared_data: Path, tmp_path: Path) -> None:
    """Every .ptz is smaller, and the same object, after a round trip; the tree costs next to nothing."""
    for path in sorted((shared_data / "weights/parameter_golf").glob("nolanvild*.ptz")):
        content = read_object(path)
        summary = save_object(content, tmp_path / "x.birdie")
        assert summary.bytes < 0.95 * path.stat().st_size
        assert same(load_object(tmp_path / "x.birdie"), content)
        with container.Reader(tmp_path / "x.birdie") as reader:
            bare = container.to_bytes([reader.read(name) for name in reader.names])
        assert summary.bytes - len(bare) < 500
