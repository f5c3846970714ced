#!/usr/bin/env python3
"""Write the tables that the code knows into the documentation: `python scripts/docs.py`.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. tests/test_docs.py
compares every table with the code, so a change of a setting, a command or a limit asks for a run of this script.
"""

import ast
import dataclasses
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

from cyclopts import Parameter

from birdie.artifact import codes, container, file
from birdie.artifact.options import LoadOptions, SaveOptions
from birdie.checkpoints import pytree
from birdie.checkpoints.limits import MAX_DIMS, MAX_ENTRIES, MAX_NAME_BYTES, MAX_NAMES_BYTES
from birdie.cli import GROUPS, commands
from birdie.cli.compress_flags import flag_of
from birdie.compress import registry
from birdie.gpt.run import environment
from birdie.gpt.run.presets import PRESETS
from birdie.gpt.run.recipe_registry import shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_estimate import parameters
from birdie.gpt.score.settings import ALWAYS_READ, MODES, shared_names
from birdie.system.keywords import help_of, options_of

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; a column whose name ends in `:` is aligned to the right."""
    names = columns.split(" | ")
    rule = "|".join("--:" if name.endswith(":") else "---" for name in names)
    lines = [f"| {' | '.join(name.rstrip(':') for name in names)} |", f"|{rule}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def quoted(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def command_table() -> str:
    """Return the commands, in the order of `birdie --help`."""
    every = commands()
    groups = [*GROUPS, *sorted({command.group for command in every.values()} - set(GROUPS))]
    return table(
        "command | what it does",
        (
            (f"`birdie {name}`", command.help)
            for group in groups
            for name, command in every.items()
            if command.group == group
        ),
    )


def recipe_settings(kind: Any = Recipe, path: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (table, field, parameter) of each setting of a recipe; the parameter has its variables and its help."""
    hints = get_type_hints(kind, include_extras=True)
    for setting in dataclasses.fields(kind):
        hint = hints[setting.name]
        if not dataclasses.is_dataclass(hint):
            yield from ((path, setting, parameter) for parameter in getattr(hint, "__metadata__", ()))
    for setting in dataclasses.fields(kind):
        hint = hints[setting.name]
        if dataclasses.is_dataclass(hint):
            yield from recipe_settings(hint, f"{path}.{setting.name}".strip("."))


def setting_list() -> str:
    """Return the settings of each table of a recipe, with defaults and variables."""
    tables: dict[str, list[str]] = {}
    for path, setting, parameter in recipe_settings():
        variables = tuple(parameter.env_var or ())
        names = "" if variables == (setting.name.upper(),) else f" ({quoted(variables)})" if variables else ""
        tables.setdefault(path, []).append(f"`{setting.name}`{'' if variables else '°'} {spelled(setting)}{names}")
    lines = (
        f"- **`[{path}]`** {', '.join(one)}" if path else f"- outside of tables: {', '.join(one)}"
        for path, one in sorted(tables.items(), key=lambda item: not item[0])
    )
    return "\n".join(wrapped(line, "  ") for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    """Return text in lines of at most 100 characters; code with spaces stays in one line."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def spelled(setting: "dataclasses.Field[Any]") -> str:
    """Return the default of a setting as a recipe file spells it; a dash for none."""
    value = setting.default if setting.default is not dataclasses.MISSING else None
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == ():
        return "–"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def choice_table() -> str:
    """Return the variables that do not set exactly one setting; those of one table, one setting each, share a row."""
    choices: dict[str, list[str]] = {}
    for name, (setting, word) in environment.CHOICES.items():
        choices.setdefault(f'`model.{setting} = "{word}"`', []).append(f"{name}=1")
    rows = [(quoted(names), setting) for setting, names in choices.items()]

    def kind(rule: environment.VariableRule) -> object:
        is_one = len(rule.variables) == len(rule.settings) == 1
        return rule.settings[0].rpartition(".")[0] if is_one else rule

    for _, group in itertools.groupby(environment.RULES, kind):
        rules = list(group)
        first, *others = [setting for rule in rules for setting in rule.settings]
        names = [first, *(name.rpartition(".")[2] for name in others)] if len(rules) > 1 else [first, *others]
        rows.append((quoted(name for rule in rules for name in rule.variables), quoted(names)))
    return table("variable | setting", rows)


def dead_table() -> str:
    """Return the variables of the records that have no effect, with the reasons."""
    return table("variable | reason", [(quoted(row.names), row.reason) for row in environment.DEAD])


def recipe_table() -> str:
    """Return the recipes that ship, with the figures that their authors recorded."""
    return table(
        "recipe | what it is | parameters: | bytes: | ms a step: | bits per byte:",
        (
            (
                f"`{recipe.name}`",
                recipe.about.title.replace("|", "/"),
                f"{recipe.about.parameters or parameters(recipe.recipe()):,}",
                "" if recipe.about.bytes is None else f"{recipe.about.bytes:,}",
                "" if recipe.about.step_ms is None else f"{recipe.about.step_ms:g}",
                "" if recipe.about.bpb is None else f"{recipe.about.bpb:.4f}",
            )
            for recipe in shipped_recipes()
        ),
    )


def preset_table() -> str:
    """Return what each preset does to a recipe."""
    presets = PRESETS.values()
    rows: dict[str, list[object]] = {
        "width; rows and widths of tables": [Fraction(preset.width).limit_denominator(99) for preset in presets],
        "layers": [Fraction(preset.depth).limit_denominator(99) for preset in presets],
        "tokens of a step, at most": [f"{preset.batch_tokens:,}" for preset in presets],
        "tokens of a sequence, at most": [preset.seq_len for preset in presets],
        "seconds of training, at most": [f"{preset.seconds:g}" for preset in presets],
        "steps, at most": [preset.iterations or "–" for preset in presets],
        "learning rates": [Fraction(preset.rates).limit_denominator(99) for preset in presets],
    }
    columns = " | ".join(["factor or limit", *(f"`{name}`:" for name in PRESETS)])
    return table(columns, ((name, *values) for name, values in rows.items()))


def mode_table() -> str:
    """Return the scoring modes, and what each combines with."""
    shared = [name for name in shared_names() if name not in ALWAYS_READ]
    return table(
        "mode | what it does | reads | n-gram bias | package",
        (
            (
                f"`{mode.name}`",
                mode.summary(),
                quoted(name for name in shared if name in mode.shared),
                "yes" if mode.ngram_bias else "no",
                "yes" if mode.packaged else "no",
            )
            for mode in MODES.values()
        ),
    )


def format_limits() -> str:
    """Return the limits of the header, which readers check before they allocate."""
    limits = {
        "bytes of the header": container.MAX_HEADER_BYTES,
        "entries": MAX_ENTRIES,
        "bytes of a name": MAX_NAME_BYTES,
        "bytes of all names": MAX_NAMES_BYTES,
        "dimensions of an entry": MAX_DIMS,
        "product of its sizes that are not 0": container.MAX_ELEMENTS,
        "parameters of an entry": container.MAX_PARAMS,
        "streams of an entry": container.MAX_STREAMS,
        "dimensions, parameters and streams of all entries": container.MAX_FIELDS,
        "nodes of a tree (metadata)": pytree.MAX_VALUES,
        "depth of a tree": pytree.MAX_DEPTH,
    }
    return table("limit | at most:", ((name, f"{value:,}") for name, value in limits.items()))


def decoding_limits() -> str:
    """Return the limits of decoding, and the arguments that raise them."""
    more = "`max_bytes`, `birdie decompress --max-size`"
    peak = f"{file.PEAK_PER_DECODED:g} × the decoded bytes + {file.PEAK_ROOM >> 20} MiB"
    operations = f"{file.OPERATIONS_PER_DECODED} for each decoded byte that is allowed (at least 2³¹)"
    return table(
        "limit | default | raised by",
        [
            (
                "decoded bytes",
                f"{file.MIN_DECODED_LIMIT >> 30} GiB, {file.DECODED_PER_BYTE} × the file, or {file.BASES} × its base",
                more,
            ),
            ("peak memory", f"{peak} + {file.PEAK_PER_BYTE:,} bytes for each byte of payload", "the same"),
            (
                "operations, of about a nanosecond",
                f"{operations} + {file.OPERATIONS_PER_BYTE:,} for each byte of payload + "
                f"{file.OPERATIONS_PER_BASE_BYTE:,} for each of a base",
                "`max_operations`, `birdie decompress --max-operations`",
            ),
        ],
    )


def dtype_list() -> str:
    """Return the codes of dtypes in files."""
    return ", ".join(f"{code} {name}" for code, name in enumerate(codes.DTYPES))


def scheme_numbers() -> str:
    """Return the codes of schemes in files, and which schemes may be inside others."""
    decoders = [scheme.decoder for scheme in registry.builtin()]

    def named(kinds: tuple[str, ...]) -> str:
        return ", ".join(f"{decoder.number} {decoder.name}" for decoder in decoders if decoder.inner in kinds)

    return (
        f"Codes: {named(('no', 'tensor', 'rows'))}. May be inside others: {named(('tensor', 'rows'))}; "
        f"by rows: {named(('rows',))}."
    )


def scheme_classes() -> str:
    """Return the classes of birdie's schemes, for the pages of the API."""
    return "\n".join(f"::: {scheme.__module__}.{scheme.__name__}" for scheme in registry.builtin())


def benchmark_table() -> str:
    """Return the benchmarks that are commands, with what they measure, from the first sentence of their docstrings."""
    rows = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        if re.search(r"parser\(", source, re.I) and re.search(rf"python -m\s+benchmarks\.{path.stem}\b", text):
            first = " ".join(text.split("\n\n")[0].split())
            what = re.split(r":? `python -m|\. ", first)[0].rstrip(".").replace("|", "/")
            rows.append((f"`{path.stem}`", what))
    return table("benchmark | what it measures", rows)


def option_table(kind: Any) -> str:
    """Return the options of a function, whose fields they are, with their flags."""
    rows = []
    for option, _, metadata in options_of(kind):
        flags = [item for item in metadata if isinstance(item, Parameter) and item.parse is not False]
        flag = f"`{flag_of(option.name)}`" if flags and kind is SaveOptions else ""
        default = "" if option.default in (None, (), "") else f" (`{option.default!r}`)"
        rows.append((f"`{option.name}`{default}", flag, help_of(metadata).replace("|", "/")))
    if kind is SaveOptions:
        return table("option | flag of `birdie compress` | what it does", rows)
    return table("option | what it does", ((name, text) for name, _, text in rows))


TABLES: dict[str, Callable[[], str]] = {
    "commands": command_table,
    "settings": setting_list,
    "variables": choice_table,
    "dead": dead_table,
    "recipes": recipe_table,
    "save-options": lambda: option_table(SaveOptions),
    "load-options": lambda: option_table(LoadOptions),
    "presets": preset_table,
    "schemes": registry.markdown_table,
    "scheme-classes": scheme_classes,
    "scheme-numbers": scheme_numbers,
    "modes": mode_table,
    "format-limits": format_limits,
    "decoding-limits": decoding_limits,
    "dtypes": dtype_list,
    "benchmarks": benchmark_table,
}


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """Return the text of a page with its tables written anew."""
    return MARKER.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[4]}", text)


def main() -> int:
    """Write the tables of all pages, and print the pages that changed."""
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = with_tables(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: tables written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
