"""The model's way through windows as machine code: compiled once, loaded in no time, without a compiler.

    GPT ─► torch.export, the weights as inputs ─► Inductor ─► C++ compiler ─► scoring.pt2
    later:   decoded weights ──┐
             windows ──────────┴─► scoring.pt2 ─► nats

No weight is in the package, nor folded into it: what is scored is what was decoded. It is made for windows of one
shape; others take the model's own way. On a CPU it is its compiler's `-march=native`, so it is for the processor it was
made on, and for one version of torch and of the model's source.

A package is code that runs as whoever loads it. It is signed with a key that lies in the user's cache folder, which
nobody else can write to or read, and loaded with that signature alone: one that came from elsewhere is refused, never
tried. What is read is what is loaded; the file is not opened twice.

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

import birdie.model
from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.runtime.device import dtype_name
from birdie.runtime.files import read_trusted, require_file, require_writable, write_bytes
from birdie.train.compilation import cache_folder

_MAGIC = b"birdie scoring package 1\n"
_NAMES = {
    "model": "another model",
    "code": "another version of birdie's model",
    "device": "another device",
    "processor": "another processor",
}

Compiled = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of the windows that pass together.

    Attributes:
        rows: windows at once.
        length: inputs of each.
        scored: last places of each that are scored.
    """

    rows: int
    length: int
    scored: int


class Packaged:
    """A model whose windows of one shape go through a package; all else is the model's own.

    Args:
        model: holds the weights, in evaluation mode; they may change from call to call.
        compiled: the package.
        shape: what it was made for.

    Attributes:
        windows: that went through it.
        others: that did not.
    """

    def __init__(self, model: GPT, compiled: Compiled, shape: Shape) -> None:
        self.model, self.shape = model, shape
        self.windows = self.others = 0
        self._compiled = compiled

    def __call__(self, ids: Tensor, **more: Any) -> Tensor:
        """Logits, by the model."""
        self.others += len(ids)
        logits: Tensor = self.model(ids, **more)
        return logits

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """As `GPT.loss`: targets (B, S) after the last S of ids (B, T); by the package, if T and S are its own."""
        shape = self.shape
        if reduction != "none" or (ids.shape[1], targets.shape[1]) != (shape.length, shape.scored):
            self.others += len(ids)
            return self.model.loss(ids, targets, reduction)
        weights = weights_of(self.model)
        self.windows += len(ids)
        nats = [
            self._compiled(weights, _filled(x, shape.rows), _filled(y, shape.rows))[: len(x)]
            for x, y in zip(torch.split(ids, shape.rows), torch.split(targets, shape.rows), strict=True)
        ]
        return torch.cat(nats)

    def evidence(self) -> str:
        """How much of what was scored went through the package, in a line."""
        return f"ahead-of-time package: {self.windows:,} windows of {self.windows + self.others:,} went through it"


def packaged(model: GPT, path: Path, shape: Shape, notify: Callable[[str], None] = lambda _: None) -> Packaged:
    """`model` by the package at `path`, which is made if it is not there.

    Args:
        model: in evaluation mode, on its device, its `compute_dtype` set.
        path: of the package.
        shape: of the windows.
        notify: told before a package is made, which takes a while.

    Raises:
        ConfigError: the package was made for something else or by somebody else, or none can be made here.
        OutputError: it cannot be written.
    """
    if not path.exists():
        require_writable(require_file(path).parent)
        notify(f"compiling the way of {shape.rows} × {shape.length} tokens into {path}, once")
        write_package(model, path, shape)
    return Packaged(model, read_package(path, about(model, shape)), shape)


def write_package(model: GPT, path: Path, shape: Shape) -> None:
    """Compile `model`'s way through windows of `shape` into `path`.

    Raises:
        ConfigError: it cannot be compiled here.
        OutputError: it cannot be written.
    """
    key = _key(make=True)
    if key is None:
        raise ConfigError("the key of your packages is gone; try again")
    payload = json.dumps(about(model, shape), sort_keys=True).encode() + b"\n" + _compile(model, shape)
    write_bytes(path, _MAGIC + hmac.digest(key, payload, "sha256") + payload)


def read_package(path: Path, wanted: Mapping[str, Any]) -> Compiled:
    """Load the package at `path`, if this user made it and it is for what is `wanted`.

    Raises:
        ConfigError: it is not, or cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read package {path}: {(error.strerror or str(error)).lower()}") from error
    if not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is not a package for scoring; give the name of one, or of a file yet to be made")
    signed, key = content[len(_MAGIC) :], _key(make=False)
    signature, payload = signed[:32], signed[32:]
    if key is None or not hmac.compare_digest(signature, hmac.digest(key, payload, "sha256")):
        raise ConfigError(
            f"package {path} was not made here by you, or is damaged, and it holds machine code; delete it to have it "
            "made anew"
        )
    said, _, code = payload.partition(b"\n")
    made = json.loads(said)
    for name, value in wanted.items():
        if made.get(name) != value:
            other = _NAMES.get(name) or f"{name} {made.get(name)}, not {value}"
            raise ConfigError(f"package {path} is for {other}; delete it to have it made anew, or give another file")
    loaded = torch._inductor.aoti_load_package(io.BytesIO(code))
    return cast(Compiled, loaded)


def about(model: GPT, shape: Shape) -> dict[str, Any]:
    """All that a package depends on, in plain values."""
    device = model.tok_emb.weight.device
    plain = {
        "model": dataclasses.asdict(model.config),
        "looping": model.depth_recurrence,
        "windows": f"of {shape.rows} × {shape.length} tokens, {shape.scored} scored",
        "dtype": dtype_name(model.compute_dtype),
        "device": device.type,
        "torch": torch.__version__,
        "processor": processor(device),
        "code": _sources(),
    }
    known: dict[str, Any] = json.loads(json.dumps(plain))
    return known


def weights_of(model: GPT) -> dict[str, Tensor]:
    """What a package takes of the model: all it holds, by name, without gradients."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"model.{name}": tensor.detach() for name, tensor in held.items()}


def processor(device: torch.device) -> str:
    """What code for this processor may count on, as a short digest."""
    if device.type == "cuda":
        found = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    else:
        flags = [name for name, has in torch.cpu.get_capabilities().items() if has is True]
        found = f"{platform.machine()} {sorted(flags)} {_flags()}"
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def _flags() -> str:
    """What the system says of the processor's instructions, where it does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@cache
def _sources() -> str:
    """A digest of the source that a package is compiled from."""
    found = hashlib.sha256()
    for folder in birdie.model.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


class _Nats(nn.Module):
    """`GPT.loss` as a function of the weights as well; it holds the model where torch does not look for weights."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self._held = (_Loss(model),)

    def forward(self, weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        nats: Tensor = functional_call(self._held[0], weights, (ids, targets))
        return nats


class _Loss(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(ids, targets, reduction="none")


def _compile(model: GPT, shape: Shape) -> bytes:
    """The package as torch makes it."""
    device = model.tok_emb.weight.device
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.int64, device=device)
    targets = ids[:, : shape.scored].clone()
    room = io.BytesIO()
    # threads are chosen where it runs, not where it is made
    options = {"cpp.dynamic_threads": True}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            model.loss(ids, targets, reduction="none")  # makes rotary tables, which are constants of the graph
            exported = torch.export.export(_Nats(model), (weights_of(model), ids, targets), strict=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=room, inductor_configs=options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ConfigError(f"no package can be compiled here ({reason}); score without one") from error
    return room.getvalue()


def _filled(rows: Tensor, count: int) -> Tensor:
    """`rows` and as many rows of zeros as are wanting to `count`."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.shape[1])))


def _key(*, make: bool) -> bytes | None:
    """The key of this user's packages on this machine; made if it is not there and `make` says so.

    Raises:
        ConfigError: others could have put it there, or it cannot be written.
    """
    folder = cast(Path, cache_folder("auto"))
    path = folder.parent / "packages.key"
    try:
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        key = read_trusted(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the key of your packages, {path}, cannot be used: {error.strerror or error}") from error
    if len(key) != 32:
        raise ConfigError(f"the key of your packages, {path}, is damaged; delete it, and the packages made with it")
    return key
