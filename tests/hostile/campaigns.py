"""The campaigns of commands that are disturbed, each `campaign(count, seed, only) -> Report`."""

from collections.abc import Callable

from tests.hostile import chain_flips, chain_races, faults, flips, kills, prepared, races
from tests.hostile.workload import Report

CAMPAIGNS: dict[str, Callable[..., Report]] = {
    module.__name__.rpartition(".")[2]: module.campaign
    for module in (chain_flips, chain_races, faults, flips, kills, prepared, races)
}
