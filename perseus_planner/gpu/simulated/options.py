"""Options of a simulated GPU: noise, counter steps, faults.

    simulated:a100-sxm?seed=3&noise=0&fault=lost@30s&fault=not-supported:energy

Options follow `?`, separated by `&`; `fault` may be repeated. Times are virtual, counted from
opening the GPU.

seed=3                    seed of the noise; equal seeds give equal numbers
slower=2000               factor that slows all computation down at the same power: a small model
                          takes milliseconds
call=5ms                  duration of each call that sets something; by default, that of an A800
noise=0.01                relative standard deviation of the time, and of the power, of one
                          computation
outliers=0.05             share of calls of `run` that take 5 to 30 % longer, as if something else
                          ran too
step=100ms                how often the energy counter moves; 0 for continuously
air=30                    air temperature, degrees Celsius
drift=0                   how strongly static power follows the temperature, as a multiple of the
                          catalog's value
fault=not-permitted       nothing may be set
fault=not-supported:WHAT  WHAT is missing: clocks, power-limit, energy, power, temperature or
                          throttle
fault=lost@30s            the GPU falls off the bus then; lost@200calls: after 200 calls of any kind
fault=throttled@30s-60s   the GPU is hot in that span: it runs at 70 % of the clock that is set
fault=counter-stuck@30s   the energy counter stands still from then on
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Annotated, Any

from perseus_planner.base.errors import GpuError, PlannerError
from perseus_planner.base.fields import Checked, rules
from perseus_planner.base.units import LAG, Rule

NOISE = 0.01
"""Default noise."""

FUNCTIONS = ("clocks", "power-limit", "energy", "power", "temperature", "throttle")
"""What the fault `not-supported` can remove from a simulated GPU."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong with a simulated GPU, with times in seconds since it was opened."""

    is_permitted: bool = True  #: Whether anything may be set
    not_supported: tuple[str, ...] = ()  #: Members of `FUNCTIONS` that are missing
    lost_at_s: float = math.inf  #: When the GPU falls off the bus
    lost_after_calls: float = math.inf  #: After how many calls of any kind it falls off the bus
    #: (start, end) of the spans in which it is hot.
    throttled_s: tuple[tuple[float, float], ...] = ()
    counter_stuck_at_s: float = math.inf  #: When the energy counter stops

    def and_(self, text: str) -> Faults:
        """Return these faults and the one in `text`; the earlier one counts of two of a kind.

        Raises:
            PlannerError: If the fault is unknown; the text lists the known ones.
        """
        for pattern, (name, read) in _FAULTS.items():
            if match := re.fullmatch(pattern, text):
                # Faults of a list add up; of moments the earlier one comes first, and permission
                # once taken is gone (False < True).
                before = getattr(self, name)
                value = read(*match.groups())
                both: Any = (*before, value) if isinstance(before, tuple) else min(before, value)
                return replace(self, **{name: both})
        raise GpuError(f"fault {text!r} is unknown; write one of: {', '.join(_FAULT_EXAMPLES)}")

    def throttled_at(self, now_s: float) -> bool:
        """Return whether the GPU is hot at that time."""
        return any(start_s <= now_s < end_s for start_s, end_s in self.throttled_s)

    def next_s(self, now_s: float) -> float:
        """Return when the next fault begins or ends; infinite if there is none."""
        times_s = (
            self.lost_at_s,
            self.counter_stuck_at_s,
            *(time_s for span in self.throttled_s for time_s in span),
        )
        return min((time_s for time_s in times_s if time_s > now_s), default=math.inf)


def _function(name: str) -> str:
    if name not in FUNCTIONS:
        raise GpuError(
            f"fault 'not-supported:{name}': {name!r} is unknown; write one of: "
            f"{', '.join(FUNCTIONS)}"
        )
    return name


def _span(start: str, end: str) -> tuple[float, float]:
    span = (_seconds(start), _seconds(end))
    if span[0] >= span[1]:
        raise GpuError(
            f"fault 'throttled@{start}-{end}' ends before it begins; write the earlier time first"
        )
    return span


_seconds = partial(LAG.read, name="time")
_FAULTS: Mapping[str, tuple[str, Callable[..., Any]]] = MappingProxyType(
    {
        "not-permitted": ("is_permitted", lambda: False),
        "not-supported:(.*)": ("not_supported", _function),
        r"lost@([0-9]{1,18})calls": ("lost_after_calls", int),
        "lost@(.+)": ("lost_at_s", _seconds),
        "throttled@([^-]+)-([^-]+)": ("throttled_s", _span),
        "counter-stuck@(.+)": ("counter_stuck_at_s", _seconds),
    }
)
"""Text of a fault -> its field in `Faults`, and what reads its value."""

_FAULT_EXAMPLES = (
    "not-permitted",
    "not-supported:energy",
    "lost@30s",
    "lost@200calls",
    "throttled@30s-60s",
    "counter-stuck@30s",
)


def _seconds_rule(what: str, example: str) -> Rule:
    return Rule(float, True, f"{what}: write seconds, or a number with ms or s, such as {example}")


_SLOWER = "a slowdown: write a factor from 0.001 to 1e6, such as 2000"
_NOISE = "a noise: write a share from 0 to 0.2, such as 0.01"
_OUTLIERS = "a share of outliers: write a number from 0 to 1, such as 0.05"
_AIR = "an air temperature: write degrees Celsius from 0 to 60, such as 30"
_DRIFT = "a multiple of the drift: write a number from 0 to 3, such as 0"


@dataclass(frozen=True)
class SimulationOptions(Checked, error=GpuError):
    """The options of a simulated GPU, except its seed.

    Raises:
        PlannerError: If a value is out of bounds, or a fault is unknown; the text says what is
            allowed.
    """

    #: Factor by which all computation is slower than in the catalog.
    slower: Annotated[float, Rule(float, False, _SLOWER, most=1e6, least=1e-3)] = 1.0
    #: Duration of a call that sets something, seconds; None for that of an A800.
    call_s: Annotated[float, _seconds_rule("a duration of a call", "5ms")] | None = None
    #: Relative standard deviation of the time, and of the power, of one computation.
    noise: Annotated[float, Rule(float, True, _NOISE, most=0.2)] = NOISE
    #: Share of calls of `run` that take 5 to 30 % longer.
    outliers: Annotated[float, Rule(float, True, _OUTLIERS, most=1.0)] = 0.0
    #: How often the energy counter moves, seconds; 0 for continuously.
    step_s: Annotated[float, _seconds_rule("a counter step", "100ms")] = 0.1
    #: Air temperature, degrees Celsius.
    air_c: Annotated[float, Rule(float, True, _AIR, most=60.0)] = 30.0
    #: Multiple of the catalog's dependence of static power on temperature.
    drift: Annotated[float, Rule(float, True, _DRIFT, most=3.0)] = 1.0
    fault: tuple[str, ...] = ()  #: Faults as text, such as "lost@30s"
    faults: Faults = field(init=False, compare=False, repr=False)  #: The same faults, parsed

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "faults", reduce(Faults.and_, self.fault, Faults()))


DEFAULT = SimulationOptions()

_OPTIONS: Mapping[str, tuple[str, Rule]] = MappingProxyType(
    {
        name.partition("_")[0]: (name, checked.rule)
        for name, checked in rules(SimulationOptions).items()
    }
)
"""Option -> its field in `SimulationOptions`, and what the number must be."""


def parse_options(text: str, default: SimulationOptions = DEFAULT) -> tuple[int, SimulationOptions]:
    """Return the seed and the options that follow `?` in the text of a GPU; options that it leaves
    out are those of `default`.

    Raises:
        GpuError: If an option is unknown, repeated or has a wrong value; the text lists the known
            ones.
    """
    try:
        return _parsed(text.partition("?")[2], default)
    except PlannerError as error:
        raise GpuError(f"GPU {text!r}: {error}") from None


def _parsed(text: str, default: SimulationOptions) -> tuple[int, SimulationOptions]:
    values: dict[str, str] = {}
    faults: list[str] = []
    for option in text.split("&") if text else ():
        name, _, value = option.partition("=")
        if name == "fault":
            # The only option that may be repeated.
            faults.append(value)
        elif name not in ("seed", *_OPTIONS):
            raise GpuError(
                f"option {name!r} is unknown; choose from: seed, {', '.join(_OPTIONS)}, fault"
            )
        elif name in values:
            raise GpuError(f"option {name!r} is repeated; write it once")
        else:
            values[name] = value
    # The seed is a whole number; what follows is read by the rules of its field.
    seed = values.pop("seed", "0")
    if not re.fullmatch("-?[0-9]{1,18}", seed):
        raise GpuError(f"{seed!r} is not a seed: write a whole number, such as 3")
    numbers = {_OPTIONS[name][0]: _number(*_OPTIONS[name], value) for name, value in values.items()}
    return int(seed), replace(default, **numbers, fault=tuple(faults))


def format_options(
    seed: int, options: SimulationOptions, default: SimulationOptions = DEFAULT
) -> str:
    """Return the text that `parse_options` reads as these after a `?`, without the options that
    equal those of `default`.
    """
    texts = [f"seed={seed}"] if seed else []
    for name, (field_name, _) in _OPTIONS.items():
        value = getattr(options, field_name)
        if value != getattr(default, field_name):
            texts.append(f"{name}={format_number(value)}")
    return "&".join([*texts, *(f"fault={fault}" for fault in options.fault)])


def format_number(value: float) -> str:
    """Return the text of exactly this number, such as 2000 or 0.01."""
    return repr(value).removesuffix(".0")


def _number(name: str, rule: Rule, text: str) -> Any:
    # Times may have a unit; other numbers must not.
    if name.endswith("_s") and re.search("[a-z]", text):
        return _seconds(text)
    value = rule.parse(text)
    if value is None:
        raise GpuError(f"{text!r} is not {rule.wanted}")
    return value
