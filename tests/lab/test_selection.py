"""Runs are chosen by conditions, grouped by their recipe, and compared by a paired test."""

import math
from pathlib import Path

import pytest
from scipy import stats

from birdie.errors import ConfigError
from birdie.lab.run_ledger import find_runs_and_logs
from birdie.lab.selection import group, select, sort
from birdie.lab.significance import compare
from tests.lab.run_folders import write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three seeds of a recipe in the folder `old`, three of another in `new`, and one run without a score."""
    for seed, bpb in enumerate((1.50, 1.53, 1.49)):
        write_run(tmp_path / "old" / f"o{seed}", bpb, seed=seed)
        write_run(tmp_path / "new" / f"n{seed}", bpb - 0.02 - seed / 1000, seed=seed, num_layers=3)
    write_run(tmp_path / "last", None, started="2027-01-01", num_layers=4)
    return tmp_path


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ([], ["n0", "n1", "n2", "o0", "o1", "o2", "last"]),
        (["model.num_layers=3"], ["n0", "n1", "n2"]),
        (["num-layers=3", "seed=1"], ["n1"]),
        (["bpb_artifact<1.5"], ["n0", "n2", "o2"]),
        (["bpb_artifact=none"], ["last"]),
        (["state!=complete"], ["last"]),
        (["model.tied=True", "mixing=1,2", "model.num_layers>=4"], ["last"]),
        (["export.budget=none", "steps>1", "matrix_lr=2e-2", "seed=2"], ["n2", "o2"]),
        (["model.tied=false"], []),
        (["started>2026-01-01"], ["last"]),
        (["started<=2026-01-01", "seed=1"], ["n1", "o1"]),
        (["started=2027-01-01"], ["last"]),
        (["started<2026-01-01T10:00"], []),
        (["started<2026-01-01 10:01", "seed=1"], ["n1", "o1"]),
        (["bytes<140kB", "seed=1"], ["n1", "o1"]),
        (["bytes>=1kB"], []),
        (["bytes=0.9kB", "seed=1"], ["n1", "o1"]),
        (["name>=o1"], ["o1", "o2"]),
        (["state<d"], ["n0", "n1", "n2", "o0", "o1", "o2", "last"]),
        (["seed!=none", "seed!=1", "num_layers=3"], ["n0", "n2"]),
    ],
)
def test_conditions_on_settings_and_columns(conditions: list[str], names: list[str], root: Path) -> None:
    assert [record.name for record in select(find_runs_and_logs(root), conditions)] == names


@pytest.mark.parametrize(
    "condition",
    [
        *("started>tomorrow", "started<140kB", "bytes<2026-01-01", "bytes<many", "bytes=many"),
        *("seed<one", "model.tied<1", "model.tied=1", "mixing>1", "bytes<none", "bpb_artifact>=1,2x"),
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_it(condition: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"(tomorrow|140kB|2026|many|one|1|none|1,2x)' cannot be compared"):
        select(find_runs_and_logs(root), [condition])


@pytest.mark.parametrize(
    ("condition", "nearest"),
    [("model.num_layer=2", "model.num_layers"), ("bpb=1", "bpb_artifact"), ("seed", "KEY=VALUE")],
)
def test_an_unknown_setting_names_the_nearest(condition: str, nearest: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=nearest):
        select(find_runs_and_logs(root), [condition])


@pytest.mark.parametrize("names", [["old", "new"], ["o0", "o1", "n0", "o2", "n2", "n1"]], ids=["folders", "runs"])
def test_seeds_of_a_recipe_are_one_group_and_are_paired(names: list[str], root: Path) -> None:
    if names[0] == "o0":
        names = [str(next(root.rglob(name))) for name in names]
    old, new = group(names, root)
    assert (old.scores, len(new.records)) == ({0: 1.50, 1: 1.53, 2: 1.49}, 3)
    test = new.against(old)
    ours, theirs = ([scores[seed] for seed in range(3)] for scores in (new.scores, old.scores))
    reference = stats.ttest_rel(ours, theirs, alternative="less")
    assert test is not None
    assert test.p == pytest.approx(reference.pvalue)
    assert test.paired


OURS, THEIRS = [1.071, 1.072, 1.0695], [1.081, 1.0803, 1.0821, 1.0808]


def test_unpaired_comparison_is_welchs_test() -> None:
    reference = stats.ttest_ind(OURS, THEIRS, equal_var=False, alternative="less")
    assert compare(OURS, THEIRS).p == pytest.approx(reference.pvalue)


def test_paired_comparison_is_the_paired_t_test() -> None:
    reference = stats.ttest_rel(OURS, THEIRS[:3], alternative="less")
    result = compare(OURS, THEIRS[:3], paired=True)
    assert result.p == pytest.approx(reference.pvalue)
    assert result.significant()


def test_margin_shifts_the_difference_to_be_exceeded() -> None:
    shifted = [value + 0.005 for value in OURS]
    assert compare(OURS, THEIRS, margin=0.005).p == pytest.approx(compare(shifted, THEIRS).p)
    assert not compare(OURS, THEIRS, margin=0.05).significant()


def test_equal_values_are_never_significant_and_clearly_lower_ones_are() -> None:
    assert compare([1.0, 1.0], [1.0, 1.0], paired=True).p == 1
    assert compare([0.9, 0.9], [1.0, 1.0], paired=True).p == 0
    assert compare([0.9, 0.9], [1.0, 1.0], paired=True, sigma=1.0).p > 0.1


@pytest.mark.parametrize(("ours", "theirs"), [([], [1.0]), ([1.0], []), ([math.nan], [1.0])])
def test_comparison_without_scores_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ConfigError):
        compare(ours, theirs)


def test_runs_without_the_value_are_sorted_to_the_end(root: Path) -> None:
    names = [record.name for record in sort(find_runs_and_logs(root), "bpb_artifact")]
    assert names == ["n2", "n0", "o2", "o0", "n1", "o1", "last"]
    assert [record.name for record in sort(find_runs_and_logs(root), "num_layers")][-1] == "last"
