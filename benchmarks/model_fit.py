"""Number 12: how near the physics of the simulated GPU come to the measured profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from data import Case, Size, profile_of
from load_fit import fitted_profile
from results import Check, Section, Table

from perseus_planner import Profile
from perseus_planner.gpu.simulated.model import Load

_MEDIAN = 2.0  #: percent, the most that the median error may be
_PARAMETERS = 9  #: the most of each (stage, kind)
_HIDDEN = 5  #: of so many clocks one is fitted to, and the others are predicted
_COLUMNS = {
    "profile": ("profile", ""),
    "fitted_to": ("fitted to", ""),
    "points": ("(stage, kind, clock) compared", "d"),
    "parameters": ("parameters per (stage, kind)", "d"),
    "time_median": ("error of time: median, %", ".2f"),
    "time_95": ("95 % below, %", ".2f"),
    "time_worst": ("worst, %", ".2f"),
    "energy_median": ("error of energy: median, %", ".2f"),
    "energy_95": ("95 % below, %", ".2f"),
    "energy_worst": ("worst, %", ".2f"),
}


def measure(size: Size) -> Section:
    """Fit every computation of every profile, at all clocks and at some."""
    rows = [row for case in size.cases for row in (_all_clocks(case), _some_clocks(case))]
    worst = max(row[f"{what}_median"] for row in rows for what in ("time", "energy"))
    parameters = max(row["parameters"] for row in rows)
    return Section(
        12,
        "The model of the simulated GPU, fitted to measured profiles",
        "What the model says is **simulated**; what it is compared with was measured. Each (stage, kind) has its own "
        "parameters, all of them physical and none of them for a single clock.",
        [Table(_COLUMNS, rows)],
        [
            Check(f"median errors are at most {_MEDIAN:.0f} %: {worst:.2f} %", worst <= _MEDIAN),
            Check(f"at most {_PARAMETERS} parameters per (stage, kind): {parameters}", parameters <= _PARAMETERS),
        ],
        [
            "Bloom's forwards on the A40 take about 10 % longer at 1080 MHz than at 1050 MHz, which no part of the "
            "model does; it goes between.",
        ],
    )


def _all_clocks(case: Case) -> Mapping[str, Any]:
    profile = profile_of(case)
    return {"profile": case.name, "fitted_to": "all clocks", **_errors(profile, profile)}


def _some_clocks(case: Case) -> Mapping[str, Any]:
    """Fitted to one clock in `_HIDDEN`, the highest and the lowest included, and compared with the others."""
    profile = profile_of(case)
    shown = {key: tuple({*rows[::_HIDDEN], rows[-1]}) for key, rows in profile.measurements.items()}
    hidden = {key: tuple(row for row in rows if row not in shown[key]) for key, rows in profile.measurements.items()}
    errors = _errors(replace(profile, measurements=shown), replace(profile, measurements=hidden))
    return {"profile": case.name, "fitted_to": f"1 clock in {_HIDDEN}, the others compared", **errors}


def _errors(shown: Profile, compared: Profile) -> dict[str, Any]:
    loads = fitted_profile(shown)
    rows = [(loads[key], row) for key, measured in compared.measurements.items() for row in measured]
    errors = {
        "time": [100 * abs(load.time_s(row.clock_mhz) / row.time_s - 1) for load, row in rows],
        "energy": [100 * abs(load.energy_j(row.clock_mhz) / row.energy_j - 1) for load, row in rows],
    }
    values: dict[str, Any] = {"points": len(rows), "parameters": len(fields(Load))}
    for what, each in errors.items():
        for name, percentile in (("median", 50), ("95", 95), ("worst", 100)):
            values[f"{what}_{name}"] = float(np.percentile(each, percentile))
    return values
