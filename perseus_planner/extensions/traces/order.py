"""The schedule that ranks ran: from the annotations of their computations, or by matching what all
of them ran against our generators.

Exactly one order must fit ranks without annotations. That is also the check that they were read
right: an order that fits no schedule is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import ScheduleError, UsageError
from perseus_planner.base.prefixes import counted
from perseus_planner.extensions.traces.steps import Ran
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.generators import NAMES, generate
from perseus_planner.schedules.schedule import (
    check_pipeline,
    find_layout_flaw,
    find_pipeline_flaw,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.extensions.traces.steps import RankSteps

_MOST_CHUNKS = 16
"""The most stages of a rank that are tried; a limit by hand, above what jobs use."""


_UNSEEN = (
    " (V-shaped schedules and overlapped pairs pass from stage to stage on a rank, which no "
    "transfer shows: torch 2.13 and later annotates them)"
)


class Layout(NamedTuple):
    """Which rank of which pipeline each file is, and what they ran."""

    schedule: Schedule
    #: for each pipeline, the place of the file of each of its ranks
    pipelines: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]  #: of the generators that make this order; empty if none does


def find_layout(ranks: Sequence[RankSteps], pipelines: int | None = None) -> Layout:
    """Return the schedule of some ranks, which are in the order of their numbers.

    Args:
        ranks: what each rank ran.
        pipelines: how many pipelines they are; None to find it.

    Raises:
        UsageError: If a stage has no trace, or no schedule fits.
    """
    labelled = {rank.is_labelled for rank in ranks}
    if len(labelled) > 1:
        with_them = next(rank.name for rank in ranks if rank.is_labelled)
        without = next(rank.name for rank in ranks if not rank.is_labelled)
        raise UsageError(
            f"{with_them} has annotated computations and {without} has not; trace all ranks of one "
            "job with one release of torch"
        )
    if labelled == {True}:
        return _labelled(ranks, pipelines)
    return _matched(ranks, pipelines)


def _labelled(ranks: Sequence[RankSteps], pipelines: int | None) -> Layout:
    # Replicas hold the same stages, so those are one group, a file for each pipeline.
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(ranks):
        stages = tuple(sorted({stage for _, stage, _ in rank.order if stage is not None}))
        groups.setdefault(stages, []).append(position)
    # The first pipeline's order stands for all, which is checked below.
    first_ranks = [places[0] for _, places in sorted(groups.items())]
    # Every stage is needed, as each waits for its neighbours.
    held = sorted(stage for stages in groups for stage in stages)
    missing = sorted(set(range(held[-1] + 1)) - set(held))
    if missing:
        raise UsageError(
            f"stage {missing[0]} has no trace, though stage {held[-1]} has one; add the file of "
            "the rank that holds it"
        )
    counts = {len(places) for places in groups.values()}
    if pipelines is not None and counts != {pipelines}:
        raise UsageError(
            f"--pipelines: is {pipelines}, but the traces are of {min(counts)} for each stage; "
            "leave it out"
        )
    # What has a stage is a computation, in the order in which it ran.
    rows = tuple(
        tuple(
            Computation(stage, kind, number)
            for kind, stage, number in ranks[position].order
            if stage is not None
        )
        for position in first_ranks
    )
    cells = [[(computation,) for computation in row] for row in rows]
    flaw = find_layout_flaw(cells) or find_pipeline_flaw(cells)
    if flaw is not None:
        raise UsageError(
            f"{ranks[first_ranks[flaw.rank]].name}: {flaw.text.split(';')[0]}, so its trace is "
            "incomplete or was read wrongly; trace it again, with all ranks in the same steps"
        )
    # A schedule is named only if all pipelines ran it.
    _check_alike(ranks, groups)
    # The name of a generator that makes this very order, if there is one.
    names = tuple(name for name, schedule in _candidates_like(rows) if schedule.ranks == rows)
    schedule = Schedule(names[0] if names else "traced", rows)
    whole = min(counts)
    return Layout(
        schedule,
        tuple(
            tuple(places[number] for _, places in sorted(groups.items())) for number in range(whole)
        ),
        names,
    )


def _check_alike(ranks: Sequence[RankSteps], groups: dict[tuple[int, ...], list[int]]) -> None:
    for places in groups.values():
        for position in places[1:]:
            if ranks[position].order != ranks[places[0]].order:
                raise UsageError(
                    f"{ranks[position].name} and {ranks[places[0]].name} hold the same stages and "
                    "run them in different orders; name the files of one job"
                )


def _candidates_like(rows: Sequence[Sequence[Computation]]) -> Iterator[tuple[str, Schedule]]:
    virtual = len({computation.stage for computation in rows[0]})
    forwards = [computation for computation in rows[0] if computation.kind == "F"]
    yield from _candidates(len(rows), virtual, len(forwards) // virtual)


def _matched(ranks: Sequence[RankSteps], pipelines: int | None) -> Layout:
    # Pipelines have equal numbers of microbatches, so ranks of one job run as many forwards.
    forwards = [sum(kind == "F" for kind, _, _ in rank.order) for rank in ranks]
    if len(set(forwards)) > 1:
        least = forwards.index(min(forwards))
        most = forwards.index(max(forwards))
        raise UsageError(
            f"{ranks[least].name} runs {counted(forwards[least], 'forward')} in a step and "
            f"{ranks[most].name} {forwards[most]}; name traces of one job and of the same steps"
            f"{_UNSEEN}"
        )
    # Without a number of pipelines, each that divides the files is tried, the least first.
    wanted = (
        [pipelines]
        if pipelines
        else [count for count in range(1, len(ranks) + 1) if len(ranks) % count == 0]
    )
    for count in wanted:
        if len(ranks) % count:
            raise UsageError(
                f"--pipelines: {len(ranks)} traces are not {count} times the same stages; correct "
                "it, or add files"
            )
        layout = _fitting(ranks, count, forwards[0])
        if layout is not None:
            return layout
    numbers = ", ".join(rank.name for rank in ranks)
    raise UsageError(
        f"the order in which {numbers} run {counted(forwards[0], 'forward')} and their backwards "
        "fits no schedule that is known; is the file of a stage missing, or of another job? Give "
        f"one of each stage, and --schedule GRID if the schedule is the training's own{_UNSEEN}"
    )


def _fitting(ranks: Sequence[RankSteps], pipelines: int, forwards: int) -> Layout | None:
    """Return the layout if the ranks are so many pipelines side by side, stage by stage."""
    size = len(ranks) // pipelines
    # Files are in the order of ranks, where those of one stage lie side by side.
    places = tuple(
        tuple(stage * pipelines + number for stage in range(size)) for number in range(pipelines)
    )
    orders = [[(kind, number) for kind, _, number in rank.order] for rank in ranks]
    # Pipelines side by side run one order; if they do not, this is not their number.
    for pipeline in places[1:]:
        if [orders[position] for position in pipeline] != [
            orders[position] for position in places[0]
        ]:
            return None
    seen = [orders[position] for position in places[0]]
    fits: dict[tuple[tuple[Computation, ...], ...], list[str]] = {}
    schedules: dict[tuple[tuple[Computation, ...], ...], Schedule] = {}
    # Forwards are microbatches times chunks of a rank, so each divisor is tried.
    for virtual in range(1, _MOST_CHUNKS + 1):
        if forwards % virtual:
            continue
        for name, schedule in _candidates(size, virtual, forwards // virtual):
            if seen in _as_seen(schedule):
                # Several generators may make one order, which is one schedule with several names.
                fits.setdefault(schedule.ranks, []).append(name)
                schedules.setdefault(schedule.ranks, schedule)
    if not fits:
        return None
    # Orders that differ only in what is not seen cannot be told apart.
    if len(fits) > 1:
        texts = " or ".join(str(schedule) for schedule in schedules.values())
        raise UsageError(
            f"the order of the computations fits {texts}, which run alike; say which it is with "
            "--schedule GRID"
        )
    (rows, names), *_ = fits.items()
    return Layout(schedules[rows], places, tuple(dict.fromkeys(names)))


def with_grid(ranks: Sequence[RankSteps], schedule: Schedule, pipelines: int | None) -> Layout:
    """Return the layout of ranks whose schedule is known.

    Raises:
        UsageError: If they ran in another order; names the first rank that did.
    """
    check_pipeline(schedule)
    size = len(schedule.ranks)
    # A grid says how many ranks a pipeline has, so the files must be a multiple of that.
    if len(ranks) % size or (pipelines is not None and len(ranks) != pipelines * size):
        raise UsageError(
            f"--schedule: has {counted(size, 'rank')}, and there are {len(ranks)} traces; give "
            "one of each rank"
        )
    count = len(ranks) // size
    places = tuple(tuple(rank * count + number for rank in range(size)) for number in range(count))
    for pipeline in places:
        for row, position in zip(schedule.ranks, pipeline, strict=True):
            rank = ranks[position]
            # Annotated ranks tell stages as well; of others only kinds and forwards are known.
            if rank.is_labelled:
                ran = [(kind, stage, number) for kind, stage, number in rank.order]
                wanted = [(c.kind, c.stage, c.microbatch) for c in row]
                is_it = ran == wanted
            else:
                seen = [(kind, number) for kind, _, number in rank.order]
                is_it = seen in (_by_forward(row), _without_first_inputs(row))
            if not is_it:
                raise UsageError(
                    f"{rank.name}: ran another order than --schedule; give the schedule of this "
                    "training, or leave it out"
                )
    return Layout(schedule, places, ())


def _by_forward(row: Sequence[Computation]) -> list[tuple[str, int]]:
    """Return a rank's row as it is seen without annotations: kinds, and the number of the
    forward.
    """
    numbers: dict[tuple[int, int], int] = {}
    for computation in row:
        if computation.kind == "F":
            numbers[computation.stage, computation.microbatch] = len(numbers)
    return [
        (computation.kind, numbers[computation.stage, computation.microbatch])
        for computation in row
    ]


def _without_first_inputs(row: Sequence[Computation]) -> list[tuple[str, int]]:
    """Return a row as it is seen where backwards are split: the first stage has no gradient of its
    input, so the only part that runs there looks like a whole backward.
    """
    return [
        ("B" if computation.stage == 0 and computation.kind == "W" else kind, number)
        for computation, (kind, number) in zip(row, _by_forward(row), strict=True)
        if (computation.stage, computation.kind) != (0, "I")
    ]


def _as_seen(schedule: Schedule) -> tuple[list[list[tuple[str, int]]], ...]:
    return (
        [_by_forward(row) for row in schedule.ranks],
        [_without_first_inputs(row) for row in schedule.ranks],
    )


def with_first_inputs(ranks: Sequence[RankSteps], layout: Layout) -> list[RankSteps]:
    """Return the ranks with the gradients of the first stage's input, which take no time and leave
    no operations, where the schedule has them and the traces do not.
    """
    completed = list(ranks)
    for pipeline in layout.pipelines:
        for row, position in zip(layout.schedule.ranks, pipeline, strict=True):
            rank = ranks[position]
            if len(rank.steps[0]) < len(row):
                steps = tuple(_completed(step, row) for step in rank.steps)
                completed[position] = replace(rank, steps=steps)
    return completed


def _completed(step: Sequence[Ran], row: Sequence[Computation]) -> tuple[Ran, ...]:
    seen = iter(step)
    found: list[Ran] = []
    for computation, (kind, number) in zip(row, _by_forward(row), strict=True):
        if (computation.stage, computation.kind) == (0, "I"):
            at_s = found[-1].end_s  # a forward ran before it
            found.append(Ran("I", None, number, at_s, at_s, at_s, 0.0))
        else:
            found.append(next(seen)._replace(kind=kind))
    return tuple(found)


def _candidates(ranks: int, virtual: int, microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules of this size that the generators make."""
    for name, generator in NAMES.items():
        if virtual == 1 and generator.virtual_stages is None:
            continue  # with one stage on each rank, it is another one of these
        groups: list[int | None] = [None]
        # Groups of other sizes than the ranks are another order.
        if name == "interleaved-1f1b" and virtual > 1:
            groups += [group for group in range(1, microbatches + 1) if group != ranks]
        for group in groups:
            try:
                schedule = generate(
                    name,
                    ranks=ranks,
                    microbatches=microbatches,
                    virtual_stages=virtual,
                    group=group,
                )
            except ScheduleError:
                continue  # it is not made in this size
            # The halves of an overlapped pair run at once, so their order shows no pair.
            if not schedule.pairs:
                yield name, schedule
