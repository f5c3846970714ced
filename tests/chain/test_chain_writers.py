"""Two processes, a checkpoint that changes and names that lie do nothing to a chain."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact import saving as save
from birdie.artifact.links import link_paths, read_link
from birdie.chain import checkpoint_series
from birdie.chain.chain_folder import Chain
from birdie.chain.chain_rows import survey, verify
from birdie.chain.checkpoint_series import series, unnumbered
from birdie.chain.link_content import restore, steadily
from birdie.chain.retention import retain
from birdie.errors import ArtifactError, ConfigError, OutputError
from tests.hostile.test_chains import edit
from tests.kills import kill_at_each_call

Contents = Mapping[int, bytes]


def write_run(folder: Path, steps: int = 6, seed: int = 0) -> Path:
    """Write checkpoints of a run whose weights move a little."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 40, generator=generator)
    for step in range(1, steps + 1):
        weight = weight + 1e-3 * torch.randn(40, 40, generator=generator)
        torch.save({"model": {"w": weight}, "step": 10 * step}, folder / f"ckpt_{10 * step}.pt")
    return folder


def contents(run: Path) -> Contents:
    return {step: path.read_bytes() for step, path in series(run).items()}


def require_restored(chain: Path, expected: Contents) -> None:
    """Check that a chain holds these checkpoints, and decodes to nothing else."""
    assert not [row.damage for row in verify(chain) if row.damage]
    links = {read_link(path).step: path for path in link_paths(chain)}
    assert links.keys() == expected.keys()
    for step, data in expected.items():
        restore(links[step], chain.parent / "restored.pt")
        assert (chain.parent / "restored.pt").read_bytes() == data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def chain(run: Path, tmp_path: Path) -> Path:
    [*Chain(tmp_path / "run.birdie", full_every=3).extend(series(run))]
    return tmp_path / "run.birdie"


# Two writers


def test_a_second_writer_is_refused_and_the_first_goes_on(run: Path, tmp_path: Path) -> None:
    rows = Chain(tmp_path / "c").extend(series(run))
    next(rows)
    other = write_run(tmp_path / "other", seed=1)
    for replaces in (False, True):
        with pytest.raises(ConfigError, match="is in use by process"):
            [*Chain(tmp_path / "c").extend(series(other), replace_others=replaces)]
    with pytest.raises(ConfigError, match="is in use by process"):
        retain(Chain(tmp_path / "c"), drop=["10"])
    assert [row.step for row in rows] == [20, 30, 40, 50, 60]
    require_restored(tmp_path / "c", contents(run))
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix != ".birdie"]


@pytest.mark.parametrize("moved", [0, 5])
def test_another_run_that_comes_later_is_refused(chain: Path, run: Path, tmp_path: Path, moved: int) -> None:
    other = write_run(tmp_path / "other", seed=1)
    for step, path in series(other).items():
        path.rename(other / f"ckpt_{step + moved}.pt")
    expected = contents(run)
    with pytest.raises(OutputError, match=r"another checkpoint of step 10|neither .* nor one after it"):
        [*Chain(chain).extend(series(other))]
    require_restored(chain, expected)


def test_a_chain_that_nothing_was_added_to_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt_1.pt").write_bytes(b"")
    (tmp_path / "run" / "ckpt_1.pt").unlink()
    with pytest.raises(birdie.BirdieError):
        [*Chain(tmp_path / "c").extend({1: tmp_path / "run" / "ckpt_1.pt"})]
    assert not (tmp_path / "c").exists()


# A source that changes


def test_a_checkpoint_that_changes_while_it_is_coded_waits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, victim, write = contents(run), run / "ckpt_30.pt", save.write_model

    def disturbed(*args: Any, **options: Any) -> Any:
        if options["link"]["step"] == 30:
            with victim.open("rb+") as file:  # of the same size, in place
                file.seek(600)
                file.write(os.urandom(200))
        return write(*args, **options)

    monkeypatch.setattr("birdie.chain.link_encoding.write_model", disturbed)
    writer = Chain(tmp_path / "c")
    assert [row.step for row in writer.extend(series(run))] == [10, 20, 40, 50, 60]
    assert "wrote to" in writer.waiting[victim]
    require_restored(tmp_path / "c", {step: data for step, data in expected.items() if step != 30})


def test_a_change_that_no_time_tells_is_found_by_decoding(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write with the time of the last one, as a mapped file has it until it is flushed."""
    victim, split = run / "ckpt_30.pt", checkpoint_series.split_checkpoint

    def disturbed(path: Path) -> Any:
        parts = split(path)
        if path == victim:
            times = victim.stat()
            with victim.open("rb+") as file:
                file.seek(600)
                file.write(os.urandom(200))
            os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
        return parts

    monkeypatch.setattr("birdie.chain.chain_folder.split_checkpoint", disturbed)
    writer = Chain(tmp_path / "c")
    assert [row.step for row in writer.extend(series(run))] == [10, 20, 40, 50, 60]
    assert [*writer.waiting] == [victim]


def test_a_base_that_changes_on_disk_is_decoded_instead(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, write = contents(run), save.write_model

    def disturbed(*args: Any, **options: Any) -> Any:
        if options["link"]["step"] == 30:
            (run / "ckpt_20.pt").write_bytes(b"\0" * (run / "ckpt_20.pt").stat().st_size)
        return write(*args, **options)

    monkeypatch.setattr("birdie.chain.link_encoding.write_model", disturbed)
    [*Chain(tmp_path / "c").extend(series(run))]
    assert read_link(tmp_path / "c" / "ckpt_30.birdie").base == "ckpt_20.birdie"
    require_restored(tmp_path / "c", expected)


@pytest.mark.parametrize("first", [slice(0, 4000), slice(0, 1)])
def test_a_link_of_half_a_checkpoint_is_replaced_when_it_is_complete(run: Path, tmp_path: Path, first: slice) -> None:
    expected, last = contents(run), run / "ckpt_60.pt"
    last.write_bytes(expected[60][first])
    [*Chain(tmp_path / "c").extend(series(run))]
    time.sleep(0.01)
    last.write_bytes(expected[60])
    notes: list[str] = []
    [*Chain(tmp_path / "c", notify=notes.append).extend(series(run))]
    assert any("has changed since it was added" in note for note in notes)
    require_restored(tmp_path / "c", expected)


def test_what_others_need_or_is_of_another_run_is_not_replaced(run: Path, tmp_path: Path) -> None:
    [*Chain(tmp_path / "c").extend(series(run))]
    expected = contents(run)
    time.sleep(0.01)
    (run / "ckpt_50.pt").write_bytes(expected[40])  # 60 is a delta to it
    with pytest.raises(OutputError, match="another checkpoint of step 50"):
        [*Chain(tmp_path / "c").extend(series(run))]
    alone = write_run(tmp_path / "other", steps=1, seed=1)
    [*Chain(tmp_path / "d").extend({10: run / "ckpt_10.pt"})]
    with pytest.raises(OutputError, match="another checkpoint of step 10"):
        [*Chain(tmp_path / "d").extend(series(alone))]
    require_restored(tmp_path / "c", expected)


def test_a_link_under_the_name_of_another_step_is_left_as_it_is(chain: Path, run: Path) -> None:
    (chain / "ckpt_60.birdie").unlink()
    shutil.copy(chain / "ckpt_10.birdie", chain / "ckpt_60.birdie")
    notes: list[str] = []
    rows = {row.step: row for row in Chain(chain, notify=notes.append).extend(series(run)) if row.added}
    assert [*rows] == [60]
    assert rows[60].name == "ckpt_60.pt.birdie"
    assert read_link(chain / "ckpt_60.birdie").step == 10
    assert not any("damaged" in note for note in notes)
    restore(chain / "ckpt_60.pt.birdie", chain.parent / "x.pt")
    assert (chain.parent / "x.pt").read_bytes() == (run / "ckpt_60.pt").read_bytes()


# Names that lie


def test_a_file_of_the_user_under_the_name_of_a_link_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    birdie.save({"w": torch.randn(64, 64)}, tmp_path / "c" / "ckpt_20.birdie", scheme="int8")
    (tmp_path / "c" / "ckpt_30.birdie").write_text("notes")
    original = {path: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(OutputError, match="no link of a chain"):
        Chain(tmp_path / "c").require_writable()
    [*Chain(tmp_path / "c").extend(series(run), replace_others=True)]
    assert {path: path.read_bytes() for path in original} == original
    for step in (20, 30):
        restore(tmp_path / "c" / f"ckpt_{step}.pt.birdie", tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == (run / f"ckpt_{step}.pt").read_bytes()


def test_links_to_other_folders_are_refused(run: Path, tmp_path: Path) -> None:
    (run / "last.pt").symlink_to("ckpt_60.pt")
    assert unnumbered(run, [*series(run).values()]) == [run / "last.pt"]
    write_run(tmp_path / "secret", steps=1)
    for name, target in (("ckpt_70.pt", "../secret/ckpt_10.pt"), ("step-80", "../secret")):
        (run / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name} is a link to"):
            series(run)
        assert [*series(run, [name])][-1] == 60
        (run / name).unlink()
    (run / "best.pt").symlink_to("../secret/ckpt_10.pt")
    with pytest.raises(ConfigError, match=r"best.pt is a link to"):
        unnumbered(run, [*series(run).values()])


@pytest.mark.parametrize("gone", [{10}, {60}, {20, 30}, {10, 30, 50}, {20, 30, 40, 50, 60}])
def test_what_stays_is_what_it_was(chain: Path, run: Path, gone: set[int]) -> None:
    expected = {step: data for step, data in contents(run).items() if step not in gone}
    removed = retain(Chain(chain, full_every=3), drop=[str(step) for step in gone])
    assert {row.step for row in removed} == gone
    require_restored(chain, expected)


# Retention


def test_the_last_and_every_so_many_stay(chain: Path, run: Path) -> None:
    retain(Chain(chain), keep_last=1, keep_every=20)
    require_restored(chain, {step: data for step, data in contents(run).items() if step % 20 == 0})
    retain(Chain(chain), keep_last=2)
    assert {row.step: row.base for row in survey(chain)} == {40: "", 60: "ckpt_40.birdie"}
    assert not retain(Chain(chain), keep_last=2), "nothing goes twice"


def test_a_chain_goes_on_after_a_drop(chain: Path, run: Path) -> None:
    retain(Chain(chain), drop=["40", "60"])
    [*Chain(chain).extend(series(run))]
    require_restored(chain, contents(run))


def test_wrong_retention_ends_with_one_sentence_and_changes_nothing(chain: Path) -> None:
    original = {path: path.read_bytes() for path in link_paths(chain)}
    steps = [str(step) for step in range(10, 70, 10)]
    for options, problem in (
        ({"drop": ["15"]}, "no checkpoint '15'"),
        ({"drop": ["last.ckpt"]}, "no checkpoint 'last.ckpt'"),
        ({"drop": steps}, "no checkpoint of .* would remain"),
        ({"keep_last": 0}, "at least 1"),
        ({"keep_every": -1}, "at least 1"),
        ({"keep_every": 7}, "would remain"),
    ):
        with pytest.raises(ConfigError, match=problem):
            retain(Chain(chain), **options)
    assert {path: path.read_bytes() for path in link_paths(chain)} == original


def drop_some(chain: Path) -> None:
    retain(Chain(chain, full_every=3), drop=["20", "40", "50"])


@pytest.mark.nightly
def test_whoever_is_killed_while_it_drops_loses_no_step_that_stays(chain: Path, run: Path, tmp_path: Path) -> None:
    expected, sound = contents(run), shutil.copytree(chain, tmp_path / "sound")
    for _ in kill_at_each_call(drop_some, chain):
        assert not [row for row in verify(chain) if row.damage]
        left = {row.step for row in survey(chain)}
        assert {10, 30, 60} <= left
        gone = {20, 40, 50} & left
        if gone:
            retain(Chain(chain, full_every=3), drop=[str(step) for step in gone])
        require_restored(chain, {step: expected[step] for step in (10, 30, 60)})
        shutil.rmtree(chain)
        shutil.copytree(sound, chain)


# Readers


def test_a_reader_looks_again_if_the_chain_changed_meanwhile(chain: Path) -> None:
    attempts = []

    def read(*, changes: bool) -> str:
        attempts.append(changes)
        if len(attempts) == 2:
            return "read"
        if changes:
            (chain / "ckpt_60.birdie").unlink()
        raise ArtifactError("a link is missing")

    assert steadily(chain, lambda: read(changes=True)) == "read"
    attempts.clear()
    with pytest.raises(ArtifactError, match="a link is missing"):
        steadily(chain, lambda: read(changes=False))
    assert attempts == [False]


def test_digests_tell_what_checksums_do_not(chain: Path) -> None:
    def lie(fields: dict[str, Any]) -> None:
        fields["link"]["files"]["ckpt_10.pt"]["sha256"] = "0" * 64

    edit(chain / "ckpt_10.birdie", lie)
    assert not survey(chain)[0].damage
    assert "digest" in verify(chain)[0].damage


def test_one_cause_is_named_once(chain: Path) -> None:
    (chain / "ckpt_10.birdie").unlink()
    damage = {row.step: row.damage for row in survey(chain)}
    assert damage[20] == damage[30] != ""
    assert not damage[40]
    (chain / "ckpt_40.birdie").write_bytes((chain / "ckpt_40.birdie").read_bytes()[:-3])
    causes = {row.name: row.damage for row in survey(chain)}
    assert causes["ckpt_40.birdie"] == causes["ckpt_50.birdie"] == causes["ckpt_60.birdie"] != ""
    notes: list[str] = []
    run = write_run(chain.parent / "again")
    [*Chain(chain, notify=notes.append).extend({step: path for step, path in series(run).items() if step > 10})]
    assert sum("ckpt_10.birdie, which is missing" in note for note in notes) == 1
