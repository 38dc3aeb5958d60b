"""External commands with fields: read from the environment, run without a shell, their end read as nvidia-smi's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from string import Formatter

from perseus_planner.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.foreign_text import one_line

TIMEOUT_S = 10.0
"""For how long a command may run."""

_ERRORS: dict[int, type[GpuError]] = {3: GpuNotSupported, 4: GpuNotPermitted, 13: GpuNotSupported, 15: GpuLost}
"""The exit statuses of nvidia-smi (its manual page: they are NVML's) that say what kind of failure it is."""

_SUDO_REFUSED = re.compile(r"password is required|read the password|sudoers|not allowed to execute")


@dataclass(frozen=True)
class CommandTemplate:
    """A command with fields.

    Attributes:
        variable: the environment variable that sets it, which errors name.
        words: program and arguments, in which fields stand as {field}.
    """

    variable: str
    words: tuple[str, ...]

    def run(self, **values: str) -> None:
        """Run the command with `values` in place of its fields, and wait for its end.

        Raises:
            GpuError: it cannot be run, or has not ended after `TIMEOUT_S` seconds, or ended with a status other than
                0: `GpuNotPermitted` for 4 or where sudo refuses, `GpuNotSupported` for 3 and 13, `GpuLost` for 15. The
                text has the end of what it printed.
        """
        words = [word.format(**values) for word in self.words]
        with tempfile.TemporaryFile() as printed:  # not a pipe: a child of the command may hold that open for ever
            status = self._status(words, printed.fileno())
            printed.seek(0)
            said = one_line(printed.read().decode(errors="replace"))
        if status != 0:
            raise self._failure(words, status, said)

    def _status(self, words: list[str], output: int) -> int:
        """The exit status of the command, whose output goes to the file descriptor `output`."""
        english = {**os.environ, "LC_ALL": "C"}  # because _SUDO_REFUSED is
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=english)
        except OSError as error:
            raise GpuError(
                f"{words[0]!r} cannot be run ({error.strerror}); install it, or set {self.variable} to another command"
            ) from error
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise GpuError(
                f"`{shlex.join(words)}` did not end within {TIMEOUT_S:g} s, and may or may not have done it; run it by "
                f"hand to see why, or set {self.variable} to another command"
            ) from error
        finally:
            _stop(process)

    def _failure(self, words: list[str], status: int, said: str) -> GpuError:
        start = f"`{shlex.join(words)}` failed with status {status} and printed {said!r}; "
        kind = GpuNotPermitted if _SUDO_REFUSED.search(said) else _ERRORS.get(status, GpuError)
        if kind is GpuNotPermitted:
            return kind(f"{start}allow this user to run it without a password (NOPASSWD in sudoers), or run as root")
        if kind is GpuNotSupported:
            return kind(f"{start}use the other control (SM clock or power limit), or observe mode")
        if kind is GpuLost:
            return kind(f"{start}the GPU needs a reset, or the node a reboot")
        return kind(f"{start}run it by hand to see why, or set {self.variable} to another command")


def template(variable: str, default: str, values: tuple[str, ...]) -> CommandTemplate:
    """The command that the environment variable `variable` holds, or `default` where it is not set.

    Args:
        variable: its name.
        default: the command where it is not set.
        values: the fields, beside "gpu" and "uuid", that it may have, and of which it must have one.

    Raises:
        GpuError: it is empty, cannot be split into words, has a field of another name, or none of `values`.
    """
    text = os.environ.get(variable, default)
    try:
        words = tuple(shlex.split(text))
        fields = [field for word in words for field in _fields(word)]
    except ValueError as error:
        raise GpuError(f"{variable} is {text!r}, which is no command: {error}; quote it as for a shell") from error
    if not words:
        raise GpuError(f"{variable} is empty; unset it to have `{default}`")
    known = ("gpu", "uuid", *values)
    unknown = [field for field in fields if field not in known]
    if unknown:
        listed = ", ".join(f"{{{field}}}" for field in known)
        raise GpuError(f"{variable} is {text!r}, and {{{unknown[0]}}} is none of its fields, which are {listed}")
    if values and not set(values) & set(fields):
        listed = " or ".join(f"{{{field}}}" for field in values)
        raise GpuError(f"{variable} is {text!r}, which nowhere says what is to be set; put {listed} into it")
    return CommandTemplate(variable, words)


def _fields(word: str) -> list[str]:
    """What stands in braces in `word`, as it stands there: "{max:d}" is "max:d", which is no field's name."""
    parts = Formatter().parse(word)
    return [
        f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
        for _, name, form, conversion in parts
        if name is not None
    ]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End `process` if it runs; one that sudo started is root's, and cannot be ended by others."""
    with suppress(PermissionError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(1.0)  # one that hangs in the driver does not end even so
