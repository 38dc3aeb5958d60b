"""Inspects what can be read and set on a GPU and how its energy counter behaves, without setting
anything, and measures on leased GPUs how long changing a clock takes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from threading import Barrier

from perseus_planner.base.checks import PASSED, Check, CheckResult, Finding, run_check
from perseus_planner.base.errors import GpuError
from perseus_planner.base.prefixes import si
from perseus_planner.gpu.lease.lease import in_use_text
from perseus_planner.gpu.lease.records import LeaseRecord, read_records
from perseus_planner.gpu.protocol import LOCK_WITHOUT_EFFECT, Gpu, GpuReader

_WATCH_S = 3.0  #: at most; all known counters move at least once a second
_ENOUGH_S = 1.0  #: after which a power sensor that averages covers the same time as the counter
_ENOUGH_MOVES = 8
_POLL_S = 0.002
CLOCKS = "clocks that can be locked"
"""Name of the reading that lists them."""

_CAP_SYS_ADMIN = 21  #: number of that capability, capabilities(7)

NOT_TRIED = "not tried"
"""Result of a setting that was not made: only making it shows whether it is permitted."""


@dataclass(frozen=True)
class EnergyWatch:
    """The energy counter and the power sensor, watched together."""

    watched_s: float  #: For how long
    #: Median time between two moves of the counter; None if it moved less than twice.
    step_s: float | None = None
    step_j: float | None = None  #: Median size of a move
    counter_w: float | None = None  #: Power by the counter, from its first move to its last
    #: Mean of the sensor over the same time; None if it cannot be read.
    sensor_w: float | None = None
    #: What is wrong with the counter, and what to do; None if nothing is.
    problem: str | None = None


@dataclass(frozen=True)
class Inspection:
    """One GPU, as seen from this process."""

    gpu: str  #: Text that opens the GPU
    #: As in `GpuReader`.
    uuid: str
    name: str
    driver: str
    origin: str
    readings: tuple[CheckResult, ...]  #: What can be read
    settings: tuple[CheckResult, ...]  #: What can be set
    energy: EnergyWatch  #: How its energy counter behaves
    leased_by: str | None  #: The lease of a living process; None if the GPU is free
    stale_leases: tuple[str, ...]  #: Leases of dead processes
    warnings: tuple[str, ...]  #: As in `GpuReader`
    is_mig_on: bool = False  #: Whether it is partitioned into MIG instances

    @property
    def can_observe(self) -> bool:
        """Whether its energy can be measured."""
        return self.energy.step_s is not None

    @property
    def can_set_clocks(self) -> bool | None:
        """Whether its clocks can be listed and set; None if that was not tried."""
        lists = any(check.name == CLOCKS and check.result == PASSED for check in self.readings)
        clock = next(check.result for check in self.settings if check.name == "clock")
        # What cannot be listed cannot be chosen, even where setting is permitted.
        return None if lists and clock == NOT_TRIED else lists and clock == "permitted"


def inspect(gpu: Gpu) -> Inspection:
    """Read everything about a GPU, which takes up to a few seconds, and set nothing.

    Raises:
        GpuError: If the lease records cannot be read.
    """
    # A lease makes settings explainable: a lock is then not foreign.
    records = [record for record in read_records()[0] if record.uuid == gpu.uuid]
    living = [record for record in records if record.is_living]
    return Inspection(
        gpu=gpu.text,
        uuid=gpu.uuid,
        name=gpu.name,
        driver=gpu.driver,
        origin=gpu.origin,
        readings=tuple(run_check(check, gpu) for check in READINGS),
        # Nothing is set here, so permission is a guess until `--measure-latency` tries it.
        settings=tuple(
            CheckResult(check.name, NOT_TRIED, _hint(gpu.text)) for check in (CLOCK, POWER_LIMIT)
        ),
        energy=watch_energy(gpu),
        leased_by=in_use_text(living[0]) if living else None,
        stale_leases=tuple(_stale_text(record) for record in records if record not in living),
        # While a planner's job has it, its clock is locked on purpose.
        warnings=(*gpu.warnings(), *(() if living else gpu.foreign_locks())),
        is_mig_on=getattr(gpu, "is_mig_on", False),
    )


def watch_energy(gpu: GpuReader) -> EnergyWatch:
    """Watch the energy counter until it has moved often enough, or for a few seconds."""
    start_s = gpu.now_s()
    moves: list[tuple[float, float]] = []
    powers: list[tuple[float, float | None]] = []
    try:
        before_j = gpu.energy_j()
        while not _enough(moves) and gpu.now_s() - start_s < _WATCH_S:
            gpu.wait(_POLL_S)
            energy_j = gpu.energy_j()
            now_s = gpu.now_s()
            # Only moves have a known time: between them the counter is older than it says.
            if energy_j != before_j:
                moves.append((now_s, energy_j))
            before_j = energy_j
            # At every poll: the sensor may move when the counter does not.
            powers.append((now_s, _power_w(gpu)))
    except GpuError as error:
        # How far it came says how long a GPU answered before it failed.
        return EnergyWatch(gpu.now_s() - start_s, problem=str(error))
    watched_s = gpu.now_s() - start_s
    # One move has a size and no interval.
    if len(moves) < 2:
        problem = (
            f"it did not move in {watched_s:.1f} s: the counter is stuck; load the driver again "
            "or reboot the node, as nothing can be measured without it"
        )
        return EnergyWatch(watched_s, problem=problem)
    return _evaluate(watched_s, moves, powers)


def _evaluate(
    watched_s: float,
    moves: Sequence[tuple[float, float]],
    powers: Sequence[tuple[float, float | None]],
) -> EnergyWatch:
    # Whole intervals, from the first move to the last: a part of one has energy without its time.
    first_s, first_j = moves[0]
    last_s, last_j = moves[-1]
    # The sensor over the same time, or both could not be compared.
    between_w = [
        power_w for at_s, power_w in powers if first_s <= at_s <= last_s and power_w is not None
    ]
    # A counter that begins anew gives every difference across that moment a wrong sign.
    went_back = any(after_j < before_j for (_, before_j), (_, after_j) in pairwise(moves))
    return EnergyWatch(
        # Medians: one late poll makes one interval longer and the next one shorter.
        watched_s,
        step_s=median(after_s - before_s for (before_s, _), (after_s, _) in pairwise(moves)),
        step_j=median(after_j - before_j for (_, before_j), (_, after_j) in pairwise(moves)),
        counter_w=(last_j - first_j) / (last_s - first_s),
        sensor_w=fmean(between_w) if between_w else None,
        problem="it went back, as when the driver is loaded again; turn persistence mode on"
        if went_back
        else None,
    )


def _enough(moves: Sequence[tuple[float, float]]) -> bool:
    # Both: few moves of a slow counter need no more time, but the sensor's average does.
    return len(moves) >= _ENOUGH_MOVES and moves[-1][0] - moves[0][0] >= _ENOUGH_S


def _power_w(gpu: GpuReader) -> float | None:
    try:
        return gpu.power_w()
    except GpuError:
        return None


def _clocks(clocks_mhz: Sequence[int]) -> str:
    return f"{len(clocks_mhz)} from {clocks_mhz[0]} to {clocks_mhz[-1]} MHz"


def _throttled(gpu: GpuReader) -> str:
    counted = gpu.throttled_s()
    return (
        ", ".join(f"{reason} {si(counted[reason], 's')}" for reason in sorted(counted))
        or "not counted"
    )


def _hint(text: str) -> str:
    return f"{privilege(text)}; `planner doctor {text} --measure-latency` tries it"


def privilege(text: str) -> str:
    """Return what is known about permission before anything is set."""
    # Its memory clock is set the same way as the GPU itself.
    back_end = text.removeprefix("memory:").partition(":")[0]
    if back_end in ("zeusd", "command"):
        return f"{back_end} sets it, so this process needs no privilege"
    if back_end not in ("nvml", "amd"):
        return "no privilege is needed"
    # Root in a container may lack the capability, so it is asked for first.
    if _has_sys_admin():
        return "this process has CAP_SYS_ADMIN, which setting needs"
    if os.geteuid() == 0:
        return (
            "root without CAP_SYS_ADMIN, which setting needs: start the container with "
            "--cap-add SYS_ADMIN"
        )
    other = ", or choose the back-end zeusd: or command:" if back_end == "nvml" else ""
    return f"setting needs root: run as root{other}"


def _has_sys_admin() -> bool:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        effective = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _stale_text(record: LeaseRecord) -> str:
    return f"{record.owner} leased it at {record.since} and died; run `planner reset`"


_CLOCKS = 5  #: clocks to set, spread over the supported ones
_ROUNDS = 4  #: times up and down
_SETTLE_S = 0.5  #: longest wait for a clock that was set: as long as the slowest reported one
_MAX_UNREACHED = 3  #: clocks in a row that were not reached, after which the waiting stops
_SETTLE_POLL_S = 0.0005
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

    @property
    def texts(self) -> tuple[str, str]:
        """How long a call takes, and when its clock is reached, in words."""
        p50, p99, longest = (
            si(s, "s", 3) for s in (self.call_p50_s, self.call_p99_s, self.call_max_s)
        )
        call = f"a call takes {p50} (median; p99 {p99}, longest {longest}; {self.calls} calls)"
        if self.settle_p50_s is None:
            return call, (
                f"the clock was not reached within {self.timeout_s:g} s, as on an idle GPU: "
                "measure while it works"
            )
        return call, (
            f"the clock is reached {si(self.settle_p50_s, 's', 3)} after the call (median; "
            f"{self.settled} of {self.waited} were reached)"
        )


@dataclass(frozen=True)
class ParallelLatency:
    """How long changing the clocks of several GPUs at once takes, with one thread for each."""

    gpus: int  #: Number of GPUs
    alone_s: float  #: Median duration of a call that is alone
    slowest_s: float  #: Median duration of the longest of simultaneous calls
    #: Whether the calls run one after another, as if the driver has one lock for the node.
    queue: bool

    @property
    def text(self) -> str:
        """The same in words."""
        verdict = "they run one after another" if self.queue else "they do not wait for each other"
        return (
            f"Setting {self.gpus} GPUs at once: {si(self.slowest_s, 's', 3)} until the last call "
            f"returns, {si(self.alone_s, 's', 3)} for a call that is alone: {verdict}"
        )


def measure_latency(gpu: Gpu) -> Latency:
    """Set clocks of a leased GPU up and down; the last one is its highest.

    Raises:
        GpuError: If the GPU cannot be set, its clock cannot be read, or it keeps running above the
            clock that was set. Below it, it may idle or be throttled, so that only a GPU that works
            shows whether locks have an effect.
    """
    gpu.reset_clocks()  # a clock that cannot be unlocked again must not be locked
    calls_s = []
    settles_s = []
    unreached = 0
    waited = 0
    for clock_mhz in _clocks_to_set(gpu.supported_clocks_mhz):
        calls_s.append(_call_s(gpu, clock_mhz))
        # An idle or throttled GPU reaches no clock; waiting for all would take minutes.
        if unreached == _MAX_UNREACHED:
            continue
        waited += 1
        settle_s = _settle_s(gpu, clock_mhz)
        # In a row: a single miss is a moment of throttling.
        unreached = unreached + 1 if settle_s is None else 0
        settles_s += [] if settle_s is None else [settle_s]
    # The 99th percentile by the nearest rank: of some 30 calls, the longest.
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
            # A barrier of its own for each round: all threads call at the same moment.
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


def _set_power_limit(gpu: Gpu) -> str:
    """Set the power limit in force."""
    gpu.set_power_limit_w(gpu.power_limit_w())
    return ""


def _clocks_to_set(clocks_mhz: Sequence[int]) -> list[int]:
    """Return clocks to set in turn, each different from the one before; the last is the highest."""
    count = min(_CLOCKS, len(clocks_mhz))
    # Evenly spread over the list, ends included.
    spread = [
        clocks_mhz[index * (len(clocks_mhz) - 1) // max(1, count - 1)] for index in range(count)
    ]
    # Up and down without the ends twice, so that every call changes the clock.
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
            # Slower may be heat or a power limit; faster means that the lock is ignored.
            _check_not_above(gpu, clock_mhz)
            return None
        gpu.wait(_SETTLE_POLL_S)
    return gpu.now_s() - start_s


def _check_not_above(gpu: Gpu, clock_mhz: int) -> None:
    runs_mhz = gpu.clock_mhz()
    if runs_mhz > _ABOVE * clock_mhz:
        raise GpuError(
            f"{gpu.text}: its SM clock was locked at {clock_mhz} MHz, and runs at {runs_mhz} MHz "
            f"{_SETTLE_S:g} s later, {LOCK_WITHOUT_EFFECT}"
        )


READINGS: tuple[Check[GpuReader], ...] = (
    Check(CLOCKS, lambda gpu: _clocks(gpu.supported_clocks_mhz)),
    Check("clock", lambda gpu: f"{gpu.clock_mhz()} MHz"),
    Check("power limits", lambda gpu: "{:g} to {:g} W".format(*gpu.power_limits_w)),
    Check(
        "power limit",
        lambda gpu: f"{gpu.power_limit_w():g} W, by default {gpu.default_power_limit_w():g} W",
    ),
    Check("power", lambda gpu: si(gpu.power_w(), "W")),
    Check("energy counter", lambda gpu: si(gpu.energy_j(), "J", 6)),
    Check("temperature", lambda gpu: f"{gpu.temperature_c():g} degrees Celsius"),
    Check("throttled now by", lambda gpu: ", ".join(sorted(gpu.throttle_reasons())) or "nothing"),
    Check("throttled so far", _throttled),
)
"""What is read of a GPU."""

POWER_LIMIT: Check[Gpu] = Check("power limit", _set_power_limit, passed="permitted")
"""Whether the power limit of a leased GPU can be set: the one in force is."""

CLOCK: Check[Gpu] = Check(
    "clock", lambda gpu: Finding("", {"latency": measure_latency(gpu)}), passed="permitted"
)
"""Whether the clock of a leased GPU can be set, and how long that takes."""
