"""Ranks that profile a pipeline together, coordinated through the store of their torch.distributed
process group.

Each stage is measured by the ranks that hold it, all stages at once. All ranks of one stage, its
replicas and their tensor ranks, measure in step: they repeat each computation as often, so that its
collectives find all their ranks. Different stages wait for each other only at the end. If one rank
ends, all end: the store carries its error to the others, and a rank without a heartbeat for some
time is presumed dead.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.base.errors import EndedElsewhere, PlannerError, RankError, UsageError
from perseus_planner.base.loops import Loop
from perseus_planner.base.wires import Board, Record, encode, read_key
from perseus_planner.engines.microbatch import describe_error

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

REPETITION_S = 60.0
"""How long one repetition of a computation may take, seconds."""

_HEARTBEAT_S = 0.25  # between two heartbeats, and between two checks of the others'
# how long a leaving rank, which may hold the store, waits for the others to read the last message
_LEAVE_S = 2.0
_MAX_POLL_S = 0.05
# How many are shown
_STACKS = 8
_FRAMES = 6
_STUCK = (
    "a stage whose computations wait for another stage cannot be measured; if they only take "
    "long, allow more with SweepSettings(repetition_s=)"
)
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
    # A group of the training's is used as it is, and left.
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


class Stuck(RankError):
    """A rank has not come back from a repetition in time."""


class _End(Record, frozen=True):
    """Why the ranks end, as the first of them says."""

    rank: int  #: The rank that says so
    text: str  #: The reason
    is_stuck: bool = False  #: Whether a repetition takes too long, so that all may still come back
    has_lost: bool = False  #: Whether a rank leaves, or has left, without coming back


class RankGroup:
    """All ranks of a process group; a context manager that every rank enters. If one leaves by an
    error, all do.

    A thread of each rank shows that it lives, watches the next rank, and watches what this rank
    repeats. Ranks of a stage repeat computations that may wait for each other, so they end at the
    same `gather`, and no rank waits for one that has left.

    Args:
        repetition_s: How long one repetition of a computation may take, seconds. A rank without a
            heartbeat for twice as long is presumed dead. After four times as long the process ends,
            as nothing else ends a collective that another rank never enters.
    """

    def __init__(self, repetition_s: float = REPETITION_S) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # A prefix of its own, as a process may profile several times over one store.
        self.store: Store = dist.PrefixStore(
            f"perseus-planner/{next(_sessions)}", _get_default_store()
        )
        self._board = Board(self.store)
        self._repetition_s = repetition_s
        self._turns: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._begun_s: float | None = None  # of the repetition in progress
        self._ended_s: float | None = None  # when this rank heard that all end
        self._loop = Loop(self._watch(), "perseus-planner heartbeat", _HEARTBEAT_S)

    def __enter__(self) -> RankGroup:
        self._loop.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self._loop.stop()
        if error is None:
            self._wait_for_others()
            return
        text = f"rank {self.rank} has ended: {_reason(error)}"
        # Only the first to end says why; the others end because of it.
        is_first = isinstance(error, RankError) or self._report(text, has_lost=True)
        self._wait_for_others()
        if not is_first and isinstance(error, PlannerError):
            raise EndedElsewhere(text) from error

    def gather(self, value: T, ranks: Sequence[int] | None = None) -> list[T]:
        """Return the values of all of `ranks`, each of which calls this, in their order; of all
        ranks if None. Either all of them return or none does.

        Raises:
            RankError: If another rank has ended, is presumed dead, or is stuck.
        """
        ranks = range(self.size) if ranks is None else ranks
        name = f"{len(ranks)} ranks from {ranks[0]}"
        self._turns[name] += 1
        turn = self._turns[name]
        with self._reachable_store():
            # Each value goes with whether its rank knows of an end, so that all of a gather end or
            # none does.
            self.store.set(f"{name}/{turn}/{self.rank}", pickle.dumps((value, self._end())))
            if self.rank == ranks[0]:
                # One rank packs all values, so the others wait for one key and not for all.
                keys = [f"{name}/{turn}/{rank}" for rank in ranks]
                self._wait_for(keys)
                self.store.set(f"{name}/{turn}", pickle.dumps([*map(self.store.get, keys)]))
                # A rank that has reached this turn has read the values of the one before.
                for key in (*keys, f"{name}/{turn - 1}"):
                    self.store.delete_key(key)
            self._wait_for([f"{name}/{turn}"])
            packed = pickle.loads(self.store.get(f"{name}/{turn}"))
        values, ends = zip(*map(pickle.loads, packed), strict=True)
        if (end := next(filter(None, ends), None)) is not None:
            raise self._error(end)
        return list(values)

    def check(self) -> None:
        """Raise an error if another rank has ended, or is presumed dead.

        Raises:
            RankError: If so.
        """
        with self._reachable_store():
            if (end := self._end()) is None:
                return
            if self._ended_s is None:
                self._ended_s = time.monotonic()
            # A stuck rank may still come back: for some time the others wait for it.
            if not end.is_stuck or time.monotonic() > self._ended_s + self._repetition_s:
                raise self._error(end)

    def rank_error(self, text: str, *, has_lost: bool = True) -> RankError:
        """Return the error to raise when another rank has ended, or if not `has_lost`, when it does
        not answer; only the first rank to notice reports `text`.
        """
        is_first = self._report(text, has_lost=has_lost)
        return RankError(text) if is_first else EndedElsewhere(text)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Watch what runs inside the block, which is one repetition."""
        self._begun_s = time.monotonic()
        try:
            yield
        finally:
            self._begun_s = None

    def problem_of(self, error: Exception) -> str | None:
        """Return why all ranks end, in words that are the same on all of them, once every rank has
        come back from what it did together with others. None if one does not.

        A rank calls this with its own error, and the others with the one that `gather` then raises.

        Raises:
            RankError: If the rank that holds the store has ended.
        """
        end = self._agreed_end(error)
        return None if end is None else str(self._error(end))

    def wait_for_return(self, error: Exception) -> None:
        """Tell the other ranks of an error, and wait until every rank has come back from what it
        did together with others, or one does not.
        """
        self._agreed_end(error)

    def _agreed_end(self, error: Exception) -> _End | None:
        with self._reachable_store():
            if not isinstance(error, RankError):
                self._report(f"rank {self.rank}: {_reason(error)}")
            end = self._end()
        if end is None or end.has_lost or not self._have_all_returned():
            return None
        return end

    def _have_all_returned(self) -> bool:
        """Return whether every rank has left what it repeated when one ended, the same on all
        ranks. Otherwise a collective of the training could meet one that was repeated.
        """
        until_s = (self._ended_s or time.monotonic()) + 2 * self._repetition_s
        with self._reachable_store():
            self.store.set(f"back/{self.rank}", "")
            everyone = [f"back/{rank}" for rank in range(self.size)]
            while (verdict := read_key(self.store, "verdict")) is None:
                if self.store.check(everyone) or time.monotonic() > until_s:
                    all_are = str(self.store.check(everyone))
                    # The first verdict counts, so that all ranks go on, or none.
                    self.store.compare_set("verdict", "", all_are)
                time.sleep(_MAX_POLL_S)
        return bool(verdict == b"True")

    def _end(self) -> _End | None:
        return self._board.get("ended", _End)

    def _error(self, end: _End) -> RankError:
        if end.is_stuck:
            keys = (f"stack/{number}" for number in range(1, _STACKS + 1))
            stacks = [stack.decode() for key in keys if (stack := read_key(self.store, key))]
            return Stuck(f"{end.text} ({'; '.join(stacks)}); {_STUCK}")
        return RankError(end.text) if end.rank == self.rank else EndedElsewhere(end.text)

    def _wait_for(self, keys: list[str]) -> None:
        # The store's own wait blocks its connection, and torch logs every timeout of it.
        pause_s = 1e-3
        longest_s = min(_MAX_POLL_S, 1e-3 * self.size)
        while not self.store.check(keys):
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _report(self, text: str, *, is_stuck: bool = False, has_lost: bool = False) -> bool:
        """Tell the other ranks why this one ends; return whether it is the first to."""
        with suppress(RuntimeError):  # the rank that holds the store may have ended already
            mine = encode(_End(self.rank, text, is_stuck, has_lost)).decode()
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

    def _watch(self) -> Generator[float | None]:
        """Show that this rank lives, and watch the next one and the repetition in progress."""
        other = (self.rank + 1) % self.size
        others = None
        changed_s = time.monotonic()
        is_shown = False
        for beat in count():
            now_s = time.monotonic()
            begun_s = self._begun_s
            # Set and cleared by the other thread: read once, or it may change in between.
            lasts_s = 0.0 if begun_s is None else now_s - begun_s
            if lasts_s > 3 * self._repetition_s:
                _end_collectives(is_last=lasts_s > 4 * self._repetition_s)
            with suppress(RuntimeError):  # the rank that holds the store may have ended already
                self.store.set(f"alive/{self.rank}", str(beat))
                alive = read_key(self.store, f"alive/{other}")
                # Beats are compared, not times, as the clocks of nodes differ.
                if alive != others:
                    others = alive
                    changed_s = now_s
                elif now_s > changed_s + 2 * self._repetition_s:
                    self._report(
                        f"rank {other} has shown no sign of life for {2 * self._repetition_s:.6g} "
                        "s; see why it ended, and resume",
                        has_lost=True,
                    )
                is_late = lasts_s > self._repetition_s
                if begun_s is not None and not is_shown and (is_late or self._end() is not None):
                    # Once, and also where another rank is late: who waits for whom shows in all
                    # stacks together.
                    is_shown = True
                    number = self.store.add("stacks", 1)
                    self.store.set(f"stack/{number}", f"rank {self.rank} at {self._stack()}")
                    if is_late:
                        text = f"rank {self.rank} repeats one computation for over "
                        self._report(f"{text}{self._repetition_s:.6g} s", is_stuck=True)
            yield None

    def _stack(self) -> str:
        frames = traceback.extract_stack(sys._current_frames()[self._thread])[-_FRAMES:]
        return " > ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames
        )


def _end_collectives(*, is_last: bool) -> None:
    """End the collectives of a process that would wait for ever for ranks that have left."""
    import torch.distributed.distributed_c10d as dist

    if is_last:
        print("a repetition never came back, so the process ends", file=sys.stderr, flush=True)
        os._exit(1)
    with suppress(Exception):  # works for NCCL; gloo notices when the other processes end
        dist._abort_process_group()


def _reason(error: BaseException) -> str:
    if isinstance(error, PlannerError):
        return str(error)
    return "it was interrupted" if isinstance(error, KeyboardInterrupt) else describe_error(error)


class StageGroup:
    """The ranks that hold a stage, as the `GpuGroup` that measures in step.

    Args:
        group: All ranks.
        ranks: The ranks of the stage, replica by replica, each in the order of its tensor ranks;
            this rank is among them.
        size: The number of ranks of a replica.
    """

    def __init__(self, group: RankGroup, ranks: Sequence[int], size: int) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self.size = size
        starts = range(0, len(ranks), size)
        self.replicas = [_rank_names(ranks[start : start + size]) for start in starts]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first, which keeps rows."""
        return bool(self._group.rank == self._ranks[0])

    def gather(self, value: T) -> list[T]:
        """See `GpuGroup.gather`.

        Raises:
            RankError: If another rank has ended, is presumed dead, or is stuck.
        """
        return self._group.gather(value, self._ranks)


def _rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
