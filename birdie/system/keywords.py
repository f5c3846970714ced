"""Functions whose keywords are the fields of a dataclass, so that an option is defined once: name, type, default, help.

Options(…) ──► @keywords(Options)        f(path, options) becomes f(path, *, each field of Options)
                 signature, docstring    `help(f)` lists the fields with their help
                 types                   the caller's Protocol, whose ParamSpec takes the fields
"""

import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, dataclass, fields
from functools import wraps
from typing import Annotated, Any, ForwardRef, get_args, get_origin

from cyclopts import Parameter

from birdie.errors import ConfigError

_WIDTH = 112  # of a line of a docstring, without its indentation
_ARGS = "Args:\n"


@dataclass(frozen=True, slots=True)
class More:
    """Text of the documentation of an option beyond the help of its flag."""

    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """Check of an option's value: (name, value) → the value, as the function has it; raises ConfigError."""

    function: Callable[[str, Any], Any]


def options_of(kind: Any) -> Iterator[tuple[Field[Any], Any, tuple[Any, ...]]]:
    """Yield (field, type, metadata) of each option; a type that needs an import is a text."""
    for option in fields(kind):
        hint: Any = option.type
        metadata: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            metadata = tuple(rest)
        yield option, hint.__forward_arg__ if isinstance(hint, ForwardRef) else hint, metadata


def help_of(metadata: tuple[Any, ...]) -> str:
    """Return the complete help of an option."""
    parameters = (item.help for item in metadata if isinstance(item, Parameter))
    more = (item.text for item in metadata if isinstance(item, More))
    return " ".join(text for text in (*parameters, *more) if text)


def checked(options: Any) -> None:
    """Check the value of each option of a frozen dataclass, and set what its check returns.

    Raises:
        ConfigError: a value is wrong, or of another kind than the option.
    """
    for option, hint, metadata in options_of(type(options)):
        value = getattr(options, option.name)
        if hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{option.name}={value!r} is neither True nor False")
        if hint in (Collection[str], Collection[str] | None) and not _are_names(value):
            raise ConfigError(f"{option.name}={value!r} is no list of names")
        for check in metadata:
            if isinstance(check, Check):
                object.__setattr__(options, option.name, check.function(option.name, getattr(options, option.name)))


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, Collection) and all(isinstance(name, str) for name in value))


def keywords(kind: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: a function whose last parameter, `options`, is a `kind` takes its fields instead."""

    def decorate(function: Callable[..., Any]) -> Any:
        plain = inspect.signature(function)
        *parameters, _ = plain.parameters.values()
        listed = {option.name: (option.default, hint) for option, hint, _ in options_of(kind)}
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, (default, hint) in listed.items()
        ]
        signature = plain.replace(parameters=[*parameters, *named])

        @wraps(function)
        def call(*args: Any, **named_values: Any) -> Any:
            try:
                values = signature.bind(*args, **named_values).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            options = {name: values.pop(name) for name in [*values] if name in listed}
            return function(**values, options=kind(**options))

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _with_options(function.__doc__ or "", kind)
        return call

    return decorate


def _with_options(doc: str, kind: Any) -> str:
    """Return a docstring whose section `Args:` ends with the options."""
    head, args, rest = inspect.cleandoc(doc).partition(_ARGS)
    listed, gap, end = rest.partition("\n\n")
    texts = (f"{option.name}: {help_of(metadata)}" for option, _, metadata in options_of(kind))
    lines = (textwrap.fill(text, _WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False) for text in texts)
    return "".join([head, args, listed, "\n", textwrap.indent("\n".join(lines), " " * 4), gap, end])
