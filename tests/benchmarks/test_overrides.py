"""Settings written as NAME=VALUE,… change a dataclass, and what is wrong is named."""

import dataclasses

import pytest

from benchmarks.overrides import parse_overrides
from birdie.errors import ConfigError
from birdie.score.modes.ttt_lora import LoRAMode
from birdie.score.modes.ttt_sgd import SGDSettings


def test_values_have_the_type_of_the_setting() -> None:
    sgd, lora = SGDSettings(), LoRAMode()
    assert parse_overrides("lr=0.5,chunk-tokens=64", sgd) == dataclasses.replace(sgd, lr=0.5, chunk_tokens=64)
    assert parse_overrides("parts=k+o,warm_a=1", lora) == dataclasses.replace(lora, parts=("k", "o"), warm_a=True)


@pytest.mark.parametrize(
    ("text", "reason"), [("lr", "lr is ''"), ("epochs=1.5", "epochs is '1.5'"), ("steps=1", "lr, epochs")]
)
def test_wrong_overrides_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_overrides(text, SGDSettings())
