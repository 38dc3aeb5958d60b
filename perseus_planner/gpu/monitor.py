"""Measure the time and energy of any code: a `Monitor` watches GPUs, and its windows say what they
used.

    with Monitor(["nvml:0", "nvml:1"]) as monitor:
        with monitor.window("epoch") as epoch:
            train()
        print(epoch.time_s, epoch.energy_j, epoch.error_j, epoch.average_w)

A window takes the difference of each GPU's energy counter. Counters of data-centre GPUs are updated
about every 100 ms, so each edge of a window may miss the energy of one update: `error_j` says how
much that is at most; it is worked out when it is asked for. A GPU without a counter, such as some
AMD GPUs, is sampled in the background, and its power is integrated by the trapezoid rule.

With `host=True`, and by the names "cpu" and "dram", windows also have the energy of the processors
and their memory, as Linux shows it (RAPL, `/sys/class/powercap`).

The windows of Zeus' monitor have names, and begin and end by them: `begin_window` and `end_window`
do likewise. With `log=`, each window becomes a row of a CSV that is on disk when `end` returns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import fsum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import GpuError, GpuNotPermitted, GpuNotSupported, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import csv_text
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.protocol import ClosedOnExit, RealGpu

if TYPE_CHECKING:
    from typing_extensions import Self

    from perseus_planner.gpu.protocol import Gpu

POLL_S = 1e-3
"""How often the counter is read to find its next update, seconds."""

_STUCK_S = 5.0  # every known counter updates at least once a second
_INTERVALS = 5  # intervals that are timed to find the length of one
_MIN_REST_S = 0.01  # the power at rest is the mean over at least this long
_STABLE = 0.05  # the GPU is at rest when the power of two intervals differs by less
_MAX_INTERVALS = 20


class RestingReading(NamedTuple):
    """The counter right after an update while the GPU is at rest."""

    time_s: float  #: When the counter was updated, seconds
    energy_j: float  #: The counter, joules
    rest_w: float  #: The power of the resting GPU, watts


class EnergyCounter:
    """The energy counter of a GPU, whose update interval is measured on construction.

    The energy counters of data-centre GPUs update about every 100 ms, so the difference of two
    readings taken at arbitrary times is wrong by up to the energy of one interval. A reading taken
    right after an update is not. Every window therefore begins and ends at an update, with the GPU
    at rest, and the energy that the GPU drew at rest between these updates and its work is
    subtracted. The remaining error is the time between two polls at the power of a resting GPU:
    about 0.1 J of the 1500 J of a window of 5 s.

    Attributes:
        interval_s: The median time between two updates, seconds.

    Raises:
        GpuError: If the counter does not move for seconds, or runs backwards.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        times_s = [self._wait_for_update()[0] for _ in range(_INTERVALS + 1)]
        self.interval_s = median(after - before for before, after in pairwise(times_s))

    def wait_for_rest(self) -> RestingReading:
        """Wait until the counter counts nothing but the power of the resting GPU. Nothing may be
        running.

        A counter that is fed from averaged power still counts finished work for some intervals. So
        this waits until two intervals in a row have the same power.

        Raises:
            GpuError: If the counter does not move for seconds, or runs backwards.
        """
        time_s, energy_j = self._wait_for_update()
        before_w = 0.0
        for _ in range(_MAX_INTERVALS):
            # Polling starts shortly before the update is due.
            self._gpu.wait(max(0.8 * self.interval_s, _MIN_REST_S))
            next_s, next_j = self._wait_for_update()
            rest_w = (next_j - energy_j) / (next_s - time_s)
            time_s, energy_j = next_s, next_j
            if abs(rest_w - before_w) <= _STABLE * rest_w:
                break
            before_w = rest_w
        return RestingReading(time_s, energy_j, rest_w)

    def _wait_for_update(self) -> tuple[float, float]:
        """Return the time and the counter, seconds and joules, right after its next update."""
        gpu = self._gpu
        before_j, give_up_s = gpu.energy_j(), gpu.now_s() + _STUCK_S
        while (energy_j := gpu.energy_j()) == before_j:
            if gpu.now_s() >= give_up_s:
                raise GpuError(
                    f"{gpu.name}: its energy counter has stood at {si(energy_j, 'J', 9)} for "
                    f"{_STUCK_S:g} s, so energy cannot be measured; run `planner doctor` to check "
                    "the counter, and reload the driver"
                )
            gpu.wait(POLL_S)
        if energy_j < before_j:
            raise GpuError(
                f"{gpu.name}: its energy counter went back from {si(before_j, 'J', 9)} to "
                f"{si(energy_j, 'J', 9)}, as after a reload of the driver; turn persistence mode "
                "on and measure again"
            )
        return gpu.now_s(), energy_j


FOLDER_VARIABLE = "PLANNER_POWERCAP"
"""The environment variable with the folder of the counters, if it is another one."""


class HostCounter(RealGpu):
    """The processors, or the memory, of all sockets, as Linux counts their energy: RAPL, in
    `/sys/class/powercap` (https://docs.kernel.org/power/powercap/powercap.html).

    Args:
        text: "cpu" or "dram".
        zones: Folders of their counters.

    Attributes:
        interval_s: Seconds between two updates of a counter, at most.
    """

    interval_s = 0.001

    def __init__(self, text: str, zones: list[Path]) -> None:
        self.text = text
        self.name = f"{len(zones)} zones of powercap"
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last_uj = self._read_uj()
        self._wraps = [0] * len(zones)

    def energy_j(self) -> float:
        """Energy since the host was booted, joules; counters that begin again go on."""
        now_uj = self._read_uj()
        for place, (before, now) in enumerate(zip(self._last_uj, now_uj, strict=True)):
            self._wraps[place] += now < before
        self._last_uj = now_uj
        whole = sum(n * most for n, most in zip(self._wraps, self._ranges_uj, strict=True))
        return (sum(now_uj) + whole) / 1e6

    def power_w(self) -> float:
        """Nothing: there is no sensor.

        Raises:
            GpuNotSupported: Always.
        """
        raise GpuNotSupported(f"{self.text}: the host counts energy and has no sensor of power")

    def _read_uj(self) -> list[int]:
        try:
            return [int(file.read_bytes()) for file in self._files]
        except PermissionError as error:
            raise GpuNotPermitted(
                f"{self.text}: {error.filename} may be read by root alone; run "
                "`chmod a+r /sys/class/powercap/*/energy_uj` as root, or leave host=True out"
            ) from error


def host_counters() -> list[HostCounter]:
    """Return the counters of this host: its processors, and its memory if that is counted.

    Raises:
        GpuNotSupported: If it has none.
        GpuNotPermitted: If this process may not read them.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE, "/sys/class/powercap"))
    zones: dict[str, list[Path]] = {"cpu": [], "dram": []}
    for zone in sorted(folder.glob("*rapl*:*")):
        if (zone / "energy_uj").exists():
            name = (zone / "name").read_text().strip()
            kind = "cpu" if name.startswith("package") else name
            zones.get(kind, []).append(zone)
    if not zones["cpu"]:
        raise GpuNotSupported(
            f"{folder}: has no energy counters of processors; the kernel module intel_rapl_common "
            "and bare metal have them; leave host=True out"
        )
    return [HostCounter(kind, found) for kind, found in zones.items() if found]


SAMPLE_S = 0.1
"""Time between two samples of the power, seconds, unless another is asked for: sensors are
updated about that often.
"""


@dataclass(frozen=True)
class GpuEnergy:
    """What one GPU, or the processors or memory of the host, used in a window."""

    gpu: str  #: Text that opens the GPU, e.g. "nvml:GPU-8f6b…".
    name: str  #: Name of the product
    origin: str  #: "measured" or "simulated"
    source: str  #: "counter", or "samples" of the power
    time_s: float  #: Length of the window on the GPU's clock, seconds
    energy_j: float  #: Energy, joules
    #: The energy is wrong by at most this, joules, if the GPU counts right: what the counter may
    #: not have shown yet at the edges, or how much the power changed between samples.
    error_j: float
    #: Whether the window was longer than the counter takes for an update: else its energy says
    #: little, and `error_j` is as large.
    is_resolved: bool
    #: Highest power that was sampled, watts; None if the power was not sampled.
    peak_w: float | None

    @property
    def average_w(self) -> float:
        """Mean power, watts."""
        return self.energy_j / self.time_s if self.time_s > 0 else 0.0


class PowerSample(NamedTuple):
    """The power of a GPU at one moment."""

    gpu: str  #: Text that opens the GPU
    time_s: float  #: When, in seconds on the GPU's clock
    power_w: float  #: Power by the sensor, watts


class Monitor(ClosedOnExit):
    """Measures the energy of GPUs in windows, which may nest and overlap.

    Opening it takes about a second on real GPUs, in which it times the updates of their energy
    counters.

    Args:
        gpus: The GPUs, as texts for `open_gpu` or opened already; None for all that NVML and AMD
            SMI show. GPUs that are opened here are closed with the monitor.
        synchronize: Called at both edges of each window, for example `torch.cuda.synchronize`, so
            that a window ends after the work that was launched in it. By default nothing waits for
            the device.
        sample_s: Sample the power every so many seconds, for `peak_w` and `on_sample`. None samples
            only GPUs without an energy counter, every `SAMPLE_S` seconds.
        on_sample: Called with each sample, in the thread that samples.
        host: Also measure the processors and their memory, as far as Linux shows their energy.
        log: A CSV to which each window is added when it ends; it survives the death of the process.

    Raises:
        GpuError: If a GPU, or the energy of the host, cannot be opened or read.
        UsageError: If there is no GPU to measure.
    """

    def __init__(
        self,
        gpus: str | Gpu | Sequence[str | Gpu] | None = None,
        *,
        synchronize: Callable[[], None] | None = None,
        sample_s: float | None = None,
        on_sample: Callable[[PowerSample], None] | None = None,
        host: bool = False,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        self._synchronize, self._on_sample = synchronize, on_sample
        self._named: dict[str, Window] = {}
        self._log = -1
        self._open: set[Window] = set()
        self._lock = threading.Lock()  #: of what the sampling thread shares
        self._problem: BaseException | None = None
        self._sampling: Loop | None = None
        with ExitStack() as stack:
            opened = [
                stack.enter_context(open_gpu(gpu)) if isinstance(gpu, str) else gpu
                for gpu in _listed(gpus)
            ]
            self._meters: list[_Meter] = _meters(opened)
            self._count = len(opened)
            self._meters += [_Meter(counter) for counter in (host_counters() if host else ())]
            if log is not None:
                self._log = os.open(
                    log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
                stack.callback(os.close, self._log)
                if not os.fstat(self._log).st_size:
                    names = (f"energy of {meter.gpu.text} (J)" for meter in self._meters)
                    self._write("window", "time (s)", "energy (J)", *names)
            is_sampled = sample_s is not None or on_sample is not None
            self._sampled = [meter for meter in self._meters if is_sampled or not meter.is_counted]
            if self._sampled:
                self._sample()
                self._sampling = Loop(
                    self._sample, "energy samples", sample_s or SAMPLE_S, on_error=self._fail
                ).start()
            self._stack = stack.pop_all()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Texts that open the GPUs, in the order of `Window.gpus`."""
        return tuple(meter.gpu.text for meter in self._meters[: self._count])

    def window(self, name: str = "window") -> Window:
        """Return a window to measure: use it in a `with` statement, or call its `begin` and
        `end`.
        """
        return Window(self, name)

    def begin_window(self, name: str) -> None:
        """Begin a window by its name, as `ZeusMonitor.begin_window` does.

        Raises:
            UsageError: If a window of this name has begun, and has not ended.
            GpuError: If a GPU cannot be read.
        """
        if name in self._named:
            raise UsageError(f"window {name!r}: has begun already; end it first")
        self._named[name] = self.window(name).begin()

    def end_window(self, name: str) -> Window:
        """End the window of this name, and return it; likewise.

        Raises:
            UsageError: If no window of this name has begun.
            GpuError: If a GPU cannot be read.
        """
        if name not in self._named:
            raise UsageError(f"window {name!r}: has not begun; begin and end each window once")
        return self._named.pop(name).end()

    def close(self) -> None:
        """Stop sampling, and close the GPUs that were opened here."""
        if self._sampling is not None:
            self._sampling.stop()
        self._stack.close()

    def _edge(self) -> list[_Edge]:
        """Read all GPUs at the edge of a window."""
        if self._synchronize is not None:
            self._synchronize()
        if self._sampling is None:  # nothing is shared with another thread
            return [meter.edge() for meter in self._meters]
        with self._lock:
            if self._problem is not None:
                raise self._problem
            return [meter.edge() for meter in self._meters]

    def _write(self, *cells: object) -> None:
        """Add a row to the log in one call: it is kept, whatever becomes of the process."""
        os.write(self._log, csv_text([cells]).encode())

    def _sample(self) -> None:
        for meter in self._sampled:
            with self._lock:
                sample = PowerSample(meter.gpu.text, meter.gpu.now_s(), meter.sample())
                for window in self._open:
                    window.peaks_w[sample.gpu] = max(
                        sample.power_w, window.peaks_w.get(sample.gpu, 0.0)
                    )
            if self._on_sample is not None:
                self._on_sample(sample)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._problem = error


class Window:
    """A window of time, in which the energy of a monitor's GPUs is measured. `Monitor.window` makes
    it.

    Attributes:
        name: Its name.
        peaks_w: Highest power of each GPU that was sampled in it, watts, by the text that opens the
            GPU.
    """

    def __init__(self, monitor: Monitor, name: str) -> None:
        self.name = name
        self.peaks_w: dict[str, float] = {}
        self._monitor = monitor
        self._begun: list[_Edge] | None = None
        self._ended: list[_Edge] | None = None

    def begin(self) -> Self:
        """Begin the window.

        Raises:
            UsageError: If it has begun already.
            GpuError: If a GPU cannot be read.
        """
        if self._begun is not None:
            raise UsageError(
                f"window {self.name!r}: has begun already; make a new one with "
                "`monitor.window(name)`"
            )
        monitor = self._monitor
        self._begun = monitor._edge()
        if monitor._sampling is not None:
            with monitor._lock:
                monitor._open.add(self)
        return self

    def end(self) -> Self:
        """End the window; from now on it can be read.

        Raises:
            UsageError: If it has not begun, or has ended already.
            GpuError: If a GPU cannot be read, or its counter went back.
        """
        if self._begun is None or self._ended is not None:
            state = "has not begun" if self._begun is None else "has ended already"
            raise UsageError(f"window {self.name!r}: {state}; begin and end each window once")
        monitor = self._monitor
        try:
            ended = monitor._edge()
        finally:
            monitor._open.discard(self)
        for meter, (_, first_j, _), (_, last_j, _) in zip(
            monitor._meters, self._begun, ended, strict=True
        ):
            if last_j < first_j:
                raise meter.went_back(first_j, last_j)
        self._ended = ended
        if monitor._log >= 0:
            monitor._write(self.name, self.time_s, self.energy_j, *self._energies_j)
        return self

    @property
    def _edges(self) -> Iterator[tuple[_Meter, _Edge, _Edge]]:
        if self._begun is None or self._ended is None:
            raise UsageError(f"window {self.name!r}: has not ended; read it after its `with` block")
        return zip(self._monitor._meters, self._begun, self._ended, strict=True)

    @property
    def _energies_j(self) -> list[float]:
        return [last.energy_j - first.energy_j for _, first, last in self._edges]

    @cached_property
    def gpus(self) -> tuple[GpuEnergy, ...]:
        """What each GPU used, in the order of `Monitor.gpus`; then the host, if it is measured.

        Raises:
            UsageError: If the window has not ended.
            GpuError: If a GPU cannot be read: its power now tells the error.
        """
        return tuple(
            meter.between(first, last, self.peaks_w.get(meter.gpu.text))
            for meter, first, last in self._edges
        )

    @property
    def time_s(self) -> float:
        """Length of the window, seconds: the longest on any GPU's clock."""
        return max(last.time_s - first.time_s for _, first, last in self._edges)

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs, and of the host if it is measured, joules."""
        return fsum(self._energies_j)

    @property
    def gpu_energy(self) -> dict[int, float]:
        """Energy of each GPU by its position, joules: the name that Zeus' measurements have."""
        return dict(enumerate(self._energies_j[: self._monitor._count]))

    @property
    def total_energy(self) -> float:
        """Energy of all GPUs, joules: likewise."""
        return fsum(self.gpu_energy.values())

    @property
    def time(self) -> float:
        """Length of the window, seconds: likewise."""
        return self.time_s

    @property
    def error_j(self) -> float:
        """The energy is wrong by at most this, joules; see `GpuEnergy.error_j`."""
        return fsum(gpu.error_j for gpu in self.gpus)

    @property
    def average_w(self) -> float:
        """Mean power of all together, watts."""
        return fsum(
            (last.energy_j - first.energy_j) / (last.time_s - first.time_s)
            for _, first, last in self._edges
            if last.time_s > first.time_s
        )

    def __enter__(self) -> Self:
        """Begin the window, and return it."""
        return self.begin()

    def __exit__(self, *_: object) -> None:
        """End the window."""
        self.end()


class _Edge(NamedTuple):
    """One GPU at the edge of a window."""

    time_s: float  #: When it was read
    energy_j: float  #: The energy until then
    error_j: float  #: For samples, the error of the energy so far


class _Meter:
    """A GPU with its energy counter; or, if it has none, with its sampled power, integrated."""

    def __init__(self, gpu: Gpu | HostCounter) -> None:
        self.gpu = gpu
        try:
            gpu.energy_j()
        except GpuNotSupported:
            self.is_counted, self._power_w, self._hidden_s = False, gpu.power_w(), 0.0
        else:
            self.is_counted, self._power_w = True, 0.0
            self._look()
            interval_s = (
                gpu.interval_s if isinstance(gpu, HostCounter) else EnergyCounter(gpu).interval_s
            )
            self._hidden_s = interval_s + POLL_S
        self._last = _Edge(gpu.now_s(), 0.0, 0.0)
        self._what = gpu.text, gpu.name, gpu.origin  # windows are also read when it is closed

    def sample(self) -> float:
        """Return the power, watts; without a counter, integrate it up to now."""
        now_s, power_w = self.gpu.now_s(), self.gpu.power_w()
        if not self.is_counted:
            last, half_s = self._last, (now_s - self._last.time_s) / 2
            energy_j = last.energy_j + half_s * (power_w + self._power_w)
            error_j = last.error_j + half_s * abs(power_w - self._power_w)
            self._last, self._power_w = _Edge(now_s, energy_j, error_j), power_w
        return power_w

    def edge(self) -> _Edge:
        """Read the energy, and nothing else."""
        if not self.is_counted:
            self.sample()
            return self._last
        return _Edge(self.gpu.now_s(), self.gpu.energy_j(), 0.0)

    def _look(self) -> None:
        """Remember the power, if it can be read: not of a GPU that is closed."""
        with suppress(GpuError):
            self._power_w = self.gpu.power_w()

    def went_back(self, first_j: float, last_j: float) -> GpuError:
        """Return the error of a counter that went back."""
        return GpuError(
            f"{self.gpu.text}: its energy counter went back from {si(first_j, 'J', 9)} "
            f"to {si(last_j, 'J', 9)}, as after a reload of the driver; turn "
            "persistence mode on and measure again"
        )

    def between(self, first: _Edge, last: _Edge, peak_w: float | None) -> GpuEnergy:
        """Return what was used between two edges. What the counter did not show at one of them is
        at most an update at the mean power, or at the one read last.
        """
        time_s, energy_j, error_j = (end - begin for begin, end in zip(first, last, strict=True))
        if self.is_counted:
            self._look()
            # The first edge hides energy from before the window, and the last energy of the
            # window: only one can prevail.
            error_j = self._hidden_s * max(energy_j / time_s if time_s > 0 else 0.0, self._power_w)
        is_resolved = time_s > self._hidden_s or not self.is_counted
        source = "counter" if self.is_counted else "samples"
        return GpuEnergy(*self._what, source, time_s, energy_j, error_j, is_resolved, peak_w)


def _meters(gpus: Sequence[Gpu]) -> list[_Meter]:
    """Return a meter for each GPU; real ones are watched all at once, simulated ones may share a
    clock.
    """
    if not all(gpu.keeps_settings for gpu in gpus):
        return [_Meter(gpu) for gpu in gpus]
    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(_Meter, gpus))


def _listed(gpus: str | Gpu | Sequence[str | Gpu] | None) -> Sequence[str | Gpu]:
    if gpus is None:
        from perseus_planner.gpu import all_gpus

        gpus = [gpu.text for gpu in all_gpus() if not gpu.problem]
    listed: Sequence[str | Gpu] = gpus if isinstance(gpus, (list, tuple)) else [gpus]  # type: ignore[list-item]
    if not listed:
        raise UsageError(
            "there is no GPU to measure; name one, such as nvml:0 or emulated:a100-sxm"
        )
    return listed
