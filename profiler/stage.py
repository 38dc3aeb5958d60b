"""A pipeline stage as the profiler sees it: functions that run its computations, its GPUs, and
its rows, which make the profile of the pipeline together with those of the other stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from perseus_planner.base import __version__
from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.groups import common_origin, one_or_each
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.modes import SHARED_BY, Mode, Modes
from perseus_planner.profiles.profiles import Profile

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

Repeating = Callable[[], AbstractContextManager[None]]
"""Watches the repetition of a computation that runs inside its block."""

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

    #: How to run each kind in each mode, by `Key.name`. A kind comes after the one that it
    #: includes.
    runs: Mapping[str, TimedRun]
    #: Returns when the GPU has finished everything that was launched.
    synchronize: Callable[[], None]
    #: Blocks the GPU on its neighbour; None if the stage has no neighbour.
    block: Block | None = None
    #: The other kinds, which run nothing: B where all weights of the first stage are frozen.
    without_work: tuple[str, ...] = ()
    #: Mode -> the bytes that a microbatch keeps from its forward to its backward, and those that
    #: the backward takes besides; empty if they were not measured.
    memory: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shared_by: str = SHARED_BY[0]  #: As in `Modes`, as its modes say
    reordering: tuple[str, ...] = ()  #: The modes that may change the order of a sum


@dataclass(frozen=True)
class StageRows:
    """The measurements of one stage. It can be pickled, so ranks can send it to each other."""

    stage: int  #: The number of the stage
    #: `Key.name` -> rows, highest setting first. Times are the longest of the stage's GPUs,
    #: energies those of a replica's GPUs together, in the mean of the replicas.
    measurements: Mapping[str, tuple[Measurement, ...]]
    #: Power of a replica's GPUs while they wait for a neighbour, watts in all; None if the stage
    #: has no neighbour.
    blocking_power_w: float | None
    gpus: int  #: How many GPUs a replica of the stage has
    gpu: str  #: The name of these GPUs
    origin: str  #: "measured" or "simulated"
    control: str  #: What was set for each row
    #: The relative errors that all rows share, of times and of energies; see `Profile`.
    shared_errors: tuple[float, float] = (0.0, 0.0)
    #: How far its replicas were apart, as `Profile.gpu_spread`; None if there is one.
    gpu_spread: float | None = None
    #: As `Stage.memory`, the most of the stage's GPUs.
    memory: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    shared_by: str = SHARED_BY[0]  #: As in `Stage`
    reordering: tuple[str, ...] = ()  #: As in `Stage`
    #: How the rows were measured, as in `Profile.conditions`.
    conditions: Mapping[str, str] = field(default_factory=dict)


class GpuGroup(Protocol):
    """The GPUs that hold a stage and are measured in step: its data-parallel replicas, each on one
    GPU or on several (tensor parallelism).
    """

    @property
    def size(self) -> int:
        """The number of GPUs of a replica."""

    @property
    def replicas(self) -> Sequence[str]:
        """The names of the replicas."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all GPUs, replica by replica in the order of their ranks, once every
        GPU has given its own.
        """


class SingleGpu:
    """A group of one GPU."""

    size = 1
    replicas = ("the GPU",)
    is_first = True

    def gather(self, value: T) -> list[T]:
        """Return `[value]`."""
        return [value]


def assemble_profile(
    stages: Sequence[StageRows],
    *,
    blocking_power_w: float | None = None,
    iteration: Mapping[str, str | int] | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Profile:
    """Return the profile of a pipeline.

    Args:
        stages: The rows of each stage, in any order.
        blocking_power_w: Power of one waiting GPU, watts, instead of what was measured. Without it,
            a stage whose power was not measured gets the mean, per GPU, of the others.
        iteration: As in `Profile.iteration`.
        conditions: Conditions to record besides those of the stages, such as the date.

    Raises:
        ProfileError: If a stage is missing or measured twice, if stages were measured in different
            ways, or if no blocking power is known.
    """
    # Ranks hand their rows over in any order.
    stages = sorted(stages, key=lambda rows: rows.stage)
    _check_stages(stages)
    powers_w = _powers_w(stages, blocking_power_w)
    measurements = {
        Key.named(stage.stage, kind): rows
        for stage in stages
        for kind, rows in stage.measurements.items()
    }
    return Profile(
        measurements,
        one_or_each(powers_w),
        gpu=" + ".join(dict.fromkeys(stage.gpu for stage in stages)),
        origin=common_origin(stage.origin for stage in stages),
        gpus_per_stage=stages[0].gpus,
        control=stages[0].control,
        shared_time_error=one_or_each(stage.shared_errors[0] for stage in stages),
        shared_energy_error=one_or_each(stage.shared_errors[1] for stage in stages),
        gpu_spread=together([stage.gpu_spread for stage in stages if stage.gpu_spread is not None]),
        modes=_modes(stages, measurements),
        iteration=iteration or {},
        conditions={**(conditions or {}), "planner": __version__, **_merge_conditions(stages)},
    )


def _modes(stages: Sequence[StageRows], keys: Iterable[Key]) -> Modes | None:
    """Return the modes that were measured, with the memory that each stage takes in them, and what
    they say of themselves. None if there is one way of running.
    """
    names = dict.fromkeys(key.mode for key in keys)
    if len(names) <= 1:
        return None
    ways = {}
    for name in names:
        # If the sums of one stage change their order, those of the training do.
        ways[name] = Mode(reorders=any(name in stage.reordering for stage in stages))
        if all(name in stage.memory for stage in stages):
            kept, more = zip(*(stage.memory[name] for stage in stages), strict=True)
            ways[name] = replace(ways[name], kept_bytes=kept, backward_bytes=more)
    return Modes(ways, max((stage.shared_by for stage in stages), key=SHARED_BY.index))


def together(spreads: Sequence[float]) -> float | None:
    """Return one relative standard deviation of several, their root mean square; None of none."""
    squares = [spread**2 for spread in spreads]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None


def with_one_power(rows: Sequence[StageRows]) -> list[StageRows]:
    """Return the rows of the stages of one GPU, which waits for all of them at the mean of the
    measured powers.
    """
    powers_w = [stage.blocking_power_w for stage in rows if stage.blocking_power_w is not None]
    return [
        replace(stage, blocking_power_w=math.fsum(powers_w) / len(powers_w) if powers_w else None)
        for stage in rows
    ]


def _check_stages(stages: Sequence[StageRows]) -> None:
    if not stages:
        raise ProfileError("no stage was measured; give at least one")
    for stage in stages:
        for name in ("control", "gpus"):
            if getattr(stage, name) != getattr(stages[0], name):
                raise ProfileError(
                    f"stage {stages[0].stage} and stage {stage.stage} differ in {name}; measure "
                    "both alike"
                )
    numbers = [stage.stage for stage in stages]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise ProfileError(f"stage {twice} was measured twice; give it once")


def _powers_w(stages: Sequence[StageRows], blocking_power_w: float | None) -> tuple[float, ...]:
    """Return the power of each stage's GPUs while they wait."""
    if blocking_power_w is not None:
        return tuple(blocking_power_w * stage.gpus for stage in stages)
    powers_w = [stage.blocking_power_w for stage in stages]
    # Per GPU, as what is given for one is.
    of_one_w = [
        power_w / stage.gpus
        for stage, power_w in zip(stages, powers_w, strict=True)
        if power_w is not None
    ]
    if not of_one_w:
        raise ProfileError(
            "the blocking power was not measured, as no stage has a neighbour to wait for; "
            "give it with --blocking-power W (in Python blocking_power_w=)"
        )
    mean_w = math.fsum(of_one_w) / len(of_one_w)
    return tuple(
        mean_w * stage.gpus if power_w is None else power_w
        for stage, power_w in zip(stages, powers_w, strict=True)
    )


def _merge_conditions(stages: Sequence[StageRows]) -> dict[str, str]:
    """Return the conditions of all stages: once where they agree, else stage by stage."""
    merged = {}
    for name in dict.fromkeys(name for rows in stages for name in rows.conditions):
        texts = {rows.stage: rows.conditions[name] for rows in stages if name in rows.conditions}
        agree = len(set(texts.values())) == 1 and len(texts) == len(stages)
        by_stage = "; ".join(f"stage {stage}: {text}" for stage, text in texts.items())
        merged[name] = next(iter(texts.values())) if agree else by_stage
    return merged
