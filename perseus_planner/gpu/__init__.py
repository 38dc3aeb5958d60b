"""GPUs, real or simulated: `open_gpu` opens one, `Gpu` says what it can do.

A text such as `nvml:0` names a GPU and the back-end that reads and sets it:

    nvml:0, nvml:GPU-8f6b…    NVML index or UUID; set through NVML, which needs root
    cuda:0                    CUDA device 0 of this process, through NVML
    zeusd:0                   read through NVML, set by the zeusd daemon; needs no privilege
    command:0                 read through NVML, set by commands such as `sudo nvidia-smi`
                              (gpu/command.py)
    amd:0                     AMD SMI index, UUID or PCI bus id; set through AMD SMI, as root
    dry-run:nvml:0            reads the GPU named after `dry-run:` and sets nothing
    memory:nvml:0             its memory clock (gpu/wrappers.py)
    simulated:a100-sxm        a simulated GPU in virtual time (gpu/simulated/options.py)
    emulated:a100-sxm/0       the same in real time, shared by this user's processes
                              (gpu/simulated/emulated.py)

`gpu.lease` makes sure that one process at a time sets a GPU and that its settings are undone when
that process dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from perseus_planner.base import extensions
from perseus_planner.base.errors import GpuError, did_you_mean
from perseus_planner.gpu.protocol import THROTTLE_REASONS, Gpu, GpuReader

if TYPE_CHECKING:
    from perseus_planner.gpu.nvml.device import VisibleGpu

__all__ = [
    "BACK_ENDS",
    "DRY_RUN",
    "THROTTLE_REASONS",
    "Gpu",
    "GpuReader",
    "back_ends",
    "check_back_end",
    "check_gpu_text",
    "is_dry_run",
    "open_gpu",
]

_OPENERS = {
    "nvml": ("nvml.gpu", "open_nvml"),
    "cuda": ("nvml.gpu", "open_cuda"),
    "zeusd": ("zeusd", "open_zeusd"),
    "command": ("command", "open_command"),
    "amd": ("amd", "open_amd"),
    "dry-run": ("wrappers", "open_dry_run"),
    "memory": ("wrappers", "open_memory_clock"),
    "simulated": ("simulated.gpu", "open_simulated"),
    "emulated": ("simulated.emulated", "open_emulated"),
}

BACK_ENDS = tuple(_OPENERS)
"""Names of the back-ends of the core, which precede the colon."""


def back_ends() -> tuple[str, ...]:
    """Return the names of all back-ends: those of the core, and of extensions."""
    return (*BACK_ENDS, *extensions.places("gpus"))


def check_back_end(text: str) -> None:
    """Check that the text of a GPU begins with a back-end.

    Raises:
        GpuError: If it does not.
    """
    back_end = text.partition(":")[0]
    if back_end not in _OPENERS and back_end not in extensions.places("gpus"):
        # The catalog is read from a file, which only an error needs.
        from perseus_planner.gpu.simulated.model import CATALOG

        # A name of the catalog alone, such as "a100-sxm", lacks its back-end.
        advice = did_you_mean(back_end, back_ends()) or did_you_mean(
            back_end, CATALOG, "simulated:{}".format
        )
        advice = advice or f"choose one of: {', '.join(back_ends())}"
        advice = extensions.remedy(advice)
        raise GpuError(f"GPU {text!r}: there is no back-end {back_end!r}; {advice}")


DRY_RUN = "dry-run:"
"""Before the text of a GPU that is read but not set."""


def is_dry_run(text: str) -> bool:
    """Whether the GPU that `text` names is not set."""
    return text.startswith(DRY_RUN)


def check_gpu_text(text: str) -> None:
    """Check, without opening it, that there may be a GPU that `text` names: its back-end, and of a
    simulated or an emulated one its name and its options.

    Raises:
        GpuError: If there is none.
    """
    which = text.removeprefix(DRY_RUN)
    check_back_end(which)
    back_end, _, named = which.partition(":")
    # Names and options are only text there; of real GPUs nothing is known before they are opened.
    if back_end in ("simulated", "emulated"):
        from perseus_planner.gpu.simulated.model import find_model
        from perseus_planner.gpu.simulated.options import parse_options

        name = named.partition("?")[0].partition("/")[0]
        find_model(name, text, f"{back_end} GPU", f"{back_end}:{{}}")
        parse_options(which)


def open_gpu(text: str) -> Gpu:
    """Open the GPU that `text` names, such as "nvml:0"; use it in a `with` statement, or close it.

    Raises:
        GpuError: If there is no such back-end or GPU, or the back-end needs something that is not
            installed.
    """
    check_back_end(text)
    back_end, _, which = text.partition(":")
    opener: Callable[[str], Gpu]
    # Extensions bring back-ends by the same kind of function.
    if back_end in _OPENERS:
        module, function = _OPENERS[back_end]
        # Imported on demand: what a back-end needs may not be installed.
        opener = getattr(import_module(f"perseus_planner.gpu.{module}"), function)
    else:
        opener = extensions.load(extensions.places("gpus")[back_end])
    return opener(which)


def expanded(texts: Sequence[str]) -> list[str]:
    """Return the texts of GPUs, where `cuda` stands for all that CUDA shows to this process (which
    CUDA_VISIBLE_DEVICES decides), and `nvml` for all that NVML shows on this node.

    Raises:
        GpuError: If CUDA or NVML cannot be used here, or shows no GPU.
    """
    from perseus_planner.gpu.nvml.device import visible_gpus
    from perseus_planner.gpu.nvml.gpu import count_devices

    names = []
    for text in texts:
        if text == "cuda":
            names += [f"cuda:{number}" for number in range(count_devices())]
        elif text == "nvml":
            names += [gpu.text for gpu in visible_gpus()]
        else:
            names.append(text)
    return names


def all_gpus() -> tuple[VisibleGpu, ...]:
    """Return all GPUs that NVML and AMD SMI show on this node, including those that cannot be
    opened.

    Raises:
        GpuError: If NVML cannot be used here, and there is no AMD GPU; the text says what to do.
    """
    from perseus_planner.gpu.amd import visible_amd_gpus
    from perseus_planner.gpu.nvml.device import VisibleGpu, visible_gpus

    # AMD SMI is asked first, and quietly: most nodes have none.
    amd = tuple(VisibleGpu(index, text, "", "") for index, text in enumerate(visible_amd_gpus()))
    try:
        return (*visible_gpus(), *amd)
    # A node of AMD GPUs has no NVML, which is no error there.
    except GpuError:
        if not amd:
            raise
        return amd
