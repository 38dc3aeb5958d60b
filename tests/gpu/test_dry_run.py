"""The back-end `dry-run:`; test_contract.py tests what all back-ends have in common."""

from __future__ import annotations

import math

import pytest
from nvml_exercise import refusal_of

from perseus_planner.base.errors import GpuError
from perseus_planner.gpu.wrappers import open_dry_run

A100 = "simulated:a100-sxm"


def test_a_setting_that_the_gpu_would_refuse_is_refused():
    gpu = open_dry_run(A100)
    with pytest.raises(GpuError) as error:
        gpu.set_clock_mhz(1201)
    assert str(error.value) == (
        "simulated:a100-sxm: cannot lock its clock at 1201 MHz; the nearest supported clock is "
        "1200 MHz, and all are from 210 to 1410 MHz"
    )
    for limit_w in (99.0, 401.0, math.nan, math.inf):
        with pytest.raises(GpuError) as error:
            gpu.set_power_limit_w(limit_w)
        assert str(error.value) == (
            f"simulated:a100-sxm: cannot set its power limit to {limit_w:g} W; choose 100 to 400 W"
        )


def test_its_text_names_what_is_read():
    assert open_dry_run(f"{A100}?seed=3").text == f"dry-run:{A100}?seed=3"
    assert open_dry_run(f"dry-run:{A100}").text == f"dry-run:dry-run:{A100}"


def test_it_says_that_nothing_is_set():
    assert open_dry_run(A100).warnings() == (
        "nothing is set in a dry run: the GPU keeps the clock it has; do not plan with this "
        "profile",
    )


@pytest.mark.parametrize(
    ("which", "advice"),
    [
        (
            "",
            "choose one of: nvml, cuda, zeusd, command, amd, dry-run, memory, simulated, emulated",
        ),
        ("a100-sxm", "did you mean simulated:a100-sxm?"),
    ],
)
def test_what_is_no_gpu_is_refused(which: str, advice: str):
    assert (
        refusal_of(f"dry-run:{which}") == f"GPU {which!r}: there is no back-end {which!r}; {advice}"
    )
