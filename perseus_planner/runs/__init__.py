"""Training runs: what the ranks of a job recorded in one folder, and whether a rank's GPU is
slow.
"""

from perseus_planner.runs.account import Account
from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.runs.run import RankRecord, Run

__all__ = ["Account", "ComputationRecord", "IterationRecord", "RankRecord", "Run"]
