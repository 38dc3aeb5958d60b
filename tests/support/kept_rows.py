"""Read what an interrupted sweep has kept."""

from __future__ import annotations

from pathlib import Path

from perseus_planner.base.wires import decode
from perseus_planner.profiler.sweep import _Kept
from perseus_planner.profiles.measurement import Measurement


def kept(path: Path) -> dict[tuple[str, int], list[Measurement]]:
    """Return the rows in a file."""
    rows = decode(path.read_bytes(), _Kept).rows if path.exists() else {}
    return {(kind, clock): table[clock] for kind, table in rows.items() for clock in table}
