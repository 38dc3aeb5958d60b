"""What a power limit does to a simulated GPU that decodes a large language model, beside a
published measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data import Size
from results import Check, Section, Table

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.model import OpCost

NUMBER = 28
_COLUMNS = {
    "gpu": ("GPU", ""),
    "batch": ("requests at once", ".0f"),
    "from_w": ("power at 250 W, W", ".0f"),
    "time": ("time at 175 W, %", "+.1f"),
    "energy": ("energy at 175 W, %", "+.1f"),
}
_PARAMETERS, _GPUS = 65e9, 4
_CAPS_W = (250.0, 175.0)
_PUBLISHED = {"gpu": "published, A100 80 GB", "time": 6.7, "energy": -23.2}


def measure(size: Size) -> Section:
    """Return time and energy under the lower limit, against those under the higher."""
    rows = list(_rows())
    return Section(
        number=NUMBER,
        title="A power limit while a language model decodes",
        how="*Simulated*, nothing fitted: steps of one token of 65e9 parameters in 16 bits on 4 "
        "GPUs, without the "
        "attention's own traffic, under limits of 250 and 175 W. *Published*: LLaMA 65B (Samsi et "
        "al., From Words to "
        "Watts, HPEC 2023).",
        tables=[Table(_COLUMNS, [*rows, _PUBLISHED])],
        checks=[
            Check(
                f"{name}: no request count makes the lower limit faster, and some save energy",
                all(row["time"] >= 0 for row in found) and any(row["energy"] < 0 for row in found),
            )
            for name in dict.fromkeys(row["gpu"] for row in rows)
            for found in [[row for row in rows if row["gpu"] == name]]
        ],
        notes=[
            "With one request the simulated step is nearly all memory traffic, which a limit does "
            "not slow; with 64, arithmetic is a third of it. The published figures lie between: "
            "+6.7 % and -23 % make 82 % of the power, so that job was not at its limit of 250 W "
            "all the time.",
        ],
    )


def _rows() -> Iterator[dict[str, Any]]:
    for name in ("v100", "a100-pcie", "a100-sxm"):
        for batch in (1, 16, 64):
            (before_s, before_j), (after_s, after_j) = (
                _step(name, batch, cap_w) for cap_w in _CAPS_W
            )
            yield {
                "gpu": f"simulated {name}",
                "batch": batch,
                "from_w": before_j / before_s,
                "time": 100 * (after_s / before_s - 1),
                "energy": 100 * (after_j / before_j - 1),
            }


def _step(name: str, batch: int, cap_w: float) -> tuple[float, float]:
    """Return the seconds and joules of a step on one of the GPUs."""
    work = OpCost(2 * _PARAMETERS * batch / _GPUS, 2 * _PARAMETERS / _GPUS)
    with open_gpu(f"simulated:{name}?noise=0&drift=0&step=0") as gpu:
        gpu.set_power_limit_w(cap_w)
        begin_s, begin_j = gpu.now_s(), gpu.energy_j()
        gpu.run(work, 20)  # type: ignore[attr-defined]
        return gpu.now_s() - begin_s, gpu.energy_j() - begin_j
