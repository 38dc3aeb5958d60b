"""`planner solve`, which makes the frontiers of a job, and `planner plan`, which chooses a plan on
each of them; `planner job.yaml` does both after `planner profile`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from perseus_planner.base.errors import InfeasibleBudget, InfeasibleDeadline, UsageError
from perseus_planner.base.units import FACTOR, ON_TIME, STAGE
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    BlockingPower,
    Certainty,
    Counts,
    GpuCount,
    Natural,
    Option,
    Overhead,
    Power,
    Slowdown,
    SourceFile,
    Spread,
    Stages,
    Time,
    Tolerance,
    TransferTime,
    command,
    complete,
    option_name,
    output_file,
    refuse_same,
)
from perseus_planner.cli.profiling import profile
from perseus_planner.schedules import NAMES, schedule_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from perseus_planner import Frontier, Plan, Replicas
    from perseus_planner.plans.job import Settings

_COMPLETED = complete(schedule_names)


def _slow_stages(
    _: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, float] | None:
    """Read repeated options such as 3=1.15 as stages and slowdowns."""
    slowdowns: dict[int, float] = {}
    for text in texts:
        # Stages are whole numbers, and a sign or a decimal point is a mistake.
        stage_text, _equals, slowdown_text = text.partition("=")
        stage = STAGE.parse(stage_text) if re.fullmatch(r"\d+", stage_text) else None
        slowdown = FACTOR.parse(slowdown_text)
        if stage is None or slowdown is None:
            raise UsageError(
                f"{parameter.opts[0]}: {text!r} is not a slow stage: write stage and slowdown, "
                "such as 3=1.15"
            )
        # Two factors of one stage could be meant to multiply, or to replace each other.
        if stage in slowdowns:
            raise UsageError(f"{parameter.opts[0]}: stage {stage} is given twice; keep one")
        slowdowns[stage] = slowdown
    return slowdowns or None


@dataclass(frozen=True)
class SettingOptions:
    """What replaces the settings of the same names in a job file, if it is given."""

    schedule: Annotated[
        str | None,
        f"Order of the computations: {', '.join(NAMES)}; or a text grid (.csv or .txt) "
        "with a line for each rank and cells such as 3F17.  [default: the schedule that the "
        "profile was measured in]",
        Option(metavar="NAME|GRID"),
        _COMPLETED,
    ]
    microbatches: Annotated[
        int | None,
        "Number of microbatches per iteration.  [default: as for the schedule]",
        Option(metavar="M"),
    ]
    ranks: Annotated[
        int | None,
        "Number of pipeline ranks.  [default: as many as the profile's stages need]",
        Option(metavar="R"),
    ]
    virtual_stages: Annotated[
        int | None,
        "Number of stages on each rank, in looped and interleaved schedules.  [default: the "
        "stages over the ranks]",
        Option(metavar="V"),
    ]
    microbatch_group: Annotated[
        int | None,
        "Number of microbatches that a rank runs on one stage before its next stage, in "
        "interleaved-1f1b.  [default: the number of ranks]",
        Option(metavar="G"),
    ]
    stages: Annotated[
        Stages | None,
        "Number of pipeline stages; checked against the profile.  [default: the profile's]",
    ]
    layout: Annotated[
        str | None,
        "What each stage holds, as Megatron writes it, e.g. 'Et*3|(t*4|)*2t*3L', or "
        "parts=0+5+9+14 of DeepSpeed: reports then say which layer to move.  [default: the "
        "profile's]",
        Option(metavar="LAYOUT"),
    ]
    tensor_parallel: Annotated[
        GpuCount | None,
        "Number of GPUs per stage. If the profile was measured on one GPU, its energies and "
        "blocking power are multiplied; its times are not.  [default: the profile's]",
    ]
    transfer: Annotated[
        TransferTime | None,
        "Time of an activation or a gradient from rank to rank, e.g. 1.5ms.  [default: 0s]",
    ]
    slow_stages: Annotated[
        dict[int, float] | None,
        "Stage that is slower than its profile, with the factor, e.g. 3=1.15; can be repeated.",
        Option("--slow", type=str, multiple=True, metavar="STAGE=SLOWDOWN", callback=_slow_stages),
    ]
    blocking_power_w: Annotated[
        BlockingPower | None,
        "Power of a waiting GPU, e.g. 83.64W; required for a profile that is a CSV, and replaces "
        "that of a profile.yaml.",
    ]
    gpu_power_limit_w: Annotated[
        Power | None,
        "Power limit of each GPU, e.g. 500W, if it is lower than when it was profiled; clocks "
        "that it would cap are not used.",
    ]
    gpu_spread: Annotated[
        Spread | None,
        "By how much the times of GPUs differ from those of the profiled ones (standard "
        "deviation), e.g. 2%; 0% if the job runs on the very GPUs that were profiled.  [default: "
        "the profile's, else 1%]",
    ]
    overhead_s: Annotated[
        Overhead | None,
        "Constant part of the iteration time that the replay does not explain, e.g. 120ms, as "
        "`planner calibrate` measures it; replaces that of a profile.yaml.",
    ]

    def replaced(self, path: Path) -> Settings:
        """Return the settings of the job file, or of the profile at `path`, with the given options
        in their place.
        """
        from perseus_planner.base.file_kinds import kind_of
        from perseus_planner.plans.job import Settings, read_settings, schedule_of
        from perseus_planner.schedules.pipeline import Transfer

        given = _given(self)
        if self.schedule is not None:
            given["schedule"] = schedule_of(self.schedule, Path())
        if self.transfer is not None:
            given["transfer"] = Transfer(self.transfer, self.transfer)
        settings = read_settings(path) if kind_of(path) == "job" else Settings(profile=path)
        return replace(settings, **given)


@command(
    "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
    "planner solve measured.csv --blocking-power 83.64 --schedule 1f1b --microbatches 96 -o "
    "frontier.npz",
    "planner solve job.yaml -o frontier.npz",
    "planner solve job.yaml --slow 1=1.15 -o slow.npz",
)
def solve(
    profile_or_job: Annotated[Path, SourceFile("profile", "job")],
    *,
    options: SettingOptions,
    output: Annotated[
        Path, output_file("the frontier, which `planner plan` and `planner show` read", ".npz")
    ],
) -> None:
    """Find the least energy of an iteration for every iteration time.

    PROFILE_OR_JOB is a profile.yaml of `planner profile`; or a CSV with the columns stage,
    instruction (forward or backward), frequency (MHz), time (s) and energy (J); or a job file, a
    YAML file that names the profile, the schedule and all other settings. Options replace settings
    of the same name in the job file, except those of single replicas. The settings overhead_s,
    clock_change and blocking_power_w of a job replace those of a profile.yaml.

    If the replicas of a job differ, there is a frontier for each kind: FILE gets -0, -1 and so on
    before its ending.
    """
    from perseus_planner import Job, solve_dag
    from perseus_planner.views.frontier import frontier_text, summarize_frontier

    # The result would overwrite what it was made from.
    refuse_same([profile_or_job], output)
    job = Job.of(options.replaced(profile_or_job))
    # Replicas that differ have a frontier each, and a file each.
    targets = _numbered(output, len(job.counts), job.files)
    with console.progress("Solving") as progress:
        frontiers = [solve_dag(dag, progress=progress) for dag in job.dags()]
    for frontier, target in zip(frontiers, targets, strict=True):
        frontier.save(target)
    summaries = [summarize_frontier(frontier) for frontier in frontiers]
    # One frontier is printed as such, so that programs need not look into a list of one.
    summary = summaries[0] if len(summaries) == 1 else {"frontiers": summaries}
    text = "\n".join(map(frontier_text, summaries))
    console.report(summary, text, targets, counts=job.counts)


@dataclass(frozen=True)
class Target:
    """Which plan is chosen: exactly one of these is given."""

    deadline_s: Annotated[Time | None, "The longest that an iteration may take, e.g. 2.95s."]
    slowdown: Annotated[
        Slowdown | None,
        "The longest that an iteration may take, as a multiple of its time with all clocks at "
        "maximum, e.g. 1.05.",
    ]
    straggler_time_s: Annotated[
        Time | None, "The iteration time of a straggler that this pipeline waits for, e.g. 3.2s."
    ]
    least_energy: Annotated[
        bool,
        "Choose the iteration time of least energy, for pipelines that do not wait for others.",
    ]
    power_budget_w: Annotated[
        Power | None,
        "Choose the fastest plan with at most this average power of all GPUs of the pipeline, "
        "e.g. 5kW.",
    ]

    def __post_init__(self) -> None:
        given = [option_name(name) for name in _given(self)]
        if len(given) != 1:
            names = ", ".join(option_name(field.name) for field in fields(self))
            raise UsageError(f"give exactly one of {names}; got {' and '.join(given) or 'none'}")


@dataclass(frozen=True)
class PlanLimits:
    """What a plan keeps to, whichever is chosen; arguments of `Frontier.plan_until`."""

    max_changes: Annotated[
        Natural | None, "The most clock changes of a GPU per iteration; 0 keeps one clock."
    ]
    on_time: Annotated[
        Certainty | None,
        "The probability of being on time, or within --power-budget, though the profile is "
        f"uncertain, e.g. 99%.  [default: {ON_TIME:.0%}]",
    ]
    as_measured: Annotated[bool, "Believe each measured row, without a margin for uncertainty."]
    tolerance: Annotated[
        Tolerance | None,
        "How much slower than all clocks at maximum still counts as no slower.  [default: 0.1%]",
    ]

    def arguments(self) -> dict[str, Any]:
        """Return them as `Frontier.plan_until` takes them."""
        arguments = _given(self)
        if arguments.pop("as_measured", False):
            arguments["on_time"] = None
        return arguments


@command(
    "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
    "planner plan frontier.npz --slowdown 1.00 --as-measured -o plan.yaml",
    "planner plan frontier.npz --straggler-time 3.2s -o plan.yaml",
    "planner plan frontier.npz slow.npz --replicas 3,1 --slowdown 1.00 -o replicas.yaml",
)
def plan(
    frontier: Annotated[tuple[Annotated[Path, SourceFile("frontier")], ...], Option(required=True)],
    *,
    target: Target,
    limits: PlanLimits,
    replicas: Annotated[
        Counts, "The number of pipelines of each FRONTIER, e.g. 3,1.  [default: 1 each]"
    ] = (),
    bound: Annotated[
        bool, "Also say how far the plan is above a closer bound, which takes a second or two."
    ],
    output: Annotated[Path, output_file("the plan", ".yaml", ".yml")],
) -> None:
    """Choose a clock for every computation.

    FRONTIER is a file that `planner solve` wrote. Give exactly one of --deadline, --slowdown,
    --straggler-time, --least-energy and --power-budget. Write times as 5s, 950ms or 1m, and powers
    as 900W or 5kW.

    If pipelines of different kinds train side by side, give one FRONTIER for each kind. All plans
    then meet one common deadline, and a --slowdown refers to the slowest pipeline. FILE gets -0, -1
    and so on before its ending.
    """
    _refuse_unfit(target, limits, several=len(frontier) > 1)
    from perseus_planner import Frontier, Replicas
    from perseus_planner.views.plan import plan_text, plans_text, summarize_plan, summarize_plans

    files = _numbered(output, len(frontier), frontier)
    pipelines = Replicas(tuple(map(Frontier.load, frontier)), replicas)
    with console.progress("Planning"):
        try:
            plans = _make_plans(pipelines, target, limits)
        except InfeasibleDeadline as error:
            # Of a budget of changes the refusal says more; what was asked for is a factor here.
            if target.slowdown is None or isinstance(error, InfeasibleBudget):
                raise
            raise _too_fast(pipelines, target.slowdown, error) from None
        again = None
        if len(plans) == 1:
            # Another sweep is told of one plan alone: several have no common margin.
            again = pipelines.frontiers[0].measuring_again(plans[0], **limits.arguments())
        if bound:
            pairs = zip(pipelines.frontiers, plans, strict=True)
            plans = tuple(
                pipeline_frontier.with_point_bound(chosen) for pipeline_frontier, chosen in pairs
            )
    for pipeline_plan, file in zip(plans, files, strict=True):
        pipeline_plan.save(file)
    summary: Any
    if len(plans) == 1:
        summary = summarize_plan(plans[0], target.straggler_time_s, again)
        text = plan_text(summary)
    else:
        summary = summarize_plans(pipelines, plans, target.straggler_time_s)
        text = plans_text(summary)
    console.report(summary, text, files, counts=pipelines.counts)


def _too_fast(pipelines: Replicas, slowdown: float, error: InfeasibleDeadline) -> UsageError:
    """Return the refusal of a slowdown that no plan keeps, in the terms in which it was given."""
    # Rounded up, as the number is one to type.
    least = math.ceil(1e4 * (error.least_time_s / pipelines.baseline_time_s - 1e-9)) / 1e4
    return UsageError(
        f"--slowdown {slowdown:g}: no plan is that fast: the fastest takes {least:.4f}x the time "
        "of all clocks at maximum; ask for that or more"
    )


def _refuse_unfit(target: Target, limits: PlanLimits, *, several: bool) -> None:
    """Refuse options that have no meaning beside each other."""
    # Believing rows as measured leaves no margin, so options of a margin have no meaning.
    if limits.as_measured and (limits.on_time or limits.tolerance) is not None:
        given = "--tolerance" if limits.on_time is None else "--on-time"
        raise UsageError(
            f"{given}: applies to plans with a margin; leave out this option, or --as-measured"
        )
    if limits.tolerance is not None and target.power_budget_w is not None:
        raise UsageError(
            "--tolerance: applies to a time; leave out --tolerance, or give --slowdown instead"
        )
    # A budget of one pipeline says nothing of how several share it.
    if target.power_budget_w is not None and several:
        raise UsageError(
            "--power-budget cannot be given with several frontiers; give --deadline or --slowdown "
            "instead"
        )


def _make_plans(pipelines: Replicas, target: Target, limits: PlanLimits) -> tuple[Plan, ...]:
    if len(pipelines.frontiers) > 1:
        return _plans_of_several(pipelines, target, limits)
    return (_plan_of_one(pipelines.frontiers[0], target, limits),)


def _plan_of_one(frontier: Frontier, target: Target, limits: PlanLimits) -> Plan:
    """Return the plan of a single frontier, by what was asked for."""
    arguments = limits.arguments()
    if target.power_budget_w is not None:
        return frontier.plan_within_power(target.power_budget_w, **arguments)
    if target.straggler_time_s is not None:
        return frontier.plan_beside_straggler(target.straggler_time_s, **arguments)
    wanted_s = _wanted_s(frontier, target)
    if wanted_s is None:
        return frontier.plan_for_least_energy(**arguments)
    # Tied modes are chosen for the time that was asked for, whatever needs the least energy.
    if not frontier.dag.has_tied_modes:
        _tell_if_longer(wanted_s, _least_energy_s(frontier))
    return frontier.plan_for(wanted_s, **arguments)


def _plans_of_several(pipelines: Replicas, target: Target, limits: PlanLimits) -> tuple[Plan, ...]:
    """Return the plans of pipelines of different kinds, for one time that all of them can meet.

    Raises:
        UsageError: If one of them has tied modes.
    """
    # Tied modes are chosen on one frontier, so several cannot be matched in time.
    if any(frontier.dag.has_tied_modes for frontier in pipelines.frontiers):
        raise UsageError(
            "modes that are tied to each other are planned for one kind of pipeline; give one "
            "frontier"
        )
    arguments = limits.arguments()
    least_s = _least_energy_s(pipelines)
    wanted_s = _wanted_s(pipelines, target)
    if wanted_s is not None:
        _tell_if_longer(wanted_s, least_s)
    fastest_s = pipelines.least_deadline_s(arguments.get("on_time", ON_TIME))
    # None can be made to wait for less than the slowest takes.
    if target.straggler_time_s is not None:
        common_s = max(target.straggler_time_s, fastest_s)
    elif wanted_s is None or wanted_s > least_s:
        common_s = max(least_s, fastest_s)
    else:
        common_s = wanted_s
    return pipelines.plans_for(common_s, **arguments)


def _wanted_s(source: Frontier | Replicas, target: Target) -> float | None:
    """Return the longest that an iteration may take; None if no such time was asked for."""
    # A slowdown counts from the slowest pipeline, as all wait for it.
    if target.slowdown is not None:
        return target.slowdown * source.baseline_time_s
    return target.deadline_s


def _least_energy_s(source: Frontier | Replicas) -> float:
    """Return the iteration time of least energy, seconds: more, as rounding may refuse exactly that
    time.
    """
    return max(source.least_energy_time_s * (1 + 1e-9), source.min_time_s)


def _tell_if_longer(wanted_s: float, least_s: float) -> None:
    """Say that more time than that of least energy costs more, which few mean."""
    if wanted_s <= least_s:
        return
    from perseus_planner.base.prefixes import si

    click.echo(
        f"planner: the plan takes {si(least_s, 's', 6)}, where an iteration needs the least "
        f"energy: {si(wanted_s, 's', 6)} would be slower and cost more; if others wait "
        "until then anyway, give --straggler-time",
        err=True,
    )


def _given(options: DataclassInstance) -> dict[str, Any]:
    """Return the options that are given, by the names of their fields."""
    return {
        name: value
        for name, value in vars(options).items()
        if value is not None and value is not False
    }


def _numbered(target: Path, count: int, sources: Iterable[Path]) -> list[Path]:
    """Return the files for `count` results: `target` for one result, else a-0.npz, a-1.npz and so
    on for a.npz.

    Raises:
        UsageError: If one of the files is a folder, or is read itself.
    """
    # One result keeps the name that was given.
    targets = [target]
    if count > 1:
        targets = [
            target.with_name(f"{target.stem}-{number}{target.suffix}") for number in range(count)
        ]
    for path in targets:
        refuse_same(sources, path)
        if path.is_dir():
            raise UsageError(f"--output {path}: is a folder; name a file in it")
    return targets


@command(has_json=False, hidden=True)
def run_job(
    job: Annotated[Path, SourceFile("job")],
    *,
    slowdown: Annotated[str, "As for `planner plan`.", Option(metavar="RATIO")] = "1.00",
    max_changes: Annotated[str | None, "As for `planner plan`.", Option(metavar="N")],
) -> None:
    """Profile the stages of a job file, solve for its frontier, and choose a plan, in one go.

    The profile is the one that JOB names; if it is there already, it is not measured again.
    Frontier and plan are written beside it, as frontier.npz and plan.yaml; if the replicas of JOB
    differ, one of each for each kind of them, with -0, -1 and so on before the ending.
    """
    from perseus_planner.plans.job import Job, read_settings

    settings = read_settings(job)
    named = settings.profile
    if not isinstance(named, Path):
        raise UsageError(
            f"{job}: has several profiles or none; run `planner profile`, `planner solve` and "
            "`planner plan`"
        )
    context = click.get_current_context()

    def run_step(step: click.Command, arguments: list[str]) -> None:
        # Steps are invoked with their own contexts, so that options are read and checked as ever.
        click.echo(f"planner {' '.join([str(step.name), *arguments])}")
        with step.make_context(step.name, arguments, parent=context.parent) as step_context:
            step.invoke(step_context)
        click.echo()

    # Each step is a command as a user would type it, so that it can be repeated by hand.
    # Measuring takes long, so what is there is kept.
    if named.exists():
        click.echo(f"{click.format_filename(named)} exists; remove it to measure again\n")
    else:
        run_step(profile, [str(job)])
    # Beside the profile, so that all of a job stands together.
    frontier, chosen = (named.with_name(name) for name in ("frontier.npz", "plan.yaml"))
    run_step(solve, [str(job), "-o", str(frontier)])
    # Replicas that differ have a frontier each; only their profiles tell how many kinds there are.
    counts = Job.of(settings).counts
    planning = [*map(str, _numbered(frontier, len(counts), ()))]
    if len(counts) > 1:
        planning += ["--replicas", ",".join(map(str, counts))]
    planning += ["--slowdown", slowdown, "-o", str(chosen)]
    if max_changes is not None:
        planning += ["--max-changes", max_changes]
    run_step(plan, planning)
    first, *others = map(str, _numbered(chosen, len(counts), ()))
    train = f"planner_runtime(engine, plan={first!r})"
    # Which pipelines are of which kind only the user knows.
    if others:
        train = (
            f"planner_runtime(engine, plan={{0: {first!r}, ...}}), which names the plan of each "
            "pipeline by its number"
        )
    click.echo(f"Next: planner show {first}, and train with {train}")
