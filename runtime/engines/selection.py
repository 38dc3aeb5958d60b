"""Which adapter follows an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.runtime.engines.deepspeed import DeepSpeedPipeline
from perseus_planner.runtime.engines.torch_pipelining import TorchPipeline
from perseus_planner.training.engine_kinds import KNOWN, engine_kind, megatron_chunks

if TYPE_CHECKING:
    from perseus_planner.runtime.engines.engine import Engine


def engine_of(engine: Any) -> Engine:
    """The adapter of a training engine.

    Args:
        engine: a DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a schedule of
            torch.distributed.pipelining.

    Raises:
        UsageError: it is none of these, of a version that cannot be followed, or attached to a runtime already.
    """
    kind = engine_kind(engine)
    if kind == "deepspeed":
        return DeepSpeedPipeline(engine)
    if kind == "torch":
        return TorchPipeline(engine)
    if kind == "megatron":
        from perseus_planner.runtime.engines.megatron import MegatronModel

        return MegatronModel(megatron_chunks(engine))
    raise UsageError(f"planner_runtime was given a {type(engine).__name__}; give it {KNOWN}")
