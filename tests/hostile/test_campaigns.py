"""Short runs of the campaigns, and at night the long ones: whatever fails, dies or disturbs, nothing is lost."""

import pytest

from tests.hostile import faults, flips, kills, prepared, races
from tests.hostile.workload import COMMANDS, Report

needs_compiler = pytest.mark.skipif(faults.compiler() is None, reason="no C compiler, or not Linux")


def require_clean(report: Report, attacks: int) -> None:
    """Fail if a law was broken, or if fewer attacks than `attacks` were made."""
    assert report.failures == [], str(report)
    assert report.counts.total() >= attacks, str(report)


@needs_compiler
@pytest.mark.slow
def test_a_write_that_fails_or_dies_leaves_the_old_file_or_the_new_one() -> None:
    require_clean(faults.campaign(["compress", "decompress .pt"], ["ENOSPC", "kill", faults.FULL_DISK], every=4), 6)


@pytest.mark.slow
def test_a_killed_command_goes_on_when_it_is_started_again() -> None:
    require_clean(kills.campaign(1, seed=3, targets=("compress",)), 2)


@pytest.mark.slow
def test_a_flipped_bit_in_a_checkpoint_changes_no_result() -> None:
    require_clean(flips.campaign(1, files="optimizer.safetensors"), 2)


@pytest.mark.parametrize(
    ("target", "share", "attacks"), [("compress", 1.0, 10), ("decoder", 1.0, 6), ("train --resume", 0.03, 3)]
)
def test_nothing_of_somebody_is_touched_in_a_folder_that_was_prepared(target: str, share: float, attacks: int) -> None:
    require_clean(prepared.campaign((target,), share), attacks)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_write_of_every_command_may_fail(command: str) -> None:
    require_clean(faults.campaign([command], [*faults.ERRORS, faults.FULL_DISK]), 20)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", list(kills.TARGETS))
def test_thirty_kills_lose_nothing(target: str) -> None:
    require_clean(kills.campaign(30, targets=(target,)), 60)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_flipped_bits_in_every_file_of_a_run() -> None:
    require_clean(flips.campaign(20), 700)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", list(prepared.TARGETS))
def test_every_name_that_a_command_uses_may_be_somebody_else_s(target: str) -> None:
    require_clean(prepared.campaign((target,)), 6)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("race", list(races.RACES))
def test_ten_races(race: str) -> None:
    require_clean(races.campaign(10, names=(race,)), 10)
