"""ONNX models in and out: lossless to the byte, lossy with the same graph; what the graph tells; hostile files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import birdie  # noqa: E402
from birdie.artifact.onnx_export import write_onnx  # noqa: E402
from birdie.checkpoints.onnx_file import OnnxModel, read_onnx  # noqa: E402
from birdie.errors import ArtifactError, BirdieError, ConfigError, WeightsError  # noqa: E402
from birdie.system.extras import install_line  # noqa: E402
from tests.forked import run_python  # noqa: E402
from tests.nightly import mostly_nightly  # noqa: E402
from tests.onnx import zoo  # noqa: E402

FORMS = mostly_nightly(
    [(name, external) for name in zoo.MODELS for external in (False, True)],
    [(name, index % 3 == 0) for index, name in enumerate(zoo.MODELS)],
)


def outputs(path: Path, feeds: dict[str, Any]) -> list[Any]:
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return list(onnxruntime.InferenceSession(str(path), options).run(None, feeds))


def without_weights(model: Any) -> bytes:
    """Return a model without the bytes of its floats of rows and columns."""
    for tensor in read_tensors(model):
        if tensor.data_type in (1, 10, 11, 16) and np.prod(tensor.dims) > 8:
            for field in ("raw_data", "float_data", "double_data"):
                tensor.ClearField(field)
    return bytes(model.SerializeToString())


def read_tensors(model: Any) -> list[Any]:
    tensors, messages = [], [model]
    while messages:
        message = messages.pop()
        tensors += [message] if isinstance(message, onnx.TensorProto) else []
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                messages += value if hasattr(value, "append") else [value]
    return tensors


@pytest.mark.parametrize(("name", "external"), FORMS)
def test_lossless_gives_back_every_byte(name: str, external: bool, tmp_path: Path) -> None:
    path = zoo.write(name, tmp_path / "before", external=external)
    birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
    written = write_onnx(tmp_path / "a.birdie", tmp_path / "after" / "other.onnx")
    originals = [path, *(one for one in path.parent.iterdir() if one != path)]
    assert [one.read_bytes() for one in written] == [one.read_bytes() for one in originals]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_lossy_changes_weights_alone(name: str, tmp_path: Path) -> None:
    path = zoo.write(name, tmp_path)
    summary = birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast")
    changed = birdie.onnx.load(tmp_path / "a.birdie")
    onnx.checker.check_model(changed)
    assert without_weights(changed) == without_weights(onnx.load(path))
    assert summary.is_onnx
    if name in zoo.NOT_FOR_ONNXRUNTIME:
        return
    onnx.save(birdie.onnx.load(tmp_path / "a.birdie"), tmp_path / "b.onnx")
    for ours, theirs in zip(outputs(tmp_path / "b.onnx", zoo.feeds(name)), outputs(path, zoo.feeds(name)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(theirs).max())


def test_a_budget_is_met(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    for budget in (2500, 3500):
        size = birdie.onnx.save(path, tmp_path / "a.birdie", budget=budget, effort="fast").bytes
        assert 0.97 * budget < size <= budget


def test_files_are_smaller_than_their_weights_alone(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    complete = birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast").bytes
    alone = birdie.save(birdie.load(tmp_path / "a.birdie"), tmp_path / "b.birdie", effort="fast").bytes
    assert alone < complete < alone + 800


def read(name: str, folder: Path) -> OnnxModel:
    return read_onnx(zoo.write(name, folder))


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "opset 17": {"w": (64, zoo.WIDTH), "v": (32, 64)},
    "convolutions": {"w": (32, 3, 3, 3), "v": (16, 32, 2, 2)},
    "recurrent": {"W": (128, zoo.WIDTH), "R": (128, 16)},
    "tied": {"table": (100, 32)},
    "functions": {"w": (40, zoo.WIDTH), "w#2": (zoo.WIDTH, zoo.WIDTH)},
    "branches": {"u": (zoo.WIDTH, zoo.WIDTH), "w": (zoo.WIDTH, zoo.WIDTH)},
    "integers": {"w": (zoo.WIDTH, 64), "v": (64, 20)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_outputs(name: str, tmp_path: Path) -> None:
    tensors = read(name, tmp_path).tensors
    assert {key: tuple(tensors[key].shape) for key in SHAPES[name]} == SHAPES[name]


def test_a_turned_weight_has_its_columns_as_rows(tmp_path: Path) -> None:
    assert torch.equal(read("opset 17", tmp_path).tensors["w"], torch.from_numpy(zoo.weights(zoo.WIDTH, 64)).T)


def test_the_graph_tells_what_stays_exact(tmp_path: Path) -> None:
    roles = read("integers", tmp_path).roles
    assert {"ws", "vs"} <= roles.buffers
    roles = read("convolutions", tmp_path).roles
    assert roles.buffers == {"mean", "variance"}
    assert roles.trained == {"w", "v"}
    assert {"b", "gain", "shift", "slope"} <= roles.layers
    assert read("opset 17", tmp_path).roles.layers == {"b", "c"}
    assert read("tied", tmp_path).roles.embeddings == frozenset()


def test_scales_keep_every_bit(tmp_path: Path) -> None:
    path = zoo.write("integers", tmp_path)
    birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast")
    assert birdie.onnx.load(tmp_path / "a.birdie") == onnx.load(path)


def test_a_base_is_another_model(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    alone = birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast").bytes
    model = birdie.onnx.load(tmp_path / "a.birdie")
    for base in (path, tmp_path / "a.birdie"):
        birdie.onnx.save(model, tmp_path / "b.birdie", base=base, lossless=True, effort="fast")
        assert birdie.onnx.load(tmp_path / "b.birdie", base=base) == model
    assert (tmp_path / "b.birdie").stat().st_size < alone / 4  # nothing but the graph differs


def test_bytes_and_objects_are_models(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path / "other")
    for model in (path.read_bytes(), onnx.load(path)):
        birdie.onnx.save(model, tmp_path / "a.birdie", lossless=True, effort="fast")
        assert birdie.onnx.load((tmp_path / "a.birdie").read_bytes()) == onnx.load(path)
    for wrong in (7, {"w": torch.zeros(3)}):
        with pytest.raises(ConfigError):
            birdie.onnx.save(wrong, tmp_path / "b.birdie")


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    path.write_bytes(path.read_bytes() + b"\xc2\x3e\x05later" + b"\xc8\x3e\x07")  # fields 1000 and 1001
    birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
    assert write_onnx(tmp_path / "a.birdie", tmp_path / "b.onnx")[0].read_bytes() == path.read_bytes()


def test_external_files_in_folders_with_gaps_shared_and_overlapping_tensors(tmp_path: Path) -> None:
    """Two tensors of one range, one that overlaps another, zeros between them, and a tail that nobody uses."""
    model = zoo.layers()
    data = np.random.default_rng(0).bytes(400_000)
    ranges = {"w": (4096, 12288), "v": (4096, 8192), "b": (200_000, 256), "c": (200_000, 128)}
    for tensor in model.graph.initializer:
        offset, length = ranges[tensor.name]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "sub/w.bin"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    path = tmp_path / "before" / "net.onnx"
    (path.parent / "sub").mkdir(parents=True)
    path.write_bytes(model.SerializeToString())
    (path.parent / "sub" / "w.bin").write_bytes(bytes(4096) + data[4096:300_000] + bytes(100_000))
    for lossless in (True, False):
        birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast", lossless=lossless)
        written = write_onnx(tmp_path / "a.birdie", tmp_path / "after", as_folder=True, overwrite=True)
        assert [one.relative_to(tmp_path / "after").as_posix() for one in written] == ["net.onnx", "sub/w.bin"]
        assert written[1].read_bytes() == (path.parent / "sub" / "w.bin").read_bytes()  # what overlaps is exact
    assert (tmp_path / "a.birdie").stat().st_size < 325_000


def test_tensors_of_one_range_are_one_tensor_of_all_uses(tmp_path: Path) -> None:
    """A table that is looked up, and the same bytes as the weight of a product."""
    model = zoo.tied()
    model.graph.initializer.append(zoo.stored("again", zoo.weights(32, 100)))
    model.graph.node[3].input[1] = "again"
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for one, other in zip(*(tensor.external_data for tensor in model.graph.initializer), strict=True):
        other.value = one.value
    path.write_bytes(model.SerializeToString())
    parts = read_onnx(path)
    assert {name: tuple(tensor.shape) for name, tensor in parts.tensors.items()} == {"again": (100, 32)}
    assert parts.names == {"table": "again", "again": "again"}
    assert {*parts.uses["again"].weights} == {("MatMul", "last two"), ("Gather", "as it lies")}
    birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
    written = write_onnx(tmp_path / "a.birdie", tmp_path / "b" / "net.onnx")
    assert [one.read_bytes() for one in written] == [path.read_bytes(), (tmp_path / "w.bin").read_bytes()]


def external(path: Path, **changes: str) -> None:
    """Write a model whose first tensor has other entries for its external data."""
    model = onnx.load(zoo.write("opset 17", path.parent, external=True), load_external_data=False)
    for tensor in model.graph.initializer[: None if "location" in changes else 1]:
        for entry in tensor.external_data:
            entry.value = changes.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"location": where}, "no other file") for where in ("../x", "/etc/passwd", "", "a\\b", "net.onnx", "a//b")),
        ({"location": "missing.bin"}, "missing"),
        ({"offset": "999999999"}, "copy"),
        ({"offset": "-4"}, "-4"),
        ({"offset": "1" * 5000}, "export"),
        ({"length": "8"}, "8"),
    ],
)
def test_external_data_elsewhere_is_refused(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    external(tmp_path / "net.onnx", **changes)
    with pytest.raises(WeightsError, match=reason):
        read_onnx(tmp_path / "net.onnx")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    external(tmp_path / "in" / "net.onnx")
    (tmp_path / "in" / "net.weights").rename(tmp_path / "weights")
    (tmp_path / "in" / "net.weights").symlink_to(tmp_path / "weights")
    with pytest.raises(WeightsError, match="link"):
        read_onnx(tmp_path / "in" / "net.onnx")


def test_external_data_of_texts_and_unknown_kinds_come_back(tmp_path: Path) -> None:
    path = tmp_path / "in" / "net.onnx"
    external(path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[1].data_type = 99
    del model.graph.initializer[2:]
    path.write_bytes(model.SerializeToString())
    birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
    written = write_onnx(tmp_path / "a.birdie", tmp_path / "b.onnx")
    assert written[1].read_bytes() == (path.parent / "net.weights").read_bytes()


def test_hidden_names_are_written_into_new_folders_alone(tmp_path: Path) -> None:
    path = tmp_path / "in" / "net.onnx"
    external(path, location=".profile")
    (path.parent / "net.weights").rename(path.parent / ".profile")
    birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
    with pytest.raises(ConfigError, match="profile"):
        write_onnx(tmp_path / "a.birdie", tmp_path / "b.onnx")
    assert not (tmp_path / ".profile").exists()
    write_onnx(tmp_path / "a.birdie", tmp_path / "new", as_folder=True)
    assert (tmp_path / "new" / ".profile").read_bytes() == (path.parent / ".profile").read_bytes()
    names: list[str] = []
    write_onnx(tmp_path / "a.birdie", tmp_path, as_folder=True, overwrite=True, hidden=names.extend)
    assert names == [".profile"]
    assert not (tmp_path / ".profile").exists()


def test_tensors_that_go_through_too_many_nodes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.checkpoints.onnx_roles._MOST_STEPS", 5)
    with pytest.raises(WeightsError, match="5 nodes"):
        read("convolutions", tmp_path)


@pytest.mark.parametrize("name", ["branches", "functions", "integers"])
def test_damaged_files_are_refused_or_come_back(name: str, tmp_path: Path) -> None:
    """Whatever a byte of the graph is changed to, a file that is read at all comes back to the byte."""
    path = zoo.write(name, tmp_path)
    sound, rng = path.read_bytes(), np.random.default_rng(0)
    read_at_all = 0
    for round_ in range(24):
        data = bytearray(sound)
        if round_ % 3:
            for _ in range(1 + round_ % 4):
                data[int(rng.integers(len(data) // 8 if round_ % 2 else len(data)))] = int(rng.integers(256))
        else:
            del data[int(rng.integers(len(data))) :]
        path.write_bytes(data)
        try:
            birdie.onnx.save(path, tmp_path / "a.birdie", lossless=True, effort="fast")
        except BirdieError:
            continue
        read_at_all += 1
        assert write_onnx(tmp_path / "a.birdie", tmp_path / "b.onnx", overwrite=True)[0].read_bytes() == data
    assert read_at_all > 3


def test_functions_that_call_themselves_end(tmp_path: Path) -> None:
    model = zoo.functions()
    model.functions[0].node.append(onnx.helper.make_node("Layer", ["m", "w"], ["c"], domain="own"))
    model.functions[0].node.append(onnx.helper.make_node("Identity", ["w"], ["w"]))
    path = tmp_path / "net.onnx"
    path.write_bytes(model.SerializeToString())
    assert read_onnx(path).tensors


def test_graphs_of_any_depth_are_read(tmp_path: Path) -> None:
    """A hundred thousand graphs in graphs: no call for each."""

    def wrapped(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2]) + length(len(content)) + content

    def length(value: int) -> bytes:
        return length_byte(value) if value < 128 else bytes([value & 127 | 128]) + length(value >> 7)

    def length_byte(value: int) -> bytes:
        return bytes([value])

    graph = b""
    for _ in range(20_000):
        graph = wrapped(1, wrapped(5, wrapped(6, graph)))  # a node with an attribute that is a graph
    (tmp_path / "net.onnx").write_bytes(wrapped(7, graph))
    assert read_onnx(tmp_path / "net.onnx").tensors == {}
    with pytest.raises(WeightsError, match="no weights"):
        birdie.onnx.save(tmp_path / "net.onnx", tmp_path / "a.birdie")


@pytest.mark.parametrize("content", [b"x", b"\x08\x08", b"\x08\x08\x3a\x7f", b"\x0b" * 40, bytes(100), b"\x3a\xff" * 9])
def test_what_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(WeightsError):
        birdie.onnx.save(tmp_path / "net.onnx", tmp_path / "a.birdie")


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.pop(0),
        lambda rows: rows[0].pop(),
        lambda rows: rows[0].append(5),
        lambda rows: rows[0].__setitem__(1, -1),
        lambda rows: rows[0].__setitem__(1, 10**9),
        lambda rows: rows[0].__setitem__(1, [5, 0, 0]),
        lambda rows: rows[0].__setitem__(1, "5"),
        lambda rows: rows[0].__setitem__(0, "../x"),
        lambda rows: rows.append(rows[0]),
        lambda rows: rows.clear(),
        lambda rows: rows.__setitem__(0, 7),
    ],
)
def test_a_damaged_layout_is_refused(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read("opset 17", tmp_path)
    change(model.layout)
    monkeypatch.setattr("birdie.checkpoints.checkpoint.read_onnx", lambda _: model)
    birdie.onnx.save(tmp_path / "net.onnx", tmp_path / "a.birdie", effort="fast")
    for read_back in (birdie.onnx.load, lambda path: write_onnx(path, tmp_path / "b.onnx")):
        with pytest.raises(ArtifactError):
            read_back(tmp_path / "a.birdie")
    assert birdie.load(tmp_path / "a.birdie").keys() == model.tensors.keys()


def test_other_files_hold_no_model(tmp_path: Path) -> None:
    birdie.save({"w": torch.randn(8, 8)}, tmp_path / "a.birdie")
    with pytest.raises(ArtifactError, match="no ONNX model"):
        birdie.onnx.load(tmp_path / "a.birdie")


def test_reading_needs_no_package(tmp_path: Path) -> None:
    """Compress and decompress run where neither onnx nor onnxruntime is."""
    path = zoo.write("opset 17", tmp_path)
    program = f"""
import sys
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
import birdie
birdie.onnx.save({str(path)!r}, {str(tmp_path / "a.birdie")!r}, effort="fast")
try:
    birdie.onnx.load({str(tmp_path / "a.birdie")!r})
except birdie.ConfigError as error:
    print(error)
"""
    process = run_python("-c", program)
    assert install_line("onnx") in process.stdout, process.stderr


def test_limits_hold(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    birdie.onnx.save(path, tmp_path / "a.birdie", effort="fast")
    with pytest.raises(ArtifactError, match="max_bytes"):
        birdie.onnx.load(tmp_path / "a.birdie", max_bytes=1000)
