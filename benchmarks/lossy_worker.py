"""NNCodec or EntroPack as a lossy coder, in the environment that `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python lossy_worker.py encode nncodec TENSORS.npz OUT QP        weights → one file
    .venv-rivals/bin/python lossy_worker.py encode entropack TENSORS.npz OUT BITS
    .venv-rivals/bin/python lossy_worker.py decode nncodec|entropack FILE OUT.npz    file → weights

NNCodec: its trellis is on; other settings are the defaults of nncodec.nn.encode. Short and long unary codes are both
tried, and the smaller bitstream is kept. EntroPack: matrices of at least 1,024 elements get the target rate, with its
rate–distortion refinement of rows; other tensors are float16. Its format has a JSON header for each tensor, so the file
is compressed by zstd -22.
"""

import contextlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

NONWEIGHT_QP = -75
SWEEPS = 8  # of EntroPack's refinement, the most it takes
LEAST = 1024  # elements


def main() -> None:
    """Encode or decode, as the first arguments say."""
    verb, coder, source, out = sys.argv[1:5]
    with contextlib.redirect_stdout(sys.stderr):
        if verb == "encode":
            with np.load(source) as archive:
                weights = {name: archive[name].astype(np.float32) for name in archive.files}
            encode = {"nncodec": nncodec_encode, "entropack": entropack_encode}[coder]
            Path(out).write_bytes(encode(weights, float(sys.argv[5])))
        else:
            decode = {"nncodec": nncodec_decode, "entropack": entropack_decode}[coder]
            decoded = decode(Path(source).read_bytes())
            with Path(out).open("wb") as file:
                np.savez(file, **decoded)  # type: ignore[arg-type, unused-ignore]  # allow_pickle would be an array


def nncodec_encode(weights: "dict[str, np.ndarray]", qp: float) -> bytes:
    """Return the smaller of two bitstreams at one step size."""
    from rival_worker import import_nncodec  # type: ignore[import-not-found, unused-ignore]

    compression = import_nncodec()
    streams = [
        bytes(
            compression.compress(
                {name: array.copy() for name, array in weights.items()},
                bitstream_path=None,
                qp=int(qp),
                nonweight_qp=NONWEIGHT_QP,
                use_dq=True,
                param_opt=True,
                row_skipping=True,
                cabac_unary_length_minus1=unary,
                return_bitstream=True,
            )
        )
        for unary in (10, 30)
    ]
    return min(streams, key=len)


def nncodec_decode(data: bytes) -> "dict[str, np.ndarray]":
    """Return the weights of a bitstream."""
    from rival_worker import import_nncodec  # type: ignore[import-not-found, unused-ignore]

    return dict(import_nncodec().decompress(bytearray(data)))


def entropack_encode(weights: "dict[str, np.ndarray]", bits: float) -> bytes:
    """Return a header of names, shapes and lengths, and the tensors after it."""
    import entropack  # type: ignore[import-not-found, unused-ignore]
    import torch
    import zstandard  # type: ignore[import-not-found, unused-ignore]

    config = entropack.EntroPackLossyConfig(target_bpp=bits, row_rdo_iterations=SWEEPS)
    header: list[tuple[str, list[int], int]] = []
    parts = []
    for name, array in weights.items():
        if array.ndim >= 2 and array.size >= LEAST:
            rows = torch.from_numpy(array.reshape(len(array), -1))
            part = entropack.compress(rows, config).entropack_quant_state.numpy().tobytes()
        else:
            part = array.astype(np.float16).tobytes()
        header.append((name, list(array.shape), len(part)))
        parts.append(part)
    text = json.dumps(header).encode()
    plain = struct.pack("<I", len(text)) + text + b"".join(parts)
    return bytes(zstandard.ZstdCompressor(level=22).compress(plain))


def entropack_decode(data: bytes) -> "dict[str, np.ndarray]":
    """Return the weights of such a file."""
    import entropack  # type: ignore[import-not-found, unused-ignore]
    import torch
    import zstandard  # type: ignore[import-not-found, unused-ignore]

    config = entropack.EntroPackLossyConfig()
    plain = zstandard.ZstdDecompressor().decompress(data)
    (length,) = struct.unpack_from("<I", plain)
    start = 4 + length
    weights: dict[str, Any] = {}
    for name, shape, size in json.loads(plain[4:start]):
        part = plain[start : start + size]
        start += size
        if len(shape) >= 2 and np.prod(shape) >= LEAST:
            state = torch.from_numpy(np.frombuffer(part, np.uint8).copy())
            rows = entropack.decompress(entropack.CompressedTensor.unpack(state), config)
            weights[name] = rows.numpy().reshape(shape)
        else:
            weights[name] = np.frombuffer(part, np.float16).astype(np.float32).reshape(shape)
    return weights


if __name__ == "__main__":
    main()
