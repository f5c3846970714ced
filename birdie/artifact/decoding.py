"""Decoding of file entries to tensors, without saving, filling modules or looking up schemes.

    entry ──decoder's layout──► streams ──entropy decoding──► integers ──decoder──► tensor

The caller passes the look-up of decoders (`decoder_of`): the one-file decoder has a table of its own.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from birdie.artifact.container import ALIAS, Entry, Reader
from birdie.compress.scheme import Decoder, Encoded
from birdie.entropy import coder as entropy
from birdie.errors import ArtifactError

DecoderOf = Callable[[Entry], Decoder]
"""The decoder of an entry; raises ArtifactError where there is none."""

# The index of a dtype is its code in the file. Never change one; new dtypes go at the end.
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip
MIN_DECODED_LIMIT = 1 << 30
DECODED_PER_BYTE = 64


def dtype_of(entry: Entry) -> torch.dtype:
    """Return the dtype of an entry's tensor.

    Raises:
        ArtifactError: its code is unknown.
    """
    if entry.dtype >= len(DTYPES):
        raise ArtifactError(
            f"tensor {entry.name!r} has dtype code {entry.dtype}, unknown to this version; update birdie"
        )
    return DTYPES[entry.dtype]


def stored_name(reader: Reader, name: str) -> str:
    """Return `name`, or the name it is an alias of.

    Raises:
        ArtifactError: there is no such entry, or the alias disagrees with its target.
    """
    entry = reader.entry(name)
    if entry.scheme != ALIAS or entry.target is None:
        return name
    target = reader.entry(entry.target)
    if (entry.shape, entry.dtype) != (target.shape, target.dtype):
        raise ArtifactError(f"tensor {name!r} of {reader.where} differs in shape from {entry.target!r}, its tied twin")
    return entry.target


def require_size(reader: Reader, max_bytes: int | None, names: Iterable[str] | None = None) -> None:
    """Check that a file does not declare more decoded bytes than allowed, before anything is allocated.

    Raises:
        ArtifactError: it declares more; the default limit is the larger of 1 GiB and 64 × the file.
    """
    limit = max(MIN_DECODED_LIMIT, DECODED_PER_BYTE * reader.size) if max_bytes is None else max_bytes
    entries = [reader.entry(name) for name in (reader.names if names is None else names)]
    total = sum(math.prod(entry.shape) * dtype_of(entry).itemsize for entry in entries if entry.scheme != ALIAS)
    if total > limit:
        raise ArtifactError(
            f"{reader.where} decodes to {total:,} bytes, more than the {limit:,} allowed; "
            "raise max_bytes if you trust where it comes from"
        )


def decode_all(reader: Reader, decoder_of: DecoderOf, workers: int) -> dict[str, Tensor]:
    """Decode every stored tensor, the longest first, so that no thread works on it alone at the end.

    A tensor that is longer than one thread's share is itself decoded on all threads.
    """
    lengths = reader.table()
    stored = [name for name in reader.names if reader.entry(name).scheme != ALIAS]
    stored.sort(key=lengths.__getitem__, reverse=True)
    share = sum(lengths.values()) / workers
    with ThreadPoolExecutor(workers) as pool:
        decoded = pool.map(
            lambda name: decode_entry(reader, name, decoder_of, workers if lengths[name] > share else 1), stored
        )
        return dict(zip(stored, decoded, strict=True))


def decode_entry(reader: Reader, name: str, decoder_of: DecoderOf, threads: int | None = None) -> Tensor:
    """Read and decode one stored entry on at most `threads` threads.

    Raises:
        ArtifactError: the entry is corrupt, or uses a code of a newer version.
    """
    entry = reader.read(name)
    dtype, decoder = dtype_of(entry), decoder_of(entry)
    try:
        layout = decoder.layout(entry.shape, dtype, entry.params)
        if len(layout) != len(entry.streams):
            raise ArtifactError(
                f"scheme {decoder.name} needs {len(layout)} streams, not {len(entry.streams)}; the file is corrupt"
            )
        streams = tuple(
            entropy.decode(
                stream.coder, stream.payload, expected.rows, expected.columns, expected.hints, expected.dtype, threads
            )
            for stream, expected in zip(entry.streams, layout, strict=True)
        )
        return decoder.decode(Encoded(decoder.name, entry.shape, dtype, entry.params, streams))
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r} of {reader.where}: {error}") from error
