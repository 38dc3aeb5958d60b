"""FLOPs and bytes of each stage of a transformer on one GPU, in closed form.

FLOPs are those of matrix products, two for each multiply-add, as torch's `FlopCounterMode` and Narayanan et al. (SC'21,
appendix) count them, without norms, softmax, activations and loss. The counter also counts the pairs of tokens that a
causal mask hides, which "flash-causal" attention does not compute.

Kinds are those of a `Profile`: F; I and W, the gradients of inputs and of weights; B = I + W. A product of the forward
with a weight has one product of its size in I and one in W; a product without weights (attention) has two in I.
Recomputation is counted in I, which comes first.

Bytes are those that no arithmetic hides: of norms, activations, residual sums, rotary positions, embedding and loss,
and of attention scores if those are written to memory. Each of these operations reads its inputs and writes its outputs
once, in `element_bytes`; only the loss computes in float32. The factors of matrix products are loaded during their
arithmetic and are not counted, which is true for microbatches of some hundred tokens and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError, shown
from perseus_planner.estimate.kernel_times import layer_times
from perseus_planner.estimate.operations import (
    Operations,
    Pass,
    Product,
    embedding_operations,
    head_operations,
    layer_operations,
)
from perseus_planner.estimate.transformer import Transformer, check_split
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.quantities import TIME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.estimate.system import System
    from perseus_planner.gpu.simulated.model import Load

KINDS = ("F", "B", "I", "W")
"""The kinds of computations of a stage, in the order of a profile."""


@dataclass(frozen=True)
class TransformerPipeline:
    """A transformer on the stages of a pipeline.

    Attributes:
        name: Name for tables.
        transformer: The model.
        split: Layers of each stage, as from `split_layers`.
        link_bytes_per_s: Bandwidth of a GPU to its tensor group, if it is not that of the system; infinite if traffic
            takes no time.

    Raises:
        UsageError: If the stages do not add up to the layers of the transformer, or the bandwidth is not above 0.
    """

    name: str
    transformer: Transformer
    split: tuple[int, ...]
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_split(self.transformer, self.split)
        if self.link_bytes_per_s not in (None, math.inf) and TIME.accept(self.link_bytes_per_s) is None:
            raise UsageError(f"link: {shown(self.link_bytes_per_s)} is not a bandwidth; give one above 0")

    def on(self, system: System) -> System:
        """Return `system` with the bandwidth of the links, if one was given."""
        if self.link_bytes_per_s is None:
            return system
        if math.isinf(self.link_bytes_per_s):
            return replace(system, link_bytes_per_s=math.inf, exchange_s=0.0, exchange_per_gpu_s=0.0)
        return replace(system, link_bytes_per_s=self.link_bytes_per_s)

    def loads(self, system: System) -> list[dict[str, Load]]:
        """Return time and power over clocks of each kind for one microbatch on one GPU of each stage."""
        system = self.on(system)
        times, last = layer_times(self.transformer, system), len(self.split) - 1
        return [
            {kind: phases.load(system) for kind, phases in kinds.items()}
            for kinds in (
                times.stage(layers, first=stage == 0, last=stage == last, system=system)
                for stage, layers in enumerate(self.split)
            )
        ]


def stage_op_costs(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, OpCost]]:
    """Return the cost of each kind for one microbatch on one GPU of each stage.

    The first stage also has the embedding; the last has the final norm, the language-model head and the loss.

    Args:
        transformer: The model.
        stages: Number of stages, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    split = check_split(transformer, stages)
    layer, costs = _costs(layer_operations(transformer)), []
    for stage, layers in enumerate(split):
        parts = {kind: layer[kind] * layers for kind in "FIW"}
        if stage == 0:
            parts = _added(parts, _costs(embedding_operations(transformer)))
        if stage == len(split) - 1:
            parts = _added(parts, _costs(head_operations(transformer)))
        costs.append({**parts, "B": parts["I"] + parts["W"]})
    return costs


def stage_traffic(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, float]]:
    """Return the bytes that one GPU of each stage sends to its tensor group for one microbatch, for each kind.

    A layer of Megatron sums its output over the group twice in the forward, and the gradient of its input twice in the
    backward (Narayanan et al., section 2.3); embedding and head do so once. A ring sends 2 (t - 1) / t of the summed
    tensor. With sequence parallelism the volume is the same (Korthikanti et al., section 4.2.2).

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    split, degree = check_split(transformer, stages), transformer.tensor_degree
    one = 2 * (degree - 1) / degree * transformer.tokens * transformer.hidden * transformer.element_bytes
    again = 2 if transformer.recomputation == "full" else 0
    traffic = []
    for stage, layers in enumerate(split):
        forward = one * (2 * layers + (stage == 0))
        backward = one * ((2 + again) * layers + (stage == len(split) - 1))
        traffic.append({"F": forward, "B": backward, "I": backward, "W": 0.0})
    return traffic


def _costs(operations: Operations) -> dict[str, OpCost]:
    return {
        kind: OpCost(
            sum(each.flops for each in some if isinstance(each, Product)),
            sum(each.bytes for each in some if isinstance(each, Pass)),
        )
        for kind, some in operations.items()
    }


def _added(parts: Mapping[str, OpCost], more: Mapping[str, OpCost]) -> dict[str, OpCost]:
    return {kind: cost + more[kind] for kind, cost in parts.items()}
