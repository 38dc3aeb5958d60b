"""A GPU that NVML reads and external commands set, such as `sudo nvidia-smi`.

The commands come from the environment of this process alone; the defaults are

PLANNER_SET_CLOCK      sudo -n nvidia-smi -i {uuid} -lgc {min},{max}
PLANNER_RESET_CLOCK    sudo -n nvidia-smi -i {uuid} -rgc
PLANNER_SET_POWER      sudo -n nvidia-smi -i {uuid} -pl {watts}

{gpu}, which may stand in each, is NVML's index. `command_template` says how they are run and how their end is read.
"""

from __future__ import annotations

from perseus_planner.gpu.command_template import CommandTemplate, template
from perseus_planner.gpu.nvml import gpu as nvml
from perseus_planner.gpu.nvml_read import NvmlRead


class CommandGpu(NvmlRead):
    """Reads `gpu`; sets it by commands.

    Args:
        gpu: what is read.
        set_clock: has {min} and {max}, both the clock in MHz.
        reset_clock: undoes it.
        set_power: has {watts}; is also run to go back to the default limit.
    """

    def __init__(
        self,
        gpu: nvml.NvmlGpu,
        set_clock: CommandTemplate,
        reset_clock: CommandTemplate,
        set_power: CommandTemplate,
    ) -> None:
        super().__init__(gpu)
        self._set_clock, self._reset_clock, self._set_power = set_clock, reset_clock, set_power
        self._which = {"gpu": str(self._device.call("nvmlDeviceGetIndex", what="read its index")), "uuid": self.uuid}

    @property
    def text(self) -> str:
        """See `Gpu.text`."""
        return f"command:{self.uuid}"

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`; raises `GpuError` where the command cannot be run or fails."""
        self._reset_clock.run(**self._which)

    def _lock_clock(self, clock_mhz: int) -> None:
        self._set_clock.run(**self._which, min=str(clock_mhz), max=str(clock_mhz))

    def _limit_power(self, limit_w: float) -> None:
        self._set_power.run(**self._which, watts=f"{limit_w:.7g}")


def opened(which: str) -> CommandGpu:
    """The GPU that NVML finds by `which`, such as an index or UUID, to be set by the commands of the environment.

    Raises:
        GpuError: a command is malformed; otherwise as `nvml.opened`.
    """
    commands = (
        template("PLANNER_SET_CLOCK", "sudo -n nvidia-smi -i {uuid} -lgc {min},{max}", ("min", "max")),
        template("PLANNER_RESET_CLOCK", "sudo -n nvidia-smi -i {uuid} -rgc", ()),
        template("PLANNER_SET_POWER", "sudo -n nvidia-smi -i {uuid} -pl {watts}", ("watts",)),
    )
    gpu = nvml.opened(which)
    try:
        return CommandGpu(gpu, *commands)
    except BaseException:
        gpu.close()
        raise
