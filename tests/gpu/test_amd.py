"""AMD GPUs through AMD SMI: the real binding, amdsmi, with a stand-in library."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_amd_smi import UUIDS, AmdStandIn, amd, rocm  # noqa: F401  # fixtures

from perseus_planner import Monitor
from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.amd import visible_amd_gpus
from perseus_planner.gpu.inspection import inspect, measure_latency
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.torch_device import gpu_text


def test_readings_are_in_si_units(amd: AmdStandIn):  # noqa: F811
    with open_gpu("amd:0") as gpu:
        assert (gpu.text, gpu.uuid, gpu.name) == (
            f"amd:{UUIDS[0]}",
            UUIDS[0],
            "AMD Instinct MI300X",
        )
        assert (gpu.driver, gpu.origin, gpu.keeps_settings) == ("amdgpu 6.12.12", "measured", True)
        assert (gpu.power_w(), gpu.clock_mhz(), gpu.temperature_c()) == (730.0, 2100, 61.0)
        assert (gpu.power_limits_w, gpu.power_limit_w(), gpu.default_power_limit_w()) == (
            (1.0, 750.0),
            750.0,
            750.0,
        )
        assert gpu.supported_clocks_mhz[:2] == (2100, 2080)
        assert gpu.supported_clocks_mhz[-1] == 520  # drivers refuse 500 to 500 MHz
        begun_j, begun_s = gpu.energy_j(), gpu.now_s()
        gpu.wait(0.05)
        assert gpu.energy_j() - begun_j == pytest.approx(730.0 * (gpu.now_s() - begun_s), rel=0.05)
        with amd.changed() as kept:
            kept.gpu[0].violations, kept.hotspot_missing = 0b00110, 1
        assert (gpu.throttle_reasons(), gpu.temperature_c()) == (
            {"sw-power-cap", "sw-thermal"},
            48.0,
        )


def test_a_clock_is_set_as_a_range_and_the_level_auto_resets_it(amd: AmdStandIn):  # noqa: F811
    with open_gpu("amd:1") as gpu:
        gpu.set_clock_mhz(520)
        assert (amd.range_mhz(0), amd.range_mhz(1), gpu.clock_mhz()) == (None, (500, 520), 520)
        gpu.reset_clocks()
        assert amd.range_mhz(1) is None


@pytest.mark.parametrize("which", ["1", UUIDS[1], "bbff", "0000:C2:00.0", "c2:00.0"])
def test_a_gpu_is_found_by_index_uuid_and_bus_id(amd: AmdStandIn, which: str):  # noqa: F811
    with open_gpu(f"amd:{which}") as gpu:
        assert gpu.uuid == UUIDS[1]
    assert visible_amd_gpus() == tuple(f"amd:{uuid}" for uuid in UUIDS)


def test_an_energy_counter_in_a_wrong_unit_is_not_used_and_clocks_can_be_reset(amd: AmdStandIn):  # noqa: F811
    with amd.changed() as kept:
        kept.unit_error = 0.1
    with open_gpu("amd:0") as gpu:
        with pytest.raises(
            GpuNotSupported,
            match=r"counter rose by \d+\.\d W while its power sensor showed 730\.0 W",
        ):
            gpu.energy_j()
        assert "so the counter is not used" in gpu.warnings()[0]
        gpu.reset_clocks()


def test_a_binding_before_rocm_6_3_is_to_be_updated_and_clocks_can_be_reset(
    amd: AmdStandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    import amdsmi

    energy, clock = {"power": 1.0, "counter_resolution": 15.3}, {"cur_clk": 2100, "max_clk": 2100}
    monkeypatch.setattr(amdsmi, "amdsmi_get_energy_count", lambda _: energy)
    monkeypatch.setattr(amdsmi, "amdsmi_get_clock_info", lambda *_: clock)
    with open_gpu("amd:0") as gpu:
        for read, what, name in (
            (gpu.energy_j, "energy counter", "energy_accumulator"),
            (gpu.clock_mhz, "graphics clock", "clk"),
        ):
            with pytest.raises(GpuNotSupported) as caught:
                read()
            assert str(caught.value) == (
                f"amd:{UUIDS[0]}: cannot read its {what}: amdsmi names no {name!r}, as before ROCm "
                "6.3; update ROCm"
            )
        gpu.reset_clocks()


def test_a_monitor_measures_all_gpus_where_there_are_none_of_nvml(amd: AmdStandIn, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PLANNER_NVML_LIBRARY", "/missing/libnvidia-ml.so.1")
    with Monitor() as monitor, monitor.window() as window:
        pass
    assert [gpu.gpu for gpu in window.gpus] == [f"amd:{uuid}" for uuid in UUIDS]


def test_there_is_one_call_at_a_time(amd: AmdStandIn):  # noqa: F811
    with open_gpu("amd:0") as one, open_gpu("amd:1") as other:
        with amd.changed() as kept:
            kept.call_us = 2000
        barrier = threading.Barrier(4)

        def read(gpu: object) -> None:
            barrier.wait()
            for _ in range(5):
                gpu.clock_mhz()  # type: ignore[attr-defined]

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(read, [one, other, one, other]))
    assert amd.kept().most_inside == 1


def test_a_forked_child_reads_its_own(amd: AmdStandIn):  # noqa: F811
    with open_gpu("amd:0") as gpu:
        gpu.set_clock_mhz(1500)
        child = os.fork()
        if child == 0:
            try:
                os._exit(gpu.clock_mhz() // 100)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 15


def test_errors_say_what_to_do(amd: AmdStandIn):  # noqa: F811
    with open_gpu("amd:0") as gpu:
        with amd.changed() as kept:
            kept.refused = 10
        with pytest.raises(GpuNotPermitted) as refused:
            gpu.set_clock_mhz(1500)
        assert str(refused.value) == (
            f"amd:{UUIDS[0]}: cannot set its graphics clock to 1500 MHz: AMD SMI returns "
            "'AMDSMI_STATUS_NO_PERM - Permission Denied' (error 10) from "
            "amdsmi_set_gpu_clk_range; run as root, which setting needs, or set nothing "
            "(dry-run:, or observe mode)"
        )
        with amd.changed() as kept:
            kept.lost = 31
        with pytest.raises(GpuLost, match=r"it hangs or has fallen off the bus: see `dmesg"):
            gpu.power_w()
    with amd.changed() as kept:
        kept.lost = 0
    with pytest.raises(
        GpuError,
        match=rf"^amd:7: AMD SMI shows no such GPU; choose one of: 0 {UUIDS[0]}; 1 {UUIDS[1]}$",
    ):
        open_gpu("amd:7")


def test_without_rocm_the_error_says_what_is_missing(
    rocm: Path,  # noqa: F811
    monkeypatch,
    capsys,
    tmp_path: Path,
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(
        GpuError, match=r"libamd_smi\.so cannot be loaded; libamd_smi\.so comes with ROCm \(package"
    ):
        open_gpu("amd:0")
    assert (visible_amd_gpus(), capsys.readouterr().out) == ((), "")


def test_without_the_binding_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(
        GpuError, match=r"AMD GPUs need amdsmi, .*run `pip install '\.\[amd\]'` in your clone"
    ):
        open_gpu("amd:0")


def test_doctor_inspects_it_and_measures_how_long_a_change_takes(
    amd: AmdStandIn,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    with open_gpu("amd:0") as gpu:
        found = inspect(gpu)
        assert found.can_observe
        assert found.energy.counter_w == pytest.approx(730, rel=0.1)
        with lease_gpus([gpu]):
            latency = measure_latency(gpu)
            assert (latency.settled, amd.range_mhz(0)) == (latency.waited, (500, 2100))
        assert amd.range_mhz(0) is None


def test_a_torch_device_is_named_by_its_bus_id(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC2, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert gpu_text("amd", torch.device("cuda", 1)) == "amd:0000:c2:00.0"
    assert gpu_text("amd:0", torch.device("cuda", 1)) == "amd:0"
