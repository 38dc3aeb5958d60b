"""Where the energy of an iteration goes, by rank and phase, computing apart from waiting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.views.context import (
    origin_label,
)

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.plans.replay import Span
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run import RunSummary

PHASES = ("warm-up", "steady state", "drain")
"""A rank's warm-up lasts until its first backward begins; its drain begins when its last forward
has ended.
"""
LOW = 0.995  #: of the highest clock; a rank below it runs at lower clocks


@dataclass(frozen=True)
class EnergyUse:
    """Joules of computing, with operations of fixed time, and joules of waiting."""

    computing_j: float
    waiting_j: float

    @property
    def energy_j(self) -> float:
        """Both together, joules."""
        return self.computing_j + self.waiting_j


@dataclass(frozen=True)
class IterationEnergy:
    """Where the energy of one iteration of one pipeline goes."""

    name: str  #: what the iteration is of
    kind: str  #: "baseline", "plan" or "run"
    origin: str  #: where the numbers come from
    time_s: float  #: iteration time, seconds
    ranks: tuple[EnergyUse, ...]  #: the energy of all GPUs of each rank
    #: the energy of each of `PHASES`, all ranks together; empty for a run, whose phases are not
    #: recorded.
    phases: tuple[EnergyUse, ...]
    busy_s: tuple[float, ...]  #: seconds of computations and operations of each rank
    #: mean clock of each rank over its computations, weighted by time, MHz or watts; empty for a
    #: run.
    clocks: tuple[float, ...]

    @property
    def computing_j(self) -> float:
        """Joules of computing of all ranks."""
        return math.fsum(rank.computing_j for rank in self.ranks)

    @property
    def waiting_j(self) -> float:
        """Joules of waiting of all ranks."""
        return math.fsum(rank.waiting_j for rank in self.ranks)


def energy_of_plan(name: str, plan: Plan, kind: str = "plan") -> IterationEnergy:
    """Return where the energy of a replayed iteration goes; its sum is the plan's energy."""
    iteration = plan.iteration
    time_s = plan.timeline.time_s
    spans = list(plan.timeline.spans.values())
    uses: list[list[EnergyUse]] = []
    busy_s = []
    clocks = []
    for program, waiting_w in zip(iteration.programs, plan.rank_waiting_w, strict=True):
        in_order = [spans[node] for node in program]
        # Operations of fixed time have no clock and no kind, so phases are told by computations.
        computed = [
            (iteration.computations[node].kind, plan.clocks[iteration.names[node]], spans[node])
            for node in program
            if node < len(iteration.computations)
        ]
        ends_s = _phase_ends_s([(kind, span) for kind, _, span in computed], time_s)
        uses.append(list(_phases(in_order, ends_s, waiting_w)))
        # Busy is all that runs, and clocks are of computations alone.
        busy_s.append(math.fsum(span.time_s for span in in_order))
        computed_s = math.fsum(span.time_s for _, _, span in computed)
        clocks.append(math.fsum(clock * span.time_s for _, clock, span in computed) / computed_s)
    return IterationEnergy(
        name=name,
        kind=kind,
        origin=origin_label(plan.origin),
        time_s=time_s,
        ranks=tuple(map(_sum, uses)),
        phases=tuple(map(_sum, zip(*uses, strict=True))),
        busy_s=tuple(busy_s),
        clocks=tuple(clocks),
    )


def _phase_ends_s(computed: Sequence[tuple[str, Span]], time_s: float) -> tuple[float, ...]:
    """Return when each phase of a rank ends; without backwards, all is steady state."""
    backwards = [span.start_s for kind, span in computed if kind != "F"]
    if not backwards:
        return 0.0, time_s, time_s
    forward_s = max((span.end_s for kind, span in computed if kind == "F"), default=0.0)
    return min(backwards), max(min(backwards), forward_s), time_s


def _phases(
    spans: Sequence[Span], ends_s: Sequence[float], waiting_w: float
) -> Iterator[EnergyUse]:
    begin_s = 0.0
    for number, end_s in enumerate(ends_s, 1):
        # With a negative calibrated overhead, spans begin after the iteration's end.
        before_s = math.inf if number == len(ends_s) else end_s
        inside = [span for span in spans if begin_s <= span.start_s < before_s]
        busy_s = math.fsum(span.time_s for span in inside)
        computing_j = math.fsum(span.energy_j for span in inside)
        yield EnergyUse(computing_j, waiting_w * (end_s - begin_s - busy_s))
        begin_s = end_s


def _sum(uses: Sequence[EnergyUse]) -> EnergyUse:
    return EnergyUse(
        math.fsum(use.computing_j for use in uses), math.fsum(use.waiting_j for use in uses)
    )


def energy_of_run(name: str, run: Run, summary: RunSummary) -> IterationEnergy | None:
    """Return where the energy of a run's mean iteration goes, or None if it is not known.

    Only the energy of a whole iteration is read from a GPU: that of waiting is the time without
    computations at the blocking power of the plan, and the rest is that of computing.
    """
    time_s = summary.current.time_s
    # Without time or energy there is nothing to divide.
    if time_s is None or summary.current.energy_j is None:
        return None
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    uses = []
    busy_s = []
    for number, waiting_w in enumerate(plan.rank_waiting_w):
        ranks = [rank for rank in summary.ranks if rank.pipeline_rank == number]
        busy_s.append(fmean(rank.busy_s or 0.0 for rank in ranks))
        # Each rank's own time: it may have waited for less than the slowest one took.
        own_s = fmean(rank.mean("inside_s") or 0.0 for rank in ranks)
        waiting_j = waiting_w * max(0.0, own_s - busy_s[-1])
        energy_j = math.fsum(rank.energy_j or 0.0 for rank in ranks)
        # Ranks of several pipelines are added up, and the picture is of one.
        energy_j /= summary.pipelines_of_plan
        uses.append(EnergyUse(energy_j - waiting_j, waiting_j))
    return IterationEnergy(
        name=name,
        kind="run",
        origin=summary.origin,
        time_s=time_s,
        ranks=tuple(uses),
        phases=(),
        busy_s=tuple(busy_s),
        clocks=(),
    )
