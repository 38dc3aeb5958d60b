"""Check the sizes that a generator takes, and make the order that most of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.base.errors import ScheduleError
from perseus_planner.base.units import COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.schedules.computation import Computation

# Far beyond any job, and still small enough for memory; a mistyped number is refused, not tried.
_MOST = 1_000_000


def check_sizes(**sizes: int) -> tuple[int, ...]:
    """Return the values of `sizes`, in their order, as plain ints.

    Raises:
        ScheduleError: If one is not a whole number of at least 1, or an iteration of these sizes is
            too large.
    """
    counts = []
    product = 1
    for name, value in sizes.items():
        count = COUNT.check(value, name, ScheduleError)
        product *= count
        counts.append(count)
    if product > _MOST:
        each = " x ".join(
            f"{count} {name.replace('_', ' ')}" for count, name in zip(counts, sizes, strict=True)
        )
        raise ScheduleError(f"{each} are more than {_MOST} forwards; give smaller numbers")
    return tuple(counts)


def alternating_order(
    forwards: Sequence[Computation],
    backwards: Sequence[Computation],
    warmup: int,
    weights: Sequence[Computation] = (),
    delay: int = 0,
) -> tuple[Computation, ...]:
    """Return the order of a rank: `warmup` forwards, then a forward and a backward in turn, then
    the other backwards.

    Args:
        forwards: all forwards of the rank, in order.
        backwards: as many backwards, in order.
        warmup: number of forwards before the first pair of a forward and a backward.
        weights: the weight gradients, in order, if `backwards` are gradients of the input alone.
        delay: number of backwards by which a weight gradient comes later than the backward it
            belongs to.
    """
    order = list(forwards[:warmup])
    for step, backward in enumerate(backwards):
        order += [*forwards[warmup + step : warmup + step + 1], backward]
        if step >= delay:
            order += weights[step - delay : step - delay + 1]
    return (*order, *weights[max(0, len(backwards) - delay) :])
