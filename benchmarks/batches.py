"""Number 32: plans of the batch, for microbatches whose work is known before they run."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from data import Case, Size, folder, profile_of
from noisy_rows import unlike_stages
from numpy.typing import NDArray
from results import Check, Section, Table

from perseus_planner import Profile, schedules, solve
from perseus_planner.extensions.autopilot.batches.exchange import fit_law
from perseus_planner.extensions.autopilot.batches.solver import (
    BatchPlan,
    BatchPlanner,
    Law,
    margin_of,
)
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.solver.curve import TimeEnergyCurve

NUMBER = 32
_CHANGE = ClockChange(0.0045, 0.0009)
_FREE = ClockChange(0.0)
_HAIR = 5e-4  #: of a percent, to which two results count as equal
_CHANGES = 8
_ERRORS = 0.01, 0.03, 0.05
_JITTERS = 0.013, 0.03
#: seconds of a (kind, on the last stage) for the mean work more, in those of the mean work: fitted
#: to the trace
_SLOPES = {("F", False): 0.90, ("B", False): 1.46, ("F", True): 0.59, ("B", True): 1.05}
_RESIDUAL = 0.023  #: of the law, the largest of the trace
_FITTED = 10  #: iterations whose marks laws are fitted to
_LAWS = 4  #: draws of these marks
_SAVED = {
    "profile": ("profile", ""),
    "job": ("microbatches", ""),
    "stages": ("stages x pipelines", ""),
    "static": ("static 1.00x, saved %", ".2f"),
    "static_late": ("time %", "+.2f"),
    "wary": ("static, on time, saved %", ".2f"),
    "wary_late": ("time %", "+.2f"),
    "own": ("own time, saved %", ".2f"),
    "one": ("one clock, saved %", ".2f"),
    "batch": ("plan of the batch, saved %", ".2f"),
    "late": ("worst iteration %", "+.3f"),
    "above": ("above its bound, mean points", ".3f"),
}
_REAL = {
    "profile": ("profile", ""),
    "job": ("microbatches", ""),
    "stages": ("stages x pipelines", ""),
    "wrong": ("what is wrong", ""),
    "saved": ("saved %", ".2f"),
    "share": ("share of the exact plan's", ".0%"),
    "time": ("time, mean %", "+.3f"),
    "worst": ("worst iteration %", "+.3f"),
    "kept": ("without catching up, time %", "+.3f"),
    "changes": ("changes, mean", ".1f"),
}
_ALIKE = {
    "profile": ("profile", ""),
    "job": ("microbatches", ""),
    "stages": ("stages x pipelines", ""),
    "wrong": ("what is wrong", ""),
    "static": ("static, on time, saved %", ".2f"),
    "static_late": ("time %", "+.3f"),
    "alone": ("plan of the batch alone, saved %", ".2f"),
    "alone_late": ("time %", "+.3f"),
    "saved": ("beside the static plan, saved %", ".2f"),
    "time": ("time, mean %", "+.3f"),
    "worst": ("worst iteration %", "+.3f"),
    "ran_static": ("of which static", ".0%"),
}
_REACHED = {
    "wrong": ("what is wrong", ""),
    "cells": ("cells that reach what is wanted", ""),
    "share": ("share of the exact plan's, mean", ".1%"),
    "least": ("least", ".1%"),
    "time": ("time, mean %", "+.3f"),
    "most": ("most", "+.3f"),
    "worst": ("worst iteration %", "+.3f"),
    "wanted": ("wanted: share, time, worst iteration", ""),
}
#: of the exact plan's saving; percent of time, of the mean and of an iteration
_WANTED = {
    "fitted law, changes": (0.93, 0.05, 0.5),
    "work, 1 %": (0.93, 0.2, None),
    "work, 3 %": (0.93, 0.6, None),
    "work, 5 %": (0.93, 1.0, None),
}
_TIMES = {
    "size": ("stages x microbatches", ""),
    "mean": ("plan, CPU ms, mean", ".2f"),
    "most": ("most", ".2f"),
    "limited": (f"within {_CHANGES} changes, mean", ".2f"),
    "limit": ("wanted", "d"),
}


class _Job(NamedTuple):
    """Microbatches that differ, and the pipelines that run them."""

    name: str
    stages: int
    work: NDArray[np.float64]  # (iterations, pipelines, microbatches)

    @property
    def size(self) -> str:
        return f"{self.stages} x {self.work.shape[1]}"


class _Came(NamedTuple):
    """What a job came to."""

    times_s: list[float]
    energy_j: float
    changes: float = 0.0

    def saved(self, before: _Came) -> float:
        """Percent."""
        return 100 * (1 - self.energy_j / before.energy_j)

    def late(self, before: _Came) -> float:
        """Percent, of the mean."""
        return 100 * (sum(self.times_s) / sum(before.times_s) - 1)

    def worst(self, before: _Came) -> float:
        """Percent, of an iteration."""
        return 100 * max(a / b - 1 for a, b in zip(self.times_s, before.times_s, strict=True))


def measure(size: Size) -> Section:
    """Replay a trace and drawn lengths under each policy, with all that is wrong in truth."""
    small = size != Size()
    jobs = _jobs(1 if small else 15, 1 if small else 6)
    saved, real, checks = [], list[dict[str, Any]](), list[Check]()
    for case in size.cases:
        for job in jobs if case is size.cases[0] else jobs[:2]:
            row = _policies(case, job)
            saved.append(row)
            real += _wrong(case, job, row)
    jitter = [_jitter(case, jitter) for case in size.cases for jitter in _JITTERS]
    reached, late = _reached(real), max(row["late"] for row in saved)
    checks.append(Check(f"no plan of the batch is late ({late:+.1e} %)", late <= 1e-6))
    checks.append(
        Check(
            "it saves no less than one clock, nor than for its own time",
            all(row["batch"] >= max(row["one"], row["own"]) - 1e-6 for row in saved),
        )
    )
    if not small:
        checks += _judge(saved, reached, jitter)
    times = [] if small else [_cpu(*each) for each in _SIZES]
    return Section(
        NUMBER,
        "Plans of the batch",
        "Replayed from the measured profiles with stages unlike by up to 5 % (seed 0), 1F1B: "
        "microbatches of a public trace (15 iterations, 32 pipelines), and drawn ones whose work "
        "is log-normal with that spread. Seconds are affine in work, with the slopes of the trace. "
        "All pipelines wait for the slowest. Time and saving are against all clocks at maximum in "
        "the same iterations. The static plan that is on time has the jitter of its microbatches.",
        [
            Table(_SAVED, saved),
            Table(_REAL, real),
            Table(_REACHED, reached),
            Table(_ALIKE, jitter),
            Table(_TIMES, times),
        ],
        checks,
        [
            "Second table, all with catching up. *Fitted law, changes*: laws are fitted to the "
            f"marks of {_FITTED} iterations of one pipeline, which are off by {100 * _RESIDUAL:g} "
            f"%, {_LAWS} times: time and worst iteration are those of the laws that are latest, "
            f"saving that of the laws that save least; {_CHANGES} changes are planned, of "
            f"{1e3 * _CHANGE.call_s:g} + {1e3 * _CHANGE.settle_s:g} ms, ranks of a node on one "
            "lock, and plans know both errors of laws and changes. *Computations*: each is "
            "off beside the law, by itself; changes are free and not limited. *Work*: that of each "
            "microbatch is off, log-normal, on all stages alike; plans aim at a target that is "
            "earlier by what `margin_of` says of that; changes are free and not limited.",
            "Fourth table: all microbatches alike, and each computation longer or shorter by a "
            "normal jitter, which plans know, free changes. *Alone* plans do not know the static "
            "plan that is on time with that jitter; *beside* it, the same replays decide which of "
            "both runs.",
        ],
    )


_SIZES = ((4, 8, 1), (8, 8, 2), (8, 32, 20), (16, 64, 200))


def _jobs(iterations: int, drawn: int) -> list[_Job]:
    trace = _trace()[:iterations]
    rng = np.random.default_rng(1)
    found = [_Job("trace", stages, trace) for stages in (2, 4, 8)]
    for spread in (0.05, 0.10, 0.15, 0.35):
        work = rng.lognormal(0.0, spread, (drawn, 8, 8))
        found.append(_Job(f"spread {100 * spread:.0f} %", 4, work))
    return found


@cache
def _trace() -> NDArray[np.float64]:
    with (folder().parent / "batches" / "work_of_microbatches.csv").open() as file:
        rows = [list(map(float, row)) for row in list(csv.reader(file))[1:]]
    pipelines = sum(row[0] == rows[0][0] for row in rows)
    return np.array(rows)[:, 2:].reshape(-1, pipelines, len(rows[0]) - 2)


@cache
def _profile(case: Case, stages: int) -> Profile:
    """Return unlike stages, spread over those that were measured; the last one is the last."""
    whole = unlike_stages(profile_of(case), 0)
    chosen = np.linspace(0, whole.stages - 1, stages).round().astype(int).tolist()
    measurements = {
        (i, kind): whole.measurements[stage, kind]
        for i, stage in enumerate(chosen)
        for kind in ("F", "B")
    }
    return replace(whole, measurements=measurements)


def _laws(profile: Profile) -> dict[Key, Law]:
    found = {}
    for key, rows in profile.measurements.items():
        slope = _SLOPES[key.kind, key.stage == profile.stages - 1]
        found[key] = Law((1 - slope) * rows[0].time_s, (slope * rows[0].time_s,))
    return found


@cache
def _planner(case: Case, stages: int, microbatches: int, jitter: float = 0.0) -> BatchPlanner:
    profile = replace(_profile(case, stages), jitter=jitter)
    schedule = schedules.one_f_one_b(stages, microbatches)
    return BatchPlanner(PipelineDag.from_schedule(profile, schedule), _laws(profile))


def _replayed(
    planner: BatchPlanner,
    plans: list[list[BatchPlan]],
    factors: NDArray[np.float64] | None = None,
    change: ClockChange = _FREE,
    *,
    is_catching_up: bool = False,
) -> _Came:
    """Replay the plan of each pipeline in each iteration; `factors` are by how much each of its
    computations is off.
    """
    times_s, energy_j, changes = [], 0.0, list[int]()
    for i, pipelines in enumerate(plans):
        came = [
            planner.replay(
                plan,
                np.ones(len(planner.dag.computations)) if factors is None else factors[i, n],
                change,
                is_catching_up=is_catching_up,
            )
            for n, plan in enumerate(pipelines)
        ]
        times_s.append(max(each.time_s for each in came))
        waiting_j = len(came) * planner.dag.waiting_w * times_s[-1]
        energy_j += sum(each.effective_j for each in came) + waiting_j
        changes += [each for one in came for each in one.changes]
    return _Came(times_s, energy_j, fmean(changes))


def _targets(planner: BatchPlanner, job: _Job) -> list[float]:
    return [max(planner.full_clocks_s(w[:, None]) for w in each) for each in job.work]


def _policies(case: Case, job: _Job) -> dict[str, Any]:
    planner = _planner(case, job.stages, job.work.shape[2])
    profile, targets_s = _profile(case, job.stages), _targets(planner, job)

    def under(make: Any) -> _Came:
        plans = [
            [make(work, target_s) for work in each[:, :, None]]
            for each, target_s in zip(job.work, targets_s, strict=True)
        ]
        return _replayed(planner, plans)

    before = under(lambda work, target_s: planner.plan_of(work, None, target_s))
    static, wary = (
        under(partial(_static, planner, tuple(plan.clocks.values())))
        for plan in (_fixed(profile, job), _on_time(profile, job))
    )
    one, batch = under(planner.one_clock), under(planner.plan)
    own = under(lambda work, _: planner.plan(work, planner.full_clocks_s(work)))
    return {
        "profile": case.name,
        "job": job.name,
        "stages": job.size,
        "static": static.saved(before),
        "static_late": static.late(before),
        "wary": wary.saved(before),
        "wary_late": wary.late(before),
        "own": own.saved(before),
        "one": one.saved(before),
        "batch": batch.saved(before),
        "late": batch.worst(before),
        "above": _above_bound(planner, job, targets_s[0]),
    }


def _static(
    planner: BatchPlanner, clocks: tuple[int, ...], work: NDArray[np.float64], target_s: float
) -> BatchPlan:
    return planner.plan_of(work, clocks, target_s)


def _fixed(profile: Profile, job: _Job) -> Plan:
    frontier = solve(profile, "1f1b", microbatches=job.work.shape[2])
    return frontier.plan_until(frontier.baseline_time_s, on_time=None)


def _on_time(profile: Profile, job: _Job, jitter: float | None = None) -> Plan:
    wary = replace(profile, jitter=float(job.work.std()) if jitter is None else jitter)
    frontier = solve(wary, "1f1b", microbatches=job.work.shape[2])
    return frontier.plan_until(frontier.baseline_time_s)


def _above_bound(planner: BatchPlanner, job: _Job, target_s: float) -> float:
    """Return by how many points of its energy plans are above the bound of a profile that has a
    kind for each microbatch, in the first iteration.
    """
    above = []
    for work in job.work[0][:: max(1, len(job.work[0]) // 8)]:
        curve = TimeEnergyCurve.of(_with_own_kinds(planner, work))
        within_s = min(target_s, curve.max_time_s)
        bound_j = curve.bound_j(within_s) + curve.dag.waiting_w * (target_s - within_s)
        above.append(100 * (planner.plan(work[:, None], target_s).energy_j / bound_j - 1))
    return fmean(above)


def _with_own_kinds(planner: BatchPlanner, work: NDArray[np.float64]) -> PipelineDag:
    """Return the iteration as today's solver takes it."""
    plain, laws = planner.dag, _laws(planner.dag.profile)
    rows, kinds = dict(plain.profile.measurements), []
    for computation, key in zip(plain.computations, plain.iteration.keys, strict=True):
        law, measured = laws[key], plain.profile.measurements[key]
        seconds = law.fixed_s + law.per_work_s[0] * work[computation.microbatch]
        scale = seconds / measured[0].time_s
        kinds.append(f"{computation.kind}.m{computation.microbatch}")
        rows[computation.stage, kinds[-1]] = tuple(
            Measurement(m.clock_mhz, scale * m.time_s, scale * m.energy_j) for m in measured
        )
    iteration = plain.iteration
    own = Iteration(iteration.schedule, iteration.predecessors, kinds=tuple(kinds))
    return PipelineDag(replace(plain.profile, measurements=rows), own)


def _wrong(case: Case, job: _Job, exact: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is left if something is wrong: the law, with changes that take time; each
    computation; the work.
    """
    rng = np.random.default_rng(2)
    planner = _planner(case, job.stages, job.work.shape[2])
    shape = (*job.work.shape[:2], len(planner.dag.computations))
    rows = [_laws_wrong(case, job, exact, planner, rng)]
    off = np.exp(_RESIDUAL * rng.normal(size=shape))
    name = f"computations, {100 * _RESIDUAL:.1f} %"
    wary = _planner(case, job.stages, job.work.shape[2], _RESIDUAL)
    rows.append(_row(case, job, exact, name, wary, off, _FREE))
    for error in _ERRORS:
        of_work = np.exp(error * rng.normal(size=job.work.shape))[:, :, _microbatches(planner)]
        name = f"work, {100 * error:.0f} %"
        rows.append(_row(case, job, exact, name, planner, of_work, _FREE, margin=margin_of(error)))
    return rows


def _laws_wrong(
    case: Case,
    job: _Job,
    exact: dict[str, Any],
    planner: BatchPlanner,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return what is left with fitted laws and changes that take time: of several draws of what
    laws are fitted to, the worst.
    """
    rows = []
    # More draws have generators of their own, so that all else is drawn as in older results.
    for generator in (rng, *map(np.random.default_rng, range(3, 2 + _LAWS))):
        fitted = _fitted(planner, generator)
        off = np.array(
            [
                [planner.computation_s(w[:, None]) / fitted.computation_s(w[:, None]) for w in each]
                for each in job.work
            ]
        )
        rows.append(_row(case, job, exact, "fitted law, changes", fitted, off, _CHANGE))
    least = min(rows, key=lambda row: row["saved"])
    worst = {name: max(row[name] for row in rows) for name in ("time", "worst", "kept")}
    return least | worst


def _fitted(planner: BatchPlanner, rng: np.random.Generator) -> BatchPlanner:
    """Return the planner with laws fitted to the marks of a pipeline in some iterations, as
    training fits them.
    """
    profile, laws = planner.dag.profile, {}
    for key, law in _laws(profile).items():
        work = rng.lognormal(0.0, 0.3, _FITTED * planner.dag.schedule.microbatches)
        seconds = law.fixed_s + law.per_work_s[0] * work
        marks_s = seconds * np.exp(_RESIDUAL * rng.normal(size=len(work)))
        laws[key] = fit_law(work[:, None], marks_s)
    dag = planner.dag.with_profile(replace(profile, clock_change=_CHANGE))
    return BatchPlanner(dag, laws, max_changes=_CHANGES)


def _microbatches(planner: BatchPlanner) -> list[int]:
    return [computation.microbatch for computation in planner.dag.computations]


def _row(
    case: Case,
    job: _Job,
    exact: dict[str, Any],
    wrong: str,
    planner: BatchPlanner,
    off: NDArray[np.float64],
    change: ClockChange,
    *,
    margin: float = 0.0,
) -> dict[str, Any]:
    targets_s = _targets(planner, job)
    pairs = [*zip(job.work[:, :, :, None], targets_s, strict=True)]
    full = [[planner.plan_of(work, None, target_s) for work in each] for each, target_s in pairs]
    plans = [
        [planner.plan(work, (1 - margin) * target_s) for work in each] for each, target_s in pairs
    ]
    before = _replayed(planner, full, off)
    caught, kept = (
        _replayed(planner, plans, off, change, is_catching_up=is_catching_up)
        for is_catching_up in (True, False)
    )
    saved = caught.saved(before)
    return {
        "profile": case.name,
        "job": job.name,
        "stages": job.size,
        "wrong": wrong,
        "saved": saved,
        "share": saved / exact["batch"],
        "time": caught.late(before),
        "worst": caught.worst(before),
        "kept": kept.late(before),
        "changes": caught.changes,
    }


def _jitter(case: Case, jitter: float) -> dict[str, Any]:
    """Return plans of the batch where all batches are alike, beside the static plan on time."""
    job = _Job("alike", 4, np.ones((6, 8, 8)))
    planner = _planner(case, job.stages, job.work.shape[2], jitter)
    rng = np.random.default_rng(3)
    off = 1 + jitter * rng.normal(size=(*job.work.shape[:2], len(planner.dag.computations)))
    plan = _on_time(_profile(case, job.stages), job, jitter)
    targets_s = _targets(planner, job)
    clocks = tuple(plan.clocks.values())
    full, static = (
        [
            [planner.plan_of(w, each, t) for w in works[:, :, None]]
            for works, t in zip(job.work, targets_s, strict=True)
        ]
        for each in (None, clocks)
    )
    before, wary = _replayed(planner, full, off), _replayed(planner, static, off)
    beside = BatchPlanner(planner.dag, _laws(planner.dag.profile), static_mhz=clocks)
    exact = {"batch": wary.saved(before)}
    wrong = f"jitter, {100 * jitter:.1f} %"
    alone = _row(case, job, exact, wrong, planner, off, _FREE)
    plan_of_all = beside.plan(job.work[0, 0][:, None], targets_s[0])
    both = [[plan_of_all] * job.work.shape[1]] * len(job.work)
    # A static plan keeps its clocks: its ranks do not catch up.
    came = _replayed(beside, both, off, is_catching_up=not plan_of_all.is_static)
    return {
        "profile": case.name,
        "job": job.name,
        "stages": job.size,
        "wrong": wrong,
        "static": wary.saved(before),
        "static_late": wary.late(before),
        "alone": alone["saved"],
        "alone_late": alone["time"],
        "saved": came.saved(before),
        "time": came.late(before),
        "worst": came.worst(before),
        "ran_static": float(plan_of_all.is_static),
    }


def _cpu(stages: int, microbatches: int, limit: int) -> dict[str, Any]:
    """Return the CPU time of plans, in a process that has planned before."""
    from data import CASES

    profile = _profile(CASES[0], 8) if stages > 8 else _profile(CASES[0], stages)
    if stages > 8:
        rows = {
            (stage, kind): profile.measurements[
                min(stage % 8, 6) if stage < stages - 1 else 7, kind
            ]
            for stage in range(stages)
            for kind in ("F", "B")
        }
        profile = replace(profile, measurements=rows)
    work = np.random.default_rng(4).lognormal(0.0, 0.15, (8, microbatches, 1))
    if microbatches == 8:  # as the trace has them
        work = _trace()[0][:32, :, None]
    dag = PipelineDag.from_schedule(profile, schedules.one_f_one_b(stages, microbatches))
    means = []
    known = dag.with_profile(replace(profile, clock_change=_CHANGE))
    for each_dag, most in ((dag, None), (known, _CHANGES)):
        planner = BatchPlanner(each_dag, _laws(profile), max_changes=most)
        target_s = max(map(planner.full_clocks_s, work))
        planner.plan(work[0], target_s)
        taken_s = []
        for each in work:
            begin_s = time.process_time()
            planner.plan(each, target_s)
            taken_s.append(time.process_time() - begin_s)
        means.append((1e3 * fmean(taken_s), 1e3 * max(taken_s)))
    return {
        "size": f"{stages} x {microbatches}",
        "mean": means[0][0],
        "most": means[0][1],
        "limited": means[1][0],
        "limit": limit,
    }


def _reached(real: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return in how many cells all that is wanted is reached, for each thing that is wrong."""
    found = []
    for wrong, (share, late, worst) in _WANTED.items():
        rows = [row for row in real if row["wrong"] == wrong]
        reached = [
            row["share"] >= share and row["time"] <= late and row["worst"] <= (worst or np.inf)
            for row in rows
        ]
        found.append(
            {
                "wrong": wrong,
                "cells": f"{sum(reached)} of {len(rows)}",
                "share": fmean(row["share"] for row in rows),
                "least": min(row["share"] for row in rows),
                "time": fmean(row["time"] for row in rows),
                "most": max(row["time"] for row in rows),
                "worst": max(row["worst"] for row in rows),
                "wanted": f"{share:.0%}, {late:+.2f} %" + (f", {worst:+.1f} %" if worst else ""),
            }
        )
    return found


def _judge(
    saved: list[dict[str, Any]], reached: list[dict[str, Any]], jitter: list[dict[str, Any]]
) -> list[Check]:
    """Return the answers that are wanted of a whole run."""
    above, law = fmean(row["above"] for row in saved), reached[0]
    return [
        Check(f"{above:.2f} points above the bound, mean (limit 0.15)", above <= 0.15),
        Check(
            f"fitted law and changes: {law['least']:.0%} of the saving or more (limit 93 %), time "
            f"{law['most']:+.3f} % or less (limit 0.05)",
            law["least"] >= 0.93 and law["most"] <= 0.05,
        ),
        Check(
            "alike, with jitter: no later than the static plan, and no less is saved",
            all(
                row["time"] <= row["static_late"] + _HAIR and row["saved"] >= row["static"] - _HAIR
                for row in jitter
            ),
        ),
    ]
