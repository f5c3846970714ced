"""NNCodec as a lossy coder, in the environment that `make rivals` builds; imports nothing of birdie.

    .venv-rivals/bin/python lossy_worker.py encode TENSORS.npz OUT QP    weights on NNCodec's grid → its bitstream
    .venv-rivals/bin/python lossy_worker.py decode STREAM OUT.npz        bitstream → weights

Its trellis is on; other settings are the defaults of nncodec.nn.encode. Short and long unary codes are both tried, and
the smaller bitstream is kept.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rival_worker import import_nncodec  # type: ignore[import-not-found, unused-ignore]

NONWEIGHT_QP = -75


def main() -> None:
    """Encode or decode, as the first argument says."""
    verb, source, out = sys.argv[1:4]
    with contextlib.redirect_stdout(sys.stderr):
        compression = import_nncodec()
        if verb == "encode":
            with np.load(source) as archive:
                weights = {name: archive[name].astype(np.float32) for name in archive.files}
            streams = [encode(compression, weights, int(sys.argv[4]), unary) for unary in (10, 30)]
            Path(out).write_bytes(min(streams, key=len))
        else:
            decoded = compression.decompress(bytearray(Path(source).read_bytes()))
            with Path(out).open("wb") as file:
                np.savez(file, **dict(decoded))


def encode(compression: Any, weights: "dict[str, np.ndarray]", qp: int, unary: int) -> bytes:
    """Return the bitstream at one step size."""
    return bytes(
        compression.compress(
            {name: array.copy() for name, array in weights.items()},
            bitstream_path=None,
            qp=qp,
            nonweight_qp=NONWEIGHT_QP,
            use_dq=True,
            param_opt=True,
            row_skipping=True,
            cabac_unary_length_minus1=unary,
            return_bitstream=True,
        )
    )


if __name__ == "__main__":
    main()
