"""GPU leases: one process at a time sets a GPU, and its settings are undone when that process ends
or dies.

`lease.lease_gpus` takes GPUs for setting, `lease.recover` resets what dead processes left, and
`records` reads who sets which GPU.
"""
