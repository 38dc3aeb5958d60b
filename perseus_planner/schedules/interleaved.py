"""Schedules in which a rank holds several stages, `ranks` apart: interleaved 1F1B and interleaved zero bubble."""

from __future__ import annotations

from perseus_planner.errors import ScheduleError
from perseus_planner.schedules.computation import Computation
from perseus_planner.schedules.schedule import Schedule
from perseus_planner.schedules.sizes import alternating_order, check_sizes


def interleaved_1f1b(ranks: int, virtual_stages: int, microbatches: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B as Megatron-core runs it (Narayanan et al., SC'21, section 2.2).

    Rank r holds the stages r, r + ranks, r + 2 ranks and so on. It takes `group` microbatches through its first stage,
    then the same through its second, and so on, before the next `group`; backwards likewise from its last stage down.
    Before its first backward it runs `2 * (ranks - 1 - r) + (virtual_stages - 1) * group` forwards, then one more and
    one backward in turn, so that is, and one, what it keeps the activations of.

    With one virtual stage this is the order of 1F1B. Fewer microbatches than ranks, which Megatron refuses, are one
    group, as in torch's ScheduleInterleaved1F1B.

    Args:
        ranks: how many ranks the pipeline has.
        virtual_stages: how many stages each rank holds, Megatron's virtual pipeline size.
        microbatches: of one iteration.
        group: Megatron's `microbatch_group_size_per_vp_stage`, from `ranks` to `microbatches`; None is `ranks`.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, all are too large, or Megatron refuses the group: it
            is out of its range, or leaves a last group of fewer microbatches than ranks.
    """
    ranks, virtual_stages, microbatches = check_sizes(
        ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches
    )
    if group is not None:
        (group,) = check_sizes(group=group)
    if virtual_stages == 1:
        group, hop = 1, 1  # groups of any size give the same order
    else:
        group, hop = _group(ranks, microbatches, group), 2
    orders = []
    for rank in range(ranks):
        forwards = _looped(rank, ranks, range(virtual_stages), microbatches, group, "F")
        backwards = _looped(rank, ranks, range(virtual_stages)[::-1], microbatches, group, "B")
        warmup = hop * (ranks - 1 - rank) + (virtual_stages - 1) * group
        orders.append(alternating_order(forwards, backwards, warmup))
    return Schedule("interleaved-1f1b", tuple(orders))


def interleaved_zero_bubble(ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B with backwards in two parts, in the order of torch's ScheduleInterleavedZeroBubble.

    ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 2.2) on stages that lie as in
    `interleaved_1f1b`: before its first backward rank r runs `ranks - 1 - r + (virtual_stages - 1) * group` forwards
    and one, and its weight gradients come `r` input gradients late. Every rank then keeps the activations of at most
    `ranks + (virtual_stages - 1) * group` forwards. With one virtual stage this is the order of ZB-H1.

    Microbatches go in equal groups of `ranks` or a little more, as torch sizes them; fewer than `ranks` are one group.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, all are too large, or the microbatches do not divide
            into `microbatches // ranks` equal groups.
    """
    ranks, virtual_stages, microbatches = check_sizes(
        ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches
    )
    rounds = 1 if virtual_stages == 1 else max(1, microbatches // ranks)
    group, rest = divmod(microbatches, rounds)
    if rest:
        fewer = microbatches - rest
        raise ScheduleError(
            f"{microbatches} microbatches on {ranks} ranks are no {rounds} equal groups; "
            f"give {fewer} or {fewer + rounds} microbatches"
        )
    orders = []
    for rank in range(ranks):
        forwards = _looped(rank, ranks, range(virtual_stages), microbatches, group, "F")
        backwards = _looped(rank, ranks, range(virtual_stages)[::-1], microbatches, group, "I")
        weights = [backward._replace(kind="W") for backward in backwards]
        warmup = ranks - 1 - rank + (virtual_stages - 1) * group
        orders.append(alternating_order(forwards, backwards, warmup, weights, delay=rank))
    return Schedule("interleaved-zb", tuple(orders))


def _group(ranks: int, microbatches: int, group: int | None) -> int:
    """How many microbatches go through one stage before the next stage's turn."""
    least = min(ranks, microbatches)
    if group is None:
        group = least
    if not least <= group <= microbatches:
        raise ScheduleError(f"group is {group}; give a whole number from {least} to {microbatches}")
    rest = microbatches % group
    if 0 < rest < least:
        fits = next(size for size in range(least, microbatches + 1) if not 0 < microbatches % size < least)
        raise ScheduleError(
            f"{microbatches} microbatches in groups of {group} leave a last group of {rest}, fewer than the {ranks} "
            f"ranks; give a group of {fits}, or {microbatches - rest} or {microbatches - rest + group} microbatches"
        )
    return group


def _looped(rank: int, ranks: int, chunks: range, microbatches: int, group: int, kind: str) -> list[Computation]:
    """All of one kind on one rank: a group of microbatches through each of `chunks`, then the next group."""
    return [
        Computation(chunk * ranks + rank, kind, microbatch)
        for first in range(0, microbatches, group)
        for chunk in chunks
        for microbatch in range(first, min(first + group, microbatches))
    ]
