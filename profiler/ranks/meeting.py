"""Ranks that profile a pipeline together, through the store of their torch.distributed process group.

Each stage is measured by the ranks that hold it, all stages at once. The ranks of one stage (tensor parallelism) go in
step; the stages do not wait for each other before the end. Whatever ends one rank ends all: an error is told to the
others through the store, and a rank that shows no sign of life for a time is taken for dead.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.errors import EndedElsewhere, PlannerError, RankError, UsageError
from perseus_planner.training.microbatch import described

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import Store

T = TypeVar("T")

TIMEOUT_S = 120.0
"""After how long without a sign of life a rank is taken for dead, seconds."""
# Between two signs of life, and between two looks whether the others live.
_BEAT_S = 0.25
# For how long a rank that leaves stays for the others to have heard what was said last: it may hold the store.
_FAREWELL_S = 2.0
# Between two looks whether the others' values are there, at most.
_LONGEST_PAUSE_S = 0.05
_sessions = count()


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a pipeline of `stages`, each on `tensor_parallel` GPUs; all from 0."""

    stage: int
    stages: int
    tensor_rank: int = 0
    tensor_parallel: int = 1


def place_of(rank: int, world: int, stages: int, tensor_parallel: int) -> Place:
    """Where `rank` of `world` stands: stage by stage, the ranks of a stage next to each other.

    Raises:
        UsageError: there are not as many ranks as GPUs in the pipeline.
    """
    if world != stages * tensor_parallel:
        raise UsageError(
            f"{stages} stages on {tensor_parallel} GPU{'s' * (tensor_parallel != 1)} each are "
            f"{stages * tensor_parallel} ranks, and there are {world}; start as many, of one pipeline only"
        )
    return Place(rank // tensor_parallel, stages, rank % tensor_parallel, tensor_parallel)


@contextmanager
def process_group() -> Iterator[tuple[int, int] | None]:
    """This rank and the number of ranks, inside torch's process group; None where this process is not one of several.

    A group that is there is used; otherwise one is made from what torchrun or the deepspeed launcher left in the
    environment, and destroyed on leaving.

    Raises:
        UsageError: the environment names a rank, but not how to reach the others.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ and not _initialized():
        yield None
        return
    import torch.distributed as dist

    made = not dist.is_initialized()
    if made:
        _make_group()
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if made:
            dist.destroy_process_group()


def local_rank() -> int:
    """The number of this rank on its node, 0 where no launcher says it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _initialized() -> bool:
    import sys

    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _make_group() -> None:
    import torch
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"the environment has a rank but no {' and no '.join(missing)}; start with torchrun, or unset RANK and "
            "WORLD_SIZE to profile in one process"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    try:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the ranks cannot reach each other: {described(error)}") from error


class Meeting:
    """All ranks of a process group; a context manager that every rank enters, and that ends all if one ends badly.

    Args:
        timeout_s: after how long without a sign of life a rank is taken for dead, seconds.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store: Store = dist.PrefixStore(f"perseus-planner/{next(_sessions)}", _get_default_store())
        self._timeout_s = timeout_s
        self._turns: Counter[str] = Counter()
        self._seen = [(b"", time.monotonic())] * self.size
        self._looked_s = 0.0
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="perseus-planner signs of life")

    def __enter__(self) -> Meeting:
        self._beating.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self._left.set()
        self._beating.join()
        if error is None:
            self._take_leave()
            return
        text = f"rank {self.rank} has ended: {_said(error)}"
        first = isinstance(error, RankError) or self._is_first_to_end(text)
        self._take_leave()
        if not first and isinstance(error, PlannerError):
            raise EndedElsewhere(text) from error

    def gathered(self, value: T, ranks: Sequence[int] | None = None) -> list[T]:
        """The values of all of `ranks`, which each call this, in their order; of all there are where None.

        Raises:
            RankError: another rank has ended, or is dead.
        """
        ranks = range(self.size) if ranks is None else ranks
        name = ",".join(map(str, ranks))
        turn = self._turns[name] = self._turns[name] + 1
        with self._reachable():
            self.store.set(f"{name}/{turn}/{self.rank}", pickle.dumps(value))
            keys = [f"{name}/{turn}/{rank}" for rank in ranks]
            self._await(keys)
            values = [pickle.loads(self.store.get(key)) for key in keys]
            # Who has come to this turn has read all of the one before.
            self.store.delete_key(f"{name}/{turn - 1}/{self.rank}")
        return values

    def check(self) -> None:
        """Whether all others are well.

        Raises:
            RankError: another rank has ended, or is dead.
        """
        if time.monotonic() - self._looked_s < _BEAT_S:
            return
        self._looked_s = time.monotonic()
        with self._reachable():
            if self.store.check(["ended"]):
                raise EndedElsewhere(self.store.get("ended").decode().partition(" ")[2])
            for rank in range(self.size):
                self._check_alive(rank)

    def ended(self, text: str) -> RankError:
        """The error to raise when another rank turns out to have ended: only the first to notice says `text`."""
        return RankError(text) if self._is_first_to_end(text) else EndedElsewhere(text)

    def _check_alive(self, rank: int) -> None:
        key, now_s = f"alive/{rank}", time.monotonic()
        sign = self.store.get(key) if self.store.check([key]) else b""
        last, seen_s = self._seen[rank]
        if sign != last:
            self._seen[rank] = (sign, now_s)
        elif now_s - seen_s > self._timeout_s:
            text = f"rank {rank} has shown no sign of life for {self._timeout_s:.6g} s; see why it ended, and resume"
            raise self.ended(text)

    def _await(self, keys: list[str]) -> None:
        # The store's own wait holds its connection, and torch logs each time that it gives up.
        pause_s = 1e-3
        while not self.store.check(keys):
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_first_to_end(self, text: str) -> bool:
        """Tell the others."""
        with suppress(RuntimeError):  # who holds the store may be gone already
            mine = f"{self.rank} {text}"
            return bool(self.store.compare_set("ended", "", mine).decode() == mine)
        return True

    def _take_leave(self) -> None:
        """Stay until the others have come to the end too, or for a while where one of them never will."""
        until_s = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):  # who holds the store may be gone already
            self.store.set(f"heard/{self.rank}", "")
            everyone = [f"heard/{rank}" for rank in range(self.size)]
            while not self.store.check(everyone) and time.monotonic() < until_s:
                time.sleep(_LONGEST_PAUSE_S)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except PlannerError:
            raise
        except RuntimeError as error:
            raise RankError("the rank that the others meet at has ended; see why, and resume") from error

    def _beat(self) -> None:
        for beat in count():
            with suppress(RuntimeError):
                self.store.set(f"alive/{self.rank}", str(beat))
            if self._left.wait(_BEAT_S):
                return


def _said(error: BaseException) -> str:
    if isinstance(error, PlannerError):
        return str(error)
    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else described(error)


class StageGroup:
    """The ranks that share a stage, as the `Group` in which they measure.

    Args:
        meeting: of all ranks.
        ranks: those of the stage, in the order of their tensor ranks; this one is among them.
    """

    def __init__(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        self._meeting, self._ranks = meeting, tuple(ranks)

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self._ranks)

    def gathered(self, value: T) -> list[T]:
        """Everyone's `value`, in the order of tensor ranks.

        Raises:
            RankError: another rank has ended, or is dead.
        """
        return self._meeting.gathered(value, self._ranks)
