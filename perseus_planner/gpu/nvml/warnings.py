"""What a user must know before trusting a profile of an NVIDIA GPU; each is said only where NVML answers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from perseus_planner.gpu.nvml.device import UNKNOWN, NvmlDevice, answer
from perseus_planner.gpu.nvml.library import NVML

if TYPE_CHECKING:
    from collections.abc import Iterator

_POWER_SMOOTHING = 251

_PROFILE = "NVML_POWER_PROFILE_"
_OPERATION = "OPERATION_"  # so continue the names of what can be done to profiles


def notices(
    device: NvmlDevice, of_module: tuple[str, ...], limit_and_default_w: tuple[float, float] | None
) -> tuple[str, ...]:
    """One sentence each, with what to do.

    Args:
        device: the GPU.
        of_module: which of "energy" and "power" are read for the GPU together with its CPU.
        limit_and_default_w: the power limit in force and its default, watts; None where not both are known.

    Raises:
        GpuLost: the GPU has fallen off the bus.
    """
    return tuple(_notices(device, of_module, limit_and_default_w))


def mig_is_on(device: NvmlDevice) -> bool:
    """Whether the GPU is partitioned; False where NVML does not say so."""
    return answer(lambda: device.call("nvmlDeviceGetMigMode", what="read its MIG mode")[0]) == 1


def _notices(
    device: NvmlDevice, of_module: tuple[str, ...], limit_and_default_w: tuple[float, float] | None
) -> Iterator[str]:
    if mig_is_on(device):
        yield (
            "MIG is on: its clock, power and energy are those of the whole GPU, which all its instances share; turn it "
            "off (`nvidia-smi -mig 0`) before profiling"
        )
    profiles = answer(lambda: _enforced_profiles(device))
    if profiles:
        yield (
            f"workload power profiles are active ({', '.join(profiles)}), which change clocks and power; clear them "
            "(`nvidia-smi power-profiles -h` says how), or always train with the same"
        )
    if answer(lambda: device.fields([_POWER_SMOOTHING], "read whether power smoothing is on")) == [1]:
        yield (
            "power smoothing is on, which keeps power above a floor, so that lower clocks may save nothing; turn it "
            "off (`nvidia-smi power-smoothing -h` says how) if you may"
        )
    if answer(lambda: device.call("nvmlDeviceGetPersistenceMode", what="read its persistence mode")) == 0:
        yield (
            "persistence mode is off: locked clocks are lost when the driver unloads between jobs; turn it on "
            "(`nvidia-smi -pm 1`, or the daemon nvidia-persistenced)"
        )
    if limit_and_default_w is not None and limit_and_default_w[0] < limit_and_default_w[1]:
        limit_w, default_w = limit_and_default_w
        yield (
            f"the power limit is {limit_w:g} W, below its default of {default_w:g} W, so that high clocks may not be "
            f"reached; train under the same, or set it back (`nvidia-smi -pl {default_w:g}`)"
        )
    if of_module:
        yield (
            f"its {' and '.join(of_module)} can only be read for the whole module, the CPU's share included; compare "
            "only profiles that were measured so"
        )


def _enforced_profiles(device: NvmlDevice) -> list[str]:
    """NVML's names of the workload power profiles in force.

    Raises:
        GpuError: NVML has no answer.
    """
    profiles = NVML.structure("c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t")
    function = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
    device.call(function, ctypes.byref(profiles), what="read its workload power profiles")
    words = list(profiles.enforcedProfilesMask.mask)
    if all(word in UNKNOWN for word in words):
        return []
    names = {at: name for name, at in NVML.constants(_PROFILE).items() if not name.startswith(_OPERATION)}
    numbers = (32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1)
    return [names.get(number, f"number {number}") for number in numbers]
