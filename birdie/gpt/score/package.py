"""Ahead-of-time package: the losses of windows as machine code, compiled once, loaded in no time without a compiler.

    GPT ─► torch.export, the weights as inputs ─► Inductor ─► C++ compiler ─► scoring.pt2
    later:   decoded weights ──┐
             windows ──────────┴─► scoring.pt2 ─► losses

The package contains no weight, so what is scored is what was decoded. It is compiled for windows of one shape; windows
of other shapes are computed by the model. On a CPU it is compiled with `-march=native`, so it belongs to one kind of
processor, one version of torch and one version of the model's source.

A package is code that runs with the rights of whoever loads it. It is signed with a key in the user's cache folder,
which nobody else can read or write, and loaded with that signature alone: a package from elsewhere is refused. The file
is read once, so what was verified is what is loaded.

Source: AOTInductor, torch.export and torch._inductor.aoti_compile_and_package.
"""

import dataclasses
import hashlib
import hmac
import io
import json
import os
import platform
import secrets
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from birdie.errors import ConfigError
from birdie.gpt import model as model_package
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.rotary import Rotary
from birdie.gpt.score.mode import ScoringMode, ScoringSettings
from birdie.gpt.score.window_losses import max_inputs
from birdie.system.callbacks import Notify, no_message
from birdie.system.device import dtype_name
from birdie.system.distributed import World
from birdie.system.files import read_trusted, user_cache, write_bytes
from birdie.system.outputs import require_file, require_writable
from birdie.system.regular import regular_file

_MAGIC = b"birdie scoring package 1\n"
_MISMATCHES = {
    "model": "another model",
    "code": "another version of birdie's model",
    "device": "another device",
    "processor": "another processor",
}

Compiled = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a batch of windows.

    Attributes:
        rows: windows in a batch.
        scored: last positions of each that are scored.
    """

    rows: int
    length: int
    scored: int


class PackagedModel:
    """Model whose windows of one shape are computed by a package, and everything else by the model itself.

    Args:
        model: holds the weights, in evaluation mode; they may change from call to call.
        shape: the package was compiled for.
    """

    def __init__(self, model: GPT, compiled: Compiled, shape: Shape) -> None:
        self.model, self.shape = model, shape
        self.windows = self.others = 0
        self._compiled = compiled

    def __call__(self, ids: Tensor, **more: Any) -> Tensor:
        """Return logits, computed by the model."""
        self.others += len(ids)
        logits: Tensor = self.model(ids, **more)
        return logits

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """Return the losses of targets (B, S) after the last S of ids (B, T), as `GPT.loss` does."""
        shape = self.shape
        if reduction != "none" or (ids.shape[1], targets.shape[1]) != (shape.length, shape.scored):
            self.others += len(ids)
            return self.model.loss(ids, targets, reduction)
        weights = named_weights(self.model)
        self.windows += len(ids)
        nats = [
            self._compiled(weights, _padded(x, shape.rows), _padded(y, shape.rows))[: len(x)]
            for x, y in zip(torch.split(ids, shape.rows), torch.split(targets, shape.rows), strict=True)
        ]
        return torch.cat(nats)

    @property
    def rotary(self) -> Rotary:
        """Rotary tables of the model: windows of other shapes need their base."""
        return self.model.rotary

    def diagnostics(self) -> str:
        """Return one line for the log: the share of windows that the package computed."""
        return f"ahead-of-time package: {self.windows:,} windows of {self.windows + self.others:,} computed by it"


def for_scoring(
    model: GPT,
    settings: ScoringSettings,
    mode: ScoringMode,
    path: Path,
    *,
    length: int,
    batch_tokens: int,
    world: World,
    notify: Notify = no_message,
) -> PackagedModel:
    """Return `model` with the package at `path`, for most of the windows of an evaluation.

    Args:
        model, settings, mode, batch_tokens, world: as in `evaluator.score`.
        path: of the package, which is compiled if it is missing.
        notify: called before a package is compiled.
    """
    needs = {
        f"scoring mode {mode.name}": not mode.packaged,
        f"temperature {settings.temperature:g}": settings.temperature != 1.0,
        "the n-gram bias": settings.ngram.enabled,
    }
    for name, needed in needs.items():
        if needed:
            raise ConfigError(
                f"a package computes the losses of windows, and {name} needs more; leave out one of the two"
            )
    if world.size > 1 and not path.exists():
        raise ConfigError(
            f"there is no package {path} yet, and several ranks do not compile one; run once with one rank"
        )
    batch = (settings.batch_seqs * length or batch_tokens) // world.size
    inputs = min(batch, max_inputs(model.tok_emb.weight.device))
    shape = Shape(max(1, inputs // length), length, settings.stride or length)
    return load_or_compile(model, path, shape, notify)


def load_or_compile(model: GPT, path: Path, shape: Shape, notify: Notify = no_message) -> PackagedModel:
    """Return `model` with the package at `path`, which is compiled if it is missing.

    Args:
        model: in evaluation mode, on its device, its `compute_dtype` set.
        notify: called before a package is compiled, which takes a while.
    """
    if not path.exists():
        require_writable(require_file(path).parent)
        notify(f"compiling a package for {shape.rows} × {shape.length} tokens into {path}, once")
        write_package(model, path, shape)
    return PackagedModel(model, read_package(path, requirements(model, shape)), shape)


def write_package(model: GPT, path: Path, shape: Shape) -> None:
    """Compile the losses of `model` for windows of `shape` into `path`."""
    key = _key(create=True)
    if key is None:
        raise ConfigError("the key of your packages is gone; try again")
    payload = json.dumps(requirements(model, shape), sort_keys=True).encode() + b"\n" + _compile(model, shape)
    write_bytes(path, _MAGIC + hmac.digest(key, payload, "sha256") + payload)


def read_package(path: Path, required: Mapping[str, Any]) -> Compiled:
    """Load the package at `path`, if this user compiled it and it meets what is `required`."""
    try:
        content = regular_file(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read package {path}: {(error.strerror or str(error)).lower()}") from error
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is not a package for scoring; name one, or a file that does not exist yet")
    signed, key = content[len(_MAGIC) :], _key(create=False)
    signature, payload = signed[:32], signed[32:]
    if key is None or not hmac.compare_digest(signature, hmac.digest(key, payload, "sha256")):
        raise ConfigError(
            f"package {path} was not compiled by you on this machine, or is damaged, and it holds machine code; delete "
            "it to compile it anew"
        )
    header, _, code = payload.partition(b"\n")
    actual = json.loads(header)
    for name, value in required.items():
        if actual.get(name) != value:
            mismatch = _MISMATCHES.get(name) or f"{name} {actual.get(name)}, not {value}"
            raise ConfigError(f"package {path} is for {mismatch}; delete it to compile it anew, or name another file")
    loaded = torch._inductor.aoti_load_package(io.BytesIO(code))
    return cast(Compiled, loaded)


def requirements(model: GPT, shape: Shape) -> dict[str, Any]:
    """Return everything that compiled code depends on, in plain values."""
    device = model.tok_emb.weight.device
    values = {
        "model": dataclasses.asdict(model.config),
        "depth_recurrence": model.depth_recurrence,
        "windows": f"of {shape.rows} × {shape.length} tokens, {shape.scored} scored",
        "dtype": dtype_name(model.compute_dtype),
        "device": device.type,
        "torch": torch.__version__,
        "processor": processor(device),
        "code": _source_digest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def named_weights(model: GPT) -> dict[str, Tensor]:
    """Return parameters and buffers by the names that a package takes them under, without gradients."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"model.{name}": tensor.detach() for name, tensor in weights.items()}


def processor(device: torch.device) -> str:
    """Return a short digest of the instructions that code for this processor may use."""
    if device.type == "cuda":
        features = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    else:
        flags = [name for name, has in torch.cpu.get_capabilities().items() if has is True]
        features = f"{platform.machine()} {sorted(flags)} {_cpu_flags()}"
    return hashlib.sha256(features.encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """Return the processor's instruction flags, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@cache
def _source_digest() -> str:
    """Return a digest of the source that a package is compiled from."""
    digest = hashlib.sha256()
    for folder in model_package.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _Nats(nn.Module):
    """`GPT.loss` as a function of the weights as well; the tuple keeps torch from registering the model's weights."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self._hidden = (_Loss(model),)

    def forward(self, weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        nats: Tensor = functional_call(self._hidden[0], weights, (ids, targets))
        return nats


class _Loss(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(ids, targets, reduction="none")


def _compile(model: GPT, shape: Shape) -> bytes:
    """Return the package as torch compiles it."""
    device = model.tok_emb.weight.device
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.int64, device=device)
    targets = ids[:, : shape.scored].clone()
    buffer = io.BytesIO()
    # the number of threads is chosen when it runs, not when it is compiled
    options = {"cpp.dynamic_threads": True}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about itself
            model.loss(ids, targets, reduction="none")  # builds rotary tables, which are constants of the graph
            exported = torch.export.export(_Nats(model), (named_weights(model), ids, targets), strict=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=buffer, inductor_configs=options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ConfigError(f"no package can be compiled on this machine ({reason}); score without one") from error
    return buffer.getvalue()


def _padded(rows: Tensor, count: int) -> Tensor:
    """Return `rows` with rows of zeros appended up to `count`."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.shape[1])))


def _key(*, create: bool) -> bytes | None:
    """Return the key of this user's packages on this machine; None if it is missing and not created."""
    path = user_cache() / "packages.key"
    try:
        if create and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        key = read_trusted(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the key of your packages, {path}, cannot be used: {error.strerror or error}") from error
    if len(key) != 32:
        raise ConfigError(f"the key of your packages, {path}, is damaged; delete it, and the packages signed with it")
    return key
