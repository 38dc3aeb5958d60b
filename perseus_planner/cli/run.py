"""`planner run`: runs a command whose Python processes save energy in training, without a change
to the script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
from click.core import ParameterSource

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    PATH,
    Option,
    Quantity,
    SourceFile,
    check_folder,
    command,
    option_name,
)


def _parameters() -> list[click.Parameter]:
    """Return the options of `planner_runtime` as those of the command; None if not given."""
    from perseus_planner.runtime.options import said_options

    parameters: list[click.Parameter] = []
    # Options of the command are those of the function, so they are declared in one place.
    for name, said in said_options().items():
        option = option_name(name)
        settings: dict[str, Any] = {"help": said.help, "default": None}
        # Without a value to give it is a flag, which may be switched off if it is on otherwise.
        if not said.word:
            settings["is_flag"] = True
            settings["default"] = None if said.has_opposite else False
            if said.has_opposite:
                option = f"{option}/--no-{name}"
        # What is left is told by its rule, its choices, its kind of file, or its word alone.
        elif said.rule is not None:
            settings["type"] = Quantity(said.rule, said.word.lower())
        elif said.choices:
            settings["type"] = click.Choice(said.choices)
        elif said.kind:
            settings["type"] = SourceFile(said.kind)
        else:
            settings["type"] = PATH if said.names_file else str
            settings["metavar"] = said.word
        parameters.append(click.Option([option, name], **settings))
    return parameters


def _check_service(given: Mapping[str, Any], *, is_named: bool) -> None:
    """Check that the service can be told what trains.

    Args:
        given: The options.
        is_named: whether the service is an option; PLANNER_SERVICE alone is there for other
            commands.
    """
    if not given["service"]:
        if given["frontier"]:
            raise UsageError("--frontier: is for --service; give both, or leave out the frontier")
        return
    if not (given["job"] or is_named):
        return
    if given["frontier"] and not given["plan"]:
        raise UsageError(
            "--frontier: is for --plan; without a plan the frontier is learnt, so leave it out"
        )
    missing = None
    if not given["job"]:
        missing = "job"
    elif given["plan"] and not given["frontier"]:
        missing = "frontier"
    if missing is not None:
        raise UsageError(
            f"--service {given['service']}: needs --{missing}; give it, or leave out the service"
        )


@command(
    "planner run -- torchrun --nproc-per-node 8 pretrain_gpt.py",
    "planner run --slowdown 1.05 --record run -- deepspeed train.py",
    "planner run --plan plan.yaml --dry-run -- torchrun --nproc-per-node 8 train.py",
    "planner run --work lengths:work --no-learn --state profile.yaml -- deepspeed train.py",
    "srun planner run -- python train.py",
    has_json=False,
    others=_parameters,
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": "PLANNER"},
)
def run(
    command: Annotated[tuple[str, ...], Option(required=True, type=click.UNPROCESSED)],
    **given: Any,
) -> None:
    """Run COMMAND, and save energy in each of its Python processes that trains.

    Training plans itself, or follows a plan. The script stays unchanged: the planner attaches when
    a DeepSpeed PipelineEngine, a schedule of torch.distributed.pipelining or Megatron-core first
    trains, and leaves when the process exits. If it cannot attach, rank 0 logs why, and training
    goes on without the planner. The exit code is that of COMMAND.

    Each option can also be given as an environment variable, such as PLANNER_PLAN for --plan.
    """
    from perseus_planner import Plan
    from perseus_planner.gpu import check_back_end, check_gpu_text
    from perseus_planner.plans.plan import check_trusted
    from perseus_planner.runtime.options import AutopilotSettings, check_work, said_options
    from perseus_planner.runtime.unmodified.options import write_options

    # What every rank would refuse is refused here, once.
    for name in ("record", "state"):
        if given[name] is not None:
            check_folder(given[name], option_name(name), may_be_file=name == "state")
    # A plan that ranks would refuse is refused before they are started.
    if given["plan"] is not None:
        check_trusted(Plan.load(given["plan"]), given["trust_traced"])
    if given["gpu"] is not None:
        # Without a number it needs the device of each rank.
        check = check_gpu_text if ":" in given["gpu"] else check_back_end
        check(given["gpu"])
    if given["slowdown"] is not None:
        AutopilotSettings(slowdown=given["slowdown"])
    if given["work"] is not None:
        check_work(plan=given["plan"], learn=given["learn"] is not False, state=given["state"])
    # PLANNER_SERVICE alone is there for other commands, so it matters whether the option was given.
    source = click.get_current_context().get_parameter_source("service")
    _check_service(given, is_named=source is ParameterSource.COMMANDLINE)
    # Such an interpreter never loads the planner, and would train without a word of it.
    ignoring = _flag_that_ignores(command)
    if ignoring is not None:
        click.echo(
            f"planner: {command[0]} {ignoring} ignores PYTHONPATH, so its training has no planner",
            err=True,
        )
    # Ranks may run in other folders, so paths are made whole.
    options = {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not False or said_options()[name].has_opposite  # off is what it is without
    }
    # Options travel in the environment, as the script has none of them.
    variables = write_options(options)
    modules = _modules(os.environ.get("PYTHONPATH"))
    try:
        # The command takes this process over, so its exit code and signals are its own.
        os.execvpe(command[0], command, {**os.environ, **variables, "PYTHONPATH": modules})
    except (OSError, ValueError) as error:  # if it is empty
        raise console.cannot_run(command, error) from error


def _modules(given: str | None) -> str:
    """Return PYTHONPATH with the folder of our `sitecustomize` first."""
    from perseus_planner.runtime import unmodified

    startup = str(Path(unmodified.__file__).absolute().with_name("startup"))
    # A job started from a job has it already.
    others = (
        [] if given is None else [folder for folder in given.split(os.pathsep) if folder != startup]
    )
    return os.pathsep.join([startup, *others])


def _flag_that_ignores(command: Sequence[str]) -> str | None:
    """Return the option of a Python interpreter by which it does not load `sitecustomize`; None
    if there is none.
    """
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        # Options come before the script: `-c` and `-m` end them, as does any other word.
        for word in command[1:]:
            if not re.fullmatch(r"-[a-zA-Z]+", word) or word[1] in "cm":
                break
            # -I and -E ignore PYTHONPATH, and -S leaves `sitecustomize` out.
            if set(word) & set("IES"):
                return word
    return None
