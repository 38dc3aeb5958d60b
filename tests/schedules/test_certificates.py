"""Every schedule of any size is complete, runs, and keeps and waits no more than published."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_certificates import run
from strategies import fixed

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules import (
    NAMES,
    Computation,
    Schedule,
    check_pipeline,
    dualpipe_v,
    generate,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)


class Sizes(NamedTuple):
    name: str
    ranks: int
    virtual_stages: int
    microbatches: int

    def schedule(self) -> Schedule:
        name, ranks, virtual_stages, microbatches = self
        return generate(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)

    def kept(self) -> list[int]:
        """For each rank, the activations that it may keep at one time, one for each forward, as
        published.
        """
        name, ranks, virtual_stages, microbatches = self
        all_of_them = virtual_stages * microbatches
        looped = (virtual_stages - 1) * min(ranks, microbatches)
        looped_as_torch = (virtual_stages - 1) * (microbatches // max(1, microbatches // ranks))
        hop = 1 if virtual_stages == 1 else 2
        bounds = {
            "gpipe": lambda _: all_of_them,  # all forwards first
            "looped-bfs": lambda _: all_of_them,  # likewise
            "1f1b": lambda rank: ranks - rank,  # SC'21, section 2.2.1: at most the pipeline's depth
            "interleaved-1f1b": lambda rank: (
                hop * (ranks - 1 - rank) + looped + 1
            ),  # Megatron's warm-up and one
            "zb-h1": lambda _: ranks,  # ICLR'24, table 1: that of 1F1B's first rank, on all
            "interleaved-zb": lambda _: ranks + looped_as_torch,
            "zbv": lambda _: (
                2 * ranks
            ),  # ICLR'24, section 6: that of 1F1B's first rank, in stages of half the size
            "dualpipe-v": lambda _: (
                2 * ranks + 1
            ),  # DualPipe's table: one more than there are stages
        }
        return [min(bounds[name](rank), all_of_them) for rank in range(ranks)]


# Those with overlapped pairs are in test_pairs.py: one by one, they are these.
ONE_BY_ONE = tuple(name for name in NAMES if name not in ("combined-1f1b", "dualpipe-v-overlapped"))


@st.composite
def sizes(draw: st.DrawFn, names: tuple[str, ...] = ONE_BY_ONE, max_ranks: int = 6) -> Sizes:
    """Sizes that the generator takes."""
    name, ranks = draw(st.sampled_from(names)), draw(st.integers(1, max_ranks))
    drawn = Sizes(
        name, ranks, NAMES[name].virtual_stages or draw(st.integers(1, 4)), draw(st.integers(1, 24))
    )
    try:
        drawn.schedule()
    except ScheduleError:
        assume(False)
    return drawn


@fixed
@given(drawn=sizes())
def test_every_schedule_is_whole_runs_and_keeps_no_more_than_published(drawn: Sizes):
    schedule = drawn.schedule()
    check_pipeline(schedule)
    assert (schedule.stages, schedule.microbatches) == (
        drawn.ranks * drawn.virtual_stages,
        drawn.microbatches,
    )
    done = run(schedule)
    assert done.stopped == ()
    assert done.left == {("gradient", -1, m): 1 for m in range(drawn.microbatches)}
    forwards = [each for each in schedule.computations() if each.kind == "F"]
    assert len(forwards) == len(set(forwards)) == schedule.stages * drawn.microbatches
    assert all(peak <= bound for peak, bound in zip(done.peaks, drawn.kept(), strict=True))


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_published_bounds_are_reached(name: str):
    drawn = Sizes(name, 4, NAMES[name].virtual_stages or 3, 24)
    assert list(run(drawn.schedule()).peaks) == drawn.kept()


@fixed
@given(drawn=sizes())
def test_every_stage_takes_microbatches_in_their_order(drawn: Sizes):
    seen = defaultdict(list)
    for stage, kind, microbatch in drawn.schedule().computations():
        seen[stage, kind if kind in "FW" else "BI"].append(microbatch)
    for (_, kind), order in seen.items():
        backwards = drawn.name == "looped-bfs" and kind == "BI"  # the last one first
        assert order == sorted(order, reverse=backwards)


@fixed
@given(drawn=sizes())
def test_stages_lie_in_loops_or_in_a_v(drawn: Sizes):
    ranks = drawn.ranks
    loop = tuple(stage % ranks for stage in range(ranks * drawn.virtual_stages))
    vee = (*range(ranks), *reversed(range(ranks)))
    assert drawn.schedule().stage_ranks == (vee if drawn.name in ("zbv", "dualpipe-v") else loop)


def even(computation: Computation) -> int:
    """F, I and W take as long, and B as long as I and W."""
    return 2 if computation.kind == "B" else 1


def waits(schedule: Schedule) -> list[int]:
    """How long each rank waits between its first and its last computation."""
    done = run(schedule, even)
    return [
        max(done.ends[each] for each in order)
        - min(done.starts[each] for each in order)
        - sum(map(even, order))
        for order in schedule.ranks
    ]


@fixed
@given(stages=st.integers(1, 8), more=st.integers(0, 12))
def test_zb_h1_waits_a_third_of_1f1b(stages: int, more: int):
    microbatches = 2 * stages - 1 + more
    assert waits(one_f_one_b(stages, microbatches)) == [
        3 * (stages - 1 - stage) for stage in range(stages)
    ]
    assert waits(zb_h1(stages, microbatches)) == [stages - 1 - stage for stage in range(stages)]


@fixed
@given(ranks=st.integers(1, 6), virtual=st.integers(2, 4), rounds=st.integers(2, 4))
def test_interleaving_divides_what_1f1b_waits_and_zero_bubble_takes_two_thirds_of_the_rest(
    ranks: int, virtual: int, rounds: int
):
    # A stage has 1 / virtual of the layers, so the same time stands for `virtual` times the work.
    looped = interleaved_1f1b(ranks, virtual, rounds * ranks)
    assert waits(looped) == [3 * (ranks - 1 - rank) for rank in range(ranks)]
    assert waits(interleaved_zero_bubble(ranks, virtual, rounds * ranks)) == [
        ranks - 1 - r for r in range(ranks)
    ]


@fixed
@given(ranks=st.integers(1, 8), more=st.integers(0, 12))
def test_zbv_does_not_wait_once_it_has_started(ranks: int, more: int):
    assert waits(zbv(ranks, 2 * ranks - 1 + more)) == [0] * ranks


@fixed
@given(ranks=st.integers(1, 8), more=st.integers(0, 12))
def test_dualpipe_v_waits_no_longer_than_zb_h1_of_as_many_ranks(ranks: int, more: int):
    assert waits(dualpipe_v(ranks, 2 * ranks + more)) == [ranks - 1 - rank for rank in range(ranks)]


@fixed
@given(drawn=sizes(), seed=st.integers(0, 2**32 - 1))
def test_a_schedule_with_two_computations_exchanged_is_refused_when_it_cannot_run(
    drawn: Sizes, seed: int
):
    """Against the run with its tensors counted, which knows nothing of the check's rules."""
    rng = Random(seed)
    ranks = [list(order) for order in drawn.schedule().ranks]
    order = rng.choice(ranks)
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    order[a], order[b] = order[b], order[a]
    schedule = Schedule("shuffled", tuple(map(tuple, ranks)))
    stopped = run(schedule).stopped
    if stopped:
        with pytest.raises(ScheduleError) as caught:
            check_pipeline(schedule)
        assert any(
            f": {each} can never run: it waits for " in str(caught.value) for each in stopped
        )
    else:
        check_pipeline(schedule)


@fixed
@given(drawn=sizes(), seed=st.integers(0, 2**32 - 1))
def test_a_schedule_with_one_computation_left_out_is_refused(drawn: Sizes, seed: int):
    assume(drawn.microbatches > 1)
    schedule = drawn.schedule()
    missing = Random(seed).choice(list(schedule.computations()))
    ranks = tuple(tuple(each for each in order if each != missing) for order in schedule.ranks)
    with pytest.raises(
        ScheduleError, match=rf"\b({missing}|{missing.stage}B{missing.microbatch})\b"
    ) as caught:
        check_pipeline(Schedule("with a hole", ranks))
    assert "add" in str(caught.value)
