"""Chains of checkpoints for the commands `compress`, `decompress` and `inspect`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from birdie.cli.console import (
    compiling_notice,
    folder_of,
    into_folder,
    listed,
    log,
    plain,
    print_json,
    print_line,
    print_table,
    print_written,
    size,
)
from birdie.errors import ConfigError
from birdie.runtime.outputs import require_output, require_output_folder

if TYPE_CHECKING:
    from birdie.artifact.chain import Row
    from birdie.entropy.hints import EffortOption


def is_chain(folder: Path) -> bool:
    """Return whether a folder has links of a chain."""
    return folder.is_dir() and next(folder.glob("*.birdie"), None) is not None  # without torch


def compress_checkpoints(
    folder: Path,
    output: Path,
    *,
    full_every: int | None,
    skip: Sequence[str],
    coder: "EffortOption",
    overwrite: bool,
    json: bool,
) -> None:
    """Add the checkpoints of a run in a folder to a chain, and print a row for each.

    Args:
        folder: of the checkpoints.
        output: the folder of the chain.
        full_every: links of which one stands alone; None: the default, of a folder of nothing but checkpoints.
        skip: patterns of names of checkpoints to leave out.
        coder: "auto" is "fast": floats of full precision hardly gain from "max".
        overwrite: replace links of other checkpoints.
        json: print one object.
    """
    from birdie.artifact.chain import FULL_EVERY, Chain
    from birdie.artifact.checkpoint_series import beside, series, without_number
    from birdie.runtime.distributed import world_from_environment

    if world_from_environment().size > 1:
        raise ConfigError("a chain is written by one process; start it without torchrun")
    checkpoints = series(folder, skip)
    named = without_number(folder, checkpoints, skip, strict=full_every is None)
    if output.resolve() in [path.resolve() for path in (folder, *checkpoints.values(), *named)]:
        raise ConfigError(f"{output} is read; choose another output")
    chain = Chain(
        output,
        full_every=FULL_EVERY if full_every is None else full_every,
        coder="fast" if coder == "auto" else coder,
        notify=log,
    )
    chain.require_writable(overwrite=overwrite)
    rows = []
    with compiling_notice():
        for row in chain.extend(checkpoints, named=named, replace_others=overwrite):
            rows.append(row)
            if row.added:
                title, original_size = _title(row).plain, size(row.checkpoint_bytes or 0)
                log(f"step {title}: {original_size} → {size(row.bytes)}, {_kind(row).plain}")
    original, stored = sum(row.checkpoint_bytes or 0 for row in rows), sum(row.bytes for row in rows)
    added, left_out = sum(row.added for row in rows), beside(folder, checkpoints, named)
    if json:
        facts = {"path": str(output), "input_bytes": original, "bytes": stored, "added": added, "left_out": left_out}
        print_json({**facts, **_listed(rows)})
        return
    print_table(_table(rows, "", lambda row: "added" if row.added else "unchanged"))
    print_line(f"{size(original)} → {size(stored)} ({stored / max(original, 1):.1%}): {output}")
    if left_out:
        print_line(f"left out, as they are no checkpoints: {listed(left_out)}")
    for row in rows:
        if row.checkpoint:
            print_line(f"restore {row.checkpoint}: birdie decompress {output / row.name} -o {row.checkpoint}")
    print_line(f"restore one: birdie decompress {output} --step {max(checkpoints)} -o FOLDER")


def link_of(chain: Path, step: int | None) -> Path:
    """Return the link of a step in a chain."""
    from birdie.artifact.chain import find_link, link_paths

    if step is None:
        paths = link_paths(chain)
        names = f", of {len(paths)} checkpoints, {paths[0].stem} to {paths[-1].stem}" if paths else ""
        such = f", such as {paths[-1]}" if paths else ""
        raise ConfigError(f"{chain} is a folder{names}; name one by --step, or give a .birdie file{such}")
    return find_link(chain, step)


def decompress_link(link: Path, output: str, *, overwrite: bool, json: bool, **limits: Any) -> bool:
    """Restore the checkpoint of a link bit for bit; return False if the output asks for its tensors in another format.

    Args:
        link: its file.
        output: name of a folder; of a checkpoint that is a file, of a file of its format as well.
        overwrite: replace files that are there.
        json: print one object.
        limits: those of `birdie.artifact.chain.restore`.
    """
    from birdie.artifact.chain import restore
    from birdie.artifact.links import read_link
    from birdie.artifact.output_form import form_of, form_of_weights

    facts = read_link(link)
    form, target = form_of(output, from_folder=facts.is_folder), Path(output)
    if facts.is_folder and form != "folder":
        raise ConfigError(f"{link} holds the folder of a checkpoint; give the name of a folder, {output}/")
    if form not in ("folder", form_of_weights(facts.name)):
        if "safetensors" not in (form, form_of_weights(facts.name)) or form == "ptz":
            raise ConfigError(f"{link} holds {facts.name}, bit for bit; give -o a name that ends as that does")
        return False
    left: list[str] = []
    if facts.is_folder:
        target = require_output_folder(target, overwrite=overwrite)
    else:
        target = require_output(target / facts.name if form == "folder" else target, [link], overwrite=overwrite)
    with compiling_notice(), into_folder(target) if facts.is_folder else nullcontext(left) as left:
        count = restore(link, target, overwrite=overwrite, **limits)
    kind = "folder" if facts.is_folder else "file"
    written = {"bytes": count, "step": facts.step, "files": len(facts.files), "written": kind}
    what = folder_of(len(facts.files)) if facts.is_folder else "a file"
    text = f"{facts.name}, checkpoint of step {facts.step}, {size(count)}, as {what}, bit for bit"
    print_written(target, text, written, left, as_json=json)
    return True


def show_chain(folder: Path, *, json: bool) -> None:
    """Print a row for each link of a chain; the exit code is 1 if a checkpoint cannot be restored."""
    from birdie.artifact.chain import survey

    rows = survey(folder)
    damaged = [row for row in rows if row.damage]
    stored, original = sum(row.bytes for row in rows), sum(row.checkpoint_bytes or 0 for row in rows)
    if json:
        listed = _listed(rows)
        print_json({"path": str(folder), "bytes": stored, "input_bytes": original, "damaged": len(damaged), **listed})
    else:
        print_table(_table(rows, "intact", lambda row: "no" if row.damage else "yes"))
        print_line(f"{len(rows)} checkpoints of {size(original)} in {size(stored)}: {folder}")
        for row in damaged:
            print_line(f"{row.name} cannot be restored: {row.damage}")
    if damaged:
        raise SystemExit(1)


def _table(rows: Sequence["Row"], name: str, value: Callable[["Row"], str]) -> Table:
    table = Table()
    for column in ("step", "bytes", "before", "share"):
        table.add_column(column, justify="right")
    table.add_column("stored as", overflow="fold")
    table.add_column(name)
    for row in rows:
        original = row.checkpoint_bytes
        share = f"{row.bytes / original:.1%}" if original else ""
        table.add_row(
            _title(row), f"{row.bytes:,}", "" if original is None else f"{original:,}", share, _kind(row), value(row)
        )
    return table


def _title(row: "Row") -> Text:
    """Return the step of a row, with the name of a checkpoint that is known by its name."""
    return plain(row.name if row.step is None else f"{row.step} {row.checkpoint}".strip())


def _kind(row: "Row") -> Text:
    if row.step is None:
        return Text("unknown")
    return plain(f"difference to {Path(row.base).stem}" if row.base else "full")


def _listed(rows: Sequence["Row"]) -> dict[str, Any]:
    return {"checkpoints": [asdict(row) for row in rows]}
