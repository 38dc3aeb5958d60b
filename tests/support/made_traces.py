"""Make files like those of PyTorch's profiler on GPUs, of a pipeline whose truth is known: hosts
that run ahead of their GPUs, NCCL kernels that contain the wait, skewed clocks, jitter.

No public trace of a pipelined job on GPUs was found, so these stand in for them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perseus_planner.schedules import Schedule
from perseus_planner.schedules.pipeline import pipeline_iteration

GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
BASE_NS = 1_790_000_000_000_000_000
OPERATIONS = 4  #: of a forward
_HOST_S = 20e-6  #: of an operation on the host


@dataclass(frozen=True)
class Made:
    """A made job."""

    schedule: Schedule
    forward_s: tuple[float, ...]  #: of each stage
    #: backward over forward
    backward_ratio: float = 2.0
    steps: int = 4
    jitter: float = 0.0
    transfer_s: float = 100e-6
    rest_s: float = 0.02  #: of an iteration, for the optimizer
    #: by how much the clock of each rank is ahead, seconds
    skews_s: tuple[float, ...] = ()
    device: str | None = "NVIDIA A100-SXM4-80GB"
    labelled: bool = False
    marks_steps: bool = True
    idle_share: float = 0.0  #: of a computation, between its kernels
    has_kernels: bool = True
    in_graphs: bool = False
    old: bool = False  #: as before 2022: other categories, times since the epoch
    #: pipelines side by side: how much slower each rank of each is
    slowdowns: tuple[tuple[float, ...], ...] = ((),)
    first_step: int = 1
    seed: int = 0
    truth: dict[str, Any] = field(default_factory=dict, compare=False)

    def write(self, folder: Path, zipped: bool = False) -> list[Path]:
        """Write a file for each rank, and keep begins and ends in `truth`."""
        random = np.random.default_rng(self.seed)
        paths = []
        count = len(self.slowdowns)
        self.truth.update(begins_s=[], ends_s=[], iteration_s=[])
        for pipeline, slowdowns in enumerate(self.slowdowns):
            begins_s, ends_s, lengths_s = self._ran(random, slowdowns)
            self.truth["begins_s"].append(begins_s)
            self.truth["ends_s"].append(ends_s)
            self.truth["iteration_s"].append(lengths_s)
            first = 0
            for rank, row in enumerate(self.schedule.ranks):
                of_rank = slice(first, first + len(row))
                first += len(row)
                number = rank * count + pipeline
                document = self._document(
                    number, rank, begins_s[:, of_rank], ends_s[:, of_rank], lengths_s
                )
                ending = ".json.gz" if zipped else ".json"
                path = folder / f"rank{number}{ending}"
                text = json.dumps(document, indent=1).encode()
                path.write_bytes(gzip.compress(text, 1) if zipped else text)
                paths.append(path)
        return paths

    def _ran(self, random: Any, slowdowns: tuple[float, ...]) -> tuple[Any, Any, Any]:
        """Return when each computation of each step runs on the GPUs, and how long steps take."""
        iteration = pipeline_iteration(self.schedule)
        computations = iteration.computations
        shape = (self.steps, len(computations))
        begins_s = np.zeros(shape)
        ends_s = np.zeros(shape)
        lengths_s = np.zeros(self.steps)
        at_s = 1.0
        for step in range(self.steps):
            for place in iteration.order:
                each = computations[place]
                rank = iteration.rank_of[place]
                time_s = self.forward_s[each.stage]
                if each.kind != "F":
                    time_s *= self.backward_ratio if each.kind == "B" else self.backward_ratio / 2
                time_s *= (*slowdowns, *[1.0] * 64)[rank]
                time_s *= 1.0 + self.jitter * random.standard_normal()
                begin_s = at_s
                for other, _ in iteration.waits[place]:
                    is_own = iteration.rank_of[other] == rank
                    begin_s = max(
                        begin_s, ends_s[step, other] + (0.0 if is_own else self.transfer_s)
                    )
                begins_s[step, place] = begin_s
                ends_s[step, place] = begin_s + time_s
            end_s = ends_s[step].max() + self.rest_s
            lengths_s[step] = end_s - at_s
            at_s = end_s
        return begins_s, ends_s, lengths_s

    def _document(
        self, number: int, rank: int, begins_s: Any, ends_s: Any, lengths_s: Any
    ) -> dict[str, Any]:
        skew_s = (*self.skews_s, *[0.0] * 64)[rank]
        events = _Events(self, skew_s)
        sequence = 100
        begin_s = 1.0
        for step in range(self.steps):
            host_s = begin_s
            created: dict[tuple[int, int], int] = {}
            for place, each in enumerate(self.schedule.ranks[rank]):
                key = each.stage, each.microbatch
                span_s = float(begins_s[step, place]), float(ends_s[step, place])
                begun_s = host_s
                host_s = events.receive(host_s, span_s[0])
                if each.kind == "F":
                    created[key] = sequence
                    host_s = events.forward(host_s, span_s, sequence)
                    sequence += OPERATIONS
                else:
                    host_s = events.backward(host_s, span_s, created[key])
                if self.labelled:
                    events.range(f"PP:{each}", begun_s, host_s)
                host_s = events.send(host_s, span_s[1])
            # The host waits for its GPU before the optimizer.
            host_s = max(host_s, float(ends_s[step].max()))
            events.optimizer(host_s)
            end_s = begin_s + float(lengths_s[step])
            if self.marks_steps:
                events.range(f"ProfilerStep#{self.first_step + step}", begin_s - 1e-6, end_s - 2e-6)
            begin_s = end_s
        document: dict[str, Any] = {"schemaVersion": 1}
        document["deviceProperties"] = [{"id": 0, "name": self.device}] if self.device else []
        if not self.old:
            document["distributedInfo"] = {"backend": "nccl", "rank": number, "world_size": 64}
            document["baseTimeNanoseconds"] = BASE_NS
        document["displayTimeUnit"] = "ms"
        document["traceEvents"] = events.all
        return document


class _Events:
    """The events of a rank."""

    def __init__(self, made: Made, skew_s: float) -> None:
        self.made, self._skew_s = made, skew_s
        self.all: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}
        ]
        self._correlation = 0

    def _us(self, time_s: float) -> float | int:
        us = (time_s + self._skew_s) * 1e6
        if self.made.old:
            return round(us + BASE_NS / 1e3)
        return round(us, 3)

    def _add(
        self, category: str, name: str, tid: int | str, begin_s: float, end_s: float, **args: Any
    ) -> None:
        old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
        self.all.append(
            {
                "ph": "X",
                "cat": old[category] if self.made.old and category in old else category,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": self._us(begin_s),
                "dur": round(1e6 * (end_s - begin_s), 3),
                "args": args,
            }
        )

    def range(self, name: str, begin_s: float, end_s: float) -> None:
        self._add("user_annotation", name, 1, begin_s, end_s)

    def _launched(self, tid: int, at_s: float, name: str, begin_s: float, end_s: float) -> None:
        if not self.made.has_kernels:
            return
        self._correlation += 1
        number = self._correlation
        self._add("cuda_runtime", "cudaLaunchKernel", tid, at_s, at_s + 2e-6, correlation=number)
        graph = {"graph node id": 7} if self.made.in_graphs else {}
        stream = 20 if name == NCCL else 7
        self._add("kernel", name, f"stream {stream}", begin_s, end_s, correlation=number, **graph)

    def receive(self, host_s: float, until_s: float) -> float:
        """A receive: its kernel runs from its launch until the data is there."""
        self._add("cpu_op", "c10d::recv_", 1, host_s, host_s + _HOST_S)
        self._launched(1, host_s + 1e-6, NCCL, host_s + 5e-6, max(until_s, host_s + 6e-6))
        return host_s + 1.5 * _HOST_S

    def send(self, host_s: float, from_s: float) -> float:
        self._add("cpu_op", "c10d::send", 1, host_s, host_s + _HOST_S)
        self._launched(1, host_s + 1e-6, NCCL, max(from_s, host_s), max(from_s, host_s) + 5e-5)
        return host_s + 1.5 * _HOST_S

    def _kernels(self, span_s: tuple[float, float], index: int) -> tuple[float, float]:
        length_s = (span_s[1] - span_s[0]) / OPERATIONS
        begin_s = span_s[0] + index * length_s
        end_s = begin_s + length_s * (1.0 - self.made.idle_share)
        if index == OPERATIONS - 1:
            begin_s, end_s = span_s[1] - length_s * (1.0 - self.made.idle_share), span_s[1]
        return begin_s, end_s

    def forward(self, host_s: float, span_s: tuple[float, float], sequence: int) -> float:
        for index in range(OPERATIONS):
            number = {"Sequence number": sequence + index, "Fwd thread id": 0}
            self._add("cpu_op", "aten::linear", 1, host_s, host_s + _HOST_S, **number)
            inner = host_s + 3e-6, host_s + _HOST_S - 3e-6
            self._add("cpu_op", "aten::addmm", 1, *inner, **number)
            self._launched(1, host_s + 5e-6, GEMM, *self._kernels(span_s, index))
            host_s += 1.1 * _HOST_S
        return host_s

    def backward(self, host_s: float, span_s: tuple[float, float], sequence: int) -> float:
        for index in range(OPERATIONS):
            number = {"Sequence number": sequence + OPERATIONS - 1 - index, "Fwd thread id": 1}
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            self._add("cpu_op", name, 2, host_s, host_s + _HOST_S, **number)
            inner = host_s + 3e-6, host_s + _HOST_S - 3e-6
            self._add("cpu_op", "AddmmBackward0", 2, *inner, **number)
            self._launched(2, host_s + 5e-6, GEMM, *self._kernels(span_s, index))
            host_s += 1.1 * _HOST_S
        return host_s

    def optimizer(self, host_s: float) -> None:
        begin_s = host_s + 1e-4
        self._add("cpu_op", "aten::_foreach_add_", 1, begin_s + 1e-6, begin_s + 2e-5)
        self.range("Optimizer.step#AdamW.step", begin_s, begin_s + 5e-5)
