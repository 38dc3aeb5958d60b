"""What a recorded run shows of the jitter of its computations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from perseus_planner.profiles.jitter import Jitter, Tail

if TYPE_CHECKING:
    from perseus_planner.runs.records import ComputationRecord

_OUTLIER = 0.3  #: of a logarithm; no margin is worth while for longer computations
# Of a normal distribution, one value in 30,000 is so far above the middle.
_TAIL_BEGINS = 4.0  #: standard deviations
_LEAST_TAIL = 3  #: computations; fewer do not tell a share
_NORMAL_MAD = 1.4826  #: standard deviation of a normal distribution over its median deviation
_MEDIAN_COSTS = math.pi / 2  #: variance of a median over that of a mean, of a normal distribution

Recorded = Mapping[int, Mapping[int, Sequence["ComputationRecord"]]]
"""Rank -> iteration that counts -> its computations."""
Logs = Mapping[int, Mapping[int, Sequence[float]]]
"""Rank -> iteration -> the logarithms of its computations' times over their usual ones."""


def jitter_of(recorded: Recorded) -> Jitter | None:
    """Return how much computations vary, each about its own median; None if too few were recorded.

    Changes that came late do not count.
    """
    logs: dict[int, dict[int, list[float]]] = {}
    freedom = 0
    for rank, iterations in recorded.items():
        durations_s: dict[str, dict[int, float]] = {}
        for number, records in iterations.items():
            for record in records:
                # Late changes make a computation longer for a known reason, which is not jitter.
                if record.duration_s > 0.0 and not (record.is_late or record.is_overtaken):
                    durations_s.setdefault(str(record.computation), {})[number] = record.duration_s
        # The median, as a few long ones are no measure of the usual time.
        of_rank: dict[int, list[float]] = {}
        for of_computation in durations_s.values():
            middle_s = median(of_computation.values())
            for iteration, duration_s in of_computation.items():
                of_rank.setdefault(iteration, []).append(math.log(duration_s / middle_s))
        logs[rank] = of_rank
        # Each median that was taken out is a degree of freedom less, those of iterations as well.
        freedom += sum(len(own) - 1 for own in of_rank.values()) - len(durations_s)
    return parts_of(logs, freedom) if freedom > 0 else None


def parts_of(logs: Logs, freedom: int) -> Jitter:
    """Return the three parts of jitter.

    Args:
        logs: see there; the median of each computation is 0.
        freedom: how many of them are free, when medians of iterations are taken out too.
    """
    # What an iteration has in common on a rank is not jitter of single computations.
    middles = {rank: {i: median(own) for i, own in rows.items()} for rank, rows in logs.items()}
    rests = [
        log - middles[rank][i]
        for rank, rows in logs.items()
        for i, own in rows.items()
        for log in own
    ]
    # Medians make the rests smaller than they are, as degrees of freedom say.
    lost = math.sqrt(len(rests) / freedom)
    usual = _NORMAL_MAD * median(map(abs, rests))
    begin = _TAIL_BEGINS * usual * lost
    long = [rest for rest in rests if rest > begin]
    # Without a usual width, nothing can be told from it: most times were equal.
    is_tail = usual > 0.0 and len(long) >= _LEAST_TAIL
    kept = [rest for rest in rests if rest <= begin] if is_tail else rests
    # Outliers count in part only, as no margin could cover them.
    squares = math.fsum(min(abs(rest), _OUTLIER) ** 2 for rest in kept)
    own = lost * math.sqrt(squares / len(kept))
    tail = None
    if is_tail:
        factor = fmean(math.exp(min(rest, _OUTLIER)) for rest in long)
        tail = Tail(len(long) / len(rests), factor)
    return Jitter(own, _common(logs, middles, own), tail)


def _common(logs: Logs, middles: Mapping[int, Mapping[int, float]], own: float) -> float:
    """Return by how much ranks differ from each other in an iteration: the standard deviation of
    what the computations of each have in common.

    What all ranks have in common does not make one wait for another, and is left out.
    """
    of_iteration: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for rank, rows in middles.items():
        for iteration, middle in rows.items():
            # The median of few computations varies by itself.
            noise = _MEDIAN_COSTS * own**2 / len(logs[rank][iteration])
            of_iteration[iteration].append((middle, noise))
    squares = 0.0
    freedom = 0
    for found in of_iteration.values():
        if len(found) > 1:
            mean = fmean(middle for middle, _ in found)
            noise = fmean(noise for _, noise in found)
            squares += sum((middle - mean) ** 2 for middle, _ in found)
            squares -= (len(found) - 1) * noise
            freedom += len(found) - 1
    if not freedom:
        return 0.0
    # Each rank's usual times were taken out, which costs one iteration.
    iterations = len(of_iteration)
    return math.sqrt(max(0.0, squares / freedom) * iterations / max(1, iterations - 1))
