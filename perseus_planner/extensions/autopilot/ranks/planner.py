"""What the autopilot's process does: it learns from what ranks observe, and answers with
programs for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.base.wires import decode
from perseus_planner.extensions.autopilot import AutopilotJob
from perseus_planner.extensions.autopilot.ranks.learnt_files import (
    Note,
    difference,
    open_files,
    with_rows_of,
)
from perseus_planner.extensions.autopilot.ranks.messages import (
    Frame,
    FromProcess,
    JobDescription,
    LogLine,
    Observations,
    ObservedGpu,
    Programs,
    RankTraining,
    Status,
    ToProcess,
    Waits,
    order_number,
    order_of,
    program_runs,
)
from perseus_planner.extensions.autopilot.status import AutopilotStatus
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.runtime.controller.protocol import SETTLE_NS
from perseus_planner.runtime.decider import Learnt
from perseus_planner.schedules import WHOLE, cell_of, check_pipeline
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import pipeline_iteration
from perseus_planner.schedules.schedule import grid_text, schedule_of_cells

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot import Autopilot, Decision
    from perseus_planner.extensions.autopilot.one_clock import OneClock
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runtime.options import AutopilotSettings

LOG_S = 60.0
"""Time between two lines of the log while the autopilot learns, in seconds."""
CALL_S = 0.0045
"""How long a call that sets a clock takes until that was measured, seconds: the median on an
A800.
"""
TOLD_GROWTH = 1.25
"""How many times as many rows are known before a service is told again, if no minute has gone by;
after a minute, any more rows will do.
"""
COUNTER_STEP_S = 0.1
"""How often the energy counters of NVIDIA's GPUs move, in seconds; those of simulated GPUs do so
all the time.
"""

RENEWED = 8
"""Iterations after which programs are sent again, with what is owed by then; ranks remember 16."""

_OTHER_CALL = 0.25  #: relative difference from which calls take another time


class Planner:
    """Answers the messages of rank 0.

    Args:
        now_s: A clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = now_s()
        self._job: JobDescription | None = None
        self._autopilot: Autopilot | OneClock | None = None
        self._orders: tuple[int, ...] = ()
        self._step_s = COUNTER_STEP_S
        self._origin = "measured"
        self._prior: Profile | None = None  #: what was known before
        self._path: Path | None = None  #: the file of what is learnt; None to keep nothing
        self._first: int | None = None  #: iteration that the autopilot saw first, and counts from
        self._sent: tuple[Any, ...] | None = None
        self._logged_s = (
            self._tried_s
        ) = -LOG_S  #: when a line was logged, and when clocks were last tried
        self._is_silent = False
        self._schedule = ""  #: as a text grid
        self._saving: tuple[float, float] | None = None  #: of the last plan, and its standard error
        #: how many rows were known when the service was told of them last, and when
        self._told_rows = 0
        self._told_s = 0.0

    def take(self, messages: Sequence[ToProcess]) -> list[FromProcess]:
        """Take messages, and return the answers.

        Raises:
            PlannerError: If the autopilot cannot go on.
        """
        replies: list[FromProcess] = []
        since: int | None = None
        for message in messages:
            # A new job drops the old decision, and needs one of its own at once.
            if isinstance(message, JobDescription):
                replies += self._begin(message)
                since = 0
            # The autopilot has stopped, and all but a new job is of no use to it.
            elif self._autopilot is None:
                continue
            elif isinstance(message, Observations):
                since = message.since
                frames = [decode(frame, Frame) for frame in message.frames]
                # The autopilot counts iterations from the first that it has seen, as a job may be
                # resumed.
                if self._first is None and frames:
                    self._first = frames[0].iteration
                self._observe(frames)
            elif isinstance(message, Waits):
                pipelines = self._autopilot.job.pipelines
                self._autopilot.wait_for(message.waits_s or [0.0] * pipelines)
        # Several messages need one answer only, for the newest iteration.
        if self._autopilot is not None and since is not None:
            replies += self._answers(self._autopilot.decide(max(0, since - (self._first or 0))))
        return replies

    def save(self) -> list[FromProcess]:
        """Write what was learnt; return a warning if it cannot be written."""
        profile = self._learned()
        path = self._path
        if profile is None or path is None:
            return []
        if self._prior is not None:
            profile = with_rows_of(profile, self._prior)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(path)
        except PlannerError as error:
            return [LogLine(f"what was learnt cannot be saved: {error}", is_warning=True)]
        return []

    def _learnt_message(self, profile: Profile | None) -> list[FromProcess]:
        if (
            self._job is None
            or self._autopilot is None
            or profile is None
            or not self._job.is_shared
        ):
            return []
        dag = PipelineDag(profile, self._autopilot.job.iteration)
        return [Learnt.of(dag, self._schedule)]

    def _learned(self) -> Profile | None:
        if self._autopilot is None:
            return None
        try:
            return replace(self._autopilot.learned(), origin=self._origin)
        except PlannerError:  # nothing has been observed yet
            return self._prior

    def _begin(self, job: JobDescription) -> list[FromProcess]:
        """Begin with a job, or with another order of its computations."""
        places = job.places.of
        trainings = {places[rank]: training for rank, training in job.trainings.items()}
        try:
            # Pipelines are replicas, so the first one's orders stand for all.
            stages = len({stage for _, stage in places.values()})
            told = [trainings[0, rank] for rank in range(stages)]
            ranks = tuple(order_of(rank_training.order) for rank_training in told)
            schedule = schedule_of_cells(
                "as trained", [[cell_of(each) for each in order] for order in ranks]
            )
            # Refused here, where the user is told, before anything is planned by it.
            check_pipeline(schedule)
            gpu = _gpu_of(told)
            # A dry run sets no clocks, so full ones are all that it can observe.
            offered = gpu.clocks_mhz[: None if job.sets_clocks else 1]
            described = AutopilotJob(
                pipeline_iteration(schedule),
                offered,
                job.places.pipelines,
                ClockChange(CALL_S, SETTLE_NS / 1e9, job.gpus_per_node),
                gpus_per_stage=job.places.gpus_per_stage,
                gpu=gpu.name,
                control=gpu.control,
                modes=job.modes,
                shares_microbatch=job.shares_microbatch,
            )
            # What is in memory is newer than the file, if it is of the same job.
            prior, notes = self._learned(), list[Note]()
            if prior is None or difference(prior, described) is not None:
                self.save()  # what was learnt of another order, before it is forgotten
                path = None if job.state is None else Path(job.state)
                prior, self._path, files_notes = open_files(path, described)
                notes += files_notes
            self._schedule = grid_text(schedule)
            self._prior = prior
            self._autopilot = _learner(described, job.settings, prior)
        # Training goes on at full clocks, and says why.
        except (PlannerError, KeyError, ValueError) as error:
            self._autopilot = None
            text = f"the autopilot cannot plan what this job runs: {error}"
            return [LogLine(text, is_warning=True), Status(AutopilotStatus("stopped"))]
        self._job = job
        self._sent = None
        self._first = None
        self._told_rows = 0
        self._saving = None
        self._orders = tuple(map(order_number, ranks))
        self._origin = gpu.origin
        # Simulated counters move all the time, so their readings have no age.
        self._step_s = COUNTER_STEP_S if gpu.origin == "measured" else 0.0
        if not job.sets_clocks:
            notes.append(Note("a dry run tries no clocks: the autopilot learns full clocks alone"))
        return [LogLine(note.text, note.is_warning) for note in notes]

    def _observe(self, frames: Sequence[Frame]) -> None:
        assert self._job is not None
        assert self._autopilot is not None
        places = self._job.places.of
        # The first rank of a pipeline begins first and ends last. The others begin early and wait,
        # so that an iteration by another program seems longer or shorter there than it is.
        times_s = {
            places[frame.rank][0]: frame.time_s for frame in frames if places[frame.rank][1] == 0
        }
        seen = []
        for frame in frames:
            pipeline, rank = places[frame.rank]
            # A frame of another order, or of a pipeline without its first rank, does not fit the
            # job.
            if frame.spans_s and frame.order == self._orders[rank] and pipeline in times_s:
                observation = frame.observation(
                    pipeline, rank, self._job.places.gpus_per_stage, self._step_s
                )
                number = frame.iteration - (self._first or 0)
                # Numbers and times are made those of the pipeline, as ranks count and wait by
                # themselves.
                seen.append(observation._replace(iteration=number, time_s=times_s[pipeline]))
        if seen:
            self._autopilot.observe(seen)
        self._use_latency([frame.call_s for frame in frames if frame.call_s])

    def _use_latency(self, calls_s: Sequence[float]) -> None:
        """Plan with what setting a clock takes here, once it was measured, and again if it has
        changed.
        """
        assert self._autopilot is not None
        change = self._autopilot.job.clock_change
        if calls_s and abs(median(calls_s) - change.call_s) > _OTHER_CALL * change.call_s:
            self._autopilot.set_clock_change(replace(change, call_s=median(calls_s)))

    def _answers(self, decision: Decision) -> list[FromProcess]:
        assert self._job is not None
        assert self._autopilot is not None
        ledger = decision.ledger
        first = self._first or 0
        # Ranks count from the job's begin, and the autopilot from the first iteration that it has
        # seen.
        if ledger is not None:
            ledger = replace(ledger, last=ledger.last + first, recent=())
        # An iteration at full clocks tells no saving, so the last plan's is still the one shown.
        if decision.time_s is not None:  # else it runs at full clocks for once
            self._saving = decision.saving, decision.saving_stderr
        status = AutopilotStatus(
            decision.phase,
            decision.iteration + first,
            None if ledger is None else ledger.reference_s,
            None if self._saving is None else self._saving[0],
            None if self._saving is None else self._saving[1],
            0.0 if ledger is None else ledger.owed_s,
            0.0 if ledger is None else ledger.burst_s,
            decision.trials,
            decision.unknown,
            time.process_time() / max(self._now_s() - self._begun_s, 1e-3),
            untold=decision.untold,
            longest=decision.longest,
        )
        replies: list[FromProcess] = [Status(status), *self._log(status)]
        # Sent only if something is new, as each program costs all ranks a round of agreement.
        news = (
            decision.clocks,
            decision.modes,
            decision.phase,
            None if ledger is None else ledger.slowdown,
            decision.iteration // RENEWED,  # so that ranks know what they owe
        )
        # Rows are counted, as a service needs them only when there are notably more.
        job = self._autopilot.job
        every = len(set(job.iteration.keys)) * len(job.clocks_mhz) * len(job.modes)
        rows = every - decision.unknown
        told = self._told_rows
        now_s = self._now_s()
        # Early on each quarter more counts; later any more, but once a minute.
        is_new = rows >= TOLD_GROWTH * told or (rows > told and now_s - self._told_s >= LOG_S)
        if self._saving is not None and is_new:
            self._told_rows = rows
            self._told_s = now_s
            replies += self._learnt_message(self._learned())
        if news != self._sent:
            self._sent = news
            # Full clocks have no expected time of their own, so the reference stands for it.
            time_s = decision.time_s or (0.0 if ledger is None else ledger.reference_s)
            top = self._autopilot.job.clocks_mhz[0]
            costs = self._autopilot.rank_costs()
            programs = Programs(
                decision=decision.version,
                orders=self._orders,
                **program_runs(decision),
                top=top,
                time_s=time_s,
                ledger=ledger,
                status=status,
                costs=costs,
                saving_stderr=decision.saving_stderr,
                tells_busy=self._autopilot.tells_busy,
            )
            replies.append(programs)
        return replies

    def _log(self, status: AutopilotStatus) -> list[FromProcess]:
        """Return a line a minute while clocks are tried, and a last one when that is over."""
        now_s = self._now_s()
        if status.trials or status.reference_s is None:
            self._tried_s = now_s
            self._is_silent = False
        if self._is_silent or now_s - self._logged_s < LOG_S:
            return []
        self._logged_s, self._is_silent = now_s, now_s - self._tried_s >= LOG_S
        return [LogLine(str(status))]


def _learner(
    job: AutopilotJob, settings: AutopilotSettings, prior: Profile | None
) -> Autopilot | OneClock:
    """Return what learns and decides; each is loaded where it is needed only."""
    if job.iteration.schedule.ranks == WHOLE.ranks:
        from perseus_planner.extensions.autopilot.one_clock import OneClock

        return OneClock(job, settings, prior)
    from perseus_planner.extensions.autopilot import Autopilot

    return Autopilot(job, settings, prior)


def _gpu_of(told: Sequence[RankTraining]) -> ObservedGpu:
    """Return the GPU of a pipeline, with the clocks that all of its GPUs support."""
    gpus = [training.gpu for training in told if training.gpu is not None]
    if len(gpus) < len(told):
        raise UsageError("the clocks that a GPU supports are not known")
    clocks = set.intersection(*(set(gpu.clocks_mhz) for gpu in gpus))
    return replace(gpus[0], clocks_mhz=tuple(sorted(clocks, reverse=True)))
