"""Schedules with one stage per rank, GPipe, 1F1B and ZB-H1, with several that are `ranks` apart,
looped BFS, interleaved 1F1B and zero bubble, or with V-shaped stages, ZBV and DualPipeV: of R
ranks, rank r holds the stages r and 2 R - 1 - r.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base import extensions
from perseus_planner.base.errors import ScheduleError, did_you_mean, shown
from perseus_planner.base.prefixes import counted
from perseus_planner.base.units import COUNT
from perseus_planner.schedules.schedule import (
    WHOLE,
    Cell,
    Computation,
    Schedule,
    schedule_of_cells,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
    # As many forwards as are in flight before the first backward comes back.
    order = list(forwards[:warmup])
    for step, backward in enumerate(backwards):
        # One forward for each backward keeps the activations in flight constant.
        order += [*forwards[warmup + step : warmup + step + 1], backward]
        if step >= delay:
            order += weights[step - delay : step - delay + 1]
    # What was delayed runs at the end, where nothing waits for it.
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
        group: Megatron's `microbatch_group_size_per_vp_stage`, from `ranks` to `microbatches`, as
            Megatron raises for others (core 0.10 and later); None for `ranks`.

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
        # Groups of any size give the same order
        group = 1
        hop = 1
    else:
        group = _group(ranks, microbatches, group)
        hop = 2
    orders = []
    for rank in range(ranks):
        # A rank's stages take turns, group by group, and backwards go through them in reverse.
        forwards = _looped(rank, ranks, range(virtual_stages), microbatches, group, "F")
        backwards = _looped(rank, ranks, range(virtual_stages)[::-1], microbatches, group, "B")
        # Ranks nearer to the end of the pipeline get gradients sooner, so they warm up for less
        # long.
        warmup = hop * (ranks - 1 - rank) + (virtual_stages - 1) * group
        orders.append(alternating_order(forwards, backwards, warmup))
    return Schedule("interleaved-1f1b", tuple(orders))


def combined_1f1b(
    ranks: int, virtual_stages: int, microbatches: int, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B in which the forward and the backward of each turn overlap, as Megatron-core
    runs it with `overlap_moe_expert_parallel_comm`.

    Each rank warms up with one forward more than by `interleaved_1f1b`, so that the two of a pair
    do not depend on each other. One rank with one stage is Megatron's schedule without a pipeline;
    Megatron has no other with one virtual stage.

    Args:
        ranks: as for `interleaved_1f1b`, and so are the others.
        virtual_stages: number of stages of each rank.
        microbatches: number of microbatches of one iteration.
        group: Megatron's `microbatch_group_size_per_vp_stage`.

    Raises:
        ScheduleError: As by `interleaved_1f1b`.
    """
    plain = interleaved_1f1b(ranks, virtual_stages, microbatches, group)
    return schedule_of_cells("combined-1f1b", [_combined(order) for order in plain.ranks])


def _combined(order: Sequence[Computation]) -> list[Cell]:
    forwards = [computation for computation in order if computation.kind == "F"]
    backwards = [computation for computation in order if computation.kind == "B"]
    first = next(position for position, computation in enumerate(order) if computation.kind == "B")
    # The plain warm-up, the forward of its first turn, and one more that makes up for the overlap:
    # that of the first turn comes alone, and the next one is the first to overlap.
    warmup = min(first, len(forwards))
    overlapping = forwards[warmup:]
    return [
        *((computation,) for computation in forwards[:warmup]),
        *zip(overlapping, backwards, strict=False),
        *((computation,) for computation in backwards[len(overlapping) :]),
    ]


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
    # With one stage groups do not matter, so any number of microbatches will do.
    rounds = 1 if virtual_stages == 1 else max(1, microbatches // ranks)
    # Torch makes equal groups, so a rest cannot be run.
    group, left_over = divmod(microbatches, rounds)
    if left_over:
        fewer = microbatches - left_over
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
        # Weight gradients fill what would be waiting; those of rank r come r input gradients late.
        orders.append(alternating_order(forwards, backwards, warmup, weights, delay=rank))
    return Schedule("interleaved-zb", tuple(orders))


def _group(ranks: int, microbatches: int, group: int | None) -> int:
    """Return how many microbatches go through one stage before the next stage's turn."""
    least = min(ranks, microbatches)
    if group is None:
        group = least
    if not least <= group <= microbatches:
        raise ScheduleError(f"group is {group}; give a whole number from {least} to {microbatches}")
    # A last group may be smaller, but Megatron refuses one of fewer microbatches than ranks.
    left_over = microbatches % group
    if 0 < left_over < least:
        fits = next(
            size for size in range(least, microbatches + 1) if not 0 < microbatches % size < least
        )
        raise ScheduleError(
            f"{microbatches} microbatches in groups of {group} leave a last group of {left_over}, "
            f"fewer than the {ranks} ranks; give a group of {fits}, or {microbatches - left_over} "
            f"or {microbatches - left_over + group} microbatches"
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


class _Rank:
    """The order of one rank while it is built; microbatches are numbered as they come.

    Attributes:
        down: its stage on the way to the bottom of the V, where microbatches start.
        up: its stage on the way back.
        order: its computations so far.
        pending: weight gradients that are still to run, oldest first.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.down = rank
        self.up = 2 * ranks - 1 - rank
        self.order: list[Computation] = []
        self.pending: deque[Computation] = deque()
        self._next: dict[tuple[int, str], int] = {}

    def started(self, stage: int) -> int:
        """Return how many forwards of `stage` are in the order."""
        return self._next.get((stage, "F"), 0)

    def run(self, stage: int, kind: str) -> None:
        """Add the next microbatch's F, B or I of `stage`; after I, its W is pending."""
        counter = stage, "F" if kind == "F" else "B"
        microbatch = self._next.get(counter, 0)
        self._next[counter] = microbatch + 1
        self.order.append(Computation(stage, kind, microbatch))
        if kind == "I":
            self.pending.append(Computation(stage, "W", microbatch))

    def run_weights(self, stage: int | None = None) -> None:
        """Add the oldest pending weight gradient, of `stage` if it is given; do nothing if none
        is pending.
        """
        weights = next(
            (pending for pending in self.pending if stage in (None, pending.stage)), None
        )
        # Out of the middle: weights of the other stage may be older.
        if weights is not None:
            self.pending.remove(weights)
            self.order.append(weights)

    def run_parts(self, stage: int) -> None:
        """Add the next I of `stage` and its W right after it."""
        self.run(stage, "I")
        self.run_weights(stage)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V, in the order of torch's ScheduleZBVZeroBubble: two stages per rank, backwards in two
    parts.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 6. If F, I and W take equally
    long, a rank that has started does not wait before its end. A rank keeps the activations of at
    most `2 * ranks` forwards, each with half the layers of a stage of 1F1B.

    Fewer than `2 * ranks - 1` microbatches run in the order of that many, with the missing ones
    left out.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    ranks, microbatches = check_sizes(ranks=ranks, microbatches=microbatches)
    # The order needs as many microbatches as are in flight at once.
    (padded, _) = check_sizes(microbatches=max(microbatches, 2 * ranks - 1), ranks=ranks)
    orders = (_zbv_rank(rank, ranks, padded) for rank in range(ranks))
    return Schedule(
        "zbv",
        tuple(
            tuple(computation for computation in order if computation.microbatch < microbatches)
            for order in orders
        ),
    )


def _zbv_rank(rank: int, ranks: int, microbatches: int) -> list[Computation]:
    built = _Rank(rank, ranks)
    down = built.down
    up = built.up
    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch is back from the bottom
        built.run(down, "F")
    for _ in range(rank):
        built.run(up, "F")
        built.run(down, "F")
    for _ in range(ranks - rank):  # until its gradient has come all the way round
        built.run(up, "F")
        built.run_parts(up)
    # From here on each forward is followed by a backward in two parts.
    while built.started(up) < microbatches:
        # The last forwards down come before the last ones up, so these run out first.
        if built.started(down) < microbatches:
            built.run(down, "F")
        built.run_parts(down)
        built.run(up, "F")
        built.run_parts(up)
    for _ in range(rank):  # now other ranks wait for input gradients, but none for weight gradients
        built.run(down, "I")
        built.run(up, "I")
    for _ in range(ranks - rank):
        built.run(down, "I")
        built.run_weights(down)
    # Nothing waits for weight gradients, so they run when all else is done.
    for stage in (up, down):
        for _ in [computation for computation in built.pending if computation.stage == stage]:
            built.run_weights(stage)
    return built.order


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV, in the order of torch's ScheduleDualPipeV: two stages per rank, most backwards
    whole.

    DualPipe (DeepSeek-V3 technical report, 2024, section 3.2.1) cut in half by Qi et al. ("DualPipe
    could be better without the Dual", 2025). In its middle a forward and a backward overlap on one
    GPU; here they come one after the other, the forward first, which is how torch runs them by
    default. A rank keeps the activations of at most `2 * ranks + 1` forwards.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, the iteration is too large, or
            there are fewer microbatches than the `2 * ranks` stages.
    """
    ranks, microbatches = check_sizes(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe-v on {ranks} ranks has {2 * ranks} stages and needs as many microbatches, "
            f"not {microbatches}; give {2 * ranks} or more, or take zbv"
        )
    return Schedule(
        "dualpipe-v", tuple(_dualpipe_rank(rank, ranks, microbatches) for rank in range(ranks))
    )


def overlapped_dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV with the forwards and backwards of its middle as overlapped pairs, as torch's
    ScheduleDualPipeV runs them where a function is registered for OVERLAP_F_B.

    Raises:
        ScheduleError: As by `dualpipe_v`.
    """
    plain = dualpipe_v(ranks, microbatches)
    cells = list[list[Cell]]()
    for rank, order in enumerate(plain.ranks):
        behind = ranks - 1 - rank
        # After the forwards of the start, and I, W and F of its second step
        start = 2 * behind + 2 * (rank + 1) + 3 * behind
        # Turns of the middle are what is left of the forwards after the start and before the end.
        turns = microbatches - ranks - behind
        rank_cells: list[Cell] = [(computation,) for computation in order[:start]]
        position = start
        for turn in range(turns):
            parts = order[position : position + 4]
            position += 4
            # On the last rank torch runs the first two one after the other.
            alone = turn == 0 and rank == ranks - 1
            rank_cells += (
                [(computation,) for computation in parts[:2]] if alone else [(parts[0], parts[1])]
            )
            rank_cells.append((parts[2], parts[3]))
        # In the turns after the middle one backward comes alone, and the next one overlaps a
        # forward.
        for _ in range(behind):
            rank_cells += [(order[position],), (order[position + 1], order[position + 2])]
            position += 3
        # Behind the middle nothing overlaps any more.
        cells.append([*rank_cells, *((computation,) for computation in order[position:])])
    return schedule_of_cells("dualpipe-v-overlapped", cells)


def _dualpipe_rank(rank: int, ranks: int, microbatches: int) -> tuple[Computation, ...]:
    built = _Rank(rank, ranks)
    down = built.down
    up = built.up
    behind = ranks - 1 - rank  # number of ranks between this one and the bottom of the V
    # Until microbatches come back from the bottom of the V, only the way down has work.
    for _ in range(2 * behind):
        built.run(down, "F")
    # Both ways have forwards, and no gradient has come yet.
    for _ in range(rank + 1):
        built.run(down, "F")
        built.run(up, "F")
    # The first gradients come from the bottom, and their weights follow at once.
    for _ in range(behind):
        built.run_parts(up)
        built.run(up, "F")
    # In the middle both ways have a forward and a backward in turn.
    for _ in range(microbatches - ranks - behind):
        built.run(down, "F")
        built.run(up, "B")
        built.run(up, "F")
        built.run(down, "B")
    # Forwards down have run out.
    for _ in range(behind):
        built.run(up, "B")
        built.run(up, "F")
        built.run(down, "B")
    # The second half of the last backwards delay their weight gradients to when there is nothing
    # else to do.
    for step in range(2 * (rank + 1)):
        built.run(down if step % 2 else up, "B" if step <= rank else "I")
    # Weights fill the time until the next input gradient comes.
    for _ in range(behind):
        built.run_weights()
        built.run(down, "I")
    for _ in range(rank + 1):
        built.run_weights()
    return tuple(built.order)


class Generator(NamedTuple):
    """A function that makes a schedule, and how many stages it puts on each rank."""

    #: takes ranks, then virtual stages if `virtual_stages` is None, then microbatches.
    generate: Callable[..., Schedule]
    virtual_stages: int | None  #: stages per rank; None if the caller chooses


#: name -> its generator, of the core
NAMES: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": Generator(gpipe, 1),
        "1f1b": Generator(one_f_one_b, 1),
        "looped-bfs": Generator(looped_bfs, None),
        "interleaved-1f1b": Generator(interleaved_1f1b, None),
        "combined-1f1b": Generator(combined_1f1b, None),
        "zb-h1": Generator(zb_h1, 1),
        "interleaved-zb": Generator(interleaved_zero_bubble, None),
        "zbv": Generator(zbv, 2),
        "dualpipe-v": Generator(dualpipe_v, 2),
        "dualpipe-v-overlapped": Generator(overlapped_dualpipe_v, 2),
    }
)


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules: those of the core, and of extensions."""
    return (*NAMES, *extensions.places("schedules"))


def generate(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Make the schedule of that name.

    Args:
        name: one of `schedule_names()`.
        ranks: number of ranks of the pipeline; each holds as many stages as the schedule has
            virtual stages.
        microbatches: number of microbatches of one iteration.
        virtual_stages: stages per rank. Required for looped-bfs and the interleaved schedules; the
            others have a fixed number.
        group: number of microbatches that go through a stage before the rank's next stage gets its
            turn, Megatron's `microbatch_group_size_per_vp_stage`; for interleaved-1f1b and
            combined-1f1b only.

    Raises:
        ScheduleError: If the name is unknown, `virtual_stages` is missing or differs from the
            schedule's number, the schedule has no groups, or the generator refuses the sizes.
    """
    make, fixed = _generator(name)
    # Other generators have no groups, and an option without effect would mislead.
    if group is not None and make not in (interleaved_1f1b, combined_1f1b):
        raise ScheduleError(f"schedule {name}: has no groups of microbatches; leave the group out")
    if fixed is None:
        if virtual_stages is None:
            raise ScheduleError(
                f"schedule {name}: how many virtual stages a rank holds is missing; give 2 or more"
            )
        groups = {} if group is None else {"group": group}
        return make(ranks, virtual_stages, microbatches, **groups)
    # A number that the schedule fixes may be given, if it is that one.
    if virtual_stages not in (None, fixed):
        per_rank = counted(fixed, "stage")
        raise ScheduleError(
            f"schedule {name}: has {per_rank} per rank, not {virtual_stages}; leave virtual stages "
            "out"
        )
    return make(ranks, microbatches)


def generate_for_stages(
    name: str,
    stages: int,
    *,
    microbatches: int,
    ranks: int | None = None,
    virtual_stages: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Make the schedule of that name for a pipeline of `stages` stages; ranks and virtual stages
    follow from them.

    Args:
        name: one of `schedule_names()`.
        stages: number of stages of the pipeline.
        microbatches: number of microbatches of one iteration.
        ranks: number of ranks; None if virtual stages, or the schedule, tell it.
        virtual_stages: stages per rank; None if the ranks, or the schedule, tell it.
        group: as `generate` takes it.

    Raises:
        ScheduleError: If no number of ranks is given and the stages cannot be shared equally, or
            `generate` refuses the sizes. A schedule for given ranks may have other stages than
            asked for, which who has the profile refuses in its own words.
    """
    # A number that the schedule fixes, or the user gives, counts before what follows from ranks.
    fixed = _generator(name).virtual_stages
    if ranks and fixed is None and virtual_stages is None and stages % ranks == 0:
        virtual_stages = stages // ranks
    per_rank = fixed or virtual_stages or 1
    if ranks is None and stages % per_rank:
        raise ScheduleError(
            f"{stages} stages cannot be shared by ranks of {per_rank} stages each; give the number "
            "of ranks"
        )
    if ranks is None:
        ranks = stages // per_rank
    return generate(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages, group=group
    )


def _whole(ranks: int, microbatches: int) -> Schedule:
    if (ranks, microbatches) != (1, 1):
        raise ScheduleError(
            f"schedule {WHOLE.name}: is one computation of one rank; leave ranks and microbatches "
            "out"
        )
    return WHOLE


def _generator(name: str) -> Generator:
    if name == WHOLE.name:  # of profiles that were learnt without a pipeline
        return Generator(_whole, 1)
    if name in NAMES:
        return NAMES[name]
    where = extensions.places("schedules").get(name)
    if where is None:
        advice = did_you_mean(name, schedule_names())
        advice = advice or f"give one of {', '.join(schedule_names())}"
        # The most frequent mistake: a file whose name has another ending.
        if "." in name:
            advice = "the name of a text grid ends in .csv or .txt"
        raise ScheduleError(f"there is no schedule {shown(name)}; {extensions.remedy(advice)}")
    generator = extensions.load(where)
    assert isinstance(generator, Generator)
    return generator
