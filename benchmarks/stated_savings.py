"""Number 40: what runs by plans say that they saved, beside the truth, in virtual time.

Each run has a twin in which the same jitter, drift and slow GPUs come at full clocks. The truth is
what the twin used, and waiting for the rest of the time of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from autopilot_world import Physics, Ran, World
from data import STAGES, Case, Size, profile_of
from noisy_rows import noisy_rows, smoothed, unlike_stages
from results import Check, Section, Table

from perseus_planner import Plan, Profile, schedules, solve
from perseus_planner.engines.engine import PipelineRank
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runs import Account
from perseus_planner.runtime.controller.protocol import AttachReply, ControlChange, GpuSample
from perseus_planner.runtime.marks import IterationTimes
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.telemetry import Telemetry
from perseus_planner.schedules.pipeline import pipeline_iteration

NUMBER = 40
_RUNS = 100
_ITERATIONS = 40
_MICROBATCHES = 8
_SLOWDOWNS = (1.0, 1.05, 1.1)
_ROWS = (0.005, 0.01)  #: standard deviations of rows
_OTHER_GPU = 0.03  #: standard deviation of a GPU's energy beside the profiled one's
_OTHER_WAITING = 0.05  #: of the blocking power beside the profiled one
_WITHIN, _MEAN_POINTS = 95, 0.3  #: percent of the runs, and points
_BEGIN_NS = 10**12
_PHYSICS = Physics(jitter=0.01, drift=0.02, shared=0.003)
_COLUMNS = {
    "rows": ("errors of rows, %", ".1f"),
    "errors": ("rows state errors", ""),
    "slow": ("a GPU becomes slower", ""),
    "runs": ("runs", "d"),
    "true": ("saved, %", ".2f"),
    "error": ("mean error, points", ".2f"),
    "bias": ("stated - true, points", "+.2f"),
    "worst": ("worst, points", ".2f"),
    "width": ("interval ±, points", ".2f"),
    "within": ("within, %", ".0f"),
}


@dataclass(frozen=True)
class _Drawn:
    """A run; all that is random in it follows from its number."""

    case: Case
    number: int

    @property
    def noise(self) -> float:
        return _ROWS[self.number % 2]

    @property
    def states_errors(self) -> bool:
        return self.number // 2 % 2 == 0

    @property
    def becomes_slow(self) -> bool:
        return self.number // 4 % 2 == 0


class _Watched(World):
    """A world that notes each change of a clock as a controller tells it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._asked: list[list[tuple[float, int, int]]] = [[] for _ in range(self._ranks)]
        self.made: list[list[ControlChange]] = [[] for _ in range(self._ranks)]

    def _request(self, now_s: float, number: int, clock: int) -> None:
        place = self._computed[number][self._gpus[number].position]
        count = len(self.iteration.schedule.ranks[number])
        self._asked[number].append((now_s, place % count, clock))
        super()._request(now_s, number, clock)

    def _settle(self, now_s: float, number: int, clock: int) -> None:
        begun_s = now_s - self.physics.call_s - self.physics.settle_s
        known = [each for each in self._asked[number] if each[0] <= begun_s + 1e-12]
        # The first request for this value since another one was asked for.
        asked_s, place, _ = known[-1]
        for earlier in reversed(known):
            if earlier[2] != clock:
                break
            asked_s, place, _ = earlier
        times = [_ns(each) for each in (asked_s, begun_s, now_s)]
        self.made[number].append(ControlChange(place, clock, *times, self._gpus[number].clock))
        super()._settle(now_s, number, clock)


def measure(size: Size) -> Section:
    """Draw runs, and compare what they state with the truth."""
    runs = _RUNS if size.noise_seeds > 1 else 4
    drawn = [_Drawn(size.cases[number % len(size.cases)], number) for number in range(runs)]
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(_run, drawn))
    kinds = dict.fromkeys((each["rows"], each["errors"], each["slow"]) for each in found)
    rows = [
        _summary([each for each in found if (each["rows"], each["errors"], each["slow"]) == kind])
        for kind in kinds
    ]
    whole = {**_summary(found), "rows": None, "errors": "all", "slow": ""}
    return Section(
        NUMBER,
        "Stated savings beside the truth",
        f"Simulated: {STAGES} stages of the measured profiles, made unlike, 1F1B, {_MICROBATCHES} "
        f"microbatches, {_ITERATIONS} iterations by a default plan for 1.00x, 1.05x or 1.10x, from "
        f"rows with errors; the GPUs that train use energies that differ by "
        f"{100 * _OTHER_GPU:g} % (standard deviation) from the profiled ones, and wait at a power "
        f"that differs by {100 * _OTHER_WAITING:g} %; computations jitter by 1 %, energy counters "
        "step every 100 ms, clock changes take 5.4 ms.",
        [Table(_COLUMNS, [*rows, whole])],
        list(_checks(found, whole)),
        [
            "The truth is what the same computations, with the same jitter, used in a twin at full "
            "clocks, and waiting for the rest of the time. *Within*: runs whose true saving lies "
            "in the stated 95 % interval.",
        ],
    )


def _run(drawn: _Drawn) -> dict[str, Any]:
    random = np.random.default_rng([drawn.number, 41])
    profiled = smoothed(unlike_stages(profile_of(drawn.case), drawn.number))
    rows = noisy_rows(profiled, drawn.noise, 12, drawn.number, states_errors=drawn.states_errors)
    frontier = solve(rows, schedules.one_f_one_b(STAGES, _MICROBATCHES))
    slowdown = _SLOWDOWNS[drawn.number % len(_SLOWDOWNS)]
    plan = frontier.plan_for(min(slowdown * frontier.baseline_time_s, frontier.max_time_s))
    truth = _other_gpus(profiled, random)
    iteration = pipeline_iteration(schedules.one_f_one_b(STAGES, _MICROBATCHES))
    world = _Watched(truth, iteration, _PHYSICS, 1, seed=drawn.number)
    twin = World(truth, iteration, _PHYSICS, 1, seed=drawn.number)
    ranks = [_Rank(plan, rank) for rank in range(STAGES)]
    programs = [[list(rank.program.clocks) for rank in ranks]]
    true_j = used_j = 0.0
    waiting_w = sum(truth.blocking_w(stage) for stage in range(STAGES))
    for number in range(_ITERATIONS):
        if drawn.becomes_slow and number == _ITERATIONS // 2:
            world.slowdown[drawn.number % STAGES] = 1.1
            twin.slowdown[drawn.number % STAGES] = 1.1
        ran, full = world.run(programs), twin.run(twin.full())
        used_j += ran.energy_j
        true_j += full.energy_j + waiting_w * (ran.time_s - full.time_s) - ran.energy_j
        for rank, each in enumerate(ranks):
            each.observe(ran, rank, number, world.made[rank])
            world.made[rank].clear()
    account = sum((rank.account() for rank in ranks), Account())
    assert account.saving is not None
    true = 100 * true_j / (used_j + true_j)
    stated, within = 100 * account.saving.share, 100 * account.saving.within_share
    return {
        "rows": 100 * drawn.noise,
        "errors": "yes" if drawn.states_errors else "no",
        "slow": "yes" if drawn.becomes_slow else "no",
        "true": true,
        "stated": stated,
        "within": within,
    }


class _Rank:
    """The telemetry of a rank, told what the world shows of it."""

    def __init__(self, plan: Plan, rank: int) -> None:
        seat = PipelineRank(rank, STAGES, 0, tuple(range(STAGES)))
        self.program = Program.of_plan(1, plan, rank)
        self._telemetry = Telemetry(rank, seat, offset_ns=lambda: 0, capacity=_ITERATIONS)
        self._now_s, self._counter_j = 0.0, 0.0
        attached = AttachReply("", "", "", "simulated")
        self._telemetry.update([], [attached, self._sample()])

    def observe(self, ran: Ran, rank: int, number: int, made: list[ControlChange]) -> None:
        """Take an iteration in."""
        seen = next(each for each in ran.observations if each.rank == rank)
        begin_s = self._now_s
        spans = tuple(
            (_ns(begin_s + each.begin_s), _ns(begin_s + each.end_s)) for each in seen.computations
        )
        self._now_s += ran.time_s
        self._counter_j += seen.energy_j or 0.0
        times = IterationTimes(number, _ns(begin_s), spans, _ns(self._now_s))
        self._telemetry.on_end(number, self.program, None)
        self._telemetry.update([times], [*made, self._sample()])

    def account(self) -> Account:
        """Return the account of the whole run."""
        self._telemetry.close()
        rows = self._telemetry.iterations
        return sum((Account.of(row, is_first=False) for row in rows), Account())

    def _sample(self) -> GpuSample:
        now_ns = _ns(self._now_s)
        return GpuSample(now_ns, now_ns, self._counter_j, None, None, 50.0, {}, 0, 0, None)


def _ns(seconds: float) -> int:
    return _BEGIN_NS + round(1e9 * seconds)


def _other_gpus(profile: Profile, random: np.random.Generator) -> Profile:
    """Return the GPUs that train: each uses other energies than the one that was profiled."""
    factors = np.exp(_OTHER_GPU * random.standard_normal(profile.stages)).tolist()
    measurements = {
        (stage, kind): tuple(
            Measurement(row.clock_mhz, row.time_s, factors[stage] * row.energy_j) for row in rows
        )
        for (stage, kind), rows in profile.measurements.items()
    }
    other = float(np.exp(_OTHER_WAITING * random.standard_normal()))
    waiting_w = tuple(other * profile.blocking_w(stage) for stage in range(profile.stages))
    return replace(profile, measurements=measurements, blocking_power_w=waiting_w)


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    off = [each["stated"] - each["true"] for each in found]
    return {
        **{name: found[0][name] for name in ("rows", "errors", "slow")},
        "runs": len(found),
        "true": fmean(each["true"] for each in found),
        "error": fmean(map(abs, off)),
        "bias": fmean(off),
        "worst": max(map(abs, off)),
        "width": median(each["within"] for each in found),
        "within": 100
        * fmean(abs(each["stated"] - each["true"]) <= each["within"] for each in found),
    }


def _checks(found: list[dict[str, Any]], whole: dict[str, Any]) -> Iterator[Check]:
    yield Check(
        f"{whole['within']:.0f} % of {len(found)} true savings are in the stated interval (limit "
        f"{_WITHIN} %)",
        whole["within"] >= _WITHIN,
    )
    yield Check(
        f"stated savings are {whole['error']:.2f} points off in the mean (limit {_MEAN_POINTS})",
        whole["error"] <= _MEAN_POINTS,
    )
