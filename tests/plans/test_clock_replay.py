"""Clock changes that take time: by hand, against the rules solved another way, and by what no
replay may break.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import drawn, fixed, pipelines

from perseus_planner.base.errors import UsageError
from perseus_planner.plans.clock_replay import (
    Call,
    ChangeReplay,
    Task,
    replay_with_changes,
)
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import iteration_energy_j, replay
from perseus_planner.profiles.measurement import ClockChange, Measurement, changes_per_rank
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Schedule
from perseus_planner.schedules.pipeline import pipeline_iteration

NONE = ClockChange(0.0, 0.0)
SEEDS = st.integers(0, 2**32 - 1)


class Problem(NamedTuple):
    """Tasks are numbered rank by rank, in the order of `ranks`."""

    ranks: list[list[Task]]
    waits: list[list[tuple[int, float]]]
    change: ClockChange
    node_of_rank: list[int]
    waiting_w: list[float]
    gpus_per_rank: int = 1

    @property
    def rank_of(self) -> list[int]:
        return [number for number, rank in enumerate(self.ranks) for _ in rank]

    def replayed(self, change: ClockChange | None = None) -> ChangeReplay:
        return replay_with_changes(
            [task for rank in self.ranks for task in rank],
            [
                [task for task, rank in enumerate(self.rank_of) if rank == number]
                for number in range(len(self.ranks))
            ],
            self.waits,
            change or self.change,
            node_of_rank=self.node_of_rank,
            gpus_per_rank=self.gpus_per_rank,
        )

    def time_s(self, result: ChangeReplay) -> float:
        return max(result.ends_s)

    def energy_j(self, result: ChangeReplay) -> float:
        return iteration_energy_j(
            self.rank_of, result.durations_s, result.energies_j, self.waiting_w, self.time_s(result)
        )


def plan_of(profile: Profile, schedule: Schedule, rng: Random) -> Plan:
    """A plan of clocks drawn for each computation; what it says of time, energy and bound is
    nothing.
    """
    clocks = {
        str(c): rng.choice(profile.measurements[c[:2]]).clock_mhz for c in schedule.computations()
    }
    table = {
        key: {m.clock_mhz: m for m in measured} for key, measured in profile.measurements.items()
    }
    return Plan(
        pipeline_iteration(schedule),
        clocks,
        table,
        "",
        None,
        "measured",
        profile.blocking_power_w,
        *[math.nan] * 6,
    )


def problem_of(plan: Plan, rng: Random) -> Problem:
    """The plan's iteration on GPUs of any latency, in any nodes."""
    ranks = [
        [Task(plan.measurements[c[:2]], plan.clocks[str(c)]) for c in rank]
        for rank in plan.schedule.ranks
    ]
    waits = [[(other, 0.0) for other in before] for before in plan.iteration.predecessors]
    change = ClockChange(rng.choice((0.0, 1e-4, 2e-3, 6e-3, 0.1)), rng.choice((0.0, 1e-3, 0.05)))
    nodes = [rng.randrange(3) for _ in ranks]
    return Problem(
        ranks, waits, change, nodes, [plan.blocking_power_w] * len(ranks), rng.choice((1, 1, 4))
    )


def exact(seed: int) -> Problem:
    """A few tasks whose times and shares are sums of few powers of two, so that floats hold them
    exactly.
    """
    rng = Random(seed)
    clocks = (1000, 1200, 1400)

    def task() -> Task:
        base_s, joules = rng.choice((0.25, 0.5, 1.0, 2.0)), rng.randint(0, 64)
        if rng.random() < 0.2:
            return Task.operation(Measurement(1, base_s, joules))
        measured = rng.sample(clocks, rng.randint(1, 3))
        costs = {
            clock: Measurement(clock, base_s * rng.choice((1, 2)), joules + rng.randint(0, 64))
            for clock in measured
        }
        return Task(costs, rng.choice(measured))

    ranks = [[task() for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 3))]
    turns = rng.sample(
        [number for number, rank in enumerate(ranks) for _ in rank], sum(map(len, ranks))
    )
    first = [sum(map(len, ranks[:number])) for number in range(len(ranks))]
    done: list[int] = []
    waits: list[list[tuple[int, float]]] = [[] for _ in turns]
    for turn, number in enumerate(turns):
        place = first[number] + turns[:turn].count(number)
        waits[place] = [
            (other, rng.choice((0.0, 0.25, 1.5)))
            for other in rng.sample(done, min(turn, rng.randint(0, 2)))
        ]
        done.append(place)
    change = ClockChange(rng.choice((0.0, 0.25, 0.5, 1.5)), rng.choice((0.0, 0.25, 1.0)))
    powers = [rng.choice((0.0, 8.0, 64.0)) for _ in ranks]
    return Problem(
        ranks, waits, change, [rng.randrange(2) for _ in ranks], powers, rng.choice((1, 1, 2))
    )


def clocks_of(rank: Sequence[Task]) -> list[int]:
    return [task.clock_mhz for task in rank if task.clock_mhz is not None]


class Request(NamedTuple):
    at_s: Fraction
    rank: int
    clock_mhz: int


def requests_of(
    problem: Problem, ends_s: Sequence[float | Fraction], idle_s: Sequence[Fraction]
) -> list[Request]:
    """What the ranks ask for, rank by rank, if their tasks end then, and have been idle for that
    long before time 0.
    """
    requests, place = [], 0
    for number, tasks in enumerate(problem.ranks):
        wanted = clocks_of(tasks)[-1:]
        asked_s = -idle_s[number]
        for task in tasks:
            if task.clock_mhz is not None and [task.clock_mhz] != wanted:
                requests.append(Request(Fraction(asked_s), number, task.clock_mhz))
                wanted = [task.clock_mhz]
            asked_s, place = ends_s[place], place + 1
    return requests


def planned_s(problem: Problem) -> tuple[list[Fraction], list[Fraction]]:
    """When each task ends, and how long each rank is idle at the end, if changes take no time."""
    ends_s = ends_at(problem, [[] for _ in problem.ranks])[0]
    lasts = [count - 1 for count in accumulate(map(len, problem.ranks))]
    return ends_s, [max(ends_s) - ends_s[last] for last in lasts]


def ends_at(
    problem: Problem, in_force: list[list[tuple[Fraction, int]]]
) -> tuple[list[Fraction], list[Fraction]]:
    """When each task ends, and its joules, if its rank's clocks change then; as planned if they
    never do.
    """
    ranks = problem.ranks
    tasks = [
        (number, task, position)
        for number, rank in enumerate(ranks)
        for position, task in enumerate(rank)
    ]
    ends_s: dict[int, Fraction] = {}
    joules: dict[int, Fraction] = {}
    while len(ends_s) < len(tasks):
        for place, (number, task, position) in enumerate(tasks):
            waits = [*problem.waits[place], *([(place - 1, 0.0)] if position else [])]
            if place not in ends_s and all(other in ends_s for other, _ in waits):
                start_s = max(
                    (ends_s[other] + Fraction(lag_s) for other, lag_s in waits), default=Fraction(0)
                )
                ends_s[place], joules[place] = worked_off(task, start_s, in_force[number])
    return [ends_s[place] for place in range(len(tasks))], [
        joules[place] for place in range(len(tasks))
    ]


def cost_at(task: Task, clock_mhz: int) -> Measurement:
    measured = sorted(task.costs)
    lower = [each for each in measured if each <= clock_mhz]
    return task.costs[measured[0] if task.clock_mhz is None or not lower else lower[-1]]


def worked_off(
    task: Task, start_s: Fraction, in_force: list[tuple[Fraction, int]]
) -> tuple[Fraction, Fraction]:
    """When a task ends, and its joules: one stretch of time after another, each at one clock."""
    if not in_force:
        return start_s + Fraction(task.planned.time_s), Fraction(task.planned.energy_j)
    left, joules, now_s = Fraction(1), Fraction(0), start_s
    for (_, clock_mhz), (until_s, _) in pairwise([*in_force, (Fraction(10**6), 0)]):
        cost = cost_at(task, clock_mhz)
        share = max(Fraction(0), min(left, (until_s - now_s) / Fraction(cost.time_s)))
        left, joules = left - share, joules + share * Fraction(cost.energy_j)
        now_s += share * Fraction(cost.time_s)
    return now_s, joules


def served(problem: Problem, requests: list[Request]) -> list[tuple[int, int, Fraction, Fraction]]:
    """The calls of one node as (rank, MHz, asked, begun): whenever the lock is free, what waits
    by then.
    """
    hold_s = Fraction(problem.change.call_s) * problem.gpus_per_rank
    last = {
        number: clocks[-1] for number, clocks in enumerate(map(clocks_of, problem.ranks)) if clocks
    }
    calls: list[tuple[int, int, Fraction, Fraction]] = []
    free_s = min((r.at_s for r in requests), default=Fraction(0))
    while True:
        moments_s = [free_s, *sorted(r.at_s for r in requests if r.at_s > free_s)]
        now_s = next(
            (moment_s for moment_s in moments_s if waiting(requests, moment_s, last)), None
        )
        if now_s is None:
            return calls
        slots = waiting(requests, now_s, last)
        number = min(slots, key=lambda rank: (slots[rank][0], rank))
        taken = slots[number][1]
        calls.append((number, taken.clock_mhz, taken.at_s, now_s))
        last[number], free_s = taken.clock_mhz, now_s + hold_s
        requests = [r for r in requests if r.rank != number or r.at_s > now_s]


def waiting(
    requests: list[Request], now_s: Fraction, last: dict[int, int]
) -> dict[int, tuple[Fraction, Request]]:
    """What waits at one moment: rank -> since when it is in the queue, and its latest request."""
    slots: dict[int, tuple[Fraction, Request]] = {}
    for request in sorted(requests):
        if request.at_s <= now_s:
            since_s = slots.pop(request.rank, (request.at_s, None))[0]
            if request.clock_mhz != last[request.rank]:
                slots[request.rank] = (since_s, request)
    return slots


def solved(
    problem: Problem,
) -> tuple[list[Fraction], list[Fraction], list[tuple[int, int, Fraction, Fraction]]]:
    """Ends, joules and calls that fit each other: guess the ends, see what they lead to, and again,
    until they stay.

    What comes later never changes what came before, so each round settles at least one more task.
    """
    ends_s, idle_s = planned_s(problem)
    after_s = Fraction(problem.change.call_s) * problem.gpus_per_rank + Fraction(
        problem.change.settle_s
    )
    for _ in range(2 * len(ends_s) + 2):
        requests = requests_of(problem, ends_s, idle_s)
        calls = []
        for node in set(problem.node_of_rank):
            calls += served(problem, [r for r in requests if problem.node_of_rank[r.rank] == node])
        in_force: list[list[tuple[Fraction, int]]] = []
        for number, rank in enumerate(problem.ranks):
            clocks = clocks_of(rank)
            set_then = [
                (begun_s + after_s, clock) for who, clock, _, begun_s in calls if who == number
            ]
            in_force.append([(Fraction(-(10**6)), clocks[-1]), *set_then] if clocks else [])
        before_s, (ends_s, joules) = ends_s, ends_at(problem, in_force)
        if before_s == ends_s:
            return ends_s, joules, calls
    raise AssertionError("the rules do not settle")


@drawn(40, 400, seed=SEEDS)
def test_the_replay_follows_from_the_rules(seed: int):
    problem = exact(seed)
    result, (ends_s, joules, calls) = problem.replayed(), solved(problem)
    assert result.ends_s == tuple(ends_s)
    assert result.energies_j == tuple(joules)
    assert sorted((c.rank, c.clock_mhz, c.requested_s, c.start_s) for c in result.calls) == sorted(
        calls
    )
    busy_s = [0.0] * len(problem.ranks)
    for number, duration_s in zip(problem.rank_of, result.durations_s, strict=True):
        busy_s[number] += duration_s
    waiting_j = [
        p * (problem.time_s(result) - s) for p, s in zip(problem.waiting_w, busy_s, strict=True)
    ]
    assert (problem.time_s(result), problem.energy_j(result)) == (
        max(ends_s),
        sum(joules) + sum(waiting_j),
    )
    assert all(
        start + s == end
        for start, s, end in zip(result.starts_s, result.durations_s, result.ends_s, strict=True)
    )


@drawn(10, 100, problem=pipelines(5, 8), seed=SEEDS)
def test_changes_that_take_no_time_change_nothing(problem: tuple[Profile, Schedule], seed: int):
    plan = plan_of(*problem, Random(seed))
    drawn, timeline = problem_of(plan, Random(seed)), replay(plan)
    result = drawn.replayed(NONE)
    spans = list(timeline.spans.values())
    points = [plan.measurement(computation) for computation in plan.schedule.computations()]
    assert result.starts_s == tuple(span.start_s for span in spans)
    assert result.ends_s == tuple(span.end_s for span in spans)
    assert result.durations_s == tuple(point.time_s for point in points)
    assert result.energies_j == tuple(point.energy_j for point in points)
    assert (drawn.time_s(result), drawn.energy_j(result)) == (timeline.time_s, timeline.energy_j)


@drawn(10, 100, problem=pipelines(5, 8), seed=SEEDS)
def test_one_clock_per_rank_costs_nothing(problem: tuple[Profile, Schedule], seed: int):
    plan = plan_of(*problem, Random(seed))
    drawn = problem_of(plan, Random(seed))
    ranks = [[Task({1410: task.planned}, 1410) for task in rank] for rank in drawn.ranks]
    held = drawn._replace(ranks=ranks)
    result = held.replayed()
    assert result == held.replayed(NONE)
    assert held.time_s(result) == replay(plan).time_s
    assert result.calls == ()


@fixed
@given(problem=pipelines(5, 8), seed=SEEDS)
def test_a_node_makes_one_call_at_a_time_of_the_latest_value_and_loses_no_change(
    problem: tuple[Profile, Schedule], seed: int
):
    drawn = problem_of(plan_of(*problem, Random(seed)), Random(seed))
    result = drawn.replayed()
    idle_s = planned_s(drawn)[1]
    for node in set(drawn.node_of_rank):
        calls = [call for call in result.calls if call.node == node]
        assert all(one.end_s <= other.start_s for one, other in pairwise(calls))
        assert all(
            call.end_s == call.start_s + drawn.gpus_per_rank * drawn.change.call_s for call in calls
        )
    for number, rank in enumerate(drawn.ranks):
        asked = [r for r in requests_of(drawn, result.ends_s, idle_s) if r.rank == number]
        assert len(asked) == changes_per_rank([task.clock_mhz for task in rank])
        calls = [call for call in result.calls if call.rank == number]
        for call in calls:
            latest = [r for r in asked if r.at_s <= Fraction(call.start_s) + Fraction(1, 10**12)][
                -1
            ]
            assert call.clock_mhz == latest.clock_mhz
            assert math.isclose(call.requested_s, latest.at_s, abs_tol=1e-12)
        set_to = [clocks_of(rank)[-1], *(call.clock_mhz for call in calls)]
        assert (
            set_to[-1] == set_to[0]
        )  # the clock of the last task, with which the next iteration begins
        assert all(one != other for one, other in pairwise(set_to))


def test_two_ranks_by_hand():
    forward = {1000: Measurement(1000, 1.0, 100.0), 500: Measurement(500, 2.0, 80.0)}
    backward = {1000: Measurement(1000, 2.0, 200.0), 500: Measurement(500, 4.0, 160.0)}
    ranks = [[Task(forward, 1000), Task(backward, 500)], [Task(forward, 500), Task(backward, 1000)]]
    change = ClockChange(call_s=0.5, settle_s=0.25)
    problem = Problem(ranks, [[], [(3, 0.0)], [(0, 0.25)], []], change, [0, 0], [10.0, 20.0])
    result = problem.replayed()
    assert problem.replayed(NONE).ends_s == (1.0, 9.25, 3.25, 5.25)
    assert result.calls == (
        Call(0, 1, 500, -4.0, -4.0, -3.5, -3.25),  # rank 1 has waited since 5.25 of 9.25 s
        Call(0, 0, 1000, 0.0, 0.0, 0.5, 0.75),
        Call(0, 0, 500, 1.375, 1.375, 1.875, 2.125),
        Call(0, 1, 1000, 3.625, 3.625, 4.125, 4.375),
    )
    # The first forward does 3/8 of its work at 500 MHz, the second backward 3/16.
    assert result.starts_s == (0.0, 6.0, 1.625, 3.625)
    assert result.ends_s == (1.375, 10.0, 3.625, 6.0)
    assert result.durations_s == (1.375, 4.0, 2.0, 2.375)
    assert result.energies_j == (92.5, 160.0, 80.0, 192.5)
    assert problem.time_s(result) == 10.0
    assert problem.energy_j(result) == 525.0 + 10 * (10 - 5.375) + 20 * (10 - 4.375)


def test_a_task_of_zero_time_runs_at_its_clock_if_changes_take_no_time():
    costs = {clock: SimpleNamespace(time_s=0.0, energy_j=float(clock)) for clock in (1, 2)}
    ranks = [[Task(costs, 1), Task.operation(costs[1]), Task(costs, 2)], [Task.operation(costs[2])]]
    problem = Problem(ranks, [[], [(3, 0.5)], [], []], NONE, [0, 0], [10.0, 100.0])
    result = problem.replayed()
    assert result.starts_s == result.ends_s == (0.0, 0.5, 0.5, 0.0)
    assert result.energies_j == (1.0, 1.0, 2.0, 2.0)
    assert problem.energy_j(result) == 6.0 + 0.5 * 110.0


def test_a_clock_that_was_not_measured_is_the_next_lower_one_or_else_the_lowest():
    costs = {clock: Measurement(clock, 1.0, 1.0) for clock in (1410, 900, 1200)}
    found = {
        clock: Task(costs, 900).at(clock).clock_mhz
        for clock in (2000, 1410, 1300, 1200, 1000, 900, 100)
    }
    assert found == {2000: 1410, 1410: 1410, 1300: 1200, 1200: 1200, 1000: 900, 900: 900, 100: 900}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"node_of_rank": [0, 0]}, "node_of_rank: has 2 entries for 1 ranks; give as many"),
        ({"gpus_per_rank": 0}, "gpus_per_rank: 0 is not a whole number of at least 1"),
    ],
)
def test_values_that_do_not_fit_the_ranks_are_refused(values, text):
    problem = Problem([[Task({1410: Measurement(1410, 1.0, 1.0)}, 1410)]], [[]], NONE, [0], [80.0])
    assert refusal(UsageError, problem._replace(**values).replayed) == text
