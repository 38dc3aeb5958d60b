"""What the examples are told on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from perseus_planner.profiler.profiling import SweepSettings


def parsed(description: str) -> argparse.Namespace:
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gpu", default="cuda", help="each rank's GPU, such as cuda or simulated:a100-sxm")
    parser.add_argument("--output", "-o", type=Path, default=Path("profile.yaml"), help="the profile to write")
    parser.add_argument("--observe", action="store_true", help="set nothing: measure at the clock that the GPU runs at")
    parser.add_argument("--no-profile", action="store_true", help="train only")
    parser.add_argument("--steps", type=int, default=3, help="training steps, the first of which is profiled")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="of a microbatch")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    return parser.parse_args()


def settings(options: argparse.Namespace) -> SweepSettings:
    """How to sweep."""
    return SweepSettings(knob="observed" if options.observe else "clock")
