"""One rank as the controller sees it: its connection, its process, its clock requests, and its
GPU.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import GpuError, GpuInUse
from perseus_planner.base.loops import Backoff
from perseus_planner.base.processes import WatchedProcess
from perseus_planner.gpu import is_dry_run, open_gpu
from perseus_planner.gpu.lease.guardian import SAME_LIMIT_W, restore_power_limit
from perseus_planner.gpu.lease.lease import lease_gpus, recover
from perseus_planner.gpu.lease.records import read_records
from perseus_planner.runtime.controller.armed import ArmedClocks
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
from perseus_planner.runtime.marks import (
    BEGUN,
    BY_TIME,
    NO_REQUEST,
    OUTSIDE,
    is_captured,
    is_turned,
    parse_clock_request,
    table_of,
)

if TYPE_CHECKING:
    from perseus_planner.base.wires import PacketChannel
    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.protocol import SharedRequest
    from perseus_planner.runtime.controller.scheduler import PendingChange


MAX_SKIPPED = 64
"""No rank passes more positions between two looks at its request; if more were passed, it runs
another program.
"""

OUTSIDE_NS = 20_000_000
"""How long a rank whose iterations are long (`LONG_NS`) runs something else than computations
before its GPU is reset for it; ten times that, if they are shorter. By hand.
"""

LONG_NS = 2_000_000_000
"""How long an iteration lasts, at least, to count as a long one. The calls of a node for a reset
and for the first clocks of the next iteration take up to 90 ms, which should not be spent in each
short iteration. By hand.
"""

_SETTLED_NS = 500_000_000  #: that the slowest transitions take which were reported
#: a clock that is more than so many times the one that was set is faster than that; by hand
_ABOVE = 1.05
#: how often in a row it has to be faster, so that its rank is told; by hand
_OVERRIDDEN = 3
_MAX_POSITIONS = 65536  #: of a program whose values are remembered, to bound the memory


class ClockRequest(NamedTuple):
    """A clock request that has changed."""

    position: int | None  #: Position of the rank in its program; None if it wants no value
    #: What it wants, or a faster clock if it is late; 0 to have its GPU reset.
    value: int
    #: What the rank requested at the positions that it passed since the last look, as far as that
    #: is known.
    skipped: tuple[int, ...]
    is_new_iteration: bool  #: Whether the position has gone back since the last request
    is_new_program: bool = False  #: Whether another value was requested at this position before
    has_begun: bool = False  #: Whether it is known that its computation has begun
    #: Whether another value is wanted than before, or may be, as the rank catches up.
    is_change: bool = True
    due_ns: int | None = None  #: When a clock by time was due


# What `poll_request` keeps of a rank from one look to the next, all on the controller's thread.
# "By position" are requests of one clock each, "by time" those of a table of an iteration.
#
# | attribute     | written by                     | meaning
# |---------------|--------------------------------|--------------------------------------------
# | `_seen`       | each look at a new word        | the whole word, with `OUTSIDE`
# | `_outside_ns` | each look at a new word        | since when `OUTSIDE` stands; None: it does not
# | `_is_reset`   | `_reset_request`: yes; a clock | whether the rank was left without a clock by
# |               | or an armed table: no          | the last answer
# | `_request`    | by position                    | the last one with a clock, without `OUTSIDE`;
# |               |                                | a reset leaves it
# | `_position`   | by position; by time: None     | its position; a reset leaves it
# | `_wanted`     | both; `_reset_request`: RESET  | the planned value, not the one to catch up by
# | `_table`      | by position, not captured      | where captured requests find their clocks
# | `_first_ns`   | by position, 0 and `BEGUN`     | from when latest starts count; None: from
# |               |                                | nothing, so nobody catches up
# | `_begun_ns`,  | both, at a new iteration       | how long iterations last, which says when a
# | `_lasted_ns`  |                                | reset outside is worth its calls
# | `_values`     | both; another program empties  | what was wanted where, to tell what was passed
# | `_changes`    | None when `_values` changes    | a count of `_values`, made when asked for
# | `_armed`      | by time; by position cancels   | the clocks by time that are still to come
#
# Outside and reset together:
#
# | `_outside_ns` | `_is_reset` | the rank
# |---------------|-------------|----------------------------------------------------------------
# | None          | no          | runs computations at requested clocks
# | a moment      | no          | runs something else; its GPU keeps the clock until the limit
# | a moment      | yes         | has passed the limit, or wanted nothing before; stays reset until
# |               |             | it is inside again
# | None          | yes         | wants nothing: before the first iteration, after a deviation, or,
# |               |             | by time, from the end of an iteration to the next begin


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
        self._word = shared.request
        self._seen = NO_REQUEST  #: what `_word` was when it was looked at last
        self._request = NO_REQUEST
        self._wanted = RESET  #: the planned value of the last request; `RESET` if it had none
        self._outside_ns: int | None = None  #: since when the rank is outside of its computations
        self._is_reset = True  #: `NO_REQUEST` was returned last
        self._begun_ns: int | None = None  #: when an iteration was seen to begin last
        self._lasted_ns = 0  #: how long the one before took; 0 until one was seen whole
        self._first_ns: int | None = None  #: when the first computation of this one was
        self._position: int | None = None  #: of the last request that had one
        self._values: dict[int, int] = {}  #: position -> what was requested there last
        self._armed = ArmedClocks()
        self._looked_ns = 0  #: at the request, before
        self._table = 0  #: that was named last, for captured requests
        self._changes: int | None = None  #: how often these change; None if that is to be counted
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
        if self._changes is None:
            values = [value for _, value in sorted(self._values.items())]
            # The last value of an iteration stands before its first: iterations repeat.
            self._changes = sum(
                before != value
                for before, value in zip([*values[-1:], *values], values, strict=False)
            )
        return self._changes

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

    def poll_request(self, now_ns: int) -> ClockRequest | None:
        """Return the clock request if it has changed since the last call. One that was written
        outside of computations becomes one for a reset when it has stood for some time.

        During a call of the driver, which takes milliseconds, nobody looks, and the rank may pass
        positions. It is assumed to have requested there what it requested when they were seen last,
        as an iteration is like the one before it. The positions at the end of an iteration are not
        known, so nothing is assumed about them.
        """
        # One number of memory, which the rank or its GPU writes: it holds the whole request.
        request = self._word[0]
        looked_ns = self._looked_ns
        self._looked_ns = now_ns
        # Nothing new, and no reset that is to come: the most frequent case by far.
        if request == self._seen and (self._outside_ns is None or self._is_reset):
            return self._take_due(now_ns)
        self._seen = request
        # Since when it is outside counts from the first look that saw it there.
        self._outside_ns = (self._outside_ns or now_ns) if request & OUTSIDE else None
        request &= ~OUTSIDE
        if request & BY_TIME:
            return self._poll_by_time(request, now_ns, looked_ns)
        # What requests by position is not timed.
        self._armed.cancel()
        # Captured requests have no value of their own, as a graph writes the same number each time.
        # Their clocks are in the table that was named last.
        position, value = parse_clock_request(request)
        if position is not None and is_captured(request):
            value = self.shared.latest.clock(self._table, position, 0) or RESET
        else:
            self._table = table_of(request)
        if position is None or self._is_long_outside(now_ns):
            return self._reset_request()
        if request == self._request and not self._is_reset:
            return None
        # The same position again means that an iteration has passed unseen; for captured requests
        # that cannot be told.
        is_again = not is_captured(request) and is_turned(request, self._request)
        self._request = request
        self._is_reset = False
        before = self._position
        self._position = position
        is_new_iteration = before is not None and (position < before or is_again)
        # The first one begins where the rank is first seen.
        if before is None or is_new_iteration:
            self._begin_iteration(now_ns)
        if is_new_iteration:
            self._first_ns = None
        # Latest starts count from here.
        if position == 0 and request & BEGUN:
            self._first_ns = now_ns
        skipped = self._skipped(-1 if before is None or is_new_iteration else before, position)
        is_change = value != self._wanted
        self._wanted = value
        is_new_program = self._remember(position, value)
        # A rank that is late gets a faster clock than planned.
        table = table_of(request)
        if table and self._first_ns is not None:
            value = self.shared.latest.clock(table, position, now_ns - self._first_ns) or value
        return ClockRequest(
            position,
            value,
            skipped,
            is_new_iteration,
            is_new_program,
            has_begun=bool(request & BEGUN),
            is_change=is_change or table != 0,
        )

    def _is_long_outside(self, now_ns: int) -> bool:
        """Return whether the rank has been outside of computations for so long that it is reset."""
        if self._outside_ns is None:
            return False
        # Short iterations pass this state often, and resetting in each would cost more than it
        # saves.
        limit_ns = OUTSIDE_NS if self._lasted_ns >= LONG_NS else 10 * OUTSIDE_NS
        return self._is_reset or now_ns - self._outside_ns >= limit_ns

    def _skipped(self, before: int, position: int) -> tuple[int, ...]:
        """Return the values that were requested unseen between two positions, as far as the
        iteration before tells.
        """
        passed = range(before + 1, position)
        # More than a look can miss is another program.
        if len(passed) > MAX_SKIPPED:
            return ()
        return tuple(self._values[at] for at in passed if at in self._values)

    def _remember(self, position: int, value: int) -> bool:
        """Keep what is requested at a position; return whether it is of a new program."""
        # Another value at the same position: a new plan, of which nothing that was remembered
        # holds.
        remembered = self._values.get(position)
        is_new_program = remembered is not None and remembered != value
        if is_new_program:
            self._values.clear()
        # The number of changes is counted again when it is asked for.
        if remembered != value and position < _MAX_POSITIONS:
            self._values[position] = value
            self._changes = None
        return is_new_program

    def _reset_request(self) -> ClockRequest | None:
        """Return the request for a reset; None if one was returned last."""
        was_reset = self._is_reset
        self._is_reset = True
        self._wanted = RESET
        return None if was_reset else ClockRequest(None, RESET, (), is_new_iteration=False)

    def _begin_iteration(self, now_ns: int) -> None:
        """Note how long the last iteration took, which decides when a reset is worth its calls."""
        self._lasted_ns = 0 if self._begun_ns is None else now_ns - self._begun_ns
        self._begun_ns = now_ns

    def _poll_by_time(self, request: int, now_ns: int, looked_ns: int) -> ClockRequest | None:
        """Take a request with clocks by time: nothing is wanted before the iteration begins, and
        nothing once it has ended.
        """
        self._position = None
        # An end: what comes next is waiting, or something that nobody has timed.
        if not request & BEGUN:
            self._armed.end(now_ns)
            return self._reset_request()
        self._begin_iteration(now_ns)
        # The table's first row has all clocks of the iteration, with their times.
        row = self.shared.latest.row(table_of(request), 0)
        # Not armed means full clocks until the next begin.
        self._is_reset = not self._armed.begin(now_ns, looked_ns, row)
        due = self._armed.take(now_ns)
        value = RESET if due is None else due.clock
        self._note_by_time(0, value)
        return ClockRequest(
            0 if due else None, value, (), is_new_iteration=True, has_begun=True, is_change=True
        )

    def _take_due(self, now_ns: int) -> ClockRequest | None:
        """Return the clock by time that is due now, if there is one."""
        if self._armed.next_ns is None:
            return None
        due = self._armed.take(now_ns)
        if due is None:
            return None
        self._note_by_time(due.place, due.clock)
        return ClockRequest(due.place, due.clock, (), is_new_iteration=False, due_ns=due.due_ns)

    def _note_by_time(self, place: int, value: int) -> None:
        """Note the clocks of an iteration, by which their changes are counted."""
        self._wanted = value
        if place == 0:
            self._values.clear()
        self._values[place] = value
        self._changes = None

    @property
    def due_ns(self) -> int | None:
        """When the next clock by time is due; None if none is."""
        return self._armed.next_ns

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
            self._has_told_memory = True
            modes = f"{gpu.uuid}-memory"  # under which they lease it
            if not any(record.uuid == modes and record.is_living for record in read_records()[0]):
                self.send(ClockOverridden("memory", f"{gpu.text}: {locks[0]}"))

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
