"""How sure a plan is, of its replays under the draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.plans.plan import INTERVAL, WIDER_SAVING, Interval, OnTime

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.solver.drawn_plans import Drawn, DrawnPlans

# No model of a GPU's curves is exact, so intervals are wider than those of the draws: their ends
# are so many times as far from the mean, and at least so far. `python benchmarks/run.py --only 19`
# counts how often the truth is in them.
_WIDER_TIME = 1.25
_LEAST_DOUBT = 7e-4  #: of a ratio or a share


def certainty_of(
    plans: DrawnPlans, plan: Plan, drawn: Drawn, probability: float, safety_j: float
) -> OnTime:
    """Return how sure a plan is, without the limit that it is kept to.

    Args:
        plans: replayed the plan under the draws.
        plan: the plan, by the expected rows.
        drawn: its replays.
        probability: that of keeping the limit.
        safety_j: how much more a plan without a margin saves, joules.
    """
    base = plans.baseline
    keys = plans.curve.dag.iteration.keys
    # The rows that the plan stands on, each once, however often it runs.
    in_use = set(zip(keys, drawn.clocks_mhz, strict=True))
    # Rows that no sweep has measured are told from all others.
    interpolated = {} if plans.estimate is None else plans.estimate.interpolated
    profile = plans.curve.profile
    # Of a trace only the rows at the highest clock were seen, whatever errors others have.
    is_traced = profile.origin == "traced"
    highest = {key: rows[0].clock_mhz for key, rows in profile.measurements.items()}
    unseen = sum(
        clock in interpolated.get(key, ()) or (is_traced and clock != highest[key])
        for key, clock in in_use
    )
    return OnTime(
        probability=probability,
        limit_ratio=None,
        limit_power_w=None,
        margin=drawn.margin,
        time_ratio=_interval(drawn.time_s / base.time_s, _WIDER_TIME),
        saved_share=_interval(1 - drawn.energy_j / base.energy_j, WIDER_SAVING),
        power_w=_interval(drawn.energy_j / drawn.time_s, WIDER_SAVING, plan.power_w),
        safety_share=max(0.0, safety_j / float(np.mean(base.energy_j))),
        points=len(in_use),
        interpolated=unseen,
        has_errors=plans.estimate is not None and plans.estimate.has_errors,
        jitter=profile.jitter,
        jitter_common=profile.jitter_common,
        jitter_tail=profile.jitter_tail,
        gpu_spread=profile.assumed_spread,
        is_spread_assumed=profile.gpu_spread is None,
        time_scale=plans.scales[0],
    )


def _interval(values: Floats, wider: float, unit: float = 1.0) -> Interval:
    """Return the interval of what is drawn, widened; the least doubt is in `unit`."""
    mean = float(np.mean(values))
    ends = np.quantile(values, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]) - mean
    # The model's own doubt is independent of the draws', so both add as squares.
    low, high = (math.hypot(wider * end, _LEAST_DOUBT * unit) for end in ends.tolist())
    return Interval(mean, mean - low, mean + high)
