"""Measures how long changing a clock takes, on leased GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Barrier
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.inspection import SettingCheck, failed_check
from perseus_planner.gpu.protocol import LOCK_WITHOUT_EFFECT

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu

_CLOCKS = 5  #: clocks to set, spread over the supported ones
_ROUNDS = 4  #: times up and down
_SETTLE_S = (
    0.5  #: longest wait for a clock that was set; the slowest transitions reported take as long
)
_MAX_UNREACHED = 3  #: clocks in a row that were not reached, after which the waiting stops
_POLL_S = 0.0005
_ABOVE = 1.02  #: times the clock that was set; a GPU that runs faster does not obey


@dataclass(frozen=True)
class Latency:
    """How long changing the clock of one GPU takes."""

    calls: int  #: Number of calls
    #: Duration of the calls: median, 99th percentile, longest.
    call_p50_s: float
    call_p99_s: float
    call_max_s: float
    #: Median time from the return of a call until the clock is reached; None if no clock was, as on
    #: a GPU that idles or is throttled.
    settle_p50_s: float | None
    settled: int  #: Number of clocks that were reached
    waited: int  #: Number of clocks that were waited for
    timeout_s: float  #: Longest wait for one clock


@dataclass(frozen=True)
class ParallelLatency:
    """How long changing the clocks of several GPUs at once takes, with one thread for each."""

    gpus: int  #: Number of GPUs
    alone_s: float  #: Median duration of a call that is alone
    slowest_s: float  #: Median duration of the longest of simultaneous calls
    #: Whether the calls run one after another, as if the driver has one lock for the node.
    queue: bool


def measure_latency(gpu: Gpu) -> Latency:
    """Set clocks of a leased GPU up and down; the last one is its highest.

    Raises:
        GpuError: If the GPU cannot be set, its clock cannot be read, or it keeps running above the
            clock that was set. Below it, it may idle or be throttled, so that only a GPU that works
            shows whether locks have an effect.
    """
    gpu.reset_clocks()  # a clock that cannot be unlocked again must not be locked
    calls_s, settles_s, unreached, waited = [], [], 0, 0
    for clock_mhz in _clocks_to_set(gpu.supported_clocks_mhz):
        calls_s.append(_call_s(gpu, clock_mhz))
        if unreached == _MAX_UNREACHED:
            continue
        waited += 1
        settle_s = _settle_s(gpu, clock_mhz)
        unreached = unreached + 1 if settle_s is None else 0
        settles_s += [] if settle_s is None else [settle_s]
    in_order = sorted(calls_s)
    return Latency(
        calls=len(calls_s),
        call_p50_s=median(calls_s),
        call_p99_s=in_order[int(0.99 * (len(in_order) - 1) + 0.5)],
        call_max_s=in_order[-1],
        settle_p50_s=median(settles_s) if settles_s else None,
        settled=len(settles_s),
        waited=waited,
        timeout_s=_SETTLE_S,
    )


def measure_parallel_latency(gpus: Sequence[Gpu], alone_s: float) -> ParallelLatency:
    """Set clocks of several leased GPUs at the same time.

    Args:
        gpus: Two or more GPUs.
        alone_s: Median duration of a call that is alone.

    Raises:
        GpuError: If a GPU cannot be set.
    """
    clocks_mhz = [_clocks_to_set(gpu.supported_clocks_mhz) for gpu in gpus]
    slowest_s = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        for number in range(_ROUNDS * (2 * _CLOCKS - 2)):
            barrier = Barrier(len(gpus))
            next_mhz = [clocks[number % len(clocks)] for clocks in clocks_mhz]
            slowest_s.append(
                max(pool.map(_call_at_barrier_s, gpus, next_mhz, [barrier] * len(gpus)))
            )
    slowest = median(slowest_s)
    # In a queue, the last of n calls waits for n - 1 others; the threshold is half-way between that
    # and no waiting.
    return ParallelLatency(
        len(gpus), alone_s, slowest, queue=slowest > alone_s * (1 + len(gpus)) / 2
    )


def check_power_limit_setting(gpu: Gpu) -> SettingCheck:
    """Check whether the power limit of a leased GPU can be set, by setting the one in force."""
    try:
        gpu.set_power_limit_w(gpu.power_limit_w())
    except GpuError as error:
        return failed_check("power limit", error)
    return SettingCheck("power limit", "permitted", "")


def _clocks_to_set(clocks_mhz: Sequence[int]) -> list[int]:
    """Return clocks to set in turn, each different from the one before; the last is the highest."""
    count = min(_CLOCKS, len(clocks_mhz))
    spread = [
        clocks_mhz[index * (len(clocks_mhz) - 1) // max(1, count - 1)] for index in range(count)
    ]
    return (spread[1:] + spread[-2::-1]) * _ROUNDS or list(clocks_mhz)


def _call_s(gpu: Gpu, clock_mhz: int) -> float:
    start_s = gpu.now_s()
    gpu.set_clock_mhz(clock_mhz)
    return gpu.now_s() - start_s


def _call_at_barrier_s(gpu: Gpu, clock_mhz: int, barrier: Barrier) -> float:
    barrier.wait()
    return _call_s(gpu, clock_mhz)


def _settle_s(gpu: Gpu, clock_mhz: int) -> float | None:
    """Return how long it takes until `clock_mhz` is reached, seconds; None if that is too long."""
    start_s = gpu.now_s()
    while gpu.clock_mhz() != clock_mhz:
        if gpu.now_s() - start_s > _SETTLE_S:
            _check_not_above(gpu, clock_mhz)
            return None
        gpu.wait(_POLL_S)
    return gpu.now_s() - start_s


def _check_not_above(gpu: Gpu, clock_mhz: int) -> None:
    runs_mhz = gpu.clock_mhz()
    if runs_mhz > _ABOVE * clock_mhz:
        raise GpuError(
            f"{gpu.text}: its SM clock was locked at {clock_mhz} MHz, and runs at {runs_mhz} MHz "
            f"{_SETTLE_S:g} s later, {LOCK_WITHOUT_EFFECT}"
        )
