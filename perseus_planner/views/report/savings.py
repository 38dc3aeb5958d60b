"""What plans and runs save against all clocks at maximum, and what a token or a sample takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.views.run_summary import RunSummary, summarize_run
from perseus_planner.views.summary import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run
    from perseus_planner.views.report.rates import Energy, Rates, Work
    from perseus_planner.views.report.sources import Sources

_DAY_S = 86400.0


@dataclass(frozen=True)
class Efficiency:
    """What an iteration gives for its energy; None: not known. Samples/s/W are samples a joule, by another name."""

    joules_per_token: float | None
    tokens_per_joule: float | None
    samples_per_s_per_w: float | None


@dataclass(frozen=True)
class Saving:
    """A plan or a run against all clocks at maximum; all pipelines together.

    Attributes:
        name: of the plan or the run.
        is_run: whether it ran.
        pipelines: how many it is of; of a run, how many its GPUs make up.
        time_s: of an iteration; of a run, the mean of those that count, on the rank where that is longest.
        time_origin: where that is from: "measured", "replayed, measured profile", "replayed, simulated profile".
        energy_j: of an iteration over all GPUs, joules, waiting included.
        energy_origin: likewise; of a run also "simulated".
        baseline_time_s: of an iteration with all clocks at maximum.
        baseline_energy_j: its energy.
        baseline_origin: where both are from.
        saved_share: of the energy of the baseline.
        per_iteration: what is saved.
        per_day: what is saved in a day of such iterations, around the clock.
        iterations: of the whole run, or of those of it that count; None: not known.
        per_run: what is saved in so many; None: not known.
        efficiency: of it.
        baseline_efficiency: with all clocks at maximum.
    """

    name: str
    is_run: bool
    pipelines: int
    time_s: float
    time_origin: str
    energy_j: float
    energy_origin: str
    baseline_time_s: float
    baseline_energy_j: float
    baseline_origin: str
    saved_share: float
    per_iteration: Energy
    per_day: Energy
    iterations: int | None
    per_run: Energy | None
    efficiency: Efficiency
    baseline_efficiency: Efficiency

    @property
    def power_w(self) -> float:
        """Average over all GPUs."""
        return self.energy_j / self.time_s


def replayed(origin: str) -> str:
    """Where a number is from that was replayed from a profile of that origin."""
    return f"replayed, {origin} profile"


def savings(sources: Sources, rates: Rates, work: Work) -> tuple[Saving, ...]:
    """What each plan saves, and then each run by its newest plan, as far as its energy is known."""
    of_plans = (_of_plan(name, plan, rates, work) for name, plan in sources.plans.items())
    of_runs = (each for name, run in sources.runs.items() for each in _of_run(name, run, rates, work))
    return (*of_plans, *of_runs)


def pipelines_of_run(run: Run, summary: RunSummary) -> int:
    """How many of a plan's pipelines the GPUs of the run's ranks make up."""
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    return max(1, round(len(summary.ranks) / (len(plan.schedule.ranks) * plan.gpus_per_stage)))


def _of_plan(name: str, plan: Plan, rates: Rates, work: Work) -> Saving:
    origin = replayed(plan.origin)
    energies_j = work.pipelines * plan.energy_j, work.pipelines * plan.baseline_energy_j
    return _saving(name, plan, (plan.time_s, origin), energies_j, (origin, work.iterations), (rates, work))


def _of_run(name: str, run: Run, rates: Rates, work: Work) -> Iterator[Saving]:
    """One, or none where the energy of an iteration is not known."""
    summary = summarize_run(run)
    by = next(each for each in summary.plans if each.version == summary.version)
    if by.time_s is None or by.energy_j is None:
        return
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    baselines_j = (
        each.baseline_energy_j / (len(each.schedule.ranks) * each.gpus_per_stage)
        for each in (run.plan(summary.version, rank.pipeline) for rank in summary.ranks)
    )
    energies_j = by.energy_j, math.fsum(baselines_j)
    origin = summary.gpu_origin or "not known"
    # A run says itself how many pipelines it has.
    pipelines = pipelines_of_run(run, summary)
    part = pipelines / work.pipelines
    of_run = replace(
        work,
        pipelines=pipelines,
        tokens=None if work.tokens is None else work.tokens * part,
        samples=None if work.samples is None else work.samples * part,
    )
    yield _saving(name, plan, (by.time_s, "measured"), energies_j, (origin, by.counted), (rates, of_run), is_run=True)


def _saving(
    name: str,
    plan: Plan,
    time: tuple[float, str],
    energies_j: tuple[float, float],
    origin_and_iterations: tuple[str, int | None],
    rates_and_work: tuple[Rates, Work],
    *,
    is_run: bool = False,
) -> Saving:
    (time_s, time_origin), (energy_j, baseline_j) = time, energies_j
    (origin, iterations), (rates, work) = origin_and_iterations, rates_and_work
    saved_j = baseline_j - energy_j
    return Saving(
        name=name,
        is_run=is_run,
        pipelines=work.pipelines,
        time_s=time_s,
        time_origin=time_origin,
        energy_j=energy_j,
        energy_origin=origin,
        baseline_time_s=plan.baseline_time_s,
        baseline_energy_j=baseline_j,
        baseline_origin=replayed(plan.origin),
        saved_share=share(saved_j, baseline_j),
        per_iteration=rates.of(saved_j),
        per_day=rates.of(saved_j * _DAY_S / time_s),
        iterations=iterations,
        per_run=None if iterations is None else rates.of(saved_j * iterations),
        efficiency=_efficiency(work, energy_j),
        baseline_efficiency=_efficiency(work, baseline_j),
    )


def _efficiency(work: Work, energy_j: float) -> Efficiency:
    known = energy_j > 0
    return Efficiency(
        energy_j / work.tokens if work.tokens is not None else None,
        work.tokens / energy_j if work.tokens is not None and known else None,
        work.samples / energy_j if work.samples is not None and known else None,
    )
