"""Keeps the clocks of a server's GPUs by its metrics, from another process than the server's.

The GPUs are leased, so that they are reset whatever happens to this process. If the server does not
answer, clocks are full until it does.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuNotSupported, UsageError
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.inference.online import NO_ANSWER, OnlineSettings, ServerClock
from perseus_planner.profiler.control import common_settings

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu
    from perseus_planner.inference.metrics import MetricsReader

_POLL_S = 0.05
_TELL_S = 10.0
_CLOCKS = 16  #: that are tried


@dataclass(frozen=True)
class Attended:
    """What became of a server."""

    time_s: float  #: how long its clocks were kept, seconds
    energy_j: float  #: of its GPUs, joules
    requests: float  #: how many got their first token
    late: float  #: how many of these got it later than the objective
    tokens: float  #: output tokens after the first of each request
    late_tokens: float  #: those that came at longer distances than the objective, on average
    changes: int  #: how often clocks were set
    failures: int  #: how often the server did not answer
    saving: float | None  #: expected saving of power at the last clock, a share; None if unknown


def attend(
    reader: MetricsReader,
    gpus: Sequence[Gpu],
    settings: OnlineSettings,
    is_over: Callable[[], bool],
    *,
    is_dry: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Attended:
    """Keep the clocks of the GPUs of a server until it is over.

    Args:
        reader: Reads its metrics; it has answered once.
        gpus: All GPUs that it runs on.
        settings: What is to be kept.
        is_over: Whether to end; asked every 50 ms.
        is_dry: Whether to set nothing, and only tell.
        tell: Called with a line every 10 s, and when the server does not answer.

    Raises:
        GpuError: If the GPUs cannot be read, leased or set.
    """
    clocks_mhz = common_settings([gpu.supported_clocks_mhz for gpu in gpus])
    chooser = ServerClock(clocks_mhz[:: max(1, len(clocks_mhz) // _CLOCKS)], settings)
    current_mhz, changes, failures, told_s = clocks_mhz[0], 0, 0, 0.0
    begin_s, begin_j = time.monotonic(), sum(gpu.energy_j() for gpu in gpus)
    with ExitStack() as stack:
        if not is_dry:
            stack.enter_context(lease_gpus(gpus, power_limit=False))
        while not is_over():
            poll_s = time.monotonic()
            try:
                state = reader.read()
            except (OSError, http.client.HTTPException, UsageError) as error:
                if chooser.reason != NO_ANSWER:
                    tell(f"{reader.where}: does not answer ({error!r}); clocks are full")
                chooser.fail()
                failures += 1
            else:
                chooser.observe(state, sum(gpu.energy_j() for gpu in gpus))
            if chooser.clock_mhz != current_mhz:
                current_mhz, changes = chooser.clock_mhz, changes + 1
                for gpu in () if is_dry else gpus:
                    gpu.set_clock_mhz(current_mhz)
            if poll_s - told_s > _TELL_S:
                told_s = poll_s
                tell(_line(chooser, is_dry))
            time.sleep(max(0.0, poll_s + _POLL_S - time.monotonic()))
        energy_j = sum(gpu.energy_j() for gpu in gpus) - begin_j
    return Attended(
        time.monotonic() - begin_s,
        energy_j,
        chooser.requests,
        chooser.late,
        chooser.tokens,
        chooser.late_tokens,
        changes,
        failures,
        chooser.saving,
    )


def check_gpus(gpus: Sequence[Gpu]) -> None:
    """Check that the clocks of GPUs can be kept, before a server is started.

    Raises:
        GpuError: If a GPU has no clocks to set or no energy counter, or another process has leased
            it, or this one may not set it.
    """
    common_settings([gpu.supported_clocks_mhz for gpu in gpus])
    for gpu in gpus:
        try:
            gpu.energy_j()
        except GpuNotSupported as error:
            raise UsageError(
                f"{gpu.text}: has no energy counter, from which clocks are chosen; name another GPU"
            ) from error
    with lease_gpus(gpus, power_limit=False):
        pass


def _line(chooser: ServerClock, is_dry: bool) -> str:
    late = 100 * chooser.late / max(1.0, chooser.requests)
    saving = "" if chooser.saving is None else f", {100 * chooser.saving:.0f} % less power"
    return (
        f"{'would set' if is_dry else 'at'} {chooser.clock_mhz} MHz ({chooser.reason}){saving}; "
        f"{chooser.requests:.0f} requests, {late:.2f} % late"
    )
