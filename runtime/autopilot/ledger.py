"""The ledger: how much slower than at full clocks a rank may have become, enforced by the rank
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import TIME, WAIT, Rule, check_fields

_SLOWDOWN = Rule(
    float,
    False,
    "a slowdown: give the longest iteration as a multiple of one at full clocks, such as 1",
)
_CREDIT = 4.0  #: the most that fast iterations earn for later ones, as a multiple of `burst_s`
_RECENT = 16  #: iterations that are added again when the reference changes


@dataclass(frozen=True)
class Ledger:
    """What a rank owes for iterations that were longer than agreed.

    While it `is_overdrawn`, the rank runs at full clocks. So, if the reference is right, after any
    number of iterations

        sum of their times <= (slowdown + max_slowdown) * sum of what they take at full clocks
                              + burst_s + the excess of the one iteration that overdrew it.

    Nothing is assumed about what clocks do to the GPU. An iteration at full clocks costs nothing,
    however long it takes: it is its own reference. Each rank carries a ledger and adds its own
    iterations; clocks never decide what is computed, so ranks need not agree.

    Raises:
        UsageError: If a number is out of range.
    """

    reference_s: float  #: seconds of an iteration at full clocks
    slowdown: float = 1.0  #: the agreed iteration time, as a multiple of the reference; at least 1
    #: how much longer iterations may be on average, as a share of the reference.
    max_slowdown: float = 0.005
    burst_s: float = 0.0  #: how much may be owed, seconds
    owed_s: float = 0.0  #: what is owed now; negative for credit, of at most four bursts
    last: int = -1  #: the number of the iteration that was added last; -1 for none
    #: the last ones that were added, up to 16: number, seconds, and whether it ran at full clocks.
    recent: tuple[tuple[int, float, bool], ...] = ()

    def __post_init__(self) -> None:
        rules = {"reference_s": TIME, "slowdown": _SLOWDOWN, "max_slowdown": WAIT, "burst_s": WAIT}
        check_fields(self, rules, UsageError, "ledger, ")
        if self.slowdown < 1.0:
            raise UsageError(f"ledger, slowdown: {self.slowdown} is not {_SLOWDOWN.wanted} or more")
        object.__setattr__(
            self,
            "recent",
            tuple((int(n), float(time_s), bool(full)) for n, time_s, full in self.recent),
        )

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than the burst, so that the next iteration runs at full clocks."""
        return self.owed_s > self.burst_s

    def add(
        self, time_s: float, *, full_clocks: bool = False, iteration: int | None = None
    ) -> Ledger:
        """Return the ledger after one more iteration.

        Args:
            time_s: seconds that it took.
            full_clocks: whether all of it ran at full clocks.
            iteration: its number; None for the next one.
        """
        return self._added((self.last + 1 if iteration is None else iteration, time_s, full_clocks))

    def _added(self, *iterations: tuple[int, float, bool]) -> Ledger:
        share, owed_s = self.slowdown + self.max_slowdown, self.owed_s
        for _, time_s, full_clocks in iterations:
            owed_s += (1.0 - share) * time_s if full_clocks else time_s - share * self.reference_s
            owed_s = max(owed_s, -_CREDIT * self.burst_s)
        ledger = copy(self)  # on the training thread: what was checked is not checked again
        recent = (*self.recent, *iterations)[-_RECENT:]
        ledger.__dict__.update(owed_s=owed_s, last=iterations[-1][0], recent=recent)
        return ledger

    def renewed(self, terms: Ledger) -> Ledger:
        """Return the ledger that comes with a program, with the iterations added that this rank has
        run since.

        A rank takes over the reference of `terms`, which is the better one, and what is owed by it.

        Args:
            terms: a ledger of the first iterations of this one, or all. If it ends before what this
                one remembers, what is owed stays.
        """
        later = [each for each in self.recent if each[0] > terms.last]
        if len(later) == _RECENT:
            return replace(
                terms,
                owed_s=max(self.owed_s, -_CREDIT * terms.burst_s),
                last=self.last,
                recent=self.recent,
            )
        return terms._added(*later) if later else terms

    def corrected(self, reference_s: float, burst_s: float, count: int) -> Ledger:
        """Return the ledger with a new reference, which the last `count` iterations had already.

        Args:
            reference_s: seconds of an iteration at full clocks.
            burst_s: how much may be owed, seconds.
            count: number of iterations; those of `recent` count.
        """
        owed_s, share = self.owed_s, self.slowdown + self.max_slowdown
        for _, _, full_clocks in self.recent[max(0, len(self.recent) - count) :]:
            owed_s -= 0.0 if full_clocks else share * (reference_s - self.reference_s)
        return replace(
            self, reference_s=reference_s, burst_s=burst_s, owed_s=max(owed_s, -_CREDIT * burst_s)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain values, which JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        """Return the ledger of which `to_dict` returned these values.

        Raises:
            UsageError: If a number is out of range.
        """
        return cls(**values)
