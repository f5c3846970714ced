"""Compile the kernels of birdie.compress.device for Hopper, without a GPU: prints how many variants were compiled."""

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from birdie.compress.device import decoding_kernels, encoding_kernels

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "words": "*u32",
    "bounds": "*i32",
    "ends": "*i32",
    "matrices": "*i64",
    "tables": "*i32",
    "entries": "*u32",
    "values": "*i32",
    "by_row": "*fp32",
    "by_column": "*fp32",
    "sound": "*u8",
    "inputs": "*fp32",
    "weights": "*fp32",
    "inverse": "*fp32",
    "inverse_column": "*fp32",
    "power": "*fp32",
    "column_power": "*fp32",
    "survivors": "*u32",
    "numbers": "*i16",
}


def compile_kernel(kernel: Any, warps: int = 4, **constants: Any) -> str:
    """Return the assembly of a kernel; arguments are pointers by their names, some floats, all else integers.

    `constants` are constexprs, and under the names of other arguments their types.
    """
    types = {"limit": "fp32", "gain": "fp32"} | POINTERS
    types |= {name: value for name, value in constants.items() if isinstance(value, str)}
    fixed = {name: value for name, value in constants.items() if not isinstance(value, str)}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name][0] == "*"},
    )
    compiled = triton.compile(source, target=TARGET, options={"num_warps": warps, "enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 1000
    return str(compiled.asm["ptx"])


def decoding() -> int:
    """Compile variants of the decoder; neither fused nor flushed products may occur in them."""
    names = ("TRELLIS", "PAIRED", "HALVES", "LISTED", "GROUPED", "COLUMNS", "SPARSE", "CHECKED")
    plain = dict.fromkeys(names, False) | {"RAW": 0, "TOKENS": 0}
    path = plain | dict.fromkeys(("TRELLIS", "PAIRED", "HALVES", "COLUMNS"), True)
    variants: list[dict[str, Any]] = [
        path | {"out": "*u16", "dtype": tl.bfloat16},
        plain | {"out": "*fp16", "dtype": tl.float16, "GROUPED": True, "RAW": 2, "SPARSE": True, "CHECKED": True},
        plain | {"out": "*fp32", "dtype": tl.float32, "LISTED": True, "COLUMNS": True},
        path | {"out": "*fp32", "dtype": tl.bfloat16, "TOKENS": 1},
        plain | {"out": "*fp32", "dtype": tl.float16, "TOKENS": 8},
    ]
    for variant in variants:
        ptx = compile_kernel(decoding_kernels.decode, 1, **variant)
        assert "fma" not in ptx
        assert "ftz" not in ptx
        assert "popc.b32" in ptx
        assert ptx.count("redux.sync.add") == 1
        assert variant["TOKENS"] > 1 or "bar.sync" not in ptx  # a tile is a warp, which waits for nobody
    return len(variants)


def encoding() -> int:
    """Compile variants of the search, which may not fuse products either."""
    for states in 4, 8, 32:
        options = {"STATES": states, "TOP": states.bit_length() - 2, "COLUMNS": encoding_kernels.COLUMNS}
        assert "fma" not in compile_kernel(encoding_kernels.search, **options)
    compile_kernel(encoding_kernels.search, weights="*bf16", STATES=16, TOP=3, COLUMNS=encoding_kernels.COLUMNS)
    return 4


def main() -> None:
    sys.stdout.write(str(decoding() + encoding()))


if __name__ == "__main__":
    main()
