"""A checkpoint that goes through a .birdie file is the same checkpoint, whatever it nests; exports get smaller."""

import io
import json
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import birdie
from birdie.artifact import container
from birdie.artifact import int8_zlib as baseline
from birdie.artifact.checkpoints import read_object
from birdie.artifact.repack import load_object, save_object
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, WeightsError
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.evaluation import load_gpt


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
    summary = save_object(original, tmp_path / "x.birdie", coder="fast")
    after = load_object(tmp_path / "x.birdie")
    assert same(after, original)
    assert same(loaded(after), original)
    assert summary.tree is not None


def test_tied_tensors_stay_tied_and_views_keep_their_values(tmp_path: Path) -> None:
    original = loaded(mixed())
    save_object(original, tmp_path / "x.birdie", coder="fast")
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
    save_object(content, tmp_path / "x.birdie", coder="fast")
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
        save_object(content, tmp_path / "x.birdie", coder="fast")


@pytest.mark.parametrize("tree", [3, ["tensors", [1, 0]], ["dict", ["a"], [["tensor"]]], {"a": 1}])
def test_a_foreign_tree_is_refused(tree: Any, tmp_path: Path) -> None:
    save_object({"a": torch.ones(3), "b": [torch.ones(2)]}, tmp_path / "x.birdie")
    with container.Reader(tmp_path / "x.birdie") as reader:
        entries = [reader.read(name) for name in reader.names]
    container.write(tmp_path / "x.birdie", entries, json.dumps({"tree": tree}).encode())
    with pytest.raises(ArtifactError, match="tree of the file"):
        load_object(tmp_path / "x.birdie")
    assert birdie.load(tmp_path / "x.birdie").keys() == {"a", "b/0"}


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


def test_an_export_gets_smaller_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = io.BytesIO()
    torch.save(export(), buffer)
    ptz = tmp_path / "final_model.int8.ptz"
    ptz.write_bytes(zlib.compress(buffer.getvalue(), 9))
    answer = ask(capsys, "compress", ptz, "--lossless", "--coder", "fast", "-o", tmp_path / "x.birdie")
    assert answer["input_bytes"] == ptz.stat().st_size
    assert answer["bytes"] == (tmp_path / "x.birdie").stat().st_size
    assert answer["saved_bytes"] == answer["input_bytes"] - answer["bytes"] > 0
    for name in ("back.pt", "back.ptz"):
        assert ask(capsys, "decompress", tmp_path / "x.birdie", "-o", tmp_path / name)["tensors"] == len(
            answer["tensors"]
        )
        assert same(read_object(tmp_path / name), read_object(ptz))
    ask(capsys, "decompress", tmp_path / "x.birdie", "-o", tmp_path / "back.safetensors")
    assert load_file(tmp_path / "back.safetensors").keys() == {row["name"] for row in answer["tensors"]}
    assert (
        run(build_app, ["compress", str(ptz), "--lossless", "--coder", "fast", "-o", str(tmp_path / "y.birdie")]) == 0
    )
    assert f"{answer['saved_bytes']:,} B, " in capsys.readouterr().out


def test_an_export_is_scored_as_the_challenge_dequantizes_it(tmp_path: Path) -> None:
    content = export()
    save_object(content, tmp_path / "x.birdie", coder="fast")
    model, recipe, _ = load_gpt(tmp_path / "x.birdie", torch.device("cpu"))
    assert (recipe.model.num_layers, recipe.model.num_kv_heads, recipe.model.mlp_mult) == (1, 2, 1)
    expected = baseline.dequantize(content)
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
        summary = save_object(content, tmp_path / "x.birdie", coder="fast")
        assert summary.bytes < 0.95 * path.stat().st_size
        assert same(load_object(tmp_path / "x.birdie"), content)
        with container.Reader(tmp_path / "x.birdie") as reader:
            bare = container.to_bytes([reader.read(name) for name in reader.names])
        assert summary.bytes - len(bare) < 500
