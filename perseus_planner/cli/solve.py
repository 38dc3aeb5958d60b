"""`planner solve`: solves for the frontier of a profile and a schedule, or for the frontiers of
a job file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.plans.settings import Settings

#: the names in `schedules.NAMES`, which is not loaded for --help
SCHEDULES = (
    "gpipe",
    "1f1b",
    "looped-bfs",
    "interleaved-1f1b",
    "zb-h1",
    "interleaved-zb",
    "zbv",
    "dualpipe-v",
)


def _slow_stages(
    _: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[int, float] | None:
    """Read repeated options such as 3=1.15 as stages and slowdowns."""
    slowdowns: dict[int, float] = {}
    for text in texts:
        from perseus_planner.base.units import FACTOR, STAGE

        match = re.fullmatch(r"(\d+)=([^=]+)", text)
        stage, slowdown = (STAGE.parse(match[1]), FACTOR.parse(match[2])) if match else (None, None)
        if stage is None or slowdown is None:
            raise UsageError(
                f"{parameter.opts[0]}: {text!r} is not a slow stage: write stage and slowdown, "
                "such as 3=1.15"
            )
        if stage in slowdowns:
            raise UsageError(f"{parameter.opts[0]}: stage {stage} is given twice; keep one")
        slowdowns[stage] = slowdown
    return slowdowns or None


@click.command(
    epilog=console.examples(
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner solve measured.csv --blocking-power 83.64 --schedule 1f1b --microbatches 96 -o "
        "frontier.npz",
        "planner solve job.yaml -o frontier.npz",
        "planner solve job.yaml --slow 1=1.15 -o slow.npz",
    )
)
@click.argument("profile_or_job", type=console.PATH)
@click.option(
    "--schedule",
    metavar="NAME|GRID",
    shell_complete=console.complete(lambda: SCHEDULES),
    help=f"Order of the computations: {', '.join(SCHEDULES)}; or a text grid (.csv or .txt) with a "
    "line for each "
    "rank and cells such as 3F17.  [default: the one that a profile.yaml was measured in]",
)
@click.option(
    "--microbatches",
    type=int,
    metavar="M",
    help="Number of microbatches per iteration.  [default: as for the schedule]",
)
@click.option(
    "--ranks",
    type=int,
    metavar="R",
    help="Number of pipeline ranks.  [default: as many as the profile's stages need]",
)
@click.option(
    "--virtual-stages",
    type=int,
    metavar="V",
    help="Number of stages on each rank, in looped and interleaved schedules.  [default: the "
    "stages over the ranks]",
)
@click.option(
    "--microbatch-group",
    type=int,
    metavar="G",
    help="Number of microbatches that a rank runs on one stage before its next stage, in "
    "interleaved-1f1b.  "
    "[default: the number of ranks]",
)
@click.option(
    "--stages",
    type=int,
    metavar="S",
    help="Number of pipeline stages; checked against the profile.  [default: the profile's]",
)
@click.option(
    "--tensor-parallel",
    type=int,
    metavar="GPUS",
    help="Number of GPUs per stage. If the profile was measured on one GPU, its energies and "
    "blocking power are "
    "multiplied; its times are not.  [default: the profile's]",
)
@click.option(
    "--transfer",
    type=console.LAG,
    help="Time of an activation or a gradient from rank to rank, e.g. 1.5ms.  [default: 0s]",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="STAGE=SLOWDOWN",
    callback=_slow_stages,
    help="Stage that is slower than its profile, with the factor, e.g. 3=1.15; can be repeated.",
)
@click.option(
    "--blocking-power",
    type=console.BLOCKING_POWER,
    help="Power of a waiting GPU, e.g. 83.64W; required for a profile that is a CSV, and replaces "
    "that of a "
    "profile.yaml.",
)
@click.option(
    "--gpu-power-limit",
    type=console.POWER,
    help="Power limit of each GPU, e.g. 500W, if it is lower than when it was profiled; clocks "
    "that it would cap are "
    "not used.",
)
@click.option(
    "--overhead",
    type=console.Quantity("OVERHEAD", "time"),
    help="Constant part of the iteration time that the replay does not explain, e.g. 120ms, as "
    "`planner calibrate` "
    "measures it; replaces that of a profile.yaml.",
)
@console.output("the frontier, which `planner plan` and `planner show` read", ".npz")
@console.as_json
def solve(profile_or_job: Path, output: Path, as_json: bool, **flags: Any) -> None:
    """Find the least energy of an iteration for every iteration time.

    PROFILE_OR_JOB is a profile.yaml of `planner profile`; or a CSV with the columns stage,
    instruction (forward or backward), frequency (MHz), time (s) and energy (J); or a job file, a
    YAML file that names the profile, the schedule and all other settings. Options replace settings
    of the same name in the job file, except those of single replicas. The settings overhead_s,
    clock_change and blocking_power_w of a job replace those of a profile.yaml.

    If the replicas of a job differ, there is a frontier for each kind: FILE gets -0, -1 and so on
    before its ending.
    """
    from perseus_planner.plans.job import Job
    from perseus_planner.solver.frontier import solve_dag
    from perseus_planner.views.frontier import frontier_text, summarize_frontier

    console.refuse_same([profile_or_job], output)
    job = Job.of(_settings(profile_or_job, flags))
    targets = console.numbered(output, len(job.counts), job.files)
    with console.progress("Solving") as progress:
        frontiers = [solve_dag(dag, progress=progress) for dag in job.dags()]
    for frontier, target in zip(frontiers, targets, strict=True):
        frontier.save(target)
    summaries = [summarize_frontier(frontier) for frontier in frontiers]
    summary = summaries[0] if len(summaries) == 1 else {"frontiers": summaries}
    console.report(
        summary,
        "\n".join(map(frontier_text, summaries)),
        targets,
        as_json=as_json,
        counts=job.counts,
    )


def _settings(path: Path, flags: dict[str, Any]) -> Settings:
    """Return the settings of the job file, or of the profile at `path`, with the given options
    in their place.
    """
    from dataclasses import replace

    from perseus_planner.base.documents import kind_of
    from perseus_planner.plans.settings import Settings, read_settings, schedule_of
    from perseus_planner.schedules.pipeline import Transfer

    same = (
        "microbatches",
        "ranks",
        "virtual_stages",
        "microbatch_group",
        "stages",
        "tensor_parallel",
    )
    given = {name: flags[name] for name in same}
    names = {
        "blocking_power_w": "blocking_power",
        "gpu_power_limit_w": "gpu_power_limit",
        "overhead_s": "overhead",
    }
    given |= {name: flags[flag] for name, flag in names.items()} | {"slow_stages": flags["slow"]}
    if flags["schedule"] is not None:
        given["schedule"] = schedule_of(flags["schedule"], Path())
    if flags["transfer"] is not None:
        given["transfer"] = Transfer(flags["transfer"], flags["transfer"])
    settings = read_settings(path) if kind_of(path) == "job" else Settings(profile=path)
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
