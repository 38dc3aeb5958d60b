"""The plans of Kareus (OSDI'26), read as data: which mode's plan is the better one at which time.

Kareus writes each plan as the literal of a Python list, `freqs_pipeline_N.py`, with its predicted
energy in comments; and when its collectives begin, and on how many SMs, as another one,
`scheds_pipeline_N.py`. Both are parsed, never run. They hold no energy of a single computation, so
no frontier can be made of them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import read_text
from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, Sheet, lay_out

_COST = re.compile(r"^# Iteration \d+ total cost( with P2P)?: (\S+)$", re.MULTILINE)
_KINDS = ("forward", "backward")
_FOLDERS = ("frontier", "schedules")  #: that tell neither a mode nor a configuration


@dataclass(frozen=True)
class KareusPlan:
    """One plan, as its file predicts it."""

    mode: str  #: its folder, such as "nanobatch_perseus"
    file: str  #: its file, in the folder that was read
    time_s: float  #: iteration time, seconds
    #: energy over one GPU of each stage, joules, waiting included.
    energy_j: float
    #: the same less what these GPUs would draw if they waited all that time.
    effective_j: float


@dataclass(frozen=True)
class KareusConfiguration:
    """A model and how it is trained, with its plans in all modes."""

    name: str  #: its folders, such as "megatron_llama3.2_3b/cp1_tp8_mbs8_seq4096"
    plans: tuple[KareusPlan, ...]  #: fastest first
    #: those that are best for some iteration times, each from its own to that of the next one.
    best: tuple[KareusPlan, ...]

    @property
    def sheet(self) -> Sheet:
        """The plans as a table."""
        until = {
            plan.file: f"to {si(following.time_s, 's', 4)}"
            for plan, following in pairwise(self.best)
        }
        until[self.best[-1].file] = "from there on"
        columns = lay_out(
            self.plans,
            Column("mode", "mode", "<"),
            Column("time {}", "time_s", "s4"),
            Column("energy {}", "energy_j", "J4"),
            Column("best", lambda plan: until.get(plan.file, "")),
        )
        return Sheet(f"Plans of Kareus for {self.name}", _SOURCE, columns, _NOTES)


def read_kareus(folder: Path, blocking_power_w: float | None) -> tuple[KareusConfiguration, ...]:
    """Read all plans below a folder whose folders are the modes, such as Kareus' `tests`.

    Args:
        folder: the folder.
        blocking_power_w: what a waiting GPU draws in these plans, watts.

    Raises:
        UsageError: If a file is not such a plan, or there is none.
    """
    # Kareus' files have no time, but two energies whose difference is that of waiting.
    if not blocking_power_w:
        raise UsageError(
            f"{folder}: holds plans of Kareus, whose times follow from the power of a waiting GPU; "
            "give it with --blocking-power, such as 85W, which Kareus takes for an A100"
        )
    plans: dict[str, list[KareusPlan]] = defaultdict(list)
    for file in sorted(folder.rglob("freqs_pipeline_*.py")):
        # The first folder is the mode; the others name the configuration.
        mode, *names = file.relative_to(folder).parent.parts or (folder.name,)
        name = "/".join(part for part in names if part not in _FOLDERS)
        plans[name].append(_plan(file, folder, mode, blocking_power_w))
    if not plans:
        raise UsageError(f"{folder}: holds no freqs_pipeline_*.py, the plans of Kareus")
    return tuple(_configuration(name, plans[name]) for name in sorted(plans))


def _configuration(name: str, plans: list[KareusPlan]) -> KareusConfiguration:
    plans.sort(key=lambda plan: (plan.time_s, plan.effective_j))
    best = list[KareusPlan]()
    for plan in plans:  # until a longer time, a plan waits
        if not best or plan.effective_j < best[-1].effective_j:
            best.append(plan)
    return KareusConfiguration(name, tuple(plans), tuple(best))


def _plan(file: Path, folder: Path, mode: str, blocking_power_w: float) -> KareusPlan:
    text = read_text(file, UsageError)
    ranks = _literal(file, text)
    # Both sorts of a plan are parsed and never run, so what is in them is checked.
    clocks = [clock for rank in ranks for _, clock in rank]
    if not all(type(clock) is int and clock > 0 for clock in clocks):
        raise _refusal(file, "a clock is not a whole number of MHz")
    # The two totals differ by what waiting GPUs draw all the time, which tells that time.
    costs = {bool(p2p): value for p2p, value in _COST.findall(text)}
    try:
        effective_j = float(costs[False])
        energy_j = float(costs[True])
    except (KeyError, ValueError):
        raise _refusal(file, "its comments lack the total cost, or that with P2P") from None
    time_s = (energy_j - effective_j) / (blocking_power_w * len(ranks))
    if not 0.0 < time_s < float("inf"):
        raise _refusal(file, "its total costs give no iteration time")
    # The file of launches belongs to the same plan, so it must name the same computations.
    launches = file.with_name(file.name.replace("freqs", "scheds", 1))
    if launches.exists():
        kinds = [[kind for kind, *_ in rank] for rank in _literal(launches)]
        if kinds != [[kind for kind, _ in rank] for rank in ranks]:
            raise _refusal(launches, f"it has other computations than {file.name}")
    relative = str(file.relative_to(folder))
    return KareusPlan(mode, relative, time_s, energy_j, effective_j)


def _literal(file: Path, text: str | None = None) -> list[list[tuple[Any, ...]]]:
    """Return the computations of each stage."""
    try:
        ranks = ast.literal_eval((text or read_text(file, UsageError)).strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _refusal(file, "it is not the literal of a list") from error
    # A literal may be anything, so its form is checked before it is used.
    if not (
        isinstance(ranks, list)
        and ranks
        and all(isinstance(rank, list) and rank for rank in ranks)
        and all(
            isinstance(entry, tuple) and len(entry) >= 2 and entry[0] in _KINDS
            for rank in ranks
            for entry in rank
        )
        and (text is None or all(len(entry) == 2 for rank in ranks for entry in rank))
    ):
        raise _refusal(file, "it is not a list of computations for each stage")
    return ranks


def _refusal(file: Path, problem: str) -> UsageError:
    return UsageError(
        f"{file}: is not a plan of Kareus: {problem}; name a folder of files that Kareus wrote"
    )


_SOURCE = "Predicted by Kareus, for one GPU of each stage; not measured, and not replayed here."
_NOTES = (
    "Times follow from the blocking power. A plan is the best one from its time to the time named: "
    "no other",
    "takes less energy, waiting included.",
)
