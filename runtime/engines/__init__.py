"""Adapters to the training engines: what each engine runs, and where the runtime hooks into it.
Start at `engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.training.engine_kinds import SUPPORTED_ENGINES, engine_kind, megatron_chunks

if TYPE_CHECKING:
    from perseus_planner.runtime.engines.engine import Engine


def engine_of(engine: Any) -> Engine:
    """Return the adapter of a training engine.

    Args:
        engine: A DeepSpeed PipelineEngine; a Megatron-core model, or the list of its chunks; or a
            schedule of torch.distributed.pipelining.

    Raises:
        UsageError: If it is none of these, has an unsupported version, or has a runtime attached
            already.
    """
    kind = engine_kind(engine)
    if kind == "deepspeed":
        from perseus_planner.runtime.engines.deepspeed import DeepSpeedPipeline

        return DeepSpeedPipeline(engine)
    if kind == "torch":
        from perseus_planner.runtime.engines.torch_pipelining import TorchPipeline

        return TorchPipeline(engine)
    if kind == "megatron":
        from perseus_planner.runtime.engines.megatron import MegatronModel

        return MegatronModel(megatron_chunks(engine))
    raise UsageError(
        f"planner_runtime was given a {type(engine).__name__}; give it {SUPPORTED_ENGINES}"
    )
