"""Profiles, frontiers, plans and runs as pandas frames; the names of columns carry the units.

`frame.attrs` says where the numbers come from and what their baseline is. pandas is imported when a
frame is made.
"""

from __future__ import annotations

from dataclasses import fields
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError, how_to_install
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.csv_file import setting_of, word_of
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.context import ALL_MAXIMUM, origin_text

if TYPE_CHECKING:
    import pandas as pd

_EVIDENCE = ("achieved_mhz", "time_stderr_s", "energy_stderr_j", "windows", "temperature_c")
_WHOLE = "Int64"  #: pandas' type of whole numbers that may be missing


@singledispatch
def frame_of(value: object) -> pd.DataFrame:
    """Return a frame of `value`. Values that are not known are missing.

    - Profile: a row for each measurement, computation by computation, highest clock first: stage,
      instruction, clock_mhz (or power_limit_w or observed_clock_mhz), time_s, energy_j, then the
      fields of `Evidence`.
    - Frontier: a row for each of `times_s`, fastest first: time_s, time_ratio, bound_j, saved_j,
      and power_w of the bound. Ratio and saving are against the baseline that `attrs` names.
    - Plan: a row for each computation, rank by rank in program order, then for each operation of
      fixed time: computation, rank, stage, kind, microbatch, clock_mhz (as above), start_s, end_s,
      power_w, energy_j. The numbers are replayed, and waiting is not included.
    - Run: a row for each iteration of each rank, with the fields of `IterationRecord`.

    Raises:
        UsageError: If pandas is not installed.
    """
    raise TypeError(f"{value!r} has no frame")


@frame_of.register(Profile)
def _profile_frame(profile: Profile) -> pd.DataFrame:
    setting = setting_of(profile.control)
    rows = [
        {
            "stage": stage,
            "instruction": word_of(kind),
            setting: row.clock_mhz,
            "time_s": row.time_s,
            "energy_j": row.energy_j,
            **{name: getattr(row.evidence, name, None) for name in _EVIDENCE},
            "throttle": None if row.evidence is None else " ".join(row.evidence.throttle),
        }
        for (stage, kind), measured in profile.measurements.items()
        for row in measured
    ]
    columns = ["stage", "instruction", setting, "time_s", "energy_j", *_EVIDENCE, "throttle"]
    frame = _frame(
        rows,
        columns,
        windows=_WHOLE,
        achieved_mhz=float,
        time_stderr_s=float,
        energy_stderr_j=float,
    )
    frame["temperature_c"] = frame["temperature_c"].astype(float)
    frame.attrs = {"origin": profile.origin, "gpu": profile.gpu}
    return frame


@frame_of.register(Frontier)
def _frontier_frame(frontier: Frontier) -> pd.DataFrame:
    times_s, bounds_j = frontier.times_s[::-1], frontier.energies_j[::-1]
    columns = {
        "time_s": times_s,
        "time_ratio": times_s / frontier.baseline_time_s,
        "bound_j": bounds_j,
        "saved_j": frontier.baseline_energy_j - bounds_j,
        "power_w": bounds_j / times_s,
    }
    frame = _pandas().DataFrame(columns)
    frame.attrs = {
        "origin": origin_text(frontier.profile.origin),
        **_baseline(frontier.baseline_time_s, frontier.baseline_energy_j),
    }
    return frame


@frame_of.register(Plan)
def _plan_frame(plan: Plan) -> pd.DataFrame:
    iteration, setting = plan.iteration, setting_of(plan.control)
    rows: list[dict[str, Any]] = []
    for place, (name, span) in enumerate(replay(plan).spans.items()):
        one = iteration.computations[place] if place < len(iteration.computations) else None
        rows.append(
            {
                "computation": name,
                "rank": iteration.rank_of[place],
                "stage": None if one is None else one.stage,
                "kind": None if one is None else iteration.keys[place][1],
                "microbatch": None if one is None else one.microbatch,
                setting: plan.clocks.get(name),
                "start_s": span.start_s,
                "end_s": span.end_s,
                "power_w": span.power_w,
                "energy_j": span.power_w * (span.end_s - span.start_s),
            }
        )
    whole = dict.fromkeys(("stage", "microbatch", setting), _WHOLE)
    frame = _frame(rows, list(rows[0]), **whole)
    frame.attrs = {
        "origin": origin_text(plan.origin),
        "time_s": plan.time_s,
        "energy_j": plan.energy_j,
        **_baseline(plan.baseline_time_s, plan.baseline_energy_j),
    }
    return frame


@frame_of.register(Run)
def _run_frame(run: Run) -> pd.DataFrame:
    from perseus_planner.gpu.protocol import THROTTLE_REASONS
    from perseus_planner.runs.records import IterationRecord

    names = [each.name for each in fields(IterationRecord) if each.name != "throttled_s"]
    rows = [
        {
            "rank": rank.rank,
            **{name: getattr(row, name) for name in names},
            **{f"throttled_s_{reason}": row.throttled_s.get(reason) for reason in THROTTLE_REASONS},
        }
        for rank in run.ranks
        for row in rank.iterations
    ]
    first = [
        "rank",
        "iteration",
        "version",
        "pipeline",
        "pipeline_rank",
        "begin_s",
        "end_s",
        "busy_s",
    ]
    frame = _frame(rows, [*first, *(name for name in rows[0] if name not in first)], version=_WHOLE)
    texts = ("deviation", "origin")
    unknown = [name for name in frame.columns if frame[name].dtype == object and name not in texts]
    return frame.astype(dict.fromkeys(unknown, float))


def _frame(rows: list[dict[str, Any]], columns: list[str], **types: Any) -> pd.DataFrame:
    return _pandas().DataFrame(rows, columns=columns).astype(types)


def _baseline(time_s: float, energy_j: float) -> dict[str, Any]:
    return {"baseline": ALL_MAXIMUM, "baseline_time_s": time_s, "baseline_energy_j": energy_j}


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        remedy = how_to_install("frames")
        raise UsageError(f"to_frame() needs pandas, which is not installed; {remedy}") from error
    return pd
