"""Files of PyTorch's profiler: what differs between releases, and what is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_traces import Made

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces import kineto
from perseus_planner.extensions.traces.job import read_kineto_job
from perseus_planner.extensions.traces.kineto import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    TRANSFER,
    read_trace,
    union_us,
)
from perseus_planner.schedules.generators import generate

TWO = generate("1f1b", ranks=2, microbatches=4)
MADE = Made(TWO, (0.02, 0.03), steps=3)


def _document(**changes: object) -> dict[str, object]:
    operation = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::linear",
        "pid": 1,
        "tid": 1,
        "ts": 10.0,
        "dur": 5.0,
        "args": {"Sequence number": 3},
    }
    return {"traceEvents": [operation], **changes}


def _written(folder: Path, document: object, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("zipped", [False, True], ids=["json", "gz"])
def test_old_and_new_files_say_the_same(tmp_path: Path, *, old: bool, zipped: bool):
    """Before 2022 categories had other names; before 2024 times counted from the epoch."""
    made = replace(MADE, old=old)
    job = read_kineto_job(made.write(tmp_path, zipped))
    wanted = made.truth["ends_s"][0] - made.truth["begins_s"][0]
    assert job.schedule == TWO
    assert job.gpu == "NVIDIA A100-SXM4-80GB"
    np.testing.assert_allclose(job.times_s[0], wanted, atol=2e-6)


def test_the_name_tells_the_rank_where_the_file_does_not(tmp_path: Path):
    assert read_trace(_written(tmp_path, _document(), "host_rank7.123.pt.trace.json")).rank == 7
    assert read_trace(_written(tmp_path, _document(), "mine.json")).rank is None
    told = _document(distributedInfo={"rank": 3})
    assert read_trace(_written(tmp_path, told, "rank7.json")).rank == 3


def test_a_file_without_device_properties_has_no_gpu(tmp_path: Path):
    assert read_trace(_written(tmp_path, _document())).gpu is None
    named = _document(deviceProperties=[{"id": 0, "name": "AMD Instinct MI300X VF"}])
    assert read_trace(_written(tmp_path, named)).gpu == "AMD Instinct MI300X VF"


def test_a_list_of_events_is_read_too(tmp_path: Path):
    path = _written(tmp_path, _document()["traceEvents"])
    assert len(read_trace(path).operations.begin_us) == 1


def test_pieces_of_any_size_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names with quotation marks and braces do not end an event."""
    paths = MADE.write(tmp_path)
    document = json.loads(paths[0].read_text())
    document["traceEvents"][5]["args"]["note"] = '}, {"ph": "X"'
    document["traceEvents"][6]["args"]["inner"] = [{"ph": "a"}, {"ph": "b"}]
    paths[0].write_text(json.dumps(document, separators=(",", ":")))
    whole = read_trace(paths[0])
    for size in (1 << 10, 3001):
        monkeypatch.setattr(kineto, "_CHUNK", size)
        pieces = read_trace(paths[0])
        for one, other in zip(whole.operations, pieces.operations, strict=True):
            np.testing.assert_array_equal(one, other)
        assert whole.ranges == pieces.ranges


def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces of 1 KiB, of which one event has 16 at most."""
    monkeypatch.setattr(kineto, "_CHUNK", 1 << 10)
    monkeypatch.setattr(kineto, "_TAIL", 1 << 6)
    monkeypatch.setattr(kineto, "_LONGEST", 1 << 14)


def test_text_without_an_end_of_an_event_is_not_kept_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    document = _document()
    document["traceEvents"][0]["name"] = "a" * (1 << 17)
    path = _written(tmp_path, document)
    assert len(read_trace(path).operations.begin_us) == 1
    _bounded(monkeypatch)
    with pytest.raises(UsageError, match=r"is cut or damaged .*an event has no end"):
        read_trace(path)


def test_the_text_has_its_limit_where_gaps_are_inside_an_event_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    document = _document()
    document["traceEvents"][0]["args"]["inner"] = [{"ph": "a"}] * (1 << 13)
    path = _written(tmp_path, document)
    _bounded(monkeypatch)
    with pytest.raises(UsageError, match=r"is cut or damaged .*an event has no end"):
        read_trace(path)


def test_events_longer_than_where_gaps_are_looked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Hardly a piece ends beside a gap, and they are many more bytes than an event may have."""
    document = _document()
    (operation,) = document["traceEvents"]
    document["traceEvents"] = [
        {**operation, "name": "a" * 3001, "ts": 10.0 * number} for number in range(64)
    ]
    path = _written(tmp_path, document)
    _bounded(monkeypatch)
    assert len(read_trace(path).operations.begin_us) == 64


def test_names_say_what_an_operation_is():
    kinds = {
        "autograd::engine::evaluate_function: AddmmBackward0": BACKWARD,
        "aten::linear": FORWARD,
        "c10d::send": TRANSFER,
        "c10d::recv_": TRANSFER,
        "nccl:recv 1<-0": TRANSFER,
        "nccl:all_to_all": COLLECTIVE,  # whose kernel is called SendRecv
        "c10d::allreduce_": COLLECTIVE,
    }
    assert {name: kineto._kind_of(name) for name in kinds} == kinds


def test_kernels_of_communication_do_not_compute(tmp_path: Path):
    """An all-to-all's kernel is called SendRecv; what it is, its collective's name says."""
    events = _document()["traceEvents"]
    for number, (name, args) in enumerate(
        (
            ("nvjet_gemm", {}),
            ("ncclDevKernel_SendRecv", {"Collective name": "all_to_allv"}),
            ("oneshot_allreduce", {"Collective name": "allreduce"}),
        ),
        start=1,
    ):
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "launch", "tid": 1, "ts": 11.0}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "tid": 7, "ts": 20.0, "dur": 3.0}
        events.append(launch | {"args": {"correlation": number}})
        events.append(kernel | {"args": {"correlation": number, **args}})
    trace = read_trace(_written(tmp_path, {"traceEvents": events}))
    assert trace.kernels is not None
    assert trace.kernels.begin_us.tolist() == [20.0]


def test_kernels_belong_to_launches_by_correlation_and_not_by_external_id(tmp_path: Path):
    events = _document()["traceEvents"]
    events += [
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "tid": 1, "ts": 12.0}
        | {"args": {"External id": 1, "correlation": 9}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 20.0, "dur": 3.0}
        | {"args": {"External id": 5, "correlation": 9}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 30.0, "dur": 3.0}
        | {"args": {"External id": 1, "correlation": 8}},
    ]
    trace = read_trace(_written(tmp_path, {"traceEvents": events}))
    assert trace.kernels is not None
    assert trace.kernels.launch_us.tolist() == [12.0]
    assert trace.unlaunched == 1


@pytest.mark.parametrize("zipped", [False, True], ids=["json", "gz"])
def test_a_cut_file_is_refused(tmp_path: Path, *, zipped: bool):
    (path, _) = MADE.write(tmp_path, zipped)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UsageError, match=r"is cut or damaged .*; copy it again, or let the train"):
        read_trace(path)


def test_other_files_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is not a trace of PyTorch's profiler, as it has no tra"):
        read_trace(_written(tmp_path, {"some": "thing"}))
    with pytest.raises(UsageError, match="has no operations of the host; record it with"):
        read_trace(_written(tmp_path, {"traceEvents": []}))
    zipped = tmp_path / "x.json.gz"
    zipped.write_bytes(gzip.compress(b"hello"))
    with pytest.raises(UsageError, match="is not a trace of PyTorch's profiler"):
        read_trace(zipped)


def test_overlapping_spans_count_once():
    begins = np.array([5.0, 0.0, 1.0, 20.0])
    ends = np.array([6.0, 3.0, 4.0, 21.0])
    assert union_us(begins, ends) == 6.0
    assert union_us(np.zeros(0), np.zeros(0)) == 0.0
