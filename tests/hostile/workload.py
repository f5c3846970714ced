"""Commands that the campaigns break: small, the same bytes every time, each in a folder of its own."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.gpt.run.recipe_settings import RunSettings

TINY = [
    *("--model.vocab-size", "300", "--model.num-layers", "2", "--model.model-dim", "32", "--model.num-heads", "2"),
    *("--model.num-kv-heads", "1", "--train.train-batch-tokens", "512", "--train.train-seq-len", "64"),
    *("--train.accumulation", "2", "--train.warmup-steps", "1"),
    *("--validation.every", "0", "--validation.max-tokens", "500", "--run.log-every", "1", "--export.effort", "fast"),
]
EVERY = 5
"""Steps between checkpoints."""

PASSING = {
    *("summary.json", "history.jsonl", "recipe.toml"),
    *("metrics.jsonl", "environment.json", "log.txt", "float.safetensors"),
}
"""Files with times in them, or that are written more than once: their bytes are not compared, nor checkpoints'."""

State = dict[str, str]
_STEP = re.compile(r"step-\d{8}(?=/|$)")
_DATE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC")  # in the page of `birdie report`
CHAIN = "checkpoints.birdie"
"""Chain of a training run, whose links have times in them."""


@dataclass
class Report:
    """Result of a campaign.

    Attributes:
        counts: attacks by kind and outcome.
        failures: laws that were broken, with what repeats the attack.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name}: {count:,}" for name, count in sorted(self.counts.items())]
        return "\n".join([*lines, f"{len(self.failures)} failures", *self.failures])


@dataclass(frozen=True)
class End:
    """End of a command: its exit code (negative: a signal), stderr, stdout, and what was measured in its process."""

    code: int
    message: str
    answer: str = ""
    measured: int = 0


@dataclass(frozen=True)
class Command:
    """A command under attack.

    Attributes:
        tokens: folder → its command line; everything it writes is below FOLDER/out.
        again: folder → the command line that goes on after a crash.
        inputs: names of what it needs below FOLDER/in, beside what is always there.
        state: name of the input of which FOLDER/out is a copy when it starts; "": it is empty.
    """

    tokens: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    inputs: tuple[str, ...] = ()
    state: str = ""

    def begin(self, folder: Path) -> State:
        """Let FOLDER/out be as it is before the command, and return its content."""
        reset(folder, folder / "in" / self.state if self.state else None)
        return contents(folder / "out")


def _same(tokens: Callable[[Path], list[str]], *inputs: str, state: str = "") -> Command:
    return Command(tokens, tokens, (*inputs, state) if state else inputs, state)


def train_tokens(folder: Path, steps: int, *, cap: int = 0) -> list[str]:
    """Return the command line of a training run in FOLDER/out/run; `cap` is in seconds, 0 for none."""
    data = next((folder / "in" / "data" / "datasets").iterdir())
    length = ["--train.iterations", str(steps), "--run.checkpoint-every", str(EVERY)]
    return [
        *("train", "--folder", str(folder / "out" / "run"), *TINY, *length),
        *("--data.path", str(data), "--data.tokenizer", "bytes", "--train.max-wallclock-seconds", str(cap)),
    ]


def training(steps: int, *options: str) -> Command:
    """Return the command of a training run in FOLDER/out/run, which is resumed after a crash."""
    return Command(
        lambda at: [*train_tokens(at, steps), *options], lambda at: [*train_tokens(at, steps), *options, "--resume"]
    )


COMMANDS = {
    "compress": _same(lambda at: ["compress", f"{at}/in/w.pt", "-o", f"{at}/out/m.birdie", "--effort", "fast"]),
    "compress --budget": _same(
        lambda at: [
            *("compress", f"{at}/in/w.pt", "-o", f"{at}/out/m.birdie"),
            *("--budget", "9000", "--effort", "fast"),
        ]
    ),
    "decompress .safetensors": _same(
        lambda at: ["decompress", f"{at}/in/m.birdie", "-o", f"{at}/out/m.safetensors"],
    ),
    "decompress .pt": _same(lambda at: ["decompress", f"{at}/in/m.birdie", "-o", f"{at}/out/m.pt"]),
    "decoder": _same(lambda at: ["script", "--kind", "decoder", "-o", f"{at}/out/decode.py"]),
    "prepare": _same(lambda at: ["prepare", f"{at}/in/*.txt", "--tokenizer", "bytes", "-o", f"{at}/out/data"]),
    "train": training(2 * EVERY),
    "train --checkpoint-deltas": training(2 * EVERY, "--checkpoint-deltas"),
    "compress chain": _same(
        lambda at: ["compress", f"{at}/in/checkpoints", "-o", f"{at}/out/run.birdie"], "checkpoints", state="half"
    ),
    "chain --keep-every": _same(lambda at: ["chain", f"{at}/out/run.birdie", "--keep-every", "30"], state="six"),
    "decompress --step": Command(
        lambda at: ["decompress", f"{at}/in/run.birdie", "--step", "30", "-o", f"{at}/out/step"],
        lambda at: ["decompress", f"{at}/in/run.birdie", "--step", "30", "-o", f"{at}/out/step", "--overwrite"],
        ("run.birdie",),
    ),
    "decompress folder": _same(lambda at: ["decompress", f"{at}/in/folder.birdie", "-o", f"{at}/out/model"], "folder"),
    "decompress --overwrite": _same(
        lambda at: ["decompress", f"{at}/in/folder.birdie", "-o", f"{at}/out/model", "--overwrite"],
        "folder",
        state="older",
    ),
    "page": _same(lambda at: ["page", f"{at}/in/run", "-o", f"{at}/out/page.html"], "run"),
    "report": _same(lambda at: ["report", f"{at}/in/run", "-o", f"{at}/out/report.html", "--no-samples"], "run"),
}


@contextlib.contextmanager
def workplace(inputs: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder with FOLDER/in, which no command may change, and an empty FOLDER/out.

    Args:
        inputs: names of what is in FOLDER/in beside what is always there.

    Raises:
        RuntimeError: a command that nobody disturbs fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "out").mkdir()
        _make_inputs(folder / "in")
        for name in dict.fromkeys(inputs):
            _INPUTS[name](folder / "in")
        yield folder


def inputs_of(commands: Iterable[Command]) -> list[str]:
    """Return the inputs of commands, each once."""
    return list(dict.fromkeys(name for command in commands for name in command.inputs))


def _make_inputs(source: Path) -> None:
    source.mkdir()
    torch.manual_seed(0)
    torch.save({"a": torch.randn(64, 96), "b": torch.randn(48, 64), "c": torch.randn(64)}, source / "w.pt")
    text = Path(__file__).read_text(encoding="utf-8")
    for index in range(4):
        (source / f"{index}.txt").write_text(text[index * 500 :], encoding="utf-8")
    for tokens in (
        ["compress", str(source / "w.pt"), "-o", str(source / "m.birdie"), "--effort", "fast"],
        ["prepare", str(source / "*.txt"), "--tokenizer", "bytes", "-o", str(source / "data")],
    ):
        _require(call(tokens))


def _require(end: End) -> None:
    if end.code:
        raise RuntimeError(end.message)


def write_checkpoints(folder: Path, count: int, *, seed: int = 0) -> None:
    """Write `count` checkpoints of a run that differ a little, the folders step-10, … and the file last.ckpt."""
    generator = torch.Generator().manual_seed(seed)
    state = {"a": torch.randn(64, 48, generator=generator), "b": torch.randn(700, generator=generator).half()}
    for step in range(10, 10 * count + 1, 10):
        state["a"] = state["a"] + 1e-4 * torch.randn(64, 48, generator=generator)
        path = folder / f"step-{step}"
        path.mkdir(parents=True)
        save_file(state, path / "model.safetensors")
        (path / "state.json").write_text(json.dumps({"step": step}), encoding="utf-8")
    torch.save({"step": 10 * count, "model": state}, folder / "last.ckpt")


def _compress_checkpoints(count: int, chain: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoints(Path(name), count)
        _require(call(["compress", name, "-o", str(chain)]))


def _write_folder(folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True)
    save_file({"a": torch.randn(64, 48, generator=torch.Generator().manual_seed(seed))}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"seed": seed}), encoding="utf-8")


def _make_folder(source: Path) -> None:
    _write_folder(source / "folder", seed=0)
    _require(call(["compress", str(source / "folder"), "-o", str(source / "folder.birdie"), "--effort", "fast"]))


def _make_run(source: Path) -> None:
    _require(forked(train_tokens(source.parent, EVERY)))
    shutil.move(source.parent / "out" / "run", source / "run")


_INPUTS: dict[str, Callable[[Path], object]] = {
    "checkpoints": lambda source: write_checkpoints(source / "checkpoints", 4),
    "half": lambda source: _compress_checkpoints(2, source / "half" / "run.birdie"),
    "six": lambda source: _compress_checkpoints(6, source / "six" / "run.birdie"),
    "run.birdie": lambda source: _compress_checkpoints(4, source / "run.birdie"),
    "folder": _make_folder,
    "older": lambda source: _write_folder(source / "older" / "model", seed=1),
    "run": _make_run,
}


def call(tokens: list[str]) -> End:
    """Run a command in this process."""
    errors, answer = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(answer):
        code = run(build_app, tokens)
    return End(code, errors.getvalue(), answer.getvalue())


class Fork:
    """A command in a fork of this process, which runs from `arm` to `measure`; several can run at once."""

    def __init__(self, tokens: list[str], arm: Callable[[], object] = int, measure: Callable[[], int] = int) -> None:
        self._source, sink = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            end = End(1, "the process ended")
            try:
                torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a child that waits for them hangs
                arm()
                end = call(tokens)
            finally:
                fields = [end.code, end.message[-4000:], end.answer[-40000:], measure()]
                os.write(sink, json.dumps(fields).encode())
                os._exit(0)
        os.close(sink)

    def end(self) -> End:
        """Wait for the end of the command, and return it."""
        with os.fdopen(self._source) as answers:
            text = answers.read()
        _, status = os.waitpid(self.pid, 0)
        return End(*json.loads(text)) if text else End(os.waitstatus_to_exitcode(status), "the process was killed")


def forked(tokens: list[str], arm: Callable[[], object] = int, measure: Callable[[], int] = int) -> End:
    """Run a command in a fork of this process, between `arm` and `measure`."""
    return Fork(tokens, arm, measure).end()


def started(tokens: list[str], script: tuple[str, ...] = ("-m", "birdie"), **variables: str) -> "subprocess.Popen[str]":
    """Start a command in a process of its own: this checkout, one thread, no colors, more `variables`."""
    return subprocess.Popen(
        [sys.executable, *script, *tokens],
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]", seconds: float = 300) -> End:
    """Wait for a process; raises subprocess.TimeoutExpired."""
    answer, message = process.communicate(timeout=seconds)
    return End(process.returncode, message, answer)


def contents(folder: Path) -> State:
    """Return the digest of every file below `folder`, by name; "" for files whose bytes differ from run to run.

    Checkpoints of a training run have one name for all, and so have the links of its chain, as a run that was stopped
    has other ones. More checkpoints than are kept are strays.
    """
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            is_link = path.parent.name == CHAIN and path.suffix == ".birdie"
            passing = is_link or _STEP.search(str(path.parent)) or path.name in PASSING
            name = _STEP.sub("step-N", str(path.relative_to(folder)))
            name = str(Path(name).with_name("step-N.birdie")) if is_link else name
            data = _DATE.sub(b"", path.read_bytes()) if path.suffix == ".html" else path.read_bytes()
            digests[name] = "" if passing else hashlib.sha256(data).hexdigest()
    checkpoints = [path for path in folder.rglob("step-*") if _STEP.fullmatch(path.name)]
    return digests | {
        str(path.relative_to(folder)): "" for path in sorted(checkpoints)[: -RunSettings().keep_checkpoints]
    }


def reset(folder: Path, state: Path | None = None) -> None:
    """Empty FOLDER/out, or make it a copy of `state`."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    if state is None:
        (folder / "out").mkdir()
    else:
        shutil.copytree(state, folder / "out")


def problem_of(end: End) -> str | None:
    """Return what is wrong with the way a command ended: a signal, a traceback, no sentence; None if nothing is."""
    if end.code not in (0, 1, 130, 143):
        return f"exit code {end.code}: {end.message[-300:]}"
    if "Traceback" in end.message:
        return "a traceback: " + end.message.strip().splitlines()[-1]
    sentences = sum(line.startswith("error: ") for line in end.message.splitlines()) + end.answer.count('{"error": ')
    return None if end.code != 1 or sentences == 1 else f"not one sentence: {end.message[-300:]}"


def environment() -> dict[str, str]:
    """Return the environment for commands in processes of their own: this checkout, one thread, no colors."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
