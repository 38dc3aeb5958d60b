"""Finds the GPU that torch computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    import torch


def gpu_text(text: str, device: torch.device) -> str:
    """Return the text that opens the GPU of a torch device: `text`, completed if it names only a
    back-end.

    An emulated GPU without a number, such as "emulated:a100-sxm?slower=2000", gets the local rank
    of this process.

    Args:
        text: As for `open_gpu`, or only a back-end: "cuda", "nvml", "zeusd", "command",
            "dry-run:cuda" and so on.
        device: The device that this process computes on.

    Raises:
        UsageError: If torch computes on another device than the GPU, or the local rank is needed
            and unknown.
    """
    which = text.removeprefix("dry-run:")
    # Virtual time has no processes: every rank may have its own copy.
    if which.startswith("simulated:"):
        return text
    if which.startswith("emulated:"):
        return _with_number(text)
    if device.type != "cuda":
        # A dry run that names its GPU sets nothing, so it does no harm beside another device.
        if text.startswith("dry-run:") and ":" in which:
            return text
        raise UsageError(
            f"GPU {text!r}: torch computes on {device.type} here, so that nothing of the stage "
            "would run on that GPU; install a torch with CUDA, or name a simulated GPU such as "
            "simulated:a100-sxm"
        )
    # The user has named the GPU; whether it is torch's is not checked here.
    if ":" in which:
        return text
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    # By the PCI address:
    if which == "amd":  # whose UUIDs differ from torch's
        properties = torch.cuda.get_device_properties(index)
        return (
            f"{text}:{properties.pci_domain_id:04x}:"
            f"{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )
    # Old versions of torch know no UUID; then the ordinal has to do, which CUDA shares.
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"{text}:{index}" if which == "cuda" or uuid is None else f"{text}:GPU-{uuid}"


def _with_number(text: str) -> str:
    path, mark, options = text.partition("?")
    if "/" in path:
        return text
    number = os.environ.get("LOCAL_RANK")
    if number is None:
        raise UsageError(
            f"GPU {text!r}: the number of the GPU is missing, and LOCAL_RANK is not set; start "
            f"this with torchrun, or write a number, such as {path}/0"
        )
    return f"{path}/{number}{mark}{options}"
