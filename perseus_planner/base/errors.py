"""Every error that the planner raises on purpose, as one tree.

    PlannerError                 you can correct every one of these; the command line exits with 2
    ├── ProfileError             a profile, in a file or in Python, that cannot be used
    ├── ScheduleError            a schedule that is malformed or does not fit the profile
    ├── JobError                 a job file that cannot be read, or a job that is inconsistent
    ├── FrontierError            a frontier file that cannot be read
    ├── PlanError                a plan file that cannot be read
    ├── RunError                 a folder that a training run did not write, or not completely
    ├── InfeasibleError          a request that no choice of clocks can meet
    │   ├── InfeasibleDeadline   .deadline_s, .least_time_s
    │   │   └── InfeasibleBudget .max_changes
    │   ├── InfeasiblePower      .power_w, .least_power_w
    │   └── InfeasibleGpus       .gpus, .least_gpus
    ├── GpuError                 a GPU, real or simulated, that cannot carry out a request
    │   ├── GpuNotSupported      the GPU, its driver or the back-end lacks the function
    │   ├── GpuNotPermitted      this process lacks the permission
    │   ├── GpuLost              the GPU has fallen off the bus, or its daemon has ended
    │   ├── GpuInUse             another process has leased it
    │   └── ControllerLost       the process that sets the clocks of this node's GPUs has ended
    ├── RankError                a rank of a job cannot continue because of another rank
    │   └── EndedElsewhere       the other rank has reported the reason
    ├── ServiceError             the planner's service does not carry out a request
    │   ├── ServiceAway          the service cannot be reached, or another program answers at its
    │   │                        address
    │   └── ServiceRefusal       .status, .code: the service refuses, with the reason
    └── UsageError               a value on the command line or in a call that cannot be used
        └── EngineChanged        an engine lacks a name that its adapter here uses

Each text states what was read (file, line, field), what is wrong with it, and what to do.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from perseus_planner.base.prefixes import si, si_unit

ISSUES = "https://github.com/perseus-planner/perseus-planner/issues"
"""Where faults are reported; as in pyproject.toml."""

QUOTED = 200
"""The most characters of a file, or of another program, that an error text quotes."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """Return `repr(value)` as error texts quote it: at most `QUOTED` characters, without control
    characters.
    """
    return printable(_SHORT.repr(value))


def printable(text: str, most: int = QUOTED) -> str:
    """Return the beginning of a text from outside as error texts quote it: at most `most`
    characters on one line, without control characters.
    """
    # Cut first: a text from outside may be a whole file.
    words = "".join(
        character if character.isprintable() else " " for character in text[: 4 * most]
    ).split(" ")
    line = " ".join(filter(None, words))
    # A text may get shorter than `most` only by what was cut off it.
    is_whole = len(line) <= most and len(text) <= 4 * most
    return line if is_whole else f"{line[: most - 1]}…"


def did_you_mean(text: str, known: Iterable[str], write: Callable[[str], str] = str) -> str | None:
    """Return the question for the known names that `text` may stand for, such as "did you mean
    1f1b?"; None for none.

    A name may differ by case, begin with the text or contain it, or be spelled nearly like it;
    `write` quotes it.
    """
    names = list(known)
    lower = text.lower()
    if not lower:
        return None
    # From the surest reading to the loosest; a looser one is only asked if a surer one finds
    # nothing. People often leave out what stands behind a hyphen: "a100" for "a100-sxm".
    near = (
        [name for name in names if name.lower() == lower]
        or [name for name in names if name.lower().startswith(lower)]
        or [name for name in names if lower in name.lower()]
        or [
            name
            for name in names
            if difflib.get_close_matches(lower, [name.lower().partition("-")[0]], 1, 0.8)
        ]
        or [
            name
            for name in names
            if name.lower() in difflib.get_close_matches(lower, map(str.lower, names), 1, 0.65)
        ]
    )
    # More than three are a list, which does not ask a question.
    return f"did you mean {' or '.join(map(write, near[:3]))}?" if near else None


_ROOT = Path(__file__).resolve().parents[2]
"""Where the package stands: a clone, or a folder of installed packages."""

REINSTALL_NVML = "run `pip install --force-reinstall nvidia-ml-py`"
"""What puts the module of nvidia-ml-py back where another package has replaced it."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this package. In a clone it installs the clone;
    elsewhere what is installed stays, as pip only adds what the extra needs.
    """
    # A clone is installed from its folder: the index may have another version.
    if not (_ROOT / "pyproject.toml").is_file():
        return f"run `pip install 'perseus-planner[{extra}]'`"
    return f"run `pip install '.[{extra}]'` in your clone of perseus-planner"


def fault_text(error: BaseException) -> str:
    """Return what is said of an exception that the planner did not raise on purpose: the last line
    of its traceback, where it was raised, and where to report it.
    """
    # The last frame is where it was raised; its folder and file are enough to find it.
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames:
        file = "/".join(Path(frames[-1].filename).parts[-2:])
        where = f" ({file}, line {frames[-1].lineno})"
    return f"a fault of the planner, please report it at {ISSUES}: {printable(last)}{where}"


class PlannerError(Exception):
    """Base of all errors that you can correct."""


class ProfileError(PlannerError):
    """A profile cannot be used."""


class ScheduleError(PlannerError):
    """A pipeline schedule is malformed or does not fit the profile."""


class JobError(PlannerError):
    """A job file cannot be read, or does not describe a job together with the command line."""


class FrontierError(PlannerError):
    """A frontier file cannot be read."""


class PlanError(PlannerError):
    """A plan file cannot be read."""


class RunError(PlannerError):
    """A folder was not written by a training run, or not completely."""


class InfeasibleError(PlannerError):
    """No choice of clocks can meet the request."""


class InfeasibleDeadline(InfeasibleError):
    """The deadline is below the least feasible iteration time.

    Attributes:
        deadline_s: the requested iteration time, seconds.
        least_time_s: the least iteration time that any choice of clocks reaches, seconds.
    """

    def __init__(self, deadline_s: float, least_time_s: float) -> None:
        super().__init__(
            f"no plan finishes an iteration within {_si(deadline_s, 's')}: the fastest takes "
            f"{_si(least_time_s, 's', up=True)}; ask for that or more"
        )
        self.deadline_s = deadline_s
        self.least_time_s = least_time_s


class InfeasibleBudget(InfeasibleDeadline):
    """No plan was found that meets the deadline with so few clock changes.

    Attributes:
        deadline_s: the requested iteration time, seconds.
        least_time_s: the least iteration time of the plans found within the budget, seconds;
            infinite if there are none.
        max_changes: how often each GPU may change its clock in an iteration.
    """

    def __init__(self, deadline_s: float, max_changes: int, least_time_s: float | None) -> None:
        budget = f"at most {max_changes} clock change{'s' if max_changes != 1 else ''} per GPU"
        wanted = f"no plan found finishes an iteration within {_si(deadline_s, 's')} with {budget}"
        if least_time_s is None:
            reason = (
                "some GPU has no clock at which all that it runs was measured; allow more changes"
            )
        else:
            reason = (
                f"the fastest found takes {_si(least_time_s, 's', up=True)}; ask for that, or "
                "allow more changes"
            )
        # Not by the class between: its text is about the least time of any plan.
        PlannerError.__init__(self, f"{wanted}: {reason}")
        self.deadline_s = deadline_s
        self.least_time_s = math.inf if least_time_s is None else least_time_s
        self.max_changes = max_changes


class InfeasiblePower(InfeasibleError):
    """The power budget is below the least average power of any plan.

    Attributes:
        power_w: the requested average power, watts over all GPUs of the pipeline.
        least_power_w: the least average power that a plan reaches, watts.
    """

    def __init__(self, power_w: float, least_power_w: float) -> None:
        super().__init__(
            f"no plan draws {_si(power_w, 'W')} or less on average: the most frugal draws "
            f"{_si(least_power_w, 'W', up=True)}; ask for that or more"
        )
        self.power_w = power_w
        self.least_power_w = least_power_w


class InfeasibleGpus(InfeasibleError):
    """No pools of servers on so few GPUs carry the load within the latency objectives.

    Attributes:
        gpus: the number of GPUs.
        least_gpus: the least number that carries the load.
        is_proved: whether it is sure that no fewer do; the solver's time has a limit.
    """

    def __init__(self, gpus: int, least_gpus: int, is_proved: bool = True) -> None:
        unsure = "" if is_proved else ", and perhaps fewer: the solver's time was over"
        super().__init__(
            f"no pools on {gpus} GPUs carry this load within the latency objectives: {least_gpus} "
            f"GPUs would{unsure}; give that many or more"
        )
        self.is_proved = is_proved
        self.gpus = gpus
        self.least_gpus = least_gpus


class GpuError(PlannerError):
    """A GPU, real or simulated, cannot carry out a request."""


class GpuNotSupported(GpuError):
    """The GPU, its driver or the back-end lacks the function."""


class GpuNotPermitted(GpuError):
    """This process lacks the permission."""


class GpuLost(GpuError):
    """The GPU has fallen off the bus, or its daemon has ended."""


class GpuInUse(GpuError):
    """Another living process has leased this GPU."""


class ControllerLost(GpuError):
    """The process that sets the clocks of this node's GPUs has ended, or cannot be reached."""


class RankError(PlannerError):
    """A rank of a job cannot continue because of another rank."""


class EndedElsewhere(RankError):
    """Another rank has ended and reported the reason, so this rank prints nothing."""


class ServiceError(PlannerError):
    """The planner's service does not carry out a request."""


class ServiceAway(ServiceError):
    """The service cannot be reached, or another program answers at its address; a later try may
    succeed.
    """


class ServiceRefusal(ServiceError):
    """The service refuses a request.

    Attributes:
        status: the HTTP status: 404 if the job or report does not exist, 409 for a conflict, 401
            and 403 if the token does not allow it.
        code: the service's name for the reason.
        least: the least feasible value of an infeasible request, watts of a power budget or seconds
            of a deadline; None for other reasons.
    """

    def __init__(self, text: str, status: int, code: str, least: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.least = least


class UsageError(PlannerError):
    """A value in a call or on the command line cannot be used."""


class EngineChanged(UsageError):
    """An engine lacks a name that its adapter here uses, as another release may."""


def one_line(text: str, longest: int = 300) -> str:
    """Return the end of a text from outside, such as a command's output, on one printable line
    for an error message.
    """
    printable_text = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable_text.split())
    # The end and not the beginning: programs say last why they failed.
    return line if len(line) <= longest else f"…{line[1 - longest :]}"


def _si(value: float, unit: str, *, up: bool = False) -> str:
    """Write a time or a power with few digits; if `up`, rounded up, so that a request for that
    value is feasible.
    """
    factor, _ = si_unit(value, unit)
    shown_value = value
    while True:
        text = si(shown_value, unit, 6)
        number = float(text.split()[0])
        # A small unit is divided by its inverse, which is a whole number: times 1e-3 would round
        # again.
        is_enough = (number * factor if factor >= 1 else number / round(1 / factor)) >= value
        if is_enough or not up or not value > 0:
            return text
        shown_value *= 1 + 5e-7  # at most half of the last of six digits, so that none is skipped
