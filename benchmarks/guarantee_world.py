"""The guarantee alone, in virtual time: no plan, but iterations that differ by noise, and an effect
of clocks that no computation shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus_planner.runtime.guarantee import Guarantee, Judged, Tuning

Floats = NDArray[np.float64]
ITERATIONS = 2000


def _carried(share: float, noise: Floats) -> Floats:
    """Return noise of which each iteration passes on a share to the next."""
    from scipy.signal import lfilter  # a second to import, which not all who import this need

    carried: Floats = lfilter([1.0], [1.0, -share], noise)
    return carried


NOISES: dict[str, Callable[[np.random.Generator, float], Floats]] = {
    "independent": lambda random, spread: random.normal(0.0, spread, ITERATIONS),
    "late loader": lambda random, spread: (
        random.normal(0.0, spread, ITERATIONS)
        + 0.05 * (np.arange(ITERATIONS) % 10 == random.integers(10))
    ),
    "drifting": lambda random, spread: (
        random.normal(0.0, spread, ITERATIONS)
        + _carried(0.95, random.normal(0.0, 0.31 * spread, ITERATIONS))
    ),
    "shared": lambda random, spread: _carried(0.9, random.normal(0.0, 0.436 * spread, ITERATIONS)),
    "heavy tails": lambda random, spread: spread / 1.3 * random.standard_t(2.5, ITERATIONS),
}
"""By how much iterations differ on their own; each is as wide as `spread` but for its tails. Noise
that is `shared` has much in common from one iteration to the next, and nothing of each alone.
"""


class Guarded(NamedTuple):
    """A run whose clocks made its iterations longer."""

    longer: float  #: By how much all iterations were, a share
    audited: float  #: The share of iterations that were audits
    longest: float  #: The bound that is stated at its end, a share
    untold: float  #: How large an effect has to be to be told by then


def guarded(
    effect: Callable[[int], float],
    kind: str,
    spread: float,
    seed: int,
    tuning: Tuning | None = None,
) -> Guarded:
    """Run iterations of 1 s whose computations are .25 % longer by their clocks, and that are
    longer by an effect that shows in audits alone.

    Args:
        effect: By how much the iteration of a number is longer, a share.
        kind: Of noise.
        spread: Of noise, a share of an iteration.
        seed: Of all draws.
        tuning: Constants of the guarantee.
    """
    random = np.random.default_rng(seed)
    noise_s = NOISES[kind](random, spread)
    guarantee = Guarantee(1.0, 0.005, random, tuning)
    guarantee.begin(1.0)
    longer_s = 0.0
    audited = 0
    for number in range(ITERATIONS):
        is_paid = guarantee.is_overdrawn
        is_audit = not is_paid and guarantee.is_audit()
        full = is_paid or is_audit
        audited += is_audit
        clocks_s = 0.0 if full else 0.0025
        effect_s = 0.0 if full else effect(number)
        unexplained = noise_s[number] + effect_s
        longer_s += clocks_s + effect_s
        judged = Judged(1.0 + clocks_s, 1.0, unexplained)
        time_s = 1.0 + clocks_s + unexplained
        terms: dict[str, Any] = {"full_clocks": full, "replayed_s": 1.0, "slowdown": 1.0}
        guarantee.add(number, time_s, judged, **terms)
    # Before the first audit nothing is stated.
    longest = math.inf if guarantee.longest is None else guarantee.longest
    untold = math.inf if guarantee.audits.untold is None else guarantee.audits.untold
    return Guarded(longer_s / ITERATIONS, audited / ITERATIONS, longest, untold)


EFFECTS: dict[str, Callable[[int], float]] = {
    "half a percent": lambda _: 0.005,
    "1 percent": lambda _: 0.01,
    "3 percent": lambda _: 0.03,
    "more and more": lambda number: 1e-5 * number,
    "2 percent from the middle on": lambda number: 0.02 * (number > 1000),
}
