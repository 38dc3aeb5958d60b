"""Training without a pipeline on real ranks: a thread of each rank sets what the search chooses,
and tells rank 0.

The ranks need not meet: each follows the windows that rank 0 writes into the job's store, and
answers with what it measured. All have the same value at any time. The training thread reads the
time of day twice in an iteration, and nothing else; clocks are set, counters read and messages sent
on the thread of the rank.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, GpuNotSupported, UsageError
from perseus_planner.base.loops import Backoff, Loop
from perseus_planner.base.wires import Board
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.runtime.job import JobWarnings, this_job
from perseus_planner.runtime.runtime import Runtime
from perseus_planner.runtime.whole.rank import RankPart, Terms
from perseus_planner.runtime.whole.search import ValueSearch
from perseus_planner.runtime.whole.state import IterationState

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runs import IterationRecord
    from perseus_planner.runtime.job import TrainingJob
    from perseus_planner.runtime.rendezvous import RuntimeOptions
    from perseus_planner.runtime.switching.agreement import Proposal
    from perseus_planner.runtime.switching.plans import GivenPlan
    from perseus_planner.runtime.whole.search import Window

SAVE_S = 60.0
"""Time between two writes of what was learnt."""
PATIENCE_S = 60.0
"""How long rank 0 waits for what other ranks measured; then it goes on with those that answered."""

_LOG = logging.getLogger("perseus_planner.runtime")
_PERIOD_S = 0.05  #: between two rounds of a thread, in jobs with few ranks
_LOOKS_PER_S = 1500.0  #: at the store, of all ranks together
_LEAD_S = 0.2  #: in which all ranks have read a window and set its value
_STOP_S = 2.0
_LIMIT_STEP = 0.95  #: between two power limits


@dataclass(frozen=True)
class _Answer:
    """What a rank measured in a window; the fields are those of `ValueSearch.observe`."""

    time_s: float | None
    energy_j: float | None
    is_whole: bool


class IterationRuntime(Runtime):
    """The runtime of this rank inside the block of `planner_runtime` without an engine."""

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Run one training iteration inside the block: forward, backward and the optimizer's
        step.
        """
        self._rank.begin_iteration()
        yield
        self._rank.end_iteration()

    def end_iteration(self) -> None:
        """End an iteration, and begin the next one: an alternative to `iteration`, after each
        step of the optimizer.
        """
        self._rank.end_iteration()
        self._rank.begin_iteration()

    @property
    def value(self) -> int | None:
        """The clock, MHz, or the power limit, watts, that is set now; None if none is."""
        return self._rank.value

    @property
    def reference_s(self) -> float | None:
        """Seconds of an iteration at the highest value; None while that is not measured."""
        ledger = self._rank.part.ledger
        return None if ledger is None else ledger.reference_s

    @property
    def plan(self) -> None:
        """None: there is a plan for pipelines only."""

    @property
    def autopilot(self) -> None:
        """None: the autopilot is for pipelines only."""

    @property
    def pipeline(self) -> int:
        """Number of this rank's pipeline: 0."""
        return 0

    @property
    def problem(self) -> str | None:
        """Why nothing is set now; None if values are set."""
        return self._rank.problem

    @property
    def iterations(self) -> tuple[IterationRecord, ...]:
        """Empty: iterations are recorded for pipelines only."""
        return ()

    def switch_to(self, plan: GivenPlan) -> Proposal:
        """Refuse the plan.

        Raises:
            UsageError: In any case.
        """
        raise UsageError("plans are for pipelines; give planner_runtime the engine that runs one")


@contextmanager
def whole_iterations(options: RuntimeOptions, device: torch.device) -> Iterator[IterationRuntime]:
    """Train inside the block at the value of least energy that the slowdown allows; reset the GPU
    on leaving.

    Args:
        options: Those of the caller. In a dry run nothing is set, and so no more than the reference
            is learnt.
        device: The device that torch computes on.

    Raises:
        GpuInUse: If another job that is alive sets the GPU.
        GpuError: If the GPU cannot be read or set.
        UsageError: If `gpu` or an option cannot be used here.
    """
    job, limits = this_job(), (options.autopilot.slowdown, options.autopilot.max_slowdown)
    with ExitStack() as stack:
        opened = stack.enter_context(open_gpu(options.gpu_of(device)))
        values, unit, set_value = _settable(opened)
        search = ValueSearch(values[:1] if options.dry_run else values, *limits)
        stack.enter_context(_leased(opened, job, power_limit=unit == "W"))
        part = RankPart(*limits)
        state = None if options.dry_run else options.state_file
        kept = IterationState(state, opened.name, unit, job.ranks)
        rank = _Rank(job, opened, part, set_value, unit, (search, kept) if job.rank == 0 else None)
        stack.callback(rank.stop)
        rank.start()
        yield IterationRuntime(rank)


@contextmanager
def _leased(gpu: Gpu, job: TrainingJob, *, power_limit: bool) -> Iterator[None]:
    """Lease the GPU inside the block; if it cannot be reset afterwards, warn, and keep the
    record for `recover`.
    """
    with ExitStack() as stack:
        stack.enter_context(lease_gpus([gpu], power_limit=power_limit))
        leased = stack.pop_all()
    try:
        yield
    finally:
        try:
            leased.close()
        except GpuError as error:
            JobWarnings(job).warn("reset", str(error))


def _settable(gpu: Gpu) -> tuple[list[int], str, Callable[[int], None]]:
    """Return the clocks of a GPU, or its power limits if it has none that can be locked; their
    unit, and what sets one.

    Raises:
        GpuError: If it has neither.
    """
    try:
        return list(gpu.supported_clocks_mhz), "MHz", gpu.set_clock_mhz
    except GpuNotSupported:
        smallest_w, largest_w = gpu.power_limits_w
        count = int(math.log(smallest_w / largest_w) / math.log(_LIMIT_STEP)) + 1
        limits = [int(largest_w * _LIMIT_STEP**number) for number in range(count)]
        usable = [limit for limit in limits if limit >= smallest_w]
        return usable, "W", lambda limit: gpu.set_power_limit_w(float(limit))


class _Rank:
    """This rank: its iterations on the training thread, and all else on a thread of its own.

    Attributes:
        part: Its part in the windows; `_lock` guards it.
        problem: As `IterationRuntime.problem`.
        value: As `IterationRuntime.value`.
    """

    def __init__(
        self,
        job: TrainingJob,
        gpu: Gpu,
        part: RankPart,
        set_value: Callable[[int], None],
        unit: str,
        deciding: tuple[ValueSearch, IterationState] | None,
    ) -> None:
        self._job, self._gpu, self.part, self._set_value = job, gpu, part, set_value
        self._board = Board(job.own_store)
        self._search = None if deciding is None else deciding[0]
        self._state = None if deciding is None else deciding[1]
        self._saved_s = time.monotonic()
        self._unit, self._warnings = unit, JobWarnings(job)
        self._lock = threading.Lock()
        self._period_s = max(_PERIOD_S, job.ranks / _LOOKS_PER_S)
        self._loop = Loop(self._run, "perseus-planner iterations", self._period_s)
        self.problem: str | None = None
        self.value: int | None = None
        self._terms: Terms | None = None
        self._has_answered = True
        self._counted: tuple[float, float] | None = (
            None  #: energy and time at the begin of what is measured
        )
        self._asked_s = 0.0  #: when rank 0 answered the window that it waits for
        self._absent: set[int] = set()
        self._backoff = Backoff()
        self._reported: int | None = None  #: the value that was last logged as the best
        self._begin_s: float | None = None
        self._began_at_top = False

    # On the training thread

    def begin_iteration(self) -> None:
        self._began_at_top = self.part.set_index == 0
        self._begin_s = time.monotonic()

    def end_iteration(self) -> None:
        if self._begin_s is None:
            return
        time_s, self._begin_s = time.monotonic() - self._begin_s, None
        with self._lock:
            if self.part.end(time_s, at_top=self._began_at_top and self.part.set_index == 0):
                self._loop.wake()

    def start(self) -> None:
        if self._search is not None and self._state is not None:
            rows, text = self._state.load()
            self._search.begin_with(rows)
            if text:
                _LOG.info("planner: %s", text)
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(_STOP_S)
        self._save()

    def _save(self) -> None:
        """Write what was learnt, on rank 0."""
        self._saved_s = time.monotonic()
        if self._search is not None and self._state is not None:
            try:
                self._state.save(self._search.rows)
            except (OSError, UsageError) as error:
                self._warnings.warn("state", f"what was learnt cannot be saved: {error}")

    # On the thread of the rank

    def _run(self) -> None:
        try:
            self._run_round()
        except GpuError as error:
            self._give_up(str(error))
        except RuntimeError:  # the store is gone, so the job ends
            self._loop.stop()

    def _run_round(self) -> None:
        if self._has_answered:
            self._look()
        self._set()
        if self._has_answered or self._terms is None:
            return
        if self._counted is None and self.part.is_measuring:
            self._counted = self._count()
        if self.part.has_ended:
            self._answer(self._terms.window)

    def _set(self) -> None:
        """Set the value that is wanted now; `set_index` is 0 only while the highest one is in
        force.
        """
        terms, wanted = self._terms, self.part.wanted
        if self.problem is not None and self._backoff.is_due(time.monotonic()):
            self.problem = None
            self._warnings.forget("whole")
        if terms is None or self.problem is not None:
            return
        value = terms.value if wanted else terms.top
        if value == self.value:
            return
        if wanted:
            self.part.set_index = wanted
        self._set_value(value)
        self.part.set_index, self.value = wanted, value

    def _give_up(self, problem: str) -> None:
        self._backoff.fail(time.monotonic())
        self.problem = problem
        self._warnings.warn(
            "whole", f"{problem}; training goes on without setting clocks, and tries again later"
        )
        with suppress(GpuError):
            self._gpu.reset_clocks() if self._unit == "MHz" else self._gpu.reset_power_limit()
        self.value, self.part.set_index = None, 0

    def _count(self) -> tuple[float, float] | None:
        with suppress(GpuNotSupported):
            return self._gpu.energy_j(), time.monotonic()
        return None

    def _answer(self, window: Window) -> None:
        begun, ended = self._counted, self._count()
        with self._lock:
            time_s, is_whole = self.part.result()
        energy_j = None
        if begun is not None and ended is not None and time_s is not None and self.problem is None:
            energy_j = time_s * (ended[0] - begun[0]) / (ended[1] - begun[1])
        key = f"whole/answer/{window.number}/{self._job.rank}"
        self._board.put(key, _Answer(time_s, energy_j, is_whole))
        self._has_answered, self._asked_s = True, time.monotonic()

    def _look(self) -> None:
        """Look for the next window; rank 0 decides it once all have answered."""
        if self._search is not None:
            self._decide(self._search)
        terms = self._board.get("whole/window", Terms)
        if terms is None:
            return
        if self._terms is None or terms.window.number != self._terms.window.number:
            with self._lock:
                self.part.follow(terms)
            self._terms, self._has_answered, self._counted = terms, False, None

    def _decide(self, search: ValueSearch) -> None:
        if self._terms is not None:
            answers = self._answers(self._terms.window.number)
            if answers is None:
                return
            times_s = [answer.time_s for answer in answers if answer.time_s is not None]
            energies_j = [answer.energy_j for answer in answers if answer.energy_j is not None]
            search.observe(
                self._terms.window,
                max(times_s, default=None),
                math.fsum(energies_j) if len(energies_j) == len(answers) else None,
                is_whole=all(answer.is_whole for answer in answers),
            )
            self._report(search)
            if time.monotonic() - self._saved_s > SAVE_S:
                self._save()
        window, reference_s = search.decide(self.part.ledger), search.reference_s
        lead = 1 + math.ceil(max(_LEAD_S, 2 * self._period_s) / reference_s) if reference_s else 1
        terms = Terms(
            window,
            search.values[window.index],
            self.part.iteration + lead,
            reference_s,
            search.values[0],
        )
        self._board.put("whole/window", terms)

    def _report(self, search: ValueSearch) -> None:
        """Log on rank 0 what is best now, if that has changed."""
        best, effect = search.values[search.best], search.effect
        if best != self._reported and effect is not None:
            self._reported = best
            time, saving = effect
            _LOG.info(
                "planner: at %d %s an iteration takes %.3fx, and %.1f %% less energy",
                best,
                self._unit,
                time,
                100 * saving,
            )

    def _answers(self, number: int) -> list[_Answer] | None:
        """Return what the ranks measured in a window; None while answers are missing that may
        still come.
        """
        keys = {rank: f"whole/answer/{number}/{rank}" for rank in range(self._job.ranks)}
        present = [key for rank, key in keys.items() if rank not in self._absent]
        if time.monotonic() - self._asked_s < PATIENCE_S and not self._board.store.check(present):
            return None
        read = {rank: self._board.get(key, _Answer) for rank, key in keys.items()}
        answers = {rank: answer for rank, answer in read.items() if answer is not None}
        self._absent = keys.keys() - answers.keys()
        for rank in answers:
            self._board.remove(keys[rank])
        return list(answers.values())


def training_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is none."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
