"""Layouts are read as the engines read them, and the balanced one is optimal."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from strategies import fixed

from perseus_planner.base.errors import ScheduleError
from perseus_planner.schedules.layouts import (
    Layout,
    balance,
    read_layout,
    rebalance,
    unroll,
)

CELLS = st.lists(st.text("t", max_size=6), min_size=1, max_size=8)
TEXTS = st.one_of(
    st.text("Etm L|,*()0123", max_size=24),
    st.lists(
        st.sampled_from(
            ["E", "t", "tt", "m", "L", "|", "||", ",", "t*3", "|*2", "(t|)*4", "(tt|m)*2", "*", "("]
        ),
        max_size=8,
    ).map("".join),
)


def megatron() -> Any:
    """Megatron-core's own layouts, where it is installed."""
    return pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")


def laid_out(cells: list[str], last_m: int = 0) -> Layout:
    cells = [f"E{cells[0]}", *cells[1:]]
    cells[-1] += "m" * last_m + "L"
    return Layout(tuple(cells))


@fixed
@given(text=TEXTS)
def test_strings_are_unrolled_as_megatron_unrolls_them(text: str):
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    parse = megatron().PipelineParallelLayerLayout.parse_str_to_list
    try:
        theirs = tuple("".join(letters[each.name] for each in stage) for stage in parse(text))
    except AssertionError:
        theirs = None
    try:
        ours = unroll(text)
    except ScheduleError:
        ours = None
    assert ours == theirs


@fixed
@given(
    stages=st.lists(st.text("EttmL", max_size=4), min_size=1, max_size=6),
    ranks=st.integers(1, 3),
    layers=st.integers(0, 8),
)
def test_what_megatron_refuses_is_refused(stages: list[str], ranks: int, layers: int):
    """We refuse more: an E or L outside the first or last stage, where Megatron builds it."""
    text = "|".join(stages)
    module = megatron().PipelineParallelLayerLayout
    predictions = text.count("m")
    try:
        module(text, ranks).validate_layer_layout(layers, predictions)
        theirs = True
    except (AssertionError, IndexError):  # the latter of a layout without any layer
        theirs = False
    elsewhere = "E" not in stages[0] or "L" not in stages[-1]
    try:
        Layout(unroll(text)).check(layers=layers, ranks=ranks)
        ours = True
    except ScheduleError:
        ours = False
    assert ours == (theirs and not elsewhere)


@fixed
@given(cells=CELLS, predictions=st.integers(0, 3))
def test_a_layout_reads_back_from_its_text_by_us_and_by_megatron(
    cells: list[str], predictions: int
):
    layout = laid_out(cells, predictions)
    assert unroll(str(layout)) == layout.stages
    assert Layout(unroll("|".join(layout.stages))) == layout
    assert len(megatron().PipelineParallelLayerLayout.parse_str_to_list(str(layout))) == len(cells)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("Et*3|(t*4|)*2t*3L", "Ettt|tttt|tttt|tttL"),
        ("E|t|t|L", "E|t|t|L"),
        ("Et||t|tmmL", "Et||t|tmmL"),
        ("Et*10|(t*12|)*30ttm|L", "|".join(["E" + 10 * "t", *30 * [12 * "t"], "ttm", "L"])),
    ],
)
def test_the_text_is_short(text: str, given: str):
    assert str(read_layout(given)) == text


@fixed
@given(
    layers=st.integers(1, 24),
    ranks=st.integers(1, 5),
    virtual=st.integers(1, 3),
    first=st.one_of(st.none(), st.integers(1, 8)),
    last=st.one_of(st.none(), st.integers(1, 8)),
    account=st.sampled_from(["", "embedding", "loss", "embedding+loss"]),
)
def test_numbers_of_layers_are_those_that_megatron_builds(
    layers: int, ranks: int, virtual: int, first: int | None, last: int | None, account: str
):
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    if first is None and last is None and not account:
        account = "loss"
    elif first is not None or last is not None:
        account = ""
    if ranks == 1 or (first is not None and last is not None and ranks < 2):
        return  # Megatron has no pipeline then
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split="embedding" in account,
        account_for_loss_in_pipeline_split="loss" in account,
    )
    try:
        theirs = tuple(
            block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
            for chunk in range(virtual)
            for rank in range(ranks)
        )
    except AssertionError:
        theirs = ()
    ends = [f"{name}={n}" for name, n in (("first", first), ("last", last)) if n is not None]
    text = f"account={account}" if account else ",".join(ends)
    try:
        ours = read_layout(
            text, layers=layers, stages=ranks * virtual, virtual_stages=virtual
        ).layers
    except ScheduleError:
        ours = ()
    # It does not check the sum of two ranks with numbers of their own, nor for less than none.
    if sum(theirs) != layers or min(theirs) < 0:
        theirs = ()
    assert ours == theirs


@pytest.mark.parametrize(
    ("text", "layers", "stages", "counts"),
    [
        # As generate_llm_fqn_per_model_part of torchtitan 0.3.0 answered.
        ("less=1+1", 30, 4, (7, 8, 8, 7)),
        ("less=1+1", 32, 4, (8, 9, 8, 7)),
        ("less=2+3", 32, 8, (3, 5, 5, 5, 5, 4, 4, 1)),
        ("less=0+0", 6, 4, (2, 2, 1, 1)),
        ("less=1", 5, 3, (2, 2, 1)),
        ("less=1+1", 5, 1, (5,)),
    ],
)
def test_torchtitan_takes_layers_from_first_and_last(
    text: str, layers: int, stages: int, counts: tuple[int, ...]
):
    assert read_layout(text, layers=layers, stages=stages).layers == counts


@fixed
@given(layers=st.integers(1, 12), stages=st.integers(1, 4), head=st.integers(1, 9), data=st.data())
def test_deepspeeds_parts_are_boundaries_of_its_list(
    layers: int, stages: int, head: int, data: st.DataObject
):
    utils = pytest.importorskip("deepspeed.runtime.utils")
    uniform = data.draw(st.booleans())
    count = layers + 2
    weights = [1, *[4] * layers, head]
    parts = (
        utils.partition_uniform(count, stages)
        if uniform
        else utils.partition_balanced(weights, stages)
    )
    kinds = ["E", *["t"] * layers, "L"]
    text = "parts=" + "+".join(map(str, parts))
    found = read_layout(text, stages=stages)
    assert found.layers == tuple(kinds[a:b].count("t") for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("Ett|tx|tL", {}, "layout 'Ett|tx|tL': 'x' is not a layer; write E (embedding), t (decoder "
         "layer), m (multi-token prediction), L (loss with the head), | between stages, and x*3 or "
         "(...)*3 for repeats"),
        ("Et*99999999|tL", {}, "layout 'Et*99999999|tL': is longer than any model is deep; correct "
         "a product"),
        ("tt|tL", {}, "layout 'tt|tL': needs one E (embedding), in the first stage, where engines "
         "build it; put it there"),
        ("Ett|tL|", {}, "layout 'Ett|tL|': needs one L (loss with the head), in the last stage, "
         "where engines build it; put it there"),
        ("Etm|tL", {}, "layout 'Etm|tL': has a t after m; put m after all decoder layers"),
        ("Et|tm|mL", {}, "layout 'Et|tm|mL': has m in several stages; put all of them in one"),
        ("Et|tL", {"layers": 3}, "layout 'Et|tL': has 2 decoder layers, but the model has 3; "
         "correct one"),
        ("Et|tL", {"stages": 3}, "layout 'Et|tL': has 2 stages, but the pipeline has 3; correct "
         "one"),
        ("Et|t|tL", {"virtual_stages": 2}, "layout 'Et|t|tL': has 3 stages, which ranks of "
         "2 virtual stages do not share evenly; correct one"),
        ("Et|tm||L", {"virtual_stages": 2}, "layout 'Et|tm||L': has m in stage 1, which is not the "
         "last virtual stage of its rank; put m in one of the last 2 stages"),
        ("first=3", {"layers": 8, "stages": 3}, "layout 'first=3': leaves 5 layers for 2 other "
         "ranks, which they do not share evenly; change a number"),
        ("first=4,last=6", {"layers": 6, "stages": 1}, "layout 'first=4,last=6': first and last "
         "are the same rank, and differ; give one of them"),
        ("first=4,last=6", {"layers": 6, "stages": 2, "virtual_stages": 2}, "layout "
         "'first=4,last=6': first and last are the same rank, and differ; give one of them"),
        ("account=head", {"layers": 8, "stages": 3}, "layout 'account=head': account: 'head' is "
         "unknown; write embedding, loss or embedding+loss"),
        ("less=9+1", {"layers": 8, "stages": 3}, "layout 'less=9+1': 3 stages have 6 layers each, "
         "and 9 are taken from one; use fewer stages or take less"),
        ("less=1+1", {}, "layout 'less=1+1': follows from the number of layers, which is not known "
         "here; write Megatron's string, with a t for each layer"),
        ("parts=0+5+3", {}, "layout 'parts=0+5+3': parts: are not rising from 0; copy "
         "PipelineModule.parts"),
        ("depth=3", {}, "layout 'depth=3': is unknown; write Megatron's layout, such as "
         "'Et*3|(t*4|)*2t*3L'; or first=7,last=5; account=loss; less=1+1; or parts=0+9+17+26"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_what_to_do(text: str, options: dict[str, int], error: str):
    assert refusal(ScheduleError, read_layout, text, **options) == error


def largest_s(
    split: tuple[int, ...], ranks: list[int], layer_s: float, beside_s: list[float]
) -> float:
    return max(
        sum(b + n * layer_s for n, b, r in zip(split, beside_s, ranks, strict=True) if r == rank)
        for rank in set(ranks)
    )


@fixed
@given(
    layers=st.integers(3, 14),
    ranks=st.integers(1, 4),
    virtual=st.integers(1, 3),
    first=st.integers(0, 30),
    last=st.integers(0, 60),
    data=st.data(),
)
def test_the_balanced_layout_is_that_of_an_integer_programme(
    layers: int, ranks: int, virtual: int, first: int, last: int, data: st.DataObject
):
    """HiGHS finds no faster slowest rank under memory, and fits where we do."""
    optimize = pytest.importorskip("scipy.optimize")
    stages = ranks * virtual
    stage_ranks = [stage % ranks for stage in range(stages)]
    beside_s = [0.0] * stages
    beside_s[0] += first
    beside_s[-1] += last
    each = [float(data.draw(st.integers(1, 5))) for _ in range(stages)]
    free = [float(data.draw(st.integers(4, 40))) for _ in range(ranks)]
    ours = balance(layers, stage_ranks, 10.0, beside_s, layer_bytes=each, free_bytes=free)

    of_rank = np.array([[float(own == rank) for own in stage_ranks] for rank in range(ranks)])
    time_rows = np.hstack([10.0 * of_rank, -np.ones((ranks, 1))])
    memory_rows = np.hstack([of_rank * each, np.zeros((ranks, 1))])
    sum_row = np.array([[*[1.0] * stages, 0.0]])
    least = [0.0 if beside else 1.0 for beside in beside_s]
    found = optimize.milp(
        np.array([*[0.0] * stages, 1.0]),
        constraints=[
            optimize.LinearConstraint(time_rows, -np.inf, -of_rank @ beside_s),
            optimize.LinearConstraint(memory_rows, -np.inf, free),
            optimize.LinearConstraint(sum_row, layers, layers),
        ],
        integrality=[*[1] * stages, 0],
        bounds=optimize.Bounds([*least, 0.0], np.inf),
    )
    assert (ours is None) == (found.status == 2)
    if ours is not None:
        assert sum(ours) == layers
        assert all(n >= low for n, low in zip(ours, least, strict=True))
        assert (of_rank @ (np.array(ours) * each) <= free).all()
        assert largest_s(ours, stage_ranks, 10.0, beside_s) == pytest.approx(found.fun)


def test_a_rebalanced_layout_takes_layers_from_the_head_and_keeps_what_is_as_good():
    layout = read_layout("Et*4|t*4|t*4|t*4L")
    found = rebalance(layout, [41.0, 40.0, 40.0, 65.0], range(4))
    assert found is not None
    assert str(found.layout) == "Et*4|(t*5|)*2ttL"
    assert found.stage_s == (41.0, 50.0, 50.0, 45.0)
    again = rebalance(found.layout, found.stage_s, range(4))
    assert again is not None
    assert again.layout == found.layout


def test_without_a_stage_of_layers_alone_nothing_is_known():
    assert rebalance(read_layout("Et*4|t*4L"), [41.0, 65.0], range(2)) is None
