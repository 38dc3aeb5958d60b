"""Messages between ranks of neighbouring stages that block a rank on a receive, as in training,
because its neighbour delays them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from perseus_planner.base.loops import Loop

if TYPE_CHECKING:
    from perseus_planner.profiler.ranks.group import RankGroup

LIMIT_S = 60.0
"""A message may come this much later than it was asked for, seconds; its sender may be sending
another one first.
"""

_POLL_S = 0.02
_POLL_MESSAGE_S = 1e-3
_NUMBERS = 4 * 2**20  # float32 numbers in a message that is timed


def neighbours(pipelines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return rank -> the rank whose messages it waits for: the next stage's; for the last stage the
    one before.

    Args:
        pipelines: For each tensor rank of each replica, the ranks from the first stage to the
            last. A rank alone has no neighbour.
    """
    pairs: dict[int, int] = {}
    for ranks in pipelines:
        if len(ranks) > 1:
            pairs |= dict(zip(ranks, [*ranks[1:], ranks[-2]], strict=True))
    return pairs


class Neighbour:
    """The messages that this rank waits for, and those that it sends to others after a delay.

    A rank asks its neighbour for a message after a given time, and its GPU blocks in a receive
    until it comes. The neighbour sends it from a thread, so no rank interrupts its own measurements
    for another's.

    Two ranks may block on each other at once. So on a GPU nothing that a send needs may be queued
    behind a receive: the thread has a stream of its own, and messages are awaited on the host, as a
    stream that waits would also hold up the other streams if they share one queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-core sets it).
    """

    def __init__(
        self, group: RankGroup, pairs: Mapping[int, int], channels: Mapping[int, Any], device: Any
    ) -> None:
        self._group = group
        self._pairs = pairs
        self._channels = channels
        self._device = device
        # When it fails, the store or the receiver has ended: all notice it where they wait.
        self._sender = Loop(
            self._send_messages(), "perseus-planner messages", on_error=lambda _: None
        )

    @property
    def exists(self) -> bool:
        """Whether this rank has a neighbour."""
        return self._group.rank in self._pairs

    def block(self, duration_s: float) -> None:
        """Block in a receive until a message comes, after `duration_s` seconds or slightly more.

        Raises:
            RankError: If it does not come, or another rank has ended.
        """
        import torch
        import torch.distributed as dist

        rank = self._group.rank
        sender = self._pairs[self._group.rank]
        # The sender may be sending another message first.
        limit_s = duration_s + LIMIT_S
        try:
            # The store counts requests, so those of several ranks to one sender have an order.
            turn = self._group.store.add(f"asked/{sender}", 1)
            self._group.store.set(f"message/{sender}/{turn}", pickle.dumps((rank, duration_s)))
            message = torch.empty(1, device=self._device)
            work = dist.irecv(message, sender, self._channels[rank])
            self._await(work, limit_s)
        except TimeoutError:
            raise self._group.rank_error(
                f"rank {sender} is alive, but a message that rank {rank} waits for has not come "
                f"within {limit_s:.6g} s; see with NCCL_DEBUG=INFO whether their GPUs can reach "
                "each other, or give --blocking-power W (in Python blocking_power_w=), which "
                "needs no messages",
                has_lost=False,
            ) from None
        except RuntimeError as error:
            text = (
                f"rank {sender} has not sent the message that rank {rank} waits for; see why it "
                "ended, and resume"
            )
            raise self._group.rank_error(text) from error

    def start(self) -> None:
        """Start to send the messages that others ask for."""
        self._sender.start()

    def stop(self) -> None:
        """Stop sending."""
        self._sender.stop()

    def _await(self, work: Any, limit_s: float) -> None:
        """Wait on the host until a message has come.

        Raises:
            TimeoutError: If that takes longer than `limit_s`.
        """
        if self._device.type != "cuda":
            work.wait(timedelta(seconds=limit_s))
            return
        until_s = time.monotonic() + limit_s
        # Polled on the host: a stream that waits may hold up all others.
        while not work.is_completed():
            self._group.check()
            if time.monotonic() > until_s:
                raise TimeoutError
            time.sleep(_POLL_MESSAGE_S)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        import torch

        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def _send_messages(self) -> Generator[float]:
        """Send each message that others ask for; yield the seconds until it goes on."""
        import torch
        import torch.distributed as dist

        with self._own_stream():
            for turn in count(1):
                key = f"message/{self._group.rank}/{turn}"
                while not self._group.store.check([key]):
                    yield _POLL_S
                receiver, duration_s = pickle.loads(self._group.store.get(key))
                self._group.store.delete_key(key)
                # This delay is what the other rank is blocked for.
                yield duration_s
                message = torch.zeros(1, device=self._device)
                work = dist.isend(message, receiver, self._channels[receiver])
                if self._device.type != "cuda":
                    work.wait(timedelta(seconds=LIMIT_S))
                while not work.is_completed():
                    yield _POLL_MESSAGE_S


@contextmanager
def connect_neighbour(
    group: RankGroup, pipelines: Sequence[Sequence[int]], device: Any
) -> Iterator[Neighbour]:
    """Yield the neighbour of this rank, with process groups for these messages; all ranks enter and
    leave together.

    Args:
        group: All ranks.
        pipelines: As in `neighbours`.
        device: This rank's torch device. Messages go by NCCL if it is a CUDA device, else by gloo.

    Raises:
        RankError: If another rank has ended.
    """
    import torch.distributed as dist

    pairs = neighbours(pipelines)
    group.gather(None)  # a rank that has ended before would leave the others in `new_group`
    backend = "nccl" if device.type == "cuda" else "gloo"
    # In each of them a rank has one other rank to receive from or to send to: where one message
    # waits behind another, neighbours that wait for each other would never stop waiting.
    groups = [dist.new_group(backend=backend) for _ in range(3 if pairs else 0)]
    channels = {
        rank: groups[2 if rank == ranks[-1] else number % 2]
        for ranks in pipelines
        for number, rank in enumerate(ranks)
        if rank in pairs
    }
    neighbour = Neighbour(group, pairs, channels, device)
    neighbour.start()
    try:
        if neighbour.exists:
            neighbour.block(0.0)  # the first message makes the connection
        yield neighbour
        group.gather(None)  # until here, others may wait for a message of this rank
    except Exception as error:
        group.wait_for_return(error)  # as they may now
        raise
    finally:
        neighbour.stop()
        for channel in groups:
            dist.destroy_process_group(channel)
