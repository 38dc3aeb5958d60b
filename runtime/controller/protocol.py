"""How ranks connect to the clock controller and talk to it: who may, what they must send first, the
messages, and the memory that they share.

A message on the socket:

    {"message":"ControlChange","position":3,"value":1200,"seen_ns":…,"begun_ns":…,"ended_ns":…,"before_mhz":1410}

All times are nanoseconds of the monotonic clock, which the processes of a node share.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from array import array
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.base.wires import Message, PacketChannel

if TYPE_CHECKING:
    Row = Sequence[tuple[int, int]]

SOCKET_KIND = socket.SOCK_SEQPACKET
"""A socket that keeps messages apart: a message arrives whole or not at all."""

SETTLE_NS = 900_000
"""How long a clock takes to settle after the call that sets it: the mean on an A800."""

Control = Literal["clock", "power-limit", "observed"]
"""What the values of a rank set: a clock in MHz, a power limit in watts, or nothing because the
GPU is only read.
"""


class AttachRequest(Message, frozen=True):
    """The first message of a rank, sent together with the descriptor of its shared memory.

    Raises:
        UsageError: If a value is out of range.
    """

    rank: int  #: Number of the rank in the job; messages and errors name it
    #: The GPU as `open_gpu` takes it. The controller runs in the environment of the rank that
    #: started it.
    gpu: str
    control: Control  #: What the rank's values set
    launcher: int | None  #: Process whose end ends the job; None or 0 if no launcher is visible

    def __post_init__(self) -> None:
        if self.rank < 0 or (self.launcher or 0) < 0:
            raise UsageError(
                f"rank {self.rank} with launcher {self.launcher}: give whole numbers of 0 or more"
            )
        if self.control not in get_args(Control):
            raise UsageError(
                f"{self.control!r} is not a control; choose one of: {', '.join(get_args(Control))}"
            )


class DetachRequest(Message, frozen=True):
    """The last message of a rank: reset its GPU."""


class AttachReply(Message, frozen=True):
    """The controller holds the rank's GPU; the fields are its `text`, `uuid`, `name` and
    `origin`.
    """

    gpu: str
    uuid: str
    name: str
    origin: str


class AttachRefusal(Message, frozen=True):
    """The controller does not set the rank's GPU; `error` is the name of a class in errors.py."""

    error: str
    text: str


class ControlChange(Message, frozen=True):
    """The controller has set the rank's GPU."""

    #: Position in the rank's program for which the value was first requested; None for a reset.
    position: int | None
    value: int  #: MHz or watts; 0 if the GPU was reset
    seen_ns: int  #: When the controller saw the request
    begun_ns: int  #: When the call that set the GPU began
    ended_ns: int  #: When that call returned
    #: Achieved clock right before the call; None if the GPU does not report it.
    before_mhz: int | None


class GpuSample(Message, frozen=True):
    """Readings of the rank's GPU, sent when the rank attaches, when an iteration begins, and when
    it detaches.

    A reading that the GPU does not offer is None.
    """

    seen_ns: int  #: When the controller saw that the iteration began
    now_ns: int  #: When the energy was read, which is the first reading taken
    energy_j: float | None  #: Energy counter in joules; only differences are meaningful
    clock_mhz: int | None  #: Achieved clock
    power_w: float | None  #: Power in watts
    temperature_c: float | None  #: Core temperature in degrees Celsius
    #: Throttle reason -> seconds for which it has held; only differences are meaningful.
    throttled_s: dict[str, float]
    #: How many requested changes were replaced by a later request before they could be made.
    overtaken: int
    dropped: int  #: How many messages were dropped because the rank had not read earlier ones
    #: Power limit in watts that something else than the planner has set below the GPU's default;
    #: None if there is none.
    site_limit_w: float | None
    #: Energy in joules by the power sensor, which is read at times of chance; only differences are
    #: meaningful.
    sensor_j: float | None = None


class ControlFailure(Message, frozen=True):
    """The controller has reset the rank's GPU as far as it could and does not set it for now;
    `text` says why.
    """

    text: str


class Overload(Message, frozen=True):
    """More than half of the last changes of the rank's GPU were overtaken; `kept` of an
    iteration's could be made.
    """

    kept: int


class ClockOverridden(Message, frozen=True):
    """Another program sets a clock of the rank's GPU, too."""

    clock: str  #: Which one, "SM" or "memory"
    text: str  #: How that shows, and what to do


class ControlResumed(Message, frozen=True):
    """The controller sets the rank's GPU again, after a failure."""


class DetachReply(Message, frozen=True):
    """The rank is detached; `problem` says why its GPU could not be reset, or is None."""

    problem: str | None


FromRank: TypeAlias = AttachRequest | DetachRequest
ToRank: TypeAlias = (
    AttachReply
    | AttachRefusal
    | ControlChange
    | GpuSample
    | ControlFailure
    | ClockOverridden
    | ControlResumed
    | Overload
    | DetachReply
)
AnyMessage: TypeAlias = FromRank | ToRank


_TABLES = 4  #: that are kept, as the device may be iterations behind
_WORDS = 4096  #: of 8 bytes, for each table
_HEADER = 3  #: words: number of the table, rows, and entries of a row
_NUMBERS = 0xFFFF  #: of tables, as many as a request can name

LATEST_BYTES = 8 * _TABLES * _WORDS
"""Size of the memory for `LatestStarts`."""


class LatestStarts:
    """The tables of one rank.

    The tables lie in the memory that both share. Each has a number, which comes with the requests
    of the iteration that it is for, so that neither needs a message, nor the training thread.

    A row is that of a computation: the clock that is planned (MHz or watts) and faster ones,
    slowest first, each with its latest start, in nanoseconds after the rank's first computation of
    the iteration has begun.

    Args:
        memory: `LATEST_BYTES` that rank and controller share.
    """

    MOST_ROWS = (_WORDS - _HEADER) // 2
    """Most rows of a table, of one clock each."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    def write(self, iteration: int, rows: Sequence[Row]) -> int:
        """Write the table of an iteration, over an old one.

        Of rows that are too long for the memory, the planned clock and the fastest ones stay.

        Returns:
            Its number, for `marks.clock_request`; 0 if there are so many computations that there is
            no room.
        """
        # So many entries of a row as fit, the same for all rows.
        most = (_WORDS - _HEADER) // (2 * len(rows))
        if most < 1:
            return 0
        table = self.number_of(iteration)
        width = min(most, max(map(len, rows)))
        words = array("q", (len(rows), width))
        for row in rows:
            # The planned clock and the fastest ones matter most.
            kept = [*row] if len(row) <= width else [row[0], *row[len(row) - width + 1 :]]
            # Short rows repeat their last entry, so that all are equally long.
            kept += kept[-1:] * (width - len(kept))
            words.extend(number for entry in kept for number in entry)
        start = self._start(table)
        self._words[start] = 0  # so that no half of a table is read
        # The content before the number, by which a reader knows that it is whole.
        self._words[start + 1 : start + 1 + len(words)] = memoryview(words)
        self._words[start] = table
        return table

    @staticmethod
    def number_of(iteration: int) -> int:
        """Return the number of the table of an iteration."""
        return 1 + iteration % _NUMBERS

    def clock(self, table: int, position: int, passed_ns: int) -> int | None:
        """Return the slowest clock of a row whose latest start is not over, or its fastest one.

        Args:
            table: Number of the table.
            position: Number of the row.
            passed_ns: Time since the rank's first computation of the iteration has begun.

        Returns:
            None if there is no such table or row.
        """
        place = self._find_row(table, position)
        if place is None:
            return None
        # Entries are ordered by speed, so the first that is still in time is the slowest.
        clock = 0
        for entry in range(place.start, place.stop, 2):
            clock, latest_ns = self._words[entry : entry + 2]
            if latest_ns >= passed_ns:
                break
        return clock if self._is_there(table) and clock > 0 else None

    def row(self, table: int, position: int) -> list[tuple[int, int]] | None:
        """Return a row as it was written, its last entry possibly repeated; None if there is no
        such table or row.
        """
        place = self._find_row(table, position)
        if place is None:
            return None
        entries = self._words[place].tolist()
        if not self._is_there(table):
            return None
        return list(zip(entries[::2], entries[1::2], strict=True))

    def _find_row(self, table: int, position: int) -> slice | None:
        """Return where the words of a row are; None if there is no such table or row."""
        start = self._start(table)
        number, rows, width = self._words[start : start + _HEADER]
        # Another table may be there by now, or half of one.
        if number != table or position >= rows or _HEADER + 2 * rows * width > _WORDS:
            return None
        first = start + _HEADER + 2 * position * width
        return slice(first, first + 2 * width)

    def _is_there(self, table: int) -> bool:
        """Whether the table is still there: it may be written over while it is read."""
        return self._words[self._start(table)] == table

    @staticmethod
    def _start(table: int) -> int:
        return table % _TABLES * _WORDS


class SharedRequest:
    """Memory that a rank and the controller share: the clock request, a sign of life of the
    controller, and latest starts.

    The two numbers lie in different cache lines, so neither writer slows the other down. The memory
    has no name in a file system, so a process that dies leaves nothing behind. It is unmapped when
    nothing refers to it any more.

    Attributes:
        memory: All of the mapped memory.
        request: What the rank wants now, one unsigned 64-bit number as `marks.clock_request` packs
            it; written by the rank or by its GPU.
        alive_ns: When the controller was last alive, one unsigned 64-bit number; written by the
            controller.
        latest: By what a rank that is late gets faster clocks; written by the rank.

    Args:
        descriptor: Descriptor of the memory; the caller may close it afterwards.
    """

    SIZE = mmap.PAGESIZE + LATEST_BYTES

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, self.SIZE)
        self.request = memoryview(self.memory)[0:8].cast("Q")
        self.alive_ns = memoryview(self.memory)[64:72].cast("Q")
        self.latest = LatestStarts(memoryview(self.memory)[mmap.PAGESIZE :])

    @classmethod
    def receive(cls, descriptor: int) -> SharedRequest:
        """Map the memory behind a descriptor that a rank sent, and close the descriptor.

        Raises:
            ValueError: If it cannot be mapped, or could shrink, which would kill whoever reads it
                afterwards.
        """
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("its shared memory can be made smaller")
            return cls(descriptor)
        except OSError as error:
            raise ValueError(f"its shared memory cannot be used: {error.strerror}") from None
        finally:
            os.close(descriptor)


def create_shared_memory() -> int:
    """Return a descriptor of new memory for a `SharedRequest`, all zeros and unable to shrink;
    the caller closes it.
    """
    descriptor = os.memfd_create("perseus-planner", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SharedRequest.SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Credentials(NamedTuple):
    """Process and user at the other end of a socket, as the kernel reports them."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Credentials:
        """Return who connected to this socket, or who listens on it."""
        layout = struct.Struct("3i")
        pid, uid, _ = layout.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
        )
        return cls(pid, uid)

    def is_same_user(self) -> bool:
        """Whether the other process runs as the user of this one."""
        return self.uid == os.geteuid()


def new_address() -> str:
    """Return an unused address for a controller."""
    return f"perseus-planner-{secrets.token_hex(16)}"


def socket_name(address: str) -> str:
    """Return the name to which a socket with this address is bound, in the kernel's abstract
    namespace.
    """
    return f"\0{address}"


_TIMEOUT_NS = 10_000_000_000  #: from connecting to the attach request
_MAX_PENDING = 64


class NewRank(NamedTuple):
    """A rank that has sent its attach request."""

    channel: PacketChannel  #: Connection to the rank
    attach_request: AttachRequest  #: What it sent
    shared: SharedRequest  #: Memory in which it writes its clock request
    pid: int  #: Its process


class Handshakes:
    """Accepts connections and waits for their attach requests.

    Attributes:
        address: What ranks connect to.
    """

    def __init__(self) -> None:
        self.address = new_address()
        self._listener = socket.socket(socket.AF_UNIX, SOCKET_KIND)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(_MAX_PENDING)
        self._listener.setblocking(False)
        self._pending: dict[PacketChannel, tuple[int, int]] = {}  #: pid, and when it connected

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when `serve` has something to do."""
        return [self._listener.fileno(), *(channel.fileno() for channel in self._pending)]

    def serve(self, ready: Set[int], now_ns: int) -> list[NewRank]:
        """Return the ranks whose attach request has arrived; `ready` are the readable
        descriptors.
        """
        received = [
            self._receive(channel) for channel in list(self._pending) if channel.fileno() in ready
        ]
        # A process that connects and says nothing must not keep a place.
        for channel, (_, since_ns) in list(self._pending.items()):
            if now_ns - since_ns > _TIMEOUT_NS:
                self._reject(channel, "it has not sent an attach request")
        if self._listener.fileno() in ready:
            # As many as may wait; the rest is accepted in the next turn.
            for _ in range(_MAX_PENDING):
                if not self._accept(now_ns):
                    break
        return [rank for rank in received if rank is not None]

    def close(self) -> None:
        """Stop listening, and close connections that have not sent their attach request."""
        self._listener.close()
        for channel in self._pending:
            channel.close()

    def _accept(self, now_ns: int) -> bool:
        """Accept one connection; return False if none is waiting."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        peer = Credentials.of(connection)
        # Other users must not have this user's GPUs set.
        if peer.is_same_user() and len(self._pending) < _MAX_PENDING:
            self._pending[PacketChannel(connection, AnyMessage)] = (peer.pid, now_ns)
        else:
            connection.close()
        return True

    def _receive(self, channel: PacketChannel) -> NewRank | None:
        try:
            received = channel.receive()
            if received is None:
                return None
            pid, _ = self._pending[channel]
            rank = _new_rank(channel, pid, *received)
        except EOFError:
            del self._pending[channel]
            channel.close()
            return None
        except ValueError as error:
            self._reject(channel, str(error))
            return None
        del self._pending[channel]
        return rank

    def _reject(self, channel: PacketChannel, reason: str) -> None:
        del self._pending[channel]
        text = f"the clock controller does not understand this process: {reason}"
        with suppress(EOFError):
            channel.send(AttachRefusal(GpuError.__name__, text))
        channel.close()


def _new_rank(
    channel: PacketChannel, pid: int, message: Message, descriptor: int | None
) -> NewRank:
    """Return the rank that has sent this message first.

    Raises:
        ValueError: If it is not an attach request, came without memory, or the process is not
            visible here.
    """
    if isinstance(message, AttachRequest) and descriptor is not None and pid > 0:
        return NewRank(channel, message, SharedRequest.receive(descriptor), pid)
    # A descriptor that nobody wants is closed here, or it would stay open.
    if descriptor is not None:
        os.close(descriptor)
    raise ValueError("a rank sends an attach request and its memory first, from a visible process")
