"""`planner run`: runs a command whose Python processes save energy in training, without a change
to the script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console


@click.command(
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": "PLANNER"},
    epilog=console.examples(
        "planner run -- torchrun --nproc-per-node 8 pretrain_gpt.py",
        "planner run --slowdown 1.05 --record run -- deepspeed train.py",
        "planner run --plan plan.yaml --dry-run -- torchrun --nproc-per-node 8 train.py",
        "srun planner run -- python train.py",
    ),
)
@click.option(
    "--plan", type=console.PATH, help="Plan to train by; without one, training plans itself."
)
@click.option(
    "--slowdown",
    type=console.SLOWDOWN,
    help="Without a plan: how long an iteration may take, as a multiple of that at full clocks.  "
    "[default: 1.00]",
)
@click.option(
    "--max-slowdown",
    type=console.Quantity("SHARE", "share"),
    help="Without a plan: how much longer iterations may be on average while it learns.  [default: "
    "0.005]",
)
@click.option(
    "--max-changes",
    type=click.IntRange(min=0),
    metavar="N",
    help="The most clock changes of a GPU per iteration, without a plan or in the service's plans. "
    " [default: 8]",
)
@click.option(
    "--learn/--no-learn",
    default=None,
    help="Without a plan: whether to try clocks, or plan on what is known.  [default: learn]",
)
@click.option(
    "--state",
    type=console.PATH,
    help="Without a plan: profile of what was learnt, from which the next start goes on.  "
    "[default: autopilot.yaml]",
)
@click.option("--gpu", metavar="GPU", help="GPU of each rank, or only a back-end.  [default: cuda]")
@click.option("--dry-run", is_flag=True, help="Do everything except setting clocks.")
@click.option(
    "--record",
    type=console.PATH,
    metavar="FOLDER",
    help="Record the run there, for `planner show` and `planner calibrate`.",
)
@click.option("--job", metavar="NAME", help="Name of this training in a service.")
@click.option("--service", metavar="URL", help="Follow this service.")
@click.option(
    "--frontier", type=console.PATH, help="With a plan: frontier from which the service plans."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND, and save energy in each of its Python processes that trains.

    Training plans itself, or follows a plan. The script stays as it is: the runtime attaches when a
    DeepSpeed PipelineEngine, a schedule of torch.distributed.pipelining or Megatron-core first
    trains, and leaves when the process exits. Where it cannot, it says so once, and training goes
    on without it. The exit code is that of COMMAND.

    Each option can be given as an environment variable too, such as PLANNER_PLAN for --plan.
    """
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runtime.autopilot.job import AutopilotSettings
    from perseus_planner.runtime.unmodified.options import write_options

    if options["plan"] is not None:
        Plan.load(options["plan"])
    if options["slowdown"] is not None:
        AutopilotSettings(slowdown=options["slowdown"])  # refused here, and not by every rank
    _check_service(context, options)
    ignoring = _flag_that_ignores(command)
    if ignoring is not None:
        click.echo(
            f"planner: {command[0]} {ignoring} ignores PYTHONPATH, so its training has no planner",
            err=True,
        )
    options["dry_run"] = options["dry_run"] or None
    given = {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in options.items()
    }
    environment = {
        **os.environ,
        **write_options(given),
        "PYTHONPATH": _modules(os.environ.get("PYTHONPATH")),
    }
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise UsageError(
            f"{command[0]}: cannot be run: {error.strerror}; write the command after `--`"
        ) from error


def _check_service(context: click.Context, options: dict[str, Any]) -> None:
    """Check that the service can be told what trains; PLANNER_SERVICE alone is there for other
    commands.
    """
    is_wanted = (
        options["job"] or context.get_parameter_source("service") is ParameterSource.COMMANDLINE
    )
    needed = ("job", "frontier") if options["plan"] else ("job",)
    missing = next((name for name in needed if not options[name]), None)
    if options["service"] and is_wanted and options["frontier"] and not options["plan"]:
        raise UsageError(
            "--frontier: is for --plan; without a plan the frontier is learnt, so leave it out"
        )
    if options["service"] and is_wanted and missing is not None:
        raise UsageError(
            f"--service {options['service']}: needs --{missing}; give it, or leave out the service"
        )


def _modules(given: str | None) -> str:
    """Return PYTHONPATH with the folder of our `sitecustomize` first."""
    from perseus_planner.runtime import unmodified

    startup = str(Path(unmodified.__file__).absolute().with_name("startup"))
    others = [] if given is None else [each for each in given.split(os.pathsep) if each != startup]
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
