"""Code that the examples share: their command line options, and the step from a profile to a
plan.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import gpt
import torch

from perseus_planner import Profile, solve
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.runtime.emulation import emulate
from perseus_planner.schedules import Schedule

SLOWER = 50_000
"""How much slower an emulated GPU is by default: computations of this small GPT then take tens
of milliseconds.
"""


def parse_options(description: str) -> argparse.Namespace:
    """Parse the options of an example; adds the size of the GPT as `size` and the profiling
    settings as `sweep`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", default="cuda", help="GPU of each rank, such as cuda or emulated:a100-sxm"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="training steps, the first of which is profiled"
    )
    parser.add_argument("--no-plan", action="store_true", help="train only")
    parser.add_argument(
        "--observe", action="store_true", help="set nothing: profile at the clock the GPU runs at"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="train with the plan, but set no clocks"
    )
    parser.add_argument(
        "--service", help="address of `planner serve`, which then moves the job beside stragglers"
    )
    parser.add_argument(
        "--max-changes",
        type=int,
        help="clock changes of a GPU per iteration; 0 for one clock per GPU",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("trained"), help="where to write profile, plan and run"
    )
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of an iteration")
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    for name in ("layers", "hidden", "heads", "sequence"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(gpt.Size, name), help=f"{name} of the GPT"
        )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # passed by the deepspeed launcher
    args = parser.parse_args()
    if args.gpu.startswith("emulated:") and "?" not in args.gpu:
        args.gpu += f"?slower={SLOWER}"
    if not args.no_plan:
        args.folder.mkdir(parents=True, exist_ok=True)
    names = {
        "profile": "profile.yaml",
        "frontier": "frontier.npz",
        "plan": "plan.yaml",
        "record": "run",
    }
    for key, name in names.items():
        setattr(args, key, args.folder / name)
    args.size = gpt.Size(args.layers, args.hidden, args.heads, args.sequence)
    args.sweep = SweepSettings(control="observed" if args.observe else "clock")
    return args


def is_on_gpu(args: argparse.Namespace) -> bool:
    """Whether to compute on a GPU; otherwise the CPU computes and the GPU is emulated or
    simulated.
    """
    return torch.cuda.is_available() and not args.gpu.startswith(("emulated:", "simulated:"))


def emulated(engine, args: argparse.Namespace):
    """Return a context in which computations take as long as on an emulated GPU, if `--gpu`
    names one.
    """
    return emulate(engine, args.gpu) if args.gpu.startswith("emulated:") else nullcontext()


def service_options(args: argparse.Namespace) -> dict[str, object]:
    """Return what `planner_runtime` needs to follow a service, if `--service` names one; the job
    has the name of the folder.
    """
    if args.service is None:
        return {}
    return {"service": args.service, "job": args.folder.name, "frontier": args.frontier}


def write_plan(profile: Profile, schedule: Schedule, args: argparse.Namespace) -> None:
    """Write the frontier, and the plan on it that is as fast as all clocks at maximum, with the
    least energy.
    """
    frontier = solve(profile, schedule)
    frontier.save(args.frontier)
    plan = frontier.plan_for(frontier.baseline_time_s, max_changes=args.max_changes)
    plan.save(args.plan)
    saved = 100 * (1 - plan.energy_j / plan.baseline_energy_j)
    print(
        f"plan: {plan.time_s:.4g} s, {saved:.1f} % less energy than all clocks at maximum "
        f"({plan.origin})",
        flush=True,
    )


def say_what_next(args: argparse.Namespace) -> None:
    """Name the files that were written, and the commands that show them."""
    if args.gpu.startswith("emulated:"):
        print(
            "Computations are emulated; messages, the optimizer and all else are real work of "
            "this machine, so that iterations take longer than planned, and much longer while it "
            "is busy."
        )
    print(
        f"Wrote {args.profile}, {args.frontier}, {args.plan} and the folder {args.record}. Next:\n"
        f"  planner show {args.record}\n"
        f"  planner report {args.record} {args.frontier} {args.plan} {args.profile} -o "
        f"{args.folder / 'report.html'}",
        flush=True,
    )
