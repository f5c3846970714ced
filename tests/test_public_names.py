"""Public names of `import birdie`, which imports nothing heavy before a name is used."""

import pytest

import birdie


def test_every_public_name_is_there() -> None:
    assert len(dir(birdie)) > 20
    for name in dir(birdie):
        assert getattr(birdie, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = getattr(birdie, "nothing")  # noqa: B009  type checkers see that it is missing
