"""Adapters to the training engines: what each engine runs, and where the runtime hooks into it.
Start at `engine`.
"""
