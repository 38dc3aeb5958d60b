"""Number 23: real ranks train without a plan on emulated GPUs; saving and time compared with the
best plan's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from data import SMOKE, Size
from emulated_training import DEPTHS, run_ranks
from results import Check, Section, Table

NUMBER = 23

_GPU = "a100-sxm?slower=100000"
_LEDGER, _BURST = 0.005, 0.005  #: shares of an iteration
_POINTS = (
    1.5  #: how far from the best plan's saving it may be, percent of the energy at full clocks
)
#: share of the energy of an iteration at full clocks above which one is taken to be at full clocks
_NEARLY = 0.97
_WINDOW = 10  #: iterations of a mean
_COLUMNS = {
    "what": ("iterations", ""),
    "saved": ("saved against full clocks, %", ".2f"),
    "time_s": ("took, s", ".4f"),
    "slowdown": ("longer than at full clocks, %", "+.2f"),
    "full": ("of them at full clocks", "d"),
}


def measure(size: Size) -> Section:
    """Train at full clocks, by the best plan under the same budget of changes, and without a
    plan.
    """
    microbatches, iterations = (4, 16) if size is SMOKE else (8, 70)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            "learning_ranks.py", [_GPU, str(microbatches), str(iterations), folder], Path(folder)
        )
        found = json.loads((Path(folder) / "learning.json").read_text())
    learning = found["learning"]
    least_j = _NEARLY * median(each[1] for each in found["full"])
    at_full = [*found["full"][2:], *(each for each in learning[1:] if each[1] >= least_j)]
    full = median(each[0] for each in at_full), median(each[1] for each in at_full)
    plan = _row("the best plan, replayed", [], full) | {"saved": 100 * found["planned"][0]}
    rows = [plan, _row("by the best plan", found["plan"][2:], full)]
    first = next((i for i, each in enumerate(learning) if each[2] == "learning"), len(learning))
    begins = range(0, len(learning), _WINDOW)
    rows += [
        _row(f"learning, {i} to {i + _WINDOW - 1}", learning[i : i + _WINDOW], full) for i in begins
    ]
    planned = [each for each in learning[first:] if each[1] < least_j]
    last = _row(f"the last {_WINDOW} that are not at full clocks", planned[-_WINDOW:], full)
    rows += [last, _row("all without a plan", learning, full)]
    gap = 0.0 if last["saved"] is None else rows[1]["saved"] - last["saved"]
    owed_s, may_s = _owed_s(learning[first:], full[0], least_j)
    return Section(
        NUMBER,
        "Training that plans itself, on emulated GPUs",
        f"Measured in real time: {len(DEPTHS)} ranks, real gloo transfers, {microbatches} "
        f"microbatches of 1F1B; computations take as long as `emulated:{_GPU}` says. The best "
        "plan is made from the GPU's own noise-free profile, with 8 changes and the cost of "
        "changes. The autopilot knows nothing at the start, and its first trial was in iteration "
        f"{first}.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                f"ends within {_POINTS} points of the best plan: {gap:+.2f} points",
                size is SMOKE or gap <= _POINTS,
            ),
            Check(
                f"the ledger holds: {owed_s:.3f} s are owed at most, and may be {may_s:.3f} s",
                owed_s <= may_s,
            ),
        ],
        [
            "Iterations at full clocks are those of the reference, and those by which the ledger "
            "is paid: what else runs on the machine makes iterations longer than any plan does, "
            "and the ledger does not ask why."
        ],
    )


def _row(what: str, iterations: list[Any], full: tuple[float, float]) -> dict[str, Any]:
    if not iterations:
        return {"what": what, "saved": None, "time_s": None, "slowdown": None, "full": None}
    time_s, energy_j = (fmean(each[i] for each in iterations) for i in (0, 1))
    return {
        "what": what,
        "saved": 100 * (1 - energy_j / full[1]),
        "time_s": time_s,
        "slowdown": 100 * (time_s / full[0] - 1),
        "full": sum(each[1] >= _NEARLY * full[1] for each in iterations),
    }


def _owed_s(learning: list[Any], full_s: float, least_j: float) -> tuple[float, float]:
    """Return the most that the ledger owed, and what it may owe: the burst, and what one iteration
    was too long.

    By this machine's own times; an iteration at full clocks is its own reference. Programs are two
    or three iterations late, and the first rank of a pipeline pays at once, so what two more were
    too long is allowed too.
    """
    owed_s = most_s = 0.0
    excess_s = [0.0]
    for time_s, energy_j, _ in learning:
        at_full = energy_j >= least_j
        change_s = -_LEDGER * time_s if at_full else time_s - (1.0 + _LEDGER) * full_s
        excess_s.append(0.0 if at_full else change_s)
        owed_s = max(owed_s + change_s, -4 * _BURST * full_s)
        most_s = max(most_s, owed_s)
    return most_s, _BURST * full_s + sum(sorted(excess_s)[-3:])
