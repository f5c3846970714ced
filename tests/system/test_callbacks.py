"""Progress and start-up time, as a user sees them."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import birdie
from birdie.system.callbacks import LONGEST_SILENCE, Progress, bar, in_lines, reporting
from birdie.system.platform import process_seconds
from birdie.system.provenance import StartupTimer


class Bars(list[tuple[str, list[tuple[float, float | None]]]]):
    """Bars that were shown, each with its description and updates; `open`: those that were not closed."""

    open = 0


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    """Record the bars of the test instead of showing them."""
    recorded = Bars()

    @contextmanager
    def record(description: str, _unit: str) -> Iterator[Progress]:
        recorded.append((description, []))
        recorded.open += 1
        try:
            yield lambda done, total: recorded[-1][1].append((done, total))
        finally:
            recorded.open -= 1

    monkeypatch.setattr("birdie.system.callbacks.bar", record)
    return recorded


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = module(batch).square().mean()
    return output


def calls(folder: Path) -> dict[str, Callable[[Progress | bool | None], object]]:
    """Return the functions of the API that take `progress`, each with its other arguments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    batches = [torch.randn(32, 64) for _ in range(5)]
    file = folder / "x.birdie"
    return {
        "save": lambda progress: birdie.save(model, file, effort="fast", progress=progress),
        "save_object": lambda progress: birdie.save_object(model.state_dict(), file, effort="fast", progress=progress),
        "calibrate": lambda progress: birdie.calibrate(model, batches, loss, progress=progress),
        "offload": lambda progress: birdie.calibrate(model, batches, loss, offload=True, progress=progress),
    }


@pytest.mark.parametrize("name", ["save", "save_object", "calibrate", "offload"])
def test_true_shows_one_bar_that_reaches_its_end_and_a_function_gets_the_same(
    name: str, tmp_path: Path, bars: Bars
) -> None:
    call = calls(tmp_path)[name]
    call(True)
    ((description, updates),) = bars
    assert description in ("compressing", "calibrating")
    assert updates[-1][0] == updates[-1][1]
    assert bars.open == 0
    seen: list[tuple[float, float | None]] = []
    call(lambda done, total: seen.append((done, total)))
    assert seen == updates
    call(None)
    call(False)
    assert len(bars) == 1


def test_a_bar_shows_description_share_and_rate_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with bar("compressing", "tensors", console) as update:
        update(5, 10)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "compressing" in text
    assert "50%" in text


def test_a_bar_keeps_its_rate_when_the_total_is_estimated_anew() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with bar("training", "steps", console) as update:
        update(1, 1)  # the warm-up before
        for done in range(1, 200):
            update(done, 400 + done / 7)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "steps/s" in text
    assert re.search(r"\d:\d\d:\d\d", text)


def test_nothing_is_written_without_a_terminal_or_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting(True, "compressing", "tensors") as update:
        assert update is not None
        update(5, 10)
    monkeypatch.setenv("RANK", "1")
    console = Console(file=io.StringIO(), force_terminal=True)
    with bar("compressing", "tensors", console) as update:
        update(5, 10)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", "")


def test_start_up_time_is_the_sum_of_its_parts() -> None:
    timer = StartupTimer()
    for _ in range(2):
        with timer.part("data"):
            pass
    assert timer.total == pytest.approx(sum(timer.seconds.values()))
    assert timer.line().startswith("start-up: ")
    assert "import" not in StartupTimer().seconds
    age = process_seconds()
    assert age is None or age > 0


def test_long_work_says_how_far_it_is_after_each_silence() -> None:
    times, lines = [0.0, 1.0, LONGEST_SILENCE, LONGEST_SILENCE + 1, 3 * LONGEST_SILENCE], list[str]()
    clock = [0.0]
    update = in_lines(lines.append, "validating", "tokens", clock=lambda: clock[0])
    for clock[0] in times:
        update(1000 * clock[0], 100_000)
    assert lines == ["validating: 15,000 of 100,000 tokens", "validating: 45,000 of 100,000 tokens"]
