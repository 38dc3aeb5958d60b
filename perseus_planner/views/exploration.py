"""What `planner explore` prints: a table, JSON, a figure, and the job file of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from perseus_planner.base.errors import JobError
from perseus_planner.base.files import write_file
from perseus_planner.base.tables import column, numbers, quantities, table
from perseus_planner.estimate.forecast import Prices, forecast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perseus_planner.estimate.explore import Exploration, Row

_DIGITS = 4  # of an estimate


def exploration_view(
    name: str, found: Exploration, tokens: float | None, prices: Prices
) -> dict[str, Any]:
    """Return what is printed of an exploration."""
    view = [_row_view(row, found, tokens, prices) for row in (*found.first, *found.frontier)]
    return {
        "model": name,
        "gpu": found.system.gpu.name,
        "origin": "simulated" if not found.system.kernels else "estimated from measured kernels",
        "configurations": found.configurations,
        "solved": found.solved,
        "gap": found.gap,
        "first": view[: len(found.first)],
        "frontier": view[len(found.first) :],
    }


def exploration_text(view: dict[str, Any]) -> str:
    """Return the tables of an exploration."""
    lines = [
        f"{view['configurations']} configurations of {view['model']} on {view['gpu']} fit in "
        f"memory; {view['solved']} exact frontiers were computed.",
        f"{view['origin'].upper()}: no estimate ranks configurations surely. Measure these:",
        "",
        _table(view["first"], numbered=True),
        "",
        "Frontier of all configurations; energy saved is against all clocks at maximum in the same "
        "configuration:",
        "",
        _table(view["frontier"], numbered=False),
    ]
    if view["gap"] > 0:
        lines += [
            "",
            "A configuration without an exact frontier might be better by up to "
            f"{100 * view['gap']:.2g} %.",
        ]
    runs = [
        (number, row["forecast"])
        for number, row in enumerate(view["first"], 1)
        if row["forecast"] is not None
    ]
    if runs:
        numbered, forecasts = zip(*runs, strict=True)
        first = forecasts[0]
        lines += [
            "",
            f"{first.tokens:,.0f} tokens (nodes draw {first.node_overhead_w:g} W beside their "
            f"GPUs, PUE {first.pue:g}, both assumed unless given):",
            "",
            table(
                [
                    column("#", list(map(str, numbered))),
                    column("hours", numbers([run.hours for run in forecasts], _DIGITS)),
                    *quantities(
                        ["GPU {}", "meter {}"],
                        "Wh",
                        [1e3 * run.gpu_kwh for run in forecasts],
                        [1e3 * run.meter_kwh for run in forecasts],
                        digits=_DIGITS,
                    ),
                    column("cost", numbers([run.cost for run in forecasts], _DIGITS)),
                    column("t CO2e", numbers([run.co2e_kg / 1e3 for run in forecasts], _DIGITS)),
                ]
            ),
        ]
    return "\n".join([*lines, ""])


def exploration_figure(view: dict[str, Any]) -> Figure:
    """Return tokens per second against joules per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["configuration"] for row in view["frontier"]):
        rows = [row for row in view["frontier"] if row["configuration"] == name]
        axes.plot(
            [row["tokens_per_s"] for row in rows],
            [row["j_per_token"] for row in rows],
            "o-",
            label=name,
        )
    first = view["first"]
    axes.plot(
        [r["tokens_per_s"] for r in first],
        [r["j_per_token"] for r in first],
        "k*",
        label="measure these",
        markersize=12,
    )
    axes.set_xlabel("tokens/s")
    axes.set_ylabel("GPU energy, J/token")
    axes.set_title(f"{view['model']} on {view['gpu']} ({view['origin']})")
    axes.legend(fontsize="small")
    return figure


def write_job(row: Row, found: Exploration, path: Path) -> list[Path]:
    """Write the job file of a row and its estimated profile beside it; return both paths and the
    profile's table.

    Raises:
        JobError: If a file cannot be written.
    """
    job, maker = row.candidate.job, found.maker
    profile_path = path.with_name(f"{path.stem}-profile.yaml")
    stages = job.stage_phases(found.system, row.candidate.times)
    maker.profile(job, stages).save(profile_path)
    hop_s = job.transfer_s(found.system)
    ends_s = maker.ends_s(row.candidate)
    content: dict[str, object] = {
        "format": "perseus-planner/job",
        "version": 1,
        "profile": profile_path.name,
        "schedule": job.schedule,
        "microbatches": job.microbatches,
        "ranks": job.ranks,
        "tokens_per_iteration": job.tokens,
        "samples_per_iteration": job.batch,
    }
    if job.virtual_stages > 1:
        content["virtual_stages"] = job.virtual_stages
    if hop_s:
        content["transfer"] = {"forward_s": hop_s, "backward_s": hop_s}
    content["operations"] = [
        {"name": "step", "when": "end", "time_s": end_s, "where": [rank]}
        for rank, end_s in enumerate(ends_s)
    ]
    if job.data_degree > 1:
        content["replicas"] = [{"count": job.data_degree}]
    head = (
        f"# {job.name}: layers {','.join(map(str, job.split))}; estimated, measure it with "
        "`planner profile`\n"
    )
    write_file(path, head + yaml.safe_dump(content, sort_keys=False), JobError)
    return [path, profile_path, profile_path.with_suffix(".csv")]


def _row_view(row: Row, found: Exploration, tokens: float | None, prices: Prices) -> dict[str, Any]:
    job, shape = row.candidate.job, row.candidate.job.shape
    slowdown = row.time_s / float(row.curve.times_s[0])
    return {
        "configuration": job.name,
        "gpus": job.gpus,
        "tensor_degree": shape.tensor_degree,
        "ranks": job.ranks,
        "data_degree": job.data_degree,
        "virtual_stages": job.virtual_stages,
        "microbatch": shape.microbatch,
        "microbatches": job.microbatches,
        "schedule": job.schedule,
        "recomputation": shape.recomputation,
        "layers": job.split,
        "memory_gb": row.candidate.memory.total / 1e9,
        "time_s": row.time_s,
        "tokens_per_s": row.tokens_per_s,
        "j_per_token": row.j_per_token,
        "gpu_power_w": row.power_w / job.gpus,
        "saved_share": found.maker.saved_share(row.candidate, slowdown),
        "clocks_mhz": found.maker.clocks_mhz(row.candidate, slowdown),
        "forecast": None if tokens is None else forecast(row, tokens, found.system, prices),
    }


def _table(rows: Sequence[dict[str, Any]], *, numbered: bool) -> str:
    def of(name: str) -> list[Any]:
        return [row[name] for row in rows]

    return table(
        [
            *(
                [column("#", [str(number) for number in range(1, len(rows) + 1)])]
                if numbered
                else []
            ),
            ["configuration", *of("configuration")],
            column("GPUs", list(map(str, of("gpus")))),
            column("GB/GPU", [f"{size:.1f}" for size in of("memory_gb")]),
            *quantities(["iteration {}"], "s", of("time_s"), digits=_DIGITS),
            column("tokens/s", [f"{rate:.0f}" for rate in of("tokens_per_s")]),
            *quantities(["{}"], "J/token", of("j_per_token"), digits=_DIGITS),
            column("W/GPU", [f"{power:.0f}" for power in of("gpu_power_w")]),
            column(
                "saved %", [f"{round(100 * share, 1) + 0.0:.1f}" for share in of("saved_share")]
            ),
            column("clocks MHz", [f"{low}-{high}" for low, high in of("clocks_mhz")]),
        ]
    )
