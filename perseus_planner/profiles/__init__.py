"""Measured profiles: the time and energy of every computation of a pipeline at every clock.

`profiles` has `Profile` and its YAML file, `csv_file` its CSV; `groups` makes profiles of other
profiles; `measurement` also has the operating points that are worth choosing, and clock changes.
"""
