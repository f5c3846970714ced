"""The rate–distortion benchmark is fair: rivals are at their best, nothing is measured that was not decoded."""

import argparse
import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import lossy_rivals, quality, rate_distortion, record_stack
from benchmarks.curves import bytes_at, frontier, ratios, svg
from benchmarks.quality import Quality, Subject
from benchmarks.record_search import EMBEDDING_STEPS, MATRIX_STEPS, Sweep, Tuner
from benchmarks.resnet import CLASSES, ResNet, load_resnet, normalized
from benchmarks.rivals import NotInstalledError
from birdie.artifact import int8_zlib as baseline
from birdie.data.byte_accounting import ByteTable
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import WeightsError
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.bpb import bits_per_byte


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, mlp_mult=2))
    for weight in model.parameters():
        if weight.ndim == 2 and min(weight.shape) > 4:
            nn.init.normal_(weight, std=0.3)
    return model.eval()


def subject(sequences: int = 12) -> Subject:
    """A small GPT on random bytes."""
    model = gpt()
    tokens = torch.randint(0, 256, (sequences, 17), generator=generator())
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.split(tokens, 4)]
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    return Subject("small", model, state, batches, batches, "key", lambda: GPT(model.config), lambda nats: len(nats))


def line(curve: str, size: int, kl: float, **more: float | None) -> dict[str, object]:
    found = rate_distortion.row(curve, curve, size, Quality(kl, 0.0, 1 - kl, accuracy=0.9), 1.0, "1")
    return {**found, **more}


# --- curves ---


def test_bytes_are_read_between_points_on_the_logarithm_of_kl() -> None:
    rows = [line("a", round(1000 - 100 * math.log2(kl / 0.01)), kl) for kl in (0.001, 0.01, 0.1)]
    assert bytes_at(rows, 0.02) == pytest.approx(900, abs=1)
    assert bytes_at(rows, 0.01) == 1000
    assert bytes_at(rows, 0.0005) is None
    assert bytes_at(rows, 0.2) is None


def test_only_what_nothing_beats_is_on_the_frontier() -> None:
    rows = [line("a", 100, 0.01), line("a", 120, 0.02), line("a", 80, 0.02), line("a", 90, 0.015)]
    assert [row["bytes"] for row in frontier(rows)] == [100, 90, 80]
    assert bytes_at(rows, 0.02) == 80


def test_a_curve_of_half_the_bytes_has_ratio_a_half() -> None:
    theirs = [line("them", size, kl) for size, kl in ((1000, 0.005), (800, 0.02))]
    ours = [line("birdie", size // 2, kl) for size, kl in ((1400, 0.0012), (1000, 0.005), (800, 0.02), (700, 0.05))]
    assert [found["ratio"] for found in ratios(ours, theirs)] == [0.5, 0.5]
    (middle,) = ratios(ours, theirs, [0.01])
    assert middle["ratio"] == pytest.approx(0.5)
    assert middle["rival_bytes"] == 900
    assert ratios(ours, [line("them", 1000, 0.5)])[0]["ratio"] is None
    assert [found["ratio"] for found in ratios(ours, theirs, against="disagreement")] == [0.5, 0.5]


def test_comparison_reads_the_tuned_rival_at_its_targets_and_others_at_their_own_points() -> None:
    rows = [line("birdie", 1000, 0.001), line("birdie", 600, 0.1), line("record stack", 900, 0.009)]
    rows += [line("record stack", 880, 0.011), line("NNCodec", 1200, 0.004), line("absent", 0, 0.0) | {"bytes": None}]
    found = rate_distortion.comparison(rows, [0.01])
    kl = [each for each in found if each["equal"] == "kl"]
    assert [(each["rival"], each["value"]) for each in kl] == [("record stack", 0.01), ("NNCodec", 0.004)]
    assert kl[0]["rival_bytes"] == pytest.approx(890, abs=1)
    assert {each["equal"] for each in found} == {"kl", "disagreement"}


def test_the_picture_holds_every_curve() -> None:
    rows = [line("birdie", 1000, 0.001), line("birdie", 600, 0.1), line("<rival>", 900, 0.01)]
    root = ElementTree.fromstring(svg(rows, "a title"))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert {"birdie", "<rival>", "a title", "0.01"} <= set(words)
    assert len(circles) == 3
    assert float(circles[1].get("cx", 0)) > float(circles[0].get("cx", 0))  # coarser stands further right
    assert float(circles[1].get("cy", 0)) > float(circles[0].get("cy", 0))  # and smaller lower
    with pytest.raises(ValueError, match="no row"):
        svg([line("a", 0, 0.1)], "nothing")


# --- the record stack ---


def test_hessians_are_those_of_what_each_weight_is_multiplied_with() -> None:
    model = gpt()
    names = ["tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.attn.c_v.weight", "blocks.1.mlp.proj.weight"]
    ids = torch.randint(0, 256, (3, 9), generator=generator())
    found = record_stack.hessians(model, [(ids, ids), (ids[:1], ids[:1])], names)
    with torch.no_grad():
        heads = [model._hidden(part).reshape(-1, 32).double() for part in (ids, ids[:1])]
    expected = sum(head.T @ head for head in heads)
    assert torch.allclose(found["tok_emb.weight"], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found["blocks.0.attn.c_q.weight"], found["blocks.0.attn.c_v.weight"])  # one input
    assert found["blocks.1.mlp.proj.weight"].shape == (64, 64)
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).item() == 2  # nothing is left watching


def test_a_convolutions_hessian_weighs_errors_as_its_outputs_do() -> None:
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    images = torch.randn(2, 3, 8, 8, generator=generator())
    model = nn.Sequential(layer)
    found = record_stack.hessians(model, [(images, torch.zeros(2))], ["0.weight"])["0.weight"]
    error = torch.randn(4, 3, 3, 3, generator=generator(1))
    energy = F.conv2d(images, error, stride=2, padding=1).double().square().sum()
    rows = error.flatten(1).double()
    assert torch.allclose((rows @ found * rows).sum(), energy, rtol=1e-4)


def correlated(columns: int = 40) -> Tensor:
    x = torch.randn(400, columns, generator=generator(2), dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator(3), dtype=torch.float64)
    return x.T @ x


def test_gptq_is_rounding_where_inputs_are_independent_and_better_where_they_are_not() -> None:
    weight = torch.randn(24, 40, generator=generator())
    plain = record_stack.gptq(weight, 0.4, record_stack.factor(torch.eye(40, dtype=torch.float64)))
    scales = (0.4 * weight.double().std(1, correction=0)).half()
    assert torch.equal(plain.scales, scales)
    assert torch.equal(plain.symbols, (weight.double() / scales.double()[:, None]).round().to(torch.int8))
    hessian = correlated()
    better = record_stack.gptq(weight, 0.4, record_stack.factor(hessian))

    def harm(part: record_stack.Quantized) -> float:
        error = (part.dequantized() - weight).double()
        return float((error @ hessian * error).sum())

    assert harm(better) < 0.5 * harm(plain)


def test_columns_that_never_fire_become_zero_and_rows_of_zeros_stay() -> None:
    weight = torch.randn(6, 40, generator=generator())
    weight[2] = 0
    hessian = correlated()
    hessian[:, 7] = hessian[7] = 0
    found = record_stack.gptq(weight, 0.3, record_stack.factor(hessian))
    assert (found.symbols[:, 7] == 0).all()
    assert (found.symbols[2] == 0).all()
    assert torch.isfinite(found.dequantized()).all()


def test_groups_are_kinds_of_matrices() -> None:
    assert record_stack.group_of("blocks.0.attn.c_q.weight") == record_stack.group_of("blocks.11.attn.c_q.weight")
    assert record_stack.group_of("blocks.0.attn.c_q.weight") != record_stack.group_of("blocks.0.attn.c_k.weight")
    assert record_stack.group_of("layer1.0.conv1.weight") == record_stack.group_of("layer3.2.conv1.weight")


@pytest.mark.slow  # a dozen runs of a program
def test_files_of_the_record_stack_hold_all_that_was_quantized() -> None:
    if shutil.which("lrzip") is None:
        pytest.skip("lrzip is not installed")
    given = subject()
    names = record_stack.quantized_names(given.state)
    known = record_stack.hessians(given.module, given.calibration, names)
    parts = {name: record_stack.gptq(given.state[name], 0.3, record_stack.factor(known[name])) for name in names}
    rest = {name: weight for name, weight in given.state.items() if name not in parts}
    assert {weight.ndim for weight in rest.values()} <= {1, 2}
    data = record_stack.pack(parts, rest, record_stack.layout_of(parts))
    found = record_stack.unpack(data)
    assert found.keys() == given.state.keys()
    for name, weight in given.state.items():
        expected = parts[name].dequantized() if name in parts else weight.half().float()
        assert torch.equal(found[name], expected)
    assert len(data) > record_stack.entropy_bytes(parts.values())


# --- its search ---


def test_sweeps_are_read_in_logarithms_and_backwards() -> None:
    steps = (0.1, 0.2, 0.4)
    sweep = Sweep(steps, [3 * step**2 for step in steps], [1000 - 50 * math.log2(step) for step in steps])
    for step in (0.05, 0.1, 0.15, 0.4, 0.7):
        assert sweep.kl_at(step) == pytest.approx(3 * step**2)
        assert sweep.bytes_at(step) == pytest.approx(1000 - 50 * math.log2(step))
        assert sweep.step_for(3 * step**2) == pytest.approx(step)


def test_the_search_spends_the_kl_where_the_weights_are() -> None:
    given = subject()
    tuner = Tuner(given, record_stack.hessians(given.module, given.calibration, list(given.state)), lambda _: None)
    assert tuner.has_embeddings
    count = dict.fromkeys((True, False), 0)
    for name in tuner.names:
        count[record_stack.is_embedding(name)] += given.state[name].numel()

    def judge(a: float | None, b: float | None) -> tuple[float, float]:
        size = 0.0
        for step, number in ((a, count[False]), (b, count[True])):
            size += 0 if step is None else number * (4 - math.log2(step)) / 8
        return 0.3 * (a or 0) ** 2 + 2 * (b or 0) ** 2, size

    tuner.judge = judge  # type: ignore[method-assign]
    a, b = tuner.tune(0.01)
    assert b is not None
    assert 0.3 * a**2 + 2 * b**2 == pytest.approx(0.01, rel=1e-2)
    # Lagrange: bytes fall by weights / KL on both sides alike
    share = count[True] / (count[True] + count[False])
    assert 2 * b**2 / 0.01 == pytest.approx(share, rel=0.1)


def test_the_search_judges_what_would_be_decoded() -> None:
    given = subject()
    tuner = Tuner(given, record_stack.hessians(given.module, given.calibration, list(given.state)), lambda _: None)
    fine, coarse = tuner.judge(MATRIX_STEPS[0], EMBEDDING_STEPS[0]), tuner.judge(MATRIX_STEPS[-1], EMBEDDING_STEPS[-1])
    assert 0 < fine[0] < coarse[0]
    assert fine[1] > coarse[1]
    assert tuner.judge(None, EMBEDDING_STEPS[0])[0] < fine[0]
    parts = tuner.parts(0.35, 0.05)
    state = {**given.state, **{name: part.dequantized() for name, part in parts.items()}}
    one = replace(given, held_out=given.held_out[:1], logits={}, bits=None)
    assert tuner.judge(0.35, 0.05)[0] == one.measure(state).kl


# --- the others ---


@pytest.mark.parametrize(("bits", "compressor"), [(6, "zstd"), (8, "zlib")])
def test_row_maximum_is_within_half_a_step(bits: int, compressor: str) -> None:
    state = subject().state
    coder = lossy_rivals.row_maximum(bits, compressor)
    data = coder.encode(state)
    found = coder.decode(data)
    assert found.keys() == state.keys()
    assert len(data) < sum(weight.nbytes for weight in state.values()) * bits / 32 + 8000
    for name, weight in state.items():
        if weight.ndim < 2 or weight.numel() < 1024:
            assert torch.equal(found[name], weight.half().float())
            continue
        step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((found[name] - weight).abs() <= 0.502 * step).all()


def test_the_challenges_export_is_the_challenges() -> None:
    state = subject().state
    coder = lossy_rivals.challenge_int8()
    data = coder.encode(state)
    assert data == baseline.pack(state).blob
    assert coder.decode(data).keys() == state.keys()


@pytest.mark.slow  # processes that import torch
def test_nncodec_decodes_in_a_process_that_saw_the_stream_alone() -> None:
    state = subject().state
    try:
        coarse, fine = (lossy_rivals.nncodec(qp) for qp in (-20, -38))
    except NotInstalledError as error:
        pytest.skip(str(error))
    streams = [coder.encode(state) for coder in (coarse, fine)]
    assert len(streams[0]) < len(streams[1])
    errors = []
    for coder, data in zip((coarse, fine), streams, strict=True):
        found = coder.decode(data)
        assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in state.items()}
        errors.append(max(float((found[name] - weight).abs().max()) for name, weight in state.items()))
    assert errors[1] < errors[0] / 4


def test_birdies_rows_are_whole_files_measured_after_decoding() -> None:
    given = subject()
    settings = [
        ("birdie", "exact", {"lossless": True, "coder": "fast", "calibration": None}),
        ("birdie", "coarse", {"scheme": "int4", "coder": "fast"}),
    ]
    exact, coarse = rate_distortion.birdie_rows(given, settings)
    assert (exact["kl"], exact["agreement"]) == (0, 1)
    assert coarse["kl"] > 0
    assert coarse["bytes"] < exact["bytes"] / 2
    pinned = {"scheme", "bytes", "bpb", "kl", "agreement", "accuracy", "encode_s"}
    assert pinned <= exact.keys()
    json.dumps([exact, coarse])


def test_what_is_not_installed_says_so_and_has_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossy_rivals, "RIVALS", Path("nowhere"))
    given = subject()
    (found,) = rate_distortion.rival_rows(given, rate_distortion.Cache(tmp_path, given), ["nncodec"], [])
    assert found["version"] == "not installed: make rivals"
    assert not found["bytes"]
    assert rate_distortion.comparison([found, line("birdie", 10, 0.1)], []) == []


def test_rivals_rows_are_kept_by_what_they_depend_on(tmp_path: Path) -> None:
    given = subject()
    asked: list[str] = []

    def rows(held: Subject, name: str = "a", version: str = "1") -> list[dict[str, object]]:
        cache = rate_distortion.Cache(tmp_path, held)
        return cache.rows(name, version, ["curves.py"], lambda: asked.append(name) or [{"bytes": len(asked)}])

    assert rows(given) == rows(given) == [{"bytes": 1}]
    assert len({json.dumps(rows(given)), json.dumps(rows(given, "b")), json.dumps(rows(given, version="2"))}) == 3
    assert rows(replace(given, key="other")) == [{"bytes": 4}]


def test_unknown_rivals_are_refused() -> None:
    assert rate_distortion.chosen("record, nncodec") == ["record", "nncodec"]
    assert rate_distortion.chosen("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="zip is no rival"):
        rate_distortion.chosen("zip")


# --- quality ---


def test_a_model_is_no_way_from_itself_and_every_tensor_counts() -> None:
    given = subject()
    same = given.measure(given.state)
    assert (same.kl, same.agreement) == (0, 1)
    assert same.bpb == len(given.held_out)
    changed: Mapping[str, Tensor] = {**given.state, "skip_weights": given.state["skip_weights"] + 1}
    assert given.measure(changed).kl > 0
    with pytest.raises(RuntimeError, match="skip_weights"):
        given.measure({name: weight for name, weight in given.state.items() if name != "skip_weights"})


def test_bits_are_those_of_bits_per_byte() -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1))
    tokens = np.random.default_rng(0).integers(4, 200, 3 * quality.SEQ_LEN + 1).astype(np.uint16)
    table: ByteTable = tokenizer.byte_table()
    batches = quality.windows(tokens)
    given = Subject(
        "one", model.eval(), model.state_dict(), batches, [], "", lambda: GPT(model.config),
        lambda nats: quality._bits(nats, tokens, table, tokenizer.bos_id),
    )  # fmt: skip
    device = torch.device("cpu")
    expected = bits_per_byte(
        model, tokens, table, seq_len=quality.SEQ_LEN, batch_tokens=8192, bos_id=tokenizer.bos_id, device=device
    )
    assert given.measure(model.state_dict()).bpb == pytest.approx(expected.bpb, rel=1e-6)


def test_a_digest_knows_names_values_and_data() -> None:
    state, tokens = {"a": torch.ones(3)}, np.arange(5)
    digests = {
        quality.digest(state, tokens),
        quality.digest({"b": torch.ones(3)}, tokens),
        quality.digest({"a": torch.ones(3, dtype=torch.float16)}, tokens),
        quality.digest(state, tokens[:4]),
    }
    assert len(digests) == 4
    assert quality.digest(dict(state), tokens.copy()) == quality.digest(state, tokens)


# --- ResNets ---


def test_shortcuts_have_no_weights_and_halve_the_image() -> None:
    model = ResNet(1)
    block = model.layer2[0]
    assert not [name for name, _ in block.named_parameters() if "conv" not in name and "bn" not in name]
    nn.init.zeros_(block.bn2.weight)
    nn.init.zeros_(block.bn2.bias)
    x = torch.rand(2, 16, 8, 8, generator=generator())
    found = block.eval()(x)
    assert torch.equal(found[:, 8:24], x[:, :, ::2, ::2])
    assert (found[:, :8] == 0).all()
    assert (found[:, 24:] == 0).all()


def test_resnets_are_loaded_strictly(tmp_path: Path) -> None:
    model = ResNet(2)
    state = {f"module.{name}": weight for name, weight in model.state_dict().items() if "tracked" not in name}
    torch.save({"state_dict": state, "best_prec1": 1.0}, tmp_path / "a.th")
    loaded, kept = load_resnet(tmp_path / "a.th")
    assert loaded.blocks == 2
    assert torch.equal(kept["linear.weight"], model.linear.weight)
    state["module.linear.extra"] = torch.ones(1)
    torch.save({"state_dict": state}, tmp_path / "b.th")
    with pytest.raises(WeightsError, match="no CIFAR ResNet"):
        load_resnet(tmp_path / "b.th")


def test_pixels_are_normalized_by_channel() -> None:
    black, white = torch.zeros(1, 32, 32, 3, dtype=torch.uint8), torch.full((1, 32, 32, 3), 255, dtype=torch.uint8)
    assert normalized(black)[0, :, 0, 0].tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert normalized(white).shape == (1, 3, 32, 32)
    assert len(CLASSES) == 10


@pytest.mark.slow  # decodes ten thousand images once
def test_the_real_resnet_knows_its_images(shared_data: Path, tmp_path: Path) -> None:
    weights = next((shared_data / "weights" / "resnet_cifar10").glob("resnet20-*.th"))
    try:
        given = quality.resnet_subject(weights, shared_data, tmp_path / "images.npz", count=500)
    except NotInstalledError as error:
        pytest.skip(str(error))
    found = given.measure(given.state)
    assert found.kl == 0
    assert found.accuracy is not None
    assert 0.7 < found.accuracy < 0.95
    inputs, targets = given.calibration[0]
    assert (given.module(inputs).argmax(-1) == targets).double().mean() > 0.97  # its own training images
