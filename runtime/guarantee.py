"""The guarantee on time: what clocks made longer than agreed is known, bounded and paid back.

Whatever decides clocks keeps it by the same parts. None of them knows what decides.

- *The reference*, what iterations take at full clocks: the median of the last ones (`Reference`).
- *The ledger* of what clocks did beyond what is agreed. While more than a burst is owed, clocks are
  full (`Ledger`, `owed_after`).
- *Audits*, short times at full clocks that are compared with those around them. They show what no
  computation shows (`Audits`).
- *The margin* that plans leave, more while iterations are late, and less otherwise (`Margin`).

`Guarantee` has all four, for iterations. Their constants are a `Tuning`.

It is pure: it sees no GPU and no time of day.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Annotated, NamedTuple, Protocol

from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Rule, Seconds, Wait

Slowdown = Annotated[
    float,
    Rule(
        float,
        False,
        "a slowdown: give the longest iteration as a multiple of one at full clocks, such as 1 or "
        "more",
        least=1.0,
    ),
]

CREDIT = 4.0
"""The most that is earned for later by being faster than agreed, as a multiple of the burst. By
hand."""

_NORMAL = 1.48
"""The standard deviation of normal noise, over the median of its absolute values."""

_LEAST_NOISE = 1e-4
"""Noise that what audits show has at least, a share: so that nothing is told from rounding."""

REMEMBERED = 16
"""Iterations that a rank adds again when its reference changes: twice as many as pass between two
programs that tell of it (`RENEWED` in `ranks.planner`)."""


@dataclass(frozen=True)
class Tuning:
    """The constants of a guarantee.

    Shares are of the reference, unless another whole is named. *By hand* means that no benchmark
    chose the value; docs/autopilot.md has what benchmark 31 changes when it is halved and doubled.
    """

    # The reference.
    #: Iterations at full clocks before the first others. The first one is often unlike the rest, so
    #: two are the fewest. By hand.
    references: int = 2
    #: Iterations whose median is the reference, half as many of those that were judged by their
    #: time alone. As many as a drift of 1 % per 100 iterations changes by .1 %. By hand.
    remembered: int = 20

    # The ledger.
    #: What may be owed before clocks are full, a share: a few trials of clocks that turn out slow.
    #: By hand.
    burst: float = 0.04
    #: What a rank charges an iteration at most before it is known what clocks did to it, a share:
    #: a quarter of the burst, as that takes two or three iterations. By hand.
    unjudged: float = 0.01

    # Audits. Shares are of all iterations.
    #: Iterations of an audit. The first one still feels those before it and is not compared. The
    #: median of three others is not moved by one late loader, which hides half of what single ones
    #: tell. Chosen by `pytest tests/extensions/autopilot/test_autopilot_noise.py -k expectation`.
    audit: int = 4
    #: The first iteration of the first audit, counted from the first plan: when most of the saving
    #: is reached (benchmark 22: within 20 iterations).
    first_audit: int = 22
    #: The share that is audited at least. Twice as much finds an effect of 1 % no sooner in noise
    #: of .5 %. Chosen as `audit`.
    audited: float = 0.007
    #: The share that is audited where the standard error of what audits show is as much as
    #: `max_slowdown`, more where it is more, up to `most_audited`. Noise of 2 % needs the most.
    #: Chosen as `audit`.
    audited_in_doubt: float = 0.028
    most_audited: float = 0.05
    #: The share that is audited while planned iterations seem longer. Chosen as `audit`.
    suspected_audited: float = 0.12
    #: Planned iterations on each side of an audit that it is compared with: few, so that drift
    #: does not show. By hand.
    around: int = 4
    #: Planned iterations from which their noise is known: too few of them, and noise that is told
    #: too small forces full clocks. By hand.
    noise_of: int = 64
    #: Stretches of planned iterations from which their differences count as noise: fewer of them
    #: overlap so much that they are as one. By hand.
    stretches: int = 8
    #: Audits that are remembered, for effects that begin late. By hand.
    pairs: int = 32
    #: Standard errors for which one audit counts at most, so that one outlier tells little. By
    #: hand.
    outlier: float = 3.0
    #: Standard errors from which planned iterations are suspected to be longer, and from which they
    #: count as that. The first one is low, as a suspicion costs a few audits. The second one is
    #: high, as the most telling of all last audits count. Chosen as `audit`.
    suspected: float = 1.2
    sure: float = 4.2
    #: Standard errors of what audits show up to which the stated bound counts it: it holds in 19 of
    #: 20 jobs.
    stated: float = 1.64

    # The margin that plans leave.
    #: How much longer than agreed iterations may be before plans leave more time, a share: below
    #: half of the default `max_slowdown`, as the rest is for audits. By hand.
    allowed: float = 0.0022
    #: How much more time they leave for what an iteration is longer, and likewise where something
    #: is owed: parts of it. By hand.
    gain: float = 0.3
    gain_if_owed: float = 1.5
    #: What one iteration counts for at most, a share. By hand.
    most_late: float = 0.01
    #: The most that plans leave, and how much less than rows and their errors say where that is too
    #: much: shares. By hand.
    most_margin: float = 0.3
    most_less: float = 0.02
    #: What remains of the margin after each iteration in which it kept clocks full, a part: so that
    #: it ends. By hand.
    kept: float = 0.9


def owed_after(owed: float, more: float, burst: float) -> float:
    """Return what is owed after `more` than agreed, or less if that is negative; credit ends.

    All three are in one unit: seconds of iterations, or late requests of a server.
    """
    return max(owed + more, -CREDIT * burst)


@dataclass(frozen=True)
class Ledger(Checked, prefix="ledger, "):
    """What a rank owes for iterations that clocks made longer than agreed.

    While it `is_overdrawn`, the rank runs at full clocks. So, if each iteration is charged with
    what clocks did to it, after any number of iterations

        sum of their times <= (slowdown + max_slowdown) * sum of what they take at full clocks
                              + burst_s + the excess of the one iteration that overdrew it.

    The autopilot charges what it finds, from the computations of each iteration and from iterations
    at full clocks that are drawn at random; until then a rank charges what an iteration took beyond
    the reference, and at most `unjudged` of it. An iteration at full clocks costs nothing, however
    long it takes: it is its own reference. Each rank carries a ledger and adds its own iterations;
    clocks never decide what is computed, so ranks need not agree.

    Raises:
        UsageError: If a number is out of range.
    """

    reference_s: Seconds  #: seconds of an iteration at full clocks
    slowdown: Slowdown = 1.0  #: the agreed iteration time, as a multiple of the reference
    #: how much longer iterations may be on average, as a share of the reference.
    max_slowdown: Wait = 0.005
    burst_s: Wait = 0.0  #: how much may be owed, seconds
    owed_s: float = 0.0  #: what is owed now; negative for credit, of at most four bursts
    last: int = -1  #: the number of the iteration that was added last; -1 for none
    #: the last ones that were added, up to 16: number, seconds, and whether it ran at full clocks.
    recent: tuple[tuple[int, float, bool], ...] = ()
    #: a time of more than so many references counts for nothing, unless the one before it was as
    #: long: it is a pause in an iteration; 0 if there is none.
    pause: Wait = 0.0
    #: what an iteration is charged at most until it is known what clocks did to it, as a share of
    #: the reference; 0 for no limit.
    unjudged: Wait = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than the burst, so that the next iteration runs at full clocks."""
        return self.owed_s > self.burst_s

    def add(
        self,
        time_s: float,
        *,
        full_clocks: bool = False,
        iteration: int | None = None,
        longer_s: float | None = None,
    ) -> Ledger:
        """Return the ledger after one more iteration.

        Args:
            time_s: seconds that it took.
            full_clocks: whether all of it ran at full clocks.
            iteration: its number; None for the next one.
            longer_s: by how much clocks made it longer, seconds; None if that is not known.
        """
        number = self.last + 1 if iteration is None else iteration
        return self._added((number, time_s, full_clocks), longer_s=longer_s)

    def _added(self, *iterations: tuple[int, float, bool], longer_s: float | None = None) -> Ledger:
        share = self.slowdown + self.max_slowdown
        owed_s = self.owed_s
        before_s = self.recent[-1][1] if self.recent else 0.0
        for _, time_s, full_clocks in iterations:
            is_pause = self.is_pause(time_s, before_s)
            before_s = time_s
            if is_pause:
                continue
            # Nothing for full clocks: such an iteration is its own reference.
            charged_s = 0.0 if full_clocks else time_s - self.reference_s
            if longer_s is not None:
                charged_s = longer_s
            elif self.unjudged and not full_clocks:
                charged_s = min(max(charged_s, 0.0), self.unjudged * self.reference_s)
            # The allowance is a share of what the iteration had taken at full clocks, which is its
            # time without the charge.
            allowed_s = (share - 1.0) * (time_s - charged_s)
            owed_s = owed_after(owed_s, charged_s - allowed_s, self.burst_s)
        ledger = copy(self)  # on the training thread: what was checked is not checked again
        recent = (*self.recent, *iterations)[-REMEMBERED:]
        ledger.__dict__.update(owed_s=owed_s, last=iterations[-1][0], recent=recent)
        return ledger

    def is_pause(self, time_s: float, before_s: float) -> bool:
        """Whether an iteration of so many seconds counts for nothing after one of `before_s`."""
        longest_s = self.pause * self.reference_s
        return self.pause > 0.0 and before_s <= longest_s < time_s

    def renewed(self, terms: Ledger) -> Ledger:
        """Return the ledger that comes with a program, with the iterations added that this rank has
        run since.

        A rank takes over the reference of `terms`, which is the better one, and what is owed by it.

        Args:
            terms: a ledger of the first iterations of this one, or all. If it ends before what this
                one remembers, what is owed stays.
        """
        later = [
            recent_iteration for recent_iteration in self.recent if recent_iteration[0] > terms.last
        ]
        if len(later) == REMEMBERED:
            return replace(
                terms,
                owed_s=max(self.owed_s, -CREDIT * terms.burst_s),
                last=self.last,
                recent=self.recent,
            )
        return terms._added(*later) if later else terms


class Random(Protocol):
    """What draws numbers: `random.Random`, or a generator of numpy."""

    def random(self) -> float:
        """Return a number from 0 to 1."""


class Reference:
    """What an iteration takes at full clocks, as the median of the last ones.

    Args:
        remembered: How many count.
    """

    def __init__(self, remembered: int) -> None:
        self._known: deque[float] = deque(maxlen=remembered)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, value: float) -> None:
        """Take in one more: seconds, or seconds over those that were foretold."""
        self._known.append(value)

    @property
    def value(self) -> float | None:
        """The reference; None before the first one."""
        return median(self._known) if self._known else None


class Measured:
    """A sum that was measured in parts, with errors that have nothing in common."""

    def __init__(self) -> None:
        self.total = 0.0
        self.variance = 0.0

    def add(self, value: float, variance: float = 0.0) -> None:
        """Add a part, given the variance of its error."""
        self.total += value
        self.variance += variance

    def upper(self, errors: float) -> float:
        """Return the sum and so many standard errors."""
        return self.total + errors * math.sqrt(self.variance)

    def raise_to(self, least: float, errors: float) -> None:
        """Raise the sum where it and so many standard errors are less than `least`."""
        self.total += max(0.0, least - self.upper(errors))


def audited_share(doubt: float, allowed: float, least: float, most: float) -> float:
    """Return the share of time that is to be audited: as much as what is in doubt is of what is
    allowed.

    Args:
        doubt: What iterations may be longer by, as far as is unknown, a share.
        allowed: What they may be longer by as agreed, a share; 0 for nothing.
        least: The least share that is audited.
        most: The most.
    """
    if allowed <= 0.0:
        return most
    return min(max(doubt / allowed, least), most)


class AuditTimes:
    """When audits are: the first one is certain, others are drawn.

    Times are numbers of iterations, or seconds of a server.

    Args:
        first: When the first one begins.
        length: How long each is.
        random: Draws the others.
    """

    def __init__(self, first: float, length: float, random: Random) -> None:
        self._length = length
        self._random = random
        self._until_first: float = first  #: 0 or less from the first one on
        self._left = 0.0  #: of an audit that has begun

    @property
    def is_running(self) -> bool:
        """Whether an audit has begun and has not ended."""
        return self._left > 0.0

    def step(self, passed: float, rate: float) -> bool:
        """Return whether there is an audit now.

        Args:
            passed: The time since the last step.
            rate: How many audits are to begin, over time without one.
        """
        self._left -= passed
        if self._left > 0.0:
            return True
        self._left = 0.0
        if self._until_first > 0.0:
            self._until_first -= passed
            is_due = self._until_first <= 0.0
        else:
            is_due = self._random.random() < rate * passed
        if is_due:
            self._left = self._length
        return is_due


def is_drawn(iteration: int, every: int) -> bool:
    """Return whether an iteration is an audit, where one of so many is, by its number alone: so
    pipelines that have not told each other agree. No period of the training meets all of them.
    """
    drawn = random.Random(iteration // every).randrange(every)
    return iteration % every == drawn


class Margin:
    """How much longer than known lower clocks are taken to be, a share: what plans leave.

    It is None before `start`.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.value: float | None = None

    def start(self, spread: float) -> float:
        """Return the margin; begin with how much times spread if there is none yet."""
        if self.value is None:
            self.value = min(spread, self._tuning.most_margin)
        return self.value

    def add(self, late: float, *, is_owed: bool) -> None:
        """Take in an iteration at lower clocks.

        Args:
            late: By how much it was longer than agreed, a share.
            is_owed: Whether something is owed, so that nothing can be spared.
        """
        tuning = self._tuning
        late = min(max(late - tuning.allowed, -tuning.most_late), tuning.most_late)
        gain = tuning.gain_if_owed if is_owed and late > 0.0 else tuning.gain
        margin = (self.value or 0.0) + gain * late
        self.value = min(max(margin, -tuning.most_less), tuning.most_margin)

    def keep_from_ending(self) -> None:
        """Take in an iteration that a plan ran at full clocks because of the margin: leave less, so
        that lower clocks are tried again.
        """
        self.value = self._tuning.kept * (self.value or 0.0)


class Audits:
    """Compares audited iterations with planned ones.

    What clocks do to a computation shows in its time. What they do to all of an iteration does not:
    it may be slower because its clocks are planned, or because of its data, of heat, of the hour.
    So now and then a few iterations, one after the other, run at full clocks. The first one still
    feels those before it; the others are compared with the planned iterations around them.

    `longer` is by how much planned iterations are longer than audited ones, as a share, beyond what
    their computations explain; 0 unless that is sure. An effect may have begun at any audit, so the
    last ones count, as many as tell the most (Page, Continuous Inspection Schemes). More audits
    are drawn as soon as an effect is suspected, and where noise leaves room for more than may be.

    Args:
        max_slowdown: How much longer iterations may be on average, a share.
        tuning: Constants.
    """

    def __init__(self, max_slowdown: float = 0.005, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or Tuning()
        self._max_slowdown = max_slowdown
        self.longer = 0.0
        #: The standard error of what audits show, a share; None before the first one.
        self.error: float | None = None
        self._is_suspected = False
        self._planned: deque[float] = deque(maxlen=self._tuning.noise_of)
        self._audited: list[float] = []  # those that wait for planned iterations after them
        self._before: list[float] = []  # planned iterations before them
        self._after: list[float] = []
        # Of each audit, the planned iterations before the one before it, and by how much longer
        # those around it were.
        self._pairs: deque[tuple[int, float]] = deque(maxlen=self._tuning.pairs)
        self._measured = Measured()  # by how much all of them were longer, in iterations
        # Planned iterations; those before the last audit, and those that were charged by one.
        self._number = self._compared = self._charged = 0
        self._full = 0  # iterations at full clocks, one after the other

    @property
    def share(self) -> float:
        """The share of iterations that should begin an audit now."""
        tuning = self._tuning
        if self._is_suspected:
            return tuning.suspected_audited / tuning.audit
        error = math.inf if self.error is None else self.error
        doubt = tuning.audited_in_doubt * error
        least = tuning.audited
        most = tuning.most_audited
        return audited_share(doubt, self._max_slowdown, least, most) / tuning.audit

    @property
    def untold(self) -> float | None:
        """How much longer planned iterations have to be to be told from noise by now, a share; None
        before the first audit.
        """
        return None if self.error is None else self._tuning.sure * self.error

    @property
    def longest(self) -> float | None:
        """By how much planned iterations were longer in the mean, at most, as far as audits show,
        a share; None before the first one.
        """
        if not self._compared:
            return None
        at_least = max(0.0, -self._measured.total)
        return (self._measured.upper(self._tuning.stated) + at_least) / self._compared

    def add(self, unexplained: float, *, full_clocks: bool) -> float:
        """Take in an iteration; return what is owed for planned iterations, in iterations.

        Args:
            unexplained: What it took beyond what is known of its computations, as a share of it.
            full_clocks: Whether all of it ran at full clocks.
        """
        around = self._tuning.around
        if full_clocks:
            self._full += 1
            if self._full > 1:
                # Another audit begins once planned iterations came after the last one.
                if self._after or not self._audited:
                    self._audited = []
                    self._after = []
                    self._before = list(self._planned)[-around:]
                self._audited.append(unexplained)
            return 0.0
        self._full = 0
        self._number += 1
        self._planned.append(unexplained)
        owed = self.longer
        if self._audited:
            self._after.append(unexplained)
            if len(self._after) >= around * (1 if self._before else 2):
                owed += self._compare()
        return owed

    def _noise(self) -> float:
        """Return the standard error of what the last audit shows, a share.

        It is the larger one of two. Iterations next to each other tell noise of their own, which no
        drift parts. Noise that they share with their neighbours, such as of a network that others
        use for a minute, hides there, but an audit shows it. So stretches of planned iterations
        are compared with those around them as if they had been audited.
        """
        tuning = self._tuning
        planned = list(self._planned)
        # Many iterations while the ledger was paid tell no more: what is near has more in common.
        audited = min(len(self._audited), 2 * tuning.around)
        steps = [abs(later - earlier) for earlier, later in pairwise(planned)]
        variance = _of_median(len(self._before) + len(self._after)) + _of_median(audited)
        noise = _NORMAL / math.sqrt(2) * median(steps) * math.sqrt(variance)
        differences = [
            abs(difference) for difference in _stretches(planned, tuning.around, audited)
        ]
        if len(differences) >= tuning.stretches:
            noise = max(noise, _NORMAL * median(differences))
        return noise + _LEAST_NOISE

    def _compare(self) -> float:
        """Compare the last audit; return what is owed for the planned iterations before it."""
        tuning = self._tuning
        around = [*self._before, *self._after]
        more = median(around) - median(self._audited)
        self._pairs.append((self._compared, more))
        noise = self._noise()
        # Of all numbers of last audits, those count that tell the most.
        begins = [begin for begin, _ in reversed(self._pairs)]
        longer = [share for _, share in reversed(self._pairs)]
        most = tuning.outlier
        counted = [min(max(share / noise, -most), most) for share in longer]
        sure = [total / math.sqrt(n) for n, total in enumerate(accumulate(counted), 1)]
        last = sure.index(max(sure))
        # The bound that is stated counts each audit for the planned iterations since the last one.
        usual = median(longer)
        number = self._number - self._compared
        kept = min(max(more, usual - most * noise), usual + most * noise)
        self._measured.add(number * kept, (number * noise) ** 2)
        self.error = noise / math.sqrt(len(longer))
        self._compared = self._number
        self._audited = []
        self._after = []
        was_longer = self.longer
        self._is_suspected = sure[last] > tuning.suspected
        self.longer = max(0.0, median(longer[: last + 1])) if sure[last] > tuning.sure else 0.0
        # What began before it was told is owed too, but only once.
        uncharged = self._number - max(begins[last], self._charged)
        if was_longer or self.longer:
            self._charged = self._number
        return 0.0 if was_longer else self.longer * uncharged


def _stretches(planned: Sequence[float], around: int, length: int) -> Iterator[float]:
    """Yield by how much the iterations around each stretch are longer than those in it.

    Stretches lie as audits do: an iteration before each, as the first one of an audit, is left out.

    Args:
        planned: Planned iterations, one after the other.
        around: How many on each side of a stretch it is compared with.
        length: How many are in it.
    """
    begin = around + 1
    end = begin + length
    for first in range(len(planned) - end - around + 1):
        sides = [*planned[first : first + around], *planned[first + end : first + end + around]]
        yield median(sides) - median(planned[first + begin : first + end])


def _of_median(count: int) -> float:
    """Return the variance of the median of so many times, over that of one."""
    return 1 / count if count < 3 else 1.4 / count


class Judged(NamedTuple):
    """What is known of an iteration's computations."""

    ran_s: float  #: Seconds of the iteration, replayed with its computations as they ran
    full_s: float  #: Likewise as they had run at full clocks
    unexplained: float  #: What it took beyond what is known of them, as a share of it


class Guarantee:
    """Keeps iterations as long as agreed: it judges those that have ended, and says which ones
    ahead run at full clocks.

    Call `add` for each iteration that has ended, and `is_audit` for each one ahead that would have
    planned clocks, in order.

    Args:
        slowdown: The agreed time of an iteration, as a multiple of one at full clocks.
        max_slowdown: How much longer iterations may be on average, as a share of one at full
            clocks.
        random: Draws audits.
        tuning: Constants.
    """

    def __init__(
        self,
        slowdown: float,
        max_slowdown: float,
        random: Random,
        tuning: Tuning | None = None,
    ) -> None:
        self.tuning = tuning or Tuning()
        self._slowdown = slowdown
        self._max_slowdown = max_slowdown
        self.audits = Audits(max_slowdown, self.tuning)
        self.margin = Margin(self.tuning)
        self.ledger: Ledger | None = None  #: None before the reference is known
        #: What iterations took, or had taken, at full clocks, and that over the replayed time.
        self._full_s = Reference(self.tuning.remembered // 2)
        self._ratios = Reference(self.tuning.remembered)
        self._times = AuditTimes(self.tuning.first_audit, self.tuning.audit, random)
        # Seconds that iterations had taken at full clocks, all of them and those that were planned,
        # and what clocks did to their computations.
        self._all_s = self._planned_s = self._explained_s = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than may be, so that iterations run at full clocks."""
        return self.ledger is not None and self.ledger.is_overdrawn

    @property
    def is_owed(self) -> bool:
        """Whether iterations were longer than agreed by now."""
        return self.ledger is not None and self.ledger.owed_s > 0.0

    @property
    def spare_s(self) -> float:
        """Seconds that may still be owed; 0 before the reference is known."""
        if self.ledger is None:
            return 0.0
        return max(0.0, self.ledger.burst_s - self.ledger.owed_s)

    @property
    def ratio(self) -> float:
        """What iterations take at full clocks, over what is replayed."""
        value = self._ratios.value
        return 1.0 if value is None else value

    def begin(self, reference_s: float) -> None:
        """Begin with a reference that is known before the first iteration."""
        self.ledger = self._terms(reference_s)

    def forgive(self) -> None:
        """Forget what is owed: somebody else owes it."""
        if self.ledger is not None:
            self.ledger = replace(self.ledger, owed_s=min(0.0, self.ledger.owed_s))

    def add(
        self,
        iteration: int,
        time_s: float,
        judged: Judged | None,
        *,
        full_clocks: bool,
        replayed_s: float,
        slowdown: float,
    ) -> None:
        """Charge what clocks did to an iteration.

        Args:
            iteration: Its number.
            time_s: Seconds that it took.
            judged: What is known of its computations; None if too little is.
            full_clocks: Whether all of it ran at full clocks.
            replayed_s: Seconds of an iteration at full clocks, as replayed from what is known.
            slowdown: What is agreed now; it may be more than at the begin.
        """
        longer_s = None
        if judged is not None:
            longer_s = judged.ran_s - judged.full_s
            # What only audits show is owed for as much time.
            unexplained = self.audits.add(judged.unexplained, full_clocks=full_clocks)
            self._all_s += judged.full_s
            if not full_clocks:
                self._planned_s += judged.full_s
                self._explained_s += longer_s
            longer_s += judged.full_s * unexplained
            # What it had taken at full clocks is its time by the ratio of both replays.
            self._ratios.add(time_s * judged.full_s / judged.ran_s / replayed_s)
        self._full_s.add(time_s - (longer_s or 0.0))
        # The reference moves with the training, whose iterations become longer or shorter for other
        # reasons than clocks.
        reference_s = self._full_s.value
        assert reference_s is not None
        terms = self._terms(reference_s)
        if self.ledger is not None:
            terms = replace(terms, owed_s=self.ledger.owed_s, recent=self.ledger.recent)
        self.ledger = replace(terms, slowdown=slowdown).add(
            time_s, full_clocks=full_clocks, iteration=iteration, longer_s=longer_s
        )

    def is_audit(self) -> bool:
        """Whether the next iteration ahead is one of an audit."""
        return self._times.step(1, self.audits.share)

    @property
    def longest(self) -> float | None:
        """By how much all iterations by now were longer than at full clocks, at most, as far as
        noise tells, a share; None before the first audit.
        """
        longest = self.audits.longest
        if longest is None or not self._all_s:
            return None
        return (self._explained_s + longest * self._planned_s) / self._all_s

    def _terms(self, reference_s: float) -> Ledger:
        """Return a ledger in which nothing is owed."""
        return Ledger(
            reference_s,
            self._slowdown,
            self._max_slowdown,
            self.tuning.burst * reference_s,
            unjudged=self.tuning.unjudged,
        )
