"""Every error that the planner raises on purpose, as one tree.

    PlannerError                 a user can act on every one of these; the command line exits with 2
    ├── ProfileError             a profile (file or values) that cannot be planned on
    ├── ScheduleError            a pipeline schedule that is not one, or does not fit the profile
    ├── JobError                 a job file that cannot be read, or a job that is not one
    ├── FrontierError            a frontier file that cannot be read
    ├── PlanError                a plan file that cannot be read
    ├── RunError                 a folder that is not what a training run wrote, or not all of it
    ├── InfeasibleError          a request that no choice of clocks can meet
    │   ├── InfeasibleDeadline   .deadline_s, .least_time_s
    │   │   └── InfeasibleBudget .max_changes, .min_dwell_s
    │   └── InfeasiblePower      .power_w, .least_power_w
    ├── GpuError                 a GPU, real or simulated, that cannot do what was asked
    │   ├── GpuNotSupported      it has no such function: the GPU, its driver, or the back-end
    │   ├── GpuNotPermitted      this process may not
    │   ├── GpuLost              it has fallen off the bus, or its daemon is gone
    │   ├── GpuInUse             another process has leased it
    │   └── ControllerLost       the process that sets the clocks of this node's GPUs has ended
    ├── RankError                a rank of a job cannot go on because of another one
    │   └── EndedElsewhere       that one has said why already
    ├── ServiceError             the planner's service does not do what was asked
    │   ├── ServiceAway          it cannot be reached, or what answers there is not the service
    │   └── ServiceRefusal       .status, .code: it answers why it does not
    └── UsageError               a value on the command line or in a call that cannot be used

The text of each says what was read (file, line, field), what is wrong with it, and what to do.
"""

from __future__ import annotations

import math
import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """Return `repr(value)` as error texts quote it: shortened if it is long."""
    return _SHORT.repr(value)


class PlannerError(Exception):
    """Base of all errors that a user can act on."""


class ProfileError(PlannerError):
    """A profile cannot be planned on."""


class ScheduleError(PlannerError):
    """A pipeline schedule is malformed or does not fit the profile."""


class JobError(PlannerError):
    """A job file cannot be read, or what it says together with the command line is no job."""


class FrontierError(PlannerError):
    """A frontier file cannot be read."""


class PlanError(PlannerError):
    """A plan file cannot be read."""


class RunError(PlannerError):
    """A folder is not what a training run wrote, or not all of it."""


class InfeasibleError(PlannerError):
    """No choice of clocks can meet the request."""


class InfeasibleDeadline(InfeasibleError):
    """The deadline is below the least feasible iteration time.

    Attributes:
        deadline_s: the iteration time asked for, seconds.
        least_time_s: the least iteration time that any choice of clocks reaches, seconds.
    """

    def __init__(self, deadline_s: float, least_time_s: float) -> None:
        super().__init__(
            f"no plan finishes an iteration within {deadline_s:.6g} s: the fastest takes "
            f"{_rounded_up(least_time_s)} s; ask for that or more"
        )
        self.deadline_s = deadline_s
        self.least_time_s = least_time_s


class InfeasibleBudget(InfeasibleDeadline):
    """No plan was found that meets the deadline with so few clock changes.

    Attributes:
        deadline_s: the iteration time asked for, seconds.
        least_time_s: the least iteration time that a plan within the budget was found to take, seconds; infinite where
            none was found.
        max_changes: how often each GPU may change its clock in an iteration; None: any number of times.
        min_dwell_s: for how long a clock must be held, seconds.
    """

    def __init__(
        self, deadline_s: float, max_changes: int | None, min_dwell_s: float, least_time_s: float | None
    ) -> None:
        budget = "any number of clock changes"
        if max_changes is not None:
            budget = f"at most {max_changes} clock change{'s' if max_changes != 1 else ''} per GPU"
        if min_dwell_s > 0.0:
            budget += f", each clock held for {min_dwell_s:.6g} s"
        wanted = f"no plan found finishes an iteration within {deadline_s:.6g} s with {budget}"
        if least_time_s is None:
            found = "some GPU has no clock at which all that it runs was measured; allow more changes"
        else:
            found = f"the fastest found takes {_rounded_up(least_time_s)} s; ask for that, or allow more changes"
        PlannerError.__init__(self, f"{wanted}: {found}")
        self.deadline_s = deadline_s
        self.least_time_s = math.inf if least_time_s is None else least_time_s
        self.max_changes = max_changes
        self.min_dwell_s = min_dwell_s


class InfeasiblePower(InfeasibleError):
    """The power budget is below the least average power of any plan.

    Attributes:
        power_w: the average power asked for, watts over all GPUs of the pipeline.
        least_power_w: the least average power that a plan reaches, watts.
    """

    def __init__(self, power_w: float, least_power_w: float) -> None:
        super().__init__(
            f"no plan draws {power_w:.6g} W or less on average: the most frugal draws {_rounded_up(least_power_w)} W; "
            "ask for that or more"
        )
        self.power_w = power_w
        self.least_power_w = least_power_w


class GpuError(PlannerError):
    """A GPU, real or simulated, cannot do what was asked."""


class GpuNotSupported(GpuError):
    """The GPU, its driver or the back-end has no such function."""


class GpuNotPermitted(GpuError):
    """This process may not do that."""


class GpuLost(GpuError):
    """The GPU has fallen off the bus, or what reaches it is gone."""


class GpuInUse(GpuError):
    """Another living process has leased this GPU."""


class ControllerLost(GpuError):
    """The process that sets the clocks of this node's GPUs has ended, or cannot be reached."""


class RankError(PlannerError):
    """A rank of a job cannot go on because of another one."""


class EndedElsewhere(RankError):
    """Another rank has ended, and has said why; nothing needs to be said here."""


class ServiceError(PlannerError):
    """The planner's service does not do what was asked."""


class ServiceAway(ServiceError):
    """The service cannot be reached, or what answers there is not the service; it may be later."""


class ServiceRefusal(ServiceError):
    """The service answers that it does not do this.

    Attributes:
        status: of HTTP: 404 where there is no such job or report, 409 where it contradicts what is, 401 and 403 where
            the token does not allow it.
        code: the service's word for the reason.
        least: of what is infeasible, the least that is not: watts of a power budget, seconds of a deadline; None: it
            says none.
    """

    def __init__(self, text: str, status: int, code: str, least: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.least = least


class UsageError(PlannerError):
    """A value in a call or on the command line cannot be used."""


def one_line(text: str, longest: int = 300) -> str:
    """Return the end of a text from outside, such as a command's output, on one printable line for an error message."""
    words = "".join(character if character.isprintable() else " " for character in text).split()
    line = " ".join(words)
    return line if len(line) <= longest else f"…{line[1 - longest :]}"


def _rounded_up(value: float) -> str:
    """`value` with as few digits as do not make it less, so that who asks for what was printed gets it."""
    return next(text for digits in range(6, 18) if float(text := f"{value:.{digits}g}") >= value)
