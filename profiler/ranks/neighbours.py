"""A rank that is really blocked on a receive, because its neighbour in the pipeline holds the message back."""

from __future__ import annotations

import pickle
import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perseus_planner.profiler.ranks.meeting import Meeting

# Between two looks for who asks.
_LOOK_S = 0.02


def neighbours(pipelines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Rank -> the one whose messages it waits for: the next stage's, of the last stage the one before.

    Args:
        pipelines: ranks from the first stage to the last, of each tensor rank. A pipeline of one rank has none.
    """
    pairs: dict[int, int] = {}
    for ranks in pipelines:
        if len(ranks) > 1:
            pairs |= dict(zip(ranks, [*ranks[1:], ranks[-2]], strict=True))
    return pairs


class Neighbour:
    """What this rank waits for, and holds back for others.

    A rank asks its neighbour for a message after so long, and blocks in `torch.distributed.recv` until it comes. The
    neighbour sends it from a thread, so that no rank has to leave its own measurements for another's.
    """

    def __init__(self, meeting: Meeting, pairs: Mapping[int, int], channels: Mapping[int, Any], device: Any) -> None:
        self._meeting, self._pairs, self._channels, self._device = meeting, pairs, channels, device
        self._stopped = threading.Event()
        self._serving = threading.Thread(target=self._serve, daemon=True, name="perseus-planner messages")

    @property
    def exists(self) -> bool:
        """Whether this rank has a neighbour."""
        return self._meeting.rank in self._pairs

    def block(self, duration_s: float) -> None:
        """Wait in a receive for a message that comes after `duration_s` seconds, or somewhat more.

        Raises:
            RankError: it does not come.
        """
        import torch
        import torch.distributed as dist

        rank, sender = self._meeting.rank, self._pairs[self._meeting.rank]
        try:
            turn = self._meeting.store.add(f"asked/{sender}", 1)
            self._meeting.store.set(f"message/{sender}/{turn}", pickle.dumps((rank, duration_s)))
            dist.recv(torch.empty(1, device=self._device), sender, self._channels[rank])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            text = f"rank {sender} has not sent the message that was asked for; see why it ended, and resume"
            raise self._meeting.ended(text) from error

    def start(self) -> None:
        """Send what others ask for, from now on."""
        self._serving.start()

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped.set()
        self._serving.join()

    def _serve(self) -> None:
        for turn in count(1):
            key = f"message/{self._meeting.rank}/{turn}"
            try:
                while not self._meeting.store.check([key]):
                    if self._stopped.wait(_LOOK_S):
                        return
                asker, duration_s = pickle.loads(self._meeting.store.get(key))
                self._meeting.store.delete_key(key)
                self._send(asker, duration_s)
            except RuntimeError:
                return  # the store, or who asked, is gone: all others learn that where they wait

    def _send(self, asker: int, duration_s: float) -> None:
        import torch
        import torch.distributed as dist

        self._stopped.wait(duration_s)
        dist.send(torch.zeros(1, device=self._device), asker, self._channels[asker])


@contextmanager
def connected(meeting: Meeting, pipelines: Sequence[Sequence[int]], device: Any) -> Iterator[Neighbour]:
    """The neighbour of this rank, with channels of their own between neighbours; all ranks enter and leave together.

    Args:
        meeting: of all ranks.
        pipelines: as in `neighbours`.
        device: this rank's torch device; messages go by NCCL where it is a CUDA device, else by gloo.

    Raises:
        RankError: another rank has ended.
    """
    import torch.distributed as dist

    pairs = neighbours(pipelines)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # One for each direction: on one channel, two neighbours that wait for each other would wait for ever.
    channels = {rank: dist.new_group([rank, sender], backend=backend) for rank, sender in pairs.items()}
    neighbour = Neighbour(meeting, pairs, channels, device)
    neighbour.start()
    try:
        if neighbour.exists:
            neighbour.block(0.0)  # the first message makes the connection
        yield neighbour
        meeting.gathered(None)  # until then, others may wait for a message of this one
    finally:
        neighbour.stop()
        for ranks in channels.values():
            if ranks != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(ranks)
