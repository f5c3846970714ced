"""The t-tests agree with scipy's own, and the challenge's rule is a margin plus a level."""

import math

import pytest
from scipy import stats

from birdie.errors import ConfigError
from birdie.lab.significance import compare

OURS, THEIRS = [1.071, 1.072, 1.0695], [1.081, 1.0803, 1.0821, 1.0808]


def test_unpaired_comparison_is_welchs_test() -> None:
    reference = stats.ttest_ind(OURS, THEIRS, equal_var=False, alternative="less")
    assert compare(OURS, THEIRS).p == pytest.approx(reference.pvalue)


def test_paired_comparison_is_the_paired_t_test() -> None:
    reference = stats.ttest_rel(OURS, THEIRS[:3], alternative="less")
    result = compare(OURS, THEIRS[:3], paired=True)
    assert result.p == pytest.approx(reference.pvalue)
    assert result.significant()


def test_one_stated_value_is_taken_as_exact() -> None:
    reference = stats.ttest_1samp(OURS, 1.081, alternative="less")
    assert compare(OURS, [1.081]).p == pytest.approx(reference.pvalue)


def test_margin_shifts_the_difference_to_be_exceeded() -> None:
    shifted = [value + 0.005 for value in OURS]
    assert compare(OURS, THEIRS, margin=0.005).p == pytest.approx(compare(shifted, THEIRS).p)
    assert not compare(OURS, THEIRS, margin=0.05).significant()


def test_equal_values_are_never_significant_and_clearly_lower_ones_are() -> None:
    assert compare([1.0, 1.0], [1.0, 1.0], paired=True).p == 1
    assert compare([0.9, 0.9], [1.0, 1.0], paired=True).p == 0
    assert compare([0.9, 0.9], [1.0, 1.0], paired=True, sigma=1.0).p > 0.1


def test_single_seed_has_no_p_value() -> None:
    result = compare([1.0], [1.1])
    assert math.isnan(result.p)
    assert not result.significant()


@pytest.mark.parametrize(("ours", "theirs"), [([], [1.0]), ([1.0], []), ([math.nan], [1.0])])
def test_comparison_without_scores_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ConfigError):
        compare(ours, theirs)


def test_unequal_numbers_of_runs_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match="3 runs"):
        compare(OURS, THEIRS, paired=True)
