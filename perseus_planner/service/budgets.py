"""Budget files: power budgets by their moment, or a price or carbon intensity from which they
follow.

A CSV with the columns `start` and one of `power`, `price` and `carbon`:

| column | content |
|---|---|
| `start` | from when: ISO 8601, such as 2026-11-22T18:00+01:00, in this machine's zone if none is
given; or seconds |
|         | since the epoch |
| `power` | a power budget: watts, or a number with W, kW or MW; none for no budget |
| `price` | money for a kWh |
| `carbon` | gCO2 for a kWh |

With a price or carbon, the power budget is what keeps an hour within a target: money, or kg of CO2.
"""

from __future__ import annotations

import math
import os
from datetime import datetime
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.tables import CsvFile, CsvRow, Text
from perseus_planner.base.units import POWER_BUDGET, Rule
from perseus_planner.service.models import PowerStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SIGNALS = ("power", "price", "carbon")
_HEADER = "write start and one of power, price and carbon"
_PRICE = Rule(float, True, "a price: write money for a kWh, such as 0.12", negative=True)
_CARBON = Rule(float, True, "a carbon intensity: write gCO2 for a kWh, such as 230")


def read_budgets(path: Path, target: float | None = None) -> tuple[PowerStep, ...]:
    """Read the budgets in the file at `path`.

    Args:
        path: The file.
        target: What an hour may cost: money for prices, kg of CO2 for carbon intensities.

    Raises:
        UsageError: If the file cannot be read, a row is wrong, or the target is missing or does not
            apply. The text names file, line, column and remedy.
    """
    table = CsvFile(path, UsageError)
    signals = [name for name in _SIGNALS if name in table.header]
    if sorted(table.header) != sorted(["start", *signals]) or len(signals) != 1:
        columns = ", ".join(table.header) or "of no header"
        raise UsageError(f"{table.where}: has the columns {columns}; {_HEADER}")
    signal = signals[0]
    if (target is None) != (signal == "power"):
        needed = (
            "do not give one for powers"
            if signal == "power"
            else f"give what an hour may cost, for {signal}"
        )
        raise UsageError(f"--target: {needed}, as {path} has the column {signal!r}")
    steps: list[PowerStep] = []
    for row in table:
        start_s = row.read("start", _MOMENT)
        if steps and start_s <= steps[-1].start_s:
            raise UsageError(
                f"{row.place('start')}: {shown(row['start'])} is not after the row before; sort "
                "the rows"
            )
        steps.append(PowerStep(start_s, _power_w(signal, row, target)))
    if not steps:
        raise UsageError(
            f"{path}: has no row; write one for each budget, such as 2026-11-22T18:00,30kW"
        )
    return tuple(steps)


def replaced(path: Path, wait: Callable[[], object]) -> Iterator[None]:
    """Call `wait` again and again, and yield whenever the file at `path` is another one than
    before.
    """
    seen = _identity(path)
    while True:
        wait()
        if (now := _identity(path)) not in (None, seen):
            seen = now
            yield


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        file_stat = os.stat(path)
    except OSError:  # it is being replaced, or gone for a while
        return None
    return file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size


def _parse_moment(text: str) -> float | None:
    if (seconds := Rule(float, True, "").parse(text)) is not None:
        return float(seconds)
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


_MOMENT = Text(
    _parse_moment,
    "a moment: write such as 2026-11-22T18:00+01:00, or seconds since the epoch",
)


def _power_w(signal: str, row: CsvRow, target: float | None) -> float | None:
    if signal == "power":
        text = row[signal]
        return None if text == "none" else POWER_BUDGET.read(text, row.place(signal))
    value = row.read(signal, _PRICE if signal == "price" else _CARBON)
    if value <= 0 or target is None:  # energy that costs nothing needs no budget
        return None
    power_w = 1000.0 * target / value * (1000.0 if signal == "carbon" else 1.0)
    return min(power_w, 1e12) if math.isfinite(power_w) else None
