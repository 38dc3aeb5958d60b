"""The ledger: how much slower than at full clocks a rank may have become, enforced by the rank itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from perseus_planner.errors import UsageError
from perseus_planner.quantities import TIME, WAIT, Rule, check_fields

_SLOWDOWN = Rule(float, False, "a slowdown: give the longest iteration as a multiple of one at full clocks, such as 1")
_CREDIT = 4.0  #: the most that fast iterations earn for later ones, as a multiple of `burst_s`


@dataclass(frozen=True)
class Ledger:
    """What a rank owes for iterations that were longer than agreed.

    While it `is_overdrawn`, the rank runs at full clocks. So, if the reference is right, after any number of iterations

        sum of their times <= (slowdown + max_slowdown) * sum of what they take at full clocks
                              + burst_s + the excess of the one iteration that overdrew it.

    Nothing is assumed about what clocks do to the GPU. An iteration at full clocks costs nothing, however long it
    takes: it is its own reference. Each rank carries a ledger and adds its own iterations; clocks never decide what is
    computed, so ranks need not agree.

    Attributes:
        reference_s: seconds of an iteration at full clocks.
        slowdown: the agreed iteration time, as a multiple of the reference; at least 1.
        max_slowdown: how much longer iterations may be on average, as a share of the reference.
        burst_s: how much may be owed, seconds.
        owed_s: what is owed now; negative for credit, of at most four bursts.

    Raises:
        UsageError: If a number is out of range.
    """

    reference_s: float
    slowdown: float = 1.0
    max_slowdown: float = 0.005
    burst_s: float = 0.0
    owed_s: float = 0.0

    def __post_init__(self) -> None:
        rules = {"reference_s": TIME, "slowdown": _SLOWDOWN, "max_slowdown": WAIT, "burst_s": WAIT}
        check_fields(self, rules, UsageError, "ledger, ")
        if self.slowdown < 1.0:
            raise UsageError(f"ledger, slowdown: {self.slowdown} is not {_SLOWDOWN.wanted} or more")

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is owed than the burst, so that the next iteration runs at full clocks."""
        return self.owed_s > self.burst_s

    @property
    def allowed_s(self) -> float:
        """Seconds of an iteration that leaves the ledger as it is."""
        return (self.slowdown + self.max_slowdown) * self.reference_s

    def add(self, time_s: float, *, full_clocks: bool = False) -> Ledger:
        """Return the ledger after an iteration.

        Args:
            time_s: seconds that it took.
            full_clocks: whether all of it ran at full clocks.
        """
        share = self.slowdown + self.max_slowdown
        change_s = (1.0 - share) * time_s if full_clocks else time_s - share * self.reference_s
        return replace(self, owed_s=max(self.owed_s + change_s, -_CREDIT * self.burst_s))

    def renewed(self, terms: Ledger) -> Ledger:
        """Return the ledger with the reference and limits of `terms`, and what is owed by this one.

        A rank does so with the ledger that comes with a program: that one has the better reference, but its iterations
        end before those that the rank has run since.
        """
        return replace(terms, owed_s=max(self.owed_s, -_CREDIT * terms.burst_s))

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain values; `Ledger(**values)` is an equal one."""
        return asdict(self)
