"""What the planner asks of a GPU: read it, set its clock or its power limit, and undo that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

THROTTLE_REASONS = ("sw-power-cap", "sw-thermal", "hw-thermal", "hw-slowdown", "hw-power-brake", "sync-boost")
"""Why a GPU may run below the clock that was set: NVML's clocks event reasons that hold a busy GPU back."""


class Gpu(Protocol):
    """One physical GPU.

    Readings and settings raise `GpuNotSupported` where this GPU, driver or back-end has none, `GpuNotPermitted`
    where this process may not, `GpuLost` where the GPU has fallen off, and `GpuError` for whatever else; each text says
    what to do. Nothing is guessed: a reading that is not there is never 0.
    """

    @property
    def text(self) -> str:
        """What `open_gpu` opens this very GPU by, from any process on this node, e.g. "nvml:GPU-8f6b…"."""

    @property
    def uuid(self) -> str:
        """What tells this GPU from all others, e.g. "GPU-8f6b…"; the same whichever back-end opened it."""

    @property
    def name(self) -> str:
        """What a profile is labelled with, e.g. "NVIDIA A100-SXM4-80GB" or "simulated a100-sxm"."""

    @property
    def origin(self) -> str:
        """How numbers read from this GPU come to be: "measured" or "simulated"."""

    @property
    def driver(self) -> str:
        """Version of its driver, or of what stands for it."""

    @property
    def keeps_settings(self) -> bool:
        """Whether a clock or power limit that is set here outlives this process, and so must be written down first."""

    def notices(self) -> tuple[str, ...]:
        """What a user must know before trusting a profile of this GPU; one sentence each, with what to do.

        For example that MIG is on, that a workload power profile is active or that power smoothing holds a floor.
        """

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The SM clocks that can be locked, highest first."""

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock; a power limit may still hold the achieved clock below it."""

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`; harmless when nothing is locked."""

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """The least and the greatest power limit that can be set, watts."""

    def power_limit_w(self) -> float:
        """The power limit that is in force, watts."""

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, watts."""

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default; harmless when it is there."""

    def energy_j(self) -> float:
        """Cumulative energy counter, joules; only differences mean anything, and it may move in steps."""

    def power_w(self) -> float:
        """Power now, watts, as this GPU's sensor says it."""

    def clock_mhz(self) -> int:
        """The SM clock that is achieved now, MHz."""

    def temperature_c(self) -> float:
        """Core temperature, degrees Celsius."""

    def throttle_reasons(self) -> frozenset[str]:
        """Which of `THROTTLE_REASONS` hold now."""

    def throttled_s(self) -> Mapping[str, float]:
        """Reason -> seconds for which it has held since the driver was loaded; only differences mean anything.

        Has the reasons that this GPU counts; may be empty.
        """

    def now_s(self) -> float:
        """Seconds on the clock that this GPU's numbers go by; only differences mean anything. Virtual if simulated."""

    def wait(self, duration_s: float) -> None:
        """Let so many seconds of that clock pass with nothing to do."""

    def close(self) -> None:
        """Give back what opening took; sets nothing."""
