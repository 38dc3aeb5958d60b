"""Compute the exact time-energy frontier of an iteration, and the plans along it.

Others use `solve.solve` and `solve_dag`, `frontier.Frontier` and `replicas.Replicas`. The walk along the frontier is
`network` and `mincut`; a plan is made by `planner` from `rounding` (`point_problem`, `dispatch`) and, under a switch
budget, `budget` (`segments`, `segment_moves`, `segment_search`).
"""
