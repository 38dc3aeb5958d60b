"""Measure what requests to a server cost: time and energy of prefill and decode, over clocks or
power limits.

A round sends a batch of equal requests at once and waits for all of their tokens; rounds are
repeated in windows of seconds, as in training (`row_meter.py`), whose energy a `Monitor` measures.
Rounds of one output token are the prefill. What longer rounds need beyond that is the decode, so no
edge of a window lies between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import write_file
from perseus_planner.base.tables import csv_text
from perseus_planner.base.units import Count, Seconds
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.monitor import Monitor
from perseus_planner.profiler.control import common_settings, opened_control
from perseus_planner.profiler.lock_check import LockCheck

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu

_CLOCK_EVERY_S = 0.05
_SETTINGS = 6  # that are measured unless they are given
_LOWEST = 0.4  # of the highest setting: below, requests are slow and no cheaper


class Target(Protocol):
    """Serves requests: a server on this machine, or a function."""

    def serve(self, batch: int, input_tokens: int, output_tokens: int) -> Sequence[Sequence[float]]:
        """Send `batch` requests at once, and return the seconds from then to each output token
        of each request.
        """


class Shape(NamedTuple):
    """A class of requests: how many tokens go in, and how many come out."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ServingSettings(Checked):
    """How requests are measured.

    Raises:
        UsageError: If a value is out of range.
    """

    shapes: tuple[Shape, ...]  #: Classes of requests
    batches: tuple[int, ...] = (1,)  #: How many requests are sent at once
    control: str = "clock"  #: What is set: "clock", "power-limit", or "observed" to set nothing
    #: Clocks in MHz or power limits in watts, highest first; empty for six, down to 40 % of the
    #: highest.
    settings: tuple[int, ...] = ()
    window_s: Seconds = 10.0  #: The minimum length of a window, seconds
    windows: Count = 3  #: Number of windows of each measurement

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control not in ("clock", "power-limit", "observed"):
            raise UsageError(
                f"control: {self.control!r} is unknown; choose one of: clock, power-limit, observed"
            )
        if not self.shapes or not self.batches:
            raise UsageError("there is nothing to measure; give a class of requests and a batch")
        if self.control == "observed" and self.settings:
            raise UsageError("control='observed' sets nothing; leave out the settings")


@dataclass(frozen=True)
class ServedRow:
    """What requests of one class cost at one setting; seconds and joules, all GPUs together."""

    shape: Shape  #: The class of requests
    batch: int  #: How many were sent at once
    tensor_degree: int  #: Number of GPUs
    setting: int  #: Clock in MHz or power limit in watts; the achieved clock if nothing is set
    time_s: float  #: Time of a round
    energy_j: float  #: Energy of one request
    #: Its error at most: what the energy counters did not show at the edges of windows.
    error_j: float
    prefill_j: float  #: Energy of one request up to its first token
    #: Time to the first token.
    ttft_p50_s: float
    ttft_p95_s: float
    #: Time between tokens; None if there is one token.
    tbt_p50_s: float | None
    tbt_p95_s: float | None
    idle_w: float  #: Power of the GPUs without requests

    @property
    def tokens_per_s(self) -> float:
        """Input and output tokens of all requests in a second."""
        return self.batch * sum(self.shape) / self.time_s

    @property
    def decode_j(self) -> float:
        """Energy of one request after its first token."""
        return max(0.0, self.energy_j - self.prefill_j)

    @property
    def tokens_per_j(self) -> float:
        """Input and output tokens per joule, which is also tokens/s per watt."""
        return sum(self.shape) / self.energy_j

    @property
    def input_token_j(self) -> float:
        """Energy of an input token: the prefill over all of them."""
        return self.prefill_j / self.shape.input_tokens

    @property
    def output_token_j(self) -> float | None:
        """Energy of an output token after the first; None if there is none."""
        return (
            self.decode_j / (self.shape.output_tokens - 1) if self.shape.output_tokens > 1 else None
        )


class _Rounds(NamedTuple):
    """Rounds of one kind: the means of a round, over all windows, and the latencies of all
    requests.
    """

    time_s: float
    energy_j: float
    error_j: float
    achieved_mhz: float
    firsts_s: list[float]
    betweens_s: list[float]


def measure_serving(
    target: Target,
    gpus: Sequence[Gpu],
    settings: ServingSettings,
    progress: Callable[[int, int], None] | None = None,
) -> list[ServedRow]:
    """Measure all classes and batches at all settings, from the highest setting down; restore the
    GPUs afterwards.

    Args:
        target: What serves the requests.
        gpus: The GPUs that it runs on; all get the same setting.
        settings: What to measure.
        progress: Called with the number of measurements that are done, and of all.

    Raises:
        UsageError: If a setting cannot be set, or the target does not serve what was asked of it.
        GpuError: If a GPU cannot be read or set, or if clock locks have no effect.
    """
    with ExitStack() as stack:
        chosen: Sequence[int | None] = (None,)
        set_to: list[Callable[[int], None]] = []
        if settings.control != "observed":
            stack.enter_context(lease_gpus(gpus, power_limit=settings.control == "power-limit"))
            controls = [stack.enter_context(opened_control(gpu, settings.control)) for gpu in gpus]
            set_to = [control for _, control in controls]
            chosen = _chosen(common_settings([offered for offered, _ in controls]), settings)
        meter = _Meter(target, gpus, stack.enter_context(Monitor(list(gpus))), settings)
        inputs = sorted({shape.input_tokens for shape in settings.shapes})
        kinds = len(settings.batches) * (len(inputs) + len(settings.shapes))
        rows: list[ServedRow] = []
        locks = LockCheck(gpus[0].text)
        for number, setting in enumerate(chosen):
            for set_one in set_to:
                set_one(setting)  # type: ignore[arg-type]
            report = _counted(progress, number * kinds, len(chosen) * kinds)
            rows += meter.rows(setting, report)
            if settings.control == "clock" and setting is not None:
                locks.add(setting, meter.achieved_mhz, ())
        locks.finish()
    return rows


class _Meter:
    """Measures rounds on some GPUs, at the setting that they have."""

    def __init__(
        self, target: Target, gpus: Sequence[Gpu], monitor: Monitor, settings: ServingSettings
    ) -> None:
        self._target, self._gpus, self._monitor, self._settings = target, gpus, monitor, settings
        self.achieved_mhz = 0.0

    def rows(self, setting: int | None, done: Callable[[], None]) -> Iterator[ServedRow]:
        """Yield a row of each batch and class."""
        self._target.serve(1, *self._settings.shapes[0])  # the first request of a server is slow
        idle_w = self._idle_w()
        for batch in self._settings.batches:
            prefills: dict[int, _Rounds] = {}
            for shape in sorted(set(self._settings.shapes)):
                if shape.input_tokens not in prefills:
                    prefills[shape.input_tokens] = self._measure(
                        batch, Shape(shape.input_tokens, 1)
                    )
                    done()
                prefill = prefills[shape.input_tokens]
                whole = prefill if shape.output_tokens == 1 else self._measure(batch, shape)
                self.achieved_mhz = whole.achieved_mhz
                done()
                betweens_s = whole.betweens_s or None
                yield ServedRow(
                    shape=shape,
                    batch=batch,
                    tensor_degree=len(self._gpus),
                    setting=round(whole.achieved_mhz) if setting is None else setting,
                    time_s=whole.time_s,
                    energy_j=whole.energy_j / batch,
                    error_j=whole.error_j / batch,
                    prefill_j=prefill.energy_j / batch,
                    ttft_p50_s=_quantile(whole.firsts_s, 0.5),
                    ttft_p95_s=_quantile(whole.firsts_s, 0.95),
                    tbt_p50_s=betweens_s and _quantile(betweens_s, 0.5),
                    tbt_p95_s=betweens_s and _quantile(betweens_s, 0.95),
                    idle_w=idle_w,
                )

    def _measure(self, batch: int, shape: Shape) -> _Rounds:
        """Repeat rounds in some windows, and return their means."""
        rounds, time_s, energy_j, error_j = 0, 0.0, 0.0, 0.0
        clocks_mhz: list[int] = []
        firsts_s: list[float] = []
        betweens_s: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            for _ in range(self._settings.windows):
                with self._monitor.window() as window:
                    begin_s = self._gpus[0].now_s()
                    while self._gpus[0].now_s() - begin_s < self._settings.window_s:
                        running = pool.submit(self._target.serve, batch, *shape)
                        clocks_mhz += self._clocks_during(running)
                        for times_s in running.result():
                            firsts_s.append(times_s[0])
                            betweens_s += [
                                after_s - before_s for before_s, after_s in pairwise(times_s)
                            ]
                        rounds += 1
                time_s += window.time_s
                energy_j += window.energy_j
                error_j = math.hypot(
                    error_j, window.error_j
                )  # windows begin at different phases of the counters
        return _Rounds(
            time_s / rounds,
            energy_j / rounds,
            error_j / rounds,
            fmean(clocks_mhz),
            firsts_s,
            betweens_s,
        )

    def _clocks_during(self, running: Future[Sequence[Sequence[float]]]) -> list[int]:
        """Return clocks that the GPUs have until the future is done: at least one."""
        clocks_mhz = []
        while True:
            wait([running], timeout=_CLOCK_EVERY_S)
            clocks_mhz += [gpu.clock_mhz() for gpu in self._gpus]
            if running.done():
                return clocks_mhz

    def _idle_w(self) -> float:
        with self._monitor.window() as window:
            self._gpus[0].wait(min(1.0, self._settings.window_s))
        return window.average_w


def _chosen(possible: Sequence[int], settings: ServingSettings) -> list[int]:
    """Return the settings to measure, highest first."""
    if not settings.settings:
        fitting = [candidate for candidate in possible if candidate >= _LOWEST * possible[0]]
        steps = min(_SETTINGS, len(fitting))
        return [
            fitting[round(step * (len(fitting) - 1) / max(1, steps - 1))] for step in range(steps)
        ]
    for wanted in settings.settings:
        if wanted not in possible and settings.control == "clock":
            nearest = min(possible, key=lambda setting: abs(setting - wanted))
            raise UsageError(
                f"clock {wanted} MHz: the GPU does not have it; the nearest is {nearest} MHz"
            )
    return sorted(set(settings.settings), reverse=True)


def _counted(
    progress: Callable[[int, int], None] | None, begin: int, total: int
) -> Callable[[], None]:
    """Return a function that reports one measurement more each time."""
    done = begin

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return report


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def save_served(rows: Sequence[ServedRow], control: str, origin: str, path: Path) -> None:
    """Write an inference profile as `planner inference plan` reads it; latencies are the 95th
    percentiles.

    Raises:
        UsageError: If the file cannot be written.
    """
    columns = {
        "input": "shape.input_tokens",
        "output": "shape.output_tokens",
        "tensor_degree": "tensor_degree",
        "power_limit_w" if control == "power-limit" else "clock_mhz": "setting",
        "tokens_per_s": "tokens_per_s",
        "energy_j": "energy_j",
        "ttft_s": "ttft_p95_s",
        "tbt_s": "tbt_p95_s",
        "idle_w": "idle_w",
        "batch": "batch",
        "energy_error_j": "error_j",
        "prefill_j": "prefill_j",
        "ttft_p50_s": "ttft_p50_s",
        "tbt_p50_s": "tbt_p50_s",
    }
    values = map(attrgetter(*columns.values()), rows)
    cells = (
        [f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in values
    )
    text = f"# {origin} by planner inference profile\n{csv_text([columns, *cells])}"
    write_file(path, text, UsageError)
