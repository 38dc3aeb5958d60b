"""GPUs, real or simulated, behind one protocol; each is chosen by text, `back-end:which`.

nvml:0, nvml:GPU-8f6b…    NVML's index, or UUID; sets clocks as root
cuda:0                    the device that CUDA calls 0 here, through NVML by its UUID
zeusd:0                   read by NVML, set by the zeusd daemon, for jobs without privilege
command:0                 read by NVML, set by an external command such as `sudo nvidia-smi`: gpu/command.py
dry-run:nvml:0            read by what follows; what would be set is only recorded
simulated:a100-sxm        a model, in virtual time; its options: gpu/simulated/options.py
emulated:a100-sxm/0       the same model in real time, GPU 0 of this user on this node: gpu/simulated/emulated.py
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError
from perseus_planner.gpu.protocol import THROTTLE_REASONS, Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BACK_ENDS", "THROTTLE_REASONS", "Gpu", "locked_clock", "open_gpu"]

BACK_ENDS = ("nvml", "cuda", "zeusd", "command", "dry-run", "simulated", "emulated")
"""What may stand before the colon."""


@contextmanager
def open_gpu(text: str) -> Iterator[Gpu]:
    """The GPU that `text` names, for the length of the block.

    Raises:
        GpuError: no such back-end, or no such GPU, or what the back-end needs is not installed.
    """
    gpu = opened(text)
    try:
        yield gpu
    finally:
        gpu.close()


@contextmanager
def locked_clock(gpu: Gpu, clock_mhz: int) -> Iterator[None]:
    """Hold `gpu` at `clock_mhz` inside the block; reset its clocks on leaving, by whatever way.

    Raises:
        GpuError: the clock is not supported, or may not be set or reset.
    """
    try:
        # Inside the try: an interrupt that arrives during the call is raised after it has taken effect.
        gpu.set_clock_mhz(clock_mhz)
        yield
    finally:
        gpu.reset_clocks()


def opened(text: str) -> Gpu:
    """The GPU that `text` names, which the caller must close; `open_gpu` does.

    Each back-end is imported when it is asked for, as what it needs may not be installed.

    Raises:
        GpuError: as `open_gpu`.
    """
    back_end, _, which = text.partition(":")
    if back_end == "nvml":
        from perseus_planner.gpu.nvml import gpu as nvml

        return nvml.opened(which)
    if back_end == "cuda":
        from perseus_planner.gpu.nvml import cuda

        return cuda.opened(which)
    if back_end == "zeusd":
        from perseus_planner.gpu import zeusd

        return zeusd.opened(which)
    if back_end == "command":
        from perseus_planner.gpu import command

        return command.opened(which)
    if back_end == "dry-run":
        from perseus_planner.gpu import dry_run

        return dry_run.opened(which)
    if back_end == "simulated":
        from perseus_planner.gpu.simulated import simulated

        return simulated.opened(which)
    if back_end == "emulated":
        from perseus_planner.gpu.simulated import emulated

        return emulated.opened(which)
    raise GpuError(f"GPU {text!r}: there is no back-end {back_end!r}; choose one of: {', '.join(BACK_ENDS)}")
