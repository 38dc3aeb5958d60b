"""How a smoke run and some tests search less for each plan, where plans need not be the best."""

from __future__ import annotations

from perseus_planner.solver import budget, labels, paces, phases, polish, rounding

LESS = (
    (budget, "_EFFORT", budget.Tries(300_000, 100, 1_500)),
    (phases, "_ENDS", (0, 2, 8)),
    (paces, "_EXCHANGES", 10),
    (paces, "_REPLAYED", 500_000),
    (phases, "_PAIRS", 4),
    (rounding, "_EFFORT", (100_000, 300, 2_000)),
    (rounding, "_ANCHOR_EFFORT", (20_000, 20, 200)),
    (polish, "_MOVES", (300, 20_000)),
    (labels, "_LABELS", 30),
    (labels, "_PART_LABELS", 15),
)  #: module, name and value of each limit

FULL = tuple((module, name, getattr(module, name)) for module, name, _ in LESS)
"""As users have them."""


def reduce_effort() -> None:
    """Search less for every plan of this process."""
    for module, name, value in LESS:
        setattr(module, name, value)
