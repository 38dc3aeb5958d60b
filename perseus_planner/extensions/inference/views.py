"""What is shown of plans of pools and of replays of traces: tables, JSON, a figure, and the report,
one HTML file without scripts that opens offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out
from perseus_planner.extensions.inference.plan import BASELINE, POLICIES, read_plan
from perseus_planner.extensions.inference.simulation import CHANGES
from perseus_planner.profiles.csv_file import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.extensions.inference.simulation import Settings
    from perseus_planner.extensions.inference.workload import Trace
    from perseus_planner.views.savings import EnergyCost, EnergyRates

_MOST_EPOCHS = 3  #: whose pools are printed
AGAINST = "the highest clock and the largest tensor degree for all classes"
"""The baseline of savings, in a sentence."""


_SAVING = (
    Column("chosen how", "description", "<"),
    Column("energy kWh", lambda row: row["energy_j"] and row["energy_j"] / 3.6e6, ".4g"),
    Column("saved %", "saved_share", "%"),
)


def plan_view(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is printed of a plan, for JSON; shares are relative, and None where the
    objectives cannot be met.
    """
    # Savings are against the baseline, which may violate an objective and then has no energy.
    baseline_j = plan["policies"][BASELINE]["energy_j"]
    policies = {
        name: {
            "policy": name,
            "description": POLICIES[name],
            **total,
            "saved_share": None
            if None in (baseline_j, total["energy_j"])
            else 1 - total["energy_j"] / baseline_j,
        }
        for name, total in plan["policies"].items()
    }
    # A period without energy has no relative gap.
    gaps = [
        period["energy_j"] / period["bound_j"] - 1 for period in plan["epochs"] if period["bound_j"]
    ]
    return {
        "gpus": plan["gpus"],
        "control": plan["control"],
        "baseline": BASELINE,
        "energy_j": policies["planner"]["energy_j"],
        "saved_share": policies["planner"]["saved_share"],
        "gap": max(0.0, *gaps),
        "policies": [*policies.values()],
        "epochs": plan["epochs"],
    }


def show_plan(path: Path) -> tuple[dict[str, Any], str]:
    """Return a plan in a file as `planner show` wants it: for JSON, and as text."""
    view = plan_view(read_plan(path))
    return view, plan_text(view)


def report_plan(paths: Sequence[Path], rates: EnergyRates) -> tuple[dict[str, Any], str, str]:
    """Return the report of a plan in a file as `planner report` wants it: for JSON, as text, and as
    a page. Names are escaped, whatever they contain.

    Raises:
        UsageError: If there are more files.
    """
    from perseus_planner.views.report import page_of_sheets

    # Its numbers are not those of training, so no table could have both.
    if len(paths) > 1:
        raise UsageError("a plan for inference has a report of its own; name it alone")
    file = paths[0].name
    view = plan_view(read_plan(paths[0]))
    baseline_j = view["policies"][0]["energy_j"]
    saved = None
    if baseline_j is not None:
        saved = rates.cost(baseline_j - view["energy_j"])
    # Without an energy of the baseline nothing can be said of a saving.
    headline = _headline(view, saved)
    assumed = (
        f"Replayed from the inference profile. Assumed: {rates.price_usd_per_kwh:g} USD and "
        f"{rates.carbon_kg_per_kwh:g} kg of CO2e per kWh, PUE {rates.pue:g}."
    )
    page = page_of_sheets(
        f"Pools for inference: {file}",
        "Energy of pools for inference",
        ("Where the energy goes", headline, assumed),
        plan_sheets(view)[::-1],
    )
    cost = rates.cost(view["energy_j"])
    report = {"file": file, "rates": rates, "cost": cost, "saved": saved, "plan": view}
    return report, f"{plan_text(view)}\n{headline}\n{assumed}\n", page


def plan_text(view: dict[str, Any]) -> str:
    """Return the tables of a plan."""
    return "\n".join(sheet.text() for sheet in plan_sheets(view))


def plan_sheets(view: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a plan: the policies, and the pools of the first periods."""
    rows = view["policies"]
    columns = lay_out(rows, *_SAVING, Column("GPUs", "gpus"), digits=3)
    proved = (
        f"at most {100 * view['gap']:.2g} % above its bound"
        if view["gap"] > 1e-6
        else "proved to be the best"
    )
    notes = [f"Savings are against {AGAINST}. The plan is {proved}."]
    for row in rows:
        # Policies beside the planner may need what there is not, which a reader must know.
        if row["energy_j"] is None:
            notes.append(f"{row['description']}: violates the latency objective of a class.")
        elif row["gpus"] > view["gpus"]:
            notes.append(f"{row['description']}: needs {row['gpus']} GPUs, more than there are.")
    if len(view["epochs"]) > _MOST_EPOCHS:
        notes.append(
            f"The file has {len(view['epochs'])} periods; the pools of the first {_MOST_EPOCHS} "
            "are shown."
        )
    # A plan of a day has many periods, of which a terminal shows the first.
    pools = [_pool_sheet(epoch, view["control"]) for epoch in view["epochs"][:_MOST_EPOCHS]]
    source = "Replayed from the inference profile."
    return [
        *pools,
        Sheet(
            f"Pools for inference on {counted(view['gpus'], 'GPU')}",
            source,
            columns,
            notes,
        ),
    ]


def _pool_sheet(epoch: dict[str, Any], control: str) -> Sheet:
    pools = epoch["pools"]
    # A server of a tensor degree has as many GPUs.
    gpus = sum(pool["instances"] * pool["tensor_degree"] for pool in pools)
    changes = f", {si(epoch['change_j'], 'J')} of changes" if epoch["change_j"] else ""
    return Sheet(
        f"From {epoch['start_s'] / 60:.0f} min, for {epoch['length_s'] / 60:.0f} min: "
        f"{counted(gpus, 'GPU')}, {si(epoch['power_w'], 'W')}{changes}",
        "",
        lay_out(
            pools,
            Column("classes", lambda pool: ", ".join(pool["serves"]), "<"),
            Column("instances", "instances"),
            Column("TP", "tensor_degree"),
            Column(unit_of(control), "setting"),
            Column("GPUs", lambda pool: pool["instances"] * pool["tensor_degree"]),
            Column("tokens/s", lambda pool: sum(pool["serves"].values()), ".0f"),
        ),
    )


def simulation_view(
    trace: Trace, settings: Settings, replays: Sequence[dict[str, Any]], left_out: Sequence[str]
) -> dict[str, Any]:
    """Return what is printed of replays, at least one, for JSON."""
    baseline_j = {replayed["policy"]: replayed["energy_j"] for replayed in replays}.get(BASELINE)
    return {
        "gpus": settings.gpus,
        "requests": len(trace.times_s),
        "length_s": trace.end_s,
        "prediction": settings.prediction,
        "baseline": BASELINE,
        "policies": [
            {**replayed, "saved_share": baseline_j and 1 - replayed["energy_j"] / baseline_j}
            for replayed in replays
        ],
        "left_out": list(left_out),
    }


def simulation_text(view: dict[str, Any]) -> str:
    """Return the table of a replay: a row for each policy."""
    rows = view["policies"]
    columns = lay_out(
        rows,
        *_SAVING,
        Column("late %", lambda row: row["late"] and 100 * row["late"] / view["requests"], ".2f"),
        Column("TTFT p95 (ms)", lambda row: row["ttft_p95_s"] and 1e3 * row["ttft_p95_s"], ".4g"),
        Column("TBT p95", lambda row: row["tbt_p95_s"] and 1e3 * row["tbt_p95_s"], ".4g"),
        Column("GPUs", "gpus", ".0f"),
        Column("most", "most_gpus"),
        Column("changes", lambda row: "/".join(str(row[name]) for name in CHANGES)),
        digits=3,
    )
    predicted = "as it will be" if view["prediction"] == "perfect" else "as the one before"
    notes = [
        f"Savings are against {AGAINST}.",
        "GPUs are those in use, on average and at most; changes are of instances, sharding and "
        "clocks.",
        *(
            ["The profile does not say what tokens cost, so whether requests are late is unknown."]
            if rows[0]["late"] is None
            else []
        ),
        *(f"Left out: {reason}." for reason in view["left_out"]),
        # A period that could not be carried makes a policy look cheaper than it is.
        *(
            f"{row['description']}: the GPUs did not carry the predicted load in "
            f"{counted(row['short_periods'], 'period')}."
            for row in rows
            if row["short_periods"]
        ),
    ]
    return Sheet(
        f"{counted(view['requests'], 'request')} in {view['length_s'] / 60:.0f} min on "
        f"{counted(view['gpus'], 'GPU')}",
        f"Replayed from the inference profile. Each period is predicted {predicted}.",
        columns,
        notes,
    ).text()


def simulation_figure(view: dict[str, Any]) -> Figure:
    """Return power, GPUs in use and late requests over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for row in view["policies"]:
        # The last value of a period stands until its end.
        minutes = [*(period["start_s"] / 60 for period in row["periods"]), view["length_s"] / 60]
        series = [
            [period["power_w"] / 1e3 for period in row["periods"]],
            [period["gpus"] for period in row["periods"]],
            [period["late"] or 0 for period in row["periods"]],
        ]
        for axes, values in zip(panels, series, strict=True):
            axes.step(minutes, [*values, values[-1]], where="post", label=row["description"])
    for axes, label in zip(panels, ("power (kW)", "GPUs in use", "late requests"), strict=True):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        fontsize="small",
        loc="outside lower center",
        ncols=3,
    )
    panels[-1].set_xlabel("time (min)")
    figure.suptitle(
        f"{view['requests']} requests on {view['gpus']} GPUs (replayed)", fontsize="medium"
    )
    return figure


def _headline(plan: dict[str, Any], saved: EnergyCost | None) -> str:
    hours = sum(epoch["length_s"] for epoch in plan["epochs"]) / 3600
    said = f"{plan['energy_j'] / 3.6e6:.4g} kWh of {plan['gpus']} GPUs in {hours:.3g} h."
    if saved is None or plan["saved_share"] is None:
        return f"{said} The baseline violates the latency objective of a class."
    return (
        f"{said} That is {100 * plan['saved_share']:.1f} % less than with {AGAINST}: "
        f"{saved.kwh:.4g} kWh at the meter, {saved.usd:.4g} USD, {saved.co2e_kg:.4g} kg of CO2e."
    )
