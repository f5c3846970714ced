"""The command line from outside: results, `--json`, errors in one sentence, exit codes, no partial files."""

import bisect
import colorsys
import contextlib
import io
import json
import math
import os
import pickle
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import birdie
import birdie.cli
from birdie.cli import build_app
from birdie.cli.console import exit_code_of, run, stop_on_signal
from birdie.compress import registry
from birdie.gpt.data.shards import read_shard, write_shard
from birdie.gpt.data.tokenizer import ByteTokenizer
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.train.training_checkpoint import load_checkpoint
from birdie.system.callbacks import no_message
from birdie.system.distributed import World
from birdie.system.files import atomic_path
from birdie.system.locks import locked_folder
from tests.ranks import run_as_ranks

Ask = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """`ask("inspect", file)` returns (exit code, the JSON object, stderr)."""

    def call(*tokens: object) -> tuple[int, dict[str, Any], str]:
        code = run(build_app, [*map(str, tokens), "--json"])
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert len(lines) == 1, f"stdout must carry one JSON object, got {out!r}"
        return code, json.loads(lines[0]), err

    return call


TINY = [
    "--model.vocab-size", "300", "--model.num-layers", "2", "--model.model-dim", "32", "--model.num-heads", "2",
    "--model.num-kv-heads", "1", "--train.train-batch-tokens", "512", "--train.train-seq-len", "64",
    "--train.accumulation", "2", "--train.warmup-steps", "1", "--train.iterations", "6",
    "--train.max-wallclock-seconds", "0", "--validation.every", "3", "--validation.max-tokens", "2000",
    "--export.effort", "fast",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set: the sources of birdie itself."""
    root = tmp_path_factory.mktemp("prepared")
    sources = Path(__file__).resolve().parents[2] / "birdie" / "**" / "*.py"
    code = run(build_app, ["prepare", str(sources), "--tokenizer", "bytes", "-o", str(root), "--json"])
    assert code == 0
    return root


@pytest.fixture(scope="module")
def data_flags(prepared: Path) -> list[str]:
    folder = next((prepared / "datasets").iterdir())
    return ["--data.path", str(folder), "--data.tokenizer", "bytes"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The folder of a finished run, with its artifact."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert run(build_app, ["train", "--folder", str(folder), *TINY, *data_flags, "--json"]) == 0
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file({"a.weight": torch.randn(256, 192), "b.weight": torch.randn(64, 256), "b.bias": torch.randn(64)}, path)
    return path


HELLO = '''"""`birdie hello`: greet somebody."""

GROUP = "Greetings"


def command(name: str, /, *, json: bool = False) -> None:
    """Greet somebody, and show a long help text."""
    print(f"Hello, {name}!")
'''


def test_a_new_command_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    monkeypatch.setattr(birdie.cli, "__path__", [*birdie.cli.__path__, str(tmp_path)])
    try:
        assert run(build_app, ["--help"]) == 0
        assert re.search("Greetings.*hello +Greet somebody\\.", capsys.readouterr().out, re.DOTALL)
        assert run(build_app, ["hello", "world"]) == 0
        assert capsys.readouterr().out == "Hello, world!\n"
        assert run(build_app, ["hello", "--help"]) == 0
        assert "long help text" in capsys.readouterr().out
        assert run(build_app, ["helo"]) == 1
        assert '"hello"' in capsys.readouterr().err
    finally:
        sys.modules.pop("birdie.cli.hello", None)


@pytest.mark.parametrize("command", ["train", "submit", "evaluate"])
def test_help_shows_the_marked_settings_and_names_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def flags(*tokens: str) -> set[str]:
        assert run(build_app, [command, *tokens]) == 0
        shown = capsys.readouterr().out
        assert (f"birdie {command} --help-all" in shown.splitlines()[-1]) == (tokens == ("--help",))
        names = re.sub(r"\n│ +(?=\.)", "", shown)  # a long name goes on in the next line
        return set(re.findall(r"--[a-z][\w.-]*\w", names))

    short, long = flags("--help"), flags("--help-all")
    assert short < long | {"--help-all"}
    assert 5 < len(short) < 45
    assert len(long) > 2 * len(short)
    assert {"--json", "--device"} <= short


def test_compress_then_decompress(ask: Ask, weights: Path, tmp_path: Path) -> None:
    code, answer, _ = ask("compress", weights, "-o", tmp_path / "w.birdie", "--lossless")
    assert code == 0
    assert answer["bytes"] == (tmp_path / "w.birdie").stat().st_size
    assert {"path", "bytes", "budget", "weights", "bits_per_weight", "tensors"} <= answer.keys()
    assert {"name", "shape", "dtype", "scheme", "bytes"} <= answer["tensors"][0].keys()
    assert ask("decompress", tmp_path / "w.birdie", "-o", tmp_path / "back.safetensors")[0] == 0
    original, decoded = load_file(weights), load_file(tmp_path / "back.safetensors")
    assert original.keys() == decoded.keys()
    assert all(torch.equal(original[name], decoded[name]) for name in original)


def test_without_json_commands_print_tables(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["compress", str(weights), "-o", str(tmp_path / "w.birdie"), "--scheme", "a.*=int6"]) == 0
    out = capsys.readouterr().out
    assert "× smaller" in out
    assert out.splitlines()[-1].endswith(f"birdie inspect {tmp_path / 'w.birdie'}")
    assert run(build_app, ["inspect", str(tmp_path / "w.birdie")]) == 0
    out = capsys.readouterr().out
    assert "a.weight" in out
    assert "256×192" in out


def test_compress_prints_a_row_per_scheme_and_inspect_a_row_per_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {f"{number}.weight": torch.randn(16, 16) for number in range(50)}
    norms = {f"{number}.norm": torch.ones(16) for number in range(50)}
    torch.save({**layers, **norms, "tied": layers["0.weight"]}, tmp_path / "m.pt")
    file = str(tmp_path / "m.birdie")
    assert (
        run(
            build_app, ["compress", str(tmp_path / "m.pt"), "-o", file, "--scheme", "*.weight=int6", "--effort", "fast"]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 16
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [(name, tensors, weights) for name, tensors, weights, *_ in rows] == [
        ("grid", "50", "12,800"),
        ("fp16", "50", "800"),
        ("alias", "1", ""),
        ("total", "101", "13,600"),
    ]
    assert run(build_app, ["inspect", file]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*layers, *norms, "tied"))
    with mock.patch("birdie.cli.inspect._MOST_ROWS", 100):  # a table of more rows takes minutes
        assert run(build_app, ["inspect", file]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 16
    assert f"each of the 101 tensors: birdie inspect {file} --json" in out


def test_train_leaves_a_run_folder(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["bytes"] == (trained / "model.birdie").stat().st_size
    assert summary["steps"] == 6
    assert abs(summary["bpb_artifact"] - summary["bpb_float"]) < 0.1
    assert (trained / "recipe.toml").is_file()
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step-00000006"]
    assert not list(trained.rglob(".*")), "neither the lock nor temporary files are left"


@pytest.fixture(scope="module")
def again(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(JSON, log) of the run once more, from its recipe, with a profile and another evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "again"
    out, err = io.StringIO(), io.StringIO()
    command = ["train", str(trained / "recipe.toml"), "--folder", str(folder), "--evaluation.stride", "8", "--profile"]
    shown = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with shown[0], shown[1], mock.patch("birdie.gpt.train.profile.RECORDED", 1):
        assert run(build_app, [*command, "--json"]) == 0
    return json.loads(out.getvalue()), err.getvalue()


def test_a_recipe_file_trains_again_with_a_profile_too(again: tuple[dict[str, Any], str], trained: Path) -> None:
    answer, first = again[0], json.loads((trained / "summary.json").read_text())
    assert answer["bpb_float"] == first["bpb_float"]
    weights, same = birdie.load(trained / "model.birdie"), birdie.load(answer["artifact"])
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_profile_shows_where_a_step_goes(again: tuple[dict[str, Any], str]) -> None:
    answer, err = again
    assert "not counted as training time" in err
    assert {"step", "forward", "optimizer"} <= answer["profile"].keys()
    assert max(answer["profile"].values()) == answer["profile"]["step"]
    folder = Path(answer["run"]) / "profile"
    assert "optimizer" in (folder / "table.txt").read_text()
    assert (folder / "trace.json.gz").stat().st_size > 1000


def test_evaluate_repeats_the_score(ask: Ask, trained: Path) -> None:
    code, answer, _ = ask("evaluate", trained / "model.birdie")
    summary = json.loads((trained / "summary.json").read_text())
    assert code == 0
    assert answer["bpb"] == pytest.approx(summary["bpb_artifact"], rel=1e-6)
    assert {"bpb", "val_loss", "tokens", "bytes", "documents", "ci95", "seconds"} <= answer.keys()
    assert set(answer["seconds"]) == {"import", "decode", "compile", "score", "adapt", "other"}


STREAMING = ["--mode", "streaming", "--streaming.chunk", "8"]
EVALUATIONS = {
    "sliding": (["--stride", "8"], "sliding windows of 64, stride 8"),
    "documents": (["--stride", "8", "--documents"], "windows of 64 in each document, stride 8"),
    "longer": (["--seq-len", "128", "--batch-seqs", "3"], "non-overlapping windows of 128"),
    "stream": (STREAMING, "streaming, context 64, chunks of 8 tokens"),
    "segments": (
        [*STREAMING, "--streaming.segments", "3", "--streaming.sinks", "2"],
        "streaming in 3 segments, context 64 and 2 sinks",
    ),
    "quantized": ([*STREAMING, "--streaming.kv-bits", "4"], "streaming, context 64, chunks of 8 tokens, keys and"),
    "exact": ([*STREAMING, "--streaming.exact"], "exact streaming, context 64"),
    "n-gram": (["--ngram.enabled"], "non-overlapping windows of 64, n-gram logit bias"),
}


@pytest.fixture(scope="module")
def evaluations(trained: Path) -> dict[str, dict[str, Any]]:
    results = {name: evaluated(trained, *flags) for name, (flags, _) in EVALUATIONS.items()}
    return {"plain": evaluated(trained)} | results


def evaluated(trained: Path, *flags: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(build_app, ["evaluate", str(trained / "model.birdie"), "--json", *flags]) == 0
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def test_every_mode_scores_the_same_targets(evaluations: dict[str, dict[str, Any]]) -> None:
    plain = evaluations["plain"]
    for name, (_, method) in EVALUATIONS.items():
        assert evaluations[name]["method"].startswith(method)
    # except for windows of twice the length, which leave out a longer remainder
    same = [result for name, result in evaluations.items() if name != "longer"]
    assert len({(result["tokens"], result["text_bytes"]) for result in same}) == 1
    assert evaluations["exact"]["bpb"] == pytest.approx(plain["bpb"], abs=1e-4)
    assert len({result["bpb"] for result in evaluations.values()}) >= 5  # after six steps the context has little effect
    alike = [result["bpb"] for name, result in evaluations.items() if name != "n-gram"]
    assert alike == pytest.approx([plain["bpb"]] * len(alike), abs=2e-3)
    assert evaluations["n-gram"]["bpb"] < plain["bpb"] - 1


def test_the_recipe_in_an_artifact_sets_how_it_is_scored(again: tuple[dict[str, Any], str], ask: Ask) -> None:
    answer = again[0]
    assert answer["evaluation"]["method"] == "non-overlapping windows of 64"
    assert answer["evaluation_asked"]["method"] == "sliding windows of 64, stride 8"
    artifact = answer["artifact"]
    assert ask("evaluate", artifact)[1]["bpb"] == answer["evaluation_asked"]["bpb"]
    assert ask("evaluate", artifact, "--stride", "0")[1]["bpb"] == answer["evaluation"]["bpb"]
    assert "stride" not in ask("evaluate", artifact, "--mode", "streaming")[1]["settings"]


SGD = [
    *("--mode", "ttt-sgd", "--ttt-sgd.lr", "0.3", "--ttt-sgd.epochs", "2"),
    *("--ttt-sgd.chunk-tokens", "512", "--ttt-sgd.batch-seqs", "2"),
]


def test_evaluate_trains_by_sgd_and_ctrl_c_ends_it(
    evaluations: dict[str, dict[str, Any]], trained: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, plain = evaluated(trained, *SGD), evaluations["plain"]
    assert result["bpb"] < plain["bpb"] - 0.1
    assert (result["tokens"], result["text_bytes"]) == (plain["tokens"], plain["text_bytes"])
    assert result["method"] == "non-overlapping windows of 64, SGD on chunks of 512 tokens"
    assert result["seconds"]["adapt"] > 0
    assert result["settings"]["ttt_sgd"]["epochs"] == 2
    assert "TTT by SGD" in result["diagnostics"]
    assert ("ttt_sgd" in plain["settings"], plain["diagnostics"], plain["seconds"]["adapt"]) == (False, "", 0)

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr("birdie.gpt.score.sgd.SGDTrainer.train", interrupted)
    code, answer, _ = ask("evaluate", trained / "model.birdie", *SGD)
    assert (code, answer["error"]["type"]) == (130, "KeyboardInterrupt")


def test_evaluate_trains_on_documents_and_in_phases(trained: Path, tmp_path: Path) -> None:
    """Two documents; in phases the model trains on the longer one before the other is scored."""
    tokenizer, shard = ByteTokenizer(), tmp_path / "fineweb_val_000000.bin"
    texts = [tokenizer.encode(Path(module.__file__ or "").read_text()[:2500]) for module in (bisect, colorsys)]
    write_shard(shard, np.concatenate([[1], texts[0], [1], texts[1][:1500]]))
    many = ["--data", str(shard), "--max-tokens", "0"]
    plain = evaluated(trained, *many)
    parts = [flag for part in ("k", "o", "mlp", "head") for flag in ("--ttt-lora.parts", part)]
    lora = [
        *many,
        *("--ttt-lora.rank", "4", "--ttt-lora.lr", "0.01", "--ttt-lora.chunk", "64", "--ttt-lora.batch-docs", "1"),
        *parts,
    ]
    result = evaluated(trained, "--mode", "ttt-lora", *lora)
    assert (result["tokens"], result["text_bytes"]) == (plain["tokens"], plain["text_bytes"])
    assert result["bpb"] < plain["bpb"] - 0.05
    assert result["method"] == "documents in chunks of 64, windows of 64, LoRA of rank 4 per document"
    assert result["settings"]["ttt_lora"]["parts"] == ["k", "o", "mlp", "head"]
    assert {"ttt_sgd", "ttt_multi_phase"}.isdisjoint(result["settings"])
    assert result["seconds"]["adapt"] > 0
    sgd = {"prefix-docs": "1", "phases": "1", "lr": "0.1", "chunk-tokens": "2048", "batch-seqs": "2"}
    phases = ["--mode", "ttt-multi-phase", *lora]
    phases += [flag for name, value in sgd.items() for flag in (f"--ttt-multi-phase.{name}", value)]
    phased = evaluated(trained, *phases)
    assert phased["bpb"] < result["bpb"]
    assert phased["diagnostics"].startswith(result["diagnostics"].split(";")[0])
    assert " 1 phases, " in phased["diagnostics"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--mode", "ttt-lora", "--streaming.chunk", "8"], "streaming has no part in scoring mode ttt-lora"),
        (["--mode", "ttt-lora", "--ngram.enabled"], "ngram"),
        (["--mode", "ttt-lora", "--temperature", "0.9"], "temperature 0.9"),
        (["--mode", "ttt-lora", "--ttt-lora.chunk", "65"], "65 tokens do not fit windows of 64"),
        (["--mode", "ttt-lora", "--ttt-lora.parts", "w"], "--ttt-lora.parts"),
        (
            ["--mode", "ttt-lora", "--ttt-multi-phase.phases", "1"],
            "ttt_multi_phase has no part in scoring mode ttt-lora",
        ),
        (["--mode", "ttt-adam"], "'ttt-adam'"),
        (["--adapt", "sgd"], "--adapt"),
        (["--mode", "ttt-sgd", "--ttt-sgd.rate", "1"], "Did you mean --ttt-sgd.lr"),
        (["--mode", "ttt-sgd", "--ttt-sgd.lr", "much"], "much"),
        (["--mode", "ttt-sgd", "--ttt-sgd.freeze-blocks", "3"], "block 2"),
        (["--ttt-sgd.lr", "1"], "ttt_sgd has no part in scoring mode windows"),
        (["--mode", "ttt-sgd", "--state", "no"], "--state"),
        (["--stride", "65"], "stride 65 is longer than windows of 64"),
        (["--streaming.sinks", "2"], "streaming has no part in scoring mode windows"),
        ([*STREAMING, "--streaming.kv-bits", "5"], "kv_bits is 5"),
        ([*STREAMING, "--stride", "8"], "stride has no part in scoring mode streaming"),
        (["--mode", "streaming", "--streaming.chunk", "64", "--streaming.sinks", "1"], "1 sinks"),
        (["--temperature", "0"], "temperature is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(trained: Path, ask: Ask, flags: list[str], why: str) -> None:
    code, answer, _ = ask("evaluate", trained / "model.birdie", *flags)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert why in answer["error"]["message"]


RANKED = [["--mode", "streaming", "--streaming.segments", "4"], ["--ngram.enabled"]]


def commands_of_a_rank(recipe: str, weights: str, ports: list[int]) -> None:
    """Train, score in each way of RANKED, and compress, with a line on stderr for each time that a rank scores."""

    def observed(*arguments: Any, world: World, **options: Any) -> Any:
        sys.stderr.write(f"rank {world.rank} of {world.size} scores\n")
        return evaluate(*arguments, world=world, **options)

    commands = [["train", recipe, "--folder", "run"], *(["evaluate", "run/model.birdie", *flags] for flags in RANKED)]
    commands.append(["compress", weights, "--bits", "4", "--effort", "fast", "-o", "ranks.birdie"])
    for tokens, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with mock.patch("birdie.gpt.run.evaluation.evaluate", observed if tokens[0] == "train" else evaluate):
            assert run(build_app, [*tokens, "--json"]) == 0


@pytest.fixture(scope="module")
def two_ranks(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a group of two ranks: its run, its answers in `stdout`, a file compressed by it and by one rank."""
    folder = tmp_path_factory.mktemp("ranks")
    generator = torch.Generator().manual_seed(0)
    state = {f"blocks.{index}.w": torch.randn(64 + 8 * index, 96, generator=generator) for index in range(7)}
    weights = folder / "weights.safetensors"
    save_file(state, weights)
    with contextlib.ExitStack() as stack:  # a port for each command: the next group may begin before the last one ends
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(RANKED) + 2)]
        ports = [free.getsockname()[1] for free in sockets]
    run_as_ranks(commands_of_a_rank, (str(trained / "recipe.toml"), str(weights), ports), 2, folder, {})
    assert (
        run(build_app, ["compress", str(weights), "--bits", "4", "--effort", "fast", "-o", str(folder / "one.birdie")])
        == 0
    )
    return folder


def test_ranks_train_and_all_of_them_score(two_ranks: Path, trained: Path) -> None:
    """The settings of the score, and the limit of 600 s, are meant for all GPUs."""
    lines = (two_ranks / "stderr").read_text()
    assert lines.count("rank 0 of 2 scores") == lines.count("rank 1 of 2 scores") >= 1
    two, *_ = map(json.loads, (two_ranks / "stdout").read_text().splitlines())
    one = json.loads((trained / "summary.json").read_text())
    assert two["bpb_float"] == pytest.approx(one["bpb_float"], abs=1e-4)
    assert two["bpb_artifact"] == pytest.approx(evaluated(two_ranks / "run")["bpb"], rel=1e-6)


def test_ranks_agree_on_a_score(two_ranks: Path) -> None:
    _, *scores, _ = map(json.loads, (two_ranks / "stdout").read_text().splitlines())
    for flags, two in zip(RANKED, scores, strict=True):
        one = evaluated(two_ranks / "run", *flags)
        assert two["bpb"] == pytest.approx(one["bpb"], rel=1e-6)
        assert all(two[name] == one[name] for name in ("tokens", "text_bytes", "documents"))


def test_ranks_share_tensors_and_write_the_file_of_one_process(two_ranks: Path) -> None:
    """One rank prints: otherwise the answers could not be read one by one."""
    assert (two_ranks / "ranks.birdie").read_bytes() == (two_ranks / "one.birdie").read_bytes()


class Terminal(io.TextIOBase):
    """A terminal as stderr, which sends a signal after step 3; SIGHUP as it closes, and every later write fails."""

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.text = number, ""
        self.screen, self.line = pty.openpty()

    def write(self, text: str) -> int:
        os.write(2, text.encode())
        if self.screen:
            self.text += os.read(self.screen, 1 << 16).decode()
            if "step 3 " in text:
                if self.number == signal.SIGHUP:
                    os.close(self.screen)
                    self.screen = 0
                os.kill(os.getpid(), self.number)
        return len(text)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        kept = os.dup(2)
        os.dup2(self.line, 2)
        try:
            with mock.patch.object(sys, "stderr", self):
                yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(self.line)
            if self.screen:
                with contextlib.suppress(OSError):  # the end: nobody has the terminal open, and all of it is read
                    while rest := os.read(self.screen, 1 << 16):  # what the system had not passed on yet
                        self.text += rest.decode()
                os.close(self.screen)


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=NIGHTLY), pytest.param(signal.SIGHUP, marks=NIGHTLY)]
)
def test_a_signal_saves_and_resume_goes_on(number: signal.Signals, trained: Path, tmp_path: Path, ask: Ask) -> None:
    folder, terminal = tmp_path / "stopped", Terminal(number)
    command = ["train", trained / "recipe.toml", "--folder", folder, "--run.log-every", "1", "--validation.every", "0"]
    with terminal.opened():
        assert run(build_app, [*map(str, command), "--train.iterations", "100000"]) == 128 + number
    if number != signal.SIGHUP:
        assert "saved in" in terminal.text
        assert f"Stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}." in terminal.text
    assert not list(folder.rglob(".*"))
    step = load_checkpoint(folder / "checkpoints").step
    code, answer, err = ask(*command, "--train.iterations", step + 2, "--resume")
    assert (code, answer["steps"]) == (0, step + 2)
    assert f"resumed at step {step}" in err


def test_a_second_run_on_a_folder_fails_at_once_and_says_who_has_it(trained: Path, ask: Ask) -> None:
    with locked_folder(trained, no_message):
        code, answer, _ = ask("train", trained / "recipe.toml", "--folder", trained, "--resume")
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert f"in use by process {os.getpid()} on " in answer["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_prints_json_and_leaves_nothing_half_written(
    number: signal.Signals, ask: Ask, weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: object, path: Path, *__: object, **___: object) -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            os.kill(os.getpid(), number)
            time.sleep(60)

    handlers = [signal.getsignal(other) for other in signal.Signals]
    monkeypatch.setattr("birdie.artifact.repack.write_model", interrupted)
    code, answer, err = ask("compress", weights, "-o", tmp_path / "w.birdie")
    assert (code, answer["error"]["type"]) == (128 + number, "KeyboardInterrupt")
    assert f"Stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}" in err
    assert list(tmp_path.iterdir()) == [weights]
    assert [signal.getsignal(other) for other in signal.Signals] == handlers


def test_the_first_signal_asks_the_second_ends_and_the_third_kills(capfd: pytest.CaptureFixture[str]) -> None:
    def stubborn() -> None:
        with stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    assert exit_code_of(stubborn) == 143
    assert "SIGTERM again stops at once" in capfd.readouterr().err


class Stubborn:
    """An object that gets a signal while Python removes it, where no exception leaves."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_python_would_drop_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    ended = []

    def command() -> None:
        Stubborn()
        time.sleep(30)
        ended.append(True)

    handlers, hook = [signal.getsignal(number) for number in signal.Signals], sys.unraisablehook
    assert exit_code_of(command) == 143
    assert not ended
    assert "Traceback" not in capfd.readouterr().err
    assert ([signal.getsignal(number) for number in signal.Signals], sys.unraisablehook) == (handlers, hook)


@pytest.mark.parametrize(
    "change", [["--model.logit-softcap", "5"], ["--data.order", "shuffled"], ["--train.train-seq-len", "32"]]
)
def test_resuming_with_other_settings_is_refused(trained: Path, ask: Ask, change: list[str]) -> None:
    recipe = (trained / "recipe.toml").read_text()
    code, answer, _ = ask("train", trained / "recipe.toml", "--folder", trained, "--resume", *change)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert change[0].removeprefix("--").replace("-", "_") in answer["error"]["message"]
    assert (trained / "recipe.toml").read_text() == recipe


@pytest.mark.nightly
def test_a_rank_killed_under_torchrun_costs_no_more_than_the_checkpoints_interval(
    trained: Path, tmp_path: Path
) -> None:
    """`kill -9` of one of two ranks: torchrun restarts both, and they continue from the last checkpoint."""
    folder, every = tmp_path / "two", 2
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "birdie"]
    flags = ["--run.checkpoint-every", str(every), "--train.iterations", "40", "--run.log-every", "1"]
    command = [sys.executable, "-m", *launcher, "train", str(trained / "recipe.toml"), "--folder", str(folder), *flags]
    running = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    seen: list[str] = []
    killed_at = 0
    for line in running.stderr:
        seen.append(line)
        step = re.match(r"step (\d+)  loss", line)
        if step and int(step[1]) == 7 and not killed_at:
            killed_at = 7
            os.kill(worker_of(running.pid), signal.SIGKILL)
    out = running.communicate()[0]
    assert running.returncode == 0, "".join(seen)
    resumed = [int(match[1]) for match in map(re.compile(r".*resumed at step (\d+)").match, seen) if match]
    assert len(resumed) == 1
    assert killed_at - every < resumed[0] < 40
    uninterrupted = tmp_path / "one"
    arguments = ["train", str(trained / "recipe.toml"), "--folder", str(uninterrupted), *flags, "--json"]
    assert run(build_app, arguments) == 0
    one = json.loads((uninterrupted / "summary.json").read_text())
    # only the last line: the rank that lost its peer printed an error object
    assert json.loads(out.splitlines()[-1])["bpb_float"] == pytest.approx(one["bpb_float"], abs=1e-4)


def worker_of(launcher: int) -> int:
    """Return the process id of the last rank that torchrun (process id `launcher`) started."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True, check=True)
    return int(children.stdout.split()[-1])


class Bomb:
    """Object whose unpickling would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_a_pickle_cannot_run_code(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    code, answer, _ = ask("compress", tmp_path / "evil.pt", "-o", tmp_path / "out.birdie")
    assert code == 1
    assert answer["error"]["type"] == "WeightsError"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out.birdie").exists()


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--budget", "1kB"], "BudgetError", "smallest"),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--budget", "much"], "ConfigError", "'much'"),
        (
            ["compress", "{weights}", "-o", "{tmp}/o.birdie", "--budget", "9" * 400 + "GB"],
            "ConfigError",
            "out of range",
        ),
        (["compress", "{weights}", "-o", "{tmp}"], "OutputError", "is a folder"),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--scheme", "*=int66"], "ConfigError", "int66"),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--scheme", "int66"], "ConfigError", "int66"),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--scheme", "*="], "ConfigError", "PATTERN=SPEC"),
        (
            ["compress", "{weights}", "-o", "{tmp}/o.birdie", "--scheme", "int8", "--scheme", "sigma:0.3"],
            "ConfigError",
            "--scheme int8 and --scheme sigma:0.3 are both for all matrices",
        ),
        (
            ["compress", "{weights}", "-o", "{tmp}/o.birdie", "--scheme", "a.*=int8", "--scheme", "a.*=int6"],
            "ConfigError",
            "'a.*' has two rules",
        ),
        (
            ["compress", "{weights}", "-o", "{tmp}/o.birdie", "--tune", "soon"],
            "ConfigError",
            "'soon' is not a duration",
        ),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--calibrate", "x"], "ConfigError", "neither a run folder"),
        (
            ["compress", "{weights}", "-o", "{tmp}/o.birdie", "--device", "cuda"],
            "ConfigError",
            "'cuda' is not available",
        ),
        (["compress", "{weights}", "-o", "{tmp}/o.birdie", "--bugdet", "1MB"], "ConfigError", "--budget"),
        (["compress", "{weights}", "-o", "{weights}/o.birdie"], "OutputError", "cannot write"),
        (["compress", "{tmp}/none.pt", "-o", "{tmp}/o.birdie"], "WeightsError", "none.pt"),
        (["compress", "{nan}", "-o", "{tmp}/o.birdie"], "WeightsError", "'bad'"),
        (["inspect", "{tmp}/none.birdie"], "ArtifactError", "none.birdie"),
        (["inspect", "{weights}"], "ArtifactError", "weights.safetensors"),
        (["evaluate", "{plain}"], "ArtifactError", "birdie GPT"),
        (["decompress", "{plain}", "-o", "{tmp}/o.txt"], "ConfigError", ".safetensors"),
        (["prepare"], "ConfigError", "source"),
        (["prepare", "{tmp}/nothing*"], "DataError", "nothing"),
        (["prepare", "stdlib", "--caseops", "--tokenizer", "bytes", "-o", "{tmp}"], "ConfigError", "operators"),
        (["train", "{tmp}/none.toml"], "ConfigError", "none.toml"),
        (["train", "--data.path", "{tmp}/nowhere"], "DataError", "nowhere"),
        (["tarin"], "ConfigError", "train"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    ask: Ask, weights: Path, tmp_path: Path, tokens: list[str], kind: str, message: str
) -> None:
    nan, plain = tmp_path / "nan.safetensors", tmp_path / "plain.birdie"
    save_file({"bad": torch.full((128, 128), float("nan"))}, nan)
    assert ask("compress", weights, "-o", plain)[0] == 0
    paths = {"weights": weights, "tmp": tmp_path, "nan": nan, "plain": plain}
    code, answer, _ = ask(*(token.format(**paths) for token in tokens))
    assert code == 1
    assert answer["error"]["type"] == kind, answer
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {weights.name, nan.name, plain.name}, "a partial file was left behind"


def test_without_json_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(build_app, ["inspect", str(tmp_path / "none.birdie")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_specs_mean_the_same_on_the_command_line_and_in_python(ask: Ask, tmp_path: Path) -> None:
    """A scheme for all tensors, a rule for each scheme that exists, and a rule after the scheme for the rest."""
    torch.manual_seed(0)
    specs = {word: scheme.example for word, scheme in registry.words().items()}
    state = {f"{word}.weight": torch.randn(16, 16) for word in specs}
    torch.save(state, tmp_path / "m.pt")
    rules = [(f"{word}.*", spec) for word, spec in specs.items()]
    first = rules[0]
    for flags, scheme in (
        (["int6"], "int6"),
        ([f"{name}={spec}" for name, spec in rules], rules),
        (["int8", f"{first[0]}={first[1]}"], [first, ("*", "int8")]),
    ):
        tokens = [token for flag in flags for token in ("--scheme", flag)]
        command = ("compress", tmp_path / "m.pt", "-o", tmp_path / "cli.birdie", "--effort", "fast", "--overwrite")
        code, answer, _ = ask(*command, *tokens)
        assert code == 0, answer
        birdie.save(state, tmp_path / "python.birdie", scheme=scheme, effort="fast")
        assert (tmp_path / "cli.birdie").read_bytes() == (tmp_path / "python.birdie").read_bytes()


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tensors may contain markup of rich, or control sequences of the terminal."""
    torch.save({"[/x]": torch.zeros(3), "a[bold].w": torch.zeros(3), "\x1b[2Jclear": torch.zeros(3)}, tmp_path / "m.pt")
    assert run(build_app, ["compress", str(tmp_path / "m.pt"), "-o", str(tmp_path / "m[red].birdie")]) == 0
    assert run(build_app, ["inspect", str(tmp_path / "m[red].birdie")]) == 0
    out, err = capsys.readouterr()
    assert "[/x]" in out
    assert "a[bold].w" in out
    assert "\x1b[2J" not in out + err


def test_caseops_from_text_to_score(ask: Ask, tmp_path: Path) -> None:
    """--caseops prepares it; training and scoring recognize it by the tokenizer model; the sidecar counts the bytes."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"Line {i} has {i * i} words for NASA and McX" for i in range(3000)))
    code, prepared, _ = ask("prepare", text, "--caseops", "--vocab-size", "300", "-o", tmp_path / "data")
    assert (code, prepared["tokenizer_kind"]) == (0, "caseops")
    folder = Path(prepared["folder"])
    flags = ["--data.path", folder, "--data.tokenizer", prepared["tokenizer"]]
    code, _, err = ask("train", "--folder", tmp_path / "run", *TINY, *flags)
    assert code == 0
    assert "the byte sidecar counts" in err
    artifact = tmp_path / "run" / "model.birdie"
    code, score, _ = ask("evaluate", artifact)
    assert code == 0
    counts = np.array(read_shard(folder / "text_val_bytes_000000.bin"))
    assert counts.sum() == prepared["val"]["bytes"]
    assert score["text_bytes"] == counts[1 : 1 + score["tokens"]].sum()
    assert score["bpb"] == pytest.approx(score["val_loss"] * score["tokens"] / math.log(2) / score["text_bytes"])
    assert ask("sample", artifact, "--prompt", "Line NASA", "--tokens", "3")[1]["text"].startswith("Line NASA")

    counts[np.flatnonzero(counts)[1]] += 1  # a plausible count: the score must follow the sidecar
    write_shard(folder / "text_val_bytes_000000.bin", counts)
    assert ask("evaluate", artifact)[1]["text_bytes"] == score["text_bytes"] + 1
    (folder / "text_val_bytes_000000.bin").unlink()
    for again in (["evaluate", artifact], ["train", "--folder", tmp_path / "again", *TINY, *flags]):
        code, answer, _ = ask(*again)
        assert (code, answer["error"]["type"]) == (1, "DataError")
        assert "has no byte sidecar (text_val_bytes_000000.bin)" in answer["error"]["message"]


def test_a_wrong_tokenizer_is_refused(ask: Ask, trained: Path, data_flags: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} has {i * i} words and more" for i in range(3000)))
    ask("prepare", text, "--documents", "line", "--vocab-size", "300", "-o", tmp_path / "other")
    model = next((tmp_path / "other" / "tokenizers").iterdir())
    code, answer, _ = ask("evaluate", trained / "model.birdie", "--tokenizer", model)
    assert (code, answer["error"]["type"]) == (1, "DataError")
    flags = [*data_flags[:2], "--data.tokenizer", model]
    code, answer, _ = ask("train", "--folder", tmp_path / "run", *TINY, *flags)
    assert (code, answer["error"]["type"]) == (1, "DataError")
    assert not (tmp_path / "run").exists()
