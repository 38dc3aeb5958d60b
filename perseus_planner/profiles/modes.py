"""Modes: the ways in which a computation can run, such as with activation recompute.

A computation runs in the training's own way, `OWN`, unless a plan has chosen another mode for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from perseus_planner.base.errors import PlannerError, ProfileError, shown
from perseus_planner.base.fields import Checked, CheckedBy, Choice, restore, types
from perseus_planner.base.units import BYTES, Wait

OWN = "own"
"""The training's own way, in files and for adapters."""
SHARED_BY = ("computation", "microbatch", "stage", "pipeline")
_NAME = re.compile(r"[a-z0-9_-]+")
Bytes = Annotated[float, BYTES]


def _checked_flag(value: Any, where: str, error: type[PlannerError]) -> bool:
    if isinstance(value, bool):
        return value
    raise error(f"{where}: {shown(value)} is not true or false; write one of them")


Flag = Annotated[bool, CheckedBy(_checked_flag)]


@dataclass(frozen=True)
class ModeFunction:
    """A function that has the next computations run in a mode, with what is to be known of the
    mode. A function without it is one whose mode each computation may have for itself.
    """

    enter: Callable[[], None]
    shared_by: str = "computation"  #: as `Modes.shared_by`
    reorders: bool = False  #: as `Mode.reorders`
    takes_memory: bool = False  #: whether it may take more memory than the training's own way
    #: Whether all ranks of a stage enter it for the same computations, or they would wait for each
    #: other for ever: what else a rank meets does not keep it from entering it. It must not raise.
    is_of_group: bool = False

    def __call__(self) -> None:
        """Enter it."""
        self.enter()


ModeFunctions = Mapping[str, Callable[[], None]]
"""Mode -> what has the next computations run in it, which may be a `ModeFunction`."""


def shared_by(functions: ModeFunctions) -> str:
    """Return which computations have one mode together: the most that any of the modes says."""
    # The modes of one training share their program, so the widest tie holds for all.
    said = (getattr(function, "shared_by", SHARED_BY[0]) for function in functions.values())
    return max(said, key=SHARED_BY.index, default=SHARED_BY[0])


def reordering(functions: ModeFunctions) -> tuple[str, ...]:
    """Return the modes that may change the order of a sum."""
    return tuple(
        name for name, function in functions.items() if getattr(function, "reorders", False)
    )


def is_mode_name(name: object) -> bool:
    """Return whether a mode may have this name: lower-case letters, digits, hyphens and
    underscores.
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _checked_settings(value: Any, where: str, error: type[PlannerError]) -> Mapping[str, str]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return MappingProxyType({key: str(setting) for key, setting in value.items()})
    raise error(f"{where}: {shown(value)} is not a mapping: write `name: value`, one on each line")


@dataclass(frozen=True)
class Mode(Checked, error=ProfileError):
    """What one mode sets, and the memory that it takes on each GPU.

    Raises:
        ProfileError: If a value is out of range.
    """

    #: what the training sets for it, such as `recompute: full`: for people, and for adapters that
    #: know it.
    sets: Annotated[Mapping[str, str], CheckedBy(_checked_settings)] = field(default_factory=dict)
    #: what a microbatch keeps from its forward to the end of its backward, bytes; or one number for
    #: each stage.
    kept_bytes: Bytes | tuple[Bytes, ...] | None = None
    #: what its backward takes besides, such as activations that are computed again, bytes; or one
    #: number for each stage.
    backward_bytes: Bytes | tuple[Bytes, ...] = 0.0
    #: whether it may change the order of a sum, and so the last bits of losses.
    reorders: Flag = False

    def bytes_of(self, stage: int) -> tuple[float, float]:
        """Return what is kept, and what the backward takes besides, on each GPU of a stage."""
        of_stage = [
            amount[stage] if isinstance(amount, tuple) else amount or 0.0
            for amount in (self.kept_bytes, self.backward_bytes)
        ]
        return of_stage[0], of_stage[1]


def _checked_ways(value: Any, where: str, error: type[PlannerError]) -> Mapping[str, Mode]:
    # A profile's modes come from YAML, so all that can be malformed is refused here.
    if not isinstance(value, Mapping) or not value:
        raise error(f"{where}: {shown(value)} is not a mapping of modes: write `recompute: {{}}`")
    ways = {}
    for name, mode in value.items():
        if not is_mode_name(name):
            raise error(
                f"{where}: {shown(name)} is not the name of a mode; write lower-case letters, "
                "digits, - and _"
            )
        if isinstance(mode, Mode):
            ways[name] = mode
            continue
        if not isinstance(mode, Mapping) or mode.keys() - types(Mode).keys():
            raise error(
                f"{where}, {name}: {shown(mode)} is not a mode; write it with the keys "
                f"{', '.join(types(Mode))}"
            )
        try:
            ways[name] = restore(Mode, mode)
        except PlannerError as problem:
            raise error(f"{where}, {name}, {problem}") from None
    # The own way comes first, also where nobody has described it.
    return MappingProxyType({OWN: ways.pop(OWN, Mode()), **ways})


@dataclass(frozen=True)
class Modes(Checked, error=ProfileError, prefix="modes, "):
    """The modes of a profile, and what ties the modes of computations to each other.

    Raises:
        ProfileError: If a value is out of range, or a memory limit lacks what modes keep.
    """

    #: name -> what it sets; the own way comes first.
    ways: Annotated[Mapping[str, Mode], CheckedBy(_checked_ways)]
    #: which computations have one mode together: each "computation" its own; forward and backward
    #: of a "microbatch" in a stage, as recompute needs; all of a "stage"; or all of the "pipeline".
    shared_by: Annotated[str, Choice(*SHARED_BY)] = "computation"
    #: what a change of the mode takes between two computations of a rank, seconds. Between two
    #: iterations it takes nothing.
    change_s: Wait = 0.0
    #: the most that activations may take on each GPU, bytes; or one number for each stage. None
    #: without a limit.
    memory_bytes: Bytes | tuple[Bytes, ...] | None = None
    #: whether plans may use modes that may change the order of a sum.
    may_reorder: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_bytes is None:
            return
        # A limit cannot be kept by modes whose memory is not known.
        for name, mode in self.ways.items():
            if mode.kept_bytes is None:
                raise ProfileError(
                    f"modes, ways, {name}, kept_bytes: is missing, and memory_bytes limits it; "
                    "measure it with `planner profile --modes`, give it, or leave the limit out"
                )

    @property
    def usable(self) -> list[str]:
        """The modes that plans may use, the own way first."""
        return [
            name
            for name, mode in self.ways.items()
            if self.may_reorder or not mode.reorders or name == OWN
        ]

    @property
    def are_tied(self) -> bool:
        """Whether the mode of a computation depends on those of others."""
        # Each of the three makes one choice depend on another, so none can be made alone.
        return self.shared_by != "computation" or self.memory_bytes is not None or self.change_s > 0

    def of_stages(self) -> list[Any]:
        """Return every number of bytes that may be one for each stage."""
        ways = self.ways.values()
        return [
            self.memory_bytes,
            *(mode.kept_bytes for mode in ways),
            *(mode.backward_bytes for mode in ways),
        ]

    def limit_bytes(self, stage: int) -> float | None:
        """Return the memory limit of a stage's GPUs, bytes."""
        limit = self.memory_bytes
        return limit[stage] if isinstance(limit, tuple) else limit
