"""Systems: GPUs, the links between them, and how fast the kernels of training run there.

Constants of the A100 are fitted to measured iteration times of GPT models on 2 to 512 A100s
(vTrain, MICRO 2024), those of Hopper and Blackwell to published throughputs on H100, B200 and
GB200, by `benchmarks/time_fit.py`. Other GPUs of a generation have the same shares of their own
peaks, which is an assumption.

System files hold measured kernels, as `planner calibrate --kernels` writes them:

    format: perseus-planner/system
    version: 1
    gpu: h100-sxm
    node_bytes_per_s: 200.0e+9
    kernels:
    - {hidden: 2048, heads: 16, vocabulary: 50304, sequence: 2048, microbatch: 2,
       layer_forward_s: 0.0021, layer_backward_s: 0.0042, head_s: 0.0055}

Numbers that a file leaves out are those of the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import GpuError, UsageError, did_you_mean, shown
from perseus_planner.base.fields import dump
from perseus_planner.base.files import write_file
from perseus_planner.base.units import COUNT, TIME
from perseus_planner.estimate.transformer import Transformer, transformer_of
from perseus_planner.gpu.simulated.model import CATALOG, GPUS

if TYPE_CHECKING:
    from perseus_planner.gpu.simulated.model import GpuModel


def kernel_key(shape: Transformer) -> Transformer:
    """Return what a measured time of the kernels of a model is for: all of a layer's shape, and how
    GPUs share and run it, without what does not change a layer or head.
    """
    alike = not (shape.dense_layers or shape.global_every)
    return replace(
        shape,
        layers=1 if alike else shape.layers,
        tied=True,
        gradient_bytes=4,
        embedding_norm=False,
    )


class KernelTimes(NamedTuple):
    """Measured seconds at the top clock on each GPU of a tensor group, traffic in the group
    included.

    The backward of a layer includes its recomputation; the head includes embedding and loss.
    """

    layer_forward_s: float
    layer_backward_s: float
    head_s: float


@dataclass(frozen=True)
class System:
    """GPUs, their links, and the speed of kernels."""

    gpu: GpuModel  #: Model of each GPU: clocks, memory bandwidth, power
    memory_bytes: float  #: Device memory of each GPU
    product_flops_per_cycle: float  #: bf16 FLOPs of long matrix products, over all SMs
    fp8_speedup: float  #: How many times as fast products in FP8 and MXFP8 are; 1 without
    fp4_speedup: float  #: How many times as fast products in NVFP4 are; 1 without
    fused_share: float  #: Speed of flash attention, as a share of that of products
    #: Power of flash attention above static power, as a share of that of products.
    fused_activity: float
    grouped_share: float  #: Speed of the products of experts, as a share of that of others
    #: Speed of products with a size that is no multiple of 8, as a share of that of others.
    unaligned_share: float
    memory_share: float  #: Share of the memory's bandwidth that kernels reach
    #: How often elementwise kernels of layers and head pass over their tensors, as a multiple of
    #: the fewest.
    passes: float
    launch_s: float  #: Fixed time of a kernel
    host_forward_s: float  #: Time in which the host launches the forward of a layer
    host_backward_s: float  #: Time in which the host launches the backward of a layer
    host_exchange_s: float  #: Time in which the host launches a collective
    exchange_s: float  #: Fixed time of a collective of two GPUs of a node
    exchange_gpu_s: float  #: Fixed time that each further GPU adds
    link_bytes_per_s: float  #: Bandwidth of a GPU to many others of its node, each way
    link_lost: float  #: Share of it that is lost in a group of t GPUs, times t
    dispatch_share: float  #: Share of the bandwidth that an all-to-all of experts reaches
    transfer_bytes_per_s: float  #: Bandwidth of a transfer from one stage to the next in a node
    gpus_per_node: int  #: GPUs that NVLink joins: of a node, or of a rack
    node_bytes_per_s: float  #: Bandwidth of a node's network, each way
    network_s: float  #: Fixed time of a message between nodes
    optimizer_bytes: float  #: Bytes that the optimizer's step reads and writes for a parameter
    node_overhead_w: float  #: Power of a node beside its GPUs, watts: the least
    node_overhead_most_w: float  #: The most
    #: Measured times, which replace those of the model.
    kernels: Mapping[Transformer, KernelTimes] = field(default_factory=dict)

    @property
    def top_mhz(self) -> float:
        """Highest clock of the GPUs."""
        return float(self.gpu.clocks_mhz[0])

    def limited(self, power_limit_w: float | None) -> System:
        """Return the system with this power limit on each GPU, watts; itself for None.

        Raises:
            GpuError: If the GPU cannot have this limit.
        """
        if power_limit_w is None:
            return self
        least_w, most_w = self.gpu.power_limits_w
        if not least_w <= power_limit_w <= most_w:
            raise GpuError(
                f"{self.gpu.name}: a power limit of {power_limit_w:g} W is out of range; give one "
                f"from {least_w:g} to {most_w:g} W"
            )
        return replace(self, gpu=replace(self.gpu, power_limit_w=power_limit_w))


def with_link(system: System, bytes_per_s: float) -> System:
    """Return the system with this bandwidth of a GPU to its tensor group; infinite if traffic takes
    no time.

    Raises:
        UsageError: If it is not above 0.
    """
    if math.isinf(bytes_per_s):
        return replace(system, link_bytes_per_s=math.inf, exchange_s=0.0, exchange_gpu_s=0.0)
    if TIME.accept(bytes_per_s) is None:
        raise UsageError(f"link: {shown(bytes_per_s)} is not a bandwidth; give one above 0")
    return replace(system, link_bytes_per_s=bytes_per_s, link_lost=0.0)


NUMBERS = tuple(each.name for each in fields(System) if each.name not in ("gpu", "kernels"))
"""The attributes that are numbers, as a system file has them."""


# Measured all-reduces of 2, 4 and 8 A100 of a node, 1 MiB to 1 GiB (NCCL, vTrain), within 13 %.
_EXCHANGE_S, _EXCHANGE_GPU_S, _LINK_SHARE, _LINK_LOST = 35.2e-6, 6.4e-6, 0.797, 0.536
_NETWORK_SHARE = 0.72  # of the nominal bandwidth, fitted to iterations of vTrain on 64 to 512 A100

# The speed of kernels by generation; `efficiency` is the share of the peak that products reach.
_AMPERE: Mapping[str, float] = {
    # Fitted to measured iterations (vTrain). The host's times are those of unfused kernels of 2021.
    "efficiency": 0.88,
    "host_forward_s": 0.71e-3,
    "host_backward_s": 2.28e-3,
    "host_exchange_s": 0.1e-3,
    # FlashAttention-2's 225 TFLOPS of the A100's 312 (Dao, 2023). Its power is assumed.
    "fused_share": 0.7,
    "fused_activity": 0.4,
}
_HOPPER: Mapping[str, float] = {
    # Fitted to published throughputs (modern_gpus.csv), with twice the speed in FP8, as the
    # datasheet has it. Long products alone reach 0.80 (H200, NVIDIA aiconfigurator).
    "efficiency": 0.68,
    "fp8_speedup": 2.0,
    "fused_share": 0.7,
    # Attention draws 71 % of the limit (H200) at the top clock.
    "fused_activity": 0.37,
}
_BLACKWELL: Mapping[str, float] = {
    # As Hopper's; long products alone reach 0.73 (B200). FP4 by the datasheet, not measured.
    **_HOPPER,
    "efficiency": 0.60,
    "fp4_speedup": 4.0,
    # 89 % of the limit (B200) and 82 % (GB200).
    "fused_activity": 0.46,
}
_KERNELS = {"ampere": _AMPERE, "hopper": _HOPPER, "blackwell": _BLACKWELL}


def _system(
    name: str,
    *,
    kernels: str,
    memory_mib: float,
    link_gb_per_s: float,
    node_gb_per_s: float,
    overhead_w: tuple[float, float],
    gpus_per_node: int = 8,
    **changes: float,
) -> System:
    """Return the system of one kind of GPU, as `gpus.yaml` says of it.

    Args:
        name: The GPU.
        kernels: The generation whose speeds kernels have.
        memory_mib: Device memory that nvidia-smi reports, MiB.
        link_gb_per_s: Bandwidth of a GPU to its node, GB/s each way, by the datasheet.
        node_gb_per_s: Bandwidth of a node's network, GB/s each way, by the datasheet.
        overhead_w: The least and the most of a node's power beside its GPUs, watts.
        gpus_per_node: As in `System`.
        changes: Other numbers.
    """
    numbers: dict[str, Any] = {
        "fp8_speedup": 1.0,
        "fp4_speedup": 1.0,
        "host_forward_s": 0.0,
        "host_backward_s": 0.0,
        "host_exchange_s": 0.0,
        "grouped_share": 0.92,
        "dispatch_share": 0.75,
        **_KERNELS[kernels],
        **changes,
    }
    gpu, efficiency = GPUS[name], numbers.pop("efficiency")
    return System(
        gpu=CATALOG[name],
        memory_bytes=memory_mib * 2**20,
        product_flops_per_cycle=efficiency * gpu["peak_tflops"] * 1e12 / (gpu["peak_mhz"] * 1e6),
        unaligned_share=0.254,  # fitted to measured iterations (vTrain), as are the passes
        memory_share=0.85,  # assumed
        passes=1.88,
        launch_s=3e-6,
        exchange_s=_EXCHANGE_S,
        exchange_gpu_s=_EXCHANGE_GPU_S,
        link_bytes_per_s=_LINK_SHARE * link_gb_per_s * 1e9,
        link_lost=_LINK_LOST,
        transfer_bytes_per_s=15e9,  # NCCL's send and receive on measured A100s
        gpus_per_node=gpus_per_node,
        node_bytes_per_s=_NETWORK_SHARE * node_gb_per_s * 1e9,
        network_s=15e-6,
        # Adam: four in float32 read, three written, the parameter written in bf16; gradients are
        # made float32 first
        optimizer_bytes=36.0,
        node_overhead_w=overhead_w[0],
        node_overhead_most_w=overhead_w[1],
        **numbers,
    )


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {name: _system(name, **row["system"]) for name, row in GPUS.items()}
)
"""The systems by the name of their GPU."""


def system_of(gpu: str) -> System:
    """Return the system of a kind of GPU.

    Raises:
        GpuError: If there is none.
    """
    name = gpu.removeprefix("simulated:")
    if name not in SYSTEMS:
        advice = did_you_mean(gpu, SYSTEMS) or f"choose one of: {', '.join(SYSTEMS)}"
        raise GpuError(f"--gpu: there is no GPU {gpu!r}; {advice}")
    return SYSTEMS[name]


_SHOWN = ("tensor_degree", "microbatch", "recomputation")
_OPTIONAL = tuple(
    each.name
    for each in fields(Transformer)
    if each.default is not MISSING and each.name not in _SHOWN
)
_FORMAT = "perseus-planner/system"
_VERSION = 1
_DIMENSIONS = ("hidden", "heads", "vocabulary", "sequence")
_TIMES = ("layer_forward_s", "layer_backward_s", "head_s")


def save_system(system: System, path: Path, measured: tuple[str, ...] = ()) -> None:
    """Write a system file with the measured numbers and kernels.

    Raises:
        UsageError: If the file cannot be written.
    """
    view = system_view(system, measured)
    content = {"format": _FORMAT, "version": _VERSION, "gpu": view["gpu"], **view["measured"]}
    content["kernels"] = view["kernels"]
    write_file(path, yaml.safe_dump(content, sort_keys=False), UsageError)


def system_view(system: System, measured: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers that were measured of a system, and its kernels with their times, for
    JSON.
    """
    return {
        "gpu": system.gpu.name,
        "measured": {name: getattr(system, name) for name in measured},
        "kernels": [
            {**dump(key, optional=_OPTIONAL), **times._asdict()}
            for key, times in system.kernels.items()
        ],
    }


def load_system(path: Path) -> System:
    """Read a system file.

    Raises:
        UsageError: If it cannot be read or is not valid; the text names file and line.
        GpuError: If there is no such GPU.
    """
    document = read_document(path, _FORMAT, _VERSION, ("gpu",), ("kernels", *NUMBERS), UsageError)
    system = system_of(document.text("gpu"))
    changes = {
        name: document.number(name, COUNT if name == "gpus_per_node" else TIME)
        for name in NUMBERS
        if name in document.values
    }
    kernels = {}
    if document.values.get("kernels", []) != []:
        names = [each.name for each in fields(Transformer)]
        for entry in document.sections("kernels", (*_DIMENSIONS, *_TIMES), names):
            times = KernelTimes(*(entry.number(name, TIME) for name in _TIMES))
            try:
                key = transformer_of({k: v for k, v in entry.values.items() if k not in _TIMES})
            except UsageError as error:
                raise entry.refusal("layer_forward_s", f"{error}") from None
            kernels[kernel_key(key)] = times
    return replace(system, **changes, kernels=kernels)
