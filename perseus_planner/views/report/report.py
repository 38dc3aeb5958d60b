"""A report as plain values: what `planner report` writes as a page, and with --json prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner import __version__
from perseus_planner.views.plan_summary import RankSummary, summarize_plan
from perseus_planner.views.report.curves import Curve, curves
from perseus_planner.views.report.points import Points, points
from perseus_planner.views.report.savings import Saving, replayed, savings
from perseus_planner.views.report.timelines import Timelines, timelines
from perseus_planner.views.run_summary import RunSummary, summarize_run

if TYPE_CHECKING:
    from perseus_planner.views.report.rates import Rates, Work
    from perseus_planner.views.report.sources import Sources

_OF_PROFILE = ("gpu", "origin", "control", "gpus_per_stage", "blocking_power_w", "overhead_s")  #: which plans have, too


@dataclass(frozen=True)
class Setup:
    """What all figures of a report are of; None: not known."""

    gpu: str | None
    origin: str
    control: str
    gpus_per_stage: int
    blocking_power_w: float | tuple[float, ...]
    overhead_s: float
    schedule: str | None
    stages: int | None
    ranks: int | None
    microbatches: int | None
    profile_digest: str


@dataclass(frozen=True)
class RanksOfPlan:
    """What each rank does in an iteration of a plan, and where that is from."""

    name: str
    origin: str
    time_s: float
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True)
class Report:
    """All that a report says.

    Attributes:
        planner: version that made it.
        files: it was made from.
        setup: of what it is.
        rates: what a kilowatt-hour costs.
        work: what an iteration does.
        savings: of each plan and run.
        points: the frontier's figure.
        timelines: the pipeline before, as planned and as it ran.
        ranks: clock changes, clocks and load of each rank by each plan.
        runs: name -> how a run went beside its plan.
        curves: of each computation.
    """

    planner: str
    files: tuple[str, ...]
    setup: Setup
    rates: Rates
    work: Work
    savings: tuple[Saving, ...]
    points: Points
    timelines: Timelines
    ranks: tuple[RanksOfPlan, ...]
    runs: dict[str, RunSummary]
    curves: tuple[Curve, ...]


def make_report(sources: Sources, rates: Rates, work: Work) -> Report:
    """The report of `sources`. Other planners are replayed for it, which takes seconds for a large pipeline."""
    return Report(
        planner=__version__,
        files=sources.names,
        setup=_setup(sources),
        rates=rates,
        work=work,
        savings=savings(sources, rates, work),
        points=points(sources),
        timelines=timelines(sources),
        ranks=tuple(
            RanksOfPlan(name, replayed(plan.origin), plan.time_s, summarize_plan(plan).per_rank)
            for name, plan in sources.plans.items()
        ),
        runs={name: summarize_run(run) for name, run in sources.runs.items()},
        curves=() if sources.profile is None else curves(sources.profile),
    )


def _setup(sources: Sources) -> Setup:
    iteration, plan = sources.iteration, sources.any_plan
    schedule = None if iteration is None else iteration.schedule
    of = {name: getattr(sources.profile or plan, name) for name in _OF_PROFILE}
    return Setup(
        **of,
        schedule=None if schedule is None else schedule.name,
        stages=None if schedule is None else schedule.stages,
        ranks=None if schedule is None else len(schedule.ranks),
        microbatches=None if schedule is None else schedule.microbatches,
        profile_digest=sources.digest,
    )
