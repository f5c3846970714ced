#!/usr/bin/env python3
"""Find prose that a stranger would have to translate: `python scripts/words.py [PATH …]`, the whole project by default.

Three habits are refused. A docstring begins with a verb or names its subject, never with "What", "Whether" or "Of".
Names are nouns of the field, not participles such as `found` or `told`. Words that once meant five things ("place") or
were private to this project ("foretell") stay out of prose, names and messages. Exit code 1 where anything is found.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("birdie", "benchmarks", "docs", "examples", "scripts", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
OPENINGS = {"What", "Whether", "Of", "That", "Those", "So", "How", "Where", "Which", "Who", "The way"}
NAMES = {"found", "told", "said", "asked", "given", "made", "here", "there", "whole", "each", "own", "before", "tells"}
WORDS = re.compile(
    r"\b(places?|come by legally|foretells?|foretold|minds|at work|whose fault|bearer|cookbook|steadiness|"
    r"windows end to end|looping|surroundings|referee)\b",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"in place|take place|takes place|placeholder|replace|decimal place|enable_looping_at|LOOPING")
MIN_WORDS = 3


def python_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of the docstrings, names and text of a Python file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            first = (doc or "").split("\n", 1)[0].strip()
            line = node.body[0].lineno if node.body else 1
            opening = next((each for each in OPENINGS if re.match(rf"{each}\b", first)), None)
            if opening:
                yield line, f"docstring begins with {opening!r}: begin with a verb, or name the thing"
            elif doc and len(first.split()) < MIN_WORDS:
                yield line, f"docstring {first!r} says too little: say more, or leave it out"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_") in NAMES:
            yield node.lineno, f"variable {node.id!r} is no noun of the field"
        if isinstance(node, ast.arg) and node.arg.strip("_") in NAMES:
            yield node.lineno, f"parameter {node.arg!r} is no noun of the field"
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.strip("_") in NAMES:
            yield node.lineno, f"name {node.name!r} is no noun of the field"
    yield from text_problems(source)


def text_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of the words that this project does not use."""
    for number, line in enumerate(source.split("\n"), 1):
        for word in WORDS.finditer(line):
            around = line[max(0, word.start() - 14) : word.end() + 14]
            if not ALLOWED.search(around):
                yield number, f"word {word[0]!r}: say which (position, index, device, path), or use the field's term"


def files(arguments: list[str]) -> Iterator[Path]:
    """Yield the Python and Markdown files below the paths named, or below all that people read."""
    for name in arguments or FOLDERS:
        path = Path(name) if arguments else ROOT / name
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if each.suffix in (".py", ".md"))
        elif path.is_file():
            yield path


def main() -> int:
    """Print every problem as path:line: text; return 1 if there is one."""
    count = 0
    for path in files(sys.argv[1:]):
        if path.resolve() == Path(__file__).resolve():
            continue
        problems = python_problems(path) if path.suffix == ".py" else text_problems(path.read_text(encoding="utf-8"))
        for line, problem in sorted(set(problems)):
            print(f"{path}:{line}: {problem}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
