"""How long changing a clock takes: measured by doing it, on GPUs that are held."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Barrier
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu.inspection import Setting, refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.gpu.protocol import Gpu

_CLOCKS = 5  #: that are set, spread over those supported
_ROUNDS = 4  #: up and down over them
_SETTLE_S = 0.5  #: to wait for a clock that was set; the slowest transitions reported take as long
_PATIENCE = 3  #: clocks in a row that were not reached, after which no more is waited for any
_POLL_S = 0.0005


@dataclass(frozen=True)
class Latency:
    """Changing the clock of one GPU alone.

    Attributes:
        calls: how often it was set.
        call_p50_s, call_p99_s, call_max_s: how long the calls took: median, 99th percentile, longest.
        settle_p50_s: from the return of a call until the clock that was set is achieved, median of those that were;
            None: none was, as on a GPU that idles or is throttled.
        settled: how many were achieved, of those that were waited for.
        waited: how many were waited for.
        patience_s: for how long each, at most.
    """

    calls: int
    call_p50_s: float
    call_p99_s: float
    call_max_s: float
    settle_p50_s: float | None
    settled: int
    waited: int
    patience_s: float


@dataclass(frozen=True)
class Together:
    """Changing the clocks of several GPUs at once, from a thread for each.

    Attributes:
        gpus: how many.
        alone_s: a call when it is the only one, median.
        slowest_s: the longest of the calls that are made at once, median.
        queue: whether they run one after another, as where a node's driver has one lock.
    """

    gpus: int
    alone_s: float
    slowest_s: float
    queue: bool


def measure_latency(gpu: Gpu) -> Latency:
    """Set clocks of `gpu`, which must be held, up and down; the last one set is its highest.

    Raises:
        GpuError: it cannot be set, or its clock not be read.
    """
    calls_s, settles_s, in_vain, waited = [], [], 0, 0
    for clock_mhz in _steps(gpu.supported_clocks_mhz):
        calls_s.append(_call_s(gpu, clock_mhz))
        if in_vain == _PATIENCE:
            continue
        waited += 1
        settle_s = _settle_s(gpu, clock_mhz)
        in_vain = in_vain + 1 if settle_s is None else 0
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
        patience_s=_SETTLE_S,
    )


def measure_together(gpus: Sequence[Gpu], alone_s: float) -> Together:
    """Set clocks of all `gpus`, which must be held, at the same moment.

    Args:
        gpus: two or more.
        alone_s: what a call takes alone, seconds, median.

    Raises:
        GpuError: one cannot be set.
    """
    rounds = _ROUNDS * (2 * _CLOCKS - 2)
    steps = [_steps(gpu.supported_clocks_mhz) for gpu in gpus]
    slowest_s = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        for number in range(rounds):
            barrier = Barrier(len(gpus))
            clocks_mhz = [clocks[number % len(clocks)] for clocks in steps]
            together = pool.map(_call_at, gpus, clocks_mhz, [barrier] * len(gpus))
            slowest_s.append(max(together))
    slowest = median(slowest_s)
    # In a queue the last of n waits for n - 1 others; half-way between that and none is the border.
    return Together(len(gpus), alone_s, slowest, queue=slowest > alone_s * (1 + len(gpus)) / 2)


def try_power_limit(gpu: Gpu) -> Setting:
    """Whether the power limit of `gpu`, which must be held, may be set: sets the one that is in force."""
    try:
        gpu.set_power_limit_w(gpu.power_limit_w())
    except GpuError as error:
        return refused("power limit", error)
    return Setting("power limit", "permitted", "")


def _steps(clocks_mhz: Sequence[int]) -> list[int]:
    """Clocks to set one after the other, each another than the one before; the highest last."""
    count = min(_CLOCKS, len(clocks_mhz))
    spread = [clocks_mhz[place * (len(clocks_mhz) - 1) // max(1, count - 1)] for place in range(count)]
    return (spread[1:] + spread[-2::-1]) * _ROUNDS or list(clocks_mhz)


def _call_s(gpu: Gpu, clock_mhz: int) -> float:
    start_s = gpu.now_s()
    gpu.set_clock_mhz(clock_mhz)
    return gpu.now_s() - start_s


def _call_at(gpu: Gpu, clock_mhz: int, barrier: Barrier) -> float:
    barrier.wait()
    return _call_s(gpu, clock_mhz)


def _settle_s(gpu: Gpu, clock_mhz: int) -> float | None:
    """From now until `clock_mhz` is achieved, seconds; None: that takes too long."""
    start_s = gpu.now_s()
    while gpu.clock_mhz() != clock_mhz:
        if gpu.now_s() - start_s > _SETTLE_S:
            return None
        gpu.wait(_POLL_S)
    return gpu.now_s() - start_s
