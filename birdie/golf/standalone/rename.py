"""Short names for all a module defines: top-level names, locals, and attributes that only its own classes have."""

import ast
import builtins
import concurrent.futures
import io
import keyword
import os
import pathlib
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import count, product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TypeGuard, TypeVar

import numpy as np
import torch

# Objects of other people's classes that a decoder meets; an attribute any of them has is never renamed.
_FOREIGN = (
    *(each for each in vars(builtins).values() if isinstance(each, type)),
    *(np.ndarray, np.dtype, np.generic, np.iinfo, np.finfo, np, torch, torch.Tensor, torch.dtype, torch.finfo),
    *(io.BufferedReader, io.FileIO, os.stat_result, os, pathlib.Path, concurrent.futures.ThreadPoolExecutor),
    *(concurrent.futures.Future, zlib, zlib.decompressobj(), torch.Size, torch.device),
)

_IMPORTS = ast.Import | ast.ImportFrom
_E = TypeVar("_E", bound=ast.expr)


def rename(tree: ast.Module, exports: Collection[str]) -> ast.Module:
    """`tree`, changed: exports, builtins and what others define keep their names. Capitals begin top-level names."""
    kept = _keywords(tree)
    top = _top_names(tree, exports)
    attributes = _attribute_names(tree, kept)
    _Renamer(top, attributes, kept).visit(tree)
    return ast.fix_missing_locations(tree)


def _keywords(tree: ast.Module) -> set[str]:
    """Names of arguments in calls that may be to a function or class of `tree`: these stay as they are."""
    imported = {each.asname or each.name for node in tree.body if isinstance(node, _IMPORTS) for each in node.names}
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and _is_name(node.target)}
    kept: set[str] = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute):
            ours = call.func.attr in own
        else:
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            ours = name not in imported or name == "dataclasses__replace"
            ours = ours and not hasattr(builtins, name)
        kept |= {each.arg for each in call.keywords if each.arg and ours}
    return kept


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _short(letters: str) -> Iterator[str]:
    """A, B, …, Aa, Ab, …: never a keyword or a builtin."""
    for length in count():
        for first, *rest in product(letters, *[ascii_lowercase + digits + ascii_uppercase] * length):
            name = "".join((first, *rest))
            if not keyword.iskeyword(name) and not hasattr(builtins, name):
                yield name


def _top_names(tree: ast.Module, exports: Collection[str]) -> dict[str, str]:
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [each.asname or each.name for each in node.names]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names += [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
    ordered = sorted(dict.fromkeys(name for name in names if name not in exports), key=lambda name: -used[name])
    return dict(zip(ordered, _short(ascii_uppercase), strict=False))


def _attribute_names(tree: ast.Module, kept: set[str]) -> dict[str, str]:
    """Attributes that classes of `tree` define and nothing else can have."""
    foreign = {name for each in _FOREIGN for name in dir(each)} | kept
    own: set[str] = set()
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for part in owner.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                own.add(part.target.id)
            elif isinstance(part, ast.FunctionDef):
                own.add(part.name)
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    used = Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    mine = sorted((n for n in own - foreign if not n.startswith("__")), key=lambda name: (-used[name], name))
    return dict(zip(mine, _short(ascii_lowercase), strict=False))


class _Renamer(ast.NodeTransformer):
    def __init__(self, top: dict[str, str], attributes: dict[str, str], kept: set[str]) -> None:
        self.top, self.attributes, self.kept = top, attributes, kept
        self.local: dict[str, str] | None = None

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        node.names = [ast.alias(each.name, self.top.get(each.asname or each.name)) for each in node.names]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        node.names = [ast.alias(each.name, self.top.get(each.asname or each.name)) for each in node.names]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        node.id = (self.local or {}).get(node.id) or self.top.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.attr = self.attributes.get(node.attr, node.attr)
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:  # a field
        if isinstance(node.target, ast.Name):
            node.target.id = self.attributes.get(node.target.id, node.target.id)
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.name = self.top.get(node.name, node.name)
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                part.name = self.attributes.get(part.name, part.name)
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.bases = [self.visit(each) for each in node.bases]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        outer = self.local is None
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        if outer:
            node.args.defaults = [self.visit(each) for each in node.args.defaults]
            self.local = self._locals(node)
            node.name = self.top.get(node.name, node.name)
        else:
            node.name = (self.local or {}).get(node.name, node.name)
            node.args.defaults = [self.visit(each) for each in node.args.defaults]
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                arg.arg = (self.local or {}).get(arg.arg, arg.arg)
        node.body = [self.visit(each) for each in node.body]
        if outer:
            self.local = None
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return self._expression(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.ListComp:
        return self._expression(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.SetComp:
        return self._expression(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.DictComp:
        return self._expression(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.GeneratorExp:
        return self._expression(node)

    def _expression(self, node: _E) -> _E:
        outer = self.local is None
        if outer:
            self.local = self._locals(node)
        for arg in ast.walk(node):
            if isinstance(arg, ast.arg):
                arg.arg = (self.local or {}).get(arg.arg, arg.arg)
        self.generic_visit(node)
        if outer:
            self.local = None
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        if node.name:
            node.name = (self.local or {}).get(node.name, node.name)
        self.generic_visit(node)
        return node

    def _locals(self, scope: ast.AST) -> dict[str, str]:
        """A short name for each name bound anywhere in `scope`, in the order in which they appear."""
        names: list[str] = []
        fixed: set[str] = set()
        for node in _in_order(scope):
            if isinstance(node, ast.arg):
                names.append(node.arg)
                fixed |= {node.arg} & self.kept
            elif isinstance(node, ast.FunctionDef) and node is not scope:
                names.append(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.append(node.name)
        wanted = [name for name in dict.fromkeys(names) if name not in fixed and name not in self.top]
        free = (name for name in _short(ascii_lowercase) if name not in fixed)
        return dict(zip(wanted, free, strict=False))


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
