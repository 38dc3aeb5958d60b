"""What accounts say in words and columns: of a rank, and of all attempts of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Protocol

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, lay_out, table
from perseus_planner.plans.replay import ALL_MAXIMUM
from perseus_planner.runs.account import Account, Entry, fold
from perseus_planner.runs.recording import attempt_path
from perseus_planner.views.context import saved_text

NOTHING_SET = "Dry run: no clock was set, so nothing was saved"
"""How what is said of a dry run begins."""

_ALL_JUDGED = 0.995  #: share of the energy of which it is known what was saved that counts as all
_MOST_ATTEMPTS = 10  #: in a table; older ones are added up


class HasAccount(Protocol):
    """A rank of a run, by a plan or without one."""

    @property
    def ran(self) -> Account:
        """The account of its iterations."""


def throttled(rank: HasAccount) -> str | None:
    """Return for how long of an iteration a rank was throttled, by reason; None if it was not."""
    reasons = [
        f"{reason} {si(seconds / rank.ran.windows, 's', 3)}"
        for reason, seconds in rank.ran.throttled_s.items()
        if seconds > 0.0
    ]
    return ", ".join(reasons) or None


def clocked(name: str) -> Callable[[HasAccount], float | None]:
    """Return the function that gives the mean clock of a rank, by the sum `name` of its account."""
    return lambda rank: _share(getattr(rank.ran, name), rank.ran.clocked_s)


def off_clock_share(account: Account) -> float | None:
    """Return the share of the computing time before the clock was set; None if it is not known."""
    return _share(account.off_clock_s, account.busy_s)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def totals_text(totals: Sequence[Entry], total: Account, *, saves: bool) -> str:
    """Return a table of what each attempt ran and, if it `saves`, what it saved, with their sum at
    the end.
    """
    shown, columns = attempts_table(totals, saves=saves)
    saved = f", saved against {ALL_MAXIMUM} in as much time" if saves else ""
    part = ""
    if not all(map(_is_metered, shown)):
        part = " Energies are those of the time for which they are known."
    lines = [
        f"All attempts, energy {total.energy_is or 'unknown'}{saved}:\n",
        table(lay_out(shown, *columns)),
        f"\nThese are all iterations, each with what passes until the next; the time is the first "
        f"rank's.{part}\n"
        f"{account_text(total, saves=saves)}",
    ]
    return "\n".join(lines)


def _is_metered(account: Account) -> bool:
    """Whether the energy of all of the time is known."""
    return account.metered_s >= (1 - 1e-9) * account.gpu_s


def attempts_table(totals: Sequence[Entry], *, saves: bool) -> tuple[list[Entry], list[Column]]:
    """Return the rows and the columns of the table of `totals_text`."""
    # Attempts are told without their plans, which are told elsewhere.
    attempts = list(fold(replace(entry, version=None) for entry in totals))
    shown = attempts[-_MOST_ATTEMPTS:]
    # Old attempts are added up, so that the table stays short.
    older = attempts[:-_MOST_ATTEMPTS]
    if older:
        shown.insert(0, reduce(Entry.__add__, older))
    # A single attempt is its own sum.
    whole = reduce(Entry.__add__, shown) if len(shown) > 1 else None
    if whole is not None:
        shown.append(whole)

    def name(entry: Entry) -> str:
        if entry is whole:
            return "all"
        return "older" if entry.attempt == 0 else attempt_path(Path(), entry.attempt).name

    # An energy that is known of a part of the time would look like all of it.
    def if_known(field: str) -> Callable[[Entry], float | None]:
        return lambda entry: getattr(entry, field) if entry.energy_is else None

    def if_judged(field: str) -> Callable[[Entry], float | None]:
        return lambda entry: getattr(entry, field) if entry.is_judged else None

    columns = [
        Column("attempt", name, "<"),
        Column("iterations", "iterations"),
        Column("time {}", "time_s", "s"),
        Column("energy {}", if_known("energy_j"), "J"),
    ]
    # Joules of a part of the time must not be divided by all of it.
    if not all(map(_is_metered, shown)):
        columns.append(Column("of time %", lambda entry: _share(entry.metered_s, entry.gpu_s), "%"))
    if saves:
        columns.append(Column("saved {}", if_judged("saved_j"), "J"))
        columns.append(Column("saved %", if_judged("saved_share"), "%"))
    return shown, columns


def account_text(account: Account, *, saves: bool) -> str:
    """Say what the table of an account leaves out: how sure a saving is, what passed between
    iterations, and what is not known.
    """
    parts = []
    if saves and account.energy_is is not None:
        text = saved_text(account)
        parts.append(f"{text[0].upper()}{text[1:]}.")
        # A part that was not judged may have saved something else.
        if account.is_judged and account.judged_j < _ALL_JUDGED * account.energy_j:
            known_share = 100 * account.judged_j / account.energy_j
            parts.append(f"What was saved is known of {known_share:.1f} % of the energy.")
    # What passes between iterations belongs to the run, and to no iteration.
    if account.gpu_s:
        share = 100 * account.between_s / account.gpu_s
        text = f"Between iterations, as for the optimizer and data: {share:.1f} % of the time"
        if account.energy_j:
            text += f", {100 * account.between_j / account.energy_j:.1f} % of the energy"
        parts.append(f"{text}.")
    # Pauses are told apart, as a mean over them would say nothing.
    if account.pause_s:
        used = f", {si(account.pause_j, 'J')}" if account.energy_is else ""
        parts.append(
            f"Pauses, which are in no other figure: {si(account.pause_s, 's')} of GPUs{used}."
        )
    # Counters may have been read in a part of the time only.
    if not _is_metered(account):
        known_share = 100 * account.metered_s / account.gpu_s
        parts.append(f"The energy of {known_share:.1f} % of the time is known.")
    return "\n".join(parts)
