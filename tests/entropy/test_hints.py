"""Hints describe a plain matrix unless they say otherwise, and loading them costs no library."""

import subprocess
import sys

from birdie.entropy.hints import Hints


def test_hints_are_those_of_a_plain_matrix_unless_they_say_otherwise() -> None:
    assert Hints() == Hints(role="symbols", kernel=(1, 1), states=1)
    assert len({Hints(), Hints(states=8), Hints(states=-8), Hints(kernel=(3, 3)), Hints(role="scales")}) == 5


def test_hints_and_varints_load_neither_numpy_nor_numba_nor_torch() -> None:
    """The container of the file format and its help texts need both modules, and must start fast."""
    program = "import sys, birdie.entropy.hints, birdie.entropy.varint; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"numpy", "numba", "torch"} & set(ran.stdout.split())
