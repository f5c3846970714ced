"""Shorter source text by python-minifier, an optional dependency: `pip install 'birdie-compress[submit]'`.

python-minifier must assume that anybody calls a function by the names of its parameters, and keeps them. A bundle is
called through its exports alone, so two changes beforehand let it shorten more.
"""

import ast
from collections.abc import Collection


def minify(source: str, exports: Collection[str]) -> str:
    """Return a module that does what `source` does, with short names for all but `exports` and attributes.

    Raises:
        ImportError: python-minifier is not installed.
    """
    from python_minifier import minify as shorten

    tree = ast.parse(source)
    _avoid_vars(tree)
    _pass_by_position(tree, exports)
    return shorten(
        ast.unparse(tree),
        rename_globals=True,
        preserve_globals=[*exports],
        # Literals that occur twice in a decoder are short; names for them made the packed file longer (by 0.4 %).
        hoist_literals=False,
    )


def minify_module(tree: ast.Module) -> str:
    """Return the source of one of several modules, with short names for what no other module can mention.

    Raises:
        ImportError: python-minifier is not installed.
    """
    from python_minifier import minify as shorten

    _avoid_vars(tree)
    # Short names for the module's own functions made packed scripts longer (by 0.4 %).
    return shorten(ast.unparse(tree), rename_globals=False, hoist_literals=False, remove_annotations=False)


def pass_by_position(modules: Collection[ast.Module]) -> None:
    """Mark parameters as positional-only, up to the first that a call may pass by name; they get short names.

    Such a call is in the same module if the function is private, a lambda or defined in another function, else in any
    of `modules`.
    """
    names = {id(module): _passed_names(module) for module in modules}
    anywhere = set().union(*names.values())
    for module in modules:
        classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        public = {
            id(part)
            for body in (module.body, *(kind.body for kind in classes))
            for part in body
            if isinstance(part, ast.FunctionDef) and (not part.name.startswith("_") or part.name.endswith("__"))
        }
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                kept = anywhere if id(node) in public else names[id(module)]
                while node.args.args and node.args.args[0].arg not in kept:
                    node.args.posonlyargs.append(node.args.args.pop(0))


def _passed_names(module: ast.Module) -> set[str | None]:
    """Return the names by which calls in a module may pass arguments.

    Keys of dictionaries are among them, for dictionaries can be passed with **, and all parameters of a module that
    passes on arguments so. Options of schemes are read from the signatures of the functions that a `Spec` names.
    """
    nodes = list(ast.walk(module))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {keyword.arg for call in calls for keyword in call.keywords}
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    if None in names:  # ** may pass on what torch or a person named: all parameters of the module keep their names
        names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    specs = [call for call in calls if ast.unparse(call.func) == "Spec"]
    makers = {name.id for call in specs for name in ast.walk(call) if isinstance(name, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name in makers:
            names |= {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
    return names


def _avoid_vars(tree: ast.Module) -> None:
    """Replace `vars(x)` with `x.__dict__`: python-minifier renames nothing in a module that calls `vars`."""

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            self.generic_visit(node)
            if isinstance(node.func, ast.Name) and node.func.id == "vars" and len(node.args) == 1:
                return ast.Attribute(node.args[0], "__dict__", ast.Load())
            return node

    Replace().visit(tree)


def _pass_by_position(tree: ast.Module, exports: Collection[str]) -> None:
    """Mark parameters as positional-only, up to the first one that a call in the module passes by name.

    python-minifier renames such parameters, which saves 6 % of the packed file, and drops the mark again. A call with
    `**options` passes on the names of another call's arguments, so these are kept as well.
    """
    by_name = {keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) or (isinstance(node, ast.FunctionDef) and node.name not in exports):
            arguments = node.args
            while arguments.args and arguments.args[0].arg not in by_name:
                arguments.posonlyargs.append(arguments.args.pop(0))
