"""The PipelineEngine of DeepSpeed, and its DualPipeVEngine, followed through the instructions that
they execute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.engine import (
    EngineStage,
    IterationHook,
    PipelineRank,
    attached_once,
    check_free,
    check_has,
    replaced,
)

if TYPE_CHECKING:
    import torch

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
        engine, grid = self._engine, self._engine.grid
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
        engine, module = self._engine, self._engine.module
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

        kinds, counts, order = _kinds(), Counter[tuple[int, str]](), []
        for step in self._schedule().steps():
            for instruction in step:
                kind = kinds.get(type(instruction))
                if kind is not None:
                    stage = self._numbers[instruction.kwargs.get("phase", 0)]
                    order.append(Computation(stage, kind, counts[stage, kind]))
                    counts[stage, kind] += 1
        return tuple(order)

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        import torch

        engine, execute = self._engine, self._engine._exec_schedule

        def execute_hooked(schedule: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation; DeepSpeed refuses to train like this
                hook.note_evaluation()
                return execute(schedule)
            given = engine.data_iterator if engine.is_first_stage() and not self._is_v else None
            ahead = None if given is None else ReadAhead(given)
            count = schedule.num_micro_batches
            hook.begin_iteration(count, None if ahead is None else partial(ahead.read, count))
            if ahead is not None and ahead.has_read:
                engine.data_iterator = ahead
            try:
                # The engine keeps the last method it executed in _exec_instr; after a failure that
                # would be a wrapper.
                with replaced(
                    engine, _INSTRUCTION_MAP=self._hooked_instructions(hook), _exec_instr=None
                ):
                    result = execute(schedule)
            except BaseException:
                hook.abandon_iteration()
                raise
            finally:
                if ahead is not None and engine.data_iterator is ahead:
                    engine.data_iterator = given
            hook.end_iteration()
            return result

        with attached_once(engine, _exec_schedule=execute_hooked):
            yield

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

    def _hooked_instructions(self, hook: IterationHook) -> dict[type, Callable[..., Any]]:
        """Return the instruction map of one iteration, with the hook called around forwards and
        backwards, and before the optimizer's step.
        """
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        original: Mapping[type, Callable[..., Any]] = self._engine._INSTRUCTION_MAP

        def update(*args: Any, **arguments: Any) -> None:
            hook.begin_update()
            original[OptimizerStep](*args, **arguments)

        return {
            **original,
            OptimizerStep: update,
            **{
                instruction: self._hooked(hook, original[instruction], kind)
                for instruction, kind in _kinds().items()
            },
        }

    def _hooked(
        self, hook: IterationHook, execute: Callable[..., Any], kind: str
    ) -> Callable[..., Any]:
        begin, end, stages = hook.begin, hook.end, self._numbers
        microbatches = tuple(count() for _ in stages)

        def execute_hooked(engine: Any, **arguments: Any) -> None:
            phase = arguments.get("phase", 0)
            begin(stages[phase], kind, next(microbatches[phase]))
            execute(engine, **arguments)
            end()

        return execute_hooked


class ReadAhead:
    """Gives what was read ahead of an iterator, in its order, and raises where it raised."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: deque[Any] = deque()
        self._error: Exception | None = None
        self.has_read = False

    def read(self, count: int) -> list[Any]:
        """Read so many ahead, or fewer if the iterator ends or raises."""
        self.has_read = True
        for _ in range(count):
            try:
                self._read.append(next(self._iterator))
            except Exception as error:
                self._error = error
                break
        return list(self._read)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._read:
            return self._read.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._iterator)


def wrap_training(module: Any, begin: Callable[[Any], bool]) -> None:
    """See `engines.wrap_training`."""
    train = module.PipelineEngine.train_batch

    @wraps(train)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin(self)
        return train(self, *args, **kwargs)

    module.PipelineEngine.train_batch = train_batch


def _kinds() -> dict[type, str]:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    return {ForwardPass: "F", BackwardPass: "B"}
