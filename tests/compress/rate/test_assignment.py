"""Assignment: the first rule that matches wins, small tensors stay precise, and a search gets what no rule names."""

import pytest
import torch

from birdie.compress.rate.assignment import DEFAULT, Assignment, assign
from birdie.compress.rate.jobs import jobs_of
from birdie.compress.rate.target import Target
from birdie.compress.registry import parse_spec
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.small_tensors import LEAST_SEARCHED, SMALL
from birdie.compress.state import ModelState
from birdie.errors import ConfigError

STATE = {
    "blocks.0.norm": torch.ones(64),
    "blocks.0.w": torch.randn(64, 64),
    "blocks.1.w": torch.randn(64, 64),
    "mask": torch.ones(64, 64, dtype=torch.bool),
    "steps": torch.tensor(7),
}
BUDGET = Target(budget=10_000)


def assigned(state: dict[str, torch.Tensor], schemes: object = None, target: Target | None = None) -> Assignment:
    return assign(ModelState.of(state), schemes, target or Target())  # type: ignore[arg-type]


def test_the_first_matching_rule_wins_and_the_rest_get_the_default() -> None:
    rules = [("blocks.1.*", Lossless()), ("blocks.*", "int6")]
    assert assigned(STATE, rules).settled == {
        "blocks.0.norm": Cast(),
        "blocks.0.w": Grid(bits=6),
        "blocks.1.w": Lossless(),
        "mask": Lossless(),
        "steps": Lossless(),
    }
    assert assigned(STATE, dict(rules)).settled == assigned(STATE, rules).settled
    assert assigned(STATE).settled["blocks.0.w"] == DEFAULT


def test_a_default_of_lossless_or_bf16_covers_small_tensors_too() -> None:
    assert set(assigned(STATE, "lossless").settled.values()) == {Lossless()}
    assert set(assigned(STATE, target=Target(lossless=True)).settled.values()) == {Lossless()}
    assert assigned(STATE, Cast("bf16")).settled["blocks.0.norm"] == Cast("bf16")


def test_a_default_that_quantizes_leaves_vectors_alone_and_a_rule_does_not() -> None:
    bias = {"v": torch.rand(SMALL) + 1, "w": torch.randn(SMALL, 8)}
    assert assigned(bias, "int4").settled == {"v": Cast(), "w": Grid(bits=4)}
    assert assigned(bias, [("v", "int4")]).settled["v"] == Grid(bits=4)


@pytest.mark.parametrize("spec", [None, "int4", "sigma:0.3"])
def test_flat_vectors_of_weights_are_quantized_and_smooth_ones_are_not(spec: str | None) -> None:
    scheme = DEFAULT if spec is None else parse_spec(spec)
    flat = {
        "flat": torch.cat([torch.ones(512), torch.randn(SMALL)]),
        "pairs": torch.randn(SMALL, dtype=torch.complex64),
    }
    assert assigned(flat, spec).settled == dict.fromkeys(flat, scheme)
    assert set(assigned(flat, target=BUDGET).free) == set(flat)
    ramp = torch.linspace(0.1, 1, 2 * SMALL)
    for smooth in (ramp, torch.hann_window(2 * SMALL) + 0.1, ramp.sin(), torch.full((SMALL,), 0.3)):
        assert not assigned({"v": smooth}, spec).settled["v"].quantizes
        assert not assigned({"v": smooth}, target=BUDGET).free


def test_a_rule_for_either_name_of_a_tie_counts() -> None:
    weight = torch.randn(64, 64)
    for name in ("embedding", "head"):
        assignment = assigned({"embedding": weight, "head": weight}, [(name, "int4")])
        assert assignment.settled == {"embedding": Grid(bits=4)}
        assert assignment.ties == {"head": "embedding"}


def test_small_matrices_are_searched_and_tiny_ones_and_vectors_only_at_need() -> None:
    state = {"a": torch.randn(LEAST_SEARCHED // 16, 16), "b": torch.randn(4, 16), "v": torch.rand(SMALL) + 1}
    assignment = assigned(state | {"w": torch.randn(SMALL, 16)}, target=BUDGET)
    assert assignment.free == ("a", "w")
    assert assignment.reserve == ("b", "v")


def test_a_scheme_with_a_scale_is_steered_and_one_without_leaves_nothing_to_search() -> None:
    assert assigned(STATE, "sigma:0.3", BUDGET).steered == Grid(sigma=0.3)
    with pytest.raises(ConfigError, match="nothing to choose"):
        assigned(STATE, "ternary", BUDGET)


def test_a_trellis_without_a_scale_is_the_one_that_the_search_takes() -> None:
    for spec, states in ("trellis", 32), ("trellis:states=256", 256):
        assignment = assigned(STATE, spec, BUDGET)
        assert assignment.steered is None
        assert assignment.free == ("blocks.0.w", "blocks.1.w")
        encoded = jobs_of(assignment).by_name["blocks.0.w"].encode(slice(None), 0.0)
        assert abs(encoded.params[0]) == states
    assert assigned(STATE, "trellis:sigma=0.3", BUDGET).steered == Trellis(sigma=0.3)


def test_a_pattern_that_matches_nothing_offers_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'block\.0\.norm'.*'blocks\.0\.norm'"):
        assigned(STATE, [("block.0.norm", Grid())])


@pytest.mark.parametrize(
    ("schemes", "words"),
    [
        ([("blocks.*", "int6"), ("*", "int8"), ("blocks.*", "int4")], r"'blocks\.\*' has two rules, int6 and int4"),
        (["int8", "sigma:0.3"], "'int8' is neither spec nor rule"),
        ([("blocks.*", "int6", "int8")], "neither spec nor rule"),
        (["ab"], "'ab' is neither spec nor rule"),
    ],
)
def test_no_rule_is_dropped_without_a_word(schemes: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assigned(STATE, schemes)
