"""GPUs named by their CUDA ordinal in this process, read and set through NVML.

CUDA ordinals depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML indices do not, so the CUDA
driver is asked for the UUID. This initialises the driver in this process, as the first use of CUDA
does: later changes of those variables have no effect, and forked children cannot use CUDA.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.cuda_driver import CudaDriver
from perseus_planner.gpu.nvml.device import visible_gpus
from perseus_planner.gpu.nvml.gpu import NvmlGpu, open_nvml

_NO_DEVICE = 100
_NEEDED = ("cuInit", "cuDeviceGetCount", "cuDeviceGet")


def open_cuda(which: str) -> NvmlGpu:
    """Open the GPU whose CUDA ordinal in this process is `which`.

    Raises:
        GpuError: If there is no CUDA driver or no such ordinal, or NVML cannot open the GPU.
        GpuNotSupported: If the CUDA device is a MIG instance.
    """
    if not which:
        raise GpuError(
            "cuda: the number of the GPU is missing; write cuda:0, or run `planner doctor cuda` to "
            "see all"
        )
    if not re.fullmatch("[0-9]{1,4}", which):
        raise GpuError(
            f"cuda:{which}: {which!r} is not a CUDA ordinal; write cuda:0, or nvml: and a UUID"
        )
    device = _uuid(int(which))
    if f"nvml:GPU-{device}" not in {gpu.text for gpu in visible_gpus()}:
        raise GpuNotSupported(
            f"cuda:{which}: NVML shows no GPU with the UUID of this CUDA device, {device}; if it "
            "is a MIG instance, it has no clock of its own: turn MIG off (`nvidia-smi -mig 0`)"
        )
    gpu = open_nvml(f"GPU-{device}")
    if gpu.is_mig_on:  # old CUDA drivers return the UUID of the whole GPU for an instance of it
        gpu.close()
        raise GpuNotSupported(
            f"cuda:{which}: MIG is on, so that CUDA shows an instance of {gpu.text}, which has no "
            "clock of its own; turn MIG off (`nvidia-smi -mig 0`)"
        )
    return gpu


def count_devices() -> int:
    """Return how many CUDA devices this process sees.

    Raises:
        GpuError: If there is no CUDA driver, or no device.
    """
    with _explained("cuda"):
        count = _count(CudaDriver(*_NEEDED))
    if count == 0:
        raise GpuError(f"cuda: CUDA shows no GPU here{_visible_devices()}; see `planner doctor`")
    return count


def _count(driver: CudaDriver) -> int:
    count = ctypes.c_int()
    if driver.call("cuInit", 0, allowed=_NO_DEVICE) == 0:
        driver.call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def _uuid(ordinal: int) -> uuid.UUID:
    """Return the UUID of a CUDA device."""
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    with _explained(f"cuda:{ordinal}"):
        driver = CudaDriver(*_NEEDED)
        # The newer function returns a separate UUID for a MIG instance.
        name = driver.first_of("cuDeviceGetUuid_v2", "cuDeviceGetUuid")
        count = _count(driver)
        if ordinal < count:
            driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
            driver.call(name, ctypes.byref(raw), device)
            return uuid.UUID(bytes=bytes(raw))
    raise GpuError(
        f"cuda:{ordinal}: CUDA shows {_listed(count)} here{_visible_devices()}; see `planner "
        "doctor`"
    )


@contextmanager
def _explained(who: str) -> Iterator[None]:
    """Say in errors of the driver which GPU is meant, and what else can be done."""
    try:
        yield
    except GpuError as error:
        raise type(error)(
            f"{who}: {error}{_visible_devices()}; check that `nvidia-smi` works and fits the "
            "driver, or name the GPU by its NVML index or UUID (nvml:), or use simulated:"
        ) from error


def _listed(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU, cuda:0"}.get(count, f"{count} GPUs, cuda:0 to cuda:{count - 1}")


def _visible_devices() -> str:
    """Return the variable that hides or reorders devices, for an error message."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
