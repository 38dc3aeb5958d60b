"""What people want to know of each iteration on each rank, with units in the names: for trackers,
and as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.base.tables import csv_text
from perseus_planner.runs.account import Account

if TYPE_CHECKING:
    from perseus_planner.runs.records import IterationRecord
    from perseus_planner.runs.run import Run

_RANK = ("iteration", "rank", "pipeline", "pipeline_rank", "gpu", "plan", "begin_s")
_VALUES = (
    *("iteration_s", "gpu_energy_j", "gpu_power_w", "gpu_saved_j", "gpu_clock_mhz"),
    *("as_planned", "verdict"),
)


def values_of(record: IterationRecord) -> dict[str, float | str]:
    """Return the values of an iteration on one rank. Those that are not known are missing.

    Returns:
        `iteration_s`, from its begin to the begin of the next one without a pause, seconds;
        `gpu_energy_j`, `gpu_power_w` and `gpu_saved_j`, what the rank's GPU used, drew and saved in
        that time, joules and watts; `gpu_clock_mhz`, its mean clock; `as_planned`, 1 or 0; and
        `verdict`, which says in words what was not as planned.
    """
    # The account of one row, so that trackers show what reports add up.
    account = Account.of(record, is_first=True)
    values: dict[str, float | str] = {"iteration_s": account.time_s}
    # Without energy there is no power, and a missing value says so.
    if account.metered_s:
        values["gpu_energy_j"] = account.energy_j
        values["gpu_power_w"] = account.energy_j / account.metered_s
        values["gpu_saved_j"] = account.saved_j
    if record.achieved_mhz is not None:
        values["gpu_clock_mhz"] = record.achieved_mhz
    values["as_planned"] = float(record.deviation is None)
    values["verdict"] = record.deviation or "as planned"
    return values


def values_csv(run: Run) -> bytes:
    """Return a CSV with the values of each iteration in the folder on each rank, in this order; a
    value that is not known is an empty cell.

    Before them stand the numbers of the iteration, the rank, its pipeline and the rank there; the
    name of its GPU, the version of its plan, and when it began, in seconds since the epoch.
    """
    rows: list[tuple[object, ...]] = []
    for rank in run.ranks:
        for row in rank.iterations:
            values = values_of(row)
            cells = [values.get(name) for name in _VALUES]
            numbers = (row.iteration, rank.rank, row.pipeline, row.pipeline_rank)
            rows.append((*numbers, row.gpu, row.version, row.begin_s, *cells))
    # By iteration first, so that ranks of one can be compared.
    rows.sort(key=lambda cells: cells[:2])
    return csv_text([(*_RANK, *_VALUES), *rows]).encode()
