"""A syntax tree as the shortest source text that reads back as the same tree."""

import ast
import re
from functools import cache
from itertools import pairwise

_TOKEN = re.compile(
    r"""[rbfu]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"""|\d[\w.]*|\w+|\s+|.""",
    re.DOTALL | re.IGNORECASE,
)
_SIMPLE = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Expr, ast.Pass, ast.Break, ast.Continue),
    *(ast.Import, ast.ImportFrom, ast.Delete, ast.Nonlocal, ast.Global, ast.Assert),
)


def emit(tree: ast.Module) -> str:
    """The source of `tree`: one space a level, statements of a block on one line where they can be.

    Raises:
        ValueError: a kind of statement that no decoder has needed so far.
    """
    text = "\n".join(_lines(_imports_merged(tree.body), 0)) + "\n"
    merged = ast.fix_missing_locations(ast.Module(_imports_merged(tree.body), []))
    if ast.dump(ast.parse(text)) != ast.dump(ast.parse(ast.unparse(merged))):
        raise ValueError(
            "the shortened source does not read back as it was; this is a defect of birdie.golf.standalone.emit"
        )
    return text


def _imports_merged(body: list[ast.stmt]) -> list[ast.stmt]:
    """`import a, b` once, and one `from` for each module."""
    plain = ast.Import([each for node in body if isinstance(node, ast.Import) for each in node.names])
    parts: dict[str | None, list[ast.alias]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            parts.setdefault(node.module, []).extend(node.names)
    rest = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return [*([plain] if plain.names else []), *(ast.ImportFrom(m, names, 0) for m, names in parts.items()), *rest]


def _lines(body: list[ast.stmt], depth: int) -> list[str]:
    lines: list[str] = []
    open_line = False  # whether the last line takes another simple statement
    for node in body:
        simple = isinstance(node, _SIMPLE)
        if simple and open_line:
            lines[-1] += ";" + _opened(ast.unparse(node))
        elif simple:
            lines.append(" " * depth + _opened(ast.unparse(node)))
        else:
            lines += _compound(node, depth)
        open_line = simple
    return lines


def _suite(header: str, body: list[ast.stmt], depth: int, before: str = "", after: str = "") -> list[str]:
    header = " " * depth + _opened(header, before, ":pass" + after) + ":"
    if all(isinstance(node, _SIMPLE) for node in body):
        return [header + ";".join(_opened(ast.unparse(node)) for node in body)]
    return [header, *_lines(body, depth + 1)]


def _compound(node: ast.stmt, depth: int) -> list[str]:
    if isinstance(node, ast.If):
        return _if(node, depth)
    if isinstance(node, ast.Try):
        return _try(node, depth)
    if isinstance(node, ast.With):
        return _suite("with " + ",".join(ast.unparse(item) for item in node.items), node.body, depth)
    if isinstance(node, ast.For):
        lines = _suite(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}", node.body, depth)
        return lines + _otherwise(node.orelse, depth)
    if isinstance(node, ast.While):
        return _suite(f"while {ast.unparse(node.test)}", node.body, depth) + _otherwise(node.orelse, depth)
    if isinstance(node, ast.FunctionDef):
        return _decorated(node, depth, _suite(f"def {node.name}({ast.unparse(node.args)})", node.body, depth))
    if isinstance(node, ast.ClassDef):
        bases = ",".join(ast.unparse(each) for each in node.bases)
        return _decorated(node, depth, _suite(f"class {node.name}" + f"({bases})" * bool(bases), node.body, depth))
    raise ValueError(f"cannot shorten a {type(node).__name__} statement; teach birdie.golf.standalone.emit the kind")


def _if(node: ast.If, depth: int) -> list[str]:
    lines = _suite(f"if {ast.unparse(node.test)}", node.body, depth)
    while len(node.orelse) == 1 and isinstance(inner := node.orelse[0], ast.If):
        node = inner
        lines += _suite(f"elif {ast.unparse(node.test)}", node.body, depth, "if 0:pass\n")
    return lines + _otherwise(node.orelse, depth)


def _try(node: ast.Try, depth: int) -> list[str]:
    lines = _suite("try", node.body, depth, "", "\nfinally:pass")
    for handler in node.handlers:
        kind = f" {ast.unparse(handler.type)}" if handler.type else ""
        named = f" as {handler.name}" if handler.name else ""
        lines += _suite(f"except{kind}{named}", handler.body, depth, "try:pass\n")
    lines += _otherwise(node.orelse, depth)
    return lines + (_suite("finally", node.finalbody, depth, "try:pass\n") if node.finalbody else [])


def _otherwise(body: list[ast.stmt], depth: int) -> list[str]:
    return _suite("else", body, depth, "if 0:pass\n") if body else []


def _decorated(node: ast.FunctionDef | ast.ClassDef, depth: int, lines: list[str]) -> list[str]:
    marks = [_opened(f"@{ast.unparse(each)}", "", "\ndef f():pass") for each in node.decorator_list]
    return [*(" " * depth + mark for mark in marks), *lines]


@cache
def _opened(text: str, before: str = "", after: str = "") -> str:
    """`text`, one line of code, without the spaces and parentheses that `before + text + after` can do without."""
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
    wanted = ast.dump(ast.parse(before + text + after))
    at = 0
    while at < len(tokens):
        if tokens[at] == "(":
            close = _closing(tokens, at)
            fewer = tokens[:at] + tokens[at + 1 : close] + tokens[close + 1 :]
            if _means(before + _joined(fewer) + after, wanted):
                tokens = fewer
                continue
        at += 1
    return _joined(tokens)


def _closing(tokens: list[str], at: int) -> int:
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index] == "(") - (tokens[index] == ")")
        if depth == 0:
            return index
    raise ValueError("a parenthesis does not close; this is a defect of birdie.golf.standalone.emit")


def _means(text: str, wanted: str) -> bool:
    try:
        return ast.dump(ast.parse(text)) == wanted
    except SyntaxError:
        return False


def _joined(tokens: list[str]) -> str:
    """Tokens with a space only where two would run together."""
    out = tokens[:1]
    for before, token in pairwise(tokens):
        out.append(" " + token if _wordy(before[-1]) and _wordy(token[0]) else token)
    return "".join(out)


def _wordy(letter: str) -> bool:
    return letter.isalnum() or letter == "_"
