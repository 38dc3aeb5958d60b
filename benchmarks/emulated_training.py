"""Number 17: real engines train on emulated GPUs by plans; iteration time and energy compared
with the plans.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from data import SMOKE, MissingError, Size
from results import Check, Section, Table

from perseus_planner.plans.plan import Plan

DEPTHS = (4, 5, 6, 5)
"""Linear layers of each stage, uneven so that there is slack."""
SLOWDOWNS = (1.00, 1.10)
"""Slowdowns of the plans, compared with all clocks at maximum."""

_GPU = "a100-sxm?slower=50000"  # forwards take 25 to 40 ms, backwards twice that
_NEAR = 0.03  # share by which time and energy may differ from the plan's
_NAMES = {"torch": "torch 1F1B", "deepspeed": "DeepSpeed"}
_COLUMNS = {
    "engine": ("engine", ""),
    "clocks": ("clocks", ""),
    "planned_s": ("planned, s", ".4f"),
    "time_s": ("took, s", ".4f"),
    "time_error": ("difference, %", "+.2f"),
    "planned_j": ("planned, J", ".1f"),
    "energy_j": ("drew, J", ".1f"),
    "energy_error": ("difference, %", "+.2f"),
    "saved": ("saved against maximum, %", ".1f"),
    "changes": ("clock changes", "d"),
}


def measure(size: Size) -> Section:
    """Train with each engine: all clocks at maximum and by each plan, in one run."""
    microbatches, rounds = (4, 1) if size is SMOKE else (8, 3)
    engines = ("torch",) if size is SMOKE else ("torch", "deepspeed")
    rows = [row for engine in engines for row in _rows(engine, microbatches, rounds)]
    plans = [row for row in rows if row["changes"] is not None]
    worst_s, worst_j = (
        max(abs(row[key]) for row in plans) for key in ("time_error", "energy_error")
    )
    return Section(
        17,
        "Training by plans on emulated GPUs",
        f"Measured in real time: {len(DEPTHS)} ranks, real gloo transfers, {microbatches} "
        "microbatches of a stack of linear layers; computations take as long as "
        f"`emulated:{_GPU}` says, and clocks are set through the runtime, its controller and "
        f"calls that take milliseconds. Medians of the iterations of {rounds} rounds, in each of "
        "which all three take their turn.",
        [Table(_COLUMNS, rows)],
        [
            Check(
                f"time is within {_NEAR:.0%} of the plan's: {worst_s:.2f} %", worst_s <= 100 * _NEAR
            ),
            Check(
                f"energy is within {_NEAR:.0%} of the plan's: {worst_j:.2f} %",
                worst_j <= 100 * _NEAR,
            ),
        ],
        [
            "*Planned* times include one constant for each engine: how much longer the iteration "
            "with all clocks at maximum took than its replay. Planned energies include the "
            "waiting in that time. The profile was measured on the same GPU in virtual time.",
        ],
    )


def _rows(engine: str, microbatches: int, rounds: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(
            "emulated_ranks.py",
            [engine, _GPU, str(microbatches), str(rounds), folder],
            Path(folder),
        )
        spans = json.loads((Path(folder) / f"{engine}.json").read_text())
        plans = {str(each): Plan.load(Path(folder) / f"{engine}-{each}.yaml") for each in SLOWDOWNS}
    took = {name: tuple(map(median, zip(*each, strict=True))) for name, each in spans.items()}
    first = plans[str(SLOWDOWNS[0])]
    overhead_s = took["maximum"][0] - first.baseline_time_s
    overhead_j = overhead_s * sum(first.rank_waiting_w)
    planned = {"maximum": (first.baseline_time_s, first.baseline_energy_j)}
    planned |= {name: (plan.time_s, plan.energy_j) for name, plan in plans.items()}
    for name, (time_s, energy_j) in planned.items():
        planned_s, planned_j = time_s + overhead_s, energy_j + overhead_j
        took_s, took_j = took[name]
        yield {
            "engine": _NAMES[engine],
            "clocks": f"plan for {float(name):.2f}x" if name in plans else name,
            "planned_s": planned_s,
            "time_s": took_s,
            "time_error": 100 * (took_s / planned_s - 1),
            "planned_j": planned_j,
            "energy_j": took_j,
            "energy_error": 100 * (took_j / planned_j - 1),
            "saved": 100 * (1 - took_j / took["maximum"][1]),
            "changes": sum(plans[name].changes) if name in plans else None,
        }


def run_ranks(script: str, arguments: list[str], folder: Path) -> None:
    """Run a script of this folder on all ranks until they have ended.

    Raises:
        MissingError: If torch or the engine is not installed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"WORLD_SIZE": str(len(DEPTHS)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PLANNER_STATE_DIR": str(folder / "state"),
        },
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(len(DEPTHS)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(DEPTHS))
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    for rank, text in zip(ranks, outputs, strict=True):
        if "ModuleNotFoundError" in text:
            raise MissingError(text.strip().splitlines()[-1])
        if rank.returncode:
            raise RuntimeError(text)
