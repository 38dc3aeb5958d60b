"""What ranks and the controller say to each other: values here, one line of JSON each on the way.

    {"message":"Changed","place":3,"value":1200,"seen_ns":…,"begun_ns":…,"ended_ns":…,"before_mhz":1410}

All times are nanoseconds of the monotonic clock, which the processes of a node share.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST = 65536
"""Bytes of a line, at most."""

Knob = Literal["clock", "power-limit", "observed"]
"""What a rank's values are: MHz of a clock, watts of a power limit, or nothing that is ever set."""


@dataclass(frozen=True)
class Hello:
    """A rank's first words, which come with its page.

    Attributes:
        rank: its number, by which messages name it.
        gpu: what the controller opens with `open_gpu`; it runs in the environment of the rank that started it.
        control: what the rank's values are.
        launcher: the process whose end ends the job; None or 0: there is none that can be seen.
        min_dwell_s: for how long a value is kept at least, seconds.

    Raises:
        UsageError: a value is not of that kind.
    """

    rank: int
    gpu: str
    control: Knob
    launcher: int | None
    min_dwell_s: float

    def __post_init__(self) -> None:
        if self.rank < 0 or (self.launcher or 0) < 0:
            raise UsageError(f"rank {self.rank} with launcher {self.launcher}: give whole numbers of 0 or more")
        if self.control not in get_args(Knob):
            raise UsageError(f"{self.control!r} is not a control; choose one of: {', '.join(get_args(Knob))}")
        _check_dwell(self.min_dwell_s)


@dataclass(frozen=True)
class Dwell:
    """From now on a rank's values are kept for `min_dwell_s` at least.

    Raises:
        UsageError: it is no time.
    """

    min_dwell_s: float

    def __post_init__(self) -> None:
        _check_dwell(self.min_dwell_s)


@dataclass(frozen=True)
class Leave:
    """A rank's last words: its GPU is to be reset."""


@dataclass(frozen=True)
class Attached:
    """The controller's answer to `Hello`: it has this GPU, of which these are `text`, `uuid`, `name` and `origin`."""

    gpu: str
    uuid: str
    name: str
    origin: str


@dataclass(frozen=True)
class Refused:
    """The other answer: it does not, because of `error`, a class of errors.py."""

    error: str
    text: str


@dataclass(frozen=True)
class Changed:
    """A rank's GPU was set.

    Attributes:
        place: of its program, where the rank was when it first asked for this; None where it asked for no value.
        value: MHz, or watts; 0 where the GPU was reset.
        seen_ns: when the controller saw that this is asked for.
        begun_ns, ended_ns: when the call that sets it began and returned.
        before_mhz: the clock that was achieved right before; None where the GPU does not say.
    """

    place: int | None
    value: int
    seen_ns: int
    begun_ns: int
    ended_ns: int
    before_mhz: int | None


@dataclass(frozen=True)
class Reading:
    """What a rank's GPU says: when the rank has come, at the start of each of its iterations, and when it leaves.

    Attributes:
        seen_ns: when the controller saw that the iteration begins.
        now_ns: when it asked for the energy, first of all that follows.
        energy_j: energy counter, joules; only differences mean anything. None where there is none, as for the others.
        clock_mhz: achieved clock.
        power_w: power, watts.
        temperature_c: core temperature, degrees Celsius.
        throttled_s: reason -> seconds for which it has held; only differences mean anything.
        overtaken: how many changes that this rank asked for were overtaken by its next one before they could be set.
        untold: how many messages it was not told because it had not read those before.
    """

    seen_ns: int
    now_ns: int
    energy_j: float | None
    clock_mhz: int | None
    power_w: float | None
    temperature_c: float | None
    throttled_s: Mapping[str, float]
    overtaken: int = 0
    untold: int = 0


@dataclass(frozen=True)
class Failed:
    """A rank's GPU is reset as far as possible, for the reason in `text`; nothing is set for it any more."""

    text: str


@dataclass(frozen=True)
class Left:
    """The answer to `Leave`: the GPU is reset; `problem` says why it is not."""

    problem: str | None


FromRank: TypeAlias = Hello | Dwell | Leave
ToRank: TypeAlias = Attached | Refused | Changed | Reading | Failed | Left
Message: TypeAlias = FromRank | ToRank

_KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in (*get_args(FromRank), *get_args(ToRank))}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "str": (str,),
    "str | None": (str, type(None)),
    "Knob": (str,),
    "Mapping[str, float]": (dict,),
}


def encoded(message: Message) -> bytes:
    """One line."""
    content = {"message": type(message).__name__, **asdict(message)}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes) -> Message:
    """Inverse of `encoded`; takes exactly what that gives.

    Raises:
        ValueError: `line` is no message; says why.
    """
    try:
        content = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    kind = _KINDS.get(str(content.pop("message", None))) if isinstance(content, dict) else None
    if kind is None:
        raise ValueError(f"it is not one of {', '.join(_KINDS)}")
    types = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    if content.keys() != types.keys():
        raise ValueError(f"the fields of {kind.__name__} are {', '.join(types) or 'none'}")
    for name, value in content.items():
        _check(value, types[name], f"{kind.__name__}.{name}")
    try:
        return kind(**content)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _check(value: Any, types: tuple[type, ...], what: str) -> None:
    if type(value) not in types or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{what} is of another type")
    if isinstance(value, dict):
        for each in value.values():
            _check(each, (float, int), what)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _check_dwell(min_dwell_s: float) -> None:
    if not (math.isfinite(min_dwell_s) and min_dwell_s >= 0.0):
        raise UsageError(f"a dwell of {min_dwell_s} s: give finite seconds of 0 or more")
