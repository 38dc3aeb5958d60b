"""Ranks that profile a pipeline together, coordinated through the store of their torch.distributed
process group.

Each stage is measured by the ranks that hold it, all stages at once. The ranks of one stage (tensor
parallelism) measure in step; different stages wait for each other only at the end. If one rank
ends, all end: the store carries its error to the others, and a rank without a heartbeat for some
time is presumed dead.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import EndedElsewhere, PlannerError, RankError, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.engines.microbatch import describe_error

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

TIMEOUT_S = 120.0
"""A rank without a heartbeat for this long is presumed dead, seconds."""

_HEARTBEAT_S = 0.25  # between two heartbeats, and between two checks of the others'
# how long a leaving rank, which may hold the store, waits for the others to read the last message
_LEAVE_S = 2.0
_MAX_POLL_S = 0.05
_sessions = count()


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank in a pipeline of `stages`, each on `tensor_parallel` GPUs; both
    ranks count from 0.
    """

    stage: int
    stages: int
    tensor_rank: int = 0
    tensor_parallel: int = 1


def position_of(rank: int, world: int, stages: int, tensor_parallel: int) -> RankPosition:
    """Return the position of `rank` among `world`: stage by stage, with the ranks of a stage next
    to each other.

    Raises:
        UsageError: If there are not as many ranks as GPUs in the pipeline.
    """
    if world != stages * tensor_parallel:
        raise UsageError(
            f"{stages} stages on {tensor_parallel} GPU{'s' * (tensor_parallel != 1)} each need "
            f"{stages * tensor_parallel} ranks, but there are {world}; start "
            f"{stages * tensor_parallel} ranks, of one pipeline only"
        )
    return RankPosition(rank // tensor_parallel, stages, rank % tensor_parallel, tensor_parallel)


@contextmanager
def process_group() -> Iterator[tuple[int, int] | None]:
    """Yield this rank and the number of ranks, inside torch's process group; None if this process
    is not a rank.

    An existing group is used. Otherwise one is made from the environment that torchrun or the
    deepspeed launcher set, and destroyed on leaving.

    Raises:
        UsageError: If the environment names a rank, but not how to reach the others.
        RankError: If the ranks cannot reach each other.
    """
    is_started = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if not is_started and "torch.distributed" not in sys.modules:
        yield None
        return
    import torch.distributed as dist

    if not is_started and not (dist.is_available() and dist.is_initialized()):
        yield None
        return
    make = not dist.is_initialized()
    if make:
        _init_process_group()
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if make:
            dist.destroy_process_group()


def local_rank() -> int:
    """Return the number of this rank on its node; 0 if no launcher has set it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _init_process_group() -> None:
    import torch
    import torch.distributed as dist

    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise UsageError(
            f"the environment has a rank but no {' and no '.join(missing)}; start with torchrun, "
            "or unset RANK and WORLD_SIZE to profile in one process"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    try:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the ranks cannot reach each other: {describe_error(error)}") from error


class RankGroup:
    """All ranks of a process group; a context manager that every rank enters. If one leaves by an
    error, all do.

    Args:
        timeout_s: A rank without a heartbeat for this long is presumed dead, seconds.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store: Store = dist.PrefixStore(
            f"perseus-planner/{next(_sessions)}", _get_default_store()
        )
        self._timeout_s = timeout_s
        self._turns: Counter[str] = Counter()
        # The last one of each rank, and when it was new.
        self._heartbeats = [(b"", time.monotonic())] * self.size
        self._checked_s = 0.0
        self._beats = count()
        self._heart = Loop(self._beat, "perseus-planner heartbeat", _HEARTBEAT_S)

    def __enter__(self) -> RankGroup:
        self._heart.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self._heart.stop()
        if error is None:
            self._wait_for_others()
            return
        text = f"rank {self.rank} has ended: {_reason(error)}"
        first = isinstance(error, RankError) or self._report_end(text)
        self._wait_for_others()
        if not first and isinstance(error, PlannerError):
            raise EndedElsewhere(text) from error

    def gather(self, value: T, ranks: Sequence[int] | None = None) -> list[T]:
        """Return the values of all of `ranks`, each of which calls this, in their order; of all
        ranks if None.

        Raises:
            RankError: If another rank has ended, or is presumed dead.
        """
        ranks = range(self.size) if ranks is None else ranks
        name = ",".join(map(str, ranks))
        turn = self._turns[name] = self._turns[name] + 1
        with self._reachable_store():
            self.store.set(f"{name}/{turn}/{self.rank}", pickle.dumps(value))
            keys = [f"{name}/{turn}/{rank}" for rank in ranks]
            self._wait_for(keys)
            values = [pickle.loads(self.store.get(key)) for key in keys]
            # A rank that has reached this turn has read all values of the one before.
            self.store.delete_key(f"{name}/{turn - 1}/{self.rank}")
        return values

    def check(self) -> None:
        """Raise an error unless all other ranks are alive.

        Raises:
            RankError: If another rank has ended, or is presumed dead.
        """
        if time.monotonic() - self._checked_s < _HEARTBEAT_S:
            return
        self._checked_s = time.monotonic()
        with self._reachable_store():
            if self.store.check(["ended"]):
                raise EndedElsewhere(self.store.get("ended").decode().partition(" ")[2])
            for rank in range(self.size):
                self._check_heartbeat(rank)

    def rank_error(self, text: str) -> RankError:
        """Return the error to raise when another rank has ended; only the first rank to notice
        reports `text`.
        """
        return RankError(text) if self._report_end(text) else EndedElsewhere(text)

    def _check_heartbeat(self, rank: int) -> None:
        key, now_s = f"alive/{rank}", time.monotonic()
        beat = self.store.get(key) if self.store.check([key]) else b""
        last, since_s = self._heartbeats[rank]
        if beat != last:
            self._heartbeats[rank] = (beat, now_s)
        elif now_s - since_s > self._timeout_s:
            text = (
                f"rank {rank} has shown no sign of life for {self._timeout_s:.6g} s; see why it "
                "ended, and resume"
            )
            raise self.rank_error(text)

    def _wait_for(self, keys: list[str]) -> None:
        # The store's own wait blocks its connection, and torch logs every timeout of it.
        pause_s = 1e-3
        while not self.store.check(keys):
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _report_end(self, text: str) -> bool:
        """Tell the other ranks why this one ends; return whether it is the first to."""
        with suppress(RuntimeError):  # the rank that holds the store may have ended already
            mine = f"{self.rank} {text}"
            return bool(self.store.compare_set("ended", "", mine).decode() == mine)
        return True

    def _wait_for_others(self) -> None:
        """Wait until the other ranks leave too, for a limited time, as one of them may have
        died.
        """
        until_s = time.monotonic() + _LEAVE_S
        with suppress(RuntimeError):  # the rank that holds the store may have ended already
            self.store.set(f"left/{self.rank}", "")
            everyone = [f"left/{rank}" for rank in range(self.size)]
            while not self.store.check(everyone) and time.monotonic() < until_s:
                time.sleep(_MAX_POLL_S)

    @contextmanager
    def _reachable_store(self) -> Iterator[None]:
        try:
            yield
        except PlannerError:
            raise
        except RuntimeError as error:
            raise RankError(
                "the rank that holds the store of all ranks has ended; see why, and resume"
            ) from error

    def _beat(self) -> None:
        with suppress(RuntimeError):
            self.store.set(f"alive/{self.rank}", str(next(self._beats)))


def _reason(error: BaseException) -> str:
    if isinstance(error, PlannerError):
        return str(error)
    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else describe_error(error)


class StageGroup:
    """The ranks that share a stage, as the `GpuGroup` that measures in step.

    Args:
        group: All ranks.
        ranks: The ranks of the stage, in the order of their tensor ranks; this rank is among them.
    """

    def __init__(self, group: RankGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, tuple(ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks of the stage, in the order of tensor ranks.

        Raises:
            RankError: If another rank has ended, or is presumed dead.
        """
        return self._group.gather(value, self._ranks)
