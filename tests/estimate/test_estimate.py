"""Estimated profiles follow the model of the GPU, corrected by measured stages."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_planner import Profile
from perseus_planner.base.errors import UsageError
from perseus_planner.estimate.estimate import (
    StageCalibration,
    TransformerPipeline,
    estimate,
    stage_calibration,
)
from perseus_planner.estimate.operations import stage_traffic
from perseus_planner.estimate.system import SYSTEMS
from perseus_planner.estimate.transformer import PRESETS, split_layers
from perseus_planner.profiles.measurement import Measurement

SMALL = PRESETS["gpt3-1.3b"]
factors = st.floats(0.2, 5.0)


def workload(stages: int = 4, **changes: object) -> TransformerPipeline:
    return TransformerPipeline(
        "gpt3-1.3b", replace(SMALL, **changes), split_layers(SMALL.layers, stages)
    )


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


def same(profile: Profile, other: Profile, rel: float = 1e-9) -> bool:
    return all(
        math.isclose(row.time_s, like.time_s, rel_tol=rel)
        and math.isclose(row.energy_j, like.energy_j, rel_tol=rel)
        for key, rows in profile.measurements.items()
        for row, like in zip(rows, other.measurements[key], strict=True)
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_a_calibration_it_is_the_model_of_the_gpu(name: str):
    gpu, work = SYSTEMS[name], workload()
    profile = estimate(work, gpu, split_backward=True)
    assert (profile.origin, profile.stages, profile.blocking_power_w) == (
        "simulated",
        4,
        gpu.gpu.blocking_power_w,
    )
    for (stage, kind), rows in profile.measurements.items():
        load = work.loads(gpu)[stage][kind]
        assert rows == tuple(
            Measurement(clock, load.time_s(clock), load.energy_j(clock))
            for clock in gpu.gpu.clocks_mhz
        )


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    stage=st.integers(0, 3),
    time=factors,
    energy=factors,
    step=st.integers(1, 40),
    degree=st.sampled_from([1, 4]),
)
def test_any_stage_calibrates_all_others_where_the_model_is_off_alike(
    name: str, stage: int, time: float, energy: float, step: int, degree: int
):
    gpu, work = SYSTEMS[name], workload(tensor_degree=degree)
    truth = off_by(estimate(work, gpu, split_backward=True), time, energy)
    calibration = stage_calibration(off_by(truth, 1, 1, step), work, gpu, stage)
    assert same(estimate(work, gpu, [calibration], split_backward=True), truth)


@settings(max_examples=20)
@given(data=st.data())
def test_the_stage_that_calibrates_is_met_at_each_clock_that_was_measured(data: st.DataObject):
    gpu, work = SYSTEMS["a100-sxm"], workload()
    stage, clocks = (
        data.draw(st.integers(0, 3)),
        data.draw(st.sets(st.sampled_from(gpu.gpu.clocks_mhz), min_size=1)),
    )
    size = st.floats(1e-3, 10.0)
    rows = {
        kind: tuple(
            Measurement(clock, data.draw(size), data.draw(size)) for clock in sorted(clocks)
        )
        for kind in "FB"
    }
    calibration = StageCalibration(work.loads(gpu)[stage], rows, SMALL.sequence, "drawn")
    estimated = estimate(work, gpu, [calibration])
    for kind, wanted in rows.items():
        found = {row.clock_mhz: row for row in estimated.measurements[stage, kind]}
        for row in wanted:
            assert found[row.clock_mhz].time_s == pytest.approx(row.time_s)
            assert found[row.clock_mhz].energy_j == pytest.approx(row.energy_j)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([512, 1024, 4096, 8192]), min_size=2, max_size=2, unique=True),
    data=st.data(),
)
def test_two_sequence_lengths_give_a_power_of_the_length(lengths: list[int], data: st.DataObject):
    gpu, off = SYSTEMS["h100-sxm"], [(data.draw(factors), data.draw(factors)) for _ in lengths]
    calibrations = [
        stage_calibration(
            off_by(estimate(workload(sequence=length), gpu), *by), workload(sequence=length), gpu
        )
        for length, by in zip(lengths, off, strict=True)
    ]
    exponents = [
        math.log(off[1][each] / off[0][each]) / math.log(lengths[1] / lengths[0]) for each in (0, 1)
    ]
    for length in (*lengths, 2048, 16384):
        wanted = [off[0][each] * (length / lengths[0]) ** exponents[each] for each in (0, 1)]
        work = workload(sequence=length)
        assert same(estimate(work, gpu, calibrations), off_by(estimate(work, gpu), *wanted))


def test_forward_and_backward_are_calibrated_apart():
    gpu, work = SYSTEMS["a100-sxm"], workload()
    plain = estimate(work, gpu)
    table = {
        key: rows if key[1] == "F" else off_by(plain, 2, 3).measurements[key]
        for key, rows in plain.measurements.items()
    }
    assert same(
        estimate(work, gpu, [stage_calibration(replace(plain, measurements=table), work, gpu)]),
        replace(plain, measurements=table),
    )


def test_a_backward_measured_in_two_parts_calibrates_the_whole_one():
    gpu, work = SYSTEMS["a100-sxm"], workload()
    rows = {
        "F": (Measurement(1005, 1.0, 2.0),),
        "I": (Measurement(1005, 3.0, 4.0),),
        "W": (Measurement(1005, 5.0, 6.0),),
    }
    found = estimate(
        work, gpu, [StageCalibration(work.loads(gpu)[1], rows, 2048, "parts")], split_backward=True
    )
    at = {
        kind: next(row for row in found.measurements[1, kind] if row.clock_mhz == 1005)
        for kind in "FBIW"
    }
    assert {kind: (row.time_s, row.energy_j) for kind, row in at.items()} == {
        "F": (pytest.approx(1.0), pytest.approx(2.0)),
        "B": (pytest.approx(8.0), pytest.approx(10.0)),
        "I": (pytest.approx(3.0), pytest.approx(4.0)),
        "W": (pytest.approx(5.0), pytest.approx(6.0)),
    }


def test_a_single_measured_stage_stands_for_the_middle_one_of_a_pipeline():
    gpu, work = SYSTEMS["a100-sxm"], workload(8)
    truth = off_by(estimate(work, gpu), 1.3, 0.7)
    alone = replace(truth, measurements={(0, kind): truth.measurements[3, kind] for kind in "FB"})
    assert same(estimate(work, gpu, [stage_calibration(alone, work, gpu)]), truth)


def test_another_number_of_stages_calibrates_by_its_own_layers():
    gpu, before, after = SYSTEMS["a100-sxm"], workload(3), workload(8)
    measured = off_by(estimate(before, gpu), 1.3, 0.7)
    assert same(
        estimate(after, gpu, [stage_calibration(measured, before, gpu)]),
        off_by(estimate(after, gpu), 1.3, 0.7),
    )
    assert stage_calibration(measured, after, gpu).loads == before.loads(gpu)[1]


def test_what_waiting_draws_is_the_measured_power_of_the_gpus_of_a_stage():
    gpu, work = SYSTEMS["a40"], workload(tensor_degree=4)
    measured = replace(estimate(work, gpu), blocking_power_w=(40.0, 44.0, 48.0, 52.0))
    assert estimate(
        work, gpu, [stage_calibration(measured, work, gpu)]
    ).blocking_power_w == pytest.approx(44.0)
    assert estimate(work, gpu).blocking_power_w == pytest.approx(4 * gpu.gpu.blocking_power_w)


def test_a_tensor_group_of_n_takes_the_energy_of_n_gpus():
    gpu, work = SYSTEMS["a100-sxm"], workload(tensor_degree=4)
    profile = estimate(work, gpu)
    assert profile.gpus_per_stage == 4
    load = work.loads(gpu)[1]["F"]
    assert profile.measurements[1, "F"][0].energy_j == pytest.approx(4 * load.energy_j(1410))
    assert profile.measurements[1, "F"][0].time_s == pytest.approx(load.time_s(1410))


def test_traffic_takes_its_bytes_over_the_bandwidth_of_the_link():
    gpu, work = SYSTEMS["a100-sxm"], workload(tensor_degree=4, microbatch=8)
    slower = replace(work, link_bytes_per_s=150e9)
    traffic = stage_traffic(work.transformer, work.split)
    plain, with_it = work.loads(gpu), slower.loads(gpu)
    for stage in range(4):
        longer_s = with_it[stage]["F"].memory_s - plain[stage]["F"].memory_s
        assert longer_s == pytest.approx(traffic[stage]["F"] * (1 / 150e9 - 1 / 300e9), rel=1e-3)


def test_a_lower_power_limit_moves_the_highest_clocks_and_leaves_the_lowest():
    system, work = SYSTEMS["h100-sxm"], workload(microbatch=4)
    free, limited = estimate(work, system), estimate(work, system.limited(400.0))
    assert limited.measurements[1, "F"][0].time_s > 1.05 * free.measurements[1, "F"][0].time_s
    assert limited.measurements[1, "F"][-1] == free.measurements[1, "F"][-1]
    powers_w = [row.energy_j / row.time_s for row in limited.measurements[1, "F"]]
    assert max(powers_w) == pytest.approx(0.985 * 400.0)


def test_the_conditions_say_that_nothing_was_measured_and_from_what_it_was_made():
    gpu, work = SYSTEMS["a100-sxm"], workload(tensor_degree=2)
    assert dict(
        estimate(
            work, gpu, [stage_calibration(estimate(work, gpu), work, gpu, 2, "old.yaml")]
        ).conditions
    ) == {
        "estimate": "operations in closed form, on a model of the system; nothing was measured on "
        "these stages",
        "workload": "gpt3-1.3b, 1 x 2048 tokens a microbatch, layers 6,6,6,6, tensor degree 2, "
        "flash-causal attention, "
        "recomputation none",
        "tensor_traffic": "at 300 GB/s",
        "calibration": "stage 2 of old.yaml (simulated) at 2048 tokens",
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
    gpu, work = SYSTEMS[gpu_name], TransformerPipeline(name, shape, split, math.inf)
    measured = Profile.load(measured_data / "perseus_sosp24" / "stage_profile" / file, 80.0)
    estimated = estimate(work, gpu, [stage_calibration(measured, work, gpu)])
    for (stage, kind), rows in measured.measurements.items():
        found = {row.clock_mhz: row for row in estimated.measurements[stage, kind]}
        for row in rows:
            near = 0.1 if stage == 7 else 0.01  # the head, of which the middle stage tells nothing
            assert found[row.clock_mhz].time_s == pytest.approx(row.time_s, rel=near)
            assert found[row.clock_mhz].energy_j / 8 == pytest.approx(row.energy_j, rel=near)


GPU = SYSTEMS["a100-sxm"]
ONE = Measurement(1410, 1.0, 1.0)


def calibration(**rows: tuple[Measurement, ...]) -> StageCalibration:
    return StageCalibration(workload().loads(GPU)[1], rows, 2048, "that file")


def measured(**changes: object) -> StageCalibration:
    stage = changes.pop("stage", None)
    return stage_calibration(
        replace(estimate(workload(), GPU), **changes), workload(), GPU, stage, "that.yaml"
    )


REFUSED = {
    "that file: the forward is missing; measure it at one clock or more": lambda: calibration(
        B=(ONE,)
    ),
    "that file: the backward is missing; measure it at one clock or more": lambda: calibration(
        F=(ONE,), I=(ONE,)
    ),
    "that file: the energy of a forward is 0 J; measure it again": lambda: calibration(
        F=(replace(ONE, energy_j=0.0),), B=(ONE,)
    ),
    "that.yaml: there is no stage 4; give one from 0 to 3": lambda: measured(stage=4),
    "that.yaml: there is no stage -1; give one from 0 to 3": lambda: measured(stage=-1),
    "that.yaml: was measured over power limits; give a profile over clocks": lambda: measured(
        control="power-limit"
    ),
    "that.yaml: its stages have 8 GPUs, but those of the model 1; give the tensor degree that was "
    "measured": (lambda: measured(gpus_per_stage=8)),
    "both measured stages have the same sequence length; give only one": lambda: estimate(
        workload(), GPU, [measured(), measured(stage=2)]
    ),
    "3 measured stages are too many; give one, or two with different sequence lengths": lambda: (
        estimate(workload(), GPU, [measured()] * 3)
    ),
    "link: 0.0 is not a bandwidth; give one above 0": lambda: replace(
        workload(), link_bytes_per_s=0.0
    ),
    "layers: the stages have 23 in total, but the model has 24; change the stages so that the sums "
    "agree": (lambda: replace(workload(), split=(12, 11))),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED)
def test_what_calibrates_nothing_is_refused(message: str, call):
    with pytest.raises(UsageError) as refusal:
        call()
    assert str(refusal.value) == message
