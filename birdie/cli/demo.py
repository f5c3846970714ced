"""`birdie demo`: train a small GPT for a minute, compress it under a budget and score the file.

The text is the source of Python's standard library, which every machine has. It takes about two minutes on two cores.
"""

import dataclasses
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, log, log_file, print_json, print_line, print_table
from birdie.cli.prepare import prepare_with_bar
from birdie.compress import parse_size
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import STDLIB, stdlib_corpus
from birdie.system.parsing import to_json

if TYPE_CHECKING:
    from birdie.gpt.run.pipeline import Run
    from birdie.gpt.run.recipe_settings import Recipe

GROUP = "Train"
FEW_STEPS = 200
"""Steps below which the model has learned little."""


def demo_recipe(data: Path, *, seconds: float, budget: str, seed: int, device: str) -> "Recipe":
    """Return recipes/demo.toml with these settings and with data below the folder `data`."""
    from birdie.gpt.data.preparation import Layout
    from birdie.gpt.run.recipe_registry import find

    recipe = find("demo").recipe()
    layout = Layout.of(data, STDLIB, f"sp{recipe.model.vocab_size}")
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, path=str(layout.folder), tokenizer=str(layout.model)),
        train=dataclasses.replace(recipe.train, max_wallclock_seconds=seconds, seed=seed),
        export=dataclasses.replace(recipe.export, budget=budget),
        device=device,
    )


def command(
    *,
    budget: Annotated[str, Parameter(help="Largest size of the artifact: 450kB, 1MiB.")] = "450kB",
    seconds: Annotated[float, Parameter(help="Training time.")] = 60.0,
    folder: Annotated[Path, Parameter(help="Folder for data and run; the artifact is run/model.birdie in it.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[int, Parameter(help="Seed of the initial weights and of the data order.")] = 0,
    device: Annotated[str, Parameter(help="auto, cuda, mps or cpu.")] = "auto",
    json: Json = False,
) -> None:
    """Train a small GPT on the sources of Python's standard library, compress it under a budget, score the file."""
    parse_size(budget)
    if not seconds > 0:
        raise ConfigError(f"--seconds is {seconds}; give a positive number of seconds")
    from birdie.cli.train import compressed, follow, run_json, scored
    from birdie.gpt.run.pipeline import Run
    from birdie.gpt.run.run_folder import require_run_folder
    from birdie.gpt.score.request import EvaluationRequest
    from birdie.system.context import Context
    from birdie.system.device import choose_device
    from birdie.system.distributed import World
    from birdie.system.files import write_bytes

    data = folder / "data"
    recipe = demo_recipe(data, seconds=seconds, budget=budget, seed=seed, device=device)
    if not (Path(recipe.data.path) / "dataset.json").is_file():
        prepare_with_bar(stdlib_corpus(), vocab_size=recipe.model.vocab_size, root=data)
    require_run_folder(folder / "run")
    run = Run(recipe, folder / "run", Context(choose_device(device), notify=log), replace=True)
    with run.locked(), log_file(run.folder / "log.txt"):
        last, interrupted = follow(run)
        if interrupted is not None or last is None:
            raise KeyboardInterrupt
        if last.step < FEW_STEPS:
            log(
                f"only {last.step:,} steps in {seconds:g} s, too few for a good model; a quieter machine, or a larger "
                "--seconds, gives more"
            )
        summary = compressed(run)
        result = scored(Path(summary.path), EvaluationRequest(device=device), World(), "scoring the file")
        answer = run_json(run, last, summary, result)
        write_bytes(run.folder / "summary.json", to_json(answer, indent=1).encode() + b"\n")
    float_bytes, int8_bytes, int8_bpb = _baselines(run)
    answer |= {
        "weights": summary.weights,
        "float_bytes": float_bytes,
        "int8_zlib_bytes": int8_bytes,
        "bpb_int8_zlib": int8_bpb,
        "ci95": result.score.ci95,
        "path": str(summary.path),
    }
    if json:
        print_json(answer)
        return
    print_table(_table(answer))
    print_line(f"artifact: {summary.path}")
    print_line(f"show its tensors: birdie inspect {summary.path}")
    print_line(f"generate text: birdie sample {summary.path} --prompt 'def '")
    print_line(f"run it in a browser: birdie page {folder} -o demo.html")


def _baselines(run: "Run") -> tuple[int, int, float]:
    """Return the bytes of the float weights under zlib, and bytes and bpb of the challenge's int8+zlib export."""
    import torch

    from birdie.golf import int8_zlib as baseline

    state = run.model.state_dict()
    buffer = BytesIO()
    torch.save(state, buffer)
    floats = zlib.compress(buffer.getvalue(), 9)
    packed = baseline.pack(state)
    decoded = baseline.unpack(packed.blob, 2 * packed.raw_bytes)
    return len(floats), len(packed.blob), run.work.score(run.work.new_model(decoded)).score.bpb


def _table(answer: dict[str, Any]) -> Table:
    weights = answer["weights"]
    table = Table(
        title=f"{weights:,} weights after {answer['steps']} steps",
        caption="scored on files of Python's standard library that are not in the training split",
    )
    table.add_column("model")
    table.add_column("bytes", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, size, bpb in (
        ("float32, torch.save + zlib", answer["float_bytes"], answer["bpb_float"]),
        ("int8, torch.save + zlib", answer["int8_zlib_bytes"], answer["bpb_int8_zlib"]),
        ("birdie", answer["bytes"], answer["bpb_artifact"]),
    ):
        table.add_row(
            name, f"{size:,}", f"{size * 8 / weights:.2f}", f"{bpb:.4f}", style="bold" if name == "birdie" else ""
        )
    table.add_section()
    table.add_row("budget", f"{answer['budget']:,}", f"{answer['budget'] * 8 / weights:.2f}", "")
    return table
