"""How a smoke run and some tests search less for each plan, where plans need not be the best."""

from __future__ import annotations

from perseus_planner.solver import budget, labels, polish, rounding

LESS = (
    (budget, "_EFFORT", (1_000_000, 300, 4_000)),
    (rounding, "_EFFORT", (100_000, 300, 2_000)),
    (rounding, "_ANCHOR_EFFORT", (20_000, 20, 200)),
    (polish, "_MOVES", (300, 20_000)),
    (labels, "_LABELS", 100),
    (labels, "_PART_LABELS", 50),
)  #: module, name and value of each limit


def reduce_effort() -> None:
    """Search less for every plan of this process."""
    for module, name, value in LESS:
        setattr(module, name, value)
