"""The thread of a rank that does what the training thread must not wait for.

It reads what the clock controller says, takes part in the agreement on plans, keeps the telemetry and gives the
notices. If it fails, training goes on: without clocks, and that is said.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from perseus_planner.errors import GpuError
from perseus_planner.runtime.controller.client import Connection
from perseus_planner.runtime.controller.messages import Failed
from perseus_planner.runtime.marks import Marks
from perseus_planner.runtime.notices import Notices
from perseus_planner.runtime.pilot import JobPilot
from perseus_planner.runtime.telemetry import Telemetry

HUNG_S = 5.0
"""After so long without a sign of life a controller is taken to hang, and is killed, for its guardian to reset."""

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

    def wake(self) -> None:
        """Begin the next round now; costs the caller one system call."""
        with suppress(BlockingIOError):  # it has been woken often enough
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
        os.close(self._wake)
        os.close(self._wakes)
        return True

    def _run(self, one_round: Callable[[], None], descriptors: Callable[[], list[int]]) -> None:
        while not self._stopped:
            ready, _, _ = select.select([self._wakes, *descriptors()], [], [], _ROUND_S)
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            one_round()


class Rounds:
    """What is done in a round."""

    def __init__(
        self,
        pilot: JobPilot,
        marks: Marks,
        telemetry: Telemetry,
        notices: Notices,
        connection: Connection | None,
    ) -> None:
        self._pilot, self._marks, self._telemetry, self._notices = pilot, marks, telemetry, notices
        self._connection = connection
        self._dwell_s: float | None = None

    def descriptors(self) -> list[int]:
        """What may be read."""
        return [] if self._connection is None else [self._connection.fileno()]

    def once(self) -> None:
        """One round."""
        try:
            self._hear()
            self._pilot.look()
            self.record()
            self._tell()
        except Exception as error:  # whatever it is, training must go on, and the user must know
            self._fail("background", f"a fault of the planner, please report it: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The last round, after the controller has been left."""
        if self._connection is not None:
            with suppress(GpuError):
                for message in self._connection.messages():
                    self._telemetry.heard(message)
        self.record()
        self._telemetry.close()

    def record(self) -> None:
        """Keep what is known by now of iterations that have ended."""
        while self._pilot.ended_iterations:
            ended = self._pilot.ended_iterations.popleft()
            self._telemetry.ended(ended.iteration, ended.program, ended.deviation)
            if ended.deviation is not None:
                self._notices.say(
                    "deviation",
                    f"iteration {ended.iteration} ran {ended.deviation}; clocks are reset in such iterations, and set "
                    "again after one that runs as planned",
                )
        for timed in self._marks.finished():
            self._telemetry.timed(timed)

    def _hear(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            for message in connection.messages():
                self._telemetry.heard(message)
                if isinstance(message, Failed):
                    self._fail(f"failed {message.text}", message.text)
            if connection.age_s() > HUNG_S:
                connection.kill()
                self._fail("hung", f"the clock controller gave no sign of life for {HUNG_S:g} s and was ended")
                self._connection = None
                return
        except GpuError as error:
            self._connection = None
            self._fail("controller", str(error))
            return
        program = self._pilot.program
        if program is not None and program.plan.min_dwell_s != self._dwell_s:
            self._dwell_s = program.plan.min_dwell_s
            connection.dwell(self._dwell_s)

    def _fail(self, key: str, text: str) -> None:
        self._pilot.problem = text
        self._notices.say(key, f"{text}; training goes on at the GPU's own clocks")

    def _tell(self) -> None:
        if self._pilot.out_of_step is not None:
            self._notices.say("out of step", f"{self._pilot.out_of_step}; it runs at the GPU's own clocks until it has")
        if self._pilot.agreement.lost is not None:
            self._notices.say("store", f"new plans cannot be agreed on: {self._pilot.agreement.lost}")
