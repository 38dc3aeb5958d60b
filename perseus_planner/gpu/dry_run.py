"""A GPU that is read as it is while its settings are only recorded: `dry-run:` before the text
of any other GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.protocol import ClosedOnExit, check_clock, check_power_limit

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu

MAX_SETTINGS = 4096
"""How many of the latest settings are kept: a dry run may last for days."""


@dataclass(frozen=True)
class RecordedSetting:
    """A setting that would have been made."""

    now_s: float  #: When, on the GPU's clock, seconds
    control: Literal["clock", "power-limit"]  #: What would have been set
    value: float | None  #: MHz for a clock, watts for a power limit, None for a reset


class DryRunGpu(ClosedOnExit):
    """Records settings of `gpu` without making them, and rejects the values that `gpu` would
    reject.

    Args:
        gpu: The GPU to read; all members that are not defined here are its own.
    """

    keeps_settings = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.text = f"dry-run:{gpu.text}"
        self._settings: deque[RecordedSetting] = deque(maxlen=MAX_SETTINGS)

    def __getattr__(self, name: str) -> Any:
        """Read from the GPU itself."""
        return getattr(self._gpu, name)

    @property
    def settings(self) -> tuple[RecordedSetting, ...]:
        """The last `MAX_SETTINGS` settings, oldest first."""
        return tuple(self._settings)

    def warnings(self) -> tuple[str, ...]:
        """The warnings of the GPU, and that nothing is set."""
        text = (
            "nothing is set in a dry run: the GPU keeps the clock it has; do not plan with this "
            "profile"
        )
        return (*self._gpu.warnings(), text)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Record a clock."""
        check_clock(self._gpu, clock_mhz)
        self._record("clock", clock_mhz)

    def reset_clocks(self) -> None:
        """Record that the clocks are reset."""
        self._record("clock", None)

    def set_power_limit_w(self, limit_w: float) -> None:
        """Record a power limit."""
        check_power_limit(self._gpu, limit_w)
        self._record("power-limit", limit_w)

    def reset_power_limit(self) -> None:
        """Record that the power limit is reset."""
        self._record("power-limit", None)

    def close(self) -> None:
        """Close the GPU that is read."""
        self._gpu.close()

    def _record(self, control: Literal["clock", "power-limit"], value: float | None) -> None:
        self._settings.append(RecordedSetting(self._gpu.now_s(), control, value))


def open_dry_run(which: str) -> Gpu:
    """Open the GPU that `which` names, such as "nvml:0", to be read but not set.

    Raises:
        GpuError: If `which` names no GPU that can be opened.
    """
    return cast(
        "Gpu", DryRunGpu(open_gpu(which))
    )  # it reads through __getattr__, which type checkers do not see
