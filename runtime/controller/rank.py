"""One rank as the controller has it: its connection, its page, its process, its GPU."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu import open_gpu
from perseus_planner.processes import Watched
from perseus_planner.runtime.controller.places import Places
from perseus_planner.runtime.controller.protocol import Attached, Changed, Failed, Hello, Reading, Refused, ToRank
from perseus_planner.runtime.controller.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.page import Page
    from perseus_planner.runtime.controller.peer import Peer
    from perseus_planner.runtime.controller.scheduler import Wanted


class Rank:
    """A rank that has said hello.

    Attributes:
        peer, hello, page: how it speaks, what it said first, what it writes to.
        process: it, until its end.
        launcher: what started it, likewise; None: nothing that can be seen.
        min_dwell_s: for how long a value is kept.
        gpu: its GPU, when it is open.
        places: where it is in its program.
        is_set: whether its GPU is set to what it asks for: no more when that has failed.
        due_ns: since when a reading is due; None: none is.
    """

    def __init__(self, peer: Peer, hello: Hello, page: Page, pid: int) -> None:
        self.peer, self.hello, self.page = peer, hello, page
        self.process = Watched(pid)
        self.launcher = Watched(hello.launcher) if hello.launcher else None
        self.min_dwell_s = hello.min_dwell_s
        self.gpu: Gpu | None = None
        self.places = Places()
        self.is_set = hello.control != "observed"
        self.due_ns: int | None = None
        self._setting: Setting | None = None
        self._failed: Failed | None = None  #: what it must be told yet
        self._untold = 0

    @property
    def watched(self) -> tuple[Watched, ...]:
        """The processes whose end matters to it."""
        return (self.process,) if self.launcher is None else (self.process, self.launcher)

    def open(self) -> Gpu:
        """Open its GPU.

        Raises:
            GpuError: it cannot be opened.
        """
        self.gpu = open_gpu(self.hello.gpu)
        return self.gpu

    def attach(self) -> None:
        """Tell it that its GPU, which is held now, is set from now on.

        Raises:
            GpuError: the GPU does not say what must be known of it.
        """
        assert self.gpu is not None  # it was opened, to be held
        self._setting = Setting(self.gpu, self.hello.control)
        self.tell(Attached(self.gpu.text, self.gpu.uuid, self.gpu.name, self.gpu.origin))

    def refuse(self, error: GpuError) -> None:
        """Tell it that nothing is set for it, and why."""
        self.tell(Refused(type(error).__name__, str(error)))

    def change(self, wanted: Wanted) -> Changed:
        """Set its GPU.

        Raises:
            GpuError: it did not do that.
        """
        assert self.gpu is not None  # nothing is asked for before it is attached
        assert self._setting is not None
        before_mhz = _read(self.gpu.clock_mhz)
        begun_ns = time.monotonic_ns()
        self._setting.set(wanted.value)
        ended_ns = time.monotonic_ns()
        before = None if before_mhz is None else round(before_mhz)
        return Changed(wanted.place, wanted.value, wanted.seen_ns, begun_ns, ended_ns, before)

    def read(self, seen_ns: int, overtaken: int) -> None:
        """Tell it what its GPU says."""
        assert self.gpu is not None  # readings begin when it is attached
        self.due_ns = None
        now_ns = time.monotonic_ns()
        energy_j, clock_mhz = _read(self.gpu.energy_j), _read(self.gpu.clock_mhz)
        self.tell(
            Reading(
                seen_ns,
                now_ns,
                energy_j,
                None if clock_mhz is None else round(clock_mhz),
                _read(self.gpu.power_w),
                _read(self.gpu.temperature_c),
                self._throttled_s(),
                overtaken,
                self._untold,
            )
        )

    def reset(self) -> str | None:
        """Reset its GPU; what went wrong."""
        return None if self._setting is None else self._setting.reset()

    def fail(self, why: str, problem: str | None) -> None:
        """Set nothing for it any more, and tell it why, as soon as it listens; `problem`: why it could not be reset."""
        self.is_set = False
        self._failed = Failed(why if problem is None else f"{why}; and it could not be reset: {problem}")
        self.tell_failure()

    def tell_failure(self) -> None:
        """Tell it of its failure, if it has not heard of it."""
        if self._failed is not None:
            with suppress(EOFError):
                if not self.peer.tell(self._failed):
                    return
            self._failed = None

    def tell(self, message: ToRank) -> None:
        """Tell it, unless it does not listen, or has ended, which is seen elsewhere."""
        with suppress(EOFError):
            self._untold += not self.peer.tell(message)

    def close(self) -> None:
        """Have no more to do with it; its GPU is closed by who holds it."""
        self.peer.close()
        for watched in self.watched:
            watched.close()

    def _throttled_s(self) -> dict[str, float]:
        assert self.gpu is not None
        try:
            return {reason: float(held_s) for reason, held_s in self.gpu.throttled_s().items()}
        except GpuError:
            return {}


def _read(reading: Callable[[], float]) -> float | None:
    """A reading; None where there is none."""
    try:
        value = float(reading())
    except GpuError:
        return None
    return value if math.isfinite(value) else None
