"""Shorter source text by python-minifier, an optional dependency: `pip install 'birdie[submit]'`.

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


def minify_module(source: str) -> str:
    """Return a module that does what `source` does, with short names for what no other module can mention.

    Raises:
        ImportError: python-minifier is not installed.
    """
    from python_minifier import minify as shorten

    tree = ast.parse(source)
    _avoid_vars(tree)
    _pass_by_position(tree, _public(tree))
    # Short names for the module's own functions made packed scripts longer (by 0.4 %).
    return shorten(ast.unparse(tree), rename_globals=False, hoist_literals=False, remove_annotations=False)


def _public(tree: ast.Module) -> set[str]:
    """Return the names of functions that other modules or packages may call, by names of their parameters too."""
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    functions = [part for scope in scopes for part in scope.body if isinstance(part, ast.FunctionDef)]
    return {part.name for part in functions if not part.name.startswith("_") or part.name.endswith("__")}


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
