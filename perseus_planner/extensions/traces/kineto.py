"""Read a trace of PyTorch's profiler (Kineto): operations, annotations, launches and kernels.

A file is read in pieces that are cut between two events, and only what the other modules look at is
kept, so a file of 500 MB takes as much memory as its operations, not as its text.

What differs between releases: the categories `Operator`, `Runtime` and `Kernel` of before 2022 are
`cpu_op`, `cuda_runtime` and `kernel` now; `ts` counts from the epoch before 2024, and since then
from `baseTimeNanoseconds`. Kernels belong to what launched them by `correlation`: `External id` is
missing or wrong in traces of many releases.

What computations and steps these operations are is found in `steps`.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import reading
from perseus_planner.extensions.traces.classes import kernel_class

if TYPE_CHECKING:
    from typing import IO, TypeAlias

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Integers: TypeAlias = NDArray[np.int64]

FORWARD, BACKWARD, TRANSFER, COLLECTIVE = range(4)
"""What an operation on the host is."""

_CHUNK = 8 << 20  #: bytes of a piece, by hand: larger ones are not faster and take more memory
_TAIL = 1 << 16  #: bytes at its end in which the last gap between events is looked for
_LONGEST = 64 << 20  #: bytes without such a gap; no event is as long
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_GAP = re.compile(rb'\}\s*(,)\s*\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s)"\s*:')
_BACKWARD = "autograd::engine::evaluate_function"
_TRANSFERS = ("send", "recv", "recv_", "recv_any_source_", "coalesced", "batch_isend_irecv")
_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_RANK = re.compile(r"rank[_-]?([0-9]+)|_r([0-9]+)[._]", re.IGNORECASE)


class _Args(msgspec.Struct, gc=False):
    """The arguments of an event that are looked at."""

    sequence: int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: int | None = None
    stream: int | str | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    graph_node: int | None = msgspec.field(name="graph node id", default=None)


class _Event(msgspec.Struct, gc=False):
    """An event of the Trace Event Format."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: _Args | None = None


class _Head(msgspec.Struct):
    """What a file says beside its events."""

    deviceProperties: list[dict[str, Any]] = []  # noqa: N815 - the file's name
    distributedInfo: dict[str, Any] | None = None  # noqa: N815
    baseTimeNanoseconds: int | None = None  # noqa: N815
    traceEvents: list[_Event] = []  # noqa: N815


class Range(NamedTuple):
    """An annotation on the host."""

    name: str
    begin_us: float
    end_us: float


class Operations(NamedTuple):
    """Operations that no other operation of their thread contains, in the order of time."""

    begin_us: Floats
    end_us: Floats
    kind: Integers  #: `FORWARD` and so on
    sequence: Integers  #: number of the autograd graph; -1 for none
    forward_thread: Integers  #: of a backward: the thread of its forward; 0 for none


class Kernels(NamedTuple):
    """Kernels, copies and fills on the GPU that are no communication, in the order of launches."""

    launch_us: Floats  #: when the host launched it
    begin_us: Floats
    end_us: Floats


@dataclass(frozen=True)
class Trace:
    """What one rank's file holds; microseconds of that node's clock."""

    path: Path
    rank: int | None  #: of the job, by the file's `distributedInfo`, else by its name
    gpu: str | None  #: name of its GPU
    operations: Operations
    ranges: tuple[Range, ...]  #: annotations, in the order of time
    kernels: Kernels | None  #: None if the trace has no kernels
    unlaunched: int  #: kernels whose launch is not in the file
    graph_kernels: int  #: kernels that a graph launched, of which no operation is recorded
    class_us: Mapping[
        str, float
    ]  #: time of all kernels by their class (`classes`), communication too


class _Columns:
    """What is kept of the events while they are read."""

    def __init__(self) -> None:
        self.operations = {name: array("d") for name in ("begin", "end")}
        self.numbers = {name: array("q") for name in ("thread", "kind", "sequence", "forward")}
        self.launches_us = array("d")
        self.launched = array("q")  #: correlation of each launch
        self.kernels = {"begin": array("d"), "end": array("d")}
        self.correlations = array("q")  #: of each kernel
        self.ranges: list[Range] = []
        self.graph_kernels = 0
        self.class_us: dict[str, float] = {}
        self._classes: dict[str, str] = {}
        self._threads: dict[int | str, int] = {}
        self._ends: dict[int | str, float] = {}
        self._begins: dict[int | str, float] = {}
        self._kinds: dict[str, int] = {}

    def add(self, events: list[_Event]) -> None:
        """Keep what is needed of some events."""
        for event in events:
            if event.ph != "X":
                continue
            category = event.cat
            if category in ("cpu_op", "Operator"):
                self._add_operation(event)
            elif category in ("user_annotation", "cpu_instant_event"):
                self.ranges.append(Range(event.name, event.ts, event.ts + event.dur))
            elif category in ("cuda_runtime", "cuda_driver", "Runtime"):
                # A call without a correlation has launched nothing.
                if event.args is not None and event.args.correlation is not None:
                    self.launches_us.append(event.ts)
                    self.launched.append(event.args.correlation)
            elif category in ("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"):
                self._add_kernel(event)

    def _add_operation(self, event: _Event) -> None:
        thread = event.tid
        end = event.ts + event.dur
        # Most files have the outer operation first: inner ones are left out at once.
        if self._begins.get(thread, 0.0) <= event.ts and end <= self._ends.get(thread, 0.0):
            return
        self._begins[thread] = event.ts
        self._ends[thread] = end
        # Names repeat, so each is looked at once.
        kind = self._kinds.get(event.name)
        if kind is None:
            kind = _kind_of(event.name)
            self._kinds[event.name] = kind
        args = event.args
        sequence = -1
        forward = 0
        if args is not None:
            if args.sequence is not None:
                sequence = args.sequence
            if args.forward_thread is not None:
                forward = args.forward_thread
        if "GraphRoot" in event.name:  # it carries the number that comes next
            sequence = -1
        self.operations["begin"].append(event.ts)
        self.operations["end"].append(end)
        self.numbers["thread"].append(self._threads.setdefault(thread, len(self._threads)))
        self.numbers["kind"].append(kind)
        self.numbers["sequence"].append(sequence)
        self.numbers["forward"].append(forward)

    def _add_kernel(self, event: _Event) -> None:
        args = event.args or _Args()
        # Names repeat, so each is looked at once.
        found = self._classes.get(event.name)
        if found is None:
            found = kernel_class(event.name, event.cat)
            self._classes[event.name] = found
        self.class_us[found] = self.class_us.get(found, 0.0) + event.dur
        # "SendRecv" is also the name of kernels of an all-to-all; both wait for other ranks.
        if _NCCL.search(event.name) or args.collective is not None:
            return
        if args.graph_node:
            self.graph_kernels += 1
        self.kernels["begin"].append(event.ts)
        self.kernels["end"].append(event.ts + event.dur)
        self.correlations.append(-1 if args.correlation is None else args.correlation)


def read_trace(path: Path) -> Trace:
    """Read the file of one rank, .json or .json.gz.

    Raises:
        UsageError: If it cannot be read, is cut, or is no trace of PyTorch's profiler.
    """
    columns = _Columns()
    head = _Head()
    with reading(path, UsageError):
        # Events are taken out before the rest is kept, so that memory holds one piece at a time.
        for part in _parts(path):
            columns.add(part.traceEvents)
            part.traceEvents = []
            head = _joined(head, part)
    if not columns.operations["begin"]:
        raise UsageError(
            f"{path}: has no operations of the host; record it with torch.profiler.profile, with "
            "ProfilerActivity.CPU among its activities"
        )
    # Since 2024 times count from a base that differs from file to file.
    offset_us = (head.baseTimeNanoseconds or 0) / 1e3
    kernels, unlaunched = _kernels(columns, offset_us)
    return Trace(
        path,
        _rank(path, head),
        _gpu(head),
        _operations(columns, offset_us),
        tuple(
            Range(annotated.name, annotated.begin_us + offset_us, annotated.end_us + offset_us)
            for annotated in sorted(columns.ranges, key=lambda annotated: annotated.begin_us)
        ),
        kernels,
        unlaunched,
        columns.graph_kernels,
        columns.class_us,
    )


def _kind_of(name: str) -> int:
    if name.startswith(_BACKWARD):
        return BACKWARD
    group, _, operation = name.partition(":")
    if group in ("c10d", "nccl", "gloo", "mpi"):
        return TRANSFER if operation.strip(":").split(" ")[0] in _TRANSFERS else COLLECTIVE
    return FORWARD


def _parts(path: Path) -> Iterator[_Head]:
    """Yield the events of a file, piece by piece, and what it says beside them."""
    with path.open("rb") as file:
        if path.suffix != ".gz":
            yield from _decoded(path, file)
            return
        try:
            with gzip.open(file) as archive:
                yield from _decoded(path, archive)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(_cut(path, f"the archive ends early: {error}")) from None


def _decoded(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[_Head]:
    events = msgspec.json.Decoder(list[_Event])
    whole = msgspec.json.Decoder(_Head)
    text = file.read(_CHUNK)
    # The file may also be a bare list of events.
    begin = _EVENTS.search(text)
    if begin is None and not text.lstrip().startswith(b"["):
        raise UsageError(
            f"{path}: is not a trace of PyTorch's profiler, as it has no traceEvents; name the "
            "file that export_chrome_trace or tensorboard_trace_handler wrote"
        )
    prefix = b'{"traceEvents":['
    if begin is not None:
        prefix = text[: begin.end()]
        text = text[begin.end() :]
    else:
        text = text.lstrip()[1:]
    # One piece is kept behind, as the last one also has what stands after the events.
    while True:
        more = file.read(_CHUNK)
        if not more:
            break
        # Cut at a gap between events, so that each piece is a list of its own. The end of each
        # piece may be within a long event, so all is looked at before the file is refused.
        is_longest = len(text) > _LONGEST
        gap = _last_gap(text, len(text) if is_longest else _TAIL)
        piece = None
        if gap is not None:
            # A gap may also be inside an event: then the next one is tried.
            with suppress(msgspec.DecodeError):
                piece = _Head(traceEvents=events.decode(b"[" + text[:gap] + b"]"))
                text = text[gap + 1 :]
        if piece is not None:
            yield piece
        elif is_longest:
            raise UsageError(_cut(path, "an event has no end"))
        text += more
    # A bare list is made an object, so that both sorts are read alike.
    if begin is None:
        text = text.rstrip().removesuffix(b"]") + b"]}"
    try:
        yield whole.decode(prefix + text)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: is not a trace of PyTorch's profiler: {error}; name the file that "
            "export_chrome_trace or tensorboard_trace_handler wrote"
        ) from None
    except msgspec.DecodeError as error:
        raise UsageError(_cut(path, str(error))) from None


def _cut(path: Path, problem: str) -> str:
    return (
        f"{path}: is cut or damaged ({problem}); copy it again, or let the training end the "
        "profiler before it exits"
    )


def _last_gap(text: bytes, tail: int) -> int | None:
    """Return the place of the last comma between two events in so many bytes at the end."""
    last = None
    for match in _GAP.finditer(text, max(0, len(text) - tail)):
        last = match.start(1)
    return last


def _joined(head: _Head, part: _Head) -> _Head:
    return _Head(
        deviceProperties=part.deviceProperties or head.deviceProperties,
        distributedInfo=part.distributedInfo or head.distributedInfo,
        baseTimeNanoseconds=part.baseTimeNanoseconds or head.baseTimeNanoseconds,
    )


def _rank(path: Path, head: _Head) -> int | None:
    rank = (head.distributedInfo or {}).get("rank")
    if isinstance(rank, int):
        return rank
    match = _RANK.search(path.name)
    return None if match is None else int(match[1] or match[2])


def _gpu(head: _Head) -> str | None:
    for properties in head.deviceProperties:
        name = properties.get("name")
        if isinstance(name, str) and name:
            return name
    return None


def _operations(columns: _Columns, offset_us: float) -> Operations:
    """Return the outermost operations of all threads."""
    begin = np.frombuffer(columns.operations["begin"])
    end = np.frombuffer(columns.operations["end"])
    numbers = {
        name: np.frombuffer(values, dtype=np.int64) for name, values in columns.numbers.items()
    }
    kept: list[Integers] = []
    for thread in np.unique(numbers["thread"]):
        (of_thread,) = np.nonzero(numbers["thread"] == thread)
        # By begin, and of equal begins the longest first, which contains the others.
        of_thread = of_thread[np.lexsort((-end[of_thread], begin[of_thread]))]
        # The latest end of what began before: an operation that ends by then is inside another.
        reached = np.maximum.accumulate(end[of_thread])
        is_outer = np.ones(len(of_thread), dtype=bool)
        is_outer[1:] = end[of_thread][1:] > reached[:-1]
        kept.append(of_thread[is_outer])
    places = np.concatenate(kept)
    places = places[np.argsort(begin[places], kind="stable")]
    return Operations(
        begin[places] + offset_us,
        end[places] + offset_us,
        numbers["kind"][places],
        numbers["sequence"][places],
        numbers["forward"][places],
    )


def _kernels(columns: _Columns, offset_us: float) -> tuple[Kernels | None, int]:
    """Return the kernels with their launches, and how many have none."""
    # No kernel at all means that the GPU was not traced, and not that nothing was launched.
    correlation = np.frombuffer(columns.correlations, dtype=np.int64)
    if not len(correlation):
        return None, 0
    launched = np.frombuffer(columns.launched, dtype=np.int64)
    # Launches and kernels are joined by their number, as their order in the file is not the same.
    order = np.argsort(launched, kind="stable")
    position = np.searchsorted(launched[order], correlation)
    position = np.minimum(position, max(0, len(launched) - 1))
    is_found = np.zeros(len(correlation), dtype=bool)
    if len(launched):
        is_found = launched[order][position] == correlation
    launch_us = np.frombuffer(columns.launches_us)[order[position[is_found]]]
    begin_us = np.frombuffer(columns.kernels["begin"])[is_found]
    end_us = np.frombuffer(columns.kernels["end"])[is_found]
    # In the order of launches, in which operations are looked up.
    in_time = np.argsort(launch_us, kind="stable")
    return (
        Kernels(
            launch_us[in_time] + offset_us,
            begin_us[in_time] + offset_us,
            end_us[in_time] + offset_us,
        ),
        int(np.count_nonzero(~is_found)),
    )


def union_us(begin_us: Floats, end_us: Floats) -> float:
    """Return how long at least one of some spans lasts, microseconds."""
    if not len(begin_us):
        return 0.0
    order = np.argsort(begin_us, kind="stable")
    reached = np.maximum.accumulate(end_us[order])
    starts = np.maximum(begin_us[order][1:], reached[:-1])
    more = np.maximum(end_us[order][1:] - starts, 0.0).sum()
    return float(end_us[order][0] - begin_us[order][0] + more)
