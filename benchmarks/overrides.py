"""Settings as one command-line option: "lr=0.01,epochs=1" changes these fields of a dataclass."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from birdie.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    S = TypeVar("S", bound=DataclassInstance)
else:
    S = TypeVar("S")


def parse_overrides(text: str, base: S) -> S:
    """Return `base` changed by NAME=VALUE,… such as "lr=0.01,epochs=1"; a list is written A+B+C.

    Raises:
        ConfigError: there is no such setting, or a value has the wrong type.
    """
    values: dict[str, Any] = {}
    current = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in current:
            raise ConfigError(f"{type(base).__name__} has no setting {name!r}; choose from {', '.join(current)}")
        try:
            values[name] = _parsed(value.strip(), current[name])
        except (ValueError, KeyError):
            example = f"{name}={_written(current[name])}"
            raise ConfigError(f"{name} is {value!r}; give a value such as {example}") from None
    return dataclasses.replace(base, **values)


def _parsed(text: str, default: object) -> object:
    if isinstance(default, bool):
        return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split("+") if part.strip())
    return text if isinstance(default, str) else type(default)(text)  # type: ignore[call-arg]


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
