"""Tries on one GPU, in ten seconds, whether marks can be captured in a CUDA graph: three writes of
64 bits to shared memory of the host, between computations, replayed ten times.

    python benchmarks/gpu_graph_marks.py FILE.json

Each way to write is tried: `cuStreamWriteValue64`, a 64-bit memset (two of 32 bits), and a copy of
8 bytes from the device. For each one the file says whether the capture took it, what a host thread
saw during every replay, in order, and what a write costs on the GPU. Sets nothing.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: TID253

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.cuda_driver import CudaDriver
from perseus_planner.runtime.cuda_marks import DeviceWord

_REPLAYS = 10
_SIZE = 4096  #: of square matrices, whose product takes about a millisecond or less
_PRODUCTS = 40  #: between two marks, so that a host thread sees each one
_MANY = 1000  #: writes of which the cost is taken
_VALUES = tuple((place + 1) << 32 for place in range(3))
"""What is written: positions, as captured marks have them."""

Write = Callable[[int, int], None]
"""Writes the value, which is the second argument, when the stream, the first one, comes there."""


def ways(word: DeviceWord, driver: CudaDriver) -> dict[str, Write]:
    """Return the ways to write a word in stream order."""
    pointer = word.pointer
    sources = {value: torch.tensor([value], device="cuda") for value in _VALUES}

    def memset(stream: int, value: int) -> None:
        for offset, part in ((4, value >> 32), (0, value & 0xFFFFFFFF)):
            address = ctypes.c_uint64(pointer + offset)
            count = ctypes.c_size_t(1)
            driver.call(
                "cuMemsetD32Async",
                address,
                ctypes.c_uint(part),
                count,
                ctypes.c_void_p(stream),
            )

    def copy(stream: int, value: int) -> None:
        source = ctypes.c_uint64(sources[value].data_ptr())
        size = ctypes.c_size_t(8)
        driver.call(
            "cuMemcpyAsync", ctypes.c_uint64(pointer), source, size, ctypes.c_void_p(stream)
        )

    return {"cuStreamWriteValue64": word.write, "memset": memset, "copy of 8 bytes": copy}


def tried(write: Write, page: mmap.mmap) -> dict[str, Any]:
    """Capture three writes, replay them, and return what was seen."""
    matrix = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
    product = matrix @ matrix
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            for value in _VALUES:
                for _ in range(_PRODUCTS):
                    torch.mm(matrix, matrix, out=product)
                write(stream, value)
    except (GpuError, RuntimeError) as error:
        return {"is_captured": False, "reason": str(error)}
    seen = [_seen(graph, page) for _ in range(_REPLAYS)]
    return {
        "is_captured": True,
        "seen": seen,
        "is_in_order": all(each == list(_VALUES) for each in seen),
        "write_us": _cost_us(write),
    }


def _seen(graph: torch.cuda.CUDAGraph, page: mmap.mmap) -> list[int]:
    """Replay a graph; return the values that a thread of the host saw, in order."""
    page[:8] = bytes(8)
    seen: list[int] = []
    is_over = threading.Event()

    def look() -> None:
        (value,) = struct.unpack_from("=Q", page)
        if value and (not seen or seen[-1] != value):
            seen.append(value)

    def watch() -> None:
        while not is_over.is_set():
            look()
            time.sleep(20e-6)

    watcher = threading.Thread(target=watch)
    watcher.start()
    graph.replay()
    torch.cuda.synchronize()
    is_over.set()
    watcher.join()
    look()
    return seen


def _cost_us(write: Write) -> float:
    """Return what a write takes in a graph of many, microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_MANY):
            write(stream, _VALUES[0])
    graph.replay()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin_s) / _MANY


def main(path: str) -> int:
    """Return 0 if one way is captured and in order."""
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    torch.cuda.init()
    driver = CudaDriver("cuStreamWriteValue64_v2", "cuMemsetD32Async", "cuMemcpyAsync")
    page = mmap.mmap(-1, mmap.PAGESIZE)
    word = DeviceWord(page, driver)
    found = {name: tried(write, page) for name, write in ways(word, driver).items()}
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    Path(path).write_text(json.dumps(about | {"ways": found}, indent=1) + "\n")
    for name, each in found.items():
        verdict = "in order" if each.get("is_in_order") else "not as captured"
        said = f"{verdict}, {each['write_us']:.2f} us" if each["is_captured"] else each["reason"]
        print(f"{name}: {said}")
    torch.cuda.synchronize()
    word.unregister()
    return 0 if any(each.get("is_in_order") for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
