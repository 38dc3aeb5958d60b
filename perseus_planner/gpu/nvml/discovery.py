"""Finds the GPUs that NVML shows on this node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotSupported
from perseus_planner.gpu.nvml.device import NvmlDevice, read_or_none
from perseus_planner.gpu.nvml.library import NVML

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)

_VGPU = 2

_MIG = (
    "a MIG instance has no clock or power of its own; turn MIG off (`nvidia-smi -mig 0`) and name "
    "the whole GPU, nvml:GPU-… or nvml:0"
)


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that NVML shows."""

    index: int  #: NVML index
    text: str  #: Text that opens the GPU, with its index if the UUID cannot be read
    name: str  #: Product name; empty if it cannot be read
    problem: str  #: Why the GPU cannot be opened; empty if it can


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """Return all GPUs that NVML shows on this node, by index, including those that cannot be
    opened.

    Raises:
        GpuError: If NVML cannot be used here; the text says what to do.
    """
    NVML.acquire()
    try:
        return tuple(_visible_gpu(index) for index in range(_count()))
    finally:
        NVML.release()


def find_device(which: str) -> NvmlDevice:
    """Return the GPU with an index, a UUID, the unique beginning of one, or a PCI bus id; NVML must
    be in use.

    Raises:
        GpuError: If there is no such GPU, or it cannot be opened.
        GpuNotSupported: If it is a MIG instance or a vGPU.
    """
    if which.upper().startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    pci = _PCI.fullmatch(which)
    if pci:
        device = _with_pci(which, f"{pci[1] or '0000'}:{pci[2]}.0")
    elif re.fullmatch("[0-9]{1,4}", which):
        device = _with_index(which)
    else:
        device = _with_uuid(which)
    _reject_vgpu(device)
    return device


def _visible_gpu(index: int) -> VisibleGpu:
    text, name, problem = f"nvml:{index}", "", ""
    try:
        device = _at(index)
        text = device.who
        name = device.text("nvmlDeviceGetName", "read its name")
        _reject_vgpu(device)
    except GpuError as error:
        problem = str(error)
    return VisibleGpu(index, text, name, problem)


def _with_index(which: str) -> NvmlDevice:
    if int(which) >= _count():
        raise _not_found(which)
    return _at(int(which))


def _with_pci(which: str, bus_id: str) -> NvmlDevice:
    handle = NVML.call("nvmlDeviceGetHandleByPciBusId", bus_id, who=f"nvml:{which}", what="find it")
    return _device(which, handle)


def _with_uuid(which: str) -> NvmlDevice:
    """Find a GPU by the beginning of its UUID, even if other GPUs cannot be read."""
    found, lost = [], None
    for index in range(_count()):
        try:
            device = _at(index)
        except GpuLost as error:
            lost = error
        except GpuError:
            continue
        else:
            if which and device.uuid.lower().startswith(which.lower()):
                found.append(device)
    if not found and lost:
        raise GpuLost(
            f"nvml:{which}: no GPU that responds has this UUID; it may be the one that is lost: "
            f"{lost}"
        )
    if not found:
        raise _not_found(which)
    if len(found) > 1:
        matches = ", ".join(device.who for device in found)
        raise GpuError(f"nvml:{which}: several GPUs match: {matches}; write more of the UUID")
    return found[0]


def _at(index: int) -> NvmlDevice:
    return _device(
        str(index),
        NVML.call("nvmlDeviceGetHandleByIndex", index, who=f"nvml:{index}", what="open it"),
    )


def _device(which: str, handle: Any) -> NvmlDevice:
    """Return the device of a handle, which must have a UUID: nothing else identifies it."""
    uuid = NvmlDevice(which, handle).text("nvmlDeviceGetUUID", "read its UUID")
    if uuid.startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    return NvmlDevice(uuid, handle)


def _reject_vgpu(device: NvmlDevice) -> None:
    mode = read_or_none(
        lambda: device.call("nvmlDeviceGetVirtualizationMode", what="read its virtualization mode")
    )
    if mode == _VGPU:
        raise GpuNotSupported(
            f"{device.who}: this is a vGPU, whose clock and power belong to the host; run on the "
            "host, or have a whole GPU passed through to this machine"
        )


def _count() -> int:
    count = NVML.call("nvmlDeviceGetCount", who="NVML", what="count the GPUs")
    if not 0 <= count <= 1024:  # no node has more
        raise GpuError(
            f"NVML: cannot count the GPUs: it returns {count}; check which libnvidia-ml.so.1 is "
            "loaded"
        )
    return int(count)


def _not_found(which: str) -> GpuError:
    """Return the error for a missing GPU, with a list of the GPUs that NVML shows."""
    shown = [
        f"{gpu.index} {gpu.text.removeprefix('nvml:')} {gpu.name or gpu.problem}"
        for gpu in visible_gpus()
    ]
    choose = f"choose one of: {'; '.join(shown)}" if shown else "NVML shows none on this node"
    return GpuError(f"nvml:{which}: NVML shows no such GPU; {choose}")
