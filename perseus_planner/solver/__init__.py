"""Compute the exact time-energy frontier of an iteration, and the plans along it.

Others use `frontier.solve`, `solve_dag` and `Frontier`, and `replicas.Replicas`. `curve` holds the
result; `network` and `mincut` walk along it. `planner` makes a plan by `rounding` (`point_problem`)
and `polish`, and under a switch budget by `budget` (`clock_problem`, `clock_search`). What must be
fast is C, in the folder `c`, and called through `kernels`.
"""
