"""Checks of training logs: what they admit fails a rule, with its line, and a legal log breaks none."""

import pytest

from birdie.golf.audit import rules
from birdie.golf.audit.log_checks import check_log, check_seeds
from birdie.golf.audit.rules import Finding, Result, Rule, combined
from birdie.golf.audit.splits import TEXT_BYTES, scored_bytes
from birdie.lab.logs import TrainingLog, parse_log
from tests.golf.audit.audited_logs import baseline


def checked(text: str, rule: Rule, *, unlimited: bool = False) -> tuple[Result, list[Finding]]:
    findings = check_log(parse_log(text, "train.log"), unlimited=unlimited)
    findings = tuple(finding for finding in findings if finding.rule == rule)
    return combined(finding.result for finding in findings), list(findings)


def test_a_legal_log_breaks_nothing_nor_does_an_empty_one() -> None:
    assert check_log(TrainingLog("log")) == ()
    for rule in (rules.TRAIN_TIME, rules.SIZE, rules.COVERAGE, rules.BYTES, rules.EVAL_TIME):
        assert checked(baseline(), rule)[0] == "pass", rule
    assert checked(baseline(train_ms=9_000_000), rules.TRAIN_TIME, unlimited=True)[0] == "unknown"


@pytest.mark.parametrize(
    ("text", "result", "figure"),
    [
        (baseline(train_ms=600_000), "pass", "600,000 ms of 600,000"),
        (baseline(train_ms=600_038), "pass", "38 ms too many; the mean step takes 44 ms"),
        (baseline(train_ms=600_090), "fail", "90 ms too many"),
        (baseline(train_ms=600_038).replace("stopping_early", "ending"), "fail", "38 ms too many"),
    ],
)
def test_training_time(text: str, result: Result, figure: str) -> None:
    combined_result, findings = checked(text, rules.TRAIN_TIME)
    assert combined_result == result
    assert figure in findings[0].evidence
    assert all(finding.line and finding.path == "train.log" for finding in findings)


SLIDING = "final_sliding_window_eval stride:64 val_loss:2.0 val_bpb:1.19 eval_time:{}ms\n"


@pytest.mark.parametrize(
    ("text", "result", "figure"),
    [
        (baseline() + SLIDING.format(691_000), "fail", "691.0 s"),
        (baseline() + SLIDING.format(580_000), "pass", "580.0 s"),
        (baseline(), "pass", "1.4 s"),
    ],
)
def test_evaluation_time(text: str, result: Result, figure: str) -> None:
    combined_result, findings = checked(text, rules.EVAL_TIME)
    assert (combined_result, figure in findings[0].evidence) == (result, True), findings


def test_size() -> None:
    for model, result, figure in (
        (15_952_358, "pass", "16,000,000 of 16,000,000"),
        (15_952_359, "fail", "1 more than the 16,000,000 allowed (the cap is decimal"),
        (17_000_000, "fail", "1,047,642 more than the 16,000,000"),
    ):
        combined_result, findings = checked(baseline(model=model), rules.SIZE)
        assert (combined_result, figure in findings[0].evidence) == (result, True), findings


def test_a_part_of_the_split_proves_nothing() -> None:
    part = baseline().replace("tokens:62021632", "tokens:12021632")
    assert checked(part, rules.COVERAGE)[0] == "unknown"
    assert checked(part, rules.BYTES)[0] == "unknown"


def test_bytes_follow_from_nats_bits_and_targets() -> None:
    """The total of parameter-golf#1143 was 4.13 % too many; a leading space counted twice (#1545) is 15 to 20 %."""
    score = parse_log(baseline(), "log").final
    assert score is not None
    assert score.loss is not None
    total = scored_bytes(62_021_632, score.loss, score.bpb)
    assert total == pytest.approx(151_078_000, rel=1e-7)
    for share in (1.0413, 1.17):
        result, findings = checked(baseline(bpb=score.bpb / share), rules.BYTES)
        assert result == "fail"
        assert f"too good by {(total * share / TEXT_BYTES - 1):.2%}" in findings[0].evidence
    assert checked(baseline(bpb=score.bpb * 1.001), rules.BYTES)[0] == "fail"


@pytest.mark.parametrize(
    ("targets", "loss", "bpb"),
    [
        (62_021_632, 1.91389421, 1.13351895),  # openai/parameter-golf, 11L_Int6_MLP3x_WD04_SmearBigram2k, seed 42
        (40_540_160, 2.77383724, 1.07383884),  # a rerun of parameter-golf#1727
        (47_851_520, 2.32093140, 1.06057508),  # CaseOps, in the line of #2018
        (47_853_343, 2.31538446, 1.05803761),  # CaseOps, in the line of #2014
    ],
)
def test_published_scores_were_divided_by_the_bytes_of_the_split(targets: int, loss: float, bpb: float) -> None:
    assert scored_bytes(targets, loss, bpb) == pytest.approx(TEXT_BYTES, rel=1e-4)
    log = f"val_loader:x tokens:{targets}\nfinal_exact val_loss:{loss} val_bpb:{bpb} eval_time:591446ms\n"
    assert checked(log, rules.BYTES)[0] == "pass"


@pytest.mark.parametrize(
    ("claim", "result"),
    [
        ({}, "pass"),
        ({"seeds": [1, 2, 3], "val_bpb": 1.2}, "pass"),
        ({"seeds": [1, 2], "val_bpb": 1.2}, "fail"),  # one run is left out
        ({"seeds": [1, 2, 3, 4]}, "fail"),
        ({"val_bpb": 1.1}, "fail"),  # the best seed's
        ({"val_bpb": 1.3}, "pass"),
        ({"track": "non-record-unlimited-compute-16mb"}, "unknown"),
    ],
)
def test_a_claim_is_compared_with_the_logs(claim: dict[str, object], result: Result) -> None:
    logs = [parse_log(baseline(seed=seed, bpb=bpb), "log") for seed, bpb in ((1, 1.1), (2, 1.2), (3, 1.3))]
    findings = list(check_seeds(claim, logs, "submission.json"))
    assert combined(finding.result for finding in findings) == result


def test_one_seed_is_no_evidence_and_a_claim_of_too_many_bytes_fails() -> None:
    (seeds,) = check_seeds({}, [parse_log(baseline(), "log")], "submission.json")
    assert (seeds.rule, seeds.result) == (rules.SEEDS, "unknown")
    (size,) = check_seeds({"bytes_total": 16_000_001}, [], "submission.json")
    assert (size.rule, size.result) == (rules.SIZE, "fail")
