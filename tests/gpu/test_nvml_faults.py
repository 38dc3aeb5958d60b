"""With any NVML library, each method returns a plausible value or raises an error that says what
to do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from fake_nvml import UUIDS, StandIn, loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_exercise import READINGS, SETTINGS, check_refused, exercised, failed

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu.nvml.device import visible_gpus

FUNCTIONS = {
    # function -> the methods that cannot do without it; none where an older function stands in, or
    # nothing is lost
    "nvmlInitWithFlags": {"open"},
    "nvmlShutdown": set(),
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlDeviceGetCount_v2": {"open"},
    "nvmlDeviceGetHandleByIndex_v2": {"open"},
    "nvmlDeviceGetUUID": {"open"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetVirtualizationMode": set(),
    "nvmlDeviceGetSupportedMemoryClocks": {"supported_clocks_mhz", "set_clock_mhz"},
    "nvmlDeviceGetSupportedGraphicsClocks": {"supported_clocks_mhz", "set_clock_mhz"},
    "nvmlDeviceGetClockInfo": set(),
    "nvmlDeviceGetTotalEnergyConsumption": set(),
    "nvmlDeviceGetFieldValues": set(),
    "nvmlDeviceGetTemperatureV": set(),
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetPersistenceMode": set(),
    "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles": set(),
    "nvmlDeviceGetEnforcedPowerLimit": set(),
    "nvmlDeviceGetPowerManagementLimit": {"reset_power_limit"},
    "nvmlDeviceGetPowerManagementDefaultLimit": {"reset_power_limit"},
    "nvmlDeviceGetPowerManagementLimitConstraints": {"power_limits_w", "set_power_limit_w"},
    "nvmlDeviceSetGpuLockedClocks": {"set_clock_mhz"},
    "nvmlDeviceResetGpuLockedClocks": {"reset_clocks"},
    "nvmlDeviceSetPowerManagementLimit": {"set_power_limit_w"},
}

CODES = (*range(1, 31), 999, 4242, 4294967295)

KINDS = {
    3: GpuNotSupported,
    13: GpuNotSupported,
    21: GpuNotSupported,
    4: GpuNotPermitted,
    15: GpuLost,
    16: GpuLost,
}


class Without:
    """A library that lacks a function, which ctypes reports as a missing attribute."""

    def __init__(self, library: Path, absent: str) -> None:
        self._library, self._absent = ctypes.CDLL(str(library)), absent

    def __getattr__(self, name: str) -> object:
        if name == self._absent:
            raise AttributeError(name)
        return getattr(self._library, name)


def test_the_table_of_functions_is_whole(nvml: StandIn):
    outcome = exercised("nvml:0")
    assert set(outcome) == {*READINGS, *SETTINGS}
    assert not failed(outcome)
    assert nvml.called() == {*FUNCTIONS}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_error_of_every_function_says_what_to_do(nvml: StandIn, function: str):
    for code in CODES:
        nvml.heal()
        nvml.fail(function, code)
        outcome = exercised("nvml:0")
        kind = KINDS.get(code, GpuError)
        for method in FUNCTIONS[function] & {*outcome}:
            assert isinstance(outcome[method], kind), (code, method, outcome[method])


def test_a_library_that_calls_a_question_invalid_is_asked_in_another_way(nvml: StandIn):
    nvml.fail("nvmlDeviceGetFieldValues", 2)
    assert not failed(exercised("nvml:0"))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_success_without_an_answer_is_never_a_reading(nvml: StandIn, function: str):
    nvml.add("* throttle 0x40")
    healthy = exercised("nvml:0", settings=False)
    nvml.fail(function, 0)
    outcome = exercised("nvml:0", settings=False)
    changed = (
        {name for name in outcome if outcome[name] != healthy.get(name)}
        - failed(outcome)
        - {"energy_j"}
    )
    unknowable = {
        "nvmlDeviceGetCurrentClocksEventReasons": {
            "throttle_reasons"
        },  # no bit set is a good answer
        "nvmlDeviceGetFieldValues": {"throttled_s"},  # left out
        "nvmlDeviceGetPersistenceMode": {"warnings"},  # off is a good answer
    }
    assert changed <= unknowable.get(function, set())


@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_every_function_may_be_missing(nvml: StandIn, nvml_library: Path, function: str):
    with loaded(Without(nvml_library, function)):
        outcome = exercised("nvml:0")
    methods = FUNCTIONS[function]
    assert failed(outcome) == methods
    for method in methods:
        assert isinstance(outcome[method], GpuNotSupported)
        assert function.removesuffix("_v2").removesuffix("WithFlags") in str(outcome[method])


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetTemperatureV", "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"]
)
def test_an_older_binding_may_lack_functions_too(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch, function: str
):
    import pynvml

    monkeypatch.delattr(pynvml, function)
    monkeypatch.delattr(pynvml, "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t")
    assert not failed(exercised("nvml:0"))


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (9, "load the NVIDIA driver .*--gpus all"),
        (18, "have different versions: reboot the node"),
        (17, "allow /dev/nvidia"),
        (
            12,
            "install that, or name the library's folder in LD_LIBRARY_PATH; .*--gpus "
            "all.*simulated:",
        ),
        (999, "dmesg"),
    ],
)
def test_where_nvml_cannot_start_the_remedy_is_said_and_a_later_start_succeeds(
    nvml: StandIn, code: int, remedy: str
):
    nvml.fail("nvmlInitWithFlags", code)
    with pytest.raises(
        GpuError, match=f"NVML: cannot start: NVML returns .* from nvmlInit; .*{remedy}"
    ):
        visible_gpus()
    check_refused("nvml:0", GpuError, "NVML: cannot start")
    nvml.heal()
    assert len(visible_gpus()) == 2


def test_without_the_library_what_brings_it_is_said(nvml: StandIn, monkeypatch: pytest.MonkeyPatch):
    import pynvml

    def not_found(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(pynvml, "CDLL", not_found)
    with (
        loaded(None),
        pytest.raises(GpuError, match=r"libnvidia-ml\.so\.1 comes with the NVIDIA driver"),
    ):
        visible_gpus()


def test_why_a_library_does_not_load_is_said(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import pynvml

    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_text("not a library")
    monkeypatch.setattr(pynvml, "CDLL", lambda _: ctypes.CDLL(str(broken)))
    with loaded(None), pytest.raises(GpuError) as caught:
        visible_gpus()
    assert str(caught.value).startswith(f"NVML: cannot start: {broken}: ")
    assert (
        "; the library that was found does not load: install that of this node's driver, "
        in str(caught.value)
    )


def listed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Have pip take these packages for installed, and no others."""

    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return "13.615.71"

    monkeypatch.setattr(metadata, "version", version)


def test_without_the_binding_what_installs_it_is_said(monkeypatch: pytest.MonkeyPatch):
    listed(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    check_refused("nvml:0", GpuError, r"run `pip install '\.\[nvml\]'` in your clone")


def test_where_uninstalling_another_package_took_the_binding_it_is_to_be_installed_by_force(
    monkeypatch: pytest.MonkeyPatch,
):
    listed(monkeypatch, "nvidia-ml-py")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    check_refused(
        "nvml:0",
        GpuError,
        r"; pip lists it as installed, but its file pynvml\.py is gone, as after `pip uninstall "
        r"nvidia-ml-py3`, whose file has the same name; "
        r"run `pip install --force-reinstall nvidia-ml-py`$",
    )


def test_a_folder_that_hides_the_binding_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    check_refused("nvml:0", GpuError, r"pip uninstall pynvml`, then run `pip install '\.\[nvml\]'`")


OF_2017 = """
class NVMLError(Exception):
    value = 999

def _nvmlGetFunctionPointer(name):
    raise NVMLError

def nvmlInit():
    return None

def nvmlDeviceGetCount():
    return 1

def nvmlDeviceGetPowerUsage(handle):
    return 100000
"""
"""What a module of the year 2017 has of what is asked first; it lacks locked clocks and energy."""


def test_a_module_of_2017_over_the_binding_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pynvml.py").write_text(OF_2017)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    refusal = (
        rf"^NVML needs nvidia-ml-py, but `import pynvml` finds a module from before its version 11 "
        rf"\({tmp_path}/pynvml\.py\), such as that of 2017 with which nvidia-ml-py3 overwrites it; "
        r"run `pip install --force-reinstall nvidia-ml-py`$"
    )
    check_refused("nvml:0", GpuError, refusal)
    with pytest.raises(GpuError, match=refusal):
        visible_gpus()


def test_a_name_that_is_no_text_is_refused(nvml: StandIn):
    nvml.script.write_bytes(b"* uuid GPU-1\n0 name \xff\xfe\xff\n")
    assert failed(exercised("nvml:0")) == {"name"}


def test_memory_that_runs_out_in_the_binding_is_no_traceback(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
):
    import pynvml

    def too_much(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedMemoryClocks", too_much)
    assert failed(exercised("nvml:0")) == {"supported_clocks_mhz", "set_clock_mhz"}


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
ODD = st.sampled_from(
    [0, 1, 405, 1980, 70_000, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
)
FIELD = st.one_of(
    ODD.map(str),
    st.sampled_from(["untouched", "error 2", "error 3", "error 4", "error 15", "error 999"]),
)


@settings(max_examples=150, suppress_health_check=SUPPRESSED)
@given(
    numbers=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            (
                "gpus",
                "power_w",
                "clock_mhz",
                "temperature_c",
                "throttle",
                "energy_mj",
                "mig",
                "profiles",
            ),
            ODD,
        ),
    ),
    lists=st.fixed_dictionaries(
        {},
        optional={
            key: st.lists(ODD, max_size=4) for key in ("clocks", "memory_clocks", "limit_mw")
        },
    ),
    fields=st.dictionaries(
        st.sampled_from([74, 76, 83, 186, 191, 251, 269, 270, 271, "186_1", "191_1"]), FIELD
    ),
    failing=st.dictionaries(
        st.sampled_from(sorted(FUNCTIONS)), st.sampled_from([0, *CODES]), max_size=4
    ),
)
def test_odd_answers_give_sane_values_or_errors(nvml: StandIn, numbers, lists, fields, failing):
    said = [f"* {key} {value}" for key, value in numbers.items()]
    said += [f"* {key} {' '.join(map(str, values))}" for key, values in lists.items()]
    said += [f"* field_{field} {value}" for field, value in fields.items()]
    said += [f"* error {function} {code}" for function, code in failing.items()]
    with nvml.saying(*said):
        exercised("nvml:0")
        exercised(f"nvml:{UUIDS[1]}", settings=False)


def test_another_library_is_as_good_or_says_what_to_do():
    """Lock the top clock and set the largest power limit of each GPU of the library, and reset
    both.
    """
    path = os.environ.get("PLANNER_NVML_LIBRARY")
    if not path:
        pytest.skip("name another libnvidia-ml.so.1 in PLANNER_NVML_LIBRARY to test with it")
    with loaded(Path(path)):
        for gpu in visible_gpus():
            for name, value in exercised(gpu.text).items():
                print(f"{gpu.index} {name}: {value!r}")
