"""The files in deploy/ reset what killed jobs left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from command_options import ROOT
from documents import check_unit
from fake_nvml import StandIn
from gpu_owners import LOCKS_AND_WAITS, files, guardians, kill, owner

DEPLOY = ROOT / "deploy"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def epilog(**variables: str) -> str:
    """Run the epilog in Slurm's environment, which has few variables, and return what it prints."""
    environment = {**os.environ, "PLANNER": str(Path(sys.executable).with_name("planner")), **variables}
    result = subprocess.run(
        [DEPLOY / "slurm-epilog.sh"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


def test_the_epilog_resets_what_the_killed_job_left(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert "Reset nvml:" in epilog()
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert files(state) == []


def test_the_epilog_resets_the_gpus_of_a_job_whose_leases_it_cannot_see(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
    monkeypatch.setenv("PLANNER_STATE_DIR", str(state.with_name("of the node")))
    epilog(SLURM_JOB_GPUS="1")
    assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500), None]
    epilog(SLURM_JOB_GPUS="0,1")
    assert nvml.locked_mhz(0) is None


def test_the_epilog_leaves_what_another_job_has_leased_and_succeeds(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]):
        assert "leased to process" in epilog(SLURM_JOB_GPUS="0")
        assert nvml.locked_mhz(0) == (1500, 1500)


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda unit: unit.stem)
def test_the_units_start_commands_that_exist(unit: Path):
    check_unit(unit.read_text())


TRAINING = f"""#!{sys.executable}
import signal
from contextlib import ExitStack
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus

with ExitStack() as stack:
    gpu = stack.enter_context(open_gpu("nvml:0"))
    stack.enter_context(lease_gpus([gpu]))
    gpu.set_clock_mhz(1500)
    print("set", flush=True)
    signal.pause()
"""


def test_a_pod_that_is_stopped_leaves_no_gpu_set(nvml: StandIn, state: Path, tmp_path: Path):
    (container,) = yaml.safe_load((DEPLOY / "kubernetes-pod.yaml").read_text())["spec"]["containers"]
    main, stop = (
        [word.replace("/tmp/training.pid", str(tmp_path / "training.pid")) for word in words]
        for words in (container["command"], container["lifecycle"]["preStop"]["exec"]["command"])
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(TRAINING)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{PATH}"}
    with subprocess.Popen(main, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as pod:
        try:
            assert pod.stdout.readline() == "set\n"
            assert nvml.locked_mhz(0) == (1500, 1500)
            subprocess.run(stop, env=environment, capture_output=True, timeout=30, check=True)
            assert nvml.locked_mhz(0) is None
            assert pod.wait(30) == 128 + signal.SIGTERM
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
    assert files(state) == []
