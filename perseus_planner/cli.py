"""The `planner` command: profile, solve, plan, show, simulate.

Each command imports what it needs when it runs, so that `planner --help` answers at once.
Exit codes: 0 done; 1 a fault of the planner; 2 something that the user can correct; 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perseus_planner import __version__, console
from perseus_planner.cli_simulate import simulate
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from perseus_planner.frontier import Frontier
    from perseus_planner.plan import Plan

_SCHEDULES = ("1f1b",)
_TARGETS = ("deadline", "slowdown", "straggler_time", "least_energy", "power_budget")


@click.group(
    cls=console.Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=console.examples(
        "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner show plan.yaml",
    ),
)
@click.version_option(__version__, message="planner %(version)s")
def main() -> None:
    """Plan one GPU clock per computation of pipeline-parallel training: the same speed, the least energy.

    Profile the stages, solve for the frontier of time and energy, and take the plan that you need from it. Each command
    explains itself with --help.
    """


@main.command(epilog=console.examples("planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml"))
@click.option("--gpu", required=True, metavar="GPU", help="GPU to measure on; so far simulated:a100-sxm only.")
@click.option("--stages", required=True, type=int, metavar="S", help="Number of pipeline stages, at least 1.")
@click.option("--seed", default=0, show_default=True, help="Chooses the measurement noise of a simulated GPU.")
@console.output("the profile, .yaml; its table of measurements goes beside it, .csv")
@console.as_json
def profile(gpu: str, stages: int, seed: int, output: Path, as_json: bool) -> None:
    """Measure time and energy of every stage at every clock.

    So far on a simulated GPU only: a model of an A100 that runs a small GPT, in virtual time.
    """
    from perseus_planner.profiler.sweep import sweep_simulated
    from perseus_planner.summary import summarize_profile
    from perseus_planner.tables import profile_text

    with console.progress("Profiling") as progress:
        result = sweep_simulated(gpu, stages=stages, seed=seed, progress=progress)
    result.save(output)
    summary = summarize_profile(result)
    console.report(summary, profile_text(summary), [output, output.with_suffix(".csv")], as_json=as_json)


@main.command(
    epilog=console.examples(
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner solve measured.csv --blocking-power 83.64 --schedule 1f1b --microbatches 96 -o frontier.npz",
    )
)
@click.argument("profile", type=console.PATH)
@click.option("--schedule", required=True, type=click.Choice(_SCHEDULES), help="Order of the computations.")
@click.option("--microbatches", required=True, type=int, metavar="M", help="Microbatches of an iteration, at least 1.")
@click.option("--stages", type=int, metavar="S", help="Pipeline stages that you expect.  [default: the profile's]")
@click.option(
    "--blocking-power",
    metavar="POWER",
    callback=console.quantity("BLOCKING_POWER"),
    help="What a GPU draws while it waits, e.g. 83.64W; needed if PROFILE is a CSV, which does not carry it.",
)
@console.output("the frontier, which `planner plan` and `planner show` read")
@console.as_json
def solve(
    profile: Path,
    schedule: str,  # there is one so far, which click has checked
    microbatches: int,
    stages: int | None,
    blocking_power: float | None,
    output: Path,
    as_json: bool,
) -> None:
    """Find the least energy of an iteration for every iteration time.

    PROFILE is a profile.yaml of `planner profile`, or a CSV with the columns stage, instruction (forward or backward),
    frequency (MHz), time (s) and energy (J).
    """
    from perseus_planner import schedules
    from perseus_planner.frontier import solve as solve_frontier
    from perseus_planner.profiles import Profile
    from perseus_planner.summary import summarize_frontier
    from perseus_planner.tables import frontier_text

    console.refuse_same(profile, output)
    measured = Profile.load(profile, blocking_power_w=blocking_power)
    order = schedules.one_f_one_b(stages=measured.stages if stages is None else stages, microbatches=microbatches)
    with console.progress("Solving") as progress:
        frontier = solve_frontier(measured, order, progress=progress)
    frontier.save(output)
    summary = summarize_frontier(frontier)
    console.report(summary, frontier_text(summary), [output], as_json=as_json)


@main.command(
    epilog=console.examples(
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner plan frontier.npz --straggler-time 3.2s -o plan.yaml",
    )
)
@click.argument("frontier", type=console.PATH)
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
@click.option("--least-energy", is_flag=True, help="As slow as is best for a pipeline that waits for no other.")
@click.option(
    "--power-budget",
    metavar="POWER",
    callback=console.quantity("POWER_BUDGET"),
    help="All GPUs of the pipeline together may draw this on average, e.g. 5kW; the fastest such plan.",
)
@console.output("the plan, .yaml")
@console.as_json
def plan(frontier: Path, output: Path, as_json: bool, **targets: float | None) -> None:
    """Choose a clock for every computation.

    FRONTIER is a file of `planner solve`. Give exactly one of --deadline, --slowdown, --straggler-time, --least-energy
    and --power-budget. Times are in s, ms or min, powers in W or kW.
    """
    target, value = _only_target(targets)
    from perseus_planner.frontier import Frontier
    from perseus_planner.plan_summary import summarize_plan
    from perseus_planner.tables import plan_text

    console.refuse_same(frontier, output)
    source = Frontier.load(frontier)
    with console.progress("Planning"):
        result = _planned(source, target, value)
    result.save(output)
    summary = summarize_plan(result, straggler_time_s=value if target == "straggler_time" else None)
    console.report(summary, plan_text(summary), [output], as_json=as_json)


@main.command(
    epilog=console.examples("planner show frontier.npz --plot frontier.png", "planner show plan.yaml --plot plan.svg")
)
@click.argument("file", type=console.PATH)
@click.option(
    "--plot",
    type=console.PATH,
    callback=console.writable,
    metavar="FIGURE",
    help="Figure to write as well: .png, .svg or .pdf.",
)
@console.as_json
def show(file: Path, plot: Path | None, as_json: bool) -> None:
    """Show a frontier, or the timeline of a plan.

    FILE is what `planner solve` or `planner plan` wrote.
    """
    if plot is not None:
        from perseus_planner.plotting import check_figure_path

        check_figure_path(plot, "--plot")
    show_one = _show_frontier if _is_frontier(file) else _show_plan
    show_one(file, plot, as_json)


main.add_command(simulate)


def _only_target(targets: dict[str, float | None]) -> tuple[str, float]:
    given = {name: value for name, value in targets.items() if value is not None and value is not False}
    if len(given) == 1:
        return next(iter(given.items()))
    options = {name: f"--{name.replace('_', '-')}" for name in _TARGETS}
    got = " and ".join(options[name] for name in _TARGETS if name in given) or "none"
    raise UsageError(f"give exactly one of {', '.join(options.values())}; got {got}")


def _planned(frontier: Frontier, target: str, value: float) -> Plan:
    if target == "deadline":
        return frontier.plan_for(value)
    if target == "slowdown":
        return frontier.plan_for(value * frontier.baseline_time_s)
    if target == "straggler_time":
        return frontier.plan_beside_straggler(value)
    if target == "power_budget":
        return frontier.plan_within_power(value)
    return frontier.plan_for_least_energy()


def _is_frontier(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"  # a zip archive, as .npz is
    except OSError as error:
        from perseus_planner.documents import unreadable

        raise UsageError(unreadable(path, error)) from error


def _show_frontier(file: Path, plot: Path | None, as_json: bool) -> None:
    from perseus_planner.frontier import Frontier
    from perseus_planner.summary import summarize_frontier
    from perseus_planner.tables import frontier_text

    frontier = Frontier.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_frontier, save_figure

        save_figure(draw_frontier(frontier), plot)
    summary = summarize_frontier(frontier)
    console.report(summary, frontier_text(summary), [plot] if plot else [], as_json=as_json)


def _show_plan(file: Path, plot: Path | None, as_json: bool) -> None:
    from perseus_planner.plan import Plan
    from perseus_planner.plan_summary import summarize_timeline
    from perseus_planner.tables import timeline_text

    plan = Plan.load(file)
    if plot is not None:
        from perseus_planner.plotting import draw_plan, save_figure

        save_figure(draw_plan(plan), plot)
    summary = summarize_timeline(plan)
    console.report(summary, timeline_text(summary), [plot] if plot else [], as_json=as_json)
