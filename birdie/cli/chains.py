"""Chains of checkpoints for the commands `compress`, `decompress`, `inspect` and `chain`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from birdie.cli.console import (
    folder_of,
    into_folder,
    listed,
    log,
    plain,
    print_hidden,
    print_json,
    print_line,
    print_table,
    print_written,
    size,
)
from birdie.errors import ConfigError, OutputError
from birdie.system.names import is_hidden
from birdie.system.outputs import require_output, require_output_folder

if TYPE_CHECKING:
    from birdie.artifact import Limits
    from birdie.chain import Row
    from birdie.entropy import EffortOption

_MOST_NAMES = 2  # of links that are named one by one


def is_chain(folder: Path) -> bool:
    """Return whether a folder has links of a chain."""
    return folder.is_dir() and next(folder.glob("*.birdie"), None) is not None  # without torch


def compress_checkpoints(
    folder: Path,
    output: Path,
    *,
    full_every: int | None,
    skip: Sequence[str],
    effort: "EffortOption",
    overwrite: bool,
    json: bool,
) -> None:
    """Add the checkpoints of a run in a folder to a chain, and print a row for each.

    Args:
        full_every: links of which one stands alone; None: the default, of a folder of nothing but checkpoints.
        skip: patterns of names of checkpoints to leave out.
        effort: "auto" is "fast": floats of full precision hardly gain from "max".
        overwrite: replace links of other checkpoints.
        json: print one object.
    """
    from birdie.chain import FULL_EVERY, Chain, beside, series, unfinished, unnumbered, without_number
    from birdie.system.distributed import world_from_environment

    if world_from_environment().size > 1:
        raise ConfigError("a chain is written by one process; start it without torchrun")
    numbered = series(folder, skip)
    waiting = unfinished([*numbered.values(), *unnumbered(folder, [*numbered.values()], skip)])
    checkpoints = {step: path for step, path in numbered.items() if path not in waiting}
    if not checkpoints:
        raise ConfigError(f"no checkpoint in {folder} is complete ({next(iter(waiting.values()))}); run this again")
    named = without_number(folder, checkpoints, skip, strict=full_every is None, waiting=waiting)
    if output.resolve() in [path.resolve() for path in (folder, *checkpoints.values(), *named)]:
        raise ConfigError(f"{output} is read; choose another output")
    if output.is_file():
        raise OutputError(
            f"cannot write {output}: it is a file, and a chain is a folder; remove it, or choose another -o "
            "(--full-every 10 makes a chain of the first checkpoint, too)"
        )
    chain = Chain(
        output,
        full_every=FULL_EVERY if full_every is None else full_every,
        effort="fast" if effort == "auto" else effort,
        notify=log,
    )
    chain.require_writable(overwrite=overwrite)
    rows = []
    for row in chain.extend(checkpoints, named=named, replace_others=overwrite):
        rows.append(row)
        if row.added:
            title, original_size = _title(row).plain, size(row.checkpoint_bytes or 0)
            log(f"step {title}: {original_size} → {size(row.bytes)}, {_kind(row).plain}")
    waiting |= chain.waiting
    rows = sorted([*rows, *chain.others(rows)], key=lambda row: (bool(row.checkpoint), row.step or 0, row.checkpoint))
    original, stored = sum(row.checkpoint_bytes or 0 for row in rows), sum(row.bytes for row in rows)
    added, left_out = sum(row.added for row in rows), beside(folder, numbered, [*named, *waiting])
    if json:
        facts = {"path": str(output), "input_bytes": original, "bytes": stored, "added": added, "left_out": left_out}
        print_json({**facts, "waiting": {path.name: why for path, why in waiting.items()}, **_listed(rows)})
        return
    print_table(_table(rows, "", _state))
    print_line(f"{size(original)} → {size(stored)} ({stored / max(original, 1):.1%}): {output}")
    if any(row.kept for row in rows):
        print_line(f"kept: of checkpoints that are no longer in {folder}")
    steps = {path: f"step {step}" for step, path in numbered.items()}
    for path, why in sorted(waiting.items()):
        advice = f"run this again when it is complete, or leave it out with --skip {path.name}"
        print_line(f"{steps.get(path, path.name)} waits: {why}; {advice}")
    if left_out:
        print_line(f"left out, as they are no checkpoints: {listed(left_out)}")
    for row in rows:
        if row.checkpoint:
            print_line(f"restore {row.checkpoint}: birdie decompress {output / row.name} -o {row.checkpoint}")
    print_line(f"restore one: birdie decompress {output} --step {max(row.step or 0 for row in rows)} -o FOLDER")


def link_of(chain: Path, step: int | None) -> Path:
    """Return the link of a step in a chain."""
    from birdie.artifact import link_paths
    from birdie.chain import find_link

    if step is None:
        paths = link_paths(chain)
        names = f" of {len(paths)} checkpoints, {paths[0].stem} to {paths[-1].stem}" if paths else ""
        such = f", such as {paths[-1]}" if paths else ""
        raise ConfigError(f"{chain} is a folder{names}; name one by --step, or give a .birdie file{such}")
    return find_link(chain, step)


def decompress_link(link: Path, output: str, limits: "Limits", *, overwrite: bool, json: bool) -> bool:
    """Restore the checkpoint of a link bit for bit; return False if the output asks for its tensors in another format.

    Args:
        output: name of a folder; of a checkpoint that is a file, of a file of its format as well.
        overwrite: replace files that are there.
        json: print one object.
        limits: those of `birdie.chain.link_content.restore`.
    """
    from birdie.artifact import form_of, form_of_weights, read_link
    from birdie.chain import restore

    facts = read_link(link)
    form, target = form_of(output, from_folder=facts.is_folder), Path(output)
    if facts.is_folder and form != "folder":
        raise ConfigError(f"{link} holds the folder of a checkpoint; give the name of a folder, {output}/")
    if form not in ("folder", form_of_weights(facts.name)):
        if "safetensors" not in (form, form_of_weights(facts.name)) or form == "ptz":
            raise ConfigError(f"{link} holds {facts.name}, bit for bit; give -o a name that ends as that does")
        return False
    left: list[str] = []
    hidden: list[str] = []
    if facts.is_folder:
        target = require_output_folder(target, overwrite=overwrite)
    elif form == "folder":
        if is_hidden(facts.name) and target.is_dir() and any(target.iterdir()):
            raise OutputError(
                f"cannot write {facts.name} into {target}: hidden files are written only into a new folder; give one"
            )
        target = require_output(target / facts.name, [link], overwrite=overwrite)
    else:
        target = require_output(target, [link], overwrite=overwrite)
    with into_folder(target) if facts.is_folder else nullcontext(left) as left:
        count = restore(link, target, limits, overwrite=overwrite, hidden=hidden.extend)
    kind = "folder" if facts.is_folder else "file"
    files = len(facts.files) - len(hidden)
    written = {"bytes": count, "step": facts.step, "files": files, "written": kind, "left_out": hidden}
    what = folder_of(files) if facts.is_folder else "a file"
    text = f"{facts.name}, checkpoint of step {facts.step}, {size(count)}, as {what}{'' if hidden else ', bit for bit'}"
    print_hidden(hidden, as_json=json)
    print_written(target, text, written, left, as_json=json)
    return True


def show_chain(folder: Path, *, verified: bool, json: bool) -> None:
    """Print a row for each link of a chain; the exit code is 1 if a checkpoint cannot be restored.

    Args:
        verified: decode every link.
        json: print one object.
    """
    from birdie.chain import survey, verify

    rows = verify(folder) if verified else survey(folder)
    damaged = [row for row in rows if row.damage]
    stored, original = sum(row.bytes for row in rows), sum(row.checkpoint_bytes or 0 for row in rows)
    if json:
        listed = _listed(rows)
        facts = {"path": str(folder), "bytes": stored, "input_bytes": original, "damaged": len(damaged)}
        print_json({**facts, "verified": verified, **listed})
    else:
        table = _table(
            rows, "verified" if verified else "intact", lambda row: "no" if row.damage else "yes", needed=True
        )
        print_table(table)
        print_line(f"{len(rows)} checkpoints of {size(original)} in {size(stored)}: {folder}")
        for cause in dict.fromkeys(row.damage for row in damaged):
            print_line(f"{_few([row.name for row in damaged if row.damage == cause])} cannot be restored: {cause}")
    if damaged:
        raise SystemExit(1)


def _state(row: "Row") -> str:
    return "added" if row.added else "kept" if row.kept else "unchanged"


def _few(names: Sequence[str]) -> str:
    """Return names as a list, of many the first, the last and their number."""
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} to {names[-1]} ({len(names)})"


def _table(rows: Sequence["Row"], name: str, value: Callable[["Row"], str], *, needed: bool = False) -> Table:
    """Return the table of links.

    Args:
        name: of the last column.
        value: row → its text in that.
        needed: also say who depends on a link.
    """
    table = Table()
    for column in ("step", "bytes", "before", "share"):
        table.add_column(column, justify="right")
    table.add_column("stored as", overflow="fold")
    if needed:
        table.add_column("needed by", overflow="fold")
    table.add_column(name)
    by_name = {row.name: row for row in rows}
    for row in rows:
        original = row.checkpoint_bytes
        share = f"{row.bytes / original:.1%}" if original else ""
        cells: list[str | Text] = [
            _title(row),
            f"{row.bytes:,}",
            "" if original is None else f"{original:,}",
            share,
            _kind(row),
        ]
        if needed:
            cells.append(plain(_few([_title(by_name[name]).plain for name in row.needed_by])))
        table.add_row(*cells, value(row))
    return table


def _title(row: "Row") -> Text:
    """Return the step of a row, with the name of a checkpoint that is known by its name."""
    return plain(row.name if row.step is None else f"{row.step} {row.checkpoint}".strip())


def _kind(row: "Row") -> Text:
    if row.step is None:
        return Text("unknown")
    return plain(f"delta to {Path(row.base).stem}" if row.base else "full")


def _listed(rows: Sequence["Row"]) -> dict[str, Any]:
    return {"checkpoints": [asdict(row) for row in rows]}
