"""`planner solve`: a profile, or a job file, and a schedule in; frontiers out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.cli import console
from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    from perseus_planner.jobs.settings import Settings

#: what `schedules.NAMES` has; that is not loaded for --help
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zbv", "dualpipe-v")


def _slow(_: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[int, float] | None:
    """A callback that reads 3=1.15, any number of times, as stage and slowdown."""
    slowdowns: dict[int, float] = {}
    for text in texts:
        from perseus_planner.quantities import FACTOR, STAGE

        match = re.fullmatch(r"(\d+)=([^=]+)", text)
        stage, slowdown = (STAGE.parse(match[1]), FACTOR.parse(match[2])) if match else (None, None)
        if stage is None or slowdown is None:
            raise UsageError(
                f"{parameter.opts[0]}: {text!r} is not a slow stage: write stage and slowdown, such as 3=1.15"
            )
        if stage in slowdowns:
            raise UsageError(f"{parameter.opts[0]}: stage {stage} is there twice; keep one")
        slowdowns[stage] = slowdown
    return slowdowns or None


@click.command(
    epilog=console.examples(
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner solve measured.csv --blocking-power 83.64 --schedule 1f1b --microbatches 96 -o frontier.npz",
        "planner solve job.yaml -o frontier.npz",
        "planner solve job.yaml --slow 1=1.15 -o slow.npz",
    )
)
@click.argument("profile_or_job", type=console.PATH)
@click.option(
    "--schedule",
    metavar="NAME|GRID",
    help=f"Order of the computations: {', '.join(SCHEDULES)}, or a text grid (.csv or .txt) with a line of "
    "cells such as 3F17 for each rank.",
)
@click.option("--microbatches", type=int, metavar="M", help="Microbatches of an iteration, at least 1.")
@click.option("--ranks", type=int, metavar="R", help="Pipeline ranks.  [default: as many as the profile's stages need]")
@click.option(
    "--virtual-stages",
    type=int,
    metavar="V",
    help="Stages that each rank holds, in interleaved schedules.  [default: the profile's stages over the ranks]",
)
@click.option(
    "--microbatch-group",
    type=int,
    metavar="G",
    help="Microbatches that go through a stage before those of the rank's next one, in interleaved-1f1b.  "
    "[default: as many as ranks]",
)
@click.option("--stages", type=int, metavar="S", help="Pipeline stages that you expect.  [default: the profile's]")
@click.option(
    "--tensor-parallel",
    type=int,
    metavar="GPUS",
    help="GPUs of a stage. Where the profile was measured on one, each does what that did: energies and blocking power "
    "are multiplied, times are not.  [default: the profile's]",
)
@click.option(
    "--transfer",
    metavar="TIME",
    callback=console.quantity("LAG"),
    help="How long an activation or a gradient takes from rank to rank, e.g. 1.5ms.  [default: 0s]",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="STAGE=SLOWDOWN",
    callback=_slow,
    help="A stage that is slower than it was profiled, e.g. 3=1.15; may be given again for another stage.",
)
@click.option(
    "--blocking-power",
    metavar="POWER",
    callback=console.quantity("BLOCKING_POWER"),
    help="What a GPU draws while it waits, e.g. 83.64W; needed if the profile is a CSV, which does not carry it, and "
    "replaces that of a profile.yaml.",
)
@click.option(
    "--overhead",
    metavar="TIME",
    callback=console.signed,
    help="What an iteration takes beside what is replayed, e.g. 120ms, as `planner calibrate` finds it; replaces that "
    "of a profile.yaml.",
)
@console.output("the frontier, which `planner plan` and `planner show` read")
@console.as_json
def solve(profile_or_job: Path, output: Path, as_json: bool, **flags: Any) -> None:
    """Find the least energy of an iteration for every iteration time.

    PROFILE_OR_JOB is a profile.yaml of `planner profile`; or a CSV with the columns stage, instruction (forward or
    backward), frequency (MHz), time (s) and energy (J); or a job file, YAML that names profile, schedule and all else.
    What is given here replaces what the job file says under the same name, but not what it says of some of its
    replicas only. What a job says of overhead_s, clock_change and blocking_power_w replaces what a profile.yaml says.

    Where the replicas of a job differ, there is a frontier for each kind of them: FILE gets -0, -1 and so on before its
    ending.
    """
    from perseus_planner.jobs.job import Job
    from perseus_planner.solver.solve import solve_dag
    from perseus_planner.views.summary import FrontiersSummary, summarize_frontier
    from perseus_planner.views.tables import frontier_text

    console.refuse_same([profile_or_job], output)
    job = Job.of(_settings(profile_or_job, flags))
    targets = console.numbered(output, len(job.counts), job.files)
    with console.progress("Solving") as progress:
        frontiers = [solve_dag(dag, progress=progress) for dag in job.dags()]
    for frontier, target in zip(frontiers, targets, strict=True):
        frontier.save(target)
    summaries = [summarize_frontier(frontier) for frontier in frontiers]
    together = summaries[0] if len(summaries) == 1 else FrontiersSummary(tuple(summaries))
    console.report(together, "\n".join(map(frontier_text, summaries)), targets, as_json=as_json, counts=job.counts)


def _settings(path: Path, flags: dict[str, Any]) -> Settings:
    """What the job file says, or that `path` is the profile, with the flags that are given instead."""
    from dataclasses import replace

    from perseus_planner.documents import kind_of
    from perseus_planner.jobs.settings import Settings, read_settings, schedule_of
    from perseus_planner.schedules.pipeline import Transfer

    same = ("microbatches", "ranks", "virtual_stages", "microbatch_group", "stages", "tensor_parallel")
    given = {name: flags[name] for name in same}
    given["blocking_power_w"], given["overhead_s"], given["slow_stages"] = (
        flags[name] for name in ("blocking_power", "overhead", "slow")
    )
    if flags["schedule"] is not None:
        given["schedule"] = schedule_of(flags["schedule"], Path())
    if flags["transfer"] is not None:
        given["transfer"] = Transfer(flags["transfer"], flags["transfer"])
    settings = read_settings(path) if kind_of(path) == "job" else Settings(profile=path)
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
