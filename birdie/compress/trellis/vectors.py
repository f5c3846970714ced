"""Vectors of eight float32 in kernels, whose loops the compiler does not vectorize where many arrays may overlap.

Each function is one instruction of the processor or a few. Indices count elements of the C-contiguous memory of an
array, and nothing checks them. The bodies run where Python runs the kernels, and say what the instructions do.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, models, register_model, type_callable

WIDTH = 8
_BYTE = ir.IntType(8)


class _Vector(types.Type):
    """Type of eight values."""

    def __init__(self, name: str, element: ir.Type) -> None:
        self.llvm = ir.VectorType(element, WIDTH)
        super().__init__(name)


_FLOATS, _MASK = _Vector("eight float32", ir.FloatType()), _Vector("eight booleans", ir.IntType(1))


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


def _compiled(result: types.Type | None, emit: Callable[..., Any]) -> Callable[[Any], Any]:
    """In kernels `emit(builder, *values)` writes instructions in place of a call; an array is a pointer to its memory.

    `result` is the type that they return; None: that of the last argument.
    """

    def decorate(function: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            plain = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            written = emit(builder, *plain)
            return context.get_dummy_value() if result is types.none else written

        def typed(*kinds: types.Type) -> Any:
            return (result or kinds[-1])(*kinds)

        typed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # numba wants the names
        type_callable(function)(lambda context: typed)  # noqa: ARG005
        lower_builtin(function, types.VarArg(types.Any))(write)  # type: ignore[no-untyped-call]
        return function

    return decorate


def _at(builder: Any, array: Any, index: Any, kind: _Vector) -> Any:
    return builder.bitcast(builder.gep(array, [index]), kind.llvm.as_pointer())


def _load(builder: Any, array: Any, index: Any) -> Any:
    return builder.load(_at(builder, array, index, _FLOATS), align=4)


def _store(builder: Any, array: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, array, index, _FLOATS), align=4)


def _every_other(builder: Any, array: Any, index: Any, start: int) -> Any:
    first, second = _load(builder, array, index), _load(builder, array, builder.add(index, index.type(WIDTH)))
    order = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), list(range(start, 2 * WIDTH, 2)))
    return builder.shuffle_vector(first, second, order)


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS.llvm, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))


def _put_bits(builder: Any, array: Any, index: Any, mask: Any) -> None:
    builder.store(builder.bitcast(mask, _BYTE), builder.gep(array, [index]))


@_compiled(_FLOATS, _load)
def load(array, index):  # type: ignore[no-untyped-def]
    """Return eight elements from `index` on."""
    return array.reshape(-1)[index : index + WIDTH].copy()


@_compiled(_FLOATS, lambda builder, array, index: _every_other(builder, array, index, 0))
def load_even(array, index):  # type: ignore[no-untyped-def]
    """Return the first, the third … of sixteen elements from `index` on."""
    return array.reshape(-1)[index : index + 2 * WIDTH : 2].copy()


@_compiled(_FLOATS, lambda builder, array, index: _every_other(builder, array, index, 1))
def load_odd(array, index):  # type: ignore[no-untyped-def]
    """Return the second, the fourth … of sixteen elements from `index` on."""
    return array.reshape(-1)[index + 1 : index + 2 * WIDTH : 2].copy()


@_compiled(types.none, _store)
def store(array, index, values):  # type: ignore[no-untyped-def]
    """Write eight elements from `index` on."""
    array.reshape(-1)[index : index + WIDTH] = values


@_compiled(types.none, _put_bits)
def store_bits(array, index, mask):  # type: ignore[no-untyped-def]
    """Write a mask as a byte, its first value as the lowest bit."""
    array.reshape(-1)[index] = np.packbits(mask, bitorder="little")[0]


@_compiled(_FLOATS, _splat)
def splat(value):  # type: ignore[no-untyped-def]
    """Return eight times a float32."""
    return np.full(WIDTH, value, np.float32)


@_compiled(None, lambda builder, a, b: builder.fadd(a, b))
def plus(a, b):  # type: ignore[no-untyped-def]
    """Return a + b."""
    return a + b


@_compiled(_MASK, lambda builder, a, b: builder.fcmp_ordered("<", a, b))
def less(a, b):  # type: ignore[no-untyped-def]
    """Return a < b."""
    return a < b


@_compiled(_MASK, lambda builder, a, b: builder.fcmp_ordered("<=", a, b))
def at_most(a, b):  # type: ignore[no-untyped-def]
    """Return a <= b."""
    return a <= b


@_compiled(None, lambda builder, mask, a, b: builder.select(mask, a, b))
def choose(mask, a, b):  # type: ignore[no-untyped-def]
    """Return `a` where `mask`, else `b`: floats or masks."""
    return np.where(mask, a, b)
