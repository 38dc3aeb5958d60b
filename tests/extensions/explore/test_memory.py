"""Memory follows from the model, the schedule and the recomputation, and measured configurations
fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from measured_iterations import measured
from modern_iterations import published

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.memory import kept_layer_bytes, memory
from perseus_planner.extensions.explore.operations import SYSTEMS
from perseus_planner.extensions.explore.transformer import PRESETS, split_layers

A100 = SYSTEMS["a100-sxm"]
LAYER = replace(PRESETS["gpt3-175b"], attention="plain")


def test_layers_keep_the_published_bytes():
    # Korthikanti et al. (2022), table 2: s b h (10 + 24/t + 5 a s / h t), 34 s b h / t, and 2 s b
    # h, less 2 s b h of the masks of dropout.
    s, h, a = LAYER.sequence, LAYER.hidden, LAYER.heads
    shared = replace(LAYER, tensor_degree=8)
    assert kept_layer_bytes(LAYER) == s * h * (32 + 5 * a * s / h)
    assert kept_layer_bytes(shared) == s * h * (8 + 24 / 8 + 5 * a * s / (8 * h))
    assert (
        kept_layer_bytes(replace(shared, sequence_parallel=True, recomputation="selective"))
        == 32 * s * h / 8
    )
    assert kept_layer_bytes(replace(shared, recomputation="full")) == 2 * s * h


@pytest.mark.parametrize(
    ("schedule", "virtual", "kept"),
    [("1f1b", 1, 4), ("gpipe", 1, 16), ("zb-h1", 1, 4), ("interleaved-1f1b", 2, 11 / 2)],
)
def test_a_rank_keeps_what_its_schedule_has_in_flight(schedule: str, virtual: int, kept: float):
    shape = replace(PRESETS["gpt3-1.3b"], layers=24)
    job = Configuration(
        shape, split_layers(24, 4 * virtual), 1, 16 if schedule == "gpipe" else 8, schedule, virtual
    )
    found = memory(job, A100)
    logits = 6 * shape.tokens * shape.vocabulary if found.rank == 3 else 0
    assert found.activations == pytest.approx(kept * 6 * kept_layer_bytes(shape) + logits)


def test_a_distributed_optimizer_shares_its_state():
    job = Configuration(PRESETS["gpt3-1.3b"], (24,), 8, 1)
    alone, shared = memory(job, A100), memory(replace(job, sharding=1), A100)
    assert shared.optimizer == alone.optimizer / 8
    assert (shared.parameters, shared.gradients) == (alone.parameters, alone.gradients)
    whole = memory(replace(job, sharding=3), A100)
    assert (whole.parameters, whole.gradients) == (alone.parameters / 8, alone.gradients / 8)
    assert alone.optimizer == pytest.approx(12 * PRESETS["gpt3-1.3b"].parameters, rel=1e-6)


@pytest.mark.parametrize("file", ["gpt_2_to_8_gpus.csv", "gpt_64_to_512_gpus.csv"])
def test_what_was_measured_fits(measured_data: Path, file: str):
    assert all(memory(job, A100).fits for job, _ in measured(file))


def test_published_runs_fit(measured_data: Path):
    for row in published():
        assert any(memory(job, row.system()).fits for job in row.jobs), row.name


def test_narrow_products_keep_their_inputs_once_in_a_byte():
    wide, low = (
        kept_layer_bytes(replace(LAYER, precision=p, attention="flash")) for p in ("bf16", "fp8")
    )
    # the inputs of QKV and of the feed-forward block, and the activation's result; the attention's
    # result is kept in both.
    assert wide - low == LAYER.tokens * (2 * LAYER.hidden + LAYER.ffn - LAYER.hidden)


def test_experts_and_sharing_divide_what_each_gpu_holds():
    shape = replace(
        PRESETS["llama3-8b"], experts=8, experts_used=2, expert_ffn=14336, expert_degree=4
    )
    job = Configuration(shape, (32,), 8, 1, sharding=1)
    held = job.rank_parameters[:, 0]
    assert held[0] == 32 * 8 * 3 * 4096 * 14336 / 4
    assert sum(held) + 3 * held[0] == pytest.approx(shape.parameters, rel=1e-6)
    assert (job.replicas, job.expert_replicas) == (8, 2)
    assert memory(job, A100).optimizer == pytest.approx(12 * (held[0] / 2 + held[1] / 8))
