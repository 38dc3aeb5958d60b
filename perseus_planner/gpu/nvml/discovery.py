"""Which GPUs NVML shows on this node, and which of them a text names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from perseus_planner.errors import GpuError, GpuLost, GpuNotSupported
from perseus_planner.gpu.nvml.device import NvmlDevice, answer
from perseus_planner.gpu.nvml.library import NVML

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)

_VGPU = 2

_MIG = (
    "a MIG instance has no clock or power of its own; turn MIG off (`nvidia-smi -mig 0`) and name the whole GPU, "
    "nvml:GPU-… or nvml:0"
)


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that NVML shows.

    Attributes:
        index: NVML's index of it.
        text: what opens it; by its index where its UUID cannot be read.
        name: what its maker calls it; empty where it cannot be read.
        problem: why it cannot be opened; empty if it can.
    """

    index: int
    text: str
    name: str
    problem: str


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """The GPUs that NVML shows on this node, by its indices; those that cannot be opened too.

    Raises:
        GpuError: NVML is not usable here; the text says what to do.
    """
    NVML.acquire()
    try:
        return tuple(_seen(index) for index in range(_count()))
    finally:
        NVML.release()


def selected(which: str) -> NvmlDevice:
    """The GPU that an index, a UUID, a unique beginning of one, or a PCI bus id names; NVML must be in use.

    Raises:
        GpuError: there is no such GPU, or it cannot be opened.
        GpuNotSupported: it is a MIG instance or a vGPU.
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
    _refuse_vgpu(device)
    return device


def _seen(index: int) -> VisibleGpu:
    text, name, problem = f"nvml:{index}", "", ""
    try:
        device = _at(index)
        text = device.who
        name = device.text("nvmlDeviceGetName", "read its name")
        _refuse_vgpu(device)
    except GpuError as error:
        problem = str(error)
    return VisibleGpu(index, text, name, problem)


def _with_index(which: str) -> NvmlDevice:
    if int(which) >= _count():
        raise _none(which)
    return _at(int(which))


def _with_pci(which: str, bus_id: str) -> NvmlDevice:
    handle = NVML.call("nvmlDeviceGetHandleByPciBusId", bus_id, who=f"nvml:{which}", what="find it")
    return _device(which, handle)


def _with_uuid(which: str) -> NvmlDevice:
    """By beginning, among those that can be read: a GPU that is lost hides no other."""
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
        raise GpuLost(f"nvml:{which}: none of the GPUs that answer; it may be the one that is lost: {lost}")
    if not found:
        raise _none(which)
    if len(found) > 1:
        fits = ", ".join(device.who for device in found)
        raise GpuError(f"nvml:{which}: several GPUs begin so: {fits}; write more of the UUID")
    return found[0]


def _at(index: int) -> NvmlDevice:
    return _device(str(index), NVML.call("nvmlDeviceGetHandleByIndex", index, who=f"nvml:{index}", what="open it"))


def _device(which: str, handle: Any) -> NvmlDevice:
    """The device of a handle; its UUID is what tells it from others, so there is none without."""
    uuid = NvmlDevice(which, handle).text("nvmlDeviceGetUUID", "read its UUID")
    if uuid.startswith("MIG-"):
        raise GpuNotSupported(f"nvml:{which}: {_MIG}")
    return NvmlDevice(uuid, handle)


def _refuse_vgpu(device: NvmlDevice) -> None:
    if answer(lambda: device.call("nvmlDeviceGetVirtualizationMode", what="read its virtualization mode")) == _VGPU:
        raise GpuNotSupported(
            f"{device.who}: this is a vGPU, whose clock and power are the host's; run on the host, or have a whole GPU "
            "passed through to this machine"
        )


def _count() -> int:
    count = NVML.call("nvmlDeviceGetCount", who="NVML", what="count the GPUs")
    if not 0 <= count <= 1024:  # more than any node has
        raise GpuError(f"NVML: cannot count the GPUs: it answers {count}; see which libnvidia-ml.so.1 is loaded")
    return int(count)


def _none(which: str) -> GpuError:
    """The error for a GPU that is not there, with those that are."""
    shown = [f"{gpu.index} {gpu.text.removeprefix('nvml:')} {gpu.name or gpu.problem}" for gpu in visible_gpus()]
    choose = f"choose one of: {'; '.join(shown)}" if shown else "NVML shows none on this node"
    return GpuError(f"nvml:{which}: NVML shows no such GPU; {choose}")
