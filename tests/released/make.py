"""Write one file of each kind in the current version of the format, and the digests of what they decode to.

    python -m tests.released.make            tests/released/1.0/

A version is written once, before its release; a folder of a released version is never written again.

    digests.json             file → hash of its decoded tensors, and what else it must give
    *.birdie                 models in all schemes and coders; aliases, blocks, members, deltas, kept files, an object
    base.birdie              of delta.birdie and near.birdie
    run.birdie/              a chain of two checkpoints
    recipe.toml              a recipe that states every setting
    run/                     a run folder
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import birdie
from birdie.artifact import container, saving
from birdie.artifact.links import link_paths
from birdie.artifact.options import SaveOptions
from birdie.chain.chain_folder import Chain
from birdie.chain.checkpoint_series import series
from birdie.chain.link_content import restore
from birdie.compress.row_blocks import row_blocks
from birdie.gpt.model.gpt import GPTConfig
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.train.training_checkpoint import checkpoint_paths
from tests.artifact.states import fingerprint, small_model
from tests.gpt.run.test_run_folder import tiny_recipe

FOLDER = Path(__file__).parent
CURRENT = FOLDER / ".".join(map(str, container.VERSION))
GOLDEN = FOLDER.parent / "golden"
OF_GOLDEN = ("artifact", "lossless", "spectral", "tucker")  # tests/artifact/test_golden.py says what is in them
BASE, CHAIN, RECIPE, RUN = "base.birdie", "run.birdie", "recipe.toml", "run"
DELTAS = {"delta": True, "near": False}  # whether it is lossless
TITLE = {"title": "a budget"}
FILES = {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb\n"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def write_model(path: Path) -> None:
    """An alias, kept files, metadata, a budget, the order of the state dict."""
    saving.write_model(small_model(), path, SaveOptions(bits=4, metadata=TITLE), files=FILES)


def write_coders(path: Path) -> None:
    """Coders that artifact.birdie lacks: static, and tiles."""
    state = {
        "tiles": (integers(0, 40, 1024, 64) == 0).bfloat16(),
        "static": integers(-1, 2, 64, 24).to(torch.int8),
        "packed": torch.arange(256) * 2654435761 % 65521,
        "bytes": integers(0, 256, 16, 32).to(torch.uint8),
    }
    birdie.save(state, path, scheme=[("tiles", "ternary"), ("*", "lossless")], effort="fast")


def write_object(path: Path) -> None:
    content = {"model": {"w": normal(24, 16).half(), "b": normal(16)}, "step": 7, "order": ["a", (0.5, None)]}
    birdie.save_object(content, path)


def write_blocks(path: Path) -> None:
    large = torch.zeros((1 << 13) + 1, 1 << 12, dtype=torch.int8)
    assert len(row_blocks(large)) > 1
    birdie.save({"large": large}, path, lossless=True)


def write_stack(path: Path) -> None:
    birdie.save({"experts": integers(-1, 2, 2, 128, 128) / 8}, path, scheme="int2")


def write_members(path: Path) -> None:
    birdie.save({f"t{i}": torch.arange(3.0) + i for i in range(70)}, path, lossless=True)


def write_twins(path: Path) -> None:
    """A delta to a tensor of the same file."""
    weight = normal(64, 64).bfloat16()
    birdie.save({"w": weight, "twin": (weight + 1e-3 * normal(64, 64, seed=1)).bfloat16()}, path, lossless=True)


WRITERS: dict[str, Callable[[Path], None]] = {
    "model": write_model,
    "coders": write_coders,
    "object": write_object,
    "blocks": write_blocks,
    "stack": write_stack,
    "members": write_members,
    "twins": write_twins,
}


def write_deltas(folder: Path) -> None:
    base = {"w": normal(64, 48).bfloat16(), "same": normal(32, 32), "b": normal(48)}
    birdie.save(base, folder / BASE, lossless=True)
    moved = base | {"w": (base["w"].float() + 1e-3 * normal(64, 1, seed=1) * normal(1, 48, seed=2)).bfloat16()}
    for name, lossless in DELTAS.items():
        birdie.save(moved, folder / f"{name}.birdie", base=folder / BASE, lossless=lossless)


def write_chain(folder: Path, checkpoints: Path) -> None:
    state = {"w": normal(64, 40), "h.0.b": normal(40).half()}
    for step in (1, 2):
        state["w"] += 1e-4 * normal(64, 40, seed=step)
        path = checkpoints / f"step-{step}"
        path.mkdir()
        save_file(state, path / "model.safetensors", {"format": "pt"})
        torch.save({"state": {0: {"exp_avg": normal(40, seed=step)}}}, path / "optimizer.pt")
        (path / "vocabulary.txt").write_text("a b c\n" * 20)
    assert [row.base for row in Chain(folder / CHAIN, full_every=9).extend(series(checkpoints))] == [
        "",
        "step-1.birdie",
    ]


def write_run(folder: Path) -> None:
    model = GPTConfig(vocab_size=260, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1)
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        recipe = dataclasses.replace(tiny_recipe(Path()), model=model)
        (folder / RECIPE).write_text(recipe.to_toml())
        run = Run(recipe, folder / RUN)
        list(run.train())
        run.export()
    earlier = checkpoint_paths(folder / RUN / "checkpoints")[1:]
    for path in earlier:
        shutil.rmtree(path)
    environment = folder / RUN / "environment.json"
    about = json.loads(environment.read_text()) | {"command": ["birdie", "train", RECIPE]}
    environment.write_text(json.dumps(about, indent=1) + "\n")


def digests(path: Path) -> dict[str, Any]:
    """Return what a .birdie file of the folder must give."""
    base = path.parent / BASE if path.stem in DELTAS else None
    kept = dict(birdie.inspect(path).files)
    about: dict[str, Any] = {"file": digest(path), "tensors": fingerprint(birdie.load(path, base=base))}
    return about | ({"files": kept} if kept else {})


def digests_of_chain(folder: Path) -> dict[str, dict[str, str]]:
    """Return link → file → SHA-256 of the checkpoints that a chain gives back."""
    with tempfile.TemporaryDirectory() as target:
        for link in link_paths(folder):
            restore(link, Path(target, link.stem))
        return {
            link.stem: {path.name: digest(path) for path in sorted(Path(target, link.stem).iterdir())}
            for link in link_paths(folder)
        }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensor_files(folder: Path) -> Iterator[Path]:
    """Yield the .birdie files of a version that are no chain."""
    yield from (path for path in sorted(folder.rglob("*.birdie")) if path.is_file() and CHAIN not in path.parts)


def settings(path: Path) -> dict[str, Any]:
    """Return the settings of a recipe, whatever is not set left out."""
    content: dict[str, Any] = json.loads(json.dumps(load_recipe(path).to_dict()))
    return content


def main() -> None:
    """Write the folder of the current version."""
    shutil.rmtree(CURRENT, ignore_errors=True)
    CURRENT.mkdir()
    for name in OF_GOLDEN:
        (CURRENT / f"{name}.birdie").write_bytes(bytes.fromhex((GOLDEN / f"{name}.hex").read_text().split()[1]))
    for name, write in WRITERS.items():
        write(CURRENT / f"{name}.birdie")
    write_deltas(CURRENT)
    with tempfile.TemporaryDirectory() as checkpoints:
        write_chain(CURRENT, Path(checkpoints))
    write_run(CURRENT)
    rows: dict[str, Any] = {path.relative_to(CURRENT).as_posix(): digests(path) for path in tensor_files(CURRENT)}
    rows[CHAIN], rows[RECIPE] = digests_of_chain(CURRENT / CHAIN), settings(CURRENT / RECIPE)
    (CURRENT / "digests.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
