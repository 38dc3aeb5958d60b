"""Two runs beside each other: what `planner show RUN RUN2` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from perseus_planner.base.tables import Column, Sheet, lay_out
from perseus_planner.views.run import summarize_run
from perseus_planner.views.unplanned import summarize_unplanned

if TYPE_CHECKING:
    from perseus_planner.runs.account import Account
    from perseus_planner.runs.run import Run

_UNKNOWN = "-"


@dataclass(frozen=True)
class RunFigures:
    """What is compared of a run."""

    name: str  #: its folder
    gpu: str | None  #: name of its first rank's GPU; None if it is not known
    ranks: int  #: number of ranks
    is_dry_run: bool  #: whether it set no clocks
    #: seconds of an iteration from its begin to its end on the slowest rank: the mean over those in
    #: the planned order by its newest plan, or over the typical ones of a run without a plan.
    iteration_s: float | None
    planned_s: float | None  #: seconds of an iteration by that plan; None without a plan
    total: Account  #: all iterations of all its attempts
    deviations: int  #: number of iterations, over all ranks, that were not in the planned order

    @property
    def energy_j(self) -> float | None:
        """Joules of all GPUs in an iteration with what passes until the next; None if not known."""
        total = self.total
        if not (total.metered_s and total.iterations):
            return None
        return total.energy_j / total.metered_s * total.gpu_s / total.iterations

    @property
    def power_w(self) -> float | None:
        """Mean watts of all GPUs together; None if not known."""
        # Over the mean window, as energies are of all ranks: the first one begins first.
        energy_j = self.energy_j
        return None if energy_j is None else energy_j * self.total.windows / self.total.gpu_s


@dataclass(frozen=True)
class RunPair:
    """Two runs."""

    first: RunFigures  #: the one that was named first
    second: RunFigures  #: the other


def figures_of(run: Run, name: str) -> RunFigures:
    """Return what is compared of a run."""
    # An iteration counts by the newest plan, as earlier ones ran by others.
    iteration_s = planned_s = None
    deviations = 0
    if run.versions:
        summary = summarize_run(run)
        gpu = next((rank.iterations[-1].gpu for rank in run.ranks), None)
        iteration_s = summary.current.time_s
        planned_s = summary.current.planned_time_s
        deviations = sum(deviation.times for deviation in summary.deviations)
    # Without a plan, first iterations and those after evaluations are no measure.
    else:
        gpu = summarize_unplanned(run).gpu
        iteration_s = max(fmean(row.time_s for row in rank.typical) for rank in run.ranks)
    return RunFigures(
        name, gpu, len(run.ranks), run.is_dry_run, iteration_s, planned_s, run.total, deviations
    )


def pair_text(pair: RunPair) -> str:
    """Return the table of two runs: a row for each quantity, and by how much the second differs."""
    # The rows are the quantities here, as two runs are read from left to right.
    columns = lay_out(
        _ROWS,
        Column("", lambda row: row[0], "<"),
        Column(pair.first.name, lambda row: _written(row, pair.first)),
        Column(pair.second.name, lambda row: _written(row, pair.second)),
        Column("difference", lambda row: _difference(row, pair)),
    )
    notes = [
        "Iteration s goes from the begin of an iteration to its end, on the slowest rank, in the "
        "mean over those that count: by a plan, those in the planned order by the newest one, "
        "without the first of them. Energy, power, saving, shares, clocks and late changes are of "
        "all iterations, each with what passes until the next; `planner show` of one run has late "
        "changes of those that count alone.",
        *(
            f"{run.name} is a dry run: it set no clock."
            for run in (pair.first, pair.second)
            if run.is_dry_run
        ),
    ]
    # Other GPUs differ by more than plans do.
    if pair.first.gpu != pair.second.gpu or pair.first.ranks != pair.second.ranks:
        notes.append("The runs have other GPUs, or another number of them: compare with care.")
    return Sheet(f"{pair.first.name} beside {pair.second.name}", "", columns, notes).text()


def _per_window(name: str) -> Callable[[RunFigures], float | None]:
    """Return what gives the mean of a sum of the account, over iterations and ranks."""

    def mean(run: RunFigures) -> float | None:
        return getattr(run.total, name) / run.total.windows if run.total.windows else None

    return mean


def _share_of(part: str, whole: str) -> Callable[[RunFigures], float | None]:
    """Return what gives one sum of the account as percent of another."""

    def share(run: RunFigures) -> float | None:
        total = getattr(run.total, whole)
        return 100 * getattr(run.total, part) / total if total else None

    return share


def _saved(run: RunFigures) -> float | None:
    share = run.total.saved_share
    return None if share is None else 100 * share


def _saved_within(run: RunFigures) -> float | None:
    return None if run.total.saved_share is None else 100 * run.total.saved_within_share


def _mean_mhz(run: RunFigures) -> float | None:
    total = run.total
    return total.achieved_mhz_s / total.clocked_s if total.clocked_s else None


_Row = tuple[str, Callable[[RunFigures], Any], str, bool]
#: what a row is of, how it is read, how it is written, and whether its difference is a ratio.
_ROWS: tuple[_Row, ...] = (
    ("GPU", lambda run: run.gpu, "", False),
    ("ranks", lambda run: run.ranks, "d", False),
    ("iterations", lambda run: run.total.iterations, "d", False),
    ("iteration s", lambda run: run.iteration_s, ".4g", True),
    ("planned s", lambda run: run.planned_s, ".4g", True),
    ("energy of an iteration J", lambda run: run.energy_j, ".5g", True),
    ("power W", lambda run: run.power_w, ".4g", True),
    ("saved %", _saved, ".2f", False),
    ("saved, +- %", _saved_within, ".2f", False),
    ("between iterations %", _share_of("between_s", "gpu_s"), ".1f", False),
    ("computing %", _share_of("busy_s", "gpu_s"), ".1f", False),
    ("not in the planned order", lambda run: run.deviations, "d", False),
    ("clock changes of a GPU", _per_window("changes_asked"), ".1f", False),
    ("late changes %", _share_of("changes_late", "changes_asked"), ".1f", False),
    ("mean MHz", _mean_mhz, ".0f", True),
    ("hottest deg C", lambda run: run.total.temperature_c, ".0f", False),
)


def _written(row: _Row, run: RunFigures) -> str:
    _, read, form, _ = row
    value = read(run)
    return _UNKNOWN if value is None else format(value, form)


def _difference(row: _Row, pair: RunPair) -> str:
    """Return by how much the second run differs: percent of the first, or what lies between."""
    _, read, form, is_ratio = row
    first = read(pair.first)
    second = read(pair.second)
    # Texts have no difference, and what is equal or unknown needs none.
    if first is None or second is None or not form or first == second:
        return ""
    if is_ratio:
        return f"{100 * (second / first - 1):+.1f} %" if first else ""
    return format(second - first, f"+{form}")
