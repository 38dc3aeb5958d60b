"""What plans and runs save against all clocks at maximum: energy, money and carbon, and energy per
token or sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from perseus_planner.base.fields import Checked
from perseus_planner.base.units import COUNT, Rule
from perseus_planner.plans.replay import ALL_MAXIMUM
from perseus_planner.views.context import (
    Comparison,
    compare,
    origin_label,
)

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run import RunSummary
    from perseus_planner.views.sources import Sources

AS_LONG = f"{ALL_MAXIMUM}, in as much time"
"""The baseline of a run, whose iterations take longer or shorter than a replay says."""
_DAY_S = 86400.0
_J_PER_KWH = 3.6e6
_PUE = Rule(
    float,
    False,
    "a PUE: give what the building draws over what the GPUs draw, at least 1, such as 1.2",
    least=1.0,
)
_Size = Annotated[float, Rule(float, False, "a number above 0 that a float can hold; give one")]
_Whole = Annotated[int, COUNT._replace(wanted=f"{COUNT.wanted}; give one")]
_Rate = Annotated[
    float, Rule(float, True, "a rate: give a finite number of 0 or more, such as 0.12")
]


@dataclass(frozen=True)
class EnergyRates(Checked):
    """What a kilowatt-hour costs. The defaults are assumptions; replace them by the rates where the
    GPUs are.

    Raises:
        UsageError: If a number is negative or not finite, or the PUE is below 1.
    """

    price_usd_per_kwh: _Rate = 0.12  #: price of electricity, US dollars
    #: power usage effectiveness, the energy at the meter over the energy at the GPUs; 1 adds
    #: nothing.
    pue: Annotated[float, _PUE] = 1.2
    #: emissions of the grid, kilograms of CO2 equivalent.
    carbon_kg_per_kwh: _Rate = 0.40

    def cost(self, energy_j: float) -> EnergyCost:
        """Return the cost of `energy_j` joules at the GPUs, which may be negative."""
        kwh = energy_j * self.pue / _J_PER_KWH
        return EnergyCost(energy_j, kwh, kwh * self.price_usd_per_kwh, kwh * self.carbon_kg_per_kwh)


@dataclass(frozen=True)
class EnergyCost:
    """An energy and its cost: joules at the GPUs; kWh, US dollars and kg CO2e at the meter, with
    the PUE.
    """

    gpu_j: float
    kwh: float
    usd: float
    co2e_kg: float


@dataclass(frozen=True)
class IterationSize(Checked):
    """The size of one iteration of all pipelines that a report is about.

    Raises:
        UsageError: If a number is not a count.
    """

    pipelines: _Whole = 1  #: number of equal pipelines, whose energies are added up
    tokens: _Size | None = None  #: tokens that an iteration of them trains on, or None if not known
    #: samples that an iteration of them trains on, or None if not known.
    samples: _Size | None = None
    iterations: _Whole | None = None  #: number of iterations of the planned run, if known


@dataclass(frozen=True, kw_only=True)
class Saving(Comparison):
    """An iteration of a plan or run compared with all clocks at maximum, all pipelines together."""

    name: str  #: name of the plan or the run
    #: whether it is a run; then its time is the mean over the iterations that count, on the slowest
    #: rank, and it is compared with `AS_LONG`, which takes the same time.
    is_run: bool
    pipelines: int  #: number of pipelines; for a run, as many as its GPUs make up
    #: where the time comes from, such as "measured" or "replayed, measured profile".
    time_origin: str
    energy_origin: str  #: where the energy comes from; for a run also "simulated"
    baseline_origin: str  #: where the baseline comes from
    per_iteration: EnergyCost  #: saved per iteration
    #: seconds that the energies are of: for a run the mean from the begin of an iteration to that
    #: of the next, over all its iterations and ranks; for a plan `time_s`.
    window_s: float
    #: iteration time by the plan of a run, seconds; None for a plan and for a dry run.
    planned_time_s: float | None
    #: that time over the one with all clocks at maximum, by the profile; None where that is.
    planned_ratio: float | None
    per_day: EnergyCost  #: saved in a day of such iterations, around the clock
    #: number of iterations of the planned run, or of all attempts of a run; None if not known.
    iterations: int | None
    #: saved in that many iterations, or None if not known; by a run, against all clocks at maximum
    #: in as much time as each iteration took.
    per_run: EnergyCost | None
    #: `joules_per_token` and `samples_per_s_per_w`, which is samples per joule; None if not known.
    efficiency: dict[str, float | None]
    baseline_efficiency: dict[str, float | None]  #: the same with all clocks at maximum


def savings_of(sources: Sources, rates: EnergyRates, size: IterationSize) -> tuple[Saving, ...]:
    """Return what each run saves by its newest plan if its energy is known, then what each plan
    saves.

    No saving is stated if that of a run cannot be; see `why_no_saving`.
    """
    if sources.unlike_plan:
        return ()
    of_runs = (
        saving
        for name, run in sources.planned_runs.items()
        for saving in _run_saving(name, run, sources.summaries[name], rates, size)
    )
    of_plans = (_plan_saving(name, plan, rates, size) for name, plan in sources.plans.items())
    return (*of_runs, *of_plans)


def _plan_saving(name: str, plan: Plan, rates: EnergyRates, size: IterationSize) -> Saving:
    origin = origin_label(plan.origin)
    energies_j = size.pipelines * plan.energy_j, size.pipelines * plan.baseline_energy_j
    compared = compare(plan.time_s, energies_j[0], plan.baseline_time_s, energies_j[1])
    return _saving(name, compared, (origin, origin, origin), rates, size)


def _run_saving(
    name: str, run: Run, summary: RunSummary, rates: EnergyRates, size: IterationSize
) -> Iterator[Saving]:
    """Yield the saving of a run, if the energy of an iteration is known."""
    current = summary.current
    # Without an energy or a judged part, no saving can be stated.
    share = run.total.saved_share
    if current.time_s is None or current.energy_j is None or share is None:
        return
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    total = run.total
    # The energy is known of a part of the time, and is scaled to the whole.
    part = total.gpu_s / total.metered_s / total.iterations
    energy_j = part * total.energy_j
    # The share was judged iteration by iteration, so the baseline follows from it.
    time_s = current.time_s
    compared = compare(time_s, energy_j, time_s, energy_j / (1.0 - share), AS_LONG)
    origins = ("measured", summary.gpu_origin or "not known", origin_label(plan.origin))
    # The number of pipelines follows from the run, whatever the size says.
    pipelines = summary.pipelines_of_plan
    # Tokens are of all pipelines, of which these are a part.
    part = pipelines / size.pipelines
    of_run = IterationSize(
        pipelines,
        None if size.tokens is None else size.tokens * part,
        None if size.samples is None else size.samples * part,
        run.total.iterations,
    )
    # Ranks begin their first iteration at different times, and energies are of all ranks.
    window_s = total.gpu_s / total.windows
    saving = _saving(name, compared, origins, rates, of_run, window_s)
    # What was saved in all was added up, and is no mean times a number.
    saving = replace(saving, is_run=True, per_run=rates.cost(total.saved_j))
    # A dry run sets no clock, so that its plan says nothing of its time.
    if summary.dry_run is None:
        planned_s = current.planned_time_s
        ratio = planned_s / plan.baseline_time_s
        saving = replace(saving, planned_time_s=planned_s, planned_ratio=ratio)
    yield saving


def _saving(
    name: str,
    compared: Comparison,
    origins: tuple[str, str, str],
    rates: EnergyRates,
    size: IterationSize,
    window_s: float | None = None,
) -> Saving:
    """Return a saving of energies that are of `window_s` seconds; None for the iteration's own."""
    iterations = size.iterations
    if window_s is None:
        window_s = compared.time_s
    return Saving(
        **vars(compared),
        name=name,
        is_run=False,
        pipelines=size.pipelines,
        time_origin=origins[0],
        energy_origin=origins[1],
        baseline_origin=origins[2],
        per_iteration=rates.cost(compared.saved_j),
        window_s=window_s,
        planned_time_s=None,
        planned_ratio=None,
        # A day has whole iterations, with what passes between them.
        per_day=rates.cost(compared.saved_j * _DAY_S / window_s),
        iterations=iterations,
        per_run=None if iterations is None else rates.cost(compared.saved_j * iterations),
        efficiency=_efficiency(size, compared.energy_j),
        baseline_efficiency=_efficiency(size, compared.baseline_energy_j),
    )


def _efficiency(size: IterationSize, energy_j: float) -> dict[str, float | None]:
    per_j = None if size.samples is None or energy_j <= 0 else size.samples / energy_j
    per_token_j = None if size.tokens is None else energy_j / size.tokens
    return {"joules_per_token": per_token_j, "samples_per_s_per_w": per_j}
