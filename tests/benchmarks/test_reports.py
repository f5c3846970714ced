"""Benchmarks of coders are fair: symbol sets are what they claim, and every rival returns what it was given."""

import argparse
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import bench_model, codec, rivals, row_class_ans, streams, symbols
from benchmarks.plot import svg
from birdie.errors import ConfigError, WeightsError


def state(seed: int = 0) -> dict[str, Tensor]:
    """A small model: an embedding, a matrix with unequal rows and a row of zeros, a convolution, a vector."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(24, 40, generator=generator) * torch.linspace(0.01, 0.2, 24)[:, None]
    matrix[3] = 0
    return {
        "tok_emb.weight": torch.randn(64, 16, generator=generator),
        "fc.weight": matrix,
        "conv.weight": torch.randn(8, 4, 3, 3, generator=generator) * 2,
        "bias": torch.randn(8, generator=generator),
    }


MIXED = {
    "a": torch.tensor([[-128, 127, 0], [5, -1, -128]], dtype=torch.int8),
    "b": torch.tensor([[300, -128, 127], [-129, -127, 128], [0, -32768, 32767]], dtype=torch.int16),
    "c": torch.arange(-5, 6, dtype=torch.int8),
}


def test_uniform_is_one_step_a_tensor_to_within_half_a_step() -> None:
    weights = state()
    made = symbols.uniform(weights)
    assert set(made.tensors) == {"tok_emb.weight", "fc.weight", "conv.weight"}
    for name, found in made.tensors.items():
        step = made.steps[name]
        assert step.ndim == 0
        assert step.item() == pytest.approx(0.41 * weights[name].double().std(correction=0).item(), rel=1e-5)
        assert ((found.double() * step.double() - weights[name].double()).abs() <= 0.5001 * step.double()).all()


def test_row_maximum_reaches_31_in_every_row_and_no_further() -> None:
    made = symbols.rowmax6(state())
    largest = made.tensors["fc.weight"].abs().amax(1)
    assert largest[3] == 0
    assert (torch.cat([largest[:3], largest[4:]]) == 31).all()
    assert made.tensors["conv.weight"].shape == (8, 4, 3, 3)


def test_sdclip_clips_by_deviation_and_gives_embeddings_more_levels() -> None:
    weights = state()
    weights["fc.weight"][5, 7] = 1e3
    made = symbols.sdclip6(weights)
    rows = weights["fc.weight"]
    expected = (12.85 * rows.std(1, correction=0) / 31).half()
    assert torch.equal(made.steps["fc.weight"][4], expected[4])
    assert made.tensors["fc.weight"].abs().max() <= 31
    rounded = made.tensors["tok_emb.weight"].float().std(1, correction=0)
    assert torch.allclose(rounded, torch.full((64,), 127 / 20), rtol=0.05)


def test_resnet_grid_is_nncodecs() -> None:
    assert symbols.nnc_step(-32, 2) == 2.0**-8
    assert symbols.nnc_step(-31, 2) == 5 * 2.0**-10
    assert symbols.nnc_step(0, 2) == 1.0
    weights = state()
    made = symbols.resnet(weights)
    assert made.tensors["conv.weight"].dtype == torch.int16
    assert made.tensors["fc.weight"].abs().max() == torch.round(weights["fc.weight"].double() * 256).abs().max()


def test_floats_are_kept_or_cast() -> None:
    weights = state()
    assert all(torch.equal(symbols.fp32(weights).tensors[name], weight) for name, weight in weights.items())
    cast = symbols.bf16(weights)
    assert {tensor.dtype for tensor in cast.tensors.values()} == {torch.bfloat16}
    assert not cast.is_integer
    assert cast.bytes == 2 * cast.symbols


def test_stored_integers_come_back_from_every_kind_of_file(tmp_path: Path) -> None:
    from zlib import compress

    torch.save({**MIXED, "scale": torch.ones(3)}, tmp_path / "plain.pt")
    torch.save({"quantized": MIXED, "scales": {"a": torch.ones(2)}}, tmp_path / "whole")
    (tmp_path / "whole.ptz").write_bytes(compress((tmp_path / "whole").read_bytes()))
    for name in ("plain.pt", "whole.ptz"):
        found = symbols.make("auto", tmp_path / name)
        assert found.name == "stored"
        assert {key: value.tolist() for key, value in found.tensors.items()} == {
            key: value.tolist() for key, value in MIXED.items()
        }
    torch.save(state(), tmp_path / "floats.pt")
    assert symbols.make("auto", tmp_path / "floats.pt").name == "bf16"
    with pytest.raises(WeightsError, match="no tensor"):
        symbols.make("stored", tmp_path / "floats.pt")


def test_llama2c_files_are_cut_into_layers(tmp_path: Path) -> None:
    dim, hidden, layers, heads, kv_heads, vocabulary, length = 8, 16, 2, 4, 2, 10, 6
    sizes = vocabulary * dim + 2 * layers * dim + 2 * layers * dim * dim + 2 * layers * dim * dim // 2
    sizes += 3 * layers * dim * hidden + dim + 2 * length * (dim // heads // 2)
    header = np.array([dim, hidden, layers, heads, kv_heads, vocabulary, length], "<i4").tobytes()
    values = np.arange(sizes, dtype="<f4")
    (tmp_path / "model.bin").write_bytes(header + values.tobytes())
    found = symbols.floats(tmp_path / "model.bin")
    assert torch.cat([tensor.reshape(-1) for tensor in found.values()]).sort().values.tolist() == values.tolist()
    assert found["layers.1.wk.weight"].shape == (dim // heads * kv_heads, dim)
    (tmp_path / "cut.bin").write_bytes(header + values[:-1].tobytes())
    assert symbols.read_llama2c(tmp_path / "cut.bin") is None


@pytest.mark.parametrize("order", streams.ORDERS)
@pytest.mark.parametrize("name", ["mixed", "bf16", "fp32"])
def test_streams_lose_nothing(order: streams.Order, name: str) -> None:
    tensors = MIXED if name == "mixed" else symbols.FLOAT_SETS[name](state()).tensors
    stream = streams.join(tensors, order)
    parted = streams.part(stream, tensors, order)
    for key, tensor in tensors.items():
        assert parted[key].dtype == tensor.dtype
        assert torch.equal(parted[key], tensor)
    escaped = sum(int(((t < -127) | (t > 127)).sum()) for t in tensors.values() if t.dtype == torch.int16)
    width = {"mixed": 1, "bf16": 2, "fp32": 4}[name]
    assert len(stream) == width * sum(tensor.numel() for tensor in tensors.values()) + 2 * escaped


def test_row_class_ans_returns_what_it_was_given() -> None:
    random = np.random.default_rng(0)
    scales = random.choice([0.5, 3.0, 40.0], (200, 1))
    arrays = [
        np.rint(scales * random.standard_normal((200, 37))).astype(np.int16),
        np.full((3, 5), 7, np.int8),
        random.integers(-300, 300, (9, 1)).astype(np.int16),
    ]
    coded = row_class_ans.encode(arrays)
    decoded = row_class_ans.decode(coded, [array.shape for array in arrays])
    assert all(np.array_equal(found, array) for found, array in zip(decoded, arrays, strict=True))
    longer = row_class_ans.Encoded(coded.side, np.append(coded.words, np.uint32(1)))
    with pytest.raises(ValueError, match="end"):
        row_class_ans.decode(longer, [array.shape for array in arrays])


def test_row_classes_pay_off_where_rows_differ_and_cost_their_tables() -> None:
    random = np.random.default_rng(1)
    scales = np.repeat([1.0, 4.0, 16.0, 40.0], 256)[:, None]
    values = np.rint(scales * random.standard_normal((1024, 128))).astype(np.int16)
    counts = np.bincount((values - values.min()).ravel())
    seen = counts[counts > 0] / values.size
    pooled = -(seen * np.log2(seen)).sum() * values.size / 8
    rows = [values[start : start + 256] for start in range(0, 1024, 256)]
    apart = 0.0
    for part in rows:
        seen = np.unique(part, return_counts=True)[1] / part.size
        apart += -(seen * np.log2(seen)).sum() * part.size / 8
    size = row_class_ans.encode([values]).size
    assert apart < size < 0.9 * pooled


@pytest.mark.parametrize("precision", [6, 12])
def test_tables_sum_to_their_precision_and_leave_no_symbol_out(precision: int) -> None:
    counts = np.array([0, 1, 1, 100_000, 3, 0, 1, 50_000, 1, 1])
    table = row_class_ans.normalized(counts, precision)
    assert table.sum() == 1 << precision
    assert ((table > 0) == (counts > 0)).all()


def small(integers: bool) -> symbols.SymbolSet:
    made = (symbols.resnet if integers else symbols.bf16)(state())
    return symbols.SymbolSet(made.name, made.tensors)


@pytest.mark.parametrize("integers", [True, False], ids=["symbols", "floats"])
@pytest.mark.parametrize("key", [key for key in rivals.MEASURES if key not in ("nncodec", "zipnn", "lrzip")])
def test_rivals_return_what_they_were_given(key: str, integers: bool) -> None:
    given = small(integers)
    try:
        found = rivals.MEASURES[key][1](given)
    except rivals.NotInstalledError as error:
        pytest.skip(f"{key}: {error}")
    except rivals.NotMeantForError:
        assert key == "row-class"
        assert not integers
        return
    assert found.exact
    assert 0 < found.bytes < 2 * given.bytes + 2000
    assert found.encode_s > 0
    assert found.decode_s > 0


@pytest.mark.slow  # processes that import torch, and a program that takes seconds to start
@pytest.mark.parametrize("key", ["nncodec", "zipnn", "lrzip"])
def test_rivals_that_start_slowly_return_what_they_were_given(key: str) -> None:
    given = small(key != "zipnn")
    try:
        found = rivals.MEASURES[key][1](given)
    except rivals.NotInstalledError as error:
        pytest.skip(f"{key}: {error}")
    assert found.exact
    assert 0 < found.bytes < 2 * given.bytes + 2000


def test_what_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(rivals, "RIVALS", Path("nowhere"))
    found = {line["codec"]: line for line in codec.rows(small(True), ["zpaq", "nncodec"])}
    assert found["zpaq -m5"]["version"] == "not installed: apt install zpaq"
    assert found["NNCodec"]["version"] == "not installed: make rivals"
    assert all(line["bytes"] is None and line["exact"] is None for line in found.values())


@pytest.mark.slow  # a process to measure memory in, for each effort
def test_rows_have_what_is_pinned_and_count_the_whole_file() -> None:
    given = small(True)
    found = list(codec.rows(given, ["max", "fast", "zstd"]))
    for line in found:
        assert {"codec", "bytes", "symbol_bytes", "encode_s", "decode_s", "exact", "version"} <= line.keys()
        assert line["exact"] is True
        assert line["symbol_bytes"] == given.bytes
    names = sum(len(name) for name in given.tensors)
    assert [line["codec"] for line in found] == ["birdie max", "birdie fast", "zstd -22"]
    assert found[0]["bytes"] > names
    json.dumps(found)


def test_unknown_codecs_are_refused() -> None:
    assert codec.chosen("zpaq, max") == ["zpaq", "max"]
    with pytest.raises(argparse.ArgumentTypeError, match="zpack is no codec"):
        codec.chosen("max,zpack")


def test_smallest_try_counts_and_one_wrong_try_is_not_hidden() -> None:
    def tries(*exact: bool) -> Iterator[rivals.Measured]:
        for size, right in enumerate(exact, start=10):
            yield rivals.Measured(size, 1.0, 1.0, right, "")

    assert rivals.smallest(list(tries(True, True))).bytes == 10
    assert not rivals.smallest(list(tries(True, False))).exact


def test_the_plot_is_svg_with_every_measured_coder() -> None:
    lines = [
        {"codec": "birdie max", "bytes": 1000, "decode_s": 0.5, "symbols": 2000},
        {"codec": "a <rival> & co", "bytes": 1100, "decode_s": 2.0, "symbols": 2000},
        {"codec": "absent", "bytes": None, "decode_s": None, "symbols": 2000},
    ]
    root = ElementTree.fromstring(svg(lines, "a title"))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2
    assert {"birdie max", "a <rival> & co", "a title"} <= set(words)
    assert float(circles[1].get("cx", 0)) > float(circles[0].get("cx", 0))  # the faster one stands further right
    assert float(circles[1].get("cy", 0)) > float(circles[0].get("cy", 0))  # and the smaller one lower
    with pytest.raises(ValueError, match="no row"):
        svg(lines[2:], "nothing")


def test_the_models_digest_knows_settings_and_contents_but_no_paths(tmp_path: Path) -> None:
    def sources(folder: Path, text: bytes) -> bench_model.Sources:
        folder.mkdir()
        paths = [folder / name for name in ("tokenizer", "train", "val", "book")]
        for path in paths:
            path.write_bytes(text if path.name == "book" else path.name.encode())
        return bench_model.Sources(paths[0], paths[1], paths[2], (paths[3],))

    recipe = bench_model.RECIPE.read_text()
    other, quiet = tmp_path / "other.toml", tmp_path / "quiet.toml"
    other.write_text(recipe.replace("seed = 0", "seed = 1"))
    quiet.write_text("# a remark\n" + recipe.replace("max_tokens = 65536", "max_tokens = 512"))
    one, two, three = (
        sources(tmp_path / name, text) for name, text in (("one", b"text"), ("two", b"text"), ("three", b"texts"))
    )
    digest = bench_model.digest(one)
    assert digest == bench_model.digest(two) == bench_model.digest(one, quiet)
    assert len({digest, bench_model.digest(three), bench_model.digest(one, other)}) == 3


def test_the_model_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIRDIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="BIRDIE_DATA"):
        bench_model.bench_model(tmp_path)
    with pytest.raises(ConfigError, match=r"fineweb_1024_bpe\.model"):
        bench_model.bench_model(tmp_path, tmp_path)


def test_the_shared_models_sources_are_there(shared_data: Path, tmp_path: Path) -> None:
    assert len(bench_model.Sources.under(shared_data).books) == 15
    with pytest.raises(ConfigError, match="no trained model"):
        bench_model.bench_model(tmp_path, shared_data, train=False)
