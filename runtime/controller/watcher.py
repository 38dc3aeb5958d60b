"""The clock requests of one rank, as the controller sees them change in the memory that both
share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.runtime.controller.armed import ArmedClocks
from perseus_planner.runtime.controller.scheduler import RESET
from perseus_planner.runtime.marks import (
    BEGUN,
    BY_TIME,
    NO_REQUEST,
    OUTSIDE,
    is_captured,
    is_turned,
    parse_clock_request,
    table_of,
)

if TYPE_CHECKING:
    from perseus_planner.runtime.controller.protocol import SharedRequest

MAX_SKIPPED = 64
"""No rank passes more positions between two looks at its request; if more were passed, it runs
another program.
"""

OUTSIDE_NS = 20_000_000
"""How long a rank whose iterations are long (`LONG_NS`) runs something else than computations
before its GPU is reset for it; ten times that, if they are shorter. By hand.
"""

LONG_NS = 2_000_000_000
"""How long an iteration lasts, at least, to count as a long one. The calls of a node for a reset
and for the first clocks of the next iteration take up to 90 ms, which should not be spent in each
short iteration. By hand.
"""

_MAX_POSITIONS = 65536  #: of a program whose values are remembered, to bound the memory


class ClockRequest(NamedTuple):
    """A clock request that has changed."""

    position: int | None  #: Position of the rank in its program; None if it wants no value
    #: What it wants, or a faster clock if it is late; 0 to have its GPU reset.
    value: int
    #: What the rank requested at the positions that it passed since the last look, as far as that
    #: is known.
    skipped: tuple[int, ...]
    is_new_iteration: bool  #: Whether the position has gone back since the last request
    is_new_program: bool = False  #: Whether another value was requested at this position before
    has_begun: bool = False  #: Whether it is known that its computation has begun
    #: Whether another value is wanted than before, or may be, as the rank catches up.
    is_change: bool = True
    due_ns: int | None = None  #: When a clock by time was due


# What `RequestWatcher` keeps of a rank from one look to the next, all on the controller's thread.
# "By position" are requests of one clock each, "by time" those of a table of an iteration.
#
# | attribute     | written by                     | meaning
# |---------------|--------------------------------|--------------------------------------------
# | `_seen`       | each look at a new word        | the whole word, with `OUTSIDE`
# | `_outside_ns` | each look at a new word        | since when `OUTSIDE` stands; None: it does not
# | `_is_reset`   | `_reset_request`: yes; a clock | whether the rank was left without a clock by
# |               | or an armed table: no          | the last answer
# | `_request`    | by position                    | the last one with a clock, without `OUTSIDE`;
# |               |                                | a reset leaves it
# | `_position`   | by position; by time: None     | its position; a reset leaves it
# | `_wanted`     | both; `_reset_request`: RESET  | the planned value, not the one to catch up by
# | `_table`      | by position, not captured      | where captured requests find their clocks
# | `_first_ns`   | by position, 0 and `BEGUN`     | from when latest starts count; None: from
# |               |                                | nothing, so nobody catches up
# | `_begun_ns`,  | both, at a new iteration       | how long iterations last, which says when a
# | `_lasted_ns`  |                                | reset outside is worth its calls
# | `_values`     | both; another program empties  | what was wanted where, to tell what was passed
# | `_changes`    | None when `_values` changes    | a count of `_values`, made when asked for
# | `_armed`      | by time; by position cancels   | the clocks by time that are still to come
#
# Outside and reset together:
#
# | `_outside_ns` | `_is_reset` | the rank
# |---------------|-------------|----------------------------------------------------------------
# | None          | no          | runs computations at requested clocks
# | a moment      | no          | runs something else; its GPU keeps the clock until the limit
# | a moment      | yes         | has passed the limit, or wanted nothing before; stays reset until
# |               |             | it is inside again
# | None          | yes         | wants nothing: before the first iteration, after a deviation, or,
# |               |             | by time, from the end of an iteration to the next begin


class RequestWatcher:
    """Reads the clock requests of one rank; the table above says what it keeps between two looks.

    Args:
        shared: Memory in which the rank writes its clock request.
    """

    def __init__(self, shared: SharedRequest) -> None:
        self._shared = shared
        # The last look.
        self._word = shared.request
        self._seen = NO_REQUEST
        self._looked_ns = 0
        # Outside and reset.
        self._outside_ns: int | None = None
        self._is_reset = True
        # The last request.
        self._request = NO_REQUEST
        self._position: int | None = None
        self._wanted = RESET
        self._table = 0
        # The iteration.
        self._begun_ns: int | None = None
        self._lasted_ns = 0  #: 0 until one was seen whole
        self._first_ns: int | None = None
        self._values: dict[int, int] = {}  #: position -> what was requested there last
        self._changes: int | None = None
        self._armed = ArmedClocks()

    @property
    def due_ns(self) -> int | None:
        """When the next clock by time is due; None if none is."""
        return self._armed.next_ns

    @property
    def changes_per_iteration(self) -> int:
        """How often the value changes in an iteration as seen so far, with the change back for
        the next one.
        """
        if self._changes is None:
            values = [value for _, value in sorted(self._values.items())]
            # The last value of an iteration stands before its first: iterations repeat.
            self._changes = sum(
                before != value
                for before, value in zip([*values[-1:], *values], values, strict=False)
            )
        return self._changes

    def poll(self, now_ns: int) -> ClockRequest | None:
        """Return the clock request if it has changed since the last call. One that was written
        outside of computations becomes one for a reset when it has stood for some time.

        During a call of the driver, which takes milliseconds, nobody looks, and the rank may pass
        positions. It is assumed to have requested there what it requested when they were seen last,
        as an iteration is like the one before it. The positions at the end of an iteration are not
        known, so nothing is assumed about them.
        """
        # One number of memory, which the rank or its GPU writes: it holds the whole request.
        request = self._word[0]
        looked_ns = self._looked_ns
        self._looked_ns = now_ns
        # Nothing new, and no reset that is to come: the most frequent case by far.
        if request == self._seen and (self._outside_ns is None or self._is_reset):
            return self._take_due(now_ns)
        self._seen = request
        # Since when it is outside counts from the first look that saw it there.
        self._outside_ns = (self._outside_ns or now_ns) if request & OUTSIDE else None
        request &= ~OUTSIDE
        if request & BY_TIME:
            return self._poll_by_time(request, now_ns, looked_ns)
        # What requests by position is not timed.
        self._armed.cancel()
        return self._poll_by_position(request, now_ns)

    def _poll_by_position(self, request: int, now_ns: int) -> ClockRequest | None:
        """Take a request of one clock, for the computation at a position."""
        position, value = self._decode(request)
        if position is None or self._is_left_outside(now_ns):
            return self._reset_request()
        if request == self._request and not self._is_reset:
            return None
        before = self._position
        is_new_iteration = before is not None and self._has_wrapped(before, position, request)
        self._request = request
        self._position = position
        self._is_reset = False
        # The first iteration begins where the rank is first seen.
        if before is None or is_new_iteration:
            self._begin_iteration(now_ns)
        if is_new_iteration:
            self._first_ns = None
        # Latest starts count from here.
        if position == 0 and request & BEGUN:
            self._first_ns = now_ns
        # The skipped values are those of the program before, so they are read before a new program
        # empties the memory.
        first_passed = 0 if before is None or is_new_iteration else before + 1
        skipped = self._skipped_values(range(first_passed, position))
        is_new_program = self._remember(position, value)
        is_change = value != self._wanted
        self._wanted = value
        table = table_of(request)
        return ClockRequest(
            position,
            self._caught_up(table, position, now_ns) or value,
            skipped,
            is_new_iteration,
            is_new_program,
            has_begun=bool(request & BEGUN),
            # A rank with a table may want another clock at any time, as it catches up.
            is_change=is_change or table != 0,
        )

    def _decode(self, request: int) -> tuple[int | None, int]:
        """Return the position and the value of a request by position, and note its table."""
        position, value = parse_clock_request(request)
        # Captured requests have no value of their own, as a graph writes the same number each time.
        # Their clocks are in the table that was named last.
        if position is not None and is_captured(request):
            value = self._shared.latest.clock(self._table, position, 0) or RESET
        else:
            self._table = table_of(request)
        return position, value

    def _is_left_outside(self, now_ns: int) -> bool:
        """Whether the rank is outside of its computations for so long that its GPU is to be
        reset, or stays reset.
        """
        if self._outside_ns is None:
            return False
        # Short iterations pass this state often, and resetting in each would cost more than it
        # saves.
        limit_ns = OUTSIDE_NS if self._lasted_ns >= LONG_NS else 10 * OUTSIDE_NS
        return self._is_reset or now_ns - self._outside_ns >= limit_ns

    def _has_wrapped(self, before: int, position: int, request: int) -> bool:
        """Whether a request at this position, after one at `before`, is of another iteration."""
        # The same position again means that an iteration has passed unseen; for captured requests
        # that cannot be told.
        is_again = not is_captured(request) and is_turned(request, self._request)
        return position < before or is_again

    def _skipped_values(self, passed: range) -> tuple[int, ...]:
        """Return what is known of the values at the positions that were passed unseen, from the
        iteration before.
        """
        # More than a look can miss is another program.
        if len(passed) > MAX_SKIPPED:
            return ()
        return tuple(self._values[position] for position in passed if position in self._values)

    def _remember(self, position: int, value: int) -> bool:
        """Note what was requested at a position; return whether that is another value than
        before, so that the program is a new one.
        """
        remembered = self._values.get(position)
        is_new_program = remembered is not None and remembered != value
        # Nothing that was remembered of another program holds.
        if is_new_program:
            self._values.clear()
        # The number of changes is counted again when it is asked for.
        if remembered != value and position < _MAX_POSITIONS:
            self._values[position] = value
            self._changes = None
        return is_new_program

    def _caught_up(self, table: int, position: int, now_ns: int) -> int | None:
        """Return the clock by which a rank that may be late is in time again, from its table of
        latest starts; None if it has none.
        """
        if not table or self._first_ns is None:
            return None
        return self._shared.latest.clock(table, position, now_ns - self._first_ns)

    def _reset_request(self) -> ClockRequest | None:
        """Return the request for a reset; None if one was returned last."""
        was_reset = self._is_reset
        self._is_reset = True
        self._wanted = RESET
        return None if was_reset else ClockRequest(None, RESET, (), is_new_iteration=False)

    def _begin_iteration(self, now_ns: int) -> None:
        """Note how long the last iteration took, which decides when a reset is worth its calls."""
        self._lasted_ns = 0 if self._begun_ns is None else now_ns - self._begun_ns
        self._begun_ns = now_ns

    def _poll_by_time(self, request: int, now_ns: int, looked_ns: int) -> ClockRequest | None:
        """Take a request with clocks by time: nothing is wanted before the iteration begins, and
        nothing once it has ended.
        """
        self._position = None
        # An end: what comes next is waiting, or something that nobody has timed.
        if not request & BEGUN:
            self._armed.end(now_ns)
            return self._reset_request()
        self._begin_iteration(now_ns)
        # The table's first row has all clocks of the iteration, with their times.
        row = self._shared.latest.row(table_of(request), 0)
        # Not armed means full clocks until the next begin.
        self._is_reset = not self._armed.begin(now_ns, looked_ns, row)
        due = self._armed.take(now_ns)
        value = RESET if due is None else due.clock
        self._note_by_time(0, value)
        return ClockRequest(
            0 if due else None, value, (), is_new_iteration=True, has_begun=True, is_change=True
        )

    def _take_due(self, now_ns: int) -> ClockRequest | None:
        """Return the clock by time that is due now, if there is one."""
        if self._armed.next_ns is None:
            return None
        due = self._armed.take(now_ns)
        if due is None:
            return None
        self._note_by_time(due.place, due.clock)
        return ClockRequest(due.place, due.clock, (), is_new_iteration=False, due_ns=due.due_ns)

    def _note_by_time(self, place: int, value: int) -> None:
        """Note the clocks of an iteration, by which their changes are counted."""
        self._wanted = value
        if place == 0:
            self._values.clear()
        self._values[place] = value
        self._changes = None
