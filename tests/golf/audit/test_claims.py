"""The claims of a folder against its own logs, README and script."""

import json
import lzma
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.claims import Claim, check_claims, check_script_of_logs, is_unlimited, read_claim
from birdie.golf.audit.rules import Finding, Result, Rule, combined
from birdie.golf.audit.source import parse_source
from birdie.lab.logs import TrainingLog, parse_log
from tests.golf.audit.audited_logs import baseline, later

LOSSES = {1337: 2.0727, 42: 2.0731, 7: 2.0725}


def text_of(seed: int) -> str:
    return baseline(seed=seed, loss=LOSSES[seed])


THREE = [parse_log(text_of(seed), f"train_seed{seed}.log") for seed in LOSSES]
FINALS = [log.final.bpb for log in THREE if log.final is not None]
MEAN = sum(FINALS) / 3
SEED_RESULTS = {str(seed): {"val_bpb": bpb} for seed, bpb in zip(LOSSES, FINALS, strict=True)}


def claim(folder: Path, **content: object) -> Claim:
    (folder / "submission.json").write_text(json.dumps(content))
    return read_claim(folder / "submission.json", "submission.json")


def checked(
    stated: Claim | None, logs: list[TrainingLog], rule: Rule = rules.SEEDS, readme: str | None = None
) -> tuple[Result, list[str]]:
    findings = check_claims(stated, ("README.md", readme) if readme is not None else None, logs)
    of_rule = [finding for finding in findings if finding.rule == rule]
    return combined(finding.result for finding in of_rule), [finding.evidence for finding in of_rule]


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
    assert middle.seeds == {1337: (1.21, 14_888_882), 42: (1.2, None)}
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1 column 1"),
        ("[1]", "not an object"),
        ("{", "line 1 column 2"),
        ('"a"', "not an object"),
        ("[" * 200_000, "nested too deeply"),
        ('{"val_bpb": 1.1, "val_bpb": 1.2}', "the key 'val_bpb' twice"),
    ],
)
def test_a_claim_that_is_no_object_is_an_error(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "submission.json").write_text(text)
    with pytest.raises(DataError, match=rf"submission\.json is no JSON object \(.*{reason}"):
        read_claim(tmp_path / "submission.json", "submission.json")


@pytest.mark.parametrize(
    "text",
    [
        '{"val_bpb": NaN, "bytes_total": Infinity, "seeds": {"1": NaN}}',
        '{"val_bpb": 1e400, "bytes_total": 1e300, "seeds": [0, 1, true, "x", null, {"seed": 0}]}',
        '{"seeds": {"' + "9" * 5000 + '": 1}, "val_bpb": "1.2", "results": [], "seed": true}',
        '{"track": ' + "[" * 500 + "]" * 500 + ', "seeds": {"seed_": {}}, "val_bpb": -1e999}',
    ],
)
def test_absurd_claims_are_read_without_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "submission.json").write_text(text)
    stated = read_claim(tmp_path / "submission.json", "submission.json")
    assert isinstance(check_claims(stated, ("README.md", "bpb 1.234"), THREE), tuple)
    assert (stated.bpb, stated.total) == (None, None)


def test_three_seeds_and_their_mean_pass(tmp_path: Path) -> None:
    stated = claim(tmp_path, val_bpb=MEAN, seed_results=SEED_RESULTS, bytes_total=15_863_489)
    for readme in (None, f"| mean | **{MEAN:.5f}** |", "nothing about it"):
        assert checked(stated, THREE, readme=readme)[0] == "pass"
    assert checked(stated, THREE, rules.SIZE)[0] == "pass"
    assert checked(None, THREE)[0] == "pass"
    assert checked(stated, [])[0] == checked(None, THREE[:1])[0] == "unknown"


@pytest.mark.parametrize(
    ("content", "logs", "result", "figure"),
    [
        ({"val_bpb": FINALS[0]}, THREE[:1], "fail", "1 seed (1337); 3 are usual"),
        ({"val_bpb": sum(FINALS[:2]) / 2}, THREE[:2], "pass", "mean of 2 logs"),
        ({"val_bpb": MEAN, "seeds": [1337, 42, 7, 8]}, THREE, "fail", "seed 8 is claimed"),
        ({"val_bpb": MEAN, "seeds": [1337, 42]}, THREE, "fail", "seed 7 was run and scored"),
        ({"val_bpb": min(FINALS)}, THREE, "fail", "best seed's; the mean of 3 logs is"),
        ({"val_bpb": 1.1}, THREE, "fail", "1.1 bits per byte is claimed; the logs end at"),
        ({"val_bpb": MEAN, "seed_results": {"1337": 1.0, "42": FINALS[1], "7": FINALS[2]}}, THREE, "fail",
         "seed 1337: 1 bits per byte is claimed"),
    ],
)  # fmt: skip
def test_scores_and_seeds(
    tmp_path: Path, content: dict[str, object], logs: list[TrainingLog], result: Result, figure: str
) -> None:
    combined_result, evidence = checked(claim(tmp_path, **content), logs)
    assert combined_result == result, evidence
    assert any(figure in sentence for sentence in evidence), evidence


def scored(*scores: str) -> list[TrainingLog]:
    """Return logs that end with these scores, as they are written."""
    logs = []
    for seed, score in enumerate(scores):
        text = f"seed:{seed}\nfinal_int8_zlib_roundtrip_exact val_loss:2.0 val_bpb:{score}\n"
        logs.append(parse_log(text, f"train_seed{seed}.log"))
    return logs


@pytest.mark.parametrize(
    ("written", "scores", "result"),
    [
        ("1.1200", ("1.1200", "1.1240", "1.1280"), "fail"),
        ("1.12", ("1.1200", "1.1240", "1.1280"), "fail"),  # as Python writes 1.1200
        ("112.00e-2", ("1.12003141", "1.1240", "1.1280"), "fail"),
        ("1", ("1.0000", "1.0040", "1.0080"), "fail"),
        ("1.12", ("1.11703141", "1.12000000", "1.12303141"), "pass"),  # the mean is 1.12002094
        ("1.124", ("1.1200", "1.1240", "1.1280"), "pass"),
        ("1.12", ("1.12003141", "1.12400000", "1.12800000"), "pass"),  # the mean, rounded
        ("1.1200", ("1.1200", "1.1201"), "pass"),  # the mean, cut
    ],
)
def test_a_claim_is_compared_at_the_decimals_it_is_written_with(
    tmp_path: Path, written: str, scores: tuple[str, ...], result: Result
) -> None:
    (tmp_path / "submission.json").write_text(f'{{"val_bpb": {written}}}')
    stated = read_claim(tmp_path / "submission.json", "submission.json")
    combined_result, evidence = checked(stated, scored(*scores))
    assert combined_result == result, evidence
    assert any("best seed's" in sentence for sentence in evidence) == (result == "fail")


def test_what_has_another_explanation_does_not_fail(tmp_path: Path) -> None:
    """Each of these was a failure once."""
    stated = claim(tmp_path, val_bpb=MEAN, seed_results=SEED_RESULTS)
    nameless = [parse_log(text_of(seed).replace(f"seed:{seed}\n", ""), f"train_seed{seed}.log") for seed in LOSSES]
    assert checked(stated, nameless)[0] == "pass"  # the file's name has the seed
    for number, log in enumerate(nameless):
        log.path = f"train_{number}.log"
    assert checked(stated, nameless)[0] == "unknown"  # three logs of three seeds, in unknown order
    ablation = parse_log(baseline(seed=1, loss=2.09, code=50_000), "ablation_no_ema.log")
    broken = parse_log(text_of(42).split("final_int8")[0], "train_seed42.log")
    for logs in ([*THREE, ablation], [ablation, *THREE], [*THREE, broken], [THREE[0], broken, THREE[2]]):
        assert checked(stated, logs)[0] != "fail"
    rerun = parse_log(baseline(seed=42, loss=2.2), "rerun_seed42.log")
    assert checked(stated, [*THREE, rerun])[0] == "pass"
    assert checked(claim(tmp_path, val_bpb=MEAN, seed=1337), THREE)[0] == "pass"
    assert checked(claim(tmp_path, val_bpb=min(FINALS), seed=7), THREE)[0] != "fail"  # it names the seed
    assert checked(claim(tmp_path, val_bpb=MEAN), [*THREE, ablation])[0] != "fail"
    assert checked(claim(tmp_path, val_bpb=min(FINALS)), [THREE[2], ablation])[0] != "fail"
    assert checked(claim(tmp_path, seed_results=SEED_RESULTS | {"7": 1.99}), THREE)[0] == "pass"  # worse than logged


@pytest.mark.parametrize(
    ("track", "folder", "unlimited"),
    [
        ("", "track_non_record_16mb/2026_Fast", True),
        ("", "track_10min_16mb/2026_UnlimitedContext", False),
        ("10min_16mb", "track_non_record_16mb/2026_Fast", False),  # the claim comes first
        ("non-record-16mb", "track_10min_16mb/2026_Fast", True),
        ("16mb", "track_non_record_16mb/2026_Fast", True),  # it states nothing about time
        ("", "unlimited/non_record", False),
    ],
)
def test_the_track_is_that_of_the_claim_or_of_the_folder(
    tmp_path: Path, track: str, folder: str, unlimited: bool
) -> None:
    stated = claim(tmp_path, track=track, val_bpb=FINALS[0])
    assert is_unlimited(stated, tmp_path / folder) == unlimited
    assert is_unlimited(None, tmp_path / folder / "train_gpt.py") == folder.startswith("track_non")
    one_seed = check_claims(stated, None, THREE[:1], unlimited=unlimited)
    assert ("fail" in {finding.result for finding in one_seed}) != unlimited  # no significance is asked for


def test_a_readme_never_fails_and_chosen_seeds_are_a_warning_with_its_line(tmp_path: Path) -> None:
    stated = claim(tmp_path, val_bpb=MEAN)
    for readme in (
        "| Baseline | 1.2244 |\nImproves val_bpb by 0.0215 over 1.2244",
        f"| 1337 | {MEAN:.4f} |\n| 42 | 1.9999 |",
    ):
        assert checked(stated, THREE, readme=readme)[0] == "pass"
    findings = check_claims(stated, ("README.md", f"# A\n{MEAN:.4f} bpb\nbest 5 of 7"), THREE)
    assert combined(finding.result for finding in findings if finding.rule == rules.SEEDS) == "pass"
    (warning,) = [finding for finding in findings if finding.check == "README"]
    assert (warning.result, warning.path, warning.line) == ("warning", "README.md", 3)


@pytest.mark.parametrize(
    ("content", "result", "figure"),
    [
        ({"bytes_total": 15_863_489}, "pass", "15,863,489 of 16,000,000"),
        ({"bytes_total": 15_000_000}, "pass", "15,000,000 bytes are claimed; the logs have 15,863,489"),
        ({"bytes_total": 16_024_793}, "fail", "24,793 more than the 16,000,000"),
        ({"seed_results": {"42": {"artifact_bytes": 16_000_001}}}, "fail", "1 more than the 16,000,000"),
        ({"bytes_total": 15_863_489, "bytes_code": 1, "bytes_model": 2}, "pass", "1 bytes of code and 2 of the model"),
    ],
)
def test_bytes(tmp_path: Path, content: dict[str, object], result: Result, figure: str) -> None:
    combined_result, evidence = checked(claim(tmp_path, **content), THREE, rules.SIZE)
    assert combined_result == result, evidence
    assert any(figure in sentence for sentence in evidence), evidence


SCRIPT = 'import os\nprint("final_int6_sliding_window_exact val_loss:0.10000000 val_bpb:0.10000000")\n'
SCRIPT += "# Total submission size int8+zlib: 1 bytes\n"


def compared(script: str | bytes, logs: list[TrainingLog], stated: Claim | None = None) -> list[Finding]:
    source = parse_source(script.encode() if isinstance(script, str) else script)
    return list(check_script_of_logs(source, "train_gpt.py", logs, stated))


def test_a_log_of_another_script_fails_and_other_bytes_are_a_warning() -> None:
    assert compared(SCRIPT, THREE) == []
    assert {finding.result for finding in compared(SCRIPT.replace("os", "io"), THREE)} == {"fail"}
    log = parse_log(later(), "log")
    assert compared("x" * 37_155, [log]) == []
    (warning,) = compared("x" * 37_156, [log])
    assert (warning.result, "37,156" in warning.evidence) == ("warning", True)


def test_comments_layout_and_packing_make_no_other_script() -> None:
    assert compared('"""A script."""\nimport os  # for nothing\n\n' + SCRIPT.split("\n", 1)[1], THREE) == []
    body = (SCRIPT + "".join(f"x = {n**9}\n" for n in range(50))).encode()
    packed = f"import lzma\nexec(lzma.decompress({lzma.compress(body)!r}))\n"
    assert {finding.result for finding in compared(packed, THREE)} == {"warning"}
    assert compared(packed, [parse_log(baseline().replace(SCRIPT, body.decode()), "train.log")]) == []


def test_an_ablation_may_have_a_script_of_its_own(tmp_path: Path) -> None:
    ablation = parse_log(baseline(seed=3).replace("import os\n", "import io\n"), "ablation.log")
    (warning,) = compared(SCRIPT, [*THREE, ablation])
    assert (warning.result, warning.path) == ("warning", "ablation.log")
    (failure,) = compared(SCRIPT, [*THREE, ablation], claim(tmp_path, seeds=[1337, 42, 7, 3]))
    assert (failure.result, failure.path) == ("fail", "ablation.log")


def test_scripts_of_many_logs_are_not_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing each takes a second, and a folder may have 200 logs."""
    monkeypatch.setattr("birdie.golf.audit.claims.MAX_COPIES", 1)
    other = parse_log(baseline(seed=3).replace("import os\n", "import io\n"), "other.log")
    (finding,) = compared(SCRIPT, [*THREE, other])
    assert (finding.result, finding.path) == ("unknown", "other.log")
