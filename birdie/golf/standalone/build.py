"""Build the decoder as one small Python file that needs numpy, numba and torch but no birdie.

    birdie.golf.standalone.decode ──bundle──► one module ──minify──► short source ──pack──► decode.py

It is cut out of birdie's own modules, so it decodes the same files to the same bits, with the same checks. The file
defines `load`, `load_object`, `ArtifactError` and `__version__`; `python decode.py MODEL.birdie OUT.pt` runs it.

Its errors are numbers instead of sentences: `Standalone.messages[number - 1]` is the sentence. Only the refusal of a
coder or scheme that the decoder leaves out is in words.
"""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from birdie.entropy.hints import Effort
from birdie.errors import ConfigError
from birdie.golf.standalone.bundle import bundle
from birdie.golf.standalone.minify import minify
from birdie.golf.standalone.pack import pack
from birdie.runtime.provenance import versions

ENTRY, REFUSAL = "birdie.golf.standalone.decode", "birdie.golf.standalone.refusal"
EXPORTS = {
    "load": (ENTRY, "load"),
    "load_object": (ENTRY, "load_object"),
    "ArtifactError": ("birdie.errors", "ArtifactError"),
}
SUBSTITUTES = {("birdie.runtime.kernels", "njit"): ("birdie.golf.standalone.kernels", "njit")}
# The schemes that each decoder includes; it refuses all others. Spectral and tucker would add 2.6 kB to "max".
SCHEMES: Mapping[Effort, tuple[str, ...]] = {
    "fast": ("lossless", "grid", "cast", "trellis", "ternary"),
    "max": ("lossless", "grid", "cast", "trellis", "ternary", "codebook", "rotation", "lowrank"),
}


@dataclass(frozen=True, slots=True)
class Standalone:
    """A decoder in one file.

    Attributes:
        packed: the file.
        title: its first line.
        source: the source text that it unpacks to.
        minified: False where python-minifier is not installed; the file is larger then.
        messages: the sentences that ArtifactError's numbers stand for, from 1, as birdie's source has them.
        bytes_by_module: bytes of `source` that each module of birdie takes.
    """

    packed: bytes
    title: str
    source: str
    minified: bool
    messages: tuple[str, ...]
    bytes_by_module: Mapping[str, int]


def build(coder: Effort = "max") -> Standalone:
    """Return the decoder for the schemes that `SCHEMES` lists, with all coders ("max") or without context mixing.

    The same birdie gives the same bytes. Context mixing is the coder of files that were not written with
    `--coder fast`.

    Raises:
        ConfigError: `coder` is neither.
    """
    if coder not in SCHEMES:
        raise ConfigError(f"coder {coder!r} is unknown; choose max or fast")
    title = f"birdie {versions()['birdie']}"
    module = bundle(EXPORTS | {"main": (ENTRY, "main")}, refusals(coder), unnumbered=REFUSAL, substitutes=SUBSTITUTES)
    source = f"__version__ = {versions()['birdie']!r}\n{ast.unparse(module.tree)}\n"
    try:
        source, minified = minify(source, EXPORTS), True
    except ImportError:
        minified = False
    sizes = _bytes_by_module(source, module.origins)
    return Standalone(pack(source, title), title, source, minified, module.messages, sizes)


def refusals(coder: Effort) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Return the table entries that refuse in the decoder for `coder`, as `bundle` takes them."""
    from birdie.golf.standalone.decode import DECODERS  # imported late: the help of `birdie decoder` needs no torch

    entries = {
        (ENTRY, "DECODERS", repr(scheme)): (REFUSAL, "needs_max" if scheme in SCHEMES["max"] else "needs_birdie")
        for scheme in DECODERS
        if scheme not in SCHEMES[coder]
    }
    if coder == "fast":
        entries["birdie.entropy.coder", "_DECODERS", "MIXED"] = REFUSAL, "needs_context_mixing"
    return entries


def _bytes_by_module(source: str, origins: Sequence[str]) -> dict[str, int]:
    """Return the bytes of `source` by module, the largest first; its last statements are from `origins`, in order."""
    lines = [0]
    for line in source.split("\n"):
        lines.append(lines[-1] + len(line) + 1)
    starts = []
    for node in ast.parse(source).body[-len(origins) :]:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        first: ast.stmt | ast.expr = decorators[0] if decorators else node
        starts.append(lines[first.lineno - 1] + first.col_offset - len(decorators[:1]))  # the @ comes before
    sizes = Counter({"imports and the rest": starts[0]})
    for module, start, end in zip(origins, starts, [*starts[1:], len(source)], strict=True):
        sizes[module] += end - start
    return dict(sizes.most_common())
