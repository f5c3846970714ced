"""A model as one .birdie file: save, load, inspect. Schemes and entropy coding meet the container here.

    state ──ties──► one tensor each ──scheme──► Encoded ──entropy──► Entry ─┐
                                                                            ├─► container ─► model.birdie
    second names ───────────────────────────────────────────► alias Entry ──┘

No pickle and no code: a file decodes to tensors or raises ArtifactError. The same tensors in any order give the same
bytes, whatever the number of threads. The numbers by which the file calls schemes and dtypes are pinned here and
described in docs/format.md.
"""

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from birdie.artifact import metadata as about_file
from birdie.artifact.container import ALIAS, Entry, Reader
from birdie.artifact.lazy import attach
from birdie.artifact.summary import Summary as Summary
from birdie.artifact.summary import TensorSummary
from birdie.artifact.tensor_cache import Stored
from birdie.artifact.writer import DTYPES, SCHEMES, Meter, Packer
from birdie.compress.calibration.result import Knowledge, require_triple
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.rate.assignment import Schemes, match, rules_of
from birdie.compress.rate.plan import Plan
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.decoders import CAST_DTYPES, DECODERS
from birdie.compress.state import (
    fill,
    folded,
    named_tensors,
    placed,
    require_request,
    require_target,
    whole,
    without_ties,
)
from birdie.entropy import coder as entropy
from birdie.entropy.hints import Effort
from birdie.errors import ArtifactError, ConfigError
from birdie.runtime import files
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import dtype_name

Source = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)

_SCHEME_NAMES = {code: name for name, code in SCHEMES.items()}
MIN_DECODED_LIMIT = 1 << 30
DECODED_PER_BYTE = 64
_ROUNDS = 4  # codings a budget search usually takes: only the progress bar relies on it


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: Source,
    *,
    scheme: Schemes | None = None,
    budget: int | None = None,
    bits: float | None = None,
    quality: float | None = None,
    coder: Effort = "max",
    calibration: Calibration | Knowledge | None = None,
    symmetries: bool = True,
    recalibrate: bool = False,
    refit: int = 0,
    lossless: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tree: Any = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Summary:
    """Compress `model` into one file.

    Args:
        model: a module or its state dict; never changed. What `birdie.spectral` wrapped is stored as it was trained,
            under plain names, whatever the default is.
        path: the file to write; it appears whole or not at all.
        scheme: how to store the matrices: a spec ("int6"), a scheme, or (pattern, spec) rules of which the first that
            matches a name wins. Default: per-row int8, with everything small in 16 bits or lossless.
        budget: bytes the file may have; the precision of what no rule names is chosen to land just under it.
        bits: the same as bits per weight, everything included.
        quality: nats of KL per target (token, image) from the float model's predictions that it may cost; needs
            calibration, and is judged on those of its batches that were not calibrated on.
        coder: "max" for the smallest file, "fast" for the quickest.
        calibration: (module, batches, loss): the module whose weights these are, tens of thousands of tokens or
            thousands of images in batches, and loss(module, batch) → summed nats by `F.cross_entropy`. Steps then
            follow what the loss minds. Or the `Knowledge` made of them, for several files from one calibration.
        symmetries: with calibration, sort units whose order means nothing, which saves bits; the function stays what
            it was.
        recalibrate: with calibration, calibrate once more on the quantized model, search again with the means of both,
            and keep the file that the batches held back prefer: twice the time, for some per cent of the KL at best.
        refit: with calibration, steps of Adam (one batch each, some fifty pay) that tune norms, gains and biases to
            what quantization left; they are kept where the batches held back agree. The search is made twice.
        lossless: keep every bit of every tensor.
        metadata: JSON to store along.
        tree: how the tensors nest (birdie.artifact.pytree); birdie.artifact.repack gives it.
        progress: called with (done, total) as tensors are coded.
        workers: threads; None takes every core. The bytes do not depend on it.

    Raises:
        ConfigError: settings contradict one another, or a spec or pattern is wrong.
        WeightsError: a tensor is NaN or infinite and not lossless, or of a kind that cannot be stored.
        BudgetError: nothing fits the budget.
        OutputError: the file cannot be written.
    """
    require_request(path, scheme, metadata)
    budget, workers = whole("budget", budget), whole("workers", workers)
    _check_request(scheme, budget, bits, quality, coder, calibration, recalibrate, refit, lossless)
    targeted = not (budget is None and bits is None and quality is None)
    default, rules = rules_of(scheme, targeted=targeted)
    everything = named_tensors(model)
    state, ties = without_ties(everything)
    pinned = _trained(model, calibration) | match(everything, rules)
    files.require_writable(Path(path).parent)
    known = _known(calibration, everything, symmetries)
    state = state if known is None else known.ordered(state)
    if bits is not None:
        budget = int(bits * sum(weight.numel() for weight in state.values()) / 8)
    plan = Plan(
        default=default,
        pinned={ties.get(name, name): chosen for name, chosen in pinned.items()},
        ties=ties,
        known=known,
        budget=budget,
        quality=quality,
        recalibrate=recalibrate,
        refit=refit,
        lossless=lossless,
        plain=coder == "fast",
        workers=workers,
    )
    about = about_file.to_bytes(metadata, budget, tree)
    aliases = [Entry(name, ALIAS, *_described(state[target]), target=target) for name, target in ties.items()]
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        meter = Meter(progress, (_ROUNDS if budget is not None else 1) * len(state))
        packer, quick = Packer(pool, coder, aliases, about, meter), Packer(pool, "fast", aliases, about, meter)
        rough = None if coder == "fast" and known is None else lambda encoded: len(quick(encoded))
        encoded = plan.encode(state, lambda encoded: len(packer(encoded)), rough)
        files.write_bytes(path, packer(encoded))
        meter.finish()
    return inspect(path)


def _trained(model: nn.Module | Mapping[str, Tensor], calibration: object) -> dict[str, Scheme]:
    """Plain name → scheme of what was trained in the form it is stored in (`birdie.spectral`)."""
    if not (isinstance(model, nn.Module) and folded(model)):
        return {}
    if calibration is not None:
        raise ConfigError("a spectral model is stored as it was trained; leave calibration out, or remove() it first")
    from birdie.compress.spectral.export import trained

    return dict(trained(model))


def _known(
    calibration: Calibration | Knowledge | None, state: Mapping[str, Tensor], symmetries: bool
) -> Knowledge | None:
    if calibration is None or isinstance(calibration, Knowledge):
        return calibration
    return Knowledge.of(state, calibration, symmetries=symmetries)


def _check_request(
    scheme: Schemes | None,
    budget: int | None,
    bits: Any,
    quality: Any,
    coder: str,
    calibration: Calibration | Knowledge | None,
    recalibrate: bool,
    refit: Any,
    lossless: bool,
) -> None:
    if sum(given is not None for given in (budget, bits, quality)) > 1:
        raise ConfigError("budget, bits and quality each set the size; give one of them")
    if lossless and not (scheme is None and budget is None and bits is None and quality is None):
        raise ConfigError("lossless keeps every bit, so it takes no scheme, budget, bits or quality; drop one side")
    if lossless and calibration is not None:
        raise ConfigError("lossless keeps every bit, so there is nothing to calibrate; drop one side")
    if calibration is not None and not isinstance(calibration, Knowledge):
        require_triple(calibration)
    if bits is not None and not (isinstance(bits, Real) and 0 < float(bits) <= 64):
        raise ConfigError(f"bits={bits!r} per weight is out of range; choose more than 0 and at most 64")
    if quality is not None and not (isinstance(quality, Real) and 0 < float(quality) < math.inf):
        raise ConfigError(f"quality={quality!r} is out of range; choose a positive number of nats of KL per target")
    if quality is not None and calibration is None:
        raise ConfigError("quality is judged on data; give calibration=(module, batches, loss), or a budget instead")
    if coder not in ("max", "fast"):
        raise ConfigError(f"coder {coder!r} is unknown; choose max or fast")
    if recalibrate and calibration is None:
        raise ConfigError("recalibrate needs what was calibrated on; give calibration=(module, batches, loss) as well")
    if not isinstance(refit, int) or refit < 0 or (refit and calibration is None):
        raise ConfigError(f"refit={refit!r} is not a number of steps with calibration to take them on; give both")


def _described(weight: Tensor) -> tuple[int, tuple[int, ...]]:
    return DTYPES.index(weight.dtype), tuple(weight.shape)


@overload
def load(
    path: Source,
    *,
    into: None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    max_bytes: int | None = None,
    workers: int | None = None,
) -> dict[str, Tensor]: ...
@overload
def load(
    path: Source,
    *,
    into: M,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    max_bytes: int | None = None,
    workers: int | None = None,
) -> M: ...
def load(
    path: Source,
    *,
    into: nn.Module | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    max_bytes: int | None = None,
    workers: int | None = None,
) -> dict[str, Tensor] | nn.Module:
    """Decode a file.

    Args:
        path: a .birdie file.
        into: a module that takes the tensors; names and shapes must match exactly.
        device: where the tensors (or the module) go; default the CPU (or where the module is).
        dtype: what floating tensors (or the module) are cast to after decoding.
        lazy: decode nothing now, but each tensor when `into` reads it (lazy). The module only runs: it is put in
            evaluation mode, and may have been built on the meta device. The file stays open.
        cache_bytes: with lazy, of decoded tensors to hold at most; default 1.5 times the largest layer.
        max_bytes: refuse to decode more than this; default the larger of 1 GiB and 64 × the file.
        workers: threads; None takes every core.

    Returns:
        name → tensor, tied names sharing one tensor; or `into`.

    Raises:
        ArtifactError: the file is missing, corrupt, or decodes to more than `max_bytes`.
        WeightsError: names, shapes or kinds of numbers do not match `into`, or it has no memory (meta).
        ConfigError: a setting is wrong, or `into` cannot be loaded lazily.
    """
    require_target(path, into, device, dtype)
    max_bytes, workers = whole("max_bytes", max_bytes, 0), whole("workers", workers)
    cache_bytes = whole("cache_bytes", cache_bytes, 0)
    if cache_bytes is not None and not lazy:
        raise ConfigError("cache_bytes bounds what lazy loading holds; give lazy=True as well, or leave it out")
    if lazy:
        if into is None:
            raise ConfigError("lazy loading decodes what a module reads; give into=, or leave lazy out")
        return _load_lazily(path, into, max_bytes, workers, device=device, dtype=dtype, cache_bytes=cache_bytes)
    with Reader(path) as reader:
        _check_size(reader, max_bytes)
        tensors = _decode_all(reader, workers or os.cpu_count() or 1)
        if into is None:
            tensors = {name: placed(tensor, device, dtype) for name, tensor in tensors.items()}
        state = {name: tensors[_owner(reader, name)] for name in reader.names}
    return state if into is None else fill(into, state, str(path)).to(device=device, dtype=dtype)


def _load_lazily(path: Source, into: M, max_bytes: int | None, workers: int | None, **settings: Any) -> M:
    reader = Reader(path)
    try:
        _check_size(reader, max_bytes)
        owners = {name: reader.entry(_owner(reader, name)) for name in reader.names}
        stored = {name: Stored(entry.name, entry.shape, _dtype(entry)) for name, entry in owners.items()}
        decode = partial(_decode, reader, threads=workers)
        return attach(into, stored, decode, reader.close, where=reader.where, **settings)
    except BaseException:
        reader.close()
        raise


def decode_tensor(path: Source, name: str, *, max_bytes: int | None = None) -> Tensor:
    """Decode one tensor; only its own bytes are read.

    Raises:
        ArtifactError: there is no such tensor, it is corrupt, or it decodes to more than `max_bytes`.
        ConfigError: no file can have that path.
    """
    require_target(path)
    with Reader(path) as reader:
        owner = _owner(reader, name)
        _check_size(reader, max_bytes, [owner])
        return _decode(reader, owner)


def inspect(path: Source) -> Summary:
    """What is in a file, from its header alone.

    Raises:
        ArtifactError: the file is missing or its header is corrupt.
        ConfigError: no file can have that path.
    """
    require_target(path)
    with Reader(path) as reader:
        about = about_file.parse(bytes(reader.metadata), reader.where)
        sizes = reader.table()
        entries = [reader.entry(name) for name in reader.names]
        rows = tuple(
            TensorSummary(entry.name, entry.shape, dtype_name(_dtype(entry)), _scheme_name(entry), sizes[entry.name])
            for entry in entries
        )
        weights = sum(math.prod(entry.shape) for entry in entries if entry.scheme != ALIAS)
        extra = about.get("metadata", {}), about.get("tree")
        return Summary(str(path), reader.size, about.get("budget"), weights, rows, *extra)


def _dtype(entry: Entry) -> torch.dtype:
    if entry.dtype >= len(DTYPES):
        raise ArtifactError(
            f"tensor {entry.name!r} has dtype code {entry.dtype}, unknown to this version; update birdie"
        )
    return DTYPES[entry.dtype]


def _scheme_name(entry: Entry) -> str:
    if entry.scheme == ALIAS:
        return "alias"
    if entry.scheme not in _SCHEME_NAMES:
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown to this version; update birdie"
        )
    name = _SCHEME_NAMES[entry.scheme]
    if name == "cast" and entry.params in ((0,), (1,)):
        return {torch.float16: "fp16", torch.bfloat16: "bf16"}[CAST_DTYPES[entry.params[0]]]
    return name


def _owner(reader: Reader, name: str) -> str:
    """`name`, or the name it is an alias of.

    Raises:
        ArtifactError: there is no such entry, or the alias disagrees with what it points to.
    """
    entry = reader.entry(name)
    if entry.scheme != ALIAS or entry.target is None:
        return name
    target = reader.entry(entry.target)
    if (entry.shape, entry.dtype) != (target.shape, target.dtype):
        raise ArtifactError(f"tensor {name!r} of {reader.where} differs in shape from {entry.target!r}, its tied twin")
    return entry.target


def _check_size(reader: Reader, max_bytes: int | None, names: Iterable[str] | None = None) -> None:
    limit = max(MIN_DECODED_LIMIT, DECODED_PER_BYTE * reader.size) if max_bytes is None else max_bytes
    entries = [reader.entry(name) for name in (reader.names if names is None else names)]
    total = sum(math.prod(entry.shape) * _dtype(entry).itemsize for entry in entries if entry.scheme != ALIAS)
    if total > limit:
        raise ArtifactError(
            f"{reader.where} decodes to {total:,} bytes, more than the {limit:,} allowed; "
            "raise max_bytes if you trust where it comes from"
        )


def _decode_all(reader: Reader, workers: int) -> dict[str, Tensor]:
    """Every stored tensor, the longest first; one that would keep the others waiting is decoded on many threads."""
    lengths = reader.table()
    stored = [name for name in reader.names if reader.entry(name).scheme != ALIAS]
    stored.sort(key=lengths.__getitem__, reverse=True)
    share = sum(lengths.values()) / workers
    with ThreadPoolExecutor(workers) as pool:
        decoded = pool.map(lambda name: _decode(reader, name, workers if lengths[name] > share else 1), stored)
        return dict(zip(stored, decoded, strict=True))


def _decode(reader: Reader, name: str, threads: int | None = None) -> Tensor:
    """Read and decode one stored entry on at most `threads` threads.

    Raises:
        ArtifactError: it is corrupt, or uses a code of a newer version.
    """
    entry = reader.read(name)
    dtype = _dtype(entry)
    _scheme_name(entry)
    scheme = _SCHEME_NAMES[entry.scheme]
    try:
        layout = DECODERS[scheme].layout(entry.shape, dtype, entry.params)
        if len(layout) != len(entry.streams):
            raise ArtifactError(f"scheme {scheme} needs {len(layout)} streams but {len(entry.streams)} are there")
        streams = tuple(
            entropy.decode(stream.coder, stream.payload, each.rows, each.columns, each.hints, each.dtype, threads)
            for stream, each in zip(entry.streams, layout, strict=True)
        )
        return DECODERS[scheme].decode(Encoded(scheme, entry.shape, dtype, entry.params, streams))
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r} of {reader.where}: {error}") from error
