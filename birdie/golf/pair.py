"""Pair for scripts that birdie did not write: `export` and `load` in one Python file that needs no birdie.

    birdie.golf.standalone.pair ──bundle──► one module ──minify──► short source ──► birdie_pair.py: imported
                                                                               └──► ASCII text: pasted into a script

Export and load are cut out of birdie's own modules, so files, values and errors are the same. The file is a module of
its own in memory, too: an installed birdie is neither imported nor hidden by it.
"""

import ast
import base64
import bz2
from dataclasses import dataclass

from birdie import errors
from birdie.golf.packed import packages, pinned
from birdie.golf.standalone import build
from birdie.golf.standalone.bundle import bundle
from birdie.golf.standalone.minify import minify
from birdie.golf.standalone.pack import pack
from birdie.runtime.provenance import versions

ENTRY = "birdie.golf.standalone.pair"
ERRORS = ("BirdieError", "ArtifactError", "BudgetError", "ConfigError", "DataError", "OutputError", "WeightsError")
_COMPRESS = "birdie.compress"

# Replacements of what no export under a budget reaches: specs, rules, transforms of long kernels, other targets.
_SUBSTITUTES = {
    ("birdie.artifact.codes", "scheme_codes"): "scheme_codes",
    (f"{_COMPRESS}.registry", "decoder"): "decoder",
    (f"{_COMPRESS}.registry", "register"): "left_out",
    (f"{_COMPRESS}.rate.allocation", "factors_of"): "factors_of",
    (f"{_COMPRESS}.rate.assignment", "parse_rules"): "no_rules",
    (f"{_COMPRESS}.rate.assignment", "match"): "no_matches",
    (f"{_COMPRESS}.rate.assignment", "DEFAULT"): "DEFAULT",
    (f"{_COMPRESS}.rate.parts", "refit_by_parts"): "left_out",
    (f"{_COMPRESS}.rate.budget", "fit_quality"): "left_out",
    (f"{_COMPRESS}.schemes.spectral", "best_transform"): "no_transform",
    (f"{_COMPRESS}.device.encoding", "searches"): "no_gpu",
    (f"{_COMPRESS}.device.encoding", "quantize"): "left_out",
    ("birdie.entropy.static", "encode_fastest"): "left_out",
    ("birdie.entropy.rans_lanes", "encode"): "left_out",
    ("birdie.entropy.rans_lanes", "decode"): "left_out",
    (f"{_COMPRESS}.schemes.spectral", "Spectral"): "left_out",
}
_UNCALIBRATED = {
    (f"{_COMPRESS}.calibration.result", "calibrated_state"): "not_calibrated",
    (f"{_COMPRESS}.state", "plain_state"): "left_out",
    (f"{_COMPRESS}.state", "folded"): "left_out",
}
_CALIBRATED = {
    (f"{_COMPRESS}.calibration.probe", "probe"): "left_out",
    (f"{_COMPRESS}.calibration.refit", "refit"): "left_out",
    (f"{_COMPRESS}.calibration.result", "_mean"): "left_out",
    (f"{_COMPRESS}.calibration.symmetry", "canonical"): "left_out",
    (f"{_COMPRESS}.calibration.symmetry", "carried"): "left_out",
    (f"{_COMPRESS}.calibration.symmetry_graph", "symmetries_of"): "left_out",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """`export` and `load` in one file.

    Attributes:
        module: the file to import.
        text: ASCII text that does the same, to paste into a script, and larger by a quarter.
        source: the source text that both unpack to.
        minified: False where python-minifier is not installed; the file is larger then.
        requirements: packages it needs, pinned to what is installed here.
    """

    module: bytes
    text: str
    source: str
    minified: bool
    requirements: tuple[str, ...]


def build_pair(*, calibrated: bool = False) -> Pair:
    """Return the pair; the same birdie gives the same bytes.

    Args:
        calibrated: whether `export` takes calibration=(module, batches, loss).
    """
    names = _SUBSTITUTES | (_CALIBRATED if calibrated else _UNCALIBRATED)
    substitutes = build.SUBSTITUTES | {target: (ENTRY, name) for target, name in names.items()}
    exports = {"export": (ENTRY, "export_calibrated" if calibrated else "export"), "load": (ENTRY, "load")}
    exports |= {name: (errors.__name__, name) for name in ERRORS}
    tree = bundle(exports, substitutes=substitutes, numbered=False).tree
    version = versions()["birdie"]
    source, minified = f"__version__ = {version!r}\n{ast.unparse(tree)}\n", True
    try:
        source = minify(source, exports)
    except ImportError:
        minified = False
    needed = tuple(pinned(packages([ast.parse(source)])))
    return Pair(pack(source, f"birdie {version}"), _text(source, version), source, minified, needed)


def _text(source: str, version: str) -> str:
    """Return lines that define `export` and `load` in whichever script they stand, and one more name, `birdie_pair`.

    The source has a namespace of its own, for its short names would replace those of the script, and does not inherit
    the script's future imports. It begins below the last line of any script, so that no traceback shows lines of the
    script in place of it.
    """
    packed = base64.b85encode(bz2.compress(source.encode())).decode()
    lines = (
        f"# birdie {version}: export(state, budget, path) and load(path); errors are birdie_pair['BirdieError']",
        "import base64, bz2",
        f"birdie_pair = base64.b85decode('{packed}')",
        "birdie_pair = compile(b'\\n' * 9999 + bz2.decompress(birdie_pair), __file__, 'exec', dont_inherit=True)",
        "exec(birdie_pair, birdie_pair := {'__name__': 'birdie_pair', '__file__': __file__})",
        "export, load = birdie_pair['export'], birdie_pair['load']",
    )
    return "\n".join(lines) + "\n"
