"""What all back-ends of `Gpu` have in common.

Those that reach NVML do so through nvidia-ml-py and the stand-in library of `fake_nvml`: cuda with
its devices in the other order; zeusd by the stand-in daemon, which has one GPU more, and them in
another order; command by stand-ins for sudo and nvidia-smi. So what any of them has set shows in
one place, and one script makes them all fail alike."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_amd_smi import AmdStandIn, amd, rocm  # noqa: F401  # fixtures
from fake_nvml import CUDA_SOURCE, UUIDS, StandIn, compiled, nvml, nvml_library  # noqa: F401  # fixtures
from fake_zeusd import FakeZeusd, KeptGpu, NvmlGpu

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted
from perseus_planner.gpu import BACK_ENDS, THROTTLE_REASONS, Gpu, open_gpu
from perseus_planner.gpu.wrappers import DryRunGpu

SIMULATED = "simulated:a100-sxm"
EMULATED = "emulated:a100-sxm/0"
NAMES = (
    "simulated",
    "emulated",
    "nvml",
    "cuda",
    "zeusd",
    "command",
    "amd",
    "dry-run:nvml",
    "dry-run:simulated",
)
MODELS = ("simulated", "emulated", "dry-run:simulated")
SETTING = (
    "nvmlDeviceSetGpuLockedClocks",
    "nvmlDeviceResetGpuLockedClocks",
    "nvmlDeviceSetPowerManagementLimit",
)
READINGS: tuple[Callable[[Gpu], object], ...] = (
    lambda gpu: gpu.energy_j(),
    lambda gpu: gpu.power_w(),
    lambda gpu: gpu.clock_mhz(),
    lambda gpu: gpu.temperature_c(),
    lambda gpu: gpu.throttle_reasons(),
    lambda gpu: gpu.power_limit_w(),
    lambda gpu: gpu.power_limits_w,
)


@dataclass
class Case:
    """A back-end, with access to the GPU behind it.

    Attributes:
        text: Text that opens the GPU.
        gpu: The open GPU.
        settings: Returns the locked clock of the GPU behind it, MHz or None, and its power limit,
            watts.
        refuse: Forbids all settings from now on.
        lose: Makes the GPU lost from now on.
        sets: Whether settings reach the GPU.
    """

    text: str
    gpu: Gpu
    settings: Callable[[], tuple[int | None, float]]
    refuse: Callable[[], None]
    lose: Callable[[], None]
    sets: bool = True

    @property
    def is_virtual(self) -> bool:
        """Whether the GPU has virtual time."""
        return "simulated" in self.text


@pytest.fixture(params=NAMES)
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Case]:
    """Each back-end in turn."""
    with ExitStack() as stack:
        if request.param in MODELS:
            monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
            made = model_case(request.param)
        elif request.param == "amd":
            made = amd_case(request.getfixturevalue("amd"))
        else:
            made = nvml_case(
                request.param, request.getfixturevalue("nvml"), monkeypatch, tmp_path, stack
            )
        yield made
        made.gpu.close()


def model_case(name: str) -> Case:
    text = EMULATED if name == "emulated" else SIMULATED
    inner = open_gpu(text)
    gpu = DryRunGpu(inner) if name.startswith("dry-run") else inner

    def settings() -> tuple[int | None, float]:
        with open_gpu(text) if name == "emulated" else nullcontext(inner) as seen:
            return seen.locked_mhz, seen.power_limit_w()

    def fall_into(fault: str) -> Callable[[], None]:
        def fall() -> None:
            case.gpu.close()
            case.gpu = open_gpu(case.text + f"?fault={fault}")

        return fall

    case = Case(
        text="dry-run:" * name.startswith("dry-run") + text,
        gpu=gpu,
        settings=settings,
        refuse=fall_into("not-permitted"),
        lose=fall_into("lost@0calls"),
        sets=gpu is inner,
    )
    return case


def amd_case(amd: AmdStandIn) -> Case:  # noqa: F811
    def answer(**codes: int) -> Callable[[], None]:
        def change() -> None:
            with amd.changed() as kept:
                for name, code in codes.items():
                    setattr(kept, name, code)

        return change

    def settings() -> tuple[int | None, float]:
        assert amd.range_mhz(1) is None
        found = amd.range_mhz(0)
        return None if found is None else found[1], amd.limit_w(0)

    return Case("amd:0", open_gpu("amd:0"), settings, answer(refused=10), answer(lost=31))


def nvml_case(name: str, nvml: StandIn, monkeypatch, folder: Path, stack: ExitStack) -> Case:  # noqa: F811
    text, index = f"{name}:0", 0
    if name == "cuda":
        index = 1
        lead_cuda_to(compiled(folder, source=CUDA_SOURCE), monkeypatch)
    elif name == "zeusd":
        gpus = [KeptGpu("0000:01:00.0"), NvmlGpu(1), NvmlGpu(0)]
        stack.enter_context(FakeZeusd(folder / "zeusd.sock", gpus))
        monkeypatch.setenv("ZEUSD_SOCK_PATH", str(folder / "zeusd.sock"))
    elif name == "command":
        monkeypatch.setenv("PATH", str(commands(folder / "bin")), prepend=":")

    def refuse() -> None:
        for function in SETTING:
            nvml.fail(function, 4)

    def settings() -> tuple[int | None, float]:
        least, greatest = nvml.locked_mhz(index) or (None, None)
        assert least == greatest
        assert nvml.locked_mhz(1 - index) is None
        assert nvml.limit_w(1 - index) is None
        return greatest, nvml.limit_w(index) or 700.0

    return Case(
        text,
        open_gpu(text),
        settings,
        refuse,
        lambda: nvml.fail("*", 15),
        not name.startswith("dry-run"),
    )


def lead_cuda_to(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load `library` as libcuda.so.1 in this process; its devices are those of NVML in reverse
    order.
    """
    really = ctypes.CDLL
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name, *a, **k: really(str(library) if "cuda" in name else name, *a, **k),
    )
    monkeypatch.setenv(
        "FAKE_CUDA_UUIDS",
        ",".join(uuid.removeprefix("GPU-").replace("-", "") for uuid in UUIDS[::-1]),
    )


def commands(folder: Path) -> Path:
    """Create a folder with a `sudo` that permits everything and an `nvidia-smi` for the stand-in
    GPUs.
    """
    folder.mkdir()
    tool = Path(__file__).parents[1] / "support" / "fake_nvidia_smi.py"
    scripts = {
        "sudo": '[ "$1" = -n ] && shift; exec "$@"',
        "nvidia-smi": f'exec "{sys.executable}" "{tool}" "$@"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def test_every_back_end_is_among_those_tested():
    names = {name.split(":")[0] for name in NAMES}
    assert names | {"memory"} == set(BACK_ENDS)  # the memory clock has tests of its own


# --- identity


def test_its_text_opens_the_same_gpu_by_the_same_back_end(case: Case):
    with open_gpu(case.gpu.text) as again:
        assert again.uuid == case.gpu.uuid
        assert again.text == case.gpu.text
        assert type(again) is type(case.gpu)


def test_its_identity_is_lines_of_printable_text(case: Case):
    gpu = case.gpu
    for text in (gpu.text, gpu.uuid, gpu.name, gpu.driver, *gpu.warnings()):
        assert text
        assert text.isprintable()
    assert gpu.origin == ("simulated" if case.text.endswith((SIMULATED, EMULATED)) else "measured")


def test_what_outlives_the_process_is_said_to(case: Case):
    assert case.gpu.keeps_settings is (case.sets and "simulated" not in case.text)


@pytest.mark.parametrize(
    "which",
    ["", "999", "-1", " 0", "0 ", "0:0", "GPU-", "MIG-0", "nonsense", "\u0660", "\x00", "\n"],
)
def test_what_is_no_gpu_is_refused(case: Case, which: str):
    text = f"{case.text.rpartition(':')[0]}:{which}"
    with pytest.raises(GpuError) as error:
        open_gpu(text).close()
    assert str(error.value)


def test_closing_twice_is_harmless(case: Case):
    case.gpu.close()
    case.gpu.close()


def test_closing_sets_nothing(case: Case):
    case.gpu.set_clock_mhz(case.gpu.supported_clocks_mhz[-1])
    before = case.settings()
    case.gpu.close()
    with closing(open_gpu(case.text)):
        assert case.settings() == before


# --- the clock


def test_supported_clocks_are_whole_numbers_from_the_highest_down(case: Case):
    clocks = case.gpu.supported_clocks_mhz
    assert clocks
    assert all(type(clock) is int and clock > 0 for clock in clocks)
    assert list(clocks) == sorted(set(clocks), reverse=True)


def test_a_clock_that_is_set_is_locked_and_a_reset_undoes_it(case: Case):
    free = case.settings()
    for clock_mhz in (case.gpu.supported_clocks_mhz[0], case.gpu.supported_clocks_mhz[-1]):
        case.gpu.set_clock_mhz(clock_mhz)
        assert case.settings() == ((clock_mhz, free[1]) if case.sets else free)
    case.gpu.reset_clocks()
    assert case.settings() == free == (None, free[1])


def test_resetting_what_is_not_set_is_harmless(case: Case):
    free = case.settings()
    for _ in range(2):
        case.gpu.reset_clocks()
        case.gpu.reset_power_limit()
    assert case.settings() == free


def test_a_clock_that_is_not_supported_is_refused_with_the_nearest(case: Case):
    clocks = case.gpu.supported_clocks_mhz
    for wrong_mhz, nearest_mhz in (
        (0, clocks[-1]),
        (-clocks[0], clocks[-1]),
        (clocks[-1] - 1, clocks[-1]),
        (clocks[0] + 1, clocks[0]),
        (clocks[5] + 1, clocks[5]),
        (10**9, clocks[0]),
    ):
        with pytest.raises(
            GpuError, match=rf" {wrong_mhz} MHz.* nearest supported clock is {nearest_mhz} MHz"
        ):
            case.gpu.set_clock_mhz(wrong_mhz)
    assert case.settings()[0] is None


# --- the power limit


def test_the_power_limits_are_around_the_one_in_force(case: Case):
    least_w, greatest_w = case.gpu.power_limits_w
    assert 0 < least_w <= case.gpu.power_limit_w() <= greatest_w


def test_a_power_limit_that_is_set_holds_and_a_reset_undoes_it(case: Case):
    free = case.settings()
    for limit_w in (*case.gpu.power_limits_w, case.gpu.power_limits_w[0] + 12.345):
        case.gpu.set_power_limit_w(limit_w)
        assert case.settings() == ((None, pytest.approx(limit_w, abs=5e-4)) if case.sets else free)
        assert case.gpu.power_limit_w() == pytest.approx(case.settings()[1], abs=5e-4)
    case.gpu.reset_power_limit()
    assert case.settings() == free


def test_a_power_limit_out_of_range_is_refused_with_the_range(case: Case):
    least_w, greatest_w = case.gpu.power_limits_w
    free = case.settings()
    for wrong_w in (
        least_w - 0.5,
        greatest_w + 0.5,
        0.0,
        -least_w,
        float("nan"),
        float("inf"),
        -float("inf"),
    ):
        with pytest.raises(GpuError, match=rf"{wrong_w:g} W.*{least_w:g} to {greatest_w:g} W"):
            case.gpu.set_power_limit_w(wrong_w)
    assert case.settings() == free


# --- readings


def test_energy_never_falls_and_grows_with_time(case: Case):
    energies_j = [case.gpu.energy_j()]
    for _ in range(5):
        case.gpu.wait(1.0 if case.is_virtual else 0.02)
        energies_j.append(case.gpu.energy_j())
    assert energies_j == sorted(energies_j)
    assert energies_j[-1] > energies_j[0]


def test_time_never_goes_back_and_waiting_lets_it_pass(case: Case):
    times_s = [case.gpu.now_s()]
    for duration_s in (0.0, 0.01, 0.02):
        case.gpu.wait(duration_s)
        times_s.append(case.gpu.now_s())
        assert times_s[-1] - times_s[-2] >= duration_s - 1e-9
    assert case.gpu.now_s() >= times_s[-1]


def test_readings_are_in_their_units(case: Case):
    case.gpu.wait(0.2 if case.is_virtual else 0.0)
    assert 1 < case.gpu.power_w() < 2000
    assert 10 < case.gpu.temperature_c() < 120
    assert 100 < case.gpu.clock_mhz() <= case.gpu.supported_clocks_mhz[0]


def test_throttle_reasons_are_those_that_the_protocol_names(case: Case):
    assert case.gpu.throttle_reasons() <= set(THROTTLE_REASONS)
    before = dict(case.gpu.throttled_s())
    assert before.keys() <= set(THROTTLE_REASONS)
    case.gpu.wait(0.01)
    after = case.gpu.throttled_s()
    assert all(after[reason] >= time_s >= 0 for reason, time_s in before.items())


# --- what goes wrong


def test_what_may_not_be_set_is_not_permitted_and_reading_goes_on(case: Case):
    case.refuse()
    if case.sets:
        for setting in (
            lambda: case.gpu.set_clock_mhz(case.gpu.supported_clocks_mhz[0]),
            lambda: case.gpu.set_power_limit_w(case.gpu.power_limits_w[0]),
        ):
            with pytest.raises(GpuNotPermitted):
                setting()
    else:  # a dry run needs no permission
        case.gpu.set_clock_mhz(case.gpu.supported_clocks_mhz[0])
        case.gpu.set_power_limit_w(case.gpu.power_limits_w[0])
    for reading in READINGS:
        reading(case.gpu)


def test_a_gpu_that_is_lost_is_said_to_be(case: Case):
    clock_mhz = case.gpu.supported_clocks_mhz[0]
    case.lose()
    for reading in READINGS:
        with pytest.raises(GpuLost):
            reading(case.gpu)
    if case.sets:
        with pytest.raises(GpuLost):
            case.gpu.set_clock_mhz(clock_mhz)
        with pytest.raises(GpuLost):
            case.gpu.reset_clocks()


# --- the dry run


@pytest.mark.parametrize("case", ["dry-run:nvml", "dry-run:simulated"], indirect=True)
def test_a_dry_run_changes_nothing_underneath(case: Case):
    free, time_s = case.settings(), case.gpu.now_s()
    case.gpu.set_clock_mhz(case.gpu.supported_clocks_mhz[-1])
    case.gpu.set_power_limit_w(case.gpu.power_limits_w[0])
    assert case.settings() == free
    case.gpu.reset_clocks()
    case.gpu.reset_power_limit()
    assert case.settings() == free
    assert case.gpu.power_limit_w() == free[1]
    if case.gpu.origin == "simulated":
        assert case.gpu.now_s() == time_s


@pytest.mark.parametrize("name", ["nvml", "zeusd", "command"])
def test_a_power_limit_without_effect_is_an_error(
    name: str,
    nvml: StandIn,  # noqa: F811
    monkeypatch,
    tmp_path: Path,
):
    with ExitStack() as stack:
        case = nvml_case(name, nvml, monkeypatch, tmp_path, stack)
        gpu = stack.enter_context(case.gpu)
        gpu.set_power_limit_w(400.0)
        nvml.fail("nvmlDeviceSetPowerManagementLimit", 0)
        with pytest.raises(GpuError) as caught:
            gpu.set_power_limit_w(300.0)
    assert str(caught.value) == (
        f"{name}:{UUIDS[0]}: its power limit was set to 300 W, and is 400 W: stop what else sets "
        "it (Slurm, DCGM, another user of nvidia-smi), or use observe mode"
    )
