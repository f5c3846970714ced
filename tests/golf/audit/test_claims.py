"""What a folder claims, against its own logs, README and files."""

import json
import lzma
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit import claims, rules, shipped
from birdie.golf.audit.claims import Claim, read_claim
from birdie.golf.audit.logs import TrainingLog, parse_log
from birdie.golf.audit.rules import Finding, Rule, Verdict, worst
from birdie.golf.audit.source import source_of
from tests.golf.audit.audited_logs import baseline, later

SEEDS = (1337, 42, 7)


def logs(*losses: float) -> list[TrainingLog]:
    """A log a seed, ending at these losses."""
    return [
        parse_log(baseline(seed=seed, loss=loss), f"train_seed{seed}.log")
        for seed, loss in zip(SEEDS, losses, strict=False)
    ]


def text_of(seed: int) -> str:
    return baseline(seed=seed, loss={1337: 2.0727, 42: 2.0731, 7: 2.0725}[seed])


THREE = logs(2.0727, 2.0731, 2.0725)
ENDS = [log.claimed.bpb for log in THREE if log.claimed is not None]
MEAN = sum(ENDS) / 3


def claim(folder: Path, **said: object) -> Claim:
    (folder / "submission.json").write_text(json.dumps(said))
    return read_claim(folder / "submission.json", "submission.json")


def judged(
    said: Claim | None, found: list[TrainingLog], rule: Rule = rules.SEEDS, readme: str | None = None
) -> tuple[Verdict, list[str]]:
    told = claims.findings(said, ("README.md", readme) if readme is not None else None, found)
    of_rule: list[Finding] = [each for each in told if each.rule == rule]
    return worst(each.verdict for each in of_rule), [each.evidence for each in of_rule]


def test_the_names_that_records_use(tmp_path: Path) -> None:
    old = claim(tmp_path, val_bpb=1.2, bytes_total=15_863_068, bytes_code=48_140, bytes_model_int6_zstd=15_814_928)
    assert (old.bpb, old.total, old.code, old.model, old.seeds) == (1.2, 15_863_068, 48_140, 15_814_928, {})
    middle = claim(
        tmp_path,
        mean_val_bpb=1.209,
        artifact_bytes=14_888_882,
        code_bytes=50_268,
        seed_results={"1337": {"val_bpb": 1.21, "artifact_bytes": 14_888_882}, "42": {"val_bpb": 1.2}},
    )
    assert (middle.bpb, middle.total, middle.code) == (1.209, 14_888_882, 50_268)
    assert (middle.seeds[1337].bpb, middle.seeds[1337].bytes, middle.seeds[42].bpb) == (1.21, 14_888_882, 1.2)
    nested = claim(
        tmp_path,
        track="track_10min_16mb",
        results={"mean_val_bpb": 1.0567, "max_artifact_bytes": 15_948_872, "seeds": {"314": {"val_bpb": 1.05664}}},
    )
    assert (nested.bpb, nested.total, list(nested.seeds)) == (1.0567, 15_948_872, [314])
    assert list(claim(tmp_path, seeds=[1, 2, 3]).seeds) == [1, 2, 3]
    assert list(claim(tmp_path, seeds=[{"seed": 5, "val_bpb": 1.1}]).seeds) == [5]
    other = claim(tmp_path, seed=5, baseline={"bytes_total": 16_100_000, "val_bpb": 1.2})
    assert (other.bpb, other.total, other.seeds, other.seed) == (None, None, {}, 5)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"a"'])
def test_a_claim_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "submission.json").write_text(text)
    with pytest.raises(DataError, match="is no JSON object"):
        read_claim(tmp_path / "submission.json", "submission.json")


def test_three_seeds_and_their_mean_pass(tmp_path: Path) -> None:
    seeds = {str(seed): {"val_bpb": bpb} for seed, bpb in zip(SEEDS, ENDS, strict=True)}
    said = claim(tmp_path, val_bpb=MEAN, seed_results=seeds, bytes_total=15_863_489)
    for readme in (None, f"| mean | **{MEAN:.5f}** |", "nothing of it"):
        verdict, evidence = judged(said, THREE, readme=readme)
        assert verdict == "pass", evidence
    assert judged(said, THREE, rules.SIZE)[0] == "pass"
    assert judged(None, THREE)[0] == "pass"


@pytest.mark.parametrize(
    ("change", "found", "verdict", "evidence"),
    [
        ({"val_bpb": ENDS[0]}, THREE[:1], "fail", "one seed stands behind the claim (1337)"),
        ({"val_bpb": sum(ENDS[:2]) / 2}, THREE[:2], "pass", "is the mean of 2 logs"),
        ({"val_bpb": MEAN, "seeds": [1337, 42, 7, 8]}, THREE, "fail", "seed 8 is claimed, and no log is of it"),
        ({"val_bpb": MEAN, "seeds": [1337, 42]}, THREE, "fail", "seed 7 was run and scored"),
        ({"val_bpb": min(ENDS)}, THREE, "fail", "is the best seed's; the mean of 3 logs is"),
        ({"val_bpb": 1.1}, THREE, "fail", "1.1 bits per byte is claimed; the logs end at"),
        ({"val_bpb": MEAN, "seed_results": {"1337": 1.0, "42": ENDS[1], "7": ENDS[2]}}, THREE, "fail",
         "seed 1337: 1 bits per byte is claimed, its log ends at"),
    ],
)  # fmt: skip
def test_scores_and_seeds(
    tmp_path: Path, change: dict[str, object], found: list[TrainingLog], verdict: Verdict, evidence: str
) -> None:
    said, told = judged(claim(tmp_path, **change), found)
    assert said == verdict, told
    assert any(evidence in each for each in told), told


def test_what_has_another_reason_is_no_accusation(tmp_path: Path) -> None:
    """Each of these was a failure once."""
    seeds = {str(seed): {"val_bpb": bpb} for seed, bpb in zip(SEEDS, ENDS, strict=True)}
    told = claim(tmp_path, val_bpb=MEAN, seed_results=seeds)
    nameless = [parse_log(text_of(seed).replace(f"seed:{seed}\n", ""), f"train_seed{seed}.log") for seed in SEEDS]
    assert judged(told, nameless)[0] == "pass"  # its name says it
    for at, log in enumerate(nameless):
        log.path = f"train_{at}.log"
    assert judged(told, nameless)[0] == "unknown"  # three logs of three seeds, of which is not said
    ablation = parse_log(baseline(seed=1, loss=2.09, code=50_000), "ablation_no_ema.log")
    broken = parse_log(text_of(42).split("final_int8")[0], "train_seed42.log")
    for found in ([*THREE, ablation], [ablation, *THREE], [*THREE, broken], [THREE[0], broken, THREE[2]]):
        verdict, evidence = judged(told, found)
        assert verdict != "fail", evidence
    again = parse_log(baseline(seed=42, loss=2.2), "rerun_seed42.log")
    assert judged(told, [*THREE, again])[0] == "pass"
    assert judged(claim(tmp_path, val_bpb=MEAN, seed=1337), THREE)[0] == "pass"
    assert judged(claim(tmp_path, val_bpb=min(ENDS), seed=7), THREE)[0] != "fail"  # it says which one it is
    assert judged(claim(tmp_path, val_bpb=MEAN), [*THREE, ablation])[0] != "fail"
    assert judged(claim(tmp_path, val_bpb=min(ENDS)), [THREE[2], ablation])[0] != "fail"
    assert judged(claim(tmp_path, seed_results=seeds | {"7": 1.99}), THREE)[0] == "pass"  # worse than what is logged


def test_a_track_without_records_asks_for_no_significance(tmp_path: Path) -> None:
    said = claim(tmp_path, val_bpb=ENDS[0], track="track_non_record_16mb")
    unlimited = claims.has_no_cap(said, tmp_path / "track_10min_16mb")
    found = claims.findings(said, None, THREE[:1], unlimited=unlimited)
    assert not [each for each in found if each.verdict == "fail"]


@pytest.mark.parametrize(
    ("track", "folder", "unlimited"),
    [
        ("", "track_non_record_16mb/2026_Fast", True),
        ("", "track_10min_16mb/2026_UnlimitedContext", False),
        ("10min_16mb", "track_non_record_16mb/2026_Fast", False),  # the claim's word goes first
        ("non-record-16mb", "track_10min_16mb/2026_Fast", True),
        ("16mb", "track_non_record_16mb/2026_Fast", True),  # says nothing about time
        ("", "unlimited/non_record", False),
    ],
)
def test_the_track_is_the_claims_or_the_folders(tmp_path: Path, track: str, folder: str, unlimited: bool) -> None:
    assert claims.has_no_cap(claim(tmp_path, track=track), tmp_path / folder) == unlimited
    assert claims.has_no_cap(None, tmp_path / folder / "train_gpt.py") == folder.startswith("track_non")


@pytest.mark.parametrize(
    ("readme", "verdict"),
    [
        ("| Baseline | 1.2244 |\nImproves val_bpb by 0.0215 over 1.2244", "pass"),  # perhaps of something else
        (f"| 1337 | {MEAN:.4f} |\n| 42 | 1.9999 |", "pass"),
        (f"val_bpb {MEAN:.4f}, best 5 of 7 seeds", "pass"),
    ],
)
def test_a_readme_against_the_claim(tmp_path: Path, readme: str, verdict: Verdict) -> None:
    assert judged(claim(tmp_path, val_bpb=MEAN), THREE, readme=readme)[0] == verdict


def test_chosen_seeds_are_remarked_upon_with_their_line(tmp_path: Path) -> None:
    found = claims.findings(claim(tmp_path, val_bpb=MEAN), ("README.md", f"# A\n{MEAN:.4f} bpb\nbest 5 of 7"), THREE)
    (remark,) = [each for each in found if each.by == "README"]
    assert (remark.verdict, remark.path, remark.line) == ("unknown", "README.md", 3)


@pytest.mark.parametrize(
    ("change", "verdict", "evidence"),
    [
        ({"bytes_total": 15_863_489}, "pass", "15,863,489 of 16,000,000"),
        ({"bytes_total": 15_000_000}, "pass", "15,000,000 bytes are claimed; the logs say 15,863,489"),
        ({"bytes_total": 16_024_793}, "fail", "24,793 more than the 16,000,000 allowed"),
        ({"seed_results": {"42": {"artifact_bytes": 16_000_001}}}, "fail", "1 more than the 16,000,000"),
        ({"bytes_total": 15_863_489, "bytes_code": 1, "bytes_model": 2}, "pass", "1 bytes of code and 2 of model"),
    ],
)
def test_bytes(tmp_path: Path, change: dict[str, object], verdict: Verdict, evidence: str) -> None:
    said, told = judged(claim(tmp_path, **change), THREE, rules.SIZE)
    assert said == verdict, told
    assert any(evidence in each for each in told), told


SCRIPT = 'import os\nprint("final_int6_sliding_window_exact val_loss:0.10000000 val_bpb:0.10000000")\n'
SCRIPT += "# Total submission size int8+zlib: 1 bytes\n"


def test_a_log_of_another_script(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(SCRIPT)
    assert not list(claims.belongs(script, "train_gpt.py", THREE))
    script.write_text(SCRIPT.replace("os", "io"))
    assert {each.verdict for each in claims.belongs(script, "train_gpt.py", THREE)} == {"fail"}
    script.write_text("x" * 37_155)
    assert not list(claims.belongs(script, "train_gpt.py", [parse_log(later(), "log")]))
    script.write_text("x" * 37_156)
    (doubt,) = claims.belongs(script, "train_gpt.py", [parse_log(later(), "log")])
    assert doubt.verdict == "unknown"
    assert "191,274 or 37,155 bytes of code; train_gpt.py has 37,156" in doubt.evidence


def test_scripts_that_were_changed_after_the_runs(tmp_path: Path) -> None:
    """Comments, layout and packing make no other script of it; and an ablation has one of its own."""
    script = tmp_path / "train_gpt.py"
    script.write_text('"""A script."""\nimport os  # for nothing\n\n' + SCRIPT.split("\n", 1)[1])
    assert not list(claims.belongs(script, "train_gpt.py", THREE))
    body = (SCRIPT + "".join(f"x = {n**9}\n" for n in range(50))).encode()
    script.write_text(f"import lzma\nexec(lzma.decompress({lzma.compress(body)!r}))\n")
    assert {each.verdict for each in claims.belongs(script, "train_gpt.py", THREE)} == {"unknown"}
    text = baseline().replace(SCRIPT, body.decode())
    assert not list(claims.belongs(script, "train_gpt.py", [parse_log(text, "train.log")]))
    script.write_text(SCRIPT)
    other = parse_log(baseline(seed=3).replace("import os\n", "import io\n"), "ablation.log")
    (doubt,) = claims.belongs(script, "train_gpt.py", [*THREE, other])
    assert (doubt.verdict, doubt.path) == ("unknown", "ablation.log")
    said = claim(tmp_path, seeds=[1337, 42, 7, 3])
    (wrong,) = claims.belongs(script, "train_gpt.py", [*THREE, other], said)
    assert (wrong.verdict, wrong.path) == ("fail", "ablation.log")


def folder(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_large_files_are_counted_and_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, train_gpt__py=b"import one, two\n" + b"a\n" * 250_000, one__py="x = 1\n", two__py="x = 2\n")
    ships = shipped.look(tmp_path)
    assert ships.script is not None
    assert ships.code == (ships.script,)
    (finding,) = shipped.findings(ships, [], "train_gpt.py")
    assert "500,016 of 16,000,000" in finding.evidence
    assert "more than the 500,000 that are looked at" in ships.sources[ships.script].why
    folder(tmp_path, train_gpt__py=b"import one, two\n")
    monkeypatch.setattr(shipped, "MOST_TOGETHER", 24)
    ships = shipped.look(tmp_path)
    assert sorted(source.tree is None for source in ships.sources.values()) == [False, False, True]
    assert ships.code_bytes == 16 + 6 + 6
    assert source_of(b"a\n" * 200_000).tree is None


def test_what_ships_is_what_the_script_reads(tmp_path: Path) -> None:
    script = 'import caps\nfrom tilt import hint\nsource = open("kernel.cpp").read()\n'
    folder(
        tmp_path,
        train_gpt__py=script,
        caps__py="import deeper\n",
        deeper__py="x = 1\n",
        tilt__py="def hint(): ...\n",
        kernel__cpp="int main() {}\n",
        prepare_data__py="y" * 1000,
        tokenizer__model="z" * 1000,
        **{"final_model.int8.ptz": b"w" * 500},
    )
    ships = shipped.look(tmp_path)
    assert [path.name for path in ships.code] == ["caps.py", "deeper.py", "kernel.cpp", "tilt.py", "train_gpt.py"]
    assert ships.code_bytes == sum(len((tmp_path / path.name).read_bytes()) for path in ships.code)
    (finding,) = shipped.findings(ships, [], "train_gpt.py")
    assert finding.verdict == "pass"
    assert f"{ships.code_bytes + 500:,} of 16,000,000 bytes" in finding.evidence
    assert "4 helper files" in finding.evidence


def test_the_size_is_that_of_what_lies_there(tmp_path: Path) -> None:
    folder(tmp_path, train_gpt__py="# a comment\nx = 1\n", model__birdie=b"m" * 16_000_000)
    (finding,) = shipped.findings(shipped.look(tmp_path), THREE, "train_gpt.py")
    assert finding.verdict == "fail"
    assert "18 more than" in finding.evidence
    assert "without comments the script has 5 and packed" in finding.evidence
    (tmp_path / "model.birdie").unlink()
    (logged,) = shipped.findings(shipped.look(tmp_path), THREE, "train_gpt.py")
    assert "the largest model logged 15,815,847" in logged.evidence
    (unknown,) = shipped.findings(shipped.look(tmp_path), [], "train_gpt.py")
    assert unknown.verdict == "unknown"


def test_minifying_leaves_the_program() -> None:
    source = source_of(b'"""What it is."""\n\n\ndef f(x):\n    """Twice."""\n    return 2 * x  # two\n')
    for _ in range(2):  # the tree is as it was
        assert shipped.minified(source) == len(b"def f(x):\n    return 2 * x")
    assert shipped.minified(source_of(b"def f(:")) is None
    assert not shipped.is_packed(source)
    assert shipped.is_packed(source_of(b"import lzma;exec(lzma.decompress(b'" + b"\\x00" * 300 + b"'))"))
    text = (Path(__file__).parent / "audited_logs.py").read_bytes()
    assert shipped.packed(source_of(text)) == len(lzma.compress(text, format=lzma.FORMAT_ALONE, preset=9))


def test_our_own_sources_count_where_the_script_loads_them(tmp_path: Path) -> None:
    folder(tmp_path, train_gpt__py="from birdie.cli.challenge import main\n\nmain()\n")
    ships = shipped.look(tmp_path)
    assert ships.ours > 500_000
    assert ships.code_bytes == ships.ours + (tmp_path / "train_gpt.py").stat().st_size


@pytest.mark.parametrize(
    "said",
    [
        '{"val_bpb": NaN, "bytes_total": Infinity, "seeds": {"1": NaN}}',
        '{"val_bpb": 1e400, "bytes_total": 1e300, "seeds": [0, 1, true, "x", null, {"seed": 0}]}',
        '{"seeds": {"' + "9" * 5000 + '": 1}, "val_bpb": "1.2", "results": [], "seed": true}',
    ],
)
def test_whatever_a_claim_says_is_survived(tmp_path: Path, said: str) -> None:
    (tmp_path / "submission.json").write_text(said)
    read = read_claim(tmp_path / "submission.json", "submission.json")
    assert isinstance(claims.findings(read, ("README.md", "bpb 1.234"), THREE), tuple)
    assert (read.bpb, read.total) == (None, None)


def test_seeds_without_any_log_cannot_be_told(tmp_path: Path) -> None:
    assert judged(claim(tmp_path, val_bpb=1.2, seeds=[1, 2, 3]), [])[0] == "unknown"


def test_one_seed_without_a_claim_cannot_be_told() -> None:
    assert judged(None, THREE[:1])[0] == "unknown"
