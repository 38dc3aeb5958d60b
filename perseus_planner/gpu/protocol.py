"""What a GPU can do: `GpuReader` reads it, and a `Gpu` also sets its clock and power limit."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from perseus_planner.base.errors import GpuError, GpuNotSupported

if TYPE_CHECKING:
    from typing_extensions import Self

THROTTLE_REASONS = (
    "sw-power-cap",
    "sw-thermal",
    "hw-thermal",
    "hw-slowdown",
    "hw-power-brake",
    "sync-boost",
    "board-limit",
    "reliability",
)
"""Why a GPU may run below its locked clock: the NVML clocks event reasons that slow down a busy
GPU. Drivers tell the last two from 615 on.
"""

LOCK_WITHOUT_EFFECT = (
    "so the lock has no effect; see whether Slurm (--gpu-freq), DCGM or a host sets the clock, or "
    "try another back-end (nvml:, zeusd: or command:)"
)
"""End of an error about a GPU whose clock does not follow its lock."""


class GpuReader(Protocol):
    """Reads one physical GPU.

    Every member raises `GpuNotSupported` if this GPU, driver or back-end cannot tell,
    `GpuNotPermitted` if this process may not ask, `GpuLost` if the GPU has fallen off the bus, and
    `GpuError` otherwise. Each error text says what to do. A missing value is always an error, never
    0.
    """

    @property
    def text(self) -> str:
        """Text that makes `open_gpu` open this GPU in any process of the node, e.g.
        "nvml:GPU-8f6b…".
        """

    @property
    def uuid(self) -> str:
        """Unique identifier of the GPU, e.g. "GPU-8f6b…"; the same for every back-end."""

    @property
    def name(self) -> str:
        """Name for profiles, e.g. "NVIDIA A100-SXM4-80GB" or "simulated a100-sxm"."""

    @property
    def origin(self) -> str:
        """Where the numbers come from: "measured" or "simulated"."""

    @property
    def driver(self) -> str:
        """Version of the driver, or of the simulator."""

    def warnings(self) -> tuple[str, ...]:
        """What can spoil a profile of this GPU, such as MIG or power smoothing; each text also
        says what to do.
        """

    def foreign_locks(self, *, is_leased: bool = False) -> tuple[str, ...]:
        """Which clocks a program has locked, as far as can be told; each text also says what to do.
        Of a GPU that is leased only the memory clock can be told.
        """

    def computing_pids(self) -> tuple[int, ...]:
        """Processes that compute on it, as far as can be told."""

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """SM clocks that can be locked, highest first."""

    @property
    def power_limits_w(self) -> tuple[float, float]:
        """Smallest and largest power limit that can be set, watts."""

    def power_limit_w(self) -> float:
        """Power limit in force, watts."""

    def default_power_limit_w(self) -> float:
        """Power limit that is in force unless somebody sets another, watts."""

    def energy_j(self) -> float:
        """Cumulative energy counter, joules. Only differences are meaningful; it may move in
        steps.
        """

    def power_w(self) -> float:
        """Power reported by the sensor, watts."""

    def clock_mhz(self) -> int:
        """Current SM clock, MHz."""

    def temperature_c(self) -> float:
        """Core temperature, degrees Celsius."""

    def throttle_reasons(self) -> frozenset[str]:
        """The members of `THROTTLE_REASONS` that slow the GPU down now."""

    def throttled_s(self) -> Mapping[str, float]:
        """Seconds of throttling since the driver was loaded, by reason; only differences are
        meaningful.

        Contains the reasons that this GPU counts, possibly none.
        """

    def now_s(self) -> float:
        """Time on the GPU's clock, seconds; virtual for a simulated GPU. Only differences are
        meaningful.
        """

    def wait(self, duration_s: float) -> None:
        """Stay idle for `duration_s` seconds of that clock."""


class Gpu(GpuReader, Protocol):
    """One GPU that `open_gpu` has opened, which sets its clock and power limit too; raises the same
    errors as `GpuReader`. Use it in a `with` statement, or call `close`.
    """

    @property
    def keeps_settings(self) -> bool:
        """Whether settings outlive this process, so that a lease must be recorded before
        anything is set.
        """

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the SM clock. A power limit may still keep the actual clock below it."""

    def reset_clocks(self) -> None:
        """Unlock the SM clock; does nothing if it is not locked."""

    def set_power_limit_w(self, limit_w: float) -> None:
        """Set the power limit, watts."""

    def reset_power_limit(self) -> None:
        """Set the power limit back to its default; does nothing if it is the default."""

    def close(self) -> None:
        """Release what opening the GPU took. Settings stay as they are."""

    def __enter__(self) -> Self:
        """Return the GPU itself."""

    def __exit__(self, *_: object) -> None:
        """Close the GPU."""


class ClosedOnExit:
    """Base class of what is closed at the end of a `with` statement."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Release what opening it took."""


class RealGpu(ClosedOnExit):
    """Base class of GPUs that are there: their time is that of the system, and their settings
    outlive the process.
    """

    origin = "measured"
    keeps_settings = True

    def foreign_locks(self, *, is_leased: bool = False) -> tuple[str, ...]:
        """Nothing: it cannot be told."""
        return ()

    def computing_pids(self) -> tuple[int, ...]:
        """None: it cannot be told."""
        return ()

    def now_s(self) -> float:
        """Monotonic clock of the system, seconds."""
        return time.monotonic()

    def wait(self, duration_s: float) -> None:
        """Sleep for `duration_s` seconds."""
        time.sleep(duration_s)


def check_clock(gpu: GpuReader, clock_mhz: int) -> None:
    """Check that `gpu` supports a clock: NVML would silently round it.

    Raises:
        GpuError: If the clock is not supported; the text names the nearest one that is.
    """
    try:
        clocks = gpu.supported_clocks_mhz
    except GpuNotSupported:
        return  # some GPUs can lock clocks but do not list them; then the driver decides
    if clock_mhz not in clocks:
        # An error that names the nearest clock saves a look at the list.
        nearest = min(clocks, key=lambda supported: abs(supported - clock_mhz))
        raise GpuError(
            f"{gpu.text}: cannot lock its clock at {clock_mhz} MHz; the nearest supported "
            f"clock is {nearest} MHz, and all are from {clocks[-1]} to {clocks[0]} MHz"
        )


def check_power_limit(gpu: GpuReader, limit_w: float) -> None:
    """Check that `gpu` supports a power limit.

    Raises:
        GpuError: If the limit is out of range; the text names the range.
    """
    smallest_w, largest_w = gpu.power_limits_w
    if not smallest_w <= limit_w <= largest_w:  # also rejects NaN
        raise GpuError(
            f"{gpu.text}: cannot set its power limit to {limit_w:g} W; choose {smallest_w:g} to "
            f"{largest_w:g} W"
        )


class Library(ABC):
    """A library that all GPUs of a back-end share.

    Attributes:
        generation: Changes whenever it is initialised; a device handle is valid for one generation.

    Args:
        name: Its name, which begins error messages.
    """

    def __init__(self, name: str) -> None:
        self.generation = 0
        self._name = name
        self._users = 0
        self._is_initialised = False
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def acquire(self) -> None:
        """Initialise it unless it is already; call `release` afterwards.

        Raises:
            GpuError: If its binding, the library or the driver is missing, or they do not fit each
                other.
        """
        with self._lock:
            self._initialise()
            self._users += 1

    def release(self) -> None:
        """Undo one `acquire`; the last release shuts it down."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._is_initialised:
                self._is_initialised = False
                with suppress(GpuError):  # the process ends its use of the library anyway
                    self._shut_down()

    def ensure_initialised(self) -> None:
        """Initialise it again in a child that was forked while it was in use, or after `forget`.

        Raises:
            GpuError: If it is not in use in this process, or cannot be initialised.
        """
        if self._is_initialised:
            return
        # Another thread may have initialised it meanwhile; `_initialise` looks again.
        with self._lock:
            if self._users == 0:
                raise GpuError(f"{self._name}: this GPU was closed; open it again with open_gpu")
            self._initialise()

    def forget(self) -> None:
        """Have it initialised again by the next call, as it says that it is not."""
        self._is_initialised = False

    @abstractmethod
    def _start(self) -> None:
        """Initialise the library."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Shut the library down."""

    def _initialise(self) -> None:
        if not self._is_initialised:
            self._start()
            self._is_initialised = True
            self.generation += 1

    def _after_fork(self) -> None:
        # The child has to initialise the library itself, and another thread may have held the lock.
        self._is_initialised = False
        self._lock = threading.RLock()
