"""What `planner estimate`, `planner explore` and `planner calibrate --kernels` print: tables, JSON,
a figure, and the job file of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from perseus_planner.base.errors import JobError
from perseus_planner.base.files import write_file
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.tables import Column, Sheet, lay_out, table
from perseus_planner.extensions.explore.forecast import forecast
from perseus_planner.extensions.explore.operations import stage_totals
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules.layouts import rebalance

if TYPE_CHECKING:
    from perseus_planner import Profile
    from perseus_planner.extensions.explore.configuration import Configuration
    from perseus_planner.extensions.explore.explore import Balance, Exploration
    from perseus_planner.extensions.explore.search import Row


def summarize_estimate(name: str, profile: Profile, job: Configuration) -> dict[str, Any]:
    """Summarize a profile that was estimated for a pipeline."""
    computations = _computations(profile, job)
    # A stage's forward and backward alternate in the steady phase, so their sum is its load.
    both_s = [
        sum(
            row["time_s"]
            for row in computations
            if row["stage"] == stage and row["instruction"] in ("forward", "backward")
        )
        for stage in range(profile.stages)
    ]
    better = rebalance(job.layout, both_s, range(profile.stages))
    # Everything that a JSON reader gets, in the order in which the text tells it.
    return {
        "model": name,
        "parameters": job.shape.parameters,
        "tokens": job.shape.microbatch * job.shape.sequence,
        "origin": profile.origin,
        "gpu": profile.gpu,
        "stages": profile.stages,
        "gpus_per_stage": profile.gpus_per_stage,
        "blocking_power_w": profile.blocking_power_w,
        "digest": profile.digest,
        "top_clock_mhz": profile.measurements[Key(0, "F")][0].clock_mhz,
        "imbalance": max(both_s) / min(filter(None, both_s)),
        "layout": str(job.layout),
        "balanced": None
        if better is None
        else {
            "layout": str(better.layout),
            "shorter_share": 1 - max(better.stage_s) / max(both_s),
        },
        "computations": computations,
        "efficiencies": list(_efficiencies(computations)),
        "remarks": list(_remarks(profile)),
    }


def estimate_text(summary: dict[str, Any]) -> str:
    """Return the summary as a table with a line for each stage and kind."""
    size = (
        f"{summary['parameters'] / 1e9:.2f} billion parameters, {summary['tokens']} tokens a "
        "microbatch"
    )
    rows = summary["computations"]
    gpus = summary["gpus_per_stage"]
    columns = [
        *lay_out(
            rows,
            Column("stage", "stage"),
            Column("layers", "layers"),
            Column("computation", "instruction", "<"),
            Column("{}", "flops", "FLOPs"),
            Column("{}", "bytes", "B"),
            Column("{}", "time_s", "s"),
            Column("{}", "energy_j", "J"),
            Column("x fastest", "time_ratio", ".3f"),
        ),
    ]
    # Efficiencies are of the highest clock, as everything in the table.
    reached = [
        f"{row['instruction']} {si(row['flops_per_s'], 'FLOPS')} and "
        f"{si(row['flops_per_j'], 'FLOPs')} a joule"
        for row in summary["efficiencies"]
    ]
    return "\n".join(
        [
            f"Estimate of {summary['model']} ({size}) on {counted(summary['stages'], 'stage')} of "
            f"{counted(gpus, 'GPU')}, {summary['gpu']}.",
            "SIMULATED: from operations in closed form and a model of the system; no GPU was used.",
            f"Per GPU and microbatch, at {summary['top_clock_mhz']} MHz:",
            "",
            table(columns),
            "",
            f"Imbalance: the slowest stage takes {summary['imbalance']:.3f}x as long as the "
            "fastest (forward + backward).",
            *_layout_text(summary),
            f"Efficiency: {'; '.join(reached)}.",
            *summary["remarks"],
            "",
        ]
    )


def _layout_text(summary: dict[str, Any]) -> Iterable[str]:
    balanced = summary["balanced"]
    text = f"Layout: {summary['layout']}"
    if balanced is None or summary["stages"] == 1:
        yield f"{text}."
    elif balanced["layout"] == summary["layout"]:
        yield f"{text}; none has a faster slowest stage."
    else:
        yield (
            f"{text}; with {balanced['layout']} the slowest stage takes "
            f"{100 * balanced['shorter_share']:.1f} % less time, if memory allows."
        )


def system_text(view: dict[str, Any]) -> str:
    """Return what was measured of a system, as a table."""
    columns = lay_out(
        view["kernels"],
        Column("tensor", "tensor_degree"),
        Column("microbatch", "microbatch"),
        Column("recomputation", "recomputation", "<"),
        Column("forward {}", "layer_forward_s", "s4"),
        Column("backward {}", "layer_backward_s", "s4"),
        Column("head {}", "head_s", "s4"),
    )
    title = (
        f"Measured for {view['gpu']}: a layer, and embedding with head and loss, per microbatch:"
    )
    return Sheet(
        title,
        "",
        columns,
        [f"{name}: {value:.4g}" for name, value in view["measured"].items()],
    ).text()


def _computations(profile: Profile, job: Configuration) -> list[dict[str, Any]]:
    totals = stage_totals(job.shape, job.split)
    # At the highest clock, where the balance of stages is that of their work.
    tops = {key: rows[0] for key, rows in profile.measurements.items()}
    fastest_s = {
        kind: min(
            (top.time_s for key, top in tops.items() if key.kind == kind and top.has_work),
            default=1.0,
        )
        for kind in {key.kind for key in tops}
    }
    return [
        {
            "stage": key.stage,
            "instruction": word_of(key.kind),
            "layers": job.split[key.stage],
            **totals[key.stage][key.kind]._asdict(),
            "time_s": top.time_s,
            "energy_j": top.energy_j / profile.gpus_per_stage,
            "time_ratio": top.time_s / fastest_s[key.kind],
        }
        for key, top in tops.items()
    ]


def _efficiencies(computations: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    # Over all stages, as single ones differ by embedding and head.
    for word in dict.fromkeys(row["instruction"] for row in computations):
        same = [row for row in computations if row["instruction"] == word]
        flops = sum(row["flops"] for row in same)
        time_s, energy_j = (sum(row[name] for row in same) for name in ("time_s", "energy_j"))
        yield {"instruction": word, "flops_per_s": flops / time_s, "flops_per_j": flops / energy_j}


def _remarks(profile: Profile) -> Iterable[str]:
    source = profile.conditions.get("calibration")
    yield (
        f"Calibrated by {source}."
        if source
        else "Not calibrated: times and energies may be far off, all by a similar factor; measure "
        "one stage and give its profile with --calibrate."
    )
    if profile.gpus_per_stage > 1:
        yield f"Energies in the profile are sums over the {profile.gpus_per_stage} GPUs of a stage."


_DIGITS = 4  # of an estimate
NOT_TRIED = (
    "Not tried: tensor degrees over 16, pipelines of more than 48 ranks, expert degrees that are "
    "no power of 2, ZeRO-2, weights shared in a pipeline, offloading, other schedules."
)


def exploration_view(
    name: str, gpus: int, found: Exploration, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is printed of an exploration of so many GPUs, with what `forecast` is told of the
    whole run.
    """
    view = [_row_view(row, found, run) for row in (*found.first, *found.frontier)]
    system = found.maker.system
    return {
        "model": name,
        "gpu": system.gpu.name,
        "gpus": gpus,
        "origin": "estimated from measured kernels" if system.kernels else "simulated",
        "configurations": found.configurations,
        "solved": found.solved,
        "gap": found.gap,
        "first": [
            # Balances are of the first configurations only, as each takes a solve.
            {**row_view, "balance": _balance_view(found.balance(row))}
            for row, row_view in zip(found.first, view, strict=False)
        ],
        "frontier": view[len(found.first) :],
    }


def _balance_view(found: Balance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "compared_with": "given" if found.is_given else "even",
        "before": str(found.before),
        "before_fits": found.before_fits,
        "layout": str(found.after),
        "before_s": found.before_s,
        "after_s": found.after_s,
        "time_share": found.time_share,
        "before_saved_share": found.before_saved_share,
        "after_saved_share": found.after_saved_share,
    }


def _balance_text(number: int, row: dict[str, Any]) -> Iterable[str]:
    """Yield what the layout of a row is, what it brings in time, and what clocks bring after it."""
    balance = row["balance"]
    if balance is None:
        return
    word = "your layout" if balance["compared_with"] == "given" else "even layers"
    clocks = f"clocks save {100 * balance['after_saved_share']:.1f} % of its energy at full speed"
    text = f"Layout of number {number}: {balance['layout']}. "
    if balance["layout"] == balance["before"]:
        yield f"{text}No other layout that was tried is better; {clocks}."
        return
    share = 100 * balance["time_share"]
    less = f"{abs(share):.1f} % {'less' if share >= 0 else 'more'} time than {word}"
    fits = "" if balance["before_fits"] else ", which do not fit in memory,"
    if balance["compared_with"] == "given":
        less += f" ({balance['before']})"
        fits = "" if balance["before_fits"] else ", which does not fit in memory,"
    yield (
        f"{text}It takes {less}{fits} at full clocks; after it {clocks}, with {word} "
        f"{100 * balance['before_saved_share']:.1f} %."
    )


def exploration_text(view: dict[str, Any]) -> str:
    """Return the tables of an exploration."""
    lines = [
        f"{view['configurations']} configurations of {view['model']} on {view['gpu']} fit in "
        f"memory; {view['solved']} exact frontiers were computed.",
        f"{view['origin'].upper()}: estimates do not rank with certainty. Measure these:",
        "",
        table(
            [
                ["#", *map(str, range(1, 1 + len(view["first"])))],
                *_table(view["first"], view["gpus"]),
            ]
        ),
        "",
        *(
            f"Where the energy of number {number} goes at full clocks: "
            + ", ".join(f"{use} {100 * share:.0f} %" for use, share in row["energy"].items())
            + "."
            for number, row in enumerate(view["first"], 1)
        ),
        *(
            line
            for number, row in enumerate(view["first"], 1)
            for line in _balance_text(number, row)
        ),
        *_energy_remarks(view["first"]),
        NOT_TRIED,
        "",
        "Frontier of all configurations; energy saved is against all clocks at maximum in the same "
        "configuration:",
        "",
        table(_table(view["frontier"], view["gpus"])),
    ]
    # Bounds that were not closed are said, as the best is not proved then.
    if view["gap"] > 0:
        lines += [
            "",
            "A configuration without an exact frontier might be better by up to "
            f"{100 * view['gap']:.2g} %.",
        ]
    runs = [
        {"number": number, **row["forecast"]}
        for number, row in enumerate(view["first"], 1)
        if row["forecast"] is not None
    ]
    if runs:
        first = runs[0]
        columns = lay_out(
            runs,
            Column("#", "number"),
            # Energy at the GPUs and at the meter, as only the latter is paid for.
            Column("hours", "hours", "#"),
            Column("GPU MWh", lambda run: run["gpu_kwh"] / 1e3, "#"),
            Column("meter MWh", lambda run: _range(run["meter_kwh"], 1e-3)),
            Column("cost", lambda run: _range(run["cost"])),
            Column("t CO2e", lambda run: _range(run["co2e_kg"], 1e-3)),
            digits=_DIGITS,
        )
        lines += [
            "",
            f"{first['tokens']:,.0f} tokens (nodes draw {_range(first['node_overhead_w'])} W "
            f"beside their GPUs, PUE {first['pue']:g}, both assumed unless given):",
            "",
            table(columns),
        ]
    return "\n".join([*lines, ""])


def _range(values: Sequence[float], scale: float = 1.0) -> str:
    return " to ".join(dict.fromkeys(f"{scale * value:,.{_DIGITS}g}" for value in values))


def _energy_remarks(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    if any(row["precision"] in ("fp8", "mxfp8", "nvfp4") for row in rows):
        yield (
            "Joules are an upper bound: narrow products were measured at the power limit only half "
            "as often as bf16 ones."
        )


def write_job(row: Row, found: Exploration, path: Path) -> list[Path]:
    """Write the job file of a row and its estimated profile beside it; return both paths and the
    profile's table.

    Raises:
        JobError: If a file cannot be written.
    """
    job = row.candidate.job
    maker = found.maker
    # The profile lies beside the job file, which names it without a folder.
    profile_path = path.with_name(f"{path.stem}-profile.yaml")
    stages = job.stage_phases(found.maker.system, row.candidate.times)
    maker.profile(job, stages).save(profile_path)
    # Transfers and the end of an iteration are part of the graph that was explored.
    hop_s = job.transfer_s(found.maker.system)
    ends_s = maker.operating.ends_s(job, stages)
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
    content["layout"] = str(job.layout)
    if hop_s:
        content["transfer"] = {"forward_s": hop_s, "backward_s": hop_s}
    # The end of an iteration is another one on each rank: their optimizers differ.
    content["operations"] = [
        {"name": "step", "when": "end", "time_s": end_s, "where": [rank]}
        for rank, end_s in enumerate(ends_s.tolist())
    ]
    # Pipelines side by side are alike, so their number says it all.
    if job.data_degree > 1:
        content["replicas"] = [{"count": job.data_degree}]
    # The file says that it is an estimate, wherever it is copied to.
    head = (
        f"# {job.name}: layers {','.join(map(str, job.split))}; estimated, measure it with "
        "`planner profile`\n"
    )
    write_file(path, head + yaml.safe_dump(content, sort_keys=False), JobError)
    return [path, profile_path, profile_path.with_suffix(".csv")]


def _row_view(row: Row, found: Exploration, run: Mapping[str, Any]) -> dict[str, Any]:
    job = row.candidate.job
    shape = row.candidate.job.shape
    # Shares and clocks are of the plan at this point of the curve.
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
        "layout": str(job.layout),
        "context_degree": shape.context_degree,
        "expert_degree": shape.expert_degree,
        "sharding": job.sharding,
        "precision": shape.precision,
        "energy": found.maker.energy_shares(row.candidate),
        "memory_gb": row.candidate.memory.total / 1e9,
        "time_s": row.time_s,
        "tokens_per_s": row.tokens_per_s,
        "j_per_token": row.j_per_token,
        "gpu_power_w": row.power_w / job.gpus,
        "saved_share": found.maker.saved_share(row.candidate, slowdown),
        "clocks_mhz": found.maker.clocks_mhz(row.candidate, slowdown),
        "forecast": None if run["tokens"] is None else forecast(row, found.maker.system, **run),
    }


def _table(rows: Sequence[dict[str, Any]], gpus: int) -> list[list[str]]:
    return [
        *lay_out(
            rows,
            Column("configuration", "configuration", "<"),
            Column(
                "GPUs",
                lambda row: f"{row['gpus']}" if row["gpus"] == gpus else f"{row['gpus']} of {gpus}",
            ),
            Column("GB/GPU", "memory_gb", ".1f"),
            Column("iteration {}", "time_s", f"s{_DIGITS}"),
            Column("tokens/s", "tokens_per_s", ".0f"),
            Column("{}", "j_per_token", f"J/token{_DIGITS}"),
            Column("W/GPU", "gpu_power_w", ".0f"),
            Column("saved %", "saved_share", "%"),
            Column("clocks MHz", lambda row: "{}-{}".format(*row["clocks_mhz"])),
            digits=3,
        ),
    ]
