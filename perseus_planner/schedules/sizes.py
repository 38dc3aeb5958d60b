"""The numbers that a generator takes, and the order that most of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import ScheduleError
from perseus_planner.quantities import COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules.computation import Computation

# Far beyond any job, and still held in memory; a mistyped number is refused, not tried.
_MOST = 1_000_000


def check_sizes(**sizes: int) -> tuple[int, ...]:
    """The values of `sizes`, in their order, as plain ints.

    Raises:
        ScheduleError: one is not a whole number of at least 1, or the iteration of those sizes is too large to hold.
    """
    counts = []
    product = 1
    for name, value in sizes.items():
        count = COUNT.check(value, name, ScheduleError)
        product *= count
        counts.append(count)
    if product > _MOST:
        each = " x ".join(f"{count} {name.replace('_', ' ')}" for count, name in zip(counts, sizes, strict=True))
        raise ScheduleError(f"{each} are more than {_MOST} forwards; give smaller numbers")
    return tuple(counts)


def alternating_order(
    forwards: Sequence[Computation],
    backwards: Sequence[Computation],
    warmup: int,
    weights: Sequence[Computation] = (),
    delay: int = 0,
) -> tuple[Computation, ...]:
    """The order of one rank: `warmup` forwards, then one forward and one backward in turn, then the other backwards.

    Args:
        forwards: all forwards of the rank, in their order.
        backwards: as many backwards, in theirs.
        warmup: how many forwards come before the first backward is due; at least one does.
        weights: where `backwards` are of the input alone, the weight gradients in the same order.
        delay: how many backwards a weight gradient comes later than the one it belongs to.
    """
    order = list(forwards[:warmup])
    for step, backward in enumerate(backwards):
        order += [*forwards[warmup + step : warmup + step + 1], backward]
        if step >= delay:
            order += weights[step - delay : step - delay + 1]
    return (*order, *weights[max(0, len(backwards) - delay) :])
