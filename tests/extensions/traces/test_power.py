"""Logs of power: their formats, and the watts that they show."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.power import Samples, fit_power, read_power
from perseus_planner.extensions.traces.saving import find_gpu, guess_gpu

STAMP = datetime(2026, 11, 28, 12, 0, 0, 500_000).timestamp()


def _log(folder: Path, text: str, name: str = "power.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_nvidia_smi_query(tmp_path: Path):
    (of_0, of_1) = read_power(
        _log(
            tmp_path,
            "timestamp, index, power.draw.instant [W], clocks.current.sm [MHz]\n"
            "2026/11/28 12:00:00.500, 0, 345.12 W, 1335 MHz\n"
            "2026/11/28 12:00:00.500, 1, 85.50 W, 1410 MHz\n"
            "2026/11/28 12:00:00.700, 0, [N/A], 1320 MHz\n"
            "2026/11/28 12:00:00.7",
        )
    )
    assert (of_0.gpu, of_1.gpu) == ("0", "1")
    assert of_0.times_s.tolist() == [STAMP]
    assert of_0.power_w.tolist() == [345.12]
    assert of_1.clock_mhz is not None
    assert of_1.clock_mhz.tolist() == [1410.0]


def test_gpus_are_in_the_order_of_their_numbers(tmp_path: Path):
    lines = [f"2026/11/28 12:00:00.500, {gpu}, {100 + gpu}.00 W, 1335 MHz\n" for gpu in range(12)]
    head = "timestamp, index, power.draw.instant [W], clocks.current.sm [MHz]\n"
    found = read_power(_log(tmp_path, head + "".join(lines)))
    assert [each.gpu for each in found] == [str(gpu) for gpu in range(12)]
    assert [float(each.power_w[0]) for each in found] == [100.0 + gpu for gpu in range(12)]


def test_nvidia_smi_dmon(tmp_path: Path):
    (of_0,) = read_power(
        _log(
            tmp_path,
            "#Date, Time, gpu, pwr, gtemp, mtemp, mclk, pclk\n"
            "#YYYYMMDD, HH:MM:SS, Idx, W, C, C, MHz, MHz\n"
            "20261128, 12:00:00, 0, 350, 61, -, 1593, 1335\n",
        )
    )
    assert of_0.times_s.tolist() == [STAMP - 0.5]
    assert of_0.power_w.tolist() == [350.0]
    assert of_0.clock_mhz is not None
    assert of_0.clock_mhz.tolist() == [1335.0]


def test_prometheus(tmp_path: Path):
    def series(name: str, values: list[str]) -> dict[str, object]:
        metric = {"__name__": name, "gpu": "0", "Hostname": "node1"}
        return {
            "metric": metric,
            "values": [[STAMP + 15 * i, each] for i, each in enumerate(values)],
        }

    answer = {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                series("DCGM_FI_DEV_POWER_USAGE", ["350.5", "341"]),
                series("DCGM_FI_DEV_SM_CLOCK", ["1335", "1320"]),
                series("DCGM_FI_DEV_GPU_TEMP", ["61", "62"]),
            ],
        },
    }
    (of_0,) = read_power(_log(tmp_path, json.dumps(answer), "power.json"))
    assert of_0.gpu == "node1:0"
    assert of_0.power_w.tolist() == [350.5, 341.0]
    assert of_0.clock_mhz is not None
    assert of_0.clock_mhz.tolist() == [1335.0, 1320.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timestamp, index\n", "has no timestamp and power.draw; log with nvidia-smi --query-gpu="),
        ("timestamp, power.draw [W]\nnoon, 3 W\n", "line 2: 'noon' is not a time as nvidia-smi wr"),
        ("timestamp, power.draw [W]\n2026/11/28 12:00:00\n2026/11/28 12:00:01, 3\n",
         "line 2: has 1 cells where the header has 2; log it again"),
        ("#gpu, pwr\n0, 3\n", "line 2: the columns Date, Time and pwr are missing; log with nvidi"),
        ('{"data": 3}', "is not an answer of Prometheus' query_range"),
        ("timestamp, power.draw [W]\n2026/11/28 12:00:00, [N/A]\n", "has no power of a GPU; log"),
    ],
)  # fmt: skip
def test_other_logs_are_refused(tmp_path: Path, text: str, said: str):
    with pytest.raises(UsageError) as refusal:
        fit_power(read_power(_log(tmp_path, text)), [[(0.0, 1.0)]], (0.0, 1.0), 85.0)
    assert said in str(refusal.value)


def _made(
    step_s: float, offset_s: float, seed: int = 0
) -> tuple[list[Samples], list[list[tuple[float, float]]], tuple[float, float]]:
    """Logs and activity of two GPUs: bursts of 50 to 400 ms, at 350 W and 85 W waiting."""
    random = np.random.default_rng(seed)
    logs = []
    busy = []
    for gpu in range(2):
        at_s = 1000.0
        spans = []
        while at_s < 1070.0:
            length_s = random.uniform(0.05, 0.4)
            spans.append((at_s, at_s + length_s))
            at_s += length_s + random.uniform(0.02, 0.5)
        busy.append(spans)
        fine_s = np.arange(1000.0, 1070.0, 0.001)
        watts = np.full(len(fine_s), 85.0)
        for begin_s, end_s in spans:
            watts[(fine_s >= begin_s) & (fine_s < end_s)] = 350.0
        count = round(step_s / 0.001)
        means = watts[: len(watts) // count * count].reshape(-1, count).mean(axis=1)
        times_s = 1000.0 + step_s * np.arange(1, len(means) + 1) - offset_s
        noisy = means + random.normal(0.0, 4.0, len(means))
        logs.append(Samples(str(gpu), times_s, noisy, np.full(len(means), 1335.0)))
    return logs, busy, (1000.0, 1070.0)


@pytest.mark.parametrize(
    ("step_s", "offset_s", "within_w"), [(0.1, 0.0, 2.0), (0.1, 0.43, 2.0), (1.0, 0.25, 8.0)]
)
def test_watts_are_found_and_the_offset_of_the_logs_clock_with_them(
    step_s: float, offset_s: float, within_w: float
):
    seen = fit_power(*_made(step_s, offset_s), assumed_waiting_w=70.0)
    assert seen.computing_w == pytest.approx(350.0, abs=within_w)
    assert seen.waiting_w == pytest.approx(85.0, abs=within_w)
    assert seen.clock_mhz == 1335.0


def test_a_log_of_another_time_gives_the_mean(tmp_path: Path):
    logs, busy, span_s = _made(0.1, 0.0)
    later = [each._replace(times_s=each.times_s + 9000.0) for each in logs]
    seen = fit_power(later, busy, span_s, assumed_waiting_w=85.0)
    assert seen.waiting_w is None
    assert seen.computing_w == pytest.approx(350.0, abs=12.0)


def test_too_few_samples_are_refused():
    logs, busy, span_s = _made(0.1, 0.0)
    few = [Samples(gpu, times[:7], watts[:7], None) for gpu, times, watts, _ in logs]
    with pytest.raises(UsageError, match=r"^--power: 7 samples of GPU 0 are too few for its watts"):
        fit_power(few, busy, span_s, assumed_waiting_w=85.0)


def test_what_is_seen_overrules_what_is_assumed():
    """GPT-3's rows draw 475 W where the entry has 400: believed, it capped the top clocks."""
    logs, busy, span_s = _made(0.1, 0.0)
    hot = [each._replace(power_w=each.power_w * 475 / 350) for each in logs]
    seen = fit_power(hot, busy, span_s, assumed_waiting_w=85.0)
    guess = guess_gpu("a100-sxm", ["F", "B"], seen)
    assert guess.computing_w["F"].usual == pytest.approx(475.0, abs=4.0)
    assert guess.clock_mhz.usual == 1335.0
    assert any("its limit was raised, and what was seen counts" in each for each in guess.sources)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A40", "a40"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_of_devices(device: str, name: str):
    assert find_gpu(None, device) == name
