"""Calls every method of a GPU behind NVML, and checks the results, whatever the library does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu import THROTTLE_REASONS, Gpu, open_gpu

READINGS: dict[str, tuple[Callable[[Gpu], Any], Callable[[Any], bool]]] = {
    "text": (lambda gpu: gpu.text, lambda text: text.startswith("nvml:")),
    "uuid": (lambda gpu: gpu.uuid, lambda uuid: len(uuid) > 0),
    "name": (lambda gpu: gpu.name, lambda name: len(name.strip()) > 0),
    "driver": (lambda gpu: gpu.driver, lambda version: len(version.strip()) > 0),
    "warnings": (lambda gpu: gpu.warnings(), lambda said: all(len(each) > 20 for each in said)),
    "supported_clocks_mhz": (
        lambda gpu: gpu.supported_clocks_mhz,
        lambda clocks: (
            len(clocks) > 0 and clocks[-1] > 0 and sorted(set(clocks), reverse=True) == list(clocks)
        ),
    ),
    "power_limits_w": (
        lambda gpu: gpu.power_limits_w,
        lambda limits: 0 < limits[0] <= limits[1] <= 1e5,
    ),
    "power_limit_w": (lambda gpu: gpu.power_limit_w(), lambda watts: 0 < watts <= 1e5),
    "energy_j": (lambda gpu: gpu.energy_j(), lambda joules: 0 < joules < 1e16),
    "power_w": (lambda gpu: gpu.power_w(), lambda watts: 0 < watts <= 1e5),
    "clock_mhz": (
        lambda gpu: gpu.clock_mhz(),
        lambda clock: isinstance(clock, int) and 0 < clock <= 100_000,
    ),
    "temperature_c": (lambda gpu: gpu.temperature_c(), lambda celsius: 0 < celsius <= 200),
    "throttle_reasons": (
        lambda gpu: gpu.throttle_reasons(),
        lambda reasons: reasons <= set(THROTTLE_REASONS),
    ),
    "throttled_s": (
        lambda gpu: dict(gpu.throttled_s()),
        lambda times: (
            set(times) <= set(THROTTLE_REASONS)
            and all(0 <= time < math.inf for time in times.values())
        ),
    ),
}
"""How to read each quantity, and how to check its value, by name."""

SETTINGS: dict[str, Callable[[Gpu], None]] = {
    "set_clock_mhz": lambda gpu: gpu.set_clock_mhz(gpu.supported_clocks_mhz[0]),
    "reset_clocks": lambda gpu: gpu.reset_clocks(),
    "set_power_limit_w": lambda gpu: gpu.set_power_limit_w(gpu.power_limits_w[1]),
    "reset_power_limit": lambda gpu: gpu.reset_power_limit(),
}
"""How to set something, by name."""


def exercised(text: str, *, settings: bool = True) -> dict[str, Any]:
    """Return the value or error of each method of a GPU; under "open", the error of opening it.

    Any error but a `GpuError` that says what to do, and any value that no GPU has, fails the test.
    """
    outcome: dict[str, Any] = {}
    with _recorded(outcome, "open"), open_gpu(text) as gpu:
        for name, (read, sane) in READINGS.items():
            with _recorded(outcome, name):
                outcome[name] = read(gpu)
                assert sane(outcome[name]), (name, outcome[name])
        for name, make in SETTINGS.items() if settings else ():
            with _recorded(outcome, name):
                make(gpu)
                outcome[name] = None
    for name in failed(outcome):
        who, _, advice = str(outcome[name]).partition("; ")
        assert who.startswith(("nvml:", "NVML")), outcome[name]
        assert len(advice) > 20, f"{name}: says not what to do: {outcome[name]}"
    return outcome


def failed(outcome: dict[str, Any]) -> set[str]:
    """Return the methods that raised an error."""
    return {name for name, value in outcome.items() if isinstance(value, GpuError)}


@contextmanager
def _recorded(outcome: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except GpuError as error:
        outcome[name] = error


def refusal_of(text: str) -> str:
    """Return the error with which a GPU is not opened."""
    with pytest.raises(GpuError) as refused, open_gpu(text):
        pass
    return str(refused.value)


def check_refused(text: str, kind: type[GpuError], said: str) -> None:
    """Check that a GPU is not opened, with an error in which the pattern `said` occurs."""
    with pytest.raises(kind, match=said), open_gpu(text):
        pass
