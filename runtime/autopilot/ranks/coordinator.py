"""Rank 0's part in the autopilot: it brings what all ranks observe to the autopilot's process, and
proposes programs.

If the process ends, training goes on with its last program and the ledger of each rank, and it is
started again after a pause (`backoff`); what was learnt is in its state file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.runs.autopilot import AutopilotStatus
from perseus_planner.runtime.autopilot.ranks.exchange import Learnt
from perseus_planner.runtime.autopilot.ranks.messages import (
    JOB,
    LEARNT,
    LOG,
    OBSERVED,
    PROGRAMS,
    STATUS,
    WAITS,
    WARNING,
    JobDescription,
    iteration_of,
    observed_message,
)
from perseus_planner.runtime.autopilot.ranks.observer import observed_key, rank_key
from perseus_planner.runtime.autopilot.ranks.process import AutopilotProcess
from perseus_planner.runtime.autopilot.ranks.programs import order_number
from perseus_planner.runtime.controller.backoff import Backoff
from perseus_planner.runtime.switching.shared_state import read

if TYPE_CHECKING:
    from torch.distributed import Store

    from perseus_planner.runtime.autopilot.ranks.exchange import ServiceExchange
    from perseus_planner.runtime.autopilot.ranks.messages import Message
    from perseus_planner.runtime.job import JobWarnings
    from perseus_planner.runtime.switching.agreement import Agreement

_LOG = logging.getLogger("perseus_planner.runtime")

END_S = 10.0
"""How long the process may take to write what was learnt, at the end."""
READERS = 64
"""Of how many ranks rank 0 reads an iteration; in larger jobs, pipelines take turns."""

DIFFERING = 5
"""After so many iterations in which pipelines run different orders, the user is warned."""

_LOOK_S = 0.02  #: between two looks at the keys


@dataclass(frozen=True)
class Places:
    """Which ranks observe for the autopilot."""

    #: Rank in the whole job -> its pipeline and its rank there. If several ranks have one place,
    #: the first.
    of: Mapping[int, tuple[int, int]]
    pipelines: int  #: Number of pipelines
    gpus_per_stage: int  #: How many ranks have one place
    #: Each pipeline is observed in one of so many iterations: pipeline p in those with the same
    #: remainder.
    every: int

    @classmethod
    def among(cls, everyone: Sequence[tuple[int, int] | None]) -> Places:
        """Return the places of a job, given the pipeline and the rank in it of each rank; None
        for absent ranks.
        """
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(everyone):
            if place is not None:
                first.setdefault(place, rank)
        present = sum(place is not None for place in everyone)
        of = {rank: place for place, rank in first.items()}
        pipelines = len({pipeline for pipeline, _ in first})
        per_pipeline = max(1, len(first) // max(1, pipelines))
        groups = -(-pipelines // max(1, READERS // per_pipeline))
        return cls(of, pipelines, max(1, present // max(1, len(first))), max(1, groups))

    def observed_in(self, iteration: int) -> list[int]:
        """Return the ranks that observe an iteration."""
        turn = iteration % self.every
        return [rank for rank, (pipeline, _) in self.of.items() if pipeline % self.every == turn]


class Coordinator:
    """All methods are called by rank 0's background thread, but for `status`, which any thread may
    read.

    Args:
        store: The job's store; through a connection of the background thread.
        places: Which ranks observe.
        settings: As for `AutopilotSettings`.
        agreement: Takes the programs to all ranks.
        warnings: Gives warnings.
        sets_clocks: Whether clocks are set.
        state: File of what is learnt; None for none.
        exchange: Joins it to the service; None without one.
        gpus_per_node: How many GPUs share the lock of a driver.
        now_s: A clock, in seconds.

    Attributes:
        status: What the autopilot knew last.
        on_status: Called with each new status.
    """

    def __init__(
        self,
        store: Store,
        places: Places,
        settings: Mapping[str, Any],
        agreement: Agreement,
        warnings: JobWarnings,
        *,
        sets_clocks: bool,
        state: str | None,
        exchange: ServiceExchange | None = None,
        gpus_per_node: int = 8,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._places, self._settings, self._agreement = (
            store,
            places,
            settings,
            agreement,
        )
        self._warnings, self._sets_clocks, self._state, self._now_s = (
            warnings,
            sets_clocks,
            state,
            now_s,
        )
        self._exchange, self._gpus_per_node = exchange, gpus_per_node
        self._waits_s: tuple[float, ...] = ()  #: that the process knows
        self._differ_since: int | None = (
            None  #: iteration since which pipelines run different orders
        )
        self.status = AutopilotStatus()
        self.on_status: Callable[[AutopilotStatus], None] | None = None
        self._process: AutopilotProcess | None = None
        self._backoff = Backoff()
        self._looked_s = -1.0
        self._are_there = False  #: all keys that are read
        self._orders: dict[int, int] = {}  #: rank -> number of its order, which the process knows
        self._seen: dict[int, int] = {}  #: rank -> iteration that was read last
        self._pending: dict[int, dict[int, bytes]] = {}  #: iteration -> rank -> frame
        self._told: dict[int, Mapping[str, Any]] = {}

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
                self._orders, self._waits_s = {}, ()  # so that it is told the job
            if self._process is not None:
                self._take_replies(self._process.messages())
                if self._now_s() - self._looked_s >= _LOOK_S:
                    self._looked_s = self._now_s()
                    self._read(self._process)
                    self._pass_on(self._process)
        except RuntimeError:  # the store is gone, as the agreement says
            pass
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
        last = self._agreement.begun - 1
        ranks = [rank for rank in self._places.observed_in(last) if self._seen.get(rank, -1) < last]
        if last < 0 or not ranks:
            return
        keys = list(map(observed_key, ranks))
        self._are_there = self._are_there or self._store.check(
            list(map(observed_key, self._places.of))
        )
        if not self._are_there:
            return
        for rank, frame in zip(ranks, self._store.multi_get(keys), strict=True):
            iteration = iteration_of(frame)[0] if frame else -1
            if iteration > self._seen.get(rank, -1):
                self._seen[rank] = iteration
                self._pending.setdefault(iteration, {})[rank] = frame
        for iteration in sorted(self._pending):
            frames = self._pending[iteration]
            if len(frames) == len(self._places.observed_in(iteration)):
                self._learn_orders(process, frames)
                self._warn_of_orders(last)
                since = self._agreement.since_if_proposed()
                process.send(OBSERVED, observed_message(iteration, since, frames.values()))
                del self._pending[iteration]
            elif iteration < last - self._places.every:
                del self._pending[iteration]  # a rank was too late

    def _learn_orders(self, process: AutopilotProcess, frames: Mapping[int, bytes]) -> None:
        """Tell the process what the ranks have run in an iteration, if that is new, and known of
        all ranks.
        """
        new = {rank: order for rank, frame in frames.items() if (order := iteration_of(frame)[1])}
        if all(self._orders.get(rank) == order for rank, order in new.items()):
            return
        for rank, order in new.items():
            said = read(self._store, rank_key(rank))
            told = {} if said is None else json.loads(said)
            if order_number(told.get("order", ())) != order:
                return  # the rank runs something else by now
            self._told[rank] = told
        self._orders |= new
        if len(self._orders) < len(self._places.of):
            return
        if self._differ():
            return
        process.send(JOB, self._describe().dumps())
        self._waits_s = ()

    def _differ(self) -> bool:
        """Return whether pipelines run different orders."""
        of_place: dict[int, int] = {}
        return any(
            of_place.setdefault(self._places.of[each][1], order) != order
            for each, order in self._orders.items()
        )

    def _warn_of_orders(self, iteration: int) -> None:
        """Warn if pipelines go on running different orders; in one iteration they may while the
        number changes.
        """
        if not self._differ():
            self._differ_since = None
            return
        self._differ_since = iteration if self._differ_since is None else self._differ_since
        if iteration - self._differ_since >= DIFFERING:
            text = (
                "the pipelines of this job run different orders of computations, which the "
                "autopilot cannot plan"
            )
            self._warnings.warn(
                "autopilot orders", f"{text}; training goes on as it did before", by="rank 0"
            )

    def _describe(self) -> JobDescription:
        told = {
            each: self._told[each]
            for each, (pipeline, _) in self._places.of.items()
            if pipeline == 0
        }
        return JobDescription(
            self._settings,
            self._places.of,
            self._places.pipelines,
            self._places.gpus_per_stage,
            told,
            self._sets_clocks,
            self._state,
            self._gpus_per_node,
            is_shared=self._exchange is not None,
        )

    def _pass_on(self, process: AutopilotProcess) -> None:
        """Tell the process what comes from the service."""
        if self._exchange is not None and self._exchange.waits_s != self._waits_s:
            self._waits_s = self._exchange.waits_s
            process.send(WAITS, json.dumps(self._waits_s).encode())

    def _take_replies(self, messages: Iterable[Message]) -> None:
        for kind, content in messages:
            if kind == PROGRAMS:
                self._agreement.propose(content)
            elif kind == STATUS:
                self.status = AutopilotStatus(**json.loads(content))
                if self.on_status is not None:
                    self.on_status(self.status)
                if self._exchange is not None:
                    self._exchange.status = self.status
            elif kind == LEARNT and self._exchange is not None:
                self._exchange.learnt = Learnt(**json.loads(content))
            elif kind == LOG:
                _LOG.info("planner: autopilot: %s", content.decode())
            elif kind == WARNING:
                self._warnings.warn(f"autopilot/{content[:40]!r}", content.decode(), by="rank 0")
