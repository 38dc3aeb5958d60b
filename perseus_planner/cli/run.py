"""`planner run`: runs a command whose Python processes save energy in training, without a change
to the script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
from click.core import ParameterSource

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    GpuName,
    Natural,
    Option,
    Share,
    Slowdown,
    SourceFile,
    check_folder,
    command,
    option_name,
)


@dataclass(frozen=True)
class RuntimeOptions:
    """Arguments of `planner_runtime`."""

    plan: Annotated[
        Annotated[Path, SourceFile("plan")] | None,
        "Plan to train with; without one, training plans itself.",
    ]
    slowdown: Annotated[
        Slowdown | None,
        "Without a plan: how long an iteration may take, as a multiple of that at full clocks.  "
        "[default: 1.00]",
    ]
    max_slowdown: Annotated[
        Share | None,
        "Without a plan: how much longer iterations may be on average while training learns.  "
        "[default: 0.005]",
    ]
    max_changes: Annotated[
        Natural | None,
        "The most clock changes of a GPU per iteration, without a plan or in the service's plans. "
        " [default: 8]",
    ]
    learn: Annotated[
        bool | None,
        "Without a plan: whether to try clocks, or plan on what is known.  [default: learn]",
        Option("--learn/--no-learn", default=None),
    ]
    state: Annotated[
        Path | None,
        "Without a plan: profile of what was learnt, from which the next start continues.  "
        "[default: autopilot.yaml]",
    ]
    work: Annotated[
        str | None,
        "Without a plan: have clocks follow each batch, by the work of a microbatch that this "
        "function returns.",
        Option(metavar="MODULE:FUNCTION"),
    ]
    gpu: Annotated[GpuName | None, "GPU of each rank, or only a back-end.  [default: cuda]"]
    dry_run: Annotated[bool, "Do everything except setting clocks."]
    trust_traced: Annotated[
        bool, "Apply a --plan of a traced profile, which is estimated at all clocks but one."
    ]
    follow: Annotated[
        Literal["hooks", "time", "graph"] | None,
        "With a --plan: set each computation's clock as it comes, or all of an iteration by time.  "
        "[default: hooks, and time where only whole iterations show]",
    ]
    record: Annotated[
        Path | None,
        "Folder in which to record the run, for `planner show` and `planner calibrate`.",
        Option(metavar="FOLDER"),
    ]
    job: Annotated[str | None, "Name of this training in a service.", Option(metavar="NAME")]
    service: Annotated[str | None, "Follow this service.", Option(metavar="URL")]
    frontier: Annotated[
        Annotated[Path, SourceFile("frontier")] | None,
        "With a plan: frontier from which the service plans.",
    ]

    def check_service(self, *, is_named: bool) -> None:
        """Check that the service can be told what trains.

        Args:
            is_named: whether the service is an option; PLANNER_SERVICE alone is there for other
                commands.
        """
        if not self.service or not (self.job or is_named):
            return
        if self.frontier and not self.plan:
            raise UsageError(
                "--frontier: is for --plan; without a plan the frontier is learnt, so leave it out"
            )
        missing = "job" if not self.job else "frontier" if self.plan and not self.frontier else None
        if missing is not None:
            raise UsageError(
                f"--service {self.service}: needs --{missing}; give it, or leave out the service"
            )


@command(
    "planner run -- torchrun --nproc-per-node 8 pretrain_gpt.py",
    "planner run --slowdown 1.05 --record run -- deepspeed train.py",
    "planner run --plan plan.yaml --dry-run -- torchrun --nproc-per-node 8 train.py",
    "planner run --work lengths:work --no-learn --state profile.yaml -- deepspeed train.py",
    "srun planner run -- python train.py",
    has_json=False,
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": "PLANNER"},
)
def run(
    command: Annotated[tuple[str, ...], Option(required=True, type=click.UNPROCESSED)],
    *,
    options: RuntimeOptions,
) -> None:
    """Run COMMAND, and save energy in each of its Python processes that trains.

    Training plans itself, or follows a plan. The script stays unchanged: the planner attaches when
    a DeepSpeed PipelineEngine, a schedule of torch.distributed.pipelining or Megatron-core first
    trains, and leaves when the process exits. If it cannot attach, rank 0 logs why, and training
    goes on without the planner. The exit code is that of COMMAND.

    Each option can also be given as an environment variable, such as PLANNER_PLAN for --plan.
    """
    from perseus_planner import Plan
    from perseus_planner.plans.plan import check_trusted
    from perseus_planner.runtime.options import AutopilotSettings, check_work
    from perseus_planner.runtime.unmodified.options import write_options

    for name in ("record", "state"):
        if (path := getattr(options, name)) is not None:
            check_folder(path, option_name(name))
    if options.plan is not None:
        check_trusted(Plan.load(options.plan), options.trust_traced)
    if options.slowdown is not None:
        AutopilotSettings(slowdown=options.slowdown)  # refused here, and not by every rank
    if options.work is not None:
        check_work(
            plan=options.plan,
            learn=options.learn is not False,
            state=options.state,
        )
    source = click.get_current_context().get_parameter_source("service")
    options.check_service(is_named=source is ParameterSource.COMMANDLINE)
    ignoring = _flag_that_ignores(command)
    if ignoring is not None:
        click.echo(
            f"planner: {command[0]} {ignoring} ignores PYTHONPATH, so its training has no planner",
            err=True,
        )
    given = {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    for flag in ("dry_run", "trust_traced"):
        given[flag] = given[flag] or None  # off is what it is without
    variables = write_options(given)
    modules = _modules(os.environ.get("PYTHONPATH"))
    try:
        os.execvpe(command[0], command, {**os.environ, **variables, "PYTHONPATH": modules})
    except (OSError, ValueError) as error:  # if it is empty
        raise console.cannot_run(command, error) from error


def _modules(given: str | None) -> str:
    """Return PYTHONPATH with the folder of our `sitecustomize` first."""
    from perseus_planner.runtime import unmodified

    startup = str(Path(unmodified.__file__).absolute().with_name("startup"))
    others = (
        [] if given is None else [folder for folder in given.split(os.pathsep) if folder != startup]
    )
    return os.pathsep.join([startup, *others])


def _flag_that_ignores(command: Sequence[str]) -> str | None:
    """Return the option of a Python interpreter by which it does not load `sitecustomize`; None
    if there is none.
    """
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        for word in command[1:]:
            if not re.fullmatch(r"-[a-zA-Z]+", word) or word[1] in "cm":
                break
            if set(word) & set("IES"):
                return word
    return None
