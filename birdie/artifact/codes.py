"""Codes: the numbers by which a file refers to dtypes and schemes; torch is not needed to read them.

Each scheme has its number, those that ship with birdie from 1 to 63, foreign ones (of other packages) from 64 on. Which
number is whose is known for birdie's own alone: a file names the foreign schemes that it uses in its metadata,
"schemes": {"64": NAME}, and readers find them by name.
"""

from collections.abc import Callable, Iterable, Mapping

from birdie.artifact.container import Entry
from birdie.compress.schemes import numbers
from birdie.errors import ArtifactError

# The index of a name is the code of the dtype in the file. Never change one; new dtypes go at the end.
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
SCHEMES = numbers()


def scheme_codes(names: Iterable[str], number_of: Callable[[str], int]) -> tuple[dict[str, int], dict[str, str]]:
    """Return name → number of every scheme that a file may use, and number → name of the foreign ones for its metadata.

    Args:
        number_of: returns the number of a foreign one.
    """
    builtin = {name: number for number, name in SCHEMES.items()}
    foreign = {name: number_of(name) for name in sorted(set(names) - set(builtin))}
    return builtin | foreign, {str(number): name for name, number in foreign.items()}


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
