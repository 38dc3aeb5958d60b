"""Rank 0's part in the autopilot: it brings what all ranks observe to the autopilot's process, and
proposes programs.

If the process ends, training goes on with its last program and the ledger of each rank, and it is
started again after a pause (`backoff`); what was learnt is in its state file.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from perseus_planner.base.loops import Backoff
from perseus_planner.base.processes import WatchedProcess, child_environment, is_readable
from perseus_planner.base.wires import Board, StreamChannel, decode, encode
from perseus_planner.extensions.autopilot.ranks.messages import (
    End,
    FrameHead,
    FromProcess,
    JobDescription,
    Observations,
    Programs,
    RankTraining,
    Status,
    ToProcess,
    Waits,
    order_number,
)
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.runtime.decider import Learnt

if TYPE_CHECKING:
    from torch.distributed import Store

    from perseus_planner.runs.status import DeciderStatus
    from perseus_planner.runtime.decider import ServiceExchange
    from perseus_planner.runtime.job import JobWarnings
    from perseus_planner.runtime.switching import Agreement

_LOG = logging.getLogger("perseus_planner.runtime")

END_S = 10.0
"""How long the process may take to write what was learnt, at the end."""
DIFFERING = 5
"""After so many iterations in which pipelines run different orders, the user is warned."""
NICENESS = 5
"""A third of the share of a training thread where cores are scarce."""
DESCRIPTOR = 3
"""The descriptor at which the process finds its end of the connection."""

_POLL_S = 0.05  #: between two looks at the connection while the process ends
_END_POLL_S = 0.002  #: between two looks at a process that has closed it
NOTHING = b""
"""What a rank has in the store before its first iteration has ended."""
_LOOK_S = 0.02  #: between two looks at the keys


def observed_key(rank: int) -> str:
    """Return the key of what a rank observed last."""
    return f"observed/{rank}"


def rank_key(rank: int) -> str:
    """Return the key of what a rank runs, and on which GPU."""
    return f"learns/{rank}"


class AutopilotProcess:
    """A running process of the autopilot.

    It is spawned, not started by `subprocess`, which waits for the end of a pipe: children that the
    training forks at the same time would keep it open, and the thread would wait for them.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable does not name the Python to start it with")
        # A socket pair and no pipe, as messages go both ways.
        here, there = socket.socketpair()
        try:
            arguments = [
                sys.executable,
                "-m",
                "perseus_planner.extensions.autopilot.ranks",
                "--owner",
                str(os.getpid()),
            ]
            # The child gets one descriptor of this process, and nothing to read.
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, there.fileno(), DESCRIPTOR),
            ]
            # In a session of its own: Ctrl-C interrupts training, which then ends it.
            self.pid = os.posix_spawn(
                sys.executable, arguments, child_environment(), file_actions=actions, setsid=True
            )
        # The parent's end is closed only if nothing runs at the other one.
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        # Lower priority where cores are scarce; a system that refuses it still plans.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)
        self._process = WatchedProcess(self.pid)
        self._channel = StreamChannel(here, FromProcess)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives."""
        return self._channel.fileno()

    def send(self, message: ToProcess) -> None:
        """Send a message, without waiting.

        Raises:
            EOFError: If the process has ended or hangs.
        """
        self._channel.send(message)

    def messages(self) -> Sequence[FromProcess]:
        """Return what has arrived, without waiting.

        Raises:
            EOFError: If the process has ended.
        """
        self._channel.flush()
        messages: Sequence[FromProcess] = self._channel.receive()
        # A child of the training may hold the connection open, so its end alone does not tell.
        if not messages and self._process.has_ended():
            raise EOFError
        return messages

    def end(self, timeout_s: float) -> Sequence[FromProcess]:
        """Have it write its state and end; kill it if that takes longer than `timeout_s` seconds.

        Returns:
            The last messages that it has sent.
        """
        messages: list[FromProcess] = []
        # The connection closes when it has written its state, so its end is what is waited for.
        until_s = time.monotonic() + timeout_s
        with suppress(EOFError):
            self._channel.send(End())
            while time.monotonic() < until_s:  # it may wait until a long message has been read
                self._channel.flush()
                is_readable(self._channel.fileno(), _POLL_S)
                messages += self._channel.receive()
        while not self._process.has_ended() and time.monotonic() < until_s:
            time.sleep(_END_POLL_S)  # it has closed the connection, so it ends now
        # Training is over, so the process must not outlive it.
        if not self._process.has_ended():
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # the training may have its children waited for
            os.waitpid(self.pid, 0)
        self._process.close()
        self._channel.close()
        return messages


class Coordinator:
    """All methods are called by rank 0's background thread, but for `status`, which any thread may
    read.

    Args:
        store: The job's store; through a connection of the background thread.
        job: What is known of the job before training.
        agreement: Takes the programs to all ranks.
        warnings: Gives warnings.
        exchange: Joins it to the service; None without one.
        now_s: A clock, in seconds.

    Attributes:
        status: What the autopilot knew last.
        on_status: Called with each new status.
    """

    def __init__(
        self,
        store: Store,
        job: JobDescription,
        agreement: Agreement,
        warnings: JobWarnings,
        exchange: ServiceExchange | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = Board(store)
        self._job = job
        self._places = job.places
        self._agreement = agreement
        self._warnings = warnings
        self._exchange = exchange
        self._now_s = now_s
        self._waits_s: tuple[float, ...] = ()  #: that the process knows
        #: iteration since which pipelines run different orders; None while they do not
        self._different_since: int | None = None
        self.status = AutopilotStatus().shown
        self.on_status: Callable[[DeciderStatus], None] | None = None
        self._process: AutopilotProcess | None = None
        self._backoff = Backoff()
        self._looked_s = -1.0
        self._are_there = [False] * job.places.every  #: all keys that are read in a turn
        self._orders: dict[int, int] = {}  #: rank -> number of its order, which the process knows
        self._seen: dict[int, int] = {}  #: rank -> iteration that was read last
        self._pending: dict[int, dict[int, bytes]] = {}  #: iteration -> rank -> frame
        self._trainings: dict[int, RankTraining] = {}

    @property
    def pid(self) -> int | None:
        """The process of the autopilot; None if it does not run."""
        return None if self._process is None else self._process.pid

    def descriptors(self) -> list[int]:
        """Return the descriptors that wake the thread."""
        return [] if self._process is None else [self._process.fileno()]

    def look(self) -> None:
        """Do one round; never waits for another rank or for the process."""
        try:
            if self._process is None and self._backoff.is_due(self._now_s()):
                self._process = AutopilotProcess()
                # A new process knows no job, so it is told all again.
                self._orders = {}
                self._waits_s = ()
            if self._process is not None:
                self._take_replies(self._process.messages())
                # The store is looked at only so often, whatever wakes the thread.
                if self._now_s() - self._looked_s >= _LOOK_S:
                    self._looked_s = self._now_s()
                    self._read(self._process)
                    self._pass_on(self._process)
        except RuntimeError:  # the store is gone, as the agreement says
            pass
        # Its end is no error of the training: ranks run their last program meanwhile.
        except (EOFError, OSError) as error:
            self._lose(error)

    def close(self) -> None:
        """Have the process write what was learnt, and end it."""
        if self._process is not None:
            with suppress(EOFError):
                self._take_replies(self._process.messages())
            self._take_replies(self._process.end(END_S))
            self._process = None

    def _lose(self, error: Exception) -> None:
        if self._process is not None:
            self._process.end(0.0)
            self._process = None
        self._backoff.fail(self._now_s())
        reason = f": {error}" if str(error) else ""
        text = (
            f"the process of the autopilot has ended{reason}; training goes on with its last "
            "program"
        )
        self._warnings.warn(
            "autopilot", f"{text} and the ledger, and it is started again", by="rank 0"
        )

    def _read(self, process: AutopilotProcess) -> None:
        """Read what the ranks have observed, and pass on the iterations of which all is known."""
        # An iteration that has begun is not over, so the last one is the one before.
        last = self._agreement.begun - 1
        if last < 0:
            self._expect_orders(process)
            return
        ranks = [rank for rank in self._places.observed_in(last) if self._seen.get(rank, -1) < last]
        if ranks and self._is_turn_there(last, ranks):
            self._take_frames(ranks)
            self._pass_on_frames(process, last)

    def _is_turn_there(self, last: int, ranks: Sequence[int]) -> bool:
        """Whether all ranks whose turn it is have observed something."""
        # In large jobs pipelines take turns, so that rank 0 reads a bounded number of keys. Keys
        # are written once and then replaced, so that they are there is checked once a turn.
        turn = last % self._places.every
        if not self._are_there[turn]:
            self._are_there[turn] = self._board.store.check(list(map(observed_key, ranks)))
        return self._are_there[turn]

    def _take_frames(self, ranks: Sequence[int]) -> None:
        """Take the newest frame of each of these ranks, if it is of an iteration after its last
        one.
        """
        frames = self._board.store.multi_get(list(map(observed_key, ranks)))
        for rank, frame in zip(ranks, frames, strict=True):
            iteration = decode(frame, FrameHead).iteration if frame else -1
            if iteration > self._seen.get(rank, -1):
                self._seen[rank] = iteration
                self._pending.setdefault(iteration, {})[rank] = frame

    def _pass_on_frames(self, process: AutopilotProcess, last: int) -> None:
        """Pass on the iterations of which the frames of all ranks are there."""
        for iteration in sorted(self._pending):
            frames = self._pending[iteration]
            if len(frames) == len(self._places.observed_in(iteration)):
                # The process must know the order before it gets an iteration of it.
                self._learn_orders(process, frames)
                self._warn_of_orders(last)
                # Told with the frames, so that the program is decided for the iteration that it
                # will begin with.
                since = self._agreement.since_if_proposed()
                process.send(Observations(since, tuple(map(msgspec.Raw, frames.values()))))
                del self._pending[iteration]
            elif iteration < last - self._places.every:
                del self._pending[iteration]  # a rank was too late

    def _learn_orders(self, process: AutopilotProcess, frames: Mapping[int, bytes]) -> None:
        """Tell the process what the ranks have run in an iteration, if that is new, and known of
        all ranks.
        """
        orders = {rank: decode(frame, FrameHead).order for rank, frame in frames.items()}
        new = {rank: order for rank, order in orders.items() if order}
        # Orders are large and rarely new, so their numbers are compared first.
        if all(self._orders.get(rank) == order for rank, order in new.items()):
            return
        for rank, order in new.items():
            # The number came with the frame, and the order itself lies under a key of its own.
            training = self._board.get(rank_key(rank), RankTraining)
            if training is None or order_number(training.order) != order:
                return  # the rank runs something else by now
            self._trainings[rank] = training
        self._orders |= new
        if len(self._orders) == len(self._places.of):
            self._tell(process)

    def _expect_orders(self, process: AutopilotProcess) -> None:
        """Tell the process what the ranks will run, if all know that before they begin."""
        ranks = list(self._places.of)
        keys = list(map(rank_key, ranks))
        # Only at the begin, and only if all ranks have said so before they ran.
        if self._orders or not self._board.store.check(keys):
            return
        told = self._board.get_all(keys, RankTraining)
        self._trainings = {r: each for r, each in zip(ranks, told, strict=True) if each is not None}
        self._orders = {rank: order_number(each.order) for rank, each in self._trainings.items()}
        self._tell(process)

    def _tell(self, process: AutopilotProcess) -> None:
        """Tell the process the job, of which all ranks are known."""
        if self._runs_different_orders():
            return
        of_first = {
            rank: self._trainings[rank]
            for rank, (pipeline, _) in self._places.of.items()
            if pipeline == 0
        }
        process.send(msgspec.structs.replace(self._job, trainings=of_first))
        self._waits_s = ()

    def _runs_different_orders(self) -> bool:
        """Return whether pipelines run different orders."""
        of_place: dict[int, int] = {}
        return any(
            of_place.setdefault(self._places.of[rank][1], order) != order
            for rank, order in self._orders.items()
        )

    def _warn_of_orders(self, iteration: int) -> None:
        """Warn if pipelines go on running different orders; in one iteration they may while the
        number changes.
        """
        if not self._runs_different_orders():
            self._different_since = None
            return
        if self._different_since is None:
            self._different_since = iteration
        if iteration - self._different_since >= DIFFERING:
            text = (
                "the pipelines of this job run different orders of computations, which the "
                "autopilot cannot plan"
            )
            self._warnings.warn(
                "autopilot orders", f"{text}; training goes on as it did before", by="rank 0"
            )

    def _pass_on(self, process: AutopilotProcess) -> None:
        """Tell the process what comes from the service."""
        if self._exchange is not None and self._exchange.waits_s != self._waits_s:
            self._waits_s = self._exchange.waits_s
            process.send(Waits(self._waits_s))

    def _take_replies(self, messages: Iterable[FromProcess]) -> None:
        for message in messages:
            # Programs go to all ranks through the agreement, so that they change in one iteration.
            if isinstance(message, Programs):
                self._agreement.propose(encode(message))
            elif isinstance(message, Status):
                self.status = message.status.shown
                if self.on_status is not None:
                    # The service is shown the newest status, with or without a program.
                    self.on_status(self.status)
                if self._exchange is not None:
                    self._exchange.status = self.status
            elif isinstance(message, Learnt):
                if self._exchange is not None:
                    self._exchange.learnt = message
            elif message.is_warning:
                # Keyed by its begin, so that a warning with changing numbers is given once.
                key = f"autopilot/{message.text[:40]!r}"
                self._warnings.warn(key, message.text, by="rank 0")
            else:
                _LOG.info("planner: autopilot: %s", message.text)
