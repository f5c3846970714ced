"""Memory: the peak of a command is its own, a failure is reported, and this process's peak can be reset."""

import sys

import pytest
import torch

from benchmarks import memory


def test_the_peak_of_a_command_grows_with_its_allocations() -> None:
    small, large = (memory.python_peak(f"x = bytearray({size})") for size in (1, 60_000_000))
    assert 50 < large - small < 90


def test_a_failed_command_is_reported_with_its_output() -> None:
    with pytest.raises(RuntimeError, match="a clear message"):
        memory.run_command([sys.executable, "-c", "raise SystemExit('a clear message')"])


@pytest.mark.skipif(not memory.can_measure(), reason="needs /proc")
def test_the_peak_of_this_process_is_reset() -> None:
    large = torch.ones(20_000_000)
    del large
    memory.reset_peak()
    idle = memory.resident("VmHWM")
    assert idle == pytest.approx(memory.resident(), rel=0.02)
    large = torch.ones(20_000_000)
    assert memory.resident("VmHWM") - idle > 60
    del large
