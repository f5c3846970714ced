"""The checks of `benchmarks.gpu`, by name and in the order of their worth.

Each yields rows with the keys what, figure, unit, target, met, note, as many as apply. At the size `small` a check runs
in seconds on a CPU.
"""

import copy
import dataclasses
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import birdie
from benchmarks import on_device, optimizer, scoring
from benchmarks.on_device import Row, line
from benchmarks.processes import ROOT, duration, median_seconds, take_turns
from benchmarks.train import RepeatedTokens
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.compress.calibration.held_out import HeldOut
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.corpus import stdlib_corpus
from birdie.gpt.data.dataset import open_dataset
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.attention_functions import softmax
from birdie.gpt.model.attention_kernels import best_kernels
from birdie.gpt.model.cost import training_cost
from birdie.gpt.model.documents import Bounds, DocumentFinder
from birdie.gpt.model.fused_loss import LossBackend, capped_loss, choose_backend
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.run_estimate import PEAK
from birdie.gpt.score import evaluator
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.package import Shape, load_or_compile
from birdie.gpt.score.window_losses import LanguageModel, max_inputs
from birdie.gpt.train.profile import profile
from birdie.gpt.train.settings import TrainingTables, TrainSettings
from birdie.gpt.train.training import Training
from birdie.system.context import Context
from birdie.system.device import choose_dtype, synchronize

CAP = 30.0  # of the logits
LOSS_STEPS = 50  # after which the loss is compared with float32's
MEASURED = 20  # last steps, whose median time counts
TESTS = ("tests/train", "tests/model", "tests/score")


@dataclass(frozen=True, slots=True)
class Setup:
    """Device and size of a check.

    Attributes:
        device: CUDA, or the CPU at a small size.
        small: tiny shapes and few steps: the logic is tested, and nothing is measured.
    """

    device: torch.device
    small: bool


_RESULT = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+::.*\S)")  # of pytest-xdist


@dataclass(frozen=True, slots=True)
class Check:
    """A question to a GPU.

    Attributes:
        question: in a few words.
        run: yields the rows.
        seconds: limit.
        on_cpu: whether its logic runs on a CPU.
    """

    question: str
    run: Callable[[Setup], Iterator[Row]]
    seconds: float = 60.0
    on_cpu: bool = True


def machine(setup: Setup) -> Iterator[Row]:
    """Facts about the device, the speed of products and of copies."""
    device, side = setup.device, 256 if setup.small else 8192
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        yield line("device", note=f"{facts.name}, {facts.total_memory / 1e9:.0f} GB, sm_{facts.major}{facts.minor}")
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        yield line("CUDA, cuDNN, NCCL", note=f"{torch.version.cuda}, {cudnn}, {_nccl()}")
    for module in ("triton", "flash_attn_interface", "torchao"):
        yield line(module, note=_version(module))
    dtype = choose_dtype("auto", device)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = median_seconds(lambda: a @ b, device)
    yield line(f"product of {side} × {side}, {dtype}", 2 * side**3 / seconds / 1e12, "TFLOP/s")
    host = torch.empty(side, side, dtype=torch.float32)
    copies = {"device memory": torch.empty(side, side, device=device), "host": host}
    if device.type == "cuda":
        copies["pinned host"] = host.pin_memory()
    buffer = torch.empty(side, side, device=device)
    for name, source in copies.items():
        seconds = median_seconds(partial(buffer.copy_, source, non_blocking=True), device)
        yield line(f"copy from {name}", 4 * side**2 / seconds / 1e9, "GB/s")


def attention(setup: Setup) -> Iterator[Row]:
    """Every attention kernel against softmax in float64: output, gradient, time."""
    device = setup.device
    batch, heads, kv_heads, length, width = (2, 4, 2, 64, 16) if setup.small else (8, 8, 4, 1024, 64)
    window = length // 4
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, n, length, width, generator=generator) for n in (heads, kv_heads, kv_heads))
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (q, k, v))
    cuts = torch.tensor(sorted({0, *range(length, batch * length, length), length // 3, length + 5, batch * length}))
    bounds = Bounds(cuts.int().to(device), length)
    kernels = best_kernels(device, dtype)
    ways: dict[str, tuple[Callable[[], Tensor], Tensor]] = {}
    causal, windowed, documents = (_mask(cuts, batch, length, *limits).to(device) for limits in _limits(window))
    ways["SDPA, default"] = (lambda: softmax(q, k, v, None)), causal
    ways["SDPA, mask of documents"] = (lambda: softmax(q, k, v, documents)), documents
    if device.type == "cuda":
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            ways[f"SDPA, {name.lower()}"] = partial(_by_backend, getattr(SDPBackend, name), q, k, v), causal
    if (plain := kernels.plain) is not None:
        ways[f"{kernels.name}, plain"] = (lambda: plain(q, k, v, 0)), causal
        ways[f"{kernels.name}, window"] = (lambda: plain(q, k, v, window)), windowed
    if (varlen := kernels.varlen) is not None:
        ways[f"{kernels.name}, documents"] = (lambda: varlen(q, k, v, bounds, 0)), documents
    yield line("kernels chosen", note=kernels.name)
    for name, (way, mask) in ways.items():
        try:
            y = way()
            gradients = torch.autograd.grad(y.square().sum(), (q, k, v))
        except (RuntimeError, TypeError) as error:  # a kernel that does not take these tensors is a result
            yield line(name, note=f"failed: {' '.join(str(error).split())[:200]}", met=False)
            continue
        worst = max(map(_distance, (y, *gradients), _exact(q, k, v, mask)))
        limit = 0.02 if dtype == torch.bfloat16 else 1e-4
        milliseconds = 1e3 * median_seconds(lambda way=way: torch.autograd.grad(way().sum(), (q, k, v)), device)  # type: ignore[misc]
        target = f"error ≤ {limit:g}"
        yield line(name, milliseconds, "ms", target=target, met=worst <= limit, note=f"{worst:.2g}")


def _limits(window: int) -> tuple[tuple[int, bool], ...]:
    return (0, False), (window, False), (0, True)


def _mask(cuts: Tensor, batch: int, length: int, window: int, documents: bool) -> Tensor:
    """Return (batch, 1, length, length): which keys each position may attend to, from the definition."""
    position = torch.arange(batch * length)
    segment = torch.bucketize(position, cuts, right=True)
    flat = position.view(batch, length)
    mask = flat[:, :, None] >= flat[:, None]
    if window:
        mask &= flat[:, :, None] - flat[:, None] < window
    if documents:
        mask &= segment[flat][:, :, None] == segment[flat][:, None]
    return mask[:, None]


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Return attention in float64 and the gradients of the sum of its squares with respect to q, k and v."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in wide[1:])
    scores = (wide[0] @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    y = scores.softmax(-1) @ values
    return y.detach(), *torch.autograd.grad(y.square().sum(), wide)


def _by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = backend is not SDPBackend.EFFICIENT_ATTENTION  # which takes no keys that several heads share
    if not shared:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


def _distance(tensor: Tensor, reference: Tensor) -> float:
    difference = tensor.detach().double() - reference
    return float((difference.norm() / reference.norm()).item())


def training(recipe: str, setup: Setup) -> Iterator[Row]:
    """Steps of the model of a recipe: loss against float32, tokens per second, memory, share of the peak FLOP/s."""
    ways: dict[str, Row] = {
        "float32, eager": {"compute_dtype": "float32", "compile": False},
        "eager": {"compile": False},
        "compiled": {},
        "compiled, CUDA graphs": {"compile_mode": "reduce-overhead"},
        "compiled, fp8": {"fp8": True},
    }
    if setup.small:
        ways = {name: changes for name, changes in ways.items() if "compiled" not in name}
    results: dict[str, tuple[float, float]] = {}
    for name, changes in ways.items():
        notes: list[str] = []
        _reset_peak(setup.device)
        run, config, settings = _run(recipe, setup, notes, **changes)
        clock, loss = [0.0], 0.0
        for step in run:
            clock.append(step.train_ms)
            loss = step.loss
        milliseconds = statistics.median([end - begin for begin, end in pairwise(clock)][-MEASURED:])
        rate = 1e3 * settings.train_batch_tokens / milliseconds
        results[name] = rate, loss
        exact = results["float32, eager"][1]
        note = [f"loss {loss:.4f} ({loss / exact - 1:+.2%})", *_peak(setup.device)]
        if (share := _peak_share(config, settings, rate, setup)) is not None:
            note.append(f"{share:.1%} of the peak FLOP/s")
        note += [line for line in notes if "graphs" in line or "fp8" in line]
        del run
        yield line(name, round(rate), "tokens/s", note="; ".join(note))
    for name, base, target in (("compiled, CUDA graphs", "compiled", 1.0), ("compiled, fp8", "compiled", 1.1)):
        if name in results:
            ratio = results[name][0] / results[base][0]
            yield line(f"{name}: speed over {base}", ratio, "×", target=f"≥ {target}", met=ratio >= target)


def _run(recipe: str, setup: Setup, notes: list[str], **changes: Any) -> tuple[Training, GPTConfig, TrainSettings]:
    """Return a run of the recipe's model on one repeated batch."""
    plain = find(recipe).recipe()
    config, length, tokens, steps = plain.model, plain.train.train_seq_len, 65_536, LOSS_STEPS
    if setup.small:
        config = dataclasses.replace(config, model_dim=32, num_heads=2, num_kv_heads=1, vocab_size=64)
        length, tokens, steps = 32, 64, 4
    settings = TrainSettings(
        iterations=steps,
        train_batch_tokens=tokens,
        train_seq_len=length,
        accumulation=1,
        warmup_steps=3,
        warmdown_iters=0,
        max_wallclock_seconds=0,
    )
    settings = dataclasses.replace(settings, **changes)
    torch.manual_seed(0)
    model = GPT(config)
    model.kernels = best_kernels(setup.device, choose_dtype(settings.compute_dtype, setup.device), config.head_dim)
    finder = None
    if config.isolate_documents and model.kernels.varlen is not None:  # as a run has it
        finder = DocumentFinder(config.bos_id, setup.device, packed=False, notify=notes.append)
    documents = config.bos_id if config.isolate_documents else None
    run = Training(
        model,
        RepeatedTokens(settings, config.vocab_size, bos_id=documents),
        TrainingTables(settings, plain.optimizer),
        Context(setup.device, notify=notes.append),
        documents=finder,
    )
    return run, config, settings


def _reset_peak(device: torch.device) -> None:
    gc.collect()  # the run before is in cycles
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> list[str]:
    return [f"{torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB"] if device.type == "cuda" else []


def _peak_share(config: GPTConfig, settings: TrainSettings, rate: float, setup: Setup) -> float | None:
    if setup.device.type != "cuda" or not re.search("H[12]00", torch.cuda.get_device_name(setup.device)):
        return None
    sequences = settings.train_batch_tokens // settings.train_seq_len
    cost = training_cost(config, sequences, settings.train_seq_len, torch.bfloat16, depth_recurrence=False)
    return cost.flops * rate / settings.train_batch_tokens / PEAK


def muon(setup: Setup) -> Iterator[Row]:
    """The optimizer's step on the matrices of the records, against torch.optim.Muon."""
    rows = optimizer.one_process(
        0.0 if setup.small else 8.0, 0, setup.device, **({"layers": 1, "dim": 32} if setup.small else {})
    )
    for row in rows:
        met = row["ratio"] >= 3.0 if row["step"] == "birdie, banks" and not setup.small else None
        target = "≥ 3 × torch" if row["step"] == "birdie, banks" else None
        note = "" if row["ratio"] is None else f"{row['ratio']:.2f} × torch's speed"
        yield line(row["step"], row["median_ms"], "ms", target=target, met=met, note=note)


def fused(setup: Setup) -> Iterator[Row]:
    """Softcap and cross-entropy in one kernel, and the MLP in one kernel, against eager code."""
    device, backend = setup.device, choose_backend(setup.device, compiled=False)
    for shape in [(64, 64, 16)] if setup.small else [(65_536, 1024, 512), (32_768, 8192, 512)]:
        rows, vocabulary, dim = shape
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, dim, generator=generator).to(device).requires_grad_()
        weight = (torch.randn(vocabulary, dim, generator=generator) * 0.3).to(device).requires_grad_()
        targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)

        def passes(
            backend: LossBackend, hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets
        ) -> None:
            dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
            logits = F.linear(hidden.to(dtype), weight.to(dtype))
            if backend == "eager":
                loss = F.cross_entropy(CAP * torch.tanh(logits.float() / CAP), targets)
            else:
                loss = capped_loss(logits, targets, CAP, backend)
            torch.autograd.grad(loss, (hidden, weight))

        ways: dict[str, Callable[[], None]] = {name: partial(passes, name) for name in ("eager", backend)}
        seconds, peaks = {}, {}
        for name, way in ways.items():
            _reset_peak(device)
            way()
            peaks[name] = "".join(_peak(device))
        for name, times in take_turns(ways, turns=3 if setup.small else 9, device=device).items():
            seconds[name] = min(times)
        ratio = seconds["eager"] / seconds[backend]
        note = f"{1e3 * seconds[backend]:.2f} ms against {1e3 * seconds['eager']:.2f}"
        note += f"; {peaks[backend]} against {peaks['eager']}" if peaks["eager"] else ""
        target, met = (None, None) if setup.small else ("≥ 1", ratio >= 1)
        yield line(f"loss by {backend}, {' × '.join(map(str, shape))}", ratio, "×", target=target, met=met, note=note)
    if device.type == "cuda":
        yield from _fused_mlp(device)


def _fused_mlp(device: torch.device) -> Iterator[Row]:
    from birdie.gpt.model.mlp_kernels import leaky_square_mlp

    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes, scale = ((65_536, 512), (1536, 512), (512, 1536)), 512**-0.5
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors = [tensors[0], tensors[1] * scale, tensors[2] * scale]
        return [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in tensors]

    def eager(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.leaky_relu(F.linear(x, up), 0.5).square(), down)

    def both(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        y = function(*tensors)
        return [y, *torch.autograd.grad(y.float().square().mean(), tensors)]

    tensors = inputs()
    ways = {"eager": partial(both, eager, tensors)}
    ways["kernel"] = partial(both, lambda x, up, down: leaky_square_mlp(x, up, down, 0.5)[0], tensors)
    results = {name: work() for name, work in ways.items()}
    worst = max(_distance(a, b.double()) for a, b in zip(results["kernel"], results["eager"], strict=True))
    seconds = {name: statistics.median(turns) for name, turns in take_turns(ways, turns=9, device=device).items()}
    ratio = seconds["eager"] / seconds["kernel"]
    note = f"error {worst:.2g}, at most 0.02"
    yield line("MLP", ratio, "×", target="≥ 1", met=ratio >= 1 and worst <= 0.02, note=note)


def tests(setup: Setup) -> Iterator[Row]:
    """The laws of training and scoring, on the device."""
    paths = ["tests/gpt/train/test_banks.py"] if setup.small else list(TESTS)
    workers = str(max(1, min(12, (os.cpu_count() or 1) - 2)))
    command = [sys.executable, "-m", "pytest", "-v", "-n", workers, "-m", "not slow and not nightly"]
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", *paths]  # pytest-benchmark warns under xdist
    environment = os.environ | {"BIRDIE_TEST_DEVICE": setup.device.type, "PYTHONUNBUFFERED": "1"}
    counts, last = Counter[str](), ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:  # as they come: the check may be stopped
            last = text.strip() or last
            if result := _RESULT.match(text):
                counts[result[1]] += 1
                if result[1] in ("FAILED", "ERROR"):
                    yield line("failed", met=False, note=result[2][:300])
    note = ", ".join(f"{count} {name.lower()}" for name, count in counts.items()) or last[:200]
    yield line("pytest", met=process.returncode == 0, note=note)


def scoring_modes(setup: Setup) -> Iterator[Row]:
    """Sliding windows and streaming, in float32 and bfloat16, against a plain loop; then the scoring package."""
    targets, length, stride, chunks = (256, 64, 16, [16]) if setup.small else (16_384, 1024, 64, [64, 256])
    config = GPTConfig(vocab_size=260, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1)
    model = scoring.random_gpt(setup.device, config if setup.small else None)
    tokens = np.random.default_rng(0).integers(2, 256, targets + 1, dtype=np.uint16)
    ways = [f"windows stride={stride}", *(f"streaming chunk={chunk}" for chunk in chunks)]
    ways = [f"plain stride={stride}", *ways, *(f"{way} dtype=bfloat16" for way in ways)]
    text = Text(tokens, np.ones(len(tokens), np.uint16), 1)
    if not setup.small:  # compiles and allocates
        list(scoring.measure(model, text, ways, context=length, device=setup.device))
    for row in scoring.measure(model, text, ways, context=length, device=setup.device):
        exact = "bfloat16" not in row["row"]
        met = row["nats off"] <= 1e-3 if exact else None
        note = f"{1 / row['cost']:.1f} × the plain loop, {row['nats off']:.2g} nats off"
        target = "≤ 0.001 nats off" if exact else None
        yield line(row["row"], round(row["tokens/s"]), "tokens/s", target=target, met=met, note=note)
    if not setup.small:
        yield from _package(model, length, setup.device)


def _package(model: GPT, length: int, device: torch.device) -> Iterator[Row]:
    """Non-overlapping windows by the ahead-of-time package against eager mode."""
    model.compute_dtype = choose_dtype("auto", device)
    shape = Shape(max(1, max_inputs(device) // length), length, length)
    count = (1 << 18) // (shape.rows * length) * shape.rows * length  # complete batches
    tokens = np.random.default_rng(0).integers(0, 256, count + 1, dtype=np.uint16)
    text = Text(tokens, np.ones(len(tokens), np.uint16), 0)
    with tempfile.TemporaryDirectory() as folder:
        package: LanguageModel = load_or_compile(model, Path(folder) / "x.pt2", shape)
        ways: dict[str, LanguageModel] = {"eager": model, "package": package}
        for way, losses in ways.items():
            work = partial(evaluator.score, losses, text, train_seq_len=length, device=device)
            yield line(f"windows, {way}", round(count / median_seconds(work, device)), "tokens/s")


def compression(setup: Setup) -> Iterator[Row]:
    """Calibration with the module on the device against the CPU, quantization, and loading to the device."""
    width, rows = (32, 8) if setup.small else (512, 256)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, 3 * width), torch.nn.ReLU(), torch.nn.Linear(3 * width, width)]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(width, 64))
    batches = [(torch.randn(rows, width), torch.randint(64, (rows,))) for _ in range(4)]
    loaded: dict[str, dict[str, Tensor]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for device in dict.fromkeys(("cpu", str(setup.device))):
            moved_module, path = module.to(device), Path(folder) / f"{device.replace(':', '')}.birdie"
            moved = [(x.to(device), y.to(device)) for x, y in batches]
            bits = 3.0
            save(moved_module, path, bits=bits, calibration=(moved_module, moved, _cross_entropy))  # loads libraries
            start = time.perf_counter()
            save(moved_module, path, bits=bits, calibration=(moved_module, moved, _cross_entropy))
            synchronize(setup.device)
            yield line(f"calibrate and save, module on {device}", time.perf_counter() - start, "s")
            sizes[device] = path.stat().st_size
            seconds = median_seconds(lambda path=path: load(path, device=setup.device), setup.device, 3)  # type: ignore[misc]
            loaded[device] = load(path, device=setup.device)
            yield line("load to the device", 1e3 * seconds, "ms")
            wrong = [name for name, tensor in loaded[device].items() if tensor.device.type != setup.device.type]
            if wrong:
                yield line("tensors on another device", met=False, note=wrong[0])
    if len(loaded) == 2:
        measure = HeldOut(module, [(x.to(setup.device), y.to(setup.device)) for x, y in batches], _cross_entropy)
        errors = {device: measure(state) for device, state in loaded.items()}
        note = ", ".join(f"{device}: {sizes[device]:,} bytes, KL {errors[device]:.3g}" for device in loaded)
        yield line("files by CPU and device", note=note)


def _cross_entropy(module: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def loader(setup: Setup) -> Iterator[Row]:
    """The prefetching loader: tokens per second to the device, and how long a training step waits for it."""
    with tempfile.TemporaryDirectory() as folder:
        list(prepare(stdlib_corpus(), tokenizer="bytes", root=Path(folder)))
        data = open_dataset(next((Path(folder) / "datasets").iterdir()))
        tokens, length = (1024, 64) if setup.small else (65_536, 1024)
        on_gpu = setup.device.type == "cuda"
        batches = Batches(
            data.train,
            batch_tokens=tokens,
            seq_len=length,
            accumulation=1,
            order="shuffled",
            seed=0,
            pin_memory=on_gpu,
        )
        try:
            waits = []
            for _ in range(5 if setup.small else 100):
                seconds = duration(
                    lambda: [part.to(setup.device, non_blocking=True) for part in batches.next()], setup.device
                )
                waits.append(seconds)
            pinned = batches.next()[0].is_pinned() if on_gpu else None
        finally:
            batches.close()
    median = statistics.median(waits)
    note = f"{1e3 * median:.2f} ms a batch" + ("" if pinned is None else f", pinned: {pinned}")
    yield line(f"batches of {tokens:,}", round(tokens / median), "tokens/s", note=note, met=pinned)


def profiles(setup: Setup) -> Iterator[Row]:
    """The step by range."""
    run, _, _ = _run("baseline", setup, [], compile=False)
    run.warm_up()
    result = profile(run, setup.device, None)
    assert result is not None
    for name, milliseconds in result.items():
        if "/" not in name:
            yield line(name, milliseconds, "ms")


def byte_budget(setup: Setup) -> Iterator[Row]:
    """Training on what a file of a byte budget stores: its steps against plain ones, and the file."""
    config = GPTConfig(vocab_size=260, num_layers=2, model_dim=64, num_heads=2, num_kv_heads=1)
    rows, length, steps = (4, 32, 12) if setup.small else (64, 1024, 120)
    torch.manual_seed(0)
    start = GPT(config if setup.small else GPTConfig(vocab_size=260)).to(setup.device)
    start.compute_dtype = choose_dtype("auto", setup.device)
    documents = islice(stdlib_corpus().train(), 10 if setup.small else 100)
    text = torch.tensor(bytearray("".join(documents).encode()), dtype=torch.uint8)
    windows = text[: len(text) // (rows * length) * rows * length].view(-1, rows, length).to(setup.device).long()
    weights = sum(weight.numel() for weight in start.parameters())
    clocks: dict[str, list[float]] = {}
    for way, budget in {"plain": None, "budget": 3 * weights // 8}.items():
        model = copy.deepcopy(start)
        run = birdie.fine_tune(model, list(windows), _next_bytes, steps=steps, budget=budget)
        clocks[way] = []
        for step in run:
            synchronize(setup.device)
            clocks[way].append(time.perf_counter())
            last = step
    typical = {way: statistics.median(b - a for a, b in pairwise(clock)) for way, clock in clocks.items()}
    total = {way: clock[-2] - clock[0] for way, clock in clocks.items()}  # without the last calibration
    yield line("step, plain", 1e3 * typical["plain"], "ms", note=f"{weights:,} weights")
    for what, seconds in (("step on decoded weights", typical), ("the same with the encodings", total)):
        ratio = seconds["budget"] / seconds["plain"]
        met = None if setup.small else ratio <= 1.3
        yield line(what, ratio, "× plain", target="≤ 1.3", met=met)
    yield line("last calibration and encoding", clocks["budget"][-1] - clocks["budget"][-2], "s")
    with tempfile.TemporaryDirectory() as folder:
        size = birdie.save(model, Path(folder) / "x.birdie").bytes
        decoded = load(Path(folder) / "x.birdie", device=setup.device)
    held = {name: tensor for name, tensor in birdie.plain(model).state_dict().items() if name in decoded}
    same = all(torch.equal(decoded[name].to(tensor), tensor) for name, tensor in held.items())
    assert budget is not None
    note = f"loss {last.loss:.4f}; at most {budget:,} bytes, and the file holds what was trained: {same}"
    yield line("file", size, "bytes", met=same and size <= budget, note=note)


def _next_bytes(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def _version(module: str) -> str:
    try:
        return str(getattr(__import__(module), "__version__", "installed"))
    except (ImportError, OSError) as error:
        return f"not installed ({type(error).__name__})"


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return "no NCCL"


def _on_device(check: Callable[..., Iterator[Row]]) -> Callable[[Setup], Iterator[Row]]:
    return lambda setup: check(setup.device, small=setup.small)


CHECKS: dict[str, Check] = {
    "machine": Check("what is this GPU, and how fast are products and copies?", machine, 60),
    "attention": Check("does every attention kernel equal softmax in float64, and how fast is it?", attention, 90),
    "training": Check(
        "how fast is a step of the baseline, eager, compiled, as graphs, in fp8?", partial(training, "baseline"), 150
    ),
    "tests": Check("do the laws of training and scoring hold on the device?", tests, 240, on_cpu=False),
    "muon": Check("how long does the optimizer take?", muon, 60),
    "fused": Check("do the fused kernels pay?", fused, 90),
    "sota": Check("the same as training, for the model of the best record", partial(training, "sota"), 150),
    "scoring": Check("how fast is scoring?", scoring_modes, 120),
    "compression": Check("does calibration use the device, and does loading reach it?", compression, 60),
    "byte budget": Check("what does training on what a file stores cost?", byte_budget, 180),
    "loader": Check("does the loader keep up?", loader, 45),
    "profile": Check("where does the time of a step go?", profiles, 90),
    "decoding on the device": Check(
        "do kernels decode to the CPU's bits, and how fast?", _on_device(on_device.tensor), 90
    ),
    "compressed in device memory": Check(
        "what do weights cost that stay compressed in memory?", _on_device(on_device.model), 120
    ),
}
"""The checks by name, the most valuable first."""
