"""Where parts of a stream lie: cuts are those of Python, and what is said to share a token does."""

from hypothesis import given
from hypothesis import strategies as st

from birdie.golf.audit.places import (
    END,
    WHOLE,
    ZERO,
    Bounds,
    Region,
    add,
    constant,
    multiply,
    newest,
    number,
    overlap,
    surely,
    unknown,
)

LENGTH = 40
forms = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(-3, 3)), max_size=3)
bounds = st.one_of(st.none(), st.integers(0, 12))
cuts = st.lists(st.one_of(st.tuples(bounds, bounds), st.integers(0, 12)), max_size=3)


def form(terms: list[tuple[str, int]]) -> tuple[tuple[tuple[str, ...], float], ...]:
    total = ZERO
    for name, times in terms:
        total = add(total, unknown(name), times)
    return add(total, number(len(terms)))


def value(terms: tuple[tuple[tuple[str, ...], float], ...], at: dict[str, int]) -> float:
    total = 0.0
    for product, factor in terms:
        for name in product:
            factor *= at[name]
        total += factor
    return total


@given(forms, forms, st.tuples(*[st.integers(-5, 5)] * 3))
def test_forms_are_polynomials(one: list[tuple[str, int]], two: list[tuple[str, int]], at: tuple[int, ...]) -> None:
    a, b, where = form(one), form(two), dict(zip("abc", at, strict=True))
    assert value(add(a, b, -2), where) == value(a, where) - 2 * value(b, where)
    product = multiply(a, b)
    assert product is None or value(product, where) == value(a, where) * value(b, where)
    assert add(a, a, -1) == ZERO
    assert constant(add(a, number(7))) == (value(a, where) + 7 if constant(a) is not None else None)


def cut(steps: list[tuple[int | None, int | None] | int]) -> tuple[Region, set[int]] | None:
    """The same steps taken of a region and of a list of places; None if they leave fewer than two of them."""
    region, places = WHOLE, list(range(LENGTH))
    for step in steps:
        if isinstance(step, int):
            continue
        lower, upper = (None if each is None else number(each) for each in step)
        region, places = region.slice(lower, upper), places[step[0] : step[1]]
        if len(places) < 2 or (step[1] is not None and len(places) < step[1] - (step[0] or 0)):
            return None
    if steps and isinstance(steps[-1], int) and steps[-1] < len(places):
        return region.item(number(steps[-1])), {places[steps[-1]]}
    return region, set(places)


@given(cuts)
def test_cuts_are_those_of_python(steps: list[tuple[int | None, int | None] | int]) -> None:
    found = cut(steps)
    if found is None or not found[0].path or found[0].path[-1].at is not None:
        return
    region, places = found
    first, last = region.path[-1].start, region.path[-1].stop
    assert constant(first) == min(places)
    assert constant(last) == max(places) + 1 or last == END


@given(cuts, cuts)
def test_what_surely_shares_tokens_shares_some(
    one: list[tuple[int | None, int | None] | int], two: list[tuple[int | None, int | None] | int]
) -> None:
    a, b = cut(one), cut(two)
    if a is None or b is None:
        return
    assert surely(a[0], b[0]) == surely(b[0], a[0])
    assert surely(a[0], a[0])
    if surely(a[0], b[0]):
        assert a[1] & b[1]


@given(st.integers(-4, 4), st.integers(-4, 4), st.integers(1, 9))
def test_chunks_by_number(i: int, j: int, size: int) -> None:
    """[(k + i) * C, (k + i + 1) * C) for a chunk that is not known: surely the same only if i is j."""
    k, c = unknown("@1.1:v"), unknown("C")

    def chunk(by: int) -> Region:
        first = multiply(add(k, number(by)), c)
        assert first is not None
        return WHOLE.slice(first, add(first, c))

    assert surely(chunk(i), chunk(j)) == (i == j)
    assert surely(WHOLE, chunk(i))
    assert surely(chunk(i).slice(number(1), None), chunk(i))
    assert not surely(WHOLE.item(add(k, number(i))), WHOLE.item(add(k, number(i + size))))


def test_a_loop_that_is_over_covers_what_it_went_through() -> None:
    k, half = unknown("@1.1:v"), unknown("half")
    piece = WHOLE.slice(k, add(k, number(64)))
    later = WHOLE.slice(unknown("@2.1:v"), None)
    lows = Bounds({"@1.1:v": ZERO, "@2.1:v": half})
    assert not surely(piece, later)
    assert not surely(piece.swept([], lows), later.swept([], lows))
    assert surely(piece.swept([], lows), WHOLE.slice(ZERO, half))
    assert piece.swept([1], lows) == piece
    assert not surely(piece.swept([], Bounds()), later)  # from who knows where on
    assert surely(piece.swept([], Bounds(whole={1})), later)  # of all, as nothing leaves the loop
    ends = Bounds({"@1.1:v": ZERO}, {"@1.1:v": add(END, number(-1))}, {1})
    assert piece.swept([], ends) == WHOLE
    assert piece.swept([], Bounds(ends.lows, {"@1.1:v": half}, {1})) != WHOLE


def test_passes_are_told_apart() -> None:
    first, second = (WHOLE.marked(((1, number),)) for number in (1, 2))
    assert not overlap(first, second)
    assert overlap(first, WHOLE)
    assert overlap(first, second.marked(((1, 1),)))
    assert newest([first, second, WHOLE]) == [second, WHOLE]
    context, target = (first.slice(number(at), END) for at in (0, 1))
    assert newest([context, target]) == [target]
