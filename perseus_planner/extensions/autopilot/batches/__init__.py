"""Clocks of the very batch of each iteration, where microbatches differ in work: what work a batch
has, what computations take by it, and what ranks tell each other in time.
"""
