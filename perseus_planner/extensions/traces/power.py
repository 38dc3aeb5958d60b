"""Logs of power and clocks: what GPUs draw while they compute and while they wait.

Read are the CSV files of `nvidia-smi --query-gpu=... --format=csv` and `nvidia-smi dmon`, and the
answers of Prometheus' `query_range` for the series of DCGM's exporter. Where the log and the trace
are of the same time, watts are fitted to the busy share of each sample, and the offset of the two
clocks with it; else the mean power and the busy share of the whole give the watts, with those of
waiting assumed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.files import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

_LEAST_SAMPLES = 20  #: per GPU; by hand: fewer leave watts uncertain by more than 10 %
_LONGEST_S = 5.0
"""Seconds between samples beyond which they say nothing of single computations: at 15 s, watts are
off by up to 26 W; means over the whole are used then."""
_TIMES = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_IDLE_SHARE = 0.5  #: of the most power, below which a sample's clock is not that of computing


class Samples(NamedTuple):
    """What one GPU's log has, in the order of time."""

    gpu: str
    times_s: Floats  #: since the epoch, by the clock and time zone of the log
    power_w: Floats
    clock_mhz: Floats | None  #: SM clock, if the log has it


@dataclass(frozen=True)
class SeenPower:
    """What logs show of a kind of GPU."""

    computing_w: float
    computing_error_w: float  #: standard error
    waiting_w: float | None  #: None if it cannot be told
    waiting_error_w: float | None
    clock_mhz: float | None  #: median while computing
    samples: int
    how: str  #: how the watts were found, for people


def read_power(path: Path) -> list[Samples]:
    """Read the log of one or more GPUs.

    Raises:
        UsageError: If it cannot be read, or has no power.
    """
    text = read_text(path, UsageError, "a log of power")
    # The first character tells the three sorts apart.
    begin = text.lstrip()[:1]
    if begin == "{":
        rows = _prometheus(path, text)
    elif begin == "#":
        rows = _dmon(path, text)
    else:
        rows = _query(path, text)
    by_gpu: dict[str, list[tuple[float, float, float]]] = {}
    for gpu, time_s, power_w, clock_mhz in rows:
        by_gpu.setdefault(gpu, []).append((time_s, power_w, clock_mhz))
    samples = []
    # Ranks are traced in the order of the GPUs' numbers, where 10 is not before 2.
    for gpu, of_gpu in sorted(by_gpu.items(), key=lambda named: _by_number(named[0])):
        # Logs may be out of order, and samples without power are of no use.
        table = np.array(sorted(of_gpu))
        table = table[np.isfinite(table[:, 1])]
        if not len(table):
            continue
        clocks = table[:, 2] if np.isfinite(table[:, 2]).any() else None
        samples.append(Samples(gpu, table[:, 0], table[:, 1], clocks))
    if not samples:
        raise UsageError(
            f"{path}: has no power of a GPU; log it with nvidia-smi "
            "--query-gpu=timestamp,index,power.draw.instant,clocks.sm --format=csv -lms 200"
        )
    return samples


def _by_number(gpu: str) -> tuple[bool, int, str]:
    """Return by what GPUs are sorted: numbers by their value, then others by their text."""
    is_number = gpu.isdecimal()
    return not is_number, int(gpu) if is_number else 0, gpu


Rows = list[tuple[str, float, float, float]]
"""GPU, seconds, watts and MHz of each sample; NaN for what it does not have."""


def _query(path: Path, text: str) -> Rows:
    lines = [line for line in text.splitlines() if line.strip()]
    # Names have their units behind them, and columns stand in the order that was asked for.
    header = [name.strip().split(" ")[0] for name in lines[0].split(",")]
    power = next((name for name in header if name.startswith("power.draw")), None)
    if power is None or "timestamp" not in header:
        raise UsageError(
            f"{path}, line 1: {shown(lines[0])} has no timestamp and power.draw; log with "
            "nvidia-smi --query-gpu=timestamp,index,power.draw.instant,clocks.sm --format=csv"
        )
    # nvidia-smi knows the clock by two names.
    at_clock = next((name for name in ("clocks.current.sm", "clocks.sm") if name in header), None)
    at_gpu = next((name for name in ("index", "uuid", "pci.bus_id") if name in header), None)
    rows: Rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = dict(zip(header, (cell.strip() for cell in line.split(",")), strict=False))
        if len(cells) < len(header):
            # A log that was cut off is no error, but a short line in its middle is.
            if number == len(lines):
                break  # the log ended inside its last line
            raise UsageError(
                f"{path}, line {number}: has {len(cells)} cells where the header has "
                f"{len(header)}; log it again"
            )
        time_s = _time_s(f"{path}, line {number}", cells["timestamp"])
        clock_mhz = np.nan if at_clock is None else _value(cells[at_clock])
        gpu = "0" if at_gpu is None else cells[at_gpu]
        rows.append((gpu, time_s, _value(cells[power]), clock_mhz))
    return rows


def _dmon(path: Path, text: str) -> Rows:
    rows: Rows = []
    header: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell for cell in re.split(r"[,\s]+", line.strip().lstrip("#")) if cell]
        # Its header comes again and again, with units below it.
        if line.lstrip().startswith("#"):
            names = [cell.lower() for cell in cells]
            if "gpu" in names:
                header = names
            continue
        if header is None or "pwr" not in header or "time" not in header or "date" not in header:
            raise UsageError(
                f"{path}, line {number}: the columns Date, Time and pwr are missing; log with "
                "nvidia-smi dmon -s pc -o DT --format csv"
            )
        if len(cells) < len(header):
            continue  # the log ended inside a line
        named = dict(zip(header, cells, strict=False))
        stamp = f"{named['date'][:4]}/{named['date'][4:6]}/{named['date'][6:]} {named['time']}"
        time_s = _time_s(f"{path}, line {number}", stamp)
        rows.append((named["gpu"], time_s, _value(named["pwr"]), _value(named.get("pclk", "-"))))
    return rows


def _prometheus(path: Path, text: str) -> Rows:
    try:
        series = json.loads(text)["data"]["result"]
        by_moment: dict[tuple[str, float], list[float]] = {}
        for one_series in series:
            labels = one_series["metric"]
            name = labels.get("__name__", "DCGM_FI_DEV_POWER_USAGE")
            column = {"DCGM_FI_DEV_POWER_USAGE": 0, "DCGM_FI_DEV_SM_CLOCK": 1}.get(name)
            if column is None:
                continue
            # Without a UUID, node and number together name a GPU.
            gpu = labels.get("UUID") or f"{labels.get('Hostname', '')}:{labels.get('gpu', '0')}"
            for time_s, value in one_series["values"]:
                # Power and clock come as series of their own, joined by GPU and time.
                row = by_moment.setdefault((gpu, float(time_s)), [np.nan, np.nan])
                row[column] = float(value)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: is not an answer of Prometheus' query_range ({type(error).__name__}: "
            f"{error}); save that of DCGM_FI_DEV_POWER_USAGE"
        ) from None
    return [(gpu, time_s, *row) for (gpu, time_s), row in by_moment.items()]  # type: ignore[misc]


def _time_s(where: str, text: str) -> float:
    for form in _TIMES:
        try:
            return datetime.strptime(text, form).timestamp()
        except ValueError:
            continue
    raise UsageError(
        f"{where}: {shown(text)} is not a time as nvidia-smi writes it, such as 2026/11/28 "
        "12:00:00.123; log it again"
    )


def _value(text: str) -> float:
    """Return the number of a cell such as "345.12 W"; NaN for "[N/A]"."""
    match = _NUMBER.match(text)
    return float(match[0]) if match else np.nan


def fit_power(
    logs: Sequence[Samples],
    busy: Sequence[Sequence[tuple[float, float]]],
    span_s: tuple[float, float],
    assumed_waiting_w: float,
) -> SeenPower:
    """Return the watts that fit logs and traces of the same GPUs.

    Args:
        logs: of each GPU.
        busy: of each traced GPU, when it computed: begin and end of each computation, seconds.
        span_s: begin and end of the trace, seconds since the epoch.
        assumed_waiting_w: watts while waiting, where the log does not tell.

    Raises:
        UsageError: If there are too few samples.
    """
    samples = sum(len(log.times_s) for log in logs)
    share = _mean_share(busy, span_s)
    # The median, as pauses of logging are no step.
    steps_s = [after - before for log in logs for before, after in pairwise(log.times_s.tolist())]
    step_s = float(np.median(steps_s)) if steps_s else np.inf
    # A log from another time tells means only.
    inside = [
        log for log in logs if np.any((log.times_s >= span_s[0]) & (log.times_s <= span_s[1]))
    ]
    fewest = min(len(log.times_s) for log in logs)
    if fewest < _LEAST_SAMPLES:
        raise UsageError(
            f"--power: {fewest} samples of GPU {min(logs, key=lambda log: len(log.times_s)).gpu} "
            f"are too few for its watts; log at least {_LEAST_SAMPLES} in training, at 5 a second"
        )
    clock_mhz = _clock_mhz(logs)
    # Fitted only where samples are close enough, and as many logs as traced GPUs.
    if inside and step_s <= _LONGEST_S and len(logs) == len(busy):
        fitted = _fitted(logs, busy, span_s, step_s)
        if fitted is not None:
            computing_w, waiting_w, errors = fitted
            return SeenPower(
                computing_w,
                errors[0],
                waiting_w,
                errors[1],
                clock_mhz,
                samples,
                f"fitted to {samples} samples, {step_s:.1f} s apart",
            )
    # The mean power is that of computing and waiting by their shares, of which one is assumed.
    mean_w = float(np.mean(np.concatenate([log.power_w for log in logs])))
    computing_w = (mean_w - (1.0 - share) * assumed_waiting_w) / share
    # Waiting watts off by a fifth are off by so much while computing.
    error_w = (1.0 - share) / share * 0.2 * assumed_waiting_w / 2
    return SeenPower(
        computing_w,
        error_w,
        None,
        None,
        clock_mhz,
        samples,
        f"the mean of {samples} samples and a busy share of {100 * share:.0f} %",
    )


def _clock_mhz(logs: Sequence[Samples]) -> float | None:
    """Return the median clock of the samples in which a GPU computes."""
    clocks = [
        log.clock_mhz[(log.power_w >= _IDLE_SHARE * log.power_w.max())]
        for log in logs
        if log.clock_mhz is not None
    ]
    seen = np.concatenate(clocks) if clocks else np.zeros(0)
    seen = seen[np.isfinite(seen)]
    return float(np.median(seen)) if len(seen) else None


def _mean_share(
    busy: Sequence[Sequence[tuple[float, float]]], span_s: tuple[float, float]
) -> float:
    length_s = (span_s[1] - span_s[0]) * len(busy)
    return sum(end - begin for spans in busy for begin, end in spans) / length_s


def _fitted(
    logs: Sequence[Samples],
    busy: Sequence[Sequence[tuple[float, float]]],
    span_s: tuple[float, float],
    step_s: float,
) -> tuple[float, float, tuple[float, float]] | None:
    """Return computing and waiting watts, and their standard errors, at the offset of clocks that
    fits best; None if the busy shares of samples are all alike.
    """
    # The log's clock and the traces' may differ by seconds, so offsets are tried in quarter steps.
    grid = np.arange(-2.0, 2.0, step_s / 4)
    best: tuple[float, Floats, Floats, Floats] | None = None
    for offset_s in grid.tolist():
        shares: list[Floats] = []
        watts: list[Floats] = []
        for log, spans in zip(logs, busy, strict=True):
            times_s = log.times_s + offset_s
            # A sample is a mean over the step before it, so that must lie in the trace.
            is_inside = (times_s - step_s >= span_s[0]) & (times_s <= span_s[1])
            shares.append(_shares(spans, times_s[is_inside], step_s))
            watts.append(log.power_w[is_inside])
        share = np.concatenate(shares)
        power = np.concatenate(watts)
        # Without different shares, computing and waiting cannot be told apart.
        if len(share) < _LEAST_SAMPLES or float(share.std()) < 0.02:
            continue
        # Power is linear in the busy share, from waiting to computing.
        design = np.stack([share, 1.0 - share], axis=1)
        fitted_w = np.linalg.lstsq(design, power, rcond=None)[0].astype(np.float64)
        misfit = float(np.mean((design @ fitted_w - power) ** 2))
        if best is None or misfit < best[0]:
            best = misfit, fitted_w, design, power
    if best is None:
        return None
    misfit, fitted_w, design, power = best
    # Three numbers were fitted: two powers and the offset.
    freedom = max(1, len(power) - 3)
    covariance = misfit * len(power) / freedom * np.linalg.inv(design.T @ design)
    errors = np.sqrt(np.diag(covariance))
    computing_w, waiting_w = fitted_w.tolist()
    # No GPU draws more while it waits, so such a fit tells nothing.
    if not 0.0 < waiting_w < computing_w:
        return None
    return computing_w, waiting_w, (float(errors[0]), float(errors[1]))


def _shares(spans: Sequence[tuple[float, float]], times_s: Floats, step_s: float) -> Floats:
    """Return the busy share of the time before each sample."""
    begins = np.array([begin for begin, _ in spans])
    ends = np.array([end for _, end in spans])
    order = np.argsort(begins)
    begins = begins[order]
    ends = ends[order]
    # Busy seconds until a moment: whole spans before it, and the begun one.
    before = np.concatenate([[0.0], np.cumsum(ends - begins)])

    def until(moments: Floats) -> Floats:
        count_begun = np.searchsorted(begins, moments, side="right")
        last = np.maximum(count_begun - 1, 0)
        over = np.where(count_begun > 0, np.maximum(ends[last] - moments, 0.0), 0.0)
        done: Floats = before[count_begun] - over
        return done

    # The difference of two sums is what was busy between two moments.
    share: Floats = (until(times_s) - until(times_s - step_s)) / step_s
    return share
