"""What the ranks of a training job measured on the way, as one folder has it, and what that says of their plan."""

from perseus_planner.runs.ran import RanComputation, RanIteration
from perseus_planner.runs.run import RanRank, Run

__all__ = ["RanComputation", "RanIteration", "RanRank", "Run"]
