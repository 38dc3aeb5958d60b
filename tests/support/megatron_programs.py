"""Programs of ranks for the tests of the Megatron-core adapter; launching.py runs them by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch and Megatron

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.pipeline_parallel import combined_1f1b as combined_module
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.timers import Timers
from megatron.core.transformer import MegatronModule, TransformerConfig, enums
from megatron.core.transformer.moe import moe_utils
from megatron_shapes import SHAPES, Shape
from runtime_training import (
    FAST,
    GPU,
    Recorder,
    WarningLog,
    equal,
    followed,
    job,
    outcome,
    plan_of,
)
from runtime_training import planned as planned_by
from tiny_gpt import Training, grid_of, gridded, groups_of, on_cpu, overlapping, parallel
from torch import nn

from perseus_planner.base.errors import EngineChanged, UsageError
from perseus_planner.engines.edges import EdgeHook
from perseus_planner.engines.guard import HookGuard
from perseus_planner.engines.megatron import MegatronModel
from perseus_planner.engines.megatron_graphs import run_watched
from perseus_planner.engines.megatron_pairs import CombinedStep
from perseus_planner.runtime.hook import RAISED, Hook
from perseus_planner.runtime.marks import OUTSIDE
from perseus_planner.runtime.program import Program
from perseus_planner.schedules import generate, interleaved_1f1b


class RecordedMarks:
    """Marks and `ProgramSource` of a real hook, which record its requests and how its iterations
    ended.
    """

    def __init__(self, program: Any) -> None:
        self.program, self.ends, self.words, self.wants = program, [], [], []
        self.problems: list[str] = []

    def load(self, words: Any) -> None:
        self.words = words

    def request(self, index: int, part: int = 0) -> None:
        if part != OUTSIDE and self.wants[-1:] != [index]:
            self.wants.append(index)

    def write(self, _: int, request: int) -> None:
        self.request(self.words.index(request))

    def program_for(self, iteration: int) -> Any:
        return self.program

    def on_end(self, iteration: int, program: Any, deviation: str | None, *_: object) -> None:
        self.ends.append(deviation)

    def on_unfollowed(self, problem: str) -> None:
        self.problems.append(problem)

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    now = end_iteration = nothing

    def begin_iteration(self, *_: Any, **__: Any) -> Any:
        return []


class UserTimers:
    """Timers that a user may have; they record every call and return a value."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> UserTimer:
        self.calls.append((args, kwargs))
        return UserTimer(self, args[0])

    def log(self, names: list[str]) -> str:
        return f"logged {names}"


class UserTimer:
    def __init__(self, timers: UserTimers, name: str) -> None:
        self._timers, self._name, self._number = timers, name, len(timers.calls)

    def start(self, *args: Any, **kwargs: Any) -> str:
        self._timers.calls.append((self._name, "start", args, kwargs))
        return f"{self._name} started"

    def stop(self, *args: Any, **kwargs: Any) -> str:
        self._timers.calls.append((self._name, "stop", args, kwargs))
        return f"{self._name} stopped"

    def elapsed(self) -> int:
        return self._number


def several(*programs: str) -> None:
    """Run programs one after another, each with its arguments after spaces; print the name of
    each that passes, and after it what this core lacks, which the program returns.
    """
    dist.init_process_group("gloo")
    for program in programs:
        name, *arguments = program.split()
        lack = globals()[name](*arguments)
        print(f"{name}: {lack}" if lack else name, flush=True)
    dist.destroy_process_group()


def orders(*shapes: str) -> None:
    """The hook's calls, what really runs, the announced order and our generator's row are equal.

    Each shape is "virtual,group,microbatches", the first two 0 where there are none.
    """
    for shape in shapes:
        virtual, group, microbatches = map(int, shape.split(","))
        with parallel(virtual or None):
            training = Training(virtual or None, group or None)
            seat, recorded = training.engine.pipeline_rank, Recorder()
            with training.engine.attached(recorded), training.watched() as ran:
                training.step(microbatches)
            row = interleaved_1f1b(seat.ranks, virtual or 1, microbatches, group or None).ranks[
                seat.rank
            ]
            assert ran == list(row), (shape, ran)
            assert training.engine.order_for(microbatches) == row
            computations = [str(computation) for computation in row]
            assert recorded.iterations == [
                {"microbatches": microbatches, "computations": computations}
            ], shape
            assert not recorded.inside
            _judge_watched(training, microbatches, row)


class _Inside:
    """Takes what ran in iterations that are to be replayed as a graph."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture(self, position: int) -> None:
        self.calls.append(position)

    def end_eager(self, order: Any, microbatches: int | None) -> None:
        self.calls.append((tuple(order), microbatches))

    def end_capture(self, order: Any) -> None:
        self.calls.append(tuple(order))


def _judge_watched(training: Training, microbatches: int, row: Any) -> None:
    """What runs before there is a graph of iterations, and when it is captured, is noted in order;
    nothing is captured, as this needs a GPU.
    """
    engine = training.engine
    for is_captured in (False, True):
        inside = _Inside()
        timers = training.config.timers
        step_of_pairs = CombinedStep.found() if engine.has_pairs else None
        run_watched(
            HookGuard(Recorder()),
            inside,
            [training.config],
            engine.pipeline_rank,
            len(training.chunks),
            engine._group or engine.pipeline_rank.ranks,
            step_of_pairs,
            is_captured,
            partial(training.step, microbatches),
            microbatches,
        )
        marked = [*range(1, len(row) + 1), tuple(row)]
        assert inside.calls == (marked if is_captured else [(tuple(row), microbatches)])
        assert training.config.timers is timers


def combined(*shapes: str) -> None:
    """Where experts are overlapped, the hook's calls, what Megatron's plans run, the announced
    order and our generator's row are equal, and results are those without a hook.

    Each shape is "virtual,group,microbatches,experts", as in `orders`; the last is over how many
    ranks experts are spread.
    """
    for shape in shapes:
        virtual, group, microbatches, experts = map(int, shape.split(","))
        pipeline = dist.get_world_size() // experts
        with parallel(virtual or None, pipeline=pipeline, experts=experts), overlapping():
            hook = Recorder()
            made = partial(Training, virtual or None, group or None, experts=experts, combined=True)
            trainings = [made(), made()]
            row = _judge_combined(trainings[0], microbatches, nullcontext())
            expected = _judge_combined(
                trainings[1], microbatches, trainings[1].engine.attached(hook)
            )
        assert row == expected
        seen = {"microbatches": microbatches, "computations": [str(each) for each in row]}
        assert hook.iterations == [seen] * 2, (shape, hook.iterations)
        assert not hook.problems
        assert equal(*(training.weights() for training in trainings)), shape
        with parallel(virtual or None, pipeline=pipeline, experts=experts), overlapping():
            _judge_watched(made(), microbatches, row)
        assert not hasattr(combined_module.combined_forward_backward_step, "__wrapped__")


def _judge_combined(training: Training, microbatches: int, block: Any) -> Any:
    """Train twice inside the block, and return what this rank should run; it ran that."""
    virtual = len(training.chunks)
    given = training.config.timers = UserTimers()
    seat = training.engine.pipeline_rank
    with block, training.watched_pairs() as ran:
        training.step(microbatches)
        training.step(microbatches)
    iteration = dict(training.engine.iteration(microbatches))
    schedule = generate(
        iteration.pop("schedule"),
        ranks=seat.ranks,
        group=iteration.pop("microbatch_group", None),
        **iteration,
    )
    assert schedule.name == "combined-1f1b"
    row = schedule.shown(seat.rank)
    assert ran == [str(computation) for computation in row] * 2, ran
    assert training.engine.order_for(microbatches) == row
    assert training.config.timers is given
    calls = [call for call in given.calls if call[0] == "forward-compute"]
    assert len(calls) == 2 * 2 * microbatches * virtual
    return row


def shapes() -> None:
    """For each shape of these ranks: the hook's calls, what ran, and our generator's row are equal.

    Prints a line for each shape, as `several` does for each program.
    """
    for shape in SHAPES:
        if shape.ranks == dist.get_world_size():
            lack = _lack(shape)
            if lack is None:
                _judge(shape)
            print(f"{shape.name}: {lack}" if lack else shape.name, flush=True)


def _lack(shape: Shape) -> str | None:
    """Return what this core lacks for a shape; None if it has all."""
    if shape.model == "hybrid" and find_spec("megatron.core.models.hybrid") is None:
        return "this core has no HybridModel"
    loss_arguments = inspect.signature(vocab_parallel_cross_entropy).parameters
    if not shape.has_state and "tp_group" not in loss_arguments:
        return "the cross entropy of this core asks for the parallel state"
    return None


def _judge(shape: Shape) -> None:
    is_experts = "num_moe_experts" in shape.options
    pipeline = shape.pipeline or shape.ranks
    with ExitStack() as stack:
        groups = None
        if shape.has_state:
            state = parallel(
                shape.virtual,
                pipeline=pipeline,
                experts=2 if is_experts else 1,
                context=shape.options.get("context_parallel_size", 1),
                embeddings=shape.embeddings,
            )
            stack.enter_context(state)
        else:
            groups = stack.enter_context(gridded(pipeline))
        training = Training(
            shape.virtual,
            shape.group,
            experts=2 if is_experts else 1,
            model=shape.model,
            groups=groups,
            **shape.options,
        )
        seat, recorded = training.engine.pipeline_rank, Recorder()
        row = interleaved_1f1b(
            seat.ranks, shape.virtual or 1, shape.microbatches, shape.group
        ).ranks[seat.rank]
        assert seat.ranks == pipeline
        stack.enter_context(_calculator(shape.microbatches))
        assert training.engine.order() == row
        with training.engine.attached(recorded):
            for _ in range(2):
                with training.watched() as ran:
                    training.step(shape.microbatches)
                assert ran == list(row), (shape.name, ran)
        seen = {
            "microbatches": shape.microbatches,
            "computations": [str(computation) for computation in row],
        }
        assert recorded.iterations == [seen, seen], (shape.name, recorded.iterations)
        assert not recorded.inside


@contextmanager
def _calculator(microbatches: int) -> Iterator[None]:
    """Have Megatron calculate so many microbatches for each iteration."""
    module = num_microbatches_calculator
    calculator = module.ConstantNumMicroBatchesCalculator(
        microbatches, 1, 1, False, dist.get_rank()
    )
    with mock.patch.object(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator):
        yield


class _Modules(MegatronModule):
    """The encoder, or the language model after it, of a pipeline of two modules."""

    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__(config=config)
        self.pg_collection = groups
        self.layer = nn.Linear(config.hidden_size, config.hidden_size)
        self._received: dict[str, Any] = {}

    def set_input_tensor(self, tensors: Any) -> None:
        received = tensors[0] or {}
        self._received = {
            name: each[0] if isinstance(each, list) else each for name, each in received.items()
        }

    def forward(self, values: Any) -> dict[str, Any]:
        if dist.get_rank() == 0:
            return {"encoder": self.layer(values)}
        return {"llm": self.layer(self._received["encoder"])}


def multimodule() -> str | None:
    """A pipeline of several modules runs all its backwards, of which timers show none; the hook is
    told so before the first iteration, and shown nothing.
    """
    if not hasattr(schedules, "backward_step_multimodule"):
        return "this core has no pipelines of several modules"
    from megatron.core import process_groups_config
    from megatron.core.pipeline_parallel.multimodule_communicator import (
        MultiModulePipelineCommunicator,
    )

    config = _modules_config()
    names = ("encoder", "llm")
    with ExitStack() as stack:
        stack.enter_context(on_cpu())
        for function in (dist.new_group, dist.new_subgroups_by_enumeration):
            # Its communicator asks for NCCL.
            on_gloo = partial(_called_on_gloo, function)
            stack.enter_context(mock.patch.object(dist, function.__name__, on_gloo))
        grids = {name: grid_of(1, 1, offset=rank) for rank, name in enumerate(names)}
        name = names[dist.get_rank()]
        groups = groups_of(grids[name])
        communicator = MultiModulePipelineCommunicator(
            grids, {"encoder": ["llm"], "llm": []}, config, dim_mapping={"s": 0, "b": 1, "h": 2}
        )
        model = _Modules(config, groups)
        ran: list[str] = []

        def forward(_: Any, __: Any, output: Any) -> None:
            ran.append("F")
            next(iter(output.values())).register_hook(lambda _: ran.append("B"))

        model.register_forward_hook(forward)

        def step(data: Any, chunk: Any) -> Any:
            return chunk(next(data)), lambda output: (output["llm"].mean(), output["llm"].mean())

        engine, recorded = MegatronModel([model]), Recorder()
        with engine.attached(recorded):
            for _ in range(2):
                schedules.forward_backward_pipelining_without_interleaving(
                    forward_step_func=step,
                    data_iterator=iter(torch.rand(3, 4, 1, config.hidden_size)),
                    model=model,
                    num_microbatches=3,
                    seq_length=4,
                    micro_batch_size=1,
                    p2p_communicator=communicator,
                    pg_collection=process_groups_config.MultiModuleProcessGroupCollection(
                        {name: groups}, "llm" if name == "llm" else None
                    ),
                )
        assert (ran.count("F"), ran.count("B")) == (6, 6), ran
        assert recorded.iterations == []
        assert recorded.problems == [
            "Megatron-core runs a pipeline of several modules, whose backwards its timers do not "
            "show"
        ]
    return None


def _called_on_gloo(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs | {"backend": "gloo"})


def _modules_config() -> Any:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_sync=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )


def _backwards_without_timers() -> Any:
    """Have Megatron's backwards start no timers inside the block."""
    timed = schedules.backward_step

    def untimed(*args: Any) -> Any:
        *tensors, config = args  # core 0.16 has the type of the model between them
        without_timers = copy.copy(config)
        without_timers.timers = None
        return timed(*tensors, without_timers)

    return mock.patch.object(schedules, "backward_step", untimed)


def half_seen() -> None:
    """After an iteration whose backwards start no timers the hook is told so, and shown nothing
    more.
    """
    for virtual in (None, 2):
        expected = 2 * (virtual or 1)
        with parallel(virtual):
            training, recorded = Training(virtual), Recorder()
            hooked = RecordedMarks(None)
            with _backwards_without_timers():
                with training.engine.attached(recorded):
                    training.step(2)
                    training.step(2)
                with training.engine.attached(Hook(hooked, hooked, None)):
                    training.step(2)
                    training.step(2)
        problem = (
            f"Megatron-core's timers show {expected} forwards and 0 backwards in an iteration that "
            f"should run {expected} of each, so the planner does not see all that runs"
        )
        assert recorded.problems == hooked.problems == [problem], recorded.problems
        assert len(recorded.iterations) == len(hooked.ends) == 1
        assert not recorded.inside


def reruns() -> str | None:
    """An iteration that Megatron runs again, as its paged stash was too small, is an iteration more
    for the hook; losses and weights are those of a training without one.
    """
    if find_spec("megatron.core.transformer.moe.paged_stash") is None:
        return "this core has no paged stash"
    for virtual in (None, 2):
        with parallel(virtual):
            recorded = Recorder()
            assert equal(_rerun(virtual, None), _rerun(virtual, recorded))
        computations = [each["computations"] for each in recorded.iterations]
        assert len(computations) == 5
        assert all(each == computations[0] for each in computations)
        assert not recorded.problems
    return None


def _rerun(virtual: int | None, hook: Any) -> list[Any]:
    """Return losses and weights of iterations of which every second one runs twice."""
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, PagedStashRunner

    training = Training(virtual, overlap=True)
    overflows = [0, 1, 0, 1, 0]
    # The stash itself needs a GPU.
    no_stash = mock.Mock(overflow=None, host_spill=None)
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(PagedStashManager, "get_instance", return_value=no_stash)
        )
        runner = PagedStashRunner(
            training.config, False, training.model, training.optimizer, get_forward_backward_func()
        )
        stack.enter_context(
            mock.patch.object(
                runner, "check_moe_overflow", side_effect=lambda: (overflows.pop(0), 0, 0)
            )
        )
        if hook:
            stack.enter_context(training.engine.attached(hook))
        losses = [loss for _ in range(3) for loss in training.step(4, runner)]
    assert overflows == []
    return [*losses, *training.weights()]


def experts() -> None:
    """What layers of experts have reported for the logs is as before after repeated forwards, which
    a profile runs; also if they are the first to report.
    """
    with parallel(pipeline=1, experts=2):
        training = Training(experts=2)
        (stage,) = training.engine.stages()
        for _ in range(2):
            before = _logged()
            with stage.preserve_state():
                training.step(2, forward_only=True)
                assert any(_logged().values())
                assert _logged() != before
            assert _logged() == before or not any(_logged().values())
            training.step(2)
        assert before["load_balancing_loss"] > 0


def _logged() -> dict[str, float]:
    """Return the losses of experts that the core would log now, by name."""
    if find_spec("megatron.core.transformer.moe.moe_logging") is not None:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        entries = get_moe_metrics_tracker().metrics.items()
        return {name: float(entry.values.sum()) for name, entry in entries}
    reports = moe_utils.get_moe_layer_wise_logging_tracker().items()
    return {name: float(report["values"].sum()) for name, report in reports}


def results() -> None:
    """Losses, weights and the calls of the user's timers are bit for bit those without a hook."""
    for virtual in (None, 2):
        with parallel(virtual):
            plain, hooked = _trained(virtual, None), _trained(virtual, Recorder())
            assert equal(plain[0], hooked[0])
            assert len(plain[1]) > 20
            assert plain[1] == hooked[1]


def _trained(virtual: int | None, hook: Any) -> tuple[list[Any], list[Any]]:
    training, timers = Training(virtual), UserTimers()
    training.config.timers = timers
    with training.engine.attached(hook) if hook else nullcontext():
        losses = [loss for _ in range(3) for loss in training.step(4)]
    return [*losses, *training.weights(), torch.rand(1)], timers.calls


def evaluations() -> None:
    """Of an evaluation the hook only hears that it is one, with or without gradients."""
    for virtual in (None, 2):
        with parallel(virtual):
            training, recorded = Training(virtual), Recorder()
            with training.engine.attached(recorded):
                training.step(4, forward_only=True)
                training.step(4)
                with torch.no_grad():
                    training.step(2, forward_only=True)
                training.step(4)
            assert [each["microbatches"] for each in recorded.iterations] == [4, 4]
            first, second = (each["computations"] for each in recorded.iterations)
            assert first == second
            assert recorded.evaluations == 2
            assert not recorded.inside


def changes() -> None:
    """With another number of microbatches the hook deviates from its plan for that iteration,
    once.
    """
    for virtual in (None, 2):
        with parallel(virtual):
            training = Training(virtual)
            seat = training.engine.pipeline_rank
            schedule = interleaved_1f1b(seat.ranks, virtual or 1, 4)
            hooked = RecordedMarks(_program(schedule, seat.rank))
            with training.engine.attached(Hook(hooked, hooked, hooked.program)):
                for microbatches in (4, 6, 4, 4):
                    training.step(microbatches)
            count = len(schedule.ranks[seat.rank])
            assert hooked.ends == [None, "6 microbatches, and the plan has 4", None, None], (
                hooked.ends
            )
            # Until the odd one, then none, and from the end of the next on again.
            in_order = [*range(1, count), 0]
            assert hooked.wants == [0, *in_order, -1, 0, *in_order], hooked.wants


PACKING = """
def create_data_iterator(new_samples, pp_group, tp_group, config):
    return iter(new_samples)


def wrap_data_iterator(data_iterator, config, num_microbatches, pg_collection=None):
    samples = [next(data_iterator) for _ in range(num_microbatches)]
    lengths = [each.tolist() for each in samples]
    ends = [torch.tensor([0, *accumulate(row)], dtype=torch.int32) for row in lengths]
    packed = [{"cu_seqlens": each, "max_seqlen": max(row)} for each, row in zip(ends, lengths)]
    iterator = create_data_iterator(packed, None, None, config)
    total = float(sum(map(sum, lengths)))
    return iterator, len(packed), total, float(sum(n * n for row in lengths for n in row))
"""
"""The contract of Megatron-core's packing, of which 0.16.1 has nothing yet: it is asked for a
batch on every rank before the iteration, makes its iterator by the function beside it, and returns
that, the number of microbatches, and two sums over the batch.
"""


def packs() -> None:
    """The lengths of packed microbatches are shown on every stage, in each iteration those of its
    batch; results are the same, and nothing is left behind.
    """
    from perseus_planner.extensions.autopilot.batches.work import sequence_work

    name = "megatron.core.datasets.data_schedule"
    module = ModuleType(name)
    vars(module).update(torch=torch, accumulate=accumulate)
    exec(PACKING, vars(module))
    lengths = [[[3, 5], [8]], [[1, 1, 6], [2, 2], [7]], [[4], [4]]]
    with parallel(), mock.patch.dict(sys.modules, {name: module}):
        given = module.create_data_iterator
        training, recorded, shown = Training(), Recorder(), list[Any]()
        begin = recorded.begin_iteration

        def begun(
            microbatches: int | None = None, batch: Any = None, _number: int | None = None
        ) -> None:
            shown.append([sequence_work(each) for each in batch()])
            begin(microbatches)

        recorded.begin_iteration = begun
        with training.engine.attached(recorded):
            for batch in lengths:
                data = iter([torch.tensor(row) for row in batch])
                iterator, count, *_ = module.wrap_data_iterator(data, training.config, len(batch))
                assert len(list(iterator)) == count
                training.step(count, forward_only=True)
                training.step(count)
        assert module.create_data_iterator is given
    assert shown == [
        [(float(sum(row)), float(sum(n * n for n in row))) for row in batch] for batch in lengths
    ]


def _program(schedule: Any, rank: int) -> Program:
    computations = schedule.ranks[rank]
    return Program(1, computations, (1000,) * len(computations))


def unknown() -> None:
    """If no caller says the number of microbatches and whether it trains, nothing more is shown,
    and why is said.
    """
    with parallel():
        training, recorded = Training(), Recorder()
        with training.engine.attached(recorded):
            timers = training.config.timers
            timers("forward-backward", log_level=1).start(barrier=False)
            for name in [*["forward-compute"] * 2, *["backward-compute"] * 2]:
                timers(name, log_level=2).start()
                timers(name).stop()
            timers("forward-backward").stop()
            training.step(2)
        assert recorded.iterations == []
        (problem,) = recorded.problems
        assert "no function with the arguments num_microbatches and forward_only" in problem


def timers() -> None:
    """The user's calls of timers of any kind reach the original timers."""
    with parallel():
        training, given = Training(), UserTimers()
        config = training.config
        config.timers = given
        with training.engine.attached(Recorder()):
            assert config.timers is not given
            assert config.timers("other", log_level=0) is not config.timers(
                "other", log_level=0
            )  # as its own does
            assert config.timers("forward-compute").start() == "forward-compute started"
            assert config.timers("forward-compute").stop(barrier=True) == "forward-compute stopped"
            assert config.timers("forward-compute").elapsed() == len(given.calls)
            assert config.timers("forward-compute").elapsed() == len(
                given.calls
            )  # its own gives another one each time
            assert config.timers.log(["a"]) == "logged ['a']"
            assert isinstance(copy.deepcopy(config).timers, UserTimers)
            assert isinstance(pickle.loads(pickle.dumps(config.timers)), UserTimers)
        assert config.timers is given
        config.timers = None
        with training.engine.attached(Recorder()):
            assert config.timers("other", log_level=0).start() is None
            assert copy.deepcopy(config).timers is None
        assert config.timers is None
        config.timers = Timers(0, "max")
        with training.engine.attached(Recorder()):
            training.step(2)
            assert (
                not config.timers._timers
            )  # no level is raised: each of the schedules' timers is a dummy
        assert isinstance(config.timers, Timers)


def restores() -> None:
    """Each config gets its timers back however the block ended, and timers that were kept call
    no hook.
    """
    already = "a runtime is attached to this Megatron-core model already; leave its block first"
    with parallel(2):
        training, recorded = Training(2, apart=True), Recorder()
        assert training.configs[0] is not training.configs[1]
        given = [UserTimers(), None]
        for config, each in zip(training.configs, given, strict=True):
            config.timers = each
        with suppress(ZeroDivisionError), training.engine.attached(recorded):
            training.step(4)
            kept = training.config.timers
            begin = kept("forward-backward").start

            def begun(num_microbatches: int, forward_only: bool) -> None:
                begin()

            with pytest.raises(UsageError, match=f"^{already}$"):
                _attach(training.engine)
            begun(4, False)
            kept("forward-compute").start()
            _fail()
        assert [config.timers for config in training.configs] == given
        kept("forward-compute").stop()
        kept("forward-backward").stop()
        begun(4, False)
        assert len(recorded.iterations) == 2
        assert recorded.inside
        again = Recorder()
        with training.engine.attached(again):
            training.step(4)
        assert (len(again.iterations), again.inside) == (1, False)


def dies() -> None:
    """After an iteration that fails, the next one begins anew, as when Megatron-LM runs an
    iteration twice.
    """
    with parallel():
        training, seat = Training(), MegatronModel([]).pipeline_rank
        schedule = interleaved_1f1b(seat.ranks, 1, 2)
        hooked = RecordedMarks(_program(schedule, seat.rank))
        with training.engine.attached(Hook(hooked, hooked, hooked.program)):
            handle = training.chunks[0].register_forward_pre_hook(_fail)
            with suppress(ZeroDivisionError):
                training.step(2)
            handle.remove()
            training.step(2)
        assert hooked.ends == [RAISED, None], hooked.ends


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def refusals() -> None:
    """Configs whose computations timers do not show are refused with a reason, and left
    unchanged.
    """
    graph = (
        "Megatron-core is to replay whole iterations as one CUDA graph (full_iteration), which "
        "does not show its computations; follow a plan with at most 4 clock changes by time "
        "(`planner plan --max-changes 4`, and leave out follow=), or train with graphs of layers"
    )
    overlap = (
        "overlap_moe_expert_parallel_comm: this Megatron-core has no combined_1f1b."
        "combined_forward_backward_step as it is followed (no f_model); use core 0.16 to 0.19, or "
        "train without the overlap"
    )
    parts = (
        "hybrid_context_parallel makes Megatron-core cut each batch into another number of parts "
        "on each rank, so no plan can have its computations; train without it, or without a plan"
    )
    with pytest.raises(
        UsageError, match=r"^Megatron's parallel state is not initialized; call initialize_model"
    ):
        _ = MegatronModel([]).pipeline_rank
    with parallel():
        fields: list[tuple[str, Any, str]] = [
            ("hybrid_context_parallel", True, parts),
            ("cuda_graph_scope", "full_iteration", graph),  # core 0.14 and 0.15
            ("cuda_graph_impl", "full_iteration", graph),  # core 0.17 and later
        ]
        if hasattr(enums, "CudaGraphScope"):  # core 0.16
            fields.append(("cuda_graph_scope", [enums.CudaGraphScope.full_iteration], graph))
        for name, value, message in fields:
            training = Training()
            setattr(training.config, name, value)
            with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
                _attach(training.engine)
            assert training.config.timers is None
        training = Training()
        training.config.overlap_moe_expert_parallel_comm = True
        other = mock.patch.object(combined_module, "combined_forward_backward_step", _fail)
        with other, pytest.raises(EngineChanged, match=f"^{re.escape(overlap)}$"):
            _attach(training.engine)
        assert training.config.timers is None
        with pytest.raises(
            UsageError, match=r"^a chunk has no Megatron-core config \(.*; give the chunks that you"
        ):
            _attach(MegatronModel([nn.Linear(2, 2)]))
        assert MegatronModel([nn.Identity()]).device.type == "cpu"  # an empty stage
        # By its iterations alone it is followed, whatever they run.
        training = Training()
        recorded = Recorder()
        with training.engine.attached_to_edges(EdgeHook(recorded)):
            training.step(2)
            training.step(2)
        assert recorded.iterations == [{"microbatches": 2, "computations": ["0F0"]}] * 2
        assert not recorded.problems
        training.config.overlap_moe_expert_parallel_comm = True
        with training.engine.attached_to_edges(EdgeHook(Recorder())):
            pass
        assert training.config.timers is None


def _attach(engine: MegatronModel) -> None:
    with engine.attached(Recorder()):
        pass


def megatron_lm() -> None:
    """Megatron-LM's loops set and drop `config.timers`; the hook still sees every training
    iteration.
    """
    with parallel():
        variables = _global_variables()
        given = variables._GLOBAL_TIMERS
        training, recorded = Training(), Recorder()
        with training.engine.attached(recorded):
            _train(training, variables)
        assert variables._GLOBAL_TIMERS is given
        assert training.config.timers is None
        assert [each["microbatches"] for each in recorded.iterations] == [4, 4, 4]
        assert not recorded.inside
        assert [call for call in given.calls if call[0] == "interval-time"] == [
            ("interval-time", "start", (), {})
        ]
        assert sum(call == ("forward-backward", "stop", (), {}) for call in given.calls) == 3
        variables._GLOBAL_TIMERS = None  # Megatron-LM's own initialization wants to find that
        with training.engine.attached(recorded):
            assert variables._GLOBAL_TIMERS is None
    del sys.modules[variables.__name__]


def _global_variables() -> Any:
    """Return a module like megatron.training.global_vars, which Megatron-core does not include."""
    module: Any = ModuleType("megatron.training.global_vars")
    module._GLOBAL_TIMERS = UserTimers()
    module.get_timers = lambda: module._GLOBAL_TIMERS
    sys.modules[module.__name__] = module
    return module


def _train(training: Training, variables: Any) -> None:
    """Use timers like `train` of megatron/training/training.py, with `evaluate` in between."""
    timers = variables.get_timers()
    training.config.timers = timers
    timers("interval-time", log_level=0).start()
    training.step(4)
    with torch.no_grad():
        training.config.timers = None
        training.step(4, forward_only=True)
        training.config.timers = variables.get_timers()
    training.step(4)
    training.step(4)
    timers.log(["interval-time"])


def seats() -> None:
    """Check the known order of two pipelines of two stages: data-parallel, tensor-parallel or
    context-parallel.
    """
    rank = dist.get_rank()
    for tensor, context in ((1, 1), (2, 1), (1, 2)):
        with parallel(tensor=tensor, context=context, pipeline=2):
            engine = MegatronModel([])
            seat = engine.pipeline_rank
            shares = tensor * context > 1
            assert (seat.rank, seat.ranks, seat.peers) == (rank // 2, 2, (rank % 2, rank % 2 + 2))
            assert seat.pipeline == (0 if shares else rank % 2)
            assert engine.tensor_rank == (rank % 2 if shares else 0)
    with parallel(pipeline=2):
        engine = Training().engine
        assert engine.device == torch.device("cpu")
        assert engine.order() is None
        constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator

        class Changing(constant):  # as when the batch grows with what was trained on
            pass

        for calculator, order in ((constant, engine.order_for(3)), (Changing, None)):
            known = calculator(
                6, 1, 2, False, rank
            )  # a batch of 6 in microbatches of 1 on 2 pipelines
            with mock.patch.object(
                num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", known
            ):
                assert engine.order() == order
        assert len(engine.order_for(3)) == 6


def planned(state: str) -> None:
    """Train by a plan as in runtime_runs.py."""
    with job(state) as result, parallel(2):
        schedule = interleaved_1f1b(dist.get_world_size(), 2, 4)
        result["interleaved-1f1b"] = followed(
            lambda watch: Planned(schedule, watch), plan_of(schedule)
        )


def unfollowed(state: str) -> None:
    """Train by a plan while backwards start no timers."""
    with job(state) as result, parallel(2):
        schedule = interleaved_1f1b(dist.get_world_size(), 2, 4)
        warning_log = WarningLog()
        plain = Planned(schedule, None)
        expected = [*(loss for _ in range(3) for loss in plain.step()), *plain.state()]
        training = Planned(schedule, None)
        with planned_by(training, plan_of(schedule)) as runtime, _backwards_without_timers():
            values = [*(loss for _ in range(3) for loss in training.step()), *training.state()]
        result["equal"] = equal(expected, values)
        result["iterations"] = len(runtime.iterations)
        result |= outcome(runtime, warning_log)


def learned(state: str) -> None:
    """Train without a plan as in autopilot_programs.py."""
    from autopilot_programs import referenced

    with job(state) as result, parallel(2):
        schedule = interleaved_1f1b(dist.get_world_size(), 2, 4)
        result["megatron"] = referenced(lambda watch: Planned(schedule, watch), "megatron")


class Planned:
    """A training with the interface of the pipelines in tiny_training.py."""

    def __init__(self, schedule: Any, watch: Any, virtual: int | None = 2, **options: Any) -> None:
        self._training, self.rank = Training(virtual, **options), dist.get_rank()
        self.engine = self._training.model
        if watch is not None:
            self._training.config.timers = _WatchTimers(schedule.ranks[self.rank], watch)

    def step(self) -> list[Any]:
        return self._training.step(4)

    def state(self) -> list[Any]:
        return self._training.weights()


class _WatchTimers:
    """Timers of a user that call `watch` when each computation of `row` begins."""

    def __init__(self, row: Any, watch: Any) -> None:
        self._row, self._watch = row, watch
        self._left: dict[str, Iterator[Any]] = {}

    def __call__(self, name: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(start=lambda *_, **__: self._start(name), stop=lambda *_, **__: None)

    def _start(self, name: str) -> None:
        if name == "forward-backward":
            self._left = {
                kind: iter([each for each in self._row if each.kind == kind]) for kind in "FB"
            }
        elif name in ("forward-compute", "backward-compute"):
            self._watch(*next(self._left[name[0].upper()]))


def bridge(state: str) -> None:
    """Train as Megatron-Bridge's `train` does, with its callbacks; its package brings far more than
    they need.

    An evaluation sets the timers of the config to None for a step and then to its own: see
    training/eval.py of Megatron-Bridge 0.3. A callback is any object that has methods with the
    names of events: see training/callbacks.py."""
    from perseus_planner.runtime.megatron_bridge import PlannerCallback

    with job(state), parallel(2):
        plan = plan_of(interleaved_1f1b(dist.get_world_size(), 2, 4))
        plain = _bridged([])
        callback = PlannerCallback(plan=plan, gpu=GPU, max_changes_per_s=FAST, record="run")
        assert equal(plain, _bridged([callback]))


def _bridged(callbacks: list[Any]) -> list[Any]:
    """Return losses and weights of a training with these callbacks."""
    training, timers = Training(2), UserTimers()
    training.config.timers = timers
    context = SimpleNamespace(
        model=training.chunks, state=SimpleNamespace(timers=timers), user_state={}
    )

    def fire(event: str) -> None:
        for each in callbacks:
            getattr(each, event, lambda _: None)(context)

    fire("on_train_start")
    losses = []
    for number in range(3):
        fire("on_train_step_start")
        losses += training.step(4)
        fire("on_train_step_end")
        if number == 0:
            fire("on_eval_start")
            training.config.timers = None
            training.step(4, forward_only=True)
            training.config.timers = timers
            fire("on_eval_end")
    fire("on_train_end")
    assert training.config.timers is timers
    return [*losses, *training.weights()]
