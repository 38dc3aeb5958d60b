"""Evaluations between iterations change nothing that is said of iterations: real ranks of each
engine train on emulated GPUs with and without them.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

import pytest
from launching import ranks

from perseus_planner import Run
from perseus_planner.runs.verdict import Verdict
from perseus_planner.views.run import run_text, summarize_run

ITERATIONS, EVERY = 31, (4, 10)
NOISE = 0.05  #: of times on a machine that runs other tests, a share


@pytest.mark.soak  # times need a machine that runs nothing else; test_hook.py has the mark
@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
def test_times_savings_and_verdicts_are_those_without_evaluations(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    if engine != "torch":
        pytest.importorskip({"deepspeed": "deepspeed", "megatron": "megatron.core"}[engine])
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    for each in ranks("evaluation_programs:train", 2, tmp_path, engine, str(ITERATIONS)):
        assert each.code == 0, each.stderr
    without = Run.load(tmp_path / "every-0")
    assert without.total.iterations == ITERATIONS
    usual_share = without.total.saved_share
    assert usual_share is not None
    verdict = summarize_run(without).verdict
    for every in EVERY:
        run = Run.load(tmp_path / f"every-{every}")
        follows = [number for number in range(1, ITERATIONS) if number % every == 0]
        for rank in run.ranks:
            marked = [row.iteration for row in rank.iterations if row.follows_evaluation]
            assert marked == follows
            before = [row.iteration for row in rank.iterations if row.precedes_evaluation]
            assert before == [number - 1 for number in follows]
        assert run.total.iterations == ITERATIONS - len(follows)
        assert run.total.pause_j > 0.0
        summary = summarize_run(run)
        ran = [rank.counted(1) for rank in run.ranks]
        times_s = [row.time_s for row in ran[0]]
        after_s = [row.time_s for row in run.ranks[0].iterations if row.follows_evaluation]
        usual_s = [row.time_s for row in without.ranks[0].counted(1)]
        print(
            f"{engine}, evaluation before each {every}th: {fmean(times_s):.4f} s, after one "
            f"{fmean(after_s):.4f} s, without {fmean(usual_s):.4f} s; saved "
            f"{run.total.saved_share}, without {usual_share}; "
            f"{summary.verdict}; without {verdict}"
        )
        # What else runs on this machine makes iterations longer, by some percent.
        assert fmean(times_s) == pytest.approx(median(times_s), rel=NOISE)
        assert fmean(times_s) == pytest.approx(fmean(usual_s), rel=NOISE)
        assert run.total.saved_share == pytest.approx(usual_share, abs=0.01)
        # Whether ranks or transfers are late is this machine's, by how much is not.
        assert _ratio(summary.verdict) == pytest.approx(_ratio(verdict), abs=NOISE)
        assert "in each iteration" not in run_text(summary)


def _ratio(verdict: Verdict | None) -> float:
    return 1.0 if verdict is None else verdict.ratio
