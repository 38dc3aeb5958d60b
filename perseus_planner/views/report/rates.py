"""What energy costs, and what an iteration is good for: the inputs of a report beside its files."""

from __future__ import annotations

from dataclasses import dataclass

from perseus_planner.errors import UsageError, shown
from perseus_planner.quantities import COUNT, Rule, check_fields

_J_PER_KWH = 3.6e6
_PUE = Rule(float, False, "a PUE: give what the building draws over what the GPUs draw, at least 1, such as 1.2")
_SIZE = Rule(float, False, "a number above 0 that a float can hold")
_RATE = Rule(float, True, "a rate: give a finite number of 0 or more, such as 0.12")


@dataclass(frozen=True)
class Rates:
    """What a kilowatt-hour costs; the defaults are assumptions, to be replaced by what holds where the GPUs are.

    Attributes:
        price_usd_per_kwh: of electricity, US dollars.
        pue: power usage effectiveness: energy at the meter over energy at the GPUs; 1: nothing is added.
        carbon_kg_per_kwh: of the grid, kilograms of CO2 equivalent.

    Raises:
        UsageError: a number is negative, not finite, or a PUE below 1.
    """

    price_usd_per_kwh: float = 0.12
    pue: float = 1.2
    carbon_kg_per_kwh: float = 0.40

    def __post_init__(self) -> None:
        check_fields(self, {"price_usd_per_kwh": _RATE, "pue": _PUE, "carbon_kg_per_kwh": _RATE})
        if self.pue < 1:
            raise UsageError(f"pue: {self.pue!r} is not {_PUE.wanted}")

    def of(self, energy_j: float) -> Energy:
        """What `energy_j` joules at the GPUs come to; negative ones too."""
        kwh = energy_j * self.pue / _J_PER_KWH
        return Energy(energy_j, kwh, kwh * self.price_usd_per_kwh, kwh * self.carbon_kg_per_kwh)


@dataclass(frozen=True)
class Energy:
    """Energy, and what it comes to: joules at the GPUs; kWh, US dollars and kg CO2e at the meter, PUE counted in."""

    gpu_j: float
    kwh: float
    usd: float
    co2e_kg: float


@dataclass(frozen=True)
class Work:
    """What one iteration of all pipelines that a report is about does.

    Attributes:
        pipelines: alike, whose energies are added up.
        tokens: that an iteration of them trains on; None: not known.
        samples: likewise.
        iterations: of a run that is planned; None: not known.

    Raises:
        UsageError: a number is not a count.
    """

    pipelines: int = 1
    tokens: float | None = None
    samples: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        for name, is_whole in (("pipelines", True), ("iterations", True), ("tokens", False), ("samples", False)):
            value = getattr(self, name)
            if value is not None and (_SIZE.accept(value) is None or (is_whole and COUNT.accept(value) is None)):
                raise UsageError(
                    f"{name}: {shown(value)} is not {COUNT.wanted if is_whole else _SIZE.wanted}; give one"
                )
