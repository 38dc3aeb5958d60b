"""The PipelineEngine of DeepSpeed, and its DualPipeVEngine, followed through the instructions
that they execute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from perseus_planner.runtime.engines.engine import (
    PipelineRank,
    attached_once,
    check_free,
    check_has,
    replaced,
)
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    import torch

    from perseus_planner.runtime.hook import Hook

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

    Raises:
        UsageError: If the engine lacks an attribute used here, or a runtime is attached to it.
    """

    name = "DeepSpeed"

    def __init__(self, engine: Any) -> None:
        check_has(engine, _NEEDED, "DeepSpeed 0.14 to 0.19")
        check_free(engine)
        self._engine = engine
        self._stages = (engine.stage_id, 2 * engine.num_stages - 1 - engine.stage_id)  # by phase

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`."""
        engine, grid = self._engine, self._engine.grid
        return PipelineRank(
            engine.stage_id, engine.num_stages, grid.get_data_parallel_rank(), tuple(grid.pp_group)
        )

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        device: torch.device = self._engine.device
        return device

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        yield from self._engine.module.parameters()

    def order(self) -> tuple[Computation, ...]:
        """See `Engine.order`; read from the instructions of the engine's current training
        schedule.
        """
        kinds, counts, order = _kinds(), Counter[tuple[int, str]](), []
        for step in self._schedule().steps():
            for instruction in step:
                kind = kinds.get(type(instruction))
                if kind is not None:
                    stage = self._stages[instruction.kwargs.get("phase", 0)]
                    order.append(Computation(stage, kind, counts[stage, kind]))
                    counts[stage, kind] += 1
        return tuple(order)

    @contextmanager
    def attached(self, hook: Hook) -> Iterator[None]:
        """See `Engine.attached`.

        Raises:
            UsageError: If another hook is attached.
        """
        import torch

        engine, execute = self._engine, self._engine._exec_schedule

        def execute_hooked(schedule: Any) -> Any:
            if not torch.is_grad_enabled():  # an evaluation; DeepSpeed refuses to train like this
                return execute(schedule)
            hook.begin_iteration(schedule.num_micro_batches)
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
            hook.end_iteration()
            return result

        with attached_once(engine, _exec_schedule=execute_hooked):
            yield

    def _schedule(self) -> Any:
        engine = self._engine
        if hasattr(engine, "_train_schedule"):  # since 0.19.8, which brought a second schedule
            return engine._train_schedule()
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        return TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id)

    def _hooked_instructions(self, hook: Hook) -> dict[type, Callable[..., Any]]:
        """Return the instruction map of one iteration, with the hook called around forwards and
        backwards.
        """
        original: Mapping[type, Callable[..., Any]] = self._engine._INSTRUCTION_MAP
        return {
            **original,
            **{each: self._hooked(hook, original[each], kind) for each, kind in _kinds().items()},
        }

    def _hooked(self, hook: Hook, execute: Callable[..., Any], kind: str) -> Callable[..., Any]:
        begin, end, stages = hook.begin, hook.end, self._stages
        microbatches = tuple(count() for _ in stages)

        def execute_hooked(engine: Any, **arguments: Any) -> None:
            phase = arguments.get("phase", 0)
            begin(stages[phase], kind, next(microbatches[phase]))
            execute(engine, **arguments)
            end()

        return execute_hooked


def _kinds() -> dict[type, str]:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    return {ForwardPass: "F", BackwardPass: "B"}
