"""Payload of the coders "static" and "mixed": side information, chunks that decode independently, and a tail.

    varint: number of 16-bit words ─ words of the side information ─ words of each chunk ─ tail

Chunks hold complete rows, about a million symbols (`trellis.chunk_rows`), so they decode on as many threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.varint import Cursor, varint
from birdie.errors import ArtifactError


def join(side: NDArray[np.uint16], chunks: Sequence[NDArray[np.unsignedinteger]], tail: bytes = b"") -> bytes:
    """Return the payload; all words are little-endian."""
    words = (part.astype(part.dtype.newbyteorder("<")).tobytes() for part in (side, *chunks))
    return varint(side.size) + b"".join(words) + tail


def split(payload: bytes | memoryview) -> tuple[NDArray[np.uint16], memoryview]:
    """Return the words of the side information and the bytes that follow them."""
    view = memoryview(payload)
    cursor = Cursor(bytes(view[:10]), "a coded stream", 0)
    length = cursor.varint(len(view) // 2, "length of the side information")
    end = cursor.position + 2 * length
    if end > len(view):
        raise ArtifactError("a coded stream is cut in its side information; the file is damaged")
    return np.frombuffer(view[cursor.position : end], "<u2").astype(np.uint16), view[end:]


def decode_chunks(
    data: memoryview,
    lengths: NDArray[np.int64],
    word_bytes: int,
    decode: Callable[[int, memoryview], None],
    threads: int,
) -> memoryview:
    """Call `decode` with the index of each chunk and its words in `data`; return the tail after the last chunk.

    Args:
        threads: number of chunks that are decoded at the same time.
    """
    ends = word_bytes * np.cumsum(lengths)
    if int(lengths.max()) > len(data) or int(ends[-1]) > len(data):
        raise ArtifactError("the chunks of a stream are longer than its payload; the file is damaged")

    def decode_one(index: int) -> None:
        end = int(ends[index])
        decode(index, data[end - word_bytes * int(lengths[index]) : end])

    if threads > 1 and len(lengths) > 1:
        with ThreadPoolExecutor(min(threads, len(lengths))) as pool:
            list(pool.map(decode_one, range(len(lengths))))
    else:
        for index in range(len(lengths)):
            decode_one(index)
    return data[int(ends[-1]) :]
