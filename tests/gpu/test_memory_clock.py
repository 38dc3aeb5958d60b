"""The memory clock: `memory:` before a GPU, leased and reset as the SM clock is, beside it; and the
modes that set it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import loaded
from fake_nvml import StandIn
from gpu_owners import await_end, guardians, kill, owner

from perseus_planner.base.errors import GpuError, GpuInUse, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus, recover, stale_records
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.runtime.modes import memory_modes

EMULATED = "emulated:a100-sxm/0?slower=100"
WAITS = """
import sys
from perseus_planner.runtime.modes import memory_modes

with memory_modes(sys.argv[1], 1593) as modes:
    modes["mem-1593"]()
    print("set", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))


def test_modes_lock_the_memory_clock_beside_a_lease_of_the_sm_clock(nvml: StandIn):
    with open_gpu("nvml:0") as gpu, lease_gpus([gpu]), memory_modes("nvml:0", 1593, 2619) as modes:
        assert list(modes) == ["own", "mem-1593", "mem-2619"]
        assert nvml.memory_mhz(0) is None
        gpu.set_clock_mhz(1500)
        modes["mem-1593"]()
        assert (nvml.memory_mhz(0), nvml.memory_mhz(1), nvml.locked_mhz(0)) == (
            1593, None, (1500, 1500),
        )  # fmt: skip
        (others,) = gpu.foreign_locks()[1:]
        assert others.startswith("the memory clock is 1593 MHz and not 2619 MHz")
        modes["own"]()
        assert nvml.memory_mhz(0) is None
        modes["mem-2619"]()
        with pytest.raises(GpuInUse, match="this process has leased it already"):
            memory_modes("nvml:0", 1593).__enter__()
    assert (nvml.memory_mhz(0), nvml.locked_mhz(0), stale_records()) == (None, None, ())


def test_the_guardian_resets_the_memory_clock_of_a_killed_process(nvml: StandIn):
    with owner(WAITS, ["nvml:0"]) as process:
        its_guardians = guardians(process)
        assert nvml.memory_mhz(0) == 1593
        assert nvml.locked_mhz(0) is None
        kill(process.pid)
        await_end(its_guardians)
        assert (nvml.memory_mhz(0), stale_records()) == (None, ())
    with owner(WAITS, ["nvml:0"]) as process:
        kill(process.pid, *(guardian.pid for guardian in guardians(process)))
        process.wait()
        assert nvml.memory_mhz(0) == 1593
        assert [recovery.record.gpu.split(":")[0] for recovery in recover()] == ["memory"]
        assert (nvml.memory_mhz(0), stale_records()) == (None, ())


def test_what_cannot_be_set_is_refused(nvml: StandIn):
    with (
        pytest.raises(GpuError, match="lock its clock at 1000 MHz; the nearest supported clock is"),
        memory_modes("nvml:0", 1593, 1000),
    ):
        pass
    for which in ("command:0", "memory:nvml:0"):
        with pytest.raises(GpuNotSupported, match=f"memory:{which}: this back-end does not set"):
            open_gpu(f"memory:{which}")
    with pytest.raises(GpuError, match="there is no back-end 'x'"):
        open_gpu("memory:x:0")
    with memory_modes("dry-run:nvml:0", 1593) as modes:
        modes["mem-1593"]()
        assert nvml.memory_mhz(0) is None
    nvml.fail("nvmlDeviceSetMemoryLockedClocks", 4)
    with memory_modes("nvml:0", 1593) as modes, pytest.raises(GpuError, match="needs root"):
        modes["mem-1593"]()


def test_doctor_times_changes_of_the_memory_clock(nvml: StandIn):
    (gpu,) = loaded("doctor memory:nvml:0 --measure-latency")["gpus"]
    assert "2 from 2619 to 1593 MHz" in gpu["inspection"]["readings"][0].values()
    assert nvml.calls("nvmlDeviceSetMemoryLockedClocks", 0) > 4
    assert nvml.calls("nvmlDeviceSetGpuLockedClocks", 0) == 0
    assert nvml.memory_mhz(0) is None


def test_a_simulated_gpu_takes_longer_for_memory_at_a_lower_clock():
    compute, memory = OpCost(flops=1e12, bytes=0.0), OpCost(flops=0.0, bytes=1e9)
    with open_gpu("simulated:a100-sxm?noise=0") as gpu, memory_modes(gpu.text, 1593):
        assert isinstance(gpu, SimulatedGpu)

        def times_s() -> list[float]:
            begin_s = gpu.now_s()
            gpu.run(compute)
            middle_s = gpu.now_s()
            gpu.run(memory)
            return [middle_s - begin_s, gpu.now_s() - middle_s]

        full_s = times_s()
        gpu.lock_memory(1593)
        gpu.wait(1.0)
        assert times_s() == pytest.approx([full_s[0], full_s[1] * 2619 / 1593], rel=1e-4)


def test_the_memory_clock_of_an_emulated_gpu_is_seen_by_all_processes():
    with open_gpu(EMULATED) as gpu, memory_modes(EMULATED, 1593) as modes:
        assert isinstance(gpu, EmulatedGpu)
        modes["mem-1593"]()
        assert gpu.memory_mhz() == 1593
        begin_s = gpu.now_s()
        gpu.start(OpCost(flops=0.0, bytes=1e9))
        gpu.finish()
        assert gpu.now_s() - begin_s > 1.5 * gpu.model.load(OpCost(0.0, 1e9)).time_s(1410)
    with open_gpu(EMULATED) as gpu:
        assert isinstance(gpu, EmulatedGpu)
        assert gpu.memory_mhz() == 2619
