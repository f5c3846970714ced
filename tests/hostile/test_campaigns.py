"""Short runs of the campaigns, and at night the long ones: whatever fails, dies or disturbs, nothing is lost."""

from typing import Any

import pytest

from tests.hostile import faults, kills, prepared, races
from tests.hostile.campaigns import CAMPAIGNS
from tests.hostile.workload import COMMANDS

SHORT: dict[str, tuple[dict[str, Any], int]] = {
    # settings, least number of attacks
    "faults": ({"count": 1, "seed": 1, "only": ["compress"], "errors": ["ENOSPC", "kill", faults.FULL_DISK]}, 2),
    "prepared": ({"count": 5, "only": ["compress"]}, 3),
}
LONG = [
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
@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost(name: str) -> None:
    require_clean(name, *SHORT[name])


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("name", "settings", "attacks"), LONG, ids=str)
def test_nothing_is_lost_at_night(name: str, settings: dict[str, Any], attacks: int) -> None:
    require_clean(name, settings, attacks)
