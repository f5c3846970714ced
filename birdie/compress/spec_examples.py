"""Examples of specs, read from the text of the files of schemes: help texts do not wait for torch."""

import ast
import re
from pathlib import Path

from birdie.compress import schemes

_SPECS = re.compile(r"^    specs\b[^=\n]* = (\(\n.*?^    \)|\([^\n]*\))$", re.MULTILINE | re.DOTALL)


def spec_examples() -> tuple[str, ...]:
    """Return what `registry.examples_of_words()` returns for birdie's own schemes."""
    texts: list[str] = []
    for name in schemes.numbers().values():
        source = Path(schemes.__path__[0], f"{name}.py").read_text(encoding="utf-8")
        for specs in _SPECS.findall(source):
            calls = (node for node in ast.walk(ast.parse(specs)) if isinstance(node, ast.Call))
            for call in sorted(calls, key=lambda call: call.lineno):
                options = {option.arg: option.value for option in call.keywords}
                if ast.unparse(call.func) == "Spec" and "listed" not in options:
                    texts.append(ast.literal_eval(options.get("example", [*call.args[:1], *call.args[3:]][-1])))
    return tuple(texts)
