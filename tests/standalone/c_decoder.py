"""The decoder in C as a library of this process: compiled once, called by ctypes."""

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birdie.standalone import C_DECODER

FLAGS = "-std=c99", "-ffp-contract=off", "-Wall", "-Wextra", "-pedantic", "-Werror"
OWN = -1
Decoded = dict[str, tuple[str, list[int], str]]  # name → dtype, shape, SHA-256 of the elements

_Alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Options(ctypes.Structure):
    """Options of `birdie_open`, as birdie.h has them."""

    _fields_ = (
        ("alloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("max_bytes", ctypes.c_uint64),
        ("max_memory", ctypes.c_uint64),
        ("max_operations", ctypes.c_uint64),
        ("base", ctypes.c_void_p),
    )


class CTensor(ctypes.Structure):
    """Description of a tensor, as birdie.h has it."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("shape", ctypes.c_uint64 * 16),
        ("elements", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("array", ctypes.c_size_t),
        ("first", ctypes.c_uint64),
        ("is_alias", ctypes.c_int),
        ("is_copy", ctypes.c_int),
    )


class RefusedError(Exception):
    """The decoder returned an error; `number` is which."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.number = number


@dataclass
class Counted:
    """Memory that the decoder takes by an allocator of the caller's.

    Attributes:
        left: allocations until one fails; None: none does.
        held: bytes, and the most at a time.
    """

    left: int | None = None
    held: int = 0
    peak: int = 0
    blocks: dict[int, Any] = field(default_factory=dict)

    def options(self, **limits: int) -> Options:
        """Return options with this allocator, which live as long as it does."""
        self._functions = _Alloc(self._alloc), _Free(self._free)
        alloc, free = (ctypes.cast(function, ctypes.c_void_p) for function in self._functions)
        return Options(alloc=alloc, free=free, **limits)

    def _alloc(self, _: Any, size: int) -> int | None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                return None
        block = ctypes.create_string_buffer(size + 16)
        address = -(-ctypes.addressof(block) // 16) * 16
        self.blocks[address] = block, size
        self.held += size
        self.peak = max(self.peak, self.held)
        return address

    def _free(self, _: Any, address: int) -> None:
        self.held -= self.blocks.pop(address)[1]


class File:
    """An open file."""

    def __init__(self, library: ctypes.CDLL, data: bytes, options: Options | None = None) -> None:
        self._library, self._data = library, data  # bytes of which nothing is copied
        self.handle = ctypes.c_void_p()
        pointer = None if options is None else ctypes.byref(options)
        self._check(library.birdie_open(data, len(data), pointer, ctypes.byref(self.handle)))

    def close(self) -> None:
        self._library.birdie_close(self.handle)

    def _check(self, error: int) -> None:
        if error:
            raise RefusedError(error, self._library.birdie_error_text(error).decode())

    def check(self) -> None:
        """Raise RefusedError unless all tensors together are within the limits."""
        self._check(self._library.birdie_check(self.handle))

    @property
    def has_views(self) -> bool:
        """Fact that the file has views of tensors."""
        return bool(self._library.birdie_has_views(self.handle))

    @property
    def metadata(self) -> bytes:
        """The metadata as it is in the file."""
        size = ctypes.c_size_t()
        start = self._library.birdie_metadata(self.handle, ctypes.byref(size))
        return ctypes.string_at(start, size.value)

    def tensors(self) -> dict[str, tuple[int, CTensor]]:
        """Return name → index and description of each tensor, in the order of the file."""
        out = {}
        for index in range(self._library.birdie_count(self.handle)):
            tensor = CTensor()
            self._check(self._library.birdie_get(self.handle, index, ctypes.byref(tensor)))
            name = ctypes.string_at(tensor.name, tensor.name_size)
            assert self._library.birdie_find(self.handle, name, len(name)) == index
            out[name.decode()] = index, tensor
        return out

    def decode(self, index: int, size: int, dtype: int = OWN, *, is_array: bool = False) -> bytes:
        """Return the elements of a tensor, or array, whose bytes are `size`."""
        buffer = ctypes.create_string_buffer(size + 16)
        address = -(-ctypes.addressof(buffer) // 16) * 16
        decode = self._library.birdie_array_decode if is_array else self._library.birdie_decode
        self._check(decode(self.handle, index, dtype, ctypes.c_void_p(address), size))
        return ctypes.string_at(address, size)

    def decode_all(self) -> Decoded:
        """Return all tensors; raise RefusedError if one is damaged, or too much for the limits."""
        self.check()
        out: Decoded = {}
        for name, (index, tensor) in self.tensors().items():
            data = self.decode(index, tensor.bytes)
            dtype = self._library.birdie_dtype_name(tensor.dtype).decode()
            out[name] = dtype, list(tensor.shape[: tensor.dimensions]), hashlib.sha256(data).hexdigest()
        return out


def compiler() -> str | None:
    """Return the C compiler of this machine, if there is one."""
    return shutil.which("cc")


def load(folder: Path) -> ctypes.CDLL:
    """Compile the decoder as a shared library in `folder`, warnings being errors; return it."""
    path = folder / "libbirdie.so"
    command = [compiler() or "cc", *FLAGS, "-O1", "-shared", "-fPIC", str(C_DECODER[0]), "-o", str(path)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    file, size, pointer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    library.birdie_open.argtypes = ctypes.c_char_p, size, pointer, pointer
    library.birdie_close.argtypes = (file,)
    library.birdie_error_text.restype = library.birdie_dtype_name.restype = ctypes.c_char_p
    library.birdie_metadata.restype = ctypes.c_void_p
    library.birdie_metadata.argtypes = file, pointer
    library.birdie_has_views.argtypes = library.birdie_check.argtypes = (file,)
    library.birdie_count.argtypes, library.birdie_count.restype = (file,), size
    library.birdie_get.argtypes = file, size, pointer
    library.birdie_find.argtypes, library.birdie_find.restype = (file, ctypes.c_char_p, size), size
    library.birdie_decode.argtypes = library.birdie_array_decode.argtypes = file, size, ctypes.c_int, pointer, size
    return library


def decoded(library: ctypes.CDLL, data: bytes, base: bytes | None = None, **limits: int) -> Decoded | RefusedError:
    """Return all tensors of a file, or why it is refused."""
    other = None if base is None else File(library, base)
    try:
        file = File(library, data, Options(base=other and other.handle, **limits))
    except RefusedError as error:
        return error
    try:
        return file.decode_all()
    except RefusedError as error:
        return error
    finally:
        file.close()
        if other is not None:
            other.close()
