"""Traces of real gloo ranks of three engines: the order is what the engines say that they ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import launching
import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.job import read_kineto_job
from perseus_planner.extensions.traces.kineto import read_trace
from perseus_planner.extensions.traces.order import find_layout, with_first_inputs, with_grid
from perseus_planner.extensions.traces.steps import RankSteps, rank_steps
from perseus_planner.schedules.generators import generate


def _traced(folder: Path, count: int, program: str, *arguments: str) -> list[Path]:
    ended = launching.ranks(f"tracing_programs:{program}", count, folder, str(folder), *arguments)
    assert [each.code for each in ended] == [0] * count, ended[0].stderr
    return sorted(folder.glob("rank*.json"))


def _ran(folder: Path, ranks: int, length: int) -> list[list[str]]:
    """Return what the ranks ran in their last step, by the engine's own calls."""
    return [
        json.loads((folder / f"order{rank}.json").read_text())[-length:] for rank in range(ranks)
    ]


TORCH = [
    pytest.param("1f1b", 4, 8, id="1f1b"),
    pytest.param("gpipe", 3, 4, id="gpipe"),
    pytest.param("interleaved-1f1b", 2, 4, id="interleaved"),
    pytest.param("looped-bfs", 2, 4, id="bfs"),
    pytest.param("interleaved-zb", 2, 4, id="interleaved-zb"),
    pytest.param("zbv", 2, 4, id="zbv"),
    pytest.param("dualpipe-v", 2, 4, id="dualpipe-v"),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), TORCH)
def test_torch(tmp_path: Path, name: str, ranks: int, microbatches: int):
    paths = _traced(tmp_path, ranks, "trace_torch", name, str(microbatches))
    job = read_kineto_job(paths)
    rows = [[str(each) for each in row] for row in job.schedule.ranks]
    assert rows == _ran(tmp_path, ranks, len(rows[0]))[:1] + [
        _ran(tmp_path, ranks, len(row))[rank] for rank, row in enumerate(rows) if rank
    ]
    assert job.schedule.name == name
    assert job.steps == 3
    # All ranks have one clock here.
    assert job.offsets_s is not None
    assert job.widths_s is not None
    assert (abs(job.offsets_s) <= job.widths_s).all()


def _bare(paths: list[Path]) -> list[RankSteps]:
    """Return ranks as releases before 2.13 show them, without names of chunks."""
    ranks = []
    for path in paths:
        trace = read_trace(path)
        bare = tuple(each for each in trace.ranges if not each.name.startswith("PP:"))
        ranks.append(rank_steps(replace(trace, ranges=bare)))
    return ranks


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb"])
def test_torch_without_its_annotations(tmp_path: Path, name: str):
    ranks = _bare(_traced(tmp_path, 2, "trace_torch", name, "4"))
    layout = find_layout(ranks)
    rows = [[str(each) for each in row] for row in layout.schedule.ranks]
    assert rows == _ran(tmp_path, 2, len(rows[0]))
    assert layout.names == (name,)
    # The first stage has no gradient of its input: a computation without work, not a missing one.
    for rank, row in zip(with_first_inputs(ranks, layout), layout.schedule.ranks, strict=True):
        assert [kind for kind, _, _ in rank.order] == [each.kind for each in row]


def test_chunks_that_run_alike_are_told_by_the_grid(tmp_path: Path):
    """All forwards and then all backwards: two chunks of 4 microbatches run as 4 of 2 do."""
    ranks = _bare(_traced(tmp_path, 2, "trace_torch", "looped-bfs", "4"))
    with pytest.raises(UsageError, match="which run alike; say which it is with --schedule GRID"):
        find_layout(ranks)
    schedule = generate("looped-bfs", ranks=2, microbatches=4, virtual_stages=2)
    assert with_grid(ranks, schedule, None).schedule == schedule


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
def test_schedules_that_no_transfer_shows_are_refused_without_annotations(
    tmp_path: Path, name: str
):
    ranks = _bare(_traced(tmp_path, 2, "trace_torch", name, "4"))
    with pytest.raises(UsageError, match="V-shaped schedules and overlapped pairs pass from"):
        find_layout(ranks)


def test_torch_without_steps_of_the_profiler(tmp_path: Path):
    paths = _traced(tmp_path, 2, "trace_torch", "1f1b", "4", "no")
    job = read_kineto_job(paths)
    assert job.schedule.ranks == generate("1f1b", ranks=2, microbatches=4).ranks
    assert job.steps == 3


def test_deepspeed(tmp_path: Path):
    paths = _traced(tmp_path, 4, "trace_deepspeed", "8")
    job = read_kineto_job(paths)
    rows = [[str(each) for each in row] for row in job.schedule.ranks]
    assert rows == _ran(tmp_path, 4, len(rows[0]))
    assert job.schedule.name == "1f1b"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "shape", "name"),
    [
        (4, ("0", "0", "8"), "1f1b"),
        (2, ("2", "0", "4"), "interleaved-1f1b"),
        (2, ("2", "3", "6"), "interleaved-1f1b"),
    ],
)
def test_megatron(tmp_path: Path, ranks: int, shape: tuple[str, str, str], name: str):
    """Its order is our generator's, which other tests hold against Megatron's own tables."""
    job = read_kineto_job(_traced(tmp_path, ranks, "trace_megatron", *shape))
    virtual, group, microbatches = map(int, shape)
    wanted = generate(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual or None,
        group=group or None,
    )
    assert job.schedule == wanted
