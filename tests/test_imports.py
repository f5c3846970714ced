"""Laws of the package layout: which package imports which, no cycles, no private names, and light entry points.

Imports inside functions count everywhere. Imports under `if TYPE_CHECKING:` serve annotations only, so they count for
the order of the packages but not as cycles between modules.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import birdie
from birdie.cli import commands
from birdie.system.door import offers

PACKAGE = Path(__file__).resolve().parents[1] / "birdie"

# A package imports only from rows above its own. Packages on one row do not import each other.
ROWS: list[set[str]] = [
    {"errors"},
    {"system"},
    {"entropy"},
    {"compress"},
    {"delta"},
    {"checkpoints"},
    {"artifact"},
    {"chain", "hub", "onnx", "small", "standalone"},
    {"gpt"},
    {"lab", "web"},
    {"golf"},
    {"cli"},
    {"schemes"},  # public names of compress
    {"__init__", "__main__"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def module_name(path: Path) -> str:
    """Return the dotted name of a module of birdie; a package is named without `__init__`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """Return the first name below `birdie`: the package that the table of rows lists."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def syntax_tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def nodes(tree: ast.AST, *, type_checking: bool) -> Iterator[ast.AST]:
    """Yield all statements of a syntax tree, those below `if TYPE_CHECKING:` only on request."""
    queue = [tree]
    while queue:
        node = queue.pop()
        yield node
        if not type_checking and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        queue += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


@cache
def imported_names(module: str, *, type_checking: bool = True) -> set[tuple[str, str]]:
    """Return (module, name) of each import from birdie; the name is "" where a module itself is imported."""
    names = set()
    for node in nodes(syntax_tree(module), type_checking=type_checking):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import; write the full name of the module"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add((full, "") if full in MODULES else (str(node.module), alias.name))
        elif isinstance(node, ast.Import):
            names |= {(alias.name, "") for alias in node.names}
    return {(source, name) for source, name in names if source.split(".")[0] == "birdie"}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle in a graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_rows_list_every_package() -> None:
    assert {package_of(module) for module in MODULES} == set(ROW_OF)


def test_packages_import_only_from_rows_above() -> None:
    pairs = {(module, source) for module in MODULES for source, _ in imported_names(module)}
    between = {(module, source) for module, source in pairs if package_of(module) != package_of(source)}
    wrong = [pair for pair in between if ROW_OF[package_of(pair[1])] >= ROW_OF[package_of(pair[0])]]
    assert not wrong, f"(module, import that is not from a row above): {sorted(wrong)}"


def test_packages_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        others = {package_of(source) for source, _ in imported_names(module)}
        graph.setdefault(package_of(module), set()).update(others - {package_of(module)})
    assert cycle(graph) == []


def test_modules_have_no_import_cycle() -> None:
    graph = {
        module: {source for source, _ in imported_names(module, type_checking=False)} - {module} for module in MODULES
    }
    assert cycle(graph) == []


CODEC = {"entropy", "compress", "delta", "checkpoints", "artifact", "chain", "hub", "onnx", "small", "standalone"}
TRAINER = {"gpt", "golf", "lab", "web", "cli"}


def test_the_trainer_enters_the_codec_by_its_doors() -> None:
    """Packages above the codec import from it what its packages offer in `__init__`, as anybody would."""
    pairs = {(module, source) for module in MODULES for source, _ in imported_names(module)}
    past = {
        (module, source)
        for module, source in pairs
        if package_of(module) in TRAINER and package_of(source) in CODEC and source.count(".") > 1
    }
    assert not past, f"(module, import past a door): {sorted(past)}"


@pytest.mark.parametrize("package", ["birdie", *(f"birdie.{name}" for name in sorted(CODEC))])
def test_a_door_offers_what_it_says(package: str) -> None:
    """A module of the same name would hide what a package offers."""
    names = offers(package)
    assert not {f"{package}.{name}" for name in names if names[name][0] != package} & MODULES.keys()
    for name in names:
        assert getattr(import_module(package), name) is not None


def test_what_is_replaced_behind_a_door_is_replaced_in_front_of_it_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("birdie.hub.transfer.download", None)
        assert import_module("birdie.hub").download is None
    assert import_module("birdie.hub").download is not None


TRAINING_CORE = {"average", "banks", "loop", "micro_batches", "muon", "optimizers", "parallel_muon", "plan", "settings"}


def test_the_training_loop_reaches_its_core_alone() -> None:
    """A script that trains is packed from the modules that the loop imports, inside functions as well."""
    reached, queue = {"birdie.gpt.train.loop"}, ["birdie.gpt.train.loop"]
    while queue:
        sources = {source for source, _ in imported_names(queue.pop(), type_checking=False)} & MODULES.keys()
        queue += sources - reached
        reached |= sources
    assert {
        name.removeprefix("birdie.gpt.train.") for name in reached if name.startswith("birdie.gpt.train.")
    } <= TRAINING_CORE
    assert {package_of(name) for name in reached} == {"gpt", "system", "errors"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_modules_import_no_private_name() -> None:
    names = {(module, source, name) for module in MODULES for source, name in imported_names(module)}
    wrong = [triple for triple in names if any(map(is_private, (*triple[1].split("."), triple[2])))]
    assert not wrong, f"(module, source, private name): {sorted(wrong)}; make it public, or move what needs it"


def private_reads(module: str) -> list[str]:
    """Return the expressions `other._name` in a module, where `other` is an imported module of birdie."""
    tree = syntax_tree(module)
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}" in MODULES
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        if is_private(node.attr)
    ]


def test_modules_read_no_private_name_of_an_imported_module() -> None:
    wrong = {module: reads for module in MODULES if (reads := private_reads(module))}
    assert not wrong, f"module: private names of other modules: {wrong}"


def test_modules_are_named_after_their_content() -> None:
    assert not [name for name in MODULES if name.split(".")[-1] in {"utils", "util", "common", "helpers", "misc"}]


HEAVY = {"torch", "numba", "numpy"}
"""Packages that take seconds to import, or a tenth of one."""
UNRELATED = {
    *("torch._dynamo", "torch._inductor", "transformers", "huggingface_hub", "onnx", "onnxruntime", "matplotlib"),
    *("birdie.gpt.model", "birdie.gpt.train", "birdie.hub.made_up", "birdie.onnx.onnx_calibration"),
}
"""Modules that the compression of a file of weights has no use for."""
USAGE_ERRORS = (
    ["trian"],
    ["train", "--folders", "runs/first"],
    ["train", "--model.num-layer", "3"],
    ["train", "--model.num-layers", "many"],
    ["train", "--train.seed", "-1"],
    ["train", "no such recipe"],
    ["evaluate", "model.birdie", "--modes", "windows"],
    ["evaluate", "model.birdie", "--streaming.chunk", "many"],
    ["submit", "--seeds", "1,2"],
)
CALLS = [
    *("called(0, '--help')", "called(0)"),
    *(f"called(0, {name!r}, '--help')" for name in sorted(commands())),
    *(f"called(1, *{tokens})" for tokens in USAGE_ERRORS),
]
PROGRAM = """
import contextlib, io, sys
file = {file!r}
def called(code, *tokens):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        from birdie.cli.console import run
        assert run(birdie.cli.build_app, list(tokens)) == code, tokens
    assert (code, tokens[1:]) != (0, ("--help",)) or "--json" in out.getvalue(), tokens
def report(statement):
    print(statement, sorted({absent} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("statements", "absent"),
    [
        (["import birdie", "birdie.ArtifactError", "import birdie.cli", *CALLS], HEAVY),
        (["import birdie.cli", "called(0, 'inspect', file + '.birdie')"], {"torch", "numba"}),
        (["import birdie.cli", "called(0, 'compress', file, '--bits', '8', '-o', file + '.new')"], UNRELATED),
    ],
    ids=["command line", "inspect", "compress"],
)
def test_entry_points_import_nothing_heavy(statements: list[str], absent: set[str], tmp_path: Path) -> None:
    """The help of every command, and errors of usage; commands on a small file."""
    file = str(tmp_path / "small.safetensors")
    save_file({"weight": torch.eye(32)}, file)
    birdie.save({"weight": torch.eye(32)}, f"{file}.birdie")
    lines = [f"{statement}\nreport({statement!r})" for statement in statements]
    program = "\n".join((PROGRAM.format(absent=absent, file=file), *lines))
    process = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "".join(f"{statement} []\n" for statement in statements)


def test_no_two_classes_have_one_name() -> None:
    where: dict[str, list[str]] = {}
    for module in MODULES:
        for node in nodes(syntax_tree(module), type_checking=True):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}
