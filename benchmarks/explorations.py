"""Number 26: how long it takes to compare all configurations of a job."""

from __future__ import annotations

import time

from data import Size
from results import Check, Section, Table

from perseus_planner.extensions.explore.candidates import Choices
from perseus_planner.extensions.explore.explore import explore
from perseus_planner.extensions.explore.objective import Objective
from perseus_planner.extensions.explore.operations import SYSTEMS
from perseus_planner.extensions.explore.transformer import PRESETS

_COLUMNS = {
    "what": ("job", ""),
    "objective": ("objective", ""),
    "configurations": ("configurations that fit", ""),
    "solved": ("exact frontiers", ""),
    "cpu_s": ("CPU s", ".1f"),
    "gap": ("a configuration without one may be better by, %", ".2f"),
    "first": ("best", ""),
}
_JOBS = (
    ("gpt3-1.3b", "a100-sxm", 8, 512, "fastest"),
    ("gpt3-1.3b", "a100-sxm", 8, 512, "least energy"),
    ("gpt3-13b", "h100-sxm", 96, 1536, "fastest"),
    ("gpt3-175b", "h100-sxm", 1024, 2048, "fastest"),
)


def measure(size: Size) -> Section:
    """Return the CPU time of explorations, in one process."""
    rows = []
    for model, gpu, gpus, batch, word in _JOBS if size == Size() else _JOBS[:2]:
        begin_s = time.process_time()
        objective = Objective(least_energy=word == "least energy")
        found = explore(PRESETS[model], SYSTEMS[gpu], Choices(gpus, batch), objective)
        rows.append(
            {
                "what": f"{model}, {gpus} x {gpu}, batch {batch}",
                "objective": word,
                "configurations": found.configurations,
                "solved": found.solved,
                "cpu_s": time.process_time() - begin_s,
                "gap": 100 * found.gap,
                "first": found.first[0].candidate.job.name,
            }
        )
    most = max(rows, key=lambda row: row["cpu_s"])
    return Section(
        number=26,
        title="Exploring configurations",
        how="*Simulated*. CPU time of one process; the first row includes loading compiled code.",
        tables=[Table(_COLUMNS, rows)],
        checks=[Check(f"{most['what']}: {most['cpu_s']:.0f} CPU s, limit 60", most["cpu_s"] <= 60)],
    )
