"""The commands that ask the service: `planner status` shows its jobs, `planner straggler` reports
that part of a job is slow, and `planner budget` sets deadlines and power budgets.
"""

from __future__ import annotations

import getpass
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from perseus_planner.base.errors import (
    PlannerError,
    ServiceAway,
    UsageError,
    how_to_install,
    shown,
)
from perseus_planner.base.tables import CsvFile, CsvRow, Text
from perseus_planner.base.units import DURATION, POWER_BUDGET, Rule
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    Lag,
    Natural,
    Option,
    Slowdown,
    command,
    option_name,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.service.client import Client
    from perseus_planner.extensions.service.models import Answer, PowerStep, ReportRequest, Scope

_EVENTS = 10  #: that are shown, the latest
_LOOK_S = 1.0  #: between two looks at the jobs, or at a file that may be replaced
_WAIT_S = 5.0  #: for plans, so that the answer can say what they save
_CLEAR = "\033[2J\033[H"  #: clears a terminal

Service = Annotated[
    str | None,
    "Address of the service: http://host:port, https://host:port or unix:/path.  "
    "[default: PLANNER_SERVICE, or this machine]",
    Option(metavar="ADDRESS"),
]


@command("planner status", "planner status gpt3 --watch", "planner status --totals")
def status(
    job: Annotated[str | None, Option(metavar="[JOB]")],
    *,
    watch: Annotated[bool, "Print again whenever something has changed, until interrupted."],
    totals: Annotated[
        bool,
        "Show what every job ran, used and saved, including jobs that have ended, and exit.",
    ],
    service: Service,
) -> None:
    """Show the jobs of the service, or one of them with its reports and what its pipelines do."""
    if totals and (job is not None or watch):
        raise UsageError("--totals: shows all jobs, once; leave out the name of a job, and --watch")
    with _open_client(service) as client:
        # After the client, whose absence says what to install.
        from perseus_planner.extensions.service.headline import together
        from perseus_planner.extensions.service.models import Jobs, Totals
        from perseus_planner.extensions.service.text import jobs_text, status_text, totals_text

        if totals:
            of_jobs = client.totals()
            _print(Totals(of_jobs), totals_text(of_jobs))
            return
        before = None
        # Not into a file or pipe, where the codes would be noise.
        clear = watch and sys.stdout.isatty()
        while True:
            shown: Any = client.jobs() if job is None else client.status(job)
            # Only what has changed is printed, so that a log of --watch is short.
            if shown != before and job is None:
                _print(Jobs(shown, together(shown)), jobs_text(shown), clear=clear)
            elif shown != before and job is not None:
                events = () if console.is_json() else client.history(job).events[-_EVENTS:]
                _print(shown, status_text(shown, events), clear=clear)
            if not watch:
                return
            before = shown
            time.sleep(_LOOK_S)


@dataclass(frozen=True, kw_only=True)
class NewReport:
    """What is slow, how slow it is, and when."""

    pipeline: Annotated[
        Natural | None,
        "Number of a data-parallel pipeline that is slow, from 0.",
    ]
    stage: Annotated[
        Natural | None,
        "Number of a slow stage, from 0; with --pipeline if there are several.",
    ]
    rank: Annotated[Natural | None, "A slow rank of the job."]
    gpu: Annotated[
        str | None, "UUID of a slow GPU, as nvidia-smi -L prints it.", Option(metavar="UUID")
    ]
    node: Annotated[str | None, "Host name of a slow node.", Option(metavar="NAME")]
    slowdown: Annotated[
        Slowdown | None, "Time over normal time, 1 or more; 1 means that it has recovered."
    ]
    score: Annotated[
        float | None,
        "Performance over normal performance, instead of --slowdown.",
        Option(metavar="SHARE"),
    ]
    in_s: Annotated[Lag | None, "Time until the report begins.  [default: now]"]
    ttl_s: Annotated[Lag | None, "How long the report holds.  [default: until it is cleared]"]
    cause: Annotated[
        Literal["compute", "communication", "data", "thermal", "unknown"], "What is slow."
    ] = "unknown"
    source: Annotated[
        str | None,
        "Who reports; a later report of a source replaces its earlier report about the same "
        "scope.  [default: user@host]",
        Option(metavar="NAME"),
    ]
    key: Annotated[
        str | None,
        "Identifies the report, which counts once however often it is sent; once it is cleared or "
        "has expired, the key is refused.",
        Option(metavar="KEY"),
    ]

    def refuse_all(self) -> None:
        """Check that none of these options is given beside --clear."""
        for field in fields(self):
            if getattr(self, field.name) not in (None, field.default):
                raise UsageError(
                    f"{option_name(field.name)}: is for a new report; leave it out beside --clear"
                )

    def request(self) -> ReportRequest:
        """Return the report for the service."""
        from perseus_planner.extensions.service.models import ReportRequest

        values = {name: value for name, value in vars(self).items() if name not in _SCOPES}
        values["source"] = self.source or f"{getpass.getuser()}@{socket.gethostname()}"
        return ReportRequest(scope=self._scope(), **values)

    def _scope(self) -> Scope:
        from perseus_planner.extensions.service.models import Scope

        named = [name for name in _SCOPES[1:] if getattr(self, name) is not None]
        if self.pipeline is not None and not named:
            return Scope("pipeline", str(self.pipeline))
        # A stage exists in each pipeline, so it alone may be named together with one.
        if len(named) != 1 or (self.pipeline is not None and named != ["stage"]):
            raise UsageError(
                "name what is slow in one way: --pipeline, --stage, --rank, --gpu or --node"
            )
        kind: Any = named[0]
        return Scope(kind, str(getattr(self, kind)), self.pipeline)


_SCOPES = ("pipeline", "stage", "rank", "gpu", "node")  #: fields that say what is slow


@command(
    "planner straggler --job gpt3 --pipeline 3 --slowdown 1.2 --in 10s --ttl 30m",
    "planner straggler --job gpt3 --node node07 --score 0.83 --cause compute --source dcgm",
    "planner straggler --job gpt3 --pipeline 3 --slowdown 1",
    "planner straggler --job gpt3 --clear 5f0c",
)
def straggler(
    *,
    job: Annotated[str, "Name of the training job.", Option("--job", "-j", metavar="JOB")],
    report: NewReport,
    clear: Annotated[str | None, "Withdraw the report with this key.", Option(metavar="KEY")],
    service: Service,
) -> None:
    """Report that a part of a training job is slow.

    The other pipelines then run no faster than needed, which saves energy. Write times as 30s, 30m
    or 2h.
    """
    with _open_client(service) as client:
        if clear is not None:
            report.refuse_all()
            answer = client.clear(job, clear)
        else:
            answer = client.report(job, report.request(), wait_s=_WAIT_S)
        _print(answer, _answers_text([answer]))


@dataclass(frozen=True)
class BudgetSchedule:
    """Budgets that change in time."""

    schedule: Annotated[
        Path | None,
        "CSV of power budgets with the columns start and power; or of a signal, start and price "
        "(per kWh) or start and carbon (gCO2/kWh), with --target. Start is such as "
        "2026-11-22T18:00+01:00, or seconds since the epoch.",
    ]
    target: Annotated[
        float | None, "What an hour may cost: money, or kg of CO2.", Option(metavar="NUMBER")
    ]
    watch: Annotated[
        bool, "Keep running, and read the file of --schedule again whenever it is replaced."
    ]


@command(
    "planner budget --job gpt3 --power 40kW",
    "planner budget --power 1200kW",
    "planner budget --job gpt3 --deadline 5.2s",
    "planner budget --job gpt3 --power none",
    "planner budget --schedule budget.csv",
    "planner budget --schedule carbon.csv --target 20 --watch",
)
def budget(
    *,
    job: Annotated[
        str | None,
        "Name of a training job.  [default: all jobs together]",
        Option("--job", "-j", metavar="JOB"),
    ],
    power: Annotated[
        str | None,
        "Upper bound on the average power of all GPUs; none removes it.",
        Option(metavar="POWER"),
    ],
    deadline: Annotated[
        str | None,
        "Iteration time to aim for without stragglers, at most that of least energy; none for that "
        "of all clocks at maximum.",
        Option(metavar="TIME"),
    ],
    schedule: BudgetSchedule,
    service: Service,
) -> None:
    """Set the power or the iteration time of a job, or the power of all jobs together.

    Jobs move along their frontiers to meet a budget with the least slowdown. A budget that cannot
    be met is refused, and the error names the least that can. The service keeps a schedule and
    follows it without you; if a budget of the schedule cannot be met when its time has come, it
    becomes the least that can. Any other budget of the same job, or of all jobs, ends the schedule.
    """
    path = schedule.schedule
    if path is not None:
        if power is not None or deadline is not None:
            raise UsageError("--schedule: has the power; leave out --power and --deadline")
        with _open_client(service) as client:
            send = partial(_send, client, path, schedule.target, job)
            send()
            if schedule.watch:
                _follow(path, send)
        return
    if schedule.target is not None or schedule.watch:
        raise UsageError(
            f"{'--watch' if schedule.watch else '--target'}: is for a schedule; name its file with "
            "--schedule"
        )
    if power is None and deadline is None:
        raise UsageError("give --power, --deadline or both of them; none removes what is set")
    if deadline is not None and job is None:
        raise UsageError("--deadline: is for one job; name it with --job")
    # None is sent for what is removed; what is not named is not sent at all.
    deadline_s = None if deadline in (None, "none") else DURATION.read(str(deadline), "--deadline")
    power_w = None if power in (None, "none") else POWER_BUDGET.read(str(power), "--power")
    with _open_client(service) as client:
        answers = []
        # The deadline first: a power budget is checked against the time that the job aims for.
        if deadline is not None:
            answers.append(client.set_deadline(str(job), deadline_s))
        if power is not None:
            answers += client.set_power(power_w, job)
        _print_answers(answers)


def _send(client: Client, path: Path, target: float | None, job: str | None) -> None:
    """Read a schedule, send it, and print what it does now and next."""
    from perseus_planner.base.prefixes import si
    from perseus_planner.extensions.service.models import split_at

    # What holds now is the budget itself; the service keeps what is to come, and what has passed is
    # of no use to it.
    now, later = split_at(read_budgets(path, target), time.time())
    power_w = None if now is None else now.power_w
    _print_answers(client.set_power(power_w, job, later))
    if console.is_json():
        return
    # The next one alone shows whether moments and units were read as meant.
    for step in later[:1]:
        start = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(step.start_s))
        more = f", and {len(later) - 1} more after that" if len(later) > 1 else ""
        power_text = "no budget" if step.power_w is None else si(step.power_w, "W")
        click.echo(f"Next: {power_text} from {start}{more}.")
    if not later:
        click.echo("The schedule has no later budget.")


def _follow(path: Path, send: Callable[[], None]) -> None:
    """Send the schedule again whenever its file is replaced; what is wrong with it is printed."""
    for _ in replaced(path, lambda: time.sleep(_LOOK_S)):
        while True:
            try:
                send()
            except ServiceAway as error:
                click.echo(f"{error}; it is tried again", err=True)
                time.sleep(_LOOK_S)
                continue
            except PlannerError as error:
                click.echo(f"{error}; the schedule before it holds", err=True)
            break


_SIGNALS = ("power", "price", "carbon")
_HEADER = "write start and one of power, price and carbon"
_PRICE = Rule(float, True, "a price: write money for a kWh, such as 0.12", negative=True)
_CARBON = Rule(float, True, "a carbon intensity: write gCO2 for a kWh, such as 230")


def read_budgets(path: Path, target: float | None = None) -> tuple[PowerStep, ...]:
    """Read the budgets in the file at `path`: power budgets by their moment, or a price or carbon
    intensity from which they follow.

    It is a CSV with the columns `start` and one of `power`, `price` and `carbon`:

    | column | content |
    |---|---|
    | `start` | from when: ISO 8601, such as 2026-11-22T18:00+01:00, in this machine's zone if
    none is given; or seconds since the epoch |
    | `power` | a power budget: watts, or a number with W, kW or MW; none for no budget |
    | `price` | money for a kWh |
    | `carbon` | gCO2 for a kWh |

    With a price or carbon, the power budget is what keeps an hour within a target: money, or kg of
    CO2.

    Args:
        path: The file.
        target: What an hour may cost: money for prices, kg of CO2 for carbon intensities.

    Raises:
        UsageError: If the file cannot be read, a row is wrong, or the target is missing or does not
            apply. The text names file, line, column and remedy.
    """
    from perseus_planner.extensions.service.models import PowerStep

    table = CsvFile(path, UsageError)
    signals = [name for name in _SIGNALS if name in table.header]
    if sorted(table.header) != sorted(["start", *signals]) or len(signals) != 1:
        columns = ", ".join(table.header) or "of no header"
        raise UsageError(f"{table.where}: has the columns {columns}; {_HEADER}")
    signal = signals[0]
    # A power is itself the budget; a price or intensity is one only with what an hour may cost.
    if (target is None) != (signal == "power"):
        needed = (
            "do not give one for powers"
            if signal == "power"
            else f"give what an hour may cost, for {signal}"
        )
        raise UsageError(f"--target: {needed}, as {path} has the column {signal!r}")
    steps: list[PowerStep] = []
    for row in table:
        start_s = row.read("start", _MOMENT)
        # A file that is not sorted has often lost or swapped rows, so it is not sorted here in
        # silence.
        if steps and start_s <= steps[-1].start_s:
            raise UsageError(
                f"{row.place('start')}: {shown(row['start'])} is not after the row before; sort "
                "the rows"
            )
        steps.append(PowerStep(start_s, _power_w(signal, row, target)))
    if not steps:
        raise UsageError(
            f"{path}: has no row; write one for each budget, such as 2026-11-22T18:00,30kW"
        )
    return tuple(steps)


def replaced(path: Path, wait: Callable[[], object]) -> Iterator[None]:
    """Call `wait` again and again, and yield whenever the file at `path` is another one than
    before.
    """
    seen = _identity(path)
    while True:
        wait()
        now = _identity(path)
        if now not in (None, seen):
            seen = now
            yield


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        file_stat = os.stat(path)
    except OSError:  # it is being replaced, or gone for a while
        return None
    return file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size


def _parse_moment(text: str) -> float | None:
    seconds = Rule(float, True, "").parse(text)
    if seconds is not None:
        return float(seconds)
    # Python 3.10 reads no Z for UTC.
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


_MOMENT = Text(
    _parse_moment,
    "a moment: write such as 2026-11-22T18:00+01:00, or seconds since the epoch",
)


def _power_w(signal: str, row: CsvRow, target: float | None) -> float | None:
    if signal == "power":
        text = row[signal]
        return None if text == "none" else POWER_BUDGET.read(text, row.place(signal))
    value = row.read(signal, _PRICE if signal == "price" else _CARBON)
    if value <= 0 or target is None:  # energy that costs nothing needs no budget
        return None
    # In an hour, 1 kW is 1 kWh: money / (money per kWh) is in kW, and kg / (g per kWh) in thousands
    # of them.
    power_w = 1000.0 * target / value * (1000.0 if signal == "carbon" else 1.0)
    return min(power_w, 1e12) if math.isfinite(power_w) else None


def _open_client(address: str | None) -> Client:
    """Return a client of the service at `address`, as for `Client`.

    Raises:
        UsageError: If the address is malformed, or a package of the extra `service` is not
            installed.
    """
    try:
        from perseus_planner.extensions.service.client import Client
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; {how_to_install('service')}") from error
    return Client(address)


def _answers_text(answers: Sequence[Answer]) -> str:
    from perseus_planner.extensions.service.text import answer_text

    return "\n".join(map(answer_text, answers))


def _print_answers(answers: Sequence[Answer]) -> None:
    from perseus_planner.extensions.service.models import Answers

    text = _answers_text(answers) or "No job runs; it applies to those that start."
    _print(Answers(tuple(answers)), text)


def _print(value: Any, text: str, *, clear: bool = False) -> None:
    """Print a value of `models` as text, on a terminal that is cleared before, or as
    JSON.
    """
    if console.is_json():
        from perseus_planner.extensions.service.models import to_json

        text = to_json(value, indent=2).decode()
        clear = False
    click.echo(_CLEAR * clear + console.printable(text))
