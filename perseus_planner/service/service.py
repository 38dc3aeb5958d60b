"""The service: jobs, what is reported of them, and the versions of their plans that follow; without HTTP."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import PlannerError, shown
from perseus_planner.service.alerting import Alerted, concerned, with_alerts
from perseus_planner.service.checks import check_deadline, check_positive, check_report, check_same
from perseus_planner.service.following import Following
from perseus_planner.service.foreseen import baseline_j
from perseus_planner.service.knowledge import Knowledge
from perseus_planner.service.model import Conflict, Job, Report, UnknownReport
from perseus_planner.service.outcomes import Answer, Registered, Taken
from perseus_planner.service.planning.cache import Planning, Processes
from perseus_planner.service.planning.replanner import Replanning, replan
from perseus_planner.service.power_sharing import share_power
from perseus_planner.service.registering import checked, first_state, known_again
from perseus_planner.service.store.writer import Draft, Writer
from perseus_planner.service.telemetry_book import TelemetryBook
from perseus_planner.service.transitions import answer, cleared, settled, until_it_begins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from perseus_planner.service.state import JobState
    from perseus_planner.service.store.storage import Storage
    from perseus_planner.service.telemetry import Counters

_AGAIN_AFTER_S = 1.0  # what could not be written, such as for a full disk

_log = logging.getLogger(__name__)


class Service(Knowledge):
    """Takes reports and wishes, and publishes versions of plans. A context manager; from any thread.

    What a method returns is on disk, and so is what it has changed. Whenever the process is killed, the next service on
    the same storage goes on from there: versions of a job go up by 1 and never back, and a version that was promised
    comes. Plans are made by other processes; only `register` waits for them.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        now_s: Callable[[], float] = time.time,
        workers: int = 1,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """Recover all that `storage` holds.

        Args:
            storage: which no other service has open; it is left open.
            now_s: seconds since the epoch.
            workers: how many processes solve and plan.
            run: calls a function with arguments somewhere else than in those processes.

        Raises:
            StorageError: the storage cannot be read.
        """
        stored = storage.load()
        self._processes = Processes(workers)
        self._planning = Planning(storage.frontier, run or self._processes.run)
        self._replanning = Replanning(self._replan, workers)
        self._following = Following(now_s, self._replanning.want)
        self._writer = Writer(storage, stored, self._following.committed)
        telemetry = TelemetryBook(stored.telemetry, {name: each.job for name, each in stored.jobs.items()})
        super().__init__(self._writer, telemetry, now_s)
        self._stack = ExitStack()
        for name, state in stored.jobs.items():
            self._following.remember(name, state)
            self._planning.remember(state.job, state.curve, stored.versions[name])

    def __enter__(self) -> Service:
        """Itself, running."""
        with ExitStack() as stack:
            stack.enter_context(self._writer)
            stack.callback(self._end_telemetry)
            stack.enter_context(self._replanning)
            stack.enter_context(self._processes)  # the first to end, so that nobody waits for what is not needed
            self._stack = stack.pop_all()
        for name, state in self._writer.jobs.items():
            if not state.is_planned or any(target.slow_stages for target in state.decision.targets):
                self._replanning.want(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; what was promised and is not planned yet is planned when a service is run on the storage again."""
        self._stack.close()

    def register(self, job: Job, frontier: bytes) -> Registered:
        """Take up a job, or know it again; returns when the first version of its plans is there.

        Args:
            job: its `frontier` and `since_s` are set here.
            frontier: the file of its frontier.

        Raises:
            Conflict: another job of that name runs.
            UsageError, FrontierError: it is no job, or no frontier.
            InfeasibleError: no plan keeps its deadline, switch budget or power, or that of all jobs.
        """
        job = checked(job, frontier, self._now_s())
        state = self._writer.jobs.get(job.name)
        if state is not None:
            return known_again(state, job)
        first = first_state(job, frontier, self._planning)

        def command(draft: Draft) -> Registered:
            known = draft.find(job.name)
            if known is not None:
                return known_again(known, job)
            draft.put(first)
            draft.frontiers[job.frontier] = frontier, first.curve
            self._share(draft, job.name)
            return Registered(job, draft.state(job.name).published.version, is_new=True)

        return self._writer.do(command)

    def report(self, job: str, report: Report) -> Answer:
        """Take a report; one of the same key again changes nothing.

        Raises:
            UnknownJob: there is none of that name.
            Conflict: the key is that of another report, or too many reports count.
            UsageError: the job has not what the report is about.
        """
        return self.reporting(job, report).result()

    def reporting(self, job: str, report: Report) -> Future[Answer]:
        """The same, without waiting for it; what `report` raises, the result raises."""

        def command(draft: Draft) -> Answer:
            before = draft.state(job)
            known = before.reports.get(report.key) or before.past.get(report.key)
            if known is not None:
                check_same(known, report)
                return answer(before, before, known, "the report was received before")
            check_report(before, report)
            after = self._settle(draft, replace(before, reports={**before.reports, report.key: report}))
            if report.key in after.reports:
                return answer(before, after, report, until_it_begins(after, report, self._now_s()))
            return answer(before, after, report, "it expires before it begins, or its source has seen it later")

        return self._writer.doing(command)

    def alert(self, reports: Sequence[Report]) -> Alerted:
        """Take reports that name no job: each is of every job that has its GPU or node.

        One of a known key is the same alert, which may say another slowdown now, and is over once it has expired. All
        are taken in one transaction, and what is wrong with one does no harm to the others.
        """

        def command(draft: Draft) -> Alerted:
            of_jobs, ignored = concerned(draft.jobs(), reports)
            answers = []
            for name, said in of_jobs.items():
                before = draft.state(name)
                told, refused = with_alerts(before, said, self._now_s())
                ignored |= refused
                answers.append(answer(before, before if told is before else self._settle(draft, told)))
            return Alerted(tuple(answers), ignored)

        return self._writer.do(command)

    def clear(self, job: str, key: str) -> Answer:
        """Take a report back: it has expired now.

        Raises:
            UnknownJob, UnknownReport: there is none.
        """

        def command(draft: Draft) -> Answer:
            before, now_s = draft.state(job), self._now_s()
            report = before.reports.get(key)
            if report is None or report.expires_s <= now_s:
                past = report or before.past.get(key)
                if past is None:
                    raise UnknownReport(f"job {shown(job)} has no report {shown(key)}; see which ones it has")
                return answer(before, before, past, "the report did not count any more")
            report = cleared(report, now_s)
            after = self._settle(draft, replace(before, reports={**before.reports, key: report}))
            return answer(before, after, report)

        return self._writer.do(command)

    def set_deadline(self, job: str, deadline_s: float | None) -> Answer:
        """Set the iteration time that is wanted where nobody straggles, seconds; None: that of all clocks at maximum.

        Raises:
            UnknownJob: there is none of that name.
            InfeasibleError: no plan is that fast, or power budgets are not kept so.
            UsageError: it is no time.
        """
        check_positive("deadline_s", deadline_s)

        def command(draft: Draft) -> Answer:
            before = draft.state(job)
            check_deadline(deadline_s, before.curve)
            draft.put(replace(before, job=replace(before.job, deadline_s=deadline_s)))
            self._share(draft, job)
            return answer(before, self._settle(draft, draft.state(job)))

        return self._writer.do(command)

    def set_power(self, job: str | None, power_w: float | None) -> tuple[Answer, ...]:
        """Set the most that all GPUs of a job, or of all jobs together, may draw on average, watts; None: any.

        Returns:
            What follows, for that job or for each.

        Raises:
            UnknownJob: there is none of that name.
            InfeasiblePower: no plans draw so little; names the least.
            UsageError: it is no power.
        """
        check_positive("power_w", power_w)

        def command(draft: Draft) -> tuple[Answer, ...]:
            if job is None:
                draft.power_w = power_w
                before = tuple(draft.jobs().values())
            else:
                before = (draft.state(job),)
                draft.put(replace(before[0], job=replace(before[0].job, power_w=power_w)))
            self._share(draft, job)
            return tuple(answer(each, draft.state(each.job.name)) for each in before)

        return self._writer.do(command)

    def taken(self, job: str, version: int, iteration: int) -> None:
        """Note that a job runs by a version since an iteration; what it said later stands.

        Raises:
            UnknownJob: there is none of that name.
            Conflict: there is no such version yet.
        """

        def command(draft: Draft) -> None:
            state = draft.state(job)
            newest = state.published.version
            if not 1 <= version <= newest:
                raise Conflict(f"job {shown(job)} has no version {version} of its plans; the newest is {newest}")
            if state.taken is None or (state.taken.version, state.taken.iteration) < (version, iteration):
                self._settle(draft, replace(state, taken=Taken(version, iteration, self._now_s())))

        self._writer.do(command)

    def telemetry(self, job: str, sent: Counters) -> None:
        """Count what a run of a job has counted, as `telemetry.counted` does; unlike all else it is on disk later.

        Raises:
            UnknownJob: there is none of that name.
            Conflict: it contradicts what the same run has sent before.
        """
        state = self._state(job)
        self._telemetry.add(state.job, sent, partial(baseline_j, state), self._now_s())

    def end(self, job: str) -> None:
        """Forget a job.

        Raises:
            UnknownJob: there is none of that name.
        """

        def command(draft: Draft) -> None:
            draft.state(job)
            draft.remove(job)
            if draft.power_w is not None:
                self._share(draft, None)

        self._writer.do(command)
        self._telemetry.forget(job)

    def subscribe(self, callback: Callable[[str, int], None]) -> Callable[[], None]:
        """Have `callback` told the job and the newest version when there is one, or when the job has ended.

        It is called on a thread of the service, after all of that is on disk, and should return at once.

        Returns:
            What ends that.
        """
        return self._following.subscribe(callback)

    def tick(self) -> float:
        """Do what is due by now: reports that begin or expire, holding times that end.

        Returns:
            When to call this again, seconds since the epoch, unless a report or a wish comes before; infinite: never.
        """
        now_s = self._now_s()
        due = self._following.agenda.due(now_s)
        try:
            if due:
                self._writer.do(lambda draft: [self._settle(draft, state) for state in map(draft.find, due) if state])
        except PlannerError:
            for name in due:
                self._following.agenda.plan(name, now_s)
            raise
        if self._telemetry.write_s <= now_s:
            self._telemetry.write(self._writer)
        return self.next_tick_s()

    def next_tick_s(self) -> float:
        """When to call `tick`, after all that has changed since it said so."""
        return min(self._following.agenda.next_s(), self._telemetry.write_s)

    def _end_telemetry(self) -> None:
        try:
            while self._telemetry.write_s < math.inf:
                self._telemetry.write(self._writer)
        except PlannerError as error:
            _log.warning("The telemetry of the last seconds is not written: %s", error)

    def _settle(self, draft: Draft, state: JobState) -> JobState:
        after = settled(state, self._planning, self._now_s())
        draft.put(after)
        return after

    def _replan(self, name: str) -> None:
        try:
            replan(name, self._writer, self._planning, self._now_s)
        except Exception:
            self._following.agenda.plan(name, self._now_s() + _AGAIN_AFTER_S)
            raise

    def _share(self, draft: Draft, job: str | None) -> None:
        share_power(draft, job, lambda state: self._settle(draft, state))
