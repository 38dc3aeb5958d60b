"""`planner plan`: one frontier, or one for each kind of replica, in; a plan for each out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.plans.plan import Plan
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.solver.replicas import Replicas

_TARGETS = ("deadline", "slowdown", "straggler_time", "least_energy", "power_budget")
_BUDGET = ("max_changes", "min_dwell_s")


def _counts(_: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    """A callback that reads 3,1 as counts."""
    if text is None:
        return ()
    from perseus_planner.quantities import COUNT

    counts = tuple(COUNT.parse(part.strip()) for part in text.split(","))
    if None in counts:
        raise UsageError(f"{parameter.opts[0]}: {text!r} are not counts: write a whole number for each, such as 3,1")
    return counts


@click.command(
    epilog=console.examples(
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner plan frontier.npz --straggler-time 3.2s -o plan.yaml",
        "planner plan frontier.npz slow.npz --replicas 3,1 --slowdown 1.00 -o replicas.yaml",
    )
)
@click.argument("frontier", type=console.PATH, nargs=-1, required=True)
@click.option(
    "--deadline",
    metavar="TIME",
    callback=console.quantity("DURATION"),
    help="An iteration may take this long, e.g. 2.95s.",
)
@click.option(
    "--slowdown",
    metavar="RATIO",
    callback=console.quantity("SLOWDOWN"),
    help="An iteration may take this many times as long as with all clocks at maximum, e.g. 1.05.",
)
@click.option(
    "--straggler-time",
    metavar="TIME",
    callback=console.quantity("DURATION"),
    help="Another pipeline, for which this one waits, takes this long, e.g. 3.2s.",
)
@click.option("--least-energy", is_flag=True, help="As slow as is best for pipelines that wait for no other.")
@click.option(
    "--power-budget",
    metavar="POWER",
    callback=console.quantity("POWER_BUDGET"),
    help="All GPUs of the pipeline together may draw this on average, e.g. 5kW; the fastest such plan.",
)
@click.option(
    "--max-changes",
    type=click.IntRange(min=0),
    metavar="N",
    help="A GPU may change its clock at most this often in an iteration; 0: one clock for all of it.",
)
@click.option(
    "--min-dwell",
    "min_dwell_s",
    metavar="TIME",
    callback=console.quantity("LAG"),
    help="A GPU must hold each clock for at least this long, e.g. 50ms.",
)
@click.option(
    "--replicas",
    metavar="COUNTS",
    callback=_counts,
    help="How many pipelines each FRONTIER is for, e.g. 3,1.  [default: 1 each]",
)
@console.output("the plan, .yaml")
@console.as_json
def plan(frontier: tuple[Path, ...], replicas: tuple[int, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Choose a clock for every computation.

    FRONTIER is a file of `planner solve`. Give exactly one of --deadline, --slowdown, --straggler-time, --least-energy
    and --power-budget. Times are in s, ms or min, powers in W or kW.

    Give several, one for each kind of pipeline, where pipelines that are not alike train side by side. They are planned
    to one common deadline, and times with all clocks at maximum are those of the slowest. FILE gets -0, -1 and so on
    before its ending.
    """
    target, value = _only_target({name: options[name] for name in _TARGETS})
    budget = {name: options[name] for name in _BUDGET if options[name] is not None}
    if target == "power_budget" and len(frontier) > 1:
        raise UsageError("--power-budget cannot be given with several frontiers; give --deadline or --slowdown instead")
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.solver.replicas import Replicas
    from perseus_planner.views.plan_summary import summarize_plan, summarize_plans
    from perseus_planner.views.tables import plan_text, plans_text

    targets = console.numbered(output, len(frontier), frontier)
    pipelines = Replicas(tuple(map(Frontier.load, frontier)), replicas)
    with console.progress("Planning"):
        plans = _planned(pipelines, target, value, budget)
    for each, file in zip(plans, targets, strict=True):
        each.save(file)
    straggler_time_s = value if target == "straggler_time" else None
    if len(plans) == 1:
        summary = summarize_plan(plans[0], straggler_time_s)
        console.report(summary, plan_text(summary), targets, as_json=as_json, counts=pipelines.counts)
    else:
        together = summarize_plans(pipelines, plans, straggler_time_s)
        console.report(together, plans_text(together), targets, as_json=as_json, counts=pipelines.counts)


def _only_target(targets: dict[str, float | None]) -> tuple[str, float]:
    given = {name: value for name, value in targets.items() if value is not None and value is not False}
    if len(given) == 1:
        return next(iter(given.items()))
    options = {name: f"--{name.replace('_', '-')}" for name in _TARGETS}
    got = " and ".join(options[name] for name in _TARGETS if name in given) or "none"
    raise UsageError(f"give exactly one of {', '.join(options.values())}; got {got}")


def _planned(pipelines: Replicas, target: str, value: float, budget: dict[str, Any]) -> tuple[Plan, ...]:
    if target == "power_budget":
        (frontier,) = pipelines.frontiers
        return (frontier.plan_within_power(value, **budget),)
    alone = pipelines.frontiers[0] if len(pipelines.frontiers) == 1 else None
    return pipelines.plans_for(_deadline_s(alone or pipelines, target, value), **budget)


def _deadline_s(of: Frontier | Replicas, target: str, value: float) -> float:
    if target == "deadline":
        return value
    if target == "slowdown":
        return value * of.baseline_time_s
    if target == "straggler_time":
        return max(value, of.min_time_s)
    return of.least_energy_time_s * (1 + 1e-9)  # so that no rounding error refuses a plan that takes just that time
