"""Which GPU it is that torch computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError

if TYPE_CHECKING:
    import torch


def gpu_text(text: str, device: torch.device) -> str:
    """What opens the GPU that is torch's `device`: `text`, with the GPU filled in where only a back-end is given.

    An emulated GPU without a number, such as "emulated:a100-sxm?slower=2000", is the one of this process' local rank.

    Args:
        text: as for `open_gpu`, or a back-end alone: "cuda", "nvml", "zeusd", "command", "dry-run:cuda" and so on.
        device: where this process computes.

    Raises:
        UsageError: a GPU would be read while something else computes; or there is no local rank, where it is needed.
    """
    which = text.removeprefix("dry-run:")
    if which.startswith("simulated:"):
        return text
    if which.startswith("emulated:"):
        return _with_number(text)
    if device.type != "cuda":
        if text.startswith("dry-run:") and ":" in which:
            return text
        raise UsageError(
            f"GPU {text!r}: torch computes on {device.type} here, so that nothing of the stage would run on that GPU; "
            "install a torch with CUDA, or name a simulated GPU such as simulated:a100-sxm"
        )
    if ":" in which:
        return text
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"{text}:{index}" if which == "cuda" or uuid is None else f"{text}:GPU-{uuid}"


def _with_number(text: str) -> str:
    path, mark, options = text.partition("?")
    if "/" in path:
        return text
    number = os.environ.get("LOCAL_RANK")
    if number is None:
        raise UsageError(
            f"GPU {text!r}: which of them is missing, and there is no LOCAL_RANK to tell; start this with torchrun, or "
            f"write a number, such as {path}/0"
        )
    return f"{path}/{number}{mark}{options}"
