"""The inverse of an increasing function that is expensive to evaluate."""

import math
from collections.abc import Callable

MAX_EVALUATIONS = 60
# Relative, of h(η) against its target.
TOLERANCE = 1e-12
# Steps are looked for between e⁻⁶⁹⁰ and e⁶⁹⁰, which are about 1e-300 and 1e300.
_LOG_RANGE = 690.0


def increasing_root(h: Callable[[float], float], target: float, guess: float) -> float | None:
    """The ``η > 0`` with ``h(η) = target``, in a handful of evaluations and never more than ``MAX_EVALUATIONS``.

    Works on log h as a function of log η, where a power law is a line and no magnitude is special. The bracket grows by
    doubled strides; Chandrupatla's method (1997) then takes inverse quadratic steps where the function is tame, and
    bisects where it is not.

    Args:
        h: increasing, with ``h(0) = 0``. Where it overflows it may be infinite or NaN.
        target: positive and finite.
        guess: where to look first; any number from 0 up.

    Returns:
        The root, or None if h does not reach the target where it is finite.

    Example:
        >>> f"{increasing_root(lambda eta: 8 * eta**3, target=1e-9, guess=1.0):.6g}"
        '0.0005'
    """

    def excess(x: float) -> float:
        """``log(h / target)``; the infinities stand for "much too short" and "out of range"."""
        ratio = h(math.exp(x)) / target
        if math.isnan(ratio):
            return math.inf
        return math.log(ratio) if ratio > 0 else -math.inf

    x1 = min(max(math.log(guess), -_LOG_RANGE), _LOG_RANGE) if guess > 0 else -_LOG_RANGE
    f1 = excess(x1)
    evaluations = 1
    # If h were linear, the root would be one stride away.
    stride = max(abs(f1), math.log(2)) if math.isfinite(f1) else 1.0
    x2, f2 = x1, f1
    while abs(f1) > TOLERANCE and (f1 > 0) == (f2 > 0):
        x1, f1 = x2, f2
        if abs(x1) == _LOG_RANGE and (x1 > 0) == (f1 < 0):
            return None
        x2 = min(max(x1 - math.copysign(stride, f1), -_LOG_RANGE), _LOG_RANGE)
        f2 = excess(x2)
        evaluations += 1
        stride *= 2

    best = min((x1, f1), (x2, f2), key=lambda point: abs(point[1]))
    fraction = _between(f1 / (f1 - f2)) if math.isfinite(f1) and math.isfinite(f2) and f1 != f2 else 0.5
    while abs(best[1]) > TOLERANCE and evaluations < MAX_EVALUATIONS:
        x = x1 + fraction * (x2 - x1)
        if x in (x1, x2):
            break
        f = excess(x)
        evaluations += 1
        if (f > 0) == (f1 > 0):
            x3, f3 = x1, f1
        else:
            x3, f3, x2, f2 = x2, f2, x1, f1
        x1, f1 = x, f
        best = min(best, (x1, f1), key=lambda point: abs(point[1]))
        fraction = _inverse_quadratic(x1, f1, x2, f2, x3, f3)
    return math.exp(best[0]) if math.isfinite(best[1]) else None


def _inverse_quadratic(x1: float, f1: float, x2: float, f2: float, x3: float, f3: float) -> float:
    """How far to go from x1 to x2: by inverse quadratic interpolation where it can be trusted, or half way."""
    if not all(map(math.isfinite, (f1, f2, f3))) or f1 == f3 or f2 == f3:
        return 0.5
    xi, phi = (x1 - x2) / (x3 - x2), (f1 - f2) / (f3 - f2)
    if not (phi**2 < xi and (1 - phi) ** 2 < 1 - xi):
        return 0.5
    return _between(f1 / (f2 - f1) * f3 / (f2 - f3) + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2))


def _between(fraction: float) -> float:
    """Kept off the ends, or rounding would stall one end of the bracket."""
    return min(max(fraction, 1e-9), 1 - 1e-9)
