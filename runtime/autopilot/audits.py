"""Audits: whether iterations take longer while clocks are planned than their computations explain.

What clocks do to a computation shows in its time. What they do to all of an iteration does not: it
may be slower because its clocks are planned, or because of its data, of heat, of the hour. So some
iterations, drawn at random, run at full clocks, two at a time, as the first one still feels those
before it; the second one is compared with the planned iterations around it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_SHARE = 0.004  #: of iterations that begin an audit
#: at first more, as least is known then: so much more, over how many iterations were planned
_EARLY_SHARE, _EARLY = 0.3, 10
_SUSPECTED_SHARE = 0.1  #: likewise while planned iterations seem longer
_AROUND = 4  #: planned iterations on each side of an audit
_RECENT = 32  #: planned iterations from which their noise is known
_PAIRS = 8  #: audits that are remembered
_MOST = 3.0  #: standard errors for which one audit counts at most
_SUSPECT, _SURE = 2.5, 4.0  #: standard errors from which it is doubted, and from which it counts


class Audits:
    """Compares audited iterations with planned ones.

    `longer` is by how much planned iterations are longer than audited ones, as a share, beyond what
    their computations explain; 0 unless that is sure.
    """

    def __init__(self) -> None:
        self.longer = 0.0
        self._is_suspected = False
        self._planned: deque[float] = deque(maxlen=_RECENT)
        self._audited: list[float] = []  # those that wait for planned iterations after them
        self._before: list[float] = []  # planned iterations before them
        self._after: list[float] = []
        self._differences: deque[float] = deque(maxlen=_PAIRS)
        self._unsure = 0  # planned iterations since it was last known that they are not longer
        self._number = 0  # of planned iterations
        self._full = 0  # iterations at full clocks, one after the other

    @property
    def share(self) -> float:
        """The share of iterations that should begin an audit now."""
        if self._is_suspected:
            return _SUSPECTED_SHARE
        return _SHARE + _EARLY_SHARE / (_EARLY + self._number)

    def add(self, unexplained: float, *, full_clocks: bool) -> float:
        """Take in an iteration; return what is owed for planned iterations, in iterations.

        Args:
            unexplained: what it took beyond what is known of its computations, as a share of it.
            full_clocks: whether all of it ran at full clocks.
        """
        if full_clocks:
            self._full += 1
            if self._full > 1:
                if self._after or not self._audited:
                    self._audited, self._after = [], []
                    self._before = list(self._planned)[-_AROUND:]
                self._audited.append(unexplained)
            return 0.0
        self._full = 0
        self._number += 1
        self._planned.append(unexplained)
        self._unsure += 1
        owed = self.longer
        if self._audited:
            self._after.append(unexplained)
            if len(self._after) >= _AROUND * (1 if self._before else 2):
                owed += self._compare()
        return owed

    def _compare(self) -> float:
        """Compare the last audit; return what is owed for the planned iterations before it."""
        around = [*self._before, *self._after]
        self._differences.append(median(around) - median(self._audited))
        self._audited, self._after = [], []
        steps = [abs(b - a) for a, b in zip(self._planned, list(self._planned)[1:], strict=False)]
        noise = 1.48 / math.sqrt(2) * median(steps) * math.sqrt(1 + 1 / len(around)) + 1e-4
        sure = sum(min(max(each / noise, -_MOST), _MOST) for each in self._differences)
        sure /= math.sqrt(len(self._differences))
        was_longer, self._is_suspected = self.longer, sure > _SUSPECT
        self.longer = max(0.0, median(self._differences)) if sure > _SURE else 0.0
        unsure = self._unsure
        if not self._is_suspected or self.longer:
            self._unsure = 0
        return 0.0 if was_longer else self.longer * unsure
