"""Number 36: the autopilot in virtual time with a second mode, which is better for some stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from autopilot_world import Physics, World, steady
from data import CASES, STAGES, Size, profile_of
from noisy_rows import unlike_stages
from results import Check, Section, Table

from perseus_planner import Profile, schedules, solve
from perseus_planner.extensions.autopilot import Autopilot, AutopilotJob
from perseus_planner.profiles.measurement import ClockChange, Measurement
from perseus_planner.profiles.modes import OWN, Mode, Modes
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.schedules.iteration import Iteration
from perseus_planner.schedules.pipeline import pipeline_iteration

NUMBER = 36  #: of this section
_CHANGE = ClockChange(call_s=0.0045, settle_s=0.0009)
_CHANGES, _MICROBATCHES, _ITERATIONS = 8, 24, 60
_DEADLINE = 1.0005  #: of the plans, as a multiple of the time at full clocks
#: in the mode, by stage: time at full clocks over the own one; how much of it no clock changes; and
#: power. Of the forward of a stage and of the backward of the one before it.
_TIMES, _FIXED, _POWERS = (0.96, 1.03, 0.98, 1.05), (0.25, 0.0, 0.3, 0.1), (1.03, 1.0, 0.97, 1.02)
_COLUMNS = {
    "profile": ("profile", ""),
    "shared": ("one mode for each", ""),
    "own": ("best plan without modes saves, %", ".2f"),
    "best": ("with modes, %", ".2f"),
    "saved": ("saved at the end, %", ".2f"),
    "soon": ("within 1 point from iteration", "d"),
    "share": ("in the mode, %", ".0f"),
    "worst": ("worst iteration, %", "+.2f"),
    "slower": ("mean of the run, %", "+.3f"),
    "changes": ("most changes", "d"),
}


def measure(size: Size) -> Section:
    """Run the simulated jobs."""
    is_whole = len(size.cases) > 1
    rows = [
        _row(case, shared_by, *(24, _ITERATIONS) if is_whole else (4, 3))
        for case in (range(len(CASES)) if is_whole else (0,))
        for shared_by in ("computation", "microbatch")
    ]
    return Section(
        NUMBER,
        "The autopilot with a second mode, in virtual time",
        f"Simulated from the measured profiles: {STAGES} unlike stages, {_MICROBATCHES} "
        "microbatches, 1F1B, jitter of 0.3 %, as in number 22. The second mode is invented: at "
        f"full clocks, its times are {', '.join(map(str, _TIMES))} of the own ones, from stage to "
        f"stage, of which {', '.join(map(str, _FIXED))} do not change with the clock. To reach: "
        "within 1 point of the best plan with modes; in the mean no slower than the ledger allows.",
        [Table(_COLUMNS, rows)],
        [
            Check("within 1 point at the end", all(r["saved"] > r["best"] - 1 for r in rows)),
            Check(
                "no run is slower than the ledger allows",
                all(r["slower"] <= 0.5 + 4 / r["iterations"] for r in rows),
            ),
            Check(
                f"no GPU changes its clock more often than {_CHANGES} times",
                all(r["changes"] <= _CHANGES for r in rows),
            ),
        ]
        if is_whole
        else [],
        [
            f"*Best plan*: the planner's, from the profile without noise, for {_DEADLINE}x the "
            f"time at full clocks and {_CHANGES} changes. All savings are replayed without noise, "
            "in percent of the energy at full clocks in the own mode; those *at the end* are the "
            "mean of the last 8 iterations that are no audits, trials included."
        ],
    )


def _row(case: int, shared_by: str, microbatches: int, iterations: int) -> dict[str, Any]:
    own = unlike_stages(profile_of(CASES[case]), 1)
    truth = _with_mode(own, shared_by)
    iteration = pipeline_iteration(schedules.one_f_one_b(STAGES, microbatches))
    world = World(truth, iteration, Physics(), seed=1)
    full_s, full_j = steady(truth, iteration, Physics(), world.full()[0])

    def saved(ranks: Sequence[Sequence[int]], modes: Sequence[Sequence[str]] = ()) -> float:
        return 100 * (1 - steady(truth, iteration, Physics(), ranks, modes)[1] / full_j)

    job = AutopilotJob(
        iteration,
        tuple(world.clocks),
        clock_change=_CHANGE,
        modes=(OWN, "nano"),
        shares_microbatch=shared_by == "microbatch",
    )
    autopilot = Autopilot(job, AutopilotSettings(max_changes=_CHANGES, seed=1))
    decisions, ran = [], []
    for number in range(iterations):
        decisions.append(autopilot.decide(number))
        world.set_modes(decisions[-1].modes)
        ran.append(world.run(decisions[-1].clocks, [decisions[-1].version]))
        autopilot.observe(ran[-1].observations)
        print(number, decisions[-1].phase, file=sys.stderr, flush=True)
    best = saved(*_best(truth, iteration, full_s))
    planned = [each for each in decisions if each.phase != "audit"]
    savings = {each.iteration: saved(each.clocks[0], each.modes[0]) for each in planned}
    modes = [mode for rank in planned[-1].modes[0] for mode in rank]
    return {
        "profile": CASES[case].name,
        "shared": shared_by,
        "own": saved(*_best(own, iteration, full_s)),
        "best": best,
        "saved": mean(savings[each.iteration] for each in planned[-8:]),
        "soon": next((number for number, each in savings.items() if each > best - 1), None),
        "share": 100 * modes.count("nano") / len(modes),
        "worst": 100 * (max(each.time_s for each in ran) / full_s - 1),
        "slower": 100 * (mean(each.time_s for each in ran) / full_s - 1),
        "changes": max(each.changes for each in ran),
        "iterations": iterations,
    }


def _with_mode(own: Profile, shared_by: str) -> Profile:
    rows = dict(own.measurements)
    for (stage, kind), points in own.measurements.items():
        at, top_s = (stage + (kind == "B")) % 4, points[0].time_s
        fixed, power = _FIXED[at], _POWERS[at]
        nano = []
        for each in points:
            time_s = _TIMES[at] * ((1 - fixed) * each.time_s + fixed * top_s)
            watts = power * each.energy_j / each.time_s
            nano.append(Measurement(each.clock_mhz, time_s, watts * time_s))
        rows[stage, kind, "nano"] = tuple(nano)
    return replace(own, measurements=rows, modes=Modes({"nano": Mode()}, shared_by))


def _best(
    truth: Profile, iteration: Iteration, full_s: float
) -> tuple[list[list[int]], list[list[str]]]:
    """Return the clocks and the modes of the planner's plan."""
    frontier = solve(replace(truth, clock_change=_CHANGE), iteration.schedule)
    plan = frontier.plan_until(_DEADLINE * full_s, max_changes=_CHANGES, on_time=None)
    names = [[str(each) for each in rank] for rank in iteration.schedule.ranks]
    return (
        [[plan.clocks[each] for each in rank] for rank in names],
        [[plan.modes.get(each, OWN) for each in rank] for rank in names],
    )
