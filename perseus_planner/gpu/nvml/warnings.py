"""Conditions of an NVIDIA GPU that can spoil its profile; each is reported only if NVML can
tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from perseus_planner.gpu.nvml.device import UNKNOWN, NvmlDevice, read_or_none
from perseus_planner.gpu.nvml.library import NVML

_SMOOTHING_ENABLED, _SMOOTHING_FLOOR = 251, 255

_PROFILE = "NVML_POWER_PROFILE_"
_OPERATION = "OPERATION_"  # constants with this second prefix are operations, not profiles


def is_mig_on(device: NvmlDevice) -> bool:
    """Return whether the GPU is partitioned into MIG instances; False if NVML cannot tell."""
    return (
        read_or_none(lambda: device.call("nvmlDeviceGetMigMode", what="read its MIG mode")[0]) == 1
    )


def is_smoothing_on(device: NvmlDevice) -> bool:
    """Return whether power smoothing is on; False if NVML cannot tell."""
    return read_or_none(
        lambda: device.fields([_SMOOTHING_ENABLED], "read whether power smoothing is on")
    ) == [1]


def smoothing_floor_w(device: NvmlDevice) -> int | None:
    """Return the power that power smoothing keeps at least, watts; None if it is off or NVML
    cannot tell.
    """
    if not is_smoothing_on(device):
        return None
    floor = read_or_none(
        lambda: device.fields([_SMOOTHING_FLOOR], "read the floor of power smoothing")
    )
    return floor[0] if floor and floor[0] > 0 else None


def find_warnings(
    device: NvmlDevice, of_module: tuple[str, ...], limit_and_default_w: tuple[float, float] | None
) -> Iterator[str]:
    """Yield one sentence for each condition, with what to do about it.

    Args:
        device: The GPU.
        of_module: Which of "energy" and "power" are read for the GPU together with its CPU.
        limit_and_default_w: Power limit in force and its default, watts; None if unknown.

    Raises:
        GpuLost: If the GPU has fallen off the bus.
    """
    if is_mig_on(device):
        yield (
            "MIG is on: clock, power and energy are those of the whole GPU, which all its "
            "instances share; turn it off (`nvidia-smi -mig 0`) before profiling"
        )
    profiles = read_or_none(lambda: _enforced_profiles(device))
    if profiles:
        yield (
            f"workload power profiles are active ({', '.join(profiles)}), which change clocks and "
            "power; clear them (see `nvidia-smi power-profiles -h`), or always train with the same"
        )
    if is_smoothing_on(device):
        floor_w = smoothing_floor_w(device)
        floor = "a floor" if floor_w is None else f"{floor_w} W"
        yield (
            f"power smoothing is on, which keeps power above {floor}, so that lower clocks may "
            "save nothing; turn it off (see `nvidia-smi power-smoothing -h`) if you may"
        )
    if (
        read_or_none(
            lambda: device.call("nvmlDeviceGetPersistenceMode", what="read its persistence mode")
        )
        == 0
    ):
        yield (
            "persistence mode is off: locked clocks are lost when the driver unloads between "
            "jobs; turn it on (`nvidia-smi -pm 1`, or the daemon nvidia-persistenced)"
        )
    if limit_and_default_w is not None and limit_and_default_w[0] < limit_and_default_w[1]:
        limit_w, default_w = limit_and_default_w
        yield (
            f"the power limit is {limit_w:g} W, below its default of {default_w:g} W, so that "
            "high clocks may not be reached; train under the same limit, or restore the default "
            f"(`nvidia-smi -pl {default_w:g}`)"
        )
    if of_module:
        yield (
            f"{' and '.join(of_module)} can only be read for the whole module, including the CPU; "
            "compare only profiles that were measured the same way"
        )


def _enforced_profiles(device: NvmlDevice) -> list[str]:
    """Return NVML's names of the workload power profiles in force.

    Raises:
        GpuError: If NVML cannot tell.
    """
    profiles = NVML.structure("c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t")
    function = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
    device.call(function, ctypes.byref(profiles), what="read its workload power profiles")
    words = list(profiles.enforcedProfilesMask.mask)
    if all(word in UNKNOWN for word in words):
        return []
    names = {
        number: name
        for name, number in NVML.constants(_PROFILE).items()
        if not name.startswith(_OPERATION)
    }
    numbers = (
        32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1
    )
    return [names.get(number, f"number {number}") for number in numbers]
