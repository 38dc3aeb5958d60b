"""The constants of what the autopilot plans and tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanTuning:
    """The constants of plans and trials, as `runtime.guarantee.Tuning` has those of the guarantee.

    All are by hand: numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with
    them. Shares are of the reference, unless another whole is named.
    """

    # How long iterations may be.
    #: How much longer than agreed an iteration of a plan may be, a share.
    tight: float = 0.0005
    #: How much longer than agreed an iteration with trials may be while it is early, a share.
    trial: float = 0.0028
    #: How much longer than agreed an iteration with trials may be later, a share.
    late_trial: float = 0.0014
    #: How much longer than with trials an iteration may be if rows are over the physical bound, a
    #: share: only if all trials so far were observed.
    doubt: float = 0.01
    #: How much longer it may be while some trials were not observed yet, a share.
    more_doubt: float = 0.002

    # What is early, when more is tried.
    #: Iterations of one pipeline, in one mode, that are early; replicas share what they learn.
    early: int = 36
    #: Share of rows that may be planned on, from which an iteration is no longer early.
    enough: float = 0.75
    #: Standard errors of a row's power that count in its favour while it is early, so that it is
    #: tried.
    early_optimism: float = 1.0
    #: Standard errors of a row's power that count in its favour later.
    late_optimism: float = 0.3

    # When plans are searched.
    #: Iterations between two solutions for the same rows, whose powers are known better by then.
    again: int = 4
    #: A search for the same costs waits for the next iteration; later for that share of all of
    #: them, so that searching takes a bounded part of the time.
    rest: float = 1 / 200
    #: Costs are the same if no row's time differs by more, relative.
    same: float = 0.001
    #: How often a fresh plan is polished before it is compared with the running one.
    fresh: int = 2
    #: How many times as many measured rows as at the last solution are worth a new one.
    growth: float = 1.25
    #: How many times as many measured rows as at the last target are worth a new one: it says which
    #: rows to try first, for which a rough one is enough.
    target_growth: float = 1.6

    # Trials.
    #: Options of a rank that are wanted while it is early, of those that the best plan might use,
    #: and as many others.
    early_wanted: int = 4
    #: Later: options that the best plan might use.
    late_hoped: int = 2
    #: Later: other ones.
    late_others: int = 1
    #: One in so many ranks wants any in an iteration that is early by its number, although enough
    #: rows may be planned on.
    turn: int = 2
    #: One in so many ranks wants any in later iterations.
    late_turn: int = 8
    #: Each so many iterations a rank whose plan has no full clocks runs some computations at them,
    #: to compare lower ones with; half as often later.
    check: int = 4
    #: Iterations before a trial is tried again.
    repeat: int = 6
