"""GPUs by the number that CUDA gives them here, read and set through NVML.

CUDA's ordinals follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML's indices heed neither. So the CUDA driver is
asked for the UUID. Asking initialises the driver in this process, as the first use of CUDA does: later changes of those
variables have no effect in it, and children forked from it cannot use CUDA.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from typing import Any

from perseus_planner.errors import GpuError, GpuNotSupported
from perseus_planner.gpu.nvml import gpu as nvml
from perseus_planner.gpu.nvml.discovery import visible_gpus

_NO_DEVICE = 100


def opened(which: str) -> nvml.NvmlGpu:
    """The GPU whose CUDA ordinal in this process's environment is `which`.

    Raises:
        GpuError: no CUDA driver, no such ordinal, or NVML cannot open that GPU.
        GpuNotSupported: CUDA's device is a MIG instance.
    """
    if not re.fullmatch("[0-9]{1,4}", which):
        raise GpuError(f"cuda:{which}: {which!r} is no CUDA ordinal; write cuda:0, or nvml: and a UUID")
    found = _uuid(int(which))
    if f"GPU-{found}" not in {gpu.text.removeprefix("nvml:") for gpu in visible_gpus()}:
        raise GpuNotSupported(
            f"cuda:{which}: CUDA's device has UUID {found}, which is none of the GPUs that NVML shows; if it is a MIG "
            "instance, its clock is the whole GPU's: turn MIG off (`nvidia-smi -mig 0`)"
        )
    gpu = nvml.opened(f"GPU-{found}")
    if gpu.mig_on:  # an old CUDA driver tells the UUID of the whole GPU, of which it shows but an instance
        gpu.close()
        raise GpuNotSupported(
            f"cuda:{which}: MIG is on, so that CUDA shows an instance of {gpu.text}, which has no clock of its own; "
            "turn MIG off (`nvidia-smi -mig 0`)"
        )
    return gpu


def _uuid(ordinal: int) -> uuid.UUID:
    """The UUID of a CUDA device, without the prefix that NVML gives it."""
    driver = _driver()
    count, device, found = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    code = driver.cuInit(0)
    if code != _NO_DEVICE:
        _check(code, f"cuda:{ordinal}", "cuInit")
        _check(driver.cuDeviceGetCount(ctypes.byref(count)), f"cuda:{ordinal}", "cuDeviceGetCount")
    if ordinal >= count.value:
        raise GpuError(
            f"cuda:{ordinal}: CUDA shows {_number_of_gpus(count.value)} here{_visible()}; see `planner doctor`"
        )
    _check(driver.cuDeviceGet(ctypes.byref(device), ordinal), f"cuda:{ordinal}", "cuDeviceGet")
    # The newer call tells a MIG instance by a UUID of its own.
    name = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _check(getattr(driver, name)(ctypes.byref(found), device), f"cuda:{ordinal}", name)
    return uuid.UUID(bytes=bytes(found))


def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuError(
            f"cuda: cannot load libcuda.so.1 ({error}); it comes with the NVIDIA driver: install that, or in a "
            "container start it with the NVIDIA runtime (`docker run --gpus all`), or use simulated:"
        ) from error
    missing = [name for name in ("cuInit", "cuDeviceGetCount", "cuDeviceGet") if not hasattr(driver, name)]
    if missing or not (hasattr(driver, "cuDeviceGetUuid_v2") or hasattr(driver, "cuDeviceGetUuid")):
        raise GpuNotSupported(
            f"cuda: libcuda.so.1 has no {', '.join([*missing, 'cuDeviceGetUuid'][:1])}; update the NVIDIA driver, or "
            "name the GPU by NVML's index or UUID (nvml:)"
        )
    return driver


def _check(code: int, who: str, function: str) -> None:
    if code != 0:
        raise GpuError(
            f"{who}: the CUDA driver answers error {code} to {function}{_visible()}; see that `nvidia-smi` works and "
            "fits the driver, or name the GPU by NVML's index or UUID (nvml:)"
        )


def _number_of_gpus(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU, cuda:0"}.get(count, f"{count} GPUs, cuda:0 to cuda:{count - 1}")


def _visible() -> str:
    """What hides or reorders devices from CUDA, for an error."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
