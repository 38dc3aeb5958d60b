"""What the ranks of a training job measured on the way, as one folder has it, and what that says of their plan."""

from perseus_planner.runs.records import ComputationRecord, IterationRecord
from perseus_planner.runs.run import RankRecord, Run

__all__ = ["ComputationRecord", "IterationRecord", "RankRecord", "Run"]
