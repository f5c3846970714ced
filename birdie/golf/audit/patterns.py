"""Rules that are broken by a few lines of their own, wherever data flow: how bytes are counted, how training stops.

Byte counts (see docs/audit.md): a byte token `<0xNN>` is one byte however long its name, the marker "▁" of a leading
space is one byte and not the three of its UTF-8, and it is counted once, in the table or in the sum.
"""

import ast
import re
from collections.abc import Iterator

from birdie.golf.audit.names import RESERVES
from birdie.golf.audit.rules import BYTES, TRAIN_TIME
from birdie.golf.audit.values import Issue

MARKER = "▁"
CAP_SECONDS = 600

_BYTE_TOKEN = re.compile(r"is_?byte|<0x|byte_?fallback", re.IGNORECASE)
_PIECE = re.compile(r"id_?to_?piece|idtopiece|id_to_token|convert_ids_to_tokens", re.IGNORECASE)
_SPACE = re.compile(r"space|leading", re.IGNORECASE)
_FORCED = re.compile(r"forced?_?stop|stop_?anyway|ignore_?(?:cap|wallclock)", re.IGNORECASE)
_TIME = re.compile(r"wall_?clock|elapsed|(?:^|_)cap(?:$|_)|budget|_ms\b|time|seconds|deadline", re.IGNORECASE)
_LIMIT = re.compile(r"(?:max|train(?:ing)?)_?wall_?clock|wall_?clock_?(?:cap|limit|seconds)", re.IGNORECASE)
_OTHER = re.compile(r"total|whole|eval|score|ttt|test|valid|job|slurm", re.IGNORECASE)
"""Caps of something else than training."""


def patterns(tree: ast.Module) -> Iterator[Issue]:
    """What is broken in `tree`."""
    yield from _byte_counts(tree)
    yield from _stops(tree)


def _byte_counts(tree: ast.Module) -> Iterator[Issue]:
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in said]
    names = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    names += [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    whole = " ".join(str(each) for each in (*texts, *names))
    knows_bytes = bool(_BYTE_TOKEN.search(whole))
    for each in ast.walk(tree) if not knows_bytes else ():
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "len" and _decodes_one(each):
            yield Issue(BYTES, each.lineno, "a byte token <0xNN> decoded by itself is U+FFFD, three bytes, and not one")
    if not _PIECE.search(whole) and "piece" not in names:
        return
    double = _added(tree)
    for function in _functions(tree):
        measures = list(_measures(function))
        handled = [each for each in ast.walk(function) if isinstance(each, ast.Call) and _strips(each)]
        spaced = any(_replaces(each, " ") for each in handled)
        cut = any(not _replaces(each, " ") for each in handled) or _cut(function)
        inside = list(_byte_branches(function))
        yield from inside
        for measure in measures:
            if not knows_bytes:
                yield Issue(
                    BYTES, measure.lineno, "byte tokens <0xNN> are counted by the length of their name, not as one byte"
                )
            elif not handled and not cut:
                yield Issue(BYTES, measure.lineno, f"the marker {MARKER} of a leading space is counted as three bytes")
            if spaced and not cut and double:
                yield Issue(
                    BYTES,
                    measure.lineno,
                    f"the leading space is in this length, and is added once more at line {double}",
                )


def _decodes_one(call: ast.Call) -> bool:
    """Whether a call measures what one token decodes to by itself: len(sp.decode([i]).encode())."""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr.lower() in ("decode", "decodeids", "decode_ids")
        and each.args
        and isinstance(each.args[0], ast.List)
        and len(each.args[0].elts) == 1
        for each in ast.walk(call)
    )


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Functions, and what is outside of them."""
    found = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    yield from found
    rest = [each for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
    yield ast.Module(rest, [])


def _pieces(function: ast.AST) -> set[str]:
    """Names of a vocabulary's pieces in a function."""
    found = {"piece"}
    for _ in range(3):
        for each in ast.walk(function):
            if isinstance(each, ast.Assign):
                said = ast.unparse(each.value)
                taken = {n.id for n in ast.walk(each.value) if isinstance(n, ast.Name)} & found
                plain = not isinstance(each.value, ast.Call | ast.Compare) and (_PIECE.search(said) or taken)
                called = isinstance(each.value, ast.Call) and (_PIECE.search(said) or _strips(each.value))
                if plain or called:
                    found |= {n.id for n in each.targets if isinstance(n, ast.Name)}
            elif isinstance(each, ast.For | ast.comprehension) and _PIECE.search(ast.unparse(each.iter)):
                found |= {n.id for n in ast.walk(each.target) if isinstance(n, ast.Name)}
    return found


def _measures(function: ast.AST) -> Iterator[ast.Call]:
    """Lengths of pieces in bytes: len(….encode(…)) of what comes from a vocabulary."""
    names = _pieces(function)
    if not any(_PIECE.search(n.attr) for n in ast.walk(function) if isinstance(n, ast.Attribute)):
        params = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        loops = {
            n.id
            for f in ast.walk(function)
            if isinstance(f, ast.For)
            for n in ast.walk(f.target)
            if isinstance(n, ast.Name)
        }
        if "piece" not in params | loops:
            return
    for each in ast.walk(function):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "len" and each.args:
            inner = each.args[0]
            encoded = [c for c in ast.walk(inner) if isinstance(c, ast.Attribute) and c.attr == "encode"]
            of_piece = any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(inner))
            if (encoded or isinstance(inner, ast.Name)) and (of_piece or _PIECE.search(ast.unparse(inner))):
                yield each


def _strips(call: ast.Call) -> bool:
    """Whether a call takes the marker off, or makes it a space."""
    method = isinstance(call.func, ast.Attribute) and call.func.attr in (
        "lstrip",
        "strip",
        "removeprefix",
        "replace",
        "translate",
    )
    return method and any(
        isinstance(each, ast.Name) or (isinstance(each, ast.Constant) and each.value == MARKER) for each in call.args
    )


def _replaces(call: ast.Call, by: str) -> bool:
    last = call.args[-1]
    return len(call.args) > 1 and isinstance(last, ast.Constant) and last.value == by


def _cut(function: ast.AST) -> bool:
    """Whether a piece loses its first character: piece[1:]."""
    names = _pieces(function)
    return any(
        isinstance(each, ast.Subscript)
        and isinstance(each.slice, ast.Slice)
        and isinstance(each.slice.lower, ast.Constant | ast.Call)
        and any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(each.value))
        for each in ast.walk(function)
    )


def _byte_branches(function: ast.AST) -> Iterator[Issue]:
    """Branches for byte tokens that count anything but one byte."""
    for each in ast.walk(function):
        if not isinstance(each, ast.If | ast.IfExp) or not _BYTE_TOKEN.search(ast.unparse(each.test)):
            continue
        if isinstance(each.test, ast.UnaryOp | ast.BoolOp):
            continue
        parts = (
            [each.body]
            if isinstance(each, ast.IfExp)
            else [
                s.value
                for s in each.body
                if isinstance(s, ast.Assign | ast.AugAssign | ast.Return) and s.value is not None
            ]
        )
        for part in parts:
            number = isinstance(part, ast.Constant) and type(part.value) is int and part.value > 1
            length = any(isinstance(n, ast.Call) and _long(n) for n in ast.walk(part))
            if number or length:
                said = ast.unparse(part)
                yield Issue(BYTES, part.lineno, f"a byte token <0xNN> is one byte of text, and is counted as {said}")


def _long(call: ast.Call) -> bool:
    """Whether a call measures something else than the bytes a name stands for: len(bytes.fromhex(piece[3:5])) is 1."""
    if ast.unparse(call.func) != "len" or not call.args:
        return False
    inner = call.args[0]
    said = ast.unparse(inner.func).split(".")[-1] if isinstance(inner, ast.Call) else ""
    return said not in ("bytes", "bytearray", "fromhex", "unhexlify", "a2b_hex", "b16decode")


def _added(tree: ast.Module) -> int:
    """The line where flags of leading spaces are added to byte counts; 0: none."""
    flags = _flags(tree)
    for each in ast.walk(tree):
        if isinstance(each, ast.AugAssign | ast.BinOp) and isinstance(each.op, ast.Add):
            parts = [each.value] if isinstance(each, ast.AugAssign) else [each.left, each.right]
            for part in parts:
                looked = [n for n in ast.walk(part) if isinstance(n, ast.Subscript)]
                if any(isinstance(n, ast.Name) and n.id in flags for s in looked for n in ast.walk(s.value)):
                    return each.lineno
    return 0


def _flags(tree: ast.Module) -> set[str]:
    """Names of tables that say which tokens begin with a space."""
    flags: set[str] = set()
    for each in ast.walk(tree):
        if isinstance(each, ast.If) and "startswith" in ast.unparse(each.test) and MARKER in ast.unparse(each.test):
            stores = [t for s in each.body if isinstance(s, ast.Assign) for t in s.targets]
            flags |= {ast.unparse(t.value) for t in stores if isinstance(t, ast.Subscript)}
        elif isinstance(each, ast.Assign) and "startswith" in ast.unparse(each.value):
            flags |= {ast.unparse(t.value if isinstance(t, ast.Subscript) else t) for t in each.targets}
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for _ in range(4):
        for each in ast.walk(tree):
            if isinstance(each, ast.Assign):
                flags |= _renamed(each, flags, functions)
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in functions:
                params = functions[each.func.id].args.args
                pairs = zip(params, each.args, strict=False)
                flags |= {p.arg for p, a in pairs if isinstance(a, ast.Name) and a.id in flags}
    return flags | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and _SPACE.search(n.id)}


def _renamed(node: ast.Assign, flags: set[str], functions: dict[str, ast.FunctionDef]) -> set[str]:
    found = set()
    for target in node.targets:
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Name | ast.Call):
            inner = [node.value] if isinstance(node.value, ast.Name) else node.value.args
            found |= {target.id for n in inner if isinstance(n, ast.Name) and n.id in flags}
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call):
            called = functions.get(ast.unparse(node.value.func))
            returns = [r.value for r in ast.walk(called) if isinstance(r, ast.Return)] if called else []
            for value in returns:
                if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                    found |= {
                        ast.unparse(name)
                        for name, part in zip(target.elts, value.elts, strict=True)
                        if any(isinstance(n, ast.Name) and n.id in flags for n in ast.walk(part))
                    }
    return found


def reserves(tree: ast.Module) -> bool:
    """Whether a script keeps some of its time back: it says so, or its cap is below that of the challenge."""
    said = [
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)
    ]
    return any(map(RESERVES.search, said)) or any(0 < number < cap for _, number, cap, _ in _caps(tree))


def _caps(tree: ast.Module) -> Iterator[tuple[object, float, int, int]]:
    """Caps of the train clock: as it is written, as a number, what it may be in that unit, and its line."""
    for name, value, line in _defaults(tree):
        try:
            number = float(str(value))
        except ValueError:
            continue
        if _LIMIT.search(name) and not _OTHER.search(name):
            yield value, number, CAP_SECONDS * 1000 if name.lower().endswith("ms") else CAP_SECONDS, line


def _stops(tree: ast.Module) -> Iterator[Issue]:
    defaults = _defaults(tree)
    for value, number, cap, line in _caps(tree):
        if number > cap:
            yield Issue(TRAIN_TIME, line, f"training may take {value}, the cap is {cap}")
    off = any(
        _FORCED.search(name) and str(value) in ("0", "", "None", "-1", "False", "0.0") for name, value, _ in defaults
    )
    for each in ast.walk(tree):
        if not isinstance(each, ast.If | ast.IfExp) or not _FORCED.search(ast.unparse(each.test)):
            continue
        body = [each.body] if isinstance(each, ast.IfExp) else each.body
        orelse = [each.orelse] if isinstance(each, ast.IfExp) else each.orelse
        timed = [any(_TIME.search(ast.unparse(part)) for part in parts) for parts in (body, orelse)]
        lifted = any(_lifts(part) for part in body)
        if (timed[1] and not timed[0]) or lifted:
            why = "a step count decides when training stops, and the clock is not asked: it may run past 600 s"
            yield Issue(TRAIN_TIME, each.lineno, why + ("; off by default" if off else ""), sure=not off)


def _lifts(node: ast.AST) -> bool:
    """Whether a statement lifts the cap: reached = False, limit = None."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant | ast.Call):
        return False
    nothing = ast.unparse(node.value) in ("False", "None", "float('inf')", "0")
    return nothing and any(re.search(r"cap|wall|limit|reached|stop", ast.unparse(t)) for t in node.targets)


def _defaults(tree: ast.Module) -> list[tuple[str, object, int]]:
    """Settings and their defaults: names that are assigned constants, and variables of the environment."""
    found: list[tuple[str, object, int]] = []
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and ast.unparse(each.func).split(".")[-1] in ("get", "getenv"):
            said = [a.value for a in each.args if isinstance(a, ast.Constant)]
            if said and isinstance(said[0], str):
                found.append((said[0], said[1] if len(said) > 1 else "unset", each.lineno))
        elif isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(each.value, ast.Constant):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if isinstance(each.value.value, int | float) or each.value.value is None:
                found += [(ast.unparse(target), each.value.value, each.lineno) for target in targets]
    return found
