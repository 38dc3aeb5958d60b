"""Check the numbers of a frontier file before compiled code uses them, whose indices and loops rely
on them.

A file may come from anyone, and its digest has no key. The graph in it is checked where it is made,
in `Iteration`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import FrontierError
from perseus_planner.solver.network import UNLIMITED, Guides, Integers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.schedules.dag import PipelineDag

_MOST = 2**60  #: no time or flow is larger
_LARGE = 1e30  #: no second or watt is larger


def check_frontier(dag: PipelineDag, times: Integers, powers: Integers, guides: Guides) -> None:
    """Check that the curve is convex and falls, and that the guides are numbers of its iteration.

    Raises:
        FrontierError: If they are not; names the first field that is wrong.
    """
    for name, each in (("times", times), ("powers", powers)):
        _check(
            each.dtype == np.int64 and each.ndim == 1 and len(each) == len(times) > 0,
            name,
            "is not a list",
        )
    _check(_within(times, _MOST) and bool((times[1:] < times[:-1]).all()), "times", "do not fall")
    rising = (
        _within(powers[:-1], _MOST)
        and powers[-1] == UNLIMITED
        and bool((powers[1:] >= powers[:-1]).all())
    )
    _check(rising, "powers", "do not rise")
    count = len(guides.time_s)
    shaped = guides.time_s.dtype == np.float64 and guides.time_s.shape == (count,) and count > 0
    _check(shaped and bool((np.diff(guides.time_s) <= 0).all()), "guide_time_s", "does not fall")
    _check(_within(guides.time_s, _LARGE), "guide_time_s", "is not a time")
    for name, values in (("guide_end_s", guides.end_s), ("guide_price_w", guides.price_w)):
        shaped = values.dtype == np.float32 and values.shape == (count, len(dag.keys))
        _check(shaped and _within(values, _LARGE), name, "is not of this graph")


def _within(values: NDArray[Any], most: float) -> bool:
    return bool(((values >= 0) & (values <= most)).all())


def _check(is_right: bool, field: str, problem: str) -> None:
    if not is_right:
        raise FrontierError(f"{field}: {problem}")
