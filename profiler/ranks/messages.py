"""Send messages both ways between the ranks of neighbouring stages, and find those that do not
arrive.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.training.microbatch import describe_error

if TYPE_CHECKING:
    import torch

    from perseus_planner.profiler.ranks.group import RankGroup

_NUMBERS = 4 * 2**20  # float32 numbers in a message that is timed


@dataclass(frozen=True)
class Message:
    """A message that this rank received."""

    sender: int  #: The rank that sent it
    size_bytes: int  #: Its size
    time_s: float  #: How long it took, seconds


@dataclass(frozen=True)
class Exchange:
    """What this rank exchanged with its neighbours."""

    received: tuple[Message, ...]  #: The messages that came
    problems: tuple[str, ...]  #: What did not come or go, and what to do
    #: Whether a thread of this process still waits, so that its process group cannot be left in
    #: order.
    is_stuck: bool


def exchange(group: RankGroup, stages: int, device: torch.device, limit_s: float) -> Exchange:
    """Exchange messages with the ranks of the stages before and after. All ranks call this.

    Even stages exchange with the next ones first, then odd ones, so no pair waits for another. A
    pair whose messages did not arrive is left alone, and named by both of its ranks.

    Args:
        group: All ranks; those of a stage are next to each other.
        stages: The number of stages.
        device: This rank's torch device.
        limit_s: How long the messages of one pair may take, seconds.
    """
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    channel = None if dist.get_backend() == backend else dist.new_group(backend=backend)
    distance = group.size // stages
    received: list[Message] = []
    problems: list[str] = []
    stuck: set[int] = set()
    for parity in (0, 1):
        before, after = group.rank - distance, group.rank + distance
        is_first = group.rank // distance % 2 == parity
        other = after if is_first else before
        pair: _Pair | None = None
        if 0 <= other < group.size and group.rank not in stuck:
            if other in stuck:
                problems.append(
                    f"messages with rank {other} were not tried, as another one hangs there"
                )
            else:
                pair = _Pair(group.rank, other, is_first, device, channel, limit_s)
                received += pair.received
                problems += pair.problems
        is_stuck = pair is not None and pair.is_stuck
        stuck |= {rank for rank, each in enumerate(group.gather(is_stuck)) if each}
    return Exchange(tuple(received), tuple(problems), group.rank in stuck)


class _Pair:
    """The messages of two ranks, exchanged by a thread that is left alone when it takes too
    long.
    """

    def __init__(
        self,
        rank: int,
        other: int,
        is_first: bool,
        device: torch.device,
        channel: Any,
        limit_s: float,
    ) -> None:
        self._rank, self._other, self._is_first = rank, other, is_first
        self._device, self._channel = device, channel
        self._awaited = ""  # the message that this rank sends or receives now
        self.received: list[Message] = []
        self.problems: list[str] = []
        thread = threading.Thread(
            target=self._exchange, daemon=True, name="perseus-planner messages"
        )
        thread.start()
        thread.join(limit_s)
        self.is_stuck = thread.is_alive()
        if self.is_stuck:
            self.problems = [
                f"{self._awaited} has not arrived within {limit_s:g} s; see with NCCL_DEBUG=INFO "
                "whether their GPUs can reach each other"
            ]

    def _exchange(self) -> None:
        import torch

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for numbers in (1, _NUMBERS):  # the first ones make the connection
                self.received = []
                for sends in (self._is_first, not self._is_first):
                    self._pass_on(torch.zeros(numbers, device=self._device), sends)
        except RuntimeError as error:
            self.problems.append(
                f"{self._awaited} failed: {describe_error(error)}; see why with NCCL_DEBUG=INFO"
            )

    def _pass_on(self, message: torch.Tensor, sends: bool) -> None:
        import torch
        import torch.distributed as dist

        sender, receiver = (self._rank, self._other) if sends else (self._other, self._rank)
        self._awaited = f"the message from rank {sender} to rank {receiver}"
        begin_s = time.monotonic()
        if sends:
            dist.send(message, receiver, self._channel)
        else:
            dist.recv(message, sender, self._channel)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if not sends:
            self.received.append(Message(sender, message.nbytes, time.monotonic() - begin_s))
