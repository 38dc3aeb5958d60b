"""The newest plan of a node, in memory that its ranks share: one of them asks the job's store,
the others read here.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from perseus_planner.runtime.switching.shared_state import AgreedState

_HEADER = struct.Struct("<QqQ")  #: version, since, and how many bytes the plan has
_CHECKSUM = struct.Struct("<I")  #: of header and plan, so that half a plan is not taken for one


class NodePlans:
    """Memory with the newest plan of a node. It has no name in a file system, so that no death
    leaves it behind.

    Args:
        descriptor: Descriptor of the memory, which belongs to this object from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> NodePlans:
        """Return new memory, without a plan."""
        return cls(os.memfd_create("perseus-planner-plans", os.MFD_CLOEXEC))

    @classmethod
    def open(cls, address: str) -> NodePlans:
        """Return the memory at the address that its creator gave.

        Raises:
            OSError: If it cannot be opened, for example because its creator has ended.
        """
        return cls(os.open(f"/proc/{address}", os.O_RDONLY | os.O_CLOEXEC))

    @property
    def address(self) -> str:
        """Where other processes of this user on this node find the memory while this process
        lives.
        """
        return f"{os.getpid()}/fd/{self._descriptor}"

    def write(self, state: AgreedState, plan: bytes) -> None:
        """Replace the plan."""
        content = _HEADER.pack(state.version, state.since, len(plan)) + plan
        os.pwrite(self._descriptor, _CHECKSUM.pack(zlib.crc32(content)) + content, 0)

    def read(self, after: int) -> tuple[AgreedState, bytes] | None:
        """Return a plan that is newer than version `after`; None if there is none, or it is
        being written.
        """
        start = _CHECKSUM.size + _HEADER.size
        head = os.pread(self._descriptor, start, 0)
        if len(head) < start:
            return None
        version, since, size = _HEADER.unpack_from(head, _CHECKSUM.size)
        if version <= after:
            return None
        plan = os.pread(self._descriptor, size, start)
        is_whole = _CHECKSUM.unpack_from(head) == (zlib.crc32(head[_CHECKSUM.size :] + plan),)
        return (AgreedState(version, since), plan) if is_whole else None

    def close(self) -> None:
        """Close the memory; the other ranks may still read it."""
        os.close(self._descriptor)


@dataclass(frozen=True)
class NodeShare:
    """This rank's part in the looks of its node."""

    nodes: int = 1  #: Number of nodes of the job
    #: Whether this rank looks at the job's store; otherwise another one of its node does.
    looks: bool = True
    #: What it shares with the other ranks of its node; None if it shares nothing.
    plans: NodePlans | None = None
