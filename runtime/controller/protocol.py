"""How ranks and the clock controller talk: messages, the socket that carries them, and the memory
that they share.

A message is a frozen dataclass here and one line of JSON on the socket:

    {"message":"ControlChange","position":3,"value":1200,"seen_ns":…,"begun_ns":…,"ended_ns":…,"before_mhz":1410}

All times are nanoseconds of the monotonic clock, which the processes of a node share.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, NoReturn, TypeAlias, get_args

from perseus_planner.base.errors import UsageError
from perseus_planner.base.strict_json import read_fields

MAX_LINE_BYTES = 65536

SOCKET_KIND = socket.SOCK_SEQPACKET
"""A socket that keeps messages apart: a line arrives whole or not at all."""

Control = Literal["clock", "power-limit", "observed"]
"""What the values of a rank set: a clock in MHz, a power limit in watts, or nothing because the
GPU is only read.
"""


@dataclass(frozen=True)
class AttachRequest:
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


@dataclass(frozen=True)
class DetachRequest:
    """The last message of a rank: reset its GPU."""


@dataclass(frozen=True)
class AttachReply:
    """The controller holds the rank's GPU; the fields are its `text`, `uuid`, `name` and
    `origin`.
    """

    gpu: str
    uuid: str
    name: str
    origin: str


@dataclass(frozen=True)
class AttachRefusal:
    """The controller does not set the rank's GPU; `error` is the name of a class in errors.py."""

    error: str
    text: str


@dataclass(frozen=True)
class ControlChange:
    """The controller has set the rank's GPU."""

    #: Position in the rank's program for which the value was first requested; None for a reset.
    position: int | None
    value: int  #: MHz or watts; 0 if the GPU was reset
    seen_ns: int  #: When the controller saw the request
    begun_ns: int  #: When the call that set the GPU began
    ended_ns: int  #: When that call returned
    #: Achieved clock right before the call; None if the GPU does not report it.
    before_mhz: int | None


@dataclass(frozen=True)
class GpuSample:
    """GpuSamples of the rank's GPU, sent when the rank attaches, when an iteration begins, and when
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
    overtaken: int = 0
    dropped: int = 0  #: How many messages were dropped because the rank had not read earlier ones
    #: Power limit in watts that something else than the planner has set below the GPU's default;
    #: None if there is none.
    site_limit_w: float | None = None


@dataclass(frozen=True)
class ControlFailure:
    """The controller has reset the rank's GPU as far as it could and does not set it for now;
    `text` says why.
    """

    text: str


@dataclass(frozen=True)
class Overload:
    """More than half of the last changes of the rank's GPU were overtaken; `kept` of an
    iteration's could be made.
    """

    kept: int


@dataclass(frozen=True)
class ControlResumed:
    """The controller sets the rank's GPU again, after a failure."""


@dataclass(frozen=True)
class DetachReply:
    """The rank is detached; `problem` says why its GPU could not be reset, or is None."""

    problem: str | None


FromRank: TypeAlias = AttachRequest | DetachRequest
ToRank: TypeAlias = (
    AttachReply
    | AttachRefusal
    | ControlChange
    | GpuSample
    | ControlFailure
    | ControlResumed
    | Overload
    | DetachReply
)
Message: TypeAlias = FromRank | ToRank

_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind for kind in (*get_args(FromRank), *get_args(ToRank))
}


def encode(message: Message) -> bytes:
    """Return the message as one line."""
    content = {"message": type(message).__name__, **asdict(message)}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in a line that `encode` wrote.

    Raises:
        ValueError: If the line is not exactly such a message.
    """
    try:
        content = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    kind = _KINDS.get(str(content.pop("message", None))) if isinstance(content, dict) else None
    if kind is None:
        raise ValueError(f"it is not one of {', '.join(_KINDS)}")
    try:
        return read_fields(kind, content)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


class SharedRequest:
    """Memory that a rank and the controller share: the clock request, and a sign of life of the
    controller.

    The two numbers lie in different cache lines, so neither writer slows the other down. The memory
    has no name in a file system, so a process that dies leaves nothing behind. It is unmapped when
    nothing refers to it any more.

    Attributes:
        memory: All of the mapped memory.
        request: What the rank wants now, one unsigned 64-bit number as `marks.clock_request` packs
            it; written by the rank or by its GPU.
        alive_ns: When the controller was last alive, one unsigned 64-bit number; written by the
            controller.

    Args:
        descriptor: Descriptor of the memory; the caller may close it afterwards.
    """

    SIZE = mmap.PAGESIZE

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, self.SIZE)
        self.request = memoryview(self.memory)[0:8].cast("Q")
        self.alive_ns = memoryview(self.memory)[64:72].cast("Q")

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


def _received_message(line: bytes, flags: int) -> Message:
    if not line:
        raise EOFError
    if flags & socket.MSG_TRUNC:
        raise ValueError(f"it has more than {MAX_LINE_BYTES} bytes")
    return decode(line)


class Channel:
    """One end of a connection between a rank and the controller; no method waits for the other
    end.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._connection.fileno()

    def send(self, message: Message, descriptor: int | None = None) -> bool:
        """Send a message, with a descriptor if one is given.

        Returns:
            False if the other end has to read earlier messages first; the message is not sent then.

        Raises:
            EOFError: If the other end is closed.
        """
        try:
            socket.send_fds(
                self._connection, [encode(message)], [] if descriptor is None else [descriptor]
            )
        except BlockingIOError:
            return False
        except OSError:
            raise EOFError from None
        return True

    def receive(self) -> tuple[Message, int | None] | None:
        """Return the next message and the descriptor sent with it, which the caller closes; None if
        there is none.

        Raises:
            ValueError: If what arrived is not a message.
            EOFError: If the other end is closed and all its messages were returned.
        """
        try:
            line, descriptors, flags, _ = socket.recv_fds(
                self._connection, MAX_LINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        try:
            return _received_message(line, flags), descriptors[0] if descriptors else None
        except BaseException:
            for each in descriptors:
                os.close(each)
            raise

    def close(self) -> None:
        """Close this end; may be repeated."""
        with suppress(OSError):
            self._connection.close()
