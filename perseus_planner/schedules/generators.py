"""Schedules with one stage per rank, GPipe, 1F1B and ZB-H1, or with several that are `ranks` apart:
looped BFS, interleaved 1F1B, zero bubble.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.base.errors import ScheduleError
from perseus_planner.base.units import COUNT
from perseus_planner.schedules.schedule import Computation, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence


# Far beyond any job, and still small enough for memory; a mistyped number is refused, not tried.
_MOST = 1_000_000


def check_sizes(**sizes: int) -> tuple[int, ...]:
    """Return the values of `sizes`, in their order, as plain ints.

    Raises:
        ScheduleError: If one is not a whole number of at least 1, or an iteration of these sizes is
            too large.
    """
    counts = []
    product = 1
    for name, value in sizes.items():
        count = COUNT.check(value, name, ScheduleError)
        product *= count
        counts.append(count)
    if product > _MOST:
        factors = " x ".join(
            f"{count} {name.replace('_', ' ')}" for count, name in zip(counts, sizes, strict=True)
        )
        raise ScheduleError(f"{factors} are more than {_MOST} forwards; give smaller numbers")
    return tuple(counts)


def alternating_order(
    forwards: Sequence[Computation],
    backwards: Sequence[Computation],
    warmup: int,
    weights: Sequence[Computation] = (),
    delay: int = 0,
) -> tuple[Computation, ...]:
    """Return the order of a rank: `warmup` forwards, then a forward and a backward in turn, then
    the other backwards.

    Args:
        forwards: all forwards of the rank, in order.
        backwards: as many backwards, in order.
        warmup: number of forwards before the first pair of a forward and a backward.
        weights: the weight gradients, in order, if `backwards` are gradients of the input alone.
        delay: number of backwards by which a weight gradient comes later than the backward it
            belongs to.
    """
    order = list(forwards[:warmup])
    for step, backward in enumerate(backwards):
        order += [*forwards[warmup + step : warmup + step + 1], backward]
        if step >= delay:
            order += weights[step - delay : step - delay + 1]
    return (*order, *weights[max(0, len(backwards) - delay) :])


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: every rank runs all forwards, then all backwards (Huang et al., NeurIPS'19, section
    2.3).

    Backwards run in the order of the forwards, as in torch's ScheduleGPipe. A rank keeps the
    activations of all microbatches.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    return Schedule(
        "gpipe",
        tuple(
            alternating_order(
                _row(stage, "F", microbatches), _row(stage, "B", microbatches), microbatches
            )
            for stage in range(stages)
        ),
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Non-interleaved 1F1B, as DeepSpeed's TrainSchedule and Megatron-core run it.

    Rank s runs `stages - 1 - s` warm-up forwards, then one forward and one backward in turn, then
    the remaining backwards (PipeDream-Flush; Narayanan et al., SC'21, section 2.2). It keeps the
    activations of at most `stages - s` microbatches.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    return Schedule(
        "1f1b",
        tuple(
            alternating_order(
                _row(stage, "F", microbatches), _row(stage, "B", microbatches), stages - 1 - stage
            )
            for stage in range(stages)
        ),
    )


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with backwards in two parts; the weight gradients of rank s come `s` microbatches
    late.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 2.2. The later a rank starts, the
    more weight gradients it delays to the end, where 1F1B waits. So every rank keeps the
    activations of at most `stages` microbatches, which is the maximum of 1F1B; and if F, I and W
    take equally long, a rank waits a third as long as in 1F1B.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    ranks = []
    for stage in range(stages):
        forwards, backwards, weights = (_row(stage, kind, microbatches) for kind in "FIW")
        ranks.append(
            alternating_order(forwards, backwards, stages - 1 - stage, weights, delay=stage)
        )
    return Schedule("zb-h1", tuple(ranks))


def _row(stage: int, kind: str, microbatches: int) -> list[Computation]:
    return [Computation(stage, kind, microbatch) for microbatch in range(microbatches)]


def looped_bfs(ranks: int, virtual_stages: int, microbatches: int) -> Schedule:
    """GPipe with several stages on each rank, in the order of torch's ScheduleLoopedBFS.

    Rank r holds the stages r, r + ranks, r + 2 ranks and so on. It takes all microbatches through
    its first stage, then through its second, and so on; backwards from its last stage down, the
    last microbatch first.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    ranks, virtual_stages, microbatches = check_sizes(
        ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches
    )
    forwards = [
        _looped(rank, ranks, range(virtual_stages), microbatches, microbatches, "F")
        for rank in range(ranks)
    ]
    orders = [
        (*order, *(computation._replace(kind="B") for computation in reversed(order)))
        for order in forwards
    ]
    return Schedule("looped-bfs", tuple(orders))


def interleaved_1f1b(
    ranks: int, virtual_stages: int, microbatches: int, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B as Megatron-core runs it (Narayanan et al., SC'21, section 2.2).

    Rank r holds the stages r, r + ranks, r + 2 ranks and so on. It takes `group` microbatches
    through its first stage, then the same ones through its second, and so on, before the next
    `group`; backwards likewise from its last stage down. It warms up with
    `2 * (ranks - 1 - r) + (virtual_stages - 1) * group` forwards, then runs one forward and one
    backward in turn; it keeps the activations of at most one forward more than that.

    With one virtual stage this is the order of 1F1B. Fewer microbatches than ranks, which Megatron
    refuses, make one group, as in torch's ScheduleInterleaved1F1B.

    Args:
        ranks: number of ranks of the pipeline.
        virtual_stages: number of stages of each rank, Megatron's virtual pipeline size.
        microbatches: number of microbatches of one iteration.
        group: Megatron's `microbatch_group_size_per_vp_stage`, from `ranks` to `microbatches`; None
            for `ranks`.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, the iteration is too large, or
            Megatron refuses the group: it is out of range, or leaves a last group of fewer
            microbatches than ranks.
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
    """Interleaved 1F1B with backwards in two parts, in the order of torch's
    ScheduleInterleavedZeroBubble.

    This is ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 2.2) on the stages
    of `interleaved_1f1b`: rank r warms up with `ranks - 1 - r + (virtual_stages - 1) * group`
    forwards, and its weight gradients come `r` input gradients late. So every rank keeps the
    activations of at most
    `ranks + (virtual_stages - 1) * group` forwards. With one virtual stage this is the order of
    ZB-H1.

    Microbatches go in equal groups of `ranks` or a little more, as in torch; fewer than `ranks`
    make one group.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, the iteration is too large, or
            the microbatches do not divide into `microbatches // ranks` equal groups.
    """
    ranks, virtual_stages, microbatches = check_sizes(
        ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches
    )
    rounds = 1 if virtual_stages == 1 else max(1, microbatches // ranks)
    group, rest = divmod(microbatches, rounds)
    if rest:
        fewer = microbatches - rest
        raise ScheduleError(
            f"{microbatches} microbatches on {ranks} ranks do not make {rounds} equal groups; "
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
    """Return how many microbatches go through one stage before the next stage's turn."""
    least = min(ranks, microbatches)
    if group is None:
        group = least
    if not least <= group <= microbatches:
        raise ScheduleError(f"group is {group}; give a whole number from {least} to {microbatches}")
    rest = microbatches % group
    if 0 < rest < least:
        fits = next(
            size for size in range(least, microbatches + 1) if not 0 < microbatches % size < least
        )
        raise ScheduleError(
            f"{microbatches} microbatches in groups of {group} leave a last group of {rest}, "
            f"fewer than the {ranks} ranks; give a group of {fits}, or {microbatches - rest} or "
            f"{microbatches - rest + group} microbatches"
        )
    return group


def _looped(
    rank: int, ranks: int, chunks: range, microbatches: int, group: int, kind: str
) -> list[Computation]:
    """Return all computations of a kind on one rank: each group of microbatches goes through
    each of `chunks`.
    """
    return [
        Computation(chunk * ranks + rank, kind, microbatch)
        for first in range(0, microbatches, group)
        for chunk in chunks
        for microbatch in range(first, min(first + group, microbatches))
    ]
