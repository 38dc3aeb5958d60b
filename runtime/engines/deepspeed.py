"""The PipelineEngine of DeepSpeed, and its DualPipeVEngine: told by the instructions that they execute."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from perseus_planner.runtime.engines.attachment import attached_once, check_free, check_has, replaced
from perseus_planner.runtime.engines.engine import Seat
from perseus_planner.schedules import Computation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from perseus_planner.runtime.hook import Hook

_NEEDED = ("_exec_schedule", "_INSTRUCTION_MAP", "grid", "micro_batches", "num_stages", "stage_id")


class DeepSpeedPipeline:
    """One rank of a PipelineEngine; a forward is told with its loss.

    The engine looks up how to execute an instruction in `_INSTRUCTION_MAP`, so that its methods cannot be wrapped but
    the values of this map can; and it runs an iteration by `_exec_schedule`, in training and in evaluation. An
    instruction does not say its microbatch: it is the k-th forward or backward of a stage that is microbatch k.

    A rank of a DualPipeVEngine holds the stages r and 2 ranks - 1 - r, which instructions call phases 0 and 1. Their
    backwards are whole.

    Args:
        engine: of DeepSpeed 0.14 to 0.19.

    Raises:
        UsageError: it lacks what is held on to here, or a runtime is attached to it.
    """

    name = "DeepSpeed"

    def __init__(self, engine: Any) -> None:
        check_has(engine, _NEEDED, "DeepSpeed 0.14 to 0.19")
        check_free(engine)
        self._engine = engine
        self._stages = (engine.stage_id, 2 * engine.num_stages - 1 - engine.stage_id)  # by phase

    @property
    def seat(self) -> Seat:
        """See `Engine.seat`."""
        engine, grid = self._engine, self._engine.grid
        return Seat(engine.stage_id, engine.num_stages, grid.get_data_parallel_rank(), tuple(grid.pp_group))

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        device: torch.device = self._engine.device
        return device

    def order(self) -> tuple[Computation, ...]:
        """See `Engine.order`: the instructions of the schedule that the engine trains by now."""
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
            UsageError: another hook is attached.
        """
        import torch

        engine, execute = self._engine, self._engine._exec_schedule

        def told(schedule: Any) -> Any:
            if not torch.is_grad_enabled():  # which training refuses, and evaluation runs in
                return execute(schedule)
            hook.begin_iteration(schedule.num_micro_batches)
            try:
                # The engine keeps what it executed last, which after a failure would be of ours.
                with replaced(engine, _INSTRUCTION_MAP=self._told_instructions(hook), _exec_instr=None):
                    return execute(schedule)
            finally:
                hook.end_iteration()

        with attached_once(engine, _exec_schedule=told):
            yield

    def _schedule(self) -> Any:
        engine = self._engine
        if hasattr(engine, "_train_schedule"):  # since 0.19.8, which brought a second schedule
            return engine._train_schedule()
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        return TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id)

    def _told_instructions(self, hook: Hook) -> dict[type, Callable[..., Any]]:
        """How to execute each instruction, for one iteration."""
        found: Mapping[type, Callable[..., Any]] = self._engine._INSTRUCTION_MAP
        told = {each: self._told(hook, found[each], kind) for each, kind in _kinds().items()}
        return {**found, **told}

    def _told(self, hook: Hook, execute: Callable[..., Any], kind: str) -> Callable[..., Any]:
        begin, end, stages = hook.begin, hook.end, self._stages
        microbatches = tuple(count() for _ in stages)

        def told(engine: Any, **arguments: Any) -> None:
            phase = arguments.get("phase", 0)
            begin(stages[phase], kind, next(microbatches[phase]))
            execute(engine, **arguments)
            end()

        return told


def _kinds() -> dict[type, str]:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    return {ForwardPass: "F", BackwardPass: "B"}
