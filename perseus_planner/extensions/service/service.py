"""The service without HTTP: jobs, reports about them, and the versions of their plans.

One thread changes what it knows: commands that arrive while a transaction is being written go into
the next one together, and are answered after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import wraps
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from perseus_planner.base.errors import PlannerError, shown
from perseus_planner.base.files import sha256
from perseus_planner.base.loops import SteadyClock
from perseus_planner.extensions.service.checks import (
    check_counts,
    check_report,
    check_same,
    jobs_concerned,
    with_alerts,
)
from perseus_planner.extensions.service.draft import Draft, unknown_job
from perseus_planner.extensions.service.jobs import (
    WRITTEN_AFTER_S,
    JobState,
    answer_to,
    check_deadline,
    first_state,
    give_up,
    is_other_limit,
    is_same,
    lease_s,
    next_look_s,
    prepare,
    recognize,
    reconcile,
    take_over_job,
    until_it_begins,
)
from perseus_planner.extensions.service.models import (
    Answer,
    Conflict,
    History,
    JobStatus,
    JobTotals,
    PipelineStatus,
    PlanSet,
    PowerBudget,
    PowerStep,
    Registered,
    RegisteredJob,
    Report,
    Taken,
    UnknownJob,
    UnknownReport,
)
from perseus_planner.extensions.service.planning import Planning, Replanner
from perseus_planner.extensions.service.power import (
    begin_budgets,
    set_budget,
    share_least_power,
    share_power,
)
from perseus_planner.extensions.service.processes import Ending, Processes
from perseus_planner.extensions.service.solving import Unsolved, solve_profile
from perseus_planner.extensions.service.statuses import (
    current_reports,
    pipeline_statuses,
    status_of,
    totals_of,
)
from perseus_planner.extensions.service.watch import Watchdog
from perseus_planner.extensions.service.writer import Writer, Writing

if TYPE_CHECKING:
    from perseus_planner.extensions.service.curve import Curve
    from perseus_planner.extensions.service.models import Counters
    from perseus_planner.extensions.service.store import Storage, Stored

P = ParamSpec("P")
R = TypeVar("R")


JOB_LEASE_S = 180.0
"""After a job was not heard of for so long, it has no share of the power budget of all jobs."""
FORGET_S = 7 * 86400.0
"""After a job was not heard of for so long, it is ended."""
_WRITING = ("telemetry", "")  # the one timer for the telemetry of all jobs
_WRITTEN_AT_ONCE = 64  # jobs whose telemetry is written together, for which reports wait
_CLOCK_SET_S = 0.5  # by which the machine's clock leaves the service's if somebody has set it
_RETRY_S = 1.0  # after changes that could not be written, for example because the disk is full

_log = logging.getLogger(__name__)


def _command(
    change: Callable[Concatenate[Service, Draft, P], R],
) -> Callable[Concatenate[Service, P], Future[R]]:
    """Return the method that has the writer run `change`, without waiting: the future has its
    result, or its error, once what it changed is on disk.
    """

    @wraps(change)
    def submit(service: Service, /, *args: P.args, **options: P.kwargs) -> Future[R]:
        return service._writer.submit(lambda draft: change(service, draft, *args, **options))

    return submit


class Service:
    """Takes reports and settings, and publishes versions of plans. Use it as a context manager,
    from any thread.

    What a method returns and what it changes is on disk when it returns, except telemetry. If the
    process is killed, the next service with the same storage continues: the versions of a job rise
    by 1, and a promised version comes. Plans are made by other processes; only `register` and
    `solve` wait for them.

    Methods that change something, except `register`, return futures of results and errors. Unless
    they say otherwise, methods raise `UnknownJob` for a job that does not run, and `StorageError`
    if a change cannot be written.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        now_s: Callable[[], float] | None = None,
        wall_s: Callable[[], float] | None = None,
        workers: int = 1,
        run: Callable[..., Any] | None = None,
        lease_s: float = JOB_LEASE_S,
        forget_s: float = FORGET_S,
    ) -> None:
        """Recover everything that `storage` holds.

        Args:
            storage: Not used by any other service. It is left open.
            now_s: Returns seconds since the epoch, by which time passes; by default a
                `SteadyClock`.
            wall_s: The machine's clock, for moments that people give; by default `now_s` or the
                true one.
            workers: Number of processes that solve and plan.
            run: Calls a function with arguments, in place of those processes.
            lease_s: After a job was not heard of for so long, it has no share of the power budget
                of all jobs.
            forget_s: After a job was not heard of for so long, it is ended.

        Raises:
            StorageError: If the storage cannot be read.
        """
        self._wall_s = wall_s or now_s or time.time
        #: Returns the time by the clock of the service, seconds since the epoch.
        self.now_s = now_s or SteadyClock(self._wall_s)
        self._offset_s = 0.0
        storage.now_s = self.now_s
        stored = _by_clock(storage, storage.load(), self.now_s())
        self._processes = Processes(workers)
        self._solver = Processes(1)
        self._planning = Planning(storage.frontier, run or self._processes.run)
        self.watchdog = Watchdog()  #: Of its threads
        self._replanner = Replanner(self._replan, workers, self.watchdog)
        #: (what, job) -> when it is due: to look whether time alone changes the decision of the
        #: job, the end of its lease unless it is silent, to end it if it still is, to write
        #: telemetry.
        self._due_s: dict[tuple[str, str], float] = {}
        self._epoch = uuid4().hex
        self._lease_s = lease_s
        self._forget_s = forget_s
        #: Called with a job and its newest version whenever there is a new one, or the job has
        #: ended; on a thread of the service, once the change is on disk. It returns at once.
        self.on_version: Callable[[str, int], None] = lambda _, __: None
        self._storage = storage
        self._writer = Writer(
            storage, stored, self._reconciled, self._follow_up, self.now_s, self.watchdog
        )
        self._unwritten: dict[str, None] = {}  #: jobs whose telemetry is not written
        self._stack = ExitStack()
        for name, state in stored.jobs.items():
            # A new service has heard of nobody yet, so every job gets a whole lease.
            self._due_s["lease", name] = self.now_s() + lease_s
            if state.silent_since_s is not None:  # it may live, and be heard of again by then
                ends_s = max(state.silent_since_s + forget_s, self.now_s() + lease_s)
                self._due_s["forget", name] = ends_s
            self._set_timer(name, state)

    def __enter__(self) -> Service:
        with ExitStack() as stack:
            stack.enter_context(self._writer)
            stack.callback(self._write_all_telemetry)
            stack.enter_context(self._replanner)
            stack.enter_context(self._solver)
            # ends first, so that nobody waits for results that are not needed
            stack.enter_context(self._processes)
            self._stack = stack.pop_all()
        # Slow and limited curves were in the memory of the last service only: they are solved again
        # before anybody asks.
        for name, state in self._writer.jobs.items():
            targets = state.decision.targets
            if not state.is_planned or any(
                target.slow_stages or target.gpu_power_limit_w for target in targets
            ):
                self._replanner.request(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Questions, which are answered from memory

    def status(self, job: str) -> JobStatus:
        """Return the status of one job."""
        return status_of(self._state(job), self.now_s())

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return the status of every running job, sorted by name."""
        now_s = self.now_s()
        return tuple(status_of(state, now_s) for _, state in sorted(self._writer.jobs.items()))

    def totals(self) -> tuple[JobTotals, ...]:
        """Return the totals of all running jobs by name, then of the `ENDED_SHOWN` that have
        ended last.
        """
        running = (totals_of(state) for _, state in sorted(self._writer.jobs.items()))
        return (*running, *self._storage.ended_jobs())

    def reports(self, job: str) -> tuple[Report, ...]:
        """Return the reports of a job that count now or will count, in order of arrival."""
        return current_reports(self._state(job), self.now_s())

    def curve(self, job: str) -> Curve:
        """Return the energy curve of a job's pipelines as profiled."""
        return self._state(job).curve

    def pipelines(self, job: str) -> tuple[int, tuple[PipelineStatus, ...]]:
        """Return the newest version of a job's plans and the status of each pipeline, in order."""
        state = self._state(job)
        return state.published.version, pipeline_statuses(state)

    def plans(self, job: str, after: int, *, asks: bool = True) -> PlanSet | None:
        """Return a job's newest plans; None if their version is not above `after`. The job is heard
        of if it `asks` for them, and not somebody who has sent a report about it.
        """
        if asks:
            self._hear_of(job)
        published = self._state(job).published
        return published if published.version > after else None

    def epoch(self, job: str) -> str:
        """Return what the versions of a job's plans are numbered in: another one once the job was
        registered anew, or the service started, perhaps with an older database.
        """
        return f"{self._epoch}-{self._state(job).job.since_s!r}"

    def lease_s(self, job: str) -> float | None:
        """Return for how long the job's plans hold if it hears nothing more, as `jobs.lease_s`."""
        return lease_s(self._state(job), self.now_s())

    def history(self, job: str) -> History:
        """Return what has happened to a job, and how its figures went."""
        state = self._state(job)
        tally = state.tally
        points = () if tally is None else tally.points
        waiting = () if tally is None else tally.latest.waiting
        return History(points, state.events, state.budgets, waiting)

    @property
    def problem(self) -> str | None:
        """Why nothing can be taken: a change could not be written, for example as the disk is full,
        and no `tick` has seen since that it can; or a thread has ended or is stuck. None if all is
        well.
        """
        return self._writer.problem or self.watchdog.problem

    @property
    def writing(self) -> Writing:
        """How writing to the database goes."""
        return self._writer.figures()

    @property
    def power_budget(self) -> PowerBudget:
        """The power budget of all jobs, and what replaces it later."""
        return self._writer.budget.later

    # Jobs

    def solve(self, unsolved: Unsolved, most_s: float) -> bytes:
        """Solve a profile with a schedule, in a process of its own; returns the frontier file. Only
        one call at a time.

        Raises:
            UsageError: If the profile or the schedule cannot be used, they do not fit each other,
                or it takes too long.
        """
        try:
            return bytes(self._solver.run(solve_profile, unsolved, timeout_s=most_s))
        finally:
            self._solver.restart()  # a large schedule leaves no memory behind

    def register(
        self, job: RegisteredJob, frontier: bytes, *, take_over: bool = False
    ) -> Registered:
        """Register a job, or recognize it; returns when the first version of its plans is there.

        Args:
            job: The service sets its `frontier` and `since_s`.
            frontier: The frontier file.
            take_over: Whether another job of that name goes on as this one.

        Raises:
            Conflict: If another job of that name runs.
            UsageError: If the job cannot be used.
            FrontierError: If `frontier` is not a frontier file.
            InfeasibleError: If no plan meets its deadline, switch budget or power, or the power
                budget of all jobs.
        """
        job = replace(job, frontier=sha256(frontier), since_s=self.now_s(), ranks=len(job.places))
        state = self._writer.jobs.get(job.name)
        # A job that has fallen silent must not keep its name from the next one. Another request may
        # have ended it by now.
        if state is not None and not take_over and _has_left(state, job):
            with suppress(UnknownJob):
                self.end(job.name).result()
        self._hear_of(job.name)
        state = self._writer.jobs.get(job.name)
        if state is not None and (not take_over or is_same(state, job)):
            return recognize(state, job)
        # Planning takes seconds on this thread; the job is added by the writer, which looks once
        # more who has that name.
        first = first_state(job, frontier, self._planning)
        return self._add(first, frontier, take_over).result()

    @_command
    def _add(self, draft: Draft, first: JobState, frontier: bytes, take_over: bool) -> Registered:
        job = first.job
        running = draft.find(job.name)
        if running is not None and not take_over:
            return recognize(running, job)
        draft.frontiers[job.frontier] = frontier, first.curve
        if running is None:
            draft.put(first)
        else:
            draft.reconcile(take_over_job(running, first))
        # Before it is answered: a job that cannot keep the budgets is refused, and nothing of it
        # stays.
        share_power(draft, job.name)
        state = draft.state(job.name)
        return Registered(state.job, state.published.version, running is None)

    @_command
    def end(self, draft: Draft, job: str) -> None:
        """Forget a job that has ended, but for its totals and its last events."""
        self._end(draft, job)

    def _end(self, draft: Draft, job: str) -> None:
        draft.ended.append(totals_of(draft.state(job), self.now_s()))
        draft.changed[job] = None
        # What it drew is free for the others.
        if draft.budget.power_w is not None:
            share_power(draft, None)

    @_command
    def set_deadline(self, draft: Draft, job: str, deadline_s: float | None) -> Answer:
        """Set the iteration time to aim for without stragglers, seconds; None for that of all
        clocks at maximum.

        Raises:
            InfeasibleError: If no plan is that fast, or the power budgets cannot be met with it.
            UsageError: If it is not a time.
        """
        before = draft.state(job)
        check_deadline(deadline_s, before.curve)
        draft.put(before.with_job(deadline_s=deadline_s))
        share_power(draft, job)
        return answer_to(before, draft.reconcile(draft.state(job)))

    @_command
    def set_power(
        self,
        draft: Draft,
        job: str | None,
        power_w: float | None,
        schedule: tuple[PowerStep, ...] = (),
    ) -> tuple[Answer, ...]:
        """Bound the average power of all GPUs of a job, or of all jobs together, watts; None
        removes the bound.

        `schedule` has the budgets that replace it later. One that cannot be met then becomes the
        least that can.

        Returns:
            The effect on that job, or on each job.

        Raises:
            InfeasiblePower: If no plans draw so little; names the least.
            UsageError: If it is not a power.
        """
        before = draft.jobs().values() if job is None else [draft.state(job)]
        set_budget(draft, job, PowerBudget.of(power_w, schedule))
        share_power(draft, job)
        return tuple(answer_to(state, draft.state(state.job.name)) for state in before)

    # Reports

    @_command
    def report(self, draft: Draft, job: str, report: Report) -> Answer:
        """Take a report. One with a known key changes nothing; once that one is over, it is
        refused.

        Raises:
            Conflict: If another report has that key, the report with that key does not count any
                more, or too many reports count.
            UsageError: If the job does not have what the report is about.
        """
        before = draft.state(job)
        known_report = before.reports.get(report.key) or before.past.get(report.key)
        if known_report is not None:
            check_counts(known_report, report, self.now_s())
            check_same(known_report, report)
            reason = "the report was received before"
            if report.key in before.past:
                reason += ", and its source has observed the scope later"
            return answer_to(before, before, known_report, reason)
        now_s = self.now_s()
        check_report(before, report, now_s)
        after = draft.reconcile(before.with_report(report, now_s))
        if report.key in after.reports:
            reason = until_it_begins(after, report, now_s)
        else:
            reason = "it expires before it begins, or its source has observed the scope later"
        return answer_to(before, after, report, reason)

    @_command
    def alert(
        self, draft: Draft, reports: Sequence[Report]
    ) -> tuple[tuple[Answer, ...], dict[str, str]]:
        """Take reports that name no job: each concerns every job that has its GPU or node.

        A report with a known key is the same alert, which may have another slowdown now, and is
        over once it has expired. All are taken in one transaction, and an error in one does not
        affect the others.

        Returns:
            The answer for each job that has a GPU or node that they name; and by the key of a
            report, why no job or not every job concerned has taken it.
        """
        of_jobs, ignored = jobs_concerned(draft.jobs(), reports)
        answers = []
        for name, alerts in of_jobs.items():
            before = draft.state(name)
            after, refused = with_alerts(before, alerts, self.now_s())
            ignored |= refused
            # A repeated alert changes nothing; no new decision is made for it.
            after = before if after is before else draft.reconcile(after)
            answers.append(answer_to(before, after))
        return tuple(answers), ignored

    @_command
    def clear(self, draft: Draft, job: str, key: str) -> Answer:
        """Withdraw a report: it expires now.

        Raises:
            UnknownReport: If the job has no such report.
        """
        before = draft.state(job)
        now_s = self.now_s()
        report = before.reports.get(key)
        if report is None or report.expires_s <= now_s:
            past = report or before.past.get(key)
            if past is None:
                raise UnknownReport(
                    f"job {shown(job)} has no report {shown(key)}; its status lists those that it "
                    "has"
                )
            return answer_to(before, before, past, "the report did not count any more")
        # As an expired report it still keeps earlier ones of its source from counting.
        report = report.expired(now_s)
        return answer_to(before, draft.reconcile(before.with_report(report, now_s)), report)

    # What a job reports about itself

    def taken(self, job: str, version: int, iteration: int) -> Future[None]:
        """Record that a job runs a version since an iteration. An older message does not replace a
        newer one.

        Raises:
            Conflict: If there is no such version yet.
        """
        self._hear_of(job)
        return self._take(job, version, iteration)

    @_command
    def _take(self, draft: Draft, job: str, version: int, iteration: int) -> None:
        state = draft.state(job)
        newest = state.published.version
        if not 1 <= version <= newest:
            raise Conflict(
                f"job {shown(job)} has no version {version} of its plans; the newest is {newest}"
            )
        before = state.taken
        # Messages may overtake each other on their way.
        if before is None or (before.version, before.iteration) < (version, iteration):
            draft.reconcile(replace(state, taken=Taken(version, iteration, self.now_s())))

    def telemetry(self, job: str, sent: Counters) -> Future[None]:
        """Add the counters of a run of a job, as `jobs.add_counters` does. They are on disk
        some seconds later.

        The job is planned again if the power limit of its GPUs has changed.

        Raises:
            Conflict: If they contradict what the same run sent before.
        """
        self._hear_of(job)
        return self._count(job, sent)

    @_command
    def _count(self, draft: Draft, job: str, sent: Counters) -> None:
        before = draft.state(job)
        now_s = self.now_s()
        limit_w = sent.gpu_power_limit_w
        after = before.with_telemetry(sent, now_s)
        # Telemetry comes often and from every job: it is written later, many jobs at once, and may
        # be lost, as the next message has it all.
        if after.tally is not before.tally:
            self._unwritten[job] = None
            self._due_s.setdefault(_WRITING, now_s + WRITTEN_AFTER_S)
        if is_other_limit(before.job.gpu_power_limit_w, limit_w):
            draft.reconcile(after.with_job(gpu_power_limit_w=limit_w))
        else:
            draft.put(after)

    # Time

    def tick(self) -> float:
        """Do what is due by now: reports begin or expire, holding times end, budgets begin,
        telemetry is written.

        Raises:
            StorageError: If a change cannot be written.

        Returns:
            When to call this again, unless a request comes first, seconds since the epoch; infinite
            for never.
        """
        now_s = self.now_s()
        wall_s = self._wall_s()
        # Leases and reports run by a clock that nobody sets. Schedules name moments of the
        # machine's clock, so setting that moves their timers.
        if abs(wall_s - now_s - self._offset_s) > _CLOCK_SET_S:
            self._offset_s = wall_s - now_s
            for name, state in self._writer.jobs.items():
                if state.job.power_schedule:
                    self._set_timer(name, state)
        due = [key for key, at_s in list(self._due_s.items()) if at_s <= now_s]
        # by the same reading of the clocks: of what is due this returns the time that it is given
        budget_s = self._writer.budget.next_s(now_s, wall_s)
        try:
            if due or budget_s <= now_s:
                self._carry_out(due, now_s, wall_s).result()
        except PlannerError:
            for key in due:
                # Nothing of it was written. What has a later time by now was put off meanwhile and
                # stays so.
                self._due_s.setdefault(key, now_s)
            raise
        self._writer.check()
        return self.next_tick_s()

    def next_tick_s(self) -> float:
        """Return when to call `tick`, taking into account what has changed since it last said
        so.
        """
        if self._writer.problem:
            return -math.inf
        budget_s = self._writer.budget.next_s(self.now_s(), self._wall_s())
        return min(*list(self._due_s.values()), budget_s, math.inf)

    @_command
    def _carry_out(
        self, draft: Draft, due: Sequence[tuple[str, str]], now_s: float, wall_s: float
    ) -> None:
        """Begin the budgets that are due, take the shares of silent jobs back, reconcile the jobs
        that are to be looked at, and write telemetry; unless it was put off meanwhile.
        """
        # A command before this one in the queue may have put something off, such as the lease of a
        # job that was just heard of.
        due = [key for key in due if self._due_s.get(key, now_s) <= now_s]
        for key in due:
            self._due_s.pop(key, None)
        # A silent job loses its share now and is ended much later: it may be gone, or only its
        # network is down.
        for what, name in due:
            state = draft.find(name)
            if what == "lease" and state is not None and state.silent_since_s is None:
                draft.put(replace(state, silent_since_s=now_s))
                share_power(draft, name)
                self._due_s["forget", name] = now_s + self._forget_s
            elif what == "forget" and state is not None and state.silent_since_s is not None:
                _log.info("it was not heard of for so long that it is ended", extra={"job": name})
                self._end(draft, name)
        looks = [name for what, name in due if what == "look"]
        # Before the jobs are looked at, which then decide by the new budgets.
        begin_budgets(draft, looks, wall_s)
        for state in map(draft.find, looks):
            if state is not None:
                draft.reconcile(state)
        if _WRITING in due:
            # They are struck off once they are on disk: a transaction that fails forgets none.
            waiting = [name for name in self._unwritten if name not in draft.telemetry]
            draft.telemetry.update(waiting[:_WRITTEN_AT_ONCE])
            if waiting[_WRITTEN_AT_ONCE:]:
                self._due_s[_WRITING] = now_s

    def _hear_of(self, name: str) -> None:
        """Note that a job has sent something, which gives it its share of the power again."""
        state = self._writer.jobs.get(name)
        if state is None:
            return
        self._due_s["lease", name] = self.now_s() + self._lease_s
        self._due_s.pop(("forget", name), None)
        if state.silent_since_s is not None:
            self._note_heard(name)

    @_command
    def _note_heard(self, draft: Draft, name: str) -> None:
        state = draft.state(name)
        if state.silent_since_s is not None:
            draft.put(replace(state, silent_since_s=None))
            share_least_power(draft, name)

    def _state(self, name: str) -> JobState:
        state = self._writer.jobs.get(name)
        if state is None:
            raise unknown_job(name)
        return state

    def _reconciled(self, state: JobState) -> JobState:
        return reconcile(state, self._planning, self.now_s())

    def _replan(self, name: str) -> None:
        """Solve or plan once for a job, and publish its plans if that was the last of them; takes
        up to minutes.
        """
        state = self._writer.jobs.get(name)
        problem = ""
        # It has ended while it waited for its turn.
        if state is None:
            return
        try:
            if prepare(state, self._planning, self.now_s()):
                self._replanner.request(name)  # after those that wait
                return
        except Ending:
            return
        except PlannerError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("Planning failed for job %r", name)
            problem = repr(error)
        try:
            self._publish(state, problem).result()
        except Exception:
            # Without a timer nobody would ask for these plans again.
            self._due_s["look", name] = self.now_s() + _RETRY_S
            raise

    @_command
    def _publish(self, draft: Draft, before: JobState, problem: str) -> None:
        """Publish plans that were made for a job, or why they could not be."""
        state = draft.find(before.job.name)
        # A failure counts for the registration that failed alone.
        if state is not None and problem and state.registered is before.registered:
            draft.put(give_up(state, problem))
        elif state is not None:
            draft.reconcile(state)

    def _set_timer(self, name: str, state: JobState) -> None:
        """Remember when time alone may change the decision; a job that is being planned is
        looked at after that.
        """
        now_s = self.now_s()
        look_s = next_look_s(state, now_s, self._wall_s())
        is_awaited = not state.is_planned and look_s <= now_s
        self._due_s["look", name] = math.inf if is_awaited else look_s

    def _follow_up(self, draft: Draft) -> None:
        """Strike off telemetry that is written, set timers, request plans and notify subscribers
        after a change is on disk.
        """
        for name in draft.telemetry:
            self._unwritten.pop(name, None)
        for name, before, after in draft.changes():
            if before is None:
                self._due_s["lease", name] = self.now_s() + self._lease_s
            if after is None:
                # What is due for a job that has ended would be done to the next one of that name.
                for what in ("look", "lease", "forget"):
                    self._due_s.pop((what, name), None)
                # That of another job of that name, in the same change, still has to be written.
                if draft.find(name) is None:
                    self._unwritten.pop(name, None)
            else:
                self._set_timer(name, after)
                if not after.is_planned:
                    self._replanner.request(name)
            _log_events(name, before, after)
        # Subscribers last, after the timers and requests of all jobs are set.
        for name, before, after in draft.changes():
            versions = [state.published.version for state in (before, after) if state is not None]
            # also of a job that is new, or has ended
            if versions[0] < versions[-1] or len(versions) == 1:
                self.on_version(name, versions[-1])

    def _write_all_telemetry(self) -> None:
        try:
            while self._unwritten:
                # `_carry_out` leaves out what was put off, and the timer may be ahead of now.
                self._due_s.pop(_WRITING, None)
                self._carry_out([_WRITING], self.now_s(), self._wall_s()).result()
        except PlannerError as error:
            _log.warning("The telemetry of the last seconds could not be written: %s", error)


def _has_left(state: JobState, job: RegisteredJob) -> bool:
    """Whether the job in `state` is not heard of, so that its name is free for another `job`."""
    return state.silent_since_s is not None and not is_same(state, job)


def _by_clock(storage: Storage, stored: Stored, now_s: float) -> Stored:
    """Return what is stored by this clock: if it is behind that of the last service, all that was
    left of a time then is left now.
    """
    if stored.written_s <= now_s:
        return stored
    behind_s = stored.written_s - now_s
    _log.warning("The clock is %.0f s behind that of the last service", behind_s)
    jobs = {name: state.later(-behind_s) for name, state in stored.jobs.items()}
    storage.commit(Draft(stored.jobs, dict(jobs)))
    return replace(stored, jobs=jobs)


def _log_events(name: str, before: JobState | None, after: JobState | None) -> None:
    """Log what has happened to a job."""
    if after is None:
        _log.info("the job has ended", extra={"job": name})
        return
    last = before.events[-1] if before is not None and before.events else None
    new = takewhile(lambda event: event is not last, reversed(after.events))
    for event in reversed([*new]):
        _log.info("%s", event.text, extra={"job": name})
