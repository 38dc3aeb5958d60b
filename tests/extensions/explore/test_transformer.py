"""The closed form of a transformer's FLOPs and bytes agrees with what torch counts on real
modules.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawn, soaks

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.operations import (
    SYSTEMS,
    Phases,
    System,
    Total,
    layer_times,
    stage_totals,
)
from perseus_planner.extensions.explore.transformer import (
    CHOICES,
    PRESETS,
    Transformer,
    check_split,
    shared_by,
    split_layers,
)
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.profiler.simulated_pipeline import _small_gpt

A100 = SYSTEMS["a100-sxm"]
SMALL = Transformer(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_size=8,
    ffn=48,
    vocabulary=101,
    sequence=16,
    microbatch=2,
)


@st.composite
def transformers(
    draw: st.DrawFn, attentions: tuple[str, ...] = CHOICES["attention"]
) -> Transformer:
    degree = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, degree) * draw(st.sampled_from([1, 2, 3]))
    return Transformer(
        layers=draw(st.integers(1, 3)),
        hidden=8 * draw(st.integers(1, 6)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=8 * draw(st.integers(1, 3)),
        ffn=4 * draw(st.integers(1, 30)),
        vocabulary=draw(st.integers(2, 300)),
        sequence=draw(st.integers(1, 24)),
        microbatch=draw(st.integers(1, 3)),
        gated=draw(st.booleans()),
        biases=draw(st.booleans()),
        tied=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        positions=draw(st.sampled_from(CHOICES["positions"])),
        tensor_degree=degree,
        recomputation=draw(st.sampled_from(CHOICES["recomputation"])),
        attention=draw(st.sampled_from(attentions)),
    )


@st.composite
def splits(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True))


def flops(shape: Transformer, split: tuple[int, ...]) -> list[dict[str, float]]:
    return [
        {kind: work.flops for kind, work in stage.items()} for stage in stage_totals(shape, split)
    ]


@drawn(4, 15, data=st.data(), anew=True)
def test_torch_counts_the_same_flops_on_real_modules(data: st.DataObject):
    modules = pytest.importorskip(
        "transformer_modules", reason="torch is not installed", exc_type=ImportError
    )
    shape = data.draw(
        transformers(attentions=("plain", "flash"))
    )  # torch counts masked pairs as well
    split = data.draw(splits(shape.layers))
    assert modules.counted_flops(shape, split) == flops(shape, split)


@pytest.mark.parametrize("recomputation", CHOICES["recomputation"])
@pytest.mark.parametrize("attention", ["plain", "flash"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("degree", [2, *soaks(1)])
def test_torch_counts_the_same_flops_for_every_choice(
    recomputation: str, attention: str, gated: bool, degree: int
):
    modules = pytest.importorskip(
        "transformer_modules", reason="torch is not installed", exc_type=ImportError
    )
    shape = replace(
        SMALL, recomputation=recomputation, attention=attention, gated=gated, tensor_degree=degree
    )
    assert modules.counted_flops(shape, (1, 2, 1)) == flops(shape, (1, 2, 1))


@given(shape=transformers(), data=st.data())
def test_a_backward_is_both_its_gradients_and_a_split_keeps_the_sum(
    shape: Transformer, data: st.DataObject
):
    works = stage_totals(shape, data.draw(splits(shape.layers)))
    (whole,) = stage_totals(shape, (shape.layers,))
    for kind in "FBIW":
        assert sum(stage[kind].flops for stage in works) == whole[kind].flops
        assert sum(stage[kind].bytes for stage in works) == whole[kind].bytes
    for stage in works:
        assert stage["B"] == Total(*map(sum, zip(stage["I"], stage["W"], strict=True)))


@given(shape=transformers())
def test_twice_the_microbatch_is_twice_the_work(shape: Transformer):
    twice = replace(shape, microbatch=2 * shape.microbatch)
    (once,), (double,) = (stage_totals(each, (shape.layers,)) for each in (shape, twice))
    assert {kind: Total(*(2 * v for v in work)) for kind, work in once.items()} == double


@given(shape=transformers(attentions=("flash",)))
def test_a_causal_mask_hides_all_pairs_but_those_up_to_the_diagonal(shape: Transformer):
    (full,), (causal,) = (
        stage_totals(shape, (shape.layers,)),
        stage_totals(replace(shape, attention="flash-causal"), (shape.layers,)),
    )
    one = 2 * shape.microbatch * shape.heads_per_gpu * shape.head_size * shape.layers
    hidden = shape.sequence * (shape.sequence - 1) // 2
    assert full["F"].flops - causal["F"].flops == 2 * one * hidden
    again = 0 if shape.recomputation == "none" else 2
    assert full["B"].flops - causal["B"].flops == (5 + again) * one * hidden


@given(shape=transformers())
def test_the_gpus_of_a_tensor_group_do_the_matrix_products_of_one(shape: Transformer):
    kv_heads = max(
        shape.kv_heads, shape.tensor_degree
    )  # where there are fewer, each GPU has a copy of one
    vocabulary = shape.vocabulary_per_gpu * shape.tensor_degree
    heads = shape.heads if shape.heads % kv_heads == 0 else kv_heads
    shape = replace(shape, kv_heads=kv_heads, heads=heads, vocabulary=vocabulary)
    alone = replace(shape, tensor_degree=1)
    for shard, all_of_it in zip(
        flops(shape, (shape.layers,)), flops(alone, (shape.layers,)), strict=True
    ):
        assert {kind: shape.tensor_degree * each for kind, each in shard.items()} == all_of_it


def test_the_flops_of_an_iteration_are_those_of_the_published_formula():
    # Narayanan et al. (SC'21), appendix: 96 B s l h^2 (1 + s / 6h + V / 16lh), with all activations
    # recomputed, plain attention, four times as wide a feed-forward block, and the head's products
    # not recomputed.
    shape = replace(PRESETS["gpt3-175b"], recomputation="full", attention="plain", microbatch=3)
    s, h, layers, tokens = shape.sequence, shape.hidden, shape.layers, shape.tokens
    published = (
        96 * tokens * layers * h**2 * (1 + s / (6 * h) + shape.vocabulary / (16 * layers * h))
    )
    (whole,) = stage_totals(shape, (shape.layers,))
    assert whole["F"].flops + whole["B"].flops == pytest.approx(published, rel=1e-12)


PUBLISHED = {
    "gpt3-1.3b": (1.3e9, 0.02),  # Brown et al. (2020), table 2.1, rounded to two digits
    "gpt3-2.7b": (2.7e9, 0.02),
    "gpt3-6.7b": (6.7e9, 0.01),
    "gpt3-13b": (13.0e9, 0.02),
    "gpt3-175b": (174.6e9, 1e-4),  # table D.1
    "llama3-8b": (8_030_261_248, 0),  # the released checkpoints
    "llama3-70b": (70_553_706_496, 0),
    "llama3-405b": (405_853_388_800, 0),
    "bloom-176b": (176_247_271_424, 0),
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items(), ids=PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str, published: tuple[float, float]):
    parameters, tolerance = published
    assert PRESETS[name].parameters == pytest.approx(parameters, rel=tolerance, abs=0)
    assert set(PRESETS) == set(PUBLISHED)


def test_bytes_are_those_of_the_operations_that_were_listed():
    shape = Transformer(
        1, 8, 2, 2, 4, ffn=16, vocabulary=10, sequence=4, microbatch=1, attention="plain"
    )
    (works,) = stage_totals(shape, (1,))
    tokens, scores, logits = 4, 2 * 4 * 4, 4 * 10
    norms_sums, activation = 2 * 2 * 8 + 2 * 3 * 8, 2 * 16
    forward = 2 * (tokens * (norms_sums + activation) + 4 * scores)
    embedding, norm, loss = 2 * tokens * 5 * 8, 2 * tokens * 2 * 8, logits * (2 + 4 + 4 + 4)
    assert works["F"].bytes == forward + embedding + norm + loss
    norms_sums, activation = 2 * 3 * 8 + 2 * 3 * 8, 3 * 16
    backward = 2 * (tokens * (norms_sums + activation) + 7 * scores)
    loss = logits * (4 + 8 + 4 + 4 + 2)
    assert works["I"].bytes == backward + 2 * tokens * 3 * 8 + loss
    assert works["W"].bytes == 2 * tokens * 6 * 8


def test_a_group_of_one_has_no_traffic_and_others_sum_two_activations_a_layer():
    def sent(shape: Transformer) -> list[dict[str, float]]:
        totals = stage_totals(shape, (1, 3))
        return [{kind: each.sent_bytes for kind, each in stage.items()} for stage in totals]

    assert sent(SMALL) == [{"F": 0, "B": 0, "I": 0, "W": 0}] * 2
    shared = replace(SMALL, tensor_degree=4)
    activation = shared.tokens * shared.hidden * shared.element_bytes
    first, last = sent(shared)
    assert (first["F"], first["B"]) == (1.5 * activation * 3, 1.5 * activation * 2)
    assert (last["F"], last["B"]) == (1.5 * activation * 6, 1.5 * activation * 7)
    assert sent(replace(shared, recomputation="full"))[0]["B"] == 1.5 * activation * 4


@given(layers=st.integers(1, 300), data=st.data())
def test_layers_are_shared_evenly_and_the_first_stages_have_the_rest(
    layers: int, data: st.DataObject
):
    split = split_layers(layers, data.draw(st.integers(1, layers)))
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


REFUSED = {
    "hidden: 0 is not a whole number of at least 1": {"hidden": 0},
    "hidden: 2.5 is not a whole number of at least 1": {"hidden": 2.5},
    "layers: True is not a whole number of at least 1": {"layers": True},
    "gated: 1 is neither true nor false; give one of them": {"gated": 1},
    "positions: 'none' is unknown; give learned or rotary or alibi": {"positions": "none"},
    "recomputation: 'half' is unknown; give none or selective or full": {"recomputation": "half"},
    "tensor_degree: 3 GPUs cannot share heads of 4; choose a degree that divides it": {
        "tensor_degree": 3
    },
    "tensor_degree: 4 GPUs cannot share ffn of 50; choose a degree that divides it": {
        "tensor_degree": 4,
        "ffn": 50,
    },
    "kv_heads: 3 does not divide heads of 4; choose one that does": {"kv_heads": 3},
    "tensor_degree: 4 GPUs cannot share kv_heads of 6; choose a degree that divides it, or a "
    "multiple of it": {
        "tensor_degree": 4,
        "heads": 12,
        "kv_heads": 6,
    },
    "context_degree: 4 GPUs cannot share sequences of 4 tokens, two parts each; choose a degree "
    "that divides it and is at most half of it": {"sequence": 4, "context_degree": 4},
    "context_degree: 3 GPUs cannot share sequences of 32 tokens, two parts each; choose a degree "
    "that divides it and is at most half of it": {"sequence": 32, "context_degree": 3},
}


@pytest.mark.parametrize(("message", "change"), REFUSED.items(), ids=REFUSED)
def test_what_is_no_transformer_is_refused(message: str, change: dict):
    with pytest.raises(UsageError) as refusal:
        replace(SMALL, **change)
    assert str(refusal.value) == message


NO_SPLITS = {
    "stages is 0; give a whole number from 1 to the 4 layers of the model": 0,
    "stages is 5; give a whole number from 1 to the 4 layers of the model": 5,
    "stages is True; give a whole number from 1 to the 4 layers of the model": True,
    "layers: -1 is not a number of layers; give a whole number from 0": (5, -1),
    "layers: the stages have 5 in total, but the model has 4; change the stages so that the sums "
    "agree": (
        2,
        3,
    ),
}


@pytest.mark.parametrize(("message", "stages"), NO_SPLITS.items(), ids=NO_SPLITS)
def test_what_is_no_split_is_refused(message: str, stages: object):
    with pytest.raises(UsageError) as refusal:
        check_split(SMALL, stages)
    assert str(refusal.value) == message


def test_every_word_has_its_choices():
    words = {field.name for field in fields(Transformer) if field.type == "str"}
    assert words == set(CHOICES)


@pytest.mark.parametrize("stages", [1, 3])
def test_the_simulated_pipeline_costs_what_its_model_does(stages: int):
    model, split = pipeline_model(stages), (8,) * stages
    phases = layer_times(model, A100).stages(split)
    for cost, total, times in zip(
        _small_gpt(stages), stage_totals(model, split), phases, strict=True
    ):
        for kind, each in cost.items():
            moved = times[kind].memory_s * A100.memory_share * A100.gpu.bytes_per_s
            assert each.flops == total[kind].flops
            assert each.bytes == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_simulated_gpu_takes_what_its_estimate_does(name: str):
    system = SYSTEMS[name]
    stages = layer_times(pipeline_model(3), system).stages((8, 8, 8))
    for costs, phases in zip(_small_gpt(3), stages, strict=True):
        for kind, cost in costs.items():
            # In the estimate fused attention of 2,048 tokens is slow and draws little, and launches
            # take time.
            assert_near(system, cost, phases[kind], 0.09)


@pytest.mark.parametrize("name", ["a100-sxm", "a40", "h100-sxm", "b200"])
def test_a_torch_stage_on_a_simulated_gpu_takes_about_what_its_estimate_does(name: str):
    modules = pytest.importorskip(
        "transformer_modules", reason="torch is not installed", exc_type=ImportError
    )
    shape, system = replace(pipeline_model(3), layers=3, attention="flash"), SYSTEMS[name]
    stages = layer_times(shape, system).stages((1, 1, 1))
    for cost, phases in zip(modules.counted_costs(shape, (1, 1, 1)), stages, strict=True):
        # The factors of products are counted too, and elementwise operations as torch runs them.
        assert_near(system, cost.forward, phases["F"], 0.15)
        assert_near(system, cost.backward, phases["B"], 0.15)


def pipeline_model(stages: int) -> Transformer:
    """Return the model whose stages are simulated."""
    model = shared_by(PRESETS["gpt3-2.7b"], 1)  # its vocabulary padded
    return replace(model, layers=8 * stages, microbatch=4)


def assert_near(system: System, cost: OpCost, phases: Phases, share: float) -> None:
    """Check times and energies from half the top clock on."""
    simulated, estimated = system.gpu.load(cost), phases.load(system)
    for clock_mhz in (0.5 * system.top_mhz, 0.75 * system.top_mhz, system.top_mhz):
        assert simulated.time_s(clock_mhz) == pytest.approx(estimated.time_s(clock_mhz), rel=share)
        energy_j = estimated.energy_j(clock_mhz)
        assert simulated.energy_j(clock_mhz) == pytest.approx(energy_j, rel=share)
