"""The device's events in the time of the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKS = 64  #: some 100 us


class DeviceClock:
    """When an event of a device took place, in nanoseconds of the host's monotonic clock.

    Events tell but the milliseconds between two of them, as a 32-bit float that is off by up to 2^-25 of them, and the
    device's clock drifts from the host's by some 10 ppm, a second a day. So times are added up from one event to the
    next in whole nanoseconds (`advance`), and the sum is compared with the host's clock (`settled`): an event is
    recorded in a stream that is otherwise empty, at a time that the host knows from both sides, and the sum is moved as
    little as puts it in between. What is off is then at most what the host knows that time to, tens of microseconds,
    and the drift in between; nothing adds up over days. Where all streams share one queue
    (`CUDA_DEVICE_MAX_CONNECTIONS=1`), the event waits for what is queued, and the host knows its time less well.

    Waits for the device when it is made, and never again.

    Args:
        cuda: torch.cuda.
        device: the device.
        now_ns: the host's clock.
    """

    def __init__(self, cuda: Any, device: Any, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self.stream = cuda.Stream(device)
        self._base, self._look = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._early_ns: int | None = None
        self._base_ns = 0
        for event in (self._look, self._base):  # the first one is slow: it is created when it is recorded
            early_ns = now_ns()
            event.record(self.stream)
            event.synchronize()
            self._base_ns = (early_ns + now_ns()) // 2

    def settled(self) -> bool:
        """Compare with the host's clock; False: not yet, ask again later. Never waits.

        No `advance` may come between it and a True.
        """
        if self._early_ns is None:
            self._early_ns = self._now_ns()
            self._look.record(self.stream)
        if not any(self._look.query() for _ in range(_LOOKS)):
            return False
        late_ns = self._now_ns()
        summed_ns = self._base_ns + gap_ns(self._base, self._look)
        self._base_ns += min(max(summed_ns, self._early_ns), late_ns) - summed_ns
        self._early_ns = None
        return True

    def advance(self, event: Any) -> tuple[int, Any]:
        """(when it was, the event that is no longer needed); `event` is done, and is needed until the next call."""
        self._base_ns += gap_ns(self._base, event)
        self._base, spare = event, self._base
        return self._base_ns, spare


def gap_ns(earlier: Any, later: Any) -> int:
    """Nanoseconds from one event to another; both are done."""
    elapsed_ms: float = earlier.elapsed_time(later)
    return round(elapsed_ms * 1e6)
