"""The computations of a rank, step by step, in a trace of PyTorch's profiler.

Multi-stage schedules of torch 2.13 and later annotate each action, `PP:1F0`. Their range contains
the wait for its input, so a computation lasts from the first to the last operation of its own in
it. Nothing else annotates computations: there, a forward is a run of operations between transfers,
and a backward a run of `autograd::engine::evaluate_function`. A forward owns the sequence numbers
of the graph that it creates; the highest one of a backward lies in its own forward. Recomputation
runs inside the backward, so the outermost operations suffice.

On a GPU a computation lasts from the first to the last kernel that its operations launched: hosts
run ahead of their GPUs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.kineto import BACKWARD, FORWARD, TRANSFER, union_us

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.extensions.traces.kineto import Range, Trace

_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_PREFIX = "PP:"
_STEP = re.compile(r"ProfilerStep#([0-9]+)")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")


class Ran(NamedTuple):
    """A computation that a rank ran, in the seconds of its node's clock."""

    kind: str  #: F, B, I or W
    #: stage, if it is annotated; else None, and `number` counts the forwards of the rank's step
    stage: int | None
    number: int  #: microbatch, or the number of its forward on the rank
    begin_s: float
    end_s: float
    host_begin_s: float  #: when the host began it
    #: how long a kernel ran meanwhile, seconds; its whole time in a trace without kernels
    computing_s: float

    @property
    def time_s(self) -> float:
        """How long it ran, seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class RankSteps:
    """What a rank ran."""

    name: str  #: of the rank, for people
    rank: int | None  #: number in the job
    is_labelled: bool  #: whether stages and microbatches are annotated
    steps: tuple[tuple[Ran, ...], ...]  #: its whole steps, computations in order
    numbers: tuple[int, ...]  #: number of each step
    iterations_s: tuple[float, ...]  #: how long each took, from begin to begin

    @property
    def order(self) -> tuple[tuple[str, int | None, int], ...]:
        """The computations of a step: kind, stage and number."""
        return tuple((ran.kind, ran.stage, ran.number) for ran in self.steps[0])


class _Block(NamedTuple):
    """Operations of one computation: places in `Trace.operations`, first and behind the last."""

    kind: int
    first: int
    behind: int


def rank_steps(trace: Trace) -> RankSteps:
    """Return the steps of a rank.

    Raises:
        UsageError: If the trace has no computations, or its steps differ.
    """
    name = f"rank {trace.rank}" if trace.rank is not None else trace.path.name
    # Annotations tell stages and microbatches, so they are used where there are any.
    is_labelled = any(_actions(annotated) for annotated in trace.ranges)
    computations = list(_labelled(trace)) if is_labelled else list(_segments(trace))
    if not computations:
        raise UsageError(
            f"{trace.path}: has no forwards with backwards; trace whole training steps, with the "
            "activities of the CPU"
        )
    # The host begins a computation in its step, though the GPU may run it in the next one.
    windows = _windows(trace)
    by_step: list[list[Ran]] = [[] for _ in windows]
    begins = [begin_us / 1e6 for _, begin_us, _ in windows]
    ends = [end_us / 1e6 for _, _, end_us in windows]
    for ran in computations:
        index = bisect_right(begins, ran.host_begin_s) - 1
        if index >= 0 and ran.host_begin_s < ends[index]:
            by_step[index].append(ran)
    # Without annotations, a forward's number counts those of its step.
    if not is_labelled:
        by_step = [_numbered(step) for step in by_step]
    # The first and the last step may be cut: those like most are kept.
    orders = [tuple((ran.kind, ran.stage, ran.number) for ran in step) for step in by_step]
    common = Counter(order for order in orders if order)
    if not common:
        raise UsageError(
            f"{trace.path}: no forward lies in a step; trace whole steps, and call the profiler's "
            "step() after each"
        )
    # The order that most steps have is the training's; two may be cut at the ends.
    usual, count = common.most_common(1)[0]
    kept = [index for index, order in enumerate(orders) if order == usual]
    if count < sum(common.values()) - 2:
        raise UsageError(
            f"{trace.path}: only {count} of {sum(common.values())} steps run the same "
            "computations in one order; trace steps of one number of microbatches"
        )
    steps = tuple(tuple(by_step[index]) for index in kept)
    numbers = tuple(windows[index][0] for index in kept)
    lengths_s = [end_s - begin_s for begin_s, end_s in zip(begins, ends, strict=True)]
    return RankSteps(
        name,
        trace.rank,
        is_labelled,
        steps,
        numbers,
        _iterations_s(steps, numbers, [lengths_s[index] for index in kept]),
    )


def _actions(of: Range) -> list[tuple[str, int, int]]:
    """Return kind, stage and microbatch of what a range is, two of an overlapped pair."""
    if not of.name.startswith(_PREFIX):
        return []
    text = of.name.removeprefix(_PREFIX)
    pair = _OVERLAPPED.fullmatch(text)
    parts = [pair[1], pair[2]] if pair else [text]
    matches = [_ACTION.fullmatch(part) for part in parts]
    return [(match[2], int(match[1]), int(match[3])) for match in matches if match]


def _labelled(trace: Trace) -> Iterator[Ran]:
    """Yield the computations of a trace that annotates them, in the order of time."""
    operations = trace.operations
    # Transfers and collectives in a range belong to the wait, and not to the computation.
    is_own = np.isin(operations.kind, (FORWARD, BACKWARD))
    for annotated in trace.ranges:
        actions = _actions(annotated)
        if not actions:
            continue
        first, behind = np.searchsorted(
            operations.begin_us, (annotated.begin_us, annotated.end_us)
        ).tolist()
        for kind, stage, microbatch in actions:
            is_of_part = is_own[first:behind]
            if len(actions) == 2:  # the parts of a pair are told by what they run
                part = FORWARD if kind == "F" else BACKWARD
                is_of_part = is_of_part & (operations.kind[first:behind] == part)
            places = first + np.nonzero(is_of_part)[0]
            begin_s, end_s, computing_s = _times_s(trace, places.tolist(), annotated)
            host_s = annotated.begin_us / 1e6
            yield Ran(kind, stage, microbatch, begin_s, end_s, host_s, computing_s)


def _times_s(
    trace: Trace, places: Sequence[int], within: Range | None
) -> tuple[float, float, float]:
    """Return when operations began and ended, and how long they computed: by their kernels, if the
    trace has any, else by the operations themselves.
    """
    operations = trace.operations
    if not places:
        assert within is not None
        # It has no work; its range began before its input was there, and ended behind it.
        return within.end_us / 1e6, within.end_us / 1e6, 0.0
    # Operations are in the order of begins, and their ends may be in another one.
    begin_us = float(operations.begin_us[places[0]])
    end_us = float(operations.end_us[list(places)].max())
    if trace.kernels is None:
        return begin_us / 1e6, end_us / 1e6, (end_us - begin_us) / 1e6
    kernels = trace.kernels
    # Kernels belong to the operations in whose time they were launched.
    first, behind = np.searchsorted(kernels.launch_us, (begin_us, end_us)).tolist()
    launched = np.arange(first, behind)
    if len(launched) and len(places) < places[-1] - places[0] + 1:
        # Others run in between: only launches inside its own operations count.
        at = np.searchsorted(operations.begin_us, kernels.launch_us[launched], side="right") - 1
        launched = launched[np.isin(at, places)]
    if not len(launched):
        return begin_us / 1e6, begin_us / 1e6, 0.0
    begins_us = kernels.begin_us[launched]
    ends_us = kernels.end_us[launched]
    computing_us = union_us(begins_us, ends_us)
    return float(begins_us.min()) / 1e6, float(ends_us.max()) / 1e6, computing_us / 1e6


def _segments(trace: Trace) -> Iterator[Ran]:
    """Yield the computations of a trace without annotations, in the order of time; `number` is
    the place of its forward among all blocks of forwards.
    """
    blocks = list(_blocks(trace))
    sequence = trace.operations.sequence
    forwards: list[_Block] = []
    firsts: list[int] = []
    owners: list[tuple[_Block, int]] = []
    # Numbers of the graph tell which forward a backward belongs to.
    for block in blocks:
        numbers = sequence[block.first : block.behind]
        numbers = numbers[numbers >= 0]
        if not len(numbers):
            continue
        if block.kind == FORWARD:
            # Blocks that create nothing begin with the number of the next one, which wins.
            while firsts and firsts[-1] >= int(numbers.min()):
                firsts.pop()
                forwards.pop()
            firsts.append(int(numbers.min()))
            forwards.append(block)
            continue
        # The highest number of a backward lies in its own forward, the last that begins below it.
        owner = bisect_right(firsts, _root(trace, block)) - 1
        if owner >= 0:
            owners.append((block, forwards[owner].first))
    # A forward without a backward is none of training, or was cut off.
    owned = {first for _, first in owners}
    runs = [(block, block.first, "F") for block in forwards if block.first in owned]
    # Two backwards of one forward are the two parts of it.
    counts = Counter(first for _, first in owners)
    seen: Counter[int] = Counter()
    for block, first in owners:
        # A backward in two parts: the gradient of the input comes first.
        kind = "B" if counts[first] == 1 else "IW"[min(seen[first], 1)]
        seen[first] += 1
        runs.append((block, first, kind))
    # In the order in which they ran, as forwards and backwards were found apart.
    for block, first, kind in sorted(runs, key=lambda run: run[0].first):
        places = range(block.first, block.behind)
        # Operations of another kind inside the run are not its own.
        own_operations = [
            position for position in places if trace.operations.kind[position] == block.kind
        ]
        begin_s, end_s, computing_s = _times_s(trace, own_operations, None)
        host_s = float(trace.operations.begin_us[block.first]) / 1e6
        yield Ran(kind, None, first, begin_s, end_s, host_s, computing_s)


def _root(trace: Trace, block: _Block) -> int:
    """Return the highest sequence number of a backward that belongs to its forward's thread."""
    operations = trace.operations
    sequence = operations.sequence[block.first : block.behind]
    thread = operations.forward_thread[block.first : block.behind]
    # The first operation is of the graph's root; a recomputed graph has another thread's numbers.
    has_number = sequence >= 0
    of_root = thread[has_number][0]
    return int(sequence[has_number & (thread == of_root)].max())


def _blocks(trace: Trace) -> Iterator[_Block]:
    """Yield the runs of operations of one kind, between transfers and outside the optimizer."""
    operations = trace.operations
    # What the optimizer runs looks like forwards, and is none.
    is_outside = np.ones(len(operations.begin_us), dtype=bool)
    for annotated in trace.ranges:
        if _OPTIMIZER.match(annotated.name):
            first, behind = np.searchsorted(
                operations.begin_us, (annotated.begin_us, annotated.end_us)
            )
            is_outside[first:behind] = False
    # Counted as a transfer, as it ends a run too.
    kinds = np.where(is_outside, operations.kind, TRANSFER).tolist()
    # A step ends a run as well, as two steps are never one computation.
    begins_us = [begin_us for _, begin_us, _ in _windows(trace)]
    is_first = set(np.searchsorted(operations.begin_us, begins_us).tolist())
    first = None
    last = 0
    for position, kind in enumerate(kinds):
        if kind not in (FORWARD, BACKWARD, TRANSFER):
            continue  # a collective inside a layer does not end it
        if first is not None and (kind != kinds[first] or position in is_first):
            yield _Block(kinds[first], first, last + 1)
            first = None
        if kind == TRANSFER:
            continue
        if first is None:
            first = position
        last = position
    if first is not None:
        yield _Block(kinds[first], first, last + 1)


def _numbered(step: Sequence[Ran]) -> list[Ran]:
    """Return a step whose numbers count its forwards; parts of other steps are left out."""
    numbers: dict[int, int] = {}
    for ran in step:
        if ran.kind == "F":
            numbers[ran.number] = len(numbers)
    numbered: list[Ran] = []
    for ran in step:
        if ran.number not in numbers:
            continue
        last = numbered[-1] if numbered else None
        # The gradients of weights are computed layer by layer, each a run of its own.
        if (
            ran.kind == "W"
            and last is not None
            and (last.kind, last.number)
            == (
                "W",
                numbers[ran.number],
            )
        ):
            numbered[-1] = last._replace(
                end_s=ran.end_s, computing_s=last.computing_s + ran.computing_s
            )
        else:
            numbered.append(ran._replace(number=numbers[ran.number]))
    return numbered


def _windows(trace: Trace) -> list[tuple[int, float, float]]:
    """Return number, begin and end of each step on the host, microseconds."""
    # The profiler's steps count first, as several optimizers may step in one iteration.
    marked: dict[int, Range] = {}
    for marked_range in trace.ranges:
        match = _STEP.match(marked_range.name)
        if match:
            marked.setdefault(int(match[1]), marked_range)
    if marked:
        return [
            (number, marked_range.begin_us, marked_range.end_us)
            for number, marked_range in sorted(marked.items())
        ]
    ends = [
        marked_range.end_us
        for marked_range in trace.ranges
        if marked_range.name.startswith("Optimizer.step#")
    ]
    if not ends:
        raise UsageError(
            f"{trace.path}: has neither steps of the profiler nor an optimizer's; call step() of "
            "the profiler after each training step"
        )
    # Several optimizers may step after one iteration: what runs between them is no computation.
    begins = [-np.inf, *ends[:-1]]
    return [(number, *window) for number, window in enumerate(zip(begins, ends, strict=True))]


def _iterations_s(
    steps: Sequence[Sequence[Ran]], numbers: Sequence[int], windows_s: Sequence[float]
) -> tuple[float, ...]:
    """Return how long each step took: until the next one begins; of the last as in its window."""
    # Begins of computations, as the host may be ahead by more in one step than in another.
    firsts = [min(ran.begin_s for ran in step) for step in steps]
    spans = [
        max(ran.end_s for ran in step) - first for step, first in zip(steps, firsts, strict=True)
    ]
    iterations_s: list[float | None] = [None] * len(steps)
    for index in range(len(steps) - 1):
        # A step that follows at once tells the length; after a gap in numbers none does.
        if numbers[index + 1] == numbers[index] + 1:
            iterations_s[index] = firsts[index + 1] - firsts[index]
    # The median of what passes after computations stands for steps without a next one.
    rests = [
        length_s - span
        for length_s, span in zip(iterations_s, spans, strict=True)
        if length_s is not None
    ]
    rest_s = float(np.median(rests)) if rests else None
    for index, length_s in enumerate(iterations_s):
        if length_s is None and rest_s is not None:
            iterations_s[index] = spans[index] + rest_s
        elif length_s is None:
            # A window without a begin has no length, so the computations' own must do.
            window_s = windows_s[index]
            iterations_s[index] = window_s if np.isfinite(window_s) else spans[index]
    return tuple(float(ran) for ran in iterations_s if ran is not None)
