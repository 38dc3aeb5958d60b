"""Times of a layer, the embedding and the head on a system, by phases.

A matrix product takes the longer of its arithmetic and of loading its factors; elementwise
operations take their bytes at the bandwidth of the memory; a ring of t GPUs sends 2 (t - 1) / t of
a tensor to sum it. Where GPUs of several nodes share a layer, they sum in each node first and then
between nodes. A layer takes the longer of its kernels and of the host that launches them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.estimate.operations import (
    ACCUMULATED,
    Accumulation,
    Exchange,
    Operation,
    Pass,
    Product,
    embedding_operations,
    head_operations,
    layer_operations,
)
from perseus_planner.estimate.system import kernel_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from perseus_planner.estimate.system import System
    from perseus_planner.estimate.transformer import Transformer
    from perseus_planner.gpu.simulated.model import Load


@dataclass(frozen=True)
class Phases:
    """What the time of a computation consists of."""

    megacycles: float = 0.0  #: Cycles of arithmetic, in millions
    memory_s: float = 0.0  #: Seconds that wait for memory
    exchange_s: float = 0.0  #: Seconds of traffic in the tensor group
    idle_s: float = 0.0  #: Seconds in which the GPU waits for its host

    def __add__(self, other: Phases) -> Phases:
        """Return both, one after the other."""
        return Phases(
            self.megacycles + other.megacycles,
            self.memory_s + other.memory_s,
            self.exchange_s + other.exchange_s,
            self.idle_s + other.idle_s,
        )

    def __mul__(self, times: float) -> Phases:
        """Return `times` such computations."""
        return Phases(
            self.megacycles * times,
            self.memory_s * times,
            self.exchange_s * times,
            self.idle_s * times,
        )

    def time_s(self, clock_mhz: float) -> float:
        """Return the seconds at a clock that no power limit lowers."""
        return self.megacycles / clock_mhz + self.memory_s + self.exchange_s + self.idle_s

    def load(self, system: System) -> Load:
        """Return time and power over clocks on a GPU of `system`."""
        return system.gpu.phases(self.megacycles, self.memory_s, self.exchange_s, self.idle_s)


@dataclass(frozen=True)
class LayerTimes:
    """Phases of each kind, F, B, I and W, on one GPU of a tensor group, for one microbatch."""

    layer: Mapping[str, Phases]
    embedding: Mapping[str, Phases]
    head: Mapping[str, Phases]

    def stages(self, split: Sequence[int]) -> list[dict[str, Phases]]:
        """Return the phases of stages with so many layers."""
        stage_phases = [
            {kind: layer * layers for kind, layer in self.layer.items()} for layers in split
        ]
        for stage, more in ((stage_phases[0], self.embedding), (stage_phases[-1], self.head)):
            stage.update({kind: phases + more[kind] for kind, phases in stage.items()})
        return stage_phases


def layer_times(shape: Transformer, system: System) -> LayerTimes:
    """Return the times of the parts of a model for one microbatch; measured ones where `system`
    has them.
    """
    parts: dict[str, dict[str, Phases]] = {}
    for name, operations in (
        ("layer", layer_operations(shape)),
        ("embedding", embedding_operations(shape)),
        ("head", head_operations(shape)),
    ):
        # The list of the embedding's passes is complete; that of a layer lacks copies and dropout.
        on = replace(system, passes=1.0) if name == "embedding" else system
        parts[name] = {kind: phases_of(some, shape, on) for kind, some in operations.items()}
        if name == "layer" and shape.overlap_traffic:
            parts[name] = {
                kind: _overlapped(some, shape, system) for kind, some in parts[name].items()
            }
        parts[name]["B"] = parts[name]["I"] + parts[name]["W"]
    forward_s, backward_s = system.host_forward_s, system.host_backward_s
    if shape.recomputation == "full":
        backward_s += forward_s
    hosts_s = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    layer = {
        kind: _with_host(parts["layer"][kind], host_s, system) for kind, host_s in hosts_s.items()
    }
    times = LayerTimes(layer, parts["embedding"], parts["head"])
    return _measured(times, shape, system)


def phases_of(operations: Iterable[Operation], shape: Transformer, system: System) -> Phases:
    """Return the phases of operations, one after the other."""
    megacycles = memory_s = exchange_s = idle_s = 0.0
    bytes_per_s = system.memory_share * system.gpu.bytes_per_s
    for operation in operations:
        if isinstance(operation, Product):
            low = operation.weights and shape.precision == "fp8"
            cycles = product_megacycles(operation, system, fp8=low)
            loaded = 1 if low else shape.element_bytes
            size = (
                0.0
                if operation.fused
                else loaded * (operation.m + operation.n) * operation.k
                + shape.element_bytes * operation.m * operation.n
            )
            load_s = operation.number * size / bytes_per_s
            if load_s * system.top_mhz > cycles:
                memory_s += load_s
            else:
                megacycles += cycles
            idle_s += system.launch_s
        elif isinstance(operation, Pass):
            memory_s += system.passes * operation.bytes / bytes_per_s
        elif isinstance(operation, Accumulation):
            memory_s += ACCUMULATED * operation.weights / bytes_per_s
        elif isinstance(operation, Exchange):
            exchange_s += operation.sums * sum_s(operation.bytes, shape.tensor_degree, system)
    return Phases(megacycles, memory_s, exchange_s, idle_s)


def product_megacycles(product: Product, system: System, *, fp8: bool = False) -> float:
    """Return the cycles of a product's arithmetic, in millions."""
    rate = system.product_flops_per_cycle * (system.fp8_speedup if fp8 else 1.0)
    rate *= system.fused_share if product.fused else 1.0
    rate *= 1.0 if product.aligned else system.unaligned_share
    return product.flops / rate / 1e6


def sum_s(size: float, gpus: int, system: System) -> float:
    """Return the seconds in which `gpus` GPUs sum tensors of `size` bytes."""
    near = min(gpus, system.gpus_per_node)
    nodes = gpus / near
    inside_s = system.exchange_s + 2 * (near - 1) / near * size / system.link_bytes_per_s
    if nodes <= 1:
        return inside_s if gpus > 1 else 0.0
    return (
        inside_s + system.network_s / 2 + 2 * (nodes - 1) / nodes * size / system.node_bytes_per_s
    )


def _overlapped(phases: Phases, shape: Transformer, system: System) -> Phases:
    """Return the phases with traffic behind the products.

    Factors and results are sent in as many pieces as there are GPUs, of which one waits for nothing
    to hide it (Wang et al., "Overlap communication with dependent computation via decomposition",
    ASPLOS 2023).
    """
    hidden_s = min(
        phases.megacycles / system.top_mhz, phases.exchange_s * (1 - 1 / shape.tensor_degree)
    )
    return replace(phases, exchange_s=phases.exchange_s - hidden_s)


def _with_host(phases: Phases, host_s: float, system: System) -> Phases:
    """Return the phases, and the idle time of a GPU that is faster than its host."""
    return phases + Phases(idle_s=max(0.0, host_s - phases.time_s(system.top_mhz)))


def _measured(times: LayerTimes, shape: Transformer, system: System) -> LayerTimes:
    """Scale the phases to the measured times, if there are any for this shape."""
    measured = system.kernels.get(kernel_key(shape))
    if measured is None:
        return times
    wanted_s = {"F": measured.layer_forward_s, "B": measured.layer_backward_s}
    ratios = {
        kind: seconds / _top_s(times.layer[kind], system) for kind, seconds in wanted_s.items()
    }
    layer = {
        kind: phases * ratios["F" if kind == "F" else "B"] for kind, phases in times.layer.items()
    }
    ends_s = sum(
        _top_s(part[kind], system) for part in (times.embedding, times.head) for kind in "FB"
    )
    ratio = measured.head_s / ends_s
    embedding, head = (
        {k: p * ratio for k, p in part.items()} for part in (times.embedding, times.head)
    )
    return LayerTimes(layer, embedding, head)


def _top_s(phases: Phases, system: System) -> float:
    """Return the seconds at the top clock that is set, under the power limit."""
    return phases.load(system).time_s(system.top_mhz)
