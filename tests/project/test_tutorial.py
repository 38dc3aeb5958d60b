"""The tutorial is typed as it stands, with a stand-in for Slurm that starts two ranks on emulated
GPUs, and `pretrain()` of Megatron-LM.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from command_options import ROOT
from documents import PAGES, Reader, blocks, free_port

SUPPORT = Path(__file__).parents[1] / "support"
PAGE = next(page for page in PAGES if page.stem == "tutorial")
QUICKSTART = "planner profile --gpu simulated:a100-sxm --stages 4 -o profile.yaml"
#: Around the lines of the page, in the place of Megatron-LM's pretrain_gpt.py; `FOLDER` is
#: Megatron-LM.
SCRIPT = (
    """\
import os
import sys
from contextlib import ExitStack

sys.argv[1:] = [FOLDER]
import megatron_lm

megatron_lm.replace_cuda()
job = "planned" if "PLANNER_PLAN" in os.environ else "first"
job = "profiled" if "PROFILE" in os.environ else job
options = megatron_lm.OPTIONS.replace("--train-iters 6", "--train-iters 40")
options = options.replace("--eval-interval 2", "--eval-interval 99")
sys.argv = [f"losses-{job}", *options.split()]
""",
    """
import megatron_cpu

from perseus_planner.runtime.emulation import emulate

step, stack = training.train_step, ExitStack()


def emulated_step(forward_step, batches, model, *rest, **named):
    if job != "profiled" and not stack._exit_callbacks:
        stack.enter_context(emulate(model, os.environ["PLANNER_GPU"]))
    return step(forward_step, batches, model, *rest, **named)


training.train_step = emulated_step
with megatron_cpu.cpu_only():
    megatron_lm.main()
""",
)
SLURM = {
    # It runs the batch file at once, as a job of one node, and ends with it.
    "sbatch": """#!/bin/bash
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=localhost SLURM_NNODES=1 SLURM_GPUS_ON_NODE=2
bash "$1" > gpt-7.out 2>&1 || { cat gpt-7.out; exit 1; }
echo Submitted batch job 7
""",
    "scontrol": """#!/bin/bash
[ "$*" = "show hostnames localhost" ] && echo localhost
""",
    # A node: its GPUs are emulated, and its ranks train on the CPU.
    "srun": """#!/bin/bash
export PLANNER_GPU="emulated:a100-sxm?slower=500000" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec "$@"
""",
    "torchrun": f"""#!{sys.executable}
from torch.distributed.run import main

main()
""",
}


@pytest.mark.soak
def test_the_tutorial_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    megatron = os.environ.get("PLANNER_MEGATRON_LM")
    if megatron is None:
        pytest.skip("name a folder of Megatron-LM, core_v0.16.1, in PLANNER_MEGATRON_LM")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in SLURM.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    shutil.copy(Path(sys.executable).with_name("planner"), programs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{SUPPORT}")
    monkeypatch.setenv("PLANNER_TOKEN", "")
    (lines,) = (block.text for block in blocks(PAGE) if "training.train_step =" in block.text)
    script = lines.join(SCRIPT).replace("FOLDER", repr(megatron))
    (tmp_path / "pretrain_gpt.py").write_text(script)
    reader = Reader(free_port(), monkeypatch.setenv, has_cluster=True)
    try:
        reader._run(QUICKSTART, "index.md")
        reader.read(PAGE)
    finally:
        reader.close()
    assert (tmp_path / "after.html").exists()
    jobs = ("first", "profiled", "planned")
    first, profiled, planned = [
        json.loads((tmp_path / f"losses-{job}-1").read_text()) for job in jobs
    ]
    assert len(first) >= 160  # 40 iterations of 4 microbatches, and evaluations
    assert planned == first  # bit for bit
    # The profile repeats the loss of the fourth iteration's last microbatch a few times.
    assert (profiled[:16], profiled[len(profiled) - len(first) + 16 :]) == (first[:16], first[16:])
