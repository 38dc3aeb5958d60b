"""Number 27: pools for inference on the published table of energies and a public trace."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from data import FULL, MissingError, Size, folder
from results import Check, Section, Table

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.inference.plan import BASELINE, POLICIES, make_plan, plan_pools
from perseus_planner.extensions.inference.simulation import Settings, replay
from perseus_planner.extensions.inference.views import plan_view
from perseus_planner.extensions.inference.workload import (
    Configuration,
    InferenceProfile,
    Load,
    Trace,
    periods_of,
    read_inference_profile,
    read_trace,
)

_GPUS = (64, 128)
_PUBLISHED = (48, 41, 40, 41, 28, 36, 49, 16, 10)
_ROWS = {
    "class": ("class", ""),
    "best": ("best tensor degree, MHz", ""),
    "saved": ("saved against 8 GPUs at 2000 MHz, %", ".1f"),
    "published": ("by the table, %", ""),
}
_REPLAYS = {
    "gpus": ("GPUs", ""),
    "prediction": ("prediction", ""),
    "policy": ("chosen how", ""),
    "planned": ("planned once, saved %", ".1f"),
    "saved": ("replayed, saved %", ".1f"),
    "mean": ("GPUs in use", ".0f"),
}
_TIMES = {
    "load": ("load, tokens/s", ".0f"),
    "gpus": ("GPUs", ""),
    "ms": ("CPU time of a plan, ms", ".0f"),
    "gap": ("above its bound, %", ".1e"),
}


def measure(size: Size) -> Section:
    """Return the savings of each row of the table and of the trace, and the time of plans."""
    profile, trace = _data()
    rows, refused = _rows(profile)
    replays = _replays(profile, trace, size)
    times = _times(profile, trace, size)
    checks = [
        Check(
            "the best cell of each row saves what the table says",
            all(r["published"] == round(r["saved"]) for r in rows),
        ),
        Check(f"all {refused[1]} cells without an energy are refused", refused[0] == refused[1]),
        Check("every plan is within 1e-6 of its bound", all(row["gap"] <= 1e-4 for row in times)),
    ]
    return Section(
        number=27,
        title="Pools for inference",
        how="*Replayed* from the published energies of Llama2-70B on H100 (DynamoLLM, table I, one "
        "load) and Azure's "
        "trace of a coding service of 2023. Planned once: one period, no changes. Replayed: "
        "every 30 minutes. The table has no times, so whether a request is late is not known.",
        tables=[Table(_ROWS, rows), Table(_REPLAYS, replays), Table(_TIMES, times)],
        checks=checks,
        notes=[
            "The paper's own 53 % is not reproduced: how energy depends on load, and the week's "
            "trace, are not public."
        ],
    )


def _data() -> tuple[InferenceProfile, Trace]:
    serving = folder().parent / "serving"
    files = [serving / name for name in ("energy_llama2_70b.csv", "azure_llm_trace_2023_code.csv")]
    for path in files:
        if not Path(path).exists():
            raise MissingError(f"no serving data: {path} does not exist")
    return read_inference_profile(files[0]), read_trace(files[1])


def _rows(profile: InferenceProfile) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    rows, refused, empty = [], 0, 0
    for of, published in zip(profile.classes, _PUBLISHED, strict=True):
        demand = {of: Load(1.0, 500.0)}
        plan = plan_pools(profile, demand, 8, 60.0)
        baseline_j = profile.feasible(of, Configuration(8, 2000))[0].energy_j or 0.0
        at = plan.pools[0].at
        rows.append(
            {
                "class": of.name,
                "best": f"{at.tensor_degree}, {at.setting}",
                "saved": 100 * (1 - plan.power_w / baseline_j),
                "published": published,
            }
        )
        for each in profile.configurations:
            if not profile.feasible(of, each):
                empty += 1
                try:
                    alone = profile.only(lambda _, at, each=each: at == each)
                    plan_pools(alone, demand, 8, 60.0)
                except UsageError:
                    refused += 1
    return rows, (refused, empty)


def _replays(profile: InferenceProfile, trace: Trace, size: Size) -> list[dict[str, Any]]:
    rows = []
    full = size == FULL
    for gpus in _GPUS if full else _GPUS[1:]:
        plan = plan_view(make_plan(profile, periods_of(trace, profile, 7200.0), gpus))
        saved = {each["policy"]: each["saved_share"] for each in plan["policies"]}
        for prediction in ("last", "perfect") if full else ("last",):
            baseline_j = 0.0
            for name, policy in POLICIES.items():
                if full or name in (BASELINE, "planner"):
                    found = replay(profile, trace, Settings(gpus, prediction=prediction), name)
                    baseline_j = baseline_j or found["energy_j"]
                    planned = saved[name]
                    rows.append(
                        {
                            "gpus": gpus,
                            "prediction": prediction,
                            "policy": policy,
                            "planned": None if planned is None else 100 * planned,
                            "saved": 100 * (1 - found["energy_j"] / baseline_j),
                            "mean": found["gpus"],
                        }
                    )
    return rows


def _times(profile: InferenceProfile, trace: Trace, size: Size) -> list[dict[str, Any]]:
    ((_, _, demand),) = periods_of(trace, profile, 7200.0)
    rows = []
    for times in (1, 10, 100, 1000) if size == FULL else (1,):
        for gpus in (50 * times, 64 * times, 128 * times):
            asked = {of: load.scaled(times) for of, load in demand.items()}
            begin_s = time.process_time()
            plan = plan_pools(profile, asked, gpus, 1800.0)
            rows.append(
                {
                    "load": sum(load.tokens_per_s for load in asked.values()),
                    "gpus": gpus,
                    "ms": 1e3 * (time.process_time() - begin_s),
                    "gap": 100 * max(0.0, plan.energy_j / plan.bound_j - 1),
                }
            )
    return rows
