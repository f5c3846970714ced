"""Plots show every curve inside the frame, with round ticks and units on both axes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from birdie.errors import DataError
from birdie.lab.plot import COLORS, Curve, plot

FALLING = Curve("falling", tuple((float(step), 4.0 - step / 50) for step in range(101)))


def text_of(*curves: Curve, width: int = 60, height: int = 8) -> list[str]:
    lines = plot(curves, x_label="step", y_label="loss, nats per token", width=width, height=height)
    return [line.plain for line in lines]


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = text_of(FALLING)
    assert lines[0].startswith("loss, nats per token")
    columns = [min(i for i, c in enumerate(line) if c > "\u2800" or c == "a") for line in lines[1:9]]
    assert columns == sorted(columns)
    assert lines[8].endswith("a")  # the letter of the curve, at its end
    assert lines[-2].strip() == "step"
    assert lines[-1].strip() == "━a falling"


def test_ticks_are_round_and_where_they_belong() -> None:
    lines = text_of(Curve("line", ((0.0, 0.0), (100.0, 10.0))), height=11)
    ticks = {line.partition("┤")[0].strip(): number for number, line in enumerate(lines) if "┤" in line}
    assert ticks == {"10": 1, "5": 6, "0": 11}
    axis, numbers = lines[12], lines[13]
    assert numbers[axis.index("┬")] == numbers.split()[0] == "0"


def test_the_first_steps_do_not_stretch_the_axis() -> None:
    steep = Curve("steep", ((0.0, 100.0), *((float(step), 1 + 1 / step) for step in range(1, 100))))
    assert "cut" in text_of(steep)[0]
    assert "cut" not in text_of(Curve("short", ((0.0, 100.0), (1.0, 1.0))))[0]


@given(
    points=st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=20),
    width=st.integers(20, 200),
    height=st.integers(2, 40),
)
@example(points=[(0.0, -1.0), (0.0, -400002.0)], width=20, height=2)  # no multiple of 500,000 between
@example(points=[(0.0, 1.0), (5e-324, 1.0)], width=20, height=2)  # too close for an axis
def test_any_points_fit_into_the_frame(points: list[tuple[float, float]], width: int, height: int) -> None:
    curve = Curve("any", tuple(sorted(points, key=lambda point: point[0])))
    if not any(math.isfinite(y) for _, y in points):
        with pytest.raises(DataError, match="loss"):
            text_of(curve)
        return
    lines = text_of(curve, width=width, height=height)
    assert len(lines) == height + 5
    frame = {len(line) for line in lines[1 : height + 1]}
    assert len(frame) == 1


def test_too_many_curves_are_refused() -> None:
    with pytest.raises(DataError, match=str(len(COLORS))):
        text_of(*[FALLING] * (len(COLORS) + 1))
