"""On real ranks, adapters call a hook for exactly what their engine computes, and leave the
engine unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from launching import Results, results_of

from perseus_planner.base.errors import UsageError
from perseus_planner.engines import engine_of
from perseus_planner.engines.engine import attached_once, replaced

pytest.importorskip("torch")

from engine_programs import ITERATIONS, TORCH, deepspeed_schedule, schedule_of

# Warnings on import of an engine are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (2, 4)  #: ranks
ENGINES = {"torch": tuple(TORCH), "deepspeed": ("1f1b", "dualpipe-v")}  #: and their schedules

Launches = Callable[[str, int], Results]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Return what so many ranks of an engine print, which are launched once."""

    @cache
    def launched(engine: str, size: int) -> Results:
        pytest.importorskip(engine)
        imports = ["deepspeed.pipe"] if engine == "deepspeed" else []
        folder = tmp_path_factory.mktemp(engine)
        return results_of(f"engine_programs:{engine}_schedules", size, folder, imports=imports)

    return launched


class Case(NamedTuple):
    """What all ranks say of a schedule of an engine."""

    engine: str
    name: str
    ranks: Results

    def rows(self, microbatches: int) -> list[list[str]]:
        """Return the order of our schedule on each rank."""
        return rows(self.name, self.engine, len(self.ranks), microbatches)


@pytest.fixture(
    params=[
        (engine, size, name)
        for engine, names in ENGINES.items()
        for size in SIZES
        for name in names
    ],
    ids=lambda param: " ".join(map(str, param)),
)
def case(request: pytest.FixtureRequest, launches: Launches) -> Case:
    engine, size, name = request.param
    ranks = launches(engine, size)
    if name not in ranks[0]:
        pytest.skip(f"this {engine} has no {name}")
    return Case(engine, name, [rank[name] for rank in ranks])


def rows(name: str, engine: str, size: int, microbatches: int) -> list[list[str]]:
    schedule = (deepspeed_schedule if engine == "deepspeed" else schedule_of)(
        name, size, microbatches
    )
    return [[str(each) for each in row] for row in schedule.ranks]


def test_a_hook_sees_what_an_engine_runs_in_the_announced_order(case: Case) -> None:
    """It sees two iterations, not the evaluation between them."""
    microbatches = 2 * len(case.ranks)
    for rank, row in zip(case.ranks, case.rows(microbatches), strict=True):
        assert rank["order"] == row
        iteration = {"microbatches": microbatches, "computations": row}
        assert rank["iterations"] == [iteration] * ITERATIONS
        assert not rank["open"]


def test_each_clock_is_asked_for_before_its_computation_and_the_first_again_at_the_end(
    case: Case,
) -> None:
    for rank in case.ranks:
        assert set(rank["deviations"]) == {None}
        assert len(rank["clocks"]) == len(rank["deviations"])
        assert all(rank["clocks"])
        assert rank["next"] == rank["first"]


def test_training_is_bit_equal_and_the_engine_is_left_as_it_was(case: Case) -> None:
    for rank in case.ranks:
        assert rank["equal"]
        assert rank["wraps"]
        assert rank["restored"]
        assert rank["left"] == []
        (refusal,) = rank["refusals"]
        assert refusal.endswith("already; leave its block before you enter another")


def test_an_engine_gives_the_pipeline_rank(case: Case) -> None:
    name, pipeline = {
        "torch": ("torch.distributed.pipelining", None),
        "deepspeed": ("DeepSpeed", 0),
    }[case.engine]
    size = len(case.ranks)
    for number, rank in enumerate(case.ranks):
        assert (rank["name"], rank["device"]) == (name, "cpu")
        assert rank["seat"] == [number, size, pipeline, list(range(size))]


def test_deepspeed_gives_the_pipeline(launches: Launches) -> None:
    replicas = [rank["replicas"] for rank in launches("deepspeed", 4)]
    assert [rank["seat"] for rank in replicas] == [
        [0, 2, 0, [0, 2]],
        [0, 2, 1, [1, 3]],
        [1, 2, 0, [0, 2]],
        [1, 2, 1, [1, 3]],
    ]
    for rank in replicas:
        row = rows("1f1b", "deepspeed", 2, 3)[rank["seat"][0]]
        assert rank["order"] == row
        assert rank["iterations"] == [{"microbatches": 3, "computations": row}]


def test_the_number_of_microbatches_may_change(case: Case) -> None:
    """Of an engine of DeepSpeed twice; torch has another schedule for another number."""
    numbers = (4 * len(case.ranks), 2 * len(case.ranks))[: len(case.ranks[0]["changed"])]
    assert len(numbers) == (2 if case.engine == "deepspeed" else 1)
    for number, rank in enumerate(case.ranks):
        expected = [case.rows(microbatches)[number] for microbatches in numbers]
        assert rank["changed_orders"] == expected
        assert rank["changed"] == [
            {"microbatches": microbatches, "computations": row}
            for microbatches, row in zip(numbers, expected, strict=True)
        ]


def test_the_loss_belongs_to_the_forward_of_the_last_stage_of_torch(case: Case) -> None:
    losses = [rank["losses"] for rank in case.ranks if rank.get("losses") is not None]
    microbatches = case.ranks[0]["microbatches"]
    assert losses == ([ITERATIONS * microbatches] if case.engine == "torch" else [])


def test_what_a_backward_of_deepspeed_computes_again_is_no_forward(case: Case) -> None:
    for rank in case.ranks if case.engine == "deepspeed" else ():
        microbatches = rank["microbatches"]
        # Forward and again; and an evaluation.
        assert rank["calls"] == 2 * ITERATIONS * microbatches + microbatches
        forwards = [
            sum("F" in computation for computation in iteration["computations"])
            for iteration in rank["iterations"]
        ]
        assert forwards == [sum("F" in computation for computation in rank["order"])] * ITERATIONS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("engine", "error"),
    [("torch", "RuntimeError"), ("deepspeed", "ArithmeticError")],  # torch adds which stage failed
)
def test_a_failure_in_an_iteration_is_still_that_failure_and_leaves_nothing_behind(
    engine: str, error: str, size: int, launches: Launches
) -> None:
    failures: list[dict[str, Any]] = [rank["failure"] for rank in launches(engine, size)]
    cause = "ArithmeticError: the layer fails"
    assert (failures[-1]["error"], failures[-1]["cause"]) == (error, cause)
    for rank in failures:
        whole, broken = (iteration["computations"] for iteration in rank["iterations"])
        assert 0 < len(broken) < len(whole)
        assert broken == whole[: len(broken)]
        assert not rank["open"]
        assert rank["left"] == []


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
        engine_of(type(name, (), {"__module__": module})()).check()
    assert str(error.value) == message
