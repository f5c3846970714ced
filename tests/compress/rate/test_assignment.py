"""Specs and patterns: the first match wins, what is small stays precise, and a typo is told what was meant."""

import pytest
import torch

from birdie.compress.rate.assignment import SMALL, assign, encode_all, match, parse_rule, parse_spec, small_scheme, suit
from birdie.compress.registry import decode
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("lossless", Lossless()),
        ("fp16", Cast("fp16")),
        (" bf16 ", Cast("bf16")),
        ("int8", Grid(bits=8)),
        ("int2", Grid(bits=2)),
        ("int8:level_stride=4", Grid(bits=8, level_stride=4)),
        ("sigma:0.3", Grid(sigma=0.3)),
        ("sigma:1e-2", Grid(sigma=0.01)),
    ],
)
def test_specs(text: str, scheme: Scheme) -> None:
    assert parse_spec(text) == scheme


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("in8", "did you mean 'int8'"),
        ("losless", "did you mean 'lossless'"),
        ("int9", "9"),
        ("int8:level_stride=200", "step=200"),
        ("sigma:1e", "'1e'"),
        ("sigma:0", "0.0"),
        ("", "did you mean"),
    ],
)
def test_wrong_specs_say_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_spec(text)


def test_a_rule_is_split_at_its_first_equals_sign() -> None:
    assert parse_rule("blocks.[3-6].*=int8:level_stride=4") == ("blocks.[3-6].*", Grid(level_stride=4))
    for wrong in ("int8", "=int8"):
        with pytest.raises(ConfigError, match="PATTERN=SPEC"):
            parse_rule(wrong)


STATE = {
    "blocks.0.w": torch.randn(64, 64),
    "blocks.0.norm": torch.ones(64),
    "blocks.1.w": torch.randn(64, 64),
    "steps": torch.tensor(7),
    "mask": torch.ones(64, 64, dtype=torch.bool),
}


def test_the_first_matching_rule_wins_and_the_rest_get_the_default() -> None:
    rules: list[tuple[str, Scheme]] = [("blocks.1.*", Lossless()), ("blocks.*", Grid(bits=6))]
    assert assign(STATE, match(STATE, rules), Grid()) == {
        "blocks.0.w": Grid(bits=6),
        "blocks.0.norm": Cast(),
        "blocks.1.w": Lossless(),
        "steps": Lossless(),
        "mask": Lossless(),
    }


def test_a_default_of_lossless_or_bf16_covers_the_small_ones_too() -> None:
    assert set(assign(STATE, {}, Lossless()).values()) == {Lossless()}
    assert assign(STATE, {}, Cast("bf16"))["blocks.0.norm"] == Cast("bf16")


def test_a_pattern_that_matches_nothing_offers_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"nearest name is 'blocks\.0\.norm'"):
        match(STATE, [("block.0.norm", Grid())])


def test_small_tensors_keep_their_precision() -> None:
    assert small_scheme(torch.randn(10)) == Cast()
    assert small_scheme(torch.full((10,), 1e-7)) == Lossless()  # float16 would keep three bits of it
    assert small_scheme(torch.full((10,), 1e6)) == Lossless()
    assert small_scheme(torch.arange(3)) == Lossless()
    assert small_scheme(torch.tensor([1.0, 0.0, -2.0])) == Cast()
    assert small_scheme(torch.tensor([1.0, 1e-9, 2e-8])) == Lossless()  # one would become zero, one subnormal
    assert small_scheme(torch.tensor([1.0, 1e-60], dtype=torch.float64)) == Lossless()


def test_a_rule_puts_a_vector_on_a_grid_from_as_many_elements_as_a_matrix_up() -> None:
    assert suit(Grid(bits=4), torch.randn(SMALL)) == Grid(bits=4)
    assert suit(Grid(bits=4), torch.ones(SMALL - 1)) == Cast()
    assert suit(Grid(bits=4), torch.randn(2, 2)) == Grid(bits=4)
    assert assign({"v": torch.ones(SMALL)}, {}, Grid(bits=4)) == {"v": Cast()}


def test_encoding_in_parallel_equals_one_by_one() -> None:
    schemes = assign(STATE, {}, Grid())
    counted: list[int] = []
    together = encode_all(STATE, schemes, workers=4, done=lambda: counted.append(1))
    assert len(counted) == len(STATE)
    assert list(together) == list(STATE)
    for name, weight in STATE.items():
        assert torch.equal(decode(together[name]), decode(schemes[name].encode(name, weight)))
