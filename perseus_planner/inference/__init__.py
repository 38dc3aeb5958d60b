"""Pools of servers under latency objectives: instances, tensor degrees and clocks for each class
of requests.
"""
