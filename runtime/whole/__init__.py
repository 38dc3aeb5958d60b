"""Training without a pipeline, under one clock or power limit for the whole iteration.

`search.py` chooses it from the times and energies of windows of iterations; `session.py` measures
these on each rank, sets what is chosen, and keeps the ledger.
"""
