"""Plans that choose mode and clock against every choice there is; and plans of one mode as they
were before there were any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from effort import FULL
from oracles import all_choices, relaxed_j, waiting_w
from recomputed import recomputed
from strategies import any_schedule, few_and_many, furnished, pipeline, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import InfeasibleDeadline, ProfileError, UsageError
from perseus_planner.base.files import sha256
from perseus_planner.extensions.lab.replay import Cluster
from perseus_planner.extensions.service.curve import Curve
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.modes import OWN, Mode, Modes
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.clock_problem import clock_problem_of
from perseus_planner.solver.frontier import Frontier, solve, solve_dag
from perseus_planner.solver.modes import ModeProblem, baseline, in_modes

BEFORE = {
    "smooth": (
        *("42027bcd071c28fe", "bffcb49c42df862c", "3b2a4fb0e30cac8c", "b10a9e22307e5491"),
        *("0bf5030dae79d9ea", "80b538a1d6ec59ff"),
    ),
    "job 3": ("d13e53859441dda1", "ee5a767f33ce1be4", "f9746bb61f58cd1d", "f9746bb61f58cd1d"),
    "job 5": ("5787e69adcbc54d6", "d17850f97ef20f3c", "42511ffaff34fe93", "498887f1094d4303"),
}
"""Digests of frontiers, profiles and plans, made before there were modes; the plans of "smooth"
after, since small problems are searched by labels.
"""


@pytest.mark.parametrize("name", BEFORE)
def test_one_mode_is_as_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in FULL:
        monkeypatch.setattr(*limit)
    if name == "smooth":
        frontier, ratios = solve(smooth_profile(4, 45), "1f1b", microbatches=8), (1.0, 1.05)
    else:
        seed = int(name.split()[1])
        frontier, ratios = solve_dag(furnished(seed, any_schedule(seed, 2, 3), 4)), (1.1,)
    guides = frontier.guides
    arrays = (frontier.times, frontier.powers, guides.end_s, guides.price_w)
    frontier.profile.save(tmp_path / "p.yaml")
    files = [(tmp_path / "p.csv").read_bytes(), (tmp_path / "p.yaml").read_bytes()]
    digests = [sha256(*(array.tobytes() for array in arrays)), sha256(*files)]
    for ratio, most in product(ratios, (None, 4)):
        deadline_s = frontier.baseline_time_s * ratio
        plan = frontier.plan_until(deadline_s, on_time=None, max_changes=most)
        # What savings are stated against, and what a plan was made with, came after modes.
        replace(plan, full_clocks=None, made_with=None).save(tmp_path / "plan.yaml")
        digests.append(sha256((tmp_path / "plan.yaml").read_bytes()))
    assert [digest[:16] for digest in digests] == list(BEFORE[name])


def moded(rng: Random, plain: Profile, **ties: object) -> Profile:
    """The profile with a second mode, whose rows are the first one's, faster and dearer, slower and
    cheaper, or both worse.
    """
    rows = dict(plain.measurements)
    for (stage, kind), own in plain.measurements.items():
        rows[stage, kind, "other"] = tuple(
            Measurement(
                row.clock_mhz,
                row.time_s * rng.uniform(0.7, 1.3),
                row.energy_j * rng.uniform(0.7, 1.3),
            )
            for row in own
        )
    kept = {"own": rng.uniform(0.2, 1.0), "other": rng.uniform(1.0, 3.0)}
    ways = {name: Mode(kept_bytes=each, backward_bytes=0.3 * each) for name, each in kept.items()}
    return replace(plain, measurements=rows, modes=Modes(ways, **ties))  # type: ignore[arg-type]


def problems(count: int, most: int = 3, **ties: object) -> Iterator[PipelineDag]:
    """1F1B of a few computations, with two modes of each."""
    rng = Random(34)
    for _ in range(count):
        stages, microbatches = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)])
        plain, schedule = pipeline(rng.getrandbits(32), stages, microbatches, most)
        yield PipelineDag.from_schedule(moded(rng, plain, **ties), schedule)


def merged(dag: PipelineDag) -> PipelineDag:
    """The same with the rows of both modes as those of one, at other clocks."""
    rows = {
        key: tuple(
            replace(row, clock_mhz=row.clock_mhz + 5000 * (mode != "own"))
            for mode in ("own", "other")
            for row in dag.profile.measurements[key.in_mode(mode)]
        )
        for key in dag.profile.measurements
        if key.mode == "own"
    }
    return PipelineDag(replace(dag.profile, measurements=rows, modes=None), dag.iteration)


@few_and_many("count", 8, 40)
def test_free_modes_are_one_hull_and_rounding_picks_among_them(count: int) -> None:
    is_mixed = 0
    for dag in problems(count):
        frontier, one = solve_dag(dag), merged(dag)
        times_s, costs_j = all_choices(one)
        for share in (0.0, 0.3, 0.8):
            deadline_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
            assert frontier.bound_j(deadline_s) == pytest.approx(
                relaxed_j(one, deadline_s), abs=1e-6
            )
            plan = frontier.plan_until(deadline_s, on_time=None)
            best_j = costs_j[times_s <= deadline_s].min()
            assert plan.time_s <= deadline_s
            assert plan.energy_j - waiting_w(dag) * plan.time_s == pytest.approx(best_j, abs=1e-9)
            is_mixed += len({key.mode for key in plan.iteration.keys}) > 1
    assert is_mixed > count / 2


def taken_bytes(dag: PipelineDag, mode: dict[str, str]) -> dict[int, float]:
    """The most that is kept on each rank, by walking its program; of shared microbatches."""
    modes = dag.profile.modes
    assert modes is not None
    most = {}
    for rank, program in enumerate(dag.schedule.ranks):
        kept, most[rank] = dict[tuple[int, int], float](), 0.0
        for each in program:
            way = modes.ways[mode[str(each)]]
            assert isinstance(way.kept_bytes, float)
            assert isinstance(way.backward_bytes, float)
            kept[each.stage, each.microbatch] = way.kept_bytes
            more = way.backward_bytes if each.kind == "B" else 0.0
            most[rank] = max(most[rank], sum(kept.values()) + more)
            if each.kind == "B":
                del kept[each.stage, each.microbatch]
    return most


def group_of(shared_by: str, dag: PipelineDag, place: int) -> object:
    each = dag.computations[place]
    return {
        "computation": place,
        "microbatch": (each.stage, each.microbatch),
        "stage": each.stage,
        "pipeline": 0,
    }[shared_by]


TIES = [
    {"shared_by": "microbatch"},
    {"shared_by": "microbatch", "memory_bytes": 2.5},
    {"shared_by": "microbatch", "memory_bytes": 2.5, "change_s": 3e-3},
    {"shared_by": "stage"},
    {"shared_by": "pipeline"},
    {"change_s": 3e-3},
]


@pytest.mark.parametrize("ties", TIES, ids=lambda ties: " ".join(map(str, ties.values())))
def test_tied_modes_against_every_choice(ties: dict[str, object]) -> None:
    """HiGHS is exact, prices come close, and the bound is below all of them."""
    missed = list[float]()
    for dag in problems(12, 2, **ties):
        try:
            problem = ModeProblem(dag)
        except ProfileError:  # the own way does not fit
            continue
        frontier, waiting = solve_dag(dag), waiting_w(dag)
        groups = [
            group_of(str(ties.get("shared_by", "computation")), dag, i)
            for i in range(len(dag.computations))
        ]
        names = list(dict.fromkeys(groups))
        every = []
        for modes in product(("own", "other"), repeat=len(names)):
            of_group = dict(zip(names, modes, strict=True))
            chosen = tuple(of_group[group] for group in groups)
            by_name = dict(zip(map(str, dag.computations), chosen, strict=True))
            limit = ties.get("memory_bytes", math.inf)
            fits = limit == math.inf or max(taken_bytes(dag, by_name).values()) <= limit  # type: ignore[operator]
            assert fits == problem.fits(chosen)
            if fits:
                every.append(all_choices(in_modes(dag, chosen)))
        times_s, costs_j = map(np.concatenate, zip(*every, strict=True))
        base = baseline(dag)
        assert problem.fits(tuple(key.mode for key in base.iteration.keys))
        for deadline_s in (frontier.baseline_time_s, 1.15 * frontier.baseline_time_s):
            best_j = costs_j[times_s <= deadline_s].min()
            plan = frontier.plan_until(deadline_s, on_time=None)
            assert plan.time_s <= deadline_s
            assert plan.energy_j - waiting * plan.time_s == pytest.approx(best_j, abs=1e-6)
            assert plan.bound_j <= plan.energy_j + 1e-9
            priced = problem._priced(deadline_s)
            assert problem.fits(priced.modes)
            assert priced.effective_bound_j <= best_j + 1e-9
            try:
                found = frontier._fixed(priced.modes).plan_until(deadline_s, on_time=None)
            except InfeasibleDeadline:
                missed.append(1.0)
                continue
            missed.append((found.energy_j - waiting * found.time_s - best_j) / plan.energy_j)
            assert missed[-1] >= -1e-9
    assert len(missed) >= 6
    assert float(np.median(missed)) <= 1e-9


def test_a_deadline_that_no_modes_meet_names_the_least_time() -> None:
    refused = 0
    for dag in problems(8, 2, shared_by="pipeline"):
        frontier = solve_dag(dag)
        fastest_s = min(
            all_choices(in_modes(dag, (mode,) * len(dag.computations)))[0].min()
            for mode in ("own", "other")
        )
        if fastest_s > frontier.min_time_s * (1 + 1e-9):
            with pytest.raises(InfeasibleDeadline) as raised:
                frontier.plan_until(frontier.min_time_s, on_time=None)
            assert raised.value.least_time_s == pytest.approx(fastest_s)
            refused += 1
    assert refused


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return solve(recomputed(smooth_profile(3, 90), 2.0), "1f1b", microbatches=5)


def test_plans_with_modes_are_kept_within_memory_and_survive_their_files(
    frontier: Frontier, tmp_path: Path
) -> None:
    problem = ModeProblem(frontier.dag)
    frontier.save(tmp_path / "frontier.npz")
    again = Frontier.load(tmp_path / "frontier.npz")
    base_s = frontier.baseline_time_s
    for limits in ({}, {"max_changes": 0}, {"max_changes": 2}):
        plan = frontier.plan_for(base_s, on_time=None, **limits)
        assert plan.time_s <= base_s
        assert all(changes <= limits.get("max_changes", 99) for changes in plan.changes)
        assert plan.saving_j > 0.2 * plan.baseline_energy_j
        modes = tuple(key.mode for key in plan.iteration.keys)
        assert 0 < modes.count("keep") < len(modes)
        assert problem.fits(modes)
        of_stage = {
            (c.stage, c.microbatch): plan.modes.get(str(c))
            for c in frontier.dag.computations
            if c.kind == "F"
        }
        assert all(
            plan.modes.get(str(c)) == of_stage[c.stage, c.microbatch]
            for c in frontier.dag.computations
        )
        assert plan.timeline.time_s == plan.time_s
        assert plan.timeline.energy_j == pytest.approx(plan.energy_j)
        plan.save(tmp_path / "plan.yaml")
        assert "version: 2" in (tmp_path / "plan.yaml").read_text()
        assert Plan.load(tmp_path / "plan.yaml") == plan == Plan.loads(plan.dumps())
        assert again.plan_for(base_s, on_time=None, **limits) == plan
    assert plan.modes["2F0"] == "keep"


@pytest.mark.parametrize("shared_by", ["microbatch", "computation", "stage"])
def test_a_pair_has_one_mode_and_its_forward_counts_in_memory(shared_by: str) -> None:
    schedule = schedules.combined_1f1b(2, 1, 5)
    profile = recomputed(smooth_profile(2, 90), 2.2)
    assert profile.modes is not None
    rows = dict(profile.measurements)
    for key, backwards in profile.measurements.items():
        if key.kind.startswith("B"):
            forwards = rows[Key(key.stage, "F", key.mode)]
            rows[Key(key.stage, "B.pair", key.mode)] = tuple(
                replace(
                    one,
                    time_s=0.8 * (one.time_s + other.time_s),
                    energy_j=one.energy_j + other.energy_j,
                )
                for one, other in zip(backwards, forwards, strict=False)
            )
    modes = replace(profile.modes, shared_by=shared_by)
    profile = replace(profile, measurements=rows, modes=modes)
    frontier = solve_dag(PipelineDag.from_schedule(profile, schedule))
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    used = {name: plan.modes.get(name, OWN) for name in plan.clocks}
    mode_of_half = {}
    for forward, backward in schedule.pairs:
        mode_of_half[forward] = used[str(backward)]
    # What a rank keeps at any moment, counted anew: from each forward to its backward.
    most = [0.0, 0.0]
    for rank, cells in enumerate(schedule.cells):
        kept: dict[int, float] = {}
        for cell in cells:
            backward_bytes = 0.0
            for each in cell:
                mode = mode_of_half.get(each) or used[str(each)]
                way = modes.ways[mode]
                if each.kind == "F":
                    kept[each.microbatch] = way.bytes_of(rank)[0]
                else:
                    backward_bytes = way.bytes_of(rank)[1]
            most[rank] = max(most[rank], sum(kept.values()) + backward_bytes)
            for each in cell:
                if each.kind == "B":
                    del kept[each.microbatch]
    assert max(most) <= 2.2
    assert "keep" in used.values()
    if shared_by == "microbatch":
        # Both computations of a microbatch have one mode, in a pair or alone.
        for rank in range(2):
            of_microbatch: dict[int, set[str]] = {}
            for each in (each for cell in schedule.cells[rank] for each in cell):
                mode = mode_of_half.get(each) or used[str(each)]
                of_microbatch.setdefault(each.microbatch, set()).add(mode)
            assert all(len(both) == 1 for both in of_microbatch.values())


def test_the_other_ways_to_ask_for_a_plan(frontier: Frontier) -> None:
    base_s = frontier.baseline_time_s
    least = frontier.plan_for_least_energy(on_time=None)
    assert least.energy_j <= frontier.plan_for(1.2 * base_s, on_time=None).energy_j + 1e-9
    slow = frontier.plan_beside_straggler(1.3 * base_s, on_time=None)
    assert slow.time_s <= 1.3 * base_s
    assert slow.energy_j - slow.time_s * waiting_w(frontier.dag) <= (
        least.energy_j - least.time_s * waiting_w(frontier.dag) + 1e-9
    )
    capped = frontier.plan_within_power(0.8 * frontier.baseline_energy_j / base_s, on_time=None)
    assert capped.power_w <= 0.8 * frontier.baseline_energy_j / base_s
    assert frontier.with_point_bound(slow).point_bound_j <= slow.energy_j + 1e-9  # type: ignore[operator]
    before = frontier.baseline_plan
    assert (before.time_s, before.energy_j) == (base_s, frontier.baseline_energy_j)
    with pytest.raises(UsageError, match="the service plans along frontiers alone"):
        Curve.of(frontier)
    own = frontier.plan_of(dict.fromkeys(slow.clocks, 1410))
    assert not own.modes
    assert own.time_s == pytest.approx(base_s)


def test_uncertain_rows_are_on_time_against_the_same_baseline() -> None:
    rng, plain = np.random.default_rng(1), smooth_profile(2, 135)
    noisy = {
        key: tuple(replace(row, time_s=row.time_s * rng.normal(1, 0.005)) for row in rows)
        for key, rows in plain.measurements.items()
    }
    frontier = solve(recomputed(replace(plain, measurements=noisy), 1.5), "1f1b", microbatches=3)
    plan = frontier.plan_for(frontier.baseline_time_s)
    assert plan.on_time is not None
    assert plan.modes
    assert plan.on_time.saved_share.expected == pytest.approx(
        plan.saving_j / plan.baseline_energy_j, abs=0.01
    )
    assert plan.on_time.time_ratio.expected <= 1.001


def test_what_is_wrong_or_cannot_be_done_is_refused(frontier: Frontier) -> None:
    plain = smooth_profile(2, 135)
    rows = dict(recomputed(plain, None).measurements)
    del rows[Key(1, "B", "keep")]
    refusals = {
        "modes: stage 1 has no backward in the mode keep; measure each computation in every mode, "
        "or leave the mode out": lambda: Profile(rows, 80.0),
        "modes, ways: has no keep, which rows have; say what it sets": lambda: replace(
            recomputed(plain, None), modes=Modes({"own": Mode()})
        ),
        "modes, ways, keep, kept_bytes: is missing, and memory_bytes limits it; measure it with "
        "`planner profile --modes`, give it, or leave the limit out": lambda: Modes(
            {"own": Mode(kept_bytes=1.0), "keep": Mode()}, memory_bytes=3.0
        ),
        "modes, memory_bytes: the mode own takes 1.1 B of 1 B, and training runs in it without a "
        "plan; measure a way that fits as own, or correct the limit": lambda: (
            solve(recomputed(plain, 1.0), "1f1b", microbatches=3).baseline_time_s
        ),
    }
    for text, refused in refusals.items():
        with pytest.raises(ProfileError) as raised:
            refused()
        assert str(raised.value) == text
    with pytest.raises(UsageError, match="one way of running"):
        clock_problem_of(frontier.dag)
    with pytest.raises(UsageError, match="a cluster is replayed in one way of running"):
        Cluster(frontier, 2, 10)


def test_a_mode_that_changes_sums_is_used_only_where_it_may(frontier: Frontier) -> None:
    modes = frontier.profile.modes
    assert modes is not None
    for may in (False, True):
        ways = {"own": modes.ways["own"], "keep": replace(modes.ways["keep"], reorders=True)}
        profile = replace(frontier.profile, modes=replace(modes, ways=ways, may_reorder=may))
        again = solve_dag(PipelineDag(profile, frontier.dag.iteration))
        assert bool(again.plan_for(again.baseline_time_s, on_time=None).modes) == may


def test_the_bound_within_memory_is_near_where_microbatches_do_not_fill_it() -> None:
    profile = recomputed(smooth_profile(4, 90), 2.3, 1 / 20)
    frontier = solve(profile, "1f1b", microbatches=10)
    plan = frontier.plan_until(frontier.baseline_time_s, on_time=None)
    assert plan.bound_j <= plan.energy_j < 1.01 * plan.bound_j
