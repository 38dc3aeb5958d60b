"""The PipelineEngine of DeepSpeed, and its DualPipeVEngine, followed through the instructions that
they execute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.engine import (
    EngineStage,
    PipelineRank,
    attached_once,
    check_free,
    check_has,
    preserved,
    replaced,
)
from perseus_planner.engines.guard import Guard, HookGuard
from perseus_planner.engines.torch_state import copy_tensors, tensors

if TYPE_CHECKING:
    import torch

    from perseus_planner.engines.guard import IterationHook
    from perseus_planner.schedules import Computation

_NEEDED = ("_exec_schedule", "_INSTRUCTION_MAP", "grid", "micro_batches", "num_stages", "stage_id")


class DeepSpeedPipeline:
    """One rank of a PipelineEngine; the forward of the last stage includes its loss.

    The engine looks up how to execute an instruction in `_INSTRUCTION_MAP`, so wrapping its methods
    would have no effect, but wrapping the values of this map does. It runs an iteration by
    `_exec_schedule`, both in training and in evaluation. An instruction does not name its
    microbatch: the k-th forward or backward of a stage is microbatch k.

    A rank of a DualPipeVEngine holds the stages r and 2 ranks - 1 - r, which instructions call
    phases 0 and 1. Its backwards are not split.

    Args:
        engine: The engine, of DeepSpeed 0.14 to 0.19.
    """

    name = "DeepSpeed"
    packages = ("torch", "deepspeed")
    splits_backward = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def check(self) -> None:
        """See `Engine.check`."""
        check_has(self._engine, _NEEDED, "DeepSpeed 0.14 to 0.19")
        check_free(self._engine)

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`."""
        engine = self._engine
        grid = self._engine.grid
        return PipelineRank(
            engine.stage_id, engine.num_stages, grid.get_data_parallel_rank(), tuple(grid.pp_group)
        )

    @property
    def tensor_rank(self) -> int:
        """See `Engine.tensor_rank`."""
        return int(self._engine.grid.get_slice_parallel_rank())

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        device: torch.device = self._engine.device
        return device

    def stages(self) -> list[EngineStage]:
        """See `Engine.stages`."""
        engine = self._engine
        module = self._engine.module
        if self._is_v:
            raise UsageError(
                "DualPipeV engines cannot be profiled; give `planner profile` a function that "
                "builds the stages"
            )

        @contextmanager
        def preserve_offset() -> Iterator[None]:
            offset = module.micro_offset  # counts forwards, and seeds layers
            try:
                yield
            finally:
                module.micro_offset = offset

        loss = engine.is_last_stage() and module.loss_fn is not None
        return [
            EngineStage(
                engine.stage_id,
                module,
                module.forward,  # without the engine's hooks, which prepare for a backward by it
                loss=(module, "loss_fn") if loss else None,
                preserve_state=preserve_offset,
            )
        ]

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        yield from self._engine.module.parameters()

    def microbatches(self) -> int:
        """See `Engine.microbatches`."""
        return int(self._engine.micro_batches)

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """See `Engine.iteration`."""
        return {"schedule": "1f1b", "microbatches": self._engine.micro_batches}

    def order(self) -> tuple[Computation, ...]:
        """See `Engine.order`; read from the instructions of the engine's current training
        schedule.
        """
        from perseus_planner.schedules import Computation

        kinds = _kinds()
        counts = Counter[tuple[int, str]]()
        order = []
        for step in self._schedule().steps():
            for instruction in step:
                kind = kinds.get(type(instruction))
                if kind is not None:
                    # The k-th of a kind on a stage is that of microbatch k, as instructions do not
                    # say it.
                    stage = self._numbers[instruction.kwargs.get("phase", 0)]
                    order.append(Computation(stage, kind, counts[stage, kind]))
                    counts[stage, kind] += 1
        return tuple(order)

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        import torch

        guard = HookGuard(hook)
        engine = self._engine
        execute = self._engine._exec_schedule

        def execute_hooked(schedule: Any) -> Any:
            # Without gradients it is an evaluation; DeepSpeed refuses to train like this.
            if not guard.ask(torch.is_grad_enabled):
                guard.note_evaluation()
                return execute(schedule)
            return guard.run(partial(execute, schedule), self._begin, guard, schedule)

        with attached_once(engine, _exec_schedule=execute_hooked):
            try:
                yield
            finally:
                guard.close()

    def _begin(self, stack: ExitStack, guard: HookGuard, schedule: Any) -> None:
        """Show an iteration."""
        engine = self._engine
        # The engine keeps the last method it executed, which would be a wrapper.
        stack.enter_context(preserved(engine, "_exec_instr"))
        stack.enter_context(replaced(engine, _INSTRUCTION_MAP=self._hooked_instructions(guard)))
        count = schedule.num_micro_batches
        has_batch = engine.is_first_stage() and engine.data_iterator is not None
        # A V's first rank draws for the last stage as well, so what it draws is not read ahead.
        if self._is_v or not (has_batch and guard.wants_batch):
            guard.show(count)
            return
        ahead = ReadAhead(engine.data_iterator)
        # Before it is read, as what was read is the training's also after a fault.
        stack.enter_context(ahead.given_to(engine))
        guard.show(count, partial(ahead.read, count))

    @property
    def _is_v(self) -> bool:
        """Whether it is a DualPipeVEngine, whose first rank also draws for the last stage."""
        return any(base.__name__ == "DualPipeVEngine" for base in type(self._engine).__mro__)

    @property
    def _numbers(self) -> tuple[int, int]:
        """The number of the stage of each phase."""
        engine = self._engine
        return engine.stage_id, 2 * engine.num_stages - 1 - engine.stage_id

    def _schedule(self) -> Any:
        engine = self._engine
        if hasattr(engine, "_train_schedule"):  # since 0.19.8, which brought a second schedule
            return engine._train_schedule()
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        return TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id)

    def _hooked_instructions(self, guard: HookGuard) -> dict[type, Callable[..., Any]]:
        """Return the instruction map of one iteration, with the hook called around forwards and
        backwards, and before the optimizer's step.
        """
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        original: Mapping[type, Callable[..., Any]] = self._engine._INSTRUCTION_MAP

        def begin_update(*_: Any, **__: Any) -> None:
            guard.begin_update()

        return {
            **original,
            OptimizerStep: guard.around(original[OptimizerStep], before=begin_update),
            **{
                instruction: self._hooked(guard, original[instruction], kind)
                for instruction, kind in _kinds().items()
            },
        }

    def _hooked(
        self, guard: HookGuard, execute: Callable[..., Any], kind: str
    ) -> Callable[..., Any]:
        stages = self._numbers
        # Made anew for each iteration, so each begins with microbatch 0.
        microbatches = tuple(count() for _ in stages)

        def begin(_: Any, phase: int = 0, **__: Any) -> None:
            guard.begin(stages[phase], kind, next(microbatches[phase]))

        return guard.computing(execute, begin)


class ReadAhead:
    """Reads ahead of an iterator.

    Args:
        iterator: The iterator.

    Attributes:
        rest: Gives what was read and what follows, in order, and raises where reading raised. Its
            steps run none of our code, and it sees what is read after it was made.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._errors: list[Exception] = []
        self.rest: Iterator[Any] = chain(self._read, map(_raise, self._errors), iterator)

    def read(self, count: int) -> list[Any]:
        """Read so many ahead, or fewer if the iterator ends or raises.

        Raises:
            UsageError: If a microbatch is written over one that was read before; the training still
                gets each as it was.
        """
        copies: list[Any] = []  #: of what was read
        for _ in range(count):
            try:
                self._read.append(next(self._iterator))
            # Not an error here: the training sees the end itself when it gets there.
            except StopIteration:
                break
            # Raised again where the training reads this far.
            except Exception as error:
                self._errors.append(error)
                break
            # An iterator may reuse its memory: what was read before is then no longer what it was.
            overwritten = [
                index
                for index, copy in enumerate(copies)
                if _is_overwritten(copy, self._read[index], self._read[-1])
            ]
            if overwritten:
                for index in overwritten:
                    # The training gets the copy, so that it trains on what it would have read.
                    self._read[index] = copies[index]
                raise UsageError(
                    "the iterator of the data writes a microbatch over one before, so it cannot be "
                    "read ahead; have it return new tensors, or say the work of each batch by "
                    "runtime.batch(work=...)"
                )
            copies.append(copy_tensors(self._read[-1]))
        return list(self._read)

    @contextmanager
    def given_to(self, engine: Any) -> Iterator[None]:
        """Have a DeepSpeed engine draw from `rest` inside the block."""
        engine.data_iterator = self.rest
        try:
            yield
        finally:
            if engine.data_iterator is self.rest:
                engine.data_iterator = self._iterator


def _is_overwritten(copy: Any, microbatch: Any, newest: Any) -> bool:
    """Return whether a microbatch is no longer what was copied of it, as the newest one has its
    memory.
    """
    import torch

    memory = {tensor.data_ptr() for tensor in tensors(newest)}
    pairs = zip(tensors(copy), tensors(microbatch), strict=True)
    return any(now.data_ptr() in memory and not torch.equal(before, now) for before, now in pairs)


def _raise(error: Exception) -> Any:
    raise error


def wrap_training(module: Any, guard: Guard, begin: Callable[[Any], bool]) -> None:
    """See `engines.wrap_training`."""
    train = module.PipelineEngine.train_batch

    @wraps(train)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard.call(begin, self)
        return train(self, *args, **kwargs)

    module.PipelineEngine.train_batch = train_batch


def _kinds() -> dict[type, str]:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    return {ForwardPass: "F", BackwardPass: "B"}
