"""Under what conditions a simulated GPU runs: noise, counter steps, faults; as the options of its text.

    simulated:a100-sxm?seed=3&noise=0&fault=lost@30s&fault=not-supported:energy

Options stand after `?`, joined by `&`; `fault` may be repeated. Times are virtual, counted from opening.

seed=3                      which of the noises; equal seeds give equal numbers
slower=2000                 times as slow in all that it computes, at the same powers: a small model takes milliseconds
call=5ms                    how long each call takes that sets something; without it, as long as on an A800
noise=0.01                  relative standard deviation of the time, and of the power, of one computation
outliers=0.05               share of calls of `run` that take 5 to 30 % longer, as if something else ran too
step=100ms                  how often the energy counter moves; 0 for always
air=30                      temperature of the air, degrees Celsius
drift=0                     how many times as strongly static power follows temperature as in the catalogue
fault=not-permitted         nothing may be set
fault=not-supported:WHAT    has no WHAT: clocks, power-limit, energy, power, temperature or throttle
fault=lost@30s              falls off then; lost@200calls: after 200 calls of any kind
fault=throttled@30s-60s     hot from then to then: runs at 70 % of the clock that is set
fault=counter-stuck@30s     the energy counter stands still from then on
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from perseus_planner.errors import GpuError, UsageError
from perseus_planner.quantities import OVERHEAD, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOISE = 0.01
"""The noise where nothing else is asked for."""

FUNCTIONS = ("clocks", "power-limit", "energy", "power", "temperature", "throttle")
"""What a simulated GPU can be without."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong with a simulated GPU, and when, in seconds since it was opened.

    Attributes:
        not_permitted: nothing may be set.
        not_supported: those of `FUNCTIONS` that it does not have.
        lost_at_s: when it falls off.
        lost_after_calls: after how many calls of any kind it falls off.
        throttled_s: (start, end) of the spans in which it is hot.
        counter_stuck_at_s: from when on the energy counter stands still.
    """

    not_permitted: bool = False
    not_supported: frozenset[str] = frozenset()
    lost_at_s: float = math.inf
    lost_after_calls: float = math.inf
    throttled_s: tuple[tuple[float, float], ...] = ()
    counter_stuck_at_s: float = math.inf

    @classmethod
    def parsed(cls, texts: tuple[str, ...]) -> Faults:
        """The faults that `texts` write, together.

        Raises:
            GpuError: one of them is none; the text names the known.
        """
        faults = cls()
        for text in texts:
            for pattern, added in _FAULTS.items():
                if found := re.fullmatch(pattern, text):
                    faults = added(faults, *found.groups())
                    break
            else:
                raise GpuError(f"fault {text!r} is unknown; write one of: {', '.join(_FAULT_TEXTS)}")
        return faults

    def throttled_at(self, now_s: float) -> bool:
        """Whether it is hot then."""
        return any(start_s <= now_s < end_s for start_s, end_s in self.throttled_s)

    def next_s(self, now_s: float) -> float:
        """When the next of them comes or goes; infinite where none does."""
        moments_s = (self.lost_at_s, self.counter_stuck_at_s, *(each for span in self.throttled_s for each in span))
        return min((each for each in moments_s if each > now_s), default=math.inf)


def _not_supported(faults: Faults, what: str) -> Faults:
    if what not in FUNCTIONS:
        raise GpuError(f"fault 'not-supported:{what}': {what!r} is unknown; write one of: {', '.join(FUNCTIONS)}")
    return replace(faults, not_supported=faults.not_supported | {what})


def _lost_at(faults: Faults, when: str) -> Faults:
    return replace(faults, lost_at_s=min(faults.lost_at_s, _seconds(when)))


def _lost_after(faults: Faults, calls: str) -> Faults:
    return replace(faults, lost_after_calls=min(faults.lost_after_calls, int(calls)))


def _throttled(faults: Faults, start: str, end: str) -> Faults:
    span = (_seconds(start), _seconds(end))
    if span[0] >= span[1]:
        raise GpuError(f"fault 'throttled@{start}-{end}' ends before it begins; write the earlier time first")
    return replace(faults, throttled_s=(*faults.throttled_s, span))


def _counter_stuck(faults: Faults, when: str) -> Faults:
    return replace(faults, counter_stuck_at_s=min(faults.counter_stuck_at_s, _seconds(when)))


_FAULTS: Mapping[str, Callable[..., Faults]] = MappingProxyType(
    {
        "not-permitted": lambda faults: replace(faults, not_permitted=True),
        "not-supported:(.*)": _not_supported,
        r"lost@([0-9]{1,18})calls": _lost_after,
        "lost@(.+)": _lost_at,
        "throttled@([^-]+)-([^-]+)": _throttled,
        "counter-stuck@(.+)": _counter_stuck,
    }
)
_FAULT_TEXTS = (
    "not-permitted",
    "not-supported:energy",
    "lost@30s",
    "lost@200calls",
    "throttled@30s-60s",
    "counter-stuck@30s",
)


def _seconds_rule(what: str, example: str) -> Rule:
    return Rule(float, True, f"{what}: write seconds, or a number with ms or s, such as {example}")


class _Bounds(NamedTuple):
    """What a field of `SimulationOptions` must be, and the least and the greatest that it may be."""

    rule: Rule
    least: float
    most: float


_RULES: Mapping[str, _Bounds] = MappingProxyType(
    {
        "slower": _Bounds(
            Rule(float, False, "a slowdown: write how many times as slow, from 0.001 to 1e6, such as 2000"), 1e-3, 1e6
        ),
        "call_s": _Bounds(_seconds_rule("the time of a call", "5ms"), 0.0, math.inf),
        "noise": _Bounds(Rule(float, True, "a noise: write a share from 0 to 0.2, such as 0.01"), 0.0, 0.2),
        "outliers": _Bounds(
            Rule(float, True, "a share of outliers: write a number from 0 to 1, such as 0.05"), 0.0, 1.0
        ),
        "step_s": _Bounds(_seconds_rule("a counter step", "100ms"), 0.0, math.inf),
        "air_c": _Bounds(
            Rule(float, True, "a temperature of the air: write degrees Celsius from 0 to 60, such as 30"), 0.0, 60.0
        ),
        "drift": _Bounds(Rule(float, True, "a multiple of the drift: write a number from 0 to 3, such as 0"), 0.0, 3.0),
    }
)


@dataclass(frozen=True)
class SimulationOptions:
    """The options of the module's text, but for the seed.

    Attributes:
        slower: times as slow as the catalogue's in all that it computes.
        call_s: how long a call takes that sets something, seconds; None: as long as on an A800.
        noise: relative standard deviation of the time, and of the power, of one computation.
        outliers: share of calls of `run` that take 5 to 30 % longer.
        step_s: how often the energy counter moves, seconds; 0 for always.
        air_c: temperature of the air, degrees Celsius.
        drift: multiple of the catalogue's dependence of static power on temperature.
        fault: each as it is written, such as "lost@30s".
        faults: the same, read.

    Raises:
        GpuError: a value is out of bounds, or a fault is none; the text says what may be.
    """

    slower: float = 1.0
    call_s: float | None = None
    noise: float = NOISE
    outliers: float = 0.0
    step_s: float = 0.1
    air_c: float = 30.0
    drift: float = 1.0
    fault: tuple[str, ...] = ()
    faults: Faults = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, (rule, least, most) in _RULES.items():
            given = getattr(self, name)
            if name == "call_s" and given is None:
                continue
            value = rule.accept(given)
            if value is None or not least <= value <= most:
                raise GpuError(f"{given!r} is not {rule.wanted}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "faults", Faults.parsed(self.fault))


_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "slower": "slower",
        "call": "call_s",
        "noise": "noise",
        "outliers": "outliers",
        "step": "step_s",
        "air": "air_c",
        "drift": "drift",
    }
)
"""Option -> field of `SimulationOptions`."""


def parse_options(text: str, default: SimulationOptions | None = None) -> tuple[int, SimulationOptions]:
    """The seed and the conditions that `text`, what stands after `?`, writes; what it leaves out is as in `default`.

    Raises:
        GpuError: an option is unknown, is there twice or has no such value; the text says which are known.
    """
    values: dict[str, str] = {}
    faults: list[str] = []
    for option in text.split("&") if text else ():
        name, _, value = option.partition("=")
        if name == "fault":
            faults.append(value)
        elif name not in ("seed", *_FIELDS):
            raise GpuError(f"option {name!r} is unknown; choose from: seed, {', '.join(_FIELDS)}, fault")
        elif name in values:
            raise GpuError(f"option {name!r} is there twice; write it once")
        else:
            values[name] = value
    seed = values.pop("seed", "0")
    if not re.fullmatch("-?[0-9]{1,18}", seed):
        raise GpuError(f"{seed!r} is not a seed: write a whole number, such as 3")
    numbers: dict[str, Any] = {_FIELDS[name]: _number(name, value) for name, value in values.items()}
    return int(seed), replace(default or SimulationOptions(), **numbers, fault=tuple(faults))


def _number(name: str, text: str) -> float:
    rule = _RULES[_FIELDS[name]].rule
    if _FIELDS[name].endswith("_s") and re.search("[a-z]", text):
        return _seconds(text)
    value: float | None = rule.parse(text)
    if value is None:
        raise GpuError(f"{text!r} is not {rule.wanted}")
    return value


def format_options(seed: int, conditions: SimulationOptions, default: SimulationOptions | None = None) -> str:
    """What `parse_options` reads as these; what is as in `default` is left out."""
    default = default or SimulationOptions()
    options = [f"seed={seed}"] if seed else []
    for name, target in _FIELDS.items():
        if getattr(conditions, target) != getattr(default, target):
            options.append(f"{name}={format_number(getattr(conditions, target))}")
    return "&".join([*options, *(f"fault={fault}" for fault in conditions.fault)])


def format_number(value: float) -> str:
    """`value` so that it is read as the very same: 2000, 0.01."""
    return repr(value).removesuffix(".0")


def _seconds(text: str) -> float:
    try:
        return OVERHEAD.parse(text, "time")
    except UsageError as error:
        raise GpuError(str(error)) from None
