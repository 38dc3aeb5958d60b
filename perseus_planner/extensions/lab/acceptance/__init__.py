"""The acceptance of a node: one list of checks, from the versions of what is installed to a small
training by a plan, whose output shows whether the planner works there.
"""
