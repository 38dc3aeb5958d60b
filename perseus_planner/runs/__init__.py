"""Training runs: what the ranks of a job recorded in one folder, and whether a rank's GPU is
slow.
"""

from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.runs.run import RankRecord, Run
from perseus_planner.runs.tables import Total

__all__ = ["ComputationRecord", "IterationRecord", "RankRecord", "Run", "Total"]
