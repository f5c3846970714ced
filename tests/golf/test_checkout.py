"""`train_gpt.py`: settings from the records' variables, log lines in the challenge's order and number formats."""

import io
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ConfigError
from birdie.golf import checkout, script_main
from birdie.golf.checkout import main
from birdie.golf.packed_script import Kind, PackedScript
from birdie.golf.script_main import write_model
from birdie.golf.script_score import Log
from birdie.gpt.run.float_weights import Trained
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import ExportSettings, Recipe
from birdie.gpt.run.work import Work
from birdie.system.context import Context
from birdie.system.distributed import World
from tests.ranks import run_as_ranks

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "train_gpt.py"

NUMBER = r"[0-9]+"
ORDER = [
    r"val_bpb:enabled tokenizer_kind=\w+ tokenizer_path=\S+",
    rf"train_loader:dataset:\S+ train_shards:{NUMBER}",
    rf"val_loader:shards pattern=\S+ tokens:{NUMBER}",
    rf"model_params:{NUMBER}",
    rf"world_size:{NUMBER} grad_accum_steps:{NUMBER}",
    r"sdp_backends:cudnn=\w+ flash=\w+ mem_efficient=\w+ math=\w+",
    rf"attention_mode:gqa num_heads:{NUMBER} num_kv_heads:{NUMBER}",
    r"tie_embeddings:True embed_lr:0.03 head_lr:0.0 matrix_lr:0.02 scalar_lr:0.02",
    rf"train_batch_tokens:{NUMBER} train_seq_len:{NUMBER} iterations:{NUMBER} warmup_steps:{NUMBER} "
    r"max_wallclock_seconds:0.000",
    rf"seed:{NUMBER}",
    rf"warmup_step:1/{NUMBER}",
    r"step:0/6 val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d{2}ms",
    r"step:1/6 train_loss:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d{2}ms",
    r"step:3/6 val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d{2}ms",
    r"step:6/6 train_loss:.*",
    r"step:6/6 val_loss:.*",
    rf"peak memory allocated: {NUMBER} MiB reserved: {NUMBER} MiB",
    rf"Serialized model: {NUMBER} bytes",
    rf"Code size: {NUMBER} bytes",
    rf"Serialized model int8\+zlib: {NUMBER} bytes \(payload:{NUMBER} raw_torch:{NUMBER} payload_ratio:\d+\.\d\dx\)",
    rf"Total submission size int8\+zlib: {NUMBER} bytes",
    r"final_int8_zlib_roundtrip val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} eval_time:\d+ms",
    r"quantization_gap: int8_zlib_bpb:.*",
    r"final_int8_zlib_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}",
    rf"Serialized model birdie: {NUMBER} bytes.*",
    r"final_birdie_roundtrip val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} eval_time:\d+ms",
    r"quantization_gap: float_bpb:.*",
    r"final_birdie_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}",
    rf"Total submission size birdie: {NUMBER} bytes",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    assert (
        run(
            build_app,
            ["prepare", str(ROOT / "birdie" / "**" / "*.py"), "--tokenizer", "bytes", "-o", str(root), "--json"],
        )
        == 0
    )
    return next((root / "datasets").iterdir())


def tiny(data: Path) -> dict[str, str]:
    """Return the environment of a record's command, for a very small model."""
    return {
        "RUN_ID": "tiny", "DATA_PATH": str(data), "TOKENIZER_PATH": "bytes", "VOCAB_SIZE": "260", "NUM_LAYERS": "3",
        "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "3",
        "TRAIN_LOG_EVERY": "5", "MATRIX_LR": "0.02", "SCALAR_LR": "0.02", "TIED_EMBED_LR": "0.03", "INT4_LAYERS": "1,2",
        "INT4_STEP": "4", "ITERATIONS": "6", "WARMUP_STEPS": "2", "TRAIN_BATCH_TOKENS": "1024", "TRAIN_SEQ_LEN": "64",
        "VAL_MAX_TOKENS": "4096", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def fake_pack(kind: Kind, recipe: Recipe) -> PackedScript:
    """Return a script in no time; its bytes tell how it was packed."""
    return PackedScript(f"{kind} {recipe.model}".encode(), {"birdie/gpt/model/gpt.py": ""}, (), True)


def with_the_fast_coder(**options: Any) -> Recipe:
    """Return the recipe of the environment, exported in a tenth of the time."""
    recipe = load_recipe(**options)
    return replace(recipe, export=replace(recipe.export, effort="fast"))


def played(data: Path, folder: Path, **changes: str) -> tuple[int, str, str]:
    """Run the entry point in `folder` with the environment of `tiny`, changed; return (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(ENTRY)])
        patch.setattr(checkout, "pack", fake_pack)
        patch.setattr(checkout, "load_recipe", with_the_fast_coder)
        for name, value in (tiny(data) | changes).items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            return 1, out.getvalue(), f"{end.code}"
    return 0, out.getvalue(), err.getvalue()


Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(data: Path, tmp_path: Path) -> Play:
    return partial(played, data, tmp_path)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, list[str]]:
    """The folder and the lines of one run."""
    folder = tmp_path_factory.mktemp("record")
    code, out, err = played(data, folder)
    assert code == 0, err
    return folder, out.splitlines()


def test_the_lines_come_in_the_challenge_order(logged: tuple[Path, list[str]]) -> None:
    _, lines = logged
    assert lines[0] == "logs/tiny.txt"
    position = 0
    for pattern in ORDER:
        match = next((i for i in range(position, len(lines)) if re.fullmatch(pattern, lines[i])), None)
        assert match is not None, f"no line like {pattern} after {lines[position - 1]!r}"
        position = match + 1
    assert position == len(lines), f"lines follow the last one: {lines[position:]}"


def test_the_log_holds_the_source_and_every_line(logged: tuple[Path, list[str]]) -> None:
    folder, lines = logged
    log = (folder / "logs" / "tiny.txt").read_text()
    assert "class GPT(nn.Module)" in log
    assert "Running PyTorch" in log
    assert all(line in log for line in lines[1:])


def field(pattern: str, lines: list[str], start: str) -> str:
    """Return the group of `pattern` in the first line that begins with `start`."""
    match = re.search(pattern, next(line for line in lines if line.startswith(start)))
    assert match is not None
    return match[1]


def number(lines: list[str], start: str) -> int:
    return int(field(r": (\d+) bytes", lines, start))


def test_the_code_of_a_checkout_counts_as_it_would_packed(
    logged: tuple[Path, list[str]], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = logged
    code = number(lines, "Code size")
    for name, value in tiny(data).items():
        monkeypatch.setenv(name, value)
    assert code == len(fake_pack("train", load_recipe()).script)
    model = (folder / "runs" / "tiny" / "model.birdie").stat().st_size
    assert number(lines, "Total submission size birdie") == model + code


def test_birdie_is_smaller_and_as_good(logged: tuple[Path, list[str]]) -> None:
    _, lines = logged
    assert number(lines, "Serialized model birdie") < number(lines, "Serialized model int8+zlib")
    old, new = (
        float(field(r"val_bpb:(\S+)", lines, name))
        for name in ("final_int8_zlib_roundtrip_exact", "final_birdie_roundtrip_exact")
    )
    assert abs(old - new) < 0.02


def test_a_capped_run_stops_early_and_logs_it(play: Play) -> None:
    code, out, err = play(MAX_WALLCLOCK_SECONDS="1", ITERATIONS="100000", VAL_LOSS_EVERY="0", EVAL_STRIDE="16")
    assert code == 0, err
    # birdie's own lines may stand between those of the challenge
    lines = [line for line in out.splitlines() if not line.startswith("birdie:")]
    cap = next(i for i, line in enumerate(lines) if line.startswith("stopping_early: wallclock_cap train_time:"))
    assert re.match(r"step:\d+/100000 val_loss:", lines[cap - 1])
    assert lines[cap + 1].startswith("peak memory")
    assert sum("val_loss" in line and line.startswith("step:") for line in lines) == 1
    last = r"final_sliding_window_eval{} stride:16 val_loss:\d\.\d{{{}}} val_bpb:\d\.\d{{{}}}{}"
    assert re.fullmatch(last.format("", 4, 4, r" eval_time:\d+ms"), lines[-2])
    assert re.fullmatch(last.format("_exact", 8, 8, ""), lines[-1])
    exact = {line.split()[0]: float(line.rpartition(":")[2]) for line in lines if "_exact" in line}
    assert abs(exact["final_sliding_window_eval_exact"] - exact["final_birdie_roundtrip_exact"]) < 0.05


def exact(lines: str) -> dict[str, str]:
    """Return name → score of the lines with all digits."""
    return dict(line.split(" ", 1) for line in lines.splitlines() if "_exact " in line)


def test_an_artifact_is_scored_alone_as_after_training(logged: tuple[Path, list[str]], play: Play) -> None:
    artifact = logged[0] / "runs" / "tiny" / "model.birdie"
    code, scored, err = play(EVAL_STRIDE="32", EVAL_ONLY_PATH=str(artifact), RUN_ID="scored")
    assert code == 0, err
    name = "final_birdie_roundtrip_exact"
    assert exact(scored)[name] == exact("\n".join(logged[1]))[name]
    assert list(exact(scored)) == [name, "final_sliding_window_eval_exact"]
    size = artifact.stat().st_size + number(logged[1], "Code size")
    assert f"Total submission size birdie: {size} bytes" in scored
    assert "step:" not in scored
    code, _, err = play(EVAL_ONLY_PATH="nothing.birdie")
    assert (code, "nothing.birdie" in err) == (1, True)


def test_weights_are_exported_again_without_training(
    logged: tuple[Path, list[str]], play: Play, tmp_path: Path
) -> None:
    shutil.copytree(logged[0] / "runs" / "tiny", tmp_path / "runs" / "again")
    code, out, err = play(RUN_ID="again", RESTORE="1", INT4_STEP="16")
    assert code == 0, err
    trained = "\n".join(logged[1])
    assert exact(out)["final_birdie_roundtrip_exact"] != exact(trained)["final_birdie_roundtrip_exact"]
    (step,) = [line for line in out.splitlines() if line.startswith("step:6/6")]
    assert step in logged[1]
    assert "warmup_step" not in out


@pytest.mark.parametrize(
    ("budget", "cap", "expected"),
    [
        (None, "16MB", [None]),
        (None, "1000", [None, 400]),
        ("2kB", "16MB", [2000]),
        ("2kB", "1000", [400]),
    ],
)
def test_code_and_model_keep_the_cap(
    budget: str | None, cap: str, expected: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of the recipe gives way to the cap, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAP_BYTES", cap)
    budgets: list[int | None] = []

    def export(*_: Any, budget: int | None, **__: Any) -> int:
        budgets.append(budget)
        return 900 if budget is None else min(900, budget)

    monkeypatch.setattr(script_main, "export", export)
    log, recipe = Log("cap", World()), Recipe(export=ExportSettings(budget=budget))
    work = Work(recipe, None, Context(torch.device("cpu")))  # type: ignore[arg-type]
    arguments: Any = (log, work, torch.nn.Linear(2, 2), Trained(), tmp_path / "model.birdie", 600)
    write_model(*arguments)
    assert budgets == expected
    monkeypatch.setenv("CAP_BYTES", "much")
    with pytest.raises(ConfigError, match="'much' is not a size"):
        write_model(*arguments)


def the_entry(path: str) -> None:
    sys.argv = [path]
    with mock.patch.object(checkout, "pack", fake_pack):
        main()


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "name"), [(2, ""), (8, "tiny")])
def test_ranks_give_the_one_rank_result_under_one_name(
    ranks: int, name: str, logged: tuple[Path, list[str]], data: Path, tmp_path: Path
) -> None:
    """The ranks, of which the records have eight, are forked with torchrun's variables."""
    lines = run_as_ranks(the_entry, (str(ENTRY),), ranks, tmp_path, tiny(data) | {"RUN_ID": name}).splitlines()
    assert f"world_size:{ranks} grad_accum_steps:{8 // ranks}" in lines
    assert lines[-1].startswith("Total submission size birdie")
    assert number(lines, "Code size") == number(logged[1], "Code size")
    one, many = (float(field(r"val_loss:(\S+)", log, "final_birdie_roundtrip_exact")) for log in (logged[1], lines))
    assert many == pytest.approx(one, abs=2e-3)
    runs = [run.name for run in (tmp_path / "runs").iterdir()]
    assert len(runs) == 1
    assert runs[0] == (name or Path(lines[0]).stem)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"NUM_LAYERS": "ten"}, "NUM_LAYERS"),
        ({"DATA_PATH": "nowhere"}, "nowhere"),
        ({"TRAIN_BATCH_TOKENS": "1000"}, "1000"),
        ({"INT4_LAYERS": "9"}, "layer 9"),
        ({"VOCAB_SIZE": "100"}, "vocab_size"),
    ],
)
def test_a_wrong_setting_is_one_sentence(play: Play, changes: dict[str, str], value: str) -> None:
    code, _, err = play(**changes)
    assert code == 1
    assert value in err
    assert err.startswith("error: ")
