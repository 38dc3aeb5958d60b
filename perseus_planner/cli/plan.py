"""`planner plan`: chooses a plan on a frontier, or on one frontier for each kind of pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.solver.replicas import Replicas

_TARGETS = ("deadline", "slowdown", "straggler_time", "least_energy", "power_budget")
_LIMITS = ("max_changes", "on_time", "tolerance")


@click.command(
    epilog=console.examples(
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner plan frontier.npz --slowdown 1.00 --on-time 95% -o plan.yaml",
        "planner plan frontier.npz --straggler-time 3.2s -o plan.yaml",
        "planner plan frontier.npz slow.npz --replicas 3,1 --slowdown 1.00 -o replicas.yaml",
    )
)
@click.argument("frontier", type=console.PATH, nargs=-1, required=True)
@click.option(
    "--deadline", type=console.TIME, help="The longest that an iteration may take, e.g. 2.95s."
)
@click.option(
    "--slowdown",
    type=console.SLOWDOWN,
    help="The longest that an iteration may take, as a multiple of its time with all clocks at "
    "maximum, e.g. 1.05.",
)
@click.option(
    "--straggler-time",
    type=console.TIME,
    help="The iteration time of a straggler that this pipeline waits for, e.g. 3.2s.",
)
@click.option(
    "--least-energy",
    is_flag=True,
    help="Choose the iteration time of least energy, for pipelines that do not wait for others.",
)
@click.option(
    "--power-budget",
    type=console.POWER,
    help="Choose the fastest plan with at most this average power of all GPUs of the pipeline, "
    "e.g. 5kW.",
)
@click.option(
    "--max-changes",
    type=click.IntRange(min=0),
    metavar="N",
    help="The most clock changes of a GPU per iteration; 0 keeps one clock.",
)
@click.option(
    "--on-time",
    type=console.Quantity("CERTAINTY", "percent"),
    help="The probability of being on time, or within --power-budget, though the profile is "
    "uncertain, e.g. 95%.  "
    "[default: measured times are taken for the true ones]",
)
@click.option(
    "--tolerance",
    type=console.Quantity("TOLERANCE", "percent"),
    help="With --on-time: how much slower than all clocks at maximum still counts as no slower.  "
    "[default: 0.1%]",
)
@click.option(
    "--replicas",
    type=console.Listed("COUNT", "n"),
    default=(),
    help="The number of pipelines of each FRONTIER, e.g. 3,1.  [default: 1 each]",
)
@console.output("the plan", ".yaml", ".yml")
@console.as_json
def plan(
    frontier: tuple[Path, ...],
    replicas: tuple[int, ...],
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose a clock for every computation.

    FRONTIER is a file that `planner solve` wrote. Give exactly one of --deadline, --slowdown,
    --straggler-time, --least-energy and --power-budget. Write times as 5s, 950ms or 1m, and powers
    as 900W or 5kW.

    If pipelines of different kinds train side by side, give one FRONTIER for each kind. All plans
    then meet one common deadline, and a --slowdown refers to the slowest pipeline. FILE gets -0, -1
    and so on before its ending.
    """
    target, value = _only_target({name: options[name] for name in _TARGETS})
    limits = {name: options[name] for name in _LIMITS if options[name] is not None}
    if "tolerance" in limits and ("on_time" not in limits or target == "power_budget"):
        raise UsageError(
            "--tolerance: is of the time of a plan with --on-time; leave it out, or give --on-time "
            "as well"
        )
    if target == "power_budget" and len(frontier) > 1:
        raise UsageError(
            "--power-budget cannot be given with several frontiers; give --deadline or --slowdown "
            "instead"
        )
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.solver.replicas import Replicas
    from perseus_planner.views.plan import plan_text, plans_text, summarize_plan, summarize_plans

    targets = console.numbered(output, len(frontier), frontier)
    pipelines = Replicas(tuple(map(Frontier.load, frontier)), replicas)
    with console.progress("Planning"):
        plans = _make_plans(pipelines, target, value, limits)
    for each, file in zip(plans, targets, strict=True):
        each.save(file)
    straggler_time_s = value if target == "straggler_time" else None
    if len(plans) == 1:
        summary = summarize_plan(plans[0], straggler_time_s)
        console.report(
            summary, plan_text(summary), targets, as_json=as_json, counts=pipelines.counts
        )
    else:
        together = summarize_plans(pipelines, plans, straggler_time_s)
        console.report(
            together, plans_text(together), targets, as_json=as_json, counts=pipelines.counts
        )


def _only_target(targets: dict[str, float | None]) -> tuple[str, float]:
    """Return the one target that was given, with its value."""
    given = {
        name: value for name, value in targets.items() if value is not None and value is not False
    }
    if len(given) == 1:
        return next(iter(given.items()))
    options = {name: f"--{name.replace('_', '-')}" for name in _TARGETS}
    got = " and ".join(options[name] for name in _TARGETS if name in given) or "none"
    raise UsageError(f"give exactly one of {', '.join(options.values())}; got {got}")


def _make_plans(
    pipelines: Replicas, target: str, value: float, limits: dict[str, Any]
) -> tuple[Plan, ...]:
    if target == "power_budget":
        (frontier,) = pipelines.frontiers
        return (frontier.plan_within_power(value, **limits),)
    source = pipelines.frontiers[0] if len(pipelines.frontiers) == 1 else pipelines
    deadline_s = _deadline_s(source, target, value, limits.get("on_time"))
    if target in ("deadline", "slowdown") and deadline_s > (
        least_s := _deadline_s(source, "least_energy", 0.0, None)
    ):
        from perseus_planner.base.prefixes import si

        click.echo(
            f"planner: the plan takes {si(least_s, 's', 6)}, where an iteration needs the least "
            f"energy: {si(deadline_s, 's', 6)} would be slower and cost more; if others wait "
            "until then anyway, give --straggler-time",
            err=True,
        )
        deadline_s = max(least_s, _deadline_s(source, "least_energy", 0.0, limits.get("on_time")))
    return pipelines.plans_for(deadline_s, **limits)


def _deadline_s(
    source: Frontier | Replicas, target: str, value: float, on_time: float | None
) -> float:
    if target == "deadline":
        return value
    if target == "slowdown":
        return value * source.baseline_time_s
    least_s = (
        source.min_time_s if on_time is None else source.baseline_time_s
    )  # no plan is surely faster
    if target == "straggler_time":
        return max(value, least_s)
    return max(
        source.least_energy_time_s * (1 + 1e-9), least_s
    )  # more, as rounding may refuse exactly that time
