"""One rank as the controller sees it: its connection, its process and its GPU. Its clock requests
are read in `watcher.py`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, GpuInUse
from perseus_planner.base.loops import Backoff
from perseus_planner.base.processes import WatchedProcess
from perseus_planner.gpu import is_dry_run, open_gpu
from perseus_planner.gpu.lease.guardian import SAME_LIMIT_W, restore_power_limit
from perseus_planner.gpu.lease.lease import lease_gpus, recover
from perseus_planner.gpu.lease.records import read_records
from perseus_planner.runtime.controller.protocol import (
    AttachRefusal,
    AttachReply,
    AttachRequest,
    ClockOverridden,
    ControlChange,
    ControlFailure,
    ControlResumed,
    GpuSample,
    ToRank,
)
from perseus_planner.runtime.controller.scheduler import RESET
from perseus_planner.runtime.controller.watcher import RequestWatcher

if TYPE_CHECKING:
    from perseus_planner.base.wires import PacketChannel
    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.protocol import SharedRequest
    from perseus_planner.runtime.controller.scheduler import PendingChange
    from perseus_planner.runtime.controller.watcher import ClockRequest


_SETTLED_NS = 500_000_000  #: that the slowest transitions take which were reported
#: a clock that is more than so many times the one that was set is faster than that; by hand
_ABOVE = 1.05
#: how often in a row it has to be faster, so that its rank is told; by hand
_OVERRIDDEN = 3


class Rank:
    """A rank that has sent its attach request.

    Attributes:
        channel: Connection to the rank.
        attach_request: What the rank sent first.
        shared: Memory in which the rank writes its clock request.
        process: The rank's process.
        launcher: The process that started the rank; None if no launcher is visible.
        gpu: Its GPU once it is open.
        is_set: Whether its GPU follows its requests; False for GPUs that are only read and after a
            failure.
        backoff: When to set its GPU again after a failure.
        changed_ns: When its request was last seen to change.
    """

    def __init__(
        self, channel: PacketChannel, attach_request: AttachRequest, shared: SharedRequest, pid: int
    ) -> None:
        self.channel = channel
        self.attach_request = attach_request
        self.shared = shared
        self.process = WatchedProcess(pid)
        self.launcher = WatchedProcess(attach_request.launcher) if attach_request.launcher else None
        self.gpu: Gpu | None = None
        self.is_set = attach_request.control != "observed"
        self.backoff = Backoff()
        self.changed_ns = 0
        self._requests = RequestWatcher(shared)
        self._set_since = RESET, 0  #: value that was set last, and when (ns)
        self._overridden = 0  #: how often in a row the GPU then ran faster
        self._has_told_memory = False  #: that somebody has locked the memory clock
        self._initial_limit_w: float | None = None
        self._default_limit_w: float | None = None  #: 0 if the GPU cannot tell
        self._is_attached = False
        self._power = SensorEnergy()
        self._news: ControlFailure | ControlResumed | None = None  #: not sent yet
        self._dropped = 0

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        """The processes whose end matters to this rank."""
        return (self.process,) if self.launcher is None else (self.process, self.launcher)

    @property
    def changes_per_iteration(self) -> int:
        """How often its value changes in an iteration as seen so far, with the change back for
        the next one.
        """
        return self._requests.changes_per_iteration

    @property
    def gpu_to_set(self) -> Gpu | None:
        """The GPU, if it is open and may be set."""
        return None if self.attach_request.control == "observed" else self.gpu

    def open(self) -> None:
        """Open the rank's GPU.

        Raises:
            GpuError: If it cannot be opened.
        """
        self.gpu = open_gpu(self.attach_request.gpu)

    def attach(self) -> None:
        """Tell the rank that its GPU, which is leased now, follows its requests.

        Raises:
            GpuError: If the power limit in force, to which a reset goes back, cannot be read.
        """
        assert self.gpu is not None  # it was opened before it was leased
        # A reset has to go back to the limit that was there before.
        if self.attach_request.control == "power-limit":
            self._initial_limit_w = self.gpu.power_limit_w()
        self._is_attached = True
        self.send(AttachReply(self.gpu.text, self.gpu.uuid, self.gpu.name, self.gpu.origin))

    def refuse(self, error: GpuError) -> None:
        """Tell the rank why its GPU is not set."""
        self.send(AttachRefusal(type(error).__name__, str(error)))

    @property
    def due_ns(self) -> int | None:
        """When the next clock by time is due; None if none is."""
        return self._requests.due_ns

    def poll_request(self, now_ns: int) -> ClockRequest | None:
        """See `RequestWatcher.poll`."""
        return self._requests.poll(now_ns)

    def make(self, change: PendingChange) -> None:
        """Set the GPU, and tell the rank.

        Raises:
            GpuError: If the GPU could not be set.
        """
        assert self.gpu is not None  # requests are only looked at once the rank is attached
        # The clock right before the change is that of what has run until now.
        before_mhz = _read(self.gpu.clock_mhz)
        begun_ns = time.monotonic_ns()
        self._set(self.gpu, change.value)
        ended_ns = time.monotonic_ns()
        before = None if before_mhz is None else round(before_mhz)
        self.send(
            ControlChange(change.position, change.value, change.seen_ns, begun_ns, ended_ns, before)
        )
        # The clock before this change is judged by the value that was set before.
        self._watch_overriding(before, begun_ns)
        self._set_since = change.value, ended_ns

    def _watch_overriding(self, achieved_mhz: int | None, now_ns: int) -> None:
        """Tell the rank if its GPU ran faster than what was set, several times in a row: nothing
        that throttles it does that.
        """
        set_mhz, since_ns = self._set_since
        if self.gpu is None or is_dry_run(self.gpu.text):
            return  # nothing was set, so nobody has set something else
        if self.attach_request.control != "clock" or not (set_mhz and achieved_mhz):
            return
        # Too early: the clock may still be on its way.
        if now_ns - since_ns < _SETTLED_NS:
            return
        is_above = achieved_mhz > _ABOVE * set_mhz
        self._overridden = self._overridden + 1 if is_above else 0
        if self._overridden == _OVERRIDDEN:
            text = (
                f"this GPU ran at {achieved_mhz} MHz where {set_mhz} MHz was set, so another "
                "program sets its clock (a script with `nvidia-smi -lgc`, DCGM, Slurm's "
                "--gpu-freq); stop that on this node, or plans save nothing"
            )
            self.send(ClockOverridden("SM", text))

    def _watch_memory(self, gpu: Gpu) -> None:
        """Tell the rank once if another program has locked the memory clock of its GPU, and not a
        mode of the training.
        """
        locks = () if self._has_told_memory else gpu.foreign_locks(is_leased=True)
        if locks:
            modes = f"{gpu.uuid}-memory"  # under which they lease it
            if not any(record.uuid == modes and record.is_living for record in read_records()[0]):
                self.send(ClockOverridden("memory", f"{gpu.text}: {locks[0]}"))
            # Last: records that cannot be read now are read with the next sample.
            self._has_told_memory = True

    def sample(self, seen_ns: int, overtaken: int) -> None:
        """Read the GPU, and send the sample to the rank."""
        assert self.gpu is not None  # samples begin when the rank is attached
        now_ns = time.monotonic_ns()
        # A sample is of one moment, so the energy, by which iterations are counted, is read first.
        energy_j = _read(self.gpu.energy_j)
        clock_mhz = _read(self.gpu.clock_mhz)
        sample = GpuSample(
            seen_ns=seen_ns,
            now_ns=now_ns,
            energy_j=energy_j,
            clock_mhz=None if clock_mhz is None else round(clock_mhz),
            power_w=_read(self.gpu.power_w),
            temperature_c=_read(self.gpu.temperature_c),
            throttled_s=_throttled_s(self.gpu),
            overtaken=overtaken,
            dropped=self._dropped,
            site_limit_w=self._site_limit_w(self.gpu),
            sensor_j=self._power.energy_j(now_ns / 1e9),
        )
        self.send(sample)
        # Whether somebody has locked the memory is a remark, and no reason to lose a sample.
        with suppress(GpuError):
            self._watch_memory(self.gpu)

    @property
    def power_due_s(self) -> float:
        """When the power sensor is to be read next, seconds of the monotonic clock."""
        return self._power.due_s

    def watch_power(self, now_s: float) -> bool:
        """Read the power sensor if that is due; return whether it was."""
        if self.gpu is None or not self._power.is_due(now_s):
            return False
        self._power.add(now_s, _read(self.gpu.power_w))
        return True

    def reset(self) -> str | None:
        """Reset the GPU; return the problem if that fails."""
        if self.gpu is None or not self._is_attached:
            return None
        try:
            self._set(self.gpu, RESET)
        except GpuError as error:
            return str(error)
        return None

    def fail(self, reason: str, problem: str | None) -> None:
        """Stop setting the GPU and tell the rank why; `problem` is why the GPU could not be
        reset.
        """
        self.is_set = False
        self._news = ControlFailure(
            reason if problem is None else f"{reason}; and it could not be reset: {problem}"
        )
        self.send_news()

    def resume(self) -> None:
        """Set the GPU again, and tell the rank."""
        self.is_set = True
        self._news = ControlResumed()
        self.send_news()

    def send_news(self) -> None:
        """Send a failure, or its end, that the rank has not received yet, if there is one."""
        # Kept until the rank reads: a failure that is not heard would look like a slow plan.
        if self._news is not None:
            with suppress(EOFError):
                if not self.channel.send(self._news):
                    return
            self._news = None

    def send(self, message: ToRank) -> None:
        """Send a message, unless the rank does not read or has ended; its end is noticed
        elsewhere.
        """
        with suppress(EOFError):
            # Counted, as whoever adds up samples has to know what is missing.
            self._dropped += not self.channel.send(message)

    def close(self) -> None:
        """Close the connection; the GPU is closed with its lease."""
        self.channel.close()
        for process in self.watched:
            process.close()

    def _site_limit_w(self, gpu: Gpu) -> float | None:
        """Return the power limit if it is below the default and not one that this rank sets."""
        if self.attach_request.control == "power-limit":
            return None
        # The default never changes, so it is asked for once; 0 stands for a GPU that cannot tell.
        if self._default_limit_w is None:
            self._default_limit_w = _read(gpu.default_power_limit_w) or 0.0
        limit_w = _read(gpu.power_limit_w) if self._default_limit_w else None
        is_site_limit = limit_w is not None and limit_w <= self._default_limit_w - SAME_LIMIT_W
        return limit_w if is_site_limit else None

    def _set(self, gpu: Gpu, value: int) -> None:
        control = self.attach_request.control
        if control == "observed":
            return
        if control == "power-limit":
            if value == RESET:
                restore_power_limit(gpu, self._initial_limit_w)
            else:
                gpu.set_power_limit_w(float(value))
        elif value == RESET:
            gpu.reset_clocks()
        else:
            gpu.set_clock_mhz(value)


class LeaseGroup:
    """A lease of the GPUs of several ranks, given back when the last of them has left.

    GPUs that dead jobs left set are reset first. GPUs that are only read are not leased, so reading
    needs no privilege.

    Args:
        ranks: Ranks whose GPUs are open.

    Raises:
        GpuError: If one of the GPUs cannot be leased; none is leased then.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._members = list(ranks)
        self._gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
        self._leases = ExitStack()
        # Only what is set needs a lease; reading needs no privilege.
        to_set = [rank.gpu_to_set for rank in ranks if rank.gpu_to_set is not None]
        if any(gpu.keeps_settings for gpu in to_set):
            recover()
        power_limit = any(rank.attach_request.control == "power-limit" for rank in ranks)
        # so that the GPUs of ranks that have ended are reset also if this process is stopped
        users = [rank.process.pid for rank in ranks]
        self._leases.enter_context(lease_gpus(to_set, power_limit=power_limit, users=users))

    def leave(self, rank: Rank) -> str | None:
        """Reset the GPU of a rank, and end the lease if it is the last; return the problem if
        that fails.
        """
        self._members.remove(rank)
        # The others go on, so the lease ends with the last.
        return rank.reset() if self._members else self.release()

    def release(self) -> str | None:
        """Reset all GPUs and end the lease; return the problem if that fails."""
        try:
            self._leases.close()
        except GpuError as error:
            return str(error)
        finally:
            for gpu in self._gpus:
                gpu.close()
        return None


def shared_gpu_errors(ranks: Iterable[Rank]) -> dict[Rank, GpuError]:
    """Return an error for each rank whose GPU is also the GPU of another rank."""
    # By UUID: different texts may name one GPU.
    by_uuid: dict[str, list[Rank]] = {}
    for rank in ranks:
        gpu = rank.gpu_to_set
        if gpu is not None and gpu.keeps_settings:
            by_uuid.setdefault(gpu.uuid, []).append(rank)
    return {
        rank: GpuInUse(
            f"ranks {', '.join(str(sharer.attach_request.rank) for sharer in sharing)} have "
            "the same "
            f"GPU, {uuid}; name another GPU for each rank, by UUID if CUDA_VISIBLE_DEVICES "
            "differs between ranks"
        )
        for uuid, sharing in by_uuid.items()
        if len(sharing) > 1
        for rank in sharing
    }


_POWER_S = 0.5
"""Mean time between two readings of the power sensor, seconds. A reading takes 20 us to some
milliseconds, so 1 % of the time at most; sensors average over up to a second.
"""


class SensorEnergy:
    """The energy of a GPU by its power sensor.

    The times of readings are drawn, as iterations repeat: whoever always looked when one begins
    would see the power at that moment alone. Samples for ranks come then, so they are no readings.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._due_s = -math.inf
        self._read_s = 0.0
        self._power_w: float | None = None
        self._energy_j = 0.0

    @property
    def due_s(self) -> float:
        """When the sensor is to be read next; infinite if it cannot be read."""
        return self._due_s

    def is_due(self, now_s: float) -> bool:
        """Whether the sensor is to be read now."""
        return now_s >= self._due_s

    def add(self, now_s: float, power_w: float | None) -> None:
        """Add a reading; None if the sensor cannot be read, and then it is not read again."""
        # Until this reading the power was that of the last one.
        self._energy_j = self.energy_j(now_s) or 0.0
        self._read_s = now_s
        self._power_w = power_w
        # Between half and one and a half times the pause: whoever looks in step with iterations
        # sees always the same moment.
        pause_s = _POWER_S * (0.5 + self._draw())
        self._due_s = math.inf if power_w is None else now_s + pause_s

    def energy_j(self, now_s: float) -> float | None:
        """Return the energy since the first reading, joules; None if there is none."""
        if self._power_w is None:
            return None
        return self._energy_j + self._power_w * (now_s - self._read_s)


def _read(reading: Callable[[], float]) -> float | None:
    """Return a reading, or None if the GPU does not offer it."""
    try:
        value = float(reading())
    except GpuError:
        return None
    return value if math.isfinite(value) else None


def _throttled_s(gpu: Gpu) -> dict[str, float]:
    try:
        return {reason: float(held_s) for reason, held_s in gpu.throttled_s().items()}
    except GpuError:
        return {}
