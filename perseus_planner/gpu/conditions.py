"""Under what conditions a simulated GPU runs: noise, counter steps, faults; as the options of its text.

    simulated:a100-sxm?seed=3&noise=0&fault=lost@30s&fault=not-supported:energy

Options stand after `?`, joined by `&`; `fault` may be repeated. Times are virtual, counted from opening.

seed=3                      which of the noises; equal seeds give equal numbers
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from perseus_planner.errors import GpuError, UsageError
from perseus_planner.quantities import OVERHEAD, STAGE, TEMPERATURE, Rule

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
        r"lost@([0-9]+)calls": _lost_after,
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


@dataclass(frozen=True)
class Conditions:
    """The options of the module's text, but for the seed.

    Attributes:
        noise: relative standard deviation of the time, and of the power, of one computation.
        outliers: share of calls of `run` that take 5 to 30 % longer.
        step_s: how often the energy counter moves, seconds; 0 for always.
        air_c: temperature of the air, degrees Celsius.
        drift: multiple of the catalogue's dependence of static power on temperature.
        fault: each as it is written, such as "lost@30s".

    Raises:
        GpuError: a fault is none; the text names the known.
    """

    noise: float = NOISE
    outliers: float = 0.0
    step_s: float = 0.1
    air_c: float = 30.0
    drift: float = 1.0
    fault: tuple[str, ...] = ()
    faults: Faults = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", Faults.parsed(self.fault))


_SHARE = Rule(float, True, "a share: write a number from 0 to 1, such as 0.01")
_MULTIPLE = Rule(float, True, "a multiple: write a number of 0 or more, such as 0.5")


def _share(text: str) -> float | None:
    share: float | None = _SHARE.parse(text)
    return share if share is not None and share <= 1 else None


_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any], str]] = MappingProxyType(
    {
        "seed": ("seed", STAGE.parse, "a seed: write a whole number of 0 or more, such as 3"),
        "noise": ("noise", _share, _SHARE.wanted),
        "outliers": ("outliers", _share, _SHARE.wanted),
        "step": ("step_s", lambda text: _seconds(text), ""),
        "air": ("air_c", TEMPERATURE.parse, TEMPERATURE.wanted),
        "drift": ("drift", _MULTIPLE.parse, _MULTIPLE.wanted),
    }
)


def parsed(text: str) -> tuple[int, Conditions]:
    """The seed and the conditions that `text`, what stands after `?`, writes.

    Raises:
        GpuError: an option is unknown, is there twice or has no such value; the text says which are known.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for option in text.split("&") if text else ():
        name, _, value = option.partition("=")
        if name == "fault":
            faults.append(value)
            continue
        if name not in _OPTIONS:
            raise GpuError(f"option {name!r} is unknown; choose from: {', '.join((*_OPTIONS, 'fault'))}")
        target, parse, wanted = _OPTIONS[name]
        if target in values:
            raise GpuError(f"option {name!r} is there twice; write it once")
        values[target] = parse(value)
        if values[target] is None:
            raise GpuError(f"option {name!r}: {value!r} is not {wanted}")
    return values.pop("seed", 0), Conditions(**values, fault=tuple(faults))


def written(seed: int, conditions: Conditions) -> str:
    """What `parsed` reads as these; what is at its default is left out."""
    default = Conditions()
    values = {
        "seed": seed,
        **{target: getattr(conditions, target) for target, *_ in _OPTIONS.values() if target != "seed"},
    }
    known = {"seed": 0, **vars(default)}
    options = [
        f"{name}={values[target]!r}" for name, (target, *_) in _OPTIONS.items() if values[target] != known[target]
    ]
    return "&".join([*options, *(f"fault={fault}" for fault in conditions.fault)])


def _seconds(text: str) -> float:
    try:
        return OVERHEAD.parse(text, "time")
    except UsageError as error:
        raise GpuError(str(error)) from None
