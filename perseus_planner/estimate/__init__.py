"""Workloads without a GPU: a transformer's shape as FLOPs, bytes, seconds and joules of every stage and kind."""
