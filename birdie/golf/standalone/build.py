"""The decoder as one small Python file that needs numpy, numba and torch but no birdie.

    birdie.golf.standalone.decode ─bundle─► one module ─minify, rename, emit─► source ─pack─► decode.py

It is cut out of birdie's own modules, so it decodes what they decode, bit for bit, with the same checks. The file
defines `load`, `load_object`, `ArtifactError` and `__version__`; `python decode.py MODEL.birdie OUT.pt` runs it.
ArtifactError carries a number instead of a sentence: `Standalone.messages[number - 1]` is the sentence. Only what the
decoder for "fast" leaves out it says in words.
"""

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from birdie.entropy.hints import Effort
from birdie.errors import ConfigError
from birdie.golf.standalone.bundle import bundle
from birdie.golf.standalone.emit import emit
from birdie.golf.standalone.minify import minify
from birdie.golf.standalone.pack import pack
from birdie.golf.standalone.rename import rename
from birdie.runtime.provenance import versions

ENTRY = "birdie.golf.standalone.decode"
EXPORTS = {
    "load": (ENTRY, "load"),
    "load_object": (ENTRY, "load_object"),
    "ArtifactError": ("birdie.errors", "ArtifactError"),
}
_MIXING = ("birdie.entropy.mixed", "birdie.entropy.context_mixing", "birdie.entropy.mixing_tables")
INSTEAD = {
    effort: ("birdie.golf.standalone.omitted", name)
    for effort, name in (("fast", "refuse"), ("max", "refuse_spectral"))
}
_SCHEMES = tuple(f"birdie.compress.schemes.decode_{name}" for name in ("codebook", "rotation", "lowrank", "nested"))
_SPECTRAL = ("birdie.compress.schemes.decode_spectral", "birdie.compress.schemes.decode_tucker")
OMITTED: Mapping[str, tuple[str, ...]] = {"fast": _MIXING + _SCHEMES + _SPECTRAL, "max": _SPECTRAL}


@dataclass(frozen=True, slots=True)
class Standalone:
    """A decoder in one file.

    Attributes:
        packed: the file.
        about: its first line.
        source: what it unpacks to.
        messages: what ArtifactError's numbers stand for, from 1 on, as birdie's source words it.
        bytes_by_module: bytes of `source` that each module of birdie takes.
    """

    packed: bytes
    about: str
    source: str
    messages: tuple[str, ...]
    bytes_by_module: Mapping[str, int]


def build(coder: Effort = "max") -> Standalone:
    """The decoder for files of either effort ("max") or for those that `--coder fast` writes.

    The same birdie gives the same bytes. A decoder for "fast" refuses context-mixed streams, codebooks,
    rotations and low-rank corrections, and names the other one; neither has room for spectral
    coefficients and Tucker's factors.

    Raises:
        ConfigError: `coder` is neither.
    """
    if coder not in OMITTED:
        raise ConfigError(f"coder {coder!r} is unknown; choose max or fast")
    version = versions()["birdie"]
    found = bundle(EXPORTS | {"main": (ENTRY, "main")}, OMITTED[coder], INSTEAD[coder])
    tree = minify(found.tree, (*EXPORTS, "main"))
    ends = f"__version__ = {version!r}\nif __name__ == '__main__': main()"
    tree.body += ast.parse(ends).body
    owners = [_owner(node, found.owners) for node in tree.body]
    tree = rename(tree, (*EXPORTS, "__version__"))
    sizes: Counter[str] = Counter()
    for node, owner in zip(tree.body, owners, strict=True):
        sizes[owner] += len(emit(ast.Module([node], []))) if owner else 0
    source, about = emit(tree), f"birdie {version}"
    sizes["imports and the rest"] = len(source) - sum(sizes.values())
    return Standalone(pack(source, about), about, source, found.messages, dict(sizes.most_common()))


def _owner(node: ast.stmt, owners: Mapping[str, str]) -> str:
    """The module of birdie that a definition came from; "" for all else."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return owners.get(node.name, "")
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return owners.get(names[0], "") if names else ""
