"""Estimated profiles follow the model of the GPU, corrected by a measured stage."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perseus_planner import Profile
from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.calibration import Calibration, calibration_of, estimate
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.operations import SYSTEMS, System, stage_totals, with_link
from perseus_planner.extensions.explore.transformer import PRESETS, split_layers
from perseus_planner.gpu.simulated.model import Load
from perseus_planner.profiles.measurement import Measurement

SMALL, A100 = PRESETS["gpt3-1.3b"], SYSTEMS["a100-sxm"]
factors = st.floats(0.2, 5.0)


def pipeline(stages: int = 4, **changes: object) -> Configuration:
    return Configuration(replace(SMALL, **changes), split_layers(SMALL.layers, stages), 1, 1)


def load_of(job: Configuration, system: System, stage: int, kind: str) -> Load:
    return job.stage_phases(system)[stage][kind].load(system)


def off_by(profile: Profile, time: float, energy: float, step: int = 1) -> Profile:
    """Return the profile of a GPU that takes more time and energy by these factors, at every
    `step`th clock.
    """
    table = {
        key: tuple(
            Measurement(row.clock_mhz, row.time_s * time, row.energy_j * energy)
            for row in rows[::step]
        )
        for key, rows in profile.measurements.items()
    }
    return replace(profile, measurements=table)


def same(profile: Profile, other: Profile) -> bool:
    # A clock under a power limit is found within 1e-9 of itself, from whichever clock was set.
    return all(
        math.isclose(row.time_s, like.time_s, rel_tol=1e-8)
        and math.isclose(row.energy_j, like.energy_j, rel_tol=1e-8)
        for key, rows in profile.measurements.items()
        for row, like in zip(rows, other.measurements[key], strict=True)
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_a_calibration_it_is_the_model_of_the_gpu(name: str):
    system, job = SYSTEMS[name], pipeline()
    profile = estimate(job, system, kinds="FBIW")
    assert (profile.origin, profile.stages, profile.blocking_power_w) == (
        "simulated",
        4,
        system.gpu.blocking_power_w,
    )
    for (stage, kind), rows in profile.measurements.items():
        load = load_of(job, system, stage, kind)
        # The lowest clock above what the power limit allows stands for all of those.
        assert [row.clock_mhz for row in rows] == list(system.gpu.clocks_mhz[-len(rows) :])
        for row in rows:
            assert (row.time_s, row.energy_j) == pytest.approx(
                (load.time_s(row.clock_mhz), load.energy_j(row.clock_mhz))
            )


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    time=factors,
    energy=factors,
    step=st.integers(1, 40),
    degree=st.sampled_from([1, 4]),
)
def test_the_middle_stage_calibrates_all_others_where_the_model_is_off_alike(
    name: str, time: float, energy: float, step: int, degree: int
):
    assume(energy <= time)  # within the model's power limit
    system, job = SYSTEMS[name], pipeline(tensor_degree=degree)
    truth = off_by(estimate(job, system, kinds="FBIW"), time, energy)
    calibration = calibration_of(off_by(truth, 1, 1, step), job, system)
    found = estimate(job, system, calibration, kinds="FBIW")
    rows = {key: rows[-len(truth.measurements[key]) :] for key, rows in found.measurements.items()}
    assert same(replace(found, measurements=rows), truth)


def test_the_stage_that_calibrates_is_met_at_each_clock_that_was_measured():
    job, rng = pipeline(), np.random.default_rng(1)
    model = estimate(job, A100)
    rows = {
        key: tuple(
            Measurement(row.clock_mhz, *rng.uniform(1e-3, 10, 2).tolist())
            for row in rows[:: int(rng.integers(1, 9))]
        )
        for key, rows in model.measurements.items()
    }
    estimated = estimate(job, A100, calibration_of(replace(model, measurements=rows), job, A100))
    for kind in "FB":
        found = {row.clock_mhz: row for row in estimated.measurements[1, kind]}
        for row in rows[1, kind]:
            assert found[row.clock_mhz].time_s == pytest.approx(row.time_s)
            assert found[row.clock_mhz].energy_j == pytest.approx(row.energy_j)


def test_a_stage_that_draws_more_than_the_limit_of_the_model_makes_no_clock_free():
    job = pipeline()
    limited = replace(A100, gpu=replace(A100.gpu, power_limit_w=300.0))
    free = replace(A100, gpu=replace(A100.gpu, power_limit_w=math.inf))
    truth = estimate(job, free)
    top = {key: rows[:1] for key, rows in truth.measurements.items()}
    calibration = calibration_of(replace(truth, measurements=top), job, limited)
    found = estimate(job, limited, calibration)
    for key in ((1, "F"), (1, "B")):
        rows = found.measurements[key]
        for row, true in zip(rows, truth.measurements[key], strict=True):
            assert row.time_s == pytest.approx(true.time_s)
            assert row.energy_j == pytest.approx(true.energy_j)
        assert all(row.time_s < below.time_s for row, below in pairwise(rows))


def test_what_waiting_draws_is_the_measured_power_of_the_gpus_of_a_stage():
    system, job = SYSTEMS["a40"], pipeline(tensor_degree=4)
    measured = replace(estimate(job, system), blocking_power_w=(40.0, 44.0, 48.0, 52.0))
    found = estimate(job, system, calibration_of(measured, job, system))
    assert found.blocking_power_w == pytest.approx(44.0)
    assert estimate(job, system).blocking_power_w == pytest.approx(4 * system.gpu.blocking_power_w)


@pytest.mark.parametrize("name", ["tensor_degree", "context_degree"])
def test_a_group_of_n_takes_the_energy_of_n_gpus(name: str):
    job = pipeline(**{name: 4})
    profile = estimate(job, A100)
    assert profile.gpus_per_stage == 4
    load = load_of(job, A100, 1, "F")
    row = profile.measurements[1, "F"][-1]
    assert row.energy_j == pytest.approx(4 * load.energy_j(row.clock_mhz))
    assert row.time_s == pytest.approx(load.time_s(row.clock_mhz))


@pytest.mark.parametrize("measured_stages", [1, 2, 8])
def test_modules_of_prediction_are_in_the_last_stage_that_was_measured(measured_stages: int):
    job = replace(pipeline(), predictions=(0, 0, 0, 1))
    theirs = replace(pipeline(measured_stages), predictions=(*[0] * (measured_stages - 1), 1))
    calibration = calibration_of(estimate(theirs, A100), job, A100)
    # The model of its own rows: no factor is needed.
    for _, times, energies in calibration.ratios.values():
        assert times == pytest.approx(1.0)
        assert energies == pytest.approx(1.0)


def test_traffic_takes_its_bytes_over_the_bandwidth_of_the_link():
    job = pipeline(tensor_degree=4, microbatch=8)
    sent = stage_totals(job.shape, job.split)
    slow, fast = (job.stage_phases(with_link(A100, rate)) for rate in (150e9, 300e9))
    for stage in range(4):
        longer_s = slow[stage]["F"].exchange_s - fast[stage]["F"].exchange_s
        assert longer_s == pytest.approx(sent[stage]["F"].sent_bytes * (1 / 150e9 - 1 / 300e9))
    assert job.stage_phases(with_link(A100, math.inf))[1]["F"].exchange_s == 0


def test_a_lower_power_limit_moves_the_highest_clocks_and_leaves_the_lowest():
    system, job = SYSTEMS["h100-sxm"], pipeline(microbatch=4)
    free, limited = estimate(job, system), estimate(job, system.limited(400.0))
    assert limited.measurements[1, "F"][0].time_s > 1.05 * free.measurements[1, "F"][0].time_s
    assert limited.measurements[1, "F"][-1] == free.measurements[1, "F"][-1]
    powers_w = [row.energy_j / row.time_s for row in limited.measurements[1, "F"]]
    assert max(powers_w) == pytest.approx(0.985 * 400.0)


def test_the_conditions_say_that_nothing_was_measured_and_from_what_it_was_made():
    job = pipeline(tensor_degree=2)
    calibration = calibration_of(estimate(job, A100), job, A100, "old.yaml")
    assert dict(estimate(job, A100, calibration).conditions) == {
        "estimate": "t2-p4-d1-mb1-1f1b-none, operations in closed form on a model of the system; "
        "nothing was measured on these stages",
        "workload": "1 x 2048 tokens a microbatch, layers 6,6,6,6, flash-causal attention, bf16",
        "layout": "Et*6|(t*6|)*2t*6L",
        "calibration": "stage 1 of old.yaml (simulated)",
    }


MEASURED = {
    "gpt3-175b+a100_sxm_bf16.csv": (
        "gpt3-175b",
        "a100-sxm",
        (12,) * 8,
        {"microbatch": 2, "sequence": 1024},
    ),
    "bloom+a40_bf16.csv": ("bloom-176b", "a40", (9, 9, 9, 9, 9, 9, 9, 7), {}),
}


@pytest.mark.parametrize("file", MEASURED)
def test_one_measured_stage_foretells_the_others(measured_data: Path, file: str):
    name, gpu_name, split, changes = MEASURED[file]
    shape = replace(PRESETS[name], tensor_degree=8, attention="plain", **changes)
    system, job = with_link(SYSTEMS[gpu_name], math.inf), Configuration(shape, split, 1, 1)
    measured = Profile.load(measured_data / "perseus_sosp24" / "stage_profile" / file, 80.0)
    estimated = estimate(job, system, calibration_of(measured, job, system))
    for (stage, kind), rows in measured.measurements.items():
        found = {row.clock_mhz: row for row in estimated.measurements[stage, kind]}
        for row in rows:
            near = 0.1 if stage == 7 else 0.01  # the head, of which the middle stage tells nothing
            assert found[row.clock_mhz].time_s == pytest.approx(row.time_s, rel=near)
            assert found[row.clock_mhz].energy_j / 8 == pytest.approx(row.energy_j, rel=near)


ONE = Measurement(1410, 1.0, 1.0)


def measured(table: dict | None = None, **changes: object) -> Calibration:
    profile = estimate(pipeline(), A100)
    rows = {**profile.measurements, **(table or {})}
    kept = {key: value for key, value in rows.items() if value}
    return calibration_of(
        replace(profile, measurements=kept, **changes), pipeline(), A100, "that.yaml"
    )


REFUSED = {
    "that.yaml: a backward of stage 1 is missing, or its energy; measure it at one clock or more": (
        lambda: measured({(1, "B"): (replace(ONE, energy_j=0.0),)})
    ),
    "that.yaml: was measured over power limits; give a profile over clocks": lambda: measured(
        control="power-limit"
    ),
    "that.yaml: its stages have 8 GPUs, but those of the model 1; give the tensor degree that was "
    "measured": (lambda: measured(gpus_per_stage=8)),
    "link: 0.0 is not a bandwidth; give one above 0": lambda: with_link(A100, 0.0),
    "layers: the stages have 23 in total, but the model has 24; change the stages so that the sums "
    "agree": (lambda: replace(pipeline(), split=(12, 11))),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED)
def test_what_calibrates_nothing_is_refused(message: str, call):
    with pytest.raises(UsageError) as refusal:
        call()
    assert str(refusal.value) == message
