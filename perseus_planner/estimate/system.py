"""Systems: GPUs, the links between them, and how fast the kernels of training run there.

Constants of the A100 are fitted to measured iteration times of GPT models on 2 to 512 A100s
(vTrain, MICRO 2024) by `benchmarks/time_fit.py`; they hold for its unfused kernels. Other GPUs have
the same shares of their own peaks, which is an assumption unless an entry says otherwise.

System files hold measured kernels, as `planner calibrate --kernels` writes them:

    format: perseus-planner/system
    version: 1
    gpu: h100-sxm
    node_bytes_per_s: 200.0e+9
    kernels:
    - {hidden: 2048, sequence: 2048, tensor_degree: 1, microbatch: 2, recomputation: none,
       layer_forward_s: 0.0021, layer_backward_s: 0.0042, head_s: 0.0055}

Numbers that a file leaves out are those of the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import GpuError, UsageError, did_you_mean
from perseus_planner.base.files import write_file
from perseus_planner.base.units import COUNT, TIME
from perseus_planner.estimate.transformer import CHOICES
from perseus_planner.gpu.simulated.model import CATALOG

if TYPE_CHECKING:
    from perseus_planner.estimate.transformer import Transformer
    from perseus_planner.gpu.simulated.model import GpuModel


class KernelKey(NamedTuple):
    """What a measured kernel time is for: the shape of a layer, and how GPUs share it."""

    hidden: int
    sequence: int
    tensor_degree: int
    microbatch: int
    recomputation: str


def kernel_key(shape: Transformer) -> KernelKey:
    """Return what a measured time of the kernels of a model is for."""
    return KernelKey(
        shape.hidden, shape.sequence, shape.tensor_degree, shape.microbatch, shape.recomputation
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
    fp8_speedup: float  #: How many times as fast products in FP8 are
    fused_share: float  #: Speed of flash attention, as a share of that of products
    #: Speed of products with a size that is no multiple of 8, as a share of that of others.
    unaligned_share: float
    memory_share: float  #: Share of the memory's bandwidth that kernels reach
    #: How often elementwise kernels of layers and head pass over their tensors, as a multiple of
    #: the fewest.
    passes: float
    launch_s: float  #: Fixed time of a kernel
    host_forward_s: float  #: Time in which the host launches the forward of a layer
    host_backward_s: float  #: Time in which the host launches the backward of a layer
    exchange_s: float  #: Fixed time of a collective in a node
    link_bytes_per_s: float  #: Bandwidth of a GPU to the others of its node, each way
    transfer_bytes_per_s: float  #: Bandwidth of a transfer from one stage to the next in a node
    gpus_per_node: int  #: GPUs of a node
    node_bytes_per_s: float  #: Bandwidth of a node's network, each way
    network_s: float  #: Fixed time of a message between nodes
    #: Bytes of a parameter that data-parallel GPUs send, between nodes times (d - 1) / d; 8 for
    #: sums in float32.
    reduction_bytes: float
    optimizer_bytes: float  #: Bytes that the optimizer's step reads and writes for a parameter
    node_overhead_w: float  #: Power of a node beside its GPUs, watts
    #: Measured times, which replace those of the model.
    kernels: Mapping[KernelKey, KernelTimes] = field(default_factory=dict)

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


NUMBERS = tuple(each.name for each in fields(System) if each.name not in ("gpu", "kernels"))
"""The attributes that are numbers, as a system file has them."""


def _system(
    name: str,
    memory_mib: float,
    peak_flops: float,
    peak_mhz: float,
    *,
    link_gb_per_s: float,
    node_gb_per_s: float,
    node_overhead_w: float,
    efficiency: float = 0.80,
    fp8_speedup: float = 1.0,
    reduction_bytes: float = 8.0,
) -> System:
    """Return the system of one kind of GPU.

    Args:
        name: The GPU in the catalogue of simulated GPUs.
        memory_mib: Device memory that nvidia-smi reports, MiB.
        peak_flops: Dense bf16 FLOPS of the datasheet.
        peak_mhz: Clock that the datasheet assumes.
        link_gb_per_s: Bandwidth between the GPUs of a node that collectives reach, GB/s.
        node_gb_per_s: Bandwidth between nodes that transfers reach, GB/s.
        node_overhead_w: As in `System`.
        efficiency: Share of the peak that long products reach.
        fp8_speedup: As in `System`.
        reduction_bytes: As in `System`.
    """
    return System(
        gpu=CATALOG[name],
        memory_bytes=memory_mib * 2**20,
        product_flops_per_cycle=efficiency * peak_flops / (peak_mhz * 1e6),
        fp8_speedup=fp8_speedup,
        fused_share=0.7,  # FlashAttention-2's 225 TFLOPS of the A100's 312 (Dao, 2023)
        unaligned_share=0.254,
        memory_share=0.85,  # assumed
        passes=1.88,
        launch_s=3e-6,
        host_forward_s=0.71e-3,
        host_backward_s=2.28e-3,
        exchange_s=460e-6,
        link_bytes_per_s=link_gb_per_s * 1e9,
        transfer_bytes_per_s=15e9,  # NCCL's send and receive on measured A100s
        gpus_per_node=8,
        node_bytes_per_s=node_gb_per_s * 1e9,
        network_s=15e-6,
        reduction_bytes=reduction_bytes,
        # Adam: four in float32 read, three written, the parameter written in bf16
        optimizer_bytes=30.0,
        node_overhead_w=node_overhead_w,
    )


_SYSTEMS = (
    # Datasheet of 80 GB: 312 TFLOPS; NVLink 300 GB/s each way, network 4 x 200 Gb/s a node, of
    # which 83 % and gradients summed in fp16 fit best. Efficiency fitted.
    _system(
        "a100-sxm",
        81920,
        312e12,
        1410,
        link_gb_per_s=300,
        node_gb_per_s=83,
        node_overhead_w=1500,
        efficiency=0.87,
        reduction_bytes=4.0,
    ),
    # Datasheet: 989.4 TFLOPS dense, NVLink 450 GB/s each way (half as fast again as the A100's), 8
    # x 400 Gb/s a node. Clocks and cap as in the catalogue. FP8: see B200. The overhead of a node:
    # 10.2 kW at most (DGX H100) less 5.6 kW of GPUs are 4.6 kW with fans at full speed; 1.7 kW
    # assumed in the mean.
    _system(
        "h100-sxm",
        81559,
        989.4e12,
        1830,
        link_gb_per_s=450,
        node_gb_per_s=288,
        node_overhead_w=1700,
        fp8_speedup=1.5,
    ),
    # As the H100. Long bf16 products reach 691 TFLOPS (median of those at the power limit, NVIDIA
    # aiconfigurator), which is 80 % of the peak at 1590 MHz.
    _system(
        "h200",
        143771,
        989.4e12,
        1830,
        link_gb_per_s=450,
        node_gb_per_s=288,
        node_overhead_w=1700,
        fp8_speedup=1.5,
    ),
    # Datasheet of the HGX: 2250 TFLOPS dense; NVLink 900 GB/s each way. Long bf16 products reach
    # 1399 TFLOPS at the power limit and block-scaled FP8 2116 (medians, NVIDIA aiconfigurator): 1.5
    # times as fast.
    _system(
        "b200",
        183359,
        2250e12,
        1850,
        link_gb_per_s=900,
        node_gb_per_s=288,
        node_overhead_w=2500,
        efficiency=0.73,
        fp8_speedup=1.5,
    ),
    # Datasheets; links are PCIe 4.0 x16 at 80 % (NVLink on V100), networks 100 Gb/s a node. No FP8
    # but on the L40S.
    _system(
        "a100-pcie", 81920, 312e12, 1410, link_gb_per_s=25, node_gb_per_s=9, node_overhead_w=1000
    ),
    _system("a40", 46068, 149.7e12, 1740, link_gb_per_s=25, node_gb_per_s=9, node_overhead_w=1000),
    _system(
        "l40s",
        46068,
        362e12,
        2520,
        link_gb_per_s=25,
        node_gb_per_s=9,
        node_overhead_w=1000,
        fp8_speedup=1.5,
    ),
    _system("v100", 32768, 125e12, 1530, link_gb_per_s=120, node_gb_per_s=9, node_overhead_w=1000),
)

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {name: each for name in CATALOG for each in _SYSTEMS if each.gpu.name == name}
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


_FORMAT = "perseus-planner/system"
_VERSION = 1
_COUNTS = ("hidden", "sequence", "tensor_degree", "microbatch")
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
        "kernels": [{**key._asdict(), **times._asdict()} for key, times in system.kernels.items()],
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
    if "kernels" in document.values and document.values["kernels"] != []:
        for entry in document.sections("kernels", (*_COUNTS, "recomputation", *_TIMES), ()):
            what = entry.text("recomputation")
            if what not in CHOICES["recomputation"]:
                raise entry.refusal(
                    "recomputation", f"give {' or '.join(CHOICES['recomputation'])}"
                )
            hidden, sequence, tensor, microbatch = (entry.number(name, COUNT) for name in _COUNTS)
            forward_s, backward_s, head_s = (entry.number(name, TIME) for name in _TIMES)
            kernels[KernelKey(hidden, sequence, tensor, microbatch, what)] = KernelTimes(
                forward_s, backward_s, head_s
            )
    return replace(system, **changes, kernels=kernels)
