"""Tables of computations, ours and ByteDance's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from made_traces import Made

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.analysis import analyse
from perseus_planner.extensions.traces.replaying import learn_gaps, mean_times_s, replay_s
from perseus_planner.extensions.traces.tables import read_table_job
from perseus_planner.schedules.generators import generate

FOUR = generate("1f1b", ranks=4, microbatches=8)


def _table(path: Path, made: Made, *, theirs: bool) -> None:
    made.write(path.parent)  # makes the truth
    words = {"F": "forward-compute", "B": "backward-compute"}
    ours = "stage,replica,step,kind,start,duration,microbatch"
    lines = ["dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id" if theirs else ours]
    for replica, (begins_s, ends_s) in enumerate(
        zip(made.truth["begins_s"], made.truth["ends_s"], strict=True)
    ):
        for step in range(made.steps):
            for place, each in enumerate(made.schedule.computations()):
                begin_s = float(begins_s[step, place])
                time_s = float(ends_s[step, place]) - begin_s
                if theirs:
                    lines.append(
                        f"{replica},{each.stage},0,{step},{words[each.kind]},{begin_s},{time_s},0,"
                        f"0,{each.microbatch}"
                    )
                    lines.append(f"{replica},{each.stage},0,{step},forward-send,{begin_s},9,0,0,0")
                else:
                    lines.append(
                        f"{each.stage},{replica},{step},{each.kind},{begin_s},{time_s},"
                        f"{each.microbatch}"
                    )
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "StragglerAnalysis"])
def test_both_kinds_are_read_as_they_are(tmp_path: Path, *, theirs: bool):
    made = Made(FOUR, (0.02,) * 4, slowdowns=((), (1.0, 1.0, 2.5, 1.0), ()), jitter=0.01)
    path = tmp_path / "table.csv"
    _table(path, made, theirs=theirs)
    job = read_table_job([path])
    assert job.schedule == FOUR
    assert (job.pipelines, job.steps) == (3, made.steps)
    wanted = np.array(made.truth["ends_s"]) - np.array(made.truth["begins_s"])
    np.testing.assert_allclose(job.times_s, wanted, atol=1e-6)
    assert [use.worker for use in analyse(job).slow] == ["dp1 stage2"]


def test_held_out_steps_are_replayed(tmp_path: Path):
    made = Made(FOUR, (0.02, 0.021, 0.022, 0.03), steps=10, jitter=0.03)
    path = tmp_path / "table.csv"
    _table(path, made, theirs=False)
    job = read_table_job([path])
    gaps = learn_gaps(job.of_steps(slice(0, 5)))
    held_out = job.of_steps(slice(5, 10))
    own = replay_s(held_out, held_out.times_s, gaps) / held_out.iterations_s - 1
    by_means = replay_s(held_out, mean_times_s(job.of_steps(slice(0, 5))), gaps)
    assert np.abs(own).mean() < 0.002
    assert abs((by_means / held_out.iterations_s).mean() - 1) < 0.015


@pytest.mark.parametrize(("jitter", "is_said"), [(0.01, False), (0.2, True)])
def test_a_replay_by_means_that_is_off_is_said(tmp_path: Path, jitter: float, *, is_said: bool):
    """Iterations wait for the longest of unlike computations, which means do not show."""
    made = Made(FOUR, (0.02,) * 4, steps=10, jitter=jitter)
    path = tmp_path / "table.csv"
    _table(path, made, theirs=False)
    seen = analyse(read_table_job([path]))
    assert (abs(seen.replay_error) > 0.03) == is_said
    remarks = [each for each in seen.remarks if each.startswith("A replay by mean times is -")]
    assert len(remarks) == is_said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stage,step,kind,start\n0,0,F,0\n", "has no column duration in the header"),
        ("stage,step,kind,start,duration\n0,0,F,zero,1\n", "line 2: could not convert string to f"),
        ("stage,step,kind,start,duration\n0,0,F,0,-1\n", "is no computation; write times of 0 or"),
        ("stage,step,kind,start,duration\n0,0,send,0,1\n", "has no forwards and backwards; give a"),
        ("stage,step,kind,start,duration\n1,0,F,0,1\n1,0,B,1,1\n", "stage 0 of replica 0 has no r"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, said: str):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_table_job([path])
    assert said in str(refusal.value)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"parquet needs pyarrow; run `pip install"):
        read_table_job([tmp_path / "table.parquet"])
