"""The thread of a rank that does what the training thread must not wait for.

It reads what the clock controller says, takes part in the agreement on plans, keeps the telemetry and gives the
notices. If it fails, training goes on: without clocks, and that is said.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from perseus_planner.errors import ControllerLost, GpuError
from perseus_planner.runs.straggler import Straggling, Watch
from perseus_planner.runtime.controller.client import HUNG_S, Connection
from perseus_planner.runtime.controller.protocol import Failed, ToRank
from perseus_planner.runtime.marks import NOTHING, Marks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perseus_planner.runs import IterationRecord
    from perseus_planner.runtime.hook import Hook
    from perseus_planner.runtime.notices import Notices
    from perseus_planner.runtime.switching.controller import JobPilot
    from perseus_planner.runtime.telemetry.counters import Counts
    from perseus_planner.runtime.telemetry.telemetry import Telemetry

QUIET, QUIET_S = 2.0, 1.0
"""After so many of the plan's iteration times, and so many seconds, in which no computation ended, the GPU is reset."""

_ROUND_S = 0.05  #: between two rounds where nothing wakes it
_STOP_S = 2.0


class Background:
    """Runs `rounds` in a thread until it is stopped."""

    def __init__(self) -> None:
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wakes, False)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._closing = threading.Lock()
        self._is_closed = False

    def wake(self) -> None:
        """Begin the next round now; costs the caller one system call. Nothing happens when it is stopped."""
        with self._closing, suppress(BlockingIOError):  # it has been woken often enough
            if not self._is_closed:
                os.write(self._wake, b".")

    def start(self, one_round: Callable[[], None], descriptors: Callable[[], list[int]]) -> None:
        """Run `one_round` again and again, whenever one of `descriptors` can be read, and from time to time."""
        self._thread = threading.Thread(
            target=self._run, args=(one_round, descriptors), daemon=True, name="perseus-planner runtime"
        )
        self._thread.start()

    def stop(self) -> bool:
        """End after the round that is under way; False: it does not come to its end."""
        self._stopped = True
        self.wake()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                return False
        with self._closing:
            self._is_closed = True
            os.close(self._wake)
            os.close(self._wakes)
        return True

    def _run(self, one_round: Callable[[], None], descriptors: Callable[[], list[int]]) -> None:
        while not self._stopped:
            poller = select.poll()  # unlike select, for descriptors of any number
            for descriptor in (self._wakes, *descriptors()):
                poller.register(descriptor, select.POLLIN)
            if self._wakes in dict(poller.poll(1e3 * _ROUND_S)):
                os.read(self._wakes, 4096)
            one_round()


class _Patience:
    """With a controller that gives no sign of life.

    It begins anew where this process stood still itself, with the whole job perhaps, as when that is suspended.
    """

    def __init__(self) -> None:
        self._begun_s = self._looked_s = time.monotonic()

    def has_ended(self, age_s: float) -> bool:
        """Whether it was silent for `HUNG_S` in which this process would have heard; `age_s`: of its last sign."""
        now_s = time.monotonic()
        if now_s - self._looked_s > HUNG_S / 2:
            self._begun_s = now_s
        self._looked_s = now_s
        return min(age_s, now_s - self._begun_s) > HUNG_S


class Rounds:
    """What is done in a round.

    Args:
        pilot: of this rank.
        hook: of this rank.
        marks: of this rank.
        telemetry: that is kept.
        notices: that are given.
        connection: to the controller; None where there is none.
        on_straggling: told when this rank's GPU turns out slow, and when that is over.
        on_counts: told what this rank has counted, every few seconds and at last; raises nothing.
    """

    def __init__(
        self,
        pilot: JobPilot,
        hook: Hook,
        marks: Marks,
        telemetry: Telemetry,
        notices: Notices,
        connection: Connection | None,
        on_straggling: Callable[[Straggling], None] | None,
        on_counts: Callable[[Sequence[Counts]], None] | None = None,
    ) -> None:
        self._pilot, self._hook, self._marks, self._telemetry, self._notices = pilot, hook, marks, telemetry, notices
        self._connection, self._on_straggling, self._on_counts = connection, on_straggling, on_counts
        self._counts: Sequence[Counts] = ()  #: that were told
        self._watch, self._patience = Watch(), _Patience()
        self._dwell_s: float | None = None
        self._progress, self._progressed_s = hook.progress, time.monotonic()

    def descriptors(self) -> list[int]:
        """What may be read."""
        return [] if self._connection is None else [self._connection.fileno()]

    def once(self) -> None:
        """One round; raises nothing."""
        try:
            messages = [] if self._connection is None else self._heard(self._connection)
            self._reset_if_quiet()
            self._pilot.look()
            self._report(self._telemetry.update(self._marks.finished(), messages))
            self._tell_counts()
            self._tell()
        except GpuError as error:
            self._fail("gpu", str(error))
        except Exception as error:  # whatever it is, training must go on, and the user must know
            self._fail("fault", f"a fault of the planner, please report it: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The last round, after the controller has been left."""
        messages: list[ToRank] = []
        with suppress(GpuError):
            if self._connection is not None:
                messages = self._connection.messages()
            self._telemetry.update(self._marks.finished(), messages)
        self._telemetry.close()
        self._tell_counts()
        self._tell()

    def _heard(self, connection: Connection) -> list[ToRank]:
        """What the controller has said, and whether it still does its work."""
        try:
            messages = connection.messages()
            if self._patience.has_ended(connection.age_s()):
                # Told first: to the others it has just ended then.
                self._fail("controller", f"the clock controller gave no sign of life for {HUNG_S:g} s and is ended")
                connection.kill()
                raise ControllerLost("it is killed")
            self._keep_dwell(connection)
        except GpuError as error:
            self._connection = None
            self._fail("controller", str(error))
            return []
        for message in messages:
            if isinstance(message, Failed):
                self._fail("controller", message.text)
        return messages

    def _keep_dwell(self, connection: Connection) -> None:
        program = self._pilot.program
        if program is not None and program.plan.min_dwell_s != self._dwell_s:
            self._dwell_s = program.plan.min_dwell_s
            connection.dwell(self._dwell_s)

    def _reset_if_quiet(self) -> None:
        """Where no iteration goes on, in an evaluation or a hang, no clock is to hold the GPU back.

        The next computation that ends asks for the next one's clock as ever.
        """
        progress, now_s, program = self._hook.progress, time.monotonic(), self._pilot.program
        if progress != self._progress:
            self._progress, self._progressed_s = progress, now_s
        if program is None or self._connection is None:
            return
        if now_s - self._progressed_s > QUIET * program.plan.time_s + QUIET_S:
            self._connection.word[0] = NOTHING

    def _report(self, rows: Sequence[IterationRecord]) -> None:
        for row in rows:
            self._watch, straggling = self._watch.after(row)
            if straggling is None or self._on_straggling is None:
                continue
            try:
                self._on_straggling(straggling)
            except Exception as error:  # of the caller's code
                self._notices.say("on_straggling", f"on_straggling raised {type(error).__name__}: {error}")

    def _tell_counts(self) -> None:
        counts = self._telemetry.counts
        if counts is not self._counts and self._on_counts is not None:
            self._counts = counts
            self._on_counts(counts)

    def _fail(self, key: str, text: str) -> None:
        """Nothing is set from now on; what follows from that is not said again."""
        if self._pilot.problem is None:
            self._pilot.problem = text
            self._notices.say(key, f"{text}; training goes on at the GPU's own clocks")

    def _tell(self) -> None:
        pilot = self._pilot
        if pilot.deviation is not None:
            text = "clocks are reset in such iterations, and set again after one that runs as planned"
            self._notices.say("deviation", f"{pilot.deviation}; {text}")
        if pilot.out_of_step is not None:
            self._notices.say("out of step", f"{pilot.out_of_step}; it runs at the GPU's own clocks until then")
        if pilot.agreement.lost is not None:
            self._notices.say("store", f"no new plan can be agreed on: {pilot.agreement.lost}", by="rank 0")
