"""An overlapped pair of a forward and a backward is one computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import fixed, smooth_profile

from perseus_planner import Frontier, Plan, Profile
from perseus_planner.base.errors import ProfileError, ScheduleError
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules import (
    Computation,
    Schedule,
    check_pipeline,
    generate,
    grid_text,
    interleaved_1f1b,
    parse_grid,
)
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.generators import combined_1f1b, overlapped_dualpipe_v
from perseus_planner.schedules.pipeline import Transfer, pair_kind, pipeline_iteration
from perseus_planner.schedules.schedule import dependency_of
from perseus_planner.solver.frontier import solve_dag
from perseus_planner.views.plan import summarize_timeline

OVERLAP = 0.8  # the time of a pair, of that of its parts one after the other; by hand


def with_pairs(profile: Profile, schedule: Schedule) -> Profile:
    """Return the profile with a row for each pair: its parts' energy, in less than their time."""
    rows = dict(profile.measurements)
    for forward, backward in schedule.pairs:
        parts = (
            profile.measurements[forward.stage, "F"],
            profile.measurements[backward.stage, backward.kind],
        )
        rows[backward.stage, pair_kind(forward, backward)] = tuple(
            replace(
                one,
                time_s=OVERLAP * (one.time_s + other.time_s),
                energy_j=one.energy_j + other.energy_j,
            )
            for one, other in zip(*parts, strict=True)
        )
    return replace(profile, measurements=rows)


@fixed
@given(ranks=st.integers(1, 5), virtual=st.integers(1, 3), rounds=st.integers(1, 3))
def test_combined_1f1b_warms_up_with_one_forward_more(ranks: int, virtual: int, rounds: int):
    microbatches = ranks * rounds
    schedule = combined_1f1b(ranks, virtual, microbatches)
    check_pipeline(schedule)
    plain = interleaved_1f1b(ranks, virtual, microbatches)
    for rank, cells in enumerate(schedule.cells):
        flat = [each for cell in cells for each in cell]
        for kind in "FB":
            assert [each for each in flat if each.kind == kind] == [
                each for each in plain.ranks[rank] if each.kind == kind
            ]
        hop = 2 if virtual > 1 else 1
        warmup = hop * (ranks - 1 - rank) + (virtual - 1) * ranks + 1
        assert [len(cell) for cell in cells[: min(warmup, len(flat) // 2)]] == [1] * min(
            warmup, len(flat) // 2
        )
        assert sum(len(cell) == 2 for cell in cells) == max(0, virtual * microbatches - warmup)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 6), (4, 10)])
def test_dualpipe_v_overlaps_as_torch_does(ranks: int, microbatches: int):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours = overlapped_dualpipe_v(ranks, microbatches)
    check_pipeline(ours)
    assert (
        ours.one_by_one.ranks
        == generate("dualpipe-v", ranks=ranks, microbatches=microbatches).ranks
    )
    engine = object.__new__(schedules.ScheduleDualPipeV)
    engine._n_microbatches = microbatches
    engine.pp_group_size = ranks
    engine.rank = 0
    for rank in range(ranks):
        theirs = [
            str(action).replace(" ", "")
            for action in engine._calculate_single_rank_operations(rank)
            if action is not None
        ]
        assert [ours.text_of(each) for each in ours.ranks[rank]] == theirs


def test_a_grid_with_pairs_reads_back_and_its_text_is_torchs():
    schedule = combined_1f1b(2, 2, 4)
    text = grid_text(schedule)
    assert text.splitlines()[1] == (
        "1F0,1F1,3F0,(3F1;3B0)OVERLAP_F_B,(1F2;3B1)OVERLAP_F_B,(1F3;1B0)OVERLAP_F_B,"
        "(3F2;1B1)OVERLAP_F_B,(3F3;3B2)OVERLAP_F_B,3B3,1B2,1B3"
    )
    assert parse_grid(text, schedule.name, "grid.csv") == schedule
    assert schedule != schedule.one_by_one


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "0F0,(0F1;0B1)OVERLAP_F_B,0B0",
            "grid.csv, line 1, cell 2: 0B1 can never run: it waits for 0F1, with which it is to "
            "overlap; put them in cells of their own",
        ),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F1,(1F0;1B1)OVERLAP_F_B,1B0",
            "grid.csv, line 1, cell 2: 0B0 can never run: it waits for 1B0, which comes after "
            "1F1, which in the end waits for it; reorder them",
        ),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B,0B1",
            "grid.csv, line 1, cell 2: '(0B0;0F1)OVERLAP_F_B' is not a forward and a backward; "
            "write a pair as (3F9;4B2)OVERLAP_F_B",
        ),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0F1,0B1",
            "grid.csv, line 1, cell 3: 0F1 is there twice; keep one",
        ),
    ],
)
def test_a_pair_that_can_never_run_is_refused(text: str, error: str):
    assert refusal(ScheduleError, parse_grid, text, "grid", "grid.csv") == error


def test_a_pair_waits_for_what_both_need_and_both_are_waited_for():
    schedule = combined_1f1b(2, 1, 3)
    # 0F0 0F1 (0F2;0B0) 0B1 0B2 / 1F0 (1F1;1B0) (1F2;1B1) 1B2
    iteration = pipeline_iteration(schedule)
    names = iteration.names
    waits = {
        name: {names[place] for place in before}
        for name, before in zip(names, iteration.predecessors, strict=True)
    }
    assert waits["0B0"] == {"0F1", "1B0"}
    assert waits["1B0"] == {"1F0", "0F1"}
    assert waits["1B1"] == {"1B0", "0B0"}
    assert dict(zip(names, iteration.keys, strict=True))["0B0"] == Key(0, "B.pair")
    assert "0F2" not in names


def test_a_pair_of_two_stages_has_a_row_of_its_own():
    schedule = overlapped_dualpipe_v(2, 6)
    kinds = {key.kind for key in pipeline_iteration(schedule).keys}
    assert {"B.pair-0", "B.pair-3"} <= kinds
    assert pair_kind(Computation(1, "F", 4), Computation(1, "B", 2)) == "B.pair"


def test_a_profile_without_the_row_of_a_pair_is_refused():
    schedule = combined_1f1b(4, 1, 8)
    assert refusal(ProfileError, PipelineDag.from_schedule, smooth_profile(4), schedule) == (
        "the profile has no backward.pair of stage 0, which (0F4;0B0)OVERLAP_F_B needs; train "
        "without a plan, which learns its rows, add them to the profile's table, or write the two "
        "in cells of their own if they run one after the other"
    )


def test_a_pair_is_one_node_of_the_frontier_and_of_plans(folder: Path):
    schedule = combined_1f1b(4, 1, 8)
    profile = with_pairs(smooth_profile(4, step_mhz=45), schedule)
    profile.save("profile.yaml")
    assert Profile.load("profile.yaml").measurements == profile.measurements
    frontier = solve_dag(PipelineDag.from_schedule(profile, schedule))
    assert len(frontier.dag.computations) == 64 - len(schedule.pairs)
    deadline_s = 1.001 * frontier.baseline_time_s
    plan = frontier.plan_for(deadline_s, on_time=None)
    assert plan.time_s <= deadline_s
    assert plan.energy_j <= 1.0015 * frontier.bound_j(deadline_s)
    frontier.save("frontier.npz")
    assert Frontier.load("frontier.npz").schedule == schedule
    plan.save("plan.yaml")
    again = Plan.load("plan.yaml")
    assert again == plan
    assert again.schedule.pairs == schedule.pairs
    shown = {each.computation for each in summarize_timeline(again).computations}
    assert "(0F4;0B0)OVERLAP_F_B" in shown


@pytest.mark.parametrize("backward_s", [0.0, 0.001, 0.02])
def test_a_pair_waits_for_the_longer_of_two_transfers_from_one_pair(backward_s: float):
    schedule = overlapped_dualpipe_v(4, 10)
    transfer = Transfer(forward_s=0.005, backward_s=backward_s)
    iteration = pipeline_iteration(schedule, transfer=transfer)
    places = {c: place for place, c in enumerate(schedule.computations())}
    place_of = places | {forward: places[backward] for forward, backward in schedule.pairs}
    twice = 0
    for pair in schedule.pairs:
        wanted: dict[int, list[float]] = {}
        for computation in pair:
            needed = dependency_of(computation, set(place_of), schedule.stages - 1)
            if needed is not None:
                lag_s = transfer.lag_s(schedule, needed, computation)
                wanted.setdefault(place_of[needed], []).append(lag_s)
        place = places[pair[1]]
        lags_s = dict(zip(iteration.predecessors[place], iteration.lags_s[place], strict=True))
        assert all(lags_s[other] == max(own_s) for other, own_s in wanted.items())
        twice += any(len(own_s) == 2 for own_s in wanted.values())
    assert twice > 0
