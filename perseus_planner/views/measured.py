"""What `planner measure` prints of a command: its time, and the energy of GPUs meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import si
from perseus_planner.base.tables import Column, lay_out, table

if TYPE_CHECKING:
    from perseus_planner.gpu.monitor import Window


@dataclass
class Result:
    """What becomes of a command and of its measurement."""

    command: tuple[str, ...]
    status: int  #: its exit status, as a shell says it
    time_s: float
    handled: dict[str, float]  #: how many tokens or samples it handled
    window: Window | None = None  #: None if it could not be ended
    lost: list[str] = field(default_factory=list)  #: why energy of the time is not known
    problems: list[str] = field(default_factory=list)  #: what else went wrong, and what to do
    notes: list[str] = field(default_factory=list)  #: what else to know


def result_content(result: Result) -> dict[str, Any]:
    """Return everything, for JSON: energies are null where they are not known."""
    # Keys are always there, so that programs need not ask for them.
    content: dict[str, Any] = {
        "command": result.command,
        "status": result.status,
        "time_s": result.time_s,
        "energy_j": None,
        "error_j": None,
        "average_w": None,
        "gpus": [],
    }
    window = result.window
    if window is not None:
        content["gpus"] = [{**asdict(gpu), "average_w": gpu.average_w} for gpu in window.gpus]
    # A sum with unknown parts would be too small, so it is left out.
    if window is not None and not result.lost:
        for name in ("time_s", "energy_j", "error_j", "average_w"):
            content[name] = getattr(window, name)
        for name, count in result.handled.items():
            content[f"energy_per_{name}_j"] = window.energy_j / count
            # A window without energy has no efficiency.
            if window.energy_j:
                content[f"{name}s_per_j"] = count / window.energy_j
    content["unknown"] = result.lost
    content["problems"] = result.problems
    content["notes"] = result.notes
    return content


def result_text(result: Result) -> str:
    """Return the same for people."""
    lines = [""]
    # Without energy the time is still told below.
    window = result.window
    if window is not None and window.gpus:
        columns = lay_out(
            window.gpus,
            Column("GPU", "gpu", "<"),
            Column("name", "name", "<"),
            Column("energy (J)", "energy_j", ".2f"),
            Column("+- (J)", "error_j", ".2f"),
            Column("average (W)", "average_w", ".1f"),
            Column("peak (W)", "peak_w", ".1f"),
        )
        lines += [table(columns), ""]
    # A sum without a GPU that was lost would look like a saving.
    if window is None or result.lost:
        why = "; ".join(result.lost)
        lines.append(f"{result.command[0]}: {si(result.time_s, 's')}, energy unknown: {why}")
    else:
        lines += _energy_lines(window, result.handled)
    return "\n".join([*lines, *result.problems, *result.notes])


def _energy_lines(window: Window, handled: Mapping[str, float]) -> list[str]:
    origins = " and ".join(sorted({gpu.origin for gpu in window.gpus}))
    lines = [
        f"{window.name}: {si(window.time_s, 's')}, {si(window.energy_j, 'J', 6)} +- "
        f"{si(window.error_j, 'J', 3)}, {si(window.average_w, 'W')} on average ({origins})"
    ]
    # A window without energy has no efficiency.
    if window.energy_j:
        lines += [
            f"{si(window.energy_j / count, 'J', 6)}/{name}, {count / window.energy_j:.6g} {name}s/J"
            for name, count in handled.items()
        ]
    return lines
