"""`explore` finds the best configurations, and its frontier moves the right way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from fast_replay import iteration_s
from hypothesis import strategies as st
from strategies import drawn, few_and_many, soaks

from perseus_planner.base.errors import ScheduleError, UsageError
from perseus_planner.extensions.explore.bounds import bound_of
from perseus_planner.extensions.explore.candidates import Choices, candidates
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.curves import CurveMaker
from perseus_planner.extensions.explore.explore import Exploration, explore
from perseus_planner.extensions.explore.forecast import forecast
from perseus_planner.extensions.explore.memory import memory
from perseus_planner.extensions.explore.objective import Objective
from perseus_planner.extensions.explore.operations import SYSTEMS, KernelTimes, layer_times
from perseus_planner.extensions.explore.points import measurements_of
from perseus_planner.extensions.explore.search import worth_measuring
from perseus_planner.extensions.explore.splits import split_choices
from perseus_planner.extensions.explore.transformer import PRESETS, Transformer
from perseus_planner.schedules.layouts import read_layout

A100, H100 = SYSTEMS["a100-sxm"], SYSTEMS["h100-sxm"]
SMALL = replace(PRESETS["gpt3-1.3b"], layers=8)
EIGHT = Choices(8, 32)
MIXTURE = replace(SMALL, experts=8, experts_used=2, expert_ffn=1024, shared_ffn=512, dense_layers=1)


def least_j(found: Exploration, time_s: float) -> float:
    """Return the least energy within a time on the curves of the frontier; infinite if nothing
    is that fast.
    """
    within = [
        np.append(
            curve.energies_j[curve.times_s <= time_s],
            np.interp(time_s, curve.times_s, curve.energies_j),
        )
        for curve in (row.curve for row in found.frontier)
        if curve.times_s[0] <= time_s
    ]
    return min((float(each.min()) for each in within), default=np.inf)


@pytest.fixture(scope="module")
def told() -> list[tuple[int, int]]:
    """What `eight` was told of its progress."""
    return []


@pytest.fixture(scope="module")
def eight(told: list[tuple[int, int]]) -> Exploration:
    return explore(SMALL, A100, EIGHT, progress=lambda *numbers: told.append(numbers))


def test_progress_is_told_before_each_exact_curve(eight: Exploration, told: list[tuple[int, int]]):
    assert told == [(solved, eight.configurations) for solved in range(eight.solved)]


@pytest.mark.parametrize("seed", [0, *soaks(1, 2)])
def test_bounds_are_below_the_exact_curves(seed: int):
    found, maker = candidates(SMALL, H100, EIGHT), CurveMaker(H100, 10)
    for each in random.Random(seed).sample(found, 8):
        exact = maker.exact(each)
        bound = bound_of(each, maker.operating)
        assert bound.least_s <= exact.times_s[0] * (1 + 1e-6)
        assert (bound.at(exact.times_s[1:]) <= exact.energies_j[1:] * 1.002).all()
        assert exact.times_s[0] == pytest.approx(iteration_s(each.job, H100, each.times), rel=2e-3)


@pytest.mark.filterwarnings("error")
def test_breakpoints_that_are_one_time_in_floats_leave_curves_finite():
    found, maker = candidates(PRESETS["gpt3-13b"], A100, Choices(7, 512)), CurveMaker(A100)
    for each in [each for each in found if each.job.ranks == 7][:2]:
        assert np.isfinite(maker.exact(each).energies_j).all()


def test_the_first_is_the_fastest_and_the_others_the_fastest_of_other_tensor_degrees(
    eight: Exploration,
):
    ranked = sorted(
        (iteration_s(each.job, A100, each.times), each.job.shape.tensor_degree)
        for each in candidates(SMALL, A100, EIGHT)
    )
    near = [each for each in ranked if each[0] <= 1.3 * ranked[0][0]]
    worth = [near[place] for place in worth_measuring([degree for _, degree in near], 8)]
    found = [(row.candidate.job.shape.tensor_degree, row.time_s) for row in eight.first]
    assert found[: len(worth)] == [
        (degree, pytest.approx(time_s, rel=1e-3)) for time_s, degree in worth
    ]
    assert eight.gap == 0
    assert eight.solved < eight.configurations / 20


def test_the_rows_that_are_shown_have_all_clocks(eight: Exploration):
    for row in (*eight.first, *eight.frontier):
        exact = CurveMaker(A100).exact(row.candidate)
        assert row.energy_j == pytest.approx(
            np.interp(row.time_s, exact.times_s, exact.energies_j), rel=1e-9
        )


def test_how_nvidia_trains_llama_405b_is_among_the_configurations():
    """The recipe of Megatron-Bridge for 1,024 H100 in FP8 (TP 8, PP 8, CP 2) takes about 38 s."""
    model = replace(PRESETS["llama3-405b"], precision="fp8", overlap_traffic=True)
    # Its layout leaves few of twenty thousand.
    choices = Choices(1024, 1536, ("none",), ("interleaved-1f1b",), layout="Et|(tt|)*62tL")
    jobs = [each.job for each in candidates(model, H100, choices) if each.job.ranks == 8]
    found = [job for job in jobs if job.name.startswith("t8-p8x8(1,62*2,1)-d8-c2-mb1-")]
    assert [iteration_s(job, H100) for job in found] == [pytest.approx(38.0, rel=0.02)]


@pytest.mark.soak  # of eight GPUs, the number is checked below
def test_no_exact_curve_is_computed_that_a_bound_excludes():
    model, gpus = PRESETS["gpt3-6.7b"], Choices(16, 96)
    found = explore(model, H100, gpus)
    assert found.solved <= 10  # bounds that let uneven stages wait for nothing needed 53
    exact = {row.candidate.job: row.time_s for row in found.first}
    ranked = sorted(
        (iteration_s(each.job, H100, each.times), each.job.shape.tensor_degree)
        for each in candidates(model, H100, gpus)
    )
    worth = worth_measuring([degree for _, degree in ranked], 8)
    assert sorted(exact.values()) == pytest.approx([ranked[k][0] for k in worth], rel=1e-3)


def test_many_microbatches_follow_from_few():
    job = next(
        each
        for each in candidates(SMALL, A100, Choices(4, 1024, schedules=("1f1b",)))
        if each.job.ranks == 4
        and each.job.shape.microbatch == 4
        and each.job.shape.recomputation == "none"
    )
    maker = CurveMaker(A100)
    assert job.job.microbatches == 256
    quick, whole = maker.exact(job), maker._solved(job, 256)
    at = np.linspace(whole.times_s[0] * 1.001, 1.3 * whole.times_s[0], 20)
    found, true = (np.interp(at, each.times_s, each.energies_j) for each in (quick, whole))
    assert np.abs(found / true - 1).max() < 1e-3


@few_and_many("counts", (7, 8), (6, 7, 8, 10, 12, 16))
def test_more_gpus_never_make_it_worse(counts: Sequence[int], eight: Exploration):
    explorations = [
        eight if gpus == 8 else explore(SMALL, A100, replace(EIGHT, gpus=gpus)) for gpus in counts
    ]
    for fewer, more in pairwise(explorations):
        for row in [
            row for row in fewer.frontier if row.time_s <= 6 * more.first[0].time_s
        ]:  # no further is explored
            assert least_j(more, row.time_s * 1.001) <= row.energy_j * 1.003
        assert more.first[0].time_s <= fewer.first[0].time_s * (1 + 1e-9)


@drawn(
    1,
    20,
    gpus=st.integers(1, 1024),
    more=st.integers(1, 1024),
    batch=st.integers(1, 96),
    model=st.sampled_from([SMALL, MIXTURE]),
    anew=True,
)
def test_what_fits_on_some_gpus_is_a_choice_on_more(
    gpus: int, more: int, batch: int, model: Transformer
):
    def names(count: int) -> set[str]:
        system = replace(H100, memory_bytes=1e15)
        return {each.job.name for each in candidates(model, system, Choices(count, batch))}

    assert names(min(gpus, more)) <= names(max(gpus, more))


def test_of_the_degree_of_a_node_two_are_worth_measuring():
    assert worth_measuring([4, 4, 8, 8, 8, 2, 1], 8) == [0, 2, 3]
    assert worth_measuring([1, 1, 2, 1, 4, 8], 8) == [0, 2, 4]
    assert worth_measuring([8, 8, 8], 8) == [0, 1]


def test_the_shares_of_energy_are_those_of_the_frontier(eight: Exploration):
    for row in eight.first:
        shares = eight.maker.energy_shares(row.candidate)
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share > -1e-9 for share in shares.values())
        job, rows = row.candidate.job, 0.0
        for stage in eight.maker.profile(
            job, job.stage_phases(A100, row.candidate.times)
        ).measurements.values():
            rows += stage[0].energy_j * eight.maker._solved_counts(job)[0]
        busy = rows / eight.maker._frontiers[job].baseline_energy_j
        assert 1 - shares["waiting"] == pytest.approx(busy, rel=1e-3)


def test_a_long_context_is_divided_and_weights_are_shared_where_nothing_else_fits():
    long = replace(PRESETS["llama3-8b"], sequence=131072)
    found = candidates(long, H100, Choices(16, 16))
    assert any(each.job.shape.context_degree > 1 for each in found)
    one = replace(PRESETS["llama3-8b"], sequence=2048)
    jobs = [each.job for each in candidates(one, H100, Choices(8, 8)) if each.job.ranks == 1]
    assert {job.sharding for job in jobs if job.shape.tensor_degree == 1} == {1, 2, 3}
    two, three = (next(job for job in jobs if job.sharding == z) for z in (2, 3))
    for job, gathered in ((two, False), (three, True)):
        alone = replace(job, sharding=1)
        assert memory(job, H100).total < memory(alone, H100).total
        plain, shared = (each.stage_phases(H100)[0] for each in (alone, job))
        assert shared["B"].exchange_s >= plain["B"].exchange_s
        assert (memory(job, H100).parameters < memory(alone, H100).parameters) == gathered


def test_more_memory_never_makes_it_worse(eight: Exploration):
    tight = explore(SMALL, replace(A100, memory_bytes=16e9), EIGHT)
    assert tight.configurations < eight.configurations
    for row in tight.frontier:
        assert least_j(eight, row.time_s * 1.001) <= row.energy_j * 1.003


@pytest.fixture(scope="module")
def in_time(eight: Exploration) -> Exploration:
    """The best in the time of the fastest."""
    return explore(SMALL, A100, EIGHT, Objective(deadline_s=eight.first[0].time_s))


def test_a_looser_deadline_never_takes_more_energy(eight: Exploration, in_time: Exploration):
    fastest_s = eight.first[0].time_s
    looser = [
        explore(SMALL, A100, EIGHT, Objective(deadline_s=ratio * fastest_s)) for ratio in (1.2, 1.5)
    ]
    # Those that cannot be that fast are left out.
    assert in_time.solved < in_time.configurations / 20
    energies = [each.first[0].energy_j for each in (in_time, *looser)]
    assert energies == sorted(energies, reverse=True)
    assert energies[1] < energies[0]


def test_a_deadline_that_one_configuration_meets_costs_few_exact_curves(in_time: Exploration):
    assert len(in_time.first) == 1
    assert in_time.solved <= 20


def test_a_power_budget_is_kept_and_the_least_energy_is_less_than_any(eight: Exploration):
    budget_w = 0.8 * eight.first[0].power_w
    within = explore(SMALL, A100, EIGHT, Objective(power_w=budget_w)).first[0]
    assert within.power_w <= budget_w * (1 + 1e-6)
    assert within.time_s > eight.first[0].time_s
    least = explore(SMALL, A100, EIGHT, Objective(least_energy=True))
    assert least.first[0].energy_j <= min(row.energy_j for row in eight.frontier) * (1 + 1e-6)


def test_the_balanced_split_is_no_slower_and_takes_layers_from_the_head():
    model = PRESETS["llama3-8b"]
    times = layer_times(model, A100)
    job = Configuration(model, (4,) * 8, 1, 16)
    even, balanced, *_ = [each.split for each in split_choices(job, A100, times)]
    assert even == (4,) * 8
    assert sum(balanced) == 32
    assert balanced[-1] == min(balanced) < 4


def test_a_balanced_split_that_does_not_fit_gives_way_to_one_that_does():
    model = replace(PRESETS["llama3-8b"], recomputation="none")
    times = layer_times(model, A100)
    job = Configuration(model, (8,) * 4, 1, 16)
    balanced = split_choices(job, A100, times)[-1]
    needed = memory(balanced, A100)
    # A device that the first rank, which keeps most microbatches, is too small for.
    small = replace(A100, memory_bytes=0.99 * needed.total)
    fitting = split_choices(job, small, times)[-1]
    assert memory(fitting, small).fits
    assert not memory(balanced, small).fits
    assert fitting.split[0] < balanced.split[0]
    assert sum(fitting.split) == 32


@pytest.mark.parametrize("text", ["Et*3|t*3L|", "Ett|t*7L", "E|t*5|t*3L", "first=2", "less=2+3"])
def test_what_is_proposed_is_never_slower_than_a_given_layout(text: str):
    if text.endswith("|"):
        with pytest.raises(ScheduleError, match="needs one L"):
            explore(SMALL, A100, replace(EIGHT, layout=text))
        return
    if text == "Ett|t*7L":
        with pytest.raises(ScheduleError, match="has 9 decoder layers, but the model has 8"):
            explore(SMALL, A100, replace(EIGHT, layout=text))
        return
    found = explore(SMALL, A100, replace(EIGHT, layout=text))
    compared = [found.balance(row) for row in found.first]
    for row, balance in zip(found.first, compared, strict=True):
        if balance is not None:
            assert balance.is_given
            assert balance.after == row.candidate.job.layout
            given = replace(row.candidate.job, split=balance.before.layers)
            assert balance.before_s == pytest.approx(
                iteration_s(given, A100, row.candidate.times), rel=2e-3
            )
    assert "=" in text or None not in compared
    assert all(balance.time_share >= -1e-9 for balance in compared[:1] if balance is not None)


def test_modules_of_multi_token_prediction_stay_where_they_are():
    model = PRESETS["llama3-8b"]
    times = layer_times(model, H100)
    layout = read_layout("Et*8|t*8|t*8|t*8mL", layers=32)
    job = Configuration(model, (8,) * 4, 8, 8)
    given, *others = split_choices(job, H100, times, layout)
    assert (given.layout, given.predictions) == (layout, (0, 0, 0, 1))
    more, less = (each.rank_parameters.sum(axis=0) for each in (given, job))
    assert more[-1] - less[-1] == pytest.approx(model.layer_parameters)
    phases = given.stage_phases(H100, times)[-1]["F"]
    more_s = (times.layer["F"] + times.head["F"]).time_s(1980)
    assert phases.time_s(1980) - job.stage_phases(H100, times)[-1]["F"].time_s(
        1980
    ) == pytest.approx(more_s)
    assert others
    assert all(each.predictions == (0, 0, 0, 1) and each.split[-1] < 8 for each in others)


def test_a_layout_of_no_pipeline_is_refused():
    with pytest.raises(UsageError, match=r"--layout: no pipeline on 8 GPUs .* has stages for"):
        explore(SMALL, A100, replace(EIGHT, layout="parts=0+1+2+3+4+5+6+7+8+9+10"))


def test_a_layout_of_no_pipeline_is_told_before_kernels_of_none():
    system = replace(A100, kernels={SMALL: KernelTimes(1, 1, 1)})
    with pytest.raises(UsageError, match=r"^--layout: no pipeline on 8 GPUs"):
        explore(SMALL, system, replace(EIGHT, layout="parts=0+1+2+3+4+5+6+7+8+9+10"))


def test_gpus_that_are_enough_if_weights_are_shared_are_named():
    # One head and a layout of one stage, so that nothing else divides the weights.
    undivided = replace(SMALL, heads=1, kv_heads=1, head_size=2048)
    full = replace(undivided, recomputation="full")
    least = memory(Configuration(full, (8,), 2, 1, sharding=3), replace(A100, memory_bytes=8e9))
    system = replace(A100, memory_bytes=1.01 * least.total)
    with pytest.raises(UsageError, match=r"; give --gpus 2$"):
        candidates(undivided, system, Choices(1, 2, layout="Et*8L"))
    assert candidates(undivided, system, Choices(2, 2, layout="Et*8L"))


def test_a_clock_that_the_power_limit_does_not_allow_is_no_operating_point():
    phases = layer_times(replace(SMALL, microbatch=8), H100).layer["F"]
    rows, load = measurements_of(phases, H100), phases.load(H100)
    assert rows[0].clock_mhz < 1980
    assert rows[0].energy_j / rows[0].time_s == pytest.approx(0.985 * 700)
    for row in rows:
        assert (row.time_s, row.energy_j) == pytest.approx(
            (load.time_s(row.clock_mhz), load.energy_j(row.clock_mhz))
        )
    lower = measurements_of(phases, H100.limited(500.0))
    assert lower[0].energy_j / lower[0].time_s == pytest.approx(0.985 * 500)


def test_a_forecast_is_energy_at_the_meter(eight: Exploration):
    row = eight.first[0]
    found = forecast(row, A100, tokens=1e12, pue=1.5, price=0.2, carbon=100)
    assert found["hours"] == pytest.approx(1e12 / row.tokens_per_s / 3600)
    assert found["gpu_kwh"] == pytest.approx(1e12 * row.j_per_token / 3.6e6)
    for place, beside_w in enumerate((A100.node_overhead_w, A100.node_overhead_most_w)):
        wanted = (found["gpu_kwh"] + found["hours"] * beside_w * row.candidate.job.gpus / 8e3) * 1.5
        assert found["meter_kwh"][place] == pytest.approx(wanted)
        assert (found["cost"][place], found["co2e_kg"][place]) == pytest.approx(
            (0.2 * wanted, 0.1 * wanted)
        )


REFUSED = {
    "--gpus: 2 GPUs of 85.9 GB are too few: t2-p1-d1-mb1-1f1b-full needs least, 120 GB on a GPU "
    "(parameters 12.9 GB, gradients 25.7 GB, optimizer 77.1 GB, activations 897 MB, reserve 3.72 "
    "GB); give --gpus 4": lambda: explore(PRESETS["gpt3-13b"], A100, Choices(2, 8)),
    "--precision: a100-sxm has no fp8; give bf16 or fp16": lambda: explore(
        replace(SMALL, precision="fp8"), A100, EIGHT
    ),
    "--precision: h100-sxm has no nvfp4; give bf16 or fp16": lambda: explore(
        replace(SMALL, precision="nvfp4"), H100, EIGHT
    ),
    "--system: its kernels are of no configuration of this model in bf16, with flash-causal "
    "attention and 2048 tokens; measure them by planner calibrate --kernels MODEL --gpu a100-sxm "
    "-o FILE": lambda: explore(SMALL, replace(A100, kernels={SMALL: KernelTimes(1, 1, 1)}), EIGHT),
    "--recompute: flash-causal attention keeps no scores that selective could recompute; give "
    "none or full, or --attention plain": lambda: explore(
        SMALL, A100, replace(EIGHT, recomputations=("selective",))
    ),
    "--power-budget: no configuration draws that little; give": lambda: explore(
        SMALL, A100, Choices(2, 8), Objective(power_w=100.0)
    ),
    "--deadline: no configuration is that fast; give": lambda: explore(
        SMALL, A100, Choices(2, 8), Objective(deadline_s=0.01)
    ),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_cannot_be_explored_is_refused_with_what_would_work(message: str, call):
    with pytest.raises(UsageError) as refusal:
        call()
    assert str(refusal.value).startswith(message)
