"""Table I of DynamoLLM and the Azure trace of a coding service are read as they are; savings
come out as published.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.extensions.inference.plan import largest_share, make_plan, plan_pools
from perseus_planner.extensions.inference.views import plan_view
from perseus_planner.extensions.inference.workload import (
    Configuration,
    InferenceProfile,
    Load,
    RequestClass,
    periods_of,
    read_inference_profile,
    read_trace,
)

BEST = {
    "short/short": (2, 1200, 48),
    "short/medium": (2, 1200, 41),
    "short/long": (4, 1200, 40),
    "medium/short": (2, 1600, 41),
    "medium/medium": (4, 1600, 28),
    "medium/long": (4, 2000, 36),
    "long/short": (4, 1200, 49),
    "long/medium": (8, 1200, 16),
    "long/long": (8, 1600, 10),
}
"""Class -> tensor degree and clock of its best cell, and its saving against eight GPUs at 2.0
GHz, percent.
"""


@pytest.fixture
def folder(measured_data: Path) -> Path:
    found = measured_data / "serving"
    if not found.is_dir():
        pytest.skip(f"no serving data: {found} is not there; name its folder in PLANNER_DATA")
    return found


@pytest.fixture
def table(folder: Path) -> InferenceProfile:
    return read_inference_profile(folder / "energy_llama2_70b.csv")


def one_request_per_s(of: RequestClass) -> dict[RequestClass, Load]:
    return {of: Load(1.0, 500.0)}


def test_each_class_gets_the_best_cell_of_its_row(table: InferenceProfile):
    assert [of.name for of in table.classes] == list(BEST)
    for of in table.classes:
        plan = plan_pools(table, one_request_per_s(of), 8, 60.0)
        baseline_j = table.feasible(of, Configuration(8, 2000))[0].energy_j
        (pool,) = plan.pools
        assert (*pool.at, round(100 * (1 - plan.power_w / baseline_j))) == BEST[of.name]


def test_every_cell_that_violates_the_objective_is_refused(table: InferenceProfile):
    refused = 0
    for of in table.classes:
        for at in table.configurations:
            if not table.feasible(of, at):
                refused += 1
                alone = table.only(lambda _, each, at=at: each == at)
                with pytest.raises(
                    UsageError, match="no configuration meets its latency objective"
                ):
                    plan_pools(alone, one_request_per_s(of), 8, 60.0)
    assert refused == 42


def test_the_trace_at_the_load_of_the_table_saves_as_much_as_the_published_mix(
    table: InferenceProfile, folder: Path
):
    trace = read_trace(folder / "azure_llm_trace_2023_code.csv")
    assert len(trace.times_s) == 8819
    plan = plan_view(make_plan(table, periods_of(trace, table, 7200.0), 128))
    saved = {each["policy"]: each["saved_share"] for each in plan["policies"]}
    assert saved["planner"] == plan["saved_share"] == pytest.approx(0.438, abs=0.0005)
    assert saved["clock"] == pytest.approx(0.162, abs=0.0005)
    assert plan["gap"] <= 1e-6


def test_too_few_gpus_for_the_trace_are_refused_with_the_least(
    table: InferenceProfile, folder: Path
):
    periods = periods_of(read_trace(folder / "azure_llm_trace_2023_code.csv"), table, 7200.0)
    with pytest.raises(InfeasibleGpus) as refused:
        make_plan(table, periods, 16)
    assert (
        make_plan(table, periods, refused.value.least_gpus)["policies"]["planner"]["gpus"]
        == refused.value.least_gpus
    )


def test_the_solver_prints_nothing(
    table: InferenceProfile, folder: Path, capfd: pytest.CaptureFixture[str]
):
    """HiGHS 1.12 prints a line of its own here, which would stand before the JSON of a command."""
    (_, _, demand), _ = periods_of(
        read_trace(folder / "azure_llm_trace_2023_code.csv"), table, 1800.0
    )
    assert 0 < largest_share(table, demand, 24) < largest_share(table, demand, 48) < 1
    assert capfd.readouterr() == ("", "")
