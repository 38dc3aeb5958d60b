"""Plans for training scripts that do not know of the planner: what `planner run` puts into their
processes.

`startup/` comes first on PYTHONPATH, so Python loads its `sitecustomize.py` when it starts. That
waits until a training engine is imported. Then `training.py` wraps the engine's call that trains,
and at the first such call it enters `planner_runtime`, which it leaves when the process exits.

A process that imports no engine loads nothing of this package but `sitecustomize.py`.
"""
