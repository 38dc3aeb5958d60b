"""Plans with a switch budget: against every choice of clocks where these are few, and
certificates beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from noisy_rows import unlike_stages
from oracles import effective_j, end_times_s, every_choice, nodes
from refusals import refusal
from strategies import (
    dag,
    dags,
    deadline_s,
    drawn,
    few_and_many,
    job,
    pipeline,
    pipelines,
    shares,
    smooth_profile,
    soaks,
)

from perseus_planner import Profile, schedules
from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline, UsageError
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules import Computation, Schedule, one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration, Operation
from perseus_planner.solver import budget, phases
from perseus_planner.solver.budget_problem import BudgetProblem
from perseus_planner.solver.frontier import Frontier, solve, solve_dag

pytestmark = pytest.mark.usefixtures("little_effort")


def spent_j(plan: Plan, problem: PipelineDag) -> float:
    """Effective energy of a plan, joules."""
    points = [plan.measurement(computation) for computation in problem.computations]
    computed_j = [
        point.energy_j - problem.profile.blocking_w(computation.stage) * point.time_s
        for computation, point in zip(problem.computations, points, strict=True)
    ]
    return math.fsum(
        [*computed_j, *(node.effective_j[0] for node in nodes(problem)[len(points) :])]
    )


def changes_of(problem: PipelineDag, clocks: Sequence[int]) -> int:
    """The most clock changes of a rank."""
    place, most = 0, 0
    for rank in problem.schedule.ranks:
        mine = clocks[place : place + len(rank)]
        most = max(most, sum(one != other for one, other in pairwise([mine[-1], *mine])))
        place += len(rank)
    return most


def check(plan: Plan, problem: PipelineDag, deadline: float, most: int | None) -> None:
    """The plan keeps to deadline and budget; all found without the planner's own replay."""
    clocks = [plan.clocks[str(computation)] for computation in problem.computations]
    times_s = [plan.measurement(computation).time_s for computation in problem.computations]
    changes = changes_of(problem, clocks)
    assert max(plan.changes) == changes
    assert most is None or changes <= most
    assert (
        plan.time_s == max(end_times_s(problem, times_s)) + problem.profile.overhead_s <= deadline
    )


def scale_j(problem: PipelineDag) -> float:
    return math.fsum(max(map(abs, each)) for each in effective_j(problem))


class Tried:
    """A problem with all its choices of measured clocks, tried one by one."""

    def __init__(self, problem: PipelineDag) -> None:
        self.problem, self.frontier = problem, solve_dag(problem)
        points = [problem.profile.measurements[key] for key in problem.iteration.keys]
        choice, self.times_s, self.costs_j = every_choice(problem)
        self.changes = np.array(
            [
                changes_of(problem, [points[i][j].clock_mhz for i, j in enumerate(row)])
                for row in choice.T.tolist()
            ]
        )

    def wasted_j(self, deadline: float, most: int) -> float:
        """By how much the plan misses the best choice; fails where it is none, or refused though
        there is one.
        """
        fits = self.changes <= most
        in_time = fits & (self.times_s <= deadline)
        if not in_time.any():
            with pytest.raises(InfeasibleBudget) as caught:
                self.frontier.plan_until(deadline, max_changes=most, on_time=None)
            assert caught.value.least_time_s >= (
                self.times_s[fits].min() if fits.any() else math.inf
            )
            return 0.0
        plan = self.frontier.plan_until(deadline, max_changes=most, on_time=None)
        check(plan, self.problem, deadline, most)
        missed_j = spent_j(plan, self.problem) - self.costs_j[in_time].min()
        assert missed_j >= -1e-12 * scale_j(self.problem)
        return max(0.0, missed_j - 1e-12 * scale_j(self.problem))


def small_problems(seed: int, count: int) -> list[PipelineDag]:
    """Graphs, pipelines and jobs with all there can be, with at most 2048 choices of clocks."""
    rng, problems = Random(seed), []
    shapes = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)]
    while len(problems) < count:
        shape = rng.choice(shapes)
        graph = dag(rng.getrandbits(32), rng.randint(2, 7), 4)
        lined = PipelineDag.from_schedule(*pipeline(rng.getrandbits(32), *shape, 4))
        problem = (graph, lined, job(rng.getrandbits(32), *shape, 3))[len(problems) % 3]
        if (
            2
            <= math.prod(len(problem.profile.measurements[key]) for key in problem.iteration.keys)
            <= 2048
        ):
            problems.append(problem)
    return problems


def tried_at_random(seed: int, count: int) -> list[float]:
    rng, wasted_j = Random(seed), []
    for problem in small_problems(seed, count):
        tried = Tried(problem)
        deadlines = (
            rng.uniform(tried.times_s.min(), tried.times_s.max()),
            float(rng.choice(tried.times_s)),
        )
        wasted_j += [tried.wasted_j(deadline, rng.randint(0, 4)) for deadline in deadlines]
    return wasted_j


@few_and_many("count", 6, 40)
def test_plans_of_the_smallest_problems_are_the_best_there_are(count: int):
    assert max(tried_at_random(1, count)) == 0


@few_and_many("count", 9, 60)
def test_without_trying_all_choices_most_are_the_best_still(
    count: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(budget, "_FEW", 0)
    assert np.mean(np.array(tried_at_random(2, count)) == 0) >= 0.9


def fast_ends(frontier: Frontier, deadline: float, ends: int) -> Plan | None:
    """Each rank fast for its first and last computations, and at one clock between: the cheapest
    one in time.
    """
    problem, fastest = frontier.dag, max(m.clock_mhz for m in frontier.profile.measurements[0, "F"])
    clocks = {str(computation): fastest for computation in problem.computations}
    for rank in reversed(problem.schedule.ranks):
        plans = []
        for between in frontier.profile.measurements[0, "F"]:
            changed = clocks | {
                str(computation): between.clock_mhz for computation in rank[ends : len(rank) - ends]
            }
            plan = frontier.plan_of(changed)
            plans += [(spent_j(plan, problem), changed)] if plan.time_s <= deadline else []
        if not plans:
            return None
        clocks = min(plans, key=lambda entry: entry[0])[1]
    return frontier.plan_of(clocks)


@pytest.mark.parametrize("seed", [3, *soaks(0, 1, 2)])
def test_two_changes_are_never_below_fast_ends_with_one_clock_between(seed: int):
    frontier = solve(unlike_stages(smooth_profile(3, step_mhz=60), seed), "1f1b", microbatches=10)
    for slowdown in (1.0, 1.02, 1.1):
        deadline = slowdown * frontier.baseline_time_s
        plan = frontier.plan_until(deadline, max_changes=2, on_time=None)
        for ends in (0, 1, 2, 4):
            known = fast_ends(frontier, deadline, ends)
            if known is not None:
                assert max(known.changes) <= 2
                assert spent_j(plan, frontier.dag) <= spent_j(known, frontier.dag) * (1 + 1e-12)


def test_ends_that_are_longer_than_a_rank_leave_the_other_ranks_as_they_are():
    frontier = solve(smooth_profile(3, step_mhz=60), one_f_one_b(3, 4))
    fastest = [max(row.clock_mhz for row in frontier.profile.measurements[0, "F"])] * 24
    problem = BudgetProblem(frontier.dag, 2 * frontier.baseline_time_s, fastest)
    # Each rank has eight computations, and the longest ends have more.
    assert problem.mhz(phases.fast_ends(problem)[-1].clock) == fastest
    for plan in phases.fast_ends(problem)[5:9]:  # none at the begin, 6 to 14 at the end
        ends = [problem.mhz(plan.clock[begin:end])[-6:] for begin, end in problem.ranks]
        assert ends == [fastest[:6]] * 3


def test_a_small_budget_is_as_good_as_the_optimum_that_highs_proves():
    profile = unlike_stages(smooth_profile(3, step_mhz=60), 0)
    frontier = solve(profile, one_f_one_b(3, 4))
    plan = frontier.plan_until(1.02 * frontier.baseline_time_s, max_changes=2, on_time=None)
    # `_least_j` of benchmarks/budget_optima.py took a minute to find this
    assert spent_j(plan, frontier.dag) == pytest.approx(391.08065417200095, rel=1e-9)


BUDGETS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13, None)


def rising(frontier: Frontier, deadline: float) -> list[float]:
    """Effective energy of the plan of each budget, infinite where there is none; all are
    checked.
    """
    spent = []
    for most in BUDGETS:
        try:
            plan = frontier.plan_until(deadline, max_changes=most, on_time=None)
        except InfeasibleBudget:
            spent.append(math.inf)
            continue
        check(plan, frontier.dag, deadline, most)
        spent.append(spent_j(plan, frontier.dag))
    return spent


def never_worse(spent: list[float], problem: PipelineDag) -> bool:
    margin_j = 1e-9 * scale_j(problem)
    return all(more <= less + margin_j for less, more in pairwise(spent))


@drawn(3, 25, dags(most=14), shares())
def test_a_larger_budget_is_never_worse_for_any_graph(problem: PipelineDag, share: float):
    frontier = solve_dag(problem)
    deadline = deadline_s(frontier, share)
    assert never_worse(rising(frontier, deadline), problem)


@drawn(2, 15, pipelines(max_microbatches=8), shares())
def test_a_larger_budget_is_never_worse_for_pipelines(case: tuple[Profile, Schedule], share: float):
    frontier = solve(*case)
    deadline = deadline_s(frontier, share)
    assert never_worse(rising(frontier, deadline), frontier.dag)


def with_one_clock_each(frontier: Frontier, deadline: float) -> float:
    """Return the least effective energy that a local search apart from the solver finds with one
    clock for each rank: from all clocks at maximum, one rank at a time, or two at once, get other
    clocks while that saves energy.
    """
    dag = frontier.dag
    keys, programs = dag.iteration.keys, dag.iteration.programs
    rows = {key: {row.clock_mhz: row for row in dag.profile.measurements[key]} for key in set(keys)}
    choices = [sorted(set.intersection(*(set(rows[keys[i]]) for i in own))) for own in programs]
    chosen = [max(own) for own in choices]

    def cost_j(trial: Sequence[int]) -> float:
        """Return the effective energy; infinite if it is late."""
        picked = {
            i: rows[keys[i]][mhz] for own, mhz in zip(programs, trial, strict=True) for i in own
        }
        ends_s = end_times_s(dag, [picked[i].time_s for i in range(len(keys))])
        if max(ends_s) + dag.profile.overhead_s > deadline * (1 + 1e-12):
            return math.inf
        return math.fsum(
            picked[i].energy_j - dag.profile.blocking_w(keys[i][0]) * picked[i].time_s
            for i in picked
        )

    best = cost_j(chosen)
    better = True
    while better:
        better = False
        for count in (1, 2):
            for ranks in combinations(range(len(chosen)), count):
                for clocks in product(*(choices[rank] for rank in ranks)):
                    trial = list(chosen)
                    for rank, mhz in zip(ranks, clocks, strict=True):
                        trial[rank] = mhz
                    if (trial_j := cost_j(trial)) < best * (1 - 1e-9):
                        chosen, best, better = trial, trial_j, True
    return best


@pytest.mark.parametrize("seed", [0, *soaks(1)])
def test_one_clock_each_is_at_least_as_good_as_a_local_search(seed: int):
    profile = unlike_stages(smooth_profile(3 + seed, step_mhz=120), seed)
    frontier = solve(profile, one_f_one_b(3 + seed, 5))
    for slowdown in (1.0, 1.005, 1.02, 1.1):
        deadline = slowdown * frontier.baseline_time_s
        plan = frontier.plan_until(deadline, max_changes=0, on_time=None)
        check(plan, frontier.dag, deadline, 0)
        plan_j = plan.energy_j - frontier.dag.waiting_w * plan.time_s
        assert plan_j <= with_one_clock_each(frontier, deadline) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, *soaks(2)])
def test_a_later_deadline_gets_no_worse_plan_of_one_clock_each(seed: int):
    """With one clock each, 1.0075x took more than 1.005x: annealing alone found nothing there."""
    profile = unlike_stages(smooth_profile(8, step_mhz=30), seed)
    frontier = solve(profile, one_f_one_b(8, 12))
    before_j = math.inf
    for slowdown in (1.0, 1.0025, 1.005, 1.0075, 1.01, 1.02):
        deadline = slowdown * frontier.baseline_time_s
        plan = frontier.plan_until(deadline, max_changes=0, on_time=None)
        check(plan, frontier.dag, deadline, 0)
        plan_j = plan.energy_j - frontier.dag.waiting_w * plan.time_s
        assert plan_j <= before_j * (1 + 1e-9)
        before_j = plan_j


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.interleaved_zero_bubble(2, 2, 8),
        *soaks(schedules.gpipe(4, 8), schedules.interleaved_1f1b(4, 2, 8), schedules.zb_h1(4, 8)),
    ],
    ids=str,
)
def test_budgets_hold_where_a_rank_has_several_stages_and_kinds(
    schedule: Schedule,
):
    frontier = solve(with_halves(smooth_profile(schedule.stages, step_mhz=60)), schedule)
    spent = rising(frontier, 1.05 * frontier.baseline_time_s)
    assert never_worse(spent, frontier.dag)
    assert spent[BUDGETS.index(8)] < spent[0] < math.inf


def with_halves(profile: Profile) -> Profile:
    """The profile, its backward also as two halves."""
    halves = {
        (stage, kind): tuple(
            Measurement(m.clock_mhz, m.time_s * part, m.energy_j * part) for m in points
        )
        for (stage, backward), points in profile.measurements.items()
        for kind, part in (("I", 0.55), ("W", 0.45))
        if backward == "B"
    }
    return Profile({**profile.measurements, **halves}, profile.blocking_power_w)


def test_no_change_is_one_clock_per_rank_and_so_is_one_change():
    frontier = solve(smooth_profile(4), one_f_one_b(4, 12))
    for share in (0.02, 0.3, 0.8):
        deadline = deadline_s(frontier, share)
        plan = frontier.plan_until(deadline, max_changes=0, on_time=None)
        for rank in plan.schedule.ranks:
            assert len({plan.clocks[str(computation)] for computation in rank}) == 1
        assert frontier.plan_until(deadline, max_changes=1, on_time=None).clocks == plan.clocks


def test_a_clock_that_is_worthless_alone_is_used_where_it_is_the_best_one_shared():
    points = {
        (0, "F"): (
            Measurement(1000, 1.0, 20.0),
            Measurement(900, 1.1, 21.0),
            Measurement(800, 1.2, 5.0),
        ),
        (0, "B"): (
            Measurement(1000, 1.0, 20.0),
            Measurement(900, 1.1, 4.0),
            Measurement(800, 1.5, 3.9),
        ),
    }
    frontier = solve(Profile(points, 1.0), one_f_one_b(1, 2))
    assert 900 not in {option.clock_mhz for option in frontier.dag.points[0, "F"]}
    assert set(frontier.plan_until(4.5, max_changes=0, on_time=None).clocks.values()) == {900}


def test_many_computations_with_one_clock_each_have_few_choices():
    points = {(stage, kind): (Measurement(1000, 1.0, 20.0),) for stage in range(8) for kind in "FB"}
    points[3, "F"] = (*points[3, "F"], Measurement(900, 1.1, 15.0))
    frontier = solve(Profile(points, 1.0), one_f_one_b(8, 12))
    plan = frontier.plan_until(1.1 * frontier.baseline_time_s, max_changes=2)
    assert 900 in plan.clocks.values()


def test_equal_input_gives_equal_plans():
    one, other = (solve(smooth_profile(3), one_f_one_b(3, 8)) for _ in range(2))
    deadline = 1.04 * one.baseline_time_s
    other.plan_until(
        deadline, max_changes=2, on_time=None
    )  # what was asked before makes no difference
    for most in (0, 4, 6):
        plans = [each.plan_until(deadline, max_changes=most, on_time=None) for each in (one, other)]
        assert plans[0] == plans[1]


def test_operations_without_a_clock_are_no_changes():
    schedule = Schedule("one", (tuple(Computation(0, kind, m) for m in range(4) for kind in "FB"),))
    operations = (Operation(0, "load", None, 0, 0.5), Operation(0, "step", None, 0, 0.3, 5.0))
    before = ((8,), (0,), (1,), (2,), (9,), (4,), (5,), (6,), (), (3,))
    problem = PipelineDag(smooth_profile(1), Iteration(schedule, before, operations=operations))
    frontier = solve_dag(problem)
    deadline = 1.1 * frontier.baseline_time_s
    assert frontier.plan_until(deadline, max_changes=0, on_time=None).changes == (0,)
    assert frontier.plan_until(deadline, max_changes=2, on_time=None).changes <= (2,)


def test_a_rank_without_a_clock_that_all_it_runs_was_measured_at_needs_changes():
    points = {
        (0, "F"): (Measurement(1000, 1.0, 20.0), Measurement(900, 1.2, 15.0)),
        (0, "B"): (Measurement(950, 2.0, 40.0), Measurement(850, 2.2, 33.0)),
    }
    frontier = solve(Profile(points, 1.0), one_f_one_b(1, 1))
    assert refusal(InfeasibleBudget, frontier.plan_until, 4.0, max_changes=0) == (
        "no plan found finishes an iteration within 4 s with at most 0 clock changes per GPU: "
        "some GPU has no clock at which all that it runs was measured; allow more changes"
    )
    assert frontier.plan_until(4.0, max_changes=2, on_time=None).changes == (2,)


def test_a_deadline_that_takes_more_changes_is_refused_with_the_least_time(
    monkeypatch: pytest.MonkeyPatch,
):
    points = {
        (0, "F"): (Measurement(1000, 1.0, 20.0), Measurement(900, 1.2, 15.0)),
        (0, "B"): (Measurement(1000, 2.4, 40.0), Measurement(900, 2.0, 33.0)),
    }
    frontier = solve(Profile(points, 1.0), one_f_one_b(1, 2))
    for few in (2**15, 0):
        monkeypatch.setattr(budget, "_FEW", few)
        assert refusal(InfeasibleDeadline, frontier.plan_until, 6.1, max_changes=1) == (
            "no plan found finishes an iteration within 6.1 s with at most 1 clock change per "
            "GPU: the fastest found takes 6.4 s; ask for that, or allow more changes"
        )
        assert frontier.plan_until(6.4, max_changes=1, on_time=None).time_s == 6.4
        assert frontier.plan_until(6.1, max_changes=4, on_time=None).time_s == 6.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_changes": -1},
            "max_changes: -1 is not a number of clock changes: give a whole number of 0 or more",
        ),
        (
            {"max_changes": 1.5},
            "max_changes: 1.5 is not a number of clock changes: give a whole number of 0 or more",
        ),
    ],
)
def test_an_invalid_budget_is_refused(arguments: dict[str, float], message: str):
    frontier = solve(smooth_profile(1), one_f_one_b(1, 1))
    assert refusal(UsageError, frontier.plan_until, frontier.max_time_s, **arguments) == message


def test_eight_changes_keep_most_of_what_a_measured_pipeline_saves(measured_data: Path):
    file = measured_data / "perseus_sosp24" / "stage_profile" / "gpt3-175b+a100_sxm_bf16.csv"
    frontier = solve(Profile.load(file, 83.64), one_f_one_b(8, 96))
    deadline = 1.05 * frontier.baseline_time_s
    plan = frontier.plan_until(deadline, max_changes=8, on_time=None)
    check(plan, frontier.dag, deadline, 8)
    assert plan.saving_j >= 0.94 * frontier.plan_until(deadline, on_time=None).saving_j
