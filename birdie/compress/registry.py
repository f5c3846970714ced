"""Registry of schemes: by name, by the words of specs such as `int6`, and by number in the file.

    schemes/*.py ───────────────┐
    register(YourScheme) ───────┼──► names, specs, help texts, decoders
    entry points "birdie.schemes" ┘   (imported only when the user names one: an import runs code)

Every module in the folder `birdie.compress.schemes` is collected automatically. A name, a number and a word belong to
one scheme each; numbers below 64 are birdie's. A scheme from elsewhere (a foreign scheme) is a `Scheme` subclass passed
to `register`, an object passed to `birdie.save`, or an installed package's entry point in the group `birdie.schemes`. A
file never causes an import: it only names a foreign scheme, and can be loaded once a scheme of that name is registered.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor

from birdie.compress import schemes
from birdie.compress.scheme import Blocks, Decoder, Encoded, Scheme, Spec
from birdie.compress.schemes import FOREIGN, MOST
from birdie.compress.tensors import from_planes
from birdie.errors import ArtifactError, ConfigError

GROUP = "birdie.schemes"  # of entry points
_foreign: dict[str, type[Scheme]] = {}
_forms: dict[str, Decoder] = {}


class Word(NamedTuple):
    """A word that begins a spec, and its scheme."""

    spec: Spec
    scheme: type[Scheme]

    @property
    def make(self) -> Callable[..., Scheme]:
        """Function from options to a scheme; its parameters are the options of the spec."""
        return self.spec.make or self.scheme

    @property
    def example(self) -> str:
        """Complete spec, for help texts."""
        return self.spec.example or self.spec.word


@cache
def _builtin() -> dict[str, type[Scheme]]:
    """Return the schemes that ship with birdie, by name, in the order of their numbers."""
    builtin: dict[str, type[Scheme]] = {}
    for module in schemes.modules():
        decoder = getattr(module, "DECODER", None)
        if decoder is None or schemes.numbers().get(decoder.number) != decoder.name:
            raise ConfigError(f'{module.__file__} has no line DECODER = Decoder("NAME", NUMBER, …); write one')
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Scheme) and value.__module__ == module.__name__:
                builtin[value.decoder.name] = value
    return dict(sorted(builtin.items(), key=lambda item: item[1].decoder.number))


def builtin() -> tuple[type[Scheme], ...]:
    """Return the schemes that ship with birdie, in the order of their numbers."""
    return tuple(_builtin().values())


def names() -> tuple[str, ...]:
    """Return the names of all registered schemes: those of birdie in the order of their numbers, then foreign ones."""
    return (*_builtin(), *_foreign)


def register(scheme: type[Scheme]) -> type[Scheme]:
    """Register a foreign scheme, so that its specs can be parsed and files that name it can be loaded.

    May be used as a decorator. Registering the same class again changes nothing.

    Raises:
        ConfigError: it is no subclass of `Scheme` with a decoder, its number is not one of 64 to 65,535, or
            another scheme has its name, its number or one of its words.
    """
    decoder = getattr(scheme, "decoder", None)
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme) and isinstance(decoder, Decoder)):
        raise ConfigError(f"{scheme!r} is no scheme; subclass birdie.schemes.Scheme and give it a decoder")
    if _builtin().get(decoder.name) is scheme or _foreign.get(decoder.name) is scheme:
        return scheme
    if decoder.name in names():
        raise ConfigError(f"a scheme called {decoder.name!r} is registered already; choose another name")
    if not FOREIGN <= decoder.number <= MOST:
        raise ConfigError(
            f"scheme {decoder.name!r} has number {decoder.number}; choose one of {FOREIGN} to {MOST:,}, as those below "
            "are birdie's"
        )
    if owner := next((other for other, kind in _foreign.items() if kind.decoder.number == decoder.number), None):
        raise ConfigError(
            f"schemes {owner!r} and {decoder.name!r} both have number {decoder.number}; change that of {decoder.name!r}"
        )
    taken = {spec.word for spec in scheme.specs} & set(words())
    if taken:
        raise ConfigError(
            f"scheme {decoder.name!r} uses the word {min(taken)!r} of another scheme; choose another word"
        )
    _foreign[decoder.name] = scheme
    words.cache_clear()
    return scheme


def import_scheme(name: str) -> type[Scheme]:
    """Import the installed package that offers a scheme under `name` (entry points "birdie.schemes"), and register it.

    Raises:
        ConfigError: no installed package offers one, or the entry point is no scheme.
    """
    for point in entry_points(group=GROUP, name=name):
        return register(point.load())
    raise ConfigError(f"no installed package offers a scheme called {name!r} (entry points {GROUP}); install it")


def import_schemes(schemes: Collection[str]) -> None:
    """Import those of these schemes that are not registered; raises as `import_scheme`."""
    for name in set(schemes) - set(names()):
        import_scheme(name)


def add_form(decoder: Decoder) -> Decoder:
    """Make known the decoder of a form of tensors for which nobody asks by a spec."""
    _forms[decoder.name] = decoder
    return decoder


def decoder(name: str) -> Decoder:
    """Return the decoder of a registered scheme."""
    scheme = _builtin().get(name) or _foreign.get(name)
    if scheme is None and name in _forms:
        return _forms[name]
    if scheme is None:
        raise ArtifactError(
            f"scheme {name!r} is not one of birdie's; import the package that defines it, or name it when loading: "
            f"birdie.load(…, schemes=[{name!r}])"
        )
    return scheme.decoder


def decode(encoded: Encoded) -> Tensor:
    """Return the tensor that `encoded` stands for.

    Raises:
        ArtifactError: its scheme is not registered.
    """
    if isinstance(encoded, Blocks):
        parts = [decode(part) for part in encoded.parts]
        joined = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])  # a tail is a vector
        if encoded.dtype.is_complex and not joined.is_complex():
            return from_planes(joined, encoded.shape)
        return joined.reshape(encoded.shape)
    return decoder(encoded.scheme).decode(encoded)


@cache
def words() -> Mapping[str, Word]:
    """Return all words that begin a spec, each with its scheme."""
    return {spec.word: Word(spec, scheme) for scheme in (*builtin(), *_foreign.values()) for spec in scheme.specs}


def parse_spec(text: str) -> Scheme:
    """Return the scheme of a spec: WORD or WORD:option=value,flag,…

    The first option may stand without its name. A scheme inside a scheme comes last, as base=SPEC.

    Raises:
        ConfigError: it is not a spec, or an option is unknown or out of range.
    """
    head, _, rest = text.strip().partition(":")
    word = words().get(head)
    if word is None and is_spec(head):
        import_scheme(head)
        word = words().get(head)
    if word is None:
        examples = {word: entry.example for word, entry in words().items()}
        nearest = examples[difflib.get_close_matches(head, examples, n=1, cutoff=0.0)[0]]
        raise ConfigError(
            f"scheme {text!r} is unknown; did you mean {nearest!r}? (one of {', '.join(examples_of_words())})"
        )
    return _make(text, word, rest)


def is_spec(text: str) -> bool:
    """Return whether `text` begins with the word of a scheme, registered or of an installed package."""
    head = text.strip().partition(":")[0]
    return head in words() or (head.isidentifier() and any(entry_points(group=GROUP, name=head)))


def examples_of_words() -> Iterator[str]:
    """Return a spec for each word that is listed, for help texts."""
    return (word.example for word in words().values() if word.spec.listed)


def options_of(word: Word) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, type, default) of each option; the default of a required one is `inspect.Parameter.empty`."""
    hints = typing.get_type_hints(word.make if inspect.isfunction(word.make) else word.make.__init__)
    for parameter in inspect.signature(word.make).parameters.values():
        yield parameter.name, hints.get(parameter.name, type(parameter.default)), parameter.default


def _make(text: str, word: Word, rest: str) -> Scheme:
    options = {name: (hint, default) for name, hint, default in options_of(word)}
    values: dict[str, Any] = {}
    items, has_base, base = (rest, "", "") if "base" not in options else rest.partition("base=")
    for position, item in enumerate(filter(None, items.split(","))):
        name, equals, value = item.strip().partition("=")
        first = next(iter(options), "")
        if not equals and position == 0 and name not in options and first and not _is_flag(options[first][0]):
            name, equals, value = first, "=", name
        flag = name in options and _is_flag(options[name][0])
        if name not in options or bool(equals) == flag or name in values or name == "base":
            raise ConfigError(
                f"option {item!r} of scheme {text!r} is unknown or given twice; choose from {_choices(options)}"
            )
        values[name] = True if flag else _parsed(name, value.strip(), options[name][0])
    if has_base:
        values["base"] = parse_spec(base)
    missing = [name for name, (_, default) in options.items() if default is inspect.Parameter.empty]
    if set(missing) - set(values):
        raise ConfigError(f"scheme {text!r} lacks {missing[0]}; did you mean {word.example!r}?")
    return word.make(**values)


def _choices(options: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(name if _is_flag(hint) else f"{name}=…" for name, (hint, _) in options.items()) or "none"


def _is_flag(hint: Any) -> bool:
    return hint is bool


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union without None, or the one type there is."""
    members = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return tuple(member for member in members if member is not type(None))


def _parsed(name: str, text: str, hint: Any) -> Any:
    """Return the value of an option from its text, by its type."""
    kind = _kinds(hint)[0]
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ConfigError(f"{name}={text!r} is unknown; choose {', '.join(map(str, get_args(kind)))}")
        return text
    try:
        if kind is int:
            if not text.isdecimal():
                raise ValueError
            return int(text)
        if kind is float:
            return float(text)
        if get_origin(kind) is tuple:
            return tuple(int(part) for part in text.split("x"))
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}.get(kind, "whole numbers such as 16x16x3x3")
        raise ConfigError(f"{name}={text!r} is not {wanted}") from None
    return text


def describe(word: Word) -> str:
    """Return a spec's form with its options and defaults, such as `codebook:k=16,per_row,rate=0`."""
    shown = []
    for name, hint, default in options_of(word):
        if _is_flag(hint):
            shown.append(name)
        elif Scheme in _kinds(hint):
            shown.append(f"{name}=SPEC")
        else:
            shown.append(f"{name}={_spelled(default)}")
    return word.spec.word + (":" + ",".join(shown) if shown else "")


def _spelled(value: Any) -> str:
    if value is None or value is inspect.Parameter.empty or not isinstance(value, int | float | str):
        return "…"
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table() -> str:
    """Return the table of the words that are listed, for the documentation, one row each."""
    rows = ["| spec | what it is |", "|---|---|"]
    rows += [f"| `{describe(word)}` | {word.spec.help} |" for word in words().values() if word.spec.listed]
    return "\n".join(rows)
