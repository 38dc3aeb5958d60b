"""FLOPs and bytes of each stage of a transformer on one GPU, in closed form.

FLOPs are those of matrix products, two for each multiply-add, as torch's `FlopCounterMode` and
Narayanan et al. (SC'21, appendix) count them, without norms, softmax, activations and loss. The
counter also counts the pairs of tokens that a causal mask hides, which "flash-causal" attention
does not compute.

Kinds are those of a `Profile`: F; I and W, the gradients of inputs and of weights; B = I + W. A
product of the forward with a weight has one product of its size in I and one in W; a product
without weights (attention) has two in I. Recomputation is counted in I, which comes first.

Bytes are those that no arithmetic hides: of norms, activations, residual sums, rotary positions,
embedding and loss, and of attention scores if those are written to memory. Each of these operations
reads its inputs and writes its outputs once, in `element_bytes`; only the loss computes in float32.
The factors of matrix products are loaded during their arithmetic and are not counted, which is true
for microbatches of some hundred tokens and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.units import TIME
from perseus_planner.estimate.kernel_times import layer_times
from perseus_planner.estimate.operations import (
    Exchange,
    Operation,
    Pass,
    Product,
    embedding_operations,
    head_operations,
    layer_operations,
)
from perseus_planner.estimate.transformer import Transformer, check_split
from perseus_planner.gpu.simulated.model import OpCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perseus_planner.estimate.system import System
    from perseus_planner.gpu.simulated.model import Load

_Sum = TypeVar("_Sum", OpCost, float)

KINDS = ("F", "B", "I", "W")
"""The kinds of computations of a stage, in the order of a profile."""


@dataclass(frozen=True)
class TransformerPipeline:
    """A transformer on the stages of a pipeline.

    Raises:
        UsageError: If the stages do not add up to the layers of the transformer, or the bandwidth
            is not above 0.
    """

    name: str  #: Name for tables
    transformer: Transformer  #: The model
    split: tuple[int, ...]  #: Layers of each stage, as from `split_layers`
    #: Bandwidth of a GPU to its tensor group, if it is not that of the system; infinite if traffic
    #: takes no time.
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_split(self.transformer, self.split)
        if (
            self.link_bytes_per_s not in (None, math.inf)
            and TIME.accept(self.link_bytes_per_s) is None
        ):
            raise UsageError(
                f"link: {shown(self.link_bytes_per_s)} is not a bandwidth; give one above 0"
            )

    def on(self, system: System) -> System:
        """Return `system` with the bandwidth of the links, if one was given."""
        if self.link_bytes_per_s is None:
            return system
        if math.isinf(self.link_bytes_per_s):
            return replace(system, link_bytes_per_s=math.inf, exchange_s=0.0)
        return replace(system, link_bytes_per_s=self.link_bytes_per_s)

    def loads(self, system: System) -> list[dict[str, Load]]:
        """Return time and power over clocks of each kind for one microbatch on one GPU of each
        stage.
        """
        system = self.on(system)
        stages = layer_times(self.transformer, system).stages(self.split)
        return [{kind: phases.load(system) for kind, phases in stage.items()} for stage in stages]


def stage_op_costs(
    transformer: Transformer, stages: int | Sequence[int]
) -> list[dict[str, OpCost]]:
    """Return the cost of each kind for one microbatch on one GPU of each stage.

    The first stage also has the embedding; the last has the final norm, the language-model head and
    the loss.

    Args:
        transformer: The model.
        stages: Number of stages, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    return _by_stage(transformer, stages, _cost)


def stage_traffic(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, float]]:
    """Return the bytes that one GPU of each stage sends to its tensor group for one microbatch, for
    each kind.

    A layer of Megatron sums its output over the group twice in the forward, and the gradient of its
    input twice in the backward (Narayanan et al., section 2.3); embedding and head do so once. A
    ring sends 2 (t - 1) / t of the summed tensor. Sequence parallelism gathers once more in the
    backward (Korthikanti et al., section 4.2.2).

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    degree = transformer.tensor_degree

    def sent(operations: Iterable[Operation]) -> float:
        return sum(
            2 * (degree - 1) / degree * one.bytes * one.sums
            for one in operations
            if isinstance(one, Exchange)
        )

    return _by_stage(transformer, stages, sent)


def _by_stage(
    transformer: Transformer,
    stages: int | Sequence[int],
    measure: Callable[[Iterable[Operation]], _Sum],
) -> list[dict[str, _Sum]]:
    """Return the sum over the operations of each kind on each stage."""
    split = check_split(transformer, stages)
    layer, embedding, head = (
        {kind: measure(some) for kind, some in operations(transformer).items()}
        for operations in (layer_operations, embedding_operations, head_operations)
    )
    found = []
    for stage, layers in enumerate(split):
        parts = {kind: layer[kind] * layers for kind in "FIW"}
        for there, more in ((stage == 0, embedding), (stage == len(split) - 1, head)):
            parts = {kind: parts[kind] + more[kind] for kind in "FIW"} if there else parts
        found.append({**parts, "B": parts["I"] + parts["W"]})
    return found


def _cost(operations: Iterable[Operation]) -> OpCost:
    flops = sum(each.flops for each in operations if isinstance(each, Product))
    return OpCost(flops, sum(each.bytes for each in operations if isinstance(each, Pass)))
