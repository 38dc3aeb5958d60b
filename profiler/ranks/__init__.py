"""Measure the stages of a pipeline on all its ranks at once, coordinated through their
torch.distributed store.
"""
