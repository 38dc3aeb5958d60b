"""Number 13: stages of measured profiles, estimated from the dimensions of the model and one
other stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from data import Case, Size, profile_of
from results import Check, Section, Table

from perseus_planner import Profile
from perseus_planner.extensions.explore.calibration import Calibration, calibration_of, estimate
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.operations import SYSTEMS, with_link
from perseus_planner.extensions.explore.transformer import PRESETS
from perseus_planner.profiles.csv_file import word_of

_MAX_ERRORS = (
    0.01,
    0.10,
)  #: mean over the clocks, without a head and with it, calibrated on all clocks
# Traffic does not seem to be in the data.
_PIPELINES: Mapping[str, tuple[str, Configuration]] = {
    "gpt3-175b": (
        "a100-sxm",
        Configuration(
            replace(
                PRESETS["gpt3-175b"],
                sequence=1024,
                microbatch=2,
                tensor_degree=8,
                attention="plain",
            ),
            (12,) * 8,
            1,
            1,
        ),
    ),
    "bloom": (
        "a40",
        Configuration(
            replace(PRESETS["bloom-176b"], tensor_degree=8, attention="plain"),
            (9, 9, 9, 9, 9, 9, 9, 7),
            1,
            1,
        ),
    ),
}
_COLUMNS = {
    "profile": ("profile", ""),
    "calibrated": ("calibrated on", ""),
    "kind": ("computation", ""),
    **{
        f"{part}_{what}": (f"{what}, {text}, %", "+.2f" if part in ("first", "last") else ".2f")
        for what in ("time", "energy")
        for part, text in (
            ("mean", "mean of 7 stages"),
            ("first", "first"),
            ("last", "last"),
            ("worst", "worst clock of any"),
        )
    },
}
_CALIBRATED_ON = {
    "none": "nothing",
    "top": "middle stage, top clock",
    "all": "middle stage, all clocks",
}


def measure(size: Size) -> Section:
    """Return estimated over measured values, minus 1; signed for single stages."""
    rows = [row for case in size.cases for row in _rows(case)]
    calibrated = [row for row in rows if row["calibrated"] == _CALIBRATED_ON["all"]]
    largest = [
        max(abs(row[f"{part}_{what}"]) for row in calibrated for what in ("time", "energy")) / 100
        for part in ("first", "last")
    ]
    return Section(
        number=13,
        title="Stages estimated from the model's dimensions and one other stage",
        how="*Simulated* from operations in closed form, against *measured* profiles. The middle "
        "stage (number 3) "
        "calibrates; errors are those of the other 7, as a mean over all measured clocks.",
        tables=[Table(_COLUMNS, rows)],
        checks=[
            Check(
                f"{text}: {100 * found:.2f} % off in time or energy at most, limit {100 * limit:g} "
                "%",
                found <= limit,
            )
            for text, found, limit in zip(
                ("first stage, with embedding", "last stage, with head"),
                largest,
                _MAX_ERRORS,
                strict=True,
            )
        ],
        notes=[
            "In the data stages 0 to 6 are alike, so stages 1 to 6 add nothing to the middle one; "
            "the first and the last stage show how good the estimate is.",
            "The data does not contain the microbatch or the split. Bloom's 70 layers as 7 equal "
            "stages and a lighter one are 9 each and 7 with the head; 96 layers are 12 each.",
            "2,048 tokens a microbatch give 228 TFLOPS of the A100's 312 and 87 of the A40's "
            "149.7; half as many would reach the power limit at a third of the peak, and twice as "
            "many would exceed it. The artifact's GPT-3 has 1,024 positions, so 2 sequences; its "
            "attention is not fused.",
            "Traffic in the tensor group is not counted: sent over NVLink, it would leave the "
            "A100 computing at about 90 % of its peak, so it does not seem to be in the data.",
            "GPT-3's head takes almost three times as long as its FLOPs at the rate of the "
            "layers, and follows the clock; its odd vocabulary of 50,257, which aligns no matrix, "
            "may be why. Bloom's head is faster than its layers.",
        ],
    )


def _rows(case: Case) -> Iterator[dict[str, Any]]:
    measured, (name, pipeline) = profile_of(case), _PIPELINES[case.model]
    system = with_link(SYSTEMS[name], math.inf)
    middle = calibration_of(measured, pipeline, system)
    calibrations = {"none": None, "top": _top(middle), "all": middle}
    for wanted, chosen in calibrations.items():
        estimated = estimate(pipeline, system, chosen)
        for kind in "FB":
            errors = {what: _errors(measured, estimated, kind, what) for what in ("time", "energy")}
            row: dict[str, Any] = {
                "profile": case.name,
                "calibrated": _CALIBRATED_ON[wanted],
                "kind": word_of(kind),
            }
            for what, stages in errors.items():
                row[f"mean_{what}"] = fmean(
                    abs(each) for stage in stages.values() for each in stage
                )
                row[f"first_{what}"] = fmean(stages[0])
                row[f"last_{what}"] = fmean(stages[measured.stages - 1])
                row[f"worst_{what}"] = max(abs(each) for stage in stages.values() for each in stage)
            yield row


def _top(calibration: Calibration) -> Calibration:
    """Return a calibration with only the highest clock of each kind."""
    return replace(
        calibration, ratios={kind: rows[:, -1:] for kind, rows in calibration.ratios.items()}
    )


def _errors(measured: Profile, estimated: Profile, kind: str, what: str) -> dict[int, list[float]]:
    """Return the error at each measured clock, percent, by stage, without the stage that
    calibrates.
    """
    gpus = {"time": 1, "energy": estimated.gpus_per_stage}[what]
    name = {"time": "time_s", "energy": "energy_j"}[what]
    errors = {}
    for stage in range(measured.stages):
        if stage != (measured.stages - 1) // 2:
            rows = measured.measurements[stage, kind]
            same = estimated.measurements[stage, kind][::-1]
            # Clocks that the power limit does not allow are no rows: the highest stands for them.
            found = np.interp(
                [row.clock_mhz for row in rows],
                [row.clock_mhz for row in same],
                [getattr(row, name) / gpus for row in same],
            )
            errors[stage] = [
                100 * (value / getattr(row, name) - 1)
                for value, row in zip(found.tolist(), rows, strict=True)
            ]
    return errors
