"""What plans and runs save against all clocks at maximum: energy, money and carbon, and energy
per token or sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from perseus_planner.base.fields import Checked
from perseus_planner.base.units import COUNT, Rule
from perseus_planner.views.context import Comparison, compare, origin_label

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.run import Run
    from perseus_planner.views.run import RunSummary
    from perseus_planner.views.sources import Sources

_DAY_S = 86400.0
_J_PER_KWH = 3.6e6
_PUE = Rule(
    float,
    False,
    "a PUE: give what the building draws over what the GPUs draw, at least 1, such as 1.2",
    least=1.0,
)
_SIZE = Rule(float, False, "a number above 0 that a float can hold; give one")
_WHOLE = COUNT._replace(wanted=f"{COUNT.wanted}; give one")
_RATE = Rule(float, True, "a rate: give a finite number of 0 or more, such as 0.12")


@dataclass(frozen=True)
class EnergyRates(Checked):
    """What a kilowatt-hour costs. The defaults are assumptions; replace them by the rates where the
    GPUs are.

    Raises:
        UsageError: If a number is negative or not finite, or the PUE is below 1.
    """

    price_usd_per_kwh: Annotated[float, _RATE] = 0.12  #: price of electricity, US dollars
    #: power usage effectiveness, the energy at the meter over the energy at the GPUs; 1 adds
    #: nothing.
    pue: Annotated[float, _PUE] = 1.2
    #: emissions of the grid, kilograms of CO2 equivalent.
    carbon_kg_per_kwh: Annotated[float, _RATE] = 0.40

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
class IterationSize:
    """The size of one iteration of all pipelines that a report is about.

    Raises:
        UsageError: If a number is not a count.
    """

    pipelines: int = 1  #: number of equal pipelines, whose energies are added up
    tokens: float | None = None  #: tokens that an iteration of them trains on, or None if not known
    #: samples that an iteration of them trains on, or None if not known.
    samples: float | None = None
    iterations: int | None = None  #: number of iterations of the planned run, or None if not known

    def __post_init__(self) -> None:
        for name, rule in (
            ("pipelines", _WHOLE),
            ("iterations", _WHOLE),
            ("tokens", _SIZE),
            ("samples", _SIZE),
        ):
            if (value := getattr(self, name)) is not None:
                rule.check(value, name)


@dataclass(frozen=True)
class EnergyEfficiency:
    """What an iteration gives for its energy, or None if not known. Samples/s/W equal samples
    per joule.
    """

    joules_per_token: float | None
    samples_per_s_per_w: float | None


@dataclass(frozen=True, kw_only=True)
class Saving(Comparison):
    """An iteration of a plan or run compared with all clocks at maximum, all pipelines together."""

    name: str  #: name of the plan or the run
    #: whether it is a run; then its time is the mean over the iterations that count, on the slowest
    #: rank.
    is_run: bool
    pipelines: int  #: number of pipelines; for a run, as many as its GPUs make up
    #: where the time comes from, such as "measured" or "replayed, measured profile".
    time_origin: str
    energy_origin: str  #: where the energy comes from; for a run also "simulated"
    baseline_origin: str  #: where the baseline comes from
    per_iteration: EnergyCost  #: saved per iteration
    per_day: EnergyCost  #: saved in a day of such iterations, around the clock
    #: number of iterations of the planned run, or of all attempts of a run; None if not known.
    iterations: int | None
    #: saved in that many iterations, or None if not known; by a run, against all clocks at maximum
    #: in as much time as each iteration took.
    per_run: EnergyCost | None
    efficiency: EnergyEfficiency  #: energy per token and sample
    baseline_efficiency: EnergyEfficiency  #: energy per token and sample with all clocks at maximum


def savings_of(sources: Sources, rates: EnergyRates, size: IterationSize) -> tuple[Saving, ...]:
    """Return what each run saves by its newest plan if its energy is known, then what each plan
    saves.

    Nothing is saved by plans of another machine than that of a run.
    """
    if sources.unlike_plan:
        return ()
    of_runs = (
        saving
        for name, run in sources.runs.items()
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
    if current.time_s is None or current.energy_j is None or not run.total.iterations:
        return
    plan, total = run.plan(summary.version, summary.ranks[0].pipeline), run.total
    iteration_s = total.mean_iteration_s
    part = total.gpu_s / total.metered_s / total.iterations
    baseline_s = plan.baseline_time_s + iteration_s - current.time_s
    compared = compare(
        iteration_s, part * total.energy_j, baseline_s, part * (total.energy_j + total.saved_j)
    )
    origins = ("measured", summary.gpu_origin or "not known", origin_label(plan.origin))
    # The number of pipelines follows from the run, whatever the size says.
    pipelines = summary.pipelines_of_plan
    part = pipelines / size.pipelines
    of_run = IterationSize(
        pipelines,
        None if size.tokens is None else size.tokens * part,
        None if size.samples is None else size.samples * part,
        run.total.iterations,
    )
    saving = _saving(name, compared, origins, rates, of_run)
    yield replace(saving, is_run=True, per_run=rates.cost(run.total.saved_j))


def _saving(
    name: str,
    compared: Comparison,
    origins: tuple[str, str, str],
    rates: EnergyRates,
    size: IterationSize,
) -> Saving:
    iterations = size.iterations
    return Saving(
        **vars(compared),
        name=name,
        is_run=False,
        pipelines=size.pipelines,
        time_origin=origins[0],
        energy_origin=origins[1],
        baseline_origin=origins[2],
        per_iteration=rates.cost(compared.saved_j),
        per_day=rates.cost(compared.saved_j * _DAY_S / compared.time_s),
        iterations=iterations,
        per_run=None if iterations is None else rates.cost(compared.saved_j * iterations),
        efficiency=_efficiency(size, compared.energy_j),
        baseline_efficiency=_efficiency(size, compared.baseline_energy_j),
    )


def _efficiency(size: IterationSize, energy_j: float) -> EnergyEfficiency:
    return EnergyEfficiency(
        None if size.tokens is None else energy_j / size.tokens,
        None if size.samples is None or energy_j <= 0 else size.samples / energy_j,
    )
