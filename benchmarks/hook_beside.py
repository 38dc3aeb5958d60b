"""What the runtime's hook costs the training thread, beside another checkout in one run.

    git worktree add ../before 84fe46d2
    python benchmarks/hook_beside.py ../before

All that a schedule of torch calls for a computation is called, from the wrapper of a stage's method
down to the clock request, around a computation that takes the processor's caches, as a real one
does. The begin and the end of an iteration are those of steps of a real schedule with one
microbatch, with the hook and without it in turn. The checkouts take their turns too, in processes
of their own. The table has means, not medians: what a training pays is the mean. **Measured**, on
a machine that is as busy as it is, and so the ratio is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data import FULL
from hook_cost import _first_stage
from results import Table

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5  #: of each checkout in turn
ITERATIONS = 150  #: of each process
MICROBATCHES = 16
_COLUMNS = {
    "what": ("more with the hook", ""),
    "before": ("the other checkout, us", ".1f"),
    "now": ("this one, us", ".1f"),
    "ratio": ("this one / the other", ".2f"),
}
_WHAT = {
    "computation_mean": "a computation, mean",
    "computation_median": "a computation, median",
    "iteration_mean": "begin and end of an iteration, mean",
    "iteration_median": "begin and end of an iteration, median",
}

_RUN = """
import json, statistics, sys, time
from contextlib import nullcontext
from types import SimpleNamespace
import numpy as np
import torch
sys.path.insert(0, sys.argv[1])
import engine_cost
from perseus_planner import Profile, schedules, solve
from perseus_planner.engines import torch_pipelining
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.marks import Marks

iterations, profile, microbatches = int(sys.argv[2]), Profile.load(sys.argv[3]), int(sys.argv[4])
now = time.perf_counter_ns

def made(count):
    frontier = solve(profile, schedules.one_f_one_b(1, count))
    plan = frontier.plan_until(1.1 * frontier.baseline_time_s)
    program = Program.of_plan(1, plan, 0)
    source = engine_cost.FixedProgram(program)
    return program, source, Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, program)

cold, inside = np.zeros(1 << 18), [0, 0]
layer, batch = torch.nn.Linear(16, 16), torch.randn(2, 16)

def compute(*_, **__):
    inside[0] = now()
    layer(batch)
    cold.sum()
    inside[1] = now()

program, source, hook = made(microbatches)
stage = SimpleNamespace(stage_index=0, is_last=False)
names = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
for name in names:
    setattr(stage, name, compute)
guard = hook
if hasattr(torch_pipelining, "HookGuard"):
    guard = torch_pipelining.HookGuard(hook)
hooked = torch_pipelining._hooked_stage(guard, stage)
methods = {"F": hooked[names[0]], "B": hooked[names[1]]}
taken, bare = [], []
for number in range(iterations):
    if guard is hook:
        hook.begin_iteration(microbatches)
    else:
        guard.begin_iteration(lambda: guard.show(microbatches))
    for each in program.computations:
        for method, to in ((methods[each.kind], taken), (compute, bare)):
            begun = now()
            if each.kind == "F":
                method(each.microbatch, (), {})
            else:
                method(each.microbatch, loss=None, full_backward=True, last_backward=False)
            ended = now()
            if number:
                to.append(inside[0] - begun + ended - inside[1])
            cold.sum()
    guard.end_iteration()
assert not source.deviations, source.deviations[:1]
found = {
    "computation_mean": statistics.mean(taken) - statistics.mean(bare),
    "computation_median": statistics.median(taken) - statistics.median(bare),
}
with engine_cost._process_group():
    _, source, hook = made(1)
    iterate, attached = engine_cost._torch_pipelining(engine_cost._stage([]), 1)
    steps = {True: [], False: []}
    for number in range(iterations // 10):
        for is_hooked in (number % 2 == 0, number % 2 == 1):
            with attached(hook) if is_hooked else nullcontext():
                iterate()
                for _ in range(10):
                    begun = now()
                    iterate()
                    steps[is_hooked].append(now() - begun)
    assert not source.deviations, source.deviations[:1]
for of in ("mean", "median"):
    more = getattr(statistics, of)(steps[True]) - getattr(statistics, of)(steps[False])
    found[f"iteration_{of}"] = more - 2 * found[f"computation_{of}"]
print(json.dumps(found))
"""


def more_us(checkout: Path, profile: Path) -> dict[str, float]:
    """Return microseconds more with the hook, in a process of a checkout."""
    arguments = [checkout / "benchmarks", ITERATIONS, profile, MICROBATCHES]
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return {name: ns / 1e3 for name, ns in found.items()}


def measure(other: Path) -> Table:
    """Return the table of both checkouts: medians of their processes."""
    found: dict[Path, list[dict[str, float]]] = {ROOT: [], other: []}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        _first_stage(FULL).save(profile)
        for number in range(ROUNDS):
            for checkout in list(found)[:: 1 if number % 2 else -1]:
                found[checkout].append(more_us(checkout, profile))
    rows = []
    for name, what in _WHAT.items():
        before, now = (
            statistics.median(run[name] for run in found[checkout]) for checkout in (other, ROOT)
        )
        rows.append({"what": what, "before": before, "now": now, "ratio": now / before})
    return Table(_COLUMNS, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another version")
    print(measure(parser.parse_args(arguments).other.resolve()).markdown())


if __name__ == "__main__":
    main()
