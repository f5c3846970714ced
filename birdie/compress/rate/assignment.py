"""Which scheme each tensor gets: specs as people write them, and name patterns.

    SPEC     lossless · fp16 · bf16 · int2 … int8 · int8:step=4 · int4:group=64 · int6:clip=0.9995 · int4:clip=search
             sigma:0.3 · sigma:0.3,group=64 · sigma:0.3,whole · sdclip:bits=6,k=12.85[,group=64] · gptq:bits=6,k=12.85
             trellis:states=32[,sigma=0.3][,whole] · ternary[:group=64] · binary · codebook:k=16[,rows][,rate=0.01]
             rotation:bits=4[,residual] · rotation:base=SPEC · lowrank:rank=4[,left=4][,right=4][,base=SPEC]
             spectral:auto,sigma=0.3[,scan=planes] · spectral:dct,edge=8,sigma=0.3[,axes=kernel]
             tucker:energy=0.99[,base=SPEC] · tucker:ranks=16x16x3x3[,base=SPEC] (base comes last)
    rule     PATTERN=SPEC, the pattern a shell glob on the tensor's name; the first rule that matches wins

What the rules leave gets the default; there, matrices of a few thousand weights and up take it, and what is smaller
(norms, biases, gains) is kept in 16 bits or losslessly, as it costs next to nothing and matters much. A rule that names
a tensor goes further: its grid is used for any matrix, and for a vector, as one row, from as many elements up; below
that, the vector is kept in 16 bits or losslessly even so.
"""

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import CLIP_QUANTILE, Grid
from birdie.compress.schemes.lossless import Cast, Lossless
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.rotation import Rotation
from birdie.compress.schemes.spectral import Spectral
from birdie.compress.schemes.ternary import GROUP, Ternary
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.schemes.tucker import Tucker
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import REAL_DTYPES
from birdie.errors import ConfigError

SMALL = 4096  # elements below which a tensor is not worth a grid
Rule = tuple[str, Scheme]
Spec = str | Scheme
Schemes = Spec | Mapping[str, Spec] | Sequence[tuple[str, Spec]]

_FORMS = (
    *("lossless", "fp16", "bf16", *(f"int{bits}" for bits in range(2, 9)), "int8:step=4", "int4:group=64", "sigma:0.3"),
    *("int4:clip=search", "sdclip:bits=6,k=12.85", "gptq:bits=6,k=12.85", "trellis:states=8,sigma=0.3"),
    *("ternary", "binary", "codebook:k=16", "rotation:bits=4", "lowrank:rank=4,base=int6"),
    *("spectral:auto,sigma=0.3", "spectral:dct,edge=8,sigma=0.3", "tucker:energy=0.99"),
)
_INT = re.compile(r"int(\d+)")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "int": ("step", "group", "clip"),
    "sigma": ("group", "whole"),
    "sdclip": ("bits", "k", "group"),
    "gptq": ("bits", "k"),
    "trellis": ("states", "sigma", "whole"),
    "ternary": ("group",),
    "binary": ("group",),
    "codebook": ("k", "rows", "rate"),
    "rotation": ("bits", "residual", "seed", "base"),
    "lowrank": ("rank", "left", "right", "base"),
    "spectral": ("edge", "levels", "axes", "sigma", "scan"),
    "tucker": ("energy", "ranks", "base"),
}
_FLAGS = ("rows", "residual", "whole")
QUANTIZERS = (Grid, Trellis, Ternary, Codebook, Rotation, LowRank, Spectral, Tucker)


def parse_spec(text: str) -> Scheme:
    """The scheme that `text` spells.

    Raises:
        ConfigError: it is not a spec, or its number is out of range.
    """
    spec = text.strip()
    if spec == "lossless":
        return Lossless()
    if spec == "fp16":
        return Cast("fp16")
    if spec == "bf16":
        return Cast("bf16")
    head, _, rest = spec.partition(":")
    width = _INT.fullmatch(head)
    if width:
        found = _options(text, "int", rest)
        clip = found.values.get("clip", str(CLIP_QUANTILE))
        quantile = (
            None if clip == "search" else _number(clip, "a quantile; write for example clip=0.9995 or clip=search")
        )
        return Grid(int(width[1]), found.whole("step", 1), clip=quantile, group=found.maybe("group"))
    if head == "sigma" and rest:
        sigma, _, rest = rest.partition(",")
        found = _options(text, head, rest)
        return Grid(
            sigma=_number(sigma, "a number of standard deviations; write for example sigma:0.3"),
            group=found.maybe("group"),
            whole="whole" in found.values,
        )
    if head in ("sdclip", "gptq"):
        found = _options(text, head, rest)
        k = _number(found.values.get("k", "12.85"), "a number of standard deviations; write for example k=12.85")
        clipped = Grid(found.whole("bits", 6), group=found.maybe("group"), deviations=k)
        return clipped if head == "sdclip" else Trellis(1, k / clipped.top, rate=0.0, output=False)
    if head == "trellis":
        found = _options(text, head, rest)
        given = found.values.get("sigma")
        wanted = "a number of standard deviations; write for example sigma=0.3"
        step = None if given is None else _number(given, wanted)
        return Trellis(found.whole("states", 32), step, whole="whole" in found.values)
    if head in ("ternary", "binary"):
        return Ternary(_options(text, head, rest).whole("group", GROUP), binary=head == "binary")
    if head == "codebook":
        found = _options(text, head, rest)
        rate = _number(found.values.get("rate", "0"), "a number of variances; write for example rate=0.01")
        return Codebook(found.whole("k", 16), "rows" in found.values, rate)
    if head == "rotation":
        found = _options(text, head, rest)
        return Rotation(found.whole("bits", 4), "residual" in found.values, found.base, found.whole("seed", 0))
    if head == "lowrank":
        found = _options(text, head, rest)
        return LowRank(
            found.whole("rank", 4), found.base or Grid(bits=6), found.whole("left", 4), found.whole("right", 4)
        )
    if head == "spectral":
        return _spectral(text, rest)
    if head == "tucker":
        return _tucker(text, rest)
    heads = {form.partition(":")[0]: form for form in reversed(_FORMS)}
    near = heads[difflib.get_close_matches(head, heads, n=1, cutoff=0.0)[0]]
    raise ConfigError(f"scheme {text!r} is unknown; did you mean {near!r}? (one of {', '.join(_FORMS)})")


def _spectral(text: str, rest: str) -> Spectral:
    """`KIND,option=value…`; "auto" where no kind is named."""
    kind, _, after = rest.partition(",") if "=" not in rest.partition(",")[0] else ("", "", rest)
    found = _options(text, "spectral", after)
    sigma = _number(found.values.get("sigma", "0.3"), "a number of standard deviations; write for example sigma=0.3")
    scan = found.values.get("scan", "auto")
    if kind.strip() in ("", "auto"):
        if {"edge", "levels", "axes"} & set(found.values):
            raise ConfigError(f"scheme {text!r} sets what auto chooses; name a transform: spectral:dct,edge=8")
        return Spectral("auto", sigma, scan)
    axes = found.values.get("axes", "all")
    transform = Transform(kind.strip(), found.whole("edge", 8), found.whole("levels", 3), axes)  # type: ignore[arg-type]
    return Spectral(transform, sigma, scan)


def _tucker(text: str, rest: str) -> Tucker:
    found = _options(text, "tucker", rest)
    base, ranks = found.base or Grid(sigma=0.3), found.values.get("ranks")
    if ranks is None:
        return Tucker(_number(found.values.get("energy", "0.99"), "a share; write for example energy=0.99"), base=base)
    if "energy" in found.values or not all(each.isdecimal() for each in ranks.split("x")):
        raise ConfigError(f"scheme {text!r} is unclear; give energy=0.99 or one rank for each axis: ranks=16x16x3x3")
    return Tucker(ranks=tuple(int(each) for each in ranks.split("x")), base=base)


def _number(text: str, wanted: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not {wanted}") from None


@dataclass(frozen=True, slots=True)
class _Options:
    """What follows the colon of a spec: `values` by name, flags with "", and the scheme inside, if any."""

    values: Mapping[str, str]
    base: Scheme | None

    def whole(self, name: str, default: int) -> int:
        given = self.values.get(name, str(default))
        if not given.isdecimal():
            raise ConfigError(f"{name}={given!r} is not a whole number; write for example {name}={default}")
        return int(given)

    def maybe(self, name: str) -> int | None:
        return self.whole(name, 64) if name in self.values else None


def _options(text: str, kind: str, rest: str) -> _Options:
    """`a=1,flag,base=SPEC` → its options; the base, which may have options itself, is all that follows `base=`.

    Raises:
        ConfigError: an option is unknown to `kind`, lacks its value, or is there twice.
    """
    before, based, inside = (rest, "", "") if "base" not in _OPTIONS[kind] else rest.partition("base=")
    values: dict[str, str] = {}
    for item in filter(None, before.split(",")):
        name, equals, value = item.strip().partition("=")
        if name not in _OPTIONS[kind] or (not equals) != (name in _FLAGS) or name in values or name == "base":
            offered = ", ".join(each if each in _FLAGS else f"{each}=…" for each in _OPTIONS[kind])
            raise ConfigError(f"option {item!r} of scheme {text!r} is unknown or there twice; choose from {offered}")
        values[name] = value.strip()
    return _Options(values, parse_spec(inside) if based else None)


def parse_rule(text: str) -> Rule:
    """`PATTERN=SPEC` → (pattern, scheme).

    Raises:
        ConfigError: there is no "=", or the spec is not one.
    """
    pattern, equals, spec = text.partition("=")
    if not equals or not pattern:
        raise ConfigError(f"scheme rule {text!r} is not PATTERN=SPEC; write for example 'blocks.*=int6'")
    return pattern, parse_spec(spec)


def rules_of(scheme: Schemes | None, *, targeted: bool) -> tuple[Scheme, list[Rule]]:
    """(default, rules) of what the caller gave as `scheme`; `targeted` when a budget decides what no rule names."""
    if scheme is None:
        return Grid(), []
    if isinstance(scheme, Mapping):
        scheme = list(scheme.items())
    if isinstance(scheme, Sequence) and not isinstance(scheme, str):
        return Grid(), [(pattern, _scheme(spec)) for pattern, spec in scheme]
    if targeted:
        raise ConfigError(
            "a scheme for every tensor leaves a budget nothing to choose; give (pattern, spec) rules or drop one"
        )
    return _scheme(scheme), []


def _scheme(spec: Spec) -> Scheme:
    return parse_spec(spec) if isinstance(spec, str) else spec


def is_matrix(weight: Tensor) -> bool:
    """Whether a grid pays: a real floating tensor of two or more dimensions and at least `SMALL` elements."""
    return weight.dtype in REAL_DTYPES and weight.ndim >= 2 and weight.numel() >= SMALL


def takes_grid(weight: Tensor) -> bool:
    """Whether a grid can hold it at some gain: any matrix of real floats, and vectors of at least `SMALL` elements."""
    return weight.dtype in REAL_DTYPES and (weight.numel() > 0 if weight.ndim >= 2 else weight.numel() >= SMALL)


def small_scheme(weight: Tensor) -> Scheme:
    """For what is too small for a grid: float16 where that keeps about ten bits of every value, else lossless.

    Integers stay as they are, and so does a tensor with a value that float16 cannot reach or would make zero or
    subnormal: a variance of 1e-9 counts, however large its neighbours are.
    """
    if weight.dtype not in (torch.float32, torch.float64) or not bool(torch.isfinite(weight).all()):
        return Lossless() if weight.dtype not in REAL_DTYPES else Cast()
    rounded = weight.detach().to(torch.float16).double().abs()
    normal = (rounded >= torch.finfo(torch.float16).tiny) & rounded.isfinite()
    return Cast() if bool((normal | (weight == 0)).all()) else Lossless()


def suit(scheme: Scheme, weight: Tensor) -> Scheme:
    """`scheme` where it can hold `weight`, else the nearest that can: see `takes_grid` for what quantizers can."""
    if not isinstance(scheme, QUANTIZERS):
        return scheme if weight.dtype in REAL_DTYPES else Lossless()
    return scheme if takes_grid(weight) else small_scheme(weight)


def assign(state: Mapping[str, Tensor], pinned: Mapping[str, Scheme], default: Scheme) -> dict[str, Scheme]:
    """The scheme of every tensor in `state`: the one it is pinned to (by `match`), else the default."""
    schemes: dict[str, Scheme] = {}
    for name, weight in state.items():
        if name in pinned:
            schemes[name] = suit(pinned[name], weight)
        elif isinstance(default, QUANTIZERS) and not is_matrix(weight):
            schemes[name] = small_scheme(weight)
        else:
            schemes[name] = suit(default, weight)
    return schemes


def match(names: Collection[str], rules: Iterable[Rule]) -> dict[str, Scheme]:
    """Name → scheme of the first rule whose pattern matches; names that no rule matches are left out.

    Raises:
        ConfigError: a pattern matches no tensor.
    """
    matched: dict[str, Scheme] = {}
    for pattern, scheme in rules:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, list(names), n=1, cutoff=0.0)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise ConfigError(f"scheme pattern {pattern!r} matches no tensor{hint}")
        for name in hits:
            matched.setdefault(name, scheme)
    return matched


def encode_all(
    state: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    *,
    sensitivities: Mapping[str, Sensitivity] | None = None,
    workers: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Encoded]:
    """Encode every tensor of `state` by its scheme, several at a time; `done` is called after each, from any thread."""

    def encode(name: str) -> Encoded:
        encoded = schemes[name].encode(name, state[name], sensitivity=(sensitivities or {}).get(name))
        done()
        return encoded

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return dict(zip(state, pool.map(encode, state), strict=True))
