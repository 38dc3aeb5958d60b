"""The pools of least energy are those that trying everything finds, and no relaxation costs
energy.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from inference_cases import LONG, SHORT, demands, least_energy_j, profiles
from strategies import drawn

from perseus_planner.base.errors import InfeasibleGpus, UsageError
from perseus_planner.extensions.inference.plan import (
    POLICIES,
    ChangeCosts,
    Pool,
    make_plan,
    plan_pools,
)
from perseus_planner.extensions.inference.workload import (
    Cell,
    Configuration,
    InferenceProfile,
    Load,
    Objectives,
    RequestClass,
)

Demand = dict[RequestClass, Load]
_PERIOD_S = 600.0


def energy_j(profile: InferenceProfile, demand: Demand, gpus: int, **options: object) -> float:
    """Return the energy of a period; infinite if the GPUs are too few."""
    try:
        return plan_pools(profile, demand, gpus, _PERIOD_S, **options).energy_j
    except InfeasibleGpus:
        return math.inf


@drawn(
    2,
    8,
    profile=profiles(),
    demand=demands(),
    gpus=st.integers(2, 3),
    changes=st.booleans(),
    anew=True,
)
def test_no_other_pools_need_less_energy(
    profile: InferenceProfile, demand: Demand, gpus: int, changes: bool
):
    before = (
        [Pool(SHORT, Configuration(1, 1000), 1), Pool(LONG, Configuration(2, 1000), 1)]
        if changes
        else None
    )
    least_j = least_energy_j(profile, demand, gpus, _PERIOD_S, before)
    assert energy_j(profile, demand, gpus, before=before) == pytest.approx(least_j, rel=1e-6)


@drawn(2, 8, profile=profiles(), demand=demands(), gpus=st.integers(3, 6), anew=True)
def test_a_plan_carries_its_load_on_its_gpus_and_is_not_below_its_bound(
    profile: InferenceProfile, demand: Demand, gpus: int
):
    if energy_j(profile, demand, gpus) == math.inf:
        with pytest.raises(InfeasibleGpus) as refused:
            plan_pools(profile, demand, gpus, _PERIOD_S)
        assert gpus < refused.value.least_gpus
        gpus = refused.value.least_gpus
    plan = plan_pools(profile, demand, gpus, _PERIOD_S)
    assert plan.gpus <= gpus
    assert plan.bound_j <= plan.energy_j <= plan.bound_j * (1 + 1e-6)
    for of, load in demand.items():
        assert sum(pool.serves.get(of, 0.0) for pool in plan.pools) == pytest.approx(
            load.tokens_per_s
        )
    for pool in plan.pools:
        most = profile.feasible(pool.longest, pool.at)[-1].tokens_per_s * pool.instances
        assert sum(tokens * demand[of].peak for of, tokens in pool.serves.items()) <= most * (
            1 + 1e-5
        )
        assert all(pool.longest.covers(of) and profile.feasible(of, pool.at) for of in pool.serves)


@drawn(2, 8, profile=profiles(), demand=demands(), gpus=st.integers(3, 6), anew=True)
def test_more_gpus_and_looser_objectives_never_cost_energy(
    profile: InferenceProfile, demand: Demand, gpus: int
):
    here_j = energy_j(profile, demand, gpus)
    assert energy_j(profile, demand, gpus + 1) <= here_j * (1 + 1e-6)
    loose = replace(profile, objectives=Objectives(ttft_s=(5.0,)))
    assert energy_j(loose, demand, gpus) <= here_j * (1 + 1e-6)


@drawn(2, 6, profile=profiles(), demand=demands(), share=st.floats(0.0, 1.0), anew=True)
def test_cheaper_changes_never_cost_energy(profile: InferenceProfile, demand: Demand, share: float):
    before = [Pool(LONG, Configuration(2, 2000), 2)]
    dear, cheap = (ChangeCosts((900.0, 300.0, 0.1), 100.0 * part) for part in (1.0, share))
    dear_j = energy_j(profile, demand, 6, before=before, costs=dear)
    assert energy_j(profile, demand, 6, before=before, costs=cheap) <= dear_j * (1 + 1e-6)


@drawn(2, 6, profile=profiles(), demand=demands(), anew=True)
def test_no_policy_needs_less_than_the_planner(profile: InferenceProfile, demand: Demand):
    """A policy with a class that it cannot serve is left out; every class has two GPUs at the
    highest clock.
    """
    energies_j = {
        name: plan_pools(profile, demand, math.inf, _PERIOD_S, name).energy_j for name in POLICIES
    }
    assert min(energies_j.values()) >= energies_j["planner"] * (1 - 1e-6)
    assert energies_j["highest"] >= max(energies_j["clock"], energies_j["degree"]) * (1 - 1e-6)
    assert energies_j["degree"] >= energies_j["hierarchical"] * (1 - 1e-6)


def profile_of(*cells: tuple[RequestClass, Configuration, float | None]) -> InferenceProfile:
    """Return a profile of cells at 1000 tokens/s whose instances draw 10 W without requests."""
    found = {(of, at): (Cell(1000.0, joules, None, None, 10.0),) for of, at, joules in cells}
    return InferenceProfile(found, "clock", Objectives(), "")


def test_a_class_shares_the_pool_of_a_longer_one_where_that_saves_an_idle_instance():
    at = Configuration(2, 1000)
    profile = profile_of((SHORT, at, 5.0), (LONG, at, 50.0))
    (pool,) = plan_pools(profile, {SHORT: Load(1, 200), LONG: Load(1, 700)}, 8, 60.0).pools
    assert (pool.longest, pool.instances, set(pool.serves)) == (LONG, 1, {SHORT, LONG})


def test_a_class_without_a_configuration_is_refused_by_name():
    at = Configuration(2, 1000)
    expected = (
        "class 4096/100: no configuration meets its latency objective; measure a higher clock or "
        "tensor degree, or loosen the objective"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        plan_pools(profile_of((SHORT, at, 5.0), (LONG, at, None)), {LONG: Load(1, 700)}, 8, 60.0)


def test_too_few_gpus_are_refused_with_the_least_that_would_do():
    profile = profile_of((LONG, Configuration(2, 1000), 50.0))
    expected = (
        "no pools on 5 GPUs carry this load within the latency objectives: 6 GPUs would; "
        "give that many or more"
    )
    with pytest.raises(InfeasibleGpus, match=f"^{re.escape(expected)}$") as refused:
        plan_pools(profile, {LONG: Load(1, 2001)}, 5, 60.0)
    assert (refused.value.gpus, refused.value.least_gpus) == (5, 6)
    assert plan_pools(profile, {LONG: Load(1, 2001)}, 6, 60.0).gpus == 6


def test_pools_stay_where_changing_them_costs_more_than_it_saves():
    slow, fast = Configuration(2, 1000), Configuration(2, 2000)
    profile = profile_of((LONG, slow, 50.0), (LONG, fast, 51.0))
    demand, before = {LONG: Load(1, 700)}, [Pool(LONG, fast, 1)]
    costs = ChangeCosts((423.0, 33.0, 3.0))
    assert [
        pool.at for pool in plan_pools(profile, demand, 8, 599.0, before=before, costs=costs).pools
    ] == [fast]
    plan = plan_pools(profile, demand, 8, 601.0, before=before, costs=costs)
    assert ([pool.at for pool in plan.pools], plan.change_j) == ([slow], 600.0)


CURVE = InferenceProfile(
    {
        (SHORT, Configuration(1, 1000)): tuple(
            Cell(load, power_w * 200 / load, None, None, 100.0)
            for load, power_w in ((500.0, 300.0), (1000.0, 350.0), (2000.0, 400.0))
        )
    },
    "clock",
    Objectives(),
    "",
)


@pytest.mark.parametrize(
    ("tokens_per_s", "power_w"),
    [(250, 200), (500, 300), (750, 325), (1000, 350), (1500, 375), (2000, 400)],
)
def test_an_instance_draws_what_was_measured_at_its_load(tokens_per_s: float, power_w: float):
    """Not what lies between an idle instance and one under the largest load."""
    demand = {SHORT: Load(tokens_per_s / 200, tokens_per_s)}
    plan = plan_pools(CURVE, demand, 1, 60.0)
    assert plan.power_w == pytest.approx(power_w)
    assert plan.energy_j == pytest.approx(plan.bound_j, rel=1e-6)


def test_the_server_that_needs_less_at_this_load_is_chosen():
    other = Configuration(1, 2000)  # 400 W under its largest load, but 300 W here
    rows = (Cell(1000.0, 60.0, None, None, 250.0), Cell(2000.0, 45.0, None, None, 250.0))
    profile = replace(CURVE, cells={**CURVE.cells, (SHORT, other): rows})
    plan = plan_pools(profile, {SHORT: Load(5, 1000)}, 1, 60.0)
    assert ([pool.at for pool in plan.pools], plan.power_w) == ([other], pytest.approx(300.0))


def test_a_class_pays_for_the_tokens_that_it_has():
    """Half the output tokens of a row, whose costs of tokens are known."""
    cell = Cell(2000.0, 200 * 0.1 + 100 * 1.0, None, None, 0.0, 0.1, 1.0, 0.0001, 0.0013)
    of = RequestClass(200.0, 101.0, "200/101")
    profile = InferenceProfile({(of, Configuration(1, 1000)): (cell,)}, "clock", Objectives(), "")
    demand = {of: Load(2.0, 2 * 251.0, 1.0, 2 * 200.0)}
    assert plan_pools(profile, demand, 1, 60.0).power_w == pytest.approx(2 * (20 + 50))


def test_the_least_gpus_are_those_of_all_periods():
    profile = profile_of((LONG, Configuration(2, 1000), 50.0))
    periods = [(0.0, 60.0, {LONG: Load(1, load)}) for load in (2001, 500, 4001)]
    with pytest.raises(InfeasibleGpus) as refused:
        make_plan(profile, periods, 5)
    assert (refused.value.least_gpus, refused.value.is_proved) == (10, True)
    assert make_plan(profile, periods, 10)["policies"]["planner"]["gpus"] == 10
