"""GPUs through NVML: the real binding, nvidia-ml-py, with a stand-in library."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from fake_nvml import CLOCKS_MHZ, PCI, UUIDS, StandIn, compiled
from nvml_exercise import check_refused, exercised, failed

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import THROTTLE_REASONS, open_gpu
from perseus_planner.gpu.nvml.device import visible_gpus

NOT_SUPPORTED, NO_PERMISSION, UNINITIALIZED, LOST = 3, 4, 1, 15


def test_readings_are_in_si_units(nvml: StandIn):
    nvml.add(
        "* now_s 100",
        "* power_w 321.5",
        "* clock_mhz 1395",
        "* temperature_c 71",
        "* throttle 0x765",
    )
    nvml.add(
        "* energy_mj 123456",
        "* field_74 2500000000",
        "* field_271 7",
        "* field_77 1000000000",
        "* field_79 3000000000",
        "* limit_mw 200000 700000 600000",
    )
    with open_gpu("nvml:0") as gpu:
        assert (gpu.energy_j(), gpu.power_w(), gpu.clock_mhz(), gpu.temperature_c()) == (
            123.456,
            321.5,
            1395,
            71.0,
        )
        assert gpu.throttle_reasons() == {
            *("sw-power-cap", "sw-thermal", "hw-thermal", "board-limit", "reliability")
        }
        assert gpu.throttled_s() == {
            "sw-power-cap": 2.5,
            "sync-boost": 0.0,
            "sw-thermal": 0.0,
            "hw-thermal": 0.0,
            "hw-power-brake": 7e-9,
            "board-limit": 1.0,
            "reliability": 3.0,
        }
        assert (gpu.power_limits_w, gpu.power_limit_w()) == ((200.0, 700.0), 600.0)
        assert (gpu.text, gpu.uuid, gpu.name) == (
            f"nvml:{UUIDS[0]}",
            UUIDS[0],
            "NVIDIA H100 80GB HBM3",
        )
        assert (gpu.origin, gpu.driver, gpu.keeps_settings) == ("measured", "570.86.15", True)
        assert gpu.supported_clocks_mhz == CLOCKS_MHZ
        assert gpu.warnings() == ()


def test_energy_between_two_readings_is_power_times_time(nvml: StandIn):
    nvml.add("* now_s 100", "* power_w 250")
    with open_gpu("nvml:0") as gpu:
        before_j = gpu.energy_j()
        nvml.set("now_s", 104)
        assert gpu.energy_j() - before_j == pytest.approx(1000.0)


def test_clocks_are_listed_highest_first_once_each_and_for_the_highest_memory_clock(nvml: StandIn):
    nvml.add(
        "* memory_clocks 405 2619 1593",
        "* clocks 900 1200 0 900 4294967295 1050",
        "* clocks_at_405 405",
    )
    with open_gpu("nvml:0") as gpu:
        assert gpu.supported_clocks_mhz == (1200, 1050, 900)


def test_a_locked_clock_outlives_the_process_and_is_reset_by_another(nvml: StandIn):
    script = (
        "from perseus_planner.gpu import open_gpu\nwith open_gpu('nvml:1') as gpu: "
        "gpu.set_clock_mhz(1200)"
    )
    subprocess.run([sys.executable, "-c", script], cwd="/", env=nvml.environment(), check=True)
    assert (nvml.locked_mhz(0), nvml.locked_mhz(1)) == (None, (1200, 1200))
    with open_gpu("nvml:1") as gpu:
        assert gpu.clock_mhz() == 1200
        gpu.reset_clocks()
        gpu.reset_clocks()
    assert nvml.locked_mhz(1) is None


def test_a_clock_that_is_not_supported_is_refused_before_nvml_rounds_it(nvml: StandIn):
    with open_gpu("nvml:0") as gpu, pytest.raises(GpuError) as refused:
        gpu.set_clock_mhz(1001)
    assert str(refused.value) == (
        f"nvml:{UUIDS[0]}: cannot lock its clock at 1001 MHz; the nearest supported clock is "
        "1005 MHz, and all are from 210 to 1980 MHz"
    )
    assert nvml.settings() == []


def test_where_no_clocks_are_listed_nvml_alone_says_which_can_be_locked(nvml: StandIn):
    nvml.fail("nvmlDeviceGetSupportedGraphicsClocks", NOT_SUPPORTED)
    with open_gpu("nvml:0") as gpu:
        with pytest.raises(GpuNotSupported, match="use the power limit as the control"):
            _ = gpu.supported_clocks_mhz
        gpu.set_clock_mhz(1500)
    assert nvml.locked_mhz(0) == (1500, 1500)


def test_a_power_limit_is_set_and_set_back(nvml: StandIn):
    with open_gpu("nvml:0") as gpu:
        gpu.set_power_limit_w(250.5)
        assert (nvml.limit_w(0), gpu.power_limit_w()) == (250.5, 250.5)
        assert gpu.warnings() == (
            "the power limit is 250.5 W, below its default of 700 W, so that high clocks may not "
            "be reached; train under the same limit, or restore the default (`nvidia-smi -pl 700`)",
        )
        gpu.reset_power_limit()
        assert gpu.power_limit_w() == 700.0
        calls = len(nvml.settings())
        gpu.reset_power_limit()
        assert len(nvml.settings()) == calls


@pytest.mark.parametrize("limit_w", [99.9, 700.1, float("nan"), float("inf"), -1.0])
def test_a_power_limit_out_of_range_is_refused(nvml: StandIn, limit_w: float):
    with open_gpu("nvml:0") as gpu, pytest.raises(GpuError, match="choose 100 to 700 W"):
        gpu.set_power_limit_w(limit_w)
    assert nvml.settings() == []


@pytest.mark.parametrize(
    "which",
    ["1", UUIDS[1], UUIDS[1].lower(), "GPU-2", PCI[1], "af:00.0", "AF:00", "00000000:AF:00.0"],
)
def test_a_gpu_is_named_by_index_uuid_or_pci_bus_id(nvml: StandIn, which: str):
    with open_gpu(f"nvml:{which}") as gpu:
        assert gpu.text == f"nvml:{UUIDS[1]}"


@pytest.mark.parametrize(
    "which", ["", "2", "-1", "01x", "99999999999999999999", "9" * 5000, "GPU-3", "H100", "٣"]
)
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(nvml: StandIn, which: str):
    with pytest.raises(GpuError) as refused, open_gpu(f"nvml:{which}"):
        pass
    name = "NVIDIA H100 80GB HBM3"
    assert str(refused.value) == (
        f"nvml:{which}: NVML shows no such GPU; choose one of: 0 {UUIDS[0]} {name}; 1 {UUIDS[1]} "
        f"{name}"
    )


def test_an_ambiguous_uuid_is_refused(nvml: StandIn):
    check_refused("nvml:GPU-", GpuError, r"several GPUs match: nvml:GPU-1.*; write more")


def test_a_pci_bus_id_that_is_not_there_is_refused(nvml: StandIn):
    said = r"nvml:0000:11:00\.0: cannot find it.*; run `planner doctor`"
    check_refused("nvml:0000:11:00.0", GpuError, said)


def test_mig_instances_and_vgpus_are_refused(nvml: StandIn):
    said = r"a MIG instance has no clock.*`nvidia-smi -mig 0`"
    check_refused("nvml:MIG-0ff0", GpuNotSupported, said)
    nvml.set("virtualization", 2, gpu=1)
    check_refused("nvml:1", GpuNotSupported, r"this is a vGPU.*; run on the host")


def test_what_falsifies_a_profile_is_said(nvml: StandIn):
    nvml.add("0 mig 1", "0 profiles 0x1000081", "0 field_251 1", "0 persistence 0")
    with open_gpu("nvml:0") as gpu:
        mig, profiles, smoothing, persistence = gpu.warnings()
    assert mig.startswith("MIG is on")
    assert profiles.startswith(
        "workload power profiles are active (MAX_P, LLM_TRAINING, LOW_PRIORITY_BACKGROUND)"
    )
    assert smoothing.startswith("power smoothing is on")
    assert persistence.startswith("persistence mode is off")
    with open_gpu("nvml:1") as gpu:
        assert gpu.warnings() == ()


def test_clocks_that_another_program_has_locked_are_found_while_the_gpu_works(nvml: StandIn):
    nvml.set("memory_mhz", 2619)
    with open_gpu("nvml:0") as gpu:
        assert gpu.foreign_locks() == ()
        gpu.set_clock_mhz(1500)
        nvml.set("memory_mhz", 1593)
        clock, memory = gpu.foreign_locks()
        assert clock.startswith(
            "the SM clock is 1500 MHz and not 1980 MHz, although it works and nothing throttles it:"
        )
        assert memory.startswith("the memory clock is 1593 MHz and not 2619 MHz, although it works")
        nvml.set("throttle", "0x2")  # a program has set its clocks
        assert len(gpu.foreign_locks()) == 2


@pytest.mark.parametrize("bit", [bit for bit in range(64) if bit != 1])
def test_no_program_is_blamed_while_any_reason_holds_known_or_not(nvml: StandIn, bit: int):
    nvml.add("* driver 615.71.03", f"* throttle {1 << bit:#x}")
    with open_gpu("nvml:0") as gpu:
        gpu.set_clock_mhz(1500)
        assert gpu.clock_mhz() == 1500
        assert gpu.foreign_locks() == ()
        warned = [text for text in gpu.warnings() if text.startswith("a reason that the planner")]
        assert [f"(bits {1 << bit:#x})" in text for text in warned] == [True] * (bit > 10)


REASONS_OF_BINDING = {
    "sw-power-cap": "SwPowerCap",
    "hw-slowdown": "HwSlowdown",
    "sync-boost": "SyncBoost",
    "sw-thermal": "SwThermalSlowdown",
    "hw-thermal": "HwThermalSlowdown",
    "hw-power-brake": "HwPowerBrakeSlowdown",
    "board-limit": "BoardLimit",
    "reliability": "Reliability",
}
NUMBERS_OF_BINDING = {
    "NVML_FI_DEV_PERF_POLICY_POWER": 74,
    "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST": 76,
    "NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT": 77,
    "NVML_FI_DEV_PERF_POLICY_RELIABILITY": 79,
    "NVML_FI_PWR_SMOOTHING_ENABLED": 251,
    "NVML_FI_PWR_SMOOTHING_APPLIED_TMP_FLOOR": 255,
    "NVML_FI_PWR_SMOOTHING_SOC_POWER_SMOOTHING_ENABLED": 300,
}
"""The names that nvidia-ml-py 13.615.71 has; older versions lack the newest."""


def test_our_bits_and_fields_are_those_of_the_installed_binding(nvml: StandIn):
    import pynvml

    assert {*REASONS_OF_BINDING} == {*THROTTLE_REASONS}
    for name, of_binding in REASONS_OF_BINDING.items():
        bit = getattr(pynvml, f"nvmlClocksThrottleReason{of_binding}", None)
        if bit is None:
            assert name in ("board-limit", "reliability"), pynvml.__file__
            continue
        nvml.set("throttle", f"{bit:#x}")
        with open_gpu("nvml:0") as gpu:
            assert gpu.throttle_reasons() == {name}
    for name, number in NUMBERS_OF_BINDING.items():
        assert getattr(pynvml, name, number) == number, name


def test_power_smoothing_by_state_of_charge_is_said_on_its_own_and_raises_no_limit(nvml: StandIn):
    nvml.add("* driver 615.71.03", "0 field_300 1", "0 field_255 350", "1 field_300 0")
    with open_gpu("nvml:0") as gpu, open_gpu("nvml:1") as other:
        (warning,) = gpu.warnings()
        assert warning.startswith(
            "power smoothing by state of charge is on, by which power follows an energy store"
        )
        assert "nvidia-smi power-smoothing" in warning
        assert gpu.power_limits_w == (100.0, 700.0)
        assert other.warnings() == ()
        nvml.set("field_251", 1, gpu=0)
        assert [text.partition(",")[0] for text in gpu.warnings()] == [
            "power smoothing is on",
            "power smoothing by state of charge is on",
        ]


def test_power_smoothing_forbids_power_limits_below_its_floor(nvml: StandIn):
    nvml.add("0 field_251 1", "0 field_255 350", "1 field_251 0", "1 field_255 350")
    with open_gpu("nvml:0") as gpu, open_gpu("nvml:1") as other:
        (warning,) = gpu.warnings()
        assert warning.startswith(
            "power smoothing is on, which keeps power above 350 W, so that lower clocks may save"
        )
        assert (gpu.power_limits_w, other.power_limits_w) == ((350.0, 700.0), (100.0, 700.0))
        with pytest.raises(
            GpuError, match=r"cannot set its power limit to 300 W; choose 350 to 700 W"
        ):
            gpu.set_power_limit_w(300.0)
        other.set_power_limit_w(300.0)


def test_a_module_is_read_where_the_gpu_alone_cannot_be_and_that_is_said(nvml: StandIn):
    nvml.add(
        "* module 1",
        "* power_w 600",
        "* field_83 error 3",
        "* field_186 error 3",
        "* field_191 error 3",
    )
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", NOT_SUPPORTED)
    nvml.fail("nvmlDeviceGetPowerUsage", NOT_SUPPORTED)
    with open_gpu("nvml:0") as gpu:
        assert gpu.power_w() == 600.0
        assert gpu.energy_j() > 999.0
        assert gpu.warnings() == (
            "energy and power can only be read for the whole module, including the CPU; compare "
            "only profiles that were measured the same way",
        )


def test_one_way_to_read_energy_is_kept(nvml: StandIn):
    nvml.add("* now_s 100", "* field_83 5000000")
    with open_gpu("nvml:0") as gpu:
        assert gpu.energy_j() == 1000.0
        nvml.fail("nvmlDeviceGetTotalEnergyConsumption", NOT_SUPPORTED)
        with pytest.raises(GpuNotSupported):
            gpu.energy_j()
    with open_gpu("nvml:0") as gpu:
        assert gpu.energy_j() == 5000.0


@pytest.mark.parametrize("said", ["error 3", "error 2", "untouched", "0", "0xffffffff"])
def test_power_is_read_the_older_way_where_the_field_has_none(nvml: StandIn, said: str):
    nvml.add("* power_w 123", f"* field_186 {said}")
    with open_gpu("nvml:0") as gpu:
        assert gpu.power_w() == 123.0
        assert nvml.calls("nvmlDeviceGetPowerUsage") == 1


def test_reasons_that_are_not_counted_are_left_out(nvml: StandIn):
    nvml.add(
        "* field_74 0",
        "* field_269 error 3",
        "* field_270 untouched",
        "* field_271 error 2",
        "* field_76 error 6",
    )
    with open_gpu("nvml:0") as gpu:
        assert gpu.throttled_s() == {"sw-power-cap": 0.0}
        asked = nvml.calls("nvmlDeviceGetFieldValues")
        gpu.throttled_s()
        assert nvml.calls("nvmlDeviceGetFieldValues") == asked + 1


@pytest.mark.parametrize("method", ["set_clock_mhz", "set_power_limit_w", "reset_clocks"])
def test_without_permission_the_error_names_what_sets_without_it(nvml: StandIn, method: str):
    functions = ("SetGpuLockedClocks", "ResetGpuLockedClocks", "SetPowerManagementLimit")
    for function in functions:
        nvml.fail(f"nvmlDevice{function}", NO_PERMISSION)
    outcome = exercised("nvml:0")
    assert failed(outcome) == {"set_clock_mhz", "reset_clocks", "set_power_limit_w"}
    assert isinstance(outcome[method], GpuNotPermitted)
    for remedy in ("root", "--cap-add SYS_ADMIN", "zeusd:", "command:", "dry-run:", "observe"):
        assert remedy in str(outcome[method])


def test_the_text_of_a_refusal_says_who_what_why_and_what_to_do(nvml: StandIn):
    nvml.fail("nvmlDeviceSetGpuLockedClocks", NO_PERMISSION)
    with open_gpu("nvml:0") as gpu, pytest.raises(GpuNotPermitted) as refused:
        gpu.set_clock_mhz(1200)
    assert str(refused.value) == (
        f"nvml:{UUIDS[0]}: cannot lock its SM clock at 1200 MHz: NVML returns 'Insufficient "
        "Permissions' (error 4) from nvmlDeviceSetGpuLockedClocks; setting needs root (in Docker "
        "also `--cap-add SYS_ADMIN`): run as root, or choose a back-end that sets for you (zeusd: "
        "or command:), or set nothing (dry-run:, or observe mode)"
    )


def test_where_clocks_cannot_be_locked_resetting_them_says_so(nvml: StandIn):
    for function in ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"):
        nvml.fail(function, NOT_SUPPORTED)
    with open_gpu("nvml:0") as gpu:
        with pytest.raises(GpuNotSupported, match="use the power limit as the control"):
            gpu.reset_clocks()
        with pytest.raises(GpuNotSupported, match="use the power limit as the control"):
            gpu.set_clock_mhz(1200)


def test_a_library_that_locks_and_cannot_unlock_is_not_passed_over(nvml: StandIn):
    nvml.fail("nvmlDeviceResetGpuLockedClocks", NOT_SUPPORTED)
    with open_gpu("nvml:0") as gpu:
        gpu.set_clock_mhz(1200)
        with pytest.raises(GpuNotSupported, match="cannot reset its SM clock"):
            gpu.reset_clocks()


def test_a_gpu_that_is_lost_midway_is_lost_in_every_call_and_hides_no_other(nvml: StandIn):
    with open_gpu("nvml:0") as lost, open_gpu("nvml:1") as other:
        lost.set_clock_mhz(1200)
        nvml.fail("*", LOST, gpu=0)
        for call in (
            lost.energy_j,
            lost.power_w,
            lost.clock_mhz,
            lost.temperature_c,
            lost.warnings,
            lost.reset_clocks,
        ):
            with pytest.raises(GpuLost, match=f"nvml:{UUIDS[0]}: .*dmesg.*reset it.*planner reset"):
                call()
        assert other.power_w() > 0
    check_refused("nvml:0", GpuLost, "GPU is lost")
    check_refused(f"nvml:{UUIDS[0]}", GpuLost, "it may be the one that is lost")
    with open_gpu(f"nvml:{UUIDS[1]}") as gpu:
        assert gpu.uuid == UUIDS[1]
    lost_one, other_one = visible_gpus()
    assert (lost_one.text, other_one.text) == ("nvml:0", f"nvml:{UUIDS[1]}")
    assert "GPU is lost" in lost_one.problem
    assert (other_one.index, other_one.name, other_one.problem) == (1, "NVIDIA H100 80GB HBM3", "")


def test_visible_gpus_opens_none_of_them(nvml: StandIn):
    assert [(gpu.index, gpu.text) for gpu in visible_gpus()] == [
        (0, f"nvml:{UUIDS[0]}"),
        (1, f"nvml:{UUIDS[1]}"),
    ]
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown") == 1
    nvml.set("gpus", 0)
    assert visible_gpus() == ()
    check_refused("nvml:0", GpuError, "NVML shows none on this node")


def test_nvml_is_started_once_and_shut_down_when_the_last_gpu_is_closed(nvml: StandIn):
    with open_gpu("nvml:0"):
        with open_gpu("nvml:1") as gpu:
            gpu.close()
        assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 0)
    assert nvml.calls("nvmlShutdown") == 1
    with pytest.raises(GpuError, match="this GPU was closed; open it again"):
        gpu.power_w()


def test_a_gpu_can_be_used_from_many_threads(nvml: StandIn):
    errors: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(20):
                with open_gpu("nvml:1") as gpu:
                    gpu.energy_j()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown")


def test_a_forked_child_uses_and_closes_the_gpus_of_its_parent(nvml: StandIn):
    script = """
import os
from perseus_planner.gpu import open_gpu
with open_gpu("nvml:0") as gpu:
    gpu.power_w()
    child = os.fork()
    if child == 0:
        gpu.set_clock_mhz(1200)
        gpu.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert gpu.clock_mhz() == 1200
    gpu.reset_clocks()
"""
    subprocess.run(
        [sys.executable, "-c", script], cwd="/", env=nvml.environment(), check=True, timeout=300
    )
    assert nvml.locked_mhz(0) is None
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown") == 2


def test_an_old_library_without_newer_functions_is_read_by_the_older_ones(nvml: StandIn, tmp_path):
    newer = (
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetVirtualizationMode",
    )
    old = StandIn(compiled(tmp_path / "old", without=newer), tmp_path)
    old.add("* power_w 111", "* temperature_c 55", "* throttle 0x40")
    script = """
from nvml_exercise import exercised, failed
outcome = exercised("nvml:1")
assert not failed(outcome), outcome
print(*(outcome[name] for name in ("power_w", "temperature_c", "throttle_reasons", "power_limit_w", "throttled_s")))
"""  # noqa: E501
    environment = {**old.environment(), "PYTHONPATH": "tests/support"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("111.0 55.0 frozenset({'hw-thermal'}) 700.0 {}\n", "")
