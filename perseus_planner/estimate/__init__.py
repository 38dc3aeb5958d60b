"""Estimated profiles: from the dimensions of a transformer and a model of its GPU, without running
anything.

`curves.estimate` makes the profile, `transformer.named_transformer` finds a model by name or file.
"""
