"""Measured profiles: the time and energy of every computation of a pipeline at every clock.

`profiles` has `Profile` and its YAML file, `csv_file` its CSV; `groups` makes profiles of other
profiles; `operating_points` chooses the clocks that are worth choosing; `clock_changes` counts and
describes clock changes.
"""
