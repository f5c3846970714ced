"""Runs are chosen by any setting or column, and seeds of one recipe are compared as a group."""

from pathlib import Path

import pytest
from scipy import stats

from birdie.errors import ConfigError, DataError
from birdie.lab.run_ledger import find_runs_and_logs
from birdie.lab.selection import full_key, group, select, sort
from tests.golf.audit.audited_logs import baseline
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


def test_a_damaged_run_is_selected_by_its_state_and_never_compared(root: Path) -> None:
    (root / "last" / "recipe.toml").write_text("[")
    assert [record.name for record in select(find_runs_and_logs(root), ["state=damaged"])] == ["last"]
    assert len(select(find_runs_and_logs(root), ["num_layers=3"])) == 3
    with pytest.raises(DataError, match=r"recipe\.toml is damaged .*leave the run out"):
        group(["old", "last"], root)


@pytest.mark.parametrize(
    ("condition", "nearest"),
    [("model.num_layer=2", "model.num_layers"), ("bpb=1", "bpb_artifact"), ("seed", "KEY=VALUE")],
)
def test_an_unknown_setting_names_the_nearest(condition: str, nearest: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=nearest):
        select(find_runs_and_logs(root), [condition])


def test_a_short_name_must_be_unique() -> None:
    assert full_key("lr", {"a.lr", "b.rate"}) == "a.lr"
    with pytest.raises(ConfigError, match=r"a\.lr or b\.lr"):
        full_key("lr", {"a.lr", "b.lr"})


def test_runs_without_the_value_are_sorted_to_the_end(root: Path) -> None:
    names = [record.name for record in sort(find_runs_and_logs(root), "bpb_artifact")]
    assert names == ["n2", "n0", "o2", "o0", "n1", "o1", "last"]
    assert [record.name for record in sort(find_runs_and_logs(root), "num_layers")][-1] == "last"


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


def test_other_seeds_are_not_paired(root: Path) -> None:
    names = [str(root / "old" / "o0"), str(root / "old" / "o1"), str(root / "new")]
    old, new = group(names, root)
    test = new.against(old)
    assert test is not None
    assert not test.paired
    assert group([*names, "last"], root)[-1].against(old) is None


def test_a_folder_whose_runs_differ_is_no_group(root: Path) -> None:
    with pytest.raises(DataError, match=r"model\.num_layers"):
        group([str(root), "last"], root)
    with pytest.raises(DataError, match="nothing"):
        group(["nothing", "old"], root)


def test_logs_are_groups_by_their_folders(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for seed in (1, 2):
            (tmp_path / side / f"{seed}.log").write_text(baseline(seed=seed))
    groups = group(["a", "b"], tmp_path)
    assert [sorted(one.scores) for one in groups] == [[1, 2], [1, 2]]
