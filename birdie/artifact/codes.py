"""Codes: the numbers by which a file refers to dtypes and schemes; torch is not needed to read them.

Schemes that ship with birdie have fixed codes below 64. A foreign scheme (one that another package defines) has no
fixed code: a file numbers those it uses from 64 on and names them in its metadata, "schemes": {"64": NAME}.
"""

from collections.abc import Iterable, Mapping

from birdie.artifact.container import MAX_SCHEME, Entry
from birdie.compress.schemes import NAMES
from birdie.errors import ArtifactError, ConfigError

# The index of a name is the code of the dtype in the file. Never change one; new dtypes go at the end.
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
SCHEMES = dict(enumerate(NAMES, 1))
_FIRST_FOREIGN = 64


def scheme_codes(names: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return name → code of every scheme that a file may use, and code → name of the foreign ones for its metadata.

    The same names give the same codes.
    """
    builtin = {name: code for code, name in SCHEMES.items()}
    foreign = sorted(set(names) - set(builtin))
    if _FIRST_FOREIGN + len(foreign) > MAX_SCHEME:
        raise ConfigError(
            f"a file can use {MAX_SCHEME - _FIRST_FOREIGN:,} schemes from outside birdie, not {len(foreign)}; use fewer"
        )
    codes = {name: _FIRST_FOREIGN + index for index, name in enumerate(foreign)}
    return builtin | codes, {str(code): name for name, code in codes.items()}


def dtype_name(entry: Entry) -> str:
    """Return the name of the dtype of an entry's tensor."""
    if entry.dtype >= len(DTYPES):
        raise ArtifactError(
            f"tensor {entry.name!r} has dtype code {entry.dtype}, unknown to this version; update birdie"
        )
    return DTYPES[entry.dtype]


def scheme_name(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme.

    Args:
        entry: of a file.
        foreign: code → name of the schemes that the file names in its metadata.
    """
    name = SCHEMES.get(entry.scheme) or foreign.get(str(entry.scheme))
    if name is None:
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown to this version; update birdie"
        )
    return name
