"""Plans, their files (`plan`), and the replay of an iteration (`replay`, and `clock_replay` if
changes cost time).
"""
