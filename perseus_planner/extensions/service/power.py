"""Power budgets: how much slower each job has to run so that all together draw no more than the
budget.

The objective is the mean slowdown of a GPU, the sum over jobs of GPUs * t / time_s with the
iteration time t within the budget and `time_s` without. A job draws E(t) / t on average, where the
energy E of its iteration is convex and piecewise linear in t. In iterations per second, f = 1 / t,
both are convex: GPUs / (f * time_s), and f * E(1 / f), the perspective of E. So the optimum is
where one more watt is worth the same slowdown in all jobs, its price (Lagrangian duality: Boyd and
Vandenberghe, Convex Optimization, 5.5). On a piece of the frontier, E(t) is fixed_j + slope_w * t,
so a job draws slope_w + fixed_j * f, and the best time for a price has a closed form: t * t = price
* fixed_j * time_s / GPUs. The price is found by bisection to the last bit.

Stragglers are ignored here: a pipeline that waits for one draws less.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perseus_planner.base.errors import InfeasibleError, InfeasiblePower
from perseus_planner.extensions.service.jobs import JobState, Share
from perseus_planner.extensions.service.models import PowerBudget, RegisteredJob, Slowing, split_at
from perseus_planner.extensions.service.policy import own_s, target_s, within_deadline_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perseus_planner.extensions.service.curve import Curve
    from perseus_planner.extensions.service.draft import Draft

Floats = NDArray[np.float64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Demand:
    """What a job would do without a budget."""

    frontier: Curve  #: The frontier of each of its pipelines
    pipelines: int  #: Number of pipelines
    gpus: int  #: Number of GPUs over all pipelines
    #: Iteration time: its deadline, or more if a straggler takes longer; at least the least of the
    #: frontier.
    time_s: float
    power_w: float | None = None  #: Budget of this job alone; None for no budget

    def draws_w(self, time_s: float) -> float:
        """Return the average power of all its GPUs with iterations of that time, watts."""
        return self.pipelines * self.frontier.bound_j(time_s) / time_s


def shares(power_w: float | None, demands: Sequence[Demand]) -> tuple[Share, ...]:
    """Return the share of each job, so that all together draw at most `power_w` with the least
    slowdown.

    No job becomes faster than without a budget, or slower than at its least power. A budget that is
    met anyway changes nothing. Frontiers bound energy from below, so a plan that keeps a share may
    take a little longer.

    Args:
        power_w: Watts over all jobs; None for no budget.
        demands: One for each job.

    Raises:
        InfeasiblePower: If the jobs together, or one with its own budget, cannot draw so little;
            names the least.
        InfeasibleDeadline: If a job cannot be as fast as it demands.
    """
    ranges = [_range(demand) for demand in demands]
    fastest = _at_price(ranges, 0.0)
    if power_w is None or _sum_w(fastest) <= power_w:
        return fastest
    # At an infinite price each job is at its least power; less than that is impossible for any
    # time.
    least_w = _sum_w(_at_price(ranges, math.inf))
    if least_w > power_w:
        raise InfeasiblePower(power_w, least_w)
    most_price = max(float(job_range.prices[-1]) for job_range in ranges if len(job_range.prices))
    # The power falls as the price rises, so the least price that fits slows the jobs down least.
    price = _least(lambda price: _sum_w(_at_price(ranges, price)) <= power_w, 0.0, most_price)
    return _at_price(ranges, price)


@dataclass(frozen=True, eq=False)
class _Range:
    """The iteration times that a job may take, and the best one for a price in GPU slowdowns per
    watt.
    """

    demand: Demand  #: What the job would do without a budget
    #: (pieces + 1,) From the fastest time to that of the least power; energy is linear between
    #: them.
    times_s: Floats
    prices: Floats  #: (pieces,) The price at which the end of each piece is best, rising

    def at_price(self, price: float) -> Share:
        """Return the best share for a price."""
        piece = int(np.searchsorted(self.prices, price, side="right"))
        time_s = float(self.times_s[piece])
        if piece < len(self.prices):  # the price of a time grows as its square does
            end_s = float(self.times_s[piece + 1])
            time_s = min(max(end_s * math.sqrt(price / float(self.prices[piece])), time_s), end_s)
        return Share(time_s, self.demand.draws_w(time_s))


def _range(demand: Demand) -> _Range:
    """Return the range from the time without a budget, or from the time that meets the budget of
    this job alone.
    """
    times_s, energies_j = _curve_from(demand, demand.time_s)
    powers_w = energies_j / times_s
    # Beyond the least power, more time costs power as well: no job goes there.
    end = int(np.argmin(powers_w))
    if demand.power_w is not None and powers_w[0] > demand.power_w:
        least_w = demand.draws_w(float(times_s[end]))
        if least_w > demand.power_w:
            raise InfeasiblePower(demand.power_w, least_w)
        # for the closure, in which mypy forgets that it is not None
        own_w = demand.power_w
        start_s = _least(
            lambda time_s: demand.draws_w(time_s) <= own_w, demand.time_s, float(times_s[end])
        )
        times_s, energies_j = _curve_from(demand, start_s)
        end = int(np.argmin(energies_j / times_s))
    times_s = times_s[: end + 1]
    energies_j = energies_j[: end + 1]
    # Where the line of each piece meets t = 0: energy is fixed_j + slope_w * t on it.
    fixed_j = (energies_j[:-1] * times_s[1:] - energies_j[1:] * times_s[:-1]) / np.diff(times_s)
    # Positive except for rounding, as power falls.
    fixed_j = np.maximum(fixed_j, 1e-12 * energies_j[:-1])
    prices = demand.gpus * times_s[1:] ** 2 / (fixed_j * demand.time_s)
    # Rising up to rounding, as the frontier is convex; `searchsorted` relies on it.
    return _Range(demand, times_s, np.maximum.accumulate(prices))


def _curve_from(demand: Demand, start_s: float) -> tuple[Floats, Floats]:
    """Return (points,) rising times from `start_s` and the energies of all pipelines, linear in
    between.
    """
    times_s, energies_j = map(np.array, (demand.frontier.times_s, demand.frontier.energies_j))
    later = times_s > start_s * (1.0 + 1e-9)  # closer points do not determine a slope
    start_j = demand.frontier.bound_j(start_s)
    return (
        np.concatenate(([start_s], times_s[later])),
        demand.pipelines * np.concatenate(([start_j], energies_j[later])),
    )


def _at_price(ranges: Sequence[_Range], price: float) -> tuple[Share, ...]:
    return tuple(job_range.at_price(price) for job_range in ranges)


def _sum_w(found: Sequence[Share]) -> float:
    return math.fsum(share.power_w for share in found)


def _least(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number above `low` that fits, to the last bit; `high` and all numbers
    above it fit.
    """
    # Between neighbours among floats, their middle is rounded to one of them, which ends this.
    middle = (low + high) / 2.0
    while low < middle < high:
        if fits(middle):
            high = middle
        else:
            low = middle
        middle = (low + high) / 2.0
    return high


def share_power(draft: Draft, job: str | None) -> None:
    """Share power anew: the budget of all jobs among all of them that are heard of if there is
    one, and the budgets of single jobs; and reconcile the jobs whose share has changed.

    Args:
        draft: Has the jobs.
        job: The job that has changed; None if several may have.

    Raises:
        InfeasiblePower: If the budgets cannot be met.
    """
    power_w = draft.budget.power_w
    # A budget of all jobs makes each depend on all others; without one, a job is within its own.
    states = draft.jobs().values() if job is None or power_w is not None else [draft.state(job)]
    # A silent job has no share of the common budget, and keeps to its own.
    silent = [state for state in states if state.silent_since_s is not None]
    shared = with_shares(power_w, [state for state in states if state.silent_since_s is None])
    for state in (*shared, *with_shares(None, silent)):
        if state.share != draft.state(state.job.name).share:
            draft.reconcile(state)


def share_least_power(draft: Draft, job: str) -> None:
    """Share power anew with a job that is heard of again, as `share_power` does; if all together
    cannot meet the budget any more, each gets the least that it can draw.
    """
    try:
        share_power(draft, job)
    except InfeasiblePower as error:
        _log.warning("Job %s is heard of again, and %s; all jobs draw the least", job, error)
        budget = draft.budget
        draft.budget = replace(budget, power_w=_just_above(error))
        share_power(draft, job)
        draft.budget = budget


def begin_budgets(draft: Draft, names: Iterable[str], wall_s: float) -> None:
    """Put the scheduled budgets of all jobs together, and of these jobs, in force that are due.

    A budget that is less than the jobs can draw becomes the least that they can.

    Args:
        draft: Has the jobs.
        names: Of jobs; those that do not run are skipped.
        wall_s: Seconds since the epoch, by the machine's clock.
    """
    budgets: dict[str | None, PowerBudget] = {None: draft.budget}
    for job in names:
        state = draft.find(job)
        if state is not None:
            budgets[job] = state.budget
    for name, before in budgets.items():
        step, _ = split_at(before.schedule, wall_s)
        # Nothing has begun yet, or it has begun before.
        if step is None or step.start_s == before.since_s:
            continue
        due = PowerBudget(step.power_w, before.schedule, step.start_s)
        set_budget(draft, name, due)
        try:
            share_power(draft, name)
        except InfeasibleError as error:
            # Another budget may be the one that cannot be met; then this one stays as it was.
            power_w = before.power_w
            text = "it stays as it was"
            if isinstance(error, InfeasiblePower) and error.power_w == due.power_w:
                power_w = _just_above(error)
                text = "the least is set"
            _log.warning(
                "The scheduled power budget of %s cannot be met, and %s: %s",
                "all jobs" if name is None else f"job {name}",
                text,
                error,
            )
            set_budget(draft, name, replace(due, power_w=power_w))
            with suppress(InfeasibleError):
                share_power(draft, name)


def _just_above(error: InfeasiblePower) -> float:
    return error.least_power_w * (1 + 1e-9)


def set_budget(draft: Draft, name: str | None, budget: PowerBudget) -> None:
    """Set the power budget of a job, or of all jobs together, before power is shared anew."""
    if name is None:
        draft.budget = budget
    else:
        draft.put(
            draft.state(name).with_job(
                power_w=budget.power_w,
                next_power=next(iter(budget.later.schedule), None),
                power_schedule=budget.schedule,
                power_since_s=budget.since_s,
            )
        )


def with_shares(power_w: float | None, states: Iterable[JobState]) -> list[JobState]:
    """Return the jobs with their shares of the power budgets.

    Stragglers are left out of the calculation: a pipeline that waits for one draws less.

    Args:
        power_w: Budget of these jobs together, watts; None for no budget.
        states: The jobs.

    Raises:
        InfeasiblePower: If they cannot draw so little; names the least.
        InfeasibleDeadline: If a job cannot be as fast as its deadline.
    """
    states = list(states)
    if not states:
        return []
    if power_w is None and all(state.job.power_w is None for state in states):
        return [replace(state, share=None) for state in states]
    demands = [_demand(state.job, state.curve) for state in states]
    # What each job would take without the others tells whose budget makes it slower.
    alone = shares(None, demands)
    least = shares(power_w, demands)
    # Plans draw more than the bound: what the budget of all leaves over is spread in proportion.
    room = 1.0 if power_w is None else max(1.0, power_w / _sum_w(least))
    return [
        replace(state, share=_allowed(demand, own_share.time_s, share, room, power_w))
        for state, demand, own_share, share in zip(states, demands, alone, least, strict=True)
    ]


def _allowed(
    demand: Demand, alone_s: float, share: Share, room: float, power_w: float | None
) -> Share | None:
    """Return the share that plans must keep, of a job that takes `alone_s` within its own budget.
    Power that is left over is shared, as plans draw more than the bound.
    """
    limits_w = [share.power_w * room] if power_w is not None else []
    limits_w += [] if demand.power_w is None else [demand.power_w]
    reason: Slowing | None = None
    if share.time_s > alone_s:
        reason = "cluster budget"
    elif alone_s > demand.time_s:
        reason = "job budget"
    return Share(share.time_s, min(limits_w), reason) if limits_w else None


def _demand(job: RegisteredJob, curve: Curve) -> Demand:
    aim_s = target_s(job, curve)
    if job.deadline_s is not None:
        aim_s = within_deadline_s(job.deadline_s, curve)
    time_s = own_s(curve, aim_s)
    return Demand(curve, job.pipelines, job.pipelines * curve.gpus, time_s, job.power_w)
