"""On real ranks, adapters call a hook for exactly what their engine computes, and leave the
engine unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import ranks

from perseus_planner.base.errors import UsageError
from perseus_planner.runtime.engines import engine_of
from perseus_planner.runtime.engines.engine import attached_once, replaced

pytest.importorskip("torch")

from engine_programs import ITERATIONS, TORCH, deepspeed_schedule, schedule_of

# Warnings on import of an engine are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

Results = list[dict[str, Any]]  #: of each rank

DEEPSPEED = ("1f1b", "dualpipe-v")


def results_of(program: str, size: int, folder: Path, *imports: str) -> Results:
    everyone = ranks(f"engine_programs:{program}", size, folder, imports=imports)
    assert [each.code for each in everyone] == [0] * size, everyone
    return [json.loads(each.stdout.splitlines()[-1]) for each in everyone]


@pytest.fixture(scope="module", params=[2, 4])
def torch_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return results_of("torch_schedules", request.param, tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module", params=[2, 4])
def deepspeed_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    pytest.importorskip("deepspeed")
    return results_of(
        "deepspeed_engines", request.param, tmp_path_factory.mktemp("deepspeed"), "deepspeed.pipe"
    )


@pytest.fixture(params=TORCH)
def torch_schedule(request: pytest.FixtureRequest, torch_ranks: Results) -> tuple[str, Results]:
    return request.param, [each[request.param] for each in torch_ranks]


@pytest.fixture(params=DEEPSPEED)
def deepspeed_engine(
    request: pytest.FixtureRequest, deepspeed_ranks: Results
) -> tuple[str, Results]:
    if request.param not in deepspeed_ranks[0]:
        pytest.skip(f"this DeepSpeed has no {request.param}")
    return request.param, [each[request.param] for each in deepspeed_ranks]


def rows(name: str, engine: str, size: int, microbatches: int) -> list[list[str]]:
    schedule = (deepspeed_schedule if engine == "deepspeed" else schedule_of)(
        name, size, microbatches
    )
    return [[str(each) for each in row] for row in schedule.ranks]


def check_told(name: str, engine: str, everyone: Results) -> None:
    """Check that the hook sees two iterations, not the evaluation between them, in the announced
    order.
    """
    microbatches = 2 * len(everyone)
    for each, row in zip(everyone, rows(name, engine, len(everyone), microbatches), strict=True):
        assert each["order"] == row
        assert (
            each["iterations"] == [{"microbatches": microbatches, "computations": row}] * ITERATIONS
        )
        assert not each["open"]


def check_clocks(everyone: Results) -> None:
    """Check that the hook requests each computation's clock before it begins, and the first one
    again at the end.
    """
    for each in everyone:
        assert set(each["deviations"]) == {None}
        assert len(each["clocks"]) == len(each["deviations"])
        assert all(each["clocks"])
        assert each["next"] == each["first"]


def check_unchanged(everyone: Results) -> None:
    """Check that losses, weights and random state equal those without a hook, and nothing stays
    on the engine.
    """
    for each in everyone:
        assert each["equal"]
        assert each["wraps"]
        assert each["restored"]
        assert each["left"] == []
        (refusal,) = each["refusals"]
        assert refusal.endswith("already; leave its block before you enter another")


def check_seat(name: str, pipeline: int | None, everyone: Results) -> None:
    for rank, each in enumerate(everyone):
        assert (each["name"], each["device"]) == (name, "cpu")
        assert each["seat"] == [rank, len(everyone), pipeline, list(range(len(everyone)))]


def check_failure(error: str, everyone: Results) -> None:
    """Check that each iteration has ended and nothing is left on the engine after a layer failed
    on the last rank.
    """
    failures = [each["failure"] for each in everyone]
    assert (failures[-1]["error"], failures[-1]["cause"]) == (
        error,
        "ArithmeticError: the layer fails",
    )
    for each in failures:
        whole, broken = (iteration["computations"] for iteration in each["iterations"])
        assert 0 < len(broken) < len(whole)
        assert broken == whole[: len(broken)]
        assert not each["open"]
        assert each["left"] == []


def test_a_hook_sees_what_a_torch_schedule_runs(torch_schedule: tuple[str, Results]) -> None:
    name, everyone = torch_schedule
    check_told(name, "torch", everyone)


def test_a_hook_sees_what_a_deepspeed_engine_runs(deepspeed_engine: tuple[str, Results]) -> None:
    name, everyone = deepspeed_engine
    check_told(name, "deepspeed", everyone)


def test_clocks_are_asked_for_before_computations_of_torch(
    torch_schedule: tuple[str, Results],
) -> None:
    check_clocks(torch_schedule[1])


def test_clocks_are_asked_for_before_computations_of_deepspeed(
    deepspeed_engine: tuple[str, Results],
) -> None:
    check_clocks(deepspeed_engine[1])


def test_training_with_torch_is_bit_equal_and_the_schedule_is_unchanged(
    torch_schedule: tuple[str, Results],
) -> None:
    check_unchanged(torch_schedule[1])


def test_training_with_deepspeed_is_bit_equal_and_the_engine_is_left_as_it_was(
    deepspeed_engine: tuple[str, Results],
) -> None:
    check_unchanged(deepspeed_engine[1])


def test_torch_gives_the_pipeline_rank(torch_schedule: tuple[str, Results]) -> None:
    check_seat("torch.distributed.pipelining", None, torch_schedule[1])


def test_deepspeed_gives_the_pipeline_rank(deepspeed_engine: tuple[str, Results]) -> None:
    check_seat("DeepSpeed", 0, deepspeed_engine[1])


def test_deepspeed_gives_the_pipeline(deepspeed_ranks: Results) -> None:
    if len(deepspeed_ranks) != 4:
        pytest.skip("two pipelines of two stages are four ranks")
    replicas = [each["replicas"] for each in deepspeed_ranks]
    assert [each["seat"] for each in replicas] == [
        [0, 2, 0, [0, 2]],
        [0, 2, 1, [1, 3]],
        [1, 2, 0, [0, 2]],
        [1, 2, 1, [1, 3]],
    ]
    for each in replicas:
        row = rows("1f1b", "deepspeed", 2, 3)[each["seat"][0]]
        assert each["order"] == row
        assert each["iterations"] == [{"microbatches": 3, "computations": row}]


def test_the_loss_belongs_to_the_forward_of_the_last_stage_of_torch(
    torch_schedule: tuple[str, Results],
) -> None:
    _, everyone = torch_schedule
    losses = [each["losses"] for each in everyone if each["losses"] is not None]
    assert losses == [ITERATIONS * everyone[0]["microbatches"]]


def test_another_schedule_of_torch_may_have_another_number_of_microbatches(
    torch_schedule: tuple[str, Results],
) -> None:
    name, everyone = torch_schedule
    microbatches = 4 * len(everyone)
    for each, row in zip(everyone, rows(name, "torch", len(everyone), microbatches), strict=True):
        assert each["more_order"] == row
        assert each["more"] == [{"microbatches": microbatches, "computations": row}]


def test_what_a_backward_of_deepspeed_computes_again_is_no_forward(
    deepspeed_engine: tuple[str, Results],
) -> None:
    for each in deepspeed_engine[1]:
        microbatches = each["microbatches"]
        assert (
            each["calls"] == 2 * ITERATIONS * microbatches + microbatches
        )  # forward and again; and an evaluation
        forwards = [
            sum("F" in cell for cell in iteration["computations"])
            for iteration in each["iterations"]
        ]
        assert forwards == [sum("F" in cell for cell in each["order"])] * ITERATIONS


def test_an_engine_of_deepspeed_may_change_its_number_of_microbatches(
    deepspeed_engine: tuple[str, Results],
) -> None:
    name, everyone = deepspeed_engine
    numbers = (4 * len(everyone), 2 * len(everyone))
    for rank, each in enumerate(everyone):
        wanted = [rows(name, "deepspeed", len(everyone), number)[rank] for number in numbers]
        assert each["changed_orders"] == wanted
        expected = [
            {"microbatches": number, "computations": row}
            for number, row in zip(numbers, wanted, strict=True)
        ]
        assert each["changed"] == expected


def test_a_failure_in_an_iteration_of_torch_is_still_that_failure(torch_ranks: Results) -> None:
    check_failure("RuntimeError", torch_ranks)  # torch adds which stage failed


def test_a_failure_in_an_iteration_of_deepspeed_is_still_that_failure(
    deepspeed_ranks: Results,
) -> None:
    check_failure("ArithmeticError", deepspeed_ranks)


def test_what_an_instance_had_of_its_own_it_has_again() -> None:
    owner = SimpleNamespace(own=1)
    with replaced(owner, own=2, other=3):
        assert vars(owner) == {"own": 2, "other": 3}
    assert vars(owner) == {"own": 1}


def test_one_engine_has_one_runtime_at_a_time() -> None:
    owner = SimpleNamespace(own=1)
    with attached_once(owner, own=2), pytest.raises(UsageError) as error, attached_once(owner):
        pass
    assert str(error.value) == (
        "a runtime is attached to this SimpleNamespace already; leave its block before you enter "
        "another"
    )
    with attached_once(owner):
        assert owner.own == 1


def test_something_else_than_an_engine_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        engine_of(object())
    assert str(error.value) == (
        "planner_runtime was given a object; give it a DeepSpeed PipelineEngine, the chunks of a "
        "Megatron-core model, or a schedule of torch.distributed.pipelining"
    )


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (
            "torch",
            "_PipelineSchedule",
            "_PipelineSchedule has no step, which the runtime needs; use torch 2.6 or later",
        ),
        (
            "deepspeed",
            "PipelineEngine",
            "PipelineEngine has no _exec_schedule, which the runtime needs; use DeepSpeed 0.14 to "
            "0.19",
        ),
    ],
)
def test_an_engine_that_cannot_be_followed_is_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        engine_of(type(name, (), {"__module__": module})())
    assert str(error.value) == message
