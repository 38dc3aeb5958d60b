"""The autopilot in small worlds."""

from perseus_planner import schedules
from perseus_planner.runtime.autopilot import (
    Autopilot,
    AutopilotJob,
    AutopilotSettings,
    ComputationObservation,
    RankObservation,
)
from perseus_planner.schedules.pipeline import pipeline_iteration


def test_iterations_at_full_clocks_come_first_then_trials():
    job = AutopilotJob(pipeline_iteration(schedules.one_f_one_b(2, 4)), (1410, 1300, 1200, 1100))
    autopilot = Autopilot(job, AutopilotSettings())
    for iteration in range(3):
        decision = autopilot.decide(iteration)
        assert decision.phase == "reference"
        assert set(decision.clocks[0][0]) == {1410}
        seen = []
        for rank, program in enumerate(job.iteration.schedule.ranks):
            now_s, computations = 0.0, []
            for _, clock in zip(program, decision.clocks[0][rank], strict=True):
                computations.append(ComputationObservation(now_s, now_s + (0.1 if rank else 0.05), clock))
                now_s = computations[-1].end_s
            seen.append(RankObservation(0, rank, iteration, decision.version, 1.0, tuple(computations), 400.0))
        autopilot.observe(seen)
        if iteration == 1:
            break
    decision = autopilot.decide(2)
    assert decision.phase == "learning"
    assert decision.trials > 0
    assert decision.ledger is not None
