"""A module of its own made smaller, every pass provably harmless: what cannot be proven stays.

    constants ──► their values      parameters, fields and definitions nobody reads ──► gone      names ──► short ones

Takes what `bundle` makes: every top-level name is bound once, nothing outside uses the module but through its exports,
and an attribute whose name contains "__" belongs to one class and is reached in no other way.
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

_FOLDED: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.LShift: int.__lshift__,
    ast.RShift: int.__rshift__,
}
_IMPORTS = ast.Import | ast.ImportFrom
_LARGEST = 1 << 62  # constants stay within what compiled kernels call an int64
_LOOKED_AT = (ast.Constant, ast.Name, ast.Attribute, ast.JoinedStr, ast.FormattedValue)


def minify(tree: ast.Module, exports: Collection[str]) -> ast.Module:
    """`tree`, smaller in every way but for names, which `rename.rename` shortens. `tree` itself is changed."""
    _plain_dataclasses(tree)
    before = ""
    while before != (now := ast.dump(tree)):
        before = now
        tree = _inline_constants(tree, exports)
        _name_optional(tree)
        _make_positional(tree)
        _drop_parameters(tree)
        _fix_parameters(tree)
        _drop_dead_ends(tree)
        _return_at_once(tree)
        _drop_attributes(tree)
        _shake(tree, exports)
    return tree


def _plain_dataclasses(tree: ast.Module) -> None:
    """Dataclasses without frozen and slots, which keep programmers from mistakes: nothing here asks for their hash."""
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            owner.decorator_list = [each.func if isinstance(each, ast.Call) else each for each in owner.decorator_list]


class _Fold(ast.NodeTransformer):
    """Puts values in the place of constants' names and folds what integers of at most 62 bits make."""

    def __init__(self, values: Mapping[str, ast.Constant]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = self.values.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return ast.copy_location(ast.Constant(known.value), node) if known else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right, fold = _integer(node.left), _integer(node.right), _FOLDED.get(type(node.op))
        if left is None or right is None or fold is None or (isinstance(node.op, ast.LShift) and not 0 <= right < 63):
            return node
        value = fold(left, right)
        short = len(str(value)) <= len(ast.unparse(node)) and 0 <= value <= _LARGEST
        return ast.copy_location(ast.Constant(value), node) if short else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [each.value for each in (node.left, *node.comparators) if isinstance(each, ast.Constant)]
        if len(sides) == 2 == 1 + len(node.ops) and None in sides and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return ast.copy_location(ast.Constant((sides[0] is sides[1]) == isinstance(node.ops[0], ast.Is)), node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        void = isinstance(node.op, ast.And)  # `True and x` is x, and so is `None or x`
        while len(node.values) > 1 and isinstance(first := node.values[0], ast.Constant) and bool(first.value) is void:
            del node.values[0]
        return node.values[0] if len(node.values) == 1 else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.copy_location(ast.Constant(not node.operand.value), node)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return (node.body if node.test.value else node.orelse) or ast.copy_location(ast.Pass(), node)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node


def _integer(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _inline_constants(tree: ast.Module, exports: Collection[str]) -> ast.Module:
    """Numbers that have a name go where the name is used."""
    values: dict[str, ast.Constant] = {}
    body = []
    for node in tree.body:
        node = _Fold(values).visit(node)
        pairs = _pairs(node) if isinstance(node, ast.Assign) else []
        if pairs and not any(name in exports for name, _ in pairs):
            values |= dict(pairs)
        else:
            body.append(node)
    tree.body = body
    return tree


def _pairs(node: ast.Assign) -> list[tuple[str, ast.Constant]]:
    """(name, number) of an assignment of nothing else, else nothing."""
    if len(node.targets) != 1:
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Name):
        number = isinstance(value, ast.Constant) and isinstance(value.value, int | float | None)
        return [(target.id, value)] if number and isinstance(value, ast.Constant) else []
    names = [each.id for each in target.elts if isinstance(each, ast.Name)] if isinstance(target, ast.Tuple) else []
    values: list[ast.expr] = []
    if isinstance(value, ast.Tuple):
        values = value.elts
    elif isinstance(value, ast.Call) and ast.unparse(value) == f"range({len(names)})":
        values = [ast.Constant(index) for index in range(len(names))]
    constants = [each for each in values if isinstance(each, ast.Constant)]
    return list(zip(names, constants, strict=True)) if 0 < len(names) == len(constants) == len(values) else []


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, int]]:
    """Functions that calls can be traced to, each with the number of parameters that calls do not write."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, 0
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                plain = isinstance(part, ast.FunctionDef) and "__" in part.name and not part.name.startswith("__")
                if plain and isinstance(part, ast.FunctionDef):
                    yield part, 1


class _Calls:
    """Every call in a module, by the name that is called."""

    def __init__(self, tree: ast.Module) -> None:
        self.known: dict[str, list[ast.Call]] = {}
        called: set[int] = set()
        self.loose: set[str] = set()  # names used otherwise too, or with **arguments
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := _named(node.func)):
                self.known.setdefault(name, []).append(node)
                called.add(id(node.func))
                if any(keyword.arg is None for keyword in node.keywords):
                    self.loose.add(name)
        self.loose |= {name for node in ast.walk(tree) if id(node) not in called and (name := _named(node))}

    def of(self, name: str, index: int | None = None) -> list[ast.Call] | None:
        """All calls of `name`, or None if they, or their arguments (up to `index` if given), cannot all be known."""
        calls = self.known.get(name, [])
        stop = None if index is None else index + 1
        starred = any(isinstance(arg, ast.Starred) for call in calls for arg in call.args[:stop])
        return None if starred or name in self.loose else calls


def _named(node: ast.AST) -> str | None:
    """The name of a mention of a top-level definition or of a method with a name of its own."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) and "__" in node.attr else None


def _name_optional(tree: ast.Module) -> None:
    """Parameters that must be given by name may be given by place too, where their order allows it."""
    for function, _ in _functions(tree):
        args = function.args
        legal = None not in args.kw_defaults or not args.defaults
        if args.kwonlyargs and legal and not args.vararg and None not in args.kw_defaults[1:]:
            args.args += args.kwonlyargs
            args.defaults += [each for each in args.kw_defaults if each is not None]
            args.kwonlyargs, args.kw_defaults = [], []


def _drop_dead_ends(tree: ast.Module) -> None:
    """What follows a return or raise, and `pass` beside other statements."""
    for body in _bodies(tree):
        ends = [index for index, node in enumerate(body) if isinstance(node, ast.Return | ast.Raise)]
        del body[ends[0] + 1 if ends else len(body) :]
        body[:] = [node for node in body if not isinstance(node, ast.Pass)] or body[:1]
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and all(isinstance(each, ast.Pass) for each in node.orelse):
            node.orelse = []


def _make_positional(tree: ast.Module) -> None:
    """Arguments of our own functions by place instead of by name, where that is the next place."""
    orders = {function.name: [arg.arg for arg in function.args.args[hidden:]] for function, hidden in _functions(tree)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.decorator_list:
            orders[owner.name] = [_field(part) for part in owner.body if isinstance(part, ast.AnnAssign)]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or any(isinstance(arg, ast.Starred) for arg in call.args):
            continue
        order = orders.get(_named(call.func) or "", [])
        while call.keywords and order[len(call.args) :][:1] == [call.keywords[0].arg]:
            call.args.append(call.keywords.pop(0).value)


def _drop_parameters(tree: ast.Module) -> None:
    """Parameters that a function does not read, where all its calls are known."""
    all_calls = _Calls(tree)
    for function, hidden in _functions(tree):
        args = function.args
        if args.vararg or args.kwarg or args.kwonlyargs or args.posonlyargs:
            continue
        read = {each.id for part in function.body for each in ast.walk(part) if isinstance(each, ast.Name)}
        for index in reversed(range(hidden, len(args.args))):
            name = args.args[index].arg
            calls = None if name in read else all_calls.of(function.name, index - hidden)
            if calls is None or not all(_drop_argument(call, index - hidden, name, try_only=True) for call in calls):
                continue
            for call in calls:
                _drop_argument(call, index - hidden, name)
            _drop_parameter(args, index)


def _fix_parameters(tree: ast.Module) -> None:
    """Parameters that are the same constant in every call become that constant."""
    all_calls = _Calls(tree)
    for function, hidden in _functions(tree):
        args = function.args
        if args.vararg or args.kwarg or args.kwonlyargs or args.posonlyargs:
            continue
        bound = Counter(n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        bound += Counter(node.arg for node in ast.walk(function) if isinstance(node, ast.arg))
        for index in reversed(range(hidden, len(args.args))):
            name, default = args.args[index].arg, index - len(args.args) + len(args.defaults)
            if not (calls := all_calls.of(function.name, index - hidden)):
                continue
            given = [_argument(call, index - hidden, name) for call in calls]
            values = [each or (args.defaults[default] if default >= 0 else None) for each in given]
            constants = [each for each in values if isinstance(each, ast.Constant)]
            same = len(constants) == len(values) and len({repr(each.value) for each in constants}) == 1
            if same and bound[name] == 1 and not isinstance(constants[0].value, str):
                fold = _Fold({name: constants[0]})
                fold.generic_visit(function)
                for call in calls:
                    _drop_argument(call, index - hidden, name)
                _drop_parameter(args, index)


def _argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    if index < len(call.args):
        return call.args[index]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _return_at_once(tree: ast.Module) -> None:
    """`x = …; return x` is `return …`."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        uses = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name))
        for body in _bodies(function):
            last = body[-1] if len(body) > 1 else None
            value = last.value if isinstance(last, ast.Return) else None
            before = body[-2] if len(body) > 1 else None
            if not isinstance(before, ast.Assign) or not isinstance(value, ast.Name) or uses[value.id] != 2:
                continue
            if [ast.unparse(target) for target in before.targets] == [value.id]:
                body[-2:] = [ast.Return(before.value)]


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for each in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(inner := getattr(each, name, None), list):
                yield inner


def _drop_parameter(args: ast.arguments, index: int) -> None:
    default = index - (len(args.args) - len(args.defaults))
    if default >= 0:
        del args.defaults[default]
    del args.args[index]


def _drop_argument(call: ast.Call, index: int, name: str, try_only: bool = False) -> bool:
    """Remove the argument at `index` or called `name`; False if leaving it out would leave out something it does."""
    given = [keyword for keyword in call.keywords if keyword.arg == name]
    values = [call.args[index]] if index < len(call.args) else [keyword.value for keyword in given]
    if try_only:
        return all(_idle(value) for value in values)
    if index < len(call.args):
        del call.args[index]
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
    return True


def _idle(node: ast.expr) -> bool:
    """Whether to compute `node` does nothing but look: names, attributes, texts made of whatever."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id in ("str", "len", "int", "repr")
        return plain and not node.keywords and all(_idle(each) for each in node.args)
    if isinstance(node, ast.BinOp):
        return _idle(node.left) and _idle(node.right)
    if isinstance(node, ast.IfExp):
        return _idle(node.test) and _idle(node.body) and _idle(node.orelse)
    if isinstance(node, ast.Attribute):
        return _idle(node.value)
    return isinstance(node, _LOOKED_AT)


def _drop_attributes(tree: ast.Module) -> None:
    """Fields of classes and attributes of `self` that nobody reads."""
    imported = {each.asname or each.name for node in tree.body if isinstance(node, _IMPORTS) for each in node.names}
    loads = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)]
    read = {each.attr for each in loads if not (isinstance(each.value, ast.Name) and each.value.id in imported)}
    read |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    all_calls = _Calls(tree)
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        fields = [part for part in owner.body if isinstance(part, ast.AnnAssign)]
        for index in reversed(range(len(fields))):
            name = _field(fields[index])
            calls = None if name in read else all_calls.of(owner.name)
            if calls is not None and all(_drop_argument(call, index, name, try_only=True) for call in calls):
                for call in calls:
                    _drop_argument(call, index, name)
                owner.body.remove(fields[index])
        owner.body = owner.body or [ast.Pass()]
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef) and node.args.args:
                node.body = _without_stores(node.body, node.args.args[0].arg, read) or [ast.Pass()]


def _field(node: ast.AnnAssign) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


def _without_stores(body: list[ast.stmt], receiver: str, read: set[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in body:
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(node, name, None):
                left = _without_stores(inner, receiver, read)
                setattr(node, name, left or ([ast.Pass()] if name == "body" else []))
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        ours = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == receiver
        dead = ours and isinstance(target, ast.Attribute) and target.attr not in read
        if not (dead and isinstance(node, ast.Assign) and _idle(node.value)):
            kept.append(node)
    return kept


def _shake(tree: ast.Module, exports: Collection[str]) -> None:
    """Top-level definitions and imports that nothing needs any more."""
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, _IMPORTS):
            node.names = [each for each in node.names if used[each.asname or each.name]]
            if not node.names:
                continue
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = sum(isinstance(each, ast.Name) and each.id == node.name for each in ast.walk(node))
            if used[node.name] == inside and node.name not in exports:
                continue
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if not any(used[name] or name in exports for name in names):
                continue
        body.append(node)
    tree.body = body
