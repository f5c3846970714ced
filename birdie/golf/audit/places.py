"""Where in a stream a part of it lies, and whether two parts surely share tokens.

    stream[i * C : (i + 1) * C]      from i·C      to i·C + C
    stream[(i - 1) * C : i * C]      from i·C - C  to i·C          begins and ends elsewhere: perhaps other tokens
    for piece in pieces              the item @1 of them, whatever it is

Numbers are linear forms of what the scan does not know. What a loop counts has a name for each of its passes,
`@loop.pass`, and where it begins and ends is noted: once the loop is over, all of its passes together are what begins
there, and all of the stream if they go on to its end.
"""

import re
import zlib
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

Mark = tuple[int, int]
"""A loop, by its place in the file, and which of its passes."""
Form = tuple[tuple[tuple[str, ...], float], ...]
"""A polynomial: products of unknowns, sorted, and their factors; () is 0."""
ZERO: Form = ()

_LOOP = re.compile(r"@(\d+)\.\d+")
_ITEM = re.compile(r"1\*@\d+\.\d+")
_EACH = re.compile(r"1\*@\d+\.\d+:each\d*")
_COUNTED = re.compile(r"@\d+\.\d+(?::\w+)?")
_TERMS, _TEXT, _CUTS = 8, 120, 8  # of a product, of an unknown's name, of a region


def number(value: float) -> Form:
    """A form that is a number."""
    return (((), float(value)),) if value else ZERO


def unknown(name: str) -> Form:
    """A form that is not known, and equal only to what has the same name."""
    if len(name) > _TEXT:
        name = f"~{zlib.crc32(name.encode())}" + "".join(sorted({each.group() for each in _COUNTED.finditer(name)}))
    return (((name,), 1.0),)


END = unknown("end")


def add(a: Form, b: Form, times: float = 1.0) -> Form:
    """a + times · b."""
    sums = dict(a)
    for product, factor in b:
        sums[product] = sums.get(product, 0.0) + times * factor
    return tuple(sorted((product, factor) for product, factor in sums.items() if factor))


def multiply(a: Form, b: Form) -> Form | None:
    """a · b; None if that has too many terms."""
    if len(a) * len(b) > _TERMS:
        return None
    result = ZERO
    for left, factor in a:
        for right, other in b:
            product = tuple(sorted(left + right))
            if len(product) > _TERMS:
                return None
            result = add(result, ((product, factor * other),))
    return result


def constant(form: Form) -> float | None:
    """The number a form is, if it is one."""
    if not form:
        return 0.0
    return form[0][1] if len(form) == 1 and not form[0][0] else None


def text(form: Form) -> str:
    """A form in letters, as part of an unknown's name."""
    return "+".join(f"{factor:g}*{'*'.join(product)}" for product, factor in form) or "0"


@dataclass(slots=True)
class Bounds:
    """What is known of what loops count.

    Attributes:
        lows, highs: where it begins, and before what it ends.
        whole: loops that nothing leaves before their end.
        quotients: numbers that are a // b.
    """

    lows: dict[str, Form] = field(default_factory=dict)
    highs: dict[str, Form] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    quotients: dict[str, tuple[Form, Form]] = field(default_factory=dict)

    def divided(self, a: Form, b: Form) -> Form:
        """a // b."""
        if a == ZERO or constant(b) == 1:
            return a
        made = unknown(f"({text(a)}//{text(b)})")
        self.quotients[made[0][0][0]] = a, b
        return made

    def _multiplied(self, form: Form) -> Form:
        """`form` with (a // b) · b as a, which is not much more."""
        for product, factor in form:
            for name in set(product) & set(self.quotients):
                a, b = self.quotients[name]
                rest = list(product)
                rest.remove(name)
                if len(b) == 1 and b[0][0] == tuple(rest):
                    form = add(add(form, ((product, factor),), -1), a, factor / b[0][1])
        return form

    def full(self, cut: "Cut", first: Form, last: Form, kept: Collection[int]) -> bool:
        """Whether all passes of the loops together go through all from `first` to `last`, or about."""
        if not cut.loops() - set(kept) <= self.whole:
            return False
        if (_EACH if cut.at is None else _ITEM).fullmatch(text(add(cut.begin, first, -1))):
            return True
        counts = {name for product, _ in cut.begin for name in product if name in self.highs}
        highs = [
            _lowest(cut.begin, kept, ChainMap({each: self.highs[each]}, self.lows)) for each in sorted(counts)
        ]  # of the outer loop, where the inner begins
        left = [text(add(last, self._multiplied(each), -1)) for each in highs if each is not None]
        return any("end" not in each and "@" not in each for each in left)


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a stream: [start, stop), or one item of it.

    Attributes:
        start, stop: first place, and the one past the last; inside of an item, from its beginning.
        at: the item's place among the others; None for a slice.
    """

    start: Form
    stop: Form
    at: Form | None = None

    @property
    def begin(self) -> Form:
        return self.start if self.at is None else self.at

    @property
    def pieces(self) -> bool:
        """Whether it is what all passes of a loop together read: its items are their pieces, of any size."""
        return text(self.stop).startswith("1*?")

    def loops(self) -> set[int]:
        """Loops it depends on."""
        names = [name for form in (self.start, self.stop) for product, _ in form for name in product]
        return {int(each) for name in names for each in _LOOP.findall(name)}


@dataclass(frozen=True, slots=True)
class Region:
    """Part of the validation tokens: what certain passes of loops read of them.

    Attributes:
        marks: those passes; none: all of the tokens.
        path: how it was cut out, each a part of the one before; none: not at all.
    """

    marks: frozenset[Mark] = frozenset()
    path: tuple[Cut, ...] = ()

    def marked(self, marks: Collection[Mark]) -> "Region":
        """It, in these passes."""
        return replace(self, marks=frozenset({**dict(self.marks), **dict(marks)}.items())) if marks else self

    def slice(self, lower: Form | None, upper: Form | None) -> "Region":
        """Its places from `lower` on (None: from the first) and before `upper` (None: to the last)."""
        first, last = (self.path[-1].start, self.path[-1].stop) if self.path else (ZERO, END)
        start, stop = _place(first, last, lower, first), _place(first, last, upper, last)
        return self if (start, stop) == (first, last) else self._with(Cut(start, stop))

    def item(self, index: Form) -> "Region":
        """Its item at `index`, which has places of its own."""
        first, last = (self.path[-1].start, self.path[-1].stop) if self.path else (ZERO, END)
        at = _place(first, last, index, first)
        name = f"<{text(at)}>" + (text(last) if self.path and self.path[-1].pieces else "")
        return self._with(Cut(unknown(name), unknown(f"{name}end"), at))

    def _with(self, cut: Cut) -> "Region":
        return replace(self, path=(*self.path[: _CUTS - 1], cut))

    def swept(self, kept: Collection[int], bounds: Bounds) -> "Region":
        """It in all passes of all loops but `kept`, by what is known of them."""
        for place, cut in enumerate(self.path):
            if cut.loops() <= set(kept):
                continue
            first, within = (self.path[place - 1].start, self.path[place - 1].stop) if place else (ZERO, END)
            low = _lowest(cut.begin, kept, bounds.lows)
            if low is None:  # as if from the first to the last
                left = bool(cut.loops() - set(kept) - bounds.whole)
                return replace(self, path=self.path[: place + left])
            if constant(add(low, first, -1)) in (0.0, 1.0) and bounds.full(cut, first, within, kept):
                return replace(self, path=self.path[:place])
            return replace(self, path=(*self.path[:place], Cut(low, unknown(f"?{text(low)}<{text(within)}"))))
        return self


WHOLE = Region()


def _place(first: Form, last: Form, index: Form | None, otherwise: Form) -> Form:
    if index is None:
        return otherwise
    fixed = constant(index)
    return add(last if fixed is not None and fixed < 0 else first, index)


def _lowest(form: Form, kept: Collection[int], lows: Mapping[str, Form]) -> Form | None:
    """Where `form` begins; None: at the first of what it is a part of, as far as can be told."""
    result = ZERO
    for product, factor in form:
        term: Form | None = number(factor)
        for name in product:
            part = _low(name, kept, lows)
            term = multiply(term, part) if term is not None and part is not None else None
        if term is None:
            return None
        result = add(result, term)
    return result


def _low(name: str, kept: Collection[int], lows: Mapping[str, Form]) -> Form | None:
    counted = [each for each in _COUNTED.findall(name) if int(_LOOP.findall(each)[0]) not in kept]
    if not counted:
        return unknown(name)
    if counted == [name]:
        return lows.get(name)
    found = [
        lows.get(each) for each in counted
    ]  # as in `starts[@1.1]`: the first of them, or the one at which it begins
    if all(each is None or each == ZERO for each in found):
        return None
    for each, low in zip(counted, found, strict=True):
        name = name.replace(each, text(low or ZERO))
    return unknown(name)


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions may share tokens: not if they are different passes of one loop."""
    passes = dict(a.marks)
    return all(passes.get(loop, number) == number for loop, number in b.marks)


def surely(a: Region, b: Region) -> bool:
    """Whether two regions share tokens, by all that is known of where they lie.

    They do if one is a part of the other, if they begin or end at the same place, give or take the one token by which
    targets are ahead, or if the numbers say so.
    """
    if not a.path or not b.path or a.path[-1] in b.path or b.path[-1] in a.path:
        return True
    one, other = a.path[-1], b.path[-1]
    if one.at is not None and other.at is not None:
        above = [each.path[-2] if len(each.path) > 1 else None for each in (a, b)]
        if above[0] != above[1] and any(each is not None and each.pieces for each in above):
            return False
        return constant(add(one.at, other.at, -1)) == 0
    if one.at is not None or other.at is not None:
        item, part = (one, other) if one.at is not None else (other, one)
        after, left = constant(add(item.begin, part.start, -1)), constant(add(part.stop, item.begin, -1))
        if after is None or left is None:
            return after == 0 or left == 1
        return after >= 0 and left >= 1
    shared = [constant(add(x.stop, y.start, -1)) for x in (one, other) for y in (one, other)]
    if all(each is not None for each in shared):
        sizes = [each for each in shared if each is not None]
        return min(sizes) >= (1 if min(sizes[0], sizes[3]) == 1 else 2)
    starts, stops = constant(add(one.start, other.start, -1)), constant(add(one.stop, other.stop, -1))
    return any(each is not None and abs(each) <= 1 for each in (starts, stops))


def newest(regions: Collection[Region]) -> list[Region]:
    """Of regions in the same loops the latest passes, and of those what lies last: a target comes after its context."""
    latest: dict[tuple[int, ...], list[Region]] = {}
    for region in regions:
        loops = tuple(sorted(loop for loop, _ in region.marks))
        known = latest.setdefault(loops, [region])
        if sorted(region.marks) > sorted(known[0].marks):
            latest[loops] = [region]
        elif region.marks == known[0].marks and region not in known:
            known.append(region)
    return [each for group in latest.values() for each in group if not any(_before(each, other) for other in group)]


def _before(a: Region, b: Region) -> bool:
    if not a.path or not b.path:
        return not a.path and bool(b.path)
    apart = constant(add(b.path[-1].begin, a.path[-1].begin, -1))
    return apart is not None and apart > 0
