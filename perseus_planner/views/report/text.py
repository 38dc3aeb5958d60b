"""What `planner report` prints: the savings that the page shows, in short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.views.columns import column, numbers, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perseus_planner.views.report.report import Report


def report_text(report: Report) -> str:
    """The savings as a table, and what was assumed for them."""
    if not report.savings:
        return "No plan was given, and no run whose energy is known, so there is no saving to tell.\n"
    rates = report.rates
    return (
        f"{table(list(_columns(report)))}\n\n"
        "Against all clocks at maximum; kWh, money and CO2e are at the meter, in a day of such iterations.\n"
        f"Assumed: {rates.price_usd_per_kwh:g} USD and {rates.carbon_kg_per_kwh:g} kg of CO2e a kWh, "
        f"PUE {rates.pue:g}.\n"
    )


def _columns(report: Report) -> Iterator[list[str]]:
    rows = report.savings
    days = [row.per_day for row in rows]
    yield ["", *(row.name for row in rows)]
    yield column("iteration s", numbers([row.time_s for row in rows]))
    yield column("joules", numbers([row.energy_j for row in rows]))
    yield column("saved %", [f"{100 * row.saved_share:.2f}" for row in rows])
    yield column("kWh a day", numbers([day.kwh for day in days]))
    yield column("USD a day", numbers([day.usd for day in days]))
    yield column("kg CO2e a day", numbers([day.co2e_kg for day in days]))
    yield ["  energy is", *(f"  {row.energy_origin}" for row in rows)]
