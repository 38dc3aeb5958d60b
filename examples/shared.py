"""What the examples share: the options on their command line, and the step from a profile to a plan."""

from __future__ import annotations

import argparse
from pathlib import Path

import gpt
import torch

from perseus_planner import Profile, solve
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.schedules import Schedule


def parsed(description: str) -> argparse.Namespace:
    """The options that all examples have, with the GPT's as its `size`, and how to profile as `sweep`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="cuda", help="each rank's GPU, such as cuda or simulated:a100-sxm")
    parser.add_argument("--steps", type=int, default=4, help="training steps, the first of which is profiled")
    parser.add_argument("--no-plan", action="store_true", help="train only")
    parser.add_argument("--observe", action="store_true", help="set nothing: profile at the clock that the GPU runs at")
    parser.add_argument("--dry-run", action="store_true", help="train by the plan, but set no clocks")
    parser.add_argument("--max-changes", type=int, help="of a GPU's clock in an iteration; 0: one clock for each GPU")
    parser.add_argument("--profile", type=Path, default=Path("profile.yaml"), help="to write")
    parser.add_argument("--plan", type=Path, default=Path("plan.yaml"), help="to write")
    parser.add_argument("--record", type=Path, default=Path("run"), help="the folder to write what ran to")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="of a microbatch")
    for name in ("layers", "hidden", "heads", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(gpt.Size, name), help="of the GPT")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    given = parser.parse_args()
    given.size = gpt.Size(given.layers, given.hidden, given.heads, given.sequence)
    given.sweep = SweepSettings(control="observed" if given.observe else "clock")
    return given


def is_on_gpu(given: argparse.Namespace) -> bool:
    """Whether a GPU computes; if not, the CPU does, beside a GPU that is simulated."""
    return torch.cuda.is_available() and not given.gpu.startswith("simulated:")


def write_plan(profile: Profile, schedule: Schedule, given: argparse.Namespace) -> None:
    """The plan that is as fast as all clocks at their maximum and needs the least energy for it."""
    frontier = solve(profile, schedule)
    plan = frontier.plan_for(frontier.baseline_time_s, max_changes=given.max_changes)
    plan.save(given.plan)
    saved = 1 - plan.energy_j / plan.baseline_energy_j
    print(f"plan: {plan.time_s:.4g} s, {saved:.1%} less energy than all clocks at maximum ({plan.origin})", flush=True)
