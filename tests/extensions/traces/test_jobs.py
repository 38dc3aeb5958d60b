"""Made traces of GPUs: order, clocks of ranks, bubbles, slow workers; what is refused or said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_traces import Made

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.analysis import analyse
from perseus_planner.extensions.traces.job import TracedJob, read_kineto_job
from perseus_planner.schedules.generators import generate

FOUR = generate("1f1b", ranks=4, microbatches=8)
TIMES_S = (0.020, 0.021, 0.022, 0.030)
MADE = Made(FOUR, TIMES_S, jitter=0.01)


def _schedules() -> list[tuple[str, dict[str, int], bool]]:
    two = {"ranks": 4, "microbatches": 8, "virtual_stages": 2}
    one = {"ranks": 4, "microbatches": 8}
    return [
        ("gpipe", one, False),
        ("1f1b", one, False),
        ("interleaved-1f1b", two, False),
        ("interleaved-1f1b", two, True),
        ("looped-bfs", two, True),
        ("interleaved-zb", two, True),
        ("zbv", one, True),
        ("dualpipe-v", one, True),
    ]


@pytest.mark.parametrize(("name", "size", "labelled"), _schedules())
def test_times_and_clocks_of_ranks_are_those_that_were_made(
    tmp_path: Path, name: str, size: dict[str, int], *, labelled: bool
):
    schedule = generate(name, **size)
    times_s = TIMES_S * (schedule.stages // 4)
    skews_s = (0.0, 1.4, -2.3, 0.7)
    made = Made(schedule, times_s, jitter=0.01, skews_s=skews_s, labelled=labelled)
    job = read_kineto_job(made.write(tmp_path))
    assert job.schedule == schedule
    wanted_s = made.truth["ends_s"][0] - made.truth["begins_s"][0]
    np.testing.assert_allclose(job.times_s[0], wanted_s, atol=2e-6)
    assert job.offsets_s is not None
    assert job.widths_s is not None
    errors_s = np.abs(job.offsets_s[0] - np.array(skews_s))
    assert (errors_s <= job.widths_s[0] + 2e-6).all()
    assert job.widths_s.max() < 0.002


def test_bubbles_and_busy_shares_are_those_that_were_made(tmp_path: Path):
    job = read_kineto_job(MADE.write(tmp_path))
    seen = analyse(job)
    times_s = MADE.truth["ends_s"][0] - MADE.truth["begins_s"][0]
    ranks = times_s.reshape(MADE.steps, 4, -1).sum(axis=2)
    busy = (ranks / MADE.truth["iteration_s"][0][:, None]).mean(axis=0)
    np.testing.assert_allclose([use.busy_share for use in seen.ranks], busy, atol=0.01)
    assert seen.bubble_share == pytest.approx(1 - busy.mean(), abs=0.01)
    assert seen.even_bubble_share == pytest.approx(3 / 11, abs=0.01)
    assert seen.bottleneck.startswith("rank 3 (stage 3): computes ")
    assert seen.jitter == pytest.approx(0.01, rel=0.3)
    assert abs(seen.replay_error) < 0.005


def test_kernels_are_told_by_class_without_communication(tmp_path: Path):
    """All kernels of the made job are products, and communication contains waits."""
    assert read_kineto_job(MADE.write(tmp_path)).kernel_shares == {"products": 1.0}


def test_the_gpus_time_counts_though_the_host_runs_ahead(tmp_path: Path):
    """An operation takes 20 us on the host, and its kernel begins long after."""
    job = read_kineto_job(MADE.write(tmp_path))
    assert job.has_gpu_times
    assert job.times_s.min() > 0.015


def test_steps_are_told_by_the_optimizer_where_the_profiler_marks_none(tmp_path: Path):
    job = read_kineto_job(replace(MADE, marks_steps=False).write(tmp_path))
    assert job.steps == MADE.steps


def test_steps_that_a_rank_has_not_traced_are_left_out(tmp_path: Path):
    paths = MADE.write(tmp_path)
    events = json.loads(paths[0].read_text())
    events["traceEvents"] = [
        each for each in events["traceEvents"] if each["name"] != "ProfilerStep#1"
    ]
    paths[0].write_text(json.dumps(events))
    job = read_kineto_job(paths)
    assert job.steps == MADE.steps - 1
    assert "1 step that not all ranks traced whole are left out." in job.remarks


def _pair(folder: Path, **of_second: object) -> list[Path]:
    """Two ranks, of which the second one's file is made otherwise."""
    first = replace(MADE, truth={}).write(folder)
    other = folder / "other"
    other.mkdir()
    second = replace(MADE, truth={}, **of_second).write(other)
    return [first[0], *second[1:]]


def test_ranks_of_different_steps_are_refused(tmp_path: Path):
    paths = _pair(tmp_path, first_step=30)
    with pytest.raises(
        UsageError,
        match=r"^rank 0 traced steps 1 to 4 and rank 1 steps 30 to 33; trace the same steps on all",
    ):
        read_kineto_job(paths)


def test_a_stage_without_a_trace_is_refused(tmp_path: Path):
    labelled = tmp_path / "labelled"
    labelled.mkdir()
    paths = replace(MADE, labelled=True).write(labelled)
    with pytest.raises(UsageError, match=r"^stage 1 has no trace, though stage 3 has one; add the"):
        read_kineto_job([paths[0], *paths[2:]])
    paths = MADE.write(tmp_path)
    with pytest.raises(
        UsageError, match="fits no schedule that is known; is the file of a stage m"
    ):
        read_kineto_job([paths[0], *paths[2:]])


def test_an_order_of_its_own_is_refused_until_its_grid_is_given(tmp_path: Path):
    swapped = [list(row) for row in FOUR.ranks]
    swapped[1][5], swapped[1][6] = swapped[1][6], swapped[1][5]
    own = replace(FOUR, name="own", ranks=tuple(map(tuple, swapped)))
    paths = Made(own, TIMES_S).write(tmp_path)
    with pytest.raises(UsageError, match="and --schedule GRID if the schedule is the training's o"):
        read_kineto_job(paths)
    assert read_kineto_job(paths, own).schedule == own
    with pytest.raises(
        UsageError, match=r"^rank 1: ran another order than --schedule; give the sch"
    ):
        read_kineto_job(paths, FOUR)


def test_kernels_of_graphs_are_refused(tmp_path: Path):
    paths = replace(MADE, in_graphs=True).write(tmp_path)
    with pytest.raises(
        UsageError, match="were launched by CUDA graphs, which record no operations"
    ):
        read_kineto_job(paths)


def test_two_files_of_one_rank_are_refused(tmp_path: Path):
    paths = MADE.write(tmp_path)
    with pytest.raises(UsageError, match=r"^two traces are of rank 0; name each rank's file once"):
        read_kineto_job([*paths, paths[0]])


def test_traces_without_kernels_give_order_and_bubbles_only(tmp_path: Path):
    job = read_kineto_job(replace(MADE, has_kernels=False).write(tmp_path))
    assert job.schedule == FOUR
    assert not job.has_gpu_times
    said = " ".join(analyse(job).remarks)
    assert "There are no kernels in these traces: order and bubbles are those of the hosts" in said


def _of(tmp_path: Path, **changes: object) -> TracedJob:
    return read_kineto_job(replace(MADE, truth={}, **changes).write(tmp_path))


def test_computations_that_vary_are_said(tmp_path: Path):
    seen = analyse(_of(tmp_path, jitter=0.2))
    assert seen.varies
    assert any("microbatches are unlike" in each for each in seen.remarks)
    assert not analyse(_of(tmp_path, jitter=0.02)).varies


def test_a_slow_worker_is_named_with_what_it_costs(tmp_path: Path):
    slow = ((), (1.0, 2.3, 1.0, 1.0), ())
    made = replace(MADE, truth={}, slowdowns=slow)
    job = read_kineto_job(made.write(tmp_path))
    assert job.pipelines == 3
    seen = analyse(job)
    assert [use.worker for use in seen.slow] == ["rank 4"]
    assert seen.slow[0].slowdown == pytest.approx(2.3, rel=0.02)
    healthy_s, slow_s, _ = (lengths_s.mean() for lengths_s in made.truth["iteration_s"])
    assert seen.slow_cost == pytest.approx(1 - healthy_s / slow_s, abs=0.01)
    assert seen.remarks[0].startswith(
        "rank 4 (stage 1) is 2.3 times slower than its peers: mend it"
    )


def test_a_gpu_that_waits_for_its_host_is_said(tmp_path: Path):
    seen = analyse(_of(tmp_path, idle_share=0.6))
    assert max(use.host_share or 0.0 for use in seen.ranks) > 0.5
    assert any("launches are the bottleneck" in each for each in seen.remarks)
    assert not any("launches" in each for each in analyse(_of(tmp_path)).remarks)
