"""System files: a system with measured kernels, as `planner calibrate --kernels` writes them.

    format: perseus-planner/system
    version: 1
    gpu: h100-sxm
    node_bytes_per_s: 200.0e+9
    kernels:
    - {hidden: 2048, sequence: 2048, tensor_degree: 1, microbatch: 2, recomputation: none,
       layer_forward_s: 0.0021, layer_backward_s: 0.0042, head_s: 0.0055}

Numbers that a file leaves out are those of the catalogue.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import write_file
from perseus_planner.base.units import COUNT, TIME
from perseus_planner.estimate.system import NUMBERS, KernelKey, KernelTimes, System, system_of
from perseus_planner.estimate.transformer import CHOICES

_FORMAT = "perseus-planner/system"
_VERSION = 1
_COUNTS = ("hidden", "sequence", "tensor_degree", "microbatch")
_TIMES = ("layer_forward_s", "layer_backward_s", "head_s")


def save_system(system: System, path: Path, measured: tuple[str, ...] = ()) -> None:
    """Write a system file with the measured numbers and kernels.

    Raises:
        UsageError: If the file cannot be written.
    """
    view = system_view(system, measured)
    content = {"format": _FORMAT, "version": _VERSION, "gpu": view["gpu"], **view["measured"]}
    content["kernels"] = view["kernels"]
    write_file(path, yaml.safe_dump(content, sort_keys=False), UsageError)


def system_view(system: System, measured: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers that were measured of a system, and its kernels with their times, for
    JSON.
    """
    return {
        "gpu": system.gpu.name,
        "measured": {name: getattr(system, name) for name in measured},
        "kernels": [{**key._asdict(), **times._asdict()} for key, times in system.kernels.items()],
    }


def load_system(path: Path) -> System:
    """Read a system file.

    Raises:
        UsageError: If it cannot be read or is not valid; the text names file and line.
        GpuError: If there is no such GPU.
    """
    document = read_document(path, _FORMAT, _VERSION, ("gpu",), ("kernels", *NUMBERS), UsageError)
    system = system_of(document.text("gpu"))
    changes = {
        name: document.number(name, COUNT if name == "gpus_per_node" else TIME)
        for name in NUMBERS
        if name in document.values
    }
    kernels = {}
    if "kernels" in document.values and document.values["kernels"] != []:
        for entry in document.sections("kernels", (*_COUNTS, "recomputation", *_TIMES), ()):
            what = entry.text("recomputation")
            if what not in CHOICES["recomputation"]:
                raise entry.refusal(
                    "recomputation", f"give {' or '.join(CHOICES['recomputation'])}"
                )
            hidden, sequence, tensor, microbatch = (entry.number(name, COUNT) for name in _COUNTS)
            forward_s, backward_s, head_s = (entry.number(name, TIME) for name in _TIMES)
            kernels[KernelKey(hidden, sequence, tensor, microbatch, what)] = KernelTimes(
                forward_s, backward_s, head_s
            )
    return replace(system, **changes, kernels=kernels)
