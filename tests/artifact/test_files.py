"""A .birdie file: what goes in comes out, the same tensors give the same bytes, and damage is always noticed."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

import birdie
from birdie.artifact import container
from birdie.artifact.container import Entry, Reader, Stream
from birdie.artifact.file import DTYPES
from birdie.compress.schemes.grid import Grid
from birdie.compress.tensors import FORMATS
from birdie.entropy import coder as entropy
from birdie.errors import ArtifactError, BudgetError, ConfigError, OutputError, WeightsError
from tests.artifact.states import decode_tensor, every_dtype, same_bits, small_model
from tests.coders import DEFAULTS
from tests.nightly import mostly_nightly

DTYPE_NAMES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


def test_the_numbers_of_dtypes_are_pinned() -> None:
    assert [str(dtype).removeprefix("torch.") for dtype in DTYPES] == DTYPE_NAMES
    assert set(DTYPES) == set(FORMATS)


@pytest.mark.parametrize("coder", ["max", "fast"])
def test_lossless_returns_every_bit_of_every_dtype(tmp_path: Path, coder: Any) -> None:
    state = every_dtype()
    birdie.save(state, tmp_path / "x.birdie", lossless=True, effort=coder)
    loaded = birdie.load(tmp_path / "x.birdie")
    assert loaded.keys() == state.keys()
    assert [name for name in state if not same_bits(loaded[name], state[name])] == []


def test_the_default_coder_makes_the_smallest_file(tmp_path: Path) -> None:
    assert set(DEFAULTS) == {"auto"}
    sizes = [birdie.save(small_model(), tmp_path / "x.birdie", effort=coder).bytes for coder in ("auto", "max", "fast")]
    assert sizes[0] == sizes[1] < sizes[2]


def test_the_default_is_int8_within_half_a_step(tmp_path: Path) -> None:
    state = small_model()
    originals = {name: weight.clone() for name, weight in state.items()}
    summary = birdie.save(state, tmp_path / "x.birdie")
    loaded = birdie.load(tmp_path / "x.birdie")
    for name in ("tok_emb.weight", "blocks.0.w"):
        step = state[name].abs().amax(1, keepdim=True) / 127 * 2 ** (1 / 16)
        assert bool(((loaded[name] - state[name]).abs() <= step / 2 * 1.0001).all())
    assert torch.equal(loaded["blocks.0.norm"], state["blocks.0.norm"])  # which costs less than 256 bytes
    assert torch.equal(loaded["steps"], state["steps"])
    assert {row.name: row.scheme for row in summary.tensors} == {
        "blocks.0.norm": "lossless",
        "blocks.0.w": "trellis",
        "lm_head.weight": "trellis",
        "mask": "lossless",
        "steps": "lossless",
        "tok_emb.weight": "alias",
    }
    assert all(torch.equal(state[name], originals[name]) for name in state)


def test_tied_tensors_stay_tied_and_cost_nothing(tmp_path: Path) -> None:
    state = small_model()
    summary = birdie.save(state, tmp_path / "x.birdie")
    loaded = birdie.load(tmp_path / "x.birdie", dtype=torch.float64)
    assert loaded["tok_emb.weight"] is loaded["lm_head.weight"]
    assert next(row.bytes for row in summary.tensors if row.scheme == "alias") == 0
    assert summary.weights == sum(weight.numel() for name, weight in state.items() if name != "lm_head.weight")
    assert torch.equal(
        decode_tensor(tmp_path / "x.birdie", "tok_emb.weight"), decode_tensor(tmp_path / "x.birdie", "lm_head.weight")
    )


def test_overlapping_views_that_differ_are_not_ties(tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    state = {"a": base, "b": base.T, "c": base[:2], "d": base.view(torch.int32)}
    birdie.save(state, tmp_path / "x.birdie", lossless=True)
    loaded = birdie.load(tmp_path / "x.birdie")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    """On any number of threads."""
    state = small_model()
    variants = [(state, 1), (state, 4), (dict(state), 2)]
    files = []
    for number, (tensors, workers) in enumerate(variants):
        birdie.save(tensors, tmp_path / f"{number}.birdie", scheme="int6", workers=workers)
        files.append((tmp_path / f"{number}.birdie").read_bytes())
    assert len(set(files)) == 1


def test_rules_and_specs(tmp_path: Path) -> None:
    path = tmp_path / "x.birdie"
    for scheme in ("int4", Grid(bits=4), [("*.w", "int4")], {"blocks.*": Grid(bits=4)}):
        birdie.save(small_model(), path, scheme=scheme)
        assert len(birdie.load(path)["blocks.0.w"][0].unique()) <= 15


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=st.floats(1.5, 9))
def test_budgets_are_met(tmp_path: Path, bits: float) -> None:
    weights = sum(weight.numel() for weight in small_model().values()) - 128 * 64
    budget = int(bits * weights / 8)
    summary = birdie.save(small_model(), tmp_path / "x.birdie", budget=budget)
    assert budget - max(64, budget // 1000) <= summary.bytes <= budget
    assert summary.bytes == (tmp_path / "x.birdie").stat().st_size
    assert summary.budget == birdie.inspect(tmp_path / "x.birdie").budget == budget


def test_bits_are_a_budget_per_weight(tmp_path: Path) -> None:
    summary = birdie.save(small_model(), tmp_path / "x.birdie", bits=4)
    assert 3.9 <= summary.bits_per_weight <= 4


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.birdie"
    with pytest.raises(BudgetError, match=r"0\.01 bits per weight .* bits per weight"):
        birdie.save(small_model(), path, bits=0.01)
    with pytest.raises(BudgetError, match="cannot be met"):
        birdie.save(small_model(), path, budget=100)
    with pytest.raises(WeightsError, match=r"'blocks\.0\.w' holds 1 NaN"):
        birdie.save(
            small_model() | {"blocks.0.w": torch.full((1, 1), float("nan")).expand(1, 1)},
            path,
            scheme=[("blocks.0.w", "int8")],
        )
    with pytest.raises(ConfigError, match="JSON"):
        birdie.save(small_model(), path, metadata={"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        birdie.save(small_model(), tmp_path / "file" / "x.birdie")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quality": 0.01}, "quality"),
        ({"calibration": ()}, "calibration is not"),
        ({"scheme": "int6", "budget": 10_000}, "nothing to choose"),
        ({"scheme": "int66"}, "66"),
        ({"scheme": [("nothing", "int6")]}, "matches no tensor"),
        ({"bits": 0}, "bits=0"),
        ({"budget": 0}, "budget 0"),
        ({"effort": "best"}, "'best'"),
        ({"budget": 6000.0}, r"budget 6000\.0 is not a whole number"),
        ({"budget": "6 apples"}, "'6 apples'"),
        ({"bits": "four"}, "bits='four'"),
        ({"bits": float("nan")}, "bits=nan"),
        ({"workers": -1}, "workers -1"),
        ({"metadata": [1]}, "metadata is a list"),
        ({"metadata": "abc"}, "metadata is a str"),
        ({"scheme": 5}, "scheme 5 is neither"),
        ({"scheme": Grid}, "neither spec nor rule"),
        ({"scheme": ["int6"]}, "'int6' is neither"),
        ({"scheme": [("*", 5)]}, "5.* is neither"),
    ],
)
def test_settings_that_make_no_sense_are_one_clear_sentence(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        birdie.save(small_model(), tmp_path / "new" / "x.birdie", **settings)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"device": "bogus"}, "device 'bogus' is unknown"),
        ({"device": "cuda:99"}, "device 'cuda:99' is unknown or not available"),
        ({"into": {}}, "into is a dict"),
        ({"into": nn.Linear(8, 9), "dtype": torch.int32}, "cast to int32"),
        ({"dtype": "float32"}, "'float32' is not a torch.dtype"),
        ({"workers": 0}, "workers 0"),
        ({"max_bytes": 1e9}, "max_bytes 1000000000"),
    ],
)
def test_loading_into_what_cannot_be_is_refused_before_the_file_is_read(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        birdie.load(tmp_path / "missing.birdie", **settings)


@pytest.mark.parametrize("path", ["a\0b.birdie", "\ud800.birdie", 3, None])
def test_paths_that_no_file_can_have_are_refused(path: Any) -> None:
    for use in (lambda: birdie.save(small_model(), path), lambda: birdie.load(path), lambda: birdie.inspect(path)):
        with pytest.raises(ConfigError, match="not a path"):
            use()


def test_one_worker_is_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    birdie.save(small_model(), tmp_path / "x.birdie")
    decode, threads = entropy.decode, []

    def spy(*args: Any) -> Any:
        threads.append(args[6])
        return decode(*args)

    monkeypatch.setattr(entropy, "decode", spy)
    birdie.load(tmp_path / "x.birdie", workers=1)
    assert set(threads) == {1}


@pytest.mark.parametrize(
    ("item", "match"),
    [
        ({"a": 1}, "'a' is a int"),
        ({3: torch.ones(1)}, "item 3"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a'"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({"a": {"b": torch.ones(1)}}, "flat dict"),
        ({"a": torch.zeros(1).expand(1 << 44)}, r"'a' \(\(17592186044416,\), which repeats 4 bytes"),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, "'a' .nested"),
        ({"a": UninitializedParameter()}, "'a' .lazy"),
        (lambda: {"a": FakeTensorMode().from_tensor(torch.ones(3))}, "'a' .a FakeTensor tensor without data"),
        ({"a\0": torch.ones(1)}, "not text"),
        ({"a\ud800": torch.ones(1)}, "not text"),
        ("model.pt", "the model is a str"),
        ([torch.ones(1)], "the model is a list"),
    ],
)
def test_what_is_not_a_plain_tensor_is_refused(tmp_path: Path, item: Any, match: str) -> None:
    with pytest.raises(WeightsError, match=match):
        birdie.save(item() if callable(item) else item, tmp_path / "x.birdie")


@pytest.mark.parametrize("lossless", [True, False])
def test_views_that_negate_or_conjugate_are_stored_as_what_they_show(tmp_path: Path, lossless: bool) -> None:
    base = torch.randn(80, 64)
    pairs = torch.view_as_complex(torch.randn(4, 2))
    state = {"neg": torch._neg_view(base), "conj": pairs.conj(), "imag": pairs.conj().imag}
    birdie.save(state, tmp_path / "x.birdie", lossless=lossless)
    loaded = birdie.load(tmp_path / "x.birdie")
    assert torch.equal(loaded["conj"], pairs.conj())
    assert all(torch.allclose(loaded[name], state[name], atol=0.03) for name in ("neg", "imag"))


def test_modules_go_in_and_come_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, target = (nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9)) for _ in range(2))
    birdie.save(source, tmp_path / "x.birdie", lossless=True)
    assert birdie.load(tmp_path / "x.birdie", into=target) is target
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )


def test_a_module_that_does_not_fit_is_told_how(tmp_path: Path) -> None:
    birdie.save(nn.Linear(8, 9), tmp_path / "x.birdie", lossless=True)
    with pytest.raises(WeightsError, match=r"different shape: weight \(9, 8\) in the file, \(8, 9\) in the module"):
        birdie.load(tmp_path / "x.birdie", into=nn.Linear(9, 8))
    with pytest.raises(WeightsError, match="unexpected: bias"):
        birdie.load(tmp_path / "x.birdie", into=nn.Linear(8, 9, bias=False))
    with pytest.raises(WeightsError, match=r"missing: 0\.bias, 0\.weight"):
        birdie.load(tmp_path / "x.birdie", into=nn.Sequential(nn.Linear(8, 9)))


def test_summary_and_metadata(tmp_path: Path) -> None:
    about = {"model": "gpt", "text": "ünïcode", "nested": {"a": [1, 2.5, None]}}
    saved = birdie.save(small_model(), tmp_path / "x.birdie", metadata=about)
    read = birdie.inspect(tmp_path / "x.birdie")
    assert saved == read
    assert read.metadata == about
    answer = json.loads(json.dumps(read.to_json()))
    facts = ["path", "bytes", "budget", "weights", "bits_per_weight", "effort", "load_seconds"]
    assert list(answer) == [*facts, "tensors", "files", "base", "base_files", "not_kept"]
    assert answer["bytes"] == (tmp_path / "x.birdie").stat().st_size
    assert list(answer["tensors"][0]) == ["name", "shape", "dtype", "scheme", "bytes"]


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    seen: list[tuple[float, float | None]] = []
    birdie.save(
        small_model(),
        tmp_path / "x.birdie",
        bits=5,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert all(total is not None and done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_the_decoded_size_is_limited(tmp_path: Path) -> None:
    """A small file can stand for a huge tensor of zeros; it is refused before memory is asked for."""
    path = tmp_path / "x.birdie"
    birdie.save({"w": torch.zeros(64, 64)}, path, lossless=True)
    with pytest.raises(ArtifactError, match="16,384 bytes to decode, more than the 1,000"):
        birdie.load(path, max_bytes=1000)
    with pytest.raises(ArtifactError, match="more than the 1,000"):
        decode_tensor(path, "w", max_bytes=1000)
    container.write(path, [Entry("w", 1, DTYPES.index(torch.float32), (1 << 40,), (), (Stream(0, b""),) * 4)])
    with pytest.raises(ArtifactError, match="max_bytes"):
        birdie.load(path)


def test_not_yet_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lazy"):
        birdie.load(tmp_path / "x.birdie", lazy=True)
    with pytest.raises(ArtifactError, match="cannot open"):
        birdie.load(tmp_path / "x.birdie")
    birdie.save(small_model(), tmp_path / "x.birdie")
    with pytest.raises(ArtifactError, match="no tensor 'nothing'"):
        decode_tensor(tmp_path / "x.birdie", "nothing")


@pytest.mark.parametrize(
    "entry",
    [
        Entry("w", 99, 11, (2, 2)),
        Entry("w", 1, 63, (2, 2)),
        Entry("w", 1, 11, (2, 2)),
        Entry("w", 2, 8, (2, 2), (), (Stream(0, b""), Stream(0, b""))),
        Entry("w", 3, 11, (2, 2), (7,), (Stream(0, b""), Stream(0, b""))),
        Entry("w", 1, 0, (2, 2), (), (Stream(0, b"\x05"),)),
        Entry("w", 2, 11, (2, 2), (), (Stream(0, b""), Stream(0, b"\x7f\xff\x7f"))),
    ],
)
def test_well_formed_files_with_impossible_contents_are_refused(tmp_path: Path, entry: Entry) -> None:
    container.write(tmp_path / "x.birdie", [entry])
    with pytest.raises(ArtifactError, match="w"):
        birdie.load(tmp_path / "x.birdie")


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"budget":"x"}', b'{"metadata":3}', b"\xff"])
def test_metadata_that_is_not_ours_is_refused(tmp_path: Path, metadata: bytes) -> None:
    container.write(tmp_path / "x.birdie", [], metadata)
    with pytest.raises(ArtifactError, match="metadata"):
        birdie.inspect(tmp_path / "x.birdie")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[bytearray], None]], Path]:
    """Write the model's file with one change made to its bytes."""
    folder = tmp_path_factory.mktemp("damaged")
    birdie.save(small_model(), folder / "original.birdie")
    original = (folder / "original.birdie").read_bytes()

    def write(change: Callable[[bytearray], None]) -> Path:
        data = bytearray(original)
        change(data)
        (folder / "damaged.birdie").write_bytes(data)
        return folder / "damaged.birdie"

    return write


@settings(max_examples=25)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(damaged: Any, where: float, bit: int) -> None:
    def flip(data: bytearray) -> None:
        data[int(where * len(data))] ^= 1 << bit

    with pytest.raises(ArtifactError):
        birdie.load(damaged(flip))


@settings(max_examples=25)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed(damaged: Any, keep: float) -> None:
    def cut(data: bytearray) -> None:
        del data[int(keep * len(data)) :]

    with pytest.raises(ArtifactError):
        birdie.load(damaged(cut))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_under_a_repaired_checksum_decodes_or_is_refused(
    damaged: Any, tmp_path: Path, data: st.DataObject
) -> None:
    """Whoever can compute a CRC can write any payload: it may decode to other numbers, but never anything worse."""
    with Reader(damaged(lambda data: None)) as reader:  # noqa: ARG005
        entries = [reader.read(name) for name in reader.names]
    chosen = data.draw(st.sampled_from([i for i, entry in enumerate(entries) if any(s.payload for s in entry.streams)]))
    streams = []
    for stream in entries[chosen].streams:
        payload = bytearray(stream.payload)
        for position in data.draw(st.lists(st.integers(0, max(len(payload) - 1, 0)), max_size=3)):
            if payload:
                payload[position] ^= data.draw(st.integers(1, 255))
        streams.append(Stream(data.draw(st.sampled_from([stream.coder, 0, 1, 2, 3, 4, 5, 200])), bytes(payload)))
    old = entries[chosen]
    entries[chosen] = Entry(old.name, old.scheme, old.dtype, old.shape, old.params, tuple(streams))
    container.write(tmp_path / "y.birdie", entries)
    with contextlib.suppress(ArtifactError):
        birdie.load(tmp_path / "y.birdie")


class Masked(nn.Module):
    """A linear layer with buffers that are not finite, some of the size of weights."""

    causal: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(96, 64)
        self.register_buffer("causal", torch.full((80, 80), -torch.inf).triu(1))
        self.register_buffer("bounds", torch.tensor([-torch.inf, 0.5, torch.inf], dtype=torch.float16))
        self.register_buffer("unset", torch.full((70, 80), torch.nan, dtype=torch.bfloat16))
        self.register_buffer("hidden", torch.full((80, 80), torch.nan), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(rows) + self.causal[0, :1]
        return scores


def class_nats(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(rows), torch.arange(len(rows)) % 64, reduction="sum")


@pytest.mark.parametrize(
    ("options", "calibrated"),
    [
        ({"scheme": [("*", "codebook")]}, False),
        ({"bits": 6}, True),
        *(
            pytest.param(options, calibrated, marks=pytest.mark.nightly)
            for options, calibrated in [
                *((options, False) for options in ({"budget": 9000}, {"scheme": "fp16"})),
                *((options, True) for options in ({}, {"scheme": "int6"})),
            ]
        ),
    ],
    ids=str,
)
def test_buffers_that_are_not_finite_are_kept_exactly(tmp_path: Path, options: Any, calibrated: bool) -> None:
    """Causal masks are buffers, and no quantizer holds an infinity."""
    module, path = Masked(), tmp_path / "x.birdie"
    if calibrated:
        options = options | {"calibration": (module, list(torch.randn(8, 16, 96)), class_nats)}
    birdie.save(module, path, **options)
    loaded = birdie.load(path)
    assert loaded.keys() == module.state_dict().keys()
    assert [
        name for name, buffer in module.named_buffers() if name != "hidden" and not same_bits(loaded[name], buffer)
    ] == []
    birdie.load(path, into=Masked())


@pytest.mark.parametrize(
    "options", mostly_nightly([{}, {"bits": 6}, {"scheme": [("*", "int6")]}], [{"scheme": [("*", "int6")]}]), ids=str
)
def test_masks_in_a_state_dict_are_told_by_their_values(tmp_path: Path, options: Any) -> None:
    """Zeros and −inf alone are a mask; weights with an infinity or NaN among them are refused as ever."""
    module = Masked()
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in ("unset", "bounds")}
    birdie.save(state, tmp_path / "x.birdie", **options)
    assert same_bits(birdie.load(tmp_path / "x.birdie")["causal"], module.causal)
    state["linear.weight"] = state["linear.weight"].clone()
    for bad in (torch.inf, torch.nan):
        state["linear.weight"][0, 0] = bad
        with pytest.raises(WeightsError, match=r"'linear\.weight' holds 1 NaN or infinite"):
            birdie.save(state, tmp_path / "x.birdie", **options)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantized and distributed ones are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a wrapper")


class Named(torch.Tensor):
    """A tensor with memory, and nothing else."""


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"lossless": True}], ids=str)
def test_tensors_that_wrap_others_are_refused_by_name(tmp_path: Path, options: Any) -> None:
    """torchao's and distributed tensors have no data pointer: one sentence instead of torch's own error."""
    path, module = tmp_path / "x.birdie", nn.Linear(96, 64)
    birdie.save(module, path)
    module.weight = nn.Parameter(Wrapper(module.weight), requires_grad=False)
    for model in (module, module.state_dict()):
        with pytest.raises(WeightsError, match=r"'weight' \(a Wrapper.*dequantize\(\)"):
            birdie.save(model, tmp_path / "y.birdie", **options)
    with pytest.raises(WeightsError, match=r"'weight' of the module \(a Wrapper"):
        birdie.load(path, into=module)
    named = {"w": torch.randn(64, 96).as_subclass(Named)}
    birdie.save(named, path, **options)
    assert birdie.load(path)["w"].shape == (64, 96)


def layer_with_bias(*values: float) -> nn.Module:
    """Return a layer whose bias begins with these values and is zero from there on."""
    layer = nn.Linear(8, 8)
    layer.bias.data = torch.tensor([*values, *[0.0] * (8 - len(values))])
    return layer


class Shared(nn.Module):
    """A module with a parameter that is a buffer as well."""

    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tensor([0.0, -torch.inf]))
        self.weight = nn.Parameter(self.bias)


@pytest.mark.parametrize(
    "model",
    [
        layer_with_bias(-torch.inf),  # the values of a mask, but a parameter
        layer_with_bias(torch.inf),
        Shared(),
        {"bias": torch.full((64, 64), -torch.inf)},
        {"bias": torch.full((64, 64), torch.inf)},
        {"bias": torch.tensor([0.0, torch.inf])},
        {"bias": torch.tensor([0.0, -torch.inf, 1e-3])},
        {"bias": torch.tensor([0.0, -torch.inf, torch.nan])},
    ],
)
@pytest.mark.parametrize("scheme", [None, "int6"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, model: Any, scheme: str | None) -> None:
    """A bias that began at zero and diverged has the values of a mask."""
    with pytest.raises(WeightsError, match=r"'bias' holds [\d,]+ NaN or infinite"):
        birdie.save(model, tmp_path / "x.birdie", scheme=scheme)


@pytest.mark.parametrize("build", [lambda: Wrapper(torch.eye(64)), lambda: torch.eye(64).to_sparse()])
def test_modules_of_unusual_tensors_are_refused_everywhere(tmp_path: Path, build: Any) -> None:
    def module() -> nn.Module:
        layer = nn.Linear(64, 64)
        layer.weight = nn.Parameter(build(), requires_grad=False)
        return layer

    path, plain = tmp_path / "x.birdie", nn.Linear(64, 64)
    birdie.save(plain, path)
    calibration = module(), [torch.ones(2, 64)] * 2, class_nats
    for call in (
        lambda: birdie.load(path, into=module()),
        lambda: birdie.spectral(module()),
        lambda: birdie.compress_weights(module()),
        lambda: birdie.save(plain, tmp_path / "y.birdie", calibration=calibration),
        lambda: birdie.save(module(), tmp_path / "y.birdie", lossless=True),
    ):
        with pytest.raises(WeightsError, match="weight'"):
            call()


def test_a_model_that_torchao_quantized_is_refused(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    with pytest.raises(WeightsError, match=r"'0\.weight' \(a Int8Tensor.*dequantize\(\)"):
        birdie.save(model, tmp_path / "x.birdie")
    plain = {name: tensor.dequantize() if name == "0.weight" else tensor for name, tensor in model.state_dict().items()}
    birdie.save(plain, tmp_path / "x.birdie", lossless=True)
    assert same_bits(birdie.load(tmp_path / "x.birdie")["0.weight"], plain["0.weight"])


def test_a_module_that_would_lose_the_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.birdie"
    birdie.save(nn.Linear(8, 9), path, lossless=True)
    more = nn.Sequential(nn.LazyLinear(9))
    for into, how in ((nn.Linear(8, 9, device="meta"), "to_empty"), (more, "run it once")):
        with pytest.raises(WeightsError, match=rf"weight' of the module, which has no memory; .*{how}"):
            birdie.load(path, into=into)
    birdie.save(nn.Linear(8, 9, dtype=torch.complex64), path, lossless=True)
    with pytest.raises(WeightsError, match="numbers: weight complex64 in the file, float32 in the module"):
        birdie.load(path, into=nn.Linear(8, 9))
