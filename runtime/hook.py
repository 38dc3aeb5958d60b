"""Follows an engine through its iterations on the training thread, and requests the clock of each
computation.

Who does what: a decider (`decider`) chooses the clocks, as a `Program` for each iteration. The
usual request, after a computation that ran as planned, is written by the engine's wrapper
(`HookGuard.computing`) from the `Lane` that the hook has filled: the hook is not called for it. The
hook itself requests the first clock of an iteration, and all clocks while the lane is closed.

The rules:

- The clock of a computation is requested when the computation before it ends; the first clock of an
  iteration, when the last computation of the iteration before it ends.
- Outside of iterations, and while an engine updates its weights, the clock is only noted: if that
  takes long, the GPU is reset (`controller.watcher.OUTSIDE_NS`) until the next iteration begins.
- A new plan takes effect at the begin of an iteration, and so does a return to the plan after a
  deviation.
- If an engine runs something that is not in the plan, the GPU is reset for the rest of the
  iteration. The plan is followed again after an iteration that ran as planned.
- What an iteration runs is noted if it has no program or deviates from it, so that a program can be
  made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from perseus_planner.base.errors import fault_text
from perseus_planner.engines.guard import Lane
from perseus_planner.profiles.modes import OWN
from perseus_planner.runtime.marks import BEGUN, OUTSIDE, Marks
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from perseus_planner.engines.guard import IterationHook, Microbatches
    from perseus_planner.runtime.modes import ModeSwitch
    from perseus_planner.runtime.program import Inside, Order, Program

_NO_REQUEST_INDEX = -1

RAISED = "into an exception"
"""The deviation of an iteration that raised: it "ran into an exception"."""


class ProgramSource(Protocol):
    """Decides at each iteration which program this rank runs by; all methods are called on the
    training thread.
    """

    def program_for(self, iteration: int) -> Program | None:
        """Return the program of an iteration, or None to run without clocks; must not wait long,
        or raise. After a program that `awaits`, it is asked again while the iteration runs.
        """

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None = None,
    ) -> None:
        """The iteration has ended.

        Args:
            iteration: Its number.
            program: What it ran by, as planned or not.
            deviation: What the engine ran that is not in the program, if anything.
            order: What it ran, if that is not the program's; None if it was not noted.
        """

    def on_unfollowed(self, problem: str) -> None:
        """No more iterations are shown, because of this problem."""


# The state of a hook, all of it written on the training thread:
#
# | attribute       | written by                      | meaning
# |-----------------|---------------------------------|------------------------------------------
# | `_program`      | `_load`, `_ask_again`           | what the iteration runs by; None: nothing
# | `_order`,       | `_load`; `_deviate` empties     | what is expected; empty: all that runs is
# | `_count`        | them, `begin_iteration` refills | noted
# | `_deviation`    | `_deviate`, `begin_iteration`   | what ran otherwise in this iteration
# | `_is_unclocked` | `_set_unclocked` alone          | no clock is requested
# | `_awaits`       | `_load`                         | another program may come while it runs: the
# |                 |                                 | source is asked after each computation
# | `_shows_begins` | `_load`                         | begins are requested too: `_awaits`, or the
# |                 |                                 | program has a table to catch up by
# | `_turns`        | `_load`                         | 1 if the program has one computation
# | `_first`        | `_load`, `_end_otherwise`       | index of the first request: 0; with `_turns`
# |                 |                                 | 0 and 1 in turn, as equal ones are not seen
# | `_next`         | `_load`                         | index of the request for `Program.then`,
# |                 |                                 | after the last computation; None: `_first`
# | `lane.is_open`  | `_set_unclocked` alone          | the engine's wrapper writes requests itself
#
# What they mean together:
#
# | program | unclocked | deviation | lane   | then
# |---------|-----------|-----------|--------|---------------------------------------------------
# | None    | yes       | none      | closed | the GPU is reset; all that runs is noted
# | given   | yes       | given     | closed | the GPU is reset for the rest of the iteration, and
# |         |           |           |        | all that runs is noted
# | given   | yes       | none      | closed | the iteration after a deviation: compared with the
# |         |           |           |        | program; if it fits, clocks come from the next one on
# | given   | no        | none      | open   | the usual iteration: `end` is not called
# | given   | no        | none      | closed | `end` goes to `_end_otherwise`: `_awaits`, `_turns`,
# |         |           |           |        | `_shows_begins` or a switch of modes decides more


class Hook:
    """Receives the begin and the end of each iteration and computation of one rank.

    Args:
        marks: Requests clocks and takes times.
        source: Decides which program each iteration runs by.
        first: Program of the first iteration.
        show: Called with the number of microbatches of an iteration that begins, and with what
            returns them where the engine has them; None if nobody asks for them.
        switch: Enters the mode of each computation; None if the training has no modes.
        keeps_modes: Whether it does so also while clocks cannot be set.

    Attributes:
        fault: What was raised on the training thread, until an iteration has ended without a
            fault; None if nothing was.
    """

    def __init__(
        self,
        marks: Marks,
        source: ProgramSource,
        first: Program | None,
        show: Callable[[int | None, Microbatches | None], None] | None = None,
        switch: ModeSwitch | None = None,
        *,
        keeps_modes: bool = True,
    ) -> None:
        self._marks = marks
        self._source = source
        self._show = show
        self._switch = switch
        self._keeps_modes = keeps_modes
        self._lane = Lane(marks.now, marks.write)
        self.fault: str | None = None
        self._iteration = -1
        self._is_inside = self._has_evaluated = False
        self._is_unclocked = True  #: no clock is requested
        #: Index of the request for the first computation, and 1 if that turns (`clock_request`).
        self._first = self._turns = 0
        self._deviation: str | None = None
        self._program: Program | None
        self._noted: list[tuple[int, str, int]] = []  #: what ran that is not as in a program
        self._load(first)
        self._request_first(outside=True)

    @property
    def lane(self) -> Lane | None:
        """See `IterationHook.lane`."""
        return self._lane

    @property
    def wants_batch(self) -> bool:
        """See `IterationHook.wants_batch`."""
        return self._show is not None

    @property
    def iteration(self) -> int:
        """Number of the current or last iteration, from 0; -1 before the first."""
        return self._iteration

    @property
    def progress(self) -> tuple[int, int]:
        """The iteration and how many of its computations have ended; may be read by any thread."""
        return self._iteration, self._position

    @property
    def _position(self) -> int:
        """How many computations of the iteration have ended."""
        return len(self._lane.spans)

    def begin_iteration(
        self,
        microbatches: int | None = None,
        batch: Microbatches | None = None,
        number: int | None = None,
    ) -> None:
        """See `IterationHook.begin_iteration`."""
        if self._is_inside:
            self.end_iteration()
        if self._show is not None:
            self._show(microbatches, batch)
        self._is_inside = True
        self._iteration = self._iteration + 1 if number is None else number
        program = self._source.program_for(self._iteration)
        # Most iterations run the program of the one before, which is loaded.
        if program is not self._program:
            self._load(program)
        # The last one has deviated, which had emptied the order so that all else was noted.
        elif self._deviation is not None and program is not None:
            self._order = program.shown
            self._count = len(program.shown)
        self._deviation = None
        self._noted = []
        # Before the marks: the clock takes some time to be in force.
        self._request_first()
        self._lane.spans = self._marks.begin_iteration(
            self._iteration, follows_evaluation=self._has_evaluated
        )
        self._has_evaluated = False
        # Last, as `_deviate` takes back the request that was just made.
        if (
            program is not None
            and microbatches is not None
            and microbatches != program.microbatches
        ):
            self._deviate(f"{microbatches} microbatches, and the plan has {program.microbatches}")

    def note_evaluation(self) -> None:
        """See `IterationHook.note_evaluation`."""
        self._has_evaluated = True

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Begin a computation."""
        if self._switch is not None:
            self._switch.begin(stage, kind, microbatch)
        self._lane.begun = self._lane.now()
        position = self._position
        if position >= self._count or self._order[position] != (stage, kind, microbatch):
            self._note(stage, kind, microbatch)
        elif self._shows_begins and not self._is_unclocked:
            self._marks.request(position, BEGUN)

    def end(self) -> None:
        """End the computation, and request the next clock."""
        lane = self._lane
        lane.spans.append((lane.begun, lane.now()))
        position = len(lane.spans)
        if lane.is_open:
            lane.write(0, lane.after[position])
        else:
            self._end_otherwise(position)

    def _note(self, stage: int, kind: str, microbatch: int) -> None:
        """Note a computation that is not the program's."""
        if self._deviation is None and self._program is not None:
            position = self._position
            planned = self._order[position] if position < self._count else "nothing more"
            self._deviate(f"{Computation(stage, kind, microbatch)}, where the plan has {planned}")
        self._noted.append((stage, kind, microbatch))

    def _end_otherwise(self, position: int) -> None:
        """Request the next clock where what to write is not known from the begin on."""
        if self._awaits and self._deviation is None and position < self._count:
            self._ask_again(position)
        if self._is_unclocked:
            return
        if position < self._count:
            self._marks.request(position)
        else:
            # A program of one computation turns between two requests for the same clock, so that
            # the controller sees iterations begin.
            self._first = self._turns - self._first
            self._request_first(ends=True)

    def begin_update(self) -> None:
        """Begin what follows the last computation of the iteration, for which no clock is set."""
        if self._position == self._count:
            self._request_first(outside=True, ends=True)

    def end_iteration(self) -> None:
        """End the iteration, including all that the engine does after its last computation."""
        if not self._is_inside:
            return
        self._is_inside = False
        if self._switch is not None:
            self._switch.rest()
        if self._deviation is None and self._program is not None and self._position != self._count:
            self._deviate(f"{self._position} computations, and the plan has {self._count}")
        self._marks.end_iteration()
        # What ran is learnt by the source where no program says it.
        order = self._noted if self._deviation is not None or self._program is None else None
        self._source.on_end(self._iteration, self._program, self._deviation, order)
        # One whole iteration as planned shows that the program fits again, so clocks are requested
        # from the next one on.
        if self._deviation is None and self._is_unclocked and self._program is not None:
            self._set_unclocked(False)
        self._request_first(outside=True, ends=True)

    def abandon_iteration(self) -> None:
        """End the iteration because it raises, which is no deviation; the next one begins with
        the plan again.
        """
        if not self._is_inside:
            return
        self._is_inside = False
        self._leave_modes()
        self._reset()
        self._marks.end_iteration()
        self._source.on_end(self._iteration, None, RAISED, None)

    def capture(self, position: int) -> None:
        """Mark, in the CUDA graph that is captured now, that the computation at a position is
        next; nothing where a plan is not followed at such marks.
        """
        inside = self._inside
        # A mark that a replay writes would cancel clocks by time.
        if inside is not None and inside.is_captured:
            self._marks.capture(position)

    def end_capture(self, order: Order) -> None:
        """Compare what the captured graph runs with the program; follow nothing more if it differs.

        Args:
            order: What it runs.
        """
        inside = self._inside
        if inside is not None:
            self._check_inside("the captured graph runs", order, inside.runs)

    def end_eager(self, order: Order, microbatches: int | None) -> None:
        """Compare with the program what an iteration has run that will be replayed as a graph;
        follow nothing more if it differs. One with other microbatches is not compared, as its
        graph will not be followed either.

        Args:
            order: What it has run.
            microbatches: How many it had.
        """
        inside = self._inside
        if inside is not None and microbatches in (None, inside.microbatches):
            self._check_inside("an iteration runs", order, inside.runs)

    @property
    def _inside(self) -> Inside | None:
        return None if self._program is None else self._program.inside

    def _check_inside(self, what: str, order: Order, planned: Order) -> None:
        if planned and tuple(planned) != tuple(order):
            # The first difference tells the most; if one is only longer than the other, it is where
            # that ends.
            position = next(
                (
                    i
                    for i, pair in enumerate(zip(order, planned, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(order), len(planned)),
            )
            found = Computation(*order[position]) if position < len(order) else "nothing more"
            wanted = planned[position] if position < len(planned) else "nothing more"
            self.stop_following(
                f"{what} {found} where the plan has {wanted}; solve for the schedule and the "
                "number of microbatches that you train with"
            )

    def stop_following(self, problem: str) -> None:
        """See `IterationHook.stop_following`; no clock is requested any more."""
        self.abandon_iteration()
        self._reset()
        self._source.on_unfollowed(problem)

    def pass_iteration(self, number: int) -> None:
        """See `IterationHook.pass_iteration`; the source goes on to count iterations."""
        self._iteration = number
        self._source.program_for(number)

    def take_fault(self, error: Exception) -> IterationHook | None:
        """See `IterationHook.take_fault`; never raises."""
        self.fault = fault_text(error)
        self._is_inside = False
        goes_on = self._switch is not None and self._keeps_modes
        # Each alone, so that one that fails does not keep the other from being tried.
        for step in (self._reset, *(() if goes_on else (self._leave_modes,))):
            try:
                step()
            except Exception:  # what is broken may be this; the background thread resets the GPU
                continue
        return ModesAlone(self, self._switch) if self._switch is not None and goes_on else None

    def end_fault(self) -> None:
        """See `IterationHook.end_fault`."""
        self.fault = None

    def _reset(self) -> None:
        self._load(None)
        self._request_first()

    def _leave_modes(self) -> None:
        if self._switch is not None:
            self._switch.enter(OWN)

    def _ask_again(self, position: int) -> None:
        """Go on by another program of the same computations, if there is one now."""
        before = self._program
        program = self._source.program_for(self._iteration)
        if program is None or program is before or before is None:
            return
        self._load(program)
        # What has run keeps the clocks that it had, as measurements are compared with them.
        ran = before.clocks[:position]
        if program.clocks[:position] != ran:
            self._program = replace(program, clocks=(*ran, *program.clocks[position:]))

    def _load(self, program: Program | None) -> None:
        self._program = program
        self._awaits = program is not None and program.awaits
        has_table = program is not None and program.table is not None
        self._shows_begins = self._awaits or has_table
        self._order = program.shown if program is not None else ()
        self._count = len(self._order)
        # Without a program modes are left as well, unless they are to be kept.
        if self._switch is not None and program is not None:
            self._switch.load(program.shown, program.modes)
        elif self._switch is not None and not self._keeps_modes:
            self._switch.load((), ())
        self._turns = int(self._count == 1)
        self._first = 0
        requests = () if program is None else program.requests
        #: Index of the request after the last computation.
        self._next = len(requests) - 1 if program is not None and program.then else None
        self._marks.load(requests)
        self._lane.order = (*self._order, None)
        if program is not None:
            last = requests[self._first if self._next is None else self._next]
            # The lane of the training thread writes these without a decision: one for each
            # computation that ends.
            self._lane.after = (*requests[: self._count], last)
        self._set_unclocked(program is None)

    def _set_unclocked(self, is_unclocked: bool) -> None:
        """Request clocks from now on, or none."""
        self._is_unclocked = is_unclocked
        # What else decides at a computation: more programs, turns of a single one, and modes.
        is_decided = self._awaits or self._turns or self._shows_begins or self._switch is not None
        self._lane.is_open = not (is_unclocked or is_decided)

    def _request_first(self, *, outside: bool = False, ends: bool = False) -> None:
        """Request the clock of the first computation, of the next iteration if this one `ends`."""
        if self._is_unclocked:
            self._marks.request(_NO_REQUEST_INDEX)
        else:
            index = self._next if ends and self._next is not None else self._first
            self._marks.request(index, outside * OUTSIDE)

    def _deviate(self, what: str) -> None:
        self._deviation = what
        self._set_unclocked(True)
        self._noted = list(self._order[: self._position])
        # So that all that follows is noted
        self._order = ()
        self._count = 0
        self._marks.request(_NO_REQUEST_INDEX)


class ModesAlone:
    """What iterations are shown to after a fault of the hook, so that computations still have the
    modes of the plan, which ranks may enter together.

    Args:
        hook: The hook that had the fault.
        switch: Enters the modes.
    """

    def __init__(self, hook: Hook, switch: ModeSwitch) -> None:
        self._hook = hook
        self._switch = switch

    lane = None
    wants_batch = False

    @property
    def iteration(self) -> int:
        """See `Hook.iteration`."""
        return self._hook.iteration

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Enter the mode of a computation."""
        self._switch.begin(stage, kind, microbatch)

    def end_iteration(self) -> None:
        """Enter the mode between iterations."""
        self._switch.rest()

    def abandon_iteration(self) -> None:
        """Leave all modes."""
        self._switch.enter(OWN)

    def _nothing(self, *_: object) -> None:
        pass

    end = begin_update = begin_iteration = pass_iteration = stop_following = end_fault = _nothing
    note_evaluation = _nothing

    def take_fault(self, error: Exception) -> None:
        """Do nothing: it was said of the hook."""
