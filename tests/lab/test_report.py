"""The report is one page that loads nothing, escapes what runs contain, and fits a phone."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError
from birdie.lab.report.html import Section, render, table, text
from birdie.lab.report.sizes import sizes_of
from tests.lab.run_folders import write_run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def add_artifact(folder: Path) -> Path:
    """Write an artifact into a run folder: two layers and an embedding."""
    generator = torch.Generator().manual_seed(0)
    names = "blocks.0.mlp.fc.weight", "blocks.1.mlp.fc.weight", "tok_emb.weight"
    state = {name: torch.randn(64, 96, generator=generator) for name in names} | {"gain": torch.ones(64)}
    birdie.save(state, folder / "model.birdie", budget=12_000, effort="fast")
    return folder / "model.birdie"


def add_curves(folder: Path) -> None:
    lines = [{"step": n, "train_ms": 10 * n, "loss": 5 - n / 20, "lr_multiplier": 1.0} for n in range(1, 40)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"step": n, "train_ms": 10 * n, "bpb": 3 - n / 40} for n in range(10, 41, 10)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recipes, two seeds each; one run has an artifact. Tests change a copy."""
    root = tmp_path_factory.mktemp("report") / "runs"
    for layers, bpb in ((2, 1.5), (3, 1.4)):
        for seed in (1, 2):
            folder = root / f"layers{layers}" / f"seed{seed}"
            write_run(folder, bpb + seed / 1000, seed=seed, num_layers=layers)
            add_curves(folder)
    add_artifact(root / "layers2" / "seed1")
    return root


@pytest.fixture(scope="module")
def page(runs: Path) -> tuple[str, list[str]]:
    """The report of the runs, and the labels of its axes: letters are paths, so they are taken where they are set."""
    from matplotlib.axes import Axes

    labels: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set_xlabel", "set_ylabel"):
            original = getattr(Axes, name)
            patch.setattr(
                Axes, name, lambda self, label, _f=original, **rest: (labels.append(label), _f(self, label, **rest))
            )
        return report(runs), labels


def report(*arguments: object) -> str:
    output = Path(str(arguments[0])).parent / "report.html"
    assert run(build_app, ["report", *map(str, arguments), "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


class Sources(HTMLParser):
    """Collects headings, and whatever a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.headings: list[str] = []
        self._in_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag loads."""
        self._in_heading = tag == "h2"
        loading = ("src", "href", "srcset", "data", "action", "poster")
        self.loads += [value or "" for name, value in attrs if name in loading and not (value or "").startswith("#")]
        self.loads += [tag] * (tag in ("script", "link", "iframe", "object", "embed"))

    def handle_data(self, data: str) -> None:
        """Note the text of a heading."""
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


def parsed(page: str) -> Sources:
    sources = Sources()
    sources.feed(page)
    return sources


def test_the_page_has_a_section_for_all_that_the_runs_have(page: tuple[str, list[str]]) -> None:
    html = page[0]
    assert parsed(html).headings == [
        *("Runs", "Significance", "Curves", "Bytes and quality", "Where the bytes went", "Bits per weight", "Weights"),
        *("Time", "Samples, 160 tokens each at temperature 0.8", "Recipes", "Missing"),
    ]
    assert "paired" in html
    assert "model.num_layers" in html
    assert "layers3/seed1 has no record of an artifact." in html
    assert len(html) < 3_000_000


def test_the_page_loads_nothing(page: tuple[str, list[str]]) -> None:
    assert parsed(page[0]).loads == []
    assert "url(http" not in page[0]
    assert "@import" not in page[0]


def test_what_runs_contain_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    write_run(tmp_path / "runs" / name.replace("/", "∕"))
    assert "<script" not in report(tmp_path / "runs")
    assert text("a\x1b[31m<b>") == "a\\x1b[31m&lt;b&gt;"
    assert "<i>" not in render("<i>", "<i>", [Section("<i>", table(["<i>"], [["<i>"]]))])


def test_a_log_of_the_challenge_is_a_run(tmp_path: Path) -> None:
    lines = [f"step:{n}/9 train_loss:{5 - n / 4:.4f} train_time:{n * 10}ms step_avg:10.00ms" for n in range(1, 9)]
    lines += ["final_int8_zlib_roundtrip_exact val_loss:2.1 val_bpb:1.25"]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    assert "Curves" in parsed(report(tmp_path / "train.log")).headings


def test_bytes_add_up_to_the_file(tmp_path: Path) -> None:
    path = add_artifact(tmp_path)
    sizes = sizes_of(path)
    assert sum(one.bytes for one in sizes.tensors) + sizes.header == path.stat().st_size
    assert sizes.histograms
    for one in sizes.histograms:
        assert one.shares.sum() == pytest.approx(1)
        assert one.probabilities is None or one.probabilities.sum() == pytest.approx(1)


def test_a_damaged_artifact_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = shutil.copytree(runs, tmp_path / "runs")
    path = runs / "layers2" / "seed1" / "model.birdie"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError):
        sizes_of(path)
    assert run(build_app, ["report", str(runs), "-o", str(runs / "r.html")]) == 1
    assert "the artifact of the run seed1 cannot be read" in capsys.readouterr().err
    assert not (runs / "r.html").exists()


@pytest.mark.parametrize(("arguments", "reason"), [([], "name the runs"), (["nowhere"], "holds no runs")])
def test_without_runs_one_sentence_says_so(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build_app, ["report", *arguments]) == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


HARNESS = """<iframe id="f" src="{page}" style="width:{width}px;height:900px;border:0"></iframe><pre id="out"></pre>
<script>
document.getElementById("f").onload = () => {{
  const d = document.getElementById("f").contentDocument, bad = [];
  if (d.documentElement.scrollWidth > {width}) bad.push("page " + d.documentElement.scrollWidth);
  for (const e of d.querySelectorAll("body *")) {{
    if (e.ownerSVGElement || getComputedStyle(e).overflowX === "auto") continue;
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth) bad.push(e.tagName + " " + e.className);
    const r = e.getBoundingClientRect();
    if (r.right > {width} + 1 && !e.closest(".scroll")) bad.push("beyond " + e.tagName);
  }}
  for (const s of d.querySelectorAll("svg")) {{
    const v = s.viewBox.baseVal;
    for (const g of s.querySelectorAll("use")) {{
      if (g.closest("[clip-path]")) continue;  // a point of a curve
      const b = g.getBoundingClientRect(), o = s.getBoundingClientRect();
      if (b.left < o.left - 1 || b.right > o.right + 1) bad.push("letter at the side");
      if (b.top < o.top - 1 || b.bottom > o.bottom + 1) bad.push("letter above or below");
    }}
  }}
  const count = d.querySelectorAll("svg use").length;
  document.getElementById("out").textContent = "checked " + count + "; " + bad.join("; ");
}};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.usefixtures("page")
def test_nothing_is_clipped_in_a_browser(width: int, runs: Path, tmp_path: Path) -> None:
    shutil.copy(runs.parent / "report.html", tmp_path)
    (tmp_path / "harness.html").write_text(HARNESS.format(page="report.html", width=width))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    flags += [
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width + 40},1000",
        "--virtual-time-budget=8000",
    ]
    dom = subprocess.run(
        [str(CHROMIUM), *flags, (tmp_path / "harness.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    match = re.search(r"checked (\d+); ([^<]*)", dom)
    assert match, dom[-2000:]
    assert int(match[1]) > 100
    assert match[2] == ""


def test_only_a_stream_that_context_mixing_codes_has_its_probabilities(tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).mul(5).round()}
    for effort in ("fast", "max"):
        birdie.save(state, tmp_path / effort, scheme="int5", effort=effort)
    (static,), (mixed,) = (sizes_of(tmp_path / effort).histograms for effort in ("fast", "max"))
    assert static.probabilities is None
    assert mixed.probabilities is not None
    assert np.abs(mixed.probabilities - mixed.shares).max() < 0.05
