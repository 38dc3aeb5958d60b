"""Schedules: the computations of one iteration, rank by rank, and the first flaw of ranks that are
malformed, or that an engine cannot run as a pipeline.

Flaws are looked for in the ranks of a schedule, not in a `Schedule`, so that a file is checked
before it becomes one.

As text, a schedule is a grid: a line per rank, a cell per computation, as torch writes them.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

A blank cell means that the rank waits; it does not tell when, so it is skipped. The
`_dump_csv(file, format="compute_only")` of torch.distributed.pipelining writes such files, and its
`_load_csv(file, format="compute_only")` reads them. An overlapped pair, `(3F9;4B2)OVERLAP_F_B`, is
one computation: it runs under one clock, waits for what both need, and has a row of its own in the
profile. It stands in the ranks as its backward, and `Schedule.pairs` has its forward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from perseus_planner.base.errors import ScheduleError, shown
from perseus_planner.base.files import read_text, write_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

KINDS = ("F", "B", "I", "W")
"""Forward, full backward, gradient of the input alone, gradient of the weights alone."""

# Python limits the length of numbers that it reads, and does not read them in linear time.
_COMPUTATION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Computation(NamedTuple):
    """One forward or backward of one microbatch on one stage; its `str()` is its text, such as
    `3F17`.

    A backward is either whole, B, or in two parts: I, which the previous stage waits for, and W,
    which nothing waits for.
    """

    stage: int
    kind: str  #: one of `KINDS`
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Computation:
        """Return the computation with this text.

        Raises:
            ScheduleError: If the text is not that of a computation.
        """
        match = _COMPUTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{shown(text)} is not a computation; write stage, kind (F, B, I or W) and "
                "microbatch, e.g. 3F17"
            )
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The computations of one iteration, in program order, one tuple per rank.

    A schedule need not be a pipeline that can run; `check_pipeline` checks that.

    Raises:
        ScheduleError: If the ranks are not like that; names the rank and the computation.
    """

    name: str  #: the name of its generator, such as "1f1b"
    #: `ranks[r]` holds the computations of rank r, first to last; at least one each, and each only
    #: once. A rank may hold several stages, a stage is on one rank, and stages are numbered from 0
    #: without a hole.
    ranks: tuple[tuple[Computation, ...], ...]
    #: the forward and the backward, B or I, of each overlapped pair, in the order of the ranks.
    #: `ranks` has the backward only, where the pair runs.
    pairs: tuple[tuple[Computation, Computation], ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ScheduleError(f"schedule {self.name}: has no ranks; give at least one")
        position_of = {computation: i for i, computation in enumerate(self.computations())}
        for forward, backward in self.pairs:
            if forward.kind != "F" or backward.kind not in "BI" or backward not in position_of:
                raise ScheduleError(
                    f"schedule {self.name}: {_pair_text(forward, backward)} is not a pair of a "
                    "forward and a backward that its ranks have; correct it"
                )
        # Equal schedules have equal pairs
        in_order = tuple(sorted(self.pairs, key=lambda pair: position_of[pair[1]]))
        object.__setattr__(self, "pairs", in_order)
        flaw = find_layout_flaw(self.cells)
        if flaw is not None:
            raise ScheduleError(f"schedule {self.name}, {flaw.where}: {flaw.text}")

    @cached_property
    def forward_of(self) -> Mapping[Computation, Computation]:
        """The forward that overlaps each backward that is one of a pair."""
        return {backward: forward for forward, backward in self.pairs}

    @cached_property
    def cells(self) -> tuple[tuple[Cell, ...], ...]:
        """The ranks with both computations of each pair, its forward first."""
        return tuple(tuple(map(self._cell, order)) for order in self.ranks)

    @property
    def one_by_one(self) -> Schedule:
        """The same schedule with the two of each pair one after the other, the forward first."""
        ranks = tuple(
            tuple(computation for cell in order for computation in cell) for order in self.cells
        )
        return Schedule(self.name, ranks)

    def _cell(self, computation: Computation) -> Cell:
        forward = self.forward_of.get(computation)
        return (computation,) if forward is None else (forward, computation)

    def text_of(self, computation: Computation) -> str:
        """Return a computation as a grid writes it: a pair with both names."""
        return _cell_text(self._cell(computation))

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """`stage_ranks[s]` is the rank that holds stage s."""
        holder = {
            computation.stage: rank
            for rank, order in enumerate(self.ranks)
            for computation in order
        }
        return tuple(holder[stage] for stage in sorted(holder))

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.stage_ranks)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches of one iteration."""
        return 1 + max(computation.microbatch for computation in self.computations())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The `KINDS` that the schedule has, in their order."""
        present = {computation.kind for computation in self.computations()}
        return tuple(kind for kind in KINDS if kind in present)

    @cached_property
    def _pipeline_flaw(self) -> Flaw | None:
        """The flaw that `check_pipeline` reports; kept, as a schedule is checked often."""
        return find_pipeline_flaw(self.cells)

    def computations(self) -> Iterator[Computation]:
        """Yield all computations, rank by rank in program order; a pair as its backward."""
        for rank in self.ranks:
            yield from rank

    def __str__(self) -> str:
        ranks = "" if len(self.ranks) == self.stages else f" on {len(self.ranks)} ranks"
        return f"{self.name}, {self.stages} stages{ranks} x {self.microbatches} microbatches"


def check_pipeline(schedule: Schedule) -> None:
    """Refuse a schedule that is not a complete pipeline, or in which an engine would wait for ever.

    In a complete pipeline each stage runs, for each microbatch, F and either B or both I and W;
    microbatches are numbered from 0 without a hole; or it is `WHOLE`. It runs to its end if no
    computation comes, on its rank, after one that directly or indirectly depends on it (see
    `dependency_of`).

    Raises:
        ScheduleError: If a computation can never run or lacks its counterpart; names it and what it
            waits for.
    """
    flaw = schedule._pipeline_flaw
    if flaw is not None:
        raise ScheduleError(f"schedule {schedule.name}, {flaw.where}: {flaw.text}")


Cell: TypeAlias = tuple[Computation, ...]
"""What a rank runs at once: a computation, or the forward and the backward of an overlapped pair.
"""
Ranks: TypeAlias = Sequence[Sequence[Cell]]


def _pair_text(forward: Computation, backward: Computation) -> str:
    return f"({forward};{backward})OVERLAP_F_B"


def _cell_text(cell: Cell) -> str:
    return str(cell[0]) if len(cell) == 1 else _pair_text(*cell)


class Flaw(NamedTuple):
    """A flaw of a schedule, with its place and remedy."""

    rank: int  #: the rank, from 0
    #: the position of the computation on its rank, from 0; None for the whole rank.
    position: int | None
    text: str  #: what is wrong and what to do

    @property
    def where(self) -> str:
        """The place in words, for a schedule without a file; computations are counted from 1."""
        return f"rank {self.rank}" + (
            "" if self.position is None else f", computation {self.position + 1}"
        )


def find_layout_flaw(ranks: Ranks) -> Flaw | None:
    """Return the first malformed, repeated or misplaced computation, empty rank or missing
    stage.
    """
    # A stage belongs to the rank that runs it first, and to no other.
    seen: set[Computation] = set()
    holder: dict[int, tuple[int, int]] = {}
    for rank, order in enumerate(ranks):
        if not order:
            return Flaw(rank, None, "runs nothing; give each rank at least one computation")
        for position, cell in enumerate(order):
            for computation in cell:
                first = holder.setdefault(computation.stage, (rank, position))
                text = _wrong(computation, rank, first[0], computation in seen)
                if text:
                    return Flaw(rank, position, text)
                seen.add(computation)
    text = _hole("stage", holder)
    return Flaw(*holder[max(holder)], text) if text else None


def _wrong(computation: Computation, rank: int, first_rank: int, again: bool) -> str:
    numbers = computation.stage, computation.microbatch
    if computation.kind not in KINDS or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        return (
            f"{computation!r} is not a computation; give whole numbers of 0 or more and a kind "
            "F, B, I or W"
        )
    if again:
        return f"{computation} is there twice; keep one"
    if rank != first_rank:
        return f"stage {computation.stage} is on rank {first_rank} too; keep a stage on one rank"
    return ""


def _hole(what: str, numbers: Collection[int]) -> str:
    """Return a complaint if `numbers`, all 0 or more, are not 0, 1, 2 and so on; else an empty
    text.
    """
    largest = max(numbers)
    missing = next((number for number in range(largest) if number not in numbers), None)
    if missing is None:
        return ""
    return (
        f"{what} {missing} is missing though there is {what} {largest}; number them from 0 "
        "without a hole"
    )


def dependency_of(
    computation: Computation, present: Container[Computation], last_stage: int
) -> Computation | None:
    """Return the computation whose output `computation` takes as input in a pipeline; None for a
    forward of stage 0.

    A forward depends on the forward of the previous stage; a backward, B or I, on the backward of
    the next stage, of either kind, or on the last stage on its own forward; W depends on its own I.
    The order on the rank is not part of this.

    Args:
        computation: the computation that depends on the result.
        present: all computations of the schedule; they tell whether the next stage runs B or I. B
            if neither.
        last_stage: the number of the last stage.
    """
    stage, kind, microbatch = computation
    if kind == "W":
        return Computation(stage, "I", microbatch)
    if kind == "F":
        return Computation(stage - 1, "F", microbatch) if stage else None
    if stage == last_stage:
        return Computation(stage, "F", microbatch)
    part = Computation(stage + 1, "I", microbatch)
    return part if part in present else Computation(stage + 1, "B", microbatch)


def find_pipeline_flaw(ranks: Ranks) -> Flaw | None:
    """Return why ranks without a layout flaw are not a pipeline that runs to its end; see
    `check_pipeline`.
    """
    place_of = {
        computation: (rank, position)
        for rank, order in enumerate(ranks)
        for position, cell in enumerate(order)
        for computation in cell
    }
    # The place of a microbatch is that of its first computation.
    holder = {computation.microbatch: place_of[computation] for computation in reversed(place_of)}
    text = _hole("microbatch", holder)
    if text:
        return Flaw(*holder[max(holder)], text)
    # A backward is whole or in two parts, and both would run it twice.
    for computation in place_of:
        whole = Computation(computation.stage, "B", computation.microbatch)
        if computation.kind in ("I", "W") and whole in place_of:
            return Flaw(
                *place_of[computation],
                f"{computation} is a part of {whole}, which is present too; keep one of them",
            )
    # What can run is run first, as an incomplete schedule may also be stuck.
    flaw = _stuck(ranks, place_of)
    if flaw is not None:
        return flaw
    # Everything runs, so a forward whose backward is present is present on all stages.
    return next(
        (Flaw(*place_of[computation], text) for computation, text in _unfinished(place_of)), None
    )


def _stuck(ranks: Ranks, place: Mapping[Computation, tuple[int, int]]) -> Flaw | None:
    """Return the computation at which the ranks stop: its input is missing, or it is the first
    of a ring.
    """
    # All ranks run as far as they can, and what none of them can run is the flaw.
    last_stage = max(computation.stage for computation in place)
    reached = _reached(ranks, place, last_stage)
    rank = next((rank for rank, order in enumerate(ranks) if reached[rank] < len(order)), None)
    if rank is None:
        return None
    chain: dict[int, tuple[Computation, Computation]] = {}  # rank -> what waits, and for what
    # From each waiting rank to the one that it waits for, until a rank comes again: a ring.
    while rank not in chain:
        head, needed = _unmet(ranks, reached, rank, place, last_stage)
        if needed not in place:
            return Flaw(
                rank, reached[rank], f"{head} can never run: it waits for {_missing(needed)}"
            )
        if place[needed] == (rank, reached[rank]):
            return Flaw(
                rank,
                reached[rank],
                f"{head} can never run: it waits for {needed}, with which it is to overlap; put "
                "them in cells of their own",
            )
        chain[rank] = head, needed
        rank = place[needed][0]
    # The walk may have begun outside the ring.
    ring = list(chain)[list(chain).index(rank) :]
    return _closed(ranks, reached, {rank: chain[rank] for rank in ring}, place)


def _unmet(
    ranks: Ranks,
    reached: Sequence[int],
    rank: int,
    place: Mapping[Computation, tuple[int, int]],
    last_stage: int,
) -> tuple[Computation, Computation]:
    """Return the computation at which a rank stops, and what it waits for."""
    for head in ranks[rank][reached[rank]]:
        needed = dependency_of(head, place, last_stage)
        if needed is None:
            continue
        # What is missing counts as never reached.
        behind, position = place.get(needed, (rank, len(ranks[rank])))
        if position >= reached[behind]:
            return head, needed
    raise AssertionError("it would have run")


def _closed(
    ranks: Ranks,
    reached: Sequence[int],
    ring: Mapping[int, tuple[Computation, Computation]],
    place: Mapping[Computation, tuple[int, int]],
) -> Flaw:
    """Return the first computation of a ring of ranks, each of which waits for one that the next
    never reaches.
    """
    # The same flaw for the same ranks, wherever the walk began.
    rank = min(ring)
    head, needed = ring[rank]
    behind = place[needed][0]
    blocking = ranks[behind][reached[behind]]
    if behind == rank:
        explanation = f"which comes after it on the same rank; move {needed} before it"
    elif needed in blocking:
        explanation = "which in the end waits for it; reorder them"
    else:
        explanation = (
            f"which comes after {_cell_text(blocking)}, which in the end waits for it; reorder them"
        )
    return Flaw(rank, reached[rank], f"{head} can never run: it waits for {needed}, {explanation}")


def _reached(ranks: Ranks, present: Container[Computation], last_stage: int) -> list[int]:
    """Return how many cells each rank completes if all run as far as they can."""
    # Ranks that can go on are worked off; those that wait are found by what they wait for. So each
    # cell is looked at once, and once more for each time that it had to wait.
    reached = [0] * len(ranks)
    # A forward of stage 0 needs nothing, which counts as done.
    done: set[Computation | None] = {None}
    waiting: dict[Computation | None, list[int]] = defaultdict(list)
    able = list(range(len(ranks)))
    while able:
        rank = able.pop()
        while reached[rank] < len(ranks[rank]):
            cell = ranks[rank][reached[rank]]
            others = [dependency_of(part, present, last_stage) for part in cell]
            unmet = next((other for other in others if other not in done), None)
            if unmet is not None:
                waiting[unmet].append(rank)
                break
            done.update(cell)
            reached[rank] += 1
            # Whoever waited for these goes on; where it cannot, it is stored again.
            for computation in cell:
                able += waiting.pop(computation, ())
    return reached


def _missing(other: Computation) -> str:
    if other.kind == "B":
        return f"{other} or {other._replace(kind='I')}, and both are missing; add one"
    return f"{other}, which is missing; add it"


def _unfinished(present: Collection[Computation]) -> Iterator[tuple[Computation, str]]:
    """Yield forwards without a backward and I without W, each with what to do."""
    # A whole iteration has no backward of its own.
    for computation in () if [*present] == [*WHOLE.computations()] else present:
        stage, kind, microbatch = computation
        if kind == "F" and not any(
            Computation(stage, other, microbatch) in present for other in "BI"
        ):
            remedy = f"add {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
            yield computation, f"{computation} has no backward; {remedy}"
        if kind == "I" and Computation(stage, "W", microbatch) not in present:
            yield computation, f"{computation} is only half a backward; add {stage}W{microbatch}"


WHOLE = Schedule("whole", ((Computation(0, "F", 0),),))
"""The iteration of training without a pipeline, as one computation."""


_LINE_END = re.compile(r"\r\n|\n|\r")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# torch writes these between computations if communication is dumped too.
_COMMUNICATION = re.compile(
    r"[0-9]+(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*"
)


class _Line(NamedTuple):
    """One line of a grid."""

    number: int  #: its number, from 1
    order: tuple[Cell, ...]  #: what the rank runs
    cells: tuple[int, ...]  #: the number of each in the line, from 1, blank ones included


def load_grid(path: str | os.PathLike[str]) -> Schedule:
    """Read the schedule in the text grid at `path`; its name is that of the file without its
    ending.

    Raises:
        ScheduleError: If the file cannot be read, is too large, is not text, or is not the grid of
            a pipeline.
    """
    file = Path(path)
    return parse_grid(
        read_text(file, ScheduleError, "the text grid of a schedule"), file.stem, str(file)
    )


def parse_grid(text: str, name: str, source: str) -> Schedule:
    """Return the schedule that `text` writes, checked to be a pipeline that runs (see
    `check_pipeline`).

    Args:
        text: a line per rank, cells such as `3F17` separated by commas or, on a line without a
            comma, by spaces. Blank cells, blank lines and lines that start with `#` are skipped.
        name: the name of the schedule.
        source: the name of the text in error messages, such as the file's name.

    Raises:
        ScheduleError: If a cell is not a computation, or a computation is there twice or on a
            second rank, can never run, or lacks its counterpart; names the line and cell of the
            first flaw.
    """
    lines = [_line(f"{source}, line {number}", number, line) for number, line in _content(text)]
    if not lines:
        raise ScheduleError(f"{source}: is empty; write one line per rank, such as 0F0,0F1,0B0,0B1")
    ranks = tuple(line.order for line in lines)
    flaw = find_layout_flaw(ranks) or find_pipeline_flaw(ranks)
    if flaw is not None:
        raise ScheduleError(f"{source}, {_place(lines[flaw.rank], flaw)}: {flaw.text}")
    return schedule_of_cells(name, ranks)


def schedule_of_cells(name: str, cells: Ranks) -> Schedule:
    """Return the schedule whose ranks run these cells.

    Raises:
        ScheduleError: If it is malformed.
    """
    return Schedule(
        name,
        tuple(tuple(cell[-1] for cell in order) for order in cells),
        tuple((cell[0], cell[1]) for order in cells for cell in order if len(cell) == 2),
    )


def grid_text(schedule: Schedule) -> str:
    """Return `schedule` as text, a line per rank; `parse_grid` and torch read it back."""
    return "".join(",".join(map(schedule.text_of, rank)) + "\n" for rank in schedule.ranks)


def save_grid(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write `grid_text(schedule)` to `path`.

    Raises:
        ScheduleError: If the file cannot be written.
    """
    write_file(path, grid_text(schedule), ScheduleError)


def _content(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are ranks, with their numbers."""
    for number, line in enumerate(_LINE_END.split(text), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            # With commas, blank cells at the ends of the line count in the numbers of cells.
            yield number, stripped if "," not in stripped else line


def _line(where: str, number: int, text: str) -> _Line:
    cells = text.split(",") if "," in text else text.split()
    filled = [
        (_cell(f"{where}, cell {position}", content.strip()), position)
        for position, content in enumerate(cells, 1)
        if content.strip()
    ]
    return _Line(
        number,
        tuple(cell for cell, _ in filled),
        tuple(position for _, position in filled),
    )


def _cell(where: str, text: str) -> Cell:
    """Return the computation of a cell, or the two of an overlapped pair."""
    # The forward comes first; its backward may be whole, or I alone.
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped[1].split(";") if overlapped else [text]
    cell = tuple(_computation(where, part) for part in parts)
    if overlapped and [part_of_pair.kind.replace("I", "B") for part_of_pair in cell] != ["F", "B"]:
        raise ScheduleError(
            f"{where}: {shown(text)} is not a forward and a backward; write a pair as "
            "(3F9;4B2)OVERLAP_F_B"
        )
    return cell


def _computation(where: str, text: str) -> Computation:
    if _COMMUNICATION.fullmatch(text):
        raise ScheduleError(
            f"{where}: {shown(text)} is communication, not a computation; "
            'dump the schedule with format="compute_only"'
        )
    try:
        return Computation.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error


def _place(line: _Line, flaw: Flaw) -> str:
    """Return the place of a flaw in words."""
    return f"line {line.number}" + (
        "" if flaw.position is None else f", cell {line.cells[flaw.position]}"
    )
