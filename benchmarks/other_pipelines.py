"""Number 9: interleaved pipelines, and a stage that becomes slow."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from data import STAGES, Case, Size, frontier_of, profile_of
from results import Check, Section, Table

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.profiles.groups import slowed
from perseus_planner.profiles.measurement import Measurement

_INTERLEAVED_LIMIT_S, _SLOWED_LIMIT_S = 10.0, 0.5
_SLOWDOWN = 1.15
_INTERLEAVED = {
    "profile": ("profile", ""),
    "ranks": ("ranks", "d"),
    "virtual": ("virtual stages", "d"),
    "microbatches": ("microbatches", "d"),
    "computations": ("computations", "d"),
    "breakpoints": ("breakpoints", "d"),
    "seconds": ("whole frontier: median s", ".3f"),
    "most": ("most s", ".3f"),
    "plan": ("a plan at 1.05x: s", ".3f"),
    "gap": ("above the bound, %", ".3f"),
}
_SLOWED = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "stage": ("slow stage", "d"),
    "seconds": ("new frontier and plan: s", ".3f"),
    "solve": ("of that the frontier: s", ".3f"),
    "slowdown": ("iteration to sound, all at maximum", ".4f"),
    "saving": ("saving of the plan, %", ".2f"),
}


def measure(size: Size) -> Section:
    """Solve interleaved pipelines, and 1F1B again with each stage slower in turn."""
    interleaved = [_interleaved(case, size) for case in size.cases]
    slow = [_slowed(case, size, stage) for case in size.cases for stage in range(STAGES)]
    worst_s, worst_slow_s = (
        max(row["most"] for row in interleaved),
        max(row["seconds"] for row in slow),
    )
    return Section(
        9,
        "Interleaved pipelines, and a slow stage",
        "Times measured on this machine. Interleaved: each measured stage split into equal parts, "
        f"Megatron's order; to reach {_INTERLEAVED_LIMIT_S:g} s. A slow stage: its computations "
        f"take {_SLOWDOWN}x as long at unchanged power, in a 1F1B pipeline; a new exact frontier "
        f"and a plan no slower than all clocks at maximum; to reach {_SLOWED_LIMIT_S:g} s.",
        [Table(_INTERLEAVED, interleaved), Table(_SLOWED, slow)],
        [
            Check(
                "no plan is below its bound or past its deadline",
                all(row["right"] for row in [*interleaved, *slow]),
            ),
            Check(
                "interleaved frontiers are convex to their least time",
                all(row["convex"] for row in interleaved),
            ),
        ],
        [
            f"Slowest: {worst_s:.2f} s for an interleaved frontier, {worst_slow_s:.3f} s for a "
            "slow stage. The first solve and plan of a process, which load compiled code, are not "
            "counted.",
        ],
    )


def _interleaved(case: Case, size: Size) -> dict[str, Any]:
    ranks, virtual, microbatches = size.interleaved
    profile, schedule = (
        _split(profile_of(case), ranks, virtual),
        schedules.interleaved_1f1b(*size.interleaved),
    )
    solve(profile, schedules.interleaved_1f1b(ranks, virtual, ranks))
    times_s = []
    for _ in range(size.repetitions):
        begin_s = time.perf_counter()
        frontier = solve(profile, schedule)
        times_s.append(time.perf_counter() - begin_s)
    begin_s = time.perf_counter()
    plan = frontier.plan_until(1.05 * frontier.baseline_time_s, on_time=None)
    return {
        "profile": case.name,
        "ranks": ranks,
        "virtual": virtual,
        "microbatches": microbatches,
        "computations": len(frontier.dag.computations),
        "breakpoints": len(frontier.times),
        "seconds": median(times_s),
        "most": max(times_s),
        "plan": time.perf_counter() - begin_s,
        "gap": 100 * (plan.energy_j / plan.bound_j - 1),
        "right": plan.energy_j >= plan.bound_j * (1 - 1e-12) and plan.time_s <= plan.deadline_s,
        "convex": _convex(frontier),
    }


def _convex(frontier: Frontier) -> bool:
    rising = all(
        a <= b for a, b in zip(frontier.powers.tolist(), frontier.powers[1:].tolist(), strict=False)
    )
    return bool(rising and frontier.times_s[-1] == frontier.min_time_s)


def _split(profile: Profile, ranks: int, virtual: int) -> Profile:
    """Split each stage into `virtual` equal ones; stage c * ranks + r comes from measured stage
    r.
    """
    table = {
        (chunk * ranks + rank, kind): tuple(
            Measurement(m.clock_mhz, m.time_s / virtual, m.energy_j / virtual)
            for m in profile.measurements[rank % profile.stages, kind]
        )
        for chunk in range(virtual)
        for rank in range(ranks)
        for kind in "FB"
    }
    return Profile(table, profile.blocking_power_w, profile.gpu, "simulated")


def _slowed(case: Case, size: Size, stage: int) -> dict[str, Any]:
    sound = frontier_of(case, size.slowed_microbatches)
    sound.plan_until(sound.baseline_time_s, on_time=None)
    begin_s = time.perf_counter()
    frontier = solve(slowed(sound.profile, {stage: _SLOWDOWN}), sound.schedule)
    solved_s = time.perf_counter()
    plan = frontier.plan_until(frontier.baseline_time_s, on_time=None)
    return {
        "profile": case.name,
        "microbatches": size.slowed_microbatches,
        "stage": stage,
        "seconds": time.perf_counter() - begin_s,
        "solve": solved_s - begin_s,
        "slowdown": frontier.baseline_time_s / sound.baseline_time_s,
        "saving": 100 * plan.saving_j / plan.baseline_energy_j,
        "right": plan.energy_j >= plan.bound_j * (1 - 1e-12) and plan.time_s <= plan.deadline_s,
    }
