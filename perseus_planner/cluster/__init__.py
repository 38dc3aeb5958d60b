"""Replays a training job on a whole cluster with stragglers, under the planner's policy and those
of other planners.

Use `replay.Cluster` and `replay.simulate`; `stragglers.read_stragglers` reads the events, and
`baselines` has the rules of other planners for a single pipeline.
"""
