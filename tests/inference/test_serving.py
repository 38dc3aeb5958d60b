"""Requests are measured over clocks, prefill and decode apart, and what they cost becomes an
inference profile.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import open_emulated
from perseus_planner.inference.serving import (
    ServedRow,
    ServingSettings,
    Shape,
    measure_serving,
    save_served,
)
from perseus_planner.inference.targets import CompletionsServer, ServingFunction, open_target

GPU = "emulated:a100-sxm/0?slower=60"
SERVER = Path(__file__).parents[1] / "support" / "completions_server.py"
SHORT, LONG = Shape(64, 1), Shape(64, 8)


@pytest.fixture(autouse=True, scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def address(state: None) -> Iterator[str]:
    """Start a server with a tiny model of random weights, and return its address."""
    with subprocess.Popen(
        [sys.executable, str(SERVER), GPU], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_a_server_is_measured_at_several_clocks(address: str, tmp_path: Path):
    settings = ServingSettings((LONG, SHORT), (1, 2), settings=(1410, 705), window_s=0.3, windows=1)
    steps: list[tuple[int, int]] = []
    with open_gpu(GPU) as gpu, closing(open_target(address)) as target:
        rows = measure_serving(target, [gpu], settings, lambda *step: steps.append(step))
    assert [(row.setting, row.batch, row.shape) for row in rows] == [
        (clock, batch, shape)
        for clock in (1410, 705)
        for batch in (1, 2)
        for shape in (SHORT, LONG)
    ]
    assert steps[-1] == (12, 12)
    by = {(row.setting, row.batch, row.shape): row for row in rows}
    fast, slow = by[1410, 1, LONG], by[705, 1, LONG]
    # The prefill is arithmetic, so half the clock makes it slower; the decode is memory traffic.
    assert slow.ttft_p50_s > 1.5 * fast.ttft_p50_s
    assert fast.tbt_p50_s is not None
    assert slow.tbt_p50_s is not None
    assert slow.tbt_p50_s < 1.5 * fast.tbt_p50_s
    assert slow.energy_j < fast.energy_j
    assert fast.energy_j == fast.prefill_j + fast.decode_j
    assert by[1410, 1, SHORT].energy_j == by[1410, 1, SHORT].prefill_j == fast.prefill_j
    assert all(row.error_j < 0.1 * row.energy_j for row in rows)
    assert all(row.ttft_p50_s <= row.ttft_p95_s for row in rows)
    with open_emulated(GPU.removeprefix("emulated:")) as after:
        assert after.clock_mhz() == 1410  # it is reset

    save_served(rows, "clock", "simulated", tmp_path / "inference.csv")
    comment, header, first, *_ = (tmp_path / "inference.csv").read_text().splitlines()
    assert comment == "# simulated by planner inference profile"
    assert header.startswith(
        "input,output,tensor_degree,clock_mhz,tokens_per_s,energy_j,ttft_s,tbt_s,idle_w,batch,"
    )
    assert first.startswith("64,1,1,1410,")
    assert "nan" not in first


def test_a_server_that_cannot_be_measured_is_refused(address: str):
    with pytest.raises(UsageError, match=r"has no model 'huge'; choose one of: tiny$"):
        CompletionsServer(address, "huge")
    server = CompletionsServer(address.removesuffix("/v1"))
    server._model = "gone"
    with pytest.raises(
        UsageError,
        match=r"completions: answers 400: .*no such model.*; check the address and the model$",
    ):
        server.serve(1, 4, 1)
    with pytest.raises(
        UsageError, match=r"does not answer as OpenAI's completions API does \(.*; start the server"
    ):
        CompletionsServer("http://127.0.0.1:9")


def steps(batch: int, input_tokens: int, output_tokens: int) -> Iterator[None]:
    """Compute on the emulated GPU as a model does that serves a batch."""
    from completions_server import DECODE, PREFILL

    with open_emulated(GPU.removeprefix("emulated:")) as gpu:
        for step in range(output_tokens):
            gpu.run(DECODE if step else PREFILL * (batch * input_tokens))
            yield


def too_few(batch: int, input_tokens: int, output_tokens: int) -> Iterator[None]:
    yield from [None] * (output_tokens - 1)


def measured(**settings: object) -> list[ServedRow]:
    with open_gpu(GPU) as gpu:
        chosen = ServingSettings((LONG,), (2,), window_s=0.2, windows=2, **settings)  # type: ignore[arg-type]
        return measure_serving(ServingFunction(f"{__name__}:steps"), [gpu], chosen)


def test_a_function_is_measured_under_power_limits():
    high, low = measured(control="power-limit", settings=(400, 150))
    assert low.time_s > high.time_s
    assert (high.setting, low.setting) == (400, 150)
    assert high.tokens_per_s == pytest.approx(2 * 72 / high.time_s)


def test_without_a_control_the_row_has_the_clock_that_was_achieved():
    (row,) = measured(control="observed")
    assert 1000 < row.setting <= 1410  # its power limit keeps it below the highest clock at times
    assert row.tensor_degree == 1


def test_a_function_that_cannot_be_measured_is_refused():
    with pytest.raises(
        UsageError,
        match=r"^nowhere:f: No module named 'nowhere'; name a function as module:function",
    ):
        open_target("nowhere:f")
    with pytest.raises(
        UsageError, match=r"yielded 7 times for 8 output tokens; yield once for each$"
    ):
        ServingFunction(f"{__name__}:too_few").serve(1, *LONG)
    with pytest.raises(
        UsageError, match=r"^--model tiny: serving:f is not a server; leave it out$"
    ):
        open_target("serving:f", "tiny")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"control": "voltage"},
            "control: 'voltage' is unknown; choose one of: clock, power-limit, observed",
        ),
        (
            {"control": "observed", "settings": (1410,)},
            "control='observed' sets nothing; leave out the settings",
        ),
        ({"batches": ()}, "there is nothing to measure; give a class of requests and a batch"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings: dict[str, object], problem: str):
    with pytest.raises(UsageError, match=f"^{problem}$"):
        ServingSettings((LONG,), **settings)  # type: ignore[arg-type]


def test_a_clock_that_the_gpu_lacks_is_refused():
    with pytest.raises(
        UsageError, match=r"^clock 1000 MHz: the GPU does not have it; the nearest is 1005 MHz$"
    ):
        measured(settings=(1000,))
