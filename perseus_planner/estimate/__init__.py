"""Estimated profiles: from the dimensions of a transformer and a model of its GPU, without running
anything.

`estimate.estimate` makes the profile, `presets.named_transformer` finds a model by name or file.
"""
