"""What all commands share: options, errors as exit codes, results as text or JSON, and progress
bars.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perseus_planner.base.errors import EndedElsewhere, PlannerError, UsageError, did_you_mean
from perseus_planner.base.prefixes import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)

_LINE_S = 20.0  #: between lines of progress, in a log


def printable(text: str) -> str:
    """Return the text with control and bidirectional characters but line feeds escaped, as
    terminals obey them.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Refusal(click.ClickException):
    """A `PlannerError`, printed as one line on stderr."""

    exit_code = 2


def cannot_run(command: Sequence[str], error: OSError | ValueError) -> UsageError:
    """Return the refusal of a command that cannot be started."""
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{command[0]}: cannot be run: {reason}; write the command after `--`")


def start(command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start a command; refuse one that cannot be started."""
    try:
        return subprocess.Popen(command, stdout=stdout)
    except OSError as error:
        raise cannot_run(command, error) from error


@contextmanager
def signals(numbers: Iterable[int], handler: Callable[[int], object]) -> Iterator[None]:
    """Have the handler get these signals inside the block."""
    before = {number: signal.signal(number, lambda got, _: handler(got)) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Commands(click.Group):
    """Commands in sections; turns exceptions into exit codes."""

    sections: dict[str, list[str]]  #: Heading -> the names of the commands under it, in order
    for_a_file: click.Command  #: The command that runs if a job file is named instead of a command
    problems: tuple[str, ...] = ()  #: Why the commands are not complete

    def add_section(self, heading: str, *commands: click.Command) -> None:
        """Add commands under a heading of the help."""
        self.sections = {
            **getattr(self, "sections", {}),
            heading: [str(command.name) for command in commands],
        }
        for command in commands:
            self.add_command(command)

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, with whole summaries."""
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(1000)) for name in names]
                )

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named first, or that of job files if it is one, with the
        rest.
        """
        name = args[0]
        if name == "help":
            click.echo(context.get_help())
            context.exit()
        # A job file in place of a command profiles, solves and plans in one go.
        if name not in self.commands and Path(name).suffix.lower() in (".yaml", ".yml"):
            return name, self.for_a_file, args
        if name not in self.commands:
            # A name that is nearly a command, or is a file, gets a hint, as either is a usual
            # mistake.
            near = did_you_mean(name, self.commands)
            if near or Path(name).exists():
                hint = near or f"to look at a file of the planner, write `planner show {name}`"
                context.fail(f"No such command {name!r}; {hint}")
        return super().resolve_command(context, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; say so if what it prints cannot be written, as on a full disk."""
        for problem in self.problems:
            click.echo(f"planner: {printable(problem)}", err=True)
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if not _is_of_output(error):
                raise
            with suppress(OSError):  # stderr may be full, too
                click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(2)

    def invoke(self, context: click.Context) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(context)
        except EndedElsewhere:
            context.exit(2)
        except PlannerError as error:
            raise Refusal(printable(str(error))) from error
        except KeyboardInterrupt:
            context.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if _is_of_output(error):
                raise
            traceback.print_exc()
            hint = (
                "this is a bug in the planner, not an error in your input; please report it "
                "with the lines above"
            )
            raise click.ClickException(hint) from error


def _is_of_output(error: Exception) -> bool:
    """Tell whether an error comes from printing."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) and frames[-1].name == "echo"


def is_json() -> bool:
    """Tell whether the option --json of the command is given."""
    return bool(click.get_current_context().params["as_json"])


def report(
    summary: DataclassInstance | Mapping[str, Any],
    text: str,
    files: Sequence[Path],
    *,
    counts: Sequence[int] = (),
) -> None:
    """Print the result of a command: as text, or as one JSON object if its option --json is given.

    Args:
        summary: the result, for JSON.
        text: the result, for people.
        files: the files that were written.
        counts: for how many pipelines each file is, if the files are for pipelines.
    """
    if is_json():
        # Loaded only where JSON is asked for, so that other commands start at once.
        import json
        from dataclasses import asdict

        of_pipelines = {"counts": list(counts)} if counts else {}
        values = summary if isinstance(summary, Mapping) else asdict(summary)
        content = {**values, "files": [str(file) for file in files], **of_pipelines}
        click.echo(json.dumps(content, indent=2, allow_nan=False, default=asdict))
        return
    click.echo(text)
    # Paths are shown so that they can be printed, whatever bytes they have.
    for number, file in enumerate(files):
        ending = ""
        if sum(counts) > 1:
            ending = f", for {counted(counts[number], 'pipeline')}"
        click.echo(f"Wrote {click.format_filename(file)}{ending}")


def each(what: str, items: Collection[T]) -> Iterator[T]:
    """Yield the items, and show how many are done, as `progress` does."""
    with progress(what) as update:
        for done, item in enumerate(items, 1):
            yield item
            if update is not None:
                update(done, len(items))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr while the block runs, or a line now and then if stderr is no
    terminal; yield the function to call with (done, total).

    Yields None if another rank of the job shows it.
    """
    # All ranks of torchrun share one terminal, so one of them shows the progress.
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    # A log keeps every line, so there is one now and then instead of a bar.
    if not sys.stderr.isatty():
        # Told now and then, also for the first time: short work needs no line at all.
        begin_s = time.monotonic()
        told_s = begin_s
        ended = threading.Event()

        def line(done: int, total: int) -> None:
            nonlocal told_s
            if time.monotonic() >= told_s + _LINE_S:
                told_s = time.monotonic()
                click.echo(f"{what}: {done} of {total}", err=True)

        def wait() -> None:
            # Some work, such as a plan, cannot say how far it is: then how long it has run.
            nonlocal told_s
            while not ended.wait(_LINE_S):
                if time.monotonic() >= told_s + _LINE_S:
                    told_s = time.monotonic()
                    click.echo(f"{what}: for {told_s - begin_s:.0f} s so far", err=True)

        teller = threading.Thread(target=wait, daemon=True)
        # A wait without an end is none, and nothing has to be told then.
        if _LINE_S < threading.TIMEOUT_MAX:
            teller.start()
        try:
            yield line
        finally:
            ended.set()
            if teller.ident is not None:
                teller.join()
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
