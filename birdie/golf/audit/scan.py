"""A static scan that points at lines to read: it parses a script, never runs it, and never fails a rule.

    source ──► Script (scopes, calls, expressions that may hold validation tokens) ──► patterns ──► warnings

A pattern is a library call or a shape of syntax that withdrawn scores had: `.backward()` on validation tokens, the
smaller of two losses, a hash of the target token, byte tokens counted by their names. Legal scripts have many of these
lines as well, test-time training above all, and only a person can judge their order. So every result is a warning,
with file, line and one sentence.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from birdie.golf.audit.deadline import Deadline
from birdie.golf.audit.rules import (
    BYTES,
    NORMALIZED,
    ONE_PASS,
    SCORE_FIRST,
    SELF_CONTAINED,
    TRAIN_TIME,
    VALIDATION,
    Finding,
    Rule,
)
from birdie.golf.audit.script import FUNCTIONS, TRAINING_FILE, Script, names_file, parameters
from birdie.golf.audit.source import UNREADABLE, Source, parse_source

CAP_SECONDS = 600
SCANNED = (SCORE_FIRST, ONE_PASS, NORMALIZED, VALIDATION, BYTES, TRAIN_TIME, SELF_CONTAINED)
"""Rules that the scan has patterns of."""

_COUNTS = (SCORE_FIRST, "enters validation tokens in a table: is the loss of each final before?")
_LEAST = (ONE_PASS, "takes the smaller of several losses of validation tokens")
_CHOICE = (VALIDATION, "chooses by the loss of validation tokens")
_LEARNS = (SCORE_FIRST, "learns from validation tokens: is the loss of each final before?")
_LEARNS_ALONE = (VALIDATION, "learns from validation tokens and returns no score: before export, or to warm up?")
_CALIBRATION = (VALIDATION, "gives validation tokens to a function that calibrates")
_DROPPED = (VALIDATION, "runs a model on validation tokens and drops the result: to calibrate, or to warm up?")
_BEST = (VALIDATION, "keeps the best of several results of validation tokens")
_HESSIAN = (VALIDATION, "sums products of activations (a Hessian) of validation tokens")
_EQUAL = (NORMALIZED, "compares with a validation token: is a probability raised where they are equal?")
_HASH = (NORMALIZED, "hashes validation tokens: is the target in the key, and is there a sum over the vocabulary?")
_MIXTURE = (NORMALIZED, "mixes two probabilities: both over the same, whole vocabulary?")
_TRAINING_DATA = (SELF_CONTAINED, "training data are read where validation is scored")
_BYTE_TOKENS = (BYTES, "byte tokens <0xNN> are not told apart: each is one byte")
_LONG_BYTE = (BYTES, "a byte token <0xNN> is counted with another length than 1")
_SPACE_MARKER = (BYTES, "the marker ▁ of a leading space is counted as three bytes")
_SPACE_TWICE = (BYTES, "the leading space is in this length, and may be added once more")
_CALLS_WITH_TOKENS = {
    **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_", "index_put_", "one_hot"), _COUNTS),
    "logaddexp": _MIXTURE,
}
_CALLS_WITH_LOSSES = {
    **dict.fromkeys(("minimum", "fmin", "amin", "nanmin"), _LEAST),
    **dict.fromkeys(("argmin", "nanargmin", "argsort", "sorted", "minimize", "minimize_scalar", "brute"), _CHOICE),
}
_LOSSES = {"cross_entropy", "nll_loss", "log_softmax", "logsumexp", "log"}
_HOOKS = {"register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"}
_HASHES = {"hash", "bitwise_xor", "crc32"}
_CLOCKS = {"time", "perf_counter", "monotonic", "perf_counter_ns", "monotonic_ns", "time_ns", "process_time"}
_NETWORK = re.compile(
    r"^(?:requests|httpx|aiohttp|urllib3|ftplib)\.|(?:^|\.)(?:urlopen|urlretrieve|create_connection|HTTPS?Connection|"
    r"hf_hub_download|snapshot_download|load_dataset)$"
)
_DOWNLOADS = re.compile(r"\b(?:curl|wget|scp|gsutil|aws s3|pip install|git clone|apt-get install)\b")
_CALIBRATES = re.compile(r"hessian|calibrat|fisher", re.IGNORECASE)
_FORCED_STOP = re.compile(r"forced?_?stop|stop_?(?:at_?)?step|ignore_?(?:cap|wall_?clock)", re.IGNORECASE)
_CAP = re.compile(r"(?:max|train(?:ing)?)_?wall_?clock|wall_?clock_?(?:cap|limit|seconds)", re.IGNORECASE)
_OTHER_CAP = re.compile(r"total|whole|eval|score|ttt|test|valid|job|slurm", re.IGNORECASE)
_BYTE_TOKEN = re.compile(r"is_?byte|<0x|byte_?fallback", re.IGNORECASE)
_PIECES = re.compile(r"id_?to_?piece|idtopiece|id_to_token|convert_ids_to_tokens|<0x|▁", re.IGNORECASE)


class Pointer(NamedTuple):
    """A line to read: for which rule, and why."""

    line: int
    rule: Rule
    reason: str


def scan(
    source: bytes | Source, shown: str, *, unlimited: bool = False, deadline: Deadline | None = None
) -> tuple[Finding, ...]:
    """Return warnings about lines of `source`; those of the script inside it, if it decompresses and executes one.

    Args:
        source: of a file, or its bytes.
        shown: its path in findings.
        unlimited: whether the track has no cap on training time.
        deadline: the time limit.
    """
    source = parse_source(source) if isinstance(source, bytes) else source
    prefix = ""
    if source.unpacked is not None:
        source, prefix = parse_source(source.unpacked), "in the source that it unpacks: "
    if source.damage:
        return (Finding(SCORE_FIRST, "unknown", source.damage, "scan", shown),)
    if source.tree is None:
        return (Finding(SCORE_FIRST, "unknown", prefix + source.problem, "scan", shown, source.line),)
    try:
        pointers = sorted(_Scan(source.tree, deadline or Deadline()).pointers())
    except UNREADABLE:
        return (Finding(SCORE_FIRST, "unknown", f"{prefix}not scanned: nested too deeply", "scan", shown),)
    first = {(pointer.line, pointer.rule): pointer for pointer in reversed(pointers)}  # one for a line and a rule
    return tuple(
        Finding(pointer.rule, "warning", prefix + pointer.reason, "scan", shown, pointer.line)
        for pointer in reversed(first.values())
        if not (unlimited and pointer.rule == TRAIN_TIME)
    )


class _Scan:
    """The patterns, over one script."""

    def __init__(self, tree: ast.Module, deadline: Deadline) -> None:
        self.script, self.deadline = Script(tree, deadline), deadline
        self.holds, self.called = self.script.holds, self.script.called
        calls = [(scope, call) for scope, calls in self.script.calls.items() for call in calls]
        self.learners = {scope for scope, call in calls if self.called(call) == "backward"}
        self.scopes = [tree, *(node for node in self.script.nodes if isinstance(node, FUNCTIONS))]

    def pointers(self) -> Iterator[Pointer]:
        """Yield the lines that any pattern matches."""
        for number, node in enumerate(self.script.nodes):
            if number % 4096 == 0:
                self.deadline.check()
            if isinstance(node, ast.Call):
                yield from (Pointer(node.lineno, *match) for match in self._call(node))
                yield from (Pointer(node.lineno, SELF_CONTAINED, reason) for reason in self._network(node))
            elif isinstance(node, ast.stmt | ast.BinOp | ast.Compare):
                yield from (Pointer(getattr(node, "lineno", 0), *match) for match in self._syntax(node))
            yield from self._setting(node)
        for scope in self.scopes:
            self.deadline.check()
            yield from self._late_calibration(scope)
        yield from self._training_data()
        yield from self._byte_counts()

    def _call(self, call: ast.Call) -> Iterator[tuple[Rule, str]]:
        name, function = self.called(call), call.func
        full = self.script.full_name(function)
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        owner = [function.value] if isinstance(function, ast.Attribute) else []
        held = any(value in self.holds for value in values)
        losses = [value for value in (*values, *owner) if self._is_loss(value)]
        if name in ("backward", "partial_fit") or full.endswith("autograd.grad"):
            if held or any(value in self.holds for value in owner):
                yield _LEARNS
                returns = (part for part in ast.walk(self.script.scope[call]) if isinstance(part, ast.Return))
                if not any(part.value for part in returns):
                    yield _LEARNS_ALONE
        elif held and (full.endswith("add.at") or (name in ("append", "add") and any(map(self._is_row, owner)))):
            yield _COUNTS
        elif held and name in _CALLS_WITH_TOKENS:
            yield _CALLS_WITH_TOKENS[name]
        elif losses and name == "min":
            yield _LEAST if owner or len(call.args) > 1 else _CHOICE
        elif losses and name in _CALLS_WITH_LOSSES:
            yield _CALLS_WITH_LOSSES[name]
        elif name == "where" and len(values) == 3 and isinstance(values[0], ast.Compare):
            if self._is_loss(values[0].left) and self._is_loss(values[0].comparators[0]):
                yield _LEAST
        elif held and any(map(self._calibrates, self.script.callees(call))):
            yield _CALIBRATION
        elif held and isinstance(self.script.parent[call], ast.Expr) and self._is_variable(function):
            yield _DROPPED

    def _network(self, call: ast.Call) -> Iterator[str]:
        full = self.script.full_name(call.func)
        texts = [str(part.value) for part in ast.walk(call) if isinstance(part, ast.Constant)]
        if _NETWORK.search(full):
            yield f"{full} uses the network: while it evaluates?"
        elif full.split(".")[0] in ("subprocess", "os") and _DOWNLOADS.search(" ".join(texts)):
            yield f"{full} runs a command that downloads: while it evaluates?"

    def _syntax(self, node: ast.AST) -> Iterator[tuple[Rule, str]]:
        if isinstance(node, ast.Compare):
            if isinstance(node.ops[0], ast.Eq) and {node.left, node.comparators[0]} <= self.holds:
                yield _EQUAL
        elif isinstance(node, ast.If):
            if self._keeps_best(node):
                yield _BEST
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.Add) and self._is_row(node.target):
                yield _COUNTS
        elif isinstance(node, ast.Assign):
            tables = [part for part in node.targets if isinstance(part, ast.Subscript) and self._is_row(part)]
            if any(isinstance(table.value, ast.Attribute) for table in tables):
                yield _COUNTS
        elif isinstance(node, ast.BinOp) and node in self.holds:
            if isinstance(node.op, ast.Mod | ast.BitAnd) and _mixes_bits(node.left) and not self._is_in_model(node):
                yield _HASH
            elif _is_product_with_itself(node):
                yield _HESSIAN
            elif _is_mixture(node):
                yield _MIXTURE

    def _is_variable(self, function: ast.expr) -> bool:
        """Return whether what is called is a variable, as models are, and no function of the script or a library."""
        key = self.script.key(function)
        return key is not None and (key in self.script.values or isinstance(key[0], FUNCTIONS))

    def _is_loss(self, node: ast.expr) -> bool:
        """Return whether a function of the script, a model or a library's loss made `node` of validation tokens."""
        if node not in self.holds:
            return False
        keys = [self.script.key(part) for part in ast.walk(node)]
        values = [value for key in keys if key in self.script.names for value in self.script.values.get(key, ())]
        calls = [part for value in (node, *values) for part in ast.walk(value) if isinstance(part, ast.Call)]
        return any(
            call in self.holds
            and (self.script.callees(call) or self._is_variable(call.func) or self.called(call) in _LOSSES)
            for call in calls
        )

    def _is_row(self, owner: ast.expr) -> bool:
        """Return whether `owner` is the row of a table that validation tokens select."""
        key = self.script.key(owner)
        return any(
            (isinstance(row, ast.Subscript) and row.slice in self.holds)
            or (isinstance(row, ast.Call) and self.called(row) == "setdefault" and row in self.holds)
            for row in (owner, *(self.script.values.get(key, ()) if key else ()))
        )

    def _keeps_best(self, node: ast.If) -> bool:
        """Return whether `if loss < best: best = loss` compares a loss of validation tokens."""
        test = node.test
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE):
            return False
        sides = [test.left, test.comparators[0]]
        compared = {self.script.key(side) for side in sides} - {None}
        targets = [part for line in node.body if isinstance(line, ast.Assign) for part in line.targets]
        return any(map(self._is_loss, sides)) and any(key in compared for t in targets for key in self.script.keys(t))

    def _is_in_model(self, node: ast.AST) -> bool:
        """Return whether `node` is in a class with a `forward`: a model may hash its inputs into an embedding."""
        while node is not self.script.tree and not isinstance(node, ast.ClassDef):
            node = self.script.parent[node]
        return any(getattr(part, "name", "") == "forward" for part in getattr(node, "body", ()))

    def _calibrates(self, scope: ast.AST) -> bool:
        """Return whether a function registers hooks, multiplies activations with themselves, or is named for it."""
        named = _CALIBRATES.search(getattr(scope, "name", ""))
        hooks = (self.called(call) in _HOOKS for call in self.script.calls[scope])
        return bool(named) or any(hooks) or any(map(_is_product_with_itself, ast.walk(scope)))

    def _late_calibration(self, scope: ast.AST) -> Iterator[Pointer]:
        """Yield calls that calibrate after the last reading of the train clock."""
        readings = [
            node.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Call)
            if self.called(node.left) in _CLOCKS and self.script.scope[node] is scope
        ]
        if not readings:
            return
        last, steps = max(readings), []
        for call in sorted(self.script.calls[scope], key=lambda call: call.lineno):
            reached = {inner for callee in self.script.callees(call) for inner in self.script.reached(callee)}
            if self.called(call) == "backward" or reached & self.learners:
                steps.append(call.lineno)
            if call.lineno > last and steps and steps[0] < last and any(map(self._calibrates, reached)):
                reason = f"calibrates after the train clock was last read, at line {last}: is it counted?"
                yield Pointer(call.lineno, TRAIN_TIME, reason)

    def _training_data(self) -> Iterator[Pointer]:
        """Yield names of training files in functions that an evaluation calls."""
        files = [part for part in self.script.nodes if names_file(getattr(part, "value", None), TRAINING_FILE)]
        for scope in self.scopes if files else ():
            scores = any((scope, name) in self.script.names for name in parameters(scope))
            reached = self.script.reached(scope) if scores else set()
            for node in files if not reached & self.learners else ():
                if self.script.scope[node] in reached:
                    yield Pointer(getattr(node, "lineno", 0), *_TRAINING_DATA)

    def _setting(self, node: ast.AST) -> Iterator[Pointer]:
        """Yield defaults that lift the cap on training time: of environment variables, and constants with a name."""
        pairs: list[tuple[str, object]] = []
        if isinstance(node, ast.Call) and self.called(node) in ("get", "getenv") and node.args:
            values = [getattr(argument, "value", None) for argument in (*node.args, ast.Constant(None))]
            pairs = [(values[0], values[1])] if isinstance(values[0], str) else []
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(getattr(part, "id", getattr(part, "attr", "")), node.value.value) for part in targets]
        for name, value in pairs:
            cap, line = CAP_SECONDS * (1000 if name.lower().endswith("ms") else 1), getattr(node, "lineno", 0)
            if _FORCED_STOP.search(name):
                yield Pointer(line, TRAIN_TIME, f"{name} ends training at a step: does the clock end it too?")
            elif _CAP.search(name) and not _OTHER_CAP.search(name) and _number(value) > cap:
                yield Pointer(line, TRAIN_TIME, f"training may take {value}; the cap is {cap}")

    def _byte_counts(self) -> Iterator[Pointer]:
        """Yield lengths of vocabulary pieces that miss one of three cases: byte tokens, the marker ▁, its one space."""
        nodes = [node for node in self.script.nodes if not isinstance(self.script.parent.get(node), ast.Expr)]
        words = [getattr(node, part) for node in nodes for part in ("id", "attr", "value") if hasattr(node, part)]
        text = " ".join(map(str, words))
        if not _PIECES.search(text):
            return
        has_bytes, adds_flags = bool(_BYTE_TOKEN.search(text)), any(map(_adds_flags, nodes))
        for scope in self.scopes:
            inner = [node for node in ast.walk(scope) if self.script.scope.get(node) is scope]
            calls = [node for node in inner if isinstance(node, ast.Call)]
            strips = [node for node in calls if _strips_marker(node)]
            spaced = any(getattr(node.args[-1], "value", "") == " " for node in strips)
            cuts = any(isinstance(node, ast.Slice) and isinstance(node.lower, ast.Constant) for node in inner)
            for call in calls:
                names = {getattr(part, "attr", "") for part in ast.walk(call)} if self.called(call) == "len" else ()
                if "encode" in names and not has_bytes:
                    yield Pointer(call.lineno, *_BYTE_TOKENS)
                elif "encode" in names and not strips and not cuts:
                    yield Pointer(call.lineno, *_SPACE_MARKER)
                elif "encode" in names and spaced and not cuts and adds_flags:
                    yield Pointer(call.lineno, *_SPACE_TWICE)
            for node in inner:
                if isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Call | ast.Compare):
                    body = node.body if isinstance(node, ast.If) else [node]
                    values = [getattr(part, "body" if part is node else "value", None) for part in body]
                    if _BYTE_TOKEN.search(ast.unparse(node.test)) and any(map(_is_not_one, values)):
                        yield Pointer(node.lineno, *_LONG_BYTE)


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return 0.0


def _mixes_bits(node: ast.expr) -> bool:
    """Return whether an expression is a hash: an exclusive or, a product with a large constant, or hash()."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp):
            factors = [getattr(side, "value", None) for side in (part.left, part.right)]
            large = isinstance(part.op, ast.Mult) and any(type(factor) is int and factor > 999 for factor in factors)
            if large or isinstance(part.op, ast.BitXor):
                return True
        elif isinstance(part, ast.Call) and getattr(part.func, "id", getattr(part.func, "attr", "")) in _HASHES:
            return True
    return False


def _is_product_with_itself(node: ast.AST) -> bool:
    """Return whether an expression is `x.T @ x`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
        return False
    left = node.left.func if isinstance(node.left, ast.Call) else node.left
    if not isinstance(left, ast.Attribute) or left.attr not in ("T", "mT", "t", "transpose"):
        return False
    return ast.dump(left.value) == ast.dump(node.right)


def _is_mixture(node: ast.BinOp) -> bool:
    """Return whether a sum is a · x + (1 - a) · y, for variables or constants."""
    sides = [side for side in (node.left, node.right) if isinstance(side, ast.BinOp)]
    if not isinstance(node.op, ast.Add) or len(sides) < 2:
        return False
    factors = [part for side in sides if isinstance(side.op, ast.Mult | ast.Div) for part in (side.left, side.right)]
    rest = [part for part in factors if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]
    numbers = [_number(part.value) for part in factors if isinstance(part, ast.Constant)]
    return any(_number(getattr(part.left, "value", None)) == 1 for part in rest) or any(
        abs(one + other - 1) < 1e-9 for one in numbers for other in numbers
    )


def _adds_flags(node: ast.AST) -> bool:
    """Return whether a line adds `flag & ~other` to lengths, as the rule for leading spaces does."""
    value = node.value if isinstance(node, ast.AugAssign) else node.right if isinstance(node, ast.BinOp) else None
    flags = (part for part in ast.walk(value) if isinstance(part, ast.BinOp)) if value is not None else ()
    return isinstance(getattr(node, "op", None), ast.Add) and any(isinstance(part.op, ast.BitAnd) for part in flags)


def _strips_marker(call: ast.Call) -> bool:
    method = isinstance(call.func, ast.Attribute) and call.func.attr in ("lstrip", "strip", "removeprefix", "replace")
    return method and any(isinstance(part, ast.Name) or getattr(part, "value", "") == "▁" for part in call.args)


def _is_not_one(value: ast.AST | None) -> bool:
    """Return whether a count is a constant above 1, or the length of anything but converted bytes."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "len":
        names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(value)}
        return not names & {"bytes", "bytearray", "fromhex", "unhexlify", "a2b_hex", "b16decode"}
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value > 1
