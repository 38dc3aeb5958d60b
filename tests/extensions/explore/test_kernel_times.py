"""Times of layers and iterations follow from operations, and agree with measured iterations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fast_replay import replay_s
from hypothesis import given, settings
from hypothesis import strategies as st
from iteration_times import calibrated
from measured_iterations import TimeEstimates, measured

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.operations import (
    SYSTEMS,
    Exchange,
    KernelTimes,
    Phases,
    Product,
    kernel_key,
    layer_operations,
    layer_times,
    sum_s,
)
from perseus_planner.extensions.explore.transformer import PRESETS, Transformer
from perseus_planner.plans.replay import end_times
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules.dag import PipelineDag

SMALL, A100 = PRESETS["gpt3-1.3b"], SYSTEMS["a100-sxm"]


def layer_s(shape: Transformer, kind: str = "F") -> float:
    return layer_times(shape, A100).layer[kind].time_s(1410)


def test_fp8_shortens_products_with_weights_and_nothing_else():
    shape, system = replace(SMALL, microbatch=8), SYSTEMS["h100-sxm"]
    plain = layer_times(shape, system).layer["F"]
    low = layer_times(replace(shape, precision="fp8"), system).layer["F"]
    linear = [
        each for each in layer_operations(shape)["F"] if isinstance(each, Product) and each.weights
    ]
    cycles = sum(each.flops for each in linear) / system.product_flops_per_cycle / 1e6
    assert plain.megacycles - low.megacycles == pytest.approx(cycles * (1 - 1 / system.fp8_speedup))
    # Inputs are read once, and written narrow by rows and by columns.
    casts = sum(4 * each.m * each.k for each in linear)
    bytes_per_s = system.memory_share * system.gpu.bytes_per_s / system.passes
    assert low.memory_s - plain.memory_s == pytest.approx(casts / bytes_per_s)
    assert layer_times(replace(shape, precision="fp16"), system).layer["F"] == plain


@pytest.mark.parametrize("kind", ["F", "B"])
def test_more_recomputation_and_plain_attention_take_longer(kind: str):
    times = [
        layer_s(replace(SMALL, microbatch=8, recomputation=what), kind)
        for what in ("none", "selective", "full")
    ]
    assert times == sorted(times)
    assert (times[0] < times[1]) == (kind == "B")
    assert layer_s(replace(SMALL, microbatch=8, attention="plain"), kind) > times[0]


def test_sequence_parallelism_divides_norms_and_gathers_once_more():
    shape = replace(SMALL, tensor_degree=4, microbatch=8)
    shared = replace(shape, sequence_parallel=True)
    plain, divided = layer_times(shape, A100).layer, layer_times(shared, A100).layer
    assert divided["F"].memory_s < plain["F"].memory_s
    assert divided["F"].exchange_s == plain["F"].exchange_s
    one_s = sum_s(shape.tokens * shape.hidden * 2, 4, A100)
    assert divided["B"].exchange_s - plain["B"].exchange_s == pytest.approx(one_s)
    sums = sum(each.sums for each in layer_operations(shape)["I"] if isinstance(each, Exchange))
    assert sums == 2


def test_traffic_hides_behind_products_but_for_its_first_piece():
    shape = replace(SMALL, tensor_degree=4, sequence_parallel=True, microbatch=8)
    plain, hidden = (
        layer_times(replace(shape, overlap_traffic=what), A100).layer["F"] for what in (False, True)
    )
    assert plain.megacycles / A100.top_mhz > plain.exchange_s  # there is enough to hide behind
    assert hidden.exchange_s == pytest.approx(plain.exchange_s / 4)
    assert (hidden.megacycles, hidden.memory_s) == (plain.megacycles, plain.memory_s)


def test_products_whose_rows_are_not_aligned_are_slow_and_padding_pays():
    odd = replace(SMALL, vocabulary=50257, microbatch=8)
    slow, padded = (
        layer_times(each, A100).head["F"] for each in (odd, replace(odd, vocabulary=50304))
    )
    share = 50257 / 50304
    assert padded.megacycles * share / slow.megacycles == pytest.approx(A100.unaligned_share)
    assert Product(513, 1024, 1024).aligned  # the number of rows does not matter
    assert not Product(512, 1024, 1025).aligned


def test_a_group_over_two_nodes_takes_longer_than_in_one():
    inside_s, across_s = (sum_s(1e8, gpus, A100) for gpus in (8, 16))
    assert across_s - inside_s == pytest.approx(A100.network_s / 2 + 1e8 / A100.node_bytes_per_s)
    assert sum_s(1e8, 1, A100) == 0


def test_gradients_are_summed_as_tensors_and_transfers_are_not_divided_in_a_node():
    def job(data: int, tensor: int = 1) -> Configuration:
        return Configuration(replace(SMALL, tensor_degree=tensor), (12, 12), data, 8)

    assert (job(1).reduction_s(A100) == 0).all()
    held = job(2).rank_parameters[:, 0].sum()
    assert job(2).reduction_s(A100)[0] == pytest.approx(sum_s(4 * held, 2, A100))
    assert (
        job(8).reduction_s(A100) < job(64).reduction_s(A100)
    ).all()  # between nodes more send more
    assert (
        job(1, 4).transfer_s(A100)
        == job(1).transfer_s(A100)
        == 2048 * 2048 * 2 / A100.transfer_bytes_per_s
    )
    assert job(8, 4).transfer_s(A100) < job(8).transfer_s(A100)


def test_the_embedding_passes_over_its_tensors_as_often_as_listed():
    found = layer_times(replace(SMALL, positions="rotary"), A100).embedding["F"]
    assert found.memory_s == 2 * 2048 * 2048 * 2 / (A100.memory_share * A100.gpu.bytes_per_s)


def test_a_slow_host_bounds_small_layers():
    tiny = replace(SMALL, hidden=256, heads=4, kv_heads=4, head_size=64, ffn=1024, sequence=128)
    assert layer_s(tiny) == pytest.approx(A100.host_forward_s, rel=0.01)
    assert layer_times(tiny, SYSTEMS["h100-sxm"]).layer["F"].idle_s < 0.1e-3  # fused since
    assert layer_times(replace(SMALL, microbatch=16), A100).layer["F"].idle_s < 0.001


def test_measured_kernels_replace_the_model():
    shape = replace(SMALL, tensor_degree=2)
    system = replace(A100, kernels={kernel_key(shape): KernelTimes(0.01, 0.03, 0.02)})
    found = layer_times(shape, system)
    seconds = {kind: phases.load(system).time_s(1410) for kind, phases in found.layer.items()}
    assert seconds["F"] == pytest.approx(0.01)
    assert seconds["B"] == pytest.approx(0.03)
    ends = (found.head, found.embedding)
    assert sum(part[k].load(system).time_s(1410) for part in ends for k in "FB") == pytest.approx(
        0.02, rel=0.05
    )


@given(
    ranks=st.integers(1, 5),
    more=st.integers(0, 30),
    schedule=st.sampled_from([("1f1b", 1), ("interleaved-1f1b", 2), ("gpipe", 1), ("zb-h1", 1)]),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_the_fast_replay_is_that_of_the_graph(
    ranks: int, more: int, schedule: tuple[str, int], data: st.DataObject
):
    name, virtual = schedule
    stages = ranks * virtual
    microbatches = ranks * (1 + more) if virtual > 1 else ranks + more
    job = Configuration(
        replace(SMALL, layers=stages), (1,) * stages, 2, microbatches, name, virtual
    )
    times = [{kind: data.draw(st.floats(0.01, 0.05)) for kind in "FIW"} for _ in range(stages)]
    for each in times:
        each["B"] = each["I"] + each["W"]
    rows = {
        (stage, kind): (Measurement(1410, each[kind], 1.0),)
        for stage, each in enumerate(times)
        for kind in job.kinds
    }
    both_s = [sum(times[s][k] for s in range(r, stages, ranks) for k in "FB") for r in range(ranks)]
    iteration = job.iteration(A100, job.end_s(A100, np.array(both_s)))
    dag = PipelineDag(Profile(rows, blocking_power_w=80.0), iteration)
    exact_s = max(end_times(dag, [dag.points[key][0].time_s for key in iteration.keys]))
    assert replay_s(job, A100, times) == pytest.approx(exact_s, rel=2e-3)


def test_phases_add_up():
    assert Phases(1, 2, 3, 4, 0) + Phases(1, 1, 1, 1, 1) * 2 == Phases(3, 4, 5, 6, 2)
    assert Phases(1000, 0.1, 0.2, 0.3).time_s(1000) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("file", "layers", "limit"),
    [
        ("gpt_2_to_8_gpus.csv", None, 0.08),
        ("gpt_64_to_512_gpus.csv", 30, 0.08),
        ("gpt_64_to_512_gpus.csv", 48, 0.08),
    ],
)
def test_uncalibrated_iteration_times_are_near_the_measured_ones(
    measured_data: Path, file: str, layers: int | None, limit: float
):
    rows = [row for row in measured(file) if layers in (None, row[0].shape.layers)]
    times = TimeEstimates(A100)
    assert fmean(abs(times(job) / seconds - 1) for job, seconds in rows) <= limit


def test_a_layer_and_a_head_measured_on_the_fewest_gpus_give_all_other_configurations(
    measured_data: Path,
):
    rows = measured("gpt_2_to_8_gpus.csv")
    system, used = calibrated(rows)
    times = TimeEstimates(system)
    errors = [abs(times(row.job) / row.time_s - 1) for row in rows if id(row) not in used]
    assert fmean(errors) <= 0.006
    assert max(errors) <= 0.05
