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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.run.recipe import RunSettings

TINY = [
    *("--model.vocab-size", "300", "--model.num-layers", "2", "--model.model-dim", "32", "--model.num-heads", "2"),
    *("--model.num-kv-heads", "1", "--train.train-batch-tokens", "512", "--train.train-seq-len", "64"),
    *("--train.accumulation", "2", "--train.warmup-steps", "1"),
    *("--validation.every", "0", "--validation.max-tokens", "500", "--run.log-every", "1", "--export.coder", "fast"),
]
EVERY = 5
"""Steps between checkpoints."""

PASSING = {
    *("summary.json", "history.jsonl", "recipe.toml"),
    *("metrics.jsonl", "environment.json", "log.txt", "float.safetensors"),
}
"""Files with times in them, or that are written more than once: their bytes are not compared, nor checkpoints'."""

State = dict[str, str]
_STEP = re.compile(r"step-\d{8}")


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
    """

    tokens: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]


def _same(tokens: Callable[[Path], list[str]]) -> Command:
    return Command(tokens, tokens)


def train_tokens(folder: Path, steps: int, *, cap: int = 0) -> list[str]:
    """Return the command line of a training run in FOLDER/out/run; `cap` is in seconds, 0 for none."""
    data = next((folder / "in" / "data" / "datasets").iterdir())
    length = ["--train.iterations", str(steps), "--run.checkpoint-every", str(EVERY)]
    return [
        *("train", "--folder", str(folder / "out" / "run"), *TINY, *length),
        *("--data.path", str(data), "--data.tokenizer", "bytes", "--train.max-wallclock-seconds", str(cap)),
    ]


COMMANDS = {
    "compress": _same(lambda at: ["compress", f"{at}/in/w.pt", "-o", f"{at}/out/m.birdie", "--coder", "fast"]),
    "compress --budget": _same(
        lambda at: [
            *("compress", f"{at}/in/w.pt", "-o", f"{at}/out/m.birdie"),
            *("--budget", "9000", "--coder", "fast"),
        ]
    ),
    "decompress .safetensors": _same(
        lambda at: ["decompress", f"{at}/in/m.birdie", "-o", f"{at}/out/m.safetensors"],
    ),
    "decompress .pt": _same(lambda at: ["decompress", f"{at}/in/m.birdie", "-o", f"{at}/out/m.pt"]),
    "decoder": _same(lambda at: ["script", "--kind", "decoder", "-o", f"{at}/out/decode.py"]),
    "prepare": _same(lambda at: ["prepare", f"{at}/in/*.txt", "--tokenizer", "bytes", "-o", f"{at}/out/data"]),
    "train": Command(lambda at: train_tokens(at, 2 * EVERY), lambda at: [*train_tokens(at, 2 * EVERY), "--resume"]),
}


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder with FOLDER/in, which no command may change, and an empty FOLDER/out.

    Raises:
        RuntimeError: a command that nobody disturbs fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "out").mkdir()
        _make_inputs(folder / "in")
        yield folder


def _make_inputs(source: Path) -> None:
    source.mkdir()
    torch.manual_seed(0)
    torch.save({"a": torch.randn(64, 96), "b": torch.randn(48, 64), "c": torch.randn(64)}, source / "w.pt")
    text = Path(__file__).read_text(encoding="utf-8")
    for index in range(4):
        (source / f"{index}.txt").write_text(text[index * 500 :], encoding="utf-8")
    for tokens in (
        ["compress", str(source / "w.pt"), "-o", str(source / "m.birdie"), "--coder", "fast"],
        ["prepare", str(source / "*.txt"), "--tokenizer", "bytes", "-o", str(source / "data")],
    ):
        if (end := call(tokens)).code:
            raise RuntimeError(end.message)


def call(tokens: list[str]) -> End:
    """Run a command in this process."""
    errors, answer = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(answer):
        code = run(build_app, tokens)
    return End(code, errors.getvalue(), answer.getvalue())


def forked(tokens: list[str], arm: Callable[[], object] = int, measure: Callable[[], int] = int) -> End:
    """Run a command in a fork of this process, between `arm` and `measure`."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
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
    with os.fdopen(source) as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    return End(*json.loads(text)) if text else End(os.waitstatus_to_exitcode(status), "the process was killed")


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

    Checkpoints have one name for all, as a run that was stopped has other ones. More than are kept are strays.
    """
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            step = _STEP.search(str(path.parent))
            passing = step or path.name in PASSING
            name = _STEP.sub("step-N", str(path.relative_to(folder)))
            digests[name] = "" if passing else hashlib.sha256(path.read_bytes()).hexdigest()
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
