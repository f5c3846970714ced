"""Assignment of schemes to tensors: by name patterns first, then by the default or, with a target, by the search.

    model state, rules, target ──► Assignment: settled schemes, and the matrices that the search may coarsen

A rule is PATTERN=SPEC, where the pattern is a shell glob on the tensor's name; the first rule that matches wins. The
scheme of a rule applies to any matrix, and to a vector of a few thousand elements, which counts as one row. Matrices
without a rule take the default scheme, or, with a target, what the search chooses. Tensors that are no weights
(birdie.compress.exact) are stored losslessly, unless a rule's pattern is the full name of one.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor

from birdie.compress.quantized import fits_exact, is_smaller_exact
from birdie.compress.rate.target import Target
from birdie.compress.registry import is_spec, parse_spec, register
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.small_tensors import (
    SMALL,
    applicable,
    beyond_16_bits,
    default_scheme,
    flat_vectors,
    in_eight_bits,
    is_matrix,
    is_worth_coarsening,
    kept_precisely,
    shrinks,
    small_scheme,
)
from birdie.compress.state import ModelState
from birdie.compress.tensors import count_reals, planes
from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.compress.rate.job import Relative

DEFAULT = parse_spec("feedback:bits=8")
Rule = tuple[str, Scheme]
Schemes = str | Scheme | Mapping[str, str | Scheme] | Sequence[tuple[str, str | Scheme]]


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that one entry of a file holds, one after the other."""

    names: tuple[str, ...]  # sorted
    shape: tuple[int, ...]  # of each


@dataclass(frozen=True, slots=True)
class Assignment:
    """The tensors of a file with their settled schemes, and the tensors left to a search."""

    tensors: Mapping[str, Tensor]  # name → tensor, tied ones once
    ties: Mapping[str, str]  # second name → first name
    settled: Mapping[str, Scheme]  # name → scheme of tensors with a rule; without a target, the schemes of all tensors
    small: Mapping[str, Scheme]  # name → scheme of tensors that are too small for a search
    free: tuple[str, ...] = ()  # names of matrices whose precision a search chooses; empty without a target
    # names of long vectors, gates and tiny matrices, kept in 16 bits unless a budget is too tight for that
    reserve: tuple[str, ...] = ()
    steered: Scheme | None = None  # the scheme whose scale the search sets; None: the search takes grids or trellises
    trellis: Trellis = field(default_factory=Trellis)  # that the search takes
    exact: frozenset[str] = frozenset()  # names of settled tensors that are lossless because they are no weights
    # names of settled matrices that are lossless because they are quantized already, and so small that a target allows
    # it; a search may still coarsen them
    quantized: frozenset[str] = frozenset()
    # second names of `ties` whose tensors are equal and independent (birdie.compress.rate.groups)
    copies: frozenset[str] = frozenset()
    # names of tensors that the module looks up by tokens, as far as that is known
    embeddings: frozenset[str] = frozenset()
    # name of a tensor → the tiny tensors of the model that it consists of (birdie.compress.rate.groups)
    groups: Mapping[str, Group] = field(default_factory=dict)
    # names of tensors of `SMALL` elements and more that are to be quantized, if their numbers allow it
    meant: frozenset[str] = frozenset()
    # name of a tensor that may be stored relative to another → what makes its numbers and scheme relative
    bases: Mapping[str, "Relative"] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Elements of all tensors, tied ones once and complex ones as two."""
        return sum(map(count_reals, self.tensors.values()))


def assign(state: ModelState, schemes: Schemes | None, target: Target, *, measured: bool = False) -> Assignment:
    """Settle the scheme of every tensor, or leave it to a search for the target.

    Args:
        state: the model's tensors.
        schemes: a spec or scheme for all, or (pattern, spec) rules; None: `DEFAULT`, or a search for the target. A
            trellis without a scale is the one that this search takes.
        target: byte budget, quality, lossless, or nothing.
        measured: whether a calibration reaches the vectors: those in doubt then count as parameters of layers.
    """
    default, rules = parse_rules(schemes)
    for scheme in (*([] if default is None else [default]), *(scheme for _, scheme in rules)):
        register(type(scheme))  # a scheme object from outside birdie registers its class
    steered, trellis = default if target.searched else None, Trellis()
    if isinstance(steered, Trellis) and steered == Trellis(steered.states):
        trellis, steered = steered, None
    if steered is not None and steered.at_scale(1.0) is None:
        raise ConfigError(
            "a scheme of fixed precision for every tensor leaves the target nothing to choose; give (pattern, spec) "
            "rules, a scheme with a scale, or drop one of the two"
        )
    by_name = {**state.stored_as, **match(state.by_name, rules)}
    named = {state.ties.get(name, name): scheme for name, scheme in by_name.items()}
    weights = sum(map(count_reals, state.tensors.values()))
    budget = target.in_bytes(weights)
    in_doubt = {name: state.tensors[name] for name in state.doubtful}
    precise = kept_precisely(in_doubt, budget or weights, doubtful=not measured)
    exact = state.exact | precise
    exact -= {state.ties.get(pattern, pattern) for pattern, _ in rules}
    settled: dict[str, Scheme] = {}
    small: dict[str, Scheme] = {}
    free, reserve, quantized = [], [], set()
    flat = frozenset() if target.lossless else flat_vectors(state.tensors)
    bits = 0.0 if budget is None else 8 * budget / max(weights, 1)
    for name, tensor in state.tensors.items():
        if target.lossless or name in exact:
            settled[name] = Lossless()
            continue
        weight = planes(tensor)
        if name in named:
            settled[name] = applicable(named[name], weight)
        elif not target.searched:
            if name in flat:
                settled[name] = DEFAULT if default is None else applicable(default, weight)
            else:
                settled[name] = in_eight_bits(DEFAULT, weight) if default is None else default_scheme(default, weight)
            if default is None and settled[name].quantizes and is_smaller_exact(weight, settled[name]):
                settled[name] = Lossless()
                quantized.add(name)
        elif name in flat or is_worth_coarsening(weight):
            if default is None and bits and fits_exact(weight, bits):
                settled[name] = Lossless()
                quantized.add(name)
            else:
                free.append(name)
        elif shrinks(weight) or is_matrix(weight):
            reserve.append(name)
        else:
            small[name] = small_scheme(weight)
    quantizes = not target.lossless and (default is None or default.quantizes)
    meant = frozenset(
        name
        for name, tensor in state.tensors.items()
        if count_reals(tensor) >= SMALL
        and (tensor.is_floating_point() or tensor.is_complex())
        and (named[name].quantizes if name in named else quantizes and name not in exact | quantized)
    )
    if quantizes:
        by_size = {**small, **{name: scheme for name, scheme in settled.items() if name not in named}}
        vectors = {name: state.tensors[name] for name, scheme in by_size.items() if isinstance(scheme, Cast)}
        taken = sum(beyond_16_bits(state.tensors[name]) for name in precise)
        for name in kept_precisely(vectors, budget or weights, taken=taken):
            (settled if name in settled else small)[name] = Lossless()
    return Assignment(
        state.tensors,
        state.ties,
        settled,
        small,
        tuple(free),
        tuple(reserve),
        steered,
        trellis,
        exact,
        frozenset(quantized),
        embeddings=state.embeddings,
        meant=frozenset() if target.lossless else meant,
    )


def parse_rules(schemes: Schemes | None) -> tuple[Scheme | None, list[Rule]]:
    """Return (scheme for every tensor, rules) of the argument `schemes`: one of the two is set, or neither."""
    if schemes is None:
        return None, []
    if isinstance(schemes, str | Scheme):
        return _scheme(schemes), []
    pairs: Any = list(schemes.items()) if isinstance(schemes, Mapping) else schemes
    rules: dict[str, str | Scheme] = {}
    for rule in pairs if isinstance(pairs, list | tuple) else [pairs]:
        pair = isinstance(rule, list | tuple) and len(rule) == 2
        if not (pair and isinstance(rule[0], str) and isinstance(rule[1], str | Scheme)):
            raise ConfigError(f"scheme {rule!r} is neither spec nor rule; write 'int6' or [('blocks.*', 'int6')]")
        pattern, spec = rule
        if pattern in rules:
            raise ConfigError(
                f"scheme pattern {pattern!r} has two rules, {rules[pattern]} and {spec}; the first would hide the "
                "second: remove one of them"
            )
        rules[pattern] = spec
    return None, [(pattern, _scheme(spec)) for pattern, spec in rules.items()]


def _scheme(spec: str | Scheme) -> Scheme:
    return parse_spec(spec) if isinstance(spec, str) else spec


def schemes_of(texts: Sequence[str]) -> str | list[tuple[str, str]]:
    """Return the schemes that flags SPEC or PATTERN=SPEC stand for; of several, SPEC is the rule for the rest."""
    general = [text for text in texts if is_spec(text)]
    if len(general) > 1:
        raise ConfigError(
            f"--scheme {general[0]} and --scheme {general[1]} are both for all matrices; keep one of them, or write "
            f"--scheme 'PATTERN={general[0]}'"
        )
    if len(texts) == 1 and general:
        return general[0]
    return [_rule(text) for text in texts if text not in general] + [("*", text) for text in general]


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, spec = text.partition("=")
    if not equals or ":" in pattern:
        parse_spec(text)  # names the nearest spec
    if not pattern or not spec:
        raise ConfigError(f"--scheme {text!r} is not SPEC or PATTERN=SPEC; write for example --scheme '*.mlp.*=int6'")
    return pattern, spec


def match(names: Collection[str], rules: Iterable[Rule]) -> dict[str, Scheme]:
    """Return name → scheme of the first rule whose pattern matches; names without a rule are left out."""
    matched: dict[str, Scheme] = {}
    for pattern, scheme in rules:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, list(names), n=1, cutoff=0.0)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise ConfigError(f"scheme pattern {pattern!r} matches no tensor{hint}; correct or remove the rule")
        for name in hits:
            matched.setdefault(name, scheme)
    return matched
