#!/usr/bin/env python3
"""Check the wording of code and docs: `python scripts/words.py [PATH …]`, by default of the whole project.

It reports four habits. A docstring begins with a verb or names its subject, never with "What", "Whether" or "Of".
Names are nouns of the field, not participles such as `found` or `told`. Words with several meanings ("place") and words
that only this project uses ("foretell") are replaced by the terms of the field. In a page, no token such as X_Y or TODO
stands for a figure. The exit code is 1 if it reports any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "birdie",
    "benchmarks",
    "docs",
    "examples",
    "scripts",
    "tests",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LOG.md",
)
DIARIES = {"CHANGELOG.md", "LOG.md"}  # their words are those of their day
OPENINGS = {"What", "Whether", "Of", "That", "Those", "So", "How", "Where", "Which", "Who", "The way"}
NAMES = {"found", "told", "said", "asked", "given", "made", "here", "there", "whole", "each", "own", "before", "tells"}
TERMS = {
    r"places?": "position, index, device, path or slot",
    r"come by legally": "rule-compliant",
    r"foretells?|foretold": "predict, prediction",
    r"minds": "sensitivity",
    r"at work": "active",
    r"whose fault|bearer": "the tensor that is at fault",
    r"cookbook": "recipe registry",
    r"steadiness": "pseudo-count",
    r"windows end to end": "non-overlapping windows",
    r"looping": "depth recurrence",
    r"surroundings": "attention context",
    r"referee": "reference evaluator",
}
ANY = re.compile("|".join(TERMS), re.IGNORECASE)  # few lines have one: this looks for all of them at once
WORDS = [(re.compile(rf"\b({pattern})\b", re.IGNORECASE), term) for pattern, term in TERMS.items()]
ALLOWED = re.compile(r"in place|take place|takes place|placeholder|replace|decimal place|enable_looping_at|LOOPING")
TOKEN = re.compile(r"(?<![\w`.])([A-Z]{1,2}_[A-Z]{1,2}|[A-Z]\d|TODO|TBD|FIXME|XXX)(?![\w`])")
NO_TOKENS = {"C1", "C2", "C3", "C4", "T5", "E8"}  # conditions of the challenge, a model, a lattice
MIN_WORDS = 3


def python_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of the docstrings, names and text of a Python file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            first = (doc or "").split("\n", 1)[0].strip()
            if doc and len(first.split()) < MIN_WORDS:
                yield node.body[0].lineno, f"docstring {first!r} is too short; write a sentence, or remove it"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = node.value.value.split("\n", 1)[0].strip()  # of a docstring, also below a constant
            if opening := next((word for word in OPENINGS if re.match(rf"{word}\b", first)), None):
                yield node.lineno, f"docstring begins with {opening!r}; begin with a verb, or name the thing"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_") in NAMES:
            yield node.lineno, f"variable {node.id!r} is not a noun of the field"
        if isinstance(node, ast.arg) and node.arg.strip("_") in NAMES:
            yield node.lineno, f"parameter {node.arg!r} is not a noun of the field"
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.strip("_") in NAMES:
            yield node.lineno, f"name {node.name!r} is not a noun of the field"
    yield from text_problems(source)


def text_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of the words that this project does not use."""
    for number, line in enumerate(source.split("\n"), 1):
        for pattern, term in WORDS if ANY.search(line) else ():
            for word in pattern.finditer(line):
                context = line[max(0, word.start() - 14) : word.end() + 14]
                if not ALLOWED.search(context):
                    yield number, f"word {word[0]!r}; the term of the field is: {term}"


def page_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of a Markdown page."""
    text = path.read_text(encoding="utf-8")
    if path.name not in DIARIES:
        yield from text_problems(text)
    for number, line in enumerate(text.split("\n"), 1):
        for token in TOKEN.finditer(line):
            if token[1] not in NO_TOKENS:
                yield number, f"token {token[1]!r} in place of a figure; write what was measured"


def files(arguments: list[str]) -> Iterator[Path]:
    """Yield the Python and Markdown files below the paths named, or below all that people read."""
    for name in arguments or FOLDERS:
        path = Path(name) if arguments else ROOT / name
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md"))
        elif path.is_file():
            yield path


def main() -> int:
    """Print every problem as path:line: text; return 1 if there is one."""
    count = 0
    for path in files(sys.argv[1:]):
        if path.resolve() == Path(__file__).resolve():
            continue
        problems = python_problems(path) if path.suffix == ".py" else page_problems(path)
        for line, problem in sorted(set(problems)):
            print(f"{path}:{line}: {problem}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
