"""Compile the kernels of birdie.compress.device for Hopper, without a GPU: prints how many variants were compiled."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from birdie.compress.device import decoding_kernels, encoding_kernels

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "words": "*u16",
    "bounds": "*i32",
    "classes": "*u8",
    "symbols": "*u8",
    "entries": "*i64",
    "row_scales": "*fp32",
    "column_scales": "*fp32",
    "states": "*u8",
    "damaged": "*i32",
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
    variants = [
        {"out": "*u16", "BFLOAT16": True, "LANES": 128, "PAIRED": True, "TRELLIS": True, "column_stride": 1},
        {"out": "*fp16", "BFLOAT16": False, "LANES": 4, "PAIRED": False, "TRELLIS": True},
        {
            "out": "*fp32",
            "BFLOAT16": False,
            "LANES": 256,
            "PAIRED": False,
            "TRELLIS": False,
            "GROUPED": True,
            "symbols": "*u16",
        },
    ]
    for variant in variants:
        options = {"PRECISION": 12, "ZERO_ROWS": True, "COLUMN_SCALES": True, "GROUPED": False} | variant
        ptx = compile_kernel(decoding_kernels.decode, max(1, int(options["LANES"]) // 32), **options)  # type: ignore[call-overload]
        assert "fma" not in ptx
        assert "ftz" not in ptx
    compile_kernel(decoding_kernels.expand, PRECISION=12, SLOTS=decoding_kernels.SLOTS)
    return len(variants) + 1


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
