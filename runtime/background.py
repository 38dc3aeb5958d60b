"""The background thread of a rank: it does everything that the training thread must not wait for.

It reads the messages of the clock controller, takes part in the agreement on plans, keeps the
telemetry and gives the warnings. If clocks cannot be set, training goes on without them, the user
is warned, and they are tried again later, less and less often. Only what cannot change is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.base.errors import (
    ControllerLost,
    GpuError,
    GpuNotPermitted,
    GpuNotSupported,
    fault_text,
)
from perseus_planner.base.loops import Backoff
from perseus_planner.runs.verdict import StragglerDetection, StragglerDetector
from perseus_planner.runtime.controller.client import DETACH_S, HUNG_S, Connection
from perseus_planner.runtime.controller.protocol import (
    ClockOverridden,
    ControlFailure,
    ControlResumed,
    Overload,
    ToRank,
)
from perseus_planner.runtime.decider import Decider
from perseus_planner.runtime.marks import NO_REQUEST, Marks

if TYPE_CHECKING:
    from perseus_planner.runs import IterationRecord
    from perseus_planner.runtime.attachment import Reattachment
    from perseus_planner.runtime.follower import Follower
    from perseus_planner.runtime.hook import Hook
    from perseus_planner.runtime.job import JobWarnings
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.telemetry import Checkpoint, Telemetry

QUIET = 2.0
QUIET_S = 1.0
"""The GPU is reset when no computation has ended for this many of the plan's iteration times and
this many seconds.
"""

PERIOD_S = 0.05
"""Seconds between two rounds if nothing wakes the thread."""
REST_S = 0.02
"""Seconds after a round before messages wake the thread. The controller answers each clock change,
and while the thread reads what it says, the training thread cannot run Python.
"""
STOP_S = 2.0
"""How long the end of training waits for a round."""


class _HangDetector:
    """Tells when the controller has been silent for too long.

    Time in which this process did not run either, for example because the whole job was suspended,
    does not count.
    """

    def __init__(self) -> None:
        self._begun_s = self._looked_s = time.monotonic()

    def has_hung(self, age_s: float) -> bool:
        """Whether the controller was silent for `HUNG_S`; `age_s` is the age of its last sign of
        life.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > HUNG_S / 2:
            self._begun_s = now_s
        self._looked_s = now_s
        return min(age_s, now_s - self._begun_s) > HUNG_S


class BackgroundWork:
    """What the background thread does in each round.

    Args:
        follower: Plan follower of this rank.
        hook: Hook of this rank.
        marks: Marks of this rank.
        telemetry: Receives times and messages.
        warnings: Gives the warnings.
        connection: Connection to the controller; None if there is none.
        reattachment: Connects it again after the controller was lost; None without a connection.
        on_straggling: Called when this rank's GPU turns out slow, and when it has recovered.
        on_counts: Called with the checkpoints of this rank, every few seconds and at the end; must
            not raise.
        decider: Decides this rank's clocks.
        on_records: Called with the iterations that are complete; must not raise, nor take long.
    """

    def __init__(
        self,
        follower: Follower,
        hook: Hook,
        marks: Marks,
        telemetry: Telemetry,
        warnings: JobWarnings,
        connection: Connection | None,
        reattachment: Reattachment | None,
        on_straggling: Callable[[StragglerDetection], None] | None,
        on_counts: Callable[[Sequence[Checkpoint]], None] | None = None,
        decider: Decider | None = None,
        on_records: Callable[[Sequence[IterationRecord]], None] | None = None,
    ) -> None:
        self._on_records = on_records
        self._decider = Decider() if decider is None else decider
        self._follower = follower
        self._hook = hook
        self._marks = marks
        self._telemetry = telemetry
        self._warnings = warnings
        self._connection = connection
        self._reattachment = reattachment
        #: what keeps clocks from being set -> why: "final", "controller", "gpu", "fault" of this
        #: thread, or "hook" for one on the training thread
        self._problems = {} if follower.problem is None else {"final": follower.problem}
        self._backoff = Backoff()  #: of problems of this process: "gpu" and "fault"
        self._is_lost = False  #: the controller has ended, and there is no new one yet
        self._lost_s = 0.0  #: since when
        self._recovery: Future[str] | None = None  #: of what it left set
        self._on_straggling = on_straggling
        self._on_counts = on_counts
        self._counts: Sequence[Checkpoint] = ()  #: reported last
        self._detector = StragglerDetector()
        self._hang_detector = _HangDetector()
        self._progress = hook.progress
        self._progressed_s = time.monotonic()

    def descriptors(self) -> list[int]:
        """Return the descriptors that wake the thread."""
        connections = [] if self._connection is None or self._is_lost else [self._connection]
        of_connections = [connection.fileno() for connection in connections]
        return [*of_connections, *self._decider.descriptors()]

    def run_round(self) -> None:
        """Do one round; never raises."""
        try:
            messages = [] if self._connection is None else self._receive(self._connection)
            self._reset_if_quiet()
            times = self._times()
            try:
                # First, as telemetry asks the decider about the iterations that it has seen.
                self._decider.look(times, messages)
                self._follower.look()
            finally:
                # The marks give each time once, so a fault of a decider must not lose them.
                records = self._telemetry.update(times, messages)
                self._give(records)
                self._report_straggling(records)
            self._report_counts()
            self._warn()
            if self._backoff.is_due(time.monotonic()):
                self._resume("fault")
        except Exception as error:  # training must go on whatever it is, and the user must know
            self._fail("fault", fault_text(error))

    def close(self) -> None:
        """Do the last round, after the rank has detached from the controller."""
        messages: list[ToRank] = []
        with suppress(GpuError):
            if self._connection is not None:
                messages = self._connection.messages()
            self._give(self._telemetry.update(self._marks.finished(), messages))
        if self._recovery is not None and self._recovery.done():
            self._tell_recovery(self._recovery)
        self._decider.end()
        self._give(self._telemetry.close())
        self._report_counts()
        self._warn()

    def _times(self) -> list[IterationTimes]:
        """Return the times of the iterations that the device has ended; after an error of the
        device, make new marks when its pause is over.
        """
        if "gpu" in self._problems and not self._backoff.is_due(time.monotonic()):
            return []
        try:
            if "gpu" in self._problems:
                self._marks.renew()
                self._resume("gpu")
            return self._marks.finished()
        except GpuError as error:
            is_final = isinstance(error, (GpuNotPermitted, GpuNotSupported))
            self._fail("final" if is_final else "gpu", str(error))
            return []

    def _receive(self, connection: Connection) -> Sequence[ToRank]:
        """Return the controller's messages, and check that it still works; look for a new one if
        it was lost.
        """
        if self._is_lost:
            return self._reattach()
        try:
            messages = connection.messages()
            if self._hang_detector.has_hung(connection.age_s()):
                connection.kill()
                # At once, because the other ranks will see no more than that it has ended.
                text = f"the clock controller gave no sign of life for {HUNG_S:g} s and is killed"
                self._fail("controller", text)
                raise ControllerLost(text)
        except GpuError as error:
            # Noted and not said: what has become of the clocks of the GPU is known once it is
            # recovered.
            self._note("controller", str(error))
            self._is_lost = True
            self._recovery = connection.recovery
            self._lost_s = time.monotonic()
            return []
        # What the controller says of itself is acted on here; the rest, samples and changes, goes
        # to the telemetry.
        for message in messages:
            if isinstance(message, ControlFailure):
                self._fail("controller", message.text)
            elif isinstance(message, ControlResumed):
                self._resume("controller")
            elif isinstance(message, Overload):
                self._keep_changes(message.kept)
            elif isinstance(message, ClockOverridden):
                self._warnings.warn(f"overridden/{message.clock}", message.text)
        return messages

    def _reattach(self) -> Sequence[ToRank]:
        """Say what has become of the GPUs that a lost controller had set; then attach to a new
        one, and return its first messages.
        """
        assert self._reattachment is not None  # there is a connection
        if self._recovery is not None:
            # First what has become of the clocks; a new controller may want to set them.
            if not self._recovery.done() and time.monotonic() < self._lost_s + DETACH_S:
                return []
            self._tell_recovery(self._recovery)
            self._reattachment.begin()
        messages = self._reattachment.look()
        if messages is None:
            return []
        self._is_lost = False
        self._hang_detector = _HangDetector()
        self._resume("controller")
        return messages

    def _tell_recovery(self, recovery: Future[str]) -> None:
        assert self._connection is not None  # that was lost
        text = self._connection.result_of(recovery, 0.0)
        is_reset = recovery.done() and recovery.exception() is None
        key = "controller" if is_reset else f"still locked/{text}"
        self._say(key, f"{self._problems['controller']}, and {text}")
        self._recovery = None

    def _keep_changes(self, most: int) -> None:
        """Run with at most so many changes of the clock in an iteration; warn once for each
        plan.
        """
        before = self._follower.planned
        program = self._follower.keep_changes(most)
        if program is not None:
            key = "changes"
            asked = before.changes if before is not None else program.changes
            remedy = f"give planner_runtime max_changes={most}"
            if program.expected.plan is not None:
                key = f"changes/{program.version}"
                remedy = f"make the plan with fewer changes (--max-changes {most})"
            text = (
                "clock changes cannot keep up, so this rank follows its plan with at most "
                f"{program.changes} of {asked} clock changes in an iteration: it meets the same "
                f"deadline with more energy; {remedy}, or allow more changes per second"
            )
            self._warnings.warn(key, text)

    def _reset_if_quiet(self) -> None:
        """Reset the GPU while no iteration makes progress, so that no clock slows what an engine
        does not show to be outside of one; and after an error of the device, which may yet write
        older requests.

        The next computation that ends requests a clock again.
        """
        progress = self._hook.progress
        now_s = time.monotonic()
        program = self._follower.program
        if progress != self._progress:
            self._progress = progress
            self._progressed_s = now_s
        time_s = 0.0 if program is None else program.expected.time_s
        if self._connection is None or not time_s:
            return
        is_quiet = now_s - self._progressed_s > QUIET * time_s + QUIET_S
        if is_quiet or not self._problems.keys().isdisjoint(("gpu", "hook")):
            self._connection.request[0] = NO_REQUEST

    def _give(self, records: Sequence[IterationRecord]) -> None:
        if self._on_records is not None:
            self._on_records(records)

    def _report_straggling(self, records: Sequence[IterationRecord]) -> None:
        for record in records:
            self._detector, detection = self._detector.after(record)
            if detection is None or self._on_straggling is None:
                continue
            try:
                self._on_straggling(detection)
            except Exception as error:  # raised by the caller's code
                self._warnings.warn(
                    "on_straggling", f"on_straggling raised {type(error).__name__}: {error}"
                )

    def _report_counts(self) -> None:
        counts = self._telemetry.checkpoints
        if counts is not self._counts and self._on_counts is not None:
            self._counts = counts
            self._on_counts(counts)

    def _follow_hook(self) -> None:
        """Say what was raised on the training thread, and when that is over; the hook is tried
        again there.
        """
        fault = self._hook.fault
        if fault is None:
            self._resume("hook")
        elif "hook" not in self._problems:
            self._note("hook", fault)
            self._say("fault", fault)

    def _fail(self, key: str, text: str) -> None:
        """Request no clocks until this problem is over; warn once in each such spell."""
        if key in ("gpu", "fault") and self._backoff.is_due(time.monotonic()):
            self._backoff.fail(time.monotonic())
        self._note(key, text)
        self._say(key, text)

    def _note(self, key: str, text: str) -> None:
        if not self._problems:
            self._warnings.forget("resumed")
        self._problems.setdefault(key, text)
        self._follower.problem = next(iter(self._problems.values()))

    def _say(self, key: str, text: str) -> None:
        until = "" if "final" in self._problems else " until clocks can be set again"
        self._warnings.warn(key, f"{text}; training goes on at the GPU's default clocks{until}")

    def _resume(self, key: str) -> None:
        """Request clocks again, from the next iteration on, if no other problem is left."""
        if self._problems.pop(key, None) is None:
            return
        self._follower.problem = next(iter(self._problems.values()), None)
        self._warnings.forget("fault" if key == "hook" else key)
        if not self._problems:
            self._warnings.warn("resumed", "clocks are set again")

    def _warn(self) -> None:
        follower = self._follower
        limit_w = self._telemetry.site_limit_w
        if limit_w is not None:
            text = (
                f"the power limit of this GPU is {limit_w:g} W, below its default, so it may not "
                "reach the clocks of its plan; a service plans within this limit; without a "
                f"service, solve again with --gpu-power-limit {limit_w:g}W"
            )
            self._warnings.warn(f"site limit/{limit_w:g}", text)
        if follower.deviation is not None:
            text = (
                "clocks are reset in these iterations, and set again after an iteration that runs "
                "as planned"
            )
            self._warnings.warn("deviation", f"{follower.deviation}; {text}")
        self._follow_hook()
        if follower.unfollowed is not None and "final" not in self._problems:
            self._fail("final", follower.unfollowed)
        if follower.misfit is not None:
            text = (
                f"{follower.misfit}; this rank runs at the GPU's default clocks until it has a "
                "plan that fits"
            )
            self._warnings.warn("misfit", text)
        if follower.agreement.lost is not None:
            text = f"no new plan can be agreed on: {follower.agreement.lost}"
            self._warnings.warn("store", text, by="rank 0")
