"""Pipeline schedules: which computation each rank runs, and in what order.

A computation is written as torch.distributed.pipelining writes it: `3F17` is the forward (F) of
microbatch 17 on stage 3, `B` a full backward. A schedule is one such list per rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from perseus_planner.errors import ScheduleError
from perseus_planner.quantities import COUNT

_COMPUTATION = re.compile(r"(\d+)([FBIW])(\d+)")


class Computation(NamedTuple):
    """One forward or backward of one microbatch on one stage; `str()` of it is its text, e.g. `3F17`."""

    stage: int
    kind: str  #: "F" forward, "B" full backward
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Computation:
        """Inverse of `str()`.

        Raises:
            ScheduleError: the text is no computation.
        """
        match = _COMPUTATION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is no computation; write stage, kind (FBIW) and microbatch, e.g. 3F17")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The computations of one iteration, in program order, one tuple per rank.

    Attributes:
        name: what generated it, e.g. "1f1b".
        ranks: `ranks[r]` is what rank r runs, first to last; at least one computation each, none twice.

    Raises:
        ScheduleError: a rank runs nothing, or a computation is there twice.
    """

    name: str
    ranks: tuple[tuple[Computation, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks or not all(self.ranks):
            raise ScheduleError(f"schedule {self.name}: a rank runs nothing; give each rank at least one computation")
        twice = [computation for computation, count in Counter(self.computations()).items() if count > 1]
        if twice:
            raise ScheduleError(f"schedule {self.name}: {twice[0]} is there twice; keep one")

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return 1 + max(computation.stage for computation in self.computations())

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        ranks = {computation.stage: rank for rank, program in enumerate(self.ranks) for computation in program}
        return tuple(ranks[stage] for stage in range(self.stages))

    @property
    def microbatches(self) -> int:
        """How many microbatches one iteration has."""
        return 1 + max(computation.microbatch for computation in self.computations())

    def computations(self) -> Iterator[Computation]:
        """All computations, rank by rank in program order."""
        for rank in self.ranks:
            yield from rank

    def __str__(self) -> str:
        return f"{self.name}, {self.stages} stages x {self.microbatches} microbatches"


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Non-interleaved 1F1B, as DeepSpeed's TrainSchedule and Megatron-core run it.

    Rank s runs `stages - 1 - s` warm-up forwards, then one forward and one backward in turn, then the
    remaining backwards (PipeDream-Flush; Narayanan et al., SC'21, section 2.2).

    Raises:
        ScheduleError: `stages` or `microbatches` is not a positive whole number.
    """
    stages, microbatches = _count("stages", stages), _count("microbatches", microbatches)
    ranks = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        order = [Computation(stage, "F", m) for m in range(warmup)]
        for m in range(microbatches - warmup):
            order += [Computation(stage, "F", warmup + m), Computation(stage, "B", m)]
        order += [Computation(stage, "B", m) for m in range(microbatches - warmup, microbatches)]
        ranks.append(tuple(order))
    return Schedule("1f1b", tuple(ranks))


def _count(name: str, value: int) -> int:
    count: int | None = COUNT.accept(value)
    if count is None:
        raise ScheduleError(f"{name} is {value!r}; give {COUNT.wanted}")
    return count
