"""What ranks run that train a GPTModel of Megatron-core on the CPU; launching.py asks for it by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch and Megatron

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import CudaGraphScope
from torch import nn

from perseus_planner.errors import UsageError
from perseus_planner.runtime.engines.megatron import MegatronModel
from perseus_planner.runtime.hook import Hook
from perseus_planner.schedules import interleaved_1f1b

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import megatron_cpu

SEQUENCE, ROWS, VOCABULARY = 8, 1, 16


class Heard:
    """In the place of a hook: all that it is told, iteration by iteration."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self._begun: tuple[int, str, int] | None = None

    def begin_iteration(self, microbatches: int | None = None) -> None:
        self.iterations.append({"microbatches": microbatches, "ran": [], "ended": False})

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        assert self._begun is None
        self._begun = (stage, kind, microbatch)

    def end(self) -> None:
        self.iterations[-1]["ran"].append(self._begun)
        self._begun = None

    def end_iteration(self) -> None:
        assert not self.iterations[-1]["ended"]
        self.iterations[-1]["ended"] = True


class Told:
    """Marks and pilot of a real hook: which words it wants, and how its iterations ended."""

    def __init__(self, program: Any) -> None:
        self.program, self.ends, self.words, self.wants = program, [], [], []

    def load(self, words: Any) -> None:
        self.words = words

    def want(self, index: int) -> None:
        self.wants.append(index)

    def program_for(self, iteration: int) -> Any:
        return self.program

    def ended(self, iteration: int, program: Any, deviation: str | None) -> None:
        self.ends.append(deviation)

    def nothing(self, *_: Any) -> None:
        pass

    begin_iteration = begin = end = end_iteration = three_quarters = nothing


class UserTimers:
    """Timers as a user may have them: every call is written down, and gives a value."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> UserTimer:
        self.calls.append((args, kwargs))
        return UserTimer(self, args[0])

    def log(self, names: list[str]) -> str:
        return f"logged {names}"


class UserTimer:
    def __init__(self, timers: UserTimers, name: str) -> None:
        self._timers, self._name = timers, name

    def start(self, *args: Any, **kwargs: Any) -> str:
        self._timers.calls.append((self._name, "start", args, kwargs))
        return f"{self._name} started"

    def stop(self, *args: Any, **kwargs: Any) -> str:
        self._timers.calls.append((self._name, "stop", args, kwargs))
        return f"{self._name} stopped"

    def elapsed(self) -> float:
        return 1.5


class Wrapper(nn.Module):
    """As Megatron's DistributedDataParallel and Float16Module are around a chunk."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@contextmanager
def parallel(virtual: int | None = None, tensor: int = 1, pipeline: int | None = None) -> Iterator[None]:
    """Megatron's parallel state, of pipelines over all ranks unless they are given."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline or dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
    )
    try:
        with megatron_cpu.cpu_only():
            yield
    finally:
        parallel_state.destroy_model_parallel()


class Training:
    """A small GPT on this rank, in one chunk or more, and its optimizer; equal ones give equal results."""

    def __init__(self, virtual: int | None = None, group: int | None = None, *, apart: bool = False) -> None:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        config = TransformerConfig(
            num_layers=ranks * (virtual or 1),
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=virtual,
            microbatch_group_size_per_vp_stage=group,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            batch_p2p_sync=False,
            hidden_dropout=0.1,
        )
        torch.manual_seed(dist.get_rank())
        self.chunks = [_chunk(copy.copy(config) if apart else config, each, virtual) for each in range(virtual or 1)]
        self.config = self.chunks[0].config
        self.configs = [chunk.config for chunk in self.chunks]
        self.model = [Wrapper(chunk) for chunk in self.chunks]
        self.engine = MegatronModel(self.model)
        parameters = [each for chunk in self.chunks for each in chunk.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(self, microbatches: int, *, forward_only: bool = False) -> list[Any]:
        """The losses of one iteration, on the last rank."""
        torch.manual_seed(100 + dist.get_rank())
        data = torch.randint(VOCABULARY, (microbatches, ROWS, SEQUENCE), generator=torch.Generator().manual_seed(7))
        batches = [iter(data) for _ in self.model]
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.model if len(batches) > 1 else self.model[0],
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        if not forward_only:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def weights(self) -> list[Any]:
        return [each.detach().clone() for chunk in self.chunks for each in chunk.parameters()]

    @contextmanager
    def watched(self) -> Iterator[list[tuple[int, str, int]]]:
        """What really runs, as its modules and gradients tell it."""
        seat, ran, handles = self.engine.seat, [], []

        def watch(number: int, chunk: Any) -> None:
            stage = number * seat.ranks + seat.rank

            def forward(module: Any, args: Any, output: Any) -> None:
                microbatch = module.decoder.layers[0].current_microbatch  # the schedule writes it there
                ran.append((stage, "F", microbatch))
                if output.requires_grad:
                    output.register_hook(lambda gradient: ran.append((stage, "B", microbatch)))

            handles.append(chunk.register_forward_hook(forward))

        for number, chunk in enumerate(self.chunks):
            watch(number, chunk)
        yield ran
        for handle in handles:
            handle.remove()


def _chunk(config: Any, number: int, virtual: int | None) -> Any:
    stage = number if virtual else None
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=False,
        vp_stage=stage,
    )


def _forward_step(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    places = torch.arange(SEQUENCE).expand_as(tokens)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, places, hidden, labels=tokens), lambda losses: (losses.mean(), losses.mean().detach())


def orders(*shapes: str) -> None:
    """What the hook is told, what really runs, what the engine says before, and our generator's row are the same.

    Each shape is "virtual,group,microbatches", the first two 0 where there are none.
    """
    dist.init_process_group("gloo")
    for shape in shapes:
        virtual, group, microbatches = map(int, shape.split(","))
        with parallel(virtual or None):
            training = Training(virtual or None, group or None)
            seat, heard = training.engine.seat, Heard()
            with training.engine.attached(heard), training.watched() as ran:
                training.step(microbatches)
            row = interleaved_1f1b(seat.ranks, virtual or 1, microbatches, group or None).ranks[seat.rank]
            assert ran == list(row), (shape, ran)
            assert training.engine.order_for(microbatches) == row
            assert heard.iterations == [{"microbatches": microbatches, "ran": ran, "ended": True}], shape
    print("equal")
    dist.destroy_process_group()


def results() -> None:
    """Losses and weights are bit for bit those without a hook, and so is what the user's own timers are called with."""
    dist.init_process_group("gloo")
    for virtual in (None, 2):
        with parallel(virtual):
            plain, told = _trained(virtual, None), _trained(virtual, Heard())
            assert len(plain[0]) == len(told[0]) > 0
            assert all(torch.equal(a, b) for a, b in zip(plain[0], told[0], strict=True))
            assert len(plain[1]) > 20
            assert plain[1] == told[1]
    print("equal")
    dist.destroy_process_group()


def _trained(virtual: int | None, hook: Any) -> tuple[list[Any], list[Any]]:
    training, timers = Training(virtual), UserTimers()
    training.config.timers = timers
    with training.engine.attached(hook) if hook else nullcontext():
        losses = [loss for _ in range(3) for loss in training.step(4)]
    return [*losses, *training.weights(), torch.rand(1)], timers.calls


def evaluations() -> None:
    """Evaluation reaches no hook, with gradients or without."""
    dist.init_process_group("gloo")
    for virtual in (None, 2):
        with parallel(virtual):
            training, heard = Training(virtual), Heard()
            with training.engine.attached(heard):
                training.step(4, forward_only=True)
                training.step(4)
                with torch.no_grad():
                    training.step(2, forward_only=True)
                training.step(4)
            assert [each["microbatches"] for each in heard.iterations] == [4, 4]
            assert all(each["ended"] and each["ran"] == heard.iterations[0]["ran"] for each in heard.iterations)
    print("silent")
    dist.destroy_process_group()


def changes() -> None:
    """Another number of microbatches is told as it is, and the hook leaves its plan for that iteration, once."""
    dist.init_process_group("gloo")
    for virtual in (None, 2):
        with parallel(virtual):
            training = Training(virtual)
            seat = training.engine.seat
            schedule = interleaved_1f1b(seat.ranks, virtual or 1, 4)
            told = Told(_Program(schedule, seat.rank))
            with training.engine.attached(Hook(told, told, told.program)):
                for microbatches in (4, 6, 4, 4):
                    training.step(microbatches)
            count = len(schedule.ranks[seat.rank])
            assert told.ends == [None, "6 microbatches, and the plan has 4", None, None], told.ends
            # Until the odd one, then none, and from the end of the next on again.
            in_order = [*range(1, count), 0]
            assert told.wants == [0, *in_order, -1, 0, *in_order], told.wants
    print("left and back")
    dist.destroy_process_group()


class _Program:
    """As much of a `Program` as the hook reads."""

    def __init__(self, schedule: Any, rank: int) -> None:
        self.computations = schedule.ranks[rank]
        self.clocks = (1000,) * len(self.computations)
        self.plan = type("Plan", (), {"schedule": schedule})


def unknown() -> None:
    """Where no caller says how many microbatches there are, they are told as they come."""
    dist.init_process_group("gloo")
    with parallel():
        training, heard = Training(), Heard()
        with training.engine.attached(heard):
            timers = training.config.timers
            timers("forward-backward", log_level=1).start(barrier=False)
            for name in ("forward-compute", "forward-compute", "backward-compute"):
                timers(name, log_level=2).start()
                timers(name).stop()
            timers("forward-backward").stop()
        rank = dist.get_rank()
        ran = [(rank, "F", 0), (rank, "F", 1), (rank, "B", 0)]
        assert heard.iterations == [{"microbatches": None, "ran": ran, "ended": True}]
    print("told")
    dist.destroy_process_group()


def timers() -> None:
    """What the user asks of timers of any kind comes from those that were there."""
    dist.init_process_group("gloo")
    with parallel():
        training, given = Training(), UserTimers()
        config = training.config
        config.timers = given
        with training.engine.attached(Heard()):
            assert config.timers is not given
            assert config.timers("other", log_level=0) is not config.timers("other", log_level=0)  # as its own does
            assert config.timers("forward-compute").start() == "forward-compute started"
            assert config.timers("forward-compute").stop(barrier=True) == "forward-compute stopped"
            assert config.timers("forward-compute").elapsed() == 1.5
            assert config.timers.log(["a"]) == "logged ['a']"
            assert isinstance(copy.deepcopy(config).timers, UserTimers)
            assert isinstance(pickle.loads(pickle.dumps(config.timers)), UserTimers)
        assert config.timers is given
        config.timers = None
        with training.engine.attached(Heard()):
            assert config.timers("other", log_level=0).start() is None
            assert copy.deepcopy(config).timers is None
        assert config.timers is None
        config.timers = Timers(0, "max")
        with training.engine.attached(Heard()):
            training.step(2)
            assert not config.timers._timers  # no level is raised: each of the schedules' timers is a dummy
        assert isinstance(config.timers, Timers)
    print("passed on")
    dist.destroy_process_group()


def restores() -> None:
    """Each config has its own timers back, whatever ended the block, and those that are still kept tell nothing."""
    already = "a runtime is attached to this Megatron-core model already; leave its block first"
    dist.init_process_group("gloo")
    with parallel(2):
        training, heard = Training(2, apart=True), Heard()
        assert training.configs[0] is not training.configs[1]
        given = [UserTimers(), None]
        for config, each in zip(training.configs, given, strict=True):
            config.timers = each
        with suppress(ZeroDivisionError), training.engine.attached(heard):
            training.step(4)
            kept = training.config.timers
            with pytest.raises(UsageError, match=f"^{already}$"):
                _attach(training.engine)
            kept("forward-backward").start()
            kept("forward-compute").start()
            _fail()
        assert [config.timers for config in training.configs] == given
        kept("forward-compute").stop()
        kept("forward-backward").stop()
        kept("forward-backward").start()
        assert len(heard.iterations) == 2
        assert not heard.iterations[1]["ended"]
        again = Heard()
        with training.engine.attached(again):
            training.step(4)
        assert [each["ended"] for each in again.iterations] == [True]
    print("restored")
    dist.destroy_process_group()


def dies() -> None:
    """An iteration that ends in an error is begun anew by the next one, as Megatron-LM runs some twice."""
    dist.init_process_group("gloo")
    with parallel():
        training, seat = Training(), MegatronModel([]).seat
        schedule = interleaved_1f1b(seat.ranks, 1, 2)
        told = Told(_Program(schedule, seat.rank))
        with training.engine.attached(Hook(told, told, told.program)):
            handle = training.chunks[0].register_forward_pre_hook(_fail)
            with suppress(ZeroDivisionError):
                training.step(2)
            handle.remove()
            training.step(2)
        assert told.ends == ["0 computations, and the plan has 4", None], told.ends
    print("anew")
    dist.destroy_process_group()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def refusals() -> None:
    """What cannot be seen is refused with a reason, and nothing is changed."""
    graph = "Megatron-core is to replay whole iterations as one CUDA graph (full_iteration), which shows none of its "
    graph += "computations; train with graphs of layers, or without a plan"
    overlap = "overlap_moe_expert_parallel_comm makes Megatron-core run a forward and a backward as one, in which no "
    overlap += "clock can change; train without it, or without a plan"
    dist.init_process_group("gloo")
    with pytest.raises(UsageError, match=r"^Megatron's parallel state is not initialized; call initialize_model"):
        _ = MegatronModel([]).seat
    with parallel():
        fields: list[tuple[str, Any, str]] = [
            ("overlap_moe_expert_parallel_comm", True, overlap),
            ("cuda_graph_scope", [CudaGraphScope.full_iteration], graph),
            ("cuda_graph_scope", "full_iteration", graph),  # core 0.14 and 0.15
            ("cuda_graph_impl", "full_iteration", graph),  # core 0.17 and later
        ]
        for name, value, message in fields:
            training = Training()
            setattr(training.config, name, value)
            with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
                _attach(training.engine)
            assert training.config.timers is None
        with pytest.raises(UsageError, match=r"^a chunk has no config of Megatron-core \(.*; give the chunks as its"):
            _attach(MegatronModel([nn.Linear(2, 2)]))
        with pytest.raises(UsageError, match=r"^the chunks of the Megatron-core model have no parameters; give those"):
            _ = MegatronModel([nn.Identity()]).device
    print("refused")
    dist.destroy_process_group()


def _attach(engine: MegatronModel) -> None:
    with engine.attached(Heard()):
        pass


def megatron_lm() -> None:
    """The loops of Megatron-LM set and drop `config.timers`; every training iteration is told all the same."""
    dist.init_process_group("gloo")
    with parallel():
        variables = _global_variables()
        given = variables._GLOBAL_TIMERS
        training, heard = Training(), Heard()
        with training.engine.attached(heard):
            _train(training, variables)
        assert variables._GLOBAL_TIMERS is given
        assert training.config.timers is None
        assert [each["microbatches"] for each in heard.iterations] == [4, 4, 4]
        assert all(each["ended"] for each in heard.iterations)
        assert [call for call in given.calls if call[0] == "interval-time"] == [("interval-time", "start", (), {})]
        assert sum(call == ("forward-backward", "stop", (), {}) for call in given.calls) == 3
        variables._GLOBAL_TIMERS = None  # Megatron-LM's own initialization wants to find that
        with training.engine.attached(heard):
            assert variables._GLOBAL_TIMERS is None
    print("told")
    dist.destroy_process_group()


def _global_variables() -> Any:
    """A module in the shape of megatron.training.global_vars, which is not in the package of Megatron-core."""
    module: Any = ModuleType("megatron.training.global_vars")
    module._GLOBAL_TIMERS = UserTimers()
    module.get_timers = lambda: module._GLOBAL_TIMERS
    sys.modules[module.__name__] = module
    return module


def _train(training: Training, variables: Any) -> None:
    """As `train` of megatron/training/training.py uses timers, and `evaluate` in the midst of it."""
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
    """Two pipelines of two stages side by side, of data or of tensor parallel ranks; what is known of the order."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for tensor in (1, 2):
        with parallel(tensor=tensor, pipeline=2):
            seat = MegatronModel([]).seat
            assert (seat.rank, seat.ranks, seat.peers) == (rank // 2, 2, (rank % 2, rank % 2 + 2))
            assert seat.pipeline == (rank % 2 if tensor == 1 else 0)
    with parallel(pipeline=2):
        engine = Training().engine
        assert engine.device == torch.device("cpu")
        assert engine.order() is None
        for ramp, order in (([2, 2, 100], None), (None, engine.order_for(3))):
            num_microbatches_calculator.init_num_microbatches_calculator(rank, ramp, 6, 1, 2)
            assert engine.order() == order
            num_microbatches_calculator.destroy_num_microbatches_calculator()
        assert len(engine.order_for(3)) == 6
    print("seated")
    dist.destroy_process_group()
