"""Times of a layer, the embedding and the head on a system, by phases.

A matrix product takes the longer of its arithmetic and of loading its factors; elementwise
operations take their bytes at the bandwidth of the memory; a ring of t GPUs sends 2 (t - 1) / t of
a tensor to sum it. Where GPUs of several nodes share a layer, they sum in each node first and then
between nodes; tokens go to each node of their experts once, and there to the experts. A layer takes
the longer of its kernels and of the host that launches them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.estimate.operations import (
    ACCUMULATED,
    Accumulation,
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
    exchange_s: float = 0.0  #: Seconds of traffic between GPUs
    idle_s: float = 0.0  #: Seconds in which the GPU waits for its host
    #: Those cycles of `megacycles` in which attention computes, which draws less power.
    fused_megacycles: float = 0.0

    def __add__(self, other: Phases) -> Phases:
        """Return both, one after the other."""
        return Phases(*map(operator.add, self._values, other._values))

    def __mul__(self, times: float) -> Phases:
        """Return `times` such computations."""
        return Phases(*(value * times for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return (
            self.megacycles,
            self.memory_s,
            self.exchange_s,
            self.idle_s,
            self.fused_megacycles,
        )

    def time_s(self, clock_mhz: float) -> float:
        """Return the seconds at a clock that no power limit lowers."""
        return self.megacycles / clock_mhz + self.memory_s + self.exchange_s + self.idle_s

    def load(self, system: System) -> Load:
        """Return time and power over clocks on a GPU of `system`."""
        fused = self.fused_megacycles / self.megacycles if self.megacycles else 0.0
        return system.gpu.phases(
            self.megacycles,
            self.memory_s,
            self.exchange_s,
            self.idle_s,
            1 - fused * (1 - system.fused_activity),
        )


@dataclass(frozen=True)
class LayerTimes:
    """Phases of each kind, F, B, I and W, on one GPU of a tensor group, for one microbatch."""

    layer: Mapping[str, Phases]
    embedding: Mapping[str, Phases]
    head: Mapping[str, Phases]

    def stages(self, split: Sequence[int]) -> list[dict[str, Phases]]:
        """Return the phases of stages with so many layers."""
        alike = {
            layers: {kind: layer * layers for kind, layer in self.layer.items()}
            for layers in set(split)
        }
        stage_phases = [alike[layers].copy() for layers in split]
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
        parts[name]["B"] = parts[name]["I"] + parts[name]["W"]
    parts["layer"] = {
        kind: _with_host(phases, kind, shape, system) for kind, phases in parts["layer"].items()
    }
    return _measured(LayerTimes(**parts), shape, system)


def phases_of(operations: Iterable[Operation], shape: Transformer, system: System) -> Phases:
    """Return the phases of operations, one after the other."""
    megacycles = fused = memory_s = idle_s = ring_s = 0.0
    exchange_s = dict.fromkeys(("tensor", "context", "expert"), 0.0)
    bytes_per_s = system.memory_share * system.gpu.bytes_per_s
    for operation in operations:
        if isinstance(operation, Product):
            narrow = shape.narrow_bytes if operation.weights else None
            cycles = product_megacycles(operation, system, shape.precision)
            size = (
                0.0
                if operation.fused
                else (narrow or shape.element_bytes) * (operation.m + operation.n) * operation.k
                + shape.element_bytes * operation.m * operation.n
            )
            load_s = operation.number * size / bytes_per_s
            if load_s * system.top_mhz > cycles:
                memory_s += load_s
            else:
                megacycles += cycles
            if operation.fused:
                fused += cycles
            idle_s += system.launch_s
        elif isinstance(operation, Pass):
            memory_s += system.passes * operation.bytes / bytes_per_s
        elif isinstance(operation, Accumulation):
            memory_s += ACCUMULATED * operation.weights / bytes_per_s
        elif operation.group == "tensor":
            exchange_s["tensor"] += operation.sums * sum_s(
                operation.bytes, shape.tensor_degree, system
            )
        elif operation.group == "expert":
            exchange_s["expert"] += operation.sums * dispatch_s(operation.bytes, shape, system)
        else:
            near = shape.tensor_degree * shape.context_degree <= system.gpus_per_node
            ring_s += operation.bytes / (
                system.link_bytes_per_s if near else system.node_bytes_per_s / system.gpus_per_node
            )
    if shape.overlap_traffic:
        # Factors and results are sent in as many pieces as there are GPUs, of which one waits for
        # nothing to hide it (Wang et al., "Overlap communication with dependent computation via
        # decomposition", ASPLOS 2023).
        exchange_s["tensor"] -= min(
            megacycles / system.top_mhz, exchange_s["tensor"] * (1 - 1 / shape.tensor_degree)
        )
    # Keys and values are passed on while attention computes with those before.
    exchange_s["context"] = max(0.0, ring_s - fused / system.top_mhz)
    return Phases(megacycles, memory_s, sum(exchange_s.values()), idle_s, fused)


def product_megacycles(product: Product, system: System, precision: str = "bf16") -> float:
    """Return the cycles of a product's arithmetic, in millions."""
    rate = system.product_flops_per_cycle
    if product.weights:
        rate *= {"fp8": system.fp8_speedup, "mxfp8": system.fp8_speedup}.get(precision, 1.0)
        rate *= system.fp4_speedup if precision == "nvfp4" else 1.0
    rate *= system.fused_share if product.fused else 1.0
    rate *= system.grouped_share if product.grouped else 1.0
    rate *= 1.0 if product.aligned else system.unaligned_share
    return product.flops / rate / 1e6


def sum_s(size: float, gpus: int, system: System) -> float:
    """Return the seconds in which `gpus` GPUs sum tensors of `size` bytes.

    Within a node GPUs add to the latency, and few have less bandwidth than many.
    """
    if gpus == 1:
        return 0.0
    near = min(gpus, system.gpus_per_node)
    nodes = gpus / near
    share = 1 - system.link_lost / near
    inside_s = system.exchange_s + system.exchange_gpu_s * (near - 2)
    inside_s += 2 * (near - 1) / near * size / system.link_bytes_per_s / share
    if nodes <= 1:
        return inside_s
    return (
        inside_s + system.network_s / 2 + 2 * (nodes - 1) / nodes * size / system.node_bytes_per_s
    )


def dispatch_s(size: float, shape: Transformer, system: System) -> float:
    """Return the seconds of an all-to-all of a GPU's tokens of `size` bytes with their experts.

    Experts are drawn evenly: of n nodes k draws touch n (1 - (1 - 1 / n)^k).
    """
    degree, used = shape.expert_degree, shape.experts_used
    nodes = max(1.0, degree / system.gpus_per_node)
    touched = nodes * (1 - (1 - 1 / nodes) ** used)
    far = min(touched, shape.routed_nodes or touched) * (1 - 1 / nodes)
    near_s = used * (1 - 1 / degree) / system.link_bytes_per_s
    per_byte_s = near_s + far * system.gpus_per_node / system.node_bytes_per_s
    return system.exchange_s + size * per_byte_s / system.dispatch_share


def _with_host(phases: Phases, kind: str, shape: Transformer, system: System) -> Phases:
    """Return the phases, and the idle time of a GPU that runs ahead of its host, which launches
    the kernels of a layer and of its collectives.
    """
    sums_s = 2 * system.host_exchange_s if shape.tensor_degree > 1 else 0.0
    forward_s, backward_s = system.host_forward_s + sums_s, system.host_backward_s + sums_s
    if shape.recomputation == "full":
        backward_s += forward_s
    host_s = {"F": forward_s, "B": backward_s}.get(kind, backward_s / 2)
    gpu_s = phases.time_s(system.top_mhz)
    return phases + Phases(idle_s=(gpu_s**4 + host_s**4) ** 0.25 - gpu_s)


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
