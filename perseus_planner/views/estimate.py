"""What `planner estimate` and `planner calibrate --kernels` print: the summary of an estimate,
measured kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Sheet, column, quantities, table
from perseus_planner.estimate.op_costs import TransformerPipeline, stage_op_costs, stage_traffic
from perseus_planner.profiles.csv_file import word_of

if TYPE_CHECKING:
    from perseus_planner.profiles.profiles import Profile


def summarize_estimate(
    profile: Profile, pipeline: TransformerPipeline, calibrated_by: Sequence[str]
) -> dict[str, Any]:
    """Summarize a profile that was estimated for `pipeline`."""
    computations = _computations(profile, pipeline)
    both_s = [
        sum(
            row["time_s"]
            for row in computations
            if row["stage"] == stage and row["instruction"] in ("forward", "backward")
        )
        for stage in range(profile.stages)
    ]
    return {
        "model": pipeline.name,
        "parameters": pipeline.transformer.parameters,
        "tokens": pipeline.transformer.tokens,
        "origin": profile.origin,
        "gpu": profile.gpu,
        "stages": profile.stages,
        "gpus_per_stage": profile.gpus_per_stage,
        "blocking_power_w": profile.blocking_power_w,
        "digest": profile.digest,
        "top_clock_mhz": profile.measurements[0, "F"][0].clock_mhz,
        "imbalance": max(both_s) / min(both_s),
        "computations": computations,
        "efficiencies": list(_efficiencies(computations)),
        "remarks": list(_remarks(profile, pipeline, calibrated_by)),
    }


def estimate_text(summary: dict[str, Any]) -> str:
    """Return the summary as a table with a line for each stage and kind."""
    size = (
        f"{summary['parameters'] / 1e9:.2f} billion parameters, {summary['tokens']} tokens a "
        "microbatch"
    )
    rows, gpus = summary["computations"], summary["gpus_per_stage"]
    columns = [
        column("stage", [str(row["stage"]) for row in rows]),
        column("layers", [str(row["layers"]) for row in rows]),
        ["computation", *(row["instruction"] for row in rows)],
        *(
            quantities(["{}"], unit, [row[name] for row in rows])[0]
            for name, unit in (
                ("flops", "FLOPs"),
                ("bytes", "B"),
                ("time_s", "s"),
                ("energy_j", "J"),
            )
        ),
        column("x fastest", [f"{row['time_ratio']:.3f}" for row in rows]),
    ]
    reached = [
        f"{row['instruction']} {si(row['flops_per_s'], 'FLOPS')} and "
        f"{si(row['flops_per_j'], 'FLOPs')} a joule"
        for row in summary["efficiencies"]
    ]
    return "\n".join(
        [
            f"Estimate of {summary['model']} ({size}) on {summary['stages']} stages of {gpus} "
            f"GPU{'s' * (gpus > 1)}, {summary['gpu']}.",
            "SIMULATED: from operations in closed form and a model of the system; no GPU was used.",
            f"Per GPU and microbatch, at {summary['top_clock_mhz']} MHz:",
            "",
            table(columns),
            "",
            f"Imbalance: the slowest stage takes {summary['imbalance']:.3f}x as long as the "
            "fastest (forward + backward).",
            f"Efficiency: {'; '.join(reached)}.",
            *summary["remarks"],
            "",
        ]
    )


def system_text(view: dict[str, Any]) -> str:
    """Return what was measured of a system, as a table."""
    kernels = view["kernels"]
    columns = [
        column("tensor", [str(each["tensor_degree"]) for each in kernels]),
        column("microbatch", [str(each["microbatch"]) for each in kernels]),
        ["recomputation", *(each["recomputation"] for each in kernels)],
        *quantities(
            ["forward {}", "backward {}", "head {}"],
            "s",
            *(
                [each[name] for each in kernels]
                for name in ("layer_forward_s", "layer_backward_s", "head_s")
            ),
            digits=4,
        ),
    ]
    title = (
        f"Measured for {view['gpu']}: a layer, and embedding with head and loss, per microbatch:"
    )
    return Sheet(
        title,
        "",
        columns,
        "\n".join(f"{name}: {value:.4g}" for name, value in view["measured"].items()),
    ).text()


def _computations(profile: Profile, pipeline: TransformerPipeline) -> list[dict[str, Any]]:
    costs = stage_op_costs(pipeline.transformer, pipeline.split)
    sent = stage_traffic(pipeline.transformer, pipeline.split)
    tops = {key: rows[0] for key, rows in profile.measurements.items()}
    fastest_s = {
        kind: min(top.time_s for (_, of), top in tops.items() if of == kind) for _, kind in tops
    }
    return [
        {
            "stage": stage,
            "instruction": word_of(kind),
            "layers": pipeline.split[stage],
            "flops": costs[stage][kind].flops,
            "bytes": costs[stage][kind].bytes,
            "sent_bytes": sent[stage][kind],
            "time_s": top.time_s,
            "energy_j": top.energy_j / profile.gpus_per_stage,
            "time_ratio": top.time_s / fastest_s[kind],
        }
        for (stage, kind), top in tops.items()
    ]


def _efficiencies(computations: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for word in dict.fromkeys(row["instruction"] for row in computations):
        same = [row for row in computations if row["instruction"] == word]
        flops = sum(row["flops"] for row in same)
        time_s, energy_j = (sum(row[name] for row in same) for name in ("time_s", "energy_j"))
        yield {"instruction": word, "flops_per_s": flops / time_s, "flops_per_j": flops / energy_j}


def _remarks(
    profile: Profile, pipeline: TransformerPipeline, calibrated_by: Sequence[str]
) -> Iterable[str]:
    if calibrated_by:
        yield f"Calibrated by {' and '.join(calibrated_by)}."
    else:
        yield (
            "Not calibrated: times and energies may be far off, all by a similar factor; measure "
            "one stage and give its profile with --calibrate."
        )
    if profile.gpus_per_stage > 1:
        yield f"Energies in the profile are sums over the {profile.gpus_per_stage} GPUs of a stage."
