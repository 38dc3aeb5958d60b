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

The power sensor of a real GPU is read in the background too, as counters were seen that are wrong:
where both disagree, `window.warnings` says so.

With `host=True`, and by the names "cpu" and "dram", windows also have the energy of the processors
and their memory, as Linux shows it (RAPL, `/sys/class/powercap`). Their counters are small, so they
are read in the background, too.

The windows of Zeus' monitor have names, and begin and end by them: `begin_window` and `end_window`
do likewise. With `log=`, each window becomes a row of a CSV that is on disk when `end` returns.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import fsum
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import GpuError, GpuNotSupported, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import csv_text
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.host import HostCounter, host_counters
from perseus_planner.gpu.protocol import ClosedOnExit
from perseus_planner.gpu.sensor import COMPARED_S, PowerSamples, apart_w, disagreement_text
from perseus_planner.profiles.plausible import power_problem

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
        # One more time than intervals: each lies between two updates.
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
            time_s = next_s
            energy_j = next_j
            if abs(rest_w - before_w) <= _STABLE * rest_w:
                break
            before_w = rest_w
        return RestingReading(time_s, energy_j, rest_w)

    def _wait_for_update(self) -> tuple[float, float]:
        """Return the time and the counter, seconds and joules, right after its next update."""
        # Wait for a change instead of for a length of time: nobody tells when the driver updates
        # it.
        gpu = self._gpu
        before_j = gpu.energy_j()
        give_up_s = gpu.now_s() + _STUCK_S
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


SAMPLE_S = 0.1
"""Time between two samples of the power of a GPU without a counter, seconds, unless another is
asked for: sensors are updated about that often.
"""

COMPARE_S = 0.5
"""Mean time between two samples of the power of a GPU with a counter, seconds: ten in the shortest
window that is compared. The times are drawn, so that no load comes and goes in step with them.
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
    #: not have shown yet at the edges, or how much the power changed between samples. Where counter
    #: and sensor disagree, it is their difference at least.
    error_j: float
    #: Whether the window was longer than the counter takes for an update: else its energy says
    #: little, and `error_j` is as large.
    is_resolved: bool
    #: Highest power that was sampled, watts; None if the power was not sampled.
    peak_w: float | None
    #: Mean power by the sensor, watts; None if there is no counter to compare it with, the window
    #: was shorter than `COMPARED_S`, or too few samples could be had.
    sensor_w: float | None = None
    #: What makes the energy doubtful, or that of more than one GPU, and what to do.
    warnings: tuple[str, ...] = ()

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
            GPUs without an energy counter every `SAMPLE_S` seconds, and real GPUs with one every
            `COMPARE_S` seconds on average, as far as they have a sensor.
        on_sample: Called with each sample, in the thread that samples.
        host: Also measure the processors and their memory, as far as Linux shows their energy.
        log: A CSV to which each window is added when it ends; it survives the death of the process.
        strict: Raise an error if a GPU cannot be read. With False, a GPU that cannot be read now
            or later is left out of a window, and its `unknown` says why.

    Attributes:
        unknown: GPU -> why it could not be opened or read when the monitor was opened; empty with
            `strict`.

    Raises:
        GpuError: If a GPU, or the energy of the host, cannot be opened or read; without `strict`,
            if none can.
        UsageError: If there is no GPU to measure, or the log cannot be written.
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
        strict: bool = True,
    ) -> None:
        self._synchronize = synchronize
        self._on_sample = on_sample
        self._strict = strict
        self.unknown: dict[str, str] = {}
        self._named: dict[str, Window] = {}
        self._log: tuple[int, str] | None = None  #: descriptor and path
        self._open: set[Window] = set()
        self._lock = threading.Lock()  #: of what the sampling thread shares
        self._problem: BaseException | None = None
        with ExitStack() as stack:
            # What is opened is closed again if a later step fails: the stack is only kept at the
            # end.
            opened = self._opened(self._listed(gpus), stack)
            self._meters = self._metered(opened)
            # Meters of GPUs stand before those of the host, so that a count tells them apart.
            self._count = len(self._meters)
            counters = host_counters() if host else []
            self._meters += [_Meter(counter) for counter in counters]
            if log is not None:
                self._log = _open_log(log, stack)
                # A log that was begun by an earlier run keeps its heading.
                if not os.fstat(self._log[0]).st_size:
                    names = (f"energy of {meter.gpu.text} (J)" for meter in self._meters)
                    self._write("window", "time (s)", "energy (J)", *names)
            self._begin_sampling(sample_s, stack)
            if counters:
                stack.callback(_keep_reading(counters).stop)
            # From here on `close` undoes it.
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
        """End the window of this name, and return it, as `ZeusMonitor.end_window` does.

        Raises:
            UsageError: If no window of this name has begun.
            GpuError: If a GPU cannot be read.
        """
        if name not in self._named:
            raise UsageError(f"window {name!r}: has not begun; begin and end each window once")
        return self._named.pop(name).end()

    def close(self) -> None:
        """Stop sampling, and close the GPUs that were opened here."""
        self._stack.close()

    def _listed(self, gpus: str | Gpu | Sequence[str | Gpu] | None) -> Sequence[str | Gpu]:
        """Return the GPUs to open; None stands for all that can be opened."""
        if gpus is None:
            from perseus_planner.gpu import all_gpus

            visible = all_gpus()
            gpus = [gpu.text for gpu in visible if not gpu.problem]
            if not self._strict:
                self.unknown |= {gpu.text: gpu.problem for gpu in visible if gpu.problem}
        # A single GPU is taken like a list of one; a text is a sequence, too, so `Sequence` does
        # not tell.
        listed: Sequence[str | Gpu] = gpus if isinstance(gpus, (list, tuple)) else [gpus]  # type: ignore[list-item]
        if not listed:
            raise UsageError(
                "there is no GPU to measure; name one, such as nvml:0 or emulated:a100-sxm"
            )
        return listed

    def _opened(self, gpus: Sequence[str | Gpu], stack: ExitStack) -> list[Gpu]:
        """Open the GPUs that are given as texts."""
        opened = []
        for gpu in gpus:
            try:
                opened.append(stack.enter_context(open_gpu(gpu)) if isinstance(gpu, str) else gpu)
            except GpuError as error:
                self._leave_out(str(gpu), error)
        return opened

    def _metered(self, gpus: Sequence[Gpu]) -> list[_Meter]:
        """Return a meter for each GPU that can be read."""
        meters = []
        last = None
        for gpu, meter in zip(gpus, _meters(gpus), strict=True):
            if isinstance(meter, GpuError):
                self._leave_out(gpu.text, last := meter)
            else:
                meters.append(meter)
        if not meters:
            raise last or GpuError("; ".join(self.unknown.values()))
        return meters

    def _leave_out(self, gpu: str, error: GpuError) -> None:
        if self._strict:
            raise error
        self.unknown[gpu] = str(error)

    def _begin_sampling(self, sample_s: float | None, stack: ExitStack) -> None:
        """Sample the power: of all GPUs if that is asked for, else where it is needed."""
        # Who asked for peaks or for samples gets all GPUs. Otherwise a sensor is only read where it
        # tells something: in place of a counter, or beside that of a real GPU, which may be wrong.
        is_asked = sample_s is not None or self._on_sample is not None
        gpus = self._meters[: self._count]
        self._sampled = [
            meter
            for meter in gpus
            if is_asked or not meter.is_counted or meter.gpu.origin == "measured"
        ]
        if not self._sampled:
            return
        # Once in this thread, so that a GPU that cannot be sampled is refused when the monitor is
        # opened.
        self._sample(strict=is_asked and self._strict)
        # Regular samples are integrated; drawn times only serve the comparison with a counter.
        is_regular = is_asked or not all(meter.is_counted for meter in gpus)

        def step() -> float | None:
            self._sample()
            return None if is_regular else COMPARE_S * random.uniform(0.5, 1.5)

        loop = Loop(step, "energy samples", sample_s or SAMPLE_S, on_error=self._fail)
        stack.callback(loop.start().stop)

    def _edge(self) -> list[_Edge | GpuError]:
        """Read all GPUs at the edge of a window."""
        # Work that was launched before the edge belongs before it.
        if self._synchronize is not None:
            self._synchronize()
        # The sampling thread has ended by an error that nobody has seen yet.
        if self._problem is not None:
            raise self._problem
        edges: list[_Edge | GpuError] = []
        for meter in self._meters:
            try:
                edges.append(meter.edge())
            except GpuError as error:
                if self._strict:
                    raise
                # The error stands in the edge's place, so that edges stay in the order of the
                # meters.
                edges.append(error)
        return edges

    def _write(self, *cells: object) -> None:
        """Add a row to the log in one call: it is kept, whatever becomes of the process."""
        if self._log is None:
            return
        descriptor, path = self._log
        try:
            os.write(descriptor, csv_text([cells]).encode())
        except OSError as error:
            raise UsageError(
                f"{path}: the log of windows cannot be written: {error.strerror}; make room, or "
                "leave log= out"
            ) from error

    def _sample(self, *, strict: bool = False) -> None:
        for meter in self._sampled:
            try:
                sample = PowerSample(meter.gpu.text, *meter.sample())
            except GpuError:  # a window that needs it will say so
                if strict:
                    raise
                continue
            with self._lock:
                # Windows may overlap, and each of them gets the sample.
                for window in self._open:
                    window._add(sample)
            if self._on_sample is not None:
                self._on_sample(sample)

    def _fail(self, error: BaseException) -> None:
        self._problem = error


class Window:
    """A window of time, in which the energy of a monitor's GPUs is measured. `Monitor.window` makes
    it.

    Attributes:
        name: Its name.
    """

    def __init__(self, monitor: Monitor, name: str) -> None:
        self.name = name
        self._monitor = monitor
        self._begun: list[_Edge | GpuError] | None = None
        self._ended: list[_Edge | GpuError] | None = None
        self._unknown: dict[str, str] = {}
        self._samples: dict[str, PowerSamples] = {}

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
        # From now on the sampling thread adds to it; its first edge is known before.
        with monitor._lock:
            monitor._open.add(self)
        return self

    def end(self) -> Self:
        """End the window; from now on it can be read.

        Raises:
            UsageError: If it has not begun, or has ended already; or if the log cannot be written.
            GpuError: If a GPU cannot be read, or its counter went back; or if that of the host was
                not read often enough.
        """
        if self._begun is None or self._ended is not None:
            state = "has not begun" if self._begun is None else "has ended already"
            raise UsageError(f"window {self.name!r}: {state}; begin and end each window once")
        # Whatever happens at the last edge, no more samples: the window cannot be ended twice.
        monitor = self._monitor
        try:
            ended = monitor._edge()
        finally:
            with monitor._lock:
                monitor._open.discard(self)
        # A GPU that failed is only left out of the window where the user allowed that.
        for meter, first, last in zip(monitor._meters, self._begun, ended, strict=True):
            error = meter.problem(first, last)
            if error is not None and monitor._strict:
                raise error
            if error is not None:
                self._unknown[meter.gpu.text] = str(error)
        # Set last: a window whose end failed cannot be read.
        self._ended = ended
        energies_j = self._energies_j
        # A cell for each meter, empty where its energy is unknown, so that all rows have the same
        # columns.
        cells = [energies_j.get(number) for number in range(len(ended))]
        monitor._write(self.name, self.time_s, self.energy_j, *cells)
        return self

    def _add(self, sample: PowerSample) -> None:
        samples = self._samples.setdefault(sample.gpu, PowerSamples())
        samples.add(sample.time_s, sample.power_w)

    @property
    def peaks_w(self) -> Mapping[str, float]:
        """Highest power of each GPU that was sampled in it, watts, by the text that opens the
        GPU.
        """
        return {gpu: samples.highest_w for gpu, samples in self._samples.items()}

    @property
    def unknown(self) -> Mapping[str, str]:
        """GPU -> why its energy is not known. Empty unless the monitor has `strict=False`: these
        GPUs are in nothing else that a window says.
        """
        return {**self._monitor.unknown, **self._unknown}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the energy of its GPUs doubtful, and what to do."""
        return tuple(warning for gpu in self.gpus for warning in gpu.warnings)

    def _edges(self) -> Iterator[tuple[int, _Meter, _Edge, _Edge]]:
        """Yield the place and the meter of each GPU that is known, with its edges."""
        if self._begun is None or self._ended is None:
            raise UsageError(f"window {self.name!r}: has not ended; read it after its `with` block")
        edges = zip(self._monitor._meters, self._begun, self._ended, strict=True)
        for number, (meter, first, last) in enumerate(edges):
            if isinstance(first, GpuError) or isinstance(last, GpuError):
                continue
            if meter.gpu.text not in self._unknown:
                yield number, meter, first, last

    @property
    def _energies_j(self) -> dict[int, float]:
        return {number: last.energy_j - first.energy_j for number, _, first, last in self._edges()}

    @cached_property
    def gpus(self) -> tuple[GpuEnergy, ...]:
        """What each GPU used, in the order of `Monitor.gpus`; then the host, if it is measured.

        Raises:
            UsageError: If the window has not ended.
            GpuError: If a GPU cannot be read: its power now tells the error.
        """
        return tuple(
            meter.between(first, last, self._samples.get(meter.gpu.text))
            for _, meter, first, last in self._edges()
        )

    @property
    def time_s(self) -> float:
        """Length of the window, seconds: the longest on any GPU's clock."""
        return max((last.time_s - first.time_s for _, _, first, last in self._edges()), default=0.0)

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs, and of the host if it is measured, joules."""
        return fsum(self._energies_j.values())

    @property
    def gpu_energy(self) -> dict[int, float]:
        """Energy of each GPU by its position, joules: the name that Zeus' measurements have."""
        count = self._monitor._count
        return {number: energy_j for number, energy_j in self._energies_j.items() if number < count}

    @property
    def total_energy(self) -> float:
        """Energy of all GPUs, joules, under the name that Zeus gives it."""
        return fsum(self.gpu_energy.values())

    @property
    def time(self) -> float:
        """Length of the window, seconds, under the name that Zeus gives it."""
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
            for _, _, first, last in self._edges()
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


_OF_ALL_INSTANCES = (
    "MIG is on, so this is the energy of the whole GPU, which all its instances share"
)


class _Meter:
    """A GPU with its energy counter; or, if it has none, with its sampled power, integrated."""

    def __init__(self, gpu: Gpu | HostCounter) -> None:
        self.gpu = gpu
        self._power_w = 0.0
        self._hidden_s = 0.0
        self._lock = threading.Lock()  #: of what is integrated
        #: Of a GPU without a counter: when it could not be sampled last, and why.
        self._gap: tuple[float, GpuError] | None = None
        # Whether it counts is found out by asking: no driver tells in advance.
        try:
            gpu.energy_j()
        except GpuNotSupported:
            self.is_counted = False
            # The trapezoid rule needs the power at the beginning.
            self._power_w = gpu.power_w()
        else:
            self.is_counted = True
            self._look()
            interval_s = (
                gpu.interval_s if isinstance(gpu, HostCounter) else EnergyCounter(gpu).interval_s
            )
            # An update may be under way for an interval, and is seen by the next poll.
            self._hidden_s = interval_s + POLL_S
        # Energy begins at 0: without a counter it is what was integrated since.
        self._last = _Edge(gpu.now_s(), 0.0, 0.0)
        self._what = gpu.text, gpu.name, gpu.origin  # windows are also read when it is closed
        self._remarks: tuple[str, ...] = ()
        if getattr(gpu, "is_mig_on", False):
            self._remarks = (f"{gpu.text}: {_OF_ALL_INSTANCES}",)

    def sample(self) -> tuple[float, float]:
        """Return the time in seconds and the power in watts; without a counter, integrate it up
        to now.
        """
        with self._lock:
            now_s = self.gpu.now_s()
            try:
                power_w = self.gpu.power_w()
            except GpuError as error:
                # The trapezoid across this gap would be a guess, so windows that include it have no
                # energy.
                self._gap = now_s, error
                raise
            # A trapezoid from the last sample. Between them the power was anywhere between both
            # values, so half their difference is the error.
            if not self.is_counted:
                last = self._last
                half_s = (now_s - last.time_s) / 2
                energy_j = last.energy_j + half_s * (power_w + self._power_w)
                error_j = last.error_j + half_s * abs(power_w - self._power_w)
                self._last = _Edge(now_s, energy_j, error_j)
                self._power_w = power_w
        return now_s, power_w

    def edge(self) -> _Edge:
        """Read the energy, and nothing else."""
        if self.is_counted:
            return _Edge(self.gpu.now_s(), self.gpu.energy_j(), 0.0)
        self.sample()
        return self._last

    def problem(self, first: _Edge | GpuError, last: _Edge | GpuError) -> GpuError | None:
        """Return why the energy between two edges is not known; None if it is."""
        # In this order: what could not be read explains more than what follows from it.
        if isinstance(first, GpuError):
            return first
        if isinstance(last, GpuError):
            return last
        if last.energy_j < first.energy_j:
            return self._went_back(first.energy_j, last.energy_j)
        # The counter may have begun again unseen, so that its difference looks right and is not.
        if isinstance(self.gpu, HostCounter):
            unread_s = self.gpu.unread_until_s
            if unread_s is not None and unread_s > first.time_s:
                return self.gpu.unread()
        if not self.is_counted and self._gap is not None and self._gap[0] >= first.time_s:
            return self._gap[1]
        return None

    def _look(self) -> None:
        """Remember the power, if it can be read: not of a GPU that is closed."""
        with suppress(GpuError):
            self._power_w = self.gpu.power_w()

    def _went_back(self, first_j: float, last_j: float) -> GpuError:
        """Return the error of a counter that went back."""
        return GpuError(
            f"{self.gpu.text}: its energy counter went back from {si(first_j, 'J', 9)} "
            f"to {si(last_j, 'J', 9)}, as after a reload of the driver; turn "
            "persistence mode on and measure again"
        )

    def between(self, first: _Edge, last: _Edge, samples: PowerSamples | None) -> GpuEnergy:
        """Return what was used between two edges. What the counter did not show at one of them is
        at most an update at the mean power, or at the one read last.
        """
        time_s, energy_j, error_j = (end - begin for begin, end in zip(first, last, strict=True))
        # Two edges at the same time: no power, rather than a division by 0.
        mean_w = energy_j / time_s if time_s > 0 else 0.0
        warnings = self._remarks
        sensor_w = None
        # A window shorter than an update may show any power without a fault.
        problem = power_problem(mean_w, self.gpu.name) if time_s > self._hidden_s else None
        if problem is not None:
            warnings += (f"{self.gpu.text}: the energy cannot be right, {problem}",)
        if self.is_counted:
            self._look()
            # The first edge hides energy from before the window, and the last energy of the
            # window: only one can prevail.
            error_j = self._hidden_s * max(mean_w, self._power_w)
            if samples is not None and time_s >= COMPARED_S:
                sensor_w = samples.mean_w(first.time_s, last.time_s)
            if samples is not None and sensor_w is not None:
                # What the edges hide is no disagreement of the sensor.
                doubt_w = samples.doubt_w(time_s) + error_j / time_s
                apart = apart_w(mean_w, sensor_w, doubt_w)
                if apart:
                    warnings += (disagreement_text(self.gpu.text, mean_w, sensor_w),)
                    # Nobody knows which of both is right, so the error reaches from one to the
                    # other.
                    error_j = max(error_j, apart * time_s)
        return GpuEnergy(
            *self._what,
            source="counter" if self.is_counted else "samples",
            time_s=time_s,
            energy_j=energy_j,
            error_j=error_j,
            is_resolved=time_s > self._hidden_s or not self.is_counted,
            peak_w=None if samples is None else samples.highest_w,
            sensor_w=sensor_w,
            warnings=warnings,
        )


def _meters(gpus: Sequence[Gpu]) -> list[_Meter | GpuError]:
    """Return a meter for each GPU, or why it cannot be read; real ones are watched all at once,
    simulated ones may share a clock.
    """

    def meter(gpu: Gpu) -> _Meter | GpuError:
        try:
            return _Meter(gpu)
        except GpuError as error:
            return error

    # Timing a counter takes a second, which real GPUs can spend at once. Simulated ones may share a
    # clock, which all would move.
    if not gpus or not all(gpu.keeps_settings for gpu in gpus):
        return [meter(gpu) for gpu in gpus]
    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(meter, gpus))


def _keep_reading(counters: Sequence[HostCounter]) -> Loop:
    """Read the counters of the host in the background, before they begin again."""

    def read() -> None:
        for counter in counters:
            with suppress(GpuError):  # whoever needs it reads it, too
                counter.energy_j()

    period_s = min(counter.period_s for counter in counters)
    return Loop(read, "energy of the host", period_s).start()


def _open_log(log: str | os.PathLike[str], stack: ExitStack) -> tuple[int, str]:
    """Open the log at its end; return its descriptor and its path."""
    path = os.fspath(log)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; name another log"
        ) from error
    # Only now: a descriptor that was not opened must not be closed.
    stack.callback(os.close, descriptor)
    return descriptor, path
