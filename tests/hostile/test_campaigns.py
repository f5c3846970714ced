"""Short runs of the campaigns, and at night the long ones: whatever fails, dies or disturbs, nothing is lost."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import chain_races, faults, kills, prepared, races
from tests.hostile.campaigns import CAMPAIGNS
from tests.hostile.chain_laws import states_of
from tests.hostile.workload import COMMANDS, call, write_checkpoints
from tests.kills import kill_at_each_call

ERRORS = ["ENOSPC", "kill", faults.FULL_DISK]
SHORT: list[tuple[str, dict[str, Any], int]] = [
    # campaign, settings, least number of attacks
    ("chain_flips", {"count": 1, "only": ["step-20*"]}, 3),
    ("chain_races", {"count": 1, "only": ["two writers of two runs", "pieces, folder"]}, 2),
    (
        "faults",
        {"count": 1, "seed": 9, "only": ["compress", "compress chain", "chain --keep-every"], "errors": ERRORS},
        6,
    ),
    ("prepared", {"count": 3, "only": ["compress"]}, 3),
]
LONG = [
    ("chain_flips", {"count": 20}, 300),
    *(("chain_races", {"count": 20, "only": [race]}, 20) for race in (*chain_races.WRITERS, chain_races.RETENTIONS)),
    *(("chain_races", {"count": 56, "only": [race]}, 56) for race in chain_races.TRAINERS),
    *(("faults", {"only": [command]}, 20) for command in COMMANDS),
    ("flips", {"count": 20}, 700),
    *(("kills", {"count": 30, "only": [target]}, 60) for target in kills.TARGETS),
    *(("prepared", {"only": [target]}, 6) for target in prepared.TARGETS),
    *(("races", {"count": 10, "only": [race]}, 10) for race in races.RACES),
]


def require_clean(name: str, settings: dict[str, Any], attacks: int) -> None:
    """Fail if a law was broken, or if fewer attacks than `attacks` were made."""
    if name in ("faults", "races") and faults.compiler() is None:
        pytest.skip("no C compiler, or not Linux")
    report = CAMPAIGNS[name](**settings)
    assert report.failures == [], str(report)
    assert report.counts.total() >= attacks, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "attacks"), SHORT, ids=str)
def test_nothing_is_lost(name: str, settings: dict[str, Any], attacks: int) -> None:
    require_clean(name, settings, attacks)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("name", "settings", "attacks"), LONG, ids=str)
def test_nothing_is_lost_at_night(name: str, settings: dict[str, Any], attacks: int) -> None:
    require_clean(name, settings, attacks)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_no_checkpoint_that_stays_is_lost_wherever_birdie_chain_dies(tmp_path: Path) -> None:
    write_checkpoints(tmp_path / "checkpoints", 6)
    assert not call(["compress", str(tmp_path / "checkpoints"), "-o", str(tmp_path / "six")]).code
    sound, chain = states_of(tmp_path / "six"), tmp_path / "run.birdie"
    kept = {name: sound[name] for name in ("step-30.birdie", "step-60.birdie", "last.birdie")}
    shutil.copytree(tmp_path / "six", chain)
    deaths, left = 0, sound
    for _ in kill_at_each_call(chain_races.keep, chain):
        left = states_of(chain)
        assert kept.items() <= left.items() <= sound.items()
        deaths += 1
        shutil.rmtree(chain)
        shutil.copytree(tmp_path / "six", chain)
    assert deaths > 10
    assert left == kept
