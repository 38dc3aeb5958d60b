"""What `planner inference` prints: plans of pools, and replays of traces, as tables, JSON and a
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Sheet, column
from perseus_planner.inference.plan import BASELINE, POLICIES, InferencePlan, epoch_content
from perseus_planner.profiles.csv_file import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.inference.simulation import Replay, Settings
    from perseus_planner.inference.workload import Trace

_MOST_EPOCHS = 3  #: whose pools are printed
AGAINST = "the highest clock and the largest tensor degree for all classes"
"""The baseline of savings, in a sentence."""


def plan_view(plan: InferencePlan) -> dict[str, Any]:
    """Return what is printed of a plan, for JSON; shares are relative, and None where the
    objectives cannot be met.
    """
    policies = [
        {
            "policy": name,
            "description": POLICIES[name],
            **asdict(total),
            "saved_share": plan.saved_share(name),
        }
        for name, total in plan.policies.items()
    ]
    return {
        "gpus": plan.gpus,
        "control": plan.control,
        "baseline": BASELINE,
        "energy_j": plan.energy_j,
        "saved_share": plan.saved_share(),
        "gap": plan.gap,
        "policies": policies,
        "epochs": [epoch_content(epoch) for epoch in plan.epochs],
    }


def plan_text(view: dict[str, Any]) -> str:
    """Return the tables of a plan."""
    return "\n".join(sheet.text() for sheet in plan_sheets(view))


def plan_sheets(view: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a plan: the policies, and the pools of the first periods."""
    rows = view["policies"]
    columns = [*_saving_columns(rows), column("GPUs", [str(row["gpus"]) for row in rows])]
    proved = (
        f"at most {100 * view['gap']:.2g} % above its bound"
        if view["gap"] > 1e-6
        else "proved to be the best"
    )
    notes = [f"Savings are against {AGAINST}. The plan is {proved}."]
    for row in rows:
        if row["energy_j"] is None:
            notes.append(f"{row['description']}: violates the latency objective of a class.")
        elif row["gpus"] > view["gpus"]:
            notes.append(f"{row['description']}: needs {row['gpus']} GPUs, more than there are.")
    if len(view["epochs"]) > _MOST_EPOCHS:
        notes.append(
            f"The file has {len(view['epochs'])} periods; the pools of the first {_MOST_EPOCHS} "
            "are shown."
        )
    pools = [_pool_sheet(epoch, view["control"]) for epoch in view["epochs"][:_MOST_EPOCHS]]
    source = "Replayed from the inference profile."
    return [
        *pools,
        Sheet(f"Pools for inference on {view['gpus']} GPUs", source, columns, "\n".join(notes)),
    ]


def plan_figure(view: dict[str, Any]) -> Figure:
    """Return the energy of each policy as bars."""
    from matplotlib.figure import Figure

    rows = [row for row in view["policies"] if row["energy_j"] is not None]
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [row["description"] for row in rows], [(row["energy_j"] or 0.0) / 3.6e6 for row in rows]
    )
    axes.bar_label(
        bars,
        [f"{_percent(row['saved_share'])} % saved" for row in rows],
        padding=3,
        fontsize="small",
    )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("energy (kWh)")
    axes.set_title(f"Pools for inference on {view['gpus']} GPUs (replayed)", fontsize="medium")
    return figure


def _pool_sheet(epoch: dict[str, Any], control: str) -> Sheet:
    pools = epoch["pools"]
    gpus = [pool["instances"] * pool["tensor_degree"] for pool in pools]
    changes = f", {si(epoch['change_j'], 'J')} of changes" if epoch["change_j"] else ""
    return Sheet(
        f"From {epoch['start_s'] / 60:.0f} min, for {epoch['length_s'] / 60:.0f} min: "
        f"{sum(gpus)} GPUs, {si(epoch['power_w'], 'W')}{changes}",
        "",
        [
            ["classes", *(", ".join(pool["serves"]) for pool in pools)],
            column("instances", [str(pool["instances"]) for pool in pools]),
            column("TP", [str(pool["tensor_degree"]) for pool in pools]),
            column(unit_of(control), [str(pool["setting"]) for pool in pools]),
            column("GPUs", list(map(str, gpus))),
            column("tokens/s", [f"{sum(pool['serves'].values()):.0f}" for pool in pools]),
        ],
    )


def simulation_view(
    trace: Trace, settings: Settings, replays: Sequence[Replay], left_out: Sequence[str]
) -> dict[str, Any]:
    """Return what is printed of replays, at least one, for JSON; the fields of a policy are
    those of `Replay`.
    """
    baseline_j = {each.policy: each.energy_j for each in replays}.get(BASELINE)
    return {
        "gpus": settings.gpus,
        "requests": len(trace.times_s),
        "length_s": trace.end_s,
        "prediction": settings.prediction,
        "mispredicted": settings.mispredicted,
        "baseline": BASELINE,
        "policies": [_replay_view(each, baseline_j) for each in replays],
        "left_out": list(left_out),
    }


def _replay_view(replay: Replay, baseline_j: float | None) -> dict[str, Any]:
    names = ("instance_changes", "sharding_changes", "clock_changes")
    fields = {
        name: value
        for name, value in vars(replay).items()
        if name not in ("requests", "changes", "periods")
    }
    return {
        **fields,
        **dict(zip(names, replay.changes, strict=True)),
        "description": POLICIES[replay.policy],
        "saved_share": 1 - replay.energy_j / baseline_j if baseline_j else None,
        "late_share": replay.late / replay.requests,
        "gpus": replay.gpus,
        "periods": [period._asdict() for period in replay.periods],
    }


def simulation_text(view: dict[str, Any]) -> str:
    """Return the table of a replay: a row for each policy."""
    rows = view["policies"]
    columns = [
        *_saving_columns(rows),
        column("late %", [f"{100 * row['late_share']:.2f}" for row in rows]),
        column("moved %", [f"{100 * row['moved'] / view['requests']:.2f}" for row in rows]),
        column("GPUs", [f"{row['gpus']:.0f}" for row in rows]),
        column("most", [str(row["most_gpus"]) for row in rows]),
        column(
            "changes",
            [f"{r['instance_changes']}/{r['sharding_changes']}/{r['clock_changes']}" for r in rows],
        ),
    ]
    predicted = "as it will be" if view["prediction"] == "perfect" else "as the one before"
    notes = [
        f"Savings are against {AGAINST}.",
        "GPUs are those in use, on average and at most; changes are of instances, sharding and "
        "clocks.",
        *(f"Left out: {reason}." for reason in view["left_out"]),
        *(
            f"{row['description']}: the GPUs did not carry the predicted load in "
            f"{row['short_periods']} periods."
            for row in rows
            if row["short_periods"]
        ),
    ]
    return Sheet(
        f"{view['requests']} requests in {view['length_s'] / 60:.0f} min on {view['gpus']} GPUs",
        f"Replayed from the inference profile. Each period is predicted {predicted}; "
        f"{100 * view['mispredicted']:g} % of the outputs wrongly.",
        columns,
        "\n".join(notes),
    ).text()


def simulation_figure(view: dict[str, Any]) -> Figure:
    """Return power, GPUs in use and late requests over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for row in view["policies"]:
        minutes = [*(period["start_s"] / 60 for period in row["periods"]), view["length_s"] / 60]
        series = [
            [period["power_w"] / 1e3 for period in row["periods"]],
            [period["gpus"] for period in row["periods"]],
            [period["late"] for period in row["periods"]],
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


def _saving_columns(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    energies_kwh = [
        "-" if row["energy_j"] is None else f"{row['energy_j'] / 3.6e6:.4g}" for row in rows
    ]
    return [
        ["chosen how", *(row["description"] for row in rows)],
        column("energy kWh", energies_kwh),
        column("saved %", [_percent(row["saved_share"]) for row in rows]),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
