"""Compiled kernel for CPUs: the bits of a matrix and their slopes, as `rate` computes them with tensors.

Everything is float32 without branches, so that SIMD instructions process eight or sixteen symbols at once, and only the
gradient is as large as the matrix. Exponentials, logarithms and the tail of the normal distribution are polynomials
fitted to 2e-7 relative error. `rate` explains the formulas; tests compare the two implementations.
"""

from typing import Any

import numpy as np

from birdie.system.kernels import njit

_FAST = {"contract", "nsz", "reassoc"}  # sums in any order; NaN still propagates
_I = np.int32
_ZERO, _QUARTER, _HALF, _ONE, _TWO = (np.float32(value) for value in (0, 0.25, 0.5, 1, 2))
_LOG2E, _LN2 = np.float32(np.log2(np.e)), np.float32(np.log(2))
_ROOT = np.float32((2 * np.pi) ** -0.5)
_SQRT2 = np.float32(2**0.5)
_LEAST_EXPONENT = np.float32(-100)  # keeps products normal, and is far below the constant added to probabilities
_SHEPPARD = np.float32(1 / 12)
# 2^f for f within ±1/2; artanh(y) / y in y² for |y| within 3 − √8; the upper tail over the density at z, over t, in
# t = 1 / (1 + 0.28 z). Coefficients fitted by least squares of the relative error.
_E0, _E1, _E2, _E3 = np.float32(1.0), np.float32(0.6931471992), np.float32(0.2402264736), np.float32(0.0555034222)
_E4, _E5, _E6 = np.float32(0.0096184914), np.float32(0.0013394731), np.float32(0.0001533247)
_A0, _A1, _A2, _A3 = np.float32(1.0), np.float32(0.3333339210), np.float32(0.1998913082), np.float32(0.1491736544)
_SLANT = np.float32(0.28)
_M0, _M1, _M2 = np.float32(0.2800002746), np.float32(0.2799788926), np.float32(0.2585623926)
_M3, _M4, _M5 = np.float32(0.2084668182), np.float32(0.1867149935), np.float32(-0.0251061219)
_M6, _M7, _M8 = np.float32(0.2422090492), np.float32(-0.2411318563), np.float32(0.0636195845)

_inline = njit(no_cpython_wrapper=True, _nrt=False, fastmath=_FAST, error_model="numpy")


@_inline
def _exp(x: Any) -> Any:
    """Return e^x for x up to about 0, and not less than 2^-100."""
    turns = x * _LOG2E
    turns = _LEAST_EXPONENT if turns < _LEAST_EXPONENT else turns
    exponent = np.rint(turns)
    f = turns - exponent
    power = _E0 + f * (_E1 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * _E6)))))
    return power * _I((_I(exponent) + _I(127)) << _I(23)).view(np.float32)


@_inline
def _artanh(y: Any) -> Any:
    u = y * y
    return y * (_A0 + u * (_A1 + u * (_A2 + u * _A3)))


@_inline
def _split(x: Any) -> Any:
    """Return (e, m) with x = m 2^e and m between √½ and √2, for a normal x."""
    bits = np.float32(x).view(np.int32)
    m = _I((bits & _I(0x7FFFFF)) | _I(0x3F800000)).view(np.float32)
    high = m > _SQRT2
    e = np.float32(_I((bits >> _I(23)) - _I(127)))
    return (e + _ONE if high else e), (m * _HALF if high else m)


@_inline
def _tail(x: Any, density: Any) -> Any:
    """Return the normal distribution function at x, whose density is passed."""
    z = abs(x)
    t = _ONE / (_ONE + _SLANT * z)
    p = _M4 + t * (_M5 + t * (_M6 + t * (_M7 + t * _M8)))
    p = density * t * (_M0 + t * (_M1 + t * (_M2 + t * (_M3 + t * p))))
    return p if x < _ZERO else _ONE - p


@_inline
def _density(x: Any) -> Any:
    return _ROOT * _exp(-_HALF * x * x)


@njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
def moments(coefficients: Any, steps: Any, rows: Any, columns: Any) -> None:
    """Compute sums of squares and of magnitudes of the symbols, into rows (2, n) and columns (2, m), float64."""
    single = steps.size == 1
    count = coefficients.shape[1]
    size = np.empty(count, np.float32)
    for i in range(coefficients.shape[0]):
        line, by = coefficients[i], steps[0 if single else i]
        if single:
            for j in range(count):
                size[j] = np.rint(abs(line[j] / by[0]))
        else:
            for j in range(count):
                size[j] = np.rint(abs(line[j] / by[j]))
        squares, sizes = _ZERO, _ZERO
        for j in range(count):
            squares += size[j] * size[j]
            sizes += size[j]
        rows[0, i], rows[1, i] = squares, sizes
        for j in range(count):
            columns[0, j] += np.float64(size[j] * size[j])
            columns[1, j] += np.float64(size[j])


@njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
def bits_and_slopes(
    coefficients: Any, steps: Any, of_rows: Any, of_columns: Any, share: Any, least: Any, slopes_out: Any, sums: Any
) -> Any:
    """Return bits and their slope by the geometric part's share; fill the other slopes if `slopes_out` is not empty.

    Args:
        coefficients: (n, m) float32.
        steps: (1, 1) or (n, m) float32.
        of_rows, of_columns: (2, n) and (2, m) float32, whose products are mean square and mean magnitude.
        share, least: float32, share of the geometric part, and the constant added to every probability.
        slopes_out: (n, m) float32, or (0, 0): slopes by magnitude at constant moments.
        sums: sums of slopes by the logarithms of both moments: (n + m, 2) float64, or (0, 2).
    """
    single, slopes = steps.size == 1, slopes_out.size > 0
    height, count = coefficients.shape
    soft, of_square, of_magnitude = np.empty((3, count), np.float32)
    bits, by_share = 0.0, 0.0
    rest = _ONE - share
    for i in range(height):
        line, by = coefficients[i], steps[0 if single else i]
        if single:
            for j in range(count):
                soft[j] = abs(line[j] / by[0])
        else:
            for j in range(count):
                soft[j] = abs(line[j] / by[j])
        row_square, row_magnitude = of_rows[0, i], of_rows[1, i]
        some_bits, some_share = _ZERO, _ZERO
        for j in range(count):
            square, magnitude = row_square * of_columns[0, j], row_magnitude * of_columns[1, j]
            less = square - _SHEPPARD
            least_square = _QUARTER * square
            inverse = _ONE / np.sqrt(less if less > least_square else least_square)
            root = np.sqrt(_ONE + magnitude * magnitude)
            ratio = magnitude / (_ONE + root)
            # (1 − θ) / (1 + θ) without cancellation; near θ = 1 the logarithm of θ is computed from it.
            under = (_ONE + _ONE / (root + magnitude)) / (_ONE + root + magnitude)
            e, m = _split(ratio)
            near = ratio > _HALF
            fall = _TWO * _artanh(-under if near else (m - _ONE) / (m + _ONE)) + (_ZERO if near else e * _LN2)
            a = np.rint(soft[j])
            low, high = (_HALF - a) * inverse, (-_HALF - a) * inverse
            normal = _tail(low, _density(low)) - _tail(high, _density(high))
            geometric = under * _exp(a * fall)
            mass = normal + share * (geometric - normal) + least
            e, m = _split(mass)
            some_bits -= e + (_TWO * _LOG2E) * _artanh((m - _ONE) / (m + _ONE))
            some_share += (normal - geometric) / mass
        bits += np.float64(some_bits)
        by_share += np.float64(some_share)
        if not slopes:
            continue
        into = slopes_out[i]
        squares, magnitudes = _ZERO, _ZERO
        for j in range(count):
            square, magnitude = row_square * of_columns[0, j], row_magnitude * of_columns[1, j]
            less = square - _SHEPPARD
            least_square = _QUARTER * square
            inverse = _ONE / np.sqrt(less if less > least_square else least_square)
            steep = square * inverse * inverse if less > least_square else _ONE
            root = np.sqrt(_ONE + magnitude * magnitude)
            ratio = magnitude / (_ONE + root)
            under = (_ONE + _ONE / (root + magnitude)) / (_ONE + root + magnitude)
            e, m = _split(ratio)
            near = ratio > _HALF
            fall = _TWO * _artanh(-under if near else (m - _ONE) / (m + _ONE)) + (_ZERO if near else e * _LN2)
            a = soft[j]
            low, high = (_HALF - a) * inverse, (-_HALF - a) * inverse
            at_low, at_high = _density(low), _density(high)
            normal = _tail(low, at_low) - _tail(high, at_high)
            geometric = under * _exp(a * fall)
            scaled = -_LOG2E / (normal + share * (geometric - normal) + least)
            to_normal, to_geometric = rest * scaled, share * scaled * geometric
            into[j] = to_geometric * fall - to_normal * inverse * (at_low - at_high)
            by_square = -_HALF * to_normal * (at_low * low - at_high * high) * steep
            by_magnitude = to_geometric * (a - magnitude) / root
            squares += by_square
            magnitudes += by_magnitude
            of_square[j] = by_square
            of_magnitude[j] = by_magnitude
        sums[i, 0], sums[i, 1] = squares, magnitudes
        for j in range(count):
            sums[height + j, 0] += np.float64(of_square[j])
            sums[height + j, 1] += np.float64(of_magnitude[j])
    return bits, by_share


@njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")
def finish_slopes(coefficients: Any, steps: Any, rows: Any, columns: Any, slopes: Any) -> Any:
    """Turn slopes by magnitude into slopes by coefficient, in place; return the slope by the step if there is only one.

    Args:
        coefficients, steps, slopes: arrays of `bits_and_slopes`.
        rows, columns: (2, n) and (2, m) float32, whose sums are the slopes by mean square and mean magnitude.
    """
    single = steps.size == 1
    count = coefficients.shape[1]
    total = 0.0
    for i in range(coefficients.shape[0]):
        line, into, by = coefficients[i], slopes[i], steps[0 if single else i]
        square, magnitude = rows[0, i], rows[1, i]
        some = _ZERO
        if single:
            for j in range(count):
                size = abs(line[j] / by[0])
                slope = into[j] + magnitude + columns[1, j] + _TWO * size * (square + columns[0, j])
                slope = slope / by[0]
                some += slope * size
                into[j] = slope if line[j] > _ZERO else (-slope if line[j] < _ZERO else _ZERO)
        else:
            for j in range(count):
                size = abs(line[j] / by[j])
                slope = into[j] + magnitude + columns[1, j] + _TWO * size * (square + columns[0, j])
                slope = slope / by[j]
                into[j] = slope if line[j] > _ZERO else (-slope if line[j] < _ZERO else _ZERO)
        total += np.float64(some)
    return -total
