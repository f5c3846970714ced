"""What calls of names outside the script do, as far as the flow of validation tokens goes."""

import ast
import math
from dataclasses import replace
from typing import Any

from birdie.golf.audit import names
from birdie.golf.audit.choices import Call, Choices
from birdie.golf.audit.places import END, WHOLE, Form, add
from birdie.golf.audit.rules import NORMALISED, SELF_CONTAINED, TRAIN_TIME, VALIDATION
from birdie.golf.audit.values import NOTHING, UNKNOWN, Lesson, Scope, Value, join, known, placed


class Effects(Choices):
    """Calls of what the script does not define.

    Attributes:
        options: of the command line, and their defaults.
    """

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Value] = {}

    def put(self, node: ast.expr, value: Value, scope: Scope) -> None:
        """`value` is now also part of what `node` names."""
        raise NotImplementedError

    def place(self, node: ast.expr, scope: Scope) -> Value:
        """The object that `node` names, made if there is none yet."""
        raise NotImplementedError

    def external(self, call: Call) -> Value:
        """The value of a call of what the script does not define, and its effects."""
        name, node = call.name, call.node
        given = join(call.given)
        self._watch(call, given)
        if name in names.SIZES:
            return self._size(name, join((call.receiver, given)))
        if name in names.FRESH:
            return self.new()
        if name in names.CLOCKS and (call.base in ("time", "") or name == "elapsed_time"):
            return Value(kinds=frozenset(("time",)))
        if name == "backward":
            self.pending = join((self.pending, call.receiver, given))
            return NOTHING
        if name == "grad" and given.val:
            self.pending = given
            return replace(given, refs=frozenset(), lessons=frozenset(), kinds=frozenset(("grad",)), items=None)
        if name == "step":
            for each in call.args:
                self.called(each, [])  # a closure
            self.step(join((call.receiver, given)), node)
            return NOTHING
        if name == "zero_grad":
            self.pending = NOTHING
            return NOTHING
        if name == "add_argument":
            self._option(call)
            return NOTHING
        if name in ("parse_args", "parse_known_args"):
            made = self.new().plus("options")
            return replace(made, items=(made, NOTHING) if name == "parse_known_args" else None)
        if name == "load_state_dict":
            self.restored = self.restored or given.has("stored")
            self.restore(call.receiver.refs, given)
            return NOTHING
        changed = self._changes(call, given)
        if changed is not None:
            return changed
        return self._result(call, given)

    def _option(self, call: Call) -> None:
        """An option of the command line: its default is what it is."""
        flags = [each.const for each in call.args if isinstance(each.const, str)]
        action, said = call.kwargs.get("action", NOTHING).const, call.kwargs.get("dest", NOTHING).const
        dest = said if isinstance(said, str) else next((each for each in flags if each.startswith("--")), "")
        if not dest or call.kwargs.get("required", NOTHING).const is True:
            return
        default = call.kwargs.get("default", Value(const=None))
        if action in ("store_true", "store_false") and "default" not in call.kwargs:
            default = Value(const=action == "store_false")
        self.options[dest.lstrip("-").replace("-", "_")] = default

    def _size(self, name: str, given: Value) -> Value:
        if name == "len" and given.has("gathered"):
            return Value(kinds=frozenset(("gathered",)), val=given.val)
        return Value(form=self.length(given)) if name in ("len", "numel", "nelement", "size") else NOTHING

    def length(self, value: Value) -> Form | None:
        """How many tokens it has; None: who knows."""
        parts = {each.path[-1] if each.path else None for each in value.val}
        if len(parts) != 1 or value.lessons:
            return None
        (part,) = parts
        return END if part is None else add(part.stop, part.start, -1)

    def _watch(self, call: Call, given: Value) -> None:
        """Ends that are known by name: exports, calibration, warm-up, the network, training shards."""
        name, node = call.name, call.node
        models = join((call.receiver, given))
        self.exporting(name, models, node)
        self.calibrating(name, given, node)
        if self.hooked and given.val and call.callee.refs:
            self.tell(VALIDATION, node, "validation tokens pass through the model while hooks gather statistics")
        if given.val and (call.callee.refs or name.startswith("forward")) and self.warming[-1]:
            self.tell(VALIDATION, node, "the warm-up draws from the validation tokens; draw random ones")
        if name in names.HOOKS:
            self.hooked += 1
        elif name == "remove" and self.hooked:
            self.hooked = 0
        network = name in names.NETWORK or (call.base in names.NETWORK_MODULES and name != "gethostname")
        if network or self._shell(call):
            sure = self.evaluating and (call.base != "socket" or name in names.NETWORK)  # a free port is no network
            self.tell(SELF_CONTAINED, node, f"{ast.unparse(node.func)} reaches for the network", sure)
        if names.READS.match(name) and models.has("train") and self.evaluating:
            issue = self.broken(SELF_CONTAINED, node, "training data are read while evaluating")
            if self.judging:
                self.found.add(issue)
            else:
                self.reread.append(issue)

    def exporting(self, name: str, models: Value, node: ast.AST) -> None:
        """A function that writes the artifact, or makes it smaller, is called on `models`."""
        if not names.EXPORTS.match(name) or not models.lessons:
            return
        lesson = min(models.lessons, key=lambda each: (self._adapts(each), each.line))
        line = getattr(node, "lineno", 0)
        why = f"validation tokens are learned from here, and line {line} exports what learned from them"
        issue = replace(self.broken(VALIDATION, node, why, sure=not lesson.dormant), line=lesson.line)
        if self._adapts(lesson) or self.judging:
            self.doubt([issue])
        else:
            self.exported.append(issue)

    def _adapts(self, lesson: Lesson) -> bool:
        """Whether a lesson may be test-time training in order, and what is exported a state of it to go on from."""
        here = dict(self.stack)
        return lesson.judged or lesson.evaluating or any(loop in here for loop, _ in lesson.stack)

    def calibrating(self, name: str, given: Value, node: ast.AST) -> None:
        """A function that calibrates is called."""
        if not names.CALIBRATES.search(name) or names.SCORES.search(name):
            return
        if given.val:
            self.tell(VALIDATION, node, f"{name} is given validation tokens to calibrate with")
        elif self.clock and any(each in name.lower() for each in ("hessian", "calib", "fisher")):
            why = f"{name} calibrates after the train clock was stopped at line {self.clock}"
            why += "; time is kept back for it" if self.reserves else ""
            self.late.append(self.broken(TRAIN_TIME, node, why, not self.reserves))

    def _shell(self, call: Call) -> bool:
        if call.base not in ("subprocess", "os") or call.name not in ("run", "call", "check_call", "system", "Popen"):
            return False
        said = " ".join(str(each.value) for each in ast.walk(call.node) if isinstance(each, ast.Constant))
        words = set(said.replace("/", " ").split())
        fetches = words & {"install", "download", "clone", "fetch", "pull"}
        return bool(words & {"curl", "wget", "scp", "aws", "gsutil"} or (words & {"pip", "git", "apt-get"} and fetches))

    def _changes(self, call: Call, given: Value) -> Value | None:
        """Calls that change what they are called on."""
        name, node = call.name, call.node
        target = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in names.PLACES and (name != "at" or node.args):
            where: ast.expr | None = node.args[0] if name == "at" else target
            keys, rest = (call.args[1:2], call.args[2:]) if name == "at" else (call.args[:2], call.args[2:])
            if where is None:
                return None
            if join(rest).has("loss"):
                self.put(where, join(rest), call.scope)
            elif join(keys).val or join(rest).val:
                self.teach(self.place(where, call.scope).refs, join((*keys, *rest)).val, "table", node)
            return call.receiver
        if target is None:
            return None
        if name in names.GROWS:
            self.put(target, self.settled(given, node).minus("target", "gathered", "picked"), call.scope)
            return NOTHING
        if name == "copy_":
            if given.val and not given.lessons:
                self.put(target, given, call.scope)
            else:
                self.restore(call.receiver.refs, given)
            return call.receiver
        if name.endswith("_") and not name.endswith("__") and name not in names.ALIASES:
            if given.has("loss"):
                self.put(target, given, call.scope)
            elif name not in names.ADDS:
                self.put(target, given.minus("target", "gathered", "picked"), call.scope)
            elif given.val and not call.receiver.val:
                how = "step" if given.has("grad") else "table"
                self.teach(self.place(target, call.scope).refs, given.val, how, node)  # type: ignore[arg-type]
            return call.receiver
        if name in names.LEARNS and given.val and not call.receiver.val and not given.has("loss"):
            self.teach(self.place(target, call.scope).refs | given.refs, given.val, "table", node)
            return NOTHING
        return None

    def _result(self, call: Call, given: Value) -> Value:
        name, node, args = call.name, call.node, call.args
        inner = join((call.receiver, call.callee, given))
        if names.LOSS.search(name) and (len(args) + len(call.kwargs) >= 2 or call.callee.refs):
            target = call.kwargs.get("target", args[1] if len(args) > 1 else given)
            return self.scored(join((args[0] if args else given, call.receiver, given)), target, node)
        if name in names.EXPONENTIALS and inner.has("spread"):
            evidence = "a token's loss is spread over its bytes and mixed there: bytes are not tokens' distribution"
            issue = self.broken(NORMALISED, node, evidence)
            inner = replace(inner, issues=inner.issues | {issue}).minus("spread")
            given = replace(given, issues=given.issues | {issue}).minus("spread")
        if name in names.LOGARITHMS:
            if not (inner.val or inner.lessons or inner.refs):
                return self._number(name, call) if args else NOTHING
            said = self.scored(inner, inner, node) if inner.has("picked") else inner
            return replace(said, kinds=(inner.kinds & {"spread", "normed"}) | {"loss"})
        if name in names.PICKS:
            base = call.receiver if call.receiver.val or call.receiver.lessons else join(args[:1])
            return self.picked(base, given, node)
        found = self.tally(call, given) or self.choice(call, inner) or self.helper(call)
        if found is not None:
            return found
        if name == "where" and len(args) == 3 and args[0].has("gate"):
            kept, changed = ast.unparse(node.args[2]), ast.unparse(node.args[1])
            result = join(args)
            return self.gate(result.minus("gate"), node) if kept in changed and not result.has("normed") else result
        if name in ("get", "getenv") and call.base in ("os", "environ"):
            return replace(NOTHING, const=args[1].const if len(args) > 1 else None)
        if name in ("hash", "crc32", "adler32", "xxh64", "xxh3_64", "murmur", "digest") and given.has("target"):
            return given.minus("target").plus("keyed")
        if name in ("int", "float", "bool", "str") and len(args) == 1 and known(args[0]):
            return self._number(name, call)
        return self._plain(call, inner)

    def picked(self, base: Value, index: Value, node: ast.AST) -> Value:
        """Entries of `base` at `index`: of log-probabilities, the losses of the tokens that `index` is."""
        result = join((base, replace(index, refs=frozenset(), kinds=index.kinds & {"gathered"})))
        if index.val and base.has("loss"):
            return self.scored(result, index, node)
        return result.minus("target").plus("gathered", "picked") if index.has("target") else result

    def settled(self, value: Value, node: ast.AST) -> Value:
        """`value`, which is added up; if it is a loss, and its token was not seen to be picked, it is now."""
        if value.has("loss"):
            self.noted |= value.val
        return self.scored(value, value, node) if value.has("loss") and value.val and value.lessons else value

    def _plain(self, call: Call, inner: Value) -> Value:
        name = call.name
        if names.loads_validation(name):
            return replace(self.new(), val=frozenset((WHOLE,)))
        if call.callee.refs or (call.receiver.refs and name.startswith(("forward", "loss", "score"))):
            data = [each for each in call.given if each.val]
            if len(data) >= 2:
                return self.scored(inner, data[1], call.node)
            if data and self._gives_loss(call.callee):
                return self.scored(inner, data[0], call.node)
            if data:
                return replace(inner, refs=frozenset(), kinds=frozenset(("pred",)))
        if name in names.RESTORES:
            inner = inner.plus("stored")
        if name in names.DRAWS and inner.val:
            part = self.opaque(name)
            inner = placed(inner, lambda region: region.item(part))
        wraps = name[:1].isupper() or name in names.ALIASES or name == "next"
        kinds = (
            inner.kinds
            - {"target", "gathered", "hashed", "keyed", "onehot", "stacked"}
            - (set() if name in names.PATHS else {"text"})
        )
        if name in names.CASTS or name in ("iter", "list", "tuple", "enumerate", "zip"):
            kinds = inner.kinds
        held = join((*call.args[:1], *(v for k, v in call.kwargs.items() if k in names.HOLDS)))
        made = self.new(held) if name[:1].isupper() else self.new()
        refs = (held.refs | call.receiver.refs | made.refs) if wraps else made.refs
        return replace(inner, refs=refs, kinds=kinds, items=None, const=UNKNOWN)

    def _gives_loss(self, model: Value) -> bool:
        """Whether a model of the script returns nothing but its loss."""
        forwards = [
            part
            for ref in model.refs
            if (cls := self.heap[ref].cls) is not None
            for part in cls.body
            if isinstance(part, ast.FunctionDef) and part.name == "forward"
        ]
        said = [each.value for one in forwards for each in ast.walk(one) if isinstance(each, ast.Return)]
        calls = [each for each in said if isinstance(each, ast.Call) and names.LOSS.search(ast.unparse(each.func))]
        return bool(said) and len(calls) == len(said)

    def _number(self, name: str, call: Call) -> Value:
        """A constant of a constant."""
        makers: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "log": math.log}
        try:
            return Value(const=makers[name](call.args[0].const)) if known(call.args[0]) else NOTHING
        except (KeyError, ValueError, TypeError, IndexError, OverflowError):
            return NOTHING
