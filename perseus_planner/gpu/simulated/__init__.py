"""Simulated GPUs: `gpu` in virtual time, `emulated` in real time; both follow the physics of
`model`.
"""
