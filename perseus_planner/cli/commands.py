"""The `planner` command.

Each command imports what it needs when it runs, so that `planner --help` answers at once.
Exit codes: 0 done, 1 a bug in the planner, 2 something that the user can correct, 130 interrupted.
"""

from __future__ import annotations

import os

import click

from perseus_planner.base import __version__, extensions
from perseus_planner.cli import console
from perseus_planner.cli.machine import doctor, reset
from perseus_planner.cli.measure import measure
from perseus_planner.cli.options import examples
from perseus_planner.cli.planning import plan, run_job, solve
from perseus_planner.cli.profiling import calibrate, profile
from perseus_planner.cli.run import run
from perseus_planner.cli.show import report, show


@click.group(
    cls=console.Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml",
        "planner solve profile.yaml --schedule 1f1b --microbatches 16 -o frontier.npz",
        "planner plan frontier.npz --slowdown 1.00 -o plan.yaml",
        "planner show plan.yaml",
    ),
)
@click.version_option(__version__, message="planner %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan one GPU clock per computation of pipeline-parallel training: the same speed, the least
    energy.

    Profile the stages, solve for the frontier of time and energy, and choose a plan on it;
    `planner job.yaml` does all three for a job file. Run a command with --help to see its options.
    """
    if context.invoked_subcommand not in ("run", "measure"):  # these start other programs
        # Matrices are small here, and threads wait for each other.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if context.invoked_subcommand not in ("doctor", "reset"):  # these report such GPUs themselves
        _recover_gpus()


_CORE = {
    "Measure": (doctor, profile, measure),
    "Plan": (solve, plan, show, report, calibrate),
    "Train": (run, reset),
}


def _add_commands() -> None:
    """Add the commands of the core, and those of extensions behind them or under headings of their
    own.
    """
    of_core = {str(command.name) for commands in _CORE.values() for command in commands}
    added, main.problems = extensions.commands(of_core)
    # Headings of the core come first, in their order.
    for heading in dict.fromkeys((*_CORE, *added)):
        main.add_section(heading, *_CORE.get(heading, ()), *added.get(heading, {}).values())


_add_commands()
main.for_a_file = run_job


def _recover_gpus() -> None:
    """Reset GPUs that killed processes have left set on this node, and print them on stderr."""
    from perseus_planner.gpu.lease.records import has_records

    # Importing leases takes milliseconds, which most commands do without.
    if not has_records():
        return
    from perseus_planner.base.errors import GpuError
    from perseus_planner.gpu.lease.lease import recover

    try:
        for recovery in recover():
            record = recovery.record
            problem = recovery.problem
            done = "is reset" if problem is None else f"cannot be reset: {problem}"
            click.echo(
                f"planner: GPU {record.gpu} ({record.name}), left set by {record.owner}, {done}",
                err=True,
            )
    # What cannot be recovered now is told, and must not keep a command from its work.
    except GpuError as error:
        click.echo(f"planner: {error}", err=True)
