"""Deciders of others: an extension's, found by name, and one that training gives, on real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launching import by_themselves

from perseus_planner.runs.status import read_status
from perseus_planner.views.unplanned import decider_text

pytest.importorskip("torch")

SITE = '''
"""A decider that always says the top clock, and counts what it is told."""

from perseus_planner.base.extensions import Extension
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime.decider import Decider
from perseus_planner.runs.status import DeciderStatus
from perseus_planner.runtime.program import Expected, Program

EXTENSION = Extension(deciders={"top": "site_planner:Top"})


class Top(Decider):
    """Says the top clock."""

    name = "site planner"
    makes_plans = False
    no_switch = "the site decides; ask it"

    def __init__(self):
        self.ended = []
        self.rounds = 0
        self.calls = []

    def check(self, options, job):
        self.calls.append("check")

    def join(self, seat):
        self.calls.append("join")
        self.order = seat.engine.order()
        with open_gpu(seat.gpu.gpu) as gpu:
            self.top = max(gpu.supported_clocks_mhz)

    def begin(self, context):
        self.calls.append("begin")
        clocks = (self.top,) * len(self.order)
        self.program = Program(1, self.order, clocks, expected=Expected(top=self.top))
        context.on_status(DeciderStatus("steady", "all at the top"))

    def program_for(self, iteration, agreed):
        return self.program

    def on_end(self, iteration, program, deviation, order):
        self.ended.append((iteration, program is self.program, deviation))

    def look(self, times, messages):
        self.rounds += 1

    def stop(self, limit_s):
        self.calls.append("stop")

    def end(self):
        self.calls.append("end")
'''

TRAINING = """
import json
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from perseus_planner.base.errors import UsageError
from perseus_planner.runtime import planner_runtime
import site_planner

def train(name):
    torch.manual_seed(rank)
    stage = pipelining.PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    decider = site_planner.Top() if name == "object" else name
    options = {"decider": decider, "gpu": "emulated:a100-sxm", "record": f"run-{name}"}
    with planner_runtime(schedule, **options) as runtime:
        for _ in range(6):
            x = torch.ones(8, 8)
            schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
        try:
            runtime.switch_to("plan.yaml")
        except UsageError as error:
            refusal = str(error)
        decider = runtime._decider
    return {
        "calls": decider.calls, "ended": decider.ended, "rounds": decider.rounds,
        "refusal": refusal, "top": decider.top,
    }

dist.init_process_group("gloo")
rank = dist.get_rank()
for name in sys.argv[1:]:
    json.dump(train(name), open(f"told-{name}-{rank}.json", "w"))
    dist.barrier()
dist.destroy_process_group()
"""


def test_deciders_of_others_decide_the_clocks_of_real_ranks(tmp_path: Path):
    (tmp_path / "site_planner.py").write_text(SITE)
    about = tmp_path / "site_planner-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: site-planner\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[perseus_planner.extensions]\nsite = site_planner:EXTENSION\n"
    )
    (tmp_path / "training.py").write_text(TRAINING)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    deciders = ("top", "object")  # of the extension, and one that the training makes
    everyone = by_themselves(2, tmp_path, "training.py", *deciders, **environment)
    assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
    for decider in deciders:
        # What people see of it is under its own name.
        (attempt,) = (tmp_path / f"run-{decider}").glob("attempt-*")
        assert decider_text(read_status(attempt)) == "Site planner: all at the top"
        for rank in range(2):
            told = json.loads((tmp_path / f"told-{decider}-{rank}.json").read_text())
            assert told["calls"] == ["check", "join", "begin", "stop", "end"]
            assert told["ended"] == [[iteration, True, None] for iteration in range(6)]
            assert told["rounds"] > 0
            assert told["refusal"] == "the site decides; ask it"
            assert told["top"] == 1410


@pytest.mark.needs("autopilot")
def test_a_decider_that_nobody_has_is_refused_by_name():
    from types import SimpleNamespace

    from perseus_planner.base.errors import UsageError
    from perseus_planner.runtime.joining import decider_of

    options = SimpleNamespace(decider="autopilott", work=None)
    with pytest.raises(UsageError) as refused:
        decider_of(options, has_plan=False)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "decider: there is no decider 'autopilott'; did you mean autopilot?"
    )
