"""A GPU that NVML reads and that external commands set, such as `sudo nvidia-smi`.

Three environment variables of this process hold the commands. Their defaults are

PLANNER_SET_CLOCK      sudo -n nvidia-smi -i {uuid} -lgc {min},{max}
PLANNER_RESET_CLOCK    sudo -n nvidia-smi -i {uuid} -rgc
PLANNER_SET_POWER      sudo -n nvidia-smi -i {uuid} -pl {watts}

Each may also contain {gpu}, the NVML index. Commands run without a shell; their exit status is read
as nvidia-smi's. A setting that the GPU does not support makes nvidia-smi print a warning and exit
with 0; that text is an error as well.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING

from perseus_planner.base.errors import (
    GpuError,
    GpuLost,
    GpuNotPermitted,
    GpuNotSupported,
    one_line,
)
from perseus_planner.gpu.nvml.gpu import NvmlReader, open_device
from perseus_planner.gpu.protocol import check_clock

if TYPE_CHECKING:
    from perseus_planner.gpu.nvml.device import NvmlDevice

TIMEOUT_S = 10.0
"""How long a command may run."""

_ERRORS: dict[int, type[GpuError]] = {
    3: GpuNotSupported,
    4: GpuNotPermitted,
    13: GpuNotSupported,
    15: GpuLost,
}
"""Kind of error by exit status of nvidia-smi, which are the return codes of NVML (see its manual
page).
"""

_ADVICE = {
    GpuNotPermitted: "allow this user to run it without a password (NOPASSWD in sudoers), or run "
    "as root",
    GpuNotSupported: "use the other control (SM clock or power limit), or observe mode",
    GpuLost: "reset the GPU, or reboot the node",
}

_WARNED_ONLY = "Treating as warning and moving on"
"""What nvidia-smi prints about a setting that is not supported, before it exits with status 0."""

_SUDO_REFUSED = re.compile(r"password is required|read the password|sudoers|not allowed to execute")


class CommandGpu(NvmlReader):
    """A GPU that commands set.

    Args:
        device: The GPU.

    Raises:
        GpuError: If a command is malformed.
    """

    def __init__(self, device: NvmlDevice) -> None:
        super().__init__(device, f"command:{device.uuid}")
        nvidia_smi = "sudo -n nvidia-smi -i {uuid}"
        self._set_clock = read_template(
            "PLANNER_SET_CLOCK", f"{nvidia_smi} -lgc {{min}},{{max}}", "min", "max"
        )
        self._reset_clock = read_template("PLANNER_RESET_CLOCK", f"{nvidia_smi} -rgc")
        self._set_power = read_template("PLANNER_SET_POWER", f"{nvidia_smi} -pl {{watts}}", "watts")
        # Read once: commands may name the GPU by its index or by its UUID.
        self._fields = {
            "gpu": str(device.call("nvmlDeviceGetIndex", what="read its index")),
            "uuid": self.uuid,
        }

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock."""
        check_clock(self, clock_mhz)
        self._set_clock.run(**self._fields, min=str(clock_mhz), max=str(clock_mhz))

    def reset_clocks(self) -> None:
        """Unlock the SM clock."""
        self._reset_clock.run(**self._fields)

    def _limit_power(self, limit_w: float) -> None:
        self._set_power.run(**self._fields, watts=f"{limit_w:.7g}")


def open_command(which: str) -> CommandGpu:
    """Open the GPU that NVML finds by `which`, such as an index or UUID, with the commands of the
    environment.

    Raises:
        GpuError: If a command is malformed, or NVML cannot open the GPU.
    """
    return open_device(which, CommandGpu)


@dataclass(frozen=True)
class CommandTemplate:
    """A command with fields."""

    variable: str  #: Environment variable that sets it, for error messages
    words: tuple[str, ...]  #: Program and arguments, with fields written as {field}

    def run(self, **values: str) -> None:
        """Run the command with `values` in place of its fields, and wait for it.

        Raises:
            GpuError: If the command cannot be run, does not end within `TIMEOUT_S` seconds, or
                fails: `GpuNotPermitted` for status 4 or if sudo refuses, `GpuNotSupported` for 3
                and 13 and if nvidia-smi only warns, `GpuLost` for 15. The text quotes the end of
                its output.
        """
        words = [word.format(**values) for word in self.words]
        # Not a pipe: a child of the command could keep that open for ever.
        with tempfile.TemporaryFile() as output:
            status = self._wait_for(words, output.fileno())
            output.seek(0)
            printed = output.read().decode(errors="replace")
        # nvidia-smi exits with 0 after settings that the GPU does not have.
        if status != 0 or _WARNED_ONLY in printed:
            raise self._failure(words, status, printed)

    def _wait_for(self, words: list[str], output: int) -> int:
        """Run the command with its output in the file descriptor `output`; return its exit
        status.
        """
        english = {**os.environ, "LC_ALL": "C"}  # for _SUDO_REFUSED
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=english
            )
        except OSError as error:
            raise GpuError(
                f"{words[0]!r} cannot be run ({error.strerror}); install it, or set "
                f"{self.variable} to another command"
            ) from error
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise GpuError(
                f"`{shlex.join(words)}` did not end within {TIMEOUT_S:g} s, and may or may not "
                f"have taken effect; run it by hand to see why, or set {self.variable} to another "
                "command"
            ) from error
        finally:
            # Processes started by sudo belong to root and cannot be killed, and one that hangs in
            # the driver does not end even then.
            with suppress(PermissionError, subprocess.TimeoutExpired):
                process.kill()
                process.wait(1.0)

    def _failure(self, words: list[str], status: int, printed: str) -> GpuError:
        # sudo's own refusal has status 1, like most other failures.
        kind = GpuNotPermitted if _SUDO_REFUSED.search(printed) else _ERRORS.get(status, GpuError)
        kind = GpuNotSupported if _WARNED_ONLY in printed else kind
        by_hand = f"run it by hand to see why, or set {self.variable} to another command"
        return kind(
            f"`{shlex.join(words)}` failed with status {status} and printed "
            f"{one_line(printed)!r}; {_ADVICE.get(kind, by_hand)}"
        )


def read_template(variable: str, default: str, *fields: str) -> CommandTemplate:
    """Return the command in the environment variable `variable`, or `default` if it is not set.

    Args:
        variable: Name of the variable.
        default: Command to use if it is not set.
        fields: Fields that the command may contain besides {gpu} and {uuid}; it must contain one of
            them.

    Raises:
        GpuError: If the command is empty, cannot be split into words, or has the wrong fields.
    """
    text = os.environ.get(variable, default)
    try:
        words = tuple(shlex.split(text))
        # A field with a format, such as "{max:d}", is named "max:d", which is not known.
        used_fields = [
            f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            for word in words
            for _, name, form, conversion in Formatter().parse(word)
            if name is not None
        ]
    except ValueError as error:
        raise GpuError(
            f"{variable} is {text!r}, which is not a command: {error}; quote it as for a shell"
        ) from error
    if not words:
        raise GpuError(f"{variable} is empty; unset it to use `{default}`")
    known_fields = ("gpu", "uuid", *fields)
    # An unknown field would fail at every call, in the middle of a training.
    unknown = [field for field in used_fields if field not in known_fields]
    if unknown:
        listed = ", ".join(f"{{{field}}}" for field in known_fields)
        raise GpuError(
            f"{variable} is {text!r} with the unknown field {{{unknown[0]}}}; choose from {listed}"
        )
    # Without the value in it, a command sets the same thing every time.
    if fields and not set(fields) & set(used_fields):
        listed = " or ".join(f"{{{field}}}" for field in fields)
        raise GpuError(
            f"{variable} is {text!r}, which does not contain the value to set; put {listed} into it"
        )
    return CommandTemplate(variable, words)
