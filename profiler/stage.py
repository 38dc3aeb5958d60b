"""A pipeline stage as the profiler sees it: functions that run its computations, its GPUs, and
its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import Measurement

T = TypeVar("T")

Run = Callable[[int], None]
"""Launches a computation the given number of times, back to back. The GPU may still be busy when
it returns.
"""

Block = Callable[[float], None]
"""Keeps the GPU waiting for a message from a neighbour stage for about the given number of
seconds.
"""

Progress = Callable[[int, int], None]
"""Called with the number of finished measurements and the total. The total may shrink; the last
call has them equal.
"""


@dataclass(frozen=True)
class TimedRun:
    """How one kind of computation is run to be measured."""

    run: Run  #: Runs the computation
    #: A kind of the same stage that each repetition of `run` also runs once. Its time and energy
    #: are subtracted: "F" where a backward cannot run without its forward. None if `run` runs
    #: nothing else.
    includes: str | None = None


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on one GPU, ready to be measured."""

    #: How to run each kind, named as in `Profile.measurements`. A kind comes after the one that it
    #: includes.
    runs: Mapping[str, TimedRun]
    #: Returns when the GPU has finished everything that was launched.
    synchronize: Callable[[], None]
    #: Blocks the GPU on its neighbour; None if the stage has no neighbour.
    block: Block | None = None


@dataclass(frozen=True)
class StageRows:
    """The measurements of one stage. It can be pickled, so ranks can send it to each other."""

    stage: int  #: The number of the stage
    #: Kind -> rows, highest setting first. Times are the longest of the stage's GPUs, energies
    #: sums.
    measurements: Mapping[str, tuple[Measurement, ...]]
    #: Power of the stage's GPUs while they wait for a neighbour, watts in all; None if the stage
    #: has no neighbour.
    blocking_power_w: float | None
    gpus: int  #: How many GPUs share the stage
    gpu: str  #: The name of these GPUs
    origin: str  #: "measured" or "simulated"
    control: str  #: What was set for each row
    #: How the rows were measured, as in `Profile.conditions`.
    conditions: Mapping[str, str] = field(default_factory=dict)


class GpuGroup(Protocol):
    """The GPUs that share a stage (tensor parallelism) and are measured in step."""

    @property
    def size(self) -> int:
        """The number of GPUs."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all GPUs, in the order of their ranks, once every GPU has given
        its own.
        """


class SingleGpu:
    """A group of one GPU."""

    size = 1

    def gather(self, value: T) -> list[T]:
        """Return `[value]`."""
        return [value]
