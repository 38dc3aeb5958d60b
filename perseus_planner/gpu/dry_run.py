"""A GPU whose clocks and power limit are only recorded: `dry-run:` and the text of any other GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perseus_planner.gpu import opened as opened_gpu
from perseus_planner.gpu.read_through import ReadThrough

if TYPE_CHECKING:
    from perseus_planner.gpu.protocol import Gpu

KEPT = 4096
"""How many settings are remembered: a job may be watched for days."""


@dataclass(frozen=True)
class Setting:
    """What would have been set.

    Attributes:
        now_s: when, on the GPU's own clock, seconds.
        what: the control.
        value: MHz of a clock, watts of a power limit; None for a reset.
    """

    now_s: float
    what: Literal["clock", "power-limit"]
    value: float | None


class DryRunGpu(ReadThrough):
    """Reads `gpu` as it is and sets nothing; refuses the values that `gpu` would refuse."""

    keeps_settings = False

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._settings: deque[Setting] = deque(maxlen=KEPT)

    @property
    def text(self) -> str:
        """See `Gpu.text`."""
        return f"dry-run:{self._gpu.text}"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What would have been set, in order; the last `KEPT` of it."""
        return tuple(self._settings)

    def notices(self) -> tuple[str, ...]:
        """See `Gpu.notices`."""
        said = "nothing is set in a dry run: whatever clock is asked for, the GPU runs as it is; do not plan on this"
        return (*self._gpu.notices(), said)

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Record the clock.

        Raises:
            GpuError: the clock is not supported; the text names the nearest that is.
        """
        self._refuse_unsupported_clock(clock_mhz)
        self._record("clock", clock_mhz)

    def reset_clocks(self) -> None:
        """Record that clocks are reset."""
        self._record("clock", None)

    def set_power_limit_w(self, limit_w: float) -> None:
        """Record the power limit.

        Raises:
            GpuError: it is not within `power_limits_w`.
        """
        self._refuse_unsupported_power_limit(limit_w)
        self._record("power-limit", limit_w)

    def reset_power_limit(self) -> None:
        """Record that the power limit is reset."""
        self._record("power-limit", None)

    def _record(self, what: Literal["clock", "power-limit"], value: float | None) -> None:
        self._settings.append(Setting(self.now_s(), what, value))


def opened(which: str) -> DryRunGpu:
    """The GPU that `which`, a text such as "nvml:0", names, to be read and not set.

    Raises:
        GpuError: `which` names no GPU that can be opened.
    """
    return DryRunGpu(opened_gpu(which))
