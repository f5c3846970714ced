"""The decoder for browsers and Node: birdie.c as WebAssembly in one JavaScript module, which needs nothing.

c/wasm.c ──scripts/wasm.py──► javascript/birdie.wasm ────base64──┐
javascript/decoder.js ◄─ order.js ◄─ onnx.js ────────────────────┴─► decode.js
"""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from birdie.system.provenance import __version__

FOLDER = Path(__file__).parent / "javascript"
DECODER = FOLDER / "decoder.js"
PROGRAM = FOLDER / "birdie.wasm"
PAGE_PROGRAM = FOLDER / "page.wasm"
"""The same for pages of `birdie page`: smaller, and without schemes that these do not have."""
_MODULES = DECODER, FOLDER / "order.js", FOLDER / "onnx.js"
_IMPORTED = re.compile(r"^(?:import \{.*\} from .*|/\*\* @typedef \{import\(.*)\n", re.MULTILINE)
_COMMENT = re.compile(
    r"^\s*(?://.*|/\*\*(?:(?!\*/).)*(?:\*/)?|\*(?: .*|/)?)\n|^\s+|/\*\* @type \{.*?\} \*/ ?|(?<=[;{,]) // .*$",
    re.MULTILINE,
)


def javascript_decoder() -> bytes:
    """Return the decoder as one JavaScript module, which exports decode, toOnnx, toOnnxFiles and toFloat32."""
    about = f"// birdie {__version__}: decode(bytes of a .birdie file, options), a promise of {{name: tensor}}\n"
    program = base64.b64encode(PROGRAM.read_bytes()).decode()
    started = f'useProgram(Uint8Array.from(atob("{program}"), (character) => character.charCodeAt(0)));\n'
    return (about + joined(_MODULES) + started + "export { decode, toOnnx, toOnnxFiles, toFloat32 };\n").encode()


def joined(modules: Sequence[Path], *, comments: bool = True) -> str:
    """Return JavaScript modules as one script without imports and exports.

    Args:
        modules: each after those that it imports. No two of them declare the same name outside of functions; an import
            is a line.
        comments: keep comments, blank lines and indentation.
    """
    script = "".join(_IMPORTED.sub("", path.read_text(encoding="utf-8")) for path in modules)
    script = re.sub(r"^export (?!\{)", "", script, flags=re.MULTILINE)
    return script if comments else _COMMENT.sub("", script)
